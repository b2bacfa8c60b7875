"""Trainers of collectives learn at once that one of them has ended, and say which: as real processes."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

import cluster_trainer as script
import pytest
import zmq
from role_threads import HANG, free_endpoints, until
from trainer_processes import started

from dtrans.errors import PeerError
from dtrans.protocol import token, wire
from dtrans.run.distributed import watch as watch_module
from dtrans.run.distributed.address import Address
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.watch import Watch


PATIENCE = 120.0  # seconds for what takes ten on an idle machine
COMMAND = [sys.executable, script.__file__, "endless"]
ENDED = {
    "kill": "has ended: its connection ended without a goodbye",
    "stop": "has ended: its connection ended without a goodbye",
    "raise": "has ended: KeyError: 'this is why'",
    "fewer": "has come to its end after ",
}


@pytest.mark.parametrize("fate", ["stop", "fewer", "raise", pytest.param("kill", marks=pytest.mark.soak)])
def test_the_other_says_who_has_ended(fate: str) -> None:
    """Of these, only a kill and an error are noticed by Gloo, which does not say whose."""
    with started(2, *COMMAND, fate) as (first, second):
        said, _ = first.communicate(timeout=PATIENCE)
        if fate == "stop":
            second.send_signal(signal.SIGKILL)
        second.wait(timeout=PATIENCE)
    assert first.returncode == 1, said  # not JAX's SIGABRT
    named = [x for x in said.splitlines() if "trainer 1 (127.0.0.1:" in x and ENDED[fate] in x]
    assert named, said
    if fate in ("stop", "fewer"):
        assert said.splitlines()[-1].startswith("dtrans.errors.PeerError: trainer 0 cannot go on"), said


# -- in one process --------------------------------------------------------------------------------


SECRET = "of this job"


@pytest.fixture
def three() -> Iterator[list[Watch]]:
    endpoints = free_endpoints(3)
    members = [Membership(k, (0, 1, 2), endpoints) for k in range(3)]
    first = Watch(members[0], SECRET, Address("127.0.0.1", "127.0.0.1"))
    made = [first, *(Watch(m, SECRET, first.address) for m in members[1:])]
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
    wanted = "trainer 1 (.*) has come to its end after 2 operations of the job, and this one has begun 3$"
    for w in (first, third):
        until(lambda w=w: w.roll.ended, "the news")  # type: ignore[misc]
        w.roll.begun = 2
        w.check()
        with pytest.raises(PeerError, match=wanted), w.operation():
            pytest.fail("it was let in")
        assert w.roll.begun == 2
        with pytest.raises(PeerError, match="has come to its end$"):
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
                    line.plain_username, line.plain_password = b"watched trainer 1", password.encode()
                line.connect(first.address)
                with contextlib.suppress(zmq.Again):  # it may have been turned away before it has said anything
                    line.send(lie, zmq.NOBLOCK)
                assert monitor.poll(HANG * 1000)
                line.disable_monitor()
    three[2].close()  # what is said next is heard
    until(lambda: first.roll.ended, "the news")
    assert [*first.roll.ended] == [2]


def test_one_speaks_for_itself_alone_and_noise_is_dropped(three: list[Watch]) -> None:
    first, *_ = three
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.plain_username, line.plain_password = (
            b"watched trainer 1",
            token.shown(SECRET, "watched trainer 1").encode(),
        )
        line.connect(first.address)
        for noise in (b"noise", b"", wire.header("value"), wire.header("ended", trainer=2, operations=True, reason="")):
            line.send(noise)
        line.send(wire.header("ended", trainer=2, operations=3, reason="I say so"))
        until(lambda: first.roll.ended, "the news")
    assert [*first.roll.ended] == [1]
    assert first._refusals.count == 4


def test_who_waits_for_long_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watch_module, "SAY", 0.05)
    monkeypatch.setattr(watch_module, "SLOW", 0.3)
    endpoints = free_endpoints(2)
    first = Watch(Membership(0, (0, 1), endpoints), SECRET, Address("127.0.0.1", "127.0.0.1"))
    second = Watch(Membership(1, (0, 1), endpoints), SECRET, first.address)
    said = lambda: [r.getMessage() for r in caplog.records if " has waited " in r.getMessage()]
    try:
        with first.operation():
            until(said, "a word about it")
            with second.operation():
                until(lambda: first.roll.doing[1].operations == 1, "the other to come")
    finally:
        second.close()
        first.close()
    assert said()[0].startswith("trainer 0 has waited 0 s in operation 1 of the job: trainer 1 (127.0.0.1:")
    assert ") has begun 0, and is at " in said()[0] and ".py:" in said()[0]
    assert not any(x.startswith("trainer 1") for x in said())
