"""Checkpoints in files: each process saves its own pieces, and takes up what it needs of those of
all."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checkpoint import collective_state
from dtrans.checkpoint.assemble import as_numpy
from dtrans.checkpoint.orbax_io import Checkpoint, First, Folder, PieceLayout, check_place, write
from dtrans.checkpoint.pserver_state import (
    TRAINER,
    arrays_of,
    as_trees,
    check_plan,
    check_step,
    checked,
    checked_trainer,
    held_rows,
    named,
    starts,
    step_rows,
)
from dtrans.checkpoint.runs import Mark, mark_of, run_of
from dtrans.checkpoint.saved_rows import TableArray
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import CheckpointWarning, StateError
from dtrans.ir.program import Program
from dtrans.job import Job
from dtrans.ops import init_on_use_p, listen_and_serv_p
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan


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
    """Save what this process holds: one server, or the trainers or ranks here; others save theirs
    to the same path.

        save(path, plan, endpoint, state)     a server, in its process
        save(path, job, state)                a job, in each of its processes: of a server when it has served

    `check(path, job)` looks at the path before training.

    Args:
      path: a folder that all processes see, one for each checkpoint: `ckpt/300`.
      plan: of the servers; the same in all processes.
      endpoint: the server.
      job: what `plan.on_mesh()`, `plan.on_cluster()`, `plan.simulate()` or `plan.on_ray()` made.
      state: what `exe.run(pserver, ...)` of the server, or `step` of the job returned. Each rank's
        rows are taken from its device, and nothing is gathered.
      tag: a name of this save that all processes of the job share, and that no other run has.
        Pieces with different tags are not put together. Only processes that were not started
        together need it. Others know their run (`dtrans.checkpoint.runs`), by which pieces that a
        crash left of an earlier run are told, and replaced.

    Raises:
      ConfigError: the path has a whole checkpoint, or pieces that may be of this run; or orbax is
        not installed.
      StateError: an array is not there, has another shape or dtype, or was donated.
      UnknownEndpointError: the plan has no such server.

    Source: `checkpoint_notify` of Paddle, at which each server saves its own; `save_persistables`
    of its meta_optimizers/sharding/utils.py, by which each rank saves what it owns.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     dtrans.checkpoint.save(f"{folder}/300", plan, "127.0.0.1:6174", {"params/w": jnp.ones(3)})
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
    values = checked(plan, endpoint, state)
    write(path, _layout(plan), endpoint, values, mark_of(run_of(endpoint), tag))


def save_serving(
    path: Folder, plan: PServerPlan, endpoint: str, state: Mapping[str, Any], mark: Mark
) -> None:
    """Save what a server holds while it serves.

    With asynchronous trainers each server has counted other steps, and so its copy of a count may
    be another; what is taken up later is that of the first server, with a `CheckpointWarning`.

    Args:
      path, plan, endpoint, state: as those of `save`.
      mark: of the run and the step.

    Raises:
      As `save`.
    """
    check_plan(plan)
    write(
        path,
        _layout(plan),
        endpoint,
        checked(plan, endpoint, state),
        mark,
        goes_on=not plan.sync_mode,
        serving=True,
    )


def check(path: Folder, job: Job) -> None:
    """Check before training that `save(path, job, state)` will find its place.

    Args:
      path, job: as those of `save`.

    Raises:
      ConfigError: the path has a whole checkpoint, or pieces that may be of this run; it is no
        folder, or cannot be written; the plan of the job has no checkpoints; or orbax is not
        installed.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> job = dtrans.nccl2(dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init), trainers=2).simulate()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     dtrans.checkpoint.check(f"{folder}/300", job)
    """
    layout, here = _pieces(job)
    check_place(path, layout, here, _mark_of_job(job, layout, here, None))


def _layout(plan: PServerPlan) -> PieceLayout:
    who = {ep: f"pserver-{i}" for i, ep in enumerate(plan.servers)}
    return PieceLayout(
        plan.main,
        (*plan.overview, *held_rows(plan)),
        who | ({TRAINER: "trainer-0"} if plan.frozen else {}),
    )


def _pieces(job: Any) -> tuple[PieceLayout, list[str]]:
    """The pieces of a job, and who of this process saves one."""
    plan = job.plan
    if isinstance(plan, PServerPlan):
        check_plan(plan)
        layout = _layout(plan)
        return layout, [] if job.is_driver else [who for who in job.roles if who in layout.pieces]
    if isinstance(plan, CollectivePlan):
        layout = PieceLayout(
            plan.main, collective_state.rows_of(plan), collective_state.pieces_of(plan)
        )
        return layout, [] if job.is_driver else collective_state.savers(job)
    return PieceLayout(plan.main, step_rows(plan.main, TRAINER), {TRAINER: "trainer-0"}), [
        TRAINER
    ] * job.saves


def _save_job(path: Folder, job: Any, state: Any, tag: str | None) -> None:
    if job.is_driver:
        job.check(state)
        job.save(path, tag=tag)
        return
    layout, here = _pieces(job)
    mark = _mark_of_job(job, layout, here, tag)
    for who, values in _values(job, state, here):
        write(path, layout, who, values, mark)


def _mark_of_job(job: Any, layout: PieceLayout, here: Iterable[str], tag: str | None) -> Mark:
    return mark_of(job.run_id, tag, alone=layout.pieces.keys() <= {*here})


def _values(job: Any, state: Any, here: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each of those who save, and what it holds; one at a time, since it is copied to the host."""
    plan = job.plan
    if isinstance(plan, PServerPlan):
        job.check(state)
        for who in here:
            if who == TRAINER:
                yield who, checked_trainer(plan, job.params(state))
            else:
                yield who, checked(plan, who, job.held(state, who))
    elif isinstance(plan, CollectivePlan):
        held = collective_state.checked_state(job, state)
        for who in here:
            yield who, collective_state.values_of(plan, who, held)
    else:  # put together by all processes, and saved by one
        whole = arrays_of(plan.main, job.params(state), job.opt_state(state))
        for who in here:
            yield who, whole


def save_trainer(path: Folder, plan: PServerPlan, params: Any, *, tag: str | None = None) -> None:
    """Save what no server holds, in the process of trainer 0; nothing where the servers hold
    everything.

    These are `plan.frozen`: leaves that nothing changes, and those of which each trainer makes its
    own, such as batch statistics. Of the latter the checkpoint has those of trainer 0.

    Args:
      path, plan, tag: as in `save`.
      params: the parameters of trainer 0, the whole pytree.

    Raises:
      ConfigError: the path has a piece of trainer 0, or pieces of another job; or orbax is not
        installed.
      TraceError: `params` has another structure than the plan's step takes; StateError: another
        shape or dtype.

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
      >>> with tempfile.TemporaryDirectory() as path:
      ...     dtrans.checkpoint.save(path, plan, "127.0.0.1:6174", {"params/w": jnp.ones(3)})
      ...     dtrans.checkpoint.save_trainer(path, plan, {"scale": jnp.array(2.0), "w": jnp.ones(3)})
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
            checked_trainer(plan, params),
            mark_of(run_of(TRAINER), tag),
        )


@overload
def restore(path: Folder, plan: PServerPlan, endpoint: str) -> dict[str, Any]: ...


@overload
def restore(path: Folder, job: Job, /) -> Any: ...


def restore(path: Folder, plan: Any, endpoint: Any = None) -> Any:
    """What this process is to hold, from a checkpoint of any job of the same step: a server, or
    trainers or ranks.

        restore(path, plan, endpoint)     what a server holds, in its process
        restore(path, job)                the state of a job, in each of its processes

    `exe.run(pserver, restore(path, plan, endpoint))`, or `job.step(restore(path, job), *batch)`,
    goes on where the saved job ended; it may have been one of servers, trainers or ranks, whichever
    this is. Of the saved arrays those are read that have rows of this process, each of them whole:
    about what it holds, or the saved rows where they were more. Each device is given its own, and
    has no more at any time.

    What was not saved, since it is no part of the step, begins anew: backups of DC-ASGD are copies
    of the parameters, as in `scatter`, and a loss scale has its first value.

    Args:
      path: that of `save`.
      plan, endpoint: of the job that is to go on, and the server.
      job: that is to go on: what `plan.on_mesh()`, `plan.on_cluster()`, `plan.simulate()` or
        `plan.on_ray()` made.

    Raises:
      StateError: there is no checkpoint, or pieces of it are missing, unreadable or of several
        jobs; it is one of another step (names, shapes, dtypes); or copies of one array on several
        servers are not the same.
      UnknownEndpointError: the plan has no such server.
      ConfigError: orbax is not installed.

    Source: `load_persistables` of Paddle, and the load operators of its servers' startup programs.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init)
      >>> one, two = "127.0.0.1:6174", "127.0.0.1:6174,127.0.0.1:6175"
      >>> rows = dtrans.BlockPlacement(min_block_size=1)
      >>> saved, plan = (dtrans.pserver(main, startup, pservers=ps, placement=rows) for ps in (one, two))
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
        return _restored_job(path, plan)
    check_plan(plan)
    plan.servers[endpoint]  # raises UnknownEndpointError
    saved = Checkpoint.at(path).of(plan.main)
    sources = starts(plan, endpoint, saved.rows)
    targets = {
        row.slice_name: dataclasses.replace(row, origin_name=origin)
        for row, origin in sources
        if origin is not None
    }
    found: dict[str, Any] = dict(_table_arrays(saved, plan.servers[endpoint], targets))
    rest = [target for n, target in targets.items() if n not in found]
    first = _first(saved, plan.servers[endpoint].startup)
    by_name = None if first is None else lambda target: first()[target.slice_name]
    found |= zip((x.slice_name for x in rest), saved.arrays(rest, by_name), strict=True)
    return {
        row.slice_name: jnp.zeros(row.slice_shape, row.dtype)
        if origin is None
        else found[row.slice_name]
        for row, origin in sources
    }


def _table_arrays(
    saved: Checkpoint, programs: Any, targets: Mapping[str, VarDistributed]
) -> Iterator[tuple[str, TableArray]]:
    """The blocks of tables of a server, and their state, of which rows are taken when it serves."""
    (serves,) = (e for e in programs.main.eqns if e.primitive is listen_and_serv_p)
    on_use = {e.params["table"]: e for e in programs.startup.eqns if e.primitive is init_on_use_p}
    served = serves.params.get("tables")
    blocks = {} if served is None else served.blocks
    args = saved.init_args(programs.startup) if blocks else None
    for block in blocks.values():
        names = [n for n in block.held if n in targets]
        if block.whole or len(names) < len(block.held):
            continue
        table = saved.table([targets[n] for n in names], on_use.get(block.name), args)
        if table is not None:
            yield from (
                (
                    n,
                    TableArray(
                        jax.ShapeDtypeStruct(targets[n].slice_shape, targets[n].dtype), table, i
                    ),
                )
                for i, n in enumerate(names)
            )


def _first(saved: Checkpoint, init: Program) -> Callable[[], Mapping[str, np.ndarray]] | None:
    """Gives what an init makes of the arguments of the job that saved, by name; None where all rows
    are saved."""
    args = saved.init_args(init)
    if args is None:
        return None

    @functools.cache
    def made() -> Mapping[str, np.ndarray]:
        return dict(zip(init.out_names, map(as_numpy, init.compiled(*args)), strict=True))

    return made


def _slices_of(saved: Checkpoint, init: Program | None) -> First | None:
    """Gives slices of what the init of one device makes; None where nothing is to be made, or it is
    not there."""
    first = None if init is None else _first(saved, init)
    return None if first is None else lambda target: first()[target.origin_name][target.index]


def _restored_job(path: Folder, job: Any) -> Any:
    if job.is_driver:
        return job.restore(path)
    if isinstance(job.plan, PServerPlan):
        check_plan(job.plan)
        servers = [who for who in job.roles if who in job.plan.servers]
        if len(job.roles) == 1 and servers:
            state = restore(path, job.plan, *servers)
            job.restored = Path(path)
            return state
        if not servers:  # a trainer holds parameters alone
            main = job.plan.main
            tables = job.plan.tables.of
            rows = [
                x for x in step_rows(main) if x.origin_name in {*main.args[0].names} - {*tables}
            ]
            values = Checkpoint.at(path).of(main).arrays(rows)
            held: dict[str, Any] = dict(zip((x.origin_name for x in rows), values, strict=True))
            held |= {
                n: np.broadcast_to(np.zeros((), main.inputs[n].dtype), main.inputs[n].shape)
                for n in tables
            }
            return job.state_of(main.args[0].unflatten([held[n] for n in main.args[0].names]), None)
    if not isinstance(job.plan, CollectivePlan):
        return job.state_of(*load(path, job.plan.main, job.plan.startup))
    saved = Checkpoint.at(path).of(job.plan.main)
    read = functools.partial(saved.on_host, first=_slices_of(saved, job.plan.startup))
    return collective_state.state_of(job, saved.rows, read)


def restore_trainer(path: Folder, plan: PServerPlan, params: Any) -> Any:
    """The parameters of a trainer, with what no server holds (`plan.frozen`) taken from a
    checkpoint.

    The other leaves are the servers', and are as they were given.

    Args:
      path, plan: as in `restore`.
      params: what the trainer starts from: `exe.run(t.get_trainer_startup_program(), ...)`.

    Raises:
      As `restore`; TraceError: `params` has another structure than the plan's step takes.

    Example: see `save_trainer`.
    """
    check_plan(plan)
    spec = plan.main.args[0]
    now = named(spec, params, "params")
    if not plan.frozen:
        return params
    saved = Checkpoint.at(path).of(plan.main)
    now |= dict(zip(plan.frozen, saved.arrays(held_rows(plan)), strict=True))
    return spec.unflatten([now[n] for n in spec.names])


def load(path: Folder, main: Program, startup: Program | None = None) -> tuple[Any, Any]:
    """The single-device `(params, opt_state)` of a checkpoint.

    Args:
      path: that of `save`.
      main: the traced step, `dtrans.trace(step, params, opt_state, *batch)` or `plan.main`; it says
        what the pytrees are.
      startup: the traced init, `dtrans.trace(init, ...)` or `plan.startup`: it makes the rows of
        tables that no step has looked up, which are not saved.

    Returns:
      New arrays on the default device, in the pytrees that the step takes: it may go on, jitted, on
      one device.

    Raises:
      StateError, ConfigError: as `restore`.

    Source: `load_persistables` of Paddle.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init)
      >>> plan = dtrans.pserver(main, startup)
      >>> with tempfile.TemporaryDirectory() as path:
      ...     dtrans.checkpoint.save(path, plan, "127.0.0.1:6174", {"params/w": jnp.array([7.0, 8.0, 9.0])})
      ...     dtrans.checkpoint.load(path, main)[0]
      {'w': Array([7., 8., 9.], dtype=float32)}
    """
    check_step(main)
    saved = Checkpoint.at(path).of(main)
    return as_trees(main, saved.arrays(step_rows(main), _slices_of(saved, startup)))


def latest(folder: Folder) -> Path | None:
    """The last checkpoint in a folder of checkpoints that is whole; None where there is none.

    One that is not, that cannot be read, or whose pieces are of several runs or steps, is passed
    over with a `CheckpointWarning`.

    Args:
      folder: whose folders with a number for a name are checkpoints: `ckpt/100`, `ckpt/200`.

    Raises:
      ConfigError: orbax is not installed.

    Example:
      >>> import tempfile, dtrans
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     print(dtrans.checkpoint.latest(folder))
      None
    """
    folder = Path(folder)
    steps = (
        [p for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()]
        if folder.is_dir()
        else []
    )
    for path in sorted(steps, key=lambda p: int(p.name), reverse=True):
        try:
            Checkpoint.at(path)
        except StateError as e:
            warnings.warn(CheckpointWarning(f"{path} is passed over: {e}"), stacklevel=2)
            continue
        return path
    return None
