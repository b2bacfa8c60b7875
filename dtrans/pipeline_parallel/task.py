"""Task of a schedule, which a device runs at a time, and its start and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias


Costs: TypeAlias = float | Sequence[float]
"""Costs of one kind of task, in any unit of time: one number for all chunks of a device together,
or one for each model stage."""

Time: TypeAlias = float | Fraction
"""A time in that unit: an int or a fraction if costs are ints."""


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """Task of one micro-batch at one model stage: `F3@1` is F for micro-batch 3 at stage 1.

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
    """Return the tasks that compute the operands of a task: see `Schedule.needs`."""
    kind, k, m = task.kind, task.stage, task.micro
    if kind == "F":
        return (Task("F", k - 1, m),) if k else ()
    if kind == "W":
        return (Task("B", k, m),)
    forward = Task("F", k, m)
    return (forward, Task("B", k + 1, m)) if k + 1 < num_model_stages else (forward,)


class TimedTask(NamedTuple):
    """A task, its device, and the times at which the device begins and ends it."""

    task: Task
    device: int
    start: Time
    end: Time


class Play(tuple[TimedTask, ...]):
    """Timed tasks in any unit of time, simulated by `Schedule.play` or measured.

    Example:
      >>> from dtrans.pipeline_parallel.task import Task
      >>> first = TimedTask(Task("F", 0, 0), 0, 10.0, 10.5)
      >>> ran = Play([first, TimedTask(Task("F", 1, 0), 1, 10.5, 11.0)])
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
        if not self:
            return 0
        first = min(t.start for t in self)
        return max(t.end for t in self) - first

    @property
    def bubble(self) -> Fraction | float:
        """The idle share of devices: 1 - busy / (devices x makespan).

        Exact if times are; 0 if the makespan is 0.
        """
        busy = sum((t.end - t.start for t in self), Fraction(0))
        available = self.num_devices * self.makespan
        if not available:
            return Fraction(0)
        return 1 - busy / (Fraction(available) if isinstance(busy, Fraction) else available)
