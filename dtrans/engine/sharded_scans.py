"""Scans along the sharded dimension: each shard runs the iterations over its part of the dimension.

The iterations must be independent, as in `jax.lax.map` over rows, or in a scan over micro-batches
that adds up gradients. A carried value may be constant, or a sum to which each iteration adds a
term. A carried sum is a partial sum before and after the scan. Stacked outputs are
sharded like the scanned operands.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import SCAN, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, bodies, opened, scan_counts
from dtrans.engine.layout import ShardLayout
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import all_operands, variables
from dtrans.ir.inline import inline_calls
from dtrans.rows.layout import RowAxis, row_axes


def sharded_iterations(
    eqn: JaxprEqn, ins: Sequence[ShardLayout]
) -> tuple[RowAxis, list[bool]] | None:
    """Return the sharding of a scan's iterations; None if iterations depend on each other.

    Args:
      eqn: the loop.
      ins: layout of each operand.

    Returns:
      The layout of the scanned operands; and for each carried value, True if iterations add to it,
      or False if it is constant.
    """
    if eqn.primitive.name != SCAN or eqn.effects:
        return None
    consts, carried = scan_counts(eqn)
    rows = set(row_axes(ins[consts + carried :]))
    if len(rows) != 1 or row_axes(ins[: consts + carried]):
        return None
    (row,) = rows
    (body,) = bodies(eqn)
    added = _added(opened(inline_calls(body, rules=True)), consts, carried)
    if row.axis or added is None:
        return None
    return row, added


def _added(inner: Jaxpr, consts: int, carried: int) -> list[bool] | None:
    """Return one flag for each carried value: True if iterations add to it, False if constant.

    Return None if an iteration both reads and changes a carried value.
    """
    reads: Counter[Atom] = Counter(variables(inner.outvars))
    reads.update(variables(all_operands(inner.eqns)))
    found = []
    for v, out in zip(inner.invars[consts : consts + carried], inner.outvars, strict=False):
        if v is not out and not _adds_only(inner, v, out, reads):
            return None
        found.append(v is not out)
    return found


def _adds_only(inner: Jaxpr, start: Var, end: Atom, reads: Counter[Atom]) -> bool:
    """Return True if `end` is `start` plus terms that do not depend on `start`."""
    value = start
    for eqn in inner.eqns:
        if reads[value] != 1:
            return False
        if value is end:
            return True
        if value not in eqn.invars:
            continue
        if not _adds_to(eqn, value):
            return False
        (value,) = eqn.outvars
    return value is end and reads[value] == 1


def _adds_to(eqn: JaxprEqn, value: Var) -> bool:
    """Return True if an equation adds a term to `value`, or only removes its weak type."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return bool(eqn.outvars[0].aval.dtype == value.aval.dtype)
    return name in ("add", "add_any") or (name == "sub" and eqn.invars[0] is value)


def mask_padding(body: Any, consts: int, added: Sequence[bool]) -> ClosedJaxpr:
    """Return the body of a scan with an additional flag that disables the iteration.

    If shards run different numbers of real iterations, some iterations run on padding. Their flag
    is False, and they add nothing to carried sums.

    Args:
      body: the body.
      consts: number of its constant inputs.
      added: for each carried value, True if iterations add to it.
    """
    flat = inline_calls(body, rules=True)
    b = Builder(flat)
    ins = [b.input(v.aval) for v in opened(flat).invars]
    is_real = b.input(jnp.zeros((), bool).aval)
    outs = b.inline(flat, *ins)
    for i, adds in enumerate(added):
        if adds:
            (outs[i],) = b.call(_select, is_real, outs[i], ins[consts + i])
    return b.build(outs)


def end_padding(condition: Any, axis: int, is_real: Atom) -> ClosedJaxpr:
    """Add a mask as the first input of a loop's condition; rows outside of the mask are finished.

    Args:
      condition: the condition, which has an entry for each row.
      axis: the dimension with the rows.
      is_real: the mask, with an entry for each row: False for padding.
    """
    b = Builder(condition)
    mask = b.input(is_real.aval)
    ins = [b.input(v.aval) for v in opened(condition).invars]
    (running,) = b.inline(condition, *ins)
    return b.build(b.call(_masked(axis), running, mask))


@functools.cache
def _masked(axis: int) -> Callable[[Any, Any], Any]:
    """Return a function (flags, mask) that clears the flags of rows outside of the mask."""
    return lambda flags, mask: flags & jax.lax.broadcast_in_dim(mask, flags.shape, [axis])


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jnp.where(condition, new, old)
