"""Choice of the arrays that ranks slice, and of the reduction of each gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from dtrans._jax import Var
from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.reducer import assign_buckets
from dtrans.engine.layout import Gathered, Sliced
from dtrans.errors import ConfigError
from dtrans.ir.selection import subset, values_at
from dtrans.ops import CASTS
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import RowAxis
from dtrans.step.forward_backward import ready_order
from dtrans.step.halves import DividedStep, UpdateProgram, check_same_update
from dtrans.zero.by_leaf.layout import LeafOwners
from dtrans.zero.choose_slices import (
    Slices,
    choose_slices,
    summed_gradients,
    trainer_equations,
)
from dtrans.zero.forward_values import differing_inputs
from dtrans.zero.mixed_precision import low_gradients
from dtrans.zero.options import ShardingOptions
from dtrans.zero.rank_values import local_values
from dtrans.zero.reduce_scatter import ScatterSpec, scatter_specs
from dtrans.zero.scattered_values import makers_of, scattered_values
from dtrans.zero.update import slice_half


@dataclasses.dataclass(frozen=True, eq=False)
class RankLayout:
    """Record of the arrays that ranks slice, and of the reduction of each gradient.

    `write_rank` writes a rank's program from this record. The record is valid for every batch size,
    unless the update contains the batch size.

    Attributes:
      options: the options of `dtrans.sharding`.
      merges: maps each result to the rule that merges the results of ranks, such as "mean".
      slices: the sliced parameters and optimizer state.
      half: the update, rewritten for a rank's slices.
      gathers: the values that the update must gather because slices do not suffice, with reasons.
      owned: the owner of each parameter, if each rank updates complete parameters. None if
        parameters are sliced.
      groups: maps each parameter to its stage in a pipeline. Each collective contains parameters of
        only one stage.
      sums: inputs that contain slices of gradients, which the stages of a pipeline have already
        summed.
    """

    options: ShardingOptions
    merges: Mapping[str, str]
    slices: Slices
    half: UpdateProgram
    gathers: tuple[Gathered, ...] = ()
    owned: LeafOwners | None = None
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, Sliced] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_step(
        cls,
        step: DividedStep,
        options: ShardingOptions,
        merges: Mapping[str, str],
        planned: Slices | None = None,
        divided: Mapping[str, int] = MappingProxyType({}),
    ) -> RankLayout:
        """Choose the slices of a step's parameters and state, and rewrite its update for slices.

        Args:
          step: the step, divided into its gradient computation and its update.
          options: the options of `dtrans.sharding`.
          merges: maps each result to the rule that merges the results of ranks.
          planned: the slices that were chosen for another batch size. They are used again, because
            a job stores its state in them.
          divided: maps parameters to a dimension that the model axis divides.

        Raises:
          ConfigError: with this `partition`, one rank updates a complete leaf, but the update reads
            values that this rank does not have.
        """
        if options.degree == 1:
            analysis = analyse(step.optimize, step.params)
            slices = Slices(analysis, {}, {}, dict.fromkeys(step.params, "degree is 1"))
            return cls(options, merges, slices, step.optimize)
        differing = differing_inputs(step, options)
        if options.slices.partition != "rows":
            if rows := sorted(differing.intersection(step.batch)):
                raise ConfigError(
                    f"partition={options.slices.partition!r}: the update of {step.program.name} "
                    f"reads all rows of {rows[0]}, but each rank has only its own part of the "
                    "batch; use partition='rows'"
                )
            owned = LeafOwners.from_step(step, options)
            return cls(options, merges, owned.slices, owned.half, owned=owned)
        slices = choose_slices(
            step,
            options.degree,
            least=options.slices.min_slice_size,
            in_layers=options.stage > 1,
            sliced_in_use=options.stage == 3,
            differing=differing,
            planned=planned,
            divided=divided,
        )
        half, gathers = slice_half(
            slices.analysis.half, slices.sliced, options.degree, options.axis_name
        )
        return cls(options, merges, slices, half, gathers)

    def for_update(self, planned: DividedStep, again: DividedStep) -> RankLayout:
        """Return the layout of the same step for another batch size, with the same slices.

        Args:
          planned: the step at this layout's batch size.
          again: the same step, traced at the other batch size.

        Raises:
          BatchError: the other batch size needs other slices.
        """
        if not planned.handed and not planned.optimize.differing_outputs(again.optimize):
            return self
        other = RankLayout.from_step(again, self.options, self.merges, self.slices)
        if other.sliced != self.sliced or other.owner != self.owner:
            check_same_update(planned, again)
        return dataclasses.replace(
            other, options=self.options, merges=self.merges, groups=self.groups, sums=self.sums
        )

    @property
    def sliced(self) -> dict[str, Sliced]:
        """Inputs of the step that are slices on each rank, by name."""
        leaves = self.slices.leaves if self.options.slices_params else {}
        return {**leaves, **self.slices.state, **self.sums}

    @property
    def owner(self) -> Mapping[str, int] | None:
        """Rank that stores and updates each parameter; None if parameters are sliced."""
        return None if self.owned is None else self.owned.owner

    # -- gradients -------------------------------------------------------------------------------

    def layer_gradients(self, step: DividedStep) -> dict[Var, str]:
        """Return the gradients that loops reduce-scatter layer by layer: variable -> parameter.

        Stages 2 and 3 have such gradients, if a loop over layers computes them.
        """
        options = self.options
        if options.stage == 1 or self._weights_or_clips or options.reduce.compress is not None:
            return {}
        eqns, _ = trainer_equations(step)
        # no loop scatters replicated gradients, because they are not reduced
        leaves = [n for n in self.slices.leaves if n not in self.replicated]
        gradients = summed_gradients(step, eqns, leaves)
        rows = {g: RowAxis(n, self.slices.leaves[n].axis) for g, n in gradients.items()}
        local = local_values(eqns, values_at(step.program.invars, step.batch))
        flow, makers = scattered_values(eqns, rows, local), makers_of(eqns)
        found = {}
        for g, n in gradients.items():
            _, in_loops = flow.ends_of(g, makers)
            if in_loops:
                found[g] = n
        return found

    def spec_of(self, step: DividedStep) -> Callable[[str], ScatterSpec]:
        """Return a function from the name of a parameter to the reduction of its gradient."""
        layers = set(self.layer_gradients(step).values())
        compress: dict[str, str] = {}
        dtype = self.options.precision.dtype
        if dtype is not None:
            # omit gradients in `layers`, because their loops already reduce in 16 bits
            compress = dict.fromkeys(low_gradients(step, CASTS[dtype]) - layers, dtype)
        return scatter_specs(self.slices.leaves, layers, compress, self.replicated, self.groups)

    def buckets(self, step: DividedStep) -> tuple[Bucket, ...]:
        """Return the lists of gradients that are reduced together, in order."""
        if self.owned is not None:
            return self.owned.buckets(step, self.options)
        gradients = subset(step.gradients, ready_order(step))
        return assign_buckets(gradients, self.options, self.spec_of(step))

    @property
    def replicated(self) -> Collection[str]:
        """Parameters with the same gradient on all ranks, which needs no reduction.

        There are no such parameters if each rank clips its gradients, or multiplies them by its
        weight. There are also none if gradients of micro-batches are summed: then only one rank
        adds a gradient that does not depend on the batch.
        """
        adds_terms = self.options.num_micro_batch > 1 and self.options.reduce.op == "sum"
        return () if self._weights_or_clips or adds_terms else self.slices.replicated

    @property
    def _weights_or_clips(self) -> bool:
        """True if ranks clip gradients, or multiply them by a weight, before the reduction."""
        return (
            self.options.batch.example_count is not None
            or self.options.reduce.clip_local_norm is not None
        )
