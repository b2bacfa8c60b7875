"""Actors for the roles of a job on a Ray cluster: placement, calls, and errors.

Servers are spread over nodes; trainers are packed or spread. Each role has a bundle of resources.
Trainers and servers have separate placement groups, because a placement group has one strategy.
`RayGroup.end` removes the groups and the actors; Ray removes them if the driver ends.

A wait for calls ends with an error when an actor ends. Roles notice each other's failures, so the
first error may be a `PeerError` of a role that has not failed itself. The driver then waits a few
seconds for the failure that caused the `PeerError`, as `dtrans launch` does.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans.checkpoint.runs import VARIABLE as RUN, new_run
from dtrans.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    DtransError,
    PeerError,
    missing_extra,
)
from dtrans.ir.selection import subset
from dtrans.protocol import token
from dtrans.run.distributed.role import (
    LOSS,
    PSERVER,
    TRAINER,
    VARIABLES,
    Role,
    roles_of,
    trainer_roles,
)
from dtrans.run.distributed.watch import is_by_peer
from dtrans.run.net import ended_roles
from dtrans.run.net.net_options import ALLOW_REMOTE


BLAME = 5.0  # seconds to wait, after a role's PeerError, for the error of the role that caused it
# prefixes of the variables that actors get from the driver
CARRIED = ("JAX_", "XLA_", "TF_CPP_", "DTRANS_")
ROLE_VARIABLES = (
    *VARIABLES,
    LOSS,
    ended_roles.VARIABLE,
    token.VARIABLE,
    "DTRANS_TOKEN_FILE",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
# options that a driver may have set by jax.config.update, and that must be the same in all roles,
# because they change results or devices
SETTINGS = (
    "jax_enable_x64",
    "jax_platforms",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
DEVICE_COUNT = "--xla_force_host_platform_device_count"


def ray_of(address: str | None) -> Any:
    """Return the module `ray`, connected to a cluster.

    Args:
      address: the address of the cluster, as for `ray.init`. The default is the cluster to which
        this process is connected, else the cluster in RAY_ADDRESS, else a new local cluster.

    Raises:
      ConfigError: Ray is not installed, or this process is connected to another cluster.
    """
    try:
        import ray
    except ImportError as e:
        raise missing_extra("on_ray and `dtrans launch --on ray` need Ray", "ray") from e
    if not ray.is_initialized():
        try:
            ray.init(address=address)
        except (ConnectionError, ValueError) as e:
            raise ConfigError(
                f"the Ray cluster at address={address!r} cannot be reached: {e}; start it with "
                "`ray start --head`, or pass address="
            ) from e
    elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
        raise ConfigError(
            f"address={address!r}: this process is connected to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}; leave address out, or call ray.shutdown() "
            "first"
        )
    return ray


def driver_environment(bundle: Mapping[str, float], devices: int) -> dict[str, str]:
    """Return the environment variables that an actor inherits from the driver.

    They are the variables of JAX, XLA and dtrans. Options that the driver has set by `jax.config`
    are added as variables.

    Args:
      bundle: the resources of the role.
      devices: number of the role's devices if it computes on CPUs.
    """
    found = {}
    for name, text in os.environ.items():
        if name.startswith(CARRIED) and name not in ROLE_VARIABLES:
            found[name] = text
    for name in SETTINGS:
        value = getattr(jax.config, name)
        if value is not None:
            found[name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    flags = [x for x in found.get("XLA_FLAGS", "").split() if not x.startswith(DEVICE_COUNT)]
    # the driver's flag for virtual devices (on_mesh) must not apply to the roles
    found |= {"XLA_FLAGS": " ".join(flags), "JAX_NUM_CPU_DEVICES": str(devices)}
    if not has_accelerator(bundle):
        found["JAX_PLATFORMS"] = "cpu"
    return found


def has_accelerator(bundle: Mapping[str, float]) -> bool:
    """Return True if a role's resources include a GPU or TPU."""
    return not bundle.keys().isdisjoint(("GPU", "TPU"))


def secret_environment() -> dict[str, str]:
    """Return the variables that contain secrets, such as the job's token.

    Ray's dashboard shows the variables of `runtime_env`. So the driver sends these variables to the
    actors by a call instead.
    """
    return {token.VARIABLE: token.job_token() or token.new_token(), ALLOW_REMOTE: "1"}


@dataclasses.dataclass(frozen=True)
class RayPlacement:
    """Resources of a job's roles, and the way in which Ray distributes the roles over nodes.

    Attributes:
      trainers: number of trainers.
      pservers: number of pservers.
      trainers_on: "PACK" puts trainers on as few nodes as possible, "SPREAD" on different nodes.
      trainer_resources: resources of each trainer, such as {"CPU": 1, "GPU": 1}.
      server_resources: resources of each pserver.

    Raises:
      ConfigError: `trainers_on` has another value, or an amount is not a positive number.
    """

    trainers: int
    pservers: int
    trainers_on: str = "PACK"
    trainer_resources: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1})
    server_resources: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1})

    def __post_init__(self) -> None:
        if self.trainers_on not in ("PACK", "SPREAD"):
            raise ConfigError(f"trainers_on must be 'PACK' or 'SPREAD', it is {self.trainers_on!r}")
        for name in ("trainer_resources", "server_resources"):
            amounts = getattr(self, name)
            is_amount = lambda x: isinstance(x, (int, float)) and x > 0
            if not amounts or not all(map(is_amount, amounts.values())):
                raise ConfigError(
                    f'{name} must have positive amounts, such as {{"CPU": 1}}; it is {amounts!r}'
                )

    @property
    def groups(self) -> tuple[tuple[str, int, Mapping[str, float], str], ...]:
        """Placement groups of Ray: one for trainers, and one for servers if there are any.

        Each is a tuple: the kind of role, the number of roles, the resources of each, and the
        strategy.
        """
        trainers = (TRAINER, self.trainers, self.trainer_resources, self.trainers_on)
        if not self.pservers:
            return (trainers,)
        return (trainers, (PSERVER, self.pservers, self.server_resources, "SPREAD"))


class RayGroup:
    """Ray actors of a job, one per role: starts them on nodes, calls their methods, and ends them.

    If an actor fails, all actors are ended. Use it as a context manager, or call `end`.

    Args:
      ray: the module, connected.
      actor: the class of the actors (`dtrans.hosts.ray_actor.RoleProcess`).
      placement: numbers, resources and distribution of the actors.
      environment: returns the variables of a role's process, from its resources.
      deadline: seconds to wait for free resources, and for the start of all processes.
      options: Ray's options for all actors.
      grace: seconds that servers have to save their state, after the trainers are killed.

    Attributes:
      actors: the actors by role name, `trainer 0`: the trainers, then the servers.
      nodes: maps the name of each role to the name of its node in messages.
      node_ids: maps the name of each role to the Ray id of its node.

    Raises:
      DeadlineError: the cluster has no free resources, or processes did not start.
    """

    def __init__(
        self,
        ray: Any,
        actor: type,
        placement: RayPlacement,
        environment: Callable[[Mapping[str, float]], Mapping[str, str]],
        deadline: float,
        options: Mapping[str, Any] | None = None,
        grace: float = 0.0,
    ) -> None:
        self._ray, self._deadline, self._grace = ray, deadline, grace
        self._groups: list[Any] = []
        self.actors: dict[str, Any] = {}
        self.nodes: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self.node_ids: dict[str, str] = {}
        self._started: dict[Any, str] = {}  # calls that return at the end of the job
        self._placement = placement
        limit = time.monotonic() + deadline
        # Since this variable is unique to this job, Ray does not reuse a worker process of another
        # job, in which JAX may have been used already.
        run = {RUN: new_run()}
        try:
            for kind, count, bundle, strategy in placement.groups:
                self._place(kind, count, bundle, strategy, limit)
            for kind, count, bundle, _ in placement.groups:
                more: dict[str, Any] = {
                    "runtime_env": {"env_vars": {**environment(bundle), **run}},
                    "max_restarts": 0,
                }
                self._start(actor, kind, count, bundle, more | dict(options or {}))
            self._find_nodes(limit)
        except BaseException:
            self.end()
            raise

    def _place(
        self, kind: str, count: int, bundle: Mapping[str, float], strategy: str, limit: float
    ) -> None:
        from ray.util.placement_group import placement_group

        group = placement_group([dict(bundle)] * count, strategy=strategy)
        self._groups.append(group)
        if not group.wait(max(0.0, limit - time.monotonic())):
            of_bundle = lambda amounts: {n: amounts.get(n, 0.0) for n in bundle}
            total = of_bundle(self._ray.cluster_resources())
            free = of_bundle(self._ray.available_resources())
            option = "server_resources" if kind == PSERVER else "trainer_resources"
            raise DeadlineError(
                f"waited {self._deadline:g} s for resources for {count} {kind}{'s' * (count > 1)} "
                f"with {dict(bundle)} each; the Ray cluster has {total}, and {free} are free; add "
                f'nodes, or reduce {option}, to {{"CPU": 0.5}} for example'
            )

    def _start(
        self,
        actor: type,
        kind: str,
        count: int,
        bundle: Mapping[str, float],
        more: Mapping[str, Any],
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rest = {n: x for n, x in bundle.items() if n not in ("CPU", "GPU", "memory")}
        group = self._groups[kind == PSERVER]
        for k in range(count):
            options = {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "memory": bundle.get("memory"),
                "resources": rest,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=k
                ),
                **more,
            }
            # the arguments are small, because Ray stores them as long as the actor (ray#53727)
            self.actors[f"{kind} {k}"] = (
                self._ray.remote(actor).options(**options).remote(f"{kind} {k}")
            )

    def _find_nodes(self, limit: float) -> None:
        for name, (address, node) in self.all("where", limit=limit).items():
            self.nodes[name] = f"node {address} ({node[:8]})"
            self._addresses[name], self.node_ids[name] = address, node

    def roles(self) -> dict[str, Role]:
        """Return the role of each actor, by name, with endpoints on free ports of its node."""
        placed = self._placement
        names = self.servers or self.trainers
        endpoints = [*self.all("endpoint", {n: (self._addresses[n],) for n in names}).values()]
        roles = trainer_roles(endpoints)
        if placed.pservers:
            roles = roles_of(placed.trainers, endpoints)
        return {role.name: role for role in roles}

    def another_endpoint(self, name: str) -> str:
        """Return an additional endpoint on an actor's node, for example for `dtrans status`."""
        return str(self.all("endpoint", {name: (self._addresses[name],)})[name])

    @property
    def trainers(self) -> list[str]:
        """The names of the trainers."""
        return [n for n in self.actors if n.startswith(TRAINER)]

    @property
    def servers(self) -> list[str]:
        """The names of the servers."""
        return [n for n in self.actors if n.startswith(PSERVER)]

    # -- calls -----------------------------------------------------------------------------------

    def all(
        self,
        method: str,
        args: Mapping[str, Sequence[Any]] | None = None,
        *,
        limit: float | None = None,
    ) -> dict[str, Any]:
        """Call a method of several actors at the same time, and wait for all results.

        Args:
          method: the name of the method.
          args: the method's arguments, by the names of the actors to call. By default all actors
            are called without arguments.
          limit: end of the wait, in seconds of the monotonic clock; None to wait without end.

        Returns:
          The result of each actor, by name.

        Raises:
          PeerError: an actor or its node has ended, or the method raised an error of another
            library.
          DtransError: the method's own error.
          DeadlineError: the limit has passed.
        """
        if args is None:
            args = dict.fromkeys(self.actors, ())
        calls = {getattr(self.actors[n], method).remote(*x): n for n, x in args.items()}
        found = self._collect(calls, limit)
        return subset(found, args)

    def start(self, method: str, args: Mapping[str, Sequence[Any]]) -> None:
        """Call a method of several actors without waiting. `all` and `finish` raise its error.

        Args:
          method: the name of the method.
          args: its arguments, by the names of the actors to call.
        """
        for name, arguments in args.items():
            self._started[getattr(self.actors[name], method).remote(*arguments)] = name

    def finish(self) -> None:
        """Wait until all methods that `start` has called have returned."""
        self._collect(dict(self._started), None)

    def _collect(self, calls: Mapping[Any, str], limit: float | None) -> dict[str, Any]:
        """Wait for calls; return their results by actor. An error of any call ends all actors.

        Args:
          calls: maps each call to the name of its actor.
          limit: end of the wait, in seconds of the monotonic clock; None to wait without end.
        """
        found: dict[str, Any] = {}
        waiting = {**calls, **self._started}
        while len(found) < len(calls):
            seconds = None
            if limit is not None:
                seconds = max(0.0, limit - time.monotonic())
            done, _ = self._ray.wait([*waiting], num_returns=1, timeout=seconds)
            if not done:
                names = ", ".join(n for ref, n in waiting.items() if ref in calls)
                raise DeadlineError(
                    f"the processes of {names} did not start within {self._deadline:g} s; set a "
                    "longer deadline"
                )
            (ref,) = done
            name = waiting.pop(ref)
            self._started.pop(ref, None)
            failure = self._failure_of(ref, name)
            if failure is not None:
                error = self._to_blame(failure, waiting)
                if not isinstance(error, CheckpointError):
                    self.end()  # any error except a failed save ends the job
                raise error from failure.cause
            if ref in calls:
                found[name] = self._ray.get(ref)
        return found

    def _failure_of(self, ref: Any, name: str) -> RoleFailure | None:
        """Return the error of a finished call to an actor; None if the call returned a result."""
        from ray.exceptions import RayError, RayTaskError

        node = self.nodes.get(name, "its node")
        try:
            self._ray.get(ref)
        except RayTaskError as e:
            return RoleFailure(name, node, e.cause, has_gone=False)
        except RayError as e:
            return RoleFailure(name, node, e, has_gone=True)
        return None

    def _to_blame(self, first: RoleFailure, waiting: dict[Any, str]) -> Exception:
        """Return the error that explains a failure best.

        If a role failed because of another role, the other role's error may arrive a moment later.
        So the method waits for it up to BLAME seconds.

        Args:
          first: the first failure.
          waiting: the calls that have not ended.
        """
        limit, failures = time.monotonic() + BLAME, [first]
        while waiting and all(x.is_by_peer for x in failures):
            done, _ = self._ray.wait(
                [*waiting], num_returns=1, timeout=max(0.0, limit - time.monotonic())
            )
            if not done:
                break
            other = self._failure_of(done[0], waiting.pop(done[0]))
            if other is not None:
                failures.append(other)
        return min(failures, key=lambda x: x.is_by_peer).error()

    # -- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Kill all actors, and remove their placement groups."""
        if not self._ray.is_initialized():
            return  # Ray ended the actors when the driver disconnected
        from ray.util.placement_group import remove_placement_group

        for name in self.trainers:
            self._ray.kill(self.actors[name])
        if self._grace and self._started:
            self._ray.wait([*self._started], num_returns=len(self._started), timeout=self._grace)
        for name in self.servers:
            self._ray.kill(self.actors[name])
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        self.actors.clear()
        self._started.clear()

    def __enter__(self) -> RayGroup:
        return self

    def __exit__(self, *failed: object) -> None:
        self.end()


def one_line(error: Exception) -> str:
    """Shorten an error of Ray to one line, without the indented lines of details."""
    return " ".join(x for x in str(error).splitlines() if x and not x.startswith("\t"))


@dataclasses.dataclass(frozen=True)
class RoleFailure:
    """Failure of an actor's method, or the end of its process, with the role and the node.

    Attributes:
      name: the name of the role.
      node: the name of its node.
      cause: the error of its method, or Ray's error about the end of its process.
      has_gone: True if its process has ended.
    """

    name: str
    node: str
    cause: Exception
    has_gone: bool

    @property
    def is_by_peer(self) -> bool:
        """True if the failure of another role caused the error."""
        return not self.has_gone and (
            isinstance(self.cause, PeerError) or is_by_peer(str(self.cause))
        )

    def error(self) -> Exception:
        """Return the error to raise in the driver."""
        who = f"{self.name} on {self.node}"
        if self.has_gone:
            reason = one_line(self.cause)
            return PeerError(f"{who} was lost, and the other roles were ended; Ray says: {reason}")
        if isinstance(self.cause, DtransError):
            return type(self.cause)(f"{who}: {self.cause}")
        return PeerError(
            f"{who} failed, and the other roles were ended: {type(self.cause).__name__}: "
            f"{self.cause}"
        )
