"""Steps that depend on the batch only by its size: counts of rows, and noise with a row for each
example.

In 64 bits, within 1e-12 of one device. Steps are traced on 8 rows, and run on 8 and on 12.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dtrans


KEY = jax.random.key  # the tests create arrays, because 64 bits are not enabled yet


def init(key: jax.Array) -> dict[str, Any]:
    return {
        "w": jax.random.normal(key, (8, 2)),
        "noisy": jax.random.normal(key, (8, 2)),
        "key": jax.random.fold_in(key, 1),
        "seen": jnp.zeros((), int),
        "steps": jnp.zeros((), int),
        "best": jnp.array(jnp.inf),  # a literal that the init computes
    }


def step(s: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    key, new = jax.random.split(s["key"])
    noise = jax.random.normal(key, (len(x), 8))
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(s["w"])
    of_noise = jax.grad(lambda w: jnp.mean((noise @ w) ** 2))(s["noisy"])
    counts = {
        "seen": s["seen"] + len(x),
        "steps": s["steps"] + 1,
        "best": jnp.minimum(s["best"], loss),
    }
    return {"w": s["w"] - 0.1 * g, "noisy": s["noisy"] - 0.1 * of_noise, "key": new, **counts}, loss


def rows(n: int) -> jax.Array:
    return jax.random.normal(KEY(n), (n, 8))


def planned(mode: str, main: dtrans.Program, startup: dtrans.Program, trainers: int) -> Any:
    if mode == "pserver":
        servers = [f"127.0.0.1:{i + 1}" for i in range(2)]
        return dtrans.pserver(
            main,
            startup,
            pservers=servers,
            trainers=trainers,
            placement=dtrans.BlockPlacement(min_block_size=1),
        )
    if mode == "nccl2":
        return dtrans.nccl2(main, startup, trainers=trainers)
    slices = dtrans.Slicing(min_slice_size=0)
    return dtrans.sharding(main, startup, degree=trainers, stage=int(mode[-1]), slices=slices)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "mode", ["nccl2", pytest.param("stage 1", marks=pytest.mark.rotated), "stage 3", "pserver"]
)
def test_the_numbers_are_one_devices(mode: str) -> None:
    main, startup = dtrans.trace(step, init(KEY(0)), rows(8)), dtrans.trace(init, KEY(0))
    job = planned(mode, main, startup, 2).on_mesh()
    state, alone = job.init(KEY(0)), init(KEY(0))
    for n in (8, 12):
        state, loss = job.step(state, rows(n))
        alone, wanted = step(alone, rows(n))
        np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    found = job.gather(state)
    assert (found["seen"], found["steps"]) == (20, 2)
    assert (jax.random.key_data(found.pop("key")) == jax.random.key_data(alone.pop("key"))).all()
    for n, x in alone.items():
        np.testing.assert_allclose(found[n], x, rtol=1e-12, atol=1e-12, err_msg=n)


@pytest.mark.usefixtures("x64")
def test_counts_in_the_optimizers_state_are_exact() -> None:
    """Servers, slices and pipelines are planned before a batch exists, but they count the rows of
    each batch."""

    def init(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.normal(key, (8, 2)), jnp.zeros((), int)

    def step(w: jax.Array, seen: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        loss, g = dtrans.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * g, seen + len(x), loss

    main, startup = dtrans.trace(step, *init(KEY(0)), rows(4)), dtrans.trace(init, KEY(0))
    for mode in ("nccl2", "stage 2", "pserver"):
        job = planned(mode, main, startup, 2).simulate()
        state = job.init(KEY(0))
        for size in (8, 12):
            state, _ = job.step(state, rows(size))
        assert job.opt_state(state) == 20
    job = dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=2).simulate()
    state = job.init(KEY(0))
    for size in (4, 12):
        state, _ = job.step(state, rows(size))
    assert job.opt_state(state) == 16
