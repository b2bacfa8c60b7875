"""A block of rows of a leaf, what one optimize block updates, and where all of them live."""

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


ARG = "@ARG"  # what follows the name of an argument of the step where it is sent
TIED = "its update needs another leaf"


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one leaf, on one server: a run of them, or of buckets.

    Attributes:
      leaf: the path of the leaf, `params/dense/kernel`.
      index: the number of the block within the leaf.
      count: how many blocks the leaf has.
      span: its rows; None for a 0-d leaf.
      shape, dtype: of the block.
      endpoint: the server.
      word: how blocks are called; another one where leaves are called so.
      is_table: whether its update is written for runs of rows, also where it has all of them.
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
    def whole(cls, leaf: str, aval: Any, endpoint: str = "") -> Block:
        """Return all of a leaf as one block."""
        span = RowRange(0, aval.shape[0]) if aval.ndim else None
        return cls(leaf, 0, 1, span, tuple(aval.shape), aval.dtype, endpoint)

    def named(self, base: str) -> str:
        """Return the name of an array that is cut as this block is: `opt_state/0/mu/w` to
        `opt_state/0/mu/w.block0`."""
        return base if self.count == 1 else f"{base}.{self.word}{self.index}"

    @property
    def name(self) -> str:
        """`params/w.block0`, or `params/w` where there is only one."""
        return self.named(self.leaf)

    @property
    def rows(self) -> int:
        """Its number of rows; 1 for a 0-d leaf."""
        return self.span.rows if self.span else 1

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * np.dtype(self.dtype).itemsize

    def gradient(self, trainer_id: int, trainers: int) -> str:
        """The name of its gradient from one trainer: `params/w@GRAD.block0.trainer_1` (Paddle's
        scheme)."""
        return self.named(self.leaf + GRAD) + (f".trainer_{trainer_id}" if trainers > 1 else "")

    def gradients(self, trainers: int, op: str) -> BlockGradient:
        """Its gradient, of so many trainers: their "mean" or "sum"."""
        sent = {k: self.gradient(k, trainers) for k in range(trainers)}
        return BlockGradient(self.gradient(0, 1), self.leaf, self.index, sent, op)


def argument(name: str, trainers: int) -> BlockGradient:
    """An argument of the step that an update reads, which all trainers send:
    `rate@ARG.trainer_1`."""
    told = name + ARG
    return BlockGradient(
        told,
        name,
        0,
        {k: told + (f".trainer_{k}" if trainers > 1 else "") for k in range(trainers)},
        "same",
    )


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one optimize block updates: one block, or the whole leaves of a group."""

    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """The name of its first block."""
        return self.blocks[0].name

    @property
    def span(self) -> RowSet | None:
        """The rows it has; None where it has whole leaves."""
        first = self.blocks[0]
        return first.span if first.count > 1 or first.is_table else None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(b.nbytes for b in self.blocks)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Every block and its server.

    Attributes:
      endpoints: the servers, in order.
      blocks: leaf to its blocks.
      groups: leaf to its group, for leaves that cannot be cut.
      order: the other leaves, in the order in which they were dispatched.
    """

    endpoints: tuple[str, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    groups: Mapping[str, Group]
    order: tuple[str, ...] = ()

    @cached_property
    def units(self) -> dict[str, tuple[Unit, ...]]:
        """The units of each server, in leaf order."""
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
    def whole(self) -> dict[str, str]:
        """The leaves that cannot be cut, and the reason."""
        return {n: g.reason or TIED for n, g in self.groups.items()}

    @cached_property
    def table(self) -> tuple[Block, ...]:
        """All blocks, in leaf order."""
        return tuple(b for blocks in self.blocks.values() for b in blocks)

    def map(self, fn: Callable[[Block], Block]) -> Placement:
        """Return the placement of changed blocks."""
        return dataclasses.replace(
            self, blocks={n: tuple(map(fn, of)) for n, of in self.blocks.items()}
        )
