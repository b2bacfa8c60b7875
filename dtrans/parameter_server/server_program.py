"""The programs of parameter servers: what each serves, and what makes its initial values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, ShapedArray, Var
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, LR_SCHED, RPC, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.ops import RowsProgram, init_on_use_p, listen_and_serv_p
from dtrans.parameter_server.plan import ServerPrograms
from dtrans.parameter_server.tables.choose import Table
from dtrans.parameter_server.tables.touched_rows import ServedTables, TableBlock
from dtrans.rows.layout import RowAxis
from dtrans.rows.row_buckets import BucketRows, RowBuckets, numbers_at
from dtrans.rows.slices import Slice
from dtrans.rows.writer import RowSet
from dtrans.slicing.blocks import Unit
from dtrans.slicing.partial_init import makes_rows, write_parts, write_rows
from dtrans.slicing.server_spec import UpdateSpec
from dtrans.slicing.server_update import ServerVariable, ServerWork, write_server
from dtrans.step.cut import Cut


class ServerProgramWriter:
    """Writer of the server programs of one plan.

    Args:
      step: the step; servers run its optimize half.
      spec: its analysis, divided among servers.
      startup: the init, with names as in the step.
      trainers, sync_mode, on_trainer_exit: those of the plan.
      adapt: changes a server's work, such as delay compensation; None for none.
      tables: leaves whose rows trainers look up.
      sized: returns the same analysis with other numbers of rows in blocks of tables.
    """

    def __init__(
        self,
        step: Cut,
        spec: UpdateSpec,
        startup: Program,
        trainers: int,
        sync_mode: bool,
        on_trainer_exit: str = "drop",
        adapt: Callable[[ServerWork, Sequence[Unit]], ServerWork] | None = None,
        tables: Mapping[str, Table] | None = None,
        sized: Callable[[Mapping[str, int]], UpdateSpec] | None = None,
    ) -> None:
        self.tables, self.sized = tables or {}, sized
        self.on_trainer_exit = on_trainer_exit
        self.adapt = adapt
        self.step = step
        self.spec = spec
        self.startup = startup
        self.trainers = trainers
        self.sync_mode = sync_mode
        self.types = step.program.inputs

    def programs(self, endpoint: str) -> ServerPrograms:
        """Return the main and startup program of one server."""
        work = self.work(endpoint)
        main = self.main(endpoint, work)
        return ServerPrograms(
            main, self.init(endpoint, work), {n: work.variables[n] for n in main.in_names}
        )

    def work(self, endpoint: str) -> ServerWork:
        """Return one server's updates and arrays."""
        work = write_server(self.spec, endpoint)
        return work if self.adapt is None else self.adapt(work, self.spec.placement.units[endpoint])

    def main(self, endpoint: str, work: ServerWork) -> Program:
        """Return the program that serves."""
        units = self.spec.placement.units[endpoint]
        asked = [n for n in self.spec.requested if self.spec.holder_of(n) == endpoint]
        to_block = tuple(f"{n}:{block}" for n, block in work.grads.items())
        spec = TreeSpec.from_tree(
            {n: held.cut(self.types[held.of]) for n, held in work.variables.items()}
        )
        b = Builder(self.step.program.jaxpr)
        b.role = RPC
        state_vars = [
            b.input(work.variables[n].cut(self.types[work.variables[n].of])) for n in spec.names
        ]
        final = b.bind(
            listen_and_serv_p,
            *state_vars,
            endpoint=endpoint,
            Fanin=self.trainers,
            sync_mode=self.sync_mode,
            on_trainer_exit=self.on_trainer_exit,
            grad_to_block_id=to_block,
            lr_decay_block_id=next(
                (i for i, x in enumerate(work.blocks, 1) if x.role == LR_SCHED), -1
            ),
            optimize_blocks=work.blocks,
            state_names=spec.names,
            param_names=(*(x.name for u in units for x in u.blocks if not x.is_table), *asked),
            **self._tables(endpoint, work),
        )
        return Program(f"pserver {endpoint}", b.build(final), (spec,), spec, tuple(b.roles))

    def _tables(self, endpoint: str, work: ServerWork) -> dict[str, Any]:
        """Return the `tables` parameter of a server's equation; empty without tables."""
        if not self.tables or self.sized is None:
            return {}
        sized = self.sized

        def of_sizes(sizes: Mapping[str, int]) -> JaxprEqn:
            again = ServerProgramWriter(
                self.step,
                sized(sizes),
                self.startup,
                self.trainers,
                self.sync_mode,
                self.on_trainer_exit,
                self.adapt,
            )
            (eqn,) = again.main(endpoint, again.work(endpoint)).eqns
            return eqn.replace(params={**eqn.params, "tables": ServedTables({}, of_sizes)})

        return {"tables": ServedTables(self._table_blocks(endpoint, work), of_sizes)}

    def _table_blocks(self, endpoint: str, work: ServerWork) -> dict[str, TableBlock]:
        """Return a server's blocks of tables, by name."""
        served, held = {}, work.variables
        sent = {(g.leaf, g.index): g.sent for block in work.blocks for g in block.grads}
        for b in (b for u in self.spec.placement.units[endpoint] for b in u.blocks if b.is_table):
            table = self.tables[b.leaf]
            assert b.span is not None
            beside = [
                n for n, x in held.items() if x.beside and (x.of, x.block) == (b.leaf, b.index)
            ]
            rows = (b.name, *map(b.named, table.zero.state), *beside)
            rests = table.zero.rests
            if rests is not None:
                rests = {
                    **{b.named(n): number for n, number in rests.items()},
                    **dict.fromkeys(beside, 0),
                }
            served[b.name] = TableBlock(
                b.leaf,
                b.name,
                b.span,
                rows,
                sent[b.leaf, b.index],
                table.whole,
                table.catches_up,
                rests,
                table.limit and -(-table.limit * b.rows // table.lookups.rows),
                leaf_moves=b.leaf in table.zero.moves,
                kept=table.kept,
                staleness=table.staleness,
            )
        return served

    def init(self, endpoint: str, work: ServerWork) -> Program:
        """Return the program of the server's initial values: its rows of the single-device init.

        Rows of a table whose update touches only some rows are initialised at their first use.
        """
        inner, held = self.startup.inner, work.variables
        made = self.startup.outvars
        spec = TreeSpec.from_tree({n: x.cut(self.types[x.of]) for n, x in held.items()})
        b = Builder(self.startup.jaxpr)
        b.invars += inner.invars
        b.role = FORWARD
        found: dict[str, Atom] = {}
        for table in self._table_blocks(endpoint, work).values():
            if self._can_be_new(table, held):
                types = tuple(held[n].cut(self.types[held[n].of]) for n in table.held)
                write = RowsProgram(functools.partial(self._rows, table, held))
                rows = b.bind(
                    init_on_use_p, *inner.invars, table=table.name, types=types, write=write
                )
                found |= zip(table.held, rows, strict=True)
        names = [n for n in spec.names if n not in found]
        outs = write_parts(
            b, self.startup.jaxpr, [(made[held[n].of], _part(held[n])) for n in names]
        )
        found |= {
            n: b.call(jnp.zeros_like, v)[0] if held[n].zeros else v
            for n, v in zip(names, outs, strict=True)
        }
        for name, value in found.items():
            if held[name].part is not None and isinstance(value, Var):
                b.labels.setdefault(value, name)
        outs = [found[n] for n in spec.names]
        return Program(
            f"pserver {endpoint} startup",
            b.build(outs),
            self.startup.args,
            spec,
            tuple(b.roles),
            b.labels,
        )

    def _can_be_new(self, table: TableBlock, held: Mapping[str, ServerVariable]) -> bool:
        """Return True if a server may initialise rows of a block one by one."""
        if table.whole or any(held[n].zeros for n in table.held):
            return False
        parts = [(self.startup.outvars[held[n].of], held[n].part) for n in table.held]
        return all(x is not None and makes_rows(self.startup.jaxpr, v, x.axis) for v, x in parts)

    def _rows(
        self, table: TableBlock, held: Mapping[str, ServerVariable], count: int
    ) -> ClosedJaxpr:
        """Return the program of `count` initial rows of a block, from their numbers."""
        made = self.startup.outvars
        b = Builder(self.startup.jaxpr)
        numbers = b.input(ShapedArray((count,), jnp.int32))
        b.invars += self.startup.inner.invars
        (of_all,) = b.call(_numbers_of(table.span), numbers)
        assert isinstance(of_all, Var)
        wanted = [(made[held[n].of], x.axis) for n in table.held if (x := held[n].part) is not None]
        return eliminate_dead(b.build(write_rows(b, self.startup.jaxpr, wanted, of_all)))


def _part(x: ServerVariable) -> Slice | None:
    """Return a variable's rows of the array that it starts as; None for all of it."""
    if x.buckets is None or x.part is None:
        return x.part
    return BucketRows(x.buckets).of(RowAxis(x.of, x.part.axis))


@functools.cache
def _numbers_of(rows: RowSet) -> Callable[[jax.Array], jax.Array]:
    """Return a function from positions in a block to row numbers of the leaf."""
    return numbers_at(rows) if isinstance(rows, RowBuckets) else lambda places: places + rows.start
