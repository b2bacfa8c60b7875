"""What the digits job shows: the placement table, a progress bar, and the plot of the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dtrans.errors import ConfigError
from dtrans.examples.job import Settings
from dtrans.plan import PServerPlan


def show_plan(plan: PServerPlan) -> None:
    """Print which block lives where, and what a step moves."""
    console = Console(soft_wrap=True)
    table = Table(title=f"{plan.trainers} trainers, {len(plan.servers)} pservers", title_justify="left")
    table.add_column("block")
    table.add_column("rows", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("endpoint")
    for row in plan.rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)


@contextlib.contextmanager
def progress(settings: Settings, *, shown: bool = True) -> Iterator[Callable[[int, float], None]]:
    """A progress bar over all steps. Yields what is to be called after each, with the epoch and the loss."""
    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        disable=not shown,
    )
    total = settings.epochs * settings.steps_per_epoch
    task = bar.add_task("train", total=total, epoch=0, epochs=settings.epochs, loss=float("nan"))
    with bar:
        yield lambda epoch, loss: bar.update(task, advance=1, epoch=epoch + 1, loss=loss)


def plot_losses(path: Path, distributed: np.ndarray, single: np.ndarray, title: str) -> None:
    """Draw both losses over the steps into an image file; its ending says of which kind.

    Raises:
      ConfigError: matplotlib is not installed, or it cannot write there.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError("--plot needs matplotlib: pip install 'dtrans[examples]'") from e
    # a figure of its own, without pyplot: no window system is asked for, no global state changes
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="training loss (mean cross entropy)", title=title, yscale="log")
    axes.plot(distributed, color="tab:blue", linewidth=3, alpha=0.5, label="distributed")
    axes.plot(single, color="black", linewidth=1, linestyle="--", label="single device")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as e:
        raise ConfigError(f"the plot cannot be written to {path}: {e}") from e
