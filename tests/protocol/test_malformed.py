"""What nobody of the job would send: 20,000 messages (1,000,000 in soak) in the middle of a step
change nothing."""

from __future__ import annotations

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
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from tools.simulate.case import Case
from tools.simulate.one_device import values_of
from tools.simulate.server_role import quiet
from tools.simulate.updates import SimulatedUpdate, gradient, gradient_name, served


CASE = Case(seed=0, mode="sync", steps=(2, 2), servers=((5, 300),))
(EP,) = CASE.endpoints
FLAT = 20.0  # MiB that a process may have more than before
# bytes that a thousand messages may leave behind, and take at a time
KEPT, LARGEST = (
    20_000,
    1_000_000,
)
PIECES = [[["w", 0, 4]], [[[f"{EP}/w0", 0, 1 << 62]]], [[gradient_name(f"{EP}/w0", 0), 0, 20]]]
VALUES: list[Any] = [*malformed_messages.VALUES, *PIECES]


class Server:
    """A server with two trainers in the middle of a step, and what it says."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, str]] = []
        blocks = served(CASE, EP)
        self.trainers = TrainerRegistry(
            blocks, deadline=60.0, plan={"init": "one"}, secret="secret"
        )
        self.update = SimulatedUpdate(blocks, lambda: None)
        kind = SyncServer(blocks, self.update, self.trainers, self.say)
        self.machine = Serving(kind, self.trainers, self.say, Refusals(quiet))
        for k in range(2):
            self.take(k, "hello", **self.hello(k))

    def say(self, to: Any, op: str, /, blocks: Any = (), **fields: Any) -> None:
        self.said.append((to, op))

    @staticmethod
    def hello(k: int) -> dict[str, Any]:
        common = {"order": sys.byteorder, "sync_mode": True, "plan": {"init": "one"}, "nonce": "n"}
        return {"trainer": k, "trainers": 2, "session": f"session {k}", **common}

    def take(self, k: int, op: str, blocks: Any = (), **fields: Any) -> None:
        for head, *frames in wire.framed(op, blocks, **fields):
            self.machine.take(b"trainer %d" % k, [head, *map(bytes, frames)], 0.0)

    def gradients(self, k: int, step: int) -> list[tuple[str, np.ndarray]]:
        return [
            (gradient_name(n, k), gradient(n, size, k, step)) for n, size in CASE.blocks.items()
        ]

    def shown(self) -> Any:
        """All that a message could have changed."""
        kind: Any = self.machine.kind
        turns = {}
        for k, t in kind._turns.by_trainer.items():
            turns[k] = t.at_barrier, t.waits, dict(t.grads._arrived)
        grads = {n: x.tobytes() for n, x in kind._turns._grads.items()}
        known = {k: (t.address, t.session, t.done, t.lost) for k, t in self.trainers.known.items()}
        state = {n: x.tobytes() for n, x in self.update.state.items()}
        return (
            kind.step,
            kind.rounds.number,
            turns,
            grads,
            known,
            dict(self.trainers.by_address),
            state,
        )


def recorded(server: Server) -> list[list[bytes]]:
    """Proper messages, of another trainer 0 or of another step."""
    way = [["float64", [2], ["all_reduce", "sum"]]]
    recv = wire.header("recv", step=9, blocks=[[f"{EP}/w0", [5], "float32"]])
    proper = [
        *wire.framed("hello", **Server.hello(0) | {"session": "another"}),
        *wire.framed("send", server.gradients(0, 1), step=1),
        *wire.framed("exchange", [("0", np.zeros(2))], step=1, round=0, values=way),
        *wire.framed("peer", endpoint="127.0.0.1:9", order=sys.byteorder, layout="x"),
        [recv],
    ]
    return [[bytes(f) for f in message] for message in proper]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(100))
def test_ten_thousand_messages_of_strangers_change_nothing(seed: int) -> None:
    r, server = random.Random(seed), Server()
    proper = recorded(server)
    server.take(0, "send", server.gradients(0, 0)[:1], step=0)
    before = server.shown()
    for i in range(10_000):
        server.machine.take(b"stranger %d" % r.randrange(50), malformed(r, proper, VALUES), 0.0)
        if i % 500 == 0:
            assert server.shown() == before
    assert server.shown() == before
    finished(server, sent=1)


def finished(server: Server, sent: int) -> None:
    """Let the job come to its end, and compare it with one device."""
    for step in range(2):
        for k in range(2):
            server.take(
                k,
                "send",
                server.gradients(k, step)[sent if (k, step) == (0, 0) else 0 :],
                step=step,
            )
            server.take(k, "send_barrier", step=step)
    for n, x in values_of(CASE)[-1].items():
        np.testing.assert_array_equal(server.update.state[n], x)
    for k in range(2):
        server.take(k, "complete")
        server.take(k, "goodbye")
    assert server.machine.ended


@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_is_broken_ends_the_job_or_changes_nothing(seed: int) -> None:
    """It has been let in; what it says is refused, or ends the job by name, and no other error
    comes of it."""
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


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(50_000, id="by day"),
        pytest.param(1_000_000, id="a million", marks=pytest.mark.soak),
    ],
)
def test_malformed_messages_are_counted_and_leave_nothing_behind(count: int) -> None:
    """The parser refuses each with its own error, or reads a message of it; both keep no memory."""
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

    read += hear(1000)  # what Python keeps once, for all that follow
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
