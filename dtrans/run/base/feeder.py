"""Batches made ahead of the steps: one thread takes them from any iterator, while steps go on.

    with dtrans.feed(loader, job) as batches:
        for x, y in batches:
            state, loss = job.step(state, x, y)

The iterator gives global batches: a loader of NumPy arrays, of grain,
`tf.data.Dataset.as_numpy_iterator()`, a generator. Each process takes its own part of them
(`job.shard_batch`); on a mesh they are put where steps want them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from dtrans.checks import check_int
from dtrans.job import Job


_END = object()


@contextlib.contextmanager
def feed(batches: Iterable[Any], job: Job, ahead: int = 2) -> Iterator[Iterator[Any]]:
    """Take batches from an iterator ahead of the steps that need them, in one thread beside them.

    Leaving the block ends the thread, once the iterator has given what it was asked for; what it
    gave ahead is dropped. An error of the iterator is raised where the batch was to come.

    Args:
      batches: of all trainers: each is the argument of `job.step` behind the state, or a tuple of
        them.
      job: whose steps they are for.
      ahead: how many wait at most.

    Yields:
      This process's parts of the batches, in their order, as the iterator has them: arguments, or
      tuples of them.

    Raises:
      ConfigError: `ahead` is no positive number.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.ones(2)}, tx.init(p))
      >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), jnp.eye(2)), dtrans.trace(init), trainers=2)
      >>> job = plan.simulate()
      >>> state = job.init()
      >>> with dtrans.feed((np.eye(2, dtype=np.float32) for _ in range(3)), job) as batches:
      ...     for x in batches:
      ...         state, loss = job.step(state, x)
      >>> float(loss), job.report().steps
      (0.0625, 3)
    """
    check_int("ahead", ahead, "a positive number of batches")
    made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
    ended = threading.Event()
    # of this thread; the other has a setting of its own
    wide = bool(jax.config.read("jax_enable_x64"))

    def take() -> None:
        try:
            with jax.enable_x64(wide):
                for given in batches:
                    if ended.is_set():
                        return
                    placed = job.place(*given) if isinstance(given, tuple) else job.place(given)[0]
                    made.put((placed, None))
                    if ended.is_set():
                        return
            made.put((_END, None))
        except BaseException as e:  # raised where the batch was to come
            made.put((_END, e))

    def parts() -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch, error = made.get()
            job.meter.waited += time.perf_counter() - start
            if error is not None:
                raise error
            if batch is _END:
                return
            yield batch

    thread = threading.Thread(target=take, name="dtrans feed", daemon=True)
    thread.start()
    try:
        yield parts()
    finally:
        ended.set()
        while thread.is_alive():  # it may wait for a place in the queue
            with contextlib.suppress(queue.Empty):
                made.get(timeout=0.02)
        thread.join()
