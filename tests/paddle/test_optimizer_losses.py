"""Losses of recorded jobs of paddlepaddle 1.8.5, compared step by step in float32.

`golden/paddle-optimizers.json` has seven runs. `golden/optimizers.json` has the other optimizers,
clips and learning rate decays, recorded with the same problem. The problem's batch has 64 rows,
from two seeds. The text in the first file has only 32 of these rows, which give other losses.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import GOLDEN

from dtrans.paddle import optimizers
from dtrans.paddle.optimizers import (
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    cosine_decay,
    decayed_adagrad,
    dpsgd,
    exponential_decay,
    ftrl,
    gradient_clip_by_global_norm,
    gradient_clip_by_norm,
    gradient_clip_by_value,
    inverse_time_decay,
    lamb,
    lars_momentum,
    linear_lr_warmup,
    momentum,
    multi_step_decay,
    natural_exp_decay,
    noam_decay,
    piecewise_decay,
    polynomial_decay,
    rmsprop,
    sgd,
    step_decay,
)


GIVEN = json.loads((GOLDEN / "paddle-optimizers.json").read_text())["runs"]
RECORDED = json.loads((GOLDEN / "optimizers.json").read_text())
STEPS = 40


def l1_decay(coeff):
    """Return Paddle's L1Decay, as docs/paddle.md describes it."""
    return optax.stateless(
        lambda grads, params: jax.tree.map(lambda g, p: g + coeff * jnp.sign(p), grads, params)
    )


# the names are those of golden/paddle-optimizers.json
SEVEN = {
    "adagrad": lambda lr: adagrad(lr),
    "adamax": lambda lr: adamax(lr),
    "rmsprop": lambda lr: rmsprop(lr),
    "rmsprop_c": lambda lr: rmsprop(lr, momentum=0.9, centered=True),
    "nesterov": lambda lr: momentum(lr, 0.9, use_nesterov=True),
    "ftrl": lambda lr: ftrl(lr, l1=0.001, l2=0.01),
    "adadelta": lambda lr: adadelta(lr),
}

# the names are those of golden/optimizers.json, which also has Paddle's calls
RUNS = {
    "sgd": sgd(0.02),
    "momentum": momentum(0.02, 0.9),
    "adam": adam(0.05),
    "adam, epsilon": adam(0.05, beta1=0.8, beta2=0.99, epsilon=0.1),
    "adamw": adamw(0.05, weight_decay=0.01),
    "adamw, bias excluded": adamw(
        0.05, 0.02, epsilon=0.1, apply_decay_param_fun=lambda name: name != "b"
    ),
    "adamax, epsilon": adamax(0.02, beta1=0.8, beta2=0.9, epsilon=0.1),
    "adagrad, epsilon": adagrad(0.05, epsilon=0.1, initial_accumulator_value=0.1),
    "decayed_adagrad": decayed_adagrad(0.01),
    "decayed_adagrad, epsilon": decayed_adagrad(0.02, decay=0.8, epsilon=0.1),
    "adadelta, no learning rate": adadelta(0.1, epsilon=1e-5, rho=0.8),
    "rmsprop, epsilon": rmsprop(0.01, rho=0.8, epsilon=0.1, momentum=0.5),
    "ftrl, power": ftrl(0.05, l1=0.1, l2=0.5, lr_power=-0.4),
    "lamb": lamb(0.01),
    "lamb, excluded": lamb(
        0.02, 0.1, 0.8, 0.99, 0.1, exclude_from_weight_decay_fn=lambda name: name == "w"
    ),
    "lars_momentum": lars_momentum(0.5, 0.9, lars_coeff=0.1),
    "lars_momentum, no decay": lars_momentum(0.5, 0.9, lars_coeff=0.1, lars_weight_decay=0.0),
    "lars_momentum, decay": lars_momentum(0.5, 0.9, lars_coeff=0.1, lars_weight_decay=0.1),
    "dpsgd": dpsgd(0.05, clip=1.0, batch_size=16.0, sigma=0.5, seed=100),
    "dpsgd, another seed": dpsgd(0.05, clip=2.0, batch_size=4.0, sigma=0.5, seed=7),
    "gradient_clip_by_value": optax.chain(gradient_clip_by_value(0.5), sgd(0.05)),
    "gradient_clip_by_value, min": optax.chain(
        gradient_clip_by_value(max=0.5, min=-0.1), sgd(0.05)
    ),
    "gradient_clip_by_value, L1Decay": optax.chain(
        gradient_clip_by_value(0.5), l1_decay(0.1), sgd(0.05)
    ),
    "gradient_clip_by_norm": optax.chain(gradient_clip_by_norm(1.0), sgd(0.05)),
    "gradient_clip_by_norm, bias alone": optax.chain(
        gradient_clip_by_norm(0.1, lambda name: name == "b"), sgd(0.02)
    ),
    "gradient_clip_by_global_norm": optax.chain(gradient_clip_by_global_norm(1.0), sgd(0.05)),
    "gradient_clip_by_global_norm, L2Decay": optax.chain(
        gradient_clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), momentum(0.02, 0.9)
    ),
}

DECAYS = {
    "noam_decay": noam_decay(20, 10, 0.5),
    "exponential_decay": exponential_decay(0.05, 10, 0.5),
    "exponential_decay, staircase": exponential_decay(0.05, 10, 0.5, staircase=True),
    "natural_exp_decay": natural_exp_decay(0.05, 10, 0.5),
    "natural_exp_decay, staircase": natural_exp_decay(0.05, 10, 0.5, staircase=True),
    "inverse_time_decay": inverse_time_decay(0.05, 10, 0.5),
    "inverse_time_decay, staircase": inverse_time_decay(0.05, 10, 0.5, staircase=True),
    "polynomial_decay": polynomial_decay(0.05, 15, 0.01, 2.0),
    "polynomial_decay, cycle": polynomial_decay(0.05, 15, 0.01, 2.0, cycle=True),
    "piecewise_decay": piecewise_decay([10, 20], [0.05, 0.02, 0.01]),
    "cosine_decay": cosine_decay(0.05, 5, 7),
    "step_decay": step_decay(0.5, step_size=3, decay_rate=0.5),
    "multi_step_decay": multi_step_decay(0.5, milestones=[3, 7, 20], decay_rate=0.5),
    "linear_lr_warmup": linear_lr_warmup(0.05, 10, 0.01, 0.1),
    "linear_lr_warmup, cosine_decay": linear_lr_warmup(cosine_decay(0.05, 5, 8), 10, 0.0, 0.05),
    "linear_lr_warmup, noam_decay": linear_lr_warmup(
        noam_decay(20, 10, 0.5), 10, 0.0, 0.05, begin=1
    ),
}


@pytest.fixture(scope="module")
def batches():
    """Return x and y of every step."""
    rows = lambda s: [np.random.RandomState(s + 7 + 1000 * k).randn(32, 20) for k in (0, 1)]
    x = np.stack([np.concatenate(rows(s)) for s in range(STEPS)]).astype("float32")
    return x, x @ np.linspace(-1, 1, 20).astype("float32")[:, None]


def train(tx, batches):
    """Return the losses of a job, and its parameters after the last step."""

    def loss(params, x, y):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    def step(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = {"b": jnp.zeros(1), "w": jnp.full((20, 1), 0.1)}
    (params, _), losses = jax.jit(lambda start: jax.lax.scan(step, start, batches))(
        (params, tx.init(params))
    )
    return losses, params


@pytest.mark.parametrize("name", GIVEN)
def test_the_seven_runs_have_paddles_losses_and_parameters(name, batches):
    run = GIVEN[name]
    losses, params = train(SEVEN[name](run["lr"]), batches)
    np.testing.assert_allclose(losses, run["losses"], rtol=1e-5)
    for leaf, (total, absolute, first) in run["params"].items():
        value = np.asarray(params[leaf], np.float64).ravel()
        np.testing.assert_allclose([value.sum(), abs(value).sum()], [total, absolute], atol=1e-5)
        np.testing.assert_allclose(value[:5], first, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RECORDED["runs"])
def test_other_runs_have_paddles_losses(name, batches):
    losses, _ = train(RUNS[name], batches)
    np.testing.assert_allclose(losses, RECORDED["runs"][name]["losses"], rtol=1e-5)


def test_optaxs_adadelta_is_another_optimizer(batches):
    """optax's adadelta equals `fix=True`. Its losses differ from Paddle's by up to 2.8 %."""
    losses, _ = train(optax.adadelta(1.0, rho=0.95), batches)
    assert np.abs(losses / np.array(GIVEN["adadelta"]["losses"]) - 1).max() > 0.02
    fixed, _ = train(adadelta(1.0, fix=True), batches)
    np.testing.assert_array_equal(fixed, losses)


@pytest.mark.parametrize("name", RECORDED["decays"])
def test_decays_have_paddles_learning_rates(name):
    want = RECORDED["decays"][name]["learning_rates"]
    np.testing.assert_allclose(DECAYS[name](jnp.arange(STEPS)), want, rtol=2e-6)
    assert DECAYS[name](11) == DECAYS[name](jnp.int32(11))


def test_every_public_function_was_recorded():
    recorded = {name.partition(", ")[0] for name in (*RUNS, *DECAYS)} | set(SEVEN) - {
        "rmsprop_c",
        "nesterov",
    }
    public = {
        name for name, value in vars(optimizers).items() if callable(value) and name.islower()
    }
    assert public == recorded
    assert set(SEVEN) == set(GIVEN)
    assert (set(RUNS), set(DECAYS)) == (set(RECORDED["runs"]), set(RECORDED["decays"]))
