"""A loop over layers that gathers the next layer while it computes one.

    scan: gather, compute           becomes      gather; scan: gather the next, compute; compute the last

What is gathered ahead goes from turn to turn beside what the loop carries. The last turn stands
behind the loop, since there is nothing to gather in it: as many bytes are moved as before. Each
turn takes its parts of what is taken apart by their number, so that nothing is copied to shift it
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dtrans._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    is_reversed,
    jaxpr_as_fun,
    opened,
    scan_counts,
    scan_length,
    small_jaxpr,
)


def prefetched(
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    gather: Callable[[Any], Any],
    stack: int,
    types: Sequence[Any],
    outs: list[Var],
) -> JaxprEqn:
    """Return the loop as one equation.

    Args:
      eqn: the loop over layers, a `scan`.
      body: of one turn: from constants, what is carried, this turn's parts, and what was gathered
        for it, to what is carried and what is made in this turn.
      gather: from a turn's slice to what is gathered.
      stack: which of the parts, counted from 0, is that slice.
      types: of the operands of the loop: constants, what is carried, what is taken apart.
      outs: the variables of what it makes.
    """
    (consts, carried), length = scan_counts(eqn), scan_length(eqn)
    run: Callable[..., Any] = jaxpr_as_fun(body)
    made = [a.aval for a in opened(body).outvars[carried:]]
    first, last, by = (length - 1, 0, -1) if is_reversed(eqn) else (0, length - 1, 1)

    def loop(*operands: Any) -> Any:
        fixed, carry, parts = (
            operands[:consts],
            operands[consts : consts + carried],
            operands[consts + carried :],
        )

        def turn(carry: Any, whole: Any, found: Any, i: Any) -> Any:
            xs = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in parts]
            new = run(*fixed, *carry, *xs, whole)
            updated = [
                lax.dynamic_update_index_in_dim(all_, x, i, 0)
                for all_, x in zip(found, new[carried:], strict=True)
            ]
            return tuple(new[:carried]), updated

        def one(state: Any, k: Any) -> Any:
            carry, whole, found = state
            i = first + by * k
            ahead = gather(lax.dynamic_index_in_dim(parts[stack], i + by, keepdims=False))
            carry, found = turn(carry, whole, found, i)
            return (carry, ahead, found), None

        found = [jnp.zeros((length, *t.shape), t.dtype) for t in made]
        start = (tuple(carry), gather(parts[stack][first]), found)
        (carry, whole, found), _ = lax.scan(one, start, jnp.arange(length - 1))
        carry, found = turn(carry, whole, found, last)
        return [*carry, *found]

    (call,) = small_jaxpr(jax.jit(loop, inline=False), types).jaxpr.eqns
    return call.replace(outvars=outs, source_info=eqn.source_info)
