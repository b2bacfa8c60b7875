"""The job of `dtrans train --model word2vec`: word vectors on parameter servers, beside one device.

Every role is a process that runs this module; the launcher reads the text, and leaves it in a file for them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import dtrans
from dtrans.errors import BatchError, ConfigError
from dtrans.examples import report
from dtrans.examples.word2vec import (
    ENOUGH,
    NEAREST,
    PARTNERS,
    Words,
    WordSettings,
    nearest,
    read,
    training,
    with_partners,
)
from dtrans.run.distributed.launcher import launch


TEXT = "words.npz"
SHOWN = 5  # nearest words that are printed
BOUND = 1e-3  # of the difference of losses, relative to the largest: rounding, amplified by some thousand steps


def train(
    settings: WordSettings, *, trainers: int, pservers: int, plot: Path | None = None, check: bool = True
) -> bool:
    """Train, print the nearest of some words, and compare the losses with those of one device.

    Returns:
      Whether what was learnt, and the difference, are within bounds. True where nothing is checked.

    Raises:
      ConfigError, BatchError: settings that cannot be; LaunchError: a role failed.
    """
    if settings.batch_size % trainers:
        raise BatchError(
            f"a batch of {settings.batch_size} pairs cannot be divided among {trainers} trainers: give --batch-size a "
            "multiple of --trainers"
        )
    if plot is not None:
        report.check_plot(plot)
    console = Console(soft_wrap=True, highlight=False)
    words = read(settings.seed)
    console.print(f"{words.counts.sum():,} words, {len(words.words):,} different; {len(words.centers):,} pairs")
    with tempfile.TemporaryDirectory(prefix="dtrans-train-") as directory:
        words.save(Path(directory) / TEXT)
        command = [sys.executable, "-m", "dtrans.examples.word_job", directory, *settings.arguments()]
        env = {"JAX_ENABLE_X64": str(int(jax.config.read("jax_enable_x64")))}
        launch(command, trainers=trainers, pservers=pservers, mode="pserver", env=env, inherit_stdout=True)
        with np.load(Path(directory) / "found.npz") as file:
            losses, vectors, memory = file["losses"], file["vectors"], file["memory"]
    single = single_device(settings, words) if check else None
    if plot is not None:
        plot_words(plot, words, vectors)
        console.print(f"plot of the vectors: {plot}")
    return _compare(console, settings, words, losses, vectors, single, memory)


def single_device(settings: WordSettings, words: Words) -> np.ndarray:
    """The losses of the same training on one device."""
    step, init = training(settings, words.counts)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    (params, opt_state), losses = jax.jit(init)(jax.random.key(settings.seed)), []
    for i in range(settings.steps):
        params, opt_state, loss = jitted(params, opt_state, *words.batch(settings, i))
        losses.append(loss)
    return np.array(losses) / settings.batch_size


def plot_words(path: Path, words: Words, vectors: np.ndarray) -> None:
    """Draw the words of `PARTNERS` and their nearest, by the two directions in which these differ most."""
    from matplotlib.figure import Figure

    shown = sorted({n for w in PARTNERS for n in (w, *nearest(words, vectors, w, SHOWN))})
    at = [int(np.flatnonzero(words.words == w)[0]) for w in shown]
    unit = vectors[at] / np.linalg.norm(vectors[at], axis=1, keepdims=True)
    _, _, axes_of = np.linalg.svd(unit - unit.mean(0), full_matrices=False)
    flat = unit @ axes_of[:2].T
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot(title="word vectors of Python's standard library", xticks=[], yticks=[])
    axes.scatter(flat[:, 0], flat[:, 1], s=8, color=["tab:red" if w in PARTNERS else "tab:blue" for w in shown])
    for w, point in zip(shown, flat, strict=True):
        axes.annotate(w, point, fontsize=9 if w in PARTNERS else 7, xytext=(3, 2), textcoords="offset points")
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise ConfigError(f"the plot cannot be written to {path}: {e.strerror}") from e


def _compare(
    console: Console,
    settings: WordSettings,
    words: Words,
    losses: np.ndarray,
    vectors: np.ndarray,
    single: np.ndarray | None,
    memory: np.ndarray,
) -> bool:
    """Print the verdict."""
    found = with_partners(words, vectors)
    report.show_table(
        f"the {SHOWN} nearest words", ("word", "nearest"),
        [(w, " ".join(nearest(words, vectors, w, SHOWN))) for w in list(PARTNERS)[::2]],
        left=2,
    )  # fmt: skip
    last = losses[-settings.steps // 10 :].mean()
    held = ", ".join(f"{m:,.0f}" for m in memory)
    console.print(f"mean loss of a pair in the last tenth of the steps {last:.4f}; a trainer's memory {held} MB")
    console.print(f"of {len(PARTNERS)} words {len(found)} have a partner among their {NEAREST} nearest")
    if single is None:
        return True
    apart = float(np.max(np.abs(losses - single)) / np.max(np.abs(single)))
    bound = 1e-9 if jax.config.read("jax_enable_x64") else BOUND
    console.print(f"losses against one device on the same {len(single)} batches: max difference {apart:.1e} of the "
                  f"largest (bound {bound:.0e})")  # fmt: skip
    if len(found) < ENOUGH:
        console.print(f"[red]fewer than {ENOUGH} words have a partner[/]")
    if not apart < bound:
        console.print(f"[red]the difference is above the bound of {bound:.0e}[/]")
    return len(found) >= ENOUGH and apart < bound


# -- a role ----------------------------------------------------------------------------------------


def main() -> None:
    """Be the role that the environment says; trainer 0 leaves what it found as `found.npz` in a directory."""
    directory, *rest = sys.argv[1:]
    settings, role = WordSettings.parse(rest), dtrans.Role.from_env()
    words, key = Words.load(Path(directory) / TEXT), jax.random.key(settings.seed)
    step, init = training(settings, words.counts)
    part: Any = [x[: settings.batch_size // role.trainers] if x.ndim else x for x in words.batch(settings, 0)]
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
        shown = report.progress_of_steps(settings.steps, "training", shown=first)
        with shown as advance:
            for i in range(settings.steps):
                state, loss = job.step(state, *job.shard_batch(*words.batch(settings, i)))
                losses.append(float(loss) / settings.batch_size)
                advance(losses[-1])
        if first:
            vectors = job.lookup("params/word", np.arange(len(words.words)))
            np.savez(Path(directory) / "found.npz", losses=losses, vectors=vectors, memory=[_peak()])


def _peak() -> float:
    """The most memory that this process has had, in MB; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


if __name__ == "__main__":
    main()
