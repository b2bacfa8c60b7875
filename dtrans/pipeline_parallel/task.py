"""Task of a schedule, which a device runs at a time, and its start and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias


Costs: TypeAlias = float | Sequence[float]
"""What tasks cost, in any unit of time: one number for all that a device has of a micro-batch, or one for each model
stage."""

Time: TypeAlias = float | Fraction
"""A time in that unit: an int or a fraction where costs are ints."""


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One task, `F3@1`: of micro-batch 3 at model stage 1.

    Attributes:
      kind: "F", "B" or "W".
      stage: the model stage, counted over all chunks: 0 .. num_stages * chunks - 1.
      micro: the micro-batch.
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}@{self.stage}"


def needs(task: Task, num_model_stages: int) -> tuple[Task, ...]:
    """The tasks that make what a task reads: see `Schedule.needs`."""
    kind, k, m = task.kind, task.stage, task.micro
    if kind == "F":
        return (Task("F", k - 1, m),) if k else ()
    if kind == "W":
        return (Task("B", k, m),)
    return (
        (Task("F", k, m), Task("B", k + 1, m)) if k + 1 < num_model_stages else (Task("F", k, m),)
    )


class TimedTask(NamedTuple):
    """A task with the times at which its device begins and ends it."""

    task: Task
    device: int
    start: Time
    end: Time


class Play(tuple[TimedTask, ...]):
    """Timed tasks, in any unit of time: what `Schedule.play` returns. Measured ones can be asked
    the same.

    Example:
      >>> from dtrans.pipeline_parallel.task import Task
      >>> ran = Play([TimedTask(Task("F", 0, 0), 0, 10.0, 10.5), TimedTask(Task("F", 1, 0), 1, 10.5, 11.0)])
      >>> ran.makespan, ran.bubble
      (1.0, 0.5)
    """

    __slots__ = ()

    @property
    def num_devices(self) -> int:
        """Return the number of devices, up to the last that has a task."""
        return max((t.device for t in self), default=-1) + 1

    @property
    def makespan(self) -> Time:
        """Return the time from the first start to the last end; exact if times are."""
        return max(t.end for t in self) - min(t.start for t in self) if self else 0

    @property
    def bubble(self) -> Fraction | float:
        """The idle share of devices: 1 - busy / (devices x makespan). Exact where times are; 0 if
        no time goes by."""
        busy, available = (
            sum((t.end - t.start for t in self), Fraction(0)),
            self.num_devices * self.makespan,
        )
        if not available:
            return Fraction(0)
        return 1 - busy / (Fraction(available) if isinstance(busy, Fraction) else available)
