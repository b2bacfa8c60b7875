"""Division of a batch among trainers: the option `batch`, and the rows that each process reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from dtrans.checks import check_int, check_one_of, check_speeds, check_type
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.pytree import TreeSpec


@dataclasses.dataclass(frozen=True)
class Batch:
    """Options for the division of the batch among trainers, and for the merge of their results.

    All strategies accept this object as the option `batch`. `kind` has three values:

    - "exact", the default: the job computes the numbers of one device for every step. Trainers
      communicate values that depend on the full batch (a masked mean, batch statistics, a count).
      Random numbers for the batch equal those of one device. Micro-batches of a pipeline, and
      asynchronous trainers, cannot communicate within a step. For them, planning raises an error if
      the sum of the parts' results is not the result of the full batch.
    - "local": each trainer computes the step on its part alone, as in Paddle and `dtrans.Geo`. So
      each trainer has its own statistics, random numbers and counts.
    - "micro", for pipelines: each micro-batch computes the step alone. For a pipeline, "local"
      means "micro".

    `merge` maps a name to the way in which the trainers' values become one. The names are those of
    results, and of parameters that the optimizer does not compute (batch statistics):

    - "mean", "max" and "sum" reduce the values. The "sum" of a parameter is the sum of the
      trainers' increments.
    - "concat" concatenates the values along dimension 0.
    - "each" adds a leading axis with one entry per trainer.
    - "same" states that all trainers compute the same value.

    By default, results that grow with the batch are concatenated, and parameters are averaged.
    Other floating-point results are reduced like gradients (`dtrans.Reduce`). The default for all
    other values is "each". Results that depend on gradients are computed from reduced gradients;
    with `local_sgd`, from the trainer's own gradients. Parameter servers have different merges, see
    `dtrans.pserver`.

    Attributes:
      kind: "exact", "local" or "micro".
      axes: the batch dimension of each batch argument, as `in_axes` of `jax.vmap`: a number, None
        for a replicated argument, or a tuple with one entry for each argument. 0-d arrays are
        always replicated.
      sequence: the sequence dimension of each batch argument, for a mesh with an axis "sequence";
        in the same form as `axes`. Arrays without this dimension are replicated over that axis.
      unsplit_inputs: names of batch arrays that every trainer gets in full. Every trainer also gets
        0-d arrays in full. Other arrays are split on dimension 0. With "local", each trainer folds
        its index into a `jax.random.key` that is not named here.
      example_count: name of a result, a scalar: the number of examples in a trainer's part of the
        batch. The job returns its sum over trainers.
      merge: name -> way to merge the trainers' values, such as {"aux/hits": "sum"}.
      speeds: the relative speed of each trainer of `dtrans.pserver`, such as [2, 1]. A trainer gets
        a share of the rows in proportion to its speed (`shares`). By default, all trainers get
        equal parts.

    Raises:
      ConfigError: an unknown kind, a bad axis, names that are not strings, or a speed that is no
        positive number.

    Example:
      >>> import dtrans
      >>> dtrans.Batch(unsplit_inputs=["class_weights"]).unsplit_inputs
      ('class_weights',)
      >>> dtrans.Batch("local", merge={"aux/hits": "sum"}).exact
      False
    """

    kind: str | None = None
    axes: Any = 0
    sequence: Any = 1
    unsplit_inputs: Collection[str] = ()
    example_count: str | None = None
    merge: Mapping[str, str] = dataclasses.field(default_factory=dict)
    speeds: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", check_speeds(self.speeds, "trainer"))
        if self.kind is not None:
            check_one_of("batch", self.kind, ("exact", "local", "micro"))
        for option, dims in (("axes", self.axes), ("sequence", self.sequence)):
            for dim in dims if isinstance(dims, tuple) else (dims,):
                check_int(
                    option,
                    dim,
                    "a dimension, None, or a tuple with one of these for each",
                    least=0,
                    or_none=True,
                )
        names: Any = self.unsplit_inputs
        merge: Any = self.merge
        if isinstance(names, str) or not isinstance(names, Collection):
            raise ConfigError(f"unsplit_inputs={names!r} must be a list of names of batch arrays")
        if not isinstance(merge, Mapping) or not all(isinstance(n, str) for n in merge):
            raise ConfigError(
                f"merge={merge!r} must be a dict from names to merges, such as {{'aux': 'sum'}}"
            )
        object.__setattr__(self, "unsplit_inputs", tuple(names))
        object.__setattr__(self, "merge", dict(merge))

    @classmethod
    def from_option(
        cls, value: Any, kind: str, *, micro: bool = False, one_program: str = ""
    ) -> Batch:
        """Convert the user's option `batch` to a `Batch`, and check that the strategy supports it.

        A user may pass a string: `batch="local"` is short for `batch=dtrans.Batch("local")`.

        Args:
          value: the user's option: a `Batch` or its kind.
          kind: the kind that the strategy uses if the user's `Batch` has none, such as "exact".
          micro: True if the strategy has micro-batches, so that `batch="micro"` is allowed.
          one_program: name of the strategy, if several devices run one program. These devices
            cannot have different numbers of rows, so `speeds` is then an error.

        Raises:
          ConfigError: the strategy does not support this kind, or `speeds`.
        """
        if isinstance(value, str):
            value = cls(value)
        check_type("batch", value, cls, "'exact', 'local' or a dtrans.Batch")
        found: Batch = dataclasses.replace(value, kind=value.kind or kind)
        if found.kind == "micro" and not micro:
            raise ConfigError(
                "batch='micro' is for dtrans.pipeline only; pass batch='local': each part of the "
                "batch then has its own batch statistics"
            )
        if found.speeds and one_program:
            raise ConfigError(
                f"batch=dtrans.Batch(speeds={list(found.speeds)}) cannot be combined with "
                f"{one_program}, which runs one program on several devices: each would compute as "
                "many rows as the fastest; use dtrans.pserver, whose trainers have separate "
                "programs, or leave out speeds. For the stages of a pipeline, pass "
                "dtrans.Cluster(speeds=...)"
            )
        return found

    def check_axes(self) -> None:
        """Raise ConfigError if `axes` is not 0; only `batch="exact"` supports other dimensions."""
        if self.axes != 0:
            raise ConfigError(
                f"axes={self.axes!r} needs batch='exact'. With batch={self.kind!r} leave out axes: "
                "arrays are split on dimension 0, or replicated if unsplit_inputs names them"
            )

    def dims_of(self, option: str, count: int) -> tuple[int | None, ...]:
        """Return the dimension in `axes` or `sequence` for each batch argument.

        For example, `axes=0` and two batch arguments give (0, 0).

        Args:
          option: "axes" or "sequence".
          count: the number of batch arguments.

        Raises:
          ConfigError: the option is a tuple with another number of entries.
        """
        value = getattr(self, option)
        dims: tuple[int | None, ...] = value if isinstance(value, tuple) else (value,) * count
        if len(dims) != count:
            raise ConfigError(
                f"{option}={value!r} has {len(dims)} entries, but the step has {count} batch "
                "arguments; pass one entry for each batch argument"
            )
        return dims

    @property
    def exact(self) -> bool:
        """True if the job must compute the same numbers as one device with the full batch."""
        return self.kind == "exact"

    @property
    def has_shares(self) -> bool:
        """True if trainers have different speeds, so that they get different numbers of rows."""
        return len(set(self.speeds)) > 1

    def shares(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows that each trainer gets from a batch, in proportion to `speeds`.

        For 13 rows and speeds [2, 1], the numbers are (9, 4). They are rounded by the method of
        largest remainders. Each trainer gets at least one row. The first rows belong to trainer 0,
        the next rows to trainer 1, and so on.

        Args:
          rows: the number of rows in the global batch.

        Raises:
          BatchError: there are fewer rows than trainers.
          ConfigError: the batch has no `speeds`.

        Example:
          >>> import dtrans
          >>> dtrans.Batch(speeds=[2, 1]).shares(13)
          (9, 4)
          >>> dtrans.Batch(speeds=[100, 1]).shares(8)
          (7, 1)
        """
        if not self.speeds:
            raise ConfigError("shares needs speeds; pass dtrans.Batch(speeds=[...])")
        if rows < len(self.speeds):
            raise BatchError(
                f"the batch has {rows} rows for {len(self.speeds)} trainers, but each trainer "
                f"needs at least one row; pass {len(self.speeds)} rows or more"
            )
        # fractions, because all processes must compute the same numbers
        speeds = list(map(Fraction, self.speeds))
        exact = [rows * speed / sum(speeds) for speed in speeds]
        found = [max(1, int(x)) for x in exact]
        missing = lambda k: exact[k] - found[k]
        while sum(found) < rows:
            found[max(range(len(found)), key=missing)] += 1
        while sum(found) > rows:
            several = [k for k, count in enumerate(found) if count > 1]
            found[min(several, key=missing)] -= 1
        return tuple(found)

    def check_merge(self, ways: Collection[str]) -> None:
        """Raise ConfigError if the strategy does not support a value of `merge`.

        Args:
          ways: the values that the strategy supports, such as "mean" and "sum".
        """
        for name, way in self.merge.items():
            check_one_of(f"merge[{name!r}]", way, ways)


def shard_batch(batch: Any, number: int, count: int, axis: int = 0) -> Any:
    """Return one of `count` equal parts of a batch, for a data loader without a job.

    Part `number` of a batch of B rows has the rows number*B/count to (number+1)*B/count. If there
    is a job, call `job.shard_batch` instead.

    Args:
      batch: a pytree of arrays, NumPy's or JAX's; every part gets 0-d arrays unchanged.
      number: index of the part, from 0.
      count: number of parts.
      axis: the dimension of the rows.

    Raises:
      BatchError: `count` does not divide the rows.
      ConfigError: `number` is not in 0 to `count` - 1.

    Example:
      >>> import numpy as np, dtrans
      >>> dtrans.shard_batch({"rate": np.float32(0.5), "x": np.arange(6)}, 1, 3)
      {'rate': np.float32(0.5), 'x': array([2, 3])}
    """
    check_int("count", count, "a positive number of parts")
    check_int("number", number, f"one of the parts 0 to {count - 1}", least=0, most=count - 1)

    def part(path: Any, x: Any) -> Any:
        if not np.ndim(x):
            return x
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
        return part_of(x, number, count, axis, name)

    return jax.tree_util.tree_map_with_path(part, batch)


def part_of(
    x: Any,
    number: int,
    count: int,
    axis: int,
    name: str,
    trainers: int = 0,
    shares: Callable[[int], Sequence[int]] | None = None,
) -> Any:
    """Return part `number` of an array that is split into `count` parts along dimension `axis`.

    `job.shard_batch` calls this function for each array of a batch.

    Args:
      x: the array.
      number: index of the part, from 0.
      count: number of parts, one for each process.
      axis: the dimension to split.
      name: name of the array in errors.
      trainers: number of trainers in all processes. If this number does not divide the rows, the
        result is an `UnevenPart`. Pass 0 if all parts must be equal.
      shares: function from the number of rows of `x` to the number of rows of each part. An example
        is `Batch.shares`. The result is then an `UnevenPart`. None for equal parts.

    Raises:
      BatchError: `count` does not divide the rows, and `trainers` is 0.
    """
    rows = x.shape[axis] if axis < x.ndim else 1
    if shares is not None:
        sizes = shares(rows)
        start = sum(sizes[:number])
        return UnevenPart(_along(x, axis, start, start + sizes[number]), rows)
    if trainers and rows % trainers:
        each = -(-rows // trainers) * (trainers // count)
        return UnevenPart(_along(x, axis, number * each, (number + 1) * each), rows)
    if rows % count:
        raise BatchError(
            f"{name} has {rows} rows, which cannot be split evenly over {count} processes; pass a "
            f"multiple of {count} rows"
        )
    size = rows // count
    return _along(x, axis, number * size, (number + 1) * size)


def part_of_batch(
    specs: Sequence[TreeSpec],
    batch: Sequence[Any],
    axes: Mapping[str, int],
    part: tuple[int, int],
    trainers: int = 0,
    shares: Callable[[int], Sequence[int]] | None = None,
) -> tuple[Any, ...]:
    """Return the rows of all batch arguments that one process reads, for `job.shard_batch`.

    Args:
      specs: structures of the batch arguments.
      batch: the batch arguments.
      axes: maps the name of each array to split to the dimension of its rows. All other arrays are
        returned in full.
      part: index of the part, and the number of parts.
      trainers, shares: as in `part_of`.

    Raises:
      BatchError: as `part_of`; or `batch` and `specs` differ in length.
    """
    if len(batch) != len(specs):
        raise BatchError(
            f"the step takes {len(specs)} batch arguments, {len(batch)} were given; pass "
            "the same arguments as to dtrans.trace"
        )
    number, count = part
    found = []
    for spec, tree in zip(specs, batch, strict=True):
        arrays = spec.flatten(tree)
        for i, (name, x) in enumerate(zip(spec.names, arrays, strict=True)):
            if name in axes:
                arrays[i] = part_of(x, number, count, axes[name], name, trainers, shares)
        found.append(spec.unflatten(arrays))
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class UnevenPart:
    """Rows that one process gets if the trainers cannot get equal numbers of rows.

    `job.shard_batch` returns this object, and `job.step` accepts it in place of an array. Without
    `dtrans.Batch.speeds`, each trainer has `ceil(rows / trainers)` rows, but the last trainers have
    fewer or none. For 10 rows and 4 trainers, these numbers are 3, 3, 3 and 1. With speeds,
    `dtrans.Batch.shares` returns the numbers.

    Attributes:
      x: this process's rows, a NumPy or JAX array.
      rows: number of rows in the full batch.

    Example:
      >>> import numpy as np, dtrans
      >>> part = dtrans.UnevenPart(np.arange(10, 13), rows=13)  # rows of the last of 3 trainers
    """

    x: Any
    rows: int

    def __post_init__(self) -> None:
        check_int("rows", self.rows, "the number of rows in the full batch", least=1)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return int(self.x.ndim)


def without_parts(batch: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    """Replace each `UnevenPart` among batch arguments by its array, before a job runs the step.

    Args:
      batch: the batch arguments: pytrees of arrays or of `UnevenPart`.

    Returns:
      A pair (arguments, rows). `rows` is the number of rows in the full batch, or 0 if no argument
      is an `UnevenPart`.

    Raises:
      BatchError: the parts belong to batches with different numbers of rows.
    """
    rows = {x.rows for x in jax.tree.leaves(batch) if isinstance(x, UnevenPart)}
    if len(rows) > 1:
        raise BatchError(
            "the arguments are parts of batches with "
            f"{' and '.join(map(str, sorted(rows)))} rows; pass parts of one batch"
        )
    if not rows:
        return tuple(batch), 0
    return jax.tree.map(lambda x: x.x if isinstance(x, UnevenPart) else x, tuple(batch)), rows.pop()


def _along(x: Any, axis: int, start: int, stop: int) -> Any:
    at: list[slice] = [slice(None)] * x.ndim
    at[axis] = slice(start, stop)
    return x[tuple(at)]
