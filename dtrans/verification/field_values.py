"""Values of an evaluated program: floats as field elements with shadows, other arrays unchanged.

    Real        array of floats: elements of the field, and a float64 shadow of a real run
    Complex     array of complex numbers: a pair of those
    Unknown     value that depends on an equation without a rule, and the reason
    np.ndarray  integers and booleans, which are exact; random keys are arrays of JAX

Elements decide if two values are equal. Shadows decide everything that depends on an order:
comparisons, maxima, sorts, branches and loops. If only rounding decides, `NearTie` asks for another
point.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.verification import field
from dtrans.verification.field import Array
from dtrans.verification.rationals import elements_of, exact_elements


NEAR = 1e-9  # largest relative distance between two shadows that rounding may explain


class UnfollowedError(Exception):
    """Equation without a rule in the field; the report lists it, with the reason."""


class NearTie(Exception):
    """Decision between two values that differ by no more than rounding."""


_by_elements = contextvars.ContextVar("_by_elements", default=False)


@contextlib.contextmanager
def ties_by_elements() -> Iterator[None]:
    """Decide near ties by the order of elements: arbitrary, but the same in two equal programs.

    Some optimizers have ties at every point: the root of a mean of squares of signs, and the bound
    1. A difference found in this way may come from such a decision, so it proves nothing.
    """
    token = _by_elements.set(True)
    try:
        yield
    finally:
        _by_elements.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class Real:
    """Array of floats.

    Invariant: where the shadow is an infinity or NaN, the element is the fixed one for that.

    Attributes:
      elements: elements of the field, uint64.
      shadow: float64 array of the same shape.
    """

    elements: Array
    shadow: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.shadow.shape


@dataclasses.dataclass(frozen=True, eq=False)
class Complex:
    """Array of complex numbers: elements of GF(p**2), since -1 has no square root modulo p.

    Attributes:
      real, imag: the parts, of one shape.
    """

    real: Real
    imag: Real

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.real.shape

    @property
    def shadow(self) -> Array:
        """The shadows of both parts, as complex numbers."""
        both: Array = self.real.shadow.astype(np.complex128)
        both.imag = self.imag.shadow
        return both


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """Value that depends on an equation without a rule.

    Attributes:
      why: the primitive without a rule, with the user's line.
    """

    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas(Unknown):
    """Ranks' copies of one value that differ but must agree.

    Attributes:
      copies: the copy of each rank.
      axes: axes of the mesh by name, with their sizes; ranks are in row-major order.
    """

    copies: tuple[Any, ...] = ()
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def real(elements: Array, shadow: Any) -> Real:
    """Return a `Real`, with the fixed elements of infinities and NaN where the shadow has them."""
    shadow = np.asarray(shadow, np.float64)
    finite = np.isfinite(shadow)
    if not finite.all():
        elements = np.where(finite, elements, _not_finite(shadow))
    return Real(elements, shadow)


def _not_finite(shadow: Array) -> Array:
    plus, minus, nan = (elements_of(x, np.float64) for x in (np.inf, -np.inf, np.nan))
    return np.where(np.isnan(shadow), nan, np.where(shadow > 0, plus, minus))


def lifted(x: Any, dtype: Any) -> Any:
    """Return an array of a program as a value: a `Real` or `Complex` for floats."""
    if not hasattr(x, "dtype"):
        x = np.asarray(x, dtype)
    if is_complex(dtype):
        x = np.asarray(x)
        part = np.float32 if np.dtype(dtype) == np.complex64 else np.float64
        return Complex(lifted(x.real, part), lifted(x.imag, part))
    if not is_float(dtype):
        return x if is_key(x) else np.asarray(x)
    shadow = np.asarray(x).astype(np.float64)
    return Real(elements_of(np.asarray(x), dtype), shadow)


def exact(x: Array, dtype: Any) -> Any:
    """Return an array as a value with exact floats: they stand for no simpler rational."""
    if not is_float(dtype):
        return x
    shadow = x.astype(np.float64)
    return real(exact_elements(shadow), shadow)


def from_integers(x: Array) -> Real:
    """Return integers or booleans as floats."""
    return Real(elements_of(x, np.int64), np.asarray(x).astype(np.float64))


@functools.lru_cache(256)
def is_float(dtype: Any) -> bool:
    """Return True for the dtypes of floats, narrow ones included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.lru_cache(256)
def is_complex(dtype: Any) -> bool:
    """Return True for the dtypes of complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def is_key(x: Any) -> bool:
    """Return True for an array of random keys."""
    return not isinstance(x, (np.ndarray, Real, Complex)) and _is_key_type(
        getattr(x, "dtype", np.dtype(int))
    )


@functools.lru_cache(256)
def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def same(x: Any, y: Any) -> bool:
    """Return True if two values are equal: floats as elements, all other arrays bit for bit."""
    if isinstance(x, Real) and isinstance(y, Real):
        return x.shape == y.shape and bool(np.array_equal(x.elements, y.elements))
    if isinstance(x, Complex) and isinstance(y, Complex):
        return same(x.real, y.real) and same(x.imag, y.imag)
    if is_key(x) and is_key(y):
        words = [np.asarray(jax.random.key_data(key)) for key in (x, y)]
        return same(*words)
    if is_key(x) or is_key(y):
        return False
    if isinstance(x, (Real, Complex, Unknown)) or isinstance(y, (Real, Complex, Unknown)):
        return False
    return x.shape == y.shape and bool(np.array_equal(x, y))


def ordered(x: Real, y: Real) -> tuple[Array, Array]:
    """Return the mask of equal entries, and the mask of entries with a smaller x.

    Raises:
      NearTie: elements differ and shadows do not; not within `ties_by_elements`.
    """
    equal = (x.elements == y.elements) & ~np.isnan(x.shadow) & ~np.isnan(y.shadow)
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.abs(x.shadow), np.abs(y.shadow))
        close = np.isfinite(scale) & (np.abs(x.shadow - y.shadow) <= NEAR * scale)
        less = (x.shadow < y.shadow) & ~equal
    near = close & ~equal
    if np.any(near):
        if not _by_elements.get():
            raise NearTie
        less = np.where(near, x.elements < y.elements, less)
    return equal, less


def take(x: Real, where: Any) -> Real:
    """Return a part of an array, by an index of NumPy."""
    return Real(np.asarray(x.elements[where]), np.asarray(x.shadow[where]))


def choose(condition: Array, x: Real, y: Real) -> Real:
    """Return x where the condition holds, else y."""
    return Real(
        np.where(condition, x.elements, y.elements), np.where(condition, x.shadow, y.shadow)
    )


def hashed(name: object, *xs: Any, shadow: Any) -> Real:
    """Return the values of a function that the field lacks: a keyed hash of its arguments.

    Args:
      name: name of the function.
      xs: its arguments.
      shadow: its values in floats.
    """
    arguments = [x.elements if isinstance(x, Real) else elements_of(x, np.int64) for x in xs]
    return real(np.broadcast_to(field.hashed(name, *arguments), np.shape(shadow)), shadow)
