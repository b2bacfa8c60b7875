"""Options of `dtrans.sharding`: slices of parameters and state, 16-bit types, loss scaling."""

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
from dtrans.tensor_parallel.mesh_option import DATA, SEQUENCE
from dtrans.zero.by_leaf.assign import RULES


PARTITIONS = ("rows", *RULES)
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """Loss scale: a factor that keeps small gradients in 16 bits from becoming zero.

    The loss is multiplied by the scale, and gradients are divided by it before the update.

    Attributes:
      initial: the first scale.
      dynamic: True to adapt the scale to the gradients. If a gradient is not finite, the step
        only divides the scale by `factor`; it changes no parameter and no optimizer state. After
        `interval` finite steps in a row, the scale is multiplied by `factor`. With False, the scale
        is fixed and no step is skipped.
      factor, interval: see `dynamic`.

    Raises:
      ConfigError: a value is out of range.

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
        # `next_scale` keeps a dynamic scale at 1 or more
        check_number(
            "initial", self.initial, "a number from 1 to 3.4e38", lambda x: 1 <= x <= _LARGEST
        )
        check_number("factor", self.factor, "a finite number above 1", lambda x: 1 < x <= _LARGEST)
        check_int("interval", self.interval, "a positive number of steps")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Types in which a step computes: matrix products may have 16 bits.

    Attributes:
      dtype: "bf16" or "fp16", the type of matrix products (`dtrans.zero.mixed_precision`). With
        None, no type changes. If only products read a parameter, the parameter is gathered, and its
        gradient reduced, in this type. The update keeps its types. With a `dtype`, ranks store only
        slices of parameters between steps, also in stages 1 and 2. In these stages, each step (or
        micro-step) gathers each parameter once.
      loss_scaling: a `LossScaling`, or a number for a fixed scale. The default for "fp16" is a
        dynamic scale: it starts at 2^15 and doubles after 2,000 finite steps. If a gradient of
        any rank is not finite, the step halves the scale, and changes nothing else. "bf16" needs
        no scale.

    Raises:
      ConfigError: a value is out of range, or `loss_scaling` is given without `dtype`.

    Example:
      >>> import dtrans
      >>> dtrans.Precision("fp16", loss_scaling=128).loss_scaling
      LossScaling(initial=128.0, dynamic=False, factor=2.0, interval=2000)
    """

    dtype: str | None = None
    loss_scaling: LossScaling | float | None = None

    def __post_init__(self) -> None:
        check_one_of("precision", self.dtype, ("fp16", "bf16", None))
        value = self.loss_scaling
        if is_number(value):
            fixed = LossScaling(float(value), dynamic=False)  # type: ignore[arg-type]
            object.__setattr__(self, "loss_scaling", fixed)
        elif value is None and self.dtype == "fp16":
            object.__setattr__(self, "loss_scaling", LossScaling())
        elif value is not None:
            check_type("loss_scaling", value, LossScaling, "a number, a LossScaling or None")
        if value is not None and self.dtype is None:
            raise ConfigError(
                f"loss_scaling={value!r} needs products in 16 bits, but dtype is None; pass 'fp16' "
                "or 'bf16' as dtype, or leave loss_scaling out"
            )

    @classmethod
    def from_option(cls, value: Any) -> Precision:
        """Convert the user's option `precision` to a `Precision`.

        Args:
          value: a `Precision`, its `dtype` ("bf16" or "fp16"), or None.
        """
        return value if isinstance(value, cls) else cls(value)

    @property
    def scaling(self) -> LossScaling | None:
        """Loss scaling, after a number was converted to a `LossScaling`; None if there is none."""
        assert self.loss_scaling is None or isinstance(self.loss_scaling, LossScaling)
        return self.loss_scaling


@dataclasses.dataclass(frozen=True)
class Slicing:
    """Options for the division of parameters into slices, and for the all-gathers of these slices.

    Attributes:
      partition: "rows" slices each parameter. "greedy_even" and "use_order" assign each parameter
        to one rank, its owner. Only the owner updates the parameter and stores its state. Choose
        one of these two if the update mixes the rows of every parameter, which is expensive on
        slices (`dtrans.zero.by_leaf.layout`). Both rules need stage 1 or 2 and no `precision`, and
        ignore `min_slice_size`.
      min_slice_size: parameters with fewer elements are not sliced.
      gather_bucket_MB: in stage 3, the size in MB up to which adjacent parameters share one
        all-gather. 0 gathers each parameter separately.
      prefetch: in stage 3, the number of parameters that are gathered before they are needed. A
        loop over layers prefetches only the first parameter of the next layer. The default is 1 if
        `overlap` is True, else 0. By default, loops prefetch only on platforms that overlap gathers
        with computation (`dtrans.run.base.platforms`).
      overlap: True to let collectives overlap with computation. False starts each collective when
        the previous one has ended.
      state_axes: with `mesh`, the axes that divide the optimizer state: ("data",), or ("data",
        "sequence"). The axis "model" always divides the state of `dtrans.split` layers.
      axis_name: the mesh axis over the ranks of a group.
      replica_axis_name: the mesh axis over the groups.

    Raises:
      ConfigError: a value is out of range, or `prefetch` is given with `overlap=False`.

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
    state_axes: tuple[str, ...] = (DATA,)
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
                f"overlap=False and prefetch={self.prefetch}: a prefetch overlaps with "
                "computation; leave one of the two out"
            )
        check_one_of("state_axes", self.state_axes, ((DATA,), (DATA, SEQUENCE)))
        if SEQUENCE in self.state_axes and self.partition != "rows":
            raise ConfigError(
                f"state_axes={self.state_axes} and partition={self.partition!r}: a rank stores the "
                "complete state of its parameters; pass partition='rows', or leave state_axes out"
            )
        check_name("axis_name", self.axis_name, "the name of an axis")
        check_name("replica_axis_name", self.replica_axis_name, "the name of an axis")
        if self.axis_name == self.replica_axis_name:
            raise ConfigError(
                f"axis_name and replica_axis_name are both {self.axis_name!r}; pass two different "
                "names"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions(Options):
    """All options of a call of `dtrans.sharding`, which describes each of them."""

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
        if dtype is not None and compress is not None:
            raise ConfigError(
                f"precision={dtype!r} and compress={compress!r}: precision already reduces "
                "gradients in 16 bits; leave compress out"
            )
        clips_each = self.reduce.clip_per_micro_batch(self.num_micro_batch) is not None
        if clips_each and self.precision.scaling is not None:
            raise ConfigError(
                f"clip_local_per='micro_batch' and precision={dtype!r} with a scaled loss: the "
                "gradients of micro-batches are still multiplied by the scale; pass "
                "clip_local_per='step', or precision='bf16'"
            )
        chains = self.reduce.chains
        if not slices.overlap and chains is not None and chains > 1:
            raise ConfigError(
                f"overlap=False and chains={chains}: several chains of reductions overlap; leave "
                "one of the two out"
            )
        self._check_micro_steps()
        if slices.partition != "rows":
            others = {
                f"stage={self.stage}": self.stage == 3,
                f"precision={dtype!r}": dtype is not None,
                f"{self._micro_steps} in stage {self.stage}": self._scatters_micro_steps,
                f"mesh={{..., 'model': {self.model}}}": self.model > 0,
            }
            why = (
                "this partition needs all parameters, and all gradients of a micro-step, on every "
                "rank; use partition='rows'"
            )
            check_together(others, why, f"partition={slices.partition!r}")

    @property
    def _micro_steps(self) -> str:
        return f"num_micro_batch={self.num_micro_batch}"

    @property
    def _scatters_micro_steps(self) -> bool:
        """True if ranks reduce-scatter gradients after each micro-step, and add up slices."""
        return self.num_micro_batch > 1 and self.stage > 1

    def _check_micro_steps(self) -> None:
        """Raise ConfigError if an option needs full gradients, which ranks do not have.

        In stages 2 and 3, ranks scatter gradients after each micro-step. So no rank has a full
        gradient after all micro-steps.
        """
        if not self._scatters_micro_steps:
            return
        where = f"{self._micro_steps} in stage {self.stage}: each micro-step scatters its gradients"
        count, norm = self.batch.example_count, self.reduce.clip_local_norm
        if count is not None:
            raise ConfigError(
                f"example_count={count!r} and {where} before all weights are known; pass stage=1"
            )
        if norm is not None:
            raise ConfigError(
                f"clip_local_norm={norm!r} and {where}, so that no rank has its full gradient; "
                "pass stage=1"
            )

    def _needs_of_gradients(self) -> dict[str, bool]:
        dtype, partition = self.precision.dtype, self.slices.partition
        return {
            **super()._needs_of_gradients(),
            f"leave out replicas={self.replicas}": self.replicas > 1,
            f"leave out precision={dtype!r}": dtype is not None,
            f"leave out partition={partition!r}": partition != "rows",
        }

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes as pairs (name, size): first over groups, then over the ranks of a group."""
        inner = (self.axis_name, self.degree)
        if self.replicas == 1:
            return (inner,)
        outer = (self.slices.replica_axis_name, self.replicas)
        return (outer, inner) if self.degree > 1 else (outer,)

    @property
    def prefetch(self) -> int:
        """Number of parameters that stage 3 gathers before they are needed."""
        if self.slices.prefetch is not None:
            return self.slices.prefetch
        return 1 if self.slices.overlap else 0

    @property
    def slices_params(self) -> bool:
        """True if ranks store parameters as slices: in stage 3, or with products in 16 bits."""
        return self.stage == 3 or self.precision.dtype is not None
