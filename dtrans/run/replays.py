"""Sequential replays: what a mode computes whose trainers step by themselves, written from its definition.

One device takes the steps of all trainers, one after the other, and merges what they made. `plan.verify()` compares
a job of such a mode with its replay instead of with one step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import jaxpr_as_fun
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import is_under


Values = Mapping[str, Any]


def replay_local_steps(plan: CollectivePlan, whole: Program) -> Program:
    """Return a program that takes the local steps of all trainers one after the other, and averages their states.

    Args:
      plan: one with `local_sgd`.
      whole: its step, for the batch of all trainers.

    Raises:
      ConfigError: results are merged in a way that has no replay.
    """
    trainers, steps = plan.trainers, plan.options.local_sgd or 1
    state_names = [n for spec in whole.args[:2] for n in spec.names]
    cut = [n for spec in whole.args[2:] for n in spec.names if not is_under(n, plan.unsplit_inputs)]
    own = whole.specialize_flat([_part_type(t, trainers * steps, n in cut) for n, t in whole.inputs.items()])
    step = jaxpr_as_fun(own.jaxpr)
    ways = {n: plan.merges.get(n, "same") for n in whole.out_names}

    def replay(*arrays: Any) -> list[Any]:
        given = dict(zip(whole.in_names, arrays, strict=True))
        start = {n: given[n] for n in state_names}
        made: list[list[Values]] = []
        for trainer in range(trainers):
            state, of_trainer = start, list[Values]()
            for turn in range(steps):
                parts = {n: _part(given[n], trainer, turn, trainers, steps) for n in cut}
                inputs = {**given, **state, **parts}
                outs = dict(zip(own.out_names, step(*(inputs[n] for n in own.in_names)), strict=True))
                state = {n: outs[n] for n in state_names}
                of_trainer.append(outs)
            made.append(of_trainer)
        count = plan.options.batch.example_count
        weights = [[outs[count] if count else 1 for outs in of_trainer] for of_trainer in made]
        found = []
        for n in whole.out_names:
            if n in state_names:  # each trainer has one: that of its last step
                values = [[of_trainer[-1][n]] for of_trainer in made]
                found.append(_merged(n, values, ways[n], [[sum(of_trainer)] for of_trainer in weights]))
            else:
                values = [[outs[n] for outs in of_trainer] for of_trainer in made]
                found.append(_merged(n, values, ways[n], weights))
        return found

    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in whole.inputs.values()]
    jaxpr: Any = jax.make_jaxpr(replay)(*types)
    roles = (FORWARD,) * len(jaxpr.eqns)
    return dataclasses.replace(whole, jaxpr=jaxpr, roles=roles, labels={}, specializer=None)


def _part_type(t: Any, parts: int, is_cut: bool) -> jax.ShapeDtypeStruct:
    shape = (t.shape[0] // parts, *t.shape[1:]) if is_cut and t.ndim else t.shape
    return jax.ShapeDtypeStruct(shape, t.dtype)


def _part(x: Any, trainer: int, turn: int, trainers: int, steps: int) -> Any:
    """Return the rows that a trainer has in one of its steps; of a key, one of its own."""
    if x.ndim:
        rows = x.shape[0] // (trainers * steps)
        start = (trainer * steps + turn) * rows
        return x[start : start + rows]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(jax.random.fold_in(x, trainer), turn)
    return x


def _merged(name: str, values: Sequence[Sequence[Any]], way: str, weights: Sequence[Sequence[Any]]) -> Any:
    """Merge the values of all steps of all trainers.

    Args:
      values: by trainer and step.
      weights: likewise, of a mean.
    """
    flat = [x for of_trainer in values for x in of_trainer]
    if way == "mean":
        by = [w for of_trainer in weights for w in of_trainer]
        total = sum(jnp.asarray(w, flat[0].dtype) for w in by)
        return sum(x * jnp.asarray(w, x.dtype) for x, w in zip(flat, by, strict=True)) / total
    if way in _WAYS:
        return _WAYS[way](values, flat)
    raise ConfigError(f"plan.verify(): {name} is merged by {way!r}, which has no replay; merge it by 'mean' or 'sum'")


_WAYS: Mapping[str, Callable[[Sequence[Sequence[Any]], list[Any]], Any]] = {
    "sum": lambda values, flat: functools.reduce(jnp.add, flat),
    "max": lambda values, flat: functools.reduce(jnp.maximum, flat),
    "concat": lambda values, flat: jnp.concatenate(flat),
    "same": lambda values, flat: values[0][-1],
    "each": lambda values, flat: jnp.stack([of_trainer[-1] for of_trainer in values]),
}
