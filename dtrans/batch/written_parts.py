"""A step whose loss is written for parts of the batch: its terms add up without any exchange.

Where the step of a part is not a multiple of its term of the whole (a last bias, whose gradient is the same number
whatever the rows are), parts take the loss that the engine writes for them, before it is differentiated:

    loss(params, batch)                     the user's
    term(params, part, given, number)       a part's term of it; the sum of all terms is the loss

The gradient of the loss is then the sum of gradients of terms. Terms exchange nothing. What would be exchanged, and no
trained parameter enters, is given: it is made of the whole batch before. The number of the part, which a penalty and a
slice of a constant need, is given with its rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, closed, constants, opened
from dtrans.batch.given_values import ROOT, FlatStep, GivenValues, Spot
from dtrans.batch.trainer_step import TrainerStep, trainer_step
from dtrans.engine.layout import Placed, Shards, cut_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, Program, is_communication
from dtrans.ir.pytree import TreeSpec
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.cut import cut


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenParts:
    """The parts of a captured step, as the engine writes them.

    Attributes:
      values: what parts are given, beside their number.
      axes: the arrays of the batch that are cut, all on dim 0.
      parts: how many there are.
      over: the named axes that they would be on.
      noun: what one of them is called in errors.
      numbered: whether parts are given their number, once for each row.
    """

    values: GivenValues
    axes: Mapping[str, int]
    parts: int
    over: tuple[str, ...]
    noun: str
    numbered: bool = True

    @property
    def spots(self) -> tuple[Spot, ...]:
        """Return the places in the step at which values are made that parts are given."""
        return self.values.spots

    @property
    def whole(self) -> tuple[str, ...]:
        """Return the names of the values that every part is given whole."""
        return self.values.whole

    @property
    def _number(self) -> str:
        return f"{ROOT}/{len(self.values.spots)}"

    @property
    def _number_spec(self) -> TreeSpec:
        return TreeSpec(jax.tree.structure((0,)), (self._number,))

    def step_of(self, captured: Program) -> TrainerStep:
        """Write the step of a part; it takes its number last, if it reads it.

        Args:
          captured: the step of the whole batch.
        """
        taken = self.values.taken_by(captured) if self.values.spots else captured
        rows = {f"{ROOT}/{i}" for i in range(len(self.values.spots))} - {*self.values.whole}
        step = cut(silent(taken)).with_reported()
        axes = {**self.axes, **dict.fromkeys(rows, 0)}
        return trainer_step(step, axes, self.parts, self.over, open_state=True, noun=self.noun, takes_index=True)

    def taken_by(self, captured: Program) -> Program:
        """Return the step of a part, whose last arguments are what it is given.

        Args:
          captured: the step of a batch with a part's rows.

        Raises:
          BatchError: the step has other equations for this batch.
        """
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in captured.inputs.values()]
        whole = [_grown(t, self.parts) if n in self.axes else t
                 for n, t in zip(captured.in_names, types, strict=True)]  # fmt: skip
        found = self.step_of(captured.specialize_flat(whole))
        if found.exchanged or found.takes_index > self.numbered:
            raise BatchError(
                f"{captured.name} needs an exchange across a batch of these shapes, and none for the one that it was "
                "planned for: plan it for this batch"
            )
        program = found.program
        b = Builder(program.jaxpr)
        args = program.args[:-1] if found.takes_index else program.args
        types_of_part = [v.aval for v in program.inner.invars][: len(program.in_names) - found.takes_index]
        operands: list[Atom] = [b.input(t) for t in types_of_part]
        if self.numbered:
            rows = b.input(_number_type(program, self.axes))
            args = (*args, self._number_spec)
            operands = [*operands, *b.call(_first, rows)] if found.takes_index else operands
        jaxpr = b.build(b.inline(program.jaxpr, *operands))
        roles = (FORWARD,) * len(b.eqns)
        made = dataclasses.replace(program, name=captured.name, jaxpr=jaxpr, args=args, roles=roles, labels={})
        return captured.rewritten(self.taken_by, made=made)

    def made_by(self, captured: Program) -> Program:
        """Return the program that computes the values given to parts, from the step of the whole batch."""
        made = self.values.made_by(captured)
        if not self.numbered:
            return made
        b = Builder(made.jaxpr)
        outs = b.inline(made.jaxpr, *(b.input(v.aval) for v in made.inner.invars))
        rows = _number_type(captured, self.axes).shape[0]
        outs += b.call(_numbers(rows, self.parts))
        jaxpr = b.build(outs)
        names = (*made.out_names, self._number)
        out = TreeSpec(jax.tree.structure(names), names)
        made = dataclasses.replace(made, jaxpr=jaxpr, out=out, roles=(FORWARD,) * len(b.eqns))
        return captured.rewritten(self.made_by, made=made)


def written_parts(
    captured: Program, axes: Mapping[str, int], parts: int, held: Sequence[str], over: Sequence[str], noun: str
) -> tuple[WrittenParts, TrainerStep]:
    """Write the parts of a captured step, and find what they are given.

    Args:
      captured: the step of the whole batch.
      axes: the arrays of the batch that are cut, all on dim 0.
      parts: how many there are.
      held: state that all parts have, and that is not trained.
      over: the named axes that they would be on.
      noun: what one of them is called in errors.

    Returns:
      The parts, and the step of one. What it exchanges shows that parts do not add up.
    """
    flat = FlatStep(captured)
    spots, whole = _exchanged(flat, axes, Shards(parts, tuple(over), noun), held)
    names = {s: f"{ROOT}/{i}" for i, s in enumerate(spots)}
    values = GivenValues(
        tuple(spots), tuple(names[s] for s in spots if s in whole), tuple(held), parts, (), flat.primitives
    )
    found = WrittenParts(values, axes, parts, tuple(over), noun)
    step = found.step_of(captured)
    return dataclasses.replace(found, numbered=step.takes_index), step


def _exchanged(
    flat: FlatStep, axes: Mapping[str, int], shards: Shards, held: Collection[str]
) -> tuple[list[Spot], set[Spot]]:
    """Return where values are made that no trained parameter enters, and that take an exchange; and which are whole."""
    spots = _free(flat, held)
    body, inner = opened(flat.body), flat.inner
    operand = dict(zip(body.invars, flat.loss.invars, strict=True))
    read: Callable[[Atom], Atom] = lambda a: operand.get(a, a) if isinstance(a, Var) else a
    inlined = [e.replace(invars=[read(a) for a in e.invars]) for e in body.eqns]
    eqns = [*inner.eqns[: flat.at], *inlined, *inner.eqns[flat.at + 1 :]]
    outs = [flat.value(s) for s in spots]
    kept, _ = backward_slice(eqns, outs)
    jaxpr = closed(
        [*inner.constvars, *body.constvars],
        [*flat.constants, *constants(flat.body)],
        inner.invars,
        outs,
        [eqns[i] for i in kept],
        inner,
    )

    def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[Placed]]:
        w.pieces.takes_index = True
        for n, v in zip(flat.program.in_names, inner.invars, strict=True):
            w.take(v, cut_along(axes[n]) if n in axes else SHARED, is_input=True)
        made, layouts = w.write(opened(jaxpr), lambda i, x: x)
        return eliminate_dead(w.b.build(made)), layouts

    jaxpr_of_part, layouts = written(jaxpr, shards, write)
    made = opened(jaxpr_of_part)
    given, whole = [], set()
    rows = next(flat.program.inputs[n].shape[0] for n in axes)
    for spot, a, layout in zip(spots, made.outvars, layouts, strict=True):
        needed, _ = backward_slice(made.eqns, [a])
        is_rows = isinstance(layout, RowAxis)
        if (is_rows or layout is SHARED) and not any(is_communication(made.eqns[i]) for i in needed):
            continue
        given.append(spot)
        if layout != cut_along(0) or flat.value(spot).aval.shape[0] != rows:
            whole.add(spot)
    return given, whole


def _free(flat: FlatStep, held: Collection[str]) -> list[Spot]:
    """Return where values are made that no trained parameter enters, and that something reads that one enters."""
    p = flat.program
    batch = {n for spec in p.args[2:] for n in spec.names}
    trained = {v: 1 for n, v in zip(p.in_names, flat.inner.invars, strict=True) if n not in batch and n not in held}
    around = propagate(flat.inner.eqns, trained, {})
    body = opened(flat.body)
    seeds = {v: 1 for v, a in zip(body.invars, flat.loss.invars, strict=True) if isinstance(a, Var) and around.get(a)}
    inside = propagate(body.eqns, seeds, {})
    operand = dict(zip(body.invars, flat.loss.invars, strict=True))
    where: dict[Var, Spot] = {}
    for in_loss, eqns in ((False, flat.inner.eqns), (True, body.eqns)):
        for i, eqn in enumerate(eqns):
            where |= {v: Spot(in_loss, i, k) for k, v in enumerate(eqn.outvars)}
    found: dict[Spot, None] = {}

    def note(atoms: Sequence[Atom]) -> None:
        for a in atoms:
            a = operand.get(a, a) if isinstance(a, Var) else a
            is_bound = isinstance(a, Literal) or around.get(a) or inside.get(a)
            if not is_bound and a in where and not jnp.issubdtype(a.aval.dtype, jax.dtypes.extended):
                found[where[a]] = None

    def is_bound(eqn: JaxprEqn, bits: Mapping[Var, int]) -> bool:
        return bool(eqn.effects) or any(isinstance(a, Var) and bits.get(a) for a in eqn.invars)

    for eqn in body.eqns:
        if is_bound(eqn, inside):
            note(eqn.invars)
    note(body.outvars)
    for i, eqn in enumerate(flat.inner.eqns):
        if i != flat.at and is_bound(eqn, around):
            note(eqn.invars)
    note(flat.inner.outvars)
    return list(found)


def _number_type(program: Program, axes: Mapping[str, int]) -> Any:
    rows = next(program.inputs[n].shape[0] for n in axes)
    return jax.typeof(jnp.zeros(rows, jnp.int32))


def silent(program: Program) -> Program:
    """Return a step without what it prints or shows: a part shows its own values, which are not added up."""
    return program.rewritten(_without_effects)


def _without_effects(program: Program) -> Program:
    inner = program.inner
    eqns = [e for e in inner.eqns if e.outvars or not e.effects]
    if len(eqns) == len(inner.eqns):
        return program
    jaxpr = closed(inner.constvars, program.jaxpr.consts, inner.invars, inner.outvars, eqns, inner)
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(eqns), labels={})


def _grown(t: Any, parts: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((t.shape[0] * parts, *t.shape[1:]), t.dtype)


def _first(rows: jax.Array) -> jax.Array:
    return rows[0]


@functools.cache
def _numbers(rows: int, parts: int) -> Callable[[], jax.Array]:
    return lambda: jnp.arange(rows, dtype=jnp.int32) // (rows // parts)
