"""The optimize half on a rank's slices: one program for all ranks, which know only when they run where their rows are.

The engine writes it (`dtrans.engine`): leaves that are cut, their gradients and their state are inputs on pieces. Where
an update mixes rows (a product of matrices, a sort), the engine gathers what is mixed; a reduction over rows becomes an
all-reduce. Independent all-reduces are one equation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrans._jax import Atom, opened
from dtrans.engine.layout import Gathered, Placed, Shards
from dtrans.engine.merged_reductions import merge_reductions
from dtrans.engine.pieces import Pieces
from dtrans.engine.writer import SplitWriter, written
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice
from dtrans.step.cut import Name, OptimizeHalf
from dtrans.zero.choose_slices import Sliced


class RankRows:
    """A rank's rows of one leaf (`dtrans.rows.writer.BlockRows`).

    Args:
      b: writes the program, or the body, in which they are wanted.
      sliced: how the leaf is cut.
      axis_name: the axis that the ranks are on.
    """

    def __init__(self, b: Builder, sliced: Sliced, axis_name: str) -> None:
        self.sliced = sliced
        self.axis_name = axis_name
        self._pieces = Pieces(b, Shards(sliced.degree, (axis_name,)))

    def of(self, row: RowAxis) -> Slice:
        return self._pieces.of(self.sliced.size * row.width, row)

    def inside(self, b: Builder) -> RankRows:
        return RankRows(b, self.sliced, self.axis_name)

    def operands(self) -> Sequence[Atom]:
        return ()

    def without_padding(self, atoms: Sequence[Atom], step: Step) -> list[Atom]:
        """The operands of a reduction, with what changes nothing in the place of padding."""
        op = step.reduce or ""
        return [a if row is None else self._pieces.without_padding(a, self.sliced.size * row.width, row, op)
                for a, row in zip(atoms, step.operands, strict=True)]  # fmt: skip


def sliced_half(
    half: OptimizeHalf, cuts: Mapping[Name, Sliced], degree: int, axis_name: str
) -> tuple[OptimizeHalf, tuple[Gathered, ...]]:
    """Write the optimize half of a rank.

    Args:
      half: the optimize half of one device.
      cuts: inputs and outputs that ranks hold in slices.
      degree: number of ranks.
      axis_name: named axis of the ranks.

    Returns:
      The half, and what it gathers.
    """
    shards = Shards(degree, (axis_name,), "rank", label="optimizer", shares_work=False)
    flat = eliminate_dead(inline_calls(half.jaxpr))
    inner = opened(flat)

    def layout(name: Name) -> Placed:
        sliced = cuts.get(name)
        return SHARED if sliced is None else shards.plain(sliced.row, sliced.size)

    def write(w: SplitWriter) -> tuple[OptimizeHalf, tuple[Gathered, ...]]:
        w.out_names = half.out_names
        for v, name in zip(inner.invars, half.in_names, strict=True):
            w.take(v, layout(name), is_input=True)
        made, _ = w.write(inner, lambda i, _: layout(half.out_names[i]))
        jaxpr = eliminate_dead(merge_reductions(w.b.build(made)))
        return OptimizeHalf(jaxpr, half.in_names, half.out_names), tuple(w.gathers)

    return written(flat, shards, write)
