"""Plans of pipelines: the programs of stages, when each runs, and what each holds and sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.cost import flops, nbytes
from dtrans.pipeline_parallel.schedule import Schedule, schedule
from dtrans.plan import Plan


if TYPE_CHECKING:
    import jax

    from dtrans.batch.exact_step import ExactStep
    from dtrans.ir.program import Program
    from dtrans.pipeline_parallel.options import PipelineOptions
    from dtrans.pipeline_parallel.staged_model import StagedModel, StepPrograms
    from dtrans.pipeline_parallel.update import Update
    from dtrans.step.summary import Summary


# times as much work as the least has, from which on a plan has a note; 2 where layers are 2, 2, 1,
# 1
LOPSIDED = 2.5


@dataclasses.dataclass(frozen=True)
class Stage:
    """Summary of a stage.

    Attributes:
      index: the number of the stage, from 0.
      ops: the number of its equations of the loss function.
      params: the parameters that it stores.
      flops: floating-point operations of its forward pass, for a micro-batch.
      sends: bytes that it sends to the next stage for a micro-batch.
      kept: bytes that it stores for a micro-batch from forward to backward.
      peak: the most micro-batches that its device stores at a time, counted once for each stage on
        the device.
      held: bytes of parameters and optimizer state on each of its devices.
    """

    index: int
    ops: int
    params: tuple[str, ...]
    flops: int
    sends: int
    kept: int
    peak: int
    held: int


@dataclasses.dataclass(frozen=True)
class ShownValues:
    """Values that a step shows beside its results.

    Attributes:
      summaries: see `dtrans.summary`.
      collected: result, or summary, to its collection: see `dtrans.collect`.
      hidden: summaries that are not shown, since they look at gradients or at the update.
    """

    summaries: tuple[Summary, ...]
    collected: Mapping[str, str]
    hidden: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelinePlan(Plan):
    """Pipelined training of one step; made by `dtrans.pipeline`.

    Attributes:
      main: the step, with calls inlined and exact roles.
      startup: the single-device init.
      options: the options that it was planned with: see `dtrans.pipeline`.
      schedule: the tasks of each device, in order.
      model: the model, cut into stages.
      step_programs: forward and backward of each stage, for a micro-batch of the traced batch.
      update: from sums of gradients to new parameters.
      shared: how micro-batches share the batch, where that is exact.
      values: makes the values of the whole batch that micro-batches take as inputs, if any.
      axes: the dimension of the rows, of each array of the batch where it is not the first.
      shown: summaries and collections.
      callers: sentences of who calls each host callback of the step.
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
    callers: tuple[str, ...]

    _right, _code = (0, 1, 3, 4, 5, 6, 7), 2
    _header = (
        "stage",
        "ops",
        "parameters",
        "flops",
        "bytes sent",
        "bytes kept",
        "peak",
        "bytes held",
    )

    @property
    def programs(self) -> dict[str, Program]:
        found: dict[str, Program] = {}
        for s in self.step_programs.stages:
            found |= {
                f"stage {s.index} forward": s.forward,
                f"stage {s.index} backward": s.backward,
            }
        return found | {"update": self.update.program}

    @property
    def batch(self) -> tuple[str, ...]:
        """The names of the arrays of a batch."""
        return tuple(n for spec in self.main.args[2:] for n in spec.names)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the step that the update reads, itself or by way of values of the whole
        batch."""
        found, types = {*self.update.arguments}, self.main.inputs
        if self.values is not None and not found <= {*self.batch}:
            found |= {n for n in self.values.read if not types[n].ndim}
        return tuple(n for n in self.batch if n in found)

    @property
    def state(self) -> tuple[str, ...]:
        """The names of the arrays of the state, as stages hold them."""
        return tuple(n for spec in self.update.program.args[:2] for n in spec.names)

    @cached_property
    def types(self) -> dict[str, Any]:
        """Name to type of each of them, without padding."""
        found = {n: t for n, t in self.main.inputs.items() if n not in self.model.stacks}
        for n, runs in self.model.stacks.items():
            t = self.main.inputs[n]
            for r in runs:
                found[r.name] = r.part.of(t)
        return found

    def home(self, name: str) -> int | None:
        """Return the stage that stores an array of the state; None if every stage does."""
        return self.update.placed.home[name]

    def device_of(self, stage: int) -> int:
        """Return the device, or row of replicas, of a stage; stages are assigned in turn."""
        return stage % self.options.num_stages

    def specialize(self, types: Sequence[jax.ShapeDtypeStruct]) -> StepPrograms:
        """The programs for a batch of these types, one for each input of the step. Errors as
        `dtrans.pipeline`."""
        given = dict(zip(self.model.captured.in_names, types, strict=True))
        for n in self.update.arguments:
            t, read = given[n], self.update.program.inputs[n]
            if (t.shape, t.dtype) != (read.shape, read.dtype):
                raise BatchError(
                    f"{n} is {t.dtype}{list(t.shape)}, and the update reads it as "
                    f"{read.dtype}{list(read.shape)}: plan it for this batch"
                )
        planned = {n: t for n, t in self.main.inputs.items() if n not in self.axes}
        return self.model.specialize(types, planned)

    def values_for(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Program | None:
        """Return the program of whole-batch values for these types, or None without any."""
        if self.values is None:
            return None
        return self.values.specialize_flat(
            [*batch.values(), *(self.types[n] for n in self.values.args[-1].names)]
        )

    def scheduled(self, name: str) -> PipelinePlan:
        """The same programs in another order.

        Raises:
          ConfigError: the schedule is unknown, or needs other programs: interleaved stages, a
            backward in two parts.
        """
        o = self.options
        other = schedule(name, o.num_stages, o.num_micro_batch, o.chunks if o.chunks > 1 else None)
        if (other.chunks, other.splits_backward) != (
            self.schedule.chunks,
            self.schedule.splits_backward,
        ):
            raise ConfigError(
                f"{name} needs other programs than {self.schedule.name}: plan it with "
                f"schedule={name!r}"
            )
        options = dataclasses.replace(o, schedule=other.name)
        return dataclasses.replace(self, options=options, schedule=other)

    # -- what it is ------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return a summary of each stage: its work, its state and the bytes that it sends."""
        peaks = self.schedule.peak
        found = []
        for s in self.step_programs.stages:
            types = {**s.forward.inputs, **s.forward.outputs}
            held = [n for n in self.state if self.home(n) in (s.index, None)]
            found.append(
                Stage(
                    s.index,
                    s.eqns,
                    tuple(n for n, at in self.model.homes.items() if at == s.index),
                    sum(flops(e) for e in s.forward.eqns),
                    sum(nbytes(types[n]) for n in s.sends),
                    sum(nbytes(types[n]) for n in s.kept),
                    peaks[self.device_of(s.index)],
                    sum(self.held_bytes(n) for n in held),
                )
            )
        return tuple(found)

    def costs(self) -> Costs:
        o = self.options
        found = []
        for s, p in zip(self.stages, self.step_programs.stages, strict=True):
            types = {**p.forward.inputs, **p.forward.outputs}
            passes = [q for q in (p.forward, p.backward, p.weights) if q is not None]
            ahead, back = (sum(nbytes(types[n]) for n in names) for names in (p.sends, p.receives))
            # the cotangents of what is differentiable go the other way
            cotangents = [
                sum(nbytes(types[n]) for n in of if jnp.issubdtype(types[n].dtype, jnp.inexact))
                for of in (p.receives, p.sends)
            ]
            many = o.num_micro_batch
            sent, received = many * (ahead + cotangents[0]), many * (back + cotangents[1])
            rounds = many * (bool(p.receives) + bool(p.sends))
            work = many * sum(map(program_flops, passes))
            for part in self.update.placed.pieces:
                if part.place == self.device_of(s.index):
                    work += sum(flops(e) for e in part.eqns)
            count = o.replicas * self.model.cuts.shards[s.index]
            found.append(RoleCost(f"stage {s.index}", count, s.held, sent, received, rounds, work))
        return Costs(found)

    def held_bytes(self, name: str) -> int:
        """Bytes that a device of an array's stage holds of it."""
        t = self.update.program.inputs[name]
        if name not in self.model.cuts.state:
            return nbytes(t)
        home, d = self.home(name), self.model.cuts.state[name]
        assert home is not None
        return nbytes(t) // t.shape[d] * -(-t.shape[d] // self.model.cuts.shards[home])

    def padded(self, name: str) -> tuple[int, int] | None:
        """Return the padded dimension of an array of the state, and its padded size; None without
        padding.

        It is cut over the replicas of its stage, or over their shards.
        """
        d = self.model.cuts.state.get(name)
        if d is not None:
            home, size = self.home(name), self.types[name].shape[d]
            assert home is not None
            shards = self.model.cuts.shards[home]
            return d, shards * -(-size // shards)
        s = None if self.update.layout is None else self.update.layout.cuts.get(name)
        return None if s is None else (s.axis, s.padded)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table of stages."""
        return [
            (
                str(s.index),
                str(s.ops),
                ", ".join(s.params[:3]) + (f", ... ({len(s.params)})" if len(s.params) > 3 else ""),
                *(f"{n:,}" for n in (s.flops, s.sends, s.kept, s.peak, s.held)),
            )
            for s in self.stages
        ]

    @cached_property
    def notes(self) -> list[str]:
        """Return remarks for the user that the table does not show."""
        o = self.options
        notes = [] if self.shared is None else list(self.shared.notes)
        if self.shared is None and o.parts > 1:
            notes.append(
                f"micro: numbers are those of each of {o.parts} micro-batches alone, statistics "
                "too; gradients are "
                f"reduced by {o.reduce.op}"
            )
        if self.values is not None:
            made = [*self.values.outputs.values()]
            notes.append(
                f"  of the whole batch, before the micro-batches: {len(made)} "
                f"value{'s' * (len(made) > 1)} that no "
                f"parameter enters, {sum(map(nbytes, made)):,} bytes"
            )
        notes += [
            f"schedule {self.schedule.name}: {o.num_micro_batch} "
            f"micro-batch{'es' * (o.num_micro_batch > 1)}, bubble "
            f"{self.schedule.bubble}",
        ]
        if o.precision.dtype is not None:
            scaled = "" if o.loss_scale == 1.0 else f", loss scaled by {o.loss_scale:g}"
            notes.append(f"products of matrices in {o.precision.dtype}{scaled}")
        if o.clip_of_each is not None:
            kept = sum(nbytes(self.update.program.inputs[n]) for n in self.update.sums)
            notes.append(
                f"each micro-batch's gradients are clipped to {o.clip_of_each:g}, and kept until "
                f"the update: {kept:,} "
                "bytes over all stages"
            )
        notes += self._lopsided
        notes += [
            f"stage {s} is split over {n} devices: "
            + (
                ", ".join(x for x in self.model.cuts.state if self.model.homes.get(x) == s)
                or "nothing of it is cut"
            )
            for s, n in enumerate(self.model.cuts.shards)
            if n > 1
        ]
        notes += [
            f"{n} is held by stage {self.model.homes[n]} and used by stages {', '.join(map(str, s))}: "
            "its value is sent, and "
            "its gradients are added up"
            for n, s in self.model.users.items()
            if len(s) > 1
        ]
        notes += [f"{name}: {way}" for name, way in self.model.merges.items()]
        if self.arguments:
            notes.append(
                f"the update reads {', '.join(self.arguments)}, which all stages are given"
            )
        if self.shown.hidden:
            what = "gradients, or at what the optimizer makes"
            notes.append(
                f"not carried out, since it looks at {what}: {', '.join(self.shown.hidden)}"
            )
        notes += self.callers
        return notes

    @property
    def _lopsided(self) -> list[str]:
        """A note of stages of very different work."""
        most, least = (pick(self.stages, key=lambda s: s.flops) for pick in (max, min))
        if most.flops <= LOPSIDED * least.flops:
            return []
        share = lambda s: f"{s.flops / sum(s.flops for s in self.stages):.1%}"
        return [
            f"lopsided: stage {most.index} has {share(most)} of the operations and stage "
            f"{least.index} {share(least)}, "
            "and the step waits for the first: take fewer stages, or begin them elsewhere "
            "(dtrans.replicate)"
        ]

    @property
    def _title(self) -> str:
        o = self.options
        each = f", {o.chunks} on each device" if o.chunks > 1 else ""
        also = f", {o.replicas} replicas" if o.replicas > 1 else ""
        return f"pipeline plan of {self.main.name}: {o.model_stages} stages{each}{also}"
