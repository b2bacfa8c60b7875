"""Loading of the next batches in a thread, while a step runs.

    with dtrans.feed(loader, job) as batches:
        for x, y in batches:
            state, loss = job.step(state, x, y)

`loader` yields global batches. It may be any iterator of NumPy arrays: a grain loader,
`tf.data.Dataset.as_numpy_iterator()`, or a generator. Each process takes its part of a batch
(`job.shard_batch`). On a mesh, `feed` copies batches to the devices where steps read them.

`job.steps` reads batches before their steps run. The position of a feed counts a batch only after
its step. So a saved position is the number of the next step.

To go back to an earlier batch, `feed` ends the thread, and starts another at this batch.
`dtrans.run.base.batch_source` finds the batch.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from dtrans.checks import check_int
from dtrans.errors import StateError
from dtrans.job import Job
from dtrans.run.base.batch_source import BatchSource, open_source


class _Loaded(NamedTuple):
    """Item of the queue between the loading thread and the steps: a batch, or an error.

    Attributes:
      batch: this process's part.
      state: the source's state after this batch.
      error: the error that the source raised instead of a batch; StopIteration at the source's end.
    """

    batch: Any = None
    state: Any = None
    error: BaseException | None = None


class Feed(Iterator[Any]):
    """Iterator over the batches that a thread loads while steps run. `dtrans.feed` creates it.

    Attributes:
      position: number of batches before the next one. `job.steps` increases it after each step.
    """

    def __init__(self, source: BatchSource, job: Job, ahead: int) -> None:
        self._source, self._job, self._ahead = source, job, ahead
        # jax.enable_x64 is set for each thread, so the loading thread copies the caller's setting
        self._wide = bool(jax.config.read("jax_enable_x64"))
        self._end: BaseException | None = None
        self._read_ahead: collections.deque[_Loaded] = collections.deque()
        self._state: Future[Any]  # the source's state at `position`
        self.position = source.position
        self._start()

    def __next__(self) -> Any:
        loaded = self._read_ahead.popleft() if self._read_ahead else self._receive()
        self._count(loaded)
        return loaded.batch

    def read_ahead(self) -> Iterator[Any]:
        """Yield batches before their steps, for `job.steps`, which may prefetch their table rows.

        `job.steps` calls `advance` after each step. If a batch's step has not ended, the next call
        of this method yields the batch again.
        """
        for loaded in tuple(self._read_ahead):
            yield loaded.batch
        while True:
            try:
                loaded = self._receive()
            except StopIteration:
                return
            self._read_ahead.append(loaded)
            yield loaded.batch

    def advance(self, batch: Any) -> None:
        """Move the position past a batch from `read_ahead`, because its step has ended.

        Raises:
          StateError: another caller has changed the position since `read_ahead`.
        """
        if not self._read_ahead or self._read_ahead[0].batch is not batch:
            raise StateError(
                "a loop over job.steps reads this feed, but the feed's position has changed since "
                "the last step; call next, seek and load_state_dict after the loop"
            )
        self._count(self._read_ahead.popleft())

    def _receive(self) -> _Loaded:
        """Wait for the next batch from the loading thread."""
        if self._end is not None:
            raise self._end
        start = time.perf_counter()
        loaded = self._ready.get()
        self._job.meter.waited += time.perf_counter() - start
        if loaded.error is not None:
            self._end = StopIteration()
            raise loaded.error
        return loaded

    def _count(self, loaded: _Loaded) -> None:
        self.position += 1
        self._state = Future()
        self._state.set_result(loaded.state)

    def seek(self, step: int) -> None:
        """Continue with the batch of a step. `job.steps` calls it after the failure of a process.

        The method drops loaded batches. If the source cannot go back to the batch, the next call of
        `next` raises ConfigError.

        Args:
          step: number of batches before the next one.
        """
        if step != self.position or self._end is not None:
            self.close()
            self._go_to(step, lambda: self._source.seek(step))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, in a dict for `load_state_dict`.

        The dict contains the loader's state if the loader has `get_state` or `state_dict`. After
        `seek` or `load_state_dict`, the method waits until the source has changed its position.

        Raises:
          ConfigError: the source cannot go to the position.
        """
        return {"position": self.position, "source": self._state.result()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position that `state_dict` returned, also in another process.

        Args:
          state: the dict that `state_dict` returned.
        """
        self.close()
        position, saved = state["position"], state["source"]
        self._go_to(position, lambda: self._source.restore(position, saved))

    def close(self) -> None:
        """Drop loaded batches, and wait until the loading thread has ended."""
        self._stopped.set()
        # the thread may wait at a full queue, so empty the queue until the thread ends
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.02)
        self._thread.join()
        self._read_ahead.clear()
        self._end = StopIteration()

    def _go_to(self, position: int, move: Callable[[], None]) -> None:
        self.position, self._end = position, None
        self._start(move)

    def _start(self, move: Callable[[], None] = lambda: None) -> None:
        """Start a thread that loads batches.

        Args:
          move: function that the thread calls first, to move the source to another position.
        """
        self._state = Future()
        self._ready: queue.Queue[_Loaded] = queue.Queue(self._ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._load, args=(move,), name="dtrans feed", daemon=True
        )
        self._thread.start()

    def _load(self, move: Callable[[], None]) -> None:
        ready, stopped, state = self._ready, self._stopped, self._state
        try:
            with jax.enable_x64(self._wide):
                move()
                state.set_result(self._source.state)
                for batch in self._source:
                    if stopped.is_set():
                        return
                    ready.put(_Loaded(self._place(batch), self._source.state))
                    if stopped.is_set():
                        return
            ready.put(_Loaded(error=StopIteration()))
        except BaseException as e:  # `__next__` raises the error in the loop
            if not state.done():
                state.set_exception(e)
            ready.put(_Loaded(error=e))

    def _place(self, batch: Any) -> Any:
        if isinstance(batch, tuple):
            return self._job.place(*batch)
        (placed,) = self._job.place(batch)
        return placed


@contextlib.contextmanager
def feed(batches: Iterable[Any] | Callable[[int], Any], job: Job, ahead: int = 2) -> Iterator[Feed]:
    """Load batches in a thread, before steps read them.

    When the `with` block ends, `feed` drops batches that no step has read, and waits for the
    thread. The thread ends after the iterator returns its current batch. If the iterator raises an
    error, the loop over the loaded batches raises this error.

    A snapshot is a copy of the job's state. In a job with snapshots, pass the result to `job.steps`
    with `stop`. After the failure of a process, `feed` goes back to the batch of the snapshot. This
    works with a function of the step number, and with a loader that has one of these methods:

    - `seek(step)`;
    - `get_state` and `set_state`, as iterators of grain have;
    - `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader` has.

    A loader without `seek` must yield the same batches in each start of the script. A process that
    starts again reads from the first batch, and drops all batches before the batch of the snapshot.

    Args:
      batches: iterator of global batches, or a function that returns the batch of a step number. A
        batch is the argument of `job.step` after the state, or a tuple of such arguments.
      job: the job whose steps read the batches.
      ahead: the maximum number of loaded batches that wait for a step.

    Yields:
      An iterator of this process's parts of the batches: arguments, or tuples of arguments. Its
      methods `state_dict` and `load_state_dict` save and restore the position.

    Raises:
      ConfigError: `ahead` is not a positive number.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.ones(2)}, tx.init(p))
      >>> step, init = dtrans.trace(step, *init(), jnp.eye(2)), dtrans.trace(init)
      >>> job = dtrans.nccl2(step, init, trainers=2).simulate()
      >>> state = job.init()
      >>> with dtrans.feed((np.eye(2, dtype=np.float32) for _ in range(3)), job) as batches:
      ...     for x in batches:
      ...         state, loss = job.step(state, x)
      >>> float(loss), job.report().steps, batches.position
      (0.0625, 3, 3)
    """
    check_int("ahead", ahead, "a positive number of batches")
    loaded = Feed(open_source(batches), job, ahead)
    try:
        yield loaded
    finally:
        loaded.close()
