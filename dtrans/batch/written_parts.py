"""A step that is written for parts of the batch: their terms add up without any exchange.

Micro-batches of a pipeline, and micro-steps of trainers, exchange nothing. They take the step that
the engine writes for them, from the step of the whole batch. A loss that is one equation is written
before it is differentiated:

    loss(params, batch)                     the user's
    term(params, part, given, number)       a part's term of it; the sum of all terms is the loss

The gradient of the loss is then the sum of gradients of terms. Gradients that the step takes by
itself are written as terms. What would be exchanged, and no trained parameter enters, is given: it
is computed from the whole batch before (`dtrans.batch.given_values`). So is what has the rows of
the batch, and depends on their numbers: a dropout mask. If the remainder depends on the number of
the part, as a slice of a parameter does, parts are given that with their rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, closed, equations_inside, opened
from dtrans.batch.given_values import ROOT, FlatStep, GivenValues, Spot
from dtrans.batch.shared import grown
from dtrans.batch.trainer_step import TrainerStep, trainer_step
from dtrans.engine.layout import Partial, Placed, Shards, cut_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.fingerprint import of_values
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, Program, is_communication
from dtrans.ir.pytree import TreeSpec, is_under
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.capture import captured
from dtrans.step.cut import cut


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenParts:
    """The parts of a step, as the engine writes them.

    Attributes:
      values: what parts are given, beside their number.
      axes: the dimension along which each array of the batch is cut.
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
    def whole(self) -> tuple[str, ...]:
        """Return the names of the values that every part is given whole."""
        return self.values.whole

    @property
    def rows(self) -> dict[str, int]:
        """Return the dimension of the rows of each value whose rows are given to parts."""
        count = len(self.values.spots) + self.numbered
        return {n: 0 for i in range(count) if (n := f"{ROOT}/{i}") not in self.whole}

    @property
    def _number(self) -> str:
        return f"{ROOT}/{len(self.values.spots)}"

    def step_of(self, whole: Program) -> TrainerStep:
        """Write the step of a part, from that of the whole batch; it takes its number last, if it
        reads it."""
        taken = self.values.taken_by(whole) if self.values.spots else whole
        step = cut(silent(taken)).with_reported()
        axes = {
            **self.axes,
            **{n: axis for n, axis in self.rows.items() if n in step.program.inputs},
        }
        return trainer_step(
            step, axes, self.parts, self.over, open_state=True, noun=self.noun, takes_index=True
        )

    def part_of(self, whole: Program, found: TrainerStep | None = None) -> Program:
        """Return the step of a part, whose last arguments are what it is given.

        Args:
          whole: the step of the whole batch.
          found: the same as `step_of` writes it, where that is known.

        Raises:
          BatchError: parts of a batch of this size would exchange something.
        """
        found = self.step_of(whole) if found is None else found
        if not adds_up(found) or found.takes_index > self.numbered:
            raise BatchError(
                f"{whole.name} needs an exchange across a batch of these shapes, and none for the "
                "one that it was "
                "planned for: plan it for this batch"
            )
        made = found.program
        b = Builder(made.jaxpr)
        args = made.args[:-1] if found.takes_index else made.args
        types_of_part = [v.aval for v in made.inner.invars][
            : len(made.in_names) - found.takes_index
        ]
        operands: list[Atom] = [b.input(t) for t in types_of_part]
        if self.numbered:
            rows = b.input(_numbers_type(_rows(made, self.axes)))
            args = (*args, TreeSpec(jax.tree.structure((0,)), (self._number,)))
            operands = [*operands, *b.call(_first, rows)] if found.takes_index else operands
        jaxpr = b.build(b.inline(made.jaxpr, *operands))
        roles = (FORWARD,) * len(b.eqns)
        made = dataclasses.replace(
            made, name=whole.name, jaxpr=jaxpr, args=args, roles=roles, labels={}
        )
        return whole.rewritten(self.part_of, self._whole_types, made=made)

    def _whole_types(self, types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of the step's inputs, from those of the inputs of a part."""
        return {
            n: grown(t, self.axes.get(n), self.parts)
            for n, t in types.items()
            if not is_under(n, [ROOT])
        }

    def made_by(self, whole: Program) -> Program:
        """Return the program that computes the values given to parts, from the step of the whole
        batch."""
        made = self.values.made_by(whole)
        if not self.numbered:
            return made
        b = Builder(made.jaxpr)
        outs = b.inline(made.jaxpr, *(b.input(v.aval) for v in made.inner.invars))
        outs += b.call(_numbers(_rows(whole, self.axes), self.parts))
        jaxpr = b.build(outs)
        names = (*made.out_names, self._number)
        out = TreeSpec(jax.tree.structure(names), names)
        made = dataclasses.replace(made, jaxpr=jaxpr, out=out, roles=(FORWARD,) * len(b.eqns))
        return whole.rewritten(self.made_by, made=made)


def adds_up(part: TrainerStep) -> bool:
    """Return True if the steps of parts add up to that of the whole batch, and exchange nothing."""
    return not (part.exchanged or part.gathers)


def written_parts(
    whole: Program,
    axes: Mapping[str, int],
    parts: int,
    held: Sequence[str],
    over: Sequence[str],
    noun: str,
    part: Program | None = None,
) -> tuple[WrittenParts, TrainerStep]:
    """Write the parts of a step, and find what they are given.

    Args:
      whole: the step of the whole batch, captured if its loss can be.
      axes: the dimension along which each array of the batch is cut.
      parts: how many there are.
      held: state that all parts have, and that is not trained.
      over: the named axes that they would be on.
      noun: what one of them is called in errors.
      part: the step of a part of the batch, as it was traced, if its update is to be the same for
        all sizes.

    Returns:
      The parts, and the step of one. What it exchanges shows that parts do not add up.
    """
    flat = FlatStep(whole)
    ways = _ways(flat, axes, Shards(parts, tuple(over), noun), held, part)

    def of(ways: Mapping[Spot, bool]) -> tuple[WrittenParts, TrainerStep]:
        shared = tuple(f"{ROOT}/{i}" for i, is_rows in enumerate(ways.values()) if not is_rows)
        values = GivenValues(tuple(ways), shared, tuple(held), flat.primitives)
        found = WrittenParts(values, axes, parts, tuple(over), noun)
        return found, found.step_of(whole)

    given = {spot: bool(is_rows) for spot, is_rows in ways.items() if is_rows is not None}
    if len(given) < len(ways):  # those that a part reads rows of are given as well
        _, step = of({spot: bool(is_rows) for spot, is_rows in ways.items()})
        read = dict(zip(ways, (f"{ROOT}/{i}" for i in range(len(ways))), strict=True))
        given = {spot: bool(is_rows) or step.sliced.get(read[spot]) == 0 for spot, is_rows in ways.items()
                 if is_rows is not None or step.sliced.get(read[spot]) == 0}  # fmt: skip
    found, step = of(given)
    return dataclasses.replace(found, numbered=step.takes_index), step


def _ways(
    flat: FlatStep,
    axes: Mapping[str, int],
    shards: Shards,
    held: Collection[str],
    part: Program | None,
) -> dict[Spot, bool | None]:
    """Return the places of values that no trained parameter enters, and True if a part is given
    rows, False if all.

    A part is given what it would make by an exchange, or by its number. None stands for a value
    that it makes whole and that has as many rows as the batch: the part may read its own rows of it
    alone. An update that has no number of the rows, but reads one that is given, is the same for
    batches of all sizes.
    """
    spots = _free(flat, held)
    jaxpr, _ = flat.without_loss([flat.value(s) for s in spots])
    rows = _rows(flat.program, axes)
    has_rows = [flat.value(s).aval.shape[:1] == (rows,) for s in spots]
    made_whole = set()

    def lies(i: int, layout: Placed) -> Placed:
        if layout is SHARED and has_rows[i]:
            made_whole.add(i)
            return cut_along(0)
        return layout

    def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[Placed], bool]:
        w.pieces.takes_index = True
        for n, v in zip(flat.program.in_names, flat.inner.invars, strict=True):
            w.take(v, cut_along(axes[n]) if n in axes else SHARED, is_input=True)
        made, layouts = w.write(opened(jaxpr), lies)
        return eliminate_dead(w.b.build(made)), layouts, w.pieces.reads_index

    jaxpr_of_part, layouts, is_numbered = written(jaxpr, shards, write)
    made = opened(jaxpr_of_part)
    index = set(made.invars[:1]) if is_numbered else set()
    of_update = [s for s in spots if not s.in_loss]
    sized = _sized(flat, part, of_update) if part is not None and of_update else ()
    found: dict[Spot, bool | None] = {}
    for i, (spot, a, layout) in enumerate(zip(spots, made.outvars, layouts, strict=True)):
        needed, read = backward_slice(made.eqns, [a])
        inside = itertools.chain.from_iterable(equations_inside(made.eqns[k]) for k in needed)
        is_exchanged = any(map(is_communication, (*(made.eqns[k] for k in needed), *inside)))
        # rows in another order are not the part's own
        turned = isinstance(layout, RowAxis) and layout.order is not None
        if isinstance(layout, Partial) or is_exchanged or turned or not index.isdisjoint(read):
            is_cut = (
                isinstance(layout, RowAxis)
                and layout.axis == 0
                and (turned or layout == cut_along(0))
            )
            found[spot] = None if i in made_whole else has_rows[i] and is_cut
        elif spot in sized:
            found[spot] = False
    return found


def _sized(flat: FlatStep, part: Program, spots: Sequence[Spot]) -> set[Spot]:
    """Return the places outside of the loss at which a step makes something else for a batch of
    another size.

    Args:
      part: the same step, of a part of the batch.
    """
    mine, theirs = (
        of_values(x.jaxpr, x.program.in_names) for x in (flat, FlatStep(captured(part)))
    )
    known = {*theirs.values()}
    return {s for s in spots if mine[flat.value(s)] not in known}


def _free(flat: FlatStep, held: Collection[str]) -> list[Spot]:
    """Return where values are made that no trained parameter enters, and that something reads that
    one enters."""
    p = flat.program
    batch = {n for spec in p.args[2:] for n in spec.names}
    trained = {
        v: 1
        for n, v in zip(p.in_names, flat.inner.invars, strict=True)
        if n not in batch and n not in held
    }
    around = propagate(flat.inner.eqns, trained, {})
    body = opened(flat.body)
    operand = flat.operands
    seeds = {v: 1 for v, a in operand.items() if isinstance(a, Var) and around.get(a)}
    inside = propagate(body.eqns, seeds, {})
    where: dict[Var, Spot] = {}
    made_by = {v: e for e in (*flat.inner.eqns, *body.eqns) for v in e.outvars}
    for in_loss, eqns in ((False, flat.inner.eqns), (True, body.eqns)):
        for i, eqn in enumerate(eqns):
            where |= {v: Spot(in_loss, i, k) for k, v in enumerate(eqn.outvars)}
    found: dict[Spot, None] = {}

    def note(atoms: Sequence[Atom]) -> None:
        for a in atoms:
            a = operand.get(a, a) if isinstance(a, Var) else a
            is_bound = isinstance(a, Literal) or around.get(a) or inside.get(a)
            while (
                not is_bound
                and isinstance(a, Var)
                and (maker := made_by.get(a))
                and _moves_rows(maker)
            ):
                a = maker.invars[0]
            if (
                not is_bound
                and a in where
                and not jnp.issubdtype(a.aval.dtype, jax.dtypes.extended)
            ):
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


def _moves_rows(eqn: JaxprEqn) -> bool:
    """Return True for a transpose whose result has other rows on dim 0: a part turns what it is
    given by itself."""
    return eqn.primitive.name == "transpose" and eqn.params["permutation"][0] != 0


def _rows(program: Program, axes: Mapping[str, int]) -> int:
    return next((int(program.inputs[n].shape[axis]) for n, axis in axes.items()), 0)


def _numbers_type(rows: int) -> Any:
    return jax.typeof(jnp.zeros(rows, jnp.int32))


def silent(program: Program) -> Program:
    """Return a step without what it prints or shows: a part shows its own values, which are not
    added up."""
    return program.rewritten(_without_effects)


def _without_effects(program: Program) -> Program:
    inner = program.inner
    eqns = [e for e in inner.eqns if e.outvars or not e.effects]
    if len(eqns) == len(inner.eqns):
        return program
    jaxpr = closed(inner.constvars, program.jaxpr.consts, inner.invars, inner.outvars, eqns, inner)
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(eqns), labels={})


def _first(rows: jax.Array) -> jax.Array:
    return rows[0]


@functools.cache
def _numbers(rows: int, parts: int) -> Callable[[], jax.Array]:
    return lambda: jnp.arange(rows, dtype=jnp.int32) // (rows // parts)
