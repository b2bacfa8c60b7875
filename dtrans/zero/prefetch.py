"""Rewrite of a loop over layers: each iteration gathers the next layer while it computes.

    scan: gather, compute      becomes      gather
                                            scan: gather the next layer, compute
                                            compute the last layer

So the all-gather overlaps with computation. The scan carries the gathered layer from one iteration
to the next. The last layer is computed after the scan, because there is no next layer to gather.
The rewritten body indexes the stacked operands itself: a scan over a stack shifted by one layer
would need a copy of the stack.
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
    body_indices,
    is_reversed,
    jaxpr_as_fun,
    opened,
    scan_length,
    small_jaxpr,
)
from dtrans.ir.dataflow import avals


def prefetch_layers(
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    gather: Callable[[Any], Any],
    stack: int,
    types: Sequence[Any],
    outvars: list[Var],
) -> JaxprEqn:
    """Rewrite a loop over layers so that it gathers each layer one iteration earlier.

    Args:
      eqn: the loop over layers, a `scan`.
      body: one iteration. Its inputs are constants, carried values, slices of the stacks, and the
        gathered layer. Its outputs are carried values, and slices of the stacked outputs.
      gather: function that returns the full layer from a rank's slice of the layer.
      stack: the position of the layers among the stacked operands.
      types: the types of the loop's operands: constants, carried values, stacks.
      outvars: the variables of the loop's outputs.

    Returns:
      One equation, which replaces the loop.
    """
    indices, length = body_indices(eqn), scan_length(eqn)
    first_stack, carried = indices.slices[0], len(indices.carried)
    consts = first_stack - carried
    run: Callable[..., Any] = jaxpr_as_fun(body)
    stacked_types = avals(opened(body).outvars[carried:])
    first, last, step = 0, length - 1, 1
    if is_reversed(eqn):
        first, last, step = last, first, -1

    def loop(*operands: Any) -> Any:
        fixed, carry = operands[:consts], operands[consts:first_stack]
        stacks = operands[first_stack:]

        def compute(carry: Any, layer: Any, outputs: Any, i: Any) -> Any:
            slices = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in stacks]
            new = run(*fixed, *carry, *slices, layer)
            updated = []
            for output, x in zip(outputs, new[carried:], strict=True):
                updated.append(lax.dynamic_update_index_in_dim(output, x, i, 0))
            return tuple(new[:carried]), updated

        def iterate(state: Any, k: Any) -> Any:
            carry, layer, outputs = state
            i = first + step * k
            following = gather(lax.dynamic_index_in_dim(stacks[stack], i + step, keepdims=False))
            carry, outputs = compute(carry, layer, outputs, i)
            return (carry, following, outputs), None

        outputs = [jnp.zeros((length, *t.shape), t.dtype) for t in stacked_types]
        start = (tuple(carry), gather(stacks[stack][first]), outputs)
        (carry, layer, outputs), _ = lax.scan(iterate, start, jnp.arange(length - 1))
        carry, outputs = compute(carry, layer, outputs, last)
        return [*carry, *outputs]

    (call,) = small_jaxpr(jax.jit(loop, inline=False), types).jaxpr.eqns
    return call.replace(outvars=outvars, source_info=eqn.source_info)
