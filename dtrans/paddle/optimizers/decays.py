"""Paddle's decays of the learning rate and its warm-up, as optax schedules.

A schedule maps the number of previous updates to a learning rate. It fits any `learning_rate` of
this package or of optax. Values, powers and quotients are float32, as in Paddle, or float64 if JAX
has 64 bits enabled.

Paddle's schedules read one counter of the program, which is 0 in the first step; `noam_decay`
starts it at 1. Two schedules of its dygraph mode have no counterpart: LambdaDecay's function is a
schedule already. ReduceLROnPlateau needs the loss, which servers do not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import ConfigError


Schedule = Callable[[Any], jax.Array]
"""A learning rate by the number of previous updates: a Python number or a 0-d integer array."""


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
        step = _as_real(count) + 1
        return learning_rate * d_model**-0.5 * jnp.minimum(step**-0.5, warmup_steps**-1.5 * step)

    return schedule


def exponential_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Decay by a factor: `learning_rate · decay_rate^(step / decay_steps)`.

    Args:
      learning_rate: the rate of the first step.
      decay_steps: the number of steps for one factor.
      decay_rate: the factor.
      staircase: round `step / decay_steps` down.

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
    """Decay by a rate: `learning_rate · exp(-decay_rate · step / decay_steps)`.

    Args:
      learning_rate: the rate of the first step.
      decay_steps: the number of steps that `decay_rate` applies to.
      decay_rate: the rate.
      staircase: round `step / decay_steps` down.

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
    """Decay with time: `learning_rate / (1 + decay_rate · step / decay_steps)`.

    Args:
      learning_rate: the rate of the first step.
      decay_steps: the number of steps that `decay_rate` applies to.
      decay_rate: the rate.
      staircase: round `step / decay_steps` down.

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
    """Decay to an end value along a power of the remaining steps.

        end_learning_rate + (learning_rate - end_learning_rate) · (1 - step / decay_steps)^power

    Args:
      learning_rate: the rate of the first step.
      decay_steps: the step that reaches the end value; later steps stay there.
      end_learning_rate: the end value.
      power: 1 for a line, 2 for a parabola.
      cycle: after `decay_steps`, multiply it by the least integer that covers the step. The rate
        rises again, then decays more slowly.

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
    """Select a value by step: `values[i]` before `boundaries[i]`, the last value after all.

    Args:
      boundaries: steps, ascending.
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
            f"{len(boundaries)} boundaries need {len(boundaries) + 1} values, not {len(values)}"
        )

    def schedule(count: Any) -> jax.Array:
        step = _as_real(count)
        value = jnp.asarray(values[-1], step.dtype)
        for boundary, before in zip(reversed(boundaries), reversed(values[:-1]), strict=True):
            value = jnp.where(step < boundary, before, value)
        return value

    return schedule


def cosine_decay(learning_rate: float, step_each_epoch: float, epochs: float) -> Schedule:
    """Decay along half a cosine, epoch by epoch; rise again after `epochs`.

        learning_rate · (cos(pi · epoch / epochs) + 1) / 2

    Args:
      learning_rate: the rate of the first epoch.
      step_each_epoch: the number of steps in an epoch, which share one rate.
      epochs: the number of epochs until 0.

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
    """Decay by a factor every `step_size`: `learning_rate · decay_rate^floor(step / step_size)`.

    Paddle counts calls of the method `epoch`. dtrans counts updates: multiply `step_size` by the
    updates of an epoch.

    Args:
      learning_rate: the rate of the first step.
      step_size: the number of steps with the same learning rate.
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

    Paddle counts calls of the method `epoch`. dtrans counts updates: multiply milestones by the
    updates of an epoch.

    Args:
      learning_rate: the rate of the first step.
      milestones: the first steps of the next learning rates, ascending.
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
    """Rise along a line for `warmup_steps`, then follow `learning_rate`.

        start_lr + (end_lr - start_lr) · step / warmup_steps   in steps before warmup_steps

    A schedule counts the steps of the warm-up too.

    Args:
      learning_rate: a number, or a schedule.
      warmup_steps: the first step of `learning_rate`.
      start_lr: the learning rate of the first step.
      end_lr: the end of the line.
      begin: the number of the first step. In Paddle the warm-up and its schedule share a counter,
        which `noam_decay` starts at 1.

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
    """Return the number of periods of `steps` that have passed; with `staircase` rounded down."""
    periods = _as_real(count) / steps
    return jnp.floor(periods) if staircase else periods
