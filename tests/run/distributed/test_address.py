"""Addresses at which processes reach each other: from endpoints, on one host, or on several hosts
of a scheduler."""

from __future__ import annotations

import contextlib
import re
import socket
from typing import Any

import pytest

from dtrans.errors import ConfigError
from dtrans.run.distributed import address
from dtrans.run.distributed.address import Address, address_of, reached_here, route_to, this_host
from dtrans.run.distributed.membership import Membership
from dtrans.run.net.keys import Keys
from dtrans.run.net.zmq_transport import ZmqTransport


FAR = ("node001 a", "node002 b")
COORDINATOR = "node001:61440"


def member(k: int = 1, **options: Any) -> Membership:
    return Membership(k, (0, 1), **{"allow_remote": True} | options)


@pytest.fixture(autouse=True)
def protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRANS_TOKEN", "0123456789abcdef" * 4)


def routed(monkeypatch: pytest.MonkeyPatch, own: str) -> list[tuple[str, int]]:
    """Let all routes begin at one address of this host. Return the list of requested routes."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(address, "route_to", lambda host, port: asked.append((host, port)) or own)
    return asked


def no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, port: int) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(address, "route_to", fail)


def test_stages_on_other_hosts_are_reached_by_the_way_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = routed(monkeypatch, "10.0.0.7")
    found = address_of(member(), FAR, COORDINATOR)
    assert asked == [("node001", 61440)] and found == Address("10.0.0.7", "10.0.0.7")
    routed(monkeypatch, "fd00::7")
    assert address_of(member(), FAR, COORDINATOR) == Address("fd00::7", "fd00::7")


def test_a_process_beside_the_coordinator_is_reached_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's hosts resolve their own names to 127.0.1.1, which other hosts cannot reach."""
    routed(monkeypatch, "127.0.1.1")
    found = address_of(member(0), FAR, COORDINATOR)
    assert found == Address("*", "node001")


def test_processes_of_one_host_stay_on_loopback() -> None:
    assert address_of(member(allow_remote=False), [FAR[0]] * 2, COORDINATOR) == Address(
        "127.0.0.1", "127.0.0.1"
    )


def test_endpoints_come_first() -> None:
    given = member(endpoints=("10.0.0.1:6000", "[fd00::2]:6000"), allow_remote=False)
    assert address_of(given, FAR, COORDINATOR) == Address("fd00::2", "fd00::2")


def test_a_door_is_bound_at_one_address_and_reached_by_another() -> None:
    keys = Keys("a token", encryption="disabled")
    with contextlib.closing(ZmqTransport(keys)) as transport:
        at = Address("127.0.0.1", "localhost")
        door = at.open_door(transport, {"one": ""}, frame=100, messages=10)
        assert re.fullmatch(r"localhost:\d+", door.endpoint)


DEBIAN = {"node1": "127.0.1.1", "node2": "10.0.0.2"}  # as node1 resolves names


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    monkeypatch.setattr(address, "resolve_host", lambda host: names.get(host, host))


def test_a_name_that_is_loopback_on_its_own_host_stands_for_the_way_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoints = ("node1:6000", "node2:6001")
    resolving(monkeypatch, DEBIAN)
    asked = routed(monkeypatch, "10.0.0.1")
    assert [reached_here(e, endpoints) for e in endpoints] == ["10.0.0.1:6000", "node2:6001"]
    assert asked == [("node2", 6001)]
    assert address_of(member(0, endpoints=endpoints), FAR, COORDINATOR) == Address(
        "10.0.0.1", "10.0.0.1"
    )
    routed(monkeypatch, "fd00::1")
    assert reached_here("node1:6000", endpoints) == "[fd00::1]:6000"

    # two names of one host
    resolving(monkeypatch, dict.fromkeys(DEBIAN, "127.0.1.1"))
    assert [reached_here(e, endpoints) for e in endpoints] == [*endpoints]


def test_an_endpoint_that_no_other_host_reaches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, DEBIAN)
    with pytest.raises(
        ConfigError,
        match=r"127\.0\.0\.1:6000, which is loopback. The trainer at 10\.0\.0\.2:6001 is on "
        r"another",
    ):
        reached_here("127.0.0.1:6000", ("127.0.0.1:6000", "10.0.0.2:6001"))
    no_way(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"at node1:6000, whose name node1 resolves to 127\.0\.1\.1 on this host"
    ):
        reached_here("node1:6000", ("node1:6000", "node2:6001"))


def test_other_hosts_must_be_allowed() -> None:
    with pytest.raises(
        ConfigError,
        match=r"the 2 trainers are on 2 hosts, .*; to allow this, call dtrans\.connect\(allow",
    ):
        address_of(member(allow_remote=False), FAR, COORDINATOR)


def test_a_coordinator_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    no_way(monkeypatch)
    with pytest.raises(
        ConfigError,
        match="trainer 1 has no network route to JAX's coordinator at node001:61440: .*not known",
    ):
        address_of(member(), FAR, COORDINATOR)


def test_the_way_to_loopback_is_loopback() -> None:
    assert route_to("127.0.0.1", 9) == "127.0.0.1"


def test_a_host_is_told_by_its_name_and_by_when_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert this_host() == this_host() and socket.gethostname() in this_host()
    here = tmp_path / "boot"
    monkeypatch.setattr(address, "BOOT", here)
    assert this_host() == socket.gethostname()  # there is no such file
    here.write_text("another\n")
    assert this_host() == f"{socket.gethostname()} another"
