"""Status of a running job for observers, reported by a server or by trainer 0 of a collective job.

An observer has the job's token and connects under the user name `OBSERVER`. It may only request the
status, and the job does not wait for it. `StatusReporter` answers at most `RATE` requests a second.

The process records its numbers of steps and bytes about once a second. Rates are means over the
last `WINDOW` seconds. If the trainers have made fewer than `STEPS` steps each in this time, the
window is longer: up to `LONGEST` seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dtrans.errors import StateError, WireError
from dtrans.ir import fingerprint
from dtrans.protocol import wire
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.tables.stored_tables import StoredTables


OBSERVER = "an observer of the job"  # user name of observers
RATE = 50  # maximum number of answers per second, to all observers together
WINDOW = 10.0  # minimum number of seconds over which rates are computed
STEPS = 5  # mean number of steps per trainer in a window; with fewer steps, the window is longer
LONGEST = 600.0  # seconds of the longest window
EACH = 0.9  # minimum number of seconds between two samples of the counts

# states of a trainer, worst first
STATES = (
    "failed",
    "dropped",
    "not here yet",
    "connection lost",
    "left",
    "present",
)

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True)
class TrainerStatus:
    """Status of one trainer, as known to the reporting process: a server, or trainer 0.

    Attributes:
      trainer: id of the trainer.
      state: one of `STATES`.
      doing: the trainer's progress in its step; empty if it has not connected or has left.
      step: number of steps that the trainer has made; None if the process does not count steps.
      steps_per_second: mean number of steps per second over the window.
      staleness: number of other trainers' steps that were missing in the parameters from which the
        trainer computed its last gradients; None in synchronous mode.
      silent: seconds since the trainer's last message; None before its first message.
      received: number of bytes received from the trainer; None if the process does not count bytes.
      sent: number of bytes sent to the trainer; None if the process does not count bytes.
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
    """Status of one server, or of trainer 0 of a collective job.

    Attributes:
      endpoint: endpoint of the process.
      plan: digest (hash) of the plan; empty if the job compares no digests. All servers of a job
        have the same digest.
      mode: "synchronous", "asynchronous" or "collective".
      count: number of trainers of the job.
      uptime: seconds since the process began to wait for trainers.
      doing: "serving", "training", or "waiting for ...".
      step: number of steps of the trainer with the most steps; None if the process does not count
        steps.
      steps_per_second: mean number of steps per second over the window.
      received: number of bytes received from trainers and other servers.
      sent: number of bytes sent to trainers and other servers.
      received_per_second: mean number of bytes received per second over the window.
      sent_per_second: mean number of bytes sent per second over the window. A process that does not
        count bytes reports None for these four values.
      refused: number of refused messages.
      barred: number of refused connections.
      saving: maps the name of each pending checkpoint to the seconds since its write started.
      checkpoint: fields of the last checkpoint's `CheckpointStatus`; empty before the first one.
      tables: fields of the `TableStatus` of each block of a table.
      generation: number of the generation (`dtrans.protocol.generations`); None in a job without
        snapshots.
      snapshot: step of the newest snapshot that the server has written; None before the first
        snapshot.
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
    generation: int | None
    snapshot: int | None


@dataclasses.dataclass(frozen=True)
class CheckpointStatus:
    """Status of a checkpoint that a server has written or failed to write.

    Attributes:
      name: name of the checkpoint.
      step: number of steps that the requesting trainer had made.
      ago: seconds since the end of the write.
      seconds: duration of the write.
      blocks: number of this server's blocks in the checkpoint.
      error: error of the write; empty if it succeeded.
    """

    name: str
    step: int
    ago: float
    seconds: float
    blocks: int
    error: str


@dataclasses.dataclass(frozen=True)
class TableStatus:
    """Numbers of rows of a table on one server, which stores a part of the table (a block).

    Attributes:
      name: name of the block.
      created: number of rows that are stored in memory.
      rows: number of rows of the block, including rows that are not stored yet.
    """

    name: str
    created: int
    rows: int


def read_report(message: wire.Message) -> tuple[ServerStatus, list[TrainerStatus]]:
    """Return the records in a `status_report` message.

    Raises:
      WireError: the message is malformed.
    """
    server = _record(ServerStatus, message["server"])
    for table in server.tables:
        _record(TableStatus, table)
    if server.checkpoint:
        _record(CheckpointStatus, server.checkpoint)
    trainers = [_record(TrainerStatus, x) for x in message["trainers"]]
    for t in trainers:
        if t.state not in STATES:
            raise WireError(
                f"a status with a trainer whose state is {wire.brief(t.state)}, expected one of "
                f"{', '.join(STATES)}"
            )
    return server, trainers


def _types(kind: type) -> dict[str, Any]:
    """Return the Python type that each field of a record must have, to check a received message."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        found[name] = hint
        if not isinstance(hint, types.UnionType):
            found[name] = typing.get_origin(hint) or hint
    return found


_TYPES: dict[Any, dict[str, Any]] = {
    kind: _types(kind) for kind in (ServerStatus, TrainerStatus, CheckpointStatus, TableStatus)
}


def _record(kind: type[Record], fields: Any) -> Record:
    """Return a record from the fields of a received message; raise WireError for a wrong type."""
    wanted = _TYPES[kind]
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        raise WireError(
            "a status of another version of dtrans; run `dtrans status` with the version that the "
            "job uses"
        )
    for name, value in fields.items():
        if not isinstance(value, wanted[name]):
            raise WireError(f"a status whose field {name} has the wrong value {wire.brief(value)}")
    return kind(**fields)


class Observed(Protocol):
    """Interface to a server, or to trainer 0 of a collective job, for its status report.

    Attributes:
      endpoint: endpoint of the process.
      word: mode of the job: "synchronous", "asynchronous" or "collective".
      idle: text for `ServerStatus.doing` while the process does not wait.
      tables: blocks of tables of the process; None if it has none.
    """

    endpoint: str
    word: str
    idle: str
    tables: StoredTables | None

    def progress(self) -> dict[int, int]:
        """Return a map from the id of each trainer to its number of steps."""

    def staleness(self, k: int) -> int | None:
        """Return `TrainerStatus.staleness` of trainer k."""

    def doing(self, k: int) -> str:
        """Return the progress of trainer k in its step."""

    def awaited(self) -> str:
        """Return a description of what the process waits for; empty if it does not wait."""


class ObservedTrainers(Protocol):
    """Interface to the trainers of a job, for a status report.

    Attributes:
      count: number of trainers of the job.
      started: time at which the process began to wait for trainers.
      dropped: ids of the lost trainers without which the job continues.
      left_before: ids of the trainers that left the job before this generation.
    """

    count: int
    started: float
    dropped: frozenset[int]
    left_before: frozenset[int]

    @property
    def plan(self) -> Mapping[str, str]:
        """Digest (hash) of each part of the plan, by name."""

    @property
    def known(self) -> Mapping[int, Trainer]:
        """State of each trainer that has connected, by the trainer's id."""

    @property
    def bytes_sent(self) -> int | None:
        """Number of bytes that the process has sent; None if it does not count bytes."""


class Sample(typing.NamedTuple):
    """Counts of a process at one time.

    Attributes:
      time: time of the counts, in seconds.
      steps: maps the id of each trainer to its number of steps.
      received: number of received bytes.
      sent: number of sent bytes; None if the process does not count bytes.
    """

    time: float
    steps: Mapping[int, int]
    received: int
    sent: int | None


class StatusReporter:
    """Answers of a server, or of trainer 0, to requests for the job's status (`dtrans status`).

    Args:
      kind: the server, or trainer 0 of a collective job.
      trainers: trainers of the job.
      refusals: counter of refused messages.

    Attributes:
      barred: counter of refused connections.
      received: number of bytes of received messages.
      saving: maps the name of each pending checkpoint to the time at which its write started.
      generation: number of the generation; None in a job without snapshots.
      snapshot: function that returns the step of the newest written snapshot, or None before the
        first snapshot.
    """

    def __init__(self, kind: Observed, trainers: ObservedTrainers, refusals: Refusals) -> None:
        self._kind, self._trainers, self._refusals = kind, trainers, refusals
        self.barred = refusals
        self.received = 0
        self.saving: dict[str, float] = {}
        self.generation: int | None = None
        self.snapshot: Callable[[], int | None] = lambda: None
        self._checkpoint: CheckpointStatus | None = None  # last checkpoint
        self._saved_at = 0.0  # time at which the last checkpoint's write ended
        self._samples: collections.deque[Sample] = collections.deque()
        self._budget, self._asked = float(RATE), 0.0

    # -- counting --------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Store the current numbers of steps and bytes, about once a second, to compute rates.

        Args:
          now: the current time in seconds.
        """
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
        """Record that a checkpoint was written or has failed.

        For the arguments, see `CheckpointStatus`.
        """
        seconds = now - self.saving.pop(name, now)
        self._checkpoint = CheckpointStatus(name, step, 0.0, seconds, blocks, error)
        self._saved_at = now

    # -- answering -------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Limit the rate of status requests: raise WireError if there are too many.

        All observers together may send `RATE` requests per second (a token bucket).

        Args:
          now: the current time in seconds.
        """
        self._budget = min(float(RATE), self._budget + (now - self._asked) * RATE)
        self._asked = now
        if self._budget < 1:
            raise WireError(f"observers request the status more than {RATE} times a second")
        self._budget -= 1

    def answer(self, frames: Sequence[Any], now: float) -> dict[str, Any]:
        """Return the fields of the `status_report` that answers an observer.

        Args:
          frames: message of the observer.
          now: the current time, in seconds.

        Raises:
          WireError: observers send too many requests, the message is not a `status`, or the process
            cannot report its status in its current state.
        """
        self.admit(now)
        message = wire.parse(frames)
        if message.op != "status" or message.frames:
            raise WireError(
                f"a `{message.op}` message of an observer, which may only send `status`"
            )
        try:
            return self.report(now) | message.request
        except StateError as e:
            raise WireError(f"the status is not available now: {e}") from e

    def report(self, now: float) -> dict[str, Any]:
        """Return the status of this process and of its trainers, as fields of a message."""
        sample = self._sample(now)
        first = self._samples[0] if self._samples else sample
        trainers = [self._trainer(k, sample, first) for k in range(self._trainers.count)]
        server = self._server(sample, first, trainers)
        return {
            "server": dataclasses.asdict(server),
            "trainers": [dataclasses.asdict(t) for t in trainers],
        }

    def _sizes(self, sample: Sample, first: Sample) -> dict[str, Any]:
        """Return the four fields of `ServerStatus` that count bytes."""
        if sample.sent is None or first.sent is None:
            names = ("received", "sent", "received_per_second", "sent_per_second")
            return dict.fromkeys(names)
        return {
            "received": sample.received,
            "sent": sample.sent,
            "received_per_second": _rate(sample.received - first.received, sample, first),
            "sent_per_second": _rate(sample.sent - first.sent, sample, first),
        }

    def _awaited(self, trainers: list[TrainerStatus]) -> str:
        """Describe what the process waits for; empty if it waits for nothing."""
        absent = [str(t.trainer) for t in trainers if t.state == "not here yet"]
        awaited = self._kind.awaited()
        if awaited or not absent:
            return awaited
        return f"trainer{'s' * (len(absent) > 1)} {', '.join(absent)} to connect"

    def _trainer(self, k: int, sample: Sample, first: Sample) -> TrainerStatus:
        kind, known, counts = self._kind, self._trainers.known.get(k), sample.sent is not None
        if known is None:
            size = 0 if counts else None
            state = "not here yet"
            if k in self._trainers.dropped:
                state = "dropped"
            elif k in self._trainers.left_before:
                state = "left"
            return TrainerStatus(k, state, "", None, None, None, None, size, size)
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
        waits = self._awaited(trainers)
        counting = [t for t in trainers if t.step is not None]
        last = max(counting, key=lambda t: t.step or 0, default=None)
        tables = []
        for x in kind.tables.report() if kind.tables else ():
            tables.append(dataclasses.asdict(TableStatus(x.name, x.created, x.rows)))
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
            tables=tables,
            generation=self.generation,
            snapshot=self.snapshot(),
            **self._sizes(sample, first),
        )

    def _last_saved(self, now: float) -> dict[str, Any]:
        if self._checkpoint is None:
            return {}
        return dataclasses.asdict(self._checkpoint) | {"ago": now - self._saved_at}


def _digest(plan: Mapping[str, str]) -> str:
    """Return a short text that identifies a plan, to compare servers; empty without a plan.

    Parts of a plan that may differ between the processes of a job are left out.

    Args:
      plan: digest (hash) of each part of the plan, by name.
    """
    varying = (fingerprint.BATCH, fingerprint.LOSS)
    parts = [(name, plan[name]) for name in sorted(plan) if name not in varying]
    if not parts:
        return ""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _state(t: Trainer) -> str:
    if t.done:
        return "failed" if t.failed else "left"
    return "present" if t.lost is None else "connection lost"


def _rate(count: int, sample: Sample, first: Sample) -> float:
    return count / (sample.time - first.time) if sample.time > first.time else 0.0
