"""A pipelined step as a list of instructions.

    Run     a compiled program of a stage, on values that are there
    Move    a value from one stage to another

Values are in numbered slots. The list is written once for each batch shape, in the order in which the schedule
dispatches tasks; which slots nothing reads any more after an instruction is worked out from it, and they are emptied
there: so what is alive at any time is what the schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Literal, Var, constants
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.ops import all_gather_p, all_reduce_p, trainer_index_p
from dtrans.pipeline_parallel.plan import PipelinePlan, StepPrograms
from dtrans.pipeline_parallel.results import is_whole, micro_name
from dtrans.pipeline_parallel.stage_programs import StagePrograms
from dtrans.pipeline_parallel.task import Task
from dtrans.pipeline_parallel.update_by_stage import StagePart
from dtrans.run.base.lowering import OVER_AXIS, per_trainer
from dtrans.run.base.segments import interpret
from dtrans.run.pipeline_parallel.instructions import RunStage, StepProgram, Transfer
from dtrans.run.pipeline_parallel.stage_devices import EACH, FIRST, ROWS, SAME, Places, StageSharding, cut_along


class StepCompiler:
    """Writes the tape of a plan for one batch shape.

    Args:
      plan: what to run.
      programs: those for this batch.
      places: where stages are.
      host: where parameters are between uses, if not there.
      batch: name to type of the arrays of the whole batch.
      donate: whether the state may be reused.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        programs: StepPrograms,
        places: Places,
        host: Places | None,
        batch: dict[str, Any],
        *,
        donate: bool,
    ) -> None:
        self.plan, self.programs, self.places, self.donate = plan, programs, places, donate
        self.host = host
        self.o = plan.options
        self.batch = batch
        self.slots: dict[tuple[Any, ...], int] = {}
        self.list: list[RunStage | Transfer] = []
        self.fixed: dict[int, Any] = {}
        self.given: dict[tuple[int, str], int] = {}
        self.kinds: dict[int, StageSharding] = {}
        self.kept: dict[tuple[int, int], tuple[int, ...]] = {}

    # -- slots -----------------------------------------------------------------------------------

    def slot(self, key: tuple[Any, ...], kind: StageSharding) -> int:
        """The slot of a value."""
        found = self.slots.setdefault(key, len(self.slots))
        self.kinds[found] = kind
        return found

    def held(self, place: int, name: str) -> int:
        """The slot of an array of the state, in a place: a device for parameters, a stage for all else."""
        found = self.slot(("state", place, name), self.state_kind(name))
        self.given[place, name] = found
        return found

    def state_kind(self, name: str) -> StageSharding:
        return state_kind(self.plan, name)

    def place_of(self, name: str) -> int | None:
        """The place that holds an array of the state; None where each stage has its own."""
        home = self.plan.home(name)
        return None if home is None else self.plan.device_of(home) if name in self.plan.homes else home

    def param(self, stage: int, name: str) -> int:
        """The slot of a parameter where a stage reads it."""
        device = self.plan.device_of(stage)
        home = self.plan.homes[name]
        if self.host is None and self.plan.device_of(home) == device:
            return self.held(device, name)
        return self.slot(("copy", device, name), SAME)

    def is_split(self, name: str) -> bool:
        """Whether micro-batches have parts of an array of the batch."""
        return bool(self.batch[name].shape) and not is_under(name, self.o.unsplit_inputs)

    def is_key(self, name: str) -> bool:
        """Whether each micro-batch gets a key of its own."""
        t = self.batch[name]
        return (
            not t.shape and jnp.issubdtype(t.dtype, jax.dtypes.prng_key) and not is_under(name, self.o.unsplit_inputs)
        )

    def array(self, stage: int, name: str) -> int:
        """The slot of an array of the batch where a stage reads it."""
        device = self.plan.device_of(stage)
        kind = ROWS if self.is_split(name) and self.o.replicas > 1 else SAME
        found = self.slot(("batch", device, name), kind)
        self.given[device, name] = found
        return found

    def number(self, stage: int, m: int) -> int:
        """The slot of the number of a micro-batch."""
        device = self.plan.device_of(stage)
        found = self.slot(("number", device, m), SAME)
        if found not in self.fixed:
            self.fixed[found] = self.places.put(np.int32(m), stage, SAME)
        return found

    # -- writing ---------------------------------------------------------------------------------

    def tape(self) -> StepProgram:
        """The tape."""
        self._copies()
        for stage in self.programs.stages:
            self._zeros(stage)
        for task in self.plan.schedule.sequence():
            stage = self.programs.stages[task.stage]
            {"F": self._forward, "B": self._backward, "W": self._weights}[task.kind](stage, task)
        state = self._update()
        results = self._results(state)
        return self._finished(state, results)

    def _copies(self) -> None:
        """Send parameters that several stages read to those that do not hold them."""
        if self.host is not None:
            return
        for s in self.programs.stages:
            for n in s.params:
                target, home = self.param(s.index, n), self.plan.homes[n]
                device = self.plan.device_of(home)
                if device != self.plan.device_of(s.index) and not any(target in i.makes for i in self.list):
                    self.list.append(Transfer(self.held(device, n), target, home, s.index, SAME, n))

    def _sums(self, s: StagePrograms) -> list[int]:
        return [self._sum(s, n) for n in s.leaves]

    def _sum(self, s: StagePrograms, leaf: str) -> int:
        """The slot of the sum of a leaf's gradients that a stage makes."""
        return self.slot(("sum", s.index, leaf), self.own.cut(self.plan.cuts.state.get(leaf)))

    @property
    def own(self) -> StageSharding:
        """The kind of what each replica has for itself."""
        return EACH if self.o.replicas > 1 else SAME

    def _zeros(self, s: StagePrograms) -> None:
        if not s.leaves:
            return
        given = (s.weights or s.backward).inputs
        types = [given[n] for n in s.sums]

        def zeros() -> list[Any]:
            return [jnp.zeros(t.shape, t.dtype) for t in types]

        makes = self._sums(s)
        fn = self._compiled((s, "zeros"), lambda: zeros, s.index, (), makes)
        self.list.append(RunStage(s.index, fn, (), tuple(makes), f"zeros of stage {s.index}"))

    def _value(self, stage: int, name: str, m: int) -> int:
        return self.slot(("value", stage, name, m), self.own.cut(self.programs.cuts.get((stage, name))))

    def _forward(self, s: StagePrograms, task: Task) -> None:
        p, m = s.forward, task.micro
        self._run(p, s, task, lambda n: self._value(s.index, n, m))
        for n in s.sends:
            self._move(("value", s.index, n, m), ("value", s.index + 1, n, m), s.index, s.index + 1, n)
        self.kept[s.index, m] = tuple(self._value(s.index, n, m) for n in s.kept)

    def _backward(self, s: StagePrograms, task: Task) -> None:
        m = task.micro
        back = [n for n in s.backward.out_names if n in s.cotangents]
        self._run(s.backward, s, task, lambda n: self._made(s, n, m))
        for n in back:
            self._move(("back", s.index, n, m), ("cotangent", s.index - 1, n, m), s.index, s.index - 1, n)

    def _weights(self, s: StagePrograms, task: Task) -> None:
        if s.weights is not None:
            self._run(s.weights, s, task, lambda n: self._made(s, n, task.micro))

    def _made(self, s: StagePrograms, name: str, m: int) -> int:
        """The slot of an output of a backward program."""
        if name in s.sums:
            return self._sum(s, s.sums[name])
        if name in s.cotangents:
            return self.slot(("back", s.index, name, m), self.own)
        return self._value(s.index, name, m)

    def _read(self, s: StagePrograms, name: str, m: int) -> int:
        """The slot of an input of a program of a stage."""
        if name in s.sums:
            return self._sum(s, s.sums[name])
        if name in s.cotangents:
            return self.slot(("cotangent", s.index, name, m), self.own)
        if name in s.params:
            return self.param(s.index, name)
        if name in s.batch:
            return self.array(s.index, name)
        return self._value(s.index, name, m)

    def _move(self, source: tuple[Any, ...], target: tuple[Any, ...], origin: int, stage: int, what: str) -> None:
        a, b = self.slot(source, self.own), self.slot(target, self.own)
        self.list.append(Transfer(a, b, origin, stage, self.own, what))

    def _run(self, p: Program, s: StagePrograms, task: Task, made: Callable[[str], int]) -> None:
        """Write a program of a micro-batch."""
        if not p.out_names:
            return
        m = task.micro
        if self.host is not None:  # fetched for this task alone
            for n in p.in_names:
                if n in s.params:
                    home = self.plan.homes[n]
                    held = self.held(self.plan.device_of(home), n)
                    self.list.append(Transfer(held, self.param(s.index, n), home, s.index, SAME, n))
        reads = [self._read(s, n, m) for n in p.in_names]
        makes = [made(n) for n in p.out_names]
        numbered = self._is_numbered(p)
        if numbered:
            reads.append(self.number(s.index, m))
        donated = [i for i, n in enumerate(p.in_names) if n in s.sums and n in p.outputs]
        fn = self._compiled(p, lambda: self._of_micro(p), s.index, reads, makes, donated)
        self.list.append(RunStage(s.index, fn, tuple(reads), tuple(makes), str(task), task))

    def _compiled(
        self,
        of: Any,
        fn: Callable[[], Callable[..., Sequence[Any]]],
        stage: int,
        reads: Sequence[int],
        makes: Sequence[int],
        donated: Sequence[int] = (),
        on: Places | None = None,
    ) -> Callable[..., Sequence[Any]]:
        """What `fn` gives, compiled; once for each program, however many schedules it is in."""
        ins, outs = tuple(self.kinds[i] for i in reads), tuple(self.kinds[i] for i in makes)
        key = (of, ins, outs, tuple(donated))
        if key not in self.places.known:
            self.places.known[key] = (on or self.places).compiled(fn(), stage, ins, outs, donated)
        return self.places.known[key]

    def _is_numbered(self, p: Program) -> bool:
        """Whether a program reads something that depends on which micro-batch it is."""
        return self.o.num_micro_batch > 1 and any(
            n in self.batch and (self.is_split(n) or self.is_key(n)) for n in p.in_names
        )

    def _of_micro(self, p: Program) -> Callable[..., Sequence[Any]]:
        """A program, as a function of whole arrays of the batch and the number of the micro-batch."""
        one = per_trainer(p)
        names, o = p.in_names, self.o
        types = p.inputs
        split = {i for i, n in enumerate(names) if n in self.batch and self.is_split(n)}
        keys = {i for i, n in enumerate(names) if n in self.batch and self.is_key(n)}
        numbered = self._is_numbered(p)

        def run(*args: Any) -> Sequence[Any]:
            values = list(args[: len(names)])
            for i in keys:
                if o.replicas > 1:
                    values[i] = jax.random.fold_in(values[i], jax.lax.axis_index(o.over_replicas.over))
                if o.num_micro_batch > 1:
                    values[i] = jax.random.fold_in(values[i], args[-1])
            if numbered:
                for i in split:
                    rows = types[names[i]].shape[0]
                    values[i] = jax.lax.dynamic_slice_in_dim(values[i], args[-1] * rows, rows)
            return one(*values)

        return run

    # -- the end of the step ---------------------------------------------------------------------

    def _update(self) -> dict[tuple[int, str], int]:
        """Write the update; the slots of the new state."""
        plan, placed = self.plan, self.plan.update.placed
        program = placed.program
        inner = program.jaxpr.jaxpr
        name_of = dict(zip(inner.invars, program.in_names, strict=True))
        state = set(plan.state)
        consts = dict(zip(inner.constvars, constants(program.jaxpr), strict=True))
        axes = {v: self._update_kind(n) for v, n in name_of.items()}
        kinds = _kinds(program, axes, plan)

        def at(v: Var, stage: int) -> int:
            n = name_of.get(v)
            if n is None:
                return self.slot(("update", stage, v), kinds[v].cut(placed.cuts.get(v)))
            home = placed.home[n]
            if n in state and home is None:
                return self.held(stage, n)
            if home != stage and not (n in plan.homes and plan.device_of(home or 0) == plan.device_of(stage)):
                return self.slot(("update", stage, v), kinds[v])
            if n in state:
                return self.held(plan.device_of(stage) if n in plan.homes else stage, n)
            leaf, _ = plan.update.sums[n]
            return self.slot(("sum" if self.host is None else "sum on the host", stage, leaf), self._update_kind(n))

        if self.host is not None:
            for s in self.programs.stages:
                for name, n in s.sums.items():
                    here, there = (self.slot((which, s.index, n), self.own) for which in ("sum", "sum on the host"))
                    self.list.append(Transfer(here, there, s.index, s.index, self.own, name, to_host=True))
        sends: dict[tuple[Var, int], list[int]] = {}
        for v, origin, target in placed.sends:
            sends.setdefault((v, origin), []).append(target)

        def send(v: Var, stage: int) -> None:
            for target in sends.pop((v, stage), ()):
                a, b = at(v, stage), at(v, target)
                if a != b:
                    what, to_host = name_of.get(v, "update"), self.host is not None
                    self.list.append(Transfer(a, b, stage, target, kinds[v], what, to_host))

        for v, origin in list(sends):
            if v in name_of or v in consts:
                send(v, origin)
        outs = dict(zip(program.out_names, inner.outvars, strict=True))
        new_of = {a: n for n, a in outs.items() if n in state and isinstance(a, Var)}
        for number, piece in enumerate(placed.pieces):
            reads = [at(v, piece.place) for v in piece.reads]
            makes = [at(v, piece.place) for v in piece.makes]
            later = {(v, p.place) for p in placed.pieces[number + 1 :] for v in p.reads}
            donated = self._donated(piece, name_of, new_of, later) if self.donate else []
            made = lambda p=piece: _of_piece(p)
            fn = self._compiled(piece, made, piece.place, reads, makes, donated, on=self.host)
            self.list.append(RunStage(piece.place, fn, tuple(reads), tuple(makes), f"update of stage {piece.place}"))
            for v in piece.makes:
                send(v, piece.place)
        found: dict[tuple[int, str], int] = {}
        for n in plan.state:
            home = placed.home[n]
            stages = range(self.o.model_stages) if home is None else [home]
            for k in stages:
                a = outs[n]
                place = plan.device_of(k) if n in plan.homes else k
                if isinstance(a, Literal):
                    found[place, n] = self._literal(a, k, n)
                elif n in plan.merges and n in plan.homes:  # made by the forward pass
                    found[place, n] = self.held(place, n)
                else:
                    self.held(place, n)
                    found[place, n] = at(a, k)
        self._from_update = {
            n: at(a, placed.out_at[n] or 0) if isinstance(a, Var) else self._literal(a, 0, n)
            for n, a in outs.items()
            if n not in state
        }
        return found

    def _literal(self, a: Any, stage: int, name: str) -> int:
        found = self.slot(("literal", stage, name), SAME)
        self.fixed[found] = (self.host or self.places).put(np.asarray(a.val, a.aval.dtype), stage, SAME)
        return found

    def _update_kind(self, name: str) -> StageSharding:
        """The kind of an input of the update."""
        if name not in self.plan.update.sums:
            return self.state_kind(name)
        leaf, _ = self.plan.update.sums[name]
        return self.own.cut(self.plan.cuts.state.get(leaf))

    @staticmethod
    def _donated(
        piece: StagePart, name_of: dict[Var, str], new_of: dict[Any, str], later: Collection[tuple[Var, int]]
    ) -> list[int]:
        """The positions of old state whose new value is made in the same piece, and that is not wanted any more."""
        made = {new_of[v] for v in piece.makes if v in new_of}
        spent = lambda v: name_of.get(v) in made and (v, piece.place) not in later and v not in new_of
        return [i for i, v in enumerate(piece.reads) if spent(v)]

    def _results(self, state: dict[tuple[int, str], int]) -> dict[str, tuple[int, StageSharding, int]]:
        """Write what merges results."""
        found: dict[str, tuple[int, StageSharding, int]] = {}
        for s, p in zip(self.programs.stages, self.programs.results, strict=True):
            if p is None:
                continue
            of = {micro_name(n, m): (n, m) for n in s.results for m in range(self.o.num_micro_batch)}
            reads = [self._value(s.index, *of[n]) for n in p.in_names]
            kinds = [self._result_kind(n) for n in p.out_names]
            makes = [self.slot(("result", n), kind) for n, kind in zip(p.out_names, kinds, strict=True)]
            fn = self._compiled(p, lambda p=p: per_trainer(p), s.index, reads, makes)  # type: ignore[misc]
            self.list.append(RunStage(s.index, fn, tuple(reads), tuple(makes), p.name))
            for n, slot, kind in zip(p.out_names, makes, kinds, strict=True):
                if n not in self.plan.homes:
                    found[n] = (slot, kind, s.index)
                    continue
                home = self.plan.homes[n]
                place = self.plan.device_of(home)
                if place != self.plan.device_of(s.index) or self.host is not None:
                    target = self.slot(("moved", n), kind)
                    self.list.append(Transfer(slot, target, s.index, home, kind, n, self.host is not None))
                    slot = target
                state[place, n] = slot
        out_at = self.plan.update.placed.out_at
        return found | {n: (slot, SAME, out_at[n] or 0) for n, slot in self._from_update.items()}

    def _result_kind(self, name: str) -> StageSharding:
        if is_whole(self.plan.merges[name]) or self.o.replicas == 1:
            return SAME
        return FIRST if name in self.plan.homes else EACH  # all replicas make the same of state

    def _finished(
        self, state: dict[tuple[int, str], int], results: dict[str, tuple[int, StageSharding, int]]
    ) -> StepProgram:
        stay = {*self.fixed, *state.values(), *(slot for slot, _, _ in results.values())}
        if not self.donate:
            stay |= set(self.given.values())
        empty: list[list[int]] = [[] for _ in self.list]
        wanted = set(stay)
        for i in range(len(self.list) - 1, -1, -1):
            ins = self.list[i]
            empty[i] = [slot for slot in dict.fromkeys((*ins.reads, *ins.makes)) if slot not in wanted]
            wanted.difference_update(ins.makes)  # what is there before is another value
            wanted.update(ins.reads)
        instructions = tuple((ins, tuple(gone)) for ins, gone in zip(self.list, empty, strict=True))
        passing = {slot: key[1] for key, slot in self.slots.items() if key[0] in ("value", "cotangent", "back")}
        return StepProgram(instructions, len(self.slots), self.given, self.fixed, state, results, self.kept, passing)


def _of_piece(piece: StagePart) -> Callable[..., Sequence[Any]]:
    """A piece as a function of one replica."""
    inner = piece.jaxpr.jaxpr
    values = dict(zip(inner.constvars, constants(piece.jaxpr), strict=True))

    def run(*args: Any) -> Sequence[Any]:
        return interpret(inner.eqns, {**values, **dict(zip(inner.invars, args, strict=True))}, inner.outvars, OVER_AXIS)

    return run


def _kinds(program: Program, given: dict[Var, StageSharding], plan: PipelinePlan) -> dict[Any, StageSharding]:
    """How replicas have each value of the update: what is made of what they have for themselves is their own."""
    inner = program.jaxpr.jaxpr
    kinds: dict[Any, StageSharding] = dict(given)
    for eqn in inner.eqns:
        whole = eqn.primitive in (all_gather_p, all_reduce_p)
        own = any(isinstance(a, Var) and _varies(kinds.get(a, SAME)) for a in eqn.invars)
        own = own or eqn.primitive is trainer_index_p
        kinds |= dict.fromkeys(eqn.outvars, EACH if own and not whole else SAME)
    for n, a in zip(program.out_names, inner.outvars, strict=True):
        if isinstance(a, Var):  # state that is not cut is the same in all replicas, and so are results
            kinds[a] = state_kind(plan, n)
    return kinds


def _varies(kind: StageSharding) -> bool:
    """Whether replicas have something else each."""
    return kind.own or kind.rows or kind.axis is not None


def state_kind(plan: PipelinePlan, name: str) -> StageSharding:
    """How the replicas and shards of a stage have an array of its state."""
    axis = plan.update.slice_axis(name) if plan.options.replicas > 1 else None
    return (SAME if axis is None else cut_along(axis)).cut(plan.cuts.state.get(name))
