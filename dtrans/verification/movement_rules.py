"""Rules that evaluate equations that move, select or convert floats, in a finite field.

A float is represented by a `Real`: an element of the field (an integer modulo 2**61 - 1), and an
approximation in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.errors import BatchError
from dtrans.verification import field_values as values
from dtrans.verification.field_values import NearTie, NoRuleError, Real
from dtrans.verification.numpy_rules import OTHERS, gather_places
from dtrans.verification.rationals import elements_of
from dtrans.verification.rule_values import Rule, approx_of, by_jax, elements_in


ZERO = Real(np.zeros(1, np.uint64), np.zeros(1))


def _structure(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation that only moves or repeats numbers, such as a transpose.

    The rule in `numpy_rules` is applied twice: to finite-field elements, and to float64 values.
    """
    rule, out = OTHERS[eqn.primitive.name], eqn.outvars[0].aval
    elements = rule(eqn.params, _parts(operands, "elements"), out)
    approx_values = rule(eqn.params, _parts(operands, "approx"), out)
    outs = []
    for part, approx in zip(elements, approx_values, strict=True):
        outs.append(Real(np.asarray(part), np.asarray(approx)))
    return outs


def _parts(operands: Sequence[Any], name: str) -> list[Any]:
    """Return the attribute `name` of floats, and other operands unchanged."""
    return [getattr(x, name) if isinstance(x, Real) else x for x in operands]


def _by_index(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation that only moves entries: move their indices, then look them up."""
    x, *rest = operands
    if eqn.primitive.name == "gather":
        p = eqn.params
        found = gather_places(x.shape, rest[0], p["dimension_numbers"], p["slice_sizes"], p["mode"])
    else:
        places = np.arange(x.approx.size, dtype=np.int64).reshape(x.shape)
        (found,) = by_jax(eqn, [places, *rest])
    # Index -1 selects the fill value, which `append_number` appends.
    return [values.take(append_number(x, _fill_of(eqn, rest)), found)]


def append_number(x: Real, last: Real) -> Real:
    """Return a flat array with one more number at its end, such as a fill value."""
    elements = np.append(x.elements.ravel(), last.elements)
    return Real(elements, np.append(x.approx.ravel(), last.approx))


def move_rows(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate `move_rows` (`dtrans.ops.moved_rows`), which sends table rows to other ranks by id.

    The equation's function `fn` is applied to indices of entries. Index 0 stands for the number
    zero.

    Raises:
      NoRuleError: a row id does not exist, or the rows are integers.
    """
    numbers, rows = operands[: eqn.params["count"]], operands[eqn.params["count"] :]
    if not all(isinstance(x, Real) for x in rows):
        raise NoRuleError("the looked-up rows are integers")
    places = []
    elements, approx_values = [ZERO.elements], [ZERO.approx]
    end = 1
    for x in rows:
        start, end = end, end + x.approx.size
        places.append(np.arange(start, end).reshape(x.shape))
        elements.append(x.elements.ravel())
        approx_values.append(x.approx.ravel())
    flat = Real(np.concatenate(elements), np.concatenate(approx_values))
    try:
        found = eqn.params["fn"](numbers, places)
    except BatchError as error:
        raise NoRuleError(str(error)) from error
    outs: list[Any] = []
    for x, v in zip(found, eqn.outvars, strict=True):
        outs.append(values.take(flat, x) if values.is_float(v.aval.dtype) else np.asarray(x))
    return outs


def _fill_of(eqn: JaxprEqn, rest: Sequence[Any]) -> Real:
    """Return the number that fills entries without a source: padding, or a gather's fill value."""
    padding = next((r for r in rest if isinstance(r, Real)), None)
    if padding is not None:
        return padding
    fill = eqn.params.get("fill_value")
    number = np.nan if fill is None else float(fill)
    return values.lifted(np.asarray(number), np.float64)


def _select(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    which, *cases = operands
    which = np.broadcast_to(np.asarray(which).astype(int), cases[0].shape)
    elements = np.choose(which, [*map(elements_in, cases)])
    return [Real(elements, np.choose(which, [*map(approx_of, cases)]))]


def _convert(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), wanted = operands, np.dtype(eqn.outvars[0].aval.dtype)
    if values.is_float(wanted):
        return [values.as_real(x)]
    if wanted.kind == "b":
        return [x.approx != 0]
    return [np.trunc(settle_integers(x).approx).astype(wanted)]


def settle_integers(x: Real) -> Real:
    """Replace the float64 value of each entry that is an integer in the field by this integer.

    Raises:
      NearTie: a float64 value is near an integer, but the field element is another number. Then
        rounding would decide the result of a cast to integers.
    """
    nearest = np.rint(x.approx)
    with np.errstate(invalid="ignore"):
        close = np.abs(x.approx - nearest) <= values.NEAR * np.maximum(np.abs(nearest), 1)
    small = np.isfinite(x.approx) & (np.abs(x.approx) < 2.0**62)
    integers = np.where(small, nearest, 0).astype(np.int64)
    is_integer = close & (x.elements == elements_of(integers, np.int64))
    if np.any(close & small & ~is_integer):
        raise NearTie
    return Real(x.elements, np.where(is_integer, nearest, x.approx))


def _bitcast(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), out = operands, eqn.outvars[0].aval
    if isinstance(x, Real):
        raise NoRuleError("the equation reads the bits of a float")
    same_width = x.dtype != bool and x.dtype.itemsize == np.dtype(out.dtype).itemsize
    if same_width:
        found = x.view(np.dtype(out.dtype))
    else:
        (found,) = by_jax(eqn, [x])
    # `values.lifted` would search for simple fractions, which takes too long for millions of
    # numbers.
    return [values.exact(found, out.dtype)]


def _copy(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    return list(operands)


# Primitives that change where an array is, or along which mesh axes it varies, but no value.
PLACES = ("sharding_constraint", "reshard", "mesh_cast", "device_put", "pvary")

MOVED_BY_NUMPY = (
    "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "pad", "reshape",
    "rev", "slice", "split", "squeeze", "stack", "transpose", "unstack",
)  # fmt: skip
_COPIED = (
    *PLACES, "copy", "copy_p", "gradient", "name", "optimization_barrier", "reduce_precision",
    "stop_gradient",
)  # fmt: skip
MOVEMENT: Mapping[str, Rule] = {
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    **dict.fromkeys(_COPIED, _copy),
    **dict.fromkeys(MOVED_BY_NUMPY, _structure),
    **dict.fromkeys(("gather", "expand_dims", "tile"), _by_index),
}

# Primitives that only move elements.
MOVES = frozenset(name for name, rule in MOVEMENT.items() if rule in (_structure, _by_index))
