"""A trainer of a simulation, around its machines: what an executor does with a trainer's
program."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping
from random import Random
from typing import Any

import numpy as np

from dtrans.errors import DtransError, WireError
from dtrans.protocol import wire
from dtrans.protocol.geo_steps import GeoSteps, Values
from dtrans.protocol.operation import Operation, PendingAnswer
from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.kept_rows import KeptRows
from dtrans.protocol.tables.table_rows import runs_of, wanted_of
from dtrans.protocol.traffic import Group, Leaf, Traffic
from dtrans.protocol.trainer import LookedUp, TrainerSteps, leave
from dtrans.protocol.trainer_line import DOOR, TrainerLine
from dtrans.protocol.transport import Event
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.network import Network, SimulatedLink, SimulatedTransport
from tools.simulate.process import Process
from tools.simulate.updates import (
    InNumpy,
    added,
    announced,
    block_name,
    gradient,
    gradient_name,
    looked_up,
    round_part,
    row_gradient,
    spread,
)


LINGER = 5.0  # seconds


class _Line:
    """A trainer's line with its connection, and what has come by it."""

    def __init__(self, line: TrainerLine) -> None:
        self.line = line
        self.connection: SimulatedLink
        self.messages: collections.deque[Any] = collections.deque()
        self.events: collections.deque[str] = collections.deque()

    def take_event(self, now: float) -> None:
        """Let the line know what has happened to its connection."""
        self.line.connected() if self.events.popleft() == "connected" else self.line.broken(now)


Answer = Generator[Any, Any, Any]


class SimulatedTrainer(Process):
    """A trainer: what an executor does with the trainer's program.

    Attributes:
      pulled: how many of its steps were in what it received, and that; the initial parameters
        first.
      pushed: what it has sent of each block, or would have sent, in this order.
      reduced: what came of each round.
      looked_up: for each step, the numbers of rows of the table, and what it received as these.
      left_at: connection to when it said there that it had done.
    """

    def __init__(
        self,
        case: Case,
        k: int,
        clock: Clock,
        random: Random,
        network: Network,
    ) -> None:
        super().__init__(f"trainer {k}", clock)
        self.case, self.k, self.random = case, k, random
        self._transport = SimulatedTransport(network, self)
        self.pulled: list[tuple[int, dict[str, np.ndarray]]] = []
        self.pushed: dict[str, list[np.ndarray]] = {}
        self.reduced: list[np.ndarray] = []
        self.looked_up: list[tuple[np.ndarray, np.ndarray]] = []
        self.left_at: dict[str, float] = {}
        self._lines: dict[str, _Line] = {}
        self._steps = TrainerSteps(lambda ep: self._lines[ep].line)
        self._steps.sync_mode = case.sync_mode
        self._script = self._run()
        self._operation: Operation[Any] | None = None  # that it waits for
        self._late: DtransError | None = None  # what has happened while it computed

    def start(self) -> None:
        """Begin."""
        self.begun = True
        self.deliver(("go",))

    # -- what it does ----------------------------------------------------------------------------

    def _run(self) -> Answer:
        try:
            yield from self._train()
        except Exception as e:  # of any kind, as an executor does
            self.error = e
        reason = None if self.error is None else str(self.error)
        if reason is None and self._steps.in_step:
            reason = "it closed in the middle of a step"
        for line in reversed(list(self._lines.values())):  # each is closed, whatever the others say
            if reason is None:
                self.left_at[f"{self.name} pserver {line.line.endpoint}"] = self.clock.now
            try:
                if reason is None:
                    yield leave(line.line)
                else:
                    line.line.tell("abort", reason=reason)
                    yield ("hear out", line)
            except DtransError as e:
                self.error = self.error or e

    def _train(self) -> Answer:
        yield from self._greet()
        yield from self._pull(0)
        for step in range(self.case.steps[self.k]):
            self._announce(step)
            yield from self._prefetch(step)
            yield self.random.expovariate(1.0) * self.case.pace
            yield from self._exchange(step)
            for name, gradient_ in (*self._gradients(step), *self._row_gradients(step)):
                sent_as = gradient_name(name, self.k if self._steps.sync_mode else 0)
                self._steps.send(name.split("/")[0], sent_as, gradient_)
            yield from self._pull(step + 1)

    def _announce(self, now: int) -> None:
        """Announce the rows of the steps that come so far ahead; of some of them others."""
        case = self.case
        first = now + case.ahead if now else 1
        for step in range(first, now + case.ahead + 1) if case.tables and case.ahead else ():
            right = announced(case, self.k, step) is not None
            self._steps.announce(
                [self._room_for(looked_up(case, self.k, step if right else step + 100))]
            )

    def _prefetch(self, step: int) -> Answer:
        """Receive the rows that a step looks up, unless they were announced."""
        if not self.case.tables:
            return
        ids = looked_up(self.case, self.k, step)
        found = self._steps.announced("t", ids, step)
        if found is None:
            found = self._room_for(ids)
            yield self._steps.prefetch(found.wanted, train=True)
        self.looked_up.append((ids, found.rows))

    def _room_for(self, ids: np.ndarray) -> LookedUp:
        rows, table = np.empty(len(ids), np.float32), _table(self.case)
        wanted = wanted_of(ids, rows, epmap=table.endpoints, names=table.names, spans=table.spans)
        return LookedUp("t", ids, rows, wanted)

    def _row_gradients(self, step: int) -> list[tuple[str, np.ndarray]]:
        """The gradient of the rows of each block of the table that a step has looked up."""
        if not self.case.tables:
            return []
        ids, rows = self.looked_up[step]
        made, runs = row_gradient(rows, self.k, step), runs_of(tuple(self.case.tables.values()))
        for (n, size), run in zip(self.case.tables.items(), runs, strict=True):
            mine = RowGradient(run.local(ids[run.among(ids)]), made[run.among(ids)])
            self.pushed.setdefault(n, []).append(spread(mine, size))
        return [(n, made[run.among(ids)]) for n, run in zip(self.case.tables, runs, strict=True)]

    def _greet(self) -> Answer:
        """Say hello to all servers, one after the other."""
        case, k = self.case, self.k
        for ep in case.endpoints:
            line = _Line(
                TrainerLine(
                    ep,
                    k,
                    case.trainers,
                    session=f"session {k}",
                    sync_mode=self._steps.sync_mode,
                    plan={"init": "one"},
                    secret="",
                    deadline=case.deadline,
                    say=self._sender(ep),
                )
            )
            self._lines[ep] = line
            self._open(line)
            if line.line.admit((yield _welcome(line.line)).reply):
                first = line.connection
                self._open(line, local=True)
                line.line.admit((yield _welcome(line.line)).reply)
                first.close()

    def _exchange(self, step: int) -> Answer:
        for number in range(self.case.rounds):
            ep = self.case.endpoints[number % len(self.case.endpoints)]
            part = round_part(self.k, step, number)
            self.reduced += yield self._steps.exchange(ep, number, [(part, ("all_reduce", "sum"))])

    def _gradients(self, step: int) -> list[tuple[str, np.ndarray]]:
        """The gradient of each block."""
        made = [(n, gradient(n, size, self.k, step)) for n, size in self.case.blocks.items()]
        for n, g in made:
            self.pushed.setdefault(n, []).append(g)
        return made

    def _pull(self, step: int) -> Answer:
        new = {n: np.empty(size, np.float32) for n, size in self.case.blocks.items()}
        barriered = self.case.endpoints if step and self._steps.sync_mode else ()
        landings = [(n.split("/")[0], n, x) for n, x in new.items()]
        yield self._steps.request(landings, self.case.endpoints, barriered)
        self.pulled.append((step, new))

    def _sender(self, ep: str) -> Callable[[list[Any]], None]:
        return lambda frames: self._lines[ep].connection.send(frames)

    def _open(self, line: _Line, *, local: bool = False) -> None:
        line.line.opened(local=local)
        line.messages.clear()
        line.events.clear()
        line.connection = self._transport.connect(line.line.endpoint, user=DOOR, role=self.name)

    # -- how it waits ----------------------------------------------------------------------------

    def step(self) -> None:
        """Take one event: into the socket that it comes by; and go on if it is what was waited
        for."""
        event, self._took = self._queue.popleft(), True
        if isinstance(event, Event):
            for line in self._lines.values():
                if line.connection is not event.source:
                    continue
                if event.kind == "message":
                    line.messages.append(event.frames)
                else:
                    line.events.append(event.kind)
        elif event == ("go",):
            late, self._late = self._late, None
            self._go_on(late)
        self._look()

    def _look(self) -> None:
        """Go on if what was waited for is here."""
        if self._operation is not None:
            self._listen(self._operation)

    def _listen(self, operation: Operation[Any]) -> None:
        """Run one turn of a connection's loop: messages first, then events of the connection, then
        the clock."""
        now = self.clock.now
        try:
            while self._operation is operation and not operation.done:
                line = self._lines[operation.waits_for.line.endpoint]
                gone = line.line.gone
                if line.messages:
                    message = line.line.heard(line.messages.popleft(), now)
                    if message is not None:
                        operation.take(message)
                        if not operation.done:
                            self._await(operation)
                elif gone:
                    raise line.line.went_away()
                elif line.events:
                    line.take_event(now)
                else:
                    line.line.look(now)
                    if not line.line.gone:
                        self._look_at(line.line.retries_until)
                        return
        except DtransError as e:
            operation.close()
            self._operation = None
            self._go_on(e)
        else:
            self._operation = None
            self._go_on(operation.result)

    def _go_on(self, answer: Any) -> None:
        """Let the script go on to where it waits next."""
        try:
            waits = (
                self._script.throw(answer)
                if isinstance(answer, BaseException)
                else self._script.send(answer)
            )
        except StopIteration:
            self.end(self.error)
            return
        self._wait_for(waits)

    def _wait_for(self, waits: Any) -> None:
        """Wait for what the script has yielded: seconds, the last words of a server, or the answer
        of a line."""
        if isinstance(waits, float):
            self.clock.at(self.clock.now + waits, lambda: self.deliver(("go",)))
        elif not isinstance(waits, Operation):
            self._hear_out(waits[1], self.clock.now + LINGER)
        elif waits.done:
            self._go_on(waits.result)
        else:
            self._operation = waits
            self._await(waits)
            self.deliver(("look",))

    def _await(self, operation: Operation[Any]) -> None:
        """Begin to wait for the next message of an operation."""
        answer = operation.waits_for
        answer.line.wait(str(answer), self.clock.now)
        self._wake_at(answer.line)

    def _look_at(self, time: float) -> None:
        if time < math.inf:
            self.clock.at(time, lambda: self.deliver(("look",)))

    def _wake_at(self, line: TrainerLine) -> None:
        time = line.patience

        def wake() -> None:
            if self._operation is not None and self._operation.waits_for.line is line:
                self.deliver(("look",))
                if line.patience > self.clock.now:
                    self._wake_at(line)

        self.clock.at(time, wake)

    def _hear_out(self, line: _Line, until: float) -> None:
        """As `Connection._heard_out` does."""
        while line.messages or line.events:
            if line.messages:
                with contextlib.suppress(
                    WireError
                ):  # whatever it says, there is nothing to be done any more
                    line.line.gone = wire.parse(line.messages.popleft()).op == "goodbye"
            else:
                line.take_event(self.clock.now)
        if line.line.gone or self.clock.now >= until:
            self.deliver(("go",))
        else:
            self.clock.at(self.clock.now + 0.5, lambda: self._hear_out(line, until))

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        self._transport.close()


class CommunicatingTrainer(SimulatedTrainer):
    """A trainer with a communicator, whose thread is a part of what it does with each event."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._traffic: Traffic | None = None
        self._groups: collections.deque[Group] = collections.deque()
        self._newest: tuple[int, dict[str, Any]] | None = None
        self._until: Callable[[], bool] | None = None  # what the steps wait for

    def _train(self) -> Answer:
        yield from self._greet()
        case, leaves = self.case, _leaves(self.case)
        self._traffic = Traffic(
            {ep: line.line for ep, line in self._lines.items()},
            leaves,
            case.communicator,
            deadline=case.deadline,
            name=self.name,
            room=lambda key, shape, dtype: np.empty(shape, dtype),
            kept={"t": _table(case)} if case.mode == "geo" and case.tables else {},
        )
        self._traffic.ask(self.clock.now)
        try:
            yield lambda: self._newest is not None
            self._note()
            yield from self._steps_beside(leaves)
            traffic = self._traffic
            yield lambda: not self._groups and not traffic.pulling
            self._note()
        finally:
            self._traffic = None

    def _steps_beside(self, leaves: Mapping[str, Leaf]) -> Answer:
        """The steps; what they send waits in the queue."""
        case = self.case
        for step in range(case.steps[self.k]):
            yield from self._look_up(step)
            yield self.random.expovariate(1.0) * self.case.pace
            made = dict(self._gradients(step))
            rows = self._row_gradients(step)
            yield lambda: len(self._groups) < case.communicator.send_queue_size
            group: list[tuple[Leaf, Any]] = [
                (_as_gradient(x), np.concatenate([made[n] for n in x.names]))
                for x in leaves.values()
            ]
            if rows:
                whole = np.concatenate([x for _, x in rows])
                group.append(
                    (_as_gradient(_table(case)), RowGradient(self.looked_up[step][0], whole))
                )
            self._groups.append(group)
            if case.mode == "half_async":
                yield lambda step=step: self._newest is not None and self._newest[0] > step
            self._note()

    def _look_up(self, step: int) -> Answer:
        traffic = self._traffic
        assert traffic is not None
        if self.case.tables:
            found = self._room_for(looked_up(self.case, self.k, step))
            self.looked_up.append((found.uniq, found.rows))
            traffic.look_up(found.wanted, self.clock.now, train=True)
            yield lambda: not traffic.looking_up

    def _note(self) -> None:
        assert self._newest is not None
        steps, whole = self._newest
        new: dict[str, np.ndarray] = {}
        for key, leaf in _leaves(self.case).items():
            new |= {name: rows for _, name, rows in leaf.blocks(whole[key])}
        self.pulled.append((steps, new))

    def _go_on(self, answer: Any) -> None:
        self._until = None
        super()._go_on(answer)
        if self._traffic is not None:
            self.deliver(("look",))  # there may be something to send

    def _wait_for(self, waits: Any) -> None:
        if callable(waits):
            self._until = waits
        else:
            super()._wait_for(waits)

    def _look(self) -> None:
        if self._traffic is None:
            super()._look()
            return
        try:
            self._turn(self._traffic)
        except DtransError as e:
            self._traffic = None
            if self._until is not None:
                self._go_on(e)
            else:
                self._late = e
            return
        if self._until is not None and self._until():
            self._go_on(None)

    def _turn(self, traffic: Traffic) -> None:
        """Run one turn of a communicator's loop."""
        now = self.clock.now
        for ep, line in self._lines.items():
            while line.events:
                line.take_event(now)
            line.line.give_up(now)
            self._look_at(line.line.retries_until)
            while line.messages:
                message = line.line.heard(line.messages.popleft(), now)
                if message is not None and message.op != "welcome":
                    traffic.heard(ep, message)
            if line.line.gone:
                raise line.line.went_away(traffic.waits_for)
        self._newest = traffic.whole() or self._newest
        traffic.look(now)
        while count := traffic.may_take(len(self._groups), now):
            traffic.send([self._groups.popleft() for _ in range(count)])
        if not self._groups and (self._newest is None or self._newest[0] < traffic.sent):
            traffic.ask_for_newest(now)
        if traffic.wakes is not None:
            self.clock.at(traffic.wakes, lambda: self.deliver(("look",)))


class GeoSgdTrainer(CommunicatingTrainer):
    """A trainer of GEO-SGD.

    Attributes:
      agreed: of each pull, how many pushes are in it, and the rows that the trainer had when it
        asked for it, by their numbers: as it knows from then that servers had them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.agreed: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._kept = KeptRows([np.empty(0, np.float32)])
        self._had = 0  # how many rows were kept at the last push

    def _steps_beside(self, leaves: Mapping[str, Leaf]) -> Answer:
        case, self._all = self.case, leaves
        values = self.newest()
        steps = GeoSteps(self, InNumpy(), case.trainers, values)
        for step in range(case.steps[self.k]):
            yield from self._change_rows(step)
            yield self.random.expovariate(1.0) * self.case.pace
            changes = [
                np.concatenate([gradient(n, case.blocks[n], self.k, step) for n in x.names])
                for x in leaves.values()
            ]
            values = [added(x, c) for x, c in zip(values, changes, strict=True)]
            steps.step(values, case.every, block_on_pull=case.waits)
            yield from self._settled(steps)
            values = steps.local
        steps.finish()
        yield from self._settled(steps)

    def _settled(self, steps: GeoSteps) -> Answer:
        """As a communicator's barrier."""
        while steps.waits:
            yield lambda: self.received() >= self._put
            steps.go_on()

    def _change_rows(self, step: int) -> Answer:
        """Return the result of a step from the rows that it looks up."""
        if not self.case.tables:
            return
        traffic, kept, ids = self._traffic, self._kept, looked_up(self.case, self.k, step)
        assert traffic is not None
        new = kept.missing(ids)
        if len(new):
            rows, table = np.empty(len(new), np.float32), _table(self.case)
            wanted = wanted_of(
                new, rows, epmap=table.endpoints, names=table.names, spans=table.spans
            )
            traffic.look_up(wanted, self.clock.now, train=True)
            yield lambda: not traffic.looking_up
            kept.add(new, rows)
        (rows,) = kept.take(ids, len(ids))
        kept.put(ids, [added(rows, row_gradient(rows, self.k, step))])

    _put = 0  # pushes so far

    def put(self, deltas: Values) -> None:
        """As `dtrans.protocol.geo_steps.GeoQueue` says."""
        self._put += 1
        for leaf, x in zip(self._all.values(), deltas, strict=True):
            for _, name, rows in leaf.blocks(x):
                self.pushed.setdefault(name, []).append(rows)
        group: list[tuple[Leaf, Any]] = [
            (_as_gradient(leaf), x) for leaf, x in zip(self._all.values(), deltas, strict=True)
        ]
        if self.case.tables:
            self._had, table, made = (
                len(self._kept),
                _table(self.case),
                self._kept.pushed(self.case.trainers),
            )
            for name, run in zip(table.names, table.spans, strict=True):
                mine = RowGradient(
                    run.local(made.ids[run.among(made.ids)]), made.rows[run.among(made.ids)]
                )
                self.pushed.setdefault(name, []).append(spread(mine, run.rows))
            group.append((_as_gradient(table), made))
        self._groups.append(group)

    def received(self) -> int:
        """As `dtrans.protocol.geo_steps.GeoQueue` says."""
        return -1 if self._newest is None else self._newest[0]

    def newest(self) -> Values:
        """As `dtrans.protocol.geo_steps.GeoQueue` says."""
        assert self._newest is not None
        self._note()
        if self.case.tables and self._put:
            self._kept.pulled(self._newest[1]["t"])
            self.agreed.append(
                (self._put, self._kept.ids[: self._had].copy(), self._kept.old[: self._had].copy())
            )
        return [self._newest[1][key] for key in self._all]


def _welcome(line: TrainerLine) -> Operation[PendingAnswer]:
    answer = PendingAnswer(line, f"`hello` of {line.me}", "welcome", {}, "a welcome")
    return Operation([answer], lambda answers: answers[0])


def _leaves(case: Case) -> dict[str, Leaf]:
    """The first blocks of all servers are one leaf, and so are the second."""
    found: dict[str, Leaf] = {}
    for i in range(max(map(len, case.servers))):
        rows = [
            (ep, block_name(ep, i), sizes[i])
            for ep, sizes in zip(case.endpoints, case.servers, strict=True)
            if len(sizes) > i
        ]
        eps, names, sizes = zip(*rows, strict=True)
        found[str(i)] = Leaf(eps, names, sizes, (sum(sizes),), np.dtype(np.float32))
    return found


def _table(case: Case) -> Leaf:
    """The table, of which servers have blocks."""
    names, sizes = tuple(case.tables), tuple(case.tables.values())
    endpoints, spans = tuple(n.split("/")[0] for n in names), tuple(runs_of(sizes))
    return Leaf(endpoints, names, sizes, (sum(sizes),), np.dtype(np.float32), spans=spans)


def _as_gradient(leaf: Leaf) -> Leaf:
    return dataclasses.replace(leaf, names=tuple(gradient_name(n, 0) for n in leaf.names))
