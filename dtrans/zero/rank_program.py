"""Writer of the program that every rank runs.

    inputs                slices of sharded arrays; other arrays in full
    forward, backward     copied; or written by `Gatherer`, if parameters or gradients are slices
    gradients             reduced by `Scatterer` (stage 1: after the backward pass)
    update                written by `RankUpdate`: computes new slices of parameters and state
    parameters            gathered, if ranks store full parameters between steps
    results               merged as in `dtrans.nccl2`; a gradient norm is computed from slices

`dtrans.zero.rank_layout` decides which values are slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.data_parallel.accumulation import MicroSteps, Outputs, write_micro_steps
from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.replica import fold_keys, take_inputs
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import variables
from dtrans.ir.program import DIST, FORWARD, Program, is_communication
from dtrans.ir.pytree import tuple_of
from dtrans.ir.selection import subset, values_at
from dtrans.ops import CASTS
from dtrans.rows.layout import RowAxis
from dtrans.rows.normalize import inline_inside
from dtrans.step.forward_backward import Arrange, HalfWriter, ready_order, write_trainer_half
from dtrans.step.halves import GRAD, DividedStep, divide_step
from dtrans.step.observers import call_once
from dtrans.step.weight_gradients import fuse_transposes
from dtrans.zero.all_gather import Gatherer
from dtrans.zero.forward_values import with_forward_values
from dtrans.zero.layer_residuals import rematerialize_layers
from dtrans.zero.mixed_precision import low_gradients, scale_of, scale_spec
from dtrans.zero.options import ShardingOptions
from dtrans.zero.rank_layout import RankLayout
from dtrans.zero.rank_update import RankUpdate
from dtrans.zero.rank_values import local_values
from dtrans.zero.reduce_scatter import Scatterer, scatter_specs
from dtrans.zero.slice_analysis import GatherOptions, SliceAnalysis, SliceInputs


# function of (builder, inputs by name) that yields pairs (leaf, gradient); for a sliced leaf, the
# gradient is also a slice
WriteGradients = Callable[[Builder, Mapping[str, Atom]], Iterator[tuple[str, Atom]]]

HalfWriterOf = Callable[[Sequence[JaxprEqn], Sequence[str], Sequence[tuple[int, Atom]]], HalfWriter]


def write_rank(
    step: DividedStep, layout: RankLayout, gradients: WriteGradients | None = None
) -> Program:
    """Write the program that every rank runs.

    Args:
      step: the step, divided into its gradient computation and its update.
      layout: the arrays that ranks slice, and the reduction of each gradient.
      gradients: a function that writes equations for the gradients. By default, the forward and
        backward pass of `step` computes them. A pipeline passes a function, because its stages
        compute the gradients.
    """
    return RankWriter(step, layout, gradients).write()


class RankWriter:
    """Writer of the program that every rank runs; `write_rank` describes the arguments."""

    def __init__(
        self, step: DividedStep, layout: RankLayout, gradients: WriteGradients | None = None
    ) -> None:
        self.step = step
        self.layout = layout
        self.gradients = gradients
        self.options = options = layout.options
        self.leaves = layout.slices.leaves
        self.source = step.program
        self.spec_of = layout.spec_of(step)
        self.reduce_options: ShardingOptions = options
        if not options.slices.overlap and not options.reduce.chains:
            # with one chain, each reduction waits for the previous one, so that none overlap
            one_chain = dataclasses.replace(options.reduce, chains=1)
            self.reduce_options = dataclasses.replace(options, reduce=one_chain)
        self.scale: Atom | None = None
        if options.precision.scaling is not None:
            self.scale = scale_of(options.precision.scaling, self.source.invars)
        self.b = Builder(self.source.jaxpr)
        self.b.role = FORWARD
        self.local = self._take_inputs()

    def _take_inputs(self) -> dict[str, Atom]:
        """Add the inputs of the rank's program, and return them by name."""
        step, b, options, invars = self.step, self.b, self.options, self.source.invars
        slices = self.layout.sliced
        types = {n: s.rank_type(self.source.inputs[n]) for n, s in slices.items()}
        replaced = take_inputs(b, step, options, types)
        local = dict(zip(invars, read_from(replaced, invars.values()), strict=True))
        if self.layout.owned is not None:
            local |= self.layout.owned.take_bins(b, self.source.in_names)
        batch = {invars[n] for n in step.batch if n not in slices}
        fold_keys(b, {v: k for v, k in replaced.items() if v in batch}, options)
        return local

    def write(self) -> Program:
        """Write the program, and return it; `write_rank` describes the program."""
        step, b = self.step, self.b
        found: dict[str, Atom] = dict(self.source.outvars)
        means = self._write_means(found)
        self.local |= {n: found.pop(n) for n in step.handed}

        # write the update, and the results that depend on gradients
        update = RankUpdate(b, step, self.layout, self.local, self.scale)
        gradients, finite = update.unscale_gradients(means.means)
        found |= update.update(gradients)
        found |= update.gradient_results(gradients)
        found |= means.reduce_results(found, self.layout.merges, self.source.invars)
        if finite is not None:
            found |= update.skip_unless(finite, found)
        if self.options.shared is not None and self.options.trainers > 1:
            call_once(b, self.options.over)

        owned = self.layout.owned
        args, out = self.source.args, self.source.out
        if owned is not None:
            args, out = owned.args, owned.out
        if finite is not None:
            out = tuple_of(out, scale_spec())
        roles = []
        for eqn, role in zip(b.eqns, b.roles, strict=True):
            roles.append(DIST if is_communication(eqn) else role)
        program = Program(
            f"rank of {self.source.name}",
            b.build(values_at(found, out.names)),
            args,
            out,
            tuple(roles),
            b.labels,
        )

        def write_again(source: Program) -> Program:
            other = with_forward_values(divide_step(source).with_reported(), self.options)
            return write_rank(other, self.layout.for_update(step, other), self.gradients)

        return self.source.rewritten(write_again, result=program)

    # -- forward and backward --------------------------------------------------------------------

    def _write_means(self, found: dict[str, Atom]) -> Scatterer:
        """Write the forward pass, the backward pass and the reductions of gradients.

        Args:
          found: the step's outputs by name; this method adds the results, such as the loss.

        Returns:
          The writer of the reductions; its `means` are the reduced gradients.
        """
        step, b, options = self.step, self.b, self.options
        values: dict[str, Atom] = subset(step.gradients, ready_order(step))
        count = options.batch.example_count or ""
        results = [n for n in step.results if n not in step.from_gradients]
        if self.gradients is not None:
            reducer = self._reducer(values, None, are_scattered=True)
            for leaf, grad in self.gradients(b, self.local):
                reducer.add(leaf, grad)
        elif options.num_micro_batch == 1:
            reducer = self._reducer(values, found.get(count))
            found |= self._write_half(b, step, results, reducer.add, self.local)
        else:
            outputs, grads = self._accumulate(results)
            found |= outputs
            reducer = self._reducer(values, found.get(count), are_scattered=options.stage > 1)
            for leaf in values:
                reducer.add(leaf, grads[leaf])
        reducer.finish()
        return reducer

    def _reducer(
        self, values: Mapping[str, Atom], example_count: Atom | None, are_scattered: bool = False
    ) -> Scatterer:
        """Return a writer of the equations that sum gradients over ranks.

        Args:
          values: the step's gradients.
          example_count: the weight of this rank, if gradients are averaged with weights.
          are_scattered: True if the gradients of sliced leaves are slices already.
        """
        b, options, owned = self.b, self.reduce_options, self.layout.owned
        if owned is not None:
            return owned.reducer(b, values, options, example_count)
        spec_of = self.spec_of
        if are_scattered:
            replicated, groups = self.layout.replicated, self.layout.groups
            spec_of = scatter_specs(self.leaves, self.leaves, {}, replicated, groups)
        return Scatterer(b, values, options, example_count, GRAD, self.leaves, spec_of, self.scale)

    def _write_half(
        self,
        b: Builder,
        step: DividedStep,
        results: Sequence[str],
        on_gradient: Callable[[str, Atom], None],
        local: Mapping[str, Atom],
    ) -> dict[str, Atom]:
        """Write the forward and backward pass of a step or a micro-step.

        Args:
          b: the builder to write with.
          step: the step, or a micro-step.
          results: the outputs to compute.
          on_gradient: called with each parameter and its gradient. Stages 2 and 3 call it as soon
            as the gradient is computed, stage 1 after the backward pass.
          local: the inputs of the rank's program, by name.

        Returns:
          The outputs by name.
        """
        delayed: list[tuple[str, Atom]] = []
        delay = lambda leaf, grad: delayed.append((leaf, grad))
        writer = None
        if self.options.slices_params or self.layout.layer_gradients(step):
            writer = self._gatherer(b, step, local)
        called = on_gradient if self.options.stage > 1 else delay
        found = write_trainer_half(b, step, results, called, writer, self._arrange(step))
        for leaf, grad in delayed:
            on_gradient(leaf, grad)
        return found

    def _arrange(self, step: DividedStep) -> Arrange:
        """Return a function that simplifies equations of the forward and backward pass.

        The function removes transposes of products. In stage 3, it also rewrites loops so that they
        recompute residuals that depend only on parameters, instead of storing them.
        """
        options, jaxpr, vars_of = self.options, step.program.jaxpr, step.program.invars
        rows: dict[Var, RowAxis] = {}
        if options.stage == 3:
            rows = {vars_of[n]: RowAxis(n, s.axis) for n, s in self.leaves.items()}

        def arrange(
            eqns: Sequence[JaxprEqn], roles: Sequence[str], wanted: Collection[Atom]
        ) -> tuple[list[JaxprEqn], list[str]]:
            eqns, roles = fuse_transposes(eqns, roles, wanted)
            if rows:
                eqns = list(map(inline_inside, eqns))
                local = local_values(eqns, values_at(vars_of, step.batch))
                inputs = SliceInputs(rows, local, wanted={})
                gather_options = GatherOptions(options.axis_name, options.degree)
                analysis = SliceAnalysis(Builder(jaxpr), jaxpr, eqns, roles, inputs, gather_options)
                eqns = rematerialize_layers(analysis, set(variables(wanted)))
            return eqns, roles

        return arrange

    def _gatherer(self, b: Builder, step: DividedStep, local: Mapping[str, Atom]) -> HalfWriterOf:
        """Return a function that creates a `Gatherer`, which gathers sliced parameters."""
        vars_of = step.program.invars
        layers = self.layout.layer_gradients(step)
        gather_options = self._gather_options(step, layers)
        wanted = {g: RowAxis(n, self.leaves[n].axis) for g, n in layers.items()}
        params: dict[Var, RowAxis] = {}
        slices: dict[Var, Atom] = {}
        if self.options.slices_params:
            for n, s in self.leaves.items():
                params[vars_of[n]], slices[vars_of[n]] = RowAxis(n, s.axis), local[n]

        def writer(
            eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Sequence[tuple[int, Atom]]
        ) -> HalfWriter:
            local_vars = local_values(eqns, values_at(vars_of, step.batch))
            inputs = SliceInputs(params, local_vars, wanted, slices)
            plain = list(map(inline_inside, eqns))
            atoms = [a for _, a in ends]
            gatherer = Gatherer(b, step.program.jaxpr, plain, roles, inputs, gather_options, atoms)
            # a gradient that depends only on parameters may be computed as slices
            sliced = set()
            for n, g in step.gradients.items():
                if not isinstance(g, Var) or n not in self.layout.replicated:
                    continue
                if n in self.leaves and gatherer.rows.get(g) == RowAxis(n, self.leaves[n].axis):
                    sliced.add(g)
            gatherer.begin(ends, sliced)
            return gatherer

        return writer

    def _gather_options(self, step: DividedStep, layers: Mapping[Var, str]) -> GatherOptions:
        """Return the options for all-gathers and reduce-scatters in forward and backward."""
        options = self.options
        dtypes = {n: g.aval.dtype for g, n in layers.items()}
        if options.precision.dtype is not None:
            dtype = CASTS[options.precision.dtype]
            dtypes |= dict.fromkeys(low_gradients(step, dtype) & dtypes.keys(), dtype)
        segment = options.reduce.bucket_MB
        if options.stage == 3:
            segment = options.slices.gather_bucket_MB
        return GatherOptions(
            options.axis_name,
            options.degree,
            dtypes,
            prefetch=options.prefetch,
            prefetch_in_loops=options.prefetch if options.prefetches_in_loops else 0,
            segment=segment * 2**20,
            once=options.stage < 3,
        )

    def _accumulate(self, results: Sequence[str]) -> Outputs:
        """Write all micro-steps, which add up their gradients.

        Args:
          results: names of the outputs to compute.

        Returns:
          The results, and the summed gradients by parameter. In stages 2 and 3 these are slices.
        """
        options, step = self.options, self.step
        window = MicroSteps.from_options(step, options, self.layout.merges)
        slices = subset(self.local, self.leaves) if options.slices_params else {}

        def write_micro_step(inner: Builder, micro: DividedStep) -> Outputs:
            local = {n: inner.input(a.aval) for n, a in slices.items()}
            inner.role = FORWARD
            if options.stage == 1:
                grads: dict[str, Atom] = {}
                return self._write_half(inner, micro, results, grads.__setitem__, local), grads
            values: dict[str, Atom] = subset(micro.gradients, ready_order(micro))
            one_group = dataclasses.replace(self.reduce_options, replicas=1)
            spec_of = self.layout.spec_of(micro)
            scatterer = _MicroStepScatterer(
                inner, values, one_group, None, GRAD, self.leaves, spec_of
            )
            found = self._write_half(inner, micro, results, scatterer.add, local)
            scatterer.finish()
            return found, scatterer.means

        return write_micro_steps(self.b, step, window, results, slices, write_micro_step)


class _MicroStepScatterer(Scatterer):
    """Writer of the reduce-scatters in one micro-step, over the ranks of one group.

    The sums over groups follow only after the last micro-step, and another writer writes them.
    """

    adds_up = False

    def sums(self, bucket: Bucket, sent: Sequence[Atom]) -> Sequence[Atom]:
        if self.spec_of(bucket.leaves[0]).axis is None:
            return sent
        return super().sums(bucket, sent)

    def _average(self, total: Atom) -> Atom:
        return total
