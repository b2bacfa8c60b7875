"""Attacks on the sockets of a job: they change no result, and memory stays bounded.

tests/protocol/test_malformed.py tests the state machine with such messages. The tests of each
socket cover peers without the token.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq
from helpers import assemble, mlp_loss, plain_run, plain_step, tree_close
from lifecycle_job import TX, batch_of, params_of, plan_for
from link_pair import two_links
from malformed_messages import malformed
from role_processes import Roles, memory_of, roles
from role_threads import HANG, Peer, RoleThreads, free_endpoints, serve, train, until
from socket_attacks import Tap, flips, many_connections, replay

from dtrans.protocol import token, wire
from dtrans.protocol.collective.arrivals import ValueType
from dtrans.run.distributed.address import Address
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.rendezvous import FIRST, rendezvous
from dtrans.run.distributed.watch import Watch
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import Authenticator
from dtrans.run.pipeline_parallel.p2p import P2PChannels
from dtrans.run.status.observer import JobObserver


FLAT = 40.0  # MiB by which the memory of a process may grow; a stored attack has hundreds
STEPS, GATE = 3, 2


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def recorded(server: str) -> bytes:
    """Return the recorded bytes of an admitted peer that sends every message of a trainer or
    another server."""
    tap = Tap(server)
    name, x = "params/layer0/w@GRAD.trainer_0", np.arange(6.0)
    hello = {
        "trainer": 0,
        "trainers": 2,
        "session": "another",
        "order": sys.byteorder,
        "sync_mode": True,
    }
    with Peer(tap.endpoint) as peer:
        peer.tell("hello", **hello, plan=plan_for([server], 2).identity, nonce="n")
        for pieces, frames in wire.messages([(name, x)]):
            peer.tell(
                "send",
                *(bytes(f) for f in frames),
                step=GATE,
                pieces=pieces,
                then=["send_barrier", "recv"],
            )
        peer.tell("recv", step=0, blocks=[["params/layer0/w", [3, 2], "float64"]])
        way = [["float64", [2], ["all_reduce", "sum"]]]
        for frames in wire.framed("exchange", [("0", np.zeros(2))], step=GATE, round=0, values=way):
            peer.say(*(bytes(f) for f in frames))
        peer.tell("peer", endpoint="127.0.0.1:9", order=sys.byteorder, layout="x", nonce="n")
        peer.tell("abort", reason="I say so")
        peer.tell("complete")
        for _ in range(5):
            peer.refused()
    tap.close()
    assert len(tap.recorded) > 800
    return bytes(tap.recorded)


def unread(endpoint: str, count: int) -> None:
    """Open connections that are refused, and read nothing from them."""
    with Peer(endpoint) as peer:
        for i in range(count):
            peer.tell("recv", step=i)
        assert peer._socket.poll(HANG * 1000), "no refusal"


# 20,000 connections, one after the other
MILLION = pytest.param(50, id="a million bits", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("size", [pytest.param(1, id="by day"), MILLION])
def test_a_job_is_right_whatever_is_done_to_its_server(tmp_path: Path, size: int) -> None:
    """Two trainers wait in the middle of their job.

    The memory of the server stays constant, and the results are those of one device.
    """
    pservers = free_endpoints(1)
    job = {
        "pservers": pservers,
        "trainers": 2,
        "jobs": 1,
        "first": 0,
        "steps": STEPS,
        "stays": False,
        "gate": GATE,
    }
    with roles(tmp_path) as started:
        server = started.start("pserver0", "pserver", index=0, **job)
        for k in range(2):
            started.start(f"trainer{k}", "trainer", index=k, **job)
        for k in range(2):
            started[f"trainer{k}"].until(f"step {GATE}")
        stream = recorded(pservers[0])
        # first, replay the connection unchanged: memory for the first attack is not counted
        replay(pservers[0], stream)
        before = server.memory
        flips(pservers[0], stream, seed=size, connections=400 * size, each=50)
        unread(pservers[0], 5000 * size)
        with many_connections(pservers[0], 10_000, open_at_once=1000) as open_all:
            open_all()
            assert server.memory - before < FLAT
            found = finished(started)
    batches = [batch_of(i, 2) for i in range(STEPS)]
    params, state, _ = plain_run(
        plain_step(mlp_loss, TX), params_of(), TX.init(params_of()), batches
    )
    plan = plan_for(pservers, 2)
    names = plan.startup.out_names
    want = dict(zip(names, plan.startup.out.flatten((params, state), "the result"), strict=True))
    held = {pservers[0]: {n: jnp.asarray(x) for n, x in found["pserver0"].items()}}
    tree_close(assemble(plan, held, names), want, 1e-12)
    for k in range(2):
        tree_close({n: jnp.asarray(x) for n, x in found[f"trainer{k}"].items()}, params, 1e-12)


def finished(started: Roles) -> dict[str, dict[str, np.ndarray]]:
    for k in range(2):
        started[f"trainer{k}"].go()
    return started.end()


@pytest.mark.parametrize("encryption", ["required", "disabled"])
def test_ten_thousand_malformed_messages_of_who_has_the_token(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, encryption: str
) -> None:
    """The messages reach a real server in the middle of a job.

    It counts them, and does not store them.
    """
    monkeypatch.setenv("DTRANS_TOKEN", token.new_token())
    monkeypatch.setenv("DTRANS_TRANSPORT_ENCRYPTION", encryption)
    (ep,), params, r = free_endpoints(1), params_of(), random.Random(0)
    plan = plan_for([ep], 1)
    way = [["float64", [2], ["all_reduce", "sum"]]]
    framed = [
        *wire.framed("send", [("params/layer0/w@GRAD.trainer_0", np.arange(6.0))], step=0),
        *wire.framed("exchange", [("0", np.zeros(2))], step=0, round=0, values=way),
        [wire.header("recv", step=9, blocks=[["params/layer0/w", [3, 2], "float64"]])],
    ]
    proper = [[bytes(f) for f in message] for message in framed]
    grown: list[float] = []

    def send(peer: Peer, hundreds: int) -> None:
        """Send hundreds of messages, and read the refusal of each.

        So no queue in this process grows.
        """
        for _ in range(hundreds):
            for _ in range(100):
                message = malformed(r, proper)
                # an empty message reports a new connection
                peer.say(*(message if any(message) else [b"noise"]))
            for _ in range(100):
                peer.refused()

    def attack(step: int) -> None:
        with JobObserver([ep], HANG) as observer, Peer(ep, encryption=encryption) as peer:
            begun = refused_by(observer)
            send(peer, 10)
            before = memory_of(os.getpid())
            send(peer, 100)
            grown.append(memory_of(os.getpid()) - before)
            assert refused_by(observer) == begun + 11_000

    role_threads.start(ep, serve, plan, ep, params)
    role_threads.start("trainer", train, plan, 0, [batch_of(0, 1)], params, before=attack)
    got, _ = role_threads.all()["trainer"]
    want, *_ = plain_run(plain_step(mlp_loss, TX), params, TX.init(params), [batch_of(0, 1)])
    tree_close(got, want, 1e-12)
    assert len(grown) == 1 and grown[0] < FLAT


def refused_by(observer: JobObserver) -> int:
    (answer,) = observer.ask()
    assert answer.server is not None, answer.error
    return answer.server.refused


# -- the sockets of collectives and pipelines, in this process
# ---------------------------------------

LINK = ValueType((4,), np.dtype(np.float32))
HEAD = {
    "process": 0,
    "step": 1,
    "key": 0,
    "dtype": "float32",
    "shape": [4],
    "impl": "",
    "pieces": [[["value", 0, 16]]],
}


def attacked(at: str, user: str, secret: str, messages: Sequence[list[bytes]], count: int) -> None:
    """Send messages of a job's member, in every way except with its password."""
    password = token.shown(secret, user).encode()
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as own,
        context.socket(zmq.DEALER) as client,
    ):
        # an endpoint of the attacker, for the recording
        authenticator = Authenticator(context, Keys(secret), {user: ""})
        own.plain_server, own.zap_domain, own.linger, client.linger = True, b"dtrans", 0, 0
        tap = Tap(f"127.0.0.1:{own.bind_to_random_port('tcp://127.0.0.1')}")
        client.plain_username, client.plain_password = user.encode(), password
        client.connect(f"tcp://{tap.endpoint}")
        for message in messages:
            client.send_multipart(message)
            assert own.poll(HANG * 1000)
            own.recv_multipart()
        authenticator.close()
    tap.close()
    stream = bytes(tap.recorded)
    assert password in stream
    flips(at, stream.replace(password, b"0" * len(password)), seed=0, connections=count, each=4)
    at_once = min(count, 1000)  # both ends are in this process, and files are limited
    with many_connections(at, 10 * at_once, open_at_once=at_once) as open_all:
        open_all()


@pytest.fixture
def channels() -> Iterator[list[P2PChannels]]:
    with two_links() as made:
        yield made


COUNTS = [
    pytest.param(100, id="by day"),
    pytest.param(10_000, id="soak", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("count", COUNTS)
def test_a_link_of_a_pipeline_under_attack(channels: list[P2PChannels], count: int) -> None:
    first, second = channels
    forged = [wire.header("value", **HEAD), np.full(4, np.nan, np.float32).tobytes()]
    before = memory_of(os.getpid())
    attacked(second._peers[1], "process 0 to 1", second._keys.secret, [forged] * 5, count)
    assert memory_of(os.getpid()) - before < FLAT
    first.send(1, 1, 0, jnp.arange(4.0, dtype=jnp.float32))
    np.testing.assert_array_equal(second.receive(0, 1, 0, LINK, "a value"), np.arange(4.0))
    assert second.refusals.count == 0  # nothing was accepted


@pytest.mark.parametrize("count", COUNTS)
def test_the_line_by_which_ends_are_told_under_attack(count: int) -> None:
    endpoints, secret = free_endpoints(2), "of this job"
    first = Watch(Membership(0, (0, 1), endpoints), Keys(secret), Address("127.0.0.1", "127.0.0.1"))
    second = Watch(Membership(1, (0, 1), endpoints), Keys(secret), first.address)
    lie = [wire.header("ended", trainer=1, operations=0, reason="I say so")]
    before = memory_of(os.getpid())
    attacked(first.address, "watched trainer 1", secret, [lie] * 5, count)
    assert memory_of(os.getpid()) - before < FLAT
    assert not first.members.ended and not second.members.ended
    second.close()
    until(lambda: first.members.ended, "the right end")
    assert first.members.why(1).endswith("has finished")
    first.close()


@pytest.mark.parametrize("count", COUNTS)
def test_a_meeting_under_attack(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    endpoints, secret = free_endpoints(2), "of this job"
    monkeypatch.setenv("DTRANS_TOKEN", secret)
    role_threads.start("trainer 1", rendezvous, 1, endpoints, deadline=4 * HANG)
    with Peer(endpoints[1], FIRST) as asks:  # the listener is ready
        asks.tell("meet", trainer=1, endpoints=list(endpoints), nonce="n")
        assert asks.hear().op == "here"
    wrong = [
        [wire.header("meet", trainer=1, endpoints=["h:1", "h:2"])],
        [wire.header("abort", reason="I say so")],
        [wire.header("go")],
    ]
    before = memory_of(os.getpid())
    attacked(endpoints[1], FIRST, secret, wrong, count)
    assert memory_of(os.getpid()) - before < FLAT
    role_threads.start("trainer 0", rendezvous, 0, endpoints, deadline=HANG)
    assert [role_threads.end(f"trainer {k}") for k in range(2)] == [None, None]
