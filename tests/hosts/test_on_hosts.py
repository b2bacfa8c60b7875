"""Launch on several hosts: the environment of roles, errors that name a failure, and no remaining
processes.

A small script replaces ssh (`stand_in_hosts`). test_ssh.py uses the real ssh.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from rich.console import Console
from role_scripts import PATIENCE, assert_gone, came
from stand_in_hosts import HOSTS, find_without_checks, write_rsh

from dtrans import cli
from dtrans.errors import ConfigError, LaunchError
from dtrans.hosts import host_check, on_hosts, remote_child
from dtrans.hosts.host_list import HostEntry, read_hosts
from dtrans.hosts.on_hosts import launch_on_hosts
from dtrans.hosts.ray_launch import launch_on_ray
from dtrans.hosts.role_states import RoleStates


@pytest.fixture
def rsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_rsh(tmp_path, monkeypatch)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    find_without_checks(monkeypatch)


# -- what roles are told ---------------------------------------------------------------------------


def test_roles_and_logs(
    script: Any,
    rsh: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher checks the hosts, and each process reads its role from its environment."""
    monkeypatch.setenv("WANTED", "goes along")
    monkeypatch.setenv("JAX_OF_THE_TEST", "goes along")
    command = script("""
        found = {k: v for k, v in os.environ.items() if k.startswith(("DTRANS_", "JAX_", "WANTED"))}
        is_folder = os.path.isdir(found["DTRANS_ENDED_ROLES"])
        print(json.dumps([found, sys.argv[1:], os.getcwd(), is_folder]))
        print(name, file=sys.stderr)
    """)
    monkeypatch.setattr(host_check, "is_loopback", lambda address: False)
    where = tuple(HostEntry(h.name, address="127.0.0.1") for h in HOSTS)
    launch_on_hosts(
        [*command, "a b"],
        where,
        rsh=rsh,
        carried=["WANTED"],
        log_dir=tmp_path / "logs",
        trainers=3,
        mode="nccl2",
    )
    out, err = capsys.readouterr()
    lines = dict(line.split("] ", 1) for line in out.splitlines())
    assert sorted(lines) == ["[trainer 0", "[trainer 1", "[trainer 2"]
    tokens, devices = set(), {}
    for prefix, line in lines.items():
        found, arguments, directory, told = json.loads(line)
        assert (arguments, directory, told) == (["a b"], os.getcwd(), True)
        assert found["WANTED"] == found["JAX_OF_THE_TEST"] == "goes along"
        status = found["DTRANS_STATUS_ENDPOINT"]
        assert status.startswith("127.0.0.1:") and status not in found["DTRANS_TRAINER_ENDPOINTS"]
        assert f"this job answers: dtrans status {status}\n" in err
        tokens.add(found["DTRANS_TOKEN"])
        devices[prefix] = found["JAX_LOCAL_DEVICE_IDS"]
        assert not Path(found["DTRANS_ENDED_ROLES"]).exists()  # the file is removed
    assert len(tokens) == 1 and len(*tokens) >= 64
    # the device of its host
    assert devices == {"[trainer 0": "0", "[trainer 1": "1", "[trainer 2": "0"}
    logs = {file.name: file.read_text().splitlines() for file in (tmp_path / "logs").iterdir()}
    assert logs.keys() == {f"trainer-{k}.log" for k in range(3)}
    for k in range(3):
        assert sorted(logs[f"trainer-{k}.log"]) == sorted([lines[f"[trainer {k}"], f"trainer {k}"])
    assert re.search(r"^\[launcher\] trainer 1 on one: running, process \d+$", err, re.M)
    assert "[launcher] trainer 2 on two: ended\n" in err
    assert not any(token in err for token in tokens)


def test_variables_of_the_user_stay_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "stays here")
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("WANTED", "goes along")
    site = on_hosts.SeveralHosts(
        HOSTS, None, rsh="ssh", python="python", carried=["WANTED"], script=""
    )  # type: ignore
    found = site._environment({**os.environ, "DTRANS_ROLE": "trainer"})
    assert "SECRET_OF_THE_USER" not in found and "PATH" not in found
    assert (found["WANTED"], found["DTRANS_ROLE"]) == ("goes along", "trainer")
    assert found["PYTHONPATH"] == os.path.abspath("here")


def test_secrets_are_on_no_command_line(
    found: None, script: Any, rsh: str, listener: socket.socket
) -> None:
    command = script("s = report(); s.recv(1)")
    token = secrets.token_hex(32)
    seen: list[bytes] = []

    def read() -> None:
        reported = [came(listener) for _ in range(2)]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # the process has ended meanwhile
                seen.append(path.read_bytes())
        for _, connection in reported:
            connection.close()

    thread = threading.Thread(target=read)
    thread.start()
    launch_on_hosts(command, HOSTS, rsh=rsh, env={"DTRANS_TOKEN": token})
    thread.join()
    # both roles print the command, and no line contains the token
    assert sum(command[1].encode() in line for line in seen) == 2
    assert not any(token.encode() in line for line in seen)


# -- failures --------------------------------------------------------------------------------------


def test_a_failure_ends_the_others(
    found: None, script: Any, rsh: str, listener: socket.socket
) -> None:
    command = script("""
        s = report()
        s.recv(1)
        if name == "trainer 1":
            raise ValueError("this is why")
        threading.Event().wait()
    """)
    connections = []

    def answer() -> None:
        connections.extend(came(listener)[1] for _ in range(4))
        for s in connections:
            s.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(
        LaunchError, match="^trainer 1 on two failed with exit code 1, and the other"
    ) as e:
        launch_on_hosts(command, HOSTS, rsh=rsh, trainers=2, pservers=2)
    thread.join()
    assert str(e.value).endswith("ValueError: this is why")
    assert (e.value.role, e.value.code) == ("trainer 1", 1)
    assert_gone(*connections)


def test_a_signal_that_ends_a_role_is_named(found: None, script: Any, rsh: str) -> None:
    command = script(
        "if name == 'trainer 0': os.kill(os.getpid(), signal.SIGKILL)\nthreading.Event().wait()"
    )
    with pytest.raises(LaunchError, match="^trainer 0 on one failed with signal SIGKILL") as e:
        launch_on_hosts(command, HOSTS, rsh=rsh)
    assert e.value.code == 137


def test_roles_start_again_on_their_hosts(
    found: None, script: Any, rsh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script(
        "print(os.environ['DTRANS_RESTARTS'])\n"
        "if name == 'trainer 0' and os.environ['DTRANS_RESTARTS'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    launch_on_hosts(command, HOSTS, rsh=rsh, restarts=1)
    out, err = capsys.readouterr()
    assert out.splitlines().count("[trainer 0] 1") == out.splitlines().count("[pserver 0] 1") == 1
    assert (
        "trainer 0 on one failed with signal SIGKILL; all roles start again (restart 1 of 1)" in err
    )


def test_ray_has_restarts_of_its_own() -> None:
    with pytest.raises(ConfigError, match="restarts=2 is not for jobs on Ray;"):
        launch_on_ray(["true"], restarts=2)


def test_roles_that_ended_are_told_to_the_others(found: None, script: Any, rsh: str) -> None:
    command = script("""
        if name == "trainer 0":
            sys.exit(0)
        folder = os.environ["DTRANS_ENDED_ROLES"]
        while "trainer 0" not in os.listdir(folder):
            threading.Event().wait(0.05)
        print(open(os.path.join(folder, "trainer 0")).read(), file=sys.stderr)
        sys.exit(9)
    """)
    with pytest.raises(
        LaunchError, match="^pserver 0 on two failed with exit code 9.*\n0 exit code 0$"
    ):
        launch_on_hosts(command, HOSTS, rsh=rsh)


def test_a_program_that_is_not_there(found: None, rsh: str) -> None:
    with pytest.raises(
        LaunchError, match="of its agent: .* cannot be started: no-such-program: No such file"
    ):
        launch_on_hosts(["no-such-program"], HOSTS, rsh=rsh)


def test_a_role_that_ignores_sigterm_is_killed(
    found: None, script: Any, rsh: str, listener: socket.socket
) -> None:
    command = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        s = report()
        s.recv(1)
        if name == "trainer 0":
            sys.exit(3)
        threading.Event().wait()
    """)
    connections = []

    def answer() -> None:
        connections.extend(came(listener)[1] for _ in range(2))
        for s in connections:
            s.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LaunchError, match="trainer 0 on one failed with exit code 3"):
        launch_on_hosts(command, HOSTS, rsh=rsh, grace=0.5)
    thread.join()
    assert_gone(*connections)


# As ssh does, run the command as another process, whose standard input ends with this process.
CUTTABLE = """
import os, subprocess, sys, threading
far = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
def copy():
    while some := os.read(0, 65536):
        far.stdin.write(some)
    far.stdin.close()
threading.Thread(target=copy, daemon=True).start()
os._exit(far.wait())
"""


def test_a_connection_that_ends_is_a_failure_of_its_host(
    found: None,
    script: Any,
    tmp_path: Path,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The role of the host receives SIGTERM, and ends."""
    (tmp_path / "rsh.py").write_text(CUTTABLE)
    command = script("""
        # the test breaks the connection as soon as the role reports, so the role must be ready
        # before
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        s = report()
        signal.signal(signal.SIGTERM, lambda *_: (s.sendall(b"asked"), sys.exit(0)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        threading.Event().wait()
    """)
    children = []
    start = on_hosts.SeveralHosts.start

    def noted(*args: Any, **options: Any) -> Any:
        children.append(start(*args, **options))
        return children[-1]

    monkeypatch.setattr(on_hosts.SeveralHosts, "start", noted)
    connections = {}

    def cut() -> None:
        connections.update(came(listener) for _ in range(2))
        os.kill(children[1].pid, signal.SIGKILL)

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(
        LaunchError, match="^trainer 0 on one failed with a lost connection to host one"
    ) as e:
        launch_on_hosts(command, HOSTS, rsh=f"{sys.executable} {tmp_path}/rsh.py")
    thread.join()
    assert e.value.code == 255
    assert connections["trainer 0"].recv(5) == b"asked"
    assert_gone(*connections.values())


def test_an_agent_that_hears_nothing_ends_its_role(
    found: None, script: Any, rsh: str, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network delivers nothing, so no end of file arrives."""
    monkeypatch.setattr(remote_child, "SILENCE", 1.0)
    monkeypatch.setattr(remote_child, "BEAT", 1000.0)
    command = script("s = report(); threading.Event().wait()")
    with pytest.raises(LaunchError, match="failed with a lost connection to host"):
        launch_on_hosts(command, HOSTS, rsh=rsh)
    assert_gone(*(came(listener)[1] for _ in range(2)))


def test_an_agent_that_does_not_start_is_not_waited_for(
    found: None, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_child, "START", 1.0)
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    with pytest.raises(LaunchError, match="failed with no answer from host one within 1 s"):
        launch_on_hosts(script(""), [HOSTS[0]], rsh=str(silent))


DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from dtrans.hosts import on_hosts, remote_agent
from dtrans.hosts.host_check import FoundHost
from dtrans.hosts.host_list import HostEntry
on_hosts.check_hosts = lambda hosts, *_, **options: [
    FoundHost(h, sys.executable, remote_agent.__file__, "127.0.0.1", (5000 + i,), 2)
    for i, h in enumerate(hosts)]
entries = HostEntry("one"), HostEntry("two")
on_hosts.launch_on_hosts(sys.argv[3:], entries, rsh=sys.argv[2], grace=60)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_launcher_leaves_nothing(
    script: Any, rsh: str, listener: socket.socket, signum: int
) -> None:
    command = script("s = report(); threading.Event().wait()")
    launcher = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(ROOT), rsh, *command], stderr=subprocess.PIPE
    )
    with launcher:
        connections = [came(listener)[1] for _ in range(2)]
        os.kill(launcher.pid, signum)
        launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode in (-signum, 128 + signum)
    assert_gone(*connections)


# -- hosts that cannot take part -------------------------------------------------------------------


def test_hosts_that_cannot_take_part_are_named_together(
    script: Any, rsh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error gives the reason for each host, and no role starts."""
    command = script("raise SystemExit(9)")
    python = tmp_path / "python"  # a Python with another JAX
    python.write_text(f"""#!/bin/sh
exec {sys.executable} -c '
import jax, runpy, sys
jax.__version__ = "0.0.1"
sys.argv = sys.argv[1:]
sys.path.insert(0, "{ROOT}")
runpy.run_module(sys.argv[1], run_name="__main__")' "$@"
""")
    python.chmod(0o755)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    hosts = [
        HostEntry("down"),
        HostEntry("old", python=str(python), address="127.0.0.1"),
        HostEntry("bare", python=str(bare)),
        HostEntry("gone", python=str(tmp_path / "gone")),
        HostEntry("far", address="192.0.2.1"),
    ]
    with pytest.raises(LaunchError) as e:
        launch_on_hosts(command, hosts, rsh=rsh, trainers=4)
    first, *lines = str(e.value).splitlines()
    assert first == "5 of 5 hosts cannot run roles; no role was started"
    unreachable = "  host down cannot be reached: `rsh` ended with exit code 255: no route to down"
    assert lines[0] == f"{unreachable}; the command `{rsh} down true` must work without a password"
    assert re.search(
        r"host old has jax 0\.0\.1 \(here [\d.]+\) in .*python; install the same versions", lines[1]
    )
    assert re.search(
        r"host bare cannot run dtrans with .*bare: .*No module named .*install dtrans there",
        lines[2],
    )
    assert re.search(
        r"host gone cannot run .*gone: env: .*gone.*: No such file.*; name the interpreter by "
        r"--python",
        lines[3],
    )
    assert (
        "host far cannot listen at 192.0.2.1: Cannot assign requested address; write `far "
        "address=A`" in lines[4]
    )


def test_a_name_that_others_cannot_reach(script: Any, rsh: str) -> None:
    hosts = [HostEntry("localhost"), HostEntry("localhost.localdomain", address="127.0.0.1")]
    with pytest.raises(LaunchError) as e:
        launch_on_hosts(script(""), hosts, rsh=rsh)
    assert "host localhost resolves its own name to" in str(e.value)
    assert "write `localhost address=A` in the file of hosts" in str(e.value)


def test_a_script_that_is_not_there(rsh: str, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError,
        match="host localhost has no .*gone.py: the working directory and the script must",
    ):
        launch_on_hosts(
            [sys.executable, str(tmp_path / "gone.py")], read_hosts("localhost"), rsh=rsh
        )


def test_more_roles_than_slots(found: None, script: Any, rsh: str) -> None:
    with pytest.raises(
        ConfigError,
        match="the hosts one:2,two:1 have slots for 3 processes, .*; add hosts or slots for 1",
    ):
        launch_on_hosts(script(""), read_hosts("one:2,two:1"), rsh=rsh, trainers=3)


def test_words_that_a_shell_would_read(script: Any, rsh: str) -> None:
    with pytest.raises(
        ConfigError,
        match="'/my python' cannot be passed to host one, because the shell of the host",
    ):
        launch_on_hosts(script(""), HOSTS, rsh=rsh, python="/my python")


def test_a_way_to_hosts_that_is_not_there(script: Any) -> None:
    with pytest.raises(LaunchError, match="host one cannot be reached: no-such-rsh does not start"):
        launch_on_hosts(script(""), HOSTS, rsh="no-such-rsh")


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `dtrans launch ARGUMENTS` in this process, and returns the exit
    code."""

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["dtrans", "launch", *arguments])
        with pytest.raises(SystemExit) as e:
            cli.main()
        return e.value.code

    return run


def test_the_command(
    found: None,
    command: Any,
    rsh: str,
    script: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, path = script("print(name, sys.argv[1:])")
    (tmp_path / "hosts").write_text("one slots=1\ntwo\n")
    options = ("--rsh", rsh, "--log-dir", str(tmp_path / "logs"), "--trainers", "2")
    assert not command("--hosts", str(tmp_path / "hosts"), *options, path, "--hosts", "x")
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [
        f"[{n}] {n} ['--hosts', 'x']" for n in ("pserver 0", "trainer 0", "trainer 1")
    ]
    assert (
        "[launcher] trainer 0 on one: ended\n" in err
        and "[launcher] trainer 1 on two: ended\n" in err
    )
    assert (tmp_path / "logs" / "pserver-0.log").read_text() == "pserver 0 ['--hosts', 'x']\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rsh", "ssh"], "dtrans: --rsh needs --hosts; add --hosts, or remove --rsh"),
        (
            ["--hosts", "a", "--on", "ray"],
            "dtrans: --hosts cannot be combined with --on ray",
        ),
        (["--hosts", "a:x"], "dtrans: --hosts a:x has the number of slots 'x'; expected a number"),
        (["--hosts", "no/file"], "dtrans: the file of hosts no/file does not exist"),
    ],
)
def test_options_that_cannot_be(
    command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command(*arguments, "-m", "json.tool") == 1
    assert capsys.readouterr().err.startswith(message)


def test_the_table_on_a_terminal() -> None:
    drawn = io.StringIO()
    with RoleStates(Console(file=drawn, force_terminal=True, width=100)) as states:
        states.begin([("pserver 0", "gpu1"), ("trainer 0", "gpu2")])
        states.change("pserver 0", "running", 4711)
        states.change("trainer 0", "failed with exit code 3")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue()).split("┏")[-1]
    rows = [
        re.split(r"\s*│\s*", line.strip("│ ")) for line in last.splitlines() if line.startswith("│")
    ]
    assert rows == [
        ["gpu1", "pserver 0", "4711", "running"],
        ["gpu2", "trainer 0", "", "failed with exit code 3"],
    ]
