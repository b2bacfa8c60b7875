"""A server of a simulation, around its machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from dtrans.protocol import wire
from dtrans.protocol.async_server import AsyncServer
from dtrans.protocol.peer_line import PeerLine
from dtrans.protocol.presence import Presence
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.serving import Serving
from dtrans.protocol.sync_server import SyncServer
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.network import Network, SimulatedConnection
from tools.simulate.process import Process
from tools.simulate.updates import SimulatedBlocks, SimulatedUpdate, served


TICK = 1.0  # seconds between two looks of a server
quiet = logging.getLogger("dtrans.simulation")
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


class SimulatedServer(Process):
    """A server."""

    def __init__(self, case: Case, endpoint: str, clock: Clock, random: Random) -> None:
        super().__init__(f"pserver {endpoint}", clock)
        self.endpoint = endpoint
        blocks = served(case, endpoint)
        work: Callable[[], None] = lambda: self.spend(random.expovariate(1.0) * 0.01)
        trainers = self._trainers = Presence(blocks, deadline=case.deadline, plan={"init": "one"})
        self.update = (
            SimulatedUpdate(blocks, work)
            if blocks.sync_mode
            else SimulatedBlocks(blocks, work, geo=case.mode == "geo")
        )
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
        self.machine.trainers.begin(self.clock.now)
        peers = self.machine.kind.peers
        for ep, peer in peers.known.items():
            connection = self._to_peers[ep] = network.connect(self, servers[ep], ep)
            self._lines[ep] = PeerLine(
                self.endpoint, peer, peers.greeting(peer), "", self._sender(connection)
            )
        self._tick()

    def _sender(self, connection: SimulatedConnection) -> Callable[[list[Any]], None]:
        return lambda frames: connection.to_server(frames, self.spent)

    def _tick(self) -> None:
        if self.there:
            self.deliver(("look",))
            self.clock.at(self.clock.now + TICK, self._tick)

    def say(
        self, to: bytes | str, op: str, /, blocks: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> None:
        """Send a message, as `dtrans.protocol.presence.Say` does."""
        messages = self._trainers.counted(to, op, wire.framed(op, blocks, **fields))
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
            for line in self._lines.values():
                line.look(now)
            self.machine.look(now)
        elif what == "accepted":
            self._by_address[rest[0].address] = rest[0]
        elif what == "lost":
            self._by_address.pop(rest[0], None)
            self.machine.lose(rest[0], now)
        elif what == "answer":
            self._lines[rest[0]].heard(rest[1])
        elif what == "connected":
            self._lines[rest[0]].connected()
        elif what == "broken":
            self._lines[rest[0]].broken(now)

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        for connection in self._to_peers.values():
            connection.close(0)
        for connection in list(self._by_address.values()):
            connection.close(1)
