"""Display of the roles of a job: a live table on a terminal, else a line for each change."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dtrans.run.distributed.role_output import say


COLOURS = {"starting": "yellow", "running": "green", "ended": "dim", "stopped": "dim"}


@dataclasses.dataclass
class _Line:
    host: str
    role: str
    pid: str = ""
    state: str = "starting"


class RoleStates:
    """Display of the states of roles on standard error.

    A role is starting, running, ended, stopped by the launcher, or failed with a reason. Use it as
    a context manager.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._lines: dict[str, _Line] = {}
        self._changing = threading.Lock()
        self._live: Live | None = None

    def begin(self, places: Iterable[tuple[str, str]]) -> None:
        """Start the display, with all roles as "starting".

        Args:
          places: (role name, host) of each role.
        """
        self._lines = {role: _Line(host, role) for role, host in places}
        if self._console.is_terminal:
            # output of roles is printed above the table; a pipe or file gets it unchanged
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=True,
            )
            self._live.start()
            self._draw()

    def change(self, role: str, state: str, pid: int | None = None) -> None:
        """Show a new state of a role."""
        with self._changing:
            line = self._lines[role]
            line.state = state
            if pid is not None:
                line.pid = str(pid)
            self._draw()
        if self._live is None and state != "stopped":
            if state == "running":
                state += f", process {line.pid}"
            say(f"{role} on {line.host}: {state}")

    def __enter__(self) -> RoleStates:
        return self

    def __exit__(self, *failed: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table()
        for name in ("host", "role", "process", "state"):
            table.add_column(name, justify="right" if name == "process" else "left")
        for line in self._lines.values():
            colour = COLOURS.get(line.state, "red")
            table.add_row(line.host, line.role, line.pid, Text(line.state, style=colour))
        return table
