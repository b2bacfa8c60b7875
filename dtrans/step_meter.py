"""What a job's steps took: counted and timed by the job itself, with a clock's two looks a step.

JAX hands work to its devices and goes on. A step is timed until it returns, which is when its work
is handed over, unless something in it waits: an exchange with servers, a result that is read. Work
of the devices that nobody waits for in a step is waited for where a result is read, which is
between steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class JobReport:
    """What the steps of a job took.

    Attributes:
      steps: how many were made.
      first: seconds of the first, in which JAX compiles.
      seconds: from the end of the first to the end of the last.
      in_step: seconds of these inside of `step`.
      waiting: seconds that `dtrans.feed` waited for a batch.
      costs: what each role holds, moves and computes in a step: the plan's `Costs`.
    """

    steps: int
    first: float
    seconds: float
    in_step: float
    waiting: float
    costs: Any

    @property
    def elsewhere(self) -> float:
        """Seconds between steps that were not spent on waiting for a batch: reading results, above
        all."""
        return self.seconds - self.in_step - self.waiting

    @property
    def steps_per_second(self) -> float:
        """Of the steps after the first; 0 before there are two."""
        return (self.steps - 1) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        share = lambda x: f"{x:.3f} s" + (f", {x / self.seconds:.0%}" if self.seconds else "")
        return "\n".join(
            [
                f"{self.steps} steps, {self.steps_per_second:,.2f} a second after the first, of "
                f"{self.first:.3f} s",
                f"  in step            {share(self.in_step)}",
                f"  waiting for batch  {share(self.waiting)}",
                f"  between steps      {share(self.elsewhere)}",
                str(self.costs),
            ]
        )


_last: StepMeter | None = None


def steps_made() -> int | None:
    """Return the number of steps of the job of this process that made one last; None where none
    has."""
    return None if _last is None else _last.steps


class StepMeter:
    """Counts and times the steps of a job.

    Attributes:
      waited: seconds that a feeder has waited.
      is_traced: whether steps are noted in a trace of JAX's profiler.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.first = self.seconds = self.in_step = self.waited = 0.0
        self.is_traced = False
        self._since = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time one step. One that fails is not counted."""
        noted = contextlib.nullcontext()
        if self.is_traced:
            noted = jax.profiler.StepTraceAnnotation("dtrans step", step_num=self.steps)
        start = time.perf_counter()
        with noted:
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

    def report(self, costs: Any) -> JobReport:
        """What was timed."""
        return JobReport(
            self.steps,
            self.first,
            self.seconds,
            self.in_step,
            min(self.waited, self.seconds),
            costs,
        )


def metered(step: Callable[..., Any]) -> Callable[..., Any]:
    """A `step` of a job that the job's `meter` times."""

    @functools.wraps(step)
    def timed(self: Any, state: Any, *batch: Any) -> Any:
        with self.meter.step():
            return step(self, state, *batch)

    return timed
