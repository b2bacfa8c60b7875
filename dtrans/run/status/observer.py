"""An observer of a running job: asks each server for its status over one connection.

It connects as `dtrans.protocol.job_status.OBSERVER`, which servers answer and otherwise leave
alone. One request is under way to each server at most: one that cannot be sent is not kept for a
server that comes later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import zmq

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.job_status import OBSERVER, ServerStatus, TrainerStatus, read_report
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.net_options import choose_encryption
from dtrans.run.net.sockets import Handshakes, connect, new_socket, tcp_address
from dtrans.run.net.started_jobs import token_of_job


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of one server, or why there is none.

    Attributes:
      endpoint: of the server, as the user wrote it.
      error: why there is no status; empty where there is.
      server, trainers: the status.
    """

    endpoint: str
    error: str
    server: ServerStatus | None = None
    trainers: Sequence[TrainerStatus] = ()


class JobObserver:
    """Connections to the servers of a job, to ask for their status.

    The token is that of the environment. Without one it is that of the job here that answers at
    these endpoints (`dtrans.run.net.started_jobs`).

    Args:
      endpoints: of the servers.
      timeout: seconds that their answers may take.
    """

    def __init__(self, endpoints: Sequence[str], timeout: float) -> None:
        self._timeout = timeout
        self._context: zmq.Context[Any] = zmq.Context()
        keys = Keys.from_environment(choose_encryption(None))
        if not keys.token and not keys.folder:
            keys = dataclasses.replace(keys, token=token_of_job(endpoints))
        for ep in endpoints:
            keys.check(f"dtrans status connects to {ep}", ep)
        self._lines = [_Line(self._context, ep, keys) for ep in endpoints]

    def __enter__(self) -> JobObserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self) -> list[Answer]:
        """Return the answer of each server, in their order."""
        limit = time.monotonic() + self._timeout
        for line in self._lines:
            line.begin()
        while waiting := [line for line in self._lines if line.answer is None]:
            left = limit - time.monotonic()
            if left <= 0:
                break
            poller = zmq.Poller()
            for line in waiting:
                line.register(poller)
            ready = dict(poller.poll(max(1, int(left * 1000))))
            for line in waiting:
                line.go_on(ready)
        silence = f"no answer within {self._timeout:g} s"
        return [line.answer or Answer(line.endpoint, silence) for line in self._lines]

    def close(self) -> None:
        """Close the connections."""
        for line in self._lines:
            line.close()
        self._context.term()


class _Line:
    """The connection to one server.

    Attributes:
      answer: to the last request; None while there is none.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: Keys) -> None:
        self.endpoint = endpoint
        self.answer: Answer | None = None
        self._context, self._keys = context, keys
        self._request, self._asked, self._barred = 0, False, False
        self._open()

    def _open(self) -> None:
        address = tcp_address(self.endpoint)
        self._socket = new_socket(self._context, zmq.DEALER)
        # a request is sent on a connection that is there, or not at all
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._handshakes = Handshakes(self._socket, self._keys, address)
        connect(self._socket, address, self._keys, OBSERVER, STATUS)

    def begin(self) -> None:
        """Begin another request."""
        self._request, self._asked, self.answer = self._request + 1, False, None
        if (
            self._barred
        ):  # ZeroMQ does not connect again by itself, and another job may be there now
            self.close()
            self._open()
            self._barred = False

    def register(self, poller: zmq.Poller) -> None:
        """Wait for whatever lets this line go on."""
        poller.register(self._socket, zmq.POLLIN if self._asked else zmq.POLLIN | zmq.POLLOUT)
        poller.register(self._handshakes.monitor, zmq.POLLIN)

    def go_on(self, ready: dict[Any, int]) -> None:
        """Send the request, or take the answer, as far as that is possible now."""
        events = ready.get(self._socket, 0)
        if self._handshakes.monitor in ready and (why := self._handshakes.take()[1]):
            self._barred, self.answer = (
                True,
                Answer(self.endpoint, f"it does not let dtrans status in: {why}"),
            )
        if events & zmq.POLLOUT and not self._asked:
            with contextlib.suppress(zmq.Again):  # the connection has ended since
                self._socket.send(wire.header("status", request=self._request), zmq.NOBLOCK)
                self._asked = True
        if events & zmq.POLLIN:
            self._hear(self._socket.recv_multipart())

    def _hear(self, frames: list[bytes]) -> None:
        try:
            message = wire.parse(frames)
            if message.op == "refuse":
                self.answer = Answer(self.endpoint, f"it refused: {message['reason']}")
            elif message.op == "status_report" and message.fields.get("request") == self._request:
                self.answer = Answer(self.endpoint, "", *read_report(message))
        except WireError as e:
            self.answer = Answer(self.endpoint, f"it answered with {e}")

    def close(self) -> None:
        """Close the connection."""
        self._handshakes.close()
        self._socket.close(linger=0)
