"""The sockets of one server: the one that it is spoken to by, and its lines to other servers.

The first is bound twice: to the endpoint, and to a Unix socket for trainers on the same host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.errors import ConfigError
from dtrans.protocol import wire
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.peer_line import PeerLine
from dtrans.protocol.presence import RETRY, log
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server_peers import ServerPeer, ServerPeers
from dtrans.protocol.trainer_line import DOOR
from dtrans.run.net.keys import SERVER, STATUS, Keys
from dtrans.run.net.own_folder import OwnFolder
from dtrans.run.net.sockets import (
    LINGER,
    Doorkeeper,
    Handshakes,
    Speakers,
    bind,
    bound_address,
    check_host,
    connect,
    limit,
    new_socket,
    tcp_address,
)


class PeerSocket:
    """The socket of a `PeerLine`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        me: str,
        peer: ServerPeer,
        greeting: Mapping[str, Any],
        keys: Keys,
        patience: float,
    ) -> None:
        self.line = PeerLine(me, peer, greeting, keys.secret, self._say, min(RETRY, patience))
        address = tcp_address(peer.endpoint)
        keys.check(f"pserver {me} connects to {peer.endpoint}", address)
        self.socket = new_socket(context, zmq.DEALER, patience)
        self.handshakes = Handshakes(self.socket, keys, address)
        connect(self.socket, address, keys, DOOR, SERVER)

    def _say(self, frames: list[Any]) -> None:
        self.socket.send_multipart(frames, copy=False)

    def listen(self) -> None:
        """Take what is here. Raises PeerError for a refusal."""
        events = []
        # the connection first: the last words of a peer come before its end
        while self.handshakes.monitor.poll(0):
            events.append(self.handshakes.take())
        while self.socket.poll(0):
            self.line.heard(self.socket.recv_multipart(copy=False))
        for why in (why for _, why in events if why):
            raise self.line.barred(why)
        seen = {event for event, _ in events}
        if zmq.EVENT_DISCONNECTED in seen:
            self.line.broken(time.monotonic())
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in seen:
            self.line.connected()

    def close(self, *, failed: bool) -> None:
        """End it. Where the job has ended well, nobody waits for anything that was said here."""
        self.handshakes.close()
        self.socket.close(linger=0 if failed or self.line.peer.gone else int(LINGER * 1000))


class ServerSockets:
    """The sockets of one server, none of which is there before `bind`.

    Args:
      keys: of the job.
      limits: the largest frame, and how many messages of one peer may wait
        (`dtrans.protocol.wire.limits`).
      patience: seconds without a sign of another process after which its connection ends.

    Attributes:
      local: the path of the Unix socket; empty, where paths are too long for one.
      barred: counts the connections that were not let in.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        keys: Keys,
        limits: tuple[int, int],
        patience: float,
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._limits, self._patience = limits, patience
        self.barred = Refusals(log)
        self.counted: Callable[[bytes | str, str, Iterator[Any]], Iterator[Any]] = (
            lambda to, op, messages: messages
        )
        self.local = ""
        self._context = context
        self._bound = ""
        self._lines: dict[str, PeerSocket] = {}
        self._ready: dict[Any, int] = {}
        self._poller = zmq.Poller()

    def bind(self, *, allow_remote: bool) -> None:
        """Raises ConfigError for an endpoint that may not be, or cannot be bound."""
        remedy = "Executor(allow_remote=True)"
        check_host("this pserver", self.endpoint, remedy, self._keys, allow_remote=allow_remote)
        self._socket = new_socket(self._context, zmq.ROUTER, self._patience)
        limit(self._socket, *self._limits)
        self._speakers = Speakers(self._socket, self._note_refused)
        self._doorkeeper = Doorkeeper(self._context, self._keys, {DOOR: "", OBSERVER: STATUS})
        self._folder = OwnFolder()
        local = str(self._folder.path / "socket")
        try:
            self._bound = bind(
                self._socket, bound_address(self.endpoint), self._keys, tcp_address(self.endpoint)
            )
            if len(os.fsencode(local)) <= zmq.IPC_PATH_MAX_LEN:
                bind(self._socket, f"ipc://{local}", self._keys)
                self.local = local
        except zmq.ZMQError as e:
            self.close(failed=True)
            raise ConfigError(
                f"pserver {self.endpoint} cannot be bound: {zmq.strerror(e.errno or 0)}"
            ) from e

    def connect(self, peers: ServerPeers) -> None:
        """Open the lines to other servers, and listen to all."""
        for peer in peers.known.values():
            self._lines[peer.endpoint] = PeerSocket(
                self._context, self.endpoint, peer, peers.greeting(peer), self._keys, self._patience
            )
        lines = [s for line in self._lines.values() for s in (line.socket, line.handshakes.monitor)]
        for s in (self._socket, self._speakers.monitor, *lines):
            self._poller.register(s, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """End a `poll` when this file descriptor can be read."""
        self._poller.register(fd, zmq.POLLIN)

    def poll(self, seconds: float, take: Callable[[list[Any]], None]) -> bool:
        """Wait until something is here; whether that was a message to this server, whose frames
        `take` is given."""
        self._ready = dict(self._poller.poll(max(0, int(seconds * 1000))))
        if self._socket not in self._ready:
            return False
        frames = self._socket.recv_multipart(copy=False)
        self._speakers.know(frames[0])
        take(frames)  # and nobody keeps them: they have much memory
        return True

    def look(self, now: float) -> None:
        """Give up lines to other servers that were not made again in time."""
        for line in self._lines.values():
            line.line.look(now)

    def listen(self, lose: Callable[[bytes], None]) -> None:
        """Take what else `poll` has found.

        Args:
          lose: is given the address of each who spoke by a connection that has ended.

        Raises:
          PeerError: a peer refuses, or says that it has ended.
        """
        if self._speakers.monitor in self._ready:
            self._speakers.listen()
        for address in self._speakers.lost():
            lose(address)
        if not self._ready.keys() <= {self._socket, self._speakers.monitor}:
            for line in self._lines.values():
                line.listen()

    def _note_refused(self) -> None:
        self.barred.note(
            "pserver %s refused a connection that does not speak the protocol, or has not the "
            "job's token or keys",
            self.endpoint,
        )

    def say(
        self, to: bytes | str, op: str, /, blocks: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> None:
        """Send a message to a trainer or to another server, as `dtrans.protocol.presence.Say`.

        Raises:
          PeerError: the other server has ended.
        """
        messages = self.counted(
            to, op, wire.framed(op, blocks, **fields)
        )  # an iterator, which waits until arrays are computed
        if isinstance(to, str):
            self._lines[to].line.send(fields["step"], messages)
            return
        for frames in messages:
            self._socket.send_multipart([to, *frames], copy=not blocks)

    def close(self, *, failed: bool) -> None:
        """Close all; last words go out."""
        for line in self._lines.values():
            line.close(failed=failed)
        self._let_go()
        self._doorkeeper.close()
        self._speakers.close()
        self._socket.close(linger=int(LINGER * 1000))
        self._folder.close()

    def _let_go(self) -> None:
        """Stop listening, and wait until the endpoint can be bound again: ZeroMQ closes sockets in
        its own time."""
        if not self._bound:
            return
        self._socket.linger = int(LINGER * 1000)
        limit = time.monotonic() + LINGER
        self._socket.unbind(self._bound)
        monitor = self._speakers.monitor
        while monitor.poll(max(0, int((limit - time.monotonic()) * 1000))):
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_CLOSED:
                return
