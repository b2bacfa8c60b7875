"""Jobs on four hosts: network namespaces that share only the file system."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import own_sshd
import pytest
from paths import ROOT

from dtrans.hosts.emit_ssh import emit_ssh
from dtrans.hosts.role_table import role_table
from tools.namespaces import HOST_FILES, Namespaces, namespaces, why_not


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
PATIENCE = 240.0
COLLECTIVE = ("--mode", "nccl2", "--trainers", "4")
PSERVER = ("--trainers", "2", "--pservers", "2")
DIGITS = ("-m", "examples.digits_role", "-")
ACCURACY = 0.95  # of the example


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as made:
        yield made


def start(hosts: Sequence[str], rsh: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Start `dtrans launch` on hosts."""
    command = [sys.executable, "-m", "dtrans", "launch", "--hosts", ",".join(hosts), "--rsh", rsh]
    its = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *arguments], env=its, cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )


def accuracy(hosts: Namespaces, *arguments: str, **env: str) -> float:
    """Run a job to its end, and return the accuracy that it prints.

    No process may be left on any host.
    """
    with start(hosts.names, hosts.rsh, *arguments, **env) as job:
        out, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, err
    assert {name for name in hosts.names if f" on {name}: ended\n" in err} == {*hosts.names}
    assert hosts.processes() == []
    return float(re.search(r"^\[trainer 0\] test accuracy (\S+) on 360 images$", out, re.M)[1])


def test_two_servers_and_two_trainers(hosts: Namespaces) -> None:
    """Train two epochs, with encrypted connections."""
    found = accuracy(
        hosts, *PSERVER, *DIGITS, "--epochs", "2", DTRANS_TRANSPORT_ENCRYPTION="required"
    )
    assert found > 0.8


@pytest.mark.soak
@pytest.mark.parametrize(
    "arguments",
    [
        (*PSERVER, *DIGITS),
        (*COLLECTIVE, *DIGITS),
        (*COLLECTIVE, *DIGITS, "--sharding-stage", "3"),
        (*COLLECTIVE, *DIGITS, "--stages", "4"),
    ],
    ids=["pserver", "nccl2", "sharding", "pipeline"],
)
def test_the_demo_on_four_hosts(hosts: Namespaces, arguments: tuple[str, ...]) -> None:
    assert accuracy(hosts, *arguments, DTRANS_TRANSPORT_ENCRYPTION="required") >= ACCURACY


def test_a_host_that_is_missing(hosts: Namespaces) -> None:
    with start((*hosts.names[:3], "dt-missing"), "ip netns exec", *PSERVER, *DIGITS) as job:
        _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1
    assert "dtrans: 1 of 4 hosts cannot run roles; no role was started" in err
    assert re.search(
        r"host dt-missing cannot be reached: `ip` ended with exit code \d+: Cannot open network "
        r"names",
        err,
    )
    assert hosts.processes() == []


@pytest.mark.soak
@pytest.mark.parametrize("gone", [0, 2], ids=["a trainer's host", "a server's host"])
@pytest.mark.parametrize(
    "arguments", [(*PSERVER, *DIGITS), (*COLLECTIVE, *DIGITS)], ids=["pserver", "nccl2"]
)
def test_a_host_that_is_cut_off(
    hosts: Namespaces, arguments: tuple[str, ...], gone: int, tmp_path: Path
) -> None:
    """Kill a role in the middle of the job.

    The launcher's error names a role, and each role's error names the role that it lost.
    """
    logs = ("--log-dir", str(tmp_path))
    with start(
        hosts.names, hosts.rsh, *logs, *arguments, "--epochs", "200", "--deadline", "10"
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if re.search(r"\[trainer 0\] training: step \d+ of", line):
                break
        hosts.cut(gone)
        _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert re.search(r"^dtrans: (trainer|pserver) \d on \S+ failed with ", err, re.M), err
    assert hosts.processes() == []
    said = {file.stem: file.read_text() for file in tmp_path.iterdir()}
    assert len(said) == 4
    lost = re.search(rf"\[launcher\] (\w+) (\d) on {hosts.names[gone]}: running", err)
    assert lost is not None, err
    who = rf"{lost[1]} ({lost[2]}\b|{hosts.address(gone)}:)"
    # JAX may end a role with SIGABRT before the role's own error. The log names the lost role in
    # any case.
    lines = [
        line
        for text in said.values()
        for line in text.splitlines()
        if "Error: " in line or "has ended" in line
    ]
    assert [line for line in lines if re.search(who, line)], "\n".join([*lines, err])


LISTENS = """
import sys, threading
from dtrans.run.net.keys import Keys
from dtrans.run.net.zmq_transport import ZmqTransport
transport = ZmqTransport(Keys.from_environment("auto"))
door = transport.bind(sys.argv[1], {}, frame=1000, messages=10)
print("bound", flush=True)
threading.Event().wait()
"""
CONNECTS = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"


def test_a_server_whose_host_resolves_its_own_name_to_loopback(hosts: Namespaces) -> None:
    """Debian resolves the host's own name to 127.0.1.1, but other hosts resolve the name to an
    address and connect to this address."""
    name, other = hosts.names[:2]
    (HOST_FILES / name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DTRANS_TOKEN": 32 * "ab"}
    inside = ["ip", "netns", "exec", name, sys.executable, "-c", LISTENS, f"{name}:6174"]
    with subprocess.Popen(inside, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "bound\n"
        where = (hosts.address(0), "6174")
        subprocess.run(
            ["ip", "netns", "exec", other, sys.executable, "-c", CONNECTS, *where], check=True
        )
        server.terminate()


WATCHED = """
import os, socket, subprocess, sys
import dtrans, jax.numpy as jnp
cluster = dtrans.connect(deadline=120.0)
from dtrans.run.distributed.multihost import all_reduce_sum
all_reduce_sum(jnp.ones(3))
if cluster.trainer_id == 1:
    status = [sys.executable, "-m", "dtrans", "status", os.environ["DTRANS_STATUS_ENDPOINT"]]
    shown = subprocess.run(status, check=True, capture_output=True, text=True)
    print(shown.stdout, end="", flush=True)
(found,) = all_reduce_sum(jnp.ones(3))
# both roles have one standard output: a line in one write, which the other's cannot divide
print(f"{socket.gethostname()} {found.tolist()}\\n", end="", flush=True)
"""


def test_collectives_where_every_host_resolves_its_own_name_to_loopback(
    hosts: Namespaces, tmp_path: Path
) -> None:
    """An emitted script contains names of hosts.

    The other script requests the job's status from trainer 0.
    """
    names = hosts.names[:2]
    for i, name in enumerate(names):
        other = f"{hosts.address(1 - i)} {names[1 - i]}"
        (HOST_FILES / name / "hosts").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {name}\n{other}\n"
        )
    script, job, rsh = (tmp_path / file for file in ("watched.py", "job.sh", "rsh"))
    script.write_text(WATCHED)
    job.write_text(emit_ssh(role_table("nccl2", 2, command=[sys.executable, str(script)])))
    # ssh passes its arguments to a shell as one line
    rsh.write_text(f'#!/bin/sh\nname=$1; shift; exec {hosts.rsh} "$name" sh -c "$*"\n')
    rsh.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RSH": str(rsh)}
    done = subprocess.run(
        ["sh", str(job), *names],
        env=env,
        input=32 * "ab",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert f"this job answers: dtrans status {names[0]}:6176\n" in done.stderr
    assert "collective job, 2 of 2 trainers here" in done.stdout
    assert {f"{name} [2.0, 2.0, 2.0]" for name in names} <= {*done.stdout.splitlines()}
    assert hosts.processes() == []


def found_namespaces(process: subprocess.Popen[str]) -> list[str]:
    """Return the names of the namespaces that a process has created."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return re.findall(rf"^dt{process.pid}\w+", listed.stdout, re.M)


@pytest.mark.skipif(bool(why_not("tbf")), reason=why_not("tbf") or "links can be shaped")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_benchmark_of_hosts_removes_them_after_a_signal(number: signal.Signals) -> None:
    """Send the signal while the roles start: four namespaces, a switch, and eight processes."""
    command = [sys.executable, "benchmarks/hosts.py", "--model", "0.2M", "--steps", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as script:
        limit = time.monotonic() + PATIENCE
        names: list[str] = []
        pids: list[str] = []
        while len(pids) < 8 and script.poll() is None and time.monotonic() < limit:
            names = found_namespaces(script)
            pids = []
            for name in names:
                inside = ["ip", "netns", "pids", name]
                pids += subprocess.run(inside, capture_output=True, text=True).stdout.split()
            time.sleep(0.05)
        script.send_signal(number)
        said, _ = script.communicate(timeout=PATIENCE)
    assert len(names) == 5 and len(pids) == 8, said
    assert script.returncode and not found_namespaces(script)
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
    assert not list(HOST_FILES.glob(f"dt{script.pid}*"))


def test_the_benchmark_of_hosts_names_a_missing_program(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    command = [sys.executable, "benchmarks/hosts.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    expected = "links cannot be measured here: there is no ip (Debian: iproute2)\n"
    assert done.stderr == expected


DRIVER = """
import sys
from dtrans.hosts import remote_child
from dtrans.hosts.host_list import HostEntry
from dtrans.hosts.on_hosts import launch_on_hosts
remote_child.BEAT, remote_child.SILENCE = 0.5, 5.0
rsh, script, host = sys.argv[1:]
launch_on_hosts([sys.executable, script], [HostEntry(host)], rsh=rsh)
"""
WAITS = "import threading; print('here'); threading.Event().wait()"


@pytest.mark.skipif(bool(own_sshd.why_not()), reason=own_sshd.why_not() or "sshd runs")
def test_a_host_that_ssh_loses(hosts: Namespaces, tmp_path: Path) -> None:
    """The launcher names the host. Roles on this host, which receive no message any more, end as
    well."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    far, near = (["ip", "netns", "exec", name] for name in hosts.names[:2])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with own_sshd.own_sshd(tmp_path / "ssh", hosts.address(0), far) as ssh:
        rsh = f"{ssh} -o ServerAliveInterval=1 -o ServerAliveCountMax=3"
        command = [*near, sys.executable, "-c", DRIVER, rsh, str(script), hosts.address(0)]
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout is not None
            lines = sorted(job.stdout.readline() for _ in range(2))
            assert job.stderr is not None
            assert lines == ["[pserver 0] here\n", "[trainer 0] here\n"], (
                all(lines) or job.stderr.read()
            )
            assert sum(str(script) in line for line in hosts.processes()) > 2
            hosts.cut(0)
            _, err = job.communicate(timeout=PATIENCE)
        lost = (
            f"failed with a lost connection to host {hosts.address(0)} \\(`ssh` ended with "
            "exit code 255\\)"
        )
        assert re.search(f"(trainer|pserver) 0 on {hosts.address(0)} {lost}", err), err
        limit = time.monotonic() + PATIENCE
        while any(str(script) in line for line in hosts.processes()):
            assert time.monotonic() < limit
            time.sleep(0.1)
