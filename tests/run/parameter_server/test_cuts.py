"""Jobs with cuts: a lost process starts again, and the job ends with the bits of an undisturbed one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from paths import DOCS, ROOT

import dtrans
from dtrans.errors import LaunchError
from dtrans.run.distributed.launcher import launch


FINAL = 60

# trainer 1 kills a process: before a step of an epoch, given by the number of restarts
KILL = """
    import os, signal
    open(f"pid-{{role.name}}-{{os.getpid()}}", "w")
    for restart, at, victim in {kills!r}:
        if (len(os.listdir("kills")), step, role.name) == (restart, at, "trainer 1"):
            open(f"kills/{{restart}}", "w")
            os.kill(int(open(f"pid {{victim}}").read()), signal.SIGKILL)
"""
TELL = """import os
from dtrans.run.distributed.role import Role
open(f"pid {Role.from_env().name}", "w").write(str(os.getpid()))
"""


def write_scripts(folder: Path, kills: list[tuple[int, int, str]]) -> None:
    """Write the pages' scripts; `batch` of trainer 1 kills processes."""
    (folder / "kills").mkdir()
    for page in (ROOT / "README.md", DOCS / "cuts.md"):
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.S):
            if name == "survive.py":
                head, body = code.split("def batch(step):", 1)
                first, rest = body.split("\n", 1)
                kill = KILL.format(kills=kills).strip("\n")
                code = f"{TELL}{head}def batch(step):{first}\n{kill}\n{rest}"
            (folder / name).write_text(code)


@pytest.mark.rotated
def test_a_state_that_is_not_from_init_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss it would be of another step than the servers' state."""
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path, [])
    script = tmp_path / "survive.py"
    own = "state = job.init(key) if role.is_pserver else job.state_of(*init(key))"
    script.write_text(script.read_text().replace("state = job.init(key)", own))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    with pytest.raises(LaunchError, match="this trainer's state is not from job.init"):
        launch([sys.executable, "survive.py"], trainers=2, pservers=1, env=env, restarts=1)


def run(folder: Path, kills: list[tuple[int, int, str]], monkeypatch: Any) -> list[np.ndarray]:
    """Run the page's job; return all arrays of its last checkpoint."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_scripts(folder, kills)
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "survive.py"]
    launch(command, trainers=2, pservers=2, env=env, restarts=len(kills) or 1)
    model: dict[str, Any] = {}
    exec((folder / "model.py").read_text(), model)
    path = dtrans.checkpoint.latest(folder / "ckpt")
    assert path is not None and path.name == str(FINAL)
    return [np.asarray(x) for x in jax.tree.leaves(dtrans.checkpoint.load(path, model["main"]))]


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
        np.testing.assert_array_equal(x, y)
    # trainers that were not lost kept their process
    for name in ("trainer 0", "trainer 1"):
        processes = list((tmp_path / "killed").glob(f"pid-{name}-*"))
        assert len(processes) == 1 + [victim for _, _, victim in kills].count(name)
