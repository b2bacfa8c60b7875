"""Backend of trainers on a mesh of this process's devices: `jit(shard_map)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.plan import register_runner
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.platforms import resolve_for_platform
from dtrans.run.base.spmd import AxisSharding, Function, on_mesh as on_mesh_axes
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.trainers import StepLayout, Trainers
from dtrans.zero.plan import ShardingPlan


class MeshTrainers(Trainers):
    """Backend of a job of one process, in which each trainer is a device of a mesh.

    With several devices per trainer, a trainer is a row of the mesh.

    Args:
      mesh: a mesh of devices, with the axes of the plan.
      over: the axes of the mesh that split the batch.
    """

    run_id = THIS_PROCESS
    gathers = False  # True to all-gather results whose rows are on several devices

    def __init__(self, mesh: Mesh, over: tuple[str, ...]) -> None:
        self.mesh: Mesh = mesh
        self.over = over
        self.here = math.prod(mesh.shape[name] for name in over)

    def state_sharding(self, sharding: AxisSharding) -> NamedSharding:
        return NamedSharding(self.mesh, sharding.spec)

    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        return list(jax.device_put(list(xs), self.state_sharding(AxisSharding())))

    def place_state(self, x: Any, sharding: AxisSharding) -> Any:
        return jax.device_put(x, self.state_sharding(sharding))

    def place_batch(self, arrays: Sequence[Any], shardings: Sequence[AxisSharding]) -> list[Any]:
        placed = []
        for x, sharding in zip(arrays, shardings, strict=True):
            placed.append(_put(x, self.state_sharding(sharding)))
        return placed

    def map_program(self, program: Program, layout: StepLayout) -> Function:
        gathered = []
        if self.gathers:
            gathered = [k for k, (way, _) in enumerate(layout.ways) if way in ("concat", "each")]
        return on_mesh_axes(
            per_trainer(program, layout.rules), self.mesh, layout.ins, layout.outs, gathered
        )


@register_runner(CollectivePlan, "mesh")
def on_mesh(
    plan: CollectivePlan,
    devices: Sequence[jax.Device] | None = None,
    *,
    donate: bool = True,
    on_nonfinite: str = "ignore",
) -> CollectiveJob:
    """Return a job of trainers on devices. Unset options get the platform's defaults.

    Args:
      devices: a list of devices; the job uses the first `plan.device_count`. The default is
        `jax.devices()`.

    Raises:
      ConfigError: there are too few devices, or a device is repeated.
    """
    mesh_devices = list(jax.devices() if devices is None else devices)
    are_devices = all(isinstance(d, jax.Device) for d in mesh_devices)
    count = len(mesh_devices)
    if not are_devices or len({*mesh_devices}) < count:
        raise ConfigError(f"devices is {mesh_devices}, expected jax.Device objects, each once")
    needed = plan.device_count
    if isinstance(plan, ShardingPlan) and devices is not None and count != needed:
        raise ConfigError(
            f"the plan needs {needed} devices, but on_mesh received {count}; pass {needed} "
            "devices, or plan another degree or mesh"
        )
    if count < needed:
        remedy = "plan.simulate() needs only one device"
        if not mesh_devices or mesh_devices[0].platform == "cpu":
            remedy = (
                f'set CPU devices with jax.config.update("jax_num_cpu_devices", {needed}) '
                f"before JAX is used; {remedy}"
            )
        raise ConfigError(
            f"{plan.trainers} {plan.options.noun}s need {needed} devices, but on_mesh has {count}; "
            f"{remedy}"
        )
    trainers = MeshTrainers(mesh_of(plan, mesh_devices), plan.options.over)
    return CollectiveJob(
        resolve_for_platform(plan, mesh_devices[0].platform),
        trainers,
        donate=donate,
        on_nonfinite=on_nonfinite,
    )


def mesh_of(plan: CollectivePlan, devices: Sequence[jax.Device]) -> Mesh:
    """Return the mesh on which a plan runs, made of the first devices of a list."""
    sizes = [size for _, size in plan.axes]
    return Mesh(np.array(devices[: plan.device_count]).reshape(sizes), plan.axis_names)


def _put(x: Any, where: NamedSharding) -> Any:
    """Put an array on devices, without the slow `jax.device_put` if the array is there already."""
    if isinstance(x, jax.Array) and x.sharding == where:
        return x
    return jax.device_put(x, where)
