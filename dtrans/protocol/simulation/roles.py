"""A server and a trainer, each around its machine, as processes of a simulation.

A process takes one event at a time. While it computes or pauses, events wait in its queue, as messages wait in sockets.
A pause stops all of a process, its signs of life too; one that is killed says nothing more.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

import numpy as np

from dtrans.errors import DtransError, WireError
from dtrans.protocol import wire
from dtrans.protocol.async_server import AsyncServer
from dtrans.protocol.peer_line import PeerLine
from dtrans.protocol.presence import Presence
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.serving import Serving
from dtrans.protocol.simulation.case import Case
from dtrans.protocol.simulation.clock import Clock
from dtrans.protocol.simulation.network import Network, SimulatedConnection
from dtrans.protocol.simulation.updates import (
    SimulatedBlocks,
    SimulatedUpdate,
    block_name,
    gradient,
    gradient_name,
    round_part,
    served,
)
from dtrans.protocol.sync_server import SyncServer
from dtrans.protocol.trainer import TrainerSteps, Waiting, greeted, left
from dtrans.protocol.trainer_line import TrainerLine


TICK = 1.0  # seconds between two looks of a server
SILENCE = 30.0  # seconds without a sign of life after which a trainer is taken for dead
ALIVE_EVERY = 2.0
LINGER = 5.0
quiet = logging.getLogger("dtrans.simulation")
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


class Process:
    """A role. Its work is `handle`, for each event; `spend` says that an event takes time.

    Attributes:
      error: what ended it, if anything did.
      ended: when it ended, well or with an error; None while it runs, and of one that was killed.
      killed: whether it was.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.error: BaseException | None = None
        self.ended: float | None = None
        self.killed = False
        self.begun = False
        self.spent = 0.0  # by the event that is being handled
        self._queue: collections.deque[tuple[Any, ...]] = collections.deque()
        self._free = 0.0
        self._scheduled = False

    @property
    def there(self) -> bool:
        """Whether it runs."""
        return self.begun and not self.killed and self.ended is None

    @property
    def over(self) -> bool:
        """Whether it has run, and does not any more."""
        return self.killed or self.ended is not None

    @property
    def paused(self) -> bool:
        """Whether it computes or pauses."""
        return self.clock.now < self._free

    def deliver(self, event: tuple[Any, ...]) -> None:
        """Let it take an event when it comes to it."""
        self._queue.append(event)
        self._schedule()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._free = max(self._free, self.clock.now) + seconds

    def spend(self, seconds: float) -> None:
        """Let the event that is being handled take so long."""
        self.spent += seconds

    def kill(self) -> None:
        """End without a word."""
        if self.over:
            return
        self.killed = True
        self.close()

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""

    def handle(self, event: tuple[Any, ...]) -> None:
        """Take one event."""
        raise NotImplementedError

    def end(self, error: BaseException | None) -> None:
        """Be over."""
        self.error, self.ended = error, self.clock.now
        self.close()

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and self.there:
            self._scheduled = True
            self.clock.at(self._free, self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self.there and not self.paused and self._queue:
            self.spent = 0.0
            self.handle(self._queue.popleft())
            self._free = self.clock.now + self.spent
        self._schedule()


class SimulatedServer(Process):
    """A server."""

    def __init__(self, case: Case, endpoint: str, clock: Clock, random: Random) -> None:
        super().__init__(f"pserver {endpoint}", clock)
        self.endpoint = endpoint
        blocks = served(case, endpoint)
        silence = min(SILENCE, case.deadline)
        work: Callable[[], None] = lambda: self.spend(random.expovariate(1.0) * 0.01)
        trainers = Presence(blocks, deadline=case.deadline, silence=silence, plan={"init": "one"})
        self.update = SimulatedUpdate(blocks, work) if blocks.sync_mode else SimulatedBlocks(blocks, work)
        kind = (
            SyncServer(blocks, self.update, trainers, self.say)
            if isinstance(self.update, SimulatedUpdate)
            else AsyncServer(
                blocks,
                self.update,
                {n: np.frombuffer(h[0], np.float32) for n, h in self.update.history.items()},
                trainers,
                self.say,
            )
        )
        self.machine = Serving(kind, trainers, self.say, Refusals(quiet))
        self.machine.local = "local" if case.moves else ""
        self._by_address: dict[bytes, SimulatedConnection] = {}
        self._lines: dict[str, PeerLine] = {}
        self._to_peers: dict[str, SimulatedConnection] = {}

    def start(self, network: Network, servers: dict[str, SimulatedServer]) -> None:
        """Connect to other servers, and begin to look at the clock."""
        self.begun = True
        self.machine.trainers.started = self.clock.now
        peers = self.machine.kind.peers
        for ep, peer in peers.known.items():
            connection = self._to_peers[ep] = network.connect(self, servers[ep], ep)
            self._lines[ep] = PeerLine(self.endpoint, peer, peers.greeting(peer), "", self._sender(connection))
        self._tick()

    def _sender(self, connection: SimulatedConnection) -> Callable[[list[Any]], None]:
        return lambda frames: connection.to_server(frames, self.spent)

    def _tick(self) -> None:
        if self.there:
            self.deliver(("look",))
            self.clock.at(self.clock.now + TICK, self._tick)

    def say(self, to: bytes | str, op: str, /, blocks: Sequence[tuple[str, Any]] = (), **fields: Any) -> None:
        """Send a message, as `dtrans.protocol.presence.Say` does."""
        messages = wire.framed(op, blocks, **fields)
        if isinstance(to, str):
            self._lines[to].send(fields["step"], messages)
            return
        for frames in messages:
            if to in self._by_address:
                self._by_address[to].to_client(frames, self.spent)

    def handle(self, event: tuple[Any, ...]) -> None:
        """Take one event."""
        what, *rest = event
        try:
            self._take(what, *rest)
        except Exception as e:  # of any kind, as a server does
            self.machine.say_why(e)
            self.end(e)
            return
        if self.machine.ended:
            self.end(None)

    def _take(self, what: str, *rest: Any) -> None:
        now = self.clock.now
        if what == "message":
            self.machine.take(rest[0], rest[1], now)
        elif what == "look":
            self.machine.look(now)
        elif what == "accepted":
            self._by_address[rest[0].address] = rest[0]
        elif what == "lost":
            self._by_address.pop(rest[0].address, None)
        elif what == "answer":
            self._lines[rest[0]].heard(rest[1])
        elif what == "connected":
            self._lines[rest[0]].connected()
        elif what == "broken":
            self._lines[rest[0]].broken()

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        for connection in self._to_peers.values():
            connection.close(0)
        for connection in list(self._by_address.values()):
            connection.close(1)


class _Line:
    """A trainer's line with its connection, and what has come by it."""

    def __init__(self, line: TrainerLine) -> None:
        self.line = line
        self.connection: SimulatedConnection
        self.messages: collections.deque[Any] = collections.deque()
        self.events: collections.deque[str] = collections.deque()
        self.opened = 0  # how often a connection was


Answer = Generator[Any, Any, Any]


class SimulatedTrainer(Process):
    """A trainer: what an executor does with the trainer's program.

    Attributes:
      pulled: the parameters after each step, the initial ones first.
      reduced: what came of each round.
    """

    def __init__(
        self, case: Case, k: int, clock: Clock, random: Random, network: Network, servers: dict[str, SimulatedServer]
    ) -> None:
        super().__init__(f"trainer {k}", clock)
        self.case, self.k, self.random, self.network, self.servers = case, k, random, network, servers
        self.pulled: list[dict[str, np.ndarray]] = []
        self.reduced: list[np.ndarray] = []
        self._lines: dict[str, _Line] = {}
        self._steps = TrainerSteps(lambda ep: self._lines[ep].line)
        self._steps.sync_mode = case.mode != "async"
        self._script = self._run()
        self._waits: _Line | None = None  # whose answer it waits for

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
            try:
                yield from left(line.line) if reason is None else self._abort(line, reason)
            except DtransError as e:
                self.error = self.error or e

    def _abort(self, line: _Line, reason: str) -> Answer:
        """Say why, and wait until the server has heard it."""
        line.line.tell("abort", reason=reason)
        yield ("hear out", line)

    def _train(self) -> Answer:
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
            if (yield from greeted(line.line)):
                line.connection.close(0)
                self._open(line)
                yield from greeted(line.line)
            self._stay_alive(line, self.network.connect(_Mute(self), self.servers[ep], ep))
        yield from self._pull(())
        for step in range(case.steps[k]):
            yield self.random.expovariate(1.0) * 0.1
            for number in range(case.rounds):
                part = round_part(k, step, number)
                ep = case.endpoints[number % len(case.endpoints)]
                self.reduced += yield from self._steps.exchange(ep, number, [(part, ("all_reduce", "sum"))])
            for ep, sizes in zip(case.endpoints, case.servers, strict=True):
                for i, n in enumerate(sizes):
                    name = block_name(ep, i)
                    sent_as = gradient_name(name, k if self._steps.sync_mode else 0)
                    self._steps.send(ep, sent_as, gradient(name, n, k, step))
            yield from self._pull(case.endpoints if self._steps.sync_mode else ())

    def _sender(self, ep: str) -> Callable[[list[Any]], None]:
        return lambda frames: self._lines[ep].connection.to_server(frames, self.spent)

    def _pull(self, barriered: Sequence[str]) -> Waiting[None]:
        case = self.case
        new = {
            block_name(ep, i): np.empty(n, np.float32)
            for ep, sizes in zip(case.endpoints, case.servers, strict=True)
            for i, n in enumerate(sizes)
        }
        landings = [(n.split("/")[0], n, x) for n, x in new.items()]
        yield from self._steps.request(landings, case.endpoints, barriered)
        self.pulled.append(new)

    def _open(self, line: _Line) -> None:
        line.line.opened()
        line.messages.clear()
        line.events.clear()
        line.opened += 1
        line.connection = self.network.connect(self, self.servers[line.line.endpoint], (line, line.opened))

    def _stay_alive(self, line: _Line, connection: SimulatedConnection) -> None:
        """Say that it is alive, by a connection that nothing else goes by."""
        if self.there:
            if not self.paused or self.spent:
                connection.to_server([line.line.alive()])
            every = min(ALIVE_EVERY, line.line.silence / 4)
            self.clock.at(self.clock.now + every, lambda: self._stay_alive(line, connection))
        else:
            connection.close(0)

    # -- how it waits ----------------------------------------------------------------------------

    def handle(self, event: tuple[Any, ...]) -> None:
        """Take one event: into the socket that it comes by; and go on if it is what was waited for."""
        what, *rest = event
        if rest and rest[0][0].opened != rest[0][1]:
            pass  # of a connection that is closed
        elif what == "answer":
            rest[0][0].messages.append(rest[1])
        elif what in ("connected", "broken"):
            rest[0][0].events.append(what)
        elif what == "go":
            self._go_on(None)
        if self._waits is not None:
            self._listen(self._waits)

    def _listen(self, line: _Line) -> None:
        """What the loop of a connection does: messages first, then what happened to it, then the clock."""
        now = self.clock.now
        try:
            while self._waits is line:
                gone = line.line.gone
                if line.messages:
                    message = line.line.heard(line.messages.popleft(), now)
                    if message is not None:
                        self._waits = None
                        self._go_on(message)
                elif gone:
                    raise line.line.went_away()
                elif line.events:
                    line.line.connected() if line.events.popleft() == "connected" else line.line.broken()
                else:
                    line.line.look(now)
                    return
        except DtransError as e:
            self._waits = None
            self._go_on(e)

    def _go_on(self, answer: Any) -> None:
        """Let the script go on to where it waits next."""
        try:
            waits = self._script.throw(answer) if isinstance(answer, BaseException) else self._script.send(answer)
        except StopIteration:
            self.end(self.error)
            return
        if isinstance(waits, float):
            self.clock.at(self.clock.now + waits, lambda: self.deliver(("go",)))
        elif waits[0] == "hear out":
            self._hear_out(waits[1], self.clock.now + LINGER)
        else:
            line, what = waits
            waiting = self._waits = self._lines[line.endpoint]
            line.wait(what, self.clock.now)
            self._wake_at(waiting, line.patience)
            self.deliver(("look",))

    def _wake_at(self, line: _Line, time: float) -> None:
        def wake() -> None:
            if self._waits is line:
                self.deliver(("look",))
                if line.line.patience > self.clock.now:
                    self._wake_at(line, line.line.patience)

        self.clock.at(time, wake)

    def _hear_out(self, line: _Line, until: float) -> None:
        """As `Connection._heard_out` does."""
        while line.messages or line.events:
            if line.messages:
                with contextlib.suppress(WireError):  # whatever it says, there is nothing to be done any more
                    line.line.gone = wire.parse(line.messages.popleft()).op == "goodbye"
            elif line.events.popleft() == "broken":
                line.line.broken()
        if line.line.gone or self.clock.now >= until:
            self.deliver(("go",))
        else:
            self.clock.at(self.clock.now + 0.5, lambda: self._hear_out(line, until))

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        for line in self._lines.values():
            line.connection.close(0)


class _Mute:
    """The end of a connection of a trainer that listens to nothing by it."""

    def __init__(self, of: Process) -> None:
        self.name, self._of = of.name, of

    @property
    def there(self) -> bool:
        """Whether the trainer runs."""
        return self._of.there

    def deliver(self, event: tuple[Any, ...]) -> None:
        """Let it pass."""
