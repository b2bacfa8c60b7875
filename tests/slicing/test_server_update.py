"""Test the results of sliced optimizers.

For each optimizer, a test runs the optimize blocks of a plan with three servers and the smallest
possible blocks, one after the other. After each of three steps, the blocks of the servers are
joined and compared with `tx.update` on full arrays, in float64. Other tests check which leaves are
sliced, and that no server creates an array of the full shape of a sliced leaf.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from by_numpy import interpret
from helpers import (
    as_numpy,
    assemble,
    blocks_of,
    distance,
    no_full_shapes,
    plan_of,
    quick,
    reads_only_what_was_there_or_made_before,
    serve,
    start_servers,
)

import dtrans
from dtrans.ops import all_reduce_p


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)

# name: (optimizer, True if it is elementwise, so that no leaf is bound to another)
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), True),
    "momentum": (optax.sgd(0.1, momentum=0.9), True),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
    "adam": (optax.adam(0.1), True),
    "adam_mu_bf16": (optax.adam(0.1, mu_dtype=jnp.bfloat16), True),
    "adamw_schedule": (optax.adamw(SCHEDULE, weight_decay=0.01), True),
    "adamw_masked": (
        optax.adamw(0.1, weight_decay=0.01, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        True,
    ),
    "adamax": (optax.adamax(0.1), True),
    "rmsprop": (optax.rmsprop(0.1, centered=True, momentum=0.9), True),
    "lion": (optax.lion(0.1), True),
    "yogi": (optax.yogi(0.1), True),
    "adadelta": (optax.adadelta(0.1), True),
    "amsgrad": (optax.amsgrad(0.1), True),
    "adagrad": (optax.adagrad(0.1), True),
    "radam": (optax.radam(0.1), True),
    "clip_by_value": (optax.chain(optax.clip(0.5), optax.sgd(0.1)), True),
    "noisy": (optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1)), True),
    "inject": (optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE), True),
    "masked": (
        optax.chain(
            optax.masked(
                optax.sgd(0.5, momentum=0.9), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
            ),
            optax.scale(0.1),
        ),
        True,
    ),
    "multi_transform": (
        optax.multi_transform(
            {"a": optax.adam(0.1), "s": optax.sgd(0.1), "z": optax.set_to_zero()},
            lambda p: {
                k: "z" if k == "frozen" else "a" if x.ndim > 1 else "s" for k, x in p.items()
            },
        ),
        True,
    ),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), False),
    "lookahead_free": (
        optax.chain(
            optax.trace(0.9),
            optax.add_decayed_weights(0.1),
            optax.scale_by_sign(),
            optax.scale(-0.01),
        ),
        True,
    ),
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), False),
    "lamb": (optax.lamb(0.1, weight_decay=0.01), False),
    "lars": (optax.lars(0.1, weight_decay=0.01), False),
    "novograd": (optax.novograd(0.1), False),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), False),
    "muon": (optax.contrib.muon(0.1), False),
    "centralize": (optax.chain(optax.centralize(), optax.sgd(0.1)), False),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), False),
    "multi_steps": (optax.MultiSteps(optax.adam(0.1), 2), False),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 2), False),
    "flatten": (optax.flatten(optax.adam(0.1)), False),
    "sm3": (optax.sm3(0.1), False),
    "ademamix": (optax.contrib.ademamix(0.1), True),
}
ELEMENTWISE = [n for n, (_, free) in OPTIMIZERS.items() if free]
WITHOUT = {
    "sm3": {"scalar"},  # optax.sm3 rejects 0-d leaves
    # creates float64 state for bfloat16 leaves, so no state keeps its type
    "inject": {"half"},
    "noisy": {"half", "kernel", "few", "one_row", "scalar"},  # for speed
}


def leaves(dtype=jnp.float64, without=()):
    """Return leaves of many kinds: one row, fewer rows than servers, no rows, a convolution kernel,
    an uneven last block, bfloat16, frozen."""
    rng = np.random.default_rng(0)
    # The leaves and their blocks have few distinct shapes, because each shape costs a compilation
    # for each primitive.
    shapes = {
        "bias": (4,),
        "embedding": (7, 2),
        "few": (2, 2),
        "frozen": (7, 2),
        "kernel": (3, 1, 2, 2),
        "one_row": (1, 2),
    }
    params = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
    params["half"] = jnp.asarray(rng.normal(size=(3, 2)), jnp.bfloat16)
    params["scalar"] = jnp.asarray(0.7, dtype)
    return {n: p for n, p in params.items() if n not in without}


def loss(params, x):
    """Return a loss that reads the embedding twice (tied weights), and never reads `frozen`."""
    used = {n: p for n, p in params.items() if n != "frozen"}
    total = sum(jnp.sum(p.astype(x.dtype) ** 2) for p in used.values())
    return jnp.mean(x) * (total + jnp.sum(params["embedding"] @ params["embedding"].T))


def gradients(params, seed):
    """Return numbers that tests use as gradients. Those of `frozen` are zero."""
    rng = np.random.default_rng(seed)
    return {
        n: jnp.asarray(rng.normal(size=p.shape) * (n != "frozen"), p.dtype)
        for n, p in params.items()
    }


def mean_of(trees):
    return jax.tree.map(lambda *g: sum(g[1:], start=g[0]) * (1 / len(g)), *trees)


def check(tx, params, plan, trainers, steps=3, rtol=1e-12):
    """Run the plan by hand, and compare with full arrays, state included."""
    names = plan.main.in_names[:-1]  # all arguments except x
    state = tx.init(params)
    held = quick(lambda p: start_servers(plan, p))(params)
    one_round = quick(
        lambda held, grads: serve(
            plan, held, [{f"params/{n}": g for n, g in tree.items()} for tree in grads]
        )
    )

    @quick
    def reference(params, state, grads):
        updates, state = tx.update(mean_of(grads), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        grads = [gradients(params, 10 * step + k) for k in range(trainers)]
        held = one_round(held, grads)
        params, state = reference(params, state, grads)
        whole = dict(
            zip(names, plan.main.flatten(params, state, jnp.ones(2, jnp.float64)), strict=False)
        )
        got = assemble(plan, held, names)
        assert set(got) == set(names) - set(plan.frozen)
        for name, value in got.items():
            limit = 0 if value.dtype == jnp.bfloat16 else rtol
            far = distance(value, whole[name])
            assert far <= limit, f"step {step}: {name} is off by {far:.3g}"


@pytest.fixture(params=OPTIMIZERS)
def case(request):
    with jax.enable_x64(True):
        tx, elementwise = OPTIMIZERS[request.param]
        params = leaves(without=WITHOUT.get(request.param, ()))
        plan = plan_of(loss, tx, params, jnp.ones(2, jnp.float64), trainers=2)
        yield tx, elementwise, params, plan


@pytest.mark.sampled(1)
def test_three_servers_compute_what_whole_arrays_compute(case):
    tx, elementwise, params, plan = case
    check(tx, params, plan, trainers=2)
    reads_only_what_was_there_or_made_before(plan)
    if elementwise:
        assert plan.placement.reasons_unsliced == {}
        counts = {b.leaf.removeprefix("params/"): b.count for b in plan.placement.all_blocks}
        free = {
            "bias": 2,
            "embedding": 3,
            "few": 2,
            "frozen": 3,
            "half": 3,
            "kernel": 3,
            "one_row": 1,
            "scalar": 1,
        }
        assert counts == {n: free[n] for n in params if f"params/{n}" not in plan.frozen}
        no_full_shapes(plan)
    else:
        for leaf, reason in plan.placement.reasons_unsliced.items():
            assert plan.placement.blocks[leaf][0].count == 1
            assert f"{leaf}: whole on {plan.placement.blocks[leaf][0].endpoint}: {reason}" in str(
                plan
            )


class TwoOnTheFirst(dtrans.PSDispatcher):
    """Dispatcher that assigns the first two blocks of a leaf to the first server, and the third to
    the next."""

    def dispatch(self, varlist):
        return [self.eps[b.index // 2] for b in varlist]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["clip_by_global_norm", "lamb", "adafactor", "apply_if_finite"])
def test_a_server_that_has_two_blocks_of_a_leaf_joins_their_parts_of_a_reduction(name):
    with jax.enable_x64(True):
        tx, _ = OPTIMIZERS[name]
        params = leaves()
        plan = plan_of(loss, tx, params, jnp.ones(2, jnp.float64), split_method=TwoOnTheFirst)
        first, second, _ = plan.placement.blocks["params/embedding"]
        assert first.endpoint == second.endpoint
        check(tx, params, plan, trainers=1)


# -- updates that no optimizer has -----------------------------------------------------------------

SHAPES = {"a": (5, 3), "b": (4,), "c": (1, 2), "d": ()}


def bare(update, init):
    return optax.GradientTransformation(init, update)


def zeros_and_count(params):
    return {"count": jnp.zeros((), jnp.int32), "m": jax.tree.map(jnp.zeros_like, params)}


def agree(update, init=zeros_and_count, shapes=SHAPES, servers=3):
    """Check that the plan, run by hand, equals the update on full arrays. Return the plan."""
    with jax.enable_x64(True):
        tx = bare(update, init)
        rng = np.random.default_rng(3)
        params = {n: jnp.asarray(rng.normal(size=s), jnp.float64) for n, s in shapes.items()}
        plan = plan_of(
            lambda p, x: jnp.mean(x) * sum(jnp.sum(q**2) for q in jax.tree.leaves(p)),
            tx,
            params,
            jnp.ones(2),
            servers=servers,
        )
        check(tx, params, plan, trainers=1, steps=2)
        return plan


def per_leaf(fn):
    """Return an update that applies `fn(g, p, m, count) -> (update, m)` to each leaf."""

    def update(grads, state, params):
        out = {n: fn(g, params[n], state["m"][n], state["count"]) for n, g in grads.items()}
        new = {"count": state["count"] + 1, "m": {n: m for n, (_, m) in out.items()}}
        return {n: u for n, (u, _) in out.items()}, new

    return update


def test_a_full_shape_constant_is_read_twice():
    def fn(g, p, m, count):
        i = jnp.ones((), g.dtype) if g.ndim == 0 else jax.lax.broadcasted_iota(g.dtype, g.shape, 0)
        return g * i + p * i + jnp.cumsum(i, 0) * g if g.ndim else g, i * m

    assert agree(per_leaf(fn)).placement.reasons_unsliced == {}


def test_a_shared_array_of_state_is_read_twice():
    def fn(g, p, m, count):
        if not g.ndim:
            return g, m
        i = jnp.cumsum(jnp.full(g.shape, count, g.dtype), 0)
        return g * i + p * i, m * i

    assert agree(per_leaf(fn)).placement.reasons_unsliced == {}


def test_a_table_of_the_leaf_shape_is_cut_with_it():
    tables = {n: np.random.default_rng(4).normal(size=s) for n, s in SHAPES.items()}

    def update(grads, state, params):
        return {n: g * tables[n] + tables[n] for n, g in grads.items()}, state

    plan = agree(update)
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)
    for endpoint, units in plan.placement.units.items():
        of = {b.name: b for b in blocks_of(plan, endpoint)}
        for unit in units:
            if unit.blocks[0].count > 1:
                assert all(
                    np.shape(c)[0] == unit.blocks[0].rows for c in of[unit.name].jaxpr.consts
                )


def test_a_flat_view_of_a_leaf_is_cut_where_its_rows_begin():
    """An entry of `g.ravel()` is a part of a row.

    Rows 1 and 2 of two columns are entries 2 to 5.
    """
    tables = {
        n: np.random.default_rng(4).normal(size=np.prod(s, dtype=int)) for n, s in SHAPES.items()
    }

    def update(grads, state, params):
        flat = {
            n: g.ravel() * tables[n] + jax.lax.iota(g.dtype, g.size) * params[n].ravel()
            for n, g in grads.items()
        }
        return {n: flat[n].reshape(g.shape) for n, g in grads.items()}, state

    plan = agree(update)
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


def test_what_rows_are_reduced_to_meets_rows_of_the_same_number():
    """Column sums of a square leaf have one number for each row.

    All servers have these sums, which are not rows of the leaf.
    """

    def fn(g, p, m, count):
        if g.ndim != 2:
            return g, m
        columns = jnp.sum(g * p, 0)
        return g * columns[:, None], m + jnp.exp(-(columns**2))[:, None] * p

    plan = agree(per_leaf(fn), shapes={"a": (6, 6), "b": (4,)})
    assert plan.placement.reasons_unsliced == {}


def test_noise_is_drawn_for_the_rows_of_a_block():
    def fn(g, p, m, count):
        return g + jax.random.normal(jax.random.fold_in(jax.random.key(3), count), g.shape), m

    plan = agree(per_leaf(fn), shapes={"a": (5, 3)})
    drawn = [v.aval.shape for ep in plan.servers for b in blocks_of(plan, ep) for e in b.inner.eqns
             for v in e.outvars if e.primitive.name == "random_bits"]  # fmt: skip
    assert sum(rows for rows, _ in drawn) == 5 and len(drawn) > 1


def test_a_mask_broadcast_along_rows_and_along_columns():
    def fn(g, p, m, count):
        if g.ndim != 2:
            return g, m
        columns = jnp.broadcast_to(jnp.arange(g.shape[1], dtype=g.dtype), g.shape)
        rows = jnp.broadcast_to(jnp.arange(g.shape[0], dtype=g.dtype)[:, None], g.shape)
        return jnp.where(columns > rows, g, p), m + rows * count

    plan = agree(per_leaf(fn))
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


def test_operands_of_size_one_are_broadcast_in_every_block():
    def fn(g, p, m, count):
        if g.ndim != 2:
            return g, m
        rows = jnp.arange(g.shape[0], dtype=g.dtype)[:, None]
        columns = jnp.arange(g.shape[1], dtype=g.dtype)[None, :] + count
        return g * rows + p * columns, m + rows * columns

    plan = agree(per_leaf(fn))
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


def test_state_that_swaps_places_follows_its_leaf():
    def update(grads, state, params):
        return grads, {"x": state["y"], "y": jax.tree.map(jnp.add, state["x"], grads)}

    zeros = lambda p: jax.tree.map(jnp.zeros_like, p)
    assert agree(update, lambda p: {"x": zeros(p), "y": zeros(p)}).placement.reasons_unsliced == {}


def test_state_kept_under_the_name_of_another_leaf_lives_with_the_leaf_it_is_made_of():
    shapes = {"v": (6, 2), "w": (6, 2)}

    def update(grads, state, params):
        return grads, {"v": grads["w"], "w": grads["v"]}

    plan = agree(update, lambda p: jax.tree.map(jnp.zeros_like, p), shapes)
    assert plan.placement.reasons_unsliced == {}
    for endpoint, units in plan.placement.units.items():
        for block, unit in zip(blocks_of(plan, endpoint), units, strict=True):
            leaf, i = unit.blocks[0].leaf, unit.blocks[0].index
            other = {"params/v": "opt_state/w", "params/w": "opt_state/v"}[leaf]
            assert block.out_names == (f"{leaf}.block{i}", f"{other}.block{i}")


def test_state_that_never_changes_is_cut_with_the_leaf_it_is_read_beside():
    def update(grads, state, params):
        return {n: g * state[n] + state[n] for n, g in grads.items()}, state

    plan = agree(
        update,
        lambda p: jax.tree.map(lambda x: jnp.cumsum(jnp.ones_like(x).ravel()).reshape(x.shape), p),
    )
    assert plan.placement.reasons_unsliced == {}
    assert plan.update.shared_state == ("opt_state/d",)


def test_a_barrier_over_rows_and_a_count_does_not_cut_the_count():
    def update(grads, state, params):
        a, count = jax.lax.optimization_barrier((grads["a"], state["count"]))
        return {**grads, "a": a * count}, {**state, "count": count + 1}

    plan = agree(update)
    assert set(plan.placement.reasons_unsliced) == {"params/a"}


def test_a_number_taken_from_a_row_keeps_the_leaf_whole():
    def update(grads, state, params):
        return grads, {"last": grads["a"][2, 1]}

    plan = agree(update, lambda p: {"last": jnp.zeros((), p["a"].dtype)})
    assert set(plan.placement.reasons_unsliced) == {"params/a"}
    assert plan.placement.reasons_unsliced["params/a"].startswith("slice mixes rows of f64[5,3]")
    assert plan.placement.blocks["params/b"][0].count == 2


# -- that every all_reduce is needed ---------------------------------------------------------------


def reductions(plan):
    """Return every `all_reduce` equation of every server, as (endpoint, parameters)."""
    return [
        (ep, eqn.params)
        for ep in plan.servers
        for block in blocks_of(plan, ep)
        for eqn in block.jaxpr.jaxpr.eqns
        if eqn.primitive is all_reduce_p
    ]


def variants(plan, params, deaf):
    """Yield parameters and gradients that can show that a server misses the result of a reduction.

    They are random, some large and some small. Or the server's own rows are zero, so that its norm
    is zero. Or other servers' rows are not finite.
    """
    rng = np.random.default_rng(7)
    for scale in (1.0, 0.01, 100.0):
        yield (
            params,
            {n: jnp.asarray(rng.normal(size=p.shape) * scale, p.dtype) for n, p in params.items()},
        )
    grads = {n: rng.normal(size=p.shape) for n, p in params.items()}
    for block in plan.placement.all_blocks:
        name = block.leaf.removeprefix("params/")
        rows = slice(None) if block.span is None else slice(block.span.start, block.span.stop)
        at = () if block.span is None else (rows,)
        if block.endpoint == deaf:
            yield {**params, name: params[name].at[at].set(0)}, grads
        changed = np.array(grads[name])
        changed[at] = 0 if block.endpoint == deaf else np.inf
        yield params, {**grads, name: changed}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx,ops",
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)), {"sum"}),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), {"sum"}),
        (optax.apply_if_finite(optax.adam(0.1), 2), {"and", "or"}),
    ],
    ids=["clip_lamb", "adafactor", "apply_if_finite"],
)
@pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)
def test_a_server_that_goes_on_with_its_own_part_of_a_reduction_is_noticed(tx, ops):
    """Test each `all_reduce` of each server, except a reduction whose result the server only
    sends."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(6)
        shapes = {"a": (7, 2), "b": (4,), "one": (1, 3), "scalar": ()}
        params = {n: jnp.asarray(rng.normal(size=s), jnp.float64) for n, s in shapes.items()}
        plan = plan_of(
            lambda p, g: sum(jnp.vdot(p[n], g[n]) for n in p), tx, params, params, servers=3
        )

        def run(params, grads, deaf=None):
            held = start_servers(plan, params, evaluate=interpret)
            for step in range(2):
                # not proportional, since otherwise Adafactor's quotient would be 1 everywhere
                now = {
                    n: g * np.linspace(1, 1 + 4 * step, g.size).reshape(g.shape)
                    for n, g in grads.items()
                }
                held = serve(
                    plan, held, [{f"params/{n}": g for n, g in now.items()}], interpret, deaf
                )
            return held

        found = [(ep, p) for ep, p in reductions(plan) if p["owners"] != (ep,)]
        assert {p["op"] for _, p in found} == ops
        assert {ep for ep, _ in found} == set(plan.servers)
        right = {}
        unnoticed = []
        for ep, p in found:
            for i, (start, grads) in enumerate(variants(plan, params, ep)):
                expected = right.setdefault((ep, i), None) or run(start, grads)
                right[ep, i] = expected
                got = run(start, grads, (ep, p["name"]))
                if any(
                    not np.allclose(
                        as_numpy(got[s][n]), as_numpy(x), rtol=1e-9, atol=0, equal_nan=True
                    )
                    for s, held in expected.items()
                    for n, x in held.items()
                ):
                    break
            else:
                unnoticed.append((ep, p["name"], p["owners"]))
        assert unnoticed == []


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["adam", "lamb", "adafactor"])
def test_each_server_holds_its_share_of_parameters_and_state(name):
    """The share is within 5 % after startup and after steps.

    It includes Adafactor's column sums on every server.
    """
    tx = {"adam": optax.adam(0.1), "lamb": optax.lamb(0.1), "adafactor": optax.adafactor(0.1)}[name]
    shapes = {
        "embedding": (1999, 256),
        "kernel": (96, 3, 3, 64),
        "w1": (256, 512),
        "b1": (512,),
        "w2": (512, 10),
    }
    params = {n: jnp.ones(s) for n, s in shapes.items()}
    batch = {n: jnp.ones(s) for n, s in shapes.items()}
    plan = plan_of(
        lambda p, g: sum(jnp.vdot(p[n], g[n]) for n in p),
        tx,
        params,
        batch,
        servers=4,
        min_block_size=1024,
    )
    assert plan.placement.reasons_unsliced == {}
    job = plan.on_mesh(unsplit_inputs=list(plan.trainer.in_names[len(params) :]))
    state = job.init(params)
    total = sum(x.nbytes for x in jax.tree.leaves((params, tx.init(params))))
    for step in range(3):
        live = {ep: sum(x.nbytes for x in held.values()) for ep, held in state.servers.items()}
        for ep, size in live.items():
            assert abs(size - total / 4) <= 0.05 * total / 4, (
                f"after {step} steps {ep} holds {size} of {total} bytes"
            )
        state, _ = job.step(state, batch)


# -- what random updates have shown (tests/slicing/test_any_update.py)
# -------------------------------------


def test_a_loop_that_carries_rows_and_something_shared_becomes_two():
    """Another leaf, without rows of the first one, reads the shared value."""

    def update(grads, state, params):
        turn = lambda i, c: (jnp.sin(c[0]) + i, c[1] * 2)
        a, n = jax.lax.fori_loop(0, 3, turn, (grads["a"], state["count"]))
        return {**grads, "a": a, "b": grads["b"] * n}, {**state, "count": n + 1}

    plan = agree(update)
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


def test_a_number_of_a_leaf_on_one_server_is_sent_into_a_loop_of_another():
    """`c` has one row, so its norm is a value of one server.

    The loop adds rows of a value that depends on this norm.
    """

    def update(grads, state, params):
        add = jax.lax.broadcasted_iota(jnp.float64, (5, 3), 0) * jnp.sum(grads["c"] ** 2)
        return {
            **grads,
            "a": jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + add, grads["a"]),
        }, state

    plan = agree(update)
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


def test_a_branch_that_gives_rows_or_a_number_of_another_leaf():
    def update(grads, state, params):
        number = jnp.broadcast_to(jnp.sum(grads["c"]) * params["d"], (5, 3))
        a = jax.lax.cond(state["count"] > 0, lambda g, n: g, lambda g, n: n, grads["a"], number)
        return {**grads, "a": a}, {**state, "count": state["count"] + 1}

    plan = agree(update)
    assert plan.placement.reasons_unsliced == {}
    assert plan.placement.blocks["params/a"][0].count == 3


def test_a_parameter_made_of_a_number_of_another_leaf():
    def update(grads, state, params):
        number = jnp.sum(grads["c"]) + grads["d"]
        return {**grads, "a": number - params["a"], "b": number - params["b"]}, state

    assert agree(update).placement.reasons_unsliced == {}


def test_state_that_is_a_number_of_one_leaf_and_then_of_another():
    """The state is on the server of one of the two leaves."""

    def update(grads, state, params):
        return {**grads, "a": grads["a"] * state["x"]}, {
            "x": params["d"],
            "y": jnp.sum(grads["c"]),
            "z": state["y"],
        }

    assert (
        agree(
            update, lambda p: {n: jnp.ones((), p["d"].dtype) for n in "xyz"}
        ).placement.reasons_unsliced
        == {}
    )


def test_stacked_columns_and_counted_rows_stay_cut():
    def fn(g, p, m, count):
        if g.ndim != 2:
            return g, m
        both = jnp.stack([g, p])
        rows = jax.lax.broadcasted_iota(jnp.float64, g.shape, 0)
        return both.sum(0) * rows + jnp.unstack(both, axis=2)[0][1][:, None], jnp.tile(m, (1, 2))[
            :, : g.shape[1]
        ]

    plan = agree(per_leaf(fn))
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.uint8, jnp.float64, jnp.bfloat16], ids=lambda d: d.__name__
)
def test_rows_are_counted_from_those_of_the_whole_leaf(dtype):
    """bfloat16 cannot represent all large integers.

    So positions are rounded once, as for the full array.
    """

    def fn(g, p, m, count):
        if g.ndim < 2:
            return g, m
        rows = jax.lax.broadcasted_iota(dtype, g.shape, 0)
        return g * rows.astype(g.dtype), m + jax.lax.broadcasted_iota(dtype, g.shape, 1).astype(
            g.dtype
        )

    plan = agree(per_leaf(fn), shapes={"w": (700, 2), "c": (1, 2)})
    assert plan.placement.reasons_unsliced == {}
    no_full_shapes(plan)


def test_a_linear_solve_in_an_optimizer_is_not_a_derivative():
    """`jnp.linalg.solve` contains its transpose, which is not a derivative of the loss."""

    def update(grads, state, params):
        k = grads["k"] @ jnp.swapaxes(grads["k"], 1, 2) + jnp.eye(2)
        return {**grads, "k": jnp.linalg.solve(k, params["k"])}, state

    plan = agree(update, shapes={"k": (3, 2, 2), "b": (4,)})
    assert set(plan.placement.reasons_unsliced) == {"params/k"}
    assert re.match(
        r"gather mixes rows of .*\.update\)$", plan.placement.reasons_unsliced["params/k"]
    )


def test_sums_of_small_types_are_rounded_once():
    """If each server rounded its part to bfloat16, the error would be 4e-3."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        params = {"w": jnp.asarray(rng.normal(size=(31, 2)), jnp.bfloat16)}
        tx = optax.stateless_with_tree_map(lambda g, p: -0.1 * g * jnp.vdot(g, g))
        loss = lambda p, x: jnp.mean(x) * jnp.sum(p["w"]).astype(x.dtype)
        plan = plan_of(loss, tx, params, jnp.ones(2), servers=3)
        assert plan.placement.reasons_unsliced == {}
        assert [[r.dtype for r in values] for values in plan.traffic.rounds] == [[jnp.float32]]
        check(tx, params, plan, trainers=1, steps=2)
