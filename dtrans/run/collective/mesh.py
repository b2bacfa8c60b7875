"""Trainers on a mesh of this process's devices: `jit(shard_map)`; XLA carries out the reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.plan import realises
from dtrans.run.base.batch import Share
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.platforms import as_run_on
from dtrans.run.collective.job import CollectiveJob, StepFunction, StepLayout, Trainers
from dtrans.zero.plan import ShardingPlan


class MeshTrainers(Trainers):
    """Trainers on the devices of a mesh.

    Args:
      mesh: the axes of the plan.
    """

    run_id = THIS_PROCESS

    def __init__(self, mesh: Mesh) -> None:
        self.mesh: Mesh = mesh
        self.here = mesh.size
        self._everywhere = NamedSharding(mesh, P())

    def at(self, axis: int | None) -> NamedSharding:
        return self._everywhere if axis is None else NamedSharding(self.mesh, self._sliced(axis))

    def everywhere(self, xs: Sequence[Any]) -> list[Any]:
        return list(jax.device_put(list(xs), self._everywhere))

    def state(self, x: Any, axis: int | None) -> Any:
        return jax.device_put(x, self.at(axis))

    def batch(self, arrays: Sequence[Any], shares: Sequence[Share]) -> list[Any]:
        return [_put(x, self.of_batch(share)) for x, share in zip(arrays, shares, strict=True)]

    def of_batch(self, share: Share) -> NamedSharding:
        """Where an array of the batch is."""
        return self._everywhere if isinstance(share, str) else NamedSharding(self.mesh, self._parts(share))

    def mapped(self, program: Program, layout: StepLayout) -> StepFunction:
        one = per_trainer(program, layout.rules)

        def trainer(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            return [self.told(x, way, axis) for x, (way, axis) in zip(one(*held, *batch), layout.ways, strict=True)]

        specs = [self._sliced(a) for a in layout.sliced], [self.of_batch(s).spec for s in layout.shares]
        outs = [self._sliced(axis) if way == "slice" else self.spec(way, axis) for way, axis in layout.ways]
        # check_vma: the equations were traced without varying types, and replay only without the check
        return jax.shard_map(trainer, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=False)

    def told(self, x: Any, way: str, axis: int | None) -> Any:
        """What a trainer gives of an output."""
        return x[None] if way == "each" else x

    def spec(self, way: str, axis: int | None) -> P:
        """Where that is of the output of all."""
        return self._parts(axis or 0) if way in ("concat", "each") else P()

    def _parts(self, axis: int) -> P:
        return P(*[None] * axis, self.mesh.axis_names)

    def _sliced(self, axis: int | None) -> P:
        return P() if axis is None else P(*[None] * axis, self.mesh.axis_names[-1])


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
            f"degree={o.degree} and replicas={o.replicas} are {plan.trainers} ranks, on_mesh was given "
            f"{len(given)} devices"
        )
    if len(given) < plan.trainers:
        hint = (
            f'; set CPU devices with jax.config.update("jax_num_cpu_devices", {plan.trainers}) before JAX is used'
            if not given or given[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"{plan.trainers} {plan.options.noun}s need as many devices, on_mesh has {len(given)}{hint}; "
            "plan.simulate() runs any number on one"
        )
    trainers = MeshTrainers(mesh_of(plan, given))
    return CollectiveJob(as_run_on(plan, given[0].platform), trainers, donate=donate, on_nonfinite=on_nonfinite)


def mesh_of(plan: CollectivePlan, devices: Sequence[jax.Device]) -> Mesh:
    """The first of the devices on the axes of a plan."""
    sizes = [size for _, size in plan.axes]
    return Mesh(np.array(devices[: plan.trainers]).reshape(sizes), plan.axis_names)


def _put(x: Any, where: NamedSharding) -> Any:
    """`jax.device_put`, without its cost where there is nothing to do."""
    return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)
