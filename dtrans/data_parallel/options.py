"""Options of `dtrans.nccl2`, and of the reduction of gradients (`Reduce`) in all strategies."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

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
from dtrans.ops import CASTS
from dtrans.step.batch_sharing import Batch
from dtrans.step.local_clip import check_local_clip
from dtrans.tensor_parallel.mesh_option import MODEL, SEQUENCE


CLIPPED_PER = ("step", "micro_batch")
REDUCED = {"mean": "sum", "sum": "sum", "max": "max"}  # merge rule -> operation of the reduction
MERGES = (*REDUCED, "concat", "each", "same")


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Options to sum gradients over trainers: buckets, compression, clipping.

    Attributes:
      op: "mean", or "sum" for a loss that is a sum over the batch. Leave it out with
        `batch="exact"`: the plan then infers it.
      bucket_MB: the size in MB of a bucket. All gradients of a bucket share one reduction. 0
        reduces each gradient separately.
      max_buckets: the maximum number of buckets, in place of `bucket_MB`. Gradients are divided
        into about equal buckets (EPL's rule).
      chains: the number of chains of reductions that may overlap. In a chain, each reduction waits
        for the previous one. By default XLA decides.
      compress: "bf16" or "fp16": the type in which gradients are reduced. A sum that overflows
        becomes infinity.
      compress_scale: the factor that multiplies compressed gradients before the reduction, and
        divides them after it.
      clip_local_norm: the norm to which each trainer clips its gradients *before* the
        reduction, as EPL does by default. (A clip in the optimizer reads reduced gradients.)
        With this option, all reductions wait for the last gradient.
      clip_local_per: "step" applies `clip_local_norm` to the sum over a trainer's micro-batches,
        and "micro_batch" to the gradients of each micro-batch, as EPL does. With "micro_batch", a
        pipeline must store the gradients of all micro-batches until the update.
      clip_local_by: "global_norm" limits the norm of all gradients together. "norm" limits the norm
        of each parameter's gradient, as Paddle's `GradientClipByNorm` does.

    Raises:
      ConfigError: a value is out of range, or an option needs another option that is missing.

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
    clip_local_by: str = "global_norm"

    def __post_init__(self) -> None:
        if self.op is not None:
            check_one_of("op", self.op, ("mean", "sum"))
        check_size("bucket_MB", self.bucket_MB)
        check_int("max_buckets", self.max_buckets, or_none=True)
        check_int("chains", self.chains, or_none=True)
        check_one_of("compress", self.compress, (*CASTS, None))
        check_number("compress_scale", self.compress_scale, "a positive number", lambda x: x > 0)
        if self.compress is None and self.compress_scale != 1.0:
            raise ConfigError(
                f"compress_scale={self.compress_scale!r} needs compress='bf16' or 'fp16', but "
                "compress is None; pass compress, or leave compress_scale out"
            )
        check_local_clip(self.clip_local_norm, self.clip_local_by)
        check_one_of("clip_local_per", self.clip_local_per, CLIPPED_PER)
        if self.clip_local_per != "step" and self.clip_local_norm is None:
            raise ConfigError(
                f"clip_local_per={self.clip_local_per!r} needs clip_local_norm, but that is "
                "None; pass clip_local_norm=1.0 or another norm"
            )

    def clip_per_micro_batch(self, num_micro_batch: int) -> float | None:
        """Return the norm to which each micro-batch's gradients are clipped; None for no clip."""
        applies = num_micro_batch > 1 and self.clip_local_per == "micro_batch"
        return self.clip_local_norm if applies else None

    def clip_per_step(self, num_micro_batch: int) -> float | None:
        """Return the norm to which a trainer's summed gradients are clipped; None for no clip.

        The sum is over all micro-batches of the trainer.
        """
        return self.clip_local_norm if self.clip_per_micro_batch(num_micro_batch) is None else None

    @classmethod
    def from_option(cls, value: Any) -> Reduce:
        """Convert the user's option `reduce` to a `Reduce`.

        Args:
          value: a `Reduce`, or its `op`, "mean" or "sum".
        """
        if value in ("mean", "sum"):
            return cls(value)
        check_type("reduce", value, cls, "'mean', 'sum' or a dtrans.Reduce")
        found: Reduce = value
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of data parallelism: arguments of `dtrans.nccl2`, and values derived from them."""

    trainers: int
    axis_name: str
    num_micro_batch: int = 1
    local_sgd: int | None = None
    trainers_per_node: int = 0  # 0 for reductions that are not hierarchical
    # number of devices of each trainer, which divide the parameters of `dtrans.split` scopes; 0 for
    # a mesh without a model axis
    model: int = 0
    sequence: int = 0  # number of devices that divide each sequence; 0 without a sequence axis
    colocated: bool = False  # True if trainers also divide the parameters of `dtrans.split` scopes
    reduce: Reduce = Reduce()
    batch: Batch = Batch()
    shared: ExactStep | None = None  # the split of the batch; None unless batch="exact"
    # inputs of micro-steps that trainers compute before the scan
    precomputed: PrecomputedMicroSteps | None = None
    noun: str = "trainer"  # the word for a trainer in errors
    is_pipeline: bool = False  # True for the replicas of a pipeline's stage

    def __post_init__(self) -> None:
        expected = "a positive number of trainers"
        if ":" in str(self.trainers):
            # the user passed endpoints, which Paddle's transpiler takes
            expected += " (endpoints are for DistributeTranspiler.transpile)"
        check_int("trainers", self.trainers, expected)
        check_name("axis_name", self.axis_name, "the name of an axis")
        check_type("batch", self.batch, Batch)
        check_int("num_micro_batch", self.num_micro_batch, "a positive number of micro-steps")
        check_int("local_sgd", self.local_sgd, or_none=True)
        self.batch.check_merge(MERGES)
        self.check_exact()
        count, reduce = self.batch.example_count, self.reduce
        if count is not None and reduce.op == "sum":
            raise ConfigError(
                f"example_count={count!r} needs reduce='mean', but reduce is {reduce.op!r}; "
                "leave one of the two options out"
            )
        if self.local_sgd is not None:
            others = {
                f"reduce={reduce.op!r}": reduce.op == "sum",
                f"compress={reduce.compress!r}": reduce.compress is not None,
                f"num_micro_batch={self.num_micro_batch}": self.num_micro_batch > 1,
                f"clip_local_norm={reduce.clip_local_norm!r}": reduce.clip_local_norm is not None,
            }
            why = (
                "with local_sgd, trainers reduce parameters but no gradients; leave one of the "
                "two options out"
            )
            check_together(others, why, f"local_sgd={self.local_sgd}")
        node = self.trainers_per_node
        check_int("trainers_per_node", node, "a number of trainers", least=0)
        if node and (self.trainers % node or not 1 < node < self.trainers):
            raise ConfigError(
                f"trainers_per_node={node} does not divide the {self.trainers} trainers into two "
                "or more nodes of two or more trainers; pass another number, or leave it out"
            )

    def check_exact(self) -> None:
        """Raise ConfigError if an option is set that makes sense only with `batch="local"`.

        Pipelines call this kind of batch "micro".
        """
        b = self.batch
        if not b.exact:
            b.check_axes()
        kind, part = ("micro", "micro-batch") if self.is_pipeline else ("local", self.noun)
        local_options = {
            "reduce": self.reduce.op,
            "example_count": b.example_count,
            "merge": dict(b.merge) or None,
        }
        for name, value in local_options.items():
            if b.exact and value is not None:
                raise ConfigError(
                    f"{name}={value!r} needs batch={kind!r}, where each {part} computes separate "
                    f"results; leave {name} out to get one device's results, or pass "
                    f"batch={kind!r}"
                )

    @property
    def need_of_gradients(self) -> str:
        """Advice for the user if an option is set that needs gradients; "" if none is set.

        An error about gradients that were not found ends with this advice.
        """
        used = [text for text, is_used in self._needs_of_gradients().items() if is_used]
        return used[0] if used else ""

    def _needs_of_gradients(self) -> dict[str, bool]:
        """Return a dict for options that need gradients: advice -> True if the option is set."""
        compress, clip = self.reduce.compress, self.reduce.clip_local_norm
        return {
            "pass batch='exact'": not self.batch.exact,
            f"leave out num_micro_batch={self.num_micro_batch}": self.num_micro_batch > 1,
            f"leave out local_sgd={self.local_sgd}": self.local_sgd is not None,
            f"leave out trainers_per_node={self.trainers_per_node}": self.trainers_per_node > 0,
            f"leave out compress={compress!r}": compress is not None,
            f"leave out clip_local_norm={clip!r}": clip is not None,
            f"leave {MODEL!r} out of mesh": self.model > 0 or self.colocated,
            f"leave {SEQUENCE!r} out of mesh": self.sequence > 0,
        }

    @property
    def local(self) -> Self:
        """Copy of these options with `batch="local"`."""
        reduce = dataclasses.replace(self.reduce, op=self.reduce.op or "mean")
        batch = dataclasses.replace(self.batch, kind="local", axes=0)
        return dataclasses.replace(self, batch=batch, reduce=reduce)

    def with_shared(self, shared: ExactStep) -> Self:
        """Return options for one trainer's step, after `batch="exact"` has rewritten the step.

        The rewritten step contains the communication that makes it exact. So the remaining rewrites
        treat it like a step with `batch="local"`.

        Args:
          shared: the split of the batch.
        """
        unsplit = tuple(n for n in shared.step.batch if n not in shared.axes)
        batch = dataclasses.replace(
            self.batch, kind="local", axes=0, merge=shared.merges, unsplit_inputs=unsplit
        )
        reduce = dataclasses.replace(self.reduce, op=shared.reduce)
        return dataclasses.replace(self, batch=batch, reduce=reduce, shared=shared)

    @property
    def micro_steps(self) -> int:
        """Number of parts into which each trainer splits its rows of the batch."""
        return self.num_micro_batch if self.local_sgd is None else self.local_sgd

    @property
    def has_devices(self) -> bool:
        """True if a trainer has several devices."""
        return max(self.model, self.sequence) > 1

    @property
    def splits_evenly(self) -> bool:
        """True if an option allows only batches that the number of trainers divides."""
        return self.micro_steps > 1 or self.reduce.clip_local_norm is not None

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes of the trainers as pairs (name, size).

        There is one axis, except for hierarchical reductions. These need two axes: over nodes, and
        over the trainers of a node.
        """
        if not self.trainers_per_node:
            return ((self.axis_name, self.trainers),)
        return (
            (f"{self.axis_name}_exter", self.trainers // self.trainers_per_node),
            (f"{self.axis_name}_inter", self.trainers_per_node),
        )

    @property
    def over(self) -> tuple[str, ...]:
        """Names of the mesh axes of the trainers, over which gradients are reduced."""
        return tuple(name for name, _ in self.axes)


OptionsT = TypeVar("OptionsT", bound=Options)
