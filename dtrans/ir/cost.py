"""Costs of equations: floating-point operations and bytes.

The counts are a model for planning, not a measurement. A matrix product counts 2 operations per
term, a reduction 1 per entry of its operand, and other arithmetic 1 per entry of its outputs.
Moves, casts and counters count 0. The body of a `scan` is counted for each iteration, the body of
a `while` once, and a `cond` as its most expensive branch. `dtrans._jax.primitives` lists the kind
of each primitive.
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
    if dtype is None:
        return 0
    return _product(aval.shape) * int(dtype.itemsize)


def total_bytes(atoms: Iterable[Atom]) -> int:
    """Return the total size of values, in bytes."""
    return sum(nbytes(a.aval) for a in atoms)


def flops(eqn: JaxprEqn) -> int:
    """Count the floating-point operations of one equation, its bodies included.

    EPL counts a dense layer in the same way: 2*m*n*k for the product and m*n for the bias
    (epl/profiler/flops.py).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.cost import flops
      >>> args = jnp.ones((10, 10)), jnp.ones((10, 16)), jnp.ones(16)
      >>> dense = jax.make_jaxpr(lambda x, w, b: x @ w + b)(*args)
      >>> [(eqn.primitive.name, flops(eqn)) for eqn in dense.jaxpr.eqns]
      [('dot_general', 3200), ('broadcast_in_dim', 0), ('add', 160)]
    """
    name, counted = eqn.primitive.name, facts_of(eqn).flops
    out_size = _total_size(eqn.outvars)
    if counted == "none":
        return 0
    if counted == "product":
        return 2 * out_size * _terms(eqn)
    if counted == "inputs":
        return _total_size(eqn.invars)
    if counted == "updates":
        return _size(eqn.invars[-1].aval)
    if counted == "window":
        return out_size * _product(eqn.params["window_dimensions"])
    if name == SCAN:
        return scan_length(eqn) * flops_of(opened(*bodies(eqn)).eqns)
    if name == COND:
        return max(map(_flops_of_body, bodies(eqn)))
    nested = list(jaxprs_in_params(eqn.params))
    if not nested:
        return out_size
    return sum(map(_flops_of_body, nested))


def _flops_of_body(body: Any) -> int:
    return flops_of(opened(body).eqns)


def flops_of(eqns: Iterable[JaxprEqn]) -> int:
    """Return the total floating-point operations of some equations."""
    return sum(map(flops, eqns))


def _terms(eqn: JaxprEqn) -> int:
    """Return the number of terms in each output entry of a matrix product or a convolution."""
    if eqn.primitive.name == "conv_general_dilated":
        out_features, *_ = eqn.params["dimension_numbers"].rhs_spec
        kernel = eqn.invars[1].aval
        return _size(kernel) // max(1, int(kernel.shape[out_features]))
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _product(values_at(eqn.invars[0].aval.shape, contracted))


def _total_size(atoms: Iterable[Atom]) -> int:
    return sum(_size(a.aval) for a in atoms)


def _size(aval: Any) -> int:
    return _product(getattr(aval, "shape", ()))


def _product(sizes: Iterable[int]) -> int:
    return int(math.prod(sizes))
