"""A server of a simulation: the loop of real servers over a virtual network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random

import numpy as np

from dtrans.protocol.async_server import AsyncServer
from dtrans.protocol.presence import Presence
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server_loop import ServerLoop
from dtrans.protocol.serving import Serving
from dtrans.protocol.sync_server import SyncServer
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.network import Network, SimulatedTransport
from tools.simulate.process import Process
from tools.simulate.updates import SimulatedBlocks, SimulatedUpdate, served


quiet = logging.getLogger("dtrans.simulation")
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


class SimulatedServer(Process):
    """A server."""

    def __init__(
        self, case: Case, endpoint: str, clock: Clock, random: Random, network: Network
    ) -> None:
        super().__init__(f"pserver {endpoint}", clock)
        self.endpoint = endpoint
        blocks = served(case, endpoint)
        work: Callable[[], None] = lambda: self.spend(random.expovariate(1.0) * 0.01)
        trainers = Presence(blocks, deadline=case.deadline, plan={"init": "one"})
        self._transport = SimulatedTransport(network, self)
        self._has_local = case.moves
        self._loop = ServerLoop(self._transport, trainers)
        say = self._loop.say
        self.update = (
            SimulatedUpdate(blocks, work)
            if blocks.sync_mode
            else SimulatedBlocks(blocks, work, geo=case.mode == "geo")
        )
        kind = (
            SyncServer(blocks, self.update, trainers, say)
            if isinstance(self.update, SimulatedUpdate)
            else AsyncServer(
                blocks,
                self.update,
                {n: np.frombuffer(h[0], np.float32) for n, h in self.update.history.items()},
                trainers,
                say,
            )
        )
        self.machine = Serving(kind, trainers, say, Refusals(quiet))

    def start(self) -> None:
        """Open the door, and begin."""
        self.begun = True
        door = self._transport.bind(self.endpoint, has_local=self._has_local)
        self._loop.begin(self.machine, door)
        self.wake_at(self._loop.wakes)

    def step(self) -> None:
        """Take a step of the loop."""
        try:
            self._loop.step()
        except Exception as e:  # of any kind, as a server does
            self.machine.say_why(e)
            self.end(e)
            return
        if self.machine.ended:
            self.end(None)
        self.wake_at(self._loop.wakes)

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        self._transport.close()
