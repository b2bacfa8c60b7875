"""What an equation costs: floating-point operations and bytes.

A model for planning, not a measurement. Products and convolutions are counted as they are done, a multiplication and
an addition for each term; reductions cost one for each element that goes in, other arithmetic one for each that comes
out, and what only moves or renames data (reshape, transpose, slice, gather, cast, ...) costs nothing. Loops count their
body as often as it runs where that is known (`scan`), and once where it is not (`while`); of branches the dearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dtrans._jax import COND, SCAN, JaxprEqn, bodies, jaxprs_in_params, opened, scan_length


# only moves, renames or makes data
# fmt: off
LAYOUT_ONLY = frozenset(
    (
        "bitcast_convert_type", "broadcast_in_dim", "collected", "concatenate", "convert_element_type", "copy",
        "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice", "empty", "expand_dims", "gather",
        "gradient", "iota", "loss", "loss_seed", "name", "optimization_barrier", "pad", "pvary", "random_seed",
        "random_unwrap", "random_wrap", "reduce_precision", "reshape", "rev", "scatter", "sharding_constraint",
        "slice", "split", "squeeze", "stop_gradient", "tile", "transpose", "unstack",
    )
)
# one for each element that goes in
_BY_INPUT = frozenset(
    (
        "argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
        "reduce_sum", "reduce_xor",
    )
)
# fmt: on


def nbytes(aval: Any) -> int:
    """The bytes of an array of this type; 0 for what is no array.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.ir.cost import nbytes
      >>> nbytes(jnp.zeros((3, 4), jnp.bfloat16))
      24
    """
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else _product(aval.shape) * int(dtype.itemsize)


def flops(eqn: JaxprEqn) -> int:
    """The floating-point operations of one equation, those of its bodies included.

    EPL counts a dense layer in the same way: 2*m*n*k, and one for each element of what the bias is added to
    (epl/profiler/flops.py).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.cost import flops
      >>> dense = jax.make_jaxpr(lambda x, w, b: x @ w + b)(jnp.ones((10, 10)), jnp.ones((10, 16)), jnp.ones(16))
      >>> [(eqn.primitive.name, flops(eqn)) for eqn in dense.jaxpr.eqns]
      [('dot_general', 3200), ('broadcast_in_dim', 0), ('add', 160)]
    """
    name, params = eqn.primitive.name, eqn.params
    if name in LAYOUT_ONLY:
        return 0
    made = sum(_size(v.aval) for v in eqn.outvars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * made * _product(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        out_features, *_ = params["dimension_numbers"].rhs_spec
        kernel = eqn.invars[1].aval
        return 2 * made * (_size(kernel) // max(1, int(kernel.shape[out_features])))
    if name == SCAN:
        return scan_length(eqn) * flops_of(opened(*bodies(eqn)).eqns)
    if name == COND:
        return max(flops_of(opened(branch).eqns) for branch in bodies(eqn))
    if name in _BY_INPUT:
        return sum(_size(a.aval) for a in eqn.invars)
    if name.startswith("scatter"):
        return _size(eqn.invars[-1].aval)  # one for each element of the updates
    if "window_dimensions" in params:
        return made * _product(params["window_dimensions"])
    nested = list(jaxprs_in_params(params))
    return sum(flops_of(opened(body).eqns) for body in nested) if nested else made


def flops_of(eqns: Iterable[JaxprEqn]) -> int:
    """The floating-point operations of some equations together."""
    return sum(map(flops, eqns))


def _size(aval: Any) -> int:
    return _product(getattr(aval, "shape", ()))


def _product(of: Iterable[int]) -> int:
    return int(math.prod(of))
