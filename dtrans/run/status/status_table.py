"""Status of a job as two tables for a terminal: its servers and its trainers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dtrans.ir.selection import values_at
from dtrans.protocol.job_status import ServerStatus
from dtrans.run.status.job_view import TrainerRow, merge_trainers
from dtrans.run.status.observer import Answer


NONE = "-"  # shown for a value that the server does not count
SERVER = (
    "endpoint",
    "step",
    "steps/s",
    "in",
    "out",
    "in/s",
    "out/s",
    "rows made",
    "checkpoint",
    "snapshot",
    "doing",
)
TRAINER = ("trainer", "step", "steps/s", "in", "out", "heard", "staleness", "doing")
# columns that are shown only if a row has a value
OPTIONAL = (
    "in",
    "out",
    "in/s",
    "out/s",
    "rows made",
    "checkpoint",
    "snapshot",
    "staleness",
)


def job_tables(answers: Sequence[Answer]) -> Group:
    """Return the tables of a job's servers and trainers."""
    servers = _table(SERVER, [_server(x.endpoint, x.server, x.error) for x in answers])
    rows = merge_trainers(answers)
    if not rows:
        return Group(servers)
    trainers = _table(TRAINER, [_trainer(t) for t in rows])
    return Group(Text(_title(answers, rows)), servers, Text(), trainers)


def _title(answers: Sequence[Answer], rows: Sequence[TrainerRow]) -> str:
    """Return the line above the tables: mode, plan, present trainers and age of the job."""
    first = next(x.server for x in answers if x.server)
    present = sum(t.state == "present" for t in rows)
    plans = {x.server.plan for x in answers if x.server}
    if plans == {""}:
        plan = ""
    elif len(plans) == 1:
        plan = f" plan {first.plan},"
    else:
        plan = " SERVERS OF DIFFERENT PLANS,"
    return (
        f"{first.mode} job,{plan} {present} of {first.count} trainers here, up "
        f"{duration(first.uptime)}"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """Return a table. Optional columns without a value in any row are left out."""
    shown = []
    for i, head in enumerate(heads):
        has_value = any(row[i].plain not in (NONE, "") for row in rows)
        if has_value or head not in OPTIONAL:
            shown.append(i)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i in shown:
        is_last = i == len(heads) - 1
        table.add_column(
            heads[i],
            justify="left" if i == 0 or is_last else "right",
            no_wrap=not is_last,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*values_at(row, shown))
    return table


def _server(endpoint: str, x: ServerStatus | None, error: str) -> list[Text]:
    """Return the cells of a server's row, for the columns `SERVER`.

    Args:
      endpoint: the server's endpoint.
      x: the server's status; None without an answer.
      error: the reason for no answer.
    """
    if x is None:
        return [Text(endpoint), *([Text()] * (len(SERVER) - 2)), Text(error, style="red")]
    doing = x.doing
    for name, seconds in x.saving.items():
        doing = f"saving {name} for {duration(seconds)}; {doing}"
    for number, noun in ((x.refused, "messages"), (x.barred, "connections")):
        if number:
            doing = f"{doing}; {number} {noun} refused"
    rows = NONE
    if x.tables:
        rows = f"{sum(t['created'] for t in x.tables):,}"
    cells = [
        endpoint,
        count(x.step),
        rate(x.steps_per_second),
        size(x.received),
        size(x.sent),
        size(x.received_per_second, "/s"),
        size(x.sent_per_second, "/s"),
        rows,
        _checkpoint(x),
        _snapshot(x),
        doing,
    ]
    return [Text(cell) for cell in cells]


def _checkpoint(x: ServerStatus) -> str:
    last = x.checkpoint
    if not last:
        return NONE
    if last["error"]:
        return f"{last['name']} FAILED"
    return f"{last['name']}, {duration(last['ago'])} ago"


def _snapshot(x: ServerStatus) -> str:
    if not x.generation:
        return count(x.snapshot)
    return f"{count(x.snapshot)}, generation {x.generation}"


def _trainer(t: TrainerRow) -> list[Text]:
    """Return the cells of a trainer's row, for the columns `TRAINER`."""
    heard = NONE if t.silent is None else f"{duration(t.silent)} ago"
    cells = [
        str(t.trainer),
        count(t.step),
        rate(t.steps_per_second),
        size(t.bytes_in),
        size(t.bytes_out),
        heard,
    ]
    style = {"present": "", "left": "dim"}.get(t.state, "red")
    doing = Text(t.doing if t.state == "present" else t.state, style=style)
    return [*map(Text, cells), Text(count(t.staleness)), doing]


# -- numbers ---------------------------------------------------------------------------------------


def count(n: int | None) -> str:
    """Format a count: `1,234`."""
    return NONE if n is None else f"{n:,}"


def rate(x: float | None) -> str:
    """Format steps per second with three digits: `56.1`."""
    if x is None:
        return NONE
    if x >= 100:
        return f"{x:,.0f}"
    return f"{x:.3g}"


def size(n: float | None, per: str = "") -> str:
    """Format a number of bytes with three digits: `1.23 GB`. `per` is appended to the unit."""
    if n is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            break
        n /= 1000
    digits = f"{n:.0f}" if unit == "B" else f"{n:.3g}"
    return f"{digits} {unit}{per}"


def duration(seconds: float) -> str:
    """Format a duration: `12 s`, `5 min`, `3 h`, `2 d`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
