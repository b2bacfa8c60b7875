"""Killed jobs continue from checkpoints, with the bits of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from paths import DOCS, ROOT
from role_threads import HANG

import dtrans
from dtrans.run.distributed.launcher import launch


FINAL = 60

# In some attempt, before some step, trainer 1 kills a process.
KILL = """
        import os, signal
        for attempt, at, victim in {kills!r}:
            if (int(os.environ.get("DTRANS_RESTARTS", 0)), step) == (attempt, at):
                if {trainer} == 1:
                    os.kill(int(open(f"pid-{{victim}}").read()), signal.SIGKILL)
                    while victim == "launcher":  # until the launcher's guard ends this process
                        signal.pause()
"""
# each process writes its name and id to a file
TELL = """import os
from dtrans.run.distributed.role import Role
open(f"pid-{Role.from_env().name}", "w").write(str(os.getpid()))
open("pid-launcher", "w").write(str(os.getppid()))
"""


def write_scripts(folder: Path, kills: list[tuple[int, int, str]]) -> None:
    """Write the pages' scripts, in which trainer 1 kills processes."""
    pages = [ROOT / "README.md", DOCS / "reliability.md"]
    for text in (page.read_text() for page in pages):
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.S):
            trainer = "cluster.trainer_id" if "dtrans.connect" in code else "role.trainer_id"
            kill = KILL.format(kills=kills, trainer=trainer)
            step = re.search(r"\n( +)state, loss = job\.step\(", code)
            if step is not None:
                lines = [step[1] + line[8:] for line in kill.strip("\n").splitlines()]
                at = step.start() + 1
                code = TELL + code[:at] + "\n".join(lines) + "\n" + code[at:]
            (folder / name).write_text(code)


def final_state(folder: Path) -> list[np.ndarray]:
    """Return all arrays of the last checkpoint."""
    model: dict[str, Any] = {}
    exec((folder / "model.py").read_text(), model)
    path = dtrans.checkpoint.latest(folder / "ckpt")
    assert path is not None and path.name == str(FINAL)
    return [np.asarray(x) for x in jax.tree.leaves(dtrans.checkpoint.load(path, model["main"]))]


SERVERS: tuple[str, dict[str, Any]] = "resume.py", {"pservers": 2}
TRAINERS: tuple[str, dict[str, Any]] = "resume_nccl2.py", {"mode": "nccl2"}


@pytest.mark.parametrize(
    ("script", "kills"),
    [
        pytest.param(SERVERS, [(0, 25, "pserver 0")], id="a server"),
        pytest.param(
            SERVERS,
            [(0, 25, "trainer 1"), (1, 44, "pserver 1")],
            id="a trainer, then a server",
            marks=pytest.mark.rotated,
        ),
        pytest.param(
            TRAINERS,
            [(0, 25, "trainer 0")],
            id="a trainer of collectives",
            marks=pytest.mark.rotated,
        ),
    ],
)
def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_one(
    script: tuple[str, dict[str, Any]],
    kills: list[tuple[int, int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, options = script
    states = []
    for case, planned in (("killed", kills), ("undisturbed", [])):
        folder = tmp_path / case
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_scripts(folder, planned)
        variables = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, name]
        launch(command, trainers=2, env=variables, restarts=len(planned), **options)
        states.append(final_state(folder))
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "all roles start again" in line]) == len(kills)
    for killed, undisturbed in zip(*states, strict=True):
        np.testing.assert_array_equal(killed, undisturbed)


def test_servers_save_their_state_when_the_launcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher is killed after 25 steps. The job has saved a checkpoint after 20."""
    states = []
    for case, planned in (("killed", [(0, 25, "launcher")]), ("undisturbed", [])):
        folder = tmp_path / case
        folder.mkdir()
        monkeypatch.chdir(folder)
        variables = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
        options = ["--trainers", "2", "--pservers", "2"]
        if planned:
            write_scripts(folder, planned)
            killed = subprocess.run(
                [sys.executable, "-m", "dtrans", "launch", *options, "resume.py"],
                env={**os.environ, **variables},
                capture_output=True,  # the pipes end with the last role
                timeout=4 * HANG,
            )
            assert killed.returncode == -signal.SIGKILL
            saved = dtrans.checkpoint.latest(folder / "ckpt")
            assert saved is not None and saved.name == "25"
        write_scripts(folder, [])
        launch([sys.executable, "resume.py"], trainers=2, pservers=2, env=variables)
        states.append(final_state(folder))
    for continued, undisturbed in zip(*states, strict=True):
        np.testing.assert_array_equal(continued, undisturbed)
