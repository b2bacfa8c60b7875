"""Steps whose gradients cannot be found: nccl2 mode computes all outputs with exact exchanges."""

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
    """DP-SGD: clip the gradient of each row by norm."""
    grads = jax.vmap(jax.grad(row_losses), (None, 0, 0))(params, x, y)
    factors = jnp.minimum(1, 0.5 / jax.vmap(optax.tree.norm)(grads))
    grads = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(x), grads)
    return *updated(grads, params, opt_state), loss(params, x, y)


def marked_rows(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """DP-SGD with `dtrans.value_and_grad`, and the norm of each row's gradient as a result."""
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
    """Hutchinson's estimate of the Hessian's diagonal, as a preconditioner (Sophia-H)."""
    sign = jax.tree.map(jnp.ones_like, params)
    grads, products = jax.jvp(jax.grad(lambda p: loss(p, x, y)), (params,), (sign,))
    grads = jax.tree.map(lambda g, h: g / jnp.maximum(jnp.abs(h), 0.1), grads, products)
    return *updated(grads, params, opt_state), loss(params, x, y)


def local_steps(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Three updates in a scan, with the full batch."""

    def one(state: Tree, _: None) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state[0], x, y)
        return updated(grads, *state), value

    state, values = jax.lax.scan(one, (params, opt_state), length=3)
    return *state, values[-1]


def statistics_only(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """No derivative: parameters follow the means of the classes."""
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


def test_other_strategies_name_this_one() -> None:
    programs = traced(forward_gradient)
    remedy = "use dtrans.nccl2, which needs no gradients"
    with pytest.raises(GradientError, match=remedy):
        dtrans.pserver(*programs, pservers="a:1,b:1", trainers=2)
    with pytest.raises(GradientError, match=remedy):
        dtrans.sharding(*programs, degree=2, stage=2)


def test_results_are_not_merged_by_a_user() -> None:
    with pytest.raises(ConfigError, match="merge=.* needs batch='local'"):
        dtrans.nccl2(*traced(clipped_rows), trainers=2, batch=dtrans.Batch(merge={"loss": "sum"}))
