"""Script `digits`: trainers learn handwritten digits with a perceptron."""

from __future__ import annotations

from typing import Annotated

import typer

from examples import digits_job, options
from examples.digits_training import DigitsSettings


def main(
    mode: Annotated[
        str,
        typer.Option(
            help="`pserver`, `nccl2` (trainers only) or `sharding` (ZeRO: each trainer stores a "
            "slice of the state)."
        ),
    ] = "pserver",
    engine: Annotated[
        str, typer.Option(help="`processes`: one per role. `mesh`: all roles in this process.")
    ] = "processes",
    trainers: options.Trainers = 2,
    pservers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of parameter servers, only in pserver mode.", show_default="2"
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="sgd, momentum, adam, adamw, lion, rmsprop, ...")
    ] = "momentum",
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the images.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a global batch.")] = 64,
    min_block_size: Annotated[
        int, typer.Option(help="Minimum number of elements in a block; 8192 or more.")
    ] = 8192,
    sharding_stage: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=3,
            help="Only in sharding mode: 1 shards the optimizer state, 2 also gradients, 3 also "
            "parameters.",
            show_default="3",
        ),
    ] = None,
    deadline: options.Deadline = 60.0,
    seed: options.Seed = 0,
    plot: options.Plot = None,
    check: options.Check = True,
) -> None:
    """Train a perceptron on handwritten digits, with parameter servers, nccl2 or sharding."""
    settings = DigitsSettings(
        optimizer, epochs, batch_size, seed, min_block_size, sharding_stage or 0, deadline
    )
    within = digits_job.train(
        settings,
        engine=engine,
        mode=mode,
        trainers=trainers,
        pservers=pservers,
        plot=plot,
        check=check,
    )
    options.end(within)
