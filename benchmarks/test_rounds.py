"""Cost of rounds: steps with two parameter servers on a mesh, compared with the jitted step.

In a round, servers add up a value over all blocks, such as a norm. The optimizers need no round,
one round, and three rounds. Trainer and servers are on one device.
"""

from __future__ import annotations

import jax
import optax
import pytest
from models import mlp, programs
from test_mesh import SIZES

import dtrans


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "clip, adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "clip, lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)),
}


@pytest.mark.parametrize("parameters", ["0.2 M", "1.9 M", "7.4 M"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mesh_step_with_rounds_over_plain(benchmark, ratio, optimizer, parameters):
    sizes, rows = SIZES[parameters]
    step, init, batch = mlp(sizes, rows, OPTIMIZERS[optimizer])
    plan = dtrans.pserver(*programs(step, init, batch), pservers="127.0.0.1:6174,127.0.0.1:6175")
    job = plan.on_mesh(jax.devices()[:1])
    jitted = jax.jit(step, donate_argnums=1)
    box = {"mesh": job.init(jax.random.key(0)), "plain": init(jax.random.key(0))}

    def mesh():
        box["mesh"], loss = job.step(box["mesh"], *batch)
        return box["mesh"], loss

    def plain():
        *state, loss = jitted(*box["plain"], *batch)
        box["plain"] = state
        return state, loss

    name = f"mesh step / plain step, {optimizer} ({len(plan.traffic.rounds)} rounds), {parameters}"
    benchmark.extra_info["ratio"] = benchmark.pedantic(
        lambda: ratio(name, mesh, plain, pairs=40), rounds=1
    )
