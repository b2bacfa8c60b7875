"""What all plans have in common, and what all jobs: and how a plan finds what runs it.

A plan is a value. It can be printed, compared and costed anywhere; it has a way of running for each of

    "mesh"       the whole job in this process, on a mesh of its devices
    "simulate"   the whole job on one device
    "cluster"    this process's part of a job of processes
    "function"   the program of one trainer, as a pure function

`dtrans.run` stands above all plans, so no plan imports it. It registers its realisers here, and is imported when the
first plan is run: that is the one import that goes up.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from jax.sharding import Mesh

from dtrans.errors import ConfigError, StateError
from dtrans.ir import display
from dtrans.ir.cost import flops
from dtrans.ir.program import Program


if TYPE_CHECKING:
    from types import TracebackType

    import jax


@dataclasses.dataclass(frozen=True)
class RoleCost:
    """What one role of a job holds, moves and computes in a step.

    Attributes:
      role: `trainer`, `127.0.0.1:6174`, `stage 0`.
      count: how many have this role.
      held: bytes that each holds between steps.
      sent, received: bytes that each gives to others in a step, and takes from them. Of a collective these are its
        operands and its results; what crosses a link is up to the algorithm.
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
        return display.plan_text("costs of a step, for each", self._header, self._rows(), (), right=range(1, 7))

    def _repr_html_(self) -> str:
        return display.plan_html("costs of a step, for each", self._header, self._rows(), (), code=0)


class Plan(abc.ABC):
    """Training of one step by several roles: what a transform returns.

    Attributes:
      main: the step, with calls inlined and exact roles.
    """

    main: Program
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
        return display.plan_text(self._title, self._header, self.rows, self.notes, right=self._right)

    def __repr__(self) -> str:
        return f"<{self._title}>"

    def _repr_html_(self) -> str:
        return display.plan_html(self._title, self._header, self.rows, self.notes, code=self._code)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))

    # -- running ---------------------------------------------------------------------------------

    def on_mesh(
        self, devices: Sequence[jax.Device] | Mesh | None = None, *, donate: bool = True, **options: Any
    ) -> Job:
        """Run the whole job in this process.

        Args:
          devices: trainers, ranks or stages take the first; of a mesh its devices in their order. All of this
            process's by default.
          donate: let each step reuse the memory of the state it was given, which cannot be used again.
          options: `unsplit_inputs` of a pserver plan: names of batch arrays that every trainer gets whole.

        Raises:
          ConfigError: fewer devices than the plan needs, or a plan that cannot run in one process.
        """
        if isinstance(devices, Mesh):
            devices = list(devices.devices.flat)
        return self._realised("mesh", devices, donate=donate, **options)

    def on_cluster(self, *, donate: bool = True, **options: Any) -> Job:
        """Run this process's part, in a job of processes. All of them call this, then `init` and `step`.

        In collective modes and pipelines `dtrans.connect()` comes first; with parameter servers the environment says
        who this process is (`dtrans.Role.from_env`). Each gives its own part of the batch to `step`.

        Args:
          donate: as in `on_mesh`; never where the job goes on when trainers are lost, and always by servers.
          options: of `dtrans.Executor`, with parameter servers: `deadline`, `wait_port`, `allow_remote`.

        Raises:
          ConfigError: not connected, or to another number of processes than the plan is for; donate=False, of servers.
        """
        return self._realised("cluster", donate=donate, **options)

    def simulate(self) -> Job:
        """Run the whole job on one device: for tests, notebooks, and machines that one does not have."""
        return self._realised("simulate")

    def _realised(self, way: str, *args: Any, **options: Any) -> Job:
        job: Job = realiser(self, way)(self, *args, **options)
        return job


class Job(abc.ABC):
    """A plan, running: `init`, `step`, and functions of the state in between. The job itself holds compiled code.

    Jobs of parameter servers also have `roles`, those of this process who save a piece of a checkpoint, and
    `held(state, endpoint)`, what a server holds.

    Attributes:
      plan: What it runs.
    """

    plan: Any
    _closed = False

    run_id: str  # which run of the job it is: the default tag of its checkpoints
    saves = True  # whether this process saves what all of them have alike

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raises StateError for what is no state of this job, or none any more."""

    @abc.abstractmethod
    def init(self, *args: Any) -> Any:
        """The first state, from the arguments of init."""

    @abc.abstractmethod
    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        """One step: (state, loss[, aux]), or whatever else the step returns beside its state."""

    @abc.abstractmethod
    def params(self, state: Any) -> Any:
        """The parameters, as the pytree that they were given in."""

    @abc.abstractmethod
    def opt_state(self, state: Any) -> Any:
        """The optimizer's state, as the pytree that it was given in."""

    @abc.abstractmethod
    def state_of(self, params: Any, opt_state: Any) -> Any:
        """The state of a job that goes on from a single-device (params, opt_state), as `dtrans.checkpoint.load` gives.

        Raises:
          TraceError: another structure than the step takes; StateError: an array of another shape or dtype.
        """

    @abc.abstractmethod
    def lower(self, state: Any, *batch: Any) -> Any:
        """What `step` compiles for these arguments, with `as_text()`, as `jax.jit(...).lower` gives it."""

    def close(self) -> None:
        """End the job: its lines to other processes too. A closed job makes no step."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"this job is closed: make another of its plan, {self.plan!r}")

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
    ways = sorted({w for kind, w in _REALISERS if isinstance(plan, kind)})
    raise ConfigError(
        f"nothing runs a {type(plan).__name__} by {way!r}" + (f"; it runs by {', '.join(ways)}" if ways else "")
    )
