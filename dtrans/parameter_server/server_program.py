"""The programs of parameter servers: what each serves, and what makes its initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import JaxprEqn, Var
from dtrans.ir.builder import Builder
from dtrans.ir.program import FORWARD, LR_SCHED, RPC, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.ops import listen_and_serv_p
from dtrans.parameter_server.plan import ServerPrograms
from dtrans.parameter_server.tables.choose import Table
from dtrans.parameter_server.tables.touched_rows import ServedTables, TableBlock
from dtrans.slicing.blocks import Unit
from dtrans.slicing.partial_init import InitSlice, write_parts
from dtrans.slicing.server_update import ServerUpdateBuilder, ServerVariable, ServerWork
from dtrans.step.cut import Cut


class ServerProgramWriter:
    """Makes the programs of the servers of one plan.

    Args:
      step: what is to be done, with the optimize half that servers do.
      slicer: of that.
      startup: the init, with names as in the step.
      trainers, sync_mode, on_trainer_exit: as those of the plan.
      adapt: what else a server does with what it is sent, if anything.
      tables: leaves of which trainers look up rows.
      sized: the same slicer, with other numbers of rows in blocks of tables.
    """

    def __init__(
        self,
        step: Cut,
        slicer: ServerUpdateBuilder,
        startup: Program,
        trainers: int,
        sync_mode: bool,
        on_trainer_exit: str = "drop",
        adapt: Callable[[ServerWork, Sequence[Unit]], ServerWork] | None = None,
        tables: Mapping[str, Table] | None = None,
        sized: Callable[[Mapping[str, int]], ServerUpdateBuilder] | None = None,
    ) -> None:
        self.tables, self.sized = tables or {}, sized
        self.on_trainer_exit = on_trainer_exit
        self.adapt = adapt
        self.step = step
        self.slicer = slicer
        self.startup = startup
        self.trainers = trainers
        self.sync_mode = sync_mode
        self.types = step.program.inputs

    def programs(self, endpoint: str) -> ServerPrograms:
        """The main and startup program of one server."""
        work = self.slicer.work(endpoint)
        if self.adapt is not None:
            work = self.adapt(work, self.slicer.placement.units[endpoint])
        main = self.main(endpoint, work)
        return ServerPrograms(main, self.init(endpoint, work.held), {n: work.held[n] for n in main.in_names})

    def main(self, endpoint: str, work: ServerWork) -> Program:
        """The program that serves."""
        units = self.slicer.placement.units[endpoint]
        asked = [n for n in self.slicer.asked if self.slicer.asked_of(n) == endpoint]
        to_block = tuple(f"{n}:{block}" for n, block in work.grads.items())
        spec = TreeSpec.of({n: held.cut(self.types[held.of]) for n, held in work.held.items()})
        b = Builder(self.step.program.jaxpr)
        b.role = RPC
        state_vars = [b.input(work.held[n].cut(self.types[work.held[n].of])) for n in spec.names]
        final = b.bind(
            listen_and_serv_p,
            *state_vars,
            endpoint=endpoint,
            Fanin=self.trainers,
            sync_mode=self.sync_mode,
            on_trainer_exit=self.on_trainer_exit,
            grad_to_block_id=to_block,
            lr_decay_block_id=next((i for i, x in enumerate(work.blocks, 1) if x.role == LR_SCHED), -1),
            optimize_blocks=work.blocks,
            state_names=spec.names,
            param_names=(*(x.name for u in units for x in u.blocks if not x.is_table), *asked),
            **self._tables(endpoint, units),
        )
        return Program(f"pserver {endpoint}", b.build(final), (spec,), spec, tuple(b.roles))

    def _tables(self, endpoint: str, units: Sequence[Unit]) -> dict[str, Any]:
        """What a server knows of its blocks of tables, as a parameter of its equation; nothing where nobody has any."""
        blocks = [b for u in units for b in u.blocks if b.is_table]
        if not self.tables or self.sized is None:
            return {}
        sized = self.sized

        def of_sizes(sizes: Mapping[str, int]) -> JaxprEqn:
            slicer = sized(sizes)
            again = ServerProgramWriter(
                self.step, slicer, self.startup, self.trainers, self.sync_mode, self.on_trainer_exit
            )
            (eqn,) = again.main(endpoint, slicer.work(endpoint)).eqns
            return eqn.replace(params={**eqn.params, "tables": ServedTables({}, of_sizes)})

        served = {}
        for b in blocks:
            table = self.tables[b.leaf]
            assert b.span is not None
            held = (b.name, *map(b.named, table.zero.state))
            gradients = {k: b.gradient(k, self.slicer.trainers) for k in range(self.slicer.trainers)}
            served[b.name] = TableBlock(b.leaf, b.name, b.span, held, gradients, table.whole)
        return {"tables": ServedTables(served, of_sizes)}

    def init(self, endpoint: str, held: Mapping[str, ServerVariable]) -> Program:
        """The program that makes the server's initial values: its rows of the single-device init."""
        inner = self.startup.inner
        made = self.startup.outvars
        spec = TreeSpec.of({n: x.cut(self.types[x.of]) for n, x in held.items()})
        b = Builder(self.startup.jaxpr)
        b.invars += inner.invars
        b.role = FORWARD
        parts = [(held[n], made[held[n].of]) for n in spec.names]
        spans = [None if x.span is None else InitSlice.along_axis(x.axis, x.span) for x, _ in parts]
        outs = write_parts(b, self.startup.jaxpr, [(v, p) for (_, v), p in zip(parts, spans, strict=True)])
        outs = [b.call(jnp.zeros_like, v)[0] if held[n].zeros else v for n, v in zip(spec.names, outs, strict=True)]
        for name, part, value in zip(spec.names, spans, outs, strict=True):
            if part is not None and isinstance(value, Var):
                b.labels.setdefault(value, name)
        return Program(f"pserver {endpoint} startup", b.build(outs), self.startup.args, spec, tuple(b.roles), b.labels)
