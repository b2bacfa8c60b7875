"""Options for the batch of a step, which all strategies take, and the parts of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.checks import check_int, check_one_of, check_type
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.pytree import TreeSpec


@dataclasses.dataclass(frozen=True)
class Batch:
    """Options to split the batch and to merge the results of its parts.

    Attributes:
      kind: "exact", the default: the job computes one device's numbers for every step. Values that
        depend on the full batch (a masked mean, batch statistics, a count) communicate. Random
        numbers with rows of the batch equal one device's. Micro-batches of a pipeline, and trainers
        that do not wait for each other, cannot communicate: steps whose parts do not add up are
        refused there. "local": each trainer takes the step on its part alone, with its own
        statistics, random numbers and counts, as Paddle's trainers and trainers of `dtrans.Geo` do.
        "micro", for pipelines: each micro-batch takes the step alone; "local" is the same there.
      axes: the batch dimension of each batch argument, as `in_axes` of `jax.vmap`: a number, None
        for a replicated argument, or a tuple with one of these for each argument. 0-d arrays are
        always replicated.
      unsplit_inputs: names of batch arrays that every trainer gets in full. Others are split on dim
        0. 0-d arrays go to every trainer; a `jax.random.key` is folded with the trainer's index
        unless it is named here.
      example_count: name of a result, a scalar: the number of examples in a trainer's part of the
        batch. It is summed over trainers.
      merge: merge of results, and of parameters that the optimizer does not compute (batch
        statistics), by name: "mean", "sum" (of parameters: of the trainers' increments), "max",
        "concat" (on dim 0), "each" (a leading axis, one row per trainer), or "same" (they are
        equal). By default, results that grow with the batch are concatenated. Other floating-point
        results are reduced as gradients are, and parameters averaged. Other results get a row per
        trainer. Results that depend on gradients use the reduced ones, or with `local_sgd` in each
        step the trainer's. Parameter servers have their own merges, see `dtrans.pserver`.

    Raises:
      ConfigError: an unknown kind, a bad axis, or names that are not strings.

    Example:
      >>> import dtrans
      >>> dtrans.Batch(unsplit_inputs=["class_weights"]).unsplit_inputs
      ('class_weights',)
      >>> dtrans.Batch("local", merge={"aux/hits": "sum"}).exact
      False
    """

    kind: str | None = None
    axes: Any = 0
    unsplit_inputs: Collection[str] = ()
    example_count: str | None = None
    merge: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind is not None:
            check_one_of("batch", self.kind, ("exact", "local", "micro"))
        each = self.axes if isinstance(self.axes, tuple) else (self.axes,)
        for axis in each:
            check_int(
                "axes",
                axis,
                "a dimension, None, or a tuple with one of these for each",
                least=0,
                or_none=True,
            )
        names: Any = self.unsplit_inputs
        merge: Any = self.merge
        if isinstance(names, str) or not isinstance(names, Collection):
            raise ConfigError(
                f"unsplit_inputs={names!r} must be a collection of names of batch arrays"
            )
        if not isinstance(merge, Mapping) or not all(isinstance(n, str) for n in merge):
            raise ConfigError(
                f"merge={merge!r} must say for each name how to merge it, such as {{'aux': 'sum'}}"
            )
        object.__setattr__(self, "unsplit_inputs", tuple(names))
        object.__setattr__(self, "merge", dict(merge))

    @classmethod
    def from_option(cls, value: Any, kind: str, *, micro: bool = False) -> Batch:
        """Return the record for the option `batch`: a record, or a kind.

        Args:
          value: the option.
          kind: the kind of a record without one.
          micro: True for strategies with micro-batches, which may have their own statistics.

        Raises:
          ConfigError: the strategy does not have this kind.
        """
        if isinstance(value, str):
            value = cls(value)
        check_type("batch", value, cls, "'exact', 'local' or a dtrans.Batch")
        found: Batch = value if value.kind is not None else dataclasses.replace(value, kind=kind)
        if found.kind == "micro" and not micro:
            raise ConfigError(
                "batch='micro' is for dtrans.pipeline, whose micro-batches then have their own "
                "statistics; pass batch='local', which gives each part of the batch its own"
            )
        return found

    def check_axes(self) -> None:
        """Raise ConfigError for batch dimensions other than the first, where axes are not
        supported."""
        if self.axes != 0:
            raise ConfigError(
                f"axes={self.axes!r} is for batch='exact'; with batch={self.kind!r} arrays are cut "
                "on dim 0, except those in unsplit_inputs"
            )

    @property
    def exact(self) -> bool:
        """True if the job computes one device's numbers for every step."""
        return self.kind == "exact"

    def check_merge(self, ways: Collection[str]) -> None:
        """Raise ConfigError for a merge that a strategy does not have."""
        for name, way in self.merge.items():
            check_one_of(f"merge[{name!r}]", way, ways)


def shard_batch(batch: Any, number: int, count: int, axis: int = 0) -> Any:
    """Return one of `count` equal parts of a batch: rows number*B/count to (number+1)*B/count.

    It is the same as `job.shard_batch`, for a loader that has no job.

    Args:
      batch: a pytree of arrays, NumPy's or JAX's; every part gets 0-d arrays unchanged.
      number: index of the part, from 0.
      count: number of parts.
      axis: the dimension of the rows.

    Raises:
      BatchError: rows that the parts do not divide. ConfigError: there is no such part.

    Example:
      >>> import numpy as np, dtrans
      >>> dtrans.shard_batch({"rate": np.float32(0.5), "x": np.arange(6)}, 1, 3)
      {'rate': np.float32(0.5), 'x': array([2, 3])}
    """
    check_int("count", count, "a positive number of parts")
    check_int("number", number, f"one of the parts 0 to {count - 1}", least=0, most=count - 1)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
    return jax.tree_util.tree_map_with_path(
        lambda path, x: part_of(x, number, count, axis, name(path)) if np.ndim(x) else x, batch
    )


def part_of(x: Any, number: int, count: int, axis: int, name: str, trainers: int = 0) -> Any:
    """Return one of several parts of an array along a dimension.

    Args:
      trainers: number of trainers in all parts, if they need not divide the rows.

    Raises:
      BatchError: the parts are not equal, and must be.
    """
    rows = x.shape[axis] if axis < x.ndim else 1
    if trainers and rows % trainers:
        each = -(-rows // trainers) * (trainers // count)
        return UnevenPart(_along(x, axis, number * each, (number + 1) * each), rows)
    if rows % count:
        raise BatchError(
            f"{name} has {rows} rows, which {count} processes do not divide: give a multiple of "
            f"{count}"
        )
    size = rows // count
    return _along(x, axis, number * size, (number + 1) * size)


def part_of_batch(
    specs: Sequence[TreeSpec],
    batch: Sequence[Any],
    axes: Mapping[str, int],
    part: tuple[int, int],
    trainers: int = 0,
) -> tuple[Any, ...]:
    """Return one process's part of batch arguments.

    Args:
      specs: structures of the batch arguments.
      axes: the dimension that is split, by array; other arrays are replicated.
      part: index of the part, and the number of parts.
      trainers: as in `part_of`.

    Raises:
      BatchError: the parts are not equal, and must be; or another number of arguments.
    """
    if len(batch) != len(specs):
        raise BatchError(f"the step takes {len(specs)} batch arguments, {len(batch)} were given")
    number, count = part
    found = []
    for spec, tree in zip(specs, batch, strict=True):
        arrays = spec.flatten(tree)
        for i, (name, x) in enumerate(zip(spec.names, arrays, strict=True)):
            if name in axes:
                arrays[i] = part_of(x, number, count, axes[name], name, trainers)
        found.append(spec.unflatten(arrays))
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class UnevenPart:
    """Rows of a process, of a batch that the trainers do not divide; `job.shard_batch` returns it.

    Trainers have `ceil(rows / trainers)` rows each, the last ones fewer, or none.

    Attributes:
      x: this process's rows, NumPy's or JAX's.
      rows: number of rows in the full batch.

    Example:
      >>> import numpy as np, dtrans
      >>> part = dtrans.UnevenPart(np.arange(10, 13), rows=13)  # of the third of three trainers
    """

    x: Any
    rows: int

    def __post_init__(self) -> None:
        check_int("rows", self.rows, "the number of rows in the whole batch", least=1)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the part."""
        return int(self.x.ndim)


def without_parts(batch: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    """Return batch arguments as plain arrays, and the rows of the full batch; 0 without parts.

    Raises:
      BatchError: parts of batches with different numbers of rows.
    """
    rows = {x.rows for x in jax.tree.leaves(batch) if isinstance(x, UnevenPart)}
    if len(rows) > 1:
        raise BatchError(
            f"the arrays are parts of batches of {' and '.join(map(str, sorted(rows)))} rows; give "
            "parts of one batch"
        )
    if not rows:
        return tuple(batch), 0
    return jax.tree.map(lambda x: x.x if isinstance(x, UnevenPart) else x, tuple(batch)), rows.pop()


def _along(x: Any, axis: int, start: int, stop: int) -> Any:
    at: list[slice] = [slice(None)] * x.ndim
    at[axis] = slice(start, stop)
    return x[tuple(at)]
