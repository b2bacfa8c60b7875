"""Rules that evaluate sums, products, quotients and contractions of floats in a finite field.

The field consists of the integers modulo 2**61 - 1. A float is represented by a `Real`: an element
of the field, and an approximation in float64. The results are exact in the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ir.selection import values_at
from dtrans.verification import field
from dtrans.verification.field import Array
from dtrans.verification.field_values import real
from dtrans.verification.rule_values import (
    Rule,
    apply_along_axis,
    approx_of,
    axes_last,
    by_jax,
    compute_approx,
    elements_in,
    for_each_operand,
)


def _exactly(fn: Callable[..., Array]) -> Rule:
    """Return a rule that evaluates a primitive by `fn`, which is exact on finite-field elements."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return [real(fn(*map(elements_in, operands)), compute_approx(eqn, operands))]

    return rule


def _divide(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = map(elements_in, operands)
    if y.ndim and y.strides and not any(y.strides):  # y is one number, broadcast to all entries
        inverse = np.broadcast_to(field.inverse(y.reshape(-1)[:1])[0], y.shape)
    else:
        inverse = field.inverse(y)
    return [real(field.multiply(x, inverse), compute_approx(eqn, operands))]


def _integer_pow(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    with np.errstate(all="ignore"):
        return [real(field.power(x.elements, eqn.params["y"]), x.approx ** float(eqn.params["y"]))]


def _dot_general(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (contract, batch), (x, y) = eqn.params["dimension_numbers"], operands
    as_left = lambda a: _as_matrices(a, batch[0], contract[0], last=True)
    as_right = lambda a: _as_matrices(a, batch[1], contract[1], last=False)
    elements = field.matrix_product(as_left(elements_in(x)), as_right(elements_in(y)))
    approx_values = [np.asarray(approx_of(a), np.float64) for a in (x, y)]
    with np.errstate(all="ignore"):
        approx = as_left(approx_values[0]) @ as_right(approx_values[1])
    shape = eqn.outvars[0].aval.shape
    return [real(elements.reshape(shape), approx.reshape(shape))]


def _as_matrices(x: Array, batch: Sequence[int], contract: Sequence[int], *, last: bool) -> Array:
    """Reshape an operand of a contraction to a stack of matrices.

    Args:
      x: the operand.
      batch: its batch dimensions, which become the stack.
      contract: its contracted dimensions, which become one dimension of the matrices.
      last: True if the contracted dimension is the matrices' last dimension, False if it is the
        first.
    """
    free = [d for d in range(x.ndim) if d not in (*batch, *contract)]
    rows = math.prod(values_at(x.shape, free))
    inner = math.prod(values_at(x.shape, contract))
    stack = values_at(x.shape, batch)
    if last:
        return x.transpose(*batch, *free, *contract).reshape(*stack, rows, inner)
    return x.transpose(*batch, *contract, *free).reshape(*stack, inner, rows)


def _reduce_sum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axes = operands, tuple(eqn.params["axes"])
    return [real(field.total(x.elements, axes), x.approx.sum(axes))]


def _cumsum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements = apply_along_axis(field.cumulative_total, x.elements, eqn)
    return [real(elements, apply_along_axis(np.cumsum, x.approx, eqn))]


def _cumulative_product(x: Array, axis: int) -> Array:
    found = np.moveaxis(x.copy(), axis, 0)
    for k in range(1, len(found)):
        found[k] = field.multiply(found[k - 1], found[k])
    return np.moveaxis(found, 0, axis)


def _cumprod(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements = apply_along_axis(_cumulative_product, x.elements, eqn)
    return [real(elements, apply_along_axis(np.cumprod, x.approx, eqn))]


def _reduce_prod(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axes = operands, tuple(eqn.params["axes"])
    flat = axes_last(x, axes).elements
    found = np.ones(flat.shape[:-1], np.uint64)
    for k in range(flat.shape[-1]):
        found = field.multiply(found, flat[..., k])
    return [real(found, x.approx.prod(axes))]


def _convolution(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Convolve arrays of finite-field elements, in limbs (parts) of 16 bits.

    Float64 cannot multiply elements of 61 bits exactly, but it multiplies and adds limbs exactly.
    """
    x, y = operands
    float64 = np.dtype(np.float64)
    convolve = lambda a, b: by_jax(eqn, [a, b], preferred_element_type=float64)[0]
    left = field.limbs(elements_in(x), field.SHORT)
    right = field.limbs(elements_in(y), field.SHORT)
    sums: list[Any] = [0] * (len(left) + len(right) - 1)
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            sums[i + j] = sums[i + j] + convolve(one, other)
    approx = convolve(np.asarray(approx_of(x), float64), np.asarray(approx_of(y), float64))
    return [real(field.from_limbs(sums, field.SHORT), approx)]


ARITHMETIC: Mapping[str, Rule] = {
    **dict.fromkeys(("add", "add_any"), _exactly(field.add)),
    "sub": _exactly(field.subtract),
    "mul": _exactly(field.multiply),
    "neg": _exactly(field.negative),
    "square": _exactly(lambda x: field.multiply(x, x)),
    "one_minus_square": _exactly(lambda x: field.subtract(np.uint64(1), field.multiply(x, x))),
    "div": _divide,
    "integer_pow": _integer_pow,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "reduce_sum": _reduce_sum,
    "psum": for_each_operand(_reduce_sum),
    "reduce_prod": _reduce_prod,
    "cumsum": _cumsum,
    "cumprod": _cumprod,
}
