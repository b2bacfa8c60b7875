"""Jobs on a Ray cluster of three nodes: results, data, checkpoints, and errors."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from helpers import distance
from ray_cluster import RayCluster

import dtrans
from dtrans import cli
from dtrans.errors import BatchError, ConfigError, DeadlineError, LaunchError, PeerError, StateError
from dtrans.hosts.on_ray import RayState
from dtrans.hosts.ray_launch import launch_on_ray
from examples import digits_job
from examples.digits_training import DigitsSettings, Outcome


ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

PATIENCE = 120.0  # seconds for what takes five on an idle machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # without this option, Ray writes a token into the user's home folder
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


def with_rate() -> tuple[Any, Any]:
    """Return the programs of `programs` with a learning rate that can change between steps."""
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    step = dtrans.make_train_step(loss, tx)
    begin = lambda key: (params := init(key)[0], tx.init(params))
    return dtrans.trace(step, *jax.eval_shape(begin, KEY), X[0], Y[0]), dtrans.trace(begin, KEY)


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
    "nccl2": lambda: dtrans.nccl2(*with_rate(), trainers=2),
    "sharding": lambda: dtrans.sharding(
        *programs(), degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)
    ),
    "pipeline": lambda: dtrans.pipeline(*programs(), num_stages=2, num_micro_batch=2),
}


BATCHES = list(zip(X, Y, strict=True))


@functools.cache
def alone(
    made: Callable[[], tuple[Any, Any]] = programs, same: bool = False
) -> tuple[Any, list[float]]:
    """Return the parameters and losses of one device. With one batch, all steps use this batch."""
    step, begin = made()
    params, opt_state = begin(KEY)
    losses = []
    for batch in BATCHES[:1] * 3 if same else BATCHES:
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    return params, losses


def apart(a: Any, b: Any) -> float:
    return max(map(distance, jax.tree.leaves(a), jax.tree.leaves(b)))


ACTORS = ("RoleActor", "ScriptActor")


def is_clean() -> bool:
    """Return True when no placement group and no actor of a job exists.

    Ray removes them asynchronously.
    """
    from ray._private.state import actors

    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        alive = [
            a for a in actors().values() if a["State"] != "DEAD" and a["ActorClassName"] in ACTORS
        ]
        if not groups and not alive:
            return True
        time.sleep(0.05)
    return False


def trained(job: Any, batches: Any = None, state: Any = None) -> tuple[Any, list[float]]:
    """Return the parameters and losses after three steps. A checkpoint is saved after two."""
    losses = []
    state = job.init(KEY) if state is None else state
    for i in range(3):
        if i == 2:
            job.save("2")
        state, value = job.step(state, *(() if batches is None else batches[i]))
        losses.append(float(value))
    return job.params(state), losses


def check(
    job: Any, found: tuple[Any, list[float]], wanted: tuple[Any, list[float]], folder: Path
) -> None:
    """Compare a job with one device, also after the checkpoint, and check that nothing of the job
    is left."""
    assert apart(found[0], wanted[0]) < 1e-6
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)
    params, opt_state = dtrans.checkpoint.load(folder / "2", job.plan.main, job.plan.startup)
    assert float(job.plan.main(params, opt_state, *BATCHES[2])[2]) == pytest.approx(
        wanted[1][2], rel=1e-6
    )
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
            with pytest.raises(ConfigError, match="servers of this job save in"):
                job.save(tmp_path / "other" / "2")
            with pytest.raises(StateError, match="already have a state"):
                job.init(KEY)
    check(job, found, alone(), tmp_path)
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
    with pytest.raises(ConfigError, match="exists already"):
        dtrans.checkpoint.check(tmp_path / "2", job)
    restored = job.with_hyperparameters(
        dtrans.checkpoint.restore(tmp_path / "2", job), learning_rate=0.0
    )
    params, opt_state = job.params(restored), job.opt_state(restored)
    newest, value = job.step(restored)
    assert float(value) == pytest.approx(
        float(job.plan.main(params, opt_state, *BATCHES[0])[2]), rel=1e-6
    )
    assert apart(job.params(newest), params) == 0
    with pytest.raises(BatchError, match="read their batches"):
        job.step(newest, *BATCHES[0])
    with pytest.raises(StateError, match="a step has already used this state"):
        job.step(RayState(7))
    with pytest.raises(PeerError, match=r"trainer 1 on node .* failed.*KeyError: 'no more rows'"):
        job.step(newest)
    with pytest.raises(StateError, match="closed"):
        job.step(newest)
    check(job, found, alone(with_rate), tmp_path)


# Ray itself sets options that it has deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")
def test_batches_of_a_dataset(cluster, tmp_path):
    """The rows of the dataset are one global batch, so any division of them has the same results.

    Each step is a generation.
    """
    rows = ray.data.from_items([{"x": x, "y": y} for x, y in zip(X[0], Y[0], strict=True)])
    with PLANS["sharding"]().on_ray(rows, rows=4, checkpoints=tmp_path, deadline=PATIENCE) as job:
        found = trained(job, state=job.state_of(*init(KEY)))
    wanted = alone(same=True)
    assert apart(found[0], wanted[0]) < 1e-6
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)


# -- dtrans launch --on ray ------------------------------------------------------------------------


def launched(*arguments: Any) -> None:
    command = typer.main.get_command(cli.app)
    command.main(["launch", "--on", "ray", *map(str, arguments)], standalone_mode=False)


def test_launch_has_the_numbers_of_the_demo(cluster, tmp_path, capfd):
    settings = DigitsSettings(deadline=PATIENCE)
    roles = ("--trainers", 2, "--pservers", 2, "--trainers-on", "SPREAD")
    launched(*roles, "-m", "examples.digits_role", tmp_path, *settings.arguments())
    trainers = [Outcome.load(tmp_path / f"trainer-{k}.npz") for k in range(2)]
    losses = np.mean([x.losses for x in trainers], axis=0)
    assert digits_job._compare(
        settings, Outcome(losses, trainers[0].params), digits_job.single_device(settings)
    )
    assert "[trainer 0] " in capfd.readouterr().out
    assert is_clean()


ROLE = """
import os, pathlib, sys, time
role = os.environ["DTRANS_ROLE"] + os.environ.get("DTRANS_TRAINER_ID", "")
pathlib.Path(sys.argv[1], f"{role}.new").write_text(str(os.getpid()))
os.rename(f"{sys.argv[1]}/{role}.new", f"{sys.argv[1]}/{role}")
print("token", len(os.environ["DTRANS_TOKEN"]), os.environ["DTRANS_ALLOW_REMOTE"])
if role == sys.argv[2]:
    time.sleep(0.1)
    print("out of rows", file=sys.stderr)
    sys.exit(3)
time.sleep(600)
"""


@pytest.fixture
def role(tmp_path: Path) -> Path:
    file = tmp_path / "role.py"
    file.write_text(ROLE)
    return file


def until_begun(folder: Path, roles: Sequence[str]) -> None:
    """Wait until all roles have written their process ids."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and not all((folder / name).exists() for name in roles):
        time.sleep(0.05)


def are_gone(folder: Path, *roles: str) -> bool:
    """Return True when none of the recorded processes exists.

    Processes of a lost node may need a moment.
    """
    limit = time.monotonic() + PATIENCE
    pids = [(folder / name).read_text() for name in roles]
    while any(Path("/proc", pid).exists() for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def test_a_role_that_fails_ends_the_launch(cluster, tmp_path, role, capfd):
    with pytest.raises(
        LaunchError, match=r"trainer 0 on node .* failed with exit code 3.*\n.*out of rows"
    ) as e:
        launched(role, tmp_path, "trainer0")
    assert (e.value.role, e.value.code) == ("trainer 0", 3)
    assert are_gone(tmp_path, "trainer0") and is_clean()
    assert "[trainer 0] token 64 1" in capfd.readouterr().out


def test_a_signal_ends_the_launch(cluster, tmp_path, role):
    names = ("pserver", "trainer0")

    def interrupt() -> None:
        until_begun(tmp_path, names)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell lets background commands ignore the signal, and the launcher does not change this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch_on_ray([sys.executable, str(role), str(tmp_path), "none"], deadline=PATIENCE)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert are_gone(tmp_path, *names) and is_clean()


def test_a_program_that_is_not_there_is_named(cluster, tmp_path, capfd):
    with pytest.raises(
        LaunchError, match="cannot be started: /no/program: No such file or directory"
    ):
        launch_on_ray(["/no/program"], mode="nccl2", trainers=2)
    said = capfd.readouterr().err
    assert re.search(r"^\[launcher\] this job answers: dtrans status \S+:\d+$", said, re.M)
    with pytest.raises(ConfigError, match="--trainer-resources CPU is not a list of resources"):
        launched("--trainer-resources", "CPU", "-m", "json")
    with pytest.raises(ConfigError, match="--on must be"):
        launched("--on", "rya", "-m", "json")
    with pytest.raises(
        DeadlineError,
        match="resources for 1 trainer with {'CPU': 99} each; the Ray cluster has {'CPU': 6.0}, "
        "and "
        "{'CPU': ",
    ):
        dtrans.nccl2(*programs(), trainers=1).on_ray(trainer_resources={"CPU": 99}, deadline=1)
    assert is_clean()


# -- the end of a node: the last tests, since the cluster is smaller behind each
# ---------------------


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
    with pytest.raises(PeerError, match=rf"on node .* \({job.nodes[name][:8]}\) was lost"):
        while True:
            state, _ = job.step(state, *BATCHES[0])
    assert is_clean()


def test_a_node_that_goes_ends_the_launch(cluster, tmp_path, role):
    """Four roles fill two nodes, which are free again after the previous test."""
    node, *others = [
        n["NodeID"]
        for n in ray.nodes()
        if n["Alive"] and "node:__internal_head__" not in n["Resources"]
    ]
    for other in others:
        cluster.remove(other)
    names = ("pserver", "trainer0", "trainer1", "trainer2")

    def remove() -> None:
        until_begun(tmp_path, names)
        cluster.remove(node)

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(
        LaunchError,
        match=rf"on node .* \({node[:8]}\) failed with the end of its actor; Ray says: ",
    ):
        launch_on_ray(
            [sys.executable, str(role), str(tmp_path), "none"], trainers=3, deadline=PATIENCE
        )
    thread.join()
    assert are_gone(tmp_path, *names) and is_clean()
