"""Compilation of a pipelined step into a list of instructions.

The list is written once for each batch shape, in this order:

    1. transfers of parameters to stages that read the parameters but do not store them
    2. zeros for the sums of gradients
    3. the tasks of the schedule: programs of micro-batches, and transfers between stages
    4. the update, and merges of results (`dtrans.run.pipeline_parallel.compile_update`)

An instruction reads and writes numbered *slots* (entries of a list of values). Each slot is emptied
after the last instruction that reads it. So the peak memory depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.pipeline_parallel.stage_programs import StagePrograms
from dtrans.pipeline_parallel.staged_model import StepPrograms
from dtrans.pipeline_parallel.task import Task
from dtrans.run.pipeline_parallel.compile_update import write_results, write_update
from dtrans.run.pipeline_parallel.instructions import StepProgram
from dtrans.run.pipeline_parallel.micro_batch import is_numbered, of_micro_batch
from dtrans.run.pipeline_parallel.slots import Slots, with_releases
from dtrans.run.pipeline_parallel.stage_devices import SAME
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement
from dtrans.run.pipeline_parallel.step_builder import StepBuilder


def compile_step(
    at: StagePlacement,
    programs: StepPrograms,
    batch: Mapping[str, Any],
    values: Program | None = None,
) -> StepProgram:
    """Return the instructions of a step.

    Args:
      at: the devices of the plan's stages.
      programs: the programs of the stages for this batch.
      batch: shapes and dtypes, by name: arrays of the global batch, and outputs of `values`.
      values: the program for values of the full batch that micro-batches read. It runs before them.
        None if they read no such values.
    """
    d = StepBuilder(at, programs, batch, Slots(at, programs, batch))
    slots = d.slots
    _send_params(d)
    for stage in programs.stages:
        _write_zeros(d, stage)
    saved: dict[tuple[int, int], tuple[int, ...]] = {}
    for task in at.plan.schedule.sequence():
        stage = programs.stages[task.stage]
        _TASKS[task.kind](d, stage, task)
        if task.kind == "F":
            of_task = tuple(slots.value(stage.index, n, task.micro) for n in stage.saved)
            saved[task.stage, task.micro] = of_task
    new_state, from_update = write_update(d)
    from_forward, forward_state = write_results(d)
    state, results = new_state | forward_state, from_forward | from_update
    stay = {*slots.fixed, *state.values(), *(slot for slot, _, _ in results.values())}
    if not at.donate:
        stay |= set(slots.inputs.values())
    return StepProgram(
        with_releases(d.instructions, stay),
        len(slots),
        slots.inputs,
        slots.fixed,
        state,
        results,
        saved,
        slots.in_flight(),
        values,
    )


def _send_params(d: StepBuilder) -> None:
    """Write transfers of parameters to stages that read the parameters but do not store them."""
    if d.at.host is not None:
        return  # With `offload`, each task fetches the parameters that it reads.
    plan, sent = d.at.plan, set()
    for s in d.programs.stages:
        for n in s.params:
            target, home = d.slots.param(s.index, n), plan.model.homes[n]
            device = plan.device_of(home)
            if device != plan.device_of(s.index) and target not in sent:
                kind = d.at.state_kind(n)
                d.move(d.slots.state(device, n), target, (home, s.index), kind, n)
                sent.add(target)


def _fetch_state(d: StepBuilder, p: Program, s: StagePrograms) -> None:
    """Write transfers from the host of the state that a task reads, for the option `offload`."""
    for n in p.in_names:
        if n in s.state:
            stored, there = d.slots.state(s.index, n), d.slots.shared_state(s.index, n)
            d.move(stored, there, (s.index, s.index), SAME, n)
        if n in s.params:
            home = d.at.plan.model.homes[n]
            stored = d.slots.state(d.at.plan.device_of(home), n)
            there, kind = d.slots.param(s.index, n), d.at.state_kind(n)
            d.move(stored, there, (home, s.index), kind, n)


def _write_zeros(d: StepBuilder, s: StagePrograms) -> None:
    """Write the instruction that sets the sums of a stage's gradients to zero."""
    if not s.leaves or d.at.plan.options.clip_of_each is not None:
        return
    inputs = (s.weights or s.backward).inputs
    types = values_at(inputs, s.sums)

    def zeros() -> list[Any]:
        return [jnp.zeros(t.shape, t.dtype) for t in types]

    makes = [d.slots.sum_of(s.index, n, None) for n in s.leaves]
    d.run((s, "zeros"), lambda: zeros, s.index, (), makes, f"zeros of stage {s.index}")


def _write_forward(d: StepBuilder, s: StagePrograms, task: Task) -> None:
    """Write the forward pass of a micro-batch, and the transfers to the next stage."""
    k, m, kind = s.index, task.micro, d.at.per_replica
    _write_task(d, s.forward, s, task, lambda n: d.slots.value(k, n, m))
    for n in s.sends:
        source = d.slots.slot(kind, "value", k, n, m)
        target = d.slots.slot(kind, "value", k + 1, n, m)
        d.move(source, target, (k, k + 1), kind, n)


def _write_backward(d: StepBuilder, s: StagePrograms, task: Task) -> None:
    """Write the backward pass of a micro-batch, and the transfers to the previous stage."""
    k, m, kind = s.index, task.micro, d.at.per_replica
    _write_task(d, s.backward, s, task, lambda n: d.slots.output(s, n, m))
    for n in s.backward.out_names:
        if n in s.cotangents:
            source = d.slots.slot(kind, "back", k, n, m)
            target = d.slots.slot(kind, "cotangent", k - 1, n, m)
            d.move(source, target, (k, k - 1), kind, n)


def _write_weights(d: StepBuilder, s: StagePrograms, task: Task) -> None:
    """Write the computation of the gradients of weights for a micro-batch."""
    if s.weights is not None:
        _write_task(d, s.weights, s, task, lambda n: d.slots.output(s, n, task.micro))


_TASKS: dict[str, Callable[[StepBuilder, StagePrograms, Task], None]] = {
    "F": _write_forward,
    "B": _write_backward,
    "W": _write_weights,
}


def _write_task(
    d: StepBuilder, p: Program, s: StagePrograms, task: Task, slot_of: Callable[[str], int]
) -> None:
    """Write the instruction that runs a program of a micro-batch.

    Args:
      d: the builder of the step.
      p: the program.
      s: the stage of the program.
      task: the task of the schedule.
      slot_of: returns the slot for an output of `p`, from the output's name.
    """
    if not p.out_names:
        return
    if d.at.host is not None:
        _fetch_state(d, p, s)
    reads = [d.slots.operand(s, n, task.micro) for n in p.in_names]
    makes = list(map(slot_of, p.out_names))
    if is_numbered(d.at, p, d.batch):
        reads.append(d.slots.micro_index(s.index, task.micro))
    # The new sums of gradients reuse the memory of the old sums.
    donated = [i for i, n in enumerate(p.in_names) if n in s.sums and n in p.outputs]
    fn = lambda: of_micro_batch(d.at, p, d.batch)
    d.run(p, fn, s.index, reads, makes, str(task), task=task, donated=donated)
