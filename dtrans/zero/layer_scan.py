"""Loops over layers, on stacks of slices.

A loop (`scan`) that takes a stack of layers apart is given the stack of slices, and gathers each layer in its body;
what it makes of a layer's gradient is scattered there. A forward loop may hand the backward loop what it made of a
layer alone (a weight in another type): that is left out of the one, and made anew in the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Var, bodies, opened, scan_counts
from dtrans.ir.array_fns import converted, padded
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.ops import all_gather_p, reduce_scatter_p
from dtrans.zero.choose_slices import stacks_of
from dtrans.zero.gathering import Given, LeafGatherer, Residual, Scattered


@dataclasses.dataclass(frozen=True)
class StackOfSlices:
    """An operand of a loop: the stack of slices of a leaf."""

    leaf: Var
    dtype: Any


class Loop:
    """A loop over layers, rewritten for stacks of slices.

    Attributes:
      operands: of the new loop, which are operands of the old one or stacks of slices.
      body: of the new loop.
      outvars: what it makes: the variables of the old one, but for what is made otherwise.
      changed: gradients by the variable of the old loop, where what it makes now is slices.
      ahead: where the first layer that a turn reads is gathered in the turn before: how it is gathered, and which of
        the operands that are taken apart it is a slice of. The body is then given it, behind everything else.
    """

    def __init__(self, g: LeafGatherer, eqn: JaxprEqn) -> None:
        (old,) = bodies(eqn)
        inner, b = opened(old), Builder(old)
        b.role = g.b.role
        _, carried = scan_counts(eqn)
        stacks = g.stacks(eqn)
        given: dict[Var, Given] = {}
        prefix: list[JaxprEqn] = []
        slices: dict[tuple[Var, Any], Var] = {}  # stacks that are operands already, to the layer in the body
        self.operands: list[Atom | StackOfSlices] = []

        def layer(stack: Var, dtype: Any, whole: Var) -> Var:
            """The variable of a whole layer, of which the body is given a slice."""
            if (stack, dtype) not in slices:
                of = g.given[stack]
                self.operands.append(StackOfSlices(stack, dtype))
                given[whole] = of.for_layer(b.input(of.layer.of_rank(whole.aval)))
                slices[stack, dtype] = whole
            return slices[stack, dtype]

        later: list[tuple[Var, Residual]] = []
        alias: list[tuple[Var, Var]] = []
        for k, (a, v) in enumerate(zip(eqn.invars, inner.invars, strict=True)):
            if k in stacks:
                known = layer(*stacks[k], v)
                if known is not v:
                    alias.append((v, known))
            elif isinstance(a, Var) and a in g.residuals and k in stacks_of(eqn):
                later.append((v, g.residuals[a]))
            else:
                self.operands.append(a)
                b.invars.append(v)
        for v, residual in later:
            start = layer(residual.leaf, residual.start.aval.dtype, Var(residual.start.aval))
            if residual.chain:
                prefix += _renamed(residual, start, v)
            else:
                alias.append((v, start))
        eqns = [*prefix, *(e.replace(invars=[_aliased(a, alias) for a in e.invars]) for e in inner.eqns)]
        at = {v: i for i, e in enumerate(eqns) for v in e.outvars}
        cut: dict[int, Scattered] = {}  # outputs that are gradients of layers
        self.outvars: list[Var] = []
        self.changed: dict[Var, Var] = {}
        kept: list[int] = []
        for k, v in enumerate(eqn.outvars):
            if v in g.residuals:
                continue
            kept.append(k)
            if k >= carried and v in g.scattered:
                cut[k] = g.scattered[v]
                self.changed[v] = Var(cut[k].sliced.of_rank(v.aval))
                self.outvars.append(self.changed[v])
            else:
                self.outvars.append(v)
        roles = [b.role] * len(eqns)
        outs = [_aliased(inner.outvars[k], alias) for k in kept]
        places = [at.get(a, len(eqns)) if isinstance(a, Var) else len(eqns) for a in outs]
        how = dataclasses.replace(g.how, prefetch=g.how.prefetch_in_loops)
        body = g.for_body(b, eqns, roles, given, how, list(zip(places, outs, strict=True)))
        self.ahead = self._first_ahead(body, slices, eqn) if how.prefetch and not how.once else None
        made: dict[int, Atom] = {}
        waiting = [(place, k, a) for place, k, a in zip(places, kept, outs, strict=True) if k in cut]
        for i, e in enumerate(eqns):
            body.emit(e)
            for place, k, a in waiting:
                if place == i:
                    made[k] = self._scattered(body, body.result(a, place), cut[k], g)
        for place, k, a in zip(places, kept, outs, strict=True):
            if k not in made:
                found = body.result(a, place)
                made[k] = self._scattered(body, found, cut[k], g) if k in cut else found
        self.body = b.build([made[k] for k in kept])

    def _first_ahead(
        self, body: LeafGatherer, slices: Mapping[tuple[Var, Any], Var], eqn: JaxprEqn
    ) -> tuple[Callable[[Any], Any], int] | None:
        """Let the body be given what its first window gathers."""
        if not body.uses.windows:
            return None
        window = body.uses.windows[0]
        of = body.given[window.leaf]
        parts = self.operands[sum(scan_counts(eqn)) :]
        is_its = lambda a: isinstance(a, StackOfSlices) and slices.get((a.leaf, a.dtype)) is window.leaf
        stack = next(k for k, a in enumerate(parts) if is_its(a))
        whole = body.b.input(window.leaf.aval.update(dtype=jnp.dtype(window.dtype)))
        body.given_already(whole)
        how, s = body.how, of.sliced

        def gather(x: Any) -> Any:
            (made,) = all_gather_p.bind(
                x.astype(window.dtype), name=of.leaf, over=(how.axis_name,), size=how.degree, axis=s.axis
            )
            return jax.lax.slice_in_dim(made, 0, s.size, axis=s.axis)

        return gather, stack

    def _scattered(self, body: LeafGatherer, grad: Atom, how: Scattered, g: LeafGatherer) -> Atom:
        """A rank's slice of the sum of a layer's gradients."""
        b, sliced, own = body.b, how.sliced, grad.aval.dtype
        axis = sliced.axis - 1
        role, b.role = b.role, DIST
        if own != how.dtype:
            (grad,) = b.call(converted(jnp.dtype(how.dtype)), grad)
        (whole,) = b.call(padded(axis, sliced.padded), grad)
        (made,) = b.bind(reduce_scatter_p, whole, name="layers", over=(g.how.axis_name,), size=sliced.degree, axis=axis)
        b.role = role
        body.late = made
        return made if own == how.dtype else b.call(converted(jnp.dtype(own)), made)[0]


def _aliased(atom: Atom, alias: Sequence[tuple[Var, Var]]) -> Atom:
    return next((new for old, new in alias if old is atom), atom)


def _renamed(residual: Residual, start: Var, out: Var) -> list[JaxprEqn]:
    """The chain of a residual in another body, from `start` to `out`."""
    names: dict[Var, Var] = {residual.start: start, residual.out: out}
    made = []
    for e in residual.chain:
        ins = [names.get(a, a) if isinstance(a, Var) else a for a in e.invars]
        outs = [names.setdefault(v, Var(v.aval)) for v in e.outvars]
        made.append(e.replace(invars=ins, outvars=outs))
    return made
