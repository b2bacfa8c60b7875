"""Jobs of parameter servers whose trainers are meshes of devices equal one device.

The meshes divide a trainer's rows, split layers, or both. Batches may be uneven.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import device_mesh_job
import jax
import numpy as np
import pytest
from device_mesh_job import MESH, MODELS, ROWS, classifier, mlp, plan_of, transformer
from helpers import distance, tree_close
from pipeline_models import compiled_quickly
from role_processes import roles
from role_threads import RoleThreads, free_endpoints, serve, train

import dtrans
from dtrans.errors import ConfigError
from dtrans.run.distributed.role import roles_of


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mesh", [{"data": 2}, {"model": 2}, MESH, {"data": 3, "model": 4}], ids=str
)
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_simulated_job_equals_one_device(name, trainers, mesh):
    of = MODELS[name]()
    tree_close(of.of(plan_of(of, trainers, mesh).simulate()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [7, 3])
def test_uneven_batches_equal_one_device(name, rows):
    """Neither the trainers, nor the devices of a trainer divide the rows."""
    of = MODELS[name](rows)
    tree_close(of.of(plan_of(MODELS[name]()).simulate()), of.on_one_device(), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_plans_verify(name, trainers):
    report = plan_of(MODELS[name](), trainers).verify()
    assert report.equal and report.complete, report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_local_batch_has_the_numbers_of_trainers_with_one_device(name):
    of = MODELS[name]()
    plan, other = (plan_of(of, mesh=mesh, batch="local") for mesh in (MESH, None))
    tree_close(of.of(plan.simulate()), of.of(other.simulate()), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_trainers_with_devices_equal_one_device(name, trainers):
    """Trainers are threads. Each of them runs its program on four devices."""
    of, key = MODELS[name](), jax.random.key(0)
    plan = plan_of(of, trainers, pservers=free_endpoints(2))
    threads = RoleThreads()
    for endpoint in plan.servers:
        threads.start(endpoint, serve, plan, endpoint, key)
    for k in range(trainers):
        threads.start(f"trainer {k}", train, plan, k, [of.batch] * 2, key)
    found = threads.all()
    params, *_ = of.on_one_device(steps=2)
    for k in range(trainers):
        tree_close(found[f"trainer {k}"][0], params, 1e-12)


def test_a_device_stores_its_columns_only():
    of, key = mlp(), jax.random.key(0)
    (endpoint,) = free_endpoints(1)
    plan = plan_of(of, 1, pservers=endpoint)
    threads = RoleThreads()
    threads.start(endpoint, serve, plan, endpoint, key)
    threads.start("trainer", train, plan, 0, [of.batch], key)
    params, _ = threads.all()["trainer"]
    shapes = {}
    for n, x in params.items():
        shapes[n] = {shard.data.shape for shard in x.addressable_shards}
    assert shapes == {"up": {(8, 6)}, "up_b": {(6,)}, "down": {(6, 8)}}


def test_processes_equal_one_device(tmp_path: Path) -> None:
    """Two trainers with four devices each. One of the batches has an odd number of rows."""
    endpoints = free_endpoints(1)
    with roles(tmp_path) as started:
        job = {"module": "device_mesh_job", "devices": 4}
        for role in roles_of(2, endpoints):
            started.start(role.name, "exact_job", role=role.environment(), **job)
        of, wanted = classifier(), dict[str, Any]()
        params, opt_state = of.init(*device_mesh_job.init_args())
        for i in range(len(ROWS)):
            batch = device_mesh_job.batch_of(i)
            params, opt_state, loss, losses = jax.jit(of.step)(params, opt_state, *batch)
            wanted |= {f"results/{i}/0": loss, f"results/{i}/1": losses}
        wanted |= {f"params/{n}": x for n, x in params.items()}
        found = started.end()
    for name in ("trainer 0", "trainer 1"):
        assert found[name].keys() >= wanted.keys()
        for n, x in wanted.items():
            assert distance(found[name][n], np.asarray(x)) <= 1e-12, (name, n)


def test_a_replay_is_refused(tmp_path):
    plan, log = plan_of(mlp()), tmp_path / "generations.jsonl"
    with pytest.raises(
        ConfigError, match="each trainer of the plan has a mesh of 2 data x 2 model"
    ):
        dtrans.replay(plan, log, lambda step: mlp().batch, init=(jax.random.key(0),), stop=1)


def test_a_job_that_needs_other_devices_is_refused(monkeypatch):
    plan = plan_of(transformer(), mesh={"data": 4, "model": 4})
    with pytest.raises(ConfigError, match="on_mesh runs a trainer on one device, but each trainer"):
        plan.on_mesh()
    role = roles_of(2, tuple(plan.servers))[-1]
    for name, value in role.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="mesh of 4 data x 4 model needs 16 devices, but this"):
        plan.on_cluster()
