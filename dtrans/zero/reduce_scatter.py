"""Reduction of gradients that ranks store as slices.

Ranks reduce-scatter over the sharding axis, then all-reduce the slice over the outer axis.

    sliced       padded, reduce_scatter over the sharding axis; all_reduce of the slice over groups
    layers       scattered by a loop already, layer by layer; all_reduce of the slice over groups
    whole        all_reduce over both
    unreduced    nothing: all ranks compute the same gradient, and each takes its slice
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from dtrans._jax import Atom
from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.reducer import Reducer, ReduceSpec
from dtrans.ir.array_fns import padded, rows_from, times
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.ops import reduce_scatter_p, trainer_index_p
from dtrans.zero.choose_slices import Sliced
from dtrans.zero.options import ShardingOptions


@dataclasses.dataclass(frozen=True)
class ScatterSpec(ReduceSpec):
    """In what way a gradient is reduced where ranks keep slices.

    Attributes:
      axis: the dimension that it is scattered along; None for one that stays whole.
      layers: whether it has been scattered already.
    """

    axis: int | None = None
    layers: bool = False


def scatter_specs(
    slices: Mapping[str, Sliced],
    layers: Collection[str],
    compress: Mapping[str, str],
    unreduced: Collection[str] = (),
    groups: Mapping[str, int] | None = None,
) -> Callable[[str], ScatterSpec]:
    """Return a function from a leaf to the kind of its gradient.

    Args:
      slices: of the leaves that are cut.
      layers: those whose gradients loops scatter.
      compress: the types that gradients are reduced in, where these are not their own.
      unreduced: those that are the same on all ranks.
      groups: where each is made, where not all are made in one place.
    """
    places = groups or {}

    def kind(leaf: str) -> ScatterSpec:
        axis = slices[leaf].axis if leaf in slices else None
        return ScatterSpec(
            compress.get(leaf),
            axis,
            leaf in layers,
            group=places.get(leaf, 0),
            is_replicated=leaf in unreduced,
        )

    return kind


class Scatterer(Reducer):
    """Writes the reductions; `means` of leaves that are cut are slices."""

    adds_up = True  # whether `means` are what is made of all ranks, once and for all

    def __init__(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        o: ShardingOptions,
        example_count: Atom | None,
        suffix: str,
        slices: Mapping[str, Sliced],
        kind: Callable[[str], ScatterSpec],
        scale: Atom | None = None,
    ) -> None:
        super().__init__(b, values, o, example_count, suffix, kind, scale)
        self.scatter = kind
        self.slices = slices
        self.options = o

    def add(self, leaf: str, grad: Atom) -> None:
        """Receive a gradient; one that all ranks compute needs no reduction."""
        if not self.scatter(leaf).is_replicated:
            super().add(leaf, grad)
            return
        b, o, s = self.b, self.options, self.slices.get(leaf)
        role, b.role = b.role, DIST
        if s is not None and grad.aval.shape[s.axis] == s.size != s.part:
            (index,) = b.bind(trainer_index_p, over=(o.axis_name,))
            grad = b.call(_part(s.axis, s.part, s.padded), grad, index)[0]
        if self.adds_up and o.reduce.op == "sum" and o.trainers > 1:
            grad = b.call(times(o.trainers), grad)[0]
        b.role = role
        self.means[leaf] = grad

    def sums(self, bucket: Bucket, sent: Sequence[Atom]) -> Sequence[Atom]:
        """Return the sums over all ranks; for a bucket of sliced leaves, the rank's slices."""
        kind, o = self.scatter(bucket.leaves[0]), self.options
        if kind.axis is None:
            return super().sums(bucket, sent)
        mine: Sequence[Atom] = sent
        if not kind.layers:
            sizes = {self.slices[n].size: self.slices[n].padded for n in bucket.leaves}
            parts = [
                self.b.call(padded(kind.axis, sizes[x.aval.shape[kind.axis]]), x)[0] for x in sent
            ]
            over = (o.axis_name,)
            mine = self.b.bind(
                reduce_scatter_p, *parts, name=bucket.name, over=over, size=o.degree, axis=kind.axis
            )
        if o.replicas == 1:
            return mine
        return self._sum(bucket.name, mine, (o.slices.replica_axis_name,))

    def _compress(self, bucket: Bucket) -> str | None:
        """Return the type to compress a bucket to; None if a loop has reduced it already."""
        if self.scatter(bucket.leaves[0]).layers and self.options.replicas == 1:
            return None
        return super()._compress(bucket)


@functools.cache
def _part(axis: int, count: int, padded: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, index: rows_from(axis, count, padded)(x, index * count)
