"""Rewrite that splits branches and loops, so that each needs the parameters of one server only.

An optimizer may have a `cond` that updates all parameters at once (`optax.MultiSteps`,
`optax.apply_if_finite`), but no server has all parameters. So the `cond` is split:

    cond[p] (w, b, count) -> (w', b', count')     becomes     cond[p] w -> w'
                                                              cond[p] b -> b'
                                                              cond[p] count -> count'

Each part keeps only the equations on which its outputs depend. If a branch communicates between
servers (for a norm, say), all servers must take part, whatever the condition. Such a `cond` is
replaced by the equations of all branches and a `select_n`; optimizers are pure, so the numbers are
equal.

A loop may carry rows, and also a shared value that other equations read. Then the loop is split in
two: the first loop computes the shared value on every server, and the second computes the rows.
`argmax` over rows becomes two reductions. Sums of 16-bit numbers over rows use 32 bits, so that the
result is rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    COND,
    LOOPS,
    REMAT,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    closed_with,
    constants,
    map_bodies,
    opened,
    with_bodies,
)
from dtrans.ir.array_fns import converted
from dtrans.ir.builder import Builder, extract_part, read_from
from dtrans.ir.dataflow import avals, producer_positions, variables_read
from dtrans.ir.inline import inline_calls
from dtrans.ir.selection import number_items, values_at
from dtrans.rows.layout import SHARED, Layout, RowAxis, leaves_of


if TYPE_CHECKING:
    from dtrans.rows.flow import Flow


def inline_bodies(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Inline all function calls in the bodies of loops, branches and `jax.checkpoint`."""
    inner = opened(jaxpr)
    eqns = [inline_inside(e) for e in inner.eqns]
    if all(a is b for a, b in zip(eqns, inner.eqns, strict=True)):
        return jaxpr
    return closed_with(jaxpr, eqns=eqns)


def inline_inside(eqn: JaxprEqn) -> JaxprEqn:
    """Inline all function calls in the bodies of a loop, branch or `jax.checkpoint`."""
    flat: Callable[[Any], Any] = lambda body: inline_bodies(inline_calls(body))
    if eqn.primitive.name in REMAT:
        (body,) = bodies(eqn)
        new = flat(body)
        # the body of a remat equation is an open jaxpr, which cannot have constants
        if constants(new):
            return eqn
        return eqn.replace(params={**eqn.params, **with_bodies(eqn, [opened(new)])})
    if eqn.primitive.name not in (COND, *LOOPS):
        return eqn
    return eqn.replace(params=map_bodies(eqn.params, flat))


def normalise(jaxpr: ClosedJaxpr, flow: Flow, roots: Mapping[str, str]) -> ClosedJaxpr | None:
    """Split each `cond` or loop that updates parameters of several servers: one for each server.

    For example, `cond[p] (w, b) -> (w', b')` becomes `cond[p] w -> w'` and `cond[p] b -> b'`.
    Return None if nothing changes.

    Args:
      jaxpr: the optimizer's update.
      flow: layouts of the values of the update.
      roots: for parameters that must be on one server, maps each to the first of them.
    """
    rewriter = _Rewriter(jaxpr, roots)
    result = rewriter.rewrite(flow)
    if not rewriter.changed:
        return None
    return result


class _Rewriter:
    """Rewriter of an optimizer's update, or of the body of a loop or branch: see `normalise`."""

    def __init__(self, jaxpr: ClosedJaxpr, roots: Mapping[str, str]) -> None:
        self.jaxpr = jaxpr
        self.roots = roots
        self.changed = False

    def rewrite(self, flow: Flow) -> ClosedJaxpr:
        inner = opened(self.jaxpr)
        self.b = Builder(self.jaxpr)
        self.b.invars += inner.invars
        self.env: dict[Var, Atom] = {}
        self.read_by_others = set(variables_read(inner.eqns, inner.outvars))
        for i, eqn in enumerate(inner.eqns):
            atoms = read_from(self.env, eqn.invars)
            step = flow.steps.get(i)
            outputs: Sequence[Atom] | None = None
            if step is not None and eqn.primitive.name == COND:
                outputs = self.cond(eqn, atoms, step.outs, step.bodies)
            elif step is not None and eqn.primitive.name in ("argmax", "argmin"):
                outputs = self.arg_reduce(eqn, atoms, flow.layout(eqn.invars[0]))
            elif step is not None and eqn.primitive.name in LOOPS:
                outputs = self.loop(eqn, atoms, step.outs)
            elif step is not None and step.reduce in ("sum", "prod"):
                outputs = self.widened(eqn, atoms)
            if outputs is None:
                self.b.keep(eqn, atoms)
            else:
                self.changed = True
                self.env.update(zip(eqn.outvars, outputs, strict=True))
        return self.b.build(read_from(self.env, inner.outvars))

    # -- branches --------------------------------------------------------------------------------

    def cond(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], outs: Sequence[Layout], flows: Sequence[Flow]
    ) -> Sequence[Atom] | None:
        if any(flow.crosses for flow in flows):
            return self.both_sides(eqn, atoms)
        branches, old = [], bodies(eqn)
        for branch, flow in zip(old, flows, strict=True):
            inside = _Rewriter(branch, self.roots)
            result = inside.rewrite(flow) if flow.steps else branch
            branches.append(result if inside.changed else branch)
        places: dict[str | None, list[int]] = {}
        for i, layout in enumerate(outs):
            places.setdefault(self.place(layout), []).append(i)
        if len(places) == 1 and all(a is b for a, b in zip(branches, old, strict=True)):
            return None
        if len(places) == 1:
            return self.b.copy(eqn, atoms, avals(eqn.outvars), **with_bodies(eqn, branches))
        outputs: list[Atom] = list(eqn.outvars)
        readers = [_Branch(b) for b in branches]
        for wanted in places.values():
            for i, out in zip(wanted, self.part(eqn, atoms, readers, wanted), strict=True):
                outputs[i] = out
        return outputs

    def place(self, layout: Layout) -> str | None:
        """Return the parameter that represents the server of values with this layout.

        If two outputs of a `cond` have the same result, they stay together in one `cond`. The
        parameters of a group are on one server, and the first of them represents it. Return None
        for a value that all servers compute.
        """
        if layout is SHARED:
            return None
        leaf = min(leaves_of([layout]))
        return self.roots.get(leaf, leaf)

    def part(
        self,
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        branches: Sequence[_Branch],
        wanted: Sequence[int],
    ) -> list[Var]:
        """Write a `cond` that computes only some outputs, and takes only the operands for them.

        Args:
          eqn: the original `cond`.
          atoms: its operands.
          branches: its branches.
          wanted: indices of the outputs to compute.
        """
        closures = [b.needed(wanted) for b in branches]
        operands = sorted(set().union(*(read for _, read in closures)))
        pruned = []
        for branch, (eqns, _) in zip(branches, closures, strict=True):
            pruned.append(branch.pruned(eqns, operands, wanted))
        which, *all_operands = atoms
        types = avals(values_at(eqn.outvars, wanted))
        ins = [which, *values_at(all_operands, operands)]
        return self.b.copy(eqn, ins, types, **with_bodies(eqn, pruned))

    def both_sides(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> list[Atom]:
        """Write the equations of all branches, and select the outputs of one branch at the end.

        This replaces a `cond` with branches that communicate: every server must take part in them.
        """
        which, *operands = atoms
        sides = [self.b.inline(branch, *operands) for branch in bodies(eqn)]
        if len(sides) == 1:
            return sides[0]
        return [
            self.b.call(jax.lax.select_n, which, *cases)[0] for cases in zip(*sides, strict=True)
        ]

    # -- loops -----------------------------------------------------------------------------------

    def loop(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], outs: Sequence[Layout]
    ) -> Sequence[Atom] | None:
        """Split a loop in two: one computes outputs that all servers share, one outputs with rows.

        Both are copies of the loop; dead code is removed later. Return None if no split is needed.
        """
        shared = [x is SHARED for x in outs]
        reads_shared = False
        for is_shared, v in zip(shared, eqn.outvars, strict=True):
            reads_shared |= is_shared and v in self.read_by_others
        if all(shared) or not reads_shared:
            return None
        types = avals(eqn.outvars)
        ours, theirs = self.b.copy(eqn, atoms, types), self.b.copy(eqn, atoms, types)
        return [a if s else b for s, a, b in zip(shared, ours, theirs, strict=True)]

    # -- sums of small types ---------------------------------------------------------------------

    def widened(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> Sequence[Atom] | None:
        """Write a reduction of 16-bit numbers over rows in 32 bits; round the result once."""
        dtype = eqn.outvars[0].aval.dtype
        if dtype not in (jnp.bfloat16, jnp.float16):
            return None
        if eqn.primitive.name == "dot_general":
            wide = self.b.copy(eqn, atoms, preferred_element_type=np.dtype(np.float32))
        else:
            ins: list[Atom] = []
            for atom in atoms:
                ins += self.b.call(converted(jnp.float32), atom)
            wide = self.b.copy(eqn, ins)
        return self.b.call(converted(dtype), *wide)

    # -- argmax ----------------------------------------------------------------------------------

    def arg_reduce(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], layout: Layout
    ) -> Sequence[Atom] | None:
        if not isinstance(layout, RowAxis) or layout.axis not in eqn.params["axes"]:
            return None
        (axis,) = eqn.params["axes"]
        return self.b.call(_arg_reduce(eqn.primitive.name, axis, eqn.params["index_dtype"]), *atoms)


@functools.cache
def _arg_reduce(name: str, axis: int, index_dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a function that computes argmax or argmin by two reductions.

    The result is the index of the first NaN; without NaN, the index of the first extreme value.
    """
    best = jnp.max if name == "argmax" else jnp.min

    def fn(x: jax.Array) -> jax.Array:
        hit = (x == best(x, axis, keepdims=True)) | (x != x)
        index = jax.lax.broadcasted_iota(index_dtype, x.shape, axis)
        return jnp.min(jnp.where(hit, index, jnp.asarray(x.shape[axis] - 1, index_dtype)), axis)

    return fn


class _Branch:
    """Branch of a `cond`; can return a smaller branch that computes only some of its outputs."""

    def __init__(self, branch: ClosedJaxpr) -> None:
        self.branch = branch
        self.inner = opened(branch)
        self.producers = producer_positions(self.inner.eqns)
        self.operand = number_items(self.inner.invars)

    def needed(self, wanted: Sequence[int]) -> tuple[list[int], set[int]]:
        """Return the indices of the equations and inputs that the `wanted` outputs depend on.

        The time is linear in the size of the result.
        """
        eqns: set[int] = set()
        operands: set[int] = set()
        pending: list[Atom] = values_at(self.inner.outvars, wanted)
        while pending:
            atom = pending.pop()
            if isinstance(atom, Literal):
                continue
            if atom in self.operand:
                operands.add(self.operand[atom])
            i = self.producers.get(atom)
            if i is not None and i not in eqns:
                eqns.add(i)
                pending += self.inner.eqns[i].invars
        return sorted(eqns), operands

    def pruned(
        self, eqns: Sequence[int], operands: Sequence[int], wanted: Sequence[int]
    ) -> ClosedJaxpr:
        """Return the branch with only these equations, inputs and outputs (indices)."""
        invars = values_at(self.inner.invars, operands)
        outvars = values_at(self.inner.outvars, wanted)
        return extract_part(self.branch, invars, values_at(self.inner.eqns, eqns), outvars)
