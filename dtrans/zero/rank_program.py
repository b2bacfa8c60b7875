"""The program of a rank: what is decided once (`RankLayout`), and who writes the step
(`RankWriter`).

    inputs                slices where ranks hold slices, the step's own variables elsewhere
    forward, backward     `Gatherer` where parameters are slices, or loops scatter; copies elsewhere
    gradients             `Scatterer`: in stage 1 when all are there, later as they are made
    update                the optimize half on slices; taken or not, where a loss is scaled
    parameters            gathered, in stages 1 and 2 without mixed precision
    results               merged as in nccl2 mode; those of gradients are made of slices

What each part does is in the file of its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.data_parallel.accumulation import MicroSteps, Outputs, write_micro_steps
from dtrans.data_parallel.options import COMPRESSED
from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.reducer import assign_buckets
from dtrans.data_parallel.replica import fold_keys, take_inputs
from dtrans.engine.layout import Gathered
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import rows_from, times, together
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, FORWARD, OPTIMIZE, Program, is_communication
from dtrans.ir.pytree import tuple_of
from dtrans.ops import all_gather_p, all_reduce_p, trainer_index_p
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import RowAxis
from dtrans.rows.normalize import inline_inside
from dtrans.step.cut import GRAD, Cut, Gradient, Name, OptimizeHalf, check_same_update, cut
from dtrans.step.forward_backward import Arrange, HalfWriter, ready_order, write_trainer_half
from dtrans.step.observers import call_once
from dtrans.step.weight_gradients import fuse_transposes
from dtrans.zero.all_gather import Gatherer
from dtrans.zero.by_leaf.layout import Owned
from dtrans.zero.choose_slices import Sliced, Slices, slices_of, summed_gradients, trainer_equations
from dtrans.zero.forward_values import differing_inputs, differing_values, with_forward_values
from dtrans.zero.gradient_results import GradientResults
from dtrans.zero.layer_residuals import remade
from dtrans.zero.mixed_precision import (
    GOOD,
    SCALE,
    SKIPPED,
    all_finite,
    low_gradients,
    next_scale,
    scale_of,
    scale_spec,
    unscaled,
)
from dtrans.zero.options import ShardingOptions
from dtrans.zero.rank_values import local_values
from dtrans.zero.reduce_scatter import Scatterer, ScatterSpec, scatter_specs
from dtrans.zero.scatter_flow import makers_of, scatter_flow
from dtrans.zero.slice_writer import Gathering, Given, SliceWriter
from dtrans.zero.update import sliced_half


@dataclasses.dataclass(frozen=True, eq=False)
class RankLayout:
    """Decisions that do not depend on the batch's shape, except numbers of its size in the update.

    Attributes:
      o: the options.
      merges: the way to merge each result.
      slices: the leaves and state that are cut.
      half: the optimize half of a rank.
      gathers: the values that the update gathers, with reasons.
      owned: the owner of each leaf, if leaves are assigned whole.
      groups: the stage of each leaf in a pipeline. A collective combines leaves of one stage only.
      sums: further inputs that are slices: sums of gradients that were scattered before.
    """

    o: ShardingOptions
    merges: Mapping[str, str]
    slices: Slices
    half: OptimizeHalf
    gathers: tuple[Gathered, ...] = ()
    owned: Owned | None = None
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, Sliced] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, step: Cut, o: ShardingOptions, merges: Mapping[str, str], planned: Slices | None = None
    ) -> RankLayout:
        """Return the layout of a step; with `planned`, slices of the state that is held already."""
        if o.degree == 1:
            wholes = dict.fromkeys(step.params, "degree is 1")
            return cls(
                o,
                merges,
                Slices(analyse(step.optimize, step.params), {}, {}, wholes),
                step.optimize,
            )
        differing = differing_inputs(step, o)
        if o.slices.partition != "rows":
            if rows := sorted(differing.intersection(step.batch)):
                raise ConfigError(
                    f"partition={o.slices.partition!r}: the update of {step.program.name} reads "
                    f"{rows[0]}, of which "
                    "the owner of a leaf has its own rows alone; partition='rows' takes such a step"
                )
            owned = Owned.of(step, o)
            return cls(o, merges, owned.slices, owned.half, owned=owned)
        slices = slices_of(
            step,
            o.degree,
            least=o.slices.min_slice_size,
            in_layers=o.stage > 1,
            sliced_in_use=o.stage == 3,
            differing=differing,
            planned=planned,
        )
        half, gathers = sliced_half(slices.analysis.half, slices.cuts, o.degree, o.axis_name)
        return cls(o, merges, slices, half, gathers)

    def for_update(self, planned: Cut, again: Cut) -> RankLayout:
        """Return the same layout for the step of a batch of another size, whose update may have
        numbers of that size.

        Raises:
          BatchError: other slices would be cut.
        """
        if not planned.handed and not planned.optimize.differing_outputs(again.optimize):
            return self
        made = RankLayout.of(again, self.o, self.merges, self.slices)
        owners = [None if x.owned is None else x.owned.owner for x in (self, made)]
        if made.cuts != self.cuts or owners[0] != owners[1]:
            check_same_update(planned, again)
        return dataclasses.replace(
            made, o=self.o, merges=self.merges, groups=self.groups, sums=self.sums
        )

    @property
    def cuts(self) -> dict[str, Sliced]:
        """Return the inputs of the step that are slices."""
        return {
            **(self.slices.leaves if self.o.slices_params else {}),
            **self.slices.state,
            **self.sums,
        }

    def layers(self, step: Cut) -> dict[Var, str]:
        """Return the gradients that loops scatter layer by layer."""
        o = self.o
        if o.stage == 1 or self._weights_or_clips or o.reduce.compress is not None:
            return {}
        eqns, _ = trainer_equations(step)
        # ranks add up no others
        found = summed_gradients(
            step, eqns, [n for n in self.slices.leaves if n not in self.unreduced]
        )
        rows = {g: RowAxis(n, self.slices.leaves[n].axis) for g, n in found.items()}
        local = local_values(eqns, [step.program.invars[n] for n in step.batch])
        flow, makers = scatter_flow(eqns, rows, local), makers_of(eqns)
        return {g: n for g, n in found.items() if flow.ends_of(g, makers)[1]}

    def kind(self, step: Cut) -> Callable[[str], ScatterSpec]:
        """In what way each gradient is reduced."""
        layers = set(self.layers(step).values())
        dtype = self.o.precision.dtype
        low = {} if dtype is None else dict.fromkeys(low_gradients(step, COMPRESSED[dtype]), dtype)
        compress = {n: to for n, to in low.items() if n not in layers}
        return scatter_specs(self.slices.leaves, layers, compress, self.unreduced, self.groups)

    def buckets(self, step: Cut) -> tuple[Bucket, ...]:
        """Return the gradients that each collective moves, in the order of the collectives."""
        if self.owned is not None:
            return self.owned.buckets(step, self.o)
        return assign_buckets(
            {n: step.gradients[n] for n in ready_order(step)}, self.o, self.kind(step)
        )

    @property
    def unreduced(self) -> Collection[str]:
        """Return the leaves whose gradients are the same on all ranks: not where each weights or
        clips its own.

        Where micro-steps add up, a term that no row enters is the first micro-step's of the first
        rank alone.
        """
        terms = self.o.num_micro_batch > 1 and self.o.reduce.op == "sum"
        return () if self._weights_or_clips or terms else self.slices.unreduced

    @property
    def _weights_or_clips(self) -> bool:
        """Return True if each rank weights or clips its gradients before they are reduced."""
        return self.o.batch.example_count is not None or self.o.reduce.clip_local_norm is not None


# Writes gradients that are slices wherever leaves are, from the inputs by name; yields them by
# leaf.
WriteGradients = Callable[[Builder, Mapping[str, Atom]], Iterator[tuple[str, Atom]]]


def rewritten(step: Cut, layout: RankLayout, gradients: WriteGradients | None = None) -> Program:
    """Write the step of one rank.

    Args:
      gradients: takes the place of forward and backward.
    """
    return RankWriter(step, layout, gradients).program()


class RankWriter:
    """Writer of the step of one rank; arguments as those of `rewritten`."""

    def __init__(
        self, step: Cut, layout: RankLayout, gradients: WriteGradients | None = None
    ) -> None:
        self.step = step
        self.layout = layout
        self.gradients = gradients
        self.o = o = layout.o
        self.leaves = layout.slices.leaves
        self.source = step.program
        self.outs: dict[str, Atom] = self.source.outvars
        self.vars_of = self.source.invars
        self.kind = layout.kind(step)
        # reductions one after the other are one chain
        one_chain = dataclasses.replace(o.reduce, chains=1)
        self.reducing = (
            o if o.slices.overlap or o.reduce.chains else dataclasses.replace(o, reduce=one_chain)
        )
        self._index: Atom | None = None  # of the rank, in a group
        self.scale = (
            None if o.precision.scaling is None else scale_of(o.precision.scaling, self.vars_of)
        )
        self.b = b = Builder(self.source.jaxpr)
        b.role = FORWARD
        cuts = layout.cuts
        taken = take_inputs(
            b, step, o, {n: s.of_rank(self.source.inputs[n]) for n, s in cuts.items()}
        )
        self.local: dict[str, Atom] = {n: taken.get(v, v) for n, v in self.vars_of.items()}
        batch = {self.vars_of[n] for n in step.batch if n not in cuts}
        if layout.owned is not None:
            self.local |= layout.owned.take(b, self.source.in_names)
        fold_keys(b, {v: k for v, k in taken.items() if v in batch}, o)

    def program(self) -> Program:
        """Write the program."""
        step, b = self.step, self.b
        results = [n for n in step.results if n not in step.from_gradients]
        values: dict[str, Atom] = {n: step.gradients[n] for n in ready_order(step)}
        found = dict(self.outs)
        count = self.o.batch.example_count or ""
        if self.gradients is not None:
            reducer = self._reducer(b, step, values, None, scattered=True)
            for leaf, grad in self.gradients(b, self.local):
                reducer.add(leaf, grad)
        elif self.o.num_micro_batch == 1:
            reducer = self._reducer(b, step, values, self.outs.get(count))
            found |= self._half(b, step, results, reducer.add, self.local)
        else:
            made, grads = self._accumulated(results)
            found |= made
            reducer = self._reducer(b, step, values, found.get(count), scattered=self.o.stage > 1)
            for leaf in values:
                reducer.add(leaf, grads[leaf])
        reducer.finish()
        self.local |= {n: found.pop(n) for n in step.handed}
        means, finite = self._unscaled(reducer.means)
        found |= self._updated(means)
        found |= self._from_gradients(means)
        found |= reducer.reduce_results(found, self.layout.merges, self.vars_of)
        if finite is not None:
            found |= self._taken_if(finite, found)
        if self.o.shared is not None and self.o.trainers > 1:
            call_once(b, self.o.over)
        owned = self.layout.owned
        args, out = (owned.args, owned.out) if owned else (self.source.args, self.source.out)

        def again(source: Program) -> Program:
            other = with_forward_values(cut(source).with_reported(), self.o)
            return rewritten(other, self.layout.for_update(self.step, other), self.gradients)

        if finite is not None:
            out = tuple_of(out, scale_spec())
        program = Program(
            f"rank of {self.source.name}",
            b.build([found[n] for n in out.names]),
            args,
            out,
            tuple(
                DIST if is_communication(e) else role
                for e, role in zip(b.eqns, b.roles, strict=True)
            ),
            b.labels,
        )
        return self.source.rewritten(again, result=program)

    # -- forward and backward --------------------------------------------------------------------

    def _reducer(
        self,
        b: Builder,
        step: Cut,
        values: Mapping[str, Atom],
        example_count: Atom | None,
        scattered: bool = False,
    ) -> Scatterer:
        if self.layout.owned is not None:
            return self.layout.owned.reducer(b, values, self.reducing, example_count)
        unreduced, groups = self.layout.unreduced, self.layout.groups
        kind = (
            self.kind
            if not scattered
            else scatter_specs(self.leaves, self.leaves, {}, unreduced, groups)
        )
        return Scatterer(
            b, values, self.reducing, example_count, GRAD, self.leaves, kind, self.scale
        )

    def _half(
        self, b: Builder, step: Cut, results: Sequence[str], made: Any, local: Mapping[str, Atom]
    ) -> dict[str, Atom]:
        """Write forward and backward; gradients go to `made`, in stage 1 when all are there."""
        late: list[tuple[str, Atom]] = []
        tell = made if self.o.stage > 1 else lambda leaf, grad: late.append((leaf, grad))
        writer = (
            self._gatherer(b, step, local)
            if self.o.slices_params or self.layout.layers(step)
            else None
        )
        found = write_trainer_half(b, step, results, tell, writer, self._arranged(step))
        for leaf, grad in late:
            made(leaf, grad)
        return found

    def _arranged(self, step: Cut) -> Arrange:
        """Return the function that reorders equations and removes residuals of layers."""
        o, jaxpr, vars_of = self.o, step.program.jaxpr, step.program.invars
        rows = {vars_of[n]: RowAxis(n, s.axis) for n, s in self.leaves.items() if self.o.stage == 3}

        def arrange(
            eqns: Sequence[JaxprEqn], roles: Sequence[str], wanted: Collection[Atom]
        ) -> tuple[list[JaxprEqn], list[str]]:
            eqns, roles = fuse_transposes(eqns, roles, wanted)
            if rows:
                eqns = list(map(inline_inside, eqns))
                local = local_values(eqns, [vars_of[n] for n in step.batch])
                given, how = Given(rows, local, wanted={}), Gathering(o.axis_name, o.degree)
                writer = SliceWriter(Builder(jaxpr), jaxpr, eqns, roles, given, how)
                eqns = remade(writer, {a for a in wanted if isinstance(a, Var)})
            return eqns, roles

        return arrange

    def _gatherer(self, b: Builder, step: Cut, local: Mapping[str, Atom]) -> Any:
        o, vars_of = self.o, step.program.invars
        held = {n: s for n, s in self.leaves.items() if o.slices_params}
        dtype = COMPRESSED[o.precision.dtype] if o.precision.dtype else None
        low = set() if dtype is None else low_gradients(step, dtype)
        layers = self.layout.layers(step)
        segment = (o.slices.gather_bucket_MB if o.stage == 3 else o.reduce.bucket_MB) * 2**20
        in_loops = o.prefetch if o.prefetches_in_loops else 0
        dtypes = {n: dtype if n in low else g.aval.dtype for g, n in layers.items()}
        how = Gathering(
            o.axis_name, o.degree, dtypes, o.prefetch, in_loops, segment, once=o.stage < 3
        )

        def writer(
            eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Sequence[tuple[int, Atom]]
        ) -> HalfWriter:
            given = Given(
                {vars_of[n]: RowAxis(n, s.axis) for n, s in held.items()},
                local_values(eqns, [vars_of[n] for n in step.batch]),
                {g: RowAxis(n, self.leaves[n].axis) for g, n in layers.items()},
                {vars_of[n]: local[n] for n in held},
            )
            plain = list(map(inline_inside, eqns))
            gatherer = Gatherer(
                b, step.program.jaxpr, plain, roles, given, how, [a for _, a in ends]
            )
            unreduced = {
                n: g
                for n, g in step.gradients.items()
                if n in self.leaves and n in self.layout.unreduced
            }
            gatherer.begin(ends, {g for n, g in unreduced.items() if isinstance(g, Var)
                                  and gatherer.rows.get(g) == RowAxis(n, self.leaves[n].axis)})  # fmt: skip
            return gatherer

        return writer

    def _accumulated(self, results: Sequence[str]) -> Outputs:
        """Write forward and backward of all micro-steps; their gradients are slices from stage 2
        on."""
        o, step = self.o, self.step
        window = MicroSteps.from_options(step, o, self.layout.merges)
        given = {n: self.local[n] for n in self.leaves} if o.slices_params else {}

        def half(inner: Builder, micro: Cut) -> Outputs:
            local = {n: inner.input(a.aval) for n, a in given.items()}
            inner.role = FORWARD
            if o.stage == 1:
                grads: dict[str, Atom] = {}
                return self._half(inner, micro, results, grads.__setitem__, local), grads
            values: dict[str, Atom] = {n: micro.gradients[n] for n in ready_order(micro)}
            one_group = dataclasses.replace(self.reducing, replicas=1)
            scatterer = _MicroScatterer(
                inner, values, one_group, None, GRAD, self.leaves, self.layout.kind(micro)
            )
            found = self._half(inner, micro, results, scatterer.add, local)
            scatterer.finish()
            return found, scatterer.means

        return write_micro_steps(self.b, step, window, results, given, half)

    # -- the update ------------------------------------------------------------------------------

    def _unscaled(self, means: Mapping[str, Atom]) -> tuple[dict[str, Atom], Atom | None]:
        """Write the gradients of a loss that is not scaled, and whether all of them are finite, on
        every rank."""
        b, scaling = self.b, self.o.precision.scaling
        if scaling is None or self.scale is None:
            return dict(means), None
        b.role = OPTIMIZE
        plain = {n: b.call(unscaled, g, self.scale)[0] for n, g in means.items()}
        if not scaling.dynamic:
            return plain, None
        (finite,) = b.call(all_finite, *means.values())
        if self.leaves:
            over = (self.o.axis_name,)
            (finite,) = b.bind(all_reduce_p, finite, op="and", name="finite", owners=(), over=over)
            b.labels[finite] = "finite"
        return plain, finite

    def _taken_if(self, finite: Atom, found: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write the state after the step, whoever made it: as before, where a gradient is not
        finite; and the scale."""
        b = self.b
        b.role = OPTIMIZE
        new = {
            n: found[n]
            for spec in self.source.args[:2]
            for n in spec.names
            if found[n] is not self.local[n]
        }
        kept = {n: b.call(_picked, finite, x, self.local[n])[0] for n, x in new.items()}
        names = (GOOD, SCALE, SKIPPED)
        assert self.o.precision.scaling is not None
        made = b.call(
            next_scale(self.o.precision.scaling), finite, *(self.vars_of[n] for n in names)
        )
        return kept | dict(zip(names, made, strict=True))

    def _updated(self, means: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write the update; new parameters and state, by name."""
        b, o, half = self.b, self.o, self.layout.half
        b.role = OPTIMIZE
        given: list[Atom] = []
        for n in half.in_names:
            if isinstance(n, Gradient):
                given.append(means[n.leaf])
            elif n in self.leaves:
                given.append(self._slice_of(n))
            else:
                given.append(self.local[n])
        found = dict(zip(half.out_names, b.inline(half.jaxpr, *given), strict=True))
        if not o.slices_params:
            found |= self._gathered({n: found[n] for n in self.leaves if n in found})
        return found

    def _slice_of(self, leaf: str) -> Atom:
        """Return the rank's slice of a parameter."""
        s, o, b = self.leaves[leaf], self.o, self.b
        if o.slices_params:
            return self.local[leaf]
        if self._index is None:
            (self._index,) = b.bind(trainer_index_p, over=(o.axis_name,))
        (start,) = b.call(times(s.part), self._index)
        return b.call(rows_from(s.axis, s.part, s.padded), self.local[leaf], start)[0]

    def _gathered(self, slices: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write gathers of slices of leaves, in buckets; the leaves."""
        b, o = self.b, self.o
        b.role = DIST
        found: dict[str, Atom] = {}
        before: Sequence[Atom] = ()
        limit = o.reduce.bucket_MB * 2**20
        for i, bucket in enumerate(_buckets(slices, self.leaves, limit, self.layout.groups)):
            sent: Sequence[Atom] = [slices[n] for n in bucket]
            axis = self.leaves[bucket[0]].axis
            if before and not o.slices.overlap:
                sent = b.call(together, *sent, *before)[: len(sent)]
            made = before = b.bind(
                all_gather_p,
                *sent,
                name=f"params/{i}",
                over=(o.axis_name,),
                size=o.degree,
                axis=axis,
            )
            for n, x in zip(bucket, made, strict=True):
                s = self.leaves[n]
                b.labels[x] = f"{n}.gathered"
                found[n] = x if s.padded == s.size else b.part(x, s.axis, 0, s.size)
        return found

    def _from_gradients(self, means: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write results that are computed from gradients, of slices where that can be."""
        step, b, o = self.step, self.b, self.o
        if not step.from_gradients:
            return {}
        if self.layout.owned is not None:
            means = self.layout.owned.whole_gradients(b, means, self.o)
        here = {*b.invars, *(v for e in b.eqns for v in e.outvars)}
        results = GradientResults(step, self.leaves, here, differing_values(step, o))
        cuts: dict[Name, Sliced] = {}
        for leaf, sliced in self.leaves.items():
            if leaf not in results.mixed:
                cuts[Gradient(leaf)] = sliced
                cuts |= {leaf: sliced} if o.slices_params else {}
        half, _ = sliced_half(results.half, cuts, o.degree, o.axis_name)
        whole = self._gathered({n: means[n] for n in results.mixed if n in half.graded})
        own = {n: self.local[n] for n in results.mixed if n in half.in_names}
        params = self._gathered(own) if o.slices_params else own
        b.role = OPTIMIZE
        given: list[Atom] = []
        for n in half.in_names:
            if isinstance(n, Gradient):
                given.append(whole.get(n.leaf, means[n.leaf]))
            elif n in results.others:
                given.append(results.others[n])
            else:
                given.append(params.get(n, self.local[n]))
        return dict(zip(half.out_names, b.inline(half.jaxpr, *given), strict=True))


class _MicroScatterer(Scatterer):
    """Gradients of one micro-step: scattered in a group, and nothing else, until all have been
    added up."""

    adds_up = False

    def sums(self, bucket: Any, sent: Sequence[Atom]) -> Sequence[Atom]:
        return sent if self.scatter(bucket.leaves[0]).axis is None else super().sums(bucket, sent)

    def _average(self, total: Atom) -> Atom:
        return total


def _buckets(
    slices: Mapping[str, Atom],
    leaves: Mapping[str, Sliced],
    limit: float,
    groups: Mapping[str, int],
) -> list[list[str]]:
    """Leaves that are gathered together, by place, type and dimension, up to a size."""
    kind = lambda n: (groups.get(n, 0), str(slices[n].aval.dtype), leaves[n].axis)
    found: list[list[str]] = []
    size = 0.0
    for n in sorted(slices, key=kind):
        nbytes = slices[n].aval.size * slices[n].aval.dtype.itemsize * leaves[n].degree
        if not found or kind(found[-1][0]) != kind(n) or size + nbytes > limit:
            found.append([])
            size = 0.0
        found[-1].append(n)
        size += nbytes
    return found


def _picked(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(finite, new, old)
