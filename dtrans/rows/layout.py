"""Layouts: what a value of an optimize half has to do with the rows of parameters.

    Shared                    no row enters it, or only through reductions: every server can have all of it
    RowAxis(leaf, axis, width)   made of the rows of one leaf: entries i*width to (i+1)*width along `axis` are of
                              row i of `leaf` (and of shared values)
    Whole(leaves, reason)     made of the rows of `leaves` in some other way; it lives where those leaves are

A `Whole` with a reason binds: its leaves must be whole, on one server, together. One without a
reason comes from a 0-d leaf, or from a reduction over a leaf that is whole anyway, and can be sent
to whoever reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Shared:
    """Every server can have all of it."""


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Runs of entries in the slots of shards, in another order than that of the whole value.

    Attributes:
      slots: for each shard, the number of the run in each of its slots; -1 for padding.
    """

    slots: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class RowAxis:
    """Row i of `leaf` is at i*width to (i+1)*width along `axis`.

    Shards have rows in their sequence, or by an `order`, which only `dtrans.engine` uses.
    """

    leaf: str
    axis: int
    width: int = 1
    order: RowOrder | None = None


@dataclasses.dataclass(frozen=True)
class Whole:
    """Made of `leaves`, and has no rows.

    `reason` is the equation that made it so; None where it can be sent to others.
    """

    leaves: frozenset[str]
    reason: str | None = dataclasses.field(default=None, compare=False)


Layout = Shared | RowAxis | Whole
SHARED = Shared()


def leaves_of(layouts: Iterable[Layout]) -> frozenset[str]:
    """The leaves that enter values of these layouts."""
    found: set[str] = set()
    for x in layouts:
        if isinstance(x, RowAxis):
            found.add(x.leaf)
        elif isinstance(x, Whole):
            found |= x.leaves
    return frozenset(found)


def sendable(x: Layout) -> bool:
    """Whether a value of a whole leaf binds nothing: whoever reads it is sent it."""
    return isinstance(x, Whole) and not x.reason and len(x.leaves) == 1


def join(a: Layout, b: Layout, name: str) -> Layout:
    """The least layout above both, for a value that is one thing now and another then; `name` is
    for the reason.

    What can be sent is sent to where the other is.
    """
    if a == b or b is SHARED:
        return a
    if a is SHARED:
        return b
    if sendable(a) and sendable(b):
        return min(a, b, key=lambda x: min(leaves_of([x])))
    if sendable(a) or sendable(b):
        return b if sendable(a) else a
    reasons = [x.reason for x in (a, b) if isinstance(x, Whole) and x.reason]
    return Whole(leaves_of((a, b)), (*reasons, f"{name} is made of rows in two ways")[0])
