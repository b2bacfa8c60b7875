"""The status of a job: that of its servers, and that of each trainer over all servers.

Servers are asked one after the other. Their counts belong to nearly one time, and may differ by a
step.
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
    """One trainer over all servers that answered.

    Attributes:
      trainer: its number.
      state: the worst that a server says.
      doing: how far it is in its step, at the server where it has made the fewest.
      step: the fewest steps that it has made at a server; None where no server counts any.
      steps_per_second: at the slowest server.
      staleness: the largest; None in synchronous mode.
      silent: seconds since any server heard of it; None where none has.
      bytes_in, bytes_out: that it was sent, and that it sent, to all of these servers; None where
        nobody counts.
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
    """Return the rows of all trainers that the servers know."""
    seen: dict[int, list[TrainerStatus]] = {}
    for answer in answers:
        for t in answer.trainers:
            seen.setdefault(t.trainer, []).append(t)
    return [_merge(k, seen[k]) for k in sorted(seen)]


def _merge(k: int, views: Sequence[TrainerStatus]) -> TrainerRow:
    counted = [t for t in views if t.step is not None]
    state = min((t.state for t in views), key=STATES.index)
    # a trainer that waits at one server may be sending to another
    slowest = min(
        counted or views,
        key=lambda t: (t.step or 0, t.doing.startswith("waiting"), t.doing == "computing"),
    )
    stale = [t.staleness for t in views if t.staleness is not None]
    rates = [t.steps_per_second for t in counted if t.steps_per_second is not None]
    return TrainerRow(
        trainer=k,
        state=state,
        doing=slowest.doing,
        step=slowest.step,
        steps_per_second=min(rates, default=None),
        staleness=max(stale, default=None),
        silent=min((t.silent for t in views if t.silent is not None), default=None),
        bytes_in=_sum([t.sent for t in views]),
        bytes_out=_sum([t.received for t in views]),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [n for n in counts if n is not None]
    return sum(known) if known else None


def as_document(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the status of a job for JSON: `time`, `servers` (an `error` for one that did not
    answer), `trainers`."""
    servers = []
    for x in answers:
        fields = {"error": x.error} if x.server is None else dataclasses.asdict(x.server)
        servers.append({**fields, "endpoint": x.endpoint})
    trainers = [dataclasses.asdict(t) for t in merge_trainers(answers)]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(),
        "servers": servers,
        "trainers": trainers,
    }
