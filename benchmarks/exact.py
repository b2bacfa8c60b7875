"""Compare an exact step (`docs/exact.md`) with `jax.jit` and `NamedSharding`.

    python benchmarks/exact.py 2        four layers with batch norm and dropout, on two devices

Both train on the same batch in turn, on virtual devices of this process. The script prints the
bytes of collectives in both compiled steps, the loss of the first step, and the median ratio of
the times of a step.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from typing import Any

import jax


if __name__ == "__main__":
    DEVICES = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    jax.config.update("jax_num_cpu_devices", DEVICES)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import dtrans


WIDTH, ROWS, LAYERS, PAIRS = 256, 512, 4, 11
SIZES = {"f32": 4, "f64": 8, "s32": 4, "u32": 4, "pred": 1, "bf16": 2}
COLLECTIVE = re.compile(
    r"= (\(?[^=]*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        h = x @ params[f"w{i}"]
        x = jax.nn.relu((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5))
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape), x / 0.9, 0.0)
    return jnp.mean((x.sum(1) - y) ** 2)


def moved(text: str) -> int:
    """Return the bytes of all results of collectives in the text of a compiled program."""
    shapes = [
        s
        for m in COLLECTIVE.finditer(text)
        for s in re.findall(r"(\w+)\[([\d,]*)\]", m[1])
        if s[0] in SIZES
    ]
    return sum(
        SIZES[kind] * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
        for kind, dims in shapes
    )


def main(devices: int) -> None:
    tx, key = optax.adam(1e-3), jax.random.key(0)
    params = {
        f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (WIDTH, WIDTH)) / WIDTH**0.5
        for i in range(LAYERS)
    }
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = x[:, 0].copy()
    step, init = dtrans.make_train_step(loss, tx), lambda p: (p, tx.init(p))
    part = x[: ROWS // devices], y[: ROWS // devices], key
    plan = dtrans.nccl2(
        dtrans.trace(step, *init(params), *part), dtrans.trace(init, params), trainers=devices
    )
    print(plan)

    mesh = Mesh(np.array(jax.devices()[:devices]), ("trainers",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("trainers"))
    batch = jax.device_put(x, rows), jax.device_put(y, rows), jax.device_put(key, whole)
    job = plan.on_mesh()
    state, other = job.init(params), jax.device_put(init(jax.tree.map(jnp.copy, params)), whole)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(whole, whole, whole))
    bytes_of = [
        moved(lowered.compile().as_text())
        for lowered in (job.lower(state, *batch), jitted.lower(*other, *batch))
    ]
    print(f"bytes of collectives: {bytes_of[0]:,}, with NamedSharding {bytes_of[1]:,}")
    ratios = []
    for i in range(PAIRS + 5):
        begun = time.perf_counter()
        state, ours = job.step(state, *batch)
        jax.block_until_ready((state, ours))
        between = time.perf_counter()
        *other, theirs = jitted(*other, *batch)
        jax.block_until_ready((other, theirs))
        ratios.append((between - begun) / (time.perf_counter() - between))
        if i == 0:
            print(f"first loss: {float(ours)}, with NamedSharding {float(theirs)}")
    load = os.getloadavg()[0]
    print(
        f"time of a step: {statistics.median(ratios[5:]):.2f} of NamedSharding's (median of "
        f"{PAIRS} pairs, "
        f"load {load:.1f})"
    )


if __name__ == "__main__":
    main(DEVICES)
