"""Losses that are rewritten for parts: micro-batches and micro-steps whose sum is not a multiple of
one term."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dtrans
from dtrans.errors import ConfigError


def critic(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]


@jax.custom_vjp
def reversed_gradient(x: Any) -> Any:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@jax.custom_jvp
def rounded(x: Any) -> Any:
    return jnp.round(x)


rounded.defjvps(lambda t, out, x: t)


def reals_and_fakes(p: Any, x: Any, y: Any, key: Any) -> Any:
    labels = jnp.concatenate([jnp.ones(len(x)), jnp.zeros(len(y))])
    return optax.sigmoid_binary_cross_entropy(critic(p, jnp.concatenate([x, y])), labels).mean()


def wasserstein(p: Any, x: Any, y: Any, key: Any) -> Any:
    return critic(p, y).mean() - critic(p, x).mean()


def over_rows(p: Any, x: Any, y: Any, key: Any) -> Any:
    return lax.map(lambda r: critic(p, r[0]) * jnp.sin(critic(p, r[1])), (x, y)).mean()


def dropout_in_a_scan(p: Any, x: Any, y: Any, key: Any) -> Any:
    def layer(h: Any, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.where(mask, jnp.tanh(h @ p["w"] @ p["w"].T), 0.0), jnp.square(h).sum(1).mean()

    h, norms = lax.scan(layer, x, jax.random.split(key, 3))
    return (h @ p["w"] @ p["v"]).mean() + 0.1 * norms.sum()


def heads_stacked(p: Any, x: Any, y: Any, key: Any) -> Any:
    heads = jnp.stack([critic(p, x), jnp.square(critic(p, y)), critic(p, x * y)], 1)
    return (heads * jnp.array([1.0, 0.5, 2.0])).mean()


def masked_and_linear(p: Any, x: Any, y: Any, key: Any) -> Any:
    mask = x[:, 0] > 0
    masked = jnp.where(mask, critic(p, y), 0.0).sum() / jnp.maximum(mask.sum(), 1)
    return masked + p["c"] + 0.01 * jnp.square(p["w"]).sum()


def relu_at_zero(p: Any, x: Any, y: Any, key: Any) -> Any:
    h = jax.nn.relu(jnp.round(x) @ jnp.round(p["w"]) + p["b"])
    return (
        jnp.concatenate([h @ p["v"], reversed_gradient(rounded(h * 3.0) @ p["v"])]).mean()
        + critic(p, x).mean()
    )


def consecutive_rows(p: Any, x: Any, y: Any, key: Any) -> Any:
    padded = critic(p, jnp.pad(x, ((2, 0), (0, 0))))
    return critic(p, x[::2]).mean() + jnp.square(critic(p, y)[1:]).mean() + padded.mean()


def micro_batches_by_hand(p: Any, x: Any, y: Any, key: Any) -> Any:
    turn = lambda c, part: (c + jnp.square(critic(p, part)).sum() / len(x), critic(p, part))
    total, each = lax.scan(turn, 0.0, x.reshape(-1, 2, 4))
    return total + each.mean()


def contrast_with_batch_mean(p: Any, x: Any, y: Any, key: Any) -> Any:
    return (critic(p, x - x.mean(0)) * jnp.sort(y[:, 0])).mean() + p["b"].sum()


def without_the_first_rows(p: Any, x: Any, y: Any, key: Any) -> Any:
    distance = jnp.square(critic(p, x)) * jnp.minimum(jnp.arange(1.0 * len(x)), 3.0)
    return jnp.sqrt(distance[1:]).mean()  # the first row would have no finite derivative


def time_first(p: Any, x: Any, y: Any, key: Any) -> Any:
    stacked = jnp.stack([x, y, x * y])
    return (critic(p, stacked.reshape(-1, 4)).reshape(3, -1) * jnp.arange(3.0)[:, None]).mean()


def divided_by_constants(p: Any, x: Any, y: Any, key: Any) -> Any:
    """Divide slots of padding by nonzero numbers. The derivative of zero times infinity is NaN."""
    counted = jnp.arange(len(x) - 1, 0, -1)
    return (critic(p, x)[:-1] / np.arange(1.0, len(x))).mean() + (critic(p, y)[1:] / counted).mean()


def turns_that_parts_do_not_divide(p: Any, x: Any, y: Any, key: Any) -> Any:
    turn = lambda total, rows: (total + jnp.square(critic(p, rows)).mean(), None)
    return lax.scan(turn, 0.0, x.reshape(2, -1, 4))[0] + critic(p, y).mean()


def relu_of_a_sum(p: Any, x: Any, y: Any, key: Any) -> Any:
    return critic(p, x - jax.nn.relu(x.mean(0))).mean()


LOSSES = [
    divided_by_constants,
    reals_and_fakes,
    wasserstein,
    over_rows,
    dropout_in_a_scan,
    heads_stacked,
    masked_and_linear,
    relu_at_zero,
    consecutive_rows,
    micro_batches_by_hand,
    contrast_with_batch_mean,
    time_first,
    without_the_first_rows,
    turns_that_parts_do_not_divide,
]


def planned(loss: Any, kind: str) -> tuple[Any, Any, Any, Any]:
    tx, rng = optax.sgd(0.1), np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,), "v": (3,), "c": ()}
    params = {n: jnp.asarray(rng.normal(size=shape)) for n, shape in shapes.items()}
    step, start = dtrans.make_train_step(loss, tx), (params, tx.init(params))
    batch = rng.normal(size=(12, 4)), rng.normal(size=(12, 4)), jax.random.key(1)
    startup = dtrans.trace(lambda: start)
    if kind == "pipeline":
        main = dtrans.trace(step, *start, *batch)
        return dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=3), step, start, batch
    main = dtrans.trace(step, *start, *(x[:6] for x in batch[:2]), batch[2])
    return dtrans.nccl2(main, startup, trainers=2, num_micro_batch=3), step, start, batch


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["pipeline", "micro-steps"])
@pytest.mark.parametrize("loss", LOSSES)
def test_terms_add_up_to_the_step(loss: Any, kind: str) -> None:
    plan, *_, batch = planned(loss, kind)
    assert plan.shared.proven
    assert (report := plan.verify(*batch)), str(report)


@pytest.mark.usefixtures("x64")
def test_the_operand_of_a_rule_is_a_sum() -> None:
    plan, *_, batch = planned(relu_of_a_sum, "pipeline")
    assert (report := plan.verify(*batch)), str(report)


@pytest.mark.usefixtures("x64")
def test_other_batches_have_parts_too() -> None:
    """Plan without precomputed values, and run a batch with twice as many rows."""
    plan, step, alone, batch = planned(wasserstein, "pipeline")
    assert plan.values is None
    twice = (*(np.concatenate([x, x[::-1] + 1.0]) for x in batch[:2]), batch[2])
    job = plan.simulate()
    state, found = job.step(job.init(), *twice)
    params, _, wanted = step(*alone, *twice)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    for n, leaf in job.params(state).items():
        np.testing.assert_allclose(leaf, params[n], rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["pipeline", "micro-steps"])
@pytest.mark.parametrize(
    "loss", [relu_at_zero, masked_and_linear, dropout_in_a_scan, reals_and_fakes]
)
def test_a_job_gives_the_numbers_of_one_device(loss: Any, kind: str) -> None:
    plan, step, alone, batch = planned(loss, kind)
    job = plan.simulate()
    state, found = job.step(job.init(), *batch)
    params, _, wanted = step(*alone, *batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    for n, leaf in job.params(state).items():
        np.testing.assert_allclose(leaf, params[n], rtol=1e-12, atol=1e-12)


def normed(p: Any, x: Any, y: Any, key: Any) -> Any:
    h = x @ p["w"]
    return jnp.square((h - h.mean(0)) @ p["v"]).mean() + p["c"]


@jax.custom_vjp
def clipped(w: Any) -> Any:
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (g / jnp.maximum(jnp.linalg.norm(g), 1e-3),))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("inside", [False, True])
def test_rules_that_are_not_linear_in_sums_of_cotangents_are_refused(inside: bool) -> None:
    def loss(p: Any, x: Any, y: Any, key: Any) -> Any:
        w = (
            lax.scan(lambda c, _: (clipped(c), None), p["w"], None, length=1)[0]
            if inside
            else clipped(p["w"])
        )
        return critic({**p, "w": w}, x).mean()

    told = r"the derivative rule of .* for test_written_parts.py:\d+"
    with pytest.raises(ConfigError, match=told):
        planned(loss, "pipeline")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["pipeline", "micro-steps"])
def test_rows_that_meet_behind_parameters_are_refused_by_their_line(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"all_reduce for .*test_written_parts.py:\d+"):
        planned(normed, kind)
    relu = lambda p, x, y, key: jax.nn.relu(critic(p, x).mean()) + p["c"]
    with pytest.raises(ConfigError, match=r"all_reduce for .*test_written_parts.py:\d+"):
        planned(relu, kind)


def test_a_mean_that_the_step_reads_is_rounded_once() -> None:
    """The mean is also a result. For a result alone, sums of rounded terms would suffice."""

    def loss(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"])
        mean = jnp.mean(h, axis=0).astype(jnp.bfloat16)
        return jnp.mean((h - mean.astype(h.dtype)) ** 2) + jnp.sum(jnp.tanh(mean)), mean

    tx, params = optax.sgd(0.1), {"w": jnp.ones((4, 3))}
    step = dtrans.make_train_step(loss, tx, has_aux=True)
    main = dtrans.trace(step, params, tx.init(params), jnp.ones((12, 4)))
    plan = dtrans.nccl2(main, dtrans.trace(lambda: (params, tx.init(params))), trainers=3)
    makers = {v: e for e in plan.program.eqns for v in e.outvars}
    casts = [
        e
        for e in plan.program.eqns
        if e.primitive.name == "convert_element_type" and e.outvars[0].aval.dtype == jnp.bfloat16
    ]
    mean, *_ = casts
    assert makers[mean.invars[0]].primitive.name == "all_reduce", casts
