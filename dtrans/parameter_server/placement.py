"""Placement: the choice of a server for each block of each leaf.

A leaf is an array of the parameter pytree, and a block is a range of its rows. `place` has three
steps. It finds the leaves that may be cut into blocks: those that the optimizer updates row by row.
It computes the sizes of blocks by Paddle's slice rule. Then a dispatcher chooses the server of each
block.

All other leaves stay uncut. If the optimizer updates several leaves together, these leaves form a
unit on one server. Each unit is placed on the server with the fewest bytes so far.

Blocks do not depend on the dispatcher: `dispatched` assigns the same blocks with another
dispatcher.
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
    """Cut leaves into blocks, and choose a server for each block.

    Args:
      analysis: the analysis that finds the leaves that the update changes row by row.
      leaves: type of each leaf, by name, in leaf order.
      endpoints: endpoints of the servers.
      options: rules for all leaves that are not in `buckets`.
      buckets: for each table with `dtrans.Rows(place="bucket")`, the number of buckets, by name.
        (Row n is in bucket n % buckets.) Each server gets a contiguous range of buckets, in the
        order of `endpoints`.

    Raises:
      ConfigError: the dispatcher does not return one known endpoint for each block.
      OptimizerError: `slice_var_up` is "require", and the optimizer cannot update a leaf in blocks.
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
            "slice_var_up is 'require', but the optimizer cannot update these leaves in blocks: "
            f"{'; '.join(reasons[:5])}{more}. Use another optimizer for them "
            "(optax.multi_transform), or pass slice_var_up=True, which leaves them whole"
        )

    free = [n for n in leaves if n not in bound and n not in buckets]
    slice_count = len(endpoints)
    if not options.slice_var_up:
        # A separate generator leaves NumPy's global generator unchanged.
        np.random.RandomState(options.seed).shuffle(free)
        slice_count = 1
    blocks = []
    for n in free:
        blocks += _cut(n, leaves[n], slice_count, options.min_block_size)
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
    """Return a placement of the same blocks, with servers that another dispatcher chooses.

    `plan.compare` calls this function to compare dispatchers without planning again.

    Raises:
      ConfigError: `split_method` is not a dispatcher, or does not return one known endpoint for
        each block.
    """
    check_dispatcher(split_method)
    unit_by_name = {u.name: u for units in placement.units.values() for u in units}
    blocks: list[Block] = []
    for leaf in placement.order:
        blocks += [dataclasses.replace(b, endpoint="") for b in placement.blocks[leaf]]
    tied: list[Unit] = []
    fixed: list[Block] = []  # dispatchers do not choose the servers of buckets
    for leaf in placement.blocks:
        if leaf in placement.reasons_unsliced:
            # The leaves of a unit share one server. The unit has the name of its first leaf, so
            # this adds it once.
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
    """Return the placement `old` with newly chosen servers for its blocks.

    Args:
      old: the placement to copy.
      split_method: class of the dispatcher that chooses the servers.
      blocks: blocks to assign to servers, in the order in which the dispatcher gets them.
      tied: groups of leaves that the optimizer updates together. Each group is placed on the server
        with the fewest bytes.
      fixed: blocks that stay on their servers.
    """
    dispatcher = split_method(list(old.endpoints))
    is_balanced = isinstance(dispatcher, SizeBalanced)
    balanced = dispatcher if isinstance(dispatcher, SizeBalanced) else SizeBalanced(old.endpoints)
    blocks_of: dict[str, list[Block]] = {n: [] for n in old.blocks}
    for b in fixed:
        blocks_of[b.leaf].append(b)
        balanced.assign(b.nbytes, b.endpoint)

    def assign_tied() -> None:
        for unit in sorted(tied, key=lambda u: -u.nbytes):
            endpoint = balanced.assign(unit.nbytes)
            for b in unit.blocks:
                blocks_of[b.leaf].append(dataclasses.replace(b, endpoint=endpoint))

    # SizeBalanced places the (large) units first, so that blocks even out the loads. Other
    # dispatchers ignore loads, so units come last, and even out the loads of the blocks.
    if is_balanced:
        assign_tied()
    answers = _choose_servers(dispatcher, blocks, old.endpoints)
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
    """Raise ConfigError if a second dispatcher of the same class chooses other servers.

    Each process of a job computes the plan separately, and all plans must be equal. So a dispatcher
    must not choose at random.
    """
    dispatcher = make()
    for b, one, other in zip(
        blocks, first, _choose_servers(dispatcher, blocks, endpoints), strict=True
    ):
        if one != other:
            raise ConfigError(
                f"{type(dispatcher).__name__}.dispatch returned {one} for {b.name} in a first call "
                f"and {other} in a second, but all processes must compute equal plans; its result "
                "must depend on the blocks and the endpoints alone"
            )


def _choose_servers(
    dispatcher: PSDispatcher, blocks: Sequence[Block], endpoints: Sequence[str]
) -> list[str]:
    """Return the servers that a dispatcher chooses; raise ConfigError for an invalid result."""
    name, known = f"{type(dispatcher).__name__}.dispatch", ", ".join(endpoints)
    answer: Any = dispatcher.dispatch(blocks)
    answers = list(answer) if isinstance(answer, Iterable) else []
    if len(answers) != len(blocks):
        raise ConfigError(
            f"{name} returned {answer!r} for {len(blocks)} blocks; expected one of {known} for "
            "each block"
        )
    for b, endpoint in zip(blocks, answers, strict=True):
        if endpoint not in endpoints:
            raise ConfigError(f"{name} returned {endpoint!r} for {b.name}; expected one of {known}")
    return answers


def _bucket_blocks(name: str, aval: Any, count: int, endpoints: Sequence[str]) -> list[Block]:
    """Return the blocks of a table in which row n belongs to bucket n % count.

    Each server gets a contiguous range of buckets.

    Args:
      name: name of the table.
      aval: type of the full table.
      count: the number of buckets, at most the number of rows.
      endpoints: endpoints of the servers.
    """
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
    """Return the blocks of one leaf as ranges of rows, with the sizes that Paddle's rule gives."""
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
