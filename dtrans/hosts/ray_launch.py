"""Launching on a Ray cluster: `dtrans launch --on ray`.

The launcher is `dtrans.run.distributed.launcher`; `OnRay` says where its roles run. Each role has
an actor, as in `plan.on_ray()`, and the actor starts the role's process on its node: the same
script, with the same variables, as on one host. Lines that the process prints come back as they are
printed.

Ray ends an actor with the driver. `dtrans.run.distributed.orphan_guard`, on the node, ends a
process with its actor.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import queue
import signal
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dtrans.errors import ConfigError, LaunchError
from dtrans.hosts.ray_actor import RoleProcess
from dtrans.hosts.ray_group import RayGroup, RayPlacement, has_accelerator, ray_of
from dtrans.run.distributed.child_process import TAIL, Child, Emit, Guard
from dtrans.run.distributed.launcher import Site, launch
from dtrans.run.distributed.role import Role
from dtrans.run.net.ended_roles import EndedRoles
from dtrans.run.net.net_options import ALLOW_REMOTE
from dtrans.run.net.sockets import DEADLINE


LOST = 255  # the exit code of a role whose actor has gone
LINES = 1000  # of output that come at once, at most
CARRIED = ("DTRANS_", "JAX_", "XLA_", "TF_", "NCCL_", "GLOO_", "TPU_", "LIBTPU_", "PYTHON")


def launch_on_ray(
    command: Sequence[str],
    *,
    address: str | None = None,
    trainers_on: str = "PACK",
    trainer_resources: Mapping[str, float] | None = None,
    server_resources: Mapping[str, float] | None = None,
    **options: Any,
) -> None:
    """Run one command as every role of a job, on a Ray cluster, and wait until all have ended.

    Args:
      command: program and arguments. This process's Python stands for that of each node, and the
        working directory for the one of the same path there.
      address, trainers_on, trainer_resources, server_resources: as in `plan.on_ray`.
      **options: options of `dtrans.run.distributed.launcher.launch`.

    Raises:
      LaunchError: a role failed, or its node has gone. DeadlineError: the cluster has no room.
      ConfigError: Ray is not installed, or options that do not fit.
    """
    if options.get("restarts"):
        raise ConfigError(
            f"restarts={options['restarts']} is for roles on this host or on hosts=; leave it out "
            "on Ray"
        )
    one = {"CPU": 1.0}
    placement = RayPlacement(1, 0, trainers_on, trainer_resources or one, server_resources or one)
    with OnRay(ray_of(address), placement) as site:
        launch(command, site=site, **options)


def resources(option: str, text: str) -> dict[str, float]:
    """Return the resources of a role, from text such as `CPU=4,GPU=1`.

    Args:
      option: of the text, for an error.

    Raises:
      ConfigError: the text is no such list.
    """
    found = {}
    for item in text.split(","):
        name, _, amount = item.strip().partition("=")
        try:
            found[name] = float(amount)
        except ValueError as e:
            raise ConfigError(
                f"{option} {text} is no list of resources: write it as CPU=4,GPU=1"
            ) from e
    return found


class ScriptActor(RoleProcess):
    """Actor that starts a role as a process; `signal` and `tell_ended` come while it runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._events: SimpleQueue[Any] = SimpleQueue()

    def signal(self, signum: int) -> None:
        """Send a signal to the process and to all that it started."""
        self._events.put(signum)

    def tell_ended(self, role: str, how: str) -> None:
        """Tell the process that another role has ended."""
        self._events.put((role, how))

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str, python: str
    ) -> Iterator[Any]:
        """Run the process; yield its output and exit status.

        Args:
          command: program and arguments.
          environment: variables in addition to those of this node.
          directory: to work in.
          python: the driver's interpreter, for which the node's stands in.

        Yields:
          Lists of lines, each with its stream; at the end the exit status, as `subprocess` gives
          it.

        Raises:
          LaunchError: the process cannot be started.
        """
        self.release()
        role: Any = types.SimpleNamespace(name=self._name)
        events = self._events
        with Guard(sys.executable) as guard, EndedRoles() as ended:
            env = {**os.environ, **environment, **ended.environment}
            try:
                os.chdir(directory)
            except OSError as e:
                raise LaunchError(
                    f"{self._name} cannot be started: {directory}: {e.strerror}"
                ) from e
            if command[0] == python:
                command = [sys.executable, *command[1:]]
            child = Child(
                role, command, env, events, lambda stream, line: events.put([stream, line])
            )
            guard.add(child)
            child.begin()
            event: Any = None
            while event is not child:
                lines = []
                event = events.get()
                while isinstance(event, list):
                    lines.append(event)
                    event = _next(events) if len(lines) < LINES else None
                if isinstance(event, int):
                    child.signal(event)
                elif isinstance(event, tuple):
                    ended.note(*event)
                if lines:
                    yield lines
            child.reap()
            guard.remove(child)
        rest = list(iter(lambda: _next(events), None))
        yield [event for event in rest if isinstance(event, list)]
        yield child.returncode


def _next(events: SimpleQueue[Any]) -> Any:
    """Return the next event, or None where there is none yet."""
    try:
        return events.get_nowait()
    except queue.Empty:
        return None


class RayChild(Child):
    """A role on a node of a Ray cluster, in the launcher.

    Args:
      role: its role.
      node: its node, as in messages.
      actor: its `ScriptActor`.
      order: the arguments of `ScriptActor.run`.
      ray: the module.
      events: gets this object when the role has ended.
      emit: called with a stream and a line.
    """

    def __init__(
        self,
        role: Role,
        node: str,
        actor: Any,
        order: Sequence[Any],
        ray: Any,
        events: SimpleQueue[Any],
        emit: Emit,
    ) -> None:
        self.role, self.where = role, f" on {node}"
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self._emit, self._actor, self._order, self._ray = emit, actor, order, ray
        self._events = events
        self._status: int | None = None
        self._lost = ""

    def begin(self) -> None:
        """Let the role begin."""
        lines = self._actor.run.options(num_returns="streaming").remote(*self._order)
        self._reader = self._thread(self._follow, lines)

    def _follow(self, happenings: Any) -> None:
        """Pass on the lines that the actor yields, until the role has ended."""
        from ray.exceptions import RayError, RayTaskError

        try:
            for ref in happenings:
                found = self._ray.get(ref)
                if isinstance(found, int):
                    self._status = found
                    break
                for stream, line in found:
                    self._on_line(stream, line)
        except RayTaskError as e:
            self._lost = str(e.cause)
        except RayError as e:
            said = " ".join(x for x in str(e).splitlines() if x and not x.startswith("\t"))
            self._lost = f"the loss of its actor; Ray says: {said}"
        self._events.put(self)

    @property
    def pid(self) -> int:
        """0: the role is no process of this host."""
        return 0

    @property
    def returncode(self) -> int:
        """Exit status of the role, from its actor."""
        return LOST if self._status is None else self._status

    def how(self) -> str:
        """Return how an ended role failed, for messages: the words after `failed with`."""
        return super().how() if self._status is not None else self._lost

    def signal(self, signum: int) -> None:
        """Send a signal to the role's processes; a kill ends the actor, and the role with it."""
        if signum == signal.SIGKILL:
            self._ray.kill(self._actor)
        else:
            self._actor.signal.remote(signum)

    def tell_ended(self, role: str, how: str) -> None:
        """Tell this role that another has ended."""
        self._actor.tell_ended.remote(role, how)

    def reap(self) -> None:
        """Wait until the last line has been passed on."""
        self._reader.join()


class OnRay(Site):
    """Roles of a job on the nodes of a Ray cluster. A context manager, which gives the nodes back.

    Args:
      ray: the module, connected.
      placement: where roles may run; the launcher says how many there are.
    """

    def __init__(self, ray: Any, placement: RayPlacement) -> None:
        self._ray, self._placement = ray, placement
        self._group: RayGroup | None = None

    def roles(self, mode: str, trainers: int, pservers: int) -> tuple[Role, ...]:
        """Return every role of the job, with endpoints on the nodes where they run."""
        servers = 0 if mode == "nccl2" else pservers
        placement = dataclasses.replace(self._placement, trainers=trainers, pservers=servers)
        options = {"max_concurrency": 2}
        self._group = RayGroup(
            self._ray, ScriptActor, placement, lambda bundle: {}, DEADLINE, options
        )
        found = self._group.roles()
        return tuple(sorted(found.values(), key=lambda role: role.is_trainer))

    def status_endpoint(self, roles: Sequence[Role]) -> str:
        """Return an endpoint on the node of trainer 0."""
        assert self._group is not None
        return self._group.another_endpoint(roles[0].name)

    def variables(self, role: Role) -> dict[str, str]:
        """Return the variables with which roles connect over the network.

        Ray itself sets the variables of a role's GPUs.
        """
        placed = self._placement
        bundle = placed.trainer_resources if role.is_trainer else placed.server_resources
        found = {ALLOW_REMOTE: "1"}
        found |= {} if has_accelerator(bundle) else {"JAX_PLATFORMS": "cpu"}
        return found | {"JAX_ENABLE_PREEMPTION_SERVICE": "0"} if role.mode == "nccl2" else found

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
        """Return a role that its actor will start."""
        assert self._group is not None
        carried = {k: v for k, v in env.items() if os.environ.get(k) != v or k.startswith(CARRIED)}
        path = [os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
        carried |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
        order = (command, carried, os.getcwd(), sys.executable)
        name = role.name
        return RayChild(
            role, self._group.nodes[name], self._group.actors[name], order, self._ray, events, emit
        )

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, *failed: object) -> None:
        if self._group is not None:
            self._group.end()
