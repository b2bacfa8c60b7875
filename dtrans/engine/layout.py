"""How a value lies on the shards of a tensor-parallel program.

    SHARED                    every shard has all of it, and all have the same
    RowAxis(_, axis, width)   each shard has a piece along `axis`: whole runs of `width` entries, ceil(runs / shards)
    PARTIAL                   each shard has a term of it; their sum is the value

Pieces are equally large. Where the shards do not divide the runs, the last pieces have padding behind what is real;
it may hold anything, and nothing that mixes entries looks at it.

`RowAxis` is that of the row analysis (`dtrans.rows.layout`), of a leaf without a name, so that one set of rules serves
both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from dtrans._jax import resized
from dtrans.rows.layout import SHARED, RowAxis, Shared


class Partial:
    """Each shard has a term of a sum."""


PARTIAL: Final = Partial()

Placed = Shared | RowAxis | Partial


def cut_along(axis: int, width: int = 1) -> RowAxis:
    """The layout of a value that is cut along an axis."""
    return RowAxis("", axis, width)


def rows_only(x: Placed) -> Shared | RowAxis:
    """A layout as rules look at it: a sum is whole to them, once it is made."""
    return x if isinstance(x, RowAxis) else SHARED


def rows_or_none(x: Placed) -> RowAxis | None:
    """How a value is cut; None for one that is not."""
    return x if isinstance(x, RowAxis) else None


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a program.

    Attributes:
      count: how many there are.
      over: the named axes that they are on.
      noun: what one of them is called in errors.
    """

    count: int
    over: tuple[str, ...]
    noun: str = "trainer"

    def local(self, size: int, row: RowAxis) -> int:
        """How many entries of `size` each shard has, padding included."""
        return -(-(size // row.width) // self.count) * row.width

    def whole(self, size: int, row: RowAxis) -> int:
        """How many entries all pieces have together."""
        return self.local(size, row) * self.count

    def pads(self, size: int, row: RowAxis) -> bool:
        """Whether some piece has padding."""
        return self.whole(size, row) != size

    def plain(self, row: RowAxis, size: int) -> RowAxis:
        """The layout under its plainest name: without padding, the width of runs makes no difference."""
        return cut_along(int(row.axis), row.width if self.pads(size, row) else 1)  # JAX has NumPy's integers in places

    def cut(self, aval: Any, layout: Placed) -> Any:
        """The type of a shard's piece."""
        if not isinstance(layout, RowAxis):
            return aval
        return resized(aval, layout.axis, self.local(aval.shape[layout.axis], layout))


def nbytes(aval: Any) -> int:
    """Bytes of a value; a key of a random generator counts as one word."""
    return int(aval.size) * int(getattr(aval.dtype, "itemsize", 4))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A value that was cut, and is made whole.

    Attributes:
      shape, dtype: of the whole.
      nbytes: of the whole.
      reason: what needs it whole: `sort of f32[8,10] (model/head)`, or which output.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    reason: str
