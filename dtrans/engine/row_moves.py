"""Rules for concatenations, slices, padding and reversals along the sharded dimension.

No entry moves to another shard. Instead the result gets a layout with an order
(`dtrans.rows.layout.RowOrder`). The part of a value that a shard has is its *piece*. The positions
of entries in a piece are its *slots*. A shard fills each slot of the result with an entry of its
pieces of the operands. If another value already has an order that suits the result, the result gets
the same order. Then equations that read both values need no further move.

If a later equation gathers the result, it may cost less to gather the operands instead.
`dtrans.engine.writer.written` writes both programs and compares them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, resized
from dtrans.engine.layout import Shards, sharded_along
from dtrans.rows.layout import SHARED, RowAxis, Shared, row_axes


Ins = Sequence[Shared | RowAxis]


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """New positions of the entries of one shard's piece, after a concatenation, slice or padding.

    Attributes:
      axis: the axis along which entries are selected.
      slots: array [shards, new size]: for each position of the new piece, the position of its entry
        in the old piece.
      filled: array [shards, new size], True for positions that get the padding value of a `pad`
        equation; None if there are none.
    """

    axis: int
    slots: np.ndarray
    filled: np.ndarray | None = None

    def keeps(self, local: int) -> bool:
        """Return True if the move is the identity on pieces with `local` entries."""
        return self.slots.shape[1] == local and bool((self.slots == np.arange(local)).all())


@dataclasses.dataclass(frozen=True, eq=False)
class RowMoves:
    """Result of a rule for an equation that moves entries along the sharded dimension.

    Attributes:
      operands: layout in which each operand is read.
      outs: layout of each output.
      params: function of the output types on a shard, which returns changed parameters of the
        equation. The equation runs on pieces with these parameters, before the moves. None if the
        moves replace the equation.
      moves: the move of each output.
    """

    operands: tuple[RowAxis | None, ...]
    outs: tuple[RowAxis, ...]
    params: Callable[[Sequence[Any]], dict[str, Any]] | None
    moves: tuple[Move, ...]


def moves_of(eqn: JaxprEqn, ins: Ins, shards: Shards, known: Sequence[RowAxis]) -> RowMoves | None:
    """Return the moves of entries within each shard that replace an equation; None if impossible.

    Args:
      eqn: the equation.
      ins: layout of each operand.
      shards: number and mesh axes of the shards.
      known: layouts of other values whose entries are not in order (`dtrans.rows.layout.RowOrder`).
        The output gets one of these layouts if possible.
    """
    rule = RULES.get(eqn.primitive.name)
    rows = row_axes(ins)
    if rule is None or not rows or not all(math.prod(v.aval.shape) for v in eqn.outvars):
        return None
    try:
        return rule(eqn, ins, _Rows(shards, known, rows[0].axis))
    except _NoEntriesError:
        return None


class _NoEntriesError(Exception):
    """Signal: a piece consists of padding only, so there is no real entry with which to pad."""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Arguments of all rules: shards, sharded axis, and layouts with entries in another order."""

    shards: Shards
    known: Sequence[RowAxis]
    axis: int

    def arrange(
        self, size: int, entries: np.ndarray, everywhere: np.ndarray | None = None
    ) -> tuple[RowAxis, Move]:
        """Choose the layout of an output; return the layout, and the move into its slots.

        Args:
          size: size of the output along the axis.
          entries: array [shards, local]: for each entry of the old pieces, the index in the output,
            or -1 if the output does not contain the entry.
          everywhere: mask of the output; True for entries that every shard can compute, such as the
            padding of a `pad`. `entries` has all other entries of the output.
        """
        free = np.zeros(size, bool) if everywhere is None else everywhere
        targets = [self.shards.entries(size, sharded_along(self.axis))]
        targets += [self.shards.entries(size, row) for row in self._known(size)]
        for target in targets:
            if all(_has(local_entries, target[i], free) for i, local_entries in enumerate(entries)):
                break
        else:
            target = _pack(entries, np.flatnonzero(free))
        if self.shards.finite_padding and any(map(_has_padding_only, entries, target)):
            raise _NoEntriesError
        return self.shards.ordered(self.axis, size, target), self._move(size, entries, target, free)

    def _known(self, size: int) -> Iterator[RowAxis]:
        for row in self.known:
            if row.order is not None and size == row.width * sum(
                x >= 0 for slots in row.order.slots for x in slots
            ):
                yield row

    def _move(self, size: int, entries: np.ndarray, target: np.ndarray, free: np.ndarray) -> Move:
        slots = np.full(target.shape, -1)
        for i, local_entries in enumerate(entries):
            place = np.full(size + 1, -1)  # the last entry stands for padding
            place[np.where(local_entries < 0, size, local_entries)] = np.arange(len(local_entries))
            place[size] = -1
            slots[i] = place[np.where(target[i] < 0, size, target[i])]
        # Padding repeats a real entry, whose derivative is finite. If possible, all shards select
        # the entry at one index, because equal indices become one static slice.
        shape = slots.shape
        like_others = np.broadcast_to(np.maximum(slots.max(axis=0), 0), shape)
        first = np.broadcast_to(np.argmax(entries >= 0, axis=1)[:, None], shape)
        others = np.where(np.take_along_axis(entries, like_others, axis=1) >= 0, like_others, first)
        is_filled = (target >= 0) & free[np.maximum(target, 0)]
        return Move(
            self.axis, np.where(slots < 0, others, slots), is_filled if is_filled.any() else None
        )


def _has_padding_only(local_entries: np.ndarray, target: np.ndarray) -> bool:
    return bool((local_entries < 0).all() and (target < 0).any())


def _has(local_entries: np.ndarray, target: np.ndarray, free: np.ndarray) -> bool:
    """Return True if a shard has, or can compute, the entry for each position of its new piece."""
    wanted = target[target >= 0]
    return bool(np.isin(wanted[~free[wanted]], local_entries).all())


def _pack(entries: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return the entries in the slots of each shard, as an array [shards, slots].

    A shard's slots contain the shard's entries, and then some of the `free` entries. All shards get
    about the same number of entries. A slot without an entry contains -1.

    Args:
      entries: array [shards, local]: the entries that each shard has; -1 for padding.
      free: entries that every shard can compute.
    """
    rows = [local_entries[local_entries >= 0] for local_entries in entries]
    local = max(-(-(sum(map(len, rows)) + len(free)) // len(rows)), *map(len, rows))
    found = np.full((len(rows), local), -1)
    for slots, local_entries in zip(found, rows, strict=True):
        more, free = np.split(free, [min(local - len(local_entries), len(free))])
        slots[: len(local_entries) + len(more)] = [*local_entries, *more]
    return found


# -- rules -----------------------------------------------------------------------------------------


def _slice(eqn: JaxprEqn, ins: Ins, rows: _Rows) -> RowMoves | None:
    (row,) = ins
    assert isinstance(row, RowAxis)
    (x,), (out,), axis = eqn.invars, eqn.outvars, rows.axis
    begins, ends, steps = (list(eqn.params[k] or [1] * x.aval.ndim) for k in _SLICE)
    entries = rows.shards.entries(x.aval.shape[axis], row)
    begin, step = int(begins[axis]), int(steps[axis])
    new, rest = np.divmod(entries - begin, step)
    is_selected = (entries >= begin) & (entries < ends[axis]) & (rest == 0)
    to, move = rows.arrange(out.aval.shape[axis], np.where(is_selected, new, -1))
    begins[axis], ends[axis], steps[axis] = 0, entries.shape[1], 1
    params = dict(zip(_SLICE, map(tuple, (begins, ends, steps)), strict=True))
    if x.aval.shape == resized(out.aval, axis, x.aval.shape[axis]).shape:
        return RowMoves((row,), (to,), None, (move,))  # only this dimension is sliced
    return RowMoves((row,), (to,), lambda _: params, (move,))


_SLICE = ("start_indices", "limit_indices", "strides")


def _split(eqn: JaxprEqn, ins: Ins, rows: _Rows) -> RowMoves | None:
    (row,) = ins
    if not isinstance(row, RowAxis) or eqn.params["axis"] != rows.axis:
        return None
    entries = rows.shards.entries(eqn.invars[0].aval.shape[rows.axis], row)
    outs, moves, begin = [], [], 0
    for size in map(int, eqn.params["sizes"]):
        is_selected = (entries >= begin) & (entries < begin + size)
        to, move = rows.arrange(size, np.where(is_selected, entries - begin, -1))
        outs.append(to)
        moves.append(move)
        begin += size
    return RowMoves((row,), tuple(outs), None, tuple(moves))


def _rev(eqn: JaxprEqn, ins: Ins, rows: _Rows) -> RowMoves | None:
    (row,) = ins
    if not isinstance(row, RowAxis) or rows.axis not in eqn.params["dimensions"]:
        return None
    size = eqn.invars[0].aval.shape[rows.axis]
    entries = rows.shards.entries(size, row)
    to, move = rows.arrange(size, np.where(entries < 0, -1, size - 1 - entries))
    others = tuple(d for d in eqn.params["dimensions"] if d != rows.axis)
    if not others:
        return RowMoves((row,), (to,), None, (move,))
    return RowMoves((row,), (to,), lambda _: {"dimensions": others}, (move,))


def _concatenate(eqn: JaxprEqn, ins: Ins, rows: _Rows) -> RowMoves | None:
    """Return the moves of a concatenation of pieces; replicated operands are sharded first."""
    if eqn.params["dimension"] != rows.axis or any(x.axis != rows.axis for x in row_axes(ins)):
        return None
    begin, entries, operands = 0, [], []
    for a, x in zip(eqn.invars, ins, strict=True):
        size = a.aval.shape[rows.axis]
        row = x if isinstance(x, RowAxis) else sharded_along(rows.axis)
        local_entries = rows.shards.entries(size, row)
        entries.append(np.where(local_entries < 0, -1, local_entries + begin))
        operands.append(row)
        begin += size
    to, move = rows.arrange(begin, np.concatenate(entries, axis=1))
    return RowMoves(tuple(operands), (to,), lambda _: {}, (move,))


def _tile(eqn: JaxprEqn, ins: Ins, rows: _Rows) -> RowMoves | None:
    (row,), reps = ins, eqn.params["reps"]
    if not isinstance(row, RowAxis) or len(reps) != eqn.invars[0].aval.ndim:
        return None
    size = eqn.invars[0].aval.shape[row.axis]
    local_entries = rows.shards.entries(size, row)
    entries = [
        np.where(local_entries < 0, -1, local_entries + i * size) for i in range(reps[row.axis])
    ]
    to, move = rows.arrange(size * len(entries), np.concatenate(entries, axis=1))
    return RowMoves((row,), (to,), lambda _: {}, (move,))


def _pad(eqn: JaxprEqn, ins: Ins, rows: _Rows) -> RowMoves | None:
    """Return the moves of a `pad`; every shard must have the full padding value."""
    row, value = ins
    if not isinstance(row, RowAxis) or value is not SHARED:
        return None
    (x, _), (out,), axis = eqn.invars, eqn.outvars, rows.axis
    config = [tuple(map(int, of)) for of in eqn.params["padding_config"]]
    low, _, between = config[axis]
    size = out.aval.shape[axis]
    local_entries = rows.shards.entries(x.aval.shape[axis], row)
    new = local_entries * (between + 1) + low
    entries = np.where((local_entries >= 0) & (new >= 0) & (new < size), new, -1)
    everywhere = np.ones(size, bool)
    everywhere[entries[entries >= 0]] = False
    to, move = rows.arrange(size, entries, everywhere)
    config[axis] = (0, 0, 0)
    return RowMoves((row, None), (to,), lambda _: {"padding_config": tuple(config)}, (move,))


RULES: Mapping[str, Callable[[JaxprEqn, Ins, _Rows], RowMoves | None]] = {
    "slice": _slice,
    "split": _split,
    "rev": _rev,
    "concatenate": _concatenate,
    "tile": _tile,
    "pad": _pad,
}


# -- reshapes --------------------------------------------------------------------------------------


def regroup(eqn: JaxprEqn, row: RowAxis, shards: Shards) -> RowAxis | None:
    """Return the output layout of a reshape that merges or splits the sharded axis.

    Each shard reshapes its piece. Return None if entries would have to change shards.
    """
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    entries = shards.entries(old[row.axis], row)
    for axis in range(len(new)):
        before, after = math.prod(old[: row.axis]), math.prod(new[:axis])
        if not before or not after or max(before, after) % min(before, after):
            continue
        if before > after:
            found = _merge_axes(entries, old[row.axis], before // after, new[axis])
        elif after > before:
            found = _split_copies(entries, old[row.axis], after // before, new[axis])
        else:
            continue
        if found is not None:
            return shards.ordered(axis, new[axis], found)
    return None


def _merge_axes(entries: np.ndarray, size: int, times: int, new: int) -> np.ndarray | None:
    """Return each shard's entries of an axis into which a reshape merges the sharded axis.

    The merged axes have `times` entries before the sharded axis, then its `size` entries, and then
    all later ones. Return None if `times * size` does not divide `new`, the size of the new axis.
    """
    if new % (times * size):
        return None
    begins = np.arange(times)[:, None] * size
    all_of = [
        np.where(local_entries < 0, -1, local_entries + begins).reshape(-1)
        for local_entries in entries
    ]
    return _wider(np.stack(all_of), new // (times * size))


def _split_copies(entries: np.ndarray, size: int, times: int, new: int) -> np.ndarray | None:
    """Return each shard's entries of the axis that stays sharded after a reshape splits an axis.

    The reshape splits the sharded axis into `times` equal blocks, and the new axis counts within a
    block. Return None if a shard does not have the same entries of every block.
    """
    shards, local = entries.shape
    if size % times or local % times:
        return None
    each = size // times
    copies = entries.reshape(shards, times, local // times)
    within = np.where(copies < 0, -1, copies - np.arange(times)[:, None] * each)
    if (within != within[:, :1]).any() or within.max() >= each:
        return None
    if new % each == 0:
        return _wider(within[:, 0], new // each)
    width = each // new
    if each % new or within.shape[2] % width:
        return None
    runs = within[:, 0].reshape(shards, -1, width)
    first = runs[..., :1]
    full_runs = np.where(first < 0, -1, first + np.arange(width))
    is_run = (runs == full_runs).all() and (np.maximum(first, 0) % width == 0).all()
    if not is_run:
        return None
    return np.where(first < 0, -1, first // width)[..., 0]


def _wider(entries: np.ndarray, width: int) -> np.ndarray:
    """Return the entries of an axis in which each entry is replaced by a run of `width` entries."""
    wide = np.where(entries[..., None] < 0, -1, entries[..., None] * width + np.arange(width))
    return wide.reshape(len(entries), -1)
