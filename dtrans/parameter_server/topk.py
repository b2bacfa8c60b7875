"""Option of Deep Gradient Compression: trainers send the largest numbers of each gradient.

A trainer stores the numbers that it has not sent, and adds them to the next gradient. At the start
of a job, the fraction of sent numbers may decrease in several *levels* (the *ramp-up*). The size of
messages differs between levels, so a trainer has one program for each level. The trainer counts its
steps, and the count selects the program.

Source: Lin et al., Deep Gradient Compression (arXiv 1712.01887), and Paddle's
`DGCMomentumOptimizer`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

from dtrans.checks import check_flag, check_int, check_number
from dtrans.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TopK:
    """Options of Deep Gradient Compression, for `dtrans.Sync(compress=dtrans.TopK(...))`.

    Attributes:
      density: the fraction of a gradient's numbers to send, such as 0.001. With a tuple or list,
        the job uses these fractions one after the other (a ramp-up). Paddle's `sparsity` is 1 -
        density.
      begin_step: the number of steps at the start that send full gradients, before the first
        density.
      ramp_steps: number of steps of a ramp-up, divided evenly over the densities. The last density
        stays in use afterwards.
      momentum: the factor of momentum. Trainers then send sums of momenta in place of sums of
        gradients (momentum correction), and the optimizer of the step should be SGD without
        momentum. 0 for no momentum.
      nesterov: True for Nesterov momentum.
      clip_norm: each trainer limits the norm of a leaf's gradient to
        `clip_norm / sqrt(trainers)`, except in the steps before `begin_step`. None for no clip.

    Raises:
      ConfigError: a value is out of range, or two options contradict each other.

    Example:
      >>> import dtrans
      >>> dtrans.TopK((0.25, 0.0625, 0.001), begin_step=10, ramp_steps=100).levels
      ((0, 1.0), (10, 0.25), (44, 0.0625), (77, 0.001))
    """

    density: float | Sequence[float] = 0.001
    begin_step: int = 0
    ramp_steps: int = 1
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        wanted = "a number above 0, and at most 1"
        if isinstance(self.density, (list, tuple)):
            object.__setattr__(self, "density", tuple(self.density))
            for i, x in enumerate(self.densities):
                check_number(f"density[{i}]", x, wanted, lambda x: 0 < x <= 1)
        else:
            check_number("density", self.density, wanted, lambda x: 0 < x <= 1)
        if not self.densities:
            raise ConfigError("density is empty; pass one number for each level of the ramp-up")
        check_int("begin_step", self.begin_step, "a number of steps, 0 or more", least=0)
        check_int("ramp_steps", self.ramp_steps, "a positive number of steps")
        check_number("momentum", self.momentum, "a number from 0 to 1", lambda x: 0 <= x < 1)
        check_flag("nesterov", self.nesterov)
        check_number(
            "clip_norm", self.clip_norm, "a positive number", lambda x: x > 0, or_none=True
        )
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "nesterov=True needs momentum, but momentum is 0; pass momentum=0.9, or leave "
                "nesterov out"
            )
        if self.ramp_steps > 1 and len(self.densities) == 1:
            raise ConfigError(
                f"ramp_steps={self.ramp_steps} needs several densities, but density has one; pass "
                "density=(0.25, 0.0625, 0.015625, 0.004, 0.001), or leave ramp_steps out"
            )

    @property
    def densities(self) -> tuple[float, ...]:
        """The densities of the ramp-up, or the only density."""
        return self.density if isinstance(self.density, tuple) else (self.density,)

    @cached_property
    def levels(self) -> tuple[tuple[int, float], ...]:
        """Pairs (step, density): from this step on, trainers send this fraction of a gradient.

        In the example of the class, the first pair is (0, 1.0): the steps 0 to 9 send full
        gradients.
        """
        # Paddle's `get_period_sparsity` has index i from step ramp_steps * i / count on
        count, found = len(self.densities), {}
        if self.begin_step:
            found[0] = 1.0
        for i, density in enumerate(self.densities):
            found[self.begin_step - (-i * self.ramp_steps // count)] = float(density)
        return tuple(found.items())

    def clip_at(self, level: int, trainers: int) -> float | None:
        """Return the norm to which a trainer clips the gradient of each leaf; None for no clip.

        Args:
          level: index into `levels`.
          trainers: the number of trainers.
        """
        if self.clip_norm is None or self.levels[level][0] < self.begin_step:
            return None
        return self.clip_norm / math.sqrt(trainers)
