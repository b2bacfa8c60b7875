"""Update of one server, as optimize blocks.

Each server computes values that no row enters once. If equations reduce over rows, the blocks have
levels (`dtrans.slicing.rounds`):

    level 0    lr_sched           counts, schedules: values that no row enters
               params/w.block0    equations without cross-server values; parts of reductions
               all_reduce         parts of this server combined; one `all_reduce` for each value
    level 1    reduced            values of reductions alone: norms, factors, decisions
               params/w.block0    the remainder
               ...

`dtrans.slicing.server_spec` has the needs of the server, and `dtrans.slicing.unit_program` writes
its units.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import Atom, Var
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals
from dtrans.ir.program import DIST, LR_SCHED, OPTIMIZE
from dtrans.ir.selection import values_at
from dtrans.ops import OptimizeBlock, all_reduce_p, combine, identity_of
from dtrans.rows.layout import RowAxis
from dtrans.rows.row_buckets import RowBuckets
from dtrans.rows.slices import Slice
from dtrans.rows.writer import RowSet
from dtrans.slicing.blocks import argument
from dtrans.slicing.rounds import CrossServerValue, ExchangeRounds
from dtrans.slicing.server_spec import ServerSpec, UpdateSpec, claim
from dtrans.slicing.unit_program import LevelProgram, LevelWriter


@dataclasses.dataclass(frozen=True)
class ServerVariable:
    """Value that a server stores.

    Attributes:
      of: array of the step with its initial value.
      block: index of the block that it is, or belongs to.
      part: its rows of `of`; None for all rows.
      beside: name of the full value if that is no array of the step: `params/w.trainer_1_bak`.
      zeros: True if it starts with zeros; only its type comes from `of`.
      buckets: its rows along that axis, if they are buckets.
    """

    of: str
    block: int = 0
    part: Slice | None = None
    beside: str = ""
    zeros: bool = False
    buckets: RowBuckets | None = None

    @property
    def origin(self) -> str:
        """Name of the full value."""
        return self.beside or self.of

    def cut(self, aval: Any) -> Any:
        """Return its type, from that of the full value."""
        return aval if self.part is None else self.part.of(aval)


@dataclasses.dataclass(frozen=True)
class ServerWork:
    """Blocks and state of one server.

    Attributes:
      blocks: optimize blocks in order.
      variables: stored values by name.
    """

    blocks: tuple[OptimizeBlock, ...]
    variables: Mapping[str, ServerVariable]

    @property
    def grads(self) -> dict[str, int]:
        """Its gradients (`params/w@GRAD.block0`), with the index of the block that reads each,
        from 1."""
        return {g.name: i for i, block in enumerate(self.blocks, 1) for g in block.grads}


def write_server(spec: UpdateSpec, endpoint: str) -> ServerWork:
    """Write the update of one server; nothing for a server without units.

    Raises:
      ConfigError: a leaf has the name of an argument of the step, or of a shared value.
    """
    server = spec.servers.get(endpoint)
    if server is None:
        return ServerWork((), {})
    rounds, claimed = spec.rounds, ChainMap(dict[str, str](), dict(spec.names))
    shared, names = _write_shared(rounds, server)
    for name in names.values():
        claim(claimed, name)
    joins = _joins(spec, server, endpoint)

    def name_of(var: Var) -> str:
        """Return the name of a shared value on this server."""
        crossing = rounds.crossings.get(var)
        if crossing is None:
            return names.get(var) or spec.analysis.input_names[var]
        parts = server.parts_of(crossing)
        # a value with a single part on this server needs no reduction
        return parts[0] if len(parts) == 1 and spec.stays(crossing) else crossing.name

    blocks = _take_arguments(spec, server, claimed)
    for level in sorted({*shared, *(n for u in server.units for n in u.levels), *joins}):
        if level in shared:
            name, role = ("reduced", OPTIMIZE) if level else ("lr_sched", LR_SCHED)
            blocks.append(shared[level].block(name, role, level, name_of))
        for unit in server.units:
            if level in unit.levels:
                blocks.append(unit.levels[level].block(unit.unit.name, OPTIMIZE, level, name_of))
        if level in joins:
            blocks.append(_join(spec, server, joins[level]))
    return ServerWork(tuple(blocks), _variables(spec, server))


def inline_update(b: Builder, work: ServerWork, values: Mapping[str, Atom]) -> dict[str, Atom]:
    """Write all blocks of the only server into a program.

    Args:
      b: builder of the program.
      work: blocks of the server.
      values: state and gradients by name.

    Returns:
      New state by name.
    """
    values, new = dict(values), dict[str, Atom]()
    for block in work.blocks:
        b.role = block.role if block.role == LR_SCHED else OPTIMIZE
        outputs = b.inline(block.jaxpr, *values_at(values, block.in_names))
        for name, value in zip(block.out_names, outputs, strict=True):
            # no block reads new state: its name stands for the state before the step
            (new if name in work.variables else values)[name] = value
    return new


def _variables(spec: UpdateSpec, server: ServerSpec) -> dict[str, ServerVariable]:
    """Return the stored values of a server: rows of leaves and of their state, and full arrays."""
    variables: dict[str, ServerVariable] = {}
    analysis = spec.analysis
    for u in server.units:
        leaves = {b.leaf for b in u.unit.blocks}
        for base, name in u.names.items():
            row = RowAxis(base, 0) if base in leaves else analysis.layout(analysis.inputs[base])
            variables[name] = _rows_of(base, u.unit.blocks[0].index, u.unit.span, row)
    constant = server.inputs - set(analysis.outputs) - spec.arguments
    variables |= {
        n: ServerVariable(n)
        for n in analysis.input_names.values()
        if n in server.shared_state | constant
    }
    return variables


def _rows_of(name: str, block: int, span: RowSet | None, row: Any) -> ServerVariable:
    """Return a unit's rows of an array along an axis; the full array if it has no rows."""
    if span is None or not isinstance(row, RowAxis):
        return ServerVariable(name, block)
    if isinstance(span, RowBuckets):
        return ServerVariable(
            name, block, Slice(row.axis, 0, span.rows * row.width), buckets=span.along(row)
        )
    return ServerVariable(name, block, span.of(row))


def _take_arguments(
    spec: UpdateSpec, server: ServerSpec, claimed: ChainMap[str, str]
) -> list[OptimizeBlock]:
    """Write the block that reads arguments of the step, if there are any."""
    analysis = spec.analysis
    names = [n for n in analysis.input_names.values() if n in server.inputs & spec.arguments]
    if not names:
        return []
    b = Builder(analysis.half.jaxpr)
    arguments = [b.input(analysis.inputs[n].aval) for n in names]
    # copied, because the server reuses receive buffers
    outs = [b.call(jnp.copy, v)[0] for v in arguments]

    grads = tuple(argument(n, spec.trainers) for n in names)
    for grad in grads:
        claim(claimed, grad.name, f"an argument of the step, {grad.leaf}")
    in_names = tuple(g.name for g in grads)
    return [OptimizeBlock("arguments", OPTIMIZE, b.build(outs), in_names, tuple(names), 0, grads)]


def _write_shared(
    rounds: ExchangeRounds, server: ServerSpec
) -> tuple[dict[int, LevelProgram], dict[Var, str]]:
    """Write the shared values that a server computes.

    Returns programs by level, and the names of values that units and later levels read.
    """
    analysis, level_of = rounds.analysis, rounds.shared
    writers: dict[int, LevelWriter] = {}

    def at(level: int) -> LevelWriter:
        if level not in writers:
            computes: Callable[[Var], bool] = lambda v: (
                v in rounds.producers and level_of(v) == level
            )
            writers[level] = LevelWriter(rounds, computes=computes)
        return writers[level]

    positions = set(values_at(rounds.producers, server.computed))
    eqns = values_at(rounds.eqns, sorted(positions))
    read = {v for u in server.units for v in u.shared}
    for eqn in eqns:
        level = level_of(eqn.outvars[0])
        read.update(a for a in eqn.invars if isinstance(a, Var) and level_of(a) < level)
    for eqn in eqns:
        if rounds.depends(eqn.outvars[0]):
            w = at(level_of(eqn.outvars[0])).writer
            operands = [w.read_full(a) for a in eqn.invars]
            outputs = w.b.copy(eqn, operands, avals(eqn.outvars))
            w.shared.update(zip(eqn.outvars, outputs, strict=True))
    for name in (n for n in analysis.input_names.values() if n in server.shared_state):
        out = analysis.outputs[name]
        program = at(level_of(out))
        program.outs[name] = program.writer.read_full(out)
    names: dict[Var, str] = {}
    computed = [v for eqn in eqns for v in eqn.outvars]
    for var in computed:
        if var in read and rounds.depends(var):
            names[var] = f"{'reduced' if level_of(var) else 'lr_sched'}/{len(names)}"
            program = writers[level_of(var)]
            program.outs[names[var]] = program.writer.shared[var]
    return {level: w.program() for level, w in writers.items()}, names


def _joins(
    spec: UpdateSpec, server: ServerSpec, endpoint: str
) -> dict[int, list[CrossServerValue]]:
    """Return the values whose parts a server combines or exchanges, by level."""
    found: dict[int, list[CrossServerValue]] = {}
    for var, crossing in spec.rounds.crossings.items():
        if endpoint not in spec.over[var]:
            continue
        if not spec.stays(crossing) or (
            var in server.crossings and len(server.parts_of(crossing)) > 1
        ):
            found.setdefault(crossing.level, []).append(crossing)
    return found


def _join(
    spec: UpdateSpec, server: ServerSpec, crossings: Sequence[CrossServerValue]
) -> OptimizeBlock:
    """Write the block at the end of a level: parts are combined and exchanged with other
    servers."""
    b = Builder(spec.analysis.half.jaxpr)
    in_names: list[str] = []
    joined: list[Atom] = []
    for c in crossings:
        names = server.parts_of(c)
        in_names += names
        parts: list[Atom] = [b.input(c.part) for _ in names]
        if not parts:
            joined += b.call(identity_of(c.op, c.part.shape, c.part.dtype))
        else:
            joined += parts if len(parts) == 1 else b.call(_combined(c.op), *parts)
    outs: list[Atom] = []
    for c, part in zip(crossings, joined, strict=True):
        if spec.stays(c):
            outs.append(part)
        else:
            owners, over = spec.owners[c.home], spec.over[c.var]
            outs += b.bind(all_reduce_p, part, op=c.op, name=c.name, owners=owners, over=over)
    out_names = tuple(c.name for c in crossings)
    return OptimizeBlock(
        "all_reduce", DIST, b.build(outs), tuple(in_names), out_names, level=crossings[0].level
    )


@functools.cache
def _combined(op: str) -> Callable[..., Any]:
    return lambda *parts: combine(op, parts)
