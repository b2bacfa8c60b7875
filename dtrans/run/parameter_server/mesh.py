"""A job of parameter servers in one process: trainers on a mesh of devices, each server on one.

    trainer program, cut in pieces    jit(shard_map) over the `trainers` axis: one dispatch for all trainers
    send                              device_put of each trainer's block to its server's device
    a server's optimize blocks        one jit per server and phase, on its device; optimizer state is donated
    all_reduce                        device_put of each server's parts to the devices of the others
    recv                              device_put of each block back to all trainer devices
    split_ids, prefetch, send_rows    rows of tables go by the host (`dtrans.run.parameter_server.tables.mesh_tables`)
    exchange                          a gather over the axis, and what a server would make of it

A trainer sees its own part of the batch and its own gradients, and nothing else crosses between
trainers but through servers, as between processes. With fewer devices than trainers each device
takes several in turn (a `lax.map`, so that the arithmetic of one trainer is the same wherever it
runs). Without more than one device everything runs on that one, and no copy is made.

`mesh_trainers` has the compiled trainer programs; `mesh_fabric` what lies between their pieces:
devices, servers, communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checkpoint.assemble import group_by_origin
from dtrans.checkpoint.pserver_state import TRAINER, arrays_of, scatter
from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.errors import ConfigError
from dtrans.ir.pytree import is_under
from dtrans.job import Job
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import MeshState
from dtrans.plan import realises
from dtrans.run.base.batch import Share, batch_arrays, check_rows, rows_of, shared_batch
from dtrans.run.base.lowered import LoweredStep, recording
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.base.segments import COMPUTED, cut_program
from dtrans.run.base.state import check_arrays, check_kind, check_types
from dtrans.run.parameter_server.mesh_fabric import (
    MeshFabric,
    MeshPlacement,
    MeshServers,
    MeshStepFabric,
    put,
)
from dtrans.run.parameter_server.mesh_trainers import MeshTrainerPrograms, shared_program
from dtrans.run.parameter_server.tables.mesh_tables import MeshTables
from dtrans.run.parameter_server.update import own_buffers
from dtrans.step_meter import metered


@realises(PServerPlan, "mesh")
class MeshJob(Job):
    """A job of parameter servers in this process.

    `init` and `step` are functions of a state; the job itself holds only compiled code. Results of
    several trainers are merged. Where the batch is shared exactly, they are a single device's. With
    batch="local" a result that grows with the batch is concatenated, and any other floating-point
    result (the loss) is averaged. Any other result gets a leading axis, one row per trainer: it may
    be a count or a flag, and only the caller knows how to merge these.

    Args:
      plan: a synchronous plan.
      devices: trainers take the first, servers those after them, round-robin where there are fewer
        than roles; all of this process's by default.
      unsplit_inputs: with batch="local", names of batch arrays that every trainer gets unsplit,
        e.g. class weights.
      on_nonfinite: the reaction to an infinity or a NaN in a trainer's gradients: "ignore", "warn",
        or "error", before a server has them.
      donate: let updates reuse the memory of the optimizer state that they replace, and of tables
        in which they replace rows. No state can then be stepped from twice. Parameters of trainers
        are never donated.

    Attributes:
      placement: the devices of trainers and servers.

    Raises:
      ConfigError: no devices, or `unsplit_inputs` names that the batch does not have.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.zeros(2)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.array([[1.0, 3.0], [3.0, 5.0]])
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(key), x), dtrans.trace(init, key), trainers=2)
      >>> job = plan.on_mesh()
      >>> state, loss = job.step(job.init(key), x)
      >>> job.params(state)["w"].tolist(), float(loss)
      ([1.0, 2.0], 11.0)
    """

    rows_are_late = False

    def __init__(
        self,
        plan: PServerPlan,
        devices: Sequence[jax.Device] | None = None,
        *,
        donate: bool = True,
        unsplit_inputs: Collection[str] = (),
        on_nonfinite: str = "ignore",
        way: str = "on_mesh",
    ) -> None:
        _check_plan(plan, way)
        names = [n for spec in plan.main.args[2:] for n in spec.names]
        _check_unsplit(plan, names, unsplit_inputs)
        devices = list(jax.devices() if devices is None else devices)
        if not devices:
            raise ConfigError("on_mesh was given no devices")
        self.plan = plan
        self.run_id = THIS_PROCESS
        self.donate = donate
        self.watch = NonfiniteCheck(on_nonfinite)
        self.placement = MeshPlacement(devices, plan.trainers, tuple(plan.servers))
        self._names = names
        self._unsplit = {n for n in names if is_under(n, unsplit_inputs)}
        self._servers = MeshServers(plan, self.placement, donate=donate, late=self.rows_are_late)
        self._runners: dict[tuple[Any, ...], MeshTrainerPrograms] = {}  # by the types of a batch
        self._last: Any = lambda: None  # the newest state: `check` need not look at it again

    # -- what a user calls -----------------------------------------------------------------------

    def init(self, *args: Any) -> MeshState:
        """Return the first state, from the arguments of `init`."""
        self._check_open()
        servers = {}
        for ep, programs in self.plan.servers.items():
            at = self.placement.servers[ep]
            made = programs.startup.compiled(*jax.device_put(programs.startup.flatten(*args), at))
            made = jax.device_put(made, at)
            servers[ep] = own_buffers(dict(zip(programs.startup.out_names, made, strict=True)))

        startup = self.plan.trainer_startup
        replicated = self.placement.replicated
        fabric = MeshFabric(self.placement, servers)
        values = fabric.run(
            cut_program(startup, computed=COMPUTED),
            jax.device_put(startup.flatten(*args), replicated),
        )
        params = dict(zip(startup.out_names, values, strict=True))
        params |= {n: self.placement.stack(params[n]) for n in self._local}
        params |= {n: put(params[n], replicated) for n in self.plan.tables.of}
        return self._newest(MeshState(params, servers))

    @metered
    def step(self, state: MeshState, *batch: Any) -> tuple[Any, ...]:
        """Take one step on a global batch: (state, loss[, aux]), or all other results of the step.

        The plan says how arrays of the batch are split over trainers. With batch="local" they are
        split on dim 0. There every trainer gets 0-d arrays, and those named in `unsplit_inputs`. A
        PRNG key (`jax.random.key`) is folded with the trainer's number, so that noise differs
        between trainers, and from a single device's.

        Raises:
          BatchError: arrays differ in their number of rows, or, with batch="local", the trainers do
            not divide it.
          StateError: not a state of this job, or one that was already stepped from, and whose
            optimizer state was donated.
          NonfiniteError: gradients of a trainer, with on_nonfinite="error".
        """
        self.check(state)
        arrays = self._shared(batch_arrays(self.plan.main.args[2:], batch, self.plan.main.inputs))
        runner = self._runner(arrays)
        servers = {ep: dict(held) for ep, held in state.servers.items()}
        fabric = MeshStepFabric(
            self.placement, servers, self.plan, self._servers, runner, self.watch
        )
        params = [state.params[n] for n in runner.param_names]
        shared = [self.placement.put_batch(x, share) for x, share in arrays]
        found = fabric.run(runner.pieces, [*params, *shared], runner.compute)

        values = dict(zip(runner.program.out_names, found, strict=True))
        results = runner.results({n: values[n] for n in runner.result_names})
        for n in self._local:
            if not runner.is_stacked(runner.outs[n]):
                values[n] = self.placement.stack(values[n])
        return (self._newest(MeshState({n: values[n] for n in state.params}, servers)), *results)

    def _newest(self, state: MeshState) -> MeshState:
        """Note a state that the job returns."""
        self._last = weakref.ref(state)
        return state

    @property
    def tables(self) -> MeshTables:
        """Tables of the job: `lookup` and `export`."""
        return MeshTables(self.plan, self._last, self.check)

    def params(self, state: MeshState) -> Any:
        """Return the parameters as the pytree that `init` returned; tables, too."""
        spec, rows = self.plan.main.args[0], group_by_origin(self.plan.overview)
        held = dict(state.params)
        held |= {n: held[n][0] for n in self._local}
        held |= {n: _joined(rows[n], state.servers) for n in self.plan.tables.of}
        return spec.unflatten([held[n] for n in spec.names])

    def opt_state(self, state: MeshState) -> Any:
        """Return the optimizer's state, gathered from the servers, as `init` returned it."""
        spec, rows = self.plan.main.args[1], group_by_origin(self.plan.overview)
        return spec.unflatten([_joined(rows[n], state.servers) for n in spec.names])

    def check(self, state: Any) -> None:
        self._check_open()
        check_kind(state, MeshState)
        for ep, held in state.servers.items():
            self.plan.servers[ep]  # raises UnknownEndpointError
            check_arrays(held.items(), donates=self.donate)
        if state is not self._last():
            check_types(state.params, self._param_types)
            for ep, programs in self.plan.servers.items():
                check_types(state.servers.get(ep, {}), programs.main.inputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that save: the servers, and trainer 0."""
        return (*self.plan.servers, TRAINER)

    def held(self, state: MeshState, endpoint: str) -> Mapping[str, Any]:
        """Return the state of a server."""
        return state.servers[endpoint]

    def state_of(self, params: Any, opt_state: Any) -> MeshState:
        given = arrays_of(self.plan.main, params, opt_state)
        given |= {n: given[n][:0] for n in self.plan.tables.of}
        servers = {}
        for ep, at in self.placement.servers.items():
            servers[ep] = jax.device_put(scatter(self.plan, ep, params, opt_state), at)
        own = {}
        for n in self.plan.main.args[0].names:
            # a copy: a step donates nothing that the caller holds
            own[n] = jax.device_put(jnp.copy(given[n]), self.placement.replicated)
        own |= {n: self.placement.stack(own[n]) for n in self._local}
        return MeshState(own, servers)

    def lower(self, state: MeshState, *batch: Any) -> LoweredStep:
        """Return what `step` compiles for these arguments: pieces of trainers, phases of servers.

        It takes a step from a copy of the state.
        """
        with recording() as parts:
            self.step(jax.tree.map(jnp.copy, state), *batch)
        return LoweredStep(parts)

    # -- how it runs -----------------------------------------------------------------------------

    @cached_property
    def _param_types(self) -> dict[str, Any]:
        """Return the types of a state's parameters."""
        types = {n: self.plan.main.inputs[n] for n in self.plan.main.args[0].names}
        types |= {n: types[n].update(shape=(0, *types[n].shape[1:])) for n in self.plan.tables.of}
        return types | {
            n: types[n].update(shape=(self.plan.trainers, *types[n].shape)) for n in self._local
        }

    @cached_property
    def _local(self) -> frozenset[str]:
        """Return the parameters that trainers compute themselves, and that differ between them."""
        main = self.plan.main
        if self.plan.trainers == 1:
            return frozenset()
        made = dict(zip(main.outputs, main.inner.outvars, strict=True))
        return frozenset(n for n in self.plan.frozen if made[n] is not main.invars[n])

    def _shared(self, given: Sequence[Any]) -> list[tuple[Any, Share]]:
        """Return the arrays of a batch, and how trainers share each. Raises BatchError."""
        trainers = self.plan.trainers
        if self.plan.shared is None:
            option = "plan.on_mesh(unsplit_inputs=(...))"
            return shared_batch(self._names, given, trainers, self._unsplit, option)
        axes = self.plan.shared.axes
        arrays: list[tuple[Any, Share]] = []
        for n, x in zip(self._names, given, strict=True):
            arrays.append((x, axes.get(n, "replicated")))
        option = "dtrans.pserver(batch=dtrans.Batch(unsplit_inputs=(...)))"
        uneven = self.plan.takes_uneven_batches
        check_rows(rows_of(self._names, arrays), trainers, option, uneven=uneven)
        return arrays

    def _runner(self, arrays: Sequence[tuple[Any, Share]]) -> MeshTrainerPrograms:
        """Return the trainer program for the types of a batch, compiled."""
        key = tuple((x.shape, x.dtype) for x, _ in arrays)
        if key not in self._runners:
            program, merges = shared_program(self.plan, arrays)
            self._runners[key] = MeshTrainerPrograms(
                program, arrays, self.placement.mesh, self.plan, self._local, merges
            )
        return self._runners[key]


@realises(PServerPlan, "simulate")
def simulated(plan: PServerPlan) -> MeshJob:
    """Return the job on one device, which stands for all trainers and servers in turn."""
    return MeshJob(plan, jax.devices()[:1], donate=False, way="simulate")


class LateRowsJob(MeshJob):
    """A simulated job whose table rows catch up behind the update, as in jobs of processes.

    Its step is traced to be verified, and does not run: rows catch up at once.
    """

    rows_are_late = True

    def __init__(self, plan: PServerPlan) -> None:
        super().__init__(plan, jax.devices()[:1], donate=False, way="verify")


def _check_plan(plan: PServerPlan, way: str) -> None:
    """Raise ConfigError for a plan that does not run in one process; `way` names the method."""
    if not plan.sync_mode:
        raise ConfigError(
            f"{way} takes the steps of all trainers at once, and trainers of an asynchronous mode "
            "take their own; run the plan in processes, plan.on_cluster()"
        )
    if plan.trainer_side.runtime_split:
        raise ConfigError(
            f"{way} splits no leaves at run time; leave out runtime_split, or run the plan in "
            "processes, plan.on_cluster()"
        )
    for n, t in plan.tables.of.items():
        if t.staleness:
            raise ConfigError(
                f"sparse[{n!r}].staleness={t.staleness}: in one process no rows are asked for "
                "ahead, and none are older than the step; leave staleness out, or run the plan in "
                "processes (on_cluster)"
            )


def _check_unsplit(plan: PServerPlan, names: Sequence[str], unsplit_inputs: Any) -> None:
    """Raise ConfigError if `unsplit_inputs` names arrays that are not in the batch."""
    unknown = [r for r in unsplit_inputs if not any(is_under(n, [r]) for n in names)]
    if isinstance(unsplit_inputs, str) or unknown:
        raise ConfigError(
            f"unsplit_inputs={unsplit_inputs!r} must name arrays of the batch: {', '.join(names)}"
        )
    if plan.shared is not None and unsplit_inputs:
        raise ConfigError(
            f"unsplit_inputs={unsplit_inputs!r}: the plan shares the batch exactly; say it there, "
            "as dtrans.pserver(batch=dtrans.Batch(unsplit_inputs=...))"
        )


def _joined(rows: Sequence[VarDistributed], servers: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a leaf, from the blocks of it that servers hold."""
    blocks = [servers[row.endpoint][row.slice_name] for row in rows]
    if not rows[0].is_slice:
        return blocks[-1]
    leaf = np.empty(rows[0].origin_shape, blocks[0].dtype)
    for row, block in zip(rows, blocks, strict=True):
        leaf[row.index] = block
    return jnp.asarray(leaf)
