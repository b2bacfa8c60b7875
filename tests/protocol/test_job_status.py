"""The status that a server reports to an observer.

A request changes nothing. The test sets the times.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgpack
import numpy as np
import pytest

from dtrans.errors import StateError, WireError
from dtrans.protocol import wire
from dtrans.protocol.job_status import RATE, ServerStatus, TrainerStatus, read_report
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from tools.simulate.case import Case
from tools.simulate.server_role import quiet
from tools.simulate.updates import SimulatedBlocks, SimulatedUpdate, gradient, gradient_name, served


class Observed:
    """Server with two blocks and two trainers, and an observer."""

    def __init__(self, mode: str = "sync") -> None:
        self.case = Case(seed=0, mode=mode, steps=(9, 9), servers=((5, 300),))
        (endpoint,) = self.case.endpoints
        self.now = 100.0
        self.said: list[tuple[Any, str, dict[str, Any]]] = []
        blocks = served(self.case, endpoint)
        self.trainers = TrainerRegistry(blocks, deadline=60.0, plan={"init": "one"})
        kind: SyncServer | AsyncServer
        if mode == "sync":
            kind = SyncServer(
                blocks, SimulatedUpdate(blocks, lambda: None), self.trainers, self.say
            )
        else:
            update = SimulatedBlocks(blocks, lambda: None, lambda: 0.0, geo=False)
            state = {n: np.frombuffer(h[0], np.float32) for n, h in update.history.items()}
            kind = AsyncServer(blocks, update, state, self.trainers, self.say)
        self.machine = Serving(kind, self.trainers, self.say, Refusals(quiet))
        self.trainers.begin(self.now)
        self.machine.look(self.now)

    def say(self, to: Any, op: str, /, blocks: Any = (), **fields: Any) -> None:
        for _ in self.trainers.framed(to, op, blocks, **fields):
            self.said.append((to, op, fields))

    def take(self, k: int, op: str, blocks: Any = (), **fields: Any) -> int:
        """Deliver a message of a trainer. Return its number of bytes."""
        size = 0
        for head, *frames in wire.framed(op, blocks, **fields):
            parts = [head, *map(bytes, frames)]
            size += sum(map(len, parts))
            self.machine.take(b"trainer %d" % k, parts, self.now)
        return size

    def hello(self, k: int) -> int:
        common = {"order": sys.byteorder, "sync_mode": self.case.sync_mode, "plan": {"init": "one"}}
        return self.take(k, "hello", trainer=k, trainers=2, session=f"session {k}", **common)

    def gradients(self, k: int, step: int) -> list[tuple[str, np.ndarray]]:
        name = k if self.case.sync_mode else 0
        return [
            (gradient_name(n, name), gradient(n, size, k, step))
            for n, size in self.case.blocks.items()
        ]

    def step(self, k: int, step: int) -> None:
        self.take(k, "send", self.gradients(k, step), step=step)
        if self.case.sync_mode:
            self.take(k, "send_barrier", step=step)

    def observe(self, *frames: bytes) -> tuple[str, dict[str, Any]]:
        """Deliver a message of the observer, by default `status`. Return the answer."""
        self.machine.observe(b"observer", frames or [wire.header("status", request=7)], self.now)
        to, op, fields = self.said.pop()
        assert to == b"observer"
        return op, fields

    def status(self) -> tuple[ServerStatus, list[TrainerStatus]]:
        """Return the records of the answer, after encoding and decoding."""
        op, fields = self.observe()
        assert (op, fields.pop("request")) == ("status_report", 7)
        return read_report(wire.parse([wire.header(op, **fields)]))


def test_a_trainer_that_left_in_an_earlier_generation_has_left() -> None:
    job = Observed()
    job.machine.trainers.left_before = frozenset({1})
    server, trainers = job.status()
    assert server.doing == "waiting for trainer 0 to connect"
    assert [x.state for x in trainers] == ["not here yet", "left"]


def test_a_dropped_trainer_is_not_awaited() -> None:
    job = Observed()
    job.machine.trainers.dropped = frozenset({1})
    job.hello(0)
    server, (first, second) = job.status()
    assert (server.doing, first.state) == ("serving", "present")
    assert (second.state, second.doing, second.step) == ("dropped", "", None)


def test_who_is_there_and_what_each_does() -> None:
    job = Observed()
    server, trainers = job.status()
    assert (server.mode, server.step, server.count, server.doing) == (
        "synchronous",
        None,
        2,
        "waiting for trainers 0, 1 to connect",
    )
    assert [(t.state, t.doing, t.step, t.silent) for t in trainers] == [
        ("not here yet", "", None, None)
    ] * 2
    size = job.hello(0)
    job.now += 2.0
    server, (first, second) = job.status()
    assert server.doing == "waiting for trainer 1 to connect"
    assert (first.state, first.doing, first.step, first.silent, first.received) == (
        "present",
        "computing",
        0,
        2.0,
        size,
    )
    assert second.state == "not here yet"
    job.hello(1)
    assert job.status()[0].doing == "serving"
    size += job.take(0, "send", job.gradients(0, 0)[:1], step=0)
    assert job.status()[1][0].doing == "sending: 1 of 2 gradients have arrived"
    size += job.take(0, "send", job.gradients(0, 0)[1:], step=0) + job.take(
        0, "send_barrier", step=0
    )
    server, (first, second) = job.status()
    assert server.doing == "waiting for gradients of step 1 from trainer 1 (computing)"
    assert (first.doing, first.received, second.doing) == (
        "waiting for the update",
        size,
        "computing",
    )
    job.step(1, 0)
    server, trainers = job.status()
    assert (server.step, [t.step for t in trainers], server.doing) == (1, [1, 1], "serving")
    assert [t.staleness for t in trainers] == [None, None]
    job.trainers.lose(b"trainer 1", job.now)
    job.take(0, "complete")
    assert [(t.state, t.doing) for t in job.status()[1]] == [
        ("left", ""),
        ("connection lost", "computing"),
    ]


def test_bytes_are_those_of_messages_and_rates_are_of_a_window() -> None:
    job = Observed()
    received = job.hello(0) + job.hello(1)
    for step in range(4):
        for k in range(2):
            job.step(k, step)
        job.now += 5.0
        job.machine.look(job.now)
    server, trainers = job.status()
    assert server.steps_per_second == pytest.approx(4 / 20.0)
    assert server.received == sum(t.received for t in trainers) > received + 8 * 305 * 4
    assert server.received_per_second == pytest.approx(server.received / 20.0)
    assert server.sent == sum(t.sent for t in trainers) > 0
    for _ in range(700):  # in the last ten minutes there are no steps
        job.now += 1.0
        job.machine.look(job.now)
    assert job.status()[0].steps_per_second == 0
    assert len(job.machine.status._samples) < 610


def test_a_job_of_many_steps_a_second_has_a_window_of_ten_seconds() -> None:
    job = Observed()
    job.hello(0), job.hello(1)
    for step in range(40):
        for k in range(2):
            job.step(k, step)
        job.now += 0.5 if step < 20 else 1.0
        job.machine.look(job.now)
    server, trainers = job.status()
    assert [server.steps_per_second, *(t.steps_per_second for t in trainers)] == pytest.approx(
        [1.0] * 3
    )
    assert server.uptime == 30.0


def test_staleness_is_the_steps_of_others_that_a_gradient_lacks() -> None:
    job = Observed("async")
    job.hello(0), job.hello(1)
    for k in range(2):
        job.take(k, "recv", step=0, blocks=[])
    assert [t.staleness for t in job.status()[1]] == [None, None]
    for step in range(3):
        job.step(0, step)
        job.take(0, "recv", step=step + 1)
    job.step(1, 0)
    server, trainers = job.status()
    assert [t.staleness for t in trainers] == [0, 3]
    assert [t.step for t in trainers] == [3, 1]
    assert (server.step, server.mode, server.doing) == (3, "asynchronous", "serving")
    job.take(1, "recv", step=1)
    job.step(0, 3)
    assert [t.staleness for t in job.status()[1]] == [1, 3]
    job.take(1, "abort", reason="a reason")
    assert job.status()[1][1].state == "failed"


def test_checkpoints() -> None:
    job = Observed()
    job.hello(0), job.hello(1)
    job.machine.saves.start = lambda name, made, arrays: 5
    job.take(0, "save", step=0, name="100", made=0)
    job.now += 2.0
    server, _ = job.status()
    assert (server.saving, server.checkpoint) == ({"100": 2.0}, {})
    job.machine.saves.written("100", "", job.now + 1.0)
    job.now += 4.0
    server, _ = job.status()
    saved = {"name": "100", "step": 0, "ago": 3.0, "seconds": 3.0, "blocks": 5, "error": ""}
    assert (server.saving, server.checkpoint) == ({}, saved)
    job.take(0, "save", step=0, name="101", made=0)
    job.machine.saves.written("101", "no space", job.now)
    assert job.status()[0].checkpoint["error"] == "no space"


ASKS = wire.header("status")
ODD = {
    "what trainers say": wire.header("send_barrier", step=0),
    "a hello": wire.header("hello", trainer=1, trainers=2, session="x", order=sys.byteorder),
    "an answer": wire.header("status_report", server={}, trainers=[]),
    "noise": b"\xff" * 40,
    "nothing": b"",
    "a request that is no number": wire.header("status", request="x"),
}


@pytest.mark.parametrize("said", ODD.values(), ids=ODD)
def test_an_observer_says_nothing_else(said: bytes) -> None:
    job = Observed()
    job.hello(0)
    known, step = dict(job.trainers.known), job.machine.kind.step
    assert job.observe(said)[0] == "refuse"
    assert job.observe(ASKS, b"more")[0] == "refuse"
    assert job.machine.refusals.count == 2
    assert (job.trainers.known, job.machine.kind.step) == (known, step)
    assert job.status()[0].refused == 2


def test_a_trainer_is_no_observer_and_a_stranger_neither() -> None:
    job = Observed()
    job.hello(0)
    for k in (0, 1):
        job.take(k, "status")
        assert job.said[-1][1] == "refuse"
    assert job.machine.refusals.count == 2


def test_observers_do_not_count_and_delay_no_end() -> None:
    job = Observed()
    job.hello(0), job.hello(1)
    job.status()
    assert len(job.trainers.known) == 2
    for k in range(2):
        job.take(k, "complete")
        job.take(k, "goodbye")
    assert job.machine.ended


def test_observers_are_answered_so_often_and_no_more() -> None:
    job = Observed()
    answers = [job.observe()[0] for _ in range(10 * RATE)]
    assert answers == ["status_report"] * RATE + ["refuse"] * 9 * RATE
    assert "50 times a second" in job.observe()[1]["reason"]
    job.now += 0.11
    assert [job.observe()[0] for _ in range(10)].count("status_report") == RATE // 10
    assert job.machine.refusals.count == 9 * RATE + 1 + 5


def test_a_report_that_is_none_is_named() -> None:
    job = Observed()
    _, fields = job.observe()
    good = {n: fields[n] for n in ("server", "trainers")}
    for wrong, message in [
        (
            {"server": good["server"] | {"step": "x"}},
            "a status whose field step has the wrong value 'x'",
        ),
        ({"server": {}}, "another version of dtrans"),
        ({"trainers": [None]}, "another version of dtrans"),
        (
            {"trainers": [good["trainers"][0] | {"state": "bored"}]},
            "a trainer whose state is 'bored'",
        ),
        ({"server": good["server"] | {"tables": [1]}}, "another version of dtrans"),
        ({"server": good["server"] | {"checkpoint": {"name": "x"}}}, "another version of dtrans"),
    ]:
        with pytest.raises(WireError, match=message):
            read_report(wire.Message("status_report", good | wrong))


def test_a_server_that_has_no_status_now_goes_on() -> None:
    class Tables:
        def report(self) -> Any:
            raise StateError("it is in the middle of something")

    job = Observed()
    job.machine.kind.tables = Tables()  # type: ignore[assignment]
    op, fields = job.observe()
    assert (op, fields["reason"]) == (
        "refuse",
        "the status is not available now: it is in the middle of something",
    )
    job.hello(0), job.hello(1)
    job.step(0, 0), job.step(1, 0)
    assert job.machine.kind.step == 1


def test_a_report_is_small() -> None:
    """A status with a thousand trainers is far smaller than the limit of a frame."""
    row = dataclasses.asdict(
        TrainerStatus(999, "present", "x" * 60, 10**6, 1e3, 99, 1.0, 10**12, 10**12)
    )
    assert len(msgpack.packb([row] * 1000)) < wire.MAX_MESSAGE / 50


def test_a_checkpoint_that_is_written_across_generations_is_answered() -> None:
    """The servers go back to a snapshot during the write.

    The repeated step requests the same name again.
    """
    before, after = Observed(), Observed()
    for at in (before, after):
        at.machine.saves.start = lambda name, step, arrays: 2
        at.hello(0)
        at.hello(1)
    before.take(0, "save", step=0, name="10", made=0)
    after.machine.saves.take_over(before.machine.saves)
    after.take(0, "save", step=0, name="10", made=0, request=7)
    assert not [op for _, op, _ in after.said if op == "saved"]
    after.machine.saves.written("10", "", after.now)
    answers = [(to, fields) for to, op, fields in after.said if op == "saved"]
    assert answers == [(b"trainer 0", {"name": "10", "error": "", "request": 7})]
    # no trainer has requested this checkpoint again
    before.take(0, "save", step=0, name="20", made=0)
    other = Observed()
    other.machine.saves.take_over(before.machine.saves)
    other.machine.saves.written("20", "", other.now)
    assert other.machine.saves.asked()["20"] == 0
