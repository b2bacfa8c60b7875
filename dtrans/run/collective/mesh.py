"""Data-parallel trainers on a mesh of this process's devices: `jit(shard_map)`; XLA carries out the reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.plan import realises
from dtrans.run.base.lowering import per_trainer
from dtrans.run.collective.job import CollectiveJob


@realises(CollectivePlan, "mesh")
class MeshTrainers(CollectiveJob):
    """Trainers on a mesh of devices; made by `plan.on_mesh()`."""

    def __init__(
        self, plan: CollectivePlan, devices: Sequence[jax.Device] | None = None, *, donate: bool = True
    ) -> None:
        self._build(plan, devices, donate=donate)

    def _build(self, plan: CollectivePlan, devices: Sequence[jax.Device] | None, *, donate: bool) -> None:
        """Take a plan, and make the mesh that it is for."""
        self._plan_for(plan, donate=donate)
        devices = list(jax.devices() if devices is None else devices)
        if not all(isinstance(d, jax.Device) for d in devices) or len({*devices}) < len(devices):
            raise ConfigError(f"on_mesh takes JAX's devices, each once; it was given {devices}")
        if len(devices) < plan.trainers:
            hint = (
                f'; set CPU devices with jax.config.update("jax_num_cpu_devices", {plan.trainers}) before JAX is used'
                if not devices or devices[0].platform == "cpu"
                else ""
            )
            raise ConfigError(
                f"{plan.trainers} trainers need as many devices, on_mesh has {len(devices)}{hint}; "
                "plan.simulate() runs any number on one"
            )
        sizes = [size for _, size in plan.axes]
        self.mesh = Mesh(np.array(devices[: plan.trainers]).reshape(sizes), plan.axis_names)
        self._everywhere = NamedSharding(self.mesh, P())
        split = NamedSharding(self.mesh, P(plan.axis_names))
        self._places = [split if share == "split" else self._everywhere for share in self._shares]

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        made = startup.compiled(*jax.device_put(args, self.mesh.devices.flat[0]))
        # copies: a state may be donated, and init may return one array twice
        return jax.device_put([jnp.copy(x) for x in made], self._everywhere)

    def _start_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        placed: dict[str, Any] = jax.device_put(extra, self._everywhere)
        return placed

    def _mapped(self, program: Program) -> Callable[[list[Any], Sequence[Any]], Sequence[Any]]:
        axes = self.plan.axis_names
        ways = [self._way(n) for n in program.out_names]
        one = per_trainer(program)

        def trainer(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            outs = one(*held, *batch)
            return [self._told(x, way) for x, way in zip(outs, ways, strict=True)]

        specs = (
            [self.placed(n) for n in self._held_names],
            [P(axes) if s == "split" else P() for s in self._shares],
        )
        outs = [
            self.placed(n) if way == "slice" else self._spec(way)
            for n, way in zip(program.out_names, ways, strict=True)
        ]
        # check_vma: the equations were traced without varying types, and replay only without the check
        return jax.shard_map(trainer, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=False)

    def placed(self, name: str) -> P:
        """Where an array of the state is on the mesh."""
        axis = self.slice_axis(name)
        return P() if axis is None else P(*[None] * axis, self.plan.axis_names[-1])

    def _told(self, x: Any, way: str) -> Any:
        """What a trainer gives of an output."""
        return x[None] if way == "each" else x

    def _spec(self, way: str) -> P:
        """Where that is of the output of all."""
        return P() if way == "same" else P(self.plan.axis_names)

    def _here(self, state: CollectiveState) -> CollectiveState:
        return jax.device_put(state, self._everywhere)

    def _placed(self, arrays: list[Any]) -> list[Any]:
        return [_put(x, where) for x, where in zip(arrays, self._places, strict=True)]


def _put(x: Any, where: NamedSharding) -> Any:
    """`jax.device_put`, without its cost where there is nothing to do."""
    return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)
