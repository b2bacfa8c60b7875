"""Merge of the trainers' results of a step, such as the loss, into results for the full batch.

The first server merges the results. So all trainers return the same loss as one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans.batch.exact_step import ExactStep
from dtrans.errors import BatchError
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import values_at
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server.trainer_rounds import RESULTS
from dtrans.run.base.batch import batch_arrays, pad_rows
from dtrans.run.base.merge import Merge
from dtrans.run.distributed.multihost import PARTS_DIFFER
from dtrans.run.parameter_server.trainer_calls import StepCall


ADD = ("all_reduce", "sum")


def merged_results(plan: PServerPlan, shared: ExactStep | None) -> dict[str, str]:
    """Return the results of a step that the first server merges, by name, each with its merge rule.

    For example, `{"loss": "mean"}`. Parameters are left out, because trainers receive them from
    servers.

    Args:
      plan: the plan.
      shared: the split of the batch with which trainers compute the results of one device; None
        with batch="local".
    """
    if shared is None or not plan.sync_mode:
        return {}
    params = plan.main.args[0].names
    return {n: w for n, w in shared.merges.items() if w != "same" and n not in params}


def merge_results(
    plan: PServerPlan,
    exchange: Callable[..., list[Any]],
    outputs: Any,
    call: StepCall,
) -> Any:
    """Exchange this trainer's results, such as the loss, for results of the full batch.

    Each trainer sends its results to the first server, and receives the merged results.

    Args:
      plan: the plan of the job.
      exchange: function that sends values to a server, and returns the merged values
        (`Executor.exchange`).
      outputs: the results of the trainer's program.
      call: the program and the arguments that computed the results.

    Raises:
      BatchError: trainers used parts of different sizes. Servers have applied the update already.
    """
    shared, out = call.shared, plan.trainer.out
    merges = merged_results(plan, shared)
    if shared is None or not merges:
        return outputs

    # gather the sizes of the parts together with the results, so that one exchange is enough
    ways: list[Sequence[Any]] = [("all_gather", 0)]
    for n, way in merges.items():
        ways.append(("all_gather", shared.joined[n]) if way == "concat" else ADD)
    values = dict(zip(out.names, out.flatten(outputs), strict=True))
    rows = _part_rows(plan.main, call)
    if shared.shares:
        # a server concatenates arrays of one type only
        for n, axis in shared.joined.items():
            width = values[n].shape[axis] // rows
            values[n] = pad_rows(values[n], axis, max(shared.shares) * width)
    size = np.array([[call.rows, rows]], np.int32)
    server = next(iter(plan.servers))
    operands = [size, *values_at(values, merges)]
    sizes, *found = exchange(server, RESULTS, ways, operands)
    _check_parts(sizes.tolist(), shared.shares)

    for (n, way), x in zip(merges.items(), found, strict=True):
        if way == "concat" and shared.shares:
            x = _drop_padding(x, shared.joined[n], shared.shares)
        elif way == "concat" and call.rows:
            axis = shared.joined[n]
            width = x.shape[axis] // sum(part for _, part in sizes.tolist())
            x = Merge("joined", axis, call.rows * width)(x)
        if way == "mean":
            # divide by the number of trainers in this step, since some trainers may have left
            x = x / len(sizes)
        values[n] = x
    return out.unflatten_named(values)


def _part_rows(main: Program, call: StepCall) -> int:
    """Return the number of rows of this trainer's part; 0 if the batch is not split."""
    names = all_names(main.args[2:])
    arrays = batch_arrays(main.args[2:], call.batch, main.inputs)
    axes = {} if call.shared is None else call.shared.axes
    for n, x in zip(names, arrays, strict=True):
        if n in axes:
            return int(x.shape[axes[n]])
    return 0


def _drop_padding(x: Any, axis: int, shares: Sequence[int]) -> Any:
    """Remove the padding from concatenated results of trainers with different numbers of rows.

    Before the merge, each trainer pads its results to the largest number of rows. For shares (2,
    1), the concatenated results have 4 rows, and the last row is padding.

    Args:
      x: the results of all trainers, concatenated along dimension `axis`.
      axis: the dimension.
      shares: number of rows of each trainer, without padding.
    """
    each = x.shape[axis] // len(shares)
    width = each // max(shares)
    entries = [np.arange(share * width) + k * each for k, share in enumerate(shares)]
    return jnp.take(x, np.concatenate(entries), axis)


def _check_parts(sizes: Sequence[Sequence[int]], shares: Sequence[int]) -> None:
    """Raise BatchError if trainers passed parts of the batch with unexpected sizes.

    Args:
      sizes: two numbers that each trainer reports: the rows of the global batch, and the rows of
        the trainer's part. If all parts have equal sizes, trainers report 0 rows of the global
        batch.
      shares: the expected rows of each trainer's part; empty if all parts have equal sizes.
    """
    expected = [sizes[0]] * len(sizes)
    if shares:
        expected = [[sum(shares), share] for share in shares]
    if sizes != expected:
        parts = []
        for rows, part in sizes:
            parts.append(f"{part} of {rows}" if rows else str(part))
        raise BatchError(
            f"{PARTS_DIFFER}; they passed {', '.join(parts)} rows, so the servers' update is a "
            "mean over unequal parts; continue from a checkpoint, and split batches by "
            "job.shard_batch(*batch)"
        )
