"""Plan of a data-parallel job: the program of all trainers, and the bytes that it communicates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dtrans._jax import SCAN, JaxprEqn, is_varying, jaxprs_in_params, opened, scan_length
from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.errors import ConfigError
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ops import collective_of
from dtrans.plan import Plan, runner_of


if TYPE_CHECKING:
    from dtrans.batch.exact_step import ExactStep
    from dtrans.data_parallel.options import Options


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Bucket: the gradients that one reduction sums.

    Attributes:
      name: the name, such as "bucket/0".
      leaves: the leaves of the gradients, in the order of the backward pass.
      dtype: the dtype of the gradients.
      nbytes: the bytes that a trainer sends to the reduction, after compression.
    """

    name: str
    leaves: tuple[str, ...]
    dtype: Any
    nbytes: int


def collectives(jaxpr: Any, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield pairs (equation of a collective, number of times that it runs in a step)."""
    for eqn in opened(jaxpr).eqns:
        if collective_of(eqn) is not None:
            yield eqn, times
        turns = scan_length(eqn) if eqn.primitive.name == SCAN else 1
        for body in jaxprs_in_params(eqn.params):
            yield from collectives(body, times * turns)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CollectivePlan(Plan):
    """Plan of data-parallel training, from `dtrans.nccl2`.

    Attributes:
      main: the step, with calls inlined and a role for each equation.
      startup: the single-device init.
      program: the program that every trainer runs: (params, opt_state, *part of the batch) -> the
        outputs of the step.
      options: the options: see `dtrans.nccl2`.
      buckets: the buckets of gradients in the order of their reductions. With local steps, these
        are buckets of state.
      merges: maps each result, and each parameter that trainers update locally, to its merge rule.
      callers: sentences that say which trainers call each host callback of the step.
      replan: function that plans the same step with different options.
      shared: the split of an exact batch. None with `batch="local"`.
      for_uneven_batch: function that takes the types of the step's inputs, and returns the program
        for a batch that the number of trainers does not divide. None if the number must divide
        every batch.
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
    for_uneven_batch: Callable[[Sequence[Any]], Program] | None = dataclasses.field(
        default=None, kw_only=True, repr=False, compare=False
    )

    _right, _code = (3,), 1
    strategy: ClassVar = "nccl2"

    @property
    def owned(self) -> Any:
        """Owner of each leaf, if sharding assigns each leaf to one rank; None otherwise."""
        return None

    @property
    def sliced(self) -> Mapping[str, Any]:
        """State that trainers store as slices between steps; empty except in sharding."""
        return {}

    @property
    def programs(self) -> dict[str, Program]:
        return {"trainer": self.program}

    @property
    def trainers(self) -> int:
        """Number of trainers."""
        return self.options.trainers

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes as pairs (name, size): one, or two for hierarchical reductions."""
        return self.options.axes

    @property
    def unsplit_inputs(self) -> tuple[str, ...]:
        """Names of the batch arrays that every trainer gets in full."""
        return tuple(self.options.batch.unsplit_inputs)

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """Initial state in addition to parameters and optimizer state, by name."""
        return {}

    # -- running ---------------------------------------------------------------------------------

    @property
    def function(self) -> Callable[..., Any]:
        """The program of one trainer as a pure function: (params, opt_state, *batch) -> outputs.

        Call it under `jax.pmap`, `jax.vmap`, or `jax.shard_map(..., check_vma=False)` with the axis
        names in `axes`. One trainer alone needs no axis. Each trainer passes its part of the batch.
        Results are merged already, with two exceptions: a result with rule "concat" has only this
        trainer's rows, and a result with rule "each" has only this trainer's value.

        Raises:
          ConfigError: the function is called under a `jax.shard_map` with `check_vma=True`. The
            equations have no varying types, which JAX then checks, because dtrans traces without
        `shard_map`.
        """
        per_trainer = runner_of(self, "function")

        def refusal() -> ConfigError:
            return ConfigError(
                f"plan.function: {self.main.name} was traced without the varying types that "
                "shard_map checks; write jax.shard_map(..., check_vma=False)"
            )

        def function(*args: Any) -> Any:
            flat = self.program.flatten(*args)
            program = self.program.specialize_flat(flat)
            if self.trainers > 1 and any(map(is_varying, flat)):
                raise refusal()
            try:
                return program.out.unflatten(per_trainer(program)(*flat))
            except ValueError as e:
                if "varying manual axes" not in str(e):
                    raise
                raise refusal() from e

        return function

    def for_trainers(self, trainers: int) -> CollectivePlan:
        """Return the plan for another number of trainers.

        If `trainers_per_node` does not divide the new number, reductions are not hierarchical.
        """
        if trainers == self.trainers:
            return self
        node = self.options.trainers_per_node
        if node and (trainers % node or trainers <= node):
            node = 0
        options = dataclasses.replace(self.options, trainers=trainers, trainers_per_node=node)
        return self.replan(options)

    # -- cost ------------------------------------------------------------------------------------

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return tuple(name for name, _ in self.axes)

    def costs(self) -> Costs:
        sent = received = rounds = 0
        for eqn, times in collectives(self.program.jaxpr):
            sent += times * total_bytes(eqn.invars)
            received += times * total_bytes(eqn.outvars)
            rounds += times
        names = all_names(self.program.args[:2])
        state = sum(nbytes(self.program.inputs[n]) for n in names)
        flops = program_flops(self.program)
        return Costs([RoleCost("trainer", self.trainers, state, sent, received, rounds, flops)])

    @cached_property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes of each dtype that a trainer passes to collectives in a step."""
        return self.bytes_over(*self.axis_names)

    def bytes_over(self, *axes: str) -> dict[str, int]:
        """Return the bytes that a trainer passes to collectives over `axes` in a step, by dtype."""
        found: dict[str, int] = {}
        for eqn, times in collectives(self.program.jaxpr):
            if set(axes) & set(eqn.params["over"]):
                for a in eqn.invars:
                    name = np.dtype(a.aval.dtype).name
                    found[name] = found.get(name, 0) + times * nbytes(a.aval)
        return found

    # -- showing ---------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of the plan's table: for each bucket its name, leaves, type and bytes."""
        rows = []
        for b in self.buckets:
            leaves = ", ".join(b.leaves[:3])
            if len(b.leaves) > 3:
                leaves += f", ... ({len(b.leaves)})"
            rows.append((b.name, leaves, np.dtype(b.dtype).name, f"{b.nbytes:,}"))
        return rows

    @cached_property
    def notes(self) -> list[str]:
        """Remarks to print below the table of the plan."""
        notes = [] if self.shared is None else list(self.shared.notes)
        computed: set[str] = set()  # state of a step that is not divided at its gradients
        if self.shared is not None and self.shared.step.undivided:
            computed.update(self.shared.step.params)
            reason = self.shared.step.undivided.split("; ")[0].split(". ")[0]
            notes.insert(0, f"no gradients are reduced: {reason}")
        moved = _listed(self.bytes_per_step) or "nothing"
        names = " and ".join(self.axis_names)
        notes.append(f"each trainer puts {moved} into collectives per step, over {names}")
        if len(self.axes) > 1:
            outer, nodes = self.axes[0]
            across = _listed(self.bytes_over(outer))
            notes.append(f"between the {nodes} nodes: {across} per step")
        if self.options.local_sgd is not None:
            notes.append(f"after {self.options.local_sgd} local steps trainers average their state")
            notes.append("statistics, counts and random numbers depend on each trainer's rows only")
        averaged = {leaf for b in self.buckets for leaf in b.leaves}
        for name, way in self.merges.items():
            if name not in computed and (name not in averaged or way != "mean"):
                notes.append(f"{name}: {way}")
        return notes + list(self.callers)

    @property
    def _title(self) -> str:
        return f"nccl2 plan of {self.main.name}: {self.trainers} trainers"

    @property
    def _header(self) -> tuple[str, ...]:
        leaves = "gradients of" if self.options.local_sgd is None else "state"
        return "bucket", leaves, "type", "bytes"


def _listed(by_kind: Mapping[str, int]) -> str:
    """Return a text such as "76 bytes of float32, 8 bytes of int32"."""
    return ", ".join(f"{count:,} bytes of {kind}" for kind, count in by_kind.items())
