"""Steps of parts of the batch whose partial sums add up without communication.

Micro-batches of a pipeline, and micro-steps of trainers, cannot communicate. The engine derives
their step from the step on the full batch. A loss that is one equation is rewritten before it is
differentiated:

    loss(params, batch)                     the user's
    term(params, part, given, number)       a part's term of it; the sum of all terms is the loss

The gradient of the loss is then the sum of the terms' gradients. Gradients that the step computes
itself are written as partial sums. A value that needs communication, but depends on no trained
parameter, is precomputed from the full batch (`dtrans.batch.precomputed`). So is a value with the
rows of the batch that depends on their indices, such as a dropout mask. If the rest depends on the
index of the part, as a slice of a parameter does, parts get that index with their rows.
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
from dtrans.batch.exact_step import full_type
from dtrans.batch.precomputed import ROOT, FlatStep, Precomputed, Spot
from dtrans.batch.trainer_step import TrainerStep, trainer_step
from dtrans.engine.layout import Partial, ShardLayout, Shards, cut_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals, backward_slice, bits_of, propagate
from dtrans.ir.fingerprint import value_digests
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, Program, is_communication
from dtrans.ir.pytree import TreeSpec, is_under
from dtrans.ir.selection import values_at
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.capture import captured
from dtrans.step.cut import cut


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenParts:
    """Parts of a step, as the engine writes them.

    Attributes:
      values: precomputed values, except the parts' indices.
      axes: sharded dimension of each batch array.
      parts: number of parts.
      over: named axes of the parts.
      noun: name of a part in errors.
      numbered: True if parts get their index, once for each row.
    """

    values: Precomputed
    axes: Mapping[str, int]
    parts: int
    over: tuple[str, ...]
    noun: str
    numbered: bool = True

    @property
    def full(self) -> tuple[str, ...]:
        """Names of the values that every part gets in full."""
        return self.values.full

    @property
    def rows(self) -> dict[str, int]:
        """Row dimension of each value whose rows parts get."""
        count = len(self.values.spots) + self.numbered
        return {n: 0 for i in range(count) if (n := f"{ROOT}/{i}") not in self.full}

    @property
    def _number(self) -> str:
        return f"{ROOT}/{len(self.values.spots)}"

    def step_of(self, full_step: Program) -> TrainerStep:
        """Return the step of a part, from that on the full batch; its index is last, if it reads
        it."""
        program = self.values.with_precomputed(full_step) if self.values.spots else full_step
        step = cut(without_effects(program)).with_reported()
        axes = {
            **self.axes,
            **{n: axis for n, axis in self.rows.items() if n in step.program.inputs},
        }
        return trainer_step(
            step, axes, self.parts, self.over, open_state=True, noun=self.noun, takes_index=True
        )

    def part_of(self, full_step: Program, found: TrainerStep | None = None) -> Program:
        """Return the step of a part, with precomputed values as its last arguments.

        Args:
          full_step: step on the full batch.
          found: result of `step_of`, if known.

        Raises:
          BatchError: parts of a batch of this size would communicate.
        """
        found = self.step_of(full_step) if found is None else found
        if not adds_up(found) or found.takes_index > self.numbered:
            raise BatchError(
                f"{full_step.name} needs an exchange across a batch of these shapes, but none for "
                "the batch that it was planned for; make a plan for this batch"
            )
        part = found.program
        b = Builder(part.jaxpr)
        args = part.args[:-1] if found.takes_index else part.args
        types_of_part = avals(part.inner.invars)[: len(part.in_names) - found.takes_index]
        operands: list[Atom] = [b.input(t) for t in types_of_part]
        if self.numbered:
            rows = b.input(_numbers_type(_rows(part, self.axes)))
            args = (*args, TreeSpec(jax.tree.structure((0,)), (self._number,)))
            operands = [*operands, *b.call(_first, rows)] if found.takes_index else operands
        jaxpr = b.build(b.inline(part.jaxpr, *operands))
        roles = (FORWARD,) * len(b.eqns)
        part = dataclasses.replace(
            part, name=full_step.name, jaxpr=jaxpr, args=args, roles=roles, labels={}
        )
        return full_step.rewritten(self.part_of, self._full_types, result=part)

    def _full_types(self, types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of the step's inputs, from those of a part."""
        return {
            n: full_type(t, self.axes.get(n), self.parts)
            for n, t in types.items()
            if not is_under(n, [ROOT])
        }

    def precompute_program(self, full_step: Program) -> Program:
        """Return the program that precomputes the values of parts, from the step on the full
        batch."""
        program = self.values.precompute_program(full_step)
        if not self.numbered:
            return program
        b = Builder(program.jaxpr)
        outs = b.inline(program.jaxpr, *(b.input(v.aval) for v in program.inner.invars))
        outs += b.call(_numbers(_rows(full_step, self.axes), self.parts))
        jaxpr = b.build(outs)
        names = (*program.out_names, self._number)
        out = TreeSpec(jax.tree.structure(names), names)
        program = dataclasses.replace(program, jaxpr=jaxpr, out=out, roles=(FORWARD,) * len(b.eqns))
        return full_step.rewritten(self.precompute_program, result=program)


def adds_up(part: TrainerStep) -> bool:
    """Return True if the steps of parts add up without communication."""
    return not (part.exchanged or part.gathers)


def written_parts(
    full_step: Program,
    axes: Mapping[str, int],
    parts: int,
    fixed: Sequence[str],
    over: Sequence[str],
    noun: str,
    part: Program | None = None,
) -> tuple[WrittenParts, TrainerStep]:
    """Return the parts of a step and their precomputed values, with the step of one part.

    The communication in the step of one part, if any, shows that parts do not add up.

    Args:
      full_step: step on the full batch, captured if its loss can be.
      axes: sharded dimension of each batch array.
      parts: number of parts.
      fixed: untrained state that all parts have.
      over: named axes of the parts.
      noun: name of a part in errors.
      part: step traced on a part, if its update must be the same for all batch sizes.
    """
    flat = FlatStep(full_step)
    ways = _ways(flat, axes, Shards(parts, tuple(over), noun), fixed, part)

    def of(ways: Mapping[Spot, bool]) -> tuple[WrittenParts, TrainerStep]:
        shared = tuple(f"{ROOT}/{i}" for i, is_rows in enumerate(ways.values()) if not is_rows)
        values = Precomputed(tuple(ways), shared, tuple(fixed), flat.primitives)
        found = WrittenParts(values, axes, parts, tuple(over), noun)
        return found, found.step_of(full_step)

    precomputed = {spot: bool(is_rows) for spot, is_rows in ways.items() if is_rows is not None}
    if len(precomputed) < len(ways):  # so are values whose rows a part reads
        _, step = of({spot: bool(is_rows) for spot, is_rows in ways.items()})
        read = dict(zip(ways, (f"{ROOT}/{i}" for i in range(len(ways))), strict=True))
        reads_rows = {spot for spot, name in read.items() if step.sliced.get(name) == 0}
        precomputed = {
            spot: bool(is_rows) or spot in reads_rows
            for spot, is_rows in ways.items()
            if is_rows is not None or spot in reads_rows
        }
    found, step = of(precomputed)
    return dataclasses.replace(found, numbered=step.takes_index), step


def _ways(
    flat: FlatStep,
    axes: Mapping[str, int],
    shards: Shards,
    fixed: Collection[str],
    part: Program | None,
) -> dict[Spot, bool | None]:
    """Return the positions of precomputed values: True if parts get rows, False for full values.

    Values are precomputed if a part would need communication, or its index, to compute them. None
    stands for a value that a part computes in full, with as many rows as the batch: the part may
    only read its rows. An update that gets the number of rows as a value is the same for all batch
    sizes.
    """
    spots = _free(flat, fixed)
    jaxpr, _ = flat.without_loss([flat.value(s) for s in spots])
    rows = _rows(flat.program, axes)
    has_rows = [flat.value(s).aval.shape[:1] == (rows,) for s in spots]
    computed_in_full = set()

    def lies(i: int, layout: ShardLayout) -> ShardLayout:
        if layout is SHARED and has_rows[i]:
            computed_in_full.add(i)
            return cut_along(0)
        return layout

    def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[ShardLayout], bool]:
        w.pieces.takes_index = True
        for n, v in zip(flat.program.in_names, flat.inner.invars, strict=True):
            w.take(v, cut_along(axes[n]) if n in axes else SHARED, is_input=True)
        outs, layouts = w.write(opened(jaxpr), lies)
        return eliminate_dead(w.b.build(outs)), layouts, w.pieces.reads_index

    jaxpr_of_part, layouts, is_numbered = written(jaxpr, shards, write)
    program = opened(jaxpr_of_part)
    index = set(program.invars[:1]) if is_numbered else set()
    of_update = [s for s in spots if not s.in_loss]
    sized = _sized(flat, part, of_update) if part is not None and of_update else ()
    found: dict[Spot, bool | None] = {}
    for i, (spot, a, layout) in enumerate(zip(spots, program.outvars, layouts, strict=True)):
        needed, read = backward_slice(program.eqns, [a])
        inside = itertools.chain.from_iterable(equations_inside(program.eqns[k]) for k in needed)
        is_exchanged = any(map(is_communication, (*values_at(program.eqns, needed), *inside)))
        # rows in another order are not those of the part
        is_reordered = isinstance(layout, RowAxis) and layout.order is not None
        if (
            isinstance(layout, Partial)
            or is_exchanged
            or is_reordered
            or not index.isdisjoint(read)
        ):
            is_cut = (
                isinstance(layout, RowAxis)
                and layout.axis == 0
                and (is_reordered or layout == cut_along(0))
            )
            found[spot] = None if i in computed_in_full else has_rows[i] and is_cut
        elif spot in sized:
            found[spot] = False
    return found


def _sized(flat: FlatStep, part: Program, spots: Sequence[Spot]) -> set[Spot]:
    """Return the positions outside of the loss at which a step depends on the batch size.

    Args:
      flat: step on the full batch.
      part: step traced on a part of the batch.
      spots: positions to compare.
    """
    mine, theirs = (
        value_digests(x.jaxpr, x.program.in_names) for x in (flat, FlatStep(captured(part)))
    )
    known = {*theirs.values()}
    return {s for s in spots if mine[flat.value(s)] not in known}


def _free(flat: FlatStep, fixed: Collection[str]) -> list[Spot]:
    """Return the positions of untrained values that trained equations read."""
    p = flat.program
    batch = {n for spec in p.args[2:] for n in spec.names}
    trained = {
        v: 1
        for n, v in zip(p.in_names, flat.inner.invars, strict=True)
        if n not in batch and n not in fixed
    }
    around = propagate(flat.inner.eqns, trained, {})
    body = opened(flat.body)
    operand = flat.operands
    seeds = {v: 1 for v, a in operand.items() if isinstance(a, Var) and around.get(a)}
    inside = propagate(body.eqns, seeds, {})
    where: dict[Var, Spot] = {}
    producers = {v: e for e in (*flat.inner.eqns, *body.eqns) for v in e.outvars}
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
                and (maker := producers.get(a))
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
        return bool(eqn.effects) or bits_of(bits, *eqn.invars) != 0

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
    """Return True for a transpose that replaces dimension 0: parts transpose their rows."""
    return eqn.primitive.name == "transpose" and eqn.params["permutation"][0] != 0


def _rows(program: Program, axes: Mapping[str, int]) -> int:
    return next((int(program.inputs[n].shape[axis]) for n, axis in axes.items()), 0)


def _numbers_type(rows: int) -> Any:
    return jax.typeof(jnp.zeros(rows, jnp.int32))


def without_effects(program: Program) -> Program:
    """Return a step without prints and callbacks: values of a part are not those of the step."""
    return program.rewritten(_drop_effects)


def _drop_effects(program: Program) -> Program:
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
