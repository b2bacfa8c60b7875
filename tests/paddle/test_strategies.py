"""Sharding with Paddle's names: the same plan as with the package's own, and errors that name
Paddle's options."""

from __future__ import annotations

import inspect
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params
from paths import DOCS

import dtrans
from dtrans.errors import ConfigError
from dtrans.paddle import strategies


TX = optax.adam(0.1)


@pytest.fixture(scope="module")
def programs() -> tuple[dtrans.Program, dtrans.Program]:
    params = mlp_params((40, 64, 8))
    step = dtrans.make_train_step(mlp_loss, TX)
    main = dtrans.trace(step, params, jax.eval_shape(TX.init, params), *mlp_batch(16, (40, 64, 8)))
    return main, dtrans.trace(init_of(TX), params)


# Paddle's options, and the same in the package's own words
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {"degree": 8, "gather_bucket_MB": 32}),
    "degrees": (
        {"stage": 2, "sharding_degree": 4, "dp_degree": 2},
        {"stage": 2, "degree": 4, "replicas": 2},
    ),
    "sizes": (
        {
            "stage": 3,
            "sharding_degree": 4,
            "segment_broadcast_MB": 0,
            "fuse_grad_size_in_MB": 0,
            "min_slice_size": 0,
        },
        {"stage": 3, "degree": 4, "gather_bucket_MB": 0, "bucket_MB": 0, "min_slice_size": 0},
    ),
    "owners": (
        {"partition_algor": "greedy_even", "sharding_degree": 2},
        {"partition": "greedy_even", "degree": 2},
    ),
    "micro-steps": (
        {"stage": 2, "sharding_degree": 2, "gradient_merge_acc_step": 4},
        {"stage": 2, "degree": 2, "num_micro_batch": 4},
    ),
    "streams": ({"sharding_degree": 2, "comm_stream_num": 2}, {"degree": 2, "chains": 2}),
    "no overlap": (
        {"sharding_degree": 2, "enable_overlap": False},
        {"degree": 2, "overlap": False},
    ),
    "fp16": (
        {
            "sharding_degree": 2,
            "amp": True,
            "incr_ratio": 4.0,
            "decr_ratio": 0.25,
            "incr_every_n_steps": 7,
        },
        {
            "degree": 2,
            "precision": "fp16",
            "loss_scaling": dtrans.LossScaling(32768.0, True, 4.0, 7),
        },
    ),
    "a fixed scale": (
        {
            "sharding_degree": 2,
            "amp": True,
            "init_loss_scaling": 128.0,
            "use_dynamic_loss_scaling": False,
        },
        {"degree": 2, "precision": "fp16", "loss_scaling": 128.0},
    ),
    "bf16": (
        {"sharding_degree": 2, "amp": True, "amp_dtype": "bfloat16"},
        {"degree": 2, "precision": "bf16"},
    ),
    "asks for nothing": (
        {"sharding_degree": 2, "mp_degree": 1, "optimize_cast": False},
        {"degree": 2},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_plan_is_that_of_the_packages_own_options(name: str, programs: Any) -> None:
    paddles, ours = SAME[name]
    plan = dtrans.paddle.sharding(*programs, **paddles)
    want = flat_options.sharding(*programs, **{"gather_bucket_MB": 32} | ours)
    assert str(plan) == str(want)
    assert str(plan.program) == str(want.program)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"sharding_degree": 0}, "sharding_degree must be a positive number of ranks, it is 0"),
        (
            {"partition_algor": "odd"},
            "partition_algor must be 'rows', 'greedy_even' or 'use_order', it is 'odd'",
        ),
        ({"fuse_grad_size_in_MB": -1}, "fuse_grad_size_in_MB must be"),
        ({"comm_stream_num": 0}, "comm_stream_num must be a positive number"),
        (
            {"comm_stream_num": 2, "enable_overlap": False, "prefetch": 0},
            "enable_overlap=False and comm_stream_num=2: ",
        ),
        ({"gradient_merge_acc_step": 0}, "gradient_merge_acc_step must be a positive number"),
        (
            {"amp": True, "amp_dtype": "fp16"},
            "amp_dtype must be 'float16' or 'bfloat16', it is 'fp16'",
        ),
        (
            {"amp": True, "decr_ratio": 0.8},
            "decr_ratio is 0.8; expected 1 / incr_ratio: pass decr_ratio=0.5",
        ),
        ({"amp": True, "init_loss_scaling": 0.5}, "init_loss_scaling must be a number from 1"),
        (
            {"mp_degree": 2},
            "mp_degree=2 is not supported: dtrans.pipeline has tensor parallelism: .*; leave "
            "mp_degree",
        ),
        ({"optimize_offload": True}, "optimize_offload=True is not supported: dtrans.pipeline"),
        (
            {"degree": 2},
            "degree is an unknown option of dtrans.paddle.sharding; use sharding_degree",
        ),
        (
            {"shading_degree": 2},
            "shading_degree is an unknown option of dtrans.paddle.sharding; did you mean "
            "sharding_degree",
        ),
    ],
    ids=str,
)
def test_errors_name_paddles_options(options: dict[str, Any], says: str, programs: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        dtrans.paddle.sharding(*programs, **options)


def test_every_option_is_on_the_page() -> None:
    """With those that are found elsewhere."""
    named = [*inspect.signature(dtrans.paddle.sharding).parameters, *strategies.ELSEWHERE]
    page = (DOCS / "paddle.md").read_text()
    assert not [n for n in named if n not in ("main", "startup", "options") and f"`{n}" not in page]


def test_a_job_of_it_trains(programs: Any) -> None:
    plan = dtrans.paddle.sharding(*programs, stage=3, sharding_degree=4)
    job = plan.simulate()
    params, (x, y) = mlp_params((40, 64, 8)), mlp_batch(16, (40, 64, 8))
    _, loss = job.step(job.init(params), x, y)
    assert jnp.allclose(loss, mlp_loss(params, x, y))
