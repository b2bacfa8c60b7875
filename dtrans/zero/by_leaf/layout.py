"""Sharding in which each parameter has one owner: only this rank updates it and stores its state.

    forward, backward     each rank computes gradients of its part of the batch
    reduce_scatter        gradients, packed by owner: a rank receives the sums of its parameters
    optimize              each rank updates its parameters (`dtrans.zero.by_leaf.update`)
    all_gather            parameters, packed by owner

A *bin* is a vector that packs the arrays of one owner. The optimizer's state contains bins
(`opt_state/bins/float32`) instead of the packed arrays. All bins have one length, so that bins of
ranks with fewer elements end with padding. `dtrans.zero.by_leaf.assign` chooses the owners.

Use this sharding for optimizers that mix rows, such as Muon. With `partition="rows"` every rank
gathers each matrix, and runs Muon's iterations on all matrices. Here each rank runs them only on
the matrices that it owns.

In stage 1 gradients are scattered after the backward pass. In stage 2 bins are scattered in parts:
a part is scattered as soon as all gradients in this part are computed.

Source: the sharding pass of Paddle (auto_parallel_sharding.py), which moves variables to and from
their owners one by one.
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
from dtrans.engine.layout import Sliced
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, FORWARD, Program
from dtrans.ir.pytree import TreeSpec, all_names, tuple_of, without
from dtrans.ir.selection import number_items, subset, values_at
from dtrans.rows.analysis import analyse
from dtrans.step.forward_backward import ready_order
from dtrans.step.halves import GRAD, DividedStep, Name, UpdateProgram
from dtrans.zero.by_leaf.assign import assign_leaves, sum_loads
from dtrans.zero.by_leaf.packing import BinPart, Bins, unused_root
from dtrans.zero.by_leaf.update import OwnerWriter, gather_bins, pack_bins, write_function
from dtrans.zero.choose_slices import Slices
from dtrans.zero.options import ShardingOptions
from dtrans.zero.reduce_scatter import Scatterer, ScatterSpec


@dataclasses.dataclass(frozen=True, eq=False)
class LeafOwners:
    """Owner (rank) of each parameter, and layout of the vectors that pack each owner's arrays.

    Attributes:
      owner: the rank that owns each parameter, in the order of the assignment.
      loads: for each rank, the number of elements of the parameters that it owns.
      grads, state: the positions of gradients, and of the optimizer's state, in these vectors
        (bins).
      slices: the reasons why parameters are not sliced, and the analysis of the update.
      half: the update, written so that each rank updates the parameters that it owns.
      args: the arguments of the step, with packed state.
      out: the outputs of the step: parameters, packed state, and results.
    """

    owner: Mapping[str, int]
    loads: Sequence[int]
    grads: Bins
    state: Bins
    slices: Slices
    half: UpdateProgram
    args: tuple[TreeSpec, ...]
    out: TreeSpec

    @classmethod
    def from_step(cls, step: DividedStep, options: ShardingOptions) -> LeafOwners:
        """Choose the owner of each parameter, and write the update of each rank.

        Args:
          step: the training step, divided into its gradient computation and its update.
          options: the options of `dtrans.sharding`.

        Raises:
          ConfigError: the forward or backward pass reads state that only the owner of a parameter
            has.
        """
        leaves, half = _half_of_owners(step)
        analysis = analyse(half, leaves)
        owner = assign_leaves(step, analysis, options.degree, options.slices.partition)
        params, opt_state = step.program.args[:2]
        root = unused_root(f"{opt_state.root or 'opt_state'}/bins", opt_state.names)
        writer = OwnerWriter(analysis, owner, options, root, ready_order(step))
        for name, output in step.state_read.items():
            if name in writer.state.places:
                raise ConfigError(
                    f"partition={options.slices.partition!r}: {output} is computed from {name}, "
                    "which only one rank stores; pass slices=dtrans.Slicing('rows'), so that every "
                    f"rank stores {name}"
                )
        types = step.program.inputs
        state_types = {n: types[n] for n in opt_state.names if n not in writer.state.places}
        state = TreeSpec.from_tree({**state_types, **writer.state.types})
        rest = without(without(step.program.out, params), opt_state)
        unsliced = {n: step.reason_not_optimized(n) for n in step.params if n not in owner}
        return cls(
            owner=owner,
            loads=sum_loads({n: types[n].size for n in owner}, owner, options.degree),
            grads=writer.grads,
            state=writer.state,
            slices=Slices(analysis, {}, {}, unsliced),
            half=writer.half(),
            args=(params, state, *step.program.args[2:]),
            out=tuple_of(params, state, rest),
        )

    @property
    def sliced(self) -> dict[str, Sliced]:
        """Packed optimizer state of all ranks, as sliced arrays: each rank stores one slice."""
        return self.state.sliced

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: the parameters that each rank owns."""
        notes = []
        for k, load in enumerate(self.loads):
            leaves = ", ".join(n for n, rank in self.owner.items() if rank == k) or "none"
            notes.append(f"rank {k} owns {load:,} elements of parameters: {leaves}")
        return notes

    # -- the step --------------------------------------------------------------------------------

    def take_bins(self, b: Builder, names: Sequence[str]) -> dict[str, Atom]:
        """Change a program's inputs: packed vectors (bins) replace the arrays of optimizer state.

        Args:
          b: the builder of the program, which already has the inputs.
          names: the names of the inputs.

        Returns:
          The vectors by name.
        """
        inputs = dict(zip(names, b.invars, strict=True))
        bins = {n: Var(t) for n, t in self.state.types.items()}
        inputs |= bins
        b.invars[:] = values_at(inputs, all_names(self.args))
        return {**bins}

    def reducer(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        options: ShardingOptions,
        example_count: Atom | None,
    ) -> Scatterer:
        """Return a writer that packs gradients by owner, and sums them over ranks.

        Args:
          b: the builder to write with.
          values: the step's gradients by parameter.
          options: the options of `dtrans.sharding`.
          example_count: the weight of this rank, if the mean over ranks is weighted; else None.
        """
        return _BinScatterer(b, values, options, example_count, self.grads)

    def buckets(self, step: DividedStep, options: ShardingOptions) -> tuple[Bucket, ...]:
        """Return the lists of gradients that are reduced together, for the table of the plan."""
        values: dict[str, Atom] = subset(step.gradients, ready_order(step))
        parts = _scattered_parts(self.grads, options)
        found = []
        for bucket in assign_buckets(
            _parts_of(values, self.grads, parts), options, _spec_of(parts)
        ):
            leaves: list[str] = []
            for name in bucket.leaves:
                leaves += self.grads.arrays_in(parts[name]) if name in parts else [name]
            found.append(dataclasses.replace(bucket, leaves=tuple(leaves)))
        return tuple(found)

    def gather_gradients(
        self, b: Builder, means: Mapping[str, Atom], options: ShardingOptions
    ) -> dict[str, Atom]:
        """Gather the reduced gradients from their owners, so that each rank has all of them.

        Results such as a gradient norm need this.

        Args:
          b: the builder to write with.
          means: the reduced gradients: packed, except those without an owner.
          options: the options of `dtrans.sharding`.

        Returns:
          The gradients by parameter.
        """
        bins = subset(means, self.grads.types)
        return {**means, **gather_bins(b, self.grads, bins, options, "grads")}

    # -- the first state -------------------------------------------------------------------------

    def startup(self, startup: Program) -> Program:
        """Rewrite the init of one device so that it returns the optimizer state packed by owner."""
        inner = startup.inner
        b = Builder(startup.jaxpr)
        b.invars += inner.invars
        b.role = FORWARD
        for eqn in inner.eqns:
            b.keep(eqn)
        found: dict[str, Atom] = startup.outvars
        b.role = DIST
        if self.state.types:
            found |= pack_bins(b, self.state, found)
        out = tuple_of(*self.args[:2])
        return Program(
            startup.name,
            b.build(values_at(found, out.names)),
            startup.args,
            out,
            tuple(b.roles),
            startup.labels,
        )

    @cached_property
    def unpack_state(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Function that adds the unpacked arrays to a dict of packed optimizer state."""
        run: Any = jax.jit(self.state.unpack)

        def unpack_state(arrays: Mapping[str, Any]) -> dict[str, Any]:
            bins = {n: x for n, x in arrays.items() if n in self.state.types}
            return {**arrays, **(run(bins) if bins else {})}

        return unpack_state


class _BinScatterer(Scatterer):
    """Writer that packs gradients into one vector per owner (a bin), and reduces them in parts.

    Bins are divided into parts: a part contains elements `start` to `stop` of every rank's bin. As
    soon as all gradients of a part are computed, the part is packed and scattered. Within a bin,
    gradients have the order in which the backward pass computes them. The results, `means`, are the
    bins of this rank.
    """

    def __init__(
        self,
        b: Builder,
        values: Mapping[str, Atom],
        options: ShardingOptions,
        example_count: Atom | None,
        bins: Bins,
    ) -> None:
        self.parts = parts = _scattered_parts(bins, options)
        slices = {n: Sliced(0, p.size * bins.ranks, p.size, bins.ranks) for n, p in parts.items()}
        values = _parts_of(values, bins, parts)
        super().__init__(b, values, options, example_count, GRAD, slices, _spec_of(parts))
        self.bins = bins
        self.owned: dict[str, Atom] = {}
        self.lacking = {n: set(bins.arrays_in(p)) for n, p in parts.items()}

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
        """Pack the gradients of one part, and reduce the packed vector like a single gradient."""
        part, bins = self.parts[name], self.bins
        leaves = bins.arrays_in(part)

        def pack(*xs: Any) -> list[Any]:
            return [bins.pack_part(part, dict(zip(leaves, xs, strict=True)))]

        role, self.b.role = self.b.role, DIST
        (x,) = write_function(self.b, pack, *values_at(self.owned, leaves))
        self.b.role = role
        super().add(name, x)

    def finish(self) -> None:
        for n in self.lacking:
            if not self.bins.arrays_in(self.parts[n]):
                # this part contains only padding, so `add` has not packed it
                self._pack(n)
        super().finish()
        role, self.b.role = self.b.role, DIST
        for name in self.bins.types:
            found = [self.means.pop(n) for n, p in self.parts.items() if p.bin == name]
            self.means[name] = found[0] if len(found) == 1 else self.b.call(_concatenate, *found)[0]
        self.b.role = role


def _concatenate(*xs: jax.Array) -> jax.Array:
    return jax.lax.concatenate(xs, 0)


def _scattered_parts(bins: Bins, options: ShardingOptions) -> dict[str, BinPart]:
    """Divide the packed gradients into parts of `bucket_MB`, which are reduced separately.

    Returns:
      The parts by name.
    """
    return {p.name: p for p in bins.parts(options.reduce.bucket_MB * 2**20)}


def _parts_of(
    values: Mapping[str, Atom], bins: Bins, parts: Mapping[str, BinPart]
) -> dict[str, Atom]:
    """Return the values to reduce: gradients without an owner, then parts of packed gradients.

    Parts are sorted by the time at which the backward pass has computed all their gradients.
    """
    at = number_items(values)
    ends: dict[str, int] = {}
    for name, part in parts.items():
        ends[name] = max(values_at(at, bins.arrays_in(part)), default=len(at))
    found: dict[str, Atom] = {n: v for n, v in values.items() if n not in bins.places}
    for name in sorted(parts, key=ends.__getitem__):
        part = parts[name]
        found[name] = Var(ShapedArray((part.size * bins.ranks,), bins.types[part.bin].dtype))
    return found


def _spec_of(parts: Mapping[str, BinPart]) -> Callable[[str], ScatterSpec]:
    return lambda name: ScatterSpec(axis=0 if name in parts else None)


def _half_of_owners(step: DividedStep) -> tuple[list[str], UpdateProgram]:
    """Return the parameters that need an owner, and the update with these parameters as inputs.

    These are all parameters that the update computes. Another parameter needs an owner if the
    update, or a gradient norm, reads its gradient.
    """
    half = step.optimize
    leaves: list[str] = []
    more: list[str] = []  # leaves that are not updated, but have a gradient
    for n in step.params:
        if n in step.optimized:
            leaves.append(n)
        elif n in half.graded:
            leaves.append(n)
            more.append(n)

    variables: dict[Name, Var] = dict(half.invars)
    new: dict[str, Var] = {}
    for n in more:
        if n not in variables:
            new[n] = variables[n] = Var(step.program.inputs[n])
    inner = half.inner
    outvars = [*inner.outvars, *values_at(variables, more)]
    jaxpr = closed_with(half.jaxpr, invars=[*inner.invars, *new.values()], outvars=outvars)
    return leaves, UpdateProgram(jaxpr, (*half.in_names, *new), (*half.out_names, *more))
