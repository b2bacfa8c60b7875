"""Job of `dtrans example ctr`: a click model whose tables are on parameter servers.

Every role is a process that runs this module. Trainers may allocate only `LIMIT` bytes. So the job
fails if a trainer stores a large table.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import dtrans
from examples import clicks, table_job
from examples.clicks import ENOUGH, TEST, ClickSettings, auc, batch, logits, names, scores, training


LIMIT = 1 << 30  # bytes that a trainer may allocate (RLIMIT_DATA)
MEMORY = 700.0  # bound of a trainer's peak memory, in MB
COMPARED = 300  # one device trains on at most this number of batches
CHUNK = 5_000  # number of test impressions that are scored together


def train(settings: ClickSettings, *, trainers: int, pservers: int, check: bool = True) -> bool:
    """Train, print the AUC and its maximum, and compare the first losses with one device.

    Returns:
      True if the AUC, the difference and the memory of trainers are within bounds. Always True if
      `check` is False.

    Raises:
      ConfigError, BatchError: a setting is invalid.
      LaunchError: a role failed.
    """
    table_job.check_batch(settings.batch_size, trainers, "impressions")
    console = Console(soft_wrap=True, highlight=False)
    left = table_job.launched("examples.click_job", settings, trainers=trainers, pservers=pservers)
    ids, clicked = clicks.test_set(settings)
    best, found = auc(logits(settings.seed, ids), clicked), auc(left[0]["scores"], clicked)
    share = (found - 0.5) / (best - 0.5)
    memory = [float(of["memory"]) for of in left]
    console.print(
        f"AUC {found:.4f} on {TEST:,} test impressions; maximum {best:.4f} (the true "
        f"probabilities): {share:.1%} of what can be learnt"
    )
    peaks = ", ".join(f"{megabytes:,.0f}" for megabytes in memory)
    console.print(
        f"peak memory of the trainers: {peaks} MB (bound {MEMORY:.0f} MB, limit {LIMIT >> 20} MiB "
        "of data)"
    )
    if not check:
        return True
    agree = table_job.losses_agree(console, left[0]["losses"], single_device(settings))
    if share < ENOUGH:
        console.print(f"[red]less than {ENOUGH:.0%} of what can be learnt[/]")
    if max(memory) >= MEMORY:
        console.print(f"[red]a trainer had more than {MEMORY:.0f} MB[/]")
    return agree and share >= ENOUGH and max(memory) < MEMORY


def single_device(settings: ClickSettings) -> np.ndarray:
    """Train on one device with the first batches, and return the losses.

    The tables contain only the rows that these batches look up. Adagrad changes no other rows.
    """
    steps = min(settings.steps, COMPARED)
    batches = [batch(settings, i) for i in range(steps)]
    ids = np.stack([numbers for numbers, _ in batches])
    looked_up = [np.unique(ids[:, :, table]) for table in range(clicks.TABLES)]
    step, init = training(settings)

    def rows_of(tree: Any) -> Any:
        return {**tree, **{n: tree[n][rows] for n, rows in zip(names(), looked_up, strict=True)}}

    def start(key: jax.Array) -> Any:
        params, opt_state = init(key)
        is_params = lambda x: isinstance(x, dict)
        return rows_of(params), jax.tree.map(
            lambda x: rows_of(x) if is_params(x) else x, opt_state, is_leaf=is_params
        )

    def renumbered(i: int) -> tuple[np.ndarray, np.ndarray]:
        ids, clicked = batches[i]
        return np.stack(
            [np.searchsorted(rows, ids[:, t]) for t, rows in enumerate(looked_up)], 1
        ), clicked

    return table_job.single_device(
        settings, step, jax.jit(start)(jax.random.key(settings.seed)), renumbered, steps
    )


# -- a role ----------------------------------------------------------------------------------------


def _scores(job: Any, state: Any, settings: ClickSettings) -> np.ndarray:
    """Return the model's logits of the test set; look up the rows on the servers."""
    ids, _ = clicks.test_set(settings)
    weights, score = state[0]["weights"], jax.jit(scores)
    found = []
    for part in np.array_split(ids, -(-len(ids) // CHUNK)):
        rows = np.stack(
            [job.tables.lookup(f"params/{n}", part[:, t]) for t, n in enumerate(names())], 1
        )
        found.append(score(weights, jnp.asarray(rows)))
    return np.concatenate(found)


def main() -> None:
    """Run the role of this process; trainer 0 also saves the logits of the test set."""
    directory, *rest = sys.argv[1:]
    settings = ClickSettings.parse(rest)
    if dtrans.Role.from_env().is_trainer:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    table_job.be_role(
        directory,
        settings,
        *training(settings),
        lambda i: batch(settings, i),
        lambda job, state: {"scores": _scores(job, state, settings)},
    )


if __name__ == "__main__":
    main()
