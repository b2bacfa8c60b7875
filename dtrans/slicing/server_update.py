"""Writer of the programs (Paddle's optimize blocks) that one server runs in a step.

Servers exchange some values, such as norms, during an update. So a server runs one set of programs
before the first exchange (level 0), and one after each exchange (`dtrans.slicing.rounds`):

    level 0    lr_sched           counts and schedules: values that do not depend on rows
               params/w.block0    equations that need no cross-server value; terms of reductions
               all_reduce         combines the terms on this server, then reduces over servers
    level 1    reduced            shared values that depend on these reductions: norms, factors
               params/w.block0    equations that read them
               ...

`dtrans.slicing.server_spec` determines the values that each server computes, and
`dtrans.slicing.unit_program` writes the programs of each block.
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
from dtrans.ir.dataflow import avals, outputs_of, variables
from dtrans.ir.program import DIST, LR_SCHED, OPTIMIZE
from dtrans.ir.selection import values_at
from dtrans.ops import OptimizeBlock, WireType, all_reduce_p, combine, identity_of
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
    """Array that a server stores, such as rows of a parameter or of optimizer state.

    The attributes say how the server computes the initial value from an output of the user's init
    function.

    Attributes:
      init_output: name of the output of init, such as `params/w`.
      block: index of the block to which the variable belongs.
      part: rows of this output that the server stores; None for all rows.
      extra_name: for an array that only servers have, such as a backup, the name that all its rows
        together would have: `params/w.trainer_1_bak`. Empty for an array of the user.
      zeros: True if the initial value is zeros; then `init_output` gives only the shape and dtype.
      buckets: the buckets of the rows, if rows are assigned to buckets.
      wire: for a compressed copy of a parameter, which servers send to trainers, the encoding; None
        for other arrays.
    """

    init_output: str
    block: int = 0
    part: Slice | None = None
    extra_name: str = ""
    zeros: bool = False
    buckets: RowBuckets | None = None
    wire: WireType | None = None

    @property
    def origin(self) -> str:
        """Name of the full array, without the suffix for the server's rows."""
        return self.extra_name or self.init_output

    def stored_type(self, aval: Any) -> Any:
        """Return the shape and dtype in which a server stores this variable.

        Args:
          aval: the type of the full array.
        """
        stored = aval if self.part is None else self.part.type_in(aval)
        return stored if self.wire is None else self.wire.type_of(stored)


@dataclasses.dataclass(frozen=True)
class ServerWork:
    """Programs that one server runs in a step, and the arrays that it stores.

    Attributes:
      blocks: optimize blocks in the order in which they run.
      variables: description of each stored array, by name.
      compressed_copies: name of a parameter's block -> name of its compressed copy, which trainers
        receive instead.
    """

    blocks: tuple[OptimizeBlock, ...]
    variables: Mapping[str, ServerVariable]
    compressed_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def grads(self) -> dict[str, int]:
        """Name of each gradient -> position (from 1) of the program that reads it."""
        found: dict[str, int] = {}
        for i, block in enumerate(self.blocks, 1):
            found |= dict.fromkeys((g.name for g in block.grads), i)
        return found


def write_server(spec: UpdateSpec, endpoint: str) -> ServerWork:
    """Write the programs (Paddle's optimize blocks) that one server runs in a step.

    Args:
      spec: the division of the update among servers.
      endpoint: the address of the server.

    Raises:
      ConfigError: a parameter or state array has the name of a step argument, or a name that this
        function gives to a computed value.
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
        if len(parts) == 1 and spec.is_local(crossing):
            return parts[0]  # the only part is the full value
        return crossing.name

    blocks = _take_arguments(spec, server, claimed)
    levels = {*shared, *joins}.union(*(unit.levels for unit in server.units))
    for level in sorted(levels):
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
    """Write the update of a server into another program.

    Use it for an update that runs without a server, such as in a pipeline, or in a trainer that
    updates its own table rows.

    Args:
      b: builder of the program.
      work: programs of the server.
      values: state and gradients, by name.

    Returns:
      The new state, by name.
    """
    values, new = dict(values), dict[str, Atom]()
    for block in work.blocks:
        b.role = block.role if block.role == LR_SCHED else OPTIMIZE
        outputs = b.inline(block.jaxpr, *values_at(values, block.in_names))
        for name, value in zip(block.out_names, outputs, strict=True):
            # later blocks still read the old state, so new state does not go into `values`
            target = new if name in work.variables else values
            target[name] = value
    return new


def _variables(spec: UpdateSpec, server: ServerSpec) -> dict[str, ServerVariable]:
    """Return the arrays that a server stores: rows of parameters and of state, and full arrays."""
    variables: dict[str, ServerVariable] = {}
    analysis = spec.analysis
    for u in server.units:
        leaves = {b.leaf for b in u.unit.blocks}
        for base, name in u.names.items():
            row = RowAxis(base, 0) if base in leaves else analysis.layout(analysis.inputs[base])
            variables[name] = _rows_of(base, u.unit.blocks[0].index, u.unit.span, row)
    constant = server.inputs - set(analysis.outputs) - spec.arguments
    for name in analysis.input_names.values():
        if name in server.shared_state | constant:
            variables[name] = ServerVariable(name)
    return variables


def _rows_of(name: str, block: int, span: RowSet | None, row: Any) -> ServerVariable:
    """Describe the array that a server stores for some rows of a parameter or of its state.

    Args:
      name: name of the full array.
      block: index of the block.
      span: the rows of the parameter; None for all rows.
      row: layout of the full array: the dimension that has the parameter's rows.
    """
    if span is None or not isinstance(row, RowAxis):
        return ServerVariable(name, block)
    if isinstance(span, RowBuckets):
        part = Slice(row.axis, 0, span.rows * row.width)
        return ServerVariable(name, block, part, buckets=span.along(row))
    return ServerVariable(name, block, span.of(row))


def _take_arguments(
    spec: UpdateSpec, server: ServerSpec, claimed: ChainMap[str, str]
) -> list[OptimizeBlock]:
    """Return the program that receives step arguments from trainers, in a list.

    The list is empty if the server reads no argument.
    """
    analysis = spec.analysis
    names = [n for n in analysis.input_names.values() if n in server.inputs & spec.arguments]
    if not names:
        return []
    b = Builder(analysis.half.jaxpr)
    outs: list[Atom] = []
    for name in names:
        # a copy, because the server reuses its receive buffers
        outs += b.call(jnp.copy, b.input(analysis.inputs[name].aval))

    grads = tuple(argument(n, spec.trainers) for n in names)
    for grad in grads:
        claim(claimed, grad.name, f"step argument {grad.leaf}")
    in_names = tuple(g.name for g in grads)
    return [OptimizeBlock("arguments", OPTIMIZE, b.build(outs), in_names, tuple(names), 0, grads)]


def _write_shared(
    rounds: ExchangeRounds, server: ServerSpec
) -> tuple[dict[int, LevelProgram], dict[Var, str]]:
    """Write the programs for values that belong to no parameter, such as a learning rate.

    Returns:
      Two dicts. The first contains the programs, by the number of exchanges before a program. The
      second contains the names of the shared values that other programs read, by value.
    """
    analysis, level_of = rounds.analysis, rounds.level_everywhere
    writers: dict[int, LevelWriter] = {}

    def at(level: int) -> LevelWriter:
        def computes(var: Var) -> bool:
            return var in rounds.producers and level_of(var) == level

        if level not in writers:
            writers[level] = LevelWriter(rounds, computes=computes)
        return writers[level]

    positions = set(values_at(rounds.producers, server.computed))
    eqns = values_at(rounds.eqns, sorted(positions))
    read = set().union(*(unit.shared for unit in server.units))
    for eqn in eqns:
        level = level_of(eqn.outvars[0])
        for v in variables(eqn.invars):
            if level_of(v) < level:
                read.add(v)
    for eqn in eqns:
        if rounds.depends(eqn.outvars[0]):
            w = at(level_of(eqn.outvars[0])).writer
            operands = list(map(w.read_full, eqn.invars))
            outputs = w.b.copy(eqn, operands, avals(eqn.outvars))
            w.shared.update(zip(eqn.outvars, outputs, strict=True))
    for name in analysis.input_names.values():
        if name not in server.shared_state:
            continue
        out = analysis.outputs[name]
        program = at(level_of(out))
        program.outs[name] = program.writer.read_full(out)
    names: dict[Var, str] = {}
    computed = outputs_of(eqns)
    for var in computed:
        if var in read and rounds.depends(var):
            names[var] = f"{'reduced' if level_of(var) else 'lr_sched'}/{len(names)}"
            program = writers[level_of(var)]
            program.outs[names[var]] = program.writer.shared[var]
    return {level: w.program() for level, w in writers.items()}, names


def _joins(
    spec: UpdateSpec, server: ServerSpec, endpoint: str
) -> dict[int, list[CrossServerValue]]:
    """Return the values, such as norms, that this server reduces in each exchange.

    The keys are the numbers of the exchanges.
    """
    found: dict[int, list[CrossServerValue]] = {}
    for var, crossing in spec.rounds.crossings.items():
        if endpoint not in spec.participants[var]:
            continue
        combines = var in server.crossings and len(server.parts_of(crossing)) > 1
        if combines or not spec.is_local(crossing):
            found.setdefault(crossing.level, []).append(crossing)
    return found


def _join(
    spec: UpdateSpec, server: ServerSpec, crossings: Sequence[CrossServerValue]
) -> OptimizeBlock:
    """Write one exchange: add up values, such as norms, on this server, then over all servers."""
    b = Builder(spec.analysis.half.jaxpr)
    in_names: list[str] = []
    joined: list[Atom] = []
    for c in crossings:
        names = server.parts_of(c)
        in_names += names
        parts: list[Atom] = [b.input(c.term_type) for _ in names]
        if not parts:  # this server only reads the value
            joined += b.call(identity_of(c.op, c.term_type.shape, c.term_type.dtype))
        elif len(parts) == 1:
            joined += parts
        else:
            joined += b.call(_combined(c.op), *parts)
    outs: list[Atom] = []
    for c, part in zip(crossings, joined, strict=True):
        if spec.is_local(c):
            outs.append(part)
        else:
            owners, over = spec.owners[c.home], spec.participants[c.var]
            outs += b.bind(all_reduce_p, part, op=c.op, name=c.name, owners=owners, over=over)
    out_names = tuple(c.name for c in crossings)
    return OptimizeBlock(
        "all_reduce", DIST, b.build(outs), tuple(in_names), out_names, level=crossings[0].level
    )


@functools.cache
def _combined(op: str) -> Callable[..., Any]:
    return lambda *parts: combine(op, parts)
