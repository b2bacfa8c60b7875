"""Losses over tables, compared with definitions in NumPy, and used with tables of a plan."""

from __future__ import annotations

import functools
from typing import Any

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans import nn
from dtrans.errors import ConfigError
from dtrans.parameter_server.tables.lookups import find_lookups
from dtrans.step.halves import divide_step


pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
V, D, B = 11, 3, 5


# -- bags ------------------------------------------------------------------------------------------


def bag_by_numpy(
    table: Any, ids: Any, bags: Any, count: int, weights: Any, mode: str, padding: int | None
) -> Any:
    out = np.zeros((count, table.shape[1]))
    for b in range(count):
        of = [
            (table[i], w)
            for i, at, w in zip(ids, bags, weights, strict=True)
            if at == b and i != padding
        ]
        total = sum((w * row for row, w in of), np.zeros(table.shape[1]))
        by = {
            "sum": 1.0,
            "mean": sum(w for _, w in of),
            "sqrtn": np.sqrt(sum(w * w for _, w in of)),
        }[mode]
        out[b] = total / by if of else 0
    return out


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
def test_bags(mode: Any, weighted: bool, padding: int | None) -> None:
    table, ids = RNG.normal(size=(V, D)), RNG.integers(0, V, 20)
    bags = np.sort(RNG.integers(0, 4, 20)) * 2  # every second bag is empty
    weights = RNG.uniform(0.5, 2, 20) if weighted else None
    bag = functools.partial(
        nn.embedding_bag, num_segments=8, weights=weights, mode=mode, padding_idx=padding
    )
    made = by_numpy.call(bag, table, ids, bags)
    wanted = bag_by_numpy(
        table, ids, bags, 8, np.ones(20) if weights is None else weights, mode, padding
    )
    np.testing.assert_allclose(made, wanted, rtol=1e-12, atol=1e-14)


def test_a_row_of_padding_has_no_gradient() -> None:
    table, ids = jnp.asarray(RNG.normal(size=(V, D))), jnp.array([10, 2, 10])
    for padding in (10, -1):
        loss = lambda t, padding=padding: nn.embedding_bag(
            t, ids, jnp.zeros(3, int), 1, padding_idx=padding
        ).sum()
        grad = by_numpy.call(jax.grad(loss), table)
        assert not grad[10].any() and grad[2].all()


def test_bags_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"have the shapes \(3,\), \(2,\); expected the same shape \(n,\)"
    ):
        nn.embedding_bag(jnp.ones((V, D)), jnp.zeros(3, int), jnp.zeros(2, int), 1)
    with pytest.raises(ConfigError, match="mode"):
        table, ids = jnp.ones((V, D)), jnp.zeros(3, int)
        nn.embedding_bag(table, ids, ids, 1, mode="max")  # type: ignore[arg-type]


# -- noise -----------------------------------------------------------------------------------------

SAMPLERS = {
    "uniform": nn.uniform_sampler(V),
    "log-uniform": nn.log_uniform_sampler(V),
    "custom": nn.custom_sampler([*range(V)]),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_drawn_has_the_probability_that_is_said(name: str) -> None:
    drawn = np.asarray(SAMPLERS[name].draw(jax.random.key(0), (40_000,)))
    said = np.exp(np.asarray(SAMPLERS[name].log_probability(jnp.arange(V))))
    np.testing.assert_allclose(said.sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.bincount(drawn, minlength=V) / 40_000, said, atol=0.01)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_nce(name: str, shared: bool) -> None:
    sampler, k = SAMPLERS[name], 4
    weight, bias, x = RNG.normal(size=(V, D)), RNG.normal(size=(V, 1)), RNG.normal(size=(B, D))
    labels = RNG.integers(1, V, B)
    noise = np.asarray(sampler.draw(jax.random.key(1), (k,) if shared else (B, k)))
    loss = functools.partial(nn.nce_loss, sampler=sampler)
    made = by_numpy.call(loss, weight, bias, x, labels, noise)
    sigmoid = lambda v: 1 / (1 + np.exp(-v))
    log_q = np.asarray(sampler.log_probability(jnp.arange(V)))
    for i in range(B):
        odds = lambda c, i=i: weight[c] @ x[i] + bias[c, 0] - log_q[c] - np.log(k)
        wanted = -np.log(sigmoid(odds(labels[i])))
        wanted -= sum(np.log(1 - sigmoid(odds(c))) for c in (noise if shared else noise[i]))
        np.testing.assert_allclose(made[i], wanted, rtol=1e-9)


def test_samplers_and_noise_that_do_not_fit_are_refused() -> None:
    for wrong in ([], [-1.0, 2.0], [0.0, 0.0], [[1.0]], [np.inf]):
        with pytest.raises(ConfigError, match="probabilities is invalid; expected"):
            nn.custom_sampler(wrong)
    sampler, x = SAMPLERS["uniform"], jnp.ones((B, D))
    with pytest.raises(ConfigError, match="noise has the shape"):
        nn.nce_loss(jnp.ones((V, D)), None, x, jnp.zeros(B, int), jnp.zeros((2, 3), int), sampler)
    with pytest.raises(ConfigError, match="have the shapes .* expected"):
        nn.nce_loss(jnp.ones((V, D)), None, x, jnp.zeros(2, int), jnp.zeros(3, int), sampler)


# -- trees -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("classes", [2, 3, 8, 11])
@pytest.mark.parametrize("kind", ["complete", "huffman"])
def test_the_probabilities_of_all_classes_add_up_to_one(kind: str, classes: int) -> None:
    tree = (
        nn.complete_tree(classes)
        if kind == "complete"
        else nn.huffman_tree(RNG.uniform(size=classes))
    )
    assert tree.inner == classes - 1
    weight, bias = RNG.normal(size=(classes - 1, D)), RNG.normal(size=classes - 1)
    x = np.broadcast_to(RNG.normal(size=D), (classes, D))
    of_tree = functools.partial(nn.hierarchical_sigmoid, tree=tree)
    loss = by_numpy.call(of_tree, weight, bias, x, np.arange(classes))
    np.testing.assert_allclose(np.exp(-loss).sum(), 1.0, rtol=1e-12)


@pytest.mark.parametrize("classes", [5, 8])
def test_the_complete_tree_is_paddles(classes: int) -> None:
    """In Paddle's `SimpleCode`, each bit of classes + label below the highest bit is a turn, and
    the bits above it are a node."""
    tree = nn.complete_tree(classes)
    weight, x = RNG.normal(size=(classes - 1, D)), RNG.normal(size=(classes, D))
    of_tree = lambda w, x, label: nn.hierarchical_sigmoid(w, None, x, label, tree)
    made = by_numpy.call(of_tree, weight, x, np.arange(classes))
    for label in range(classes):
        code, wanted = classes + label, 0.0
        for bit in range(code.bit_length() - 1):
            logit = weight[(code >> (bit + 1)) - 1] @ x[label]
            wanted += np.log1p(np.exp(logit)) - ((code >> bit) & 1) * logit
        np.testing.assert_allclose(made[label], wanted, rtol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_may_have_paths_of_their_own(with_bias: bool) -> None:
    """Each row has its path in the batch: trees of several shapes, and rows without a node."""
    depth, rows = 4, 6
    weight, x = RNG.normal(size=(V, D)), RNG.normal(size=(rows, D))
    bias = RNG.normal(size=(V, 1)) if with_bias else None
    table, code = RNG.integers(0, V, (rows, depth)), RNG.integers(0, 2, (rows, depth))
    for row, length in enumerate([4, 0, 1, 2, 3, 4]):
        table[row, length:] = -1
    found = by_numpy.call(nn.custom_hierarchical_sigmoid, weight, bias, x, table, code)
    for row in range(rows):
        wanted = 0.0
        for node, turn in zip(table[row], code[row], strict=True):
            if node >= 0:
                logit = weight[node] @ x[row] + (0.0 if bias is None else bias[node, 0])
                wanted -= np.log(1 / (1 + np.exp(-logit if turn else logit)))
        np.testing.assert_allclose(found[row], wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["complete", "huffman"])
def test_paths_of_a_class_tree_have_its_loss_and_gradients(kind: str) -> None:
    tree = nn.complete_tree(V) if kind == "complete" else nn.huffman_tree(np.arange(1, V + 1))
    weight, x = jnp.asarray(RNG.normal(size=(V - 1, D))), jnp.asarray(RNG.normal(size=(B, D)))
    labels = RNG.integers(0, V, B)
    by_class = lambda w, x: nn.hierarchical_sigmoid(w, None, x, jnp.asarray(labels), tree).sum()
    backwards = jnp.asarray(tree.nodes[labels, ::-1]), jnp.asarray(tree.turns[labels, ::-1])
    by_path = lambda w, x: nn.custom_hierarchical_sigmoid(w, None, x, *backwards).sum()
    wanted = jax.value_and_grad(by_class, (0, 1))(weight, x)
    found = jax.value_and_grad(by_path, (0, 1))(weight, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, wanted)


def test_frequent_classes_have_short_ways() -> None:
    frequencies = RNG.zipf(1.5, 30)
    lengths = (nn.huffman_tree(frequencies).nodes >= 0).sum(1)
    order = np.argsort(-frequencies, kind="stable")
    assert np.all(np.diff(frequencies[order]) <= 0)
    mean = (lengths * frequencies).sum() / frequencies.sum()
    share = frequencies / frequencies.sum()
    entropy = -(share * np.log2(share)).sum()
    assert entropy <= mean < entropy + 1  # the optimum, as Huffman proved


def test_trees_that_are_none_are_refused() -> None:
    for wrong in ([1.0], [-1.0, 2.0], [[1.0, 2.0]]):
        with pytest.raises(ConfigError, match="frequencies is invalid; expected"):
            nn.huffman_tree(wrong)
    with pytest.raises(ConfigError, match="have the shapes .* expected"):
        nn.hierarchical_sigmoid(
            jnp.ones((4, D)), None, jnp.ones((2, D)), jnp.zeros(2, int), nn.complete_tree(4)
        )
    weight, x, path = jnp.ones((4, D)), jnp.ones((2, D)), jnp.zeros((2, 3), int)
    for table, code in ((path, path[:, 1:]), (path[0], path[0]), (path[:1], path[:1])):
        with pytest.raises(ConfigError, match="path_table and path_code have the shapes"):
            nn.custom_hierarchical_sigmoid(weight, None, x, table, code)
    with pytest.raises(ConfigError, match=r"weight and x have the shapes \(4, 2\) and \(2, 3\)"):
        nn.custom_hierarchical_sigmoid(weight[:, 1:], None, x, path, path)


# -- as tables -------------------------------------------------------------------------------------

TREE = nn.huffman_tree(np.arange(1, V + 1))


def skip_gram(p: Any, center: jax.Array, context: jax.Array) -> jax.Array:
    noise = SAMPLERS["log-uniform"].draw(jax.random.key(3), (4,))
    return nn.nce_loss(
        p["out"], p["bias"], p["emb"][center], context, noise, SAMPLERS["log-uniform"]
    ).mean()


def by_tree(p: Any, center: jax.Array, context: jax.Array) -> jax.Array:
    return nn.hierarchical_sigmoid(p["out"][: V - 1], None, p["emb"][center], context, TREE).mean()


def by_path(p: Any, center: jax.Array, context: jax.Array) -> jax.Array:
    """The batch array `context` is a node of the first path, and parent of the second node."""
    table, code = jnp.stack([context, context // 2], 1), jnp.stack([context % 2, context % 3], 1)
    return nn.custom_hierarchical_sigmoid(
        p["out"], p["bias"], p["emb"][center], table, jnp.minimum(code, 1)
    ).mean()


def bags(p: Any, center: jax.Array, context: jax.Array) -> jax.Array:
    bag = nn.embedding_bag(
        p["emb"], jnp.concatenate([center, context]), jnp.tile(jnp.arange(B), 2), B, mode="mean"
    )
    return jnp.mean((bag @ p["w"]) ** 2)


@pytest.mark.parametrize(
    "loss, tables",
    [
        (skip_gram, {"params/emb", "params/out", "params/bias"}),
        (by_tree, {"params/emb"}),
        (by_path, {"params/emb", "params/out", "params/bias"}),
        (bags, {"params/emb"}),
    ],
)
def test_their_tables_are_tables_of_a_plan(loss: Any, tables: set[str]) -> None:
    params = {"emb": np.ones((V, D)), "out": np.ones((V, D)), "bias": np.ones(V), "w": np.ones(D)}
    tx, ids = optax.sgd(0.1), np.zeros(B, np.int32)
    main = dtrans.trace(dtrans.make_train_step(loss, tx), params, tx.init(params), ids, ids)
    assert set(find_lookups(divide_step(main)).tables) == tables
