"""Options that the scripts of several examples have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer


Seed: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Seed of the data, the initial parameters and the batches.")
]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="File for a plot of the result.")]
Check: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="Train on one device too, and compare. The exit code is 1 if the result or the "
        "difference is out of bounds."
    ),
]
Trainers: TypeAlias = Annotated[int, typer.Option(min=1, help="Number of trainers.")]
PServers: TypeAlias = Annotated[int, typer.Option(min=1, help="Number of parameter servers.")]
Deadline: TypeAlias = Annotated[
    float, typer.Option(min=0.1, help="Seconds that a role may wait for another role.")
]


def end(within: bool) -> None:
    """End the script with exit code 1 if a checked result is out of bounds."""
    if not within:
        raise typer.Exit(1)
