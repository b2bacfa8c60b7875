"""Batches loaded ahead of the steps, in one thread.

    with dtrans.feed(loader, job) as batches:
        for x, y in batches:
            state, loss = job.step(state, x, y)

The iterator yields global batches. It may be a loader of NumPy arrays, a grain loader,
`tf.data.Dataset.as_numpy_iterator()`, or a generator. Each process cuts out its part
(`job.shard_batch`). On a mesh, `feed` copies batches to the devices where steps read them.
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
    """Load batches in a thread, ahead of the steps that read them.

    When the `with` block ends, the thread ends too, after the iterator has returned its current
    batch. Loaded batches that no step has read are dropped. An error of the iterator is raised in
    the loop, in place of its batch.

    Args:
      batches: batches of all trainers. Each is the argument of `job.step` after the state, or a
        tuple of such arguments.
      job: the job whose steps read them.
      ahead: largest number of loaded batches that wait for a step.

    Yields:
      This process's parts of the batches, in order: arguments, or tuples of arguments.

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
      >>> float(loss), job.report().steps
      (0.0625, 3)
    """
    check_int("ahead", ahead, "a positive number of batches")
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
    ended = threading.Event()
    # jax.enable_x64 is a setting of each thread, so the loader copies the setting of its caller
    wide = bool(jax.config.read("jax_enable_x64"))

    def load() -> None:
        try:
            with jax.enable_x64(wide):
                for batch in batches:
                    if ended.is_set():
                        return
                    if isinstance(batch, tuple):
                        placed = job.place(*batch)
                    else:
                        (placed,) = job.place(batch)
                    ready.put((placed, None))
                    if ended.is_set():
                        return
            ready.put((_END, None))
        except BaseException as e:  # `parts` raises it in the loop
            ready.put((_END, e))

    def parts() -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch, error = ready.get()
            job.meter.waited += time.perf_counter() - start
            if error is not None:
                raise error
            if batch is _END:
                return
            yield batch

    thread = threading.Thread(target=load, name="dtrans feed", daemon=True)
    thread.start()
    try:
        yield parts()
    finally:
        ended.set()
        # the loader may wait at a full queue, so empty the queue until the loader sees `ended`
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.02)
        thread.join()
