"""Choice of the address that Gloo binds. Gloo runs JAX's collectives on CPUs.

Gloo binds one address and sends it to the other processes. By default it resolves the host's own
name. On Debian the result is 127.0.1.1, which other hosts cannot reach, and all processes end with
SIGABRT. dtrans chooses the address instead:

    endpoints are known             the host of this process's endpoint (`reached_here`)
    all processes are on one host   loopback
    otherwise                       the source address of messages to JAX's coordinator

On the coordinator's host, the source address may be loopback. Then dtrans chooses the address to
which another host resolves the coordinator's name.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dtrans._jax import backends_started, coordinator, job_size, let_gloo_bind
from dtrans.endpoints import is_loopback, resolve_host, split_endpoint
from dtrans.errors import ConfigError
from dtrans.run.distributed.address import reached_here, route_to_coordinator, this_host
from dtrans.run.distributed.board import all_gather_text
from dtrans.run.distributed.membership import Membership


MISSED = "connect"
HOSTS = "/etc/hosts"


def bind_gloo(endpoints: Sequence[str], deadline: float) -> None:
    """Make Gloo bind an address that the other processes can reach.

    Call it before JAX creates devices.

    Args:
      endpoints: endpoints of the trainers; empty if JAX detected the processes.
      deadline: seconds to wait for another process.

    Raises:
      ConfigError: trainers are on several hosts, and no reachable address is known.
      DeadlineError: another process did not write its host to JAX's coordinator.
    """
    config: Any = jax.config
    me, count = job_size()
    if count == 1 or config.jax_cpu_collectives_implementation != "gloo":
        return
    if endpoints:
        found = resolve_host(split_endpoint(reached_here(endpoints[me], endpoints))[0])
        spread = not is_loopback(found)
    else:
        members = Membership(me, tuple(range(count)), deadline=deadline)
        hosts = all_gather_text(members, "gloo/hosts", this_host(), MISSED)
        resolved = resolve_host(split_endpoint(coordinator())[0])
        addresses = all_gather_text(members, "gloo/coordinator", resolved, MISSED)
        spread = len({*hosts.values()}) > 1
        found = "127.0.0.1"
        if spread:
            source = route_to_coordinator(members, coordinator())
            found = reachable(me, source, hosts, addresses)
    started = backends_started()
    if found and not started and let_gloo_bind(found):
        return
    # dtrans could not set the address, so Gloo will bind the address of this host's name
    if spread and (not started or jax.default_backend() == "cpu"):
        check_host_name(me)


def reachable(me: int, source: str, hosts: Mapping[int, str], addresses: Mapping[int, str]) -> str:
    """Return an address at which other hosts reach this host; empty if none is known.

    Usually this is the source address of messages to JAX's coordinator. On the coordinator's own
    host that address is loopback. Then the function takes the address that another host knows.

    Args:
      me: the id of this trainer.
      source: the source address of this host's messages to JAX's coordinator.
      hosts: the host of each trainer (`this_host`).
      addresses: for each trainer, the address to which it resolves the name of the coordinator's
        host.

    Example:
      >>> from dtrans.run.distributed.gloo import reachable
      >>> hosts = {0: "node1", 1: "node2"}
      >>> reachable(1, "10.0.0.2", hosts, {0: "127.0.1.1", 1: "10.0.0.1"})
      '10.0.0.2'
      >>> reachable(0, "127.0.1.1", hosts, {0: "127.0.1.1", 1: "10.0.0.1"})
      '10.0.0.1'
    """
    if not is_loopback(source):
        return source
    # a loopback source means that the coordinator is on this host, so both have the same address
    for k in sorted(hosts):
        if hosts[k] != hosts[me] and addresses[k] and not is_loopback(addresses[k]):
            return addresses[k]
    return ""


def check_host_name(me: int) -> None:
    """Raise ConfigError if other hosts cannot reach this host by the address of its own name.

    This is needed only if dtrans could not choose Gloo's address. Gloo then binds the address to
    which the host's name resolves, and loopback would make all processes end with SIGABRT.
    """
    name = socket.gethostname()
    address = resolve_host(name)
    if address and not is_loopback(address):
        return
    raise ConfigError(
        f"trainer {me} cannot be reached from other hosts: Gloo, which runs collectives on CPUs, "
        f"binds the address of the host's name, and {name} resolves to {address or 'nothing'}. "
        f"Either write the host's real address beside {name} in its {HOSTS}, or call "
        "dtrans.connect() before JAX is used, with the hosts' addresses in "
        "DTRANS_TRAINER_ENDPOINTS"
    )
