"""Plans of all strategies: the base class, the recipe of a plan, and the registry of realisers.

A plan is a value. It can be printed, compared and costed without devices. A *realiser* runs a plan
in one of these ways:

    "mesh"       the full job in this process, on a mesh of its devices
    "simulate"   the full job on one device
    "cluster"    this process's part of a job of processes
    "function"   the program of one trainer, as a pure function
    "ray"        the full job as actors of a Ray cluster, with this process as the driver
    "roles"      no job: a table of its processes
    "verify"     no job: the traced step, for `Plan.verify`

`dtrans.job` has the interface of the jobs, and `dtrans.costs` the interface of their costs.

`dtrans.run` is a layer above all plans, so no plan imports it. It registers its realisers here. The
first plan that runs imports `dtrans.run`: the only import from a lower layer.
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


@dataclasses.dataclass(frozen=True)
class PlanRecipe:
    """Recipe of a plan: the call of a transform. The same call in another process plans the same.

    Attributes:
      transform: `dtrans.pserver`, `dtrans.nccl2`, `dtrans.sharding` or `dtrans.pipeline`.
      arguments: its arguments by name, including `main` and `startup`.
    """

    transform: Callable[..., Plan]
    arguments: Mapping[str, Any]


P = ParamSpec("P")
PlanT = TypeVar("PlanT", bound="Plan")


def with_recipe(transform: Callable[P, PlanT]) -> Callable[P, PlanT]:
    """Decorate a transform so that its plans have a recipe (`Plan.recipe`)."""

    @functools.wraps(transform)
    def run(*args: P.args, **options: P.kwargs) -> PlanT:
        plan = transform(*args, **options)
        recipe = PlanRecipe(run, inspect.signature(transform).bind(*args, **options).arguments)
        # not a field: `dataclasses.replace` would copy it to a plan that this call does not return
        object.__setattr__(plan, "recipe", recipe)
        return plan

    return run


class Plan(abc.ABC):
    """Plan of a training step by several roles; transforms return plans.

    Attributes:
      main: the step, with calls inlined and exact roles.
      recipe: the call that returned the plan; None for a plan derived from another plan.
    """

    main: Program
    recipe: ClassVar[PlanRecipe | None] = None
    _right: ClassVar[tuple[int, ...]]  # the columns of numbers
    _code: ClassVar[int]  # the column of names

    # -- values ----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Return True for a plan with equal options and programs, such as that of an equal call."""
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
        """The fingerprint of the plan, in parts (`dtrans.ir.fingerprint`), without endpoints."""
        startup: Program = self.startup  # type: ignore[attr-defined]
        programs = {name: program.fingerprint for name, program in self.programs.items()}
        return {**fingerprint.environment(), "init": startup.fingerprint, **programs}

    @cached_property
    def _field_texts(self) -> dict[str, str]:
        """The compared fields of the plan, by name, as canonical text."""
        texts = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.compare:
                texts[field.name] = fingerprint.canonical_text(getattr(self, field.name))
        return texts

    # -- description -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def programs(self) -> Mapping[str, Program]:
        """The program of each role, by name; `trainer` if all trainers share one program."""

    @abc.abstractmethod
    def costs(self) -> Costs:
        """Return each role's bytes and floating-point operations in a step."""

    @property
    @abc.abstractmethod
    def notes(self) -> list[str]:
        """Return remarks for the user that the table does not show."""

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
        """Run the full job in this process.

        Args:
          devices: devices, or a mesh whose devices are used in their order. Trainers, ranks or
            stages use the first of them. Default: all devices of this process.
          donate: let each step reuse the memory of its input state, which is then invalid.
          options: `on_nonfinite`, except for pipelines: "warn" or "error" checks gradients for
            infinities and NaNs, and names the trainer and the leaves; "ignore" does not check.
            `unsplit_inputs` of a pserver plan: names of batch arrays that are replicated.

        Raises:
          ConfigError: fewer devices than the plan needs, or a plan that cannot run in one process.
        """
        if isinstance(devices, Mesh):
            devices = list(devices.devices.flat)
        return self._realise("mesh", devices, donate=donate, **options)

    def on_cluster(self, *, donate: bool = True, **options: Any) -> Job:
        """Run this process's part of a job of processes.

        Each process calls this, then `init` and `step`, with its part of the batch. Before, a
        process of a collective job or a pipeline calls `dtrans.connect()`. A process of a job with
        parameter servers reads its role from the environment (`dtrans.Role.from_env`).

        Args:
          donate: as in `on_mesh`. Jobs that survive lost trainers never donate, and servers always
            do.
          options: `on_nonfinite`, as in `on_mesh`; with parameter servers also options of
            `dtrans.Executor`: `deadline`, `patience`, `wait_port`, `allow_remote`,
            `transport_encryption`.

        Raises:
          ConfigError: this process is not connected, or the number of processes differs from the
            plan's; donate=False for a server.
        """
        return self._realise("cluster", donate=donate, **options)

    def simulate(self) -> Job:
        """Run the full job on one device, for tests and notebooks."""
        return self._realise("simulate")

    def on_ray(self, batches: Any = None, **options: Any) -> Job:
        """Run the job as actors of a Ray cluster, with this process as the driver.

        It needs the extra `ray`. Each role is an actor in a placement group, and calls
        `on_cluster`. Ray pickles the traced functions, and each actor repeats the plan's recipe.
        The driver calls `init`, `step` and the other methods of the job. Its state is a handle of
        the actors' states.

        Args:
          batches: source of each trainer's part of the batch, read in its actor: a function
            (trainer, step) -> batch; or a dataset of Ray Data, whose columns have the names of the
            step's arguments. `job.step(state)` then has no batch. Default: the driver passes the
            global batch to `job.step(state, *batch)`, and trainers share it.
          options: of `dtrans.hosts.on_ray.RayJob`: `address`, `trainers_on`, `trainer_resources`,
            `server_resources`, `processes`, `rows`, `checkpoints`, `env`, `deadline`, `patience`.

        Raises:
          ConfigError: Ray is not installed, or the plan has no recipe.
          DeadlineError: the cluster has no room for the roles.
          PeerError: a role failed, or its node is lost.
        """
        return self._realise("ray", batches, **options)

    def roles(self, command: Sequence[str] = (), **options: Any) -> Any:
        """Return a table of the job's processes: roles, variables, memory and bytes per step.

        It starts no process, and depends on the plan alone.

        Args:
          command: program and arguments of each process.
          options: `env`, variables of all processes; `cores`, processors of each. For collectives
            and pipelines also `processes`, if each has several devices, and `endpoints`; by
            default loopback from port 6174.

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
        return realiser(self, "roles")(self, command, **options)

    def verify(self, *batch: Any, points: Sequence[int] = STEPS, seed: int = 0) -> Report:
        """Check that the job computes the step: compare both in a finite field, without tolerance.

        The traced step of the job is compared with the single-device step at random points
        (docs/verify.md). It needs no device. It compiles only the startup program of tables whose
        rows catch up.

        Args:
          batch: the global batch, as `step` takes it behind the state: arrays, or their types
            (`jax.ShapeDtypeStruct`). Integers and keys of arrays are used unchanged; floats are
            varied around the passed ones. Default: the types with which the step was traced.
          points: numbers of single-device steps after which states are compared.
          seed: seed of the points.

        Returns:
          A report: `report.equal`, `report.complete`, and the names of outputs that differ.

        Raises:
          ConfigError: the plan has rows that may be stale (`dtrans.Rows(staleness=...)`), or local
            steps whose results are merged in a way that has no replay.

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
        main, specs = self.main, self.main.args[2:]
        if not batch:
            batch = tuple(_traced_types(main, spec) for spec in specs)
        if len(batch) != len(specs):
            raise BatchError(
                f"the step takes {len(specs)} batch arguments, {len(batch)} were given"
            )
        types = jax.tree.map(_type_of, batch)
        input_types: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for spec, tree, type_tree in zip(specs, batch, types, strict=True):
            input_types.update(zip(spec.names, spec.flatten(type_tree), strict=True))
            for name, x in zip(spec.names, spec.flatten(tree), strict=True):
                if not isinstance(x, (jax.ShapeDtypeStruct, ShapedArray)):
                    values[name] = x
        traced: Any = self._realise("verify", types)

        # the single-device step: of asynchronous modes and GEO-SGD a sequential replay
        if traced.replay is None:
            state_names = [n for spec in main.args[:2] for n in spec.names]
            state_types = values_at(main.inputs, state_names)
            expected = main.specialize_flat([*state_types, *input_types.values()])
        else:
            expected = traced.replay
            input_types = subset(expected.inputs, input_types)
            values = {n: jnp.broadcast_to(x, input_types[n].shape) for n, x in values.items()}
        startup: Program = self.startup  # type: ignore[attr-defined]
        comparison = Comparison(
            expected, traced, input_types, main.frozen_constants, startup, values
        )
        return comparison.check(repr(self)[1:-1], points=points, seed=seed)

    def _realise(self, way: str, *args: Any, **options: Any) -> Job:
        with within_mesh(None):
            job: Job = realiser(self, way)(self, *args, **options)
        return job


def _traced_types(program: Program, spec: TreeSpec) -> Any:
    """Return the types with which an argument was traced, in its structure."""
    return spec.unflatten(values_at(program.inputs, spec.names))


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array, a type or a Python number."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x) if jnp.isscalar(x) else x.dtype)


# -- the registry ----------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])

_REALISERS: dict[tuple[type, str], Callable[..., Any]] = {}


def realises(plan: type, way: str) -> Callable[[F], F]:
    """Register a class or a function as the realiser of a type of plans in one way.

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
    """Return the realiser that is registered for a plan's type, or for its nearest base class.

    Raises:
      ConfigError: no realiser runs such plans in this way.
    """
    importlib.import_module("dtrans.run.realisers")
    for kind in type(plan).__mro__:
        if (kind, way) in _REALISERS:
            return _REALISERS[kind, way]
    names = {other for kind, other in _REALISERS if isinstance(plan, kind)}
    ways = sorted(names - {"roles", "verify"})
    remedy = f"; it runs by {', '.join(ways)}" if ways else ""
    raise ConfigError(f"nothing runs a {type(plan).__name__} by {way!r}{remedy}")
