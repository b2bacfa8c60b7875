"""The program of a micro-batch, as a function of whole arrays of the batch and the number of the
micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans.ir.program import Program
from dtrans.run.base.lowering import per_trainer
from dtrans.run.pipeline_parallel.deployment import Deployment


def is_numbered(at: Deployment, p: Program, batch: Mapping[str, Any]) -> bool:
    """Whether a program reads something that depends on which micro-batch it is."""
    return at.plan.options.num_micro_batch > 1 and any(
        n in batch and (at.is_split(n, batch[n]) or at.is_key(n, batch[n])) for n in p.in_names
    )


def of_micro_batch(
    at: Deployment, p: Program, batch: Mapping[str, Any]
) -> Callable[..., Sequence[Any]]:
    """A program that takes whole arrays, and the number of the micro-batch last where it
    `is_numbered`."""
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
