"""Table of the processes of a job: their roles, commands, variables and resources.

    plan.roles(command)           the table of a plan, with memory and bytes from `plan.costs()`
    role_table(mode, trainers)    the table of a job with given numbers of roles
    place(table, hosts)           a host for each process
    table.at(places)              the table with endpoints on these hosts

A table is a value: it starts no process and reserves no port. Launchers and emitters (ssh, Slurm,
Kubernetes, TorchX, Ray) read it. It does not contain the job's token.

`place` minimizes the bytes over the busiest network link. Assume that each of n trainers sends M
bytes per step, M / k to each of k servers. Traffic between roles on one host does not use the
host's link. In each direction, the busiest link carries:

    all roles on separate hosts                 max(M, n M / k) bytes
    k = n, one server on each trainer's host    2 (n - 1) M / n bytes

These are the bounds of BytePS (Jiang et al., OSDI 2020). If the first number is smaller, servers
should have separate hosts. For k = n, this is the case with three trainers or more.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.checks import check_int, check_one_of
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.endpoints import is_loopback, split_endpoint
from dtrans.errors import ConfigError
from dtrans.ir import display
from dtrans.ir.selection import values_at
from dtrans.parameter_server.plan import PServerPlan
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.plan import register_runner
from dtrans.run.distributed.role import (
    LOSS,
    PSERVER,
    TRAINER,
    VARIABLES,
    Role,
    roles_of,
    trainer_roles,
)
from dtrans.run.distributed.schedulers import PORT
from dtrans.run.distributed.status_door import VARIABLE as STATUS
from dtrans.run.net.net_options import ALLOW_REMOTE


MODES = ("pserver", "nccl2", "sharding", "pipeline")


@dataclasses.dataclass(frozen=True)
class RoleEntry:
    """One process of a job: its role, command, variables and expected resources.

    Attributes:
      role: the process's role and endpoints.
      argv: its command.
      environment: the variables to set for the process, without the job's token.
      cores: number of its processors; None if the user set no number.
      memory: bytes of its arrays between steps, or the user's number; None if unknown.
      sent: bytes that it sends in a step; None if unknown.
      received: bytes that it receives in a step; None if unknown.
      away_from: kinds of roles that should run on other hosts, because steps are faster then.
      beside: kinds of roles that can share its host without making steps slower.
    """

    role: Role
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cores: int | None = None
    memory: int | None = None
    sent: int | None = None
    received: int | None = None
    away_from: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the role: `trainer 0`, `pserver 1`."""
        return self.role.name

    @property
    def index(self) -> int:
        """Index of the process among the trainers, or among the servers: 1 for `trainer 1`."""
        return int(self.name.rpartition(" ")[2])

    @property
    def endpoint(self) -> str:
        """The endpoint that the process binds; empty for a trainer of parameter servers."""
        return self.role.current_endpoint

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports on which this process listens; empty for a trainer of parameter servers."""
        if not self.endpoint:
            return ()
        return (split_endpoint(self.endpoint)[1],)

    @property
    def user_environment(self) -> dict[str, str]:
        """The user's environment variables, without those that dtrans derives from the role."""
        derived = _environment(self.role, None)
        found = {}
        for name, value in self.environment.items():
            if name not in (*VARIABLES, ALLOW_REMOTE) and derived.get(name) != value:
                found[name] = value
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as a dict for JSON."""
        return {
            "name": self.name,
            "kind": self.role.kind,
            "index": self.index,
            "endpoint": self.endpoint,
            "ports": list(self.ports),
            "argv": list(self.argv),
            "environment": dict(self.environment),
            "cores": self.cores,
            "memory": self.memory,
            "sent": self.sent,
            "received": self.received,
            "away_from": list(self.away_from),
            "beside": list(self.beside),
        }


_HEADER = (
    "role",
    "endpoint",
    "cores",
    "memory",
    "bytes sent",
    "bytes received",
    "away from",
    "beside",
)


@dataclasses.dataclass(frozen=True)
class RoleTable:
    """Every process of a job: the servers, then the trainers. It prints as a table.

    Attributes:
      mode: `pserver`, `nccl2`, `sharding` or `pipeline`.
      entries: one entry per process.

    Example:
      >>> import dtrans
      >>> from dtrans.hosts.role_table import place
      >>> table = dtrans.role_table("pserver", 2, 2, ["python", "train.py"])
      >>> [e.name for e in table]
      ['pserver 0', 'pserver 1', 'trainer 0', 'trainer 1']
      >>> places = place(table, [("a", 2), ("b", 2)])
      >>> places
      ('a', 'b', 'a', 'b')
      >>> [e.endpoint for e in table.at(places)]
      ['a:6174', 'b:6174', '', '']
    """

    mode: str
    entries: tuple[RoleEntry, ...]

    def __iter__(self) -> Any:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def of(self, kind: str) -> tuple[RoleEntry, ...]:
        """Return the entries of one kind: `pserver` or `trainer`."""
        return tuple(e for e in self.entries if e.role.kind == kind)

    def at(self, places: Sequence[str], port: int = PORT) -> RoleTable:
        """Return a copy of the table with endpoints on given hosts.

        Further endpoints on a host use the next ports: a:6174, a:6175.

        Args:
          places: the host name or address of each entry, such as `place` returns.
          port: the port of the first endpoint on each host.
        """
        _check_count("places", places, len(self), "role")
        taken: collections.Counter[str] = collections.Counter()
        endpoints = []
        for entry, host in zip(self.entries, places, strict=True):
            if entry.endpoint:
                shown = f"[{host}]" if ":" in host else host
                endpoints.append(f"{shown}:{port + taken[host]}")
                taken[host] += 1
        return self.with_endpoints(endpoints)

    def with_endpoints(self, endpoints: Sequence[str]) -> RoleTable:
        """Return the table with other endpoints; the variables of all processes change accordingly.

        Args:
          endpoints: one endpoint per server, or per trainer if there are no servers.

        Raises:
          ConfigError: the number of endpoints is wrong.
        """
        first = self.entries[0].role
        if first.mode == "pserver":
            _check_count("endpoints", endpoints, len(self.of(PSERVER)), "pserver")
            roles = roles_of(first.trainers, endpoints)
        else:
            _check_count("endpoints", endpoints, len(self), "trainer")
            roles = trainer_roles(endpoints)
        entries = []
        for entry, role in zip(self.entries, roles, strict=True):
            environment = _environment(role, entry.user_environment)
            entries.append(dataclasses.replace(entry, role=role, environment=environment))
        return dataclasses.replace(self, entries=tuple(entries))

    @property
    def notes(self) -> list[str]:
        """Lines below the printed table: the command, and a warning if servers lack bandwidth."""
        found = []
        if any(e.argv for e in self.entries):
            found.append(f"each runs: {shlex.join(self.entries[0].argv)}")
        servers, trainers = self.of(PSERVER), self.of(TRAINER)
        if 0 < len(servers) < len(trainers):
            have = "servers have" if len(servers) > 1 else "server has"
            found.append(
                f"{len(servers)} {have} less bandwidth than {len(trainers)} trainers; "
                f"with {len(trainers)} servers, trainers would not wait for them"
            )
        return found

    @property
    def title(self) -> str:
        """One line with the number of roles: `roles of a pserver job: 2 pservers, 2 trainers`."""
        counts = []
        for kind in (PSERVER, TRAINER):
            count = len(self.of(kind))
            if count:
                counts.append(f"{count} {kind}{'s' * (count > 1)}")
        return f"roles of a {self.mode} job: {', '.join(counts)}"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, one tuple per role, without the header."""
        number = lambda n: "-" if n is None else f"{n:,}"
        rows = []
        for e in self.entries:
            numbers = map(number, (e.cores, e.memory, e.sent, e.received))
            kinds = (", ".join(e.away_from) or "-", ", ".join(e.beside) or "-")
            rows.append((e.name, e.endpoint or "-", *numbers, *kinds))
        return rows

    def __str__(self) -> str:
        return display.plan_text(self.title, _HEADER, self.rows, self.notes, right=range(2, 6))

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        return display.plan_html(self.title, _HEADER, self.rows, self.notes, code=1)

    def to_json(self) -> str:
        """Return the table as JSON, with commands and variables."""
        roles = [e.as_dict() for e in self.entries]
        return json.dumps({"mode": self.mode, "roles": roles, "notes": self.notes}, indent=2)


# -- from counts, and from plans -------------------------------------------------------------------


def role_table(
    mode: str = "pserver",
    trainers: int = 1,
    pservers: int | None = None,
    command: Sequence[str] = (),
    *,
    endpoints: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
    memory: int | None = None,
) -> RoleTable:
    """Return the table of a job's processes, from the numbers of trainers and servers.

    Use `plan.roles` instead if there is a plan; it adds memory and traffic.

    Args:
      mode: "pserver"; or "nccl2", "sharding" or "pipeline", where all processes are trainers.
      trainers: number of trainers.
      pservers: number of pservers, only in mode "pserver"; by default one.
      command: program and arguments, the same for every process.
      endpoints: endpoints of the servers, or of the trainers if there are no servers. The default
        is loopback, from port 6174.
      env: variables to set for all processes.
      cores: processors of each process.
      memory: bytes of each process.

    Raises:
      ConfigError: a number, or the number of endpoints, is invalid.
    """
    check_one_of("mode", mode, MODES)
    check_int("trainers", trainers, "a number of processes", least=1)
    for name, value in (("cores", cores), ("memory", memory)):
        if value is not None:
            check_int(name, value, "a number", least=1)
    if mode == "pserver":
        count = 1 if pservers is None else pservers
        check_int("pservers", count, "a number of processes", least=1)
        if endpoints and pservers is not None:
            _check_count("endpoints", endpoints, pservers, "pserver")
        roles = roles_of(trainers, endpoints or _loopback(count))
    else:
        if pservers is not None:
            raise ConfigError(
                f"pservers={pservers}: mode={mode!r} has no parameter servers; leave pservers out"
            )
        roles = _connected(trainers, endpoints, "trainer")
    return _table(mode, roles, command, env, {role.name: _Needs(cores, memory) for role in roles})


@dataclasses.dataclass(frozen=True)
class _Needs:
    """Resources and network traffic of one process, for its row of the table; None if unknown.

    Attributes:
      cores: number of processors.
      memory: bytes.
      sent: bytes sent in a step.
      received: bytes received in a step.
    """

    cores: int | None = None
    memory: int | None = None
    sent: int | None = None
    received: int | None = None


@register_runner(PServerPlan, "roles")
def pserver_roles(
    plan: PServerPlan,
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> RoleTable:
    """Implement `plan.roles` for plans with parameter servers."""
    roles = roles_of(plan.trainers, tuple(plan.servers))
    costs = {c.role: c for c in plan.costs()}
    needs = {}
    for role in roles:
        name = role.current_endpoint if role.is_pserver else role.name
        cost = costs[name if name in costs else TRAINER]
        needs[role.name] = _Needs(cores, cost.state_bytes, cost.sent, cost.received)
    return _table("pserver", roles, command, env, needs)


@register_runner(CollectivePlan, "roles")
def collective_roles(
    plan: CollectivePlan,
    command: Sequence[str] = (),
    *,
    processes: int | None = None,
    endpoints: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> RoleTable:
    """Implement `plan.roles` for nccl2 mode and sharding.

    Args:
      processes: number of processes; by default one per trainer. A process has the devices of
        `trainers / processes` trainers.
    """
    count = plan.trainers if processes is None else processes
    each = _each("trainers", plan.trainers, count) * plan.devices_per_trainer
    (cost,) = plan.costs()
    needs = _Needs(cores, each * cost.state_bytes, each * cost.sent, each * cost.received)
    roles = _connected(count, endpoints)
    return _table(plan.strategy, roles, command, env, {r.name: needs for r in roles})


@register_runner(PipelinePlan, "roles")
def pipeline_roles(
    plan: PipelinePlan,
    command: Sequence[str] = (),
    *,
    processes: int | None = None,
    endpoints: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> RoleTable:
    """Implement `plan.roles` for pipelines: a process has consecutive stages in all replicas.

    Bytes between stages are known only if each process has one stage.

    Args:
      processes: number of processes; by default one per stage.
    """
    stages = plan.options.num_stages
    count = stages if processes is None else processes
    each = _each("stages", stages, count)
    costs = plan.costs()
    needs = {}
    for k in range(count):
        local = [c for s, c in enumerate(costs) if plan.device_of(s) // each == k]
        memory = sum(c.count * c.state_bytes for c in local)
        moved: tuple[int | None, int | None] = (None, None)
        if each == 1:
            sent = sum(c.count * c.sent for c in local)
            moved = sent, sum(c.count * c.received for c in local)
        needs[f"{TRAINER} {k}"] = _Needs(cores, memory, *moved)
    return _table("pipeline", _connected(count, endpoints), command, env, needs)


def _each(what: str, total: int, processes: int) -> int:
    """Return the number of trainers or stages per process; raise ConfigError if it is no integer.

    Args:
      what: "trainers" or "stages", for the error.
      total: number of trainers or stages of the plan.
      processes: number of processes.
    """
    check_int("processes", processes, "a number of processes", least=1)
    each, odd = divmod(total, processes)
    if odd or not each:
        raise ConfigError(
            f"processes={processes} does not divide the plan's {total} {what}; pass a divisor of "
            f"{total}"
        )
    return each


def _connected(
    count: int, endpoints: Sequence[str] | None, what: str = "process"
) -> tuple[Role, ...]:
    """Return the roles of a job without servers, in which every trainer has an endpoint.

    Args:
      count: number of trainers.
      endpoints: their endpoints; None for loopback.
      what: "trainer" or "process", for errors.
    """
    found = endpoints or _loopback(count)
    _check_count("endpoints", found, count, what)
    return trainer_roles(found)


def _check_count(name: str, found: Sequence[str], count: int, what: str) -> None:
    """Raise ConfigError unless there is one entry for each role of a kind."""
    if len(found) != count:
        raise ConfigError(f"{name} has {len(found)} entries, expected {count}, one for each {what}")


def _loopback(count: int) -> list[str]:
    return [f"127.0.0.1:{PORT + i}" for i in range(count)]


def observer_endpoint(trainer_endpoints: Sequence[str]) -> str:
    """Choose the endpoint at which trainer 0 answers `dtrans status`: one port above all endpoints.

    Jobs with servers need no such endpoint, since servers answer. A single trainer does not answer.

    Args:
      trainer_endpoints: endpoints of all trainers, in order; empty in jobs with servers.

    Returns:
      The endpoint; empty if none is needed, or if the port would exceed 65535.

    Example:
      >>> from dtrans.hosts.role_table import observer_endpoint
      >>> observer_endpoint(["gpu1:6174", "gpu1:6175", "gpu2:6174"])
      'gpu1:6176'
    """
    if len(trainer_endpoints) < 2:
        return ""
    port = 1 + max(split_endpoint(e)[1] for e in trainer_endpoints)
    if port > 65535:
        return ""
    return f"{trainer_endpoints[0].rpartition(':')[0]}:{port}"


def _environment(role: Role, user: Mapping[str, str] | None) -> dict[str, str]:
    """Return all variables of a process: the user's, and those that follow from the role."""
    found: dict[str, str] = {}
    user = user or {}
    observers = observer_endpoint(role.trainer_endpoints)
    if observers and user.get(LOSS) != "drop":  # with "drop", trainer 0 does not answer
        found[STATUS] = observers
    found |= {**user, **role.environment()}
    endpoints = role.pserver_endpoints or role.trainer_endpoints
    if not all(is_loopback(split_endpoint(e)[0]) for e in endpoints):
        found[ALLOW_REMOTE] = "1"
    return found


def _table(
    mode: str,
    roles: Sequence[Role],
    command: Sequence[str],
    env: Mapping[str, str] | None,
    needs: Mapping[str, _Needs],
) -> RoleTable:
    """Return the table of some roles.

    Args:
      mode, command, env: as for `role_table`.
      roles: every role of the job.
      needs: resources and traffic of each role, by name.
    """
    traffic = []
    for role in roles:
        if role.is_pserver:
            traffic.append(_traffic(needs[role.name].received, needs[role.name].sent))
    are_separate = servers_stand_alone(roles[0].trainers, traffic)
    entries = []
    for role in roles:
        away: tuple[str, ...]
        beside: tuple[str, ...]
        if role.mode != "pserver":
            away, beside = (), (TRAINER,)
        else:
            other = PSERVER if role.is_trainer else TRAINER
            away, beside = ((other,), ()) if are_separate else ((), (other,))
            if role.is_pserver and len(traffic) > 1:
                away += (PSERVER,)
        entry = RoleEntry(
            role,
            tuple(command),
            _environment(role, env),
            **dataclasses.asdict(needs[role.name]),
            away_from=away,
            beside=beside,
        )
        entries.append(entry)
    return RoleTable(mode, tuple(entries))


# -- placement -------------------------------------------------------------------------------------

# bytes that a server receives from all trainers in a step, and bytes that it sends to them
Traffic = tuple[float, float]


def _traffic(received: int | None, sent: int | None) -> Traffic:
    """Return the bytes that a server receives and sends in a step; (1, 1) if unknown.

    Equal values for all servers make placement give each host a similar number of servers.
    """
    if received is None or sent is None:
        return (1.0, 1.0)
    return (float(received), float(sent))


def servers_stand_alone(trainers: int, servers: Sequence[Traffic]) -> bool:
    """Return True if steps are faster with servers on separate hosts than on the trainers' hosts.

    The answer is the placement with fewer bytes over the busiest network link.

    Args:
      trainers: number of trainers.
      servers: the traffic of each server.

    Example:
      >>> from dtrans.hosts.role_table import servers_stand_alone
      >>> [servers_stand_alone(n, [(1, 1)] * n) for n in (1, 2, 3)]
      [False, False, True]
    """
    if not servers:
        return False
    every = trainers + len(servers)
    trainers_on = np.r_[np.ones(trainers, int), np.zeros(len(servers), int)]
    separate = _Links(trainers, servers, trainers_on)
    for j in range(len(servers)):
        separate.put(j, trainers + j)
    shared = _Links(trainers, servers, np.ones(trainers, int))
    shared.put_all(np.full(trainers, every))
    return separate.busiest < shared.busiest * (1 - 1e-9)


def place(table: RoleTable, hosts: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Choose a host for each process of a job, so that the network is used evenly.

    In jobs with servers, trainers are assigned round-robin to the hosts. Then each server gets the
    host with which the busiest link carries the fewest bytes (see the module's docstring). Without
    servers, trainers fill one host after the other, since trainers with neighbouring ids exchange
    the most bytes.

    Args:
      table: the roles.
      hosts: (name, slots) of each host, where slots is the largest number of roles on the host.
        Earlier hosts are preferred among equal ones.

    Raises:
      ConfigError: there are too few slots, or a host is listed twice.

    Example:
      >>> from dtrans.hosts.role_table import place, role_table
      >>> table = role_table("pserver", 2, 2)
      >>> place(table, [("a", 1), ("b", 1), ("c", 1), ("d", 1)])
      ('c', 'd', 'a', 'b')
    """
    listed = list(hosts)
    names = [name for name, _ in listed]
    for name, slots in listed:
        check_int(f"the slots of host {name}", slots, "a number of processes", least=1)
    for name in sorted(names):
        if names.count(name) > 1:
            raise ConfigError(
                f"host {name} is listed twice; write it once, with the sum of its slots"
            )
    slots_of = np.array([slots for _, slots in listed], int)
    missing = len(table) - int(slots_of.sum())
    if missing > 0:
        shown = ",".join(f"{name}:{slots}" for name, slots in listed) or "none"
        raise ConfigError(
            f"the hosts {shown} have slots for {len(table) - missing} processes, but there are "
            f"{len(table)} {table.title}; add hosts or slots for {missing} more"
        )
    servers, trainers = table.of(PSERVER), table.of(TRAINER)
    if not servers:
        return tuple(np.repeat(names, slots_of)[: len(table)].tolist())

    traffic = [_traffic(e.received, e.sent) for e in servers]
    best: _Links | None = None
    # Two orders of hosts are tried for the trainers: as listed, and the hosts with the most slots
    # first, on which servers can share hosts with trainers.
    orders = np.arange(len(names)), np.argsort(-slots_of, kind="stable")
    for order in orders:
        at = _assign_round_robin(len(trainers), order, slots_of)
        links = _Links(len(trainers), traffic, np.bincount(at, minlength=len(names)))
        links.put_all(slots_of)
        links.trainers_at = at
        if best is None or links.busiest < best.busiest * (1 - 1e-9):
            best = links
    assert best is not None
    return tuple(values_at(names, (*best.servers_at, *best.trainers_at)))


def _assign_round_robin(count: int, hosts: np.ndarray, slots: np.ndarray) -> list[int]:
    """Assign processes to hosts round-robin; return the host of each process.

    Args:
      count: number of processes.
      hosts: indices of the hosts in the order in which they get processes.
      slots: maps the index of each host to its largest number of processes.
    """
    found: list[int] = []
    turn = 0
    while len(found) < count:
        for host in hosts:
            if turn < slots[host]:
                found.append(int(host))
        turn += 1
    return found[:count]


class _Links:
    """Traffic over the network link of each host, while servers are placed on hosts one by one.

    Servers without a host count as if each was alone on a host. So a server's placement changes
    only the bytes of the chosen host.

    Args:
      trainers: number of trainers.
      servers: the traffic of each server.
      trainers_on: number of trainers on each host.
    """

    def __init__(self, trainers: int, servers: Sequence[Traffic], trainers_on: np.ndarray) -> None:
        self.trainers, self.servers, self.on = trainers, servers, trainers_on
        self.count = trainers_on.copy()  # processes on each host
        sent = sum(server[0] for server in servers) / trainers
        received = sum(server[1] for server in servers) / trainers
        self.out, self.into = trainers_on * sent, trainers_on * received
        self.servers_at: list[int] = [-1] * len(servers)
        self.trainers_at: list[int] = []

    @property
    def busiest(self) -> float:
        """Bytes over the busiest link."""
        return float(max(self.out.max(), self.into.max()))

    def with_server(self, j: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that each host would send and receive per step, if it had server j."""
        sent, received = (x / self.trainers for x in self.servers[j])
        others = self.trainers - self.on
        out = self.out - self.on * sent + others * received
        return out, self.into - self.on * received + others * sent

    def put(self, j: int, host: int) -> None:
        """Place server `j` on a host."""
        out, into = self.with_server(j)
        self.out[host], self.into[host] = out[host], into[host]
        self.count[host] += 1
        self.servers_at[j] = host

    def put_all(self, slots: np.ndarray) -> None:
        """Place all servers, the largest first, so that the busiest link carries few bytes.

        Args:
          slots: the largest number of processes on each host.
        """
        for j in sorted(range(len(self.servers)), key=lambda j: -max(self.servers[j])):
            now, then = np.maximum(self.out, self.into), np.maximum(*self.with_server(j))
            # for each host, the bytes over the busiest link if that host gets the server
            *_, second, first = np.sort(np.r_[0.0, now])
            busiest = np.maximum(then, np.where(now == first, second, first))
            unit = max(busiest.max(), 1e-30)  # numbers that differ by rounding compare equal
            keys = [np.round(x / unit, 9) for x in (busiest, then)]
            free = np.flatnonzero(self.count < slots)
            order = np.lexsort([free, self.count[free], keys[1][free], keys[0][free]])
            self.put(j, int(free[order[0]]))
