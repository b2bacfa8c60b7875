"""Exhaustive search of the runs of a small job with snapshots.

A state has parts: one for each process, connection, channel of events, and for the launcher. The
search visits each state once, and lets each possible next event happen in it:

- the first event of any channel: an arrival at a process, the end of a write, an action of the
  launcher;
- a timer of a process, at any moment, also so late that a lost connection counts as ended;
- the faults that are left: the death of any process, and the break of any connection.

An event reads and changes only the process that handles it, the connections of this process, and
possibly the launcher. It can add events to any channel. So its effect is learned once from the
simulated processes, and reused in all states in which these parts are equal. Each learned effect
is compared with the real states before and after it, so a wrong assumption ends the search.

Three rules merge equal states. Entries of a dict have no order (`tools.simulate.state_digest`).
Actions of the launcher without effect are dropped, such as the report of a failure in an earlier
generation. Messages that a server ignores are dropped: messages of a closed connection on which the
client has not greeted the server in the server's generation.

Processes cannot be copied. So to reach a state, the events that lead to it are repeated.

The search checks the promises of `judge_snapshots`. It also finds states from which the job cannot
end, and runs with more restarts than failures.

Limits: deadlines never pass. The time between two checks of a server has no lower limit, but a lost
connection counts as ended at any moment. A process that is started begins at once, and a client
greets as soon as it is connected. Computations of trainers take no time: a message that arrives
during a computation counts as if it arrives afterwards. Messages that a process sent before its
death arrive.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Hashable, Iterator
from typing import Any

from tools.simulate.case import Case
from tools.simulate.choices import (
    GENERATION,
    GREETINGS,
    KILLED,
    LISTENERS,
    Choice,
    ChosenJob,
    LinkState,
    Part,
    Parts,
    RoleState,
    without_times,
)
from tools.simulate.launcher import SNAPSHOT


FAULTS: Part = ("faults", "")  # the part of the state with the faults that are left
ALL: Part = ("all", "")  # all parts that the launcher uses, together
# maximum number of states; without a limit, a channel that grows would exhaust the memory
MOST = 2_000_000


def small_case(
    *, steps: int = 2, servers: int = 1, quorum: int = 0, replaces: bool = False
) -> Case:
    """Return a job of two trainers with a snapshot after each step, in which no deadline passes."""
    sizes = ((2,),) * servers
    return Case(
        seed=0,
        mode="sync",
        steps=(steps, steps),
        servers=sizes,
        snapshots=1,
        deadline=1e9,
        quorum=quorum,
        replaces=replaces,
    )


@dataclasses.dataclass(frozen=True)
class Exploration:
    """Result of a search.

    Attributes:
      case: the explored case.
      states: number of states.
      transitions: number of events that lead from one state to another.
      learned: number of different effects of events.
      runs: number of runs of the simulated processes.
      ends: number of states in which the job has ended.
      faults: violated promises; empty if all promises hold.
      events: events that lead to the faults.
    """

    case: Case
    states: int
    transitions: int
    learned: int
    runs: int
    ends: int
    faults: tuple[str, ...] = ()
    events: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{self.states:,} states, {self.transitions:,} transitions, {self.ends:,} ends "
            f"({self.learned:,} effects learned in {self.runs:,} runs)"
        )
        if not self.faults:
            return f"{text}\nas it must be"
        shown = "".join(f"\n  {x}" for x in (*self.events, "wrong:", *self.faults))
        return f"{text}\n{shown}"


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of an event.

    Attributes:
      parts: new value of each changed part; None if the part is removed.
      channels: changes of channels (`ChosenJob.changes`).
      may_end: True if a process starts or ends, or a connection or a generation changes. Other
        events and connections may then have no effect any more.
    """

    parts: dict[Part, Hashable]
    channels: list[tuple[Any, Any]]
    may_end: bool = True


class FoundFaultError(Exception):
    """Signal that ends the search: a promise is violated.

    Attributes:
      faults: the violated promises.
      choices: the events that lead there.
    """

    def __init__(self, faults: tuple[str, ...], choices: list[Choice]) -> None:
        super().__init__(*faults)
        self.faults, self.choices = faults, choices


class Explorer:
    """Search of all runs of a case.

    Args:
      case: the case, with snapshots and without events.
      deaths: number of deaths of processes.
      breaks: number of breaks of connections.
      roles: names of the roles that may die; by default, all roles.

    Example:
      >>> from tools.simulate.explore import Explorer, small_case
      >>> found = Explorer(small_case(steps=1), deaths=0).run()
      >>> found.faults, found.ends > 0
      ((), True)
    """

    def __init__(
        self, case: Case, *, deaths: int = 1, breaks: int = 0, roles: Collection[str] | None = None
    ) -> None:
        self._case, self._budget, self._mortal = case, (deaths, breaks), roles
        self._effects: dict[Hashable, list[tuple[tuple[Part, ...], dict[Hashable, Effect]]]] = {}
        self._learned = self._runs = 0
        self._job: ChosenJob | None = None
        self._job_parts: Parts | None = None  # state of the job, if it is known
        # for each state: the state from which it was found, and the event
        self._from: list[tuple[int, Choice | None]] = []
        self._next: list[list[int]] = []
        self._ends: list[int] = []

    def run(self) -> Exploration:
        """Search until all states are visited, or a promise is violated."""
        faults, choices = tuple[str, ...](), list[Choice]()
        with without_times():
            try:
                self._visit_all()
                self._check_that_all_end()
            except FoundFaultError as e:
                faults, choices = e.faults, e.choices
            events = tuple(_described(self._case, choices))
        return Exploration(
            self._case,
            len(self._from),
            sum(map(len, self._next)),
            self._learned,
            self._runs,
            len(self._ends),
            faults,
            events,
        )

    # -- the search ------------------------------------------------------------------------------

    def _visit_all(self) -> None:
        """Visit all states, the newest one first, so that few runs are repeated."""
        first = {**self._new_job().parts(), FAULTS: self._budget}
        first_code = _code_after(0, {}, first)
        numbers = {first_code: 0}
        self._from.append((0, None))
        self._next.append([])
        pending = [(0, first, first_code, self._choices(first))]
        while pending:
            number, parts, code_before, choices = pending[-1]
            choice = next(choices, None)
            if choice is None:
                pending.pop()
                if not self._next[number]:
                    raise FoundFaultError(("nothing can happen any more",), self._path(number))
                continue
            new = self._after(number, parts, choice)
            code = _code_after(code_before, parts, new)
            if code in numbers:
                if numbers[code] != number:
                    self._next[number].append(numbers[code])
                continue
            found = numbers[code] = len(self._from)
            if found == MOST:
                raise FoundFaultError((f"more than {MOST:,} states",), self._path(number))
            self._next[number].append(found)
            self._next.append([])
            self._from.append((number, choice))
            if _is_end(new):
                self._ends.append(found)
                self._check_end(found)
            else:
                pending.append((found, new, code, self._choices(new)))

    def _choices(self, parts: Parts) -> Iterator[Choice]:
        for choice in _choices(parts):
            if choice.kind != "kill" or self._mortal is None or choice.of in self._mortal:
                yield choice

    def _check_end(self, state: int) -> None:
        job = self._job_at(self._path(state))
        self._job_parts = None
        if faults := job.faults():
            raise FoundFaultError(faults, job.events)

    def _check_that_all_end(self) -> None:
        """Check that an end can be reached from each state."""
        before: list[list[int]] = [[] for _ in self._from]
        for state, following in enumerate(self._next):
            for x in following:
                before[x].append(state)
        ending, pending = set(self._ends), [*self._ends]
        while pending:
            new = [x for x in before[pending.pop()] if x not in ending]
            ending.update(new)
            pending += new
        for state in range(len(self._from)):
            if state not in ending:
                raise FoundFaultError(("the job cannot end any more",), self._path(state))

    def _path(self, state: int) -> list[Choice]:
        """Return the events that lead to a state."""
        found: list[Choice] = []
        while (step := self._from[state])[1] is not None:
            found.append(step[1])
            state = step[0]
        return found[::-1]

    # -- effects ---------------------------------------------------------------------------------

    def _after(self, state: int, parts: Parts, choice: Choice) -> Parts:
        """Return the state after an event."""
        key = (choice, _event(parts, choice), _footprint(parts, choice))
        known = self._effects.setdefault(key, [])
        for used, effects in known:
            effect = effects.get(_values(parts, used))
            if effect is not None:
                return _with_effect(parts, choice, effect)
        used, effect = self._learn(state, parts, choice)
        values = _values(parts, used)
        for others, effects in known:
            if others == used:
                effects[values] = effect
                break
        else:
            known.append((used, {values: effect}))
        return _with_effect(parts, choice, effect)

    def _learn(self, state: int, parts: Parts, choice: Choice) -> tuple[tuple[Part, ...], Effect]:
        """Let an event happen in the simulated job. Return its effect, and the parts it has used.

        The parts of its footprint (`_footprint`) are not returned.
        """
        job = self._job_at(self._path(state))
        before = self._job_parts or job.parts()
        _check_equal(_without_ended_links(before), parts)
        job.do(choice)
        self._learned += 1
        if faults := job.faults_so_far():
            raise FoundFaultError(faults, job.events)
        after = self._job_parts = job.parts()
        changed: dict[Part, Hashable] = {x: after.get(x) for x in job.launcher.written}
        for part in {**before, **after}:
            if part[0] != "channel" and before.get(part) != after.get(part):
                changed[part] = after.get(part)
                _check_footprint(before, after, choice, part)
        effect = Effect(changed, job.changes(), _may_end(before, changed))
        _check_equal(_without_ended_links(after), _with_effect(parts, choice, effect))
        used = job.launcher.read | _used(before, choice, changed)
        return tuple(sorted(used, key=repr)), effect

    def _job_at(self, events: list[Choice]) -> ChosenJob:
        """Return the job after some events; if they continue the last job, use this job."""
        job = self._job
        if job is None or job.events != events[: len(job.events)]:
            job = self._new_job()
        if len(job.events) < len(events):
            self._job_parts = None
        for choice in events[len(job.events) :]:
            job.do(choice)
        return job

    def _new_job(self) -> ChosenJob:
        self._runs += 1
        self._job, self._job_parts = ChosenJob(self._case), None
        return self._job


# -- parts of states -------------------------------------------------------------------------------


def _choices(parts: Parts) -> Iterator[Choice]:
    """Yield the possible next events."""
    kills, breaks = parts[FAULTS]
    for (kind, name), x in parts.items():
        if kind == "channel" and not _is_blocked(parts, name):
            yield Choice("event", name)
        elif kind == "role" and x.phase != "over":
            if x.phase == "runs" and not _is_blocked(parts, (name, x.number, "")):
                for timer in x.timers:
                    yield Choice(timer, name)
            if kills:
                yield Choice("kill", name)
        elif kind == "link" and breaks and x.up and _lives(parts, x.client, x.server):
            yield Choice("break", name)


def _is_blocked(parts: Parts, channel: Any) -> bool:
    """Return True while a server waits for the end of a write before its next snapshot."""
    writes = parts.get(("channel", (channel[0], channel[1], SNAPSHOT)), ())
    return channel[2] != SNAPSHOT and len(writes) > 1


def _event(parts: Parts, choice: Choice) -> Any:
    return parts["channel", choice.of][0] if choice.kind == "event" else None


def _actor(parts: Parts, choice: Choice) -> tuple[str, int] | None:
    """Return the process that handles an event; None for an action of the launcher."""
    if choice.kind == "break":
        return None
    if choice.kind != "event":
        return choice.of, parts["role", choice.of].number
    name, number, channel = choice.of
    return None if name == "launcher" or channel == SNAPSHOT else (name, number)


def _footprint(parts: Parts, choice: Choice) -> Hashable:
    """Return the values of the parts that an event may use, except parts of the launcher."""
    if choice.kind == "break":
        link = parts["link", choice.of]
        return link, _lives(parts, link.client), _lives(parts, link.server)
    process = _actor(parts, choice)
    if process is None:
        return None
    role, links = parts["role", process[0]], list[Hashable]()
    for (kind, address), x in parts.items():
        if kind == "link" and process == x.client:
            is_ignored = _is_ignored(parts, address, x)
            links.append((address, x, _lives(parts, x.server), is_ignored))
        elif kind == "link" and process == x.server:
            seen = _seen_by_server(parts, choice, role, address, x)
            links += [] if seen is None else [(address, seen)]
    return role[:3] if choice.kind == "kill" else role, parts[LISTENERS], frozenset(links)


def _seen_by_server(
    parts: Parts, choice: Choice, role: RoleState, address: bytes, link: LinkState
) -> Hashable:
    """Return the state of a connection that an event at a server may use, or None.

    If the event ends the server, it uses all connections (`_used`).
    """
    if choice.kind == "event" and address in choice.of[2]:
        return link, _lives(parts, link.client) if _event(parts, choice)[0] == "end" else None
    if choice.kind == "kill":
        return link.up
    if address in role.addresses:
        return link.up, link.is_silent, link.closed, _greets(parts, address, link)
    is_silent = link.is_silent and choice.kind in ("timer", "late")
    return (link.up, is_silent) if is_silent else None


def _is_ignored(parts: Parts, address: bytes, link: LinkState) -> bool:
    """Return True if the server ignores the connection when the client closes it (`ChosenJob`)."""
    if not link.up or link.is_silent or not _lives(parts, link.server):
        return False
    assert link.server is not None
    is_known = address in parts["role", link.server[0]].addresses
    return not is_known and not _greets(parts, address, link)


def _greets(parts: Parts, address: bytes, link: LinkState) -> bool:
    """Return True if a greeting is on its way to the server."""
    assert link.server is not None
    events = parts.get(("channel", (*link.server, (address, 0))), ())
    return any(op in GREETINGS for op, _ in events)


def _used(parts: Parts, choice: Choice, changed: dict[Part, Any]) -> set[Part]:
    """Return the parts that an action of the launcher, or the end of a server, has used."""
    process = _actor(parts, choice)
    if process is not None:
        part = "role", process[0]
        return {("links", process)} if part in changed and changed[part].phase == "over" else set()
    if choice.kind == "break":
        return set()
    _, _, channel = choice.of
    if channel == SNAPSHOT:
        snapshots = {part for part in parts if part[0] == "snapshots"}
        return {("role", choice.of[0]), ("incarnation", choice.of[0]), GENERATION, *snapshots}
    action, *terms = channel
    if action == "_start":
        return {("role", terms[0]), GENERATION, LISTENERS}
    if action == "_end_reported" and not changed:
        return {("role", terms[0]), ("left", terms[0]), ("role", terms[2]), GENERATION}
    if action == "_look_at_left" and not changed:
        return {("left", terms[0]), ("entered", terms[0]), GENERATION}
    return {ALL}


def _check_footprint(before: Parts, after: Parts, choice: Choice, part: Part) -> None:
    """Check that an event may have changed a part."""
    process = _actor(before, choice)
    if process is None or part[0] not in ("role", "link"):
        return
    link: Any = before.get(part) or after.get(part)
    if part == ("role", process[0]) or (
        part[0] == "link" and process in (link.client, link.server)
    ):
        return
    raise AssertionError(f"{choice} has changed {part}, which is not in its footprint")


def _lives(parts: Parts, *processes: tuple[str, int] | None) -> bool:
    """Return True if each of these processes is the current process of its role, and not over."""
    for process in processes:
        if process is not None:
            role = parts["role", process[0]]
            if role.number != process[1] or role.phase == "over":
                return False
    return True


def _values(parts: Parts, used: tuple[Part, ...]) -> Hashable:
    return tuple(_value(parts, x) for x in used)


def _value(parts: Parts, part: Part) -> Hashable:
    """Return the data of a part that an event may use."""
    if part == ALL:
        return frozenset((x, _value(parts, x)) for x in parts if x != FAULTS and x[0] != "channel")
    if part[0] == "links":
        return frozenset(x for (kind, x), link in parts.items() if _is_up(kind, link, part[1]))
    value: Any = parts.get(part)
    return value[:3] if part[0] == "role" and value.phase == "runs" else value


def _is_up(kind: str, link: Any, server: Hashable) -> bool:
    return kind == "link" and bool(link.up) and link.server == server


def _with_effect(parts: Parts, choice: Choice, effect: Effect) -> Parts:
    """Return the state after an event with a known effect."""
    new = {**parts}
    if choice.kind == "event":
        _set_channel(new, choice.of, new["channel", choice.of][1:])
    elif choice.kind in ("kill", "break") and FAULTS in new:
        kills, breaks = new[FAULTS]
        is_kill = choice.kind == "kill"
        new[FAULTS] = (kills - 1, breaks) if is_kill else (kills, breaks - 1)
    for channel, added in effect.channels:
        if added is not None:
            if effect.may_end or not _is_lost(new, channel):
                new["channel", channel] = (*new.get(("channel", channel), ()), added)
            continue
        for part in [x for x in new if x[0] == "channel" and x[1][2] == channel]:
            del new[part]
    for part, value in effect.parts.items():
        if value is None:
            new.pop(part, None)
        else:
            new[part] = value
    if not effect.may_end:
        return new
    for part in [x for x in new if x[0] == "channel" and _is_lost(new, x[1])]:
        del new[part]
    return _without_ended_links(new)


def _may_end(before: Parts, changed: dict[Part, Any]) -> bool:
    """Return True if an event ends or replaces a process, a connection or a generation."""
    for part, value in changed.items():
        if part == GENERATION or part[0] in ("link", "left", "starts"):
            return True
        if part[0] == "role":
            old = before.get(part)
            if old is None or (old.number, old.phase) != (value.number, value.phase):
                return True
    return False


def _without_ended_links(parts: Parts) -> Parts:
    """Return a state without the connections that can have no effect any more."""
    return {x: v for x, v in parts.items() if x[0] != "link" or _has_effect(parts, v)}


def _has_effect(parts: Parts, link: LinkState) -> bool:
    if link.up:
        return _lives(parts, link.client) or _lives(parts, link.server)
    return _lives(parts, link.client) and not link.closed


def _set_channel(parts: Parts, channel: Any, events: Any) -> None:
    if events:
        parts["channel", channel] = events
    else:
        del parts["channel", channel]


def _is_lost(parts: Parts, channel: Any) -> bool:
    """Return True if the process of a channel is over, or its action is stale (`ChoiceClock`)."""
    name, number, what = channel
    if name == "launcher":
        return _is_stale(parts, *what)
    role = parts["role", name]
    if role.number != number:
        return True
    return role.phase == "over" and (what != SNAPSHOT or role.digest == KILLED)


def _is_stale(parts: Parts, action: str, *terms: Any) -> bool:
    """Return the result of `WatchedLauncher.is_stale`."""
    if action == "_end_reported":
        return bool(terms[1] < parts[GENERATION][0])
    if action == "_on_end":
        name, number = terms[0]
        return parts["role", name].number != number or ("starts", name) in parts
    return action == "_look_at_left" and ("left", terms[0]) not in parts


def _is_end(parts: Parts) -> bool:
    """Return True if all roles are over, and the launcher has nothing to do."""
    for (kind, name), x in parts.items():
        if kind == "role" and x.phase != "over":
            return False
        if kind == "channel" and name[0] == "launcher":
            return False
    return True


def _check_equal(real: Parts, known: Parts) -> None:
    """Check that the state of a real job equals the state that the search predicted."""
    for part in {**real, **known}:
        if part != FAULTS and real.get(part) != known.get(part):
            raise AssertionError(
                f"{part} is {real.get(part)}, expected {known.get(part)}: an event has used more "
                "than its footprint"
            )


@functools.cache
def _code_of(item: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr(item).encode(), digest_size=16).digest())


def _code_after(code: int, before: Parts, after: Parts) -> int:
    """Return a number of 128 bits that identifies a state.

    Args:
      code: the number of the state before an event.
      before: the state before the event.
      after: the state after the event.
    """
    for part, value in after.items():
        old = before.get(part)
        if old is not value and old != value:
            code ^= _code_of((part, value))
            if old is not None:
                code ^= _code_of((part, old))
    for part, old in before.items():
        if part not in after:
            code ^= _code_of((part, old))
    return code


def _described(case: Case, choices: list[Choice]) -> Iterator[str]:
    """Yield a line for each event of a run."""
    job = ChosenJob(case)
    for choice in choices:
        if choice.kind == "event":
            name, _, channel = choice.of
            what = channel if name == "launcher" else job.event(choice.of)
            yield f"{name}: {what}"
        else:
            yield f"{choice.kind} of {choice.of}"
        job.do(choice)
