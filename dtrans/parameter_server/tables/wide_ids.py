"""Row ids before JAX truncates them to 32 bits.

JAX truncates 64-bit ids to 32 bits without a warning, so an id out of range can select a wrong row.
A trainer must raise an error instead. So this module writes equations that compute the ids of
`emb[ids]` again from the 64-bit values. JAX adds equations between these values and the lookup:
they resolve negative ids, and concatenate the indices of several dimensions. This module copies
these equations without the truncation.
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


# Primitives of the equations that JAX adds between an id and the gather.
_OF_INDEXES = frozenset(
    {"add", "lt", "select_n", "broadcast_in_dim", "reshape", "squeeze", "concatenate"}
)


class WideIds:
    """Writer of equations that compute row ids without a cast to fewer bits.

    Args:
      b: builder of the trainer's program.
      producers: for each variable of the step, the equation that computes it.
      read_full: function from a variable of the user's step to the equal value in the trainer's
        program.
    """

    def __init__(
        self, b: Builder, producers: Mapping[Var, JaxprEqn], read_full: Callable[[Atom], Atom]
    ) -> None:
        self._b, self._producers, self._read_full = b, producers, read_full
        self._found: dict[Var, Atom | None] = {}

    def component(self, atom: Atom, component: int) -> tuple[Atom, int]:
        """Return the array with the row ids of index vectors, and the column of the row ids in it.

        JAX concatenates the indices of several dimensions into index vectors. For a concatenation,
        the result is the operand that contains the column.

        Args:
          atom: the array of index vectors, along its last dimension.
          component: the column with the row ids.
        """
        eqn = self._producers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or eqn.primitive.name != "concatenate":
            return atom, component
        if eqn.params["dimension"] == atom.aval.ndim - 1:
            for a in eqn.invars:
                if component < a.aval.shape[-1]:
                    return a, component
                component -= a.aval.shape[-1]
        return atom, component

    def of(self, atom: Atom) -> Atom:
        """Return row ids with their original number of bits, as a value of the program."""
        wide = self._wide(atom)
        if wide is None:
            return self._read_full(atom)
        return wide

    def _wide(self, atom: Atom) -> Atom | None:
        """Return the value of an integer before casts to fewer bits.

        Return None if no cast to fewer bits precedes the value.
        """
        if isinstance(atom, Literal):
            return None
        if atom not in self._found:
            self._found[atom] = None
            if atom in self._producers:
                self._found[atom] = self._wide_result(self._producers[atom])
        return self._found[atom]

    def _wide_result(self, eqn: JaxprEqn) -> Atom | None:
        """Write a copy of an equation with operands that were not narrowed; return its output.

        Return None if no operand was narrowed, or if the operands have different integer types.
        """
        if eqn.primitive.name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            if _narrows(old, new):
                return self.of(eqn.invars[0])
            return None
        if eqn.primitive.name not in _OF_INDEXES:
            return None
        wide = [self._wide(a) for a in eqn.invars]
        types = {x.aval.dtype for x in wide if x is not None and _is_int(x.aval.dtype)}
        if len(types) != 1:
            return None
        cast = _cast_to(types.pop())
        atoms: list[Atom] = []
        for x, a in zip(wide, eqn.invars, strict=True):
            if x is not None:
                atoms.append(x)
            elif _is_int(a.aval.dtype):
                atoms += self._b.call(cast, self._read_full(a))
            else:
                atoms.append(self._read_full(a))
        (result,) = self._b.copy(eqn, atoms)
        return result


def _is_int(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer))


def _narrows(old: Any, new: Any) -> bool:
    """Return True if both types are integers and `new` cannot represent all values of `old`."""
    if not (_is_int(old) and _is_int(new)):
        return False
    old_range, new_range = np.iinfo(old), np.iinfo(new)
    return bool(old_range.min < new_range.min or old_range.max > new_range.max)


@functools.cache
def _cast_to(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype)
