"""Updates that rows of an embedding table skip, and make up for before they are read.

Some optimizers also change rows without a gradient: momentum continues, moments and weights decay.
On a single device, each step updates all rows. A server updates only rows with a gradient; the
other rows *miss* the step. The server records the values that each update reads in addition to rows
(counts, learning rates, a clipping factor). Before a row is read, it *catches up*: the server runs
the update with a zero gradient, once for each missed step. The results equal a single device's
results. But the server reads and writes the row's memory only once for all missed steps.

A compiled program runs up to `WINDOW` missed steps of some rows. For rows that have missed more
steps, it is called several times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import evaluate
from dtrans.ir.selection import retain
from dtrans.ops import BACKUP, OptimizeBlock
from dtrans.parameter_server.tables.touched_rows import LEAST, TableBlock, split_by_capacity
from dtrans.run.base.lowered import jitted_once
from dtrans.run.base.platforms import stable_bits_options
from dtrans.run.parameter_server.update import ServerUpdate


WINDOW = 256  # maximum number of missed steps that one call of the compiled program runs
# Number of applied steps of a *resting* row: no update changes the row before its next lookup, so
# the row misses no steps.
RESTS = np.iinfo(np.int64).max
# Maximum bytes of the records. If the records are larger, all rows catch up, and the records are
# dropped.
MOST_BYTES = 1 << 26

Arrays = Mapping[str, Any]


class StepRecords:
    """Record of the values that each update of a table has read, other than rows and gradients.

    With these values, such as the learning rate, the server can run an update later for a row that
    skipped it.

    Args:
      types: shape and dtype of each value, by name.

    Attributes:
      first: the index of the first step with a record.
      now: the number of steps so far.
    """

    def __init__(self, types: Arrays) -> None:
        self.first = self.now = 0
        self._types = types
        self._values = {n: self._room(t, WINDOW) for n, t in types.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return sum(x.nbytes for x in self._values.values())

    def add(self, values: Arrays) -> None:
        """Record the values that a step has read, by name."""
        at = self.now - self.first
        for n, x in self._values.items():
            if at == len(x):  # The array is full, so its length is doubled.
                self._values[n] = np.concatenate([x, self._room(self._types[n], len(x))])
            self._values[n][at] = np.asarray(values[n])
        self.now += 1

    def until_now(self) -> StepRecords:
        """Return a copy that later steps do not change, for a thread. The copy shares memory."""
        found = copy.copy(self)
        found._values = dict(self._values)
        return found

    def window(self, step: int) -> dict[str, np.ndarray]:
        """Return the recorded values of the steps from `step` on, at most `WINDOW` steps.

        The result maps the name of a value to an array with an entry for each step.
        """
        at = step - self.first
        return {n: x[at : at + WINDOW] for n, x in self._values.items()}

    def forget(self) -> None:
        """Drop all records."""
        self.first = self.now
        self._values = {n: self._room(t, WINDOW) for n, t in self._types.items()}

    def _room(self, t: Any, steps: int) -> np.ndarray:
        return np.zeros((steps, *t.shape), t.dtype)


class MissedSteps:
    """Updates that the rows of one block (a table's rows on one server) have skipped.

    An optimizer such as Adam also changes rows without a gradient. The server skips such a row, and
    runs the skipped updates with zero gradients before the row is read.

    A row *rests* until its first update: it has its initial values, and no update changes it. The
    *slot* of a row is its index in the block's memory
    (`dtrans.run.parameter_server.tables.stored_rows`).

    Args:
      update: the server's update.
      table: the block of the table.
      seen: memory for the attribute `seen`; None if only `catching_up` is called.

    Attributes:
      reads: shape and dtype of each value that an update reads in addition to rows, by name.
    """

    def __init__(
        self, update: ServerUpdate, table: TableBlock, seen: np.ndarray | None = None
    ) -> None:
        self._update, self._table = update, table
        self._names = table.arrays
        self.reads = _read_beside_rows(update, table)
        self._records = StepRecords(self.reads)
        self._seen = np.zeros(0, np.int64) if seen is None else seen
        self._compiled: dict[int, Callable[..., Any]] = {}  # compiled functions, by number of rows

    @property
    def rests(self) -> bool:
        """True if no update changes a row that has had no gradient yet."""
        return self._table.initial_values is not None

    @property
    def seen(self) -> np.ndarray:
        """For each slot, the number of updates that its row includes; RESTS if unused."""
        return self._seen

    def start(self, slots: np.ndarray) -> None:
        """Record that new rows have their initial values.

        Args:
          slots: indices of the rows in the block's memory.
        """
        self._seen[slots] = RESTS if self.rests else 0

    def start_from(self, state: Arrays, count: int) -> None:
        """Record that rows have the values of a checkpoint or of an init, and no skipped updates.

        Args:
          state: the block and its optimizer state, by name.
          count: number of rows; they have the first slots (indices in memory).
        """
        self._seen[:count] = 0
        if self.rests:
            is_resting = np.ones(count, bool)
            for n, number in (self._table.initial_values or {}).items():
                rows = state[n][:count]
                is_resting &= (rows == number).all(tuple(range(1, rows.ndim)))
            self._seen[:count][is_resting] = RESTS

    def until_now(self) -> MissedSteps:
        """Return a copy for a thread that reads rows. Later steps do not change its records."""
        found = copy.copy(self)
        found._records = self._records.until_now()
        return found

    def for_rows(self, seen: np.ndarray) -> MissedSteps:
        """Return an object for copies of other rows, which shares this object's records of updates.

        Args:
          seen: number of updates that each of the other rows includes.
        """
        found = copy.copy(self)
        found._seen = seen
        return found

    def behind(self, slots: np.ndarray) -> np.ndarray:
        """Select the slots (indices in memory) of rows that have skipped updates."""
        return slots[self._seen[slots] < self._records.now]

    def add(self, slots: np.ndarray, values: Arrays) -> bool:
        """Record an update; return True if the records are too large, so all rows must catch up.

        Args:
          slots: indices in memory of the rows that the update has changed.
          values: the values that the update has read in addition to rows, by name.
        """
        self._records.add(values)
        self._seen[slots] = self._records.now
        return self._records.nbytes > MOST_BYTES

    def forget(self) -> None:
        """Drop the records of updates. Before this call, no row may have skipped updates."""
        self._records.forget()

    def make_up(self, slots: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Run the skipped updates of some rows; write the new rows into `arrays`.

        Args:
          slots: indices of the rows in memory.
          arrays: the block and its optimizer state, by name.
        """
        now, behind = self._records.now, self.behind(slots)
        if not len(behind):
            return
        behind = behind[np.argsort(self._seen[behind], kind="stable")]
        seen = self._seen[behind]
        first = self._records.first
        for begin in range(int(seen[0] - first) // WINDOW * WINDOW + first, now, WINDOW):
            stop = min(begin + WINDOW, now)
            # The rows are sorted by `seen`, so the rows that miss steps of this window come first.
            due = behind[: np.searchsorted(seen, stop)]
            due = due[self._seen[due] < stop]
            for start, end, size in split_by_capacity(len(due)):
                some = due[start:end]
                self._make(some, size, begin, stop, arrays)
                self._seen[some] = stop

    def _make(
        self, slots: np.ndarray, size: int, begin: int, stop: int, arrays: dict[str, np.ndarray]
    ) -> None:
        """Run the updates that rows skipped in some steps, with the program for `size` rows.

        Args:
          slots: indices in memory of at most `size` rows.
          size: the number of rows of the program.
          begin: the first of these steps. There are at most `WINDOW` steps.
          stop: the step after the last one.
          arrays: the block and its optimizer state, by name.
        """
        # The padding of `seen` marks rows without missed steps.
        seen = pad(np.maximum(self._seen[slots] - begin, 0).astype(np.int32), size, WINDOW)
        rows = {n: pad(arrays[n][slots], size) for n in self._names}
        operands = rows, seen, self._records.window(begin), int(seen.min()), stop - begin
        if size not in self._compiled:
            fn = self.catching_up(size)
            self._compiled[size] = jitted_once(fn, *operands, **stable_bits_options() or {})
        new = self._compiled[size](*operands)
        for n in self._names:
            arrays[n][slots] = np.asarray(new[n])[: len(slots)]

    def catching_up(self, size: int) -> Callable[..., Any]:
        """Return a pure function that runs the missed steps of `size` rows among `WINDOW` steps.

        Its arguments are:

            rows      the rows and their state, by name
            seen      the number of these steps that each row already includes
            records   the records of these steps, by name
            first     the index, among these steps, of the first step to run
            stop      the index after the last step to run

        The function returns the new rows and state, by name.
        """
        blocks = blocks_of(self._update, self._table, size)

        def make_up(
            rows: Arrays, seen: jax.Array, records: Arrays, first: int, stop: int
        ) -> Arrays:
            def step(i: jax.Array, rows: Arrays) -> Arrays:
                new = at_zero_gradient(blocks, rows, {n: x[i] for n, x in records.items()})
                missed = lambda x: (seen <= i).reshape(-1, *(1,) * (x.ndim - 1))
                return {n: jnp.where(missed(x), new[n], x) for n, x in rows.items()}

            return jax.lax.fori_loop(first, stop, step, dict(rows))

        return make_up


def at_zero_gradient(
    blocks: Sequence[OptimizeBlock], rows: Arrays, values: Arrays
) -> dict[str, Any]:
    """Return rows and their optimizer state after an update with a zero gradient.

    This pure function is a skipped update, which a row makes up for.

    Args:
      blocks: the optimize blocks (small programs) of the update, in order.
      rows: the rows and their state, by name.
      values: the values that the update reads in addition to rows, by name.
    """
    read, new = {**rows, **values}, dict[str, Any]()
    for block in blocks:
        types = block.invars
        # The stored values for delay compensation may be zero, too, because the update only
        # multiplies them by the gradient.
        zeros = {g.name for g in block.grads} | {block.name + BACKUP}
        operands = []
        for n in block.in_names:
            operands.append(jnp.zeros_like(types[n].aval) if n in zeros else read[n])
        outs = dict(zip(block.out_names, evaluate(block.jaxpr, *operands), strict=True))
        new |= retain(outs, rows)
        # Entries of `read` take precedence over `outs`. Some are the old state, which later blocks
        # must read. Other entries are values that the step has reduced over all rows, so they
        # cannot be computed again from these rows alone.
        read = {**outs, **read}
    return {**rows, **new}


def blocks_of(update: ServerUpdate, table: TableBlock, size: int) -> list[OptimizeBlock]:
    """Return the optimize blocks (small programs) that update `size` rows of a table."""
    return [b for b in update.sized({table.name: size}).blocks if b.name == table.name]


def _read_beside_rows(update: ServerUpdate, table: TableBlock) -> dict[str, Any]:
    """Return shape and dtype of each value that an update reads in addition to rows, by name.

    Examples are the learning rate and a clipping factor. These values include outputs of earlier
    optimize blocks if they are reduced over rows. Such an output has the same shape for every
    number of rows. So the function compares the output's shapes for two numbers of rows.
    """
    some, more = (blocks_of(update, table, size) for size in (LEAST, 2 * LEAST))
    found: dict[str, Any] = {}
    outputs: set[str] = set()
    for block, larger in zip(some, more, strict=True):
        types, larger_types = block.invars, larger.invars
        rows = {*table.arrays, *(g.name for g in block.grads), table.name + BACKUP}
        for n in block.in_names:
            is_reduced = types[n].aval.shape == larger_types[n].aval.shape
            if n not in rows and (n not in outputs or is_reduced):
                found[n] = types[n].aval
        outputs.update(block.out_names)
    return found


def pad(rows: np.ndarray, size: int, filler: int = 0) -> np.ndarray:
    """Pad an array to `size` rows with a constant."""
    padding = np.full((size - len(rows), *rows.shape[1:]), filler, rows.dtype)
    return np.concatenate([rows, padding])
