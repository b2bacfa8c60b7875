"""Writing the equations that make parts of values: some entries along one axis, and as little as possible of the rest.

A parameter server starts from rows `start:stop` of leaves that one device would make whole. What is wanted of the
outputs of an init says what is wanted of the values they are made of, equation by equation, from the last to the
first; then the equations are written, in their order, each for the parts that are wanted of it:

    most equations   the rules of row analysis (`dtrans.rows.rules`) are asked the other way round: with rows along
                     which axis of which operand does the output have rows along the wanted axis? What an optimizer's
                     equation does to rows, an initialiser's does too, so a rule that is added there serves here
    BACKWARD         equations that need nothing of the rest although rows do not simply pass through them: constants
                     broadcast, counters, pieces side by side, padding, runs of a reshaped array, random bits
    everything else  is made whole, and the part is cut out: a QR decomposition, a permutation, a loop

So zeros, ones, constants, and whatever is drawn by `jax.random.normal`, `uniform` and `truncated_normal` under the
default generator (see `dtrans.slicing.random_bits`), scaled, reshaped, transposed or concatenated, with the optimizer's
state that is made of it, is made in blocks; an orthogonal initialiser's leaves are whole first. Of a value that is
wanted whole anyway, parts are cut. Entries of a part are those of the whole bit for bit, except where an equation sums
(a matrix product, a mean over other axes): the compiler may choose another order for another shape.

Everything is a loop over equations: init of a deep model splits one key a thousand times in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, opened, warn_if_unknown
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.rows.layout import SHARED, Layout, RowAxis
from dtrans.rows.row_buckets import RowBuckets, counted, taken
from dtrans.rows.rules import step_of
from dtrans.rows.writer import RowRange, RowSet
from dtrans.slicing.random_bits import block_bits_p, is_counted


@dataclasses.dataclass(frozen=True, order=True)
class InitSlice:
    """Entries `start` to `stop` along `axis`; or those in buckets `start` to `stop` (`dtrans.rows.row_buckets`).

    Attributes:
      buckets, size: how many buckets there are, of how many entries; 0 for a run of entries.
    """

    axis: int
    start: int
    stop: int
    buckets: int = 0
    size: int = 0

    @classmethod
    def along_axis(cls, axis: int, rows: RowSet) -> InitSlice:
        """These rows along an axis."""
        if isinstance(rows, RowBuckets):
            return cls(axis, rows.start, rows.stop, rows.count, rows.size)
        return cls(axis, rows.start, rows.stop)

    @property
    def rows(self) -> RowSet:
        """The entries."""
        if self.buckets:
            return RowBuckets(self.start, self.stop, self.buckets, self.size)
        return RowRange(self.start, self.stop)

    @property
    def count(self) -> int:
        """How many."""
        return self.rows.rows

    def cut(self, aval: Any) -> Any:
        """The type of this part of a value."""
        return aval.update(shape=(*aval.shape[: self.axis], self.count, *aval.shape[self.axis + 1 :]))

    def moved(self, by: int) -> InitSlice:
        """The same entries, in a value that begins `by` entries earlier."""
        return dataclasses.replace(self, start=self.start + by, stop=self.stop + by)

    def along(self, axis: int) -> InitSlice:
        """The same entries of another axis."""
        return dataclasses.replace(self, axis=axis)


Want = tuple[Atom, InitSlice | None]  # None: the whole


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a part of an output is made.

    Attributes:
      needs: parts of operands.
      write: what makes it, given these.
    """

    needs: tuple[Want, ...]
    write: Callable[[Builder, list[Atom]], Atom]


def write_parts(b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[Want]) -> list[Atom]:
    """Write the equations of `jaxpr` that make parts of its values.

    Args:
      b: writes to a program that has the inputs of `jaxpr`, and is like it.
      jaxpr: its calls inlined (`dtrans.ir.inline.inline_calls`).
      wanted: variables of `jaxpr`, with the part that is wanted of each; None for the whole.

    Returns: what is wanted, in that order.

    Example:
      >>> import jax
      >>> from dtrans.ir.builder import Builder
      >>> from dtrans.ir.inline import inline_calls
      >>> init = inline_calls(jax.make_jaxpr(lambda key: 0.1 * jax.random.normal(key, (6, 2)).T)(jax.random.key(0)))
      >>> b = Builder(init)
      >>> b.invars += init.jaxpr.invars
      >>> made = write_parts(b, init, [(init.jaxpr.outvars[0], InitSlice(axis=1, start=2, stop=5))])
      >>> [str(v.aval) for e in b.eqns for v in e.outvars][-3:]
      ['float32[3,2]', 'float32[2,3]', 'float32[2,3]']
    """
    eqns = opened(jaxpr).eqns
    wishes = _Wishes()
    for want in wanted:
        wishes.add(want)
    recipes: dict[tuple[Var, InitSlice], Recipe] = {}
    whole: set[int] = set()
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        found = {}
        for k, v in enumerate(eqn.outvars):
            if not wishes.whole(v):
                found.update({(v, part): recipe_of(eqn, k, part) for part in wishes.parts(v)})
        if any(wishes.whole(v) for v in eqn.outvars) or None in found.values():
            whole.add(i)
            for a in eqn.invars:
                wishes.add((a, None))
            continue
        for key, recipe in found.items():
            assert recipe is not None
            recipes[key] = recipe
            for want in recipe.needs:
                wishes.add(want)

    made: dict[tuple[Var, InitSlice], Atom] = {}

    def read(want: Want) -> Atom:
        atom, part = wishes.normal(want)
        if part is None:
            return atom
        assert isinstance(atom, Var)
        if (atom, part) not in made:
            made[atom, part] = _cut(b, atom, part)
        return made[atom, part]

    for i, eqn in enumerate(eqns):
        if i in whole:
            b.keep(eqn)
            continue
        for v in eqn.outvars:
            for part in wishes.parts(v):
                recipe = recipes[v, part]
                made[v, part] = recipe.write(b, [read(want) for want in recipe.needs])
    return [read(want) for want in wanted]


class _Wishes:
    """What is wanted of each value, in the order in which it was found out."""

    def __init__(self) -> None:
        self._of: dict[Var, dict[InitSlice | None, None]] = {}

    def normal(self, want: Want) -> Want:
        """A part that is everything is the whole."""
        atom, part = want
        if part is not None and (isinstance(atom, Literal) or part.count == atom.aval.shape[part.axis]):
            return atom, None
        return want

    def add(self, want: Want) -> None:
        """Note what is wanted."""
        atom, part = self.normal(want)
        if isinstance(atom, Var):
            self._of.setdefault(atom, {})[part] = None

    def whole(self, var: Var) -> bool:
        """Whether all of it is made: it is wanted, or so many parts are that they are more than two of it."""
        found = self._of.get(var, {})
        return None in found or sum(p.count / var.aval.shape[p.axis] for p in found if p is not None) > 2

    def parts(self, var: Var) -> list[InitSlice]:
        """The parts that are wanted."""
        return sorted(p for p in self._of.get(var, ()) if p is not None)


def _cut(b: Builder, var: Var, part: InitSlice) -> Atom:
    """A part of a whole value."""
    rows = part.rows
    if b.is_constant(var) and not jnp.issubdtype(var.aval.dtype, jax.dtypes.extended):
        index = (slice(None),) * part.axis + (rows.index,)
        return b.constant(np.asarray(b.constant_value(var))[index].copy())  # a view would keep the rest
    role, b.role = b.role, DIST
    if isinstance(rows, RowBuckets):
        (made,) = b.call(taken(rows, part.axis), var)
    else:
        made = b.part(var, part.axis, part.start, part.stop)
    b.role = role
    return made


def recipe_of(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """How a part of an output of an equation is made of parts of its operands; None where it needs all of them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> eqn = jax.make_jaxpr(jnp.transpose)(jnp.ones((6, 2))).jaxpr.eqns[0]
      >>> [part for _, part in recipe_of(eqn, 0, InitSlice(axis=1, start=2, stop=5)).needs]
      [InitSlice(axis=0, start=2, stop=5, buckets=0, size=0)]
    """
    rule = BACKWARD.get(eqn.primitive.name)
    found = rule(eqn, out, part) if rule is not None and (not part.buckets or rule in _OF_BUCKETS) else None
    if rule is None:
        warn_if_unknown(eqn, "is treated as mixing rows: each server makes all of what init makes with it")
    return found or _by_row_analysis(eqn, out, part)


def _by_row_analysis(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Which axis of which operand has the rows of this axis of the output?"""
    wanted = RowAxis("", part.axis)
    for i, a in enumerate(eqn.invars):
        for axis in range(a.aval.ndim):
            ins: list[Layout] = [SHARED] * len(eqn.invars)
            ins[i] = RowAxis("", axis)
            step = step_of(eqn, ins)
            if step is None or step.reduce is not None or step.outs[out] != wanted:
                continue
            if any(row is not None and row.width != 1 for row in step.operands):
                continue
            types = [
                part.along(x.axis).cut(v.aval) if isinstance(x, RowAxis) else v.aval
                for v, x in zip(eqn.outvars, step.outs, strict=True)
            ]
            needs = tuple(
                (o, None if row is None else part.along(row.axis))
                for o, row in zip(eqn.invars, step.operands, strict=True)
            )
            params = step.params(types) if step.params else {}
            return _on_parts(eqn, out, types, needs, params)
    return None


def _on_parts(
    eqn: JaxprEqn, out: int, types: Sequence[Any], needs: Sequence[Want], params: Mapping[str, Any]
) -> Recipe:
    """The same equation on parts of its operands: its outputs are of these types, and `out` is wanted."""
    return Recipe(tuple(needs), lambda b, atoms: b.copy(eqn, atoms, types, **params)[out])


def _copied(eqn: JaxprEqn, part: InitSlice, needs: Sequence[Want], **params: Any) -> Recipe:
    """The same for an equation of one output, perhaps with other parameters."""
    return _on_parts(eqn, 0, [part.cut(eqn.outvars[0].aval)], needs, params)


def _called(fn: Callable[..., jax.Array], *needs: Want) -> Recipe:
    """A small function of parts of operands, the same object for the same equations."""
    return Recipe(needs, lambda b, atoms: b.call(fn, *atoms)[0])


# -- equations that rows do not simply pass through -------------------------------------------------


def _broadcast_in_dim(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Along an axis that it adds, or makes of size 1 longer, all entries are the same."""
    if len(eqn.invars) > 1:
        return None
    (a,), dims = eqn.invars, eqn.params["broadcast_dimensions"]
    shape = part.cut(eqn.outvars[0].aval).shape
    if part.axis in dims and a.aval.shape[dims.index(part.axis)] == eqn.params["shape"][part.axis]:
        return _copied(eqn, part, [(a, part.along(dims.index(part.axis)))], shape=shape)
    return _copied(eqn, part, [(a, None)], shape=shape)


def _iota(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Counting may begin later."""
    if eqn.invars:
        return None
    along, aval = eqn.params["dimension"], part.cut(eqn.outvars[0].aval)
    if along == part.axis and isinstance(rows := part.rows, RowBuckets):
        return _called(counted(rows, aval.dtype, aval.shape, along))
    return _called(_counted(aval.dtype, aval.shape, along, part.start if along == part.axis else 0))


@functools.cache
def _counted(dtype: Any, shape: tuple[int, ...], axis: int, start: int) -> Callable[[], jax.Array]:
    def fn() -> jax.Array:
        if not start:
            return jax.lax.broadcasted_iota(dtype, shape, axis)
        # small types round, or wrap, as they do in the whole
        return (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + jnp.asarray(start, jnp.int32)).astype(dtype)

    return fn


def _concatenate(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """The pieces that overlap."""
    if eqn.params["dimension"] != part.axis:
        return None
    needs: list[Want] = []
    begin = 0
    for a in eqn.invars:
        end = begin + a.aval.shape[part.axis]
        lo, hi = max(part.start, begin), min(part.stop, end)
        if lo < hi:
            needs.append((a, InitSlice(part.axis, lo - begin, hi - begin)))
        begin = end
    if not needs:
        return None
    if len(needs) == 1:
        return Recipe(tuple(needs), lambda b, atoms: atoms[0])
    return _copied(eqn, part, needs)


def _stack(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Some of the operands."""
    if eqn.params["axis"] != part.axis:
        return None
    return _copied(eqn, part, [(eqn.invars[i], None) for i in part.rows.numbers()])


def _split(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """A part of a piece is a part of the whole."""
    if eqn.params["axis"] != part.axis:
        return None
    before = sum(int(size) for size in eqn.params["sizes"][:out])
    return Recipe(((eqn.invars[0], part.moved(before)),), lambda b, atoms: atoms[0])


def _slice(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """A part of a slice, of which the other axes are still cut."""
    p, axis, (a,) = eqn.params, part.axis, eqn.invars
    stride = 1 if p["strides"] is None else p["strides"][axis]
    first = p["start_indices"][axis] + part.start * stride
    length = (part.count - 1) * stride + 1
    starts, limits = list(p["start_indices"]), list(p["limit_indices"])
    starts[axis], limits[axis] = 0, length
    need = (a, InitSlice(axis, first, first + length))
    return _copied(eqn, part, [need], start_indices=tuple(starts), limit_indices=tuple(limits))


def _rev(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Counted from the other end."""
    if part.axis not in eqn.params["dimensions"]:
        return None
    (a,) = eqn.invars
    size = a.aval.shape[part.axis]
    return _copied(eqn, part, [(a, InitSlice(part.axis, size - part.stop, size - part.start))])


def _pad(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """What is in front and behind, and some of the operand between."""
    a, value = eqn.invars
    axis, config = part.axis, list(eqn.params["padding_config"])
    low, _, interior = config[axis]
    size = a.aval.shape[axis]
    if interior:
        return None
    lo, hi = (min(max(n - low, 0), size) for n in (part.start, part.stop))
    if lo == hi:
        return _called(_filled(part.cut(eqn.outvars[0].aval).shape), (value, None))
    before = lo + low - part.start
    config[axis] = (before, part.count - before - (hi - lo), 0)
    return _copied(eqn, part, [(a, InitSlice(axis, lo, hi)), (value, None)], padding_config=tuple(config))


@functools.cache
def _filled(shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda value: jax.lax.broadcast(value, shape)


def _reshape(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """A run of entries of the old shape that covers the wanted ones, for each index of the axes before."""
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
    if part.buckets:
        there = [n * width_new for n in (part.start, part.stop, part.buckets, part.size)]
        if any(n % width_old for n in there):
            return None
        need = a, InitSlice(axis, *(n // width_old for n in there))
        return _copied(eqn, part, [need], new_sizes=part.cut(eqn.outvars[0].aval).shape)
    lo, hi = part.start * width_new, part.stop * width_new
    cover = InitSlice(axis, lo // width_old, -(-hi // width_old))
    shape = part.cut(eqn.outvars[0].aval).shape
    if cover.count * width_old == hi - lo:
        return _copied(eqn, part, [(a, cover)], new_sizes=shape)
    first = cover.start * width_old
    return _called(_run(before, lo - first, hi - first, shape), (a, cover))


@functools.cache
def _run(before: int, start: int, stop: int, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    def fn(x: jax.Array) -> jax.Array:
        flat = jax.lax.reshape(x, (before, x.size // before))
        return jax.lax.reshape(jax.lax.slice_in_dim(flat, start, stop, axis=1), shape)

    return fn


def _keys(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Arrays of keys, and the words they are made of, which are on one axis more."""
    (a,) = eqn.invars
    if part.axis >= min(a.aval.ndim, eqn.outvars[0].aval.ndim):
        return None
    return _copied(eqn, part, [(a, part)])


def _random_bits(eqn: JaxprEqn, out: int, part: InitSlice) -> Recipe | None:
    """Of some of the keys, or some of the bits of each, where they are counted."""
    (keys,) = eqn.invars
    ndim = keys.aval.ndim
    if part.axis < ndim:
        return _copied(eqn, part, [(keys, part)])
    if not is_counted(eqn):
        return None
    rows = {"axis": part.axis - ndim, "start": part.start, "stop": part.stop}
    if part.buckets:
        rows["buckets"] = part.buckets
    return _copied(eqn.replace(primitive=block_bits_p), part, [(keys, None)], **rows)


BACKWARD: Mapping[str, Callable[[JaxprEqn, int, InitSlice], Recipe | None]] = {
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

# those that make buckets too; others make the whole, unless rows pass through
_OF_BUCKETS = frozenset({_broadcast_in_dim, _iota, _stack, _reshape, _keys, _random_bits})
