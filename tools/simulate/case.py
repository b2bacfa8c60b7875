"""A job and what happens to it, drawn from a seed: a value that says all that a simulation depends
on."""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from dtrans.protocol.transport import RETRY


# the modes in which trainers have a communicator
COMMUNICATING = (
    "communicator",
    "half_async",
    "geo",
)
LOOKING_UP = ("sync", "async", *COMMUNICATING)  # those in which servers may have tables


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens to a role or a connection.

    Attributes:
      kind: one of
        "pause": a role computes for some seconds;
        "stop": the whole process of a role stops for some seconds;
        "crash": a role is killed;
        "return": a killed server is started again, as a new process;
        "cut": a connection breaks, and comes up again after some seconds;
        "hold": one direction of a connection passes nothing for some seconds;
        "outage": both directions pass nothing for some seconds;
        "late": a connection comes up after some seconds at the earliest;
        "twice": a message of a connection arrives twice;
        "garble": a message of a connection arrives malformed.
      time: when.
      who: the name of the role, or of the connection: "client server".
      seconds: duration; for "twice" and "garble", number of the message.
      way: direction of a "hold": 0 to the server, 1 to the client.
    """

    kind: str
    time: float
    who: str
    seconds: float = 0.0
    way: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """A request that trainers send to all servers, or to those with blocks of the table.

    Attributes:
      kind: one of
        "save": a checkpoint;
        "report": a report of tables;
        "changes": changed rows of tables since half as many steps;
        "export": all rows of tables;
        "evict": eviction of rows that were not used in the last steps.
      step: number of steps that a trainer has made when it asks.
      trainers: that ask.
      moment: "between" two steps. A "save" may also be "sent": after the gradients of the next
        step, before its end. Or it is "ended": after the end of a step, before its answer.
      seconds: of "save", until its state is written.
      fails: of "save": endpoint of the server that cannot write.
      refuses: of "save" that fails: the server says so at once, and not when it has tried.
      waits: of "save": number of steps until the trainer waits for the answer.
      unused_for: of "evict".
    """

    kind: str
    step: int
    trainers: tuple[int, ...]
    moment: str = "between"
    seconds: float = 0.0
    fails: str = ""
    refuses: bool = False
    waits: int = 0
    unused_for: int = 1

    def __str__(self) -> str:
        when = {
            "between": f"after {self.step} steps",
            "sent": f"with the gradients of step {self.step} sent",
            "ended": f"before the answer of step {self.step}",
        }
        who = ", ".join(f"trainer {k}" for k in self.trainers)
        how = f", written in {self.seconds:.3g} s" if self.kind == "save" else ""
        how += f", awaited {self.waits} steps later" if self.waits else ""
        how += f", and {self.fails} cannot" + " begin" * self.refuses if self.fails else ""
        how += f", of rows unused for {self.unused_for}" if self.kind == "evict" else ""
        return f"{self.kind} asked by {who} {when[self.moment]}{how}"


@dataclasses.dataclass(frozen=True)
class Guest:
    """A process that comes to the job and is not of it.

    Attributes:
      kind: "second" process with the id of a trainer; "stale" trainer with another plan; "stranger"
        with another token; or "noise", which sends malformed messages.
      time: when it begins.
      trainer: the id that it has.
    """

    kind: str
    time: float
    trainer: int

    def __str__(self) -> str:
        what = {
            "second": "is started a second time",
            "stale": "is started with another plan",
            "stranger": "is started with another token",
            "noise": "is the name of who sends malformed messages",
        }
        return f"{self.time:.3f} s  trainer {self.trainer} {what[self.kind]}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A job and what happens to it.

    Attributes:
      seed: of delays and of the time that computation takes.
      mode: one of
        "sync";
        "exchange": synchronous, and servers exchange parts of a norm;
        "async";
        "communicator": asynchronous, with a communicator;
        "half_async": the same, and each step waits for it at its end;
        "geo": GEO-SGD.
      steps: of each trainer.
      servers: of each, the number of entries of each of its blocks.
      on_trainer_exit: as of `dtrans.pserver`.
      rounds: exchanges of trainers in each step.
      moves: trainers move to a second connection, as to a Unix socket.
      deadline: seconds, of all roles.
      patience: seconds without a sign of the other end after which ZeroMQ gives a connection up.
      delay: typical seconds that a message is under way.
      message_bytes: of gradients, in one message; larger blocks travel as several.
      communicator: of "communicator", "half_async" and "geo".
      pace: typical seconds that a step computes.
      table: number of rows of each server's block of the table, except for the last of several
        servers; 0 without a table.
      ahead: number of steps by which synchronous trainers announce rows; 0 for none.
      staleness: number of updates that such rows may lack.
      moves_rows: an update may move all rows of a table.
      every, waits: for "geo", the number of steps between pushes; and if a trainer waits for the
        answer.
      events: faults, and delays of connections.
      requests: of trainers, in the order in which each sends its own; one eviction at most, before
        other requests of its step.
      guests: that come.
      is_followed: the processes of roles that end well start a second job on the same endpoints.
    """

    seed: int
    mode: str
    steps: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    on_trainer_exit: str = "drop"
    rounds: int = 0
    moves: bool = False
    deadline: float = 60.0
    delay: float = 0.002
    message_bytes: int = wire.MESSAGE_BYTES
    communicator: CommunicatorConfig = CommunicatorConfig()
    every: int = 1
    waits: bool = False
    events: tuple[Event, ...] = ()
    pace: float = 0.1
    table: int = 0
    ahead: int = 0
    staleness: int = 0
    moves_rows: bool = False
    patience: float = 30.0
    requests: tuple[Request, ...] = ()
    guests: tuple[Guest, ...] = ()
    is_followed: bool = False

    @property
    def sync_mode(self) -> bool:
        """Return True if an update combines the gradients of all trainers."""
        return self.mode in ("sync", "exchange")

    @property
    def sends(self) -> tuple[int, ...]:
        """Return the number of messages that each trainer sends."""
        return tuple(-(-n // self.every) for n in self.steps)

    @property
    def blocks(self) -> dict[str, int]:
        """Block to the number of its entries."""
        rows = zip(self.endpoints, self.servers, strict=True)
        return {f"{ep}/w{i}": n for ep, sizes in rows for i, n in enumerate(sizes)}

    @property
    def tables(self) -> dict[str, int]:
        """Block of the table to the number of its rows."""
        return (
            {f"{ep}/t": self.table for ep in self.endpoints[:-1] or self.endpoints}
            if self.table
            else {}
        )

    @property
    def trainers(self) -> int:
        """Return the number of trainers."""
        return len(self.steps)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Of the servers."""
        return tuple(f"127.0.0.1:{i + 1}" for i in range(len(self.servers)))

    @property
    def harmless(self) -> bool:
        """Return True if the job must survive all events.

        Pauses together end before the deadlines, and broken connections are made again in time. A
        connection to a Unix socket breaks only if its process ends. Slow messages alone may make a
        greeting late.
        """
        kinds = {e.kind for e in self.events}
        survived = {"pause", "stop", "hold", "outage", "late", "twice"}
        if not self.moves and self.delay <= 0.01:
            survived.add("cut")
        if not kinds <= survived:
            return False
        limits = [self.deadline / 2]
        if kinds - {"pause", "twice"}:
            limits.append(self.patience / 2)
        if "cut" in kinds:
            limits.append(RETRY / 2)
        return sum(e.seconds for e in self.events if e.kind != "twice") < min(limits)

    @property
    def orderly(self) -> bool:
        """Return True if all requests come when they may, and from all that must send them."""
        is_early = lambda x: x.moment == "ended" or (x.moment == "sent" and not self.sync_mode)
        return not any(self._is_short(x) or is_early(x) for x in self.requests)

    def _is_short(self, request: Request) -> bool:
        """Return True if trainers are to evict rows, and not all send the request that may."""
        may = {k for k, n in enumerate(self.steps) if n >= request.step}
        return self.sync_mode and request.kind == "evict" and not may <= {*request.trainers}

    def eviction_after(self, step: int) -> Request | None:
        """Return the request to evict rows after a step, unless a trainer continues without it."""
        for x in self.requests:
            later = {k for k, n in enumerate(self.steps) if n > step}
            if x.kind == "evict" and x.step == step and later <= {*x.trainers}:
                return x
        return None

    def __str__(self) -> str:
        blocks = ", ".join(f"{len(b)} blocks" for b in self.servers)
        happens = "".join(
            f"\n  {e.time:.3f} s  {_describe(e)}" for e in sorted(self.events, key=lambda e: e.time)
        )
        happens += "".join(f"\n  {x}" for x in (*self.guests, *self.requests))
        rounds = f", {self.rounds} rounds a step" if self.rounds else ""
        moves = ", trainers move" if self.moves else ""
        small = (
            f", messages of {self.message_bytes} bytes"
            if self.message_bytes < wire.MESSAGE_BYTES
            else ""
        )
        table = (
            f", {self.table} rows of a table each" + " that move" * self.moves_rows
            if self.table
            else ""
        )
        if self.ahead and self.table:
            table += f", announced {self.ahead} steps ahead, {self.staleness} stale"
        patience = f", patience {self.patience:g} s"
        beside = f"\n  {self.communicator}" if self.mode in COMMUNICATING else ""
        if self.mode == "geo":
            beside += f", pushes after {self.every} steps" + " and waits" * self.waits
        return (
            f"{self.mode}, trainers of {', '.join(map(str, self.steps))} steps, servers of "
            f"{blocks}{table}, "
            f"on_trainer_exit={self.on_trainer_exit}{patience}{rounds}{moves}{small}{beside}"
            + happens
            + "\n  the same job again on the same endpoints" * self.is_followed
        )


def _describe(e: Event) -> str:
    how = {
        "pause": f"{e.who} pauses for {e.seconds:.3g} s",
        "stop": f"{e.who} is stopped for {e.seconds:.3g} s",
        "crash": f"{e.who} is killed",
        "cut": f"the connection {e.who} breaks, and comes up after {e.seconds:.3g} s",
        "hold": f"the connection {e.who} lets nothing to the {('server', 'client')[e.way]} for "
        f"{e.seconds:.3g} s",
        "outage": f"the connection {e.who} lets nothing through for {e.seconds:.3g} s",
        "twice": f"message {e.seconds:.0f} of the connection {e.who} comes twice",
        "garble": f"message {e.seconds:.0f} of the connection {e.who} comes malformed",
        "late": f"the connection {e.who} comes up {e.seconds:.3g} s later at the earliest",
        "return": f"{e.who} is started again",
    }
    return how[e.kind]


def drawn(seed: int) -> Case:
    """Draw the case of a seed.

    Example:
      >>> from tools.simulate.case import drawn
      >>> drawn(7) == drawn(7), drawn(7) == drawn(8)
      (True, False)
    """
    r = Random(seed)
    mode = r.choice(
        [
            "sync",
            "sync",
            "sync",
            "exchange",
            "exchange",
            "async",
            "communicator",
            "half_async",
            "geo",
        ]
    )
    trainers = r.randint(1, 3)
    if r.random() < 0.6:
        steps = (r.randint(1, 3),) * trainers
    else:
        steps = tuple(r.randint(0, 3) for _ in range(trainers))
    servers = tuple(_draw_sizes(r) for _ in range(r.randint(1, 3)))
    if mode == "exchange" and len(servers) == 1:
        mode = "sync"
    case = Case(
        seed,
        mode,
        steps,
        servers,
        r.choice(["drop", "paddle", "error"]) if mode in ("sync", "exchange") else "drop",
        r.choice([0, 0, 1, 2]) if mode == "sync" and len(set(steps)) == 1 else 0,
        r.random() < 0.3,
        r.choice([5.0, 60.0]),
        10 ** r.uniform(-4, -1.5),
        r.choice([8, 16, wire.MESSAGE_BYTES]),
        _communicator(r),
        *((r.randint(1, 3), r.random() < 0.5) if mode == "geo" else ()),
    )
    count = r.choice([0, 0, 1, 1, 1, 2, 3])
    events = tuple(_event(r, case) for _ in range(count))
    table = r.choice([0, 1, 4, 4] if mode == "sync" else [0, 1, 4]) if mode in LOOKING_UP else 0
    # gradients are merged where steps are fast
    pace = r.choice([0.1, 0.002]) if mode == "communicator" else 0.1
    case = dataclasses.replace(
        case, events=events, pace=pace, table=table, patience=(3.5, 30.0)[seed % 2]
    )
    if case.table and case.sync_mode:
        ahead, moves = r.choice([0, 1, 1, 2]), r.random() < 0.3
        stale = r.choice([0, 0, 1]) if ahead else 0
        case = dataclasses.replace(case, ahead=ahead, staleness=stale, moves_rows=moves)
    case = _with_guests(r, dataclasses.replace(case, requests=_requests(r, case)))
    case = _with_later_processes(r, _with_garbled_message(r, case))
    return _with_short_breaks(r, case)


def _with_short_breaks(r: Random, case: Case) -> Case:
    """Draw if connections break often, and are made again at once."""
    if r.random() < 0.85 or case.guests or case.moves or case.is_followed:
        return case
    count, lines = r.randint(1, 8), _lines(case)
    breaks = []
    for _ in range(count):
        time, seconds = r.random() * _span(case), 10 ** r.uniform(-3, -0.7)
        breaks.append(Event("cut", time, r.choice(lines), seconds))
    return dataclasses.replace(case, events=tuple(breaks))


def _with_garbled_message(r: Random, case: Case) -> Case:
    """Draw if a message of a trainer arrives malformed."""
    if r.random() < 0.93:
        return case
    line = f"trainer {r.randrange(case.trainers)} pserver {r.choice(case.endpoints)}"
    garbled = Event("garble", 0.0, line, r.randint(0, 8))
    events = () if r.random() < 0.5 else case.events
    return dataclasses.replace(case, events=(*events, garbled))


def _with_later_processes(r: Random, case: Case) -> Case:
    """Draw if a killed server is started again, and if a second job follows."""
    killed = [e for e in case.events if e.kind == "crash" and e.who.startswith("pserver")]
    if killed and not case.guests and r.random() < 0.5:
        time = killed[0].time + 10 ** r.uniform(-2, 0.5)
        returned = Event("return", time, killed[0].who)
        return dataclasses.replace(case, events=(*case.events, returned))
    if case.guests or r.random() < 0.9:
        return case
    if case.mode != "exchange" or r.random() < 0.5:
        return dataclasses.replace(case, is_followed=True)
    # a server whose trainers make no step could end before another one has greeted it
    line = "pserver {} pserver {}".format(*r.sample(case.endpoints, 2))
    late = Event("late", 0.0, line, 10 ** r.uniform(-1, 0.3))
    steps = (0,) * case.trainers
    return dataclasses.replace(case, steps=steps, events=(late,), requests=(), is_followed=True)


def _draw_sizes(r: Random) -> tuple[int, ...]:
    return tuple(r.randint(1, 6) for _ in range(r.randint(1, 2)))


def _with_guests(r: Random, case: Case) -> Case:
    """Draw who comes; a trainer whose second process comes may have been killed before."""
    if r.random() < 0.75:
        return case
    kind = r.choice(["second", "second", "stale", "stranger", "noise"])
    time, k = r.random() * (0.3 + 0.2 * max(case.steps)), r.randrange(case.trainers)
    killed = Event("crash", time * r.random(), f"trainer {k}")
    events = (*case.events, killed) if kind == "second" and r.random() < 0.3 else case.events
    return dataclasses.replace(case, events=events, guests=(Guest(kind, time, k),))


def _requests(r: Random, case: Case) -> tuple[Request, ...]:
    """Draw what trainers ask for; those with a communicator ask after their last step."""
    if r.random() < 0.6:
        return ()
    kinds = ["save", "save"]
    if case.tables:
        kinds += ["report", "changes", "export"] + ["evict", "evict"] * (case.mode != "geo")
    found: list[Request] = []
    for _ in range(r.choice([1, 1, 2, 3])):
        kind = r.choice(kinds)
        step = r.choice(case.steps) if case.mode in COMMUNICATING else r.randint(0, max(case.steps))
        reach = [k for k, n in enumerate(case.steps) if n >= step]
        if case.mode in COMMUNICATING:
            reach = [k for k in reach if case.steps[k] == step]
        all_ask = r.random() < (0.8 if kind == "evict" else 0.5)
        trainers = reach if all_ask else r.sample(reach, r.randint(1, len(reach)))
        request = Request(kind, step, tuple(sorted(trainers)), unused_for=r.randint(1, 2))
        if kind == "save":
            request = _save(r, case, request)
        if kind != "evict" or all(x.kind != "evict" for x in found):
            found.append(request)
    return tuple(sorted(found, key=lambda x: (x.step, x.kind != "evict")))


def _save(r: Random, case: Case, request: Request) -> Request:
    moment = r.choice(["between"] * 4 + ["sent", "ended"])
    goes_on = all(case.steps[k] > request.step for k in request.trainers)
    may_be = {"between": True, "sent": goes_on, "ended": request.step > 0}[moment]
    return dataclasses.replace(
        request,
        moment=moment if may_be and case.mode not in COMMUNICATING else "between",
        seconds=10 ** r.uniform(-2, 1.5),
        fails=r.choice(case.endpoints) if r.random() < 0.3 else "",
        refuses=r.random() < 0.3,
        waits=r.choice([0, 0, 1, 2]),
    )


def _communicator(r: Random) -> CommunicatorConfig:
    queue = r.randint(1, 4)
    return CommunicatorConfig(r.randint(1, 3), queue, r.randint(1, queue), r.random() < 0.5)


def _lines(case: Case) -> list[str]:
    """Return the connections of a job, each by the names of its ends."""
    trainers = [f"trainer {k}" for k in range(case.trainers)]
    servers = [f"pserver {ep}" for ep in case.endpoints]
    ends = [*itertools.product(trainers, servers)]
    if case.mode == "exchange":
        ends += itertools.permutations(servers, 2)
    return [f"{client} {server}" for client, server in ends]


def _span(case: Case) -> float:
    """Return the seconds after which most jobs of a case have ended."""
    return 0.2 + 0.2 * max(case.steps) + 30 * case.delay


def _event(r: Random, case: Case) -> Event:
    trainers = [f"trainer {k}" for k in range(case.trainers)]
    servers = [f"pserver {ep}" for ep in case.endpoints]
    roles, lines = trainers + servers, _lines(case)
    kind = r.choice(["pause", "stop", "crash", "cut", "hold", "twice"])
    time = r.random() * _span(case)
    if kind in ("pause", "stop", "crash"):
        return Event(
            kind, time, r.choice(roles), 0.0 if kind == "crash" else 10 ** r.uniform(-2, 2)
        )
    if kind == "twice":
        number = r.randint(0, 8)
        # parts of rounds come early
        return Event(kind, 0.0, r.choice(lines), number % 5 if case.rounds else number)
    found = Event(kind, time, r.choice(lines), 10 ** r.uniform(-2, 2), r.randint(0, 1))
    both = kind == "hold" and r.random() < 0.4
    return dataclasses.replace(found, kind="outage") if both else found
