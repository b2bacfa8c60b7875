"""Paddle's decays of the learning rate, and its warm-up: functions of the number of updates before
this one.

Each is a schedule as optax has them, for any `learning_rate` here or in optax. Values are float32
(float64 where JAX has 64 bits enabled), and powers and quotients are taken in it, as Paddle takes
them in float32.

Paddle's schedules read one counter of the program, which is 0 in the first step; `noam_decay`
starts it at 1. Of those that its dygraph mode alone has, LambdaDecay's function is a schedule
itself, and ReduceLROnPlateau has to be told the loss, which no server knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import ConfigError


Schedule = Callable[[Any], jax.Array]
"""A learning rate by the number of updates before this one, a Python number or a 0-d array of integers."""


def noam_decay(d_model: float, warmup_steps: float, learning_rate: float = 1.0) -> Schedule:
    """Rise for `warmup_steps`, then fall as 1 / sqrt(step), where step is 1 in the first update.

        learning_rate · d_model^-0.5 · min(step^-0.5, warmup_steps^-1.5 · step)

    Args:
      d_model: width of the model.
      warmup_steps: the step with the largest learning rate.
      learning_rate: multiplies all of it.

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
        step = _real(count) + 1
        return learning_rate * d_model**-0.5 * jnp.minimum(step**-0.5, warmup_steps**-1.5 * step)

    return schedule


def exponential_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Decay by a factor: `learning_rate · decay_rate^(step / decay_steps)`.

    Args:
      learning_rate: that of the first step.
      decay_steps: how many steps there are to a factor.
      decay_rate: the factor.
      staircase: whether `step / decay_steps` is rounded down.

    Returns:
      A schedule.

    Source: `exponential_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.exponential_decay(1.0, 2, 0.5, staircase=True)
      >>> [float(lr(step)) for step in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return lambda count: learning_rate * decay_rate ** _turns(count, decay_steps, staircase)


def natural_exp_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Decay by a rate: `learning_rate · exp(-decay_rate · step / decay_steps)`.

    Args:
      learning_rate: that of the first step.
      decay_steps: how many steps the rate is of.
      decay_rate: the rate.
      staircase: whether `step / decay_steps` is rounded down.

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
        learning_rate * jnp.exp(-decay_rate * _turns(count, decay_steps, staircase))
    )


def inverse_time_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Decay with time: `learning_rate / (1 + decay_rate · step / decay_steps)`.

    Args:
      learning_rate: that of the first step.
      decay_steps: how many steps the rate is of.
      decay_rate: the rate.
      staircase: whether `step / decay_steps` is rounded down.

    Returns:
      A schedule.

    Source: `inverse_time_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.inverse_time_decay(1.0, 1, 1.0)
      >>> [float(lr(step)) for step in (0, 1, 3)]
      [1.0, 0.5, 0.25]
    """
    return lambda count: learning_rate / (1 + decay_rate * _turns(count, decay_steps, staircase))


def polynomial_decay(
    learning_rate: float,
    decay_steps: float,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> Schedule:
    """Decay to an end: `(learning_rate - end_learning_rate) · (1 - step / decay_steps)^power +
    end_learning_rate`.

    Args:
      learning_rate: that of the first step.
      decay_steps: the step at which the end is reached; steps after it stay there.
      end_learning_rate: the end.
      power: 1 for a line, 2 for a parabola.
      cycle: whether `decay_steps` is multiplied, once the end is reached, by the least whole number
        that is enough for the step, so that the rate rises again and decays more slowly.

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
        step = _real(count)
        if cycle:
            done = step / (decay_steps * jnp.maximum(jnp.ceil(step / decay_steps), 1))
        else:
            done = jnp.minimum(step, decay_steps) / decay_steps
        return (learning_rate - end_learning_rate) * (1 - done) ** power + end_learning_rate

    return schedule


def piecewise_decay(boundaries: Sequence[float], values: Sequence[float]) -> Schedule:
    """Take one value after the other: `values[i]` in the steps before `boundaries[i]`, and the last
    after them all.

    Args:
      boundaries: steps, ascending.
      values: learning rates, one more than boundaries.

    Returns:
      A schedule.

    Raises:
      ConfigError: not one value more than boundaries.

    Source: `piecewise_decay` of Paddle's python/paddle/fluid/layers/learning_rate_scheduler.py.

    Example:
      >>> import dtrans
      >>> lr = dtrans.paddle.optimizers.piecewise_decay([1, 3], [1.0, 0.5, 0.25])
      >>> [float(lr(step)) for step in range(4)]
      [1.0, 0.5, 0.5, 0.25]
    """
    if len(values) != len(boundaries) + 1:
        raise ConfigError(
            f"{len(boundaries)} boundaries need {len(boundaries) + 1} values, not {len(values)}"
        )

    def schedule(count: Any) -> jax.Array:
        step = _real(count)
        value = jnp.asarray(values[-1], step.dtype)
        for boundary, before in zip(reversed(boundaries), reversed(values[:-1]), strict=True):
            value = jnp.where(step < boundary, before, value)
        return value

    return schedule


def cosine_decay(learning_rate: float, step_each_epoch: float, epochs: float) -> Schedule:
    """Decay along half a cosine, epoch by epoch: `learning_rate · (cos(pi · epoch / epochs) + 1) /
    2`.

    After `epochs` it rises again.

    Args:
      learning_rate: that of the first epoch.
      step_each_epoch: steps in an epoch; the rate stays the same in each.
      epochs: how many epochs it takes to 0.

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
        learning_rate * 0.5 * (jnp.cos(_turns(count, step_each_epoch, True) * math.pi / epochs) + 1)
    )


def step_decay(learning_rate: float, step_size: int, decay_rate: float = 0.1) -> Schedule:
    """Decay by a factor every `step_size`: `learning_rate · decay_rate^floor(step / step_size)`.

    Paddle's counts calls of its method `epoch`; this one counts updates: multiply `step_size` by
    those of an epoch.

    Args:
      learning_rate: that of the first step.
      step_size: how many steps have the same learning rate.
      decay_rate: the factor.

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
    """Decay by a factor at each milestone.

    Paddle's counts calls of its method `epoch`; this one counts updates: multiply milestones by
    those of an epoch.

    Args:
      learning_rate: that of the first step.
      milestones: steps with which the next learning rate starts, ascending.
      decay_rate: the factor.

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
    """Rise along a line for `warmup_steps`, then take another learning rate.

        start_lr + (end_lr - start_lr) · step / warmup_steps   in steps before warmup_steps

    A schedule after the warm-up is that of all steps: it has gone on during the warm-up.

    Args:
      learning_rate: a number, or a schedule.
      warmup_steps: the step with which `learning_rate` starts.
      start_lr: the learning rate of the first step.
      end_lr: what the line leads to.
      begin: the first step's number. In Paddle the warm-up shares the counter of the schedule after
        it, which is 1 in the first step of a `noam_decay`.

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
        step = _real(count) + begin
        after = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.where(
            step < warmup_steps, start_lr + (end_lr - start_lr) * (step / warmup_steps), after
        )

    return schedule


def _real(count: Any) -> jax.Array:
    """A count as a real number."""
    return jnp.asarray(count, jnp.result_type(float))


def _turns(count: Any, steps: float, whole: bool) -> jax.Array:
    """How many times `steps` have passed; with `whole` rounded down."""
    turns = _real(count) / steps
    return jnp.floor(turns) if whole else turns
