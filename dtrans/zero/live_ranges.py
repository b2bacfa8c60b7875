"""Where a step reads its sliced leaves, and for how long each needs to be whole.

A leaf is gathered for a *window*: the equations from its first use in one direction (forward, or backward) to its last,
unless much else is gathered in between: an embedding that is tied to the last layer is gathered for each of them.

Values that follow from leaves alone, cheaply (another type, a transpose, a bias broadcast over the batch), are
*derived*: they are made anew in each window, and so are never kept from the forward pass to the backward pass. A change
of type right behind the leaf is made before the gather, on the slice, if the leaf is needed in no other type in that
window and the type is smaller.

    w ---- convert to bf16 ---- dot_general         uses: dot_general, of w as bf16
      \\--- transpose ---------- dot_general               dot_general, of w as f32
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import ELEMENTWISE, Atom, JaxprEqn, Literal, Var


# what is cheap enough to be made twice, beside what is elementwise
CHEAP = ELEMENTWISE | {"broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "expand_dims"}
KEPT_WINDOWS = 8  # a leaf stays gathered between two uses while no more others than this are gathered


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
    """What equations read of leaves.

    Args:
      eqns: in order.
      roles: of each.
      leaves: the variables of the leaves that are sliced.
      is_constant: whether a variable is a constant of the program.
      ends: values that are wanted beside those that equations read: position of what makes it, and the value.
      taken_apart: for an equation, the operands that it takes apart by itself, turn by turn.
      once: whether a leaf has one window, from its first use to its last.

    Attributes:
      derived: the equations that make values of leaves alone, by what they make.
      windows: in the order in which they begin.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        leaves: Sequence[Var],
        is_constant: Callable[[Var], bool],
        ends: Sequence[tuple[int, Atom]] = (),
        taken_apart: Callable[[JaxprEqn], Sequence[int]] = lambda eqn: (),
        *,
        once: bool = False,
    ) -> None:
        self._once = once
        self.roots: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in leaves}
        self.derived: dict[Var, JaxprEqn] = {}
        self.windows: list[LiveRange] = []
        self._types: dict[Var, frozenset[tuple[Var, Any]]] = {v: frozenset([(v, v.aval.dtype)]) for v in leaves}
        self._at: dict[tuple[Var, int], LiveRange] = {}
        self._open: dict[Var, tuple[LiveRange, int]] = {}
        wanted: dict[int, list[Atom]] = {}
        for i, atom in ends:
            wanted.setdefault(i, []).append(atom)
        for i, eqn in enumerate(eqns):
            if self._is_derived(eqn, is_constant):
                self._derive(eqn)
                read: list[Atom] = []
            else:
                apart = taken_apart(eqn)
                read = [a for k, a in enumerate(eqn.invars) if k not in apart]
            for a in (*read, *wanted.get(i, ())):
                self._use(a, i, roles[i])
        for a in wanted.get(len(eqns), ()):
            self._use(a, len(eqns), roles[-1] if roles else "")

    def window(self, leaf: Var, at: int) -> LiveRange:
        """The window in which a leaf is read at a position."""
        return self._at[leaf, at]

    def _is_derived(self, eqn: JaxprEqn, is_constant: Callable[[Var], bool]) -> bool:
        if eqn.primitive.name not in CHEAP or len(eqn.outvars) != 1 or eqn.effects:
            return False
        known = [a in self.roots for a in eqn.invars if isinstance(a, Var) and not is_constant(a)]
        return bool(known) and all(known)

    def _derive(self, eqn: JaxprEqn) -> None:
        (out,) = eqn.outvars
        ins = [a for a in eqn.invars if isinstance(a, Var) and a in self.roots]
        self.derived[out] = eqn
        self.roots[out] = frozenset().union(*(self.roots[a] for a in ins))
        first = ins[0]
        if is_cast(eqn) and self.roots[first] == {first}:
            self._types[out] = frozenset([(first, out.aval.dtype)])
        else:
            self._types[out] = frozenset().union(*(self._types[a] for a in ins))

    def _use(self, atom: Atom, i: int, role: str) -> None:
        if isinstance(atom, Literal) or atom not in self.roots:
            return
        for leaf, dtype in self._types[atom]:
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
    """Whether an equation changes nothing but the type."""
    return eqn.primitive.name == "convert_element_type"


def chain_of(var: Var, derived: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """The equations that a derived value is made by, in order."""
    found: dict[Var, JaxprEqn] = {}

    def visit(v: Var) -> None:
        if v in derived and v not in found:
            for a in derived[v].invars:
                if isinstance(a, Var):
                    visit(a)
            found[v] = derived[v]

    visit(var)
    return list(found.values())
