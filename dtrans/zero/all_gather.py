"""Stage 3: parameters are slices, gathered where they are read.

    x = after w.slice, h        once what is computed before is there
    w = all_gather x
    y = dot_general h w         the first use of a window (`dtrans.zero.live_ranges`)

The gathered leaf is read in its window and nowhere else; the backward pass gathers again. Gradients were taken before
this rewrite, so nothing keeps a gathered leaf as a residual but the equations themselves; `after` keeps XLA from
making two gathers of one slice one, and from beginning all of them at once. With a prefetch of k, a leaf is gathered
while what is k windows before it is computed.

A loop over layers (`scan`) takes a stack of slices apart, gathers a layer in its body, and scatters the gradient of
that layer there too: neither the stack of gathered layers, nor that of whole gradients, is ever made. What the forward
loop would hand to the backward loop of the layers themselves (a weight in another type) is made anew from the slice.
With a prefetch, the first leaf of the next layer is gathered while one is computed (`dtrans.zero.prefetch`).

Source: stage 3 of ZeRO (arXiv 1910.02054); in Paddle, `_shard_parameter` of auto_parallel_sharding.py, which broadcasts
whole variables for each operator that reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var, bodies, opened, scan_counts, scan_with
from dtrans.ir.array_fns import converted
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.ops import after_p, all_gather_p
from dtrans.zero.choose_slices import stacks_of
from dtrans.zero.gathering import Gathering, Given, Residual, Scattered
from dtrans.zero.layer_scan import Loop, StackOfSlices
from dtrans.zero.live_ranges import LiveRange, LiveRanges, chain_of, is_cast
from dtrans.zero.prefetch import prefetched


class Gatherer:
    """Writes equations that read leaves, where there are slices of them.

    Args:
      b: that they are written with.
      eqns: in order.
      roles: of each.
      given: by the variable of the leaf.
      scattered: gradients that loops make layer by layer, and that are to be slices.
      ends: values that are wanted beside those that equations read, with the position of what makes each.
    """

    def __init__(
        self,
        b: Builder,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        given: Mapping[Var, Given],
        how: Gathering,
        scattered: Mapping[Var, Scattered],
        ends: Sequence[tuple[int, Atom]] = (),
    ) -> None:
        self.b = b
        self.eqns = eqns
        self.roles = roles
        self.given = given
        self.how = how
        self.scattered = scattered
        self.env: dict[Var, Atom] = {}  # what stands for values of the step that are made otherwise
        # what is wanted itself is made after all
        wanted = {a for _, a in ends if isinstance(a, Var)}
        self.residuals = {v: r for v, r in self._find_residuals().items() if v not in wanted}
        self.uses = LiveRanges(eqns, roles, list(given), b.is_constant, ends, self._taken_apart, once=how.once)
        self._position = {id(e): i for i, e in enumerate(eqns)}
        self._gathered: dict[int, Atom] = {}  # by the identity of windows
        self._made: dict[tuple[Any, ...], Atom] = {}
        self._next = 0  # the window that is gathered next
        self._begun = 0  # how many windows have begun
        self._anchors: list[Var | None] = []
        self._last: Var | None = None  # what was made last that may be waited for
        self.late: Var | None = None  # a scattered gradient, if one was made since

    def for_body(
        self,
        b: Builder,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        given: Mapping[Var, Given],
        how: Gathering,
        ends: Sequence[tuple[int, Atom]],
    ) -> Gatherer:
        """The same for the body of a loop."""
        return Gatherer(b, eqns, roles, given, how, {}, ends)

    # -- what the writer of a half calls -----------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write one equation; one that makes derived values is written where these are read."""
        i = self._position[id(eqn)]
        if eqn.outvars and eqn.outvars[0] in self.uses.derived:
            return
        self._gather_for(i, eqn)
        of_layers = self.stacks(eqn) or any(isinstance(a, Var) and a in self.residuals for a in eqn.invars)
        if of_layers or any(v in self.scattered for v in eqn.outvars):
            self._emit_loop(eqn, i)
        else:
            self.b.keep(eqn, [self.read(a, i) for a in eqn.invars])
        for v in eqn.outvars:
            if self._can_be_waited_for(v):
                self._last = v

    def read(self, atom: Atom, at: int) -> Atom:
        """A value, for the equation at a position; what is made of leaves is made of the gathered ones."""
        if isinstance(atom, Literal) or atom not in self.uses.roots:
            return self.env.get(atom, atom) if isinstance(atom, Var) else atom
        windows = tuple(id(self.uses.window(leaf, at)) for leaf in sorted(self.uses.roots[atom], key=id))
        key = (atom, *windows)
        if key not in self._made:
            self._made[key] = self._read(atom, at)
        return self._made[key]

    def given_already(self, whole: Atom) -> None:
        """Take what the first window needs as gathered."""
        self._gathered[id(self.uses.windows[0])] = whole
        self._next = 1

    def result(self, atom: Atom, maker: int) -> Atom:
        """A value that is wanted, once the equation at `maker` is written."""
        if isinstance(atom, Var) and atom in self.uses.roots:
            self._gather_for(maker, None)
        return self.read(atom, maker)

    # -- gathers -----------------------------------------------------------------------------------

    def _read(self, atom: Var, at: int) -> Atom:
        if atom in self.given:
            return self._gathered[id(self.uses.window(atom, at))]
        eqn = self.uses.derived[atom]
        operand = eqn.invars[0]
        if is_cast(eqn) and operand in self.given:
            window = self.uses.window(operand, at)  # type: ignore[arg-type]
            if window.dtype == atom.aval.dtype:
                return self._gathered[id(window)]
        atoms = [self.read(a, at) if isinstance(a, Var) and a in self.uses.roots else a for a in eqn.invars]
        return self.b.copy(eqn, atoms, [atom.aval])[0]

    def _gather_for(self, i: int, eqn: JaxprEqn | None) -> None:
        """Gather the leaves whose windows begin at a position, and those that are to be there ahead of time."""
        windows = self.uses.windows
        while self._begun < len(windows) and windows[self._begun].first <= i:
            self._anchors.append(self._anchor(eqn))
            self._begun += 1
        while self._next < min(len(windows), self._begun + (self.how.prefetch if self._begun else 0)):
            together = self._segment(self._next)
            before = self._next - self.how.prefetch
            anchor = self._anchors[max(0, before)] if self._anchors else self._last
            if self.how.prefetch == 0 and self.late is not None:
                anchor, self.late = self.late, None
            self._gather(together, anchor)
            self._next += len(together)

    def _anchor(self, eqn: JaxprEqn | None) -> Var | None:
        """What an equation reads beside leaves, and is there just before it."""
        for a in reversed(eqn.invars if eqn else ()):
            if isinstance(a, Var) and a not in self.uses.roots and self._can_be_waited_for(a):
                return a
        return self._last

    def _can_be_waited_for(self, v: Var) -> bool:
        """Whether a value of the step is there under its name, and is a number."""
        is_made = v not in self.env and v not in self.residuals and not self.b.is_constant(v)
        return is_made and bool(v.aval.size) and bool(jnp.issubdtype(v.aval.dtype, jnp.floating))

    def _segment(self, start: int) -> list[LiveRange]:
        """A window, and those behind it that are gathered with it."""
        windows, total = self.uses.windows, 0
        found: list[LiveRange] = []
        for w in windows[start:]:
            total += w.leaf.aval.size * jnp.dtype(w.dtype).itemsize
            if found and (total > self.how.segment or w.role != found[0].role):
                break
            found.append(w)
        return found

    def _gather(self, windows: Sequence[LiveRange], anchor: Var | None) -> None:
        b, role = self.b, self.b.role
        b.role = DIST
        kinds: dict[tuple[Any, int], list[LiveRange]] = {}
        for w in windows:
            kinds.setdefault((w.dtype, self.given[w.leaf].sliced.axis), []).append(w)
        for (dtype, axis), group in kinds.items():
            sent: list[Atom] = []
            for w in group:
                x = self.given[w.leaf].atom
                if dtype != w.leaf.aval.dtype:
                    x = self._cast(x, dtype)
                if anchor is not None:
                    (x,) = b.bind(after_p, x, anchor)
                sent.append(x)
            names = [self.given[w.leaf].leaf for w in group]
            made = b.bind(
                all_gather_p, *sent, name=names[0], over=(self.how.axis_name,), size=self.how.degree, axis=axis
            )
            for w, name, x in zip(group, names, made, strict=True):
                s = self.given[w.leaf].sliced
                b.labels[x] = f"{name}.gathered"
                self._gathered[id(w)] = x if s.padded == s.size else b.part(x, s.axis, 0, s.size)
        b.role = role

    def _cast(self, x: Atom, dtype: Any) -> Atom:
        """A slice in another type, made once."""
        key = (x, jnp.dtype(dtype))
        if key not in self._made:
            self._made[key] = self.b.call(converted(jnp.dtype(dtype)), x)[0]
        return self._made[key]

    # -- loops over layers -------------------------------------------------------------------------

    def _stack_of(self, atom: Atom) -> tuple[Var, Any] | None:
        """The stack that an operand is, or is in another type, and that type."""
        if isinstance(atom, Literal):
            return None
        if atom in self.given:
            return (atom, atom.aval.dtype) if self.given[atom].stacked else None
        for v, g in self.given.items():
            if g.stacked and self._casts.get(atom) is v:
                return v, atom.aval.dtype
        return None

    @functools.cached_property
    def _casts(self) -> dict[Var, Var]:
        """Leaves in another type, to the leaf."""
        found: dict[Var, Var] = {}
        for e in self.eqns:
            a = e.invars[0] if is_cast(e) else None
            if isinstance(a, Var) and a in self.given:
                found[e.outvars[0]] = a
        return found

    def stacks(self, eqn: JaxprEqn) -> dict[int, tuple[Var, Any]]:
        """The operands of a loop that are stacks of slices, by position."""
        found = {}
        for k in stacks_of(eqn):
            stack = self._stack_of(eqn.invars[k])
            if stack is not None:
                found[k] = stack
        return found

    def _taken_apart(self, eqn: JaxprEqn) -> Sequence[int]:
        return [*self.stacks(eqn)]

    def _find_residuals(self) -> dict[Var, Residual]:
        """What loops make of their layers alone, and only other loops read, layer by layer."""
        found: dict[Var, Residual] = {}
        for eqn in self.eqns:
            stacks = self.stacks(eqn)
            if not stacks:
                continue
            body = opened(*bodies(eqn))
            own = {body.invars[k]: stack for k, (stack, _) in stacks.items()}
            uses = LiveRanges(body.eqns, [""] * len(body.eqns), list(own), set(body.constvars).__contains__)
            for out, inner in list(zip(eqn.outvars, body.outvars, strict=True))[scan_counts(eqn)[1] :]:
                roots = uses.roots.get(inner) if isinstance(inner, Var) else None
                if roots is None or len(roots) != 1:
                    continue
                (start,) = roots
                chain = chain_of(inner, uses.derived)  # type: ignore[arg-type]
                if not any(a in body.constvars for e in chain for a in e.invars):
                    found[out] = Residual(own[start], start, tuple(chain), inner)  # type: ignore[arg-type]
        for eqn in self.eqns:
            for k, a in enumerate(eqn.invars):
                if isinstance(a, Var) and a in found and k not in stacks_of(eqn):
                    del found[a]
        return found

    def _emit_loop(self, eqn: JaxprEqn, i: int) -> None:
        """Write a loop over slices of layers."""
        loop = Loop(self, eqn)
        read = [a if isinstance(a, StackOfSlices) else self.read(a, i) for a in loop.operands]
        atoms = [self._slice(a) if isinstance(a, StackOfSlices) else a for a in read]
        if loop.ahead is not None:
            types = [a.aval for a in atoms]
            new = prefetched(eqn, loop.body, *loop.ahead, types, loop.outvars)
        else:
            new = scan_with(eqn, loop.body, atoms, loop.outvars)
        self.b.keep(new, atoms)
        self.env.update(loop.changed)
        if loop.changed:
            self.late = next(iter(loop.changed.values()))

    def _slice(self, s: StackOfSlices) -> Atom:
        atom = self.given[s.leaf].atom
        return atom if s.dtype == s.leaf.aval.dtype else self._cast(atom, s.dtype)
