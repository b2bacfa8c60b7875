"""Script `characters`: trains a transformer on Python's standard library, with a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples import character_job, options


def main(
    engine: Annotated[
        str,
        typer.Option(help="`mesh`: a device for each stage. `simulate`: all stages on one device."),
    ] = "mesh",
    stages: Annotated[
        int,
        typer.Option(min=1, help="Number of devices of a replica."),
    ] = 2,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Number of micro-batches of each replica.")
    ] = 8,
    schedule: Annotated[
        str,
        typer.Option(
            help="`PreferForward` (`GPipe`), `PreferBackward` (`1F1B`), `PreferBackwardOptimizer`, "
            "`Interleaved` or `ZeroBubble` (`ZB-H1`)."
        ),
    ] = "PreferBackward",
    replicas: Annotated[
        int, typer.Option(min=1, help="Number of copies of the pipeline, which divide each batch.")
    ] = 1,
    chunks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stages on each device.", show_default="2 for Interleaved, else 1"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Number of training batches.")] = 100,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows of characters in a global batch.")
    ] = 32,
    seed: options.Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(help="File for a plot of the planned and measured schedule.")
    ] = None,
    check: options.Check = True,
) -> None:
    """Train a transformer on the source of Python's standard library, with a pipeline."""
    per_device = chunks or (2 if schedule.lower() == "interleaved" else 1)
    shape = (stages, micro_batches, schedule, replicas, per_device)
    settings = character_job.CharactersSettings(*shape, steps, batch_size, seed, engine)
    options.end(character_job.train(settings, plot=plot, check=check))
