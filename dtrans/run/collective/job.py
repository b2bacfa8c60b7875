"""Jobs without parameter servers: one program for all trainers, with XLA's collectives.

A job has a plan (of `dtrans.nccl2` or `dtrans.sharding`) and a backend, which decides where the
trainers run:

    MeshTrainers        devices of this process: jit(shard_map) over the mesh
    SimulatedTrainers   one device: jit(vmap) with axis names
    ClusterTrainers     processes; each has some devices of one mesh

The step is one function, compiled once for each batch shape. `dtrans.sharding` divides an array of
the state among the devices: the array is padded to equal slices, and sharded over the mesh. Other
arrays are replicated.
"""

from __future__ import annotations

import functools
import itertools
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
from dtrans.ir.array_fns import array_type
from dtrans.ir.cost import nbytes
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, result_of, without
from dtrans.ir.selection import subset, values_at
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
    """Job that runs a collective plan.

    `init` and `step` are pure functions of a state. The job caches their compiled code.

    Args:
      plan: the plan of the job.
      trainers: the backend, which places arrays and runs the program of each trainer.
      donate: True if a step may reuse the memory of its state.
      on_nonfinite: the reaction if a trainer's gradients are not finite: "ignore", "warn" or
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
            _check_reduces_finite(plan, on_nonfinite)
        self.plan, self.trainers, self.donate = plan, trainers, donate
        self.mesh, self.run_id = trainers.mesh, trainers.run_id
        self._state, self.batches = StateArrays(plan), TrainerBatches(plan, trainers)
        self.first_state = FirstState(plan, trainers, donate=donate)
        self._rest = without(without(plan.main.out, plan.main.args[0]), plan.main.args[1])
        self._last: list[Any] = []  # types of the last batch that passed all checks
        # pass the state as a pytree, because jit flattens pytrees in C++, faster than Python code
        self._jitted = jax.jit(self._traced, donate_argnums=0 if donate else ())
        # types of a global batch -> jitted step for padded batches
        self._uneven: dict[tuple[Any, ...], Any] = {}

    # -- steps -----------------------------------------------------------------------------------

    def init(self, *args: Any) -> CollectiveState:
        """Compute the first state from the arguments of `init`.

        In a job of several processes, trainer 0 broadcasts its state.
        """
        self._check_open()
        return self._state.state(self.first_state.arrays(*args))

    @metered
    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """Run one step on all trainers.

        The job splits each array of the batch over the trainers, along the dimension of its rows.
        0-d arrays, and the plan's `unsplit_inputs`, are replicated. With `batch="local"` each
        trainer folds its id into random keys (`jax.random.key`).

        Args:
          state: the state that `init` or the last step returned.
          batch: the global batch; in a job of several processes, this process's part
            (`shard_batch`).

        Returns:
          (state, loss[, aux]), or (state, *results) if the step returns other results.

        Raises:
          BatchError: arrays have different numbers of rows, or the number of trainers does not
            divide the rows and the plan cannot pad them.
          StateError: the state belongs to another job, or an earlier step donated it.
          NonfiniteError: gradients of an earlier step are not finite, and on_nonfinite="error".
          PeerError: another trainer has ended, or runs another program.
          DeadlineError: this process's part has a new shape, while other trainers continue with the
            earlier shape.
        """
        self.watch.check()
        self.check(state)
        with self.trainers.step_context():
            step, arrays = self._prepare(state, batch)
            try:
                new, rest = step(state, arrays)
            except ValueError as e:
                # only a restored state can be on other devices, so steps do not check this
                if "incompatible devices" not in str(e):
                    raise
                new, rest = step(self.place_state(state), arrays)
            return (new, *self.trainers.to_local(result_of(self._rest, rest)))

    def lower(self, state: CollectiveState, *batch: Any) -> Any:
        batch, global_rows = without_parts(batch)
        arrays = self.batches.flatten(batch)
        if rows := self.batches.odd_rows(arrays, global_rows):
            step, arrays = self._uneven_step(arrays, rows)
        else:
            step, arrays = self._jitted, self.batches.place(arrays)
        return step.lower(state, arrays)

    def _prepare(self, state: CollectiveState, batch: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return the compiled step for a batch, and the batch's arrays on the trainers' devices.

        The first time that a batch has a new shape, this also checks that all processes run the
        same program.
        """
        batch, global_rows = without_parts(batch)
        arrays = self.batches.flatten(batch)
        types = [(x.shape, x.dtype) for x in arrays]
        if rows := self.batches.odd_rows(arrays, global_rows):
            return self._uneven_step(arrays, rows)
        if types == self._last:
            return self._jitted, self.trainers.place_batch(arrays, self.batches.shardings)
        arrays = self.batches.place(arrays)
        self._check_step(self._program(state, arrays))
        self._last = types
        return self._jitted, arrays

    def _uneven_step(self, arrays: Sequence[Any], rows: int) -> tuple[Any, Sequence[Any]]:
        """Pad a batch that the trainers cannot divide evenly; return its step and its arrays.

        The step ignores the rows of padding, so its results are those of the batch without padding.
        """
        padded = self.batches.place_padded(arrays, rows)
        batch_types = self.batches.global_types(arrays, rows)
        key = tuple((t.shape, t.dtype) for t in batch_types)
        if key not in self._uneven:
            main = self.plan.main
            types = []
            for spec in main.args[:2]:
                state = values_at(main.inputs, spec.names)
                types += list(map(array_type, state))
            types += batch_types
            assert self.plan.for_uneven_batch is not None
            program, single_device = self.plan.for_uneven_batch(types), main.specialize_flat(types)
            self._check_step(program)
            step = functools.partial(self._traced, program=program, types=single_device.outputs)
            self._uneven[key] = jax.jit(step, donate_argnums=0 if self.donate else ())
        return self._uneven[key], padded

    def _check_step(self, program: Program) -> None:
        self.trainers.check_step(program, [*self.batches.axes], self.plan.merges)

    def _traced(
        self,
        state: CollectiveState,
        arrays: Sequence[Any],
        program: Program | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> tuple[CollectiveState, list[Any]]:
        """Run a step of all trainers; `jax.jit` traces this method once for each batch shape.

        Args:
          program: a trainer's program for a padded batch; by default the plan's program.
          types: for a padded batch, the single-device types of the outputs, without padding.
        """
        if program is None:
            program = self._program(state, arrays)
        state_arrays = self._state.arrays(state)
        shardings = tuple(map(self._state.sharding, state_arrays))
        ways = tuple(self._way(n) for n in program.out_names)
        over, batch = self.plan.options.over, tuple(self.batches.shardings)
        layout = StepLayout(self.plan.axes, over, shardings, batch, ways, self._rules)
        run = self.trainers.map_program(program, layout)
        values = dict(zip(program.out_names, run(*state_arrays.values(), *arrays), strict=True))
        # drop the last rows of results, which are padding
        for (way, how), name in zip(ways, program.out_names, strict=True):
            if way == "concat" and types is not None:
                merge = Merge("joined", how or 0, types[name].shape[how or 0])
                values[name] = merge(values[name])
        return self._state.state(values), values_at(values, self._rest.names)

    def _program(self, state: CollectiveState, arrays: Sequence[Any]) -> Program:
        """Return the program that one trainer runs for batches of this shape."""
        check_types(self._state.arrays(state), self._state.types)
        types = values_at(self.plan.program.inputs, self._state.names)
        return self.plan.program.specialize_flat([*types, *self.batches.part_types(arrays)])

    def _rules(self) -> Rules:
        leaves = {b.name: b.leaves for b in self.plan.buckets}
        return self.watch.rules(OVER_AXIS, leaves, self.plan.options.over)

    def _way(self, name: str) -> tuple[str, Any]:
        """Return the rule that merges the trainers' values of one output, such as "concat".

        The second value of the pair is the dimension or the sharding that the rule needs (see
        `StepLayout.ways`).
        """
        sharding = self._state.sharding(name)
        if sharding.divided:
            return "state", sharding
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
        return self.plan.for_uneven_batch is not None

    def split_axes(self) -> Mapping[str, int]:
        return self.batches.axes

    def arrays(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Put the arrays of a batch on the trainers' devices.

        Raises:
          BatchError: the batch cannot be split over the trainers.
        """
        return self.batches.place(self.batches.flatten(batch))

    def place(self, *batch: Any) -> tuple[Any, ...]:
        if self.part[1] > 1 or self.mesh is None:
            return self.shard_batch(*batch)
        arrays = self.batches.flatten(batch)
        if self.batches.odd_rows(arrays):
            return batch
        named = dict(zip(self.batches.names, self.batches.place(arrays), strict=True))
        return tuple(spec.unflatten_named(named) for spec in self.batches.specs)

    # -- states ----------------------------------------------------------------------------------

    def params(self, state: CollectiveState) -> Any:
        """Return the parameters in the pytree of the step.

        In a job of several processes, all must call this method, which all-gathers slices.
        """
        return self._single_device(self.plan.main.args[0], state.params)

    def opt_state(self, state: CollectiveState) -> Any:
        """Return the optimizer's state in the pytree of the step.

        In a job of several processes, all must call this method, which all-gathers slices.
        """
        return self._single_device(self.plan.main.args[1], state.opt_state)

    def state_of(self, params: Any, opt_state: Any) -> CollectiveState:
        arrays = arrays_of(self.plan.main, params, opt_state)
        return build_state(
            self,
            arrays,
            lambda rows: [as_numpy(arrays[row.origin_name][row.index]) for row in rows],
        )

    def check(self, state: Any) -> None:
        """Raise StateError if `state` belongs to another job, or was donated."""
        self._check_open()
        check_kind(state, CollectiveState)
        parts = (state.params, state.opt_state, state.extra)
        items = itertools.chain.from_iterable(part.items() for part in parts)
        check_arrays(items, donates=self.donate)

    def place_state(self, state: CollectiveState) -> CollectiveState:
        """Put a state on the devices of the trainers, for example after a restore."""
        placed = {}
        for n, x in self._state.arrays(state).items():
            placed[n] = self.trainers.place_state(x, self._state.sharding(n))
        return self._state.state(placed)

    def sharding_of(self, name: str) -> NamedSharding | None:
        """Return the sharding of an array of the state."""
        return self.trainers.state_sharding(self._state.sharding(name))

    def _leaves(self, state: CollectiveState, names: Collection[str]) -> dict[str, Any]:
        check_kind(state, CollectiveState, "apply")
        self.watch.check(wait=True)
        if self.plan.owned is not None:
            return super()._leaves(state, names)
        arrays = self._state.arrays(state)
        if self.trainers.here == self.plan.trainers:
            return subset(arrays, names)
        return {n: self.trainers.unshard(arrays[n], self._state.shape(n)) for n in names}

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        return {n: self._state.unpad(n, x) for n, x in leaves.items()}

    def _gathered_bytes(self, name: str) -> int:
        is_stored = self.plan.owned is not None or self._state.shape(name) is None
        return 0 if is_stored else nbytes(self._state.types[name])

    def _single_device(self, spec: TreeSpec, arrays: Mapping[str, Any]) -> Any:
        """Return a pytree of the state's arrays, each complete and on one device."""
        self.watch.check(wait=True)
        found: dict[str, Any] = {}
        for n, x in arrays.items():
            found[n] = self.trainers.unshard(x, self._state.shape(n))
        if self.plan.owned is not None:
            found = self.plan.owned.unpack_state(found)
        return spec.unflatten_named(found)


def _check_reduces_finite(plan: CollectivePlan, on_nonfinite: str) -> None:
    """Raise ConfigError if `on_nonfinite` cannot work with this plan.

    The check for infinite or NaN gradients is a part of their reduction. It is impossible if the
    plan reduces no gradients, or handles infinite gradients itself.
    """
    reason = ""
    if plan.trainers == 1:
        reason = (
            "one trainer has no gradients of other trainers to check; "
            'jax.config.update("jax_debug_nans", True) checks all values'
        )
    elif plan.options.local_sgd is not None:
        reason = "with local_sgd, trainers average parameters instead of gradients"
    elif plan.options.colocated:
        reason = "trainers that divide split layers reduce no buckets of gradients"
    elif plan.shared is not None and plan.shared.step.undivided:
        reason = f"the gradients of {plan.main.name} cannot be found"
    elif plan.extra_state:
        reason = "with a dynamic loss scale, the job itself skips steps whose gradients overflow"
    if reason:
        raise ConfigError(f"on_nonfinite={on_nonfinite!r}: {reason}; leave it out")
