"""Dynamic loss scale of a pipeline: a training step that scales its loss and skips overflows.

    step             gradients of loss -> update
    rewritten step   gradients of loss x scale, divided by scale -> update if all are finite

The step is rewritten before it is divided into stages. The scale is optimizer state that belongs to
no parameter, so every stage stores it. The test for finite gradients is a part of the update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Var, opened
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import bits_of, propagate
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import tuple_of
from dtrans.ir.selection import values_at
from dtrans.step.capture import value_and_grad_p
from dtrans.step.collect import COLLECT
from dtrans.step.marks import SEED, mark_p
from dtrans.zero.mixed_precision import (
    GOOD,
    SCALE,
    SKIPPED,
    all_finite,
    multiply_seed,
    next_scale,
    scale_spec,
    scale_types,
    unscale,
)
from dtrans.zero.options import LossScaling


def with_dynamic_scale(main: Program, scaling: LossScaling) -> Program:
    """Return a step with a dynamic loss scale. The optimizer's state then contains the scale.

    If a gradient is not finite, the new step skips the optimizer's update, and only changes the
    scale. It still updates batch statistics, which do not depend on gradients.

    Args:
      main: the traced step, (params, opt_state, *batch) -> (params, opt_state, ...).
      scaling: the dynamic scaling.
    """
    return main.rewritten(functools.partial(_scaled, scaling=scaling))


def _scaled(program: Program, scaling: LossScaling) -> Program:
    """Write the training step with a dynamic loss scale.

    The step may compute the loss and its gradients in many equations, or in one `value_and_grad`
    equation (`dtrans.step.capture`).
    """
    flat = inline_calls(program.jaxpr, keep=(SEED, COLLECT))
    inner = opened(flat)
    spec, b = scale_spec(), Builder(flat)
    state = {n: Var(jax.typeof(x)) for n, x in scale_types(scaling).items()}
    first = sum(len(arg.names) for arg in program.args[:2])
    b.invars += inner.invars
    b.invars[first:first] = values_at(state, spec.names)

    # Scale the loss, and divide the gradients by the scale.
    env: dict[Var, Atom] = {}
    gradients: list[Var] = []
    for eqn in inner.eqns:
        atoms = read_from(env, eqn.invars)
        if eqn.primitive.name == SEED:
            (env[eqn.outvars[0]],) = b.call(multiply_seed, atoms[0], state[SCALE])
        elif eqn.primitive is value_and_grad_p:
            env |= zip(eqn.outvars, _scale_loss(b, eqn, atoms, state[SCALE]), strict=True)
        else:
            b.keep(eqn, atoms)
        if eqn.primitive is mark_p:
            (gradient,) = eqn.outvars
            (env[gradient],) = b.call(unscale, gradient, state[SCALE])
            gradients.append(gradient)

    # Update the state only if all gradients are finite.
    (finite,) = b.call(all_finite, *gradients)
    updated = propagate(inner.eqns, dict.fromkeys(gradients, 1), {})
    old = dict(zip(program.in_names, inner.invars, strict=True))
    found = dict(zip(program.out_names, inner.outvars, strict=True))
    params, opt_state = program.args[:2]
    values = dict(zip(found, read_from(env, found.values()), strict=True))
    for n in (*params.names, *opt_state.names):
        if values[n] is not old[n] and (n in opt_state.names or bits_of(updated, found[n])):
            (values[n],) = b.call(_select, finite, values[n], old[n])
    names = (GOOD, SCALE, SKIPPED)
    values |= zip(names, b.call(next_scale(scaling), finite, *values_at(state, names)), strict=True)

    out = tuple_of(program.out, spec)
    jaxpr = b.build(values_at(values, out.names))
    return dataclasses.replace(
        program,
        jaxpr=jaxpr,
        args=(params, tuple_of(opt_state, spec), *program.args[2:]),
        out=out,
        roles=("",) * len(b.eqns),
        labels={},
    )


def _scale_loss(b: Builder, eqn: JaxprEqn, atoms: Sequence[Atom], scale: Var) -> list[Atom]:
    """Write a `value_and_grad` equation with the scaled loss; return its outputs.

    The returned loss is not scaled; the returned gradients are.

    Args:
      b: the builder to write to.
      eqn: the equation `value_and_grad`.
      atoms: the operands of the equation.
      scale: the scale.
    """
    body = inline_calls(eqn.params["loss"], keep=(COLLECT,), rules=True)
    inner = opened(body)
    count = len(inner.outvars)
    writer = Builder(body)
    writer.invars += inner.invars
    factor = writer.input(scale.aval)
    for e in inner.eqns:
        writer.keep(e)
    loss, *others = inner.outvars
    (scaled,) = writer.call(multiply_seed, loss, factor)
    scaled_body = writer.build([scaled, *others, loss])
    outs = b.bind(value_and_grad_p, *atoms, scale, **{**eqn.params, "loss": scaled_body})
    return [outs[count], *outs[1:count], *outs[count + 1 :]]


def _select(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(finite, new, old)
