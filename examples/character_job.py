"""The job of pipeline mode: train on characters in stages, and compare with one device on the same
batches.

Two engines: `mesh` has every stage of every replica on a separate device; `simulate` has all of
them on one.

After training on the mesh, the job times a few more steps. The plot shows the plan beside them,
scaled to the same total work. In the plan a forward pass costs the operations that the planner
counted, a backward pass twice as many, and transfers nothing. Differences come from slower stages,
transfers, and devices that share the cores of this machine.
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
from dtrans.pipeline_parallel.task import Play, TimedTask
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.profile import Measured, measured, timed
from dtrans.run.pipeline_parallel.state import PipelineState
from examples import characters, report
from examples.compare import bound, difference, virtual_devices


ENGINES = ("mesh", "simulate")
TIMED_STEPS = 7


@dataclasses.dataclass(frozen=True)
class CharactersSettings:
    """The settings of a job.

    Attributes:
      stages, micro_batches, schedule, replicas, chunks: as in `dtrans.pipeline`.
      steps: number of training steps. Speeds leave the first one out, which compiles.
      batch_size: rows of a global batch, which replicas and micro-batches share.
      seed: of the first parameters and the batches.
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
        """Return the key of the first parameters."""
        return jax.random.key(self.seed)


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """Outcome of training on characters.

    Attributes:
      losses: one per step.
      params: the parameters after the last step, on the host.
      seconds: duration of the steps after the first.
    """

    losses: np.ndarray
    params: characters.Params
    seconds: float

    def speed(self, batch_size: int) -> float:
        """Return characters per second, of the steps after the first."""
        return (len(self.losses) - 1) * batch_size * characters.LENGTH / self.seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """Schedule of a pipeline, as planned and as it ran.

    Attributes:
      planned: the schedule with the planner's costs; seconds, where it also `ran`.
      ran: the step of median length; None where all stages are on one device.
      stored: activations between forward and backward, in a step.
    """

    planned: Play
    ran: Play | None
    stored: Measured


def train(settings: CharactersSettings, *, plot: Path | None = None, check: bool = True) -> bool:
    """Train, print what came of it, and compare with one device.

    Args:
      plot: draw what was planned and what ran into this file.
      check: train on one device too, and compare.

    Returns:
      True if the model has learnt from context, and the difference is within bounds. True if
      nothing is checked.

    Raises:
      ConfigError, BatchError: settings that cannot be.
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
        Console(soft_wrap=True).print(f"what was planned, and what ran: {plot}", highlight=False)
    return _compare(settings, text, plan, pipelined, single, watched)


def plan_characters(settings: CharactersSettings, text: characters.Text) -> dtrans.PipelinePlan:
    """Return the plan."""
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
    """Return one training step for one device, and init."""
    tx = characters.optimizer()

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = characters.init(key)
        return params, tx.init(params)

    return dtrans.make_train_step(characters.loss_fn, tx), init


def batch(settings: CharactersSettings, text: characters.Text, step: int) -> np.ndarray:
    """Return the global batch of a step."""
    return characters.batch(text, settings.seed, step, settings.batch_size)


def single_device(settings: CharactersSettings, text: characters.Text) -> Trained:
    """Train on one device: the plain step, jitted, on whole batches."""
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
    """Run some more steps, whose results nobody needs, and look at what they keep and when each
    task runs."""
    (state, _), stored = measured(job, state, tokens)
    if settings.engine == "simulate":
        return Watched(planned_play(job.plan), None, stored)
    plays = []
    for _ in range(TIMED_STEPS):
        (state, _), play = timed(job, state, tokens)
        plays.append(play)
    ran = sorted(plays, key=lambda play: play.makespan)[TIMED_STEPS // 2]
    return Watched(
        planned_play(job.plan, work=sum(float(t.end - t.start) for t in ran)), ran, stored
    )


def planned_play(plan: dtrans.PipelinePlan, work: float = 1.0) -> Play:
    """Return the plan's schedule, at what its stages cost by their operations.

    Args:
      work: duration of all tasks together.
    """
    forward = [stage.flops for stage in plan.stages]
    backward = [2 * cost for cost in forward]
    # where backward is split: the first stage has no cotangents to send back, and all that it does
    # is for its weights
    weight = [
        half if stage.backward.out_names else full
        for stage, half, full in zip(plan.step_programs.stages, forward, backward, strict=True)
    ]
    play = plan.schedule.play(forward, backward, weight)
    return _scaled(play, work / sum(t.end - t.start for t in play))


def _scaled(play: Play, factor: float) -> Play:
    return Play(TimedTask(t.task, t.device, factor * t.start, factor * t.end) for t in play)


def _check(settings: CharactersSettings, plot: Path | None) -> None:
    """Say what cannot be before anything is compiled."""
    if settings.engine not in ENGINES:
        raise ConfigError(
            f"in pipeline mode the engine is {' or '.join(ENGINES)}, not {settings.engine!r}: one "
            "process drives all "
            "stages"
        )
    parts = settings.micro_batches * settings.replicas
    if settings.batch_size % parts:
        raise BatchError(
            f"a batch of {settings.batch_size} rows cannot be divided among "
            f"{settings.micro_batches} micro-batches of "
            f"{settings.replicas} replicas: give --batch-size a multiple of {parts}"
        )
    if settings.steps < 2:
        raise ConfigError(
            f"--steps must be 2 or more, it is {settings.steps}: the first compiles, and is not "
            "timed"
        )
    if plot is not None:
        if settings.engine == "simulate":
            raise ConfigError(
                "--plot draws when each device did what, and --engine simulate has one device: use "
                "--engine mesh"
            )
        report.check_plot(plot)


def _trained(
    one: Callable[[Any, np.ndarray], tuple[Any, Any]],
    state: Any,
    settings: CharactersSettings,
    text: characters.Text,
    where: str,
) -> tuple[Any, np.ndarray, float]:
    """Train, and return the last state, the losses, and the seconds that steps after the first
    took."""
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
    """Train in stages."""

    def one(state: PipelineState, tokens: np.ndarray) -> tuple[PipelineState, jax.Array]:
        state, loss = job.step(state, tokens)
        return state, loss

    state, losses, seconds = _trained(one, job.init(settings.key), settings, text, "pipeline")
    return state, Trained(losses, jax.device_get(job.params(state)), seconds)


def _panels(plan: dtrans.PipelinePlan, watched: Watched) -> list[tuple[str, Play]]:
    """Return the panels of the drawing, in milliseconds."""
    assert watched.ran is not None
    return [
        (
            f"planned: {plan.schedule.name}, tasks as long as their operations say, in all as long "
            "as those that ran",
            _scaled(watched.planned, 1e3),
        ),
        (f"ran: the median of {TIMED_STEPS} steps", _scaled(watched.ran, 1e3)),
    ]


def _compare(
    settings: CharactersSettings,
    text: characters.Text,
    plan: dtrans.PipelinePlan,
    pipelined: Trained,
    single: Trained | None,
    watched: Watched,
) -> bool:
    """Print what came of it, and the verdict."""
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
    """Return the rows of the table of the schedule: planned, and measured."""
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
    times = [f"{1e3 * play.makespan:.0f} ms" for play in (watched.planned, ran)]
    return [
        *bubbles,
        ("work by device, %", by_device(_shares(watched.planned)), by_device(_shares(ran))),
        ("time for this work", *times),
        *rows,
    ]


def _shares(play: Play) -> list[int]:
    """Return the share of all work that each device does, in percent."""
    work = [0.0] * play.num_devices
    for task in play:
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
        f"validation is on {len(text.validation):,} characters, in nats for each; how often each "
        "comes, without those "
        f"before it, gives {alone:.4f}"
    )
    console.print(
        f"final parameters against single-device training on the same {settings.steps} global "
        "batches: "
        f"max relative difference {apart:.2e} ({kind}, bound {bound():.0e})"
    )
    if not good:
        console.print(
            f"[red]the validation loss is not below {alone:.4f}: nothing was learnt from context "
            "yet[/]"
        )
    if not near:
        console.print(
            f"[red]the difference is above the bound of {bound():.0e}: training amplified "
            "rounding, or something is "
            "wrong; JAX_ENABLE_X64=1 tells which[/]"
        )
    return good and near
