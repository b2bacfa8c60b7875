"""Lookups of table rows that a trainer has requested early (*announced*), for later steps.

The servers send the rows while the trainer computes, so that a later step need not wait for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dtrans.errors import StateError
from dtrans.protocol.tables import rows_ahead
from dtrans.protocol.tables.table_rows import BlockPart, WantedRows, by_server
from dtrans.protocol.trainer.trainer_line import TrainerLine


@dataclasses.dataclass(frozen=True, eq=False)
class LookedUp:
    """Lookup of rows of one table: the row ids, and the memory for the rows that servers send.

    The rows of a table are divided into blocks, each on one server.

    Attributes:
      table: name of the table.
      uniq: increasing row ids of the lookup.
      rows: memory that receives the rows.
      wanted: the lookup in each block of the table.
      parts: each block's part of the row ids.
    """

    table: str
    uniq: np.ndarray
    rows: np.ndarray
    wanted: Sequence[WantedRows]
    parts: Sequence[BlockPart]


class AnnouncedLookups:
    """Lookups that one trainer has requested early, before the steps that use the rows.

    Args:
      line: function that maps a server's endpoint to the trainer's `TrainerLine` for this server.
    """

    def __init__(self, line: Callable[[str], TrainerLine]) -> None:
        self._line = line
        # number of a later step -> name of a table -> announced lookup
        self._lookups: dict[int, dict[str, LookedUp]] = {}

    def add(self, lookups: Sequence[LookedUp]) -> None:
        """Request the table rows of a later step, which is the first step not requested yet.

        For example, the first call during step 3 requests the rows of step 4, and the second call
        those of step 5.

        Args:
          lookups: the lookup of each table.

        Raises:
          StateError: the maximum number of steps has already been announced.
        """
        wanted = [w for x in lookups for w in x.wanted]
        now = self._line(wanted[0][0]).step
        target = max([now, *self._lookups]) + 1
        if target - now > rows_ahead.MOST:
            raise StateError(
                f"job.prefetch has announced {rows_ahead.MOST} batches that no step has used yet, "
                "which is the maximum; call job.step first"
            )
        for endpoint, (ids, memory) in by_server(wanted).items():
            line = self._line(endpoint)
            line.ahead.expect(target, memory)
            line.prefetch(ids, train=True, ahead=target - line.step)
        self._lookups[target] = {x.table: x for x in lookups}

    def take(self, table: str, uniq: np.ndarray, now: int) -> LookedUp | None:
        """Return the rows that were requested early for this step; None if it looks up others.

        Each lookup is returned once. Lookups of earlier steps are dropped.

        Args:
          table: name of the table.
          uniq: row ids that the step looks up.
          now: number of the step.
        """
        for step in list(self._lookups):
            if step < now:
                for name in list(self._lookups[step]):
                    self._collect(step, name)
                del self._lookups[step]
        if table not in self._lookups.get(now, {}):
            return None
        found = self._collect(now, table)
        return found if np.array_equal(found.uniq, uniq) else None

    def forget(self, blocks: Sequence[tuple[str, str]]) -> None:
        """Drop the early lookups in tables from which rows were evicted.

        The servers drop the same lookups, and the steps then request their rows as usual.

        Args:
          blocks: server and name of each block (the part of a table on one server) with evicted
            rows.
        """
        for step, tables in self._lookups.items():
            for x in list(tables.values()):
                if x.wanted[0][:2] not in blocks:
                    continue
                for endpoint, name, *_ in tables.pop(x.table).wanted:
                    self._line(endpoint).ahead.forget(name, step)

    def _collect(self, step: int, table: str) -> LookedUp:
        found = self._lookups[step].pop(table)
        for endpoint, name, *_ in found.wanted:
            self._line(endpoint).ahead.collect(name, step)
        return found
