"""The steps of a simulated job on one device, with which a synchronous job is compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.table_rows import runs_of
from tools.simulate.case import Case
from tools.simulate.updates import (
    SimulatedTables,
    applied,
    block_name,
    gradient,
    initial,
    looked_up,
    mean,
    norm_part,
    row_gradient,
    updates_in,
    with_rows,
)


@dataclasses.dataclass(frozen=True, eq=False)
class OneDevice:
    """Results of one device that makes the steps of all trainers.

    Attributes:
      values: after each step, the parameters of each block.
      changed_at: after each step, `SimulatedTables.changed_at`.
      before: after each step, the same two values before rows were evicted.
    """

    values: list[dict[str, np.ndarray]]
    changed_at: list[dict[str, np.ndarray]]
    before: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


def values_of(case: Case) -> list[dict[str, np.ndarray]]:
    """Return the parameters of one device after each step."""
    return on_one_device(case).values


def on_one_device(case: Case, members: Sequence[Sequence[int]] = ()) -> OneDevice:
    """Compute the steps of a synchronous job on one device.

    Args:
      case: the simulated case.
      members: for each step, the ids of the trainers that take part; by default, all trainers.
    """
    everyone = range(case.trainers)
    sizes = {
        block_name(ep, i): n
        for ep, row in zip(case.endpoints, case.servers, strict=True)
        for i, n in enumerate(row)
    }
    values = [{n: initial(n, size) for n, size in (sizes | case.tables).items()}]
    new = values[0]
    tables = SimulatedTables("", case.tables, lambda: new)
    moments = lambda: {n: at.copy() for n, at in tables.changed_at.items()}
    found = OneDevice(values, [moments()], [(new, moments())])
    for step in range(max(case.steps)):
        here, means = members[step] if members else everyone, {}
        if not any(case.steps[k] > step for k in here):
            break  # the trainers with the most steps were dropped
        for n, size in sizes.items():
            parts = [_counted(case, n, size, k, step) for k in here]
            means[n] = mean([*itertools.chain(*parts)])
        norm = np.float32(0)
        if case.mode == "exchange":
            for ep in case.endpoints:
                of_server = {n: x for n, x in means.items() if n.startswith(f"{ep}/")}
                norm += norm_part(of_server)[0]
        new = {n: applied(values[-1][n], means[n], norm) for n in sizes}
        for i, n in enumerate(case.tables):
            by_trainer = [_rows_counted(case, values, i, k, step) for k in here]
            rows = [*itertools.chain(*by_trainer)]
            new[n] = with_rows(values[-1][n], rows) if rows else values[-1][n]
            tables.touch(n, [g.ids for g in rows])
        found.before.append(({**new}, moments()))
        eviction = case.eviction_after(step + 1)
        if eviction is not None:
            for n in case.tables:
                tables.evict(n, eviction.unused_for, np.empty(0, np.int32))
        values.append(new)
        found.changed_at.append(moments())
    return found


def _rows_counted(
    case: Case, values: list[dict[str, np.ndarray]], block: int, k: int, step: int
) -> Iterator[RowGradient]:
    """Yield the gradient that a trainer contributes to a block of the table in a step, if any."""
    count = case.steps[k]
    if step >= count and case.on_trainer_exit != "paddle":
        return
    sizes = tuple(case.tables.values())
    at = min(step, count - 1)
    ids = looked_up(case, k, at)
    if step > count or not count:
        ids = ids[:0]  # a gradient of zeros has no rows
    table = np.concatenate([values[updates_in(case, k, at)][n] for n in case.tables])
    run = runs_of(sizes)[block]
    mine = run.among(ids)
    yield RowGradient(run.local(ids[mine]), row_gradient(table[ids], k, at)[mine])


def _counted(case: Case, block: str, size: int, k: int, step: int) -> list[np.ndarray]:
    """Return a list with the gradient that a trainer contributes to a step.

    After the trainer has left, the list is empty, or contains zeros, which count in the mean.
    """
    count = case.steps[k]
    if step < count:
        return [gradient(block, size, k, step)]
    if case.on_trainer_exit != "paddle":
        return []
    if step == count and count:
        return [gradient(block, size, k, count - 1)]  # the last gradient counts once more
    return [np.zeros(size, np.float32)]
