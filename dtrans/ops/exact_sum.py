"""Sums whose bits do not depend on the order of additions, or on the placement of the numbers.

Each number is written with digits of several bits, as in a positional number system. A sum has a
fixed number of digits: the leading digit of its largest number, and the digits below it. Lower
digits are dropped. The digits at one position are added as integers, which is exact. A *part* is
the sum of some of the numbers in this form. Two parts are added digit by digit, starting at the
leading digit of the larger part. Lower digits are dropped, as they would be if all numbers were in
one part.

    2.5 + 0.007 with three decimal digits     2 + 0, 5 + 0, 0 + 0     the 7 is dropped

For n numbers the error is at most `n * 2 ** -32` of the largest number (float64: `2 ** -72`), plus
the rounding of the result. See Demmel and Nguyen, "Parallel Reproducible Summation" (2015).

A part is stored as a vector of integers: the position of its leading digit, flags for infinities
and NaN, then the digits.

    part  = exact_part x            part of the numbers x, of shape (n,)
    part  = exact_join part part    addition of parts, or of several concatenated parts
    total = exact_total part        the sum, rounded to a float

These are primitives, so that an analysis of a program sees a sum instead of operations on bits
(`dtrans.verification.exact_rules`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import ShapedArray, new_primitive


@dataclasses.dataclass(frozen=True)
class DigitFormat:
    """Format of parts, the vectors of digits in which sums of one dtype are stored.

    Attributes:
      bits: number of bits of a digit.
      count: number of digits in a part.
      integer: dtype of parts, an integer type.
      mantissa: number of mantissa bits of the summed dtype.
      bias: bias of the exponent of the summed dtype.
    """

    bits: int
    count: int
    integer: str
    mantissa: int
    bias: int

    @property
    def size(self) -> int:
        """Length of a part: a position, flags, and the digits."""
        return 2 + self.count


DIGITS = {
    "float32": DigitFormat(8, 5, "int32", 23, 127),
    "float64": DigitFormat(24, 4, "int64", 52, 1023),
}
MOST = 1 << 22  # largest number of terms of a sum; with more terms, digits could overflow

_PLUS, _MINUS = 1, 2  # flags of inf and -inf; NaN has both


def part_type(dtype: Any) -> ShapedArray:
    """Return the type of a part: a vector that stores a sum of numbers with this dtype."""
    d = DIGITS[np.dtype(dtype).name]
    return ShapedArray((d.size,), np.dtype(d.integer))


def part_of(x: jax.Array) -> jax.Array:
    """Add up numbers of shape (n,); return the sum as a part (vector of digits)."""
    return exact_part_p.bind(x)


def joined(a: jax.Array, b: jax.Array) -> jax.Array:
    """Add two parts (vectors of digits), or two concatenations of the parts of several sums."""
    return exact_join_p.bind(a, b)


def sum_of(part: jax.Array) -> jax.Array:
    """Round a part (vector of digits) to a float."""
    return exact_total_p.bind(part)


def _split_numbers(x: jax.Array) -> jax.Array:
    """Split numbers into digits, and add up the digits at each position; return a part."""
    d = DIGITS[x.dtype.name]
    low, high = (jnp.asarray(bound, x.dtype) for bound in (-jnp.inf, jnp.inf))
    largest, least = jax.lax.reduce((x, x), (low, high), _outermost, (0,))
    kinds = jnp.where(largest == jnp.inf, _PLUS, 0) | jnp.where(least == -jnp.inf, _MINUS, 0)
    kinds = jnp.where(jnp.isnan(largest), _PLUS | _MINUS, kinds)
    exponent = jax.lax.bitcast_convert_type(jnp.maximum(largest, -least), d.integer) >> d.mantissa
    place = exponent // d.bits
    # Scale the numbers so that the integer part of the largest number is the leading digit.
    y = x * _power(d.bias - d.bits * place, x.dtype)
    prefixes = [jnp.trunc(y * float(1 << d.bits * k)) for k in range(d.count)]
    pairs = itertools.pairwise(prefixes)
    digits = [prefixes[0], *(low - high * (1 << d.bits) for high, low in pairs)]
    sums = jax.lax.reduce(
        tuple(c.astype(d.integer) for c in digits),
        (jnp.zeros((), d.integer),) * d.count,
        _added,
        (0,),
    )
    return jnp.stack([place, kinds.astype(d.integer), *sums])


def _outermost(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])


def _added(a: Any, b: Any) -> tuple[jax.Array, ...]:
    return tuple(p + q for p, q in zip(a, b, strict=True))


def _add_digits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Add two parts, starting at the leading digit of the larger part."""
    d = digit_format(a.dtype)
    a, b = (x.reshape(-1, d.size) for x in (a, b))
    place = jnp.maximum(a[:, :1], b[:, :1])
    kinds = a[:, 1:2] | b[:, 1:2]
    digits = _align(a, place, d) + _align(b, place, d)
    return jnp.concatenate([place, kinds, digits], 1).ravel()


def _round_digits(part: jax.Array) -> jax.Array:
    """Round a part (vector of digits) to a float."""
    d, dtype = digit_format(part.dtype), _summed_type(part.dtype)
    place, kinds, *digits = part
    below, carry = jnp.zeros((), dtype), jnp.zeros((), d.integer)
    for k in range(d.count - 1, 0, -1):
        digit = digits[k] + carry
        carry = digit >> d.bits
        below += (digit - (carry << d.bits)).astype(dtype) * float(2.0 ** (-d.bits * k))
    scaled = (digits[0] + carry).astype(dtype) + below
    by = d.bits * place - d.bias
    found = scaled * _power(by // 2, dtype) * _power(by - by // 2, dtype)
    not_finite = jnp.where(kinds == _MINUS, -jnp.inf, jnp.nan)
    not_finite = jnp.where(kinds == _PLUS, jnp.inf, not_finite).astype(dtype)
    return jnp.where(kinds == 0, found, not_finite)


def _align(parts: jax.Array, place: jax.Array, d: DigitFormat) -> jax.Array:
    """Return the digits of parts, shifted so that all parts begin at the same position.

    Digits that do not fit are dropped.

    Args:
      parts: vectors of digits, one in each row.
      place: the new position of the leading digit.
      d: the format of the digits.
    """
    at = jnp.arange(d.count) - (place - parts[:, :1])
    moved = jnp.take_along_axis(parts[:, 2:], jnp.maximum(at, 0), 1)
    return jnp.where(at < 0, 0, moved)


def _power(n: jax.Array, dtype: Any) -> jax.Array:
    """Return 2**n exactly, as a float of the given dtype."""
    d = DIGITS[np.dtype(dtype).name]
    return jax.lax.bitcast_convert_type((n + d.bias).astype(d.integer) << d.mantissa, dtype)


def digit_format(dtype: Any) -> DigitFormat:
    """Return the digit format for vectors of digits with this dtype."""
    return DIGITS[_summed_type(dtype)]


def _summed_type(dtype: Any) -> str:
    return next(n for n, d in DIGITS.items() if d.integer == np.dtype(dtype).name)


exact_part_p = new_primitive("exact_part", types=lambda x: part_type(x.dtype), impl=_split_numbers)
exact_join_p = new_primitive("exact_join", types=lambda a, b: a, impl=_add_digits)
exact_total_p = new_primitive(
    "exact_total",
    types=lambda part: ShapedArray((), np.dtype(_summed_type(part.dtype))),
    impl=_round_digits,
)
