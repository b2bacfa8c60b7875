"""Placement: the server of each block of each leaf.

`place` combines three rules. Row analysis finds the leaves that may be cut, Paddle's slice rule the
sizes of blocks, and a dispatcher the servers. Other leaves stay whole. Leaves that their optimizer
ties together form a unit, and each unit goes to the server with the fewest bytes so far.

Blocks do not depend on the dispatcher: `dispatched` moves the same blocks to other servers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from dtrans.errors import ConfigError, OptimizerError
from dtrans.parameter_server.dispatch import (
    PSDispatcher,
    SizeBalanced,
    check_dispatcher,
    slice_variable,
)
from dtrans.parameter_server.options import BlockPlacement
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.row_buckets import RowBuckets
from dtrans.rows.writer import RowRange
from dtrans.slicing.blocks import TIED, Block, Placement, Unit


def place(
    analysis: RowAnalysis,
    leaves: Mapping[str, Any],
    endpoints: Sequence[str],
    options: BlockPlacement,
    buckets: Mapping[str, int] | None = None,
) -> Placement:
    """Cut `leaves` (name to type, in leaf order) and place the blocks on `endpoints`.

    Args:
      buckets: leaf to its number of buckets of rows. Each server gets a run of buckets, in the
        order of the servers, whatever the options are.
      options: with `slice_var_up="require"` every other leaf must be one that can be cut. With
        False no other leaf is cut, and leaves are dispatched in an order shuffled by `seed`. The
        shuffle leaves NumPy's global generator unchanged.

    Raises:
      ConfigError: the dispatcher does not return one known endpoint for each block.
      OptimizerError: with `slice_var_up="require"`, the optimizer does not let a leaf be cut.
    """
    buckets = buckets or {}
    bound = {}
    for n, group in analysis.groups.items():
        if n in leaves and (len(group.leaves) > 1 or group.reason):
            bound[n] = group
    if options.slice_var_up == "require" and bound:
        reasons = [f"{n}: {group.reason or TIED}" for n, group in bound.items()]
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise OptimizerError(
            "slice_var_up='require', but the optimizer does not let these leaves be cut: "
            f"{'; '.join(reasons[:5])}{more}. Give them another optimizer (optax.multi_transform), "
            "or let them stay whole on one server (slice_var_up=True)"
        )

    free = [n for n in leaves if n not in bound and n not in buckets]
    if not options.slice_var_up:
        np.random.RandomState(options.seed).shuffle(free)
    parts = len(endpoints) if options.slice_var_up else 1
    blocks = []
    for n in free:
        blocks += _cut(n, leaves[n], parts, options.min_block_size)
    tied = []
    for n in leaves:
        if n in bound and bound[n].leaves[0] == n:
            tied.append(Unit(tuple(Block.from_leaf(m, leaves[m]) for m in bound[n].leaves)))
    fixed = []
    for n, count in buckets.items():
        fixed += _bucket_blocks(n, leaves[n], count, endpoints)
    unplaced = Placement(tuple(endpoints), dict.fromkeys(leaves, ()), bound, tuple(free))
    return _assign(unplaced, options.split_method, blocks, tied, fixed)


def dispatched(placement: Placement, split_method: type[PSDispatcher]) -> Placement:
    """Return the placement of the same blocks by another dispatcher.

    Raises:
      ConfigError: the class is not a dispatcher, or does not return one known endpoint for each
        block.
    """
    check_dispatcher(split_method)
    unit_by_name = {u.name: u for units in placement.units.values() for u in units}
    blocks: list[Block] = []
    for leaf in placement.order:
        blocks += [dataclasses.replace(b, endpoint="") for b in placement.blocks[leaf]]
    tied: list[Unit] = []
    fixed: list[Block] = []  # blocks of buckets stay on their servers
    for leaf in placement.blocks:
        if leaf in placement.unsliced:
            # a unit has the name of its first leaf
            if leaf in unit_by_name:
                tied.append(unit_by_name[leaf])
        elif leaf not in placement.order:
            fixed += placement.blocks[leaf]
    return _assign(placement, split_method, blocks, tied, fixed)


def _assign(
    old: Placement,
    split_method: type[PSDispatcher],
    blocks: Sequence[Block],
    tied: Sequence[Unit],
    fixed: Sequence[Block],
) -> Placement:
    """Return a placement of the same leaves.

    Args:
      blocks: blocks for the dispatcher, in its order.
      tied: units, which go to the servers with the fewest bytes.
      fixed: blocks that stay on their servers.
    """
    dispatcher = split_method(list(old.endpoints))
    balanced = dispatcher if isinstance(dispatcher, SizeBalanced) else SizeBalanced(old.endpoints)
    is_balanced = balanced is dispatcher
    blocks_of: dict[str, list[Block]] = {n: [] for n in old.blocks}
    for b in fixed:
        blocks_of[b.leaf].append(b)
        balanced.assign(b.nbytes, b.endpoint)

    def assign_tied() -> None:
        for unit in sorted(tied, key=lambda u: -u.nbytes):
            endpoint = balanced.assign(unit.nbytes)
            for b in unit.blocks:
                blocks_of[b.leaf].append(dataclasses.replace(b, endpoint=endpoint))

    # SizeBalanced evens out the large units; after other dispatchers, units even out the blocks
    if is_balanced:
        assign_tied()
    answers = _answer(dispatcher, blocks, old.endpoints)
    if not is_balanced:
        _check_again(lambda: split_method(old.endpoints), blocks, old.endpoints, answers)
    for b, endpoint in zip(blocks, answers, strict=True):
        blocks_of[b.leaf].append(dataclasses.replace(b, endpoint=endpoint))
        if not is_balanced:
            balanced.assign(b.nbytes, endpoint)
    if not is_balanced:
        assign_tied()
    return dataclasses.replace(old, blocks={n: tuple(found) for n, found in blocks_of.items()})


def _check_again(
    make: Callable[[], PSDispatcher],
    blocks: Sequence[Block],
    endpoints: Sequence[str],
    first: Sequence[str],
) -> None:
    """Raise ConfigError for a dispatcher whose second call returns other servers.

    Each process of a job plans for itself, and all plans must agree.
    """
    dispatcher = make()
    for b, one, other in zip(blocks, first, _answer(dispatcher, blocks, endpoints), strict=True):
        if one != other:
            raise ConfigError(
                f"{type(dispatcher).__name__}.dispatch placed {b.name} on {one}, and on {other} "
                "when it was called again, so the plans of processes would disagree; let its "
                "result depend on the blocks and the endpoints alone"
            )


def _answer(
    dispatcher: PSDispatcher, blocks: Sequence[Block], endpoints: Sequence[str]
) -> list[str]:
    """Call a dispatcher once; raise ConfigError for an invalid result."""
    name, known = f"{type(dispatcher).__name__}.dispatch", ", ".join(endpoints)
    answer: Any = dispatcher.dispatch(blocks)
    answers = list(answer) if isinstance(answer, Iterable) else []
    if len(answers) != len(blocks):
        raise ConfigError(
            f"{name} gave {answer!r} for {len(blocks)} blocks; it must give one of {known} for each"
        )
    for b, endpoint in zip(blocks, answers, strict=True):
        if endpoint not in endpoints:
            raise ConfigError(
                f"{name} placed {b.name} on {endpoint!r}; it must give one of {known} for each "
                "block"
            )
    return answers


def _bucket_blocks(name: str, aval: Any, count: int, endpoints: Sequence[str]) -> list[Block]:
    """Return the blocks of a leaf in buckets: a run of buckets for each server."""
    rows, *row_shape = aval.shape
    count = min(count, rows)
    parts = min(count, len(endpoints))
    blocks = []
    for i, endpoint in enumerate(endpoints[:parts]):
        run = RowBuckets(count * i // parts, count * (i + 1) // parts, count, rows)
        shape = (run.rows, *row_shape)
        blocks.append(Block(name, i, parts, run, shape, aval.dtype, endpoint))
    return blocks


def _cut(name: str, aval: Any, slice_count: int, min_block_size: int) -> list[Block]:
    """Return the blocks of one leaf, by Paddle's rule, as ranges of rows."""
    shape = tuple(aval.shape)
    if not shape:
        return [Block.from_leaf(name, aval)]
    leaf = SimpleNamespace(name=name, shape=shape)
    sizes = [b.size for b in slice_variable([leaf], slice_count, min_block_size)]
    width = math.prod(shape[1:])
    if not width or len(sizes) == 1:
        return [Block.from_leaf(name, aval)]
    blocks, start = [], 0
    for i, size in enumerate(sizes):
        rows = size // width
        span = RowRange(start, start + rows)
        blocks.append(Block(name, i, len(sizes), span, (rows, *shape[1:]), aval.dtype))
        start += rows
    return blocks
