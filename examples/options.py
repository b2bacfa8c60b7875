"""Options that the scripts of several examples have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer


Seed: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Of the data, the first parameters and the batches.")
]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="Draw into this file.")]
Check: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="Train on one device too, compare, and end with exit code 1 when what was learnt, or "
        "the difference, is "
        "out of bounds."
    ),
]
Trainers: TypeAlias = Annotated[int, typer.Option(min=1, help="How many trainers.")]
PServers: TypeAlias = Annotated[int, typer.Option(min=1, help="How many parameter servers.")]
Deadline: TypeAlias = Annotated[
    float, typer.Option(min=0.1, help="Seconds that any role may wait for another.")
]


def end(within: bool) -> None:
    """End the script with exit code 1 unless all that was checked is within bounds."""
    if not within:
        raise typer.Exit(1)
