"""Cost of a step with two parameter servers, which are processes on this host.

The step of one trainer is compared with the jitted step of one device, and with one copy of the
gradients and the parameters in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from models import mlp, programs
from test_mesh import SIZES

import dtrans
from dtrans.endpoints import ReservedEndpoints


RESERVED = ReservedEndpoints()  # endpoints that are reserved until the process ends


def free_endpoints(count: int) -> tuple[str, ...]:
    """Return loopback endpoints that no other process gets."""
    return RESERVED.choose(count)


@contextlib.contextmanager
def endpoint_step(
    parameters: str, mode: str, count: int = 2, encryption: str = "auto", **environment: str
):
    """Start servers, and yield a function that runs one step of a trainer.

    Args:
      parameters: the model, a key of `SIZES`.
      mode: "sync" or "async".
      count: the number of servers.
      encryption: `transport_encryption` of all processes.
      environment: environment variables of the servers.
    """
    sizes, rows = SIZES[parameters]
    step, init, batch = mlp(sizes, rows)
    endpoints = free_endpoints(count)
    env = {**os.environ, "DTRANS_TRANSPORT_ENCRYPTION": encryption, **environment}
    script = Path(__file__).with_name("serve.py")
    every = ",".join(endpoints)
    servers = [
        subprocess.Popen([sys.executable, str(script), ep, every, parameters, mode], env=env)
        for ep in endpoints
    ]
    try:
        t = dtrans.DistributeTranspiler()
        main, startup = programs(step, init, batch)
        t.transpile(0, main, every, 1, sync_mode=mode == "sync", startup_program=startup)
        trainer = t.get_trainer_program()
        with dtrans.Executor(deadline=60, transport_encryption=encryption) as exe:
            box = [exe.run(t.get_trainer_startup_program(), jax.random.key(0))]

            def run():
                box[0], loss = exe.run(trainer, box[0], *batch)
                return box[0], loss

            yield run
    finally:
        for s in servers:
            s.wait(timeout=60)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("parameters", SIZES)
def test_endpoint_step(benchmark, ratio, parameters, mode):
    sizes, rows = SIZES[parameters]
    step, init, batch = mlp(sizes, rows)
    jitted = jax.jit(step, donate_argnums=1)
    box = [init(jax.random.key(0))]

    def plain():
        *box[0], loss = jitted(*box[0], *batch)
        return box[0], loss

    count = sum(a * b + b for a, b in itertools.pairwise(sizes))
    source, target = np.ones(2 * count, np.float32), np.ones(2 * count, np.float32)

    with endpoint_step(parameters, mode) as run:
        benchmark.pedantic(lambda: jax.block_until_ready(run()), rounds=20, warmup_rounds=3)
        name = f"{mode} endpoint step / plain step, {parameters} parameters"
        benchmark.extra_info["over plain"] = ratio(name, run, plain, 30)
        name = f"{mode} endpoint step / memcpy of its bytes, {parameters} parameters"
        benchmark.extra_info["over memcpy"] = ratio(
            name, run, lambda: np.copyto(target, source), 30
        )
