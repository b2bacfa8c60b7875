"""Helpers of many test files: small models, comparisons, and a single-device reference.

`serve` also runs parameter servers by hand: one `OptimizeBlock` after the other, without
`dtrans.run`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans._jax import Literal, facts_of, jaxprs_in_params, opened
from dtrans.ops import OptimizeBlock, all_reduce_p, combine
from dtrans.parameter_server.plan import PServerPlan
from dtrans.rows.writer import RowRange


# JAX_REMAT3 is the planned `jax.checkpoint`: lowering a step inlines it, and JAX traces each
# rematerialised function once
closes_remat = pytest.mark.skipif(
    "JAX_REMAT3" in os.environ, reason="with JAX_REMAT3 lowering opens jax.checkpoint"
)


# -- comparisons -----------------------------------------------------------------------------------


def as_numpy(x: Any) -> np.ndarray:
    """Return an array as a NumPy array; also convert random keys."""
    return np.asarray(
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )


def distance(a: Any, b: Any) -> float:
    """Return max|a - b| / max|b| in float64.

    Return the absolute difference if b is zero, and 0 if both are equal.
    """
    a, b = as_numpy(a), as_numpy(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    if a.size == 0 or np.array_equal(a, b):
        return 0.0
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    scale = np.abs(b).max()
    worst = np.abs(a - b).max()
    assert np.isfinite(worst), "not finite"
    return float(worst / scale if scale else worst)


def tree_close(a: Any, b: Any, rtol: float) -> None:
    """Assert that two pytrees have one structure and max|a - b| <= rtol * max|b| in each leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True
    ):
        far = distance(x, y)
        assert far <= rtol, f"{jax.tree_util.keystr(path)}: {far:.3g} > {rtol}"


def tree_equal(a: Any, b: Any) -> None:
    """Assert that two pytrees are equal, bit for bit."""
    tree_close(a, b, 0.0)


# -- models ----------------------------------------------------------------------------------------


def array(x: np.ndarray, dtype: Any) -> jax.Array:
    """Return a JAX array. NumPy converts it: JAX would compile the conversion of each shape."""
    return jnp.asarray(x.astype(dtype))


def mlp_params(
    sizes: Sequence[int] = (5, 6, 3), dtype: Any = jnp.float32, seed: int = 0
) -> dict[str, jax.Array]:
    """Return `b1, b2, ..., w1, w2, ...`, the parameters of a multi-layer perceptron."""
    rng = np.random.default_rng(seed)
    params = {}
    for i, (n, m) in enumerate(itertools.pairwise(sizes), 1):
        params[f"w{i}"] = array(rng.normal(size=(n, m)) / np.sqrt(n), dtype)
        params[f"b{i}"] = array(rng.normal(size=m) * 0.1, dtype)
    return params


def mlp_forward(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    layers = len(params) // 2
    for i in range(1, layers + 1):
        x = x @ params[f"w{i}"] + params[f"b{i}"]
        x = jnp.tanh(x) if i < layers else x
    return x


def mlp_loss(params: Mapping[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((mlp_forward(params, x) - y) ** 2)


def mlp_batch(
    rows: int = 8, sizes: Sequence[int] = (5, 6, 3), dtype: Any = jnp.float32, seed: int = 1
) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, sizes[0])), rng.normal(size=(rows, sizes[-1]))
    return array(x, dtype), array(y, dtype)


def plain_step(
    loss: Callable[..., Any], tx: Any, grad: Callable[..., Any] = jax.value_and_grad
) -> Callable[..., Any]:
    """Return a training step written with JAX and optax alone."""

    def step(params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, grads = grad(loss)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def plain_run(
    step: Callable[..., Any], params: Any, opt_state: Any, batches: Sequence[tuple[Any, ...]]
) -> tuple[Any, Any, list[Any]]:
    """Run the jitted step on each batch in turn: the single-device reference."""
    jitted, losses = jax.jit(step), []
    for batch in batches:
        params, opt_state, loss, *_ = jitted(params, opt_state, *batch)
        losses.append(loss)
    return params, opt_state, losses


def init_of(tx: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Return the function `init(params) -> (params, opt_state)`."""

    def init(params: Any) -> tuple[Any, Any]:
        return params, tx.init(params)

    return init


def endpoints(count: int) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{6170 + i}" for i in range(count))


# -- parameter servers by hand ---------------------------------------------------------------------


def blocks_of(plan: PServerPlan, endpoint: str) -> tuple[OptimizeBlock, ...]:
    """Return the optimize blocks of one server."""
    (eqn,) = plan.servers[endpoint].main.jaxpr.jaxpr.eqns
    return eqn.params["optimize_blocks"]


def quick(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `jax.jit` of a function, with fast compilation, and with a rounding after each
    bfloat16 equation.
    """
    plain = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    return jax.jit(fn, compiler_options={**plain, **options})


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr, equation by equation."""
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def start_servers(
    plan: PServerPlan, *args: Any, evaluate: Callable[..., list[Any]] = evaluate
) -> dict[str, dict[str, Any]]:
    """Return the state that each server's startup program computes."""
    made = {}
    for endpoint, programs in plan.servers.items():
        start = programs.startup
        made[endpoint] = dict(
            zip(start.out_names, evaluate(start.jaxpr, *start.flatten(*args)), strict=True)
        )
    return made


def serve(
    plan: PServerPlan,
    held: Mapping[str, Mapping[str, Any]],
    grads: Sequence[Mapping[str, Any]],
    evaluate: Callable[..., list[Any]] = evaluate,
    deaf: tuple[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run one update on every server, level by level; return the new states.

    Args:
      plan: the plan.
      held: the state of each server, by endpoint.
      grads: for each trainer, a dict from leaves to full gradients.
      evaluate: evaluates a jaxpr.
      deaf: a server and the name of an `all_reduce` whose results this server does not receive. The
        server continues with its operand.
    """
    values: dict[str, dict[str, Any]] = {}
    new = {endpoint: dict(held[endpoint]) for endpoint in plan.servers}
    for endpoint, units in plan.placement.units.items():
        values[endpoint] = dict(held[endpoint])
        for block in (b for unit in units for b in unit.blocks):
            if (
                f"{block.name}.trainer_0_bak" in held[endpoint]
            ):  # a gradient of the newest parameters
                values[endpoint][f"{block.name}.bak"] = held[endpoint][block.name]
            if block.leaf not in plan.update.unsent:
                sent = [of[block.leaf][block.span.index if block.span else ...] for of in grads]
                values[endpoint][block.gradient(0, 1)] = functools.reduce(jnp.add, sent) * (
                    1 / len(sent)
                )
    levels = {b.level for endpoint in plan.servers for b in blocks_of(plan, endpoint)}
    for level in sorted(levels):
        here = [(ep, b) for ep in plan.servers for b in blocks_of(plan, ep) if b.level == level]
        parts: dict[str, dict[str, Any]] = {}
        for combining in (False, True):
            for endpoint, block in here:
                if block.role != "dist":
                    if combining:
                        continue
                    outs = evaluate(block.jaxpr, *[values[endpoint][n] for n in block.in_names])
                else:
                    outs = exchange(block, values[endpoint], endpoint, parts, combining, deaf)
                for name, value in zip(block.out_names, outs, strict=True):
                    if name in held[endpoint]:
                        new[endpoint][name] = value
                    else:
                        assert block.role == "dist" or name not in values[endpoint], (
                            f"{name} is made twice"
                        )
                        values[endpoint][name] = value
    return new


def exchange(
    block: OptimizeBlock,
    values: Mapping[str, Any],
    endpoint: str,
    parts: dict[str, dict[str, Any]],
    combining: bool,
    deaf: tuple[str, str] | None = None,
) -> list[Any]:
    """Run a block that communicates.

    The first call records this server's parts. When the parts of all servers are there, a second
    call combines them.
    """
    inner = block.jaxpr.jaxpr
    env = dict(zip(inner.invars, [values[n] for n in block.in_names], strict=True))
    env.update(zip(inner.constvars, block.jaxpr.consts, strict=True))
    read = lambda a: a.val if hasattr(a, "val") else env[a]
    for eqn in inner.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive is not all_reduce_p:
            made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            env.update(
                zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True)
            )
            continue
        p = eqn.params
        assert endpoint in p["over"]
        found = parts.setdefault(p["name"], {})
        found[endpoint] = operands[0]
        if combining and deaf != (endpoint, p["name"]):
            assert set(found) == set(p["over"]), (
                f"{p['name']} is over {p['over']}, {list(found)} have it"
            )
            (env[eqn.outvars[0]],) = [combine(p["op"], [found[ep] for ep in p["owners"]])]
        else:
            env[eqn.outvars[0]] = operands[0]
    return [read(a) for a in inner.outvars]


def assemble(
    plan: PServerPlan, held: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """Return full leaves, from the servers' blocks. Copies on several servers must be equal."""
    found = {}
    for name in names:
        copies = [h[name] for h in held.values() if name in h]
        if copies:
            for other in copies[1:]:
                assert np.array_equal(as_numpy(copies[0]), as_numpy(other)), name
            found[name] = copies[0]
            continue
        parts, i = [], 0
        while owners := [h for h in held.values() if f"{name}.block{i}" in h]:
            assert len(owners) == 1, f"{name}.block{i} is on {len(owners)} servers"
            parts.append(owners[0][f"{name}.block{i}"])
            i += 1
        if parts:
            whole = plan.main.inputs[name].shape
            axes = [a for a, n in enumerate(whole) if parts[0].shape[a] != n]
            found[name] = jnp.concatenate(parts, axes[0])
            spans = [row.rows for row in plan.overview.by_origin(name)]
            if not all(isinstance(x, RowRange) for x in spans):
                order = np.argsort(np.concatenate([x.numbers() for x in spans]))
                found[name] = jnp.take(found[name], order, axes[0])
    return found


def no_full_shapes(plan: PServerPlan) -> None:
    """Assert that no equation of a sliced leaf computes an array of the leaf's full shape from
    rows.

    The check includes bodies. There are two exceptions. A part of a reduction may have this shape:
    `a @ b.T @ a` with a shared `a` is a sum of such parts. And some equations of shared values
    cannot run on some of the rows: random bits, a sort of a table, or a loop that reads the array.
    """
    by_rows = lambda e: (
        facts_of(e).elementwise or e.primitive.name in ("broadcast_in_dim", "iota", "slice")
    )

    def look(
        jaxpr: Any, ours: set[int], full: tuple[int, ...], where: str, parts: Sequence[int] = ()
    ) -> None:
        inner = opened(jaxpr)
        reduced = {inner.outvars[i] for i in parts}
        rows = {v for i, v in enumerate(inner.invars) if i in ours}
        needed = {
            a for e in inner.eqns if not by_rows(e) for a in e.invars if not isinstance(a, Literal)
        }
        for eqn in reversed(inner.eqns):
            if any(v in needed for v in eqn.outvars):
                needed |= {a for a in eqn.invars if not isinstance(a, Literal)}
        for eqn in inner.eqns:
            mine = {i for i, a in enumerate(eqn.invars) if not isinstance(a, Literal) and a in rows}
            for v in eqn.outvars:
                if v in reduced:
                    continue
                if mine:
                    assert v.aval.shape not in (full, full[::-1]), f"{where}: {eqn}"
                    rows.add(v)
                elif by_rows(eqn) and v not in needed:
                    assert v.aval.shape != full, f"{where}: {eqn}"
            for body in jaxprs_in_params(eqn.params) if mine else ():
                skip = len(eqn.invars) - len(opened(body).invars)
                offset = skip if eqn.primitive.name == "cond" else 0
                if eqn.primitive.name != "while":
                    look(body, {i - offset for i in mine}, full, where)

    for endpoint, units in plan.placement.units.items():
        blocks = blocks_of(plan, endpoint)
        for unit in units:
            block = unit.blocks[0]
            if block.count == 1:
                continue
            full = plan.main.inputs[block.leaf].shape
            for b in blocks:
                if b.name == unit.name:
                    cut = {i for i, n in enumerate(b.in_names) if f".block{block.index}" in n}
                    parts = [i for i, n in enumerate(b.out_names) if "/all_reduce/" in n]
                    look(b.jaxpr, cut, full, f"{block.name}, level {b.level}", parts)


def reads_only_what_was_there_or_made_before(plan: PServerPlan) -> None:
    """Assert that each block reads state from before the step, and values of earlier blocks.

    Each value is computed by one block.
    """
    for endpoint, programs in plan.servers.items():
        state = set(programs.main.in_names)
        units = plan.placement.units[endpoint]
        grads = {b.gradient(0, 1) for u in units for b in u.blocks}
        made: set[str] = set()
        new: set[str] = set()
        for block in blocks_of(plan, endpoint):
            assert set(block.in_names) <= state | grads | made, block
            assert len(set(block.in_names)) == len(block.in_names), block
            assert not set(block.out_names) & (made | new), block
            made |= set(block.out_names) - state
            new |= set(block.out_names) & state
        assert new == state


def plan_of(
    loss: Callable[..., Any],
    tx: Any,
    params: Any,
    *batch: Any,
    servers: int = 3,
    trainers: int = 1,
    min_block_size: int = 1,
    **options: Any,
) -> PServerPlan:
    """Return the pserver plan of a step from `make_train_step`; its startup program takes the
    params.
    """
    step = dtrans.make_train_step(loss, tx)
    main = dtrans.trace(step, params, jax.eval_shape(tx.init, params), *batch)
    startup = dtrans.trace(init_of(tx), params)
    return flat_options.pserver(
        main,
        startup,
        pservers=endpoints(servers),
        trainers=trainers,
        min_block_size=min_block_size,
        **options,
    )


def communication(program: Any) -> list[str]:
    """Return the communication ops of a program, in order."""
    return [op.type for op in program.ops if op.role in ("rpc", "dist")]


def batch_statistics_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
    """Return new weights, and a running mean of the batch that the forward pass computes."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(((x - x.mean(0)) @ w - y) ** 2)

    value, g = dtrans.value_and_grad(loss)(params["w"])
    stats = 0.5 * params["mean"] + 0.5 * x.mean(0)
    return {"mean": stats, "w": params["w"] - 0.1 * g}, opt_state, value
