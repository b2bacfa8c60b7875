"""Job of `dtrans example digits`: distributed training, compared with one device.

There are two engines. `processes` starts trainers and pservers with the launcher of dtrans; each
process runs `examples.digits_role`. `mesh` runs the full plan in this process. In nccl2 and
sharding mode, there are no pservers.

Both trainings use the same global batches, so in exact arithmetic their results would be equal.
Floating-point sums are added in another order. The job prints the remaining difference: the largest
max|a - b| / max|b| over all leaves.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import dtrans
from dtrans.errors import BatchError, ConfigError
from dtrans.run.distributed.launcher import launch
from examples import digits, report, role_path
from examples.compare import bound, difference, virtual_devices
from examples.digits_training import DigitsSettings, Outcome, train as run, training


ENGINES = ("processes", "mesh")
MODES = ("pserver", "nccl2", "sharding")
SHARDING_STAGE = 3
PSERVERS = 2
MIN_ACCURACY = 0.95


def train(
    settings: DigitsSettings,
    *,
    engine: str,
    trainers: int,
    pservers: int | None = None,
    mode: str = "pserver",
    plot: Path | None = None,
    check: bool = True,
) -> bool:
    """Train, print the results, and compare them with one device.

    Args:
      settings: the settings of the job.
      engine: "processes" or "mesh".
      trainers: number of trainers.
      pservers: number of pservers in pserver mode; two by default.
      mode: "pserver", "nccl2" or "sharding".
      plot: file for a plot of the loss.
      check: True to train on one device too, and compare.

    Returns:
      True if the test accuracy and the difference are within bounds. Always True if `check` is
      False.

    Raises:
      ConfigError, BatchError: a setting is invalid.
      LaunchError: a role failed.
    """
    if mode == "sharding" and not settings.sharding_stage:
        settings = dataclasses.replace(settings, sharding_stage=SHARDING_STAGE)
    _check(settings, engine, mode, trainers, pservers)
    servers = 0 if mode != "pserver" else PSERVERS if pservers is None else pservers
    if plot is not None:
        report.check_plot(plot)
    if engine == "mesh":
        distributed = _on_mesh(settings, mode, trainers, servers)
    else:
        distributed = _as_processes(settings, trainers, servers)
    single = single_device(settings) if check else None
    if plot is not None:
        others = f", {servers} pservers" if servers else ""
        title = f"digits, {settings.optimizer}: {trainers} trainers{others} ({engine})"
        report.plot_losses(
            plot, distributed.losses, None if single is None else single.losses, title
        )
        Console(soft_wrap=True).print(f"loss plot: {plot}", highlight=False)
    return _compare(settings, distributed, single)


def single_device(settings: DigitsSettings) -> Outcome:
    """Train on one device, with the jitted step and global batches."""
    data = digits.load(settings.seed)
    step, init = training(settings)
    jitted = jax.jit(step)
    params, opt_state = jax.jit(init)(settings.key)
    losses = []
    for epoch in range(settings.epochs):
        for x, y in digits.batches(data, settings.seed, epoch, settings.batch_size):
            params, opt_state, loss = jitted(params, opt_state, x, y)
            losses.append(loss)
    return Outcome(np.array(losses), params)


def _check(
    settings: DigitsSettings, engine: str, mode: str, trainers: int, pservers: int | None
) -> None:
    """Raise an error for invalid settings once, before all roles would raise it."""
    if engine not in ENGINES:
        raise ConfigError(f"there is no engine {engine!r}; it is one of {', '.join(ENGINES)}")
    if mode not in MODES:
        raise ConfigError(f"there is no mode {mode!r}; it is one of {', '.join(MODES)}")
    if mode != "pserver" and pservers is not None:
        raise ConfigError(f"there are no pservers in {mode} mode; leave out --pservers {pservers}")
    if mode != "sharding" and settings.sharding_stage:
        raise ConfigError(
            f"--sharding-stage needs --mode sharding, and --mode is {mode}; leave --sharding-stage "
            "out"
        )
    if trainers < 1 or settings.batch_size % trainers:
        raise BatchError(
            f"a batch of {settings.batch_size} images cannot be divided among {trainers} trainers; "
            "pass a multiple of --trainers as --batch-size"
        )
    if not 0 < settings.batch_size <= digits.TRAIN_IMAGES:
        raise BatchError(
            f"--batch-size is {settings.batch_size}; expected 1 to {digits.TRAIN_IMAGES}, the "
            "number of training images"
        )
    if settings.epochs < 1:
        raise ConfigError(f"--epochs must be 1 or more, it is {settings.epochs}")
    dtrans.DistributeTranspiler(
        dtrans.DistributeTranspilerConfig(min_block_size=settings.min_block_size)
    )
    training(settings)
    digits.check_installed()


def _plan(
    settings: DigitsSettings, mode: str, main: Any, startup: Any, trainers: int, pservers: int
) -> Any:
    """Return the plan of a mode, for a job whose roles are all in this process."""
    if mode == "sharding":
        return dtrans.sharding(main, startup, degree=trainers, stage=settings.sharding_stage)
    # these endpoints are only names, because no process listens at them
    endpoints = [f"127.0.0.1:{6174 + i}" for i in range(pservers or trainers)]
    config = dtrans.DistributeTranspilerConfig(mode=mode, min_block_size=settings.min_block_size)
    t = dtrans.DistributeTranspiler(config)
    if mode == "pserver":
        t.transpile(0, main, ",".join(endpoints), trainers, startup_program=startup)
    else:
        t.transpile(
            0, main, trainers=endpoints, startup_program=startup, current_endpoint=endpoints[0]
        )
    return t.plan


def _on_mesh(settings: DigitsSettings, mode: str, trainers: int, pservers: int) -> Outcome:
    """Train with every role on a device of this process."""
    virtual_devices(trainers + pservers)
    data = digits.load(settings.seed)
    step, init = training(settings)
    batch = next(digits.batches(data, settings.seed, 0, settings.batch_size))
    # The step is traced with the part of one trainer, as in a job of processes.
    program = dtrans.trace(
        step, *jax.eval_shape(init, settings.key), *digits.shard(batch, 0, trainers)
    )
    plan = _plan(settings, mode, program, dtrans.trace(init, settings.key), trainers, pservers)
    report.show_plan(plan)
    batches = lambda epoch: digits.batches(data, settings.seed, epoch, settings.batch_size)
    with report.progress(settings) as advance:
        return run(plan.on_mesh(), settings, batches, advance)


def _as_processes(settings: DigitsSettings, trainers: int, pservers: int) -> Outcome:
    """Train with every role as a process; read losses and parameters from files of the trainers."""
    # Roles get the precision of this process. On a GPU, several roles share the memory, so JAX must
    # not preallocate it.
    env = {"JAX_ENABLE_X64": str(int(jax.config.read("jax_enable_x64")))}
    env["PYTHONPATH"] = role_path()
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with tempfile.TemporaryDirectory(prefix="dtrans-train-") as directory:
        command = [sys.executable, "-m", "examples.digits_role", directory, *settings.arguments()]
        try:
            # the launcher has one mode for all jobs without pservers
            kind = "pserver" if pservers else "nccl2"
            launch(
                command,
                trainers=trainers,
                pservers=pservers or None,
                mode=kind,
                env=env,
                inherit_stdout=True,
            )
        finally:
            # trainer 0 hides the cursor for its progress bar, and may have ended before it shows it
            Console().show_cursor(True)
        found = [Outcome.load(Path(directory) / f"trainer-{i}.npz") for i in range(trainers)]
    # With pservers, each trainer has the mean loss of its rows, and all have equally many rows. In
    # other modes, each trainer has the mean loss of all rows.
    return Outcome(np.mean([o.losses for o in found], axis=0), found[0].params)


def _compare(settings: DigitsSettings, distributed: Outcome, single: Outcome | None) -> bool:
    """Print the accuracy, and compare with one device; return True if both are within bounds."""
    data = digits.load(settings.seed)
    console = Console(soft_wrap=True, highlight=False)
    got = digits.accuracy(distributed.params, data.test_x, data.test_y)
    said = f"test accuracy {got:.4f} on {len(data.test_y)} images"
    if single is None:
        console.print(said)
        return True
    alone = digits.accuracy(single.params, data.test_x, data.test_y)
    apart = difference(distributed.params, single.params)
    kind = np.dtype(data.x.dtype).name
    good, near = got >= MIN_ACCURACY, apart < bound()
    console.print(f"{said}; single device {alone:.4f}")
    console.print(
        f"final parameters against single-device training on the same {len(single.losses)} global "
        f"batches: max relative difference {apart:.2e} ({kind}, bound {bound():.0e})"
    )
    if not good:
        console.print(f"[red]the test accuracy is below {MIN_ACCURACY}[/]")
    if not near:
        console.print(
            f"[red]the difference is above the bound of {bound():.0e}: {settings.optimizer} "
            "amplified rounding, or there is a fault; with JAX_ENABLE_X64=1 only a fault remains[/]"
        )
    return good and near
