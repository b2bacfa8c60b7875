"""Over a connection that may break at any moment, each message arrives once, and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.numbered_messages import NumberedMessages


def sent(line: NumberedMessages, what: int) -> list[bytes]:
    """Send a message. Return its frames."""
    frames = [wire.header("recv", step=what, **line.stamp())]
    line.store(frames)
    return frames


# fate of the next message: it is lost, arrives, arrives twice, or arrives before the connection is
# resumed
FATES = st.lists(st.sampled_from(["lost", "comes", "twice", "resumed"]), max_size=60)


@given(FATES)
def test_each_message_is_taken_once_and_in_order(fates: list[str]) -> None:
    here, there = NumberedMessages(), NumberedMessages()
    taken: list[int] = []

    def comes(frames: list[bytes]) -> None:
        message = wire.parse(frames)
        if there.take(message):
            taken.append(message["step"])

    def resume() -> None:
        here.check_resumable(there.received)
        here.acknowledge(there.received)
        for frames in here.stored:
            comes(frames)

    for i, fate in enumerate(fates):
        frames = sent(here, i)
        for _ in range({"lost": 0, "comes": 1, "twice": 2, "resumed": 0}[fate]):
            comes(frames)
        if fate == "resumed":
            resume()
    resume()
    assert taken == list(range(len(fates)))
    here.acknowledge(there.received)
    assert here.stored == []


def test_a_message_of_the_other_end_releases_what_it_has_heard() -> None:
    here, there = NumberedMessages(), NumberedMessages()
    first, _ = sent(here, 0), sent(here, 1)
    assert there.take(wire.parse(first))
    assert here.take(wire.parse(sent(there, 0)))
    assert [wire.parse(frames)["number"] for frames in here.stored] == [2]


def test_unnumbered_messages_are_taken_after_a_gap() -> None:
    here, there = NumberedMessages(), NumberedMessages()
    sent(here, 0)
    assert not there.take(wire.parse(sent(here, 1)))
    assert there.take(wire.parse([wire.header("abort", reason="it ends")]))
    assert there.received == 0


@pytest.mark.parametrize("heard", [0, 4])
def test_a_connection_is_not_resumed_without_what_was_released_or_never_sent(heard: int) -> None:
    here = NumberedMessages()
    for i in range(3):
        sent(here, i)
    here.acknowledge(1)
    said = (
        f"after message {heard}: this process has sent 3 messages, and has already deleted the "
        "first 1"
    )
    with pytest.raises(WireError, match=said):
        here.check_resumable(heard)
    here.check_resumable(1)
    here.clear()
    with pytest.raises(WireError, match="after message 1:"):
        here.check_resumable(1)
