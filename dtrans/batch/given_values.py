"""Values of the whole batch that no trained parameter enters, computed before its parts.

How many entries a mask has, a dropout mask, which rows are mixed: such values belong to the whole
batch, and need no part of it. One program computes them first, from the batch alone, by the
equations of one device. Parts are given their rows of them, or all of them. The remainder may add
up where the step as it was written does not: a masked mean is a sum over rows, once the number that
it is divided by is known.

    step      params, opt_state, *batch                       ->  what it returns
    becomes   *batch                                          ->  @given/0, @given/1, ...
              params, opt_state, *batch, @given/0, ...        ->  what it returns

`dtrans.batch.written_parts` finds those values, and proves that the parts of the remainder add up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, closed, constants, opened
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.step.capture import value_and_grad_p
from dtrans.step.collect import COLLECT


ROOT = "@given"  # what the names of these values begin with


@dataclasses.dataclass(frozen=True)
class Spot:
    """A place in a step at which a value is made.

    Attributes:
      in_loss: True if an equation of the loss function makes it.
      eqn: the position of the equation.
      out: the position of the value among its outputs.
    """

    in_loss: bool
    eqn: int
    out: int


@dataclasses.dataclass(frozen=True, eq=False)
class GivenValues:
    """The values that parts of a step are given.

    Attributes:
      spots: the place of each in the step.
      whole: the names of those that every part gets whole; of others it gets rows.
      held: parameters without a gradient that they may be made of, a key perhaps.
      equations: the primitives of the step in which they were found, which spots count.
    """

    spots: tuple[Spot, ...]
    whole: tuple[str, ...]
    held: tuple[str, ...]
    equations: tuple[str, ...]

    def _flat(self, program: Program) -> FlatStep:
        """Return a step whose equations are those among which the values were found."""
        step = FlatStep(program)
        if step.primitives != self.equations:
            raise BatchError(
                f"{program.name} has other equations for a batch of these shapes than for the one "
                "for which values of "
                "the whole batch were found: plan it for this batch"
            )
        return step

    def taken_by(self, program: Program) -> Program:
        """Return a step with these values as its last arguments.

        Raises:
          BatchError: the step has other equations than the one in which the values were found.
        """
        step = self._flat(program)
        given = {s: Var(step.value(s).aval) for s in self.spots}
        sub = {step.value(s): v for s, v in given.items() if not s.in_loss}
        eqns = [e.replace(invars=_read(e.invars, sub)) for e in step.inner.eqns]
        if step.loss is not None:
            eqns[step.at] = self._loss(step, eqns[step.at], given)
        inner = step.inner
        jaxpr = closed(
            inner.constvars,
            step.constants,
            [*inner.invars, *given.values()],
            _read(inner.outvars, sub),
            eqns,
            inner,
        )
        return dataclasses.replace(
            program,
            jaxpr=jaxpr,
            args=(*program.args, TreeSpec.of(tuple(v.aval for v in given.values()), ROOT)),
            roles=(FORWARD,) * len(eqns),
            labels={},
            specializer=None,
        )

    def _loss(self, step: FlatStep, eqn: JaxprEqn, given: Mapping[Spot, Var]) -> JaxprEqn:
        """Return the equation of the loss, which reads those that it made."""
        inside = {step.value(s): Var(v.aval) for s, v in given.items() if s.in_loss}
        body = opened(step.body)
        eqns = [e.replace(invars=_read(e.invars, inside)) for e in body.eqns]
        new = closed(
            body.constvars,
            constants(step.body),
            [*body.invars, *inside.values()],
            _read(body.outvars, inside),
            eqns,
            step.body,
        )
        operands = [*eqn.invars, *(v for s, v in given.items() if s.in_loss)]
        return eqn.replace(invars=operands, params={**eqn.params, "loss": eliminate_dead(new)})

    def made_by(self, program: Program) -> Program:
        """Return the program that makes these values, from the step of the whole batch. Raises as
        `taken_by`."""
        step = self._flat(program)
        whole, used = step.without_loss([step.value(spot) for spot in self.spots])
        ins = dict(zip(program.in_names, step.inner.invars, strict=True))
        held = tuple(n for n in self.held if ins[n] in used)
        args = (*program.args[2:], TreeSpec(jax.tree.structure(held), held))
        inner = opened(whole)
        invars = [ins[n] for spec in args for n in spec.names]
        whole = closed(inner.constvars, constants(whole), invars, inner.outvars, inner.eqns, whole)
        jaxpr = eliminate_dead(whole)
        made = Program(
            f"values of the whole batch of {program.name}",
            jaxpr,
            args,
            TreeSpec.of(tuple(v.aval for v in inner.outvars), ROOT),
            (FORWARD,) * len(opened(jaxpr).eqns),
        )
        return program.rewritten(self.made_by, made=made)


def with_rows_first(main: Program, axes: Mapping[str, int]) -> Program:
    """Return a step whose arrays of the batch have their rows on dim 0, and are transposed to what
    it wants.

    Args:
      axes: name to the dimension that has the rows in the step as it is.
    """
    moved = {n: axis for n, axis in axes.items() if axis}
    if not moved:
        return main

    def rows_first(step: Program) -> Program:
        b = Builder(step.jaxpr)
        ins = [
            b.input(t.update(shape=_moved(t, moved.get(n, 0), 0).shape))
            for n, t in step.inputs.items()
        ]
        turned = [
            b.call(_turned(moved[n]), v)[0] if n in moved else v
            for n, v in zip(step.in_names, ins, strict=True)
        ]
        jaxpr = b.build(b.inline(step.jaxpr, *turned))
        return dataclasses.replace(
            step, jaxpr=jaxpr, roles=(FORWARD,) * len(jaxpr.jaxpr.eqns), labels={}
        )

    return main.rewritten(
        rows_first, lambda types: {n: _moved(t, 0, moved.get(n, 0)) for n, t in types.items()}
    )


def _moved(t: Any, source: int, to: int) -> jax.ShapeDtypeStruct:
    shape = list(t.shape)
    if source != to:
        shape.insert(to, shape.pop(source))
    return jax.ShapeDtypeStruct(tuple(shape), t.dtype)


@functools.cache
def _turned(axis: int) -> Callable[[Any], Any]:
    return lambda x: jnp.moveaxis(x, 0, axis)


class FlatStep:
    """A step without calls, and its loss if that is one equation."""

    def __init__(self, program: Program) -> None:
        keep = ("loss", "loss_seed", COLLECT)
        self.jaxpr = flat = inline_calls(program.jaxpr, keep=keep)
        self.program = program
        self.inner, self.constants = opened(flat), constants(flat)
        positions = [i for i, e in enumerate(self.inner.eqns) if e.primitive is value_and_grad_p]
        self.at = positions[0] if positions else len(self.inner.eqns)
        self.loss = self.inner.eqns[self.at] if positions else None
        empty = closed([], [], [], [], [], flat)
        self.body = (
            empty
            if self.loss is None
            else inline_calls(self.loss.params["loss"], keep=keep, rules=True)
        )

    @property
    def primitives(self) -> tuple[str, ...]:
        """The names of all its primitives, in order."""
        return tuple(e.primitive.name for e in (*self.inner.eqns, *opened(self.body).eqns))

    @property
    def operands(self) -> dict[Var, Atom]:
        """Return the value of the step for each input of the loss."""
        atoms = () if self.loss is None else self.loss.invars
        return dict(zip(opened(self.body).invars, atoms, strict=True))

    def value(self, spot: Spot) -> Var:
        """Return the value that is made at a place."""
        of = opened(self.body) if spot.in_loss else self.inner
        return of.eqns[spot.eqn].outvars[spot.out]

    def without_loss(self, outs: Sequence[Var]) -> tuple[ClosedJaxpr, Collection[Var]]:
        """Return a jaxpr that makes values of the step and of its loss, and the inputs that it
        reads."""
        body, operands = opened(self.body), self.operands
        inlined = [e.replace(invars=_read(e.invars, operands)) for e in body.eqns]
        eqns = [*self.inner.eqns[: self.at], *inlined, *self.inner.eqns[self.at + 1 :]]
        kept, used = backward_slice(eqns, outs)
        jaxpr = closed(
            [*self.inner.constvars, *body.constvars],
            [*self.constants, *constants(self.body)],
            self.inner.invars,
            outs,
            [eqns[i] for i in kept],
            self.inner,
        )
        return jaxpr, used


def _read(atoms: Collection[Atom], sub: Mapping[Any, Any]) -> list[Atom]:
    return [sub.get(a, a) if isinstance(a, Var) else a for a in atoms]
