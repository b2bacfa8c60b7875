"""Communication equations of a program that one process executes alone, without messages.

    split_byref    slices a gradient into views of its memory, without a copy
    split_ids      checks ids of table rows, and returns them unique and sorted
    concat         joins received blocks to one array, without a copy if possible
    fake_init      returns an array with 0 rows in place of an embedding table

`LOCAL_RULES` has a function for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, Primitive
from dtrans.ops import concat_p, fake_init_p, split_byref_p, split_ids_p
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.protocol.trainer.traffic import rows_of


# Function that executes an equation: it gets the equation and its inputs, and returns the outputs.
EquationRule = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


def _split_gradient(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    (x,) = values
    return rows_of(np.asarray(x), eqn.params["sections"])


def _split_ids(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    return [unique_ids(values, **eqn.params)]


def _fake_init(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    return [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def _concat(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Join the blocks of a parameter to one array, without a copy if they are adjacent."""
    if all(isinstance(v, np.ndarray) for v in values):
        memory = _shared_memory(values)
        if memory is not None:
            return [memory]
    return [np.concatenate(values, eqn.params["axis"])]


def _shared_memory(blocks: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return one array that covers adjacent arrays in memory; None if they have a gap."""
    first, base = blocks[0], blocks[0].base
    if base is None:
        return None
    start = end = first.ctypes.data
    for b in blocks:
        if b.base is not base or b.ctypes.data != end:
            return None
        end += b.nbytes
    rows = sum(b.shape[0] for b in blocks)
    return np.ndarray((rows, *first.shape[1:]), first.dtype, base, start - base.ctypes.data)


LOCAL_RULES: Mapping[Primitive, EquationRule] = {
    split_byref_p: _split_gradient,
    split_ids_p: _split_ids,
    concat_p: _concat,
    fake_init_p: _fake_init,
}
