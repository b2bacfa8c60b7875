"""Status of a running job for observers: of a server, or of trainer 0 in a collective job.

An observer has the job's token and connects as `OBSERVER`. It may only ask for the status, is no
part of the job, and nobody waits for it. `StatusReporter` answers at most `RATE` requests a second,
from numbers that the process counts anyway. A request costs a message each way.

Rates are means over a window. The process records its counts once a second. The window is `WINDOW`
seconds long, or as long as the last `STEPS` steps took, up to `LONGEST`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dtrans.errors import StateError, WireError
from dtrans.ir import fingerprint
from dtrans.protocol import wire
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.trainer_registry import Trainer
from dtrans.protocol.tables.stored_tables import StoredTables


OBSERVER = "an observer of the job"  # user name of observers
RATE = 50  # answers a second, to all observers together
WINDOW = 10.0  # seconds
STEPS = 5
LONGEST = 600.0  # seconds
EACH = 0.9  # least seconds between two samples

# states of a trainer, the worst first
STATES = (
    "failed",
    "not here yet",
    "connection lost",
    "left",
    "present",
)

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True)
class TrainerStatus:
    """One trainer, as the process that answers sees it.

    Attributes:
      trainer: id of the trainer.
      state: one of `STATES`.
      doing: progress in its step; empty if it is not present.
      step: number of steps that it has made; None if the server counts none.
      steps_per_second: over the window.
      staleness: number of steps of other trainers that its last gradients lacked; None in
        synchronous mode.
      silent: seconds since its last message; None before there is one.
      received, sent: bytes from it to the server, and from the server to it; None if nobody counts.
    """

    trainer: int
    state: str
    doing: str
    step: int | None
    steps_per_second: float | None
    staleness: int | None
    silent: float | None
    received: int | None
    sent: int | None


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """One server, or trainer 0 of collectives.

    Attributes:
      endpoint: of the server, or of trainer 0.
      plan: digest of its plan's fingerprint, the same on all servers of a job; empty if it has
        none.
      mode: "synchronous", "asynchronous" or "collective".
      count: number of trainers of the job.
      uptime: seconds since it began to wait for trainers.
      doing: "serving", "training", or a description of its wait.
      step: number of steps that it has made, or its furthest trainer if it is asynchronous; None if
        it counts none.
      steps_per_second: over the window.
      received, sent: bytes since it began, from and to trainers and other servers; None if nobody
        counts.
      received_per_second, sent_per_second: over the window.
      refused: number of refused messages.
      barred: number of refused connections.
      saving: checkpoints that are being written; name to seconds so far.
      checkpoint: the last one that has ended, a `CheckpointStatus` as a map; empty if there is
        none.
      tables: each block of a table, a `TableStatus` as a map.
    """

    endpoint: str
    plan: str
    mode: str
    count: int
    uptime: float
    doing: str
    step: int | None
    steps_per_second: float | None
    received: int | None
    sent: int | None
    received_per_second: float | None
    sent_per_second: float | None
    refused: int
    barred: int
    saving: dict[str, float]
    checkpoint: dict[str, Any]
    tables: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class CheckpointStatus:
    """A checkpoint that a server has written, or could not write.

    Attributes:
      name: of the checkpoint.
      step: of the trainer that asked for it.
      ago: seconds since it ended.
      seconds: duration of the write.
      blocks: number of blocks of this server.
      error: the reason if it could not be written, else empty.
    """

    name: str
    step: int
    ago: float
    seconds: float
    blocks: int
    error: str


@dataclasses.dataclass(frozen=True)
class TableStatus:
    """A block of a table, and its number of materialized rows."""

    name: str
    created: int
    rows: int


def read_report(message: wire.Message) -> tuple[ServerStatus, list[TrainerStatus]]:
    """Return the records of a `status_report`. Raises WireError if it is malformed."""
    server = _record(ServerStatus, message["server"])
    for table in server.tables:
        _record(TableStatus, table)
    if server.checkpoint:
        _record(CheckpointStatus, server.checkpoint)
    trainers = [_record(TrainerStatus, x) for x in message["trainers"]]
    for t in trainers:
        if t.state not in STATES:
            raise WireError(f"a status with a trainer whose state is {wire.brief(t.state)}")
    return server, trainers


def _types(kind: type) -> dict[str, Any]:
    """Return the types of a record's fields, without what is in lists and maps."""
    hints = typing.get_type_hints(kind)
    return {
        n: x if isinstance(x, types.UnionType) else typing.get_origin(x) or x
        for n, x in hints.items()
    }


_TYPES: dict[Any, dict[str, Any]] = {
    kind: _types(kind) for kind in (ServerStatus, TrainerStatus, CheckpointStatus, TableStatus)
}


def _record(kind: type[Record], fields: Any) -> Record:
    """Return a record of fields that came as a message."""
    wanted = _TYPES[kind]
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        raise WireError("a status of another version of dtrans")
    odd = [n for n, x in fields.items() if not isinstance(x, wanted[n])]
    if odd:
        raise WireError(f"a status whose {odd[0]} is {wire.brief(fields[odd[0]])}")
    return kind(**fields)


class Observed(Protocol):
    """Interface of a server, or of another process, to its status.

    Attributes:
      word: name of its mode.
      idle: its activity while nothing is waited for.
      tables: its blocks of tables, if any.
    """

    endpoint: str
    word: str
    idle: str
    tables: StoredTables | None

    def progress(self) -> dict[int, int]:
        """Return the number of steps of each trainer."""

    def staleness(self, k: int) -> int | None:
        """Return the number of steps of other trainers that the last gradients of one lacked."""

    def doing(self, k: int) -> str:
        """Return the progress of a trainer in its step."""

    def awaited(self) -> str:
        """Return a description of the server's wait; empty if it waits for nothing."""


class ObservedTrainers(Protocol):
    """Interface of a `TrainerRegistry` to the status."""

    count: int
    started: float

    @property
    def plan(self) -> Mapping[str, str]:
        """The parts of the plan's fingerprint."""

    @property
    def known(self) -> Mapping[int, Trainer]:
        """The trainers that have come."""

    @property
    def bytes_sent(self) -> int | None:
        """The bytes of all sent messages; None if nobody counts them."""


class Sample(typing.NamedTuple):
    """Counts of a process at a time."""

    time: float
    steps: Mapping[int, int]
    received: int
    sent: int | None


class StatusReporter:
    """Status of one process, and its answers to observers.

    Args:
      kind: the process.
      trainers: of the job.
      refusals: of messages.

    Attributes:
      barred: refusals of connections.
      received: bytes of received messages.
      saving: checkpoints that are being written, and the time at which each began.
    """

    def __init__(self, kind: Observed, trainers: ObservedTrainers, refusals: Refusals) -> None:
        self._kind, self._trainers, self._refusals = kind, trainers, refusals
        self.barred = refusals
        self.received = 0
        self.saving: dict[str, float] = {}
        self._checkpoint: CheckpointStatus | None = None  # the last one that has ended, and when
        self._saved_at = 0.0
        self._samples: collections.deque[Sample] = collections.deque()
        self._budget, self._asked = float(RATE), 0.0

    # -- counting --------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Record the counts, unless that was done a moment ago."""
        samples = self._samples
        if samples and now - samples[-1].time < EACH:
            return
        samples.append(self._sample(now))
        done = sum(samples[-1].steps.values())
        while len(samples) > 1:
            since, steps = now - samples[1].time, done - sum(samples[1].steps.values())
            if since < WINDOW or (since < LONGEST and steps < STEPS * len(samples[-1].steps)):
                break
            samples.popleft()

    def _sample(self, now: float) -> Sample:
        return Sample(now, self._kind.progress(), self.received, self._trainers.bytes_sent)

    def saved(self, name: str, step: int, blocks: int, error: str, now: float) -> None:
        """Note the end of a checkpoint's write."""
        seconds = now - self.saving.pop(name, now)
        self._checkpoint, self._saved_at = (
            CheckpointStatus(name, step, 0.0, seconds, blocks, error),
            now,
        )

    # -- answering -------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Take one request from the budget. Raises WireError if observers ask too often."""
        self._budget = min(float(RATE), self._budget + (now - self._asked) * RATE)
        self._asked = now
        if self._budget < 1:
            raise WireError(
                f"observers ask for the status more than {RATE} times a second: ask less often"
            )
        self._budget -= 1

    def answer(self, frames: Sequence[Any], now: float) -> dict[str, Any]:
        """Return the fields of the `status_report` that answers an observer.

        Raises:
          WireError: it may not ask now, its message is not a `status`, or there is no status now.
        """
        self.admit(now)
        message = wire.parse(frames)
        if message.op != "status" or message.frames:
            raise WireError(
                f"a `{message.op}` message of an observer, which may only ask for the status"
            )
        try:
            return self.report(now) | message.request
        except StateError as e:
            raise WireError(f"there is no status now: {e}") from e

    def report(self, now: float) -> dict[str, Any]:
        """Return the records of the process and of each trainer."""
        sample = self._sample(now)
        first = self._samples[0] if self._samples else sample
        trainers = [self._trainer(k, sample, first) for k in range(self._trainers.count)]
        server = self._server(sample, first, trainers)
        return {
            "server": dataclasses.asdict(server),
            "trainers": [dataclasses.asdict(t) for t in trainers],
        }

    def _trainer(self, k: int, sample: Sample, first: Sample) -> TrainerStatus:
        kind, known, counts = self._kind, self._trainers.known.get(k), sample.sent is not None
        if known is None:
            size = 0 if counts else None
            return TrainerStatus(k, "not here yet", "", None, None, None, None, size, size)
        step, rate = sample.steps.get(k), None
        if step is not None:
            rate = _rate(step - first.steps.get(k, 0), sample, first)
        return TrainerStatus(
            trainer=k,
            state=_state(known),
            doing="" if known.done else kind.doing(k),
            step=step,
            steps_per_second=rate,
            staleness=kind.staleness(k),
            silent=max(0.0, sample.time - known.heard_at),
            received=known.received if counts else None,
            sent=known.sent if counts else None,
        )

    def _server(self, sample: Sample, first: Sample, trainers: list[TrainerStatus]) -> ServerStatus:
        kind = self._kind
        absent = [str(t.trainer) for t in trainers if t.state == "not here yet"]
        come = f"trainer{'s' * (len(absent) > 1)} {', '.join(absent)} to connect" if absent else ""
        waits = kind.awaited() or come
        last = max(
            (t for t in trainers if t.step is not None), key=lambda t: t.step or 0, default=None
        )
        tables = kind.tables.report() if kind.tables else ()
        sizes: dict[str, Any] = dict.fromkeys(
            ("received", "sent", "received_per_second", "sent_per_second")
        )
        if sample.sent is not None and first.sent is not None:
            sizes = {
                "received": sample.received,
                "sent": sample.sent,
                "received_per_second": _rate(sample.received - first.received, sample, first),
                "sent_per_second": _rate(sample.sent - first.sent, sample, first),
            }
        saving = {n: sample.time - since for n, since in self.saving.items()}
        return ServerStatus(
            endpoint=kind.endpoint,
            plan=_digest(self._trainers.plan),
            mode=kind.word,
            count=self._trainers.count,
            uptime=sample.time - self._trainers.started,
            doing=f"waiting for {waits}" if waits else kind.idle,
            step=None if last is None else last.step,
            steps_per_second=None if last is None else last.steps_per_second,
            refused=self._refusals.count,
            barred=self.barred.count,
            saving=saving,
            checkpoint=self._last_saved(sample.time),
            tables=[dataclasses.asdict(TableStatus(x.name, x.created, x.rows)) for x in tables],
            **sizes,
        )

    def _last_saved(self, now: float) -> dict[str, Any]:
        saved = self._checkpoint
        return {} if saved is None else dataclasses.asdict(saved) | {"ago": now - self._saved_at}


def _digest(plan: Mapping[str, str]) -> str:
    """Return a short digest of a fingerprint, without the parts in which roles of one job may
    differ.

    It is empty for an empty fingerprint.
    """
    parts = sorted(
        (n, x) for n, x in plan.items() if n not in (fingerprint.BATCH, fingerprint.LOSS)
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12] if parts else ""


def _state(t: Trainer) -> str:
    if t.done:
        return "failed" if t.failed else "left"
    return "present" if t.lost is None else "connection lost"


def _rate(count: int, sample: Sample, first: Sample) -> float:
    return count / (sample.time - first.time) if sample.time > first.time else 0.0
