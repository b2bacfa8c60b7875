"""Actors for the roles of a job on a Ray cluster: placement, waits, and the role to blame.

Servers are spread over nodes; trainers are packed or spread. Each role has a bundle, and each of
the two kinds a placement group, since a group has one strategy. The groups and the actors end with
this object. Ray ends them if the driver ends first.

Every wait ends when an actor does. Roles notice each other's end, so the first error may be a
`PeerError` of a role that is in order. Such an error waits a moment for the failure that caused it,
as in `dtrans launch`.
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


BLAME = 5.0  # seconds that an error which names another role waits for that role's own
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
# a driver may have set these by jax.config.update; they change numbers, or where they are computed
SETTINGS = (
    "jax_enable_x64",
    "jax_platforms",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
DEVICE_COUNT = "--xla_force_host_platform_device_count"


def ray_of(address: str | None) -> Any:
    """Return Ray, connected.

    Args:
      address: of the cluster, as `ray.init` takes it. By default the cluster that this process is
        connected to, or that RAY_ADDRESS names, or a new one on this machine.

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
                f"address={address!r} is no Ray cluster that this process reaches: {e}"
            ) from e
    elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
        raise ConfigError(
            f"address={address!r}: this process is connected to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}; leave address out, or call ray.shutdown() "
            "first"
        )
    return ray


def driver_environment(bundle: Mapping[str, float], devices: int) -> dict[str, str]:
    """Return the variables that roles get from this process: those of JAX, XLA and dtrans.

    Args:
      bundle: the resources of a role.
      devices: number of its devices if it computes on CPUs.
    """
    found = {
        n: x for n, x in os.environ.items() if n.startswith(CARRIED) and n not in ROLE_VARIABLES
    }
    for name in SETTINGS:
        value = getattr(jax.config, name)
        if value is not None:
            found[name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    flags = [x for x in found.get("XLA_FLAGS", "").split() if not x.startswith(DEVICE_COUNT)]
    # a driver with virtual devices for on_mesh would give them to each role
    found |= {"XLA_FLAGS": " ".join(flags), "JAX_NUM_CPU_DEVICES": str(devices)}
    if not has_accelerator(bundle):
        found["JAX_PLATFORMS"] = "cpu"
    return found


def has_accelerator(bundle: Mapping[str, float]) -> bool:
    """Return True if a role has a GPU or a TPU. Others would take memory on those that Ray gives to
    trainers."""
    return not bundle.keys().isdisjoint(("GPU", "TPU"))


def secret_environment() -> dict[str, str]:
    """Return the variables that Ray is not given, since its dashboard shows the others."""
    return {token.VARIABLE: token.job_token() or token.new_token(), ALLOW_REMOTE: "1"}


@dataclasses.dataclass(frozen=True)
class RayPlacement:
    """Needs of the roles, and the nodes that they may run on.

    Attributes:
      trainers, pservers: numbers of trainers and of pservers.
      trainers_on: "PACK" puts trainers on as few nodes as possible, "SPREAD" on different ones.
      trainer_resources, server_resources: for each of them, as a bundle of a placement group:
        {"CPU": 1, "GPU": 1}.

    Raises:
      ConfigError: another strategy, or resources that are no numbers.
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
            fits = amounts and all(isinstance(x, (int, float)) and x > 0 for x in amounts.values())
            if not fits:
                raise ConfigError(
                    f'{name} must have positive amounts, such as {{"CPU": 1}}; it is {amounts!r}'
                )

    @property
    def groups(self) -> tuple[tuple[str, int, Mapping[str, float], str], ...]:
        """Kind, number, bundle and strategy of both kinds of roles: trainers choose first."""
        trainers = (TRAINER, self.trainers, self.trainer_resources, self.trainers_on)
        servers = (PSERVER, self.pservers, self.server_resources, "SPREAD")
        return (trainers, servers) if self.pservers else (trainers,)


class RayGroup:
    """The actors of a job. A context manager, or `end` ends them.

    Args:
      ray: the module, connected.
      actor: the class of the actors (`dtrans.hosts.ray_actor.RoleProcess`).
      placement: numbers and nodes of the actors.
      environment: gives the variables of a role's process, from its bundle.
      deadline: seconds to wait until there is room for all, and their processes have started.
      options: of Ray's for all actors.
      grace: seconds that servers get to end by themselves when the trainers have gone: they may
        save.

    Attributes:
      actors: by name, `trainer 0`: the trainers, then the servers.
      nodes, node_ids: name to its node, as messages call it, and as Ray does.

    Raises:
      DeadlineError: there is no room, or processes did not start.
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
        # it also keeps Ray from giving an actor a process in which JAX was used
        run = {RUN: new_run()}
        try:
            for kind, count, bundle, strategy in placement.groups:
                self._place(kind, count, bundle, strategy, limit)
            for kind, count, bundle, _ in placement.groups:
                variables = {**environment(bundle), **run}
                more = {
                    "runtime_env": {"env_vars": variables},
                    "max_restarts": 0,
                    **(options or {}),
                }
                self._start(actor, kind, count, bundle, more)
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
            every, idle = self._ray.cluster_resources(), self._ray.available_resources()
            has = {n: every.get(n, 0.0) for n in bundle}
            free = {n: idle.get(n, 0.0) for n in bundle}
            raise DeadlineError(
                f"waited {self._deadline:g} s for room for {count} {kind}{'s' * (count > 1)} with "
                f"{dict(bundle)} each; "
                f"the Ray cluster has {has}, and {free} are free; add nodes, or let roles have "
                "less, as "
                f'{"server" if kind == PSERVER else kind}_resources={{"CPU": 0.5}}'
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
            # small arguments only: Ray keeps those of a creation as long as the actor (ray#53727)
            self.actors[f"{kind} {k}"] = (
                self._ray.remote(actor).options(**options).remote(f"{kind} {k}")
            )

    def _find_nodes(self, limit: float) -> None:
        for name, (address, node) in self.all("where", limit=limit).items():
            self.nodes[name] = f"node {address} ({node[:8]})"
            self._addresses[name], self.node_ids[name] = address, node

    def roles(self) -> dict[str, Role]:
        """Return the role of each actor, with endpoints that the actors ask their nodes for."""
        placed = self._placement
        binds = self.servers or self.trainers
        endpoints = [*self.all("endpoint", {n: (self._addresses[n],) for n in binds}).values()]
        roles = (
            roles_of(placed.trainers, endpoints) if placed.pservers else trainer_roles(endpoints)
        )
        return {role.name: role for role in roles}

    def another_endpoint(self, name: str) -> str:
        """Return one more endpoint of an actor, on a port that its node chooses."""
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
        """Call a method of some actors, and wait for all.

        Args:
          method: its name.
          args: name of an actor to its arguments; all actors without arguments by default.
          limit: when to give up, by the monotonic clock.

        Returns:
          The result of each actor, by name.

        Raises:
          PeerError: an actor or its node has gone, or the method failed by an error that is none of
            dtrans's.
          DtransError: the error of the method. DeadlineError: the limit has passed.
        """
        args = dict.fromkeys(self.actors, ()) if args is None else args
        calls = {getattr(self.actors[n], method).remote(*x): n for n, x in args.items()}
        found = self._collect(calls, limit)
        return subset(found, args)

    def start(self, method: str, args: Mapping[str, Sequence[Any]]) -> None:
        """Call a method of some actors that lasts until the job ends; waits raise its error."""
        for name, arguments in args.items():
            self._started[getattr(self.actors[name], method).remote(*arguments)] = name

    def finish(self) -> None:
        """Wait until the calls of `start` have returned."""
        self._collect(dict(self._started), None)

    def _collect(self, calls: Mapping[Any, str], limit: float | None) -> dict[str, Any]:
        """Return the results of calls; an error of any call ends all actors."""
        found: dict[str, Any] = {}
        waiting = {**calls, **self._started}
        while len(found) < len(calls):
            seconds = None if limit is None else max(0.0, limit - time.monotonic())
            done, _ = self._ray.wait([*waiting], num_returns=1, timeout=seconds)
            if not done:
                names = ", ".join(n for ref, n in waiting.items() if ref in calls)
                raise DeadlineError(
                    f"waited {self._deadline:g} s, and the processes of {names} have not started; "
                    "give a longer deadline"
                )
            (ref,) = done
            name = waiting.pop(ref)
            self._started.pop(ref, None)
            failure = self._failure_of(ref, name)
            if failure is not None:
                error = self._to_blame(failure, waiting)
                if not isinstance(error, CheckpointError):  # a job continues after it
                    self.end()
                raise error from failure.cause
            if ref in calls:
                found[name] = self._ray.get(ref)
        return found

    def _failure_of(self, ref: Any, name: str) -> RoleFailure | None:
        """Return the failure of a call that has ended, if it failed."""
        from ray.exceptions import RayError, RayTaskError

        try:
            self._ray.get(ref)
        except RayTaskError as e:
            return RoleFailure(name, self.nodes.get(name, "its node"), e.cause, has_gone=False)
        except RayError as e:
            return RoleFailure(name, self.nodes.get(name, "its node"), e, has_gone=True)
        return None

    def _to_blame(self, first: RoleFailure, waiting: dict[Any, str]) -> Exception:
        """Return the first error, unless it names a role that fails a moment later."""
        limit, failures = time.monotonic() + BLAME, [first]
        while waiting and all(x.is_by_peer for x in failures):
            done, _ = self._ray.wait(
                [*waiting], num_returns=1, timeout=max(0.0, limit - time.monotonic())
            )
            if not done:
                break
            other = self._failure_of(done[0], waiting.pop(done[0]))
            failures += [] if other is None else [other]
        return min(failures, key=lambda x: x.is_by_peer).error()

    # -- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """End all actors, and give back their room."""
        if not self._ray.is_initialized():  # Ray ends actors with the driver's connection
            return
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


@dataclasses.dataclass(frozen=True)
class RoleFailure:
    """Failure of an actor.

    Attributes:
      name: of the role.
      node: where it was.
      cause: the error of its method, or Ray's error about its end.
      has_gone: its process has ended.
    """

    name: str
    node: str
    cause: Exception
    has_gone: bool

    @property
    def is_by_peer(self) -> bool:
        """Return True if another role may be the cause."""
        return not self.has_gone and (
            isinstance(self.cause, PeerError) or is_by_peer(str(self.cause))
        )

    def error(self) -> Exception:
        """Return the error to raise in the driver."""
        who = f"{self.name} on {self.node}"
        if self.has_gone:
            said = " ".join(x for x in str(self.cause).splitlines() if x and not x.startswith("\t"))
            return PeerError(f"{who} has gone, and the other roles were ended; Ray says: {said}")
        if isinstance(self.cause, DtransError):
            return type(self.cause)(f"{who}: {self.cause}")
        return PeerError(
            f"{who} failed, and the other roles were ended: {type(self.cause).__name__}: "
            f"{self.cause}"
        )
