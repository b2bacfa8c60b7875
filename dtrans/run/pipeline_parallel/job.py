"""A pipeline, running: `init` makes the first state, `step` goes from one to the next."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import StateError
from dtrans.ir.array_fns import padded_to
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.pytree import TreeSpec, is_under, without
from dtrans.pipeline_parallel.forward_pass import summary_name
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.results import STACK
from dtrans.plan import realises
from dtrans.run.base.batch import batch_arrays
from dtrans.run.pipeline_parallel.compile_step import StepCompiler, state_kind
from dtrans.run.pipeline_parallel.instructions import RunStage, StepProgram, Transfer
from dtrans.run.pipeline_parallel.stage_devices import ROWS, SAME, Host, OnDevices, OneDevice, Places, StageSharding
from dtrans.step.summary import merge


@partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "extra"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PipelineState:
    """Where a job is: a pytree of arrays by name, each on the devices of the stage that holds it.

    Attributes:
      params, opt_state: by name. What every stage has (a count of steps) is stage 0's here.
      extra: that of the other stages, by `name@stage`.
    """

    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


class PipelineJob:
    """A plan, running. `init` and `step` are functions of a state; the job holds what it compiled.

    Args:
      plan: what to run.
      places: where stages are.
      donate: whether a step may reuse the memory of the state it is given.
    """

    def __init__(self, plan: PipelinePlan, places: Places, *, donate: bool) -> None:
        self.plan = plan
        self.places = places
        self.donate = donate
        self.host = Host(places.replicas) if plan.options.memory.offload else None
        self._specs = plan.main.args[2:]
        self._tapes: dict[Any, StepProgram] = {}
        self._shown: dict[str, Any] = {}
        self._last: Any = lambda: None  # the state that was returned last: it needs no second look

    # -- what a user calls -----------------------------------------------------------------------

    def init(self, *args: Any) -> PipelineState:
        """The first state, from the arguments of `init`: each stage makes its own part."""
        startup, places = self.plan.startup, self.host or self.places
        flat = startup.flatten(*args)
        found: dict[tuple[int, str], Any] = {}
        for stage in range(self.plan.options.model_stages):
            if not self.is_mine(stage):
                continue
            names = [n for n in self.plan.state if self.plan.home(n) in (stage, None)]
            if not names:
                continue
            made = self._startup(stage, names)(*(places.put(x, stage, SAME) for x in flat))
            for n, x in zip(names, made, strict=True):
                # copies: a state may be donated, and init may return one array twice
                found[self._place(stage, n), n] = places.put(self._padded(n, x), stage, self._kind(n))
        return self._state(found)

    def step(self, state: PipelineState, *batch: Any) -> tuple[Any, ...]:
        """One step on the global batch: (state, loss[, aux]), or whatever else the step returns beside its state.

        Arrays of the batch are cut on dim 0, first for replicas and then for micro-batches; 0-d arrays, and those that
        the plan has as `unsplit_inputs`, go to every micro-batch whole. A PRNG key is folded with the numbers of both.

        Raises:
          BatchError: arrays that micro-batches and replicas do not divide.
          StateError: not a state of this job, or one that was already stepped from, and was donated.
        """
        tape, env = self.ready(state, *batch)
        self.play(tape, env)
        return self.answer(tape, env)

    def params(self, state: PipelineState) -> Any:
        """The parameters, as the pytree that they were given in."""
        return self._tree(self.plan.main.args[0], lambda n: state.params[n])

    def opt_state(self, state: PipelineState) -> Any:
        """The optimizer's state, as the pytree that it was given in."""
        return self._tree(self.plan.main.args[1], lambda n: state.opt_state[n])

    def _tree(self, spec: TreeSpec, held: Callable[[str], Any]) -> Any:
        """Arrays of the state as the pytree that they were given in: no padding, rows of one array together."""
        leaves = []
        for n in spec.names:
            rows = self.plan.stacks.get(n)
            if rows is None:
                leaves.append(self._whole(n, held(n)))
            else:
                parts = [self._whole(r.name, held(r.name)) for r in rows]
                leaves.append(jnp.concatenate([jax.device_put(p, parts[0].sharding) for p in parts], rows[0].axis))
        return spec.unflatten(leaves)

    def is_mine(self, stage: int) -> bool:
        """Whether a stage is run by this process."""
        return True

    @property
    def summaries(self) -> dict[str, Any]:
        """What the model showed in the last step (`dtrans.summary`), merged, by tag; of texts nothing.

        Example of writing it: `writer.write(i, job.summaries, job.plan.summaries)`.
        """
        found = {}
        for s in self.plan.summaries:
            x = self._shown.get(summary_name(s.tag))
            if x is not None:
                rows = x if self.places.replicas > 1 else x[None]
                found[s.tag] = merge(s, [list(of) for of in rows], self.plan.collected.get(summary_name(s.tag)))
        return found

    def scheduled(self, name: str) -> PipelineJob:
        """A job that does the same in another order, with what this one has compiled.

        Raises:
          ConfigError: the schedule is unknown, or needs other programs: interleaved stages, a backward in two parts.
        """
        return PipelineJob(self.plan.scheduled(name), self.places, donate=self.donate)

    # -- a step, in parts ------------------------------------------------------------------------

    def ready(self, state: PipelineState, *batch: Any) -> tuple[StepProgram, list[Any]]:
        """The instructions of a step, and the slots that they work on."""
        arrays = dict(zip(self.plan.batch, batch_arrays(self._specs, batch, self.plan.main.inputs), strict=True))
        tape = self._tape(arrays)
        return tape, self._filled(tape, state, arrays)

    def _tape(self, arrays: dict[str, Any]) -> StepProgram:
        """The instructions of a step, for a batch of these arrays."""
        key = tuple((x.shape, x.dtype) for x in arrays.values())
        known = self._tapes.get(key)
        if known is None:
            types = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in self.plan.main.inputs.items()}
            given = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}
            programs = self.plan.specialize([*{**types, **given}.values()])
            known = self._tapes[key] = StepCompiler(
                self.plan, programs, self.places, self.host, given, donate=self.donate
            ).tape()
        return known

    def _filled(self, tape: StepProgram, state: PipelineState, arrays: dict[str, Any]) -> list[Any]:
        """The slots of a step, with what it begins with."""
        env: list[Any] = [None] * tape.size
        for slot, x in tape.fixed.items():
            env[slot] = x
        held = self._held(state)
        for (place, n), slot in tape.given.items():
            if not self.is_mine(place):
                continue
            if n in arrays:
                env[slot] = self.places.put(arrays[n], place, self._batch_kind(n, arrays[n]))
            else:
                env[slot] = held[place, n]
        return env

    def play(
        self, tape: StepProgram, env: list[Any], look: Callable[[RunStage | Transfer], None] | None = None
    ) -> None:
        """Carry out all instructions; `look` is called after each."""
        for ins, empty in tape.instructions:
            if isinstance(ins, Transfer):
                env[ins.target] = self.put(ins, env[ins.source])
            else:
                for slot, x in zip(ins.makes, ins.fn(*[env[i] for i in ins.reads]), strict=True):
                    env[slot] = x
            if look is not None:
                look(ins)
            for slot in empty:
                env[slot] = None

    def put(self, move: Transfer, x: Any) -> Any:
        """A value where it is moved to."""
        to = self.host if move.to_host else self.places
        assert to is not None, move
        return to.put(x, move.stage, move.kind)

    def answer(self, tape: StepProgram, env: list[Any]) -> tuple[Any, ...]:
        """The new state, and what the step returns beside it."""
        new = self._state({key: env[slot] for key, slot in tape.state.items() if self.is_mine(key[0])})
        self._last = weakref.ref(new)
        values = {n: self._result(n, env[slot], kind) for n, (slot, kind, _) in tape.results.items()}
        self._shown = {n: env[slot] for n, (slot, _, _) in tape.results.items() if self.plan.merges.get(n) == STACK}
        tree = self._rest.unflatten([values[n] for n in self._rest.names])
        return (new, *(tree if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields") else (tree,)))

    def _result(self, name: str, x: Any, kind: StageSharding) -> Any:
        """A result as the user gets it: of what replicas have for themselves, all rows, all values, or the first."""
        if not kind.own:
            return x
        way = self.plan.merges[name]
        if way in ("concat", "GLOBAL_CONCAT"):
            return x.reshape(-1, *x.shape[2:])
        return x.reshape(-1, *x.shape[1:]) if way == "each" else x[0]

    # -- state -----------------------------------------------------------------------------------

    @cached_property
    def _rest(self) -> TreeSpec:
        """What the step returns beside its state."""
        main = self.plan.main
        return without(without(main.out, main.args[0]), main.args[1])

    def _place(self, stage: int, name: str) -> int:
        return self.plan.device_of(stage) if name in self.plan.homes else stage

    def _kind(self, name: str) -> StageSharding:
        return state_kind(self.plan, name)

    def _batch_kind(self, name: str, x: Any) -> StageSharding:
        split = bool(x.shape) and not is_under(name, self.plan.options.batch.unsplit_inputs)
        return ROWS if split and self.places.replicas > 1 else SAME

    def _startup(self, stage: int, names: Sequence[str]) -> Callable[..., Any]:
        """What makes a stage's part of the first state."""
        startup = self.plan.startup
        outs = dict(zip(startup.out_names, startup.jaxpr.jaxpr.outvars, strict=True))
        rows = {r.name: (n, r) for n, runs in self.plan.stacks.items() for r in runs}
        b = Builder(startup.jaxpr)
        b.invars += startup.jaxpr.jaxpr.invars
        for eqn in startup.jaxpr.jaxpr.eqns:
            b.keep(eqn)
        wanted = []
        for n in names:
            whole, run = rows.get(n, (n, None))
            wanted.append(outs[whole] if run is None else b.part(outs[whole], run.axis, run.start, run.stop))
        part = b.build(wanted)
        return (self.host or self.places).startup(eliminate_dead(part), stage)

    def _state(self, found: dict[tuple[int, str], Any]) -> PipelineState:
        parts: dict[str, dict[str, Any]] = {"params": {}, "opt_state": {}, "extra": {}}
        for part, key, at in self._layout:
            parts[part][key] = found[at]
        return PipelineState(**parts)

    @cached_property
    def _layout(self) -> list[tuple[str, str, tuple[int, str]]]:
        """Where a state has the arrays of this process's stages: the part of it, the key there, (place, name)."""
        found = []
        for part, spec in zip(("params", "opt_state"), self.plan.update.program.args[:2], strict=True):
            for n in spec.names:
                everywhere = self.plan.home(n) is None
                first = self._first(n)
                places = range(self.plan.options.model_stages) if everywhere else [first]
                found += [
                    (part, n, (k, n)) if k == first else ("extra", f"{n}@{k}", (k, n))
                    for k in places
                    if self.is_mine(k)
                ]
        return found

    def _held(self, state: PipelineState) -> dict[tuple[int, str], Any]:
        """The arrays of a state by place. Raises StateError for that of another job."""
        if not isinstance(state, PipelineState):
            raise StateError(f"step takes the state that init or step returned, not {type(state).__name__}")
        try:
            held = {at: getattr(state, part)[key] for part, key, at in self._layout}
        except KeyError as e:
            raise StateError(f"this is not a state of this job: it has no {e.args[0]}") from e
        for (_, n), x in held.items():
            if isinstance(x, jax.Array) and x.is_deleted():
                raise StateError(
                    f"this state was already stepped from, and {n} in it was donated to that step; "
                    "use the state that step returned, or a job with donate=False"
                )
        return held if state is self._last() else self._looked_at(held)

    def _looked_at(self, held: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        """Arrays of a state that may be from elsewhere, where stages have them."""
        seen: dict[int, str] = {}
        found = {}
        for (place, n), x in held.items():
            t, padding = self.plan.types[n], self.plan.padded(n)
            shape = t.shape if padding is None else (*t.shape[: padding[0]], padding[1], *t.shape[padding[0] + 1 :])
            if (x.shape, x.dtype) != (shape, t.dtype):
                raise StateError(
                    f"this is not a state of this job: {n} is {x.dtype}{list(x.shape)} in it, and here "
                    f"{t.dtype}{list(shape)}"
                )
            if self.donate and seen.setdefault(id(x), n) != n:
                raise StateError(
                    f"{n} and {seen[id(x)]} are one array, whose memory cannot be donated twice: copy one of them "
                    "(jnp.copy), or use a job with donate=False"
                )
            found[place, n] = (self.host or self.places).put(x, place, self._kind(n))
        return found

    def _first(self, name: str) -> int:
        home = self.plan.home(name)
        return 0 if home is None else self._place(home, name)

    def _padded(self, name: str, x: jax.Array) -> jax.Array:
        """A copy of an array of the state, padded where replicas have slices of one size."""
        padding = self.plan.padded(name)
        return jnp.copy(x) if padding is None else padded_to(jnp.copy(x), *padding)

    def _whole(self, name: str, x: Any) -> Any:
        """An array of the state without what it was padded with."""
        shape = self.plan.types[name].shape
        return x if x.shape == shape else x[tuple(slice(0, n) for n in shape)]


@realises(PipelinePlan, "mesh")
def on_mesh(plan: PipelinePlan, devices: Sequence[jax.Device] | None, *, donate: bool) -> PipelineJob:
    """A job on devices of this process."""
    o = plan.options
    cluster = plan.cluster if devices is None else dataclasses.replace(plan.cluster, devices=tuple(devices))
    grids = cluster.virtual_devices(plan.cuts.shards[: o.num_stages], o.replicas)
    return PipelineJob(plan, OnDevices(grids), donate=donate)


@realises(PipelinePlan, "simulate")
def simulated(plan: PipelinePlan) -> PipelineJob:
    """A job on one device."""
    return PipelineJob(plan, OneDevice(plan.options.replicas, plan.cuts.shards), donate=False)
