"""Links and listeners of ZeroMQ: messages, events of connections, and wake-ups of a poll."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from role_threads import HANG, NEVER, RoleThreads, free_endpoints

from dtrans.errors import ConfigError
from dtrans.protocol.token import new_token
from dtrans.protocol.transport import Event
from dtrans.run.net.keys import Keys, make_folder
from dtrans.run.net.zmq_transport import ZmqTransport


USERS = {"somebody": "trainer 0"}
LIMITS = {"frame": 1000, "messages": 10}
ME = {"user": "somebody", "role": "trainer 0"}


@contextlib.contextmanager
def opened(token: str, patience: float = 5.0) -> Iterator[ZmqTransport]:
    transport = ZmqTransport(Keys(token), patience)
    try:
        yield transport
    finally:
        transport.close()


def events(transport: ZmqTransport, kind: str, count: int = 1) -> list[Event]:
    """Return events until `count` of them have the given kind."""
    found: list[Event] = []
    limit = time.monotonic() + HANG
    while sum(e.kind == kind for e in found) < count:
        assert time.monotonic() < limit, (kind, found)
        found += transport.poll(limit)
    return found


def kinds(found: list[Event]) -> list[str]:
    return [e.kind for e in found]


def words(found: list[Event]) -> list[bytes]:
    return [bytes(e.frames[0]) for e in found if e.kind == "message"]


@pytest.mark.parametrize("by_socket", [False, True], ids=["tcp", "unix"])
def test_messages_go_both_ways(by_socket):
    token = new_token()
    with opened(token) as here, opened(token) as there:
        door = here.bind("127.0.0.1:*", USERS, has_local=True, **LIMITS)
        assert there.reaches(door.local)
        link = there.connect(door.local if by_socket else door.endpoint, **ME)
        assert kinds(events(there, "connected")) == ["connected"]
        link.send([b"hello", b"x" * 900])
        *_, heard = events(here, "message")
        assert (heard.source, heard.user) == (door, "somebody")
        assert [bytes(x) for x in heard.frames] == [b"hello", b"x" * 900]
        door.send(heard.address, [b"welcome"])
        assert words(events(there, "message")) == [b"welcome"]


def test_last_words_come_before_the_end_of_a_connection():
    token = new_token()
    with opened(token) as there:
        with opened(token) as here:
            door = here.bind("127.0.0.1:*", USERS, **LIMITS)
            link = there.connect(door.endpoint, **ME)
            link.send([b"hello"])
            *_, heard = events(here, "message")
            for k in range(9):
                door.send(heard.address, [b"%d" % k])
            door.close(linger=HANG)
        found = events(there, "broken")
        assert kinds(found) == ["connected", *["message"] * 9, "broken"]


def test_a_door_knows_who_has_gone_and_who_was_refused():
    token = new_token()
    with opened(token) as here, opened(token) as there, opened(new_token()) as stranger:
        door = here.bind("127.0.0.1:*", USERS, **LIMITS)
        link = there.connect(door.endpoint, **ME)
        link.send([b"hello"])
        *_, heard = events(here, "message")
        link.close(linger=HANG)
        *_, lost = events(here, "lost")
        assert lost.address == heard.address
        stranger.connect(door.endpoint, **ME)
        assert kinds(events(here, "refused"))[0] == "refused"
        reasons = [e.reason for e in events(stranger, "barred") if e.kind == "barred"]
        assert "DTRANS_TOKEN" in reasons[0]


def test_the_end_of_a_connection_is_reported_if_it_came_before_its_first_message_was_read():
    """The listener's process was busy. Meanwhile, the other process has ended."""
    token = new_token()
    with opened(token) as here:
        door = here.bind("127.0.0.1:*", USERS, **LIMITS)
        with opened(token) as there:
            link = there.connect(door.endpoint, **ME)
            link.send([b"hello"])
            link.close(linger=HANG)
        assert door.monitor.poll(HANG * 1000)  # ZeroMQ has noticed the connection
        found = events(here, "lost")
        while not words(found):  # the probe of the connection was read before it
            found += events(here, "lost")
        assert kinds(found)[-2:] == ["message", "lost"]


def test_events_say_which_link_they_are_of():
    token = new_token()
    with opened(token) as here, opened(token) as there:
        doors = [here.bind("127.0.0.1:*", USERS, **LIMITS) for _ in range(2)]
        links = [there.connect(door.endpoint, **ME) for door in doors]
        for link in links:
            link.send([b"hello"])
        for heard in [e for e in events(here, "message", 2) if e.kind == "message"]:
            heard.source.send(heard.address, [b"welcome"])
        found = [e.source for e in events(there, "message", 2) if e.kind == "message"]
        assert {*found} == {*links}


def test_an_event_that_is_not_taken_comes_again():
    token = new_token()
    with opened(token) as there:
        with opened(token) as here:
            door = here.bind("127.0.0.1:*", USERS, **LIMITS)
            link = there.connect(door.endpoint, **ME)
            link.send([b"hello"])
            *_, heard = events(here, "message")
            door.send(heard.address, [b"welcome"])
        found: list[Event] = []
        while "broken" not in kinds(found):
            found.append(next(there.poll(time.monotonic() + HANG)))
        assert kinds(found) == ["connected", "message", "broken"]


def test_a_transport_closes_after_a_key_file_could_not_be_read(tmp_path: Path) -> None:
    make_folder(tmp_path, ["trainer 0"])
    with contextlib.closing(ZmqTransport(Keys("", folder=str(tmp_path)))) as transport:
        with pytest.raises(ConfigError, match=r"its file trainer-1.secret cannot be read: "):
            transport.connect("127.0.0.1:1", user="somebody", role="trainer 1")
        assert not transport.owners


def test_another_thread_ends_a_poll(role_threads: RoleThreads) -> None:
    with opened(new_token()) as transport:
        role_threads.start("poll", lambda: list(transport.poll(time.monotonic() + NEVER)))
        transport.wake()
        assert role_threads.end("poll") == []


def test_a_closed_door_frees_its_endpoint():
    (endpoint,) = free_endpoints(1)
    with opened(new_token()) as transport:
        for _ in range(3):
            transport.bind(endpoint, USERS, **LIMITS).close()
        transport.bind(endpoint, USERS, **LIMITS)
        with pytest.raises(ConfigError, match=f"{endpoint} cannot be bound: Address already in"):
            transport.bind(endpoint, USERS, **LIMITS)
