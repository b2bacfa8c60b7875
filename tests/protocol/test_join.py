"""Rendezvous of the trainers of collectives: messages arrive in any order, and other messages are
ignored."""

from __future__ import annotations

import random

import pytest

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.collective.join import GRACE, JoinLeader, JoinMember


ENDPOINTS = ("a:1", "b:2", "c:3", "d:4")
SECRET = "of this job"
NOISE = [
    b"",
    b"\xc1",
    wire.header("go"),
    wire.header("abort", reason="I say so"),
    wire.header("here"),
    wire.header("here", proof="0" * 64),
    wire.header("refuse", reason="I say so", proof=token.shown("another", "refuse nonce")),
    wire.header("meet", trainer=1, endpoints="a:1"),
    wire.header("meet", trainer=True, endpoints=["a:1"]),
]


def first() -> JoinLeader:
    return JoinLeader(ENDPOINTS, SECRET, "nonce", now=0.0)


def other(k: int) -> JoinMember:
    return JoinMember(k, ENDPOINTS, SECRET, deadline=60.0, now=0.0)


@pytest.mark.parametrize("seed", range(50))
def test_all_meet_in_any_order_and_among_strangers(seed: int) -> None:
    rng = random.Random(seed)
    one, others = first(), {k: other(k) for k in (1, 2, 3)}
    to_others = [
        (k, b"the first", one.question(k)) for k in others for _ in range(rng.randint(1, 3))
    ]
    to_others += [(rng.choice([*others]), b"a stranger", rng.choice(NOISE)) for _ in range(10)]
    to_first = [(rng.choice([*others]), rng.choice(NOISE)) for _ in range(10)]
    while to_others or to_first:
        rng.shuffle(to_others)
        rng.shuffle(to_first)
        try:
            if to_others and rng.random() < 0.6:
                k, sender, message = to_others.pop()
                answer = others[k].heard(sender, [message], 1.0)
                if answer is not None:
                    to_first.append((k, answer))
            elif to_first:
                k, message = to_first.pop()
                one.heard(k, [message])
        except WireError:
            pass  # the message is counted and dropped
    assert (one.missing, sorted(one.joined), one.strangers) == ([], [1, 2, 3], {})
    assert not any(x.met for x in others.values())  # processes outside of the job sent these
    for x in others.values():
        assert x.heard(b"the first", [wire.header("go")], 2.0) is None
        assert x.met


def test_who_was_told_other_endpoints_refuses() -> None:
    one, stray = first(), JoinMember(1, ("a:1", "x:9"), SECRET, deadline=60.0, now=0.0)
    answer = stray.heard(b"the first", [one.question(1)], 1.0)
    reason = (
        "this process is trainer 1 of a:1,x:9, but trainer 0 expects trainer 1 of 'a:1,b:2,c:3,d:4'"
    )
    assert answer is not None and stray.refused == reason
    with pytest.raises(PeerError, match=f"^trainer 1 \\(b:2\\) refused trainer 0: {reason}$"):
        one.heard(1, [answer])
    assert one.missing == [2, 3]


def test_the_first_gives_up_and_says_so_to_who_was_asked_by_it() -> None:
    waiting = other(2)
    waiting.heard(b"the first", [first().question(2)], 1.0)
    assert waiting.heard(b"a stranger", [wire.header("abort", reason="no")], 2.0) is None
    with pytest.raises(PeerError, match="^trainer 2 stopped because trainer 0 gave up: no$"):
        waiting.heard(b"the first", [wire.header("abort", reason="no")], 2.0)
    with pytest.raises(DeadlineError, match="^trainer 2 stopped because trainer 0 gave up: late$"):
        waiting.heard(b"the first", [wire.header("abort", reason="late", late=True)], 2.0)


def test_time_is_up() -> None:
    waiting, one = other(1), first()
    assert waiting.limit == 60.0
    assert str(waiting.late()) == "trainer 1 waited 60 s at b:2 for trainer 0 (a:1) to connect"
    waiting.heard(b"the first", [one.question(1)], 10.0)
    # the repeated request does not extend the deadline
    waiting.heard(b"the first", [one.question(1)], 50.0)
    assert waiting.limit == 70.0 + GRACE
    assert (
        str(waiting.late())
        == "trainer 1 waited 65 s at b:2 for trainer 0 (a:1) to reach the other trainers"
    )
    waiting.heard(b"another first", [one.question(1)], 50.0)  # the trainer has started again
    assert waiting.limit == 110.0 + GRACE
    with pytest.raises(WireError):
        one.heard(3, [b"what?"])
    assert str(one.late(5.0)).startswith(
        "trainer 0 waited 5 s for trainer 1 (b:2) and trainer 2 (c:3) and trainer 3"
    )
    assert (
        "; the process at d:4 is not part of this job: it sent a message whose header is not "
        "msgpack" in str(one.late(5.0))
    )


def test_who_waits_says_for_whom_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    one, waiting = first(), other(1)
    one.heard(1, [answer_of(1, one)])
    assert one.reminder.next == waiting.wakes == 10.0
    for now in range(25):
        one.say_that_it_waits(float(now))
    told = "trainer 0 has waited {} s for trainer 2 (c:3) and trainer 3 (d:4) to join".format
    assert caplog.messages == [told(10), told(20)]
    caplog.clear()
    waiting.say_that_it_waits(11.0)
    waiting.heard(b"the first", [one.question(1)], 12.0)
    waiting.say_that_it_waits(20.0)
    waiting.say_that_it_waits(21.0)
    told = "trainer 1 has waited {} s at b:2 for trainer 0 (a:1) {}".format
    assert caplog.messages == [told(11, "to connect"), told(21, "to reach the other trainers")]


def test_who_waits_looks_again_at_its_deadline() -> None:
    waiting = JoinMember(1, ENDPOINTS, SECRET, deadline=5.0, now=0.0)
    assert waiting.wakes == waiting.limit == 5.0


def answer_of(k: int, one: JoinLeader) -> bytes:
    """Return trainer k's answer to trainer 0."""
    answer = other(k).heard(b"the first", [one.question(k)], 1.0)
    assert answer is not None
    return answer
