"""Connection of the trainers of an nccl2 job: `connect()`, and the effects of failures.

The trainers find each other by `dtrans.run.distributed.rendezvous`. Then `jax.distributed` connects
them, with trainer 0's endpoint as coordinator.

Failures, and their effects on the other trainers:

    a trainer does not come     `connect` raises DeadlineError, which names it
    a trainer raises            its process ends at once, without JAX's barrier at exit; the others
                                raise PeerError with its error (`dtrans.run.distributed.watch`)
    a trainer is killed         the others raise PeerError in less than a second; `dtrans launch`
                                names the trainer that was killed
    a trainer stops, or its     the others raise PeerError after `patience` seconds of silence
    host is lost
    a trainer takes fewer       the others raise PeerError when it has ended
    steps
    a trainer is slow           no effect. For a new batch shape, and at the end of the job, all
                                wait for it up to the deadline

If trainers may not bind addresses that other hosts reach, only JAX's heartbeats notice a failure.
They end processes with SIGABRT and lines of C++ log, later than `patience` (`heartbeat_timeout`).
Trainer 0 is JAX's coordinator. When it is killed, JAX may end the others before they raise an
error.

With `on_trainer_loss="drop"` the survivors continue: see `dtrans.run.distributed.elastic`.
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
from dtrans.run.distributed.schedulers import names_role
from dtrans.run.net.net_options import allows_remote, choose_encryption
from dtrans.run.net.sockets import DEADLINE, PATIENCE


MTLS = "JAX_MTLS_CERT_FILE"  # JAX reads it, and JAX_MTLS_KEY_FILE and others
# seconds by which JAX's patience exceeds the job's: JAX ends processes with SIGABRT, and names none
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
    """Connect the trainers of an nccl2 job, before JAX creates devices.

    The environment names the role of this process, as `dtrans launch --mode nccl2` sets it (see
    `Role`). Without these variables, JAX detects the processes of Slurm, Open MPI, Kubernetes or
    TPU. Set DTRANS_PSERVERS=0 to derive endpoints from the variables of a scheduler instead.

    Trainer 0's endpoint becomes the coordinator of `jax.distributed`. A second call can only set
    `allow_remote`.

    Args:
      role: the role of this process; by default from the environment.
      deadline: seconds to wait for the other trainers: at `connect`, for a new batch shape, and at
        the end of the job.
      patience: seconds without a message from another process after which it counts as dead. It is
        at most the deadline. A process that stops for a shorter time ends no job.
      allow_remote: True to allow endpoints on other hosts, and connections between pipeline stages
        on several hosts. All processes then need the same DTRANS_TOKEN. The default is True if
        DTRANS_ALLOW_REMOTE is 1. JAX's own connections use no token and are not encrypted: use it
        only on a trusted network (docs/keys.md).
      transport_encryption: "auto" encrypts dtrans's connections to other hosts, "required" all of
        its connections, "disabled" none. All processes must have the same. The default is
        DTRANS_TRANSPORT_ENCRYPTION, or "auto".
      on_trainer_loss: "abort" ends all trainers when one ends early. With "drop",
        `plan.on_cluster()` continues with the survivors (`dtrans.run.distributed.elastic`). The
        default is DTRANS_ON_TRAINER_LOSS, or "abort".

    Returns:
      The membership: the id of this trainer, and the trainers and options of the job.

    Raises:
      ConfigError: JAX was used already, the role is not known, or the endpoint cannot be bound.
      DeadlineError: trainers did not come in time; the message names them.
      PeerError: another trainer has different endpoints.

    Example (in each process that `dtrans launch --mode nccl2` starts):

        dtrans.connect()
        plan = dtrans.nccl2(step, init, trainers=dtrans.Role.from_env().trainers)
        job = plan.on_cluster()
    """
    for name, seconds in (("deadline", deadline), ("patience", patience)):
        check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
    patience, allow_remote = min(patience, deadline), allows_remote(allow_remote)
    encryption = choose_encryption(transport_encryption)
    loss = os.environ.get(LOSS, "abort") if on_trainer_loss is None else on_trainer_loss
    check_one_of("on_trainer_loss", loss, ("abort", "drop"))
    if role is None and names_role(os.environ):
        role = Role.from_env()
    if role is not None and not role.trainer_endpoints:
        raise ConfigError(
            f"this is {role.name} of a job with pservers; dtrans.connect() is for mode='nccl2'"
        )
    member = known()
    if member is None:
        if jax.distributed.is_initialized():
            # too late to configure JAX for it
            if loss == "drop":
                raise ConfigError(
                    "on_trainer_loss='drop' needs dtrans.connect() to connect the trainers; leave "
                    "out jax.distributed.initialize()"
                )
        else:
            _connect(role, deadline, patience, allow_remote, encryption, loss)
            atexit.register(_leave)
        endpoints = role.trainer_endpoints if role else ()
        bind_gloo(endpoints, deadline)
        everyone = tuple(range(jax.process_count()))
        member = Membership(jax.process_index(), everyone, endpoints, deadline, loss, allow_remote)
        member = join(dataclasses.replace(member, patience=patience, encryption=encryption))
        member = join(dataclasses.replace(member, run=_share_run_name(member)))
        watch.start(member)
        if loss == "drop":
            with elastic.all_or_none():  # JAX notices losses after the first block
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
    """Return the job that this process is connected to, by `connect` or `jax.distributed`.

    Raises:
      ConfigError: this process is not connected.
    """
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
            f"cannot be {role.name} of {role.trainers} ({','.join(role.trainer_endpoints)}); pass "
            "the role that it is connected as"
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
            f"{MTLS} is set, and jax {jax.__version__} has no mTLS: its coordinator would admit "
            f"all who reach it; take a newer jax (0.12.0.1 has it), or leave {MTLS} out"
        )
    if backends_started():
        raise ConfigError(
            "JAX was used already, and cannot connect its devices any more: call dtrans.connect() "
            "before anything that creates an array or asks for devices, jax.random.key for instance"
        )
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # the service handles SIGTERM as a request to save: such a trainer would not end
        config.update("jax_enable_preemption_service", False)
    if config.jax_cpu_collectives_implementation in (None, "none"):
        raise ConfigError("jax_cpu_collectives_implementation is 'none': set it to 'gloo' or 'mpi'")
    seconds = math.ceil(deadline)
    if loss == "drop":
        elastic.prepare(seconds)
    options: dict[str, Any] = {
        "initialization_timeout": seconds,
        "heartbeat_timeout_seconds": heartbeat_timeout(patience, loss),
        "shutdown_timeout_seconds": seconds,
    }
    # by default JAX's coordinator binds every address of this machine
    binds = "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ
    if role is None:
        try:
            if binds and (address := bind_address(detected_coordinator(seconds))):
                options["coordinator_bind_address"] = address
            jax.distributed.initialize(**options)
        except ValueError as e:
            raise ConfigError(
                "nothing says which trainer this process is: start it with `dtrans launch --mode "
                "nccl2`, set DTRANS_ROLE and the other variables of `dtrans.Role`, or start it "
                f"under Slurm, Open MPI or Kubernetes (JAX says: {e})"
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

    A process sends a heartbeat twice within the timeout. The last one may come half of the timeout
    before the process falls silent. A process ends itself if a heartbeat gets no answer for half of
    the timeout. That half is longer than `patience`, so that the job itself names the silent
    process first.

    With "drop", these heartbeats are the only notice of a loss. The timeout is `patience`, and a
    pause of half of it may count as a loss.

    Args:
      patience: seconds without a message from another process after which it counts as dead.
      loss: `on_trainer_loss`: "abort" or "drop".

    Example:
      >>> from dtrans.run.distributed.connect import heartbeat_timeout
      >>> heartbeat_timeout(30.0, "abort"), heartbeat_timeout(30.0, "drop")
      (80, 30)
    """
    return math.ceil(patience) if loss == "drop" else BEATS * (math.ceil(patience) + AFTER)


def bind_address(coordinator: str) -> str:
    """Return the one address that the coordinator of a scheduler's job should bind.

    Args:
      coordinator: the address that JAX detected, `host:port`.

    Returns:
      The address; empty if it is not this host's. It is also empty if the name resolves to
      loopback, as on Debian: no other host could reach it.

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
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:  # it belongs to another host, or this host is behind NAT
        return ""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _share_run_name(member: Membership) -> str:
    """Return trainer 0's name of this run, by a first reduction over all trainers.

    The first reduction opens Gloo's connections, and fails if a trainer joins more than 30 seconds
    late. Here all trainers are known to be ready. Later reductions wait as long as a trainer lives.
    """
    name = np.frombuffer(new_run().encode(), np.uint8).astype(np.int32)
    one = np.ones((1,), np.int32)
    (found,) = all_reduce_sum(np.concatenate([one, name if member.trainer_id == 0 else 0 * name]))
    assert found[0] == member.trainers, found
    return bytes(found[1:].astype(np.uint8)).decode()


def _leave() -> None:
    """Leave the job when this process exits; a trainer that failed exits at once.

    JAX has a barrier at exit. A failed trainer would wait there for the others, which wait for its
    gradients.
    """
    member = known()
    drops = member is not None and member.on_trainer_loss == "drop"
    if getattr(sys, "last_value", None) is not None:
        if drops:
            jax.distributed.shutdown()  # the others notice it without waiting for a heartbeat
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
    if drops and member is not None:
        elastic.leave(member.trainer_id, member.deadline)
