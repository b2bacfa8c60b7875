"""Requests for table rows: several tables in one message, and requests of several messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.server_blocks import ServerBlocks, TableSpec
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.protocol.tables.table_rows import by_server
from dtrans.protocol.trainer.trainer_line import TrainerLine


TABLES = {n: TableSpec(10, (), np.dtype("float32"), {0: f"{n}@GRAD"}) for n in "tu"}


def message(pieces: list[tuple[str, int, int]], ids: np.ndarray, **fields: Any) -> wire.Message:
    """Return a part of a request, by default for four rows of block `t`."""
    given = {"step": 0, "counts": {"t": 4}, "train": False, **fields, "pieces": [pieces]}
    frames = [wire.header("prefetch", **given), ids.astype(np.int32).tobytes()]
    return wire.parse(frames)


def line_of(said: list[wire.Message]) -> TrainerLine:
    return TrainerLine("here:1", 0, 1, session="", sync_mode=True, plan={}, secret="",
                       deadline=1.0, say=lambda x: said.append(wire.parse(x)))  # fmt: skip


def test_a_malformed_part_does_not_drop_the_request() -> None:
    requests, grads = RowRequests("here:1", TABLES), Inbox({}, str)
    assert requests.take(0, message([("t", 0, 8)], np.array([1, 4])), grads) is None
    with pytest.raises(WireError, match="expected its bytes from 8 on"):
        requests.take(0, message([("t", 4, 8)], np.array([5, 7])), grads)
    found = requests.take(0, message([("t", 8, 8)], np.array([5, 7])), grads)
    assert found is not None
    blocks, train = found
    assert blocks["t"].tolist() == [1, 4, 5, 7] and not train


@pytest.mark.parametrize("limit, count", [(wire.MESSAGE_BYTES, 1), (8, 2)])
def test_a_request_names_the_rows_of_several_tables(
    limit: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_BYTES", limit)
    requests, ids = RowRequests("here:1", TABLES), {"t": np.array([1]), "u": np.array([2, 9])}
    said: list[wire.Message] = []
    line_of(said).prefetch(ids, train=True)
    assert len(said) == count
    grads = Inbox(requests.memory_of(0), str)
    *parts, found = [requests.take(0, x, grads) for x in said]
    assert not any(parts) and found is not None
    assert {n: x.tolist() for n, x in found[0].items()} == {"t": [1], "u": [2, 9]}
    assert {n: len(x) for n, x in grads.memory.items()} == {"t@GRAD": 1, "u@GRAD": 2}


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ({"t": [7, 9], "u": [2, 9]}, ""),
        ({"t": [], "u": [0]}, ""),
        ({"t": [5], "u": []}, ""),
        ({"t": [1, 2], "u": [4, 4]}, "u"),
        ({"t": [5, 3], "u": [8, 9]}, "t"),
        ({"t": [], "u": [3, 2]}, "u"),
    ],
)
def test_row_ids_increase_in_each_table_of_a_request(ids: dict[str, list[int]], wrong: str) -> None:
    requests = RowRequests("here:1", TABLES)
    said: list[wire.Message] = []
    line_of(said).prefetch({n: np.array(x, np.int32) for n, x in ids.items()}, train=True)
    grads = Inbox(requests.memory_of(0), str)
    if wrong:
        with pytest.raises(WireError, match=f"row ids of {wrong} that are not increasing numbers"):
            requests.take(0, said[0], grads)
    else:
        found = requests.take(0, said[0], grads)
        assert found is not None and {n: x.tolist() for n, x in found[0].items()} == ids


def test_row_ids_of_several_gradients_are_one_message() -> None:
    requests, said = RowRequests("here:1", TABLES), list[wire.Message]()
    line_of(said).row_ids({"t@GRAD": np.array([1]), "u@GRAD": np.array([2, 9])})
    grads = Inbox(requests.memory_of(0), str)
    requests.take_row_ids(0, said.pop(), grads)
    assert not said
    assert {n: x.ids.tolist() for n, x in requests.gradients(0, grads).items()} == {
        "t@GRAD": [1],
        "u@GRAD": [2, 9],
    }


def test_a_request_that_one_of_its_tables_refuses_allocates_nothing() -> None:
    """The trainer has already sent a part of the gradient of the second table."""
    requests = RowRequests("here:1", TABLES)
    grads = Inbox(requests.memory_of(0), str)
    requests.expect(0, message([("t", 0, 4)], np.array([1])), {"u": np.array([3, 4])}, grads)
    sent = [wire.header("send", step=0, pieces=[[("u@GRAD", 0, 4)]]), np.float32(1).tobytes()]
    grads.take(wire.parse(sent))
    said: list[wire.Message] = []
    line_of(said).prefetch({"t": np.array([1]), "u": np.array([2, 9])}, train=True)
    with pytest.raises(WireError, match=r"gradient u@GRAD .* row ids must come first"):
        requests.take(0, said.pop(), grads)
    assert {n: len(x) for n, x in grads.memory.items()} == {"t@GRAD": 0, "u@GRAD": 2}
    assert requests.gradients(0, grads)["t@GRAD"].ids.tolist() == []


@pytest.mark.parametrize(
    "counts, refusal",
    [
        ({}, "a `prefetch` message without a table"),
        ({"t": True}, "requests True rows of t"),
        ({"t": 1.0}, "requests 1.0 rows of t"),
        ({"t": [1]}, r"requests \[1\] rows of t"),
        ({"t": 11}, "requests 11 rows of t, which has 10 rows"),
        ({b"t": 1}, "requests rows of b't', which is not a table"),
        ({"t": 1, "w": 1}, "requests rows of 'w', which is not a table of pserver here:1"),
    ],
)
def test_malformed_counts_are_refused(counts: Any, refusal: str) -> None:
    requests, grads = RowRequests("here:1", TABLES), Inbox({}, str)
    with pytest.raises(WireError, match=refusal):
        requests.take(0, message([("t", 0, 4)], np.array([1]), counts=counts), grads)
    assert requests.take(0, message([("t", 0, 16)], np.arange(4)), grads) is not None


def test_a_trainer_has_one_incomplete_request() -> None:
    requests, grads = RowRequests("here:1", TABLES), Inbox({}, str)
    assert requests.take(0, message([("t", 0, 8)], np.array([1, 4])), grads) is None
    for counts in ({"u": 4}, {"t": 3}, {"t": 4, "u": 1}):
        other = message([("t", 8, 4)], np.array([5]), counts=counts)
        with pytest.raises(WireError, match=r"the counts \{'t': 4\} is incomplete"):
            requests.take(0, other, grads)
    # a request for a later step, and the request of another trainer
    other = {"u": 4}
    later = message([("u", 0, 4)], np.array([5]), counts=other, ahead=1)
    assert requests.take(0, later, grads) is None
    assert requests.take(1, message([("u", 0, 4)], np.array([5]), counts=other), grads) is None
    assert requests.take(0, message([("t", 8, 8)], np.array([5, 7])), grads) is not None


BACKED = TableSpec(10, (), np.dtype("float32"), {0: "t@GRAD"}, backed=True)


@pytest.mark.parametrize(
    "name, ids, refusal",
    [
        ("t", [1], "sends row ids of 't', which is not a gradient of a table of pserver here:1"),
        ("w@GRAD", [1], "sends row ids of 'w@GRAD', which is not a gradient"),
        ("t@GRAD", [1, 2], "gradient for rows of t, but has not requested these rows"),
        ("t@GRAD", [4, 1], "row ids of t that are not increasing numbers from 0 to 9"),
        ("t@GRAD", [1, 1], "row ids of t that are not increasing numbers"),
        ("t@GRAD", [-1, 1], "row ids of t that are not increasing numbers"),
        ("t@GRAD", [1, 10], "row ids of t that are not increasing numbers"),
    ],
)
def test_row_ids_of_other_rows_are_refused(name: str, ids: list[int], refusal: str) -> None:
    requests, said = RowRequests("here:1", {"t": BACKED}), list[wire.Message]()
    grads = Inbox(requests.memory_of(0), str)
    requests.answered(0, "t", np.array([1, 4]), np.zeros(2, np.float32))
    line_of(said).row_ids({name: np.array(ids)})
    with pytest.raises(WireError, match=refusal):
        requests.take_row_ids(0, said.pop(), grads)
    assert requests.gradients(0, grads)["t@GRAD"].ids.tolist() == []
    line_of(said).row_ids({"t@GRAD": np.array([1, 4])})
    requests.take_row_ids(0, said.pop(), grads)
    assert requests.gradients(0, grads)["t@GRAD"].ids.tolist() == [1, 4]


def test_a_lookup_is_divided_among_servers() -> None:
    ids, rows = np.arange(2), np.zeros((2, 3))
    wanted = [("a:1", "t", ids, rows), ("b:1", "t1", ids, rows), ("a:1", "u", ids, rows)]
    found = by_server(wanted)
    names = {ep: (list(blocks), list(memory)) for ep, (blocks, memory) in found.items()}
    assert names == {"a:1": (["t", "u"], ["t", "u"]), "b:1": (["t1"], ["t1"])}
    assert found["a:1"][1]["u"] is rows


class FullTable:
    """An update of two tables; one of them is full."""

    def create_rows(self, ids: Any) -> None:
        """All rows are created by `rows`."""

    def rows(self, name: str, ids: np.ndarray, state: Any, *, train: bool) -> np.ndarray:
        if name == "u":
            raise WireError("u has a limit of 0 rows")
        return np.zeros(len(ids), np.float32)


def test_a_request_that_exceeds_a_limit_leaves_no_rows_that_wait_for_gradients() -> None:
    served = ServerBlocks("here:1", 1, False, "drop", {}, {}, (), tables=TABLES)
    trainers = TrainerRegistry(served, deadline=9.0, plan={}, secret="")
    trainers.known[0] = Trainer("session", b"0")
    update: Any = FullTable()
    answers: list[str] = []
    say = lambda to, op, blocks=(), **fields: answers.append(op)
    server, said = AsyncServer(served, update, {}, trainers, say), list[wire.Message]()
    line_of(said).prefetch({"t": np.array([1]), "u": np.array([2])}, train=True)
    with pytest.raises(WireError, match="limit of 0 rows"):
        server.prefetch(0, said.pop())
    line_of(said).prefetch({"t": np.array([4])}, train=True)
    server.prefetch(0, said.pop())
    assert answers == ["rows"]
    waiting = server._requests._under_way
    assert {key: [x.tolist() for x in ids] for key, ids in waiting.items()} == {(0, "t"): [[4]]}
