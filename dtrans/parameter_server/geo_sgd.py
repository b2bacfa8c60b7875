"""GEO-SGD: trainers train by themselves, and servers add up what has changed.

    trainer   the whole step, optimizer included; then one `send` of all its parameters. Every n-th time that gives
              d = (local - old) / trainers to the servers, and old + d is the new old
    pserver   w + d, for each block
    trainer   what has come back is in the results of a later `send`: local + (server - old), and the server's is the
              new old

So trainers wait for nothing: what is far away is only a little older. With one trainer, the server's parameters are its
own. What a trainer has changed since it pushed last is pushed when it closes.

The optimizer's state is each trainer's own, and so is what no gradient enters (batch statistics, counters).

Source: python/paddle/fluid/transpiler/geo_sgd_transpiler.py, and `GeoSgdCommunicator` in
paddle/fluid/operators/distributed/communicator.cc, which does the same beside the program, in its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Var
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import propagate
from dtrans.ir.program import RPC, Program
from dtrans.ops import DELTA, geo_send_p
from dtrans.parameter_server.options import BlockPlacement, Geo
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.server_program import ServerProgramWriter
from dtrans.parameter_server.trainer_program import TrainerCommConfig, TrainerCommWriter, write_start
from dtrans.rows.analysis import analyse
from dtrans.slicing.blocks import Placement, Unit
from dtrans.slicing.server_update import ServerUpdateBuilder, ServerWork
from dtrans.step.cut import Cut, Gradient, OptimizeHalf, cut
from dtrans.step.startup import match_startup


def plan_geo_sgd(
    step: Cut, startup: Program, endpoints: Sequence[str], trainers: int, mode: Geo, options: BlockPlacement
) -> PServerPlan:
    """What `dtrans.pserver` plans with `mode=Geo(...)`. Every leaf with rows can be cut, whatever its optimizer.

    Returns:
      A plan whose trainer programs are (params, opt_state, *batch) -> what the step returns, and whose trainer startup
      programs return both params and opt_state.

    Raises:
      ConfigError: a parameter of whole numbers.
      TraceError: `startup` does not make what the step takes.

    Source: `GeoSgdTranspiler` in Paddle's geo_sgd_transpiler.py.
    """
    step = shared(step)
    adding = adds(step)
    analysis = analyse(adding.optimize, adding.optimized)
    placement = place(analysis, {n: step.program.inputs[n] for n in step.optimized}, endpoints, options)
    startup = match_startup(step, startup)
    servers = ServerProgramWriter(
        adding, ServerUpdateBuilder(analysis, placement, 1), startup, trainers, sync_mode=False, adapt=with_deltas
    )
    return PServerPlan(
        main=step.program,
        startup=startup,
        placement=placement,
        trainers=trainers,
        sync_mode=False,
        servers={ep: servers.programs(ep) for ep in endpoints},
        frozen=step.frozen,
        unsent=(),
        unused_effects=(),
        shared_state=(),
        runtime_split=True,
        push_every=mode.push_every,
        make_trainer=lambda k: _trainer_program(step, placement, k, trainers, mode),
        make_trainer_startup=lambda k: _trainer_startup_program(step, placement, startup, k, trainers, mode),
    )


def shared(step: Cut) -> Cut:
    """The step with only those parameters as `optimized` that gradients enter; the others are each trainer's own."""
    inner = step.program.inner
    enters = propagate(inner.eqns, {}, dict.fromkeys(step.boundary.values(), 1))
    outs = step.program.outvars
    chosen = tuple(n for n in step.optimized if isinstance(a := outs[n], Var) and enters.get(a))
    for n in chosen:
        if not jnp.issubdtype(t := step.program.outputs[n].dtype, jnp.inexact):
            raise ConfigError(f"{n} is of type {t}, of which servers cannot add up changes; GEO-SGD is for floats")
    return dataclasses.replace(step, optimized=chosen, frozen=tuple(n for n in step.params if n not in chosen))


def adds(step: Cut) -> Cut:
    """The step with another optimize half, which adds something to each parameter."""
    like = step.program.jaxpr
    outs = step.program.outvars
    b = Builder(like)
    given = {n: b.input(outs[leaf].aval) for leaf in step.optimized for n in (Gradient(leaf), leaf)}
    made = [b.call(jax.lax.add, given[leaf], given[Gradient(leaf)])[0] for leaf in step.optimized]
    half = OptimizeHalf(b.build(made), tuple(given), step.optimized)
    gradients = {leaf: outs[leaf] for leaf in step.optimized}
    return dataclasses.replace(step, optimize=half, gradients=gradients, opt_state=())


def with_deltas(work: ServerWork, units: Sequence[Unit]) -> ServerWork:
    """The work of a server under Paddle's names: `params/w.block0.delta` for what is added."""
    names = {x.gradient(0, 1): x.name + DELTA for unit in units for x in unit.blocks}
    for x in (x for unit in units for x in unit.blocks if x.name + DELTA in work.held):
        raise ConfigError(f"{x.name + DELTA} is what servers call the change of {x.name}: rename that leaf")
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


def _trainer_program(step: Cut, placement: Placement, trainer_id: int, trainers: int, mode: Geo) -> Program:
    """The program of one trainer: the step, and a `send` of its parameters."""
    source = step.program
    outs: dict[str, Any] = source.outvars
    b = Builder(source.jaxpr)
    b.invars += source.inner.invars
    for eqn, role in zip(source.eqns, source.roles, strict=True):
        b.role = role
        b.keep(eqn)
    outs |= _send(b, step.optimized, outs, placement, trainer_id, trainers, mode)

    def specializer(types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        return _trainer_program(shared(cut(source.specialize_flat(types))), placement, trainer_id, trainers, mode)

    return Program(
        f"trainer {trainer_id}",
        b.build([outs[n] for n in source.out_names]),
        source.args,
        source.out,
        tuple(b.roles),
        b.labels,
        specializer,
    )


def _trainer_startup_program(
    step: Cut, placement: Placement, startup: Program, trainer_id: int, trainers: int, mode: Geo
) -> Program:
    """What a trainer starts from: parameters from the servers, and the rest from the init."""
    b, outs = write_start(startup, [n for n in startup.out_names if n not in step.optimized])
    outs |= TrainerCommWriter(b, placement, trainer_id, TrainerCommConfig(trainers, sync_mode=False)).start(
        step.optimized
    )
    outs |= _send(b, step.optimized, outs, placement, trainer_id, trainers, mode, starts=True)
    return Program(
        f"trainer {trainer_id} startup",
        b.build([outs[n] for n in startup.out_names]),
        startup.args,
        startup.out,
        tuple(b.roles),
        b.labels,
    )


def _send(
    b: Builder,
    leaves: Sequence[str],
    values: dict[str, Any],
    placement: Placement,
    trainer_id: int,
    trainers: int,
    mode: Geo,
    starts: bool = False,
) -> dict[str, Any]:
    """One `send` of parameters; what it gives back."""
    b.role = RPC
    table = [placement.blocks[leaf] for leaf in leaves]
    new = b.bind(
        geo_send_p,
        *(values[leaf] for leaf in leaves),
        epmap=tuple(tuple(x.endpoint for x in blocks) for blocks in table),
        names=tuple(tuple(x.name for x in blocks) for blocks in table),
        sections=tuple(tuple(x.rows for x in blocks) for blocks in table),
        push_every=0 if starts else mode.push_every,
        block_on_pull=mode.block_on_pull,
        trainer_id=trainer_id,
        trainers=trainers,
        sync_mode=False,
    )
    b.labels.update(zip(new, leaves, strict=True))
    return dict(zip(leaves, new, strict=True))
