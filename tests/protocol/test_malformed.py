"""Malformed messages: 20,000 messages (1,000,000 at night) in the middle of a step change
nothing."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import tracemalloc
from typing import Any

import malformed_messages
import numpy as np
import pytest
from malformed_messages import malformed
from role_processes import memory_of

from dtrans.errors import DtransError, WireError
from dtrans.protocol import wire
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.tables.row_requests import RowRequests
from tools.simulate.case import Case
from tools.simulate.one_device import values_of
from tools.simulate.server_role import quiet
from tools.simulate.updates import (
    SimulatedBlocks,
    SimulatedUpdate,
    gradient,
    gradient_name,
    looked_up,
    row_gradient,
    served,
)


CASE = Case(seed=0, mode="sync", steps=(2, 2), servers=((5, 300),), table=9)
ASYNC = dataclasses.replace(CASE, mode="async")
(EP,) = CASE.endpoints
(TABLE,) = CASE.tables
FLAT = 20.0  # MiB by which the memory of a process may grow
# bytes of memory that a thousand messages may leave behind, and may use at a time
KEPT, LARGEST = (
    20_000,
    1_000_000,
)
PIECES = [[["w", 0, 4]], [[[f"{EP}/w0", 0, 1 << 62]]], [[gradient_name(f"{EP}/w0", 0), 0, 20]]]
COUNTS: list[dict[str, Any]] = [
    {TABLE: 2},
    {TABLE: 1 << 40},
    {TABLE: True},
    {gradient_name(TABLE, 0): 2},
]
VALUES: list[Any] = [*malformed_messages.VALUES, *PIECES, *COUNTS]


class Server:
    """Server with two trainers in the middle of a step, and the messages that it sends."""

    def __init__(self, case: Case = CASE) -> None:
        self.said: list[tuple[Any, str]] = []
        self.rows: dict[str, np.ndarray] = {}  # the newest table rows that the server has sent
        self.sync_mode = case.sync_mode
        blocks = served(case, EP)
        self.trainers = TrainerRegistry(
            blocks, deadline=60.0, plan={"init": "one"}, secret="secret"
        )
        self.update: SimulatedUpdate | SimulatedBlocks
        kind: SyncServer | AsyncServer
        if self.sync_mode:
            self.update = SimulatedUpdate(blocks, lambda: None)
            kind = SyncServer(blocks, self.update, self.trainers, self.say)
        else:
            self.update = SimulatedBlocks(blocks, lambda: None, lambda: 0.0, geo=False)
            kind = AsyncServer(blocks, self.update, self.update.state, self.trainers, self.say)
        self.machine = Serving(kind, self.trainers, self.say, Refusals(quiet))
        for k in range(2):
            self.take(k, "hello", **self.hello(k))

    def say(self, to: Any, op: str, /, blocks: Any = (), **fields: Any) -> None:
        self.said.append((to, op))
        if op == "rows":
            self.rows = dict(blocks)

    def hello(self, k: int) -> dict[str, Any]:
        common = {"order": sys.byteorder, "plan": {"init": "one"}, "nonce": "n"}
        mode = {"sync_mode": self.sync_mode}
        return {"trainer": k, "trainers": 2, "session": f"session {k}", **common, **mode}

    def take(self, k: int, op: str, blocks: Any = (), **fields: Any) -> None:
        for head, *frames in wire.framed(op, blocks, **fields):
            self.machine.take(b"trainer %d" % k, [head, *map(bytes, frames)], 0.0)

    def gradients(self, k: int, step: int) -> list[tuple[str, np.ndarray]]:
        return [
            (gradient_name(n, k), gradient(n, size, k, step)) for n, size in CASE.blocks.items()
        ]

    def look_up(self, k: int, step: int) -> list[tuple[str, np.ndarray]]:
        """Look up the rows of trainer k in a step; return their gradient."""
        ids = looked_up(CASE, k, step)
        self.take(k, "prefetch", [(TABLE, ids)], step=step, counts={TABLE: len(ids)}, train=True)
        return [(gradient_name(TABLE, k), row_gradient(self.rows[TABLE], k, step))]

    def shown(self) -> Any:
        """Return everything that a message could change."""
        kind: Any = self.machine.kind
        turns = {}
        for k, t in kind._turns.by_trainer.items():
            turns[k] = t.at_barrier, t.waits, dict(t.grads._arrived)
        grads = {n: x.tobytes() for n, x in kind._turns._gradients().items()}
        known = {k: (t.address, t.session, t.done, t.lost) for k, t in self.trainers.known.items()}
        state = {n: x.tobytes() for n, x in self.update.state.items()}
        return (
            kind.step,
            kind.rounds.number,
            turns,
            grads,
            list(kind._rows.requests._begun),
            known,
            dict(self.trainers.by_address),
            state,
        )


def lookups() -> list[list[bytes]]:
    """Return valid messages of trainer 0 with row ids."""
    ids, name = np.array([2, 5], np.int32), gradient_name(TABLE, 0)
    proper = [
        *wire.framed("prefetch", [(TABLE, ids)], step=0, counts={TABLE: 2}, train=True),
        *wire.framed("prefetch", [(TABLE, ids)], step=0, counts={TABLE: 2}, train=True, ahead=1),
        *wire.framed("row_ids", [(name, ids)], step=0, counts={name: 2}),
    ]
    return [[bytes(f) for f in message] for message in proper]


def recorded(server: Server) -> list[list[bytes]]:
    """Return valid messages of another trainer 0, or of another step; and `lookups`."""
    way = [["float64", [2], ["all_reduce", "sum"]]]
    recv = wire.header("recv", step=9, blocks=[[f"{EP}/w0", [5], "float32"]])
    proper = [
        *wire.framed("hello", **server.hello(0) | {"session": "another"}),
        *wire.framed("send", server.gradients(0, 1), step=1),
        *wire.framed("exchange", [("0", np.zeros(2))], step=1, round=0, values=way),
        *wire.framed("peer", endpoint="127.0.0.1:9", order=sys.byteorder, layout="x"),
        [recv],
    ]
    return [*([bytes(f) for f in message] for message in proper), *lookups()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(100))
def test_ten_thousand_messages_of_strangers_change_nothing(seed: int) -> None:
    r, server = random.Random(seed), Server()
    proper = recorded(server)
    rows = server.look_up(0, 0)
    first, *rest = server.gradients(0, 0)
    server.take(0, "send", [first], step=0)
    before = server.shown()
    for i in range(10_000):
        server.machine.take(b"stranger %d" % r.randrange(50), malformed(r, proper, VALUES), 0.0)
        if i % 500 == 0:
            assert server.shown() == before
    assert server.shown() == before
    finished(server, [*rest, *rows])


def finished(server: Server, rest: list[tuple[str, np.ndarray]]) -> None:
    """Complete the job, and compare it with one device; `rest` is sent by trainer 0 in step 0."""
    for step in range(2):
        for k in range(2):
            gradients = rest
            if (k, step) != (0, 0):
                gradients = [*server.look_up(k, step), *server.gradients(k, step)]
            server.take(k, "send", gradients, step=step)
            server.take(k, "send_barrier", step=step)
    for n, x in values_of(CASE)[-1].items():
        np.testing.assert_array_equal(server.update.state[n], x)
    for k in range(2):
        server.take(k, "complete")
        server.take(k, "goodbye")
    assert server.machine.ended


@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_is_broken_ends_the_job_or_changes_nothing(seed: int) -> None:
    """The trainer was admitted.

    The server refuses its messages, or the job ends with an error that names it.
    """
    r = random.Random(seed)
    server = Server()
    proper = [x for x in recorded(server) if b"hello" not in x[0]]
    ended = 0
    for _ in range(1000):
        step, state = (
            server.machine.kind.step,
            {n: x.tobytes() for n, x in server.update.state.items()},
        )
        try:
            server.machine.take(b"trainer 0", malformed(r, proper, VALUES), 0.0)
        except DtransError as e:
            assert "trainer 0" in str(e)
            ended, server = ended + 1, Server()
            continue
        assert server.machine.kind.step == step
        assert {n: x.tobytes() for n, x in server.update.state.items()} == state
    assert ended < 500


@pytest.mark.parametrize("case", [CASE, ASYNC], ids=["sync", "async"])
def test_malformed_row_ids_are_refused_and_keep_no_more_than_one_request(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses them, or the job ends with an error that names the trainer.

    Each trainer has at most one incomplete request for each operation and later step.
    """
    r, server, parsed, refused = random.Random(0), Server(case), dict[str, int](), 0
    real = RowRequests._numbers

    def numbers(
        requests: RowRequests, k: int, message: wire.Message, *args: Any, **how: Any
    ) -> Any:
        parsed[message.op] = parsed.get(message.op, 0) + 1
        return real(requests, k, message, *args, **how)

    monkeypatch.setattr(RowRequests, "_numbers", numbers)
    state = {n: x.tobytes() for n, x in server.update.state.items()}
    for _ in range(5000):
        try:
            server.machine.take(b"trainer 0", malformed(r, lookups(), VALUES), 0.0)
        except DtransError as e:
            assert "trainer 0" in str(e)
            server = Server(case)
        if server.trainers.known[0].done:  # it sent a valid `complete` or `abort`
            server = Server(case)
        kind: Any = server.machine.kind
        requests = kind._rows.requests if case.sync_mode else kind._requests
        assert len(requests._begun) <= 2 + 64 * case.sync_mode
        assert {n: x.tobytes() for n, x in server.update.state.items()} == state
    refused = server.machine.refusals.count
    assert refused > 1000
    assert parsed["prefetch"] > 100 and (case.sync_mode or parsed["row_ids"] > 100)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(50_000, id="by day"),
        pytest.param(1_000_000, id="a million", marks=pytest.mark.soak),
    ],
)
def test_malformed_messages_are_counted_and_leave_nothing_behind(count: int) -> None:
    """The parser refuses a message with its own error, or returns a message.

    Neither may keep memory.
    """
    r, refusals, read = random.Random(count), Refusals(quiet), 0
    proper = recorded(Server())

    def hear(messages: int) -> int:
        found = 0
        for _ in range(messages):
            try:
                wire.parse(malformed(r, proper, VALUES))
            except WireError as e:
                refusals.note("%s", e)
            else:
                found += 1
        return found

    read += hear(1000)  # objects that Python creates once
    resident = memory_of(os.getpid())
    read += hear(count - 2000)
    assert memory_of(os.getpid()) - resident < FLAT
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        read += hear(1000)
        gc.collect()
        after, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < KEPT and most - before < LARGEST
    assert refusals.count + read == count
    assert refusals.count > count / 2
