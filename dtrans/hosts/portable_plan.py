"""Plans on their way to another process: as the call that made them, which that process makes
again.

A jaxpr cannot be pickled: it holds tracebacks, and primitives that are known by identity. Functions
can, by cloudpickle, as Ray does it. So a plan travels as its recipe (`dtrans.plan.PlanRecipe`): the
transform, its options, and for each of its two programs the function that was traced, with the
types of its arguments. The process that makes the plan again compares fingerprints. A function that
traces to another program there is refused, and not trained.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import jax

from dtrans._jax import Primitive
from dtrans.errors import ConfigError, PeerError
from dtrans.ir import fingerprint
from dtrans.ir.program import Program
from dtrans.step.trace import TracedFunction


@dataclasses.dataclass(frozen=True)
class PortableProgram:
    """A traced program as its function, and the types of its inputs."""

    function: TracedFunction
    types: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, program: Program) -> PortableProgram:
        """Return the function of a program.

        Raises:
          ConfigError: the program does not come from `dtrans.trace`.
        """
        if not isinstance(program.specializer, TracedFunction):
            raise ConfigError(
                f"on_ray: actors trace the step again, and program {program.name} keeps no "
                "function to trace; plan "
                "with what dtrans.trace(...) returned"
            )
        weak = lambda t: bool(getattr(t, "weak_type", False))
        types = (
            jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=weak(t))
            for t in program.inputs.values()
        )
        return cls(program.specializer, tuple(types))

    def traced(self) -> Program:
        """Return the program, traced in this process."""
        return self.function(self.types)


@dataclasses.dataclass(frozen=True)
class PortablePlan:
    """A plan as the call that made it, and its fingerprint.

    Attributes:
      transform: of the recipe.
      programs: the programs among its arguments, by name.
      options: its other arguments.
      identity: the parts of the plan's fingerprint.
    """

    transform: Any
    programs: Mapping[str, PortableProgram]
    options: Mapping[str, Any]
    identity: Mapping[str, str]

    @classmethod
    def of(cls, plan: Any) -> PortablePlan:
        """Return a plan as it travels.

        Raises:
          ConfigError: a plan that was derived from another one, or a program that does not come
            from `dtrans.trace`.
        """
        if plan.recipe is None:
            raise ConfigError(
                f"on_ray: actors make the plan again, and {plan!r} was derived from another plan; "
                "call the strategy (dtrans.pserver, dtrans.nccl2, dtrans.sharding, "
                "dtrans.pipeline) with these options instead"
            )
        arguments = plan.recipe.arguments
        traced = {n: x for n, x in arguments.items() if isinstance(x, Program)}
        programs = {n: PortableProgram.of(x) for n, x in traced.items()}
        options = {n: x for n, x in arguments.items() if n not in programs}
        return cls(plan.recipe.transform, programs, options, plan.identity)

    def rebuild(self, **changed: Any) -> Any:
        """Make the plan in this process.

        Args:
          changed: options with other values here, such as the endpoints of servers.

        Raises:
          PeerError: the plan differs from the original.
        """
        programs = {n: p.traced() for n, p in self.programs.items()}
        plan = self.transform(**programs, **{**self.options, **changed})
        apart = fingerprint.differences("this process", plan.identity, "the driver", self.identity)
        if apart:
            raise PeerError(
                f"the plan that this process makes is not the driver's: {'; '.join(apart)}. A "
                "traced function must not depend on what only the driver has: a global variable, "
                "a file, another version"
            )
        return plan


def pickled(value: Any, cloudpickle: Any) -> bytes:
    """Return a value as bytes, with functions by value and primitives by reference.

    Functions that a library's function made are pickled with the globals that they read. A
    primitive among these must be the library's own there too: JAX knows primitives by identity.

    Args:
      value: to be pickled.
      cloudpickle: the module, or Ray's copy of it.

    Raises:
      ConfigError: something in it cannot be pickled.
    """

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Primitive):
                for name, module in list(sys.modules.items()):
                    for attribute, found in list(getattr(module, "__dict__", {}).items()):
                        if found is obj:
                            return _attribute, (name, attribute)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file).dump(value)
    except (TypeError, AttributeError, NotImplementedError, pickle.PicklingError) as e:
        raise ConfigError(
            "on_ray: the functions of the step and the init, or their closures, cannot be "
            f"pickled: {e}. Make what "
            "cannot in the function itself, or import it from a module"
        ) from e
    return file.getvalue()


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
