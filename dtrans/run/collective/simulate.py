"""Backend of trainers simulated on one device: `jit(vmap)` over their axes.

Use it for tests and notebooks, and for plans for more devices than the machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.ops import UNDER_VMAP
from dtrans.plan import register_runner
from dtrans.run.base.batch import on_one_device
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.spmd import AxisSharding, Function, on_one_device as run_on_one_device
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.trainers import StepLayout, Trainers


class SimulatedTrainers(Trainers):
    """Trainers that one device simulates.

    Args:
      count: the number of trainers.
    """

    mesh, run_id = None, THIS_PROCESS

    def __init__(self, count: int) -> None:
        self.here = count

    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        return [on_one_device(x) for x in xs]

    def place_state(self, x: Any, sharding: AxisSharding) -> Any:
        return jax.device_put(x, jax.local_devices()[0])

    def place_batch(self, arrays: Sequence[Any], shardings: Sequence[AxisSharding]) -> list[Any]:
        return [on_one_device(x) for x in arrays]

    def map_program(self, program: Program, layout: StepLayout) -> Function:
        one = per_trainer(program, lambda: {**layout.rules(), **UNDER_VMAP})
        return run_on_one_device(one, layout.axes, layout.ins, layout.outs)


@register_runner(CollectivePlan, "simulate")
def simulated(plan: CollectivePlan) -> CollectiveJob:
    """Return a job of all trainers on one device."""
    return CollectiveJob(plan, SimulatedTrainers(plan.trainers), donate=False)
