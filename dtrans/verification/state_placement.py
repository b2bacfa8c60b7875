"""Places of the numbers of the one-device state in the state of a job, as the job itself tells
them.

    placement = find_placement(leaf_types, traced.state_of, still)
    placement.where[k]    for array k of the state the place of each number among those of all leaves
    place_leaves(...)     the arrays of the state that hold the values of leaves

Read next: `check`, which compares states with it.
"""

from __future__ import annotations

import dataclasses
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


DIGITS = 14  # digits 1 to 14 are exact in every dtype of JAX but bool


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The step of a whole job, as one jaxpr.

    Attributes:
      jaxpr: takes the arrays of the state and of the batch; returns those of the new state, and
        results.
      held: a name for each array of the state.
      state_of: makes the flat arrays of a state from the leaves of a one-device state, by name.
      init: makes the arrays of the first state from the arguments of `init`; None where that is not
        compared.
      replay: what the job must compute, where that is not one step of one device. Its batch may be
        larger.
      turns: how many steps one replay takes of each state; 1 where there is none.
      rows: the least number of rows of tables, which a batch may look up; 0 where there are none.
      also: other steps of the same plan, in processes of their own, which must compute the same.
      equal_parts: arrays of the batch with the dimension of their rows and a number of parts. Only
        where all parts are equal, reductions within a part are those of one device.
      unfollowed: reasons why a job may compute what the jaxpr does not.
    """

    jaxpr: ClosedJaxpr
    held: Sequence[str]
    state_of: Callable[[Mapping[str, Any]], Sequence[Any]]
    init: ClosedJaxpr | None = None
    replay: Program | None = None
    turns: int = 1
    rows: int = 0
    also: tuple[TracedStep, ...] = ()
    equal_parts: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    unfollowed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StatePlacement:
    """Places of the numbers of leaves in the state of a job.

    Attributes:
      where: for each array of the state, the place of each of its numbers among those of all
        leaves, one behind the other; -1 for a number that belongs to no leaf.
      fixed: for each array, the numbers that belong to no leaf, and zeros elsewhere.
    """

    where: Sequence[Array]
    fixed: Sequence[Any]


def find_placement(
    leaves: Mapping[str, Any],
    state_of: Callable[[Mapping[str, Any]], Sequence[Any]],
    still: Mapping[str, float],
) -> StatePlacement:
    """Ask a job where it keeps each number: its state is made of leaves whose entries count
    themselves.

    Numbers are given digit by digit, so that every dtype can hold them. Each digit is given twice,
    as d and as 15 - d. Entries that stay the same belong to no leaf.

    Args:
      leaves: name to type.
      state_of: see `TracedStep`.
      still: leaves that have one value for ever, which a job insists on.
    """
    sizes = [int(np.prod(t.shape)) for t in leaves.values()]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    base = 2 if any(t.dtype == bool for t in leaves.values()) else DIGITS
    total, power = max(int(starts[-1]), 1), 1
    found: list[Array] | None = None
    fixed: list[Any] = []
    moves: list[Array] = []
    while power < total or found is None:
        both = []
        for turned in (False, True):
            given = {}
            for (name, t), start, size in zip(leaves.items(), starts, sizes, strict=False):
                if name in still:
                    given[name] = jnp.asarray(np.full(t.shape, still[name], np.dtype(t.dtype)))
                    continue
                digit = (start + np.arange(size)) // power % base
                digit = base - 1 - digit if turned else digit
                coded = digit if base == 2 else digit + 1
                given[name] = _coded(coded.reshape(t.shape), t)
            both.append([x if values.is_key(x) else np.asarray(x) for x in state_of(given)])
        if found is None:
            found = [np.zeros(np.shape(x), np.int64) for x in both[0]]
            fixed = both[0]
            moves = [np.zeros(np.shape(x), bool) for x in both[0]]
        for k, (x, y) in enumerate(zip(*both, strict=True)):
            if values.is_key(x):
                continue
            moves[k] |= x != y
            digit = np.where(x != y, np.real(x).astype(np.float64), 0).astype(np.int64) - (
                base != 2
            )
            found[k] += np.where(x != y, digit, 0) * power
        power *= base
    assert found is not None
    where = [np.where(m, f, -1) for m, f in zip(moves, found, strict=True)]
    outside = lambda m, x: x if values.is_key(x) else np.where(m, np.zeros((), x.dtype), x)
    rest = list(map(outside, moves, fixed))
    return StatePlacement(where, rest)


def _coded(digits: Array, t: Any) -> Any:
    if jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), t.shape) if t.shape else jax.random.key(0)
    return jnp.asarray(digits.astype(np.dtype(t.dtype)))


def _flat_values(leaves: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Return elements, shadows and integers of all leaves, one behind the other."""
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
        plain = (
            np.zeros(size, np.int64) if values.is_key(x) else np.asarray(x).astype(np.int64).ravel()
        )
        integers.append(plain)
    return np.concatenate(elements), np.concatenate(shadows), np.concatenate(integers)


def place_leaves(
    placement: StatePlacement, leaves: Mapping[str, Any], types: Sequence[Any], held: Sequence[str]
) -> list[Any]:
    """Return the arrays of a job's state that hold the values of leaves."""
    elements, shadows, integers = _flat_values({n: _part(x, "real") for n, x in leaves.items()})
    if any(isinstance(x, Complex) for x in leaves.values()):
        imaginary = {n: _part(x, "imag") for n, x in leaves.items()}
        parts = [_flat_values(imaginary)[:2], (elements, shadows)]
    found = []
    for where, fixed, t, name in zip(placement.where, placement.fixed, types, held, strict=True):
        if values.is_key(fixed):
            found.append(_key_leaf(leaves, name, fixed))
        elif values.is_float(t.dtype):
            found.append(_filled(where, values.lifted(fixed, t.dtype), elements, shadows))
        elif values.is_complex(t.dtype):
            rest = values.lifted(fixed, t.dtype)
            imag, real = (
                _filled(where, x, *flat)
                for x, flat in zip((rest.imag, rest.real), parts, strict=True)
            )
            found.append(Complex(real, imag))
        else:
            found.append(
                np.where(where >= 0, integers[np.maximum(where, 0)], fixed).astype(t.dtype)
            )
    return found


def _filled(where: Array, rest: Real, elements: Array, shadows: Array) -> Real:
    """Return an array of numbers of leaves, and of the rest where none belongs."""
    there, at = where >= 0, np.maximum(where, 0)
    return Real(
        np.where(there, elements[at], rest.elements), np.where(there, shadows[at], rest.shadow)
    )


def _part(x: Any, part: str) -> Any:
    return getattr(x, part) if isinstance(x, Complex) else x


def _key_leaf(leaves: Mapping[str, Any], name: str, fixed: Any) -> Any:
    """Return the key of the leaf that an array of the state holds, for each trainer that has
    one."""
    found = next((x for n, x in leaves.items() if values.is_key(x) and holds_leaf(name, n)), fixed)
    return jnp.broadcast_to(found, fixed.shape)


def holds_leaf(held: str, leaf: str) -> bool:
    """Return True if an array of a job's state has the name of a leaf; `count@1` is a copy of
    `count`."""
    return held.partition("@")[0].endswith(leaf)
