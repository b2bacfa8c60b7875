"""The steps that rows of a table have missed: each is made up for before the row is read.

Nobody looked a row up, and an optimizer moves it all the same: momentum goes on, moments and
weights decay. One device moves all rows in every step. A server keeps of each step what its update
read beside rows (counts, rates, a factor that clips), and makes the update of a row, with a
gradient of zero, once for every step that the row has missed. The numbers are those of one device;
memory is passed over once, and not once in each step.

Rows are made up for in runs of `WINDOW` steps, so that one program serves however many are missed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import evaluate
from dtrans.ops import BACKUP, OptimizeBlock
from dtrans.parameter_server.tables.touched_rows import LEAST, TableBlock, rooms
from dtrans.run.base.lowered import jitted_once
from dtrans.run.base.platforms import stable_bits_options
from dtrans.run.parameter_server.update import ServerUpdate


WINDOW = 256  # steps that one call makes up for
RESTS = np.iinfo(np.int64).max
KEPT = 1 << 26  # bytes that are kept of steps; then all rows are made up for

Arrays = Mapping[str, Any]


class StepRecords:
    """What updates of a table read beside rows, step by step.

    Args:
      types: name to type.

    Attributes:
      first: the number of the first step that is kept.
      now: how many steps there were.
    """

    def __init__(self, types: Arrays) -> None:
        self.first = self.now = 0
        self._types = types
        self._of = {n: self._room(t, WINDOW) for n, t in types.items()}

    @property
    def nbytes(self) -> int:
        """The memory that is taken."""
        return sum(x.nbytes for x in self._of.values())

    def add(self, values: Arrays) -> None:
        """Keep what a step has read."""
        at = self.now - self.first
        for n, x in self._of.items():
            if at == len(x):
                self._of[n] = np.concatenate([x, self._room(self._types[n], len(x))])
            self._of[n][at] = np.asarray(values[n])
        self.now += 1

    def as_now(self) -> StepRecords:
        """The steps that there are, whatever follows: what is kept of one is not written again."""
        found = copy.copy(self)
        found._of = dict(self._of)
        return found

    def window(self, step: int) -> dict[str, np.ndarray]:
        """What `WINDOW` steps have read, from the one with this number."""
        at = step - self.first
        return {n: x[at : at + WINDOW] for n, x in self._of.items()}

    def forget(self) -> None:
        """Forget all steps."""
        self.first = self.now
        self._of = {n: self._room(t, WINDOW) for n, t in self._types.items()}

    def _room(self, t: Any, steps: int) -> np.ndarray:
        return np.zeros((steps, *t.shape), t.dtype)


class MissedSteps:
    """The steps that each row of a block of a table has missed.

    Args:
      update: of the server.
      table: the block.
      state: what it begins with, and its state, by name; None where that is what the init makes.

    Attributes:
      reads: what its update reads beside rows, by name.
    """

    def __init__(self, update: ServerUpdate, table: TableBlock, state: Arrays | None) -> None:
        self._update, self._table = update, table
        self._names = table.arrays
        self.reads = _read_beside_rows(update, table)
        self._records = StepRecords(self.reads)
        # for each row, the number of steps that it has seen; one that rests has seen those that are
        # to come
        self._seen = np.zeros(table.rows, np.int64)
        if table.rests is not None:
            self._seen[slice(None) if state is None else _resting(table, state)] = RESTS
        self._made: dict[int, Callable[..., Any]] = {}  # by the number of rows

    @property
    def rests(self) -> bool:
        """Whether rows that nobody has looked up yet do not move."""
        return self._table.rests is not None

    @property
    def seen(self) -> np.ndarray:
        """Of each row how many steps it has seen."""
        return self._seen

    def as_now(self) -> MissedSteps:
        """The steps until now, for rows that are read while others follow (`of_rows`)."""
        found = copy.copy(self)
        found._records = self._records.as_now()
        return found

    def of_rows(self, seen: np.ndarray) -> MissedSteps:
        """The same steps for other rows, by how many each has seen."""
        found = copy.copy(self)
        found._seen = seen
        return found

    def behind(self, ids: np.ndarray) -> np.ndarray:
        """Those of these rows that have missed some step."""
        return ids[self._seen[ids] < self._records.now]

    @property
    def moving(self) -> np.ndarray:
        """Whether each row moves in each step, looked up or not."""
        return self._seen < RESTS

    def rest(self, ids: np.ndarray) -> None:
        """Let rows rest again that are to be made anew."""
        self._seen[ids] = RESTS

    def add(self, ids: np.ndarray, values: Arrays) -> bool:
        """A step was made, in which these rows were updated. Whether too much is kept of steps: let
        all rows catch up.

        Args:
          values: what it has read beside rows.
        """
        self._records.add(values)
        self._seen[ids] = self._records.now
        return self._records.nbytes > KEPT

    def forget(self) -> None:
        """Forget the steps: no row has missed any."""
        self._records.forget()

    def make_up(self, ids: np.ndarray, held: Arrays) -> None:
        """Make the steps that these rows have missed, in the memory of the block and its state."""
        now, behind = self._records.now, self.behind(ids)
        if not len(behind):
            return
        behind = behind[np.argsort(self._seen[behind], kind="stable")]
        seen = self._seen[behind]
        first = self._records.first
        for begin in range(int(seen[0] - first) // WINDOW * WINDOW + first, now, WINDOW):
            stop = min(begin + WINDOW, now)
            some = behind[: np.searchsorted(seen, stop)]
            some = some[self._seen[some] < stop]
            for start, end, size in rooms(len(some)):
                ids = some[start:end]
                self._make(ids, size, begin, stop, held)
                self._seen[ids] = stop

    def _make(self, ids: np.ndarray, size: int, begin: int, stop: int, held: Arrays) -> None:
        """Make the steps of one window, in a program for `size` rows."""
        seen = padded(np.maximum(self._seen[ids] - begin, 0).astype(np.int32), size, WINDOW)
        rows = {n: padded(held[n][ids], size) for n in self._names}
        given = rows, seen, self._records.window(begin), int(seen.min()), stop - begin
        if size not in self._made:
            self._made[size] = jitted_once(
                self.catching_up(size), *given, **stable_bits_options() or {}
            )
        made = self._made[size](*given)
        for n in self._names:
            held[n][ids] = np.asarray(made[n])[: len(ids)]

    def catching_up(self, size: int) -> Callable[..., Any]:
        """Return a pure function that makes the missed steps of so many rows, from what each step
        has read."""
        blocks = blocks_of(self._update, self._table, size)

        def make_up(
            rows: Arrays, seen: jax.Array, records: Arrays, first: int, stop: int
        ) -> Arrays:
            def turn(i: jax.Array, rows: Arrays) -> Arrays:
                made = at_zero_gradient(blocks, rows, {n: x[i] for n, x in records.items()})
                missed = lambda x: (seen <= i).reshape(-1, *(1,) * (x.ndim - 1))
                return {n: jnp.where(missed(x), made[n], x) for n, x in rows.items()}

            return jax.lax.fori_loop(first, stop, turn, dict(rows))

        return make_up


def at_zero_gradient(
    blocks: Sequence[OptimizeBlock], rows: Arrays, values: Arrays
) -> dict[str, Any]:
    """The new rows of a block whose gradient is zero. Pure.

    Args:
      blocks: what updates it, in order.
      rows: of the block, and of its state, by name.
      values: what is read beside them.
    """
    read, new = {**rows, **values}, dict[str, Any]()
    for block in blocks:
        # a row without a gradient has not been away: what a trainer has had of it does not matter
        types = block.invars
        none = {g.name for g in block.grads} | {block.name + BACKUP}
        given = [jnp.zeros_like(types[n].aval) if n in none else read[n] for n in block.in_names]
        made = dict(zip(block.out_names, evaluate(block.jaxpr, *given), strict=True))
        new |= {n: x for n, x in made.items() if n in rows}
        read = {**made, **read}  # no block reads new state; what has a value has it of all rows
    return {n: new.get(n, x) for n, x in rows.items()}


def blocks_of(update: ServerUpdate, table: TableBlock, size: int) -> list[OptimizeBlock]:
    """What updates a block of a table, with so many rows."""
    return [b for b in update.sized({table.name: size}).blocks if b.name == table.name]


def _read_beside_rows(update: ServerUpdate, table: TableBlock) -> dict[str, Any]:
    """What the update of a block reads beside rows and gradients: name to type.

    What the update itself has made before is there too where it is no row of its own, but reduced
    over all of them: its type is the same whatever the number of rows.
    """
    here, there = (blocks_of(update, table, size) for size in (LEAST, 2 * LEAST))
    found: dict[str, Any] = {}
    made: set[str] = set()
    for block, other in zip(here, there, strict=True):
        types, others = block.invars, other.invars
        given = {*table.arrays, *(g.name for g in block.grads), table.name + BACKUP}
        for n in block.in_names:
            same = types[n].aval.shape == others[n].aval.shape
            if n not in given and (n not in made or same):
                found[n] = types[n].aval
        made.update(block.out_names)
    return found


def _resting(table: TableBlock, state: Arrays) -> np.ndarray:
    """Which rows of a block do not move: nobody has looked them up yet."""
    found = np.ones(table.rows, bool)
    for n, number in (table.rests or {}).items():
        found &= (state[n] == number).reshape(table.rows, -1).all(1)
    return found


def padded(rows: np.ndarray, size: int, filler: int = 0) -> np.ndarray:
    """Rows with others behind them, `size` in all."""
    behind = np.full((size - len(rows), *rows.shape[1:]), filler, rows.dtype)
    return np.concatenate([rows, behind])
