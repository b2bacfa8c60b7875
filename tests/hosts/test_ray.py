"""Jobs on a Ray cluster of three nodes: numbers, data, checkpoints, and how a job ends that fails."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance
from ray_cluster import RayCluster

import dtrans
from dtrans.errors import BatchError, ConfigError, DeadlineError, PeerError, StateError
from dtrans.hosts.on_ray import RayState


ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

PATIENCE = 120.0  # seconds for what takes five on an idle machine
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # otherwise Ray writes a token into the user's home
    with pytest.MonkeyPatch.context() as patch, RayCluster() as started:
        patch.setenv("RAY_AUTH_MODE", "disabled")
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


BATCHES = list(zip(X, Y, strict=True))


@functools.cache
def alone(same: bool = False) -> tuple[Any, list[float]]:
    """Parameters and losses of one device; on the first batch alone where it is the same for all steps."""
    params, opt_state = init(KEY)
    losses = []
    step = jax.jit(STEP)
    for batch in BATCHES[:1] * 3 if same else BATCHES:
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    return params, losses


def apart(a: Any, b: Any) -> float:
    return max(map(distance, jax.tree.leaves(a), jax.tree.leaves(b)))


ACTORS = ("RoleActor", "ScriptActor")


def is_clean() -> bool:
    """Return True if no placement group and no actor of a job is left, once Ray has ended what it was told to."""
    from ray._private.state import actors

    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        alive = [a for a in actors().values() if a["State"] != "DEAD" and a["ActorClassName"] in ACTORS]
        if not groups and not alive:
            return True
        time.sleep(0.05)
    return False


def trained(job: Any, batches: Any = None, state: Any = None) -> tuple[Any, list[float]]:
    """Parameters and losses after three steps; a checkpoint is saved after two."""
    losses = []
    state = job.init(KEY) if state is None else state
    for i in range(3):
        if i == 2:
            job.save("2")
        state, value = job.step(state, *(() if batches is None else batches[i]))
        losses.append(float(value))
    return job.params(state), losses


def check(found: tuple[Any, list[float]], wanted: tuple[Any, list[float]], folder: Path) -> None:
    """Compare with one device, also after the checkpoint; and look for what the job left."""
    assert apart(found[0], wanted[0]) < 1e-6
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)
    params, opt_state = dtrans.checkpoint.load(folder / "2", *programs())
    assert float(jax.jit(STEP)(params, opt_state, *BATCHES[2])[2]) == pytest.approx(wanted[1][2], rel=1e-6)
    assert is_clean()


@pytest.mark.parametrize("kind", ["pserver", "pipeline"])
def test_batches_of_the_driver(cluster, tmp_path, kind):
    with PLANS[kind]().on_ray(trainers_on="SPREAD", checkpoints=tmp_path, deadline=PATIENCE) as job:
        found = trained(job, BATCHES)
        with pytest.raises(BatchError, match="takes 2 batch arguments, 0 were given"):
            job.step(job._state)
        if kind == "pserver":
            servers_at = {job.nodes["pserver 0"], job.nodes["pserver 1"]}
            assert len(servers_at) == 2 and job.nodes["trainer 0"] != job.nodes["trainer 1"]
            with pytest.raises(ConfigError, match="servers save in one folder"):
                job.save(tmp_path / "other" / "2")
            with pytest.raises(StateError, match="serve already"):
                job.init(KEY)
    check(found, alone(), tmp_path)
    with pytest.raises(StateError, match="closed"):
        job.save("3")


def of_trainer(trainer: int, step: int) -> tuple[Any, ...]:
    if step == 4 and trainer == 1:
        raise KeyError("no more rows")
    rows = slice(4 * trainer, 4 * trainer + 4)
    return X[step % 3][rows], Y[step % 3][rows]


def test_batches_of_a_function_and_its_failure(cluster, tmp_path):
    job = PLANS["nccl2"]().on_ray(of_trainer, checkpoints=tmp_path, deadline=PATIENCE)
    found = trained(job)
    with pytest.raises(ConfigError, match="is there already"):
        dtrans.checkpoint.check(tmp_path / "2", job)
    newest, value = job.step(dtrans.checkpoint.restore(tmp_path / "2", job))
    params, opt_state = dtrans.checkpoint.load(tmp_path / "2", *programs())
    assert float(value) == pytest.approx(float(jax.jit(STEP)(params, opt_state, *BATCHES[0])[2]), rel=1e-6)
    with pytest.raises(BatchError, match="batches of their own"):
        job.step(newest, *BATCHES[0])
    with pytest.raises(StateError, match="given to a step already"):
        job.step(RayState(7))
    with pytest.raises(PeerError, match=r"trainer 1 on node .* failed.*KeyError: 'no more rows'"):
        job.step(newest)
    with pytest.raises(StateError, match="closed"):
        job.step(newest)
    check(found, alone(), tmp_path)


# Ray sets options of its own that it has deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")
def test_batches_of_a_dataset(cluster, tmp_path):
    """Its rows are one global batch, so that any split of them has the same numbers; each step is an epoch."""
    rows = ray.data.from_items([{"x": x, "y": y} for x, y in zip(X[0], Y[0], strict=True)])
    with PLANS["sharding"]().on_ray(rows, rows=4, checkpoints=tmp_path, deadline=PATIENCE) as job:
        found = trained(job, state=job.state_of(*init(KEY)))
    wanted = alone(same=True)
    assert apart(found[0], wanted[0]) < 1e-6
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)


def test_a_cluster_without_room_is_named(cluster):
    with pytest.raises(DeadlineError, match="waited 1 s for room for 1 trainer with .*'CPU': 99"):
        dtrans.nccl2(*programs(), trainers=1).on_ray(trainer_resources={"CPU": 99}, deadline=1)
    assert is_clean()


# -- the end of a node: the last test, since the cluster is smaller behind it -------------------------


def test_a_node_that_goes_ends_the_job(cluster, tmp_path):
    plan = dtrans.pserver(*programs(), trainers=2)
    whole = plan.simulate()
    dtrans.checkpoint.save(tmp_path / "0", whole, whole.init(KEY))
    job = plan.on_ray(trainers_on="SPREAD", deadline=PATIENCE)
    head = next(n["NodeID"] for n in ray.nodes() if "node:__internal_head__" in n["Resources"])
    name = next(n for n in ("trainer 1", "trainer 0") if job.nodes[n] != head)
    state, value = job.step(job.restore(tmp_path / "0"), *BATCHES[0])
    assert float(value) == pytest.approx(alone()[1][0], rel=1e-6)
    cluster.remove(job.nodes[name])
    with pytest.raises(PeerError, match=rf"on node .* \({job.nodes[name][:8]}\) has gone"):
        while True:
            state, _ = job.step(state, *BATCHES[0])
    assert is_clean()
