"""Model cut into stages, with the programs of the stages for a micro-batch of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax

from dtrans._jax import Var
from dtrans.errors import BatchError
from dtrans.ir.dataflow import variables
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import values_at
from dtrans.pipeline_parallel.forward_pass import ForwardPass, forward_pass
from dtrans.pipeline_parallel.options import PipelineOptions
from dtrans.pipeline_parallel.results import results_program
from dtrans.pipeline_parallel.split_stages import Cuts, split_stages
from dtrans.pipeline_parallel.stage_programs import StagePrograms, StageProgramWriter
from dtrans.pipeline_parallel.stage_scan import ScanSplits, StageRows, split_scans, unstack_params
from dtrans.pipeline_parallel.update import slices_of_sums
from dtrans.step.cut import cut, other_size
from dtrans.zero.mixed_precision import low_products


@dataclasses.dataclass(frozen=True, eq=False)
class StepPrograms:
    """Programs of a micro-batch, with the programs that merge results.

    Attributes:
      stages: the programs of each stage.
      cuts: values of a micro-batch that a split stage stores in pieces: (stage, name) to the
        dimension.
      results: for each stage, the program that merges its results, or None.
    """

    stages: tuple[StagePrograms, ...]
    cuts: Mapping[tuple[int, str], int]
    results: tuple[Program | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StagedModel:
    """Step of a micro-batch, cut into stages: the data that determines their programs.

    Attributes:
      captured: the step of a micro-batch, with its loss as one equation (`dtrans.step.capture`).
      options: the options of the plan.
      stage_of: the stage of each equation of the loss function.
      homes: the stage that stores each parameter.
      users: the stages that compute gradients of a parameter.
      cuts: the number of shards of stages, and the split dimension of arrays of the state.
      scan_splits: the iterations of scans over layers that each stage runs.
      stacks: arrays of the state with rows in several stages; each run of rows has a name.
      merges: result, or parameter that the forward pass computes, to the way to merge it.
    """

    captured: Program
    options: PipelineOptions
    stage_of: tuple[int, ...]
    homes: Mapping[str, int]
    users: Mapping[str, tuple[int, ...]]
    cuts: Cuts
    scan_splits: ScanSplits
    stacks: Mapping[str, tuple[StageRows, ...]]
    merges: Mapping[str, str]

    def specialize(
        self, types: Sequence[jax.ShapeDtypeStruct], planned: Mapping[str, Any]
    ) -> StepPrograms:
        """Return the programs of the same stages for a batch of different types.

        Args:
          types: the types of the inputs of the step, with the global batch.
          planned: the types that the step was planned for, by name.

        Raises:
          BatchError: rows that micro-batches and replicas do not divide, or a loss function with
            other equations for such a batch.
        """
        key = tuple((t.shape, t.dtype) for t in types)
        if key not in self._known:
            self._known[key] = self._programs_for(types, planned)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Any, StepPrograms]:
        return {}

    def _programs_for(
        self, types: Sequence[jax.ShapeDtypeStruct], planned: Mapping[str, Any]
    ) -> StepPrograms:
        step = cut(micro_batch_of(self.captured, self.options, types)).with_reported()
        for n in cut(self.captured).with_reported().differing_outputs(step):
            types_of = dict(zip(self.captured.in_names, types, strict=True))
            raise other_size(step, n, planned, types_of)
        forward, _ = split_scans(forward_pass(step), self.scan_splits)
        rows = {n: runs for n, runs in self.stacks.items() if n in step.params}
        forward = unstack_params(forward, rows).forward
        if len(forward.eqns) != len(self.stage_of):
            raise BatchError(
                f"{self.captured.name} has {len(forward.eqns)} equations for a batch of these "
                f"shapes, and {len(self.stage_of)} for the batch that it was planned for; make a "
                "plan for this batch"
            )
        stages = write_stages(forward, self.stage_of, self.options)
        return step_programs(forward, stages, self.merges, self.cuts, self.options)


def micro_batch_of(
    step: Program, o: PipelineOptions, types: Sequence[jax.ShapeDtypeStruct]
) -> Program:
    """Return a step for a micro-batch of a replica.

    Args:
      step: the step as it was traced or captured, for any batch.
      o: the options.
      types: the types of its inputs, with the global batch.

    Raises:
      BatchError: rows that micro-batches and replicas do not divide.
    """
    batch = {n for spec in step.args[2:] for n in spec.names}
    rows: dict[int, str] = {}  # number of rows to the first array with it
    micro_types = []
    for n, t in zip(step.in_names, types, strict=True):
        shape = t.shape
        if n in batch and shape and not is_under(n, o.batch.unsplit_inputs):
            rows.setdefault(shape[0], n)
            shape = (shape[0] // o.parts, *shape[1:])
        micro_types.append(jax.ShapeDtypeStruct(shape, t.dtype))
    if len(rows) > 1 and o.parts > 1:
        listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
        raise BatchError(
            f"the arrays of a batch are cut into micro-batches on dim 0, but {listed} rows; name "
            "arrays that every micro-batch reads uncut in unsplit_inputs=(...)"
        )
    for count, n in rows.items():
        if count % o.parts:
            raise BatchError(
                f"{n} has {count} rows, which num_micro_batch={o.num_micro_batch} and "
                f"replicas={o.replicas} do not divide: give batches of a multiple of {o.parts}"
            )
    return step.specialize_flat(micro_types)


def write_stages(
    forward: ForwardPass, stage_of: Sequence[int], o: PipelineOptions
) -> tuple[StagePrograms, ...]:
    """Write the programs of each stage of a forward pass."""
    scatter = slices_of_sums(forward.step, o) if o.memory.sharding_stage == 2 else {}
    if o.precision.dtype is not None:
        forward, stage_of = _in_low_precision(forward, stage_of, o.precision.dtype)
    return StageProgramWriter(forward, stage_of, o, scatter).stages()


def _in_low_precision(
    forward: ForwardPass, stage_of: Sequence[int], amp: str
) -> tuple[ForwardPass, tuple[int, ...]]:
    """Return a forward pass with products in 16 bits, and the stage of each equation."""
    params = [v for v, a in forward.sources.items() if forward.is_state(a)]
    jaxpr, origin = low_products(forward.jaxpr, amp, params)
    lowered = dataclasses.replace(forward, jaxpr=jaxpr)
    stages = values_at(stage_of, origin)
    known = {v for e in forward.eqns for v in e.outvars}
    first: dict[Var, int] = {}  # the first stage that reads a value
    for i, eqn in reversed(list(enumerate(lowered.eqns))):
        # if several stages need a value in 16 bits, the first of them casts it
        if known.isdisjoint(eqn.outvars):
            stages[i] = min((first[v] for v in eqn.outvars if v in first), default=stages[i])
        for a in variables(eqn.invars):
            first[a] = min(stages[i], first.get(a, stages[i]))
    return lowered, tuple(stages)


def step_programs(
    forward: ForwardPass,
    stages: Sequence[StagePrograms],
    merges: Mapping[str, str],
    cuts: Cuts,
    o: PipelineOptions,
) -> StepPrograms:
    """Return the programs of stages, split over shards, with the programs that merge results."""
    results = tuple(results_program(s, merges, o, forward.jaxpr) for s in stages)
    return StepPrograms(*split_stages(stages, cuts), results)
