"""Launch by real ssh: Debian's sshd on loopback, with keys for the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_sshd import own_sshd, why_not
from paths import ROOT
from role_scripts import PATIENCE, assert_gone, came
from role_threads import free_endpoints

from dtrans.endpoints import split_endpoint
from dtrans.errors import LaunchError
from dtrans.hosts.host_list import HostEntry
from dtrans.hosts.on_hosts import SeveralHosts, launch_on_hosts


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "sshd runs")
HOSTS = (HostEntry("127.0.0.1"),)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_sshd(tmp_path_factory.mktemp("sshd")) as command:
        yield command


@pytest.fixture
def rsh(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return server


def test_roles_by_ssh(
    rsh: str,
    script: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_OF_THE_USER", "stays here")
    command = script("""
        print(json.dumps([name, sys.argv[1:], os.getcwd(), os.environ.get("SECRET_OF_THE_USER"),
            os.environ["SSH_CONNECTION"].split()[2], len(os.environ["DTRANS_TOKEN"])]))
        print("words of", name, file=sys.stderr)
    """)
    launch_on_hosts([*command, "a b", "$HOME; 'x'"], HOSTS, rsh=rsh, trainers=2, log_dir="logs")
    out, err = capsys.readouterr()
    said = sorted(json.loads(line.split("] ", 1)[1]) for line in out.splitlines())
    assert [line[0] for line in said] == ["pserver 0", "trainer 0", "trainer 1"]
    for line in said:
        assert line[1:] == [["a b", "$HOME; 'x'"], str(tmp_path), None, "127.0.0.1", 64]
    assert "[trainer 1] words of trainer 1\n" in err
    assert "words of trainer 1\n" in (tmp_path / "logs" / "trainer-1.log").read_text()


def test_a_key_that_the_host_does_not_know(rsh: str, script: Any) -> None:
    with pytest.raises(LaunchError) as e:
        launch_on_hosts(script(""), HOSTS, rsh=rsh.replace("/user ", "/stranger "))
    said = (
        "host 127.0.0.1 cannot be reached: `ssh` ended with exit code 255: root@127.0.0.1: "
        "Permission denied"
    )
    assert said in str(e.value)


def test_a_host_without_a_server(script: Any) -> None:
    _, port = split_endpoint(free_endpoints(1)[0])
    with pytest.raises(
        LaunchError, match="host 127.0.0.1 cannot be reached: .* 255: .*Connection refused"
    ):
        launch_on_hosts(script(""), HOSTS, rsh=f"ssh -F none -p {port}")


def test_a_connection_that_is_cut(
    rsh: str, script: Any, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    start = SeveralHosts.start

    def noted(*args: Any, **options: Any) -> Any:
        children.append(start(*args, **options))
        return children[-1]

    monkeypatch.setattr(SeveralHosts, "start", noted)
    connections = {}

    def cut() -> None:
        connections.update(came(listener) for _ in range(2))
        os.kill(children[1].pid, signal.SIGKILL)

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(
        LaunchError, match="^trainer 0 on 127.0.0.1 failed with a lost connection to host 127.0.0.1"
    ):
        command = script("s = report(); threading.Event().wait()")
        launch_on_hosts(command, HOSTS, rsh=rsh, carried=["TEST_PORT"])
    thread.join()
    assert_gone(*connections.values())


DRIVER = """
import sys
from dtrans.hosts.host_list import HostEntry
from dtrans.hosts.on_hosts import launch_on_hosts
launch_on_hosts(sys.argv[2:], [HostEntry("127.0.0.1")], rsh=sys.argv[1], carried=["TEST_PORT"])
"""


def test_a_killed_launcher_leaves_nothing(rsh: str, script: Any, listener: socket.socket) -> None:
    command = script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); s = report(); threading.Event().wait()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", DRIVER, rsh, *command], stderr=subprocess.PIPE
    )
    with launcher:
        connections = [came(listener)[1] for _ in range(2)]
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.communicate(timeout=PATIENCE)
    assert_gone(*connections)
