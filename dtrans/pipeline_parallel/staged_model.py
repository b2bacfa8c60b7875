"""Model that is divided into stages, and the programs of its stages for any batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax

from dtrans._jax import Var
from dtrans.engine.layout import Sliced
from dtrans.errors import BatchError
from dtrans.ir.dataflow import outputs_of, variables
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names, is_under
from dtrans.ir.selection import retain, values_at
from dtrans.pipeline_parallel.forward_pass import ForwardPass, forward_pass
from dtrans.pipeline_parallel.gather_params import gather_params
from dtrans.pipeline_parallel.options import PipelineOptions
from dtrans.pipeline_parallel.results import results_program
from dtrans.pipeline_parallel.split_stages import StageSharding, split_stages
from dtrans.pipeline_parallel.stage_programs import StagePrograms, StageProgramWriter
from dtrans.pipeline_parallel.stage_scan import ScanSplits, StageRows, split_scans, unstack_params
from dtrans.pipeline_parallel.update import slices_of_sums
from dtrans.step.halves import divide_step, other_size
from dtrans.zero.mixed_precision import low_products


@dataclasses.dataclass(frozen=True, eq=False)
class StepPrograms:
    """Programs of all stages for one batch size.

    Attributes:
      stages: the programs of each stage, for one micro-batch.
      sharded_axes: maps (stage, name of a value) to the dimension along which the stage's shards
        divide the value. Only split stages have sharded values.
      results: the program that merges each stage's results; None for a stage without results.
    """

    stages: tuple[StagePrograms, ...]
    sharded_axes: Mapping[tuple[int, str], int]
    results: tuple[Program | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StagedModel:
    """Step of a micro-batch, and the assignment of its equations to stages.

    `specialize` writes the programs of the stages for a batch size.

    Attributes:
      captured: the step of a micro-batch, with its loss as one equation (`dtrans.step.capture`).
      options: the options of the plan.
      stage_of: the stage of each equation of the forward pass.
      homes: maps each parameter to the stage that stores it.
      users: maps each parameter to the stages that compute its gradient.
      sharding: the number of shards of each stage, and the state that the shards divide.
      scan_splits: for each scan over layers, the iterations that each stage runs.
      stacks: the rows of each stacked array of the state that several stages divide, by name.
      merges: the merge rule of each result, and of each array of state that the forward pass
        updates (dict by name).
    """

    captured: Program
    options: PipelineOptions
    stage_of: tuple[int, ...]
    homes: Mapping[str, int]
    users: Mapping[str, tuple[int, ...]]
    sharding: StageSharding
    scan_splits: ScanSplits
    stacks: Mapping[str, tuple[StageRows, ...]]
    merges: Mapping[str, str]

    def specialize(
        self, types: Sequence[jax.ShapeDtypeStruct], planned: Mapping[str, Any]
    ) -> StepPrograms:
        """Return the programs of the stages for a batch with the given shapes and dtypes.

        Args:
          types: shape and dtype of each input of the step, with the global batch.
          planned: shape and dtype of each input in the plan, by name.

        Raises:
          BatchError: the number of rows is not a multiple of num_micro_batch * replicas. Or the
            loss function has other equations for this batch.
        """
        key = tuple((t.shape, t.dtype) for t in types)
        if key not in self._known:
            self._known[key] = self._programs_for(types, planned)
        return self._known[key]

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Number of devices of one replica that run stage k, for each k below `num_stages`.

        With several stages on each device, they also run the stages k + num_stages, and so on.
        """
        many = self.options.num_stages
        return tuple(max(self.sharding.shards[k::many]) for k in range(many))

    @cached_property
    def _known(self) -> dict[Any, StepPrograms]:
        return {}

    def _programs_for(
        self, types: Sequence[jax.ShapeDtypeStruct], planned: Mapping[str, Any]
    ) -> StepPrograms:
        step = divide_step(micro_batch_of(self.captured, self.options, types)).with_reported()
        for n in divide_step(self.captured).with_reported().differing_outputs(step):
            types_of = dict(zip(self.captured.in_names, types, strict=True))
            raise other_size(step, n, planned, types_of)
        forward, _ = split_scans(forward_pass(step), self.scan_splits)
        rows = retain(self.stacks, step.params)
        forward = unstack_params(forward, rows).forward
        if len(forward.eqns) != len(self.stage_of):
            raise BatchError(
                f"{self.captured.name} has {len(forward.eqns)} equations for a batch of these "
                f"shapes, but {len(self.stage_of)} for the batch of the plan; make a plan for this "
                "batch"
            )
        slices = slices_of_sums(forward.step, self.options, self.sharding.params)
        stages = write_stages(forward, self.stage_of, self.options, slices)
        return step_programs(forward, stages, self.merges, self.sharding, self.options)


def micro_batch_of(
    step: Program, o: PipelineOptions, types: Sequence[jax.ShapeDtypeStruct]
) -> Program:
    """Return the step for the shapes of one micro-batch.

    Args:
      step: the step, traced with a batch of any size.
      o: the options of the pipeline.
      types: shape and dtype of each input of the step, with the global batch.

    Raises:
      BatchError: arrays of the batch have different numbers of rows. Or the number of rows is not a
        multiple of num_micro_batch * replicas.
    """
    batch = set(all_names(step.args[2:]))
    rows: dict[int, str] = {}  # number of rows -> the first array with this number of rows
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
            f"{listed} rows; expected equal numbers, because the rows of every array of the batch "
            "are split into micro-batches. If every micro-batch reads a full array, name the array "
            "in dtrans.Batch(unsplit_inputs=...)"
        )
    for count, n in rows.items():
        if count % o.parts:
            raise BatchError(
                f"{n} has {count} rows; expected a multiple of {o.parts} (num_micro_batch="
                f"{o.num_micro_batch} times replicas={o.replicas})"
            )
    return step.specialize_flat(micro_types)


def write_stages(
    forward: ForwardPass,
    stage_of: Sequence[int],
    o: PipelineOptions,
    slices: Mapping[str, Sliced] = MappingProxyType({}),
) -> tuple[StagePrograms, ...]:
    """Return the programs of each stage, for one micro-batch.

    Args:
      forward: the forward pass.
      stage_of: the stage of each equation of the forward pass.
      o: the options of the pipeline.
      slices: the slices of some leaves (dict by leaf). Replicas reduce-scatter the gradients of
        these leaves. With `sharding_stage=3`, replicas also store the leaves as slices.
    """
    if o.precision.dtype is not None:
        forward, stage_of = _in_low_precision(forward, stage_of, o.precision.dtype)
    stages = StageProgramWriter(forward, stage_of, o, slices).stages()
    if not o.slices_params:
        return stages
    return tuple(gather_params(s, slices) for s in stages)


def _in_low_precision(
    forward: ForwardPass, stage_of: Sequence[int], amp: str
) -> tuple[ForwardPass, tuple[int, ...]]:
    """Return the forward pass with matrix products in 16 bits, and the stage of each equation."""
    params = [v for v, a in forward.sources.items() if forward.is_state(a)]
    jaxpr, origin = low_products(forward.jaxpr, amp, params)
    lowered = dataclasses.replace(forward, jaxpr=jaxpr)
    stages = values_at(stage_of, origin)
    known = set(outputs_of(forward.eqns))
    first: dict[Var, int] = {}  # value -> the first stage that reads the value
    for i, eqn in reversed(list(enumerate(lowered.eqns))):
        # A cast that several stages read runs on the first of these stages.
        if known.isdisjoint(eqn.outvars):
            stages[i] = min((first[v] for v in eqn.outvars if v in first), default=stages[i])
        for a in variables(eqn.invars):
            first[a] = min(stages[i], first.get(a, stages[i]))
    return lowered, tuple(stages)


def step_programs(
    forward: ForwardPass,
    stages: Sequence[StagePrograms],
    merges: Mapping[str, str],
    sharding: StageSharding,
    o: PipelineOptions,
) -> StepPrograms:
    """Return the programs of all stages, and the programs that merge their results."""
    results = tuple(results_program(s, merges, o, forward.jaxpr) for s in stages)
    return StepPrograms(*split_stages(stages, sharding), results)
