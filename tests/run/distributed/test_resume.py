"""`dtrans launch --resume`: the command line that it repeats, and errors if there is nothing to
continue."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from role_scripts import GENERATIONS, script_writer
from role_threads import HANG, until

from dtrans.errors import ConfigError
from dtrans.protocol.generations import Generation
from dtrans.run.distributed.child_process import Guard
from dtrans.run.distributed.restarts import job_folder
from dtrans.run.distributed.restarts.job_folder import ROLES_LOCK, open_generations
from dtrans.run.distributed.restarts.launch_record import LaunchRecord
from dtrans.run.distributed.role import roles_of
from dtrans.run.net.launcher_folder import LauncherFolder


ROLES = roles_of(1, ("127.0.0.1:1",))
SCRIPT = """
    print("at", os.getcwd(), *sys.argv[1:])
    if enter() == 0:
        snapshot(10, 20)
        forever()
    finish(1)
"""


def job_in(folder: Path, directory: Path, **options: Any) -> None:
    """Write a job with snapshots to a folder, as if its launcher had ended."""
    LauncherFolder(folder).grant(Generation(), "a run", 1, ["127.0.0.1:1"])
    LaunchRecord({"script": "train.py", **options}, str(directory)).write(folder)


def lock(path: Path) -> int:
    """Lock a file; return its descriptor."""
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def test_the_command_line_is_repeated(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Resume from another directory, with the script and the numbers of roles of the killed
    launcher."""
    job = tmp_path / "job"
    job.mkdir()
    script_writer(job, GENERATIONS)(SCRIPT)
    roles = ["--trainers", "2", "--pservers", "2", "--log-dir", "logs"]
    options = [*roles, "--restarts", "1", "--snapshots", "snapshots"]
    arguments = ["script.py", "--snapshots", "a b"]
    first = subprocess.Popen(
        [sys.executable, "-m", "dtrans", "launch", *options, *arguments],
        cwd=job,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with first:
        folder = LauncherFolder(job / "snapshots")
        servers = ["pserver 0", "pserver 1"]
        until(
            lambda: folder.newest_snapshot(servers) == 20 and len(folder.marks()) == 4, "a snapshot"
        )
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            assert command("launch", "--resume", "job/snapshots") == 1
        assert "is the folder of a job that runs; wait" in capfd.readouterr().err
        first.kill()

    monkeypatch.chdir(tmp_path)
    given = ["--log-dir", "other logs", "--resume", "job/snapshots"]
    assert command("launch", *given, *arguments) == 0
    out, err = capfd.readouterr()
    at = [line.split("] at ")[1] for line in out.splitlines() if "] at " in line]
    assert at == [f"{job} --snapshots a b"] * 4
    assert f"[launcher] the job of {job / 'snapshots'} continues at step 20\n" in err
    assert len([*(tmp_path / "other logs").iterdir()]) == 4
    assert not folder.is_used and not (job / "snapshots" / "launch.json").exists()
    assert Path.cwd() == tmp_path


def test_the_record_has_all_options(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a resumed job has the options that replace the earlier ones."""
    monkeypatch.chdir(tmp_path)
    script = """
        import os
        assert os.environ["DTRANS_SNAPSHOTS"] == os.path.abspath("snapshots"), os.environ["DTRANS_SNAPSHOTS"]
        raise SystemExit(5)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    base = ("--restarts", "2", "--snapshots", "snapshots")
    assert command("launch", *base, "--trainers", "1", "train.py", "-x") == 5
    assert LaunchRecord.read("snapshots") == LaunchRecord(
        {"script": "train.py", "arguments": ["-x"], "restarts": 2, "snapshots": "snapshots"},
        str(tmp_path),
    )
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    options = ("--time-limit", "50", "--restarts", "4")
    assert command("launch", "--resume", "../snapshots", *options) == 5
    monkeypatch.chdir(tmp_path)
    assert LaunchRecord.read("snapshots").options == {
        "script": "train.py",
        "arguments": ["-x"],
        "restarts": 4,
        "time_limit": 50.0,
        "snapshots": str(tmp_path / "snapshots"),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no job: --resume none: this folder has no job with snapshots; name the folder of"),
        (["other.py", "-x"], "runs `train.py 'a b'`, but this command line has `other.py -x`; "),
        (
            ["--trainers", "2"],
            "has the snapshots of a job with 1 trainers and 1 pservers, but this ",
        ),
        (["--snapshots", "x"], "--snapshots cannot be combined with --resume; remove it"),
        (["--emit", "hosts"], "--emit cannot be combined with --resume; remove it"),
    ],
)
def test_errors(
    command: Any,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = {"restarts": 1, "arguments": ["a b"]}
    job_in(tmp_path / "snapshots", tmp_path, **options)
    folder = "none" if message.startswith("no job") else "snapshots"
    assert command("launch", "--resume", folder, *arguments) == 1
    assert message.removeprefix("no job: ") in capsys.readouterr().err
    assert LaunchRecord.read("snapshots").options == {"script": "train.py", **options}


def test_a_job_without_a_record_or_directory(tmp_path: Path) -> None:
    job_in(tmp_path / "snapshots", tmp_path / "gone")
    with pytest.raises(ConfigError, match="working directory .*gone does not exist on this host"):
        LaunchRecord.read(tmp_path / "snapshots")
    with open_generations(ROLES, tmp_path / "snapshots"):  # a program that calls `launch`
        pass
    with pytest.raises(ConfigError, match="`dtrans launch` did not start the job of this folder"):
        LaunchRecord.read(tmp_path / "snapshots")


# -- locks -----------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_guard_has_the_lock_until_its_roles_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    file = lock(path)
    with Guard(sys.executable, file):
        os.close(file)
        with pytest.raises(BlockingIOError):
            lock(path)
    os.close(lock(path))


def test_a_launcher_waits_for_the_roles_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, try_to_lock = list[bool](), job_folder._try_to_lock

    def noted(*arguments: Any, **options: Any) -> bool:
        tries.append(try_to_lock(*arguments, **options))
        return tries[-1]

    monkeypatch.setattr(job_folder, "_try_to_lock", noted)
    file, found = lock(tmp_path / ROLES_LOCK), []

    def launch() -> None:
        with open_generations(ROLES, tmp_path) as generations:
            found.append(generations.generation)

    thread = threading.Thread(target=launch)
    thread.start()
    until(lambda: False in tries, "a launcher that waits")
    assert not LauncherFolder(tmp_path).is_used
    os.close(file)
    thread.join(HANG)
    assert found == [Generation()]


def test_roles_that_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "ROLES_END", 0.1)
    file = lock(tmp_path / ROLES_LOCK)
    with (
        pytest.raises(ConfigError, match="is the folder of a job that runs"),
        open_generations(ROLES, tmp_path),
    ):
        pass
    os.close(file)


def test_a_record_has_paths_as_text(tmp_path: Path) -> None:
    LaunchRecord({"snapshots": tmp_path}, "/").write(tmp_path)
    found = json.loads((tmp_path / "launch.json").read_text())
    assert found == {"options": {"snapshots": str(tmp_path)}, "directory": "/"}
