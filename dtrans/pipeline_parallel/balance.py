"""Cuts of a row of units into consecutive parts: two exact rules, and EPL's balance of op counts.

The functions see numbers only. `dtrans.pipeline_parallel.assign_stages` gives the costs of units
and of cuts. Each function returns the start of each part: `(0, 3, 5)` stands for the units 0 to 2,
3 to 4, and 5 to the end. It returns exactly the requested number of parts, all with units, or
raises. EPL's original loses stages silently (six equal units in four stages become three), which
leaves a device idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrans.errors import ConfigError


SLACK = 1.1  # slower than the best by this factor is "about as fast": other criteria then decide


def contiguous(costs: Sequence[float], crossing: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut a row of units into parts so that the slowest part is as fast as possible.

    Exact, in O(parts * units^2). Units i to j - 1 cost `sum(costs[i:j]) + crossing[j]`: their work,
    and their output to the next part. Ties are broken in this order: least total crossing; most
    even work (least sum of squares); earliest cut, from the last part backwards.

    Args:
      costs: the cost of each unit, at least 0.
      crossing: `crossing[j]` is the cost of a cut in front of unit j. As long as `costs`; the first
        is not used, and nothing crosses at the end.
      parts: the number of parts.

    Returns:
      The start of each part: `parts` increasing numbers; the first is 0.

    Raises:
      ConfigError: there are fewer units than parts, or a cost is negative or not finite.

    Example:
      >>> from dtrans.pipeline_parallel.balance import contiguous
      >>> contiguous([4, 1, 1, 1, 1, 4], [0] * 6, 2)
      (0, 3)
      >>> contiguous([4, 1, 1, 1, 1, 4], [0, 0, 0, 9, 0, 0], 2)
      (0, 2)
    """
    _check(costs, parts)
    sent, work = _sent(costs, crossing), _work(costs)
    units, total = len(costs), lambda stop: work(stop) + sent[stop]
    limit = _extreme(units, parts, total, np.minimum, np.maximum, np.inf)
    squares = lambda stop: work(stop) ** 2
    return _best(units, parts, lambda stop: total(stop) <= limit, lambda stop: sent[stop], squares)


def balanced(costs: Sequence[float], crossing: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut a row of units at the least crossing, among cuts that leave the work near balance.

    Exact. A cut near balance has two limits. Each part does at most `SLACK` times the work of the
    slowest part in the best cut. Each part does at least half of the most work that the lightest
    part can have under the first limit. Ties are broken by parts that begin with the most expensive
    units (a layer begins with its product), then by even work.

    Arguments, result and errors are those of `contiguous`.

    Example:
      >>> from dtrans.pipeline_parallel.balance import balanced, contiguous
      >>> layers, sends = [8] * 6 + [1], [1] * 6 + [0]
      >>> balanced(layers, sends, 4), contiguous(layers, sends, 4)
      ((0, 1, 3, 5), (0, 2, 4, 6))
    """
    _check(costs, parts)
    sent, work = _sent(costs, crossing), _work(costs)
    units, dearest = len(costs), -np.asarray(costs, float)
    most = SLACK * _extreme(units, parts, work, np.minimum, np.maximum, np.inf)
    within = lambda stop: np.where(work(stop) <= most, work(stop), -np.inf)
    least = _extreme(units, parts, within, np.maximum, np.minimum, -np.inf) / 2
    fits = lambda stop: (work(stop) <= most) & (work(stop) >= least)
    return _best(
        units,
        parts,
        fits,
        lambda stop: sent[stop],
        lambda stop: dearest[:stop],
        lambda stop: work(stop) ** 2,
    )


def _sent(costs: Sequence[float], crossing: Sequence[float]) -> Any:
    """Return the cost of a cut at each place; 0 at both ends."""
    if len(crossing) != len(costs):
        raise ConfigError(f"crossing has {len(crossing)} entries for {len(costs)} units")
    sent = np.append(np.asarray(crossing, float), 0.0)
    sent[0] = 0.0
    if not (np.isfinite(sent).all() and (sent >= 0).all()):
        raise ConfigError("a crossing has a cost that is negative or not finite; give 0 or more")
    return sent


def _work(costs: Sequence[float]) -> Callable[[int], Any]:
    """Return a function from a stop to the work of the parts that end there, by start."""
    done = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    return lambda stop: done[stop] - done[:stop]


def _extreme(
    units: int, parts: int, cost: Callable[[int], Any], best: Any, worst: Any, none: float
) -> float:
    """Return the cost of the worst part in the best cut into `parts` parts.

    Args:
      units, parts: the number of units, and of parts.
      cost: the costs of the parts that end at a stop, by start.
      best, worst: `np.minimum` and `np.maximum`, or in the other order.
      none: the cost without any cut: worse than all.
    """
    totals = np.full(units + 1, none)
    totals[0] = -none
    for _ in range(parts):
        now = np.full(units + 1, none)
        for stop in range(1, units + 1):
            now[stop] = best.reduce(worst(totals[:stop], cost(stop)))
        totals = now
    return float(totals[units])


def _best(
    units: int, parts: int, fits: Callable[[int], Any], *keys: Callable[[int], Any]
) -> tuple[int, ...]:
    """Return the starts of parts that fit, with the least sum of the first key, then of the next.

    Args:
      units, parts: the number of units, and of parts.
      fits: for a stop, True for each start whose part is allowed.
      keys: for a stop, the key of the part from each start to the stop; or one number for all
        starts.
    """
    # dynamic programming over (part, stop): `totals` has the keys of the best cut up to each stop
    totals = np.full((len(keys), units + 1), np.inf)
    totals[:, 0] = 0.0
    came_from = np.zeros((parts, units + 1), int)
    for part in range(parts):
        now = np.full((len(keys), units + 1), np.inf)
        for stop in range(1, units + 1):
            left = np.flatnonzero(fits(stop) & np.isfinite(totals[0, :stop]))
            if not left.size:
                continue
            for key, total in zip(keys, totals, strict=True):
                sums = (total[:stop] + key(stop))[left]
                left = left[sums == sums.min()]
            came_from[part, stop] = left[0]
            for k, key in enumerate(keys):
                now[k, stop] = (totals[k, :stop] + key(stop))[left[0]]
        totals = now
    # back along the best cut
    starts = [units]
    for part in reversed(range(parts)):
        starts.append(int(came_from[part, starts[-1]]))
    return tuple(starts[:0:-1])


def partition_balance(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Balance op counts as EPL does: fill parts in order, up to the least size that is enough.

    A part ends early when the remaining units are just enough for the remaining parts. EPL does not
    end it, and gives fewer parts than requested. EPL also scales weights to 0..100 first, which
    rounds; weights are not scaled here. (epl/parallel/partitioner.py, `partition_balance`)

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
    """Return the part of each unit.

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
        raise ConfigError(f"{parts} parts: there must be at least one")
    if len(costs) < parts:
        raise ConfigError(f"{len(costs)} units cannot fill {parts} parts; ask for fewer parts")
    if any(not math.isfinite(c) or c < 0 for c in costs):
        raise ConfigError("a unit has a cost that is negative or not finite; give 0 or more")
