"""Cost of the failure of one process, in each mode: seconds, repeated steps, and bits.

    python benchmarks/kill_matrix.py                        print a table
    python benchmarks/kill_matrix.py docs/reliability.md    also write the table into this page

Each row has a mode, and a process that gets SIGKILL before step 26. Columns:

    others notice       without a launcher: seconds until every other process has logged the failure
    others end          without a launcher: seconds until every other process has exited
    with checkpoints    `dtrans launch --restarts 1`, and a checkpoint every 10 steps: seconds until
                        all trainers take steps again, and the largest number of steps that a
                        trainer repeats
    with snapshots           the same with a snapshot of the servers' state every 10 steps
    with a spare        the same with a snapshot every 10 steps, and with `--spares 1`
    bits                "equal" if the last checkpoints have the bits of an undisturbed job of
                        the same kind

The jobs have two trainers, and two parameter servers or two stages, on this host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans
from dtrans.endpoints import ReservedEndpoints
from dtrans.errors import CheckpointWarning
from dtrans.run.distributed.role import Role, roles_of, trainer_roles
from dtrans.run.net.generation_folder import GenerationFolder


STEPS, FAILURE, EVERY = (
    40,
    25,
    10,
)  # numbers of steps: of a job, before the failure, and between two checkpoints
LIMIT = 120.0  # longest wait for an event, in seconds
VICTIMS = {
    "sync": ("trainer 1", "pserver 1"),
    "sync, replicas": ("trainer 1", "pserver 1"),
    "async": ("trainer 1", "pserver 1"),
    "nccl2": ("trainer 1",),
    "sharding": ("trainer 1",),
    "pipeline": ("trainer 1",),
}
SYNC = ("sync", "sync, replicas")
SERVERS = (*SYNC, "async")
# lines in which a process logs that another process has ended
NOTICES = re.compile(
    r"has ended|went away|continues without|ended without a goodbye|PeerError|detected fatal"
)
BEGIN, END = "<!-- kill matrix -->", "<!-- end of the kill matrix -->"
HEAD = (
    "| mode | lost | others notice | others end | with checkpoints | with snapshots | with a spare "
    "| bits |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


# -- a process of a job ----------------------------------------------------------------------------


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def init(key):
    params = {"w1": jax.random.normal(key, (16, 32)), "w2": jax.random.normal(key, (32, 1))}
    return params, optax.adam(1e-3).init(params)


def batch(step):
    """Return the batch of a step. Before step FAILURE, wait until a process was killed."""
    if step == FAILURE:
        print("waits", flush=True)
        while not Path("go").exists():
            time.sleep(0.01)
    key = jax.random.fold_in(jax.random.key(1), step)
    return jax.random.normal(key, (8, 16)), jnp.ones((8, 1))


def traced():
    """Return the programs of the step and of the init."""
    key = jax.random.key(0)
    shapes = jax.ShapeDtypeStruct((8, 16), float), jax.ShapeDtypeStruct((8, 1), float)
    step = dtrans.make_train_step(loss, optax.adam(1e-3))
    return dtrans.trace(step, *jax.eval_shape(init, key), *shapes), dtrans.trace(init, key)


def work(mode: str, kind: str) -> None:
    """Run one role, and print a line for each step.

    Args:
      mode: the mode.
      kind: "snapshots" to write snapshots; else the job writes checkpoints.
    """
    cluster = None if mode in SERVERS else dtrans.connect(deadline=30)
    main, startup = traced()
    if "DTRANS_SPARE" in os.environ:
        print("spare", flush=True)
    role = dtrans.Role.from_env()
    print(f"pid {os.getpid()}", flush=True)
    if mode == "nccl2":
        plan: Any = dtrans.nccl2(main, startup, trainers=role.trainers)
    elif mode == "sharding":
        plan = dtrans.sharding(main, startup, degree=role.trainers)
    elif mode == "pipeline":
        plan = dtrans.pipeline(main, startup, num_stages=role.trainers, num_micro_batch=2)
    else:
        way = dtrans.Async() if mode == "async" else dtrans.Sync()
        servers, trainers = role.pservers, role.trainers
        plan = dtrans.pserver(main, startup, pservers=servers, trainers=trainers, mode=way)
    path = None if kind == "snapshots" else dtrans.checkpoint.latest("ckpt")
    with plan.on_cluster() as job:
        state = job.init(jax.random.key(0))
        first = 0 if path is None else int(path.name)
        if path is not None and not (cluster is None and role.is_trainer):
            state = dtrans.checkpoint.restore(path, job)
        if cluster is not None:
            train_collectively(job, state, first)
        elif role.is_trainer:
            train_with_servers(job, state, first, kind)
        elif kind == "snapshots":
            replicas = int(mode == "sync, replicas")
            snapshots = dtrans.Snapshots(EVERY, replicas=replicas)
            job.serve(state, checkpoints="ckpt", snapshots=snapshots, on_failure="drop")
        else:
            job.serve(state, checkpoints="ckpt")


def train_collectively(job, state, first: int) -> None:
    for step in range(first, STEPS):
        state, value = job.step(state, *job.shard_batch(*batch(step)))
        jax.block_until_ready(value)
        print(f"step {step + 1}", flush=True)
        if (step + 1) % EVERY == 0:
            dtrans.checkpoint.save(f"ckpt/{step + 1}", job, state)


def train_with_servers(job, state, first: int, kind: str) -> None:
    shards = lambda step: job.shard_batch(*batch(step))
    for _, value in job.steps(state, shards, start=first, stop=STEPS):
        jax.block_until_ready(value)
        step = job.step_count + (first if kind != "snapshots" else 0)
        print(f"step {step}", flush=True)
        if step % EVERY == 0 and (kind != "snapshots" or step == STEPS):
            job.save(str(step))


# -- a job -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """Line that a process printed, with its time in seconds."""

    at: float
    role: str
    text: str


class Job:
    """Job in a separate folder, and the lines that its processes have printed.

    Args:
      mode: the mode.
      kind: "alone" without a launcher, else "checkpoints", "snapshots" or "spare".
      folder: the folder.
    """

    def __init__(self, mode: str, kind: str, folder: Path) -> None:
        self.folder, self.lines = folder, list[Line]()
        self.ended: dict[str, float] = {}  # role -> time of its end
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._changed = threading.Condition()
        script = [
            __file__,
            "--work",
            mode,
            "snapshots" if kind in ("snapshots", "spare") else "checkpoints",
        ]
        if kind == "alone":
            for role in roles(mode):
                self._start(role.name, [sys.executable, *script], role.environment())
            return
        options = ["--pservers", "2"] if mode in SERVERS else ["--mode", "nccl2"]
        if kind in ("snapshots", "spare"):
            options += ["--snapshots", "snapshots", "--spares", str(int(kind == "spare"))]
        launch = ["-m", "dtrans", "launch", "--restarts", "1", "--trainers", "2", *options]
        self._start("launcher", [sys.executable, *launch, *script], {})

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS_")}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=plain | env | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            role = re.match(r"\[([^]]+)\] ", text) if name == "launcher" else None
            with self._changed:
                words = text.strip().removeprefix(role[0] if role else "")
                self.lines.append(Line(time.monotonic(), role[1] if role else name, words))
                self._changed.notify_all()
        process.wait()
        with self._changed:
            self.ended[name] = time.monotonic()
            self._changed.notify_all()

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until a condition on `lines` and `ended` is true; return its value.

        Raises:
          RuntimeError: the condition has not become true.
        """
        with self._changed:
            found = self._changed.wait_for(condition, LIMIT)
        if not found:
            output = "\n".join(f"{line.role}: {line.text}" for line in self.lines)
            raise RuntimeError(f"waited in vain for {what}:\n{output}")
        return found

    def last(self, role: str, pattern: str, since: float = 0.0) -> re.Match[str] | None:
        """Return the last line of a role that matches a pattern, or None."""
        found = None
        for line in self.lines:
            if line.role == role and line.at > since:
                found = re.fullmatch(pattern, line.text) or found
        return found

    def first_at(self, role: str, pattern: re.Pattern[str], since: float) -> float | None:
        """Return the time of a role's first line after `since` with the pattern, or None."""
        for line in self.lines:
            if line.role == role and line.at > since and pattern.search(line.text):
                return line.at
        return None

    def kill(self, victim: str, *, with_spare: bool = False, snapshots: bool = False) -> float:
        """Kill a process while both trainers wait, then end the wait; return the time.

        Args:
          victim: the process.
          with_spare: True to wait for a spare first.
          snapshots: True to wait for the newest snapshot first, because steps are faster than its
            write.
        """
        waits = lambda: all(self.last(f"trainer {k}", "waits") for k in range(2))
        self.wait("trainers that wait", waits)
        if with_spare:
            self.wait("a spare", lambda: self.last("spare", "spare"))
        if snapshots:
            self._wait_for_snapshot()
        pid = self.last(victim, r"pid (\d+)")
        assert pid is not None
        begin = time.monotonic()
        os.kill(int(pid[1]), signal.SIGKILL)
        (self.folder / "go").touch()
        return begin

    def _wait_for_snapshot(self) -> None:
        folder, limit = GenerationFolder(self.folder / "snapshots"), time.monotonic() + LIMIT
        while folder.newest_snapshot(["pserver 0", "pserver 1"]) != FAILURE // EVERY * EVERY:
            if time.monotonic() > limit:
                raise RuntimeError("waited in vain for the newest snapshot")
            time.sleep(0.01)

    def state(self) -> list[bytes]:
        """Wait for the end of the job; return the bytes of all arrays of its last checkpoint."""
        self.wait("the end of the job", lambda: "launcher" in self.ended)
        path = dtrans.checkpoint.latest(self.folder / "ckpt")
        if path is None or path.name != str(STEPS):
            raise RuntimeError("\n".join(f"{x.role}: {x.text}" for x in self.lines))
        with warnings.catch_warnings():  # asynchronous servers have different counts of steps
            warnings.simplefilter("ignore", CheckpointWarning)
            found = dtrans.checkpoint.load(path, traced()[0])
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


ENDPOINTS = ReservedEndpoints()  # endpoints of all jobs, reserved until this process ends


def roles(mode: str) -> tuple[Role, ...]:
    if mode in SERVERS:
        return roles_of(2, ENDPOINTS.choose(2))
    return trainer_roles(ENDPOINTS.choose(2))


@contextlib.contextmanager
def job_of(mode: str, kind: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        job = Job(mode, kind, Path(folder))
        try:
            yield job
        finally:
            job.close()


# -- one row ---------------------------------------------------------------------------------------


def react(mode: str, victim: str) -> tuple[str, str]:
    """Return the seconds until the other processes notice a failure, and until they end."""
    with job_of(mode, "alone") as job:
        begin = job.kill(victim)
        continues = mode == "async" and victim.startswith("trainer")
        others = [name for name in job.processes if name != victim]
        asked = [name for name in others if not continues or name.startswith("pserver")]

        def noticed() -> list[float]:
            found = [job.first_at(name, NOTICES, begin) or job.ended.get(name) for name in asked]
            return [] if None in found else [x for x in found if x is not None]

        notice = max(job.wait("others that notice", noticed)) - begin
        if continues:
            return f"{notice:.1f} s", "continue"
        job.wait("the end", lambda: all(name in job.ended for name in others))
        return f"{notice:.1f} s", f"{max(job.ended[name] for name in others) - begin:.1f} s"


def restart(mode: str, victim: str, kind: str, expected: list[bytes]) -> tuple[str, bool]:
    """Return the cost of a failure under a launcher, and True if the bits are as expected."""
    with job_of(mode, kind) as job:
        has_snapshots = mode in SYNC and kind != "checkpoints"
        begin = job.kill(victim, with_spare=kind == "spare", snapshots=has_snapshots)
        step = re.compile(r"^step \d+$")
        again = re.compile("starts again|start again|takes its place")

        def steps() -> list[float]:
            restarted = job.first_at("launcher", again, begin)
            if restarted is None:
                return []
            # an asynchronous trainer may continue without a stop when another trainer fails
            found = [job.first_at(f"trainer {k}", step, restarted) for k in range(2)]
            return [] if None in found else [x for x in found if x is not None]

        seconds = max(job.wait("steps after the loss", steps)) - begin
        is_equal = job.state() == expected
        repeated = 0
        for k in range(2):
            texts = [x.text for x in job.lines if x.role == f"trainer {k}"]
            made = [text for text in texts if step.search(text)]
            repeated = max(repeated, len(made) - len(set(made)))
        return f"{seconds:.1f} s, {repeated} steps", is_equal


def undisturbed(mode: str, kind: str) -> list[bytes]:
    """Return the bytes of the last checkpoint of an undisturbed job."""
    with job_of(mode, kind) as job:
        (job.folder / "go").touch()
        return job.state()


def rows() -> Iterator[str]:
    """Yield the rows of the table."""
    for mode, victims in VICTIMS.items():
        kinds = ("checkpoints", "snapshots") if mode in SERVERS else ("checkpoints",)
        expected = {kind: undisturbed(mode, kind) for kind in kinds}
        for victim in victims:
            cells, equal = list(react(mode, victim)), []
            for kind in ("checkpoints", "snapshots", "spare"):
                if kind != "checkpoints" and mode not in SERVERS:
                    cells.append("-")
                    continue
                bits = expected["snapshots" if kind == "spare" else kind]
                cost, is_equal = restart(mode, victim, kind, bits)
                cells.append(cost)
                equal.append(is_equal)
            name = "a server" if victim.startswith("pserver") else "a trainer"
            bits = "equal" if all(equal) else "differ"
            yield f"| {mode} | {name} | {' | '.join(cells)} | {bits} |"


def main(page: Path | None) -> None:
    print(HEAD, flush=True)
    found, loads = [], [os.getloadavg()[0]]
    for row in rows():
        print(row, flush=True)
        found.append(row)
        loads.append(os.getloadavg()[0])
    low, high = min(loads), max(loads)
    end = f"Measured on {os.cpu_count()} cores, at a load of {low:.0f} to {high:.0f}."
    print(end)
    if page is not None:
        before, rest = page.read_text().split(BEGIN)
        table = "\n".join([HEAD, *found])
        page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{end}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
