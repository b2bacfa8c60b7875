"""A server's update of the rows of tables that trainers have asked for: rows are taken out,
updated, and put back.

A server in a process of its own has tables in NumPy's memory, which is written again
(`dtrans.run.parameter_server.tables.table_memory`). On a mesh a table is an array on the device of
its server; with rows put back it is a new one, in the memory of the old where that is donated. An
update is made for a few numbers of rows (`room_for`), and so are the functions that take rows and
put them back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.parameter_server.tables.touched_rows import TableBlock, room_for
from dtrans.protocol.exchange import Exchange
from dtrans.protocol.served import RowGradient, Vectors
from dtrans.protocol.tables.table_rows import sorted_once
from dtrans.run.parameter_server.tables.table_memory import among
from dtrans.run.parameter_server.update import CompiledUpdate


Rows = Mapping[str, Any]


class RowUpdates:
    """The updates of a server that has tables, or none.

    Args:
      tables: its blocks of tables.
      taken: gives rows of a block and of its state, and zeros behind them, of the state.
      put_back: gives what there is of a block and of its state, with rows put back.
    """

    def __init__(
        self,
        tables: Mapping[str, TableBlock],
        taken: Callable[[TableBlock, np.ndarray, int, Rows], Rows],
        put_back: Callable[[TableBlock, np.ndarray, Rows, Rows], Rows],
    ) -> None:
        self._tables, self._taken, self._put_back = tables, taken, put_back
        self._by_rows = {n: t for n, t in tables.items() if not t.updates_all}
        self._room: dict[str, int] = {}  # of blocks: the rows that an update is made for

    def run(
        self,
        compiled: Callable[[Mapping[str, int]], CompiledUpdate],
        grads: Rows,
        present: Collection[int],
        state: Rows,
        watched: dict[str, Any] | None = None,
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Make a step, as `CompiledUpdate.run` does.

        Args:
          compiled: gives the update of so many rows of each block.
          grads: what trainers have sent; of tables `RowGradient`s.
          present: the trainers whose gradients count.
          watched: as of `CompiledUpdate.run`.
        """
        ids = {n: all_ids(t, grads, present) for n, t in self._by_rows.items()}
        sizes = self._room_for(ids)
        update = compiled(sizes)
        given = {n: x for n, x in grads.items() if n in update.update.grad_types}
        for n, t in self._tables.items():
            numbers, size = (np.arange(t.rows), t.rows) if t.updates_all else (ids[n], sizes[n])
            given |= {g: among(numbers, size, given[g]) for g in t.gradients.values() if g in given}
        read = dict(state)
        for n, t in self._by_rows.items():
            read |= self._taken(t, ids[n], sizes[n], state)
        made = yield from update.run(given, read, watched)
        for n, t in self._by_rows.items():
            made |= self._put_back(t, ids[n], made, state)
        return made

    def _room_for(self, ids: Mapping[str, np.ndarray]) -> dict[str, int]:
        """For how many rows of each block an update is made.

        One is made for the numbers of all blocks: were each to follow its own up and down, there
        would be no end of them. So room that is there stays, and where it does not suffice later
        all get a fourth more than they need. It may be more than a block has.
        """
        if not self._room:
            self._room = {n: room_for(len(x)) for n, x in ids.items()}
        elif any(len(x) > self._room[n] for n, x in ids.items()):
            self._room = {n: max(self._room[n], room_for(len(x) * 5 // 4)) for n, x in ids.items()}
        return dict(self._room)


def all_ids(
    table: TableBlock, grads: Mapping[str, RowGradient], present: Collection[int]
) -> np.ndarray:
    """Return the rows of a block that some trainers have asked for."""
    ids = [grads[table.gradients[k]].ids for k in sorted(present)]
    return ids[0] if len(ids) == 1 else sorted_once(np.concatenate(ids))


# -- tables on devices -----------------------------------------------------------------------------


def taken_there(table: TableBlock, ids: np.ndarray, size: int, state: Rows) -> dict[str, jax.Array]:
    """Rows of a block and of its state, and zeros behind them: `size` rows of each, on the
    device."""
    return taken_at(table, room_after(ids, size, table.rows), state)


def taken_at(table: TableBlock, at: Any, state: Rows) -> dict[str, jax.Array]:
    """Return rows of a block and of its state by their numbers; zeros for numbers that it does not
    have."""
    return {n: _take(state[n], at) for n in table.arrays}


def put_at(table: TableBlock, at: Any, made: Rows, state: Rows) -> dict[str, jax.Array]:
    """Return a block and its state with rows put back by their numbers."""
    return {n: _put(state[n], at, made[n]) for n in table.arrays}


def put_there(
    table: TableBlock, ids: np.ndarray, made: Rows, state: Rows, *, donate: bool = True
) -> dict[str, jax.Array]:
    """A block and its state with rows put back; with `donate` what was before is gone."""
    put = _put_donated if donate else _put
    return {
        n: put(state[n], room_after(ids, len(made[n]), table.rows), made[n]) for n in table.arrays
    }


def fetched(block: jax.Array, ids: np.ndarray) -> np.ndarray:
    """Rows of an array on a device, on the host."""
    size = room_for(len(ids))
    return np.asarray(_take(block, room_after(ids, size, len(block))))[: len(ids)]


def room_after(ids: np.ndarray, size: int, rows: int) -> np.ndarray:
    """Return numbers of rows, and behind them that of none."""
    return np.concatenate([ids, np.full(size - len(ids), rows)]).astype(np.int32)


@jax.jit
def _take(block: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(block, ids, 0, mode="fill", fill_value=0)


def _with(block: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return block.at[ids].set(rows, mode="drop")


_put = jax.jit(_with)
_put_donated = jax.jit(_with, donate_argnums=0)
