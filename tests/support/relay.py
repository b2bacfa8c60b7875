"""A network between processes of one host, which a test can stop and break."""

from __future__ import annotations

import contextlib
import socket
import threading

from role_threads import HANG


class Relay:
    """A network in front of an endpoint, which a test can hold, and whose connections it can break.

    Attributes:
      connections: how many were made.
      swallowed: is set where something was lost, from when it is there until connections are cut.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.swallowed: threading.Event | None = None
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[socket.socket] = []
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
                self._open += [one, other]
                for ends in ((one, other), (other, one)):
                    self._threads.append(
                        threading.Thread(target=self._pump, args=ends, daemon=True)
                    )
                    self._threads[-1].start()

    def _pump(self, origin: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(1 << 16):
                self._flows.wait()
                if self.swallowed is None:
                    target.sendall(data)
                else:
                    self.swallowed.set()
        for s in (origin, target):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def hold(self, seconds: float) -> None:
        """Let nothing through for a while, and return at once."""
        self._flows.clear()
        threading.Timer(seconds, self._flows.set).start()

    def lose(self) -> threading.Event:
        """Lose all data until connections are cut; return an event for the first loss."""
        self.swallowed = threading.Event()
        return self.swallowed

    def cut(self) -> None:
        """Break all connections; what comes by those that are made again is not lost."""
        self.swallowed = None
        broken, self._open = self._open, []
        for s in broken:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def refuse(self) -> None:
        """Let no connection be made any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self._flows.set()
        with contextlib.suppress(OSError):
            self.refuse()
        self.cut()
        for t in self._threads:
            t.join(HANG)
