"""A record of how gradients are reduced; the options of nccl2 mode, and which of them can be."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

import jax.numpy as jnp

from dtrans.batch.exact_step import ExactStep
from dtrans.batch.precomputed_micro_steps import PrecomputedMicroSteps
from dtrans.checks import (
    check_int,
    check_name,
    check_number,
    check_one_of,
    check_size,
    check_together,
    check_type,
)
from dtrans.errors import ConfigError
from dtrans.step.batch_sharing import Batch


COMPRESSED = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
CLIPPED_PER = ("step", "micro_batch")
REDUCED = {"mean": "sum", "sum": "sum", "max": "max"}  # merge to operation
MERGES = (*REDUCED, "concat", "each", "same")


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Reduction of gradients over trainers, the ranks of a sharded job, or the replicas of a stage.

    Attributes:
      op: "mean", or "sum" for a loss that is a sum over the batch. It may be omitted for an exact
        batch, since the analysis finds it.
      bucket_MB: the size up to which gradients are reduced together; 0 reduces each by itself.
      max_buckets: EPL's rule of buckets instead of `bucket_MB`: about this many at most, of even
        size.
      chains: the number of chains of reductions that may run concurrently; within a chain each
        waits for the previous one. By default XLA decides.
      compress: "bf16" or "fp16": gradients are reduced in this type, multiplied by `compress_scale`
        before and divided by it after. A sum that overflows arrives as infinity.
      compress_scale: see `compress`.
      clip_local_norm: clip each trainer's gradients to this global norm *before* they are reduced,
        as EPL does by default. (A clip in the optimizer applies to the reduced gradients.) All
        reductions then wait for the last gradient.
      clip_local_per: the gradients that have this norm, if there are micro-batches. "step" clips
        the sum over a trainer's micro-batches, "micro_batch" the gradients of each, as EPL does.
        With "micro_batch" a pipeline stores the gradients of all micro-batches until the update.

    Raises:
      ConfigError: a value that is out of range, or a scale without a type.

    Example:
      >>> import dtrans
      >>> dtrans.Reduce(compress="bf16").bucket_MB
      32
      >>> dtrans.Reduce("max")
      Traceback (most recent call last):
      ...
      dtrans.errors.ConfigError: op must be 'mean' or 'sum', it is 'max'
    """

    op: str | None = None
    bucket_MB: float = 32
    max_buckets: int | None = None
    chains: int | None = None
    compress: str | None = None
    compress_scale: float = 1.0
    clip_local_norm: float | None = None
    clip_local_per: str = "step"

    def __post_init__(self) -> None:
        if self.op is not None:
            check_one_of("op", self.op, ("mean", "sum"))
        check_size("bucket_MB", self.bucket_MB)
        check_int("max_buckets", self.max_buckets, or_none=True)
        check_int("chains", self.chains, or_none=True)
        check_one_of("compress", self.compress, (*COMPRESSED, None))
        check_number("compress_scale", self.compress_scale, "a positive number", lambda x: x > 0)
        if self.compress is None and self.compress_scale != 1.0:
            raise ConfigError(
                f"compress_scale={self.compress_scale!r} is for compress='bf16' or 'fp16', which "
                "is None"
            )
        check_number(
            "clip_local_norm",
            self.clip_local_norm,
            "a positive number",
            lambda x: x > 0,
            or_none=True,
        )
        check_one_of("clip_local_per", self.clip_local_per, CLIPPED_PER)
        if self.clip_local_per != "step" and self.clip_local_norm is None:
            raise ConfigError(
                f"clip_local_per={self.clip_local_per!r} is for clip_local_norm, which is None"
            )

    def clip_of_each(self, num_micro_batch: int) -> float | None:
        """Return the norm that the gradients of each micro-batch are clipped to."""
        return (
            self.clip_local_norm
            if num_micro_batch > 1 and self.clip_local_per == "micro_batch"
            else None
        )

    def clip_of_all(self, num_micro_batch: int) -> float | None:
        """Return the norm that the sum over all micro-batches is clipped to."""
        return self.clip_local_norm if self.clip_of_each(num_micro_batch) is None else None

    @classmethod
    def of(cls, given: Any) -> Reduce:
        """Return the record for a value of the option `reduce`: a record, or its `op`."""
        if given in ("mean", "sum"):
            return cls(given)
        check_type("reduce", given, cls, "'mean', 'sum' or a dtrans.Reduce")
        found: Reduce = given
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `nccl2`, which says what they are."""

    trainers: int
    axis_name: str
    num_micro_batch: int = 1
    local_sgd: int | None = None
    trainers_per_node: int = 0  # 0 where reductions are not hierarchical
    reduce: Reduce = Reduce()
    batch: Batch = Batch()
    shared: ExactStep | None = None  # how an exact batch is shared, once that is known
    given: PrecomputedMicroSteps | None = None  # what micro-steps are given of the whole batch then
    noun: str = "trainer"  # one of those that share the batch, in errors

    def __post_init__(self) -> None:
        endpoints = " (endpoints are for DistributeTranspiler.transpile)" * (
            ":" in str(self.trainers)
        )
        check_int("trainers", self.trainers, f"a positive number of trainers{endpoints}")
        check_name("axis_name", self.axis_name, "the name of an axis")
        check_type("batch", self.batch, Batch)
        check_int("num_micro_batch", self.num_micro_batch, "a positive number of micro-steps")
        check_int("local_sgd", self.local_sgd, or_none=True)
        self.batch.check_merge(MERGES)
        self.check_exact()
        count, reduce = self.batch.example_count, self.reduce
        if count is not None and reduce.op == "sum":
            raise ConfigError(f"example_count={count!r} is for reduce='mean', it is {reduce.op!r}")
        if self.local_sgd is not None:
            others = {
                f"reduce={reduce.op!r}": reduce.op == "sum",
                f"compress={reduce.compress!r}": reduce.compress is not None,
                f"num_micro_batch={self.num_micro_batch}": self.num_micro_batch > 1,
                f"clip_local_norm={reduce.clip_local_norm!r}": reduce.clip_local_norm is not None,
            }
            why = (
                "the one averages parameters, which trainers update by their own gradients; the "
                "other is about "
                "gradients that trainers share"
            )
            check_together(others, why, f"local_sgd={self.local_sgd}")
        node = self.trainers_per_node
        check_int("trainers_per_node", node, "a number of trainers", least=0)
        if node and (self.trainers % node or not 1 < node < self.trainers):
            raise ConfigError(
                f"trainers_per_node={node} must divide the {self.trainers} trainers into several "
                "nodes of several "
                "trainers each"
            )

    def check_exact(self) -> None:
        """Refuse what is for trainers with numbers of their own."""
        b = self.batch
        if not b.exact:
            b.check_axes()
        given = {
            "reduce": self.reduce.op,
            "example_count": b.example_count,
            "merge": dict(b.merge) or None,
        }
        for name, value in given.items():
            if b.exact and value is not None:
                raise ConfigError(
                    f"{name}={value!r} is for batch='local', where each {self.noun} has numbers of "
                    "its own: an exact "
                    "batch is added up as one device has it. Leave it out, or say batch='local'"
                )

    @property
    def local(self) -> Self:
        """The same, where each trainer takes the step on its part alone."""
        reduce = dataclasses.replace(self.reduce, op=self.reduce.op or "mean")
        return dataclasses.replace(
            self, batch=dataclasses.replace(self.batch, kind="local", axes=0), reduce=reduce
        )

    def of(self, shared: ExactStep) -> Self:
        """Return the options of an exact step, whose parts add up."""
        whole = tuple(n for n in shared.step.batch if n not in shared.axes)
        batch = dataclasses.replace(
            self.batch, kind="local", axes=0, merge=shared.merges, unsplit_inputs=whole
        )
        reduce = dataclasses.replace(self.reduce, op=shared.reduce)
        return dataclasses.replace(self, batch=batch, reduce=reduce, shared=shared)

    @property
    def micro_steps(self) -> int:
        """Into how many parts each trainer divides its part of the batch."""
        return self.num_micro_batch if self.local_sgd is None else self.local_sgd

    @property
    def splits_evenly(self) -> bool:
        """Return True if trainers must divide the batch, since they process parts one by one."""
        return self.micro_steps > 1 or self.reduce.clip_local_norm is not None

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that trainers are on, with their sizes: one, or nodes and the trainers of a
        node."""
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


OptionsT = TypeVar("OptionsT", bound=Options)
