"""Delay compensation: a term that an asynchronous server adds to a gradient of older parameters.

    w_bak    the block as trainer k last received it, one copy for each trainer
    g'       g + lambda g g (w - w_bak), the optimizer's input instead of g
    lambda   fixed; or adaptive: lambda0 / sqrt(ms + 1e-7), with ms = m ms + (1 - m) g g

`lambda g g` approximates the diagonal of the Hessian in the first-order expansion of the gradient
at w.

Copies are named as in Paddle: `params/w.block0.trainer_1_bak`. An update reads
`params/w.block0.bak`, and the server passes the copy of the gradient's sender. A trainer receives
only rows of a table. A server stores these rows until their gradient arrives, and has no copy of a
table for each trainer.

Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation (arXiv
1609.08326), equations 10 and 14. In Paddle, `DistributeTranspiler._append_dc_asgd_ops`, where
lambda is 1, and which fails when it is run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ShapedArray
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.program import OPTIMIZE
from dtrans.ir.selection import values_at
from dtrans.ops import BACKUP, OptimizeBlock, backup_of
from dtrans.parameter_server.options import Async, DelayCompensation, HalfAsync, Mode
from dtrans.slicing.blocks import Block, Unit
from dtrans.slicing.server_update import ServerVariable, ServerWork


MEAN_SQUARE = "@GRAD.mean_square"
EPSILON = 1e-7


def compensate(
    work: ServerWork,
    units: Sequence[Unit],
    trainers: int,
    delay: DelayCompensation,
    leaves: Collection[str],
    averages: Sequence[str] = (),
) -> ServerWork:
    """Return a server's work with updates that compensate received gradients.

    Args:
      units: the server's blocks.
      trainers: the number of trainers.
      delay: the options.
      leaves: names of all parameters, which copies must not have.
      averages: leaves that servers average (`dtrans.parameter_server.averaged_leaves`). They have
        no gradients to compensate.

    Raises:
      ConfigError: a leaf has the name of a copy.
    """
    has_average = lambda unit: any(x.leaf in averages for x in unit.blocks)
    units = [unit for unit in units if not has_average(unit)]
    blocks_of = {unit.name: unit.blocks for unit in units}
    updates = []
    for update in work.blocks:
        if update.role == OPTIMIZE and update.name in blocks_of:
            update = _compensated_update(update, blocks_of[update.name], work, delay)
        updates.append(update)

    variables = dict(work.variables)
    for unit in units:
        for block in unit.blocks:
            if _gradient(block) not in work.grads:
                continue
            copies = _copies(block, variables[block.name], trainers, delay)
            for name in (*copies, *(x.beside for x in copies.values()), block.name + BACKUP):
                if name in variables or name in leaves:
                    raise ConfigError(
                        f"{name} is what servers call a copy of {block.name}: rename that leaf"
                    )
            variables |= copies
    return dataclasses.replace(work, blocks=tuple(updates), variables=variables)


def _copies(
    block: Block, param: ServerVariable, trainers: int, delay: DelayCompensation
) -> dict[str, ServerVariable]:
    """Return the arrays beside a block: a backup for each trainer, and the mean squares."""
    copies = {}
    for k in range(0 if block.is_table else trainers):
        beside = backup_of(block.leaf, k)
        copies[backup_of(block.name, k)] = dataclasses.replace(param, beside=beside, zeros=False)
    if delay.decay is not None:
        beside = block.leaf + MEAN_SQUARE
        copies[block.name + MEAN_SQUARE] = dataclasses.replace(param, beside=beside, zeros=True)
    return copies


def moving_suffixes(mode: Mode) -> tuple[str, ...]:
    """Return the suffixes of arrays beside parameters that change with a gradient of zero."""
    delay = mode.delay if isinstance(mode, Async | HalfAsync) else None
    if delay is None or delay.decay is None:
        return ()
    return (MEAN_SQUARE,)


def _gradient(block: Block) -> str:
    return block.gradient(0, 1)


def _compensated_update(
    update: OptimizeBlock, blocks: Sequence[Block], work: ServerWork, delay: DelayCompensation
) -> OptimizeBlock:
    """Return an optimize block that compensates its gradients first."""
    b = Builder(update.jaxpr)
    inputs = {n: b.input(v.aval) for n, v in update.invars.items()}
    values: dict[str, Any] = dict(inputs)  # the inputs, with compensated gradients
    mean_squares: dict[str, Any] = {}
    for block in blocks:
        gradient = _gradient(block)
        if gradient not in inputs:
            continue
        aval = ShapedArray(block.shape, block.dtype)
        for name in (block.name, block.name + BACKUP):
            if name not in inputs:
                inputs[name] = b.input(aval)
        operands = [inputs[gradient], inputs[block.name], inputs[block.name + BACKUP]]
        if delay.decay is None:
            (values[gradient],) = b.call(_fixed(delay.strength), *operands)
        else:
            name = block.name + MEAN_SQUARE
            inputs[name] = b.input(aval)
            adaptive = _adaptive(delay.strength, delay.decay)
            values[gradient], mean_squares[name] = b.call(adaptive, *operands, inputs[name])
    outputs = b.inline(update.jaxpr, *values_at(values, update.in_names))
    return dataclasses.replace(
        update,
        jaxpr=b.build([*outputs, *mean_squares.values()]),
        in_names=tuple(inputs),
        out_names=(*update.out_names, *mean_squares),
    )


@functools.cache
def _fixed(strength: float) -> Callable[..., list[jax.Array]]:
    def fn(g: jax.Array, w: jax.Array, backup: jax.Array) -> list[jax.Array]:
        return [g + strength * g * g * (w - backup).astype(g.dtype)]

    return fn


@functools.cache
def _adaptive(strength: float, decay: float) -> Callable[..., list[jax.Array]]:
    def fn(g: jax.Array, w: jax.Array, backup: jax.Array, ms: jax.Array) -> list[jax.Array]:
        ms = decay * ms + (1 - decay) * g * g
        return [g + strength / jnp.sqrt(ms + EPSILON) * g * g * (w - backup).astype(g.dtype), ms]

    return fn
