"""Going on with the trainers that are left: `on_trainer_loss="drop"`.

    all_or_none()   a step is taken by all trainers that are there, or by none: behind it they wait for each other, and
                    agree on who is still there
    Loss            raised behind it, on all that are left, when somebody has ended; the step is taken again without it

A lost trainer's part of the batch is lost with it: the mean is over those left. Trainer 0 is the
coordinator; when it ends, JAX ends all. A trainer is known to be lost when it has been silent for
`connect(patience=...)` seconds, or at once if it left by itself.

What a dead process was to send breaks the reduction of those it spoke to. Others of four or more
may wait for these, which have given up: XLA ends that on CPUs after a time that is set to the
deadline. So the deadline must be longer than any trainer may keep others waiting, and one that is
slow for longer ends the job.

Source: JAX's fault tolerance, `jax.experimental.multihost_utils.live_devices`, which is
  experimental.
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
    """Trainers have ended.

    Attributes:
      trainers: which.
    """

    def __init__(self, trainers: frozenset[int]) -> None:
        super().__init__(f"lost trainers: {sorted(trainers)}")
        self.trainers = trainers


def prepare(seconds: int) -> None:
    """Before JAX connects processes: let it go on without one, and bound how long a reduction may
    take."""
    config: Any = jax.config
    config.update("jax_enable_recoverability", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if TIMEOUT_FLAG not in flags:  # XLA reads them when its devices are made
        os.environ["XLA_FLAGS"] = f"{flags} {TIMEOUT_FLAG}={seconds}".strip()


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that either all trainers run to its end, or none is taken to have run.

    Raises:
      Loss: on all that are left.
    """
    try:
        with live_devices(jax.devices()):
            yield
    except ProcessFailureError as e:
        raise Loss(frozenset(d.process_index for d in e.failed_devices)) from e


def leave(trainer_id: int, deadline: float) -> None:
    """At the end of the job: wait for those that are there, and let trainer 0 go last, or it would
    take them along."""
    while True:
        try:
            with all_or_none():
                break
        except Loss:
            continue
    if trainer_id == 0:
        limit = time.monotonic() + deadline
        everyone = list(range(jax.process_count()))
        while len(bulletin_board().get_live_nodes(everyone)) > 1 and time.monotonic() < limit:
            pass  # each call waits for the others to say the same, or to be gone
    jax.distributed.shutdown()
