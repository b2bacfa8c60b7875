"""Trainers on one device, with `jit(vmap)` over the axis.

For tests, notebooks, and machines that one does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.array_fns import parts_of
from dtrans.ir.program import Program
from dtrans.ops import UNDER_VMAP
from dtrans.plan import realises
from dtrans.run.base.batch import Share, on_one_device
from dtrans.run.base.lowering import per_trainer
from dtrans.run.collective.job import CollectiveJob, StepFunction, StepLayout, Trainers


class SimulatedTrainers(Trainers):
    """A number of trainers on one device."""

    mesh, run_id = None, THIS_PROCESS

    def __init__(self, count: int) -> None:
        self.here = count

    def everywhere(self, xs: Sequence[Any]) -> list[Any]:
        return [on_one_device(x) for x in xs]

    def state(self, x: Any, axis: int | None) -> Any:
        return jax.device_put(x, jax.local_devices()[0])

    def batch(self, arrays: Sequence[Any], shares: Sequence[Share]) -> list[Any]:
        return [on_one_device(x) for x in arrays]

    def mapped(self, program: Program, layout: StepLayout) -> StepFunction:
        axes, sliced, ways = layout.axes, layout.sliced, layout.ways
        sizes = [size for _, size in axes]
        one = per_trainer(program, lambda: {**layout.rules(), **UNDER_VMAP})
        split = [None if isinstance(s, str) else 0 for s in layout.shares]

        def step(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            parts = [
                x if isinstance(s, str) else _parts(x, s, sizes) for x, s in zip(batch, layout.shares, strict=True)
            ]
            mapped: Callable[..., Any] = lambda held, batch: one(*held, *batch)
            held = [x if a is None else parts_of(x, a, sizes[-1]) for x, a in zip(held, sliced, strict=True)]
            for name, size in reversed(axes):
                # out_axes None: vmap refuses what is not the same on all trainers
                own = name == axes[-1][0]
                kept = [None if way == "same" or (way == "slice" and not own) else 0 for way, _ in ways]
                ins = ([0 if own and a is not None else None for a in sliced], split)
                mapped = jax.vmap(mapped, in_axes=ins, out_axes=kept, axis_name=name, axis_size=size)
            made = mapped(held, parts)
            return [_joined(x, way, axis, len(axes)) for x, (way, axis) in zip(made, ways, strict=True)]

        return step


def _parts(x: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
    """The parts of an array of the batch, on leading axes."""
    parts = parts_of(x, axis, math.prod(sizes))
    return parts.reshape(*sizes, *parts.shape[1:])


def _joined(x: Any, way: str, axis: int | None, leading: int) -> Any:
    """An output of all trainers, which are on the leading axes."""
    if way == "concat":
        x, leading = x.reshape(-1, *x.shape[leading:]), 1
    if axis is not None:
        back = jnp.moveaxis(x, 0, axis)
        return back.reshape(*back.shape[:axis], -1, *back.shape[axis + 2 :])
    if way == "first":
        return x[(0,) * leading]
    return x.reshape(-1, *x.shape[leading:]) if way == "each" else x


@realises(CollectivePlan, "simulate")
def simulated(plan: CollectivePlan) -> CollectiveJob:
    """All trainers on one device."""
    return CollectiveJob(plan, SimulatedTrainers(plan.trainers), donate=False)
