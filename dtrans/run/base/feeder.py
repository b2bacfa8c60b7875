"""Batches loaded ahead of the steps, in one thread.

    with dtrans.feed(loader, job) as batches:
        for x, y in batches:
            state, loss = job.step(state, x, y)

`loader` yields global batches. It may be any iterator of NumPy arrays: a grain loader,
`tf.data.Dataset.as_numpy_iterator()`, or a generator. Each process cuts out its own part
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

    When the `with` block ends, `feed` drops batches that no step has read, and waits for the
    thread. The thread ends after the iterator returns its current batch. If the iterator raises an
    error, the loop over the loaded batches raises it.

    Args:
      batches: iterator of global batches. A batch is the argument of `job.step` after the state, or
        a tuple of such arguments.
      job: the job whose steps read the batches.
      ahead: largest number of loaded batches that wait for a step.

    Yields:
      An iterator of this process's parts of the batches: arguments, or tuples of arguments.

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
    # jax.enable_x64 is set for each thread, so the loading thread copies the setting of its caller
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
        except BaseException as e:  # the error goes to `parts`, which raises it in the loop
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
        # the thread may wait at a full queue, so empty the queue until the thread ends
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.02)
        thread.join()
