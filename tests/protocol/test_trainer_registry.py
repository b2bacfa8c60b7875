"""Decisions of servers, without sockets and clocks. The test supplies messages and times."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server import trainer_registry as presence_module
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry, named
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, copy_state


FOLDER = Path(presence_module.__file__).parent


class Job:
    """Server without a socket, and the messages that it sends, by address."""

    def __init__(self, count: int, *, sync_mode: bool = True) -> None:
        self.params, tx = mlp_params(), optax.sgd(0.5)
        step = dtrans.make_train_step(mlp_loss, tx)
        self.plan = dtrans.pserver(
            dtrans.trace(step, self.params, jax.eval_shape(tx.init, self.params), *mlp_batch(6)),
            dtrans.trace(lambda p: (p, tx.init(p)), self.params),
            pservers="127.0.0.1:1",
            trainers=count,
            mode=dtrans.Sync() if sync_mode else dtrans.Async(),
            placement=dtrans.BlockPlacement(min_block_size=1),
        )
        (role,) = self.plan.servers.values()
        self.update = ServerUpdate.from_program(role.main)
        served = self.update.served
        self.trainers = TrainerRegistry(served, deadline=10.0)
        self.said: list[tuple[Any, str, dict[str, Any]]] = []
        state = copy_state({n: np.ones(t.shape, t.dtype) for n, t in self.update.types.items()})
        self.server = (
            SyncServer(served, SyncUpdate(self.update, state, count), self.trainers, self.say)
            if sync_mode
            else AsyncServer(
                served, BlockUpdates(self.update, state), state, self.trainers, self.say
            )
        )

    def say(self, to: Any, op: str, /, blocks: Any = (), **fields: Any) -> None:
        self.said.append((to, op, fields | {n: np.array(x) for n, x in blocks}))

    def hello(self, k: int, *, session: str = "", address: bytes = b"", **counts: Any) -> str:
        fields = {
            "trainer": k,
            "trainers": self.trainers.count,
            "session": session,
            "order": sys.byteorder,
            **counts,
        }
        return self.trainers.hello(address or b"%d" % k, wire.Message("hello", fields), None)

    def send(self, k: int, value: float) -> None:
        """Send all gradients of trainer k; all their entries are `value`."""
        types = self.update.grad_types.items()
        grads = [
            (n, np.full(t.shape, value, t.dtype)) for n, t in types if n.endswith(f".trainer_{k}")
        ]
        for head, *frames in wire.framed("send", grads, step=self.server.step):
            self.server.send(k, wire.parse([head, *map(bytes, frames)]))
        self.server.send_barrier(k, wire.Message("send_barrier", {"step": self.server.step}))


def test_a_synchronous_step_is_made_of_messages_alone() -> None:
    job = Job(2)
    for k in (1, 0):
        assert job.hello(k) == ""
    table = [
        [n, list(job.update.types[n].shape), job.update.types[n].dtype.name]
        for n in job.update.params
    ]
    job.send(0, 1.0)
    for k in range(2):
        job.server.recv(k, wire.Message("recv", {"step": k == 0, "blocks": table}))
    # trainer 0 has requested the step after this one
    assert [said[:2] for said in job.said] == [(b"1", "blocks")]
    job.server.recv(1, wire.Message("recv", {"step": 0}))
    job.said.clear()
    job.send(1, 3.0)
    assert [said[:2] for said in job.said] == [(b"0", "blocks")]
    assert job.server.step == 1
    for n in job.update.params:
        # 1 - 0.5 * (1 + 3) / 2
        np.testing.assert_array_equal(job.said[0][2][n], np.zeros(job.update.types[n].shape))


def test_who_is_late_is_told_by_the_time_that_is_given() -> None:
    job = Job(2)
    job.hello(0)
    job.server.look(4.0)
    assert job.said == []
    job.send(0, 1.0)
    job.server.look(4.0)
    assert job.said == [
        (b"0", "waiting", {"reason": "0.0 s for gradients of step 1 from trainer 1 (not here yet)"})
    ]
    with pytest.raises(
        DeadlineError, match=r"^pserver 127.0.0.1:1 waited 10.5 s for trainer 1 to say hello$"
    ):
        job.server.look(10.5)


def test_who_has_lost_its_connection_is_given_up_a_little_later() -> None:
    job = Job(2)
    job.hello(0)
    job.hello(1, local=True)
    job.trainers.lose(b"1", 4.0)
    job.server.look(4.4)
    with pytest.raises(
        PeerError,
        match=r"^the connection of trainer 1 to pserver 127.0.0.1:1 ended without a goodbye, in "
        r"step 1$",
    ):
        job.server.look(4.6)
    job.hello(1, address=b"local")
    job.trainers.lose(b"1", 5.0)
    job.server.look(9.0)
    job.trainers.known[1].done = True
    job.trainers.lose(b"local", 9.0)
    assert job.trainers.lost(12.0) == {}


def test_an_asynchronous_server_goes_on_without_who_is_lost() -> None:
    job = Job(2, sync_mode=False)
    job.hello(0, local=True)
    job.hello(1)
    job.trainers.lose(b"0", 3.0)
    job.server.look(4.0)
    assert job.trainers.present == [1]
    assert job.trainers.left == [0]
    with pytest.raises(WireError, match="trainer 0 has left, and cannot come back to this job"):
        job.hello(0)
    with pytest.raises(WireError, match="a `recv` message of trainer 0, which has left"):
        job.trainers.speaker(b"0", wire.Message("recv", {}))


def test_a_trainer_moves_to_another_socket_and_is_replaced_by_nobody() -> None:
    job = Job(2)
    job.hello(0)
    job.hello(0, address=b"local")
    assert job.trainers.by_address == {b"local": 0}
    with pytest.raises(WireError, match="another process is already connected as trainer 0"):
        job.hello(0, session="another")
    job.trainers.known[0].done = True
    assert (
        job.hello(0, session="another")
        == "the end of a job of 2 trainers, which trainer 0 has left"
    )
    assert not job.trainers.served
    assert named([2, 0]) == "trainers 2, 0"


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.py")))
def test_who_decides_has_no_socket_no_thread_and_no_clock(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    found = {a.name for x in ast.walk(tree) if isinstance(x, ast.Import) for a in x.names}
    found |= {x.module or "" for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert not {n.split(".")[0] for n in found} & {"zmq", "socket", "time", "threading", "random"}
    assert not [n for n in found if n.startswith("dtrans.run")]


def test_who_is_waited_for_is_told_with_how_far_they_are() -> None:
    job = Job(2)
    for k in (0, 1):
        job.hello(k)
    job.send(0, 1.0)
    job.said.clear()
    told = lambda: [
        fields["reason"].partition("from ")[2] for _, op, fields in job.said if op == "waiting"
    ]
    job.server.look(1.0)
    assert told() == ["trainer 1 (computing)"]
    types = {n: t for n, t in job.update.grad_types.items() if n.endswith(".trainer_1")}
    name, t = next(iter(types.items()))
    for head, *frames in wire.framed("send", [(name, np.zeros(t.shape, t.dtype))], step=0):
        job.server.send(1, wire.parse([head, *map(bytes, frames)]))
    job.said.clear()
    job.server.look(2.0)
    assert len(types) > 1
    assert told() == [f"trainer 1 (sending: 1 of {len(types)} gradients have arrived)"]


@pytest.mark.parametrize("sync_mode", [True, False])
def test_a_trainer_that_ended_before_its_hello_is_not_waited_for(sync_mode: bool) -> None:
    job = Job(2, sync_mode=sync_mode)
    job.trainers.begin(0.0)
    job.hello(0)
    job.trainers.died(1, "exit code 1", 0.1)
    job.server.look(0.2)  # its hello may not be read yet
    why = "trainer 1 ended with exit code 1 before it said hello to pserver 127.0.0.1:1"
    if sync_mode:
        with pytest.raises(PeerError, match=f"^{why}, in step 1$"):
            job.server.look(1.0)
        return
    job.server.look(1.0)
    assert job.trainers.present == [0] and not job.trainers.served
    job.server.look(100.0)  # the other trainers continue
    with pytest.raises(WireError, match="trainer 1 has left, and cannot come back to this job"):
        job.hello(1)
    job.server.complete(0, wire.Message("complete", {}))
    assert job.trainers.served


def test_a_trainer_whose_process_has_ended_is_lost_and_one_that_left_is_not() -> None:
    job = Job(2)
    for k in range(2):
        job.hello(k)
    job.server.complete(1, wire.Message("complete", {}))
    for k in range(2):
        job.trainers.died(k, "signal SIGKILL", 0.0)
    assert job.trainers.lost(1.0) == {
        0: "trainer 0 ended with signal SIGKILL, without a goodbye to pserver 127.0.0.1:1"
    }


def test_who_waits_says_so_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    job.trainers.deadline = 60.0
    job.trainers.begin(0.0)
    for now in range(25):
        job.server.look(float(now))
    told = "pserver 127.0.0.1:1 has waited {} s for trainers 0, 1 to say hello".format
    assert caplog.messages == [told(10), told(20)]
    caplog.clear()
    for k in range(2):
        job.hello(k)
    job.send(0, 1.0)
    for now in range(30, 45):
        job.server.look(float(now))
    assert caplog.messages == [
        "pserver 127.0.0.1:1 has waited 10 s for gradients of step 1 from trainer 1 (computing)"
    ]


def test_a_trainer_of_the_previous_generation_may_be_busy() -> None:
    served = Job(2).update.served
    trainers = TrainerRegistry(served, deadline=10.0, busy=[1])
    trainers.begin(0.0)
    assert trainers.absent(9.0) == [0, 1]
    with pytest.raises(DeadlineError, match=r"waited 11.0 s for trainer 0 to say hello$"):
        trainers.absent(11.0)
    both = TrainerRegistry(served, deadline=10.0, busy=[0, 1])
    both.begin(0.0)
    assert both.absent(60.0) == [0, 1]


@pytest.mark.parametrize(("sync_mode", "steps"), [(True, 47), (False, 45)])
def test_steps_so_far(sync_mode: bool, steps: int) -> None:
    """An asynchronous trainer numbers its steps from 0 on each connection."""
    line = TrainerLine(
        "h:1",
        *(0, 1),
        session="",
        sync_mode=sync_mode,
        plan={},
        secret="",
        deadline=60.0,
        say=lambda x: None,
    )
    proof = token.shown("", f"welcome {line._hello['nonce']}")
    welcome = {"step": 42 if sync_mode else 0, "local": "", "proof": proof}
    line.admit(welcome | ({} if sync_mode else {"count": 40}))
    line.step += 5
    assert line.steps_so_far == steps


def test_a_trainer_that_waits_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    line = TrainerLine(
        "h:1",
        0,
        1,
        session="",
        sync_mode=True,
        plan={},
        secret="",
        deadline=60.0,
        say=lambda x: None,
    )
    line.wait("`recv` of step 3", 100.0)
    for now in (105.0, 110.0, 115.0, 120.5):
        line.say_that_it_waits(now)
    told = "trainer 0 has waited {} s for pserver h:1: `recv` of step 3".format
    assert caplog.messages == [told(10), told(20)]


def test_a_connection_that_a_network_broke_is_waited_for() -> None:
    job = Job(2)
    for k in range(2):
        job.hello(k)
    job.trainers.lose(b"1", 4.0)
    job.server.look(8.9)
    job.trainers.back(b"1")
    job.server.look(20.0)
    job.trainers.lose(b"1", 20.0)
    with pytest.raises(
        PeerError,
        match="^the connection of trainer 1 to pserver 127.0.0.1:1 ended without a goodbye",
    ):
        job.server.look(25.1)


def ops_to(job: Job, k: int, op: str, **fields: Any) -> list[tuple[str, int]]:
    """Send an op from the server to a trainer. Return the op and the number of each message."""
    messages = [wire.parse(x) for x in job.trainers.framed(b"%d" % k, op, **fields)]
    return [(x.op, x.fields.get("number", 0)) for x in messages]


def test_messages_that_a_trainer_lacks_follow_its_welcome() -> None:
    job = Job(2)
    for k in range(2):
        job.hello(k)
    assert ops_to(job, 1, "goodbye") == [("goodbye", 1)]
    assert ops_to(job, 1, "waiting", reason="x") == [("waiting", 0)]
    assert ops_to(job, 1, "evicted", table="t", count=0, error="") == [("evicted", 2)]
    job.trainers.lose(b"1", 4.0)
    job.hello(1, heard=1, back=True)
    job.server.look(20.0)
    welcome = {"step": 0, "local": ""}
    assert ops_to(job, 1, "welcome", **welcome) == [("welcome", 0), ("evicted", 2)]
    job.hello(1, heard=2, back=True)
    assert ops_to(job, 1, "welcome", **welcome) == [("welcome", 0)]
    for heard, released in ((0, 2), (3, 2)):
        said = (
            f"after message {heard}: this process has sent 2 messages, and has already deleted the "
        )
        with pytest.raises(WireError, match=f"{said}first {released}"):
            job.hello(1, heard=heard, back=True)
    job.hello(1, heard=2, back=True, connection=5)
    with pytest.raises(WireError, match="a `hello` from an earlier connection of trainer 1"):
        job.hello(1, heard=2, back=True, connection=4)


def test_a_unix_socket_stores_no_messages() -> None:
    job = Job(1)
    job.hello(0, local=True)
    assert ops_to(job, 0, "goodbye") == [("goodbye", 1)]
    assert job.trainers.known[0].messages.stored == []


def test_a_trainer_that_returns_late_receives_the_goodbye_again() -> None:
    """The server has given up the trainer, but the trainer still waits."""
    job = Job(2)
    for k in range(2):
        job.hello(k)
    job.trainers.known[0].done = True
    assert ops_to(job, 0, "goodbye") == [("goodbye", 1)]
    job.trainers.lose(b"0", 4.0)
    job.trainers.look(20.0)
    assert job.trainers.known[0].parted
    job.hello(0, heard=0, back=True)
    assert ops_to(job, 0, "welcome", step=0, local="") == [("welcome", 0), ("goodbye", 1)]


def test_messages_to_a_trainer_that_is_lost_are_released() -> None:
    job = Job(2)
    for k in range(2):
        job.hello(k)
    ops_to(job, 0, "goodbye")
    job.trainers.known[0].done = job.trainers.known[0].failed = True
    job.trainers.look(1.0)
    assert job.trainers.known[0].messages.stored == []


def test_who_comes_back_to_another_server_is_refused() -> None:
    with pytest.raises(
        WireError, match="trainer 0 was in a job of pserver 127.0.0.1:1 that has ended"
    ):
        Job(2).hello(0, back=True)


def test_a_refusal_is_forgotten_when_the_trainer_joins() -> None:
    job = Job(1)
    job.trainers.plan = {"loss": "right"}
    with pytest.raises(WireError, match="trainer 0 plans something else"):
        job.hello(0, plan={"loss": "wrong"})
    job.hello(0, plan={"loss": "right"})
    job.trainers.died(0, "exit code 1", 1.0)
    assert job.trainers.lost(10.0) == {
        0: "trainer 0 ended with exit code 1, without a goodbye to pserver 127.0.0.1:1"
    }


def ends_of(job: Job) -> Serving:
    """Return the protocol of a job's server, after its only trainer has sent hello."""
    job.hello(0)
    return Serving(job.server, job.trainers, job.say, Refusals(presence_module.log))


def say(serving: Serving, op: str, **fields: Any) -> None:
    serving.take(b"0", [wire.header(op, **fields)], 1.0)


def hello_again(job: Job, serving: Serving) -> list[str]:
    """Let the trainer greet the server on a new connection. Return the kinds of the answers."""
    job.trainers.lose(b"0", 1.0)
    job.said.clear()
    say(
        serving,
        "hello",
        trainer=0,
        trainers=1,
        session="",
        order=sys.byteorder,
        back=True,
    )
    return [op for _, op, _ in job.said]


def test_a_server_ends_when_its_goodbye_is_answered() -> None:
    serving = ends_of(job := Job(1))
    say(serving, "goodbye")
    assert (
        job.said[0][1] == "refuse"
        and "`goodbye`, but `complete` must come first" in job.said[0][2]["reason"]
    )
    say(serving, "complete")
    assert (job.said[-1][1], serving.ended) == ("goodbye", False)
    say(serving, "goodbye")
    assert serving.ended


@pytest.mark.parametrize("heard", [False, True], ids=["complete is lost", "goodbye is lost"])
def test_who_comes_back_for_its_goodbye_is_told_it(heard: bool) -> None:
    """A trainer repeats a lost `complete`, and the server repeats a lost goodbye with its
    welcome."""
    serving = ends_of(job := Job(1))
    if heard:
        say(serving, "complete", number=1)
        assert ops_to(job, 0, "goodbye") == [("goodbye", 1)]
    assert hello_again(job, serving) == ["welcome"]
    if heard:
        assert ops_to(job, 0, "welcome", step=0, local="")[1:] == [("goodbye", 1)]
    job.said.clear()
    say(serving, "complete", number=1)
    assert [op for _, op, _ in job.said] == ["goodbye"] * (not heard)
    say(serving, "goodbye", number=2)
    assert serving.ended


def test_who_does_not_come_back_for_its_goodbye_is_not_waited_for() -> None:
    serving = ends_of(job := Job(1))
    say(serving, "complete")
    job.trainers.lose(b"0", 1.0)
    serving.look(5.9)
    assert not serving.ended
    serving.look(6.1)
    assert serving.ended


def test_by_a_unix_socket_no_goodbye_is_lost() -> None:
    job = Job(1)
    job.hello(0, local=True)
    serving = Serving(job.server, job.trainers, job.say, Refusals(presence_module.log))
    say(serving, "complete")
    assert serving.ended


def test_who_leaves_after_a_message_was_lost_has_not_left() -> None:
    """A message before the `complete` is missing. The trainer will repeat both."""
    serving = ends_of(job := Job(1))
    job.said.clear()
    say(serving, "complete", number=2)
    assert job.said == [] and job.trainers.present == [0]


def connection(heard: int) -> tuple[list[Any], TrainerLine, list[bytes]]:
    """Return a trainer's welcomed connection: its messages, the line, and a welcome with the number
    of messages that the server has received."""
    said: list[Any] = []
    line = TrainerLine(
        "h:1", 0, 1, session="", sync_mode=True, plan={}, secret="", deadline=60.0, say=said.append
    )
    proof = {"proof": token.shown("", f"welcome {line._hello['nonce']}")}
    welcome = [wire.header("welcome", step=0, local="", heard=heard, **proof)]
    line.opened()
    line.connected()
    line.admit(wire.parse(welcome).fields)
    return said, line, welcome


def test_a_trainer_repeats_what_the_server_lacks_on_a_new_connection() -> None:
    said, line, welcome = connection(heard=1)
    ops = lambda: [wire.parse(frames) for frames in said]
    names = lambda: [m.op for m in ops()]
    line.tell("recv", step=0)
    line.broken(10.0)
    line.tell("send_barrier", step=0)
    line.wait("`recv`", 10.0)
    assert (line.gone, line.wakes) == (False, 15.0)
    line.connected()
    *_, hello = ops()
    assert names() == ["hello", "recv", "hello"]
    assert (hello["connection"], hello["heard"], hello["back"]) == (2, 0, True)
    assert line.receive(welcome) is None
    assert names() == ["hello", "recv", "hello", "send_barrier"]
    line.broken(12.0)
    line.connected()
    assert line.receive(welcome) is None
    assert names()[4:] == ["hello", "send_barrier"]
    line.broken(20.0)
    line.look(24.9)
    assert not line.gone
    line.look(25.0)
    assert line.gone
    line.opened(local=True)
    line.admit(wire.parse(welcome).fields)
    line.broken(30.0)  # no network is between the two
    assert line.gone


def test_a_trainer_whose_connection_is_broken_says_why_it_ends_on_the_next_one() -> None:
    said, line, welcome = connection(heard=0)
    line.tell("recv", step=0)
    line.broken(10.0)
    line.tell("abort", reason="it ends")
    line.connected()
    assert line.receive(welcome) is None
    names = [wire.parse(frames).op for frames in said]
    assert names == ["hello", "recv", "hello", "recv", "abort"]
