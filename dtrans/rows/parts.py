"""Recipes that compute a slice of an equation's output from slices of its operands.

They let a server compute some rows of a value without an array of the full shape. A rule takes an
equation and the wanted slice of its output (`dtrans.rows.slices.Slice`). It returns a `Recipe`, or
None if the slice needs the full operands.

    most primitives   a search in `dtrans.rows.rules`, from output rows back to operand rows
    RULES             rules for other primitives: broadcasts, counters, concatenations, padding,
                      reshapes, random bits

Except for sums, the result equals the slice of the full output bit for bit. In matrix products and
means over other axes, XLA may add in another order for another shape. If only the running program
knows the start of the slice, some rules return None.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans._jax import Atom, JaxprEqn
from dtrans.ir.builder import Builder
from dtrans.rows.layout import Layout, RowAxis
from dtrans.rows.random_bits import block_bits_p, is_counted
from dtrans.rows.rules import rows_of_operands
from dtrans.rows.slices import Slice, Start


Want = tuple[Atom, Slice | None]  # (operand, its slice); None for the full operand


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Way to compute a slice of an equation's output: the slices to read, and a writer.

    Attributes:
      needs: pairs (operand, slice of it) that the recipe reads; None stands for the full operand.
      write: takes the program's builder and the values of these slices; writes the equations, and
        returns the wanted slice.
    """

    needs: tuple[Want, ...]
    write: Callable[[Builder, list[Atom]], Atom]


def recipe_of(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Return how to compute slice `part` of output number `out` from slices of the operands.

    Return None if the slice needs full operands.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> eqn = jax.make_jaxpr(jnp.transpose)(jnp.ones((6, 2))).jaxpr.eqns[0]
      >>> [part for _, part in recipe_of(eqn, 0, Slice(axis=1, start=2, size=3)).needs]
      [Slice(axis=0, start=2, size=3)]
    """
    rule = RULES.get(eqn.primitive.name)
    if rule is not None and (found := rule(eqn, out, part)) is not None:
        return found
    return _by_row_analysis(eqn, out, part)


def _by_row_analysis(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Return a recipe that runs the equation on slices, by the rules in `dtrans.rows.rules`."""
    step = rows_of_operands(eqn, RowAxis("", part.axis), out)
    if step is None:
        return None

    def slice_along(row: Layout | None) -> Slice | None:
        if not isinstance(row, RowAxis):
            return None
        return part.along(row.axis).widened(row.width)

    types = []
    for v, layout in zip(eqn.outvars, step.outs, strict=True):
        piece = slice_along(layout)
        types.append(v.aval if piece is None else piece.type_in(v.aval))
    needs = list(zip(eqn.invars, map(slice_along, step.operands), strict=True))
    params = step.params(types) if step.params else {}
    return _on_parts(eqn, out, types, needs, params)


def _on_parts(
    eqn: JaxprEqn, out: int, types: Sequence[Any], needs: Sequence[Want], params: Mapping[str, Any]
) -> Recipe:
    """Return a recipe that runs an equation on the slices `needs`; `types` are its output types."""
    return Recipe(tuple(needs), lambda b, atoms: b.copy(eqn, atoms, types, **params)[out])


def _copied(eqn: JaxprEqn, part: Slice, needs: Sequence[Want], **params: Any) -> Recipe:
    """Return a recipe that runs a one-output equation on slices, with new parameters `params`."""
    return _on_parts(eqn, 0, [part.type_in(eqn.outvars[0].aval)], needs, params)


def _called(fn: Callable[..., jax.Array], *needs: Want) -> Recipe:
    """Return a recipe that calls `fn` on the slices `needs`; its result is the wanted slice."""
    return Recipe(needs, lambda b, atoms: b.call(fn, *atoms)[0])


# -- primitives with separate rules ----------------------------------------------------------------


def _broadcast_in_dim(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a broadcast: slice the operand, or broadcast to fewer entries.

    The second applies along an axis that the broadcast adds or repeats.
    """
    if len(eqn.invars) > 1:
        return None
    (a,), dims = eqn.invars, eqn.params["broadcast_dimensions"]
    shape = part.type_in(eqn.outvars[0].aval).shape
    if part.axis in dims and a.aval.shape[dims.index(part.axis)] == eqn.params["shape"][part.axis]:
        return _copied(eqn, part, [(a, part.along(dims.index(part.axis)))], shape=shape)
    return _copied(eqn, part, [(a, None)], shape=shape)


def _iota(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of an `iota`: a counter that begins at the start of the slice."""
    if eqn.invars:
        return None
    aval = part.type_in(eqn.outvars[0].aval)
    if part.start == 0 or eqn.params["dimension"] != part.axis:
        return _copied(eqn, part, (), shape=aval.shape)
    return Recipe((), lambda b, atoms: part.counted(b, aval))


def _concatenate(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a concatenation: concatenate only the operands that overlap the slice."""
    if eqn.params["dimension"] != part.axis or isinstance(part.start, Start):
        return None
    needs: list[Want] = []
    begin = 0
    for a in eqn.invars:
        end = begin + a.aval.shape[part.axis]
        lo, hi = max(part.start, begin), min(part.stop, end)
        if lo < hi:
            needs.append((a, Slice(part.axis, lo - begin, hi - lo)))
        begin = end
    if not needs:
        return None
    if len(needs) == 1:
        return Recipe(tuple(needs), lambda b, atoms: atoms[0])
    return _copied(eqn, part, needs)


def _stack(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of stacked arrays: stack only the operands that are in the slice."""
    if eqn.params["axis"] != part.axis or isinstance(part.start, Start):
        return None
    return _copied(eqn, part, [(a, None) for a in eqn.invars[part.start : part.stop]])


def _split(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of output `out` of a `split`: slice the operand at the output's offset."""
    if eqn.params["axis"] != part.axis or isinstance(part.start, Start):
        return None
    before = sum(int(size) for size in eqn.params["sizes"][:out])
    return Recipe(((eqn.invars[0], part.moved(before)),), lambda b, atoms: atoms[0])


def _slice(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a `slice`: slice the operand, then apply the equation to other axes."""
    p, axis, (a,) = eqn.params, part.axis, eqn.invars
    if isinstance(part.start, Start):
        return None
    stride = 1 if p["strides"] is None else p["strides"][axis]
    first = int(p["start_indices"][axis]) + part.start * stride
    length = (part.size - 1) * stride + 1
    starts, limits = list(p["start_indices"]), list(p["limit_indices"])
    starts[axis], limits[axis] = 0, length
    need = (a, Slice(axis, first, length))
    return _copied(eqn, part, [need], start_indices=tuple(starts), limit_indices=tuple(limits))


def _rev(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a reversed array: slice the operand at its other end, and reverse that."""
    if part.axis not in eqn.params["dimensions"] or isinstance(part.start, Start):
        return None
    (a,) = eqn.invars
    start = a.aval.shape[part.axis] - part.stop
    return _copied(eqn, part, [(a, Slice(part.axis, start, part.size))])


def _pad(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a padded array: pad the operand's entries that are in the slice.

    If there are none, the result is only padding.
    """
    a, value = eqn.invars
    axis, config = part.axis, [tuple(map(int, of)) for of in eqn.params["padding_config"]]
    low, _, interior = config[axis]
    size = a.aval.shape[axis]
    if interior or isinstance(part.start, Start):
        return None
    lo, hi = (min(max(n - low, 0), size) for n in (part.start, part.stop))
    if lo == hi:
        return _called(_filled(part.type_in(eqn.outvars[0].aval).shape), (value, None))
    before = lo + low - part.start
    config[axis] = (before, part.size - before - (hi - lo), 0)
    needs = [(a, Slice(axis, lo, hi - lo)), (value, None)]
    return _copied(eqn, part, needs, padding_config=tuple(config))


@functools.cache
def _filled(shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda value: jax.lax.broadcast(value, shape)


def _reshape(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a reshaped array: slice the operand, then reshape its slice.

    The operand is sliced along the axis that becomes the axis of the wanted slice.
    """
    (a, *more), new = eqn.invars, eqn.outvars[0].aval.shape
    old: tuple[int, ...] = a.aval.shape
    if more or eqn.params["dimensions"] is not None or not math.prod(new):
        return None
    before = math.prod(new[: part.axis])
    axes = [d for d in range(len(old)) if old[d] > 1 and math.prod(old[:d]) == before]
    if not axes:
        return None
    (axis,) = axes
    width_old, width_new = math.prod(old[axis + 1 :]), math.prod(new[part.axis + 1 :])
    shape = part.type_in(eqn.outvars[0].aval).shape
    if width_new % width_old == 0:
        need = part.along(axis).widened(width_new // width_old)
        return _copied(eqn, part, [(a, need)], new_sizes=shape)
    if isinstance(part.start, Start):
        return None
    lo, hi = part.start * width_new, part.stop * width_new
    first = lo // width_old
    cover = Slice(axis, first, -(-hi // width_old) - first)
    if cover.size * width_old == hi - lo:
        return _copied(eqn, part, [(a, cover)], new_sizes=shape)
    return _called(_run(before, lo - first * width_old, hi - first * width_old, shape), (a, cover))


@functools.cache
def _run(
    before: int, start: int, stop: int, shape: tuple[int, ...]
) -> Callable[[jax.Array], jax.Array]:
    def fn(x: jax.Array) -> jax.Array:
        flat = jax.lax.reshape(x, (before, x.size // before))
        return jax.lax.reshape(jax.lax.slice_in_dim(flat, start, stop, axis=1), shape)

    return fn


def _keys(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of converted random keys: slice the operand of the conversion.

    The equation converts keys to uint32 words, or back.
    """
    (a,) = eqn.invars
    if part.axis >= min(a.aval.ndim, eqn.outvars[0].aval.ndim):
        return None
    return _copied(eqn, part, [(a, part)])


def _random_bits(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of random bits: slice the keys, or the bits that each key yields.

    The second needs a counter-based generator (`dtrans.rows.random_bits`).
    """
    # In a program that another mesh axis divides, the equation draws a block of the bits. The start
    # of the block is a second operand.
    keys, *start_of_block = eqn.invars
    ndim = keys.aval.ndim
    if part.axis < ndim:
        return _copied(eqn, part, [(keys, part), *((a, None) for a in start_of_block)])
    if not is_counted(eqn):
        return None
    drawn, types = eqn.replace(primitive=block_bits_p), [part.type_in(eqn.outvars[0].aval)]
    axis, start = part.axis - ndim, part.start

    def write(b: Builder, atoms: list[Atom]) -> Atom:
        if isinstance(start, Start):
            ins = [*atoms, start.value(b)]
            return b.copy(drawn, ins, types, axis=axis, start=0, stop=part.size)[0]
        return b.copy(drawn, atoms, types, axis=axis, start=start, stop=part.stop)[0]

    return Recipe(((keys, None),), write)


def _gather(eqn: JaxprEqn, out: int, part: Slice) -> Recipe | None:
    """Compute a slice of a gather: slice the indices, and gather from the full operand."""
    (operand, indices), numbers = eqn.invars, eqn.params["dimension_numbers"]
    if part.axis in numbers.offset_dims or numbers.operand_batching_dims:
        return None
    axis = part.axis - sum(d < part.axis for d in numbers.offset_dims)
    return _copied(eqn, part, [(operand, None), (indices, part.along(axis))])


RULES: Mapping[str, Callable[[JaxprEqn, int, Slice], Recipe | None]] = {
    "gather": _gather,
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "slice": _slice,
    "rev": _rev,
    "pad": _pad,
    "reshape": _reshape,
    "random_wrap": _keys,
    "random_unwrap": _keys,
    "random_bits": _random_bits,
}
