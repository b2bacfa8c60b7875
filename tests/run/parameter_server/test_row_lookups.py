"""Lookups of one trainer in tables: the work of one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.rows.row_buckets import RowBuckets
from dtrans.run.parameter_server.tables.row_lookups import RowLookups


class CountedBuckets(RowBuckets):
    """Rows of a block that count how often their positions are computed."""

    calls = 0

    def among(self, ids: np.ndarray) -> np.ndarray:
        type(self).calls += 1
        return super().among(ids)


def connections_of(table: np.ndarray, sent: dict[str, np.ndarray]) -> Any:
    """Return connections to two servers, which have the even and the odd rows of a table."""

    def prefetch(wanted: list[WantedRows], train: bool) -> None:
        for _, name, ids, memory in wanted:
            memory[...] = table[int(name) :: 2][ids]

    steps = SimpleNamespace(
        announced=SimpleNamespace(take=lambda table, uniq, now: None),
        prefetch=prefetch,
        send=lambda endpoint, name, rows: sent.update({name: rows}),
    )
    link = SimpleNamespace(line=SimpleNamespace(step=0))
    return SimpleNamespace(
        steps=steps, identify=lambda eqn: None, link=lambda endpoint: link, run=lambda done: done
    )


def test_a_step_computes_the_positions_of_rows_once() -> None:
    table = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    sent: dict[str, np.ndarray] = {}
    lookups = RowLookups(connections_of(table, sent))
    spans = CountedBuckets(0, 1, 2, 10), CountedBuckets(1, 2, 2, 10)
    types = (SimpleNamespace(shape=(4, 2), dtype=np.float32),)
    params = {"table": "t", "epmap": ("a", "b"), "names": ("0", "1"), "spans": spans}
    eqn: Any = SimpleNamespace(params={**params, "types": types})
    for step, ids in enumerate(([1, 4, 7, 10], [0, 2, 4, 9])):
        uniq = np.array(ids, np.int32)
        (rows,) = lookups.prefetch(eqn, [uniq])
        lookups.receive()
        expected = np.where((uniq < 10)[:, None], table[np.minimum(uniq, 9)], 0)
        np.testing.assert_array_equal(rows, expected)
        lookups.send_rows(eqn, [uniq, np.arange(8.0).reshape(4, 2)])
        for k in range(2):
            mine = (uniq < 10) & (uniq % 2 == k)
            np.testing.assert_array_equal(sent[str(k)], np.arange(8.0).reshape(4, 2)[mine])
        assert CountedBuckets.calls == 2 * (step + 1)
