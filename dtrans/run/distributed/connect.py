"""How the trainers of an nccl2 job are connected: `connect()`, and what happens when a process
ends.

The trainers meet (`dtrans.run.distributed.rendezvous`), and `jax.distributed` connects them, with
trainer 0's endpoint as coordinator.

What fails, and what the others see:

    a trainer does not come     DeadlineError at `connect`, which names it
    a trainer raises            its process ends at once, without JAX's waiting for all at exit; the others get a
                                PeerError, or end with one, with what it failed of
                                (`dtrans.run.distributed.watch`)
    a trainer is killed         the same, in less than a second; `dtrans launch` names the trainer that was killed
    a trainer is stopped, or    the same, when its process has been silent for longer than `patience`
    its host is gone
    a trainer makes fewer       those that make more get a PeerError, or end with one, when it has come to its end
    steps than others
    a trainer is too slow       nothing, while it is alive; where parts of the batch get another shape, and at the end
                                of the job, all wait for it, up to the deadline

Where trainers may not bind addresses that other hosts reach, JAX's own heartbeats are all there is:
later than `patience` it ends processes with SIGABRT, and some lines of C++ log
(`heartbeat_timeout`). Trainer 0 is JAX's
coordinator: when it is killed, JAX may end the others before they have said anything.

With `on_trainer_loss="drop"` those left go on instead: see `dtrans.run.distributed.elastic`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import socket
import sys
from typing import Any

import jax
import numpy as np

from dtrans._jax import backends_started, detected_coordinator, has_coordinator_mtls
from dtrans.checkpoint.runs import new_run
from dtrans.checks import check_number, check_one_of
from dtrans.endpoints import is_loopback, resolve_host, split_endpoint
from dtrans.errors import ConfigError
from dtrans.run.distributed import elastic, watch
from dtrans.run.distributed.address import reached_here
from dtrans.run.distributed.gloo import bind_gloo
from dtrans.run.distributed.membership import Membership, current, join, known
from dtrans.run.distributed.multihost import all_reduce_sum
from dtrans.run.distributed.rendezvous import rendezvous
from dtrans.run.distributed.role import LOSS, Role
from dtrans.run.distributed.schedulers import is_told
from dtrans.run.net.net_options import allows_remote, choose_encryption
from dtrans.run.net.sockets import DEADLINE, PATIENCE


MTLS = "JAX_MTLS_CERT_FILE"  # JAX reads it, and its companions
# seconds that JAX has more patience than the job: it ends processes with SIGABRT, and names nobody
AFTER = 10
BEATS = 2  # heartbeats that a process sends within JAX's timeout


def connect(
    role: Role | None = None,
    *,
    deadline: float = DEADLINE,
    patience: float = PATIENCE,
    allow_remote: bool | None = None,
    transport_encryption: str | None = None,
    on_trainer_loss: str | None = None,
) -> Membership:
    """Connect the trainers of an nccl2 job. Call it before anything that makes JAX look for its
    devices.

    Who this process is comes from the environment, as `dtrans launch --mode nccl2` sets it (see
    `Role`); without that, from JAX's own detection: Slurm, Open MPI, Kubernetes, TPU. Set
    DTRANS_PSERVERS=0 to take endpoints from variables of the scheduler instead. Trainer 0's
    endpoint becomes the coordinator of `jax.distributed`. A second call changes nothing, but that
    it may allow other hosts.

    Args:
      role: who this process is; from the environment by default.
      deadline: seconds to wait for the other trainers: here, when the parts of the batch get
        another shape, and at the end of the job.
      patience: seconds without a sign of another process, or of the network to it, after which it
        is taken for dead: 30 by default, and the deadline if that is less. A process that is
        stopped for a shorter time goes on.
      allow_remote: let endpoints be on other machines, and stages of a pipeline that a scheduler
        has put on several hosts send each other values. By default True where DTRANS_ALLOW_REMOTE
        is 1, else False. It takes DTRANS_TOKEN too, the same secret in all processes. The
        connections of JAX itself know no token and are not encrypted: only on a network where
        everybody may train with everybody (docs/keys.md).
      transport_encryption: "auto" encrypts dtrans's own connections to other hosts, "required" also
        those on loopback, "disabled" none; the same in all processes. By default
        DTRANS_TRANSPORT_ENCRYPTION, else "auto".
      on_trainer_loss: "abort" ends all trainers when one ends before its time; "drop" lets
        `plan.on_cluster()` go on with those left (see `dtrans.run.distributed.elastic`). From the
        variable DTRANS_ON_TRAINER_LOSS by default, or "abort".

    Raises:
      ConfigError: JAX was used already, nothing says who this process is, or its endpoint cannot be
        bound.
      DeadlineError: trainers did not come in time; the message names them.
      PeerError: another trainer was told other endpoints.
    """
    for name, seconds in (("deadline", deadline), ("patience", patience)):
        check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
    patience, allow_remote = min(patience, deadline), allows_remote(allow_remote)
    encryption = choose_encryption(transport_encryption)
    loss = os.environ.get(LOSS, "abort") if on_trainer_loss is None else on_trainer_loss
    check_one_of("on_trainer_loss", loss, ("abort", "drop"))
    if role is None and is_told(os.environ):
        role = Role.from_env()
    if role is not None and not role.trainer_endpoints:
        raise ConfigError(
            f"this is {role.name} of a job with pservers; dtrans.connect() is for mode='nccl2'"
        )
    member = known()
    if member is None:
        if jax.distributed.is_initialized():  # by the user
            if loss == "drop":
                raise ConfigError(
                    "on_trainer_loss='drop': dtrans.connect() must connect the trainers, not the "
                    "user"
                )
        else:
            _connect(role, deadline, patience, allow_remote, encryption, loss)
            atexit.register(_leave)
        endpoints = role.trainer_endpoints if role else ()
        bind_gloo(endpoints, deadline)
        everyone = tuple(range(jax.process_count()))
        member = Membership(jax.process_index(), everyone, endpoints, deadline, loss, allow_remote)
        member = join(dataclasses.replace(member, patience=patience, encryption=encryption))
        member = join(dataclasses.replace(member, run=_first_word(member)))
        watch.start(member)
        if loss == "drop":
            with elastic.all_or_none():  # from now on it is known who ends
                pass
    if allow_remote and not member.allow_remote:
        member = join(dataclasses.replace(member, allow_remote=True))
    if role is not None:
        _check_same(role, member)
    if on_trainer_loss not in (None, member.on_trainer_loss):
        raise ConfigError(
            f"this process is connected with on_trainer_loss={member.on_trainer_loss!r}, not "
            f"{on_trainer_loss!r}"
        )
    if transport_encryption not in (None, member.encryption):
        raise ConfigError(
            f"this process is connected with transport_encryption={member.encryption!r}, not "
            f"{transport_encryption!r}"
        )
    return member


def connected() -> Membership:
    """The job that this process is connected to, by `connect` or by the user. Raises ConfigError
    when there is none."""
    return connect() if known() is None and jax.distributed.is_initialized() else current()


def _check_same(role: Role, member: Membership) -> None:
    found = (role.trainer_id, role.trainers)
    if found != (member.trainer_id, jax.process_count()) or member.endpoints not in (
        (),
        role.trainer_endpoints,
    ):
        listed = f" ({','.join(member.endpoints)})" if member.endpoints else ""
        raise ConfigError(
            f"this process is connected as {member.name} of {jax.process_count()}{listed}, and "
            f"cannot be {role.name} "
            f"of {role.trainers} ({','.join(role.trainer_endpoints)})"
        )


def _connect(
    role: Role | None,
    deadline: float,
    patience: float,
    allow_remote: bool,
    encryption: str,
    loss: str,
) -> None:
    config: Any = jax.config
    if os.environ.get(MTLS) and not has_coordinator_mtls():
        raise ConfigError(
            f"{MTLS} is set, and jax {jax.__version__} has no mTLS: its coordinator would stay "
            "open to all who reach "
            f"it; take a newer jax (0.12.0.1 has it), or leave {MTLS} out"
        )
    if backends_started():
        raise ConfigError(
            "JAX was used already, and its devices cannot be connected any more: call "
            "dtrans.connect() before anything "
            "that makes an array or asks for devices, jax.random.key for instance"
        )
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # it takes SIGTERM for itself, and a trainer that is asked to end would go on
        config.update("jax_enable_preemption_service", False)
    if config.jax_cpu_collectives_implementation in (None, "none"):
        raise ConfigError(
            "jax_cpu_collectives_implementation is 'none': trainers need 'gloo', or 'mpi'"
        )
    seconds = math.ceil(deadline)
    if loss == "drop":
        elastic.prepare(seconds)
    options: dict[str, Any] = {
        "initialization_timeout": seconds,
        "heartbeat_timeout_seconds": heartbeat_timeout(patience, loss),
        "shutdown_timeout_seconds": seconds,
    }
    # JAX's default is every address of this machine
    binds = "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ
    if role is None:
        try:
            if binds and (address := bind_address(detected_coordinator(seconds))):
                options["coordinator_bind_address"] = address
            jax.distributed.initialize(**options)
        except ValueError as e:
            raise ConfigError(
                "nothing says which trainer this process is: start it with `dtrans launch --mode "
                "nccl2`, set "
                "DTRANS_ROLE and its companions, or start it under Slurm, Open MPI or Kubernetes "
                f"(JAX says: {e})"
            ) from e
        return
    rendezvous(
        role.trainer_id,
        role.trainer_endpoints,
        deadline=deadline,
        allow_remote=allow_remote,
        encryption=encryption,
    )
    first = reached_here(role.trainer_endpoints[0], role.trainer_endpoints)
    if binds:
        options["coordinator_bind_address"] = first
    jax.distributed.initialize(
        first, role.trainers, role.trainer_id, cluster_detection_method="deactivate", **options
    )


def heartbeat_timeout(patience: float, loss: str) -> int:
    """Return JAX's heartbeat timeout in seconds.

    JAX's coordinator counts from the last heartbeat, which may have come half of the timeout before
    a process or its network fell silent; and a process ends itself where a heartbeat has no answer
    for half of the timeout. So that half is longer than `patience`, after which the job itself
    names who is silent. With "drop" these heartbeats say who is
    left: the timeout is `patience`, and a pause of half of it may be a loss.

    Args:
      patience: seconds without a sign of another process after which it counts as dead.
      loss: "abort" or "drop", as `on_trainer_loss`.

    Example:
      >>> from dtrans.run.distributed.connect import heartbeat_timeout
      >>> heartbeat_timeout(30.0, "abort"), heartbeat_timeout(30.0, "drop")
      (80, 30)
    """
    return math.ceil(patience) if loss == "drop" else BEATS * (math.ceil(patience) + AFTER)


def bind_address(coordinator: str) -> str:
    """Return the one address that the coordinator of a scheduler's job binds; empty where that is
    not known.

    Args:
      coordinator: where JAX puts it, `host:port`. On its own host the name may be loopback, as on
        Debian, where no other host could reach it.

    Example:
      >>> from dtrans.run.distributed.connect import bind_address
      >>> bind_address("127.0.0.1:6174"), bind_address("192.0.2.1:6174")
      ('127.0.0.1:6174', '')
    """
    if not coordinator:
        return ""
    host, port = split_endpoint(coordinator)
    address = resolve_host(host)
    if not address or (is_loopback(address) and not is_loopback(host)):
        return ""
    try:
        socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ).close()
    except OSError:  # another host's, or behind a translation of addresses
        return ""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _first_word(member: Membership) -> str:
    """Reduce something while all trainers are known to be here; gives the name that trainer 0 has
    for this run.

    The first reduction opens the connections, and Gloo gives the slowest trainer 30 seconds to join
    it; later ones wait for as long as it is alive.
    """
    name = np.frombuffer(new_run().encode(), np.uint8).astype(np.int32)
    one = np.ones((1,), np.int32)
    (found,) = all_reduce_sum(np.concatenate([one, name if member.trainer_id == 0 else 0 * name]))
    assert found[0] == member.trainers, found
    return bytes(found[1:].astype(np.uint8)).decode()


def _leave() -> None:
    """At exit: a trainer that failed goes at once.

    JAX would wait here until all trainers have come to their end, while the others wait for this
    one's gradients.
    """
    member = known()
    drops = member is not None and member.on_trainer_loss == "drop"
    if getattr(sys, "last_value", None) is not None:
        if drops:
            jax.distributed.shutdown()  # so that the others need not wait for a heartbeat
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
    if drops and member is not None:
        elastic.leave(member.trainer_id, member.deadline)
