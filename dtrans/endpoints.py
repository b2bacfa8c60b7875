"""Endpoints, `host:port`: parsing and checks."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Sequence

from dtrans.errors import ConfigError


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port` into host and port.

    An IPv6 host is in brackets, `[::1]:6174`; the result has no brackets.

    Raises:
      ConfigError: the endpoint does not have this form.
    """
    host, colon, port = endpoint.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    is_odd = not plain or any(c.isspace() or c in "/;,@" for c in plain)
    if not colon or is_odd or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{endpoint!r} is not an endpoint; expected host:port, such as 127.0.0.1:6174"
        )
    return host.strip("[]"), int(port)


LOOPBACK = "127.0.0.1"
WILDCARD_ADDRESSES = ("0.0.0.0", "::", "[::]", "*")


def parse_endpoints(endpoints: str | Sequence[str], role: str = "pserver") -> tuple[str, ...]:
    """Check the endpoints of a role, and return them as a tuple.

    Args:
      endpoints: a sequence of `host:port`, or one string with commas.
      role: the role that listens at the endpoints, for errors.

    Raises:
      ConfigError: there are no endpoints, two are equal, or one is not host:port or has a wildcard
        address.
    """
    if not isinstance(endpoints, (str, Sequence)):
        raise ConfigError(
            f"{role}s is {endpoints!r}; expected endpoints as a string, such as "
            "'127.0.0.1:6174,127.0.0.1:6175', or as a list"
        )
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    parsed = tuple(str(part).strip() for part in parts)
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
            "a different endpoint"
        )
    return parsed


def parse_host_slots(text: str, where: str) -> list[tuple[str, int | None]]:
    """Parse a list of hosts, such as `gpu1:2,gpu2`; the number is the most roles on the host.

    Args:
      text: the list.
      where: name of the user's option or environment variable, for errors.

    Returns:
      For each host, its name and its largest number of roles (slots); None without a number.

    Raises:
      ConfigError: the text after the colon is not a number.
    """
    hosts: list[tuple[str, int | None]] = []
    for item in text.split(","):
        name, colon, slots = item.strip().partition(":")
        if colon and not slots.isdecimal():
            raise ConfigError(
                f"{where} {text} has the number of slots {slots!r}; expected a number, as in "
                "gpu1:2 or slots=2"
            )
        hosts.append((name, int(slots) if colon else None))
    return hosts


def is_loopback(host: str) -> bool:
    """Return True for localhost and for loopback addresses."""
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def resolve_host(host: str) -> str:
    """Return the first address of a host name, or "" if the name does not resolve."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


class ReservedEndpoints:
    """Loopback endpoints on free ports, which are reserved until `close`.

    To reserve a port, this object binds a socket that does not listen: the system then assigns the
    port to no other process. On Linux, a server can still bind the port if both sockets have
    SO_REUSEADDR. ZeroMQ, gRPC and `socket.create_server` set this option. On other systems the
    server could not bind the port, so the ports are released at once.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def choose(self, count: int) -> tuple[str, ...]:
        """Reserve and return new endpoints."""
        sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
        self._sockets += sockets
        for chosen in sockets:
            chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            chosen.bind((LOOPBACK, 0))
        endpoints = tuple(f"{LOOPBACK}:{chosen.getsockname()[1]}" for chosen in sockets)
        if sys.platform != "linux":
            self.close()
        return endpoints

    def close(self) -> None:
        """Release the ports."""
        for chosen in self._sockets:
            chosen.close()
        self._sockets.clear()
