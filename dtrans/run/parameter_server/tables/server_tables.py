"""A server's blocks of tables between two updates: what there is of them, what has changed, and
rows given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import StateError, WireError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.presence import log
from dtrans.protocol.tables.held_tables import TableReport
from dtrans.run.parameter_server.tables.table_memory import TableMemory


class ServerTables:
    """What the protocol asks of tables (`dtrans.protocol.tables.held_tables.HeldTables`).

    Args:
      endpoint: the server's.
      blocks: all blocks of tables.
      memory: of those of which an update is of some rows alone.
      state: gives what the server holds of the others, by name.
      steps: gives how many updates were made of one of the others.
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

    def report(self) -> Sequence[TableReport]:
        """What there is of each block."""
        return [self._report_of(t) for t in self._blocks.values()]

    def _report_of(self, table: TableBlock) -> TableReport:
        here, memory = (table.name, self._endpoint, table.rows), self._memory.get(table.name)
        if memory is None:
            held = self._state()
            size = sum(held[n].nbytes for n in table.arrays)
            return TableReport(*here, table.rows, size, None, 0, self._steps(table.name))
        return TableReport(
            *here, memory.count, memory.nbytes, table.limit, memory.evicted, memory.step
        )

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """Give up rows that none of so many last steps has updated, but those under way; how many
        they are."""
        memory = self._memory.get(name)
        if memory is None:
            raise StateError(
                f"rows of {name} cannot be given up: each of its updates is of all of them"
            )
        count = memory.evict(unused_for, under_way)
        if count:
            told = "pserver %s gave up %s rows of %s, which no update was of in the last %s"
            log.info(told, self._endpoint, f"{count:,}", name, f"{unused_for:,}")
        return count

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The step that a block is at; rows that steps after one have changed, and those that were
        given up since."""
        if name not in self._blocks:
            raise WireError(f"{name[:80]!r} is no table of {self._endpoint}")
        memory = self._memory.get(name)
        step = self._steps(name) if memory is None else memory.step
        if not 0 <= since <= step:
            raise StateError(
                f"changes of {name} since step {since}, and there were {step}: steps are counted "
                "from the start of the servers. Take the whole table, job.tables.export or "
                "job.tables.lookup, and go on from the step that is now"
            )
        if memory is not None:
            return step, *memory.changed(since)
        return step, np.arange(self._blocks[name].rows if since < step else 0), np.arange(0)
