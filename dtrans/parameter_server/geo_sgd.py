"""GEO-SGD: trainers update their own parameters, and servers add up the changes.

A trainer runs the full step, with the optimizer, and then one `send` of its parameters. Servers
store their own copy of the parameters. `old` is the trainer's copy of the server's value:

    push   every n-th `send` computes d = (local - old) / trainers and sends d. The server computes
           w + d for each block, and the trainer sets old = old + d
    pull   a later `send` receives the server's value. This `send` returns local + (server - old),
           and sets old = server

So a trainer never waits, and it receives the changes of other trainers some steps later. With one
trainer, the server's parameters equal the trainer's. When a trainer closes, it pushes its last
changes.

Each trainer has its own optimizer state, and its own values of leaves without gradients (batch
statistics, counters).

If a leaf is an embedding table (the option `sparse`), a trainer stores only the rows that it looked
up, with their optimizer state. A step uses the rows of its batch. Pushes and pulls transfer rows
with their ids (`dtrans.parameter_server.tables.own_update`):

    trainer   `split_ids` sorts the row ids of the batch, and `prefetch` fetches the rows. The step,
              with the optimizer, runs on these rows. A `send` sends the changes
    pserver   w + d for the rows that were sent. For each trainer, the server records the rows that
              other trainers have changed since the trainer's last pull

Source: python/paddle/fluid/transpiler/geo_sgd_transpiler.py, and `GeoSgdCommunicator` in
paddle/fluid/operators/distributed/communicator.cc. Paddle's communicator stores `old` in its own
memory, outside of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dtrans._jax import JaxprEqn, Var
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import propagate
from dtrans.ir.program import DIST, RPC, Program
from dtrans.ir.selection import subset, values_at
from dtrans.ops import DELTA, geo_init_p, geo_send_p
from dtrans.parameter_server.options import Geo
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.plan import PServerOptions, PServerPlan, ServedUpdate
from dtrans.parameter_server.server_program import ServerProgramWriter
from dtrans.parameter_server.tables.choose import Tables
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.own_update import (
    choose_trainer_tables,
    empty_types,
    initial_state_rows,
    on_servers,
    write_update,
)
from dtrans.parameter_server.tables.touched_rows import mark_tables, resized
from dtrans.parameter_server.tables.trainer_rows import TableWriter, without_unused
from dtrans.parameter_server.trainer_program import (
    TrainerCommConfig,
    TrainerCommWriter,
    row_location,
    write_start,
)
from dtrans.rows.analysis import analyse
from dtrans.slicing.blocks import Block, Placement, Unit
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import ServerWork
from dtrans.step.forward_backward import write_trainer_half
from dtrans.step.halves import GRAD, DividedStep, Gradient, UpdateProgram, divide_step
from dtrans.step.observers import callers_of
from dtrans.step.startup import match_startup


EACH_TRAINER = "each trainer, with its own values"


def plan_geo_sgd(
    step: DividedStep,
    startup: Program,
    endpoints: Sequence[str],
    options: PServerOptions,
) -> PServerPlan:
    """Return the plan of `dtrans.pserver` with `mode=Geo(...)`.

    Servers only add changes, which works on any range of rows. So parameters can be cut into blocks
    for several servers, with any optimizer.

    Returns:
      A plan. Its trainer programs have the arguments of the step, (params, opt_state, *batch), and
      the results of the step. The trainers' startup programs return params and opt_state.

    Raises:
      ConfigError: a parameter is an integer, or a leaf in `sparse` cannot be a table.
      TraceError: `startup` does not return the state that the step reads.

    Source: `GeoSgdTranspiler` in Paddle's geo_sgd_transpiler.py.
    """
    mode, trainers = options.mode, options.trainers
    assert isinstance(mode, Geo)
    full_step, step = step, with_shared_leaves(step)
    adding = with_added_changes(step)
    analysis = analyse(adding.optimize, adding.optimized)
    startup = match_startup(step.program, startup)
    tables = choose_trainer_tables(full_step, startup, options.sparse)
    types = subset(step.program.inputs, step.optimized)
    placement = place(analysis, types, endpoints, options.placement, tables.buckets)
    placement = mark_tables(placement, tables.of)
    servers = ServerProgramWriter(
        adding,
        analyse_update(analysis, placement),
        startup,
        trainers,
        sync_mode=False,
        adapt=with_delta_names,
        tables={n: on_servers(t, analysis) for n, t in tables.of.items()},
        sized=lambda sizes: analyse_update(analysis, resized(placement, sizes)),
    )
    return PServerPlan(
        main=step.program,
        startup=startup,
        options=options,
        placement=placement,
        servers={ep: servers.programs(ep) for ep in endpoints},
        trainer_writer=GeoTrainerWriter(full_step, startup, placement, tables, trainers, mode),
        update=ServedUpdate(frozen=step.frozen),
        tables=tables,
        callback_notes=callers_of(full_step.observers, *[EACH_TRAINER] * 2),
    )


def with_shared_leaves(step: DividedStep) -> DividedStep:
    """Return a copy of the step; its field `optimized` has only parameters with a gradient.

    In GEO-SGD, servers add up the changes of these parameters, which all trainers share. Any other
    parameter, such as a counter, moves to the field `frozen`: each trainer keeps its own value.

    Raises:
      ConfigError: gradients change a parameter of an integer type.
    """
    gradients = dict.fromkeys(step.boundary.values(), 1)
    enters = propagate(step.program.inner.eqns, {}, gradients)
    outs = step.program.outvars
    chosen = tuple(n for n in step.optimized if isinstance(a := outs[n], Var) and enters.get(a))
    for n in chosen:
        dtype = step.program.outputs[n].dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ConfigError(
                f"{n} is {dtype}, but with dtrans.Geo servers add up changes of parameters, which "
                "must be floating-point; use another mode"
            )
    frozen = tuple(n for n in step.params if n not in chosen)
    return dataclasses.replace(step, optimized=chosen, frozen=frozen)


def with_added_changes(step: DividedStep) -> DividedStep:
    """Return the step with another update, which GEO-SGD's servers run: new = parameter + change.

    Trainers run the optimizer themselves, so this update has no optimizer state. Trainers send a
    change where other modes send a gradient. So the input for the change has the name of the
    parameter's gradient.
    """
    outs = step.program.outvars
    b = Builder(step.program.jaxpr)
    inputs: dict[Any, Var] = {}
    sums = []
    for leaf in step.optimized:
        inputs[Gradient(leaf)] = b.input(outs[leaf].aval)
        inputs[leaf] = b.input(outs[leaf].aval)
    for leaf in step.optimized:
        sums += b.call(jax.lax.add, inputs[leaf], inputs[Gradient(leaf)])
    half = UpdateProgram(b.build(sums), tuple(inputs), step.optimized)
    gradients = subset(outs, step.optimized)
    return dataclasses.replace(step, optimize=half, gradients=gradients, opt_state=())


def with_delta_names(work: ServerWork, units: Sequence[Unit]) -> ServerWork:
    """Rename a server's gradients to Paddle's names for changes: `params/w.block0.delta`.

    In GEO-SGD, trainers send changes of parameters instead of gradients. A printed plan then shows
    these names.

    Raises:
      ConfigError: a leaf has the name of a change.
    """
    names = {}
    for unit in units:
        for block in unit.blocks:
            names[block.gradient(0, 1)] = block.name + DELTA
            if block.name + DELTA in work.variables:
                raise ConfigError(
                    f"the step has a leaf named {block.name + DELTA}, the name that servers give "
                    f"to the change of {block.name}; rename the leaf"
                )
    updates = []
    for update in work.blocks:
        grads = []
        for g in update.grads:
            grads.append(dataclasses.replace(g, name=names[g.name], sent={0: names[g.name]}))
        in_names = tuple(names.get(n, n) for n in update.in_names)
        updates.append(dataclasses.replace(update, in_names=in_names, grads=tuple(grads)))
    return dataclasses.replace(work, blocks=tuple(updates))


@dataclasses.dataclass(frozen=True)
class GeoTrainerWriter:
    """Writer of the trainers' programs of a GEO-SGD plan.

    A program contains the full step with the optimizer, and then one `send` of the parameters.

    Attributes:
      step: the single-device step, divided into forward and backward, and the optimizer.
      init: the single-device init, which computes parameters and optimizer state.
      placement: the blocks of each leaf, and the server that stores each block.
      tables: embedding tables. A trainer stores only those rows of a table that it has looked up.
      trainers: the number of trainers.
      mode: the options of GEO-SGD.
    """

    step: DividedStep
    init: Program
    placement: Placement
    tables: Tables
    trainers: int
    mode: Geo
    runtime_split: ClassVar = True

    def program(self, trainer_id: int) -> Program:
        """Return the program of one trainer: the step, and a `send` of its parameters."""
        if self.tables.of:
            return self._with_tables(self.step, trainer_id)
        return self._without_tables(with_shared_leaves(self.step), trainer_id)

    def _without_tables(self, step: DividedStep, trainer_id: int) -> Program:
        """Return one trainer's program in a plan without tables."""
        source = step.program
        outs: dict[str, Any] = source.outvars
        b = Builder(source.jaxpr)
        b.invars += source.inner.invars
        for eqn, role in zip(source.eqns, source.roles, strict=True):
            b.role = role
            b.keep(eqn)
        outs |= self._send(b, subset(outs, step.optimized), trainer_id)
        program = Program.written(f"trainer {trainer_id}", b, source.args, source.out, outs)
        return source.rewritten(
            lambda other: self._without_tables(with_shared_leaves(divide_step(other)), trainer_id),
            result=program,
        )

    def _with_tables(self, step: DividedStep, trainer_id: int) -> Program:
        """Return one trainer's program in a plan with tables.

        The program is a step that reads and updates the batch's rows of the tables, and a `send`.

        Args:
          step: the step; its `optimized` contains every parameter that the update changes.
        """
        source, tables = step.program, self.tables
        empty = {n: Var(t) for n, t in empty_types(tables, source.inputs).items()}
        b = Builder(source.jaxpr)
        b.invars += [empty.get(n, v) for n, v in source.invars.items()]

        # Write forward and backward, which fill `gradients`.
        gradients: dict[str, Any] = {}
        rows, results = self._write_half(b, step, gradients, trainer_id)
        for n, gradient in gradients.items():
            if isinstance(gradient, Var):
                b.labels[gradient] = n + GRAD

        # Write the update, for rows of tables and for full leaves.
        state = {n: source.invars[n] for n in (*step.params, *step.opt_state) if n not in empty}
        new = write_update(b, step, rows.sizes, state | rows.rows, gradients)

        shared = with_shared_leaves(step).optimized
        full = {n: new[n] for n in shared if n not in tables.of}
        row_groups = {}
        for n, t in tables.of.items():
            row_groups[n] = [rows.uniq[n], *values_at(new, (n, *t.zero.state))]
        received = self._send(b, full, trainer_id, row_groups)
        outs = {**source.outvars, **results, **new, **received, **empty}
        without_unused(b, values_at(outs, source.out_names))
        program = Program.written(f"trainer {trainer_id}", b, source.args, source.out, outs)
        return source.rewritten(
            lambda other: self._with_tables(divide_step(other), trainer_id), result=program
        )

    def _write_half(
        self, b: Builder, step: DividedStep, gradients: dict[str, Any], trainer_id: int
    ) -> tuple[TableWriter, dict[str, Any]]:
        """Write forward and backward of a step that reads only looked-up rows of tables.

        Args:
          gradients: an empty dict; this method fills it with gradients, by leaf.

        Returns:
          The object that wrote the equations, and the results of the step by name.
        """
        source, tables = step.program, self.tables
        found = find_lookups(step, tables.names)
        assert not found.refused, found.refused
        table_vars = subset(source.invars, tables.of)
        locations = {n: self._row_location(n, trainer_id) for n in tables.of}
        state = {}
        for n, t in tables.of.items():
            state[n] = subset(source.invars, t.zero.state)
        writers: list[TableWriter] = []

        def writer(eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Any) -> TableWriter:
            new = TableWriter(b, source.jaxpr, found, table_vars, locations, eqns, roles, state)
            writers.append(new)
            return new

        results = write_trainer_half(b, step, step.results, gradients.__setitem__, writer)
        return writers[0], results

    def startup(self, trainer_id: int) -> Program:
        """Return the program that a trainer runs at the start of a job to get its first state.

        The program receives parameters from the servers. It computes all other arrays with the
        equations of the user's init. Tables begin without rows, and get rows when steps look them
        up.
        """
        step, startup = with_shared_leaves(self.step), self.init
        empty = empty_types(self.tables, step.program.inputs)
        local = [n for n in startup.out_names if n not in step.optimized and n not in empty]
        b, outs = write_start(startup, local)
        full = [n for n in step.optimized if n not in empty]
        comm = TrainerCommConfig(self.trainers, sync_mode=False)
        outs |= TrainerCommWriter(b, self.placement, trainer_id, comm).receive_initial(full)

        b.role = DIST
        for n, t in self.tables.of.items():
            names = (n, *t.zero.state)
            types = tuple(values_at(empty, names))
            # `geo_init` only stores the program `write`, which runs when a row is first looked up.
            write = initial_state_rows(startup, t.zero.state)
            args = startup.inner.invars if t.zero.state else ()
            location = self._row_location(n, trainer_id)
            tables = b.bind(geo_init_p, *args, **location, types=types, write=write)
            outs |= zip(names, tables, strict=True)
        outs |= self._send(b, subset(outs, full), trainer_id, starts=True)
        return Program.written(f"trainer {trainer_id} startup", b, startup.args, startup.out, outs)

    def _row_location(self, table: str, trainer_id: int) -> dict[str, Any]:
        """Return the equation parameters that name the server of each row of a table."""
        blocks = self.placement.blocks[table]
        names = tuple(x.name for x in blocks)
        return {**row_location(table, blocks), "names": names, **self._trainer(trainer_id)}

    def _trainer(self, trainer_id: int) -> dict[str, Any]:
        return {"trainer_id": trainer_id, "trainers": self.trainers, "sync_mode": False}

    def _send(
        self,
        b: Builder,
        params: Mapping[str, Any],
        trainer_id: int,
        row_groups: Mapping[str, Sequence[Any]] = {},
        starts: bool = False,
    ) -> dict[str, Any]:
        """Write one `send` of parameters; return the parameters that it outputs, by name.

        A `send` in GEO-SGD sends changes in some steps, and adds changes of other trainers in
        others. Its outputs are the trainer's parameters after these changes.

        Args:
          b: builder of the trainer's program.
          params: full parameters, by name.
          trainer_id: index of the trainer.
          row_groups: for each table a list: the ids of the looked-up rows, the rows' new values,
            and their new optimizer state.
          starts: True in the startup program. There the `send` only stores the parameters as `old`,
            the trainer's copy of the servers' values.
        """
        b.role = RPC
        rows: list[Any] = []
        tables = []
        for n, group in row_groups.items():
            rows += group
            tables.append((n, len(group) - 1))
        # Without tables, the parameter `tables` is left out, so that fingerprints of plans stay
        # equal.
        optional = {"tables": tuple(tables)} if tables else {}
        blocks = values_at(self.placement.blocks, params)
        new = b.bind(
            geo_send_p,
            *params.values(),
            *rows,
            epmap=per_block(blocks, lambda x: x.endpoint),
            names=per_block(blocks, lambda x: x.name),
            sections=per_block(blocks, lambda x: x.rows),
            push_every=0 if starts else self.mode.push_every,
            block_on_pull=self.mode.block_on_pull,
            **optional,
            **self._trainer(trainer_id),
        )
        b.labels.update(zip(new, params, strict=True))
        return dict(zip(params, new, strict=True))


def per_block(
    leaves: Sequence[Sequence[Block]], value: Callable[[Block], Any]
) -> tuple[tuple[Any, ...], ...]:
    """Return `value(block)` of each block, in one tuple for each leaf: ((v0, v1), (v2,))."""
    return tuple(tuple(map(value, blocks)) for blocks in leaves)
