"""Tick tables and Gantt charts of pipeline schedules, simulated or measured.

A chart has a row for each device and a bar for each task. If the number of the task's micro-batch
fits, the bar shows it. Idle time is grey. One image may contain several charts, such as the plan
and the measured run.
"""

from __future__ import annotations

import html as html_escape
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dtrans.errors import ConfigError, missing_extra
from dtrans.pipeline_parallel.task import Task, TimedTask, Timeline


if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ticks: TypeAlias = Sequence[Sequence[Task | None]]

# Kind of task -> its title, and its colour for each chunk. The last two colours are dark. Kinds
# also differ in lightness, so that charts can be read in black and white.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "F": ("forward", ("#a6d0ec", "#6aaada", "#3478b4", "#1d4a76")),
    "B": ("backward", ("#f7ad69", "#e07f2a", "#b1560f", "#7a3906")),
    "W": ("gradients of weights", ("#dde9a4", "#b4cb62", "#7f972f", "#52641a")),
}
_DARK = {colour for _, colours in KINDS.values() for colour in colours[2:]}
_IDLE = "#eeeeee"  # colour of idle time
_LINE = 120  # characters in a line of a tick table
_TEXT = 7.0  # font size of the numbers in bars, in points


# -- tables ----------------------------------------------------------------------------------------


def text(title: str, ticks: Ticks) -> str:
    """Return a schedule as a text table: a row for each device, a column for each tick of time.

    `F3` is the forward task of micro-batch 3, and `.` is an idle tick. If devices have several
    model stages, `F3@5` is the forward task of micro-batch 3 at model stage 5. Lines are wrapped at
    120 characters.

    Args:
      title: the first line.
      ticks: the task of each device in each tick, as [device][tick]; None for an idle tick.
    """
    table = [list(map(str, range(len(ticks[0]))))]
    for row in ticks:
        table.append([_cell(ticks, task) for task in row])
    heads = ["tick", *(f"device {d}" for d in range(len(ticks)))]
    left = max(map(len, heads))
    width = max(len(cell) for cells in table for cell in cells)
    fit = max(1, (_LINE - left - 1) // (width + 1))
    lines = [title]
    for first in range(0, len(table[0]), fit):
        for head, texts in zip(heads, table, strict=True):
            cells = " ".join(cell.ljust(width) for cell in texts[first : first + fit])
            lines.append(f"{head.ljust(left)}  {cells}".rstrip())
    return "\n".join(lines)


def html(title: str, ticks: Ticks) -> str:
    """Return the table of `text` as coloured HTML. The arguments are the same."""
    rows = []
    for device, row in enumerate(ticks):
        cells = []
        for task in row:
            content = _cell(ticks, task) if task else ""
            cells.append(f"<td style='{_style(ticks, task)}'>{content}</td>")
        rows.append(f"<tr><th>device&nbsp;{device}</th>{''.join(cells)}</tr>")
    return (
        f"<b>{html_escape.escape(title)}</b>"
        f"<div style='overflow-x:auto'><table style='font-size:80%'>{''.join(rows)}</table></div>"
    )


def _cell(ticks: Ticks, task: Task | None) -> str:
    if task is None:
        return "."
    has_chunks = any(t is not None and t.stage >= len(ticks) for row in ticks for t in row)
    return str(task) if has_chunks else str(task).partition("@")[0]


def _style(ticks: Ticks, task: Task | None) -> str:
    colour = _colour(task, len(ticks)) if task else _IDLE
    return f"background:{colour};color:{_ink(colour)};text-align:center;padding:1px 4px"


def _colour(task: Task, num_devices: int) -> str:
    colours = KINDS[task.kind][1]
    return colours[task.stage // num_devices % len(colours)]


def _ink(colour: str) -> str:
    return "white" if colour in _DARK else "black"


# -- charts ----------------------------------------------------------------------------------------


def draw(
    path: str | os.PathLike[str],
    timelines: Sequence[tuple[str, Iterable[TimedTask]]],
    *,
    num_devices: int = 0,
    unit: str | Sequence[str] = "",
) -> None:
    """Draw Gantt charts into an image file, one panel for each entry of `timelines`.

    The times of a panel count from the panel's first task. In an SVG file, each bar is a group with
    an id such as `play0-F3-stage1`.

    Args:
      path: the file. Its suffix selects the format: .svg, .png, or another format of matplotlib.
      timelines: a title and timed tasks for each panel. The share of idle time is added to the
        title.
      num_devices: the least number of rows; by default, the number of devices with a task.
      unit: the unit of time: one for all panels, or one for each panel. Panels with equal units
        share a scale.

    Raises:
      ConfigError: matplotlib is not installed, the file cannot be written, or `timelines` has no
        tasks.
    """
    file, panels = Path(path), [(title, Timeline(timed)) for title, timed in timelines]
    if isinstance(unit, str):
        unit = [unit] * len(panels)
    units = list(unit)
    _check(file, panels, units)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    devices = max(num_devices, *(timeline.num_devices for _, timeline in panels))
    # This code does not use pyplot, which looks for a window system and changes global state.
    figure = Figure(figsize=(12, 0.6 + len(panels) * (0.75 + 0.3 * devices)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]

    # The scale of each unit is the longest makespan of its panels.
    longest: dict[str, float] = {}
    for unit_of_panel, (_, timeline) in zip(units, panels, strict=True):
        so_far = longest.get(unit_of_panel, 0.0)
        longest[unit_of_panel] = max(so_far, float(timeline.makespan))
    shades: dict[tuple[str, int], Any] = {}
    for axes, (title, timeline), unit_of_panel in zip(grid, panels, units, strict=True):
        bubble = f"{title} (bubble {float(timeline.bubble):.1%})"
        _lay_out(axes, bubble, devices, longest[unit_of_panel], unit_of_panel)
        for t in timeline:
            shades.setdefault((t.task.kind, t.task.stage // devices), _colour(t.task, devices))

    chunks = max(chunk for _, chunk in shades) + 1
    split = any(kind == "W" for kind, _ in shades)
    handles = []
    for key in sorted(shades, key=_by_kind):
        handles.append(Patch(color=shades[key], label=_label(*key, chunks, split)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(shades), 6),
        frameon=False,
        fontsize=9,
    )

    # An SVG file stores text as text. It has no date and a fixed salt, so that two runs write equal
    # files.
    metadata = {"Date": None} if file.suffix.lower() == ".svg" else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dtrans"}):
        figure.draw_without_rendering()  # This computes the widths of axes, which `_bars` reads.
        for i, (axes, (_, timeline)) in enumerate(zip(grid, panels, strict=True)):
            _bars(axes, i, timeline, devices)
        try:
            figure.savefig(file, dpi=150, metadata=metadata)
        except OSError as e:
            raise ConfigError(
                f"the chart cannot be written to {file}: {e.strerror}; pass another path"
            ) from e


def _check(path: Path, panels: Sequence[tuple[str, Timeline]], units: Sequence[str]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_extra("a Gantt chart needs matplotlib", "examples")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.filetypes)
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"the chart cannot be written to {path}: its name must end in one of {', '.join(kinds)}"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"the chart cannot be written to {path}: the directory {path.parent} does not exist; "
            "create it, or pass another path"
        )
    if not panels:
        raise ConfigError("timelines is empty; pass timelines=[(title, timed tasks), ...]")
    if len(units) != len(panels):
        raise ConfigError(
            f"unit has {len(units)} entries for {len(panels)} timelines; pass one unit for each "
            "timeline, or one string for all"
        )
    for title, timeline in panels:
        if not timeline:
            raise ConfigError(f"the timeline {title!r} has no tasks to draw; pass at least one")
        for t in timeline:
            if t.task.kind not in KINDS:
                raise ConfigError(
                    f"the timeline {title!r} contains {t.task}, whose kind is {t.task.kind!r}; "
                    f"expected one of {', '.join(KINDS)}"
                )


def _lay_out(axes: Axes, title: str, devices: int, longest: float, unit: str) -> None:
    """Set the title, the labels and the scales of a panel."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(f"time ({unit})" if unit else "time", fontsize=9)
    axes.set_ylabel("device", fontsize=9)
    axes.set_xlim(0, longest or 1)
    axes.set_ylim(devices - 0.5, -0.5)  # Device 0 is on top.
    axes.set_yticks(range(devices))
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bars(axes: Axes, panel: int, timeline: Timeline, devices: int) -> None:
    """Draw the bars of a panel. Wide bars contain the number of the micro-batch."""
    figure = axes.get_figure()
    assert figure is not None
    points_per_time = axes.get_window_extent().width * 72 / figure.dpi / axes.get_xlim()[1]
    first = min(t.start for t in timeline)
    axes.barh(range(devices), float(timeline.makespan), height=0.8, color=_IDLE, zorder=0)
    lefts = [float(t.start - first) for t in timeline]
    durations = [float(t.end - t.start) for t in timeline]
    colours = [_colour(t.task, devices) for t in timeline]
    rows = [t.device for t in timeline]
    bars = axes.barh(rows, durations, left=lefts, height=0.8, color=colours, edgecolor="white")
    for bar, t, left, duration in zip(bars, timeline, lefts, durations, strict=True):
        bar.set_gid(f"timeline{panel}-{t.task.kind}{t.task.micro}-stage{t.task.stage}")
        width, number = duration * points_per_time, str(t.task.micro)
        bar.set_linewidth(min(0.5, width / 5))
        # The width of a digit is about 0.65 times the font size.
        if width >= 0.65 * _TEXT * len(number) + 2:
            axes.text(
                left + duration / 2,
                t.device,
                number,
                ha="center",
                va="center_baseline",
                fontsize=_TEXT,
                color=_ink(_colour(t.task, devices)),
            )


def _label(kind: str, chunk: int, chunks: int, split: bool) -> str:
    name = "cotangents of inputs" if kind == "B" and split else KINDS[kind][0]
    return f"{name}, chunk {chunk}" if chunks > 1 else name


def _by_kind(key: tuple[str, int]) -> tuple[int, int]:
    return list(KINDS).index(key[0]), key[1]
