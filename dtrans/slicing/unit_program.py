"""Programs of a unit of an update, one for each level at which the unit computes something.

A *unit* is what is updated together: a block of one leaf's rows, or a group of leaves that cannot
be sliced. Its equations are those of its leaves, on the block's shapes (`dtrans.rows.writer`).
Values that a later level reads are outputs of the level that computes them. Shared values are
inputs under their variables: each server names its own (`dtrans.slicing.server_update`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from dtrans.ir.builder import Builder
from dtrans.ops import EXACT, BlockGradient, OptimizeBlock
from dtrans.ops.exact_sum import part_of, sum_of
from dtrans.rows.layout import RowAxis
from dtrans.rows.row_buckets import BucketRows, RowBuckets
from dtrans.rows.rules import Step
from dtrans.rows.writer import BlockRows, RowWriter
from dtrans.slicing.blocks import Unit
from dtrans.slicing.rounds import CrossServerValue, ExchangeRounds
from dtrans.step.cut import Gradient


@dataclasses.dataclass(frozen=True, eq=False)
class LevelProgram:
    """The equations of one level.

    Attributes:
      jaxpr: the equations.
      reads: the inputs: names, and shared values by their variables.
      out_names: names of the outputs.
      grads: the gradients among the inputs.
    """

    jaxpr: ClosedJaxpr
    reads: tuple[str | Var, ...]
    out_names: tuple[str, ...]
    grads: tuple[BlockGradient, ...] = ()

    def block(
        self, name: str, role: str, level: int, name_of: Callable[[Var], str]
    ) -> OptimizeBlock:
        """Return the block of a server, which names shared values by `name_of`."""
        in_names = tuple(n if isinstance(n, str) else name_of(n) for n in self.reads)
        return OptimizeBlock(name, role, self.jaxpr, in_names, self.out_names, level, self.grads)


@dataclasses.dataclass(frozen=True, eq=False)
class UnitProgram:
    """The update of one unit.

    Attributes:
      unit: the unit.
      home: the first of its leaves.
      held: names of its leaves and of the state that lives with them, to names of the unit's parts
        of these.
      levels: its programs by level.
    """

    unit: Unit
    home: str
    held: Mapping[str, str]
    levels: Mapping[int, LevelProgram]

    @property
    def shared(self) -> set[Var]:
        """The shared values that it reads."""
        return {v for program in self.levels.values() for v in program.reads if isinstance(v, Var)}


def part_name(unit: Unit, crossing: CrossServerValue) -> str:
    """Return the name of a unit's part of a value that crosses."""
    return f"{unit.name}/{crossing.name}"


class LevelWriter:
    """Writer of one level.

    Args:
      rounds: the update, with the level of each value.
      rows: rows of the block; None for whole leaves, and for shared values.
      own: returns a value that an earlier level has, or an input of the unit's own; None for a
        shared value.
      computes: returns True if a shared value is computed at this level.
    """

    def __init__(
        self,
        rounds: ExchangeRounds,
        rows: BlockRows | None = None,
        own: Callable[[Var], Atom | None] = lambda var: None,
        computes: Callable[[Var], bool] = lambda var: False,
    ) -> None:
        self._rounds, self._computes = rounds, computes
        self.b = Builder(rounds.analysis.half.jaxpr)
        self.writer = RowWriter(
            self.b, rounds.analysis.flow, rows, rounds.makers, own, self._outside
        )
        self._reads: list[str | Var] = []
        self.grads: list[BlockGradient] = []
        self.outs: dict[str, Atom] = {}

    def take(self, name: str | Var, aval: Any) -> Var:
        """Add an input."""
        self._reads.append(name)
        return self.b.input(aval)

    def _outside(self, var: Var) -> Atom | None:
        """Return an input for a shared value; None for a constant, and for a value that is computed
        here."""
        crossing = self._rounds.crossings.get(var)
        if crossing is None:
            here = not self._rounds.depends(var) or self._computes(var)
            return None if here else self.take(var, var.aval)
        taken = self.take(var, crossing.part)
        return self.b.call(sum_of, taken)[0] if crossing.op == EXACT else taken

    def program(self) -> LevelProgram:
        """Return what was written."""
        jaxpr = self.b.build(list(self.outs.values()))
        return LevelProgram(jaxpr, tuple(self._reads), tuple(self.outs), tuple(self.grads))


def write_unit(
    rounds: ExchangeRounds, unit: Unit, gradients: Sequence[BlockGradient]
) -> UnitProgram:
    """Write the update of one unit.

    Args:
      rounds: the update, with the level of each value.
      unit: blocks of the unit.
      gradients: gradients of the unit's blocks, of those that have any.
    """
    analysis = rounds.analysis
    home = analysis.home_of(unit.blocks[0].leaf)
    state = analysis.state_of.get(home, ())
    held = {n: unit.blocks[0].named(n) for n in (*(b.leaf for b in unit.blocks), *state)}
    inputs = {analysis.inputs[n]: name for n, name in held.items()}
    grads = {analysis.inputs[Gradient(g.leaf)]: g for g in gradients}
    levels = _UnitLevels(rounds, unit, inputs)
    positions = rounds.eqns_of.get(home, [])

    # a gradient is taken as soon as anything reads it
    for i in positions:
        for a in rounds.eqns[i].invars:
            if isinstance(a, Var) and a in grads:
                levels.of[a] = min(levels.of.get(a, rounds.of_eqn(i)), rounds.of_eqn(i))
    for var, grad in grads.items():
        w = levels.at(levels.of.setdefault(var, 0))
        w.grads.append(grad)
        w.writer.env[var] = w.take(grad.name, w.writer.cut(var.aval, RowAxis(grad.leaf, 0)))

    for i in positions:
        levels.emit(i)

    for var in (*inputs, *grads):
        if (crossing := rounds.crossings.get(var)) is not None:
            w = levels.at(crossing.level)
            w.outs[part_name(unit, crossing)] = w.writer.read(var, None)
    for n, name in held.items():
        out, layout = analysis.outputs[n], analysis.layout(analysis.inputs[n])
        w = levels.at(levels.of_output(out, home))
        w.outs[name] = w.writer.read(out, layout if isinstance(layout, RowAxis) else None)
    return UnitProgram(unit, home, held, {n: w.program() for n, w in levels.writers.items()})


class _UnitLevels:
    """The levels of one unit while they are written.

    Args:
      inputs: names of the unit's parts of leaves and state.

    Attributes:
      writers: by level.
      of: the level at which a value of the unit is known.
    """

    def __init__(self, rounds: ExchangeRounds, unit: Unit, inputs: Mapping[Var, str]) -> None:
        self._rounds, self._unit, self._inputs = rounds, unit, inputs
        self.writers: dict[int, LevelWriter] = {}
        self.of: dict[Var, int] = {}
        self._kept: dict[Var, str] = {}  # values that a later level reads

    def at(self, level: int) -> LevelWriter:
        """Return the writer of a level."""
        if level not in self.writers:
            span = self._unit.span
            rows = BucketRows(span) if isinstance(span, RowBuckets) else span
            self.writers[level] = LevelWriter(
                self._rounds, rows, functools.partial(self._own, level)
            )
        return self.writers[level]

    def _own(self, level: int, var: Var) -> Atom | None:
        """Return an input for a value of the unit that this level reads; None for a shared
        value."""
        name = self._inputs.get(var) or self._from_earlier(level, var)
        if name is None:
            return None
        w = self.writers[level]
        w.writer.env[var] = w.take(name, w.writer.cut(var.aval, self._rounds.analysis.layout(var)))
        return w.writer.env[var]

    def _from_earlier(self, level: int, var: Var) -> str | None:
        """Return the name of a value that an earlier level hands on; None where none has it."""
        before = self.of.get(var, level)
        if before == level or var not in self.writers[before].writer.env:
            return None
        name = self._kept.setdefault(var, f"{self._unit.name}/kept/{len(self._kept)}")
        self.writers[before].outs[name] = self.writers[before].writer.env[var]
        return name

    def emit(self, position: int) -> None:
        """Write an equation of the unit, and its parts of values that cross."""
        rounds = self._rounds
        eqn, step, level = (
            rounds.eqns[position],
            rounds.analysis.flow.steps[position],
            rounds.of_eqn(position),
        )
        w = self.at(level)
        first = rounds.crossings.get(eqn.outvars[0])
        exact = first is not None and first.op == EXACT
        for v, made in zip(
            eqn.outvars, _digits(w, eqn, step) if exact else w.writer.emit(eqn, step), strict=True
        ):
            crossing = rounds.crossings.get(v)
            if crossing is not None:
                w.outs[part_name(self._unit, crossing)] = made
            if (
                crossing is None or not step.reduce
            ):  # others read what the parts of all blocks add up to
                w.writer.env[v] = made
            self.of[v] = level

    def of_output(self, out: Atom, home: str) -> int:
        """Return the level at which a new value is known."""
        if isinstance(out, Literal):
            return min(self.writers, default=0)
        if out in self.of and out not in self._rounds.crossings:
            return self.of[out]
        return min(self.writers, default=0) if out in self._inputs else self._rounds.read(out, home)


def _digits(w: LevelWriter, eqn: JaxprEqn, step: Step) -> list[Atom]:
    """Write a block's part of an exact sum over all of its entries: each row is added up first, as
    it is anywhere."""
    (row,) = step.operands
    assert row is not None
    return w.b.call(_digits_of_rows(row.axis, row.width), w.writer.read(eqn.invars[0], row))


@functools.cache
def _digits_of_rows(axis: int, width: int) -> Callable[[jax.Array], jax.Array]:
    def part(x: jax.Array) -> jax.Array:
        by_row = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis] // width, -1)
        while by_row.shape[1] > 1:  # as sums they would have other bits where there are fewer rows
            odd = by_row[:, -1:] if by_row.shape[1] % 2 else by_row[:, :0]
            half = by_row.shape[1] // 2
            by_row = jnp.concatenate([by_row[:, :half] + by_row[:, half : 2 * half], odd], 1)
        return part_of(by_row[:, 0])

    return part
