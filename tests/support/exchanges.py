"""Plans, written by hand, whose servers exchange partial results.

The update is momentum SGD after a clip of the gradients by their global norm. A second round
divides the gradients by one more than their largest magnitude.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from helpers import init_of, mlp_batch, mlp_loss

import dtrans
from dtrans.ir.program import DIST, LR_SCHED, OPTIMIZE, Program
from dtrans.ops import BlockGradient, OptimizeBlock, all_reduce_p
from dtrans.parameter_server.plan import PServerPlan


RATE, MOMENTUM, NORM = 0.1, 0.9, 0.05
SGD = optax.sgd(RATE, MOMENTUM)
EASED = optax.GradientTransformation(
    lambda params: optax.EmptyState(), lambda grads, state, params=None: (divided(grads), state)
)


def divided(grads: Any) -> Any:
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]))
    return jax.tree.map(lambda g: g / (1 + most), grads)


def reference(rounds: int) -> Any:
    """Return the optimizer of `clipping_plan`, for one device."""
    return optax.chain(*[optax.clip_by_global_norm(NORM), EASED][:rounds], SGD)


def clipping_plan(
    rounds: int,
    pservers: Sequence[str],
    params: Any,
    *,
    trainers: int = 2,
    owners: Sequence[str] = (),
    loss: Any = mlp_loss,
) -> PServerPlan:
    """Return a plan for the batches of `mlp_batch`; see `with_exchanges`."""
    batch = mlp_batch(8, dtype=jax.tree.leaves(params)[0].dtype)
    plan = dtrans.pserver(
        dtrans.trace(dtrans.make_train_step(loss, SGD), params, SGD.init(params), *batch),
        dtrans.trace(init_of(SGD), params),
        pservers=pservers,
        trainers=trainers,
        placement=dtrans.BlockPlacement(min_block_size=1),
    )
    return with_exchanges(plan, rounds, owners)


def clip_factor(total: jax.Array) -> jax.Array:
    norm = jnp.sqrt(total)
    return jnp.where(norm < NORM, jnp.ones_like(norm), NORM / norm)


def with_exchanges(plan: PServerPlan, rounds: int, owners: Sequence[str] = ()) -> PServerPlan:
    """Return a plan of `SGD` whose servers clip in `rounds` rounds.

    Args:
      plan: the plan without exchanges.
      rounds: the number of rounds.
      owners: the servers whose gradients enter the norm; by default all servers with gradients.
    """
    over = tuple(ep for ep, units in plan.placement.units.items() if units)
    servers = {}
    for ep, programs in plan.servers.items():
        (eqn,) = programs.main.jaxpr.jaxpr.eqns
        units = [b for b in eqn.params["optimize_blocks"] if b.role == OPTIMIZE]
        blocks = _blocks(ep, units, rounds, tuple(owners) or over, over)
        servers[ep] = dataclasses.replace(programs, main=with_blocks(programs.main, blocks))
    return dataclasses.replace(plan, servers=servers)


def with_blocks(main: Program, blocks: Sequence[OptimizeBlock]) -> Program:
    """Return a server's program with other optimize blocks."""
    inner = main.jaxpr.jaxpr
    (eqn,) = inner.eqns
    eqn = eqn.replace(params=eqn.params | {"optimize_blocks": tuple(blocks)})
    return dataclasses.replace(
        main, jaxpr=type(main.jaxpr)(inner.replace(eqns=[eqn]), main.jaxpr.consts)
    )


def block(
    name: str,
    role: str,
    level: int,
    fn: Callable[..., Any],
    inputs: dict[str, Any],
    outputs: Sequence[str],
    grads: Sequence[BlockGradient] = (),
) -> OptimizeBlock:
    """Return an optimize block that computes a function of named values."""
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in inputs.values()))
    return OptimizeBlock(name, role, jaxpr, tuple(inputs), tuple(outputs), level, tuple(grads))


def all_reduce(op: str, name: str, owners: Sequence[str], over: Sequence[str], x: Any) -> Any:
    (out,) = all_reduce_p.bind(x, op=op, name=name, owners=tuple(owners), over=tuple(over))
    return out


def _blocks(
    ep: str,
    units: Sequence[OptimizeBlock],
    rounds: int,
    owners: tuple[str, ...],
    over: tuple[str, ...],
) -> list[OptimizeBlock]:
    if not units:
        return []
    made = []
    scalar = jax.core.ShapedArray((), units[0].jaxpr.jaxpr.invars[0].aval.dtype)
    for i, unit in enumerate(units):
        types = dict(zip(unit.in_names, (v.aval for v in unit.jaxpr.jaxpr.invars), strict=True))
        grads = {g.name: types[g.name] for g in unit.grads}
        if ep in owners:
            first = lambda g: (g, jnp.sum(g**2))
            made.append(
                block(
                    unit.name, OPTIMIZE, 0, first, grads, [f"mean/{i}", f"square/{i}"], unit.grads
                )
            )
    total = lambda *x: all_reduce(
        "sum", "all_reduce/0", owners, over, sum(x) if x else jnp.zeros((), scalar.dtype)
    )
    squares = {f"square/{i}": scalar for i in range(len(units))} if ep in owners else {}
    made.append(block("all_reduce", DIST, 0, lambda *x: [total(*x)], squares, ["all_reduce/0"]))
    made.append(
        block("lr_sched", LR_SCHED, 1, clip_factor, {"all_reduce/0": scalar}, ["lr_sched/0"])
    )
    level = 1
    if rounds == 2:
        for i, unit in enumerate(units):
            types = dict(zip(unit.in_names, (v.aval for v in unit.jaxpr.jaxpr.invars), strict=True))
            grads = {g.name: types[g.name] for g in unit.grads}
            second = lambda s, g: jnp.max(jnp.abs(g * s), initial=0.0)
            inputs = {"lr_sched/0": scalar, **grads}
            made.append(block(unit.name, OPTIMIZE, 1, second, inputs, [f"most/{i}"], unit.grads))
        most = lambda *x: all_reduce("max", "all_reduce/1", over, over, jnp.max(jnp.stack(x)))
        largest = {f"most/{i}": scalar for i in range(len(units))}
        made.append(block("all_reduce", DIST, 1, lambda *x: [most(*x)], largest, ["all_reduce/1"]))
        ease = lambda s, m: s / (1 + m)
        both = {"lr_sched/0": scalar, "all_reduce/1": scalar}
        made.append(block("lr_sched", LR_SCHED, 2, ease, both, ["lr_sched/1"]))
        level = 2
    for i, unit in enumerate(units):
        types = dict(zip(unit.in_names, (v.aval for v in unit.jaxpr.jaxpr.invars), strict=True))
        grads = {g.name: types[g.name] for g in unit.grads}
        param, _ = unit.out_names
        state = {n: types[n] for n in unit.out_names}

        def last(s: Any, p: Any, t: Any, g: Any) -> Any:
            t = MOMENTUM * t + s * g
            return p - RATE * t, t

        # some units reuse the mean from an earlier block, others compute the mean again
        again = i % 2 or ep not in owners
        inputs = {
            f"lr_sched/{level - 1}": scalar,
            **state,
            **(grads if again else {f"mean/{i}": types[param]}),
        }
        read = unit.grads if again else ()
        made.append(block(unit.name, OPTIMIZE, level, last, inputs, unit.out_names, read))
    return made
