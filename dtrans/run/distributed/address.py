"""Addresses of dtrans's own connections between trainers; JAX's connections are separate.

Each process binds one address:

    endpoints are known             the host of its endpoint (`reached_here`)
    all processes are on one host   loopback
    otherwise                       the source address of messages to JAX's coordinator

On the coordinator's host, the source address may be loopback. Then a process binds all addresses of
its host, and other processes connect to the coordinator's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtrans.endpoints import is_loopback, resolve_host, split_endpoint
from dtrans.errors import ConfigError
from dtrans.run.distributed.membership import Membership
from dtrans.run.net.zmq_transport import ZmqListener, ZmqTransport


# Linux draws this id at each boot. The id distinguishes hosts with the same name.
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Address:
    """Address of a process, without a port.

    Attributes:
      bind: the host that the process binds; "*" for all addresses of its machine.
      reach: the host that other processes connect to.
    """

    bind: str
    reach: str

    def open_door(
        self, transport: ZmqTransport, users: Mapping[str, str], *, frame: int, messages: int
    ) -> ZmqListener:
        """Listen at a free port. Other processes connect to the `endpoint` of the result.

        The arguments are the same as those of `dtrans.protocol.transport.Transport.bind`.
        """
        return transport.bind(
            f"{_in_endpoint(self.bind)}:*",
            users,
            frame=frame,
            messages=messages,
            reach=f"{_in_endpoint(self.reach)}:*",
        )


def _in_endpoint(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def this_host() -> str:
    """Return a string that identifies this host."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text().strip()
    return f"{socket.gethostname()} {boot}".strip()


def may_bind(cluster: Membership, hosts: Sequence[str]) -> bool:
    """Return True if the trainers of a job may open connections to each other.

    One of three conditions is enough: trainers have endpoints, all are on one host, or
    `allow_remote` is set.

    Args:
      cluster: the job.
      hosts: the result of `this_host` on each trainer.
    """
    return bool(cluster.endpoints) or len(set(hosts)) == 1 or cluster.allow_remote


def address_of(cluster: Membership, hosts: Sequence[str], coordinator: str) -> Address:
    """Return the address for this process's connections to other trainers.

    Args:
      cluster: the job.
      hosts: the result of `this_host` on each trainer.
      coordinator: the address of JAX's coordinator, `host:port`.

    Raises:
      ConfigError: trainers are on several hosts without `allow_remote`, or without a token; or this
        host has no route to the coordinator.
    """
    found = _address_of(cluster, hosts, coordinator)
    cluster.keys.check(f"{cluster.name} is at {found.reach}", found.reach)
    return found


def _address_of(cluster: Membership, hosts: Sequence[str], coordinator: str) -> Address:
    if cluster.endpoints:
        host, _ = split_endpoint(
            reached_here(cluster.endpoints[cluster.trainer_id], cluster.endpoints)
        )
        return Address(host, host)
    if len(set(hosts)) == 1:
        return Address("127.0.0.1", "127.0.0.1")
    if not may_bind(cluster, hosts):
        raise ConfigError(
            f"the {len(hosts)} trainers are on {len(set(hosts))} hosts, so they must bind "
            "addresses that other hosts can reach; to allow this, call "
            "dtrans.connect(allow_remote=True) or set DTRANS_ALLOW_REMOTE=1"
        )
    source = route_to_coordinator(cluster, coordinator)
    if is_loopback(source):
        return Address("*", split_endpoint(coordinator)[0])
    return Address(source, source)


def reached_here(endpoint: str, endpoints: Sequence[str]) -> str:
    """Return an endpoint with a host that processes can bind and connect to.

    Debian resolves a host's own name to 127.0.1.1, which other hosts cannot reach. If a job has
    endpoints on other hosts, this function returns the source address of messages to those hosts
    instead of the name.

    Args:
      endpoint: one of `endpoints`.
      endpoints: endpoints of all trainers, in their order.

    Raises:
      ConfigError: other endpoints are on other hosts, but this endpoint is loopback, or this host
        has no route to them.

    Example:
      >>> from dtrans.run.distributed.address import reached_here
      >>> reached_here("127.0.0.1:6174", ("127.0.0.1:6174", "127.0.0.1:6175"))
      '127.0.0.1:6174'
    """
    host, port = split_endpoint(endpoint)
    address = resolve_host(host)
    if not is_loopback(address):
        return endpoint
    elsewhere = [e for e in endpoints if not is_loopback(resolve_host(split_endpoint(e)[0]))]
    if not elsewhere:
        return endpoint
    if not is_loopback(host):
        for other in elsewhere:
            with contextlib.suppress(OSError):  # try the next endpoint if there is no route
                source = _in_endpoint(route_to(*split_endpoint(other)))
                return f"{source}:{port}"
    fault = "which is loopback"
    if host != address:
        fault = f"whose name {host} resolves to {address} on this host"
    raise ConfigError(
        f"trainer {endpoints.index(endpoint)} is at {endpoint}, {fault}. The trainer at "
        f"{elsewhere[0]} is on another host and cannot reach it; set DTRANS_TRAINER_ENDPOINTS, in "
        "all processes, to addresses that other hosts can reach"
    )


def route_to_coordinator(cluster: Membership, coordinator: str) -> str:
    """Return the source address of this host's messages to the coordinator.

    Raises:
      ConfigError: this host has no route to the coordinator.
    """
    try:
        return route_to(*split_endpoint(coordinator))
    except OSError as e:
        raise ConfigError(
            f"{cluster.name} has no network route to JAX's coordinator at {coordinator}: {e}"
        ) from e


def route_to(host: str, port: int) -> str:
    """Return the source address of this host's messages to another host.

    Raises:
      OSError: this host has no route to the other host.
    """
    # connecting a UDP socket selects the route without sending a packet
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(where)
        return str(s.getsockname()[0])
