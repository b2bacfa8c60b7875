"""Jobs on a Ray cluster of three nodes: numbers, data, checkpoints, and how a job ends that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance
from ray_cluster import RayCluster

import dtrans
from dtrans.errors import StateError


ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

PATIENCE = 60.0  # seconds for what takes five on an idle machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as started:
        ray.init(address=started.address)
        try:
            yield started
        finally:
            ray.shutdown()


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


TX = optax.adam(0.1)
X = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(3, 8, 2)).astype(np.float32)


def init(key: jax.Array) -> tuple[Any, Any]:
    params = {"a": jax.random.normal(key, (4, 6)), "b": jnp.ones((6, 2))}
    return params, TX.init(params)


KEY = jax.random.key(0)
STEP = dtrans.make_train_step(loss, TX)


def programs() -> tuple[Any, Any]:
    return dtrans.trace(STEP, *jax.eval_shape(init, KEY), X[0], Y[0]), dtrans.trace(init, KEY)


def servers(**options: Any) -> Any:
    return dtrans.pserver(
        *programs(),
        pservers="127.0.0.1:6174,127.0.0.1:6175",
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=1),
        **options,
    )


PLANS = {
    "pserver": servers,
    "nccl2": lambda: dtrans.nccl2(*programs(), trainers=2),
    "sharding": lambda: dtrans.sharding(*programs(), degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)),
    "pipeline": lambda: dtrans.pipeline(*programs(), num_stages=2, num_micro_batch=2),
}


@pytest.fixture(scope="module")
def alone() -> tuple[Any, list[float]]:
    """Parameters and losses of one device."""
    params, opt_state = init(KEY)
    losses = []
    step = jax.jit(STEP)
    for batch in zip(X, Y, strict=True):
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    return params, losses


def apart(a: Any, b: Any) -> float:
    return max(map(distance, jax.tree.leaves(a), jax.tree.leaves(b)))


def left_over() -> list[Any]:
    """Placement groups and actors that a job should have removed."""
    from ray._private.state import actors

    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    return groups + [a for a in actors().values() if a["State"] == "ALIVE" and a["ActorClassName"] == "RoleActor"]


@pytest.mark.parametrize("kind", PLANS)
def test_numbers_are_those_of_one_device(cluster, alone, tmp_path, kind):
    params, losses = alone
    found = []
    with PLANS[kind]().on_ray(trainers_on="SPREAD", checkpoints=tmp_path, deadline=PATIENCE) as job:
        state = job.init(KEY)
        for batch in zip(X[:2], Y[:2], strict=True):
            state, value = job.step(state, *batch)
            found.append(float(value))
        job.save("2")
        stale, (state, value) = state, job.step(state, X[2], Y[2])
        found.append(float(value))
        with pytest.raises(StateError, match="given to a step already"):
            job.step(stale, X[0], Y[0])
        assert apart(job.params(state), params) < 1e-6
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert job.plan.recipe is not None
    main, startup = programs()
    saved, opt_state = dtrans.checkpoint.load(tmp_path / "2", main, startup)
    *_, value = jax.jit(STEP)(saved, opt_state, X[2], Y[2])
    assert abs(float(value) - losses[2]) < 1e-6
    assert left_over() == []
