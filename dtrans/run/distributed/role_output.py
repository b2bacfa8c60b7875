"""Output of roles: lines with the role's name in front, and log files."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from dtrans.errors import ConfigError
from dtrans.run.distributed.child_process import Emit


_output = threading.Lock()


@contextlib.contextmanager
def open_logs(folder: str | Path | None) -> Iterator[Callable[[str], Emit]]:
    """Yield a function that opens the output of one role.

    That function takes a role's name and returns a second function. The second function prints each
    line of the role with the name in front, and writes the line to the role's log file.

    Args:
      folder: the folder of the log files; None to print lines without log files.
    """
    with contextlib.ExitStack() as files:

        def open_log(name: str) -> Emit:
            if folder is None:
                return _line_writer(name, None)
            path = Path(folder) / f"{name.replace(' ', '-')}.log"
            return _line_writer(name, files.enter_context(path.open("w", buffering=1)))

        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise ConfigError(f"log_dir={str(folder)!r} cannot be created: {e.strerror}") from e
        yield open_log


def _line_writer(name: str, log: TextIO | None) -> Emit:
    """Return a function that prints the lines of a role, and writes them to its log.

    A lock keeps lines of different roles from being mixed.
    """

    def emit(stream: str, line: str) -> None:
        out = sys.stderr
        if stream == "stdout":
            out = sys.stdout
        with _output:
            out.write(f"[{name}] {line}\n")
            out.flush()
            # a background process that a role has started may write after the log is closed
            if log is not None and not log.closed:
                log.write(f"{line}\n")

    return emit


def say(line: str) -> None:
    """Print a line with the prefix `[launcher]` on standard error."""
    _line_writer("launcher", None)("stderr", line)
