"""Writer of the servers' programs.

Each server has two programs. Its startup program computes the server's initial arrays. Its main
program contains one `listen_and_serv` equation, which receives gradients and runs updates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, ShapedArray, Var
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, LR_SCHED, RPC, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.ir.selection import subset, values_at
from dtrans.ops import RowsProgram, encoded, init_on_use_p, listen_and_serv_p
from dtrans.parameter_server.plan import ServerPrograms
from dtrans.parameter_server.tables.choose import Table
from dtrans.parameter_server.tables.touched_rows import ServedTables, TableBlock
from dtrans.rows.layout import RowAxis
from dtrans.rows.row_buckets import BucketRows, RowBuckets, numbers_at
from dtrans.rows.slices import Slice
from dtrans.rows.writer import RowSet
from dtrans.slicing.blocks import Block, Unit
from dtrans.slicing.partial_init import makes_rows, write_parts, write_rows
from dtrans.slicing.server_spec import UpdateSpec
from dtrans.slicing.server_update import ServerVariable, ServerWork, write_server
from dtrans.step.halves import DividedStep


class ServerProgramWriter:
    """Writer of the server programs of one plan.

    Args:
      step: the step, divided into forward and backward, and the optimizer's update. Servers run the
        update.
      spec: analysis of the update, and the server of each block (a range of rows of a parameter).
      startup: the user's init. Its outputs have the names of the step's parameters and state.
      trainers: the number of trainers.
      sync_mode: True if an update waits for the gradients of all trainers.
      on_trainer_exit: as in `dtrans.pserver`.
      adapt: function that rewrites the updates of a server, for example to add delay compensation.
      tables: embedding tables by name. Trainers request single rows of a table.
      sized: function that returns `spec` for other numbers of rows in blocks of tables. A server
        calls it when a table grows, because trainers look up new rows.
    """

    def __init__(
        self,
        step: DividedStep,
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
        main, startup = self.main(endpoint, work), self.init(endpoint, work)
        return ServerPrograms(main, startup, subset(work.variables, main.in_names))

    def work(self, endpoint: str) -> ServerWork:
        """Return the updates that one server runs, and the arrays that it stores."""
        work = write_server(self.spec, endpoint)
        if self.adapt is None:
            return work
        return self.adapt(work, self.spec.placement.units[endpoint])

    def main(self, endpoint: str, work: ServerWork) -> Program:
        """Return a server's main program: one `listen_and_serv` equation on its arrays.

        The equation names the arrays that trainers can request. These are parameters, and the
        optimizer state that the trainers' forward pass reads.

        Args:
          endpoint: the server's endpoint.
          work: the updates that the server runs, from `work`.
        """
        param_names = []
        for block in self._blocks(endpoint):
            if not block.is_table:
                param_names.append(work.compressed_copies.get(block.name, block.name))
        # Trainers also receive the optimizer state that their forward pass reads.
        for n in self.spec.requested:
            if self.spec.holder_of(n) == endpoint:
                param_names.append(n)
        lr_blocks = [i for i, block in enumerate(work.blocks, 1) if block.role == LR_SCHED]
        spec = self._state_spec(work)

        b = Builder(self.step.program.jaxpr)
        b.role = RPC
        state_vars = [b.input(self._type(work.variables[n])) for n in spec.names]
        final = b.bind(
            listen_and_serv_p,
            *state_vars,
            endpoint=endpoint,
            Fanin=self.trainers,
            sync_mode=self.sync_mode,
            on_trainer_exit=self.on_trainer_exit,
            grad_to_block_id=tuple(f"{n}:{block}" for n, block in work.grads.items()),
            lr_decay_block_id=lr_blocks[0] if lr_blocks else -1,
            optimize_blocks=work.blocks,
            state_names=spec.names,
            param_names=tuple(param_names),
            **self._tables(endpoint, work),
        )
        return Program(f"pserver {endpoint}", b.build(final), (spec,), spec, tuple(b.roles))

    def _blocks(self, endpoint: str) -> list[Block]:
        """Return the blocks on a server; blocks that are updated together follow each other."""
        blocks: list[Block] = []
        for unit in self.spec.placement.units[endpoint]:
            blocks += unit.blocks
        return blocks

    def _type(self, variable: ServerVariable) -> Any:
        """Return the type of a server's array."""
        return variable.stored_type(self.types[variable.init_output])

    def _state_spec(self, work: ServerWork) -> TreeSpec:
        """Return the structure of a server's state: a dict of its arrays."""
        return TreeSpec.from_tree({n: self._type(x) for n, x in work.variables.items()})

    def _tables(self, endpoint: str, work: ServerWork) -> dict[str, Any]:
        """Return the equation parameter `tables` of `listen_and_serv`: this server's tables.

        The result is empty if the plan has no tables.
        """
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
        sent = {}
        for update in work.blocks:
            for g in update.grads:
                sent[g.leaf, g.index] = g.sent
        found = {}
        for b in self._blocks(endpoint):
            if b.is_table:
                found[b.name] = self._table_block(b, work, sent[b.leaf, b.index])
        return found

    def _table_block(self, b: Block, work: ServerWork, gradients: Mapping[int, str]) -> TableBlock:
        table = self.tables[b.leaf]
        assert b.span is not None
        # arrays that the server adds for the block, such as the mean squares of DC-ASGD
        beside = []
        for n, x in work.variables.items():
            if x.extra_name and (x.init_output, x.block) == (b.leaf, b.index):
                beside.append(n)
        initial_values = None
        if table.zero.initial_values is not None:
            initial_values = {b.named(n): number for n, number in table.zero.initial_values.items()}
            initial_values |= dict.fromkeys(beside, 0)
        # The user's limit is for the full table. The limit of a block is proportional to its rows.
        limit = table.limit and -(-table.limit * b.rows // table.lookups.rows)
        return TableBlock(
            b.leaf,
            b.name,
            b.span,
            (b.name, *map(b.named, table.zero.state), *beside),
            gradients,
            table.updates_all,
            table.changes_unread_rows,
            initial_values,
            limit,
            leaf_moves=b.leaf in table.zero.changes,
            on_trainers=table.on_trainers,
            staleness=table.staleness,
            row_filter=table.row_filter,
        )

    def init(self, endpoint: str, work: ServerWork) -> Program:
        """Return a server's startup program, which computes the initial rows on this server.

        A table begins empty if an update changes only the rows that trainers look up. The server
        then initialises a row at the row's first lookup, and rows that no trainer needs use no
        memory.

        Raises:
          ConfigError: a table has the option `admit_count` or `admit_probability`, but the user's
            init does not compute the table's rows independently of each other.
        """
        variables, init_outs = work.variables, self.startup.outvars
        spec = self._state_spec(work)
        b = Builder(self.startup.jaxpr)
        b.invars += self.startup.inner.invars
        b.role = FORWARD

        found: dict[str, Atom] = {}
        for table in self._table_blocks(endpoint, work).values():
            if self._inits_on_use(table, variables):
                types = tuple(self._type(variables[n]) for n in table.arrays)
                write = RowsProgram(functools.partial(self._rows, table, variables))
                rows = b.bind(init_on_use_p, *b.invars, table=table.name, types=types, write=write)
                found |= zip(table.arrays, rows, strict=True)
            elif table.row_filter is not None:
                raise ConfigError(
                    f"sparse: {table.leaf} cannot have {table.row_filter}, since a server cannot "
                    f"compute single rows of the initial {', '.join(table.arrays)}, and so stores "
                    f"all rows from the start; leave {table.row_filter.option} out, or draw each "
                    "row independently in init"
                )

        names = [n for n in spec.names if n not in found]
        parts = [(init_outs[variables[n].init_output], _find_slice(variables[n])) for n in names]
        for n, value in zip(names, write_parts(b, self.startup.jaxpr, parts), strict=True):
            found[n] = value
            if variables[n].zeros:
                (found[n],) = b.call(jnp.zeros_like, value)
            if (wire := variables[n].wire) is not None:
                (found[n],) = b.call(encoded(wire), value)
        for name, value in found.items():
            if variables[name].part is not None and isinstance(value, Var):
                b.labels.setdefault(value, name)
        return Program(
            f"pserver {endpoint} startup",
            b.build(values_at(found, spec.names)),
            self.startup.args,
            spec,
            tuple(b.roles),
            b.labels,
        )

    def _inits_on_use(self, table: TableBlock, variables: Mapping[str, ServerVariable]) -> bool:
        """Return True if a server may initialise each row of a table at the row's first lookup."""
        if table.updates_all or any(variables[n].zeros for n in table.arrays):
            return False
        for n in table.arrays:
            part, value = variables[n].part, self.startup.outvars[variables[n].init_output]
            if part is None or not makes_rows(self.startup.jaxpr, value, part.axis):
                return False
        return True

    def _rows(
        self, table: TableBlock, variables: Mapping[str, ServerVariable], count: int
    ) -> ClosedJaxpr:
        """Return a program that computes the initial values of `count` table rows from their ids.

        A server runs this program when trainers look up rows for the first time.
        """
        b = Builder(self.startup.jaxpr)
        ids = b.input(ShapedArray((count,), jnp.int32))
        b.invars += self.startup.inner.invars
        (leaf_ids,) = b.call(_leaf_ids_of(table.span), ids)
        assert isinstance(leaf_ids, Var)
        wanted = []
        for n in table.arrays:
            part = variables[n].part
            if part is not None:
                wanted.append((self.startup.outvars[variables[n].init_output], part.axis))
        return eliminate_dead(b.build(write_rows(b, self.startup.jaxpr, wanted, leaf_ids)))


def _find_slice(x: ServerVariable) -> Slice | None:
    """Return the slice of an initial array that a server stores; None for the full array."""
    if x.buckets is None or x.part is None:
        return x.part
    return BucketRows(x.buckets).of(RowAxis(x.init_output, x.part.axis))


@functools.cache
def _leaf_ids_of(rows: RowSet) -> Callable[[jax.Array], jax.Array]:
    """Return a function that maps row indices within a block to row indices within the full table.

    For a block with the rows 100 to 199, the function maps 5 to 105.
    """
    if isinstance(rows, RowBuckets):
        return numbers_at(rows)
    return lambda ids: ids + rows.start
