"""Traced steps of jobs, which `plan.verify()` compares with the single-device step.

To trace a step, this module calls `job.step` with abstract arrays, on devices that need not exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import values_at
from dtrans.job import Job
from dtrans.parameter_server.options import Async, Sync
from dtrans.parameter_server.plan import PServerPlan
from dtrans.plan import Plan, register_runner
from dtrans.run.base.platforms import resolve_for_platform
from dtrans.run.base.spmd import AxisSharding, Function
from dtrans.run.collective.job import CollectiveJob
from dtrans.run.collective.mesh import MeshTrainers
from dtrans.run.collective.trainers import StepLayout
from dtrans.run.parameter_server.mesh import VERIFY, LateRowsJob, MeshJob
from dtrans.run.parameter_server.ordered_job import OrderedJob
from dtrans.run.replays import replay_lazy, replay_local_steps, replay_turns
from dtrans.verification.random_points import random_arguments
from dtrans.verification.state_placement import TracedStep


class _AbstractTrainers(MeshTrainers):
    """Trainers on a mesh without devices, so that a step for any number of devices can be traced.

    Args:
      axes: names and sizes of the axes.
      over: the axes that split the batch.
    """

    def __init__(self, axes: Sequence[tuple[str, int]], over: tuple[str, ...]) -> None:
        names, sizes = zip(*axes, strict=True)
        # a constructor's default differs between versions of JAX
        auto = (AxisType.Auto,) * len(names)
        mesh = AbstractMesh(sizes, names, axis_types=auto)
        super().__init__(mesh, over)  # type: ignore[arg-type]

    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        return list(xs)

    def place_state(self, x: Any, sharding: AxisSharding) -> Any:
        return x

    def place_batch(self, arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def map_program(self, program: Program, layout: StepLayout) -> Function:
        # `verify` checks that replicated outputs are equal on all ranks. Outputs that the layout
        # takes from the first rank may differ between ranks. So every rank returns such an output
        # as a row, and the first row is selected.
        ways: list[tuple[str, Any]] = []
        for way, how in layout.ways:
            ways.append(("each", None) if way == "first" else (way, how))
        run = super().map_program(program, dataclasses.replace(layout, ways=tuple(ways)))

        def step(*args: Any) -> list[Any]:
            found = list(run(*args))
            for k, (way, _) in enumerate(layout.ways):
                if way == "first":
                    found[k] = found[k][0]
            return found

        return step


@register_runner(CollectivePlan, "verify")
def trace_on_mesh(plan: CollectivePlan, batch: Sequence[Any]) -> TracedStep:
    """Trace the step of trainers on a mesh, for `plan.verify()`.

    With `local_sgd`, the result includes a reference, which takes the local steps on one device.

    Args:
      plan: the plan.
      batch: types of the arguments of `job.step` after the state.
    """
    resolved = resolve_for_platform(plan, "cpu")
    job = CollectiveJob(resolved, _AbstractTrainers(plan.axes, plan.options.over), donate=False)
    traced = trace_step(job, batch, placed_by=resolved.simulate())
    if plan.options.local_sgd is None:
        return traced
    state = values_at(plan.main.inputs, all_names(plan.main.args[:2]))
    step = plan.main.specialize_flat([*state, *_batch_types(plan, batch)])
    replay = replay_local_steps(plan, step)
    return dataclasses.replace(traced, replay=replay, steps_per_replay=plan.options.local_sgd)


def _batch_types(plan: Plan, batch: Sequence[Any]) -> list[Any]:
    """Return shape and dtype of all arrays of a batch, as a flat list."""
    specs = plan.main.args[2:]
    return [t for spec, arg in zip(specs, batch, strict=True) for t in spec.flatten(arg)]


@register_runner(PServerPlan, "verify")
def trace_servers(plan: PServerPlan, batch: Sequence[Any]) -> TracedStep:
    """Trace the step of a job with parameter servers, for `plan.verify()`.

    A synchronous job is simulated on one device. In an asynchronous job, trainers take their steps
    in a fixed order. Compression rounds numbers, so the traced job sends uncompressed arrays.

    Args:
      plan: the plan.
      batch: types of the arguments of `job.step` after the state.
    """
    if plan.compression.is_used:
        exact = trace_servers(_without_compression(plan), batch)
        why = "the rounding of compressed messages, which verify() leaves out"
        return dataclasses.replace(exact, unevaluated=(*exact.unevaluated, why))
    tables = plan.tables.of
    rows = min((t.lookups.starts for t in tables.values()), default=0)
    if not plan.sync_mode:
        return dataclasses.replace(trace_turns(plan, batch), rows=rows)
    replay = replay_lazy(plan, _batch_types(plan, batch))
    job = MeshJob(plan, jax.devices()[:1], donate=False, way=VERIFY)
    traced = trace_step(job, batch)
    remarks = (*traced.unevaluated, *row_filters(plan))
    traced = dataclasses.replace(traced, rows=rows, replay=replay, unevaluated=remarks)
    if not any(t.changes_unread_rows for t in tables.values()):
        return traced
    # A second trace covers the code by which rows catch up on missed steps.
    late = dataclasses.replace(
        trace_step(LateRowsJob(plan), batch), rows=rows, init=None, replay=replay
    )
    return dataclasses.replace(traced, other_steps=(late,))


def _without_compression(plan: PServerPlan) -> PServerPlan:
    """Return a plan for the same job without compression of messages."""
    recipe = plan.recipe
    assert recipe is not None, "only dtrans.pserver returns plans with compression"
    exact = recipe.transform(**{**recipe.arguments, "mode": Sync()})
    assert isinstance(exact, PServerPlan)
    return exact


def trace_turns(plan: PServerPlan, batch: Sequence[Any]) -> TracedStep:
    """Trace an asynchronous job with a fixed order of the trainers' steps, and its reference.

    The reference takes the same steps on one device (`dtrans.run.replays`).
    """
    init_args: Sequence[Any] = []
    if plan.tables.of:
        init_args = random_arguments(plan.startup.inputs, 0)
    job = OrderedJob(plan, init_args)
    specs = plan.main.args[2:]
    names = all_names(specs)
    types = dict(zip(names, _batch_types(plan, batch), strict=True))
    replay = replay_turns(plan, types, init_args)
    stacked = [spec.unflatten_named(replay.inputs) for spec in specs]
    order = job.order
    turns = order.rounds if plan.push_every else len(order.turns)
    remarks = (*unmerged(plan), *row_filters(plan))
    return dataclasses.replace(
        trace_step(job, stacked), replay=replay, steps_per_replay=turns, unevaluated=remarks
    )


def unmerged(plan: PServerPlan) -> tuple[str, ...]:
    """Return a remark if trainers merge gradients of several steps before sending, else ().

    The traced job sends the gradients of each step, so `plan.verify()` does not check the merge.
    """
    mode = plan.options.mode
    if not isinstance(mode, Async) or mode.communicator is None:
        return ()
    if mode.communicator.max_merge_var_num == 1:
        return ()
    return (
        "gradients that a communicator merges over several steps, but verify() sends step by step; "
        "set max_merge_var_num=1 to send them without merging",
    )


def row_filters(plan: PServerPlan) -> tuple[str, ...]:
    """Return a remark for each embedding table with a row filter, which `plan.verify()` leaves out.

    A row filter decides which rows are stored. A traced step stores all rows.
    """
    found = []
    for n, t in plan.tables.of.items():
        if t.row_filter is not None:
            found.append(
                f"the row filter of {n} ({t.row_filter}): verify() compares a step in which all "
                "rows are admitted"
            )
    return tuple(found)


@register_runner(Plan, "verify")
def trace_simulation(plan: Plan, batch: Sequence[Any]) -> TracedStep:
    """Trace the step of a job that is simulated on one device, for `plan.verify()`."""
    return trace_step(plan.simulate(), batch)


def trace_step(
    job: Job | OrderedJob, batch: Sequence[Any], placed_by: Job | None = None
) -> TracedStep:
    """Trace the step of a job, for `plan.verify()`.

    Args:
      job: the job.
      batch: types of the arguments of `job.step` after the state: pytrees of
        `jax.ShapeDtypeStruct`.
      placed_by: the job that creates the state for the traced step; by default, `job`. The states
        of both jobs must have the same structure.
    """
    main = job.plan.main
    specs = main.args[:2]
    placing = placed_by or job

    def state_tree(leaves: Mapping[str, Any]) -> Any:
        params, opt_state = (spec.unflatten_named(leaves) for spec in specs)
        return placing.state_of(params, opt_state)

    def state_of(leaves: Mapping[str, Any]) -> list[Any]:
        return jax.tree.leaves(state_tree(leaves))

    arrays = {}
    for spec in specs:
        for n in spec.names:
            arrays[n] = _full(main.inputs[n], main.frozen_constants.get(n, 0))
    state = state_tree(arrays)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(state)
    ]
    jaxpr: Any = jax.make_jaxpr(lambda state, *batch: job.step(state, *batch))(state, *batch)
    traced = TracedStep(jaxpr, paths, state_of, _trace_init(placing))
    if isinstance(job, OrderedJob):
        return traced  # an ordered job and its replay split the batch equally
    return _with_equal_parts(traced, job.plan)


def _with_equal_parts(traced: TracedStep, plan: Any) -> TracedStep:
    """Let `plan.verify()` test a step with `dtrans.local` on parts with equal rows.

    Inside of `dtrans.local`, a step reduces over one trainer's part of the batch. On one device, it
    reduces over the full batch instead. The results agree only if all parts have equal rows, so the
    test uses such a batch. Steps without `dtrans.local` stay unchanged.
    """
    shared = plan.shared
    if shared is None or not shared.part.local:
        return traced
    parts = {}
    for n, axis in shared.axes.items():
        size = shared.part.program.inputs[n].shape[axis]
        parts[n] = axis, shared.rows // size
    reason = "reductions in dtrans.local() on parts that differ, which one device does not compute"
    return dataclasses.replace(traced, equal_parts=parts, unevaluated=(reason,))


def _trace_init(job: Job | OrderedJob) -> Any:
    """Trace `job.init`, which runs the startup programs of all roles and places the state."""
    startup: Program = job.plan.startup
    types = [spec.unflatten_named(startup.inputs) for spec in startup.args]
    return jax.make_jaxpr(lambda *args: job.init(*args))(*types)


def _full(t: Any, value: Any) -> Any:
    """Return an array of type `t` filled with `value`; for PRNG keys, an array of keys."""
    if jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), t.shape) if t.shape else jax.random.key(0)
    return jnp.asarray(np.full(t.shape, value, np.dtype(t.dtype)))
