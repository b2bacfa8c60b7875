"""Layouts: the relation of each value of an optimizer's update to the rows of parameters.

Parameter servers divide parameters among them by rows. The layout of a value states the servers
that can compute the value, and the entries that each of them computes.

    Shared                       depends on rows only through reductions; all servers can compute it
    RowAxis(leaf, axis, width)   entries i*width to (i+1)*width along `axis` depend on row i of leaf
    Colocated(leaves, reason)    depends on the rows of `leaves` in another way; is on their server

A leaf is an array of the parameter pytree. A `Colocated` layout with a reason binds its leaves:
they must all stay unsliced on one server. A `Colocated` layout without a reason belongs to a scalar
leaf, or to a reduction over an unsliced leaf. One server computes such a value, and can send it to
other servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Shared:
    """Layout of a value that every server can compute, such as a learning rate or a global norm."""


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Order of an array's rows over shards that do not have consecutive rows.

    The rows are cut into runs of equal length. For `slots=((0, 3), (1, 2))`, the first shard has
    runs 0 and 3, and the second has runs 1 and 2.

    Attributes:
      slots: for each shard, the indices of its runs; -1 for a run of padding.
    """

    slots: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class RowAxis:
    """Layout of a value with `width` entries along `axis` for each row of the parameter `leaf`.

    For example, `w.T` has the layout `RowAxis("w", axis=1)`. If `w` has shape (10, 4), then
    `w.reshape(20, 2)` has the layout `RowAxis("w", axis=0, width=2)`.

    `order` is None if each shard has consecutive rows. Only `dtrans.engine` uses other orders.
    """

    leaf: str
    axis: int
    width: int = 1
    order: RowOrder | None = None


@dataclasses.dataclass(frozen=True)
class Colocated:
    """Layout of a value that depends on the parameters `leaves`, but not row by row.

    `reason` describes the equation that mixed the rows. All of `leaves` must then be on one server.
    If `reason` is None, that server can send the value to other servers.
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
    """Return the names of the parameters that occur in layouts."""
    found: set[str] = set()
    for x in layouts:
        if isinstance(x, RowAxis):
            found.add(x.leaf)
        elif isinstance(x, Colocated):
            found |= x.leaves
    return frozenset(found)


def sendable(x: Layout) -> bool:
    """Return True if one server computes values with this layout, and can send them to others."""
    return isinstance(x, Colocated) and not x.reason and len(x.leaves) == 1


def binding(layouts: Iterable[Layout]) -> list[Colocated]:
    """Return the layouts of values that need all their parameters on one server.

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
    """Return the layout of a value that has layout `a` in one case, and layout `b` in another.

    The two cases are, for example, two branches of a `cond`. A `SHARED` layout gives way to the
    other layout, and so does a layout that is `sendable`. If neither gives way, the result is
    `Colocated`, and one server must store the parameters of both. Its reason says that the value,
    `name`, depends on rows in two ways.
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
