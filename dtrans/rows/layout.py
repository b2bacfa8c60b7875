"""Layouts of the values of an optimizer update: their relation to the rows of parameters.

    Shared                       depends on rows only through reductions; all servers can compute it
    RowAxis(leaf, axis, width)   entries i*width to (i+1)*width along `axis` depend on row i
    Colocated(leaves, reason)    depends on the rows of `leaves` in another way; is on their server

A `Colocated` layout with a reason binds its leaves: they must all stay unsliced on one server.
A layout without a reason belongs to a value of a 0-d leaf, or to a reduction over an unsliced leaf.
One server computes this value, and can send the value to other servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Shared:
    """Layout of a value that every server can compute."""


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Assignment of runs of consecutive entries to shards, e.g. runs 0 and 3 to the first shard.

    Attributes:
      slots: for each shard, the indices of its runs, e.g. `((0, 3), (1, 2))`; -1 for padding.
    """

    slots: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class RowAxis:
    """Layout of a value with `width` entries along `axis` for each row of `leaf`.

    For example, `w.T` has the layout `RowAxis("w", axis=1)`.

    `order` is None if each shard has consecutive rows. Only `dtrans.engine` uses other orders.
    """

    leaf: str
    axis: int
    width: int = 1
    order: RowOrder | None = None


@dataclasses.dataclass(frozen=True)
class Colocated:
    """Layout of a value that depends on `leaves`, but not row by row.

    `reason` describes the equation that mixed the rows. If `reason` is None, other servers can get
    the value.
    """

    leaves: frozenset[str]
    reason: str | None = dataclasses.field(default=None, compare=False)


Layout = Shared | RowAxis | Colocated
SHARED = Shared()


def row_axes(layouts: Iterable[object]) -> list[RowAxis]:
    """Return the layouts that are a `RowAxis`."""
    return [x for x in layouts if isinstance(x, RowAxis)]


def rows_or_shared(layout: object) -> Shared | RowAxis:
    """Return the layout if it is a `RowAxis`, else `SHARED`."""
    return layout if isinstance(layout, RowAxis) else SHARED


def rows_or_none(layout: object) -> RowAxis | None:
    """Return the layout if it is a `RowAxis`, else None."""
    return layout if isinstance(layout, RowAxis) else None


def all_shared(layouts: Iterable[object]) -> bool:
    """Return True if all layouts are `SHARED`."""
    return all(x is SHARED for x in layouts)


def leaves_of(layouts: Iterable[Layout]) -> frozenset[str]:
    """Return the leaves that occur in layouts."""
    found: set[str] = set()
    for x in layouts:
        if isinstance(x, RowAxis):
            found.add(x.leaf)
        elif isinstance(x, Colocated):
            found |= x.leaves
    return frozenset(found)


def sendable(x: Layout) -> bool:
    """Return True if a value with this layout can be sent to the servers that read it."""
    return isinstance(x, Colocated) and not x.reason and len(x.leaves) == 1


def binding(layouts: Iterable[Layout]) -> list[Colocated]:
    """Return the layouts that force their leaves onto one server.

    These layouts have a `reason`, or several leaves.
    """
    found = []
    for x in layouts:
        if isinstance(x, Colocated) and (x.reason or len(x.leaves) > 1):
            found.append(x)
    return found


def first_reason(layouts: Iterable[Layout]) -> str | None:
    """Return the first `Colocated.reason` among layouts; None if there is none."""
    for x in layouts:
        if isinstance(x, Colocated) and x.reason:
            return x.reason
    return None


def join(a: Layout, b: Layout, name: str) -> Layout:
    """Return the layout of a value that has layout `a` or layout `b`, e.g. in two branches.

    A `SHARED` layout gives way to the other layout, and so does a layout that is `sendable`. If no
    layout gives way, the result is `Colocated`: one server must store the leaves of both. The
    reason says that the value, `name`, depends on rows in two ways.
    """
    if a == b or b is SHARED:
        return a
    if a is SHARED:
        return b
    if sendable(a) and sendable(b):
        return min(a, b, key=lambda x: min(leaves_of([x])))
    if sendable(a) or sendable(b):
        return b if sendable(a) else a
    reason = first_reason((a, b)) or f"{name} depends on rows in two ways"
    return Colocated(leaves_of((a, b)), reason)
