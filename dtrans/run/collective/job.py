"""Jobs of data-parallel plans and of sharding: one program for all trainers, with XLA's collectives.

A job has a plan and a backend:

    MeshTrainers        on devices of this process: jit(shard_map) over the axis
    SimulatedTrainers   on one device: jit(vmap) with the axis name
    ClusterTrainers     in processes, each with some of the devices of one mesh

The step is one function, compiled once for each batch shape. A sliced array of the state
(`dtrans.sharding`) is one array over the mesh, padded, with each rank's slice on its device. Other
arrays are replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from dtrans.checkpoint.assemble import as_numpy
from dtrans.checkpoint.collective_state import build_state
from dtrans.checkpoint.pserver_state import arrays_of
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, result_of, without
from dtrans.job import Job
from dtrans.ops import OVER_AXIS
from dtrans.run.base.merge import Merge
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.base.segments import Rules
from dtrans.run.base.state import check_arrays, check_kind, check_types
from dtrans.run.collective.batches import TrainerBatches
from dtrans.run.collective.first_state import FirstState
from dtrans.run.collective.state_arrays import StateArrays
from dtrans.run.collective.trainers import StepLayout, Trainers
from dtrans.step.batch_sharing import without_parts
from dtrans.step_meter import metered


class CollectiveJob(Job):
    """A running collective plan. `init` and `step` are functions of a state; the job itself holds
    compiled code.

    Args:
      plan: the plan.
      trainers: the backend.
      donate: True if a step may reuse the memory of its state.
      on_nonfinite: the reaction to a trainer's gradients that are not finite: "ignore", "warn" or
        "error".
    """

    def __init__(
        self,
        plan: CollectivePlan,
        trainers: Trainers,
        *,
        donate: bool,
        on_nonfinite: str = "ignore",
    ) -> None:
        self.watch = NonfiniteCheck(on_nonfinite)
        if self.watch.enabled:
            _check_watched(plan, on_nonfinite)
        self.plan, self.trainers, self.donate = plan, trainers, donate
        self.mesh, self.run_id = trainers.mesh, trainers.run_id
        self._state, self.batches = StateArrays(plan), TrainerBatches(plan, trainers)
        self.first_state = FirstState(plan, trainers, donate=donate)
        self._rest = without(without(plan.main.out, plan.main.args[0]), plan.main.args[1])
        self._last: list[Any] = []  # types of the last batch, which need no second check
        # the state is one pytree of jit: to flatten it here would cost more than a small step
        self._jitted = jax.jit(self._traced, donate_argnums=0 if donate else ())
        self._uneven: dict[int, Any] = {}  # jitted steps for rows that the trainers do not divide

    # -- steps -----------------------------------------------------------------------------------

    def init(self, *args: Any) -> CollectiveState:
        """Return the first state, from the arguments of `init`; among processes, from those of
        trainer 0."""
        self._check_open()
        return self._state.state(self.first_state.arrays(*args))

    @metered
    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """Run one step. Returns (state, loss[, aux]), or (state, *results) of another step.

        The batch is the global one, or this process's part of it in a job of processes
        (`shard_batch`). Its arrays are split over the trainers on dim 0. 0-d arrays, and the plan's
        `unsplit_inputs`, are replicated. A PRNG key (`jax.random.key`) is folded with the trainer's
        number.

        Raises:
          BatchError: arrays that differ in their number of rows, or that the trainers do not
            divide.
          StateError: not a state of this job, or one that an earlier step donated.
          NonfiniteError: with on_nonfinite="error", gradients of an earlier step.
          PeerError: another trainer has ended, or trains something else.
          DeadlineError: parts of another shape, while a trainer continues with the earlier shape.
        """
        self.watch.check()
        self.check(state)
        with self.trainers.stepping():
            step, arrays = self._prepared(state, batch)
            try:
                new, rest = step(state, arrays)
            except ValueError as e:
                if "incompatible devices" not in str(e):
                    raise
                new, rest = step(self.here(state), arrays)
            return (new, *self.trainers.results(result_of(self._rest, rest)))

    def lower(self, state: CollectiveState, *batch: Any) -> Any:
        batch, whole = without_parts(batch)
        arrays = self.batches.flatten(batch)
        if rows := self.batches.odd_rows(arrays, whole):
            step, arrays = self._uneven_step(arrays, rows)
        else:
            step, arrays = self._jitted, self.batches.place(arrays)
        return step.lower(state, arrays)

    def _prepared(self, state: CollectiveState, batch: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return the jitted step for a batch, and its placed arrays."""
        batch, whole = without_parts(batch)
        arrays = self.batches.flatten(batch)
        types = [(x.shape, x.dtype) for x in arrays]
        if rows := self.batches.odd_rows(arrays, whole):
            return self._uneven_step(arrays, rows)
        if types == self._last:
            return self._jitted, self.trainers.batch(arrays, self.batches.shares)
        arrays = self.batches.place(arrays)
        self._check_step(self._program(state, arrays))
        self._last = types
        return self._jitted, arrays

    def _uneven_step(self, arrays: Sequence[Any], rows: int) -> tuple[Any, Sequence[Any]]:
        """Return the step for rows that the trainers do not divide, and its padded arrays."""
        padded = self.batches.place_padded(arrays, rows)
        if rows not in self._uneven:
            main = self.plan.main
            held = [main.inputs[n] for spec in main.args[:2] for n in spec.names]
            types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in held]
            types += self.batches.global_types(arrays, rows)
            assert self.plan.for_whole is not None
            program, whole = self.plan.for_whole(types), main.specialize_flat(types)
            self._check_step(program)
            step = functools.partial(self._traced, program=program, types=whole.outputs)
            self._uneven[rows] = jax.jit(step, donate_argnums=0 if self.donate else ())
        return self._uneven[rows], padded

    def _check_step(self, program: Program) -> None:
        self.trainers.check_step(program, [*self.batches.axes], self.plan.merges)

    def _traced(
        self,
        state: CollectiveState,
        arrays: Sequence[Any],
        program: Program | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> tuple[CollectiveState, list[Any]]:
        """Run a step of all trainers; `jax.jit` traces it once for each batch shape.

        Args:
          program: the program of a trainer, for a batch that trainers do not divide.
          types: the single-device types of that program's outputs.
        """
        program = self._program(state, arrays) if program is None else program
        held = self._state.arrays(state)
        sliced = tuple(self._state.slice_axis(n) for n in held)
        ways = tuple(self._way(n) for n in program.out_names)
        layout = StepLayout(self.plan.axes, sliced, tuple(self.batches.shares), ways, self._rules)
        made = self.trainers.mapped(program, layout)(*held.values(), *arrays)
        values = dict(zip(program.out_names, made, strict=True))
        for (way, axis), name in zip(ways, program.out_names, strict=True):
            if way == "concat" and types is not None:
                merge = Merge("joined", axis or 0, types[name].shape[axis or 0])
                values[name] = merge(values[name])
        return self._state.state(values), [values[n] for n in self._rest.names]

    def _program(self, state: CollectiveState, arrays: Sequence[Any]) -> Program:
        """Return the program for a trainer's part of a batch."""
        check_types(self._state.arrays(state), self._state.types)
        held = [self.plan.program.inputs[n] for n in self._state.names]
        return self.plan.program.specialize_flat([*held, *self.batches.part_types(arrays)])

    def _rules(self) -> Rules:
        leaves = {b.name: b.leaves for b in self.plan.buckets}
        return self.watch.rules(OVER_AXIS, leaves, self.plan.axis_names)

    def _way(self, name: str) -> tuple[str, int | None]:
        """Return how an output is merged; state is sliced, or equal on all trainers."""
        axis = self._state.slice_axis(name)
        if axis is not None:
            return "slice", axis
        way = self.plan.merges.get(name, "")
        if way == "concat":
            return way, 0 if self.plan.shared is None else self.plan.shared.joined[name]
        return {"each": "each", "same": "first"}.get(way, "same"), None

    # -- batches ---------------------------------------------------------------------------------

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self.trainers.part

    @property
    def takes_uneven_parts(self) -> bool:  # type: ignore[override]
        return self.plan.for_whole is not None

    def cut_axes(self) -> Mapping[str, int]:
        return self.batches.axes

    def arrays(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Place the arrays of a batch for steps. Raises BatchError if trainers cannot share
        them."""
        return self.batches.place(self.batches.flatten(batch))

    def place(self, *batch: Any) -> tuple[Any, ...]:
        if self.part[1] > 1 or self.mesh is None:
            return self.shard_batch(*batch)
        arrays = self.batches.flatten(batch)
        if self.batches.odd_rows(arrays):
            return batch
        placed = iter(self.batches.place(arrays))
        return tuple(
            spec.unflatten([next(placed) for _ in spec.names]) for spec in self.batches.specs
        )

    # -- states ----------------------------------------------------------------------------------

    def params(self, state: CollectiveState) -> Any:
        """Return the parameters in the pytree of the step; in a job of processes, all call it."""
        return self._single_device(self.plan.main.args[0], state.params)

    def opt_state(self, state: CollectiveState) -> Any:
        """Return the optimizer's state, likewise."""
        return self._single_device(self.plan.main.args[1], state.opt_state)

    def state_of(self, params: Any, opt_state: Any) -> CollectiveState:
        given = arrays_of(self.plan.main, params, opt_state)
        return build_state(
            self, given, lambda rows: [as_numpy(given[row.origin_name][row.index]) for row in rows]
        )

    def check(self, state: Any) -> None:
        """Raise StateError unless `state` is a state of this job that was not donated."""
        self._check_open()
        check_kind(state, CollectiveState)
        held = (state.params, state.opt_state, state.extra)
        check_arrays((item for of in held for item in of.items()), donates=self.donate)

    def here(self, state: CollectiveState) -> CollectiveState:
        """Place a state for steps."""
        place = lambda n, x: self.trainers.state(x, self._state.slice_axis(n))
        return self._state.state({n: place(n, x) for n, x in self._state.arrays(state).items()})

    def slice_axis(self, name: str) -> int | None:
        """Return the dimension along which an array of the state is sliced over the last axis.

        The array itself has all slices, one behind the other. None: it is replicated.
        """
        return self._state.slice_axis(name)

    def sharding_of(self, name: str) -> NamedSharding | None:
        """Return the sharding of an array of the state."""
        return self.trainers.at(self._state.slice_axis(name))

    def _leaves(self, state: CollectiveState, names: Collection[str]) -> dict[str, Any]:
        self.watch.check(wait=True)
        if self.plan.owned is not None or self.trainers.here != self.plan.trainers:
            return super()._leaves(state, names)
        held = self._state.arrays(state)
        return {n: held[n] for n in names}

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        return {n: self._state.unpad(n, x) for n, x in leaves.items()}

    def _single_device(self, spec: TreeSpec, held: Mapping[str, Any]) -> Any:
        """Return a pytree of single-device arrays of the state."""
        self.watch.check(wait=True)
        cuts, whole = self.plan.cuts, self.trainers.whole
        found = {}
        for n, x in held.items():
            found[n] = whole(x, cuts[n].axis, cuts[n].size) if n in cuts else whole(x, None, 0)
        if self.plan.owned is not None:
            found = self.plan.owned.opened(found)
        return spec.unflatten([found[n] for n in spec.names])


def _check_watched(plan: CollectivePlan, on_nonfinite: str) -> None:
    """Refuse plans whose trainers reduce no gradients, or some that may be infinite."""
    why = ""
    if plan.trainers == 1:
        why = (
            'one trainer reduces no gradients; jax.config.update("jax_debug_nans", True) '
            "looks at all that it makes"
        )
    elif plan.options.local_sgd is not None:
        why = "trainers that take steps of their own average parameters, and not gradients"
    elif plan.extra_state:
        why = (
            "a loss that is scaled has gradients that overflow, and skips the steps in which "
            "they do"
        )
    if why:
        raise ConfigError(f"on_nonfinite={on_nonfinite!r}: {why}; leave it out")
