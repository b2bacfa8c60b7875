"""Jobs of processes with tables on parameter servers, and the same training on one device.

The loss of such a job is a sum over the batch, so Adagrad's step size does not depend on the batch
size. The output shows the mean loss.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import dtrans
from dtrans.errors import BatchError
from dtrans.run.distributed.launcher import launch
from examples import report, role_path


# bound of the largest difference of losses, divided by the largest loss: rounding errors after some
# thousand steps
BOUND = 1e-3

Batch = Callable[[int], Sequence[Any]]


def check_batch(size: int, trainers: int, what: str) -> None:
    """Raise BatchError if the number of trainers does not divide the batch."""
    if size % trainers:
        raise BatchError(
            f"a batch of {size} {what} cannot be divided among {trainers} trainers; pass a "
            "multiple of --trainers as --batch-size"
        )


def launched(
    module: str,
    settings: Any,
    *,
    trainers: int,
    pservers: int,
    leave: Callable[[Path], None] = lambda _: None,
) -> list[dict[str, np.ndarray]]:
    """Run a job, and return the arrays that each trainer has saved.

    Args:
      module: the script of every role. Its arguments are a folder and the settings.
      settings: the settings.
      trainers: number of trainers.
      pservers: number of pservers.
      leave: writes files for the roles into that folder.
    """
    with tempfile.TemporaryDirectory(prefix="dtrans-train-") as directory:
        leave(Path(directory))
        command = [sys.executable, "-m", module, directory, *settings.arguments()]
        env = {
            "JAX_ENABLE_X64": str(int(jax.config.read("jax_enable_x64"))),
            "PYTHONPATH": role_path(),
        }
        launch(
            command,
            trainers=trainers,
            pservers=pservers,
            mode="pserver",
            env=env,
            inherit_stdout=True,
        )
        found = []
        for k in range(trainers):
            with np.load(_left(directory, k)) as file:
                found.append({n: file[n] for n in file.files})
        return found


def be_role(
    directory: str,
    settings: Any,
    step: Callable[..., Any],
    init: Callable[..., Any],
    batch: Batch,
    ask: Callable[[Any, Any], Mapping[str, Any]],
) -> None:
    """Run the role of this process; a trainer saves its losses and its peak memory in a folder.

    Args:
      directory: the folder.
      settings: the settings.
      step, init: the functions for one device.
      batch: returns the global batch of a step.
      ask: returns further arrays that trainer 0 saves, from its job and the last state.
    """
    role, key = dtrans.Role.from_env(), jax.random.key(settings.seed)
    part = [x[: settings.batch_size // role.trainers] if x.ndim else x for x in batch(0)]
    plan = dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init, key), *part),
        dtrans.trace(init, key),
        pservers=role.pservers,
        trainers=role.trainers,
        sparse="auto",
    )
    job: Any
    with plan.on_cluster(deadline=settings.deadline) as job:
        state = job.init(key)
        if role.is_pserver:
            job.serve(state)
            return
        first = role.trainer_id == 0
        if first:
            report.show_plan(plan)
        losses = []
        with report.progress_of_steps(settings.steps, "training", shown=first) as advance:
            for i in range(settings.steps):
                state, loss = job.step(state, *job.shard_batch(*batch(i)))
                losses.append(float(loss) / settings.batch_size)
                advance(losses[-1])
        found = ask(job, state) if first else {}
        np.savez(_left(directory, role.trainer_id), losses=losses, memory=_peak(), **found)


def single_device(
    settings: Any, step: Callable[..., Any], state: tuple[Any, Any], batch: Batch, steps: int
) -> np.ndarray:
    """Train on one device from `state`, which is donated, and return the losses."""
    jitted = jax.jit(step, donate_argnums=(0, 1))
    (params, opt_state), losses = state, []
    for i in range(steps):
        params, opt_state, loss = jitted(params, opt_state, *batch(i))
        losses.append(loss)
    return np.array(losses) / settings.batch_size


def losses_agree(console: Console, losses: np.ndarray, single: np.ndarray) -> bool:
    """Print the largest difference of the first losses from one device's; return True if small."""
    apart = float(np.max(np.abs(losses[: len(single)] - single)) / np.max(np.abs(single)))
    bound = 1e-9 if jax.config.read("jax_enable_x64") else BOUND
    console.print(f"losses against one device on the same {len(single)} batches: max difference "
f"{apart:.1e} of the "
                  f"largest (bound {bound:.0e})")  # fmt: skip
    if not apart < bound:
        console.print(f"[red]the difference is above the bound of {bound:.0e}[/]")
    return apart < bound


def _left(directory: str, trainer_id: int) -> Path:
    """Return the path of the file that a trainer saves."""
    return Path(directory) / f"trainer-{trainer_id}.npz"


def _peak() -> float:
    """Return the peak memory of this process in MB, or 0 on systems other than Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")),
        0.0,
    )
