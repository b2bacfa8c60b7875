"""Division of a list of costs into consecutive parts of similar cost.

A pipeline uses it to divide the equations of a model among stages. There are two exact rules
(`contiguous` and `balanced`), and EPL's rule, which balances the numbers of equations
(`partition_balance`). A *unit* is an entry of the list: in a pipeline, an equation or a block of
equations. A *part* consists of consecutive units. `crossing` contains the costs of boundaries
between parts: in a pipeline, the cost of sending the bytes that cross a boundary. `speeds` contains
the relative speed of each part: a part of speed 2 does its work in half the time. The work of a
part, divided by its speed, is the *time* of the part.

Each function returns the first unit of each part: `(0, 3, 5)` means units 0 to 2, 3 to 4, and 5 to
the end. The result has exactly the requested number of parts, each with at least one unit. If this
is impossible, the function raises ConfigError. EPL's original may return fewer parts (three parts
for six equal units in four stages), which leaves a device idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from dtrans.errors import ConfigError


# A cost of at most this many times the best cost counts as equally good, so that other criteria
# decide.
SLACK = 1.1


def contiguous(
    costs: Sequence[float],
    crossing: Sequence[float],
    parts: int,
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Divide a list of units into parts so that the cost of the slowest part is minimal.

    The result is exact, in O(parts * units^2). Part p of the units i to j - 1 costs
    `sum(costs[i:j]) / speeds[p] + crossing[j]`: its time, plus the transfer of its output to the
    next part. Among equal divisions, three criteria decide, in this order: the least sum of
    `crossing`; the most even times (least sum of squares); the earliest boundaries, compared from
    the last part backwards.

    Args:
      costs: the cost of each unit, at least 0.
      crossing: `crossing[j]` is the cost of a boundary in front of unit j. It has the length of
        `costs`; `crossing[0]` is ignored.
      parts: the number of parts.
      speeds: the relative speed of each part; None if all parts are equally fast.

    Returns:
      The first unit of each part: `parts` increasing numbers, beginning with 0.

    Raises:
      ConfigError: there are fewer units than parts, or a cost is negative or not finite. Or
        `speeds` does not have one entry for each part.

    Example:
      >>> from dtrans.pipeline_parallel.balance import contiguous
      >>> contiguous([4, 1, 1, 1, 1, 4], [0] * 6, 2)
      (0, 3)
      >>> contiguous([4, 1, 1, 1, 1, 4], [0] * 6, 2, speeds=[2, 1])
      (0, 5)
      >>> contiguous([4, 1, 1, 1, 1, 4], [0, 0, 0, 9, 0, 0], 2)
      (0, 2)
    """
    _check(costs, parts)
    sent, time = _sent(costs, crossing), _time(costs, parts, speeds)
    units, total = len(costs), lambda part, stop: time(part, stop) + sent[stop]
    limit = _extreme(units, parts, total, np.minimum, np.maximum, np.inf)
    return _best(
        units,
        parts,
        lambda part, stop: total(part, stop) <= limit,
        lambda part, stop: sent[stop],
        lambda part, stop: time(part, stop) ** 2,
    )


def balanced(
    costs: Sequence[float],
    crossing: Sequence[float],
    parts: int,
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Divide a list of units into parts of nearly equal times, with cheap boundaries.

    The result has the least sum of the costs of boundaries, among all divisions within two limits:

    - No part takes longer than `SLACK * most`. `most` is the time of the slowest part in the
      division that minimizes this time.
    - No part takes less than `least / 2`. `least` is the time of the fastest part in the division
      that maximizes this time, among the divisions within the first limit.

    On ties, the function prefers parts that begin with expensive units, because a layer begins with
    its matrix product. The last criterion is even times. Arguments, result and errors are those of
    `contiguous`.

    Example:
      >>> from dtrans.pipeline_parallel.balance import balanced, contiguous
      >>> layers, sends = [8] * 6 + [1], [1] * 6 + [0]
      >>> balanced(layers, sends, 4), contiguous(layers, sends, 4)
      ((0, 1, 3, 5), (0, 2, 4, 6))
    """
    _check(costs, parts)
    sent, time = _sent(costs, crossing), _time(costs, parts, speeds)
    units, first_unit = len(costs), -np.asarray(costs, float)
    most = SLACK * _extreme(units, parts, time, np.minimum, np.maximum, np.inf)

    def within(part: int, stop: int) -> Any:
        times = time(part, stop)
        return np.where(times <= most, times, -np.inf)

    least = _extreme(units, parts, within, np.maximum, np.minimum, -np.inf) / 2

    def fits(part: int, stop: int) -> Any:
        times = time(part, stop)
        return (times <= most) & (times >= least)

    return _best(
        units,
        parts,
        fits,
        lambda part, stop: sent[stop],
        lambda part, stop: first_unit[:stop],
        lambda part, stop: time(part, stop) ** 2,
    )


def _sent(costs: Sequence[float], crossing: Sequence[float]) -> Any:
    """Return the cost of each boundary as an array; 0 before the first and after the last unit."""
    if len(crossing) != len(costs):
        raise ConfigError(
            f"crossing has {len(crossing)} entries; expected one for each of the {len(costs)} units"
        )
    sent = np.append(np.asarray(crossing, float), 0.0)
    sent[0] = 0.0
    if not (np.isfinite(sent).all() and (sent >= 0).all()):
        raise ConfigError(
            "crossing has an entry that is negative or not finite; expected numbers of 0 or more"
        )
    return sent


# Function of (index of a part, stop) that returns an array. Entry `start` is a property of the part
# with the units start:stop. The result may also be one number for all starts.
PartCost: TypeAlias = Callable[[int, int], Any]


def _time(costs: Sequence[float], parts: int, speeds: Sequence[float] | None) -> PartCost:
    """Return a function `time` that computes times of parts, for many parts at once.

    `time(p, stop)` is an array. Its entry at `start` is the time of part p with the units `start`
    to `stop - 1`.
    """
    done = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    if speeds is None:
        speeds = (1.0,) * parts
    if len(speeds) != parts:
        raise ConfigError(
            f"speeds has {len(speeds)} entries; expected one for each of {parts} parts"
        )
    return lambda part, stop: (done[stop] - done[:stop]) / speeds[part]


def _extreme(units: int, parts: int, cost: PartCost, best: Any, worst: Any, none: float) -> float:
    """Return the cost of the worst part in the best division, as a limit for `balanced`.

    With `best=np.minimum, worst=np.maximum`, this is the least possible cost of the most expensive
    part. With `best=np.maximum, worst=np.minimum`, it is the greatest possible cost of the cheapest
    part.

    Args:
      units, parts: the number of units (entries of the list), and of parts.
      cost: the cost of a part.
      best, worst: `np.minimum` and `np.maximum`, in either order.
      none: a cost worse than all others: inf or -inf.
    """
    totals = np.full(units + 1, none)
    totals[0] = -none
    for part in range(parts):
        now = np.full(units + 1, none)
        for stop in range(1, units + 1):
            now[stop] = best.reduce(worst(totals[:stop], cost(part, stop)))
        totals = now
    return float(totals[units])


def _best(units: int, parts: int, fits: PartCost, *keys: PartCost) -> tuple[int, ...]:
    """Find the best division into allowed parts; return the first unit of each part.

    The best division has the least sum of the first key over its parts. Among equal divisions, the
    sum of the next key decides.

    Args:
      units, parts: the number of units (entries of the list), and of parts.
      fits: function that returns True if a part is allowed.
      keys: functions that return numbers for a part, the most important first.
    """
    # Dynamic programming over (part, stop): `totals[k, stop]` is the sum of key k for the best
    # division of the units before `stop`.
    totals = np.full((len(keys), units + 1), np.inf)
    totals[:, 0] = 0.0
    came_from = np.zeros((parts, units + 1), int)
    for part in range(parts):
        now = np.full((len(keys), units + 1), np.inf)
        for stop in range(1, units + 1):
            left = np.flatnonzero(fits(part, stop) & np.isfinite(totals[0, :stop]))
            if not left.size:
                continue
            for key, total in zip(keys, totals, strict=True):
                sums = (total[:stop] + key(part, stop))[left]
                left = left[sums == sums.min()]
            came_from[part, stop] = left[0]
            for k, key in enumerate(keys):
                now[k, stop] = (totals[k, :stop] + key(part, stop))[left[0]]
        totals = now
    # Trace the best division back from its end.
    starts = [units]
    for part in reversed(range(parts)):
        starts.append(int(came_from[part, starts[-1]]))
    return tuple(starts[:0:-1])


def partition_balance(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Balance op counts by EPL's rule: fill the parts in order, each up to the same size.

    The size is the least size for which `parts` parts suffice. There are two differences from EPL
    (epl/parallel/partitioner.py, `partition_balance`). When only as many units as parts remain, the
    current part ends. EPL would return fewer parts than requested. EPL also scales the weights and
    rounds them to 0..100.

    Raises:
      ConfigError: there are fewer units than parts, or a weight is negative.

    Example:
      >>> from dtrans.pipeline_parallel.balance import partition_balance
      >>> partition_balance([1] * 46, 3)  # 16, 16 and 14
      (0, 16, 32)
      >>> partition_balance([1] * 6, 4)
      (0, 2, 4, 5)
    """
    _check(weights, parts)

    def filled(size: int) -> list[int]:
        starts, total = [0], 0
        for unit, weight in enumerate(weights):
            left = len(weights) - unit
            if unit > starts[-1] and (total + weight > size or left == parts - len(starts)):
                starts.append(unit)
                total = 0
            total += weight
        return starts

    low, high = max(weights), sum(weights)
    while low < high:
        size = (low + high) // 2
        if len(filled(size)) <= parts:
            high = size
        else:
            low = size + 1
    return tuple(filled(low))


def part_of_each(starts: Sequence[int], units: int) -> tuple[int, ...]:
    """Return the index of the part that contains each unit.

    Example:
      >>> from dtrans.pipeline_parallel.balance import part_of_each
      >>> part_of_each((0, 3, 5), 6)
      (0, 0, 0, 1, 1, 2)
    """
    each: list[int] = []
    for part, (start, stop) in enumerate(itertools.pairwise([*starts, units])):
        each += [part] * (stop - start)
    return tuple(each)


def _check(costs: Sequence[float], parts: int) -> None:
    if parts < 1:
        raise ConfigError(f"parts is {parts}; expected 1 or more")
    if len(costs) < parts:
        raise ConfigError(f"parts is {parts}, but there are only {len(costs)} units; reduce parts")
    if any(not math.isfinite(c) or c < 0 for c in costs):
        raise ConfigError(
            "costs has an entry that is negative or not finite; expected numbers of 0 or more"
        )
