"""Plan of a pipeline: the programs of its stages, their schedule, and their memory and traffic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.engine.axis_bytes import collectives
from dtrans.engine.layout import Sliced
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.cost import flops, nbytes, total_bytes
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import omit, retain, select, subset, values_at
from dtrans.pipeline_parallel.options import AXIS, SPLIT
from dtrans.pipeline_parallel.schedule import Schedule, schedule
from dtrans.plan import Plan
from dtrans.transfers import RoleTransfer, Transfers
from dtrans.zero.mixed_precision import scale_types


if TYPE_CHECKING:
    import jax

    from dtrans._jax import JaxprEqn
    from dtrans.batch.exact_step import ExactStep
    from dtrans.ir.program import Program
    from dtrans.pipeline_parallel.device_layout import VirtualDevices
    from dtrans.pipeline_parallel.options import PipelineOptions
    from dtrans.pipeline_parallel.stage_programs import StagePrograms
    from dtrans.pipeline_parallel.staged_model import StagedModel, StepPrograms
    from dtrans.pipeline_parallel.update import Update
    from dtrans.step.summary import Summary


# A plan has a note about unequal stages if the slowest stage does more than this many times the
# work of the fastest stage. Six equal layers in four stages (2, 2, 1, 1) have a ratio of 2, which
# needs no note.
LOPSIDED = 2.5


@dataclasses.dataclass(frozen=True)
class Stage:
    """Numbers that describe a stage: a row of the plan's table.

    Attributes:
      index: the index of the stage, from 0.
      ops: the number of equations in the stage's part of the loss function.
      params: the parameters that the stage stores.
      flops: the floating-point operations of the stage's forward pass for one micro-batch.
      sends: the bytes sent to the next stage for one micro-batch.
      saves: the bytes saved from forward to backward for one micro-batch.
      peak: the largest number of micro-batches in flight on the stage's device. A micro-batch
        counts once for each stage on the device.
      stores: the bytes of parameters and optimizer state on each device of the stage.
    """

    index: int
    ops: int
    params: tuple[str, ...]
    flops: int
    sends: int
    saves: int
    peak: int
    stores: int


@dataclasses.dataclass(frozen=True)
class ShownValues:
    """Values that the user displays (`dtrans.summary`), or merges by a rule (`dtrans.collect`).

    Attributes:
      summaries: the summaries of the forward pass (`dtrans.summary`).
      collected: merge rules that the user chose with `dtrans.collect`, by name of the result or
        summary.
      hidden: the summaries of gradients, or of values of the update, which no stage computes.
    """

    summaries: tuple[Summary, ...]
    collected: Mapping[str, str]
    hidden: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelinePlan(Plan):
    """Plan of pipelined training, returned by `dtrans.pipeline`.

    Attributes:
      main: the step, with inlined calls and the role of each equation.
      startup: the single-device init.
      options: the options of `dtrans.pipeline`.
      schedule: the tasks of each device, in order.
      model: the model, divided into stages.
      step_programs: the programs of each stage, for a micro-batch of the traced batch.
      update: the update, which computes new parameters from sums of gradients.
      shared: the step of a micro-batch for `batch="exact"`; its results equal those of one device
        on the full batch. None with `batch="micro"`.
      values: the program for values of the full batch that each micro-batch needs, such as the
        number of valid tokens. It runs before the micro-batches. None if they need no such values.
      axes: maps an array of the batch to the dimension of its rows, if this is not 0.
      shown: the values for which the user called `dtrans.summary` or `dtrans.collect`.
      callback_notes: a note for each host callback of the step, which names its stage.
    """

    main: Program
    startup: Program
    options: PipelineOptions
    schedule: Schedule
    model: StagedModel
    step_programs: StepPrograms
    update: Update = dataclasses.field(compare=False)
    shared: ExactStep | None = dataclasses.field(compare=False)
    values: Program | None
    axes: Mapping[str, int]
    shown: ShownValues
    callback_notes: tuple[str, ...]

    _right, _code = (0, 1, 3, 4, 5, 6, 7), 2
    _header = (
        "stage",
        "ops",
        "parameters",
        "flops",
        "bytes sent",
        "bytes saved",
        "peak",
        "bytes stored",
    )

    @property
    def programs(self) -> dict[str, Program]:
        found: dict[str, Program] = {}
        for s in self.step_programs.stages:
            found[f"stage {s.index} forward"] = s.forward
            found[f"stage {s.index} backward"] = s.backward
        return found | {"update": self.update.program}

    @property
    def batch(self) -> tuple[str, ...]:
        """Names of the arrays of a batch."""
        return tuple(all_names(self.main.args[2:]))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the step that the update needs, such as a learning rate."""
        reads, types = {*self.update.arguments}, self.main.inputs
        if self.values is not None and not reads <= {*self.batch}:
            reads |= {n for n in self.values.read if not types[n].ndim}
        return tuple(select(self.batch, reads))

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """Initial values of the state that a dynamic loss scale adds to the step, by name."""
        return scale_types(self.options.precision.scaling)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the parameters and arrays of optimizer state that stages store."""
        return tuple(all_names(self.update.program.args[:2]))

    @cached_property
    def input_types(self) -> dict[str, Any]:
        """Shape and dtype of each input of `main` and of each array in `extra_state`, by name."""
        types = self.main.inputs
        found = subset(types, all_names(self.main.args[:2]))
        found |= {n: jnp.asarray(x).aval for n, x in self.extra_state.items()}
        return found | subset(types, self.batch)

    @cached_property
    def types(self) -> dict[str, Any]:
        """Shape (without padding) and dtype of each array of `state` and `batch`, by name."""
        found = omit(self.input_types, self.model.stacks)
        for n, runs in self.model.stacks.items():
            for rows in runs:
                found[rows.name] = rows.part.type_in(self.main.inputs[n])
        return found

    def home(self, name: str) -> int | None:
        """Return the stage that stores an array of the state, such as a parameter.

        Return None if every stage stores it, such as a step count.
        """
        return self.update.placed.stage_of_input[name]

    def device_of(self, stage: int) -> int:
        """Return the index of the device that runs a stage, within each replica."""
        return stage % self.options.num_stages

    def specialize(self, types: Sequence[jax.ShapeDtypeStruct]) -> StepPrograms:
        """Return the programs of the same stages for a batch of other shapes.

        Args:
          types: the shape and dtype of each input of the step, with the global batch.

        Raises:
          BatchError: the plan's update expects another shape or dtype of an argument, or
            `dtrans.pipeline` would refuse this batch.
        """
        type_of = dict(zip(self.model.captured.in_names, types, strict=True))
        for n in self.update.arguments:
            t, read = type_of[n], self.update.program.inputs[n]
            if (t.shape, t.dtype) != (read.shape, read.dtype):
                raise BatchError(
                    f"{n} is {t.dtype}{list(t.shape)}, but the update was planned for "
                    f"{read.dtype}{list(read.shape)}; make a plan for this batch"
                )
        planned = omit(self.input_types, self.axes)
        return self.model.specialize(types, planned)

    def values_for(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Program | None:
        """Return the program that runs on the full batch before the micro-batches.

        It computes values that each micro-batch needs. Return None if there are no such values.

        Args:
          batch: shape and dtype of each array of the full batch, by name.
        """
        if self.values is None:
            return None
        state = values_at(self.types, self.values.args[-1].names)
        return self.values.specialize_flat([*batch.values(), *state])

    def scheduled(self, name: str) -> PipelinePlan:
        """Return a plan that runs the same programs in the order of another schedule.

        Raises:
          ConfigError: the schedule is unknown, or needs different programs. This is so if it has
            another number of chunks, or if only one of the two schedules splits the backward pass.
        """
        o, planned = self.options, self.schedule
        chunks = o.chunks if o.chunks > 1 else None
        other = schedule(name, o.num_stages, o.num_micro_batch, chunks)
        if (other.chunks, other.splits_backward) != (planned.chunks, planned.splits_backward):
            raise ConfigError(
                f"the schedule {name} needs different programs than {planned.name}; make a plan "
                f"with dtrans.pipeline(schedule={name!r})"
            )
        options = dataclasses.replace(o, schedule=other.name)
        found = dataclasses.replace(self, options=options, schedule=other)
        if self.recipe is not None:
            changed = {"num_stages": o.num_stages, "schedule": other.name}
            recipe = dataclasses.replace(
                self.recipe, arguments={**self.recipe.arguments, **changed}
            )
            # `recipe` is an attribute, but no field: `replace` must not copy it
            object.__setattr__(found, "recipe", recipe)
        return found

    # -- sizes and costs -------------------------------------------------------------------------

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Summary of each stage: operations, stored parameters, and sent bytes."""
        found = []
        for s in self.step_programs.stages:
            types = {**s.forward.inputs, **s.forward.outputs}
            state = [n for n in self.state if self.home(n) in (s.index, None)]
            summary = Stage(
                s.index,
                s.eqns,
                tuple(n for n, at in self.model.homes.items() if at == s.index),
                program_flops(s.forward),
                _total_bytes(types, s.sends),
                _total_bytes(types, s.saved),
                self.schedule.peak[self.device_of(s.index)],
                sum(map(self.device_bytes, state)),
            )
            found.append(summary)
        return tuple(found)

    def _role_costs(self) -> Costs:
        found = []
        for stage, programs in zip(self.stages, self.step_programs.stages, strict=True):
            found.append(_cost_of_stage(self, stage, programs))
        return Costs(found)

    def transfers(self) -> Transfers:
        sizes: dict[tuple[str, str, str], int] = {}
        for source, target, what, size in (*_point_to_point(self), *_to_replicas(self)):
            key = (f"stage {source}", target, what)
            sizes[key] = sizes.get(key, 0) + size
        return Transfers(RoleTransfer(*key, size) for key, size in sizes.items() if size)

    def device_bytes(self, name: str) -> int:
        """Return the bytes that each device of a stage stores for one array of the state."""
        t = self.types[name]
        for sliced in self.slices_by_axis.get(name, {}).values():
            t = sliced.rank_type(t)
        return nbytes(t)

    @cached_property
    def slices_by_axis(self) -> Mapping[str, Mapping[str, Sliced]]:
        """Parameters and optimizer state that the devices of a stage store as slices.

        Maps the name of an array to a dict from mesh axis to the slices along this axis.
        """
        slices_by_axis: dict[str, dict[str, Sliced]] = {}
        for name, sliced in retain(self.update.slices, self.state).items():
            slices_by_axis[name] = {AXIS: sliced}
        sharding = self.model.sharding
        for name, axis in sharding.state.items():
            home = self.home(name)
            assert home is not None
            sliced = Sliced.from_shape(self.types[name].shape, axis, sharding.shards[home])
            slices_by_axis.setdefault(name, {})[SPLIT] = sliced
        return slices_by_axis

    # -- the plan as text ------------------------------------------------------------------------

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table of stages."""
        found = []
        for s in self.stages:
            more = f", ... ({len(s.params)})" if len(s.params) > 3 else ""
            numbers = (s.flops, s.sends, s.saves, s.peak, s.stores)
            params = ", ".join(s.params[:3]) + more
            found.append((str(s.index), str(s.ops), params, *(f"{n:,}" for n in numbers)))
        return found

    @cached_property
    def notes(self) -> list[str]:
        """Remarks for the user about the plan."""
        notes = [*_notes_of_numbers(self), *_notes_of_stages(self)]
        notes += [f"{name}: {way}" for name, way in self.model.merges.items()]
        if self.devices is not None:
            notes += self.devices.notes
        if self.arguments:
            notes.append(f"all stages receive {', '.join(self.arguments)}, which the update reads")
        if self.shown.hidden:
            hidden = ", ".join(self.shown.hidden)
            notes.append(f"not computed, because it reads gradients or the update: {hidden}")
        return [*notes, *self.callback_notes]

    @cached_property
    def devices(self) -> VirtualDevices | None:
        """Devices of the stages, and idle devices; None if the plan does not know the devices.

        A plan knows the devices of `Cluster(devices=...)`. With `replicas="auto"`, it also knows
        all devices of JAX.

        Raises:
          ConfigError: the stages and replicas need more or other devices.
        """
        o = self.options
        if o.stages.cluster.devices is None:
            return None
        return o.stages.cluster.virtual_devices(self.model.device_counts, o.replicas)

    @cached_property
    def speeds(self) -> tuple[float, ...] | None:
        """Speed of each stage: the speed of its slowest device; None without `Cluster.speeds`.

        Raises:
          ConfigError: the stages and replicas need more devices than there are speeds.
        """
        o = self.options
        if o.stages.cluster.speeds is None:
            return None
        return o.stages.cluster.stage_speeds(self.model.device_counts, o.replicas) * o.chunks

    def check_devices(self) -> None:
        """Raise ConfigError if the listed devices are too few or do not fit the stages."""
        _ = self.devices, self.speeds

    @property
    def _title(self) -> str:
        o = self.options
        each = f", {o.chunks} on each device" if o.chunks > 1 else ""
        also = f", {o.replicas} replicas" if o.replicas > 1 else ""
        return f"pipeline plan of {self.main.name}: {o.model_stages} stages{each}{also}"


def _total_bytes(types: Mapping[str, Any], names: Iterable[str]) -> int:
    return sum(nbytes(types[n]) for n in names)


def _bytes_between(programs: StagePrograms) -> tuple[int, int]:
    """Return the bytes that a stage sends to the next stage, and receives from it, per micro-batch.

    It sends activations, and receives the cotangents (gradients) of the floating-point activations.
    """
    types = programs.forward.outputs | programs.forward.inputs
    floats = [n for n in programs.sends if jnp.issubdtype(types[n].dtype, jnp.inexact)]
    return _total_bytes(types, programs.sends), _total_bytes(types, floats)


def _point_to_point(plan: PipelinePlan) -> Iterator[tuple[int, str, str, int]]:
    """Yield the transfers between stages, for the plan's table of traffic.

    Yields:
      Tuples (source stage, target role, kind of values, bytes).
    """
    many, stages = plan.options.num_micro_batch, plan.step_programs.stages
    for a, b in itertools.pairwise(stages):
        there, back = _bytes_between(a)
        yield a.index, f"stage {b.index}", "activations", many * there
        yield b.index, f"stage {a.index}", "cotangents", many * back
    for n, users in plan.model.users.items():  # once per step
        home = plan.model.homes[n]
        for user in users:
            if user != home:
                yield home, f"stage {user}", "shared parameters", plan.device_bytes(n)
    for value, source, target in plan.update.placed.sends:
        yield source, f"stage {target}", "values of the update", nbytes(value.aval)


def _to_replicas(plan: PipelinePlan) -> Iterator[tuple[int, str, str, int]]:
    """Yield the collectives between replicas or shards, for the plan's table of traffic.

    Yields:
      Tuples (source stage, target role, kind of values, bytes).
    """
    for stage, eqn, times in _collectives_of(plan):
        target, size = f"other devices of stage {stage}", total_bytes(eqn.invars)
        yield stage, target, eqn.primitive.name, times * size


def _collectives_of(plan: PipelinePlan) -> Iterator[tuple[int, JaxprEqn, int]]:
    """Yield the collectives between replicas or shards of each stage.

    Yields:
      Tuples (stage, collective, how often it runs in a step).
    """
    many = plan.options.num_micro_batch
    for s in plan.step_programs.stages:
        for program in (s.forward, s.backward, s.weights):
            if program is not None:
                for eqn, times in collectives(program.jaxpr):
                    yield s.index, eqn, many * times
    for piece in plan.update.placed.pieces:
        for eqn, times in collectives(piece.jaxpr):
            yield piece.place, eqn, times


def _cost_of_stage(plan: PipelinePlan, stage: Stage, programs: StagePrograms) -> RoleCost:
    """Return the costs of a step for one device of a stage."""
    o, p, role = plan.options, programs, f"stage {stage.index}"
    transfers = plan.transfers()
    received = sum(t.nbytes for t in transfers if t.target == role)
    for index, eqn, times in _collectives_of(plan):
        if index == stage.index:
            received += times * total_bytes(eqn.outvars)
    work = sum(program_flops(q) for q in (p.forward, p.backward, p.weights) if q is not None)
    update_work = 0
    for piece in plan.update.placed.pieces:
        if piece.place == stage.index:
            update_work += sum(map(flops, piece.eqns))
    many = o.num_micro_batch
    return RoleCost(
        role,
        o.replicas * plan.model.device_counts[plan.device_of(stage.index)],
        stage.stores,
        sum(t.nbytes for t in transfers if t.source == role),
        received,
        many * (bool(p.receives) + bool(p.sends)),
        many * work + update_work,
        None if plan.speeds is None else plan.speeds[stage.index],
    )


def _notes_of_numbers(plan: PipelinePlan) -> Iterator[str]:
    """Yield remarks about micro-batches, full-batch values, the schedule and the precision."""
    o, many = plan.options, plan.options.num_micro_batch
    if plan.shared is not None:
        yield from plan.shared.notes
    elif o.parts > 1:
        yield (
            f"batch='micro': each of {o.parts} micro-batches computes the step independently, with "
            f"its own statistics; gradients are reduced by {o.reduce.op}"
        )
    if plan.values is not None:
        values = plan.values.outputs
        yield (
            f"  precomputed from the full batch: {len(values)} value{'s' * (len(values) > 1)}, "
            f"{_total_bytes(values, values):,} bytes"
        )
    schedule, batches = plan.schedule, f"{many} micro-batch{'es' * (many > 1)}"
    yield f"schedule {schedule.name}: {batches}, bubble {schedule.bubble}"
    if o.precision.dtype is not None:
        scaled = "" if o.loss_scale == 1.0 else f", loss scaled by {o.loss_scale:g}"
        if o.dynamic_scaling is not None:
            scaled = f", dynamic loss scale that starts at {o.dynamic_scaling.initial:g}"
        yield f"matrix products in {o.precision.dtype}{scaled}"
    if o.clip_of_each is not None:
        size = _total_bytes(plan.update.program.inputs, plan.update.sums)
        yield (
            f"the gradients of each micro-batch are clipped to {o.clip_of_each:g} and stored until "
            f"the update: {size:,} bytes over all stages"
        )


def _notes_of_stages(plan: PipelinePlan) -> Iterator[str]:
    """Yield remarks about stages: unequal work, split stages, shared parameters."""
    work = [s.flops for s in plan.stages]
    speeds = plan.speeds or (1.0,) * len(work)
    times = [x / speed for x, speed in zip(work, speeds, strict=True)]
    if plan.speeds is not None:
        shares = []
        for stage, (x, speed) in enumerate(zip(work, speeds, strict=True)):
            shares.append(f"stage {stage} has speed {speed:g} and {x / sum(work):.1%}")
        yield f"operations by speed: {', '.join(shares)}"
    most, least = times.index(max(times)), times.index(min(times))
    if times[most] > LOPSIDED * times[least]:
        yield (
            f"unbalanced: stage {most} does {work[most] / sum(work):.1%} of the operations "
            f"and stage {least} does {work[least] / sum(work):.1%}; use fewer stages, or "
            "choose their boundaries with dtrans.replicate"
        )
    model = plan.model
    for stage, count in enumerate(model.sharding.shards):
        if count > 1:
            names = ", ".join(n for n in model.sharding.state if model.homes.get(n) == stage)
            sharded = names or "no parameter is sharded"
            yield f"stage {stage} is split over {count} devices: {sharded}"
    for n, users in model.users.items():
        if len(users) > 1:
            yield (
                f"{n} is stored by stage {model.homes[n]} and used by stages "
                f"{', '.join(map(str, users))}: its value is sent, and its gradients are summed"
            )
