"""Functions that write an equation by the strategy that `dtrans.engine.rules` chose.

Most equations are copied, and each shard runs them on its *piece*, the part of a sharded value that
it has. Some equations are replaced by several equations: moves to other positions of a piece,
gathers and scatters along the sharded dimension, and argmax or argmin over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import Atom, JaxprEqn, Var, resized
from dtrans.engine.array_fns import (
    argmax_marks,
    best_local,
    broadcast_to,
    decode_position,
    local_indices,
    pick_entries,
    select_slots,
    take_entries,
)
from dtrans.engine.row_moves import Move
from dtrans.engine.rules import Strategy
from dtrans.engine.values import ShardValues
from dtrans.ir.array_fns import converted
from dtrans.ops import identity_of
from dtrans.rows.layout import RowAxis


def write_strategy(w: ShardValues, eqn: JaxprEqn, way: Strategy) -> list[Atom]:
    """Write one equation by the strategy that was chosen for it; return this shard's outputs.

    If the strategy has a reduction over shards, the outputs are this shard's terms.
    """
    atoms = [w.read(a, row) for a, row in zip(eqn.invars, way.operands, strict=True)]
    if way.write:
        return _WRITE[way.write](w, eqn, way, atoms)
    return _write_on_pieces(w, eqn, way, atoms, way.reduce)


def _write_on_pieces(
    w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom], op: str
) -> list[Atom]:
    """Copy an equation; replace padding by the neutral number of `op`, unless `op` is empty."""
    if op:
        pieces = zip(eqn.invars, atoms, way.operands, strict=True)
        atoms = [_without_padding(w, a, x, row, op) for a, x, row in pieces]
    types = w.shards.part_types(eqn.outvars, way.outs)
    params = way.params(types) if way.params else {}
    return list(w.b.copy(eqn, atoms, types, **params))


def _write_zeros_as_padding(
    w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]
) -> list[Atom]:
    return _write_on_pieces(w, eqn, way, atoms, "sum")


def _without_padding(w: ShardValues, full: Atom, piece: Atom, row: RowAxis | None, op: str) -> Atom:
    """Replace the padding in `piece` by the neutral number of the reduction `op`.

    `piece` is a shard's piece of the value `full`. If `row` is None, the value is not sharded, and
    `piece` is returned unchanged.
    """
    if row is None:
        return piece
    return w.pieces.without_padding(piece, full.aval.shape[row.axis], row, op)


def _write_move(w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
    """Write equations that move entries within each shard's piece (`dtrans.engine.row_moves`)."""
    found, pieces = way.moves, atoms
    assert found is not None
    if found.params is not None:
        axis = found.moves[0].axis
        local = sum(a.aval.shape[axis] for a in atoms if a.aval.ndim)
        if eqn.primitive.name == "tile":
            local *= eqn.params["reps"][axis]
        types = [resized(v.aval, axis, local) for v in eqn.outvars]
        pieces = list(w.b.copy(eqn, atoms, types, **found.params(types)))
    return [_in_slots(w, pieces[0], move, atoms) for move in found.moves]


def _in_slots(w: ShardValues, piece: Atom, move: Move, atoms: Sequence[Atom]) -> Atom:
    """Write the equations that move the entries of a piece; return the new piece.

    Args:
      w: writer of the program.
      piece: the old piece.
      move: the new positions.
      atoms: operands of the equation. For a `pad` equation, the last one is the padding value.
    """
    if not move.keeps(piece.aval.shape[move.axis]):
        piece = _take_slots(w, piece, move)
    if move.filled is None:
        return piece
    (value,) = w.b.call(broadcast_to(piece.aval.shape), atoms[-1])
    return w.b.call(select_slots(move.axis), piece, w.pieces.shard_row(~move.filled), value)[0]


def _take_slots(w: ShardValues, piece: Atom, move: Move) -> Atom:
    first, *others = slots = move.slots
    begin, end = int(first[0]), int(first[-1]) + 1
    is_run = len(first) == end - begin and (np.diff(first) == 1).all()
    if is_run and all((other == first).all() for other in others):
        return w.b.part(piece, move.axis, begin, end)
    return w.b.call(take_entries(move.axis), piece, w.pieces.shard_row(slots))[0]


def _write_pick(w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
    """Write a gather along the sharded dimension; return this shard's term of the output."""
    (row, _), p, (x, _) = way.operands, eqn.params, eqn.invars
    assert row is not None
    size = x.aval.shape[row.axis]
    term = pick_entries(
        way.at, size, p["dimension_numbers"], p["slice_sizes"], p["mode"], p["fill_value"]
    )
    return w.b.call(term, *atoms, w.pieces.start(size, row))


def _write_put(w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]) -> list[Atom]:
    """Write a scatter along the sharded dimension: each shard writes into its piece."""
    (row, *_), piece = way.operands, atoms[0]
    assert row is not None
    size = eqn.invars[0].aval.shape[row.axis]
    clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
    to_local = local_indices(way.at, size, piece.aval.shape[row.axis], clips)
    (at,) = w.b.call(to_local, atoms[1], w.pieces.start(size, row))
    return list(
        _scatter(w, eqn, [piece, at, atoms[2]], mode=jax.lax.GatherScatterMode.FILL_OR_DROP)
    )


def _write_scatter_add(
    w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]
) -> list[Atom]:
    """Write a scatter-add with sharded updates; return this shard's term of the output.

    The first shard adds its updates to the operand; other shards add theirs to zeros.
    """
    _, of, row = way.operands
    assert row is not None and of is not None
    updates = _without_padding(w, eqn.invars[2], atoms[2], row, "sum")
    first = w.term(eqn.invars[0])
    return list(_scatter(w, eqn, [first, atoms[1], updates]))


def _scatter(w: ShardValues, eqn: JaxprEqn, atoms: list[Atom], **params: Any) -> list[Var]:
    return w.b.copy(
        eqn, atoms, [atoms[0].aval], indices_are_sorted=False, unique_indices=False, **params
    )


def _write_arg_reduce(
    w: ShardValues, eqn: JaxprEqn, way: Strategy, atoms: list[Atom]
) -> list[Atom]:
    """Write an argmax or argmin; return the first position of the best entry over all shards."""
    (row,), (x,) = way.operands, atoms
    assert row is not None
    largest = eqn.primitive.name == "argmax"
    op, size = ("max" if largest else "min"), eqn.invars[0].aval.shape[row.axis]
    start = w.pieces.start(size, row)
    (fill,) = w.b.call(identity_of(op, x.aval.shape, x.aval.dtype))
    found, at = w.b.call(best_local(row.axis, size, largest), x, start, fill)
    (best,) = w.reduced_here(op, [found])
    (lowest,) = w.reduced_here("min", w.b.call(argmax_marks(size), found, best, at))
    (v,) = eqn.outvars
    return w.b.call(converted(np.dtype(v.aval.dtype)), *w.b.call(decode_position, lowest))


_WRITE: Mapping[str, Callable[[ShardValues, JaxprEqn, Strategy, list[Atom]], list[Atom]]] = {
    "move": _write_move,
    "pick": _write_pick,
    "put": _write_put,
    "add_up": _write_scatter_add,
    "arg_reduce": _write_arg_reduce,
    "fill_padding": _write_zeros_as_padding,
}
