"""Table of the processes of a job: their roles, commands, variables and needs.

    plan.roles(command)           from a plan: with memory and bytes, from `plan.costs()`
    role_table(mode, trainers)    from counts alone
    place(table, hosts)           a host for each process
    table.at(places)              the table with the endpoints that these hosts give

A table is a value: it starts nothing, and reserves no port. Launchers and emitters (ssh, Slurm,
Kubernetes, TorchX, Ray) read it. It has no secret: `DTRANS_TOKEN` reaches the processes in another
way.

Placement is a question of bandwidth. Let each of n trainers send M bytes to k servers, a share to
each. A host carries what its trainers exchange with servers elsewhere, and what its servers
exchange with trainers elsewhere. The busiest link bounds the time of a step:

    all on separate hosts                       max(M, n M / k)
    k = n, a server beside each trainer         2 (n - 1) M / n

These are the bounds of BytePS (Jiang et al., OSDI 2020), whose rule follows: servers get separate
hosts, with at least the bandwidth of the trainers in total, where that is less. With two trainers,
or two servers, it is not.
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
from dtrans.plan import realises
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
    """One process of a job.

    Attributes:
      role: its role and endpoints.
      argv: its command.
      environment: the variables to set for it, without the job's secret.
      cores: processors for it; None if the user named no number.
      memory: bytes of its arrays between steps, or the user's number; None if unknown.
      sent, received: bytes that it sends to others and receives from them in a step; None if
        unknown.
      away_from: kinds of roles that make steps slower when they share its host.
      beside: kinds of roles that may share its host and cost no bandwidth.
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
        """`trainer 0`, `pserver 1`."""
        return self.role.name

    @property
    def index(self) -> int:
        """Its index among the roles of its kind."""
        return int(self.name.rpartition(" ")[2])

    @property
    def endpoint(self) -> str:
        """The endpoint that it binds; empty for a trainer of parameter servers."""
        return self.role.current_endpoint

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that others must reach it at."""
        return (split_endpoint(self.endpoint)[1],) if self.endpoint else ()

    @property
    def user_environment(self) -> dict[str, str]:
        """The variables that the user asked for, without variables that follow from the role."""
        derived = _environment(self.role, None)
        names = (*VARIABLES, ALLOW_REMOTE)
        return {k: v for k, v in self.environment.items() if k not in names and derived.get(k) != v}

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as JSON has it."""
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
      entries: one for each process.

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
        """Return the table with endpoints on hosts.

        The first endpoint on a host has this port, and the next ones there those that follow.

        Args:
          places: a host, or its address, for each entry, such as `place` returns.
          port: the first port.
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
        """Return the table with different endpoints.

        Args:
          endpoints: one for each server; one for each trainer if there are no servers.

        Raises:
          ConfigError: another number of endpoints.
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
        """Lines about the roles' command and bandwidth, for people."""
        found = []
        if any(e.argv for e in self.entries):
            found.append(f"each runs: {shlex.join(self.entries[0].argv)}")
        servers, trainers = self.of(PSERVER), self.of(TRAINER)
        if 0 < len(servers) < len(trainers):
            have = "servers have" if len(servers) > 1 else "server has"
            found.append(
                f"{len(servers)} {have} less bandwidth than {len(trainers)} trainers; "
                f"{len(trainers)} servers would not hold up a step"
            )
        return found

    @property
    def title(self) -> str:
        """One line that says how many roles there are."""
        counts = [
            f"{len(found)} {kind}{'s' * (len(found) > 1)}"
            for kind in (PSERVER, TRAINER)
            if (found := self.of(kind))
        ]
        return f"roles of a {self.mode} job: {', '.join(counts)}"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table, under its header."""
        number = lambda n: "-" if n is None else f"{n:,}"
        return [
            (
                e.name,
                e.endpoint or "-",
                *map(number, (e.cores, e.memory, e.sent, e.received)),
                ", ".join(e.away_from) or "-",
                ", ".join(e.beside) or "-",
            )
            for e in self.entries
        ]

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
    """Return the processes of a job, from counts.

    Args:
      mode: "pserver"; or "nccl2", "sharding" or "pipeline", where all processes are trainers.
      trainers, pservers: numbers of both; one pserver by default, and none in other modes.
      command: program and arguments, the same for every process.
      endpoints: of the servers, or of the trainers where there are none; loopback from port 6174 by
        default.
      env: variables to set for all of them.
      cores, memory: processors, and bytes, for each process.

    Raises:
      ConfigError: counts or endpoints that no job has.
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
                f"there are no pservers in mode={mode!r}; leave out pservers={pservers}"
            )
        roles = _connected(trainers, endpoints, "trainer")
    return _table(mode, roles, command, env, {role.name: _Needs(cores, memory) for role in roles})


@dataclasses.dataclass(frozen=True)
class _Needs:
    """Needs of one process, as far as they are known."""

    cores: int | None = None
    memory: int | None = None
    sent: int | None = None
    received: int | None = None


@realises(PServerPlan, "roles")
def pserver_roles(
    plan: PServerPlan,
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> RoleTable:
    """Return the processes of a plan with parameter servers: `plan.roles`."""
    roles = roles_of(plan.trainers, tuple(plan.servers))
    costs = {c.role: c for c in plan.costs()}
    of = lambda role: costs[role.current_endpoint if role.is_pserver else TRAINER]
    needs = {r.name: _Needs(cores, of(r).state_bytes, of(r).sent, of(r).received) for r in roles}
    return _table("pserver", roles, command, env, needs)


@realises(CollectivePlan, "roles")
def collective_roles(
    plan: CollectivePlan,
    command: Sequence[str] = (),
    *,
    processes: int | None = None,
    endpoints: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> RoleTable:
    """Return the processes of a plan with collectives: `plan.roles`. A process has `trainers /
    processes` devices."""
    count = plan.trainers if processes is None else processes
    each = _each("trainers", plan.trainers, count)
    (cost,) = plan.costs()
    needs = _Needs(cores, each * cost.state_bytes, each * cost.sent, each * cost.received)
    roles = _connected(count, endpoints)
    return _table(plan.strategy, roles, command, env, {r.name: needs for r in roles})


@realises(PipelinePlan, "roles")
def pipeline_roles(
    plan: PipelinePlan,
    command: Sequence[str] = (),
    *,
    processes: int | None = None,
    endpoints: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cores: int | None = None,
) -> RoleTable:
    """Return the processes of a pipeline: `plan.roles`. Each has neighbouring stages, with all
    their replicas.

    Bytes between stages are known where each process has the stages of one device.
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
    check_int("processes", processes, "a number of processes", least=1)
    each, odd = divmod(total, processes)
    if odd or not each:
        raise ConfigError(
            f"processes={processes} do not divide the plan's {total} {what}; write a divisor of "
            f"{total}"
        )
    return each


def _connected(
    count: int, endpoints: Sequence[str] | None, what: str = "process"
) -> tuple[Role, ...]:
    found = endpoints or _loopback(count)
    _check_count("endpoints", found, count, what)
    return trainer_roles(found)


def _check_count(name: str, found: Sequence[str], count: int, what: str) -> None:
    """Raise ConfigError unless there is one entry for each role of a kind."""
    if len(found) != count:
        raise ConfigError(f"{name} has {len(found)} entries; give {count}, one for each {what}")


def _loopback(count: int) -> list[str]:
    return [f"127.0.0.1:{PORT + i}" for i in range(count)]


def observer_endpoint(trainer_endpoints: Sequence[str]) -> str:
    """Choose the endpoint of trainer 0 for `dtrans status`: one port above all endpoints.

    It is for collectives. Servers answer at their endpoints, and a single trainer does not answer.

    Args:
      trainer_endpoints: endpoints of all trainers, in order; none with servers.

    Returns:
      An endpoint; empty without one, or if no port is left.

    Example:
      >>> from dtrans.hosts.role_table import observer_endpoint
      >>> observer_endpoint(["gpu1:6174", "gpu1:6175", "gpu2:6174"])
      'gpu1:6176'
    """
    if len(trainer_endpoints) < 2:
        return ""
    port = 1 + max(split_endpoint(e)[1] for e in trainer_endpoints)
    return f"{trainer_endpoints[0].rpartition(':')[0]}:{port}" if port < 65536 else ""


def _environment(role: Role, user: Mapping[str, str] | None) -> dict[str, str]:
    user = user or {}
    endpoints = role.pserver_endpoints or role.trainer_endpoints
    is_remote = not all(is_loopback(split_endpoint(e)[0]) for e in endpoints)
    observers = observer_endpoint(role.trainer_endpoints)
    # trainers that replace each other answer no observers
    drops = user.get(LOSS) == "drop"
    status = {STATUS: observers} if observers and not drops else {}
    remote = {ALLOW_REMOTE: "1"} if is_remote else {}
    return {**status, **user, **role.environment(), **remote}


def _table(
    mode: str,
    roles: Sequence[Role],
    command: Sequence[str],
    env: Mapping[str, str] | None,
    needs: Mapping[str, _Needs],
) -> RoleTable:
    asks = servers_stand_alone(
        roles[0].trainers,
        [_traffic(needs[r.name].received, needs[r.name].sent) for r in roles if r.is_pserver],
    )
    many = sum(r.is_pserver for r in roles) > 1
    entries = []
    for role in roles:
        away: tuple[str, ...]
        beside: tuple[str, ...]
        if role.mode != "pserver":
            away, beside = (), (TRAINER,)
        elif role.is_trainer:
            away, beside = _apart(PSERVER, asks)
        else:
            away, beside = _apart(TRAINER, asks)
            away += (PSERVER,) * many
        n = needs[role.name]
        entries.append(
            RoleEntry(
                role,
                tuple(command),
                _environment(role, env),
                n.cores,
                n.memory,
                n.sent,
                n.received,
                away,
                beside,
            )
        )
    return RoleTable(mode, tuple(entries))


def _apart(kind: str, asks: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ((kind,), ()) if asks else ((), (kind,))


# -- placement -------------------------------------------------------------------------------------

Traffic = tuple[float, float]  # bytes that a server takes from all trainers, and gives to them


def _traffic(received: int | None, sent: int | None) -> Traffic:
    return (1.0, 1.0) if received is None or sent is None else (float(received), float(sent))


def servers_stand_alone(trainers: int, servers: Sequence[Traffic]) -> bool:
    """Return True if steps are faster with servers on separate hosts than on hosts of trainers.

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
    """Return a host for each entry of a table.

    Trainers are dealt out to hosts one by one. Then each server goes where the busiest link carries
    the fewest bytes, by the formula of this module. Where all processes are trainers they fill host
    after host: neighbours exchange most.

    Args:
      hosts: name of each, and its slots for processes. The order decides between equals.

    Raises:
      ConfigError: too few slots, or a host that is listed twice.

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
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"host {twice[0]} is listed twice; write it once, with the sum of its slots"
        )
    slots_of = np.array([slots for _, slots in listed], int)
    missing = len(table) - int(slots_of.sum())
    if missing > 0:
        shown = ",".join(f"{name}:{slots}" for name, slots in listed) or "none"
        raise ConfigError(
            f"the hosts {shown} have slots for {len(table) - missing} processes, and these are "
            f"{table.title}; add hosts or slots for {missing}"
        )
    servers, trainers = table.of(PSERVER), table.of(TRAINER)
    if not servers:
        return tuple(np.repeat(names, slots_of)[: len(table)].tolist())

    traffic = [_traffic(e.received, e.sent) for e in servers]
    best: _Links | None = None
    # hosts as they are listed, then those with room for servers beside a trainer
    orders = np.arange(len(names)), np.argsort(-slots_of, kind="stable")
    for order in orders:
        at = _dealt(len(trainers), order, slots_of)
        links = _Links(len(trainers), traffic, np.bincount(at, minlength=len(names)))
        links.put_all(slots_of)
        links.trainers_at = at
        if best is None or links.busiest < best.busiest * (1 - 1e-9):
            best = links
    assert best is not None
    return tuple(values_at(names, (*best.servers_at, *best.trainers_at)))


def _dealt(count: int, hosts: np.ndarray, slots: np.ndarray) -> list[int]:
    """Deal processes out to hosts, one to each in turn, until they are full."""
    turns = [(turn, i) for i, h in enumerate(hosts) for turn in range(min(slots[h], count))]
    return [int(hosts[i]) for _, i in sorted(turns)[:count]]


class _Links:
    """Bytes over the link of each host, in either direction, during the placement of servers.

    Servers without a host are elsewhere, so that placing one changes the bytes of its host only.
    """

    def __init__(self, trainers: int, servers: Sequence[Traffic], trainers_on: np.ndarray) -> None:
        self.trainers, self.servers, self.on = trainers, servers, trainers_on
        self.count = trainers_on.copy()  # of processes
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
        """Return the bytes of each link, out and in, if server j were behind it."""
        sent, received = (x / self.trainers for x in self.servers[j])
        others = self.trainers - self.on
        out = self.out - self.on * sent + others * received
        return out, self.into - self.on * received + others * sent

    def put(self, j: int, host: int) -> None:
        """Place a server."""
        out, into = self.with_server(j)
        self.out[host], self.into[host] = out[host], into[host]
        self.count[host] += 1
        self.servers_at[j] = host

    def put_all(self, slots: np.ndarray) -> None:
        """Place all servers, the largest first, each where its link is the least busy."""
        for j in sorted(range(len(self.servers)), key=lambda j: -max(self.servers[j])):
            now, then = np.maximum(self.out, self.into), np.maximum(*self.with_server(j))
            # the busiest link if a host took the server: the host's link, or the busiest other
            *_, second, first = np.sort(np.r_[0.0, now])
            busiest = np.maximum(then, np.where(now == first, second, first))
            unit = max(busiest.max(), 1e-30)  # equals are equal, whatever rounding says
            keys = [np.round(x / unit, 9) for x in (busiest, then)]
            free = np.flatnonzero(self.count < slots)
            order = np.lexsort([free, self.count[free], keys[1][free], keys[0][free]])
            self.put(j, int(free[order[0]]))
