"""Rules of exact sums (`dtrans.ops.exact_sum`): sums in the field.

A part is a vector of integers, which programs pack with others, send and split. Here it has the
element and the shadow of the sum in the place of digits. So what moves parts needs no rule, and a
part of zeros is that of no number.
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


def _coded(elements: Array, shadow: Array, dtype: Any) -> Array:
    """Return the parts, one behind the other, that stand for sums."""
    rows = np.stack([elements, np.ascontiguousarray(shadow, np.float64).view(np.uint64)], 1)
    words = rows.view(np.dtype(dtype))
    parts = np.zeros((len(rows), digit_format(dtype).size), dtype)
    parts[:, : words.shape[1]] = words
    return parts.ravel()


def _sums(parts: Array) -> tuple[Array, Array]:
    """Return the elements and shadows of the sums that parts stand for."""
    rows = parts.reshape(-1, digit_format(parts.dtype).size)
    words = np.ascontiguousarray(rows[:, : 16 // parts.dtype.itemsize]).view(np.uint64)
    return words[:, 0], np.ascontiguousarray(words[:, 1]).view(np.float64)


def _part(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements, shadow = field.total(x.elements, (0,)), x.shadow.sum(0)
    return [_coded(np.atleast_1d(elements), np.atleast_1d(shadow), eqn.outvars[0].aval.dtype)]


def _join(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (one, first), (other, second) = map(_sums, operands)
    return [_coded(field.add(one, other), first + second, operands[0].dtype)]


def _total(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    elements, shadow = _sums(operands[0])
    found: Real = real(elements[0], shadow[0])
    return [found]


EXACT_SUMS: Mapping[str, Callable[[JaxprEqn, list[Any]], list[Any]]] = {
    "exact_part": _part,
    "exact_join": _join,
    "exact_total": _total,
}
