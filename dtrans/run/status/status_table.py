"""The status of a job as tables for a terminal: one row for each server, and one for each trainer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dtrans.protocol.job_status import ServerStatus
from dtrans.run.status.job_view import TrainerRow, merge_trainers
from dtrans.run.status.observer import Answer


NONE = "-"  # where there is nothing to count


def job_tables(answers: Sequence[Answer]) -> Group:
    """Return the tables of a job's servers and trainers."""
    tables = any(x.server.tables for x in answers if x.server)
    heads = ["server", "step", "steps/s", "in", "out", "in/s", "out/s"]
    servers = _table([*heads, *(["rows made"] * tables), "checkpoint"], "doing")
    for x in answers:
        if x.server is None:
            blank = [""] * (len(servers.columns) - 2)
            servers.add_row(Text(x.endpoint), *blank, Text(x.error, style="red"))
        else:
            servers.add_row(*_server(x.endpoint, x.server, tables))
    rows = merge_trainers(answers)
    if not rows:
        return Group(servers)
    stale = any(t.staleness is not None for t in rows)
    heads = ["trainer", "step", "steps/s", "in", "out", "heard"]
    trainers = _table([*heads, *(["staleness"] * stale)], "doing")
    for t in rows:
        trainers.add_row(*_trainer(t, stale))
    return Group(Text(_title(answers, rows)), servers, Text(), trainers)


def _title(answers: Sequence[Answer], rows: Sequence[TrainerRow]) -> str:
    first = next(x.server for x in answers if x.server)
    present = sum(t.state == "present" for t in rows)
    plans = {x.server.plan for x in answers if x.server}
    plan = f"plan {first.plan}" if len(plans) == 1 else "SERVERS OF DIFFERENT PLANS"
    return f"{first.mode} job, {plan}, {present} of {first.count} trainers here, up {duration(first.uptime)}"


def _table(heads: Sequence[str], last: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    table.add_column(last, justify="left", overflow="fold")
    return table


def _server(endpoint: str, x: ServerStatus, tables: bool) -> list[Text]:
    doing = x.doing
    for name, seconds in x.saving.items():
        doing = f"saving {name} for {duration(seconds)}; {doing}"
    wrong = [f"{n} {what} refused" for n, what in ((x.refused, "messages"), (x.barred, "connections")) if n]
    rates = [f"{size(n)}/s" for n in (x.received_per_second, x.sent_per_second)]
    made = f"{sum(t['made'] for t in x.tables):,}" if x.tables else NONE
    cells = [endpoint, count(x.step), rate(x.steps_per_second), size(x.received), size(x.sent), *rates]
    cells += [made] * tables + [_checkpoint(x), "; ".join([doing, *wrong])]
    return [Text(cell) for cell in cells]


def _checkpoint(x: ServerStatus) -> str:
    last = x.checkpoint
    if not last:
        return NONE
    if last["error"]:
        return f"{last['name']} FAILED"
    return f"{last['name']}, {duration(last['ago'])} ago"


def _trainer(t: TrainerRow, stale: bool) -> list[Text]:
    heard = NONE if t.silent is None else f"{duration(t.silent)} ago"
    cells = [str(t.trainer), count(t.step), rate(t.steps_per_second), size(t.bytes_in), size(t.bytes_out), heard]
    cells += [count(t.staleness)] * stale
    style = {"present": "", "left": "dim"}.get(t.state, "red")
    return [*map(Text, cells), Text(t.doing if t.state == "present" else t.state, style=style)]


# -- numbers for people ------------------------------------------------------------------------------


def count(n: int | None) -> str:
    """Return a count: `1,234`."""
    return NONE if n is None else f"{n:,}"


def rate(x: float | None) -> str:
    """Return steps a second, with three digits: `56.1`."""
    if x is None:
        return NONE
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def size(n: float) -> str:
    """Return a number of bytes, with three digits: `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"


def duration(seconds: float) -> str:
    """Return a time: `12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * length:
            return (
                f"{seconds / length:.1f} {unit}" if unit == "s" and seconds < 9.95 else f"{seconds / length:.0f} {unit}"
            )
    return f"{seconds / 86400:.0f} d"
