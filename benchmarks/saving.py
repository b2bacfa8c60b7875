"""The stall of steps by a checkpoint that a server writes beside them: `python benchmarks/saving.py [PARAMETERS]`.

One trainer and one server, as processes, train with Adam. The stall of a save is the time of `job.save(wait=False)` and
of the step behind it, less the median step. It is compared with one copy of the server's state in memory. The step
behind it copies what it would have given away, and shares the processors with the thread that writes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans


STEPS, SAVES = 10, 5  # steps between two saves, and how often is saved


def seconds(fn: Any) -> float:
    """The time of a call."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def run(parameters: int) -> None:
    """One role."""
    size, key, tx = round(parameters**0.5), jax.random.key(0), optax.adam(1e-3)
    init = lambda key: (params := {"w": jax.random.normal(key, (size, size))}, tx.init(params))
    step = dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    x, role = jnp.ones((4, size)), dtrans.Role.from_env()
    main = dtrans.trace(step, *jax.eval_shape(init, key), x)
    plan = dtrans.pserver(main, dtrans.trace(init, key), pservers=role.pservers, trainers=role.trainers)
    with plan.on_cluster(deadline=120) as job:
        if role.is_pserver:
            with tempfile.TemporaryDirectory() as folder:
                job.serve(job.init(key), checkpoints=folder)
            return
        state, plain, saving = job.init(key), list[float](), list[float]()

        def one() -> None:
            nonlocal state
            state, _ = job.step(state, x)
            jax.block_until_ready(state)

        for _ in range(3):
            one()
        for at in range(SAVES):
            plain += [seconds(one) for _ in range(STEPS)]
            saving.append(seconds(lambda at=at: job.save(str(at), wait=False)) + seconds(one))  # type: ignore[misc]
            job.save(f"{at} and done")  # waits for the first one; the next steps have the machine for themselves
    held = [np.ones((size, size), np.float32) for _ in range(3)]
    copies = [seconds(lambda: [a.copy() for a in held]) for _ in range(5)]
    median, copy = statistics.median(plain), statistics.median(copies)
    stall = statistics.median(saving) - median
    print(
        f"{3 * size * size * 4 / 1e6:.0f} MB of state ({size * size:,} parameters, Adam), load {os.getloadavg()[0]:.1f}"
    )
    print(f"median step {median * 1e3:.0f} ms, spread {min(plain) * 1e3:.0f} to {max(plain) * 1e3:.0f} ms")
    print(f"stall of a save {stall * 1e3:.0f} ms: {stall / copy:.2f} of a copy of the state, {copy * 1e3:.0f} ms")


if __name__ == "__main__":
    if "DTRANS_ROLE" in os.environ:
        run(int(sys.argv[1]))
    else:
        launch = [sys.executable, "-m", "dtrans.cli", "launch", "--trainers", "1", "--pservers", "1", __file__]
        sys.exit(subprocess.call([*launch, *(sys.argv[1:] or ["25000000"])]))
