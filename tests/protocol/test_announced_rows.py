"""Messages with announced rows: rows of several tables for one step, and changes of these rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.tables.rows_ahead import ComingRows, DueRows, due_messages


IDS = {"t": np.array([1, 4, 5], np.int32), "u": np.array([2], np.int32)}


def due(name: str, at: list[int] | None = None, trainer: int = 0, target: int = 7,
        is_last: bool = False) -> tuple[DueRows, np.ndarray]:  # fmt: skip
    """Rows that are due, whose values are their ids, and 100 more when they are sent again."""
    ids = IDS[name] if at is None else IDS[name][at]
    places = None if at is None else np.array(at, np.int32)
    rows = DueRows(trainer, name, target, ids, places, is_last)
    return rows, (ids + 100 * (at is not None)).astype(np.float32)


def messages(*rows: tuple[DueRows, np.ndarray]) -> Iterator[wire.Message]:
    for _, blocks, fields in due_messages(rows):
        for frames in wire.framed("rows", blocks, step=3, **fields):
            yield wire.parse([frames[0], *map(bytes, frames[1:])])


def expecting() -> tuple[ComingRows, dict[str, np.ndarray]]:
    memory = {n: np.zeros(len(ids), np.float32) for n, ids in IDS.items()}
    coming = ComingRows("here:1")
    coming.expect(7, memory)
    return coming, memory


@pytest.mark.parametrize("limit", [wire.MESSAGE_BYTES, 8])
def test_rows_of_several_tables_arrive_at_once_and_again(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_BYTES", limit)
    coming, memory = expecting()
    for x in messages(due("t"), due("u")):
        coming.take(x)
    assert {n: x.tolist() for n, x in memory.items()} == {"t": [1, 4, 5], "u": [2]}
    for x in messages(due("t", [0, 2], is_last=True), due("u", [], is_last=True)):
        coming.take(x)
    assert {n: x.tolist() for n, x in memory.items()} == {"t": [101, 4, 105], "u": [2]}
    coming.collect("t", 7)
    coming.collect("u", 7)
    with pytest.raises(PeerError, match="rows of 't' that were not announced"):
        coming.take(next(messages(due("t"))))


def test_one_message_has_the_rows_of_one_trainer_and_one_step() -> None:
    rows = [due("t"), due("u"), due("t", trainer=1), due("t", target=8), due("u", is_last=True)]
    made = due_messages([*rows, due("u", [0])])
    assert [(k, [n for n, _ in blocks], fields) for k, blocks, fields in made] == [
        (0, ["t", "u"], {"ahead": 7, "last": False}),
        (1, ["t"], {"ahead": 7, "last": False}),
        (0, ["t"], {"ahead": 8, "last": False}),
        (0, ["u"], {"ahead": 7, "last": True}),
        (0, ["u@AT", "u"], {"ahead": 7, "last": False, "counts": {"u": 1}}),
    ]


def test_tables_of_one_step_may_be_complete_at_different_times() -> None:
    coming, memory = expecting()
    for x in messages(due("u", is_last=True), due("t")):
        coming.take(x)
    coming.collect("u", 7)
    for x in messages(due("t", [1], is_last=True)):
        coming.take(x)
    coming.collect("t", 7)
    assert memory["t"].tolist() == [1, 104, 5]


def test_rows_that_were_evicted_are_expected_no_more() -> None:
    coming, _ = expecting()
    coming.forget("t", 7)
    with pytest.raises(PeerError, match="rows of 't' that were not announced"):
        coming.take(next(messages(due("t"))))
    coming.take(next(messages(due("u", is_last=True))))
    coming.collect("u", 7)
    coming.expect(7, {"t": np.zeros(3, np.float32)})
    coming.take(next(messages(due("t", is_last=True))))
    coming.collect("t", 7)


@pytest.mark.parametrize("last", [{}, {"last": False}])
def test_rows_are_complete_only_after_the_last_message(last: Any) -> None:
    coming, _ = expecting()
    frames = next(wire.framed("rows", [("t", np.zeros(3, np.float32))], step=3, ahead=7, **last))
    coming.take(wire.parse([frames[0], *map(bytes, frames[1:])]))
    with pytest.raises(PeerError, match="has not sent the rows of t announced for step 7"):
        coming.collect("t", 7)


@pytest.mark.parametrize(
    "counts, blocks, error",
    [
        ({"t": 4}, {}, "sent 4 changed rows of t, but only 3 rows were announced"),
        ({"t": -1}, {}, "sent -1 changed rows of t"),
        ({"t": True}, {}, "sent True changed rows of t"),
        ({"t": "1"}, {}, "sent '1' changed rows of t"),
        ({"w": 1}, {}, "rows of 'w' that were not announced"),
        ({"t": 1}, {"t@AT": [3], "t": [0.0]}, "positions outside the 3 announced rows"),
        ({"t": 1}, {"t@AT": [-1], "t": [0.0]}, "positions outside the 3 announced rows"),
        ({"t": 1}, {"u": [0.0]}, "announced rows with the block 'u'"),
        (None, {"w": [0.0]}, "rows of 'w' that were not announced"),
    ],
)
def test_malformed_rows_are_refused(counts: Any, blocks: Any, error: str) -> None:
    coming, memory = expecting()
    types = {"t@AT": np.int32}
    arrays = [(n, np.array(x, types.get(n, np.float32))) for n, x in blocks.items()]
    fields = {"counts": counts} if counts is not None else {}
    pieces, frames = next(iter(wire.messages(arrays)), ([], []))
    header = wire.header("rows", step=3, ahead=7, last=True, pieces=pieces, **fields)
    with pytest.raises((WireError, PeerError), match=error):
        coming.take(wire.parse([header, *map(bytes, frames)]))
    assert not memory["t"].any()
