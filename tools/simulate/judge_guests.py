"""Checks of guests: processes that connect to a simulated job without being a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.simulate.case import Case, Guest
from tools.simulate.noise_maker import NoiseMaker
from tools.simulate.process import Process
from tools.simulate.trainer_role import SimulatedTrainer


REFUSALS = {
    "second": ("another process is already connected as trainer", "has left, and cannot come back"),
    "stale": (
        "plans something else than",
        "another process is already connected as trainer",
        "has left, and cannot come back",
    ),
    "stranger": ("does not admit trainer",),
}


def is_harmless(guest: Guest, trainers: Sequence[SimulatedTrainer]) -> bool:
    """Return True if a guest has no effect on a job without other events.

    A second process of a trainer has no effect if all servers have already welcomed the first
    process.
    """
    return guest.kind != "second" or trainers[guest.trainer].greeted_at < guest.time


def faults_of_guests(
    case: Case, trainers: Sequence[SimulatedTrainer], guests: Sequence[Process]
) -> Iterator[str]:
    """Yield guests that were admitted, or that were refused without the right reason."""
    for guest, process in zip(case.guests, guests, strict=True):
        if isinstance(process, NoiseMaker):
            others = [op for op in process.answers if op != "refuse"]
            if others:
                yield f"the sender of malformed messages was answered with {others}"
            continue
        first, error = trainers[guest.trainer], process.error
        may_join = guest.kind == "second" and not is_harmless(guest, trainers)
        is_only_one = may_join and (first.killed or first.error is not None)
        if error is None and process.ended is not None and not is_only_one:
            yield f"{process.name} ended without an error, although it is not a part of the job"
        is_late = "waited" in str(error) or "went away" in str(error)
        is_named = is_late or any(why in str(error) for why in REFUSALS[guest.kind])
        if error is not None and not may_join and not is_named:
            yield f"{process.name} ended with an error that does not name the cause: {error}"
