"""Simulation of orders of tasks: start and end of each task, micro-batches in flight, and ticks."""

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
    by_stage = lambda what, costs: _by_stage(what, costs, num_stages, chunks)
    forwards, backwards = by_stage("forward", forward), by_stage("backward", backward)
    if not splits_backward:
        return {"F": forwards, "B": backwards}
    weights = by_stage("weight", weight)
    cotangents: list[Time] = []
    for k, (both, part) in enumerate(zip(backwards, weights, strict=True)):
        if part > both:
            raise ConfigError(
                f"at model stage {k} weight={part} is more than backward={both}, which includes it"
            )
        cotangents.append(both - part)
    return {"F": forwards, "B": cotangents, "W": weights}


def _by_stage(what: str, costs: Costs, num_stages: int, chunks: int) -> list[Time]:
    """Return the cost of each model stage; chunks of a device share one number equally."""
    count = num_stages * chunks
    if not isinstance(costs, Iterable):
        return [_part(checked_cost(what, costs), chunks)] * count
    each: list[Time] = [checked_cost(what, cost) for cost in costs]
    if len(each) != count:
        raise ConfigError(
            f"{what} has {len(each)} costs, and the schedule {count} model stages; give one for "
            "each, or one number"
        )
    return each


def _part(cost: float, chunks: int) -> Time:
    """Return a cost divided by the number of chunks, exact if the cost is."""
    if not isinstance(cost, int):
        return cost / chunks
    return Fraction(cost, chunks) if cost % chunks else cost // chunks


def checked_cost(what: str, cost: object) -> float:
    """Return a cost as an int or float.

    Raises:
      ConfigError: it is negative, not finite, or not a number.
    """
    if isinstance(cost, bool) or not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
        raise ConfigError(f"{what}={cost!r}: a cost is a finite number of at least 0")
    return int(cost) if isinstance(cost, Integral) else float(cost)


def play_tasks(
    tasks: Sequence[Task], num_stages: int, costs: Mapping[str, Sequence[Time]], transfer: float
) -> Play:
    """Return the times of tasks if each device begins its next task as soon as it can.

    Args:
      tasks: the tasks; each follows its operands, and those of a device are in the device's order.
      num_stages: the number of devices.
      costs: kind of task to its cost at each model stage.
      transfer: the time of a transfer between devices.
    """
    free: list[Time] = [0] * num_stages
    ends: dict[Task, Time] = {}
    timed = []
    for task in tasks:
        device = task.stage % num_stages
        start = free[device]
        for operand in needs(task, len(costs["F"])):
            is_sent = operand.stage % num_stages != device
            start = max(start, ends[operand] + (transfer if is_sent else 0))
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
    """Return a table of tasks of one tick each: rows are devices, columns ticks, None is idle."""
    table: list[list[Task | None]] = [[None] * int(ticked.makespan) for _ in range(num_stages)]
    for task, device, start, _ in ticked:
        table[device][int(start)] = task
    return tuple(map(tuple, table))
