"""Programs that update one block, or several parameters together (a *unit*).

Servers exchange some values, such as norms, during an update. So the update of a unit consists of
several programs: one before the first exchange, and one after each exchange. The number of earlier
exchanges is the *level* of a program. The programs have the optimizer's equations, rewritten for
the rows of the block (`dtrans.rows.writer`).

If a later program reads a value, the program that computes the value returns it. Shared values,
such as a learning rate, are inputs. They have variables instead of names, because each server names
them differently (`dtrans.slicing.server_update`).
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
from dtrans.ir.dataflow import variables
from dtrans.ops import EXACT, BlockGradient, OptimizeBlock
from dtrans.ops.exact_sum import part_of, sum_of
from dtrans.rows.layout import RowAxis, rows_or_none
from dtrans.rows.row_buckets import BucketRows, RowBuckets
from dtrans.rows.rules import Step
from dtrans.rows.writer import BlockRows, RowWriter
from dtrans.slicing.blocks import Unit
from dtrans.slicing.rounds import CrossServerValue, ExchangeRounds
from dtrans.step.halves import Gradient


@dataclasses.dataclass(frozen=True, eq=False)
class LevelProgram:
    """Program that a server runs between two exchanges with other servers, to update one unit.

    A unit is a block, or several parameters that are updated together. A program without a unit
    computes shared values, such as a learning rate.

    Attributes:
      jaxpr: the equations.
      reads: one entry for each input: its name; for a shared value, its variable.
      out_names: names of the outputs.
      grads: gradients that are inputs.
    """

    jaxpr: ClosedJaxpr
    reads: tuple[str | Var, ...]
    out_names: tuple[str, ...]
    grads: tuple[BlockGradient, ...] = ()

    def block(
        self, name: str, role: str, level: int, name_of: Callable[[Var], str]
    ) -> OptimizeBlock:
        """Convert this program to the form that a server runs, an `OptimizeBlock`.

        Args:
          name: name of the optimize block.
          role: its role, such as "optimize".
          level: number of exchanges before the program.
          name_of: returns the name of a shared value on this server.
        """
        in_names = tuple(n if isinstance(n, str) else name_of(n) for n in self.reads)
        return OptimizeBlock(name, role, self.jaxpr, in_names, self.out_names, level, self.grads)


@dataclasses.dataclass(frozen=True, eq=False)
class UnitProgram:
    """Programs that update one unit: a block of rows, or several parameters together.

    There is one program before the first exchange of values between servers, and one after each.

    Attributes:
      unit: the unit.
      home: name of the first parameter of the unit.
      names: name of a full array -> name of the rows that the server stores. The arrays are the
        parameters and their optimizer state.
      levels: number of exchanges before a program -> program.
    """

    unit: Unit
    home: str
    names: Mapping[str, str]
    levels: Mapping[int, LevelProgram]

    @property
    def shared(self) -> set[Var]:
        """Variables of the shared values, such as a learning rate, that the programs read."""
        found: set[Var] = set()
        for program in self.levels.values():
            found.update(v for v in program.reads if isinstance(v, Var))
        return found


def part_name(unit: Unit, crossing: CrossServerValue) -> str:
    """Return the name of the term that some rows add to a value, such as a norm of all gradients.

    Args:
      unit: the blocks that have these rows.
      crossing: the value, which servers exchange.
    """
    return f"{unit.name}/{crossing.name}"


class LevelWriter:
    """Writer of one program of an update, which runs between two exchanges of servers.

    Args:
      rounds: equations of the update, with the exchange after which each value is known.
      rows: rows of the block; None for full parameters, and for a program of shared values.
      read_unit: returns the input for a value of the unit; None for a shared value.
      computes: takes a shared value; returns True if this program computes it.
    """

    def __init__(
        self,
        rounds: ExchangeRounds,
        rows: BlockRows | None = None,
        read_unit: Callable[[Var], Atom | None] = lambda var: None,
        computes: Callable[[Var], bool] = lambda var: False,
    ) -> None:
        self._rounds, self._computes = rounds, computes
        self.b = Builder(rounds.analysis.half.jaxpr)
        self.writer = RowWriter(
            self.b, rounds.analysis.flow, rows, rounds.makers, read_unit, self._outside
        )
        self._reads: list[str | Var] = []
        self.grads: list[BlockGradient] = []
        self.outs: dict[str, Atom] = {}

    def take(self, name: str | Var, aval: Any) -> Var:
        """Add an input to the program, and return its variable.

        Args:
          name: name of the input; for a shared value, its variable.
          aval: its type.
        """
        self._reads.append(name)
        return self.b.input(aval)

    def _outside(self, var: Var) -> Atom | None:
        """Return an input for a shared value, such as a learning rate.

        Return None if this program computes the value itself.
        """
        crossing = self._rounds.crossings.get(var)
        if crossing is None:
            if self._computes(var) or not self._rounds.depends(var):
                return None
            return self.take(var, var.aval)
        taken = self.take(var, crossing.term_type)
        if crossing.op == EXACT:
            return self.b.call(sum_of, taken)[0]
        return taken

    def program(self) -> LevelProgram:
        """Return the finished program."""
        jaxpr = self.b.build(list(self.outs.values()))
        return LevelProgram(jaxpr, tuple(self._reads), tuple(self.outs), tuple(self.grads))


def write_unit(
    rounds: ExchangeRounds, unit: Unit, gradients: Sequence[BlockGradient]
) -> UnitProgram:
    """Write the programs that a server runs to update one block, or several parameters together.

    Args:
      rounds: equations of the update, with the exchange after which each value is known.
      unit: the unit.
      gradients: gradients of the blocks; a parameter that has none is left out.
    """
    analysis = rounds.analysis
    home = analysis.home_of(unit.blocks[0].leaf)
    state = analysis.state_of.get(home, ())
    leaves = [block.leaf for block in unit.blocks]
    names = {n: unit.blocks[0].named(n) for n in (*leaves, *state)}
    inputs = {analysis.inputs[n]: name for n, name in names.items()}
    grads = {analysis.inputs[Gradient(g.leaf)]: g for g in gradients}
    levels = _UnitLevels(rounds, unit, inputs)
    positions = rounds.eqns_of.get(home, [])

    # the first level that reads a gradient has it as an input
    for i in positions:
        level = rounds.level_of_equation(i)
        for v in variables(rounds.eqns[i].invars):
            if v in grads:
                levels.of[v] = min(levels.of.get(v, level), level)
    for var, grad in grads.items():
        w = levels.at(levels.of.setdefault(var, 0))
        w.grads.append(grad)
        w.writer.env[var] = w.take(grad.name, w.writer.block_type(var.aval, RowAxis(grad.leaf, 0)))

    for i in positions:
        levels.emit(i)

    for var in (*inputs, *grads):
        if (crossing := rounds.crossings.get(var)) is not None:
            w = levels.at(crossing.level)
            w.outs[part_name(unit, crossing)] = w.writer.read(var, None)
    for n, name in names.items():
        out, layout = analysis.outputs[n], analysis.layout(analysis.inputs[n])
        w = levels.at(levels.of_output(out, home))
        w.outs[name] = w.writer.read(out, rows_or_none(layout))
    return UnitProgram(unit, home, names, {n: w.program() for n, w in levels.writers.items()})


class _UnitLevels:
    """Writers of the programs that update one unit, by the number of earlier exchanges.

    Args:
      rounds: equations of the update, with the level of each value: the number of exchanges before
        the value is known.
      unit: the unit.
      inputs: variable of a full array -> name of the rows that the server stores. The arrays are
        the parameters and their optimizer state.

    Attributes:
      writers: level -> writer.
      of: level at which each value of the unit is computed.
    """

    def __init__(self, rounds: ExchangeRounds, unit: Unit, inputs: Mapping[Var, str]) -> None:
        self._rounds, self._unit, self._inputs = rounds, unit, inputs
        self.writers: dict[int, LevelWriter] = {}
        self.of: dict[Var, int] = {}
        self._handed: dict[Var, str] = {}  # value that a later level reads -> name of the value

    def at(self, level: int) -> LevelWriter:
        """Return the writer of the program that runs after `level` exchanges of the servers."""
        if level not in self.writers:
            span = self._unit.span
            rows = BucketRows(span) if isinstance(span, RowBuckets) else span
            self.writers[level] = LevelWriter(
                self._rounds, rows, functools.partial(self._read_unit, level)
            )
        return self.writers[level]

    def _read_unit(self, level: int, var: Var) -> Atom | None:
        """Return a program's input for a value that belongs to the updated rows.

        Args:
          level: number of exchanges before the program.
          var: the value.

        Returns:
          The input; None for a value that all servers share, such as a learning rate.
        """
        name = self._inputs.get(var) or self._from_earlier(level, var)
        if name is None:
            return None
        w = self.writers[level]
        w.writer.env[var] = w.take(
            name, w.writer.block_type(var.aval, self._rounds.analysis.layout(var))
        )
        return w.writer.env[var]

    def _from_earlier(self, level: int, var: Var) -> str | None:
        """Make an earlier program return a value that a later program reads.

        Returns:
          The name of the value; None if no earlier program computes it.
        """
        before = self.of.get(var, level)
        if before == level or var not in self.writers[before].writer.env:
            return None
        name = self._handed.setdefault(var, f"{self._unit.name}/kept/{len(self._handed)}")
        self.writers[before].outs[name] = self.writers[before].writer.env[var]
        return name

    def emit(self, position: int) -> None:
        """Write an equation of the update for the rows that this object updates.

        Its result may be a term of a norm or another value that servers exchange. The program then
        returns this term.

        Args:
          position: index of the equation in the update.
        """
        rounds, level = self._rounds, self._rounds.level_of_equation(position)
        eqn, step = rounds.eqns[position], rounds.analysis.flow.steps[position]
        w = self.at(level)
        first = rounds.crossings.get(eqn.outvars[0])
        values: Sequence[Atom]
        if first is not None and first.op == EXACT:
            values = _digits(w, eqn, step)
        else:
            values = w.writer.emit(eqn, step)
        for v, value in zip(eqn.outvars, values, strict=True):
            crossing = rounds.crossings.get(v)
            if crossing is not None:
                w.outs[part_name(self._unit, crossing)] = value
            # readers of a reduction need the result of all blocks, so they do not get this part
            if crossing is None or not step.reduce:
                w.writer.env[v] = value
            self.of[v] = level

    def of_output(self, out: Atom, home: str) -> int:
        """Return the number of exchanges before a new parameter or state array is known."""
        if isinstance(out, Literal):
            return min(self.writers, default=0)
        if out in self.of and out not in self._rounds.crossings:
            return self.of[out]
        if out in self._inputs:
            return min(self.writers, default=0)
        return self._rounds.level_for(out, home)


def _digits(w: LevelWriter, eqn: JaxprEqn, step: Step) -> list[Atom]:
    """Write one block's term of an exact sum, which has the same bits for every placement."""
    (row,) = step.operands
    assert row is not None
    return w.b.call(_digits_of_rows(row.axis, row.width), w.writer.read(eqn.invars[0], row))


@functools.cache
def _digits_of_rows(axis: int, width: int) -> Callable[[jax.Array], jax.Array]:
    def part(x: jax.Array) -> jax.Array:
        by_row = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis] // width, -1)
        while by_row.shape[1] > 1:  # pairwise: XLA's own order depends on the number of rows
            odd = by_row[:, -1:] if by_row.shape[1] % 2 else by_row[:, :0]
            half = by_row.shape[1] // 2
            by_row = jnp.concatenate([by_row[:, :half] + by_row[:, half : 2 * half], odd], 1)
        return part_of(by_row[:, 0])

    return part
