"""Loop of one server over a transport.

    events of the listener     messages and connections of trainers, other servers and observers
    events of a link           the connection to another server (`peer_line`)
    every second               a check of the deadlines of trainers and servers
    every tenth of a second    in a job with snapshots, a check for a new generation

Each call of `step` waits for events and handles them. A real server calls `step` in a loop, and
the simulator calls it at each event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrans.errors import LostPeerError
from dtrans.protocol import wire
from dtrans.protocol.generations import Generations, NewGeneration
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.peer_line import PeerLine
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry, log
from dtrans.protocol.transport import (
    LINGER,
    RETRY,
    ROLE_USER,
    SERVER,
    Event,
    Link,
    Listener,
    Transport,
)


TICK = 1.0  # seconds between two checks of deadlines
GENERATION_TICK = 0.1  # seconds between two checks for a new generation
BURST = 1000  # maximum number of polls for each trainer between two checks of deadlines


class ServerLoop:
    """Loop of one server.

    Args:
      trainers: the server's trainers.
      secret: the job's token.
      retry: seconds that the server waits for another server to reconnect.
      ended_saves: returns the checkpoint writes that have ended since its last call. For each of
        them, it returns the checkpoint's name, and an error text that is empty after a success.
      ended_roles: returns the trainers and servers of the job that have ended, with the exit status
        of their processes. Its argument is the number of a generation; ends in earlier generations
        are left out.
      generations: interface to the launcher, which starts a new *generation* of the job after each
        failure; None in a job without snapshots.
      write_newest: function that starts to write the states after the newest steps, and the
        replicas of lost servers. The loop calls it when the generation is ending, with the names of
        the lost servers. It is called again if more servers are lost before the next generation.

    Attributes:
      barred: counter of the connections that the listener has refused.
    """

    def __init__(
        self,
        transport: Transport,
        trainers: TrainerRegistry,
        *,
        secret: str = "",
        retry: float = RETRY,
        ended_saves: Callable[[], Iterable[tuple[str, str]]] = tuple,
        ended_roles: Callable[[int], Mapping[str, str]] = lambda generation: {},
        generations: Generations | None = None,
        write_newest: Callable[[tuple[str, ...]], object] = lambda lost: None,
    ) -> None:
        self._next_look = self._next_generation_look = math.inf
        self._generations, self._write_newest = generations, write_newest
        self._lost_at: float | None = None  # time of the first failure in this generation
        self.barred = Refusals(log)
        self._transport, self._trainers = transport, trainers
        self._secret, self._retry = secret, retry
        self._ended_saves, self._ended_roles = ended_saves, ended_roles
        self._lines: dict[str, tuple[PeerLine, Link]] = {}
        self._by_link: dict[object, PeerLine] = {}
        self._serving: Serving
        self._listener: Listener

    def begin(
        self,
        serving: Serving,
        listener: Listener,
        early: Mapping[bytes, wire.Message] = {},
    ) -> None:
        """Connect to the other servers, and start to wait for trainers.

        Args:
          serving: state machine of the server; it sends messages by `say`.
          listener: listener of the server.
          early: greetings of this generation that arrived in the previous generation, by address.

        Raises:
          ConfigError: another server is on another host, and neither a token nor keys protect the
            messages.
        """
        self._serving, self._listener = serving, listener
        serving.local, serving.status.barred = listener.local, self.barred
        peers, now = serving.kind.peers, self._transport.now()
        for peer in peers.known.values():
            link = self._transport.connect(
                peer.endpoint, user=ROLE_USER, role=SERVER, name=f"pserver {peers.me}"
            )
            line = PeerLine(
                peers.me, peer, peers.greeting(peer), self._secret, link.send, self._retry
            )
            self._lines[peer.endpoint] = line, link
            self._by_link[link] = line
        self._trainers.begin(now)
        self._next_look = now + TICK
        if self._generations is not None:
            self._next_generation_look = now + GENERATION_TICK
        if isinstance(serving.kind, SyncServer):
            serving.kind.replicate_state()
        serving.greet_again(early, now)

    @property
    def wakes(self) -> float:
        """Time at which the loop must next check its deadlines, or look for a new generation."""
        return min(self._next_look, self._next_generation_look)

    def step(self) -> None:
        """Wait for events, handle the events, and check deadlines if a check is due.

        In a job with snapshots, the loop reports the failure of another trainer or server to the
        launcher. It continues until the launcher starts a new generation.

        Raises:
          NewGeneration: the launcher has started a new generation. The server has sent `rewind` to
            trainers.
          LostPeerError: another trainer or server is lost. In a job with snapshots, the server
            raises this error only if the launcher starts no new generation within the deadline.
          DeadlineError: a trainer or server did not connect in time, fell silent, or let other
            processes wait for too long.
          PeerError: a trainer or server failed, refused a message, or left too early.
        """
        try:
            self._step()
        except LostPeerError as e:
            self._note_lost(e)

    def _note_lost(self, e: LostPeerError) -> None:
        """Report a lost process. Raise its error if no generation has begun within the deadline."""
        now = self._transport.now()
        if self._generations is None or self._serving.gate is None:
            raise e
        if self._lost_at is None:
            self._lost_at = now
            self._generations.report_lost(self._serving.gate.number, e.role, str(e))
        elif now > self._lost_at + self._trainers.deadline:
            raise e

    def _step(self) -> None:
        self._take_all(self.wakes)
        for name, error in self._ended_saves():
            self._serving.saves.written(name, error, self._transport.now())
        if self._transport.now() >= self._next_generation_look:
            self._look_for_generation()
        if self._transport.now() >= self._next_look:
            self._look()

    def _look_for_generation(self) -> None:
        assert self._generations is not None and self._serving.gate is not None
        self._next_generation_look = self._transport.now() + GENERATION_TICK
        generation, gate = self._generations.current(), self._serving.gate
        if generation.number != gate.number:
            for address in self._trainers.by_address:
                self.say(address, "rewind", generation=generation.number)
            raise NewGeneration(generation.number)
        if generation.is_ending and (not gate.is_closed or gate.lost != generation.lost):
            # A step that ends after the write would be lost, so the server takes no more messages.
            gate.is_closed, gate.lost = True, generation.lost
            self._write_newest(generation.lost)

    def _look(self) -> None:
        # Messages that arrived during an update are read before deadlines are checked, because
        # their senders are not late. The limit keeps a flood of messages from delaying the check.
        for _ in range(BURST * self._trainers.count):
            if not self._take_all(self._transport.now()):
                break
        now, gate = self._transport.now(), self._serving.gate
        if gate is not None and gate.is_closed:
            # while roles wait for a new generation after the failure of a role, no deadline is
            # checked
            self._serving.wait_for_generation(now)
            self._next_look = self._transport.now() + TICK
            return
        generation = 0 if gate is None else gate.number
        for role, how in self._ended_roles(generation).items():
            kind, _, number = role.partition(" ")
            if kind == "trainer":
                self._serving.died(int(number), how, now)
        for line, _ in self._lines.values():
            line.look(now)
        self._trainers.silent = self._listener.silent
        self._next_look = self._transport.now() + TICK
        self._serving.look(now)
        self._lost_at = None  # the lost role, if there was one, has been replaced

    def _take_all(self, until: float) -> bool:
        """Handle the events of one poll. Return True if there was an event.

        This is a separate function, so that its local variables do not hold the last frames while
        the server waits.
        """
        any_came = False
        for event in self._transport.poll(until):
            any_came = True
            self._take(event)
        return any_came

    def _take(self, event: Event) -> None:
        line, now = self._by_link.get(event.source), self._transport.now()
        if line is not None:
            line.take(event, now)
            is_closed = self._serving.gate is not None and self._serving.gate.is_closed
            if isinstance(self._serving.kind, SyncServer) and not is_closed:
                self._serving.kind.heard_backup()
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
                "pserver %s refused a connection: the other process uses another protocol, or does "
                "not have the job's token or keys",
                self._serving.kind.endpoint,
            )

    def say(
        self, to: bytes | str, op: str, /, blocks: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> None:
        """Send a message to a trainer or another server. See `trainer_registry.Say`.

        Args:
          to: address of a trainer, or endpoint of another server.
          op: kind of the message.
          blocks: name and array of each block.
          fields: fields of the header.

        Raises:
          PeerError: the other server has ended.
        """
        # `messages` is lazy, so that each array is awaited only when its message is sent.
        if isinstance(to, str):
            line = self._lines[to][0]
            messages = wire.framed(op, blocks, line.peer.messages.stamp, **fields)
            line.send(fields["step"], self._counted(messages))
            return
        for frames in self._trainers.framed(to, op, blocks, **fields):
            self._listener.send(to, frames)

    def _counted(self, messages: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Yield messages to another server; add their sizes to the count of sent bytes."""
        for frames in messages:
            self._trainers.to_servers += sum(map(len, frames))
            yield frames

    def leave_peers(self, *, failed: bool) -> None:
        """Close the links to other servers.

        Args:
          failed: True if the generation ends by a failure; pending messages are then dropped.
        """
        for line, link in self._lines.values():
            link.close(0.0 if failed or line.peer.gone else LINGER)

    def close(self, *, failed: bool) -> None:
        """Close all connections. The listener first sends its pending messages.

        Args:
          failed: True if this server has failed: pending messages to other servers are dropped.
        """
        self.leave_peers(failed=failed)
        self._listener.close(LINGER)
