"""Orders of tasks, played: when each task begins and ends, what is in flight meanwhile, and at
which tick it comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.task import Costs, Play, Task, Time, TimedTask, needs


def task_costs(
    num_stages: int,
    chunks: int,
    splits_backward: bool,
    forward: Costs,
    backward: Costs,
    weight: Costs,
) -> dict[str, list[Time]]:
    """Return the cost of each kind of task at each model stage; see `Schedule.play`."""
    by_stage = lambda what, given: _by_stage(what, given, num_stages, chunks)
    costs = {"F": by_stage("forward", forward), "B": by_stage("backward", backward)}
    if splits_backward:
        costs["W"] = by_stage("weight", weight)
        for k, (whole, part) in enumerate(zip(costs["B"], costs["W"], strict=True)):
            if part > whole:
                raise ConfigError(
                    f"at model stage {k} weight={part} is more than backward={whole}, which it is "
                    "in"
                )
        costs["B"] = [whole - part for whole, part in zip(costs["B"], costs["W"], strict=True)]
    return costs


def _by_stage(what: str, given: Costs, num_stages: int, chunks: int) -> list[Time]:
    """Return the cost of each model stage; chunks of a device share one number equally."""
    count = num_stages * chunks
    if not isinstance(given, Iterable):
        return [_part(checked_cost(what, given), chunks)] * count
    each = [checked_cost(what, cost) for cost in given]
    if len(each) != count:
        raise ConfigError(f"{what} has {len(each)} costs, and the schedule {count} model stages")
    return list(each)


def _part(cost: float, chunks: int) -> Time:
    """Return a cost divided by the number of chunks, exact if the cost is."""
    if not isinstance(cost, int):
        return cost / chunks
    return Fraction(cost, chunks) if cost % chunks else cost // chunks


def checked_cost(what: str, cost: object) -> float:
    """Return a cost as an int or float. Raises ConfigError for an invalid one."""
    if isinstance(cost, bool) or not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
        raise ConfigError(f"{what}={cost!r}: a cost is a finite number of at least 0")
    return int(cost) if isinstance(cost, Integral) else float(cost)


def play_tasks(
    tasks: Sequence[Task], num_stages: int, costs: Mapping[str, Sequence[Time]], transfer: float
) -> Play:
    """Return the times of tasks, if each device begins its next task as soon as it can.

    Args:
      tasks: the tasks; each follows its inputs, and those of a device are in the device's order.
      num_stages: the number of devices.
      costs: kind of task to its cost at each model stage.
      transfer: the time of a transfer between devices.
    """
    free: list[Time] = [0] * num_stages
    ends: dict[Task, Time] = {}
    timed = []
    for task in tasks:
        device = task.stage % num_stages
        before = needs(task, len(costs["F"]))
        there = [ends[t] + (transfer if t.stage % num_stages != device else 0) for t in before]
        start = max([free[device], *there])
        free[device] = ends[task] = start + costs[task.kind][task.stage]
        timed.append(TimedTask(task, device, start, ends[task]))
    return Play(sorted(timed, key=lambda t: (t.start, t.device)))


def peak_in_flight(order: Sequence[Task], splits_backward: bool) -> int:
    """Return the most micro-batches in flight on a device, counted once for each chunk."""
    last = "W" if splits_backward else "B"
    now = most = 0
    for task in order:
        now += task.kind == "F"
        most = max(most, now)
        now -= task.kind == last
    return most


def tick_table(ticked: Play, num_stages: int) -> tuple[tuple[Task | None, ...], ...]:
    """Tasks that take one tick each, as a table: rows are devices, columns ticks, None is idle."""
    table: list[list[Task | None]] = [[None] * int(ticked.makespan) for _ in range(num_stages)]
    for task, device, start, _ in ticked:
        table[device][int(start)] = task
    return tuple(map(tuple, table))
