"""Attacks on a socket: connections with changed bits, many connections, a peer that never reads."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

from role_threads import HANG


def address(endpoint: str) -> tuple[str, int]:
    """Return the host and port of an endpoint, or of a ZeroMQ address."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


class Tap:
    """Proxy between a client and a server, which records the client's bytes.

    Attributes:
      endpoint: the endpoint to which the client connects.
      recorded: the bytes so far.
    """

    def __init__(self, endpoint: str) -> None:
        self.recorded = bytearray()
        self._target = endpoint
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._relay, daemon=True)]
        self._threads[0].start()

    def _relay(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection(address(self._target))
            self._open += [client, server]
            self._threads.append(
                threading.Thread(target=self._pump, args=(server, client, None), daemon=True)
            )
            self._threads[-1].start()
            self._pump(client, server, self.recorded)

    def _pump(self, origin: socket.socket, target: socket.socket, record: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(1 << 16):
                if record is not None:
                    record += data
                target.sendall(data)

    def close(self) -> None:
        for s in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
        for t in self._threads:
            t.join(HANG)


def replay(endpoint: str, stream: bytes) -> None:
    """Send the recorded bytes of a connection, and close the connection."""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(address(endpoint), timeout=HANG) as line,
    ):
        line.sendall(stream)
        with contextlib.suppress(OSError):  # the server may have closed the connection
            line.shutdown(socket.SHUT_WR)
        while line.recv(1 << 16):
            pass  # until the server closes the connection


def flipped(stream: bytes, r: random.Random, count: int) -> bytes:
    """Return the bytes with `count` changed bits.

    Early changes end the handshake, so most changes are after the handshake.
    """
    made = bytearray(stream)
    early = r.random() < 0.2
    for _ in range(count):
        made[r.randrange(0 if early else 180, len(made))] ^= 1 << r.randrange(8)
    return bytes(made)


def flips(endpoint: str, stream: bytes, seed: int, connections: int, each: int) -> None:
    """Replay a connection many times, each time with different bits flipped."""
    r = random.Random(seed)
    for _ in range(connections):
        replay(endpoint, flipped(stream, r, each))


@contextlib.contextmanager
def many_connections(endpoint: str, count: int, open_at_once: int) -> Iterator[Callable[[], None]]:
    """Yield a function that opens `count` connections, one after the other.

    The last `open_at_once` connections stay open until the block ends.
    """
    held: list[socket.socket] = []

    def open_all() -> None:
        for _ in range(count):
            held.append(socket.create_connection(address(endpoint), timeout=HANG))
            if len(held) > open_at_once:
                held.pop(0).close()

    try:
        yield open_all
    finally:
        for s in held:
            s.close()
