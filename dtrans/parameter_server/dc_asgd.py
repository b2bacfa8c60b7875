"""Delay compensation: the term that an asynchronous server adds to a gradient of older parameters.

    w_bak    the block as trainer k last received it, one for each trainer: `params/w.block0.trainer_1_bak`
    g'       g + lambda g g (w - w_bak)                 the optimizer's input in the place of g
    lambda   fixed; or lambda0 / sqrt(ms + 1e-7), with ms = m ms + (1 - m) g g, the adaptive variant

    w_bak    the block as trainer k last received it, kept for each trainer: `params/w.block0.trainer_1_bak`
    g'       g + lambda g g (w - w_bak)                 what the optimizer is given in the place of g
    lambda   fixed; or lambda0 / sqrt(ms + 1e-7), with ms = m ms + (1 - m) g g, the adaptive variant

`lambda g g` stands for the diagonal of the Hessian in the first-order expansion of the gradient at
w.

A block reads `params/w.block0.bak`; which trainer's it is, the server knows, whose gradient it
holds. Of a table a trainer receives rows, and a server keeps these until their gradient has come:
it has no copy of a table for each trainer.

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
from dtrans.ops import BACKUP, OptimizeBlock, backup_of
from dtrans.parameter_server.options import Async, DelayCompensation, HalfAsync, Mode
from dtrans.slicing.blocks import Block, Unit
from dtrans.slicing.server_update import ServerWork


MEAN_SQUARE = "@GRAD.mean_square"
EPSILON = 1e-7


def compensated(
    work: ServerWork,
    units: Sequence[Unit],
    trainers: int,
    how: DelayCompensation,
    leaves: Collection[str],
    averages: Sequence[str] = (),
) -> ServerWork:
    """Return the work of a server whose blocks compensate received gradients.

    Args:
      leaves: the names of all parameters.
      averages: those for which servers are given something else
        (`dtrans.parameter_server.averaged_leaves`).
    """
    units = [unit for unit in units if not any(x.leaf in averages for x in unit.blocks)]
    of = {unit.name: unit for unit in units}
    blocks = tuple(
        _compensating(b, of[b.name].blocks, work, how) if b.role == OPTIMIZE and b.name in of else b
        for b in work.blocks
    )
    held = dict(work.variables)
    for block in (x for unit in units for x in unit.blocks if _gradient(x) in work.grads):
        param = held[block.name]
        beside = lambda name, zeros=False, param=param: dataclasses.replace(
            param, beside=name, zeros=zeros
        )
        kept = () if block.is_table else range(trainers)
        new = {backup_of(block.name, k): beside(backup_of(block.leaf, k)) for k in kept}
        if how.decay is not None:
            new[block.name + MEAN_SQUARE] = beside(block.leaf + MEAN_SQUARE, zeros=True)
        for name in (*new, *(x.beside for x in new.values()), block.name + BACKUP):
            if name in held or name in leaves:
                raise ConfigError(
                    f"{name} is what servers call a copy of {block.name}: rename that leaf"
                )
        held |= new
    return dataclasses.replace(work, blocks=blocks, variables=held)


def kept_beside(mode: Mode) -> tuple[str, ...]:
    """Return the suffixes of the arrays beside each parameter that change with a zero gradient."""
    delay = mode.delay if isinstance(mode, Async | HalfAsync) else None
    return () if delay is None or delay.decay is None else (MEAN_SQUARE,)


def _gradient(block: Block) -> str:
    return block.gradient(0, 1)


def _compensating(
    block: OptimizeBlock, blocks: Sequence[Block], work: ServerWork, how: DelayCompensation
) -> OptimizeBlock:
    """Return an optimize block that compensates its gradients first."""
    b = Builder(block.jaxpr)
    given = {n: b.input(v.aval) for n, v in block.invars.items()}
    values: dict[str, Any] = dict(given)
    out_names, outs = [], []
    for x in blocks:
        g = given.get(_gradient(x))
        if g is None:  # nothing is updated by it
            continue
        aval = ShapedArray(x.shape, x.dtype)
        for name in (x.name, x.name + BACKUP):
            if name not in given:
                given[name] = b.input(aval)
        operands = [g, given[x.name], given[x.name + BACKUP]]
        if how.decay is None:
            (values[_gradient(x)],) = b.call(_fixed(how.strength), *operands)
        else:
            given[x.name + MEAN_SQUARE] = ms = b.input(aval)
            values[_gradient(x)], new = b.call(_adaptive(how.strength, how.decay), *operands, ms)
            out_names.append(x.name + MEAN_SQUARE)
            outs.append(new)
    made = b.inline(block.jaxpr, *(values[n] for n in block.in_names))
    return dataclasses.replace(
        block,
        jaxpr=b.build([*made, *outs]),
        in_names=tuple(given),
        out_names=(*block.out_names, *out_names),
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
