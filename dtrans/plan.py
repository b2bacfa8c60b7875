"""What all plans have in common, and what all jobs: and how a plan finds what runs it.

A plan is a value. It can be printed, compared and costed anywhere; it has a way of running for each
of

    "mesh"       the whole job in this process, on a mesh of its devices
    "simulate"   the whole job on one device
    "cluster"    this process's part of a job of processes
    "function"   the program of one trainer, as a pure function
    "ray"        the whole job as actors of a Ray cluster, driven from this process (`dtrans.hosts.on_ray`)

and, as "roles", a table of the processes of its job.

`dtrans.run` stands above all plans, so no plan imports it. It registers its realisers here, and is
imported when the first plan is run: that is the one import that goes up.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dtrans._jax import ShapedArray, within_mesh, without_mesh
from dtrans.checks import check_int
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.ir import display
from dtrans.ir.cost import flops
from dtrans.ir.program import Program
from dtrans.step import one_state
from dtrans.step.batch_sharing import part_of
from dtrans.step_meter import JobReport, StepMeter
from dtrans.verification.check import STEPS, Comparison
from dtrans.verification.outcome import Report


if TYPE_CHECKING:
    from types import TracebackType


@dataclasses.dataclass(frozen=True)
class RoleCost:
    """What one role of a job holds, moves and computes in a step.

    Attributes:
      role: `trainer`, `127.0.0.1:6174`, `stage 0`.
      count: how many have this role.
      held: bytes that each holds between steps.
      sent, received: bytes that each gives to others in a step, and takes from them. Of a
        collective these are its operands and its results; what crosses a link is up to the
        algorithm.
      rounds: how often in a step each waits for others.
      flops: floating-point operations of each in a step (`dtrans.ir.cost`).
    """

    role: str
    count: int
    held: int
    sent: int
    received: int
    rounds: int
    flops: int


class Costs(tuple[RoleCost, ...]):
    """The costs of all roles; printed as a table."""

    _header = ("role", "count", "bytes held", "bytes sent", "bytes received", "rounds", "flops")

    def _rows(self) -> list[tuple[str, ...]]:
        return [(c.role, *(f"{n:,}" for n in dataclasses.astuple(c)[1:])) for c in self]

    def __str__(self) -> str:
        return display.plan_text(
            "costs of a step, for each", self._header, self._rows(), (), right=range(1, 7)
        )

    def _repr_html_(self) -> str:
        return display.plan_html(
            "costs of a step, for each", self._header, self._rows(), (), code=0
        )


@dataclasses.dataclass(frozen=True)
class PlanRecipe:
    """Call that made a plan: another process that makes the same call gets the same plan.

    Attributes:
      transform: `dtrans.pserver`, `dtrans.nccl2`, `dtrans.sharding` or `dtrans.pipeline`.
      arguments: its arguments by name, `main` and `startup` among them.
    """

    transform: Callable[..., Plan]
    arguments: Mapping[str, Any]


P = ParamSpec("P")
PlanT = TypeVar("PlanT", bound="Plan")


def with_recipe(transform: Callable[P, PlanT]) -> Callable[P, PlanT]:
    """Decorate a transform so that its plans know the call that made them (`Plan.recipe`)."""

    @functools.wraps(transform)
    def run(*args: P.args, **options: P.kwargs) -> PlanT:
        plan = transform(*args, **options)
        found = PlanRecipe(run, inspect.signature(transform).bind(*args, **options).arguments)
        # not a field: `dataclasses.replace` makes another plan, which this call does not make
        object.__setattr__(plan, "recipe", found)
        return plan

    return run


class Plan(abc.ABC):
    """Training of one step by several roles: what a transform returns.

    Attributes:
      main: the step, with calls inlined and exact roles.
      recipe: the call that made the plan; None where it was derived from another plan.
    """

    main: Program
    recipe: ClassVar[PlanRecipe | None] = None
    _right: ClassVar[tuple[int, ...]]  # the columns of numbers
    _code: ClassVar[int]  # the column of names

    # -- what a plan says ------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def programs(self) -> Mapping[str, Program]:
        """The program of each role: of `trainer` where all trainers have the same."""

    @abc.abstractmethod
    def costs(self) -> Costs:
        """What each role holds, moves and computes in a step."""

    @property
    @abc.abstractmethod
    def notes(self) -> list[str]:
        """What else there is to know."""

    @property
    @abc.abstractmethod
    def rows(self) -> Sequence[tuple[str, ...]]:
        """The table of the plan, under `_header`."""

    @property
    @abc.abstractmethod
    def _title(self) -> str: ...

    @property
    @abc.abstractmethod
    def _header(self) -> tuple[str, ...]: ...

    def __str__(self) -> str:
        return display.plan_text(
            self._title, self._header, self.rows, self.notes, right=self._right
        )

    def __repr__(self) -> str:
        return f"<{self._title}>"

    def _repr_html_(self) -> str:
        return display.plan_html(self._title, self._header, self.rows, self.notes, code=self._code)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))

    # -- running ---------------------------------------------------------------------------------

    def on_mesh(
        self,
        devices: Sequence[jax.Device] | Mesh | None = None,
        *,
        donate: bool = True,
        **options: Any,
    ) -> Job:
        """Run the whole job in this process.

        Args:
          devices: trainers, ranks or stages take the first; of a mesh its devices in their order.
            All of this process's by default.
          donate: let each step reuse the memory of the state it was given, which cannot be used
            again.
          options: `on_nonfinite`, but for pipelines: "warn" or "error" names the trainer, and the
            leaves, where gradients have an infinity or a NaN in them, which "ignore" does not look
            for. `unsplit_inputs` of a pserver
            plan: names of batch arrays that every trainer gets whole.

        Raises:
          ConfigError: fewer devices than the plan needs, or a plan that cannot run in one process.
        """
        if isinstance(devices, Mesh):
            devices = list(devices.devices.flat)
        return self._realised("mesh", devices, donate=donate, **options)

    def on_cluster(self, *, donate: bool = True, **options: Any) -> Job:
        """Run this process's part, in a job of processes. All of them call this, then `init` and
        `step`.

        In collective modes and pipelines `dtrans.connect()` comes first; with parameter servers the
        environment says who this process is (`dtrans.Role.from_env`). Each gives its own part of
        the batch to `step`.

        Args:
          donate: as in `on_mesh`; never where the job goes on when trainers are lost, and always by
            servers.
          options: `on_nonfinite`, as in `on_mesh`; of `dtrans.Executor`, with parameter servers:
            `deadline`, `patience`, `wait_port`, `allow_remote`, `transport_encryption`.

        Raises:
          ConfigError: not connected, or to another number of processes than the plan is for;
            donate=False, of servers.
        """
        return self._realised("cluster", donate=donate, **options)

    def simulate(self) -> Job:
        """Run the whole job on one device: for tests, notebooks, and machines that one does not
        have."""
        return self._realised("simulate")

    def on_ray(self, batches: Any = None, **options: Any) -> Job:
        """Run the job as actors of a Ray cluster, with this process as the driver; it takes the
        extra `ray`.

        Each role is an actor in a placement group, and takes the way of `on_cluster`. The plan is
        made again in each actor, from the functions that were traced: Ray pickles them. `init`,
        `step` and the other methods of the job are called here, and a state is a handle of the
        state that actors hold.

        Args:
          batches: of each trainer its own part, made in its actor: a function (trainer, step) ->
            batch; or a dataset of Ray Data, whose columns have the names of the step's arguments.
            `job.step(state)` then takes no batch. By default `job.step(state, *batch)` takes the
            global batch here, which trainers share.
          options: of `dtrans.hosts.on_ray.RayJob`: `address`, `trainers_on`, `trainer_resources`,
            `server_resources`, `processes`, `rows`, `checkpoints`, `env`, `deadline`, `patience`.

        Raises:
          ConfigError: Ray is not installed, or a plan that cannot be made again from a call of its
            transform.
          DeadlineError: the cluster has no room for the roles. PeerError: a role failed, or its
            node has gone.
        """
        return self._realised("ray", batches, **options)

    def roles(self, command: Sequence[str] = (), **options: Any) -> Any:
        """Return the processes of the job as a table: who they are, their variables, memory and
        bytes per step.

        It starts nothing, and follows from the plan alone.

        Args:
          command: program and arguments of each process.
          options: `env`, variables for all; `cores`, processors for each. With collectives and
            pipelines also `processes`, where each has several devices, and `endpoints`; loopback
            from port 6174 by default.

        Returns:
          A `dtrans.RoleTable`.

        Raises:
          ConfigError: processes that do not divide the plan's trainers or stages, or other numbers
            of endpoints.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.sgd(0.5), jnp.ones((4, 2))
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params) ** 2), tx)
          >>> init = lambda: (p := jnp.ones(2), tx.init(p))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
          >>> [(e.name, e.memory) for e in plan.roles(["python", "train.py"])]
          [('trainer 0', 8), ('trainer 1', 8)]
        """
        return realiser(self, "roles")(self, command, **options)

    def verify(self, *batch: Any, points: Sequence[int] = STEPS, seed: int = 0) -> Report:
        """Check that the job computes the step: both are evaluated in a finite field, without a
        tolerance.

        The traced step of the whole job is compared with the step of one device, at random points
        (docs/verify.md). No device is needed. Only the startup program of tables whose rows catch
        up is compiled.

        Args:
          batch: the global batch, as `step` takes it behind the state: arrays, or their types
            (`jax.ShapeDtypeStruct`). Integers and keys of arrays are used unchanged, and floats
            vary around the given ones. By default, the types with which the step was traced.
          points: states are compared after so many steps of one device.
          seed: of the points.

        Returns:
          A report: `report.equal`, `report.complete`, and the names of outputs that differ.

        Raises:
          ConfigError: the plan has rows that may be stale (`dtrans.Rows(staleness=...)`), or local
            steps whose results are merged in a way that has no replay.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx := optax.adam(0.1))
          >>> init = lambda: (jnp.ones(2), tx.init(jnp.ones(2)))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), jnp.ones((12, 2))), dtrans.trace(init), trainers=3)
          >>> report = plan.verify()
          >>> report.equal, report.complete
          (True, True)
        """
        main, specs = self.main, self.main.args[2:]
        typed = lambda x: jax.ShapeDtypeStruct(
            jnp.shape(x), jnp.result_type(x) if jnp.isscalar(x) else x.dtype
        )
        if not batch:
            batch = tuple(spec.unflatten([main.inputs[n] for n in spec.names]) for spec in specs)
        if len(batch) != len(specs):
            raise BatchError(
                f"the step takes {len(specs)} batch arguments, {len(batch)} were given"
            )
        types = jax.tree.map(typed, batch)
        flat: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for spec, tree, structure in zip(specs, batch, types, strict=True):
            flat.update(zip(spec.names, spec.flatten(structure), strict=True))
            given.update(zip(spec.names, spec.flatten(tree), strict=True))
        given = {
            n: x for n, x in given.items() if not isinstance(x, (jax.ShapeDtypeStruct, ShapedArray))
        }
        state = [main.inputs[n] for spec in main.args[:2] for n in spec.names]
        traced: Any = self._realised("verify", types)
        whole = main.specialize_flat([*state, *flat.values()])
        startup: Program = self.startup  # type: ignore[attr-defined]
        if traced.replay is not None:
            flat = {n: traced.replay.inputs[n] for n in flat}
            given = {n: jnp.broadcast_to(x, flat[n].shape) for n, x in given.items()}
        comparison = Comparison(traced.replay or whole, traced, flat, main.still, startup, given)
        return comparison.check(repr(self)[1:-1], points=points, seed=seed)

    def _realised(self, way: str, *args: Any, **options: Any) -> Job:
        with within_mesh(None):
            job: Job = realiser(self, way)(self, *args, **options)
        return job


def _hyperparameter_leaf(leaves: Iterable[str], name: str) -> str:
    """Return the leaf that holds a hyperparameter.

    Raises:
      ConfigError: no leaf holds it, or several do.
    """
    kept: dict[str, list[str]] = {}
    for leaf in leaves:
        _, found, short = leaf.rpartition("hyperparams/")
        if found:
            # nnx wraps each array in a variable, whose one child is called `value`
            kept.setdefault(short.removesuffix("/value"), []).append(leaf)
    if any(name in same for same in kept.values()):
        return name
    if name not in kept:
        raise ConfigError(
            f"the optimizer keeps no {name!r} in its state; it keeps "
            f"{', '.join(kept) or 'nothing'} by name. "
            "Wrap it in optax.inject_hyperparams, or let the step take what changes as an argument"
        )
    if len(kept[name]) > 1:
        raise ConfigError(
            f"{name!r} is kept by several optimizers: {', '.join(kept[name])}; give the whole "
            "name, as "
            f"**{{{kept[name][0]!r}: ...}}"
        )
    return kept[name][0]


# the methods of jobs that make arrays, or compile
_CALLED = {"init", "step", "prefetch", "place", "params", "opt_state", "state_of", "lower", "held"}


class Job(abc.ABC):
    """A plan, running: `init`, `step`, and functions of the state in between. The job itself holds
    compiled code.

    Jobs of parameter servers also have `roles`, those of this process who save a piece of a
    checkpoint, and `held(state, endpoint)`, what a server holds.

    Attributes:
      plan: What it runs.
    """

    plan: Any
    _closed = False
    _functions: weakref.WeakKeyDictionary[Any, one_state.Applied] | None = None

    part = (0, 1)  # which part of a global batch `step` takes here, and how many parts there are
    takes_uneven_parts = False  # whether those may be `dtrans.UnevenPart`s
    batches_ahead = 1  # how many steps `steps` reads batches ahead

    is_driver = (
        False  # whether its processes are elsewhere: `save` and `restore` of the job let them do so
    )
    run_id: str  # which run of the job it is: the default tag of its checkpoints
    saves = True  # whether this process saves what all of them have alike

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the methods run without the mesh that a caller has set: a job has devices of its
        own."""
        super().__init_subclass__(**options)
        for name in _CALLED & vars(cls).keys():
            setattr(cls, name, without_mesh(vars(cls)[name]))

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raises StateError for what is no state of this job, or none any more."""

    @abc.abstractmethod
    def init(self, *args: Any) -> Any:
        """The first state, from the arguments of init."""

    @abc.abstractmethod
    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        """One step: (state, loss[, aux]), or whatever else the step returns beside its state."""

    def prefetch(self, *batch: Any) -> bool:
        """Say what the batch after the next is, where something can be asked of other processes
        before its step.

        Trainers of synchronous parameter servers ask for rows of tables (docs/tables.md). Elsewhere
        it does nothing, so that one loop serves all; numbers are the same.

        Args:
          batch: what `step` takes behind the state.

        Returns:
          Whether anything was asked for.
        """
        return False

    def steps(
        self, state: Any, batches: Iterable[Sequence[Any]], ahead: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """The steps of batches, each of which is given to `prefetch` some steps before its own.

        Args:
          state: as `step` takes it.
          batches: of each step, what `step` takes behind the state; as many are read ahead as are
            announced.
          ahead: how many steps before; by default `batches_ahead`, which is 1, or the staleness of
            the plan's tables.

        Yields:
          What `step` returns.

        Raises:
          ConfigError: `ahead` is no positive number. Otherwise as `prefetch` and `step` do.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx := optax.sgd(0.5))
          >>> init = lambda: (jnp.ones(2), tx.init(jnp.ones(2)))
          >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.eye(2)), dtrans.trace(init),
          ...                       pservers="127.0.0.1:6174", trainers=1)
          >>> job = plan.simulate()
          >>> [float(loss) for state, loss in job.steps(job.init(), [(jnp.eye(2),)] * 3)]
          [1.0, 0.25, 0.0625]
        """
        ahead = self.batches_ahead if ahead is None else ahead
        check_int("ahead", ahead, "a number of steps", least=1)
        waiting = collections.deque[Sequence[Any]]()
        for batch in batches:
            if waiting:
                self.prefetch(*batch)
            waiting.append(batch)
            if len(waiting) > ahead:
                state, *made = self.step(state, *waiting.popleft())
                yield state, *made
        while waiting:
            state, *made = self.step(state, *waiting.popleft())
            yield state, *made

    @abc.abstractmethod
    def params(self, state: Any) -> Any:
        """The parameters, as the pytree that they were given in."""

    @abc.abstractmethod
    def opt_state(self, state: Any) -> Any:
        """The optimizer's state, as the pytree that it was given in."""

    @abc.abstractmethod
    def state_of(self, params: Any, opt_state: Any) -> Any:
        """The state of a job that goes on from a single-device (params, opt_state), as
        `dtrans.checkpoint.load` gives.

        Raises:
          TraceError: another structure than the step takes; StateError: an array of another shape
            or dtype.
        """

    @cached_property
    def meter(self) -> StepMeter:
        """What counts and times the steps."""
        return StepMeter()

    def report(self) -> JobReport:
        """What the steps took until now: steps/s, where time went, what a step moves; it prints as
        a table."""
        return self.meter.report(self.plan.costs())

    @contextlib.contextmanager
    def trace(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Let JAX's profiler trace the steps in this block, each with its number.

        Args:
          directory: gets `plugins/profile/<time>/`, with `perfetto_trace.json.gz` (open it at
            ui.perfetto.dev), and what TensorBoard's profiler reads.
        """
        with jax.profiler.trace(os.fspath(directory), create_perfetto_trace=True):
            self.meter.is_traced = True
            try:
                yield
            finally:
                self.meter.is_traced = False

    def shard_batch(self, *batch: Any) -> tuple[Any, ...]:
        """This process's part of a global batch: what its `step` takes.

        Process k of N has rows k*B/N to (k+1)*B/N of arrays that trainers have parts of, along the
        dimension that the plan says, and the whole of all others. In one process it is the whole
        batch. Where trainers do not divide the rows, and the plan can do with that, a part is a
        `dtrans.UnevenPart`.

        Args:
          batch: what `step` takes behind the state: pytrees of arrays, NumPy's or JAX's.

        Raises:
          BatchError: rows that the processes do not divide, or another structure than the step
            takes.
        """
        number, count = self.part
        if count == 1:
            return batch
        specs, axes, uneven = self.plan.main.args[2:], self.cut_axes(), self.takes_uneven_parts
        if len(batch) != len(specs):
            raise BatchError(
                f"the step takes {len(specs)} batch arguments, {len(batch)} were given"
            )
        found = []
        for spec, given in zip(specs, batch, strict=True):
            arrays = zip(spec.names, spec.flatten(given), strict=True)
            cut = lambda n, x: part_of(
                x, number, count, axes[n], n, self.plan.trainers if uneven else 0
            )
            found.append(spec.unflatten([cut(n, x) if n in axes else x for n, x in arrays]))
        return tuple(found)

    def place(self, *batch: Any) -> tuple[Any, ...]:
        """This process's part of a global batch, where steps want it: on devices, if that is known
        ahead."""
        return self.shard_batch(*batch)

    def cut_axes(self) -> Mapping[str, int]:
        """The dimension along which trainers have parts of each array of the batch; others they
        have whole."""
        shared = getattr(self.plan, "shared", None)
        if shared is not None:
            axes: Mapping[str, int] = shared.axes
            return axes
        names = (n for spec in self.plan.main.args[2:] for n in spec.names)
        return {n: 0 for n in names if self.plan.main.inputs[n].ndim}

    def gather(self, state: Any) -> Any:
        """The state as one device has it: what a step of one state takes, or (params, opt_state).

        Example:
          >>> import jax, jax.numpy as jnp, dtrans
          >>> def step(state, x):
          ...     loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
          ...     return {"w": state["w"] - 0.5 * g, "steps": state["steps"] + 1}, loss
          >>> init = lambda: {"w": jnp.ones(2), "steps": jnp.zeros((), int)}
          >>> plan = dtrans.nccl2(dtrans.trace(step, init(), jnp.eye(2)), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> state, loss = job.step(job.init(), jnp.eye(2))
          >>> jax.tree.map(lambda a: a.tolist(), job.gather(state))
          {'steps': 1, 'w': [0.5, 0.5]}
        """
        return one_state.joined(self.plan.main, self.params(state), self.opt_state(state))

    def scatter(self, state: Any) -> Any:
        """The state of this job that goes on from one device's: from what `gather` returns.

        Raises:
          TraceError: another structure than the step takes; StateError: an array of another shape
            or dtype.
        """
        return self.state_of(*one_state.divided(self.plan.main, state))

    @without_mesh
    def with_hyperparameters(self, state: Any, **values: float) -> Any:
        """Return a state with other hyperparameters, which the optimizer keeps by name
        (`optax.inject_hyperparams`).

        Args:
          values: by name, as `learning_rate=1e-3`. Where several optimizers keep one name, by the
            whole name of the leaf, as `**{"opt_state/critic/hyperparams/learning_rate": 1e-3}`.

        Raises:
          ConfigError: the optimizer keeps none of this name, several do, or this process does not
            have it.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
          >>> init = lambda: (p := {"w": jnp.zeros(2)}, tx.init(p))
          >>> x = jnp.ones((2, 2))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> state, _ = job.step(job.with_hyperparameters(job.init(), learning_rate=0.25), x)
          >>> job.params(state)["w"].tolist()
          [0.25, 0.25]
        """
        leaves = {name: _hyperparameter_leaf(self.plan.main.in_names, name) for name in values}
        wanted, found = {leaves[name]: x for name, x in values.items()}, set()

        def replaced(path: Any, x: Any) -> Any:
            key = getattr(path[-1], "key", None)
            name = key[-1] if isinstance(key, tuple) else key
            if name not in wanted:
                return x
            found.add(name)
            new = jnp.full(x.shape, wanted[name], x.dtype)
            return jax.device_put(new, x.sharding) if isinstance(x, jax.Array) else new

        new = jax.tree_util.tree_map_with_path(replaced, state)
        if found != set(wanted):
            raise ConfigError(
                f"{next(n for n in wanted if n not in found)} is on the servers: let the step take "
                "what changes as an "
                "argument, which trainers tell them"
            )
        return new

    @without_mesh
    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """`fn(params, *args)`, or `fn(state, *args)` of a step of one state: evaluation, or
        sampling.

        `fn` is jitted, once for each function and shape. Only what it reads is brought together:
        not the optimizer's state, where it reads none. On a mesh slices stay where they are, and
        XLA gathers what each product needs.

        Args:
          fn: a pure function, the same object at each call; it is compiled anew for another one.
          args: pytrees of arrays. All trainers have all of their rows.

        Returns:
          What `fn` returns.

        Raises:
          ConfigError: `fn` reads state that this process cannot ask for, as that of servers in a
            job of processes.

        Example:
          >>> import jax, jax.numpy as jnp, optax, dtrans
          >>> tx = optax.sgd(0.5)
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
          >>> init = lambda: (p := {"w": jnp.ones(2)}, tx.init(p))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), jnp.eye(2)), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> predict = lambda params, x: x @ params["w"]
          >>> job.apply(predict, job.init(), 3 * jnp.eye(2)).tolist()
          [3.0, 3.0]
        """
        if self._functions is None:
            self._functions = weakref.WeakKeyDictionary()
        applied = self._functions.get(fn)
        if applied is None:
            applied = self._functions[fn] = one_state.Applied(self.plan.main, fn, self._opened)
        return applied(lambda names: self._leaves(state, names), *args)

    def _leaves(self, state: Any, names: Collection[str]) -> dict[str, Any]:
        """The arrays of these names, as `_opened` takes them; it may be asked for the parameters
        alone."""
        found: dict[str, Any] = {}
        for spec, whole in zip(self.plan.main.args, (self.params, self.opt_state), strict=False):
            if not set(names).isdisjoint(spec.names):
                found |= zip(spec.names, spec.flatten(whole(state)), strict=True)
        one = jax.local_devices()[0]  # stages and servers have devices of their own
        return {n: jax.device_put(found[n], one) for n in names}

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arrays as one device has them, from those of `_leaves`; traced."""
        return leaves

    @abc.abstractmethod
    def lower(self, state: Any, *batch: Any) -> Any:
        """What `step` compiles for these arguments, with `as_text()`, as `jax.jit(...).lower` gives
        it."""

    def close(self) -> None:
        """End the job: its lines to other processes too. A closed job makes no step."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"this job is closed: make another of its plan, {self.plan!r}")

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{'closed ' * self._closed}{type(self).__name__} of {self.plan!r}>"


def program_flops(program: Program) -> int:
    """The floating-point operations of a program."""
    return sum(flops(eqn) for eqn in program.eqns)


# -- the registry ----------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])

_REALISERS: dict[tuple[type, str], Callable[..., Any]] = {}


def realises(plan: type, way: str) -> Callable[[F], F]:
    """Register a class or a function as what runs plans of a type in a way.

    Example:
      >>> from dtrans.plan import realiser, realises
      >>> class EmptyPlan: ...
      >>> @realises(EmptyPlan, "simulate")
      ... def run_nothing(plan): return "nothing"
      >>> realiser(EmptyPlan(), "simulate")(EmptyPlan())
      'nothing'
    """

    def register(fn: F) -> F:
        _REALISERS[plan, way] = fn
        return fn

    return register


def realiser(plan: Any, way: str) -> Callable[..., Any]:
    """What runs a plan in a way: that of its own type, or of the next type that it is one of.

    Raises:
      ConfigError: nothing runs such plans in this way.
    """
    importlib.import_module("dtrans.run.realisers")
    for kind in type(plan).__mro__:
        if (kind, way) in _REALISERS:
            return _REALISERS[kind, way]
    ways = sorted({w for kind, w in _REALISERS if isinstance(plan, kind)} - {"roles", "verify"})
    raise ConfigError(
        f"nothing runs a {type(plan).__name__} by {way!r}"
        + (f"; it runs by {', '.join(ways)}" if ways else "")
    )
