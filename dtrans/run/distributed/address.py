"""Where processes of a job reach each other, beside what JAX connects.

    endpoints are known      each process binds the host of its endpoint (`reached_here`)
    all are on one host      loopback
    a scheduler started them the address from which a process reaches the coordinator, which all of
    them can reach

A process that is on the coordinator's host would reach it by loopback, or by a name for it; it
binds all addresses of its host, and the others reach it by the coordinator's name, as they reached
the coordinator.
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
from dtrans.run.net.zmq_transport import ZmqDoor, ZmqTransport


BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux: two hosts of one name differ in it


@dataclasses.dataclass(frozen=True)
class Address:
    """An address of a process, without a port.

    Attributes:
      bind: the host that it binds; "*" for all addresses of its machine.
      reach: the host by which the others reach it.
    """

    bind: str
    reach: str

    def open_door(
        self, transport: ZmqTransport, users: Mapping[str, str], *, frame: int, messages: int
    ) -> ZmqDoor:
        """Open a door at a free port; its `endpoint` is where the others connect to it.

        Arguments are those of `dtrans.protocol.transport.Transport.bind`.
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
    """What tells this host from others."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text().strip()
    return f"{socket.gethostname()} {boot}".strip()


def may_bind(cluster: Membership, hosts: Sequence[str]) -> bool:
    """Return True if processes have endpoints, are on one host, or may bind addresses that other
    hosts reach."""
    return bool(cluster.endpoints) or len(set(hosts)) == 1 or cluster.allow_remote


def address_of(cluster: Membership, hosts: Sequence[str], coordinator: str) -> Address:
    """Return where this process is reached.

    Args:
      cluster: the job.
      hosts: `this_host` of each trainer.
      coordinator: the address, with its port, at which `jax.distributed` connected the processes.

    Raises:
      ConfigError: trainers are on several hosts, and nobody said that this is allowed, or nothing
        protects what they send; or this host has no way to the coordinator.
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
            f"the {len(hosts)} trainers are on {len(set(hosts))} hosts: to bind an address that "
            "other hosts reach "
            "needs dtrans.connect(allow_remote=True), or DTRANS_ALLOW_REMOTE=1"
        )
    own = route_to_coordinator(cluster, coordinator)
    return Address("*", split_endpoint(coordinator)[0]) if is_loopback(own) else Address(own, own)


def reached_here(endpoint: str, endpoints: Sequence[str]) -> str:
    """Return an endpoint as a process of this host binds it, or connects to it.

    Debian resolves a host's own name to 127.0.1.1, where other hosts reach nothing. If some
    endpoints are on other hosts, such a name stands for the address from which messages go there.

    Args:
      endpoint: one of `endpoints`.
      endpoints: endpoints of all trainers, in their order.

    Raises:
      ConfigError: the endpoint is loopback for all hosts, or this host finds no way to the others.

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
            with contextlib.suppress(OSError):  # the next one may have a name that is known here
                own = route_to(*split_endpoint(other))
                return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
    how = (
        "which is loopback"
        if host == address
        else f"whose name {host} resolves to {address} on this host"
    )
    raise ConfigError(
        f"trainer {endpoints.index(endpoint)} is at {endpoint}, {how}, and {elsewhere[0]} is on "
        "another host, which "
        "cannot reach it; write an address of this host that the others reach in "
        "DTRANS_TRAINER_ENDPOINTS, everywhere"
    )


def route_to_coordinator(cluster: Membership, coordinator: str) -> str:
    """Return the address of this host from which messages go to the coordinator.

    Raises:
      ConfigError: there is none.
    """
    try:
        return route_to(*split_endpoint(coordinator))
    except OSError as e:
        raise ConfigError(
            f"{cluster.name} finds no way from this host to the coordinator at {coordinator}: {e}"
        ) from e


def route_to(host: str, port: int) -> str:
    """The address of this host from which messages go to another. Nothing is sent. Raises OSError
    if there is none."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(where)
        return str(s.getsockname()[0])
