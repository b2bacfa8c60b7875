"""Writer of checkpoints in the background: one thread copies arrays, another one writes files.

A server must not wait for a disk. It takes a snapshot between two messages, and continues. The
snapshot refers to the server's arrays. While the server waits for gradients, a thread copies the
arrays that the next update overwrites. The update waits for these copies. Without them, XLA could
not reuse the memory of the arrays: the update would write to new pages, which takes as long as
three copies. The copies reuse the memory of the last snapshot.

The second thread writes the snapshots to files. After each file, it wakes the server's loop, which
answers the trainers that requested the checkpoint.
"""

from __future__ import annotations

import functools
import mmap
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dtrans.checkpoint.runs import SaveId
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.errors import DtransError
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.row_pieces import RowPieces
from dtrans.protocol.server.trainer_registry import log


Keep = Callable[[str, Mapping[str, Any], SaveId], None]
KeepLast = Callable[[Mapping[str, Any], SaveId, Mapping[str, int]], Path | None]


class _Write(NamedTuple):
    """One state that waits to be written to a file.

    Attributes:
      name: name of the checkpoint; empty for a snapshot from which the job continues after a
        failure.
      keep: function that writes the state.
      copies: result of the copying thread: the state, with copies of arrays that updates overwrite.
      save_id: identifier of the run and the step, which the file contains.
      done: result of the writing thread, which is set after the write.
    """

    name: str
    keep: Callable[[Mapping[str, Any], SaveId], None]
    copies: Future[dict[str, Any]]
    save_id: SaveId
    done: Future[None]


class StateWriter:
    """Writer of a server's checkpoints and snapshots, with a thread for copies and one for files.

    Args:
      keep: writes a state under a name; None if trainers request no checkpoints.
      spent: arrays that updates overwrite, by name. The memory for their copies is allocated at the
        start, so that no snapshot waits for new pages.
      wake: function that the writing thread calls when `ended` has results.
    """

    def __init__(
        self, keep: Keep | None, spent: Mapping[str, Any] = {}, *, wake: Callable[[], None]
    ) -> None:
        self._keep, self._wake = keep, wake
        self._due: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._written = Future[None]()  # is done when the last write of `begin_snapshot` has ended
        self._written.set_result(None)
        config: Any = jax.config
        # the writing thread sets this option, because a new thread has the option's default
        self._x64 = config.jax_enable_x64
        self._thread: threading.Thread | None = None
        self._copier = ThreadPoolExecutor(1, "dtrans snapshots")
        self._copies: Future[dict[str, Any]] | None = None
        self._pool = BufferPool(mmap.PAGESIZE)  # page-aligned, to write files without another copy
        self._pending = 0  # snapshots that have begun and whose results were not read yet
        types = {n: (x.shape, x.dtype) for n, x in spent.items()}
        self._copier.submit(_allocate, types, self._pool)

    def begin(
        self, name: str, state: Mapping[str, Any], save_id: SaveId, spent: Collection[str] = ()
    ) -> None:
        """Start to write a state as a checkpoint with a name, and return at once.

        Args:
          name: name of the checkpoint.
          state: arrays by name. The arrays in `spent` must not change before `wait_copied`. The
            other arrays must not change before the end of the write.
          save_id: identifier of the run and the step, which the file contains.
          spent: names of the arrays that must be copied, because the next update overwrites their
            memory, or because they are `RowPieces`.
        """
        assert self._keep is not None
        self._begin(name, functools.partial(self._keep, name), state, save_id, spent, Future())

    def begin_snapshot(
        self,
        keep: Callable[[Mapping[str, Any], SaveId], None],
        state: Mapping[str, Any],
        save_id: SaveId,
        spent: Collection[str] = (),
        *,
        waits: bool = True,
    ) -> None:
        """Start to write a snapshot, from which the job continues after the failure of a process.

        Args:
          keep: writes the state. `ended` does not yield its result.
          state, save_id, spent: as in `begin`.
          waits: True to wait first until the previous snapshot is written. Without this wait, a
            slow disk would let snapshots fill the memory.
        """
        if waits:
            self._written.result()
        self._written = Future()
        self._begin("", keep, state, save_id, spent, self._written)

    def _begin(
        self,
        name: str,
        keep: Callable[[Mapping[str, Any], SaveId], None],
        state: Mapping[str, Any],
        save_id: SaveId,
        spent: Collection[str],
        done: Future[None],
    ) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="dtrans checkpoints", daemon=True
            )
            self._thread.start()
        # The pool has memory for one snapshot. A second snapshot at the same time gets new memory.
        pool = BufferPool() if self._pending else self._pool
        self._pending += 1
        self._copies = self._copier.submit(_copy_spent, dict(state), frozenset(spent), pool)
        self._due.put(_Write(name, keep, self._copies, save_id, done))

    def wait_copied(self) -> None:
        """Wait until a snapshot's arrays are copied, so that an update may overwrite them."""
        if self._copies is not None:
            wait([self._copies])
            self._copies = None

    def ended(self) -> Iterator[tuple[str, str]]:
        """Yield (name, error) for each checkpoint that was written since the last call.

        The error is empty if the checkpoint is complete, or else the text for the trainer.
        """
        while not self._ended.empty():
            self._pending -= 1
            name, error = self._ended.get()
            if name:
                yield name, error

    def close(self) -> None:
        """Wait until all snapshots are written."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
        self._copier.shutdown()

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            while (due := self._due.get()) is not None:
                self._ended.put((due.name, self._write(due)))
                due.done.set_result(None)
                del due  # free the memory before the thread waits
                self._wake()

    def _write(self, due: _Write) -> str:
        """Write a state; return the text of an error, or "". An error does not end the job."""
        state: Mapping[str, Any] = {}
        try:
            state = due.copies.result()
            due.keep(state, due.save_id)
        except DtransError as e:
            return str(e)
        except Exception as e:
            log.exception("checkpoint %s cannot be written", due.name)
            return f"{type(e).__name__}: {e}"
        finally:
            for x in state.values():
                if isinstance(x, ArrayLike) and x.table is not None:
                    x.table.close()
        return ""


def _allocate(types: Mapping[str, tuple[tuple[int, ...], Any]], pool: BufferPool) -> None:
    """Allocate memory for copies of arrays, and write zeros, so that later copies are fast."""
    for name, (shape, dtype) in types.items():
        pool.take(name, shape, dtype).fill(0)


def _copy_spent(state: dict[str, Any], spent: Collection[str], pool: BufferPool) -> dict[str, Any]:
    """Return the state with copies of the arrays in `spent`, in memory from the pool."""
    for name in spent:
        copy = pool.take(name, state[name].shape, state[name].dtype)
        if isinstance(state[name], RowPieces):
            state[name].copy_to(copy)
        else:
            np.copyto(copy, state[name])
        state[name] = copy
    return state
