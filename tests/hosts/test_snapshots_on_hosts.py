"""Jobs with snapshots on several hosts, which share the folder of the snapshots.

Roles are scripts. They send the reports of servers and trainers, but neither train nor import JAX.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from role_scripts import GENERATIONS, script_writer
from stand_in_hosts import HOSTS, find_without_checks, write_rsh

from dtrans.endpoints import ReservedEndpoints
from dtrans.errors import ConfigError, LaunchError
from dtrans.hosts import host_check, remote_agent
from dtrans.hosts.host_list import HostEntry
from dtrans.hosts.on_hosts import launch_on_hosts
from dtrans.protocol.generations import Generation
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.restarts import run_attempts
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder


JOB: dict[str, Any] = {"trainers": 2, "pservers": 2, "deadline": 60.0}


@pytest.fixture
def script(tmp_path: Path) -> Any:
    return script_writer(tmp_path, GENERATIONS)


@pytest.fixture
def rsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_rsh(tmp_path, monkeypatch)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    find_without_checks(monkeypatch)
    monkeypatch.setattr(run_attempts, "HOST_PAUSE", 0.1)


def restarts_in(err: str) -> list[str]:
    """Return the launcher's lines about restarts."""
    return re.findall(r"^\[launcher\] (.* \(restart .*)$", err, re.M)


# -- losses ----------------------------------------------------------------------------------------


def test_the_lost_role_alone_starts_again_on_its_host(
    found: None, script: Any, rsh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agents of all roles report the end of the lost role, but only in the generation of the
    failure."""
    command = script("""
        print("folder", generations.path)
        if enter() == 0:
            snapshot(10, 20)
            if name == "trainer 1":
                wait(lambda: all_in(0))
                die()
            wait(lambda: "trainer 1" in ended_roles())
            enter(1)
        finish(1)
    """)
    launch_on_hosts(command, HOSTS, rsh=rsh, restarts=RestartOptions(1, "snapshots"), **JOB)
    out, err = capsys.readouterr()
    assert restarts_in(err) == [
        "trainer 1 on two failed with signal SIGKILL; it starts again, and all roles go back to "
        "step 20 (restart 1 of 1)"
    ]
    assert set(re.findall(r"folder (.*)", out)) == {str(tmp_path / "snapshots")}
    entered = re.findall(r"\[(.*)\] enters (.*) \d+ \d$", out, re.M)
    roles = ("pserver 0", "pserver 1", "trainer 0", "trainer 1")
    first, second = [(role, "0 None") for role in roles], [(role, "1 20") for role in roles]
    assert sorted(entered) == sorted(first + second)
    assert err.count("trainer 1 on two: running") == 2
    assert err.count("pserver 1 on two: running") == 1


LOSES_ITS_HOST = """
    if enter() < {losses}:
        snapshot(10, 20)
        if name == "trainer 1":
            wait(lambda: all_in(generations.current().number))
            os.kill(os.getppid(), signal.SIGKILL)  # its agent, which ends the connection
        forever()
    finish({losses})
"""
LOST = "trainer 1 on two failed with a lost connection to host two (`rsh` ended with exit code -9)"


def test_all_roles_start_again_after_the_loss_of_a_host(
    found: None, script: Any, rsh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host may be lost twice without a new snapshot, because the loss of a host is no fault of a
    role."""
    command = script(LOSES_ITS_HOST.format(losses=2))
    launch_on_hosts(command, HOSTS, rsh=rsh, restarts=RestartOptions(2, "snapshots"), **JOB)
    out, err = capsys.readouterr()
    assert restarts_in(err) == [f"{LOST}; all roles start again (restart {k} of 2)" for k in (1, 2)]
    assert len(re.findall(r"enters 2 20", out)) == 4


def test_a_host_that_stays_lost_ends_the_job(found: None, script: Any, rsh: str) -> None:
    command = script(LOSES_ITS_HOST.format(losses=2))
    with pytest.raises(LaunchError, match=f"^{re.escape(LOST)}, and the other roles were ended; i"):
        launch_on_hosts(command, HOSTS, rsh=rsh, restarts=RestartOptions(1, "snapshots"), **JOB)


# -- trainers that join again ----------------------------------------------------------------------

REPLACE: dict[str, Any] = {**JOB, "trainers": 3, "on_trainer_loss": "replace"}
CONTINUES = "the job continues with trainers 0, 1, and all roles go back to step 20"


def test_a_dropped_trainer_joins_again_on_its_host(
    found: None, script: Any, rsh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agents of the other roles report the trainer's end, but only in the generation of the
    failure."""
    command = script("""
        if not generations.current().has_role(name):
            generations.join()
        number = enter()
        if number == 0:
            snapshot(10, 20)
            lose("trainer 2")
            number = enter(1)
        if number == 1:
            enter(2)
        finish(2)
    """)
    launch_on_hosts(command, HOSTS, rsh=rsh, restarts=RestartOptions(1, "snapshots"), **REPLACE)
    out, err = capsys.readouterr()
    (host,) = set(re.findall(r"trainer 2 on (\w+): running", err))
    launched = re.findall(r"^\[launcher\] (trainer 2.*)$", err, re.M)
    assert [line for line in launched if ": " not in line] == [
        f"trainer 2 on {host} failed with signal SIGKILL; {CONTINUES}",
        "trainer 2 starts again, and joins the job when it is ready (restart 1 of 1)",
        "trainer 2 joined the job, and all roles go back to step 20",
    ]
    entered = re.findall(r"\[(.*)\] enters (\d+ \w+) \d+ \d$", out, re.M)
    roles = ["pserver 0", "pserver 1", "trainer 0", "trainer 1"]
    generations_of = {
        role: [generation for name, generation in entered if name == role] for role in roles
    }
    assert generations_of == {role: ["0 None", "1 20", "2 20"] for role in roles}
    assert [generation for name, generation in entered if name == "trainer 2"] == ["0 None", "2 20"]
    assert err.count(f"trainer 2 on {host}: running") == 2


def test_a_trainer_whose_host_is_lost_does_not_join_again(
    found: None, script: Any, rsh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        if enter() == 0:
            snapshot(10, 20)
            if name == "trainer 2":
                wait(lambda: all_in(0))
                os.kill(os.getppid(), signal.SIGKILL)  # its agent, which ends the connection
                forever()
            enter(1)
        wait(lambda: len([x for x in generations.marks().values() if x.generation >= 1]) == 4)
        generations.leave()
    """)
    launch_on_hosts(command, HOSTS, rsh=rsh, restarts=RestartOptions(1, "snapshots"), **REPLACE)
    err = capsys.readouterr().err
    (host,) = set(re.findall(r"trainer 2 on (\w+): running", err))
    assert (
        f"trainer 2 on {host} failed with a lost connection to host {host} (`rsh` ended with exit "
        f"code -9); {CONTINUES}\n"
    ) in err
    assert (f"trainer 2 does not start again: the connection to its host {host} was lost\n") in err
    assert err.count(f"trainer 2 on {host}: running") == 1


def test_without_a_folder_there_are_no_snapshots(
    found: None, script: Any, rsh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other hosts could not read a temporary folder of this host."""
    launch_on_hosts(script("print('generations:', generations)"), HOSTS, rsh=rsh, restarts=1, **JOB)
    assert set(re.findall(r"generations: .*", capsys.readouterr().out)) == {"generations: None"}


# -- the launcher itself ---------------------------------------------------------------------------


def folder_of_a_job(path: Path, endpoint: str) -> LauncherFolder:
    """Return the folder of a job with a server, whose launcher has ended after a snapshot."""
    folder = LauncherFolder(path)
    folder.grant(Generation(3), "a run", 1, [endpoint])
    server = RoleFolder(path, "pserver 0")
    server.enter(Generation(3))
    server.note_snapshot(3, 20)
    return folder


def test_another_launcher_continues_with_the_same_endpoints(
    found: None, script: Any, rsh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = ReservedEndpoints()
    (endpoint,) = ports.choose(1)
    folder = folder_of_a_job(tmp_path / "snapshots", endpoint)
    command = script("""
        print("job", generations.run, *servers)
        enter()
        finish(4)
    """)
    launch_on_hosts(command, HOSTS, rsh=rsh, restarts=RestartOptions(1, "snapshots"))
    ports.close()
    out, err = capsys.readouterr()
    assert re.findall(r"job (.*)", out) == [f"a run {endpoint}"] * 2
    assert len(re.findall(r"enters 4 20", out)) == 2
    assert f"[launcher] the job of {folder.path} continues at step 20\n" in err
    assert not folder.is_used  # the job has ended well


def test_a_server_continues_at_its_address(found: None, rsh: str, tmp_path: Path) -> None:
    folder_of_a_job(tmp_path / "snapshots", "192.0.2.1:6174")
    options = RestartOptions(1, "snapshots")
    message = "a pserver at 192.0.2.1:6174, but this launch places it on {} at 127.0.0.1; "
    with pytest.raises(ConfigError, match=message.format("host two")):
        launch_on_hosts(["true"], HOSTS, rsh=rsh, restarts=options)
    with pytest.raises(ConfigError, match=message.format("this host")):
        launch(["true"], restarts=options)


# -- hosts that do not share the folder ------------------------------------------------------------


def test_a_host_that_does_not_share_the_folder_is_named(
    rsh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each host, the folder of the test is the one in the agent's working directory."""
    monkeypatch.setattr(host_check, "is_loopback", lambda address: False)
    hosts = [HostEntry(name, address="127.0.0.1") for name in ("one", "apart")]
    options = RestartOptions(1, "/proc/self/cwd/snapshots")
    with pytest.raises(LaunchError) as e:
        launch_on_hosts(["true"], hosts, rsh=rsh, restarts=options, **JOB)
    assert str(e.value) == (
        "1 of 2 hosts cannot run roles; no role was started\n"
        "  host apart does not see the folder snapshots='/proc/self/cwd/snapshots' of this host; "
        "mount one shared folder (NFS, say) at this path on all hosts, or leave snapshots out"
    )
    assert not [*(tmp_path / "snapshots").iterdir()]  # the file that hosts look for is removed


def test_a_folder_to_which_a_host_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe").touch()
    assert not remote_agent._look_for_probe(str(tmp_path / "probe"))
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path))
    assert remote_agent._look_for_probe(str(tmp_path / "probe")) == "cannot write to"
    assert not remote_agent._look_for_probe("")


def test_a_folder_that_the_launcher_cannot_write(rsh: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match="^snapshots='.*file/snapshots' cannot be written: Not a directory"
    ):
        launch_on_hosts(["true"], HOSTS, rsh=rsh, restarts=RestartOptions(1, "file/snapshots"))
