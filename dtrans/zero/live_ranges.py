r"""Uses of sliced leaves in a step, and the windows in which each must be whole.

A leaf is gathered for a *window*: the equations from its first use in one direction (forward, or
backward) to its last. A window ends early if many other leaves are gathered before the next use. An
embedding tied to the last layer is gathered for each of its two uses.

Values that follow from leaves alone, cheaply (another type, a transpose, a bias broadcast over the
batch), are *derived*. Each window recomputes them, so none is stored from the forward pass to the
backward pass. A cast right after the leaf runs before the gather, on the slice. The window must
then need the leaf in no other type, and the type must be smaller.

    w ---- convert to bf16 ---- dot_general         uses: dot_general, of w as bf16
      \--- transpose ---------- dot_general               dot_general, of w as f32
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var


KEPT_WINDOWS = (
    8  # a leaf stays gathered between two uses while no more others than this are gathered
)


@dataclasses.dataclass(eq=False)
class LiveRange:
    """A run of equations for which a leaf is gathered.

    Attributes:
      leaf: the leaf's variable.
      role: the direction.
      first, last: positions of equations.
      dtypes: the types in which it is needed.
    """

    leaf: Var
    role: str
    first: int
    last: int
    dtypes: set[Any]

    @property
    def dtype(self) -> Any:
        """The type in which it is gathered: the one that is needed, if that is one and smaller."""
        own = self.leaf.aval.dtype
        if len(self.dtypes) != 1:
            return own
        (only,) = self.dtypes
        return only if jnp.dtype(only).itemsize < jnp.dtype(own).itemsize else own


class LiveRanges:
    """Uses of leaves, and of their parts, by equations.

    Args:
      eqns: equations.
      roots: value with slices to the leaves and parts that it depends on.
      reads: position of an equation to the values with slices that it reads whole.
      roles: the role of each equation.
      ends: further values that are read: the position of the equation that computes it, and the
        value.
      once: whether a leaf has one window, from its first use to its last.

    Attributes:
      derived: derived value to the equation that computes it.
      windows: the windows by their start.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        roots: Mapping[Var, frozenset[Var]],
        reads: Mapping[int, Sequence[Atom]],
        roles: Sequence[str],
        ends: Sequence[tuple[int, Atom]] = (),
        *,
        once: bool = False,
    ) -> None:
        self._once = once
        self.roots = roots
        self.derived: dict[Var, JaxprEqn] = {}
        self.windows: list[LiveRange] = []
        self._types: dict[Var, frozenset[tuple[Var, Any]]] = {}
        self._at: dict[tuple[Var, int], LiveRange] = {}
        self._open: dict[Var, tuple[LiveRange, int]] = {}
        wanted: dict[int, list[Atom]] = {}
        for i, atom in ends:
            wanted.setdefault(i, []).append(atom)
        for i, eqn in enumerate(eqns):
            for out in eqn.outvars[:1]:
                if self.roots.get(out, {out}) != {out}:
                    self.derived[out] = eqn
            for a in (*reads.get(i, ()), *wanted.get(i, ())):
                self._use(a, i, roles[i])
        for a in wanted.get(len(eqns), ()):
            self._use(a, len(eqns), roles[-1] if roles else "")

    def window(self, leaf: Var, at: int) -> LiveRange:
        """Return the window that contains a position at which a leaf is read."""
        return self._at[leaf, at]

    def _types_of(self, v: Var) -> frozenset[tuple[Var, Any]]:
        """Return the leaves that a value depends on, each with the type in which it is needed."""
        if v not in self._types:
            eqn = self.derived.get(v)
            if eqn is None:
                self._types[v] = frozenset([(v, v.aval.dtype)])
            else:
                ins = [a for a in eqn.invars if isinstance(a, Var) and a in self.roots]
                if is_cast(eqn) and self.roots[ins[0]] == {ins[0]}:
                    self._types[v] = frozenset([(ins[0], v.aval.dtype)])
                else:
                    self._types[v] = frozenset().union(*map(self._types_of, ins))
        return self._types[v]

    def _use(self, atom: Atom, i: int, role: str) -> None:
        if isinstance(atom, Literal) or atom not in self.roots:
            return
        for leaf, dtype in self._types_of(atom):
            known = self._open.get(leaf)
            near = known and known[0].role == role and len(self.windows) - known[1] <= KEPT_WINDOWS
            if known and (near or self._once):
                window = known[0]
                window.last = i
                window.dtypes.add(dtype)
            else:
                window = LiveRange(leaf, role, i, i, {dtype})
                self.windows.append(window)
            self._open[leaf] = (window, len(self.windows))
            self._at[leaf, i] = window


def is_cast(eqn: JaxprEqn) -> bool:
    """Return True if an equation changes only the type."""
    return eqn.primitive.name == "convert_element_type"
