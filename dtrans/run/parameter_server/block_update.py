"""Updates of an asynchronous server: each parameter is updated when its gradient arrives.

An update consists of *optimize blocks*, which are small programs. The block for learning rate
schedules (lr_sched) runs once for each step of a trainer. Every other block runs when its gradients
have arrived, and updates the server's current state. A block of an embedding table updates the rows
for which it has a gradient. A synchronous server runs all blocks together
(`dtrans.run.parameter_server.update`).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import evaluate, is_traced
from dtrans.errors import ConfigError
from dtrans.ir.fingerprint import canonical_text
from dtrans.ir.program import DIST, LR_SCHED
from dtrans.ir.selection import subset, values_at
from dtrans.ops import BACKUP, OptimizeBlock
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.run.parameter_server.tables.grouped_rows import GroupedRows
from dtrans.run.parameter_server.tables.server_tables import ServerTables
from dtrans.run.parameter_server.tables.table_memory import (
    final_arrays,
    memory_of,
    snapshot_arrays,
)
from dtrans.run.parameter_server.tables.traced_tables import gradients_with_room
from dtrans.run.parameter_server.update import ServerUpdate


State = Mapping[str, Any]
# A compiled block. Its arguments are the state that it only reads, and the state that it donates.
RunBlock = Callable[[State, State], dict[str, Any]]


class BlockUpdates:
    """A server's optimize blocks (small programs that update a parameter), compiled separately.

    Args:
      update: the server's update.
      state: the initial values, by name.
      memory: the rows of each embedding table with an update that touches only some rows, by the
        name of the table's block. By default, it is created from `state`.

    Attributes:
      grads: maps the name of each block to the names of the gradients that it reads.
      state: the initial values, with tables in `memory`.
      server_tables: reports and evicts rows of tables.
      spent: names of the state arrays that an update overwrites, to reuse their memory.
      before: function that is called before each update of a block.

    Raises:
      ConfigError: a block needs values of several servers. Only a synchronous server can run this
        block.
    """

    def __init__(
        self, update: ServerUpdate, state: State, memory: Mapping[str, Any] | None = None
    ) -> None:
        if any(b.level or b.role == DIST for b in update.blocks):
            raise ConfigError(
                f"the update of pserver {update.endpoint} reduces over rows of several servers, so "
                "it cannot be asynchronous; use mode=dtrans.Sync()"
            )
        self.update = update
        self._memory = memory_of(update, state) if memory is None else memory
        self._grouped = GroupedRows(self._memory)
        # name of a block -> number of its updates; only tables whose updates touch every row
        self._full_updates = collections.Counter[str]()
        self.server_tables = ServerTables(
            update.endpoint,
            update.tables,
            self._memory,
            lambda: self.state,
            lambda name: self._full_updates[name],
        )
        self.state = dict(state)
        for table in self._memory.values():
            self.state |= table.arrays
        self._first: list[OptimizeBlock] = []
        self._blocks: dict[str, OptimizeBlock] = {}
        for b in update.blocks:
            if b.role == LR_SCHED:
                self._first.append(b)
            else:
                self._blocks[b.name] = b
        self.grads: dict[str, list[str]] = {}
        for name, b in self._blocks.items():
            self.grads[name] = [g.name for g in b.grads]
        # Names of the state that the lr_sched block replaces. The other blocks of the step still
        # read the old values.
        self._replaced: set[str] = set()
        for b in self._first:
            self._replaced.update(update.types.keys() & b.out_names)
        self._spent = self._spent_of_blocks()
        self.spent = frozenset(itertools.chain(*self._spent.values()))
        self.before: Callable[[], object] = lambda: None
        self._tables: dict[str, TableBlock] = {}
        for t in update.tables.values():
            self._tables |= dict.fromkeys(t.gradients.values(), t)
        # (name of a table's block, number of rows) -> compiled block
        self._sized: dict[tuple[str, int], RunBlock] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._jitted = {b.name: self._compile(b) for b in update.blocks}

    def _spent_of_blocks(self) -> dict[str, list[str]]:
        """Return the state that each block donates to XLA, by the block's name.

        XLA reuses the memory of donated values for new values. A block can donate the state that it
        replaces, unless another block reads it.
        """
        readers = collections.Counter(n for b in self.update.blocks for n in b.in_names)
        params = set(self.update.params)
        spent = {}
        for name, b in self._blocks.items():
            replaced = set(b.out_names) - params
            spent[name] = [n for n in b.in_names if n in replaced and readers[n] == 1]
        return spent

    def begin(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a trainer's step: compute the learning rate schedules.

        Args:
          state: the server's state.

        Returns:
          The new values of state, such as a step counter. Then the values that the other blocks of
          this step read, such as the learning rate.
        """
        values = subset(state, self._replaced)
        new: dict[str, Any] = {}
        for block in self._first:
            outs = self._jitted[block.name](_pick(block.in_names, values, state), {})
            for n, x in outs.items():
                (new if n in self.update.types else values)[n] = x
        return new, values

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """Return the names of the blocks that can run, because all their gradients have arrived.

        A block that reads no gradient can run when any gradient has arrived.

        Args:
          arrived: names of the gradients that have arrived.
          used: names of blocks to leave out, because they have already run in this step.
        """
        if not arrived:
            return []
        names = set(arrived)
        waiting = [b for b in self.grads if b not in used]
        return [b for b in waiting if names.issuperset(self.grads[b])]

    def apply(self, block: str, grads: State, state: State, values: State) -> dict[str, Any]:
        """Run one block, which updates a parameter; return the new arrays by name.

        The method waits for the computation, because the next step's gradients overwrite the memory
        of these gradients. The arrays that `spent` names become invalid.

        Args:
          block: the block's name.
          grads: the block's gradients, by name.
          state: the server's state.
          values: the second result of `begin`, such as the learning rate.
        """
        self.before()
        gradient = next((n for n in self.grads[block] if n in self._tables), None)
        if gradient is None:
            return self._run(block, self._jitted[block], grads, state, values)
        table = self._tables[gradient]
        names = (gradient, table.name + BACKUP)
        sent: State = {n: grads[n] for n in names if n in grads}
        if table.row_filter is not None:
            sent = self._memory[table.name].admit(sent)
        ids, padded = gradients_with_room(table, sent)
        if table.updates_all:
            self._full_updates[table.name] += 1
            return self._run(block, self._jitted[block], {**grads, **padded}, state, values)

        memory, size = self._memory[table.name], len(padded[gradient])
        if (block, size) not in self._sized:
            blocks = {b.name: b for b in self.update.sized({table.name: size}).blocks}
            self._sized[block, size] = self._compile(blocks[block])
        rows = {**state, **memory.take(ids, size)}
        # Rows without a gradient read these values later, when they catch up on this step. The
        # values are copied, because the update may donate them.
        watched = {}
        for n, x in _pick(memory.reads, values, state).items():
            watched[n] = x if is_traced(x) else np.asarray(x)
        new = self._run(block, self._sized[block, size], {**grads, **padded}, rows, values)
        return {**new, **memory.put(ids, new, watched)}

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Create the table rows that do not exist yet, in one call for several tables if possible.

        Args:
          ids: ids of the rows in each table's block, by the block's name.
        """
        self._grouped.create(ids)

    def rows(self, name: str, ids: np.ndarray, state: State, *, train: bool) -> np.ndarray:
        """Return the current rows of a block of a table.

        Args:
          name: name of the block.
          ids: ids of the rows in the block.
          state: the server's state.
          train: True if gradients of these rows will follow.
        """
        if name in self._memory:
            rows: np.ndarray = self._memory[name].rows(ids, train=train)
            return rows
        return np.asarray(state[name])[ids]

    def tables(self) -> dict[str, Any]:
        """Return all rows of tables, and their optimizer state, after the last update, by name."""
        return final_arrays(self._memory)

    def snapshot(self, patience: float) -> dict[str, Any]:
        """Return a snapshot of each table, for another thread to read during updates.

        Args:
          patience: seconds that updates wait for a reader that makes no progress.
        """
        return snapshot_arrays(self._memory, patience)

    def _run(
        self, block: str, run: RunBlock, grads: State, state: State, values: State
    ) -> dict[str, Any]:
        spent = subset(state, self._spent[block])
        names = [n for n in self._blocks[block].in_names if n not in spent]
        return jax.block_until_ready(run(_pick(names, grads, values, state), spent))

    def _compile(self, block: OptimizeBlock) -> RunBlock:
        """Compile a block (small program) as a function from arrays by name to new arrays by name.

        The function donates its second argument to XLA. Blocks with equal programs share one
        compiled function, because they differ only in names.
        """
        spent = self._spent.get(block.name, [])
        read = [n for n in block.in_names if n not in spent]
        # One pair for each operand: True if it is in `spent`, and its index in `spent` or `read`
        order = []
        for n in block.in_names:
            order.append((True, spent.index(n)) if n in spent else (False, read.index(n)))
        key = canonical_text(block.jaxpr), tuple(order)
        if key not in self._compiled:

            def run(read: Sequence[Any], spent: Sequence[Any]) -> Sequence[Any]:
                operands = [(spent if is_spent else read)[i] for is_spent, i in order]
                outs: Sequence[Any] = evaluate(block.jaxpr, *operands)
                return outs

            self._compiled[key] = jax.jit(run, donate_argnums=1)
        jitted = self._compiled[key]

        def run_by_name(read_state: State, spent_state: State) -> dict[str, Any]:
            operands = values_at(read_state, read)
            outs = jitted(operands, values_at(spent_state, spent))
            return dict(zip(block.out_names, outs, strict=True))

        return run_by_name


def _pick(names: Collection[str], *sources: State) -> dict[str, Any]:
    """Look up arrays by name in several dicts; the first dict with a name counts.

    Args:
      names: names of the arrays.
      sources: dicts of arrays, in the order in which they are searched.
    """
    picked = {}
    for n in names:
        source = next(x for x in sources if n in x)
        picked[n] = source[n]
    return picked
