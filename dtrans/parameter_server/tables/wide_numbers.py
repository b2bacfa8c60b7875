"""Numbers of rows before JAX cuts them to 32 bits.

`emb[ids]` is a gather of 32-bit numbers, whatever `ids` are: of 64 bits JAX takes the low half,
without a word, and so another row. What is checked is made once more from the numbers as they were
given: through the equations that JAX writes for an index, which count negative numbers from the end
  and put numbers side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.ir.builder import Builder


# what JAX writes between a number and the gather
_OF_INDEXES = frozenset(
    {"add", "lt", "select_n", "broadcast_in_dim", "reshape", "squeeze", "concatenate"}
)


class WideNumbers:
    """Writes numbers of rows as they were before they were cut.

    Args:
      b: what it is written with.
      made_by: value to the equation that makes it.
      whole: gives a value as it is written already.
    """

    def __init__(
        self, b: Builder, made_by: Mapping[Var, JaxprEqn], whole: Callable[[Atom], Atom]
    ) -> None:
        self._b, self._made_by, self._whole = b, made_by, whole
        self._found: dict[Var, Atom | None] = {}

    def component(self, atom: Atom, component: int) -> tuple[Atom, int]:
        """Return the operand of a concatenation that has a component, and its index there."""
        eqn = None if isinstance(atom, Literal) else self._made_by.get(atom)
        if (
            eqn is not None
            and eqn.primitive.name == "concatenate"
            and eqn.params["dimension"] == atom.aval.ndim - 1
        ):
            for a in eqn.invars:
                if component < a.aval.shape[-1]:
                    return a, component
                component -= a.aval.shape[-1]
        return atom, component

    def of(self, atom: Atom) -> Atom:
        """Return row numbers from before their narrowing cast; unchanged without one."""
        wide = self._wide(atom)
        return self._whole(atom) if wide is None else wide

    def _wide(self, atom: Atom) -> Atom | None:
        """Return a value before its narrowing cast, or None if it was not narrowed."""
        if isinstance(atom, Literal):
            return None
        if atom not in self._found:
            eqn = self._made_by.get(atom)
            self._found[atom] = None if eqn is None else self._made(eqn)
        return self._found[atom]

    def _made(self, eqn: JaxprEqn) -> Atom | None:
        if eqn.primitive.name == "convert_element_type":
            return (
                self.of(eqn.invars[0])
                if _cuts(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
                else None
            )
        if eqn.primitive.name not in _OF_INDEXES:
            return None
        found = [self._wide(a) for a in eqn.invars]
        types = {x.aval.dtype for x in found if x is not None and _is_int(x.aval.dtype)}
        if len(types) != 1:
            return None
        cast = _cast_to(types.pop())
        atoms = [
            x
            if x is not None
            else self._b.call(cast, self._whole(a))[0]
            if _is_int(a.aval.dtype)
            else self._whole(a)
            for x, a in zip(found, eqn.invars, strict=True)
        ]
        (made,) = self._b.copy(eqn, atoms)
        return made


def _is_int(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer))


def _cuts(given: Any, made: Any) -> bool:
    """Return True if an integer type cannot hold all numbers of another."""
    if not (_is_int(given) and _is_int(made)):
        return False
    old, new = np.iinfo(given), np.iinfo(made)
    return bool(old.min < new.min or old.max > new.max)


@functools.cache
def _cast_to(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype)
