"""Realisers of sharding: ranks on a mesh of devices, on one device, or as processes.

They are those of data-parallel plans (`dtrans.run.collective.job`, `dtrans.run.collective.cluster`), with a state that
is not the same everywhere: a sliced array is one array over the whole mesh, padded, with each rank's slice on its
device.

The first state comes from the startup program, compiled for slices: XLA makes each device's part on that device, so
that none ever holds a whole leaf (but for what an initialiser needs whole: an orthogonal matrix, a permutation).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dtrans._jax import ClosedJaxpr, Literal, closed, jaxpr_as_fun
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import ConfigError, PeerError, StateError
from dtrans.ir.array_fns import padded_to
from dtrans.ir.program import Program, without_addresses
from dtrans.plan import realises
from dtrans.run.base.platforms import as_run_on
from dtrans.run.collective.cluster import ClusterTrainers, own_of
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.mesh import MeshTrainers
from dtrans.run.collective.simulate import SimulatedTrainers
from dtrans.run.distributed.connect import connected
from dtrans.run.distributed.multihost import all_reduce_sum, broadcast, to_global_array
from dtrans.zero.plan import ShardingPlan


class ShardedJob(CollectiveJob):
    """What all realisers of sharding have in common."""

    plan: ShardingPlan
    whole_option = "dtrans.sharding(batch=dtrans.Batch(unsplit_inputs=(...)))"

    def slice_axis(self, name: str) -> int | None:
        s = self.plan.cuts.get(name)
        return None if s is None else s.axis

    def _program(self, state: CollectiveState, arrays: Sequence[Any]) -> Program:
        for n, x in zip(self._held_names, self._held(state), strict=True):
            wanted, s = self.plan.main.inputs.get(n, self.plan.program.inputs.get(n)), self.plan.cuts.get(n)
            wanted = wanted if wanted is None or s is None else s.of_all(wanted)
            if wanted is not None and (x.shape, x.dtype) != (wanted.shape, wanted.dtype):
                raise StateError(
                    f"{n} is {x.dtype}{list(x.shape)}, and {wanted.dtype}{list(wanted.shape)} in this job: it is the "
                    "state of another plan, which dtrans.checkpoint.save and restore take from one job to another"
                )
        return super()._program(state, arrays)

    def params(self, state: CollectiveState) -> Any:
        """The parameters, whole, as the pytree that they were given in."""
        return self._whole_tree(self.plan.main.args[0], state.params)

    def opt_state(self, state: CollectiveState) -> Any:
        """The optimizer's state, whole, as the pytree that it was given in."""
        return self._whole_tree(self.plan.main.args[1], state.opt_state)

    def _whole_tree(self, spec: Any, held: Mapping[str, Any]) -> Any:
        whole = {n: self.unpadded(n, x) for n, x in held.items()}
        if self.plan.owned is not None:
            whole = self.plan.owned.opened(whole)
        return spec.unflatten([whole[n] for n in spec.names])

    def _here(self, state: CollectiveState) -> CollectiveState:
        of = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        return dataclasses.replace(state, **{k: {n: self._put(n, x) for n, x in v.items()} for k, v in of.items()})

    def _put(self, name: str, x: Any) -> Any:
        """An array of the state where steps want it."""
        return jax.device_put(x, jax.local_devices()[0])

    def unpadded(self, name: str, x: Any) -> Any:
        """An array without its padding."""
        s = self.plan.cuts.get(name)
        return x if s is None or s.padded == s.size else jax.lax.slice_in_dim(x, 0, s.size, axis=s.axis)

    def _padded(self, name: str, x: Any) -> Any:
        """An array with its padding."""
        s = self.plan.cuts.get(name)
        return x if s is None else padded_to(x, s.axis, s.padded)

    @cached_property
    def startup(self) -> Program:
        owned = self.plan.owned
        return self.plan.startup if owned is None else owned.startup(self.plan.startup)

    @cached_property
    def _startup(self) -> ClosedJaxpr:
        """The startup program, whose first inputs are its constants: of processes, those of rank 0 are everybody's."""
        inner = self.startup.jaxpr.jaxpr
        return closed([], [], [*inner.constvars, *inner.invars], inner.outvars, inner.eqns, inner)

    @cached_property
    def _starting(self) -> Callable[..., list[Any]]:
        """The same as a function of flat arrays, its outputs padded."""
        names, run = self.startup.out_names, jaxpr_as_fun(self._startup)
        return lambda *args: [self._padded(n, x) for n, x in zip(names, run(*args), strict=True)]


class MeshRanks(ShardedJob, MeshTrainers):
    """Ranks on a mesh of this process's devices; made by `plan.on_mesh()`."""

    def __init__(self, plan: ShardingPlan, devices: Sequence[jax.Device] | None = None, *, donate: bool = True) -> None:
        if devices is not None and len(devices) != plan.trainers:
            o = plan.options
            raise ConfigError(
                f"degree={o.degree} and replicas={o.replicas} are {plan.trainers} ranks, on_mesh was given "
                f"{len(devices)} devices"
            )
        super().__init__(plan, devices, donate=donate)

    def sharding_of(self, name: str) -> NamedSharding:
        """Where an array of the state is."""
        return NamedSharding(self.mesh, self.placed(name))

    @cached_property
    def starting(self) -> Any:
        """The startup program of all ranks, jitted: from flat arrays to what it makes, where ranks have it."""
        return jax.jit(self._starting, out_shardings=[self.sharding_of(n) for n in self.startup.out_names])

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        made = self.starting(*self._everywhere_of([*self.startup.jaxpr.consts, *args]))
        # what init returns twice, or was given, is one array: a copy of it may be donated
        inner = self._startup.jaxpr
        seen = {id(v) for v in inner.invars}
        found = []
        for v, x in zip(inner.outvars, made, strict=True):
            found.append(jnp.copy(x) if isinstance(v, Literal) or id(v) in seen else x)
            seen.add(id(v))
        return found

    def _everywhere_of(self, xs: list[Any]) -> list[Any]:
        """Arrays whole on every device."""
        return jax.device_put(xs, self._everywhere)

    def _put(self, name: str, x: Any) -> Any:
        return jax.device_put(x, self.sharding_of(name))


@realises(ShardingPlan, "simulate")
class SimulatedRanks(ShardedJob, SimulatedTrainers):
    """Ranks on one device; made by `plan.simulate()`."""

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return jax.jit(self._starting)(*self.startup.jaxpr.consts, *args)


class ClusterRanks(MeshRanks, ClusterTrainers):
    """Ranks that are processes; made by `plan.on_cluster()`.

    As `plan.on_mesh()`, but for the batch: each process gives its own part, as in `ClusterTrainers`. `params` and
    `opt_state` gather what is asked for, so that all processes call them; each gets the whole.

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
        s = self.plan.cuts.get(name)
        return own_of(x if s is None else self._gathering(x, s.axis, s.size))

    @cached_property
    def _gathering(self) -> Callable[[jax.Array, int, int], jax.Array]:
        """An array of slices as a whole one, without padding, in every process; all of them call it."""
        gather = lambda x, axis, size: jax.lax.slice_in_dim(x, 0, size, axis=axis)
        return jax.jit(gather, static_argnums=(1, 2), out_shardings=self._everywhere)

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        self._agree()
        return super()._start(startup, args)

    def _agree(self) -> None:
        """Raise PeerError unless all ranks start with the same program: each makes its own slices with it."""
        text = without_addresses(str(self._startup.jaxpr)).encode()
        mine = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
        (first,) = broadcast([mine])
        told = np.zeros(jax.process_count(), np.int32)
        told[jax.process_index()] = not np.array_equal(np.asarray(first), mine)
        (told,) = all_reduce_sum(told)
        if told.any():
            who = " and ".join(f"trainer {k}" for k in np.flatnonzero(told))
            raise PeerError(f"{who} disagrees with trainer 0 about how training starts: it has another init")

    def _everywhere_of(self, xs: list[Any]) -> list[Any]:
        return [to_global_array(x, self._everywhere) for x in broadcast(xs)]

    def _told(self, x: Any, way: str) -> Any:
        return x if way == "slice" else super()._told(x, way)

    def _put(self, name: str, x: Any) -> Any:
        """An array of the state that this process has whole, as one of all ranks."""
        where = self.sharding_of(name)
        if isinstance(x, jax.Array) and x.sharding == where:
            return x
        if not where.spec:
            return to_global_array(own_of(x), where)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


@realises(ShardingPlan, "mesh")
def on_mesh(plan: ShardingPlan, devices: Sequence[jax.Device] | None = None, *, donate: bool = True) -> MeshRanks:
    """Ranks on a mesh, as they run best on its platform."""
    first = (jax.devices() if devices is None else devices)[:1]
    return MeshRanks(as_run_on(plan, *(d.platform for d in first)), devices, donate=donate)


@realises(ShardingPlan, "cluster")
def on_cluster(plan: ShardingPlan, *, donate: bool = True) -> ClusterRanks:
    """This process's ranks, as they run best on its platform."""
    return ClusterRanks(as_run_on(plan, jax.default_backend()), donate=donate)
