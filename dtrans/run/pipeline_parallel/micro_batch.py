"""Conversion of a program for one micro-batch to a function that reads the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans.ir.program import Program
from dtrans.run.base.lowering import per_trainer
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement


def is_numbered(at: StagePlacement, p: Program, batch: Mapping[str, Any]) -> bool:
    """Return True if a program needs the index of its micro-batch as an input.

    It needs the index to select its rows of the batch, or to derive a PRNG key for the micro-batch.
    With a single micro-batch, no program needs it.
    """
    if at.plan.options.num_micro_batch == 1:
        return False
    names = [n for n in p.in_names if n in batch]
    return any(at.is_split(n, batch[n]) or at.is_key(n, batch[n]) for n in names)


def of_micro_batch(
    at: StagePlacement, p: Program, batch: Mapping[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Return a function that selects the rows of a micro-batch, and runs a program on these rows.

    The function's arguments are the inputs of the program, but arrays of the batch have all rows of
    one replica. If the program `is_numbered`, one more argument is the index of the micro-batch.

    Args:
      at: the devices of the plan's stages.
      p: a program of a micro-batch.
      batch: shapes and dtypes, by name: arrays of the global batch, and values that the job
        computes from the global batch before the micro-batches.
    """
    one, names, types, o = per_trainer(p), p.in_names, p.inputs, at.plan.options
    split = {i for i, n in enumerate(names) if n in batch and at.is_split(n, batch[n])}
    keys = {i for i, n in enumerate(names) if n in batch and at.is_key(n, batch[n])}
    numbered = is_numbered(at, p, batch)

    def run(*args: Any) -> Sequence[Any]:
        values = list(args[: len(names)])
        for i in keys:
            if o.replicas > 1:
                values[i] = jax.random.fold_in(values[i], jax.lax.axis_index(o.over_replicas.over))
            if o.num_micro_batch > 1:
                values[i] = jax.random.fold_in(values[i], args[-1])
        if numbered:
            for i in split:
                rows = types[names[i]].shape[0]
                values[i] = jax.lax.dynamic_slice_in_dim(values[i], args[-1] * rows, rows)
        return one(*values)

    return run
