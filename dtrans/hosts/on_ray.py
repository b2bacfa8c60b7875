"""Jobs on a Ray cluster: each role is an actor, and the driver is the process that calls
`plan.on_ray()`.

    portable_plan   pickled plans for the actors
    ray_group       placement, calls, and the end of all actors
    ray_actor       an actor with one role, which runs `plan.on_cluster()`
    on_ray          the job in the driver

Ray starts the processes, and carries endpoints, the token, batches and results. Roles exchange
gradients and parameters as in every job of processes.
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
from dtrans.plan import realises
from dtrans.run.net.sockets import DEADLINE, PATIENCE
from dtrans.step_meter import metered


GRACE = 10.0  # seconds in which servers save when the job fails, where they have a folder


@dataclasses.dataclass(frozen=True, eq=False)
class RayState:
    """Handle of a state that actors hold. A job has one at a time: the last that it returned."""

    number: int


@realises(PServerPlan, "ray")
@realises(CollectivePlan, "ray")
@realises(PipelinePlan, "ray")
class RayJob(Job):
    """A plan, running as actors of a Ray cluster.

    `step` takes the global batch, and each trainer gets its rows. It takes no batch if `batches`
    gives trainers theirs. Results come to the driver. With `batch="local"`, and in
    asynchronous modes of parameter servers, each trainer has results of its part. The driver
    averages floating-point scalars of these, and gives all others a leading axis.

    An error of an actor ends the job and all actors. The loss of a role or node raises a
    `PeerError` that names both.

    Args:
      plan: made by `dtrans.pserver`, `dtrans.nccl2`, `dtrans.sharding` or `dtrans.pipeline`. The
        endpoints of its servers only say how many there are.
      batches: a function (trainer, step) -> the step's arguments after its state, which runs in the
        trainer's actor. Or a dataset of Ray Data, whose columns have the names of these arguments.
        Trainers get equally many of its rows (`streaming_split`), and begin again at its end.
      address: of the cluster, as `ray.init` takes it. By default the cluster that this process is
        connected to, or the one that RAY_ADDRESS names, or a new one on this machine.
      trainers_on: "PACK" puts trainers on few nodes, "SPREAD" on different ones. Servers are
        spread.
      trainer_resources, server_resources: for each of them, such as {"CPU": 4, "GPU": 1}; one CPU
        by default.
      processes: number of trainers' actors; by default one for each trainer, rank or stage
        of the plan. With fewer, each has several devices. Not with parameter servers.
      rows: of a trainer's batch, with a dataset.
      checkpoints: the folder of `job.save(path)`, which all nodes see. Parameter servers need it.
      env: variables of the actors. They also get the driver's variables of JAX, XLA and dtrans; a
        role without a GPU or TPU computes on CPUs.
      deadline: seconds that any wait for another role may take, and for room on the cluster.
      patience: seconds without a sign of another role after which it counts as failed.

    Raises:
      ConfigError: Ray is not installed, options that do not fit, or a plan that actors cannot make
        again.
      DeadlineError: no room within the deadline. PeerError: a role failed.
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
        servers = len(plan.servers) if isinstance(plan, PServerPlan) else 0
        placed = RayPlacement(
            trainers, servers, trainers_on, trainer_resources or one, server_resources or one
        )
        function = batches if callable(batches) else None
        dataset = None if function is not None else batches
        _check_rows(dataset, rows)
        portable = PortablePlan.of(plan)
        ray = ray_of(address)
        sent = pickled((portable, function), ray.cloudpickle)

        self.plan = plan
        self._ray, self._has_batches = ray, batches is not None
        self._folder = None if checkpoints is None else Path(checkpoints).absolute()
        self._state: RayState | None = None
        self._steps = 0
        environment = lambda bundle: driver_environment(bundle, devices) | dict(env or {})
        grace = GRACE if servers and checkpoints is not None else 0.0
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
        """The node of each role, by its name: Ray's id of it."""
        return dict(self._group.node_ids)

    # -- the state -------------------------------------------------------------------------------

    def init(self, *args: Any) -> RayState:
        spec = self.plan.startup.args
        if len(args) != len(spec):
            raise ConfigError(f"init takes {len(spec)} arguments, {len(args)} were given")
        return self._begin("init", _arrays(spec, args))

    def state_of(self, params: Any, opt_state: Any) -> RayState:
        return self._begin("take", _arrays(self.plan.main.args[:2], (params, opt_state)))

    def restore(self, path: str | os.PathLike[str]) -> RayState:
        """Return the state of a checkpoint; each actor reads its part.

        Args:
          path: a folder that all nodes see; relative to `checkpoints` if there is one.
        """
        return self._begin("restore", str(self._path(path)))

    def _begin(self, method: str, arg: Any) -> RayState:
        """Create the state of all actors, and start the servers."""
        self._check_open()
        if self._state is not None and self._group.servers:
            raise StateError(
                f"the servers of this job serve already: make another job for another {method}"
            )
        stored = self._ray.put(arg)
        folder = None if self._folder is None else str(self._folder)
        self._group.start("serve", dict.fromkeys(self._group.servers, (method, stored, folder)))
        self._call(method, dict.fromkeys(self._group.trainers, (stored,)))
        return self._newest()

    def _newest(self) -> RayState:
        self._state = RayState(0 if self._state is None else self._state.number + 1)
        return self._state

    def check(self, state: Any) -> None:
        self._check_open()
        if not isinstance(state, RayState):
            raise StateError(
                f"this job takes the state that init or step returned, not {type(state).__name__}"
            )
        if state is not self._state:
            raise StateError(
                "this state was given to a step already, or another job returned it; give the "
                "state that the last step returned"
            )

    @metered
    def step(self, state: RayState, *batch: Any) -> tuple[Any, ...]:
        """Run one step of all trainers: (state, loss[, aux]).

        Raises:
          BatchError: a batch is passed with `batches`, or none without, or its rows cannot be
            divided among trainers.
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
        """Put the global batch into Ray's store; return None with `batches`."""
        if self._has_batches:
            if batch:
                raise BatchError(
                    "trainers of on_ray(batches) read their batches; call job.step(state) without "
                    "a batch"
                )
            return None
        specs = self.plan.main.args[2:]
        if len(batch) != len(specs):
            raise BatchError(
                f"the step takes {len(specs)} batch arguments, {len(batch)} were given"
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
        """Save a checkpoint of the newest state: each actor its pieces.

        Args:
          path: a folder that all nodes see, one for each checkpoint; relative to `checkpoints` if
            there is one. With parameter servers it must lie in `checkpoints`.
          tag: as in `dtrans.checkpoint.save`.

        Raises:
          ConfigError: servers have no folder, or another one.
          CheckpointError: servers could not write it; the job continues.
        """
        self._check_open()
        if self._state is None:
            raise StateError("there is nothing to save before job.init(...)")
        place = self._path(path)
        if self._group.servers and place.parent != self._folder:
            raise ConfigError(
                f"servers save in one folder, and {place} is not in it; pass "
                f"plan.on_ray(checkpoints={str(place.parent)!r})"
            )
        self._call("save", {n: (str(place), tag) for n in self._group.trainers})

    def _path(self, path: str | os.PathLike[str]) -> Path:
        return (self._folder / path if self._folder is not None else Path(path)).absolute()

    # -- the rest --------------------------------------------------------------------------------

    def _call(self, method: str, args: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Call the actors; an error that ended them closes the job."""
        try:
            return self._group.all(method, args)
        finally:
            if not self._group.actors:
                super().close()

    def lower(self, state: RayState, *batch: Any) -> NoReturn:
        raise ConfigError(
            "actors compile the step: plan.on_mesh().lower(...), or plan.simulate().lower(...), "
            "shows it"
        )

    def close(self) -> None:
        """End the job: trainers tell the servers, and actors and placement groups are removed."""
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


def _check_rows(dataset: Any, rows: int | None) -> None:
    """Raise ConfigError if a dataset has no `rows`, or `rows` no dataset."""
    if dataset is not None:
        check_int("rows", rows, "a number of rows of each trainer's batch, which a dataset needs")
    elif rows is not None:
        raise ConfigError(f"rows={rows} is for a dataset of Ray Data; leave it out")


def _split_dataset(dataset: Any, group: RayGroup) -> dict[str, Any]:
    """Return each trainer's part of a dataset, if there is one."""
    if dataset is None:
        return {}
    if not hasattr(dataset, "streaming_split"):
        raise ConfigError(
            f"batches is a {type(dataset).__name__}, expected a function (trainer, step) -> batch, "
            "or a dataset of Ray Data; other batches go to job.step(state, *batch)"
        )
    names = group.trainers
    at = values_at(group.node_ids, names)
    parts = dataset.streaming_split(len(names), equal=True, locality_hints=at)
    return dict(zip(names, parts, strict=True))


def _shape(plan: Any, processes: int | None) -> tuple[int, int]:
    """Return the number of trainers' actors, and of devices that each has on CPUs."""
    if isinstance(plan, PServerPlan):
        if processes is not None:
            raise ConfigError(
                f"processes={processes}: each trainer of parameter servers is a process; leave it "
                "out"
            )
        return plan.trainers, 1
    if isinstance(plan, PipelinePlan):
        total, each = plan.options.num_stages, plan.options.replicas * max(plan.model.cuts.shards)
    else:
        total, each = plan.trainers, 1
    count = total if processes is None else processes
    check_int("processes", count, "a number of actors")
    if total % count:
        raise ConfigError(
            f"processes={count} does not divide the {total} trainers, ranks or stages of the plan; "
            f"write a divisor of {total}"
        )
    return count, total // count * each


def _arrays(specs: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    """Return the arrays of some trees, as Ray shares them."""
    found: list[Any] = []
    for spec, tree in zip(specs, trees, strict=True):
        found += map(on_host, spec.flatten(tree))
    return found


def of_each(xs: Sequence[Any]) -> Any:
    """Merge the results that trainers have of their parts."""
    if not np.ndim(xs[0]) and np.issubdtype(np.asarray(xs[0]).dtype, np.floating):
        return np.mean(xs, dtype=np.asarray(xs[0]).dtype)
    return np.stack([np.asarray(x) for x in xs])
