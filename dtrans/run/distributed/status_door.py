"""Socket at which trainer 0 of a job without servers answers the command `dtrans status`.

Jobs with parameter servers do not need it, because their servers answer. The launcher, or the user,
sets the socket's endpoint by DTRANS_STATUS_ENDPOINT.

A process that asks for the status is an *observer*. An observer has the token of the job, which all
runs share. The trainers' own connections use a secret of this run (`board.shared_keys`), which
observers do not have. So this socket has separate keys.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.collective.membership_table import MembershipTable, Progress
from dtrans.protocol.job_status import OBSERVER, StatusReporter
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.tables.stored_tables import StoredTables
from dtrans.protocol.transport import Event
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.sockets import check_host
from dtrans.run.net.zmq_transport import ZmqTransport


log = logging.getLogger(__name__)
VARIABLE = "DTRANS_STATUS_ENDPOINT"
QUEUE = 100  # pending messages of one observer


class WatchedTrainers:
    """Progress of all trainers of a job without servers, for the status report of trainer 0.

    `StatusReporter` also reports for parameter servers. This class gives it the same attributes for
    a job without servers.

    Args:
      endpoint: the endpoint at which trainer 0 answers.
      count: number of trainers.
      members: progress and ends of the other trainers.
      me: returns the progress of trainer 0 itself.
      awaited: returns a description of the operation in which trainer 0 waits, or "".

    Attributes:
      heard: the time of each trainer's last message, by its id.
    """

    word, idle = "collective", "training"
    tables: StoredTables | None = None
    plan: Mapping[str, str] = {}
    bytes_sent = None
    dropped: frozenset[int] = frozenset()
    left_before: frozenset[int] = frozenset()

    def __init__(
        self,
        endpoint: str,
        count: int,
        members: MembershipTable,
        me: Callable[[], Progress],
        awaited: Callable[[], str],
    ) -> None:
        self.endpoint, self.count = endpoint, count
        self.started = time.monotonic()
        self.heard: dict[int, float] = {}
        self._members, self._me, self.awaited = members, me, awaited

    @property
    def known(self) -> dict[int, Trainer]:
        """The trainers that have sent a message or have ended, and trainer 0."""
        now = time.monotonic()
        found = {0: Trainer("", b"", heard_at=now)}
        for k in sorted({*self.heard, *self._members.ended}):
            ended = self._members.ended.get(k)
            found[k] = Trainer(
                session="",
                address=b"",
                lost=now if self._members.is_broken(k) else None,
                heard_at=self.heard.get(k, self.started),
                done=ended is not None,
                failed=bool(ended and ended.reason),
            )
        return found

    def _doing(self) -> dict[int, Progress]:
        return {0: self._me(), **self._members.doing}

    def progress(self) -> dict[int, int]:
        """Return the number of steps of each trainer that has reported a number."""
        return {k: d.steps for k, d in self._doing().items() if d.steps is not None}

    def staleness(self, k: int) -> None:
        """Return None: all trainers apply the same update, so none is stale."""

    def doing(self, k: int) -> str:
        """Describe the operation of a trainer, and its line in the user's code."""
        found = self._doing().get(k)
        if found is None:
            return "connected"
        return f"operation {found.operations}, at {found.where}"


class StatusDoor:
    """Listening socket of trainer 0 that answers `dtrans status`.

    Args:
      trainers: the trainers; the answer contains their status.
      transport: the transport that binds the socket. Its polls return the observers' requests.
      keys: the job's token and encryption keys.
      allow_remote: True to allow an endpoint that is not on loopback.

    Attributes:
      door: the socket. The caller passes its events to `take`.

    Raises:
      ConfigError: the endpoint cannot be bound, or `allow_remote` does not allow it.
    """

    def __init__(
        self,
        trainers: WatchedTrainers,
        transport: ZmqTransport,
        keys: Keys,
        *,
        allow_remote: bool,
    ) -> None:
        endpoint, remedy = trainers.endpoint, "dtrans.connect(allow_remote=True)"
        check_host(f"{VARIABLE} of trainer 0", endpoint, remedy, keys, allow_remote=allow_remote)
        self._refusals = Refusals(log)
        self.reporter = StatusReporter(trainers, trainers, self._refusals)
        self.reporter.barred = Refusals(log)
        self.door = transport.bind(
            endpoint,
            {OBSERVER: STATUS},
            frame=wire.HELLO,
            messages=QUEUE,
            name=f"{VARIABLE}={endpoint}",
            keys=keys,
        )

    def look(self, now: float) -> None:
        """Record the current numbers of steps and bytes, from which a report computes rates.

        Trainer 0 calls this method after each poll of its connections.

        Args:
          now: the current time in seconds, from the transport's clock.
        """
        self.reporter.look(now)

    def take(self, event: Event, now: float) -> None:
        """Answer a message of an observer, or count a refused connection."""
        if event.kind == "refused":
            self.reporter.barred.note(
                "trainer 0 refused a `dtrans status` connection without the job's token"
            )
        if event.kind != "message":
            return
        try:
            words = wire.header("status_report", **self.reporter.answer(event.frames, now))
        except WireError as e:
            self._refusals.note("trainer 0 refused a message of an observer: %s", e)
            words = wire.header("refuse", reason=str(e))
        self.door.send(event.address, [words])


def status_endpoint() -> str:
    """Return the endpoint at which trainer 0 answers observers, or "" if it does not answer."""
    return os.environ.get(VARIABLE, "").strip()
