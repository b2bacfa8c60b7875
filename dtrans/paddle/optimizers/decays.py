"""Paddle's learning rate decays, and its warm-up, as optax schedules.

A schedule maps the number of previous updates to a learning rate. It can be the `learning_rate` of
any optimizer in this package or in optax. It computes in float32, as in Paddle, or in float64 if
JAX has 64 bits enabled. In the formulas, `step` is the number of previous updates.

Two schedules of Paddle's dygraph mode have no counterpart. The function that LambdaDecay takes is
already a schedule. ReduceLROnPlateau needs the loss, which servers do not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import ConfigError


Schedule = Callable[[Any], jax.Array]
"""Function from the number of previous updates (an integer or a 0-d array) to a learning rate."""


def noam_decay(d_model: float, warmup_steps: float, learning_rate: float = 1.0) -> Schedule:
    """Return a schedule that rises for `warmup_steps`, then falls as 1 / sqrt(step).

        learning_rate · d_model^-0.5 · min(step^-0.5, warmup_steps^-1.5 · step)

    Here `step` is 1 in the first update.

    Args:
      d_model: the width of the model.
      warmup_steps: the step with the maximum learning rate.
      learning_rate: a factor of the result.

    Returns:
      A schedule.

    Source: `noam_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.noam_decay(4, 4)
      >>> [float(lr(step)) for step in (0, 1, 3, 15)]
      [0.0625, 0.125, 0.25, 0.125]
    """

    def schedule(count: Any) -> jax.Array:
        step = _as_real(count) + 1
        return learning_rate * d_model**-0.5 * jnp.minimum(step**-0.5, warmup_steps**-1.5 * step)

    return schedule


def exponential_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return a schedule that decays by a factor: `learning_rate · decay_rate^(step / decay_steps)`.

    Args:
      learning_rate: the learning rate in the first step.
      decay_steps: the number of steps in which the learning rate decays by one factor.
      decay_rate: the number that multiplies the learning rate at each decay.
      staircase: True rounds `step / decay_steps` down.

    Returns:
      A schedule.

    Source: `exponential_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.exponential_decay(1.0, 2, 0.5, staircase=True)
      >>> [float(lr(step)) for step in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return lambda count: learning_rate * decay_rate ** _count_periods(count, decay_steps, staircase)


def natural_exp_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return an exponential decay: `learning_rate · exp(-decay_rate · step / decay_steps)`.

    Args:
      learning_rate: the learning rate in the first step.
      decay_steps: the number of steps in which the exponent falls by `decay_rate`.
      decay_rate: the rate.
      staircase: True rounds `step / decay_steps` down.

    Returns:
      A schedule.

    Source: `natural_exp_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.natural_exp_decay(1.0, 2, 1.0)
      >>> [round(float(lr(step)), 4) for step in range(3)]
      [1.0, 0.6065, 0.3679]
    """
    return lambda count: (
        learning_rate * jnp.exp(-decay_rate * _count_periods(count, decay_steps, staircase))
    )


def inverse_time_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return a hyperbolic decay: `learning_rate / (1 + decay_rate · step / decay_steps)`.

    Args:
      learning_rate: the learning rate in the first step.
      decay_steps: the number of steps in which the denominator grows by `decay_rate`.
      decay_rate: the rate.
      staircase: True rounds `step / decay_steps` down.

    Returns:
      A schedule.

    Source: `inverse_time_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.inverse_time_decay(1.0, 1, 1.0)
      >>> [float(lr(step)) for step in (0, 1, 3)]
      [1.0, 0.5, 0.25]
    """
    return lambda count: (
        learning_rate / (1 + decay_rate * _count_periods(count, decay_steps, staircase))
    )


def polynomial_decay(
    learning_rate: float,
    decay_steps: float,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> Schedule:
    """Return a schedule that decays to an end value as a power of the remaining steps.

        end_learning_rate + (learning_rate - end_learning_rate) · (1 - step / decay_steps)^power

    Args:
      learning_rate: the learning rate in the first step.
      decay_steps: the step in which the learning rate reaches the end value. Later steps use the
        end value.
      end_learning_rate: the end value.
      power: the exponent: 1 for a line, 2 for a parabola.
      cycle: True replaces `decay_steps` by its smallest multiple that is not below the step. So the
        learning rate rises after each end, and then decays more slowly.

    Returns:
      A schedule.

    Source: `polynomial_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.polynomial_decay(1.0, 4, end_learning_rate=0.0, cycle=True)
      >>> [float(lr(step)) for step in (0, 1, 4, 6)]
      [1.0, 0.75, 0.0, 0.25]
    """

    def schedule(count: Any) -> jax.Array:
        step = _as_real(count)
        if cycle:
            done = step / (decay_steps * jnp.maximum(jnp.ceil(step / decay_steps), 1))
        else:
            done = jnp.minimum(step, decay_steps) / decay_steps
        return (learning_rate - end_learning_rate) * (1 - done) ** power + end_learning_rate

    return schedule


def piecewise_decay(boundaries: Sequence[float], values: Sequence[float]) -> Schedule:
    """Return a piecewise constant schedule: `values[i]` before step `boundaries[i]`.

    The last value is used from the last boundary on.

    Args:
      boundaries: numbers of steps, in ascending order.
      values: learning rates, one more than boundaries.

    Returns:
      A schedule.

    Raises:
      ConfigError: the number of values is not one more than the number of boundaries.

    Source: `piecewise_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.piecewise_decay([1, 3], [1.0, 0.5, 0.25])
      >>> [float(lr(step)) for step in range(4)]
      [1.0, 0.5, 0.5, 0.25]
    """
    if len(values) != len(boundaries) + 1:
        raise ConfigError(
            f"values has {len(values)} learning rates; {len(boundaries)} boundaries need "
            f"{len(boundaries) + 1}"
        )

    def schedule(count: Any) -> jax.Array:
        step = _as_real(count)
        value = jnp.asarray(values[-1], step.dtype)
        for boundary, before in zip(reversed(boundaries), reversed(values[:-1]), strict=True):
            value = jnp.where(step < boundary, before, value)
        return value

    return schedule


def cosine_decay(learning_rate: float, step_each_epoch: float, epochs: float) -> Schedule:
    """Return a cosine schedule, which is constant within an epoch.

        learning_rate · (cos(pi · epoch / epochs) + 1) / 2

    It is 0 after `epochs`, and then rises again.

    Args:
      learning_rate: the learning rate in the first epoch.
      step_each_epoch: the number of steps in an epoch.
      epochs: the number of epochs until the learning rate is 0.

    Returns:
      A schedule.

    Source: `cosine_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.cosine_decay(1.0, 2, 2)
      >>> [round(float(lr(step)), 6) for step in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.0]
    """
    return lambda count: (
        learning_rate
        * 0.5
        * (jnp.cos(_count_periods(count, step_each_epoch, True) * math.pi / epochs) + 1)
    )


def step_decay(learning_rate: float, step_size: int, decay_rate: float = 0.1) -> Schedule:
    """Return a step decay: `learning_rate · decay_rate^floor(step / step_size)`.

    Paddle counts calls of the method `epoch`, but here steps are updates: multiply `step_size` by
    the number of updates in an epoch.

    Args:
      learning_rate: the learning rate in the first step.
      step_size: the number of steps with the same learning rate.
      decay_rate: the number that multiplies the learning rate at each decay.

    Returns:
      A schedule.

    Source: `StepDecay` of Paddle's python/paddle/fluid/dygraph/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.step_decay(1.0, 2, 0.5)
      >>> [float(lr(step)) for step in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return exponential_decay(learning_rate, step_size, decay_rate, staircase=True)


def multi_step_decay(
    learning_rate: float, milestones: Sequence[int], decay_rate: float = 0.1
) -> Schedule:
    """Return a schedule that decays by a factor at each milestone.

    Paddle counts calls of the method `epoch`, but here steps are updates: multiply milestones by
    the number of updates in an epoch.

    Args:
      learning_rate: the learning rate in the first step.
      milestones: the steps in which the learning rate changes, in ascending order.
      decay_rate: the number that multiplies the learning rate at each decay.

    Returns:
      A schedule.

    Source: `MultiStepDecay` of Paddle's python/paddle/fluid/dygraph/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.multi_step_decay(1.0, [1, 3], 0.5)
      >>> [float(lr(step)) for step in range(4)]
      [1.0, 0.5, 0.5, 0.25]
    """
    return piecewise_decay(
        milestones, [learning_rate * decay_rate**i for i in range(len(milestones) + 1)]
    )


def linear_lr_warmup(
    learning_rate: float | Callable[[Any], Any],
    warmup_steps: float,
    start_lr: float,
    end_lr: float,
    begin: int = 0,
) -> Schedule:
    """Return a schedule that rises linearly for `warmup_steps`, then follows `learning_rate`.

        start_lr + (end_lr - start_lr) · step / warmup_steps   in steps before warmup_steps

    If `learning_rate` is a schedule, it also counts the steps of the warm-up.

    Args:
      learning_rate: a number or a schedule, used after the warm-up.
      warmup_steps: the number of steps of the warm-up.
      start_lr: the learning rate at the start of the warm-up.
      end_lr: the learning rate at the end of the warm-up.
      begin: the value of `step` in the first update. Pass 1 with `noam_decay`: in Paddle, a warm-up
        and its schedule share a counter, and `noam_decay` starts the counter at 1.

    Returns:
      A schedule.

    Source: `linear_lr_warmup` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.linear_lr_warmup(0.5, 4, 0.0, 1.0)
      >>> [float(lr(step)) for step in range(5)]
      [0.0, 0.25, 0.5, 0.75, 0.5]
    """

    def schedule(count: Any) -> jax.Array:
        step = _as_real(count) + begin
        after = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.where(
            step < warmup_steps, start_lr + (end_lr - start_lr) * (step / warmup_steps), after
        )

    return schedule


def _as_real(count: Any) -> jax.Array:
    """Return a count as an array of JAX's default real type."""
    return jnp.asarray(count, jnp.result_type(float))


def _count_periods(count: Any, steps: float, staircase: bool) -> jax.Array:
    """Return count / steps, rounded down if `staircase` is True."""
    periods = _as_real(count) / steps
    return jnp.floor(periods) if staircase else periods
