"""Gradient clipping by one trainer, before the trainer reduces or sends its gradients.

A clip in the optimizer (`optax.clip_by_global_norm`) reads the reduced gradients of all trainers.
An asynchronous server has only some blocks of one trainer's gradients, so it cannot compute their
norm. This module moves the clip to the trainer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, opened
from dtrans.checks import check_number, check_one_of
from dtrans.errors import ConfigError, GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import variables
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.step.marks import mark_p


CLIPPED_BY = ("global_norm", "norm")


def check_local_clip(norm: Any, by: Any) -> None:
    """Check the options `clip_local_norm` and `clip_local_by`, which clip a trainer's gradients.

    Args:
      norm: the maximum norm; None for no clip.
      by: "global_norm" or "norm", see `clip_to_norm`.

    Raises:
      ConfigError: an option is out of range, or `by` is given without a norm.
    """
    check_number("clip_local_norm", norm, "a positive number", lambda x: x > 0, or_none=True)
    check_one_of("clip_local_by", by, CLIPPED_BY)
    if by != "global_norm" and norm is None:
        raise ConfigError(
            f"clip_local_by={by!r} needs clip_local_norm, but that is None; pass "
            "clip_local_norm=1.0 or another norm"
        )


@functools.cache
def clip_to_norm(norm: float, by: str = "global_norm") -> Callable[..., Sequence[jax.Array]]:
    """Return a function that scales gradients down if their norm is larger than `norm`.

    It computes the numbers of `optax.clip_by_global_norm`.

    Args:
      norm: the maximum norm.
      by: "global_norm" for the norm of all gradients, "norm" for the norm of each gradient.
    """

    def fn(*grads: jax.Array) -> Sequence[jax.Array]:
        return [
            jnp.where(size < norm, g, (g / size.astype(g.dtype)) * norm)
            for g, size in zip(grads, limited_norms(grads, by), strict=True)
        ]

    return fn


def limited_norms(grads: Sequence[jax.Array], by: str) -> list[jax.Array]:
    """Return one norm for each gradient, which `clip_to_norm` compares with the limit.

    Args:
      grads: the gradients.
      by: "norm" for each gradient's own norm, "global_norm" for the common norm of all gradients.
    """
    squares = (jnp.sum(jnp.square(jnp.abs(g))) for g in grads)
    if by == "norm":
        return list(map(jnp.sqrt, squares))
    return [jnp.sqrt(sum(squares))] * len(grads)


def clip_marked_gradients(main: Program, norm: float, by: str) -> Program:
    """Rewrite a step so that its gradients are clipped before the optimizer reads them.

    Args:
      main: the traced step, (params, opt_state, *batch) -> (params, opt_state, ...).
      norm, by: the clip, see `clip_to_norm`.

    Raises:
      GradientError: the step does not call `dtrans.value_and_grad` exactly once.
    """
    return main.rewritten(functools.partial(_clipped, norm=norm, by=by))


def _clipped(program: Program, norm: float, by: str) -> Program:
    """Write the step again, with a clip of all gradients before the first mark of a gradient."""
    flat = inline_calls(program.jaxpr)
    inner = opened(flat)
    marks = [i for i, eqn in enumerate(inner.eqns) if eqn.primitive is mark_p]
    b = Builder(flat)
    b.invars += inner.invars
    gradients = [inner.eqns[i].invars[0] for i in marks]
    values: dict[int, Atom] = {}  # position of a mark -> its clipped gradient
    for i, eqn in enumerate(inner.eqns):
        if i in marks and not values:
            late = {v for e in inner.eqns[i:] for v in e.outvars}
            if not late.isdisjoint(variables(gradients)):
                raise _not_once(program)
            clipped = b.call(clip_to_norm(float(norm), by), *gradients)
            values = dict(zip(marks, clipped, strict=True))
        if i in values:
            b.keep(eqn, [values[i], *eqn.invars[1:]])
        else:
            b.keep(eqn)
    if not marks:
        raise _not_once(program)
    jaxpr = b.build(inner.outvars)
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(b.eqns), labels={})


def _not_once(program: Program) -> GradientError:
    return GradientError(
        f"clip_local_norm needs all gradients of {program.name} at once; call "
        "dtrans.value_and_grad exactly once in the step, or build the step with "
        "dtrans.make_train_step"
    )
