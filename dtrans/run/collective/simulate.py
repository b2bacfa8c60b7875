"""Data-parallel trainers on one device, with `jit(vmap)` over the axis.

For tests, notebooks, and machines that one does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.plan import realises
from dtrans.run.base.lowering import per_trainer
from dtrans.run.collective.job import CollectiveJob


@realises(CollectivePlan, "simulate")
class SimulatedTrainers(CollectiveJob):
    """Trainers on one device; made by `plan.simulate()`."""

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return list(startup.compiled(*args))

    def _mapped(self, program: Program) -> Callable[[list[Any], Sequence[Any]], Sequence[Any]]:
        axes = self.plan.axes
        sizes = [size for _, size in axes]
        # what is said to be the same is not looked at; state is
        told = {n for n, way in self.plan.merges.items() if way == "same"}
        ways = ["first" if n in told else self._way(n) for n in program.out_names]
        one = per_trainer(program)
        split = [0 if s == "split" else None for s in self._shares]
        sliced = [self.slice_axis(n) for n in self._held_names]

        def step(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            parts = [x if s is None else x.reshape(*sizes, -1, *x.shape[1:]) for x, s in zip(batch, split, strict=True)]
            mapped: Callable[..., Any] = lambda held, batch: one(*held, *batch)
            held = [x if a is None else slices(x, a) for x, a in zip(held, sliced, strict=True)]
            for name, size in reversed(axes):
                # out_axes None: vmap refuses what is not the same on all trainers
                own = name == axes[-1][0]
                kept = [None if way == "same" or (way == "slice" and not own) else 0 for way in ways]
                ins = ([0 if own and a is not None else None for a in sliced], split)
                mapped = jax.vmap(mapped, in_axes=ins, out_axes=kept, axis_name=name, axis_size=size)
            count = len(axes)
            joined: dict[str, Callable[[Any], Any]] = {
                "concat": lambda x: x.reshape(-1, *x.shape[count + 1 :]),
                "each": lambda x: x.reshape(-1, *x.shape[count:]),
                "first": lambda x: x[(0,) * count],
                "same": lambda x: x,
            }
            made = mapped(held, parts)
            return [
                whole(x, self.slice_axis(n)) if way == "slice" else joined[way](x)
                for n, x, way in zip(program.out_names, made, ways, strict=True)
            ]

        def slices(x: jax.Array, axis: int) -> jax.Array:
            cut = x.reshape(*x.shape[:axis], sizes[-1], x.shape[axis] // sizes[-1], *x.shape[axis + 1 :])
            return jnp.moveaxis(cut, axis, 0)

        def whole(x: jax.Array, axis: int | None) -> jax.Array:
            assert axis is not None
            back = jnp.moveaxis(x, 0, axis)
            return back.reshape(*back.shape[:axis], -1, *back.shape[axis + 2 :])

        return step
