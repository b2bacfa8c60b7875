"""Writer of equations on slices of parameters; `dtrans.zero.slice_analysis` selects them.

`dtrans.zero.scattered_values` decides where gradients are summed over ranks and scattered.
`dtrans.zero.all_gather` decides when parameters are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, linear_group
from dtrans.engine.counted_values import CountedValues
from dtrans.ir.array_fns import converted, times
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import is_zero_array
from dtrans.ir.program import DIST
from dtrans.ops import all_reduce_p
from dtrans.rows.layout import RowAxis
from dtrans.zero.rank_values import operands_among
from dtrans.zero.slice_analysis import GatherOptions, SliceAnalysis, SliceInputs


class _EqualValues(CountedValues):
    """Writer for values that are equal on all ranks: a rank cuts out its slice locally."""

    def _is_counted(self, var: Atom, axis: int) -> bool:
        return True


class SliceWriter(SliceAnalysis):
    """Writer of equations that run on slices of parameters, and of their reductions over ranks.

    Attributes:
      env: maps a value of the step to the variable that replaces it: this rank's slice of a
        gradient, or the result of a reduction.
      last_scattered: the latest scattered gradient, for which the next gather waits; None after
        this gather.
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
        super().__init__(b, like, eqns, roles, inputs, how, ends)
        self._counted = _EqualValues(self)
        self.env: dict[Var, Atom] = dict(inputs.summed)
        self.last_scattered: Atom | None = None

    # -- values ------------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        if isinstance(atom, Var) and row is None:
            return self.env.get(atom, atom)
        if isinstance(atom, Var) and atom in self.rows:
            return self.slice_of(atom)
        return super().read(atom, row)

    def slice_of(self, var: Var) -> Atom:
        """Return this rank's slice of a value; the first call writes its equation."""
        key = var, self.layouts[var]
        if key not in self._values:
            i = self._position[var]
            (self._values[key],) = self.carry_out(self.eqns[i], self.ways[i])
        return self._values[key]

    def is_available(self, var: Var, i: int) -> bool:
        """Return True if a rank can compute its slice of a value before equation `i`.

        If so, a prefetch may gather the value before equation `i`.
        """
        at = self._position.get(var, -1)
        if at < 0 or (var, self.layouts.get(var)) in self._values:
            return True
        if var not in self.rows or at not in self.ways:
            return var not in self.rows and at < i
        return all(self.is_available(a, i) for a in self.eqns[at].invars if isinstance(a, Var))

    # -- reductions and gradients ------------------------------------------------------------------

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Give the role `dist` (communication) to equations written in this `with` block."""
        role, self.b.role = self.b.role, DIST
        yield
        self.b.role = role

    def write_reduction(self, i: int) -> None:
        """Write a reduction: each rank reduces its slice, and an all-reduce follows."""
        eqn, way = self.eqns[i], self.ways[i]
        (part,) = self.carry_out(eqn, way)
        over = self.shards.over
        with self.communicating():
            (total,) = self.b.bind(
                all_reduce_p, part, op=way.reduce, name="slices", owners=(), over=over
            )
        self.env[eqn.outvars[0]] = total

    def scatter_sum(self, var: Var, row: RowAxis) -> Atom:
        """Sum a gradient over ranks by a reduce-scatter, and return this rank's slice of the sum.

        Args:
          var: the gradient, or a term of it.
          row: the dimension to scatter along, and the parameter.
        """
        grad, grad_dtype = self.env.get(var, var), jnp.dtype(var.aval.dtype)
        dtype = jnp.dtype(self.how.dtypes.get(row.leaf, grad_dtype))
        with self.communicating():
            if dtype != grad_dtype:
                (grad,) = self.b.call(converted(dtype), grad)
            scattered = self.collectives.reduce_scatter(grad, self._engine_layout(var, row))
            self.last_scattered = scattered
        if dtype != grad_dtype:
            (scattered,) = self.b.call(converted(grad_dtype), scattered)
        return scattered

    def wanted_slice(self, atom: Atom, row: RowAxis) -> Atom:
        """Return this rank's slice of the sum over ranks of one term of a gradient.

        A term that is equal on all ranks is multiplied by the number of ranks instead.

        Args:
          atom: the term.
          row: the dimension to scatter along, and the parameter.
        """
        if isinstance(atom, Var) and atom in self.scattering.rows:
            return self.env[atom]
        if isinstance(atom, Var) and atom in self.local:
            return self.scatter_sum(atom, row)
        # the term is equal on all ranks, so the sum over ranks contains it `degree` times
        piece = self.read(atom, self._engine_layout(atom, row))
        if is_zero_array(atom, self._producers):
            return piece
        return self.b.call(times(self.how.degree), piece)[0]

    def write_on_rows(self, i: int) -> None:
        """Write equation `i` of the backward pass so that it computes a slice of its output."""
        eqn, step = self.eqns[i], self.scattering.steps[i]
        summed = linear_group(eqn, operands_among(eqn, self.local))
        atoms: list[Atom] = []
        for k, (a, row) in enumerate(zip(eqn.invars, step.operands, strict=True)):
            if row is None:
                atoms.append(self.read(a, None))
            elif k in summed:
                atoms.append(self.wanted_slice(a, row))
            else:
                atoms.append(self.read(a, self._engine_layout(a, row)))
        (out,), (out_row,) = eqn.outvars, step.outs
        assert isinstance(out_row, RowAxis)
        types = [self._rank_type(out, out_row)]
        params = step.params(types) if step.params else {}
        (self.env[out],) = self.b.copy(eqn, atoms, types, **params)
