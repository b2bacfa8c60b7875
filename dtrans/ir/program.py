"""Programs: jaxprs with names.

A `Program` is a closed jaxpr, a name for each of its inputs and outputs, and a role for each of its
equations. Names are pytree paths (`params/dense/kernel`, `opt_state/0/mu/w`, `x`). *State is paired
by path*: an output with the name of an input is the new value of that input after one run. The
transforms of dtrans are functions from programs to programs.

The names of roles come from Paddle's `OpRole` (paddle/fluid/framework/op_proto_maker.h):

    forward    the loss            lr_sched   optimizer arithmetic without parameters and gradients
    backward   gradients           rpc        communication
    optimize   new parameters      dist       splitting, joining, averaging for distribution

A jaxpr has fixed shapes, but a program can be traced again for others, as `jax.jit` does.
`Program.specialize(*arguments)` returns the cached program for another batch size. Only the shapes
of state are fixed. If a pass rewrote the program (`Program.rewritten`), `specialize` specializes
the program before the pass, and runs the pass on the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    NamedJaxpr,
    Var,
    closed_with,
    equations,
    jaxpr_as_fun,
)
from dtrans.errors import DtransError, NotRunnableError, TraceError
from dtrans.ir import display, fingerprint
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals, variables_read
from dtrans.ir.op_list import Op, check_names, list_ops, name_values
from dtrans.ir.pytree import TreeSpec, all_names, as_array
from dtrans.ir.selection import values_at


FORWARD, BACKWARD, OPTIMIZE, LR_SCHED, RPC, DIST = (
    "forward",
    "backward",
    "optimize",
    "lr_sched",
    "rpc",
    "dist",
)
ROLES = (FORWARD, BACKWARD, OPTIMIZE, LR_SCHED, RPC, DIST)
# the roles whose equations form each part of a program's fingerprint
_PARTS = {"loss": (FORWARD, BACKWARD), "update": (OPTIMIZE, LR_SCHED), "exchange": (RPC, DIST)}

Signature = tuple[tuple[tuple[int, ...], Any], ...]
Types = Mapping[str, Any]  # input name -> type
T = TypeVar("T")
Specializer = Callable[[Sequence[jax.ShapeDtypeStruct]], "Program"]


@dataclasses.dataclass(frozen=True, eq=False)
class Program(NamedJaxpr):
    """Closed jaxpr with names for its inputs and outputs, and a role for each equation.

    Attributes:
      name: name of the program, e.g. `step`, `trainer 0`.
      jaxpr: the closed jaxpr; its inputs are the arrays of `args`, its outputs the arrays of `out`.
      args: structure of each argument.
      out: structure of the result.
      roles: one of `ROLES` for each equation.
      guessed: True if roles were guessed from scope names, before a transform analysed the step.
      labels: names of values that are neither inputs nor outputs, e.g. `params/w@GRAD.block0`.
      ambiguous_outputs: text for errors if it is unclear which output is the new value of an input;
        else empty.
      numbers: outputs that the traced function returned as Python numbers.
      frozen_constants: name of a constant state array -> the number in all its entries.
      takes_one_state: True if the step has one state argument (`dtrans.step.one_state`).
      specializer: returns the program for other types of the inputs; None if shapes are fixed.
      plan: the plan that this program belongs to, if any.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> p = dtrans.trace(lambda x: {"y": 2.0 * x}, jnp.ones(3))
      >>> [op.type for op in p.ops], p.in_names, p.out_names
      (['mul'], ('x',), ('y',))
      >>> p(jnp.arange(3.0))["y"].tolist()
      [0.0, 2.0, 4.0]
    """

    name: str
    jaxpr: ClosedJaxpr
    args: tuple[TreeSpec, ...]
    out: TreeSpec
    roles: tuple[str, ...]
    labels: Mapping[Var, str] = dataclasses.field(default_factory=dict, repr=False)
    specializer: Specializer | None = dataclasses.field(default=None, repr=False)
    ambiguous_outputs: str = ""
    guessed: bool = False
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    frozen_constants: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    takes_one_state: bool = False
    plan: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_names(self.name, self)
        if len(self.roles) != len(self.inner.eqns):
            raise TraceError(
                f"program {self.name} has {len(self.inner.eqns)} equations but {len(self.roles)} "
                "roles"
            )

    @classmethod
    def written(
        cls,
        name: str,
        b: Builder,
        args: tuple[TreeSpec, ...],
        out: TreeSpec,
        values: Mapping[str, Atom],
    ) -> Program:
        """Return the program with a builder's equations. It cannot be specialized to other shapes.

        Args:
          name: name of the program.
          b: the builder.
          args: structure of each argument.
          out: structure of the result.
          values: name -> value; contains at least the names of `out`.
        """
        return cls(name, b.build(values_at(values, out.names)), args, out, tuple(b.roles), b.labels)

    # -- properties --------------------------------------------------------------------------------

    @cached_property
    def in_names(self) -> tuple[str, ...]:
        """Name of each input array."""
        return tuple(all_names(self.args))

    @cached_property
    def out_names(self) -> tuple[str, ...]:
        """Name of each output array."""
        return self.out.names

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Type (shape and dtype) of each input: name -> type."""
        return {n: v.aval for n, v in self.invars.items()}

    @cached_property
    def outputs(self) -> dict[str, Any]:
        """Type (shape and dtype) of each output: name -> type."""
        return {n: v.aval for n, v in self.outvars.items()}

    @cached_property
    def read(self) -> frozenset[str]:
        """Names of the inputs that the program uses, in an equation or as an output."""
        used = set(variables_read(self.eqns, self.inner.outvars))
        return frozenset(n for n, v in self.invars.items() if v in used)

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Names that are both input and output: the state that a run updates."""
        outs = set(self.out_names)
        return tuple(n for n in self.in_names if n in outs)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Equations in order, as ops with named operands."""
        return list_ops(self, self.roles, self.value_names)

    @cached_property
    def value_names(self) -> dict[Var, str]:
        """Name of every value: an input, a label, an output, or a number."""
        return name_values(self, self.labels)

    @cached_property
    def communicates(self) -> bool:
        """True if the program contains communication (`is_communication`)."""
        return any(is_communication(eqn) for eqn in equations(self.jaxpr))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the computation: names, types, equations and constants."""
        return fingerprint.digest("\n".join(self.fingerprints.values()))

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint in parts: `loss`, `update` and `exchange` (see `dtrans.ir.fingerprint`)."""
        return fingerprint.program_parts(self, _PARTS)

    # -- calls -------------------------------------------------------------------------------------

    def flatten(self, *args: Any) -> list[Any]:
        """Flatten the arguments of a call into the list of input arrays.

        Raises:
          TraceError: an argument has a different structure than in the trace.
        """
        if len(args) != len(self.args):
            raise TraceError(
                f"program {self.name} takes {len(self.args)} arguments, {len(args)} were given; "
                "pass the same arguments as to dtrans.trace"
            )
        flat: list[Any] = []
        for i, (spec, arg) in enumerate(zip(self.args, args, strict=True)):
            flat += spec.flatten(as_array(arg), f"argument {i} of program {self.name}")
        return flat

    def specialize(self, *args: Any) -> Program:
        """Return the program for the shapes of `args`: this object, or a cached new trace.

        Raises:
          TraceError: the shape or dtype of state (parameters, optimizer state) differs, or the
            program cannot be traced again.
        """
        return self.specialize_flat(self.flatten(*args))

    def specialize_flat(self, arrays: Sequence[Any]) -> Program:
        """Return the program for the shapes of these input arrays; see `specialize`."""
        wanted, family = signature(arrays), self._family
        if wanted == self._signature:
            return self
        if wanted not in family:
            program = family[wanted] = _retrace(self, wanted)
            vars(program).setdefault("_family", family)
        return family[wanted]

    def rewritten(
        self,
        pass_: Callable[[Program], Program],
        types: Callable[[Types], Types] | None = None,
        result: Program | None = None,
    ) -> Program:
        """Return `pass_(self)`, with a specializer that runs the pass again for other shapes.

        For new types of its inputs, the result first specializes this program to the types with the
        same names, and then runs the pass. State keeps its types.

        Args:
          pass_: returns the rewritten program, for any shapes.
          types: maps new types of the result's inputs to types of this program's inputs; needed if
            the pass changes names or shapes of inputs.
          result: `pass_(self)`, if it is computed already.

        Example:
          >>> import dataclasses, jax.numpy as jnp, dtrans
          >>> renamed = lambda program: dataclasses.replace(program, name="twice")
          >>> p = dtrans.trace(lambda x: {"y": 2.0 * x}, jnp.ones(3)).rewritten(renamed)
          >>> other = p.specialize(jnp.ones(5))
          >>> other.name, other.inputs["x"].shape, other.specialize(jnp.ones(3)) is p
          ('twice', (5,), True)
        """
        if result is None:
            result = pass_(self)
        if result is self:
            return self
        again = None
        if self.specializer is not None:
            again = Rewrite(self, pass_, result.in_names, types)
        return dataclasses.replace(result, specializer=again)

    def returning(self, out: TreeSpec, names: Sequence[str], **changed: Any) -> Program:
        """Return a program that computes some outputs of this program, in a new structure.

        The new program cannot be specialized to other shapes.

        Args:
          out: the new structure.
          names: name of this program's output for each array of `out`.
          changed: other fields to replace.
        """
        values = self.outvars
        jaxpr = closed_with(self.jaxpr, outvars=values_at(values, names))
        return self.with_jaxpr(jaxpr, out=out, roles=self.roles, **changed)

    def with_jaxpr(self, jaxpr: ClosedJaxpr, **changed: Any) -> Program:
        """Return this program with another jaxpr; its shapes are fixed.

        Args:
          jaxpr: the jaxpr.
          changed: other fields to replace; the default of `roles` is "forward" for each equation.

        Example:
          >>> import jax.numpy as jnp, dtrans
          >>> p = dtrans.trace(lambda x: 2.0 * x, jnp.ones(3))
          >>> p.with_jaxpr(p.jaxpr).roles
          ('forward',)
        """
        changed.setdefault("roles", (FORWARD,) * len(jaxpr.jaxpr.eqns))
        return dataclasses.replace(self, jaxpr=jaxpr, specializer=None, **changed)

    def once(self, make: Callable[[Program], T]) -> T:
        """Return `make(self)`; the result is computed once and cached in the program.

        Args:
          make: a pure function, which reads only the program.
        """
        results = vars(self).setdefault("_results", {})
        if make not in results:
            results[make] = make(self)
        return cast(T, results[make])

    def __call__(self, *args: Any) -> Any:
        """Run the program on the default device of this process.

        Raises:
          NotRunnableError: the program contains communication.
        """
        flat = self.flatten(*args)
        program = self.specialize_flat(flat)
        if program.communicates:
            raise _call_error(program)
        return program.out.unflatten(program.compiled(*flat))

    @cached_property
    def compiled(self) -> Callable[..., list[Any]]:
        """Jitted function from the input arrays to the output arrays."""
        return jax.jit(jaxpr_as_fun(self.jaxpr))

    @cached_property
    def _signature(self) -> Signature:
        return signature(avals(self.inner.invars))

    @cached_property
    def _family(self) -> dict[Signature, Program]:
        """Cache of specialized programs: signature -> program; all programs of a trace share it."""
        # Inputs of a trace may have weak types (a Python number), but arguments of a call never do.
        # Strong types lead to other equations, so a program with weak types fits no call.
        return {} if _has_weak_types(self.inner) else {self._signature: self}

    # -- display -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        return display.text(self)

    def __repr__(self) -> str:
        counts = f"{len(self.in_names)} inputs, {len(self.ops)} ops, {len(self.out_names)} outputs"
        return f"<Program {self.name}: {counts}>"

    def _repr_html_(self) -> str:
        return display.html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))


def is_communication(eqn: JaxprEqn) -> bool:
    """Return True if the primitive of an equation is communication (`dtrans.ops`).

    JAX alone cannot run it. A job replaces it by messages or by collectives of JAX.
    """
    return getattr(eqn.primitive, "communicates", False)


def _has_weak_types(jaxpr: Jaxpr) -> bool:
    return any(getattr(v.aval, "weak_type", False) for v in jaxpr.invars)


def _call_error(program: Program) -> NotRunnableError:
    """Return the error to raise if a program that contains communication is called."""
    kinds = sorted({op.type for op in program.ops if op.role == RPC})
    return NotRunnableError(
        f"program {program.name} contains communication ({', '.join(kinds)}), so it cannot be "
        "called; run it with dtrans.Executor(), or run the full job with plan.on_mesh()"
    )


# -- other shapes ----------------------------------------------------------------------------------


def signature(arrays: Sequence[Any]) -> Signature:
    """Return the shape and dtype of each array; without x64, 64-bit dtypes become 32-bit ones."""

    def dtype(x: Any) -> Any:
        d = x.dtype
        if jnp.issubdtype(d, jax.dtypes.extended):
            return d
        return jax.dtypes.canonicalize_dtype(d)

    return tuple((tuple(x.shape), dtype(x)) for x in map(as_array, arrays))


def _retrace(program: Program, wanted: Signature) -> Program:
    """Trace a program again for other shapes.

    Raises:
      TraceError: the shape of state differs, all shapes are fixed, or the function fails.
    """
    state, traced = set(program.state), signature(avals(program.inner.invars))
    for name, (shape, dtype), (old_shape, old_dtype) in zip(
        program.in_names, wanted, traced, strict=True
    ):
        is_fixed = name in state or program.specializer is None
        if is_fixed and (shape, dtype) != (old_shape, old_dtype):
            raise TraceError(
                f"{name} is {dtype}{list(shape)}, but program {program.name} was traced with "
                f"{old_dtype}{list(old_shape)}"
                + ("; trace it again with these shapes" if name not in state else "")
            )
    assert program.specializer is not None
    # the program is cached, so its trace must not depend on the mesh of this caller
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        try:
            types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in wanted]
            found = program.specializer(types)
            if program.plan is None:
                return found
            return dataclasses.replace(found, plan=program.plan)
        except DtransError:
            raise  # errors of dtrans already name the cause
        except (TypeError, ValueError) as e:
            inputs = zip(program.in_names, wanted, traced, strict=True)
            name, (shape, _), (old_shape, _) = next(x for x in inputs if x[1] != x[2])
            rows = next(old for old, new in zip(old_shape, shape, strict=True) if old != new)
            by_row = [n for n in program.state if program.inputs[n].shape[:1] == (rows,)]
            state_remedy = ""
            if by_row:
                state_remedy = (
                    f". If {by_row[0]} has a row for each row of the batch, pass it to the step as "
                    "an argument in place of state, and return it after the loss"
                )
            raise TraceError(
                f"{program.name} was traced with {name} of shape {tuple(old_shape)}, but tracing "
                f"it again with shape {tuple(shape)} failed: {e}\n"
                "A plan traces the step with the full batch and with a part of it. The batch of "
                "dtrans.trace is the rows of one trainer (in dtrans.pipeline: the full batch), so "
                "if you passed the rows of all trainers, trace with fewer rows. If a constant in "
                "the step has the size of the first batch, compute it from the shape of an "
                f"argument, or pass it as an argument{state_remedy}"
            ) from e


@dataclasses.dataclass(frozen=True, eq=False)
class Rewrite:
    """Function that returns a rewritten program for other shapes, by running the pass again.

    Attributes:
      source: the program that the pass rewrote.
      pass_, types: arguments of `Program.rewritten`.
      names: names of the rewritten program's inputs.
    """

    source: Program
    pass_: Callable[[Program], Program]
    names: tuple[str, ...]
    types: Callable[[Types], Types] | None

    def __call__(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Return the rewritten program for these types of its inputs."""
        new_types: Types = dict(zip(self.names, types, strict=True))
        if self.types is not None:
            new_types = self.types(new_types)
        state_names = set(self.source.state)
        wanted = []
        for name, old_type in self.source.inputs.items():
            if name in state_names:
                wanted.append(old_type)
            else:
                wanted.append(new_types.get(name, old_type))
        return self.source.specialize_flat(wanted).rewritten(self.pass_, self.types)


def rewrite_root(program: Program, change: Callable[[Program], Program]) -> Program:
    """Change the traced program from which `program` was rewritten, and run all passes again.

    Args:
      program: a traced program, or one that passes rewrote.
      change: returns the changed traced program.
    """
    again = program.specializer
    if isinstance(again, Rewrite):
        return rewrite_root(again.source, change).rewritten(again.pass_, again.types)
    return change(program)
