"""Checkpoints that a server writes during its steps: one thread copies, another one writes.

The server takes a snapshot between two messages and continues. A snapshot refers to the arrays that
no update donates. The others are copied into memory of the last snapshot, in a thread, while the
server waits for gradients; the next update waits for the copy. Without it XLA would not donate
them, and the update would fill fresh pages: 3 copies' time.

The second thread writes one snapshot after the other. It wakes the server's loop at the end of
each, and the loop answers the trainers that asked.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrans.checkpoint.runs import Mark
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.errors import DtransError
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.presence import log


Keep = Callable[[str, Mapping[str, Any], Mark], None]
KeepLast = Callable[[Mapping[str, Any], Mark, Mapping[str, int]], Path | None]


class StateWriter:
    """The thread that writes what a server holds.

    Args:
      keep: writes a state under a name.
      spent: arrays that updates donate, by name: memory for a copy is taken now, since a save would
        wait for new pages.
      wake: is called in another thread when `ended` has news.
    """

    def __init__(
        self, keep: Keep, spent: Mapping[str, Any] = {}, *, wake: Callable[[], None]
    ) -> None:
        self._keep, self._wake = keep, wake
        self._due: queue.SimpleQueue[tuple[str, Future[dict[str, Any]], Mark] | None] = (
            queue.SimpleQueue()
        )
        self._ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        config: Any = jax.config
        self._x64 = config.jax_enable_x64  # of the server's thread; a new one has the default
        self._thread: threading.Thread | None = None
        self._copier = ThreadPoolExecutor(1, "dtrans snapshots")
        self._copies: Future[dict[str, Any]] | None = None
        self._pool = BufferPool(mmap.PAGESIZE)  # which files are written from without another copy
        self._begun = 0  # and not ended, as far as the server's loop knows
        self._copier.submit(
            _write_to_pages, {n: (x.shape, x.dtype) for n, x in spent.items()}, self._pool
        )

    def begin(
        self, name: str, state: Mapping[str, Any], mark: Mark, spent: Collection[str] = ()
    ) -> None:
        """Begin to write a state under a name.

        Args:
          state: name to array; only those in `spent` may change, and only after `wait_copied`.
          mark: of the run and the step.
          spent: the names of NumPy's views of arrays that the next update donates.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="dtrans checkpoints", daemon=True
            )
            self._thread.start()
        # memory is kept for one snapshot: that of a second one at the same time is given back
        pool = BufferPool() if self._begun else self._pool
        self._begun += 1
        self._copies = self._copier.submit(_copied, dict(state), frozenset(spent), pool)
        self._due.put((name, self._copies, mark))

    def wait_copied(self) -> None:
        """Wait until the next update may donate what a snapshot was taken of."""
        if self._copies is not None:
            wait([self._copies])
            self._copies = None

    def ended(self) -> Iterator[tuple[str, str]]:
        """The checkpoints that have ended since the last call: the name, and why it could not be
        written, if so."""
        while not self._ended.empty():
            self._begun -= 1
            yield self._ended.get()

    def close(self) -> None:
        """Wait until all that was begun is written."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
        self._copier.shutdown()

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            while (due := self._due.get()) is not None:
                name, copies, mark = due
                self._ended.put((name, self._written(name, copies, mark)))
                del due, copies  # which may be much memory
                self._wake()

    def _written(self, name: str, copies: Future[dict[str, Any]], mark: Mark) -> str:
        """Write a state and return an empty text, or why that cannot be. The job continues without
        it."""
        state: Mapping[str, Any] = {}
        try:
            state = copies.result()
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


def _write_to_pages(types: Mapping[str, tuple[tuple[int, ...], Any]], pool: BufferPool) -> None:
    """Take memory from the system that a snapshot will be copied into: it gives pages when they are
    written to."""
    for name, (shape, dtype) in types.items():
        pool.take(name, shape, dtype).fill(0)


def _copied(state: dict[str, Any], spent: Collection[str], pool: BufferPool) -> dict[str, Any]:
    """Return a state whose `spent` arrays are in memory of the pool; nothing refers to the others
    any more."""
    for name in spent:
        copy = pool.take(name, state[name].shape, state[name].dtype)
        np.copyto(copy, state[name])
        state[name] = copy
    return state
