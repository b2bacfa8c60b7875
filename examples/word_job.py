"""Job of `dtrans example word2vec`: word vectors on parameter servers, compared with one device.

Every role is a process that runs this module. The launching process reads the text once, and writes
it to a file for the roles.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from dtrans.errors import ConfigError
from examples import report, table_job
from examples.word2vec import (
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


TEXT = "words.npz"
SHOWN = 5  # number of nearest words that are printed


def train(
    settings: WordSettings,
    *,
    trainers: int,
    pservers: int,
    plot: Path | None = None,
    check: bool = True,
) -> bool:
    """Train, print the nearest words of the test words, and compare the losses with one device.

    Returns:
      True if the vectors and the difference are within bounds. Always True if `check` is False.

    Raises:
      ConfigError, BatchError: a setting is invalid.
      LaunchError: a role failed.
    """
    table_job.check_batch(settings.batch_size, trainers, "pairs")
    if plot is not None:
        report.check_plot(plot)
    console = Console(soft_wrap=True, highlight=False)
    words = read(settings.seed)
    console.print(
        f"{words.counts.sum():,} words, {len(words.words):,} different; {len(words.centers):,} "
        "pairs"
    )
    found = table_job.launched(
        "examples.word_job",
        settings,
        trainers=trainers,
        pservers=pservers,
        leave=lambda directory: words.save(directory / TEXT),
    )
    single = single_device(settings, words) if check else None
    if plot is not None:
        plot_words(plot, words, found[0]["vectors"])
        console.print(f"plot of the vectors: {plot}")
    return _compare(console, settings, words, found, single)


def single_device(settings: WordSettings, words: Words) -> np.ndarray:
    """Train on one device, and return the losses."""
    step, init = training(settings, words.counts)
    state = jax.jit(init)(jax.random.key(settings.seed))
    return table_job.single_device(
        settings, step, state, lambda i: words.batch(settings, i), settings.steps
    )


def plot_words(path: Path, words: Words, vectors: np.ndarray) -> None:
    """Plot the test words and their nearest words along their first two principal components."""
    from matplotlib.figure import Figure

    shown = sorted({n for w in PARTNERS for n in (w, *nearest(words, vectors, w, SHOWN))})
    at = [int(np.flatnonzero(words.words == w)[0]) for w in shown]
    unit = vectors[at] / np.linalg.norm(vectors[at], axis=1, keepdims=True)
    _, _, axes_of = np.linalg.svd(unit - unit.mean(0), full_matrices=False)
    flat = unit @ axes_of[:2].T
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot(
        title="word vectors of Python's standard library", xticks=[], yticks=[]
    )
    axes.scatter(
        flat[:, 0],
        flat[:, 1],
        s=8,
        color=["tab:red" if w in PARTNERS else "tab:blue" for w in shown],
    )
    for w, point in zip(shown, flat, strict=True):
        axes.annotate(
            w, point, fontsize=9 if w in PARTNERS else 7, xytext=(3, 2), textcoords="offset points"
        )
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise ConfigError(f"the plot cannot be written to {path}: {e.strerror}") from e


def _compare(
    console: Console,
    settings: WordSettings,
    words: Words,
    left: list[dict[str, np.ndarray]],
    single: np.ndarray | None,
) -> bool:
    """Print the results, and return True if they are within bounds.

    Args:
      console: prints the results.
      settings: the settings.
      words: the text.
      left: the arrays that each trainer has saved.
      single: the losses of one device, or None.
    """
    losses, vectors = left[0]["losses"], left[0]["vectors"]
    found = with_partners(words, vectors)
    report.show_table(
        f"the {SHOWN} nearest words", ("word", "nearest"),
        [(w, " ".join(nearest(words, vectors, w, SHOWN))) for w in list(PARTNERS)[::2]],
        left=2,
    )  # fmt: skip
    last = losses[-settings.steps // 10 :].mean()
    memory = ", ".join(f"{of['memory']:,.0f}" for of in left)
    console.print(
        f"mean loss of a pair in the last tenth of the steps {last:.4f}; memory of trainers "
        f"{memory} MB"
    )
    console.print(
        f"{len(found)} of {len(PARTNERS)} test words have a partner among their {NEAREST} nearest "
        "words"
    )
    if single is None:
        return True
    agree = table_job.losses_agree(console, losses, single)
    if len(found) < ENOUGH:
        console.print(f"[red]fewer than {ENOUGH} words have a partner[/]")
    return len(found) >= ENOUGH and agree


# -- a role ----------------------------------------------------------------------------------------


def main() -> None:
    """Run the role of this process; trainer 0 also saves the vectors of all words."""
    directory, *rest = sys.argv[1:]
    settings, words = WordSettings.parse(rest), Words.load(Path(directory) / TEXT)
    table_job.be_role(
        directory,
        settings,
        *training(settings, words.counts),
        lambda i: words.batch(settings, i),
        lambda job, _: {"vectors": job.tables.lookup("params/word", np.arange(len(words.words)))},
    )


if __name__ == "__main__":
    main()
