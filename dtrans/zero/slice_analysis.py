"""Search for the values that a rank can compute from its slices of parameters.

A parameter is sliced along one dimension (`RowAxis`); its *rows* are the entries along this
dimension. An equation can run on slices if it computes each row from one row of a parameter: a cast
of a stack of layers, some layers of a stack, a layer at an index. So a loop can take slices of a
stack. It gathers one layer at a time, and only for an equation that mixes the rows of the layer:

    w: (16, D, D), sliced along its second dimension
    stack = convert w          computed as slices; the loop scans over them
    layer = dynamic_slice w i  a *root*: `layer` is gathered instead of w
    sum(w ** 2)                computed on slices, then an all_reduce
    dot h layer                reads the full `layer`

A *local* value depends on the batch or on the rank, and so differs from rank to rank
(`dtrans.zero.rank_values`). Local values are not computed as slices.

`dtrans.engine.rules` decides how an equation runs on slices, and `dtrans.zero.slice_writer` writes
the equations.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    Atom,
    BodyIndices,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    bodies,
    body_indices,
    closed_with,
    facts_of,
    is_rearrangement,
    opened,
)
from dtrans.engine.layout import Shards
from dtrans.engine.rules import Strategy, strategy_of
from dtrans.engine.writer import SplitWriter
from dtrans.errors import UnknownPrimitiveWarning
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import producer_positions
from dtrans.ir.selection import values_at
from dtrans.ops import LAYERS
from dtrans.rows.layout import SHARED, RowAxis, rows_or_shared
from dtrans.step.weight_gradients import fuse_transposes
from dtrans.zero.rank_values import local_inside
from dtrans.zero.scattered_values import rows_of_outputs, scattered_values


# equations whose bodies can take slices
_WITH_SLICED_BODIES = frozenset({SCAN, COND, *REMAT})


@dataclasses.dataclass(frozen=True)
class GatherOptions:
    """Options for the equations that gather parameters and scatter gradients.

    Attributes:
      axis_name: the named axis of the ranks.
      degree: the number of ranks.
      dtypes: maps a parameter to the type in which its gradient is reduced. Other gradients keep
        their type.
      prefetch: the number of parameters that are gathered ahead of the equations that need them.
      prefetch_in_loops: the same number for the bodies of loops.
      segment: the limit in bytes up to which consecutive gathers are combined.
      once: True if a parameter is gathered once, for both forward and backward.
    """

    axis_name: str
    degree: int
    dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefetch: int = 0
    prefetch_in_loops: int = 0
    segment: float = 0
    once: bool = False


@dataclasses.dataclass(frozen=True)
class SliceInputs:
    """Inputs of a list of equations that are slices, and gradients that must become slices.

    Attributes:
      rows: the inputs that are slices, each with its parameter and its sliced dimension.
      local: values that differ from rank to rank.
      wanted: the gradients that must become slices, each with its parameter and its sliced
        dimension.
      slices: for each input in `rows`, the variable of this rank's slice. Empty if equations are
        analyzed but not written.
      summed: for each gradient that a loop carries as slices, the variable of this rank's slice.
    """

    rows: Mapping[Var, RowAxis]
    local: Collection[Var]
    wanted: Mapping[Var, RowAxis]
    slices: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    summed: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SlicedBodies:
    """Bodies of a loop, a branch, or `jax.checkpoint` that take or return slices.

    Attributes:
      passed: the operands that the bodies take as slices: index -> sliced dimension in the body.
      wanted: the outputs that are slices of gradients: index -> sliced dimension in the body.
      bodies: the analysis of each body: a `SliceAnalysis`, or a `Gatherer` that also writes it.
    """

    passed: Mapping[int, RowAxis]
    wanted: Mapping[int, RowAxis]
    bodies: Sequence[Any]


class SliceAnalysis(SplitWriter):
    """Search for the values that a rank can compute from its slices of parameters.

    Subclasses also write the equations.

    Args:
      b: the builder to write with.
      like: the jaxpr that contains the equations.
      eqns: the equations in order, with inlined calls.
      roles: the role of each equation, such as "forward".
      inputs: the inputs that are slices, and the gradients that must become slices.
      how: the options of gathers and scatters.
      ends: values that are read after the equations.

    Attributes:
      rows: the values that can be computed as slices, each with its parameter and its sliced
        dimension.
      roots: for each of these values, the parameters or layers to gather if the full value is
        needed.
      full: the parameters and layers that are gathered, because an equation reads them in full.
      reads: maps the index of an equation to the sliced values that it reads in full.
      ways: maps the index of an equation to a description of how it runs on slices.
      entered: maps the index of a loop, branch or remat to its bodies that take or return slices.
    """

    def __init__(
        self,
        b: Builder,
        like: ClosedJaxpr,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        inputs: SliceInputs,
        how: GatherOptions,
        ends: Iterable[Atom] = (),
    ) -> None:
        super().__init__(
            like, Shards(how.degree, (how.axis_name,), "rank", label=LAYERS, shares_work=False)
        )
        self.inner = opened(like)
        self.write_to(b)
        self.eqns, self.roles = eqns, roles
        self.slice_inputs, self.how, self.local = inputs, how, inputs.local
        self._position = producer_positions(eqns)
        self._producers = {v: eqns[i] for v, i in self._position.items() if v not in self.local}
        self.scattering = scattered_values(eqns, inputs.wanted, self.local, ends, inputs.summed)

        self.rows: dict[Var, RowAxis] = {}
        self.roots: dict[Var, frozenset[Var]] = {}
        self.full: set[Var] = set()
        self.reads: dict[int, list[Atom]] = {}
        self.ways: dict[int, Strategy] = {}
        self.entered: dict[int, SlicedBodies] = {}
        for v, row in inputs.rows.items():
            self._add_slices(v, row, [v])
        self._values |= {(v, self.layouts[v]): piece for v, piece in inputs.slices.items()}
        with warnings.catch_warnings():
            # do not warn: an unknown primitive reads full operands, which is correct
            warnings.simplefilter("ignore", UnknownPrimitiveWarning)
            self._follow()

    # -- results -----------------------------------------------------------------------------------

    def roots_of(self, atoms: Iterable[Atom]) -> frozenset[Var]:
        """Return the values that a rank must gather to compute the full values of `atoms`.

        These are parameters, or parts of parameters, such as one layer of a stack.
        """
        return frozenset().union(*(self.roots.get(a, ()) for a in atoms if isinstance(a, Var)))

    def read_full(self, atoms: Iterable[Atom]) -> None:
        """Record that an equation reads `atoms` in full, so that they must be gathered."""
        self.full |= self.roots_of(atoms)

    def position_of(self, atom: Atom) -> int:
        """Return the index of the equation that computes a value.

        Inputs and literals have no equation; for them, return the number of equations.
        """
        last = len(self.eqns)
        return self._position.get(atom, last) if isinstance(atom, Var) else last

    def largest_gathers(self) -> dict[str, int]:
        """Return the number of elements of the largest all-gather of each parameter.

        `choose_slices` compares these numbers to choose the dimension to slice.
        """
        sizes = [(self.rows[v].leaf, int(v.aval.size)) for v in self.full]
        for entered in self.entered.values():
            for body in entered.bodies:
                sizes += body.largest_gathers().items()
        found: dict[str, int] = {}
        for leaf, size in sizes:
            found[leaf] = max(found.get(leaf, 0), size)
        return found

    # -- layouts -----------------------------------------------------------------------------------

    def _add_slices(self, v: Var, row: RowAxis, roots: Iterable[Var]) -> None:
        """Record that a value can be computed as slices.

        Args:
          v: the value.
          row: its sliced dimension, and the parameter that it depends on.
          roots: the values to gather for the full value of `v`.
        """
        self.rows[v], self.roots[v] = row, frozenset(roots)
        self.layouts[v] = self._engine_layout(v, row)

    def _row(self, atom: Atom) -> RowAxis | None:
        """Return the sliced dimension of a value; None if it cannot be computed as slices."""
        return self.rows.get(atom) if isinstance(atom, Var) else None

    def _engine_layout(self, atom: Atom, row: RowAxis) -> RowAxis:
        """Convert a sliced dimension to the form that the rules of `dtrans.engine` take.

        Args:
          atom: the value.
          row: its sliced dimension, with the name of its parameter.
        """
        return self.shards.plain(dataclasses.replace(row, leaf=""), atom.aval.shape[row.axis])

    def _rank_type(self, v: Var, row: RowAxis) -> Any:
        """Return the shape and dtype of a rank's slice of a value."""
        return self.shards.part_type(v.aval, self._engine_layout(v, row))

    # -- equations ---------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Decide for each equation if it reads each of its operands as slices or in full."""
        scattered = self.scattering.operands(self.eqns)
        for i, eqn in enumerate(self.eqns):
            if i not in self.scattering.loops and not any(map(self._row, eqn.invars)):
                continue
            has_bodies = eqn.primitive.name in _WITH_SLICED_BODIES
            follow = self._enter if has_bodies else self._follow_equation
            on_slices = {*follow(i, eqn), *scattered.get(i, ())}
            self.reads[i] = [a for k, a in enumerate(eqn.invars) if k not in on_slices]
            self.read_full(self.reads[i])

        # If another equation gathers a leaf, a reduction of the full leaf needs no collective. But
        # the reduction may then read other leaves in full, so repeat until nothing changes.
        while needless := [i for i, way in self.ways.items() if self._reduces_full(i, way)]:
            for i in needless:
                del self.ways[i]
                self.reads[i] = list(self.eqns[i].invars)
                self.read_full(self.reads[i])

    def _reduces_full(self, i: int, way: Strategy) -> bool:
        """Return True if equation `i` reduces a parameter that other equations need in full.

        Ranks gather the parameter for these equations, so its reduction needs no collective.
        """
        return bool(way.reduce) and not self.full.isdisjoint(self.roots_of(self.eqns[i].invars))

    def _follow_equation(self, i: int, eqn: JaxprEqn) -> Collection[int]:
        """Record how an equation runs on slices, if it can.

        Returns:
          The indices of the operands that it reads as slices; empty if it reads all of them in
          full.
        """
        way = self._strategy(eqn)
        if way is None:
            return ()
        self.ways[i] = way
        (out,), (row,) = eqn.outvars, way.outs
        if isinstance(row, RowAxis):
            first = next(a for a in eqn.invars if isinstance(a, Var) and a in self.rows)
            # gather the result instead of the operands if the result is expensive to compute, or is
            # only a part of a leaf
            is_root = not is_cheap(eqn)
            if eqn.primitive.name == "slice":
                sizes = zip(out.aval.shape[: row.axis], first.aval.shape, strict=False)
                is_root |= any(size < before for size, before in sizes)
            row = dataclasses.replace(row, leaf=self.rows[first].leaf)
            self._add_slices(out, row, [out] if is_root else self.roots_of(eqn.invars))
        return range(len(eqn.invars))

    def _strategy(self, eqn: JaxprEqn) -> Strategy | None:
        """Return how an equation runs on slices of its operands; None if it needs full values."""
        if eqn.effects or len(eqn.outvars) != 1:
            return None
        leaves = set()
        for a in eqn.invars:
            row = self._row(a)
            if row is not None:
                leaves.add(row.leaf)
            elif isinstance(a, Var) and a in self.local:
                return None
        if len(leaves) > 1:
            return None
        ins = [rows_or_shared(self.layout(a)) for a in eqn.invars]
        way = strategy_of(eqn, ins, self.shards)
        if way is None or way.write:
            return None
        if any(x not in (SHARED, y) for x, y in zip(ins, way.operands, strict=True)):
            return None
        # a 16-bit reduction needs the full value: on slices, each rank would round its partial sum
        rounds = way.reduce and eqn.outvars[0].aval.dtype.itemsize == 2
        return None if rounds else way

    # -- bodies ------------------------------------------------------------------------------------

    def _enter(self, i: int, eqn: JaxprEqn) -> Collection[int]:
        """Analyze the bodies of a loop, a branch or `jax.checkpoint`.

        Returns:
          The indices of the operands that the bodies take as slices.
        """
        indices, wanted = body_indices(eqn), self.scattering.loops.get(i, {})
        passed = {} if self.how.once else self._passable(eqn, indices)
        local = local_inside(eqn, self.local) if passed or wanted else []
        # if the body would gather an operand in each iteration, gather it once before the loop
        while passed or wanted:
            inside = [self._analyze_body(i, indices, passed, wanted, *x) for x in enumerate(local)]
            remaining = {}
            for k, row in passed.items():
                if not any(_gathers(eqn, indices, k, body) for body in inside):
                    remaining[k] = row
            if remaining == passed:
                self.entered[i] = SlicedBodies(passed, wanted, inside)
                self._add_outputs(eqn, indices, inside, wanted)
                break
            passed = remaining
        return passed

    def _passable(self, eqn: JaxprEqn, indices: BodyIndices) -> dict[int, RowAxis]:
        """Return the operands of a loop or branch that its bodies may read as slices.

        The result maps the index of an operand to its sliced dimension in the bodies. If ranks may
        take different branches, the result is empty: an all-gather in one branch would hang.
        """
        found: dict[int, RowAxis] = {}
        picks = eqn.invars[0]
        if (
            eqn.primitive.name == COND
            and isinstance(picks, Var)
            and (picks in self.local or self._row(picks))
        ):
            return found  # ranks may take different branches, and then a gather would hang
        for k in indices.ins[0]:
            row, less = self._row(eqn.invars[k]), int(k in indices.slices)
            if row is not None and k not in indices.carried and row.axis >= less:
                found[k] = dataclasses.replace(row, axis=row.axis - less)
        return found

    def _add_outputs(
        self,
        eqn: JaxprEqn,
        indices: BodyIndices,
        inside: Sequence[SliceAnalysis],
        wanted: Mapping[int, RowAxis],
    ) -> None:
        """Record the outputs of a loop or branch that all its bodies can compute as slices."""
        fixed = {*wanted, *indices.carried.values()}
        for k, v in enumerate(eqn.outvars):
            row, *others = [body._row(body.inner.outvars[k]) for body in inside]
            if row is not None and k not in fixed and {row}.issuperset(others):
                outside = dataclasses.replace(row, axis=row.axis + (k in indices.stacks))
                self._add_slices(v, outside, [v])

    def _analyze_body(
        self,
        i: int,
        indices: BodyIndices,
        passed: Mapping[int, RowAxis],
        wanted: Mapping[int, RowAxis],
        number: int,
        local: Collection[Var],
    ) -> SliceAnalysis:
        """Analyze one body of a loop, a branch or `jax.checkpoint`.

        Args:
          i: the index of the equation.
          indices: maps operands and outputs of the equation to inputs and outputs of its bodies.
          passed: the operands that the body takes as slices: index -> sliced dimension in the body.
          wanted: the outputs that are slices of gradients: index -> sliced dimension in the body.
          number: the index of the body among the bodies of the equation.
          local: values of the body that differ from rank to rank.
        """
        old, role = bodies(self.eqns[i])[number], self.roles[i]
        inner = opened(old)
        eqns, roles = fuse_transposes(inner.eqns, [role] * len(inner.eqns), inner.outvars)
        like = closed_with(old, eqns=eqns)
        b = Builder(like)
        b.role = role
        rows: dict[Var, RowAxis] = {}
        slices: dict[Var, Atom] = {}
        summed: dict[Var, Atom] = {}
        for k, v in zip(indices.ins[number], inner.invars, strict=True):
            if k in passed:
                rows[v] = passed[k]
                slices[v] = b.input(self._rank_type(v, passed[k]))
            elif indices.carried.get(k) in wanted:
                summed[v] = b.input(self._rank_type(v, wanted[indices.carried[k]]))
            else:
                b.invars.append(v)
        targets = rows_of_outputs(inner.outvars, wanted)
        how = dataclasses.replace(self.how, prefetch=self.how.prefetch_in_loops)
        inputs = SliceInputs(rows, local, targets, slices, summed)
        body = type(self)(b, like, eqns, roles, inputs, how, inner.outvars)
        body.read_full(values_at(inner.outvars, indices.carried.values()))
        return body


def is_cheap(eqn: JaxprEqn) -> bool:
    """Return True if an equation is elementwise, or only rearranges elements.

    A rank gathers the operands of such an equation, and computes the result again for each reader.
    So the result is neither gathered nor stored.
    """
    return facts_of(eqn).elementwise or is_rearrangement(eqn)


def _gathers(eqn: JaxprEqn, indices: BodyIndices, k: int, body: SliceAnalysis) -> bool:
    """Return True if an operand should be gathered before a loop, not in each iteration.

    This holds if the body would gather the operand, and the operand is the same in each iteration.
    A branch that only returns the operand gathers nothing.

    Args:
      eqn: the loop, branch or `jax.checkpoint`.
      indices: maps operands of the equation to inputs of its body.
      k: the index of the operand.
      body: the analysis of the body.
    """
    v = body.inner.invars[indices.ins[0].index(k)]
    returns = eqn.primitive.name == COND and v in body.roots_of(body.inner.outvars)
    return k not in indices.slices and v in body.full and not returns
