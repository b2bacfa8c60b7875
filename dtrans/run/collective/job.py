"""Realisers of data-parallel plans: all trainers on a mesh of this process's devices, or on one device.

    mesh       jit(shard_map) over the axis; XLA carries out the reductions
    simulate   jit(vmap) with the axis name, on one device: for tests, notebooks, and machines one does not have

Each makes one function of a step, compiled once for each batch shape.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import StateError
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, is_under, without
from dtrans.run.base.batch import batch_arrays, part_types, share_of, shared_batch


class CollectiveJob(abc.ABC):
    """A plan, running. `init` and `step` are functions of a state; the job itself holds what it compiled.

    Args:
      plan: what to run.
    """

    whole_option = "dtrans.nccl2(batch=dtrans.Batch(unsplit_inputs=(...)))"  # how a user asks for whole arrays

    def __init__(self, plan: CollectivePlan, *, donate: bool = False) -> None:
        self._plan_for(plan, donate=donate)

    def _plan_for(self, plan: CollectivePlan, *, donate: bool) -> None:
        """Take a plan."""
        self.plan = plan
        self._donates = donate
        self._specs = plan.main.args[2:]
        self._names = [n for spec in self._specs for n in spec.names]
        self._whole = {n for n in self._names if is_under(n, plan.unsplit_inputs)}
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

        Arrays of the batch are split over the trainers on dim 0; 0-d arrays, and those that the plan has as
        `unsplit_inputs`, go to every trainer whole. A PRNG key (`jax.random.key`) is folded with the trainer's number.

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
        return self.plan.program.specialize_flat(types + part_types(self._shared(arrays), self.plan.trainers))

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
