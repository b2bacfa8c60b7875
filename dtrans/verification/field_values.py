"""Values in an evaluation: a float is represented by a field element and by a float64 value.

    Real        array of floats: elements of the finite field, and their approximations in float64
    Complex     array of complex numbers: two `Real` parts
    Unknown     value that depends on an equation without a rule
    np.ndarray  integers and booleans, which are exact
    jax.Array   random keys

Elements decide if two values are equal. Float64 values decide comparisons, maxima, sorts, branches
and loops, because the field has no order. If two float64 values differ by no more than rounding,
`NearTie` is raised, and the verification draws another random point.
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


NEAR = 1e-9  # a smaller relative difference of two float64 values may be rounding alone


class NoRuleError(Exception):
    """Error for an equation that cannot be evaluated in a finite field.

    The report of `plan.verify()` shows the message, and omits outputs that depend on the equation.
    """


class NearTie(Exception):
    """Error for a comparison of two values that differ by no more than rounding.

    The finite field has no order, so float64 values decide comparisons. If these are too close, the
    verification draws another random input.
    """


_by_elements = contextvars.ContextVar("_by_elements", default=False)


@contextlib.contextmanager
def ties_by_elements() -> Iterator[None]:
    """Decide near ties by finite-field elements within this context, instead of raising `NearTie`.

    A near tie is a comparison of two floats that differ only by rounding. Elements have an
    arbitrary order, but the same order in two equal programs. Some optimizers have a tie for every
    input: they compare the root mean square of signs with the bound 1. If two programs differ
    within this context, this proves nothing, since a tie may be the reason.
    """
    token = _by_elements.set(True)
    try:
        yield
    finally:
        _by_elements.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class Real:
    """Array of floats: a finite-field element for each entry, and the entry's value in float64.

    Invariant: each of inf, -inf and NaN is represented by one fixed element.

    Attributes:
      elements: field element of each entry, uint64.
      approx: float64 value of each entry.
    """

    elements: Array
    approx: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.approx.shape


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
    def approx(self) -> Array:
        """The float64 values of both parts, as one array of complex numbers."""
        both: Array = self.real.approx.astype(np.complex128)
        both.imag = self.imag.approx
        return both


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """Placeholder for a value that depends on an equation that cannot be evaluated.

    Attributes:
      why: name of this equation's primitive, with the user's line.
    """

    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas(Unknown):
    """Copies of an output on all ranks, which should be equal but differ.

    Attributes:
      copies: the copy of each rank.
      axes: size of each mesh axis, by name; ranks are in row-major order.
    """

    copies: tuple[Any, ...] = ()
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def real(elements: Array, approx: Any) -> Real:
    """Return a `Real`. Where `approx` is inf, -inf or NaN, the element becomes a fixed number.

    Args:
      elements: finite-field element of each entry; unchanged where `approx` is finite.
      approx: float64 value of each entry.
    """
    approx = np.asarray(approx, np.float64)
    finite = np.isfinite(approx)
    if not finite.all():
        elements = np.where(finite, elements, _not_finite(approx))
    return Real(elements, approx)


def _not_finite(approx: Array) -> Array:
    infinite = np.where(
        approx > 0, elements_of(np.inf, np.float64), elements_of(-np.inf, np.float64)
    )
    return np.where(np.isnan(approx), elements_of(np.nan, np.float64), infinite)


def lifted(x: Any, dtype: Any) -> Any:
    """Convert an array to the form in which an evaluation represents its values.

    Floats become `Real`, and complex numbers become `Complex`. Other arrays are unchanged.
    """
    if not hasattr(x, "dtype"):
        x = np.asarray(x, dtype)
    if is_complex(dtype):
        x = np.asarray(x)
        part = np.float32 if np.dtype(dtype) == np.complex64 else np.float64
        return Complex(lifted(x.real, part), lifted(x.imag, part))
    if not is_float(dtype):
        return as_numpy(x)
    approx = np.asarray(x).astype(np.float64)
    return Real(elements_of(np.asarray(x), dtype), approx)


def exact(x: Array, dtype: Any) -> Any:
    """Convert an array to field values, with the exact binary value of each float.

    The function `lifted` uses the simplest rational number that rounds to the float instead.
    """
    if not is_float(dtype):
        return x
    approx = x.astype(np.float64)
    return real(exact_elements(approx), approx)


def from_integers(x: Array) -> Real:
    """Convert integers or booleans to floats."""
    return Real(elements_of(x, np.int64), np.asarray(x).astype(np.float64))


def as_real(x: Any) -> Real:
    """Convert integers or booleans to floats; floats are unchanged."""
    return x if isinstance(x, Real) else from_integers(x)


def as_numpy(x: Any) -> Any:
    """Convert an array of JAX to NumPy; random keys, which NumPy lacks, are unchanged."""
    return x if is_key(x) else np.asarray(x)


@functools.lru_cache(256)
def is_float(dtype: Any) -> bool:
    """Return True for floating-point dtypes, including bfloat16 and float8."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.lru_cache(256)
def is_complex(dtype: Any) -> bool:
    """Return True for the dtypes of complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def is_key(x: Any) -> bool:
    """Return True for an array of random keys."""
    if isinstance(x, (np.ndarray, Real, Complex)):
        return False
    return _is_key_type(getattr(x, "dtype", np.dtype(int)))


@functools.lru_cache(256)
def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def same(x: Any, y: Any) -> bool:
    """Return True if two values are equal: floats by elements, other arrays bit for bit."""
    if isinstance(x, Real) and isinstance(y, Real):
        return x.shape == y.shape and bool(np.array_equal(x.elements, y.elements))
    if isinstance(x, Complex) and isinstance(y, Complex):
        return same(x.real, y.real) and same(x.imag, y.imag)
    if is_key(x) and is_key(y):
        return same(np.asarray(jax.random.key_data(x)), np.asarray(jax.random.key_data(y)))
    if is_key(x) or is_key(y):
        return False
    if isinstance(x, (Real, Complex, Unknown)) or isinstance(y, (Real, Complex, Unknown)):
        return False
    return x.shape == y.shape and bool(np.array_equal(x, y))


def ordered(x: Real, y: Real) -> tuple[Array, Array]:
    """Compare two arrays of floats; return two masks: entries with x == y, and with x < y.

    Raises:
      NearTie: two elements differ, but their float64 values are nearly equal. Within
        `ties_by_elements`, the elements decide instead.
    """
    equal = (x.elements == y.elements) & ~np.isnan(x.approx) & ~np.isnan(y.approx)
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.abs(x.approx), np.abs(y.approx))
        close = np.isfinite(scale) & (np.abs(x.approx - y.approx) <= NEAR * scale)
        less = (x.approx < y.approx) & ~equal
    near = close & ~equal
    if np.any(near):
        if not _by_elements.get():
            raise NearTie
        less = np.where(near, x.elements < y.elements, less)
    return equal, less


def take(x: Real, where: Any) -> Real:
    """Return `x[where]`, for any index of NumPy."""
    return Real(np.asarray(x.elements[where]), np.asarray(x.approx[where]))


def choose(condition: Array, x: Real, y: Real) -> Real:
    """Return x where the condition holds, else y."""
    elements = np.where(condition, x.elements, y.elements)
    return Real(elements, np.where(condition, x.approx, y.approx))


def hashed(name: object, *xs: Any, approx: Any) -> Real:
    """Represent the result of a function that the finite field lacks, such as exp, by a hash.

    Equal arguments give equal hashes, so equal programs still have equal values.

    Args:
      name: name of the function.
      xs: arguments of the function.
      approx: values of the function in float64.
    """
    arguments = [as_real(x).elements for x in xs]
    return real(np.broadcast_to(field.hashed(name, *arguments), np.shape(approx)), approx)
