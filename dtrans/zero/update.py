"""Rewrite of an optimizer's update so that each rank computes only its slices.

All ranks run the rewritten program, which `dtrans.engine` writes. Sliced parameters, their
gradients and their state are inputs with a sharded dimension. If an equation mixes rows (a product
of matrices, a sort), its operands are gathered. A reduction over rows becomes an all-reduce.
Independent all-reduces are merged into one equation.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtrans._jax import opened
from dtrans.engine.layout import Gathered, ShardLayout, Shards, Sliced
from dtrans.engine.merged_reductions import merge_reductions
from dtrans.engine.writer import SplitWriter, written
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED
from dtrans.step.halves import Name, UpdateProgram


def slice_half(
    half: UpdateProgram, slices: Mapping[Name, Sliced], degree: int, axis_name: str
) -> tuple[UpdateProgram, tuple[Gathered, ...]]:
    """Rewrite an optimizer's update so that each rank computes only its slices of the new state.

    Args:
      half: the update of one device: new parameters and state from gradients.
      slices: the inputs and outputs that are slices, by name.
      degree: the number of ranks.
      axis_name: the named axis of the ranks.

    Returns:
      The update of a rank, and the values that this update gathers.
    """
    shards = Shards(degree, (axis_name,), "rank", label="optimizer", shares_work=False)
    flat = eliminate_dead(inline_calls(half.jaxpr))
    inner = opened(flat)

    def layout(name: Name) -> ShardLayout:
        sliced = slices.get(name)
        return SHARED if sliced is None else shards.plain(sliced.row, sliced.size)

    def write(writer: SplitWriter) -> tuple[UpdateProgram, tuple[Gathered, ...]]:
        writer.out_names = half.out_names
        for v, name in zip(inner.invars, half.in_names, strict=True):
            writer.take(v, layout(name), is_input=True)
        outputs, _ = writer.write(inner, lambda i, _: layout(half.out_names[i]))
        jaxpr = eliminate_dead(merge_reductions(writer.b.build(outputs)))
        return UpdateProgram(jaxpr, half.in_names, half.out_names), tuple(writer.gathers)

    return written(flat, shards, write)
