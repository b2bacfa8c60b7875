"""Reduction of gradients over trainers, in buckets.

A *bucket* is a list of gradients that one collective reduces together.

    gradients   clipped, weighted, compressed
    all_reduce  one for each bucket. With nodes: reduce_scatter, all_reduce and all_gather. With
                chains: each reduction waits for the previous reduction of its chain
    means       sums converted to the gradient's type, divided by the number of trainers

A `Reducer` receives each gradient when the program computes it. After the last gradient of a
bucket, the `Reducer` writes the bucket's reduction. So the reduction can overlap with the rest of
the backward pass. After local steps it reduces parameters and optimizer state instead.
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

from dtrans._jax import Atom, Var
from dtrans.data_parallel.options import REDUCED, Options
from dtrans.data_parallel.plan import Bucket
from dtrans.ir.array_fns import together
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals
from dtrans.ir.program import DIST
from dtrans.ir.selection import number_items, subset
from dtrans.ops import (
    CASTS,
    WireType,
    all_gather_p,
    all_reduce_p,
    decoded,
    encoded,
    reduce_scatter_p,
)
from dtrans.step.local_clip import clip_to_norm, limited_norms


@dataclasses.dataclass(frozen=True)
class ReduceSpec:
    """Description of how one gradient is reduced; equal for all gradients of a bucket.

    Attributes:
      compress: the type to which the gradient is cast for the reduction, such as "bf16". None for
        the type in `Reduce.compress`.
      group: the index of the pipeline stage that computes the gradient.
      is_replicated: True if all trainers compute the same gradient, which needs no reduction.
    """

    compress: str | None = None
    group: int = dataclasses.field(default=0, kw_only=True)
    is_replicated: bool = dataclasses.field(default=False, kw_only=True)


SAME_FOR_ALL = ReduceSpec()


def assign_buckets(
    values: Mapping[str, Atom],
    options: Options,
    kind: Callable[[str], ReduceSpec] = lambda leaf: SAME_FOR_ALL,
) -> tuple[Bucket, ...]:
    """Divide gradients into buckets; one collective reduces each bucket.

    The buckets are in the order in which their last gradient is computed. After local steps, the
    values are arrays of the state instead of gradients.

    Args:
      values: the value to reduce for each parameter, in the order in which the program computes
        them. Several parameters may share one value.
      options: the options of the data-parallel strategy.
      kind: function from the name of a parameter to the `ReduceSpec` of its value.
    """
    reduced: dict[str, Atom] = {}
    for leaf, value in values.items():
        if value.aval.size and not kind(leaf).is_replicated:
            reduced[leaf] = value
    groups = _group_leaves(reduced, options, kind)

    # a bucket is reduced as soon as its last value is computed, so sort by that value
    position = number_items(reduced)
    groups.sort(key=lambda leaves: position[leaves[-1]])

    buckets = []
    for i, leaves in enumerate(groups):
        dtype = reduced[leaves[0]].aval.dtype
        itemsize = np.dtype(reduced_type(dtype, kind(leaves[0]), options)).itemsize
        # if several leaves share a value, count it once
        sizes = {id(reduced[n]): reduced[n].aval.size for n in leaves}
        buckets.append(Bucket(f"bucket/{i}", tuple(leaves), dtype, sum(sizes.values()) * itemsize))
    return tuple(buckets)


def _group_leaves(
    values: Mapping[str, Atom], options: Options, kind: Callable[[str], ReduceSpec]
) -> list[list[str]]:
    """Divide parameters into lists of limited size, for one reduction each.

    All gradients of a list have one dtype and one `ReduceSpec`. Parameters that share one gradient
    are in one list.
    """
    limits = bucket_sizes(avals(values.values()), options)
    open_groups: dict[Any, list[str]] = {}
    sizes: dict[Any, int] = {}
    full: list[list[str]] = []
    group_of: dict[Any, list[str]] = {}
    for leaf, value in values.items():
        key = value.aval.dtype, kind(leaf)
        if isinstance(value, Var) and (value, key) in group_of:
            group_of[value, key].append(leaf)
            continue
        nbytes = value.aval.size * value.aval.dtype.itemsize
        if key in open_groups and sizes[key] + nbytes > limits[value.aval.dtype]:
            full.append(open_groups.pop(key))
        if key not in open_groups:
            open_groups[key], sizes[key] = [], 0
        open_groups[key].append(leaf)
        sizes[key] += nbytes
        if isinstance(value, Var):
            group_of[value, key] = open_groups[key]
    return full + list(open_groups.values())


def bucket_sizes(types: Sequence[Any], options: Options) -> dict[Any, float]:
    """Return the maximum size of a bucket in bytes, by dtype.

    The option `max_buckets` limits the total number of buckets. This number is divided among the
    dtypes in proportion to their numbers of gradients. The first dtype also gets the remainder. If
    a dtype gets n buckets, the maximum size of its buckets is (bytes of its gradients)/(n - 1), as
    in EPL. Without `max_buckets`, the size is `bucket_MB`.

    Source of `max_buckets`: epl/communicators/coalescing.py.
    """
    dtypes = sorted({t.dtype for t in types}, key=str)
    if not dtypes:
        return {}
    if options.reduce.max_buckets is None:
        return dict.fromkeys(dtypes, options.reduce.bucket_MB * 2**20)
    if len(dtypes) >= options.reduce.max_buckets:
        return dict.fromkeys(dtypes, math.inf)
    counts: dict[Any, int] = dict.fromkeys(dtypes, 0)
    total: dict[Any, int] = dict.fromkeys(dtypes, 0)
    for t in types:
        counts[t.dtype] += 1
        total[t.dtype] += t.size * t.dtype.itemsize
    splits = {d: max(1, options.reduce.max_buckets * counts[d] // len(types)) for d in dtypes}
    splits[dtypes[0]] += max(0, options.reduce.max_buckets - sum(splits.values()))
    return {d: math.inf if splits[d] == 1 else total[d] / (splits[d] - 1) for d in dtypes}


def reduced_type(dtype: Any, kind: ReduceSpec, options: Options) -> Any:
    """Return the type in which a gradient is sent and summed, such as bfloat16.

    Args:
      dtype: the type of the gradient.
      kind: description of how the gradient is reduced.
      options: the options of the data-parallel strategy.
    """
    to = kind.compress or options.reduce.compress
    return dtype if to is None else CASTS[to]


class Reducer:
    """Writer of the equations that average gradients over trainers (or state, after local steps).

    Call `add` for each gradient, in the order of the backward pass, then `finish`. `means` has the
    results.

    Args:
      b: the builder to write with.
      values: the step's gradients by leaf, in the order in which the program computes them.
      options: the options of the data-parallel strategy.
      example_count: the weight of this trainer, if means are weighted.
      suffix: a suffix for names of reduced values: "params/w" + suffix.
      kind: function from the name of a leaf to the `ReduceSpec` of its gradient.
      scale: the loss scale, by which the gradients are still multiplied. None for no scale.

    Attributes:
      means: the reduced values, by leaf.
    """

    def __init__(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        options: Options,
        example_count: Atom | None,
        suffix: str = "",
        kind: Callable[[str], ReduceSpec] = lambda leaf: SAME_FOR_ALL,
        scale: Atom | None = None,
    ) -> None:
        self.b = b
        self.options = options
        self.clip_norm = options.reduce.clip_per_step(options.num_micro_batch)
        self.clip_by = options.reduce.clip_local_by
        self.means: dict[str, Atom] = {}
        self.grads: dict[str, Atom] = {}
        self.kind = kind
        self.bucket_of: dict[str, Bucket] = {}
        self.missing: dict[str, set[str]] = {}
        for bucket in assign_buckets(values, options, kind):
            self.bucket_of |= dict.fromkeys(bucket.leaves, bucket)
            self.missing[bucket.name] = set(bucket.leaves)
        self.waiting: list[Bucket] = []
        self.example_count = example_count
        self.scale = scale
        self._values = values
        self._of: dict[int, Atom] = {}
        self._suffix = suffix
        # index of a chain -> results of its latest reduction
        self._chains: dict[int, Sequence[Atom]] = {}
        self._reduced = 0
        self._total: Atom | None = None
        self._seen = 0
        self._here: set[Var] = set(b.invars)

    def add(self, leaf: str, grad: Atom) -> None:
        """Add a gradient to its bucket; if it is the last one of the bucket, reduce the bucket.

        Args:
          leaf: the name of the parameter.
          grad: the gradient.
        """
        # if several leaves share one gradient, reduce it once
        self.grads[leaf] = self._of.setdefault(id(self._values[leaf]), grad)
        bucket = self.bucket_of.get(leaf)
        if bucket is None:  # gradients without elements have no bucket
            self.means[leaf] = grad
            return
        self.missing[bucket.name].discard(leaf)
        if not self.missing[bucket.name]:
            self.waiting.append(bucket)
        if self._count_is_there() and self.clip_norm is None:
            self._flush()

    def finish(self) -> None:
        """Reduce the remaining buckets, after the last gradient was added.

        With `clip_local_norm`, all gradients are first clipped here, because the norm needs all of
        them.
        """
        if self.clip_norm is not None and self.grads:
            grads, bound = list(self.grads.values()), float(self.clip_norm)
            if self.scale is None:
                clipped = self.b.call(clip_to_norm(bound, self.clip_by), *grads)
            else:
                clipped = self.b.call(_clip_scaled_to_norm(bound, self.clip_by), self.scale, *grads)
            by_grad = {id(g): c for g, c in zip(grads, clipped, strict=True)}
            self.grads = {n: by_grad[id(g)] for n, g in self.grads.items()}
        self._flush()

    def _count_is_there(self) -> bool:
        for eqn in self.b.eqns[self._seen :]:
            self._here.update(eqn.outvars)
        self._seen = len(self.b.eqns)
        return (
            not isinstance(self.example_count, Var)
            or self.example_count in self._here
            or self.b.is_constant(self.example_count)
        )

    def _flush(self) -> None:
        role, self.b.role = self.b.role, DIST
        for bucket in self.waiting:
            self._reduce(bucket)
        self.waiting.clear()
        self.b.role = role

    def _reduce(self, bucket: Bucket) -> None:
        """Write the reduction of a bucket, and add the results to `means`."""
        if self.options.trainers == 1:
            self.means |= subset(self.grads, bucket.leaves)
            return
        # if several leaves share a variable, reduce it once; ids are keys, since literals have no
        # hash
        leaf_of = {id(self.grads[n]): n for n in bucket.leaves}
        unique: dict[Var, None] = {}
        literals: list[Atom] = []
        for n in bucket.leaves:
            grad = self.grads[n]
            if isinstance(grad, Var):
                unique[grad] = None
            else:
                literals.append(grad)
        parts: list[Atom] = [*unique, *literals]

        sent = self._chain([self._prepare_part(x, bucket) for x in parts])
        sums = self.sums(bucket, sent)
        if self.options.reduce.chains is not None:
            self._chains[self._reduced % self.options.reduce.chains] = sums
        self._reduced += 1

        for grad, total in zip(parts, sums, strict=True):
            if isinstance(total, Var):
                self.b.labels[total] = f"{leaf_of[id(grad)]}{self._suffix}.sum"
            mean = self._finish_sum(grad, total, bucket)
            self.means |= {n: mean for n in bucket.leaves if self.grads[n] is grad}

    def _prepare_part(self, x: Atom, bucket: Bucket) -> Atom:
        """Weight and compress a gradient before its reduction."""
        b, options = self.b, self.options
        if self._divides_first(x):
            x = b.call(_divide(options.trainers), x)[0]
        elif options.reduce.op == "mean":
            x = self._by_count(x)
        if (to := self._compress(bucket)) is not None:
            x = b.call(encoded(WireType(to, options.reduce.compress_scale)), x)[0]
        return x

    def _finish_sum(self, grad: Atom, total: Atom, bucket: Bucket) -> Atom:
        """Convert a reduced sum to the gradient's type, and divide it if a mean is wanted."""
        b, options = self.b, self.options
        if (to := self._compress(bucket)) is not None:
            wire, t = WireType(to, options.reduce.compress_scale), grad.aval
            total = b.call(decoded(wire, t.shape, t.dtype), total)[0]
        if options.reduce.op == "mean" and not self._divides_first(grad):
            total = self._average(total)
        return total

    def sums(self, bucket: Bucket, sent: Sequence[Atom]) -> Sequence[Atom]:
        """Write the sums of a bucket's gradients over trainers.

        Args:
          bucket: the bucket.
          sent: this trainer's gradients.

        Returns:
          The sums, in the order of `sent`.
        """
        if self.options.trainers_per_node:
            return self._hierarchical_sum(bucket.name, sent)
        return self._sum(bucket.name, sent, self.options.over)

    def _compress(self, bucket: Bucket) -> str | None:
        """Return the type in which a bucket is reduced, such as "bf16"; None for no cast."""
        return self.kind(bucket.leaves[0]).compress or self.options.reduce.compress

    def _chain(self, parts: list[Atom]) -> list[Atom]:
        """Make a reduction wait for an earlier one, so that at most `reduce.chains` overlap."""
        if self.options.reduce.chains is None:
            return parts
        before = self._chains.get(self._reduced % self.options.reduce.chains, ())
        if not before:
            return parts
        return self.b.call(together, *parts, *before)[: len(parts)]

    def _divides_first(self, x: Atom) -> bool:
        """Return True if values must be divided before their sum, which may overflow in float16."""
        return (
            self.options.local_sgd is not None
            and self.example_count is None
            and bool(x.aval.dtype == jnp.float16)
        )

    def _average(self, total: Atom) -> Atom:
        # terms weighted by their example counts already sum to the mean
        if self.example_count is not None or self.options.trainers == 1:
            return total
        return self.b.call(_divide(self.options.trainers), total)[0]

    def _by_count(self, x: Atom) -> Atom:
        """Multiply a trainer's value by its share of all examples; without weights, return `x`.

        The weight is applied before the sum over trainers, because an unweighted sum might
        overflow.
        """
        if self.example_count is None:
            return x
        return self.b.call(_weighted_share, x, self.example_count, self._total_count())[0]

    def _total_count(self) -> Atom:
        if self._total is None:
            assert self.example_count is not None
            (self._total,) = self._sum("example_count", [self.example_count], self.options.over)
            if self.options.trainers > 1 and isinstance(self._total, Var):
                self.b.labels[self._total] = f"{self.options.batch.example_count}.sum"
        return self._total

    def _sum(self, name: str, parts: Sequence[Atom], over: Sequence[str]) -> Sequence[Atom]:
        if self.options.trainers == 1:
            return parts
        return self.b.bind(all_reduce_p, *parts, op="sum", name=name, owners=(), over=tuple(over))

    def _hierarchical_sum(self, name: str, parts: Sequence[Atom]) -> Sequence[Atom]:
        """Write a sum in three steps: reduce-scatter in nodes, sum across nodes, gather in nodes.

        Fewer bytes cross the slow links between nodes. Vectors are padded to a multiple of the
        number of trainers in a node.
        """
        b, (exter, inter), size = self.b, self.options.over, self.options.trainers_per_node
        flat = [b.call(_flatten(size), x)[0] for x in parts]
        inside = b.bind(reduce_scatter_p, *flat, name=name, over=(inter,), size=size, axis=0)
        shards = self._sum(name, inside, (exter,))
        vectors = b.bind(all_gather_p, *shards, name=name, over=(inter,), size=size, axis=0)
        shapes = [tuple(x.aval.shape) for x in parts]
        totals: list[Atom] = []
        for shape, vector in zip(shapes, vectors, strict=True):
            totals += b.call(_unflatten(shape), vector)
        return totals

    def reduce_results(
        self, outs: Mapping[str, Atom], merges: Mapping[str, str], before: Mapping[str, Atom]
    ) -> dict[str, Atom]:
        """Merge the results and statistics of all trainers by their merge rules.

        One collective is written for each operation (sum, maximum).

        Args:
          outs: the outputs of a trainer, by name.
          merges: the merge rule of each output.
          before: the state before the step, by name. For state with rule "sum", the increments of
            all trainers are added to the value in `before`.

        Returns:
          The merged outputs, by name.
        """
        b, options = self.b, self.options
        b.role = DIST
        found: dict[str, Atom] = {}
        for op in dict.fromkeys(REDUCED.values()):
            names = [n for n, way in merges.items() if REDUCED.get(way) == op]
            if (
                options.batch.example_count in names
                and merges[options.batch.example_count] == "sum"
            ):
                found[options.batch.example_count] = self._total_count()
                names.remove(options.batch.example_count)
            if not names:
                continue
            increments = set()
            if options.trainers > 1:
                increments = {n for n in names if merges[n] == "sum" and n in before}

            sent: list[Atom] = []
            for n in names:
                if merges[n] == "mean":
                    sent.append(self._by_count(outs[n]))
                elif n in increments:
                    sent += b.call(jnp.subtract, outs[n], before[n])
                else:
                    sent.append(outs[n])
            reduced: Sequence[Atom] = sent
            if options.trainers > 1:
                name = f"results/{op}"
                reduced = sums = b.bind(
                    all_reduce_p, *sent, op=op, name=name, owners=(), over=options.over
                )
                b.labels.update(zip(sums, (f"{n}.{op}" for n in names), strict=True))

            for n, x in zip(names, reduced, strict=True):
                found[n] = self._average(x) if merges[n] == "mean" else x
                if n in increments:
                    (found[n],) = b.call(jnp.add, before[n], x)
        return found


# functions that compute values before and after reductions; they are cached, so that JAX traces
# each function once per type


def _weighted_share(x: jax.Array, example_count: jax.Array, total: jax.Array) -> jax.Array:
    wide = jnp.promote_types(jnp.promote_types(x.dtype, example_count.dtype), jnp.float32)
    part = x * (example_count.astype(wide) / total.astype(wide)).astype(x.dtype)
    # drop the mean of a trainer without examples, which may be 0 / 0
    return jnp.where(example_count == 0, jnp.zeros_like(x), part)


@functools.cache
def _clip_scaled_to_norm(norm: float, by: str) -> Callable[..., Sequence[jax.Array]]:
    """Return a function (scale, *gradients) that clips gradients multiplied by a loss scale.

    The norm is computed from gradients / scale.
    """

    def fn(scale: jax.Array, *grads: jax.Array) -> Sequence[jax.Array]:
        wide = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in grads]
        sizes = limited_norms([g / scale.astype(g.dtype) for g in wide], by)
        return [
            jnp.where(size < norm, g, ((w / size.astype(w.dtype)) * norm).astype(g.dtype))
            for g, w, size in zip(grads, wide, sizes, strict=True)
        ]

    return fn


@functools.cache
def _divide(by: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x / by


@functools.cache
def _flatten(size: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function that flattens an array, and pads the vector to a multiple of `size`."""
    return lambda x: jnp.pad(x.reshape(-1), (0, -x.size % size))


@functools.cache
def _unflatten(shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x[: math.prod(shape)].reshape(shape)
