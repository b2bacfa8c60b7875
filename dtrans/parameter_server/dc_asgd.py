"""Delay compensation (DC-ASGD): an asynchronous server corrects gradients for their delay.

    w        the parameters now
    w_bak    the parameters as the gradient's trainer last received them
    g'       g + lambda g g (w - w_bak); the optimizer gets g' instead of the gradient g
    lambda   fixed; or adaptive: lambda0 / sqrt(ms + 1e-7), with ms = m ms + (1 - m) g g

g' is the first-order expansion of the gradient at w, with `lambda g g` in place of the Hessian's
diagonal.

A server stores a backup of each block for each trainer, named as in Paddle:
`params/w.block0.trainer_1_bak`. In the equations of an update, the backup has the name
`params/w.block0.bak`: the server passes the backup of the trainer that sent the gradient.

An embedding table needs no such backup. In each step, a trainer receives only the rows that its
batch looks up, and the server stores these rows until their gradient arrives.

Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation (arXiv
1609.08326), equations 10 and 14. Paddle's `DistributeTranspiler._append_dc_asgd_ops` has the same
update with lambda = 1, but its program fails at run time.
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
    """Change the updates of a server: they first correct each gradient for its delay.

    Args:
      work: the server's updates, and the arrays that the server stores.
      units: the server's blocks (ranges of rows of parameters), grouped by update.
      trainers: the number of trainers.
      delay: the options of the compensation.
      leaves: names of all parameters. No backup of a block may have one of these names.
      averages: leaves that servers average (`dtrans.parameter_server.averaged_leaves`). They have
        no gradients to correct.

    Raises:
      ConfigError: a leaf has the name of a backup.
    """
    corrected = []
    for unit in units:
        if not any(x.leaf in averages for x in unit.blocks):
            corrected.append(unit)
    blocks_of = {unit.name: unit.blocks for unit in corrected}
    updates = []
    for update in work.blocks:
        if update.role == OPTIMIZE and update.name in blocks_of:
            update = _compensated_update(update, blocks_of[update.name], work, delay)
        updates.append(update)

    variables = dict(work.variables)
    for unit in corrected:
        for block in unit.blocks:
            if _gradient(block) not in work.grads:
                continue
            added = _backups(block, variables[block.name], trainers, delay)
            names = [*added, block.name + BACKUP]
            for variable in added.values():
                names.append(variable.extra_name)
            for name in names:
                if name in variables or name in leaves:
                    raise ConfigError(
                        f"the step has a leaf named {name}, the name that servers give to their "
                        f"backup of {block.name}; rename the leaf"
                    )
            variables |= added
    return dataclasses.replace(work, blocks=tuple(updates), variables=variables)


def _backups(
    block: Block, param: ServerVariable, trainers: int, delay: DelayCompensation
) -> dict[str, ServerVariable]:
    """Return the arrays that a server adds for one block.

    For each trainer, the server stores a copy of the block as the trainer last received it. Blocks
    of tables have no such copies. The adaptive variant also stores a running mean of squared
    gradients.
    """
    added = {}
    if not block.is_table:
        for k in range(trainers):
            beside = backup_of(block.leaf, k)
            added[backup_of(block.name, k)] = dataclasses.replace(
                param, extra_name=beside, zeros=False
            )
    if delay.decay is not None:
        beside = block.leaf + MEAN_SQUARE
        added[block.name + MEAN_SQUARE] = dataclasses.replace(param, extra_name=beside, zeros=True)
    return added


def moving_suffixes(mode: Mode) -> tuple[str, ...]:
    """Return suffixes that identify server arrays which change even if a gradient is zero.

    The adaptive variant of delay compensation stores a running mean of squared gradients, which
    decays in each update. So an update must run on all rows of an embedding table, also on rows
    without a gradient.

    Args:
      mode: the mode of the job.
    """
    delay = mode.delay if isinstance(mode, Async | HalfAsync) else None
    if delay is None or delay.decay is None:
        return ()
    return (MEAN_SQUARE,)


def _gradient(block: Block) -> str:
    return block.gradient(0, 1)


def _compensated_update(
    update: OptimizeBlock, blocks: Sequence[Block], work: ServerWork, delay: DelayCompensation
) -> OptimizeBlock:
    """Return an update that first corrects its gradients for their delay.

    Args:
      update: the update of one or several blocks.
      blocks: these blocks.
      work: all updates of the server, and the arrays that it stores.
      delay: the options of the compensation.
    """
    b = Builder(update.jaxpr)
    inputs = {n: b.input(v.aval) for n, v in update.invars.items()}
    values: dict[str, Any] = dict(inputs)  # the loop below corrects the gradients
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
