"""Jobs on a Ray cluster: each role is an actor.

The process that calls `plan.on_ray()` is the driver.

    portable_plan   pickled plans for the actors
    ray_group       placement, calls, and the end of all actors
    ray_actor       an actor with one role, which runs `plan.on_cluster()`
    on_ray          the job in the driver

Ray starts the processes, and transfers endpoints, the job's secret token, batches and results.
Gradients and parameters do not pass through Ray: roles exchange them directly, as in every job of
processes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from dtrans.checks import check_int, check_number
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.hosts.portable_plan import PortablePlan, pickled
from dtrans.hosts.ray_actor import RoleActor, on_host
from dtrans.hosts.ray_group import (
    RayGroup,
    RayPlacement,
    driver_environment,
    ray_of,
    secret_environment,
)
from dtrans.ir.selection import values_at
from dtrans.job import Job
from dtrans.parameter_server.plan import PServerPlan
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.plan import register_runner
from dtrans.run.net.sockets import DEADLINE, PATIENCE
from dtrans.step_meter import metered


GRACE = 10.0  # seconds that servers with a folder have to save their state when the job fails


@dataclasses.dataclass(frozen=True, eq=False)
class RayState:
    """Handle of the training state, which the driver passes from step to step.

    The actors store the arrays. Only the newest handle of a job is valid, because each step
    replaces the state.

    Attributes:
      number: the number of handles that the job returned before this one.
    """

    number: int


@register_runner(PServerPlan, "ray")
@register_runner(CollectivePlan, "ray")
@register_runner(PipelinePlan, "ray")
class RayJob(Job):
    """A plan that runs as actors of a Ray cluster.

    `step` takes the global batch, and each trainer uses its rows. With `batches` it takes no batch.
    With `batch="local"`, and in asynchronous modes of parameter servers, each trainer has results
    for its part of the batch. The driver averages floating-point scalars over trainers, and stacks
    all other results along a new leading axis.

    An error of an actor ends the job and all actors. The failure of a role or node raises a
    `PeerError` that names both.

    Args:
      plan: the result of `dtrans.pserver`, `dtrans.nccl2`, `dtrans.sharding` or `dtrans.pipeline`.
        The job replaces the plan's server endpoints by endpoints on the cluster's nodes.
      batches: a function of (trainer, step) that returns the step's batch arguments, and runs in
        the trainer's actor. Or a dataset of Ray Data. Its columns have the names of these
        arguments. Each trainer then gets the same number of rows (`streaming_split`), and starts
        again after its last row.
      address: the address of the cluster, as for `ray.init`. The default is the cluster to which
        this process is connected, else the cluster in RAY_ADDRESS, else a new local cluster.
      trainers_on: "PACK" puts trainers on few nodes, "SPREAD" on different nodes. Servers are
        always spread.
      trainer_resources: resources of each trainer, such as {"CPU": 4, "GPU": 1}; by default one
        CPU.
      server_resources: resources of each server; by default one CPU.
      processes: number of trainer actors; by default one for each trainer, rank or stage of the
        plan. With fewer actors, each has several devices. Leave it out for parameter servers.
      rows: rows of one trainer's batch, if `batches` is a dataset.
      checkpoints: the folder for `job.save(path)`, which all nodes share. Parameter servers need
        it.
      env: further variables of the actors. All actors get the driver's variables of JAX, XLA and
        dtrans. A role without a GPU or TPU computes on CPUs.
      deadline: seconds that any wait for another role, or for resources of the cluster, may take.
      patience: seconds of silence after which another role counts as failed.

    Raises:
      ConfigError: Ray is not installed, an option does not fit the plan, or actors cannot rebuild
        the plan.
      DeadlineError: the cluster had no free resources within the deadline.
      PeerError: a role failed.
    """

    is_driver, saves = True, False

    def __init__(
        self,
        plan: Any,
        batches: Any = None,
        *,
        address: str | None = None,
        trainers_on: str = "PACK",
        trainer_resources: Mapping[str, float] | None = None,
        server_resources: Mapping[str, float] | None = None,
        processes: int | None = None,
        rows: int | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        deadline: float = DEADLINE,
        patience: float = PATIENCE,
    ) -> None:
        for name, seconds in (("deadline", deadline), ("patience", patience)):
            check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
        trainers, devices = _shape(plan, processes)
        one = {"CPU": 1.0}
        servers = 0
        if isinstance(plan, PServerPlan):
            servers = len(plan.servers)
        placed = RayPlacement(
            trainers, servers, trainers_on, trainer_resources or one, server_resources or one
        )
        function, dataset = None, batches
        if callable(batches):
            function, dataset = batches, None
        _check_rows(dataset, rows)
        portable = PortablePlan.of(plan)
        ray = ray_of(address)
        sent = pickled((portable, function), ray.cloudpickle)

        self.plan = plan
        self._ray, self._has_batches = ray, batches is not None
        self._folder: Path | None = None
        if checkpoints is not None:
            self._folder = Path(checkpoints).absolute()
        self._state: RayState | None = None
        self._steps = 0
        environment = lambda bundle: driver_environment(bundle, devices) | dict(env or {})
        grace = 0.0
        if servers and checkpoints is not None:
            grace = GRACE
        self._group = RayGroup(ray, RoleActor, placed, environment, deadline, grace=grace)
        try:
            roles = self._group.roles()
            parts = _split_dataset(dataset, self._group)
            shared, secret = ray.put(sent), secret_environment()
            options = {"deadline": deadline, "patience": patience}
            data = {n: (part, rows) for n, part in parts.items()}
            args = {n: (role, secret, shared, data.get(n), options) for n, role in roles.items()}
            self.run_id = self._group.all("begin", args)["trainer 0"]
        except BaseException:
            self._group.end()
            raise

    @property
    def nodes(self) -> dict[str, str]:
        """The Ray id of each role's node, by role name."""
        return dict(self._group.node_ids)

    # -- the state -------------------------------------------------------------------------------

    def init(self, *args: Any) -> RayState:
        spec = self.plan.startup.args
        if len(args) != len(spec):
            raise ConfigError(
                f"init takes {len(spec)} arguments, {len(args)} were given; pass the same "
                "arguments as to dtrans.trace"
            )
        return self._begin("init", _arrays(spec, args))

    def state_of(self, params: Any, opt_state: Any) -> RayState:
        return self._begin("take", _arrays(self.plan.main.args[:2], (params, opt_state)))

    def restore(self, path: str | os.PathLike[str]) -> RayState:
        """Continue with the state of a checkpoint; each actor reads its part.

        Args:
          path: a folder that all nodes share. A relative path is relative to `checkpoints`, if the
            job has this folder.
        """
        return self._begin("restore", str(_absolute(self._folder, path)))

    def _begin(self, method: str, arg: Any) -> RayState:
        """Create the first state in all actors, by one of their methods, and start the servers.

        Args:
          method: the method of `RoleActor`: "init", "take" (given arrays) or "restore".
          arg: the method's argument.
        """
        self._check_open()
        if self._state is not None and self._group.servers:
            raise StateError(
                "the servers of this job already have a state; make a new job for another state"
            )
        stored = self._ray.put(arg)
        folder = None if self._folder is None else str(self._folder)
        self._group.start("serve", dict.fromkeys(self._group.servers, (method, stored, folder)))
        self._call(method, dict.fromkeys(self._group.trainers, (stored,)))
        return self._newest()

    def _newest(self) -> RayState:
        """Return a handle of the new state, and make earlier handles invalid."""
        number = 0 if self._state is None else self._state.number + 1
        self._state = RayState(number)
        return self._state

    def check(self, state: Any) -> None:
        self._check_open()
        if not isinstance(state, RayState):
            raise StateError(
                f"this job takes the state that init or step returned, not {type(state).__name__}"
            )
        if state is not self._state:
            raise StateError(
                "a step has already used this state, or another job returned it; pass the state "
                "that the last step returned"
            )

    @metered
    def step(self, state: RayState, *batch: Any) -> tuple[Any, ...]:
        """Run one step of all trainers; return (state, loss[, aux]).

        Raises:
          BatchError: the job has `batches` and a batch is passed, or both are missing. Also raised
            if trainers cannot divide the rows.
          StateError: the state is not the result of the last step.
        """
        self.check(state)
        arrays = self._put(batch)
        outputs = self._call("step", dict.fromkeys(self._group.trainers, (arrays,)))
        results = outputs["trainer 0"]
        if isinstance(self.plan, PServerPlan) and self.plan.shared is None:
            results = jax.tree.map(lambda *xs: of_each(xs), *outputs.values())
        return (self._newest(), *results)

    def _put(self, batch: Sequence[Any]) -> Any:
        """Put the global batch into Ray's object store; return None if the job has `batches`."""
        if self._has_batches:
            if batch:
                raise BatchError(
                    "this job was created by plan.on_ray(batches), so its trainers read their "
                    "batches themselves; call job.step(state) without a batch"
                )
            return None
        specs = self.plan.main.args[2:]
        if len(batch) != len(specs):
            raise BatchError(
                f"the step takes {len(specs)} batch arguments, {len(batch)} were given; pass "
                "the same arguments as to dtrans.trace"
            )
        return self._ray.put(_arrays(specs, batch))

    def with_hyperparameters(self, state: RayState, **values: float) -> RayState:
        self.check(state)
        self._call("change", dict.fromkeys(self._group.trainers, ("with_hyperparameters", values)))
        return self._newest()

    def params(self, state: RayState) -> Any:
        return self._read("params", state)

    def opt_state(self, state: RayState) -> Any:
        if isinstance(self.plan, PServerPlan) and not self.plan.push_every:
            raise ConfigError(
                "the optimizer's state is on the servers; call job.save(path), then "
                "dtrans.checkpoint.load(path, main)"
            )
        return self._read("opt_state", state)

    def _read(self, what: str, state: RayState) -> Any:
        self.check(state)
        found = self._call("read", {n: (what, n == "trainer 0") for n in self._group.trainers})
        spec = self.plan.main.args[("params", "opt_state").index(what)]
        return spec.unflatten(found["trainer 0"])

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, tag: str | None = None) -> None:
        """Save a checkpoint of the newest state. Each actor writes its pieces.

        Args:
          path: a folder for this checkpoint, which all nodes share. A relative path is relative to
            `checkpoints`, if the job has this folder. With parameter servers, the checkpoint must
            be directly in `checkpoints`.
          tag: as in `dtrans.checkpoint.save`.

        Raises:
          ConfigError: the path is not in the servers' folder.
          CheckpointError: servers could not write the checkpoint; the job continues.
        """
        self._check_open()
        if self._state is None:
            raise StateError("the job has no state to save; call job.init(...) first")
        folder = _absolute(self._folder, path)
        if self._group.servers and folder.parent != self._folder:
            raise ConfigError(
                f"the servers of this job save in {self._folder}, and {folder} is not in this "
                f"folder; call plan.on_ray(checkpoints={str(folder.parent)!r})"
            )
        self._call("save", dict.fromkeys(self._group.trainers, (str(folder), tag)))

    # -- calls, and the end ----------------------------------------------------------------------

    def _call(self, method: str, args: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Call a method of several actors, and return the result of each, by name.

        If an error has ended all actors, the job is closed, too.

        Args:
          method: the name of the method.
          args: the method's arguments, by the names of the actors to call.
        """
        try:
            return self._group.all(method, args)
        finally:
            if not self._group.actors:
                super().close()

    def lower(self, state: RayState, *batch: Any) -> NoReturn:
        raise ConfigError(
            "the step is compiled in the actors; call plan.on_mesh().lower(...) or "
            "plan.simulate().lower(...) instead"
        )

    def close(self) -> None:
        """End the job: close the trainers, wait for the servers, and remove all actors."""
        if self._closed:
            return
        super().close()
        try:
            if self._state is not None:
                self._group.all("close", dict.fromkeys(self._group.trainers, ()))
                self._group.finish()
        finally:
            self._group.end()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            super().close()
            self._group.end()


def _absolute(folder: Path | None, path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a checkpoint."""
    if folder is not None:
        return (folder / path).absolute()
    return Path(path).absolute()


def _check_rows(dataset: Any, rows: int | None) -> None:
    """Raise ConfigError for a dataset without `rows`, and for `rows` without a dataset."""
    if dataset is not None:
        check_int("rows", rows, "a number of rows for each trainer (because batches is a dataset)")
    elif rows is not None:
        raise ConfigError(
            f"rows={rows} is for a dataset of Ray Data, which `batches` is not; leave rows out"
        )


def _split_dataset(dataset: Any, group: RayGroup) -> dict[str, Any]:
    """Divide a dataset of Ray Data among the trainers; return each trainer's part, by name.

    The result is empty if there is no dataset.
    """
    if dataset is None:
        return {}
    if not hasattr(dataset, "streaming_split"):
        raise ConfigError(
            f"batches is a {type(dataset).__name__}, expected a function (trainer, step) -> batch, "
            "or a dataset of Ray Data; pass other batches to job.step(state, *batch)"
        )
    names = group.trainers
    at = values_at(group.node_ids, names)
    parts = dataset.streaming_split(len(names), equal=True, locality_hints=at)
    return dict(zip(names, parts, strict=True))


def _shape(plan: Any, processes: int | None) -> tuple[int, int]:
    """Return the number of trainer actors, and how many CPU devices each one needs."""
    if isinstance(plan, PServerPlan):
        if processes is not None:
            raise ConfigError(
                f"processes={processes} is not for plans with parameter servers, whose trainers "
                "are separate processes; leave processes out"
            )
        return plan.trainers, 1
    if isinstance(plan, PipelinePlan):
        total = plan.options.num_stages
        each = plan.options.replicas * max(plan.model.device_counts)
    else:
        total, each = plan.trainers, plan.devices_per_trainer
    count = total if processes is None else processes
    check_int("processes", count, "a number of actors")
    if total % count:
        raise ConfigError(
            f"processes={count} does not divide the {total} trainers, ranks or stages of the plan; "
            f"pass a divisor of {total}"
        )
    return count, total // count * each


def _arrays(specs: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    """Return the leaves of pytrees as NumPy arrays.

    Args:
      specs: the structure of each tree.
      trees: the trees.
    """
    found: list[Any] = []
    for spec, tree in zip(specs, trees, strict=True):
        found += map(on_host, spec.flatten(tree))
    return found


def of_each(xs: Sequence[Any]) -> Any:
    """Merge the trainers' values of one result, such as the loss of each trainer's rows.

    Floating-point scalars are averaged. Other results are stacked along a new leading axis.
    """
    if not np.ndim(xs[0]) and np.issubdtype(np.asarray(xs[0]).dtype, np.floating):
        return np.mean(xs, dtype=np.asarray(xs[0]).dtype)
    return np.stack([np.asarray(x) for x in xs])
