"""Measurements of a pipeline: the memory of saved values, and the times of tasks.

    measured    runs a step, and adds up the sizes of live buffers after each instruction
    timed       runs a step with one thread for each device, and reads the clock around each task

In `timed`, each device has a thread. It waits for the operands of a task, starts the clock, and
waits for the task's outputs. So tasks are not dispatched asynchronously, and a timed step is slower
than `job.step`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import jax

from dtrans.errors import ConfigError
from dtrans.ir.selection import values_at
from dtrans.pipeline_parallel.task import TimedTask, Timeline
from dtrans.run.pipeline_parallel.instructions import Instruction, RunStage, StepProgram, Transfer
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.state import PipelineState


@dataclasses.dataclass(frozen=True)
class Measured:
    """Peak memory for the values that a step saves from forward to backward.

    Attributes:
      peak: for each device, the maximum number of micro-batches with saved values at one time. A
        micro-batch counts once for each stage on the device.
      peak_bytes: for each device, the maximum bytes of saved and transferred values at one time.
    """

    peak: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def measured(
    job: PipelineJob, state: PipelineState, *batch: Any
) -> tuple[tuple[Any, ...], Measured]:
    """Run a step and measure it; return the outputs of `job.step`, and the peak memory."""
    program, env = job.prepare(state, *batch)
    count, device_of = job.plan.options.num_stages, job.plan.device_of
    peak, peak_bytes = [0] * count, [0] * count
    begun: set[tuple[int, int]] = set()

    def look(ins: Instruction) -> None:
        if isinstance(ins, RunStage) and ins.task is not None and ins.task.kind == "F":
            begun.add((ins.task.stage, ins.task.micro))
        now, size = [0] * count, [0] * count
        for stage, micro in begun:
            is_saved = any(env[slot] is not None for slot in program.saved[stage, micro])
            now[device_of(stage)] += is_saved
        # id() of each counted array, because several slots may contain the same array
        seen: set[int] = set()
        for slot, stage in program.in_flight.items():
            x = env[slot]
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                size[device_of(stage)] += x.nbytes
        for d in range(count):
            peak[d], peak_bytes[d] = max(peak[d], now[d]), max(peak_bytes[d], size[d])

    job.execute(program, env, look)
    return job.collect(program, env), Measured(tuple(peak), tuple(peak_bytes))


def timed(job: PipelineJob, state: PipelineState, *batch: Any) -> tuple[tuple[Any, ...], Timeline]:
    """Run a step and time it; return the outputs of `job.step`, and the times of its tasks.

    Times are in seconds from the start of the first task.

    Raises:
      ConfigError: some stages of the job run in other processes.
    """
    if len(job.at.mine) < job.plan.options.model_stages:
        raise ConfigError(
            "timed() needs a job whose stages all run in this process; use plan.on_mesh()"
        )
    program, env = job.prepare(state, *batch)
    jax.block_until_ready(env)
    runner = _Threads(job, program, env)
    runner.run()
    ordered = sorted(runner.times, key=lambda t: t.start)
    begin = ordered[0].start
    shifted = []
    for t in ordered:
        shifted.append(TimedTask(t.task, t.device, t.start - begin, t.end - begin))
    return job.collect(program, env), Timeline(shifted)


class _Threads:
    """Threads that execute a step: each device's thread runs the device's instructions."""

    def __init__(self, job: PipelineJob, program: StepProgram, env: list[Any]) -> None:
        self.job, self.env = job, env
        self.list = [ins for ins, _ in program.instructions]
        self.done = [threading.Event() for _ in self.list]
        self.times: list[TimedTask] = []
        self.failed: list[BaseException] = []
        writer: dict[int, int] = {}  # slot -> the last instruction that writes it
        self.waits: list[
            list[int]
        ] = []  # for each instruction, the instructions that write its operands
        # Each pair of devices also has a thread for the transfers between these devices. So devices
        # compute during a transfer, as with asynchronous transfers.
        self.of_thread: dict[Any, list[int]] = {}
        for i, ins in enumerate(self.list):
            self.waits.append([writer[s] for s in ins.reads if s in writer])
            writer |= dict.fromkeys(ins.writes, i)
            thread: Any = job.plan.device_of(ins.stage)
            if isinstance(ins, Transfer):
                thread = (job.plan.device_of(ins.origin), thread)
            self.of_thread.setdefault(thread, []).append(i)

    def run(self) -> None:
        """Run all threads to their end.

        Raises:
          BaseException: the first error of a thread.
        """
        threads = []
        for mine in self.of_thread.values():
            thread = threading.Thread(target=self._work, args=(mine,), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
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
        except BaseException as e:  # `run` raises the error when all threads have ended.
            self.failed.append(e)
        finally:
            # Wake the threads that wait for this thread, so that they also end after a failure.
            for i in mine:
                self.done[i].set()

    def _carry_out(self, ins: Instruction) -> None:
        env = self.env
        start = time.perf_counter()
        if isinstance(ins, Transfer):
            env[ins.target] = jax.block_until_ready(self.job.at.put(ins, env[ins.source]))
            return
        outputs = jax.block_until_ready(ins.fn(*values_at(env, ins.reads)))
        end = time.perf_counter()
        for slot, x in zip(ins.writes, outputs, strict=True):
            env[slot] = x
        if ins.task is not None:
            self.times.append(TimedTask(ins.task, self.job.plan.device_of(ins.stage), start, end))
