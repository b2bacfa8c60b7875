"""A job of parameter servers, as one of its processes has it: a trainer, or a server.

The environment says which (`dtrans.Role.from_env`); `dtrans.Executor` runs its programs.
"""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from dtrans.batch.exact_step import ExactStep
from dtrans.checkpoint.orbax_io import load_orbax
from dtrans.checkpoint.pserver_state import (
    TRAINER,
    check_plan,
    check_type,
    has_checkpoints,
    name_leaves,
    scatter,
)
from dtrans.checkpoint.runs import run_of
from dtrans.checks import check_one_of
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.ir.cost import nbytes
from dtrans.ir.program import Program
from dtrans.job import Job
from dtrans.parameter_server.plan import PServerPlan
from dtrans.plan import realises
from dtrans.run.base.batch import Share, batch_arrays, check_uneven, resize, uneven_rows
from dtrans.run.base.lowered import LoweredStep, recording
from dtrans.run.base.merge import Merge
from dtrans.run.distributed.multihost import PARTS_DIFFER
from dtrans.run.distributed.role import Role
from dtrans.run.executor import Executor
from dtrans.run.parameter_server.checkpoints import ServerCheckpoints
from dtrans.run.parameter_server.tables.job_tables import TrainerTables
from dtrans.run.parameter_server.tables.new_rows import with_makers
from dtrans.step.batch_sharing import without_parts
from dtrans.step_meter import metered


RESULTS = -1  # the number of the round of results, which is before those of the next step
ADD = ("all_reduce", "sum")


class RoleJob(Job):
    """What both have in common.

    Args:
      plan: the same in all processes.
      role: of this process.
      options: of `dtrans.Executor`.
    """

    def __init__(self, plan: PServerPlan, role: Role, options: dict[str, Any]) -> None:
        if role.trainers != plan.trainers or tuple(plan.servers) != role.pserver_endpoints:
            raise ConfigError(
                f"the plan is for {plan.trainers} trainers and pservers {','.join(plan.servers)}; "
                "this process's "
                f"environment says {role.trainers} and {role.pservers or 'none'}"
            )
        self.plan, self.role = plan, role
        self._executor = Executor(**options)

    @property
    def run_id(self) -> str:  # type: ignore[override]
        return run_of(self.role.current_endpoint)

    def close(self) -> None:
        super().close()
        self._executor.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().close()
        self._executor.__exit__(kind, error, trace)  # a failure is told to the servers

    def opt_state(self, state: Any) -> Any:
        raise ConfigError(
            "the optimizer's state is on the servers: save them, and dtrans.checkpoint.load the "
            "whole"
        )


class _StepCall(NamedTuple):
    """A batch, and the program that takes it.

    Attributes:
      program: the trainer's program.
      batch: the program's arguments behind its state.
      shared: the exact sharing of the batch among trainers, if the plan has one.
      rows: the rows of the global batch if trainers do not divide them, else 0.
    """

    program: Program
    batch: tuple[Any, ...]
    shared: ExactStep | None
    rows: int


class TrainerJob(RoleJob):
    """One trainer: `init` receives the servers' initial parameters, `step` exchanges with servers.

    Where the batch is shared exactly, results are those of all trainers: one server merges them.

    A state is the trainer's: (params,), or with GEO-SGD, where each trainer has an optimizer state,
    (params, opt_state).
    """

    _steps_made = 0

    @property
    def roles(self) -> tuple[str, ...]:
        return () if self.role.trainer_id else (TRAINER,)

    @property
    def run_id(self) -> str:  # type: ignore[override]
        return run_of(TRAINER)  # the id that `runs.note` has stored

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self.role.trainer_id, self.role.trainers

    @property
    def takes_uneven_parts(self) -> bool:  # type: ignore[override]
        return self.plan.takes_uneven_batches

    @property
    def batches_ahead(self) -> int:  # type: ignore[override]
        return max([1, *(t.staleness for t in self.plan.tables.of.values())])

    def init(self, *args: Any) -> tuple[Any, ...]:
        self._check_open()
        made = self._executor.run(self.plan.trainer_startup_program(self.role.trainer_id), *args)
        return made if isinstance(made, tuple) and self.plan.push_every else (made,)

    def check(self, state: Any) -> None:
        self._check_open()
        if not isinstance(state, tuple) or len(state) != (2 if self.plan.push_every else 1):
            raise StateError(
                f"step takes the state that init or step returned, not {type(state).__name__}"
            )

    @metered
    def step(self, state: tuple[Any, ...], *batch: Any) -> tuple[Any, ...]:
        """Take one step on this trainer's part of a batch (`shard_batch`): (state, loss[, aux])."""
        self.check(state)
        call = self._call(batch)
        outputs = self._merge_results(self._executor.run(call.program, *state, *call.batch), call)
        self._steps_made += 1
        return (tuple(outputs[: len(state)]), *outputs[len(state) :])

    def prefetch(self, *batch: Any) -> bool:
        """Ask servers for the table rows that a later step looks up, without waiting for them.

        The first call is for the step after the next one, each further call for the step after
        that. Call it with this trainer's part of the batch, before the `step` of the current batch.
        The rows arrive while that step computes. Rows that an update changes meanwhile are sent
        again, so that results are the same bit for bit, unless `dtrans.Rows(staleness=)` says
        otherwise. A step that looks up other rows asks for its own.

        Args:
          batch: the arguments of `step` behind the state.

        Returns:
          True if rows were asked for. False if the plan has no tables, or in asynchronous modes,
          whose steps read the newest rows.

        Raises:
          BatchError: a row that a table does not have; nothing is sent. ConfigError: the ids that
            a step looks up depend on its state. StateError: the job is closed, or 64 batches are
            announced without a step.

        Source: TorchRec's `TrainPipelineSparseDist`, for lookups beside a step; Persia's bounded
        staleness, for `dtrans.Rows(staleness=)`.
        """
        self._check_open()
        if not self.plan.tables.of or not self.plan.sync_mode:
            return False
        call = self._call(batch)
        self._executor.announce(call.program, *call.batch)
        return True

    def _call(self, batch: Sequence[Any]) -> _StepCall:
        """Return the program for a batch, and its arguments."""
        arrays, rows = without_parts(batch)
        if rows:
            return self._uneven_call(arrays, rows)
        program = self.plan.trainer_program(self.role.trainer_id)
        return _StepCall(program, arrays, self.plan.shared, 0)

    @cached_property
    def _uneven_programs(self) -> dict[int, tuple[Program, ExactStep]]:
        """Return the programs for batches that trainers do not divide, by the batch's rows."""
        return {}

    def _uneven_call(self, batch: Sequence[Any], rows: int) -> _StepCall:
        """Return the program for a batch that trainers do not divide.

        Each trainer has the same number of rows; padding behind the batch enters no result.
        """
        plan, main, k = self.plan, self.plan.main, self.role.trainer_id
        check_uneven(rows, plan.trainers, self.takes_uneven_parts)
        assert plan.shared is not None
        specs = main.args[2:]
        names = [n for spec in specs for n in spec.names]
        shares: list[Share] = [plan.shared.axes.get(n, "replicated") for n in names]
        arrays = list(zip(batch_arrays(specs, batch, main.inputs), shares, strict=True))
        padded = uneven_rows(names, arrays, rows, k, -(-rows // plan.trainers))

        if rows not in self._uneven_programs:
            state = [main.inputs[n] for spec in main.args[:2] for n in spec.names]
            types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in state]
            types += [resize(x, share, lambda _: rows) for x, share in arrays]
            shared, program = plan.for_uneven_batch(types, k)
            program = dataclasses.replace(program, plan=plan)
            self._uneven_programs[rows] = program, shared
        program, shared = self._uneven_programs[rows]

        by_name = dict(zip(names, padded, strict=True))
        args = tuple(spec.unflatten([by_name[n] for n in spec.names]) for spec in specs)
        return _StepCall(program, args, shared, rows)

    def _merge_results(self, outputs: Any, call: _StepCall) -> Any:
        """Replace this trainer's results by those of all trainers, which one server merges.

        Raises:
          BatchError: trainers took parts of different sizes, and servers have made an update.
        """
        plan, shared, out = self.plan, call.shared, self.plan.trainer.out
        if shared is None or not plan.sync_mode:
            return outputs
        params = plan.main.args[0].names
        merges = {n: w for n, w in shared.merges.items() if w != "same" and n not in params}
        if not merges:
            return outputs

        # the sizes of all parts go with the results: unequal parts are found after one exchange
        ways: list[Sequence[Any]] = [("all_gather", 0)]
        for n, way in merges.items():
            ways.append(("all_gather", shared.joined[n]) if way == "concat" else ADD)
        values = dict(zip(out.names, out.flatten(outputs), strict=True))
        size = np.array([[call.rows, self._part_rows(call)]], np.int32)
        sizes, *found = self._executor.exchange(
            next(iter(plan.servers)), RESULTS, ways, [size, *(values[n] for n in merges)]
        )
        _check_parts(sizes.tolist())

        for (n, way), x in zip(merges.items(), found, strict=True):
            if way == "concat":
                x = Merge("joined", shared.joined[n], call.rows or None)(x)
            # trainers may have left: the mean counts those that are here
            values[n] = x / len(sizes) if way == "mean" else x
        return out.unflatten([values[n] for n in out.names])

    def _part_rows(self, call: _StepCall) -> int:
        """Return the number of rows of this trainer's part; 0 if the batch is not split."""
        main = self.plan.main
        names = [n for spec in main.args[2:] for n in spec.names]
        arrays = batch_arrays(main.args[2:], call.batch, main.inputs)
        axes = {} if call.shared is None else call.shared.axes
        return next((x.shape[axes[n]] for n, x in zip(names, arrays, strict=True) if n in axes), 0)

    @property
    def tables(self) -> TrainerTables:
        """Tables of the job: `lookup`, `export`, `report`, `changed` and `evict`."""
        self._check_open()
        trainer = self.plan.trainer_program(self.role.trainer_id)
        look_up = partial(self._executor.look_up, trainer)
        return TrainerTables(self.plan, look_up, self._executor.between_steps)

    def save(self, name: str, *, wait: bool = True) -> None:
        """Let the servers save what they hold while the job goes on, each its piece of one
        checkpoint.

        Servers take a snapshot and write it during the next steps. They copy the optimizer's state
        while they wait for gradients.

        It is as after the last step of this trainer: with synchronous trainers, that of all of
        them; with `dtrans.Geo` after its last push. The servers must
        have been told where (`job.serve(state, checkpoints=folder)`); what is saved is at
        `folder/name`, as `dtrans.checkpoint.load` and `restore` read it. One trainer is enough to
        say so; where all do, with the same name after the same number of steps, it is one
        checkpoint.

        Args:
          name: of the checkpoint: `300`.
          wait: return when it is written. Synchronous trainers wait for each other, so that with
            `wait=False` steps go on meanwhile: the next `save`, or the end of the job, waits for
            this one and raises what it has met.

        Raises:
          CheckpointError: a server that has no place for it, could not write it, or has saved
            another step under this name; the job goes on.
          ConfigError: before `init`; or a plan whose trainers hold leaves that no server has.

        Source: `checkpoint_notify` of Paddle, at which each server saves its own.
        """
        self._check_open()
        check_plan(self.plan)
        if self.plan.frozen:
            raise ConfigError(
                f"{self.plan.frozen[0]} is on no server: save when the job has ended, with "
                "dtrans.checkpoint.save"
            )
        servers = tuple(self.plan.servers)
        between = partial(self._executor.between_steps, f"checkpoint {name}")
        between(lambda to: to.saved())
        between(lambda to: to.save(servers, name, self._steps_made))
        if wait:
            between(lambda to: to.saved())

    def params(self, state: tuple[Any, ...]) -> Any:
        """The parameters. Tables are looked up, all of their rows.

        Raises:
          StateError: tables that do not fit into memory; `tables.export` writes them to files.
        """
        tables = self.plan.tables.of
        if not tables:
            return state[0]
        size, room = sum(nbytes(self.plan.main.inputs[n]) for n in tables), _memory()
        if size > room:
            raise StateError(
                f"{', '.join(tables)} are {size:,} bytes, and this process may have {room:,}: "
                "job.tables.export(name, path) writes a table to a file, and "
                "job.tables.lookup(name, ids) gives some rows"
            )
        spec = self.plan.main.args[0]
        held = dict(zip(spec.names, spec.flatten(state[0]), strict=True))
        held |= {
            n: jax.numpy.asarray(self.tables.lookup(n, np.arange(t.lookups.rows)))
            for n, t in tables.items()
        }
        return spec.unflatten([held[n] for n in spec.names])

    def state_of(self, params: Any, opt_state: Any) -> tuple[Any, ...]:
        """The state of a trainer that goes on from these parameters; the optimizer's state is the
        servers'."""
        if self.plan.push_every:
            raise ConfigError(
                "with GEO-SGD a trainer begins with job.init(...), which tells the servers of it"
            )
        spec, tables = self.plan.main.args[0], self.plan.tables.of
        held = name_leaves(spec, params, "params")
        for n, x in held.items():
            check_type(x, self.plan.main.inputs[n], n, "the step takes")
        return (spec.unflatten([held[n][:0] if n in tables else held[n] for n in spec.names]),)

    def opt_state(self, state: tuple[Any, ...]) -> Any:
        if not self.plan.push_every:
            return super().opt_state(state)
        kept = [n for t in self.plan.tables.of.values() for n in t.zero.state]
        if kept:
            raise ConfigError(
                f"{kept[0]} has a row for each row of a table, of which this trainer keeps those "
                "that it has looked up"
            )
        return state[1]

    def lower(self, state: tuple[Any, ...], *batch: Any) -> LoweredStep:
        """What `step` compiles. It makes a step, with the servers: all trainers must ask for it
        together."""
        with recording() as parts:
            self.step(state, *batch)
        return LoweredStep(parts)


def _check_parts(sizes: Sequence[Sequence[int]]) -> None:
    """Raise BatchError if trainers took parts of different sizes; `sizes` has (rows, part)."""
    if len({*map(tuple, sizes)}) > 1:
        parts = [str(part) + (f" of {rows}" if rows else "") for rows, part in sizes]
        raise BatchError(
            f"{PARTS_DIFFER}; they gave {', '.join(parts)} rows, and servers took the mean of "
            "unequal parts: go on from a checkpoint, with job.shard_batch(*batch)"
        )


def _memory() -> int:
    """Bytes that this process may have: what the machine has, or the limit that is set."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return there if limit == resource.RLIM_INFINITY else min(there, limit)


class ServerJob(RoleJob):
    """One server: `init` makes its blocks, and `serve` updates them until every trainer has closed.

    Attributes:
      restored: the checkpoint that its state is of, if any.
    """

    restored: Path | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        return (self.role.current_endpoint,)

    def server_arrays(self, state: dict[str, Any], endpoint: str) -> dict[str, Any]:
        """Return the server's arrays, by name."""
        return state

    def state_of(self, params: Any, opt_state: Any) -> dict[str, Any]:
        return scatter(self.plan, self.role.current_endpoint, params, opt_state)

    def init(self, *args: Any) -> dict[str, Any]:
        self._check_open()
        self.restored = None
        return self._init(*args)

    def _init(self, *args: Any) -> dict[str, Any]:
        made: dict[str, Any] = self._executor.run(
            self.plan.servers[self.role.current_endpoint].startup, *args
        )
        return made

    def check(self, state: Any) -> None:
        self._check_open()

    def serve(
        self,
        state: dict[str, Any],
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        on_failure: str | None = None,
        init: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Serve until every trainer has closed; the state at the end, for `dtrans.checkpoint.save`.

        Args:
          checkpoints: a folder, which all servers see, for what trainers ask to be saved
            (`job.save(name)`).
          on_failure: what becomes of the state when the job ends by an error, SIGTERM included.
            "save" writes it to `checkpoints`, under the number of its step; the error is raised
            when it is written. "drop" forgets it. By default "save", where there is a folder and
            the plan has checkpoints. The number is counted from the last `job.save` under a number,
            else from the checkpoint that `dtrans.checkpoint.restore(path, job)` read, else from 0.
          init: the arguments of `init`, where the state is of a checkpoint: rows of tables that are
            as the init makes them take no memory then, as in a job that begins, and others may be
            given up (`job.tables.evict`).

        Raises:
          ConfigError: on_failure="save" without a folder, or with a plan that has no checkpoints; a
            folder without orbax installed.
          DeadlineError, PeerError: the job has ended by an error.
        """
        self._check_open()
        check_one_of("on_failure", on_failure, (None, "save", "drop"))
        if init is not None:
            state = with_makers(state, self._init(*init))
        if checkpoints is None and on_failure == "save":
            raise ConfigError(
                'on_failure="save" needs a place: say job.serve(state, checkpoints=folder)'
            )
        if checkpoints is not None:
            load_orbax()
            number = self.restored.name if self.restored is not None else ""
            begun = int(number) if number.isdecimal() else 0
            keeps = ServerCheckpoints(
                Path(checkpoints), self.plan, self.role.current_endpoint, begun
            )
            saves_last = on_failure == "save" or (on_failure is None and has_checkpoints(self.plan))
            if saves_last:
                check_plan(self.plan)
            self._executor.keep(keeps.keep, keeps.keep_last if saves_last else None)
        made: dict[str, Any] = self._executor.run(
            self.plan.servers[self.role.current_endpoint].main, state
        )
        return made

    def step(self, state: Any, *batch: Any) -> NoReturn:
        raise ConfigError(
            f"{self.role.name} makes no steps: job.serve(state) serves until every trainer has "
            "closed"
        )

    def params(self, state: Any) -> NoReturn:
        raise ConfigError(
            f"{self.role.name} has blocks of parameters: save them, and dtrans.checkpoint.load the "
            "whole"
        )

    def lower(self, state: Any, *batch: Any) -> NoReturn:
        raise ConfigError(
            f"{self.role.name} compiles its update when gradients come; plan.on_mesh().lower() "
            "shows it"
        )


@realises(PServerPlan, "cluster")
def on_cluster(plan: PServerPlan, *, donate: bool = True, **options: Any) -> RoleJob:
    """This process's role."""
    if not donate:
        raise ConfigError("donate=False: a server updates its blocks where they are; leave it out")
    role = Role.from_env()
    return (TrainerJob if role.is_trainer else ServerJob)(plan, role, options)
