"""One record of facts for each primitive of JAX, and the primitives that have bodies.

Every analysis and every writer of dtrans reads these records. Tables of functions by name, such as
meanings in NumPy, are in the modules that use them.

A fact holds for all equations of a primitive, with any parameters, unless its field has a
condition. `tests/test_jax_primitives.py` checks each fact on numbers, and finds primitives without
a record. Those have no facts: they are treated as the worst kind, with a warning
(`dtrans.errors.UnknownPrimitiveWarning`).

Rules that need more than a fact are functions elsewhere: `dtrans.rows.rules` has those of rows.
Parameters of loops, branches and calls are in `dtrans._jax.equation_params`.
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
REMAT = ("remat2", "remat", "checkpoint")  # names of `jax.checkpoint` over JAX's versions
# the last from 0.11, in the place of the two before
CALLS = (
    "closed_call",
    "core_call",
    "eval_jaxpr",
)
CUSTOM_JVP, CUSTOM_VJP = CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
JIT = ("jit", "pjit")


# -- facts -----------------------------------------------------------------------------------------

Operands = tuple[Any, ...]  # positions of operands; a final ellipsis means all that follow
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
    """Facts about one primitive; a default field promises nothing.

    "Fixed" operands are those that a field does not name: they may have any values, equal in all
    compared runs.

    Attributes:
      elementwise: an output at an index reads its operands at that index alone. Operands have the
        shape of the outputs, or are scalars; `dtrans.rows.rules` also accepts dimensions of size 1.
      moves: every entry of an output is an entry of one of these operands; only fixed operands and
        parameters choose which. So the primitive commutes with every function of single entries.
        With as many outputs as such operands, each output has entries of its own operand.
      moves_if: equations for which `moves` holds.
      keeps_order: equations whose outputs have all entries of their operand, in row-major order.
        Dimensions may split and merge, and entries may be repeated along new dimensions, or along
        those of size 1. An output with the shape of its operand equals that operand.
      linear_in: groups of operands. Outputs are jointly linear in one group with the others fixed:
        f(a*x + b*y) = a*f(x) + b*f(y) for real a and b, up to rounding. With several groups,
        outputs are linear in each, but not in their union.
      linear_if: equations for which `linear_in` holds.
      scales_in: f(c*x) = c*f(x) for every real c > 0 that multiplies all these operands, the others
        being fixed. Groups of `linear_in` have this too, and are not repeated.
      scales_if: equations for which `scales_in` holds.
      scale_free_in: f(c*x) = f(x) for every real c > 0 that multiplies all these operands.
      keeps_zero: equations that return zeros if every operand is zero. Linear equations also return
        zeros for a group of zeros, if fixed operands are finite.
      axes: parameter that names axes of operand 0. Along every other axis, an index of the outputs
        reads that index of the operands alone. Outputs have the axes of the operands; `reduces`
        removes the named ones.
      last_axes: number of trailing axes of every operand and output with the role of `axes`.
      reduces: operation that reduces entries along `axes`. It also combines partial results, except
        "position" (the first best entry).
      flops: count of floating-point operations for `dtrans.ir.cost`: "none". "outputs", "inputs" or
        "updates" (the last operand): one for each entry. "window": one for each output and entry of
        its window. "product": a multiplication and an addition for each term.
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
    """Return True for casts between floating types, or if only a weak type changes."""
    ends = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return ends[0] == ends[1] or all(jnp.issubdtype(t, jnp.floating) for t in ends)


def _fills_nothing(eqn: JaxprEqn) -> bool:
    return eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP


def _fills_linearly(eqn: JaxprEqn) -> bool:
    """Return True if entries out of bounds become 0 or nan, which sums preserve."""
    value = eqn.params["fill_value"]
    return _fills_nothing(eqn) or (
        _is_inexact(eqn) if value is None else bool(value == 0 or np.isnan(value))
    )


def _writes_updates(eqn: JaxprEqn) -> bool:
    """Return True for `x.at[i].set`; `x.at[i].apply` has the same primitive with a function."""
    return eqn.params["update_jaxpr"] is None


_F = PrimitiveFacts
_IDENTITY = _F(elementwise=True, moves=(0,), keeps_order=_always, linear_in=((0,),), flops="none")
_KEEPS_ORDER = _F(moves=(0,), keeps_order=_always, linear_in=((0,),), flops="none")
_REARRANGES = _F(moves=(0,), linear_in=((0,),), flops="none")
_COMPARES = _F(elementwise=True, scale_free_in=(0, 1))
_ADDS = _F(elementwise=True, linear_in=((0, 1),))
_NO_FLOPS = _F(flops="none")
_NOTHING = _F()

# Names, and the facts that they share. No name is in two rows.
RECORDS: tuple[tuple[str, PrimitiveFacts], ...] = (
    # entry by entry
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
        "optimization_barrier",
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
    # entries in other places
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
    # along axes
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
    # matrices
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
        "device_put dce_sink empty empty2 iota pbroadcast pvary random_seed random_unwrap "
        "random_wrap",
        _NO_FLOPS,
    ),
    ("sharding_constraint", _NO_FLOPS),
    # no facts
    (
        "all_gather all_gather_invariant all_to_all approx_top_k axis_index cholesky_update "
        "create_token custom_linear_solve debug_callback debug_print ffi_call io_callback "
        "linear_call lu_pivots_to_permutation ormqr pgather platform_index pmax pmin ppermute "
        "precv psend psum psum_invariant pure_callback random_bits random_clone random_fold_in "
        "random_gamma random_split reduce_scatter rng_bit_generator rng_uniform scaled_dot "
        "shard_map symmetric_product threefry2x32 tridiagonal_solve",
        _NOTHING,
    ),
    # the facts of these are those of their bodies
    (" ".join((SCAN, WHILE, COND, *REMAT, *CALLS, *CUSTOM_RULES, *JIT)), _NOTHING),
)
FACTS: Mapping[str, PrimitiveFacts] = {
    name: facts for names, facts in RECORDS for name in names.split()
}


def facts_of(eqn: JaxprEqn) -> PrimitiveFacts:
    """Return the facts of an equation's primitive; no facts if it is unknown.

    Marks of this package are identities on their first operand.
    """
    return _IDENTITY if eqn.primitive in IDENTITIES else FACTS.get(eqn.primitive.name, _NOTHING)


def linear_operands(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the groups of operands that an equation is linear in: `PrimitiveFacts.linear_in`."""
    facts = facts_of(eqn)
    if not facts.linear_in or not facts.linear_if(eqn):
        return []
    return [_positions(group, eqn) for group in facts.linear_in]


def linear_group(eqn: JaxprEqn, operands: Collection[int]) -> tuple[int, ...]:
    """Return a jointly linear group that contains these operands; empty if there is none."""
    return next((group for group in linear_operands(eqn) if set(operands) <= set(group)), ())


def scaling_operands(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the groups of operands whose common positive factor is a factor of the outputs.

    The factors of several groups are multiplied.
    """
    facts = facts_of(eqn)
    if linear := linear_operands(eqn):
        return linear
    return [_positions(facts.scales_in, eqn)] if facts.scales_in and facts.scales_if(eqn) else []


def moved_operands(eqn: JaxprEqn, out: int = 0) -> tuple[int, ...]:
    """Return the operands whose entries form an output; empty if the equation computes."""
    facts = facts_of(eqn)
    if not facts.moves or not facts.moves_if(eqn):
        return ()
    moved = _positions(facts.moves, eqn)
    return moved[out : out + 1] if len(moved) == len(eqn.outvars) else moved


def same_operand(eqn: JaxprEqn, out: int = 0) -> int | None:
    """Return the operand that an output equals; None if there is none."""
    moved = moved_operands(eqn, out) if facts_of(eqn).keeps_order(eqn) else ()
    return next((i for i in moved if eqn.invars[i].aval.shape == eqn.outvars[out].aval.shape), None)


def zeros_by(eqn: JaxprEqn, zeros: Collection[int]) -> tuple[int, ...] | None:
    """Return the operands that must be finite for outputs to be zeros; None if outputs may differ.

    A divisor among them must not be zero either.

    Args:
      eqn: the equation.
      zeros: operands that are zeros everywhere.
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
    """Return True if an equation only moves the entries of its one operand; marks are not."""
    return len(eqn.invars) == 1 and moved_operands(eqn) == (0,) and not is_identity(eqn)


def mixed_axes(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Return the axes of operand 0 along which entries are combined; None if unknown."""
    facts, ndim = facts_of(eqn), eqn.invars[0].aval.ndim if eqn.invars else 0
    if last := facts.last_axes(eqn):
        return tuple(range(max(0, ndim - last), ndim))
    if not facts.axes:
        return None
    axes = eqn.params.get(facts.axes, -1)  # `top_k` of older JAX has no axis: it takes the last
    return tuple(int(d) % ndim for d in (axes if isinstance(axes, (tuple, list)) else (axes,)))


def _positions(group: Operands, eqn: JaxprEqn) -> tuple[int, ...]:
    if group[-1] is not ...:
        return group
    return tuple(range(group[0], len(eqn.invars)))


def is_known(eqn: JaxprEqn) -> bool:
    """Return True if the primitive is in one of the tables above or is dtrans's own."""
    return eqn.primitive.name in FACTS or eqn.primitive in DTRANS_PRIMITIVES


def is_identity(eqn: JaxprEqn) -> bool:
    """Return True if an equation is a mark of this package: its output is its first operand."""
    return eqn.primitive in IDENTITIES


def warn_if_unknown(eqn: JaxprEqn, effect: str) -> None:
    """Warn of a primitive without a record, and of the effect: `is assumed to mix rows, so ...`."""
    if not is_known(eqn):
        line = line_of(eqn)
        name = eqn.primitive.name + (f" ({line})" if line else "")
        warnings.warn(UnknownPrimitiveWarning(f"{name} {effect}"), stacklevel=2)
