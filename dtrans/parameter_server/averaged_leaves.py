"""Leaves that trainers compute and servers average, such as batch statistics.

No gradient enters such a leaf (`Cut.frozen`), and by default each trainer keeps its value. To
average it, servers treat it as a parameter: its "gradient" is a trainer's value, and its new value
is the mean of the gradients. So it is cut into blocks, sent, merged and received like a parameter.
In asynchronous modes the newest value replaces it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Var
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.display import short_type
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import values_at
from dtrans.step.cut import Cut, Gradient, Name, OptimizeHalf


def choose_averages(step: Cut, merge: Mapping[str, str]) -> tuple[str, ...]:
    """Return the leaves that servers average.

    Args:
      merge: the user's option: leaf, or prefix of leaves, to "mean" or "own".

    Raises:
      ConfigError: a name matches no leaf that trainers compute, or the leaf has no mean.
    """
    outs = step.program.outvars
    computed = [n for n in step.frozen if outs[n] not in step.program.inner.invars]
    for prefix in merge:
        if not any(is_under(n, [prefix]) for n in computed):
            known = ", ".join(computed) or "none"
            raise ConfigError(
                f"merge[{prefix!r}]: no leaf of that name is computed by the trainers; those that "
                f"are: {known}"
            )
    chosen = []
    for n in computed:
        # the longest prefix decides
        prefix = max((x for x in merge if is_under(n, [x])), key=len, default="")
        if merge.get(prefix) != "mean":
            continue
        t = step.program.outputs[n]
        if not jnp.issubdtype(t.dtype, jnp.inexact):
            raise ConfigError(
                f"merge[{prefix!r}]='mean': {n} is {short_type(t)}, and servers average "
                "floating-point and complex numbers only; say 'own'"
            )
        chosen.append(n)
    return tuple(chosen)


def add_averages(step: Cut, leaves: Sequence[str]) -> Cut:
    """Return the step with an optimize half that also takes `leaves` from the trainers."""
    if not leaves:
        return step
    half = step.optimize
    outs: dict[str, Atom] = step.program.outvars
    b = Builder(half.jaxpr)
    inputs = {n: b.input(v.aval) for n, v in half.invars.items()}
    results = b.inline(half.jaxpr, *inputs.values())
    outputs = dict(zip(half.out_names, results, strict=True))
    average_inputs: dict[Name, Var] = {}
    for n in leaves:
        average_inputs[n] = b.input(outs[n].aval)
        average_inputs[Gradient(n)] = b.input(outs[n].aval)
        (outputs[n],) = b.call(_copy, average_inputs[Gradient(n)])

    optimized = tuple(n for n in step.params if n in leaves or n in step.optimized)
    names = (*optimized, *(n for n in half.out_names if n not in step.optimized))
    gradients = {}
    for n in step.params:
        if n in leaves:
            gradients[n] = outs[n]
        elif n in step.gradients:
            gradients[n] = step.gradients[n]
    jaxpr = b.build(values_at(outputs, names))
    return dataclasses.replace(
        step,
        gradients=gradients,
        optimized=optimized,
        frozen=tuple(n for n in step.frozen if n not in leaves),
        optimize=OptimizeHalf(jaxpr, (*inputs, *average_inputs), names),
    )


def _copy(x: jax.Array) -> list[jax.Array]:
    # a copy, since a server writes into the memory of received values
    return [jnp.copy(x)]
