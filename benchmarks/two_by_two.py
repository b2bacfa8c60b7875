"""Job of `test_processes.py`: two trainers and two parameter servers.

    python two_by_two.py pserver MODE ENDPOINT ALL,ENDPOINTS    a server
    python two_by_two.py trainer MODE ALL,ENDPOINTS             trainer 1

pytest's process is trainer 0; this file runs the other three. For each number on standard input,
trainer 1 runs this number of steps, and prints their seconds.

The model and the batch are the same as in a measurement of Paddle's parameter servers: an MLP with
the sizes 784-256-10, SGD, and 32 rows for each trainer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dtrans


tx = optax.sgd(0.1)
MODES: dict[str, Any] = {
    "sync": dtrans.Sync(),
    "async": dtrans.Async(),
    "half-async, communicator": dtrans.HalfAsync(),
    "async, communicator": dtrans.Async(communicator=dtrans.CommunicatorConfig()),
    "GEO-SGD, every 5": dtrans.Geo(push_every=5),
}


def loss(params: Any, x: jax.Array, label: jax.Array) -> jax.Array:
    """Return the cross-entropy of an MLP."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["w2"] + params["b2"], label
    ).mean()


def init(key: jax.Array) -> Any:
    """Return the parameters and the optimizer state."""
    one, two = jax.random.split(key)
    w1, w2 = jax.random.normal(one, (784, 256)) / 28, jax.random.normal(two, (256, 10)) / 16
    params = {"b1": jnp.zeros(256), "b2": jnp.zeros(10), "w1": w1, "w2": w2}
    return params, tx.init(params)


def batch(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return a random batch of 32 rows."""
    one, two = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (32, 784)), jax.random.randint(two, (32,), 0, 10)


step = dtrans.make_train_step(loss, tx)


def plan_for(mode: str, endpoints: str) -> dtrans.PServerPlan:
    """Return the plan of the job."""
    main = dtrans.trace(step, *jax.eval_shape(init, jax.random.key(0)), *batch(0))
    startup = dtrans.trace(init, jax.random.key(0))
    return dtrans.pserver(main, startup, pservers=endpoints, trainers=2, mode=MODES[mode])


def stepping(exe: dtrans.Executor, plan: dtrans.PServerPlan, k: int) -> Callable[[int], float]:
    """Return a function that runs a number of steps as trainer `k`, and returns the seconds."""
    state = exe.run(plan.trainer_startup_program(k), jax.random.key(0))
    state = list(state) if isinstance(state, tuple) else [state]
    program, data = plan.trainer_program(k), batch(k)

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            *state[:], last = exe.run(program, *state, *data)
        jax.block_until_ready(last)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    role, mode, *endpoints = sys.argv[1:]
    plan = plan_for(mode, endpoints[-1])
    with dtrans.Executor(deadline=120) as exe:
        if role == "pserver":
            programs = plan.servers[endpoints[0]]
            exe.run(programs.main, exe.run(programs.startup, jax.random.key(0)))
        else:
            run = stepping(exe, plan, 1)
            for line in sys.stdin:
                print(run(int(line)), flush=True)
