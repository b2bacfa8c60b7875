"""Helpers for rules, the functions that evaluate one primitive each in a finite field.

A *rule* takes an equation and its operands, and returns the list of outputs. A float is represented
by a `Real`: an element of the field, and an approximation in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, is_reversed
from dtrans.ir.selection import values_at
from dtrans.verification import field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import Complex, NoRuleError, Real
from dtrans.verification.numpy_rules import ELEMENTWISE, OTHERS


Rule = Callable[[JaxprEqn, list[Any]], list[Any]]


def approx_of(x: Any) -> Any:
    """Return the float64 values of an array of floats; return any other array unchanged."""
    return x.approx if isinstance(x, (Real, Complex)) else x


def approx_of_all(operands: Sequence[Any]) -> list[Any]:
    """Replace each operand that is an array of floats by its float64 values."""
    return [approx_of(x) for x in operands]


def elements_in(x: Any) -> Array:
    """Return the field elements of an array; integers and booleans are converted to floats."""
    return values.as_real(x).elements


def _approx_type(eqn: JaxprEqn) -> Any:
    return jax.ShapeDtypeStruct(eqn.outvars[0].aval.shape, np.dtype(np.float64))


def by_jax(eqn: JaxprEqn, operands: Sequence[Any], **params: Any) -> list[Any]:
    """Evaluate an equation with JAX in 64 bits.

    Args:
      eqn: the equation.
      operands: float64 arrays in place of floats, and other arrays.
      **params: parameters that replace parameters of the equation.

    Raises:
      NoRuleError: JAX cannot lower the primitive on this platform.
    """
    with jax.enable_x64(True):
        bound = eqn.primitive.get_bind_params({**eqn.params, **params})
        try:
            out = eqn.primitive.bind(*operands, **bound)
        except NotImplementedError as error:
            raise NoRuleError(str(error)) from error
        outputs = out if eqn.primitive.multiple_results else [out]
        return list(map(values.as_numpy, outputs))


def compute_approx(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """Return the first output of an equation, computed in float64."""
    name, approx_values = eqn.primitive.name, approx_of_all(operands)
    with np.errstate(all="ignore"):
        if name in ELEMENTWISE:
            return ELEMENTWISE[name](*approx_values)
        if name in OTHERS:
            return OTHERS[name](eqn.params, approx_values, _approx_type(eqn))[0]
    return by_jax(eqn, approx_values)[0]


def axes_last(x: Real, axes: Sequence[int]) -> Real:
    """Merge the dimensions `axes` of an array into one, which becomes the last dimension."""
    others = [d for d in range(len(x.shape)) if d not in axes]
    shape = values_at(x.shape, others)
    merge = lambda a: a.transpose(*others, *axes).reshape(*shape, -1)
    return Real(merge(x.elements), merge(x.approx))


def apply_along_axis(fn: Callable[[Array, int], Array], x: Array, eqn: JaxprEqn) -> Array:
    """Apply a cumulative function along an axis; go backward if the equation is reversed."""
    axis = eqn.params["axis"]
    if not is_reversed(eqn):
        return fn(x, axis)
    return np.flip(fn(np.flip(x, axis), axis), axis)


def for_each_operand(reduce: Rule) -> Rule:
    """Return the rule of a reduction over dimensions, for equations with several operands.

    `jax.vmap` turns a collective over its axis, such as `psum`, into such an equation. Each operand
    is reduced separately.
    """

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        found = []
        for x in operands:
            found += reduce(eqn, [x])
        return found

    return rule
