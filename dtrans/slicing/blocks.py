"""Block of rows of a leaf, unit of an optimize block, and placement of blocks on servers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dtrans.ops import BlockGradient
from dtrans.rows.analysis import Group
from dtrans.rows.writer import RowRange, RowSet
from dtrans.step.cut import GRAD


ARG = "@ARG"  # suffix of the name of an argument that trainers send
TIED = "its update needs another leaf"


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one leaf on one server: a range of rows, or of buckets.

    Attributes:
      leaf: path of the leaf, `params/dense/kernel`.
      index: index of the block within the leaf.
      count: number of blocks of the leaf.
      span: its rows; None for a 0-d leaf.
      shape, dtype: those of the block.
      endpoint: its server.
      word: word for blocks in names; changed if a leaf has the same name.
      is_table: True if its update is written for ranges of rows even if it has all of them.
    """

    leaf: str
    index: int
    count: int
    span: RowSet | None
    shape: tuple[int, ...]
    dtype: Any
    endpoint: str = ""
    word: str = "block"
    is_table: bool = False

    @classmethod
    def from_leaf(cls, leaf: str, aval: Any, endpoint: str = "") -> Block:
        """Return a full leaf as one block."""
        span = RowRange(0, aval.shape[0]) if aval.ndim else None
        return cls(leaf, 0, 1, span, tuple(aval.shape), aval.dtype, endpoint)

    def named(self, base: str) -> str:
        """Return the name of this block of an array: `opt_state/0/mu/w` to
        `opt_state/0/mu/w.block0`."""
        return base if self.count == 1 else f"{base}.{self.word}{self.index}"

    @property
    def name(self) -> str:
        """`params/w.block0`, or `params/w` for a single block."""
        return self.named(self.leaf)

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a 0-d leaf."""
        return self.span.rows if self.span else 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * np.dtype(self.dtype).itemsize

    def gradient(self, trainer_id: int, trainers: int) -> str:
        """Return the name of its gradient: `params/w@GRAD.block0.trainer_1` (Paddle's scheme)."""
        return self.named(self.leaf + GRAD) + (f".trainer_{trainer_id}" if trainers > 1 else "")

    def gradients(self, trainers: int, op: str) -> BlockGradient:
        """Return its gradient from `trainers` trainers: their "mean" or "sum"."""
        sent = {k: self.gradient(k, trainers) for k in range(trainers)}
        return BlockGradient(self.gradient(0, 1), self.leaf, self.index, sent, op)


def argument(name: str, trainers: int) -> BlockGradient:
    """Return an argument of the step that an update reads and all trainers send:
    `rate@ARG.trainer_1`."""
    sent_name = name + ARG
    return BlockGradient(
        sent_name,
        name,
        0,
        {k: sent_name + (f".trainer_{k}" if trainers > 1 else "") for k in range(trainers)},
        "same",
    )


@dataclasses.dataclass(frozen=True)
class Unit:
    """Blocks that one optimize block updates: one block, or the full leaves of a group."""

    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """Name of its first block."""
        return self.blocks[0].name

    @property
    def span(self) -> RowSet | None:
        """Its rows; None for full leaves."""
        first = self.blocks[0]
        return first.span if first.count > 1 or first.is_table else None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(b.nbytes for b in self.blocks)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Placement of blocks on servers.

    Attributes:
      endpoints: the servers, in order.
      blocks: leaf to its blocks.
      groups: leaf to its group, for leaves that cannot be sliced.
      order: the other leaves, in the order of dispatch.
    """

    endpoints: tuple[str, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    groups: Mapping[str, Group]
    order: tuple[str, ...] = ()

    @cached_property
    def units(self) -> dict[str, tuple[Unit, ...]]:
        """Units of each server, in leaf order."""
        found: dict[str, list[Unit]] = {ep: [] for ep in self.endpoints}
        for leaf, blocks in self.blocks.items():
            if leaf not in self.groups:
                for b in blocks:
                    found[b.endpoint].append(Unit((b,)))
            elif self.groups[leaf].leaves[0] == leaf:
                found[blocks[0].endpoint].append(
                    Unit(tuple(self.blocks[n][0] for n in self.groups[leaf].leaves))
                )
        return {ep: tuple(units) for ep, units in found.items()}

    @cached_property
    def unsliced(self) -> dict[str, str]:
        """Leaves that cannot be sliced, with the reason."""
        return {n: g.reason or TIED for n, g in self.groups.items()}

    @cached_property
    def table(self) -> tuple[Block, ...]:
        """All blocks, in leaf order."""
        return tuple(b for blocks in self.blocks.values() for b in blocks)

    def map(self, fn: Callable[[Block], Block]) -> Placement:
        """Return the placement with each block changed by `fn`."""
        return dataclasses.replace(
            self, blocks={n: tuple(map(fn, of)) for n, of in self.blocks.items()}
        )
