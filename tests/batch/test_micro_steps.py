"""Micro-steps of trainers accumulate gradients: the results of one device, or an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import step_zoo
from pipeline_models import compiled_quickly
from step_table import axes_of
from step_zoo import compare

import dtrans
from dtrans.errors import ConfigError
from dtrans.step.batch_sharing import Batch


KEY = jax.random.key(0)


def planned(name: str, mode: str, trainers: int, **options: Any) -> Any:
    case = step_zoo.by_name(name)
    main = dtrans.trace(case.step, *case.init(KEY), *case.batch(12 // trainers))
    given = main, dtrans.trace(case.init, KEY)
    options = {"num_micro_batch": 2, "batch": Batch(axes=axes_of(case)), **options}
    if mode == "nccl2":
        return dtrans.nccl2(*given, trainers=trainers, **options)
    slices = dtrans.Slicing(min_slice_size=0)
    return dtrans.sharding(*given, degree=trainers, stage=int(mode), slices=slices, **options)


PLANS = [
    ("sum_loss", "nccl2", 1),
    ("rnn_time_major", "nccl2", 2),  # rows on the second dimension
    ("masked_mean", "nccl2", 2),
    ("metrics_counts", "nccl2", 1),
    ("dropout_key_in_opt_state", "1", 2),
    ("mixup", "2", 2),
    ("dropout_key_in_params", "3", 2),
]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "mode", "trainers"), PLANS)
def test_plans_in_micro_steps_compute_the_step(name: str, mode: str, trainers: int) -> None:
    report = planned(name, mode, trainers).verify(*step_zoo.by_name(name).batch(12), points=(0, 1))
    assert report, str(report)


@pytest.mark.usefixtures("x64")
def test_micro_steps_give_the_numbers_of_one_device() -> None:
    case = step_zoo.by_name("masked_mean")
    with compiled_quickly():
        job, step = planned("masked_mean", "nccl2", 2).simulate(), jax.jit(case.step)
        state, alone = job.init(KEY), case.init(KEY)
        for rows in (12, 8):
            state, *results = job.step(state, *case.batch(rows))
            params, opt_state, *wanted = step(*alone, *case.batch(rows))
            alone = params, opt_state
            compare((job.params(state), job.opt_state(state)), alone)
            compare(tuple(results), tuple(wanted))


@pytest.mark.usefixtures("x64")
def test_values_of_the_batch_are_made_in_front_of_the_micro_steps() -> None:
    """Values that depend on the full batch (here the number of mask entries) are computed once,
    before the loop."""
    before = [op.type for op in planned("masked_mean", "nccl2", 2).program.ops]
    assert before.index("all_reduce") < before.index("scan") and before.count("scan") == 1
    assert "scan" not in [
        op.type for op in planned("masked_mean", "nccl2", 2, num_micro_batch=1).program.ops
    ]


@pytest.mark.usefixtures("x64")
def test_what_micro_steps_would_exchange_is_refused() -> None:
    told = (
        r"num_micro_batch=2 a step reads parts .* on all rows "
        r"\(all_reduce for step_zoo_batches.py:\d+\)"
    )
    for trainers in (1, 2):
        with pytest.raises(ConfigError, match=told):
            planned("batch_norm_by_hand", "nccl2", trainers)
    with pytest.raises(
        ConfigError, match=r"clip_local_norm=1.0 clips the gradient of each trainer's rows"
    ):
        planned("masked_mean", "nccl2", 2, reduce=dtrans.Reduce(clip_local_norm=1.0))


@pytest.mark.usefixtures("x64")
def test_gradients_that_the_step_takes_itself_are_accumulated() -> None:
    """The step calls `jax.value_and_grad` itself, so dtrans cannot rewrite a loss function.

    The terms of the loss also read values of the full batch.
    """

    def by_hand(params: Any, opt_state: Any, x: jax.Array, mask: jax.Array) -> Any:
        masked = lambda w: jnp.sum((x @ w) ** 2 * mask[:, None]) / jnp.sum(mask)
        loss, grad = jax.value_and_grad(masked)(params)
        return params - 0.1 * grad, opt_state, loss

    init = lambda w: (w, optax.EmptyState())
    batch = jnp.arange(36.0).reshape(12, 3) / 10, jnp.arange(12.0) % 3
    main = dtrans.trace(by_hand, *init(jnp.ones((3, 2))), *(x[:6] for x in batch))
    plan = dtrans.nccl2(main, dtrans.trace(init, jnp.ones((3, 2))), trainers=2, num_micro_batch=2)
    assert (report := plan.verify(*batch)), str(report)


@pytest.mark.usefixtures("x64")
def test_parts_may_have_one_row() -> None:
    """JAX drops operations that change nothing for one row.

    So parts are written from the full batch, which has several rows.
    """
    plan = planned("masked_mean", "nccl2", 2, num_micro_batch=6)
    assert (report := plan.verify(*step_zoo.by_name("masked_mean").batch(12))), str(report)
    case = step_zoo.by_name("masked_mean")
    main = dtrans.trace(case.step, *case.init(KEY), *case.batch(12))
    plan = dtrans.pipeline(main, dtrans.trace(case.init, KEY), num_stages=2, num_micro_batch=12)
    assert (report := plan.verify(*case.batch(12))), str(report)
