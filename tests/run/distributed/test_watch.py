"""Trainers of collectives detect at once that a trainer has ended, and name it.

Trainers are real processes.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import cluster_trainer as script
import pytest
import zmq
from role_threads import HANG, free_endpoints, until
from trainer_processes import started

from dtrans.errors import ConfigError, PeerError
from dtrans.protocol import token, wire
from dtrans.run.distributed import watch as watch_module
from dtrans.run.distributed.address import Address
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.watch import Watch
from dtrans.run.net.keys import Keys
from dtrans.run.status.job_view import merge_trainers
from dtrans.run.status.observer import JobObserver
from dtrans.run.status.show_status import show_status


PATIENCE = 120.0  # seconds for what takes ten on an idle machine
COMMAND = [sys.executable, script.__file__, "endless"]
ENDED = {
    "kill": "has ended: its connection ended without a goodbye",
    "stop": "has ended: its connection ended without a goodbye",
    "raise": "has ended: KeyError: 'this is why'",
    "fewer": "has finished after ",
}


@pytest.mark.parametrize(
    "fate", ["stop", "fewer", "raise", pytest.param("kill", marks=pytest.mark.rotated)]
)
def test_the_other_says_who_has_ended(fate: str) -> None:
    """Gloo notices only a kill and an error, and does not name the process."""
    with started(2, *COMMAND, fate) as (first, second):
        said, _ = first.communicate(timeout=PATIENCE)
        if fate == "stop":
            second.send_signal(signal.SIGKILL)
        second.wait(timeout=PATIENCE)
    assert first.returncode == 1, said  # and not JAX's SIGABRT
    named = [x for x in said.splitlines() if "trainer 1 (127.0.0.1:" in x and ENDED[fate] in x]
    assert named, said
    if fate in ("stop", "fewer"):
        assert said.splitlines()[-1].startswith(
            "dtrans.errors.PeerError: trainer 0 cannot continue"
        ), said


# -- in one process --------------------------------------------------------------------------------


KEYS = Keys("of this job")


@pytest.fixture
def three() -> Iterator[list[Watch]]:
    endpoints = free_endpoints(3)
    members = [Membership(k, (0, 1, 2), endpoints) for k in range(3)]
    first = Watch(members[0], KEYS, Address("127.0.0.1", "127.0.0.1"))
    made = [first, *(Watch(m, KEYS, first.address) for m in members[1:])]
    with first.operation():
        pass
    until(lambda: len(first._addresses) == 2, "all to be here")
    yield made
    for w in reversed(made):
        w.close()


def test_all_are_told_by_the_first(three: list[Watch]) -> None:
    first, second, third = three
    with second.operation(), second.operation():
        pass
    second.close()
    wanted = (
        "trainer 1 (.*) has finished after 2 operations of the job, but this trainer has begun 3$"
    )
    for w in (first, third):
        until(lambda w=w: w.members.ended, "the news")  # type: ignore[misc]
        w.members.begun = 2
        w.check()
        with pytest.raises(PeerError, match=wanted), w.operation():
            pytest.fail("it was let in")
        assert w.members.begun == 2
        with pytest.raises(PeerError, match="has finished$"):
            w.check(origin=1)
        w.check(origin=0)


def test_strangers_are_not_let_in(three: list[Watch]) -> None:
    first, *_ = three
    lie = wire.header("ended", trainer=1, operations=0, reason="I say so")
    with zmq.Context() as context:
        for password in (None, "0" * 64, token.shown("of another job", "watched trainer 1")):
            with context.socket(zmq.DEALER) as line, line.get_monitor_socket() as monitor:
                line.linger = 0
                if password is not None:
                    line.plain_username, line.plain_password = (
                        b"watched trainer 1",
                        password.encode(),
                    )
                line.connect(f"tcp://{first.address}")
                with contextlib.suppress(
                    zmq.Again
                ):  # its connection may be closed before it sends a message
                    line.send(lie, zmq.NOBLOCK)
                assert monitor.poll(HANG * 1000)
                line.disable_monitor()
    three[2].close()  # the next message is read
    until(lambda: first.members.ended, "the news")
    assert [*first.members.ended] == [2]


def test_one_speaks_for_itself_alone_and_noise_is_dropped(three: list[Watch]) -> None:
    first, *_ = three
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.plain_username, line.plain_password = (
            b"watched trainer 1",
            token.shown(KEYS.secret, "watched trainer 1").encode(),
        )
        line.connect(f"tcp://{first.address}")
        for noise in (
            [b"noise"],
            [b""],  # the message by which ZeroMQ reports a connection
            [b"", b""],
            [wire.header("value")],
            [wire.header("ended", trainer=2, operations=True, reason="")],
        ):
            line.send_multipart(noise)
        line.send(wire.header("ended", trainer=2, operations=3, reason="I say so"))
        until(lambda: first.members.ended, "the news")
    assert [*first.members.ended] == [1]
    assert first._refusals.count == 4


def test_who_waits_for_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "SAY", 0.05)
    monkeypatch.setattr(watch_module, "SLOW", 0.3)
    endpoints = free_endpoints(2)
    first = Watch(Membership(0, (0, 1), endpoints), KEYS, Address("127.0.0.1", "127.0.0.1"))
    second = Watch(Membership(1, (0, 1), endpoints), KEYS, first.address)
    said = lambda: [r.getMessage() for r in caplog.records if " has waited " in r.getMessage()]
    try:
        with first.operation():
            until(said, "a word about it")
            with second.operation():
                until(lambda: first.members.doing[1].operations == 1, "the other to come")
    finally:
        second.close()
        first.close()
    assert said()[0].startswith(
        "trainer 0 has waited 0 s in operation 1 of the job: trainer 1 (127.0.0.1:"
    )
    assert ") has begun 0, and is at " in said()[0] and ".py:" in said()[0]
    assert not any(x.startswith("trainer 1") for x in said())


# -- dtrans status ---------------------------------------------------------------------------------


def test_trainer_0_answers_observers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user sets the endpoint.

    Each trainer reports its number of steps with its other messages.
    """
    *endpoints, status = free_endpoints(4)
    monkeypatch.setenv("DTRANS_STATUS_ENDPOINT", status)
    monkeypatch.setenv("DTRANS_TOKEN", "of the user")
    monkeypatch.setattr(watch_module, "SAY", 0.05)
    steps = [7]
    monkeypatch.setattr(watch_module, "completed_steps", lambda: steps[0])
    members = [Membership(k, (0, 1, 2), tuple(endpoints)) for k in range(3)]
    first = Watch(members[0], KEYS, Address("127.0.0.1", "127.0.0.1"))
    with contextlib.ExitStack() as stack:
        stack.callback(first.close)
        second = Watch(members[1], KEYS, first.address)
        stack.callback(second.close)
        observer = stack.enter_context(JobObserver([status], HANG))

        def rows(step: int) -> Any:
            answers = observer.ask()
            rows = merge_trainers(answers)
            known = [t.step for t in rows if t.state == "present"]
            return (answers, rows) if len(known) > 1 and set(known) == {step} else None

        answers, (zero, one, two) = until(lambda: rows(7), "words of trainer 1")
        (server,) = [x.server for x in answers]
        assert (server.mode, server.step, server.received) == ("collective", 7, None)
        assert server.doing == "waiting for trainer 2 to connect"
        assert (zero.state, one.state, two.state) == ("present", "present", "not here yet")
        assert one.doing.startswith("operation 0, at ") and ".py:" in one.doing
        assert (one.bytes_in, one.bytes_out, one.staleness) == (None, None, None)
        stack.callback(Watch(members[2], KEYS, first.address).close)
        steps[0] = 9
        until(lambda: rows(9) and rows(9)[0][0].server.doing == "training", "two more steps")
        assert show_status([status], timeout=HANG, interval=None, as_json=False)
        table = capsys.readouterr().out
        assert table.startswith("collective job, 3 of 3 trainers here")
        assert [line.split()[:4] for line in table.splitlines() if "steps/s" in line] == [
            ["endpoint", "step", "steps/s", "doing"],
            ["trainer", "step", "steps/s", "heard"],
        ]
        with first.operation():
            waits = lambda: str(getattr(observer.ask()[0].server, "doing", ""))
            until(lambda: "waiting for operation 1 of the job: trainer 1 " in waits(), "a wait")
        second.close()
        until(
            lambda: [t.state for t in merge_trainers(observer.ask())][1:2] == ["left"],
            "the end of trainer 1",
        )
        with JobObserver([status], HANG) as stranger:
            assert stranger.ask()[0].error == ""
        monkeypatch.setenv("DTRANS_TOKEN", "of another")
        with JobObserver([status], HANG) as stranger:
            assert "different values of DTRANS_TOKEN" in stranger.ask()[0].error
        until(lambda: [x.server.barred for x in observer.ask() if x.server] == [1], "a count")


@pytest.mark.parametrize(
    "where, message",
    [
        (
            "192.0.2.1:6174",
            "DTRANS_STATUS_ENDPOINT of trainer 0 is at 192.0.2.1:6174, which is not on loopback",
        ),
        ("a port", "'a port' is not an endpoint"),
        ("taken", "DTRANS_STATUS_ENDPOINT=127.0.0.1:.* cannot be bound: Address already in use"),
    ],
)
def test_a_place_for_observers_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("DTRANS_STATUS_ENDPOINT", own if where == "taken" else where)
        with pytest.raises(ConfigError, match=message):
            Watch(Membership(0, (0, 1), free_endpoints(2)), KEYS, Address("127.0.0.1", "127.0.0.1"))
