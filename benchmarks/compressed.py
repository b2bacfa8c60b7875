"""Loss on characters with compressed gradients, beside exact jobs.

    python benchmarks/compressed.py [STEPS] [SEEDS]

The model is the transformer of the example `characters` (`examples/characters.py`). The job has two
trainers and two servers in one process, and computes the numbers of processes. A seed determines
the initial parameters and the batches. For each type of gradients, the script prints the bytes that
a trainer sends in a step, and the loss on the validation text: the mean over the seeds, the
smallest and the largest. It fails if the mean of a type differs from the mean of exact jobs by more
than the losses of exact jobs differ between seeds.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

import dtrans
from examples import characters


STEPS, SEEDS, ROWS, TRAINERS = 100, 5, 32, 2
PSERVERS = "127.0.0.1:6174,127.0.0.1:6175"
TYPES = (None, "int8", "e3m0")


def planned(compress: str | None) -> Any:
    """Return the plan of a job that sends gradients in a type; None for their own type."""
    tx, key = characters.optimizer(), jax.random.key(0)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = characters.init(key)
        return params, tx.init(params)

    step = dtrans.make_train_step(characters.loss_fn, tx)
    batch = np.zeros((ROWS, characters.LENGTH + 1), np.int32)
    return dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init, key), batch),
        dtrans.trace(init, key),
        pservers=PSERVERS,
        trainers=TRAINERS,
        mode=dtrans.Sync(compress=compress),
    )


def losses(plan: Any, text: characters.Text, steps: int, seeds: int) -> np.ndarray:
    """Train once with each seed; return the losses on the validation text."""
    job, found = plan.simulate(), []
    for seed in range(seeds):
        state = job.init(jax.random.key(seed))
        for step in range(steps):
            state, _ = job.step(state, characters.batch(text, seed, step, ROWS))
        found.append(characters.validation_loss(job.params(state), text))
    return np.array(found)


def main(steps: int = STEPS, seeds: int = SEEDS) -> int:
    """Train with each type, and print a table; return 1 if a loss is out of bounds, else 0."""
    text, failed = characters.load(), False
    print(f"{steps} steps, {seeds} seeds; losses are in nats per character")
    print("gradients   bytes of a step   share      mean   smallest   largest", flush=True)
    exact, full = np.empty(0), 0
    for compress in TYPES:
        plan = planned(compress)
        found, sent = losses(plan, text, steps, seeds), plan.bytes_per_step["send"]
        if compress is None:
            exact, full = found, sent
        numbers = f"{found.mean():9.4f} {found.min():10.4f} {found.max():9.4f}"
        print(f"{compress or 'float32':9} {sent:17,} {sent / full:7.4f} {numbers}", flush=True)
        failed |= bool(abs(found.mean() - exact.mean()) > np.ptp(exact)) and seeds > 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
