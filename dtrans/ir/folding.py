"""Constant folding: find values that have one number in all entries, or that equal an input.

`fold` is the rule for one equation. It takes and returns facts about values. A fact is a 0-d NumPy
array (the number in all entries of the value), or an `Alias` (the input that the value equals). Any
other fact means that the value is unknown. The caller passes two functions: `is_factor` allows the
folding of 0 * x to 0, and `number_of` computes numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, Var, facts_of, moved_operands, same_operand, zeros_by


@dataclasses.dataclass(frozen=True)
class Alias:
    """Result of constant folding for a value that equals an input, the variable `var`."""

    var: Var


Number = np.ndarray[Any, Any]


def is_number(fact: Any, *numbers: float) -> bool:
    """Return True if a value is known to be one number in all entries.

    Args:
      fact: the number (a 0-d array), an `Alias`, or another object for an unknown value.
      numbers: if given, the number must also equal one of these.
    """
    return isinstance(fact, np.ndarray) and (not numbers or any(bool(fact == x) for x in numbers))


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two values are known to equal the same number, or the same input."""
    if is_number(one) and is_number(other):
        return bool(one == other)
    return isinstance(one, Alias) and one == other


def fold(
    eqn: JaxprEqn,
    out: int,
    ins: Sequence[Any],
    is_factor: Callable[[int], bool],
    number_of: Callable[[JaxprEqn, Sequence[Number]], Any],
) -> Number | Alias | None:
    """Return the number that all entries of an output have, or the input that the output equals.

    Args:
      eqn: the equation.
      out: index of the output.
      ins: for each operand its number, an `Alias` of an input, or another object if unknown.
      is_factor: takes the index of an operand x. It returns True if 0 * x and 0 / x may be folded
        to 0, which is wrong for an infinite or NaN x.
      number_of: computes an elementwise equation on numbers; returns None if it cannot.

    Returns:
      A 0-d array, an `Alias`, or None if neither is known.
    """
    name, aval = eqn.primitive.name, eqn.outvars[out].aval
    moved = moved_operands(eqn, out)
    if name == "select_n":
        if is_number(ins[0]):
            moved = (1 + int(ins[0]),)
        if all(are_equal(ins[i], ins[moved[0]]) for i in moved):
            return _known(ins[moved[0]])
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == aval.dtype:
        return _known(ins[0])
    if moved:
        if is_number(ins[moved[0]]) and all(are_equal(ins[i], ins[moved[0]]) for i in moved):
            return ins[moved[0]].astype(aval.dtype)
        same = same_operand(eqn, out)
        if same is None:
            return None
        return _known(ins[same])

    zeros = [i for i, x in enumerate(ins) if is_number(x, 0)]
    factors = zeros_by(eqn, zeros)
    if factors is not None and all(map(is_factor, factors)):
        return np.zeros((), aval.dtype)
    if not facts_of(eqn).elementwise or eqn.effects:
        return None
    if all(map(is_number, ins)):
        number = number_of(eqn, ins)
        if number is None:
            return None
        return np.asarray(number, aval.dtype)

    absorbing = None
    if aval.dtype == bool:
        absorbing = {"and": False, "or": True}.get(name)
    if absorbing is not None and any(is_number(x, absorbing) for x in ins):
        return np.asarray(absorbing)
    neutral = {"add": 0, "add_any": 0, "sub": 0, "mul": 1}.get(name)
    for i in (1,) if name == "sub" else (1, 0):
        if (
            neutral is not None
            and is_number(ins[i], neutral)
            and eqn.invars[1 - i].aval.shape == aval.shape
        ):
            return _known(ins[1 - i])
    return None


def _known(fact: Any) -> Number | Alias | None:
    return fact if isinstance(fact, (np.ndarray, Alias)) else None


# -- numbers ---------------------------------------------------------------------------------------

# IEEE 754 defines these results exactly (except rsqrt), so NumPy and every device agree.
_IN_NUMPY: Mapping[str, Callable[..., Any]] = {
    **{
        "add": np.add,
        "add_any": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "neg": np.negative,
    },
    **{"max": np.maximum, "min": np.minimum, "abs": np.abs, "sign": np.sign},
    **{"square": np.square, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)},
    **{"gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal},
    **{"eq": np.equal, "ne": np.not_equal},
}


def number_by_numpy(eqn: JaxprEqn, numbers: Sequence[Number]) -> Any:
    """Compute an equation with NumPy; return None for a primitive that is not in `_IN_NUMPY`.

    JAX would initialize its devices here, which the roles of a job must not do while they plan.
    """
    compute = _IN_NUMPY.get(eqn.primitive.name)
    if compute is None:
        return None
    with np.errstate(all="ignore"):
        return compute(*numbers)


def number_by_jax(eqn: JaxprEqn, numbers: Sequence[Number]) -> Any:
    """Compute an equation with JAX, on the default device."""
    with jax.ensure_compile_time_eval():
        outputs = eqn.primitive.bind(*map(jnp.asarray, numbers), **eqn.params)
    if eqn.primitive.multiple_results:
        return outputs[0]
    return outputs
