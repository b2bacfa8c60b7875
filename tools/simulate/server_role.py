"""Simulated server: the loop of real servers over a virtual network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random

from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.server_loop import ServerLoop
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.network import Network, SimulatedTransport
from tools.simulate.process import Process
from tools.simulate.storage import SimulatedStorage
from tools.simulate.updates import SimulatedBlocks, SimulatedUpdate, served


quiet = logging.getLogger("dtrans.simulation")
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


class SimulatedServer(Process):
    """Process of a simulated server."""

    def __init__(
        self,
        case: Case,
        endpoint: str,
        clock: Clock,
        random: Random,
        network: Network,
        prefix: str = "",
    ) -> None:
        super().__init__(f"{prefix}pserver {endpoint}", clock)
        self.endpoint = endpoint
        blocks = served(case, endpoint)
        work: Callable[[], None] = lambda: self.spend(random.expovariate(1.0) * 0.01)
        trainers = TrainerRegistry(blocks, deadline=case.deadline, plan={"init": "one"})
        self._transport = SimulatedTransport(network, self)
        self._has_local = case.moves
        self._written: list[str] = []  # checkpoints whose writes have ended
        self._loop = ServerLoop(self._transport, trainers, ended_saves=self._ended_writes)
        say = self._loop.say
        self.update: SimulatedUpdate | SimulatedBlocks
        kind: SyncServer | AsyncServer
        if blocks.sync_mode:
            self.update = SimulatedUpdate(blocks, work)
            kind = SyncServer(blocks, self.update, trainers, say)
        else:
            self.update = SimulatedBlocks(blocks, work, geo=case.mode == "geo")
            kind = AsyncServer(blocks, self.update, self.update.state, trainers, say)
        self.machine = Serving(kind, trainers, say, Refusals(quiet))
        kind.tables = self.update.tables
        self.storage = SimulatedStorage(case, endpoint, lambda: kind.state, self._write)
        self.machine.keep = self.storage.keep

    def start(self) -> None:
        """Open the listener, and start the loop."""
        self.begun = True
        listener = self._transport.bind(self.endpoint, has_local=self._has_local)
        self._loop.begin(self.machine, listener)
        self.wake_at(self._loop.wakes)

    def _write(self, name: str, seconds: float) -> None:
        """Schedule the end of a checkpoint's write after some seconds."""

        def end() -> None:
            self._written.append(name)
            self.wake_at(self.clock.now)

        self.clock.at(self.clock.now + seconds, end)

    def _ended_writes(self) -> list[tuple[str, str]]:
        """Return the name and the error of each checkpoint whose write has ended."""
        names, self._written = self._written, []
        return [(name, self.storage.end(name)) for name in names]

    def step(self) -> None:
        """Take a step of the loop."""
        try:
            self._loop.step()
        except Exception as e:  # a real server catches all exceptions, too
            self.machine.say_why(e)
            self.end(e)
            return
        if self.machine.ended:
            self.end(None)
        self.wake_at(self._loop.wakes)

    def close(self) -> None:
        """Close the connections. Messages that were sent still arrive."""
        self._transport.close()
