"""Transfers of a step: the bytes that each role sends to each other role, as table and drawing."""

from __future__ import annotations

import dataclasses
import html as html_escape
from typing import NamedTuple

from dtrans.ir import display


@dataclasses.dataclass(frozen=True)
class RoleTransfer:
    """Values that each process or device of one role sends to another role in a step.

    Attributes:
      source, target: names of the roles, as in `dtrans.costs.RoleCost`. The target may also be a
        group of roles, such as `other trainers`.
      what: the kind of the values, such as `gradients`.
      nbytes: bytes of the values that one sender passes to one receiver.
    """

    source: str
    target: str
    what: str
    nbytes: int

    @property
    def label(self) -> str:
        """The kind of the values, and their bytes."""
        return f"{self.what}: {self.nbytes:,} B"


_HEADER = ("from", "to", "values", "bytes")
_WIDTH, _HEIGHT = 150, 48  # width and height of a role's box, in pixels
_ARROW, _GAP = 280, 14  # pixels between two columns, and between two boxes of a column
_COLOURS = ("#1f6feb", "#1a7f37")  # colours of arrows to the right, and of arrows to the left


class Transfers(tuple[RoleTransfer, ...]):
    """Transfers of a step, printed as a table, and drawn in notebooks."""

    def _rows(self) -> list[tuple[str, ...]]:
        return [(t.source, t.target, t.what, f"{t.nbytes:,}") for t in self]

    def __str__(self) -> str:
        return display.plan_text("transfers of a step", _HEADER, self._rows(), (), right=(3,))

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """Return the drawing as SVG: a box for each role, and an arrow for each pair of roles.

        The first sender is on the left. Each other role is one column to the right of the role with
        which it first exchanges values.
        """
        columns = self._columns()
        by_column: dict[int, list[str]] = {}
        for role, column in columns.items():
            by_column.setdefault(column, []).append(role)
        tallest = max(map(len, by_column.values()), default=0)
        height = max(0, tallest * (_HEIGHT + _GAP) - _GAP + 2)
        width = max(0, len(by_column) * (_WIDTH + _ARROW) - _ARROW + 2)

        boxes: dict[str, _Box] = {}
        for column, roles in by_column.items():
            x = 1 + column * (_WIDTH + _ARROW)
            for i, role in enumerate(roles):
                boxes[role] = _Box(role, x, 1 + i * (_HEIGHT + _GAP), _HEIGHT)
            if len(roles) == 1:  # as tall as the other columns, so that arrows are horizontal
                boxes[roles[0]] = _Box(roles[0], x, 1, height - 2)

        parts = [box.svg() for box in boxes.values()]
        for t in self._by_pair():
            is_back = columns[t.source] > columns[t.target]
            parts.append(_arrow(t, boxes[t.source], boxes[t.target], is_back=is_back))
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            "font-family='sans-serif' font-size='11'>"
            f"{_marker(0)}{_marker(1)}{''.join(parts)}</svg>"
        )

    def _by_pair(self) -> list[RoleTransfer]:
        """Return one transfer for each pair of roles, with the sum of the bytes."""
        by_pair: dict[tuple[str, str], list[RoleTransfer]] = {}
        for t in self:
            by_pair.setdefault((t.source, t.target), []).append(t)
        found = []
        for first, *more in by_pair.values():
            what = f"{first.what} and {len(more)} more" if more else first.what
            size = first.nbytes + sum(t.nbytes for t in more)
            found.append(RoleTransfer(first.source, first.target, what, size))
        return found

    def _columns(self) -> dict[str, int]:
        """Return the column of each role in the drawing, counted from 0 at the left."""
        columns: dict[str, int] = {}
        for t in self:
            if t.source not in columns and t.target in columns:
                columns[t.source] = columns[t.target] + 1  # this role only sends
            columns.setdefault(t.source, 0)
            columns.setdefault(t.target, columns[t.source] + 1)
        return columns


class _Box(NamedTuple):
    """Box of a role: its left upper corner and its height, in pixels."""

    role: str
    x: int
    y: int
    height: int

    def svg(self) -> str:
        x, y = self.x + _WIDTH // 2, self.y + self.height // 2 + 4
        return (
            f"<rect x='{self.x}' y='{self.y}' width='{_WIDTH}' height='{self.height}' rx='6' "
            f"fill='none' stroke='currentColor'/><text x='{x}' y='{y}' text-anchor='middle' "
            f"fill='currentColor'>{html_escape.escape(self.role)}</text>"
        )


def _arrow(t: RoleTransfer, source: _Box, target: _Box, *, is_back: bool) -> str:
    """Return an arrow between the facing sides of two boxes, with its label."""
    left, right = (target, source) if is_back else (source, target)
    smaller = min(left, right, key=lambda box: box.height)
    # The two directions use different heights.
    y = smaller.y + (_HEIGHT - 12 if is_back else 16)
    ends = [left.x + _WIDTH, right.x]
    middle, colour = sum(ends) / 2, _COLOURS[is_back]
    if is_back:
        ends.reverse()
    return (
        f"<line x1='{ends[0]}' y1='{y}' x2='{ends[1]}' y2='{y}' stroke='{colour}' "
        f"marker-end='url(#dtrans-arrow-{int(is_back)})'/><text x='{middle}' y='{y - 5}' "
        f"text-anchor='middle' fill='{colour}'>{html_escape.escape(t.label)}</text>"
    )


def _marker(number: int) -> str:
    """Return the SVG definition of an arrow head: number 0 for forward, 1 for backward arrows."""
    return (
        f"<marker id='dtrans-arrow-{number}' markerWidth='8' markerHeight='8' refX='7' refY='4' "
        f"orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{_COLOURS[number]}'/></marker>"
    )
