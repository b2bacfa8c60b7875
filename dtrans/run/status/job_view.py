"""Status of a job: its servers, and each trainer merged over all servers.

Servers answer at slightly different times, so their counts may differ by a step.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from dtrans.protocol.job_status import STATES, TrainerStatus
from dtrans.run.status.observer import Answer


@dataclasses.dataclass(frozen=True)
class TrainerRow:
    """Status of one trainer, merged over all servers that answered.

    Attributes:
      trainer: the trainer's id.
      state: the worst state that a server reports.
      doing: the trainer's activity in the current step, from the server with the smallest step.
      step: the smallest number of the trainer's steps that a server reports; None if no server
        counts steps.
      steps_per_second: the lowest rate at a server.
      staleness: the largest staleness at a server; None in synchronous mode.
      silent: seconds since a server received the trainer's last message; None without a message.
      bytes_in: bytes that all servers sent to the trainer; None if no server counts bytes.
      bytes_out: bytes that the trainer sent to all servers; None if no server counts bytes.
    """

    trainer: int
    state: str
    doing: str
    step: int | None
    steps_per_second: float | None
    staleness: int | None
    silent: float | None
    bytes_in: int | None
    bytes_out: int | None


def merge_trainers(answers: Sequence[Answer]) -> list[TrainerRow]:
    """Return one row per trainer from the answers of all servers, in the order of trainer ids.

    Each server reports all trainers as it sees them. For example, a trainer that sends to two
    servers has the smaller of the two step numbers.
    """
    seen: dict[int, list[TrainerStatus]] = {}
    for answer in answers:
        for t in answer.trainers:
            seen.setdefault(t.trainer, []).append(t)
    return [_merge(k, seen[k]) for k in sorted(seen)]


def _merge(k: int, views: Sequence[TrainerStatus]) -> TrainerRow:
    counted, states, stale, rates, silences = [], [], [], [], []
    for t in views:
        states.append(t.state)
        if t.staleness is not None:
            stale.append(t.staleness)
        if t.silent is not None:
            silences.append(t.silent)
        if t.step is not None:
            counted.append(t)
            if t.steps_per_second is not None:
                rates.append(t.steps_per_second)
    # A trainer that waits for one server may be sending to another server, or computing. So among
    # servers with the same step, sending is preferred to computing, and computing to waiting.
    slowest = min(
        counted or views,
        key=lambda t: (t.step or 0, t.doing.startswith("waiting"), t.doing == "computing"),
    )
    return TrainerRow(
        trainer=k,
        state=min(states, key=STATES.index),
        doing=slowest.doing,
        step=slowest.step,
        steps_per_second=min(rates, default=None),
        staleness=max(stale, default=None),
        silent=min(silences, default=None),
        bytes_in=_sum(views, "sent"),
        bytes_out=_sum(views, "received"),
    )


def _sum(views: Sequence[TrainerStatus], field: str) -> int | None:
    counts = [getattr(t, field) for t in views if getattr(t, field) is not None]
    if not counts:
        return None
    return sum(counts)


def as_document(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the status of a job as a JSON document with `time`, `servers` and `trainers`.

    The entry of a server that did not answer has an `error`.
    """
    servers = []
    for x in answers:
        fields: dict[str, Any] = {"error": x.error}
        if x.server is not None:
            fields = dataclasses.asdict(x.server)
        servers.append({**fields, "endpoint": x.endpoint})
    trainers = [dataclasses.asdict(t) for t in merge_trainers(answers)]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(),
        "servers": servers,
        "trainers": trainers,
    }
