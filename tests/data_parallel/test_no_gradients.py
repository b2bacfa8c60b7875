"""Steps whose gradients cannot be found: trainers compute all outputs with exact exchanges."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close

import dtrans
from dtrans.errors import ConfigError, GradientError


pytestmark = pytest.mark.usefixtures("x64")

Tree = Any
ADAM = optax.adam(1e-2)
FEATURES, HIDDEN, CLASSES = 5, 4, 3


def init(key: jax.Array) -> tuple[Tree, Tree]:
    keys = jax.random.split(key)
    params = {
        "layer": {"w": jax.random.normal(keys[0], (FEATURES, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "out": jax.random.normal(keys[1], (HIDDEN, CLASSES)),
        "scale": jnp.ones(()),
    }
    return params, ADAM.init(params)


def batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(rows)
    return draw.normal(size=(rows, FEATURES)), draw.integers(0, CLASSES, rows)


def row_losses(params: Tree, x: Any, y: Any) -> jax.Array:
    hidden = jnp.tanh(x @ params["layer"]["w"] + params["layer"]["b"])
    scores = params["scale"] * hidden @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y)


def loss(params: Tree, x: Any, y: Any) -> jax.Array:
    return row_losses(params, x, y).mean()


def updated(grads: Tree, params: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def clipped_rows(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Clip the gradient of each row by norm (DP-SGD)."""
    grads = jax.vmap(jax.grad(row_losses), (None, 0, 0))(params, x, y)
    factors = jnp.minimum(1, 0.5 / jax.vmap(optax.tree.norm)(grads))
    grads = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(x), grads)
    return *updated(grads, params, opt_state), loss(params, x, y)


def marked_rows(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Run DP-SGD with `dtrans.value_and_grad`, and return the norm of each row's gradient, too."""
    values, grads = jax.vmap(dtrans.value_and_grad(row_losses), (None, 0, 0))(params, x, y)
    norms = jax.vmap(optax.tree.norm)(grads)
    factors = jnp.minimum(1, 0.5 / norms)
    grads = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(x), grads)
    return *updated(grads, params, opt_state), values.mean(), norms


def two_losses(params: Tree, x: Any, y: Any) -> jax.Array:
    rows = row_losses(params, x, y)
    return jnp.stack([rows.mean(), jnp.square(rows).mean()])


def without_conflict(grads: Tree) -> Tree:
    """Project each of two gradients onto the normal plane of the other (PCGrad)."""
    one, two = (jax.tree.map(lambda g, i=i: g[i], grads) for i in (0, 1))
    products = jax.tree.map(jnp.vdot, one, two)
    dot = jnp.minimum(sum(jax.tree.leaves(products)), 0)
    of_one, of_two = optax.tree.norm(one) ** 2, optax.tree.norm(two) ** 2
    return jax.tree.map(lambda a, b: a + b - dot / of_two * b - dot / of_one * a, one, two)


def two_gradients_by_jacrev(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    grads = without_conflict(jax.jacrev(two_losses)(params, x, y))
    return *updated(grads, params, opt_state), loss(params, x, y)


def two_gradients_by_vjp(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    values, vjp = jax.vjp(lambda p: two_losses(p, x, y), params)
    grads = without_conflict(jax.vmap(vjp)(jnp.eye(2))[0])
    return *updated(grads, params, opt_state), values.sum()


def forward_gradient(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    direction = jax.tree.map(jnp.ones_like, params)
    value, slope = jax.jvp(lambda p: loss(p, x, y), (params,), (direction,))
    grads = jax.tree.map(lambda d: slope * d, direction)
    return *updated(grads, params, opt_state), value


def zeroth_order(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    key = jax.random.fold_in(jax.random.key(0), opt_state[0].count)
    direction = jax.tree.map(lambda a: jax.random.normal(key, a.shape), params)
    ahead, behind = (jax.tree.map(lambda p, d, s=s: p + s * d, params, direction) for s in (1, -1))
    slope = (loss(ahead, x, y) - loss(behind, x, y)) / 2
    grads = jax.tree.map(lambda d: slope * d, direction)
    return *updated(grads, params, opt_state), loss(params, x, y)


def hessian_diagonal(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Precondition by Hutchinson's estimate of the Hessian's diagonal (Sophia-H)."""
    sign = jax.tree.map(jnp.ones_like, params)
    grads, products = jax.jvp(jax.grad(lambda p: loss(p, x, y)), (params,), (sign,))
    grads = jax.tree.map(lambda g, h: g / jnp.maximum(jnp.abs(h), 0.1), grads, products)
    return *updated(grads, params, opt_state), loss(params, x, y)


def local_steps(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Run three updates in a scan, with the full batch."""

    def one(state: Tree, _: None) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state[0], x, y)
        return updated(grads, *state), value

    state, values = jax.lax.scan(one, (params, opt_state), length=3)
    return *state, values[-1]


def statistics_only(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Move parameters to the means of the classes, without a derivative."""
    counts = jnp.maximum(jax.nn.one_hot(y, CLASSES).sum(0), 1)
    means = jax.nn.one_hot(y, CLASSES).T @ x[:, :HIDDEN] / counts[:, None]
    params = {**params, "out": 0.9 * params["out"] + 0.1 * means.T}
    return params, opt_state, loss(params, x, y)


STEPS = (
    clipped_rows,
    marked_rows,
    two_gradients_by_jacrev,
    two_gradients_by_vjp,
    forward_gradient,
    zeroth_order,
    hessian_diagonal,
    local_steps,
    statistics_only,
)


@functools.cache
def traced(step: Any) -> tuple[dtrans.Program, dtrans.Program]:
    key = jax.random.key(0)
    return dtrans.trace(step, *jax.eval_shape(init, key), *batch(6)), dtrans.trace(init, key)


@pytest.mark.parametrize("trainers,rows", [(2, 12), (3, 13)])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_job_has_the_results_of_one_device(step: Any, trainers: int, rows: int) -> None:
    key, arrays = jax.random.key(0), batch(rows)
    job = dtrans.nccl2(*traced(step), trainers=trainers).simulate()
    state, expected = job.init(key), init(key)
    for _ in range(2):
        state, *results = job.step(state, *arrays)
        *expected, wanted = jax.jit(step)(*expected, *arrays)[:3]
        tree_close((job.params(state), job.opt_state(state)), tuple(expected), 1e-11)
        np.testing.assert_allclose(jax.tree.leaves(results)[0], wanted, rtol=1e-11)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_plan_computes_the_step(step: Any) -> None:
    plan = dtrans.nccl2(*traced(step), trainers=2)
    assert "computes the step" in str(plan.verify())


def test_the_plan_says_why_and_exchanges_as_many_bytes_as_gradients_have() -> None:
    plan = dtrans.nccl2(*traced(clipped_rows), trainers=2)
    reason = "no gradients are reduced: no gradient was found in clipped_rows"
    assert reason in str(plan) and not plan.buckets
    params = jax.eval_shape(init, jax.random.key(0))[0]
    (sent,) = plan.bytes_per_step.values()
    sizes = [8 * x.size for x in jax.tree.leaves(params)]
    assert sent == sum(sizes) + 8  # the loss, too


@pytest.mark.parametrize(
    "option,text",
    [
        ({"num_micro_batch": 2}, "leave out num_micro_batch=2"),
        ({"local_sgd": 2}, "leave out local_sgd=2"),
        ({"batch": "local"}, "pass batch='exact'"),
        ({"reduce": dtrans.Reduce(compress="bf16")}, "leave out compress='bf16'"),
        ({"trainers": 4, "trainers_per_node": 2}, "leave out trainers_per_node=2"),
    ],
)
def test_options_that_need_gradients_are_refused_by_name(option: Any, text: str) -> None:
    with pytest.raises(GradientError, match=f"no gradient was found .* Or {text}$"):
        dtrans.nccl2(*traced(forward_gradient), **{"trainers": 2, **option})


def sharded(step: Any, stage: int, ranks: int, **options: Any) -> dtrans.ShardingPlan:
    slices = dtrans.Slicing(min_slice_size=0)
    return dtrans.sharding(*traced(step), degree=ranks, stage=stage, slices=slices, **options)


@pytest.mark.parametrize("stage,ranks,rows", [(1, 2, 12), (3, 3, 13)])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_ranks_with_slices_of_state_have_the_results_of_one_device(
    step: Any, stage: int, ranks: int, rows: int
) -> None:
    key, arrays = jax.random.key(0), batch(rows)
    job = sharded(step, stage, ranks).simulate()
    state, expected = job.init(key), init(key)
    for _ in range(2):
        state, *results = job.step(state, *arrays)
        *expected, wanted = jax.jit(step)(*expected, *arrays)[:3]
        tree_close((job.params(state), job.opt_state(state)), tuple(expected), 1e-11)
        np.testing.assert_allclose(jax.tree.leaves(results)[0], wanted, rtol=1e-11)


def test_ranks_store_slices_by_stage() -> None:
    one, three = (sharded(clipped_rows, stage, 2) for stage in (1, 3))
    names = ("params/layer/w", "opt_state/0/mu/layer/w")
    shapes = [tuple(plan.program.inputs[n].shape for n in names) for plan in (one, three)]
    # 5 rows in slices of 3; the last slice has one row of padding
    assert shapes == [((5, 4), (3, 4)), ((3, 4), (3, 4))]
    assert three.memory()["params"] < one.memory()["params"]
    assert three.memory()["opt_state"] == one.memory()["opt_state"]
    assert "no gradients are reduced: no gradient was found in clipped_rows" in str(three)
    assert "params/scale is complete on every rank: it has no dimensions" in str(three)


def test_moments_in_slices_need_only_slices_of_the_sums() -> None:
    """Ranks receive their slices of the reduced sums, as with gradients that are found."""
    plan = sharded(clipped_rows, 3, 2)
    traffic = plan.traffic()
    params = jax.eval_shape(init, jax.random.key(0))[0]
    # each of the three matrices and vectors, with the padding of 5 rows to 6
    sizes = [
        8 * (x.size + (4 if x.shape == (5, 4) else 0)) for x in jax.tree.leaves(params) if x.ndim
    ]
    assert traffic["reduce_scatter", "shard"] == traffic["all_gather", "shard"] == sum(sizes)
    assert traffic["all_reduce", "shard"] == 2 * 8  # the gradient of `scale`, and the loss


def test_each_device_has_a_slice() -> None:
    key, arrays = jax.random.key(0), batch(12)
    job = sharded(clipped_rows, 3, 2).on_mesh()
    state, loss = job.step(job.init(key), *arrays)
    w = state.params["params/layer/w"]
    assert {shard.data.shape for shard in w.addressable_shards} == {(3, 4)}
    params, opt_state, wanted = jax.jit(clipped_rows)(*init(key), *arrays)
    tree_close((job.params(state), job.opt_state(state)), (params, opt_state), 1e-11)
    np.testing.assert_allclose(loss, wanted, rtol=1e-11)
    # a state of one device, in a job of another stage
    other = sharded(clipped_rows, 1, 3).on_mesh()
    state, loss = other.step(other.state_of(params, opt_state), *arrays)
    params, _, wanted = jax.jit(clipped_rows)(params, opt_state, *arrays)
    tree_close(other.params(state), params, 1e-11)
    np.testing.assert_allclose(loss, wanted, rtol=1e-11)


@pytest.mark.parametrize(
    "option,text",
    [
        ({"replicas": 2}, "leave out replicas=2"),
        ({"precision": "bf16"}, "leave out precision='bf16'"),
        ({"slices": dtrans.Slicing("greedy_even")}, "leave out partition='greedy_even'"),
        ({"num_micro_batch": 2}, "leave out num_micro_batch=2"),
        ({"batch": "local"}, "pass batch='exact'"),
    ],
)
def test_options_of_ranks_that_need_gradients_are_refused_by_name(option: Any, text: str) -> None:
    with pytest.raises(GradientError, match=f"no gradient was found .* Or {text}$"):
        dtrans.sharding(*traced(forward_gradient), **{"degree": 2, **option})


def test_a_frozen_leaf_may_be_beside_gradients_of_rows() -> None:
    tx = optax.multi_transform(
        {"adam": ADAM, "frozen": optax.set_to_zero()},
        {"layer": "adam", "out": "adam", "scale": "frozen"},
    )

    def step(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
        grads = jax.vmap(jax.grad(row_losses), (None, 0, 0))(params, x, y)
        grads = jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1).mean(0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss(params, x, y)

    def start(key: jax.Array) -> tuple[Tree, Tree]:
        params, _ = init(key)
        return params, tx.init(params)

    key, arrays = jax.random.key(0), batch(12)
    main = dtrans.trace(step, *jax.eval_shape(start, key), *batch(6))
    job = dtrans.nccl2(main, dtrans.trace(start, key), trainers=2).simulate()
    state, _ = job.step(job.init(key), *arrays)
    tree_close(job.params(state), jax.jit(step)(*start(key), *arrays)[0], 1e-11)


@pytest.mark.parametrize("strategy", ["nccl2", "sharding"])
def test_state_with_an_entry_for_each_row_is_refused(strategy: str) -> None:
    def step(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
        params, adam, value = two_gradients_by_jacrev(params, opt_state["adam"], x, y)
        return params, {"adam": adam, "last": row_losses(params, x, y)}, value

    def start(key: jax.Array) -> tuple[Tree, Tree]:
        params, adam = init(key)
        return params, {"adam": adam, "last": jnp.zeros(6)}

    key = jax.random.key(0)
    main = dtrans.trace(step, *jax.eval_shape(start, key), *batch(6))
    plan = {
        "nccl2": functools.partial(dtrans.nccl2, trainers=2),
        "sharding": functools.partial(dtrans.sharding, degree=2),
    }
    text = (
        r"opt_state/last in the result of step is f64\[6\] for one batch size and f64\[12\] for "
        "another; do not store arrays with an entry for each row of the batch in the state"
    )
    with pytest.raises(GradientError, match=text):
        plan[strategy](main, dtrans.trace(start, key))


def test_a_check_of_gradients_is_refused_without_gradients() -> None:
    plan = dtrans.nccl2(*traced(forward_gradient), trainers=2)
    with pytest.raises(ConfigError, match="on_nonfinite='error': .*forward_gradient.*cannot be"):
        plan.on_mesh(on_nonfinite="error")


def marked(grads: Tree, params: Tree) -> Tree:
    """Mark any values as gradients: they are the gradient of their inner product with params."""
    constant = jax.lax.stop_gradient(grads)
    return dtrans.value_and_grad(lambda p: optax.tree.vdot(constant, p))(params)[1]


@pytest.mark.parametrize(
    "step",
    [
        clipped_rows,
        two_gradients_by_jacrev,
        forward_gradient,
        zeroth_order,
        pytest.param(hessian_diagonal, marks=pytest.mark.soak),
    ],
    ids=lambda step: step.__name__,
)
def test_the_remedy_for_servers_works(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers refuse the step, and take the step in which the gradients have marks."""
    servers = {"pservers": "127.0.0.1:1,127.0.0.1:2", "trainers": 2}
    remedy = (
        r"optax.tree.vdot\(jax.lax.stop_gradient\(grads\), p\)\)\(params\), where params has leaves of "
        "the step's first argument. Or use dtrans.nccl2 "
    )
    with pytest.raises(GradientError, match=remedy):
        dtrans.pserver(*traced(step), **servers)

    key, arrays = jax.random.key(0), batch(12)
    *expected, wanted = jax.jit(step)(*init(key), *arrays)[:3]
    unmarked = updated
    with_marks = lambda grads, params, state: unmarked(marked(grads, params), params, state)
    monkeypatch.setitem(globals(), "updated", with_marks)
    traced.cache_clear()
    job = dtrans.pserver(*traced(step), **servers).on_mesh()
    traced.cache_clear()
    state, loss = job.step(job.init(key), *arrays)
    tree_close((job.params(state), job.opt_state(state)), tuple(expected), 1e-11)
    np.testing.assert_allclose(loss, wanted, rtol=1e-11)


def test_results_are_not_merged_by_a_user() -> None:
    with pytest.raises(ConfigError, match="merge=.* needs batch='local'"):
        dtrans.nccl2(*traced(clipped_rows), trainers=2, batch=dtrans.Batch(merge={"loss": "sum"}))
