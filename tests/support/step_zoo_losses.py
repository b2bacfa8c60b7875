"""Further training steps for one device, from libraries and papers: losses, models and methods.

`step_zoo` lists all cases.
"""

from __future__ import annotations

import functools
from typing import Any

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
    LENGTH,
    MOMENTUM,
    SGD,
    VOCABULARY,
    Tree,
    cases_of,
    drawn,
    entropy,
    labelled,
    mlp,
    mlp_hidden,
    mlp_logits,
    plain,
    stepped,
    trained,
    update,
)

import dtrans


def _valued(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Return rows and a number for each row."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, FEATURES)), rng.normal(size=rows)


def _scalar_mlp(key: jax.Array) -> Tree:
    return mlp(key, out=1)


def _scalar(params: Tree, x: Any) -> jax.Array:
    return mlp_logits(params, x)[:, 0]


def _each(params: Tree, x: Any, y: Any) -> jax.Array:
    """Return the loss of each row."""
    return entropy(mlp_logits(params, x), y)


# -- losses that are sums over rows ----------------------------------------------------------------


@trained(_scalar_mlp, _valued, ADAM)
def huber(params: Tree, x: Any, y: Any) -> jax.Array:
    """Huber loss of a regression."""
    return optax.huber_loss(_scalar(params, x), y, delta=0.7).mean()


@trained(_scalar_mlp, _valued, ADAM)
def log_cosh(params: Tree, x: Any, y: Any) -> jax.Array:
    """Logarithm of the hyperbolic cosine of the error."""
    return optax.log_cosh(_scalar(params, x), y).mean()


@trained(functools.partial(mlp, out=3), _valued, ADAM)
def quantiles(params: Tree, x: Any, y: Any) -> jax.Array:
    """Pinball loss of three quantiles."""
    levels = jnp.asarray([0.1, 0.5, 0.9])
    error = y[:, None] - mlp_logits(params, x)
    return jnp.maximum(levels * error, (levels - 1) * error).sum(-1).mean()


@trained(mlp, labelled, SGD)
def multiclass_hinge(params: Tree, x: Any, y: Any) -> jax.Array:
    """Hinge loss of several classes (Crammer and Singer)."""
    scores = mlp_logits(params, x)
    right = jnp.take_along_axis(scores, y[:, None], 1)
    margins = jnp.maximum(0, 1 + scores - right) * (1 - jax.nn.one_hot(y, CLASSES))
    return margins.max(-1).mean()


@trained(_scalar_mlp, labelled, ADAM)
def poisson(params: Tree, x: Any, y: Any) -> jax.Array:
    """Poisson regression of counts."""
    rate = _scalar(params, x)
    return (jnp.exp(rate) - y * rate + jax.scipy.special.gammaln(y + 1.0)).mean()


@trained(functools.partial(mlp, out=2), _valued, ADAM)
def gaussian_with_variance(params: Tree, x: Any, y: Any) -> jax.Array:
    """Gaussian likelihood whose mean and variance are predicted."""
    mean, raw = jnp.moveaxis(mlp_logits(params, x), -1, 0)
    variance = jax.nn.softplus(raw) + 1e-3
    return (0.5 * jnp.log(variance) + 0.5 * (y - mean) ** 2 / variance).mean()


@trained(lambda key: {"student": mlp(key), "teacher": mlp(jax.random.key(7))}, labelled, ADAM)
def distillation(params: Tree, x: Any, y: Any) -> jax.Array:
    """Distillation: cross entropy, and divergence from the logits of a frozen teacher."""
    soft = jax.nn.softmax(jax.lax.stop_gradient(mlp_logits(params["teacher"], x)) / 2)
    student = mlp_logits(params["student"], x)
    divergence = optax.kl_divergence(jax.nn.log_softmax(student / 2), soft)
    return 0.5 * entropy(student, y).mean() + 2 * divergence.mean()


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, 3)), plain, ADAM)
def cosine_similarity(params: Tree, x: Any) -> jax.Array:
    """Cosine distance of an embedding from three features of its row."""
    found = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return optax.cosine_distance(found, x[:, :3], epsilon=1e-6).mean()


@trained(lambda key: {**mlp(key, out=1), "cuts": jnp.arange(CLASSES - 1.0)}, labelled, ADAM)
def ordinal(params: Tree, x: Any, y: Any) -> jax.Array:
    """Ordinal regression with trained thresholds."""
    above = jax.nn.sigmoid(_scalar(params, x)[:, None] - params["cuts"])
    target = (y[:, None] > jnp.arange(CLASSES - 1)).astype(x.dtype)
    return -(target * jnp.log(above) + (1 - target) * jnp.log1p(-above)).sum(-1).mean()


@trained(lambda key: {**mlp(key), "log_var": jnp.zeros(2)}, labelled, ADAM)
def uncertainty_weights(params: Tree, x: Any, y: Any) -> jax.Array:
    """Two losses with trained weights (Kendall)."""
    scores = mlp_logits(params, x)
    both = jnp.stack([entropy(scores, y).mean(), ((scores.sum(-1) - x[:, 0]) ** 2).mean()])
    return (jnp.exp(-params["log_var"]) * both + params["log_var"]).sum()


# -- losses in which rows interact -----------------------------------------------------------------


@trained(_scalar_mlp, _valued, ADAM)
def root_mean_square(params: Tree, x: Any, y: Any) -> jax.Array:
    """Square root of the mean squared error."""
    return jnp.sqrt(((_scalar(params, x) - y) ** 2).mean())


@trained(_scalar_mlp, _valued, ADAM)
def explained_variance(params: Tree, x: Any, y: Any) -> jax.Array:
    """One minus R squared: the squared error, divided by the variance of the targets."""
    return ((_scalar(params, x) - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()


@trained(lambda key: {n: x for n, x in mlp(key, out=1).items() if n != "b2"}, _valued, ADAM)
def correlation(params: Tree, x: Any, y: Any) -> jax.Array:
    """One minus Pearson's correlation over the batch."""
    found = (mlp_hidden(params, x) @ params["w2"])[:, 0]
    a, b = found - found.mean(), y - y.mean()
    return 1 - (a * b).sum() / jnp.sqrt((a**2).sum() * (b**2).sum())


@trained(mlp, labelled, ADAM)
def dice(params: Tree, x: Any, y: Any) -> jax.Array:
    """Dice loss: overlaps of classes are counted over the batch."""
    found, wanted = jax.nn.softmax(mlp_logits(params, x)), jax.nn.one_hot(y, CLASSES, dtype=x.dtype)
    overlap = 2 * (found * wanted).sum(0) + 1
    return (1 - overlap / (found.sum(0) + wanted.sum(0) + 1)).mean()


@trained(mlp, labelled, SGD)
def median_of_rows(params: Tree, x: Any, y: Any) -> jax.Array:
    """Median of the losses of rows."""
    return jnp.median(_each(params, x, y))


@trained(mlp, labelled, SGD)
def hardest_rows(params: Tree, x: Any, y: Any) -> jax.Array:
    """Mean over the three rows with the largest losses."""
    return jax.lax.top_k(_each(params, x, y), 3)[0].mean()


@trained(mlp, labelled, SGD)
def tilted(params: Tree, x: Any, y: Any) -> jax.Array:
    """Tilted empirical risk: log of the mean of exponentials of losses."""
    losses = 2 * _each(params, x, y)
    return (jax.nn.logsumexp(losses) - jnp.log(len(y))) / 2


@trained(mlp, labelled, SGD)
def worst_row(params: Tree, x: Any, y: Any) -> jax.Array:
    """Largest loss of a row."""
    return _each(params, x, y).max()


@trained(lambda key: {**mlp(key), "level": jnp.asarray(1.0)}, labelled, SGD)
def value_at_risk(params: Tree, x: Any, y: Any) -> jax.Array:
    """Conditional value at risk, with a trained level."""
    return params["level"] + jnp.maximum(_each(params, x, y) - params["level"], 0).mean() / 0.3


@trained(mlp, labelled, SGD)
def worst_group(params: Tree, x: Any, y: Any) -> jax.Array:
    """Group DRO: the largest mean loss of a class."""
    sums = jax.ops.segment_sum(_each(params, x, y), y, CLASSES)
    return (sums / jnp.maximum(jnp.bincount(y, length=CLASSES), 1)).max()


@trained(mlp, labelled, ADAM)
def invariant_risk(params: Tree, x: Any, y: Any) -> jax.Array:
    """Invariant risk minimization: a penalty on the gradient at a scale of one."""
    scores = mlp_logits(params, x)
    slope = jax.grad(lambda scale: entropy(scale * scores, y).mean())(1.0)
    return entropy(scores, y).mean() + 0.5 * slope**2


@trained(mlp, labelled, ADAM)
def confident_and_diverse(params: Tree, x: Any, y: Any) -> jax.Array:
    """Information maximization: entropy of rows, minus the entropy of their mean."""
    found = jax.nn.softmax(mlp_logits(params, x))
    mean = found.mean(0)
    of_rows = -(found * jnp.log(found)).sum(-1).mean()
    return entropy(mlp_logits(params, x), y).mean() + of_rows + (mean * jnp.log(mean)).sum()


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, 3)), plain, ADAM)
def vicreg_terms(params: Tree, x: Any) -> jax.Array:
    """Variance and covariance terms of VICReg."""
    z = jnp.tanh(x @ params["w1"]) @ params["w2"]
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(x) - 1)
    off = (covariance**2).sum() - (jnp.diagonal(covariance) ** 2).sum()
    return jnp.maximum(0, 1 - jnp.sqrt(centred.var(0) + 1e-4)).mean() + off / 3


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, 3)), labelled, ADAM)
def supervised_contrastive(params: Tree, x: Any, y: Any) -> jax.Array:
    """Supervised contrastive loss: rows of one class are similar."""
    z = jnp.tanh(x @ params["w1"]) @ params["w2"]
    z = z / jnp.sqrt((z**2).sum(-1, keepdims=True) + 1e-6)
    others = 1 - jnp.eye(len(y))
    scores = z @ z.T / 0.5
    log_p = scores - jnp.log((jnp.exp(scores) * others).sum(-1, keepdims=True))
    same = (y[:, None] == y[None]) * others
    return -((same * log_p).sum(-1) / jnp.maximum(same.sum(-1), 1)).mean()


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, 3)), labelled, ADAM)
def class_centres(params: Tree, x: Any, y: Any) -> jax.Array:
    """Distances from the mean of each class in the batch."""
    z = jnp.tanh(x @ params["w1"]) @ params["w2"]
    counts = jnp.maximum(jax.ops.segment_sum(jnp.ones(len(y)), y, CLASSES), 1)
    centres = jax.ops.segment_sum(z, y, CLASSES) / counts[:, None]
    return ((z - centres[y]) ** 2).sum(-1).mean() + jnp.exp(-(z**2).mean())


@trained(_scalar_mlp, _valued, SGD)
def ranking_of_pairs(params: Tree, x: Any, y: Any) -> jax.Array:
    """Logistic loss of all pairs of rows (RankNet)."""
    scores = _scalar(params, x)
    gap = scores[:, None] - scores[None]
    above = (y[:, None] > y[None]).astype(x.dtype)
    return (above * jax.nn.softplus(-gap)).sum() / above.sum()


@trained(_scalar_mlp, _valued, SGD)
def listwise(params: Tree, x: Any, y: Any) -> jax.Array:
    """ListNet over the batch: cross entropy of two softmaxes over rows."""
    return -(jax.nn.softmax(y) * jax.nn.log_softmax(_scalar(params, x))).sum()


@trained(_scalar_mlp, _valued, ADAM)
def sorted_targets(params: Tree, x: Any, y: Any) -> jax.Array:
    """Wasserstein distance in one dimension: sorted predictions and sorted targets."""
    return jnp.abs(jnp.sort(_scalar(params, x)) - jnp.sort(y)).mean()


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, 2)), plain, ADAM)
def kernel_discrepancy(params: Tree, x: Any) -> jax.Array:
    """Maximum mean discrepancy between embeddings and two features of the rows."""
    kernel = lambda a, b: jnp.exp(-((a[:, None] - b[None]) ** 2).sum(-1)).mean()
    z, target = jnp.tanh(x @ params["w1"]) @ params["w2"], x[:, :2]
    return kernel(z, z) + kernel(target, target) - 2 * kernel(z, target)


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, FEATURES)), plain, ADAM)
def covariance_alignment(params: Tree, x: Any) -> jax.Array:
    """CORAL: difference between two covariances over rows."""
    covariance = lambda a: (a - a.mean(0)).T @ (a - a.mean(0)) / (len(a) - 1)
    z = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return ((covariance(z) - covariance(x)) ** 2).mean()


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, 2)), plain, SGD)
def optimal_transport(params: Tree, x: Any) -> jax.Array:
    """Sinkhorn's distance between embeddings and two features of the rows."""
    z = jnp.tanh(x @ params["w1"]) @ params["w2"]
    cost = ((z[:, None] - x[None, :, :2]) ** 2).sum(-1)
    kernel = jnp.exp(-cost)
    u = jnp.ones(len(x)) / len(x)
    for _ in range(3):
        v = 1 / len(x) / (kernel.T @ u)
        u = 1 / len(x) / (kernel @ v)
    return (u[:, None] * kernel * v[None] * cost).sum()


@trained(mlp, labelled, ADAM)
def positive_weights(params: Tree, x: Any, y: Any) -> jax.Array:
    """Binary cross entropy whose positive weight is counted in the batch."""
    positive = (y == 0).astype(x.dtype)
    weight = (1 - positive).sum() / jnp.maximum(positive.sum(), 1)
    score = mlp_logits(params, x)[:, 0]
    loss = weight * positive * jax.nn.softplus(-score)
    return (loss + (1 - positive) * jax.nn.softplus(score)).mean()


@trained(mlp, labelled, ADAM)
def focal_of_classes(params: Tree, x: Any, y: Any) -> jax.Array:
    """Focal loss with a weight for each class."""
    log_p = jnp.take_along_axis(jax.nn.log_softmax(mlp_logits(params, x)), y[:, None], 1)[:, 0]
    weights = jnp.asarray([0.5, 1.0, 1.5, 2.0])[y]
    return -(weights * (1 - jnp.exp(log_p)) ** 2 * log_p).mean()


# -- models ----------------------------------------------------------------------------------------


def _tokens(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    found = rng.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32)
    return found, rng.integers(0, CLASSES, rows).astype(np.int32)


def _attending(key: jax.Array) -> Tree:
    shapes = {
        "emb": (VOCABULARY, HIDDEN),
        "q": (HIDDEN, HIDDEN),
        "k": (HIDDEN, 4),
        "v": (HIDDEN, 4),
    }
    return drawn(key, **shapes, out=(HIDDEN, CLASSES))


def _heads(x: Any, count: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], count, -1)


@trained(_attending, _tokens, ADAM)
def grouped_queries(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """Attention with grouped queries and linear biases of distance (ALiBi)."""
    h = params["emb"][tokens]
    q, k, v = _heads(h @ params["q"], 2), h @ params["k"], h @ params["v"]
    distance = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None])
    scores = (
        jnp.einsum("bthd,bsd->bhts", q, k) / 2 - distance * jnp.asarray([0.5, 0.25])[:, None, None]
    )
    mixed = jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(scores), v)
    return entropy(mixed.reshape(*tokens.shape, -1).mean(1) @ params["out"], y).mean()


@trained(_attending, _tokens, ADAM)
def rotary_positions(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """Attention with rotary positions, and a causal mask."""
    h = params["emb"][tokens]
    angle = jnp.arange(LENGTH)[:, None] / 10 ** jnp.arange(2)

    def rotate(a: Any) -> jax.Array:
        left, right = a[..., :2], a[..., 2:4]
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)

    q, k = rotate(h @ params["q"]), rotate(h @ params["k"])
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), q @ jnp.swapaxes(k, 1, 2), -1e9)
    mixed = jax.nn.softmax(scores) @ (h @ params["v"])
    return entropy(mixed[:, -1] @ params["out"][:4], y).mean()


@trained(
    lambda key: {
        **drawn(key, emb=(VOCABULARY, HIDDEN), out=(HIDDEN, CLASSES)),
        "a": jnp.zeros(HIDDEN),
    },
    _tokens,
    ADAM,
)
def state_space(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """Linear recurrence over time, by an associative scan."""
    h = params["emb"][tokens]
    decay = jnp.broadcast_to(jax.nn.sigmoid(params["a"]), h.shape)
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    _, states = jax.lax.associative_scan(combine, (decay, h), axis=1)
    return entropy(states[:, -1] @ params["out"], y).mean()


@trained(
    lambda key: drawn(
        key, emb=(VOCABULARY, HIDDEN), w=(2 * HIDDEN, 4 * HIDDEN), out=(HIDDEN, CLASSES)
    ),
    _tokens,
    ADAM,
)
def lstm_with_resets(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """LSTM whose state is reset behind each separator token."""

    def cell(carry: Any, item: Any) -> Any:
        (h, c), (x, ends) = carry, item
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ params["w"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        keep = jnp.where(ends, 0.0, 1.0)[:, None]
        return (h * keep, c * keep), h

    inputs = jnp.moveaxis(params["emb"][tokens], 1, 0), (tokens == 0).T
    zeros = jnp.zeros((len(y), HIDDEN))
    _, states = jax.lax.scan(cell, (zeros, zeros), inputs)
    return entropy(states[-1] @ params["out"], y).mean()


def _signals(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 12, 3)), rng.integers(0, CLASSES, rows).astype(np.int32)


_CONV = ("NWC", "WIO", "NWC")


@trained(
    lambda key: drawn(key, k1=(3, 3, HIDDEN), k2=(3, HIDDEN, HIDDEN), out=(HIDDEN, CLASSES)),
    _signals,
    ADAM,
)
def dilated_convolutions(params: Tree, x: Any, y: Any) -> jax.Array:
    """Causal convolutions with dilation (WaveNet)."""
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1,), dimension_numbers=_CONV
    )
    h = jnp.tanh(conv(x, params["k1"], padding=[(2, 0)]))
    h = h + jnp.tanh(conv(h, params["k2"], padding=[(4, 0)], rhs_dilation=(2,)))
    return entropy(h.mean(1) @ params["out"], y).mean()


@trained(
    lambda key: drawn(key, down=(4, 3, HIDDEN), up=(4, HIDDEN, 3)),
    lambda rows, seed=0: _signals(rows, seed)[:1],
    ADAM,
)
def convolutional_autoencoder(params: Tree, x: Any) -> jax.Array:
    """Autoencoder with a strided and a transposed convolution."""
    code = jnp.tanh(
        jax.lax.conv_general_dilated(x, params["down"], (2,), "SAME", dimension_numbers=_CONV)
    )
    found = jax.lax.conv_transpose(code, params["up"], (2,), "SAME", dimension_numbers=_CONV)
    return ((found - x) ** 2).mean()


@trained(
    lambda key: drawn(key, depth=(3, 1, 3), point=(1, 3, HIDDEN), out=(HIDDEN, CLASSES)),
    _signals,
    ADAM,
)
def separable_convolution(params: Tree, x: Any, y: Any) -> jax.Array:
    """Depthwise convolution, then a convolution of width one."""
    h = jax.lax.conv_general_dilated(
        x, params["depth"], (1,), "SAME", dimension_numbers=_CONV, feature_group_count=3
    )
    h = jax.lax.conv_general_dilated(h, params["point"], (1,), "SAME", dimension_numbers=_CONV)
    return entropy(jax.nn.gelu(h).max(1) @ params["out"], y).mean()


@trained(lambda key: drawn(key, k=(3, 3, HIDDEN), out=(HIDDEN, CLASSES)), _signals, ADAM)
def standardized_kernels(params: Tree, x: Any, y: Any) -> jax.Array:
    """Convolution whose kernel is standardized."""
    k = params["k"]
    k = (k - k.mean((0, 1))) / jnp.sqrt(k.var((0, 1)) + 1e-4)
    h = jax.lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=_CONV)
    return entropy(jax.nn.relu(h).mean(1) @ params["out"], y).mean()


def _graph(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Return nodes, two neighbours of each node anywhere in the batch, and classes."""
    rng = np.random.default_rng(seed)
    return (*labelled(rows, seed), rng.integers(0, rows, (rows, 2)).astype(np.int32))


@trained(mlp, _graph, ADAM)
def graph_convolution(params: Tree, x: Any, y: Any, neighbours: Any) -> jax.Array:
    """Graph convolution: each row reads two other rows of the batch."""
    h = mlp_hidden(params, x)
    return entropy((h + h[neighbours].mean(1)) @ params["w2"] + params["b2"], y).mean()


def _edges(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Return nodes, and as many edges (sender, receiver) as nodes."""
    rng = np.random.default_rng(seed)
    return (*labelled(rows, seed), rng.integers(0, rows, (rows, 2)).astype(np.int32))


@trained(mlp, _edges, ADAM)
def message_passing(params: Tree, x: Any, y: Any, edges: Any) -> jax.Array:
    """Messages along edges, summed at their receivers by a segment sum."""
    h = mlp_hidden(params, x)
    received = jax.ops.segment_sum(h[edges[:, 0]], edges[:, 1], len(x))
    return entropy((h + received) @ params["w2"] + params["b2"], y).mean()


@trained(
    lambda key: drawn(key, w1=(3, HIDDEN), query=(HIDDEN, 1), out=(HIDDEN, CLASSES)), _signals, ADAM
)
def attention_pooling(params: Tree, x: Any, y: Any) -> jax.Array:
    """Set transformer: items of a row are pooled by a trained query."""
    h = jnp.tanh(x @ params["w1"])
    weights = jax.nn.softmax((h @ params["query"])[..., 0])
    return entropy(jnp.einsum("bt,bth->bh", weights, h) @ params["out"], y).mean()


@trained(lambda key: drawn(key, w=(FEATURES, FEATURES), out=(FEATURES, CLASSES)), labelled, ADAM)
def differential_equation(params: Tree, x: Any, y: Any) -> jax.Array:
    """Neural ODE: four steps of Runge-Kutta in a loop."""
    slope = lambda h: jnp.tanh(h @ params["w"])

    def advance(_: Any, h: Any) -> jax.Array:
        a = slope(h)
        b = slope(h + 0.05 * a)
        return h + 0.1 * (a + b) / 2

    return entropy(jax.lax.fori_loop(0, 4, advance, x) @ params["out"], y).mean()


def _fixed_point(w: Any, x: Any) -> jax.Array:
    def go_on(state: Any) -> Any:
        return (state[2] < 40) & (jnp.abs(state[0] - state[1]).max() > 1e-13)

    def step(state: Any) -> Any:
        return jnp.tanh(state[0] @ w + x), state[0], state[2] + 1

    return jax.lax.while_loop(go_on, step, (jnp.tanh(x), x - 1.0, 0))[0]


@jax.custom_vjp
def _equilibrium(w: Any, x: Any) -> jax.Array:
    return _fixed_point(w, x)


def _equilibrium_fwd(w: Any, x: Any) -> Any:
    h = _fixed_point(w, x)
    return h, (w, x, h)


def _equilibrium_bwd(saved: Any, cotangent: Any) -> Any:
    w, x, h = saved
    _, pull = jax.vjp(lambda w, h, x: jnp.tanh(h @ w + x), w, h, x)
    adjoint = jax.lax.fori_loop(0, 25, lambda _, a: cotangent + pull(a)[1], cotangent)
    by_w, _, by_x = pull(adjoint)
    return by_w, by_x


_equilibrium.defvjp(_equilibrium_fwd, _equilibrium_bwd)


@trained(
    lambda key: {"w": 0.1 * jnp.eye(FEATURES), **drawn(key, out=(FEATURES, CLASSES))},
    labelled,
    ADAM,
)
def deep_equilibrium(params: Tree, x: Any, y: Any) -> jax.Array:
    """Fixed point of a layer, with an implicit derivative (`jax.custom_vjp`)."""
    return entropy(_equilibrium(params["w"], x) @ params["out"], y).mean()


@trained(lambda key: drawn(key, w1=(3, HIDDEN), w2=(HIDDEN, 6)), plain, ADAM)
def coupling_flow(params: Tree, x: Any) -> jax.Array:
    """Normalizing flow: an affine coupling layer, and its log determinant."""
    left, right = x[:, :3], x[:, 3:]
    scale, shift = jnp.split(jnp.tanh(left @ params["w1"]) @ params["w2"], 2, -1)
    z = jnp.concatenate([left, right * jnp.exp(scale) + shift], -1)
    return (0.5 * (z**2).sum(-1) - scale.sum(-1)).mean()


def _noised(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (*plain(rows, seed), jax.random.key(seed))


@trained(lambda key: drawn(key, w1=(FEATURES + 1, HIDDEN), w2=(HIDDEN, FEATURES)), _noised, ADAM)
def diffusion(params: Tree, x: Any, key: Any) -> jax.Array:
    """Diffusion model: predict the noise of a random time of each row."""
    of_time, of_noise = jax.random.split(key)
    time = jax.random.uniform(of_time, (len(x), 1), jnp.float64)
    noise = jax.random.normal(of_noise, x.shape, jnp.float64)
    noisy = jnp.sqrt(1 - time) * x + jnp.sqrt(time) * noise
    found = jnp.tanh(jnp.concatenate([noisy, time], -1) @ params["w1"]) @ params["w2"]
    return ((found - noise) ** 2).mean()


@trained(lambda key: drawn(key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, FEATURES)), plain, ADAM)
def sliced_score_matching(params: Tree, x: Any) -> jax.Array:
    """Score matching along a fixed direction: a derivative of each row in forward mode."""
    score = lambda x: jnp.tanh(x @ params["w1"]) @ params["w2"]
    along = jnp.ones(FEATURES)

    def of_row(row: Any) -> jax.Array:
        value, slope = jax.jvp(score, (row,), (along,))
        return slope @ along + 0.5 * (value @ along) ** 2

    return jax.vmap(of_row)(x).mean()


@trained(
    lambda key: drawn(key, w1=(2, HIDDEN), w2=(HIDDEN, 1)),
    lambda n, seed=0: plain(n, seed, 2),
    ADAM,
)
def physics_informed(params: Tree, x: Any) -> jax.Array:
    """Residual of the heat equation: second derivatives by each row's inputs."""
    u = lambda point: (jnp.tanh(point @ params["w1"]) @ params["w2"])[0]

    def residual(point: Any) -> jax.Array:
        return jax.grad(u)(point)[0] - jax.hessian(u)(point)[1, 1]

    return (jax.vmap(residual)(x) ** 2).mean()


@trained(lambda key: drawn(key, hyper=(2, FEATURES * CLASSES)), labelled, ADAM)
def hypernetwork(params: Tree, x: Any, y: Any) -> jax.Array:
    """Weights that another layer computes from each row."""
    w = jnp.tanh(x[:, :2] @ params["hyper"]).reshape(len(x), FEATURES, CLASSES)
    return entropy(jnp.einsum("bf,bfc->bc", x, w), y).mean()


@trained(lambda key: {**mlp(key), "g": jnp.ones(HIDDEN)}, labelled, ADAM)
def weight_norm(params: Tree, x: Any, y: Any) -> jax.Array:
    """Weights with a separate length."""
    w = params["g"] * params["w1"] / jnp.linalg.norm(params["w1"], axis=0)
    return entropy(jnp.tanh(x @ w) @ params["w2"] + params["b2"], y).mean()


@trained(
    lambda key: {
        **drawn(key, gate=(FEATURES, HIDDEN), up=(FEATURES, HIDDEN), down=(HIDDEN, CLASSES)),
        "scale": jnp.ones(FEATURES),
    },
    labelled,
    CLIPPED_ADAMW,
)
def gated_units(params: Tree, x: Any, y: Any) -> jax.Array:
    """RMS norm, then SwiGLU."""
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"]
    return entropy(
        (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"], y
    ).mean()


@trained(
    lambda key: drawn(key, router=(FEATURES, 3), w1=(3, FEATURES, HIDDEN), w2=(3, HIDDEN, CLASSES)),
    labelled,
    ADAM,
)
def two_experts(params: Tree, x: Any, y: Any) -> jax.Array:
    """Two experts for each row, chosen by top-k, without a capacity."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    dispatch = (jax.nn.one_hot(chosen, 3) * weights[..., None]).sum(1)
    each = jnp.einsum(
        "ebh,ehc->ebc", jnp.tanh(jnp.einsum("bf,efh->ebh", x, params["w1"])), params["w2"]
    )
    return entropy(jnp.einsum("be,ebc->bc", dispatch, each), y).mean()


@trained(mlp, labelled, ADAM)
def quantized_weights(params: Tree, x: Any, y: Any) -> jax.Array:
    """Weights of eight bits with a straight-through estimator."""

    def quantize(w: Any) -> jax.Array:
        scale = jnp.abs(w).max() / 127
        return w + jax.lax.stop_gradient(jnp.round(w / scale) * scale - w)

    low = {n: quantize(w) if n.startswith("w") else w for n, w in params.items()}
    return entropy(mlp_logits(low, x), y).mean()


@trained(lambda key: drawn(key, emb=(VOCABULARY, HIDDEN), out=(HIDDEN, CLASSES)), _tokens, ADAM)
def bag_of_embeddings(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """Mean of the embeddings of a row's tokens, without padding tokens."""
    used = (tokens > 0).astype(jnp.float64)[..., None]
    bags = (params["emb"][tokens] * used).sum(1) / jnp.maximum(used.sum(1), 1)
    return entropy(bags @ params["out"], y).mean()


@trained(
    lambda key: drawn(key, emb=(VOCABULARY, HIDDEN)),
    lambda rows, seed=0: _tokens(rows, seed)[:1],
    ADAM,
)
def tied_softmax(params: Tree, tokens: Any) -> jax.Array:
    """Language model with one matrix for embeddings and softmax."""
    h = jnp.cumsum(params["emb"][tokens[:, :-1]], 1) / jnp.arange(1.0, LENGTH)[:, None]
    return entropy(h @ params["emb"].T, tokens[:, 1:]).mean()


@trained(lambda key: drawn(key, emb=(VOCABULARY, HIDDEN), factor=(VOCABULARY, 1)), _tokens, ADAM)
def factorization_machine(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """Factorization machine over the tokens of a row."""
    e = params["emb"][tokens]
    pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(-1)
    score = params["factor"][tokens].sum((1, 2)) + pairs
    return (jax.nn.softplus(score) - (y % 2) * score).mean()


@trained(
    lambda key: drawn(key, users=(VOCABULARY, HIDDEN), items=(VOCABULARY, HIDDEN)), _tokens, ADAM
)
def in_batch_negatives(params: Tree, tokens: Any, y: Any) -> jax.Array:
    """Two towers: the items of other rows are negatives."""
    users, items = params["users"][tokens[:, 0]], params["items"][tokens[:, 1]]
    return entropy(users @ items.T, jnp.arange(len(y))).mean()


# -- methods ---------------------------------------------------------------------------------------


def _with(tx: Any, params: Any = mlp) -> Any:
    def init(key: jax.Array) -> tuple[Tree, Tree]:
        made = params(key)
        return made, tx.init(made)

    return init


def _mean_gradients(params: Tree, x: Any, y: Any) -> tuple[jax.Array, Tree]:
    return dtrans.value_and_grad(lambda p: _each(p, x, y).mean())(params)


@stepped(_with(ADAM), labelled)
def centred_gradients(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Gradient centralization: the mean of each column is removed."""
    loss, grads = _mean_gradients(params, x, y)
    grads = {n: g - g.mean(0) if g.ndim > 1 else g for n, g in grads.items()}
    return (*update(ADAM, grads, opt_state, params), loss)


_CLIPPED = optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1))


@stepped(_with(_CLIPPED), labelled)
def adaptive_clip(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Gradients are clipped by the norm of their units."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(_CLIPPED, grads, opt_state, params), loss)


_SKIPPED = optax.apply_if_finite(optax.adam(1e-2), 3)


@stepped(_with(_SKIPPED), labelled)
def skipped_if_infinite(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """An update is skipped if a gradient is not finite."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(_SKIPPED, grads, opt_state, params), loss)


_NOISED = optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.sgd(0.1))


@stepped(_with(_NOISED), labelled)
def noised_gradients(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Gradients with noise from a key in the optimizer's state."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(_NOISED, grads, opt_state, params), loss)


_WARM = optax.adamw(
    optax.warmup_cosine_decay_schedule(0, 1e-2, 3, 9),
    mask={"w1": True, "b1": False, "w2": True, "b2": False},
)


@stepped(_with(_WARM), labelled)
def masked_decay(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Warm-up and cosine decay; biases have no weight decay."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(_WARM, grads, opt_state, params), loss)


_LAYERED = optax.multi_transform(
    {"slow": optax.sgd(0.01), "fast": optax.adam(0.02)},
    {"w1": "slow", "b1": "slow", "w2": "fast", "b2": "fast"},
)


@stepped(_with(_LAYERED), labelled)
def rates_of_layers(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Another optimizer for each layer."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(_LAYERED, grads, opt_state, params), loss)


@stepped(lambda key: ((p := mlp(key)), (ADAM.init(p), p)), labelled)
def averaged_weights(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Moving average of the parameters, which evaluation reads."""
    loss, grads = _mean_gradients(params, x, y)
    params, inner = update(ADAM, grads, opt_state[0], params)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, opt_state[1], params)
    return params, (inner, average), loss


@stepped(_with(MOMENTUM), labelled)
def accumulated_in_a_scan(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Gradients of two halves of the batch, summed in a scan by the step itself."""
    halves = x.reshape(2, -1, FEATURES), y.reshape(2, -1)

    def add(total: Any, half: Any) -> Any:
        loss, grads = _mean_gradients(params, *half)
        return jax.tree.map(jnp.add, total, grads), loss

    grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), halves)
    grads = jax.tree.map(lambda g: g / 2, grads)
    return (*update(MOMENTUM, grads, opt_state, params), losses.mean())


@stepped(_with(ADAM), labelled)
def penalty_on_the_gradient(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """A penalty on the norm of the gradient by parameters."""

    def loss_fn(p: Tree) -> jax.Array:
        loss, grads = jax.value_and_grad(lambda q: _each(q, x, y).mean())(p)
        return loss + 0.1 * sum((g**2).sum() for g in jax.tree.leaves(grads))

    loss, grads = dtrans.value_and_grad(loss_fn)(params)
    return (*update(ADAM, grads, opt_state, params), loss)


@stepped(_with(optax.contrib.muon(0.01)), labelled)
def muon(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Muon: momenta of matrices are orthogonalized by Newton-Schulz iterations."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(optax.contrib.muon(0.01), grads, opt_state, params), loss)


_FREE = optax.contrib.schedule_free_adamw(1e-2)


@stepped(_with(_FREE), labelled)
def schedule_free(params: Tree, opt_state: Tree, x: Any, y: Any) -> tuple[Any, ...]:
    """Schedule-free AdamW, whose state contains a second copy of the parameters."""
    loss, grads = _mean_gradients(params, x, y)
    return (*update(_FREE, grads, opt_state, params), loss)


CASES = cases_of(__name__)
