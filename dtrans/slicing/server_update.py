"""Slicing an optimize half: the blocks of work of each server.

A *unit* is what is updated together: a block of one leaf's rows, or a group of leaves that cannot be sliced. Its
equations are those of its leaves, on the block's shapes (`dtrans.rows.writer`). What no row enters is made once for
each server. Where equations reduce over rows the work comes in levels (`dtrans.slicing.rounds`):

    level 0    lr_sched           counts, schedules: what no row enters
               params/w.block0    what needs nothing else; its parts of the reductions
               all_reduce         parts of this server joined, and one `all_reduce` for each value that crosses
    level 1    reduced            what follows from the reductions alone: norms, factors, decisions
               params/w.block0    the rest
               ...

State that no row enters, or only through reductions (Adafactor's column sums), is on each server that needs it; it
is the same on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import propagate
from dtrans.ir.program import DIST, LR_SCHED, OPTIMIZE
from dtrans.ops import EXACT, BlockGradient, OptimizeBlock, all_reduce_p, combine, identity_of
from dtrans.ops.exact_sum import part_of, sum_of
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.row_buckets import DealtRows, RowBuckets
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice
from dtrans.rows.writer import BlockRows, RowSet, RowWriter
from dtrans.slicing.blocks import Placement, Unit, argument
from dtrans.slicing.rounds import CrossServerValue, ExchangeRounds
from dtrans.step.cut import Gradient


@dataclasses.dataclass(frozen=True)
class ServerVariable:
    """A value that a server holds.

    Attributes:
      of: the array of the step that it begins as.
      block: the number of the block that it is, or belongs to.
      part: its rows of `of`; None for all of it.
      beside: what it is a part of, where that is no array of the step: `params/w.trainer_1_bak`.
      zeros: whether it has the type of these rows only, and begins with zeros.
      buckets: which rows these are, along that axis, where they are no run.
    """

    of: str
    block: int = 0
    part: Slice | None = None
    beside: str = ""
    zeros: bool = False
    buckets: RowBuckets | None = None

    @property
    def origin(self) -> str:
        """What it is a part of."""
        return self.beside or self.of

    def cut(self, aval: Any) -> Any:
        """Its type, given that of the whole."""
        return aval if self.part is None else self.part.of(aval)


@dataclasses.dataclass(frozen=True)
class ServerWork:
    """What one server does and holds.

    Attributes:
      blocks: in order.
      held: name to what it is a part of.
    """

    blocks: tuple[OptimizeBlock, ...]
    held: Mapping[str, ServerVariable]

    @property
    def grads(self) -> dict[str, int]:
        """The gradients that it takes (`params/w@GRAD.block0`), and the number of the block that reads each, from 1."""
        return {g.name: i for i, block in enumerate(self.blocks, 1) for g in block.grads}


class ServerUpdateBuilder:
    """Cuts one optimize half into the work of servers.

    Args:
      analysis: of the optimize half.
      placement: of the leaves.
      trainers: how many gradients each leaf gets; its update is by their mean.
      summed: leaves whose update is by their sum.
      told: arguments of the step that the update reads, which trainers tell the servers that need them.
      asked: state that lives with no leaf, and for which trainers ask before a step.
      exact: leaves whose sums over rows have the same bits however they are cut.

    Raises:
      ConfigError: a leaf with the name that a block, a gradient or another value is given.
    """

    def __init__(
        self,
        analysis: RowAnalysis,
        placement: Placement,
        trainers: int,
        summed: Collection[str] = (),
        told: Collection[str] = (),
        asked: Collection[str] = (),
        exact: Collection[str] = (),
    ) -> None:
        at: dict[str, set[str]] = {}
        for b in placement.table:
            at.setdefault(b.leaf, set()).add(b.endpoint)
        alone = [blocks[0] for blocks in placement.blocks.values() if len(blocks) == 1]
        whole = [b.leaf for b in alone if not b.is_table and b.leaf not in exact]
        self.analysis = analysis.placed(whole)
        self.placement, self.exact = placement, frozenset(exact)
        self.trainers, self.summed, self.told, self.asked = trainers, frozenset(summed), frozenset(told), tuple(asked)
        self.half = self.analysis.half
        self.jaxpr = self.half.jaxpr
        self.levels = ExchangeRounds(self.analysis, exact)
        self.made_by = {v: e for e in self.levels.eqns for v in e.outvars}
        self.input_names = {v: n for n, v in self.analysis.inputs.items() if isinstance(n, str)}
        # what depends on an input at all; the rest are constants, made where they are used
        self._dependent = propagate(self.half.eqns, dict.fromkeys(self.half.inner.invars, 1), {})
        # which servers have parts of what a home gives to others
        self._owners = {
            self.analysis.home_of(leaf): tuple(ep for ep in placement.endpoints if ep in at[leaf]) for leaf in at
        }
        self._claimed = dict.fromkeys(self.input_names.values(), "an array of the optimizer's state")
        self._claimed |= dict.fromkeys(placement.blocks, "a leaf")
        for crossing in self.levels.crossings.values():
            self.claim(crossing.name)
        self._servers = {ep: _Server(self, ep, units) for ep, units in placement.units.items() if units}
        self._settle()

    def depends(self, var: Var) -> bool:
        """Whether a value depends on any input."""
        return bool(self._dependent.get(var))

    def owners(self, crossing: CrossServerValue) -> tuple[str, ...]:
        """The servers that have parts of it."""
        return self._owners[crossing.home]

    def claim(self, name: str, what: str = "a value that the optimizer makes") -> str:
        """A name for something. Raises ConfigError where something else has it."""
        other = self._claimed.setdefault(name, what)
        if other != what:
            raise ConfigError(f"{name} is {other}, and would be the name of {what}: rename a leaf")
        return name

    @cached_property
    def state(self) -> tuple[str, ...]:
        """The optimizer's state, all of it."""
        made = set(self.analysis.outputs) - set(self.analysis.params)
        return tuple(n for n in self.half.in_names if isinstance(n, str) and n in made)

    @cached_property
    def state_of(self) -> dict[str, tuple[str, ...]]:
        """For each home, the state that lives there."""
        found: dict[str, list[str]] = {}
        for name in self.state:
            home = self.analysis.home(self.analysis.layout(self.analysis.inputs[name]))
            if home is not None:
                found.setdefault(home, []).append(name)
        return {k: tuple(v) for k, v in found.items()}

    @cached_property
    def shared_state(self) -> tuple[str, ...]:
        """The state that lives with no leaf: no row enters it, or only through reductions."""
        return tuple(n for n in self.state if self.analysis.layout(self.analysis.inputs[n]) is SHARED)

    @cached_property
    def constant_params(self) -> frozenset[str]:
        """Parameters that the update reads and never changes."""
        made = set(self.analysis.outputs)
        return frozenset(n for n in self.half.in_names if isinstance(n, str) and n not in made) - self.told

    def asked_of(self, name: str) -> str:
        """The server that is asked for an array of the state: the first that has it."""
        return next(ep for ep, server in self._servers.items() if name in server.shared_state)

    def told_to(self, name: str) -> tuple[str, ...]:
        """The servers that need an argument of the step."""
        return tuple(ep for ep, server in self._servers.items() if name in server.read)

    def _settle(self) -> None:
        """Let every server have the shared state that it needs, and all of them what none needs (a count of steps)."""
        needed = set().union(*(s.shared_state for s in self._servers.values()))
        for server in self._servers.values():
            server.hold(n for n in self.shared_state if n not in needed)
        self._over: dict[Var, tuple[str, ...]] = {}
        for var, crossing in self.levels.crossings.items():
            takes_part = {*self.owners(crossing), *(ep for ep, s in self._servers.items() if var in s.crossings)}
            self._over[var] = tuple(ep for ep in self.placement.endpoints if ep in takes_part)

    def over(self, crossing: CrossServerValue) -> tuple[str, ...]:
        """The servers that take part in a crossing: those that have parts of it, and those that need it."""
        return self._over[crossing.var]

    def stays(self, crossing: CrossServerValue) -> bool:
        """Whether a crossing is no end of a phase, since one server alone takes part.

        Where bits may not depend on the number of servers it is: XLA rounds otherwise where it compiles more at once.
        """
        return len(self.over(crossing)) == 1 and not self.exact

    def work(self, endpoint: str) -> ServerWork:
        """What one server does."""
        server = self._servers.get(endpoint)
        return server.work() if server else ServerWork((), {})


class _Server:
    """The work of one server, being written."""

    def __init__(self, slicer: ServerUpdateBuilder, endpoint: str, units: Sequence[Unit]) -> None:
        self.s = slicer
        self.endpoint = endpoint
        self.units = [_UnitWriter(slicer, u) for u in units]
        self.units_of: dict[str, list[_UnitWriter]] = {}
        for unit in self.units:
            self.units_of.setdefault(unit.home, []).append(unit)
        self.wanted: set[Var] = set()  # shared values that are made here
        self.crossings: set[Var] = set()  # those that come from homes
        self.read: set[str] = set()  # inputs of the optimize half that are not a home's
        self.shared_state: set[str] = set()
        for unit in self.units:
            for phase in unit.phases.values():
                self._want(phase.shared)
        self.hold(())

    def hold(self, names: Iterable[str]) -> None:
        """Hold shared state, and whatever its new value needs."""
        self.shared_state.update(names)
        done: set[str] = set()
        while True:
            self.shared_state |= self.read & set(self.s.shared_state)
            ahead = self.shared_state - done
            if not ahead:
                return
            for name in ahead:
                self._want([self.s.analysis.outputs[name]])
            done |= ahead

    def _want(self, atoms: Iterable[Atom]) -> None:
        """Note shared values that are needed here, and all that they are made of."""
        ahead = [a for a in atoms if isinstance(a, Var)]
        s, made_by, crossings = self.s, self.s.levels.made_by, self.s.levels.crossings
        while ahead:
            var = ahead.pop()
            if var in self.wanted or var in self.crossings:
                continue
            if var in crossings:
                self.crossings.add(var)
            elif var in made_by:
                self.wanted.update(v for v in s.levels.eqns[made_by[var]].outvars)
                ahead += [a for a in s.levels.eqns[made_by[var]].invars if isinstance(a, Var)]
            elif var in s.input_names:
                self.read.add(s.input_names[var])

    # -- once every server knows what it needs ---------------------------------------------------

    def work(self) -> ServerWork:
        """The blocks, level by level, and what they need to be held."""
        held = self._held()
        self.names: dict[Var, str] = {}
        shared = _SharedWriter(self)
        levels = sorted({*shared.phases, *(n for u in self.units for n in u.phases), *self._joins})
        blocks: list[OptimizeBlock] = [told] if (told := self._told()) else []
        for level in levels:
            if level in shared.phases:
                blocks.append(shared.block(level))
            for unit in self.units:
                if level in unit.phases:
                    blocks.append(unit.block(level, self.name))
            joined = self._join(level)
            if joined:
                blocks.append(joined)
        return ServerWork(tuple(blocks), held)

    def _told(self) -> OptimizeBlock | None:
        """The block that takes arguments of the step."""
        s = self.s
        names = [n for n in s.half.in_names if isinstance(n, str) and n in self.read & s.told]
        if not names:
            return None
        b = Builder(s.jaxpr)
        given = [b.input(s.analysis.inputs[n].aval) for n in names]
        outs = [b.call(jnp.copy, v)[0] for v in given]  # a server writes into the memory of what it was sent
        grads = tuple(argument(n, s.trainers) for n in names)
        for grad in grads:
            s.claim(grad.name, f"an argument of the step, {grad.leaf}")
        in_names = tuple(g.name for g in grads)
        return OptimizeBlock("arguments", OPTIMIZE, b.build(outs), in_names, tuple(names), 0, grads)

    def _held(self) -> dict[str, ServerVariable]:
        held: dict[str, ServerVariable] = {}
        s = self.s
        for u in self.units:
            block = u.unit.blocks[0].index
            for b in u.unit.blocks:
                held[b.name] = _rows_of(b.leaf, block, u.span, RowAxis(b.leaf, 0))
            for name in u.state:
                layout = s.analysis.layout(s.analysis.inputs[name])
                held[u.named(name)] = _rows_of(name, block, u.span, layout if isinstance(layout, RowAxis) else None)
        here = self.shared_state | (self.read & s.constant_params)
        held |= {n: ServerVariable(n) for n in s.half.in_names if isinstance(n, str) and n in here}
        return held

    def name(self, var: Var) -> str:
        """The name of a shared value on this server."""
        s = self.s
        crossing = s.levels.crossings.get(var)
        if crossing is None and var in s.input_names:
            return s.input_names[var]
        if var not in self.names:
            if crossing is None:
                kind = "reduced" if s.levels.shared(var) else "lr_sched"
                self.names[var] = s.claim(f"{kind}/{len(self.names)}")
            else:
                parts = self._parts_of(crossing)
                # what is in one piece, and stays on this server, needs no joining
                alone = len(parts) == 1 and s.stays(crossing)
                self.names[var] = parts[0] if alone else crossing.name
        return self.names[var]

    def _parts_of(self, crossing: CrossServerValue) -> list[str]:
        """The names of this server's parts of a crossing."""
        return [u.part(crossing) for u in self.units_of.get(crossing.home, ())]

    @cached_property
    def _joins(self) -> dict[int, list[CrossServerValue]]:
        """The crossings that take something to join or to exchange, by level."""
        found: dict[int, list[CrossServerValue]] = {}
        for var, crossing in self.s.levels.crossings.items():
            if self.endpoint in self.s.over(crossing):
                alone = self.s.stays(crossing)
                if not alone or (var in self.crossings and len(self._parts_of(crossing)) > 1):
                    found.setdefault(crossing.level, []).append(crossing)
        return found

    def _join(self, level: int) -> OptimizeBlock | None:
        """The block that ends a level: parts joined, and what other servers have to hear."""
        crossings = self._joins.get(level)
        if not crossings:
            return None
        b = Builder(self.s.jaxpr)
        in_names: list[str] = []
        joined: list[Atom] = []
        for c in crossings:
            names = self._parts_of(c)
            in_names += names
            parts: list[Atom] = [b.input(c.part) for _ in names]
            if not parts:
                joined += b.call(identity_of(c.op, c.part.shape, c.part.dtype))
            else:
                joined += parts if len(parts) == 1 else b.call(_combined(c.op), *parts)
        outs: list[Atom] = []
        for c, part in zip(crossings, joined, strict=True):
            if self.s.stays(c):
                outs.append(part)
            else:
                over = self.s.over(c)
                outs += b.bind(all_reduce_p, part, op=c.op, name=c.name, owners=self.s.owners(c), over=over)
        return OptimizeBlock(
            "all_reduce", DIST, b.build(outs), tuple(in_names), tuple(c.name for c in crossings), level=level
        )


def _rows_of(name: str, block: int, span: RowSet | None, row: RowAxis | None) -> ServerVariable:
    """A unit's rows of an array that has them along an axis; all of it where it has none."""
    if span is None or row is None:
        return ServerVariable(name, block)
    if isinstance(span, RowBuckets):
        return ServerVariable(name, block, Slice(row.axis, 0, span.rows * row.width), buckets=span.along(row))
    return ServerVariable(name, block, span.of(row))


@functools.cache
def _combined(op: str) -> Callable[..., Any]:
    return lambda *parts: combine(op, parts)


@functools.cache
def _digits(axis: int, width: int) -> Callable[[jax.Array], jax.Array]:
    def part(x: jax.Array) -> jax.Array:
        by_row = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis] // width, -1)
        while by_row.shape[1] > 1:  # as sums they would have other bits where there are fewer rows
            odd = by_row[:, -1:] if by_row.shape[1] % 2 else by_row[:, :0]
            half = by_row.shape[1] // 2
            by_row = jnp.concatenate([by_row[:, :half] + by_row[:, half : 2 * half], odd], 1)
        return part_of(by_row[:, 0])

    return part


class _Phase(RowWriter):
    """The equations of one unit, or of what is shared, at one level."""

    def __init__(self, slicer: ServerUpdateBuilder, rows: BlockRows | None) -> None:
        super().__init__(slicer.jaxpr, slicer.analysis.flow, rows, slicer.made_by)
        self.s = slicer
        self.ins: list[str | Var] = []  # names; shared values are named once the server is known
        self.grads: list[BlockGradient] = []
        self.outs: dict[str, Atom] = {}
        self.shared: dict[Var, Var] = {}

    def take(self, name: str, aval: Any) -> Var:
        """An input by name."""
        self.ins.append(name)
        return self.b.input(aval)

    def outside(self, var: Var) -> Atom | None:
        s = self.s
        crosses = var in s.levels.crossings
        if not crosses and (not s.depends(var) or self.makes(var)):
            return None
        self.ins.append(var)
        if not crosses or s.levels.crossings[var].op != EXACT:
            self.shared[var] = self.b.input(var.aval)
            return self.shared[var]
        self.shared[var] = self.b.input(s.levels.crossings[var].part)
        return self.b.call(sum_of, self.shared[var])[0]

    def makes(self, var: Var) -> bool:
        """Whether a shared value is made in this phase."""
        return False

    def maker(self, var: Var) -> JaxprEqn | None:
        return None if var in self.s.levels.crossings else super().maker(var)

    def finish(self, name: str, role: str, level: int, named: Callable[[Var], str]) -> OptimizeBlock:
        """The block."""
        in_names = tuple(n if isinstance(n, str) else named(n) for n in self.ins)
        jaxpr = self.b.build(list(self.outs.values()))
        return OptimizeBlock(name, role, jaxpr, in_names, tuple(self.outs), level, tuple(self.grads))


class _UnitWriter:
    """Writes the update of one unit, a phase for each level at which it does something."""

    def __init__(self, slicer: ServerUpdateBuilder, unit: Unit) -> None:
        self.s = slicer
        self.unit = unit
        self.span = unit.span
        self.leaves = tuple(b.leaf for b in unit.blocks)
        self.home = slicer.analysis.home_of(self.leaves[0])
        self.state = slicer.state_of.get(self.home, ())
        inputs = slicer.analysis.inputs
        self.phases: dict[int, _UnitPhase] = {}
        self.inputs = {inputs[n]: n for n in (*self.leaves, *self.state)}
        self.grads = {
            inputs[g]: b.gradients(slicer.trainers, "sum" if b.leaf in slicer.summed else "mean")
            for b in unit.blocks
            if (g := Gradient(b.leaf)) in inputs
        }
        for base in (*self.leaves, *self.state) if unit.blocks[0].count > 1 else ():
            slicer.claim(self.named(base), f"block {unit.blocks[0].index} of {base}")
        for grad in self.grads.values():
            slicer.claim(grad.name, f"a gradient of {grad.leaf}")
        self.made_at: dict[Var, int] = {}
        self.kept: dict[Var, str] = {}  # values that a later phase reads
        self._write()

    def named(self, base: str) -> str:
        """The name of something that is cut as this unit is: only a unit of one leaf is cut."""
        return self.unit.blocks[0].named(base)

    def part(self, crossing: CrossServerValue) -> str:
        """The name of this unit's part of a crossing."""
        return self.s.claim(f"{self.unit.name}/{crossing.name}")

    def phase(self, level: int) -> _UnitPhase:
        if level not in self.phases:
            self.phases[level] = _UnitPhase(self)
        return self.phases[level]

    def _write(self) -> None:
        s, levels = self.s, self.s.levels
        eqns = levels.eqns_of.get(self.home, [])
        outs = {n: s.analysis.outputs[n] for n in (*self.leaves, *self.state)}
        # a gradient is taken as soon as anything reads it
        for i in eqns:
            for a in levels.eqns[i].invars:
                if isinstance(a, Var) and a in self.grads:
                    self.made_at[a] = min(self.made_at.get(a, levels.of_eqn(i)), levels.of_eqn(i))
        for var, grad in self.grads.items():
            phase = self.phase(self.made_at.setdefault(var, 0))
            phase.grads.append(grad)
            phase.env[var] = phase.take(grad.name, phase.cut(var.aval, RowAxis(grad.leaf, 0)))
        for i in eqns:
            eqn, step = levels.eqns[i], s.analysis.flow.steps[i]
            level = levels.of_eqn(i)
            phase = self.phase(level)
            crossing = levels.crossings.get(eqn.outvars[0])
            exact = crossing is not None and crossing.op == EXACT
            for v, made in zip(eqn.outvars, phase.digits(eqn, step) if exact else phase.emit(eqn, step), strict=True):
                phase.env[v] = made
                self.made_at[v] = level
                crossing = levels.crossings.get(v)
                if crossing is not None:
                    phase.outs[self.part(crossing)] = made
                    if step.reduce:
                        del phase.env[v]  # this block's part; others read what the parts make
        for var in (*self.inputs, *self.grads):
            if var in levels.crossings:
                phase = self.phase(levels.crossings[var].level)
                phase.outs[self.part(levels.crossings[var])] = phase.read(var, None)
        for name, out in outs.items():
            phase = self.phase(self._level_of(out))
            layout = s.analysis.layout(s.analysis.inputs[name])
            phase.outs[self.named(name)] = phase.read(out, layout if isinstance(layout, RowAxis) else None)

    def _level_of(self, out: Atom) -> int:
        if isinstance(out, Literal):
            return min(self.phases, default=0)
        if out in self.made_at and out not in self.s.levels.crossings:
            return self.made_at[out]
        if out in self.inputs:
            return min(self.phases, default=0)
        return self.s.levels.read(out, self.home)

    def block(self, level: int, named: Callable[[Var], str]) -> OptimizeBlock:
        """What it does at one level."""
        return self.phases[level].finish(self.unit.name, OPTIMIZE, level, named)


class _UnitPhase(_Phase):
    """One level of a unit."""

    def __init__(self, unit: _UnitWriter) -> None:
        super().__init__(unit.s, DealtRows(unit.span) if isinstance(unit.span, RowBuckets) else unit.span)
        self.unit = unit

    def digits(self, eqn: JaxprEqn, step: Step) -> list[Atom]:
        """This block's part of an exact sum over all of its entries: each row is added up first, as it is anywhere."""
        (row,) = step.operands
        assert row is not None
        return self.b.call(_digits(row.axis, row.width), self.read(eqn.invars[0], row))

    def own(self, var: Var) -> Atom | None:
        if var in self.env:
            return self.env[var]
        u = self.unit
        aval = self.cut(var.aval, self.flow.layout(var))
        if var in u.inputs:
            name = u.named(u.inputs[var])
            self.env[var] = self.take(name, aval)
        elif var in u.made_at and var in (before := u.phases[u.made_at[var]]).env and before is not self:
            name = u.kept.setdefault(var, self.s.claim(f"{u.unit.name}/kept/{len(u.kept)}"))
            before.outs[name] = before.env[var]
            self.env[var] = self.take(name, aval)
        else:
            return None
        return self.env[var]


class _SharedWriter:
    """Writes what one server makes of values that live with no leaf, a phase for each level."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        s, levels = server.s, server.s.levels
        self.phases: dict[int, _SharedPhase] = {}
        outs = {n: s.analysis.outputs[n] for n in s.half.in_names if isinstance(n, str) and n in server.shared_state}
        # what units, and later levels, read
        read = {v for u in server.units for p in u.phases.values() for v in p.shared}
        positions = sorted({levels.made_by[v] for v in server.wanted if v in levels.made_by})
        for i in positions:
            eqn = levels.eqns[i]
            level = levels.shared(eqn.outvars[0])
            read.update(a for a in eqn.invars if isinstance(a, Var) and levels.shared(a) < level)
        for i in positions:
            eqn = levels.eqns[i]
            if not s.depends(eqn.outvars[0]):
                continue
            level = levels.shared(eqn.outvars[0])
            phase = self.phase(level)
            made = phase.b.copy(eqn, [phase.whole(a) for a in eqn.invars], [v.aval for v in eqn.outvars])
            phase.wholes.update(zip(eqn.outvars, made, strict=True))
        for name, out in outs.items():
            phase = self.phase(levels.shared(out))
            phase.outs[name] = phase.whole(out)
        for v in (v for i in positions for v in levels.eqns[i].outvars):
            if v in read and s.depends(v):
                phase = self.phases[levels.shared(v)]
                phase.outs[server.name(v)] = phase.wholes[v]

    def phase(self, level: int) -> _SharedPhase:
        if level not in self.phases:
            self.phases[level] = _SharedPhase(self.server.s, level)
        return self.phases[level]

    def block(self, level: int) -> OptimizeBlock:
        """What is made at one level."""
        name, role = ("reduced", OPTIMIZE) if level else ("lr_sched", LR_SCHED)
        return self.phases[level].finish(name, role, level, self.server.name)


class _SharedPhase(_Phase):
    """One level of what is shared."""

    def __init__(self, slicer: ServerUpdateBuilder, level: int) -> None:
        super().__init__(slicer, None)
        self.level = level

    def makes(self, var: Var) -> bool:
        levels = self.s.levels
        return var in levels.made_by and levels.shared(var) == self.level
