"""Which rows of which leaf live where.

`place` joins three things: the row analysis (what may be cut), Paddle's slice rule (into what) and a
dispatcher (on which server). Leaves that may not be cut go whole, and those that their optimizer ties
together go together, to the server that holds the fewest bytes by then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from dtrans.blocks import PSDispatcher, slice_variable
from dtrans.cut import GRAD
from dtrans.errors import ConfigError, OptimizerError
from dtrans.rows import RowAnalysis
from dtrans.writer import Span


TIED = "its update needs another leaf"


@dataclasses.dataclass(frozen=True)
class Block:
    """A run of rows of one leaf, on one server.

    Attributes:
      leaf: the path of the leaf, `params/dense/kernel`.
      index: the number of the block within the leaf.
      count: how many blocks the leaf has.
      span: its rows; None for a 0-d leaf.
      shape, dtype: of the block.
      endpoint: the server.
    """

    leaf: str
    index: int
    count: int
    span: Span | None
    shape: tuple[int, ...]
    dtype: Any
    endpoint: str = ""

    def named(self, base: str) -> str:
        """The name of something that is cut as this block is: `opt_state/0/mu/w` to `opt_state/0/mu/w.block0`."""
        return base if self.count == 1 else f"{base}.block{self.index}"

    @property
    def name(self) -> str:
        """`params/w.block0`, or `params/w` where there is only one."""
        return self.named(self.leaf)

    @property
    def rows(self) -> int:
        """Its number of rows; 1 for a 0-d leaf."""
        return self.span.rows if self.span else 1

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def gradient(self, trainer_id: int, trainers: int) -> str:
        """The name of its gradient from one trainer: `params/w@GRAD.block0.trainer_1` (Paddle's scheme)."""
        return self.named(self.leaf + GRAD) + (f".trainer_{trainer_id}" if trainers > 1 else "")


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one optimize block updates: one block, or the whole leaves of a group."""

    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """The name of its first block."""
        return self.blocks[0].name

    @property
    def span(self) -> Span | None:
        """The rows it has; None where it has whole leaves."""
        return self.blocks[0].span if self.blocks[0].count > 1 else None


@dataclasses.dataclass(frozen=True)
class Placement:
    """Every block and where it lives.

    Attributes:
      endpoints: the servers, in order.
      blocks: leaf to its blocks.
      units: server to what it updates, in leaf order.
      whole: leaf to the reason why it was not cut, for those that could have been.
    """

    endpoints: tuple[str, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    units: Mapping[str, tuple[Unit, ...]]
    whole: Mapping[str, str]

    @cached_property
    def table(self) -> tuple[Block, ...]:
        """All blocks, in leaf order."""
        return tuple(b for blocks in self.blocks.values() for b in blocks)


def place(
    analysis: RowAnalysis,
    leaves: Mapping[str, Any],
    endpoints: Sequence[str],
    *,
    slice_var_up: bool | str,
    split_method: type[PSDispatcher],
    min_block_size: int,
    seed: int = 0,
) -> Placement:
    """Cut `leaves` (name to type, in leaf order) and place the blocks on `endpoints`.

    With `slice_var_up="require"` every leaf must be one that can be cut. With False nothing is cut, and leaves are
    dispatched in an order shuffled by `seed`, from a generator of its own.

    Raises:
      ConfigError: a dispatcher that answers with something else than one known endpoint for each block.
      OptimizerError: with `slice_var_up="require"`, an optimizer that does not let a leaf be cut.
    """
    bound = {n: g for n, g in analysis.groups.items() if n in leaves and (len(g.leaves) > 1 or g.reason)}
    if slice_var_up == "require" and bound:
        listed = "; ".join(f"{n}: {g.reason or TIED}" for n, g in list(bound.items())[:5])
        more = f"; and {len(bound) - 5} more" if len(bound) > 5 else ""
        raise OptimizerError(
            f"slice_var_up='require', but the optimizer does not let these leaves be cut: {listed}{more}. Give them "
            "another optimizer (optax.multi_transform), or let them live whole on one server (slice_var_up=True)"
        )
    free = [n for n in leaves if n not in bound]
    if not slice_var_up:
        np.random.RandomState(seed).shuffle(free)
    dispatcher = split_method(list(endpoints))
    placed: dict[str, tuple[Block, ...]] = {}
    load = dict.fromkeys(endpoints, 0)
    for name in free:
        blocks = _cut(name, leaves[name], len(endpoints) if slice_var_up else 1, min_block_size)
        answer = list(dispatcher.dispatch(blocks))
        if len(answer) != len(blocks) or not set(answer) <= set(endpoints):
            raise ConfigError(
                f"{split_method.__name__}.dispatch placed the {len(blocks)} blocks of {name} on {answer}; "
                f"it must give one of {', '.join(endpoints)} for each block"
            )
        placed[name] = tuple(dataclasses.replace(b, endpoint=ep) for b, ep in zip(blocks, answer, strict=True))
        for b in placed[name]:
            load[b.endpoint] += b.nbytes
    groups = {g.leaves: [_cut(n, leaves[n], 1, 1)[0] for n in g.leaves] for g in bound.values()}
    for members in sorted(groups.values(), key=lambda bs: -sum(b.nbytes for b in bs)):
        endpoint = min(endpoints, key=load.__getitem__)
        for b in members:
            placed[b.leaf] = (dataclasses.replace(b, endpoint=endpoint),)
            load[endpoint] += b.nbytes

    for parts in placed.values():
        for b in parts:
            if b.name != b.leaf and b.name in leaves:
                raise ConfigError(f"{b.name} is a leaf, and would be the name of a block of {b.leaf}: rename the leaf")

    units: dict[str, list[Unit]] = {ep: [] for ep in endpoints}
    for name in leaves:
        if name not in bound:
            for b in placed[name]:
                units[b.endpoint].append(Unit((b,)))
        elif bound[name].leaves[0] == name:
            unit = Unit(tuple(placed[n][0] for n in bound[name].leaves))
            units[unit.blocks[0].endpoint].append(unit)
    return Placement(
        tuple(endpoints),
        {n: placed[n] for n in leaves},
        {ep: tuple(us) for ep, us in units.items()},
        {n: g.reason or TIED for n, g in bound.items()},
    )


def _cut(name: str, aval: Any, slice_count: int, min_block_size: int) -> list[Block]:
    """The blocks of one leaf, by Paddle's rule, as rows."""
    shape = tuple(aval.shape)
    if not shape:
        return [Block(name, 0, 1, None, (), aval.dtype)]
    sizes = [b.size for b in slice_variable([SimpleNamespace(name=name, shape=shape)], slice_count, min_block_size)]
    width = math.prod(shape[1:])
    if not width or len(sizes) == 1:
        return [Block(name, 0, 1, Span(0, shape[0]), shape, aval.dtype)]
    blocks, start = [], 0
    for i, size in enumerate(sizes):
        rows = size // width
        blocks.append(Block(name, i, len(sizes), Span(start, start + rows), (rows, *shape[1:]), aval.dtype))
        start += rows
    return blocks
