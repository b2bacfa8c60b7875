"""Inputs of one of several trainers on an axis, and its results beside the state.

A PRNG key of the batch is folded with the number of the trainer. Results that are computed from
gradients (their norm) are computed from those of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Var
from dtrans.data_parallel.options import Options
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.pytree import is_under
from dtrans.ops import trainer_index_p
from dtrans.step.cut import Cut
from dtrans.step.observers import refuse_twice


def take_inputs(
    b: Builder, step: Cut, o: Options, cut: Mapping[str, Any] | None = None
) -> dict[Var, Var]:
    """Take the step's inputs; keys and slices become new variables.

    Args:
      cut: the types of inputs that each trainer has a slice of.

    Returns:
      What was taken otherwise, by the step's variable: keys, and slices.
    """
    keys: dict[Var, Var] = {}
    cut = cut or {}
    for n, v in step.program.invars.items():
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
        if (
            o.trainers > 1
            and n in step.batch
            and is_key
            and not v.aval.ndim
            and not is_under(n, o.batch.unsplit_inputs)
        ):
            keys[v] = b.input(v.aval)
        elif n in cut:
            keys[v] = b.input(cut[n])
        else:
            b.invars.append(v)
    return keys


def fold_keys(b: Builder, keys: Mapping[Var, Var], o: Options) -> None:
    """Give each trainer a key of its own."""
    if not keys:
        return
    (index,) = b.bind(trainer_index_p, over=o.over)
    for own, given in keys.items():
        b.call_as(own, jax.random.fold_in, given, index)


def write_from_gradients(
    b: Builder, step: Cut, outs: Mapping[str, Atom], means: Mapping[str, Atom]
) -> dict[str, Atom]:
    """Write what is computed from reduced gradients beside the update; its results by name.

    Callbacks that read gradients, or what the update makes, are written too.
    """
    if not step.from_gradients and not step.late:
        return {}
    inner = step.program.inner
    boundary = {v: means[n] for n, v in step.boundary.items() if n in means}
    env: dict[Var, Atom] = dict(boundary)
    here = {v for e in b.eqns for v in e.outvars}
    wanted = [outs[n] for n in step.from_gradients] + [
        a for i in step.late for a in inner.eqns[i].invars
    ]
    kept, _ = backward_slice(inner.eqns, wanted, boundary)
    refuse_twice(x for x in step.observers if x.position in kept)
    for i in sorted({*kept, *step.late}):
        eqn = inner.eqns[i]
        if any(isinstance(a, Var) and a in env for a in eqn.invars):
            made = b.copy(eqn, read_from(env, eqn.invars), [v.aval for v in eqn.outvars])
            env.update(zip(eqn.outvars, made, strict=True))
        elif i in step.late or not here.issuperset(eqn.outvars):
            b.keep(eqn)
    found = read_from(env, [outs[n] for n in step.from_gradients])
    return dict(zip(step.from_gradients, found, strict=True))
