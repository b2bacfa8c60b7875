"""Launching on several hosts: `dtrans launch --hosts`.

The launcher is `dtrans.run.distributed.launcher`; `SeveralHosts` says where its roles run. Hosts
are asked first (`dtrans.hosts.host_check`). Then each role gets an agent on its host
(`dtrans.hosts.remote_child`).
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dtrans.endpoints import is_loopback
from dtrans.hosts.connection import connection
from dtrans.hosts.host_check import FoundHost, check_hosts
from dtrans.hosts.host_list import HostEntry
from dtrans.hosts.remote_child import RemoteChild
from dtrans.hosts.role_states import RoleStates
from dtrans.hosts.role_table import place, role_table
from dtrans.ir.selection import values_at
from dtrans.run.distributed.child_process import Child, Emit
from dtrans.run.distributed.launcher import Site, jax_variables, launch, roles_at, say
from dtrans.run.distributed.role import Role
from dtrans.run.net.net_options import ALLOW_REMOTE


# roles get this process's settings of JAX and its libraries; other variables are the host's
CARRIED = (
    "DTRANS_",
    "JAX_",
    "XLA_",
    "TF_",
    "NCCL_",
    "GLOO_",
    "TPU_",
    "LIBTPU_",
    "OMP_",
    "MKL_",
    "PYTHON",
)
AT_ONCE = 8  # connections to a host that are being made; sshd drops some beyond ten


def launch_on_hosts(
    command: Sequence[str],
    hosts: Sequence[HostEntry],
    *,
    rsh: str = "ssh",
    python: str = sys.executable,
    carried: Sequence[str] = (),
    **options: Any,
) -> None:
    """Run one command as every role of a job, on several hosts, and wait until all have ended.

    Args:
      command: program and arguments; this process's Python stands for the one of each host.
      hosts: where roles may run.
      rsh: the command that reaches a host: `ssh`, or another that takes a host and a command.
      python: the interpreter of hosts that name none.
      carried: names of variables of this process's environment that roles get too.
      **options: options of `dtrans.run.distributed.launcher.launch`.

    Raises:
      LaunchError: hosts cannot take part, or a role failed.
      ConfigError: there are more roles than slots.
    """
    with RoleStates() as states:
        site = SeveralHosts(
            hosts, states, rsh=rsh, python=python, carried=carried, script=_script(command)
        )
        launch(command, site=site, **options)


def _script(command: Sequence[str]) -> str:
    """Return the script of a command of Python; empty for a module or another program."""
    runs_script = (
        len(command) > 1 and command[0] == sys.executable and not command[1].startswith("-")
    )
    return command[1] if runs_script else ""


class SeveralHosts(Site):
    """Roles of a job on several hosts."""

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        states: RoleStates,
        *,
        rsh: str,
        python: str,
        carried: Sequence[str],
        script: str,
    ) -> None:
        self._hosts, self._states = hosts, states
        self._rsh, self._python, self._carried, self._script = rsh, python, carried, script
        self._places: dict[str, FoundHost] = {}
        self._ports: dict[str, Iterator[int]] = {}
        self._children: dict[str, list[RemoteChild]] = collections.defaultdict(list)

    def roles(self, mode: str, trainers: int, pservers: int) -> tuple[Role, ...]:
        """Return every role of the job, with endpoints on the hosts where they run."""
        table = role_table(mode, trainers, pservers if mode == "pserver" else None)
        named = place(
            table,
            zip([host.name for host in self._hosts], _slots(len(table), self._hosts), strict=True),
        )
        counts = collections.Counter(named)
        used = [host for host in self._hosts if host.name in counts]
        idle = [host.name for host in self._hosts if host.name not in counts]
        if idle:
            say(f"no role is placed on {', '.join(idle)}, and nothing is asked there")
        needed = max(counts.values()) + 1  # one for observers of collectives
        answers = check_hosts(used, self._rsh, self._python, script=self._script, ports=needed)
        found = {f.host.name: f for f in answers}
        for name, at in found.items():
            if counts[name] > at.cores:
                say(f"host {name} has {at.cores} cores for {counts[name]} roles")
        self._ports = {name: iter(at.ports) for name, at in found.items()}
        listening = [name for name, entry in zip(named, table, strict=True) if entry.endpoint]
        endpoints = [found[name].endpoint(next(self._ports[name])) for name in listening]
        roles = roles_at(mode, trainers, endpoints)
        places = values_at(found, named)
        self._places = {role.name: at for role, at in zip(roles, places, strict=True)}
        self._states.begin((name, at.host.name) for name, at in self._places.items())
        return roles

    def status_endpoint(self, roles: Sequence[Role]) -> str:
        """Return an endpoint on the host of trainer 0."""
        at = self._places[roles[0].name]
        return at.endpoint(next(self._ports[at.host.name]))

    def variables(self, role: Role) -> dict[str, str]:
        """Return variables of remote connections, and of a trainer's device on its host."""
        host = self._places[role.name]
        remote = {} if is_loopback(host.address) else {ALLOW_REMOTE: "1"}
        if role.mode != "nccl2":
            return remote
        neighbours = [name for name, other in self._places.items() if other is host]
        return remote | jax_variables(neighbours.index(role.name))

    def start(
        self,
        role: Role,
        command: Sequence[str],
        env: Mapping[str, str],
        events: SimpleQueue[Any],
        emit: Emit,
        *,
        inherit_stdout: bool,
    ) -> Child:
        """Start a role on its host."""
        at = self._places[role.name]
        name, children = at.host.name, self._children[at.host.name]
        unsettled = [child for child in children if not child.settled.is_set()]
        if len(unsettled) >= AT_ONCE:
            unsettled[0].settled.wait()
        program = at.python if command[0] == sys.executable else command[0]
        order = {
            "command": [program, *command[1:]],
            "environment": self._environment(env),
            "directory": os.getcwd(),
        }
        agent = connection(self._rsh, at.host, [at.python, "-I", "-S", at.agent])
        child = RemoteChild(
            role, name, agent, order, events, emit, self._running, inherit_stdout=inherit_stdout
        )
        children.append(child)
        return child

    def ended(self, child: Child, *, stopped: bool) -> None:
        """Update the states that the user sees: a role has ended."""
        failed = f"failed with {child.how()}" if child.code else "ended"
        self._states.change(child.role.name, "stopped" if stopped else failed)

    def _running(self, child: RemoteChild) -> None:
        self._states.change(child.role.name, "running", child.remote_pid)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a role gets in addition to those of its host."""
        carried = {
            k: v
            for k, v in env.items()
            if os.environ.get(k) != v or k.startswith(CARRIED) or k in self._carried
        }
        path = [os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
        return carried | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def _slots(count: int, hosts: Sequence[HostEntry]) -> list[int]:
    """Return the slots of each host; hosts without slots share the remaining roles evenly."""
    free = [host for host in hosts if host.slots is None]
    rest = count - sum(host.slots or 0 for host in hosts)
    share = max(1, -(-rest // len(free))) if free else 0
    return [share if host.slots is None else host.slots for host in hosts]
