"""Jobs with snapshots that continue without a lost trainer, and the replay of their logs."""

from __future__ import annotations

import functools
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params
from paths import DOCS, ROOT
from stand_in_hosts import HOSTS, find_without_checks, write_rsh

import dtrans
from dtrans.errors import ConfigError, LaunchError
from dtrans.hosts.on_hosts import launch_on_hosts
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import Generation
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from dtrans.run.distributed.role import Role
from dtrans.run.net.generation_folder import VARIABLE
from dtrans.run.net.generation_log import GenerationLog, GenerationRecord, read_log
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.parameter_server.snapshots import check_drops
from dtrans.run.parameter_server.trainer_calls import TrainerCalls
from dtrans.run.role_jobs.trainer_job import TrainerJob


STEPS = 40
# servers exchange the norm of the gradients
DENSE = """
import jax, jax.numpy as jnp, optax
import dtrans

key, x = jax.random.key(0), jax.ShapeDtypeStruct((12, 4), float)
tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))

def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - 1) ** 2)

def init(key):
    params = {"w": jax.random.normal(key, (4, 6)), "b": jnp.zeros(6), "v": jnp.ones(6)}
    return params, tx.init(params)

def batch(step):
    return (jax.random.normal(jax.random.fold_in(key, step), (12, 4)),)
"""
TABLES = """
import jax, jax.numpy as jnp, optax
import dtrans

key, x = jax.random.key(0), jax.ShapeDtypeStruct((12,), int)
tx = optax.adam(0.1)

def loss(params, ids):
    return jnp.mean((params["rows"][ids] @ params["w"] - 1) ** 2)

def init(key):
    params = {"rows": jax.random.normal(key, (50, 4)), "w": jnp.ones(4)}
    return params, tx.init(params)

def batch(step):
    return (jax.random.randint(jax.random.fold_in(key, step), (12,), 0, 50),)
"""
PLAN = """
main = dtrans.trace(dtrans.make_train_step(loss, tx), *jax.eval_shape(init, key), x)
startup = dtrans.trace(init, key)

def plan_for(pservers, trainers):
    return dtrans.pserver(
        main, startup, pservers=pservers, trainers=trainers,
        placement=dtrans.BlockPlacement(min_block_size=1),
    )
"""
# Trainer 1 kills other roles, and is never lost. Before some steps, it waits for a generation.
TRAIN = """
import os, signal, time
import dtrans
from dtrans.run.net.generation_log import read_log

role = dtrans.Role.from_env()
open(f"pid {{role.name}}", "w").write(str(os.getpid()))

from model import batch, key, plan_for

def batch_or_kill(step):
    for number, at, victim in {kills!r}:
        is_due = len(os.listdir("kills")) == number and step == at
        if role.name == "trainer 1" and is_due:
            open(f"kills/{{number}}", "w")
            os.kill(int(open(f"pid {{victim}}").read()), signal.SIGKILL)
    for at, generation in {waits!r}:
        waits = role.name == "trainer 1" and step == at
        while waits and read_log("snapshots/generations.jsonl")[-1].generation < generation:
            time.sleep(0.01)
    return batch(step)

plan = plan_for(role.pservers, role.trainers)
with plan.on_cluster() as job:
    state = job.init(key)
    if role.is_pserver:
        job.serve(state, checkpoints="ckpt", snapshots={snapshots})
    else:
        steps = job.steps(state, lambda step: job.shard_batch(*batch_or_kill(step)), stop={stop})
        for state, loss in steps:
            if job.step_count == 12:
                job.save("12")
        job.save("end")
"""


def launch_dropping(
    folder: Path,
    script: str,
    *,
    trainers: int,
    on_trainer_loss: str = "drop",
    start: Callable[..., None] | None = None,
    **options: Any,
) -> None:
    """Launch a script of a folder as a job of two servers that drops lost trainers."""
    (start or launch)(
        [sys.executable, script],
        trainers=trainers,
        pservers=2,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"},
        on_trainer_loss=on_trainer_loss,
        restarts=RestartOptions(snapshots="snapshots", **options),
    )


def run_job(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: Sequence[tuple[int, int, str]],
    *,
    model: str = DENSE,
    waits: Sequence[tuple[int, int]] = (),
    snapshots: str = "5",
    **options: Any,
) -> dict[str, Any]:
    """Run a job of three trainers and two servers; return the names of its model.

    Args:
      folder, monkeypatch: as for fixtures.
      kills: (number of earlier kills, step, name of the lost role).
      model: source of the model.
      waits: (step, number of a generation): trainer 1 waits for the generation before the step.
      snapshots: the argument of `job.serve`.
      options: as for `launch_dropping`.
    """
    monkeypatch.chdir(folder)
    (folder / "kills").mkdir()
    (folder / "model.py").write_text(model + PLAN)
    (folder / "train.py").write_text(
        TRAIN.format(kills=list(kills), waits=list(waits), snapshots=snapshots, stop=STEPS)
    )
    launch_dropping(folder, "train.py", trainers=3, **options)
    found: dict[str, Any] = {}
    exec(model + PLAN, found)
    return found


def assert_replayed(model: dict[str, Any]) -> None:
    """Check that the job's checkpoints have the bits of the replay of its log."""
    plan = model["plan_for"]("127.0.0.1:1,127.0.0.1:2", 3)
    for name, stop in (("12", 12), ("end", STEPS)):
        saved = dtrans.checkpoint.load(f"ckpt/{name}", model["main"], model["startup"])
        log, init = "snapshots/generations.jsonl", (model["key"],)
        found = dtrans.replay(plan, log, model["batch"], init=init, stop=stop)
        for x, y in zip(jax.tree.leaves(saved), jax.tree.leaves(found), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


VICTIMS = pytest.mark.parametrize(
    ("model", "victim"),
    [
        (DENSE, "trainer 2"),
        pytest.param(DENSE, "trainer 0", marks=pytest.mark.rotated),
        pytest.param(TABLES, "trainer 2", marks=pytest.mark.rotated),
    ],
    ids=["trainer 2", "trainer 0", "tables"],
)


@VICTIMS
def test_the_job_ends_with_the_bits_of_its_replay(
    model: str,
    victim: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # the job repeats steps 11 to 14, and writes the checkpoint of step 12 again
    found = run_job(tmp_path, monkeypatch, [(0, 14, victim)], model=model)
    assert f"{victim} failed with signal SIGKILL; the job continues with trainers" in (
        capsys.readouterr().err
    )
    _, after = read_log("snapshots/generations.jsonl")
    assert after.snapshot in (5, 10) and len(after.members) == 2 and after.lost == victim
    assert_replayed(found)


def test_servers_start_again_and_a_second_trainer_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [(0, 12, "trainer 0"), (1, 21, "pserver 1"), (2, 33, "trainer 2")]
    found = run_job(tmp_path, monkeypatch, kills, most=1)
    records = read_log("snapshots/generations.jsonl")
    assert [x.members for x in records] == [(0, 1, 2), (1, 2), (1, 2), (1,)]
    assert_replayed(found)


@pytest.mark.rotated
def test_a_lost_trainer_starts_again_without_a_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [(0, 12, "trainer 0"), (1, 21, "trainer 2")]
    found = run_job(tmp_path, monkeypatch, kills, most=1, quorum=2)
    records = read_log("snapshots/generations.jsonl")
    assert [x.members for x in records] == [(0, 1, 2), (1, 2), (1, 2)]
    assert_replayed(found)


def test_the_error_names_the_quorum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="2 trainers would be left, but quorum=3, and restarts=0"):
        run_job(tmp_path, monkeypatch, [(0, 12, "trainer 2")], quorum=3)


# -- trainers that join again ----------------------------------------------------------------------


@VICTIMS
def test_a_lost_trainer_joins_the_job_again(
    model: str,
    victim: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # without the trainer, the job completes steps, and then writes the checkpoint of step 12
    options = {"most": 1, "on_trainer_loss": "replace"}
    kills, waits = [(0, 14, victim)], [(28, 2)]
    found = run_job(tmp_path, monkeypatch, kills, model=model, waits=waits, **options)
    said = capsys.readouterr().err
    assert f"{victim} starts again, and joins the job when it is ready (restart 1 of 1)" in said
    assert f"{victim} joined the job, and all roles go back to step" in said
    _, dropped, joined = read_log("snapshots/generations.jsonl")
    assert dropped.snapshot in (5, 10) and len(dropped.members) == 2 and dropped.lost == victim
    assert (
        joined.snapshot is not None
        and joined.snapshot > dropped.snapshot
        and joined.members == (0, 1, 2)
    )
    assert (joined.lost, joined.reason) == ("", f"{victim} joined")
    assert_replayed(found)


def test_a_lost_trainer_joins_the_job_again_on_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rsh = write_rsh(tmp_path, monkeypatch)
    find_without_checks(monkeypatch)
    start = functools.partial(launch_on_hosts, hosts=HOSTS, rsh=rsh)
    options = {"most": 1, "on_trainer_loss": "replace", "start": start}
    found = run_job(tmp_path, monkeypatch, [(0, 14, "trainer 2")], waits=[(28, 2)], **options)
    said = capsys.readouterr().err
    assert re.search(r"trainer 2 on \w+ failed with signal SIGKILL; the job continues with", said)
    assert "trainer 2 joined the job, and all roles go back to step" in said
    assert "all roles start again" not in said
    members = [x.members for x in read_log("snapshots/generations.jsonl")]
    assert members == [(0, 1, 2), (0, 1), (0, 1, 2)]
    assert_replayed(found)


@pytest.mark.rotated
def test_a_join_repeats_no_step_with_snapshots_at_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"most": 1, "on_trainer_loss": "replace"}
    snapshots, waits = "dtrans.Snapshots(every=1000, at_loss=True)", [(28, 2)]
    kills = [(0, 14, "trainer 2")]
    found = run_job(tmp_path, monkeypatch, kills, waits=waits, snapshots=snapshots, **options)
    _, dropped, joined = read_log("snapshots/generations.jsonl")
    assert dropped.snapshot in (13, 14, 15)
    assert joined.members == (0, 1, 2)
    assert_replayed(found)


@pytest.mark.rotated
def test_a_trainer_that_joined_is_lost_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is lost first. A spare becomes the trainer that joins first."""
    kills = [(0, 8, "trainer 2"), (1, 13, "pserver 1"), (2, 26, "trainer 2")]
    waits, options = [(20, 3), (33, 5)], {"most": 3, "spares": 1, "on_trainer_loss": "replace"}
    found = run_job(tmp_path, monkeypatch, kills, waits=waits, **options)
    records = read_log("snapshots/generations.jsonl")
    assert records[-1].members == (0, 1, 2)
    assert [x.members for x in records].count((0, 1)) >= 2
    assert_replayed(found)


@pytest.mark.rotated
def test_the_page_replays_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last trainer of the page's script kills itself."""
    monkeypatch.chdir(tmp_path)
    for page in (ROOT / "README.md", DOCS / "snapshots.md", DOCS / "snapshots_members.md"):
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.S):
            Path(name).write_text(code)
    script = Path("survive.py").read_text()
    kill = "if step == 25 and role.name == 'trainer 3': os.kill(os.getpid(), signal.SIGKILL)"
    first = "# a function of the step alone\n"
    assert script.count(first) == 1
    script = script.replace(first, "\n    " + kill + "\n")
    Path("survive.py").write_text("import os, signal\n" + script)
    launch_dropping(tmp_path, "survive.py", trainers=4, most=2, quorum=3)
    assert [x.members for x in read_log("snapshots/generations.jsonl")] == [(0, 1, 2, 3), (0, 1, 2)]
    monkeypatch.syspath_prepend(tmp_path)
    found = runpy.run_path("replay.py")
    saved = dtrans.checkpoint.load("ckpt/60", found["main"], found["startup"])
    replayed = found["params"], found["opt_state"]
    for x, y in zip(jax.tree.leaves(saved), jax.tree.leaves(replayed), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# -- the replay alone ------------------------------------------------------------------------------


def plan_for(trainers: int = 3, **options: Any) -> PServerPlan:
    params, tx = mlp_params(), optax.adam(0.1)
    types = params, jax.eval_shape(tx.init, params), *mlp_batch(6)
    traced = dtrans.trace(dtrans.make_train_step(mlp_loss, tx), *types)
    startup = dtrans.trace(init_of(tx), params)
    endpoints = "127.0.0.1:1,127.0.0.1:2"
    return dtrans.pserver(traced, startup, pservers=endpoints, trainers=trainers, **options)


def test_a_replay_uses_the_rows_of_the_members_of_each_step(tmp_path: Path) -> None:
    """A single device gets the rows of these members."""
    log = GenerationLog(tmp_path)
    log.add(GenerationRecord(0, None, (0, 1, 2)))
    log.add(GenerationRecord(1, 2, (0, 2), "trainer 1"))
    log.add(GenerationRecord(2, 4, (2,), "trainer 0"))
    batches = [mlp_batch(6, seed=s) for s in range(6)]
    params, tx = mlp_params(), optax.adam(0.1)
    found, _ = dtrans.replay(plan_for(), log.path, lambda s: batches[s], init=(params,), stop=6)
    step, state = jax.jit(dtrans.make_train_step(mlp_loss, tx)), tx.init(params)
    members = [(0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (2,), (2,)]
    for some, batch in zip(members, batches, strict=True):
        rows = jnp.array([i for k in some for i in (2 * k, 2 * k + 1)])
        params, state, _ = step(params, state, *(x[rows] for x in batch))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_replay_gives_a_trainer_that_joins_the_current_parameters(tmp_path: Path) -> None:
    log = GenerationLog(tmp_path)
    log.add(GenerationRecord(0, None, (0, 1, 2)))
    log.add(GenerationRecord(1, 1, (1, 2), "trainer 0"))
    log.add(GenerationRecord(2, 3, (0, 1, 2), reason="trainer 0 joined"))
    batches = [mlp_batch(6, seed=s) for s in range(6)]
    params, tx = mlp_params(), optax.adam(0.1)
    found, _ = dtrans.replay(plan_for(), log.path, lambda s: batches[s], init=(params,), stop=6)
    step, state = jax.jit(dtrans.make_train_step(mlp_loss, tx)), tx.init(params)
    for number, batch in enumerate(batches):
        rows = jnp.arange(6)[2 if number in (1, 2) else 0 :]
        params, state, _ = step(params, state, *(x[rows] for x in batch))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": dtrans.Async()}, "replay needs a plan of dtrans.pserver with mode=dtrans.Sync"),
        ({"trainers": 2}, r"the log has trainers \[0, 1, 2\] at its start, but the plan has tr"),
    ],
)
def test_a_replay_needs_a_synchronous_plan_of_the_same_job(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    log = GenerationLog(tmp_path)
    log.add(GenerationRecord(0, None, (0, 1, 2)))
    with pytest.raises(ConfigError, match=message):
        dtrans.replay(plan_for(**options), log.path, lambda step: (), init=(), stop=0)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [GenerationRecord(1, 2, (0, 1, 2))],
            "the log begins with step 2, and replay needs all steps",
        ),
        (
            [GenerationRecord(1, None, (0, 1, 2))],
            "the log lacks generation 0, and replay needs all generations",
        ),
        (
            [GenerationRecord(0, None, (0, 1, 2)), GenerationRecord(2, 4, (0,))],
            "the log lacks generation 1, and replay needs all generations; pass the complete log "
            "of the job",
        ),
    ],
    ids=["later step", "later generation", "missing generation"],
)
def test_a_replay_needs_a_complete_log(
    records: list[GenerationRecord], message: str, tmp_path: Path
) -> None:
    log = GenerationLog(tmp_path)
    for record in records:
        log.add(record)
    with pytest.raises(ConfigError, match=f"^replay: {message}"):
        dtrans.replay(plan_for(), log.path, lambda step: (), init=(), stop=3)


@pytest.mark.job
def test_a_replay_refuses_a_batch_that_needs_all_trainers(tmp_path: Path) -> None:
    log, params = GenerationLog(tmp_path), mlp_params()
    log.add(GenerationRecord(0, None, (0, 1, 2)))
    with pytest.raises(
        ConfigError,
        match=r"^dtrans.replay: the batch has 7 rows, .* of the 3 trainers; .* plan\.on_mesh\(\) instead$",
    ):
        dtrans.replay(plan_for(), log.path, lambda step: mlp_batch(7), init=(params,), stop=1)


# -- plans that cannot continue without a trainer --------------------------------------------------


def plan_with_batch_norm() -> PServerPlan:
    params, tx = mlp_params(), optax.adam(0.1)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return mlp_loss(params, (x - x.mean(0)) / (x.std(0) + 1), y)

    types = params, jax.eval_shape(tx.init, params), *mlp_batch(6)
    traced = dtrans.trace(dtrans.make_train_step(loss, tx), *types)
    return dtrans.pserver(traced, dtrans.trace(init_of(tx), params), trainers=3)


def test_plans_that_need_all_trainers_are_refused() -> None:
    check_drops(plan_for(), "replace")
    for plan, message in [
        (
            plan_for(mode=dtrans.Async()),
            "in asynchronous jobs with snapshots, the launcher starts a lo",
        ),
        (plan_for(on_trainer_exit="error"), "with on_trainer_exit='error' an update needs the gr"),
        (plan_with_batch_norm(), r"the step needs values of the full batch \(.*pass batch='local"),
    ]:
        with pytest.raises(ConfigError, match=f"^on_trainer_loss='drop': .*{message}"):
            check_drops(plan, "drop")


def test_a_server_reads_whether_trainers_may_be_dropped(tmp_path: Path) -> None:
    folder = LauncherFolder(tmp_path)
    folder.grant(Generation(), "a run")
    assert folder.on_trainer_loss == "restart"
    folder.grant(Generation(1, 10, dropped=(2,)), "a run", on_trainer_loss="drop")
    assert folder.on_trainer_loss == "drop" and folder.current().dropped == (2,)
    assert os.listdir(tmp_path) == ["generation.json"]


def test_a_trainer_refuses_a_batch_that_needs_all_trainers() -> None:
    """The program of an uneven batch exchanges values, and scales by the number of all trainers."""
    plan = plan_for()
    rows = [dtrans.UnevenPart(x[:3], 7) for x in mlp_batch(7)]
    assert TrainerCalls(plan, 0)(rows).rows == 7
    with pytest.raises(
        ConfigError,
        match=r"^on_trainer_loss='drop': the batch has 7 rows, .* a multiple of 3 rows, or launch",
    ):
        TrainerCalls(plan, 0, on_trainer_loss="drop")(rows)


@pytest.mark.parametrize("on_trainer_loss", ["restart", "drop", "replace"])
def test_a_trainer_reads_whether_trainers_may_be_dropped(
    on_trainer_loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LauncherFolder(tmp_path).grant(Generation(), "a run", on_trainer_loss=on_trainer_loss)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    plan = plan_for()
    role = Role("trainer", plan.trainers, tuple(plan.servers))
    with TrainerJob(plan, role, {}) as job:
        assert job._calls._on_trainer_loss == on_trainer_loss
