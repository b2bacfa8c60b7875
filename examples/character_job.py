"""Pipeline job: trains a transformer on characters, and compares the result with one device.

There are two engines. `mesh` runs each stage of each replica on a separate device. `simulate` runs
all stages on one device.

After training on the mesh, the job measures a few more steps. The plot compares the planned
schedule with the measured schedule, scaled to the same total work. In the planned schedule, a
forward pass takes as long as its counted operations, a backward pass twice as long, and transfers
take no time. The two differ because stages may be slower than planned, transfers take time, and
virtual devices share the cores of this machine.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import dtrans
from dtrans.errors import BatchError, ConfigError
from dtrans.pipeline_parallel.task import TimedTask, Timeline
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.profile import Measured, measured, timed
from dtrans.run.pipeline_parallel.state import PipelineState
from examples import characters, report
from examples.compare import bound, difference, virtual_devices


ENGINES = ("mesh", "simulate")
TIMED_STEPS = 7


@dataclasses.dataclass(frozen=True)
class CharactersSettings:
    """Settings of a job.

    Attributes:
      stages, micro_batches, schedule, replicas, chunks: as in `dtrans.pipeline`.
      steps: number of training steps. Speeds do not include the first step, which compiles.
      batch_size: rows of a global batch, which is divided over replicas and micro-batches.
      seed: seed of the initial parameters and the batches.
      engine: one of `ENGINES`.
    """

    stages: int = 2
    micro_batches: int = 8
    schedule: str = "PreferBackward"
    replicas: int = 1
    chunks: int = 1
    steps: int = 100
    batch_size: int = 32
    seed: int = 0
    engine: str = "mesh"

    @property
    def key(self) -> jax.Array:
        """Return the random key of the initial parameters."""
        return jax.random.key(self.seed)


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """Result of training on characters.

    Attributes:
      losses: the loss of each step.
      params: the parameters after the last step, on the host.
      seconds: duration of the steps after the first.
    """

    losses: np.ndarray
    params: characters.Params
    seconds: float

    def speed(self, batch_size: int) -> float:
        """Return characters per second, without the first step."""
        return (len(self.losses) - 1) * batch_size * characters.LENGTH / self.seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """Planned schedule of a pipeline, and its measured schedule.

    Attributes:
      planned: the schedule with the planner's costs, in seconds if `ran` is not None.
      ran: the measured step with the median duration; None if all stages are on one device.
      stored: the activations that a step stores between forward and backward.
    """

    planned: Timeline
    ran: Timeline | None
    stored: Measured


def train(settings: CharactersSettings, *, plot: Path | None = None, check: bool = True) -> bool:
    """Train, print the results, and compare them with one device.

    Args:
      plot: file for a plot of the planned and the measured schedule.
      check: True to train on one device too, and compare.

    Returns:
      True if the model has learnt to use context, and the difference from one device is below the
      bound. Always True if `check` is False.

    Raises:
      ConfigError, BatchError: a setting is invalid.
    """
    _check(settings, plot)
    devices = settings.stages * settings.replicas if settings.engine == "mesh" else 1
    virtual_devices(devices)
    text = characters.load()
    plan = plan_characters(settings, text)
    report.show_stages(plan, f"{devices} device{'s' if devices > 1 else ''}")
    job: Any = plan.on_mesh() if settings.engine == "mesh" else plan.simulate()
    state, pipelined = _pipelined(job, settings, text)
    watched = watch(settings, job, state, batch(settings, text, settings.steps))
    single = single_device(settings, text) if check else None
    if plot is not None and watched.ran is not None:
        plan.schedule.gantt(plot, _panels(plan, watched), unit="ms")
        Console(soft_wrap=True).print(
            f"plot of the planned and the measured schedule: {plot}", highlight=False
        )
    return _compare(settings, text, plan, pipelined, single, watched)


def plan_characters(settings: CharactersSettings, text: characters.Text) -> dtrans.PipelinePlan:
    """Return the plan of the job."""
    step, init = training()
    program = dtrans.trace(step, *jax.eval_shape(init, settings.key), batch(settings, text, 0))
    return dtrans.pipeline(
        program,
        dtrans.trace(init, settings.key),
        num_stages=settings.stages,
        num_micro_batch=settings.micro_batches,
        schedule=settings.schedule,
        replicas=settings.replicas,
        stages=dtrans.Stages(chunks=settings.chunks),
    )


def training() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the training step for one device, and the init."""
    tx = characters.optimizer()

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = characters.init(key)
        return params, tx.init(params)

    return dtrans.make_train_step(characters.loss_fn, tx), init


def batch(settings: CharactersSettings, text: characters.Text, step: int) -> np.ndarray:
    """Return the global batch of a step."""
    return characters.batch(text, settings.seed, step, settings.batch_size)


def single_device(settings: CharactersSettings, text: characters.Text) -> Trained:
    """Train on one device, with the jitted step and global batches."""
    step, init = training()
    jitted = jax.jit(step)

    def one(state: Any, tokens: np.ndarray) -> tuple[Any, jax.Array]:
        *state, loss = jitted(*state, tokens)
        return state, loss

    (params, _), losses, seconds = _trained(
        one, jax.jit(init)(settings.key), settings, text, "one device"
    )
    return Trained(losses, jax.device_get(params), seconds)


def watch(
    settings: CharactersSettings, job: PipelineJob, state: PipelineState, tokens: np.ndarray
) -> Watched:
    """Run a few more steps to measure stored activations and the times of tasks."""
    (state, _), stored = measured(job, state, tokens)
    if settings.engine == "simulate":
        return Watched(planned_play(job.plan), None, stored)
    timelines = []
    for _ in range(TIMED_STEPS):
        (state, _), timeline = timed(job, state, tokens)
        timelines.append(timeline)
    ran = sorted(timelines, key=lambda timeline: timeline.makespan)[TIMED_STEPS // 2]
    return Watched(
        planned_play(job.plan, work=sum(float(t.end - t.start) for t in ran)), ran, stored
    )


def planned_play(plan: dtrans.PipelinePlan, work: float = 1.0) -> Timeline:
    """Return the plan's schedule, where a task takes as long as its counted operations.

    Args:
      work: the sum of the durations of all tasks.
    """
    forward = [stage.flops for stage in plan.stages]
    backward = [2 * cost for cost in forward]
    # A schedule such as ZeroBubble splits the backward pass. The first stage sends no cotangents
    # back, so its backward pass consists of the gradients of weights.
    weight = [
        half if stage.backward.out_names else full
        for stage, half, full in zip(plan.step_programs.stages, forward, backward, strict=True)
    ]
    timeline = plan.schedule.timeline(forward, backward, weight)
    return _scaled(timeline, work / sum(t.end - t.start for t in timeline))


def _scaled(timeline: Timeline, factor: float) -> Timeline:
    return Timeline(TimedTask(t.task, t.device, factor * t.start, factor * t.end) for t in timeline)


def _check(settings: CharactersSettings, plot: Path | None) -> None:
    """Raise an error for invalid settings, before anything is compiled."""
    if settings.engine not in ENGINES:
        raise ConfigError(
            f"--engine is {settings.engine!r}; expected {' or '.join(ENGINES)}, which run all "
            "stages in one process"
        )
    parts = settings.micro_batches * settings.replicas
    if settings.batch_size % parts:
        raise BatchError(
            f"a batch of {settings.batch_size} rows cannot be divided among "
            f"{settings.micro_batches} micro-batches of {settings.replicas} replicas; pass a "
            f"multiple of {parts} as --batch-size"
        )
    if settings.steps < 2:
        raise ConfigError(
            f"--steps must be 2 or more, it is {settings.steps}: the first step compiles, and is "
            "not timed"
        )
    if plot is not None:
        if settings.engine == "simulate":
            raise ConfigError(
                "--plot draws the tasks of each device, but --engine simulate has only one device; "
                "use --engine mesh"
            )
        report.check_plot(plot)


def _trained(
    one: Callable[[Any, np.ndarray], tuple[Any, Any]],
    state: Any,
    settings: CharactersSettings,
    text: characters.Text,
    where: str,
) -> tuple[Any, np.ndarray, float]:
    """Train; return the last state, the losses, and the seconds of all steps after the first."""
    losses: list[float] = []
    start = 0.0
    with report.progress_of_steps(settings.steps, where) as advance:
        for i in range(settings.steps):
            state, loss = one(state, batch(settings, text, i))
            losses.append(float(loss))
            advance(losses[-1])
            if i == 0:
                start = time.perf_counter()
    return state, np.array(losses), time.perf_counter() - start


def _pipelined(
    job: PipelineJob, settings: CharactersSettings, text: characters.Text
) -> tuple[PipelineState, Trained]:
    """Train with the pipeline."""

    def one(state: PipelineState, tokens: np.ndarray) -> tuple[PipelineState, jax.Array]:
        state, loss = job.step(state, tokens)
        return state, loss

    state, losses, seconds = _trained(one, job.init(settings.key), settings, text, "pipeline")
    return state, Trained(losses, jax.device_get(job.params(state)), seconds)


def _panels(plan: dtrans.PipelinePlan, watched: Watched) -> list[tuple[str, Timeline]]:
    """Return the panels of the plot, in milliseconds."""
    assert watched.ran is not None
    return [
        (
            f"planned: {plan.schedule.name}, times from counted operations, scaled to the measured "
            "total",
            _scaled(watched.planned, 1e3),
        ),
        (f"measured: the median of {TIMED_STEPS} steps", _scaled(watched.ran, 1e3)),
    ]


def _compare(
    settings: CharactersSettings,
    text: characters.Text,
    plan: dtrans.PipelinePlan,
    pipelined: Trained,
    single: Trained | None,
    watched: Watched,
) -> bool:
    """Print the results, and return True if they are within bounds."""
    both = (pipelined,) if single is None else (pipelined, single)
    last = min(10, settings.steps // 2)
    validation = [characters.validation_loss(t.params, text) for t in both]
    mean = f"loss of the last {last}, mean"
    names = ("", "loss of the first step", mean, "validation loss", "characters per second")
    columns: list[tuple[str, ...]] = [names]
    for title, trained, loss in zip(("pipeline", "one device"), both, validation, strict=False):
        losses = trained.losses[0], trained.losses[-last:].mean(), loss
        speed = f"{trained.speed(settings.batch_size):,.0f}"
        columns.append((title, *(f"{x:.4f}" for x in losses), speed))
    head, *rows = zip(*columns, strict=True)
    report.show_table("training", head, rows)
    report.show_table("schedule", ("", "planned", "measured"), _of_schedule(plan, watched))
    devices, cores = settings.stages * settings.replicas, os.cpu_count() or 1
    if watched.ran is not None and jax.default_backend() == "cpu" and devices > cores:
        note = (
            f"{devices} devices share {cores} cores of this machine: tasks take longer than "
            "they would alone"
        )
        Console(soft_wrap=True).print(note, highlight=False)
    return True if single is None else _verdict(settings, text, pipelined, single, validation[0])


def _of_schedule(plan: dtrans.PipelinePlan, watched: Watched) -> list[tuple[str, ...]]:
    """Return table rows (name, planned, measured) about the schedule."""
    by_device = lambda numbers: " ".join(map(str, numbers))
    ran = watched.ran
    rows: list[tuple[str, ...]] = [
        (
            "peak micro-batches by device",
            by_device(plan.schedule.peak),
            by_device(watched.stored.peak),
        )
    ]
    bubbles = [
        ("bubble of equal stages", f"{float(plan.schedule.bubble):.1%}", ""),
        (
            "bubble",
            f"{float(watched.planned.bubble):.1%}",
            "one device" if ran is None else f"{float(ran.bubble):.1%}",
        ),
    ]
    if ran is None:
        return [*bubbles, *rows]
    times = [f"{1e3 * timeline.makespan:.0f} ms" for timeline in (watched.planned, ran)]
    return [
        *bubbles,
        ("work by device, %", by_device(_shares(watched.planned)), by_device(_shares(ran))),
        ("time for this work", *times),
        *rows,
    ]


def _shares(timeline: Timeline) -> list[int]:
    """Return each device's share of the work, in percent."""
    work = [0.0] * timeline.num_devices
    for task in timeline:
        work[task.device] += float(task.end - task.start)
    return [round(100 * part / sum(work)) for part in work]


def _verdict(
    settings: CharactersSettings,
    text: characters.Text,
    pipelined: Trained,
    single: Trained,
    validation: float,
) -> bool:
    apart = difference(pipelined.params, single.params)
    kind = jax.tree.leaves(single.params)[0].dtype.name
    alone = characters.entropy(text.validation)
    good, near = validation < alone, apart < bound()
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"the validation loss is in nats per character, for {len(text.validation):,} characters; a "
        f"model that knows only the frequency of each character has {alone:.4f}"
    )
    console.print(
        f"final parameters against single-device training on the same {settings.steps} global "
        f"batches: max relative difference {apart:.2e} ({kind}, bound {bound():.0e})"
    )
    if not good:
        console.print(
            f"[red]the validation loss is not below {alone:.4f}: nothing was learnt from context "
            "yet[/]"
        )
    if not near:
        console.print(
            f"[red]the difference is above the bound of {bound():.0e}: training amplified "
            "rounding, or there is a fault; with JAX_ENABLE_X64=1 only a fault remains[/]"
        )
    return good and near
