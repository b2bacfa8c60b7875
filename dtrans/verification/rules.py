"""Table of the rules that evaluate JAX's primitives in a finite field.

    arithmetic_rules   sums, products, quotients, contractions: exact in the field
    movement_rules     equations that only move, select or convert elements
    order_rules        equations that depend on the order of floats
    scatter_rules      scatters, and reductions over windows
    here               functions that the field lacks: keyed hashes of their arguments

A rule is a function of an equation and its operands that returns the list of outputs. Operands are
`Real` values (floats), integers, booleans and random keys. The outputs of a primitive without a
rule are `Unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ir.dataflow import avals
from dtrans.verification import field, field_values as values
from dtrans.verification.arithmetic_rules import ARITHMETIC
from dtrans.verification.field import Array
from dtrans.verification.field_values import Real, choose, real
from dtrans.verification.movement_rules import MOVED_BY_NUMPY, MOVEMENT, PLACES
from dtrans.verification.numpy_rules import ELEMENTWISE, OTHERS, threefry_bits
from dtrans.verification.order_rules import ORDER
from dtrans.verification.rule_values import (
    Rule,
    apply_along_axis,
    approx_of,
    by_jax,
    compute_approx,
    elements_in,
)
from dtrans.verification.scatter_rules import SCATTERS


# Values of functions of one operand at 0, and at 1, if these values are rational.
AT_ZERO: Mapping[str, int] = {
    **dict.fromkeys(
        ("asin", "asinh", "atan", "atanh", "cbrt", "erf", "erf_inv", "expm1", "log1p"), 0
    ),
    **dict.fromkeys(("sin", "sinh", "sqrt", "tan", "tanh"), 0),
    **dict.fromkeys(("bessel_i0e", "cos", "cosh", "erfc", "exp", "exp2"), 1),
}
AT_ONE: Mapping[str, int] = {
    **dict.fromkeys(("cbrt", "rsqrt", "sqrt"), 1),
    **dict.fromkeys(("acos", "acosh", "log", "log2"), 0),
    "exp2": 2,
}


def _hash(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Replace a function that the finite field lacks, such as `sqrt`, by a hash of its operands.

    For the operands 0 and 1, the exact result is used if it is rational. So the norm of zeros is
    zero, and optimizers that test for zero take the right branch.
    """
    name, approx = eqn.primitive.name, np.asarray(compute_approx(eqn, operands))
    params = dict(eqn.params)
    params.pop("accuracy", None)
    found = values.hashed((name, sorted(params.items())), *operands, approx=approx)
    for at, known in ((0, AT_ZERO), (1, AT_ONE)):
        if name in known:
            there = elements_in(operands[0]) == np.uint64(at)
            exact = np.full(approx.shape, known[name])
            found = choose(there, Real(exact.astype(np.uint64), exact.astype(np.float64)), found)
    return [found]


def _running_hash(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Replace a cumulative function: the output at each index is a hash of all entries up to it."""
    (x,) = operands

    def running(elements: Array, axis: int) -> Array:
        if not elements.shape[axis]:
            return elements
        found: list[Array] = []
        for row in np.moveaxis(elements, axis, 0):
            found.append(field.hashed(eqn.primitive.name, *found[-1:], row))
        return np.moveaxis(np.stack(found), 0, axis)

    return [real(apply_along_axis(running, x.elements, eqn), by_jax(eqn, [x.approx])[0])]


def _random_gamma(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Replace a gamma-distributed random number by a hash of its key and its parameter."""
    keys, x = operands
    words = np.asarray(jax.random.key_data(keys)).astype(np.uint64)
    each = np.moveaxis(words, -1, 0)
    (approx,) = by_jax(eqn, [keys, approx_of(x)])
    name = (eqn.primitive.name, eqn.params["log_space"])
    return [real(field.hashed(name, *each, elements_in(x)), approx)]


_HASHED = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma",
    "igamma_grad_a", "igammac", "lgamma", "log", "log1p", "log2", "logistic", "nextafter",
    "polygamma", "pow", "random_gamma_grad", "regularized_incomplete_beta", "rem", "rsqrt", "sin",
    "sinh", "sqrt", "tan", "tanh", "zeta",
)  # fmt: skip
REAL: Mapping[str, Rule] = {
    **ARITHMETIC,
    **MOVEMENT,
    **ORDER,
    **SCATTERS,
    "cumlogsumexp": _running_hash,
    "random_gamma": _random_gamma,
    **dict.fromkeys(_HASHED, _hash),
}


def plain(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation on integers, booleans or random keys."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if name in PLACES:
        return operands
    if any(map(values.is_key, operands)):
        outputs = with_keys(eqn, operands)
    elif name in ELEMENTWISE:
        outputs = [ELEMENTWISE[name](*operands)]
    elif name in OTHERS:
        outputs = OTHERS[name](eqn.params, operands, out)
    else:
        outputs = by_jax(eqn, operands)
    return [_as_type(x, aval) for x, aval in zip(outputs, avals(eqn.outvars), strict=True)]


def with_keys(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation on random keys; use NumPy if possible, otherwise JAX."""
    name, (keys, *rest) = eqn.primitive.name, operands
    partitionable: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    is_threefry = partitionable and str(jax.random.key_impl(keys)) == "threefry2x32"
    # dtrans has a primitive `random_bits`, too, which draws only some rows. It has more parameters
    # than JAX's.
    is_plain = eqn.params.keys() == {"shape", "bit_width"}
    if name == "random_bits" and is_threefry and is_plain and not keys.shape:
        words = np.asarray(jax.random.key_data(keys))
        return [threefry_bits(words, eqn.params["shape"], eqn.params["bit_width"])]
    if name in MOVED_BY_NUMPY and not any(map(values.is_key, rest)):
        data = np.asarray(jax.random.key_data(keys))
        places = np.arange(keys.size, dtype=np.int64).reshape(keys.shape)
        each = OTHERS[name](eqn.params, [places, *rest], eqn.outvars[0].aval)
        flat, impl = data.reshape(-1, data.shape[-1]), jax.random.key_impl(keys)
        return [jax.random.wrap_key_data(flat[where], impl=impl) for where in each]
    return by_jax(eqn, operands)


def _as_type(x: Any, aval: Any) -> Any:
    if values.is_key(x):
        return x
    if values.is_float(aval.dtype):
        return values.lifted(np.asarray(x, np.float64), aval.dtype)
    if values.is_complex(aval.dtype):
        return values.lifted(np.asarray(x, np.complex128), aval.dtype)
    return np.asarray(x).astype(aval.dtype).reshape(aval.shape)
