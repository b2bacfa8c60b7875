"""Kill or stop processes of jobs at random moments; compare results with an undisturbed job.

    python benchmarks/chaos.py --rounds 100              two trainers and two parameter servers
    python benchmarks/chaos.py --rounds 100 --replicas 1 the same, with replicas of the servers
    python benchmarks/chaos.py --rounds 20 --mode nccl2  two trainers with collectives
    python benchmarks/chaos.py --every 15 --seconds 3600 goodput of one job with a kill every 15 s
    python benchmarks/chaos.py --every 15 --mode restart the same, where all roles start again

A round runs one job under `dtrans launch --restarts`. At a random moment, one process (a role or
the launcher) gets SIGKILL, or SIGSTOP and later SIGCONT. The moment is before the first step in
half of the rounds, and a random step in the others. The script starts a killed launcher again with
the same command. A job with parameter servers writes snapshots of its state
(`docs/snapshots.md`), and the launcher restarts only the killed process. At the end, the parameters
and the optimizer state of the last checkpoint must have the bits of an undisturbed job.

With `--every`, the script prints the goodput of one job: the number of steps, times the seconds of
a step in an undisturbed job, divided by the seconds of the job. The undisturbed job runs before and
after the other one, and one line uses the mean of both. The speed of the machine may change during
the job, so the last line uses the steps of the job itself, in the last quarter of the time between
two kills. The script also prints the seconds from a kill to the next step of trainer 0, and the
processor seconds that a restarted trainer uses until its first step. Processor seconds depend less
on the load of the machine.

Source: torchft's experiment with a kill every 15 seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import dtrans


EVERY = 20  # steps between two checkpoints, or snapshots
LIMIT = 300.0  # seconds that a job may take
MEASURED = 20.0  # seconds in which the steps of an undisturbed job are counted
REPORT = 300.0  # seconds between two lines about the goodput until then
LAUNCHER = "launcher"
RESTARTED = re.compile("all roles start again|all roles go back to step")


@dataclasses.dataclass(frozen=True)
class Kind:
    """Options of a job.

    Attributes:
      mode: `pserver` (parameter servers with snapshots), `restart` (parameter servers whose job
        starts again from a checkpoint), or `nccl2` (the same with collectives).
      blocks: number of transformer blocks in the model.
      spares: number of spares of the launcher.
      replicas: number of replicas of each server.
    """

    mode: str
    blocks: int = 0
    spares: int = 0
    replicas: int = 0


# -- a role of a job -------------------------------------------------------------------------------


def loss(params, x, y):
    x = jnp.tanh(x @ params["w1"])
    for block in params["blocks"]:
        x = transformer_block(block, x)
    return jnp.mean((x @ params["w2"] - y) ** 2)


def transformer_block(params, x):
    """Apply a block of a transformer to rows, each a sequence of 8 tokens with 4 features."""
    tokens = x.reshape(-1, 8, 4)
    queries, keys, values = (tokens @ params[name] for name in "qkv")
    weights = jax.nn.softmax(queries @ keys.swapaxes(-1, -2) / 2, axis=-1)
    tokens = tokens + weights @ values
    tokens = tokens + jax.nn.gelu(tokens @ params["up"]) @ params["down"]
    return tokens.reshape(x.shape)


def init(key, blocks: int = 0):
    params = {"w1": jax.random.normal(key, (16, 32)), "w2": jax.random.normal(key, (32, 1))}
    block = {"q": (4, 4), "k": (4, 4), "v": (4, 4), "up": (4, 16), "down": (16, 4)}
    params["blocks"] = []
    for _ in range(blocks):
        params["blocks"].append({k: 0.1 * jax.random.normal(key, s) for k, s in block.items()})
    return params, optax.adam(1e-3).init(params)


def batch(step):
    """Return the batch of a step, which depends only on the step's number."""
    key = jax.random.fold_in(jax.random.key(1), step)
    return jax.random.normal(key, (8, 16)), jnp.ones((8, 1))


def traced(blocks: int = 0):
    """Return the programs of the step and of the init."""
    key, startup = jax.random.key(0), functools.partial(init, blocks=blocks)
    step = dtrans.make_train_step(loss, optax.adam(1e-3))
    return dtrans.trace(step, *jax.eval_shape(startup, key), *batch(0)), dtrans.trace(startup, key)


def work(kind: Kind, steps: int) -> None:
    """Run one role of the job, in the current folder."""
    cluster = dtrans.connect() if kind.mode == "nccl2" else None
    main, startup = traced(kind.blocks)  # trace before `from_env`, where a spare waits for its role
    spent = time.process_time() if "DTRANS_SPARE" in os.environ else 0.0
    role = dtrans.Role.from_env()
    Path(f"pid-{role.name}").write_text(str(os.getpid()))
    if cluster is not None:
        plan = dtrans.nccl2(main, startup, trainers=role.trainers)
    else:
        plan = dtrans.pserver(main, startup, pservers=role.pservers, trainers=role.trainers)
    with plan.on_cluster() as job:
        if kind.mode != "pserver":
            run_from_checkpoints(kind.mode, job, role, steps)
            return
        state = job.init(jax.random.key(0))
        if role.is_pserver:
            job.serve(
                state, checkpoints="ckpt", snapshots=dtrans.Snapshots(EVERY, replicas=kind.replicas)
            )
            return
        shards, is_first = lambda step: job.shard_batch(*batch(step)), True
        for _, value in job.steps(state, shards, stop=steps):
            jax.block_until_ready(value)
            tell_step(role, job.step_count)
            if is_first:
                with Path("starts").open("a") as file:
                    file.write(f"{time.process_time() - spent}\n")
                is_first = False
        job.save(str(steps))


def run_from_checkpoints(mode: str, job, role, steps: int) -> None:
    """Run a role of a job that starts again from its newest checkpoint."""
    path = dtrans.checkpoint.latest("ckpt")
    first = int(path.name) if path else 0
    if path is None or (mode == "restart" and not role.is_pserver):
        state = job.init(jax.random.key(0))  # with servers, a trainer receives their parameters
    else:
        state = dtrans.checkpoint.restore(path, job)
    if role.is_pserver:
        job.serve(state, checkpoints="ckpt")
        return
    for step in range(first, steps):
        state, value = job.step(state, *job.shard_batch(*batch(step)))
        jax.block_until_ready(value)
        tell_step(role, step + 1)
        if (step + 1) % EVERY == 0:
            if mode == "restart":
                job.save(str(step + 1))
            else:
                dtrans.checkpoint.save(f"ckpt/{step + 1}", job, state)


def tell_step(role, step: int) -> None:
    """Write the number of steps to the file `step`, if this is trainer 0."""
    if role.trainer_id == 0:
        Path("step.new").write_text(str(step))
        Path("step.new").rename("step")  # rename the file, so that no reader sees an empty file


# -- a job -----------------------------------------------------------------------------------------


class Job:
    """Job under the launcher, in a separate folder."""

    def __init__(self, kind: Kind, steps: int, folder: Path, restarts: int) -> None:
        self.folder, mode = folder, kind.mode
        options = ["--restarts", str(restarts), "--trainers", "2"]
        if mode == "nccl2":
            options += ["--mode", "nccl2"]
        else:
            options += ["--pservers", "2", "--spares", str(kind.spares)]
            options += ["--snapshots", "snapshots"] * (mode == "pserver")
        script = [__file__, "--work", mode, "--steps", str(steps), "--blocks", str(kind.blocks)]
        script += ["--replicas", str(kind.replicas)]
        self._command = [sys.executable, "-m", "dtrans", "launch", *options, *script]
        trainers = ["trainer 0", "trainer 1"]
        servers = [] if mode == "nccl2" else ["pserver 0", "pserver 1"]
        self.roles = [*trainers, *servers]
        self.begun = time.monotonic()
        self.start()

    def start(self) -> None:
        """Start the launcher for the first time, or again after a kill."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS_")}
        plain["JAX_PLATFORMS"] = "cpu"
        with (self.folder / "log").open("ab") as log:
            self.launcher = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env=plain,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pid(self, who: str) -> int | None:
        """Return the id of a process, or None if the process does not run."""
        if who == LAUNCHER:
            return self.launcher.pid
        path = self.folder / f"pid-{who}"
        pid = int(path.read_text() or 0) if path.exists() else 0
        return pid if pid and Path(f"/proc/{pid}").exists() else None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def text(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def step(self) -> int:
        path = self.folder / "step"
        return int(path.read_text() or 0) if path.exists() else 0

    @property
    def starts(self) -> list[float]:
        """Processor seconds of each start of a trainer, until its first step.

        For a spare, count from the moment when the spare gets its role.
        """
        path = self.folder / "starts"
        return [float(x) for x in path.read_text().split()] if path.exists() else []

    @property
    def restarts(self) -> int:
        return len(RESTARTED.findall(self.text))

    def wait_for_step(self, restarts: int) -> float:
        """Wait for a restart, and then for a step of trainer 0; return the seconds waited.

        Args:
          restarts: number of restarts before the kill.
        """
        begun, path = time.time(), self.folder / "step"
        limit, restarted = begun + LIMIT, None
        while time.time() < limit and self.launcher.poll() is None:
            # a step that ends between the kill and the restart does not count
            if restarted is None and self.restarts > restarts:
                restarted = time.time()
            if restarted is not None and path.exists() and path.stat().st_mtime > restarted:
                break
            time.sleep(0.01)
        return time.time() - begun

    @property
    def has_ended_well(self) -> bool:
        """True if a job with snapshots has ended, whatever happened to its launcher afterwards."""
        snapshots = self.folder / "snapshots"
        return snapshots.exists() and not (snapshots / "generation.json").exists() and self.step > 0

    def wait(self) -> int:
        """Wait for the launcher; return its exit code."""
        return self.launcher.wait(LIMIT)

    def orphans(self) -> list[str]:
        """Return the roles that still run 10 s after the end of the launcher."""
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            left = [who for who in self.roles if self.pid(who) is not None]
            if not left:
                return []
            time.sleep(0.05)
        return left

    def state(self, steps: int) -> list[bytes]:
        """Return the bytes of each array of the last checkpoint; empty if it does not exist."""
        path = dtrans.checkpoint.latest(self.folder / "ckpt")
        if path is None or path.name != str(steps):
            return []
        found = dtrans.checkpoint.load(path, traced()[0])
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]

    def close(self) -> None:
        """Continue stopped processes, kill the launcher, and wait until the roles have ended.

        A role that still runs could write into the folder while it is removed.
        """
        for pid in filter(None, map(self.pid, (LAUNCHER, *self.roles))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.launcher.poll() is None:
            self.launcher.kill()
        self.launcher.wait()
        self.orphans()


# -- rounds ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Round:
    """The kill or stop of a round, and its outcome.

    Attributes:
      pause: seconds between SIGSTOP and SIGCONT; 0 for SIGKILL.
      after: trainer 0 has completed this number of steps; 0 while the job starts.
      at: seconds from the start of the job, if `after` is 0.
      was_struck: False if the job ended before this moment.
    """

    number: int
    victim: str
    pause: float
    after: int
    at: float
    was_struck: bool = False
    seconds: float = 0.0
    restarts: int = 0
    wrong: str = ""

    def __str__(self) -> str:
        what = f"SIGSTOP for {self.pause:.1f} s" if self.pause else "SIGKILL"
        moment = f"after step {self.after}" if self.after else f"at {self.at:.1f} s"
        head = f"{self.number:4d}  {self.victim:9s}  {what:18s} {moment:14s}"
        outcome = self.wrong or ("equal" if self.was_struck else "ended before, not counted")
        return f"{head}  {self.restarts} restarts, {self.seconds:5.1f} s  {outcome}"


def strike(job: Job, found: Round) -> None:
    """Wait for the moment of a round, then kill or stop the victim."""
    is_due = lambda: job.step >= found.after if found.after else job.seconds >= found.at
    while not is_due() or job.pid(found.victim) is None:
        if job.launcher.poll() is not None:
            return
        time.sleep(0.01)
    pid = job.pid(found.victim)
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(pid, signal.SIGSTOP if found.pause else signal.SIGKILL)
        found.was_struck = True
        if found.pause:
            time.sleep(found.pause)
            os.kill(pid, signal.SIGCONT)
    if found.victim == LAUNCHER and not found.pause:
        job.wait()
        orphans = job.orphans()
        if orphans:
            found.wrong = f"{', '.join(orphans)} outlived the launcher"
        if not job.has_ended_well:
            job.start()


def run_round(kind: Kind, steps: int, found: Round, expected: list[bytes]) -> Round:
    """Run a job, kill or stop its victim, and compare the result with `expected`."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        job = Job(kind, steps, Path(folder), restarts=3)
        try:
            strike(job, found)
            code = 0 if job.has_ended_well else job.wait()
            found.restarts = job.restarts
            if code:
                errors = re.findall(r"dtrans\.\S*Error.*|^\S*Error.*", job.text, re.M)
                found.wrong = found.wrong or f"exit code {code}: {(errors or [''])[-1][:300]}"
            elif job.state(steps) != expected:
                found.wrong = found.wrong or "another result"
        except subprocess.TimeoutExpired:
            found.wrong = f"did not end in {LIMIT:.0f} s"
        finally:
            found.seconds = job.seconds
            job.close()
    return found


def seconds_of_step(kind: Kind) -> float:
    """Return the seconds of a step of an undisturbed job, after its first 500 steps."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        job = Job(dataclasses.replace(kind, spares=0), 10**9, Path(folder), restarts=1)
        try:
            while job.step < 500 and job.seconds < LIMIT:
                time.sleep(0.01)
            first, begun = job.step, time.monotonic()
            time.sleep(MEASURED)
            return (time.monotonic() - begun) / (job.step - first)
        finally:
            job.close()


def undisturbed(kind: Kind, steps: int) -> tuple[list[bytes], float, float]:
    """Run an undisturbed job.

    Returns:
      The arrays of its last checkpoint, its seconds, and its seconds until the first step.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        job = Job(dataclasses.replace(kind, spares=0), steps, Path(folder), restarts=1)
        try:
            while not job.step and job.launcher.poll() is None:
                time.sleep(0.01)
            until_first = job.seconds
            assert job.wait() == 0, job.text
            expected, seconds = job.state(steps), job.seconds
            assert expected, "the undisturbed job has no checkpoint of its last step"
            return expected, seconds, until_first
        finally:
            job.close()


def rounds(kind: Kind, count: int, seed: int, steps: int, pause: float) -> bool:
    """Run rounds; return True if all end with the result of an undisturbed job.

    A round does not count if its job ends before the kill or stop.
    """
    expected, seconds, until_first = undisturbed(kind, steps)
    load = os.getloadavg()[0]
    print(
        f"undisturbed: {seconds:.1f} s, {until_first:.1f} s until the first step (load {load:.1f})",
        flush=True,
    )
    wrong = struck = 0
    for number in itertools.count(seed):
        if struck == count:
            break
        draw = random.Random(number)
        roles = ["trainer 0", "trainer 1"]
        roles += ["pserver 0", "pserver 1"] if kind.mode != "nccl2" else []
        victim, is_killed = draw.choice([*roles, LAUNCHER]), draw.random() < 0.6
        stopped = 0.0 if is_killed else draw.uniform(0.1, pause)
        at, after = draw.uniform(0.0, until_first), draw.choice([0, draw.randint(1, steps)])
        found = run_round(kind, steps, Round(number, victim, stopped, after, at), expected)
        wrong += bool(found.wrong)
        struck += found.was_struck or bool(found.wrong)
        print(found, flush=True)
    print(f"{count - wrong} of {count} rounds ended with the bits of the undisturbed job")
    return not wrong


def goodput(kind: Kind, every: float, seconds: float) -> None:
    """Kill the roles of one job in turn, and print its goodput."""
    of_step = seconds_of_step(kind)
    pauses, kills, report = [], 0, REPORT  # pauses: seconds from a kill to the next step
    late = []  # seconds of a step in the last quarter of the time between two kills
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        job = Job(kind, 10**9, Path(folder), restarts=10**6)
        try:
            while not job.step and job.launcher.poll() is None:
                time.sleep(0.01)
            next_kill = job.seconds + every
            while job.seconds < seconds and job.launcher.poll() is None:
                time.sleep(max(0.0, min(next_kill, seconds) - every / 4 - job.seconds))
                counted, begun = job.step, job.seconds
                time.sleep(max(0.0, min(next_kill, seconds) - job.seconds))
                if job.step > counted:
                    late.append((job.seconds - begun) / (job.step - counted))
                next_kill += every
                pid = job.pid(job.roles[kills % len(job.roles)])
                if pid is not None and job.seconds < seconds:
                    restarts = job.restarts
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                    pauses.append(job.wait_for_step(restarts))
                if job.seconds > report:
                    print_goodput(job, kills, of_step)
                    report += REPORT
            print_goodput(job, kills, of_step)
            steps, lasted = job.step, job.seconds
            print(
                f"{job.restarts} restarts; from a kill to the next step: median "
                f"{np.median(pauses):.1f} s, longest {max(pauses):.1f} s"
            )
            starts = job.starts[2:]  # the first two entries are the first starts of both trainers
            if starts:
                print(
                    f"{len(starts)} restarts of trainers, each with {np.median(starts):.2f} "
                    "processor seconds until the first step (median)"
                )
        finally:
            job.close()
    after = seconds_of_step(kind)
    share = steps * (of_step + after) / 2 / lasted
    print(
        f"a step of the undisturbed job: {of_step * 1e3:.2f} ms before, {after * 1e3:.2f} ms "
        f"after; goodput with their mean: {share:.1%}"
    )
    if late:
        of_late = float(np.median(late))
        share = steps * of_late / lasted
        print(
            f"a step of this job shortly before a kill: {of_late * 1e3:.2f} ms (median); goodput "
            f"with it: {share:.1%}"
        )


def print_goodput(job: Job, kills: int, of_step: float) -> None:
    """Print the goodput of a job from its start until now, with the load of the machine."""
    share = job.step * of_step / job.seconds
    print(
        f"{kills} kills in {job.seconds:.0f} s, {job.step} steps of {of_step * 1e3:.2f} "
        f"ms: goodput {share:.1%} (load {os.getloadavg()[0]:.1f})",
        flush=True,
    )


def main(
    rounds_: int = typer.Option(100, "--rounds", help="Number of rounds."),
    seed: int = typer.Option(0, help="Seed of the first round."),
    mode: str = typer.Option("pserver", help="pserver, restart or nccl2."),
    steps: int = typer.Option(400, help="Number of steps of each job."),
    pause: float = typer.Option(60.0, help="Longest time between SIGSTOP and SIGCONT, in seconds."),
    every: float = typer.Option(0.0, help="Measure goodput: seconds between two kills."),
    seconds: float = typer.Option(3600.0, help="Duration of the measurement of goodput."),
    blocks: int = typer.Option(0, help="Number of transformer blocks in the model, for goodput."),
    spares: int = typer.Option(0, help="Number of spares of each job."),
    replicas: int = typer.Option(0, help="Number of replicas of each server: 0 or 1."),
    work_: str = typer.Option("", "--work", hidden=True),
) -> None:
    """Kill or stop processes of jobs, and compare their results with an undisturbed job."""
    kind = Kind(work_ or mode, blocks, spares, replicas)  # `--work` has the mode of the job
    if work_:
        work(kind, steps)
    elif every:
        goodput(kind, every, seconds)
    elif not rounds(kind, rounds_, seed, steps, pause):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
