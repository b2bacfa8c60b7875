"""Command `dtrans status`: prints the status of a job, once or repeatedly."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live

from dtrans.run.status.job_metrics import serve_metrics
from dtrans.run.status.job_view import as_document
from dtrans.run.status.observer import Answer, JobObserver
from dtrans.run.status.status_table import job_tables


WIDTH = 160  # columns if the output is not a terminal


def show_status(
    endpoints: Sequence[str], *, timeout: float, interval: float | None, as_json: bool
) -> bool:
    """Print the status of a job.

    Args:
      endpoints: endpoints of the job's servers.
      timeout: seconds that an answer may take.
      interval: seconds between two requests, until Ctrl-C; None for a single request.
      as_json: True to print a JSON document for each request. With an interval, each document is
        one line.

    Returns:
      True if every server answered the last request.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    answers: list[Answer] = []
    with JobObserver(endpoints, timeout) as observer, contextlib.suppress(KeyboardInterrupt):
        if interval is None:
            answers = observer.ask()
            if as_json:
                print(json.dumps(as_document(answers), indent=2))
            else:
                console.print(job_tables(answers))
        elif as_json:
            for answers in _poll(observer, interval):
                print(json.dumps(as_document(answers)), flush=True)
        else:
            with Live(console=console, auto_refresh=False) as live:
                for answers in _poll(observer, interval):
                    live.update(job_tables(answers), refresh=True)
    return bool(answers) and not any(x.error for x in answers)


def _poll(observer: JobObserver, interval: float) -> Iterator[list[Answer]]:
    """Ask the servers repeatedly, at an interval; yield their answers."""
    due = time.monotonic()
    while True:
        yield observer.ask()
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def show_metrics(endpoints: Sequence[str], where: str, *, timeout: float) -> None:
    """Serve the metrics of a job until Ctrl-C.

    Args:
      endpoints: endpoints of the job's servers.
      where: a port on loopback, or host:port, at which metrics are served.
      timeout: seconds that an answer may take.
    """
    with JobObserver(endpoints, timeout) as observer, contextlib.suppress(KeyboardInterrupt):
        server, address = serve_metrics(observer, where)
        try:
            print(
                f"metrics of {', '.join(endpoints)} at http://{address}/metrics; end by Ctrl-C",
                flush=True,
            )
            threading.Event().wait()
        finally:
            server.shutdown()
            server.server_close()
