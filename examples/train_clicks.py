"""Script `ctr`: predicts clicks, with twenty tables on parameter servers."""

from __future__ import annotations

from typing import Annotated

import typer

from examples import click_job, options
from examples.clicks import ClickSettings


def main(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the largest table.")] = 10_000,
    trainers: options.Trainers = 2,
    pservers: options.PServers = 2,
    steps: Annotated[int, typer.Option(min=2, help="Number of training batches.")] = 6000,
    batch_size: Annotated[int, typer.Option(min=1, help="Impressions in a global batch.")] = 1024,
    deadline: options.Deadline = 60.0,
    seed: options.Seed = 0,
    check: options.Check = True,
) -> None:
    """Predict clicks from 20 features each, with tables on parameter servers."""
    settings = ClickSettings(rows, steps, batch_size, seed, deadline)
    options.end(click_job.train(settings, trainers=trainers, pservers=pservers, check=check))
