"""Costs of equations: floating-point operations and bytes.

This is a model for planning, not a measurement. `dtrans._jax.primitives` has the count of each
primitive. A product has a multiplication and an addition for each term. A reduction has one
operation for each entry of its operand, other arithmetic one for each entry of its outputs. Moves,
casts and counters cost nothing. A `scan` counts its body for each iteration, a `while` once, and a
`cond` its most expensive branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dtrans._jax import (
    COND,
    SCAN,
    Atom,
    JaxprEqn,
    bodies,
    facts_of,
    jaxprs_in_params,
    opened,
    scan_length,
)
from dtrans.ir.selection import values_at


def nbytes(aval: Any) -> int:
    """Return the bytes of an array of this type; 0 for other types.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.ir.cost import nbytes
      >>> nbytes(jnp.zeros((3, 4), jnp.bfloat16))
      24
    """
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else _product(aval.shape) * int(dtype.itemsize)


def total_bytes(atoms: Iterable[Atom]) -> int:
    """Return the bytes of values together."""
    return sum(nbytes(a.aval) for a in atoms)


def flops(eqn: JaxprEqn) -> int:
    """Return the floating-point operations of one equation, its bodies included.

    EPL counts a dense layer in the same way: 2*m*n*k, and one for each element of the output that
    the bias is added to (epl/profiler/flops.py).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.cost import flops
      >>> args = jnp.ones((10, 10)), jnp.ones((10, 16)), jnp.ones(16)
      >>> dense = jax.make_jaxpr(lambda x, w, b: x @ w + b)(*args)
      >>> [(eqn.primitive.name, flops(eqn)) for eqn in dense.jaxpr.eqns]
      [('dot_general', 3200), ('broadcast_in_dim', 0), ('add', 160)]
    """
    name, counted, out_size = (
        eqn.primitive.name,
        facts_of(eqn).flops,
        sum(_size(v.aval) for v in eqn.outvars),
    )
    if counted == "none":
        return 0
    if counted == "product":
        return 2 * out_size * _terms(eqn)
    if counted == "inputs":
        return sum(_size(a.aval) for a in eqn.invars)
    if counted == "updates":
        return _size(eqn.invars[-1].aval)
    if counted == "window":
        return out_size * _product(eqn.params["window_dimensions"])
    if name == SCAN:
        return scan_length(eqn) * flops_of(opened(*bodies(eqn)).eqns)
    if name == COND:
        return max(flops_of(opened(branch).eqns) for branch in bodies(eqn))
    nested = list(jaxprs_in_params(eqn.params))
    return sum(flops_of(opened(body).eqns) for body in nested) if nested else out_size


def flops_of(eqns: Iterable[JaxprEqn]) -> int:
    """Return the floating-point operations of some equations together."""
    return sum(map(flops, eqns))


def _terms(eqn: JaxprEqn) -> int:
    """Return the number of terms in each output of a product or a convolution."""
    if eqn.primitive.name == "conv_general_dilated":
        out_features, *_ = eqn.params["dimension_numbers"].rhs_spec
        kernel = eqn.invars[1].aval
        return _size(kernel) // max(1, int(kernel.shape[out_features]))
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _product(values_at(eqn.invars[0].aval.shape, contracted))


def _size(aval: Any) -> int:
    return _product(getattr(aval, "shape", ()))


def _product(of: Iterable[int]) -> int:
    return int(math.prod(of))
