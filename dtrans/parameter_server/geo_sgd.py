"""GEO-SGD: trainers train by themselves, and servers add up what has changed.

    trainer   the whole step, optimizer included; then one `send` of all its parameters. Every n-th time that gives
              d = (local - old) / trainers to the servers, and old + d is the new old
    pserver   w + d, for each block
    trainer   what has come back is in the results of a later `send`: local + (server - old), and the server's is the
              new old

So trainers wait for nothing: what is far away is only a little older. With one trainer, the
server's parameters are its own. What a trainer has changed since it pushed last is pushed when it
closes.

The optimizer's state is each trainer's own, and so is what no gradient enters (batch statistics,
counters).

Of a table a trainer keeps the rows that it has looked up, with their state; a step is given those
of its batch. Rows are pushed and pulled, with their numbers
(`dtrans.parameter_server.tables.own_update`):

    trainer   `split_ids`, `prefetch`, the step on these rows, optimizer included, and `send` of parameters and rows
    pserver   w + d for the rows that were sent; it notes which rows each trainer has that others have changed

Source: python/paddle/fluid/transpiler/geo_sgd_transpiler.py, and `GeoSgdCommunicator` in
paddle/fluid/operators/distributed/communicator.cc, which does the same beside the program, in its
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dtrans._jax import JaxprEqn, Var
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import propagate
from dtrans.ir.program import DIST, RPC, Program
from dtrans.ops import DELTA, geo_init_p, geo_send_p
from dtrans.parameter_server.options import Geo
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.plan import PServerOptions, PServerPlan, ServedUpdate
from dtrans.parameter_server.server_program import ServerProgramWriter
from dtrans.parameter_server.tables.choose import Tables
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.parameter_server.tables.own_update import (
    choose_kept_tables,
    no_rows_of,
    on_servers,
    state_of_rows,
    write_update,
)
from dtrans.parameter_server.tables.touched_rows import mark_tables, resized
from dtrans.parameter_server.tables.trainer_rows import TableWriter, without_unused
from dtrans.parameter_server.trainer_program import (
    TrainerCommConfig,
    TrainerCommWriter,
    where_rows_are,
    write_start,
)
from dtrans.rows.analysis import analyse
from dtrans.slicing.blocks import Placement, Unit
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import ServerWork
from dtrans.step.cut import GRAD, Cut, Gradient, OptimizeHalf, cut
from dtrans.step.forward_backward import write_trainer_half
from dtrans.step.observers import callers_of
from dtrans.step.startup import match_startup


def plan_geo_sgd(
    step: Cut,
    startup: Program,
    endpoints: Sequence[str],
    options: PServerOptions,
) -> PServerPlan:
    """Plan GEO-SGD: `dtrans.pserver` with `mode=Geo(...)`. Every leaf with rows can be cut, whatever
    its optimizer.

    Returns:
      A plan whose trainer programs are (params, opt_state, *batch) -> what the step returns, and
      whose trainer startup programs return both params and opt_state.

    Raises:
      ConfigError: a parameter of whole numbers; a leaf that is named in `sparse`, and is no table.
      TraceError: `startup` does not make what the step takes.

    Source: `GeoSgdTranspiler` in Paddle's geo_sgd_transpiler.py.
    """
    mode, trainers = options.mode, options.trainers
    assert isinstance(mode, Geo)
    whole, step = step, shared(step)
    adding = adds(step)
    analysis = analyse(adding.optimize, adding.optimized)
    startup = match_startup(step, startup)
    tables = choose_kept_tables(whole, startup, options.sparse)
    types = {n: step.program.inputs[n] for n in step.optimized}
    placement = mark_tables(
        place(analysis, types, endpoints, options.placement, tables.buckets), tables.of
    )
    servers = ServerProgramWriter(
        adding,
        analyse_update(analysis, placement),
        startup,
        trainers,
        sync_mode=False,
        adapt=with_deltas,
        tables={n: on_servers(t, analysis) for n, t in tables.of.items()},
        sized=lambda sizes: analyse_update(analysis, resized(placement, sizes)),
    )
    return PServerPlan(
        main=step.program,
        startup=startup,
        options=options,
        placement=placement,
        servers={ep: servers.programs(ep) for ep in endpoints},
        trainer_side=GeoTrainerSide(whole, startup, placement, tables, trainers, mode),
        update=ServedUpdate(frozen=step.frozen),
        tables=tables,
        callers=callers_of(whole.observers, *["each trainer, with values of its own"] * 2),
    )


def shared(step: Cut) -> Cut:
    """Return the step that optimizes only parameters with gradients; trainers own the others."""
    inner = step.program.inner
    enters = propagate(inner.eqns, {}, dict.fromkeys(step.boundary.values(), 1))
    outs = step.program.outvars
    chosen = tuple(n for n in step.optimized if isinstance(a := outs[n], Var) and enters.get(a))
    for n in chosen:
        if not jnp.issubdtype(t := step.program.outputs[n].dtype, jnp.inexact):
            raise ConfigError(
                f"{n} is of type {t}, of which servers cannot add up changes; GEO-SGD is for floats"
            )
    return dataclasses.replace(
        step, optimized=chosen, frozen=tuple(n for n in step.params if n not in chosen)
    )


def adds(step: Cut) -> Cut:
    """Return the step with an optimize half that adds a change to each parameter."""
    like = step.program.jaxpr
    outs = step.program.outvars
    b = Builder(like)
    given = {n: b.input(outs[leaf].aval) for leaf in step.optimized for n in (Gradient(leaf), leaf)}
    made = [b.call(jax.lax.add, given[leaf], given[Gradient(leaf)])[0] for leaf in step.optimized]
    half = OptimizeHalf(b.build(made), tuple(given), step.optimized)
    gradients = {leaf: outs[leaf] for leaf in step.optimized}
    return dataclasses.replace(step, optimize=half, gradients=gradients, opt_state=())


def with_deltas(work: ServerWork, units: Sequence[Unit]) -> ServerWork:
    """Rename a server's gradients as Paddle does: `params/w.block0.delta` for a change."""
    names = {x.gradient(0, 1): x.name + DELTA for unit in units for x in unit.blocks}
    for x in (x for unit in units for x in unit.blocks if x.name + DELTA in work.variables):
        raise ConfigError(
            f"{x.name + DELTA} is what servers call the change of {x.name}: rename that leaf"
        )
    renamed = lambda g: dataclasses.replace(g, name=names[g.name], sent={0: names[g.name]})
    blocks = tuple(
        dataclasses.replace(
            block,
            in_names=tuple(names.get(n, n) for n in block.in_names),
            grads=tuple(renamed(g) for g in block.grads),
        )
        for block in work.blocks
    )
    return dataclasses.replace(work, blocks=blocks)


@dataclasses.dataclass(frozen=True)
class GeoTrainerSide:
    """Writer of the trainers' programs of a GEO-SGD plan.

    Attributes:
      step: the step; every parameter that the update changes is in `optimized`.
      init: the single-device init.
      placement: the blocks of shared leaves, and their servers.
      tables: the shared leaves that trainers store by rows.
      trainers: the number of trainers.
      mode: the number of steps between pushes, and whether trainers wait for a pull.
    """

    step: Cut
    init: Program
    placement: Placement
    tables: Tables
    trainers: int
    mode: Geo
    runtime_split: ClassVar = True

    def program(self, trainer_id: int) -> Program:
        """Return the program of one trainer: the step, and a `send` of its parameters."""
        if self.tables.of:
            return self._on_rows(self.step, trainer_id)
        return self._without_tables(shared(self.step), trainer_id)

    def _without_tables(self, step: Cut, trainer_id: int) -> Program:
        """Return the program of one trainer without tables."""
        source = step.program
        outs: dict[str, Any] = source.outvars
        b = Builder(source.jaxpr)
        b.invars += source.inner.invars
        for eqn, role in zip(source.eqns, source.roles, strict=True):
            b.role = role
            b.keep(eqn)
        outs |= self._send(b, {n: outs[n] for n in step.optimized}, trainer_id)
        made = Program.written(f"trainer {trainer_id}", b, source.args, source.out, outs)
        return source.rewritten(
            lambda other: self._without_tables(shared(cut(other)), trainer_id), result=made
        )

    def _on_rows(self, step: Cut, trainer_id: int) -> Program:
        """Return one trainer's program with tables: a step on the rows of its batch, and a `send`.

        Args:
          step: with all parameters that the update makes as `optimized`.
        """
        source, tables = step.program, self.tables
        none_of = {n: Var(t) for n, t in no_rows_of(tables, source.inputs).items()}
        b = Builder(source.jaxpr)
        b.invars += [none_of.get(n, v) for n, v in source.invars.items()]
        gradients: dict[str, Any] = {}
        rows, made = self._half(b, step, gradients, trainer_id)
        b.labels.update({g: n + GRAD for n, g in gradients.items() if isinstance(g, Var)})
        here = {n: source.invars[n] for n in (*step.params, *step.opt_state) if n not in none_of}
        new = write_update(b, step, rows.sizes, here | rows.held, gradients)
        sent = {n: new[n] for n in shared(step).optimized if n not in tables.of}
        kept = {
            n: (rows.uniq[n], *(new[m] for m in (n, *t.zero.state))) for n, t in tables.of.items()
        }
        outs = {**source.outvars, **made, **new, **self._send(b, sent, trainer_id, kept), **none_of}
        without_unused(b, [outs[n] for n in source.out_names])
        program = Program.written(f"trainer {trainer_id}", b, source.args, source.out, outs)
        return source.rewritten(lambda other: self._on_rows(cut(other), trainer_id), result=program)

    def _half(
        self, b: Builder, step: Cut, gradients: dict[str, Any], trainer_id: int
    ) -> tuple[TableWriter, dict[str, Any]]:
        """Write forward and backward on rows of tables: who has written it, and results.

        Args:
          gradients: is given them, by leaf.
        """
        source, tables = step.program, self.tables
        vars_of = source.invars
        found = find_lookups(step, tables.names)
        assert not found.refused, found.refused
        where = {n: self._where(n, trainer_id) for n in tables.of}
        state = {n: {m: vars_of[m] for m in t.zero.state} for n, t in tables.of.items()}
        writers: list[TableWriter] = []

        def writer(eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Any) -> TableWriter:
            of = {n: vars_of[n] for n in tables.of}
            writers.append(TableWriter(b, source.jaxpr, found, of, where, eqns, roles, state))
            return writers[0]

        made = write_trainer_half(b, step, step.results, gradients.__setitem__, writer)
        return writers[0], made

    def startup(self, trainer_id: int) -> Program:
        """Return a trainer's startup program: parameters from the servers, tables without rows, the
        rest from the init."""
        step, startup = shared(self.step), self.init
        none_of = no_rows_of(self.tables, step.program.inputs)
        own = [n for n in startup.out_names if n not in step.optimized and n not in none_of]
        b, outs = write_start(startup, own)
        here = [n for n in step.optimized if n not in none_of]
        outs |= TrainerCommWriter(
            b, self.placement, trainer_id, TrainerCommConfig(self.trainers, sync_mode=False)
        ).start(here)
        b.role = DIST
        for n, t in self.tables.of.items():
            names = (n, *t.zero.state)
            how = {
                "types": tuple(none_of[m] for m in names),
                "write": state_of_rows(startup, t.zero.state),
            }
            args = startup.inner.invars if t.zero.state else ()
            outs |= zip(
                names, b.bind(geo_init_p, *args, **self._where(n, trainer_id), **how), strict=True
            )
        outs |= self._send(b, {n: outs[n] for n in here}, trainer_id, starts=True)
        return Program.written(f"trainer {trainer_id} startup", b, startup.args, startup.out, outs)

    def _where(self, table: str, trainer_id: int) -> dict[str, Any]:
        """Return the parameters of an equation that transfers a table's rows."""
        blocks = self.placement.blocks[table]
        names = tuple(x.name for x in blocks)
        return {**where_rows_are(table, blocks), "names": names, **self._me(trainer_id)}

    def _me(self, trainer_id: int) -> dict[str, Any]:
        return {"trainer_id": trainer_id, "trainers": self.trainers, "sync_mode": False}

    def _send(
        self,
        b: Builder,
        values: Mapping[str, Any],
        trainer_id: int,
        kept: Mapping[str, Sequence[Any]] = {},
        starts: bool = False,
    ) -> dict[str, Any]:
        """Write one `send` of parameters; return its outputs.

        Args:
          values: of the parameters.
          kept: of each table, the numbers of the rows that were looked up, what they have become,
            and their state.
        """
        b.role = RPC
        table = [self.placement.blocks[leaf] for leaf in values]
        of_tables = {"tables": tuple((n, len(x) - 1) for n, x in kept.items())} if kept else {}
        new = b.bind(
            geo_send_p,
            *values.values(),
            *(x for of in kept.values() for x in of),
            epmap=tuple(tuple(x.endpoint for x in blocks) for blocks in table),
            names=tuple(tuple(x.name for x in blocks) for blocks in table),
            sections=tuple(tuple(x.rows for x in blocks) for blocks in table),
            push_every=0 if starts else self.mode.push_every,
            block_on_pull=self.mode.block_on_pull,
            **of_tables,
            **self._me(trainer_id),
        )
        b.labels.update(zip(new, values, strict=True))
        return dict(zip(values, new, strict=True))
