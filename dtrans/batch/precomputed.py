"""Values that a job computes from the full batch, before it computes with parts of the batch.

Examples are the number of entries in a mask, a dropout mask, or a permutation of rows. These values
depend on no trained parameter. A separate program computes them from the full batch, before the
steps of the parts run. Each part gets its rows of each value, or the full value. Then the rest of
the step may need no communication: for example, a masked mean is a sum over parts once its divisor
is known.

    step      params, opt_state, *batch                       ->  its results
    becomes   *batch                                          ->  @given/0, @given/1, ...
              params, opt_state, *batch, @given/0, ...        ->  its results

`dtrans.batch.written_parts` finds these values, and proves that the parts need no communication.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, closed, constants, opened
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import avals, backward_slice
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import TreeSpec, all_names
from dtrans.ir.selection import values_at
from dtrans.step.capture import value_and_grad_p
from dtrans.step.collect import COLLECT


ROOT = "@given"  # prefix of the names of precomputed values


@dataclasses.dataclass(frozen=True)
class ValuePlace:
    """Position of a value in a step, which stays valid if the step is traced for other shapes.

    Attributes:
      in_loss: True if `eqn` is an index in the loss function, False for an index in the step.
      eqn: index of the equation.
      out: index of the output.
    """

    in_loss: bool
    eqn: int
    out: int


@dataclasses.dataclass(frozen=True, eq=False)
class Precomputed:
    """Description of the values that a job computes from the full batch before it runs the parts.

    An example is the number of tokens in the batch. The values depend on no trained parameter.

    Attributes:
      places: position of each value in the step.
      full: names of the values that every part gets in full; a part gets its rows of other values.
      fixed: untrained state, such as a key, on which the values may depend.
      equations: names of the primitives of the step that was planned. `places` are indices into
        this step, so a step with other primitives raises an error.
    """

    places: tuple[ValuePlace, ...]
    full: tuple[str, ...]
    fixed: tuple[str, ...]
    equations: tuple[str, ...]

    def _flat(self, program: Program) -> FlatStep:
        """Inline the calls of a step, and check that its equations are those of the plan."""
        step = FlatStep(program)
        if step.primitives != self.equations:
            raise BatchError(
                f"for a batch of these shapes, {program.name} has other equations than for the "
                "batch of the plan; trace the step with this batch, and make a new plan"
            )
        return step

    def with_precomputed(self, program: Program) -> Program:
        """Return a step that gets the precomputed values as its last arguments.

        Raises:
          BatchError: the step has other equations than the planned step.
        """
        step = self._flat(program)
        arguments: dict[ValuePlace, Var] = {}
        sub: dict[Var, Atom] = {}
        for place in self.places:
            value = step.value(place)
            arguments[place] = Var(value.aval)
            if not place.in_loss:
                sub[value] = arguments[place]
        eqns = _with_operands(sub, step.inner.eqns)
        if step.loss is not None:
            eqns[step.at] = self._loss(step, eqns[step.at], arguments)
        inner = step.inner
        jaxpr = closed(
            inner.constvars,
            step.constants,
            [*inner.invars, *arguments.values()],
            read_from(sub, inner.outvars),
            eqns,
            inner,
        )
        types = tuple(avals(arguments.values()))
        args = (*program.args, TreeSpec.from_tree(types, ROOT))
        return program.with_jaxpr(jaxpr, args=args, labels={})

    def _loss(self, step: FlatStep, eqn: JaxprEqn, arguments: Mapping[ValuePlace, Var]) -> JaxprEqn:
        """Add the precomputed values to the operands of the equation with the loss function."""
        inside: dict[Var, Atom] = {}
        operands = list(eqn.invars)
        new_inputs = []
        for place, argument in arguments.items():
            if place.in_loss:
                new_inputs.append(Var(argument.aval))
                inside[step.value(place)] = new_inputs[-1]
                operands.append(argument)
        body = opened(step.body)
        eqns = _with_operands(inside, body.eqns)
        new = closed(
            body.constvars,
            constants(step.body),
            [*body.invars, *new_inputs],
            read_from(inside, body.outvars),
            eqns,
            step.body,
        )
        return eqn.replace(invars=operands, params={**eqn.params, "loss": eliminate_dead(new)})

    def precompute_program(self, program: Program) -> Program:
        """Return the program that computes the precomputed values from a full batch.

        Args:
          program: the step on the full batch.

        Raises:
          BatchError: the step has other equations than the planned step.
        """
        step = self._flat(program)
        unordered, used = step.without_loss([step.value(place) for place in self.places])
        ins = dict(zip(program.in_names, step.inner.invars, strict=True))
        fixed = tuple(n for n in self.fixed if ins[n] in used)
        args = (*program.args[2:], TreeSpec(jax.tree.structure(fixed), fixed))
        inner = opened(unordered)
        invars = values_at(ins, all_names(args))
        values = constants(unordered)
        ordered = closed(inner.constvars, values, invars, inner.outvars, inner.eqns, unordered)
        jaxpr = eliminate_dead(ordered)
        result = Program(
            f"values of the full batch of {program.name}",
            jaxpr,
            args,
            TreeSpec.from_tree(tuple(avals(inner.outvars)), ROOT),
            (FORWARD,) * len(opened(jaxpr).eqns),
        )
        return program.rewritten(self.precompute_program, result=result)


def with_rows_first(main: Program, axes: Mapping[str, int]) -> Program:
    """Rewrite a step so that its batch arrays have their rows as dimension 0.

    Pipelines split arrays along dimension 0. The new step transposes the arrays back, and continues
    as before.

    Args:
      main: the step.
      axes: row dimension of each batch array of `main`.
    """
    moved = {n: axis for n, axis in axes.items() if axis}
    if not moved:
        return main

    def rows_first(step: Program) -> Program:
        b = Builder(step.jaxpr)
        ins = []
        for n, t in step.inputs.items():
            ins.append(b.input(t.update(shape=_moved(t, moved.get(n, 0), 0).shape)))
        transposed: list[Atom] = []
        for n, v in zip(step.in_names, ins, strict=True):
            transposed += b.call(_move_rows(moved[n]), v) if n in moved else [v]
        jaxpr = b.build(b.inline(step.jaxpr, *transposed))
        roles = (FORWARD,) * len(jaxpr.jaxpr.eqns)
        return dataclasses.replace(step, jaxpr=jaxpr, roles=roles, labels={})

    def types_before(types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        return {n: _moved(t, 0, moved.get(n, 0)) for n, t in types.items()}

    return main.rewritten(rows_first, types_before)


def _moved(t: Any, source: int, to: int) -> jax.ShapeDtypeStruct:
    shape = list(t.shape)
    if source != to:
        shape.insert(to, shape.pop(source))
    return jax.ShapeDtypeStruct(tuple(shape), t.dtype)


@functools.cache
def _move_rows(axis: int) -> Callable[[Any], Any]:
    return lambda x: jnp.moveaxis(x, 0, axis)


class FlatStep:
    """Step with its calls inlined, so that a `ValuePlace` can name each of its values.

    The loss may be one equation that is not differentiated (`dtrans.step.capture`). `body` is then
    its jaxpr.
    """

    def __init__(self, program: Program) -> None:
        keep = ("loss", "loss_seed", COLLECT)
        self.jaxpr = flat = inline_calls(program.jaxpr, keep=keep)
        self.program = program
        self.inner, self.constants = opened(flat), constants(flat)
        positions = [i for i, e in enumerate(self.inner.eqns) if e.primitive is value_and_grad_p]
        self.at = positions[0] if positions else len(self.inner.eqns)
        self.loss = self.inner.eqns[self.at] if positions else None
        self.body = closed([], [], [], [], [], flat)
        if self.loss is not None:
            self.body = inline_calls(self.loss.params["loss"], keep=keep, rules=True)

    @property
    def primitives(self) -> tuple[str, ...]:
        """Names of the primitives of the step, then those of its loss function, in order.

        Two traces of a step are compared by these names.
        """
        return tuple(e.primitive.name for e in (*self.inner.eqns, *opened(self.body).eqns))

    @property
    def operands(self) -> dict[Var, Atom]:
        """Values that the step passes to its loss function, by the function's input variable."""
        atoms = () if self.loss is None else self.loss.invars
        return dict(zip(opened(self.body).invars, atoms, strict=True))

    def value(self, place: ValuePlace) -> Var:
        """Return the variable at a position (`ValuePlace`) in the step or in its loss function."""
        of = opened(self.body) if place.in_loss else self.inner
        return of.eqns[place.eqn].outvars[place.out]

    def without_loss(self, outs: Sequence[Var]) -> tuple[ClosedJaxpr, Collection[Var]]:
        """Extract the equations that compute some values; the loss function is inlined.

        Args:
          outs: values of the step or of its loss function.

        Returns:
          The jaxpr, and the variables that it reads.
        """
        body, operands = opened(self.body), self.operands
        inlined = _with_operands(operands, body.eqns)
        eqns = [*self.inner.eqns[: self.at], *inlined, *self.inner.eqns[self.at + 1 :]]
        positions, used = backward_slice(eqns, outs)
        jaxpr = closed(
            [*self.inner.constvars, *body.constvars],
            [*self.constants, *constants(self.body)],
            self.inner.invars,
            outs,
            values_at(eqns, positions),
            self.inner,
        )
        return jaxpr, used


def _with_operands(env: Mapping[Var, Atom], eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """Copy equations, with other operands: `env[v]` replaces v."""
    return [e.replace(invars=read_from(env, e.invars)) for e in eqns]
