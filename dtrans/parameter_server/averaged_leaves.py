"""Leaves without gradients, such as batch statistics, that servers average over trainers.

A leaf is one array of the parameter pytree. By default each trainer keeps its own value of a leaf
without a gradient, such as a running mean of batch normalisation. The user can choose that servers
average the leaf: `merge={"params/bn": "mean"}`. Each trainer then sends the leaf's new value in
place of a gradient. The server's update stores the mean of these values, and trainers receive the
mean like a parameter.

Asynchronous servers do not combine values of several trainers. There the newest value replaces the
old value.
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
from dtrans.ir.selection import subset
from dtrans.step.frozen import changed_leaves
from dtrans.step.halves import DividedStep, Gradient, Name, UpdateProgram


def choose_averages(step: DividedStep, merge: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the leaves that the option `merge` tells servers to average.

    For `merge={"params/bn": "mean"}`, this returns all floating-point leaves below `params/bn` that
    trainers change without a gradient.

    Args:
      merge: the user's option: maps a leaf's name, or a prefix of names, to "mean" (servers average
        the leaf) or "own" (each trainer keeps its own value).

    Raises:
      ConfigError: a key of `merge` matches no leaf that trainers compute, or a leaf to average is
        an integer or a boolean.
    """
    computed = changed_leaves(step.program, step.frozen)
    for prefix in merge:
        if not any(is_under(n, [prefix]) for n in computed):
            known = ", ".join(computed) or "none"
            raise ConfigError(
                f"merge[{prefix!r}] matches no leaf that trainers compute; expected one of these "
                f"leaves, or a prefix of their names: {known}"
            )
    chosen = []
    for n in computed:
        # If several prefixes match a leaf, the longest one decides.
        prefix = max((x for x in merge if is_under(n, [x])), key=len, default="")
        if merge.get(prefix) != "mean":
            continue
        t = step.program.outputs[n]
        if not jnp.issubdtype(t.dtype, jnp.inexact):
            raise ConfigError(
                f"merge[{prefix!r}] is 'mean', but servers average floating-point and complex "
                f"numbers only, and {n} is {short_type(t)}; pass 'own'"
            )
        chosen.append(n)
    return tuple(chosen)


def add_averages(step: DividedStep, leaves: Sequence[str]) -> DividedStep:
    """Return the step with an update that also averages the given leaves.

    Each trainer sends the new value of such a leaf in place of a gradient. A server averages the
    values as it averages gradients. The update then stores the mean as the new leaf.
    """
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

    optimized = []
    gradients = {}
    for n in step.params:
        if n in leaves or n in step.optimized:
            optimized.append(n)
        if n in leaves:
            gradients[n] = outs[n]
        elif n in step.gradients:
            gradients[n] = step.gradients[n]
    # new parameters come before optimizer state
    outputs = subset(outputs, optimized) | outputs
    jaxpr = b.build(list(outputs.values()))
    return dataclasses.replace(
        step,
        gradients=gradients,
        optimized=tuple(optimized),
        frozen=tuple(n for n in step.frozen if n not in leaves),
        optimize=UpdateProgram(jaxpr, (*inputs, *average_inputs), tuple(outputs)),
    )


def _copy(x: jax.Array) -> list[jax.Array]:
    # The new value needs separate memory, because a server reuses the buffer of a received value.
    return [jnp.copy(x)]
