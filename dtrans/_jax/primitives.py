"""Properties of JAX's primitives, such as "elementwise" or "linear": one record for each primitive.

All analyses and writers of programs read these records. A property (*fact*) holds for all equations
with the primitive, unless its field has a condition. `tests/test_jax_primitives.py` checks each
fact on numbers, and finds primitives without a record. If a primitive has no record, dtrans assumes
that its outputs depend on all entries of the operands, and warns
(`dtrans.errors.UnknownPrimitiveWarning`).

Some properties need code, not a record. This code is in the modules that use it, such as
`dtrans.rows.rules`. Accessors of the parameters of loops, branches and calls are in
`dtrans._jax.equation_params`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from dtrans._jax.imports import JaxprEqn
from dtrans._jax.origins import line_of
from dtrans._jax.own import DTRANS_PRIMITIVES, IDENTITIES
from dtrans.errors import UnknownPrimitiveWarning


SCAN, WHILE, COND = "scan", "while", "cond"
LOOPS = (SCAN, WHILE)
REMAT = ("remat2", "remat", "checkpoint")  # names of `jax.checkpoint` in different versions of JAX
LINEAR_SOLVE = "custom_linear_solve"
# from jax 0.11, the last name replaces the two names before it
CALLS = (
    "closed_call",
    "core_call",
    "eval_jaxpr",
)
CUSTOM_JVP, CUSTOM_VJP = CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
JIT = ("jit", "pjit")


# -- facts -----------------------------------------------------------------------------------------

Operands = tuple[Any, ...]  # indices of operands; a final ellipsis includes all following operands
Condition = Callable[[JaxprEqn], bool]


def _always(eqn: JaxprEqn) -> bool:
    return True


def _never(eqn: JaxprEqn) -> bool:
    return False


def _no_axes(eqn: JaxprEqn) -> int:
    return 0


def _two_axes(eqn: JaxprEqn) -> int:
    return 2


@dataclasses.dataclass(frozen=True)
class PrimitiveFacts:
    """Facts about one primitive; with the default of a field, dtrans assumes nothing.

    Operands that a field does not name are *fixed*: the field's statement holds while the values of
    these operands are constant.

    Attributes:
      elementwise: an entry of an output depends only on the operands' entries at the same index.
        Operands have the shape of the outputs, or are scalars.
      moves: operands that the primitive only moves. Each entry of an output is a copy of an entry
        of one such operand, selected by fixed operands and parameters. If there are as many outputs
        as such operands, output i only has entries of the i-th.
      moves_if: returns True for an equation if `moves` holds for it.
      keeps_order: returns True if the output has all entries of the operand, in row-major order.
        Examples are a reshape, and a broadcast along new dimensions. If operand and output have the
        same shape, they are equal.
      linear_in: groups of operands. Outputs are jointly linear in the operands of a group, if the
        other operands are fixed: f(a*x + b*y) = a*f(x) + b*f(y) for real a and b, up to rounding.
      linear_if: returns True for an equation if `linear_in` holds for it.
      scales_in: operands with f(c*x) = c*f(x) for every real c > 0 that multiplies all of them.
        Groups of `linear_in` also have this property, and are not listed again.
      scales_if: returns True for an equation if `scales_in` holds for it.
      scale_free_in: operands with f(c*x) = f(x) for every real c > 0 that multiplies all of them.
      keeps_zero: returns True for equations that return zeros if every operand is zero. If one
        group of `linear_in` is zero and fixed operands are finite, outputs are also zero.
      axes: name of the parameter with the axes of operand 0 along which entries are combined. Along
        every other axis, an index of the outputs depends only on the same index of the operands.
      last_axes: returns the number of trailing axes along which an equation combines entries.
      reduces: reduction, such as "sum", over `axes`; outputs do not have these axes. The same
        operation combines partial results, except for "position" (argmax and argmin).
      flops: operations that `dtrans.ir.cost` counts. "outputs", "inputs" or "updates" (the last
        operand): 1 for each entry; "window": 1 for each output and entry of its window; "product":
        2 for each term; "none": 0.
    """

    elementwise: bool = False
    moves: Operands = ()
    moves_if: Condition = _always
    keeps_order: Condition = _never
    linear_in: tuple[Operands, ...] = ()
    linear_if: Condition = _always
    scales_in: Operands = ()
    scales_if: Condition = _always
    scale_free_in: Operands = ()
    keeps_zero: Condition = _never
    axes: str = ""
    last_axes: Callable[[JaxprEqn], int] = _no_axes
    reduces: str = ""
    flops: str = "outputs"


def _is_inexact(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))


def _converts_linearly(eqn: JaxprEqn) -> bool:
    """Return True for a cast between floating types, or one that only changes a weak type."""
    ends = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return ends[0] == ends[1] or all(jnp.issubdtype(t, jnp.floating) for t in ends)


def _fills_nothing(eqn: JaxprEqn) -> bool:
    return eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP


def _fills_linearly(eqn: JaxprEqn) -> bool:
    """Return True if a gather is linear.

    A gather is linear if it fills entries out of bounds with 0 or NaN, or does not fill them.
    """
    value = eqn.params["fill_value"]
    return _fills_nothing(eqn) or (
        _is_inexact(eqn) if value is None else bool(value == 0 or np.isnan(value))
    )


def _writes_updates(eqn: JaxprEqn) -> bool:
    """Return True for `x.at[i].set`, but not for `x.at[i].apply`, which uses the same primitive."""
    return eqn.params["update_jaxpr"] is None


_F = PrimitiveFacts
_IDENTITY = _F(elementwise=True, moves=(0,), keeps_order=_always, linear_in=((0,),), flops="none")
_KEEPS_ORDER = _F(moves=(0,), keeps_order=_always, linear_in=((0,),), flops="none")
_REARRANGES = _F(moves=(0,), linear_in=((0,),), flops="none")
_COMPARES = _F(elementwise=True, scale_free_in=(0, 1))
_ADDS = _F(elementwise=True, linear_in=((0, 1),))
_NO_FLOPS = _F(flops="none")
_NOTHING = _F()

# (names of primitives, their facts); no name is in two rows
RECORDS: tuple[tuple[str, PrimitiveFacts], ...] = (
    # primitives that work entry by entry
    (
        "acos acosh bessel_i0e clz cos cosh digamma eq_to erfc exp exp2 igamma igamma_grad_a "
        "igammac is_finite le_to lgamma log log2 logistic lt_to nextafter not one_minus_square "
        "polygamma polynomial pow random_gamma_grad regularized_incomplete_beta rem rsqrt zeta",
        _F(elementwise=True),
    ),
    (
        "and asin asinh atan atanh bessel_i1e cbrt ceil erf erf_inv expm1 floor log1p mulhi or "
        "population_count round shift_left shift_right_arithmetic shift_right_logical sin sinh "
        "sqrt square tan tanh xor",
        _F(elementwise=True, keeps_zero=_always),
    ),
    ("integer_pow", _F(elementwise=True, keeps_zero=lambda eqn: bool(eqn.params["y"] > 0))),
    ("atan2", _F(elementwise=True, scale_free_in=(0, 1), keeps_zero=_always)),
    ("sign", _F(elementwise=True, scale_free_in=(0,), keeps_zero=_always)),
    ("eq ge gt le lt ne", _COMPARES),
    ("abs", _F(elementwise=True, scales_in=(0,), keeps_zero=_always)),
    ("max min", _F(elementwise=True, scales_in=(0, 1), keeps_zero=_always)),
    ("clamp", _F(elementwise=True, scales_in=(0, 1, 2), keeps_zero=_always)),
    ("reduce_precision", _F(elementwise=True, scales_in=(0,), keeps_zero=_always, flops="none")),
    ("conj imag neg real", _F(elementwise=True, linear_in=((0,),))),
    ("add add_any complex sub", _ADDS),
    ("mul", _F(elementwise=True, linear_in=((0,), (1,)))),
    ("div", _F(elementwise=True, linear_in=((0,),), linear_if=_is_inexact)),
    ("select_n", _F(elementwise=True, moves=(1, ...), linear_in=((1, ...),))),
    ("copy copy_p name stop_gradient", _IDENTITY),
    (
        "device_put optimization_barrier",
        _F(
            elementwise=True,
            moves=(0, ...),
            keeps_order=_always,
            linear_in=((0, ...),),
            flops="none",
        ),
    ),
    ("bitcast_convert_type", _F(elementwise=True, keeps_zero=_always, flops="none")),
    (
        "convert_element_type",
        _F(
            elementwise=True,
            linear_in=((0,),),
            linear_if=_converts_linearly,
            scales_in=(0,),
            scales_if=_is_inexact,
            keeps_zero=_always,
            flops="none",
        ),
    ),
    # primitives that move entries
    ("broadcast_in_dim expand_dims squeeze", _KEEPS_ORDER),
    (
        "reshape",
        dataclasses.replace(_KEEPS_ORDER, keeps_order=lambda eqn: eqn.params["dimensions"] is None),
    ),
    ("slice tile transpose unstack", _REARRANGES),
    ("rev", _F(moves=(0,), linear_in=((0,),), axes="dimensions", flops="none")),
    ("split", _F(moves=(0,), linear_in=((0,),), axes="axis", flops="none")),
    ("concatenate", _F(moves=(0, ...), linear_in=((0, ...),), axes="dimension", flops="none")),
    ("stack", _F(moves=(0, ...), linear_in=((0, ...),), flops="none")),
    ("dynamic_slice", _REARRANGES),
    ("dynamic_update_slice pad", _F(moves=(0, 1), linear_in=((0, 1),), flops="none")),
    (
        "gather",
        _F(
            moves=(0,),
            moves_if=_fills_nothing,
            linear_in=((0,),),
            linear_if=_fills_linearly,
            flops="none",
        ),
    ),
    (
        "scatter",
        _F(
            moves=(0, 2),
            moves_if=_writes_updates,
            linear_in=((0, 2),),
            linear_if=_writes_updates,
            flops="none",
        ),
    ),
    ("scatter-add scatter-sub", _F(linear_in=((0, 2),), flops="updates")),
    ("scatter-mul", _F(linear_in=((0,),), flops="updates")),
    ("scatter-max scatter-min", _F(scales_in=(0, 2), keeps_zero=_always, flops="updates")),
    # primitives that combine entries along axes
    ("reduce_sum", _F(linear_in=((0,),), axes="axes", reduces="sum", flops="inputs")),
    ("reduce_prod", _F(axes="axes", reduces="prod", flops="inputs")),
    ("reduce_max", _F(scales_in=(0,), axes="axes", reduces="max", flops="inputs")),
    ("reduce_min", _F(scales_in=(0,), axes="axes", reduces="min", flops="inputs")),
    ("reduce_and", _F(axes="axes", reduces="and", flops="inputs")),
    ("reduce_or", _F(axes="axes", reduces="or", flops="inputs")),
    ("reduce_xor", _F(axes="axes", reduces="xor", flops="inputs")),
    ("argmax argmin", _F(scale_free_in=(0,), axes="axes", reduces="position", flops="inputs")),
    ("reduce", _F(flops="inputs")),
    ("cumsum", _F(linear_in=((0,),), axes="axis")),
    ("cummax cummin", _F(scales_in=(0,), keeps_zero=_always, axes="axis")),
    ("cumprod", _F(keeps_zero=_always, axes="axis")),
    ("cumlogsumexp", _F(axes="axis")),
    ("sort", _F(keeps_zero=_always, axes="dimension")),
    ("top_k", _F(axes="axis")),
    ("reduce_window_sum", _F(linear_in=((0,),), flops="window")),
    ("reduce_window_max reduce_window_min", _F(scales_in=(0,), flops="window")),
    ("reduce_window", _F(flops="window")),
    ("select_and_gather_add select_and_scatter_add", _F(linear_in=((0,),), flops="window")),
    # primitives on matrices
    ("conv_general_dilated dot_general", _F(linear_in=((0,), (1,)), flops="product")),
    ("ragged_dot_general", _F(linear_in=((0,), (1,)))),
    ("triangular_solve", _F(linear_in=((1,),), last_axes=_two_axes)),
    (
        "cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd tridiagonal",
        _F(last_axes=_two_axes),
    ),
    ("fft", _F(linear_in=((0,),), last_axes=lambda eqn: len(eqn.params["fft_lengths"]))),
    # counters, keys, and placement of arrays
    (
        "dce_sink empty empty2 iota pbroadcast pvary random_seed random_unwrap random_wrap",
        _NO_FLOPS,
    ),
    ("sharding_constraint", _NO_FLOPS),
    # primitives without facts: all fields have their defaults
    (
        "all_gather all_gather_invariant all_to_all approx_top_k axis_index cholesky_update "
        "create_token custom_linear_solve debug_callback debug_print ffi_call io_callback "
        "linear_call lu_pivots_to_permutation ormqr pgather platform_index pmax pmin ppermute "
        "precv psend psum psum_invariant pure_callback random_bits random_clone random_fold_in "
        "random_gamma random_split reduce_scatter rng_bit_generator rng_uniform scaled_dot "
        "shard_map symmetric_product threefry2x32 tridiagonal_solve",
        _NOTHING,
    ),
    # no facts here: analyses enter the bodies
    (" ".join((SCAN, WHILE, COND, *REMAT, *CALLS, *CUSTOM_RULES, *JIT)), _NOTHING),
)
FACTS: Mapping[str, PrimitiveFacts] = {
    name: facts for names, facts in RECORDS for name in names.split()
}


def facts_of(eqn: JaxprEqn) -> PrimitiveFacts:
    """Return the facts about an equation's primitive; default facts if it has no record.

    Identities of dtrans (`new_identity`) have the facts of an identity on operand 0.
    """
    if eqn.primitive in IDENTITIES:
        return _IDENTITY
    return FACTS.get(eqn.primitive.name, _NOTHING)


def linear_operands(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the groups of operands in which an equation is jointly linear.

    For `a + b` this is [(0, 1)], and for `a * b` it is [(0,), (1,)].
    """
    facts = facts_of(eqn)
    if not facts.linear_in or not facts.linear_if(eqn):
        return []
    return [_positions(group, eqn) for group in facts.linear_in]


def linear_group(eqn: JaxprEqn, operands: Collection[int]) -> tuple[int, ...]:
    """Return a group of `linear_operands` that contains these operands; () if there is none."""
    return next((group for group in linear_operands(eqn) if set(operands) <= set(group)), ())


def scaling_operands(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the groups of operands with this property: scaling the group scales the outputs.

    If one number c > 0 multiplies all operands of a group, then c multiplies the outputs. For
    `max(a, b)` this is [(0, 1)].
    """
    facts = facts_of(eqn)
    if linear := linear_operands(eqn):
        return linear
    if facts.scales_in and facts.scales_if(eqn):
        return [_positions(facts.scales_in, eqn)]
    return []


def moved_operands(eqn: JaxprEqn, out: int = 0) -> tuple[int, ...]:
    """Return the operands from which an output copies its entries; () if it computes entries.

    For a concatenation, these are all operands. For a sum, the result is ().

    Args:
      eqn: the equation.
      out: index of the output.
    """
    facts = facts_of(eqn)
    if not facts.moves or not facts.moves_if(eqn):
        return ()
    moved = _positions(facts.moves, eqn)
    if len(moved) == len(eqn.outvars):
        return moved[out : out + 1]
    return moved


def same_operand(eqn: JaxprEqn, out: int = 0) -> int | None:
    """Return the index of the operand that an output equals; None if there is none."""
    moved = moved_operands(eqn, out) if facts_of(eqn).keeps_order(eqn) else ()
    return next((i for i in moved if eqn.invars[i].aval.shape == eqn.outvars[out].aval.shape), None)


def zeros_by(eqn: JaxprEqn, zeros: Collection[int]) -> tuple[int, ...] | None:
    """Return the operands that must be finite for an equation to have zero outputs.

    For x * y with x = 0, this is the index of y: the product is zero if y is finite. A divisor
    among the returned operands must also differ from zero. The result is None if outputs need not
    be zero, as for x + y with x = 0.

    Args:
      eqn: the equation.
      zeros: indices of operands that are zero in all entries.
    """
    if len(zeros) == len(eqn.invars) and facts_of(eqn).keeps_zero(eqn):
        return ()
    group = next(
        (group for group in linear_operands(eqn) if zeros and set(group) <= set(zeros)), None
    )
    if group is None:
        return None
    others = [i for i in range(len(eqn.invars)) if i not in group]
    return tuple(i for i in others if jnp.issubdtype(eqn.invars[i].aval.dtype, jnp.inexact))


def is_rearrangement(eqn: JaxprEqn) -> bool:
    """Return True if an equation only moves entries of its one operand, as a transpose does.

    dtrans's own identity primitives do not count.
    """
    return len(eqn.invars) == 1 and moved_operands(eqn) == (0,) and not is_identity(eqn)


def mixed_axes(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Return the axes of operand 0 along which an equation combines entries; None if unknown.

    For a sum over axis 1, this returns (1,).
    """
    facts, ndim = facts_of(eqn), eqn.invars[0].aval.ndim if eqn.invars else 0
    if last := facts.last_axes(eqn):
        return tuple(range(max(0, ndim - last), ndim))
    if not facts.axes:
        return None
    # in older versions of JAX, `top_k` has no axis parameter and works on the last axis
    axes = eqn.params.get(facts.axes, -1)
    return tuple(int(d) % ndim for d in (axes if isinstance(axes, (tuple, list)) else (axes,)))


def _positions(group: Operands, eqn: JaxprEqn) -> tuple[int, ...]:
    if group[-1] is not ...:
        return group
    return tuple(range(group[0], len(eqn.invars)))


def is_known(eqn: JaxprEqn) -> bool:
    """Return True if dtrans knows the properties of an equation's primitive."""
    return eqn.primitive.name in FACTS or eqn.primitive in DTRANS_PRIMITIVES


def is_identity(eqn: JaxprEqn) -> bool:
    """Return True if an equation is an identity of dtrans (`new_identity`)."""
    return eqn.primitive in IDENTITIES


def warn_if_unknown(eqn: JaxprEqn, effect: str) -> None:
    """Warn the user if dtrans has no record of facts about an equation's primitive.

    Args:
      eqn: the equation.
      effect: rest of the sentence after the primitive's name, "is assumed to ...".
    """
    if not is_known(eqn):
        line = line_of(eqn)
        name = eqn.primitive.name + (f" ({line})" if line else "")
        warnings.warn(UnknownPrimitiveWarning(f"{name} {effect}"), stacklevel=2)
