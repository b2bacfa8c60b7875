"""Row ids that a step looks up in a table, and their distribution over the table's servers.

A table is divided into *blocks* of rows, each on one server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.errors import BatchError
from dtrans.ir.selection import values_at
from dtrans.protocol.server_blocks import RowGradient


# Lookup in one block: the server's endpoint, the block's name, increasing row ids in the block, and
# the memory that receives the rows.
WantedRows = tuple[str, str, np.ndarray, np.ndarray]

Arrays = dict[str, np.ndarray]  # arrays by name of a block

# A block's part of sorted row ids of its table: the positions of these rows, and their ids in the
# block
BlockPart = tuple[slice | np.ndarray, np.ndarray]


INT32 = (-(2**31), 2**31 - 1)  # smallest and largest 32-bit integer
_WIDE = "JAX truncates ids to 32 bits; pass ids of at most 32 bits"
_REMEDIES = {
    "error": "For ids that stand for no row, write jnp.take(..., mode='fill', fill_value=0)",
    "clip": _WIDE,
    "drop": _WIDE,
}


def unique_ids(
    ids: Sequence[Any],
    *,
    table: str,
    rows: int,
    size: int,
    outside: Sequence[str] = (),
    whose: str = "",
) -> np.ndarray:
    """Return the sorted row ids that a step looks up, each once, padded to a fixed length.

    A compiled step needs a fixed length. For example, take the lookups [2, 5] and [2, 0] in a table
    of 9 rows, and `size=4`. The result is [0, 2, 5, 9], where 9 is padding.

    Args:
      ids: array of row ids of each lookup.
      table: name of the table, for errors.
      rows: number of rows of the table.
      size: length of the result. The result is padded with the value `rows`.
      outside: for each lookup, the treatment of 32-bit ids outside the table: "error", "clip" to
        the nearest row, or "drop". By default, all of them are errors.
      whose: words that name the owner of the ids in errors, such as " of trainer 1's part".

    Raises:
      BatchError: a row id is outside the table, or is not an integer. Or there are more than `size`
        different row ids. This happens if a custom_vjp returns gradients of rows that the forward
        pass does not read.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.table_rows import unique_ids
      >>> unique_ids([np.array([[2, 5], [2, 0]])], table="params/emb", rows=9, size=4)
      array([0, 2, 5, 9], dtype=int32)
      >>> wrong = np.array([[2, 5], [2, 9]])
      >>> unique_ids([wrong], table="params/emb", rows=9, size=4)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      dtrans.errors.BatchError: lookup 0 of params/emb asks for row 9 at [1, 1]; the table has rows
        0 to 8...
    """
    parts = []
    for i, x in enumerate(map(np.asarray, ids)):
        parts.append(_sorted_ids(x, i, table, rows, outside[i] if outside else "error", whose))
    found = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
    found = drop_repeated(found)
    if len(found) > size:
        raise BatchError(
            f"the step computes gradients of {len(found)} rows of {table}{whose}, but reads at "
            f"most {size} rows; read each row whose gradient a custom_vjp computes, or leave "
            f"{table} out of sparse"
        )
    padded = np.empty(size, np.int32)
    padded[: len(found)] = found
    padded[len(found) :] = rows
    return padded


def _sorted_ids(
    x: np.ndarray, lookup: int, table: str, rows: int, outside: str, whose: str
) -> np.ndarray:
    """Return the sorted 32-bit row ids of one lookup, which may repeat ids (see `unique_ids`)."""
    if x.dtype.kind not in "iu":
        first = ""
        if x.size:
            first = f" {x.flat[0]} at [{', '.join('0' * x.ndim)}]{whose}"
        raise BatchError(
            f"lookup {lookup} of {table} has the row id{first} of dtype {x.dtype.name}, expected "
            "integers"
        )
    # Sorted ids have their smallest and largest id at the ends, so a check reads two numbers.
    found = np.sort(x.reshape(-1))
    if not len(found):
        return found.astype(np.int32)
    low, high = int(found[0]), int(found[-1])
    if low >= 0 and high < rows:
        return found.astype(np.int32, copy=False)
    # JAX truncates ids to 32 bits, so a larger id would select another row.
    least, most = (0, rows - 1) if outside == "error" else INT32
    if low < least or high > most:
        at = np.unravel_index(np.argmax((x < least) | (x > most)), x.shape)
        raise BatchError(
            f"lookup {lookup} of {table} asks for row {x[at]} at "
            f"[{', '.join(map(str, at))}]{whose}; the table has rows 0 to {rows - 1} "
            "(negative ids of your batch, which count from the end, are converted before this "
            "check). "
            f"{_REMEDIES[outside]}"
        )
    found = found.astype(np.int32)
    if outside == "drop":
        return found[np.searchsorted(found, 0) : np.searchsorted(found, rows)]
    return np.clip(found, 0, rows - 1)


def sorted_once(numbers: np.ndarray) -> np.ndarray:
    """Return the sorted unique integers of a flat array.

    `numpy.unique` takes ten times as long, because it uses a hash table.
    """
    return drop_repeated(np.sort(numbers))


def drop_repeated(numbers: np.ndarray) -> np.ndarray:
    """Return sorted integers without repetitions."""
    if not len(numbers):
        return numbers
    is_first = np.empty(len(numbers), bool)
    is_first[0] = True
    np.not_equal(numbers[1:], numbers[:-1], out=is_first[1:])
    return numbers[is_first]


def are_among(numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the numbers that `others` contains, like `numpy.isin`.

    The elements of each array must be sorted and unique.
    """
    if not len(others):
        return np.zeros(len(numbers), bool)
    return np.asarray(
        others[np.minimum(np.searchsorted(others, numbers), len(others) - 1)] == numbers
    )


class BlockRowSet(Protocol):
    """Interface to the rows of a table that one server stores (a block), for conversions of ids.

    A row has an id in the table, and another id in the block.
    """

    @property
    def rows(self) -> int:
        """Number of rows."""

    def among(self, ids: np.ndarray) -> slice | np.ndarray:
        """Return the positions in `ids` of the rows that this block contains.

        Args:
          ids: increasing row ids in the table.
        """

    def parts_of(self, ids: Sequence[np.ndarray]) -> Sequence[BlockPart]:
        """Select the rows of this block from row ids of several tables that are divided alike.

        Args:
          ids: for each table, increasing row ids in the table.

        Returns:
          For each table, the positions of the block's rows in the ids, and their ids in the block.
        """

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Convert row ids in the table to row ids in the block, for messages to its server."""

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Convert row ids in the block to row ids in the table, for messages from its server."""


@dataclasses.dataclass(frozen=True)
class RowRun:
    """Block of consecutive rows of a table.

    With `start=4`, row 6 of the table is row 2 of the block.

    Attributes:
      start: id of the first row in the table.
      rows: number of rows.
    """

    start: int
    rows: int

    def among(self, ids: np.ndarray) -> slice:
        """Return the positions of the block's rows in `ids`, which are increasing table row ids."""
        return slice(*np.searchsorted(ids, (self.start, self.start + self.rows)).tolist())

    def parts_of(self, ids: Sequence[np.ndarray]) -> list[BlockPart]:
        """Select the rows of this block from increasing row ids of several tables."""
        return [(at := self.among(x), x[at] - self.start) for x in ids]

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Convert row ids in the table to row ids in the block."""
        return ids - self.start

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Convert row ids in the block to row ids in the table."""
        return places + self.start


def runs_of(sections: Sequence[int]) -> list[RowRun]:
    """Divide a table into adjacent blocks with the given numbers of rows, from row 0 on."""
    runs, start = [], 0
    for rows in sections:
        runs.append(RowRun(start, rows))
        start += rows
    return runs


def block_parts(
    ids: Sequence[np.ndarray], spans: Sequence[Sequence[BlockRowSet]]
) -> list[list[BlockPart]]:
    """Divide a step's row ids of several tables among the blocks that store the rows.

    A block has some rows of a table, and is on one server. Tables that are divided in the same way
    are handled together, because the overhead of a NumPy call is large for small tables.

    Args:
      ids: for each table, increasing row ids. Ids after the table's last row are padding.
      spans: for each table, the set of its rows that each block contains.

    Returns:
      For each table, one part per block: the positions of the block's rows in the ids, and their
        ids in the block.
    """
    found: list[list[BlockPart]] = [[] for _ in ids]
    alike: dict[Sequence[BlockRowSet], list[int]] = {}
    for i, blocks in enumerate(spans):
        alike.setdefault(tuple(blocks), []).append(i)
    for blocks, tables in alike.items():
        rows = values_at(ids, tables)
        for span in blocks:
            for i, part in zip(tables, span.parts_of(rows), strict=True):
                found[i].append(part)
    return found


def wanted_of(
    rows: np.ndarray,
    *,
    epmap: Sequence[str],
    names: Sequence[str],
    parts: Sequence[BlockPart],
) -> list[WantedRows]:
    """Split a lookup of table rows into one request per block; each block is on one server.

    The rows that arrive are written into `rows`. If the rows of a block are consecutive in `rows`,
    they are received in place. Otherwise they are received in separate memory, and `put_in_place`
    copies them.

    Args:
      rows: memory for the rows. The rows of padding are set to zero.
      epmap: endpoint of each block's server.
      names: name of each block.
      parts: each block's part of the row ids (see `block_parts`).

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.table_rows import block_parts, runs_of, wanted_of
      >>> (parts,) = block_parts([np.array([0, 5, 9])], [runs_of((4, 5))])
      >>> names = ("emb.block0", "emb.block1")
      >>> wanted = wanted_of(np.ones((3, 2)), epmap=("here", "there"), names=names, parts=parts)
      >>> [(ep, name, ids.tolist(), len(x)) for ep, name, ids, x in wanted]
      [('here', 'emb.block0', [0], 1), ('there', 'emb.block1', [1], 1)]
    """
    # Each row is in one block, and padding comes after the rows.
    rows[sum(len(ids) for _, ids in parts) :] = 0
    wanted = []
    for endpoint, name, (at, ids) in zip(epmap, names, parts, strict=True):
        memory = (
            rows[at] if isinstance(at, slice) else np.empty((len(at), *rows.shape[1:]), rows.dtype)
        )
        wanted.append((endpoint, name, ids, memory))
    return wanted


def by_server(wanted: Sequence[WantedRows]) -> dict[str, tuple[Arrays, Arrays]]:
    """Group the parts of a lookup by server, so that each server gets one message.

    Returns:
      For each server's endpoint, the row ids and the memory for the rows, both by the block's name.
    """
    found: dict[str, tuple[Arrays, Arrays]] = {}
    for endpoint, name, ids, rows in wanted:
        blocks, memory = found.setdefault(endpoint, ({}, {}))
        blocks[name], memory[name] = ids, rows
    return found


def put_in_place(
    rows: np.ndarray, wanted: Sequence[WantedRows], parts: Sequence[BlockPart]
) -> None:
    """Copy received rows from separate memory to their places in `rows` (see `wanted_of`).

    Args:
      rows, parts: arguments of `wanted_of`.
      wanted: result of `wanted_of`.
    """
    for (*_, came), (at, _) in zip(wanted, parts, strict=True):
        if not isinstance(at, slice):
            rows[at] = came


def merged_rows(parts: Sequence[RowGradient], how: str) -> RowGradient:
    """Add up or average a table's gradients of several steps, which may have different rows.

    Args:
      parts: gradient of each step.
      how: "sum" or "mean". The mean divides by the number of steps, also for rows that occur in
        fewer steps.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.server_blocks import RowGradient
      >>> from dtrans.protocol.tables.table_rows import merged_rows
      >>> one, other = (RowGradient(np.array(ids), np.ones((2, 1))) for ids in ([1, 4], [0, 4]))
      >>> found = merged_rows([one, other], "mean")
      >>> found.ids.tolist(), found.rows.tolist()
      ([0, 1, 4], [[0.5], [0.5], [1.0]])
    """
    if len(parts) == 1:
        return parts[0]
    ids = sorted_once(np.concatenate([x.ids for x in parts]))
    rows = np.zeros((len(ids), *parts[0].rows.shape[1:]), parts[0].rows.dtype)
    # add in the order of the steps, because float sums depend on the order
    for x in parts:
        rows[np.searchsorted(ids, x.ids)] += x.rows
    if how == "mean":
        rows *= np.asarray(1 / len(parts), rows.dtype)
    return RowGradient(ids, rows)
