"""Options of pipelines: `Stages`, `StageMemory`, and all checked options, `PipelineOptions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cached_property

from dtrans.batch.exact_step import ExactStep
from dtrans.checks import check_flag, check_int, check_number, check_one_of, check_type
from dtrans.data_parallel.options import Options, Reduce
from dtrans.errors import ConfigError
from dtrans.ir.selection import exclude
from dtrans.pipeline_parallel.assign_stages import FLOPS_PER_BYTE, POLICIES
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.step.batch_sharing import Batch
from dtrans.zero.options import LossScaling, Precision


AXIS = "replica"  # mesh axis of the replicas of a stage
SPLIT = "split"  # mesh axis of the shards of a split stage


@dataclasses.dataclass(frozen=True)
class Stages:
    """Options that determine the stages of a pipeline, and the devices of the stages.

    Attributes:
      policy: the rule that divides the model. "HEURISTIC" (the default) begins stages between
        layers, if the result is nearly as fast as the best division. "BALANCE_FLOPS" minimizes the
        time of the slowest stage. "REPEATED_LAYERS" gives each stage the same number of layers.
        "BALANCE_OP_NUM" gives each stage the same number of equations. Scopes in the model
        (`dtrans.replicate`) override the policy.
      flops_per_byte: the floating-point operations that a device does while it sends one byte; see
        `FLOPS_PER_BYTE`.
      chunks: the number of stages on each device. Only for the schedule "Interleaved", where the
        default is 2.
      cluster: the assignment of devices to stages and replicas.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.Stages("REPEATED_LAYERS").flops_per_byte
      10.0
    """

    policy: str | None = None
    flops_per_byte: float = FLOPS_PER_BYTE
    chunks: int | None = None
    cluster: Cluster = Cluster()

    def __post_init__(self) -> None:
        check_one_of("policy", self.policy, (*POLICIES, None))
        what = "a number of flops for each byte, 0 or more"
        check_number("flops_per_byte", self.flops_per_byte, what, lambda x: x >= 0)
        check_int("chunks", self.chunks, or_none=True)
        check_type("cluster", self.cluster, Cluster)


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Options that reduce the memory of stages: sharding, checkpoints, offload and precision.

    Attributes:
      sharding_stage: 0: each replica of a stage stores the complete optimizer state. 1: each
        replica stores a slice of the optimizer state. 2: each replica also stores only a slice of
        the gradients. The replicas then reduce-scatter the gradients after each micro-batch. 3:
        each replica also stores only a slice of the parameters. The replicas then all-gather the
        parameters in each forward and backward pass of a micro-batch.
      min_slice_size: leaves with fewer elements are not sliced.
      gradient_checkpoint: the values that a stage saves from forward to backward. The stage
        recomputes all other residuals. "" (the default): all residuals. "auto": only values
        received from other stages. A collection of names: received values, and the values with
        these names (`jax.ad_checkpoint.checkpoint_name`). Values that depend only on random
        numbers, such as a dropout mask, are always saved.
      last_checkpointed_stage: the last stage to which `gradient_checkpoint` applies; -1 for all
        stages.
      update_groups: the number of groups of about equal size into which each stage divides its
        update. Groups run one after the other, which lowers the peak memory.
      offload: True if the host stores the parameters and the optimizer state, and computes the
        update. A stage then fetches parameters for each task.
      precision: the precision of matrix products: a `dtrans.Precision`, or the value of its
        `dtype`. With "bf16", matrix products and their operands have 16 bits, forward and backward.
        "fp16" has a dynamic loss scale: if gradients of a step are not finite, the step changes
        only the scale. `dtrans.Precision("fp16", loss_scaling=1024)` has a fixed scale.

    Raises:
      ConfigError: a value is out of range, or `offload` is combined with `sharding_stage`.

    Example:
      >>> import dtrans
      >>> dtrans.StageMemory(gradient_checkpoint=["attention"]).gradient_checkpoint
      ('attention',)
    """

    sharding_stage: int = 0
    min_slice_size: int = 1024
    gradient_checkpoint: str | Collection[str] = ""
    last_checkpointed_stage: int = -1
    update_groups: int = 1
    offload: bool = False
    precision: Precision | str | None = None

    def __post_init__(self) -> None:
        precision = Precision.from_option(self.precision)
        object.__setattr__(self, "precision", precision)
        stage = self.sharding_stage
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ConfigError(f"sharding_stage is {stage!r}; expected 0, 1, 2 or 3")
        check_int("min_slice_size", self.min_slice_size, "a number of elements, 0 or more", least=0)
        names = self.gradient_checkpoint
        if isinstance(names, str) and names not in ("", "auto"):
            raise ConfigError(
                f"gradient_checkpoint is {names!r}; expected 'auto', or a collection of names "
                "given with jax.ad_checkpoint.checkpoint_name"
            )
        if not isinstance(names, str):
            object.__setattr__(self, "gradient_checkpoint", tuple(names))
        end, what = self.last_checkpointed_stage, "the index of a stage, or -1 for all"
        check_int("last_checkpointed_stage", end, what, least=-1)
        check_int("update_groups", self.update_groups)
        check_flag("offload", self.offload)
        if self.offload and stage:
            raise ConfigError(
                f"offload is {self.offload!r} and sharding_stage is {stage}, but with offload the "
                "host stores one copy of the state, without slices for replicas; leave out one of "
                "the two options"
            )


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Checked options of a pipeline plan. For the other options, see `dtrans.pipeline`.

    Attributes:
      num_stages: the number of devices of one replica.
      schedule: the name of the schedule.
      splits_backward: True if the schedule has separate tasks (W) for the gradients of weights.
      chunks: the number of stages on each device.
      concat_axes: maps a result's name to the dimension along which the values of its micro-batches
        are concatenated, if this is not 0.
    """

    num_stages: int
    num_micro_batch: int
    schedule: str
    splits_backward: bool
    chunks: int
    replicas: int
    stages: Stages
    memory: StageMemory
    reduce: Reduce
    batch: Batch
    concat_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batch", "replicas"):
            check_int(name, getattr(self, name))
        check_type("memory", self.memory, StageMemory)
        stage, norm = self.memory.sharding_stage, self.reduce.clip_local_norm
        if stage and norm is not None:
            raise ConfigError(
                f"clip_local_norm is {norm!r} and sharding_stage is {stage}, but a local clip "
                "needs complete gradients on each replica, and with sharding_stage a replica has "
                "only slices; leave out one of the two options"
            )
        if self.reduce.clip_local_by == "norm":
            raise ConfigError(
                "clip_local_by is 'norm', but if one parameter is a stack of layers, a stage of "
                "the pipeline may have only a part of it; leave clip_local_by out, or clip reduced "
                "gradients with dtrans.paddle.optimizers.gradient_clip_by_norm in the optimizer"
            )
        if self.dynamic_scaling is not None and norm is not None:
            raise ConfigError(
                f"clip_local_norm is {norm!r} and precision={self.precision.dtype!r} has a dynamic "
                "loss scale, but a local clip would read gradients that are still multiplied by "
                f"the scale; pass dtrans.Precision({self.precision.dtype!r}, loss_scaling=1024), "
                "or clip in the optimizer with optax.clip_by_global_norm"
            )
        if not self.batch.exact:
            self.batch.check_axes()
        if self.over_parts.batch.example_count is not None:
            raise ConfigError(
                f"example_count is {self.batch.example_count!r}, but all micro-batches of a "
                "pipeline have equal weights; leave out example_count"
            )

    @property
    def precision(self) -> Precision:
        """Precision of matrix products."""
        return Precision.from_option(self.memory.precision)

    @property
    def dynamic_scaling(self) -> LossScaling | None:
        """Dynamic scaling of the loss; None for a fixed scale, or without a scale."""
        scaling = self.precision.scaling
        return scaling if scaling is not None and scaling.dynamic else None

    @property
    def loss_scale(self) -> float:
        """Fixed factor by which the loss is multiplied before the differentiation."""
        scaling = self.precision.scaling
        return 1.0 if scaling is None or scaling.dynamic else scaling.initial

    @property
    def local(self) -> PipelineOptions:
        """Copy of the options with `batch="micro"`, for independent micro-batches."""
        reduce = dataclasses.replace(self.reduce, op=self.reduce.op or "mean")
        batch = dataclasses.replace(self.batch, kind="local")
        return dataclasses.replace(self, batch=batch, reduce=reduce)

    def with_exact_step(self, shared: ExactStep) -> PipelineOptions:
        """Return a copy of the options with the merge rules and the reduction that a step needs.

        Args:
          shared: the step of a micro-batch (`batch="exact"`). With its rules for merging results
            and reducing gradients, the job computes the same results as one device on the full
            batch.
        """
        merge = {}
        for n, rule in shared.merges.items():
            if rule in ("mean", "sum") or n in shared.step.results:
                merge[n] = rule
        unsplit = tuple(exclude(shared.step.batch, shared.axes))
        batch = dataclasses.replace(self.batch, kind="local", merge=merge, unsplit_inputs=unsplit)
        reduce = dataclasses.replace(self.reduce, op=shared.reduce)
        return dataclasses.replace(self, batch=batch, reduce=reduce, concat_axes=shared.joined)

    @property
    def slices_gradients(self) -> bool:
        """True if replicas store slices of gradients, as with `sharding_stage` 2 and 3."""
        return self.replicas > 1 and self.memory.sharding_stage > 1

    @property
    def slices_params(self) -> bool:
        """True if replicas store slices of parameters, as with `sharding_stage=3`."""
        return self.replicas > 1 and self.memory.sharding_stage == 3

    @property
    def model_stages(self) -> int:
        """Number of stages of the model: `num_stages` devices with `chunks` stages each."""
        return self.num_stages * self.chunks

    @property
    def parts(self) -> int:
        """Number of micro-batches, over all replicas, into which the global batch is split."""
        return self.replicas * self.num_micro_batch

    @cached_property
    def over_replicas(self) -> Options:
        """Options of `dtrans.nccl2`, for replicas of a stage in place of trainers.

        Replicas of a stage reduce their gradients in the same way as trainers in nccl2 mode.
        """
        norm = self.reduce.clip_per_step(self.num_micro_batch)
        reduce = dataclasses.replace(self.reduce, clip_local_norm=norm, clip_local_per="step")
        return Options(
            trainers=self.replicas,
            axis_name=AXIS,
            reduce=reduce,
            batch=self.batch,
            noun="replica",
            is_pipeline=True,
        )

    @property
    def clip_of_each(self) -> float | None:
        """Norm to which the gradients of each micro-batch are clipped; None without this clip.

        With this clip, stages store the gradients of each micro-batch until the update. Without it,
        stages store only the sum over micro-batches.
        """
        return self.reduce.clip_per_micro_batch(self.num_micro_batch)

    @cached_property
    def over_parts(self) -> Options:
        """Options of `dtrans.nccl2` for merging results over all micro-batches of all replicas."""
        return dataclasses.replace(self.over_replicas, num_micro_batch=self.num_micro_batch)
