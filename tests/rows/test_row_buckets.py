"""Rows that are divided into buckets by their row ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtrans._jax import ShapedArray
from dtrans.rows.layout import RowAxis
from dtrans.rows.row_buckets import BucketRows, RowBuckets
from dtrans.rows.writer import RowRange


@st.composite
def dealt(draw: st.DrawFn) -> list[RowBuckets]:
    """Draw the parts of a leaf: any number of rows, buckets and parts."""
    size = draw(st.integers(1, 60))
    count = draw(st.integers(1, size))
    parts = draw(st.integers(1, count))
    return [
        RowBuckets(count * i // parts, count * (i + 1) // parts, count, size) for i in range(parts)
    ]


@given(dealt())
def test_each_row_is_in_one_part_and_parts_keep_the_order(parts: list[RowBuckets]) -> None:
    first = parts[0]
    every = np.arange(first.size)
    assert sorted(n for p in parts for n in p.numbers().tolist()) == every.tolist()
    assert sum(p.rows for p in parts) == first.size
    for p in parts:
        numbers = p.numbers()
        assert np.all(np.diff(numbers) > 0)
        assert all(p.start <= n % p.count < p.stop for n in numbers)
        assert p.local(numbers).tolist() == list(range(p.rows))
        # like ids that fill only a part of their array
        with_end = np.append(every, first.size).astype(np.int32)
        assert with_end[p.among(with_end)].tolist() == numbers.tolist()
        assert p.local(with_end[p.among(with_end)]).dtype == np.int32


@given(dealt(), st.integers(1, 3))
def test_rows_of_a_value_are_those_of_the_leaf(parts: list[RowBuckets], width: int) -> None:
    """The axis has several entries for each row."""
    size = parts[0].size
    x = np.arange(2 * size * width).reshape(2, size, width)
    flat = x.reshape(2, size * width)
    for p in parts:
        row = RowAxis("", 1, width)
        wanted = x[:, p.index].reshape(2, -1)
        assert np.array_equal(flat[:, p.along(row).index], wanted)
        assert (
            BucketRows(p).of(row).type_in(ShapedArray(flat.shape, np.dtype("int32"))).shape
            == wanted.shape
        )


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_run_answers_the_same_questions(start: int, count: int) -> None:
    run = RowRange(start, start + count)
    ids = np.arange(0, 70, 3, dtype=np.int32)
    mine = ids[run.among(ids)]
    assert mine.tolist() == [n for n in ids.tolist() if start <= n < start + count]
    assert run.numbers()[run.local(mine)].tolist() == mine.tolist()


def test_buckets_are_even_where_few_rows_are_looked_up_often() -> None:
    """Row ids are words by frequency (Zipf's law).

    Without buckets, the first range has most of the looked-up rows.
    """
    size, count, servers = 1_000_000, 256, 4
    chance = np.cumsum(1 / np.arange(1, size + 1))
    rng = np.random.default_rng(0)
    ids = [np.unique(np.searchsorted(chance, rng.uniform(0, chance[-1], 4096))) for _ in range(8)]

    def unevenness(parts: list[RowRange] | list[RowBuckets]) -> float:
        looked_up = [[np.size(x[p.among(x)]) for p in parts] for x in ids]
        return float(np.mean([max(n) / np.mean(n) for n in looked_up]))

    cut = lambda total: [(total * i // servers, total * (i + 1) // servers) for i in range(servers)]
    assert unevenness([RowBuckets(*x, count, size) for x in cut(count)]) < 1.1
    assert unevenness([RowRange(*x) for x in cut(size)]) == pytest.approx(3.4, abs=0.1)
