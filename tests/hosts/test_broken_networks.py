"""Jobs with snapshots whose network between hosts breaks continue, with the bits of an undisturbed
job."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from paths import ROOT

import dtrans
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from tools.namespaces import Namespaces, namespaces, why_not


pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made"),
    pytest.mark.soak,
]
PATIENCE = 240.0  # seconds for something that takes less than a minute on an idle machine
BREAK = 30  # the step before which trainers wait, until the network is broken
TRAINER, SERVERS = 1, (2, 3)  # the hosts of trainer 1 and of the servers

MODEL = """
import os, sys, time
import jax, jax.numpy as jnp, optax
import dtrans

def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)

def init(key, width):
    params = {"w1": jax.random.normal(key, (16, width)), "w2": jax.random.normal(key, (width, 1))}
    return params, optax.adam(1e-3).init(params)

def batch(step):
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (8, 16)), jnp.ones((8, 1))

def trace(width):
    key, startup = jax.random.key(0), lambda key: init(key, width)
    step = dtrans.make_train_step(loss, optax.adam(1e-3))
    main = dtrans.trace(step, *jax.eval_shape(startup, key), *batch(0))
    return main, dtrans.trace(startup, key)
"""
TRAIN = """
width, steps, patience, deadline = map(int, sys.argv[1:])
role = dtrans.Role.from_env()
main, startup = trace(width)

def waiting_batch(step):
    if step == BREAK:
        open(f"waits {role.name}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    return job.shard_batch(*batch(step))

plan = dtrans.pserver(
    main, startup, pservers=role.pservers, trainers=role.trainers,
    placement=dtrans.BlockPlacement(min_block_size=1),
)
with plan.on_cluster(patience=patience, deadline=deadline) as job:
    state = job.init(jax.random.key(0))
    if role.is_pserver:
        job.serve(state, checkpoints="ckpt", snapshots=10, on_failure="drop")
    else:
        for state, _ in job.steps(state, waiting_batch, ahead=1, stop=steps):
            pass
        job.save(str(steps))
""".replace("BREAK", str(BREAK))


class Job:
    """A job of two trainers and two servers, whose network a test breaks.

    Attributes:
      width: columns of the model.
      steps: number of steps.
    """

    def __init__(self, folder: Path, width: int = 32, steps: int = 60) -> None:
        self.folder, self.width, self.steps = folder, width, steps
        folder.mkdir()
        (folder / "train.py").write_text(MODEL + TRAIN)

    def arguments(self, patience: int, deadline: int) -> list[str]:
        return ["train.py", *map(str, (self.width, self.steps, patience, deadline))]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the launcher, whose lines are in a file."""
        command = [sys.executable, "-m", "dtrans", "launch", *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)

    @property
    def text(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def restarts(self) -> list[str]:
        """Return the launcher's lines about restarts."""
        return re.findall(r"^\[launcher\] (.* \(restart .*)$", self.text, re.M)

    def arrays(self) -> list[bytes]:
        """Return the bytes of all arrays of the last checkpoint."""
        model: dict[str, Any] = {}
        exec(MODEL, model)
        path = dtrans.checkpoint.latest(self.folder / "ckpt")
        assert path is not None and path.name == str(self.steps)
        found = dtrans.checkpoint.load(path, model["trace"](self.width)[0])
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as made:
        yield made


def run_undisturbed(job: Job) -> list[bytes]:
    """Run a job on this host; return the bytes of its last checkpoint."""
    (job.folder / "go").touch()
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with contextlib.chdir(job.folder):
        command = [sys.executable, *job.arguments(30, 180)]
        launch(command, trainers=2, pservers=2, env=env, restarts=RestartOptions(1))
    return job.arrays()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return run_undisturbed(Job(tmp_path_factory.mktemp("undisturbed") / "job"))


@contextlib.contextmanager
def broken(
    job: Job, hosts: Namespaces, patience: int, deadline: int = 180
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job, and yield when its trainers wait. After the block, the job continues."""
    options = ["--trainers", "2", "--pservers", "2", "--restarts", "5", "--snapshots", "snapshots"]
    where = ["--hosts", ",".join(hosts.names), "--rsh", hosts.rsh]
    launcher = job.start(*where, *options, *job.arguments(patience, deadline))
    try:
        waits = [job.folder / f"waits trainer {k}" for k in range(2)]
        wait(lambda: all(path.exists() for path in waits), job, launcher)
        yield launcher
    finally:
        launcher.terminate()
        launcher.wait(PATIENCE)


def wait(condition: Callable[[], object], job: Job, launcher: subprocess.Popen[bytes]) -> None:
    """Wait for a condition while the job runs."""

    limit = time.monotonic() + PATIENCE
    while not condition():
        assert launcher.poll() is None and time.monotonic() < limit, job.text
        time.sleep(0.01)


def assert_equal(job: Job, launcher: subprocess.Popen[bytes], expected: list[bytes]) -> None:
    """Wait for the end of a job. Its arrays must have the bits of the undisturbed job."""
    assert launcher.wait(PATIENCE) == 0, job.text
    assert job.arrays() == expected


def test_a_partition_shorter_than_the_patience(
    hosts: Namespaces, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    """Trainers reach no server for 20 seconds. No process is lost."""
    job = Job(tmp_path / "job")
    with broken(job, hosts, patience=40) as launcher:
        for i in SERVERS:
            hosts.part(i)
        (job.folder / "go").touch()
        time.sleep(20.0)
        for i in SERVERS:
            hosts.mend(i)
        assert_equal(job, launcher, undisturbed)
    assert job.restarts == [] and hosts.processes() == []


def cut(hosts: Namespaces) -> tuple[int, ...]:
    hosts.cut(TRAINER)
    return (TRAINER,)


def deafen_trainer(hosts: Namespaces) -> tuple[int, ...]:
    hosts.deafen(TRAINER)
    return (TRAINER,)


def deafen_server(hosts: Namespaces) -> tuple[int, ...]:
    hosts.deafen(SERVERS[1])
    return (SERVERS[1],)


def part(hosts: Namespaces) -> tuple[int, ...]:
    for i in SERVERS:
        hosts.part(i)
    return SERVERS


@pytest.mark.parametrize("fault", [cut, deafen_trainer, deafen_server, part])
def test_a_network_that_breaks_for_longer_than_the_patience(
    fault: Callable[[Namespaces], tuple[int, ...]],
    hosts: Namespaces,
    tmp_path: Path,
    undisturbed: list[bytes],
) -> None:
    """The launcher replaces a process that others have lost.

    The new process connects when the network works again.
    """
    job = Job(tmp_path / "job")
    with broken(job, hosts, patience=4) as launcher:
        faulty = fault(hosts)
        (job.folder / "go").touch()
        wait(lambda: job.restarts, job, launcher)
        time.sleep(10.0)  # the new process finds the network broken
        for i in faulty:
            hosts.mend(i)
        assert_equal(job, launcher, undisturbed)
    assert all("all roles go back to step" in line for line in job.restarts)
    assert hosts.processes() == []


def test_a_job_whose_network_stays_broken_is_resumed(
    hosts: Namespaces, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    """The job ends after its deadline, with an error that names the role."""
    job = Job(tmp_path / "job")
    with broken(job, hosts, patience=3, deadline=12) as launcher:
        hosts.cut(TRAINER)
        (job.folder / "go").touch()
        assert launcher.wait(PATIENCE) == 1
    assert re.search(r"^dtrans: .* and the other roles were ended", job.text, re.M), job.text
    assert "DeadlineError" in job.text and hosts.processes() == []
    hosts.mend(TRAINER)
    resumed = job.start("--resume", "snapshots")
    assert_equal(job, resumed, undisturbed)
    assert re.search(r"the job of .* continues at step [23]0$", job.text, re.M)


def test_a_slow_link(hosts: Namespaces, tmp_path: Path) -> None:
    """Messages of 2 MB take almost a second each, also to and from the servers."""
    expected = run_undisturbed(Job(tmp_path / "undisturbed", width=1 << 16, steps=33))
    job = Job(tmp_path / "job", width=1 << 16, steps=33)
    with broken(job, hosts, patience=6) as launcher:
        hosts.shape(TRAINER, "20mbit")
        (job.folder / "go").touch()
        assert_equal(job, launcher, expected)
    assert job.restarts == []
