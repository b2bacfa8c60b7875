"""GEO-SGD after the failure of a process: repeated pushes, and trainers that begin with a snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedSnapshot
from dtrans.protocol.tables.table_rows import runs_of
from dtrans.protocol.trainer.geo_steps import GeoReturn, GeoSnapshot, GeoSteps
from tools.simulate.updates import InNumpy


def array(x: float) -> np.ndarray:
    return np.full(2, x, np.float32)


def geo_snapshot(step: int, pushed: int, pending: int = 0) -> GeoSnapshot:
    """Return a snapshot with changes of 8, and deltas of 4 if a push is pending."""
    deltas = {"w": array(4)} if pending else {}
    return GeoSnapshot(step, pushed, pending, {"w": array(8)}, deltas, {})


@pytest.mark.parametrize(
    ("snapshot", "received", "step", "counts", "parts"),
    [
        pytest.param(
            geo_snapshot(25, 20), {"a": 20, "b": 20}, 25, {"a": 20, "b": 20}, [(8, 0), (8, 0)],
            id="nothing was pushed since the snapshot",
        ),
        pytest.param(
            geo_snapshot(25, 20, 10), {"a": 10, "b": 20}, 25, {"a": 10, "b": 20}, [(8, 4), (8, 0)],
            id="one server lacks the pending push",
        ),
        pytest.param(
            geo_snapshot(25, 20, 10), {"a": 0, "b": 0}, 25, {"a": 10, "b": 10}, [(8, 4), (8, 4)],
            id="all servers went back",
        ),
        pytest.param(
            geo_snapshot(25, 20, 10), {"a": 30, "b": 30}, 30, {"a": 30, "b": 30}, [(4, 0), (4, 0)],
            id="a push followed the snapshot",
        ),
        pytest.param(
            geo_snapshot(25, 20), {"a": 40, "b": 30}, 40, {"a": 40, "b": 30}, [(2, 0), (2, 2)],
            id="one server lacks the last of two pushes",
        ),
        pytest.param(
            geo_snapshot(25, 20), {"a": 40, "b": 7}, 40, {"a": 40, "b": 7}, [(2, 0), (4, 4)],
            id="one server went back",
        ),
    ],
)  # fmt: skip
def test_a_trainer_continues_after_the_steps_of_servers(
    snapshot: GeoSnapshot,
    received: dict[str, int],
    step: int,
    counts: dict[str, int],
    parts: list[tuple[float, float]],
) -> None:
    """With two trainers, each push sends half of the changes.

    The trainer pushes every ten steps.
    """
    begin = GeoReturn(snapshot, received, trainers=2, push_every=10)
    assert (begin.step, begin.counts) == (step, counts)
    for endpoint, expected in zip(received, parts, strict=True):
        delta = snapshot.deltas.get("w", array(0))
        change, repeated = begin.split(endpoint, snapshot.changes["w"], delta)
        assert (change[0], repeated[0]) == expected
        # a server counts the repeated push as well
        assert begin.counts[endpoint] + begin.repeated * bool(repeated.any()) == begin.count


BLOCKS = ("a", "b"), runs_of([3, 2])  # rows 0 to 2 are on server a, rows 3 and 4 on server b


def rows_snapshot(pending: RowGradient | None = None) -> CachedSnapshot:
    """Return a snapshot with changes of 8 in rows 0, 1, 3 and 4. The next push sends rows 1 and 3."""
    touched = np.array([False, True, True, False])
    ids, changes = np.array([0, 1, 3, 4], np.int32), np.full((4, 1), 8, np.float32)
    return CachedSnapshot(ids, touched, changes, [], pending)


@pytest.mark.parametrize(
    ("received", "pushes", "changes", "touched", "repeated"),
    [
        pytest.param(
            {"a": 20, "b": 20}, {30: [1]}, [8, 8, 8, 8], [1, 3], {},
            id="no server has received a push after the snapshot",
        ),
        pytest.param(
            {"a": 30, "b": 30}, {20: [0], 30: [1]}, [8, 4, 8, 8], [3], {},
            id="a push contained one of the rows",
        ),
        pytest.param(
            {"a": 40, "b": 30}, {30: [1, 3], 40: [0, 3, 4]}, [4, 4, 2, 4], [], {3: 2, 4: 4},
            id="one server lacks the last of two pushes",
        ),
        pytest.param(
            {"a": 40, "b": 7}, {30: [1, 3], 40: [0, 3]}, [4, 4, 4, 8], [], {3: 4},
            id="one server went back",
        ),
    ],
)  # fmt: skip
def test_a_trainer_continues_with_the_changes_of_rows_that_pushes_left(
    received: dict[str, int],
    pushes: dict[int, list[int]],
    changes: list[float],
    touched: list[int],
    repeated: dict[int, float],
) -> None:
    ids_of_pushes = {n: {"t": np.array(ids, np.int32)} for n, ids in pushes.items()}
    snapshot = dataclasses.replace(
        geo_snapshot(25, 20), tables={"t": rows_snapshot()}, pushes=ids_of_pushes
    )
    rows, deltas = GeoReturn(snapshot, received, trainers=2, push_every=10).split_rows("t", *BLOCKS)
    assert rows.changes[:, 0].tolist() == changes
    assert rows.ids[rows.is_touched].tolist() == touched
    assert dict(zip(deltas.ids.tolist(), deltas.rows[:, 0].tolist(), strict=True)) == repeated


def test_a_trainer_repeats_the_pending_deltas_of_rows_on_the_servers_that_lack_them() -> None:
    pending = RowGradient(np.array([1, 3], np.int32), np.full((2, 1), 4, np.float32))
    snapshot = dataclasses.replace(geo_snapshot(25, 20, 10), tables={"t": rows_snapshot(pending)})
    begin = GeoReturn(snapshot, {"a": 20, "b": 10}, trainers=2, push_every=10)
    rows, deltas = begin.split_rows("t", *BLOCKS)
    assert rows is snapshot.tables["t"]
    assert (deltas.ids.tolist(), deltas.rows.tolist()) == ([3], [[4]])


class Servers:
    """Two servers with one parameter each."""

    def __init__(self) -> None:
        self.values = {"a": array(0), "b": array(0)}
        self.received_by = {"a": 0, "b": 0}
        self.pushes = self.answered = 0

    def put(self, deltas: Any, steps: int) -> None:
        self.repeat(deltas, steps, ["a", "b"])

    def repeat(self, deltas: Any, steps: int, endpoints: Collection[str]) -> None:
        self.pushes += 1
        for endpoint, delta in zip(self.values, deltas, strict=True):
            if endpoint in endpoints:
                self.values[endpoint] = self.values[endpoint] + delta
                self.received_by[endpoint] += steps

    def received(self) -> int:
        return self.answered

    def newest(self) -> Any:
        return list(self.values.values())

    def reconnect(self) -> None:
        """Connect again. The first answer on the new connection has arrived."""
        self.pushes = self.answered = 0


def go_on(servers: Servers, geo: GeoSteps) -> None:
    while geo.waits:
        servers.answered = servers.pushes
        geo.go_on()


def test_a_pending_push_is_repeated_where_it_is_lacking() -> None:
    servers = Servers()
    geo = GeoSteps(servers, InNumpy(), 2, servers.newest())
    for _ in range(4):
        geo.step([x + 1 for x in geo.local], 4, block_on_pull=False)
    # server b has not received the push
    servers.values["b"], servers.received_by["b"] = array(0), 0
    servers.reconnect()
    assert geo.counts(servers.received_by) == {"a": 4, "b": 0}
    geo.rejoin(servers.received_by)
    go_on(servers, geo)
    assert servers.received_by == {"a": 4, "b": 4} == geo.counts(servers.received_by)
    assert [x[0] for x in servers.newest()] == [2, 2]
    assert [x[0] for x in geo.local] == [4, 4]


def test_a_server_that_goes_back_loses_answered_pushes() -> None:
    servers = Servers()
    geo = GeoSteps(servers, InNumpy(), 2, servers.newest())
    for _ in range(4):
        geo.step([x + 1 for x in geo.local], 2, block_on_pull=True)
        go_on(servers, geo)
    servers.values["b"], servers.received_by["b"] = array(0), 0
    servers.reconnect()
    assert geo.counts(servers.received_by) == {"a": 4, "b": 4}
    geo.rejoin(servers.received_by)
    assert geo.waits
    go_on(servers, geo)
    # two pushes: 1 of 2, and 1.5 of 3; 1.5 remain
    assert [x[0] for x in servers.newest()] == [2.5, 0]
    assert [x[0] for x in geo.local] == [4, 1.5]
    assert geo.unpushed(geo.local)[0][0] == 1.5
