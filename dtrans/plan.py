"""Plans find what runs them: realisers are registered by the type of plan and the way in which they run it.

    "mesh"       the whole job in this process, on a mesh of its devices
    "simulate"   the whole job on one device
    "cluster"    this process's part of a job of processes
    "function"   the program of one trainer, as a pure function

`dtrans.run` stands above all plans, so no plan imports it. It registers its realisers here, and is imported when the
first plan is run: that is the one import that goes up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from dtrans.errors import ConfigError


class Job(Protocol):
    """A plan, running: `init`, `step`, and functions of the state in between."""

    @property
    def plan(self) -> Any:
        """What it runs."""

    def init(self, *args: Any) -> Any:
        """The first state, from the arguments of init."""

    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        """One step: (state, loss[, aux]), or whatever else the step returns beside its state."""

    def params(self, state: Any) -> Any:
        """The parameters, as the pytree that they were given in."""

    def opt_state(self, state: Any) -> Any:
        """The optimizer's state, as the pytree that it was given in."""


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
