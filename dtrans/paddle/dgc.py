"""Deep Gradient Compression with Paddle's names for the options of `dtrans.TopK`.

In Paddle, DGC is an optimizer that also compresses the gradients. In dtrans, trainers compress
gradients and have the momentum, and the optimizer of the step is `dtrans.paddle.optimizers.sgd`.

Source: `DGCMomentumOptimizer` of python/paddle/fluid/optimizer.py; `DGCOptimizer` of
python/paddle/distributed/fleet/meta_optimizers/dgc_optimizer.py, with the options
`DistributedStrategy.dgc_configs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dtrans.checks import check_flag, check_int, check_number
from dtrans.errors import ConfigError, rename_options
from dtrans.parameter_server.topk import TopK


# maps names of options of `dtrans.TopK` to Paddle's names, so that errors contain the user's name
NAMES = {
    "begin_step": "rampup_begin_step",
    "ramp_steps": "rampup_step",
    "nesterov": "use_nesterov",
    "clip_norm": "local_grad_clip_norm",
}

# Paddle's options that `dtrans.TopK` does not have -> the remedy that an error about them names
ELSEWHERE = {
    "grad_clip": "pass local_grad_clip_norm=clip_norm for GradientClipByNorm(clip_norm)",
    "regularization": "add the penalty to the loss, whose gradients trainers compress",
    "parameter_list": "trainers compress the gradients of all parameters",
    "name": "names of arrays come from the pytree of parameters",
}


@dataclasses.dataclass(frozen=True)
class DGCMomentum:
    """Options of Paddle's `DGCMomentumOptimizer`, for `DistributeTranspilerConfig(dgc=...)`.

    The optimizer of the step is `dtrans.paddle.optimizers.sgd(learning_rate)`, since trainers have
    the momentum. `DGCMomentum(momentum, **strategy.dgc_configs)` takes the options of Paddle's
    `DistributedStrategy`.

    Attributes:
      momentum: decay rate of the momentum.
      rampup_begin_step: number of steps before the first sparsity. These steps send full gradients.
      rampup_step: number of steps of the ramp-up, divided evenly over the values in `sparsity`.
      sparsity: for each level of the ramp-up, the fraction of a gradient that is not sent. An empty
        list is [0.999], as in `DistributedStrategy`.
      use_nesterov: True for Nesterov momentum.
      local_grad_clip_norm: a trainer clips the gradient of each parameter to
        `local_grad_clip_norm / sqrt(trainers)`. None for no clip.
      num_trainers: number of trainers; None for the trainers of the job. It must be this number.
      grad_clip, regularization, parameter_list, name: options of Paddle without a counterpart.

    Raises:
      ConfigError: an option is out of range, or has no counterpart.

    Example:
      >>> import dtrans
      >>> dtrans.paddle.DGCMomentum(0.9, rampup_begin_step=10, sparsity=[0.75, 0.999]).topk
      TopK(density=(0.25, 0.001), begin_step=10, ramp_steps=1, momentum=0.9, nesterov=False,
        clip_norm=None)
    """

    momentum: float
    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: Sequence[float] = (0.999,)
    use_nesterov: bool = False
    local_grad_clip_norm: float | None = None
    num_trainers: int | None = None
    grad_clip: Any = None
    regularization: Any = None
    parameter_list: Any = None
    name: Any = None

    def __post_init__(self) -> None:
        for name, remedy in ELSEWHERE.items():
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not supported: {remedy}; leave {name} out"
                )
        if not isinstance(self.sparsity, (list, tuple)):
            raise ConfigError(f"sparsity is {self.sparsity!r}; expected a list, such as [0.999]")
        for i, x in enumerate(self.sparsity):
            wanted = "a number below 1, and at least 0"
            check_number(f"sparsity[{i}]", x, wanted, lambda x: 0 <= x < 1)
        check_flag("use_nesterov", self.use_nesterov)
        if self.num_trainers is not None:
            check_int("num_trainers", self.num_trainers, "a positive number of trainers, or None")
        self.topk  # noqa: B018  raises ConfigError

    @property
    def topk(self) -> TopK:
        """The options in the form that `dtrans.Sync(compress=...)` takes."""
        # without the rounding, 1 - 0.999 is 0.0010000000000000009
        density = [round(1 - x, 12) for x in self.sparsity or (0.999,)]
        with rename_options(NAMES):
            check_int("rampup_step", self.rampup_step, "a positive number of steps")
            return TopK(
                density,
                self.rampup_begin_step,
                self.rampup_step if len(density) > 1 else 1,
                self.momentum,
                self.use_nesterov,
                self.local_grad_clip_norm,
            )

    def check_trainers(self, trainers: Any) -> None:
        """Raise ConfigError if `num_trainers` is not the number of the job's trainers."""
        if self.num_trainers not in (None, trainers):
            raise ConfigError(
                f"num_trainers={self.num_trainers} of dgc, but transpile gets "
                f"trainers={trainers!r}; leave num_trainers out"
            )
