"""Jobs of data-parallel plans and of sharding: one program for all trainers, whose reductions XLA
carries out.

A job has a plan and a place where its trainers are:

    MeshTrainers        on devices of this process: jit(shard_map) over the axis
    SimulatedTrainers   on one device: jit(vmap) with the axis name
    ClusterTrainers     in processes, each with some of the devices of one mesh

Each makes one function of a step, compiled once for each batch shape. An array of the state that is
sliced (`dtrans.sharding`) is one array over the whole mesh, padded, with each rank's slice on its
device; any other is whole on every device.

The first state comes from the startup program. Where something is sliced it is compiled for slices:
XLA makes each device's part on that device, so that none ever holds a whole leaf (but for what an
initialiser needs whole: an orthogonal matrix, a permutation).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dtrans._jax import ClosedJaxpr, Literal, closed, jaxpr_as_fun
from dtrans.checkpoint.assemble import as_numpy
from dtrans.checkpoint.collective_state import build_state
from dtrans.checkpoint.pserver_state import arrays_of
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import ConfigError, StateError
from dtrans.ir.array_fns import padded_to
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under, result_of, without
from dtrans.job import Job
from dtrans.ops import OVER_AXIS
from dtrans.run.base.batch import (
    Share,
    batch_arrays,
    check_rows,
    check_uneven,
    on_one_device,
    part_types,
    resized,
    rows_of,
    share_of,
    uneven_rows,
)
from dtrans.run.base.merge import Merge
from dtrans.run.base.nonfinite import GradientWatch
from dtrans.run.base.segments import Rules
from dtrans.run.base.spmd import AxisSharding, Function
from dtrans.run.base.state import check_arrays, check_kind, check_types
from dtrans.step.batch_sharing import without_parts
from dtrans.step_meter import metered


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """How trainers have the inputs and outputs of a step.

    Attributes:
      axes: the axes that they are on, with their sizes.
      sliced: the dimension of slices of each array of the state; None where it is whole.
      shares: how they share each array of the batch (`dtrans.run.base.batch.Share`).
      ways: how their outputs are merged: an output is the `same` on all, or that of the `first`;
        `concat` joins their rows along a dimension, `each` gives each a row; or it is a `slice`
        along a dimension.
      rules: makes the rules of communication of a trace.
    """

    axes: tuple[tuple[str, int], ...]
    sliced: tuple[int | None, ...]
    shares: tuple[Share, ...]
    ways: tuple[tuple[str, int | None], ...]
    rules: Callable[[], Rules] = lambda: OVER_AXIS

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def ins(self) -> list[AxisSharding]:
        """Return the shardings of the state's arrays and the batch's."""
        state = [slices_along(axis, self.names) for axis in self.sliced]
        return [*state, *(parts_along(share, self.names) for share in self.shares)]

    @property
    def outs(self) -> list[AxisSharding]:
        """Return the shardings of the outputs."""
        return [self._out(way, axis) for way, axis in self.ways]

    def _out(self, way: str, axis: int | None) -> AxisSharding:
        if way == "slice":
            return slices_along(axis, self.names)
        if way == "concat":
            return parts_along(axis or 0, self.names)
        if way == "each":
            return AxisSharding(own=self.names)
        return AxisSharding(first=self.names if way == "first" else ())


@functools.cache
def slices_along(axis: int | None, names: tuple[str, ...]) -> AxisSharding:
    """Return the sharding of an array of the state: slices over the last axis, the same in all
    groups."""
    return AxisSharding().cut_along(axis, names[-1])


@functools.cache
def parts_along(share: Share, names: tuple[str, ...]) -> AxisSharding:
    """Return the sharding of an array of the batch: parts for all trainers, or the whole for
    each."""
    return AxisSharding() if isinstance(share, str) else AxisSharding().cut_along(share, *names)


class Trainers(abc.ABC):
    """Where the trainers of a job are: how arrays get there, and how a program is run by all of
    them.

    Attributes:
      mesh: Their devices; None where one device stands for all.
      run_id: Which run of the job it is: the default tag of its checkpoints.
      here: How many of them get their part of the batch from this process.
      part: Which part of a batch that is, and how many there are.
      who: What errors call those; empty for "N trainers".
    """

    mesh: Mesh | None
    run_id: str
    here: int
    part = (0, 1)
    who = ""

    def at(self, axis: int | None) -> NamedSharding | None:
        """Where an array of the state is, which is sliced along a dimension, or whole
        everywhere."""
        return None

    @abc.abstractmethod
    def everywhere(self, xs: Sequence[Any]) -> list[Any]:
        """Arrays of this process, whole where all trainers are."""

    @abc.abstractmethod
    def state(self, x: Any, axis: int | None) -> Any:
        """An array of a state from elsewhere, a checkpoint perhaps, where steps want it."""

    def batch(self, arrays: Sequence[Any], shares: Sequence[Share]) -> Sequence[Any]:
        """What this process is given of a batch, where steps want it."""
        return arrays

    def check_start(self, startup: ClosedJaxpr) -> None:  # noqa: B027
        """Check that all processes start with the same program, where each makes its own slices
        with it."""

    def check_step(self, program: Program, split: Sequence[str], merges: Mapping[str, str]) -> None:  # noqa: B027
        """Check that all processes mean to run the same program."""

    def whole(self, x: Any, axis: int | None, size: int) -> Any:
        """An array of the state without its padding, in this process."""
        return (
            x
            if axis is None or x.shape[axis] == size
            else jax.lax.slice_in_dim(x, 0, size, axis=axis)
        )

    def results(self, tree: Any) -> Any:
        """Results, in this process."""
        return tree

    def stepping(self) -> contextlib.AbstractContextManager[Any]:
        """What a step is taken in."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def mapped(self, program: Program, layout: StepLayout) -> Function:
        """Return a program for all trainers: a function of the arrays of state and batch that gives
        merged outputs."""


class CollectiveJob(Job):
    """A plan, running. `init` and `step` are functions of a state; the job itself holds what it
    compiled.

    Args:
      plan: what to run.
      trainers: where.
      donate: whether a step may reuse the memory of the state that it is given.
      on_nonfinite: what is done about gradients of a trainer that are not finite: "ignore", "warn"
        or "error".
    """

    def __init__(
        self,
        plan: CollectivePlan,
        trainers: Trainers,
        *,
        donate: bool,
        on_nonfinite: str = "ignore",
    ) -> None:
        self.watch = GradientWatch(on_nonfinite)
        if self.watch.looks:
            _check_watched(plan, on_nonfinite)
        self.plan, self.trainers, self.donate = plan, trainers, donate
        self.mesh, self.run_id = trainers.mesh, trainers.run_id
        main, program = plan.main, plan.program
        self._specs = main.args[2:]
        self._names = [n for spec in self._specs for n in spec.names]
        unsplit = {n for n in self._names if is_under(n, plan.unsplit_inputs)}
        self._shares: list[Share] = [
            share_of(n, main.inputs[n], plan.trainers, unsplit) for n in self._names
        ]
        if plan.shared is not None and plan.trainers > 1:
            self._shares = [plan.shared.axes.get(n, "replicated") for n in self._names]
        self._split = self._split_of(self._names)
        params, opt_state = program.args[:2]
        self._state = params.names, opt_state.names, tuple(plan.extra_state)
        self._held_names = [n for names in self._state for n in names]
        self._rest = without(without(main.out, main.args[0]), main.args[1])
        self._last: list[Any] = []  # types of the last batch: one like it needs no second look
        # state goes through jit as a whole: to take it apart here would cost more than a small step
        self._jitted = jax.jit(self._traced, donate_argnums=0 if donate else ())
        self._uneven: dict[
            int, Any
        ] = {}  # the same for batches that trainers do not divide, by their rows

    # -- what a user calls -----------------------------------------------------------------------

    def init(self, *args: Any) -> CollectiveState:
        """The first state, from the arguments of `init`; among processes, from those of trainer
        0."""
        self._check_open()
        made = dict(
            zip(self._startup.out_names, self._started(self._startup.flatten(*args)), strict=True)
        )
        extra = {n: jnp.asarray(x) for n, x in self.plan.extra_state.items()}
        if extra:
            made |= zip(extra, self.trainers.everywhere([*extra.values()]), strict=True)
        return CollectiveState(*({n: made[n] for n in names} for names in self._state))

    @metered
    def step(self, state: CollectiveState, *batch: Any) -> tuple[Any, ...]:
        """One step: (state, loss[, aux]), or whatever else the step returns beside its state.

        The batch is the global one, or this process's part of it in a job of processes
        (`shard_batch`). Its arrays are split over the trainers on dim 0; 0-d arrays, and those that
        the plan has as `unsplit_inputs`, go to every trainer whole. A PRNG key (`jax.random.key`)
        is folded with the trainer's number.

        Raises:
          BatchError: arrays that differ in their number of rows, or that the trainers do not
            divide.
          StateError: not a state of this job, or one that was already stepped from, and was
            donated.
          NonfiniteError: with on_nonfinite="error", gradients of a step before.
          PeerError: another trainer has ended, or trains something else.
          DeadlineError: parts of another shape, and a trainer that goes on with those of before.
        """
        self.watch.check()
        self.check(state)
        with self.trainers.stepping():
            batch, whole = without_parts(batch)
            arrays: Sequence[Any] = batch_arrays(self._specs, batch, self.plan.main.inputs)
            types = [(x.shape, x.dtype) for x in arrays]
            step = self._jitted
            if rows := self._odd_rows(arrays, whole):
                step, arrays = self._of_odd_rows(arrays, rows)
            elif types == self._last:
                arrays = self.trainers.batch(arrays, self._shares)
            else:
                arrays = self._checked(arrays)
                self.trainers.check_step(
                    self._program(state, arrays), self._split, self.plan.merges
                )
                self._last = types
            try:
                new, rest = step(state, arrays)
            except ValueError as e:
                if "incompatible devices" not in str(e):
                    raise
                new, rest = step(self.here(state), arrays)
            return (new, *self.trainers.results(result_of(self._rest, rest)))

    @property
    def part(self) -> tuple[int, int]:  # type: ignore[override]
        return self.trainers.part

    @property
    def takes_uneven_parts(self) -> bool:  # type: ignore[override]
        return self.plan.for_whole is not None

    def cut_axes(self) -> Mapping[str, int]:
        return {
            n: share
            for n, share in zip(self._names, self._shares, strict=True)
            if isinstance(share, int)
        }

    def place(self, *batch: Any) -> tuple[Any, ...]:
        if self.part[1] > 1 or self.mesh is None:
            return self.shard_batch(*batch)
        arrays: Sequence[Any] = batch_arrays(self._specs, batch, self.plan.main.inputs)
        if self._odd_rows(arrays):
            return batch
        placed = iter(self._checked(arrays))
        return tuple(spec.unflatten([next(placed) for _ in spec.names]) for spec in self._specs)

    def state_of(self, params: Any, opt_state: Any) -> CollectiveState:
        given = arrays_of(self.plan.main, params, opt_state)
        return build_state(
            self, given, lambda rows: [as_numpy(given[row.origin_name][row.index]) for row in rows]
        )

    def lower(self, state: CollectiveState, *batch: Any) -> Any:
        batch, whole = without_parts(batch)
        arrays: Sequence[Any] = batch_arrays(self._specs, batch, self.plan.main.inputs)
        if rows := self._odd_rows(arrays, whole):
            step, arrays = self._of_odd_rows(arrays, rows)
        else:
            step, arrays = self._jitted, self._checked(arrays)
        return step.lower(state, arrays)

    def params(self, state: CollectiveState) -> Any:
        """The parameters, whole, as the pytree that they were given in; in a job of processes,
        called by all."""
        return self._whole_tree(self.plan.main.args[0], state.params)

    def opt_state(self, state: CollectiveState) -> Any:
        """The optimizer's state, likewise."""
        return self._whole_tree(self.plan.main.args[1], state.opt_state)

    # -- for checkpoints, and jobs that go on with other trainers --------------------------------

    def slice_axis(self, name: str) -> int | None:
        """The dimension along which trainers on the last axis have slices of an array of the state;
        None for no slices.

        The array itself is of all slices, one behind the other.
        """
        s = self.plan.cuts.get(name)
        return None if s is None else s.axis

    def sharding_of(self, name: str) -> NamedSharding | None:
        """Where an array of the state is."""
        return self.trainers.at(self.slice_axis(name))

    def check(self, state: Any) -> None:
        """Raises StateError for what is no state of this job, or none any more."""
        self._check_open()
        check_kind(state, CollectiveState)
        held = (state.params, state.opt_state, state.extra)
        check_arrays((item for of in held for item in of.items()), donates=self.donate)

    def arrays(self, batch: Sequence[Any]) -> Sequence[Any]:
        """The arrays of a batch where steps want them. Raises BatchError where trainers cannot
        share them."""
        return self._checked(batch_arrays(self._specs, batch, self.plan.main.inputs))

    def here(self, state: CollectiveState) -> CollectiveState:
        """A state where steps want it."""
        held = (state.params, state.opt_state, state.extra)
        put = lambda of: {n: self.trainers.state(x, self.slice_axis(n)) for n, x in of.items()}
        return CollectiveState(*map(put, held))

    # -- the first state -------------------------------------------------------------------------

    @cached_property
    def _startup(self) -> Program:
        owned = self.plan.owned
        return self.plan.startup if owned is None else owned.startup(self.plan.startup)

    @cached_property
    def _opened_startup(self) -> ClosedJaxpr:
        """The startup program, whose first inputs are its constants: of processes, those of rank 0
        are everybody's."""
        inner = self._startup.inner
        return closed([], [], [*inner.constvars, *inner.invars], inner.outvars, inner.eqns, inner)

    @cached_property
    def starting(self) -> Any:
        """The same for all ranks, jitted: from flat arrays to what it makes, padded, where ranks
        have it."""
        names, run = self._startup.out_names, jaxpr_as_fun(self._opened_startup)

        def padded(name: str, x: Any) -> Any:
            s = self.plan.cuts.get(name)
            return x if s is None else padded_to(x, s.axis, s.padded)

        places = None if self.mesh is None else [self.sharding_of(n) for n in names]
        return jax.jit(
            lambda *args: [padded(n, x) for n, x in zip(names, run(*args), strict=True)],
            out_shardings=places,
        )

    def _started(self, args: list[Any]) -> list[Any]:
        if not self.plan.cuts:
            args = [*map(on_one_device, args)]
            if self.mesh is not None:
                args = jax.device_put(args, self.mesh.local_devices[0])
            made = self._startup.compiled(*args)
            # copies: a state may be donated, and init may return one array twice
            return self.trainers.everywhere([jnp.copy(x) for x in made] if self.donate else made)
        self.trainers.check_start(self._opened_startup)
        made = self.starting(*self.trainers.everywhere([*self._startup.jaxpr.consts, *args]))
        # what init returns twice, or was given, is one array: a copy of it may be donated
        inner = self._opened_startup.jaxpr
        seen = {id(v) for v in inner.invars}
        found = []
        for v, x in zip(inner.outvars, made, strict=True):
            found.append(jnp.copy(x) if isinstance(v, Literal) or id(v) in seen else x)
            seen.add(id(v))
        return found

    # -- a step ----------------------------------------------------------------------------------

    def _traced(
        self,
        state: CollectiveState,
        arrays: Sequence[Any],
        program: Program | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> tuple[CollectiveState, list[Any]]:
        """A step of all trainers, as `jax.jit` traces it, once for each batch shape.

        Args:
          program: of a trainer, for a batch that trainers do not divide.
          types: of what one device makes of that.
        """
        program = self._program(state, arrays) if program is None else program
        sliced = tuple(self.slice_axis(n) for n in self._held_names)
        ways = tuple(self._way(n) for n in program.out_names)
        layout = StepLayout(self.plan.axes, sliced, tuple(self._shares), ways, self._rules)
        made = self.trainers.mapped(program, layout)(*self._held(state), *arrays)
        values = dict(zip(program.out_names, made, strict=True))
        for (way, axis), name in zip(ways, program.out_names, strict=True):
            if way == "concat" and types is not None:
                values[name] = Merge("joined", axis or 0, types[name].shape[axis or 0])(
                    values[name]
                )
        new = CollectiveState(*({n: values[n] for n in names} for names in self._state))
        return new, [values[n] for n in self._rest.names]

    def _rules(self) -> Rules:
        return self.watch.rules(
            OVER_AXIS, {b.name: b.leaves for b in self.plan.buckets}, self.plan.axis_names
        )

    def _program(self, state: CollectiveState, arrays: Sequence[Any]) -> Program:
        """The program for a trainer's part of a batch."""
        parts = part_types(list(zip(arrays, self._shares, strict=True)), self.plan.trainers)
        held = dict(zip(self._held_names, self._held(state), strict=True))
        check_types(held, self._types)
        return self.plan.program.specialize_flat(
            [*(self.plan.program.inputs[n] for n in self._held_names), *parts]
        )

    # -- batches that trainers do not divide -----------------------------------------------------

    def _odd_rows(self, arrays: Sequence[Any], whole: int = 0) -> int:
        """How many rows a batch has that the trainers do not divide; 0 where they do, or must.

        Args:
          whole: what the parts of processes say of it.

        Raises:
          BatchError: they say something, and the plan cannot do with it.
        """
        if whole:
            check_uneven(whole, self.plan.trainers, self.takes_uneven_parts)
            return whole
        rows = {
            x.shape[share]
            for x, share in zip(arrays, self._shares, strict=True)
            if isinstance(share, int)
        }
        if (
            self.plan.for_whole is None
            or len(rows) != 1
            or self.trainers.here != self.plan.trainers
        ):
            return 0
        (count,) = rows
        return count if count % self.plan.trainers else 0

    def _of_odd_rows(self, arrays: Sequence[Any], rows: int) -> tuple[Any, Any]:
        """The step for such a batch, and its arrays with rows behind that enter nothing."""
        shared = list(zip(arrays, self._shares, strict=True))
        wide = uneven_rows(
            self._names,
            shared,
            rows,
            self.part[0],
            -(-rows // self.plan.trainers) * self.trainers.here,
        )
        if rows not in self._uneven:
            inputs = self.plan.main.inputs
            held = [inputs[n] for spec in self.plan.main.args[:2] for n in spec.names]
            types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in held]
            types += [resized(x, share, lambda _: rows) for x, share in shared]
            assert self.plan.for_whole is not None
            program, whole = self.plan.for_whole(types), self.plan.main.specialize_flat(types)
            self.trainers.check_step(program, self._split, self.plan.merges)
            step = functools.partial(self._traced, program=program, types=whole.outputs)
            self._uneven[rows] = jax.jit(step, donate_argnums=0 if self.donate else ())
        return self._uneven[rows], self.trainers.batch(wide, self._shares)

    def _held(self, state: CollectiveState) -> list[Any]:
        """The arrays of a state, in the order of the program. Raises StateError for that of another
        job."""
        held = (state.params, state.opt_state, state.extra)
        try:
            return [of[n] for of, names in zip(held, self._state, strict=True) for n in names]
        except KeyError as e:
            raise StateError(f"this is not a state of this job: it has no {e.args[0]}") from e

    @cached_property
    def _types(self) -> dict[str, Any]:
        """Name to type of each array of the state, of all slices together."""
        main, program, cuts = self.plan.main.inputs, self.plan.program.inputs, self.plan.cuts
        whole = {n: main.get(n, program[n]) for n in self._held_names}
        return {n: cuts[n].of_all(t) if n in cuts else t for n, t in whole.items()}

    def _checked(self, arrays: Sequence[Any]) -> Sequence[Any]:
        option = f"dtrans.{self.plan.made_by}(batch=dtrans.Batch(unsplit_inputs=(...)))"
        check_rows(
            rows_of(self._names, list(zip(arrays, self._shares, strict=True))),
            self.trainers.here,
            option,
            self.trainers.who,
            noun=self.plan.options.noun,
        )
        return self.trainers.batch(arrays, self._shares)

    def _split_of(self, xs: Sequence[Any]) -> list[Any]:
        """Those of the arrays of a batch that trainers have parts of."""
        return [x for x, share in zip(xs, self._shares, strict=True) if isinstance(share, int)]

    def _way(self, name: str) -> tuple[str, int | None]:
        """How an output is merged; of state, all trainers have the same, or slices."""
        axis = self.slice_axis(name)
        if axis is not None:
            return "slice", axis
        way = self.plan.merges.get(name, "")
        if way == "concat":
            return way, 0 if self.plan.shared is None else self.plan.shared.joined[name]
        return {"each": "each", "same": "first"}.get(way, "same"), None

    def _leaves(self, state: CollectiveState, names: Collection[str]) -> dict[str, Any]:
        self.watch.check(wait=True)
        if self.plan.owned is not None or self.trainers.here != self.plan.trainers:
            return super()._leaves(state, names)
        held = dict(zip(self._held_names, self._held(state), strict=True))
        return {n: held[n] for n in names}

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        return {n: _unpadded(x, self.plan.cuts.get(n)) for n, x in leaves.items()}

    def _whole_tree(self, spec: Any, held: Mapping[str, Any]) -> Any:
        self.watch.check(wait=True)
        cuts, whole = self.plan.cuts, self.trainers.whole
        found = {
            n: whole(x, cuts[n].axis, cuts[n].size) if n in cuts else whole(x, None, 0)
            for n, x in held.items()
        }
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


def _unpadded(x: Any, s: Any) -> Any:
    """All slices of an array, without padding, where it is cut
    (`dtrans.zero.choose_slices.Sliced`); traced."""
    return (
        x
        if s is None or x.shape[s.axis] == s.size
        else jax.lax.slice_in_dim(x, 0, s.size, axis=s.axis)
    )
