"""Job of one process that is a trainer of parameter servers."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.checkpoint.pserver_state import (
    TRAINER,
    check_saved_by_servers,
    check_type,
    name_leaves,
)
from dtrans.checkpoint.runs import run_of
from dtrans.errors import ConfigError, StateError
from dtrans.ir.cost import nbytes
from dtrans.ir.selection import exclude, retain, select, subset
from dtrans.job import on_first_device
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import TrainerState
from dtrans.protocol.generations import NewGeneration
from dtrans.run.base.lowered import LoweredStep, recording
from dtrans.run.base.state import check_kind
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.device_mesh import check_devices
from dtrans.run.parameter_server.step_results import merge_results
from dtrans.run.parameter_server.tables.job_tables import TrainerTables
from dtrans.run.parameter_server.trainer_calls import TrainerCalls
from dtrans.run.role_jobs.geo_snapshots import GeoSnapshots
from dtrans.run.role_jobs.leaf_snapshots import LeafSnapshots
from dtrans.run.role_jobs.return_to_snapshot import ReturnToSnapshot
from dtrans.run.role_jobs.role_job import RoleJob
from dtrans.run.role_jobs.trainer_requests import TrainerRequests
from dtrans.run.role_jobs.trainer_snapshots import TrainerSnapshots
from dtrans.step_meter import metered


class TrainerJob(RoleJob):
    """Job of one process that is a trainer.

    `init` receives the initial parameters from the servers. `step` computes gradients from this
    trainer's part of a batch, sends them to the servers, and receives the new parameters. If the
    plan splits the batch exactly, a server also merges the losses and other results of all
    trainers.

    The state is a `TrainerState`: the tuple (params,). With GEO-SGD, trainers have an optimizer
    state, and the state is (params, opt_state). With error feedback it is
    ((params, rounding_errors),).
    """

    _step_count = 0
    _init_args: tuple[Any, ...] | None = None
    _rounding_errors: Mapping[str, Any] = {}  # of the newest state, by name

    def __init__(self, plan: PServerPlan, role: Role, options: dict[str, Any]) -> None:
        check_devices(plan.devices)
        super().__init__(plan, role, options)
        on_loss = "restart" if self._generations is None else self._generations.on_trainer_loss
        self._calls = TrainerCalls(plan, role.trainer_id, on_trainer_loss=on_loss)
        self._return = ReturnToSnapshot(
            role.name, self._generations, self._connect, self._init_again
        )
        kind: type[TrainerSnapshots] = GeoSnapshots if plan.push_every else LeafSnapshots
        self._snapshots = kind(self._generations, plan, role.name)
        self._requests = TrainerRequests(
            *(plan, role.trainer_id, self._return),
            run=self._executor.between_steps,
            look_up=self._executor.look_up,
            step_count=lambda: self._step_count,
            rounding_errors=lambda: self._rounding_errors,
            repeats_steps=lambda: self.repeats_steps,
        )
        if self._generations is not None:
            self._connect(self._generations.join().number)

    @property
    def step_count(self) -> int:
        before = self._return.before
        return self._step_count if before is None else before

    @property
    def first_step(self) -> int:
        return self._step_count

    @property
    def roles(self) -> tuple[str, ...]:
        return () if self.role.trainer_id else (TRAINER,)

    @property
    def run_id(self) -> str:  # type: ignore[override]
        return run_of(TRAINER)  # `ServerConnections.identify` has stored this id

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self.role.trainer_id, self.role.trainers

    @property
    def takes_uneven_parts(self) -> bool:  # type: ignore[override]
        return self.plan.takes_uneven_batches

    @property
    def shares(self) -> Callable[[int], Sequence[int]] | None:  # type: ignore[override]
        return self.plan.shares

    @property
    def batches_ahead(self) -> int:  # type: ignore[override]
        return max([1, *(t.staleness for t in self.plan.tables.of.values())])

    def init(self, *args: Any) -> TrainerState:
        self._check_open()
        self._init_args = args
        while True:
            try:
                return TrainerState(self._receive_first(args))
            except NewGeneration as e:
                self._connect(e.number)

    def _connect(self, generation: int) -> None:
        if self._generations is not None:
            self._generations.current()  # this call raises an error in a process that was replaced
        self._executor.connect(self._generations, generation)

    def _init_again(self) -> Any:
        """Receive the parameters of the snapshot to which the job went back after a failure.

        The method calls `init` with the arguments that the user passed.
        """
        if self._init_args is None:
            raise StateError(
                "a process was lost, and all roles go back to an earlier step, but this trainer's "
                "state is not from job.init(...); create it by job.init, which receives the "
                "servers' state"
            )
        params = self._snapshots.keep_constants(self.init(*self._init_args)[0])
        self._requests.drop_save(self._step_count)
        return params

    def _receive_first(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive the servers' current state, and return this trainer's first state.

        `init` calls this method when the job starts, and again after each failure of a process.

        Args:
          args: the arguments that the user passed to `job.init`.
        """
        self._snapshots.prepare(self._executor)
        startup = self.plan.trainer_startup_program(self.role.trainer_id)
        first = self._executor.run(startup, *args)
        state, self._step_count = self._snapshots.begin(self._executor, first)
        self._note_rounding_errors(state)
        return state

    def check(self, state: Any) -> None:
        self._check_open()
        self._check_kind(state)

    def _check_kind(self, state: Any, method: str = "step") -> None:
        check_kind(state, tuple, method)
        size = len(self.plan.trainer_specs)
        if len(state) != size:
            raise StateError(
                f"{method} takes the state that init or step returned, a tuple of {size}, not a "
                f"tuple of {len(state)}"
            )

    @metered
    def step(self, state: tuple[Any, ...], *batch: Any) -> tuple[Any, ...]:
        """Take one step on this trainer's part of a batch; return (state, loss[, aux]).

        Args:
          state: the state that `init` or `step` returned last.
          batch: this trainer's part of each batch argument, from `shard_batch`.

        Raises:
          Rewound: a process was lost, and the job goes back to an earlier step. A loop over
            `job.steps` handles this error.
        """
        self.check(state)
        self.check_return()
        self._snapshots.before_step(self._executor, self._step_count, state)
        call = self._calls(batch, self._level(state))
        try:
            outputs = self._executor.run(call.program, *state, *call.batch)
            outputs = merge_results(self.plan, self._executor.exchange, outputs, call)
        except NewGeneration as e:
            self._return.begin(e.number, self._step_count)
            raise self._return.end(self._step_count) from None
        if self._init_args is None and self._executor.connections.is_in_generation:
            raise StateError(
                "job.serve(snapshots=...) lets this job continue after the failure of a process, "
                "but this trainer's state is not from job.init(...); create it by job.init, which "
                "receives the servers' state"
            )
        self._step_count += 1
        new = TrainerState(outputs[: len(state)])
        self._note_rounding_errors(new)
        return (new, *outputs[len(state) :])

    def _level(self, state: tuple[Any, ...]) -> int:
        """Return the index of the program of the next step; 0 without `dtrans.TopK`.

        With `dtrans.TopK`, the fraction of each gradient that trainers send changes at some steps.
        There is one program for each fraction.
        """
        compression = self.plan.compression
        return compression.level_of(state[0][1] if compression.rounding_errors else {})

    def prefetch(self, *batch: Any) -> bool:
        """Request the table rows that a later step looks up, without waiting for them.

        Call this method with the next batch, then `step` with the current batch. The rows arrive
        while the step computes. If you call the method twice before a `step`, the second call takes
        the batch after the next one.

        Prefetching does not change results: if an update changes rows that servers have already
        sent, the servers send these rows again. With `dtrans.Rows(staleness=)`, a step may use
        older rows. A step requests the rows that were not prefetched.

        Args:
          batch: this trainer's part of the arguments of `step` after the state.

        Returns:
          True if rows were requested. False if the plan has no tables, or if the next step goes
          back to a snapshot. Also False in asynchronous modes, whose steps read the
          newest rows.

        Raises:
          BatchError: an id is not a row of its table; no request was sent.
          ConfigError: the ids that a step looks up depend on its state.
          StateError: the job is closed, or `prefetch` was called for 64 batches that no step has
            used.

        Source: TorchRec's `TrainPipelineSparseDist` for prefetching; Persia's bounded staleness for
        `dtrans.Rows(staleness=)`.
        """
        self._check_open()
        if not self.plan.tables.of or not self.plan.sync_mode:
            return False
        if self._return.is_due:
            return False
        call = self._calls(batch)
        try:
            self._executor.announce(call.program, *call.batch)
        except NewGeneration as e:
            self._return.begin(e.number, self._step_count)
            return False
        return True

    def check_return(self) -> None:
        if self._return.is_due:
            raise self._return.end(self._step_count)

    def end_loop(self) -> None:
        if self._executor.connections.is_in_generation:
            # No step can be repeated after the loop, so the queued gradients must arrive before.
            try:
                self._executor.flush()
            except NewGeneration as e:
                self._return.begin(e.number, self._step_count)
        self.check_return()

    @property
    def tables(self) -> TrainerTables:
        """The tables of the job, with `lookup`, `export`, `report`, `changed` and `evict`."""
        self._check_open()
        return self._requests.tables

    def save(self, name: str, *, wait: bool = True) -> None:
        """Save a checkpoint while the job runs; the servers write it.

        Servers take a snapshot, and write it during the next steps. The snapshot is the state after
        this trainer's last step. With synchronous trainers, it includes that step of all trainers.
        With `dtrans.Geo`, it is the state after this trainer last sent its changes to the servers.

        Servers need a folder: `job.serve(state, checkpoints=folder)`. The checkpoint is
        `folder/name`, for `dtrans.checkpoint.load` and `restore`. One trainer's call is enough. If
        several trainers call it with the same name after the same step, one checkpoint is written.
        With error feedback (`dtrans.Sync(compress="int8")`), all trainers must call it, because
        each trainer has its own rounding errors.

        Args:
          name: the name of the checkpoint, such as "300".
          wait: True to return when the checkpoint is written. With False, steps can continue while
            it is written. The next `save`, or the end of the job, then waits for it and raises its
            error.

        Raises:
          CheckpointError: a server has no folder, could not write its piece, or has saved another
            step under this name. Or a trainer with rounding errors has taken a further step without
            this call. The job continues.
          ConfigError: `init` was not called, or trainers have parameters that no server has.

        Source: Paddle's `checkpoint_notify`.
        """
        self._check_open()
        check_saved_by_servers(self.plan)
        self._requests.save(name, wait=wait)
        if wait:
            self.meter.note_saved(name)

    def close(self) -> None:
        with self:
            pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lost = self._return.missed if error is None else None
        super().__exit__(kind, error or lost, trace)
        if lost is not None:
            raise lost

    def params(self, state: tuple[Any, ...]) -> Any:
        """Return the parameters. The servers send all rows of embedding tables.

        Raises:
          StateError: the tables do not fit into memory.
        """
        spec = self.plan.main.args[0]
        return spec.unflatten_named(self._params(state, spec.names))

    def _params(self, state: tuple[Any, ...], names: Collection[str]) -> dict[str, Any]:
        """Return the parameters with the given names. The servers send all rows of tables."""
        spec, tables = self.plan.main.args[0], retain(self.plan.tables.of, names)
        size, available = sum(nbytes(self.plan.main.inputs[n]) for n in tables), _memory_bytes()
        if size > available:
            raise StateError(
                f"the tables {', '.join(tables)} have {size:,} bytes, which is more than the "
                f"{available:,} bytes that this process may use; write a table to a file by "
                "job.tables.export(name, path), or read some rows by job.tables.lookup(name, ids)"
            )
        stored = state[0][0] if self.plan.compression.rounding_errors else state[0]
        leaves = subset(dict(zip(spec.names, spec.flatten(stored), strict=True)), names)
        for n, t in tables.items():
            leaves[n] = jax.numpy.asarray(self.tables.lookup(n, np.arange(t.lookups.rows)))
        return leaves

    def _leaves(self, state: tuple[Any, ...], names: Collection[str]) -> dict[str, Any]:
        self._check_kind(state, "apply")
        params = self.plan.main.args[0].names
        found = self._params(state, select(names, params))
        if others := exclude(names, params):
            found |= super()._leaves(state, others)
        return on_first_device(found)

    def _gathered_bytes(self, name: str) -> int:
        return nbytes(self.plan.main.inputs[name]) if name in self.plan.tables.of else 0

    def state_of(
        self,
        params: Any,
        opt_state: Any,
        rounding_errors: Mapping[int, Mapping[str, Any]] = {},
    ) -> TrainerState:
        """Return a trainer's state with these parameters; `opt_state` is ignored.

        Args:
          params: the parameters.
          opt_state: ignored, because servers store the optimizer state.
          rounding_errors: rounding errors of trainers, by the trainer's id and by name. A trainer
            without an entry begins with zeros.
        """
        if self.plan.push_every:
            raise ConfigError(
                "with GEO-SGD a trainer cannot start from a state that you pass; call "
                "job.init(...), which receives the servers' parameters"
            )
        spec, tables = self.plan.main.args[0], self.plan.tables.of
        leaves = name_leaves(spec, params, "params")
        for n, x in leaves.items():
            check_type(x, self.plan.main.inputs[n], n, "the step")
            if n in tables:
                leaves[n] = x[:0]  # a trainer's state has tables with 0 rows
            leaves[n] = self.plan.compression.received(n, leaves[n])
        for n, t in self.plan.compression.rounding_error_types.items():
            leaves[n] = jax.numpy.zeros(t.shape, t.dtype)
        for n, x in rounding_errors.get(self.role.trainer_id, {}).items():
            leaves[n] = jax.numpy.asarray(x)
        state = TrainerState(spec.unflatten_named(leaves) for spec in self.plan.trainer_specs)
        self._note_rounding_errors(state)
        return state

    def _note_rounding_errors(self, state: tuple[Any, ...]) -> None:
        """Store the rounding errors of the newest state, for `save`."""
        types = self.plan.compression.rounding_error_types
        if types:
            spec = self.plan.trainer_specs[0]
            self._rounding_errors = subset(name_leaves(spec, state[0], "params"), types)

    def opt_state(self, state: tuple[Any, ...]) -> Any:
        if not self.plan.push_every:
            return super().opt_state(state)
        row_states = [n for t in self.plan.tables.of.values() for n in t.zero.state]
        if row_states:
            raise ConfigError(
                f"{row_states[0]} cannot be returned: it contains all rows of a table, but this "
                "trainer has only the rows that it has looked up"
            )
        return state[1]

    def lower(self, state: tuple[Any, ...], *batch: Any) -> LoweredStep:
        """Take a step, and return the functions that it compiles, for inspection.

        The step needs the servers, so all trainers must call this method together.
        """
        with recording() as parts:
            self.step(state, *batch)
        return LoweredStep(parts)


def _memory_bytes() -> int:
    """Return the bytes of memory that this process may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)
