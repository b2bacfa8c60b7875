"""Base class of all plans, their recipes (the calls that created them), and the list of runners.

A plan describes a distributed job. It is a value, which can be printed, compared and costed without
devices. A *runner* is a function or class that runs a plan in one of these ways:

    "mesh"       the full job in this process, on a mesh of its devices
    "simulate"   the full job on one device
    "cluster"    this process's part of a job of processes
    "function"   the program of one trainer, as a pure function
    "ray"        the full job as actors of a Ray cluster, with this process as the driver
    "roles"      no job: a table of its processes
    "verify"     no job: the traced step, for `Plan.verify`

`dtrans.job` defines the interface of jobs, and `dtrans.costs` the costs of a plan.

The modules of `dtrans.run` define the runners, and import this module. To avoid a cycle of imports,
they register their runners here, and `runner_of` imports them when a plan first runs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dtrans._jax import ShapedArray, within_mesh
from dtrans.errors import BatchError, ConfigError
from dtrans.ir import display, fingerprint
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec
from dtrans.ir.selection import subset, values_at
from dtrans.verification.check import STEPS, Comparison
from dtrans.verification.outcome import Report


if TYPE_CHECKING:
    from dtrans.costs import Costs
    from dtrans.job import Job
    from dtrans.transfers import Transfers


@dataclasses.dataclass(frozen=True)
class PlanRecipe:
    """Record of the call that returned a plan, such as `dtrans.pserver(main, startup, trainers=2)`.

    Another process that repeats the call gets an equal plan. Ray's actors get their plan in this
    way.

    Attributes:
      transform: `dtrans.pserver`, `dtrans.nccl2`, `dtrans.sharding` or `dtrans.pipeline`.
      arguments: arguments of the call by name, including `main` and `startup`.
    """

    transform: Callable[..., Plan]
    arguments: Mapping[str, Any]


P = ParamSpec("P")
PlanT = TypeVar("PlanT", bound="Plan")


def with_recipe(transform: Callable[P, PlanT]) -> Callable[P, PlanT]:
    """Decorate a transform (such as `dtrans.pserver`) so that its plans record their call.

    The decorated transform stores the call in `Plan.recipe`. Other processes repeat the call to get
    an equal plan.
    """

    @functools.wraps(transform)
    def run(*args: P.args, **options: P.kwargs) -> PlanT:
        plan = transform(*args, **options)
        recipe = PlanRecipe(run, inspect.signature(transform).bind(*args, **options).arguments)
        # The recipe is not a dataclass field, because `dataclasses.replace` would copy it to a
        # changed plan. The call in the recipe returns the unchanged plan.
        object.__setattr__(plan, "recipe", recipe)
        return plan

    return run


class Plan(abc.ABC):
    """Description of a distributed training job: one program for each role, with costs and notes.

    A transform such as `dtrans.nccl2` returns a plan. A plan needs no devices. `on_mesh`,
    `on_cluster`, `on_ray` and `simulate` start a job that runs the plan.

    Attributes:
      main: the single-device step, with calls inlined; each equation has a role, such as `forward`.
      recipe: the call that returned the plan; None if the plan was derived from another plan.
    """

    main: Program
    recipe: ClassVar[PlanRecipe | None] = None
    _right: ClassVar[tuple[int, ...]]  # indices of right-aligned columns of the table
    _code: ClassVar[int]  # index of the column with names

    # -- values ----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Return True if two plans have equal programs and options."""
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or (
            type(self) is type(other)
            and self.identity == other.identity
            and self._field_texts == other._field_texts
        )

    def __hash__(self) -> int:
        return hash((type(self), self._title))

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """Digests that are equal if two processes have equal plans and software versions.

        There is one digest for each part of the plan, by name. The processes of a job compare the
        digests when they connect. The addresses of servers (endpoints) do not change the digests.
        """
        startup: Program = self.startup  # type: ignore[attr-defined]
        programs = {name: program.fingerprint for name, program in self.programs.items()}
        return {**fingerprint.environment(), "init": startup.fingerprint, **programs}

    @cached_property
    def _field_texts(self) -> dict[str, str]:
        """Text of each field of the plan, by the field's name; `==` compares these texts."""
        texts = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.compare:
                texts[field.name] = fingerprint.canonical_text(getattr(self, field.name))
        return texts

    # -- description -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def programs(self) -> Mapping[str, Program]:
        """Program of each role, by the role's name.

        If all trainers run the same program, the name is `trainer`. Other examples are `stage 0
        forward` in a pipeline, and the address of a parameter server.
        """

    def costs(self, link: float | str | None = None) -> Costs:
        """Return the memory, traffic and floating-point operations of each role in one step.

        Args:
          link: rate of each host's network link in each direction: bytes per second, or text such
            as "1gbit". Plans with parameter servers accept it. The result then contains a lower
            bound for the time of a step: the time in which the busiest link carries the step's
            bytes.

        Raises:
          ConfigError: `link` is not a rate, or the plan has no parameter servers.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.sgd(0.5), jnp.ones((4, 250))
          >>> step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx)
          >>> init = lambda: (jnp.ones(250), tx.init(jnp.ones(250)))
          >>> plan = dtrans.pserver(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
          >>> costs = plan.costs(link="1mbit")
          >>> costs.busiest.role, costs.link_bytes, costs.link_seconds
          ('127.0.0.1:6174', 2000.0, 0.016)
        """
        costs = self._role_costs()
        return costs if link is None else costs.over_link(link)

    @abc.abstractmethod
    def _role_costs(self) -> Costs:
        """Return the costs of each role, before `costs` adds times for the rate of a link."""

    @abc.abstractmethod
    def transfers(self) -> Transfers:
        """Return a table of the bytes that each role sends to each other role in one step.

        A notebook shows the result as a drawing. For a collective operation, the table counts the
        bytes of its operands. For embedding tables, the bytes are upper bounds if ids are evenly
        spread over the servers.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.sgd(0.5), jnp.ones((4, 2))
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params) ** 2), tx)
          >>> init = lambda: (p := jnp.ones(2), tx.init(p))
          >>> main, startup = dtrans.trace(step, *init(), x), dtrans.trace(init)
          >>> print(dtrans.pserver(main, startup, pservers=["127.0.0.1:6174"]).transfers())
          transfers of a step
            from            to              values      bytes
            trainer         127.0.0.1:6174  gradients       8
            127.0.0.1:6174  trainer         parameters      8
        """

    @property
    @abc.abstractmethod
    def notes(self) -> list[str]:
        """Sentences for the user about this plan, which `print(plan)` shows below the table."""

    @property
    @abc.abstractmethod
    def rows(self) -> Sequence[tuple[str, ...]]:
        """Rows of the table that `print(plan)` shows; `_header` has the titles of the columns."""

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
        table = display.plan_html(self._title, self._header, self.rows, self.notes, code=self._code)
        drawing = self.transfers().svg()
        return table + display.folded_html("transfers of a step", drawing)

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
        """Return a job that runs all roles of the plan in this process, on its devices.

        Args:
          devices: devices, or a mesh with devices; the job uses as many as it needs, in order.
            Default: all devices of this process.
          donate: True to let each step reuse the memory of its input state; this state is then
            invalid.
          **options: `on_nonfinite` (all plans but pipelines): "warn" or "error" checks gradients
            for infinities and NaN, and reports the trainer and the leaves; "ignore" checks nothing.
            `unsplit_inputs` (pserver plans): names of batch arrays that are replicated.

        Raises:
          ConfigError: there are too few devices, or the plan cannot run in one process.
        """
        if isinstance(devices, Mesh):
            devices = list(devices.devices.flat)
        return self._run_as("mesh", devices, donate=donate, **options)

    def on_cluster(self, *, donate: bool = True, **options: Any) -> Job:
        """Return a job for this process, which runs one role: a trainer, a server or some stages.

        Args:
          donate: as in `on_mesh`. Servers always donate; jobs that continue without a failed
            trainer never do.
          **options: `on_nonfinite`, as in `on_mesh`. With parameter servers, also options of
            `dtrans.Executor`: `deadline`, `patience`, `wait_port`, `allow_remote`,
            `transport_encryption`.

        Raises:
          ConfigError: this process is not connected to the others. Or the plan needs another number
            of processes, or `donate` is False for a server.
        """
        return self._run_as("cluster", donate=donate, **options)

    def simulate(self) -> Job:
        """Return a job that runs all roles on one device, for tests and notebooks."""
        return self._run_as("simulate")

    def on_ray(self, batches: Any = None, **options: Any) -> Job:
        """Return a job with roles that run as actors of a Ray cluster; this process is the driver.

        The extra `ray` must be installed. Each actor repeats the call that returned this plan (its
        recipe), and then calls `on_cluster`. So the traced functions must be picklable. The driver
        calls `init`, `step` and the other methods of the job. Its state is a handle: the actors
        store the arrays.

        Args:
          batches: source of each trainer's part of the batch, from which the trainer's actor reads.
            It is a function (trainer, step) -> batch, or a dataset of Ray Data. The columns of the
            dataset have the names of the step's arguments. `job.step(state)` then has no batch
            arguments. By default, the driver passes the global batch to `job.step(state, *batch)`,
            which splits the batch.
          **options: options of `dtrans.hosts.on_ray.RayJob`: `address`, `trainers_on`,
            `trainer_resources`, `server_resources`, `processes`, `rows`, `checkpoints`, `env`,
            `deadline`, `patience`.

        Raises:
          ConfigError: Ray is not installed, or the plan has no recipe.
          DeadlineError: the cluster lacks resources for the roles.
          PeerError: a role failed, or its node was lost.
        """
        return self._run_as("ray", batches, **options)

    def roles(self, command: Sequence[str] = (), **options: Any) -> Any:
        """Return a table of the processes that a job of this plan needs; start none of them.

        Each row has the role, environment variables, memory, and bytes per step of one process.
        Launchers read the table.

        Args:
          command: program and arguments of each process.
          **options: `env`: environment variables of all processes. `cores`: processors of each
            process. Collective jobs and pipelines have two more options. `processes`: number of
            processes, if each has several devices. `endpoints`: an address for each process; by
            default, loopback addresses from port 6174.

        Returns:
          A `dtrans.RoleTable`.

        Raises:
          ConfigError: `processes` does not divide the plan's trainers or stages, or differs from
            the number of endpoints.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.sgd(0.5), jnp.ones((4, 2))
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params) ** 2), tx)
          >>> init = lambda: (p := jnp.ones(2), tx.init(p))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
          >>> [(e.name, e.memory) for e in plan.roles(["python", "train.py"])]
          [('trainer 0', 8), ('trainer 1', 8)]
        """
        return runner_of(self, "roles")(self, command, **options)

    def verify(self, *batch: Any, points: Sequence[int] = STEPS, seed: int = 0) -> Report:
        """Check that the job computes the same numbers as the one-device step, without tolerance.

        The check replaces floating-point numbers by elements of a finite field, where equal
        formulas give equal results. The job's traced step and the one-device step are evaluated and
        compared for random numbers (docs/verify.md). The check needs no devices, and does not
        compile the steps.

        Args:
          *batch: the batch arguments of the step: arrays, or types (`jax.ShapeDtypeStruct`).
            Arrays of integers and random keys are used unchanged; for an array of floats, random
            numbers near its entries are used. Default: the types with which the step was traced.
          points: the one-device step runs this many times before each comparison. `(0, 5)` compares
            one step from the initial state, and one step from the state after five steps.
          seed: seed of the random numbers.

        Returns:
          A report: `report.equal`, `report.complete`, and the outputs that differ.

        Raises:
          ConfigError: no one-device program computes the same numbers as the plan. For example,
            table rows may be stale (`dtrans.Rows(staleness=...)`). Or `local_sgd` merges a result
            by a rule that one device cannot repeat.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.adam(0.1), jnp.ones((12, 2))
          >>> step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx)
          >>> init = lambda: (jnp.ones(2), tx.init(jnp.ones(2)))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=3)
          >>> report = plan.verify()
          >>> report.equal, report.complete
          (True, True)
        """
        comparison = _comparison(self, batch)
        return comparison.check(repr(self)[1:-1], points=points, seed=seed)

    def _run_as(self, way: str, *args: Any, **options: Any) -> Job:
        with within_mesh(None):
            job: Job = runner_of(self, way)(self, *args, **options)
        return job


def _comparison(plan: Plan, batch: tuple[Any, ...]) -> Comparison:
    """Prepare the comparison of a plan's traced step with the one-device step, for `Plan.verify`.

    Args:
      plan: the plan.
      batch: the batch arguments of the step: arrays, or types. If empty, the types of the traced
        step are used.
    """
    main, specs = plan.main, plan.main.args[2:]
    if not batch:
        batch = tuple(_traced_types(main, spec) for spec in specs)
    if len(batch) != len(specs):
        raise BatchError(
            f"the step takes {len(specs)} batch arguments, {len(batch)} were given; pass "
            "the same arguments as to dtrans.trace"
        )
    types = jax.tree.map(_type_of, batch)
    input_types: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for spec, tree, type_tree in zip(specs, batch, types, strict=True):
        input_types.update(zip(spec.names, spec.flatten(type_tree), strict=True))
        for name, x in zip(spec.names, spec.flatten(tree), strict=True):
            if not isinstance(x, (jax.ShapeDtypeStruct, ShapedArray)):
                values[name] = x
    traced: Any = plan._run_as("verify", types)

    # Asynchronous jobs and GEO-SGD do not compute `main`. For them, `replay` is the one-device
    # program that the job must compute.
    if traced.replay is None:
        params, opt_state = main.args[:2]
        state_types = values_at(main.inputs, (*params.names, *opt_state.names))
        expected = main.specialize_flat([*state_types, *input_types.values()])
    else:
        expected = traced.replay
        input_types = subset(expected.inputs, input_types)
        values = {n: jnp.broadcast_to(x, input_types[n].shape) for n, x in values.items()}
    startup: Program = plan.startup  # type: ignore[attr-defined]
    return Comparison(expected, traced, input_types, main.frozen_constants, startup, values)


def _traced_types(program: Program, spec: TreeSpec) -> Any:
    """Return one argument of a traced program as a pytree of array types."""
    return spec.unflatten(values_at(program.inputs, spec.names))


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array or a Python number; return a type unchanged."""
    dtype = jnp.result_type(x) if jnp.isscalar(x) else x.dtype
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)


# -- the registry ----------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])

_RUNNERS: dict[tuple[type, str], Callable[..., Any]] = {}


def register_runner(plan: type, way: str) -> Callable[[F], F]:
    """Return a decorator that registers a function to run plans of one type.

    For example, `plan.simulate()` calls the function that is registered for the plan's type and the
    name "simulate".

    Args:
      plan: type of the plans that the function runs.
      way: name of the method that calls the function, such as "simulate" or "mesh"; the module's
        docstring lists the names.

    Example:
      >>> from dtrans.plan import runner_of, register_runner
      >>> class EmptyPlan: ...
      >>> @register_runner(EmptyPlan, "simulate")
      ... def run_nothing(plan): return "nothing"
      >>> runner_of(EmptyPlan(), "simulate")(EmptyPlan())
      'nothing'
    """

    def register(fn: F) -> F:
        _RUNNERS[plan, way] = fn
        return fn

    return register


def runner_of(plan: Any, way: str) -> Callable[..., Any]:
    """Return the function that was registered to run a plan, for example on a mesh.

    `plan.on_mesh()` and similar methods call the returned function. If the plan's type has no such
    function, the function of the nearest base class is returned.

    Args:
      plan: the plan to run.
      way: the name under which the function is registered, such as "simulate".

    Raises:
      ConfigError: no function is registered for this type of plan and this name.
    """
    importlib.import_module("dtrans.run.runners")
    for kind in type(plan).__mro__:
        if (kind, way) in _RUNNERS:
            return _RUNNERS[kind, way]
    names = {other for kind, other in _RUNNERS if isinstance(plan, kind)}
    ways = sorted(names - {"roles", "verify"})
    remedy = f"; use one of {', '.join(ways)}" if ways else ""
    raise ConfigError(f"a {type(plan).__name__} cannot run in the way {way!r}{remedy}")
