"""Reactions of a job to the loss of one process: messages, times, and leftover files.

    python benchmarks/kill_matrix.py                        print a table
    python benchmarks/kill_matrix.py docs/reliability.md    also write the table into this page

Each row is a job of processes on this host. One process, `who`, gets a signal at the moment `when`.
`known`: seconds from the signal until every other process has logged that this process ended.
`ended`: seconds from the signal until every other process has exited. Asynchronous jobs continue
without a lost trainer, and their servers log this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from dtrans.endpoints import ReservedEndpoints


STEPS = 4000  # no job reaches this step
MOMENTS = {"before the first step": "ready", "between steps": "step 20"}
PATIENCE = 60.0  # longest wait for an event, in seconds
SILENCE = 3.5  # seconds without a message after which a process counts as lost
# lines in which a process logs that another process has ended
KNOWS = re.compile(
    r"has ended|has left|went away|continues without|ended without a "
    r"goodbye|PeerError|DeadlineError|detected fatal"
)
BEGIN, END = "<!-- kill matrix -->", "<!-- end of the kill matrix -->"


# -- a process of a job
# ------------------------------------------------------------------------------


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def init(key):
    params = {"w1": jax.random.normal(key, (16, 32)), "w2": jax.random.normal(key, (32, 1))}
    return params, optax.adam(1e-3).init(params)


def work(mode: str) -> None:
    """Run one role, and print a line for each step."""
    import dtrans

    cluster = None if mode in ("sync", "async") else dtrans.connect(deadline=30, patience=SILENCE)
    role = dtrans.Role.from_env()
    key = jax.random.key(0)
    x, y = jax.random.normal(key, (8, 16)), jnp.ones((8, 1))
    step = dtrans.make_train_step(loss, optax.adam(1e-3))
    main, startup = dtrans.trace(step, *jax.eval_shape(init, key), x, y), dtrans.trace(init, key)
    if mode == "nccl2":
        plan = dtrans.nccl2(main, startup, trainers=role.trainers)
    elif mode == "pipeline":
        plan = dtrans.pipeline(main, startup, num_stages=role.trainers, num_micro_batch=2)
    else:
        kind = dtrans.Sync() if mode == "sync" else dtrans.Async()
        plan = dtrans.pserver(
            main, startup, pservers=role.pservers, trainers=role.trainers, mode=kind
        )
    with plan.on_cluster(**({} if cluster else {"deadline": 60, "patience": SILENCE})) as job:
        state = job.init(key)
        print("ready", flush=True)
        if role.is_pserver:
            job.serve(state)
            return
        own = slice(
            role.trainer_id * 8 // role.trainers, (role.trainer_id + 1) * 8 // role.trainers
        )
        for i in range(STEPS):
            state, value = job.step(state, x[own], y[own])
            jax.block_until_ready(value)
            print(f"step {i}", flush=True)


# -- one row
# -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One row of the table: a job, its signal, and the reactions."""

    mode: str
    victim: str
    how: str
    moment: str
    known: str
    ended: str
    said: dict[str, str]
    left: str

    def __str__(self) -> str:
        said = "<br>".join(f"{name}: {what}" for name, what in self.said.items())
        seconds = f"{self.known} | {self.ended}"
        return (
            f"| {self.mode} | {self.victim} | {self.how} | {self.moment} | {seconds} | {said} "
            f"| {self.left} |"
        )


ENDPOINTS = ReservedEndpoints()  # endpoints of all jobs, reserved until this process ends


class Job:
    """Processes of a job in a separate folder, whose output is read line by line."""

    def __init__(self, mode: str, folder: Path) -> None:
        from dtrans.run.distributed.role import roles_of, trainer_roles

        pservers = mode in ("sync", "async")
        roles = roles_of(2, ENDPOINTS.choose(2)) if pservers else trainer_roles(ENDPOINTS.choose(2))
        plain = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS_")}
        self.folder = folder
        self.lines: dict[str, list[str]] = {}
        self.ended: dict[str, float] = {}
        self.knew: dict[str, float] = {}  # the time at which a process logged the loss of another
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}
        for role in roles:
            process = subprocess.Popen(
                [sys.executable, __file__, "--work", mode],
                env=plain | role.environment() | {"TMPDIR": str(folder), "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.processes[role.name] = process
            self.lines[role.name], self._rest[role.name] = [], b""
            self._selector.register(process.stdout, selectors.EVENT_READ, role.name)

    def follow(self, until) -> bool:
        """Read the output of all processes until `until()` is true.

        Return False if it is still false after `PATIENCE` seconds.
        """
        limit = time.monotonic() + PATIENCE
        while not until():
            left = limit - time.monotonic()
            if left <= 0 or not self._selector.get_map():
                return until()
            for ready, _ in self._selector.select(left):
                name, data = ready.data, os.read(ready.fd, 1 << 16)
                if not data:
                    self._selector.unregister(ready.fileobj)
                    self.processes[name].wait()
                    self.ended[name] = time.monotonic()
                *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
                self.lines[name] += [x.decode(errors="replace") for x in lines]
                if any(KNOWS.search(x) for x in self.lines[name][-len(lines) :]) and lines:
                    self.knew.setdefault(name, time.monotonic())
        return True

    def last_words(self, name: str) -> str:
        """Return the last error that a process printed, or the line that tells that it continues."""
        own = [
            x
            for x in self.lines[name]
            if not re.match(r"step \d+$|ready$", x) and x.strip(" @*")[:2] not in ("", "0x")
        ]
        named = [x for x in own if re.match(r"dtrans\.\S*Error\b|SystemExit", x)] or [
            x for x in own if "has ended" in x
        ]
        errors = [x for x in own if re.match(r"F\d{4} |(jax\.\S*Error|\w*Error)\b", x)]
        what = (named or [x for x in own if "continues" in x] or errors or own or [""])[-1]
        what = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", re.sub(r"^dtrans\.errors\.", "", what))
        code = self.processes[name].poll()
        return (what[:200] or "nothing") + ("" if code is None else f" (exit code {code})")

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def row(mode: str, victim: str, how: signal.Signals, moment: str) -> Row:
    """Run one job, send a signal to its process `victim`, and describe the reactions."""
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        job = Job(mode, Path(folder))
        try:
            others = [n for n in job.processes if n != victim]
            if victim.startswith("pserver"):  # servers print no steps
                told = lambda: all(
                    MOMENTS[moment] in job.lines[n] for n in others if n.startswith("trainer")
                )
            else:
                told = lambda: MOMENTS[moment] in job.lines[victim]
            if not job.follow(told):
                return Row(mode, victim, how.name, moment, "did not come to it", "", {}, "")
            begin = time.monotonic()
            job.processes[victim].send_signal(how)
            continues = mode == "async" and victim.startswith("trainer")
            survivors = [n for n in others if n.startswith("pserver")] if continues else others
            job.follow(lambda: all(n in job.knew or n in job.ended for n in survivors))
            since = lambda when: f"{max((when[n] for n in survivors), default=begin) - begin:.1f}"
            known = since(job.knew) if job.knew.keys() >= {*survivors} else "never"
            ended = f"over {PATIENCE:.0f}"
            if continues:
                ended = "continues"
            elif job.follow(lambda: all(n in job.ended for n in others)):
                ended = since(job.ended)
            said = {n: job.last_words(n) for n in others}
            if how == signal.SIGSTOP:
                job.processes[victim].kill()
            job.follow(lambda: len(job.ended) == len(job.processes) or continues)
            names = {re.sub(r"-.*", "-*", x) for x in os.listdir(folder)}
            left = "nothing"
            if names and not continues:  # roles that continue still use their folders
                left = f"{', '.join(sorted(names))}, which the next server removes"
            return Row(mode, victim, how.name, moment, known, ended, said, left)
        finally:
            job.close()


def rows() -> Iterator[Row]:
    """Yield the rows of the table, for all combinations."""
    servers, trainers = ("trainer 1", "pserver 1"), ("trainer 0", "trainer 1")
    victims = {"sync": servers, "async": servers, "nccl2": trainers, "pipeline": trainers}
    for mode in ("sync", "async", "nccl2", "pipeline"):
        for victim in victims[mode]:
            for how in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                for moment in MOMENTS:
                    if how == signal.SIGKILL or moment == "between steps":
                        yield row(mode, victim, how, moment)


HEAD = (
    "| mode | who | signal | when | known | ended | messages of the others | left behind |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def main(page: Path | None) -> None:
    print(f"{HEAD}   (load {os.getloadavg()[0]:.1f})", flush=True)
    made = []
    for found in rows():
        print(found, flush=True)
        made.append(str(found))
    if page is not None:
        text = page.read_text()
        before, rest = text.split(BEGIN)
        page.write_text(
            before + BEGIN + "\n\n" + "\n".join([HEAD, *made]) + "\n\n" + END + rest.split(END)[1]
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
