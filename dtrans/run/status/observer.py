"""Observer of a running job, which asks each server for its status over one connection.

The observer connects under the user name `dtrans.protocol.job_status.OBSERVER`, and is not part of
the job.

Each server has at most one pending request. A request is sent only on an open connection, because a
queued request could reach a server of a later job.
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
    """Status of one server as it answered, or the reason why there is no answer.

    Attributes:
      endpoint: the server's endpoint, as the user wrote it.
      error: the reason why there is no status; empty if the server has answered.
      server: the status of the server; None without an answer.
      trainers: the status of each trainer at this server.
    """

    endpoint: str
    error: str
    server: ServerStatus | None = None
    trainers: Sequence[TrainerStatus] = ()


class JobObserver:
    """Connections to the servers of a job, to ask for their status.

    The token is read from the environment, or from a file that the same user's launcher has written
    on this host (`dtrans.run.net.started_jobs`).

    Args:
      endpoints: the endpoints of the servers.
      timeout: seconds to wait for all answers.

    Raises:
      ConfigError: a connection to another host needs a token.
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
        """Ask all servers; return their answers in the order of the endpoints."""
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
    """Connection of the observer to one server, for repeated requests.

    Attributes:
      answer: the answer to the last request; None before it arrives.
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
        """Begin a request."""
        self._request, self._asked, self.answer = self._request + 1, False, None
        for event in self._link.changes():  # events since the last request
            self.take(event)
        if self._barred:
            # Open a new connection, since a new job may have started, and ZeroMQ does not connect
            # again after a refusal.
            self._link.close()
            self._open()
            self._barred, self.answer = False, None
        self._ask()

    def _ask(self) -> None:
        """Send the request, if the connection is open and the request was not sent yet."""
        if self._is_up and not self._asked:
            self._link.send([wire.header("status", request=self._request)])
            self._asked = True

    def take(self, event: Event) -> None:
        """Handle an event of the transport, if it belongs to this connection."""
        if event.source is not self._link:
            return
        if event.kind == "message":
            self._on_message(event.frames)
        elif event.kind == "barred":
            reason = f"it refused the connection of dtrans status: {event.reason}"
            self._barred, self.answer = True, Answer(self.endpoint, reason)
        else:
            # the answer to a request is lost with its connection, so the request is sent again
            self._is_up, self._asked = event.kind == "connected", False
            self._ask()

    def _on_message(self, frames: Sequence[Any]) -> None:
        try:
            message = wire.parse(frames)
            if message.op == "refuse":
                reason = f"it refused the request: {message['reason']}"
                self.answer = Answer(self.endpoint, reason)
            elif message.op == "status_report" and message.fields.get("request") == self._request:
                self.answer = Answer(self.endpoint, "", *read_report(message))
        except WireError as e:
            self.answer = Answer(self.endpoint, f"it sent an invalid answer: {e}")
