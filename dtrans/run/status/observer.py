"""An observer of a running job: asks each server for its status over one connection.

It connects as `dtrans.protocol.job_status.OBSERVER`, which servers answer and otherwise leave
alone. One request is under way to each server at most: one that cannot be sent is not kept for a
server that comes later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.job_status import OBSERVER, ServerStatus, TrainerStatus, read_report
from dtrans.protocol.transport import Event
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.net_options import choose_encryption
from dtrans.run.net.started_jobs import token_of_job
from dtrans.run.net.zmq_transport import ZmqTransport


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
        keys = Keys.from_environment(choose_encryption(None))
        if not keys.token and not keys.folder:
            keys = dataclasses.replace(keys, token=token_of_job(endpoints))
        self._transport = ZmqTransport(keys)
        try:
            self._lines = [_Line(self._transport, ep) for ep in endpoints]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> JobObserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self) -> list[Answer]:
        """Return the answer of each server, in their order."""
        limit = self._transport.now() + self._timeout
        for line in self._lines:
            line.begin()
        while self._transport.now() < limit and any(x.answer is None for x in self._lines):
            for event in self._transport.poll(limit):
                for line in self._lines:
                    line.take(event)
        silence = f"no answer within {self._timeout:g} s"
        return [line.answer or Answer(line.endpoint, silence) for line in self._lines]

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class _Line:
    """The connection to one server.

    Attributes:
      answer: to the last request; None while there is none.
    """

    def __init__(self, transport: ZmqTransport, endpoint: str) -> None:
        self.endpoint = endpoint
        self.answer: Answer | None = None
        self._transport = transport
        self._request, self._asked, self._barred = 0, False, False
        self._open()

    def _open(self) -> None:
        self._is_up = False
        self._link = self._transport.connect(
            self.endpoint, user=OBSERVER, role=STATUS, name="dtrans status"
        )

    def begin(self) -> None:
        """Begin another request."""
        self._request, self._asked, self.answer = self._request + 1, False, None
        for event in self._link.changes():  # since the last request
            self.take(event)
        if self._barred:
            # ZeroMQ does not connect again by itself, and another job may be there now
            self._link.close()
            self._open()
            self._barred, self.answer = False, None
        self._ask()

    def _ask(self) -> None:
        """Send the request, on a connection that is there: it is for no server that comes later."""
        if self._is_up and not self._asked:
            self._link.send([wire.header("status", request=self._request)])
            self._asked = True

    def take(self, event: Event) -> None:
        """Take an event of this connection; ignore those of others."""
        if event.source is not self._link:
            return
        if event.kind == "message":
            self._hear(event.frames)
        elif event.kind == "barred":
            why = f"it does not let dtrans status in: {event.reason}"
            self._barred, self.answer = True, Answer(self.endpoint, why)
        else:
            self._is_up, self._asked = event.kind == "connected", False
            self._ask()

    def _hear(self, frames: Sequence[Any]) -> None:
        try:
            message = wire.parse(frames)
            if message.op == "refuse":
                self.answer = Answer(self.endpoint, f"it refused: {message['reason']}")
            elif message.op == "status_report" and message.fields.get("request") == self._request:
                self.answer = Answer(self.endpoint, "", *read_report(message))
        except WireError as e:
            self.answer = Answer(self.endpoint, f"it answered with {e}")
