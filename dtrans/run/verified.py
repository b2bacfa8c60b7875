"""Traced steps of jobs: what `plan.verify()` evaluates is what `job.step` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.job import Job
from dtrans.parameter_server.options import Async
from dtrans.parameter_server.plan import PServerPlan
from dtrans.plan import Plan, realises
from dtrans.run.base.platforms import resolve_for_platform
from dtrans.run.base.spmd import Function
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.mesh import MeshTrainers
from dtrans.run.collective.trainers import StepLayout
from dtrans.run.parameter_server.mesh import LateRowsJob
from dtrans.run.parameter_server.ordered_job import OrderedJob
from dtrans.run.replays import replay_lazy, replay_local_steps, replay_turns
from dtrans.verification.random_points import random_arguments
from dtrans.verification.state_placement import TracedStep


class _AbstractTrainers(MeshTrainers):
    """Trainers on a mesh without devices: their step is traced, and nothing runs.

    Args:
      axes: name to size.
    """

    def __init__(self, axes: Sequence[tuple[str, int]]) -> None:
        names, sizes = [n for n, _ in axes], [s for _, s in axes]
        super().__init__(AbstractMesh(tuple(sizes), tuple(names)))  # type: ignore[arg-type]

    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        return list(xs)

    def place_state(self, x: Any, axis: int | None) -> Any:
        return x

    def place_batch(self, arrays: Sequence[Any], shares: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def map_program(self, program: Program, layout: StepLayout) -> Function:
        # of what only the first rank has right, every rank gives a row: other outputs must agree
        ways = tuple(("each", None) if way == "first" else (way, axis) for way, axis in layout.ways)
        run = super().map_program(program, dataclasses.replace(layout, ways=ways))

        def step(*args: Any) -> list[Any]:
            found = run(*args)
            return [
                x[0] if way == "first" else x
                for x, (way, _) in zip(found, layout.ways, strict=True)
            ]

        return step


@realises(CollectivePlan, "verify")
def traced_on_mesh(plan: CollectivePlan, batch: Sequence[Any]) -> TracedStep:
    """Trace the step of trainers on a mesh, and a replay of steps that they take by themselves."""
    run_on = resolve_for_platform(plan, "cpu")
    job = CollectiveJob(run_on, _AbstractTrainers(plan.axes), donate=False)
    traced = traced_step(job, batch, placed_by=run_on.simulate())
    if plan.options.local_sgd is None:
        return traced
    specs = plan.main.args[2:]
    types = [t for spec, b in zip(specs, batch, strict=True) for t in spec.flatten(b)]
    state = [plan.main.inputs[n] for spec in plan.main.args[:2] for n in spec.names]
    whole = plan.main.specialize_flat([*state, *types])
    replay = replay_local_steps(plan, whole)
    return dataclasses.replace(traced, replay=replay, steps_per_replay=plan.options.local_sgd)


@realises(PServerPlan, "verify")
def traced_servers(plan: PServerPlan, batch: Sequence[Any]) -> TracedStep:
    """Trace the step of a job of parameter servers: simulated, or of asynchronous roles in a
    recorded order."""
    of = plan.tables.of
    rows = min((t.lookups.rows for t in of.values()), default=0)
    if not plan.sync_mode:
        return dataclasses.replace(traced_turns(plan, batch), rows=rows)
    types = [t for spec, b in zip(plan.main.args[2:], batch, strict=True) for t in spec.flatten(b)]
    replay = replay_lazy(plan, types)
    traced = dataclasses.replace(traced_simulation(plan, batch), rows=rows, replay=replay)
    if not any(t.catches_up for t in of.values()):
        return traced
    late = dataclasses.replace(
        traced_step(LateRowsJob(plan), batch), rows=rows, init=None, replay=replay
    )
    return dataclasses.replace(traced, other_steps=(late,))


def traced_turns(plan: PServerPlan, batch: Sequence[Any]) -> TracedStep:
    """Trace the turns of an asynchronous job, and their sequential replay."""
    begins = random_arguments(plan.startup.inputs, 0) if plan.tables.of else []
    job = OrderedJob(plan, begins)
    specs = plan.main.args[2:]
    named = [
        pair
        for spec, b in zip(specs, batch, strict=True)
        for pair in zip(spec.names, spec.flatten(b), strict=True)
    ]
    replay = replay_turns(plan, dict(named), begins)
    stacked = [spec.unflatten([replay.inputs[n] for n in spec.names]) for spec in specs]
    order = job.order
    turns = order.rounds if plan.push_every else len(order.turns)
    return dataclasses.replace(
        traced_step(job, stacked), replay=replay, steps_per_replay=turns, unfollowed=unmerged(plan)
    )


def unmerged(plan: PServerPlan) -> tuple[str, ...]:
    """Return the reason why a job may do what its recorded order does not: merge gradients; nothing
    otherwise."""
    queue = plan.options.mode.communicator if isinstance(plan.options.mode, Async) else None
    if queue is None or queue.max_merge_var_num == 1:
        return ()
    return (
        "gradients of several steps that a communicator merges, which the recorded order sends one "
        "by one; "
        "max_merge_var_num=1 lets it merge none",
    )


@realises(Plan, "verify")
def traced_simulation(plan: Plan, batch: Sequence[Any]) -> TracedStep:
    """Trace the step of a simulated job."""
    return traced_step(plan.simulate(), batch)


def traced_step(
    job: Job | OrderedJob, batch: Sequence[Any], placed_by: Job | None = None
) -> TracedStep:
    """Trace the step of a job.

    Args:
      placed_by: a job whose states are like those of this one, and have arrays; this one by
        default.
      batch: types of what `job.step` takes behind the state: pytrees of `jax.ShapeDtypeStruct`.
    """
    main = job.plan.main
    specs = main.args[:2]
    names = [n for spec in specs for n in spec.names]
    made: dict[str, Any] = {}

    def state_of(leaves: Mapping[str, Any]) -> list[Any]:
        trees = [spec.unflatten([leaves[n] for n in spec.names]) for spec in specs]
        state = (placed_by or job).state_of(*trees)
        made["state"] = state
        return jax.tree.leaves(state)

    state_of({n: _full(main.inputs[n], main.frozen_constants.get(n, 0)) for n in names})
    state = made["state"]
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(state)
    ]
    jaxpr: Any = jax.make_jaxpr(lambda state, *batch: job.step(state, *batch))(state, *batch)
    traced = TracedStep(jaxpr, paths, state_of, _traced_init(placed_by or job))
    # the replay of an asynchronous job has parts of its own
    return traced if isinstance(job, OrderedJob) else _with_equal_parts(traced, job.plan)


def _with_equal_parts(traced: TracedStep, plan: Any) -> TracedStep:
    """Return the step, to be compared with equal parts of the batch where parts have reductions of
    their own rows (`dtrans.local`)."""
    shared = plan.shared
    if shared is None or not shared.part.local:
        return traced
    rows = {n: (shared.part.program.inputs[n].shape[axis], axis) for n, axis in shared.axes.items()}
    parts = {n: (axis, shared.rows // size) for n, (size, axis) in rows.items()}
    reason = "reductions in dtrans.local(), which one device has of parts that are equal"
    return dataclasses.replace(traced, equal_parts=parts, unfollowed=(reason,))


def _traced_init(job: Job | OrderedJob) -> Any:
    """Trace the init of a job: the startup programs of its roles, and where they put what they
    make."""
    startup: Program = job.plan.startup
    types = [spec.unflatten([startup.inputs[n] for n in spec.names]) for spec in startup.args]
    return jax.make_jaxpr(lambda *args: job.init(*args))(*types)


def _full(t: Any, value: Any) -> Any:
    if jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), t.shape) if t.shape else jax.random.key(0)
    return jnp.asarray(np.full(t.shape, value, np.dtype(t.dtype)))
