"""How the batch of a step is shared: a record of options that all strategies take, and the parts of
processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.checks import check_int, check_one_of, check_type
from dtrans.errors import BatchError, ConfigError


@dataclasses.dataclass(frozen=True)
class Batch:
    """How a batch is shared, and how the results of its parts are merged.

    Attributes:
      kind: "exact", the default: the job gives one device's numbers, whatever the step: what
        crosses the batch (a masked mean, batch statistics, a count) communicates, and random
        numbers with rows of the batch are one device's. Where parts cannot exchange anything, as
        micro-batches of a pipeline, or trainers that do not wait for each other, a step is refused
        that is not made of its parts. "local": each trainer takes the step on its part alone, with
        statistics, random numbers and counts of its own, as Paddle's trainers do, and so those of
        `dtrans.Geo`. "micro", in pipelines alone: each micro-batch takes the step alone, with
        statistics of its own; "local" is the same there.
      axes: the dimension of the batch in each batch argument, as `in_axes` of `jax.vmap`: a number,
        None for an argument that every trainer gets whole, or a tuple with one of these for each
        argument. 0-d arrays are whole anyway.
      unsplit_inputs: names of batch arrays that every trainer gets whole. Others are split on dim
        0; 0-d arrays go to every trainer, a `jax.random.key` folded with the trainer's number
        unless it is named here.
      example_count: the name of a result, a scalar that says how many examples a trainer's part of
        the batch has. It is itself added up.
      merge: how results are merged, and parameters that the optimizer does not make (batch
        statistics), by name: "mean", "sum" (of parameters: of what trainers add to them), "max",
        "concat" (on dim 0), "each" (a leading axis, one row per trainer), or "same" (they are equal
        anyway). By default what grows with the batch is concatenated, other floating-point results
        are reduced as gradients are, and parameters averaged; other results get a row per trainer.
        What is computed from gradients is computed from the reduced ones, or with `local_sgd` in
        each step from its own. Parameter servers have ways of their own, see `dtrans.pserver`.

    Raises:
      ConfigError: another kind; what are no names.

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
    def of(cls, given: Any, kind: str, *, micro: bool = False) -> Batch:
        """What is given as `batch`: a record, or its kind.

        Args:
          kind: that of a record which does not say its own.
          micro: whether the strategy is one of micro-batches, which may have statistics of their
            own.

        Raises:
          ConfigError: a kind that the strategy does not have.
        """
        if isinstance(given, str):
            given = cls(given)
        check_type("batch", given, cls, "'exact', 'local' or a dtrans.Batch")
        found: Batch = given if given.kind is not None else dataclasses.replace(given, kind=kind)
        if found.kind == "micro" and not micro:
            raise ConfigError(
                "batch='micro' is for dtrans.pipeline, whose micro-batches then have statistics of "
                "their own. Say "
                "batch='local', where each part of the batch has its own"
            )
        return found

    def check_axes(self) -> None:
        """Raise ConfigError for dimensions of the batch where it is always the first."""
        if self.axes != 0:
            raise ConfigError(
                f"axes={self.axes!r} is for batch='exact'; with batch={self.kind!r} arrays are cut "
                "on dim 0, but for "
                "those in unsplit_inputs"
            )

    @property
    def exact(self) -> bool:
        """Whether the job gives one device's numbers, whatever the step."""
        return self.kind == "exact"

    def check_merge(self, ways: Collection[str]) -> None:
        """Raise ConfigError for a way to merge that a strategy does not have."""
        for name, way in self.merge.items():
            check_one_of(f"merge[{name!r}]", way, ways)


def shard_batch(batch: Any, number: int, count: int, axis: int = 0) -> Any:
    """One of several equal parts of a batch: rows number*B/count to (number+1)*B/count of all its
    arrays.

    What `job.shard_batch` gives a process, for a loader that has no job.

    Args:
      batch: a pytree of arrays, NumPy's or JAX's; those without dimensions are whole in each part.
      number: which part, from 0.
      count: how many there are.
      axis: the dimension that rows are along.

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
    """One of several parts of an array, along a dimension.

    Args:
      trainers: how many there are in all parts, if they need not divide the rows.

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


@dataclasses.dataclass(frozen=True, eq=False)
class UnevenPart:
    """A process's part of an array of the batch that trainers do not divide: what `job.shard_batch`
    gives of such.

    Trainers have `ceil(rows / trainers)` rows each, the last ones fewer, or none.

    Attributes:
      x: this process's rows, NumPy's or JAX's.
      rows: of the whole batch.

    Example:
      >>> import numpy as np, dtrans
      >>> part = dtrans.UnevenPart(np.arange(10, 13), rows=13)  # of the third of three trainers
    """

    x: Any
    rows: int

    def __post_init__(self) -> None:
        check_int("rows", self.rows, "how many rows the whole batch has", least=1)

    @property
    def ndim(self) -> int:
        """Of the part."""
        return int(self.x.ndim)


def without_parts(batch: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    """Batch arguments with plain arrays, and how many rows the whole batch has; 0 where no array is
    an `UnevenPart`.

    Raises:
      BatchError: parts of batches of different numbers of rows.
    """
    rows = {x.rows for x in jax.tree.leaves(batch) if isinstance(x, UnevenPart)}
    if len(rows) > 1:
        raise BatchError(
            f"the arrays are parts of batches of {' and '.join(map(str, sorted(rows)))} rows"
        )
    if not rows:
        return tuple(batch), 0
    return jax.tree.map(lambda x: x.x if isinstance(x, UnevenPart) else x, tuple(batch)), rows.pop()


def _along(x: Any, axis: int, start: int, stop: int) -> Any:
    at: list[slice] = [slice(None)] * x.ndim
    at[axis] = slice(start, stop)
    return x[tuple(at)]
