"""Jobs with snapshots: a lost process starts again, and the job ends with the bits of an undisturbed one."""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from paths import DOCS, ROOT
from stand_in_hosts import HOSTS, find_without_checks, write_rsh

import dtrans
from dtrans.errors import CheckpointWarning, LaunchError
from dtrans.hosts.on_hosts import launch_on_hosts
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.restarts.restart_options import RestartOptions


FINAL = 60

# Before a step of some generation, the last trainer kills a process. The number of restarts selects
# the generation.
KILL = """
    import os, signal, time
    open(f"pid-{{role.name}}-{{os.getpid()}}", "w")
    for restart, at, victim in {kills!r}:
        if (len(os.listdir("kills")), step, role.name) == (restart, at, f"trainer {{role.trainers - 1}}"):
            open(f"kills/{{restart}}", "w")
            while {spares} and not os.path.exists("spares"):
                time.sleep(0.01)
            os.kill(int(open(f"pid {{victim}}").read()), signal.SIGKILL)
"""
KILL_VICTIM = '            os.kill(int(open(f"pid {victim}").read()), signal.SIGKILL)\n'
# An asynchronous trainer could complete its last step before the lost process starts again. Then
# all processes start again.
KILL_AND_WAIT = f"""\
            lost = open(f"pid {{victim}}").read()
{KILL_VICTIM}\
            while open(f"pid {{victim}}").read() in ("", lost):
                time.sleep(0.01)
"""
TELL = """import os
if "DTRANS_SPARE" in os.environ:
    print(os.getpid(), file=open("spares", "a"))
from dtrans.run.distributed.role import Role
open(f"pid {Role.from_env().name}", "w").write(str(os.getpid()))
"""


# trainer 1 is lost after the update of step 30, before it sends its results
KILL_BEFORE_RESULTS = """
import os, signal
exchange = job._executor.exchange

def exchange_or_die(*args):
    if role.trainer_id == 1 and job.step_count == 29 and not os.path.exists("killed"):
        open("killed", "w")
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(*args)

job._executor.exchange = exchange_or_die
"""
# Trainer 1 leaves out its last gradients of step 30. It is lost when it receives the first
# parameters of this step: the server has updated a part, and the step is incomplete.
KILL_BETWEEN_PARTS = """
import os, signal
from dtrans.protocol.trainer.operation import PendingAnswer
from dtrans.protocol.trainer.trainer_line import TrainerLine

say, take = TrainerLine._say, PendingAnswer.take

def say_all_but_the_last(self, op, frames=(), **fields):
    is_last = op == "send" and fields["step"] == 29 and "then" in fields
    if not (is_last and role.trainer_id == 1) or os.listdir("kills"):
        say(self, op, frames, **fields)

def take_or_die(self, message):
    is_early = message.op == "blocks" and message["step"] == 30
    if is_early and role.trainer_id == 1 and not os.listdir("kills"):
        open("kills/0", "w")
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, message)

TrainerLine._say, PendingAnswer.take = say_all_but_the_last, take_or_die
"""
# A process fails before trainer 1 evicts rows after step 25. Trainer 0 may already wait for the
# eviction.
KILL_BEFORE_EVICTION = """
                import os, signal
                victim = "{victim}"
                if role.trainer_id == 1 and job.step_count == 25 and not os.listdir("kills"):
                    open("kills/0", "w")
                    os.kill(int(open(f"pid {{victim}}").read()), signal.SIGKILL)
"""
# two tables: updates of `all` change all rows that were looked up, and rows of `lazy` are evicted
TABLES = """
import jax, jax.numpy as jnp, optax
import dtrans

key, tx = jax.random.key(0), optax.adam(0.1)
ids = jax.ShapeDtypeStruct((8,), int)

def loss(params, ids):
    rows = params["all"][ids] * params["lazy"][ids % 50]
    return jnp.mean((rows @ params["w"] - 1) ** 2)

def init(key):
    params = {"all": jax.random.normal(key, (100, 4)), "lazy": jnp.ones((50, 4)), "w": jnp.ones(4)}
    return params, tx.init(params)

main = dtrans.trace(dtrans.make_train_step(loss, tx), *jax.eval_shape(init, key), ids)
startup = dtrans.trace(init, key)
sparse = {"params/all": dtrans.Rows("dense"), "params/lazy": dtrans.Rows("lazy")}
"""
TRAIN = """
import jax
import dtrans
from model import init, key, main, sparse, startup

def batch(step):  # a function of the step alone
    return (jax.random.randint(jax.random.fold_in(key, step), (8,), step // 2, step // 2 + 40),)

role = dtrans.Role.from_env()
plan = dtrans.pserver(
    main, startup, pservers=role.pservers, trainers=role.trainers, sparse=sparse,
    placement=dtrans.BlockPlacement(min_block_size=1),
)
with plan.on_cluster() as job:
    state = job.init(key)
    if role.is_pserver:
        job.serve(state, checkpoints="ckpt", snapshots=10)
    else:
        for state, loss in job.steps(state, lambda step: job.shard_batch(*batch(step)), stop=60):
            if job.step_count % 5 == 0:
                rows = job.tables.lookup("params/all", range(100))
                print(f"after {job.step_count}: {float(rows.sum()).hex()}")
                job.tables.evict("params/lazy", unused_for=2)
        job.save("60")
"""

# With these filters, rows wait at each loss. Rows of `lazy` are evicted, and must be admitted
# again.
FILTERED = TABLES.replace('Rows("dense")', 'Rows("dense", admit_probability=0.1)').replace(
    'Rows("lazy")', 'Rows("lazy", admit_count=3)'
)

# each trainer normalizes its part of the batch, and computes running statistics of it
STATISTICS = """
import jax, jax.numpy as jnp, optax
import dtrans

key, tx = jax.random.key(0), optax.adam(0.1)
x = jax.ShapeDtypeStruct((8, 4), float)

def loss(net, stats, x):
    h = x @ net["w"]
    mean, var = h.mean(0), h.var(0)
    new = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
    return jnp.mean(((h - mean) / jnp.sqrt(var + 1e-5) @ net["out"] - 1) ** 2), new

def step(params, opt_state, x):
    net = params["net"]
    (value, stats), grads = dtrans.value_and_grad(loss, has_aux=True)(net, params["stats"], x)
    updates, opt_state = tx.update(grads, opt_state, net)
    return {"net": optax.apply_updates(net, updates), "stats": stats}, opt_state, value

def init(key):
    net = {"w": jax.random.normal(key, (4, 6)), "out": jnp.ones(6)}
    return {"net": net, "stats": {"mean": jnp.zeros(6), "var": jnp.ones(6)}}, tx.init(net)

main = dtrans.trace(step, *jax.eval_shape(init, key), x)
startup = dtrans.trace(init, key)
"""
# no step changes `scale`, which the init draws
CONSTANTS = """
import jax, jax.numpy as jnp, optax
import dtrans

key = jax.random.key(0)
labels = {"w": "trained", "scale": "frozen"}
tx = optax.multi_transform({"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels)
x = jax.ShapeDtypeStruct((8, 4), float)

def loss(params, x):
    return jnp.mean((x * params["scale"] @ params["w"] - 1) ** 2)

def init(key):
    params = {"w": jnp.ones(4), "scale": jax.random.normal(key, (4,))}
    return params, tx.init(params)

main = dtrans.trace(dtrans.make_train_step(loss, tx), *jax.eval_shape(init, key), x)
startup = dtrans.trace(init, key)
"""
# servers do not store all parameters, so the trainers write their last parameters
TRAIN_LEAVES = """
import jax
import numpy as np
import dtrans
from model import key, main, startup, x

def batch(step):
    return (jax.random.normal(jax.random.fold_in(key, step), x.shape),)

role = dtrans.Role.from_env()
plan = dtrans.pserver(
    main, startup, pservers=role.pservers, trainers=role.trainers, batch=dtrans.Batch("local"),
    placement=dtrans.BlockPlacement(min_block_size=1),
)
with plan.on_cluster() as job:
    state = job.init(key)
    if role.is_pserver:
        job.serve(state, snapshots=10)
    else:
        for state, loss in job.steps(state, lambda step: job.shard_batch(*batch(step)), stop=60):
            if job.step_count % 5 == 0:
                total = sum(float(x.sum()) for x in jax.tree.leaves(job.params(state)))
                print(f"after {job.step_count}: {total.hex()}")
        np.savez(f"end {role.name}.npz", *jax.tree.leaves(job.params(state)))
"""


def write_scripts(folder: Path, kills: list[tuple[int, int, str]], spares: int = 0) -> None:
    """Write the scripts of the page.

    The function `batch` of the last trainer kills a process when spares have started.
    """
    for page in (ROOT / "README.md", DOCS / "snapshots.md"):
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.S):
            write_script(folder, name, code, kills, spares)


def write_script(
    folder: Path, name: str, code: str, kills: list[tuple[int, int, str]], spares: int = 0
) -> None:
    """Write a script.

    If it has a function `batch`, this function kills processes in the last trainer.
    """
    (folder / "kills").mkdir(exist_ok=True)
    if "def batch(step):" in code:
        head, body = code.split("def batch(step):", 1)
        first, rest = body.split("\n", 1)
        kill = KILL.format(kills=kills, spares=spares).strip("\n")
        code = f"{TELL}{head}def batch(step):{first}\n{kill}\n{rest}"
    (folder / name).write_text(code)


@pytest.mark.rotated
def test_a_state_that_is_not_from_init_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure, the value would be of another step than the servers' state."""
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path, [])
    script = tmp_path / "survive.py"
    own = "state = job.init(key) if role.is_pserver else job.state_of(*init(key))"
    script.write_text(script.read_text().replace("state = job.init(key)", own))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    with pytest.raises(LaunchError, match="this trainer's state is not from job.init"):
        launch([sys.executable, "survive.py"], trainers=2, pservers=1, env=env, restarts=1)


def run_job(
    folder: Path,
    kills: list[tuple[int, int, str]],
    monkeypatch: Any,
    scripts: Sequence[str] = (),
    on_hosts: Callable[..., None] | None = None,
    spares: int = 0,
    snapshots: str = "10",
) -> None:
    """Run the job of the page, or a job with another model and script.

    `on_hosts` replaces `launch`, and `snapshots` replaces the argument of the page.
    """
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_scripts(folder, kills, spares)
    for name, code in zip(("model.py", "survive.py"), scripts, strict=False):
        write_script(folder, name, code, kills)
    script = folder / "survive.py"
    script.write_text(script.read_text().replace("snapshots=10", f"snapshots={snapshots}"))
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "survive.py"]
    start = on_hosts or launch
    restarts = RestartOptions(len(kills) or 1, spares=spares) if spares else len(kills) or 1
    start(command, trainers=2, pservers=2, env=env, restarts=restarts)


def run(
    folder: Path,
    kills: list[tuple[int, int, str]],
    monkeypatch: Any,
    *,
    model: str = "",
    on_hosts: Callable[..., None] | None = None,
    spares: int = 0,
    snapshots: str = "10",
) -> list[np.ndarray]:
    """Run the job of the page, or a job with the tables of a model.

    Return all arrays of the job's last checkpoint.
    """
    scripts = (model, TRAIN) if model else ()
    run_job(folder, kills, monkeypatch, scripts, on_hosts, spares, snapshots)
    return arrays_of(folder)


def arrays_of(folder: Path) -> list[np.ndarray]:
    """Return all arrays of the last checkpoint of a job."""
    model: dict[str, Any] = {}
    exec((folder / "model.py").read_text(), model)
    path = dtrans.checkpoint.latest(folder / "ckpt")
    assert path is not None and path.name == str(FINAL)
    found = dtrans.checkpoint.load(path, model["main"], model["startup"])
    return [np.asarray(x) for x in jax.tree.leaves(found)]


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, 25, "pserver 0"), (1, 44, "trainer 0")], id="a server, then a trainer"),
        pytest.param([(0, 25, "trainer 1")], id="a trainer", marks=pytest.mark.rotated),
        pytest.param(
            [(0, 33, "pserver 1"), (1, 47, "pserver 1"), (2, 58, "trainer 1")],
            id="a server twice, and a trainer shortly before the end",
            marks=pytest.mark.rotated,
        ),
    ],
)
def test_only_the_lost_process_starts_again(
    kills: list[tuple[int, int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed = run(tmp_path / "killed", kills, monkeypatch)
    lines = capsys.readouterr().err.splitlines()
    again = [line for line in lines if "it starts again, and all roles go back to step" in line]
    assert [line.split("]")[1].split(" failed")[0].strip() for line in again] == [
        victim for _, _, victim in kills
    ]
    assert not any("all roles start again" in line for line in lines)

    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch)
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()
    # trainers that were not lost are still the same processes
    for name in ("trainer 0", "trainer 1"):
        processes = list((tmp_path / "killed").glob(f"pid-{name}-*"))
        assert len(processes) == 1 + [victim for _, _, victim in kills].count(name)


# before a kill, the newest complete snapshot loses a byte
DAMAGE = """
import os, time
from dtrans.run.net.generation_folder import GenerationFolder

kill = os.kill


def damage_and_kill(pid, signum):
    folder = GenerationFolder(os.environ["DTRANS_SNAPSHOTS"])
    while (snapshot := folder.newest_snapshot(["pserver 0", "pserver 1"])) < 20:
        time.sleep(0.01)
    path = folder.path / str(snapshot) / "pserver-0" / "dense" / "0.npy"
    os.truncate(path, path.stat().st_size - 1)
    kill(pid, signum)


os.kill = damage_and_kill
"""


@pytest.mark.parametrize(
    "victim", ["trainer 0", pytest.param("pserver 0", marks=pytest.mark.rotated)]
)
def test_all_roles_go_back_to_an_older_snapshot_if_the_newest_one_is_damaged(
    victim: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server finds the damage when it starts again, or when its running process goes back."""
    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch)
    model = Path("model.py").read_text()
    script = (DOCS / "snapshots.md").read_text().split("# survive.py\n")[1].split("```")[0]
    capsys.readouterr()
    # the second kill never happens, but allows a second restart
    kills = [(0, 25, victim), (9, 0, "")]
    run_job(tmp_path / "killed", kills, monkeypatch, (model, DAMAGE + script))
    said = capsys.readouterr().err
    assert re.search(r"all roles go back to step \d0 \(restart 1 of 2\)", said)
    assert re.search(r"failed with exit code 1; all roles start again \(restart 2 of 2\)", said)
    assert re.search(
        r"DamagedSnapshotError: pserver \d cannot read the snapshot of step \d0: .* 0\.npy", said
    )
    for x, y in zip(arrays_of(tmp_path / "killed"), undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.rotated
def test_batches_of_a_feed_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the failure of a server, trainers repeat steps.

    Then one of the trainers starts again.
    """
    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch)
    model, script = (Path(name).read_text() for name in ("model.py", "survive.py"))
    for old, new in (
        ("import dtrans", "import contextlib, dtrans"),
        ("with plan.on_cluster()", "with contextlib.ExitStack() as feeds, plan.on_cluster()"),
        (
            "lambda step: job.shard_batch(*batch(step))",
            "feeds.enter_context(dtrans.feed(batch, job, ahead=5))",
        ),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    script = script.removeprefix(TELL)
    head, rest = script.split("    import os, signal, time\n")
    script = head + rest[rest.index("    return ") :]
    kills = [(0, 25, "pserver 0"), (1, 44, "trainer 0")]
    run_job(tmp_path / "killed", kills, monkeypatch, (model, script))
    assert capsys.readouterr().err.count("it starts again, and all roles go back to step") == 2
    killed = arrays_of(tmp_path / "killed")
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()


def test_the_loss_of_a_trainer_repeats_only_the_incomplete_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch is drawn one step early. So 24 steps are complete when batch 25 is drawn."""
    kills, snapshots = (
        [(0, 25, "trainer 1"), (1, 44, "trainer 0")],
        "dtrans.Snapshots(100, at_loss=True)",
    )
    killed = run(tmp_path / "killed", kills, monkeypatch, snapshots=snapshots)
    back = re.findall(
        r"it starts again, and all roles go back to step (\d+)", capsys.readouterr().err
    )
    assert back[0] == "24"
    # trainer 0 may have sent its gradients of step 44 before it was killed
    assert back[1:] in (["43"], ["44"])
    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch)
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(
    "clips", [False, pytest.param(True, marks=pytest.mark.rotated, id="partial results")]
)
def test_the_loss_of_a_server_with_a_replica_repeats_only_the_incomplete_step(
    clips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kills, snapshots = (
        [(0, 25, "pserver 0"), (1, 44, "pserver 1")],
        "dtrans.Snapshots(100, replicas=1)",
    )
    (code,) = re.findall(r"```python\n# model.py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    if clips:  # the norm of all gradients needs partial results of both servers
        clipped = "optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3))"
        assert code.count("optax.adam(1e-3)") == 1
        code = code.replace("optax.adam(1e-3)", clipped)
    run_job(tmp_path / "killed", kills, monkeypatch, (code,), snapshots=snapshots)
    killed = arrays_of(tmp_path / "killed")
    back = re.findall(r"all roles go back to step (\d+)", capsys.readouterr().err)
    assert back == ["24", "43"]
    run_job(tmp_path / "undisturbed", [], monkeypatch, (code,), snapshots=snapshots)
    undisturbed = arrays_of(tmp_path / "undisturbed")
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()


def test_a_step_whose_results_are_not_merged_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All servers have completed step 30. A trainer is lost before the results are merged."""
    write_scripts(tmp_path, [])
    model, script = ((tmp_path / name).read_text() for name in ("model.py", "survive.py"))
    for old, new in (
        ("    else:\n", f"    else:\n{textwrap.indent(KILL_BEFORE_RESULTS, ' ' * 8)}"),
        ("            if job.step_count % 20", "            print(f'made {job.step_count}')\n"),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new + old.removeprefix("    else:\n"))
    snapshots = "dtrans.Snapshots(100, at_loss=True)"
    run_job(tmp_path / "killed", [], monkeypatch, (model, script), snapshots=snapshots)
    output = capsys.readouterr()
    assert "it starts again, and all roles go back to step 29" in output.err
    for name in ("trainer 0", "trainer 1"):
        made = [int(n) for n in re.findall(rf"\[{name}\] made (\d+)", output.out)]
        assert made == [*range(1, FINAL + 1)]


def test_states_in_pieces_have_the_bits_of_a_job_without_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer is lost after the first part of step 30, and later a server.

    Each server has 3.2 MB of the first matrix, which it stores and updates in two pieces.
    """
    write_scripts(tmp_path, [])
    model, script = ((tmp_path / name).read_text() for name in ("model.py", "survive.py"))
    assert model.count("256") == 3
    model = model.replace("256", "2048")
    start = "with plan.on_cluster() as job:"
    assert script.count(start) == 1
    killing = script.replace(start, KILL_BETWEEN_PARTS + start)
    # the first entry stands for the trainer, and kills no process
    kills = [(0, FINAL + 1, "trainer 1"), (1, 44, "pserver 0")]
    snapshots = "dtrans.Snapshots(100, at_loss=True)"
    run_job(tmp_path / "killed", kills, monkeypatch, (model, killing), snapshots=snapshots)
    back = re.findall(r"all roles go back to step (\d+)", capsys.readouterr().err)
    assert back == ["29", "29"]
    run_job(tmp_path / "undisturbed", [], monkeypatch, (model, script), snapshots=snapshots)
    killed, undisturbed = arrays_of(tmp_path / "killed"), arrays_of(tmp_path / "undisturbed")
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()


def test_only_the_lost_process_starts_again_on_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hosts share the folder of the snapshots."""
    rsh = write_rsh(tmp_path, monkeypatch)
    find_without_checks(monkeypatch)

    def launch_on_two(command: list[str], *, restarts: int, **options: Any) -> None:
        shared = RestartOptions(restarts, "snapshots")
        launch_on_hosts(command, HOSTS, rsh=rsh, restarts=shared, **options)

    kills = [(0, 25, "pserver 0"), (1, 44, "trainer 1")]
    killed = run(tmp_path / "killed", kills, monkeypatch, on_hosts=launch_on_two)
    err = capsys.readouterr().err
    again = re.findall(r"(\w+ \d on \w+) failed with signal SIGKILL; it starts again, and all", err)
    assert again == ["pserver 0 on one", "trainer 1 on two"]
    assert "all roles start again" not in err

    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch)
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()
    assert len(list((tmp_path / "killed").glob("pid-trainer 0-*"))) == 1


@pytest.mark.parametrize(
    "victim", ["trainer 0", pytest.param("pserver 1", marks=pytest.mark.rotated)]
)
def test_a_spare_takes_the_place_of_the_lost_process(
    victim: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed = run(tmp_path / "killed", [(0, 25, victim)], monkeypatch, spares=1)
    assert (
        f"{victim} failed with signal SIGKILL; a spare takes its place" in capsys.readouterr().err
    )
    assert Path(f"pid {victim}").read_text() in Path("spares").read_text().split()
    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch)
    for x, y in zip(killed, undisturbed, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("model", "kills"),
    [
        pytest.param(TABLES, [(0, 27, "pserver 1")], id="a server"),
        pytest.param(
            TABLES,
            [(0, 12, "trainer 0"), (1, 22, "pserver 0"), (2, 45, "trainer 1")],
            id="two trainers and a server, shortly after evictions",
            marks=pytest.mark.rotated,
        ),
        pytest.param(FILTERED, [(0, 27, "pserver 1")], id="a server with row filters"),
    ],
)
def test_tables_have_the_bits_of_a_job_without_losses(
    model: str,
    kills: list[tuple[int, int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Test rows that an update changes without a gradient, evicted rows, and lookups between two
    steps."""
    killed = run(tmp_path / "killed", kills, monkeypatch, model=model)
    output = capsys.readouterr()
    assert output.err.count("it starts again, and all roles go back to step") == len(kills)
    assert "all roles start again" not in output.err
    again = sums_of(output.out)

    undisturbed = run(tmp_path / "undisturbed", [], monkeypatch, model=model)
    for x, y in zip(killed, undisturbed, strict=True):
        assert x.tobytes() == y.tobytes()
    first = sums_of(capsys.readouterr().out)
    assert len(first) == FINAL // 5
    for step, sums in first.items():
        assert again[step][-1] == sums[-1]


@pytest.mark.parametrize(
    ("model", "victim", "snapshots"),
    [
        pytest.param(TABLES, "trainer 1", "dtrans.Snapshots(100, at_loss=True)", id="a trainer"),
        pytest.param(TABLES, "pserver 1", "dtrans.Snapshots(100, replicas=1)", id="a server"),
        pytest.param(
            FILTERED,
            "trainer 1",
            "dtrans.Snapshots(100, at_loss=True)",
            id="a trainer, with row filters",
            marks=pytest.mark.rotated,
        ),
        pytest.param(
            FILTERED,
            "pserver 1",
            "dtrans.Snapshots(100, replicas=1)",
            id="a server, with row filters",
        ),
    ],
)
def test_a_loss_repeats_only_the_incomplete_step_of_a_job_with_tables(
    model: str,
    victim: str,
    snapshots: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first failure is in a step, and the second between a step and the following eviction.

    Calls between two steps belong to the step before, so the job repeats this step.
    """
    evict = '                job.tables.evict("params/lazy", unused_for=2)\n'
    kill = KILL_BEFORE_EVICTION.format(victim=victim).removeprefix("\n")
    assert TRAIN.count(evict) == 1
    killing = TRAIN.replace(evict, kill + evict)
    kills = [(1, 44, victim.replace("1", "0"))]
    run_job(tmp_path / "killed", kills * 2, monkeypatch, (model, killing), snapshots=snapshots)
    killed = arrays_of(tmp_path / "killed")
    output = capsys.readouterr()
    assert "all roles start again" not in output.err
    back = re.findall(r"all roles go back to step (\d+)", output.err)
    assert back[0] == "24" and back[1] in ("42", "43", "44") and len(back) == 2

    run_job(tmp_path / "undisturbed", [], monkeypatch, (model, TRAIN), snapshots=snapshots)
    for x, y in zip(killed, arrays_of(tmp_path / "undisturbed"), strict=True):
        assert x.tobytes() == y.tobytes()
    first, again = sums_of(capsys.readouterr().out), sums_of(output.out)
    assert {step: sums[-1] for step, sums in again.items()} == {
        step: sums[-1] for step, sums in first.items()
    }


@pytest.mark.parametrize(
    ("model", "kills"),
    [
        pytest.param(
            STATISTICS,
            [(0, 27, "trainer 0"), (1, 44, "pserver 1")],
            id="batch statistics, a trainer, then a server",
        ),
        pytest.param(
            STATISTICS,
            [(0, 21, "trainer 1"), (1, 39, "trainer 1"), (2, 58, "pserver 0")],
            id="batch statistics, one trainer twice, and a server shortly before the end",
            marks=pytest.mark.rotated,
        ),
        pytest.param(
            CONSTANTS,
            [(0, 16, "trainer 0"), (1, 44, "pserver 1")],
            id="constants",
            marks=pytest.mark.rotated,
        ),
    ],
)
def test_leaves_of_trainers_have_the_bits_of_a_job_without_losses(
    model: str,
    kills: list[tuple[int, int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Test a trainer that starts again, and a running trainer that goes back."""
    run_job(tmp_path / "killed", kills, monkeypatch, (model, TRAIN_LEAVES))
    output = capsys.readouterr()
    assert output.err.count("it starts again, and all roles go back to step") == len(kills)
    assert "all roles start again" not in output.err
    run_job(tmp_path / "undisturbed", [], monkeypatch, (model, TRAIN_LEAVES))
    undisturbed = capsys.readouterr().out

    ends = []
    for name in ("trainer 0", "trainer 1"):
        again, first = sums_of(output.out, name), sums_of(undisturbed, name)
        for step, sums in first.items():
            assert {*again.get(step, sums)} == {*sums}
        killed, once = (
            np.load(tmp_path / folder / f"end {name}.npz") for folder in ("killed", "undisturbed")
        )
        assert len(once.files) == len(killed.files)
        for n in once.files:
            np.testing.assert_array_equal(killed[n], once[n])
        ends.append([once[n].tolist() for n in once.files])
    assert (ends[0] == ends[1]) == (model is CONSTANTS)  # statistics of different parts differ


def sums_of(output: str, name: str = "trainer 0") -> dict[str, list[str]]:
    """Return the sums that a trainer printed after each step, in order."""
    sums: dict[str, list[str]] = {}
    for step, text in re.findall(rf"\[{name}\] after (\d+): (\S+)", output):
        sums.setdefault(step, []).append(text)
    return sums


def run_alone(
    folder: Path, kills: list[tuple[int, int, str]], monkeypatch: Any, *, mode: str, trainers: int
) -> tuple[Any, Any]:
    """Run the job of the page with asynchronous servers.

    Return the state of its last checkpoint.
    """
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_scripts(folder, kills)
    script = folder / "survive.py"
    plan = "trainers=role.trainers)"
    text = script.read_text()
    assert text.count(plan) == text.count(KILL_VICTIM) == 1
    text = text.replace(plan, f"trainers=role.trainers, mode={mode})")
    text = text.replace(KILL_VICTIM, KILL_AND_WAIT)
    if "communicator" in mode:
        # the loop can repeat a save that a failure interrupts before all gradients are sent
        after = f'        job.save("{FINAL}")'
        assert after in text
        text = text.replace(after, f"            if job.step_count == {FINAL}:\n        {after}")
    script.write_text(text)
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "survive.py"]
    launch(command, trainers=trainers, pservers=2, env=env, restarts=len(kills) or 1)
    model: dict[str, Any] = {}
    exec((folder / "model.py").read_text(), model)
    with warnings.catch_warnings():  # servers count their own steps
        warnings.simplefilter("ignore", CheckpointWarning)
        return dtrans.checkpoint.load(folder / "ckpt" / str(FINAL), model["main"])


def test_an_asynchronous_trainer_continues_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one trainer, the servers' updates are the updates of one device, in order."""
    terms = {"mode": "dtrans.Async()", "trainers": 1}
    kills = [(0, 25, "trainer 0")]
    killed = run_alone(tmp_path / "killed", kills, monkeypatch, **terms)
    said = "trainer 0 failed with signal SIGKILL; it starts again, and the other roles continue"
    assert said in capsys.readouterr().err
    undisturbed = run_alone(tmp_path / "undisturbed", [], monkeypatch, **terms)
    jax.tree.map(np.testing.assert_array_equal, killed, undisturbed)


# Rows 8 to 15 have two updates before the first snapshot. The third update, of rows 8 to 11, comes
# after the loss of the server.
ADMIT = (
    TRAIN.replace(
        """    return (jax.random.randint(jax.random.fold_in(key, step), (8,), step // 2, step // 2 + 40),)
""",
        """    if step in (3, 6):
        return (jax.numpy.arange(8, 16),)
    if step == 40:
        return (jax.numpy.array([8, 9, 10, 11, 16, 17, 18, 19]),)
    return (jax.numpy.arange(8),)
""",
    )
    .replace("sparse=sparse,", "sparse=sparse, mode=dtrans.Async(),")
    .replace('                job.tables.evict("params/lazy", unused_for=2)\n', "")
    .replace(
        '        job.save("60")\n',
        """        rows = job.tables.lookup("params/lazy", range(50))
        print("admitted:", [i for i, row in enumerate(rows) if (row != 1).any()])
""",
    )
)


def test_an_asynchronous_server_keeps_the_counts_of_its_row_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server that starts again has the counts of its snapshot, so it admits the same rows."""
    for kills in ([(0, 25, "pserver 0")], []):
        folder = tmp_path / f"kills {len(kills)}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_script(folder, "model.py", FILTERED, kills)
        write_script(folder, "survive.py", ADMIT, kills)
        script = folder / "survive.py"
        script.write_text(script.read_text().replace(KILL_VICTIM, KILL_AND_WAIT))
        env = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
        launch([sys.executable, "survive.py"], trainers=1, pservers=2, env=env, restarts=1)
        output = capsys.readouterr()
        assert output.err.count("it starts again, and the other roles continue") == len(kills)
        assert re.findall(r"admitted: (.*)", output.out) == [str([*range(12)])]


# trainer 0 leaves after 20 steps, and trainer 1 is killed after the end of its process
LEAVE_EARLY = "stop=20 if role.trainer_id == 0 else 60):"
KILL_AFTER_LEAVE = f"""\
            while os.path.exists("/proc/" + open("pid trainer 0").read()):
                time.sleep(0.01)
{KILL_VICTIM}"""


def test_an_asynchronous_trainer_that_has_left_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path, [(0, 44, "trainer 1")])
    script, text = tmp_path / "survive.py", (tmp_path / "survive.py").read_text()
    plan, save = "trainers=role.trainers)", f'        job.save("{FINAL}")'
    for old, new in {
        plan: "trainers=role.trainers, mode=dtrans.Async())",
        "stop=60):": LEAVE_EARLY,
        KILL_VICTIM: KILL_AFTER_LEAVE,
        save: '        print("ends at", job.step_count)',
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    script.write_text(text)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    launch([sys.executable, "survive.py"], trainers=2, pservers=2, env=env, restarts=1)
    output = capsys.readouterr()
    said = "trainer 1 failed with signal SIGKILL; it starts again, and the other roles continue"
    assert said in output.err and "all roles start again" not in output.err
    ends = re.findall(r"\[(trainer \d)\] ends at (\d+)", output.out)
    assert ends == [("trainer 0", "20"), ("trainer 1", "60")]


# trainer 0 kills a server between its loop and `job.save`
KILL_AFTER_LOOP = """
        import os, signal
        if not os.listdir("kills"):
            open("kills/0", "w")
            os.kill(int(open("pid pserver 0").read()), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "mode",
    [
        "Async(communicator=dtrans.CommunicatorConfig())",
        pytest.param("HalfAsync()", marks=pytest.mark.rotated),
    ],
)
def test_a_checkpoint_after_the_loop_survives_the_loss_of_a_server(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of the loop, all gradients are sent, so the trainer need not go back."""
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path, [])
    script, text = tmp_path / "survive.py", (tmp_path / "survive.py").read_text()
    plan, save = "trainers=role.trainers)", f'        job.save("{FINAL}")'
    assert text.count(plan) == text.count(save) == 1
    text = text.replace(plan, f"trainers=role.trainers, mode=dtrans.{mode})")
    script.write_text(text.replace(save, KILL_AFTER_LOOP + save))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    launch([sys.executable, "survive.py"], trainers=1, pservers=2, env=env, restarts=1)
    err = capsys.readouterr().err
    assert "pserver 0 failed with signal SIGKILL; it starts again, and the other roles" in err
    assert "all roles start again" not in err
    assert (tmp_path / "ckpt" / str(FINAL)).is_dir()


@pytest.mark.rotated
@pytest.mark.parametrize(
    "mode", ["Async()", "Async(communicator=dtrans.CommunicatorConfig())", "HalfAsync()"]
)
def test_an_asynchronous_server_goes_back_alone(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = [(0, 25, "pserver 0"), (1, 44, "trainer 0")]
    terms = {"mode": f"dtrans.{mode}", "trainers": 2}
    _, (adam, *_) = run_alone(tmp_path / "killed", kills, monkeypatch, **terms)
    lines = capsys.readouterr().err
    assert lines.count("it starts again, and the other roles continue") == 2
    assert "all roles start again" not in lines
    assert re.search(r"\[pserver 0\] .* continues from its snapshot after \d+ steps", lines)
    # The first trainer that ends requests the checkpoint, and the other trainer may still train.
    # Server 0 has lost less than two intervals of snapshots. One message can contain 20 merged
    # steps.
    merged = 20 if "communicator" in mode else 1
    assert max(1, FINAL - 2 * (10 + merged) - 2 * 2 * merged) <= adam.count <= 2 * FINAL
