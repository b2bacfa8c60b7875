"""Reports of jobs: tables of plans and of results, progress bars, and the plot of the loss."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError, missing_extra
from dtrans.parameter_server.plan import PServerPlan
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.zero.plan import ShardingPlan
from examples.digits_training import DigitsSettings


def show_plan(plan: PServerPlan | CollectivePlan) -> None:
    """Print the plan's table (blocks and servers, or buckets of gradients) and its notes."""
    console = Console(soft_wrap=True)
    if isinstance(plan, PServerPlan):
        title = f"{plan.trainers} trainers, {len(plan.servers)} pservers"
        columns = {"block": "left", "rows": "right", "bytes": "right", "endpoint": "left"}
    else:
        kind = "ranks of sharding" if isinstance(plan, ShardingPlan) else "trainers"
        title = f"{plan.trainers} {kind}"
        columns = {"bucket": "left", "gradients of": "left", "type": "left", "bytes": "right"}
    table = Table(title=title, title_justify="left")
    for name, side in columns.items():
        table.add_column(name, justify="right" if side == "right" else "left")
    for row in plan.rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)


def show_stages(plan: PipelinePlan, where: str) -> None:
    """Print a table of the stages, narrower than the plan's table: parameters, work and bytes."""
    o = plan.options
    also = f", {o.replicas} replicas" if o.replicas > 1 else ""
    show_table(
        f"{o.model_stages} stages on {where}{also}; per micro-batch: Mflop, bytes sent and saved",
        ("stage", "parameters", "Mflop", "sent", "saved", "stored"),
        [
            (
                str(s.index),
                f"{len(s.params)}: {', '.join(_layers(s.params))}",
                f"{s.flops / 1e6:,.1f}",
                *map(_kib, (s.sends, s.saves, s.stores)),
            )
            for s in plan.stages
        ],
        left=2,
    )
    for note in plan.notes:
        Console(soft_wrap=True).print(note, highlight=False, markup=False)


def _layers(names: Iterable[str]) -> list[str]:
    """Return the layers of some parameters: `blocks/0` for `params/blocks/0/up`."""
    parts = [name.split("/")[1:] for name in names]
    return list(dict.fromkeys("/".join(p[: 1 + (len(p) > 1 and p[1].isdigit())]) for p in parts))


def _kib(count: int) -> str:
    return f"{count / 1024:,.0f} KiB"


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
) -> None:
    """Print a table whose first `left` columns are left-aligned, and all others right-aligned."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(soft_wrap=True).print(table)


@contextlib.contextmanager
def progress_of_steps(
    steps: int, what: str, shown: bool = True
) -> Iterator[Callable[[float], None]]:
    """Show progress; yield a function that the caller calls after each step, with the loss."""
    with _progress(steps, f"{what:10}", shown) as advance:
        yield lambda loss: advance(f"loss {loss:.4f}")


@contextlib.contextmanager
def progress(
    settings: DigitsSettings, *, what: str = "loss", shown: bool = True
) -> Iterator[Callable[[int, float], None]]:
    """Show progress; yield a function of epoch and loss that the caller calls after each step.

    Args:
      settings: the settings of the job.
      what: name of the loss.
      shown: False to print nothing.
    """
    total = settings.epochs * settings.steps_per_epoch
    with _progress(total, "training", shown) as advance:
        yield lambda epoch, loss: advance(f"epoch {epoch + 1}/{settings.epochs} {what} {loss:.4f}")


LINES = 10  # number of progress lines if the output is not a terminal


@contextlib.contextmanager
def _progress(steps: int, what: str, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a progress bar, or some lines if the output is not a terminal.

    Yields:
      A function that the caller calls after each step, with a text to show.
    """
    console = Console(soft_wrap=True, highlight=False)
    if shown and not console.is_terminal:
        done = itertools.count(1)

        def line(news: str) -> None:
            at = next(done)
            if at * LINES // steps > (at - 1) * LINES // steps:
                console.print(f"{what.strip()}: step {at} of {steps}, {news}", markup=False)

        yield line
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
    )
    bar = Progress(
        *columns,
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not shown,
    )
    task = bar.add_task("train", total=steps, news="")
    with bar:
        yield lambda news: bar.update(task, advance=1, news=news)


def check_plot(path: Path) -> None:
    """Check, before training, that the plot can be written after training.

    Raises:
      ConfigError: matplotlib is not installed, the folder does not exist, or the suffix is unknown.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_extra("--plot needs matplotlib", "examples")
    if not path.parent.is_dir():
        raise ConfigError(
            f"the plot cannot be written to {path}: the folder {path.parent} does not exist; "
            "create it, or pass another path"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.filetypes)
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"the plot cannot be written to {path}: its name must end in one of {', '.join(kinds)}"
        )


def plot_losses(path: Path, distributed: np.ndarray, single: np.ndarray | None, title: str) -> None:
    """Plot the losses of the job, and of one device, over the steps.

    Raises:
      ConfigError: the file cannot be written; also as in `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    # pyplot is not used, because it has global state and may need a window system
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="step", ylabel="training loss (mean cross entropy)", title=title, yscale="log"
    )
    axes.plot(distributed, color="tab:blue", linewidth=3, alpha=0.5, label="distributed")
    if single is not None:
        axes.plot(single, color="black", linewidth=1, linestyle="--", label="single device")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise ConfigError(f"the plot cannot be written to {path}: {e.strerror}") from e
