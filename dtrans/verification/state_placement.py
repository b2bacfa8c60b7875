"""Search for the position of each number of a job's state in the state of one device.

A job may split, pack, pad or permute the arrays of the one-device state (its *leaves*). A
comparison of the two states needs the position of each number.

    placement = find_placement(leaf_types, traced.state_of, frozen)
    placement.where[k]    position of each number of the job's array k in the concatenation of all
                          leaves
    place_leaves(...)     the job's state for given leaves

To find the positions, the module builds a one-device state in which each number equals its own
position. It then converts this state to the job's state.

Read next: `check`, which compares states.
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


DIGITS = 14  # number base of positions: every dtype of JAX except bool represents 1 to 14 exactly


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """Step of a job, traced to one jaxpr, which a verification compares with the one-device step.

    Attributes:
      jaxpr: function of the state's arrays and the batch's arrays. It returns the new state's
        arrays, then results.
      state_names: name of each array of the state.
      state_of: function that converts a one-device state (leaves by name) to the state's arrays.
      init: function of init's arguments that returns the arrays of the first state; None if the
        first state is not compared.
      replay: one-device program that the job must compute in place of one ordinary step, such as
        several local steps in a row. Its batch may contain the batches of these steps. None if the
        job must compute one step.
      steps_per_replay: number of steps in a replay; 1 if there is no replay.
      rows: number of rows of the smallest embedding table, an upper bound of row ids; 0 without
        tables.
      other_steps: further traces of the same step, which must also equal the one-device step. An
        example is a step in which servers update table rows late.
      equal_parts: for some batch arrays, a pair: the dimension of the rows, and a number of parts.
        The comparison then uses batches in which all parts are equal. A mean over one part then
        equals the mean over the full batch.
      unevaluated: operations of the job that the jaxpr leaves out, such as compression, as text.
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
    unevaluated: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StatePlacement:
    """Position of each number of a job's state in the one-device state.

    The arrays of the one-device state are its *leaves*.

    Attributes:
      where: for each array of the state, the positions of its numbers in the concatenation of all
        leaves; -1 for numbers that belong to no leaf.
      fixed: for each array of the state, the numbers that belong to no leaf; all other numbers are
        zeros here.
    """

    where: Sequence[Array]
    fixed: Sequence[Any]


def find_placement(
    leaves: Mapping[str, Any],
    state_of: Callable[[Mapping[str, Any]], Sequence[Any]],
    frozen: Mapping[str, float],
) -> StatePlacement:
    """Find, for each number in a job's state, its position in the concatenation of all leaves.

    The function converts leaves with positions as entries to a job's state. This is done digit by
    digit, because every dtype represents a digit exactly. Each digit d is converted twice, as d and
    as 15 - d. Numbers that are equal in both results belong to no leaf.

    Args:
      leaves: type of each leaf, by name.
      state_of: as in `TracedStep`.
      frozen: the number in all entries of each leaf that never changes, by name. The conversion
        checks this number.
    """
    sizes = [math.prod(t.shape) for t in leaves.values()]
    base = 2 if any(t.dtype == bool for t in leaves.values()) else DIGITS
    offset = 0 if base == 2 else 1

    def state(power: int, inverted: bool) -> list[Any]:
        """Return the job's state for leaves that contain one digit of each entry's position."""
        coded, start = {}, 0
        for (name, t), size in zip(leaves.items(), sizes, strict=True):
            digits = np.arange(start, start + size) // power % base
            start += size
            if name in frozen:
                coded[name] = jnp.asarray(np.full(t.shape, frozen[name], np.dtype(t.dtype)))
                continue
            if inverted:
                digits = base - 1 - digits
            coded[name] = _leaf((digits + offset).reshape(t.shape), t)
        return list(map(values.as_numpy, state_of(coded)))

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
    where: list[Array] = []
    outside: list[Any] = []
    for known, place, x in zip(in_leaf, places, fixed, strict=True):
        where.append(np.where(known, place, -1))
        outside.append(x if values.is_key(x) else np.where(known, np.zeros((), x.dtype), x))
    return StatePlacement(where, outside)


def _leaf(digits: Array, t: Any) -> Any:
    """Return an array of the one-device state with the digits of positions as its entries.

    An array of random keys gets arbitrary keys.
    """
    if not jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return jnp.asarray(digits.astype(np.dtype(t.dtype)))
    key = jax.random.key(0)
    return jax.random.split(key, t.shape) if t.shape else key


def _flat_values(leaves: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Concatenate all leaves three times: finite-field elements, float64 values, and integers.

    Each array has a place for every number of every leaf. Where a leaf has another type, the array
    has zeros.
    """
    elements, approx_values, integers = [], [], []
    for x in leaves.values():
        size = int(np.prod(getattr(x, "shape", ())))
        if isinstance(x, Real):
            elements.append(x.elements.ravel())
            approx_values.append(x.approx.ravel())
            integers.append(np.zeros(size, np.int64))
            continue
        elements.append(np.zeros(size, np.uint64))
        approx_values.append(np.zeros(size))
        entries = np.zeros(size) if values.is_key(x) else np.asarray(x)
        integers.append(entries.astype(np.int64).ravel())
    return np.concatenate(elements), np.concatenate(approx_values), np.concatenate(integers)


def place_leaves(
    placement: StatePlacement,
    leaves: Mapping[str, Any],
    types: Sequence[Any],
    state_names: Sequence[str],
) -> list[Any]:
    """Return the arrays of a job's state that contain the given leaves.

    Args:
      placement: position of each number.
      leaves: value of each leaf, by name.
      types: type of each array of the state.
      state_names: name of each array of the state.
    """
    elements, approx_values, integers = _flat_values(_parts(leaves, "real"))
    if any(isinstance(x, Complex) for x in leaves.values()):
        imaginary = _flat_values(_parts(leaves, "imag"))
    found: list[Any] = []
    arrays = zip(placement.where, placement.fixed, types, state_names, strict=True)
    for where, fixed, t, name in arrays:
        if values.is_key(fixed):
            found.append(_key_leaf(leaves, name, fixed))
        elif values.is_float(t.dtype):
            found.append(_filled(where, values.lifted(fixed, t.dtype), elements, approx_values))
        elif values.is_complex(t.dtype):
            other = values.lifted(fixed, t.dtype)
            real_part = _filled(where, other.real, elements, approx_values)
            found.append(Complex(real_part, _filled(where, other.imag, *imaginary[:2])))
        else:
            entries = np.where(where >= 0, integers[np.maximum(where, 0)], fixed)
            found.append(entries.astype(t.dtype))
    return found


def _filled(where: Array, other: Real, elements: Array, approx_values: Array) -> Real:
    """Return an array of a job's state from the numbers of all leaves (one-device arrays).

    At places with `where` equal to -1, the array has the numbers of `other`.
    """
    in_leaf, at = where >= 0, np.maximum(where, 0)
    return values.choose(in_leaf, Real(elements[at], approx_values[at]), other)


def _parts(leaves: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the part "real" or "imag" of each complex leaf, and other leaves unchanged."""
    found = {}
    for name, x in leaves.items():
        found[name] = getattr(x, part) if isinstance(x, Complex) else x
    return found


def _key_leaf(leaves: Mapping[str, Any], name: str, fixed: Any) -> Any:
    """Return an array of the state that contains random keys.

    Args:
      leaves: value of each leaf, by name.
      name: name of the array.
      fixed: keys of the same shape, which are returned if the array contains no leaf.
    """
    for leaf, x in leaves.items():
        if values.is_key(x) and holds_leaf(name, leaf):
            return jnp.broadcast_to(x, fixed.shape)
    return fixed


def holds_leaf(name: str, leaf: str) -> bool:
    """Return True if an array of a job's state contains a leaf; `count@1` is a copy of `count`."""
    return name.partition("@")[0].endswith(leaf)
