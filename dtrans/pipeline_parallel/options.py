"""The options of pipelines, and which of them can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dtrans.data_parallel.options import Options, check_options
from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.stages import POLICIES


AXIS = "replica"
SPLIT = "split"  # the axis of the shards of a stage that is split


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The options of `dtrans.pipeline`, which says what they are."""

    num_stages: int
    num_micro_batch: int
    schedule: str
    splits_backward: bool  # whether gradients of weights are made apart from cotangents
    chunks: int
    replicas: int
    policy: str | None
    flops_per_byte: float
    reduce: str
    merge: Mapping[str, str]
    unsplit_inputs: tuple[str, ...]
    reduce_bucket_MB: float
    max_buckets: int | None
    compress: str | None
    compress_scale: float
    clip_local_norm: float | None
    reduction_chains: int | None
    sharding_stage: int
    min_slice_size: int
    gradient_checkpoint: str | tuple[str, ...]
    last_checkpointed_stage: int
    update_groups: int
    offload: bool

    @property
    def model_stages(self) -> int:
        """Into how many stages the model is cut: several for each device, where these are interleaved."""
        return self.num_stages * self.chunks

    @property
    def parts(self) -> int:
        """Into how many micro-batches a batch is cut, over all replicas."""
        return self.replicas * self.num_micro_batch

    @cached_property
    def over_replicas(self) -> Options:
        """What replicas do with their gradients, as trainers of nccl2 mode."""
        return self._options(1)

    @cached_property
    def of_parts(self) -> Options:
        """The same, of what becomes of results: they are of micro-batches of replicas."""
        return self._options(self.num_micro_batch)

    def _options(self, micro_steps: int) -> Options:
        return Options(
            trainers=self.replicas,
            axis_name=AXIS,
            reduce=self.reduce,
            merge=self.merge,
            example_count=None,
            unsplit_inputs=self.unsplit_inputs,
            reduce_bucket_MB=self.reduce_bucket_MB,
            compress=self.compress,
            compress_scale=self.compress_scale,
            trainers_per_node=0,
            num_micro_batch=micro_steps,
            max_buckets=self.max_buckets,
            reduction_chains=self.reduction_chains,
            clip_local_norm=self.clip_local_norm,
            local_sgd=None,
        )


def check_pipeline(o: PipelineOptions) -> None:
    """Refuse what cannot be planned, by the option's name."""
    for name in ("num_stages", "num_micro_batch", "replicas", "chunks", "update_groups"):
        count: Any = getattr(o, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name} must be a positive number, it is {count!r}")
    if o.policy is not None and o.policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, it is {o.policy!r}")
    cost: Any = o.flops_per_byte
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not cost >= 0:
        raise ConfigError(f"flops_per_byte must be a number of flops for each byte, 0 or more; it is {cost!r}")
    if isinstance(o.sharding_stage, bool) or o.sharding_stage not in (0, 1, 2):
        raise ConfigError(
            f"sharding_stage must be 0, 1 or 2, it is {o.sharding_stage!r}; parameters of a stage stay whole on its "
            "replicas"
        )
    if o.sharding_stage and o.clip_local_norm is not None:
        raise ConfigError(
            f"clip_local_norm={o.clip_local_norm!r} and sharding_stage={o.sharding_stage}: a replica's own gradients "
            "are clipped whole; leave one of them out"
        )
    names = o.gradient_checkpoint
    if isinstance(names, str) and names not in ("", "auto"):
        raise ConfigError(
            "gradient_checkpoint must be 'auto', or a collection of names that jax.ad_checkpoint.checkpoint_name gave; "
            f"it is {names!r}"
        )
    end: Any = o.last_checkpointed_stage
    if isinstance(end, bool) or not isinstance(end, int) or end < -1:
        raise ConfigError(f"last_checkpointed_stage must be the number of a stage, or -1 for all; it is {end!r}")
    if not isinstance(o.offload, bool):
        raise ConfigError(f"offload must be True or False, it is {o.offload!r}")
    if o.offload and o.sharding_stage:
        raise ConfigError(
            f"offload={o.offload!r} and sharding_stage={o.sharding_stage}: what is on the host is there once, and "
            "cannot be shared out among replicas"
        )
    check_options(o.of_parts)
