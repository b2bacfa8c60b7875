"""Test `job.apply`: functions of parameters run without all parameters on one device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.errors import ConfigError, StateError
from dtrans.step import applied


pytestmark = pytest.mark.usefixtures("x64")
D, LAYERS = 4, 5
TX = optax.adam(0.1)
X = np.random.default_rng(0).normal(size=(12, D))
GIVEN = np.arange(3.0)


def layers(seed: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    return {f"layer{i}": jax.random.normal(k, (D, D)) for i, k in enumerate(keys)}


def stacked(seed: int = 0) -> Any:
    key = jax.random.key(seed)
    return {
        "b": jnp.ones(D),
        "layers": {
            "scale": jnp.linspace(0.5, 1, LAYERS),
            "w": jax.random.normal(key, (LAYERS, D, D)),
        },
    }


def deep(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer{i}"])
    return x


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ p["w"] * p["scale"])
        return h, h.mean(-1)

    h, means = jax.lax.scan(layer, x, params["layers"])
    return h + params["b"] * means.sum(0)[:, None]


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., jax.Array]]] = {
    "deep": (layers, deep),
    "scanned": (stacked, scanned),
}
MEMORY = dtrans.StageMemory(sharding_stage=3, min_slice_size=0)
OFFLOAD = dtrans.StageMemory(offload=True)
PLANS: dict[str, Callable[..., Any]] = {
    "nccl2": functools.partial(dtrans.nccl2, trainers=2),
    **{
        f"stage {i}": functools.partial(
            dtrans.sharding, degree=3, stage=i, slices=dtrans.Slicing(min_slice_size=0)
        )
        for i in (1, 3)
    },
    "servers": functools.partial(dtrans.pserver, trainers=2, pservers="127.0.0.1:1,127.0.0.1:2"),
    "pipeline": functools.partial(dtrans.pipeline, num_stages=3, num_micro_batch=2),
    "chunks": functools.partial(
        flat_options.pipeline, num_stages=2, chunks=2, num_micro_batch=2, schedule="Interleaved"
    ),
    "replicas": functools.partial(dtrans.pipeline, num_stages=2, num_micro_batch=2, replicas=2),
    "sliced replicas": functools.partial(
        dtrans.pipeline, num_stages=2, num_micro_batch=2, replicas=2, memory=MEMORY
    ),
    "offload": functools.partial(dtrans.pipeline, num_stages=2, num_micro_batch=2, memory=OFFLOAD),
}


@functools.cache
def planned(model: str, mode: str) -> Any:
    first, predict = MODELS[model]
    init = lambda: (p := first(), TX.init(p))
    step = dtrans.make_train_step(lambda p, x: (predict(p, x) ** 2).mean(), TX)
    return PLANS[mode](dtrans.trace(step, *init(), X), dtrans.trace(init))


def fetched_by(job: Any) -> list[set[str]]:
    """Return a list to which the job adds the leaves of each fetch."""
    found: list[set[str]] = []
    fetch = job._leaves

    def record(state: Any, names: Any) -> Any:
        found.append(set(names))
        return fetch(state, names)

    job._leaves = record
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["on_mesh", "simulate"])
@pytest.mark.parametrize("mode", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_functions_of_parameters_equal_one_device(
    model: str, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "GATHERED_BYTES", D * D * 8)
    first, predict = MODELS[model]
    job = getattr(planned(model, mode), way)()
    state, params = job.init(), first()

    def other_results(params: Any, x: jax.Array, scale: float) -> Any:
        squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)]
        return {"params": params, "norm": sum(squares) * scale, "x": x, "one": 1.0, "given": GIVEN}

    found = job.apply(predict, state, X), job.apply(other_results, state, X[:3], 2.0)
    wanted = predict(params, X), other_results(params, X[:3], 2.0)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, wanted)


def test_sliced_parameters_are_gathered_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "GATHERED_BYTES", 2 * D * 6 * 8)  # two leaves with their padding
    job = planned("deep", "stage 3").on_mesh()
    fetched = fetched_by(job)
    job.apply(deep, job.init(), X)
    names = [f"params/layer{i}" for i in range(LAYERS)]
    assert fetched == [{*names[:2]}, {*names[2:4]}, {names[4]}]


def test_a_leaf_is_dropped_after_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that a later group reads again stays, and is not gathered twice."""
    monkeypatch.setattr(applied, "GATHERED_BYTES", 1)
    job = planned("deep", "stage 3").on_mesh()
    fetched = fetched_by(job)

    def tied(params: Any, x: jax.Array) -> jax.Array:
        return deep(params, x) @ params["layer0"].T

    found = job.apply(tied, job.init(), X)
    assert [len(names) for names in fetched] == [1] * LAYERS
    np.testing.assert_allclose(found, tied(layers(), X), rtol=1e-12)


def test_a_group_is_dropped_before_the_next_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "GATHERED_BYTES", 1)
    job = planned("deep", "stage 3").on_mesh()
    gathered: list[weakref.ref[jax.Array]] = []
    fetch = job._leaves

    def copy(state: Any, names: Any) -> Any:
        assert not any(ref() is not None for ref in gathered)
        copies = jax.tree.map(jnp.copy, fetch(state, names))
        gathered.extend(map(weakref.ref, copies.values()))
        return copies

    job._leaves = copy
    job.apply(deep, job.init(), X)
    assert len(gathered) == LAYERS


@pytest.mark.parametrize("model", MODELS)
def test_parameters_stay_on_the_devices_of_their_stage(model: str) -> None:
    """A part runs on the devices of its stage, and reads the parameters of the stage only."""
    _, predict = MODELS[model]
    job = planned(model, "pipeline").on_mesh()
    fetched, state = fetched_by(job), job.init()
    found = job.apply(predict, state, X)
    homes = [{job.plan.home(n) for n in names} for names in fetched]
    assert homes == [{0}, {1}, {2}]
    assert {n for names in fetched for n in names} == set(state.params)
    assert found.sharding == state.params[min(fetched[-1])].sharding


def test_functions_of_the_state_of_other_jobs_are_refused() -> None:
    state = planned("deep", "nccl2").simulate().init()
    job = planned("deep", "pipeline").simulate()
    with pytest.raises(StateError, match="CollectiveState"):
        job.apply(deep, state, X)


@pytest.mark.parametrize("mode", ["nccl2", "stage 3", "servers", "pipeline"])
def test_parameters_in_place_of_the_state_are_refused(mode: str) -> None:
    job = planned("deep", mode).simulate()
    with pytest.raises(StateError, match="dict"):
        job.apply(deep, layers(), X)
    with pytest.raises(ConfigError, match="takes a function as its first argument, not 3"):
        job.apply(3, layers(), X)
