"""`dtrans.connect()`: connects the trainers of a job without servers; effects of failures.

In such a job (mode "nccl2"), trainers all-reduce their gradients. They first wait for each other
(`dtrans.run.distributed.rendezvous`). Then `jax.distributed` connects them, with trainer 0's
endpoint as coordinator.

Failures of one trainer, and their effects on the other trainers:

    it does not connect         `connect` raises DeadlineError, which names the missing trainer
    it raises an exception      its process ends at once, without JAX's barrier at exit; the others
                                raise PeerError with its error (`dtrans.run.distributed.watch`)
    it is killed                the others raise PeerError in less than a second; `dtrans launch`
                                names the trainer that was killed
    it is stopped (SIGSTOP),    the others raise PeerError after `patience` seconds of silence
    or its host is lost
    it takes fewer steps        the others raise PeerError when it has ended
    it is slow                  no error. For a new batch shape, and at the end of the job, the
                                others wait for it up to the deadline

Without endpoints, JAX itself detects the trainers of a scheduler. If they are on several hosts, and
`allow_remote` is not set, only JAX's heartbeats notice a failure. JAX then ends all processes with
SIGABRT and log lines of C++. This takes longer than `patience` (`heartbeat_timeout`). Trainer 0 is
JAX's coordinator. When it is killed, JAX may end the others before they raise an error.

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
from typing import Any, NamedTuple

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


MTLS = "JAX_MTLS_CERT_FILE"  # if it is set, the user wants mutual TLS for JAX's coordinator
# Seconds from the end of the job's patience until JAX ends a process that gets no answer. dtrans's
# error must come first: it names the lost process, and JAX's SIGABRT does not.
AFTER = 10
BEATS = 2  # number of heartbeats that a process sends within JAX's timeout


def connect(
    role: Role | None = None,
    *,
    deadline: float = DEADLINE,
    patience: float = PATIENCE,
    allow_remote: bool | None = None,
    transport_encryption: str | None = None,
    on_trainer_loss: str | None = None,
) -> Membership:
    """Connect the trainers of a job without parameter servers, before JAX creates devices.

    In such a job (mode "nccl2"), trainers all-reduce their gradients.

    Environment variables name the role of this process (see `Role`). `dtrans launch --mode nccl2`
    sets them. Without these variables, JAX detects the processes of Slurm, Open MPI, Kubernetes or
    TPU. Set DTRANS_PSERVERS=0 to derive endpoints from the variables of a scheduler instead.

    Trainer 0's endpoint becomes the coordinator of `jax.distributed`. A second call can only set
    `allow_remote`.

    Args:
      role: the role of this process; by default from the environment.
      deadline: seconds to wait for the other trainers: at `connect`, for a new batch shape, and at
        the end of the job.
      patience: another process counts as dead if it sends no message for this number of seconds; at
        most the deadline. The job survives shorter pauses of a process.
      allow_remote: True to allow endpoints on other hosts, and connections between pipeline stages
        on several hosts. All processes then need the same DTRANS_TOKEN. The default is True if
        DTRANS_ALLOW_REMOTE is 1. JAX's own connections use no token and are not encrypted, so set
        it only on a trusted network (docs/keys.md).
      transport_encryption: "auto" encrypts dtrans's connections to other hosts, "required" all
        connections of dtrans, "disabled" none. All processes must use the same value. The default
        is DTRANS_TRANSPORT_ENCRYPTION, or "auto".
      on_trainer_loss: "abort" ends all trainers when one ends early. With "drop",
        `plan.on_cluster()` continues with the survivors (`dtrans.run.distributed.elastic`). The
        default is DTRANS_ON_TRAINER_LOSS, or "abort".

    Returns:
      The membership: the id of this trainer, and the trainers and options of the job.

    Raises:
      ConfigError: JAX was used already, the role is not known, or the endpoint cannot be bound.
      DeadlineError: trainers did not connect in time; the message names them.
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
            f"this process is {role.name} of a job with pservers, but dtrans.connect() is for "
            "mode='nccl2'; remove the call"
        )
    member = known()
    if member is None:
        member = _join_job(role, _Options(deadline, patience, allow_remote, encryption, loss))
    if allow_remote and not member.allow_remote:
        member = join(dataclasses.replace(member, allow_remote=True))
    if role is not None:
        _check_same(role, member)
    if on_trainer_loss not in (None, member.on_trainer_loss):
        raise ConfigError(
            f"this process is connected with on_trainer_loss={member.on_trainer_loss!r}, not "
            f"{on_trainer_loss!r}; pass the option in the first call of dtrans.connect"
        )
    if transport_encryption not in (None, member.encryption):
        raise ConfigError(
            f"this process is connected with transport_encryption={member.encryption!r}, not "
            f"{transport_encryption!r}; pass the option in the first call of dtrans.connect"
        )
    return member


def connected() -> Membership:
    """Return this process's trainer id and job options, in a job without parameter servers.

    If the user called `jax.distributed.initialize` but not `dtrans.connect`, this function first
    calls `connect`.

    Raises:
      ConfigError: this process is not connected.
    """
    if known() is None and jax.distributed.is_initialized():
        return connect()
    return current()


class _Options(NamedTuple):
    """Checked arguments of `connect`; `loss` is `on_trainer_loss`."""

    deadline: float
    patience: float
    allow_remote: bool
    encryption: str
    loss: str


def _join_job(role: Role | None, options: _Options) -> Membership:
    """Connect this process to the other trainers, and store and return its membership."""
    deadline, patience, allow_remote, encryption, loss = options
    if not jax.distributed.is_initialized():
        _connect(role, options)
        atexit.register(_leave)
    elif loss == "drop":
        # this option has to be set before jax.distributed.initialize
        raise ConfigError(
            "on_trainer_loss='drop' needs dtrans.connect() to connect the trainers; leave "
            "out jax.distributed.initialize()"
        )
    endpoints = role.trainer_endpoints if role else ()
    bind_gloo(endpoints, deadline)
    everyone = tuple(range(jax.process_count()))
    member = Membership(jax.process_index(), everyone, endpoints, deadline, loss, allow_remote)
    member = join(dataclasses.replace(member, patience=patience, encryption=encryption))
    member = join(dataclasses.replace(member, run=_share_run_name(member)))
    watch.start(member)
    if loss == "drop":
        # JAX notices lost processes only after its first `live_devices` block
        with elastic.all_or_none():
            pass
    return member


def _check_same(role: Role, member: Membership) -> None:
    """Raise ConfigError if this process is already connected, but with another role than `role`.

    A second call of `connect` cannot change the trainer id, the number of trainers or the
    endpoints.
    """
    found = (role.trainer_id, role.trainers)
    if found != (member.trainer_id, jax.process_count()) or member.endpoints not in (
        (),
        role.trainer_endpoints,
    ):
        listed = f" ({','.join(member.endpoints)})" if member.endpoints else ""
        raise ConfigError(
            f"this process is connected as {member.name} of {jax.process_count()}{listed}, and "
            f"cannot be {role.name} of {role.trainers} ({','.join(role.trainer_endpoints)}); pass "
            "the role of the first dtrans.connect, or none"
        )


def _connect(role: Role | None, checked: _Options) -> None:
    """Connect `jax.distributed`; with a known role, wait for all trainers first."""
    config: Any = jax.config
    if os.environ.get(MTLS) and not has_coordinator_mtls():
        raise ConfigError(
            f"{MTLS} is set, and jax {jax.__version__} has no mTLS: its coordinator would accept "
            f"every process that can reach it; use a newer jax (0.12.0.1 has mTLS), or unset {MTLS}"
        )
    if backends_started():
        raise ConfigError(
            "JAX was used already, so its devices can no longer be connected: call "
            "dtrans.connect() before anything that creates an array or lists devices, such as "
            "jax.random.key"
        )
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # JAX's service treats SIGTERM as a request to save, so a trainer would not end
        config.update("jax_enable_preemption_service", False)
    if config.jax_cpu_collectives_implementation in (None, "none"):
        raise ConfigError("jax_cpu_collectives_implementation is 'none': set it to 'gloo' or 'mpi'")
    seconds = math.ceil(checked.deadline)
    if checked.loss == "drop":
        elastic.prepare(seconds)
    options: dict[str, Any] = {
        "initialization_timeout": seconds,
        "heartbeat_timeout_seconds": heartbeat_timeout(checked.patience, checked.loss),
        "shutdown_timeout_seconds": seconds,
    }
    # JAX's coordinator would bind every address of this machine. So set the address to bind here,
    # unless the user has set it.
    sets_bind_address = "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ
    if role is None:
        try:
            if sets_bind_address and (address := bind_address(detected_coordinator(seconds))):
                options["coordinator_bind_address"] = address
            jax.distributed.initialize(**options)
        except ValueError as e:
            raise ConfigError(
                "the environment does not name the trainer of this process: start it with `dtrans "
                "launch --mode nccl2`, set DTRANS_ROLE and the other variables of `dtrans.Role`, "
                f"or start it under Slurm, Open MPI or Kubernetes (JAX's error: {e})"
            ) from e
        return
    rendezvous(
        role.trainer_id,
        role.trainer_endpoints,
        deadline=checked.deadline,
        allow_remote=checked.allow_remote,
        encryption=checked.encryption,
    )
    first = reached_here(role.trainer_endpoints[0], role.trainer_endpoints)
    if sets_bind_address:
        options["coordinator_bind_address"] = first
    jax.distributed.initialize(
        first, role.trainers, role.trainer_id, cluster_detection_method="deactivate", **options
    )


def heartbeat_timeout(patience: float, loss: str) -> int:
    """Return JAX's heartbeat timeout in seconds.

    JAX's processes send two heartbeats per timeout. A process ends itself if a heartbeat gets no
    answer for half of the timeout. With "abort", this half is longer than `patience`, so that
    dtrans's error, which names the silent process, comes first.

    With "drop", only these heartbeats detect a failure, so the timeout is `patience`. A pause of
    half of this time may already count as a failure.

    Args:
      patience: seconds of silence after which another process counts as dead.
      loss: `on_trainer_loss`: "abort" or "drop".

    Example:
      >>> from dtrans.run.distributed.connect import heartbeat_timeout
      >>> heartbeat_timeout(30.0, "abort"), heartbeat_timeout(30.0, "drop")
      (80, 30)
    """
    if loss == "drop":
        return math.ceil(patience)
    return BEATS * (math.ceil(patience) + AFTER)


def bind_address(coordinator: str) -> str:
    """Return the address that JAX's coordinator should bind in a job that a scheduler started.

    By default, JAX's coordinator binds every address of its host. This function finds the one
    address that the other hosts use.

    Args:
      coordinator: the address that JAX detected, `host:port`.

    Returns:
      The address, `host:port`. It is empty if JAX's default must be used: this host cannot bind the
        address, or the host's name resolves to loopback, which other hosts cannot reach.

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
    except OSError:  # the address belongs to another host, or this host is behind NAT
        return ""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _share_run_name(member: Membership) -> str:
    """Return the name of this run: trainer 0 draws it and sends it by a reduction.

    This is the first reduction of the job. It opens Gloo's connections, and fails if a trainer is
    more than 30 seconds late. Now all trainers are ready, so none is late. Later reductions have no
    timeout.
    """
    name = np.frombuffer(new_run().encode(), np.uint8).astype(np.int32)
    one = np.ones((1,), np.int32)
    (found,) = all_reduce_sum(np.concatenate([one, name if member.trainer_id == 0 else 0 * name]))
    assert found[0] == member.trainers, found
    return bytes(found[1:].astype(np.uint8)).decode()


def _leave() -> None:
    """Disconnect from the job when this process exits; after an exception, exit without waiting.

    JAX waits for all processes at exit. A failed trainer would wait there for the other trainers,
    while these wait for its gradients.
    """
    member = known()
    drops = member is not None and member.on_trainer_loss == "drop"
    if getattr(sys, "last_value", None) is not None:
        if drops:
            # the other trainers then notice the failure at once, not after a timeout
            jax.distributed.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
    if drops and member is not None:
        elastic.leave(member.trainer_id, member.deadline)
