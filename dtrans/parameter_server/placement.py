"""Placement: the server of each block of rows of each leaf.

`place` joins the row analysis (leaves that may be cut), Paddle's slice rule (sizes of blocks) and a
dispatcher (servers). Leaves that may not be cut stay whole. Leaves that their optimizer ties
together go to one server: the one that holds the fewest bytes by then.

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
from dtrans.rows.analysis import Group, RowAnalysis
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

    Leaves with `buckets` (name to how many) are cut into as many blocks as there are servers, of a
    run of buckets each, in the order of the servers, whatever the options are. With
    `slice_var_up="require"` every other leaf must be one that can be cut. With False no other is
    cut, and leaves are dispatched in an order shuffled by `seed`, from a generator of its own:
    NumPy's global one is not touched.

    Raises:
      ConfigError: a dispatcher that answers with something else than one known endpoint for each
        block.
      OptimizerError: with `slice_var_up="require"`, an optimizer that does not let a leaf be cut.
    """
    bound = {
        n: g for n, g in analysis.groups.items() if n in leaves and (len(g.leaves) > 1 or g.reason)
    }
    if options.slice_var_up == "require" and bound:
        listed = "; ".join(f"{n}: {g.reason or TIED}" for n, g in list(bound.items())[:5])
        more = f"; and {len(bound) - 5} more" if len(bound) > 5 else ""
        raise OptimizerError(
            "slice_var_up='require', but the optimizer does not let these leaves be cut: "
            f"{listed}{more}. Give them "
            "another optimizer (optax.multi_transform), or let them live whole on one server "
            "(slice_var_up=True)"
        )
    buckets = buckets or {}
    free = [n for n in leaves if n not in bound and n not in buckets]
    if not options.slice_var_up:
        np.random.RandomState(options.seed).shuffle(free)
    parts = len(endpoints) if options.slice_var_up else 1
    blocks = [b for n in free for b in _cut(n, leaves[n], parts, options.min_block_size)]
    tied = [
        Unit(tuple(Block.from_leaf(m, leaves[m]) for m in bound[n].leaves))
        for n in leaves
        if _leads(n, bound)
    ]
    nowhere = Placement(tuple(endpoints), dict.fromkeys(leaves, ()), bound, tuple(free))
    dealt = [b for n, count in buckets.items() for b in _dealt(n, leaves[n], count, endpoints)]
    return _placed(nowhere, options.split_method, blocks, tied, dealt)


def dispatched(placement: Placement, split_method: type[PSDispatcher]) -> Placement:
    """Move the blocks to the servers that another dispatcher chooses.

    Raises:
      ConfigError: something that is not a dispatcher, or one that answers with something else than
        one known endpoint for each block.
    """
    check_dispatcher(split_method)
    members = {u.name: u for units in placement.units.values() for u in units}
    tied = [members[n] for n in placement.blocks if n in placement.unsliced and n in members]
    blocks = [
        dataclasses.replace(b, endpoint="")
        for leaf in placement.order
        for b in placement.blocks[leaf]
    ]
    fixed = [
        n for n in placement.blocks if n not in placement.unsliced and n not in placement.order
    ]
    return _placed(
        placement, split_method, blocks, tied, [b for n in fixed for b in placement.blocks[n]]
    )


def _leads(leaf: str, bound: Mapping[str, Group]) -> bool:
    """Return True if a leaf is the first of its group."""
    return leaf in bound and bound[leaf].leaves[0] == leaf


def _placed(
    old: Placement,
    split_method: type[PSDispatcher],
    blocks: Sequence[Block],
    tied: Sequence[Unit],
    fixed: Sequence[Block],
) -> Placement:
    """A placement of the same leaves: `blocks` where the dispatcher has them, in this order, what
    is `tied`, and blocks that are where they are."""
    dispatcher = split_method(list(old.endpoints))
    balanced = dispatcher if isinstance(dispatcher, SizeBalanced) else SizeBalanced(old.endpoints)
    at: dict[str, list[Block]] = {n: [] for n in old.blocks}
    for b in fixed:
        at[b.leaf].append(b)
        balanced.give(b.nbytes, b.endpoint)

    def give_tied() -> None:
        for unit in sorted(tied, key=lambda u: -u.nbytes):
            endpoint = balanced.give(unit.nbytes)
            for b in unit.blocks:
                at[b.leaf].append(dataclasses.replace(b, endpoint=endpoint))

    if balanced is dispatcher:
        give_tied()
    answers = _answer(dispatcher, blocks, old.endpoints)
    if balanced is not dispatcher:
        _check_again(lambda: split_method(old.endpoints), blocks, old.endpoints, answers)
    for b, endpoint in zip(blocks, answers, strict=True):
        at[b.leaf].append(dataclasses.replace(b, endpoint=endpoint))
        if balanced is not dispatcher:
            balanced.give(b.nbytes, endpoint)
    if balanced is not dispatcher:
        give_tied()
    return dataclasses.replace(old, blocks={n: tuple(parts) for n, parts in at.items()})


def _check_again(
    make: Callable[[], PSDispatcher],
    blocks: Sequence[Block],
    endpoints: Sequence[str],
    first: Sequence[str],
) -> None:
    """Raise ConfigError for a dispatcher that answers otherwise when it is asked again.

    Each process of a job plans for itself, so that all have to be answered alike.
    """
    dispatcher = make()
    for b, one, other in zip(blocks, first, _answer(dispatcher, blocks, endpoints), strict=True):
        if one != other:
            raise ConfigError(
                f"{type(dispatcher).__name__}.dispatch placed {b.name} on {one}, and on {other} "
                "when it was asked "
                "again: processes that plan alike would look for it in different places. It may "
                "depend on the blocks "
                "and the endpoints alone"
            )


def _answer(
    dispatcher: PSDispatcher, blocks: Sequence[Block], endpoints: Sequence[str]
) -> list[str]:
    """Ask a dispatcher once. Raises ConfigError for an invalid answer."""
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


def _dealt(name: str, aval: Any, count: int, endpoints: Sequence[str]) -> list[Block]:
    """Return the blocks of a leaf in buckets: a run of buckets for each server."""
    rows, *row = aval.shape
    count = min(count, rows)
    parts = min(count, len(endpoints))
    runs = [
        RowBuckets(count * i // parts, count * (i + 1) // parts, count, rows) for i in range(parts)
    ]
    blocks = enumerate(zip(runs, endpoints, strict=False))
    return [Block(name, i, parts, run, (run.rows, *row), aval.dtype, ep) for i, (run, ep) in blocks]


def _cut(name: str, aval: Any, slice_count: int, min_block_size: int) -> list[Block]:
    """Return the blocks of one leaf, by Paddle's rule, as rows."""
    shape = tuple(aval.shape)
    if not shape:
        return [Block.from_leaf(name, aval)]
    sizes = [
        b.size
        for b in slice_variable(
            [SimpleNamespace(name=name, shape=shape)], slice_count, min_block_size
        )
    ]
    width = math.prod(shape[1:])
    if not width or len(sizes) == 1:
        return [Block.from_leaf(name, aval)]
    blocks, start = [], 0
    for i, size in enumerate(sizes):
        rows = size // width
        blocks.append(
            Block(
                name, i, len(sizes), RowRange(start, start + rows), (rows, *shape[1:]), aval.dtype
            )
        )
        start += rows
    return blocks
