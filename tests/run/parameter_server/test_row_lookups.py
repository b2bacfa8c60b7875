"""Lookups of one trainer in tables: the work of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtrans.protocol.tables.table_rows import WantedRows, block_parts, runs_of, unique_ids
from dtrans.rows.row_buckets import RowBuckets
from dtrans.rows.writer import RowRange
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
            memory[...] = table[int(name[-1]) :: 2][ids]

    steps = SimpleNamespace(
        announced=SimpleNamespace(take=lambda table, uniq, now: None),
        prefetch=prefetch,
        send=lambda endpoint, name, rows: sent.update({name: rows}),
    )
    link = SimpleNamespace(line=SimpleNamespace(step=0))
    return SimpleNamespace(
        steps=steps, identify=lambda eqn: None, link=lambda endpoint: link, run=lambda done: done
    )


class Equation(SimpleNamespace):
    """Equation whose identity is its key in dicts."""

    __hash__ = object.__hash__


def lookup_of(table: str, spans: Sequence[Any], size: int) -> Any:
    """Return a `prefetch` of `size` rows of two numbers, which two servers have."""
    types = (SimpleNamespace(shape=(size, 2), dtype=np.float32),)
    names = (f"{table}0", f"{table}1")
    params = {"table": table, "epmap": ("a", "b"), "names": names, "spans": spans}
    return Equation(params={**params, "types": types})


def check_step(lookups: RowLookups, table: np.ndarray, sent: Any, asked: Mapping[Any, Any]) -> None:
    """Look up rows of `table` by several equations, and send gradients."""
    found = [lookups.prefetch(eqn, [uniq])[0] for eqn, uniq in asked.items()]
    lookups.receive()
    for rows, (eqn, uniq) in zip(found, asked.items(), strict=True):
        expected = np.where((uniq < 10)[:, None], table[np.minimum(uniq, 9)], 0)
        np.testing.assert_array_equal(rows, expected)
        gradient = np.arange(2.0 * len(uniq)).reshape(-1, 2)
        lookups.send_rows(eqn, [uniq, gradient])
        for k, name in enumerate(eqn.params["names"]):
            mine = (uniq < 10) & (uniq % 2 == k)
            np.testing.assert_array_equal(sent[name], gradient[mine])


def test_a_step_computes_the_positions_of_rows_once() -> None:
    table = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    sent: dict[str, np.ndarray] = {}
    lookups = RowLookups(connections_of(table, sent))
    spans = CountedBuckets(0, 1, 2, 10), CountedBuckets(1, 2, 2, 10)
    eqn, calls = lookup_of("t", spans, 4), CountedBuckets.calls
    for step, ids in enumerate(([1, 4, 7, 10], [0, 2, 4, 9])):
        check_step(lookups, table, sent, {eqn: np.array(ids, np.int32)})
        assert CountedBuckets.calls == calls + 2 * (step + 1)


def test_a_step_computes_the_positions_of_rows_of_all_tables_in_one_pass() -> None:
    table = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    sent: dict[str, np.ndarray] = {}
    lookups = RowLookups(connections_of(table, sent))
    # Some tables have fewer rows in a step, or none.
    steps = ([1, 4, 7, 10], [10, 10], [0, 9], [8]), ([2, 3, 4, 5], [0, 1], [10, 10], [10])
    eqns = []
    for n, ids in zip("abcd", steps[0], strict=True):
        spans = CountedBuckets(0, 1, 2, 10), CountedBuckets(1, 2, 2, 10)
        eqns.append(lookup_of(n, spans, len(ids)))
    calls = CountedBuckets.calls
    for step, ids in enumerate(steps):
        uniq = [np.array(x, np.int32) for x in ids]
        check_step(lookups, table, sent, dict(zip(eqns, uniq, strict=True)))
        assert CountedBuckets.calls == calls + 2 * (step + 1)


@pytest.mark.parametrize("kind", ["buckets", "ranges", "runs", "mixed"])
def test_parts_of_several_tables_are_those_of_each_table(kind: str) -> None:
    """Compare with a search for each row, also for empty tables, and tables with other blocks."""
    rng, size = np.random.default_rng(0), 50
    kinds: dict[str, Sequence[Any]] = {
        "buckets": (RowBuckets(0, 3, 7, size), RowBuckets(3, 7, 7, size)),
        "ranges": (RowRange(0, 20), RowRange(20, 20), RowRange(20, size)),
        "runs": runs_of((10, 25, 15)),
    }
    spans = [kinds[n] for n in kinds for _ in range(4) if kind in (n, "mixed")]
    ids = []
    for _ in spans:
        some = np.sort(rng.choice(size, rng.integers(0, 30), replace=False))
        padding = np.full(rng.integers(0, 4), size)
        ids.append(np.concatenate([some, padding]).astype(np.int32))
    ids[0], ids[1] = np.full(3, size, np.int32), np.empty(0, np.int32)
    for uniq, blocks, parts in zip(ids, spans, block_parts(ids, spans), strict=True):
        for span, (at, local) in zip(blocks, parts, strict=True):
            mine = np.flatnonzero(np.isin(uniq, span.in_leaf(np.arange(span.rows))))
            np.testing.assert_array_equal(np.arange(len(uniq))[at], mine)
            np.testing.assert_array_equal(span.in_leaf(local), uniq[mine])


@pytest.mark.parametrize("outside", ["error", "clip", "drop"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_unique_ids_are_those_of_numpy(outside: str, dtype: Any) -> None:
    rng, rows = np.random.default_rng(0), 100
    low, high = (0, rows) if outside == "error" else (-20 if dtype != np.uint8 else 0, 120)
    every_shape: list[list[tuple[int, ...]]] = [[(4, 3)], [(6,), (2, 5)], [(0,)], [(0,), (7, 1)]]
    for shapes in [*every_shape, [()]]:
        ids = [np.asarray(rng.integers(low, high, s)).astype(dtype) for s in shapes]
        flat = np.concatenate([x.reshape(-1) for x in ids]).astype(np.int64)
        if outside == "drop":
            flat = flat[(flat >= 0) & (flat < rows)]
        expected = np.unique(np.clip(flat, 0, rows - 1))
        outsides = [outside] * len(ids)
        found = unique_ids(ids, table="t", rows=rows, size=20, outside=outsides)
        assert found.dtype == np.int32 and found.shape == (20,)
        assert found.tolist() == [*expected.tolist(), *[rows] * (20 - len(expected))]
