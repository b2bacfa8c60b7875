"""A pipeline, running: `init` makes the first state, `step` goes from one to the next."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.checkpoint.pserver_state import arrays_of
from dtrans.ir.pytree import TreeSpec, is_under, result_of, without
from dtrans.job import Job
from dtrans.pipeline_parallel.forward_pass import summary_name
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.results import STACK
from dtrans.plan import realises
from dtrans.run.base.batch import batch_arrays
from dtrans.run.base.lowered import LoweredStep, call_recorded, recording
from dtrans.run.base.merge import Merge
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.compile_step import compile_step
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.instructions import Instruction, StepProgram, Transfer
from dtrans.run.pipeline_parallel.processes import OneProcess
from dtrans.run.pipeline_parallel.stage_devices import OnDevices, OneDevice, Places
from dtrans.run.pipeline_parallel.state import PipelineState, StateLayout, tree_of
from dtrans.step.summary import merge
from dtrans.step_meter import metered


class PipelineJob(Job):
    """A plan, running. `init` and `step` are functions of a state; the job holds what it compiled.

    Args:
      processes: those that the stages are in, and so what to run, and where.
    """

    def __init__(self, processes: OneProcess) -> None:
        self.processes, self.at = processes, processes.at
        self.plan, self.places = self.at.plan, self.at.places
        self._layout = StateLayout(self.at)
        self._tapes: dict[Any, StepProgram] = {}
        self.run_id, self.saves = processes.run_id, processes.saves
        self._shown: dict[str, Any] = {}
        self._last: Any = lambda: None  # the state that was returned last: it needs no second look

    # -- what a user calls -----------------------------------------------------------------------

    def init(self, *args: Any) -> PipelineState:
        """The first state, from the arguments of `init`: each stage makes its own part."""
        self._check_open()
        return self._layout.first(*args)

    @metered
    def step(self, state: PipelineState, *batch: Any) -> tuple[Any, ...]:
        """One step: (state, loss[, aux]), or whatever else the step returns beside its state.

        The batch is the global one; in a job of processes it is this process's part, 1/N of the
        rows. Arrays of the global batch are cut on dim 0, first for replicas and then for
        micro-batches; 0-d arrays, and those that the plan has as `unsplit_inputs`, go to every
        micro-batch whole, and are the same in every process. A PRNG key is folded with the numbers
        of both.

        Raises:
          BatchError: arrays that micro-batches and replicas do not divide, or processes whose parts
            differ in size.
          StateError: not a state of this job, or one that was already stepped from, and was
            donated.
        """
        tape, env = self.ready(state, *batch)
        self.play(tape, env)
        return self.answer(tape, env)

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self.processes.part

    def cut_axes(self) -> Mapping[str, int]:
        whole = self.plan.options.batch.unsplit_inputs
        inputs = self.plan.main.inputs
        return {
            n: self.plan.axes.get(n, 0)
            for n in self.plan.batch
            if inputs[n].ndim and not is_under(n, whole)
        }

    def params(self, state: PipelineState) -> Any:
        """The parameters, as the pytree that they were given in. All processes of a job must ask
        for them together."""
        return self._tree(0, state.params)

    def opt_state(self, state: PipelineState) -> Any:
        """The optimizer's state, likewise."""
        return self._tree(1, state.opt_state)

    def _tree(self, i: int, held: Mapping[str, Any]) -> Any:
        everything = self.processes.collected(self.plan.update.program.args[i].names, held)
        return tree_of(self.plan, self.plan.main.args[i], everything.__getitem__)

    def check(self, state: Any) -> None:
        self._check_open()
        held = self._layout.arrays(state)
        if state is not self._last():
            self._layout.check(held)

    def state_of(self, params: Any, opt_state: Any) -> PipelineState:
        return self._layout.of(arrays_of(self.plan.main, params, opt_state))

    def lower(self, state: PipelineState, *batch: Any) -> LoweredStep:
        """What `step` compiles for these arguments: the programs of each stage.

        It makes a step from a copy of the state; all processes of a job must ask for it together.
        """
        with recording() as parts:
            self.step(jax.tree.map(jnp.copy, state), *batch)
        return LoweredStep(parts)

    @property
    def summaries(self) -> dict[str, Any]:
        """What the model showed in the last step (`dtrans.summary`), merged, by tag; of texts
        nothing.

        Example of writing it: `writer.write(i, job.summaries, job.plan.shown.summaries)`.
        """
        found = {}
        for s in self.plan.shown.summaries:
            x = self._shown.get(summary_name(s.tag))
            if x is not None:
                rows = x if self.places.replicas > 1 else x[None]
                found[s.tag] = merge(
                    s, [list(of) for of in rows], self.plan.shown.collected.get(summary_name(s.tag))
                )
        return found

    def scheduled(self, name: str) -> PipelineJob:
        """A job that does the same in another order, with what this one has compiled.

        Raises:
          ConfigError: the schedule is unknown, or needs other programs: interleaved stages, a
            backward in two parts.
        """
        self.processes.check_reorder(name)
        return PipelineJob(OneProcess(dataclasses.replace(self.at, plan=self.plan.scheduled(name))))

    def close(self) -> None:
        """End the job: its lines to other processes too. It is done at exit, too."""
        super().close()
        self.processes.close()

    # -- a step, in parts ------------------------------------------------------------------------

    def ready(self, state: PipelineState, *batch: Any) -> tuple[StepProgram, list[Any]]:
        """The instructions of a step, and the slots that they work on."""
        main = self.plan.main
        given = dict(
            zip(self.plan.batch, batch_arrays(main.args[2:], batch, main.inputs), strict=True)
        )
        self._check_open()
        held = self._layout.arrays(state)
        if state is not self._last():
            held = self._layout.put(held)
        given |= {n: jnp.moveaxis(given[n], axis, 0) for n, axis in self.plan.axes.items()}
        given |= {n: self._as_read(n, given[n]) for n in self.plan.update.arguments if n in given}
        tape = self._tape(given)
        arrays = self.processes.whole_batch(tape, given, held)
        env: list[Any] = [None] * tape.size
        for slot, x in tape.fixed.items():
            env[slot] = x
        for (place, n), slot in tape.given.items():
            if place in self.at.mine:
                x = arrays.get(n)
                env[slot] = (
                    held[place, n]
                    if x is None
                    else self.places.put(x, place, self.at.batch_kind(n, x))
                )
        return tape, env

    def _as_read(self, name: str, x: Any) -> Any:
        """An argument that the update reads, in the type that it has there, where that is what JAX
        would make of it."""
        wanted = self.plan.update.program.inputs[name].dtype
        return (
            x.astype(wanted)
            if x.dtype != wanted and jnp.promote_types(x.dtype, wanted) == wanted
            else x
        )

    def _tape(self, arrays: Mapping[str, Any]) -> StepProgram:
        """The instructions of a step, for a batch of these arrays."""
        key = tuple((x.shape, x.dtype) for x in arrays.values())
        if key not in self._tapes:
            types = {
                n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in self.plan.main.inputs.items()
            }
            given = self.processes.whole_types(arrays)
            values = self.plan.values_for(given)
            made = {} if values is None else values.outputs
            given |= {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in made.items()}
            programs = self.plan.specialize([*{**types, **given}.values()])
            tape = compile_step(self.at, programs, given, values)
            self.processes.check_tape(tape, {**self._layout.types, **given})
            self._tapes[key] = tape
        return self._tapes[key]

    def play(
        self, tape: StepProgram, env: list[Any], look: Callable[[Instruction], None] | None = None
    ) -> None:
        """Carry out all instructions of this process; `look` is called after each."""
        for number, (ins, empty) in enumerate(tape.instructions):
            if isinstance(ins, Transfer):
                self.processes.move(number, ins, env)
            elif ins.stage in self.at.mine:
                made = call_recorded(lambda ins=ins: str(ins), ins.fn, *[env[i] for i in ins.reads])  # type: ignore[misc]
                for slot, x in zip(ins.makes, made, strict=True):
                    env[slot] = x
            if look is not None:
                look(ins)
            for slot in empty:
                env[slot] = None
        self.processes.share_results(tape, env)

    def answer(self, tape: StepProgram, env: list[Any]) -> tuple[Any, ...]:
        """The new state, and what the step returns beside it."""
        new = self._layout.state(
            {key: env[slot] for key, slot in tape.state.items() if key[0] in self.at.mine}
        )
        self._last = weakref.ref(new)
        values = {
            n: self._result(n, env[slot], kind) for n, (slot, kind, _) in tape.results.items()
        }
        self._shown = {
            n: env[slot]
            for n, (slot, _, _) in tape.results.items()
            if self.plan.model.merges.get(n) == STACK
        }
        return (new, *result_of(self._rest, [values[n] for n in self._rest.names]))

    def _result(self, name: str, x: Any, kind: AxisSharding) -> Any:
        """Return a result as the user gets it: of values that replicas have for themselves, rows,
        all, or the first."""
        if not kind.stacked:
            return x
        way = {"GLOBAL_CONCAT": "concat"}.get(
            self.plan.model.merges[name], self.plan.model.merges[name]
        )
        way = way if way in ("concat", "each") else "same"
        return Merge(way, self.plan.options.joined.get(name, 0))(x)

    @cached_property
    def _rest(self) -> TreeSpec:
        """What the step returns beside its state."""
        main = self.plan.main
        return without(without(main.out, main.args[0]), main.args[1])


@realises(PipelinePlan, "mesh")
def on_mesh(
    plan: PipelinePlan, devices: Sequence[jax.Device] | None, *, donate: bool
) -> PipelineJob:
    """A job on devices of this process."""
    o = plan.options
    cluster = (
        plan.options.stages.cluster
        if devices is None
        else dataclasses.replace(plan.options.stages.cluster, devices=tuple(devices))
    )
    grids = cluster.virtual_devices(plan.model.cuts.shards[: o.num_stages], o.replicas)
    return _in_one_process(plan, OnDevices(grids), donate=donate)


@realises(PipelinePlan, "simulate")
def simulated(plan: PipelinePlan) -> PipelineJob:
    """A job on one device."""
    return _in_one_process(
        plan, OneDevice(plan.options.replicas, plan.model.cuts.shards), donate=False
    )


def _in_one_process(plan: PipelinePlan, places: Places, *, donate: bool) -> PipelineJob:
    stages = frozenset(range(plan.options.model_stages))
    return PipelineJob(OneProcess(Deployment(plan, places, stages, donate)))
