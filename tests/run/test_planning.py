"""Planning happens before a process connects to others, so it must start no devices."""

from __future__ import annotations

import subprocess
import sys


SCRIPT = """
import jax, jax.numpy as jnp, optax

import dtrans
from dtrans._jax import backends_started


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 10)))


def init(key):
    w1, w2 = jax.random.normal(key, (4, 6)), jnp.ones((6, 1))
    params = {"w1": w1, "b1": jnp.zeros(6), "w2": w2}
    return params, tx.init(params)


key = jax.eval_shape(lambda: jax.random.key(0))
batch = jax.ShapeDtypeStruct((12, 4), jnp.float32), jax.ShapeDtypeStruct((12, 1), jnp.float32)
main = dtrans.trace(dtrans.make_train_step(loss, tx), *jax.eval_shape(init, key), *batch)
startup = dtrans.trace(init, key)
plans = {
    "nccl2": lambda: dtrans.nccl2(main, startup, trainers=3),
    "sharding": lambda: dtrans.sharding(
        main, startup, degree=3, stage=3, slices=dtrans.Slicing(min_slice_size=1)
    ),
    "pipeline": lambda: dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=3),
    "pserver": lambda: dtrans.pserver(
        main, startup, pservers="127.0.0.1:1,127.0.0.1:2", trainers=3
    ),
}
assert not backends_started(), "tracing starts devices"
for strategy, plan in plans.items():
    plan()
    assert not backends_started(), f"planning starts devices: {strategy}"
"""


def test_planning_starts_no_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
