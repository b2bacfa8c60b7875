"""Endpoints, `host:port`: parsing and checks."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Sequence

from dtrans.errors import ConfigError


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split an endpoint into host and port; an IPv6 host is written in brackets, `[::1]:6174`.

    Raises:
      ConfigError: the endpoint does not have this form.
    """
    host, colon, port = endpoint.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    is_odd = not plain or any(c.isspace() or c in "/;,@" for c in plain)
    if not colon or is_odd or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{endpoint!r} is not an endpoint: write host:port, e.g. 127.0.0.1:6174")
    return host.strip("[]"), int(port)


WILDCARD_ADDRESSES = ("0.0.0.0", "::", "[::]", "*")


def parse_endpoints(endpoints: str | Sequence[str], role: str = "pserver") -> tuple[str, ...]:
    """Return the endpoints of a sequence, or of one string with commas.

    Args:
      endpoints: `host:port` each.
      role: the role that listens there, for errors.

    Raises:
      ConfigError: there is none, one is not host:port or is a wildcard, or two are equal.
    """
    if not isinstance(endpoints, (str, Sequence)):
        raise ConfigError(
            f"{role}s must be endpoints, such as '127.0.0.1:6174,127.0.0.1:6175', or a list, "
            f"it is {endpoints!r}"
        )
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    parsed = tuple(part.strip() for part in parts)
    if not parsed or parsed == ("",):
        raise ConfigError(
            f"{role}s has no endpoints; write e.g. {role}s='127.0.0.1:6174,127.0.0.1:6175'"
        )
    for e in parsed:
        host, _ = split_endpoint(e)
        if host in WILDCARD_ADDRESSES:
            raise ConfigError(
                f"{e!r} has a wildcard address, which other hosts cannot connect to; write an "
                "address of this host"
            )
    twice = sorted({e for e in parsed if parsed.count(e) > 1})
    if twice:
        raise ConfigError(
            f"the endpoint {twice[0]} is listed {parsed.count(twice[0])} times; each {role} needs "
            "another one"
        )
    return parsed


def parse_host_slots(text: str, where: str) -> list[tuple[str, int | None]]:
    """Parse hosts such as `gpu1:2,gpu2`: names with slot counts, None where omitted.

    Args:
      text: the list.
      where: the option or variable that has the list, for errors.

    Raises:
      ConfigError: slots that are not a number.
    """
    hosts: list[tuple[str, int | None]] = []
    for item in text.split(","):
        name, colon, slots = item.strip().partition(":")
        if colon and not slots.isdecimal():
            raise ConfigError(
                f"{where} {text} has {slots!r} as the number of slots; write a number, such as "
                "gpu1:2 or slots=2"
            )
        hosts.append((name, int(slots) if colon else None))
    return hosts


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def resolve_host(host: str) -> str:
    """Return the first address that a name resolves to on this host, or an empty string."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


class ReservedEndpoints:
    """Loopback endpoints on ports that the system chose, reserved until `close`.

    A bound socket that does not listen reserves its port: the system gives it to no other process.
    On Linux a server can still bind it, if both sockets have SO_REUSEADDR; those of ZeroMQ, gRPC
    and `socket.create_server` do. Other systems refuse such a server, so there the ports are freed
    at once.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def choose(self, count: int) -> tuple[str, ...]:
        """Return endpoints that differ from each other and from earlier ones."""
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
        """Free the ports."""
        for chosen in self._sockets:
            chosen.close()
        self._sockets.clear()
