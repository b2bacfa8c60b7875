"""Leaves that no server stores, in jobs with snapshots: batch statistics of trainers, and constants."""

from __future__ import annotations

import re
import types
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.assemble import as_numpy
from dtrans.checkpoint.pserver_state import scatter
from dtrans.checkpoint.runs import SaveId
from dtrans.errors import ConfigError, StateError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import Generation
from dtrans.run.net.generation_folder import VARIABLE
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.snapshots import (
    ServerSnapshots,
    check_drops,
    check_snapshots,
    computed_leaves,
)
from dtrans.run.role_jobs.leaf_snapshots import LeafSnapshots
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.snapshot_file import SnapshotFile


SERVERS = "127.0.0.1:6174", "127.0.0.1:6175"
TX = optax.multi_transform(
    {"trained": optax.sgd(0.5), "frozen": optax.set_to_zero()},
    {"w": "trained", "scale": "frozen"},
)


def init() -> Any:
    net = {"w": jnp.arange(3.0), "scale": jnp.full(3, 2.0)}
    own = {
        "mean": jnp.zeros(3, jnp.bfloat16),
        "key": jax.random.key(3),
        "seen": jnp.zeros((), jnp.int32),
    }
    return {"net": net, "own": own}, TX.init(net)


def step(params: Any, opt_state: Any, x: Any) -> Any:
    """Train `net/w`, compute statistics of the batch, and leave `net/scale` unchanged."""
    net, own = params["net"], params["own"]
    loss = lambda net, x: jnp.mean((x * net["scale"] @ net["w"]) ** 2)
    value, grads = dtrans.value_and_grad(loss)(net, x)
    updates, opt_state = TX.update(grads, opt_state, net)
    new = {
        "mean": (0.5 * own["mean"] + 0.5 * x.mean(0)).astype(jnp.bfloat16),
        "key": jax.random.fold_in(own["key"], jnp.sum(x > 0)),
        "seen": own["seen"] + jnp.sum(x > 0, dtype=jnp.int32),
    }
    return {"net": optax.apply_updates(net, updates), "own": new}, opt_state, value


@pytest.fixture(scope="module")
def plan() -> PServerPlan:
    traced = dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init)
    placement, batch = dtrans.BlockPlacement(min_block_size=1), dtrans.Batch("local")
    return dtrans.pserver(
        *traced, pservers=",".join(SERVERS), trainers=2, placement=placement, batch=batch
    )


def executor(generation: Generation | None, *, step: int, every: int = 10) -> Any:
    """Return the fields of a trainer's executor that its snapshots read."""
    connections = types.SimpleNamespace(
        generation=generation, step_count=step, steps_between_snapshots=every
    )
    return types.SimpleNamespace(connections=connections)


def folder_of(path: Path) -> RoleFolder:
    LauncherFolder(path).grant(Generation(), "a run", trainers=2)
    folder = RoleFolder(path, "trainer 1")
    folder.enter(Generation())
    return folder


def assert_begins_with(snapshots: LeafSnapshots, executor: Any, params: Any) -> None:
    """Check that the trainer begins with the servers' parameters, at the servers' step."""
    (found,), step = snapshots.begin(executor, params)
    assert found is params and step == executor.connections.step_count


def written(path: Path) -> set[str]:
    return {str(x.relative_to(path)) for x in path.glob("*/*.npz")}


def test_a_trainer_that_computes_leaves_cannot_join_later(plan: PServerPlan) -> None:
    check_drops(plan, "drop")
    with pytest.raises(
        ConfigError,
        match="^on_trainer_loss='replace': params/own/key is computed by each trainer, and a train"
        ".*launch the job with --on-trainer-loss drop, or",
    ):
        check_drops(plan, "replace")


def test_snapshots_contain_leaves_that_trainers_compute(plan: PServerPlan) -> None:
    check_snapshots(plan, dtrans.Snapshots(10))
    with pytest.raises(ConfigError, match="params/own/key is computed by each trainer, so at_loss"):
        check_snapshots(plan, dtrans.Snapshots(10, at_loss=True))
    constant = ["params/net/scale"]
    computed = ["params/own/" + n for n in ("key", "mean", "seen")]
    assert computed_leaves(plan) == computed
    assert sorted(plan.frozen) == sorted(constant + computed)


def test_a_trainer_writes_its_leaves_at_the_snapshots_of_servers(
    plan: PServerPlan, tmp_path: Path
) -> None:
    folder, params = folder_of(tmp_path), init()[0]
    snapshots = LeafSnapshots(folder, plan, "trainer 1")
    servers = executor(Generation(0), step=7)
    assert_begins_with(snapshots, servers, params)
    for at in (7, 8, 10, 11):
        snapshots.before_step(servers, at, (params,))
    assert written(tmp_path) == {"7/trainer-1.npz", "10/trainer-1.npz"}
    assert folder.marks()["trainer 1"].snapshots == (7, 10)

    # the snapshot of the generation's beginning is already written
    LauncherFolder(tmp_path).grant(Generation(1, 20), "a run", trainers=2)
    folder.enter(Generation(1, 20))
    snapshots.before_step(executor(Generation(1, 20), step=20), 20, (params,))
    assert written(tmp_path) == {"7/trainer-1.npz", "10/trainer-1.npz"}


@pytest.mark.parametrize(
    ("generation", "every"),
    [(None, 10), (Generation(0), 0)],
    ids=["no snapshots", "no number of steps"],
)
def test_without_snapshots_of_servers_a_trainer_writes_nothing(
    plan: PServerPlan, tmp_path: Path, generation: Generation | None, every: int
) -> None:
    params, servers = init()[0], executor(generation, step=0, every=every)
    for folder in (folder_of(tmp_path), None):
        snapshots = LeafSnapshots(folder, plan, "trainer 1")
        assert_begins_with(snapshots, servers, params)
        snapshots.before_step(servers, 0, (params,))
    assert written(tmp_path) == set()


def test_a_trainer_goes_back_to_its_leaves_of_the_snapshot(
    plan: PServerPlan, tmp_path: Path
) -> None:
    """Arrays of all types keep their bits. A process that starts again computes constants with the
    init."""
    folder = folder_of(tmp_path)
    start, state = init()[0], init()
    for _ in range(3):
        *state, _ = step(*state, jax.random.normal(jax.random.key(1), (4, 3)))
    params = state[0] | {"net": {**state[0]["net"], "scale": jnp.full(3, 7.0)}}
    assert np.any(np.asarray(params["own"]["mean"]))
    types_of_start = [x.dtype for x in jax.tree.leaves(start)]
    snapshots = LeafSnapshots(folder, plan, "trainer 1")
    snapshots.before_step(executor(Generation(0), step=0), 10, (params,))
    again = LeafSnapshots(RoleFolder(tmp_path, "trainer 1"), plan, "trainer 1")
    for made, scale in ((snapshots, params["net"]["scale"]), (again, start["net"]["scale"])):
        (found,), at = made.begin(executor(Generation(1, 10), step=10), start)
        assert at == 10
        found = made.keep_constants(found)
        assert [x.dtype for x in jax.tree.leaves(found)] == types_of_start
        for n, x in params["own"].items():
            np.testing.assert_array_equal(as_numpy(found["own"][n]), as_numpy(x))
        assert found["net"]["w"] is start["net"]["w"] and found["net"]["scale"] is scale

    other = LeafSnapshots(RoleFolder(tmp_path, "trainer 0"), plan, "trainer 0")
    with pytest.raises(
        StateError, match="leaves of trainer 0 in the snapshot of step 10 cannot be"
    ):
        other.begin(executor(Generation(1, 10), step=10), start)


def damage(path: Path, how: str) -> None:
    """Damage the file of a snapshot."""
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut short":
        path.write_bytes(data[: len(data) // 2])
    elif how == "not a zip file":
        path.write_bytes(b"no arrays")
    elif how == "another format":
        data[data.index(b"PK\x01\x02") + 10] ^= 32  # the compression of the first array
        path.write_bytes(data)
    elif how == "another byte":
        with zipfile.ZipFile(path) as file:
            end = file.infolist()[1].header_offset  # the first array ends before the second begins
        data[end - 1] ^= 1
        path.write_bytes(data)
    else:
        np.savez(path, other=np.zeros(3))


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "empty",
        "cut short",
        "not a zip file",
        "another byte",
        "another format",
        "other arrays",
    ],
)
def test_the_error_about_a_damaged_snapshot_names_the_file(
    plan: PServerPlan, tmp_path: Path, how: str
) -> None:
    arrays = {"a": jnp.arange(3.0), "b": jnp.ones(2, jnp.bfloat16)}
    path = tmp_path / "10.npz"
    file = SnapshotFile(path, "the snapshot of trainer 1 after step 10")
    file.write(arrays)
    assert {n: x.tolist() for n, x in file.read(arrays).items()} == {"a": [0, 1, 2], "b": [1, 1]}
    damage(path, how)
    expected = f"the snapshot of trainer 1 after step 10 cannot be read from {path}: "
    with pytest.raises(StateError, match=re.escape(expected)):
        file.read(arrays)

    params, folder = init()[0], tmp_path / "job"
    snapshots = LeafSnapshots(folder_of(folder), plan, "trainer 1")
    snapshots.before_step(executor(Generation(0), step=0), 10, (params,))
    damage(folder / "10/trainer-1.npz", how)
    with pytest.raises(
        StateError, match="leaves of trainer 1 in the snapshot of step 10 cannot be"
    ):
        snapshots.begin(executor(Generation(1, 10), step=10), params)


def test_an_init_between_later_steps_does_not_go_back(plan: PServerPlan, tmp_path: Path) -> None:
    params = init()[0]
    snapshots = LeafSnapshots(folder_of(tmp_path), plan, "trainer 1")
    snapshots.before_step(executor(Generation(0), step=0), 10, (params,))
    assert_begins_with(snapshots, executor(Generation(1, 10), step=13), params)


def test_leaves_that_cannot_be_written_are_logged_and_the_job_goes_on(
    plan: PServerPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, params = folder_of(tmp_path), init()[0]
    snapshots, servers = LeafSnapshots(folder, plan, "trainer 1"), executor(Generation(0), step=0)
    snapshots.before_step(servers, 0, (params,))
    with monkeypatch.context() as full:

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(np, "savez", fail)
        snapshots.before_step(servers, 10, (params,))
    (record,) = caplog.records
    assert (
        "trainer 1 cannot write its leaves in the snapshot of step 10, so a restart would go"
        in (record.getMessage())
    )
    snapshots.before_step(servers, 20, (params,))
    assert folder.marks()["trainer 1"].snapshots == (0, 20)


def test_servers_alone_write_and_restore_the_rest_of_a_snapshot(
    plan: PServerPlan, tmp_path: Path
) -> None:
    """A checkpoint of the same plan also needs the piece of trainer 0."""
    params, opt_state = init()
    states = {ep: scatter(plan, ep, params, opt_state) for ep in SERVERS}
    LauncherFolder(tmp_path).grant(Generation(), "a run", trainers=2)
    for i, (endpoint, state) in enumerate(states.items()):
        folder = RoleFolder(tmp_path, f"pserver {i}")
        snapshots = ServerSnapshots(folder, plan, endpoint, every=10)
        snapshots.begin(state)
        snapshots.write(0, {}, state, SaveId(("a run",), 10, job="a run"))
        assert folder.marks()[f"pserver {i}"].with_trainers
    LauncherFolder(tmp_path).grant(Generation(1, 10), "a run", trainers=2)
    for i, (endpoint, state) in enumerate(states.items()):
        snapshots = ServerSnapshots(RoleFolder(tmp_path, f"pserver {i}"), plan, endpoint, every=10)
        start = snapshots.begin({})
        assert (start.generation, start.step, start.loaded) == (Generation(1, 10), 10, 10)
        assert start.state.keys() == state.keys()
        for n, x in state.items():
            np.testing.assert_array_equal(start.state[n], x)

    mark = SaveId(("a run",), 10, job="a run")
    for endpoint, state in states.items():
        checkpoint.save_serving(tmp_path / "checkpoint", plan, endpoint, state, mark)
    with pytest.raises(StateError, match="is incomplete: trainer-0 of trainer 0 is missing"):
        checkpoint.restore(tmp_path / "checkpoint", plan, SERVERS[0])


@pytest.mark.job
def test_a_server_without_snapshots_is_reported(
    plan: PServerPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This does not hold if another role takes part in generations."""
    folder = LauncherFolder(tmp_path)
    folder.grant(Generation(), "a run")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    role = dtrans.Role("pserver", plan.trainers, SERVERS, current_endpoint=SERVERS[0])
    with ServerJob(plan, role, {}) as job:
        monkeypatch.setattr(job._executor, "run", lambda program, state: state)
        job.serve({}, snapshots=10)
        assert not folder.lacks_snapshots
        job.serve({})
        assert folder.lacks_snapshots
    RoleFolder(tmp_path, "pserver 1").enter(Generation())
    assert not folder.lacks_snapshots
