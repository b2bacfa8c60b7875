"""Slicing an optimize half: one jaxpr for each block of rows, and one for what no row enters.

`Slicer` cuts the optimize half along a `RowAnalysis`. A *unit* is what is updated together: a block of one
leaf's rows, or a group of leaves that cannot be sliced. Its jaxpr is the equations of its leaves on the
block's shapes. Shared values are not sliced after the fact but *where they are made*: the slice moves up through
broadcasts and elementwise equations until it reaches scalars, so that no array of the full shape is made
on a server that holds some of its rows. Only what cannot be moved (random bits, which must be those of the
whole leaf) is drawn whole and then sliced.

Shared values that depend on state (a count, a schedule) are made once per server, in the lr_sched block, and
enter the units as inputs; those that depend on nothing are made where they are used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from dtrans.cut import GRAD, spread
from dtrans.rewrite import Builder, needed
from dtrans.rows import ELEMENTWISE, SHARED, RowAnalysis, Rows


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows `start` to `stop` of a leaf."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, eq=False)
class UnitUpdate:
    """The update of one unit.

    Attributes:
      jaxpr: inputs are, in this order, gradients (each leaf's from every trainer in turn), parameters, state,
        shared values; outputs are parameters, state.
      grads: the leaves whose gradient it takes.
      params: the leaves it updates.
      state: the state it updates.
      shared: the values of the optimize half it needs from the lr_sched block.
    """

    jaxpr: ClosedJaxpr
    grads: tuple[str, ...]
    params: tuple[str, ...]
    state: tuple[str, ...]
    shared: tuple[Var, ...]


class Slicer:
    """Cuts one optimize half into units; see the module's docstring.

    Args:
      analysis: of the optimize half.
      params: the leaves that are updated, in leaf order.
      trainers: how many gradients each leaf gets. They are summed, and scaled by 1/trainers.
    """

    def __init__(self, analysis: RowAnalysis, params: Sequence[str], trainers: int) -> None:
        self.analysis = analysis
        self.trainers = trainers
        self.jaxpr = analysis.half.jaxpr
        self.eqns: Sequence[JaxprEqn] = self.jaxpr.jaxpr.eqns
        self.params = tuple(params)
        self.names = {v: n for n, v in analysis.inputs.items()}
        self.made_by = {v: e for e in self.eqns for v in e.outvars}
        # what depends on an input at all; the rest are constants, made where they are used
        self._dependent = spread(self.eqns, dict.fromkeys(self.jaxpr.jaxpr.invars, 1), {})

    @cached_property
    def state_of(self) -> dict[str, tuple[str, ...]]:
        """For each leaf, or the first leaf of each group, the state that lives with it."""
        found: dict[str, list[str]] = {}
        for name in self.state:
            owners = self.analysis.owners(self.analysis.layout(self.analysis.inputs[name]))
            if owners:
                found.setdefault(owners[0], []).append(name)
        return {k: tuple(v) for k, v in found.items()}

    @cached_property
    def state(self) -> tuple[str, ...]:
        """The optimizer's state, all of it."""
        made = set(self.analysis.outputs) - set(self.params)
        return tuple(n for n in self.analysis.half.in_names if n in made)

    @cached_property
    def shared_state(self) -> tuple[str, ...]:
        """The state that every server holds: no parameter's row enters it."""
        return tuple(n for n in self.state if self.analysis.layout(self.analysis.inputs[n]) is SHARED)

    @cached_property
    def constant_params(self) -> tuple[str, ...]:
        """Parameters that the update reads and never changes; every server holds them."""
        made = set(self.analysis.outputs)
        return tuple(n for n in self.analysis.half.in_names if n not in made and not n.endswith(GRAD))

    @cached_property
    def _eqns_of(self) -> dict[str, list[JaxprEqn]]:
        """For each leaf, or the first leaf of each group, its equations in order."""
        found: dict[str, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            layout = self.analysis.layout(eqn.outvars[0])
            if layout is not SHARED:
                found.setdefault(self.analysis.owners(layout)[0], []).append(eqn)
        return found

    def unit(self, leaves: Sequence[str], span: Span | None) -> UnitUpdate:
        """The update of a group of leaves (span None), or of a span of one leaf's rows."""
        return _UnitWriter(self, leaves, span).write()

    def lr_sched(self, wanted: Sequence[Var]) -> tuple[ClosedJaxpr, tuple[str, ...], tuple[str, ...]]:
        """What no row enters: new shared state, then the `wanted` values.

        Returns the jaxpr, the names of its inputs, and those of the state outputs.
        """
        outs = [self.analysis.outputs[n] for n in self.shared_state]
        kept, leaves = needed(self.eqns, [*outs, *wanted])
        builder = Builder(self.jaxpr)
        in_names = [n for n, v in self.analysis.inputs.items() if v in leaves or n in self.shared_state]
        builder.invars += [self.analysis.inputs[n] for n in in_names]
        for i in kept:
            builder.keep(self.eqns[i])
        return builder.build([*outs, *wanted]), tuple(in_names), self.shared_state

    def depends(self, var: Var) -> bool:
        """Whether a value depends on any input."""
        return bool(self._dependent.get(var))


def _mean(*grads: jax.Array) -> jax.Array:
    """The sum, scaled by 1/trainers: Paddle's `sum` and `scale`."""
    return functools.reduce(jax.lax.add, grads) * (1 / len(grads))


class _UnitWriter:
    """Writes the update of one unit."""

    def __init__(self, slicer: Slicer, leaves: Sequence[str], span: Span | None) -> None:
        self.s = slicer
        self.leaves = tuple(leaves)
        self.span = span
        self.b = Builder(slicer.jaxpr)
        self.env: dict[Var, Atom] = {}  # rows and mixed values
        self.wholes: dict[Var, Atom] = {}  # shared values that are used whole
        self.cut: dict[tuple[Var, int], Atom] = {}  # shared values, by the axis they were sliced along
        self.shared: dict[Var, Var] = {}
        self._types: dict[Any, Any] = {}

    def write(self) -> UnitUpdate:
        s, b = self.s, self.b
        inputs, outputs = s.analysis.inputs, s.analysis.outputs
        state = s.state_of.get(self.leaves[0], ())
        grads = tuple(n for n in self.leaves if n + GRAD in inputs)
        taken = {n: [b.input(self.sliced(inputs[n + GRAD])) for _ in range(s.trainers)] for n in grads}
        for n in (*self.leaves, *state):
            self.env[inputs[n]] = b.input(self.sliced(inputs[n]))
        for n in grads:
            self.env[inputs[n + GRAD]] = self.mean(taken[n])
        out_names = (*self.leaves, *state)
        outs = [outputs[n] for n in out_names]
        eqns = s._eqns_of.get(self.leaves[0], [])
        kept, _ = needed(eqns, outs)
        for i in kept:
            eqn = eqns[i]
            axis = self.axis_of(eqn.outvars[0])
            types = None if axis is None else [self.sliced(v, axis) for v in eqn.outvars]
            made = b.copy(eqn, [self.read(a, axis, eqn.outvars[0]) for a in eqn.invars], types)
            self.env.update(zip(eqn.outvars, made, strict=True))
        finals = [self.read(o, self.axis_of(inputs[n]), inputs[n]) for n, o in zip(out_names, outs, strict=True)]
        b.invars += list(self.shared.values())
        return UnitUpdate(b.build(finals), grads, self.leaves, state, tuple(self.shared))

    def mean(self, grads: Sequence[Var]) -> Atom:
        """What the optimizer is given: the mean over the trainers."""
        return grads[0] if len(grads) == 1 else self.b.call(_mean, *grads)[0]

    def axis_of(self, var: Var) -> int | None:
        """The axis along which this unit has only some rows of a value; None where it has it whole."""
        layout = self.s.analysis.layout(var)
        return layout.axis if self.span is not None and isinstance(layout, Rows) else None

    def sliced(self, var: Var, axis: int | None = None) -> Any:
        """The type of a value in this unit."""
        axis = self.axis_of(var) if axis is None else axis
        aval = var.aval
        if axis is None or self.span is None:
            return aval
        key = (aval.shape, aval.dtype, aval.weak_type, axis)
        if key not in self._types:
            self._types[key] = aval.update(shape=(*aval.shape[:axis], self.span.rows, *aval.shape[axis + 1 :]))
        return self._types[key]

    def read(self, atom: Atom, axis: int | None, output: Var) -> Atom:
        """An operand of an elementwise equation whose `output` has only some rows along `axis` in this unit."""
        if isinstance(atom, Literal) or atom in self.env:
            return self.env.get(atom, atom) if isinstance(atom, Var) else atom
        if axis is None or atom.aval.ndim == 0:
            return self.whole(atom)
        if atom.aval.shape[axis] == 1 != output.aval.shape[axis]:  # it is broadcast along the rows
            return self.whole(atom)
        return self.shared_rows(atom, axis)

    def whole(self, atom: Atom) -> Atom:
        """A shared value as it is: a constant of the program, made here, or given by the lr_sched block."""
        if isinstance(atom, Literal) or self.b.is_constant(atom):
            return atom
        if atom not in self.wholes:
            if self.s.depends(atom):
                self.shared[atom] = Var(atom.aval)
                self.wholes[atom] = self.shared[atom]
            else:
                eqn = self.s.made_by[atom]
                self.wholes.update(zip(eqn.outvars, self.b.copy(eqn, [self.whole(a) for a in eqn.invars]), strict=True))
        return self.wholes[atom]

    def shared_rows(self, atom: Var, axis: int) -> Atom:
        """This unit's rows of a shared value, made with as little as possible of the rest."""
        if (atom, axis) not in self.cut:
            self.cut[atom, axis] = self._shared_rows(atom, axis)
        return self.cut[atom, axis]

    def _shared_rows(self, atom: Var, axis: int) -> Atom:
        assert self.span is not None
        b, start, stop = self.b, self.span.start, self.span.stop
        if b.is_constant(atom):
            index = (slice(None),) * axis + (slice(start, stop),)
            return b.constant(np.asarray(b.constant_value(atom))[index])
        eqn = self.s.made_by.get(atom)
        if eqn is not None and eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
            return b.copy(eqn, [self.read(a, axis, atom) for a in eqn.invars])[0]
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1:
            (operand,) = eqn.invars
            dims = eqn.params["broadcast_dimensions"]
            grown = axis not in dims or operand.aval.shape[dims.index(axis)] == 1
            if grown or isinstance(operand, Literal):
                value = self.whole(operand)
            else:
                value = self.shared_rows(operand, dims.index(axis))
            return b.copy(eqn, [value], shape=self.sliced(atom, axis).shape)[0]
        full = self.whole(atom)
        begin, end = [0] * atom.aval.ndim, list(atom.aval.shape)
        begin[axis], end[axis] = start, stop
        return b.bind(jax.lax.slice_p, full, start_indices=tuple(begin), limit_indices=tuple(end), strides=None)[0]
