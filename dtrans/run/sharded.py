"""Realisers of sharding: ranks on a mesh of devices, on one device, or as processes.

They are those of data-parallel plans (`dtrans.run.collective`, `dtrans.run.cluster`), with a state that is not the same
everywhere: a sliced array is one array over the whole mesh, padded, with each rank's slice on its device.

The first state comes from the startup program, compiled for slices: XLA makes each device's part on that device, so
that none ever holds a whole leaf (but for what an initialiser needs whole: an orthogonal matrix, a permutation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dtrans._jax import Literal, jaxpr_as_fun
from dtrans.errors import ConfigError
from dtrans.program import Program
from dtrans.run.cluster import ClusterTrainers, own_of
from dtrans.run.collective import CollectiveJob, CollectiveState, MeshTrainers, SimulatedTrainers
from dtrans.run.connection import connected
from dtrans.run.together import shared, together
from dtrans.sharded import ShardingPlan
from dtrans.transforms.slice_writer import padded_to


class ShardedJob(CollectiveJob):
    """What all realisers of sharding have in common."""

    plan: ShardingPlan

    def slice_axis(self, name: str) -> int | None:
        s = self.plan.cuts.get(name)
        return None if s is None else s.axis

    def params(self, state: CollectiveState) -> Any:
        """The parameters, whole, as the pytree that they were given in."""
        return self._whole_tree(self.plan.main.args[0], state.params)

    def opt_state(self, state: CollectiveState) -> Any:
        """The optimizer's state, whole, as the pytree that it was given in."""
        return self._whole_tree(self.plan.main.args[1], state.opt_state)

    def _whole_tree(self, spec: Any, held: Mapping[str, Any]) -> Any:
        return spec.unflatten([self.unpadded(n, held[n]) for n in spec.names])

    def unpadded(self, name: str, x: Any) -> Any:
        """An array without its padding."""
        s = self.plan.cuts.get(name)
        return x if s is None or s.padded == s.size else jax.lax.slice_in_dim(x, 0, s.size, axis=s.axis)

    def _padded(self, name: str, x: Any) -> Any:
        """An array with its padding."""
        s = self.plan.cuts.get(name)
        return x if s is None else padded_to(x, s.axis, s.padded)

    @cached_property
    def _starting(self) -> Callable[..., list[Any]]:
        """The startup program as a function of flat arrays, its outputs padded."""
        startup = self.plan.startup
        run = jaxpr_as_fun(startup.jaxpr)
        return lambda *args: [self._padded(n, x) for n, x in zip(startup.out_names, run(*args), strict=True)]


class MeshRanks(ShardedJob, MeshTrainers):
    """Ranks on a mesh of this process's devices; made by `plan.on_mesh()`."""

    def __init__(self, plan: ShardingPlan, devices: Sequence[jax.Device] | None = None, *, donate: bool = True) -> None:
        if devices is not None and len(devices) != plan.trainers:
            o = plan.options
            raise ConfigError(
                f"degree={o.degree} and dp_degree={o.dp_degree} are {plan.trainers} ranks, on_mesh was given "
                f"{len(devices)} devices"
            )
        super().__init__(plan, devices, donate=donate)

    def sharding_of(self, name: str) -> NamedSharding:
        """Where an array of the state is."""
        return NamedSharding(self.mesh, self.placed(name))

    @cached_property
    def starting(self) -> Any:
        """The startup program of all ranks, jitted: from flat arrays to what it makes, where ranks have it."""
        return jax.jit(self._starting, out_shardings=[self.sharding_of(n) for n in self.plan.startup.out_names])

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        made = self.starting(*jax.device_put(args, self._everywhere))
        # what init returns twice, or was given, is one array: a copy of it may be donated
        seen = {id(v) for v in startup.jaxpr.jaxpr.invars}
        found = []
        for v, x in zip(startup.jaxpr.jaxpr.outvars, made, strict=True):
            found.append(jnp.copy(x) if isinstance(v, Literal) or id(v) in seen else x)
            seen.add(id(v))
        return found

    def _here(self, state: CollectiveState) -> CollectiveState:
        put = lambda held: {n: jax.device_put(x, self.sharding_of(n)) for n, x in held.items()}
        return CollectiveState(put(state.params), put(state.opt_state))


class SimulatedRanks(ShardedJob, SimulatedTrainers):
    """Ranks on one device; made by `plan.simulate()`."""

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return jax.jit(self._starting)(*args)


class ClusterRanks(MeshRanks, ClusterTrainers):
    """Ranks that are processes; made by `plan.on_cluster()`.

    Raises:
      ConfigError: the job is to go on when trainers are lost, which it cannot: their slices are lost with them.
    """

    def __init__(self, plan: ShardingPlan, *, donate: bool = True) -> None:
        if connected().on_trainer_loss == "drop":
            raise ConfigError(
                "a sharded job cannot go on without the ranks that are lost, whose slices nobody else has: connect "
                'without on_trainer_loss="drop", and go on from a checkpoint'
            )
        ClusterTrainers.__init__(self, plan, donate=donate)

    def unpadded(self, name: str, x: Any) -> Any:
        return own_of(self._gathering(super().unpadded(name, x)) if self.slice_axis(name) is not None else x)

    @cached_property
    def _gathering(self) -> Any:
        return jax.jit(lambda x: x, out_shardings=self._everywhere)

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return super()._start(startup, [together(x, self._everywhere) for x in shared(args)])

    def _here(self, state: CollectiveState) -> CollectiveState:
        def put(held: Mapping[str, Any]) -> dict[str, Any]:
            return {n: self._together(n, x) for n, x in held.items()}

        return CollectiveState(put(state.params), put(state.opt_state))

    def _together(self, name: str, x: Any) -> Any:
        """An array of the state that this process has whole, as one of all ranks."""
        where = self.sharding_of(name)
        if isinstance(x, jax.Array) and x.sharding == where:
            return x
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])
