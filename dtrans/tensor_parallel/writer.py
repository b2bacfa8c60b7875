"""Writing the program of one shard.

Equations are taken in order, and each is written once, on pieces or on whole values, as `dtrans.tensor_parallel.rules`
chooses; `dtrans.tensor_parallel.values` has the values.

Sums are left open as long as what reads them is linear, and the only one that does: gradients of one input through
several products are added up before they are reduced, once. Bodies of remat are written in the same way; loops and
branches are given whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    REMAT,
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    closed,
    opened,
    origin_of,
    scope_of,
    with_bodies,
)
from dtrans.ir.array_fns import converted
from dtrans.ir.display import short_type
from dtrans.ir.inline import inline_calls
from dtrans.ops import identity_of
from dtrans.rows.layout import SHARED, Rows
from dtrans.tensor_parallel.array_fns import best_local, candidates, decided, kept, on_first, own_indices, picked
from dtrans.tensor_parallel.layout import PARTIAL, Partial, Placed, Shards
from dtrans.tensor_parallel.rules import Way, choose
from dtrans.tensor_parallel.values import ShardValues


SAME_NUMBERS = frozenset({"transpose", "reshape", "squeeze", "convert_element_type", "broadcast_in_dim", "copy"})
_LINEAR = frozenset({"neg", "reshape", "transpose", "squeeze", "reduce_sum", "copy"})
_ADDS = frozenset({"add", "add_any", "sub"})


class SplitWriter(ShardValues):
    """Writes the equations of one jaxpr for one shard."""

    cut_at_birth: Mapping[Var, Rows] = MappingProxyType({})  # what is made in pieces, and not whole as well

    # -- equations -------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn) -> None:
        """Write one equation."""
        self.needed_by(self._said(eqn))
        ins = [self.layout(a) for a in eqn.invars]
        if eqn.primitive.name in REMAT and any(x is not SHARED for x in ins):
            self._remat(eqn)
            return
        if all(x is SHARED for x in ins):
            row = self.cut_at_birth.get(eqn.outvars[0]) if eqn.outvars else None
            if row and (piece := self.made_as_rows(eqn.outvars[0], row)):
                self._define(eqn, [row], [piece])
                return
            made: Sequence[Atom] = self.b.copy(eqn, [self.read(a, None) for a in eqn.invars], _types(eqn))
            self._define(eqn, [SHARED] * len(made), made)
            return
        if self._stays_open(eqn, ins):
            terms = [self._made[a, PARTIAL] if isinstance(x, Partial) else self.read(a, None)
                     for a, x in zip(eqn.invars, ins, strict=True)]  # fmt: skip
            self._define(eqn, [PARTIAL], self.b.copy(eqn, terms, _types(eqn)))
            return
        way = choose(eqn, [self.operand(a) for a in eqn.invars], self.shards)
        made = self.carried_out(eqn, way)
        if way.reduce == "sum":
            self._define(eqn, [PARTIAL], made)
        else:
            self._define(eqn, way.outs, self.reduced(way.reduce, made) if way.reduce else made)
        if eqn.primitive.name in SAME_NUMBERS and self.operand(eqn.invars[0]).is_input:
            self.inputs.update(eqn.outvars)

    def _define(self, eqn: JaxprEqn, layouts: Sequence[Placed], made: Sequence[Atom]) -> None:
        for v, x, value in zip(eqn.outvars, layouts, made, strict=True):
            self.define(v, x, value)

    def _stays_open(self, eqn: JaxprEqn, ins: Sequence[Placed]) -> bool:
        """Whether an equation is linear in sums that nothing else reads, so that they may be made later."""
        name = eqn.primitive.name
        opens = [a for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, Partial) and isinstance(a, Var)]
        if not opens or any(self._uses[a] != 1 for a in opens) or any(isinstance(x, Rows) for x in ins):
            return False
        if name in _LINEAR:
            return True
        if name in _ADDS:
            return len(opens) == len(ins) and all(a.aval.shape == eqn.outvars[0].aval.shape for a in opens)
        # by a known number only: a term of 0 times what may be infinite is not a number
        factor = next((a.val for a in eqn.invars if isinstance(a, Literal) and not a.aval.ndim), np.nan)
        if name not in ("mul", "div") or not np.isfinite(factor):
            return False
        inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        return name == "mul" or bool(isinstance(ins[0], Partial) and inexact and factor != 0)

    def _said(self, eqn: JaxprEqn) -> str:
        where = scope_of(eqn) or origin_of(eqn) or self.within
        operands = ", ".join(short_type(a.aval) for a in eqn.invars[:2])
        return f"{eqn.primitive.name} of {operands}" + (f" ({where})" if where else "")

    def carried_out(self, eqn: JaxprEqn, way: Way) -> list[Atom]:
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, way.operands, strict=True)]
        if way.write:
            return _WRITE[way.write](self, eqn, way, atoms)
        if way.reduce:
            atoms = [self._without_padding(a, x, row, way.reduce)
                     for a, x, row in zip(eqn.invars, atoms, way.operands, strict=True)]  # fmt: skip
        types = [self.shards.cut(v.aval, x) for v, x in zip(eqn.outvars, way.outs, strict=True)]
        return list(self.b.copy(eqn, atoms, types, **(way.params(types) if way.params else {})))

    def _without_padding(self, whole: Atom, piece: Atom, row: Rows | None, op: str) -> Atom:
        """A piece with what changes nothing in the place of padding."""
        if row is None or not self.shards.pads(whole.aval.shape[row.axis], row):
            return piece
        size = whole.aval.shape[row.axis]
        (nothing,) = self.b.call(identity_of(op, piece.aval.shape, piece.aval.dtype))
        return self.b.call(kept(row.axis, size), piece, self.start(size, row), nothing)[0]

    def _pick(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Entries of a dimension that is cut, by index: each shard gives those that it has."""
        (row, _), p, (x, _) = way.operands, eqn.params, eqn.invars
        assert row is not None
        size = x.aval.shape[row.axis]
        term = picked(way.at, size, p["dimension_numbers"], p["slice_sizes"], p["mode"], p["fill_value"])
        return self.b.call(term, *atoms, self.start(size, row))

    def _put(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Updates of a dimension that is cut, by index: each shard makes those that are its own."""
        (row, *_), piece = way.operands, atoms[0]
        assert row is not None
        size = eqn.invars[0].aval.shape[row.axis]
        clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
        own = own_indices(way.at, size, piece.aval.shape[row.axis], clips)
        (at,) = self.b.call(own, atoms[1], self.start(size, row))
        return list(self._scatter(eqn, [piece, at, atoms[2]], mode=jax.lax.GatherScatterMode.FILL_OR_DROP))

    def _add_up(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Updates that are cut: each shard adds its own to nothing, and the first one to what there was."""
        _, of, row = way.operands
        assert row is not None and of is not None
        updates = self._without_padding(eqn.invars[2], atoms[2], row, "sum")
        (first,) = self.b.call(on_first, atoms[0], self.start(eqn.invars[2].aval.shape[row.axis], row))
        return list(self._scatter(eqn, [first, atoms[1], updates]))

    def _scatter(self, eqn: JaxprEqn, atoms: list[Atom], **params: Any) -> list[Var]:
        return self.b.copy(eqn, atoms, [atoms[0].aval], indices_are_sorted=False, unique_indices=False, **params)

    def _arg_reduce(self, eqn: JaxprEqn, way: Way, atoms: list[Atom]) -> list[Atom]:
        """Where the best entry is: the lowest of the positions of those that are the best of all."""
        (row,), (x,) = way.operands, atoms
        assert row is not None
        largest = eqn.primitive.name == "argmax"
        op, size = ("max" if largest else "min"), eqn.invars[0].aval.shape[row.axis]
        start = self.start(size, row)
        (nothing,) = self.b.call(identity_of(op, x.aval.shape, x.aval.dtype))
        found, at = self.b.call(best_local(row.axis, size, largest), x, start, nothing)
        (best,) = self.reduced(op, [found])
        (lowest,) = self.reduced("min", self.b.call(candidates(size), found, best, at))
        (v,) = eqn.outvars
        return self.b.call(converted(np.dtype(v.aval.dtype)), *self.b.call(decided, lowest))

    # -- bodies ----------------------------------------------------------------------------------

    def _remat(self, eqn: JaxprEqn) -> None:
        (body,) = bodies(eqn)
        inner = opened(body)
        flat = inline_calls(closed((), (), inner.invars, inner.outvars, inner.eqns, inner))
        w = SplitWriter(flat, self.shards, self.gathers, self._said(eqn))
        atoms: list[Atom] = []
        for a, v in zip(eqn.invars, opened(flat).invars, strict=True):
            row = x if isinstance(x := self.layout(a), Rows) else None
            atoms.append(self.read(a, row))
            w.define(v, row or SHARED, w.b.input(self.shards.cut(v.aval, row or SHARED)))
            if isinstance(a, Var) and a in self.inputs:
                w.inputs.add(v)
        made, layouts = w.write(opened(flat))
        written = w.b.build(made)
        constants = [self.b.constant(c) for c in written.consts]  # a body of remat has none of its own
        new: Any = written.jaxpr.replace(
            constvars=[],
            invars=[*written.jaxpr.constvars, *written.jaxpr.invars],
            debug_info=written.jaxpr.debug_info.with_unknown_names(),
        )
        types = [a.aval for a in made]
        outs = self.b.copy(eqn, [*constants, *atoms], types, **with_bodies(eqn, [new]))
        self._define(eqn, layouts, outs)

    def write(self, inner: Jaxpr, wanted: Mapping[int, int | None] | None = None) -> tuple[list[Atom], list[Placed]]:
        """Write all equations; the outputs, and how they lie: whole or cut, as is asked for, or as they are made."""
        for eqn in inner.eqns:
            self.equation(eqn)
        made: list[Atom] = []
        layouts: list[Placed] = []
        for i, a in enumerate(inner.outvars):
            self.needed_by(f"output {i}" + (f" of {self.within}" if self.within else ""))
            row = x if isinstance(x := self.layout(a), Rows) else None
            if wanted is not None:
                row = _output_cut(row, wanted.get(i, -1), a, self.shards)
            made.append(self.read(a, row))
            layouts.append(row or SHARED)
        return made, layouts


def _output_cut(row: Rows | None, axis: int | None, a: Atom, shards: Shards) -> Rows | None:
    """The cut of an output: along `axis`, or as it comes (-1), entry by entry."""
    if axis == -1:
        axis = row.axis if row else None
    return None if axis is None else shards.plain(Rows("", axis), a.aval.shape[axis])


def _types(eqn: JaxprEqn) -> list[Any]:
    return [v.aval for v in eqn.outvars]


_WRITE: Mapping[str, Callable[[SplitWriter, JaxprEqn, Way, list[Atom]], list[Atom]]] = {
    "pick": SplitWriter._pick,
    "put": SplitWriter._put,
    "add_up": SplitWriter._add_up,
    "arg_reduce": SplitWriter._arg_reduce,
}
