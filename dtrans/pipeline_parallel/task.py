"""Tasks of a schedule, their dependencies, and the simulation of their times.

A *timeline* is a list of tasks with start and end times, simulated here or measured in a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import NamedTuple, TypeAlias

from dtrans.errors import ConfigError


Costs: TypeAlias = float | Sequence[float]
"""Costs of one kind of task, in any unit of time: a number for all chunks of a device together, or
the cost at each model stage."""

Time: TypeAlias = float | Fraction
"""A time in the unit of the costs. Exact (an int or a fraction) if all costs are ints."""


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """Task of one micro-batch at one model stage. `F3@1` is F of micro-batch 3 at stage 1.

    Attributes:
      kind: "F" for forward, "B" for backward, "W" for gradients of weights.
      stage: the index of the model stage, from 0 to num_stages * chunks - 1.
      micro: the index of the micro-batch.
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}@{self.stage}"


def needs(task: Task, num_model_stages: int) -> tuple[Task, ...]:
    """Return the tasks that compute the operands of a task. See `Schedule.needs`."""
    kind, k, m = task.kind, task.stage, task.micro
    if kind == "F" and k == 0:
        return ()
    if kind == "F":
        return (Task("F", k - 1, m),)
    if kind == "W":
        return (Task("B", k, m),)
    if k + 1 == num_model_stages:
        return (Task("F", k, m),)
    return (Task("F", k, m), Task("B", k + 1, m))


class TimedTask(NamedTuple):
    """A task, its device, and the times at which it starts and ends."""

    task: Task
    device: int
    start: Time
    end: Time


class Timeline(tuple[TimedTask, ...]):
    """Timed tasks of a step, in any unit of time. They are simulated or measured.

    Example:
      >>> from dtrans.pipeline_parallel.task import Task
      >>> first = TimedTask(Task("F", 0, 0), 0, 10.0, 10.5)
      >>> ran = Timeline([first, TimedTask(Task("F", 1, 0), 1, 10.5, 11.0)])
      >>> ran.makespan, ran.bubble
      (1.0, 0.5)
    """

    __slots__ = ()

    @property
    def num_devices(self) -> int:
        """Number of devices: the highest device index of a task, plus 1."""
        return max((t.device for t in self), default=-1) + 1

    @property
    def makespan(self) -> Time:
        """Time from the first start to the last end; exact for ints and fractions."""
        if not self:
            return 0
        first = min(t.start for t in self)
        return max(t.end for t in self) - first

    @property
    def bubble(self) -> Fraction | float:
        """Share of time in which devices are idle: 1 - busy / (devices x makespan).

        For ints and fractions, the result is exact. If the makespan is 0, the bubble is 0.
        """
        busy = sum((t.end - t.start for t in self), Fraction(0))
        available: Time = self.num_devices * self.makespan
        if not available:
            return Fraction(0)
        if isinstance(busy, Fraction):
            available = Fraction(available)
        return 1 - busy / available


# -- simulation ------------------------------------------------------------------------------------


def task_costs(
    num_stages: int,
    chunks: int,
    splits_backward: bool,
    forward: Costs,
    backward: Costs,
    weight: Costs,
) -> dict[str, list[Time]]:
    """Return the cost of each kind of task at each model stage: {"F": [1, 1], "B": [2, 2]}.

    Args:
      num_stages, chunks: the number of devices, and the number of model stages on each device.
      splits_backward: True if W tasks compute the gradients of weights.
      forward, backward, weight: see `Schedule.timeline`.
    """
    by_stage = lambda what, costs: _by_stage(what, costs, num_stages, chunks)
    forwards, backwards = by_stage("forward", forward), by_stage("backward", backward)
    if not splits_backward:
        return {"F": forwards, "B": backwards}
    weights = by_stage("weight", weight)
    cotangents: list[Time] = []
    for k, (both, part) in enumerate(zip(backwards, weights, strict=True)):
        if part > both:
            raise ConfigError(
                f"weight={part} of model stage {k} is more than backward={both}, but the time of "
                "the weight gradients is a part of the backward time; pass the time of the full "
                "backward pass as backward"
            )
        cotangents.append(both - part)
    return {"F": forwards, "B": cotangents, "W": weights}


def _by_stage(what: str, costs: Costs, num_stages: int, chunks: int) -> list[Time]:
    """Return the cost of each model stage. A single number is divided by the number of chunks."""
    count = num_stages * chunks
    if not isinstance(costs, Iterable):
        return [_part(checked_cost(what, costs), chunks)] * count
    each: list[Time] = [checked_cost(what, cost) for cost in costs]
    if len(each) != count:
        raise ConfigError(
            f"{what} has {len(each)} costs; expected one number, or a cost for each of the {count} "
            "model stages"
        )
    return each


def _part(cost: float, chunks: int) -> Time:
    """Return `cost / chunks`: an int or a fraction for an int, a float for a float."""
    if not isinstance(cost, int):
        return cost / chunks
    if cost % chunks:
        return Fraction(cost, chunks)
    return cost // chunks


def checked_cost(what: str, cost: object) -> float:
    """Return a cost as an int or float.

    Raises:
      ConfigError: the cost is negative, not finite, or not a number.
    """
    if isinstance(cost, bool) or not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
        raise ConfigError(f"{what} is {cost!r}; expected a finite number, 0 or more")
    return int(cost) if isinstance(cost, Integral) else float(cost)


def play_tasks(
    tasks: Sequence[Task], num_stages: int, costs: Mapping[str, Sequence[Time]], transfer: float
) -> Timeline:
    """Simulate tasks: each device starts its next task when the operands have arrived.

    Args:
      tasks: the tasks of all devices, each after its operands.
      num_stages: the number of devices.
      costs: maps each kind of task to its cost at each model stage.
      transfer: the time of a transfer between devices.
    """
    free: list[Time] = [0] * num_stages
    ends: dict[Task, Time] = {}
    timed = []
    for task in tasks:
        device = task.stage % num_stages
        start = free[device]
        for operand in needs(task, len(costs["F"])):
            ready = ends[operand]
            if operand.stage % num_stages != device:
                ready += transfer
            start = max(start, ready)
        free[device] = ends[task] = start + costs[task.kind][task.stage]
        timed.append(TimedTask(task, device, start, ends[task]))
    return Timeline(sorted(timed, key=lambda t: (t.start, t.device)))


def peak_in_flight(order: Sequence[Task], splits_backward: bool) -> int:
    """Return the largest number of micro-batches in flight on a device. See `Schedule.peak`."""
    last = "W" if splits_backward else "B"
    now = most = 0
    for task in order:
        now += task.kind == "F"
        most = max(most, now)
        now -= task.kind == last
    return most


def tick_table(ticked: Timeline, num_stages: int) -> tuple[tuple[Task | None, ...], ...]:
    """Return the task of each device in each tick, as [device][tick]; None for an idle tick.

    Args:
      ticked: timed tasks; each takes one tick (one unit of time).
      num_stages: the number of devices.
    """
    table: list[list[Task | None]] = [[None] * int(ticked.makespan) for _ in range(num_stages)]
    for task, device, start, _ in ticked:
        table[device][int(start)] = task
    return tuple(map(tuple, table))
