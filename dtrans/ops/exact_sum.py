"""Sums whose bits depend neither on the placement of the numbers nor on the order of their parts.

Each number is cut at fixed places into digits: those of the largest number, and some below. Digits
of one place are added as integers, which is exact. Parts are combined by adding digits of one
place, from that of the largest number of all. Digits too far below it are dropped, as they would
have been in a single part.

    2.5 + 0.007 with three decimal digits     2 + 0, 5 + 0, 0 + 0     at places 0, -1, -2

The error of a sum is at most `n * 2 ** -32` of its largest number (float64: `2 ** -72`), plus its
own rounding; see Demmel and Nguyen, "Parallel Reproducible Summation" (2015).

A part is a vector of integers: the place of its first digit, flags of infinities and NaN, and
digits.

    part  = exact_part x            the numbers (n,)
    part  = exact_join part part    parts of several sums, concatenated
    total = exact_total part

The three are primitives, so that a reader of a program sees a sum instead of bits
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
    """Format of digits for one type of numbers.

    Attributes:
      bits: bits of a digit.
      count: number of digits in a part.
      integer: type of integers.
      mantissa: bits of a number behind its exponent.
      bias: bias of the exponent.
    """

    bits: int
    count: int
    integer: str
    mantissa: int
    bias: int

    @property
    def size(self) -> int:
        """Length of a part."""
        return 2 + self.count


DIGITS = {
    "float32": DigitFormat(8, 5, "int32", 23, 127),
    "float64": DigitFormat(24, 4, "int64", 52, 1023),
}
MOST = 1 << 22  # numbers in a sum whose digits do not overflow

_PLUS, _MINUS = 1, 2  # infinities; NaN is both


def part_type(dtype: Any) -> ShapedArray:
    """Return the type of a part of a sum of numbers with this type."""
    d = DIGITS[np.dtype(dtype).name]
    return ShapedArray((d.size,), np.dtype(d.integer))


def part_of(x: jax.Array) -> jax.Array:
    """Return the part of a sum of the numbers `(n,)`."""
    return exact_part_p.bind(x)


def joined(a: jax.Array, b: jax.Array) -> jax.Array:
    """Combine two parts, each of several sums, concatenated."""
    return exact_join_p.bind(a, b)


def sum_of(part: jax.Array) -> jax.Array:
    """Return the sum of a part as a number."""
    return exact_total_p.bind(part)


def _cut_numbers(x: jax.Array) -> jax.Array:
    """Cut numbers into digits, and add those of one place."""
    d = DIGITS[x.dtype.name]
    low, high = (jnp.asarray(bound, x.dtype) for bound in (-jnp.inf, jnp.inf))
    largest, least = jax.lax.reduce((x, x), (low, high), _outermost, (0,))
    kinds = jnp.where(largest == jnp.inf, _PLUS, 0) | jnp.where(least == -jnp.inf, _MINUS, 0)
    kinds = jnp.where(jnp.isnan(largest), _PLUS | _MINUS, kinds)
    exponent = jax.lax.bitcast_convert_type(jnp.maximum(largest, -least), d.integer) >> d.mantissa
    place = exponent // d.bits
    y = x * _power(d.bias - d.bits * place, x.dtype)  # below one digit
    cut = [jnp.trunc(y * float(1 << d.bits * k)) for k in range(d.count)]
    digits = [cut[0], *(low - high * (1 << d.bits) for high, low in itertools.pairwise(cut))]
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
    """Add the digits of two parts, from the place of the larger number."""
    d = digit_format(a.dtype)
    a, b = (x.reshape(-1, d.size) for x in (a, b))
    place = jnp.maximum(a[:, :1], b[:, :1])
    return jnp.concatenate(
        [place, a[:, 1:2] | b[:, 1:2], _moved(a, place, d) + _moved(b, place, d)], 1
    ).ravel()


def _round_digits(part: jax.Array) -> jax.Array:
    """Round the digits of a part to a number."""
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
    odd = jnp.where(kinds == _PLUS, jnp.inf, jnp.where(kinds == _MINUS, -jnp.inf, jnp.nan)).astype(
        dtype
    )
    return jnp.where(kinds == 0, found, odd)


def _moved(parts: jax.Array, place: jax.Array, d: DigitFormat) -> jax.Array:
    """Return the digits of parts from another first place; digits beyond the last one are
    dropped."""
    at = jnp.arange(d.count) - (place - parts[:, :1])
    moved = jnp.take_along_axis(parts[:, 2:], jnp.maximum(at, 0), 1)
    return jnp.where(at < 0, 0, moved)


def _power(n: jax.Array, dtype: Any) -> jax.Array:
    """Return two to the power of `n`, exactly."""
    d = DIGITS[np.dtype(dtype).name]
    return jax.lax.bitcast_convert_type((n + d.bias).astype(d.integer) << d.mantissa, dtype)


def digit_format(dtype: Any) -> DigitFormat:
    """Return the format of digits for parts with a dtype."""
    return DIGITS[_summed_type(dtype)]


def _summed_type(dtype: Any) -> str:
    return next(n for n, d in DIGITS.items() if d.integer == np.dtype(dtype).name)


exact_part_p = new_primitive("exact_part", types=lambda x: part_type(x.dtype), impl=_cut_numbers)
exact_join_p = new_primitive("exact_join", types=lambda a, b: a, impl=_add_digits)
exact_total_p = new_primitive(
    "exact_total",
    types=lambda part: ShapedArray((), np.dtype(_summed_type(part.dtype))),
    impl=_round_digits,
)
