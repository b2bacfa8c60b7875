"""Reduction of gradients that ranks store as slices.

Gradients are summed over the sharding axis first. The resulting slices are then summed over the
groups of ranks:

    sliced       padded, reduce_scatter over the sharding axis; all_reduce of the slice over groups
    layers       scattered by a loop, layer by layer; all_reduce of the slice over groups
    full         all_reduce over both axes
    replicated   no reduction: every rank computes the same gradient, and keeps its slice of it
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
    """Reduction of one gradient, if ranks may store it as slices.

    Attributes:
      axis: the dimension along which the gradient is scattered; None if the gradient is not cut.
      layers: True if a loop has already scattered the gradient, layer by layer.
    """

    axis: int | None = None
    layers: bool = False


def scatter_specs(
    slices: Mapping[str, Sliced],
    layers: Collection[str],
    compress: Mapping[str, str],
    replicated: Collection[str] = (),
    groups: Mapping[str, int] | None = None,
) -> Callable[[str], ScatterSpec]:
    """Return a function that maps a leaf to the spec of its gradient's reduction.

    Args:
      slices: the cut leaves.
      layers: the leaves whose gradients are scattered in loops.
      compress: maps a leaf to the type in which its gradient is reduced; other gradients keep their
        type.
      replicated: leaves whose gradients are equal on all ranks.
      groups: maps a leaf to the stage of a pipeline that computes its gradient.
    """
    groups = groups or {}

    def spec_of(leaf: str) -> ScatterSpec:
        return ScatterSpec(
            compress=compress.get(leaf),
            axis=slices[leaf].axis if leaf in slices else None,
            layers=leaf in layers,
            group=groups.get(leaf, 0),
            is_replicated=leaf in replicated,
        )

    return spec_of


class Scatterer(Reducer):
    """Writer of reductions of gradients; `means` maps each cut leaf to a slice of its gradient.

    Args:
      b, values, options, example_count, suffix, scale: as for `Reducer`.
      slices: the cut leaves.
      spec_of: returns the spec of a leaf's gradient.
    """

    # False in subclasses whose callers sum `means` over groups and micro-steps
    adds_up = True

    options: ShardingOptions

    def __init__(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        options: ShardingOptions,
        example_count: Atom | None,
        suffix: str,
        slices: Mapping[str, Sliced],
        spec_of: Callable[[str], ScatterSpec],
        scale: Atom | None = None,
    ) -> None:
        super().__init__(b, values, options, example_count, suffix, spec_of, scale)
        self.spec_of = spec_of
        self.slices = slices

    def add(self, leaf: str, grad: Atom) -> None:
        """Add a gradient; if it completes its bucket, reduce the bucket.

        Replicated gradients are not reduced.
        """
        if not self.spec_of(leaf).is_replicated:
            super().add(leaf, grad)
            return
        b, options, cut = self.b, self.options, self.slices.get(leaf)
        role, b.role = b.role, DIST
        # a loop over layers may have computed the slice already
        if cut is not None and grad.aval.shape[cut.axis] == cut.size != cut.part:
            (index,) = b.bind(trainer_index_p, over=(options.axis_name,))
            grad = b.call(_take_slice(cut.axis, cut.part, cut.padded), grad, index)[0]
        if self.adds_up and options.reduce.op == "sum" and options.trainers > 1:
            # a sum over ranks would contain the replicated gradient once for each rank
            grad = b.call(times(options.trainers), grad)[0]
        b.role = role
        self.means[leaf] = grad

    def sums(self, bucket: Bucket, sent: Sequence[Atom]) -> Sequence[Atom]:
        """Write the sums over all ranks; return them, as slices if the leaves are cut."""
        spec, options = self.spec_of(bucket.leaves[0]), self.options
        if spec.axis is None:
            return super().sums(bucket, sent)
        slices = sent
        if not spec.layers:
            slices = self._scatter(bucket, sent, spec.axis)
        if options.replicas == 1:
            return slices
        return self._sum(bucket.name, slices, (options.slices.replica_axis_name,))

    def _scatter(self, bucket: Bucket, sent: Sequence[Atom], axis: int) -> Sequence[Atom]:
        """Write the reduce-scatter of a bucket over the sharding axis."""
        b, options = self.b, self.options
        padded_sizes = {self.slices[n].size: self.slices[n].padded for n in bucket.leaves}
        parts = []
        for x in sent:
            parts += b.call(padded(axis, padded_sizes[x.aval.shape[axis]]), x)
        over = (options.axis_name,)
        return b.bind(
            reduce_scatter_p, *parts, name=bucket.name, over=over, size=options.degree, axis=axis
        )

    def _compress(self, bucket: Bucket) -> str | None:
        """Return the type in which a bucket is reduced; None for its own type."""
        if self.spec_of(bucket.leaves[0]).layers and self.options.replicas == 1:
            return None
        return super()._compress(bucket)


@functools.cache
def _take_slice(
    axis: int, part: int, padded_size: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that maps an array and the index of a rank to the slice of that rank."""
    return lambda x, index: rows_from(axis, part, padded_size)(x, index * part)
