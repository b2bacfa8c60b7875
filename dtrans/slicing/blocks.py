"""Blocks of leaves, the units that are updated together, and the placement of blocks on servers."""

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
from dtrans.step.halves import GRAD


ARG = "@ARG"  # suffix of step arguments that trainers send to servers, as in `rate@ARG`
TIED = "its update reads another leaf"


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one leaf on one server.

    Attributes:
      leaf: path of the leaf, `params/dense/kernel`.
      index: index of the block within the leaf.
      count: number of blocks of the leaf.
      span: range of rows or of buckets (`dtrans.rows.row_buckets`); None for a 0-d leaf.
      shape, dtype: type of the block.
      endpoint: server of the block.
      word: word before the index in names: "block"; or another word, if a leaf of the step already
        has the name with "block".
      is_table: True for a block of a table. Its update is written for a range of rows, even if the
        block has all rows of the leaf.
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
        """Return a block that contains a full leaf."""
        span = RowRange(0, aval.shape[0]) if aval.ndim else None
        return cls(leaf, 0, 1, span, tuple(aval.shape), aval.dtype, endpoint)

    def named(self, base: str) -> str:
        """Return the name of this block's rows of array `base`, e.g. `opt_state/0/mu/w.block0`."""
        if self.count == 1:
            return base
        return f"{base}.{self.word}{self.index}"

    @property
    def name(self) -> str:
        """Name of the block: `params/w.block0`, or `params/w` if the leaf has one block."""
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
        """Return Paddle's name of a trainer's gradient: `params/w@GRAD.block0.trainer_1`."""
        return _from_trainer(self.named(self.leaf + GRAD), trainer_id, trainers)

    def gradients(self, trainers: int, op: str) -> BlockGradient:
        """Describe the gradient of this block: the "mean" or "sum" of the trainers' gradients."""
        sent = {k: self.gradient(k, trainers) for k in range(trainers)}
        return BlockGradient(self.gradient(0, 1), self.leaf, self.index, sent, op)


def argument(name: str, trainers: int) -> BlockGradient:
    """Return a `BlockGradient` for a step argument that the update reads.

    All trainers send the same value. If the argument is `rate`, trainer 1 sends it under the name
    `rate@ARG.trainer_1`.

    Args:
      name: name of the argument.
      trainers: number of trainers.
    """
    sent_name = name + ARG
    sent = {k: _from_trainer(sent_name, k, trainers) for k in range(trainers)}
    return BlockGradient(sent_name, name, 0, sent, "same")


def _from_trainer(name: str, trainer_id: int, trainers: int) -> str:
    if trainers == 1:
        return name
    return f"{name}.trainer_{trainer_id}"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Blocks that a server updates together: one block, or leaves that an equation combines."""

    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """Name of the first block."""
        return self.blocks[0].name

    @property
    def span(self) -> RowSet | None:
        """Rows of a leaf that the unit contains; None for full leaves."""
        first = self.blocks[0]
        if first.count == 1 and not first.is_table:
            return None
        return first.span

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(b.nbytes for b in self.blocks)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Assignment of blocks to servers.

    Attributes:
      endpoints: the servers, in order.
      blocks: maps each leaf to its blocks.
      groups: the `dtrans.rows.analysis.Group` of each leaf that cannot be sliced, by leaf.
      order: all leaves that can be sliced, in the order in which they were assigned to servers.
    """

    endpoints: tuple[str, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    groups: Mapping[str, Group]
    order: tuple[str, ...] = ()

    @cached_property
    def units(self) -> dict[str, tuple[Unit, ...]]:
        """Units of each server (endpoint), in leaf order."""
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
        """Leaves that cannot be sliced, each with the reason."""
        return {n: g.reason or TIED for n, g in self.groups.items()}

    @cached_property
    def table(self) -> tuple[Block, ...]:
        """All blocks, in leaf order."""
        return tuple(b for blocks in self.blocks.values() for b in blocks)

    def map(self, fn: Callable[[Block], Block]) -> Placement:
        """Return a placement in which `fn(block)` replaces each block."""
        changed = {leaf: tuple(map(fn, blocks)) for leaf, blocks in self.blocks.items()}
        return dataclasses.replace(self, blocks=changed)
