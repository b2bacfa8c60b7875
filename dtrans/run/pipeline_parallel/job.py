"""Job of a pipeline: `init` returns the first state, and `step` the next state."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr
from dtrans.checkpoint.pserver_state import arrays_of
from dtrans.ir.array_fns import array_type
from dtrans.ir.pytree import TreeSpec, is_under, result_of, without
from dtrans.ir.selection import exclude, subset, values_at
from dtrans.job import Job
from dtrans.pipeline_parallel.forward_pass import summary_name
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.results import STACK
from dtrans.pipeline_parallel.uneven_batch import plan_for_rows
from dtrans.pipeline_parallel.unstacked_inputs import unstack_inputs
from dtrans.plan import register_runner
from dtrans.run.base.batch import batch_arrays
from dtrans.run.base.lowered import LoweredStep, call_recorded, recording
from dtrans.run.base.merge import Merge
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.compile_step import compile_step
from dtrans.run.pipeline_parallel.instructions import Instruction, StepProgram, Transfer
from dtrans.run.pipeline_parallel.processes import OneProcess
from dtrans.run.pipeline_parallel.stage_devices import OnDevices, OneDevice, StageBackend
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement
from dtrans.run.pipeline_parallel.state import (
    PipelineState,
    StateLayout,
    tree_of,
    unpadded,
)
from dtrans.step.summary import merge
from dtrans.step_meter import metered


class PipelineJob(Job):
    """Running pipeline: `init` returns the first state, and `step` trains on one batch.

    Args:
      processes: object with the methods that depend on the number of processes; it also has the
        plan and the devices of the stages.
    """

    def __init__(self, processes: OneProcess) -> None:
        self.processes, self.at = processes, processes.at
        self.plan, self.backend = self.at.plan, self.at.backend
        self._layout = StateLayout(self.at)
        self._programs: dict[Any, StepProgram] = {}
        self.run_id, self.saves = processes.run_id, processes.saves
        self._shown: dict[str, Any] = {}
        # Weak reference to the last state that `step` returned. This state needs no checks.
        self._last: Any = lambda: None

    # -- the interface for users -----------------------------------------------------------------

    def init(self, *args: Any) -> PipelineState:
        """Return the first state, from the arguments of the user's `init`.

        Each stage computes the part of the state that it stores.
        """
        self._check_open()
        return self._layout.init(*args)

    @metered
    def step(self, state: PipelineState, *batch: Any) -> tuple[Any, ...]:
        """Run one step; return the new state and the results of the step, such as the loss.

        In a job of one process, `batch` is the global batch. In a job of N processes, it is this
        process's part: 1/N of the rows. The job splits the rows of the global batch over replicas,
        and then splits each replica's rows into micro-batches. The rows of an array are its dim 0,
        or the dimension in `plan.axes`. Two kinds of arrays are not split: 0-d arrays, and the
        plan's `unsplit_inputs`. They must be equal in all processes. The job folds the indices of
        the replica and of the micro-batch into PRNG keys.

        Raises:
          BatchError: the number of rows is not a multiple of num_micro_batch times replicas, or
            differs between processes. With `batch="exact"` in one process, a multiple of replicas
            is enough. It is not enough with the schedule "Interleaved", with a `dtrans.Schedule`
            that the user wrote, and with `clip_local_per="micro_batch"`.
          StateError: the state belongs to another job, or an earlier step has donated its memory.
        """
        program, env = self.prepare(state, *batch)
        self.execute(program, env)
        return self.collect(program, env)

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self.processes.part

    def split_axes(self) -> Mapping[str, int]:
        unsplit = self.plan.options.batch.unsplit_inputs
        inputs = self.plan.main.inputs
        split = [n for n in self.plan.batch if inputs[n].ndim and not is_under(n, unsplit)]
        return {n: self.plan.axes.get(n, 0) for n in split}

    def params(self, state: PipelineState) -> Any:
        """Return the parameters in the pytree structure of `init`.

        In a job of several processes, all processes must call this method together.
        """
        return self._tree(0, state.params)

    def opt_state(self, state: PipelineState) -> Any:
        """Return the optimizer's state in the pytree structure of `init`.

        In a job of several processes, all processes must call this method together.
        """
        return self._tree(1, state.opt_state)

    def _leaves(self, state: PipelineState, names: Collection[str]) -> dict[str, Any]:
        stored: dict[str, Any] = {}
        for (place, n), x in self._layout.arrays(state).items():
            if place == self.at.first_place(n):
                stored[n] = x
        found = dict(self.processes.gather_state([*names], stored))
        if self.at.host is not None and self.part[1] == 1:
            for n in names:  # offloaded arrays go back to the devices of their stage
                place = self.at.first_place(n)
                found[n] = self.backend.put(found[n], place, self.at.state_kind(n))
        return subset(found, names)

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        return {n: unpadded(self.plan, n, x) for n, x in leaves.items()}

    def _unstacked(
        self, jaxpr: ClosedJaxpr, names: Sequence[str]
    ) -> tuple[ClosedJaxpr, Sequence[str]]:
        return unstack_inputs(jaxpr, names, self.plan.model.stacks)

    def _groups(self, names: Sequence[str]) -> Mapping[str, int]:
        return {n: self.plan.home(n) or 0 for n in names}

    def _tree(self, i: int, arrays: Mapping[str, Any]) -> Any:
        """Gather one argument of the step from all processes, and return it as a pytree.

        Args:
          i: 0 for the parameters, 1 for the optimizer's state.
          arrays: the arrays that this process stores.
        """
        names = exclude(self.plan.update.program.args[i].names, self.plan.extra_state)
        gathered = self.processes.gather_state(names, arrays)
        return tree_of(self.plan, self.plan.main.args[i], gathered.__getitem__)

    def check(self, state: Any) -> None:
        self._check_open()
        arrays = self._layout.arrays(state)
        if state is not self._last():
            self._layout.check(arrays)

    def extra_state(self, state: PipelineState) -> dict[str, Any]:
        """Return the state that only the job has, by name: the state of a dynamic loss scale.

        In a job of several processes, all processes must call this method together.
        """
        names = tuple(self.plan.extra_state)
        return subset(self.processes.gather_state(names, state.extra), names)

    def state_of(
        self, params: Any, opt_state: Any, *, extra: Mapping[str, Any] | None = None
    ) -> PipelineState:
        """Convert the state of a single device to a state of this job.

        Args:
          params, opt_state: the state of the single-device step.
          extra: the values of `extra_state`. Arrays that are missing start from their first value.

        Raises:
          TraceError: the structure differs from the structure of the step's arguments.
          StateError: an array has another shape or dtype.
        """
        arrays = arrays_of(self.plan.main, params, opt_state)
        return self._layout.from_step(arrays | dict(extra or {}))

    def lower(self, state: PipelineState, *batch: Any) -> LoweredStep:
        """Return the programs that each stage compiles for a step with these arguments.

        The method runs a step on a copy of the state. All processes must call the method together.
        """
        with recording() as parts:
            self.step(jax.tree.map(jnp.copy, state), *batch)
        return LoweredStep(parts)

    @property
    def summaries(self) -> dict[str, Any]:
        """Merged values of the last step's summaries (`dtrans.summary`), by tag.

        The dict omits summaries of text. To write summaries to TensorBoard, call
        `writer.write(i, job.summaries, job.plan.shown.summaries)`.
        """
        collected, found = self.plan.shown.collected, {}
        for s in self.plan.shown.summaries:
            name = summary_name(s.tag)
            x = self._shown.get(name)
            if x is not None:
                by_replica = x if self.backend.replicas > 1 else x[None]
                found[s.tag] = merge(s, [*map(list, by_replica)], collected.get(name))
        return found

    def scheduled(self, name: str) -> PipelineJob:
        """Return a job with another schedule and the same compiled programs.

        Raises:
          ConfigError: the schedule is unknown, or the job has several processes. Or the schedule
            needs different programs: it has another number of chunks, or only one of the two
            schedules splits the backward pass.
        """
        self.processes.check_reorder(name)
        return PipelineJob(OneProcess(dataclasses.replace(self.at, plan=self.plan.scheduled(name))))

    def close(self) -> None:
        """End the job, and close its channels to other processes."""
        super().close()
        self.processes.close()

    # -- a step, in parts ------------------------------------------------------------------------

    def prepare(self, state: PipelineState, *batch: Any) -> tuple[StepProgram, list[Any]]:
        """Return the instructions of a step, and the list of values on which they work.

        An entry of the list is a *slot*. The slots of the step's inputs contain the state and the
        batch; all others are empty at first.
        """
        main, update = self.plan.main, self.plan.update
        arrays = batch_arrays(main.args[2:], batch, main.inputs)
        local = dict(zip(self.plan.batch, arrays, strict=True))
        self._check_open()
        stored = self._layout.arrays(state)
        if state is not self._last():
            stored = self._layout.put(stored)
        for n, axis in self.plan.axes.items():
            local[n] = jnp.moveaxis(local[n], axis, 0)
        for n in update.arguments:
            if n in local:
                local[n] = _widen(local[n], update.program.inputs[n].dtype)
        program = self._program_for(local)
        gathered = self.processes.gather_batch(program, local, stored)

        env: list[Any] = [None] * program.size
        for slot, x in program.fixed.items():
            env[slot] = x
        for (place, n), slot in program.inputs.items():
            if place not in self.at.mine:
                continue
            if gathered.get(n) is None:
                env[slot] = stored[place, n]
            else:
                x = gathered[n]
                env[slot] = self.backend.put(x, place, self.at.batch_kind(n, x))
        return program, env

    def _program_for(self, arrays: Mapping[str, Any]) -> StepProgram:
        """Return the instructions of a step for a batch with the shapes and dtypes of `arrays`."""
        key = tuple((x.shape, x.dtype) for x in arrays.values())
        if key not in self._programs:
            batch = self.processes.global_types(arrays)
            plan = plan_for_rows(self.plan, batch)
            values = plan.values_for(batch)
            if values is not None:
                batch |= _structs(values.outputs)
            types = _structs(plan.input_types) | batch
            programs = plan.specialize([*types.values()])
            at = dataclasses.replace(self.at, plan=plan)
            program = compile_step(at, programs, batch, values)
            self.processes.check_program(program, {**self._layout.types, **batch})
            self._programs[key] = program
        return self._programs[key]

    def execute(
        self,
        program: StepProgram,
        env: list[Any],
        look: Callable[[Instruction], None] | None = None,
    ) -> None:
        """Execute the instructions of a step that belong to stages of this process.

        Args:
          program: the instructions of the step.
          env: the value in each slot, from `prepare`; updated in place.
          look: a function to call after each instruction, before slots are emptied; it can measure
            memory.
        """
        for number, (ins, empty) in enumerate(program.instructions):
            if isinstance(ins, Transfer):
                self.processes.move(number, ins, env)
            elif ins.stage in self.at.mine:
                name: Callable[[], str] = functools.partial(str, ins)
                outputs = call_recorded(name, ins.fn, *values_at(env, ins.reads))
                for slot, x in zip(ins.writes, outputs, strict=True):
                    env[slot] = x
            if look is not None:
                look(ins)
            for slot in empty:
                env[slot] = None
        self.processes.share_results(program, env)

    def collect(self, program: StepProgram, env: list[Any]) -> tuple[Any, ...]:
        """Return the new state and the results of a step after `execute`."""
        new_arrays = {}
        for (place, n), slot in program.state.items():
            if place in self.at.mine:
                new_arrays[place, n] = env[slot]
        new = self._layout.state(new_arrays)
        self._last = weakref.ref(new)
        values = {}
        self._shown = {}
        for n, (slot, kind, _) in program.results.items():
            values[n] = self._merged(n, env[slot], kind)
            if self.plan.model.merges.get(n) == STACK:
                self._shown[n] = env[slot]
        return (new, *result_of(self._rest, values_at(values, self._rest.names)))

    def _merged(self, name: str, x: Any, kind: AxisSharding) -> Any:
        """Return a result of the step, merged over replicas if they have different values."""
        if not kind.stacked:
            return x
        way = self.plan.model.merges[name]
        if way == "GLOBAL_CONCAT":
            way = "concat"
        elif way not in ("concat", "each"):
            way = "same"
        return Merge(way, self.plan.options.concat_axes.get(name, 0))(x)

    @cached_property
    def _rest(self) -> TreeSpec:
        """Pytree structure of the step's results, without the state."""
        main = self.plan.main
        return without(without(main.out, main.args[0]), main.args[1])


def _structs(types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {n: array_type(t) for n, t in types.items()}


def _widen(x: Any, dtype: Any) -> Any:
    """Cast an array to `dtype` if JAX's type promotion allows it, else return it unchanged."""
    if x.dtype != dtype and jnp.promote_types(x.dtype, dtype) == dtype:
        return x.astype(dtype)
    return x


@register_runner(PipelinePlan, "mesh")
def on_mesh(
    plan: PipelinePlan, devices: Sequence[jax.Device] | None, *, donate: bool
) -> PipelineJob:
    """Return a job that runs all stages on devices of this process."""
    cluster = plan.options.stages.cluster
    if devices is not None:
        cluster = dataclasses.replace(cluster, devices=tuple(devices), speeds=None)
    grids = cluster.virtual_devices(plan.model.device_counts, plan.options.replicas)
    return _in_one_process(plan, OnDevices(grids), donate=donate)


@register_runner(PipelinePlan, "simulate")
def simulated(plan: PipelinePlan) -> PipelineJob:
    """Return a job that simulates all stages and replicas on one device."""
    backend = OneDevice(plan.options.replicas, plan.model.device_counts)
    return _in_one_process(plan, backend, donate=False)


def _in_one_process(plan: PipelinePlan, backend: StageBackend, *, donate: bool) -> PipelineJob:
    stages = frozenset(range(plan.options.model_stages))
    return PipelineJob(OneProcess(StagePlacement(plan, backend, stages, donate)))
