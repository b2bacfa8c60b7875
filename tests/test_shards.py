"""The slicing of optimizers, shown by numbers: for each optimizer a plan with three servers and blocks as
small as they get is carried out by hand, one optimize block after the other, and what the servers hold is put
together and compared with `tx.update` on whole arrays, over three steps in float64. The structure is tested
beside it: which leaves are cut, and that no server makes an array of a cut leaf's full shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assemble, blocks_of, distance, plan_of, quick, serve, start_servers
from hypothesis import given, strategies as st

from dtrans._jax import equations


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)

# name: (optimizer, whether it is elementwise, so that each leaf must be free)
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), True),
    "momentum": (optax.sgd(0.1, momentum=0.9), True),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
    "adam": (optax.adam(0.1), True),
    "adam_mu_bf16": (optax.adam(0.1, mu_dtype=jnp.bfloat16), True),
    "adamw_schedule": (optax.adamw(SCHEDULE, weight_decay=0.01), True),
    "adamw_masked": (optax.adamw(0.1, weight_decay=0.01, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), True),
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
            optax.masked(optax.sgd(0.5, momentum=0.9), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
            optax.scale(0.1),
        ),
        True,
    ),
    "multi_transform": (
        optax.multi_transform(
            {"a": optax.adam(0.1), "s": optax.sgd(0.1), "z": optax.set_to_zero()},
            lambda p: {k: "z" if k == "frozen" else "a" if x.ndim > 1 else "s" for k, x in p.items()},
        ),
        True,
    ),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), False),
    "lookahead_free": (
        optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale_by_sign(), optax.scale(-0.01)),
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
    "sm3": {"scalar"},  # optax.sm3 does not take 0-d leaves
    "inject": {"half"},  # it makes float64 state of bfloat16 leaves, so that no state can stay as it is
    "noisy": {"half", "kernel", "few", "one_row", "scalar"},  # for speed
}


def leaves(dtype=jnp.float64, without=()):
    """One row, fewer rows than servers, no rows, a conv kernel, an uneven last block, bf16, frozen."""
    rng = np.random.default_rng(0)
    # few distinct shapes, of blocks too: each costs a compilation for each primitive
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
    """The embedding is used twice (tied), and `frozen` not at all."""
    used = {n: p for n, p in params.items() if n != "frozen"}
    total = sum(jnp.sum(p.astype(x.dtype) ** 2) for p in used.values())
    return jnp.mean(x) * (total + jnp.sum(params["embedding"] @ params["embedding"].T))


def gradients(params, seed):
    """Numbers to be gradients; those of `frozen` are zero."""
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=p.shape) * (n != "frozen"), p.dtype) for n, p in params.items()}


def mean_of(trees):
    return jax.tree.map(lambda *g: sum(g[1:], start=g[0]) * (1 / len(g)), *trees)


def check(tx, params, plan, trainers, steps=3, rtol=1e-12):
    """Carry the plan out by hand and compare with whole arrays, state included."""
    names = plan.main.in_names[:-1]  # all but x
    state = tx.init(params)
    held = quick(lambda p: start_servers(plan, p))(params)
    one_round = quick(
        lambda held, grads: serve(plan, held, [{f"params/{n}": g for n, g in tree.items()} for tree in grads])
    )

    @quick
    def reference(params, state, grads):
        updates, state = tx.update(mean_of(grads), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        grads = [gradients(params, 10 * step + k) for k in range(trainers)]
        held = one_round(held, grads)
        params, state = reference(params, state, grads)
        whole = dict(zip(names, plan.main.flatten(params, state, jnp.ones(2, jnp.float64)), strict=False))
        got = assemble(plan, held, names)
        assert set(got) == set(names) - set(plan.held)
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


def test_three_servers_compute_what_whole_arrays_compute(case):
    tx, elementwise, params, plan = case
    check(tx, params, plan, trainers=2)
    reads_only_what_was_there_or_made_before(plan)
    if elementwise:
        assert plan.placement.whole == {}
        counts = {b.leaf.removeprefix("params/"): b.count for b in plan.placement.table}
        free = {"bias": 2, "embedding": 3, "few": 2, "frozen": 3, "half": 3, "kernel": 3, "one_row": 1, "scalar": 1}
        assert counts == {n: free[n] for n in params}
        no_full_shapes(plan)
    else:
        for leaf, reason in plan.placement.whole.items():
            assert plan.placement.blocks[leaf][0].count == 1
            assert f"{leaf}: whole on {plan.placement.blocks[leaf][0].endpoint}: {reason}" in str(plan)


def no_full_shapes(plan):
    """No equation of a cut leaf's block makes an array of the leaf's full shape (noise is the exception)."""
    for endpoint, units in plan.placement.units.items():
        of = {b.name: b for b in blocks_of(plan, endpoint)}
        for unit in units:
            block = unit.blocks[0]
            if block.count == 1:
                continue
            full = plan.main.inputs[block.leaf].shape
            for eqn in equations(of[unit.name].jaxpr):
                if eqn.primitive.name == "random_bits":
                    continue
                for v in eqn.outvars:
                    assert v.aval.shape != full, f"{block.name}: {eqn}"


def reads_only_what_was_there_or_made_before(plan):
    """State is that of before the step, whoever makes the new one; other values are made once, by a block before."""
    for endpoint, programs in plan.servers.items():
        state = set(programs.main.in_names)
        grads = {b.gradient(k, plan.trainers) for u in plan.placement.units[endpoint] for b in u.blocks for k in (0, 1)}
        made, new = set(), set()
        for block in blocks_of(plan, endpoint):
            assert set(block.in_names) <= state | grads | made, block
            assert not set(block.out_names) & (made | new), block
            made |= set(block.out_names) - state
            new |= set(block.out_names) & state
        assert new == state


# -- updates that no optimizer has -----------------------------------------------------------------

SHAPES = {"a": (5, 3), "b": (4,), "c": (1, 2), "d": ()}


def bare(update, init):
    return optax.GradientTransformation(init, update)


def zeros_and_count(params):
    return {"count": jnp.zeros((), jnp.int32), "m": jax.tree.map(jnp.zeros_like, params)}


def agree(update, init=zeros_and_count, shapes=SHAPES, servers=3):
    """The plan by hand equals the update on whole arrays; returns the plan."""
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
    """An update of `fn(g, p, m, count) -> (update, m)`, leaf by leaf."""

    def update(grads, state, params):
        out = {n: fn(g, params[n], state["m"][n], state["count"]) for n, g in grads.items()}
        new = {"count": state["count"] + 1, "m": {n: m for n, (_, m) in out.items()}}
        return {n: u for n, (u, _) in out.items()}, new

    return update


def test_a_full_shape_constant_is_read_twice():
    def fn(g, p, m, count):
        i = jnp.ones((), g.dtype) if g.ndim == 0 else jax.lax.broadcasted_iota(g.dtype, g.shape, 0)
        return g * i + p * i + jnp.cumsum(i, 0) * g if g.ndim else g, i * m

    assert agree(per_leaf(fn)).placement.whole == {}


def test_a_shared_array_of_state_is_read_twice():
    def fn(g, p, m, count):
        if not g.ndim:
            return g, m
        i = jnp.cumsum(jnp.full(g.shape, count, g.dtype), 0)
        return g * i + p * i, m * i

    assert agree(per_leaf(fn)).placement.whole == {}


def test_a_table_of_the_leaf_shape_is_cut_with_it():
    tables = {n: np.random.default_rng(4).normal(size=s) for n, s in SHAPES.items()}

    def update(grads, state, params):
        return {n: g * tables[n] + tables[n] for n, g in grads.items()}, state

    plan = agree(update)
    assert plan.placement.whole == {}
    no_full_shapes(plan)
    for endpoint, units in plan.placement.units.items():
        of = {b.name: b for b in blocks_of(plan, endpoint)}
        for unit in units:
            if unit.blocks[0].count > 1:
                assert all(np.shape(c)[0] == unit.blocks[0].rows for c in of[unit.name].jaxpr.consts)


def test_a_mask_broadcast_along_rows_and_along_columns():
    def fn(g, p, m, count):
        if g.ndim != 2:
            return g, m
        columns = jnp.broadcast_to(jnp.arange(g.shape[1], dtype=g.dtype), g.shape)
        rows = jnp.broadcast_to(jnp.arange(g.shape[0], dtype=g.dtype)[:, None], g.shape)
        return jnp.where(columns > rows, g, p), m + rows * count

    plan = agree(per_leaf(fn))
    assert plan.placement.whole == {}
    no_full_shapes(plan)


def test_operands_of_size_one_are_broadcast_in_every_block():
    def fn(g, p, m, count):
        if g.ndim != 2:
            return g, m
        rows = jnp.arange(g.shape[0], dtype=g.dtype)[:, None]
        columns = jnp.arange(g.shape[1], dtype=g.dtype)[None, :] + count
        return g * rows + p * columns, m + rows * columns

    plan = agree(per_leaf(fn))
    assert plan.placement.whole == {}
    no_full_shapes(plan)


def test_state_that_swaps_places_follows_its_leaf():
    def update(grads, state, params):
        return grads, {"x": state["y"], "y": jax.tree.map(jnp.add, state["x"], grads)}

    zeros = lambda p: jax.tree.map(jnp.zeros_like, p)
    assert agree(update, lambda p: {"x": zeros(p), "y": zeros(p)}).placement.whole == {}


def test_state_kept_under_the_name_of_another_leaf_lives_with_the_leaf_it_is_made_of():
    shapes = {"v": (6, 2), "w": (6, 2)}

    def update(grads, state, params):
        return grads, {"v": grads["w"], "w": grads["v"]}

    plan = agree(update, lambda p: jax.tree.map(jnp.zeros_like, p), shapes)
    assert plan.placement.whole == {}
    for endpoint, units in plan.placement.units.items():
        for block, unit in zip(blocks_of(plan, endpoint), units, strict=True):
            leaf, i = unit.blocks[0].leaf, unit.blocks[0].index
            other = {"params/v": "opt_state/w", "params/w": "opt_state/v"}[leaf]
            assert block.out_names == (f"{leaf}.block{i}", f"{other}.block{i}")


def test_state_that_never_changes_is_cut_with_the_leaf_it_is_read_beside():
    def update(grads, state, params):
        return {n: g * state[n] + state[n] for n, g in grads.items()}, state

    plan = agree(update, lambda p: jax.tree.map(lambda x: jnp.cumsum(jnp.ones_like(x).ravel()).reshape(x.shape), p))
    assert plan.placement.whole == {}
    assert plan.shared_state == ("opt_state/d",)


def test_a_barrier_over_rows_and_a_count_does_not_cut_the_count():
    def update(grads, state, params):
        a, count = jax.lax.optimization_barrier((grads["a"], state["count"]))
        return {**grads, "a": a * count}, {**state, "count": count + 1}

    plan = agree(update)
    assert set(plan.placement.whole) == {"params/a"}


def test_a_number_taken_from_a_row_keeps_the_leaf_whole():
    def update(grads, state, params):
        return grads, {"last": grads["a"][2, 1]}

    plan = agree(update, lambda p: {"last": jnp.zeros((), p["a"].dtype)})
    assert set(plan.placement.whole) == {"params/a"}
    assert plan.placement.whole["params/a"].endswith(" mixes rows of f64[5,3]")
    assert plan.placement.blocks["params/b"][0].count == 2


# a grammar of updates: expressions of one leaf's g, p, m, of the count, of shared arrays, of another leaf

UNARY = ["sin", "neg", "tanh", "sum", "sum0", "sum1", "cumsum", "reverse", "sort", "gram", "square"]
BINARY = ["add", "mul", "max", "where"]
ATOMS = ["g", "p", "m", "count", "iota", "table", "row", "one", "other"]
# atoms and elementwise operations are drawn more often than what mixes rows, or every leaf would be whole
EXPRESSIONS = st.recursive(
    st.sampled_from(["g", "p", "m", "g", "p", "m", *ATOMS]),
    lambda x: st.one_of(
        st.tuples(st.sampled_from(BINARY), x, x),
        st.tuples(st.sampled_from(["sin", "neg", "tanh", "square"]), x),
        st.tuples(st.sampled_from(UNARY), x),
    ),
    max_leaves=7,
)
MIXES = {"sum", "sum0", "sum1", "cumsum", "reverse", "sort", "gram", "other"}


def value(expression, env, like):
    """The value of an expression, of the shape of `like`."""
    if isinstance(expression, str):
        return jnp.broadcast_to(env[expression], like.shape)
    op, *operands = expression
    x, *rest = (value(e, env, like) for e in operands)
    if op in BINARY:
        (y,) = rest
        return {"add": jnp.add, "mul": jnp.multiply, "max": jnp.maximum}.get(
            op, lambda x, y: jnp.where(x > y, x, 0.5 * y)
        )(x, y)
    if op in ("sin", "neg", "tanh", "square"):
        return {"sin": jnp.sin, "neg": jnp.negative, "tanh": jnp.tanh, "square": lambda x: jnp.tanh(x) ** 2}[op](x)
    if not x.ndim:
        return x
    made = {
        "sum": lambda x: jnp.tanh(jnp.sum(x)),
        "sum0": lambda x: jnp.tanh(jnp.sum(x, 0, keepdims=True)),
        "sum1": lambda x: jnp.tanh(jnp.sum(x, -1, keepdims=True)),
        "cumsum": lambda x: jnp.cumsum(x, 0),
        "reverse": lambda x: jnp.flip(x, 0),
        "sort": lambda x: jnp.sort(x, 0),
        "gram": lambda x: jnp.tanh(x @ x.T) @ x if x.ndim == 2 else jnp.dot(x, x) * x,
    }[op](x)
    return jnp.broadcast_to(made, like.shape)


def words(expression):
    return {expression} if isinstance(expression, str) else {expression[0]}.union(*map(words, expression[1:]))


@given(st.fixed_dictionaries({n: st.tuples(EXPRESSIONS, EXPRESSIONS) for n in SHAPES}), st.integers(1, 4))
def test_any_update_gives_the_same_on_servers(expressions, servers):
    tables = {n: np.random.default_rng(5).normal(size=s) for n, s in SHAPES.items()}

    def update(grads, state, params):
        updates, moments = {}, {}
        for n, g in grads.items():
            other = grads["b" if n == "a" else "a"]
            env = {
                "g": g,
                "p": params[n],
                "m": state["m"][n],
                "count": state["count"].astype(g.dtype),
                "iota": jax.lax.broadcasted_iota(g.dtype, g.shape, 0) if g.ndim else jnp.ones((), g.dtype),
                "table": tables[n],
                "row": jnp.arange(g.shape[-1] if g.ndim else 1, dtype=g.dtype).reshape(-1)[
                    : g.shape[-1] if g.ndim else None
                ],
                "one": jnp.ones((), g.dtype),
                "other": other[(0,) * other.ndim],
            }
            if not g.ndim:
                env["row"] = env["one"]
            updates[n], moments[n] = (value(e, env, g) for e in expressions[n])
        return updates, {"count": state["count"] + 1, "m": moments}

    plan = agree(update, servers=servers)
    for n, both in expressions.items():
        read_by_another = any(
            "other" in words(e) for m in expressions if ("b" if m == "a" else "a") == n for e in expressions[m]
        )
        if SHAPES[n] and not MIXES & (words(both[0]) | words(both[1])) and not read_by_another:
            assert f"params/{n}" not in plan.placement.whole


# -- what random updates have shown (tests/test_any_update.py) -------------------------------------


def test_a_loop_that_carries_rows_and_something_shared_becomes_two():
    """What is shared is read by another leaf, which has no rows of the first."""

    def update(grads, state, params):
        turn = lambda i, c: (jnp.sin(c[0]) + i, c[1] * 2)
        a, n = jax.lax.fori_loop(0, 3, turn, (grads["a"], state["count"]))
        return {**grads, "a": a, "b": grads["b"] * n}, {**state, "count": n + 1}

    plan = agree(update)
    assert plan.placement.whole == {}
    no_full_shapes(plan)
