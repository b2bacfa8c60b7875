"""Count and times of a job's steps.

JAX dispatches work to devices asynchronously. So the measured step ends when its work has been
dispatched. Only a step that waits for servers or other trainers takes longer. The time in which the
caller waits for a result counts as time between steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class JobReport:
    """Times of a job's steps; it prints as a table.

    Attributes:
      steps: number of completed steps.
      first: seconds of the first step, in which JAX compiles.
      seconds: seconds from the end of the first step to the end of the last step.
      in_step: seconds in `step`, without the first step.
      waiting: seconds in which `dtrans.feed` waited for a batch.
      costs: the plan's `Costs`: state, traffic and operations of each role.
    """

    steps: int
    first: float
    seconds: float
    in_step: float
    waiting: float
    costs: Any

    @property
    def elsewhere(self) -> float:
        """Seconds between steps, without the waits for batches; mostly waits for results."""
        return self.seconds - self.in_step - self.waiting

    @property
    def steps_per_second(self) -> float:
        """Steps per second, without the first step; 0 if there was only one."""
        return (self.steps - 1) / self.seconds if self.seconds else 0.0

    @property
    def link_share(self) -> float | None:
        """Time in which the busiest link carries a step's bytes, divided by the time of a step.

        1.0 is the optimum. None without the rate of a link, and before the second step.
        """
        needed = self.costs.link_seconds
        return None if needed is None or not self.seconds else needed * self.steps_per_second

    def __str__(self) -> str:
        per_second = f"{self.steps_per_second:,.2f} a second"
        parts = {
            "in step": self.in_step,
            "waiting for batch": self.waiting,
            "between steps": self.elsewhere,
        }
        lines = [f"{self.steps} steps, {per_second} after the first ({self.first:.3f} s)"]
        for name, seconds in parts.items():
            share = f", {seconds / self.seconds:.0%}" if self.seconds else ""
            lines.append(f"  {name:17}  {seconds:.3f} s{share}")
        if self.link_share is not None:
            lines.append(
                f"  {1 / self.steps_per_second:.4g} s a step; the bytes on the busiest link take "
                f"{self.costs.link_seconds:.4g} s: {self.link_share:.0%} of the bound"
            )
        return "\n".join([*lines, str(self.costs)])

    def __repr__(self) -> str:
        return f"<JobReport: {self.steps} steps, {self.steps_per_second:,.2f} a second>"

    def _repr_html_(self) -> str:
        times = str(self).removesuffix(str(self.costs))
        return f"<pre>{html.escape(times)}</pre>{self.costs._repr_html_()}"


_last: StepMeter | None = None


def completed_steps() -> int | None:
    """Return the step count of the job that last ran a step in this process, or None."""
    return None if _last is None else _last.steps


class StepMeter:
    """Counter and timer of the steps of a job.

    Attributes:
      steps, first, seconds, in_step: as in `JobReport`.
      waited: seconds in which `dtrans.feed` waited for batches, after the first step.
      saved: the newest checkpoint that the job has saved, and the number of steps before it; None
        without a checkpoint.
      is_traced: True while JAX's profiler traces the job.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.first = self.seconds = self.in_step = self.waited = 0.0
        self.is_traced = False
        self.saved: tuple[str, int] | None = None
        self._since = 0.0

    def note_saved(self, checkpoint: object) -> None:
        """Record the path of a new checkpoint, which `add_note` tells the user after Ctrl-C."""
        self.saved = str(checkpoint), self.steps

    def add_note(self, error: BaseException | None) -> None:
        """Add a note with the finished steps and the newest checkpoint to a KeyboardInterrupt.

        Other errors are unchanged.
        """
        if not isinstance(error, KeyboardInterrupt) or hasattr(error, "__notes__"):
            return
        saved = "it has saved no checkpoint"
        if self.saved is not None:
            path, steps = self.saved
            saved = f"its newest checkpoint is {path}, after {_counted(steps)}"
        error.add_note(f"dtrans: this process has completed {_counted(self.steps)}; {saved}")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count and time the step in a `with` block; do not count it if it raises an exception."""
        annotation = contextlib.nullcontext()
        if self.is_traced:
            annotation = jax.profiler.StepTraceAnnotation("dtrans step", step_num=self.steps)
        start = time.perf_counter()
        with annotation:
            yield
        end = time.perf_counter()
        global _last
        _last = self
        if self.steps:
            self.in_step += end - start
            self.seconds = end - self._since
        else:
            self.first, self._since, self.waited = end - start, end, 0.0
        self.steps += 1

    @contextlib.contextmanager
    def trace(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Trace the steps of a `with` block with JAX's profiler, each with its index."""
        with jax.profiler.trace(os.fspath(directory), create_perfetto_trace=True):
            self.is_traced = True
            try:
                yield
            finally:
                self.is_traced = False

    def report(self, costs: Any) -> JobReport:
        """Return a report of the steps until now, with the given costs of a step."""
        # `waited` may include the wait for the batch of a step that has not ended.
        waiting = min(self.waited, self.seconds)
        return JobReport(self.steps, self.first, self.seconds, self.in_step, waiting, costs)


def metered(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the method `step` of a job class, so that `job.meter` counts and times its calls."""

    @functools.wraps(step)
    def timed(self: Any, state: Any, *batch: Any) -> Any:
        try:
            with self.meter.step():
                return step(self, state, *batch)
        except KeyboardInterrupt as e:
            self.meter.add_note(e)
            raise

    return timed


def _counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
