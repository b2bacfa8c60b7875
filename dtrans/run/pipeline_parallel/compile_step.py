"""A pipelined step as a list of instructions.

The list is written once for each batch shape, in the order in which the schedule dispatches tasks:

    parameters   to the stages that read them and do not hold them
    zeros        for the sums of gradients
    tasks        the programs of micro-batches, and what goes from stage to stage
    the update   and what merges results (`dtrans.run.pipeline_parallel.compile_update`)

Which slots nothing reads any more after an instruction follows from the list, and they are emptied
there: so what is alive at any time is what the schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from dtrans.ir.program import Program
from dtrans.pipeline_parallel.stage_programs import StagePrograms
from dtrans.pipeline_parallel.staged_model import StepPrograms
from dtrans.pipeline_parallel.task import Task
from dtrans.run.pipeline_parallel.compile_update import write_results, write_update
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.draft import Draft
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer
from dtrans.run.pipeline_parallel.micro_batch import is_numbered, of_micro_batch
from dtrans.run.pipeline_parallel.slots import Slots, with_releases
from dtrans.run.pipeline_parallel.stage_devices import SAME


def compile_step(
    at: Deployment, programs: StepPrograms, batch: Mapping[str, Any], values: Program | None = None
) -> StepProgram:
    """The instructions of a step.

    Args:
      at: where it runs.
      programs: those for this batch.
      batch: name to type of the arrays of the whole batch, and of what is made of it first.
      values: makes that, if anything.
    """
    d = Draft(at, programs, batch, Slots(at, programs, batch))
    _send_params(d)
    for stage in programs.stages:
        _write_zeros(d, stage)
    kept: dict[tuple[int, int], tuple[int, ...]] = {}
    for task in at.plan.schedule.sequence():
        stage = programs.stages[task.stage]
        _TASKS[task.kind](d, stage, task)
        if task.kind == "F":
            kept[task.stage, task.micro] = tuple(
                d.slots.value(stage.index, n, task.micro) for n in stage.kept
            )
    state, from_update = write_update(d)
    results, made = write_results(d)
    state, results = state | made, results | from_update
    slots = d.slots
    stay = {*slots.fixed, *state.values(), *(slot for slot, _, _ in results.values())}
    if not at.donate:
        stay |= set(slots.given.values())
    instructions = with_releases(d.instructions, stay)
    return StepProgram(
        instructions,
        len(slots),
        slots.given,
        slots.fixed,
        state,
        results,
        kept,
        slots.passing(),
        values,
    )


def _send_params(d: Draft) -> None:
    """Send parameters that several stages read to those that do not hold them."""
    if d.at.host is not None:
        return
    plan, sent = d.at.plan, set()
    for s in d.programs.stages:
        for n in s.params:
            target, home = d.slots.param(s.index, n), plan.model.homes[n]
            device = plan.device_of(home)
            if device != plan.device_of(s.index) and target not in sent:
                d.instructions.append(
                    Transfer(d.slots.state(device, n), target, home, s.index, SAME, n)
                )
                sent.add(target)


def _fetch_state(d: Draft, p: Program, s: StagePrograms) -> None:
    """Fetch the state that a program reads from the host, for one task alone."""
    for n in p.in_names:
        if n in s.state:
            held, there = d.slots.state(s.index, n), d.slots.shared_state(s.index, n)
            d.instructions.append(Transfer(held, there, s.index, s.index, SAME, n))
        if n in s.params:
            home = d.at.plan.model.homes[n]
            held = d.slots.state(d.at.plan.device_of(home), n)
            d.instructions.append(Transfer(held, d.slots.param(s.index, n), home, s.index, SAME, n))


def _write_zeros(d: Draft, s: StagePrograms) -> None:
    if not s.leaves or d.at.plan.options.clip_of_each is not None:
        return
    given = (s.weights or s.backward).inputs
    types = [given[n] for n in s.sums]

    def zeros() -> list[Any]:
        return [jnp.zeros(t.shape, t.dtype) for t in types]

    makes = [d.slots.sum_of(s.index, n, None) for n in s.leaves]
    d.run((s, "zeros"), lambda: zeros, s.index, (), makes, f"zeros of stage {s.index}")


def _write_forward(d: Draft, s: StagePrograms, task: Task) -> None:
    k, m, own = s.index, task.micro, d.at.own
    _write_task(d, s.forward, s, task, lambda n: d.slots.value(k, n, m))
    for n in s.sends:
        d.instructions.append(
            Transfer(
                d.slots.of(own, "value", k, n, m),
                d.slots.of(own, "value", k + 1, n, m),
                k,
                k + 1,
                own,
                n,
            )
        )


def _write_backward(d: Draft, s: StagePrograms, task: Task) -> None:
    k, m, own = s.index, task.micro, d.at.own
    _write_task(d, s.backward, s, task, lambda n: d.slots.made(s, n, m))
    for n in s.backward.out_names:
        if n in s.cotangents:
            d.instructions.append(
                Transfer(
                    d.slots.of(own, "back", k, n, m),
                    d.slots.of(own, "cotangent", k - 1, n, m),
                    k,
                    k - 1,
                    own,
                    n,
                )
            )


def _write_weights(d: Draft, s: StagePrograms, task: Task) -> None:
    if s.weights is not None:
        _write_task(d, s.weights, s, task, lambda n: d.slots.made(s, n, task.micro))


_TASKS: dict[str, Callable[[Draft, StagePrograms, Task], None]] = {
    "F": _write_forward,
    "B": _write_backward,
    "W": _write_weights,
}


def _write_task(
    d: Draft, p: Program, s: StagePrograms, task: Task, made: Callable[[str], int]
) -> None:
    """Write a program of a micro-batch; `made` gives the slot of each output."""
    if not p.out_names:
        return
    if d.at.host is not None:
        _fetch_state(d, p, s)
    reads = [d.slots.read(s, n, task.micro) for n in p.in_names]
    makes = [made(n) for n in p.out_names]
    if is_numbered(d.at, p, d.batch):
        reads.append(d.slots.number(s.index, task.micro))
    donated = [i for i, n in enumerate(p.in_names) if n in s.sums and n in p.outputs]
    fn = lambda: of_micro_batch(d.at, p, d.batch)
    d.run(p, fn, s.index, reads, makes, str(task), task=task, donated=donated)
