"""Reports, changed rows and evictions of one server's embedding tables, at a trainer's request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import StateError, WireError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.server.trainer_registry import log
from dtrans.protocol.tables.stored_tables import TableReport
from dtrans.run.parameter_server.tables.table_memory import TableMemory


class ServerTables:
    """One server's embedding tables, for requests of trainers between two updates.

    The class implements `dtrans.protocol.tables.stored_tables.StoredTables`. A *block* has the rows
    of a table on one server.

    Args:
      endpoint: the server's endpoint.
      blocks: all blocks of tables, by name.
      memory: memory of each block with updates that change only some rows, by name.
      state: function that returns the server's state; it includes the blocks without `memory`.
      steps: function from the name of a block without `memory` to its number of updates.

    Attributes:
      went_back: True if the server has gone back to a snapshot, and repeats steps with
        the same bits.
    """

    def __init__(
        self,
        endpoint: str,
        blocks: Mapping[str, TableBlock],
        memory: Mapping[str, TableMemory],
        state: Callable[[], Mapping[str, Any]],
        steps: Callable[[str], int],
    ) -> None:
        self._endpoint, self._blocks, self._memory = endpoint, blocks, memory
        self._state, self._steps = state, steps
        self.went_back = False

    def report(self) -> Sequence[TableReport]:
        """Return the numbers of rows and bytes of each block (a table's rows on this server)."""
        return [self._report_of(t) for t in self._blocks.values()]

    def _report_of(self, table: TableBlock) -> TableReport:
        place = (table.name, self._endpoint, table.rows)
        memory = self._memory.get(table.name)
        if memory is not None:
            return TableReport(
                *place, memory.count, memory.nbytes, table.limit, memory.evicted, memory.step
            )
        state = self._state()
        size = sum(state[n].nbytes for n in table.arrays)
        return TableReport(*place, table.rows, size, None, 0, self._steps(table.name))

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """Free the rows without a gradient in the last `unused_for` steps; return their number.

        Args:
          name: name of the block (a table's rows on this server).
          unused_for: the number of steps.
          under_way: ids of rows with a gradient that has not arrived yet. These rows are not
            evicted.

        Raises:
          StateError: the block's updates touch every row, or rows cannot be initialized again.
        """
        memory = self._memory.get(name)
        if memory is None:
            raise StateError(
                f"rows of {name} cannot be evicted, because each update touches every row; use "
                "dtrans.Rows(update='lazy')"
            )
        count = memory.evict(unused_for, under_way)
        if count:
            text = "pserver %s evicted %s rows of %s, which had no gradient in the last %s steps"
            log.info(text, self._endpoint, f"{count:,}", name, f"{unused_for:,}")
        return count

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the ids of the rows that were changed or evicted after a step.

        Args:
          name: name of the block (a table's rows on this server).
          since: the number of the step.

        Returns:
          The block's current step, the ids of the changed rows, and the ids of the evicted rows.

        Raises:
          WireError: the server has no block `name`.
          StateError: the block has not reached the step `since`.
        """
        if name not in self._blocks:
            raise WireError(f"pserver {self._endpoint} has no table {name[:80]!r}")
        memory = self._memory.get(name)
        step = self._steps(name) if memory is None else memory.step
        if since > step and self.went_back:
            # Return no changes: the caller has read all of them before the failure.
            return since, np.arange(0), np.arange(0)
        if not 0 <= since <= step:
            raise StateError(
                f"changed rows of {name} were requested since step {since}, but its server has "
                f"taken {step} steps since its start; read the full table (job.tables.export or "
                f"job.tables.lookup), and then its changes since step {step}"
            )
        if memory is not None:
            return step, *memory.changed(since)
        count = 0
        if since < step:
            count = self._blocks[name].rows  # Each step changes every row.
        return step, np.arange(count), np.arange(0)
