"""What is gathered, and how: what is there as slices, how gradients become slices, and how far ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrans._jax import Atom, Var
from dtrans.rows.layout import RowAxis
from dtrans.zero.choose_slices import Sliced


@dataclasses.dataclass(frozen=True)
class Gathering:
    """How leaves are gathered, and gradients scattered.

    Attributes:
      axis_name: the axis that the ranks are on.
      degree: how many there are.
      leaves: how each leaf is cut, by its name.
      dtypes: the type in which gradients of a leaf are reduced, where that is not their own.
      prefetch: how many windows ahead.
      prefetch_in_loops: the same, in loops over layers.
      segment: bytes up to which leaves of neighbouring windows are gathered together.
      once: whether what is gathered is kept to its last use, in either direction.
    """

    axis_name: str
    degree: int
    leaves: Mapping[str, Sliced]
    dtypes: Mapping[str, Any]
    prefetch: int
    prefetch_in_loops: int
    segment: float
    once: bool = False

    def cut(self, row: RowAxis) -> Sliced:
        """How a value with rows of a leaf is cut."""
        s = self.leaves[row.leaf]
        return Sliced(row.axis, s.size * row.width, s.part * row.width, s.degree)


@dataclasses.dataclass(frozen=True)
class Given:
    """What is there, or wanted, as slices where equations are written.

    Attributes:
      slices: the slice of each value that has one.
      rows: of these.
      local: values that differ from rank to rank.
      wanted: gradients that are to be slices, and their rows.
      summed: inputs that are slices of gradients.
      taken: results that are taken as slices, where they have slices of these rows.
    """

    slices: Mapping[Var, Atom]
    rows: Mapping[Var, RowAxis]
    local: set[Var]
    wanted: Mapping[Var, RowAxis]
    summed: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    taken: Mapping[Var, RowAxis] = dataclasses.field(default_factory=dict)
