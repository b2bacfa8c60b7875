"""The driver of `make peers`: environments, commands, losses and the table; no peer is started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import mlp_job
import numpy as np
import pytest
from models import mlp_model
from peers import driver
from peers.roles import Role
from windows import Command, Roles, Window, answer_windows, processor_seconds, ticks_of_tree

import dtrans


def window(rate: float, processor: float, loss: float = 0.5) -> Window:
    return Window([1 / rate] * 4, [1.0, loss], processor, 0.9)


# -- the job ---------------------------------------------------------------------------------------


def test_jax_and_numpy_begin_with_the_same_bits_and_compute_the_same_gradients() -> None:
    sizes = [20, 16, 3]
    ours, theirs = mlp_job.first_params(sizes), mlp_job.first_params(sizes, jnp)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    x, y = mlp_job.batch_of_trainer(sizes, 1, 2)
    leaves = [leaf + np.float32(0.1) for leaf in mlp_job.leaves_of(ours)]
    loss, found = mlp_job.gradients(leaves, x, y)
    params = jax.tree.unflatten(jax.tree.structure(theirs), leaves)
    expected = jax.value_and_grad(mlp_model(sizes, 1).loss_fn)(params, x, y)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for ours, theirs in zip(found, jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_numbers_have_their_mean_and_deviation_and_depend_on_the_seed() -> None:
    ours, theirs = (mlp_job.uniform((100, 200), seed, 3.0) for seed in range(2))
    assert abs(ours.mean()) < 0.1
    assert abs(ours.std() - 3) < 0.05
    assert abs(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]) < 0.03


def test_trainers_have_separate_rows_of_the_batch() -> None:
    x, y = mlp_job.batch([8, 3], 2)
    parts = [mlp_job.batch_of_trainer([8, 3], trainer, 2) for trainer in range(2)]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), x)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), y)


# -- windows ---------------------------------------------------------------------------------------

TRAINER = """
import itertools, sys
sys.path.insert(0, {folder!r})
from windows import answer_windows
print("[Gloo] a line of a library")
losses = itertools.count({first})
answer_windows(lambda: next(losses))
"""


def commands_with(*firsts: int) -> dict[str, Command]:
    commands = {}
    for i, first in enumerate(firsts):
        code = TRAINER.format(folder=str(driver.BENCHMARKS), first=first)
        commands[f"trainer {i}"] = Command([sys.executable, "-c", code], {})
    return commands


@pytest.mark.process
def test_a_window_has_the_mean_losses_of_the_trainers(tmp_path: Path) -> None:
    job = Roles("sample", commands_with(0, 10), tmp_path)
    assert job.run(2).losses == [5, 6]
    found = job.run(3)
    assert (found.losses, found.loss, len(found.seconds)) == ([7, 8, 9], 9, 6)
    job.close()
    job.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.process
def test_killed_roles_leave_no_descendant(tmp_path: Path) -> None:
    child = "import signal; signal.pause()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    job = Roles("sample", {"trainer 0": Command([sys.executable, "-c", code], {})}, tmp_path)
    roots = {role.pid for role in job.roles.values()}
    while len(tree := ticks_of_tree(roots)) < 2:
        time.sleep(0.01)
    job.kill()
    (descendant,) = tree.keys() - roots
    limit = time.monotonic() + 30
    while is_running(descendant):
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.process
def test_a_failed_role_is_named_with_its_last_lines(tmp_path: Path) -> None:
    job = Roles("sample", {"trainer 0": Command([sys.executable, "-c", "1 / 0"], {})}, tmp_path)
    with pytest.raises(RuntimeError, match="sample has failed(.|\n)*trainer 0: ZeroDivisionError"):
        job.run(1)
    job.kill()


@pytest.mark.process
def test_processor_time_includes_descendants() -> None:
    """Measure a parent that waits, while its child computes."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout.readline() == b"done\n"
        assert processor_seconds({parent.pid}) >= 0.3
        parent.communicate(b"\n")


def test_a_pause_is_part_of_each_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(sys, "stdin", ["2\n"])
    answer_windows(lambda: 0.25, pause=3.0)
    assert slept == [3.0, 3.0]
    assert '"losses": [0.25, 0.25]' in capsys.readouterr().out


# -- environments ----------------------------------------------------------------------------------


@pytest.mark.process
def test_a_peer_that_cannot_be_installed_is_skipped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use an empty folder as the index of packages."""
    monkeypatch.setattr(driver, "FOLDER", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv("DTRANS_RAY", raising=False)
    found, skipped = driver.available(["sockets", "ray"])
    assert found == {"sockets": sys.executable}
    assert [*skipped] == ["ray"] and "No matching distribution found for ray" in skipped["ray"]
    assert not (tmp_path / "ray" / "installed.txt").exists()


def test_an_installed_environment_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(driver, "_call", calls.append)
    monkeypatch.delenv("DTRANS_RAY", raising=False)
    monkeypatch.setattr(driver, "FOLDER", tmp_path)
    (tmp_path / "ray").mkdir()  # as `venv` does
    python = driver.interpreter("ray")
    assert python == str(tmp_path / "ray" / "bin" / "python")
    assert [call[1:3] for call in calls] == [["-m", "venv"], ["-m", "pip"], ["-c", "import ray"]]
    assert {*driver.ENVIRONMENTS["ray"]} <= {*calls[1]}
    calls.clear()
    driver.interpreter("ray")
    assert [call[1] for call in calls] == ["-c"]
    (tmp_path / "ray" / "installed.txt").write_text("ray==1.0")  # other versions
    calls.clear()
    driver.interpreter("ray")
    assert len(calls) == 3


@pytest.mark.process
def test_a_variable_selects_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRANS_TORCH", "/no/such/python")
    _, skipped = driver.available(["torch rpc"])
    assert skipped == {"torch rpc": "DTRANS_TORCH: No such file or directory: /no/such/python"}
    monkeypatch.setenv("DTRANS_JSON", sys.executable)
    assert driver.interpreter("json") == sys.executable


@pytest.mark.process
def test_an_interpreter_without_the_module_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRANS_NOTHING_AT_ALL", sys.executable)
    with pytest.raises(driver.Unavailable, match="No module named 'nothing_at_all'"):
        driver.interpreter("nothing_at_all")


# -- commands --------------------------------------------------------------------------------------


def choose(count: int) -> list[str]:
    return [f"127.0.0.1:{7000 + i}" for i in range(count)]


def test_every_peer_has_a_command_for_each_role() -> None:
    expected = {
        "pserver": ["pserver 0", "pserver 1", "trainer 0", "trainer 1"],
        "nccl2": ["trainer 0", "trainer 1"],
        "driver": ["trainer 0"],
    }
    for name, peer in driver.PEERS.items():
        commands = driver.commands_of(peer, "python", "0.2M", 2, 2, choose)
        assert [*commands] == expected[peer.roles], name
        for command in commands.values():
            assert command.argv[: 1 + len(peer.argv)] == ["python", *peer.argv]
            assert command.env["OMP_NUM_THREADS"] == "1"
            assert command.env["PYTHONPATH"].startswith(str(driver.BENCHMARKS))


@pytest.mark.parametrize("name", ["dtrans", "jax gloo"])
def test_roles_without_dtrans_read_the_variables_of_dtrans(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in driver.commands_of(driver.PEERS[name], "", "0.2M", 2, 2, choose).values():
        with monkeypatch.context() as patch:
            for key, value in command.env.items():
                patch.setenv(key, value)
            ours, theirs = dtrans.Role.from_env(), Role.from_env()
        assert (ours.kind, ours.trainers) == (theirs.kind, theirs.trainers)
        assert ours.pserver_endpoints == theirs.pserver_endpoints
        assert ours.trainer_endpoints == theirs.trainer_endpoints
        assert ours.name == f"{theirs.kind} {theirs.index}"


# -- results ---------------------------------------------------------------------------------------


def test_losses_of_another_job_are_an_error() -> None:
    driver.check_losses({"dtrans": [1.0, 0.5], "ray": [1.0, 0.5001]})
    with pytest.raises(RuntimeError, match=r"ray computes another job than dtrans.*0\.51"):
        driver.check_losses({"dtrans": [1.0, 0.5], "sockets": [1.0, 0.5], "ray": [1.0, 0.51]})
    with pytest.raises(RuntimeError, match="another job"):
        driver.check_losses({"dtrans": [1.0, 0.5], "ray": [1.0]})
    with pytest.raises(RuntimeError, match="another job"):
        driver.check_losses({"dtrans": [1.0, 0.5], "ray": [1.0, float("nan")]})


def test_ratios_are_medians_over_pairs_of_a_round() -> None:
    """Slow both jobs down in the second round; the ratios of medians would be 1.5 and 3."""
    windows = {
        "dtrans": [window(40, 0.04), window(10, 0.08), window(30, 0.06)],
        "sockets": [window(20, 0.02), window(2, 0.02), window(20, 0.06, loss=0.25)],
    }
    text = driver.table_of("a title", windows, {"ray": "no index"}, 1.5)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["a", "title"]
    assert lines[2] == ["dtrans", "30.00", "1.00", "60.0", "1.00", "0.5"]
    assert lines[3] == ["sockets", "20.00", "2.00", "20.0", "2.00", "0.25"]
    assert text.splitlines()[4:] == ["medians of 3 windows; load 1.5", "skipped: ray: no index"]


def test_without_dtrans_there_are_no_ratios() -> None:
    text = driver.table_of("", {"sockets": [window(20, 0.02)]}, {}, 1.0)
    assert text.splitlines()[2].split() == ["sockets", "20.00", "-", "20.0", "-", "0.5"]
