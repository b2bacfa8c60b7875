"""Training that continues without lost trainers, with `on_trainer_loss="drop"`.

This module is for jobs without parameter servers (mode "nccl2"): trainers all-reduce gradients.

    all_or_none()   a context manager for one step: all live trainers complete the step, or none.
                    At its end, trainers wait for each other and agree on the live trainers.
    Loss            the exception that all survivors get after the step if a trainer has ended.
                    The survivors then repeat the step without that trainer.

The step skips the lost trainer's part of the batch, and means are over the survivors. Trainer 0 is
JAX's coordinator: when it ends, JAX ends all processes. A trainer counts as lost when it has been
silent for `connect(patience=...)` seconds, or at once if it closed its connection.

When a process dies, its neighbours in a collective fail at once. With four or more trainers, a
third process may wait for a neighbour that has already failed. On CPUs, XLA ends this wait after a
timeout, which `prepare` sets to the job's deadline. So a slow trainer, too, ends the job if others
wait for it longer than the deadline.

Source: JAX's experimental fault tolerance, `jax.experimental.multihost_utils.live_devices`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import jax

from dtrans._jax import ProcessFailureError, bulletin_board, live_devices


TIMEOUT_FLAG = "--xla_cpu_collective_timeout_seconds"


class Loss(Exception):
    """Error that every survivor gets if trainers failed in an `all_or_none` block, such as a step.

    Attributes:
      trainers: ids of the lost trainers.
    """

    def __init__(self, trainers: frozenset[int]) -> None:
        super().__init__(f"lost trainers: {sorted(trainers)}")
        self.trainers = trainers


def prepare(seconds: int) -> None:
    """Configure JAX to survive the failure of a process, and limit the time of a collective.

    Call it before `jax.distributed.initialize`.

    Args:
      seconds: timeout of a collective on CPUs.
    """
    config: Any = jax.config
    config.update("jax_enable_recoverability", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if TIMEOUT_FLAG not in flags:
        # this takes effect because XLA reads the flags when it creates devices
        os.environ["XLA_FLAGS"] = f"{flags} {TIMEOUT_FLAG}={seconds}".strip()


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Run a `with` block that either all live trainers complete, or none.

    At the end of the block, trainers wait for each other. If a trainer has ended meanwhile, all
    survivors raise Loss, and can repeat the block without it.
    """
    try:
        with live_devices(jax.devices()):
            yield
    except ProcessFailureError as e:
        raise Loss(frozenset(d.process_index for d in e.failed_devices)) from e


def leave(trainer_id: int, deadline: float) -> None:
    """Leave a job that has ended: wait until all trainers have ended their work, then disconnect.

    Trainer 0 disconnects last: it is JAX's coordinator, and its end would end the other processes.

    Args:
      trainer_id: this trainer.
      deadline: seconds that trainer 0 waits for the other trainers to disconnect.
    """
    while True:
        try:
            with all_or_none():
                break
        except Loss:
            continue
    if trainer_id == 0:
        limit = time.monotonic() + deadline
        everyone = list(range(jax.process_count()))
        # each call blocks until every other process has called it or has ended
        while len(bulletin_board().get_live_nodes(everyone)) > 1 and time.monotonic() < limit:
            pass
    jax.distributed.shutdown()
