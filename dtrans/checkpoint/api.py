"""Functions that save and restore checkpoints.

A checkpoint is a folder such as `ckpt/300`. Each process of a job writes its own subfolders
(*pieces*), and may read all pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checkpoint import collective_state
from dtrans.checkpoint.assemble import as_numpy, full_slice
from dtrans.checkpoint.orbax_io import (
    Checkpoint,
    Folder,
    InitSlice,
    PieceLayout,
    check_place,
    require_path,
    write,
)
from dtrans.checkpoint.pserver_state import (
    TRAINER,
    arrays_of,
    check_plan,
    check_server_state,
    check_step,
    frozen_values,
    initial_sources,
    name_leaves,
    step_rows,
    to_trees,
    trainer_rows,
)
from dtrans.checkpoint.rounding_errors import (
    restore_rounding_errors,
    rounding_error_rows,
    rounding_error_slices,
)
from dtrans.checkpoint.runs import SaveId, run_of, save_id
from dtrans.checkpoint.saved_rows import TableArray
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import CheckpointWarning, StateError
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import values_at
from dtrans.job import Job
from dtrans.ops import init_on_use_p, listen_and_serv_p
from dtrans.parameter_server.compression import encoded_copies
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.step.one_state import is_train_state_step, split_spec, split_startup
from dtrans.step.startup import match_startup, with_numbers


@overload
def save(
    path: Folder,
    plan: PServerPlan,
    endpoint: str,
    state: Mapping[str, Any],
    *,
    tag: str | None = None,
) -> None: ...


@overload
def save(path: Folder, job: Job, state: Any, /, *, tag: str | None = None) -> None: ...


def save(
    path: Folder, plan: Any, endpoint: Any, state: Any = None, *, tag: str | None = None
) -> None:
    """Save this process's part of a job's state; each process of the job calls this function.

        save(path, plan, endpoint, state)     in the process of a server, with an `Executor`
        save(path, job, state)                in each process of a job; on servers after they ended

    To check the path before training, call `check(path, job)`.

    Args:
      path: the folder of this checkpoint, such as `ckpt/300`. All processes pass the same path, and
        must see this folder.
      plan: the plan of the servers, equal in all processes.
      endpoint: the server's endpoint.
      job: the job of `plan.on_mesh()`, `plan.on_cluster()`, `plan.simulate()` or `plan.on_ray()`.
      state: for a server, the result of `exe.run(pserver, ...)`; for a job, the state that
        `job.step` returned. Rows are copied from each rank's device, without a gather.
      tag: a name of this save, equal in all processes of the job and different for each run. Pass a
        tag only if the processes were started separately; other processes know the identifier of
        their run (`dtrans.checkpoint.runs`). Pieces with different tags are not combined.

    Raises:
      ConfigError: the path contains a complete checkpoint, or pieces that may belong to this run;
        or orbax is not installed.
      StateError: an array is missing, has another shape or dtype, or was donated.
      UnknownEndpointError: the plan has no server with this endpoint.

    Source: `checkpoint_notify` of Paddle, which makes each server save, and `save_persistables` of
    meta_optimizers/sharding/utils.py, where each rank saves its parameters.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init))
      >>> state = {"params/w": jnp.ones(3)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     dtrans.checkpoint.save(f"{folder}/300", plan, "127.0.0.1:6174", state)
      ...     os.listdir(f"{folder}/300")
      ['pserver-0']
      >>> slices = dtrans.Slicing(min_slice_size=0)
      >>> job = dtrans.sharding(plan.main, plan.startup, degree=2, slices=slices).simulate()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     dtrans.checkpoint.save(f"{folder}/300", job, job.init())
      ...     sorted(os.listdir(f"{folder}/300"))
      ['rank-0', 'rank-1']
    """
    if isinstance(plan, Job):
        _save_job(path, plan, endpoint if state is None else state, tag)
        return
    check_plan(plan)
    values = check_server_state(plan, endpoint, state)
    write(path, _layout(plan), endpoint, values, save_id(run_of(endpoint), tag))


def save_serving(
    path: Folder,
    plan: PServerPlan,
    endpoint: str,
    state: Mapping[str, Any],
    save_id: SaveId,
    *,
    rounding_errors: Mapping[str, Any] | None = None,
    servers_only: bool = False,
    alone: bool = False,
) -> None:
    """Save the state of a server while it serves trainers, without orbax.

    A server calls this function for its snapshots, and for checkpoints that a trainer requests. In
    an asynchronous job, each server counts its own steps, so copies of a step count can differ
    between servers. A restore reads the first server's copy, with a `CheckpointWarning`.

    Args:
      path, plan, endpoint, state: as in `save`.
      save_id: the run and the step of the saved state.
      rounding_errors: rounding errors that trainers have sent to this server, by the names of their
        slices. None to leave the rounding errors of all trainers out of the checkpoint.
      servers_only: True to leave out the parameters that no server stores. Then only servers can
        restore the checkpoint.
      alone: True if the files of this server are a complete snapshot, as in asynchronous jobs,
        where servers restart separately.

    Raises:
      As `save`.
    """
    # A snapshot of one server may lack optimizer state: with GEO-SGD, trainers write this state.
    if not alone:
        check_plan(plan)
    layout = _layout(plan, servers_only=servers_only, rounding_errors=rounding_errors is not None)
    if alone:
        rows = plan.overview.by_endpoint(endpoint)
        layout = PieceLayout(plan.main, rows, {endpoint: layout.pieces[endpoint]})
    write(
        path,
        layout,
        endpoint,
        check_server_state(plan, endpoint, state) | dict(rounding_errors or {}),
        save_id,
        steps_may_differ=not plan.sync_mode,
        serving=True,
    )


def check(path: Folder, job: Job) -> None:
    """Check, before training, that `save(path, job, state)` will be able to write.

    Args:
      path, job: as in `save`.

    Raises:
      ConfigError: the path is not a folder, or cannot be written. Or it contains a complete
        checkpoint, or pieces that may belong to this run. Or the plan's state cannot be saved, or
        orbax is not installed.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init)
      >>> job = dtrans.nccl2(main, startup, trainers=2).simulate()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     dtrans.checkpoint.check(f"{folder}/300", job)
    """
    layout, here = _pieces(job)
    check_place(path, layout, here, _save_id_of_job(job, layout, here, None))


def _layout(
    plan: PServerPlan, *, servers_only: bool = False, rounding_errors: bool = False
) -> PieceLayout:
    """Return the pieces (subfolders) of a checkpoint of a job with servers.

    Args:
      plan: the plan of the job.
      servers_only: as in `save_serving`.
      rounding_errors: True if servers also save the rounding errors of all trainers.
    """
    pieces = {ep: f"pserver-{i}" for i, ep in enumerate(plan.servers)}
    rows = [*plan.overview]
    if plan.frozen and not servers_only:
        pieces[TRAINER] = "trainer-0"
        rows += trainer_rows(plan)
    if rounding_errors:
        rows += itertools.chain.from_iterable(rounding_error_rows(plan).values())
    return PieceLayout(plan.main, rows, pieces)


def _pieces(job: Any) -> tuple[PieceLayout, list[str]]:
    """Return the pieces (subfolders) of a job's checkpoint, and the savers in this process.

    A saver is a server, trainer or rank that writes a piece.
    """
    plan = job.plan
    savers: list[str] = []
    if isinstance(plan, PServerPlan):
        check_plan(plan)
        layout = _layout(plan, rounding_errors=_has_all_roles(job))
        if not job.is_driver:
            savers = [who for who in job.roles if who in layout.pieces]
    elif isinstance(plan, CollectivePlan):
        layout = PieceLayout(
            plan.main, collective_state.saver_rows(plan), collective_state.piece_names(plan)
        )
        if not job.is_driver:
            savers = collective_state.local_savers(job)
    else:
        saved = [*step_rows(plan.main, TRAINER), *_extra_rows(plan, TRAINER)]
        layout = PieceLayout(plan.main, saved, {TRAINER: "trainer-0"})
        if job.saves:
            savers = [TRAINER]
    return layout, savers


def _has_all_roles(job: Any) -> bool:
    """Return True if all roles of a job with servers are in this process.

    If so, a checkpoint can contain the rounding errors of all trainers. A separate server process
    does not have them after the end of the job.
    """
    return not job.is_driver and {*job.plan.servers, TRAINER} <= {*job.roles}


def _save_job(path: Folder, job: Any, state: Any, tag: str | None) -> None:
    if job.is_driver:
        job.check(state)
        job.save(path, tag=tag)
        job.meter.note_saved(path)
        return
    layout, here = _pieces(job)
    save_id = _save_id_of_job(job, layout, here, tag)
    for who, values in _values(job, state, here):
        write(path, layout, who, values, save_id)
    job.meter.note_saved(path)


def _save_id_of_job(job: Any, layout: PieceLayout, here: Iterable[str], tag: str | None) -> SaveId:
    return save_id(job.run_id, tag, alone=layout.pieces.keys() <= {*here})


def _values(job: Any, state: Any, here: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (role, arrays) for each server, trainer or rank in this process that saves arrays.

    The generator copies arrays to the host role by role, to save memory.
    """
    plan = job.plan
    if isinstance(plan, PServerPlan):
        job.check(state)
        for who in here:
            if who == TRAINER:
                yield who, frozen_values(plan, job.params(state))
                continue
            arrays = check_server_state(plan, who, job.server_arrays(state, who))
            if _has_all_roles(job):
                for k in rounding_error_rows(plan, who):
                    arrays |= rounding_error_slices(plan, job.rounding_errors(state, k), k)
            yield who, arrays
    elif isinstance(plan, CollectivePlan):
        arrays = collective_state.check_job_state(job, state)
        for who in here:
            yield who, collective_state.values_to_save(plan, who, arrays)
    else:
        # These methods communicate, so all processes call them, though only one saves.
        arrays = arrays_of(plan.main, job.params(state), job.opt_state(state))
        arrays |= job.extra_state(state)
        for who in here:
            yield who, arrays


def save_trainer(path: Folder, plan: PServerPlan, params: Any, *, tag: str | None = None) -> None:
    """Save the leaves that no server stores (`plan.frozen`), in the process of trainer 0.

    These are constant leaves, and leaves that each trainer updates itself, such as batch
    statistics. Without such leaves, nothing is written.

    Args:
      path, plan, tag: as in `save`.
      params: the pytree of trainer 0's parameters.

    Raises:
      ConfigError: the path contains a piece of trainer 0, or pieces of another job; or orbax is not
        installed.
      TraceError: `params` differs in structure from the step's argument.
      StateError: a leaf differs in shape or dtype from the step's argument.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.masked(optax.sgd(0.5), {"scale": False, "w": True})
      >>> loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
      >>> def step(params, opt_state, x):
      ...     value, g = dtrans.value_and_grad(loss)(params, x)
      ...     updates, opt_state = tx.update(g, opt_state, params)
      ...     return {"scale": params["scale"], "w": params["w"] + updates["w"]}, opt_state, value
      >>> init = lambda: (p := {"scale": jnp.ones(()), "w": jnp.arange(3.0)}, tx.init(p))
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init))
      >>> plan.frozen
      ('params/scale',)
      >>> trained = {"scale": jnp.array(2.0), "w": jnp.ones(3)}
      >>> with tempfile.TemporaryDirectory() as path:
      ...     dtrans.checkpoint.save(path, plan, "127.0.0.1:6174", {"params/w": jnp.ones(3)})
      ...     dtrans.checkpoint.save_trainer(path, plan, trained)
      ...     params = dtrans.checkpoint.restore_trainer(path, plan, init()[0])
      >>> params["scale"].tolist(), params["w"].tolist()
      (2.0, [0.0, 1.0, 2.0])
    """
    check_plan(plan)
    if plan.frozen:
        write(
            path,
            _layout(plan),
            TRAINER,
            frozen_values(plan, params),
            save_id(run_of(TRAINER), tag),
        )


@overload
def restore(path: Folder, plan: PServerPlan, endpoint: str) -> dict[str, Any]: ...


@overload
def restore(path: Folder, job: Job, /) -> Any: ...


def restore(path: Folder, plan: Any, endpoint: Any = None) -> Any:
    """Return the state of this process, from a checkpoint of any job with the same step.

        restore(path, plan, endpoint)     the state of a server, in its process
        restore(path, job)                the state of a job, in each of its processes

    Continue training with `exe.run(pserver, restore(path, plan, endpoint))` or
    `job.step(restore(path, job), *batch)`. The saved job may have used another strategy. A process
    reads only arrays with rows that it needs, and each device receives only its shard.

    A job may have state that the single-device step lacks. If the checkpoint does not contain this
    state, it starts from its initial value. For example, backups of DC-ASGD start as copies of the
    parameters, as in `scatter`.

    Args:
      path: the path that was passed to `save`.
      plan, endpoint: the plan of the job that continues, and the server's endpoint.
      job: the job that continues, from `plan.on_mesh()`, `plan.on_cluster()`, `plan.simulate()` or
        `plan.on_ray()`.

    Raises:
      StateError: the path contains no checkpoint, or an incomplete or unreadable one, or pieces of
        several jobs. Also raised if names, shapes or dtypes of the step differ, or if copies of an
        array differ between servers.
      CheckpointError: `path` is None, since `latest` found no complete checkpoint.
      UnknownEndpointError: the plan has no server with this endpoint.
      ConfigError: orbax is not installed.

    Source: `load_persistables` of Paddle, and the load operators in the servers' startup programs.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init)
      >>> one, two = "127.0.0.1:6174", "127.0.0.1:6174,127.0.0.1:6175"
      >>> rows = dtrans.BlockPlacement(min_block_size=1)
      >>> saved = dtrans.pserver(main, startup, pservers=one, placement=rows)
      >>> plan = dtrans.pserver(main, startup, pservers=two, placement=rows)
      >>> with tempfile.TemporaryDirectory() as path:
      ...     dtrans.checkpoint.save(path, saved, one, {"params/w": jnp.array([7.0, 8.0, 9.0])})
      ...     dtrans.checkpoint.restore(path, plan, "127.0.0.1:6175")
      ...     slices = dtrans.Slicing(min_slice_size=0)
      ...     job = dtrans.sharding(main, startup, degree=2, stage=3, slices=slices).simulate()
      ...     job.params(dtrans.checkpoint.restore(path, job))
      {'params/w.block1': Array([9.], dtype=float32)}
      {'w': Array([7., 8., 9.], dtype=float32)}
    """
    if isinstance(plan, Job):
        return _restore_job(path, plan)
    check_plan(plan)
    plan.servers[endpoint]  # raises UnknownEndpointError
    return _restore_server(Checkpoint.at(path).of(plan.main), plan, endpoint)


def restore_snapshot(
    path: Folder, plan: PServerPlan, endpoint: str, job: str, step: int, *, alone: bool = False
) -> dict[str, Any]:
    """Return the state of a server from a snapshot that `save_serving` wrote.

    After a process of the job has failed, servers call this function to continue from a snapshot.

    Args:
      path, plan, endpoint: as in `restore`.
      job: the identifier of the job that has written the snapshot.
      step: the step of the snapshot.
      alone: as in `save_serving`.

    Raises:
      DamagedError: the snapshot is damaged, or belongs to another job or step.
      StateError: the system cannot read the snapshot, or the plan has another step function.
    """
    saved = Checkpoint.at(path)
    saved.check_snapshot(job, step)
    if not alone:
        saved.of(plan.main)
    return _restore_server(saved, plan, endpoint)


def _restore_server(saved: Checkpoint, plan: PServerPlan, endpoint: str) -> dict[str, Any]:
    sources = initial_sources(plan, endpoint, saved.rows)
    targets = {}
    for row, origin in sources:
        if origin is not None:
            targets[row.slice_name] = dataclasses.replace(row, origin_name=origin)
    found: dict[str, Any] = dict(_table_arrays(saved, plan.servers[endpoint], targets))
    rest = [target for n, target in targets.items() if n not in found]
    first = _init_outputs(saved, plan.servers[endpoint].startup)
    by_name = None if first is None else lambda target: first()[target.slice_name]
    found |= zip((x.slice_name for x in rest), saved.arrays(rest, by_name), strict=True)
    for row, origin in sources:
        if origin is None:
            found[row.slice_name] = jnp.zeros(row.slice_shape, row.dtype)
    state = {row.slice_name: found[row.slice_name] for row, _ in sources}
    return state | encoded_copies(plan.servers[endpoint].variables, state)


def _table_arrays(
    saved: Checkpoint, programs: Any, targets: Mapping[str, VarDistributed]
) -> Iterator[tuple[str, TableArray]]:
    """Yield each array of the server's tables as a `TableArray`, which reads rows on demand.

    A table can be larger than the memory of the host. Tables that cannot be restored row by row are
    left out.
    """
    (serves,) = (e for e in programs.main.eqns if e.primitive is listen_and_serv_p)
    on_use = {e.params["table"]: e for e in programs.startup.eqns if e.primitive is init_on_use_p}
    served = serves.params.get("tables")
    blocks = {} if served is None else served.blocks
    args = saved.init_args(programs.startup) if blocks else None
    for block in blocks.values():
        names = [n for n in block.arrays if n in targets]
        if block.updates_all or len(names) < len(block.arrays):
            continue
        table = saved.table(values_at(targets, names), on_use.get(block.name), args)
        if table is None:
            continue
        for i, n in enumerate(names):
            like = jax.ShapeDtypeStruct(targets[n].slice_shape, targets[n].dtype)
            yield n, TableArray(like, table, i)


def _init_outputs(
    saved: Checkpoint, init: Program
) -> Callable[[], Mapping[str, np.ndarray]] | None:
    """Return a function that runs the user's init again, with the arguments of the saved job.

    Table rows that no step used are not in the checkpoint, so a restore generates them. The
    function returns the outputs of the init by name. If the checkpoint contains all rows, the
    result is None.
    """
    args = saved.init_args(init)
    if args is None:
        return None

    @functools.cache
    def run() -> Mapping[str, np.ndarray]:
        return dict(zip(init.out_names, map(as_numpy, init.compiled(*args)), strict=True))

    return run


def _init_slices(saved: Checkpoint, init: Program | None) -> InitSlice | None:
    """Return a function that computes the init's values of a slice, for rows that were not saved.

    Return None if all rows were saved.
    """
    if init is None:
        return None
    first = _init_outputs(saved, init)
    if first is None:
        return None
    return lambda target: first()[target.origin_name][target.index]


def _restore_job(path: Folder, job: Any) -> Any:
    if job.is_driver:
        return job.restore(require_path(path))
    if isinstance(job.plan, PServerPlan):
        check_plan(job.plan)
        servers = [who for who in job.roles if who in job.plan.servers]
        if len(job.roles) == 1 and servers:
            state = restore(path, job.plan, *servers)
            job.restored = Path(path)
            return state
        saved = Checkpoint.at(path).of(job.plan.main)
        if not servers:
            k = job.role.trainer_id
            errors = restore_rounding_errors(saved, job.plan, [k])
            return job.state_of(_trainer_params(path, job.plan), None, errors)
        errors = restore_rounding_errors(saved, job.plan, range(job.plan.trainers))
        return job.state_of(*load(path, job.plan.main, job.plan.startup), errors)
    if not isinstance(job.plan, CollectivePlan):
        loaded = load(path, job.plan.main, job.plan.startup)
        if not isinstance(job.plan, PipelinePlan):
            return job.state_of(*loaded)
        return job.state_of(*loaded, extra=_saved_extra(path, job.plan))
    saved = Checkpoint.at(path).of(job.plan.main)
    read = functools.partial(saved.on_host, first=_init_slices(saved, job.plan.startup))
    return collective_state.build_state(job, saved.rows, read)


def _extra_rows(plan: PipelinePlan, who: str = "") -> list[VarDistributed]:
    """Describe each array of a pipeline's extra state, such as a loss scale, as a slice to save.

    The slice is the full array, and `who` saves it.
    """
    return [full_slice(n, jax.typeof(x), who) for n, x in plan.extra_state.items()]


def _saved_extra(path: Folder, plan: PipelinePlan) -> dict[str, Any]:
    """Return the extra state of a pipeline, such as a loss scale, by name.

    A checkpoint of another job may lack some of these arrays; they are omitted.
    """
    saved = Checkpoint.at(path)
    rows = [row for row in _extra_rows(plan) if row.origin_name in saved.rows]
    return dict(zip((row.origin_name for row in rows), saved.arrays(rows), strict=True))


def _trainer_params(path: Folder, plan: PServerPlan) -> Any:
    """Return the parameters of a trainer, read from a checkpoint.

    Servers store the embedding tables, and a trainer requests rows. So tables are zeros here,
    broadcast from one element to save memory.
    """
    main, tables = plan.main, plan.tables.of
    dense = {*main.args[0].names} - {*tables}
    rows = [row for row in step_rows(main) if row.origin_name in dense]
    values = Checkpoint.at(path).of(main).arrays(rows)
    found: dict[str, Any] = dict(zip((row.origin_name for row in rows), values, strict=True))
    for n in tables:
        zero = np.zeros((), main.inputs[n].dtype)
        found[n] = np.broadcast_to(zero, main.inputs[n].shape)
    return main.args[0].unflatten_named(found)


def restore_trainer(path: Folder, plan: PServerPlan, params: Any) -> Any:
    """Return a trainer's parameters, with restored values of the leaves that no server stores.

    These leaves are `plan.frozen`. All other leaves are returned unchanged, since the trainer
    receives them from the servers.

    Args:
      path, plan: as in `restore`.
      params: the trainer's initial parameters: the result of
        `exe.run(t.get_trainer_startup_program(), ...)`.

    Raises:
      As `restore`.
      TraceError: `params` differs in structure from the step's argument.

    Example: see `save_trainer`.
    """
    check_plan(plan)
    spec = plan.main.args[0]
    now = name_leaves(spec, params, "params")
    if not plan.frozen:
        return params
    saved = Checkpoint.at(path).of(plan.main)
    now |= dict(zip(plan.frozen, saved.arrays(trainer_rows(plan)), strict=True))
    return spec.unflatten_named(now)


def load(path: Folder, main: Program, startup: Program | None = None) -> Any:
    """Return the single-device state in a checkpoint.

    Args:
      path: the path that was passed to `save`.
      main: the traced step: `dtrans.trace(step, params, opt_state, *batch)`, `dtrans.trace(step,
        state, *batch)` or `plan.main`.
      startup: the traced init: `dtrans.trace(init, ...)` or `plan.startup`. Pass it if the
        checkpoint lacks table rows that no step looked up. Also pass it for `step(state, *batch)`
        if the step's results have the same types as its batch.

    Returns:
      `(params, opt_state)`, or `state` for `step(state, *batch)`: the arguments with which the
      jitted step continues on one device. The arrays are new and on the default device. With
      `plan.main`, the result is always a pair.

    Raises:
      StateError, CheckpointError, ConfigError: as `restore`.
      TraceError: `startup` does not return the state of the step.

    Source: `load_persistables` of Paddle.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init)
      >>> plan = dtrans.pserver(main, startup)
      >>> with tempfile.TemporaryDirectory() as path:
      ...     state = {"params/w": jnp.array([7.0, 8.0, 9.0])}
      ...     dtrans.checkpoint.save(path, plan, "127.0.0.1:6174", state)
      ...     dtrans.checkpoint.load(path, main)[0]
      {'w': Array([7., 8., 9.], dtype=float32)}
    """
    check_step(main)
    saved, first = Checkpoint.at(path), main.args[0]
    one_state = not main.takes_one_state and is_train_state_step(main, startup)
    if one_state:
        args = (*split_spec(first, first.names), *main.args[1:])
        main = dataclasses.replace(main, args=args)
    remedy = ""
    if startup is None and not one_state and {*first.names} == {*saved.types}:
        remedy = (
            "; for a step(state, *batch), call dtrans.checkpoint.load(path, main, startup), or "
            "job.gather(dtrans.checkpoint.restore(path, job))"
        )
    saved.of(main, remedy)
    # the init of a plan already has the names of the step's state
    if startup is not None and {*startup.out_names} != {*all_names(main.args[:2])}:
        startup = with_numbers(startup, main.args[:2])
        if one_state or main.takes_one_state:
            startup = split_startup(main, startup)
        startup = match_startup(main, startup)
    params, opt_state = to_trees(main, saved.arrays(step_rows(main), _init_slices(saved, startup)))
    if one_state:
        return params
    return params, opt_state


def latest(folder: Folder) -> Path | None:
    """Return the path of the last complete checkpoint in a folder, or None.

    Checkpoints that are incomplete or unreadable, or contain pieces of several runs or steps, are
    skipped with a `CheckpointWarning`. If the result is None, start with `job.init(...)`, since
    `restore(None, ...)` and `load(None, ...)` raise a `CheckpointError`.

    Args:
      folder: a folder that need not exist. Subfolders with a number as name are checkpoints:
        `ckpt/100`, `ckpt/200`. The largest number is the last checkpoint.

    Raises:
      ConfigError: orbax is not installed.

    Example:
      >>> import tempfile, dtrans
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     print(dtrans.checkpoint.latest(folder))
      None
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    steps = [p for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()]
    for path in sorted(steps, key=lambda p: int(p.name), reverse=True):
        try:
            Checkpoint.at(path)
        except StateError as e:
            warnings.warn(CheckpointWarning(f"{path} is skipped: {e}"), stacklevel=2)
            continue
        return path
    return None
