"""Script `word2vec`: trains word vectors, with two tables on parameter servers."""

from __future__ import annotations

from typing import Annotated

import typer

from examples import options, word_job
from examples.word2vec import WordSettings


def main(
    loss: Annotated[str, typer.Option(help="`nce`, or `tree` (hierarchical softmax).")] = "nce",
    trainers: options.Trainers = 2,
    pservers: options.PServers = 2,
    steps: Annotated[int, typer.Option(min=2, help="Number of training batches.")] = 3000,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Pairs of words in a global batch.")
    ] = 2048,
    deadline: options.Deadline = 60.0,
    seed: options.Seed = 0,
    plot: options.Plot = None,
    check: options.Check = True,
) -> None:
    """Train word vectors on the source of Python's standard library, with tables on servers."""
    settings = WordSettings(loss, steps, batch_size, seed, deadline)
    options.end(
        word_job.train(settings, trainers=trainers, pservers=pservers, plot=plot, check=check)
    )
