"""Optimizers whose state has one number for each row, compared with loops over rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.optimizers import rowwise_adagrad, rowwise_adam
from dtrans.rows.analysis import analyse
from dtrans.step.halves import divide_step


GRADIENTS = np.random.default_rng(0).normal(size=(5, 4, 3))


def descended(tx: optax.GradientTransformation, gradients: np.ndarray) -> np.ndarray:
    params = jnp.zeros(gradients.shape[1:])
    state = tx.init(params)
    for g in gradients:
        updates, state = tx.update(jnp.asarray(g), state)
        params = optax.apply_updates(params, updates)
    return np.asarray(params)


def adagrad_by_rows(gradients: np.ndarray, lr: float, start: float, eps: float) -> np.ndarray:
    w = np.zeros(gradients.shape[1:])
    total = np.full(len(w), start)
    for g in gradients:
        for i, row in enumerate(g):
            total[i] += np.mean(row**2)
            w[i] -= lr * row / (np.sqrt(total[i]) + eps)
    return w


def adam_by_rows(gradients: np.ndarray, lr: float, b1: float, b2: float, eps: float) -> np.ndarray:
    w = np.zeros(gradients.shape[1:])
    m, v = np.zeros_like(w), np.zeros(len(w))
    for t, g in enumerate(gradients, 1):
        for i, row in enumerate(g):
            m[i] = b1 * m[i] + (1 - b1) * row
            v[i] = b2 * v[i] + (1 - b2) * np.mean(row**2)
            w[i] -= lr * (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + eps)
    return w


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [(4, 3), (4,), (4, 3, 1)], ids=str)
def test_each_row_has_a_moment_of_its_own(shape: tuple[int, ...]) -> None:
    given = GRADIENTS[:, :, : 1 if shape == (4,) else 3].reshape(5, *shape)
    found = descended(rowwise_adagrad(0.3, initial_accumulator_value=0.2, eps=1e-3), given)
    np.testing.assert_allclose(found, adagrad_by_rows(given, 0.3, 0.2, 1e-3), rtol=1e-14)
    found = descended(rowwise_adam(0.3, b1=0.8, b2=0.9, eps=1e-3), given)
    np.testing.assert_allclose(found, adam_by_rows(given, 0.3, 0.8, 0.9, 1e-3), rtol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "ours, optaxs", [(rowwise_adagrad, optax.adagrad), (rowwise_adam, optax.adam)]
)
def test_rows_of_one_number_are_optaxs(ours: object, optaxs: object) -> None:
    """A leaf without dimensions is one row."""
    options = {"eps": 1e-9} | (
        {"initial_accumulator_value": 0.1} if optaxs is optax.adagrad else {}
    )
    schedule = optax.cosine_decay_schedule(0.1, 5)
    for given in (GRADIENTS[:, :, :1], GRADIENTS[:, 0, 0]):
        pair = (tx(schedule, **options) for tx in (ours, optaxs))  # type: ignore[operator]
        found, known = (descended(tx, given) for tx in pair)
        np.testing.assert_allclose(found, known, rtol=1e-8)


def test_servers_cut_the_moments_as_they_cut_the_rows() -> None:
    params = {"emb": jnp.ones((40, 3)), "scale": jnp.ones(())}
    for tx in (rowwise_adagrad(0.1), rowwise_adam(0.1)):
        step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids]) * p["scale"], tx)
        parts = divide_step(dtrans.trace(step, params, tx.init(params), jnp.zeros(4, int)))
        found = analyse(parts.optimize, parts.optimized)
        assert not found.groups, found
        assert jax.tree.structure(params) == jax.tree.structure(tx.init(params)[0][-1])
