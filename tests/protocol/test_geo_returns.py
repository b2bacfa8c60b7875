"""GEO-SGD after the loss of a process: repeated pushes, and trainers that begin with a cut."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from dtrans.protocol.trainer.geo_steps import GeoCut, GeoReturn, GeoSteps
from tools.simulate.updates import InNumpy


def array(x: float) -> np.ndarray:
    return np.full(2, x, np.float32)


def divided_for(step: int, pushed: int, pending: int = 0) -> GeoCut:
    """Return a cut with changes of 8, and deltas of 4 if a push is pending."""
    deltas = {"w": array(4)} if pending else {}
    return GeoCut(step, pushed, pending, {"w": array(8)}, deltas, {})


@pytest.mark.parametrize(
    ("cut", "received", "step", "counts", "parts"),
    [
        pytest.param(
            divided_for(25, 20), {"a": 20, "b": 20}, 25, {"a": 20, "b": 20}, [(8, 0), (8, 0)],
            id="nothing was pushed since the cut",
        ),
        pytest.param(
            divided_for(25, 20, 10), {"a": 10, "b": 20}, 25, {"a": 10, "b": 20}, [(8, 4), (8, 0)],
            id="one server lacks the pending push",
        ),
        pytest.param(
            divided_for(25, 20, 10), {"a": 0, "b": 0}, 25, {"a": 10, "b": 10}, [(8, 4), (8, 4)],
            id="all servers went back",
        ),
        pytest.param(
            divided_for(25, 20, 10), {"a": 30, "b": 30}, 30, {"a": 30, "b": 30}, [(4, 0), (4, 0)],
            id="a push followed the cut",
        ),
        pytest.param(
            divided_for(25, 20), {"a": 40, "b": 30}, 40, {"a": 40, "b": 30}, [(2, 0), (2, 2)],
            id="one server lacks the last of two pushes",
        ),
        pytest.param(
            divided_for(25, 20), {"a": 40, "b": 7}, 40, {"a": 40, "b": 7}, [(2, 0), (4, 4)],
            id="one server went back",
        ),
    ],
)  # fmt: skip
def test_a_trainer_continues_after_the_steps_of_servers(
    cut: GeoCut,
    received: dict[str, int],
    step: int,
    counts: dict[str, int],
    parts: list[tuple[float, float]],
) -> None:
    """Two trainers, so that each push sends half of the changes. It pushes every ten steps."""
    begin = GeoReturn(cut, received, trainers=2, push_every=10)
    assert (begin.step, begin.counts) == (step, counts)
    for endpoint, expected in zip(received, parts, strict=True):
        delta = cut.deltas.get("w", array(0))
        change, repeated = begin.split(endpoint, cut.changes["w"], delta)
        assert (change[0], repeated[0]) == expected
        # a server counts the repeated push, too
        assert begin.counts[endpoint] + begin.repeated * bool(repeated.any()) == begin.count


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
        """Begin with a new connection, whose first answer has arrived."""
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
