"""The options of pipelines: records of how stages are found and what they keep, and which of them
can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cached_property

from dtrans.batch.exact_step import ExactStep
from dtrans.checks import check_flag, check_int, check_number, check_one_of, check_type
from dtrans.data_parallel.options import Options, Reduce
from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.assign_stages import FLOPS_PER_BYTE, POLICIES
from dtrans.pipeline_parallel.device_layout import Cluster
from dtrans.step.batch_sharing import Batch
from dtrans.zero.options import Precision


AXIS = "replica"
SPLIT = "split"  # the axis of the shards of a stage that is split


@dataclasses.dataclass(frozen=True)
class Stages:
    """Rules by which stages are found and placed on devices.

    Attributes:
      policy: "BALANCE_FLOPS" (the slowest stage is as fast as possible), "REPEATED_LAYERS" (whole
        layers), "BALANCE_OP_NUM", or "HEURISTIC" (whole layers where that is nearly as fast), the
        default. Scopes in the model (`dtrans.replicate`) override it.
      flops_per_byte: floating-point operations of a device in the time in which a byte reaches the
        next: see `FLOPS_PER_BYTE`.
      chunks: stages on each device, for the schedule "Interleaved"; 2 by default.
      cluster: the layout of stages and replicas over devices.

    Raises:
      ConfigError: a value that is out of range.

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
    """Memory of stages and their replicas: slices, checkpoints, offload and types.

    Attributes:
      sharding_stage: 1 or 2: replicas of a stage keep slices of its optimizer state; 2: of its
        gradients too, which are then reduced for each micro-batch.
      min_slice_size: leaves of fewer elements are not sliced.
      gradient_checkpoint: values of a micro-batch that stages store until its backward. "auto":
        their inputs from other stages. Names that `jax.ad_checkpoint.checkpoint_name` gave: these
        values and the inputs. Stages recompute all other values. Random numbers are not recomputed:
        a stage stores values that depend on them alone (a dropout mask).
      last_checkpointed_stage: the last stage with `gradient_checkpoint`; -1 for all stages.
      update_groups: the number of parts of even size into which each stage divides its update. The
        parts run one after the other, which lowers the peak of memory.
      offload: parameters, optimizer state and the update are on the host. Stages fetch a parameter
        for each task that reads it.
      precision: the types in which stages compute: a `dtrans.Precision`, or its `dtype`. With
        "bf16" matrix products are in 16 bits, forward and backward, and so are the values stored
        and sent for them. "fp16" needs a fixed scale of the loss, `dtrans.Precision("fp16",
        loss_scaling=1024)`.

    Raises:
      ConfigError: a value that is out of range, slices of what is on the host, or a scale of the
        loss that changes.

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
        precision = Precision.of(self.precision)
        object.__setattr__(self, "precision", precision)
        if precision.scaling is not None and precision.scaling.dynamic:
            raise ConfigError(
                f"precision={precision.dtype!r} with a scale of the loss that changes: stages of a "
                "pipeline take a "
                f"fixed one, dtrans.Precision({precision.dtype!r}, loss_scaling=1024), beside "
                "which "
                "optax.apply_if_finite skips steps that are not finite; or precision='bf16', which "
                "needs no scale"
            )
        stage = self.sharding_stage
        if isinstance(stage, bool) or stage not in (0, 1, 2):
            raise ConfigError(
                f"sharding_stage must be 0, 1 or 2, it is {stage!r}; parameters of a stage stay "
                "whole on its replicas"
            )
        check_int("min_slice_size", self.min_slice_size, "a number of elements, 0 or more", least=0)
        names = self.gradient_checkpoint
        if isinstance(names, str) and names not in ("", "auto"):
            raise ConfigError(
                "gradient_checkpoint must be 'auto', or a collection of names that "
                "jax.ad_checkpoint.checkpoint_name "
                f"gave; it is {names!r}"
            )
        object.__setattr__(
            self, "gradient_checkpoint", names if isinstance(names, str) else tuple(names)
        )
        end, what = self.last_checkpointed_stage, "the number of a stage, or -1 for all"
        check_int("last_checkpointed_stage", end, what, least=-1)
        check_int("update_groups", self.update_groups)
        check_flag("offload", self.offload)
        if self.offload and stage:
            raise ConfigError(
                f"offload={self.offload!r} and sharding_stage={stage}: what is on the host is "
                "there once, and cannot "
                "be shared out among replicas"
            )


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The options of `dtrans.pipeline`, which says what they are."""

    num_stages: int
    num_micro_batch: int
    schedule: str
    splits_backward: bool  # whether gradients of weights are made apart from cotangents
    chunks: int  # of the schedule
    replicas: int
    stages: Stages
    memory: StageMemory
    reduce: Reduce
    batch: Batch
    # where results have their rows
    joined: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batch", "replicas"):
            check_int(name, getattr(self, name))
        check_type("memory", self.memory, StageMemory)
        stage, norm = self.memory.sharding_stage, self.reduce.clip_local_norm
        if stage and norm is not None:
            raise ConfigError(
                f"clip_local_norm={norm!r} and sharding_stage={stage}: a replica's own gradients "
                "are clipped whole; "
                "leave one of them out"
            )
        if not self.batch.exact:
            self.batch.check_axes()
        if self.of_parts.batch.example_count is not None:
            raise ConfigError(
                f"example_count={self.batch.example_count!r}: micro-batches of a pipeline count "
                "the same; leave it out"
            )

    @property
    def precision(self) -> Precision:
        """In what types stages compute."""
        return Precision.of(self.memory.precision)

    @property
    def loss_scale(self) -> float:
        """By what the loss is scaled while it is differentiated."""
        return 1.0 if self.precision.scaling is None else self.precision.scaling.initial

    @property
    def local(self) -> PipelineOptions:
        """The same, where each micro-batch goes through the step alone."""
        reduce = dataclasses.replace(self.reduce, op=self.reduce.op or "mean")
        return dataclasses.replace(
            self, batch=dataclasses.replace(self.batch, kind="local"), reduce=reduce
        )

    def of(self, shared: ExactStep) -> PipelineOptions:
        """Return the options for an exact step, whose parts add up."""
        results = shared.step.results
        merge = {
            n: way for n, way in shared.merges.items() if way in ("mean", "sum") or n in results
        }
        whole = tuple(n for n in shared.step.batch if n not in shared.axes)
        batch = dataclasses.replace(self.batch, kind="local", merge=merge, unsplit_inputs=whole)
        reduce = dataclasses.replace(self.reduce, op=shared.reduce)
        return dataclasses.replace(self, batch=batch, reduce=reduce, joined=shared.joined)

    @property
    def model_stages(self) -> int:
        """Into how many stages the model is cut: several for each device, where these are
        interleaved."""
        return self.num_stages * self.chunks

    @property
    def parts(self) -> int:
        """Into how many micro-batches a batch is cut, over all replicas."""
        return self.replicas * self.num_micro_batch

    @cached_property
    def over_replicas(self) -> Options:
        """Return the options of the reduction over replicas, as trainers of nccl2 mode."""
        norm = self.reduce.clip_per_step(self.num_micro_batch)
        reduce = dataclasses.replace(self.reduce, clip_local_norm=norm, clip_local_per="step")
        return Options(
            trainers=self.replicas, axis_name=AXIS, reduce=reduce, batch=self.batch, noun="replica"
        )

    @property
    def clip_of_each(self) -> float | None:
        """The norm that the gradients of each micro-batch are clipped to; they are then kept until
        the update."""
        return self.reduce.clip_per_micro_batch(self.num_micro_batch)

    @cached_property
    def of_parts(self) -> Options:
        """The same, for merging results: they are made by micro-batches of replicas."""
        return dataclasses.replace(self.over_replicas, num_micro_batch=self.num_micro_batch)
