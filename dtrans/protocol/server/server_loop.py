"""Loop of one server over a transport: messages, connections to other servers, and the clock.

    message, connected, lost, refused    at the door: trainers, other servers and observers
    events of a link                     a connection to another server (`peer_line`)
    each second                          the machine looks who is late

`step` does one turn, so the driver of a server decides when: real servers loop, and simulated ones
take a step when something happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrans.protocol import wire
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.peer_line import PeerLine
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.trainer_registry import TrainerRegistry, log
from dtrans.protocol.transport import DOOR, LINGER, RETRY, SERVER, Door, Event, Link, Transport


TICK = 1.0  # seconds between two looks at who is late
BURST = 1000  # messages per trainer that are read before a look at who is late


class ServerLoop:
    """The loop of one server.

    Args:
      trainers: of the server.
      secret: the job's token.
      retry: seconds in which a broken connection may be made again.
      ended_saves: returns the checkpoints that have ended since the last call: the name, and the
        reason if it could not be written.
      ended_roles: returns the processes of the job that have ended, and their exits.

    Attributes:
      wakes: the time of the next look.
      barred: counts the connections that the door has refused.
    """

    def __init__(
        self,
        transport: Transport,
        trainers: TrainerRegistry,
        *,
        secret: str = "",
        retry: float = RETRY,
        ended_saves: Callable[[], Iterable[tuple[str, str]]] = tuple,
        ended_roles: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.wakes = math.inf
        self.barred = Refusals(log)
        self._transport, self._trainers = transport, trainers
        self._secret, self._retry = secret, retry
        self._ended_saves, self._ended_roles = ended_saves, ended_roles
        self._lines: dict[str, tuple[PeerLine, Link]] = {}
        self._by_link: dict[object, PeerLine] = {}
        self._serving: Serving
        self._door: Door

    def begin(self, serving: Serving, door: Door) -> None:
        """Connect to the other servers, and begin to wait for trainers.

        Args:
          serving: the machine of the server; it sends by `say`.
          door: of the server.

        Raises:
          ConfigError: nothing protects a connection to another server.
        """
        self._serving, self._door = serving, door
        serving.local, serving.status.barred = door.local, self.barred
        peers, now = serving.kind.peers, self._transport.now()
        for peer in peers.known.values():
            link = self._transport.connect(
                peer.endpoint, user=DOOR, role=SERVER, name=f"pserver {peers.me}"
            )
            line = PeerLine(
                peers.me, peer, peers.greeting(peer), self._secret, link.send, self._retry
            )
            self._lines[peer.endpoint] = line, link
            self._by_link[link] = line
        self._trainers.begin(now)
        self.wakes = now + TICK

    def step(self) -> None:
        """Wait until something comes or the next look is due, and take it.

        Raises:
          DeadlineError: a trainer or a server did not come, fell silent, or let the others wait too
            long.
          PeerError: one failed, refused, or left before the others.
        """
        self._take_all(self.wakes)
        for name, error in self._ended_saves():
            self._serving.written(name, error, self._transport.now())
        if self._transport.now() >= self.wakes:
            self._look()

    def _look(self) -> None:
        # A message that came while an update was made may be what somebody is about to be missed
        # for. No more than a burst is read: somebody may flood this server.
        for _ in range(BURST * self._trainers.count):
            if not self._take_all(self._transport.now()):
                break
        now = self._transport.now()
        for role, how in self._ended_roles().items():
            kind, _, number = role.partition(" ")
            if kind == "trainer":
                self._serving.died(int(number), how, now)
        for line, _ in self._lines.values():
            line.look(now)
        self._serving.look(now)
        self.wakes = self._transport.now() + TICK

    def _take_all(self, until: float) -> bool:
        """Take the events of one poll; return True if there was one. Their frames are freed with
        this call."""
        any_came = False
        for event in self._transport.poll(until):
            any_came = True
            self._take(event)
        return any_came

    def _take(self, event: Event) -> None:
        line, now = self._by_link.get(event.source), self._transport.now()
        if line is not None:
            line.take(event, now)
        elif event.kind == "message":
            is_observer = event.user == OBSERVER
            take = self._serving.observe if is_observer else self._serving.take
            take(event.address, event.frames, now)
        elif event.kind == "connected":
            self._trainers.back(event.address)
        elif event.kind == "lost":
            self._serving.lose(event.address, now)
        else:
            self.barred.note(
                "pserver %s refused a connection that does not speak the protocol, or has not the "
                "job's token or keys",
                self._serving.kind.endpoint,
            )

    def say(
        self, to: bytes | str, op: str, /, blocks: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> None:
        """Send a message to a trainer or another server, as `Say` of the registry.

        Raises:
          PeerError: the other server has ended.
        """
        # an iterator, which waits until arrays are computed
        messages = self._trainers.counted(to, op, wire.framed(op, blocks, **fields))
        if isinstance(to, str):
            self._lines[to][0].send(fields["step"], messages)
            return
        for frames in messages:
            self._door.send(to, frames)

    def close(self, *, failed: bool) -> None:
        """Close the connections to other servers, and the door; last messages leave.

        Nobody waits for what was said to another server once a job has ended well.
        """
        for line, link in self._lines.values():
            link.close(0.0 if failed or line.peer.gone else LINGER)
        self._door.close(LINGER)
