"""Places of the numbers of the one-device state in the state of a job.

    placement = find_placement(leaf_types, traced.state_of, frozen)
    placement.where[k]    for array k of the state, the place of each number among all leaves
    place_leaves(...)     the arrays of the state with the values of leaves

The job's own conversion of a one-device state is asked for the places. Read next: `check`, which
compares states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import ClosedJaxpr
from dtrans.ir.program import Program
from dtrans.verification import field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import Complex, Real


DIGITS = 14  # digits 1 to 14 are exact in every dtype of JAX except bool


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """Step of a job, as one jaxpr.

    Attributes:
      jaxpr: takes the arrays of the state and of the batch; returns the arrays of the new state,
        and results.
      state_names: name of each array of the state.
      state_of: converts the leaves of a one-device state, by name, to the flat arrays of a state.
      init: returns the arrays of the first state from the arguments of `init`; None if that is not
        compared.
      replay: the program that the job must compute, if it is not one step of one device. Its batch
        may be larger.
      steps_per_replay: number of steps in a replay; 1 without one.
      rows: smallest number of rows of a table, which a batch may look up; 0 without tables.
      other_steps: steps of the same plan in other processes, which must compute the same.
      equal_parts: dimension of the rows, and number of parts, of some arrays of the batch. The
        comparison is valid only for equal parts: reductions within a part are then those of one
        device.
      unfollowed: reasons why a job may compute something else than the jaxpr.
    """

    jaxpr: ClosedJaxpr
    state_names: Sequence[str]
    state_of: Callable[[Mapping[str, Any]], Sequence[Any]]
    init: ClosedJaxpr | None = None
    replay: Program | None = None
    steps_per_replay: int = 1
    rows: int = 0
    other_steps: tuple[TracedStep, ...] = ()
    equal_parts: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    unfollowed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StatePlacement:
    """Places of the numbers of leaves in the state of a job.

    Attributes:
      where: the place of each number of each array in the concatenation of all leaves; -1 if it
        belongs to no leaf.
      fixed: for each array, the numbers that belong to no leaf, and zeros elsewhere.
    """

    where: Sequence[Array]
    fixed: Sequence[Any]


def find_placement(
    leaves: Mapping[str, Any],
    state_of: Callable[[Mapping[str, Any]], Sequence[Any]],
    frozen: Mapping[str, float],
) -> StatePlacement:
    """Find the place of each number in a job's state.

    The job converts leaves whose entries are their own places. Places are passed digit by digit,
    since every dtype holds a digit exactly. Each digit is passed twice, as d and as 15 - d: an
    entry that is equal in both belongs to no leaf.

    Args:
      leaves: type of each leaf by name.
      state_of: as in `TracedStep`.
      frozen: leaves that never change, with their value, which the job checks.
    """
    sizes = [math.prod(t.shape) for t in leaves.values()]
    base = 2 if any(t.dtype == bool for t in leaves.values()) else DIGITS
    offset = 0 if base == 2 else 1

    def state(power: int, inverted: bool) -> list[Any]:
        """Return the job's state for leaves with one digit of their places."""
        coded, start = {}, 0
        for (name, t), size in zip(leaves.items(), sizes, strict=True):
            digits = np.arange(start, start + size) // power % base
            start += size
            if name in frozen:
                coded[name] = jnp.asarray(np.full(t.shape, frozen[name], np.dtype(t.dtype)))
                continue
            digits = base - 1 - digits if inverted else digits
            coded[name] = _leaf((digits + offset).reshape(t.shape), t)
        return [x if values.is_key(x) else np.asarray(x) for x in state_of(coded)]

    fixed = digits = state(1, False)
    places = [np.zeros(np.shape(x), np.int64) for x in fixed]
    in_leaf = [np.zeros(np.shape(x), bool) for x in fixed]
    power = 1
    while True:
        for k, (x, y) in enumerate(zip(digits, state(power, True), strict=True)):
            if values.is_key(x):
                continue
            in_leaf[k] |= x != y
            digit = np.where(x != y, np.real(x).astype(np.float64), 0).astype(np.int64)
            places[k] += np.where(x != y, digit - offset, 0) * power
        power *= base
        if power >= sum(sizes):
            break
        digits = state(power, False)
    where = [np.where(known, place, -1) for known, place in zip(in_leaf, places, strict=True)]
    outside = lambda known, x: x if values.is_key(x) else np.where(known, np.zeros((), x.dtype), x)
    return StatePlacement(where, list(map(outside, in_leaf, fixed)))


def _leaf(digits: Array, t: Any) -> Any:
    """Return a leaf with some digits as its entries; random keys are all equal."""
    if jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), t.shape) if t.shape else jax.random.key(0)
    return jnp.asarray(digits.astype(np.dtype(t.dtype)))


def _flat_values(leaves: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Return the concatenated elements, shadows and integers of all leaves."""
    elements, shadows, integers = [], [], []
    for x in leaves.values():
        size = int(np.prod(getattr(x, "shape", ())))
        if isinstance(x, Real):
            elements.append(x.elements.ravel())
            shadows.append(x.shadow.ravel())
            integers.append(np.zeros(size, np.int64))
            continue
        elements.append(np.zeros(size, np.uint64))
        shadows.append(np.zeros(size))
        entries = np.zeros(size) if values.is_key(x) else np.asarray(x)
        integers.append(entries.astype(np.int64).ravel())
    return np.concatenate(elements), np.concatenate(shadows), np.concatenate(integers)


def place_leaves(
    placement: StatePlacement,
    leaves: Mapping[str, Any],
    types: Sequence[Any],
    state_names: Sequence[str],
) -> list[Any]:
    """Return the arrays of a job's state with the values of leaves.

    Args:
      placement: the place of each number.
      leaves: values of the leaves by name.
      types: type of each array of the state.
      state_names: name of each array of the state.
    """
    elements, shadows, integers = _flat_values({n: _part(x, "real") for n, x in leaves.items()})
    if any(isinstance(x, Complex) for x in leaves.values()):
        imaginary = _flat_values({n: _part(x, "imag") for n, x in leaves.items()})
    found: list[Any] = []
    arrays = zip(placement.where, placement.fixed, types, state_names, strict=True)
    for where, fixed, t, name in arrays:
        if values.is_key(fixed):
            found.append(_key_leaf(leaves, name, fixed))
        elif values.is_float(t.dtype):
            found.append(_filled(where, values.lifted(fixed, t.dtype), elements, shadows))
        elif values.is_complex(t.dtype):
            other = values.lifted(fixed, t.dtype)
            real_part = _filled(where, other.real, elements, shadows)
            found.append(Complex(real_part, _filled(where, other.imag, *imaginary[:2])))
        else:
            entries = np.where(where >= 0, integers[np.maximum(where, 0)], fixed)
            found.append(entries.astype(t.dtype))
    return found


def _filled(where: Array, other: Real, elements: Array, shadows: Array) -> Real:
    """Return an array with numbers of leaves, and with `other` where no leaf has a place."""
    in_leaf, at = where >= 0, np.maximum(where, 0)
    return values.choose(in_leaf, Real(elements[at], shadows[at]), other)


def _part(x: Any, part: str) -> Any:
    return getattr(x, part) if isinstance(x, Complex) else x


def _key_leaf(leaves: Mapping[str, Any], name: str, fixed: Any) -> Any:
    """Return the key of the leaf in an array of the state, replicated to its trainers."""
    found = next((x for n, x in leaves.items() if values.is_key(x) and holds_leaf(name, n)), fixed)
    return jnp.broadcast_to(found, fixed.shape)


def holds_leaf(name: str, leaf: str) -> bool:
    """Return True if an array of a job's state holds a leaf; `count@1` is a copy of `count`."""
    return name.partition("@")[0].endswith(leaf)
