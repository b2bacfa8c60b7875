"""What a pipeline really does: how much it keeps, and what runs when.

    measured    a step, dispatched as ever, with a look at the buffers after each instruction
    timed       a step in which each device has a thread of its own, which waits for what it reads and what it makes

The clock of `timed` is that of the host. A device's thread begins a task when what it reads has
arrived, and holds it until what it makes is there: so times are those of the tasks, at the price of
dispatching nothing ahead.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import jax

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.task import Play, TimedTask
from dtrans.run.pipeline_parallel.instructions import Instruction, RunStage, StepProgram, Transfer
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.state import PipelineState


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a step kept.

    Attributes:
      peak: by device, the most micro-batches of which it kept something from their forward to their
        backward, counted once for each stage that it has.
      peak_bytes: by device, the most bytes of such values, and of values under way, that it had at
        a time.
    """

    peak: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def measured(
    job: PipelineJob, state: PipelineState, *batch: Any
) -> tuple[tuple[Any, ...], Measured]:
    """What `job.step` returns, and what it kept."""
    tape, env = job.ready(state, *batch)
    count = job.plan.options.num_stages
    peak, peak_bytes = [0] * count, [0] * count
    begun: set[tuple[int, int]] = set()
    passing = {slot: job.plan.device_of(stage) for slot, stage in tape.passing.items()}

    def look(ins: Instruction) -> None:
        if isinstance(ins, RunStage) and ins.task is not None and ins.task.kind == "F":
            begun.add((ins.task.stage, ins.task.micro))
        now, size = [0] * count, [0] * count
        for key in begun:
            now[job.plan.device_of(key[0])] += any(env[slot] is not None for slot in tape.kept[key])
        seen: set[int] = set()
        for slot, device in passing.items():
            x = env[slot]
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                size[device] += x.nbytes
        for d in range(count):
            peak[d], peak_bytes[d] = max(peak[d], now[d]), max(peak_bytes[d], size[d])

    job.play(tape, env, look)
    return job.answer(tape, env), Measured(tuple(peak), tuple(peak_bytes))


def timed(job: PipelineJob, state: PipelineState, *batch: Any) -> tuple[tuple[Any, ...], Play]:
    """What `job.step` returns, and when each task of its schedule ran, in seconds from the first.

    Raises:
      ConfigError: the job has stages in other processes.
    """
    if len(job.at.mine) < job.plan.options.model_stages:
        raise ConfigError(
            "timed() is for a job whose stages are all in this process: plan.on_mesh()"
        )
    tape, env = job.ready(state, *batch)
    jax.block_until_ready(env)
    runner = _Threads(job, tape, env)
    runner.run()
    begin = min(t.start for t in runner.times)
    played = Play(
        TimedTask(t.task, t.device, t.start - begin, t.end - begin)
        for t in sorted(runner.times, key=lambda t: t.start)
    )
    return job.answer(tape, env), played


class _Threads:
    """A thread for each device, which carries out the instructions of its stages in order."""

    def __init__(self, job: PipelineJob, tape: StepProgram, env: list[Any]) -> None:
        self.job, self.env = job, env
        self.list = [ins for ins, _ in tape.instructions]
        self.done = [threading.Event() for _ in self.list]
        self.times: list[TimedTask] = []
        self.failed: list[BaseException] = []
        made_by: dict[int, int] = {}
        self.waits: list[list[int]] = []
        for i, ins in enumerate(self.list):
            self.waits.append([made_by[s] for s in ins.reads if s in made_by])
            made_by |= dict.fromkeys(ins.makes, i)
        # what is moved is received by a thread of its own, as a link would: a device does not wait
        # for it
        self.of: dict[Any, list[int]] = {}
        for i, ins in enumerate(self.list):
            here = job.plan.device_of(ins.stage)
            key: Any = here if isinstance(ins, RunStage) else (job.plan.device_of(ins.origin), here)
            self.of.setdefault(key, []).append(i)

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, args=(mine,), daemon=True)
            for mine in self.of.values()
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self.failed:
            raise self.failed[0]

    def _work(self, mine: list[int]) -> None:
        try:
            for i in mine:
                for j in self.waits[i]:
                    self.done[j].wait()
                if self.failed:
                    return
                self._carry_out(self.list[i])
                self.done[i].set()
        except BaseException as e:  # raised again by `run`, once all have ended
            self.failed.append(e)
        finally:
            for i in mine:
                self.done[i].set()

    def _carry_out(self, ins: Instruction) -> None:
        env = self.env
        start = time.perf_counter()
        if isinstance(ins, Transfer):
            env[ins.target] = jax.block_until_ready(self.job.at.put(ins, env[ins.source]))
            return
        made = jax.block_until_ready(ins.fn(*[env[i] for i in ins.reads]))
        end = time.perf_counter()
        for slot, x in zip(ins.makes, made, strict=True):
            env[slot] = x
        if ins.task is not None:
            self.times.append(TimedTask(ins.task, self.job.plan.device_of(ins.stage), start, end))
