"""The socket by which trainer 0 of collectives answers observers (`dtrans status`).

The launcher, or the user, says where in DTRANS_STATUS_ENDPOINT.

Observers show the job's token alone, and trainers another secret. The socket therefore has its own
keys.
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
from dtrans.protocol.server.trainer_registry import Trainer
from dtrans.protocol.tables.stored_tables import StoredTables
from dtrans.protocol.transport import Event
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.sockets import check_host
from dtrans.run.net.zmq_transport import ZmqTransport


log = logging.getLogger(__name__)
VARIABLE = "DTRANS_STATUS_ENDPOINT"
QUEUE = 100  # messages of one observer


class WatchedTrainers:
    """The trainers of a job as trainer 0 sees them, for a `StatusReporter`.

    Args:
      endpoint: where trainer 0 answers.
      count: number of trainers.
      members: the other trainers, as trainer 0 knows them.
      me: returns the state of trainer 0 itself.
      awaited: returns the event for which it has waited long.

    Attributes:
      heard: when each trainer said something last.
    """

    word, idle = "collective", "training"
    tables: StoredTables | None = None
    plan: Mapping[str, str] = {}
    bytes_sent = None

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
        """Those that have said something, or have ended."""
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
        """Return the number of steps of each trainer that has said it."""
        return {k: d.steps for k, d in self._doing().items() if d.steps is not None}

    def staleness(self, k: int) -> None:
        """Return None: all trainers apply the same update, so none is stale."""

    def doing(self, k: int) -> str:
        """Describe the operation of a trainer, and its line in the user's code."""
        found = self._doing().get(k)
        return "connected" if found is None else f"operation {found.operations}, at {found.where}"


class StatusDoor:
    """Answers observers.

    Args:
      trainers: whose status it is.
      transport: its polls have requests among their events.
      keys: of the job.
      allow_remote: bind an endpoint that is not loopback.

    Attributes:
      door: the listening socket, whose events to `take`.

    Raises:
      ConfigError: the endpoint may not be, or cannot be bound.
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
        """Note the counts of the job."""
        self.reporter.look(now)

    def take(self, event: Event, now: float) -> None:
        """Answer a message of an observer, or count one that was not let in."""
        if event.kind == "refused":
            self.reporter.barred.note(
                "trainer 0 refused a connection of an observer that has not the job's token"
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
    """Read the endpoint at which trainer 0 answers observers; empty if it does not."""
    return os.environ.get(VARIABLE, "").strip()
