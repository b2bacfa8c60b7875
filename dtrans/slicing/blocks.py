"""Blocks (rows of a parameter on one server), and the placement of blocks on servers."""

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
    """Rows of one parameter that one server stores and updates.

    Attributes:
      leaf: name of the parameter: its path in the pytree, such as `params/dense/kernel`.
      index: index of the block among the blocks of the parameter, from 0.
      count: number of blocks of the parameter.
      span: the rows: a range, or all rows with some remainders of their ids
        (`dtrans.rows.row_buckets`). None for a scalar parameter.
      shape, dtype: type of the block.
      endpoint: address of the server.
      word: the word "block" in the block's name, `params/w.block0`. Another word replaces it if an
        array of the user already has this name.
      is_table: True for rows of an embedding table. Their update must work for any number of rows,
        so it is written for a range of rows even if the block has all rows.
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
        """Return a block that contains all rows of a parameter.

        Args:
          leaf: the name of the parameter.
          aval: its type.
          endpoint: the server of the block.
        """
        span = RowRange(0, aval.shape[0]) if aval.ndim else None
        return cls(leaf, 0, 1, span, tuple(aval.shape), aval.dtype, endpoint)

    def named(self, base: str) -> str:
        """Return the name for this block's rows of an array, such as `opt_state/0/mu/w.block0`.

        Args:
          base: the name of the array: the parameter, its gradient, or an array of its optimizer
            state.
        """
        if self.count == 1:
            return base
        return f"{base}.{self.word}{self.index}"

    @property
    def name(self) -> str:
        """Name of the block: `params/w.block0`, or `params/w` for the only block of `params/w`."""
        return self.named(self.leaf)

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a parameter without dimensions."""
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
        """Return the name under which a trainer sends the gradient of this block.

        The name is Paddle's: `params/w@GRAD.block0.trainer_1`.

        Args:
          trainer_id: index of the trainer.
          trainers: number of trainers; for 1, the name has no suffix for the trainer.
        """
        return _from_trainer(self.named(self.leaf + GRAD), trainer_id, trainers)

    def gradients(self, trainers: int, op: str) -> BlockGradient:
        """Describe how a server merges the trainers' gradients of this block.

        Args:
          trainers: number of trainers.
          op: "mean" or "sum".
        """
        sent = {k: self.gradient(k, trainers) for k in range(trainers)}
        return BlockGradient(self.gradient(0, 1), self.leaf, self.index, sent, op)


def argument(name: str, trainers: int) -> BlockGradient:
    """Describe how a server receives an argument of the training step from the trainers.

    An example is a learning rate that the caller passes to each step. All trainers send the same
    value. If the argument is `rate`, trainer 1 sends it under the name `rate@ARG.trainer_1`.

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
    """Blocks that a server must update together.

    A unit is usually one block. If an equation of the optimizer combines several parameters, these
    parameters are not divided, and form one unit.
    """

    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """Name of the first block."""
        return self.blocks[0].name

    @property
    def span(self) -> RowSet | None:
        """Rows of the parameter that these blocks have; None if they are full parameters."""
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
    """Assignment of all blocks to parameter servers.

    A block is a range of rows of one parameter.

    Attributes:
      endpoints: the addresses of the servers, in order.
      blocks: maps each parameter to its blocks.
      groups: for each parameter that cannot be divided, its group: the parameters that are updated
        together (`dtrans.rows.analysis.Group`).
      order: all parameters that can be divided, in the order in which they were assigned to
        servers.
    """

    endpoints: tuple[str, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    groups: Mapping[str, Group]
    order: tuple[str, ...] = ()

    @cached_property
    def units(self) -> dict[str, tuple[Unit, ...]]:
        """Units of each server: lists of blocks that the server updates together."""
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
    def reasons_unsliced(self) -> dict[str, str]:
        """Parameters that cannot be divided into rows, each with the reason."""
        return {n: g.reason or TIED for n, g in self.groups.items()}

    @cached_property
    def all_blocks(self) -> tuple[Block, ...]:
        """All blocks of all parameters, in one tuple."""
        return tuple(b for blocks in self.blocks.values() for b in blocks)

    def map(self, fn: Callable[[Block], Block]) -> Placement:
        """Return a placement with changed blocks, such as blocks with other servers.

        Args:
          fn: function that returns the block to use in place of a block.
        """
        changed = {leaf: tuple(map(fn, blocks)) for leaf, blocks in self.blocks.items()}
        return dataclasses.replace(self, blocks=changed)
