"""A process that sends malformed messages to the servers of a simulated job."""

from __future__ import annotations

from random import Random

from dtrans.protocol import wire
from dtrans.protocol.transport import ROLE_USER, Event
from tools.simulate.case import Case, Guest
from tools.simulate.clock import Clock
from tools.simulate.network import Network, SimulatedTransport
from tools.simulate.process import Process


class NoiseMaker(Process):
    """A process that sends malformed messages to all servers.

    Attributes:
      answers: op of each answer.
    """

    def __init__(
        self, case: Case, guest: Guest, name: str, clock: Clock, random: Random, network: Network
    ) -> None:
        super().__init__(name, clock)
        self.answers: list[str] = []
        self._case, self._guest, self._random = case, guest, random
        self._transport = SimulatedTransport(network, self)

    def start(self) -> None:
        """Connect to the servers, and end when the job may have ended."""
        self.begun = True
        for endpoint in self._case.endpoints:
            link = self._transport.connect(endpoint, user=ROLE_USER, role=self.name)
            for _ in range(3):
                link.send(malformed(self._random, self._guest.trainer))
        self._until = self.clock.now + self._case.deadline
        self.wake_at(self._until)

    def step(self) -> None:
        """Record the answers, and end at the deadline."""
        for event in self._events():
            if event.kind == "message":
                self.answers.append(wire.parse(event.frames).op)
        if self.clock.now >= self._until:
            self.end(None)

    def _events(self) -> list[Event]:
        return list(self._transport.poll(self.clock.now))

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


def malformed(random: Random, k: int) -> list[bytes]:
    """Return the frames of a message that violates the protocol."""
    headers = [
        wire.header("hello", trainer=k, trainers=1, session="", order="none"),
        wire.header("send", step=0, pieces=[["w", 0, 4]]),
        wire.header("abort", reason="noise"),
        wire.header("goodbye"),
    ]
    head = random.choice(headers)
    malformed_frames = [
        [],
        [head[: random.randrange(len(head))]],
        [random.randbytes(random.randint(1, 40))],
        [wire.header("hello", trainer=str(k))],
        [wire.header("nonsense")],
        [wire.header("send", step=0, pieces=[["w", 1 << 62, 4]]), b"1234"],
        [head],
    ]
    return random.choice(malformed_frames)
