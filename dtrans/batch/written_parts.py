"""Steps on parts of the batch, written so that the parts need no communication.

Micro-batches of a pipeline, and micro-steps of trainers, cannot communicate. The engine derives
their step from the step on the full batch. If the loss is one equation that is not differentiated
yet (`dtrans.step.capture`), the engine rewrites the loss first:

    loss(params, batch)                     the loss of the user's step
    term(params, part, given, number)       term of a part; the loss is the sum of all terms

So the gradient of the loss is the sum of the terms' gradients. Otherwise the gradients of the step
are rewritten as partial sums.

`given` are precomputed values (`dtrans.batch.precomputed`), which depend on no trained parameter.
To compute these values, a part would need communication, or the indices of its rows (for a dropout
mask). `number` is the index of the part, an input if the step of the part reads it.
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
from dtrans.batch.precomputed import ROOT, FlatStep, Precomputed, ValuePlace
from dtrans.batch.trainer_step import TrainerStep, trainer_step
from dtrans.engine.layout import Partial, ShardLayout, Shards, sharded_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import BatchError
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import avals, backward_slice, bits_of, producers_of, propagate
from dtrans.ir.fingerprint import value_digests
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, Program, is_communication
from dtrans.ir.pytree import TreeSpec, all_names, is_under
from dtrans.ir.selection import values_at
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.capture import captured
from dtrans.step.halves import divide_step


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenParts:
    """Writer of the step on one part of the batch, such as a micro-batch.

    The written step takes precomputed values of the full batch as its last arguments.

    Attributes:
      values: the precomputed values, except the indices that `numbered` adds.
      axes: divided dimension of each batch array.
      parts: number of parts.
      over: mesh axes of the parts.
      noun: word for a part in errors, such as "micro-batch".
      numbered: True to pass each part its index, as a precomputed value with one entry for each
        row.
    """

    values: Precomputed
    axes: Mapping[str, int]
    parts: int
    over: tuple[str, ...]
    noun: str
    numbered: bool = True

    @property
    def full(self) -> tuple[str, ...]:
        """Names of the precomputed values that every part of the batch gets in full."""
        return self.values.full

    @property
    def rows(self) -> dict[str, int]:
        """Precomputed values that are divided among parts: name -> 0, the dimension of rows."""
        count = len(self.values.places) + self.numbered
        names = (f"{ROOT}/{i}" for i in range(count))
        return {n: 0 for n in names if n not in self.full}

    @property
    def _number(self) -> str:
        return f"{ROOT}/{len(self.values.places)}"

    def step_of(self, full_step: Program) -> TrainerStep:
        """Derive the step on one part of the batch, which may still communicate.

        Args:
          full_step: step on the full batch.
        """
        program = full_step
        if self.values.places:
            program = self.values.with_precomputed(full_step)
        step = divide_step(without_effects(program)).with_reported()
        axes = dict(self.axes)
        for name, axis in self.rows.items():
            if name in step.program.inputs:
                axes[name] = axis
        return trainer_step(
            step, axes, self.parts, self.over, open_state=True, noun=self.noun, takes_index=True
        )

    def part_of(self, full_step: Program, found: TrainerStep | None = None) -> Program:
        """Return the step on one part of the batch, without communication.

        The last arguments of the returned step are precomputed values.

        Args:
          full_step: step on the full batch.
          found: `step_of(full_step)`, if it is computed already.

        Raises:
          BatchError: parts of a batch with these shapes would have to communicate.
        """
        if found is None:
            found = self.step_of(full_step)
        if not adds_up(found) or found.takes_index > self.numbered:
            raise BatchError(
                f"{full_step.name} needs communication for a batch of these shapes, but not for "
                "the batch of the plan; trace the step with this batch, and make a new plan"
            )
        part = found.program
        b = Builder(part.jaxpr)
        args = part.args[:-1] if found.takes_index else part.args
        types_of_part = avals(part.inner.invars)[: len(part.in_names) - found.takes_index]
        operands: list[Atom] = [b.input(t) for t in types_of_part]
        if self.numbered:
            rows = b.input(_numbers_type(_rows(part, self.axes)))
            args = (*args, TreeSpec(jax.tree.structure((0,)), (self._number,)))
            if found.takes_index:
                operands += b.call(_first, rows)
        jaxpr = b.build(b.inline(part.jaxpr, *operands))
        roles = (FORWARD,) * len(b.eqns)
        part = dataclasses.replace(
            part, name=full_step.name, jaxpr=jaxpr, args=args, roles=roles, labels={}
        )
        return full_step.rewritten(self.part_of, self._full_types, result=part)

    def _full_types(self, types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return input types for the full batch, from input types of the step on one part."""
        found = {}
        for name, t in types.items():
            if not is_under(name, [ROOT]):
                found[name] = full_type(t, self.axes.get(name), self.parts)
        return found

    def precompute_program(self, full_step: Program) -> Program:
        """Return the program that computes all precomputed values from a full batch.

        Args:
          full_step: step on the full batch.
        """
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
    """Return True if a step on a part of the batch needs no communication.

    The sum of the parts' results is then the result of the full batch.
    """
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
    """Find the values to compute from the full batch, and write the step on one part.

    Args:
      full_step: step on the full batch; the loss is one equation if possible
        (`dtrans.step.capture`).
      axes: divided dimension of each batch array.
      parts: number of parts.
      fixed: untrained state on which precomputed values may depend.
      over: mesh axes of the parts.
      noun: word for a part in errors, such as "micro-batch".
      part: the user's step, traced on a part; None if the update may depend on the batch size.

    Returns:
      A pair (writer of all parts, step of one part). The step may still communicate (see
      `adds_up`).
    """
    flat = FlatStep(full_step)
    ways = _values_to_precompute(flat, axes, Shards(parts, tuple(over), noun), fixed, part)

    def of(ways: Mapping[ValuePlace, bool]) -> tuple[WrittenParts, TrainerStep]:
        shared = tuple(f"{ROOT}/{i}" for i, is_rows in enumerate(ways.values()) if not is_rows)
        values = Precomputed(tuple(ways), shared, tuple(fixed), flat.primitives)
        found = WrittenParts(values, axes, parts, tuple(over), noun)
        return found, found.step_of(full_step)

    precomputed = {place: bool(is_rows) for place, is_rows in ways.items() if is_rows is not None}
    # also precompute values that are undecided (None), if each part reads only its rows of them
    if len(precomputed) < len(ways):
        _, step = of({place: bool(is_rows) for place, is_rows in ways.items()})
        read = dict(zip(ways, (f"{ROOT}/{i}" for i in range(len(ways))), strict=True))
        reads_rows = {place for place, name in read.items() if step.sliced.get(name) == 0}
        precomputed = {}
        for place, is_rows in ways.items():
            if is_rows is not None or place in reads_rows:
                precomputed[place] = bool(is_rows) or place in reads_rows
    found, step = of(precomputed)
    return dataclasses.replace(found, numbered=step.takes_index), step


def _values_to_precompute(
    flat: FlatStep,
    axes: Mapping[str, int],
    shards: Shards,
    fixed: Collection[str],
    part: Program | None,
) -> dict[ValuePlace, bool | None]:
    """Find the values that a part cannot compute alone, and that depend on no trained parameter.

    A part would need communication, or its index, to compute these values. If `part` is passed,
    numbers in the update that depend on the batch size are included. The result has an entry for
    each of these values:

      True    each part gets its rows of the value
      False   each part gets the full value
      None    the value has as many rows as the batch, and a part can compute it in full: precompute
              the value only if each part reads just its rows
    """
    places = _untrained_values(flat, fixed)
    jaxpr, _ = flat.without_loss([flat.value(s) for s in places])
    rows = _rows(flat.program, axes)
    has_rows = [flat.value(s).aval.shape[:1] == (rows,) for s in places]
    computed_in_full = set()

    def wanted_layout(i: int, layout: ShardLayout) -> ShardLayout:
        if layout is SHARED and has_rows[i]:
            computed_in_full.add(i)
            return sharded_along(0)
        return layout

    def write(w: SplitWriter) -> tuple[ClosedJaxpr, list[ShardLayout], bool]:
        w.pieces.takes_index = True
        for n, v in zip(flat.program.in_names, flat.inner.invars, strict=True):
            w.take(v, sharded_along(axes[n]) if n in axes else SHARED, is_input=True)
        outs, layouts = w.write(opened(jaxpr), wanted_layout)
        return eliminate_dead(w.b.build(outs)), layouts, w.pieces.reads_index

    jaxpr_of_part, layouts, is_numbered = written(jaxpr, shards, write)
    program = opened(jaxpr_of_part)
    index = set(program.invars[:1]) if is_numbered else set()
    of_update = [s for s in places if not s.in_loss]
    sized = _sized(flat, part, of_update) if part is not None and of_update else ()
    found: dict[ValuePlace, bool | None] = {}
    for i, (place, a, layout) in enumerate(zip(places, program.outvars, layouts, strict=True)):
        needed, read = backward_slice(program.eqns, [a])
        inside = itertools.chain.from_iterable(equations_inside(program.eqns[k]) for k in needed)
        is_exchanged = any(map(is_communication, (*values_at(program.eqns, needed), *inside)))
        # with reordered rows, a shard of the value has other rows than the same shard of the batch
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
                and (is_reordered or layout == sharded_along(0))
            )
            found[place] = None if i in computed_in_full else has_rows[i] and is_cut
        elif place in sized:
            found[place] = False
    return found


def _sized(flat: FlatStep, part: Program, places: Sequence[ValuePlace]) -> set[ValuePlace]:
    """Return the positions of values that depend on the batch size.

    Args:
      flat: step on the full batch.
      part: step traced on a part of the batch.
      places: positions outside of the loss.
    """
    on_part = FlatStep(captured(part))
    mine = value_digests(flat.jaxpr, flat.program.in_names)
    known = set(value_digests(on_part.jaxpr, on_part.program.in_names).values())
    return {s for s in places if mine[flat.value(s)] not in known}


def _untrained_values(flat: FlatStep, fixed: Collection[str]) -> list[ValuePlace]:
    """Find the values that a job could compute before it reads any trained parameter.

    Of a chain of such values, only the last is needed: the one that is an output, or is read by an
    equation with trained parameters. Return the positions of these last values.
    """
    p = flat.program
    batch = set(all_names(p.args[2:]))
    trained: dict[Var, int] = {}
    for n, v in zip(p.in_names, flat.inner.invars, strict=True):
        if n not in batch and n not in fixed:
            trained[v] = 1
    around = propagate(flat.inner.eqns, trained, {})
    body = opened(flat.body)
    operand = flat.operands
    seeds = {v: 1 for v, a in operand.items() if bits_of(around, a)}
    inside = propagate(body.eqns, seeds, {})
    where: dict[Var, ValuePlace] = {}
    producers = producers_of([*flat.inner.eqns, *body.eqns])
    for in_loss, eqns in ((False, flat.inner.eqns), (True, body.eqns)):
        for i, eqn in enumerate(eqns):
            where |= {v: ValuePlace(in_loss, i, k) for k, v in enumerate(eqn.outvars)}
    found: dict[ValuePlace, None] = {}

    def note(atoms: Sequence[Atom]) -> None:
        for a in read_from(operand, atoms):
            if isinstance(a, Literal) or around.get(a) or inside.get(a):
                continue
            while isinstance(a, Var) and a in producers and _moves_rows(producers[a]):
                a = producers[a].invars[0]
            if a in where and not jnp.issubdtype(a.aval.dtype, jax.dtypes.extended):
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
    """Return True for a transpose that moves dimension 0.

    Such an equation is not precomputed: each part transposes its own rows.
    """
    return eqn.primitive.name == "transpose" and eqn.params["permutation"][0] != 0


def _rows(program: Program, axes: Mapping[str, int]) -> int:
    return next((int(program.inputs[n].shape[axis]) for n, axis in axes.items()), 0)


def _numbers_type(rows: int) -> Any:
    return jax.typeof(jnp.zeros(rows, jnp.int32))


def without_effects(program: Program) -> Program:
    """Remove prints and callbacks from a step.

    Each part of the batch would call them, but users expect them to see the full batch.
    """
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
