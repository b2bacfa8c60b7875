"""Plans of all strategies: the base class, the call that a plan comes from, and the registry of jobs.

A plan is a value. It can be printed, compared and costed anywhere. There is a way to run it for each
of

    "mesh"       the whole job in this process, on a mesh of its devices
    "simulate"   the whole job on one device
    "cluster"    this process's part of a job of processes
    "function"   the program of one trainer, as a pure function
    "ray"        the whole job as actors of a Ray cluster, driven from this process (`dtrans.hosts.on_ray`)

and, as "roles", a table of the processes of its job. `dtrans.job` is the interface of the jobs, and
`dtrans.costs` that of their costs.

`dtrans.run` stands above all plans, so no plan imports it. It registers its realisers here. The first
plan that runs imports it: the one import that goes up.
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
from dtrans.verification.check import STEPS, Comparison
from dtrans.verification.outcome import Report


if TYPE_CHECKING:
    from dtrans.costs import Costs
    from dtrans.job import Job


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

    # -- values ----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Return True for a plan of equal options and programs, as two equal calls make."""
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
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {
            f.name: fingerprint.canonical_text(getattr(self, f.name)) for f in fields if f.compare
        }

    # -- what a plan says ------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def programs(self) -> Mapping[str, Program]:
        """The program of each role: of `trainer` where all trainers have the same."""

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
        comparison = Comparison(
            traced.replay or whole, traced, flat, main.frozen_constants, startup, given
        )
        return comparison.check(repr(self)[1:-1], points=points, seed=seed)

    def _realised(self, way: str, *args: Any, **options: Any) -> Job:
        with within_mesh(None):
            job: Job = realiser(self, way)(self, *args, **options)
        return job


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
    """Return the function that runs a plan in a way: the one of its type, or of its nearest base
    class.

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
