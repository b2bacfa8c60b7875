"""The address at which the other processes reach this one's Gloo, which carries out collectives on
CPUs.

Gloo binds one address and tells it to the others. Left alone it takes the one that the host's own
name resolves to. On Debian that is 127.0.1.1, which no other host can reach: all processes end with
SIGABRT. dtrans names the address:

    endpoints are known      the host of this process's own, as `reached_here` says
    all are on one host      loopback
    otherwise                the address from which this host reaches the coordinator; on the coordinator's own host,
                             where that may be loopback, the address by which another host knows it
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
from dtrans.run.distributed.board import told
from dtrans.run.distributed.membership import Membership


MISSED = "connect"
HOSTS = "/etc/hosts"


def bind_gloo(endpoints: Sequence[str], deadline: float) -> None:
    """Let Gloo bind an address that the other processes reach. Call it before this process makes
    its devices.

    Raises:
      ConfigError: trainers are on several hosts, and there is no such address.
      DeadlineError: another process does not say where it is.
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
        hosts = told(members, "gloo/hosts", this_host(), MISSED)
        known = told(
            members, "gloo/coordinator", resolve_host(split_endpoint(coordinator())[0]), MISSED
        )
        spread = len({*hosts.values()}) > 1
        found = (
            reachable(me, route_to_coordinator(members, coordinator()), hosts, known)
            if spread
            else "127.0.0.1"
        )
    started = backends_started()
    if found and not started and let_gloo_bind(found):
        return
    # Gloo goes by the name of this host, as JAX leaves it
    if spread and (not started or jax.default_backend() == "cpu"):
        check_own_name(me)


def reachable(me: int, own: str, hosts: Mapping[int, str], known: Mapping[int, str]) -> str:
    """Return the address of this host that other hosts reach; empty where nobody knows one.

    Args:
      own: the address from which this host reaches the coordinator.
      hosts: the host of each trainer (`this_host`).
      known: the address of the coordinator, as each trainer resolves it.

    Example:
      >>> from dtrans.run.distributed.gloo import reachable
      >>> hosts = {0: "node1", 1: "node2"}
      >>> reachable(1, "10.0.0.2", hosts, {0: "127.0.1.1", 1: "10.0.0.1"})
      '10.0.0.2'
      >>> reachable(0, "127.0.1.1", hosts, {0: "127.0.1.1", 1: "10.0.0.1"})
      '10.0.0.1'
    """
    if not is_loopback(own):
        return own
    others = [known[k] for k in sorted(hosts) if hosts[k] != hosts[me]]
    return next((x for x in others if x and not is_loopback(x)), "")


def check_own_name(me: int) -> None:
    """Raise ConfigError where this host's own name, by which Gloo is reached, resolves to loopback
    or to nothing."""
    name = socket.gethostname()
    address = resolve_host(name)
    if address and not is_loopback(address):
        return
    raise ConfigError(
        f"trainer {me} cannot be reached from other hosts: Gloo, which carries out collectives on "
        "CPUs, binds what "
        f"the name of the host resolves to, and {name} resolves to {address or 'nothing'} there; "
        "write the host's own "
        f"address beside {name} in its {HOSTS}, or call dtrans.connect() before JAX is used, with "
        "endpoints "
        "(DTRANS_TRAINER_ENDPOINTS) that are addresses of the hosts"
    )
