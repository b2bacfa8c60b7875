"""What a step of nccl2 mode costs beside what an expert writes by hand, on two and four CPU devices.

    by hand       jit(shard_map) of the step with `pmean` of the tree of gradients, and of the loss; state is donated
    annotated     jit of the step for one device, on state that is replicated and a batch that is split (NamedSharding)

All three keep the same state on the same mesh, and get a batch that is there already.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import mlp, programs, tx

import dtrans


SIZES = {
    "0.2 M": ([784, 256, 10], 64),
    "1.9 M": ([784, 1024, 1024, 10], 128),
}


def runners(parameters: str, trainers: int):
    """(ours, by hand, annotated), each a function that takes one step."""
    sizes, rows = SIZES[parameters]
    step, init, batch = mlp(sizes, rows)
    loss = mlp_loss
    mesh = Mesh(np.array(jax.devices()[:trainers]), ("trainers",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("trainers"))
    batch = jax.device_put(batch, split)

    def by_hand(params, opt_state, x, y):
        value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, x, y), "trainers")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    # without check_vma, under which pmean of a gradient that shard_map has summed already is another value
    mapped = jax.shard_map(
        by_hand, mesh=mesh, in_specs=(P(), P(), P("trainers"), P("trainers")), out_specs=P(), check_vma=False
    )
    theirs = {
        "hand": jax.jit(mapped, donate_argnums=(0, 1)),
        "annotated": jax.jit(
            step,
            in_shardings=(everywhere, everywhere, split, split),
            out_shardings=everywhere,
            donate_argnums=(0, 1),
        ),
    }
    job = dtrans.nccl2(*programs(step, init, batch), trainers=trainers).on_mesh()
    box = {"ours": job.init(jax.random.key(0))}
    box |= {name: jax.device_put(init(jax.random.key(0)), everywhere) for name in theirs}

    def ours():
        box["ours"], value = job.step(box["ours"], *batch)
        return box["ours"], value

    def runner(name):
        def run():
            *box[name], value = theirs[name](*box[name], *batch)
            return box[name], value

        return run

    made = ours, runner("hand"), runner("annotated")
    values = [float(run()[1]) for run in made]
    np.testing.assert_allclose(values, values[0], rtol=1e-5)
    return made


def mlp_loss(params, x, y):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jax.numpy.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


@pytest.mark.parametrize("trainers", [2, 4])
@pytest.mark.parametrize("parameters", SIZES)
@pytest.mark.parametrize("other", ["hand", "annotated"])
def test_nccl2_step_over_others(benchmark, ratio, parameters, trainers, other):
    ours, hand, annotated = runners(parameters, trainers)
    name = f"nccl2 step / {other} step, {parameters} parameters, {trainers} devices"
    measure = lambda: ratio(name, ours, {"hand": hand, "annotated": annotated}[other], pairs=100)
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)
