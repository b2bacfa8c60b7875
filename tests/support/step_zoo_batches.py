"""Training steps for one device; in each, rows of a batch interact in another way.

Examples are means, statistics, keys and pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from step_cases import (
    ADAM,
    CLASSES,
    CLIPPED_ADAMW,
    FEATURES,
    HIDDEN,
    LAMB,
    LENGTH,
    MOMENTUM,
    SGD,
    VOCABULARY,
    Tree,
    beside,
    binary,
    cases_of,
    deep,
    drawn,
    entropy,
    labelled,
    masked,
    mlp,
    mlp_hidden,
    mlp_logits,
    pairs,
    plain,
    stepped,
    trained,
    update,
    weighted,
    with_key,
    without_last_bias,
)

import dtrans


# -- weights of examples ---------------------------------------------------------------------------


@trained(mlp, labelled, SGD)
def mean_loss(params: Tree, x: Any, y: Any) -> jax.Array:
    """The mean over rows."""
    return entropy(mlp_logits(params, x), y).mean()


@trained(mlp, labelled, ADAM)
def picked_by_row_number(params: Tree, x: Any, y: Any) -> jax.Array:
    """Cross entropy by hand: `logp[arange(rows), y]`."""
    return -jax.nn.log_softmax(mlp_logits(params, x))[jnp.arange(len(y)), y].mean()


@trained(mlp, labelled, optax.sgd(0.01))
def sum_loss(params: Tree, x: Any, y: Any) -> jax.Array:
    """The sum over rows."""
    return entropy(mlp_logits(params, x), y).sum()


@trained(mlp, masked, ADAM)
def masked_mean(params: Tree, x: Any, y: Any, mask: Any) -> jax.Array:
    """The mean over the rows that a mask selects; their number differs between parts of a batch."""
    return (entropy(mlp_logits(params, x), y) * mask).sum() / mask.sum()


@trained(mlp, masked, MOMENTUM)
def masked_mean_and_penalty(params: Tree, x: Any, y: Any, mask: Any) -> jax.Array:
    """A masked mean plus a weight penalty, which must be added once."""
    masked = (entropy(mlp_logits(params, x), y) * mask).sum() / jnp.maximum(mask.sum(), 1)
    return masked + 0.01 * sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


@trained(mlp, weighted, MOMENTUM)
def example_weights(params: Tree, x: Any, y: Any, weights: Any) -> jax.Array:
    """The mean over rows, with a weight for each row."""
    return (entropy(mlp_logits(params, x), y) * weights).sum() / weights.sum()


@trained(mlp, labelled, LAMB)
def label_smoothing(params: Tree, x: Any, y: Any) -> jax.Array:
    """Smoothed one-hot labels."""
    labels = optax.smooth_labels(jax.nn.one_hot(y, CLASSES, dtype=x.dtype), 0.1)
    return optax.softmax_cross_entropy(mlp_logits(params, x), labels).mean()


@trained(mlp, binary, ADAM)
def focal_by_positives(params: Tree, x: Any, y: Any) -> jax.Array:
    """A focal loss with a temperature, divided by the number of positive labels in the batch
    (at least 1)."""
    focal = optax.sigmoid_focal_loss(mlp_logits(params, x) / 0.5, y, alpha=0.25, gamma=2.0)
    return focal.sum() / jnp.maximum(1.0, y.sum())


@trained(mlp, labelled, CLIPPED_ADAMW)
def class_balanced(params: Tree, x: Any, y: Any) -> jax.Array:
    """Each row has the weight 1 / (number of rows of its class in the batch)."""
    weights = 1.0 / jnp.maximum(jnp.bincount(y, length=CLASSES), 1)[y]
    return (entropy(mlp_logits(params, x), y) * weights).sum() / weights.sum()


# -- norms -----------------------------------------------------------------------------------------


class _BatchNormed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(HIDDEN, use_bias=False, dtype=jnp.float64, param_dtype=jnp.float64)(x)
        x = nn.BatchNorm(
            use_running_average=False, momentum=0.9, dtype=jnp.float64, param_dtype=jnp.float64
        )(x)
        return nn.Dense(CLASSES, dtype=jnp.float64, param_dtype=jnp.float64)(nn.relu(x))


class _ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(4, (3, 3), use_bias=False, dtype=jnp.float64, param_dtype=jnp.float64)(x)
        x = nn.BatchNorm(
            use_running_average=False, momentum=0.9, dtype=jnp.float64, param_dtype=jnp.float64
        )(x)
        x = nn.avg_pool(nn.relu(x), (2, 2), strides=(2, 2))
        return nn.Dense(CLASSES, dtype=jnp.float64, param_dtype=jnp.float64)(
            x.reshape(x.shape[0], -1)
        )


class _GroupNormed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(HIDDEN, dtype=jnp.float64, param_dtype=jnp.float64)(x)
        x = nn.GroupNorm(num_groups=2, dtype=jnp.float64, param_dtype=jnp.float64)(x)
        return nn.Dense(CLASSES, dtype=jnp.float64, param_dtype=jnp.float64)(nn.relu(x))


class _SpectralNormed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        dense = nn.Dense(HIDDEN, dtype=jnp.float64, param_dtype=jnp.float64)
        x = nn.SpectralNorm(dense, dtype=jnp.float64, param_dtype=jnp.float64)(x, update_stats=True)
        return nn.Dense(CLASSES, dtype=jnp.float64, param_dtype=jnp.float64)(nn.relu(x))


def _images(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6, 6, 2)), rng.integers(0, CLASSES, rows).astype(np.int32)


def _of_flax(
    model: nn.Module, shape: tuple[int, ...] = (1, FEATURES)
) -> Callable[[jax.Array], Tree]:
    def params(key: jax.Array) -> Tree:
        made = model.init(key, jnp.zeros(shape, jnp.float64))
        # Flax creates statistics in float32
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), made)

    return params


def _flax_step(
    model: nn.Module, tx: Any, params: Tree, opt_state: Tree, x: Any, y: Any
) -> tuple[Any, ...]:
    """Run a step as in Flax's documentation of batch norm: new statistics replace the old ones."""

    def loss_fn(trained: Tree) -> tuple[jax.Array, Tree]:
        logits, new = model.apply({**params, "params": trained}, x, mutable=["batch_stats"])
        return entropy(logits, y).mean(), new["batch_stats"]

    (loss, stats), grads = dtrans.value_and_grad(loss_fn, has_aux=True)(params["params"])
    trained, opt_state = update(tx, grads, opt_state, params["params"])
    return {"params": trained, "batch_stats": stats}, opt_state, loss


@stepped(beside(_of_flax(_BatchNormed()), MOMENTUM), labelled)
def flax_batch_norm(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Flax's batch norm, with running statistics in the params."""
    return _flax_step(_BatchNormed(), MOMENTUM, params, opt_state, x, y)


class _Pooled(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3), dtype=jnp.float64)(x)), (2, 2), strides=(2, 2))
        x = nn.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        return nn.Dense(CLASSES, dtype=jnp.float64)(x.reshape(len(x), -1))


@trained(_of_flax(_Pooled(), (1, 6, 6, 2)), _images, MOMENTUM)
def conv_pools(params: Tree, x: Any, y: Any) -> jax.Array:
    """A convolution with max pooling and mean pooling."""
    return entropy(_Pooled().apply(params, x), y).mean()


@stepped(beside(_of_flax(_ConvNet(), (1, 6, 6, 2)), ADAM), _images)
def conv_batch_norm(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Flax's batch norm after a convolution: statistics over rows and pixels."""
    return _flax_step(_ConvNet(), ADAM, params, opt_state, x, y)


@stepped(beside(_of_flax(_SpectralNormed()), SGD), labelled)
def spectral_norm(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Flax's spectral norm: the vector of its power iteration is state that does not depend on
    the batch."""
    return _flax_step(_SpectralNormed(), SGD, params, opt_state, x, y)


def _normed(h: jax.Array) -> jax.Array:
    return (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-5)


@trained(deep, labelled, ADAM)
def batch_norm_by_hand(params: Tree, x: Any, y: Any) -> jax.Array:
    """Mean and variance over rows, without running statistics."""
    h = jax.nn.relu(_normed(x @ params["w1"]))
    h = jax.nn.relu(_normed(h @ params["w2"]))
    return entropy(h @ params["w3"] + params["b3"], y).mean()


@trained(deep, labelled, MOMENTUM)
def remat_batch_norm(params: Tree, x: Any, y: Any) -> jax.Array:
    """Batch norms that the backward pass recomputes (`jax.checkpoint`)."""
    layer = jax.checkpoint(lambda w, h: jax.nn.relu(_normed(h @ w)))
    h = layer(params["w2"], layer(params["w1"], x))
    return entropy(h @ params["w3"] + params["b3"], y).mean()


class _EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(FEATURES, HIDDEN, use_bias=False, dtype=jnp.float64, key=one)
        self.norm = eqx.nn.BatchNorm(HIDDEN, axis_name="batch", mode="batch", dtype=jnp.float64)
        self.last = eqx.nn.Linear(HIDDEN, CLASSES, dtype=jnp.float64, key=two)

    def __call__(self, x: Any, state: eqx.nn.State) -> Any:
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def _equinox_params(key: jax.Array) -> Tree:
    model, state = eqx.nn.make_with_state(_EquinoxNet)(key)
    return {"model": eqx.filter(model, eqx.is_inexact_array), "state": state}


@stepped(beside(_equinox_params, CLIPPED_ADAMW, "model"), labelled)
def equinox_batch_norm(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Equinox's batch norm: a mean over the axis of a vmap, with a state separate from the
    model."""
    shapes, _ = eqx.filter_eval_shape(eqx.nn.make_with_state(_EquinoxNet), jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))

    def loss_fn(arrays: Tree) -> tuple[jax.Array, Tree]:
        model = eqx.combine(arrays, static)
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = batched(x, params["state"])
        return entropy(logits, y).mean(), state

    (loss, state), grads = dtrans.value_and_grad(loss_fn, has_aux=True)(params["model"])
    model, opt_state = update(CLIPPED_ADAMW, grads, opt_state, params["model"])
    return {"model": model, "state": state}, opt_state, loss


@trained(deep, labelled, ADAM)
def layer_norm(params: Tree, x: Any, y: Any) -> jax.Array:
    """Statistics over the features of each row."""
    h = jax.nn.relu(jax.nn.standardize(x @ params["w1"], axis=-1, epsilon=1e-5))
    h = jax.nn.relu(jax.nn.standardize(h @ params["w2"], axis=-1, epsilon=1e-5))
    return entropy(h @ params["w3"] + params["b3"], y).mean()


@trained(_of_flax(_GroupNormed()), labelled, LAMB)
def group_norm(params: Tree, x: Any, y: Any) -> jax.Array:
    """Flax's group norm: statistics over groups of features of each row."""
    return entropy(_GroupNormed().apply(params, x), y).mean()


# -- random keys -----------------------------------------------------------------------------------


def _dropped(p: Tree, key: jax.Array, x: Any) -> jax.Array:
    """Return the logits, with dropout of the hidden layer."""
    h = mlp_hidden(p, x)
    kept = jax.random.bernoulli(key, 0.8, h.shape)
    return jnp.where(kept, h / 0.8, 0.0) @ p["w2"] + p["b2"]


class _Dropout(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(HIDDEN, dtype=jnp.float64, param_dtype=jnp.float64)(x))
        x = nn.Dropout(0.3, deterministic=False)(x)
        return nn.Dense(CLASSES, dtype=jnp.float64, param_dtype=jnp.float64)(x)


def _dropout_params(key: jax.Array) -> Tree:
    return _Dropout().init({"params": key, "dropout": key}, jnp.zeros((1, FEATURES), jnp.float64))


@trained(_dropout_params, with_key, ADAM)
def dropout_key_argument(params: Tree, x: Any, y: Any, key: Any) -> jax.Array:
    """Flax's dropout, with a key as a batch argument."""
    return entropy(_Dropout().apply(params, x, rngs={"dropout": key}), y).mean()


def _keyed_params(key: jax.Array) -> Tree:
    one, two = jax.random.split(key)
    return {"w": mlp(one), "key": two}


@stepped(beside(_keyed_params, SGD, "w"), labelled)
def dropout_key_in_params(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Dropout, with a key in the params that each step splits."""
    key, use = jax.random.split(params["key"])
    loss, grads = dtrans.value_and_grad(lambda w: entropy(_dropped(w, use, x), y).mean())(
        params["w"]
    )
    w, opt_state = update(SGD, grads, opt_state, params["w"])
    return {"w": w, "key": key}, opt_state, loss


def _keyed_state(key: jax.Array) -> tuple[Tree, Tree]:
    one, two = jax.random.split(key)
    params = mlp(one)
    return params, (two, CLIPPED_ADAMW.init(params))


@stepped(_keyed_state, labelled)
def dropout_key_in_opt_state(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Dropout with a key for each row, split from a key in the optimizer state."""
    key, tx_state = opt_state
    key, use = jax.random.split(key)

    def loss_fn(p: Tree) -> jax.Array:
        keys = jax.random.split(use, x.shape[0])
        return entropy(jax.vmap(_dropped, in_axes=(None, 0, 0))(p, keys, x), y).mean()

    loss, grads = dtrans.value_and_grad(loss_fn)(params)
    params, tx_state = update(CLIPPED_ADAMW, grads, tx_state, params)
    return params, (key, tx_state), loss


def _adam_mlp(key: jax.Array) -> tuple[Tree, Tree]:
    params = mlp(key)
    return params, ADAM.init(params)


@stepped(_adam_mlp, labelled)
def dropout_constant_key(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Dropout, with a constant key and the optimizer's count of steps."""
    key = jax.random.fold_in(jax.random.key(7), optax.tree.get(opt_state, "count"))
    loss, grads = dtrans.value_and_grad(lambda p: entropy(_dropped(p, key, x), y).mean())(params)
    params, opt_state = update(ADAM, grads, opt_state, params)
    return params, opt_state, loss


@trained(deep, with_key, MOMENTUM)
def stochastic_depth(params: Tree, x: Any, y: Any, key: Any) -> jax.Array:
    """Stochastic depth: a residual branch is dropped for random rows."""
    h = jnp.tanh(x @ params["w1"])
    kept = jax.random.bernoulli(key, 0.7, (x.shape[0], 1))
    h = h + jnp.where(kept, jnp.tanh(h @ params["w2"]) / 0.7, 0.0)
    return entropy(h @ params["w3"] + params["b3"], y).mean()


@trained(mlp, with_key, ADAM)
def mixup(params: Tree, x: Any, y: Any, key: Any) -> jax.Array:
    """Mixup: each row is mixed with another row of the batch, by a random permutation."""
    one, two = jax.random.split(key)
    part = jax.random.uniform(one, dtype=x.dtype)
    other = jax.random.permutation(two, x.shape[0])
    logits = mlp_logits(params, part * x + (1 - part) * x[other])
    return (part * entropy(logits, y) + (1 - part) * entropy(logits, y[other])).mean()


def _vae_params(key: jax.Array) -> Tree:
    return drawn(key, enc=(FEATURES, HIDDEN), mean=(HIDDEN, 2), log_var=(HIDDEN, 2),
                  dec=(2, HIDDEN),
                  out=(HIDDEN, FEATURES))  # fmt: skip


def _plain_with_key(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (*plain(rows, seed), jax.random.key(seed))


@trained(_vae_params, _plain_with_key, ADAM)
def vae(params: Tree, x: Any, key: Any) -> jax.Array:
    """The mean ELBO of a variational autoencoder, with noise for each row."""
    h = jnp.tanh(x @ params["enc"])
    mean, log_var = h @ params["mean"], h @ params["log_var"]
    z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape, mean.dtype)
    back = jnp.tanh(z @ params["dec"]) @ params["out"]
    kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
    return jnp.mean(0.5 * jnp.sum((back - x) ** 2, -1) + kl)


def _embedded(key: jax.Array) -> Tree:
    return drawn(
        key, w1=(FEATURES, HIDDEN), b1=(HIDDEN,), words=(VOCABULARY, HIDDEN), bias=(VOCABULARY,)
    )


def _words(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, VOCABULARY, rows).astype(np.int32)
    return rng.normal(size=(rows, FEATURES)), words, jax.random.key(seed)


@trained(_embedded, _words, SGD)
def nce_shared_negatives(params: Tree, x: Any, word: Any, key: Any) -> jax.Array:
    """Sampled softmax, with negatives that all rows share."""
    h = mlp_hidden(params, x)
    no = jax.random.randint(key, (5,), 0, VOCABULARY)
    true = jnp.sum(h * params["words"][word], -1) + params["bias"][word]
    false = h @ params["words"][no].T + params["bias"][no]
    return jnp.mean(jax.nn.logsumexp(jnp.concatenate([true[:, None], false], -1), -1) - true)


@trained(_embedded, _words, ADAM)
def nce_negatives_per_row(params: Tree, x: Any, word: Any, key: Any) -> jax.Array:
    """Negative sampling as in word2vec, with negatives of each row."""
    h = mlp_hidden(params, x)
    no = jax.random.randint(key, (x.shape[0], 3), 0, VOCABULARY)
    true = jnp.sum(h * params["words"][word], -1) + params["bias"][word]
    false = jnp.einsum("bh,bkh->bk", h, params["words"][no]) + params["bias"][no]
    return -jnp.mean(jax.nn.log_sigmoid(true) + jax.nn.log_sigmoid(-false).sum(-1))


# -- losses that combine rows ----------------------------------------------------------------------


def _towers(key: jax.Array) -> Tree:
    one, two = jax.random.split(key)
    return {"image": mlp(one, out=5), "text": mlp(two, out=5), "scale": jnp.asarray(np.log(5.0))}


def _unit(h: jax.Array) -> jax.Array:
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


@trained(_towers, pairs, CLIPPED_ADAMW)
def contrastive(params: Tree, image: Any, text: Any) -> jax.Array:
    """The loss of CLIP: each row of one tower is compared with all rows of the other."""
    a, b = _unit(mlp_logits(params["image"], image)), _unit(mlp_logits(params["text"], text))
    logits = jnp.exp(params["scale"]) * a @ b.T
    labels = jnp.arange(logits.shape[0])
    return (entropy(logits, labels).mean() + entropy(logits.T, labels).mean()) / 2


def _of_three_classes(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Return a batch in which each class has rows, for any number of rows."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, FEATURES)), rng.permutation(np.arange(rows) % 3).astype(np.int32)


@trained(without_last_bias, _of_three_classes, ADAM)
def triplet_hard(params: Tree, x: Any, y: Any) -> jax.Array:
    """A triplet loss: for each row the farthest row of its class, and the nearest row of
    another class."""
    h = mlp_hidden(params, x) @ params["w2"]
    far = jnp.sum((h[:, None] - h[None]) ** 2, -1)
    same = y[:, None] == y[None]
    positive = jnp.max(jnp.where(same, far, 0.0), 1)
    negative = jnp.min(jnp.where(same, jnp.inf, far), 1)
    return jnp.mean(jax.nn.relu(positive - negative + 1.0))


@trained(without_last_bias, pairs, LAMB)
def barlow_twins(params: Tree, one: Any, two: Any) -> jax.Array:
    """Barlow Twins: the cross-correlation of two views, normalised over the rows, should be the
    identity."""
    a, b = (_normed(mlp_hidden(params, x) @ params["w2"]) for x in (one, two))
    c = a.T @ b / a.shape[0]
    on = jnp.diagonal(c)
    return jnp.sum((on - 1) ** 2) + 5e-3 * (jnp.sum(c**2) - jnp.sum(on**2))


EXPERTS = 3


def _moe_params(key: jax.Array) -> Tree:
    return drawn(
        key,
        gate=(FEATURES, EXPERTS),
        up=(EXPERTS, FEATURES, HIDDEN),
        down=(EXPERTS, HIDDEN, CLASSES),
    )


@trained(_moe_params, labelled, ADAM)
def moe_top1(params: Tree, x: Any, y: Any) -> jax.Array:
    """One expert for each row, and the balance loss of Switch Transformers: a product of two
    means over rows."""
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS, dtype=x.dtype)
    h = jnp.tanh(jnp.einsum("be,bf,efh->beh", chosen, x, params["up"]))
    out = jnp.einsum("be,beh,ehc->bc", chosen * gates, h, params["down"])
    balance = EXPERTS * jnp.sum(chosen.mean(0) * gates.mean(0))
    return entropy(out, y).mean() + 0.01 * balance


# -- sequences -------------------------------------------------------------------------------------


def _speech(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Return frames, their padding, labels and the padding of labels; the blank label is 0."""
    rng = np.random.default_rng(seed)
    frames, labels = rng.integers(6, 9, rows), rng.integers(1, 4, rows)
    return (
        rng.normal(size=(rows, 8, FEATURES)),
        (np.arange(8) >= frames[:, None]).astype(np.float64),
        rng.integers(1, CLASSES, (rows, 3)).astype(np.int32),
        (np.arange(3) >= labels[:, None]).astype(np.float64),
    )


@trained(mlp, _speech, CLIPPED_ADAMW)
def ctc(params: Tree, x: Any, x_padding: Any, y: Any, y_padding: Any) -> jax.Array:
    """The mean CTC loss of rows with different lengths."""
    return optax.ctc_loss(mlp_logits(params, x), x_padding, y, y_padding).mean()


def _attended(p: Tree, h: jax.Array, allowed: Any, heads: int = 2) -> jax.Array:
    """Apply a transformer layer: attention and an MLP, each after a norm, added to the input."""
    normed = jax.nn.standardize(h, axis=-1, epsilon=1e-5)
    q, k, v = (a.reshape(*a.shape[:-1], heads, -1) for a in jnp.split(normed @ p["qkv"], 3, -1))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9))
    h = h + jnp.einsum("bnqk,bknd->bqnd", weights, v).reshape(h.shape) @ p["out"]
    return h + jax.nn.gelu(jax.nn.standardize(h, axis=-1, epsilon=1e-5) @ p["up"]) @ p["down"]


def _layers(key: jax.Array, depth: int = 2) -> Tree:
    return drawn(key, qkv=(depth, HIDDEN, 3 * HIDDEN), out=(depth, HIDDEN, HIDDEN),
                  up=(depth, HIDDEN, 2 * HIDDEN),
                  down=(depth, 2 * HIDDEN, HIDDEN))  # fmt: skip


def _transformer(key: jax.Array) -> Tree:
    one, two = jax.random.split(key)
    return drawn(one, words=(VOCABULARY, HIDDEN), places=(LENGTH, HIDDEN)) | {
        "layers": _layers(two)
    }


def _tokens(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (np.random.default_rng(seed).integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32),)


@trained(_transformer, _tokens, LAMB)
def transformer_scan(params: Tree, tokens: Any) -> jax.Array:
    """A causal transformer whose layers are stacked and scanned."""
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    h = params["words"][tokens] + params["places"]
    h, _ = jax.lax.scan(lambda h, layer: (_attended(layer, h, causal), None), h, params["layers"])
    return entropy(h[:, :-1] @ params["words"].T, tokens[:, 1:]).mean()


def _packed(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Return rows with two sequences, numbered 1 and 2, followed by padding with number 0."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(2, 5, rows)[:, None], rng.integers(2, 5, rows)[:, None]
    place = np.arange(LENGTH)
    segments = np.where(place < first, 1, np.where(place < first + second, 2, 0))
    tokens = np.where(segments > 0, rng.integers(1, VOCABULARY, (rows, LENGTH)), 0)
    return tokens.astype(np.int32), segments.astype(np.int32)


@trained(_transformer, _packed, CLIPPED_ADAMW)
def sequence_packing(params: Tree, tokens: Any, segments: Any) -> jax.Array:
    """Several sequences packed into each row: attention within a sequence, and a mean over
    tokens that have a next token."""
    allowed = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(
        jnp.ones((LENGTH, LENGTH), bool)
    )
    h = params["words"][tokens] + params["places"]
    for i in range(2):
        h = _attended(jax.tree.map(lambda w, i=i: w[i], params["layers"]), h, allowed[:, None])
    has_next = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).astype(h.dtype)
    return (entropy(h[:, :-1] @ params["words"].T, tokens[:, 1:]) * has_next).sum() / has_next.sum()


def _recurrent(key: jax.Array) -> Tree:
    return drawn(
        key, into=(FEATURES, HIDDEN), again=(HIDDEN, HIDDEN), bias=(HIDDEN,), out=(HIDDEN, CLASSES)
    )


def _time_major(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(5, rows, FEATURES)), rng.integers(0, CLASSES, rows).astype(np.int32)


@trained(_recurrent, _time_major, MOMENTUM, batch_axes=(1, 0))
def rnn_time_major(params: Tree, x: Any, y: Any) -> jax.Array:
    """A recurrent network; arrays have time on dimension 0 and rows on dimension 1."""

    def cell(h: jax.Array, x_t: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x_t @ params["into"] + h @ params["again"] + params["bias"]), None

    h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[1], HIDDEN), x.dtype), x)
    return entropy(h @ params["out"], y).mean()


def _gru_params(key: jax.Array) -> Tree:
    return drawn(
        key,
        into=(FEATURES, 3 * HIDDEN),
        again=(HIDDEN, 3 * HIDDEN),
        bias=(3 * HIDDEN,),
        out=(HIDDEN, 1),
    )


def _series(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 5, FEATURES))
    return x, np.cumsum(x[..., 0], 1)


@trained(_gru_params, _series, ADAM)
def gru_batch_major(params: Tree, x: Any, y: Any) -> jax.Array:
    """A GRU with a target at each time; arrays have rows on dimension 0."""

    def cell(h: jax.Array, x_t: jax.Array) -> tuple[jax.Array, jax.Array]:
        xr, xz, xn = jnp.split(x_t @ params["into"] + params["bias"], 3, -1)
        hr, hz, hn = jnp.split(h @ params["again"], 3, -1)
        update = jax.nn.sigmoid(xz + hz)
        h = update * h + (1 - update) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        return h, h

    _, hs = jax.lax.scan(cell, jnp.zeros((x.shape[0], HIDDEN), x.dtype), jnp.swapaxes(x, 0, 1))
    return jnp.mean((jnp.swapaxes(hs, 0, 1) @ params["out"] - y[..., None]) ** 2)


# -- other nets, and derivatives in the step -------------------------------------------------------


def _critic(key: jax.Array) -> Tree:
    return without_last_bias(key, out=1)


def _real_and_fake(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, FEATURES)),
        rng.normal(1.0, 0.5, (rows, FEATURES)),
        jax.random.key(seed),
    )


@trained(_critic, _real_and_fake, optax.adam(1e-2, b1=0.0, b2=0.9))
def gradient_penalty(params: Tree, real: Any, fake: Any, key: Any) -> jax.Array:
    """The critic of WGAN-GP: a penalty on the norm of each row's input gradient."""
    part = jax.random.uniform(key, (real.shape[0], 1), real.dtype)
    critic = lambda x: (mlp_hidden(params, x) @ params["w2"])[..., 0]
    slopes = jax.vmap(jax.grad(critic))(part * real + (1 - part) * fake)
    penalty = jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)
    return critic(fake).mean() - critic(real).mean() + 10.0 * penalty


def _with_copy(trained: str, copy: str, out: int = CLASSES) -> Callable[[jax.Array], Tree]:
    def params(key: jax.Array) -> Tree:
        made = mlp(key, out=out)
        return {trained: made, copy: jax.tree.map(jnp.copy, made)}

    return params


def _views(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (*pairs(rows, seed), labelled(rows, seed)[1])


@stepped(beside(_with_copy("student", "teacher"), MOMENTUM, "student"), _views)
def ema_teacher(params: Tree, opt_state: Tree, one: Any, two: Any, y: Any) -> tuple[Any, ...]:
    """A mean teacher: a moving average of the student, which should predict the same for
    another view."""

    def loss_fn(student: Tree) -> jax.Array:
        said = mlp_logits(student, one)
        taught = jax.lax.stop_gradient(jax.nn.softmax(mlp_logits(params["teacher"], two)))
        return entropy(said, y).mean() + jnp.mean((jax.nn.softmax(said) - taught) ** 2)

    loss, grads = dtrans.value_and_grad(loss_fn)(params["student"])
    student, opt_state = update(MOMENTUM, grads, opt_state, params["student"])
    teacher = optax.incremental_update(student, params["teacher"], 0.1)
    return {"student": student, "teacher": teacher}, opt_state, loss


def _transitions(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, FEATURES)),
        rng.integers(0, CLASSES, rows).astype(np.int32),
        rng.normal(size=rows),
        rng.normal(size=(rows, FEATURES)),
        (rng.random(rows) < 0.2).astype(np.float64),
    )


@stepped(beside(_with_copy("online", "target"), ADAM, "online"), _transitions)
def dqn(
    params: Tree, opt_state: Tree, seen: Any, action: Any, reward: Any, after: Any, done: Any
) -> tuple[Any, ...]:
    """Q-learning with a target network, which is replaced by the trained network every second
    step."""

    def loss_fn(online: Tree) -> jax.Array:
        value = jnp.take_along_axis(mlp_logits(online, seen), action[:, None], -1)[:, 0]
        best = mlp_logits(params["target"], after).max(-1)
        return optax.huber_loss(
            value, jax.lax.stop_gradient(reward + 0.99 * (1 - done) * best)
        ).mean()

    loss, grads = dtrans.value_and_grad(loss_fn)(params["online"])
    online, opt_state = update(ADAM, grads, opt_state, params["online"])
    target = optax.periodic_update(online, params["target"], optax.tree.get(opt_state, "count"), 2)
    return {"online": online, "target": target}, opt_state, loss


SCALED = optax.scale_by_adam()


def _scaled_mlp(key: jax.Array) -> tuple[Tree, Tree]:
    params = mlp(key)
    return params, SCALED.init(params)


def _with_rate(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (*labelled(rows, seed), np.asarray(0.02))


@stepped(_scaled_mlp, _with_rate)
def rate_argument(params: Tree, opt_state: Tree, x: Any, y: Any, rate: Any) -> tuple[Any, ...]:
    """The learning rate is a batch argument."""
    loss, grads = dtrans.value_and_grad(lambda p: entropy(mlp_logits(p, x), y).mean())(params)
    updates, opt_state = SCALED.update(grads, opt_state, params)
    params = optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates))
    return params, opt_state, loss


# -- results besides the loss ----------------------------------------------------------------------


@trained(mlp, labelled, SGD, has_aux=True)
def metrics_mean(params: Tree, x: Any, y: Any) -> tuple[jax.Array, Tree]:
    """Returns the accuracy, a mean over rows."""
    logits = mlp_logits(params, x)
    return entropy(logits, y).mean(), {
        "accuracy": jnp.mean(jnp.argmax(logits, -1) == y, dtype=x.dtype)
    }


@trained(mlp, labelled, ADAM, has_aux=True)
def metrics_counts(params: Tree, x: Any, y: Any) -> tuple[jax.Array, Tree]:
    """Returns integers: the number of correct rows, and the number of rows, counted and from
    the shape."""
    logits = mlp_logits(params, x)
    right = (jnp.argmax(logits, -1) == y).sum()
    return entropy(logits, y).mean(), {
        "right": right,
        "counted": jnp.ones_like(y).sum(),
        "rows": y.shape[0],
    }


@trained(mlp, labelled, MOMENTUM, has_aux=True)
def metrics_confusion(params: Tree, x: Any, y: Any) -> tuple[jax.Array, Tree]:
    """Returns the confusion matrix, and the loss of each class."""
    logits = mlp_logits(params, x)
    each = entropy(logits, y)
    confusion = jnp.zeros((CLASSES, CLASSES), jnp.int32).at[y, jnp.argmax(logits, -1)].add(1)
    return each.mean(), {"confusion": confusion, "by_class": jax.ops.segment_sum(each, y, CLASSES)}


@trained(mlp, labelled, CLIPPED_ADAMW, has_aux=True)
def metrics_per_row(params: Tree, x: Any, y: Any) -> tuple[jax.Array, Tree]:
    """Returns the loss of each row, the largest loss, and its row."""
    each = entropy(mlp_logits(params, x), y)
    return each.mean(), {"each": each, "largest": each.max(), "where": jnp.argmax(each)}


@stepped(_adam_mlp, labelled)
def metrics_grad_norm(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Returns the norm of all gradients, and the optimizer's count of steps."""
    loss, grads = dtrans.value_and_grad(lambda p: entropy(mlp_logits(p, x), y).mean())(params)
    params, opt_state = update(ADAM, grads, opt_state, params)
    return (
        params,
        opt_state,
        loss,
        {"norm": optax.tree.norm(grads), "count": optax.tree.get(opt_state, "count")},
    )


CASES = cases_of(__name__)
