"""Emitted `sbatch` files on Slurm itself: two virtual nodes on this machine."""

from __future__ import annotations

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

import pytest

from dtrans.hosts.emit_slurm import emit_slurm
from dtrans.hosts.role_table import role_table
from dtrans.run.distributed.role import Role


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
MISSING = [p for p in PROGRAMS if shutil.which(p) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm start as root only"),
]

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
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""

# srun ends all tasks as soon as one fails, also those that have not started: the failing one is the last
SAY = """
import json, os, sys, time
folder, node, fails = sys.argv[1], os.environ["SLURMD_NODENAME"], sys.argv[2:]
with open(os.path.join(folder, node + ".tmp"), "w") as f:
    json.dump(dict(os.environ), f)
os.replace(f.name, os.path.join(folder, node + ".json"))
while fails == [node] and not os.path.exists(os.path.join(folder, "n1.json")):
    time.sleep(0.05)
sys.exit(7 if fails == [node] else 0)
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """Two nodes, n1 and n2, and the folder of their files; SLURM_CONF is `slurm.conf` there."""
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
        started.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log))

    def until(ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not ready():
            if time.monotonic() > end or any(p.poll() is not None for p in started):
                pytest.fail((folder / "daemons.log").read_text()[-3000:])
            time.sleep(0.1)

    def idle() -> bool:
        command = ["sinfo", "-h", "-o", "%t%D"]
        return subprocess.run(command, env=env, capture_output=True, text=True).stdout == "idle2\n"

    try:
        start("munged", "--foreground", "--force", *munge)
        until((folder / "munge.sock").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n1")
        start("slurmd", "-D", "-N", "n2")
        until(idle)
        yield folder
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)
        log.close()
        shutil.rmtree(folder)


CASES = [("pserver", "n2"), ("nccl2", "")]  # which node fails


def test_slurm_runs_the_emitted_files(cluster: Path, tmp_path: Path) -> None:
    """Submit all jobs at once: `sbatch --wait` asks every ten seconds whether a job has ended."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS")}
    env["SLURM_CONF"] = str(cluster / "slurm.conf")
    jobs = []
    for mode, fails in CASES:
        folder = tmp_path / f"{mode}{fails}"
        folder.mkdir()
        (folder / "say.py").write_text(SAY)
        command = [sys.executable, str(folder / "say.py"), str(folder), *([fails] if fails else [])]
        if mode == "pserver":
            table = role_table(mode, 1, 1, command)
        else:
            table = role_table(mode, 2, None, command)
        (folder / "job.sbatch").write_text(emit_slurm(table))
        submit = ["sbatch", "--wait", "-o", "out", "job.sbatch"]
        jobs.append((folder, table, fails, subprocess.Popen(submit, env=env, cwd=folder)))
    codes = [job.wait(100) for *_, job in jobs]

    for (folder, table, fails, _), code in zip(jobs, codes, strict=True):
        out = (folder / "out").read_text()
        # srun ends with the highest code, which may be that of a process that it has ended itself
        assert code in ((7, 128 + signal.SIGTERM) if fails else (0,)), out
        assert not fails or f"{fails}: task 0: Exited with exit code 7" in out, out
        got = [json.loads((folder / f"{n}.json").read_text()) for n in ("n1", "n2")]
        names = ["n1:6174"] if table.mode == "pserver" else ["n1:6174", "n2:6174"]
        wanted = [e.role for e in table.with_endpoints(names)]
        assert [Role.from_env(e) for e in got] == wanted
        assert len({e["DTRANS_TOKEN"] for e in got}) == 1
        assert all(e["DTRANS_ALLOW_REMOTE"] == "1" for e in got)
