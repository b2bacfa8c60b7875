"""Trainers on a mesh of this process's devices: `jit(shard_map)`; XLA carries out the
reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.plan import realises
from dtrans.run.base.batch import Share
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.platforms import resolve_for_platform
from dtrans.run.base.spmd import Function, on_mesh as on_mesh_axes
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.trainers import StepLayout, Trainers, parts_along, slices_along
from dtrans.zero.plan import ShardingPlan


class MeshTrainers(Trainers):
    """Trainers on the devices of a mesh.

    Args:
      mesh: the axes of the plan.
    """

    run_id = THIS_PROCESS
    gathers = False  # whether every device gets results of several trainers whole

    def __init__(self, mesh: Mesh) -> None:
        self.mesh: Mesh = mesh
        self.here = mesh.size

    def at(self, axis: int | None) -> NamedSharding:
        return NamedSharding(self.mesh, slices_along(axis, self.mesh.axis_names).spec)

    def everywhere(self, xs: Sequence[Any]) -> list[Any]:
        return list(jax.device_put(list(xs), self.at(None)))

    def state(self, x: Any, axis: int | None) -> Any:
        return jax.device_put(x, self.at(axis))

    def batch(self, arrays: Sequence[Any], shares: Sequence[Share]) -> list[Any]:
        return [_put(x, self.of_batch(share)) for x, share in zip(arrays, shares, strict=True)]

    def of_batch(self, share: Share) -> NamedSharding:
        """Return the sharding of an array of the batch."""
        return NamedSharding(self.mesh, parts_along(share, self.mesh.axis_names).spec)

    def mapped(self, program: Program, layout: StepLayout) -> Function:
        gathered = [
            k
            for k, (way, _) in enumerate(layout.ways)
            if self.gathers and way in ("concat", "each")
        ]
        return on_mesh_axes(
            per_trainer(program, layout.rules), self.mesh, layout.ins, layout.outs, gathered
        )


@realises(CollectivePlan, "mesh")
def on_mesh(
    plan: CollectivePlan,
    devices: Sequence[jax.Device] | None = None,
    *,
    donate: bool = True,
    on_nonfinite: str = "ignore",
) -> CollectiveJob:
    """Trainers on devices, as they run best on their platform."""
    given = list(jax.devices() if devices is None else devices)
    if not all(isinstance(d, jax.Device) for d in given) or len({*given}) < len(given):
        raise ConfigError(f"on_mesh takes JAX's devices, each once; it was given {given}")
    if isinstance(plan, ShardingPlan) and devices is not None and len(given) != plan.trainers:
        o = plan.options
        raise ConfigError(
            f"degree={o.degree} and replicas={o.replicas} are {plan.trainers} ranks, on_mesh was "
            "given "
            f"{len(given)} devices"
        )
    if len(given) < plan.trainers:
        hint = (
            f'; set CPU devices with jax.config.update("jax_num_cpu_devices", {plan.trainers}) '
            "before JAX is used"
            if not given or given[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"{plan.trainers} {plan.options.noun}s need as many devices, on_mesh has "
            f"{len(given)}{hint}; "
            "plan.simulate() runs any number on one"
        )
    trainers = MeshTrainers(mesh_of(plan, given))
    return CollectiveJob(
        resolve_for_platform(plan, given[0].platform),
        trainers,
        donate=donate,
        on_nonfinite=on_nonfinite,
    )


def mesh_of(plan: CollectivePlan, devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh of the first devices, with a plan's axes."""
    sizes = [size for _, size in plan.axes]
    return Mesh(np.array(devices[: plan.trainers]).reshape(sizes), plan.axis_names)


def _put(x: Any, where: NamedSharding) -> Any:
    """`jax.device_put`, without its cost where there is nothing to do."""
    return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)
