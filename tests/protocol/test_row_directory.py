"""The hash table from row ids to numbers."""

from __future__ import annotations

import threading

import numpy as np

from dtrans.protocol.tables.row_directory import (
    MISSING,
    DirectoryPart,
    RowDirectory,
    find_together,
    put_together,
)


def test_ids_may_be_any_64_bit_integers() -> None:
    directory, ids = RowDirectory(), np.array([0, -1, -(2**40), 2**31, 2**62, 5, 2**63 - 1])
    directory.put(ids, np.arange(len(ids)))
    assert directory.find(ids).tolist() == [*range(len(ids))]
    assert directory.find(np.array([1, 2**40, -5])).tolist() == [MISSING] * 3
    found, numbers = directory.items()
    assert found.tolist() == sorted(ids.tolist())
    assert directory.find(found).tolist() == numbers.tolist()


def test_blocks_that_share_a_hash_table_do_not_see_each_other() -> None:
    rng, directory, sizes = np.random.default_rng(0), RowDirectory(), (40, 1, 300, 0)
    parts, expected, start = [], [dict[int, int]() for _ in sizes], 0
    for size in sizes:
        parts.append(DirectoryPart(directory, range(start, start + size)))
        start += size
    for _ in range(5):
        ids = [np.sort(rng.choice(n, n // 5, replace=False)).astype(np.int32) for n in sizes]
        numbers = [rng.choice((-9, -2, 0, 5), len(x)) for x in ids]
        before = [part.find(x) for part, x in zip(parts, ids, strict=True)]
        put_together(parts, ids, numbers, before)
        for known, x, new in zip(expected, ids, numbers, strict=True):
            known.update(zip(x.tolist(), new.tolist(), strict=True))
    parts[1].put(np.array([0]), np.array([5]))
    expected[1][0] = 5

    everything = [np.arange(n) for n in sizes]
    found = find_together(parts, everything)
    for part, known, ids in zip(parts, expected, everything, strict=True):
        mine, found = found[: len(ids)], found[len(ids) :]
        assert mine.tolist() == [known.get(i, MISSING) for i in ids.tolist()]
        assert mine.tolist() == part.find(ids).tolist()
        some, numbers = part.items()
        assert dict(zip(some.tolist(), numbers.tolist(), strict=True)) == known
        assert some.tolist() == sorted(known) and part.count == len(known)
    assert sum(part.nbytes for part in parts) <= directory.nbytes


def test_an_entry_takes_32_to_64_bytes() -> None:
    rng = np.random.default_rng(0)
    for count in (100, 32_768, 32_769, 65_536, 65_537, 100_000):
        directory = RowDirectory()
        for ids in np.array_split(rng.permutation(count) * 7, 10):
            directory.put(ids, ids)
        assert len(directory) == count
        assert 32 <= directory.nbytes / count <= 64 + 1


def test_new_numbers_of_known_ids_take_no_memory() -> None:
    directory, ids = RowDirectory(), np.arange(100_000) * 7
    directory.put(ids, np.arange(100_000))
    before = directory.nbytes
    directory.put(ids, np.full(100_000, -5))
    assert (directory.nbytes, len(directory)) == (before, 100_000)
    assert set(directory.find(ids).tolist()) == {-5}


def test_a_thread_reads_sorted_ids_while_another_one_adds_ids() -> None:
    directory, ids = RowDirectory(), np.random.default_rng(0).permutation(200_000) * 3
    is_done = threading.Event()

    def add() -> None:
        for some in np.array_split(ids, 2_000):
            directory.put(some, some)
        is_done.set()

    thread = threading.Thread(target=add)
    thread.start()
    reads = 0
    while not is_done.is_set() or not reads:
        found, _ = directory.items()
        assert np.all(np.diff(found) > 0)
        reads += 1
    thread.join()
    assert len(directory.items()[0]) == 200_000
