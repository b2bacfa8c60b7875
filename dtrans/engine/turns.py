"""Loops along the dimension that is cut. Each shard runs the turns of its own rows.

`jax.lax.map` over rows, and a scan over micro-batches that adds up gradients, need nothing of other
turns. What such a loop carries is either the same in all turns, or a sum to which each turn adds:
shards begin with a term of it, and end with one. Everything else that a turn makes is stacked, and
is cut as the operands are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import SCAN, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, bodies, opened, scan_counts
from dtrans.engine.layout import Placed
from dtrans.ir.builder import Builder
from dtrans.ir.inline import inline_calls
from dtrans.rows.layout import RowAxis


def own_turns(eqn: JaxprEqn, ins: Sequence[Placed]) -> tuple[RowAxis, list[bool]] | None:
    """Return the turns that each shard takes, and for each carried value, if turns add to it.

    None for other loops, and if a turn needs what other turns make.

    Args:
      ins: the layouts of the operands of the loop.
    """
    if eqn.primitive.name != SCAN or eqn.effects:
        return None
    consts, carried = scan_counts(eqn)
    rows = {x for x in ins[consts + carried :] if isinstance(x, RowAxis)}
    if len(rows) != 1 or any(isinstance(x, RowAxis) for x in ins[: consts + carried]):
        return None
    (row,) = rows
    (body,) = bodies(eqn)
    added = _added(opened(inline_calls(body, rules=True)), consts, carried)
    return None if row.axis or added is None else (row, added)


def _added(inner: Jaxpr, consts: int, carried: int) -> list[bool] | None:
    """Return for each carried value if turns add to it; None if there is one that they read and
    change."""
    reads: Counter[Atom] = Counter(a for a in inner.outvars if isinstance(a, Var))
    reads.update(a for e in inner.eqns for a in e.invars if isinstance(a, Var))
    found = []
    for v, out in zip(inner.invars[consts : consts + carried], inner.outvars, strict=False):
        if v is not out and not _adds_only(inner, v, out, reads):
            return None
        found.append(v is not out)
    return found


def _adds_only(inner: Jaxpr, start: Var, end: Atom, reads: Counter[Atom]) -> bool:
    """Return True if `end` is `start` and something that does not depend on it."""
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
    """Return True if an equation adds something to a value, or only makes its type a strong one."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return bool(eqn.outvars[0].aval.dtype == value.aval.dtype)
    return name in ("add", "add_any") or (name == "sub" and eqn.invars[0] is value)


def with_padding(body: Any, consts: int, added: Sequence[bool]) -> ClosedJaxpr:
    """Return a body with one more operand, which is false in turns that are padding: these add
    nothing."""
    flat = inline_calls(body, rules=True)
    b = Builder(flat)
    ins = [b.input(v.aval) for v in opened(flat).invars]
    is_turn = b.input(jnp.zeros((), bool).aval)
    outs = b.inline(flat, *ins)
    for i, adds in enumerate(added):
        if adds:
            (outs[i],) = b.call(_kept, is_turn, outs[i], ins[consts + i])
    return b.build(outs)


def _kept(condition: Any, new: Any, old: Any) -> Any:
    return jnp.where(condition, new, old)
