"""Conversion of a trainer's program to a JAX function that calls JAX's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.ops import OVER_AXIS
from dtrans.plan import register_runner
from dtrans.run.base.segments import Rules, interpret


@register_runner(CollectivePlan, "function")
def per_trainer(
    program: Program, rules: Callable[[], Rules] = lambda: OVER_AXIS
) -> Callable[..., list[Any]]:
    """Convert a trainer's program to a JAX function of a flat list of arrays.

    The function's collectives need a named axis: callers map it over all trainers by
    `jax.shard_map` or `jax.vmap`.

    Args:
      program: the program of one trainer.
      rules: returns an implementation of each communication primitive. It is called for each trace.
        The default implementations are JAX's collectives over the axis.
    """
    inner = program.inner
    constants = dict(zip(inner.constvars, program.jaxpr.consts, strict=True))

    def run(*args: Any) -> list[Any]:
        env = {**constants, **dict(zip(inner.invars, args, strict=True))}
        return interpret(inner.eqns, env, inner.outvars, rules())

    return run
