"""Checkpoints that a server writes beside its steps: one thread, and what it has met.

The server takes a snapshot between two messages, and goes on: it refers to arrays, and XLA copies those that the next
update would give away. The thread writes
one snapshot after the other. The server's loop hears of the end by a pipe, and answers who asked.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from dtrans.checkpoint.runs import Mark
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.errors import DtransError
from dtrans.protocol.presence import log


Keep = Callable[[str, Mapping[str, Any], Mark], None]
KeepLast = Callable[[Mapping[str, Any], Mark, Mapping[str, int]], Path | None]


class StateWriter:
    """The thread that writes what a server holds.

    Args:
      keep: writes a state under a name.

    Attributes:
      wake: a file descriptor that can be read when `ended` has news.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._due: queue.SimpleQueue[tuple[str, Mapping[str, Any], Mark] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.wake, self._waker = os.pipe()
        config: Any = jax.config
        self._x64 = config.jax_enable_x64  # of the server's thread; a new one has the default
        self._thread: threading.Thread | None = None

    def begin(self, name: str, state: Mapping[str, Any], mark: Mark) -> None:
        """Let a state be written under a name, with the mark of its step; nobody may change it any more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dtrans checkpoints", daemon=True)
            self._thread.start()
        self._due.put((name, state, mark))

    def ended(self) -> Iterator[tuple[str, str]]:
        """The checkpoints that have ended since the last call: the name, and why it could not be written, if so."""
        while not self._ended.empty():
            os.read(self.wake, 1)
            yield self._ended.get()

    def close(self) -> None:
        """Wait until all that was begun is written."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
        os.close(self.wake)
        os.close(self._waker)

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            while (due := self._due.get()) is not None:
                name, state, mark = due
                self._ended.put((name, self._written(name, state, mark)))
                del due, state  # which may be much memory
                os.write(self._waker, b"+")

    def _written(self, name: str, state: Mapping[str, Any], mark: Mark) -> str:
        """Write a state; why that cannot be, or nothing. The job goes on without it, whatever is wrong."""
        try:
            self._keep(name, state, mark)
        except DtransError as e:
            return str(e)
        except Exception as e:
            log.exception("checkpoint %s cannot be written", name)
            return f"{type(e).__name__}: {e}"
        finally:
            for x in state.values():
                if isinstance(x, ArrayLike) and x.table is not None:
                    x.table.close()
        return ""
