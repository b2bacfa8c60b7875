"""Cost of a parameter-server step on a mesh, compared with the jitted step of one device.

The job has one trainer and one server on one device. It needs more time than the jitted step, since
it dispatches two programs, and stores the gradients between them. Both donate the optimizer state.
"""

from __future__ import annotations

import jax
import pytest
from models import mlp, programs

import dtrans


SIZES = {
    "10 k": ([64, 128, 10], 64),
    "0.2 M": ([784, 256, 10], 64),
    "1.9 M": ([784, 1024, 1024, 10], 128),
    "7.4 M": ([784, 2048, 2048, 784], 128),
}


def runners(parameters: str):
    sizes, rows = SIZES[parameters]
    step, init, batch = mlp(sizes, rows)
    job = dtrans.pserver(*programs(step, init, batch)).on_mesh(jax.devices()[:1])
    jitted = jax.jit(step, donate_argnums=1)
    box = {"mesh": job.init(jax.random.key(0)), "plain": init(jax.random.key(0))}

    def mesh():
        box["mesh"], loss = job.step(box["mesh"], *batch)
        return box["mesh"], loss

    def plain():
        *state, loss = jitted(*box["plain"], *batch)
        box["plain"] = state
        return state, loss

    return mesh, plain


@pytest.mark.parametrize("parameters", SIZES)
def test_mesh_step(benchmark, parameters):
    mesh, _ = runners(parameters)
    benchmark.pedantic(lambda: jax.block_until_ready(mesh()), rounds=20, warmup_rounds=3)


@pytest.mark.parametrize("parameters", SIZES)
def test_plain_step(benchmark, parameters):
    _, plain = runners(parameters)
    benchmark.pedantic(lambda: jax.block_until_ready(plain()), rounds=20, warmup_rounds=3)


@pytest.mark.parametrize("parameters", SIZES)
def test_mesh_over_plain(benchmark, ratio, parameters):
    mesh, plain = runners(parameters)
    measure = lambda: ratio(
        f"mesh step / plain step, {parameters} parameters", mesh, plain, pairs=60
    )
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)
