r"""Live ranges: the equations during which a rank keeps a gathered parameter in memory.

A parameter has one *live range* in the forward pass and one in the backward pass. A live range
begins at the first equation that reads the parameter, and ends at the last. If many other
parameters are gathered between two reads, the live range is divided in two. So an embedding that is
tied to the last layer is gathered twice in the forward pass.

A value is *derived* if it is cheap to compute and depends only on parameters: a cast, a transpose,
a bias broadcast over the batch. Each live range recomputes its derived values, so that they are not
stored for the backward pass. If all equations of a live range read the parameter in one smaller
type, the slice is cast before the gather.

    w ---- convert to bf16 ---- dot_general         uses: dot_general, of w as bf16
      \--- transpose ---------- dot_general               dot_general, of w as f32
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var


# A leaf stays gathered between two uses if at most this many other leaves are gathered between
# them. A larger number saves gathers and costs memory. The value is a guess; it was not measured.
MAX_GATHERS_BETWEEN = 8


@dataclasses.dataclass(eq=False)
class LiveRange:
    """Range of equations for which a parameter stays gathered in memory.

    Attributes:
      leaf: the variable of the parameter.
      role: the pass, "forward" or "backward".
      first, last: the indices of the first and the last equation that read the parameter.
      dtypes: the types in which equations read the parameter.
    """

    leaf: Var
    role: str
    first: int
    last: int
    dtypes: set[Any]

    @property
    def dtype(self) -> Any:
        """Type in which the parameter is gathered.

        This is the parameter's type, with one exception. If all readers cast the parameter to one
        smaller type, the gather sends this type.
        """
        leaf_dtype = self.leaf.aval.dtype
        if len(self.dtypes) != 1:
            return leaf_dtype
        (only,) = self.dtypes
        return only if jnp.dtype(only).itemsize < jnp.dtype(leaf_dtype).itemsize else leaf_dtype


class LiveRanges:
    """Live ranges of all parameters, computed from a list of equations.

    A live range is the range of equations for which a parameter stays gathered in memory.

    Args:
      eqns: the equations, in order.
      roots: maps each sliced value to the parameters, or layers of parameters, from which it is
        computed.
      reads: maps the index of an equation to the sliced values that it reads in full.
      roles: the role of each equation, such as "forward".
      ends: values that are read after the equations, as pairs (index of the equation that computes
        the value, value).
      once: True if each parameter has one live range, from the first equation that reads it to the
        last.

    Attributes:
      derived: the equation of each value that is computed only from parameters.
      windows: all live ranges, sorted by their first equation.
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
        # leaf -> (its latest live range, number of all live ranges when the leaf was last read)
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
        """Return the live range of a parameter (when it stays gathered) that contains a reader.

        Args:
          leaf: the variable of the parameter.
          at: the index of an equation that reads the parameter.
        """
        return self._at[leaf, at]

    def _types_of(self, v: Var) -> frozenset[tuple[Var, Any]]:
        """Return the parameters on which `v` depends, as pairs (parameter, type of its gather)."""
        if v not in self._types:
            self._types[v] = self._find_types(v)
        return self._types[v]

    def _find_types(self, v: Var) -> frozenset[tuple[Var, Any]]:
        eqn = self.derived.get(v)
        if eqn is None:
            return frozenset([(v, v.aval.dtype)])
        ins = [a for a in eqn.invars if isinstance(a, Var) and a in self.roots]
        if is_cast(eqn) and self.roots[ins[0]] == {ins[0]}:
            return frozenset([(ins[0], v.aval.dtype)])
        return frozenset().union(*map(self._types_of, ins))

    def _use(self, atom: Atom, i: int, role: str) -> None:
        """Record that an equation reads a value, so that its parameters must be gathered there.

        The live range of a parameter (the equations for which it stays gathered) is extended, or a
        new live range begins.

        Args:
          atom: the value, a parameter or computed from parameters only.
          i: the index of the equation.
          role: the pass of the equation, "forward" or "backward".
        """
        if isinstance(atom, Literal) or atom not in self.roots:
            return
        for leaf, dtype in self._types_of(atom):
            window, continues = None, False
            if leaf in self._open:
                window, count = self._open[leaf]
                is_near = len(self.windows) - count <= MAX_GATHERS_BETWEEN
                continues = self._once or (window.role == role and is_near)
            if window is not None and continues:
                window.last = i
                window.dtypes.add(dtype)
            else:
                window = LiveRange(leaf, role, i, i, {dtype})
                self.windows.append(window)
            self._open[leaf] = (window, len(self.windows))
            self._at[leaf, i] = window


def is_cast(eqn: JaxprEqn) -> bool:
    """Return True if an equation only changes the type of its operand."""
    return eqn.primitive.name == "convert_element_type"
