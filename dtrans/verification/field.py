"""Arithmetic in the finite field of integers modulo the prime p = 2**61 - 1, on NumPy arrays.

Two programs that compute the same rational function agree at every point of the field. Two programs
that compute different functions agree at a random point with a probability of at most degree / p
(Schwartz, Zippel). An element is an integer below p, as `uint64`; all functions take and return
arrays of elements.

Read next: `rationals` (floats as elements), `field_values` (an element with its value in float64).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np


Array = np.ndarray[Any, Any]
Operand = Array | np.unsignedinteger[Any]

P = (1 << 61) - 1
_P = np.uint64(P)
_61, _31, _30 = np.uint64(61), np.uint64(31), np.uint64(30)
_LOW31, _LOW30, _LOW32 = np.uint64((1 << 31) - 1), np.uint64((1 << 30) - 1), np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
CHUNK = 1 << 14  # number of elements that are multiplied at once
LIMB = 21  # number of bits of a limb: three limbs represent an element
SHORT = 16  # number of bits of a limb in longer sums: float64 adds 2**19 products exactly
# Largest number of products in a sum. The sum of two limbs has 22 bits, so a product of two such
# sums has 44 bits, and float64 adds 2**9 of these products exactly.
LONGEST = 1 << 9


def _folded(x: Operand) -> Array:
    """Reduce numbers below 2**64 modulo P."""
    return _below_p((x & _P) + (x >> _61))


def _below_p(x: Operand) -> Array:
    """Reduce numbers below 2P modulo P."""
    # If x < P, the difference x - P wraps around to a number larger than x.
    reduced: Array = np.minimum(x, x - _P)
    return reduced


def add(x: Operand, y: Operand) -> Array:
    """Return x + y."""
    return _below_p(x + y)


def negative(x: Operand) -> Array:
    """Return -x."""
    return np.where(x == 0, x, _P - x)


def subtract(x: Operand, y: Operand) -> Array:
    """Return x - y."""
    wrapped = x - y
    found: Array = np.minimum(wrapped, wrapped + _P)
    return found


def multiply(x: Operand, y: Operand) -> Array:
    """Return x * y."""
    if x.size <= CHUNK or x.shape != y.shape:
        return _multiply(x, y)
    # Work in chunks, because the dozen temporaries of a chunk fit into the CPU's cache.
    found: Array = np.empty(x.size, np.uint64)
    shape, x, y = x.shape, x.reshape(-1), y.reshape(-1)
    for k in range(0, x.size, CHUNK):
        found[k : k + CHUNK] = _multiply(x[k : k + CHUNK], y[k : k + CHUNK])
    return found.reshape(shape)


def _multiply(x: Operand, y: Operand) -> Array:
    """Return x * y by halves of 31 and 30 bits, whose products fit into 64 bits."""
    x1, x0 = x >> _31, x & _LOW31
    y1, y0 = y >> _31, y & _LOW31
    middle = x1 * y0 + x0 * y1
    # Modulo P, 2**61 equals 1, and 2**62 equals 2.
    high = ((x1 * y1) << np.uint64(1)) + (middle >> _30) + ((middle & _LOW30) << _31)
    return _folded(high + x0 * y0)


def power(x: Array, n: int) -> Array:
    """Return x**n for an integer n, by squaring; a negative power of zero is zero."""
    if n < 0:
        return power(inverse(x), -n)
    found = np.ones_like(x)
    while n:
        if n & 1:
            found = multiply(found, x)
        n >>= 1
        if n:
            x = multiply(x, x)
    return found


def inverse(x: Array) -> Array:
    """Return 1 / x, and 0 for x = 0, because the finite field has no infinity."""
    flat = x.ravel()
    found = _inverses(np.where(flat == 0, np.uint64(1), flat))
    return np.where(flat == 0, np.uint64(0), found).reshape(x.shape)


def _inverses(x: Array) -> Array:
    """Invert all numbers of a vector (none is zero) with few divisions (Montgomery's trick)."""
    if x.size <= 16:  # recursion does not pay: an inverse costs as much as a dozen products
        return np.array([pow(int(v), -1, P) for v in x], np.uint64)
    half = x.size // 2
    first, second, rest = x[:half], x[half : 2 * half], x[2 * half :]
    found = _inverses(np.concatenate([multiply(first, second), rest]))
    pairs = found[:half]
    return np.concatenate([multiply(pairs, second), multiply(pairs, first), found[half:]])


def total(x: Array, axes: Sequence[int]) -> Array:
    """Return the sum over some axes."""
    axes = tuple(axes)
    # The sums of 32-bit halves overflow only after 2**32 elements.
    low = np.sum(x & _LOW32, axis=axes, dtype=np.uint64)
    high = np.sum(x >> _32, axis=axes, dtype=np.uint64)
    return add(_folded(low), multiply(_folded(high), np.uint64(1 << 32)))


def cumulative_total(x: Array, axis: int) -> Array:
    """Return the cumulative sums along an axis."""
    low = np.cumsum(x & _LOW32, axis=axis, dtype=np.uint64)
    high = np.cumsum(x >> _32, axis=axis, dtype=np.uint64)
    return add(_folded(low), multiply(_folded(high), np.uint64(1 << 32)))


def limbs(x: Array, bits: int = LIMB) -> list[Array]:
    """Split elements into limbs of `bits` bits, in float64, the lowest first."""
    mask = np.uint64((1 << bits) - 1)
    shifts = [np.uint64(k) for k in range(0, 61, bits)]
    return [((x >> s) & mask).astype(np.float64) for s in shifts]


def from_limbs(sums: Sequence[Array], bits: int = LIMB) -> Array:
    """Return the sum over k of sums[k] * 2**(bits * k).

    Args:
      sums: arrays of integers below 2**53, in float64.
      bits: number of bits of a limb.
    """
    found: Array = np.zeros(np.shape(sums[0]), np.uint64)
    for k, s in enumerate(sums):
        # 2**61 is 1 modulo P, so a product with a power of two rotates the 61 bits. The sum of
        # seven numbers of 61 bits is below 2**64.
        shift = np.uint64(bits * k % 61)
        x = np.rint(s).astype(np.uint64)
        found += ((x << shift) & _P) | (x >> (_61 - shift))
        if k % 6 == 5:
            found = _folded(found)
    return _folded(found)


def matrix_product(x: Array, y: Array) -> Array:
    """Return x @ y for stacks of matrices of finite-field elements.

    Elements have 61 bits, so float64 cannot multiply them exactly. Each element is divided into
    parts of few bits (limbs). Matrix products of limbs are exact in float64, and are combined
    afterwards.
    """
    inner = x.shape[-1]
    found: Array | None = None
    for start in range(0, max(inner, 1), LONGEST):
        end = min(start + LONGEST, inner)
        part = from_limbs(_limb_products(limbs(x[..., start:end]), limbs(y[..., start:end, :])))
        found = part if found is None else add(found, part)
    assert found is not None
    return found


def _limb_products(left: Sequence[Array], right: Sequence[Array]) -> list[Array]:
    """Return the products of limbs in a matrix product, added up by power of 2**LIMB (Karatsuba).

    A limb is a part of a finite-field element with few bits.
    """
    a, b, c = (x @ y for x, y in zip(left, right, strict=True))
    (a0, a1, a2), (b0, b1, b2) = left, right
    return [
        a,
        (a0 + a1) @ (b0 + b1) - a - b,
        (a0 + a2) @ (b0 + b2) - a - c + b,
        (a1 + a2) @ (b1 + b2) - b - c,
        c,
    ]


def add_at(size: int, where: Array, x: Array) -> Array:
    """Return a vector of `size` sums: x[k] is added to the entry where[k]."""
    assert x.size < 1 << 32, "a sum of limbs would not be exact"
    sums = [np.bincount(where, weights=limb, minlength=size) for limb in limbs(x)]
    return from_limbs(sums)


def _mixed(h: Array) -> Array:
    """Scramble 64 bits: the finalizer of splitmix64."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def key_of(name: object) -> int:
    """Return a 64-bit digest of a name."""
    return int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "little")


def hashed(name: object, *xs: Array) -> Array:
    """Return a keyed hash of each tuple of elements.

    A hash replaces a function that the field lacks, such as `exp`. Equal arguments have equal
    results; the results of different arguments are independent random elements.
    """
    h: Array = np.asarray(np.uint64(key_of(name)))
    with np.errstate(over="ignore"):
        for x in xs:
            h = _mixed((h * np.uint64(0x9E3779B97F4A7C15)) ^ x)
        # One more round: otherwise the hashes of two names would differ by a bijection only.
        return _folded(_mixed(h + np.uint64(0x632BE59BD9B4E019)))


def random_elements(generator: np.random.Generator, shape: Sequence[int]) -> Array:
    """Draw elements from the uniform distribution."""
    return generator.integers(0, P, tuple(shape), np.uint64)
