"""Plans of data-parallel jobs: one program for all trainers, and what it moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dtrans._jax import SCAN, JaxprEqn, is_varying, jaxprs_in_params, opened, scan_length
from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.errors import ConfigError
from dtrans.ir.cost import nbytes
from dtrans.ir.program import Program
from dtrans.ops import collective_of
from dtrans.plan import Plan, realiser


if TYPE_CHECKING:
    from dtrans.batch.exact_step import ExactStep
    from dtrans.data_parallel.options import Options


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
      name: `bucket/0`, ...
      leaves: whose gradients they are, in the order in which the backward pass makes them.
      dtype: of the gradients.
      nbytes: what is reduced, after compression.
    """

    name: str
    leaves: tuple[str, ...]
    dtype: Any
    nbytes: int


def collectives(jaxpr: Any, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield the collectives of a jaxpr, each with the number of times that a step carries it
    out."""
    for eqn in opened(jaxpr).eqns:
        if collective_of(eqn) is not None:
            yield eqn, times
        turns = times * (scan_length(eqn) if eqn.primitive.name == SCAN else 1)
        for body in jaxprs_in_params(eqn.params):
            yield from collectives(body, turns)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CollectivePlan(Plan):
    """Data-parallel training of one step; made by `dtrans.nccl2`.

    Attributes:
      main: the step, with calls inlined and exact roles.
      startup: the single-device init.
      program: the program of every trainer, (params, opt_state, *batch) -> what the step returns. A
        batch is the trainer's part.
      options: what it was planned with: see `dtrans.nccl2`.
      buckets: the gradients that are reduced together, in order; the state, after local steps.
      merges: result, or parameter that trainers make, to how it is merged.
      callers: sentences of who calls each host callback of the step.
      replan: plans the same step with other options.
      shared: how the batch is cut exactly; None where each trainer takes the step on its part
        alone.
      for_whole: makes the program for a batch that the trainers do not divide, from the types of
        the step's inputs; None where they must.
    """

    main: Program
    startup: Program
    program: Program
    options: Options
    buckets: tuple[Bucket, ...]
    merges: Mapping[str, str]
    callers: tuple[str, ...]
    replan: Callable[[Any], Any] = dataclasses.field(repr=False, compare=False)
    shared: ExactStep | None = dataclasses.field(default=None, kw_only=True, compare=False)
    for_whole: Callable[[Sequence[Any]], Program] | None = dataclasses.field(
        default=None, kw_only=True, repr=False, compare=False
    )

    _right, _code = (3,), 1
    made_by: ClassVar = "nccl2"

    @property
    def owned(self) -> Any:
        """Return the owner of each leaf, if leaves are assigned whole; None except in sharding."""
        return None

    @property
    def cuts(self) -> Mapping[str, Any]:
        """Return the state that trainers hold as slices between steps; empty except in sharding."""
        return {}

    @property
    def programs(self) -> dict[str, Program]:
        return {"trainer": self.program}

    @property
    def trainers(self) -> int:
        """Return the number of trainers."""
        return self.options.trainers

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that they are on, with their sizes: one, or two where reductions are
        hierarchical."""
        return self.options.axes

    @property
    def unsplit_inputs(self) -> tuple[str, ...]:
        """Names of batch arrays that every trainer gets whole."""
        return tuple(self.options.batch.unsplit_inputs)

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """Return initial values of state beside parameters and optimizer state, by name."""
        return {}

    # -- running ---------------------------------------------------------------------------------

    @property
    def function(self) -> Callable[..., Any]:
        """The program as a pure function of one trainer: (params, opt_state, *batch) -> what the
        step returns.

        It runs under `jax.pmap`, `jax.vmap`, or `jax.shard_map` with `check_vma=False`, with the
        names of `axes`. Each trainer gets its part of the batch; what it returns is merged already,
        but for results that are "concat" (each has its rows) or "each" (each has its own). For one
        trainer it needs no axis.

        Raises:
          ConfigError: when it is called, under a `jax.shard_map` that checks varying types. The
            equations were traced without them, and replay only without the check.
        """
        per_trainer = realiser(self, "function")

        def function(*args: Any) -> Any:
            flat = self.program.flatten(*args)
            program = self.program.specialize_flat(flat)
            refusal = ConfigError(
                f"plan.function needs jax.shard_map(..., check_vma=False): {self.main.name} was "
                "traced without the "
                "types that shard_map checks"
            )
            if self.trainers > 1 and any(map(is_varying, flat)):
                raise refusal
            try:
                return program.out.unflatten(per_trainer(program)(*flat))
            except ValueError as e:
                if "varying manual axes" not in str(e):
                    raise
                raise refusal from e

        return function

    def for_trainers(self, trainers: int) -> CollectivePlan:
        """Return the plan for another number of trainers.

        A hierarchy that does not fit them is given up.
        """
        if trainers == self.trainers:
            return self
        node = self.options.trainers_per_node
        fits = node and not trainers % node and trainers > node
        return self.replan(
            dataclasses.replace(
                self.options, trainers=trainers, trainers_per_node=node if fits else 0
            )
        )

    # -- cost ------------------------------------------------------------------------------------

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    def costs(self) -> Costs:
        held = {n: nbytes(t) for n, t in self.program.inputs.items()}
        moved = list(collectives(self.program.jaxpr))
        sent = sum(times * sum(nbytes(a.aval) for a in eqn.invars) for eqn, times in moved)
        received = sum(times * sum(nbytes(a.aval) for a in eqn.outvars) for eqn, times in moved)
        state = sum(held[n] for spec in self.program.args[:2] for n in spec.names)
        rounds = sum(times for _, times in moved)
        return Costs(
            [
                RoleCost(
                    "trainer",
                    self.trainers,
                    state,
                    sent,
                    received,
                    rounds,
                    program_flops(self.program),
                )
            ]
        )

    @cached_property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that each trainer puts into collectives in a step, by the type they are in."""
        return self.bytes_over(*self.axis_names)

    def bytes_over(self, *axes: str) -> dict[str, int]:
        """Return the bytes per step of collectives over any of these axes, by kind."""
        found: dict[str, int] = {}
        for eqn, times in collectives(self.program.jaxpr):
            if set(axes) & set(eqn.params["over"]):
                for a in eqn.invars:
                    name = np.dtype(a.aval.dtype).name
                    found[name] = found.get(name, 0) + times * a.aval.size * a.aval.dtype.itemsize
        return found

    # -- showing ---------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table of buckets: name, leaves, type, bytes."""
        return [
            (b.name, ", ".join(b.leaves[:3]) + (f", ... ({len(b.leaves)})" if len(b.leaves) > 3 else ""),
             np.dtype(b.dtype).name, f"{b.nbytes:,}")
            for b in self.buckets
        ]  # fmt: skip

    @cached_property
    def notes(self) -> list[str]:
        """Return remarks for the user that the table does not show."""
        moved = (
            ", ".join(f"{n:,} bytes of {kind}" for kind, n in self.bytes_per_step.items())
            or "nothing"
        )
        notes = [] if self.shared is None else list(self.shared.notes)
        notes += [
            f"each trainer puts {moved} into collectives per step, over "
            f"{' and '.join(self.axis_names)}"
        ]
        if len(self.axes) > 1:
            across = ", ".join(
                f"{n:,} bytes of {kind}" for kind, n in self.bytes_over(self.axis_names[0]).items()
            )
            notes.append(f"of that between the {self.axes[0][1]} nodes: {across}")
        if self.options.local_sgd is not None:
            notes.append(
                f"after {self.options.local_sgd} steps of their own trainers average their state"
            )
            notes.append(
                "statistics, counts and random numbers are those of each trainer's own rows"
            )
        averaged = {leaf for b in self.buckets for leaf in b.leaves}
        notes += [
            f"{name}: {way}"
            for name, way in self.merges.items()
            if name not in averaged or way != "mean"
        ]
        notes += self.callers
        return notes

    @property
    def _title(self) -> str:
        return f"nccl2 plan of {self.main.name}: {self.trainers} trainers"

    @property
    def _header(self) -> tuple[str, ...]:
        return (
            "bucket",
            "gradients of" if self.options.local_sgd is None else "state",
            "type",
            "bytes",
        )
