"""Reduction of gradients to slices: first over the ranks of a group, then over groups.

The reduction depends on the parameter:

    a sliced parameter    reduce_scatter of the padded gradient in a group, then all_reduce over
                          groups
    layers in a loop      the loop scatters each layer's gradient, then all_reduce over groups
    a full parameter      all_reduce over all ranks
    an equal gradient     none: all ranks compute the same gradient, and each takes its slice

Gradients are packed into buckets. In stage 2, a bucket is reduced as soon as its last gradient is
computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from dtrans._jax import Atom
from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.reducer import Reducer, ReduceSpec
from dtrans.engine.layout import Sliced
from dtrans.ir.array_fns import padded, rows_from, times
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.ops import reduce_scatter_p, trainer_index_p
from dtrans.zero.options import ShardingOptions


@dataclasses.dataclass(frozen=True)
class ScatterSpec(ReduceSpec):
    """Description of how one gradient is reduced: to slices or in full.

    Attributes:
      axis: the dimension along which the gradient is scattered. None for a full gradient.
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
    """Return a function from the name of a parameter to the reduction of its gradient.

    Args:
      slices: the sliced parameters, by name.
      layers: the parameters with gradients that loops scatter layer by layer.
      compress: maps a parameter to the type in which its gradient is reduced, such as "bf16". Other
        gradients keep their type.
      replicated: parameters with gradients that are equal on all ranks.
      groups: maps a parameter to the stage of a pipeline that computes its gradient.
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
    """Writer of gradient reductions that result in slices for sliced parameters.

    Call `add` for each gradient and `finish` at the end. `means` then has the reduced gradients:
    slices for sliced parameters, full arrays for others.

    Args:
      slices: the sliced leaves, by name.
      spec_of: function from the name of a parameter to the reduction of its gradient.
      b, values, options, example_count, suffix, scale: see `Reducer`.
    """

    # False if the caller adds up `means` itself, over groups and micro-steps
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
        """Add a gradient to its bucket, and reduce the bucket if it is complete.

        A gradient that is equal on all ranks is not reduced: the rank takes its slice.

        Args:
          leaf: the name of the parameter.
          grad: the gradient.
        """
        if not self.spec_of(leaf).is_replicated:
            super().add(leaf, grad)
            return
        b, options, sliced = self.b, self.options, self.slices.get(leaf)
        role, b.role = b.role, DIST
        # a loop over layers may have computed the slice already
        if sliced is not None and grad.aval.shape[sliced.axis] == sliced.size != sliced.part:
            (index,) = b.bind(trainer_index_p, over=(options.axis_name,))
            grad = b.call(_take_slice(sliced.axis, sliced.part, sliced.padded), grad, index)[0]
        if self.adds_up and options.reduce.op == "sum" and options.trainers > 1:
            # multiply, because a sum over ranks would contain this gradient once for each rank
            grad = b.call(times(options.trainers), grad)[0]
        b.role = role
        self.means[leaf] = grad

    def sums(self, bucket: Bucket, sent: Sequence[Atom]) -> Sequence[Atom]:
        """Write the sums over all ranks of the gradients in a bucket.

        Args:
          bucket: the bucket; either all or none of its parameters are sliced.
          sent: this rank's gradients.

        Returns:
          The sums, or this rank's slices of the sums if the parameters are sliced.
        """
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
        """Write the reduce-scatter of a bucket over the ranks of a group; return the slices."""
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
        """Return the type in which a bucket is reduced, such as "bf16"; None for no cast."""
        if self.spec_of(bucket.leaves[0]).layers and self.options.replicas == 1:
            return None
        return super()._compress(bucket)


@functools.cache
def _take_slice(
    axis: int, part: int, padded_size: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function of (array, index of a rank) that takes the rank's slice of the array."""
    return lambda x, index: rows_from(axis, part, padded_size)(x, index * part)
