"""Job of parameter servers in one process: trainers on a mesh of devices, each server on a device.

The job executes the equations of the trainers' and servers' programs as follows:

    compute between communication      jit(shard_map) over the `trainers` axis of the mesh
    send                               device_put of each trainer's gradient to its server's device
    update of a server                 one jit for each phase; it donates optimizer state
    all_reduce between servers         device_put of each server's parts to the other servers
    recv                               device_put of each block to all devices of trainers
    split_ids, prefetch, send_rows     table rows are copied through the host (`tables.mesh_tables`)
    exchange between trainers          all-gather over the axis, then the server's computation

A trainer computes with its own part of the batch only. It receives results of other trainers
through servers, as in jobs of processes, or by an `exchange`. With fewer devices than trainers,
each device runs several trainers in turn, by a `lax.map`. So a trainer's arithmetic does not depend
on the number of devices. On one device, no data is copied between roles.

`mesh_trainers` compiles the trainer programs. `mesh_fabric` places the roles on devices, updates
the servers, and executes the communication.
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
from dtrans.ir.cost import nbytes
from dtrans.ir.pytree import all_names, is_under
from dtrans.ir.selection import subset, values_at
from dtrans.job import Job, on_first_device
from dtrans.parameter_server.compression import ROUNDING_ERROR
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import MeshState
from dtrans.plan import register_runner
from dtrans.run.base.batch import Share, batch_arrays, check_rows, rows_of, shared_batch
from dtrans.run.base.lowered import LoweredStep, recording
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.base.segments import COMPUTED, divide_program
from dtrans.run.base.state import check_arrays, check_kind, check_types
from dtrans.run.parameter_server.mesh_fabric import (
    MeshFabric,
    MeshPlacement,
    MeshServers,
    MeshStepFabric,
    put,
)
from dtrans.run.parameter_server.mesh_trainers import MeshTrainerPrograms, shared_program
from dtrans.run.parameter_server.share_trainers import ShareFabric, ShareTrainers
from dtrans.run.parameter_server.tables.mesh_tables import MeshTables
from dtrans.run.parameter_server.update import copy_state
from dtrans.step_meter import metered


VERIFY = "verify"  # the method of a plan that traces the step of a job


@register_runner(PServerPlan, "mesh")
class MeshJob(Job):
    """A job of parameter servers in this process.

    `init` and `step` are functions of a state; the job itself stores only compiled code. The job
    merges the results of several trainers. With batch="exact", merged results equal those of a
    single device. With batch="local", the job concatenates a result that grows with the batch. It
    averages any other floating-point result, such as the loss. Results of other types, such as
    counts and flags, get a leading axis with one row for each trainer. The caller merges these
    rows.

    Args:
      plan: a synchronous plan.
      devices: the devices of the job; by default, all devices of this process. Trainers use the
        first devices, and servers the next ones. With fewer devices than roles, roles share
        devices.
      unsplit_inputs: with batch="local", names of batch arrays that every trainer gets in full,
        such as class weights.
      on_nonfinite: the reaction to an infinity or a NaN in a trainer's gradients: "ignore", "warn",
        or "error". "error" raises NonfiniteError before servers use the gradients.
      donate: True to let updates reuse the memory of old optimizer state and of tables. Then each
        state can be passed to a step only once. Parameters of trainers are never donated.

    Attributes:
      placement: the devices of trainers and servers.

    Raises:
      ConfigError: `devices` is empty, or `unsplit_inputs` has a name that the batch does not have.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.zeros(2)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.array([[1.0, 3.0], [3.0, 5.0]])
      >>> traced = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
      >>> plan = dtrans.pserver(*traced, trainers=2)
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
        names = all_names(plan.main.args[2:])
        _check_unsplit(plan, names, unsplit_inputs)
        devices = list(jax.devices() if devices is None else devices)
        if not devices:
            raise ConfigError(
                "devices=[] is empty, expected one device or more; leave devices out to use all"
            )
        self.plan = plan
        self.run_id = THIS_PROCESS
        self.donate = donate
        self.watch = NonfiniteCheck(on_nonfinite)
        plan.compression.check_nonfinite(on_nonfinite)
        self.placement = MeshPlacement(devices, plan.trainers, tuple(plan.servers))
        self._names = names
        self._unsplit = {n for n in names if is_under(n, unsplit_inputs)}
        self._servers = MeshServers(plan, self.placement, donate=donate, late=self.rows_are_late)
        # compiled trainer programs, by the level, and the shapes and dtypes of a batch
        self._runners: dict[tuple[Any, ...], MeshTrainerPrograms] = {}
        self._share_trainers: dict[tuple[Any, ...], ShareTrainers] = {}
        # Weak reference to the newest state, for which `check` skips the comparison of types.
        self._last: Any = lambda: None

    # -- methods of every job --------------------------------------------------------------------

    def init(self, *args: Any) -> MeshState:
        """Compute the first state, from the arguments of the user's `init`."""
        self._check_open()
        servers = {}
        for ep, programs in self.plan.servers.items():
            at = self.placement.servers[ep]
            inputs = jax.device_put(programs.startup.flatten(*args), at)
            arrays = jax.device_put(programs.startup.compiled(*inputs), at)
            servers[ep] = copy_state(dict(zip(programs.startup.out_names, arrays, strict=True)))

        startup = self.plan.trainer_startup
        replicated = self.placement.replicated
        fabric = MeshFabric(self.placement, servers)
        values = fabric.run(
            divide_program(startup, computed=COMPUTED),
            jax.device_put(startup.flatten(*args), replicated),
        )
        params = dict(zip(startup.out_names, values, strict=True))
        for n in self._local:
            params[n] = self.placement.stack(params[n])
        for n in self.plan.tables.of:
            params[n] = put(params[n], replicated)
        return self._newest(MeshState(params, servers))

    @metered
    def step(self, state: MeshState, *batch: Any) -> tuple[Any, ...]:
        """Take one step with a global batch; return (state, loss[, aux]).

        The plan defines how arrays of the batch are split over trainers. With batch="local", they
        are split on dim 0, but every trainer gets 0-d arrays and the arrays in `unsplit_inputs` in
        full. With batch="local", the job also folds each trainer's id into a PRNG key
        (`jax.random.key`). So noise differs between trainers, and from a single device's noise.

        Raises:
          BatchError: arrays differ in their number of rows. Or, with batch="local", the number of
            rows is not divisible by the number of trainers.
          StateError: `state` belongs to another job, or an earlier step has donated the state's
            optimizer state.
          NonfiniteError: with on_nonfinite="error", a trainer's gradients are not finite.
        """
        self.check(state)
        arrays = self._shared(batch_arrays(self.plan.main.args[2:], batch, self.plan.main.inputs))
        if self.plan.shares is not None:
            return self._step_of_shares(state, arrays)
        runner = self._runner(arrays, self._level(state))
        servers = {ep: dict(arrays) for ep, arrays in state.servers.items()}
        fabric = MeshStepFabric(self._servers, servers, self.watch, runner)
        params = values_at(state.params, runner.param_names)
        shared = [self.placement.put_batch(x, share) for x, share in arrays]
        found = fabric.run(runner.pieces, [*params, *shared], runner.compute)

        values = dict(zip(runner.program.out_names, found, strict=True))
        results = runner.results(subset(values, runner.result_names))
        for n in self._local:
            if not runner.is_stacked(runner.outs[n]):
                values[n] = self.placement.stack(values[n])
        return (self._newest(MeshState(subset(values, state.params), servers)), *results)

    def _step_of_shares(
        self, state: MeshState, arrays: Sequence[tuple[Any, Share]]
    ) -> tuple[Any, ...]:
        """Take one step with different numbers of rows on trainers (`dtrans.Batch.speeds`).

        Args:
          state: the job's state.
          arrays: the arrays of the full batch, each with its split over trainers.
        """
        key = tuple((x.shape, x.dtype) for x, _ in arrays)
        if key not in self._share_trainers:
            self._share_trainers[key] = ShareTrainers(self.plan, arrays)
        trainers = self._share_trainers[key]
        servers = {ep: dict(arrays) for ep, arrays in state.servers.items()}
        fabric = ShareFabric(self._servers, servers, self.watch)
        args = trainers.args(state.params, self._local, arrays)
        outputs = fabric.run_trainers(trainers.pieces, args)
        params, results = trainers.merged(outputs, state, self._local)
        return (self._newest(MeshState(params, servers)), *results)

    def _newest(self, state: MeshState) -> MeshState:
        """Store a state as the newest one, which `tables` reads; return the state."""
        self._last = weakref.ref(state)
        return state

    @property
    def tables(self) -> MeshTables:
        """The embedding tables of the job, with `lookup` and `export`."""
        return MeshTables(self.plan, self._last, self.check)

    def params(self, state: MeshState) -> Any:
        """Return the parameters, including tables, in the pytree structure of the user's `init`."""
        spec = self.plan.main.args[0]
        return spec.unflatten_named(self._arrays(state, spec.names))

    def opt_state(self, state: MeshState) -> Any:
        """Gather the optimizer state from the servers, in the structure of `init`."""
        spec = self.plan.main.args[1]
        return spec.unflatten_named(self._arrays(state, spec.names))

    def _arrays(self, state: MeshState, names: Collection[str]) -> dict[str, Any]:
        """Return arrays of a state by name, from the trainers or servers that store them."""
        rows = group_by_origin(self.plan.overview)
        found: dict[str, Any] = {}
        for n in names:
            if self._is_on_servers(n):
                found[n] = _assemble(rows[n], state.servers)
            else:
                found[n] = state.params[n][0] if n in self._local else state.params[n]
        return found

    def _is_on_servers(self, name: str) -> bool:
        """Return True if only servers store the leaf."""
        return name in self.plan.tables.of or name not in self.plan.main.args[0].names

    def _leaves(self, state: MeshState, names: Collection[str]) -> dict[str, Any]:
        check_kind(state, MeshState, "apply")
        return on_first_device(self._arrays(state, names))

    def _gathered_bytes(self, name: str) -> int:
        return nbytes(self.plan.main.inputs[name]) if self._is_on_servers(name) else 0

    def check(self, state: Any) -> None:
        self._check_open()
        check_kind(state, MeshState)
        for ep, arrays in state.servers.items():
            # The lookup raises UnknownEndpointError if the plan has no such server.
            self.plan.servers[ep]
            check_arrays(arrays.items(), donates=self.donate)
        if state is not self._last():
            check_types(state.params, self._param_types)
            for ep, programs in self.plan.servers.items():
                check_types(state.servers.get(ep, {}), programs.main.inputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that write a part of a checkpoint: the servers, and trainer 0."""
        return (*self.plan.servers, TRAINER)

    def server_arrays(self, state: MeshState, endpoint: str) -> Mapping[str, Any]:
        """Return the arrays of a server, by name."""
        return state.servers[endpoint]

    def rounding_errors(self, state: MeshState, trainer: int) -> dict[str, Any]:
        """Return the rounding errors of a trainer's compressed gradients, by name."""
        found = subset(state.params, self.plan.compression.rounding_error_types)
        return {n: x[trainer] if n in self._local else x for n, x in found.items()}

    def state_of(
        self,
        params: Any,
        opt_state: Any,
        rounding_errors: Mapping[int, Mapping[str, Any]] = {},
    ) -> MeshState:
        """Convert parameters and optimizer state to a state of this job. See `Job.state_of`.

        Args:
          params, opt_state: the step's pytrees.
          rounding_errors: the rounding errors of each trainer, by the trainer's id and by name.
            Trainers without an entry begin with zeros.
        """
        arrays = arrays_of(self.plan.main, params, opt_state)
        for n in self.plan.tables.of:
            arrays[n] = arrays[n][:0]
        servers = {}
        for ep, at in self.placement.servers.items():
            servers[ep] = jax.device_put(scatter(self.plan, ep, params, opt_state), at)
        on_trainers = {}
        for n in self.plan.main.args[0].names:
            # The array is copied, so that a step does not donate the caller's array.
            x = self.plan.compression.received(n, jnp.copy(arrays[n]))
            on_trainers[n] = jax.device_put(x, self.placement.replicated)
        for n in self._local & on_trainers.keys():
            on_trainers[n] = self.placement.stack(on_trainers[n])
        for n, t in self.plan.compression.rounding_error_types.items():
            zeros = np.zeros(t.shape, t.dtype)
            values = [rounding_errors.get(k, {}).get(n, zeros) for k in range(self.plan.trainers)]
            at, x = self.placement.replicated, values[0]
            if n in self._local:
                at, x = self.placement.split, np.stack(values)
            on_trainers[n] = jax.device_put(x, at)
        return MeshState(on_trainers, servers)

    def lower(self, state: MeshState, *batch: Any) -> LoweredStep:
        """Return the compiled functions of a step, so that a user can read their HLO.

        The method takes a step with a copy of the state, and records the functions that the step
        calls.
        """
        with recording() as parts:
            self.step(jax.tree.map(jnp.copy, state), *batch)
        return LoweredStep(parts)

    # -- trainers' programs ----------------------------------------------------------------------

    @cached_property
    def _param_types(self) -> dict[str, Any]:
        """Shape and dtype of the arrays that trainers have in a state, by name."""
        types = subset(self.plan.main.inputs, self.plan.main.args[0].names)
        types |= self.plan.compression.rounding_error_types
        for n in self.plan.tables.of:
            types[n] = types[n].update(shape=(0, *types[n].shape[1:]))
        for n in self._local:
            types[n] = types[n].update(shape=(self.plan.trainers, *types[n].shape))
        return types

    @cached_property
    def _local(self) -> frozenset[str]:
        """Names of arrays that each trainer changes itself, such as batch statistics.

        Their values may differ between trainers, so a state stores one value for each trainer.
        """
        main = self.plan.main
        if self.plan.trainers == 1:
            return frozenset()
        outputs = dict(zip(main.outputs, main.inner.outvars, strict=True))
        changed = {n for n in self.plan.frozen if outputs[n] is not main.invars[n]}
        return frozenset(changed | {*self.plan.compression.rounding_error_types})

    def _shared(self, batch: Sequence[Any]) -> list[tuple[Any, Share]]:
        """Return the arrays of a batch, each with the dimension along which trainers divide it.

        An array that every trainer gets in full has "replicated" in place of a dimension. A random
        key that each trainer changes has "key".

        Raises:
          BatchError: the arrays cannot be split over the trainers.
        """
        trainers = self.plan.trainers
        if self.plan.shared is None:
            option = "plan.on_mesh(unsplit_inputs=(...))"
            return shared_batch(self._names, batch, trainers, self._unsplit, option)
        axes = self.plan.shared.axes
        arrays: list[tuple[Any, Share]] = []
        for n, x in zip(self._names, batch, strict=True):
            arrays.append((x, axes.get(n, "replicated")))
        option = "dtrans.pserver(batch=dtrans.Batch(unsplit_inputs=(...)))"
        uneven = self.plan.takes_uneven_batches
        check_rows(rows_of(self._names, arrays), trainers, option, uneven=uneven)
        return arrays

    def _level(self, state: MeshState) -> int:
        """Return the number of the trainer program for the next step, for `dtrans.TopK`.

        `TopK` sends a fraction of each gradient's numbers (density). In a ramp-up, the densities
        follow each other. Each density needs another program.
        """
        compression = self.plan.compression
        errors = {}
        for n in compression.rounding_errors:
            errors[n] = state.params[f"{ROUNDING_ERROR}/{n}"]
        return compression.level_of(errors)

    def _runner(self, arrays: Sequence[tuple[Any, Share]], level: int) -> MeshTrainerPrograms:
        """Return the compiled trainer program for the shapes and dtypes of a batch.

        Args:
          arrays: the arrays of the batch, each with its split over trainers.
          level: the result of `_level`.
        """
        key = level, *((x.shape, x.dtype) for x, _ in arrays)
        if key not in self._runners:
            plan = self.plan.levels[level]
            program, merges = shared_program(plan, arrays)
            self._runners[key] = MeshTrainerPrograms(
                program, arrays, self.placement.mesh, plan, self._local, merges
            )
        return self._runners[key]


@register_runner(PServerPlan, "simulate")
def simulated(plan: PServerPlan) -> MeshJob:
    """Return a job on one device, which runs all trainers and servers in turn."""
    return MeshJob(plan, jax.devices()[:1], donate=False, way="simulate")


class LateRowsJob(MeshJob):
    """Job for `plan.verify()` in which table rows are updated late, as in jobs of processes.

    With an optimizer such as Adam, a step also changes rows without a gradient. A server process
    skips such a row, and makes up for the skipped updates before the row is read. `plan.verify()`
    traces this job to check this computation. In the trace, each step also makes up for the skipped
    update of every row.
    """

    rows_are_late = True

    def __init__(self, plan: PServerPlan) -> None:
        super().__init__(plan, jax.devices()[:1], donate=False, way=VERIFY)


def _check_plan(plan: PServerPlan, way: str) -> None:
    """Raise ConfigError for a plan that cannot run in one process.

    Args:
      plan: the plan of the job.
      way: the name of the method that the user called.
    """
    if not plan.sync_mode:
        raise ConfigError(
            f"{way} takes a step of all trainers together, but trainers of an asynchronous mode "
            "take steps independently; run the plan as processes: plan.on_cluster()"
        )
    if plan.shares is not None and way == "on_mesh":
        raise ConfigError(
            "on_mesh runs one program for all trainers, but with batch=dtrans.Batch(speeds=...) "
            "each trainer has a separate program; run the plan as processes, plan.on_cluster(), or "
            "on one device, plan.simulate()"
        )
    if plan.devices is not None and way == "on_mesh":
        raise ConfigError(
            f"on_mesh runs a trainer on one device, but each trainer has a mesh of {plan.devices}; "
            "run the plan as processes, plan.on_cluster(), or on one device, plan.simulate()"
        )
    if plan.trainer_writer.runtime_split:
        raise ConfigError(
            f"{way} does not support runtime_split; leave runtime_split out, or run the plan as "
            "processes: plan.on_cluster()"
        )
    for n, t in plan.tables.of.items():
        if t.staleness:
            raise ConfigError(
                f"sparse[{n!r}].staleness={t.staleness}: a job in one process always reads the "
                "newest rows; leave staleness out, or run the plan as processes: "
                "plan.on_cluster()"
            )
        if t.row_filter is not None and way != VERIFY:
            raise ConfigError(
                f"{way}: sparse[{n!r}] has {t.row_filter}, but in a job in one process all rows "
                f"exist from the start; leave {t.row_filter.option} out, or run the plan as "
                "processes: plan.on_cluster()"
            )


def _check_unsplit(plan: PServerPlan, names: Sequence[str], unsplit_inputs: Any) -> None:
    """Raise ConfigError if `unsplit_inputs` names arrays that are not in the batch."""
    is_known = lambda prefix: any(is_under(n, [prefix]) for n in names)
    if isinstance(unsplit_inputs, str) or not all(map(is_known, unsplit_inputs)):
        raise ConfigError(
            f"unsplit_inputs={unsplit_inputs!r} must name arrays of the batch: {', '.join(names)}"
        )
    if plan.shared is not None and unsplit_inputs:
        raise ConfigError(
            f"unsplit_inputs={unsplit_inputs!r}: this plan already splits the batch; write "
            "dtrans.pserver(batch=dtrans.Batch(unsplit_inputs=...)) instead"
        )


def _assemble(rows: Sequence[VarDistributed], servers: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a full array, from the blocks (rows) that servers store.

    Args:
      rows: server, name and position of each block.
      servers: the arrays of each server, by endpoint and name.
    """
    blocks = [servers[row.endpoint][row.slice_name] for row in rows]
    if not rows[0].is_slice:
        return blocks[-1]
    leaf = np.empty(rows[0].origin_shape, blocks[0].dtype)
    for row, block in zip(rows, blocks, strict=True):
        leaf[row.index] = block
    return jnp.asarray(leaf)
