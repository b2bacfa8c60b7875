"""Endpoints: `host:port`, as users write them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Sequence

from dtrans.errors import ConfigError


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`127.0.0.1:6174` as host and port; an IPv6 host is written in brackets, `[::1]:6174`.

    Raises:
      ConfigError: not of that form.
    """
    host, colon, port = endpoint.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    odd = not plain or any(c.isspace() or c in "/;,@" for c in plain)
    if not colon or odd or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{endpoint!r} is not an endpoint: write host:port, e.g. 127.0.0.1:6174")
    return host.strip("[]"), int(port)


ANY_ADDRESS = ("0.0.0.0", "::", "[::]", "*")


def parse_endpoints(endpoints: str | Sequence[str], of: str = "pserver") -> tuple[str, ...]:
    """A sequence of endpoints, or one string with commas.

    Args:
      of: whose they are, for errors.

    Raises:
      ConfigError: none at all, one that is not host:port or that nobody can reach, or the same one
        twice.
    """
    if not isinstance(endpoints, (str, Sequence)):
        raise ConfigError(
            f"{of}s must be endpoints, such as '127.0.0.1:6174,127.0.0.1:6175', or a list of them; "
            f"it is {endpoints!r}"
        )
    given = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    parsed = tuple(e.strip() for e in given)
    if not parsed or parsed == ("",):
        raise ConfigError(
            f"no {of} endpoints were given: write e.g. {of}s='127.0.0.1:6174,127.0.0.1:6175'"
        )
    for e in parsed:
        host, _ = split_endpoint(e)
        if host in ANY_ADDRESS:
            raise ConfigError(
                f"{e!r} is every address of a host, which nobody else can reach: write the one at "
                "which the others "
                "reach it"
            )
    twice = sorted({e for e in parsed if parsed.count(e) > 1})
    if twice:
        raise ConfigError(
            f"the endpoint {twice[0]} is listed {parsed.count(twice[0])} times; each {of} needs "
            "one of its own"
        )
    return parsed


def host_slots(text: str, where: str) -> list[tuple[str, int | None]]:
    """Return the hosts of a list such as `gpu1:2,gpu2`, each with its number of slots, None if not
    given.

    Args:
      where: the list's own name, for errors.

    Raises:
      ConfigError: a number of slots that is not a number.
    """
    hosts: list[tuple[str, int | None]] = []
    for item in text.split(","):
        name, colon, slots = item.strip().partition(":")
        if colon and not slots.isdecimal():
            raise ConfigError(
                f"{where} {text} has {slots!r} for the number of slots; write a number, such as "
                "gpu1:2 or slots=2"
            )
        hosts.append((name, int(slots) if colon else None))
    return hosts


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def resolved(host: str) -> str:
    """Return the first address that a name resolves to here; empty where it resolves to nothing."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


class ReservedEndpoints:
    """Loopback endpoints on ports that the system chose, kept until `close`.

    A socket that is bound and does not listen keeps its port: the system gives that port to nobody
    else. On Linux a server may bind it all the same if both sockets have SO_REUSEADDR, as those of
    ZeroMQ, gRPC and `socket.create_server` do. Other systems refuse such a server, so there the
    ports are free again at once.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def choose(self, count: int) -> tuple[str, ...]:
        """Return endpoints that differ from each other and from those chosen before."""
        sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
        self._sockets += sockets
        for chosen in sockets:
            chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            chosen.bind(("127.0.0.1", 0))
        endpoints = tuple(f"127.0.0.1:{chosen.getsockname()[1]}" for chosen in sockets)
        if sys.platform != "linux":
            self.close()
        return endpoints

    def close(self) -> None:
        """Give the ports back."""
        for chosen in self._sockets:
            chosen.close()
        self._sockets.clear()
