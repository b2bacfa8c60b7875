"""Layouts of the values of an optimizer update: their relation to the rows of parameters.

    Shared                       depends on no row except by reductions: every server can compute it
    RowAxis(leaf, axis, width)   row i of `leaf` enters entries i*width to (i+1)*width along `axis`
    Colocated(leaves, reason)    depends on the rows of `leaves` in another way; it lives with them

A `Colocated` with a reason binds its leaves: they must live unsliced on one server, together. One
without a reason comes from a 0-d leaf, or from a reduction over an unsliced leaf. It can be sent to
the servers that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Shared:
    """Layout of a value that every server can compute."""


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Order of runs of entries in the slots of shards, other than that of the full value.

    Attributes:
      slots: for each shard, the index of the run in each of its slots; -1 for padding.
    """

    slots: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class RowAxis:
    """Layout of a value in which row i of `leaf` is at i*width to (i+1)*width along `axis`.

    Shards have consecutive rows, or an `order`, which only `dtrans.engine` uses.
    """

    leaf: str
    axis: int
    width: int = 1
    order: RowOrder | None = None


@dataclasses.dataclass(frozen=True)
class Colocated:
    """Layout of a value that depends on `leaves`, but not row by row.

    `reason` is the equation that mixed the rows; None if the value can be sent to other servers.
    """

    leaves: frozenset[str]
    reason: str | None = dataclasses.field(default=None, compare=False)


Layout = Shared | RowAxis | Colocated
SHARED = Shared()


def leaves_of(layouts: Iterable[Layout]) -> frozenset[str]:
    """Return the leaves that values of these layouts depend on."""
    found: set[str] = set()
    for x in layouts:
        if isinstance(x, RowAxis):
            found.add(x.leaf)
        elif isinstance(x, Colocated):
            found |= x.leaves
    return frozenset(found)


def sendable(x: Layout) -> bool:
    """Return True if a value of an unsliced leaf can be sent to the servers that read it."""
    return isinstance(x, Colocated) and not x.reason and len(x.leaves) == 1


def join(a: Layout, b: Layout, name: str) -> Layout:
    """Return the least layout above both, for a value that has one of two; `name` enters the
    reason.

    A sendable value is sent to the leaf of the other.
    """
    if a == b or b is SHARED:
        return a
    if a is SHARED:
        return b
    if sendable(a) and sendable(b):
        return min(a, b, key=lambda x: min(leaves_of([x])))
    if sendable(a) or sendable(b):
        return b if sendable(a) else a
    reasons = [x.reason for x in (a, b) if isinstance(x, Colocated) and x.reason]
    return Colocated(leaves_of((a, b)), (*reasons, f"{name} depends on rows in two ways")[0])
