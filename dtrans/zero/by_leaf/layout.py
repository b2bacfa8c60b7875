"""Sharding by whole leaves: each leaf has an owner, who alone updates it and holds its state.

    forward, backward     each rank on its part of the batch
    reduce_scatter        gradients, packed by owner: a rank gets the sum of those that it owns, and no others; behind
                          the backward pass in stage 1, in stage 2 part by part, each once all
                          ranks' are made
    optimize              each rank its own leaves (`dtrans.zero.by_leaf.update`)
    all_gather            parameters, packed by owner

It is for optimizers that mix rows at great cost (Muon): with `partition="rows"` every rank gathers
each matrix and iterates on all of them, here each rank iterates on the matrices that it owns. It
costs padding, where leaves are not even; `dtrans.zero.by_leaf.assign` says who owns what. State of
leaves is in bins (`opt_state/bins/float32`), which take the place of the arrays that lie in them.

Source: the sharding pass of Paddle (auto_parallel_sharding.py), which moves whole variables to and
from owners, one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax

from dtrans._jax import Atom, ShapedArray, Var, closed_with
from dtrans.data_parallel.plan import Bucket
from dtrans.data_parallel.reducer import assign_buckets
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, FORWARD, Program
from dtrans.ir.pytree import TreeSpec, tuple_of, without
from dtrans.rows.analysis import analyse
from dtrans.step.cut import GRAD, Cut, OptimizeHalf
from dtrans.step.forward_backward import ready_order
from dtrans.zero.by_leaf.assign import loads_of, owned_leaves
from dtrans.zero.by_leaf.packing import BinPart, Bins, free_name
from dtrans.zero.by_leaf.update import OwnerWriter, gathered, packed, written
from dtrans.zero.choose_slices import Sliced, Slices
from dtrans.zero.options import ShardingOptions
from dtrans.zero.reduce_scatter import Scatterer, ScatterSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Owned:
    """Owner of each leaf, and the layout of leaves in bins.

    Attributes:
      owner: the rank of each leaf, in the order in which leaves were assigned.
      loads: the number of elements of parameters that each rank owns.
      grads, state: the bins of gradients and of the optimizer's state.
      slices: the result of the row analysis; no leaf is cut.
      half: the optimize half of a rank.
      args: the arguments of the step, with state in bins.
      out: the outputs of the step: parameters, state in bins, and the rest.
    """

    owner: Mapping[str, int]
    loads: Sequence[int]
    grads: Bins
    state: Bins
    slices: Slices
    half: OptimizeHalf
    args: tuple[TreeSpec, ...]
    out: TreeSpec

    @classmethod
    def of(cls, step: Cut, o: ShardingOptions) -> Owned:
        """Decide. Raises ConfigError where forward and backward read what owners hold."""
        leaves, half = _updating_what_is_read(step)
        analysis = analyse(half, leaves)
        owner = owned_leaves(step, analysis, o.degree, o.slices.partition)
        params, opt_state = step.program.args[:2]
        root = free_name(f"{opt_state.root or 'opt_state'}/bins", opt_state.names)
        writer = OwnerWriter(analysis, owner, o, root, ready_order(step))
        read = next((n for n in step.state_read if n in writer.state.places), None)
        if read:
            raise ConfigError(
                f"partition={o.slices.partition!r}: {step.state_read[read]} is made of {read}, which "
                "the owner of its leaf "
                "alone would have; partition='rows' keeps such leaves whole on every rank"
            )
        types = {n: step.program.inputs[n] for n in opt_state.names if n not in writer.state.places}
        held = TreeSpec.from_tree({**types, **writer.state.types})
        rest = without(without(step.program.out, params), opt_state)
        loads = loads_of({n: step.program.inputs[n].size for n in owner}, owner, o.degree)
        wholes = {n: step.reason_not_optimized(n) for n in step.params if n not in owner}
        return cls(
            owner,
            loads,
            writer.grads,
            writer.state,
            Slices(analysis, {}, {}, wholes),
            writer.half(),
            (params, held, *step.program.args[2:]),
            tuple_of(params, held, rest),
        )

    @property
    def cuts(self) -> dict[str, Sliced]:
        """The bins of state, as slices."""
        return self.state.cuts

    @property
    def notes(self) -> list[str]:
        """Return remarks that list each rank's leaves."""
        return [
            f"rank {k} owns {load:,} elements of parameters: "
            + (", ".join(n for n, r in self.owner.items() if r == k) or "none")
            for k, load in enumerate(self.loads)
        ]

    # -- the step --------------------------------------------------------------------------------

    def take(self, b: Builder, names: Sequence[str]) -> dict[str, Atom]:
        """Let the step take bins for what lies in them. Returns them by name.

        Args:
          b: that the step is written with; it has its inputs.
          names: of these.
        """
        own = dict(zip(names, b.invars, strict=True))
        bins = {n: Var(t) for n, t in self.state.types.items()}
        b.invars[:] = [bins[n] if n in bins else own[n] for spec in self.args for n in spec.names]
        return {**bins}

    def reducer(
        self, b: Builder, values: Mapping[str, Atom], o: ShardingOptions, example_count: Atom | None
    ) -> Scatterer:
        """Return the writer that reduces the step's gradients in bins."""
        return _BinScatterer(b, values, o, example_count, self.grads)

    def buckets(self, step: Cut, o: ShardingOptions) -> tuple[Bucket, ...]:
        """Return the leaves that are reduced together."""
        values: dict[str, Atom] = {n: step.gradients[n] for n in ready_order(step)}
        parts = _parts(self.grads, o)
        leaves = {n: self.grads.inside(p) for n, p in parts.items()}
        return tuple(
            dataclasses.replace(
                x, leaves=tuple(n for name in x.leaves for n in leaves.get(name, [name]))
            )
            for x in assign_buckets(_packed_values(values, self.grads, parts), o, _kind(parts))
        )

    def whole_gradients(
        self, b: Builder, means: Mapping[str, Atom], o: ShardingOptions
    ) -> dict[str, Atom]:
        """Write the gather of reduced gradients; those of all leaves."""
        return {
            **means,
            **gathered(b, self.grads, {n: means[n] for n in self.grads.types}, o, "grads"),
        }

    # -- the first state -------------------------------------------------------------------------

    def startup(self, startup: Program) -> Program:
        """Return the init of one device, with state in the bins of all ranks."""
        inner = startup.inner
        b = Builder(startup.jaxpr)
        b.invars += inner.invars
        b.role = FORWARD
        for eqn in inner.eqns:
            b.keep(eqn)
        found: dict[str, Atom] = startup.outvars
        b.role = DIST
        if self.state.types:
            found |= packed(b, self.state, found)
        out = tuple_of(*self.args[:2])
        return Program(
            startup.name,
            b.build([found[n] for n in out.names]),
            startup.args,
            out,
            tuple(b.roles),
            startup.labels,
        )

    @cached_property
    def opened(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Return a function that adds the arrays in bins to a dict of arrays and bins."""
        run: Any = jax.jit(self.state.unpacked)

        def opened(held: Mapping[str, Any]) -> dict[str, Any]:
            bins = {n: x for n, x in held.items() if n in self.state.types}
            return {**held, **(run(bins) if bins else {})}

        return opened


class _BinScatterer(Scatterer):
    """Reduces gradients that have owners, in parts of bins: `means` are a rank's bins, by their
    names.

    A part is what lies at the same places of the bins of all ranks. It is packed, and scattered,
    when the last gradient that reaches into it is there: gradients lie in their bins in the order
    in which they are made.
    """

    def __init__(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        o: ShardingOptions,
        example_count: Atom | None,
        bins: Bins,
    ) -> None:
        self.parts = parts = _parts(bins, o)
        slices = {
            n: Sliced(0, (p.stop - p.start) * bins.ranks, p.stop - p.start, bins.ranks)
            for n, p in parts.items()
        }
        super().__init__(
            b, _packed_values(values, bins, parts), o, example_count, GRAD, slices, _kind(parts)
        )
        self.bins = bins
        self.owned: dict[str, Atom] = {}
        self.lacking = {n: set(bins.inside(p)) for n, p in parts.items()}

    def add(self, leaf: str, grad: Atom) -> None:
        if leaf not in self.bins.places:
            super().add(leaf, grad)
            return
        self.owned[leaf] = grad
        for n, lacking in self.lacking.items():
            if leaf in lacking:
                lacking.remove(leaf)
                if not lacking:
                    self._pack(n)

    def _pack(self, name: str) -> None:
        """Pack a part."""
        part, bins = self.parts[name], self.bins
        inside = bins.inside(part)
        role, self.b.role = self.b.role, DIST
        (x,) = written(
            self.b,
            lambda *xs: [bins.packed_part(part, dict(zip(inside, xs, strict=True)))],
            *(self.owned[n] for n in inside),
        )
        self.b.role = role
        super().add(name, x)

    def finish(self) -> None:
        for n, inside in self.lacking.items():
            if not self.bins.inside(self.parts[n]):  # gradients without elements
                assert not inside
                self._pack(n)
        super().finish()
        role, self.b.role = self.b.role, DIST
        for name in self.bins.types:
            found = [self.means.pop(n) for n, p in self.parts.items() if p.bin == name]
            self.means[name] = found[0] if len(found) == 1 else self.b.call(_behind, *found)[0]
        self.b.role = role


def _behind(*xs: jax.Array) -> jax.Array:
    return jax.lax.concatenate(xs, 0)


def _parts(bins: Bins, o: ShardingOptions) -> dict[str, BinPart]:
    """Return the parts of bins that are scattered together, by name."""
    return {p.name: p for p in bins.parts(o.reduce.bucket_MB * 2**20)}


def _packed_values(
    values: Mapping[str, Atom], bins: Bins, parts: Mapping[str, BinPart]
) -> dict[str, Atom]:
    """Gradients by leaf, and in the place of those that have owners, parts of bins, in the order in
    which they end."""
    at = {n: i for i, n in enumerate(values)}
    ends = {
        n: max((at[leaf] for leaf in bins.inside(p)), default=len(at)) for n, p in parts.items()
    }
    found: dict[str, Atom] = {n: v for n, v in values.items() if n not in bins.places}
    for n in sorted(parts, key=ends.__getitem__):
        p = parts[n]
        found[n] = Var(ShapedArray(((p.stop - p.start) * bins.ranks,), bins.types[p.bin].dtype))
    return found


def _kind(parts: Mapping[str, BinPart]) -> Callable[[str], ScatterSpec]:
    return lambda name: ScatterSpec(axis=0 if name in parts else None)


def _updating_what_is_read(step: Cut) -> tuple[list[str], OptimizeHalf]:
    """Return the leaves that need an owner, and an optimize half that takes and returns all of
    them.

    A leaf that is not updated may have a gradient that others read (in a norm of all): somebody has
    to own that.
    """
    half = step.optimize
    more = [n for n in step.params if n in half.graded and n not in step.optimized]
    inner = half.inner
    inputs = half.invars
    new = {n: Var(step.program.inputs[n]) for n in more if n not in inputs}
    outvars = [*inner.outvars, *((inputs | new)[n] for n in more)]
    jaxpr = closed_with(half.jaxpr, invars=[*inner.invars, *new.values()], outvars=outvars)
    leaves = [n for n in step.params if n in more or n in step.optimized]
    return leaves, OptimizeHalf(jaxpr, (*half.in_names, *new), (*half.out_names, *more))
