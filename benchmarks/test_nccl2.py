"""Cost of a step in nccl2 mode, compared with steps that an expert writes by hand.

    by hand       `jit(shard_map(step))`, where the step calls `pmean` with the gradients and the loss
    annotated     `jit` of the one-device step with `NamedSharding`: replicated state, split batch

All run on two or four CPU devices, donate their state, and get a batch that is already on the
devices. A job of one trainer is compared with the jitted step of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Model, mlp_model, programs, training, transformer_model, tx

import dtrans


MODELS = {
    "mlp 0.2 M": lambda: mlp_model([784, 256, 10], 64),
    "mlp 1.9 M": lambda: mlp_model([784, 1024, 1024, 10], 128),
    "transformer 0.9 M": lambda: transformer_model(512, 128, 4, 4, length=64, rows=8),
}
ONE_DEVICE = {
    "transformer 0.9 M": lambda: transformer_model(
        512, 128, 4, 4, length=64, rows=8, dtype=jnp.bfloat16
    ),
    "transformer 110 M": lambda: transformer_model(
        32768, 768, 12, 12, length=512, rows=8, dtype=jnp.bfloat16
    ),
}


def stepper(step: Callable[..., Any], *state: Any) -> Callable[[], Any]:
    """Return a function that runs one step; `step` is (*state) -> (*state, loss)."""
    box = list(state)

    def run() -> Any:
        *box[:], loss = step(*box)
        return box, loss

    return run


def agreeing(runs: Sequence[Callable[[], Any]], rtol: float) -> Sequence[Callable[[], Any]]:
    """Run two steps of each, check that the losses agree, and return the argument.

    The losses of the second step agree only if the gradients also agree.
    """
    losses = [[float(run()[1]) for _ in range(2)] for run in runs]
    for values in losses[1:]:
        np.testing.assert_allclose(values, losses[0], rtol=rtol)
    return runs


def runners(model: Model, trainers: int) -> Sequence[Callable[[], Any]]:
    """Return (ours, by hand, annotated): functions that run one step."""
    step, init, batch = training(model)
    mesh = Mesh(np.array(jax.devices()[:trainers]), ("trainers",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("trainers"))
    batch = jax.device_put(batch, split)

    def by_hand(params, opt_state, *batch):
        value, grads = jax.lax.pmean(jax.value_and_grad(model.loss_fn)(params, *batch), "trainers")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    # With check_vma=True, the gradients inside `shard_map` are sums over all devices already, so
    # `pmean` would not be their mean.
    mapped = jax.shard_map(
        by_hand,
        mesh=mesh,
        in_specs=(P(), P(), *(P("trainers") for _ in batch)),
        out_specs=P(),
        check_vma=False,
    )
    hand = jax.jit(mapped, donate_argnums=(0, 1))
    annotated = jax.jit(
        step,
        in_shardings=(everywhere, everywhere, *(split for _ in batch)),
        out_shardings=everywhere,
        donate_argnums=(0, 1),
    )
    job = dtrans.nccl2(*programs(step, init, batch), trainers=trainers).on_mesh()
    key = jax.random.key(0)
    theirs = [
        stepper(lambda *s, f=f: f(*s, *batch), *jax.device_put(init(key), everywhere))
        for f in (hand, annotated)
    ]
    return agreeing(
        [stepper(lambda state: job.step(state, *batch), job.init(key)), *theirs], rtol=1e-5
    )


@pytest.mark.parametrize("trainers", [2, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("other", ["hand", "annotated"])
def test_nccl2_step_over_others(benchmark, ratio, model, trainers, other):
    if len(jax.devices()) < trainers:
        pytest.skip(f"needs {trainers} devices")
    ours, hand, annotated = runners(MODELS[model](), trainers)
    name = f"nccl2 step / {other} step, {model}, {trainers} devices"
    measure = lambda: ratio(name, ours, {"hand": hand, "annotated": annotated}[other], pairs=100)
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)


@pytest.mark.parametrize("model", ONE_DEVICE)
def test_nccl2_step_over_plain(benchmark, ratio, model):
    """Compare a job of one trainer with the jitted step, in bfloat16."""
    backend = jax.default_backend()
    if model == "transformer 110 M" and backend != "gpu":
        pytest.skip(f"a model of this size is for a GPU, this is {backend}")
    step, init, batch = training(ONE_DEVICE[model]())
    plain = jax.jit(step, donate_argnums=(0, 1))
    job = dtrans.nccl2(*programs(step, init, batch), trainers=1).on_mesh()
    key = jax.random.key(0)
    ours, theirs = agreeing(
        [
            stepper(lambda state: job.step(state, *batch), job.init(key)),
            stepper(lambda *state: plain(*state, *batch), *init(key)),
        ],
        rtol=1e-3,
    )
    name = f"nccl2 step / plain step, {model}, bfloat16, 1 {backend}"
    benchmark.extra_info["ratio"] = benchmark.pedantic(
        lambda: ratio(name, ours, theirs, pairs=100), rounds=1
    )
