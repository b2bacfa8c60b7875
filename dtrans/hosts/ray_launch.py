"""Launch of a job on a Ray cluster: `dtrans launch --on ray`.

`dtrans.run.distributed.launcher` starts the roles (processes) and waits for them. It calls methods
of `OnRay` for all that differs from a job on one host. Each role has an actor, which starts the
role's process on its node: the same script with the same variables as on one host. The actor
streams the process's output to the launcher, line by line.

Ray ends an actor when the driver ends. On the actor's node, `dtrans.run.distributed.orphan_guard`
then ends the actor's process.
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
from dtrans.hosts.connection import carried_variables
from dtrans.hosts.ray_actor import RoleProcess
from dtrans.hosts.ray_group import RayGroup, RayPlacement, has_accelerator, one_line, ray_of
from dtrans.run.distributed.child_process import TAIL, Child, Emit, Guard
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.site import Site
from dtrans.run.net.ended_roles import EndedRoles
from dtrans.run.net.net_options import ALLOW_REMOTE
from dtrans.run.net.sockets import DEADLINE


LOST = 255  # the exit code of a role whose actor has ended
LINES = 1000  # lines of output in one message of an actor, at most
# prefixes of the variables that roles get from this process
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
    """Start one process per role of a job on a Ray cluster, and wait until all have ended.

    All processes run the same command. Environment variables tell each process its role.

    Args:
      command: program and arguments. If the program is this process's Python, each node runs its
        own interpreter instead. The working directory must be at the same path on all nodes.
      address, trainers_on, trainer_resources, server_resources: as in `plan.on_ray`.
      **options: options of `dtrans.run.distributed.launcher.launch`.

    Raises:
      LaunchError: a role failed, or its node was lost.
      DeadlineError: the cluster has no free resources.
      ConfigError: Ray is not installed, or an option has an invalid value.
    """
    if options.get("restarts"):
        raise ConfigError(
            f"restarts={options['restarts']} is not for jobs on Ray; leave restarts out"
        )
    one = {"CPU": 1.0}
    placement = RayPlacement(1, 0, trainers_on, trainer_resources or one, server_resources or one)
    with OnRay(ray_of(address), placement) as site:
        launch(command, site=site, **options)


def resources(option: str, text: str) -> dict[str, float]:
    """Parse the resources of a role: `CPU=4,GPU=1`.

    Args:
      option: the name of the command line's option, for the error.
      text: its value.

    Raises:
      ConfigError: the text is not a list of resources.
    """
    found = {}
    for item in text.split(","):
        name, _, amount = item.strip().partition("=")
        try:
            found[name] = float(amount)
        except ValueError as e:
            raise ConfigError(
                f"{option} {text} is not a list of resources; write it as CPU=4,GPU=1"
            ) from e
    return found


class ScriptActor(RoleProcess):
    """Ray actor that runs a script as one role of a job, in a separate process on its node.

    The launcher calls `run`. While it runs, the launcher may call `signal` and `tell_ended`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._events: SimpleQueue[Any] = SimpleQueue()

    def signal(self, signum: int) -> None:
        """Send a signal to the process and to its child processes."""
        self._events.put(signum)

    def tell_ended(self, role: str, how: str, generation: int) -> None:
        """Inform the role's process that another role of the job has ended.

        Args:
          role: name of the other role, such as "trainer 1".
          how: the way in which it ended, such as "exit code 1".
          generation: number of the job's current generation (the time between two failures of the
            job).
        """
        self._events.put((role, how, generation))

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str, python: str
    ) -> Iterator[Any]:
        """Run the process; yield its output and exit status.

        Args:
          command: program and arguments.
          environment: variables in addition to those of this node.
          directory: the working directory.
          python: the driver's interpreter. A command that names it runs the node's interpreter.

        Yields:
          Lists of [stream, line]; at the end the exit status in the form of `subprocess`.

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
                # collect the lines that are in the queue, up to another event or LINES
                lines = []
                event = events.get()
                while isinstance(event, list):
                    lines.append(event)
                    event = None
                    if len(lines) < LINES:
                        event = _next(events)
                if isinstance(event, int):
                    child.signal(event)
                elif isinstance(event, tuple):
                    ended.note(*event)
                if lines:
                    yield lines
            child.reap()
            guard.remove(child)
        # lines that arrived before the output streams were closed
        rest = []
        while (event := _next(events)) is not None:
            if isinstance(event, list):
                rest.append(event)
        yield rest
        yield child.returncode


def _next(events: SimpleQueue[Any]) -> Any:
    """Return the next event; None if the queue is empty."""
    try:
        return events.get_nowait()
    except queue.Empty:
        return None


class RayChild(Child):
    """Role on a node of a Ray cluster, as the launcher sees it: its output, signals and end.

    Args:
      role: the role.
      node: the name of the role's node in messages.
      actor: the role's `ScriptActor`.
      order: the arguments of `ScriptActor.run`.
      ray: the module.
      events, emit: as for `Child`.
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
        """Tell the actor to start the role's process, and start a thread that reads its output."""
        lines = self._actor.run.options(num_returns="streaming").remote(*self._order)
        self._reader = self._thread(self._follow, lines)

    def _follow(self, results: Any) -> None:
        """Emit the lines that the actor yields, until the role has ended."""
        from ray.exceptions import RayError, RayTaskError

        try:
            for ref in results:
                found = self._ray.get(ref)
                if isinstance(found, int):
                    self._status = found
                    break
                for stream, line in found:
                    self._on_line(stream, line)
        except RayTaskError as e:
            self._lost = str(e.cause)
        except RayError as e:
            self._lost = f"the end of its actor; Ray says: {one_line(e)}"
        self._events.put(self)

    @property
    def pid(self) -> int:
        """0, because the role is not a process of this host."""
        return 0

    @property
    def returncode(self) -> int:
        """Exit status of the role, from its actor."""
        return LOST if self._status is None else self._status

    def how(self) -> str:
        """Return the way in which a failed role ended, such as "exit code 1".

        Messages contain the result after the words `failed with`.
        """
        if self._status is None:
            return self._lost
        return super().how()

    def signal(self, signum: int) -> None:
        """Send a signal to the role's processes. SIGKILL kills the actor, which ends the role."""
        if signum == signal.SIGKILL:
            self._ray.kill(self._actor)
        else:
            self._actor.signal.remote(signum)

    def tell_ended(self, role: str, how: str, generation: int) -> None:
        """Inform this role that another role has ended, so that it does not wait for that role.

        The arguments are those of `ScriptActor.tell_ended`.
        """
        self._actor.tell_ended.remote(role, how, generation)

    def reap(self) -> None:
        """Wait until the last line of the role has been emitted."""
        self._reader.join()


class OnRay(Site):
    """Nodes of a Ray cluster on which a launcher starts the roles of a job.

    It is a context manager that ends all actors.

    Args:
      ray: the module, connected.
      placement: resources and distribution of the roles. Its numbers of roles are not used.
    """

    is_this_host = False

    def __init__(self, ray: Any, placement: RayPlacement) -> None:
        self._ray, self._placement = ray, placement
        self._group: RayGroup | None = None

    def roles(
        self,
        mode: str,
        trainers: int,
        pservers: int,
        *,
        endpoints: Sequence[str] = (),
        snapshots: str | os.PathLike[str] | None = None,
    ) -> tuple[Role, ...]:
        """Start an actor for every role of the job; return the roles, with endpoints.

        Jobs on Ray have no restarts, so `endpoints` is empty, and `snapshots` is None.
        """
        servers = 0 if mode == "nccl2" else pservers
        placement = dataclasses.replace(self._placement, trainers=trainers, pservers=servers)
        # two calls at a time, so that `signal` and `tell_ended` can run during `run`
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
        """Return default variables of a role, which the user can replace.

        They allow connections from other nodes. A role without a GPU or TPU computes on CPUs.

        Ray itself sets the variables that select a role's GPUs.
        """
        bundle = self._placement.server_resources
        if role.is_trainer:
            bundle = self._placement.trainer_resources
        found = {ALLOW_REMOTE: "1"}
        if not has_accelerator(bundle):
            found["JAX_PLATFORMS"] = "cpu"
        if role.mode == "nccl2":
            found["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"
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
        """Return the launcher's view of a role. Its actor starts the role's process at `begin`."""
        assert self._group is not None
        order = (command, carried_variables(env, CARRIED), os.getcwd(), sys.executable)
        name = role.name
        return RayChild(
            role, self._group.nodes[name], self._group.actors[name], order, self._ray, events, emit
        )

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, *failed: object) -> None:
        if self._group is not None:
            self._group.end()
