"""Checkpoints that a server writes during its steps: one thread copies arrays, another one writes.

The server takes a snapshot between two messages, and continues. The snapshot refers to the server's
arrays. While the server waits for gradients, a thread copies the arrays that the next update
donates. The update waits for these copies. Without them, XLA could not reuse the memory of the
arrays: the update would write to new pages, which takes as long as three copies. The copies reuse
the memory of the last snapshot.

The second thread writes the snapshots to files. After each snapshot, it wakes the server's loop,
which answers the trainers that requested the checkpoint.
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
from dtrans.protocol.server.trainer_registry import log


Keep = Callable[[str, Mapping[str, Any], Mark], None]
KeepLast = Callable[[Mapping[str, Any], Mark, Mapping[str, int]], Path | None]


class StateWriter:
    """Writer of a server's state, with two threads.

    Args:
      keep: function that writes a state under a name.
      spent: arrays that updates donate, by name. The memory for their copies is allocated at the
        start, so that no snapshot waits for new pages.
      wake: function that the writing thread calls when `ended` has results.
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
        # The writing thread sets this value, because a new thread starts with the default.
        self._x64 = config.jax_enable_x64
        self._thread: threading.Thread | None = None
        self._copier = ThreadPoolExecutor(1, "dtrans snapshots")
        self._copies: Future[dict[str, Any]] | None = None
        # Copies start at a page boundary, so that they are written to files without another copy.
        self._pool = BufferPool(mmap.PAGESIZE)
        self._pending = 0  # number of snapshots that `ended` has not returned yet
        types = {n: (x.shape, x.dtype) for n, x in spent.items()}
        self._copier.submit(_allocate, types, self._pool)

    def begin(
        self, name: str, state: Mapping[str, Any], mark: Mark, spent: Collection[str] = ()
    ) -> None:
        """Start to write a state under a name.

        Args:
          name: name of the checkpoint.
          state: arrays by name. The arrays in `spent` must not change before `wait_copied`. The
            other arrays must not change before the end of the write.
          mark: the run and the step.
          spent: names of the arrays that are NumPy views of memory that the next update donates.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="dtrans checkpoints", daemon=True
            )
            self._thread.start()
        # The pool has memory for one snapshot. A second snapshot at the same time gets new memory.
        pool = BufferPool() if self._pending else self._pool
        self._pending += 1
        self._copies = self._copier.submit(_copy_spent, dict(state), frozenset(spent), pool)
        self._due.put((name, self._copies, mark))

    def wait_copied(self) -> None:
        """Wait until the arrays in `spent` are copied, so that the next update may donate them."""
        if self._copies is not None:
            wait([self._copies])
            self._copies = None

    def ended(self) -> Iterator[tuple[str, str]]:
        """Yield (name, error text) for each checkpoint whose write ended since the last call."""
        while not self._ended.empty():
            self._pending -= 1
            yield self._ended.get()

    def close(self) -> None:
        """Wait until all snapshots are written."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
        self._copier.shutdown()

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            while (due := self._due.get()) is not None:
                name, copies, mark = due
                self._ended.put((name, self._write(name, copies, mark)))
                del due, copies  # This frees the memory before the thread waits.
                self._wake()

    def _write(self, name: str, copies: Future[dict[str, Any]], mark: Mark) -> str:
        """Write a state; return the text of an error, or "". An error does not end the job."""
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


def _allocate(types: Mapping[str, tuple[tuple[int, ...], Any]], pool: BufferPool) -> None:
    """Allocate memory for a snapshot, and write zeros so that the system provides the pages."""
    for name, (shape, dtype) in types.items():
        pool.take(name, shape, dtype).fill(0)


def _copy_spent(state: dict[str, Any], spent: Collection[str], pool: BufferPool) -> dict[str, Any]:
    """Return the state with copies of the arrays in `spent`, in memory from the pool."""
    for name in spent:
        copy = pool.take(name, state[name].shape, state[name].dtype)
        np.copyto(copy, state[name])
        state[name] = copy
    return state
