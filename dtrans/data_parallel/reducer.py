"""Reduction of trainers' gradients: buckets, and the operations before and after them.

    gradients   clipped, weighted, compressed
    all_reduce  of a bucket; over nodes reduce_scatter, all_reduce and all_gather; in chains one
                after the other
    means       restored, divided by the number of trainers

A `Reducer` receives each gradient when it is computed, and writes the reduction of a bucket after
its last gradient. After local steps it reduces parameters and optimizer state instead.
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
from dtrans.data_parallel.options import COMPRESSED, REDUCED, Options
from dtrans.data_parallel.plan import Bucket
from dtrans.ir.array_fns import together
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.ops import all_gather_p, all_reduce_p, reduce_scatter_p


@dataclasses.dataclass(frozen=True)
class ReduceSpec:
    """In what way a gradient is reduced; those of a bucket are reduced in the same.

    Attributes:
      compress: the type that it is reduced in, if that is neither its own nor that of all.
      group: where it is made, where not all are made in one place.
    """

    compress: str | None = None
    group: int = dataclasses.field(default=0, kw_only=True)


SAME_FOR_ALL = ReduceSpec()


def buckets_of(
    values: Mapping[str, Atom],
    o: Options,
    kind: Callable[[str], ReduceSpec] = lambda leaf: SAME_FOR_ALL,
) -> tuple[Bucket, ...]:
    """Return the values that are reduced together, in the order of their last ones.

    Args:
      values: what is to be reduced, by the name of its leaf, in the order in which it is made.
        Leaves may share one.
      kind: in what way that of a leaf is reduced; those of a bucket are reduced in the same.
    """
    values = {n: v for n, v in values.items() if v.aval.size and not getattr(kind(n), "own", False)}
    limits = bucket_sizes([v.aval for v in values.values()], o)
    open_: dict[Any, list[str]] = {}
    size: dict[Any, int] = {}
    done: list[list[str]] = []
    home: dict[Any, list[str]] = {}  # leaves that share a value share a bucket
    for leaf, value in values.items():
        aval = value.aval
        key = (aval.dtype, kind(leaf))
        if isinstance(value, Var) and (value, key) in home:
            home[value, key].append(leaf)
            continue
        nbytes = aval.size * aval.dtype.itemsize
        if open_.get(key) and size[key] + nbytes > limits[aval.dtype]:
            done.append(open_.pop(key))
        open_.setdefault(key, []).append(leaf)
        if isinstance(value, Var):
            home[value, key] = open_[key]
        size[key] = nbytes + (size[key] if len(open_[key]) > 1 else 0)
    done += open_.values()
    at = {leaf: i for i, leaf in enumerate(values)}
    done.sort(key=lambda leaves: at[leaves[-1]])
    types = {leaf: v.aval for leaf, v in values.items()}
    return tuple(
        Bucket(
            f"bucket/{i}",
            tuple(leaves),
            types[leaves[0]].dtype,
            sum({id(values[n]): types[n].size for n in leaves}.values())
            * np.dtype(sent_type(types[leaves[0]].dtype, kind(leaves[0]), o)).itemsize,
        )
        for i, leaves in enumerate(done)
    )


def bucket_sizes(types: Sequence[Any], o: Options) -> dict[Any, float]:
    """Return the size in bytes up to which gradients of each dtype are reduced together.

    Source of `max_buckets`: epl/communicators/coalescing.py. Buckets are shared out among dtypes by
    their number of gradients, what is left goes to the first; n buckets have bytes/(n - 1) each.
    """
    dtypes = sorted({t.dtype for t in types}, key=str)
    if not dtypes:
        return {}
    if o.reduce.max_buckets is None:
        return dict.fromkeys(dtypes, o.reduce.bucket_MB * 2**20)
    if len(dtypes) >= o.reduce.max_buckets:
        return dict.fromkeys(dtypes, math.inf)
    counts = {d: sum(t.dtype == d for t in types) for d in dtypes}
    splits = {d: max(1, o.reduce.max_buckets * counts[d] // len(types)) for d in dtypes}
    splits[dtypes[0]] += max(0, o.reduce.max_buckets - sum(splits.values()))
    total = {d: sum(t.size * t.dtype.itemsize for t in types if t.dtype == d) for d in dtypes}
    return {d: math.inf if splits[d] == 1 else total[d] / (splits[d] - 1) for d in dtypes}


def sent_type(dtype: Any, kind: ReduceSpec, o: Options) -> Any:
    """Return the type in which gradients of a type are reduced."""
    to = kind.compress or o.reduce.compress
    return dtype if to is None else COMPRESSED[to]


class Reducer:
    """Writes the reductions.

    Args:
      b: that they are written with.
      values: what the step calls the gradients, as in `buckets_of`.
      example_count: the weight of this trainer, if means are weighted.
      suffix: what the names of reduced values say behind that of their leaf.
      kind: as in `buckets_of`.
      scale: by what the gradients are too large, if their loss is scaled.

    Attributes:
      means: the reduced values, by leaf.
    """

    def __init__(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        o: Options,
        example_count: Atom | None,
        suffix: str = "",
        kind: Callable[[str], ReduceSpec] = lambda leaf: SAME_FOR_ALL,
        scale: Atom | None = None,
    ) -> None:
        self.b = b
        self.o = o
        self.clip_norm = o.reduce.clip_of_all(o.num_micro_batch)
        self.means: dict[str, Atom] = {}
        self.grads: dict[str, Atom] = {}
        self.kind = kind
        self.bucket_of = {
            leaf: bucket for bucket in buckets_of(values, o, kind) for leaf in bucket.leaves
        }
        self.missing = {bucket.name: set(bucket.leaves) for bucket in self.bucket_of.values()}
        self.waiting: list[Bucket] = []
        self.example_count = example_count
        self.scale = scale
        self._values = values
        self._of: dict[int, Atom] = {}
        self._suffix = suffix
        self._chains: dict[int, Sequence[Atom]] = {}  # what was reduced last in each
        self._reduced = 0
        self._total: Atom | None = None
        self._seen = 0
        self._here: set[Var] = set(b.invars)

    def made(self, leaf: str, grad: Atom) -> None:
        """Receive a gradient, and reduce the buckets that are complete."""
        # one, where leaves share it
        self.grads[leaf] = self._of.setdefault(id(self._values[leaf]), grad)
        bucket = self.bucket_of.get(leaf)
        if bucket is None:  # it has no elements
            self.means[leaf] = grad
            return
        self.missing[bucket.name].discard(leaf)
        if not self.missing[bucket.name]:
            self.waiting.append(bucket)
        if self._count_is_there() and self.clip_norm is None:
            self._flush()

    def finish(self) -> None:
        """Reduce what is left."""
        if self.clip_norm is not None and self.grads:
            names = list(self.grads)
            grads, bound = [self.grads[n] for n in names], float(self.clip_norm)
            if self.scale is None:
                made = self.b.call(clipped(bound), *grads)
            else:
                made = self.b.call(_clipped_scaled(bound), self.scale, *grads)
            of = {id(self.grads[n]): c for n, c in zip(names, made, strict=True)}
            self.grads = {n: of[id(g)] for n, g in self.grads.items()}
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
        b, o = self.b, self.o
        if o.trainers == 1:
            self.means |= {n: self.grads[n] for n in bucket.leaves}
            return
        unique = list(
            dict.fromkeys(self.grads[n] for n in bucket.leaves if isinstance(self.grads[n], Var))
        )
        literal = [self.grads[n] for n in bucket.leaves if not isinstance(self.grads[n], Var)]
        parts: list[Atom] = [*unique, *literal]
        names = {id(self.grads[n]): n for n in bucket.leaves}
        sent: list[Atom] = []
        for g in parts:
            if self._divides_first(g):
                g = b.call(_divided(o.trainers), g)[0]
            elif o.reduce.op == "mean":
                g = self._by_count(g)
            if (to := self._compress(bucket)) is not None:
                g = b.call(_compressed(to, o.reduce.compress_scale), g)[0]
            sent.append(g)
        sent = self._chained(sent)
        sums = self.sums(bucket, sent)
        if o.reduce.chains is not None:
            self._chains[self._reduced % o.reduce.chains] = sums
        self._reduced += 1
        for g, total in zip(parts, sums, strict=True):
            if isinstance(total, Var):
                b.labels[total] = f"{names[id(g)]}{self._suffix}.sum"
            back: Atom = total
            if self._compress(bucket) is not None:
                back = b.call(_restored(g.aval.dtype, o.reduce.compress_scale), back)[0]
            back = (
                self._averaged(back)
                if o.reduce.op == "mean" and not self._divides_first(g)
                else back
            )
            self.means |= {n: back for n in bucket.leaves if self.grads[n] is g}

    def sums(self, bucket: Bucket, sent: Sequence[Atom]) -> Sequence[Atom]:
        """Return the sums of a bucket over trainers."""
        return (
            self._hierarchical(bucket.name, sent)
            if self.o.trainers_per_node
            else self._sum(bucket.name, sent, self.o.over)
        )

    def _compress(self, bucket: Bucket) -> str | None:
        """Return the type that a bucket is reduced in; None for its own type."""
        return self.kind(bucket.leaves[0]).compress or self.o.reduce.compress

    def _chained(self, parts: list[Atom]) -> list[Atom]:
        """Return the parts of the next reduction, made to wait for the last one of their chain."""
        if self.o.reduce.chains is None:
            return parts
        before = self._chains.get(self._reduced % self.o.reduce.chains, ())
        return self.b.call(together, *parts, *before)[: len(parts)] if before else parts

    def _divides_first(self, x: Atom) -> bool:
        """Return True if a sum may overflow its type: only sums of float16 parameters."""
        return (
            self.o.local_sgd is not None
            and self.example_count is None
            and bool(x.aval.dtype == jnp.float16)
        )

    def _averaged(self, total: Atom) -> Atom:
        weighted = self.example_count is not None
        return (
            total
            if weighted or self.o.trainers == 1
            else self.b.call(_divided(self.o.trainers), total)[0]
        )

    def _by_count(self, x: Atom) -> Atom:
        """Scale a trainer's part of a weighted mean; before the reduction, so no sum overflows."""
        if self.example_count is None:
            return x
        return self.b.call(_share, x, self.example_count, self._total_count())[0]

    def _total_count(self) -> Atom:
        if self._total is None:
            assert self.example_count is not None
            (self._total,) = self._sum("example_count", [self.example_count], self.o.over)
            if self.o.trainers > 1 and isinstance(self._total, Var):
                self.b.labels[self._total] = f"{self.o.batch.example_count}.sum"
        return self._total

    def _sum(self, name: str, parts: Sequence[Atom], over: Sequence[str]) -> Sequence[Atom]:
        if self.o.trainers == 1:
            return parts
        return self.b.bind(all_reduce_p, *parts, op="sum", name=name, owners=(), over=tuple(over))

    def _hierarchical(self, name: str, parts: Sequence[Atom]) -> Sequence[Atom]:
        """Sum over trainers: inside nodes, across nodes, inside again. Vectors are padded."""
        b, (exter, inter), size = self.b, self.o.over, self.o.trainers_per_node
        flat = [b.call(_flattened(size), x)[0] for x in parts]
        inside = b.bind(reduce_scatter_p, *flat, name=name, over=(inter,), size=size, axis=0)
        mine = self._sum(name, inside, (exter,))
        whole = b.bind(all_gather_p, *mine, name=name, over=(inter,), size=size, axis=0)
        return [
            b.call(_unflattened(tuple(x.aval.shape)), w)[0]
            for x, w in zip(parts, whole, strict=True)
        ]

    def merged(
        self, outs: Mapping[str, Atom], merges: Mapping[str, str], before: Mapping[str, Atom]
    ) -> dict[str, Atom]:
        """Results and statistics, reduced; one variadic reduction for each operation.

        Args:
          before: the state as it was before the step, by name. What is added up of state is what
            was added to it.
        """
        b, o = self.b, self.o
        b.role = DIST
        found: dict[str, Atom] = {}
        for op in dict.fromkeys(REDUCED.values()):
            names = [n for n, way in merges.items() if REDUCED.get(way) == op]
            if o.batch.example_count in names and merges[o.batch.example_count] == "sum":
                found[o.batch.example_count] = self._total_count()
                names.remove(o.batch.example_count)
            if not names:
                continue
            sent: list[Atom] = []
            for n in names:
                if merges[n] == "mean":
                    sent.append(self._by_count(outs[n]))
                elif merges[n] == "sum" and n in before and o.trainers > 1:
                    sent += b.call(jnp.subtract, outs[n], before[n])
                else:
                    sent.append(outs[n])
            made: Sequence[Atom] = sent
            if o.trainers > 1:
                made = sums = b.bind(
                    all_reduce_p, *sent, op=op, name=f"results/{op}", owners=(), over=o.over
                )
                b.labels.update((x, f"{n}.{op}") for n, x in zip(names, sums, strict=True))
            for n, x in zip(names, made, strict=True):
                found[n] = self._averaged(x) if merges[n] == "mean" else x
                if merges[n] == "sum" and n in before and o.trainers > 1:
                    (found[n],) = b.call(jnp.add, before[n], x)
        return found


# small functions that the reductions are wrapped in, each traced once for a type


def _share(x: jax.Array, example_count: jax.Array, total: jax.Array) -> jax.Array:
    wide = jnp.promote_types(jnp.promote_types(x.dtype, example_count.dtype), jnp.float32)
    part = x * (example_count.astype(wide) / total.astype(wide)).astype(x.dtype)
    # what counts for nothing may be nothing over nothing
    return jnp.where(example_count == 0, jnp.zeros_like(x), part)


@functools.cache
def clipped(norm: float) -> Callable[..., Sequence[jax.Array]]:
    """Return a function that clips as `optax.clip_by_global_norm`."""

    def fn(*grads: jax.Array) -> Sequence[jax.Array]:
        size = jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(g))) for g in grads))
        return [jnp.where(size < norm, g, (g / size.astype(g.dtype)) * norm) for g in grads]

    return fn


@functools.cache
def _clipped_scaled(norm: float) -> Callable[..., Sequence[jax.Array]]:
    """The same of gradients that are too large by a scale, and stay so; their norm is taken without
    it."""

    def fn(scale: jax.Array, *grads: jax.Array) -> Sequence[jax.Array]:
        wide = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in grads]
        size = jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(g / scale.astype(g.dtype)))) for g in wide))
        return [
            jnp.where(size < norm, g, ((w / size.astype(w.dtype)) * norm).astype(g.dtype))
            for g, w in zip(grads, wide, strict=True)
        ]

    return fn


@functools.cache
def _divided(by: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x / by


@functools.cache
def _flattened(size: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function that flattens an array and pads it to a multiple of `size`."""
    return lambda x: jnp.pad(x.reshape(-1), (0, -x.size % size))


@functools.cache
def _unflattened(shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x[: math.prod(shape)].reshape(shape)


@functools.cache
def _compressed(to: str, scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: (
        (x * scale).astype(COMPRESSED[to]) if scale != 1.0 else x.astype(COMPRESSED[to])
    )


@functools.cache
def _restored(dtype: Any, scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype) / scale if scale != 1.0 else x.astype(dtype)
