"""Launching a job: the environment of roles, the error that is shown, and no remaining
processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from role_scripts import script_writer
from role_threads import until

import dtrans
from dtrans.endpoints import ReservedEndpoints
from dtrans.errors import ConfigError, DeadlineError, LaunchError
from dtrans.run.distributed.launcher import launch
from dtrans.run.distributed.restarts import run_attempts
from dtrans.run.distributed.role import VARIABLES, roles_of, trainer_roles
from dtrans.run.net.started_jobs import announce_job, token_of_job
from dtrans.run.status.job_view import merge_trainers
from dtrans.run.status.observer import JobObserver
from dtrans.run.status.show_status import show_status


PATIENCE = 30.0  # seconds for something that takes milliseconds on an idle machine

# The beginning of every test script. Roles do not import dtrans, so they start in milliseconds.
PRELUDE = """
import json, os, signal, socket, subprocess, sys, threading
kind = os.environ["DTRANS_ROLE"]
index = os.environ.get("DTRANS_TRAINER_ID") or str(
    os.environ["DTRANS_PSERVER_ENDPOINTS"].split(",").index(os.environ["DTRANS_CURRENT_ENDPOINT"]))
name = kind + " " + index

def report(who=name):
    # connect to the test, which then notices the end of this process
    s = socket.create_connection(("127.0.0.1", int(os.environ["TEST_PORT"])))
    s.sendall(f"{who}:{os.getpid()}\\n".encode())
    return s

def forever():
    threading.Event().wait()
"""


class Watch:
    """Knows the living processes: each has a connection, which ends with the process."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE)
        self.port = self.listener.getsockname()[1]
        self.pids: dict[str, int] = {}
        self._connections: list[socket.socket] = []

    def wait_for(self, count: int) -> None:
        """Wait until `count` processes have reported."""
        for _ in range(count):
            connection, _ = self.listener.accept()
            connection.settimeout(PATIENCE)
            self._connections.append(connection)
            who, pid = connection.makefile().readline().strip().split(":")
            self.pids[who] = int(pid)

    def all_gone(self, patience: float = PATIENCE) -> None:
        """Wait until every process that reported has ended; fail after a timeout."""
        for connection in self._connections:
            connection.settimeout(patience)
            with contextlib.suppress(
                ConnectionResetError
            ):  # killed with unread input: gone as well
                assert connection.recv(1) == b""

    def close(self) -> None:
        for s in (self.listener, *self._connections):
            s.close()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    made = Watch()
    monkeypatch.setenv("TEST_PORT", str(made.port))
    yield made
    made.close()


@pytest.fixture
def script(tmp_path: Path) -> Any:
    return script_writer(tmp_path, PRELUDE)


def assert_reaped(watch: Watch) -> None:
    for pid in watch.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- what roles are told ---------------------------------------------------------------------------


def test_environment(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # roles do not inherit this variable of this process
    monkeypatch.setenv("DTRANS_CURRENT_ENDPOINT", "10.0.0.1:1")
    monkeypatch.setenv("DTRANS_TRAINER_ID", "7")
    monkeypatch.setenv("DTRANS_RUN", "of another launch")
    command = script("""
        found = {k: v for k, v in os.environ.items() if k.startswith("DTRANS_")}
        print(json.dumps([found, os.environ["EXTRA"], sys.argv[1:], os.getpid() == os.getsid(0)]))
    """)
    launch([*command, "--trainers", "9", "a b"], trainers=3, pservers=2, env={"EXTRA": "x"})
    lines = dict(line.split("] ", 1) for line in capsys.readouterr().out.splitlines())
    assert sorted(lines) == ["[pserver 0", "[pserver 1", "[trainer 0", "[trainer 1", "[trainer 2"]
    roles, runs, tokens = [], set(), set()
    for prefix, line in lines.items():
        found, extra, arguments, leads_session = json.loads(line)
        role = dtrans.Role.from_env(found)
        assert (extra, arguments, leads_session) == ("x", ["--trainers", "9", "a b"], True)
        assert f"[{role.name}" == prefix
        runs.add(found.pop("DTRANS_RUN"))
        tokens.add(found.pop("DTRANS_TOKEN"))
        assert not Path(found.pop("DTRANS_ENDED_ROLES")).exists()  # the file is removed
        assert found == role.environment()
        roles.append(role)
    assert len(runs) == 1 and runs != {"of another launch"}
    assert len(tokens) == 1 and len(*tokens) >= 64
    assert {r.trainers for r in roles} == {3}
    (endpoints,) = {r.pserver_endpoints for r in roles}
    assert len(set(endpoints)) == 2 and all(e.startswith("127.0.0.1:") for e in endpoints)


def test_a_folder_has_what_each_role_prints(script: Any, tmp_path: Path) -> None:
    body = "print('hello'); print('careful', file=sys.stderr)"
    launch(script(body), trainers=1, pservers=1, log_dir=tmp_path / "logs")
    found = {
        file.name: set(file.read_text().splitlines()) for file in (tmp_path / "logs").iterdir()
    }
    assert found == {f"{role}-0.log": {"hello", "careful"} for role in ("trainer", "pserver")}
    with pytest.raises(ConfigError, match="log_dir=.* cannot be created"):
        launch(script(body), log_dir=tmp_path / "logs" / "trainer-0.log")


def test_a_token_of_the_environment_is_the_jobs(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that watches the job has the token, too."""
    monkeypatch.setenv("DTRANS_TOKEN", "a-secret")
    body = "print(os.environ['DTRANS_TOKEN'], os.environ.get('DTRANS_PSERVER_ENDPOINTS'))"
    launch(script(body), trainers=1, pservers=2)
    out, err = capsys.readouterr()
    ((secret, endpoints),) = {tuple(line.split("] ")[1].split()) for line in out.splitlines()}
    assert (secret, len(out.splitlines())) == ("a-secret", 3)
    assert err == f"[launcher] this job answers: dtrans status {endpoints.replace(',', ' ')}\n"
    monkeypatch.setenv("DTRANS_STATUS_ENDPOINT", "127.0.0.1:6190")
    launch(script("pass"), trainers=2, mode="nccl2")
    assert capsys.readouterr().err == "[launcher] this job answers: dtrans status 127.0.0.1:6190\n"


def test_the_launcher_chooses_where_collectives_answer(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRANS_STATUS_ENDPOINT", raising=False)
    body = "print(os.environ.get('DTRANS_STATUS_ENDPOINT'), os.environ['DTRANS_TRAINER_ENDPOINTS'])"
    launch(script(body), trainers=2, mode="nccl2")
    out, err = capsys.readouterr()
    ((status, endpoints),) = {tuple(line.split("] ")[1].split()) for line in out.splitlines()}
    assert err == f"[launcher] this job answers: dtrans status {status}\n"
    assert status.startswith("127.0.0.1:") and status not in endpoints.split(",")

    # jobs without an answering process, as their logs say
    for options in ({"trainers": 1}, {"trainers": 2, "on_trainer_loss": "drop"}):
        launch(script(body), mode="nccl2", **options)
        out, err = capsys.readouterr()
        assert {line.split()[2] for line in out.splitlines()} == {"None"} and err == ""


TRAINS = """
import dtrans
cluster = dtrans.connect()
import jax
from jax.experimental import multihost_utils

with report() as s:
    s.recv(1)  # until the test has seen the job
    multihost_utils.sync_global_devices("both are here")
"""


def test_status_finds_a_job_that_runs(
    watch: Watch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dtrans status` gets only the printed endpoint and no variable.

    After the job's end, no process answers.
    """
    for name in ("DTRANS_STATUS_ENDPOINT", "DTRANS_TOKEN", "DTRANS_TOKEN_FILE", "DTRANS_KEYS"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "trains.py"
    script.write_text(PRELUDE + TRAINS)
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    options = {"trainers": 2, "mode": "nccl2", "env": env, "deadline": 4 * PATIENCE}
    job = threading.Thread(target=launch, args=([sys.executable, str(script)],), kwargs=options)
    job.start()
    try:
        watch.listener.settimeout(4 * PATIENCE)  # JAX is imported first
        watch.wait_for(2)
        said = capsys.readouterr().err
        endpoint = re.search(r"^\[launcher\] this job answers: dtrans status (\S+)$", said, re.M)[1]
        assert "DTRANS_TOKEN" not in os.environ
        with JobObserver([endpoint], PATIENCE) as observer:
            states = lambda: [t.state for t in merge_trainers(observer.ask())]
            until(lambda: states() == ["present", "present"], "trainer 1 to say something")
        assert show_status([endpoint], timeout=PATIENCE, interval=None, as_json=False)
        out = capsys.readouterr().out  # roles may have printed lines before
        assert re.search(r"^collective job, 2 of 2 trainers here", out, re.M)
    finally:
        watch.close()
        job.join()
    assert token_of_job([endpoint]) == ""
    assert not show_status([endpoint], timeout=0.2, interval=None, as_json=True)


def test_tokens_of_jobs_come_from_private_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with announce_job(["127.0.0.1:1", "127.0.0.1:2"], "one"), announce_job(["127.0.0.1:3"], "two"):
        assert [token_of_job([f"127.0.0.1:{k}"]) for k in (1, 2, 3, 4)] == ["one", "one", "two", ""]
        assert token_of_job(["127.0.0.1:2", "127.0.0.1:1"]) == "one"
        assert token_of_job(["127.0.0.1:1", "127.0.0.1:3"]) == ""
        folders = list(tmp_path.iterdir())
        assert [stat.S_IMODE(f.stat().st_mode) for f in folders] == [0o700, 0o700]
        for folder in folders:
            folder.chmod(0o755)  # others could read it, so no launcher wrote it
        assert token_of_job(["127.0.0.1:1"]) == ""
    assert not list(tmp_path.iterdir())


def test_roles_of_round_trip() -> None:
    roles = roles_of(2, ("127.0.0.1:1", "127.0.0.1:2"))
    assert [r.name for r in roles] == ["pserver 0", "pserver 1", "trainer 0", "trainer 1"]
    assert [dtrans.Role.from_env(r.environment()) for r in roles] == list(roles)
    assert all(set(r.environment()) <= set(VARIABLES) for r in roles)
    assert [r.trainer_id for r in roles if r.is_pserver] == [0, 0]


def test_trainer_roles_round_trip() -> None:
    roles = trainer_roles(("127.0.0.1:1", "127.0.0.1:2"))
    assert [r.name for r in roles] == ["trainer 0", "trainer 1"]
    assert [dtrans.Role.from_env(r.environment()) for r in roles] == list(roles)
    assert all(set(r.environment()) <= set(VARIABLES) and r.mode == "nccl2" for r in roles)
    assert {r.mode for r in roles_of(1, ("127.0.0.1:1",))} == {"pserver"}


def test_environment_in_nccl2_mode(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # roles do not inherit this variable of this process
    monkeypatch.setenv("DTRANS_PSERVER_ENDPOINTS", "10.0.0.1:1")
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "1")  # the user's value stays
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    command = script("""
        of_jax = [os.environ[n] for n in ("JAX_ENABLE_PREEMPTION_SERVICE", "JAX_LOCAL_DEVICE_IDS")]
        of_dtrans = {k: v for k, v in os.environ.items() if k.startswith("DTRANS_")}
        print(json.dumps([of_dtrans, of_jax]))
    """)
    launch(command, trainers=3, mode="nccl2")
    lines = dict(line.split("] ", 1) for line in capsys.readouterr().out.splitlines())
    assert sorted(lines) == ["[trainer 0", "[trainer 1", "[trainer 2"]
    runs, tokens = set[str](), set[str]()
    for prefix, line in lines.items():
        found, of_jax = json.loads(line)
        role = dtrans.Role.from_env(found)
        runs.add(found.pop("DTRANS_RUN"))
        tokens.add(found.pop("DTRANS_TOKEN"))
        del found["DTRANS_ENDED_ROLES"], found["DTRANS_STATUS_ENDPOINT"]
        assert (f"[{role.name}", found) == (prefix, role.environment())
        assert of_jax == ["1", str(role.trainer_id)]
        assert (role.trainers, len(set(role.trainer_endpoints))) == (3, 3)
    assert len(runs) == len(tokens) == 1


GOOD_NCCL2 = {
    "DTRANS_ROLE": "trainer",
    "DTRANS_TRAINERS": "2",
    "DTRANS_TRAINER_ID": "1",
    "DTRANS_TRAINER_ENDPOINTS": "127.0.0.1:6174,127.0.0.1:6175",
    "DTRANS_CURRENT_ENDPOINT": "127.0.0.1:6175",
}


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"DTRANS_ROLE": "pserver"},
            "DTRANS_TRAINER_ENDPOINTS is set, which is for nccl2 mode without pservers, but this "
            "is a",
        ),
        (
            {"DTRANS_PSERVER_ENDPOINTS": "127.0.0.1:1"},
            "and DTRANS_PSERVER_ENDPOINTS is '127.0.0.1:1'; for a job with pservers, unset "
            "DTRANS_TR",
        ),
        ({"DTRANS_ROLE": "worker"}, "DTRANS_ROLE is 'worker'; it must be trainer or pserver"),
        (
            {"DTRANS_TRAINERS": "3"},
            "DTRANS_TRAINERS is 3, but DTRANS_TRAINER_ENDPOINTS has 2 endpoints: "
            "127.0.0.1:6174,127",
        ),
        (
            {"DTRANS_TRAINER_ID": "2"},
            "trainer_id is 2; with 2 trainers, expected an integer from 0 to 1",
        ),
        (
            {"DTRANS_TRAINER_ID": "0"},
            "current_endpoint is 127.0.0.1:6175, the endpoint of trainer 1; expected "
            "127.0.0.1:6174",
        ),
        (
            {"DTRANS_CURRENT_ENDPOINT": "127.0.0.1:1"},
            "current_endpoint is '127.0.0.1:1'; expected one of the trainers' endpoints",
        ),
        ({"DTRANS_CURRENT_ENDPOINT": None}, "DTRANS_CURRENT_ENDPOINT is not set"),
        ({"DTRANS_TRAINER_ENDPOINTS": "x,y"}, "'x' is not an endpoint"),
    ],
)
def test_bad_environment_in_nccl2_mode(change: dict[str, str | None], message: str) -> None:
    assert dtrans.Role.from_env(GOOD_NCCL2).trainer_id == 1
    with pytest.raises(ConfigError, match=message):
        dtrans.Role.from_env({k: v for k, v in (GOOD_NCCL2 | change).items() if v is not None})


GOOD = {
    "DTRANS_ROLE": "trainer",
    "DTRANS_TRAINERS": "2",
    "DTRANS_TRAINER_ID": "1",
    "DTRANS_PSERVER_ENDPOINTS": "127.0.0.1:6174,127.0.0.1:6175",
    "DTRANS_CURRENT_ENDPOINT": "127.0.0.1:6174",
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"DTRANS_ROLE": None}, "DTRANS_ROLE is not set: start this script with `dtrans launch"),
        ({"DTRANS_ROLE": "worker"}, "DTRANS_ROLE is 'worker'; it must be trainer or pserver"),
        ({"DTRANS_TRAINERS": ""}, "DTRANS_TRAINERS is not set"),
        ({"DTRANS_TRAINERS": "two"}, "DTRANS_TRAINERS is 'two'; it must be a number"),
        ({"DTRANS_TRAINERS": "-2"}, "DTRANS_TRAINERS is '-2'; it must be a number"),
        ({"DTRANS_TRAINERS": "0"}, "DTRANS_TRAINERS is 0; it must be 1 or more"),
        ({"DTRANS_TRAINER_ID": None}, "DTRANS_TRAINER_ID is not set"),
        (
            {"DTRANS_TRAINER_ID": "2"},
            "trainer_id is 2; with 2 trainers, expected an integer from 0 to 1",
        ),
        ({"DTRANS_PSERVER_ENDPOINTS": None}, "DTRANS_PSERVER_ENDPOINTS is not set"),
        ({"DTRANS_PSERVER_ENDPOINTS": "here"}, "'here' is not an endpoint"),
        (
            {"DTRANS_ROLE": "pserver", "DTRANS_CURRENT_ENDPOINT": None},
            "DTRANS_CURRENT_ENDPOINT is not set",
        ),
        (
            {"DTRANS_ROLE": "pserver", "DTRANS_CURRENT_ENDPOINT": "127.0.0.1:9"},
            r"'127.0.0.1:9' \(DTRANS_CURRENT_ENDPOINT\) is not one of DTRANS_PSERVER_ENDPOINTS",
        ),
    ],
)
def test_bad_environment(change: dict[str, str | None], message: str) -> None:
    env = {k: v for k, v in (GOOD | change).items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        dtrans.Role.from_env(env)


def test_reserved_endpoints_are_kept_for_the_servers_of_the_job() -> None:
    reserved = ReservedEndpoints()
    found = reserved.choose(20)
    assert len(set(found)) == 20
    addresses = [("127.0.0.1", int(endpoint.rpartition(":")[2])) for endpoint in found]
    if sys.platform == "linux":
        for address in addresses:
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(address)
    for address in addresses:
        with socket.create_server(address):  # this one has SO_REUSEADDR
            pass
    reserved.close()
    for address in addresses:
        with socket.socket() as stranger:
            stranger.bind(address)


# -- output ----------------------------------------------------------------------------------------


def test_output_by_line(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = script("""
        if name == "trainer 0":
            print("one\\ntwo"); print("no newline", end="")
            sys.stderr.buffer.write(b"not \\xff utf-8\\n")
    """)
    launch(command)
    out, err = capsys.readouterr()
    assert out == "[trainer 0] one\n[trainer 0] two\n[trainer 0] no newline\n"
    # the first says where the job answers
    assert err.splitlines()[1:] == ["[trainer 0] not � utf-8"]


def test_output_comes_when_it_is_printed(
    script: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the role goes on only after the test has seen its line
    command = script("""
        if name == "trainer 0":
            s = report()
            print("here")
            s.recv(1)
    """)
    seen = threading.Event()

    class Out:
        def write(self, text: str) -> None:
            if text == "[trainer 0] here\n":
                seen.set()

        def flush(self) -> None:
            pass

    def answer() -> None:
        watch.wait_for(1)
        assert seen.wait(PATIENCE)
        watch._connections[0].sendall(b"x")

    monkeypatch.setattr(sys, "stdout", Out())
    thread = threading.Thread(target=answer)
    thread.start()
    launch(command, deadline=PATIENCE)
    thread.join()
    assert seen.is_set()


def test_trainer_0_keeps_stdout(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    launch(script("""print(name, end="|")"""), trainers=2, inherit_stdout=True)
    out = capfd.readouterr().out
    assert "trainer 0|" in out and "[trainer 0]" not in out
    assert "[trainer 1] trainer 1|\n" in out and "[pserver 0] pserver 0|\n" in out


# -- failures --------------------------------------------------------------------------------------


def test_failure_ends_the_others(
    script: Any, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        s = report()
        if name == "trainer 1":
            s.recv(1)
            raise ValueError("this is why")
        forever()
    """)

    def answer() -> None:
        watch.wait_for(4)
        for s in watch._connections:
            s.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LaunchError) as e:
        launch(command, trainers=2, pservers=2)
    thread.join()
    message = str(e.value).splitlines()
    assert (
        message[0]
        == "trainer 1 failed with exit code 1, and the other roles were ended; its last output was:"
    )
    assert message[1] == "Traceback (most recent call last):"
    assert message[-1] == "ValueError: this is why"
    assert (e.value.role, e.value.code) == ("trainer 1", 1)
    assert "[trainer 1] ValueError: this is why\n" in capsys.readouterr().err
    assert len(watch.pids) == 4
    watch.all_gone()
    assert_reaped(watch)


def test_failure_code_and_silence(script: Any) -> None:
    command = script("""
        if name == "pserver 0":
            sys.exit(7)
        forever()
    """)
    with pytest.raises(
        LaunchError, match="pserver 0 failed with exit code 7.*it wrote nothing to standard error"
    ) as e:
        launch(command)
    assert e.value.code == 7


def test_failure_by_signal(script: Any) -> None:
    command = script("""
        if name == "trainer 0":
            os.kill(os.getpid(), signal.SIGKILL)
        forever()
    """)
    with pytest.raises(LaunchError, match="trainer 0 failed with signal SIGKILL") as e:
        launch(command)
    assert e.value.code == 137


def test_cause_before_consequence(script: Any, watch: Watch) -> None:
    """A pserver that ends because of a failed trainer does not hide the trainer's error, even if
    the pserver ends first."""
    command = script("""
        s = report()
        if kind == "pserver":
            sys.exit("dtrans.errors.PeerError: trainer 0 failed: ValueError: this is why")
        s.recv(1)  # until the pserver has ended
        sys.exit("ValueError: this is why")
    """)

    def answer() -> None:
        watch.wait_for(2)
        by_name = dict(zip(watch.pids, watch._connections, strict=True))
        assert by_name["pserver 0"].recv(1) == b""
        by_name["trainer 0"].sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LaunchError, match="^trainer 0 failed .*\nValueError: this is why$"):
        launch(command)
    thread.join()


@pytest.mark.parametrize(
    "last_words",
    [
        "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer",
        "F1121 client.h:80] Terminating process because the JAX distributed service detected fatal "
        "errors. This most",
    ],
)
def test_cause_before_consequence_in_nccl2_mode(script: Any, watch: Watch, last_words: str) -> None:
    command = script(f"""
        s = report()
        if name == "trainer 0":
            sys.exit({last_words!r})
        s.recv(1)  # until trainer 0 has ended
        sys.exit(9)
    """)

    def answer() -> None:
        watch.wait_for(2)
        by_name = dict(zip(watch.pids, watch._connections, strict=True))
        assert by_name["trainer 0"].recv(1) == b""
        by_name["trainer 1"].sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LaunchError, match="^trainer 1 failed with exit code 9"):
        launch(command, trainers=2, mode="nccl2")
    thread.join()


def test_consequence_without_a_cause(script: Any) -> None:
    command = script("""
        if kind == "pserver":
            sys.exit("dtrans.errors.PeerError: trainer 0 disagrees")
    """)
    with pytest.raises(
        LaunchError, match="^pserver 0 failed .*\ndtrans.errors.PeerError: trainer 0 disagrees$"
    ):
        launch(command)


def test_role_that_ignores_sigterm_is_killed(script: Any, watch: Watch) -> None:
    command = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        s = report()
        if name == "trainer 0":
            s.recv(1)
            sys.exit(3)
        forever()
    """)

    def answer() -> None:
        watch.wait_for(2)
        for s in watch._connections:
            s.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    started = time.monotonic()
    with pytest.raises(LaunchError, match="trainer 0 failed with exit code 3"):
        launch(command, grace=0.5)
    assert time.monotonic() - started >= 0.5
    thread.join()
    assert_reaped(watch)


def test_what_a_role_leaves_behind_is_ended(script: Any, watch: Watch) -> None:
    command = script("""
        if len(sys.argv) > 1:
            s = report("grandchild")
            forever()
        if name == "trainer 0":
            subprocess.Popen([sys.executable, __file__, "x"])
            s = report()
            s.recv(1)  # until the grandchild is there
    """)

    def answer() -> None:
        watch.wait_for(2)
        for s in watch._connections:
            s.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    launch(command, deadline=PATIENCE)
    thread.join()
    assert set(watch.pids) == {"grandchild", "trainer 0"}
    watch.all_gone()


def test_deadline(script: Any) -> None:
    command = script("""
        if kind == "pserver":
            forever()
    """)
    with pytest.raises(
        DeadlineError,
        match="the job ran longer than its deadline of 1 s; the launcher stopped pserver 0",
    ):
        launch(command, deadline=1.0)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match="pserver 0 cannot be started: .*nothing-here: No such file"
    ):
        launch([str(tmp_path / "nothing-here")])
    with pytest.raises(ConfigError, match="launch needs a command"):
        launch([])
    with pytest.raises(ConfigError, match="trainers must be 1 or more, it is 0"):
        launch(["true"], trainers=0)
    with pytest.raises(ConfigError, match="pservers must be 1 or more, it is 0"):
        launch(["true"], pservers=0)
    with pytest.raises(
        ConfigError,
        match=r"mode must be 'pserver', or 'nccl2' \(also for sharding and pipelines\), it is "
        r"'nccl'",
    ):
        launch(["true"], mode="nccl")
    with pytest.raises(ConfigError, match="pservers=2: mode='nccl2' has no parameter servers"):
        launch(["true"], mode="nccl2", pservers=2)


def test_leaves_signals_as_they_were(script: Any) -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    launch(script(""))
    assert before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_from_another_thread(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    thread = threading.Thread(target=launch, args=(script("print(name)"),))
    thread.start()
    thread.join()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[pserver 0] pserver 0",
        "[trainer 0] trainer 0",
    ]


# -- interruption ----------------------------------------------------------------------------------

# The launcher as a separate process. Tests may run where a shell ignores SIGINT, or nohup SIGHUP.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets its children ignore it
from dtrans.run.distributed.launcher import launch
launch(sys.argv[1:], trainers=2, pservers=2, grace=60)
"""


def start_launcher(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "signum, code", [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interrupted_launcher_leaves_nothing(
    script: Any, watch: Watch, signum: int, code: int
) -> None:
    launcher = start_launcher(script("s = report(); forever()"))
    with launcher:
        watch.wait_for(4)
        os.kill(launcher.pid, signum)
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == code
    assert ("KeyboardInterrupt" in err) == (signum == signal.SIGINT)
    assert_reaped(watch)
    watch.all_gone()


def test_second_interrupt_kills(script: Any, watch: Watch) -> None:
    command = script("""
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: print("told to end"))
        s = report()
        while True:
            signal.pause()
    """)
    launcher = start_launcher(command)
    with launcher:
        assert launcher.stdout is not None
        watch.wait_for(4)
        os.kill(launcher.pid, signal.SIGINT)
        for _ in range(4):
            assert launcher.stdout.readline().endswith("told to end\n")
        os.kill(launcher.pid, signal.SIGINT)
        launcher.communicate(timeout=PATIENCE)
    assert_reaped(watch)
    watch.all_gone()


def test_roles_of_a_killed_launcher_may_save(script: Any, watch: Watch, tmp_path: Path) -> None:
    command = script("""
        def save(*_):
            open(f"{sys.argv[1]}/{name}", "w").close()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        s = report()
        forever()
    """)
    launcher = start_launcher([*command, str(tmp_path)])
    with launcher:
        watch.wait_for(4)
        launcher.kill()
        launcher.wait(timeout=PATIENCE)
        watch.all_gone()
    saved = sorted(path.name for path in tmp_path.iterdir() if " " in path.name)
    assert saved == ["pserver 0", "pserver 1", "trainer 0", "trainer 1"]


def test_killed_launcher_leaves_nothing(script: Any, watch: Watch) -> None:
    command = script("signal.signal(signal.SIGTERM, signal.SIG_IGN); s = report(); forever()")
    launcher = start_launcher(command)
    with launcher:
        watch.wait_for(4)
        launcher.kill()
        launcher.wait(timeout=PATIENCE)
        watch.all_gone()


BEFORE_REGISTRATION = """
import os, signal, sys
from queue import SimpleQueue
from dtrans.run.distributed.child_process import Child
from dtrans.run.distributed.role import roles_of

role = roles_of(1, ["127.0.0.1:1"])[0]
command = [sys.executable, "-c", "print('the role has begun', flush=True)"]
Child(role, command, dict(os.environ), SimpleQueue(), print, inherit_stdout=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_is_killed_before_a_role_is_registered_leaves_nothing() -> None:
    """The launcher's standard output ends when its last process has ended."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_REGISTRATION], stdout=subprocess.PIPE, timeout=PATIENCE
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says which signals are ignored")
def test_a_role_has_no_input_and_ignores_no_broken_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """The script is a Python program, but behaves like a command that a shell starts."""
    launch(["sh", "-c", "grep SigIgn /proc/self/status; cat; echo at the end of its input"])
    out = capsys.readouterr().out
    for ignored in (line.split()[-1] for line in out.splitlines() if "SigIgn" in line):
        assert not int(ignored, 16) & 1 << signal.SIGPIPE - 1
    assert out.count("SigIgn") == out.count("at the end of its input") == 2


# -- jobs that go on -------------------------------------------------------------------------------


FAILS = """
if kind.lower() == "trainer" and index in {failing!r}:
    sys.exit(f"{{name}} has had enough")
print("done")
"""


def test_a_job_of_pservers_goes_on_without_a_trainer(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job of servers continues without failed trainers, also without trainer 0."""
    launch(script(FAILS.format(failing=("0", "2"))), trainers=3, on_trainer_loss="drop")
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[pserver 0] done", "[trainer 1] done"]
    for k in (0, 2):
        assert f"[launcher] trainer {k} failed with exit code 1; the others continue" in err


def test_a_job_without_any_trainer_left_has_failed(script: Any) -> None:
    with pytest.raises(LaunchError, match="^trainer [01] failed with exit code 1") as e:
        launch(script(FAILS.format(failing=("0", "1"))), trainers=2, on_trainer_loss="drop")
    assert "has had enough" in str(e.value)


SERVES = """
import time
from dtrans.run.net.ended_roles import ended_roles
if kind.lower() == "trainer" and index == "1":
    sys.exit(3)
while "trainer 1" not in ended_roles():
    time.sleep(0.01)
print(ended_roles()["trainer 1"])
"""


def test_the_others_are_told_who_has_ended(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launch(script(SERVES), trainers=2, on_trainer_loss="drop", deadline=PATIENCE)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[pserver 0] exit code 3",
        "[trainer 0] exit code 3",
    ]


# -- restarts --------------------------------------------------------------------------------------

LOSES = """
attempt = os.environ["DTRANS_RESTARTS"]
print(attempt + " " + os.environ["DTRANS_RUN"])  # one write: the launcher may end this role
if name == "trainer 1" and int(attempt) < {losses}:
    os.kill(os.getpid(), signal.{signal})
"""


def test_all_roles_start_again_when_one_is_lost(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(script(LOSES.format(losses=2, signal="SIGKILL")), trainers=2, restarts=3)
    out, err = capsys.readouterr()
    runs = {line.split("] ")[1] for line in out.splitlines()}
    assert sorted(run.split()[0] for run in runs) == ["0", "1", "2"]  # one run for each attempt
    again = (
        "[launcher] trainer 1 failed with signal SIGKILL; all roles start again (restart {} of 3)"
    )
    assert [line for line in err.splitlines() if "again" in line] == [
        again.format(1),
        again.format(2),
    ]


def test_the_last_loss_ends_the_job(script: Any) -> None:
    with pytest.raises(LaunchError, match="trainer 1 failed with signal SIGSEGV"):
        launch(script(LOSES.format(losses=2, signal="SIGSEGV")), trainers=2, restarts=1)


def test_an_exception_is_not_tried_again(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="trainer 1 failed with exit code 1"):
        launch(script(FAILS.format(failing=("1",))), trainers=2, restarts=3)
    assert "start again" not in capsys.readouterr().err


def test_a_signal_ends_the_launcher_while_it_waits_to_restart(script: Any) -> None:
    """The second restart follows a pause, and Ctrl-C ends the launcher in this pause."""
    command = script(LOSES.format(losses=9, signal="SIGKILL"))
    code = f"""
from dtrans.run.distributed import launcher
from dtrans.run.distributed.restarts import run_attempts
run_attempts.BACK_OFF = 900
launcher.launch({command!r}, trainers=2, restarts=9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stderr is not None
        for line in started.stderr:
            if "restart 2 of 9" in line:
                started.send_signal(signal.SIGTERM)
    assert started.returncode == 128 + signal.SIGTERM


def test_restarts_are_counted_from_0(script: Any) -> None:
    with pytest.raises(ConfigError, match="restarts must be 0 or more, it is -1"):
        launch(script(""), restarts=-1)


def test_a_signal_counts_while_the_others_are_ended(script: Any) -> None:
    """Trainer 1 ends slowly. Meanwhile, the launcher gets a signal."""
    command = script("""
        if name == "trainer 1":
            signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
            threading.Event().wait(0.1)
            print("ready", flush=True)
            forever()
        if name == "trainer 0":
            sys.stdin.read()
            open(sys.argv[1] + str(os.getpid()), "w").close()
            while not os.path.exists(sys.argv[1] + "go"):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        forever()
    """)
    with tempfile.TemporaryDirectory() as folder:
        code = f"""
from dtrans.run.distributed.launcher import launch
launch({[*command, folder + "/"]!r}, trainers=2, restarts=3, grace={PATIENCE})
"""
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as started:
            assert started.stdout is not None and started.stderr is not None
            for line in started.stdout:
                if "ready" in line:
                    (Path(folder) / "go").touch()
                if "asked" in line:
                    started.send_signal(signal.SIGTERM)
            assert "start again" not in started.stderr.read()
    assert started.returncode == 128 + signal.SIGTERM


def test_no_restart_begins_after_the_deadline(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_attempts, "BACK_OFF", 900)
    monkeypatch.setattr(run_attempts, "LONGEST_BACK_OFF", 900)
    command = script(LOSES.format(losses=9, signal="SIGKILL"))
    with pytest.raises(LaunchError, match="trainer 1 failed with signal SIGKILL"):
        launch(command, trainers=2, restarts=9, deadline=600)
    assert "(restart 1 of 9)" in (printed := capsys.readouterr().err)
    assert "(restart 2 of 9)" not in printed


@pytest.mark.parametrize("changed", [{"LONGEST_BACK_OFF": 0.01}, {"STEADY": 0.0}])
def test_pauses_between_restarts_are_bounded(
    changed: dict[str, float], script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses have an upper bound. After a long attempt, the next restart is immediate again."""
    for name, seconds in ({"BACK_OFF": 900, "LONGEST_BACK_OFF": 900} | changed).items():
        monkeypatch.setattr(run_attempts, name, seconds)
    launch(script(LOSES.format(losses=3, signal="SIGKILL")), trainers=2, restarts=3, deadline=600)


def test_a_server_that_fails_by_a_dropped_trainer_is_restarted(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script("""
        if os.environ["DTRANS_RESTARTS"] == "0":
            if name == "trainer 1":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind.lower() == "pserver":
                from dtrans.run.net.ended_roles import ended_roles
                while not ended_roles():
                    threading.Event().wait(0.01)
                sys.exit("dtrans.errors.PeerError: trainer 1 is gone")
            forever()
    """)
    launch(command, trainers=2, on_trainer_loss="drop", restarts=1)
    assert "[launcher] trainer 1 failed with signal SIGKILL; all roles" in capsys.readouterr().err
