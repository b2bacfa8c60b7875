"""Links between two processes, both in this process, and strangers that know their addresses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import zmq
from link_pair import two_links
from relay import Relay
from role_threads import HANG, NEVER, until

from dtrans.protocol import token, wire
from dtrans.protocol.collective.arrivals import ValueType
from dtrans.run.net import zmq_transport
from dtrans.run.pipeline_parallel import p2p
from dtrans.run.pipeline_parallel.p2p import P2PChannels
from dtrans.run.pipeline_parallel.value_types import value_type


@pytest.fixture
def channels() -> Iterator[list[P2PChannels]]:
    with two_links() as made:
        yield made


FOUR = ValueType((4,), np.dtype(np.float32))
THREE = ValueType((3,), np.dtype(np.float32))
RIGHT: dict[str, Any] = {
    "process": 0,
    "step": 1,
    "key": 0,
    "dtype": "float32",
    "shape": [4],
    "impl": "",
}
PIECES = [[["value", 0, 16]]]
NAN = np.full(4, np.nan, np.float32).tobytes()


def forged(**fields: Any) -> list[bytes]:
    return [wire.header("value", **RIGHT | {"pieces": PIECES} | fields), NAN]


@contextlib.contextmanager
def stranger(address: str, password: str | None = None) -> Iterator[zmq.Socket[Any]]:
    """Yield a socket that is connected to a link."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger, line.sndhwm = 0, 0
        if password is not None:
            line.plain_username, line.plain_password = b"process 0 to 1", password.encode()
        line.connect(f"tcp://{address}")
        yield line


@pytest.mark.parametrize("password", [None, "0" * 64])
def test_what_strangers_forge_has_no_effect(
    channels: list[P2PChannels], password: str | None
) -> None:
    """Otherwise the first frame with a name would count, from any sender, and a malformed frame
    would end the process."""
    first, second = channels
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    with stranger(second._peers[1], password) as line, line.get_monitor_socket(events) as monitor:
        line.sndtimeo = 1000
        with contextlib.suppress(zmq.Again):  # its connection was closed meanwhile
            for parts in (forged(), forged(shape=[0, 2**63]), [b"noise"]):
                line.send_multipart(parts)
        assert monitor.poll(HANG * 1000)  # the message was read, or its connection was closed
        first.send(1, 1, 0, jnp.arange(4.0))
        np.testing.assert_array_equal(second.receive(0, 1, 0, FOUR, "a value"), np.arange(4.0))
        line.disable_monitor()
    assert second.refusals.count == 0  # no frame was accepted


MALFORMED = [
    forged(shape=[0, 2**63]),
    forged(shape=[-4]),
    forged(shape=[2**40, 2**40]),
    forged(shape=[1] * 200),
    forged(shape=["4"]),
    forged(dtype="O"),
    forged(dtype="S"),
    forged(dtype="no type"),
    forged(impl="no generator"),
    forged(impl="fry"),
    forged(process=1),
    forged(process=7),
    forged(key=-1),
    forged(key=1 << 40),
    forged(step=0),
    forged(pieces=[]),
    forged(pieces=[[["value", 4, 16]]]),
    forged(pieces=[[["value", 0, 2**60]]]),
    forged(pieces=[[["other", 0, 16]]]),
    [wire.header("value", **RIGHT, pieces=PIECES)],
    [wire.header("abort", reason="I say so")],
    [msgpack.packb({"v": 1})],
    [b"\xc1"],
    [b"", b""],
]


def test_malformed_messages_of_a_process_are_dropped_and_counted(
    channels: list[P2PChannels], caplog: pytest.LogCaptureFixture
) -> None:
    """The frames arrive over the link of process 0, and the value after them is right."""
    first, second = channels
    first.send(1, 1, 5, jnp.zeros(3))
    second.receive(0, 1, 5, THREE, "a value")
    with stranger(second._peers[1], token.shown(first._keys.secret, "process 0 to 1")) as line:
        for parts in MALFORMED * 10:
            line.send_multipart(parts)
        line.send_multipart(forged(key=5))  # the value was already received
        for key in (6, 0):  # all malformed frames of value 0 arrive before it is expected
            head = wire.header("value", **RIGHT | {"key": key}, pieces=PIECES)
            line.send_multipart([head, np.arange(4.0, dtype="f4")])
            np.testing.assert_array_equal(
                second.receive(0, 1, key, FOUR, "a value"), np.arange(4.0)
            )
    assert second.refusals.count == 10 * len(MALFORMED) + 1
    assert len(caplog.records) < 105 and all(len(r.getMessage()) < 400 for r in caplog.records)
    first.send(1, 2, 0, jax.random.key(3))
    key = second.receive(0, 2, 0, value_type(jax.random.key(0)), "a key")
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))


def test_values_of_steps_that_are_over_are_not_kept(channels: list[P2PChannels]) -> None:
    first, second = channels
    for key in range(3):
        first.send(1, 1, key, jnp.zeros(3))
    first.send(1, 2, 0, jnp.ones(3))
    second.receive(0, 2, 0, THREE, "a value")
    assert second._arrivals.waiting == 0


def test_a_message_that_never_ends_is_not_kept(channels: list[P2PChannels]) -> None:
    """ZeroMQ stores all frames of a message until the last arrives.

    From a stranger, it accepts none.
    """
    first, second = channels
    with (
        stranger(second._peers[1]) as line,
        line.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor,
    ):
        line.sndtimeo = 1000
        with contextlib.suppress(zmq.Again):
            for _ in range(200):
                line.send(b"\0" * 10_000, zmq.SNDMORE)
        assert monitor.poll(HANG * 1000), "it is still connected"
        line.disable_monitor()
    first.send(1, 1, 0, jnp.arange(4.0))
    np.testing.assert_array_equal(second.receive(0, 1, 0, FOUR, "a value"), np.arange(4.0))


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Relay]]:
    """Yield the relay in front of each endpoint."""
    made: dict[str, Relay] = {}

    def through_relay(endpoint: str) -> str:
        if endpoint not in made:
            made[endpoint] = Relay(endpoint)
        return made[endpoint].address

    monkeypatch.setattr(zmq_transport, "tcp_address", through_relay)
    yield made
    for relay in made.values():
        relay.close()


def test_a_network_that_loses_messages_changes_no_value(relays: dict[str, Relay]) -> None:
    """Connections break again and again, each time with the data in transit."""
    kind = ValueType((1000,), np.dtype(np.float32))
    with contextlib.ExitStack() as stack:
        first, second = stack.enter_context(two_links())
        for step in range(1, 31):
            lost = [x.lose() for x in relays.values()] if step % 3 == 0 else []
            first.send(1, step, 0, jnp.full(1000, step, jnp.float32))
            second.send(0, step, 0, jnp.full(1000, -step, jnp.float32))
            for event in lost:
                assert event.wait(HANG)
            for relay in relays.values() if lost else ():
                relay.cut()
            for channels, origin, sign in ((second, 0, 1), (first, 1, -1)):
                found = channels.receive(origin, step, 0, kind, "a value")
                np.testing.assert_array_equal(found, np.full(1000, sign * step))
        assert all(x.connections > 10 for x in relays.values())
        assert first.refusals.count == second.refusals.count == 0


def test_what_a_broken_connection_has_lost_is_sent_before_the_links_close(
    relays: dict[str, Relay],
) -> None:
    with two_links() as (first, second):
        first.send(1, 1, 0, jnp.zeros(4))
        second.receive(0, 1, 0, FOUR, "a value")
        relay = relays[first._peers[1]]
        loss, count = relay.lose(), relay.connections
        first.send(1, 2, 0, jnp.arange(4.0))
        assert loss.wait(HANG)
        relay.cut()
        until(lambda: relay.connections > count, "the next connection")
        closing = threading.Thread(target=first.close)
        closing.start()
        np.testing.assert_array_equal(second.receive(0, 2, 0, FOUR, "a value"), np.arange(4.0))
        closing.join(HANG)
        assert not closing.is_alive()


def test_links_do_not_wait_for_a_process_that_has_closed_its_own(
    channels: list[P2PChannels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has reported the number of received messages, although it reports only every few
    messages."""
    monkeypatch.setattr(p2p, "LINGER", NEVER)
    first, second = channels
    first.send(1, 1, 0, jnp.arange(4.0))
    second.receive(0, 1, 0, FOUR, "a value")
    second.close()
    closing = threading.Thread(target=first.close, daemon=True)
    closing.start()
    closing.join(HANG)
    assert not closing.is_alive()
