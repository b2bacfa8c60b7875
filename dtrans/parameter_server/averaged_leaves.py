"""Leaves that trainers make themselves and servers average: batch statistics, above all.

A leaf that no gradient enters (`Cut.frozen`) is each trainer's own. One that is to be averaged is
treated as what it is for a server: a parameter whose "gradient" is the value that a trainer made,
and whose new value is the mean of these. So it is cut into blocks, sent, merged and received as any
other; with asynchronous trainers the newest one counts.
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
from dtrans.step.cut import Cut, Gradient, Name, OptimizeHalf


def averages_of(step: Cut, merge: Mapping[str, str]) -> tuple[str, ...]:
    """Return the leaves that servers average.

    Args:
      merge: the user's: from leaves, or what they lie under, to "mean" or "own".

    Raises:
      ConfigError: names of no leaf that trainers make; a leaf that cannot be averaged.
    """
    outs = step.program.outvars
    made_here = [n for n in step.frozen if outs[n] not in step.program.inner.invars]
    for root in merge:
        if not any(is_under(n, [root]) for n in made_here):
            known = ", ".join(made_here) or "none"
            raise ConfigError(
                f"merge[{root!r}]: no leaf of that name is made by the trainers; those that are: "
                f"{known}"
            )
    # the longest name that a leaf lies under is what was said of it
    said = {
        n: max((r for r in merge if is_under(n, [r])), key=len, default=None) for n in made_here
    }
    chosen = tuple(n for n, root in said.items() if root is not None and merge[root] == "mean")
    for n in chosen:
        t = step.program.outputs[n]
        if not jnp.issubdtype(t.dtype, jnp.inexact):
            raise ConfigError(
                f"merge[{said[n]!r}]='mean': {n} is {short_type(t)}, of which there is no mean; "
                "say 'own'"
            )
    return chosen


def averaged(step: Cut, leaves: Sequence[str]) -> Cut:
    """Return the step with an optimize half that takes `leaves` from the trainers."""
    if not leaves:
        return step
    program, half = step.program, step.optimize
    outs: dict[str, Atom] = program.outvars
    b = Builder(half.jaxpr)
    given = {n: b.input(v.aval) for n, v in half.invars.items()}
    made = dict(zip(half.out_names, b.inline(half.jaxpr, *given.values()), strict=True))
    fresh: dict[Name, Var] = {}
    for n in leaves:
        fresh[n], fresh[Gradient(n)] = b.input(outs[n].aval), b.input(outs[n].aval)
        (made[n],) = b.call(_kept, fresh[Gradient(n)])
    optimized = tuple(n for n in step.params if n in leaves or n in step.optimized)
    names = (*optimized, *(n for n in half.out_names if n not in step.optimized))
    return dataclasses.replace(
        step,
        gradients={
            n: outs[n] if n in leaves else step.gradients[n]
            for n in step.params
            if n in leaves or n in step.gradients
        },
        optimized=optimized,
        frozen=tuple(n for n in step.frozen if n not in leaves),
        optimize=OptimizeHalf(b.build([made[n] for n in names]), (*given, *fresh), names),
    )


def _kept(x: jax.Array) -> list[jax.Array]:
    # not the operand itself: a server writes into the memory of what it was sent
    return [jnp.copy(x)]
