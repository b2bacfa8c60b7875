"""Rules that evaluate exact sums (`dtrans.ops.exact_sum`) in the finite field.

An exact sum gives the same bits in any order of addition. In a job, its partial sum is a vector of
integers, which programs pack, send and split. Under these rules, the vector contains the bits of
the partial sum's field element and float64 value instead. So equations that move such vectors need
no special rule. A vector of zeros is an empty sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ops.exact_sum import digit_format
from dtrans.verification import field
from dtrans.verification.field import Array
from dtrans.verification.field_values import Real, real


def _encode(elements: Array, approx: Array, dtype: Any) -> Array:
    """Encode sums, given as finite-field elements and float64 values, as one vector of integers."""
    rows = np.stack([elements, np.ascontiguousarray(approx, np.float64).view(np.uint64)], 1)
    words = rows.view(np.dtype(dtype))
    parts = np.zeros((len(rows), digit_format(dtype).size), dtype)
    parts[:, : words.shape[1]] = words
    return parts.ravel()


def _decode(parts: Array) -> tuple[Array, Array]:
    """Return the finite-field elements and float64 values of sums that `_encode` encoded."""
    rows = parts.reshape(-1, digit_format(parts.dtype).size)
    words = np.ascontiguousarray(rows[:, : 16 // parts.dtype.itemsize]).view(np.uint64)
    return words[:, 0], np.ascontiguousarray(words[:, 1]).view(np.float64)


def _part(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements, approx = field.total(x.elements, (0,)), x.approx.sum(0)
    return [_encode(np.atleast_1d(elements), np.atleast_1d(approx), eqn.outvars[0].aval.dtype)]


def _join(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (one, first), (other, second) = map(_decode, operands)
    return [_encode(field.add(one, other), first + second, operands[0].dtype)]


def _total(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    elements, approx = _decode(operands[0])
    found: Real = real(elements[0], approx[0])
    return [found]


EXACT_SUMS: Mapping[str, Callable[[JaxprEqn, list[Any]], list[Any]]] = {
    "exact_part": _part,
    "exact_join": _join,
    "exact_total": _total,
}
