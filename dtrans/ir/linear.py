"""Linear equations: the operands of each in which its outputs are linear.

A sum over devices may be made behind such an equation as well as before it, and so may a sum over micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from dtrans._jax import JaxprEqn


LINEAR = frozenset({"neg", "reshape", "transpose", "squeeze", "reduce_sum", "copy"})
ADDS = frozenset({"add", "add_any", "sub"})
_BILINEAR = frozenset({"mul", "dot_general", "conv_general_dilated"})
# from which operand to which an equation is linear in all of them together; None: to the last
_LINEAR_IN: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys((*LINEAR, "expand_dims", "slice", "rev", "cumsum", "broadcast_in_dim", "split", "unstack"), (0, 1)),
    **dict.fromkeys(("real", "imag", "conj", "div", "gather", "dynamic_slice", "gradient", "name"), (0, 1)),
    **dict.fromkeys((*ADDS, "pad", "dynamic_update_slice", "complex"), (0, 2)),
    **dict.fromkeys(("concatenate", "stack"), (0, None)),
    "select_n": (1, None),
}


def linear_operands(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the operands that an equation is linear in: those of a tuple together, others being fixed."""
    name, count = eqn.primitive.name, len(eqn.invars)
    if name in _BILINEAR:
        return [(0,), (1,)]
    if name == "scatter-add":
        return [(0, 2)]
    if name == "convert_element_type":  # but for rounding
        ends = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        # a count that a loop carries may lose its weak type alone
        return [(0,)] if ends[0] == ends[1] or all(jnp.issubdtype(t, jnp.floating) for t in ends) else []
    if name == "div" and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return []
    first, last = _LINEAR_IN.get(name, (0, 0))
    return [tuple(range(first, count if last is None else last))] if last != 0 else []
