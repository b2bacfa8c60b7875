"""A network between processes of one host, which a test can stop and break."""

from __future__ import annotations

import contextlib
import socket
import threading

from role_threads import HANG


class _Connection:
    """Connection through the relay.

    Attributes:
      loss: set when the first data are lost; None while no data are lost.
    """

    def __init__(self, *ends: socket.socket) -> None:
        self.ends = ends
        self.loss: threading.Event | None = None

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Relay:
    """Network in front of an endpoint; a test can hold the network, and break its connections.

    Attributes:
      connections: number of connections so far.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[_Connection] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                try:
                    other = socket.create_connection(self._target)
                except ConnectionRefusedError:  # there is no server yet
                    one.close()
                    continue
                self.connections += 1
                connection = _Connection(one, other)
                self._open.append(connection)
                for ends in ((one, other), (other, one)):
                    args = (connection, *ends)
                    self._threads.append(
                        threading.Thread(target=self._pump, args=args, daemon=True)
                    )
                    self._threads[-1].start()

    def _pump(self, connection: _Connection, origin: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(1 << 16):
                self._flows.wait()
                # After a loss, the connection passes no more data: TCP never delivers a stream with
                # a hole.
                if connection.loss is None:
                    target.sendall(data)
                else:
                    connection.loss.set()
        for s in (origin, target):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def hold(self, seconds: float) -> None:
        """Stop all data for some seconds, and return at once."""
        self._flows.clear()
        threading.Timer(seconds, self._flows.set).start()

    def lose(self) -> threading.Event:
        """Lose all further data of the open connections; return an event for the first loss."""
        loss = threading.Event()
        for connection in self._open:
            connection.loss = loss
        return loss

    def cut(self) -> None:
        """Break all connections. Later connections lose no data."""
        broken, self._open = self._open, []
        for connection in broken:
            connection.close()

    def refuse(self) -> None:
        """Refuse all new connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self._flows.set()
        with contextlib.suppress(OSError):
            self.refuse()
        self.cut()
        for t in self._threads:
            t.join(HANG)
