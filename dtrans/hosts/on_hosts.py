"""Launch of a job on several hosts: `dtrans launch --hosts`.

`dtrans.run.distributed.launcher` starts the roles (processes) and waits for them. It calls methods
of `SeveralHosts` for all that differs from a job on one host. First `dtrans.hosts.host_check`
checks all hosts. Then an agent on each host starts the host's roles (`dtrans.hosts.remote_child`).
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dtrans.endpoints import is_loopback
from dtrans.hosts.connection import carried_variables, connection
from dtrans.hosts.host_check import FoundHost, check_hosts
from dtrans.hosts.host_list import HostEntry
from dtrans.hosts.remote_child import RemoteChild
from dtrans.hosts.role_states import RoleStates
from dtrans.hosts.role_table import place, role_table
from dtrans.run.distributed.child_process import Child, Emit
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.role_output import say
from dtrans.run.distributed.site import Site, check_place, jax_variables, roles_at
from dtrans.run.net.net_options import ALLOW_REMOTE


# prefixes of the variables that roles get from this process; other variables are the host's own
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
AT_ONCE = 8  # connections to one host that are opened at once; sshd may refuse more than ten


def launch_on_hosts(
    command: Sequence[str],
    hosts: Sequence[HostEntry],
    *,
    rsh: str = "ssh",
    python: str = sys.executable,
    carried: Sequence[str] = (),
    **options: Any,
) -> None:
    """Start one process per role of a job on several hosts, and wait until all have ended.

    All processes run the same command. Environment variables tell each process its role.

    Args:
      command: program and arguments. If the program is this process's Python, each host runs its
        own interpreter instead.
      hosts: the hosts on which roles may run.
      rsh: `ssh`, or another program that takes a host and a command.
      python: the interpreter on hosts whose entry names none.
      carried: names of further variables that roles get from this process's environment.
      **options: options of `dtrans.run.distributed.launcher.launch`.

    Raises:
      LaunchError: hosts cannot run roles, or a role failed.
      ConfigError: there are more roles than slots.
    """
    with RoleStates() as states:
        site = SeveralHosts(
            hosts, states, rsh=rsh, python=python, carried=carried, script=_script(command)
        )
        launch(command, site=site, **options)


def _script(command: Sequence[str]) -> str:
    """Return the path of the script that a command runs; empty for a module or other program."""
    runs_script = (
        len(command) > 1 and command[0] == sys.executable and not command[1].startswith("-")
    )
    if not runs_script:
        return ""
    return command[1]


class SeveralHosts(Site):
    """Hosts of a job on which the launcher starts the roles by ssh.

    Args:
      hosts, rsh, python, carried: as for `launch_on_hosts`.
      states: the table of roles that the user sees.
      script: the path of the script, which every host must have; empty if there is none.
    """

    is_this_host = False

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

    def roles(
        self,
        mode: str,
        trainers: int,
        pservers: int,
        *,
        endpoints: Sequence[str] = (),
        snapshots: str | os.PathLike[str] | None = None,
    ) -> tuple[Role, ...]:
        """Assign each role of the job to a host, and return the roles with their endpoints.

        Args:
          mode: "pserver" or "nccl2".
          trainers, pservers: numbers of roles.
          endpoints: endpoints of the servers, if the job continues an earlier job; by default free
            ports of the hosts.
          snapshots: the folder of the snapshots, which all hosts must share, or None.
        """
        table = role_table(mode, trainers, pservers if mode == "pserver" else None)
        slots = _slots(len(table), self._hosts)
        names = [host.name for host in self._hosts]
        named = place(table, zip(names, slots, strict=True))
        found = self._check(collections.Counter(named), snapshots)
        for name, host in found.items():
            self._ports[name] = iter(host.ports)

        listening = [name for name, entry in zip(named, table, strict=True) if entry.endpoint]
        if endpoints:
            for name, endpoint in zip(listening, endpoints, strict=True):
                check_place(endpoint, found[name].address, f"host {name}")
        else:
            endpoints = [found[name].endpoint(next(self._ports[name])) for name in listening]
        roles = roles_at(mode, trainers, endpoints)
        for role, name in zip(roles, named, strict=True):
            self._places[role.name] = found[name]
        self._states.begin((name, at.host.name) for name, at in self._places.items())
        return roles

    def _check(
        self, counts: Mapping[str, int], snapshots: str | os.PathLike[str] | None
    ) -> dict[str, FoundHost]:
        """Check the hosts on which roles are placed, and return their addresses and free ports.

        Args:
          counts: the number of roles on each host.
          snapshots: the folder of the snapshots, which these hosts must share, or None.
        """
        idle = ", ".join(host.name for host in self._hosts if host.name not in counts)
        if idle:
            say(f"no role is placed on {idle}, so the launcher does not connect to it")
        used = [host for host in self._hosts if host.name in counts]
        needed = max(counts.values()) + 1  # one more port, for `dtrans status`
        answers = check_hosts(
            used, self._rsh, self._python, script=self._script, ports=needed, snapshots=snapshots
        )
        for answer in answers:
            count = counts[answer.host.name]
            if count > answer.cores:
                say(f"host {answer.host.name} has {answer.cores} cores for {count} roles")
        return {answer.host.name: answer for answer in answers}

    def status_endpoint(self, roles: Sequence[Role]) -> str:
        """Return an endpoint on trainer 0's host, at which trainer 0 can answer `dtrans status`."""
        at = self._places[roles[0].name]
        return at.endpoint(next(self._ports[at.host.name]))

    def variables(self, role: Role) -> dict[str, str]:
        """Return default variables of a role, which the user can replace.

        They allow connections from other hosts, and choose the device of the role.
        """
        host = self._places[role.name]
        found: dict[str, str] = {}
        if not is_loopback(host.address):
            found[ALLOW_REMOTE] = "1"
        if role.mode == "nccl2":
            # the index of a role's device is the role's index among the roles of its host
            neighbours = [name for name, other in self._places.items() if other is host]
            found |= jax_variables(neighbours.index(role.name))
        return found

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
        """Start a role on its host, by an agent that runs there.

        If too many connections to this host are being opened, wait for the first one.
        """
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
        """Show in the table of roles that a role has ended."""
        state = "ended"
        if stopped:
            state = "stopped"
        elif child.code:
            state = f"failed with {child.how()}"
        self._states.change(child.role.name, state)

    def _running(self, child: RemoteChild) -> None:
        self._states.change(child.role.name, "running", child.remote_pid)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a role gets in addition to its host's environment."""
        return carried_variables(env, CARRIED, self._carried)


def _slots(count: int, hosts: Sequence[HostEntry]) -> list[int]:
    """Return the largest number of roles on each host.

    Hosts for which the user gave no number share the remaining roles evenly. For example, 5 roles
    on two hosts, one of them with `slots=2`, give 2 and 3.

    Args:
      count: the number of roles.
      hosts: the hosts.
    """
    slots = [host.slots for host in hosts]
    rest = count - sum(n or 0 for n in slots)
    share = max(1, -(-rest // max(1, slots.count(None))))
    return [share if n is None else n for n in slots]
