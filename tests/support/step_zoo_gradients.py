"""Training steps for one device whose update does not read one gradient of one loss.

`step_zoo` lists all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from step_cases import (
    ADAM,
    CLASSES,
    FEATURES,
    HIDDEN,
    MOMENTUM,
    SGD,
    Tree,
    cases_of,
    drawn,
    entropy,
    labelled,
    mlp,
    mlp_logits,
    stepped,
    update,
    with_key,
)

import dtrans


def _rows(params: Tree, x: Any, y: Any) -> jax.Array:
    """Return the loss of each row."""
    return entropy(mlp_logits(params, x), y)


def _mean(params: Tree, x: Any, y: Any) -> jax.Array:
    return _rows(params, x, y).mean()


def _init(tx: Any, params: Callable[[jax.Array], Tree] = mlp) -> Any:
    def init(key: jax.Array) -> tuple[Tree, Tree]:
        found = params(key)
        return found, tx.init(found)

    return init


def _move(params: Tree, direction: Tree, size: Any) -> Tree:
    return jax.tree.map(lambda p, d: p + size * d, params, direction)


_gradients_of_rows = jax.vmap(jax.grad(_rows), (None, 0, 0))


# -- gradients of rows -----------------------------------------------------------------------------


def _clipped_mean(grads: Tree, rows: int) -> Tree:
    factors = jnp.minimum(1, 0.5 / jax.vmap(optax.tree.norm)(grads))
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / rows, grads)


@stepped(_init(ADAM), labelled)
def clipped_rows(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """DP-SGD without noise: the gradient of each row is clipped."""
    grads = _clipped_mean(_gradients_of_rows(params, x, y), len(x))
    return *update(ADAM, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(SGD), with_key)
def clipped_rows_with_noise(
    params: Tree, opt_state: Tree, x: Any, y: Any, key: Any
) -> tuple[Any, ...]:
    """DP-SGD: the gradient of each row is clipped, and noise is added to their mean."""
    grads = _clipped_mean(_gradients_of_rows(params, x, y), len(x))
    flat, unravel = ravel_pytree(grads)
    grads = unravel(flat + 0.01 * jax.random.normal(key, flat.shape))
    return *update(SGD, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(ADAM), labelled)
def clipped_rows_as_weights(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """DP-SGD without noise, as one gradient of a loss with a constant weight for each row."""
    norms = jax.vmap(optax.tree.norm)(_gradients_of_rows(params, x, y))
    weights = jax.lax.stop_gradient(jnp.minimum(1, 0.5 / norms))
    grads = jax.grad(lambda p: (weights * _rows(p, x, y)).mean())(params)
    return *update(ADAM, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(SGD), labelled)
def empirical_fisher(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """The mean gradient, divided by the root of the mean square of the rows' gradients."""
    of_rows = _gradients_of_rows(params, x, y)
    grads = jax.tree.map(lambda g: g.mean(0) / (jnp.sqrt((g**2).mean(0)) + 0.1), of_rows)
    return *update(SGD, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(MOMENTUM), labelled)
def median_of_gradients(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """The median of the rows' gradients, for each entry (robust aggregation)."""
    grads = jax.tree.map(lambda g: jnp.sort(g, 0)[len(x) // 2], _gradients_of_rows(params, x, y))
    return *update(MOMENTUM, grads, opt_state, params), _mean(params, x, y)


# -- several gradients -----------------------------------------------------------------------------


def _two_losses(params: Tree, x: Any, y: Any) -> jax.Array:
    rows = _rows(params, x, y)
    return jnp.stack([rows.mean(), jnp.square(rows - 1).mean()])


def _without_conflict(grads: Tree) -> Tree:
    """Project each of two gradients onto the normal plane of the other (PCGrad)."""
    one, two = (jax.tree.map(lambda g, i=i: g[i], grads) for i in (0, 1))
    dot = jnp.minimum(optax.tree.vdot(one, two), 0)
    shares = dot / optax.tree.norm(one) ** 2, dot / optax.tree.norm(two) ** 2
    return jax.tree.map(lambda a, b: (1 - shares[0]) * a + (1 - shares[1]) * b, one, two)


@stepped(_init(ADAM), labelled)
def projected_gradients(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """PCGrad: two gradients without their conflict, by `jax.jacrev`."""
    grads = _without_conflict(jax.jacrev(_two_losses)(params, x, y))
    return *update(ADAM, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(ADAM), labelled)
def projected_gradients_by_vjp(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """PCGrad: two gradients without their conflict, by `jax.vmap` of a `jax.vjp`."""
    values, vjp = jax.vjp(lambda p: _two_losses(p, x, y), params)
    grads = _without_conflict(jax.vmap(vjp)(jnp.eye(2))[0])
    return *update(ADAM, grads, opt_state, params), values.sum()


@stepped(_init(ADAM), labelled)
def projected_gradients_as_weights(
    params: Tree, opt_state: Tree, x: Any, y: Any
) -> tuple[Any, ...]:
    """PCGrad, as one gradient of a sum of losses with constant weights."""
    one, two = (jax.grad(lambda p, i=i: _two_losses(p, x, y)[i])(params) for i in (0, 1))
    dot = jnp.minimum(optax.tree.vdot(one, two), 0)
    squares = jnp.stack([optax.tree.norm(g) ** 2 for g in (one, two)])
    weights = jax.lax.stop_gradient(1 - dot / squares)
    grads = jax.grad(lambda p: weights @ _two_losses(p, x, y))(params)
    return *update(ADAM, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(SGD), labelled)
def smallest_combination(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """MGDA: the combination of two gradients with the smallest norm."""
    one, two = (jax.grad(lambda p, i=i: _two_losses(p, x, y)[i])(params) for i in (0, 1))
    apart = _move(two, one, -1)
    share = jnp.clip(optax.tree.vdot(two, apart) / optax.tree.norm(apart) ** 2, 0, 1)
    grads = jax.tree.map(lambda a, b: share * a + (1 - share) * b, one, two)
    return *update(SGD, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(ADAM), labelled)
def added_gradients(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """The sum of the gradients of two losses."""
    one, first = jax.value_and_grad(lambda p: _two_losses(p, x, y)[0])(params)
    two, second = jax.value_and_grad(lambda p: _two_losses(p, x, y)[1])(params)
    return *update(ADAM, jax.tree.map(jnp.add, first, second), opt_state, params), one + two


@stepped(_init(ADAM), labelled)
def preconditioned_layer(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """The gradient of one layer is multiplied by an inverse covariance of its inputs (K-FAC)."""
    loss, grads = jax.value_and_grad(_mean)(params, x, y)
    covariance = x.T @ x / len(x) + 0.1 * jnp.eye(FEATURES)
    grads = {**grads, "w1": jnp.linalg.solve(covariance, grads["w1"])}
    return *update(ADAM, grads, opt_state, params), loss


# -- second derivatives ----------------------------------------------------------------------------


@stepped(_init(SGD), labelled)
def hessian_diagonal(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Hutchinson's estimate of the Hessian's diagonal divides the gradient (AdaHessian)."""
    sign = jax.tree.map(jnp.ones_like, params)
    grads, products = jax.jvp(jax.grad(lambda p: _mean(p, x, y)), (params,), (sign,))
    grads = jax.tree.map(lambda g, h: g / jnp.maximum(jnp.abs(h), 0.1), grads, products)
    return *update(SGD, grads, opt_state, params), _mean(params, x, y)


def _sophia_init(key: jax.Array) -> tuple[Tree, Tree]:
    params = mlp(key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, {"momentum": zeros, "curvature": zeros, "count": jnp.zeros((), jnp.int32)}


@stepped(_sophia_init, labelled)
def sophia(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Sophia-H: Hutchinson's estimate of the Hessian's diagonal in each second step."""
    loss, grads = jax.value_and_grad(_mean)(params, x, y)
    count, old = opt_state["count"], opt_state["curvature"]

    def estimate(_: Any) -> Tree:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(7), count), len(params))
        signs = {
            n: jax.random.rademacher(k, params[n].shape, jnp.float64)
            for n, k in zip(sorted(params), keys, strict=True)
        }
        products = jax.jvp(lambda p: jax.grad(_mean)(p, x, y), (params,), (signs,))[1]
        return jax.tree.map(lambda c, s, h: 0.9 * c + 0.1 * s * h, old, signs, products)

    curvature = jax.lax.cond(count % 2 == 0, estimate, lambda _: old, None)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt_state["momentum"], grads)
    steps = jax.tree.map(
        lambda m, h: jnp.clip(m / jnp.maximum(h, 0.01), -1, 1), momentum, curvature
    )
    state = {"momentum": momentum, "curvature": curvature, "count": count + 1}
    return _move(params, steps, -0.01), state, loss


@stepped(_init(SGD, lambda key: drawn(key, w=(FEATURES, CLASSES))), labelled)
def newton(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Newton's method: a solve with the Hessian of all parameters."""
    flat, unravel = ravel_pytree(params)
    loss = lambda v: entropy(x @ unravel(v)["w"], y).mean() + 0.05 * (v**2).sum()
    direction = jnp.linalg.solve(jax.hessian(loss)(flat), jax.grad(loss)(flat))
    return *update(SGD, unravel(direction), opt_state, params), loss(flat)


@stepped(_init(SGD), labelled)
def hessian_free(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Hessian-free optimization: three iterations of conjugate gradients."""
    loss, grads = jax.value_and_grad(_mean)(params, x, y)
    damped = lambda v: _move(
        jax.jvp(lambda p: jax.grad(_mean)(p, x, y), (params,), (v,))[1], v, 1.0
    )
    direction, _ = jax.scipy.sparse.linalg.cg(damped, grads, maxiter=3, tol=0.0)
    return *update(SGD, direction, opt_state, params), loss


# -- without a gradient ----------------------------------------------------------------------------


def _direction(params: Tree, count: Any) -> Tree:
    flat, unravel = ravel_pytree(params)
    return unravel(jax.random.normal(jax.random.fold_in(jax.random.key(3), count), flat.shape))


@stepped(_init(ADAM), labelled)
def forward_gradient(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Forward gradient: a random direction, times the derivative of the loss along it."""
    direction = _direction(params, opt_state[0].count)
    loss, slope = jax.jvp(lambda p: _mean(p, x, y), (params,), (direction,))
    grads = jax.tree.map(lambda d: slope * d, direction)
    return *update(ADAM, grads, opt_state, params), loss


@stepped(_init(ADAM), labelled)
def zeroth_order(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """MeZO: a random direction, times a difference of two losses."""
    direction = _direction(params, opt_state[0].count)
    ahead, behind = (_mean(_move(params, direction, s), x, y) for s in (0.1, -0.1))
    grads = jax.tree.map(lambda d: (ahead - behind) / 0.2 * d, direction)
    return *update(ADAM, grads, opt_state, params), ahead


def _counted(key: jax.Array) -> tuple[Tree, Tree]:
    return mlp(key), {"count": jnp.zeros((), jnp.int32)}


@stepped(_counted, labelled)
def evolution(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Evolution strategy: six random changes, weighted by their standardized losses."""
    flat, unravel = ravel_pytree(params)
    key = jax.random.fold_in(jax.random.key(5), opt_state["count"])
    changes = jax.random.normal(key, (6, flat.size))
    losses = jax.vmap(lambda d: _mean(unravel(flat + 0.1 * d), x, y))(changes)
    scores = (losses - losses.mean()) / (losses.std() + 0.01)
    state = {"count": opt_state["count"] + 1}
    return unravel(flat - 0.05 * scores @ changes / 6), state, losses.mean()


@stepped(lambda key: (drawn(key, centres=(CLASSES, FEATURES)), ()), labelled)
def k_means(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """k-means on batches: each centre moves to the mean of the rows that are nearest to it."""
    distances = ((x[:, None] - params["centres"]) ** 2).sum(-1)
    nearest = jax.nn.one_hot(distances.argmin(1), CLASSES, dtype=x.dtype)
    counts = nearest.sum(0)[:, None]
    means = (nearest.T @ x) / jnp.maximum(counts, 1)
    centres = jnp.where(counts > 0, 0.5 * params["centres"] + 0.5 * means, params["centres"])
    return {"centres": centres}, opt_state, distances.min(1).mean()


# -- other values, marked as gradients -------------------------------------------------------------


def _marked(grads: Tree, params: Tree) -> Tree:
    """Mark any values as gradients: they are the gradient of their inner product with params."""
    constant = jax.lax.stop_gradient(grads)
    return dtrans.value_and_grad(lambda p: optax.tree.vdot(constant, p))(params)[1]


@stepped(_init(ADAM), labelled)
def marked_clipped_rows(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """DP-SGD without noise, with a mark of the mean of clipped gradients."""
    grads = _clipped_mean(_gradients_of_rows(params, x, y), len(x))
    return *update(ADAM, _marked(grads, params), opt_state, params), _mean(params, x, y)


@stepped(_init(ADAM), labelled)
def marked_projected_gradients(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """PCGrad, with a mark of the combined gradients."""
    grads = _marked(_without_conflict(jax.jacrev(_two_losses)(params, x, y)), params)
    return *update(ADAM, grads, opt_state, params), _mean(params, x, y)


@stepped(_init(SGD), labelled)
def marked_hessian_diagonal(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Gradients divided by Hutchinson's estimate of the Hessian's diagonal, with a mark."""
    sign = jax.tree.map(jnp.ones_like, params)
    grads, products = jax.jvp(jax.grad(lambda p: _mean(p, x, y)), (params,), (sign,))
    grads = jax.tree.map(lambda g, h: g / jnp.maximum(jnp.abs(h), 0.1), grads, products)
    return *update(SGD, _marked(grads, params), opt_state, params), _mean(params, x, y)


@stepped(_init(SGD), labelled)
def marked_forward_gradient(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """A random direction, times the derivative of the loss along it, with a mark."""
    direction = _direction(params, 0)
    loss, slope = jax.jvp(lambda p: _mean(p, x, y), (params,), (direction,))
    grads = _marked(jax.tree.map(lambda d: slope * d, direction), params)
    return *update(SGD, grads, opt_state, params), loss


@stepped(_init(SGD), labelled)
def marked_zeroth_order(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """A random direction, times a difference of two losses, with a mark."""
    direction = _direction(params, 1)
    ahead, behind = (_mean(_move(params, direction, s), x, y) for s in (0.1, -0.1))
    grads = jax.tree.map(lambda d: (ahead - behind) / 0.2 * d, direction)
    return *update(SGD, _marked(grads, params), opt_state, params), ahead


@stepped(_init(SGD), labelled)
def marked_inner_steps(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Reptile, with a mark of the distance to the result of three inner steps."""
    inner = params
    for _ in range(3):
        inner = _move(inner, jax.grad(_mean)(inner, x, y), -0.1)
    grads = _marked(_move(params, inner, -1), params)
    return *update(SGD, grads, opt_state, params), _mean(inner, x, y)


# -- several updates -------------------------------------------------------------------------------


@stepped(_init(MOMENTUM), labelled)
def sharpness_aware(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """SAM: the gradient at parameters that the normalized gradient has moved."""
    loss, first = jax.value_and_grad(_mean)(params, x, y)
    moved = _move(params, first, 0.05 / optax.tree.norm(first))
    return *update(MOMENTUM, jax.grad(_mean)(moved, x, y), opt_state, params), loss


@stepped(_init(MOMENTUM), labelled)
def extragradient(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Extragradient: the gradient after a first step."""
    ahead = _move(params, jax.grad(_mean)(params, x, y), -0.1)
    loss, grads = jax.value_and_grad(_mean)(ahead, x, y)
    return *update(MOMENTUM, grads, opt_state, params), loss


@stepped(_init(ADAM), labelled)
def two_updates(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Two updates of all parameters, with two losses."""
    for k in (0, 1):
        value, grads = jax.value_and_grad(lambda p, k=k: _two_losses(p, x, y)[k])(params)
        params, opt_state = update(ADAM, grads, opt_state, params)
    return params, opt_state, value


@stepped(_init(ADAM), labelled)
def updates_in_a_scan(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Three updates in a scan, each with the full batch."""

    def one(state: Tree, _: None) -> tuple[Tree, jax.Array]:
        loss, grads = jax.value_and_grad(_mean)(state[0], x, y)
        return update(ADAM, grads, state[1], state[0]), loss

    (params, opt_state), losses = jax.lax.scan(one, (params, opt_state), length=3)
    return params, opt_state, losses[-1]


@stepped(_init(SGD), labelled)
def reptile(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Reptile: parameters move towards the result of three inner steps."""
    inner = params
    for _ in range(3):
        inner = _move(inner, jax.grad(_mean)(inner, x, y), -0.1)
    return *update(SGD, _move(params, inner, -1), opt_state, params), _mean(inner, x, y)


@stepped(_init(ADAM), labelled)
def meta_gradient(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """MAML: the gradient of a second loss through an inner step."""

    def outer(p: Tree) -> jax.Array:
        inner = _move(p, jax.grad(lambda q: _two_losses(q, x, y)[0])(p), -0.1)
        return _two_losses(inner, x, y)[1]

    loss, grads = jax.value_and_grad(outer)(params)
    return *update(ADAM, grads, opt_state, params), loss


@stepped(_init(ADAM), labelled)
def meta_gradient_of_first_order(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """First-order MAML: the gradient of a second loss at the result of an inner step."""
    inner = _move(params, jax.grad(lambda q: _two_losses(q, x, y)[0])(params), -0.1)
    loss, grads = jax.value_and_grad(lambda q: _two_losses(q, x, y)[1])(inner)
    return *update(ADAM, grads, opt_state, params), loss


def _trained_rate(key: jax.Array) -> tuple[Tree, Tree]:
    params = mlp(key)
    return {"model": params, "rate": jnp.asarray(0.1)}, ()


@stepped(_trained_rate, labelled)
def trained_rate(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """The learning rate is trained, by the gradient of the loss after an inner step."""

    def after(rate: Any) -> jax.Array:
        model = params["model"]
        return _mean(_move(model, jax.grad(_mean)(model, x, y), -rate), x, y)

    loss, slope = jax.value_and_grad(after)(params["rate"])
    rate = params["rate"] - 0.01 * slope
    model = _move(params["model"], jax.grad(_mean)(params["model"], x, y), -rate)
    return {"model": model, "rate": rate}, opt_state, loss


def _adversaries(key: jax.Array) -> tuple[Tree, Tree]:
    keys = jax.random.split(key)
    params = {
        "generator": drawn(keys[0], w=(CLASSES, FEATURES)),
        "critic": drawn(keys[1], w1=(FEATURES, HIDDEN), w2=(HIDDEN, 1)),
    }
    return params, {n: MOMENTUM.init(p) for n, p in params.items()}


@stepped(_adversaries, labelled)
def adversarial_updates(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """A GAN: the generator's gradient is taken after the update of the critic."""
    score = lambda c, z: jnp.tanh(z @ c["w1"]) @ c["w2"]
    drawn_rows = lambda g: jax.nn.one_hot(y, CLASSES, dtype=x.dtype) @ g["w"]
    judge = lambda c, g: (jax.nn.softplus(-score(c, x)) + jax.nn.softplus(score(c, g))).mean()
    loss, grads = jax.value_and_grad(judge)(params["critic"], drawn_rows(params["generator"]))
    critic, of_critic = update(MOMENTUM, grads, opt_state["critic"], params["critic"])
    fool = lambda g: jax.nn.softplus(-score(critic, drawn_rows(g))).mean()
    generator, of_generator = update(
        MOMENTUM, jax.grad(fool)(params["generator"]), opt_state["generator"], params["generator"]
    )
    state = {"critic": of_critic, "generator": of_generator}
    return {"critic": critic, "generator": generator}, state, loss


CASES = cases_of(__name__)

# steps whose gradients cannot be found
WITHOUT_GRADIENT = (
    *("clipped_rows", "clipped_rows_with_noise", "empirical_fisher", "median_of_gradients"),
    *("projected_gradients", "projected_gradients_by_vjp", "smallest_combination"),
    *("hessian_diagonal", "sophia", "newton", "forward_gradient", "zeroth_order", "evolution"),
    *("k_means", "two_updates", "updates_in_a_scan", "reptile"),
)
# other steps that do not call `dtrans.value_and_grad`
BY_JAX = (
    *("clipped_rows_as_weights", "projected_gradients_as_weights", "added_gradients"),
    *("preconditioned_layer", "hessian_free", "sharpness_aware", "extragradient"),
    *("meta_gradient", "meta_gradient_of_first_order", "trained_rate"),
)
# steps that mark other values as gradients
MARKED = tuple(case.name for case in CASES if case.name.startswith("marked_"))
