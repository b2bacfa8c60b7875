"""Options of pipelines: records of the choice of stages and of their memory, with their checks."""

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
      policy: "HEURISTIC", the default: layers are not cut if that is nearly as fast.
        "BALANCE_FLOPS": the slowest stage is as fast as possible. "REPEATED_LAYERS": each stage has
        the same number of layers. "BALANCE_OP_NUM": each stage has the same number of equations.
        Scopes in the model (`dtrans.replicate`) override the policy.
      flops_per_byte: floating-point operations of a device in the time of sending one byte: see
        `FLOPS_PER_BYTE`.
      chunks: the number of stages on each device, for the schedule "Interleaved"; 2 by default.
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
      ConfigError: a value that is out of range, slices of state on the host, or a scale of the
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
        precision = Precision.from_option(self.precision)
        object.__setattr__(self, "precision", precision)
        if precision.scaling is not None and precision.scaling.dynamic:
            raise ConfigError(
                f"precision={precision.dtype!r} has a scale of the loss that changes, and stages "
                "of a pipeline take a fixed one: pass "
                f"dtrans.Precision({precision.dtype!r}, loss_scaling=1024), and let "
                "optax.apply_if_finite skip steps that are not finite; or pass precision='bf16', "
                "which needs no scale"
            )
        stage = self.sharding_stage
        if isinstance(stage, bool) or stage not in (0, 1, 2):
            raise ConfigError(
                f"sharding_stage must be 0, 1 or 2, it is {stage!r}; each replica of a stage "
                "stores all parameters of the stage"
            )
        check_int("min_slice_size", self.min_slice_size, "a number of elements, 0 or more", least=0)
        names = self.gradient_checkpoint
        if isinstance(names, str) and names not in ("", "auto"):
            raise ConfigError(
                "gradient_checkpoint must be 'auto', or a collection of names that "
                f"jax.ad_checkpoint.checkpoint_name gave; it is {names!r}"
            )
        if not isinstance(names, str):
            object.__setattr__(self, "gradient_checkpoint", tuple(names))
        end, what = self.last_checkpointed_stage, "the index of a stage, or -1 for all"
        check_int("last_checkpointed_stage", end, what, least=-1)
        check_int("update_groups", self.update_groups)
        check_flag("offload", self.offload)
        if self.offload and stage:
            raise ConfigError(
                f"offload={self.offload!r} and sharding_stage={stage}: the host stores one copy of "
                "the state, which has no slices for replicas; leave one of them out"
            )


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The checked options of a pipeline plan: see `dtrans.pipeline`.

    Attributes:
      schedule: the name of the schedule.
      splits_backward: True if W tasks compute the gradients of weights, apart from cotangents.
      chunks: the number of stages on each device.
      concat_axes: result to the dimension along which micro-batches are concatenated, if not 0.
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
                f"clip_local_norm={norm!r} and sharding_stage={stage}: a local clip needs complete "
                "gradients on each replica, and sharding_stage reduces slices of them; leave one "
                "of them out"
            )
        if not self.batch.exact:
            self.batch.check_axes()
        if self.over_parts.batch.example_count is not None:
            raise ConfigError(
                f"example_count={self.batch.example_count!r}: micro-batches of a pipeline have "
                "equal weights; omit example_count"
            )

    @property
    def precision(self) -> Precision:
        """The types in which stages compute."""
        return Precision.from_option(self.memory.precision)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss while it is differentiated."""
        return 1.0 if self.precision.scaling is None else self.precision.scaling.initial

    @property
    def local(self) -> PipelineOptions:
        """The options for micro-batches that take the step alone."""
        reduce = dataclasses.replace(self.reduce, op=self.reduce.op or "mean")
        batch = dataclasses.replace(self.batch, kind="local")
        return dataclasses.replace(self, batch=batch, reduce=reduce)

    def with_exact_step(self, shared: ExactStep) -> PipelineOptions:
        """Return the options for an exact step, whose parts add up."""
        results = shared.step.results
        merge = {
            n: way for n, way in shared.merges.items() if way in ("mean", "sum") or n in results
        }
        unsplit = tuple(n for n in shared.step.batch if n not in shared.axes)
        batch = dataclasses.replace(self.batch, kind="local", merge=merge, unsplit_inputs=unsplit)
        reduce = dataclasses.replace(self.reduce, op=shared.reduce)
        return dataclasses.replace(self, batch=batch, reduce=reduce, concat_axes=shared.joined)

    @property
    def model_stages(self) -> int:
        """The number of stages of the model: `chunks` on each device."""
        return self.num_stages * self.chunks

    @property
    def parts(self) -> int:
        """The number of micro-batches of a batch, over all replicas."""
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
        """The norm to which the gradients of each micro-batch are clipped, or None.

        Stages then store the gradients of each micro-batch until the update, instead of sums.
        """
        return self.reduce.clip_per_micro_batch(self.num_micro_batch)

    @cached_property
    def over_parts(self) -> Options:
        """Return the options of merging results over the micro-batches of all replicas."""
        return dataclasses.replace(self.over_replicas, num_micro_batch=self.num_micro_batch)
