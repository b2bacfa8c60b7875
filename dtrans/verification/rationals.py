"""Floats as rational numbers: each float becomes the simplest fraction that rounds to the float.

`1/12` in a step and `1/3` times `1/4` in a plan are different floats, but the same rational number.
Among the fractions that round to a float, the simplest one has the least denominator.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from dtrans.verification.field import Array, P, key_of, multiply, negative


def simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction with the least denominator in the closed interval (Stern and Brocot).

    Example:
      >>> from fractions import Fraction
      >>> from dtrans.verification.rationals import simplest_between
      >>> simplest_between(Fraction(33, 100), Fraction(34, 100))
      Fraction(1, 3)
    """
    if low > high:
        raise ValueError(f"the interval from {low} to {high} is empty; low must not exceed high")
    if low <= 0 <= high:
        return Fraction(0)
    if high < 0:
        return -simplest_between(-high, -low)
    ceiling = math.ceil(low)
    if ceiling <= high:
        return Fraction(ceiling)
    # No integer lies between the bounds, so their integer parts are equal. The search continues
    # with the inverses of their fractional parts.
    floor = ceiling - 1
    return floor + 1 / simplest_between(1 / (high - floor), 1 / (low - floor))


@functools.lru_cache(1 << 16)
def rational_of(value: float, dtype: str) -> Fraction:
    """Return the simplest fraction that rounds to a finite float of a dtype.

    Example:
      >>> from dtrans.verification.rationals import rational_of
      >>> rational_of(0.10000000149011612, "float32")
      Fraction(1, 10)
    """
    exact = Fraction(value)
    if exact.denominator == 1 and abs(exact.numerator) < 1 << 20:
        return exact
    if exact.numerator == 1 and (exact.denominator & (exact.denominator - 1)) == 0:
        return exact  # programs compute powers of two exactly, by shifting bits
    bits = ml_dtypes.finfo(dtype).nmant
    _, exponent = math.frexp(value)
    # Slightly less than half the distance to the next float: a tie may round to the next float.
    half = Fraction(2) ** (exponent - 2 - bits) * Fraction(1023, 1024)
    return simplest_between(exact - half, exact + half)


@functools.lru_cache(1 << 16)
def element_of(value: float, dtype: str) -> int:
    """Return the finite-field element of the simplest fraction that rounds to a float.

    Each of inf, -inf and NaN has a constant element.
    """
    if not math.isfinite(value):
        return key_of(f"not finite: {value}") % P
    found = rational_of(value, dtype)
    return found.numerator * pow(found.denominator, -1, P) % P


def exact_elements(x: Array) -> Array:
    """Return the field elements of the exact values of float64 numbers; zero for inf and NaN.

    Example:
      >>> import numpy as np
      >>> from dtrans.verification.rationals import element_of, exact_elements
      >>> int(exact_elements(np.array([0.375]))[0]) == element_of(0.375, "float64")
      True
    """
    finite = np.isfinite(x)
    mantissas, exponents = np.frexp(np.where(finite, x, 0.0))
    integers = np.abs(np.ldexp(mantissas, 53)).astype(np.uint64)
    # Modulo P, 2**61 equals 1, so exponents are reduced modulo 61.
    scale = np.uint64(1) << ((exponents - 53) % 61).astype(np.uint64)
    found = multiply(integers, scale)
    return np.where(mantissas < 0, negative(found), found)


def elements_of(x: Any, dtype: Any) -> Array:
    """Return the finite-field elements of an array of integers, booleans, or floats of a dtype."""
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        if x.dtype == np.uint64:
            return np.asarray(x % np.uint64(P))
        return np.asarray(np.mod(x.astype(np.int64), P).astype(np.uint64))
    name = np.dtype(dtype).name
    if not x.ndim:
        return np.asarray(np.uint64(element_of(float(x), name)))
    # This is a fast path for initial states, which often have one number in all entries.
    if x.size and (x == x.flat[0]).all():
        return np.full(x.shape, element_of(float(x.flat[0]), name), np.uint64)
    different, places = np.unique(x.astype(np.float64), return_inverse=True)
    found = np.array([element_of(float(v), name) for v in different], np.uint64)
    return found[places].reshape(x.shape)
