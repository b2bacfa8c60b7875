"""Micro-batches read numbers and masks of the full batch, so the sum of their terms equals the full
step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.errors import ConfigError


def masked(p: Any, x: Any, m: Any) -> Any:
    return (jnp.tanh(x @ p["w"]) @ p["v"] * m).sum() / m.sum()


def penalty(p: Any) -> Any:
    return 0.1 * ((p["w"] ** 2).sum() + (p["v"] ** 2).sum())


def weighed(p: Any, x: Any, m: Any) -> Any:
    """Return a loss that reads two numbers of the full batch, and divides by one of them."""
    return (jnp.tanh(x @ p["w"]) @ p["v"] * (m - m.mean())).sum() / m.sum() + penalty(p)


TAKEN = {
    "mask": masked,
    "mask and penalty": lambda p, x, m: masked(p, x, m) + penalty(p),
    "mask, and penalty of one": lambda p, x, m: masked(p, x, m) + (p["v"] ** 2).sum(),
    "at least one": lambda p, x, m: (
        (x @ p["w"] @ p["v"] * m).sum() / jnp.maximum(m.sum(), 1.0) + penalty(p)
    ),
    "two numbers": weighed,
    "penalty by the number": lambda p, x, m: masked(p, x, m) + penalty(p) / m.sum(),
    "number beside a mean": lambda p, x, m: masked(p, x, m) + penalty(p) + (x @ p["w"]).sum(),
    "square of the number": lambda p, x, m: (
        (x @ p["w"] @ p["v"] * m).sum() / m.sum() ** 2 + penalty(p)
    ),
}
REFUSED = {
    "square of a mean": lambda p, x, m: masked(p, x, m) ** 2 + penalty(p),
}


def planned(loss: Any, parts: int) -> tuple[Any, Any, Any]:
    tx, rng = optax.sgd(0.1), np.random.default_rng(0)

    def init(key: jax.Array) -> Any:
        params = {"w": jnp.asarray(rng.normal(size=(4, 3))), "v": jnp.asarray(rng.normal(size=3))}
        return params, tx.init(params)

    step = dtrans.make_train_step(loss, tx)
    start = init(jax.random.key(0))
    main = dtrans.trace(step, *start, np.ones((12, 4)), np.ones(12))
    plan = dtrans.pipeline(main, dtrans.trace(lambda: start), num_stages=2, num_micro_batch=parts)
    return plan, step, start


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", TAKEN)
def test_parts_are_given_numbers_that_no_parameter_enters(name: str, parts: int) -> None:
    plan, *_ = planned(TAKEN[name], parts)
    count = 2 if name in ("two numbers", "penalty by the number") else 1
    assert plan.values.out_names == tuple(f"@given/{i}" for i in range(count))
    assert (report := plan.verify(points=(0, 1))), str(report)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", REFUSED)
def test_what_adds_up_in_neither_way_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="values of the full batch"):
        planned(REFUSED[name], 2)


def dropped(h: Any, w: Any, mask: Any) -> Any:
    return jnp.where(mask, jnp.tanh(h @ w) / 0.5, 0.0)


def drawn(key: Any, *shape: int) -> Any:
    return jax.random.bernoulli(key, 0.5, shape)


def of_layers(loss: Any) -> tuple[Any, Any, Any]:
    """Return a step of three layers, with a key in its batch."""
    tx, rng = optax.sgd(0.1), np.random.default_rng(0)
    params = {"s": jnp.asarray(rng.normal(size=(3, 4, 4))), "v": jnp.asarray(rng.normal(size=4))}
    step, start = dtrans.make_train_step(loss, tx), (params, tx.init(params))
    main = dtrans.trace(step, *start, np.ones((12, 4)), jax.random.key(0))
    return (
        dtrans.pipeline(main, dtrans.trace(lambda: start), num_stages=2, num_micro_batch=3),
        step,
        start,
    )


def mask_before_the_loop(p: Any, x: Any, key: Any) -> Any:
    masks = jnp.moveaxis(drawn(key, len(x), 3, 4), 1, 0)
    return (
        jax.lax.scan(lambda h, a: (dropped(h, *a), None), x, (p["s"], masks))[0] @ p["v"]
    ).mean()


def mask_before_checkpoint(p: Any, x: Any, key: Any) -> Any:
    return (
        jax.checkpoint(dropped)(x, p["s"][0], drawn(key, len(x), 4)) @ p["s"][1] @ p["v"]
    ).mean()


def mask_in_the_loop(p: Any, x: Any, key: Any) -> Any:
    turn = lambda h, a: (dropped(h, a[0], drawn(a[1], *h.shape)), None)
    return (jax.lax.scan(turn, x, (p["s"], jax.random.split(key, 3)))[0] @ p["v"]).mean()


def mask_in_checkpoint(p: Any, x: Any, key: Any) -> Any:
    return (
        jax.checkpoint(lambda h, w: dropped(h, w, drawn(key, *h.shape)))(x, p["s"][0]) @ p["v"]
    ).mean()


MASKED = [mask_before_the_loop, mask_before_checkpoint, mask_in_the_loop, mask_in_checkpoint]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("loss", MASKED)
def test_plans_with_a_mask_compute_the_step(loss: Any) -> None:
    plan, *_ = of_layers(loss)
    assert (report := plan.verify(points=(0, 1))), str(report)


@pytest.mark.usefixtures("x64")
def test_a_mask_is_one_devices() -> None:
    plan, step, alone = of_layers(mask_in_the_loop)
    job = plan.simulate()
    state = job.init()
    for seed in range(2):
        batch = np.random.default_rng(seed).normal(size=(12, 4)), jax.random.key(seed)
        state, loss_of_all = job.step(state, *batch)
        params, opt_state, wanted = step(*alone, *batch)
        alone = params, opt_state
        np.testing.assert_allclose(loss_of_all, wanted, rtol=1e-12, atol=1e-12)
        for n, leaf in job.params(state).items():
            np.testing.assert_allclose(leaf, params[n], rtol=1e-12, atol=1e-12)
