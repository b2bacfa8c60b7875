"""What the digits job shows: the placement table, a progress bar, and the plot of the loss."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dtrans.collective import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.examples.job import Settings
from dtrans.plan import PServerPlan


def show_plan(plan: PServerPlan | CollectivePlan) -> None:
    """Print which block lives where, or which gradients are reduced together, and what a step moves."""
    console = Console(soft_wrap=True)
    if isinstance(plan, PServerPlan):
        title = f"{plan.trainers} trainers, {len(plan.servers)} pservers"
        columns = {"block": "left", "rows": "right", "bytes": "right", "endpoint": "left"}
    else:
        title = f"{plan.trainers} trainers"
        columns = {"bucket": "left", "gradients of": "left", "type": "left", "bytes": "right"}
    table = Table(title=title, title_justify="left")
    for name, side in columns.items():
        table.add_column(name, justify="right" if side == "right" else "left")
    for row in plan.rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)


@contextlib.contextmanager
def progress(settings: Settings, *, what: str = "loss", shown: bool = True) -> Iterator[Callable[[int, float], None]]:
    """A progress bar over all steps. Yields what is to be called after each, with the epoch and the loss.

    Args:
      what: the loss it is.
      shown: whether to draw it.
    """
    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{what} {{task.fields[loss]}}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        disable=not shown,
    )
    total = settings.epochs * settings.steps_per_epoch
    task = bar.add_task("train", total=total, epoch=0, epochs=settings.epochs, loss="-")
    with bar:
        yield lambda epoch, loss: bar.update(task, advance=1, epoch=epoch + 1, loss=f"{loss:.4f}")


def check_plot(path: Path) -> None:
    """Say before training what would prevent a plot after it.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'dtrans[examples]'")
    if not path.parent.is_dir():
        raise ConfigError(f"the plot cannot be written to {path}: there is no directory {path.parent}")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.filetypes)
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"the plot cannot be written to {path}: its name must end in one of {', '.join(kinds)}")


def plot_losses(path: Path, distributed: np.ndarray, single: np.ndarray, title: str) -> None:
    """Draw both losses over the steps into an image file; its ending says of which kind.

    Raises:
      ConfigError: the file cannot be written; or as `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    # a figure of its own, without pyplot: no window system is asked for, no global state changes
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss (mean cross entropy)", title=title, yscale="log")
    axes.plot(distributed, color="tab:blue", linewidth=3, alpha=0.5, label="distributed")
    axes.plot(single, color="black", linewidth=1, linestyle="--", label="single device")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise ConfigError(f"the plot cannot be written to {path}: {e.strerror}") from e
