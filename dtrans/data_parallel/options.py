"""The options of nccl2 mode, and which of them can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from dtrans.errors import ConfigError


COMPRESSED = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
REDUCED = {"mean": "sum", "sum": "sum", "max": "max"}  # merge to operation
MERGES = (*REDUCED, "concat", "each", "same")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `nccl2`, which says what they are."""

    trainers: int
    axis_name: str
    reduce: str
    merge: Mapping[str, str]
    example_count: str | None
    unsplit_inputs: tuple[str, ...]
    reduce_bucket_MB: float
    compress: str | None
    compress_scale: float
    trainers_per_node: int  # trainers in a node; 0 where reductions are not hierarchical
    num_micro_batch: int
    max_buckets: int | None
    reduction_chains: int | None
    clip_local_norm: float | None
    local_sgd: int | None

    @property
    def micro_steps(self) -> int:
        """Into how many parts each trainer divides its part of the batch."""
        return self.num_micro_batch if self.local_sgd is None else self.local_sgd

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that trainers are on, with their sizes: one, or nodes and the trainers of a node."""
        if not self.trainers_per_node:
            return ((self.axis_name, self.trainers),)
        return (
            (f"{self.axis_name}_exter", self.trainers // self.trainers_per_node),
            (f"{self.axis_name}_inter", self.trainers_per_node),
        )

    @property
    def over(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)


def check_names_given(unsplit_inputs: Any, merge: Any) -> None:
    """Refuse what are no names, before they are taken apart."""
    if isinstance(unsplit_inputs, str) or not isinstance(unsplit_inputs, Collection):
        raise ConfigError(f"unsplit_inputs={unsplit_inputs!r} must be a collection of names of batch arrays")
    if merge is not None and not isinstance(merge, Mapping):
        raise ConfigError(f"merge={merge!r} must say for each name what becomes of it, such as {{'aux': 'sum'}}")


def check_options(o: Any) -> None:  # any: an option may be of any type before it is checked
    """Refuse what cannot be planned, by the option's name."""
    if isinstance(o.trainers, bool) or not isinstance(o.trainers, int) or o.trainers < 1:
        raise ConfigError(
            f"trainers must be a positive number of trainers, it is {o.trainers!r}; endpoints are for "
            "DistributeTranspiler.transpile"
        )
    if not isinstance(o.axis_name, str) or not o.axis_name:
        raise ConfigError(f"axis_name must be the name of an axis, it is {o.axis_name!r}")
    if o.reduce not in ("mean", "sum"):
        raise ConfigError(f"reduce must be 'mean' or 'sum', it is {o.reduce!r}")
    if o.example_count is not None and o.reduce != "mean":
        raise ConfigError(f"example_count={o.example_count!r} is for reduce='mean', it is {o.reduce!r}")
    size = o.reduce_bucket_MB
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0:
        raise ConfigError(f"reduce_bucket_MB must be a size in megabytes, 0 or more; it is {size!r}")
    if o.compress is not None and o.compress not in COMPRESSED:
        raise ConfigError(f"compress must be 'bf16', 'fp16' or None, it is {o.compress!r}")
    if isinstance(o.compress_scale, bool) or not isinstance(o.compress_scale, (int, float)) or not o.compress_scale > 0:
        raise ConfigError(f"compress_scale must be a positive number, it is {o.compress_scale!r}")
    if o.compress is None and o.compress_scale != 1.0:
        raise ConfigError(f"compress_scale={o.compress_scale!r} is for compress='bf16' or 'fp16', which is None")
    for name in ("max_buckets", "reduction_chains", "local_sgd"):
        count = getattr(o, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"{name} must be a positive number, or None; it is {count!r}")
    norm = o.clip_local_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
        raise ConfigError(f"clip_local_norm must be a positive number, or None; it is {norm!r}")
    if isinstance(o.num_micro_batch, bool) or not isinstance(o.num_micro_batch, int) or o.num_micro_batch < 1:
        raise ConfigError(f"num_micro_batch must be a positive number of micro-steps, it is {o.num_micro_batch!r}")
    if o.local_sgd is not None:
        others = {
            f"reduce={o.reduce!r}": o.reduce != "mean",
            f"compress={o.compress!r}": o.compress is not None,
            f"num_micro_batch={o.num_micro_batch}": o.num_micro_batch > 1,
            f"clip_local_norm={o.clip_local_norm!r}": norm is not None,
        }
        for other, given in others.items():
            if given:
                raise ConfigError(
                    f"local_sgd={o.local_sgd} and {other}: the one averages parameters, which trainers update by their "
                    "own gradients; the other is about gradients that trainers share"
                )
    if isinstance(o.trainers_per_node, bool) or not isinstance(o.trainers_per_node, int) or o.trainers_per_node < 0:
        raise ConfigError(f"trainers_per_node must be a number of trainers, it is {o.trainers_per_node!r}")
    if o.trainers_per_node and (o.trainers % o.trainers_per_node or not 1 < o.trainers_per_node < o.trainers):
        raise ConfigError(
            f"trainers_per_node={o.trainers_per_node} must divide the {o.trainers} trainers into several nodes "
            "of several trainers each"
        )
    for name, way in o.merge.items():
        if way not in MERGES:
            raise ConfigError(f"merge[{name!r}] must be one of {', '.join(MERGES)}; it is {way!r}")
