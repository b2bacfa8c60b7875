"""Counts of the steps of asynchronous trainers, and the field `count` of `recv` messages."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.step_counts import MAX_STEPS, StepCounts
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from tools.simulate.case import Case
from tools.simulate.updates import SimulatedBlocks, SimulatedUpdate, served


def test_merged_gradients_count_several_steps() -> None:
    counts = StepCounts("here:1", {0: 5, 1: 3})
    counts.add(1, 4)
    counts.add(2, 1)
    assert counts.by_trainer == {0: 5, 1: 7, 2: 1}
    assert (counts.total, counts.largest) == (13, 7)
    assert [counts.of_others(k) for k in range(4)] == [8, 6, 12, 13]
    assert StepCounts("here:1").largest == 0


def test_a_larger_count_of_another_server_is_adopted(caplog: pytest.LogCaptureFixture) -> None:
    counts = StepCounts("here:1", {0: 5, 1: 3})
    with caplog.at_level(logging.WARNING):
        assert not counts.adopt(0, 5) and not counts.adopt(1, 2) and not caplog.messages
        assert counts.adopt(1, 7) and counts.adopt(2, 1)
    assert counts.by_trainer == {0: 5, 1: 7, 2: 1} and counts.total == 13
    assert caplog.messages[0] == (
        "pserver here:1 lacks 4 steps of trainer 1, which continues after step 7"
    )


@pytest.mark.parametrize("count", [0, 1, MAX_STEPS])
def test_a_count_in_range_is_accepted(count: int) -> None:
    StepCounts("here:1").check(0, count)


def server_of(mode: Any, said: list[Any]) -> tuple[TrainerRegistry, SyncServer | AsyncServer]:
    """Return a server with one trainer, which has sent hello."""
    case = Case(seed=0, mode=mode, steps=(2,), servers=((5,),))
    blocks = served(case, case.endpoints[0])
    trainers = TrainerRegistry(blocks, deadline=60.0)
    fields = {"trainer": 0, "trainers": 1, "session": "", "order": sys.byteorder}
    trainers.hello(b"0", wire.Message("hello", fields), None)

    def say(to: Any, op: str, /, *args: Any, **fields: Any) -> None:
        said.append(op)

    if mode == "sync":
        return trainers, SyncServer(blocks, SimulatedUpdate(blocks, lambda: None), trainers, say)
    update = SimulatedBlocks(blocks, lambda: None, lambda: 0.0, geo=False)
    return trainers, AsyncServer(blocks, update, update.state, trainers, say)


@pytest.mark.parametrize(
    ("mode", "field", "refusal"),
    [
        ("sync", {"count": 1}, "field `count`, which only asynchronous servers accept"),
        ("sync", {"changed": True}, "field `changed`, which only asynchronous servers accept"),
        ("async", {"count": -1}, "trainer 0 sent a `recv` message with count=-1, expected 0 to"),
        ("async", {"count": MAX_STEPS + 1}, f"count={MAX_STEPS + 1}, expected 0 to {MAX_STEPS}$"),
    ],
)
def test_an_unexpected_count_of_steps_is_refused(
    mode: str, field: dict[str, Any], refusal: str
) -> None:
    """The refused message changes nothing. So the server answers the next message."""
    said: list[str] = []
    trainers, server = server_of(mode, said)
    (name,) = server.state
    blocks = [[name, [5], "float32"]]
    with pytest.raises(WireError, match=refusal):
        server.recv(0, wire.Message("recv", {"step": 0, "blocks": blocks, **field}))
    assert not trainers.known[0].wants and not said
    if isinstance(server, AsyncServer):
        assert server.counts.total == 0
    server.recv(0, wire.Message("recv", {"step": 0, "blocks": blocks}))
    assert trainers.known[0].wants == (name,) and said == ["blocks"]
