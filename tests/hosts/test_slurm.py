"""Emitted `sbatch` files on a real Slurm with two virtual nodes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import tree_close
from paths import ROOT, SUPPORT
from role_threads import free_endpoints
from scheduled_training import plain

from dtrans.endpoints import split_endpoint
from dtrans.hosts.emit_slurm import emit_slurm
from dtrans.hosts.role_table import RoleTable, role_table
from dtrans.run.distributed.role import Role
from tools.namespaces import namespaces, why_not


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
MISSING = [p for p in PROGRAMS if shutil.which(p) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm start as root only"),
]

NO_ADDRESSES = "Slurm does not run here" if MISSING or os.geteuid() else why_not()

CONF = """\
ClusterName=dtrans
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={dir}/munge.sock
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/%n.pid
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""

# srun ends all tasks as soon as one fails, also those that have not started. So the last task
# fails.
SAY = """
import json, os, sys, time
folder, node, fails = sys.argv[1], os.environ["SLURMD_NODENAME"], [a for a in sys.argv[2:3] if a]
name = f"{os.environ['DTRANS_ROLE']}-{os.environ['SLURM_PROCID']}"
with open(os.path.join(folder, name + ".tmp"), "w") as f:
    json.dump({"argv": sys.argv[3:], "env": dict(os.environ)}, f)
os.replace(f.name, os.path.join(folder, name + ".json"))
while fails == [node] and not os.path.exists(os.path.join(folder, "pserver-0.json")):
    time.sleep(0.05)
sys.exit(7 if fails == [node] else 0)
"""


def free_ports(count: int) -> list[int]:
    return [split_endpoint(endpoint)[1] for endpoint in free_endpoints(count)]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Two nodes, n1 and n2.

    Attributes:
      folder: files of the nodes, with the `slurm.conf` that SLURM_CONF names.
      prefix: start of each command that uses Slurm.
    """

    folder: Path
    prefix: tuple[str, ...]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start the daemons, in a network namespace where each node has an address, if there can be
    one."""
    with contextlib.ExitStack() as stack:
        prefix: tuple[str, ...] = ()
        if not NO_ADDRESSES:
            hosts = stack.enter_context(namespaces(1))
            files = hosts.name_addresses({"n1": hosts.address(0), "n2": hosts.address(1)})
            # `ip netns exec` would mount another /sys, without the control groups that slurmd reads
            bind = f'mount --bind {files} /etc/hosts; exec "$@"'
            prefix = (*hosts.enter(0), "unshare", "--mount", "sh", "-ec", bind, "sh")
        yield stack.enter_context(started_cluster(prefix))


@contextlib.contextmanager
def started_cluster(prefix: tuple[str, ...]) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix=f"dtrans-slurm-{os.getpid()}-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(host=host, ports=free_ports(3), dir=folder))
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {
        "--socket": "munge.sock",
        "--key-file": "munge.key",
        "--log-file": "munged.log",
        "--pid-file": "munged.pid",
        "--seed-file": "munged.seed",
    }
    munge = [f"{option}={folder / name}" for option, name in files.items()]
    started: list[subprocess.Popen[bytes]] = []
    log = (folder / "daemons.log").open("wb")

    def start(*command: str) -> None:
        started.append(
            subprocess.Popen([*prefix, *command], env=env, cwd=folder, stdout=log, stderr=log)
        )

    def until(ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not ready():
            if time.monotonic() > end or any(p.poll() is not None for p in started):
                pytest.fail((folder / "daemons.log").read_text()[-3000:])
            time.sleep(0.1)

    def idle() -> bool:
        command = [*prefix, "sinfo", "-h", "-o", "%t%D"]
        return subprocess.run(command, env=env, capture_output=True, text=True).stdout == "idle2\n"

    try:
        start("munged", "--foreground", "--force", *munge)
        until((folder / "munge.sock").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n1")
        start("slurmd", "-D", "-N", "n2")
        until(idle)
        yield Cluster(folder, prefix)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)
        log.close()
        shutil.rmtree(folder)


@dataclasses.dataclass(frozen=True)
class Case:
    """Job whose processes print their environments.

    Attributes:
      table: the roles; the test sets `command` and the endpoints.
      endpoints: the endpoints that the processes must derive.
      on: node of each process, servers first.
      nodes: argument of `emit_slurm`.
      fails: node whose process fails.
    """

    mode: str
    trainers: int
    pservers: int | None
    endpoints: tuple[str, ...]
    on: tuple[str, ...]
    nodes: int | None = None
    fails: str = ""

    def table(self, *command: str) -> RoleTable:
        return role_table(self.mode, self.trainers, self.pservers, command)


CASES = [
    Case("pserver", 1, 1, ("n1:6174",), ("n1", "n2"), fails="n2"),
    Case("nccl2", 2, None, ("n1:6174", "n2:6174"), ("n1", "n2")),
    Case("pserver", 2, 2, ("127.0.0.1:6174", "127.0.0.1:6175"), ("n1",) * 4, nodes=1),
    Case("pserver", 2, 1, ("n1:6174",), ("n1", "n1", "n2"), nodes=2),
]
# text with characters that a shell or Slurm would interpret
WORDS = ["it's", "a b", '%t "$HOME" \\']


def submit(cluster: Cluster, folder: Path, text: str, **variables: str) -> subprocess.Popen[bytes]:
    """Submit a file; the returned process ends with the job."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS")}
    env |= {"SLURM_CONF": str(cluster.folder / "slurm.conf"), **variables}
    (folder / "job.sbatch").write_text(text)
    return subprocess.Popen(
        [*cluster.prefix, "sbatch", "--wait", "-o", "out", "job.sbatch"], env=env, cwd=folder
    )


def test_slurm_runs_the_emitted_files(cluster: Cluster, tmp_path: Path) -> None:
    """Submit all jobs at once, because `sbatch --wait` checks only every ten seconds if a job has
    ended."""
    jobs = []
    for i, case in enumerate(CASES):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "say.py").write_text(SAY)
        command = [sys.executable, str(folder / "say.py"), str(folder), case.fails, *WORDS]
        text = emit_slurm(case.table(*command), nodes=case.nodes)
        jobs.append((folder, case, submit(cluster, folder, text)))
    codes = [job.wait(100) for *_, job in jobs]

    for (folder, case, _), code in zip(jobs, codes, strict=True):
        out = (folder / "out").read_text()
        # srun exits with the highest code, which may belong to a process that srun itself has ended
        assert code in ((7, 128 + signal.SIGTERM) if case.fails else (0,)), out
        assert not case.fails or f"{case.fails}: task 0: Exited with exit code 7" in out, out
        said = [json.loads(p.read_text()) for p in folder.glob("*.json")]
        assert all(s["argv"] == WORDS for s in said)
        got = {Role.from_env(s["env"]): s["env"] for s in said}
        wanted = [e.role for e in case.table().with_endpoints(case.endpoints)]
        assert set(got) == set(wanted) and len(said) == len(wanted)
        assert tuple(got[role]["SLURMD_NODENAME"] for role in wanted) == case.on
        assert len({e["DTRANS_TOKEN"] for e in got.values()}) == 1
        remote = {e.get("DTRANS_ALLOW_REMOTE") for e in got.values()}
        assert remote == {None if case.nodes == 1 else "1"}


TRAININGS = [
    pytest.param(Case("pserver", 1, 1, (), ("n1", "n2")), id="pserver"),
    pytest.param(Case("nccl2", 2, None, (), ("n1", "n2")), id="nccl2", marks=pytest.mark.rotated),
    pytest.param(
        Case("pserver", 2, 2, (), ("n1", "n2") * 2, nodes=2),
        id="multi-prog",
        marks=pytest.mark.rotated,
    ),
]


@pytest.mark.skipif(bool(NO_ADDRESSES), reason=NO_ADDRESSES or "nodes have addresses")
@pytest.mark.parametrize("case", TRAININGS)
def test_slurm_trains(cluster: Cluster, tmp_path: Path, case: Case) -> None:
    """Each node has an address, so all endpoints have the same port. Connections are encrypted."""
    saved = tmp_path / "params.npz"
    command = (sys.executable, str(SUPPORT / "scheduled_training.py"), str(saved))
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    text = emit_slurm(case.table(*command), nodes=case.nodes)
    code = submit(cluster, tmp_path, text, **variables).wait(240)
    assert code == 0, (tmp_path / "out").read_text()
    with np.load(saved) as found:
        tree_close(dict(found), plain(), 1e-6)
