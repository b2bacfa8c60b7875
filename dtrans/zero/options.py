"""The options of sharding, beside those that it shares with nccl2 mode, and which of them can be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dtrans.data_parallel.options import COMPRESSED, Options, check_options
from dtrans.errors import ConfigError
from dtrans.zero.by_leaf.assign import RULES


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """How a loss is scaled so that gradients do not vanish in 16 bits.

    Attributes:
      initial: the first scale.
      dynamic: whether the scale follows the gradients: divided by `factor` when one is not finite (and that step
        changes nothing), multiplied by it after `interval` steps in which all were. A fixed scale stays, and skips
        nothing.
      factor, interval: see there.

    Source: `update_loss_scaling` of Paddle (operators/amp/update_loss_scaling_op.h).
    """

    initial: float = 2.0**15
    dynamic: bool = True
    factor: float = 2.0
    interval: int = 2000


@dataclasses.dataclass(frozen=True)
class ShardingOptions(Options):
    """The options of `dtrans.sharding`, which says what they are."""

    stage: int
    degree: int
    dp_degree: int
    dp_axis_name: str
    amp: str | None
    loss_scaling: LossScaling | None
    overlap: bool
    prefetch: int
    prefetch_in_loops: int
    automatic: bool  # whether both are as nobody said: `ShardingPlan.on` then sees where the plan is to run
    gather_bucket_MB: float
    min_slice_size: int
    partition: str

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that ranks are on, with their sizes: groups, and the ranks of a group."""
        outer = ((self.dp_axis_name, self.dp_degree),) if self.dp_degree > 1 else ()
        return (*outer, (self.axis_name, self.degree)) if self.degree > 1 or not outer else outer

    @property
    def slices_params(self) -> bool:
        """Whether parameters are slices between steps: in stage 3, and where ranks work with copies in 16 bits."""
        return self.stage == 3 or self.amp is not None


def check_sharding(o: Any) -> None:  # any: an option may be of any type before it is checked
    """Refuse what cannot be planned, by the option's name."""
    if isinstance(o.stage, bool) or o.stage not in (1, 2, 3):
        raise ConfigError(f"stage must be 1, 2 or 3, it is {o.stage!r}")
    for name in ("degree", "dp_degree"):
        count = getattr(o, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name} must be a positive number of ranks, it is {count!r}")
    check_options(o)
    if not isinstance(o.dp_axis_name, str) or not o.dp_axis_name or o.dp_axis_name == o.axis_name:
        raise ConfigError(f"dp_axis_name must be the name of another axis, it is {o.dp_axis_name!r}")
    if o.amp is not None and o.amp not in COMPRESSED:
        raise ConfigError(f"amp must be 'fp16', 'bf16' or None, it is {o.amp!r}")
    if o.amp is not None and o.compress is not None:
        raise ConfigError(
            f"amp={o.amp!r} and compress={o.compress!r}: with amp, gradients are reduced in its type already"
        )
    _check_scaling(o)
    if o.example_count is not None and o.num_micro_batch > 1 and o.stage > 1:
        raise ConfigError(
            f"example_count={o.example_count!r} and num_micro_batch={o.num_micro_batch} in stage {o.stage}: "
            "gradients are scattered in each micro-step, before the weights of all are known; use stage 1"
        )
    if o.clip_local_norm is not None and o.num_micro_batch > 1 and o.stage > 1:
        raise ConfigError(
            f"clip_local_norm={o.clip_local_norm!r} and num_micro_batch={o.num_micro_batch} in stage {o.stage}: "
            "gradients are scattered in each micro-step, and no rank has the whole of its own; use stage 1"
        )
    if not isinstance(o.overlap, bool):
        raise ConfigError(f"overlap must be True or False, it is {o.overlap!r}")
    if isinstance(o.prefetch, bool) or not isinstance(o.prefetch, int) or o.prefetch < 0:
        raise ConfigError(f"prefetch must be a number of gathers, 0 or more; it is {o.prefetch!r}")
    if not o.overlap and o.prefetch:
        raise ConfigError(f"overlap=False and prefetch={o.prefetch}: what is gathered ahead of time overlaps")
    if not o.overlap and o.reduction_chains is not None and o.reduction_chains > 1:
        raise ConfigError(
            f"overlap=False and reduction_chains={o.reduction_chains}: several "
            "chains of reductions are there to overlap"
        )
    size = o.gather_bucket_MB
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0:
        raise ConfigError(f"gather_bucket_MB must be a size in megabytes, 0 or more; it is {size!r}")
    least = o.min_slice_size
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise ConfigError(f"min_slice_size must be a number of elements, 0 or more; it is {least!r}")
    if o.partition not in PARTITIONS:
        raise ConfigError(f"partition must be one of {', '.join(PARTITIONS)}; it is {o.partition!r}")
    if o.partition != "rows":
        others = {
            f"stage={o.stage}": o.stage == 3,
            f"amp={o.amp!r}": o.amp is not None,
            f"num_micro_batch={o.num_micro_batch} in stage {o.stage}": o.stage > 1 and o.num_micro_batch > 1,
        }
        for other, given in others.items():
            if given:
                raise ConfigError(
                    f"partition={o.partition!r} and {other}: ranks own whole leaves and their state, while each has "
                    "all parameters, and all gradients of a micro-step; use partition='rows'"
                )


PARTITIONS = ("rows", *RULES)


def _check_scaling(o: Any) -> None:
    s = o.loss_scaling
    if s is None:
        return
    if not isinstance(s, LossScaling):
        raise ConfigError(f"loss_scaling must be a number, a LossScaling or None; it is {s!r}")
    if o.amp is None:
        raise ConfigError(f"loss_scaling={s!r} is for amp='fp16' or 'bf16', which is None")
    is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    largest = float(np.finfo(np.float32).max)
    if not is_number(s.initial) or not 1 <= s.initial <= largest:  # a dynamic scale is never less than 1
        raise ConfigError(f"loss_scaling: initial must be a number from 1 to 3.4e38, it is {s.initial!r}")
    if not is_number(s.factor) or not 1 < s.factor <= largest:
        raise ConfigError(f"loss_scaling: factor must be a finite number above 1, it is {s.factor!r}")
    interval: Any = s.interval
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(f"loss_scaling: interval must be a positive number of steps, it is {interval!r}")
