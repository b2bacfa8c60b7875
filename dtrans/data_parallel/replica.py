"""Inputs of a trainer's program, and results that the step computes from reduced gradients.

Each trainer folds its index into the random keys of the batch, and so draws different numbers. A
result that depends on gradients, such as their norm, is computed from the reduced gradients. So all
trainers have the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Var
from dtrans.data_parallel.options import Options
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import avals, backward_slice, outputs_of
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import values_at
from dtrans.ops import trainer_index_p
from dtrans.step.halves import DividedStep
from dtrans.step.observers import refuse_twice


def take_inputs(
    b: Builder, step: DividedStep, options: Options, sliced: Mapping[str, Any] | None = None
) -> dict[Var, Var]:
    """Add the step's inputs to the program of a trainer.

    Two kinds of inputs get new variables. Each trainer derives its random key from the step's key.
    With ZeRO, a trainer gets a slice of an array in place of the array.

    Args:
      b: the builder of the program.
      step: the training step, divided at its gradients.
      options: the options of the data-parallel strategy.
      sliced: maps the name of each sliced input to the type of a trainer's slice.

    Returns:
      The new variables: a dict from variable of the step to new variable.
    """
    replaced: dict[Var, Var] = {}
    sliced = sliced or {}
    for n, v in step.program.invars.items():
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) and not v.aval.ndim
        is_split = n in step.batch and not is_under(n, options.batch.unsplit_inputs)
        if options.trainers > 1 and is_key and is_split:
            replaced[v] = b.input(v.aval)
        elif n in sliced:
            replaced[v] = b.input(sliced[n])
        else:
            b.invars.append(v)
    return replaced


def fold_keys(b: Builder, keys: Mapping[Var, Var], options: Options) -> None:
    """Write equations that fold the index of the trainer into random keys.

    Args:
      b: the builder of the program.
      keys: a dict: variable of the folded key -> variable of the original key.
      options: the options of the data-parallel strategy.
    """
    if not keys:
        return
    (index,) = b.bind(trainer_index_p, over=options.over)
    for folded, key in keys.items():
        b.call_as(folded, jax.random.fold_in, key, index)


def write_from_gradients(
    b: Builder, step: DividedStep, outs: Mapping[str, Atom], means: Mapping[str, Atom]
) -> dict[str, Atom]:
    """Write the results that depend on reduced gradients, such as a gradient norm.

    Also write callbacks that read gradients or outputs of the update.

    Args:
      b: the builder of the trainer's program.
      step: the training step, divided at its gradients.
      outs: the step's outputs by name.
      means: the reduced gradients by parameter.

    Returns:
      The results by name.
    """
    if not step.from_gradients and not step.late:
        return {}
    inner = step.program.inner
    boundary = {v: means[n] for n, v in step.boundary.items() if n in means}
    env: dict[Var, Atom] = dict(boundary)
    here = set(outputs_of(b.eqns))
    wanted = values_at(outs, step.from_gradients)
    for i in step.late:
        wanted += inner.eqns[i].invars
    needed, _ = backward_slice(inner.eqns, wanted, boundary)
    refuse_twice(x for x in step.observers if x.position in needed)
    for i in sorted({*needed, *step.late}):
        eqn = inner.eqns[i]
        if any(isinstance(a, Var) and a in env for a in eqn.invars):
            copies = b.copy(eqn, read_from(env, eqn.invars), avals(eqn.outvars))
            env.update(zip(eqn.outvars, copies, strict=True))
        elif i in step.late or not here.issuperset(eqn.outvars):
            b.keep(eqn)
    found = read_from(env, values_at(outs, step.from_gradients))
    return dict(zip(step.from_gradients, found, strict=True))
