"""The options of sharding: records of how state is sliced and in what types steps compute, and
which of them can be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dtrans.checks import (
    check_flag,
    check_int,
    check_name,
    check_number,
    check_one_of,
    check_size,
    check_together,
    check_type,
    is_number,
)
from dtrans.data_parallel.options import Options
from dtrans.errors import ConfigError
from dtrans.zero.by_leaf.assign import RULES


PARTITIONS = ("rows", *RULES)
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """Scaling of a loss so that gradients in 16 bits do not underflow.

    Attributes:
      initial: the first scale.
      dynamic: whether the scale follows the gradients. If a gradient is not finite, the step
        changes nothing and the scale is divided by `factor`. After `interval` finite steps it is
        multiplied by `factor`. A fixed scale stays, and skips no step.
      factor, interval: see `dynamic`.

    Raises:
      ConfigError: a value that is out of range.

    Source: `update_loss_scaling` of Paddle (operators/amp/update_loss_scaling_op.h).

    Example:
      >>> import dtrans
      >>> dtrans.LossScaling(initial=1024.0, dynamic=False).initial
      1024.0
    """

    initial: float = 2.0**15
    dynamic: bool = True
    factor: float = 2.0
    interval: int = 2000

    def __post_init__(self) -> None:
        # a dynamic scale is never less than 1
        check_number(
            "initial", self.initial, "a number from 1 to 3.4e38", lambda x: 1 <= x <= _LARGEST
        )
        check_number("factor", self.factor, "a finite number above 1", lambda x: 1 < x <= _LARGEST)
        check_int("interval", self.interval, "a positive number of steps")


@dataclasses.dataclass(frozen=True)
class Precision:
    """In what types a step computes.

    Attributes:
      dtype: "bf16" or "fp16": products of matrices in that type (`dtrans.zero.mixed_precision`),
        parameters gathered, and gradients reduced, in it where products alone read them. Parameters
        that are updated stay as they are; each rank has slices of them, in every stage. In stages 1
        and 2 they are gathered once in a step (or micro-step). None computes as the step does.
      loss_scaling: how the loss is scaled, or a fixed scale. For "fp16" it is dynamic by default:
        from 2^15, halved by a step in which a gradient of any rank is not finite, which changes
        nothing else, and doubled after 2,000 others. "bf16" needs none.

    Raises:
      ConfigError: a value that is out of range, or a scale without a type.

    Example:
      >>> import dtrans
      >>> dtrans.Precision("fp16", loss_scaling=128).loss_scaling
      LossScaling(initial=128.0, dynamic=False, factor=2.0, interval=2000)
    """

    dtype: str | None = None
    loss_scaling: LossScaling | float | None = None

    def __post_init__(self) -> None:
        check_one_of("precision", self.dtype, ("fp16", "bf16", None))
        given = self.loss_scaling
        if is_number(given):
            object.__setattr__(self, "loss_scaling", LossScaling(float(given), dynamic=False))  # type: ignore[arg-type]
        elif given is None and self.dtype == "fp16":
            object.__setattr__(self, "loss_scaling", LossScaling())
        elif given is not None:
            check_type("loss_scaling", given, LossScaling, "a number, a LossScaling or None")
        if given is not None and self.dtype is None:
            raise ConfigError(
                f"loss_scaling={given!r} is for precision='fp16' or 'bf16', which is None"
            )

    @classmethod
    def of(cls, given: Any) -> Precision:
        """Return the record for the option `precision`: a record, its `dtype`, or None."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def scaling(self) -> LossScaling | None:
        """Return the scaling of the loss, or None."""
        assert self.loss_scaling is None or isinstance(self.loss_scaling, LossScaling)
        return self.loss_scaling


@dataclasses.dataclass(frozen=True)
class Slicing:
    """Sharding of leaves over ranks, and the gather of whole leaves from slices.

    Attributes:
      partition: "rows" cuts each parameter. "greedy_even" and "use_order" assign whole parameters
        to ranks; a rank alone updates a parameter that it owns, and holds its state. Use these if
        the update mixes the rows of every leaf, which is expensive on slices; see
        `dtrans.zero.by_leaf.layout`. They need stage 1 or 2 and no `precision`, and ignore
        `min_slice_size`.
      min_slice_size: a parameter of fewer elements stays whole on every rank.
      gather_bucket_MB: in stage 3, the size up to which adjacent gathers of parameters are
        combined. 0 gathers each by itself.
      prefetch: in stage 3, the number of parameters that are gathered ahead; in a loop, the first
        one of the next layer. 1 by default, 0 without `overlap`. By default jobs do not prefetch in
        loops on platforms that do not overlap gathers with computation
        (`dtrans.run.base.platforms`).
      overlap: let collectives run beside computation. Without it, each begins when the previous one
        has ended.
      axis_name, replica_axis_name: names of the mesh axes: over the ranks of a group, and over
        groups.

    Raises:
      ConfigError: a value that is out of range, or a prefetch without overlap.

    Example:
      >>> import dtrans
      >>> dtrans.Slicing("greedy_even").axis_name
      'shard'
    """

    partition: str = "rows"
    min_slice_size: int = 1024
    gather_bucket_MB: float = 0
    prefetch: int | None = None
    overlap: bool = True
    axis_name: str = "shard"
    replica_axis_name: str = "dp"

    def __post_init__(self) -> None:
        check_one_of("partition", self.partition, PARTITIONS)
        check_int("min_slice_size", self.min_slice_size, "a number of elements, 0 or more", least=0)
        check_size("gather_bucket_MB", self.gather_bucket_MB)
        check_flag("overlap", self.overlap)
        check_int(
            "prefetch", self.prefetch, "a number of gathers, 0 or more", least=0, or_none=True
        )
        if not self.overlap and self.prefetch:
            raise ConfigError(
                f"overlap=False and prefetch={self.prefetch}: what is gathered ahead of time "
                "overlaps"
            )
        check_name("axis_name", self.axis_name, "the name of an axis")
        check_name("replica_axis_name", self.replica_axis_name, "the name of an axis")
        if self.axis_name == self.replica_axis_name:
            raise ConfigError(
                f"axis_name and replica_axis_name are both {self.axis_name!r}: give two names"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions(Options):
    """The options of `dtrans.sharding`, which says what they are."""

    stage: int
    degree: int
    replicas: int = 1
    precision: Precision = Precision()
    slices: Slicing = Slicing()
    prefetches_in_loops: bool = True
    noun: str = "rank"

    @property
    def splits_evenly(self) -> bool:
        return super().splits_evenly or self.precision.dtype is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("stage", self.stage, (1, 2, 3))
        dtype, compress, slices = self.precision.dtype, self.reduce.compress, self.slices
        scattered_early = self.num_micro_batch > 1 and self.stage > 1
        if dtype is not None and compress is not None:
            raise ConfigError(
                f"precision={dtype!r} and compress={compress!r}: gradients are reduced in the type "
                "of precision already"
            )
        if self.batch.example_count is not None and scattered_early:
            raise ConfigError(
                f"example_count={self.batch.example_count!r} and "
                f"num_micro_batch={self.num_micro_batch} in stage "
                f"{self.stage}: gradients are scattered in each micro-step, before the weights of "
                "all are known; use "
                "stage 1"
            )
        if self.reduce.clip_local_norm is not None and scattered_early:
            raise ConfigError(
                f"clip_local_norm={self.reduce.clip_local_norm!r} and "
                f"num_micro_batch={self.num_micro_batch} in stage "
                f"{self.stage}: gradients are scattered in each micro-step, and no rank has the "
                "whole of its own; use "
                "stage 1"
            )
        if (
            self.reduce.clip_per_micro_batch(self.num_micro_batch) is not None
            and self.precision.scaling is not None
        ):
            raise ConfigError(
                f"clip_local_per='micro_batch' and precision={dtype!r} with a scaled loss: "
                "gradients of micro-batches "
                "are too large by the scale; say clip_local_per='step', or precision='bf16'"
            )
        chains = self.reduce.chains
        if not slices.overlap and chains is not None and chains > 1:
            raise ConfigError(
                f"overlap=False and chains={chains}: several chains of reductions are there to "
                "overlap"
            )
        if slices.partition != "rows":
            others = {
                f"stage={self.stage}": self.stage == 3,
                f"precision={dtype!r}": dtype is not None,
                f"num_micro_batch={self.num_micro_batch} in stage {self.stage}": scattered_early,
            }
            why = (
                "ranks own whole leaves and their state, while each has all parameters, and all "
                "gradients of a "
                "micro-step; use partition='rows'"
            )
            check_together(others, why, f"partition={slices.partition!r}")

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that ranks are on, with their sizes: groups, and the ranks of a group."""
        outer = ((self.slices.replica_axis_name, self.replicas),) if self.replicas > 1 else ()
        return (*outer, (self.axis_name, self.degree)) if self.degree > 1 or not outer else outer

    @property
    def prefetch(self) -> int:
        """Return the number of parameters that are gathered ahead."""
        return int(self.slices.overlap) if self.slices.prefetch is None else self.slices.prefetch

    @property
    def slices_params(self) -> bool:
        """Return True if parameters are slices between steps: in stage 3, and in 16 bits."""
        return self.stage == 3 or self.precision.dtype is not None
