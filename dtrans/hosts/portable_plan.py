"""Plans in a form that can be pickled, so that another process can rebuild them.

A jaxpr cannot be pickled: it refers to tracebacks, and to primitives that JAX compares by identity.
Ray pickles functions with cloudpickle. So the driver sends the call that made the plan
(`dtrans.plan.PlanRecipe`). This call consists of the transform, such as `dtrans.pserver`, and its
options. For each traced program it also has the function and the types of its arguments. The other
process traces the functions and calls the transform. It raises an error if the fingerprint of the
new plan differs from the original's.
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
    """Form of a traced program that can be pickled: the function, to be traced again.

    Attributes:
      function: the function that was traced.
      types: the types of the program's inputs.
    """

    function: TracedFunction
    types: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, program: Program) -> PortableProgram:
        """Return the form of a program that can be pickled and sent to another process.

        Raises:
          ConfigError: the program is not the result of `dtrans.trace`.
        """
        if not isinstance(program.specializer, TracedFunction):
            raise ConfigError(
                f"on_ray: actors trace the step again, but program {program.name} was not "
                "returned by dtrans.trace(...); plan with programs that dtrans.trace returned"
            )
        types = []
        for t in program.inputs.values():
            weak = bool(getattr(t, "weak_type", False))
            types.append(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=weak))
        return cls(program.specializer, tuple(types))

    def traced(self) -> Program:
        """Trace the function in this process; return the program."""
        return self.function(self.types)


@dataclasses.dataclass(frozen=True)
class PortablePlan:
    """Form of a plan that can be pickled: the function call by which it was made.

    Another process makes the same call with programs that it traces itself. Then it compares the
    fingerprints of the two plans.

    Attributes:
      transform: the transform, such as the function behind `dtrans.pserver`.
      programs: the transform's arguments that are programs, by name.
      options: the transform's other arguments, by name.
      identity: the hashes that make up the plan's fingerprint, by name.
    """

    transform: Any
    programs: Mapping[str, PortableProgram]
    options: Mapping[str, Any]
    identity: Mapping[str, str]

    @classmethod
    def of(cls, plan: Any) -> PortablePlan:
        """Return the form of a plan that can be pickled and sent to another process.

        Raises:
          ConfigError: the plan was derived from another plan, or a program is not the result of
            `dtrans.trace`.
        """
        if plan.recipe is None:
            raise ConfigError(
                f"on_ray: actors rebuild the plan from its strategy's arguments, but {plan!r} was "
                "derived from another plan; call the strategy (dtrans.pserver, dtrans.nccl2, "
                "dtrans.sharding, dtrans.pipeline) with these options instead"
            )
        programs, options = {}, {}
        for name, x in plan.recipe.arguments.items():
            if isinstance(x, Program):
                programs[name] = PortableProgram.of(x)
            else:
                options[name] = x
        return cls(plan.recipe.transform, programs, options, plan.identity)

    def rebuild(self, **changed: Any) -> Any:
        """Make the plan again in this process, and check that it equals the original.

        Args:
          changed: options that have other values in this process, such as the servers' endpoints.

        Raises:
          PeerError: the plan differs from the original.
        """
        programs = {n: p.traced() for n, p in self.programs.items()}
        plan = self.transform(**programs, **{**self.options, **changed})
        apart = fingerprint.differences("this process", plan.identity, "the driver", self.identity)
        if apart:
            raise PeerError(
                f"this process's plan differs from the driver's: {'; '.join(apart)}. A traced "
                "function must not depend on global variables, files or library versions that "
                "only the driver has"
            )
        return plan


def pickled(value: Any, cloudpickle: Any) -> bytes:
    """Pickle a value, such as a plan, for a process with other JAX primitive objects.

    Functions are pickled by value, and JAX primitives by the name of their module variable.
    cloudpickle stores a closure with the globals that it reads, which may include primitives. JAX
    compares primitives by identity, so the other process must use its JAX's primitives.

    Args:
      value: the value.
      cloudpickle: the module, or Ray's copy of it.

    Raises:
      ConfigError: a part of the value cannot be pickled.
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
            f"pickled: {e}. Move the object that cannot be pickled into the function, or import "
            "the object from a module"
        ) from e
    return file.getvalue()


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
