"""Realisers of data-parallel plans: all trainers on a mesh of this process's devices, or on one device.

    mesh       jit(shard_map) over the axis; XLA carries out the reductions
    simulate   jit(vmap) with the axis name, on one device: for tests, notebooks, and machines one does not have

Each makes one function of a step, compiled once for each batch shape.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dtrans._jax import gloo_scatters_wrongly
from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.collective import CollectivePlan
from dtrans.errors import ConfigError, StateError
from dtrans.ops import after_p, all_gather_p, all_reduce_p, all_to_all_p, combine, reduce_scatter_p, trainer_index_p
from dtrans.program import Program
from dtrans.run.batch import batch_arrays, part_types, share_of, shared_batch
from dtrans.run.pieces import Rules, interpret
from dtrans.trees import TreeSpec, is_under, without


_REDUCE: dict[str, Callable[..., Any]] = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def _all_reduce(*xs: Any, op: str, over: tuple[str, ...], **_: Any) -> Sequence[Any]:
    if op in _REDUCE:
        made: Sequence[Any] = _REDUCE[op](xs, over)
        return made
    # products and bits: XLA has no collective for them that all backends carry out; what is so reduced is small
    return [combine(op, list(jax.lax.all_gather(x, over))) for x in xs]


def _reduce_scatter(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    scatter = partial(jax.lax.psum_scatter, axis_name=over, scatter_dimension=axis, tiled=True)
    if not gloo_scatters_wrongly():
        return [scatter(x) for x in xs]
    reduce = partial(_reduce_and_slice, over=over, axis=axis)
    return [jax.lax.platform_dependent(x, cpu=reduce, default=scatter) for x in xs]


def _reduce_and_slice(x: jax.Array, *, over: tuple[str, ...], axis: int) -> jax.Array:
    """A reduce-scatter as an all-reduce, of which each trainer takes its part."""
    part = x.shape[axis] // jax.lax.axis_size(over)
    start = jax.lax.axis_index(over) * part
    made: jax.Array = jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, over), start, part, axis)
    return made


def _all_gather(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    return [jax.lax.all_gather(x, over, axis=axis, tiled=True) for x in xs]


def _all_to_all(*xs: Any, over: tuple[str, ...], cut: int, joined: int, **_: Any) -> Sequence[Any]:
    return [jax.lax.all_to_all(x, over, cut, joined, tiled=True) for x in xs]


def _after(x: jax.Array, y: jax.Array) -> Sequence[Any]:
    """XLA keeps to `optimization_barrier`, except for CPUs: there it goes before equal equations are made one."""
    return [jax.lax.platform_dependent(x, y, cpu=_after_on_cpu, default=_after_elsewhere)]


def _after_on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x`, by a choice that is always the same; XLA does not know that, for it looks at `y`."""
    one = jax.lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(()).astype(jnp.float32)
    return jnp.where(jnp.logical_or(one == one, one != one), x, jnp.zeros_like(x))


def _after_elsewhere(x: jax.Array, y: jax.Array) -> jax.Array:
    made: jax.Array = jax.lax.optimization_barrier((x, y))[0]
    return made


# communication over a named axis, as what JAX has for it
OVER_AXIS: Rules = {
    all_reduce_p: _all_reduce,
    reduce_scatter_p: _reduce_scatter,
    all_gather_p: _all_gather,
    all_to_all_p: _all_to_all,
    after_p: _after,
    trainer_index_p: lambda over: [jax.lax.axis_index(over)],
}


def per_trainer(program: Program) -> Callable[..., list[Any]]:
    """A program as a function of flat arrays, for one trainer on a named axis."""
    inner = program.jaxpr.jaxpr
    constants = dict(zip(inner.constvars, program.jaxpr.consts, strict=True))

    def run(*args: Any) -> list[Any]:
        return interpret(
            inner.eqns, {**constants, **dict(zip(inner.invars, args, strict=True))}, inner.outvars, OVER_AXIS
        )

    return run


@partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "extra"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class CollectiveState:
    """Where a job is: a pytree of arrays, by name. Every trainer has the same."""

    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)  # what a plan keeps beside: a loss scale


class CollectiveJob(abc.ABC):
    """A plan, running. `init` and `step` are functions of a state; the job itself holds what it compiled.

    Args:
      plan: what to run.
    """

    whole_option = "dtrans.nccl2(replicated=(...))"  # how a user says that every trainer gets an array whole

    def __init__(self, plan: CollectivePlan, *, donate: bool = False) -> None:
        self._plan_for(plan, donate=donate)

    def _plan_for(self, plan: CollectivePlan, *, donate: bool) -> None:
        """Take a plan."""
        self.plan = plan
        self._donates = donate
        self._specs = plan.main.args[2:]
        self._names = [n for spec in self._specs for n in spec.names]
        self._whole = {n for n in self._names if is_under(n, plan.replicated)}
        self._shares = [share_of(n, plan.main.inputs[n], plan.trainers, self._whole) for n in self._names]
        self._split = [n for n, share in zip(self._names, self._shares, strict=True) if share == "split"]
        self._last: list[Any] = []  # types of the last batch: one like it needs no second look
        # state goes through jit as a whole: to take it apart here would cost more than a small step
        self._jitted = jax.jit(self._traced, donate_argnums=0 if donate else ())

    # -- what a user calls -----------------------------------------------------------------------

    def init(self, *args: Any) -> CollectiveState:
        """The first state, from the arguments of `init`."""
        startup = self.startup
        made = dict(zip(startup.out_names, self._start(startup, startup.flatten(*args)), strict=True))
        params, opt_state, _ = self._state
        extra = self._start_extra({n: jnp.asarray(x) for n, x in self.plan.extra_state.items()})
        return CollectiveState({n: made[n] for n in params}, {n: made[n] for n in opt_state}, extra)

    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """One step on the global batch: (state, loss[, aux]), or whatever else the step returns beside its state.

        Arrays of the batch are split over the trainers on dim 0; 0-d arrays, and those that the plan has as replicated,
        go to every trainer whole. A PRNG key (`jax.random.key`) is folded with the trainer's number.

        Raises:
          BatchError: arrays that differ in their number of rows, or that the trainers do not divide.
          StateError: not a state of this job, or one that was already stepped from, and was donated.
        """
        self._refuse(state)
        arrays = self._arrays(batch)
        types = [(x.shape, x.dtype) for x in arrays]
        if types != self._last:
            self._check(state, arrays)
            self._last = types
        arrays = self._placed(arrays)
        try:
            new, rest = self._jitted(state, arrays)
        except ValueError as e:
            if "incompatible devices" not in str(e):
                raise
            new, rest = self._jitted(self._here(state), arrays)  # it comes from elsewhere, from a checkpoint perhaps
        tree = self._rest.unflatten(rest)
        return (new, *(tree if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields") else (tree,)))

    def lower(self, state: CollectiveState, *batch: Any) -> Any:
        """What `step` compiles for these arguments, as `jax.jit(...).lower` gives it: read it with `.as_text()`."""
        return self._jitted.lower(state, self._placed(self._arrays(batch)))

    def params(self, state: CollectiveState) -> Any:
        """The parameters, as the pytree that they were given in."""
        spec = self.plan.main.args[0]
        return spec.unflatten([state.params[n] for n in spec.names])

    def opt_state(self, state: CollectiveState) -> Any:
        """The optimizer's state, as the pytree that it was given in."""
        spec = self.plan.main.args[1]
        return spec.unflatten([state.opt_state[n] for n in spec.names])

    # -- how it runs -----------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """Which run of this job it is: the default tag of its checkpoints."""
        return THIS_PROCESS

    @property
    def startup(self) -> Program:
        """What makes the first state."""
        return self.plan.startup

    def _refuse(self, state: Any) -> None:
        """Refuse what is no state, or none any more."""
        if not isinstance(state, CollectiveState):
            raise StateError(f"step takes the state that init or step returned, not {type(state).__name__}")
        seen: dict[int, str] = {}
        held: Sequence[dict[str, Any]] = (
            state.params,
            state.opt_state,
            state.extra,
        )  # NumPy's arrays if it comes from a checkpoint
        for n, x in (item for of in held for item in of.items()):
            if not isinstance(x, jax.Array):
                continue
            if x.is_deleted():  # JAX would look for its memory, and not always find out
                raise StateError(
                    f"this state was already stepped from, and {n} in it was donated to that step; "
                    "use the state that step returned, or a job with donate=False"
                )
            if seen.setdefault(id(x), n) != n and self._donates:  # nor that it was to give its memory twice
                raise StateError(
                    f"{n} and {seen[id(x)]} are one array, whose memory cannot be donated twice: copy one of them "
                    "(jnp.copy), or use a job with donate=False"
                )

    def _arrays(self, batch: Sequence[Any]) -> list[Any]:
        """The arrays of a global batch."""
        return batch_arrays(self._specs, batch, self.plan.main.inputs)

    def _check(self, state: CollectiveState, arrays: list[Any]) -> None:
        """Refuse a batch that cannot be shared."""
        self._shared(arrays)

    def _traced(self, state: CollectiveState, arrays: Sequence[Any]) -> tuple[CollectiveState, list[Any]]:
        """A step of all trainers, as `jax.jit` traces it, once for each batch shape."""
        program = self._program(state, arrays)
        made = self._mapped(program)(self._held(state), arrays)
        values = dict(zip(program.out_names, made, strict=True))
        new = CollectiveState(*({n: values[n] for n in names} for names in self._state))
        return new, [values[n] for n in self._rest.names]

    def _program(self, state: CollectiveState, arrays: Sequence[Any]) -> Program:
        """The program for a trainer's part of a batch."""
        types = [self._type_of(n, x) for n, x in zip(self._held_names, self._held(state), strict=True)]
        return self.plan.program.at_flat(types + part_types(self._shared(arrays), self.plan.trainers))

    def _shared(self, arrays: Sequence[Any]) -> list[tuple[Any, str]]:
        """How trainers share a batch. Raises BatchError where they cannot."""
        return shared_batch(self._names, arrays, self.plan.trainers, self._whole, self.whole_option)

    def _held(self, state: CollectiveState) -> list[Any]:
        """The arrays of a state, in the order of the program. Raises StateError for that of another job."""
        held = (state.params, state.opt_state, state.extra)
        try:
            return [of[n] for of, names in zip(held, self._state, strict=True) for n in names]
        except KeyError as e:
            raise StateError(f"this is not a state of this job: it has no {e.args[0]}") from e

    def _type_of(self, name: str, x: Any) -> jax.ShapeDtypeStruct:
        """The type of what a trainer has of an array of the state."""
        axis = self.slice_axis(name)
        shape = list(x.shape)
        if axis is not None:
            shape[axis] //= self.plan.axes[-1][1]
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def slice_axis(self, name: str) -> int | None:
        """The dimension along which trainers on the last axis have slices of an array of the state; None for no slices.

        The array itself is of all slices, one behind the other.
        """
        return None

    def _here(self, state: CollectiveState) -> CollectiveState:
        """A state where steps want it."""
        return state

    @cached_property
    def _held_names(self) -> list[str]:
        """The names of the arrays of the state, in the order of the program."""
        return [n for names in self._state for n in names]

    @property
    def _state(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        """The names of parameters, of the optimizer's state, and of what the plan keeps beside."""
        params, opt_state = self.plan.program.args[:2]
        return params.names, opt_state.names, tuple(self.plan.extra_state)

    @cached_property
    def _rest(self) -> TreeSpec:
        """What the step returns beside its state."""
        main = self.plan.main
        return without(without(main.out, main.args[0]), main.args[1])

    def _way(self, name: str) -> str:
        """What becomes of an output: of state, all trainers have the same, or slices."""
        if self.slice_axis(name) is not None:
            return "slice"
        way = self.plan.merges.get(name, "same")
        return way if way in ("concat", "each") else "same"

    def _start_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """What the plan keeps beside, where steps want it."""
        return extra

    @abc.abstractmethod
    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        """The outputs of the startup program, where steps want them."""

    @abc.abstractmethod
    def _mapped(self, program: Program) -> Callable[[list[Any], Sequence[Any]], Sequence[Any]]:
        """A program for all trainers, as a function of (state, batch) that gives its outputs, merged."""

    def _placed(self, arrays: list[Any]) -> list[Any]:
        """A batch where steps want it."""
        return arrays


class MeshTrainers(CollectiveJob):
    """Trainers on a mesh of devices; made by `plan.on_mesh()`."""

    def __init__(
        self, plan: CollectivePlan, devices: Sequence[jax.Device] | None = None, *, donate: bool = True
    ) -> None:
        self._build(plan, devices, donate=donate)

    def _build(self, plan: CollectivePlan, devices: Sequence[jax.Device] | None, *, donate: bool) -> None:
        """Take a plan, and make the mesh that it is for."""
        self._plan_for(plan, donate=donate)
        devices = list(jax.devices() if devices is None else devices)
        if not all(isinstance(d, jax.Device) for d in devices) or len({*devices}) < len(devices):
            raise ConfigError(f"on_mesh takes JAX's devices, each once; it was given {devices}")
        if len(devices) < plan.trainers:
            hint = (
                f'; set CPU devices with jax.config.update("jax_num_cpu_devices", {plan.trainers}) before JAX is used'
                if not devices or devices[0].platform == "cpu"
                else ""
            )
            raise ConfigError(
                f"{plan.trainers} trainers need as many devices, on_mesh has {len(devices)}{hint}; "
                "plan.simulate() runs any number on one"
            )
        sizes = [size for _, size in plan.axes]
        self.mesh = Mesh(np.array(devices[: plan.trainers]).reshape(sizes), plan.axis_names)
        self._everywhere = NamedSharding(self.mesh, P())
        split = NamedSharding(self.mesh, P(plan.axis_names))
        self._places = [split if share == "split" else self._everywhere for share in self._shares]

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        made = startup.compiled(*jax.device_put(args, self.mesh.devices.flat[0]))
        # copies: a state may be donated, and init may return one array twice
        return jax.device_put([jnp.copy(x) for x in made], self._everywhere)

    def _start_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        placed: dict[str, Any] = jax.device_put(extra, self._everywhere)
        return placed

    def _mapped(self, program: Program) -> Callable[[list[Any], Sequence[Any]], Sequence[Any]]:
        axes = self.plan.axis_names
        ways = [self._way(n) for n in program.out_names]
        one = per_trainer(program)

        def trainer(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            outs = one(*held, *batch)
            return [self._told(x, way) for x, way in zip(outs, ways, strict=True)]

        specs = (
            [self.placed(n) for n in self._held_names],
            [P(axes) if s == "split" else P() for s in self._shares],
        )
        outs = [
            self.placed(n) if way == "slice" else self._spec(way)
            for n, way in zip(program.out_names, ways, strict=True)
        ]
        # check_vma: the equations were traced without varying types, and replay only without the check
        return jax.shard_map(trainer, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=False)

    def placed(self, name: str) -> P:
        """Where an array of the state is on the mesh."""
        axis = self.slice_axis(name)
        return P() if axis is None else P(*[None] * axis, self.plan.axis_names[-1])

    def _told(self, x: Any, way: str) -> Any:
        """What a trainer gives of an output."""
        return x[None] if way == "each" else x

    def _spec(self, way: str) -> P:
        """Where that is of the output of all."""
        return P() if way == "same" else P(self.plan.axis_names)

    def _here(self, state: CollectiveState) -> CollectiveState:
        return jax.device_put(state, self._everywhere)

    def _placed(self, arrays: list[Any]) -> list[Any]:
        return [_put(x, where) for x, where in zip(arrays, self._places, strict=True)]


class SimulatedTrainers(CollectiveJob):
    """Trainers on one device; made by `plan.simulate()`."""

    def _start(self, startup: Program, args: list[Any]) -> list[Any]:
        return list(startup.compiled(*args))

    def _mapped(self, program: Program) -> Callable[[list[Any], Sequence[Any]], Sequence[Any]]:
        axes = self.plan.axes
        sizes = [size for _, size in axes]
        # what is said to be the same is not looked at; state is
        told = {n for n, way in self.plan.merges.items() if way == "same"}
        ways = ["first" if n in told else self._way(n) for n in program.out_names]
        one = per_trainer(program)
        split = [0 if s == "split" else None for s in self._shares]
        sliced = [self.slice_axis(n) for n in self._held_names]

        def step(held: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
            parts = [x if s is None else x.reshape(*sizes, -1, *x.shape[1:]) for x, s in zip(batch, split, strict=True)]
            mapped: Callable[..., Any] = lambda held, batch: one(*held, *batch)
            held = [x if a is None else slices(x, a) for x, a in zip(held, sliced, strict=True)]
            for name, size in reversed(axes):
                # out_axes None: vmap refuses what is not the same on all trainers
                own = name == axes[-1][0]
                kept = [None if way == "same" or (way == "slice" and not own) else 0 for way in ways]
                ins = ([0 if own and a is not None else None for a in sliced], split)
                mapped = jax.vmap(mapped, in_axes=ins, out_axes=kept, axis_name=name, axis_size=size)
            count = len(axes)
            joined: dict[str, Callable[[Any], Any]] = {
                "concat": lambda x: x.reshape(-1, *x.shape[count + 1 :]),
                "each": lambda x: x.reshape(-1, *x.shape[count:]),
                "first": lambda x: x[(0,) * count],
                "same": lambda x: x,
            }
            made = mapped(held, parts)
            return [
                whole(x, self.slice_axis(n)) if way == "slice" else joined[way](x)
                for n, x, way in zip(program.out_names, made, ways, strict=True)
            ]

        def slices(x: jax.Array, axis: int) -> jax.Array:
            cut = x.reshape(*x.shape[:axis], sizes[-1], x.shape[axis] // sizes[-1], *x.shape[axis + 1 :])
            return jnp.moveaxis(cut, axis, 0)

        def whole(x: jax.Array, axis: int | None) -> jax.Array:
            assert axis is not None
            back = jnp.moveaxis(x, 0, axis)
            return back.reshape(*back.shape[:axis], -1, *back.shape[axis + 2 :])

        return step


def _put(x: Any, where: NamedSharding) -> Any:
    """`jax.device_put`, without its cost where there is nothing to do."""
    return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)
