"""Sharding with Paddle's names gives the same plan as `dtrans.sharding`.

Errors name Paddle's options.
"""

from __future__ import annotations

import inspect
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, tree_close
from paths import DOCS
from pipeline_models import Job, compiled_quickly

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


# options of Paddle, and the equal options of dtrans.sharding
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
    "hybrid data parallel": (
        {"sharding_degree": 2, "dp_degree": 2, "hybrid_dp": True},
        {"degree": 2, "replicas": 2},
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
        ({"mp_degree": 0}, "mp_degree must be a positive number of devices, it is 0"),
        ({"mp_degree": 2, "sharding_degree": 0}, "sharding_degree must be a positive number"),
        ({"mp_degree": 2, "dp_degree": 0}, "dp_degree must be a positive number of groups"),
        (
            {"mp_degree": 2},
            "mp_degree=2 divides split layers, but .* has no dtrans.split\\(\\) scope; .* or leave "
            "mp_degree out",
        ),
        (
            {"mp_degree": 2, "partition_algor": "use_order"},
            "partition_algor='use_order' cannot be combined with mp_degree=2: ",
        ),
        (
            {"mp_degree": 2, "axis_name": "ranks"},
            "sharding_degree=8 with mp_degree=2 cannot be combined with axis_name='ranks': ",
        ),
        (
            {"hybrid_dp": True},
            "hybrid_dp=True is not supported: it has an effect only with several groups of ranks; ",
        ),
        ({"pp_degree": 2}, "pp_degree=2 is not supported: dtrans.pipeline has stages"),
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
    """The page also lists the options that dtrans does not have."""
    named = [*inspect.signature(dtrans.paddle.sharding).parameters, *strategies.ELSEWHERE]
    page = (DOCS / "paddle.md").read_text()
    assert not [n for n in named if n not in ("main", "startup", "options") and f"`{n}" not in page]


def test_a_job_of_it_trains(programs: Any) -> None:
    plan = dtrans.paddle.sharding(*programs, stage=3, sharding_degree=4)
    job = plan.simulate()
    params, (x, y) = mlp_params((40, 64, 8)), mlp_batch(16, (40, 64, 8))
    _, loss = job.step(job.init(params), x, y)
    assert jnp.allclose(loss, mlp_loss(params, x, y))


# -- mp_degree -------------------------------------------------------------------------------------


def array(*shape: int) -> Any:
    """Normal numbers, scaled by the first dimension as weights are."""
    x = np.random.default_rng(shape).normal(size=shape)
    return x / np.sqrt(shape[0])


def split_job(classes: int = 7, inner: int = 13, device_count: int | None = None) -> Job:
    """MLP and classifier in split scopes, whose widths no number of devices divides."""
    params = {
        "first": array(6, 8),
        "up": array(8, inner),
        "bias": array(inner),
        "down": array(inner, 8),
        "head": array(8, classes),
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        h = x @ params["first"]
        with dtrans.split(device_count=device_count, name="mlp"):
            h = h + jax.nn.gelu(h @ params["up"] + params["bias"]) @ params["down"]
        with dtrans.split(device_count=device_count, name="head"):
            logits = h @ params["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))

    def init(key: Any) -> Any:
        first = jax.tree.map(jnp.asarray, params)
        return first, tx.init(first)

    batch = (jnp.asarray(array(16, 6) * 4), jnp.arange(16) % classes)
    return Job(dtrans.make_train_step(loss, tx), init, batch)


# degrees as (sharding_degree, mp_degree, dp_degree), with the stage and further options
DEGREES = [
    (1, 2, 2, 1, {}),
    (2, 3, 1, 3, {}),
    (4, 2, 1, 2, {"gradient_merge_acc_step": 2}),
    (2, 2, 2, 1, {}),
    (2, 2, 2, 2, {}),
    (2, 2, 2, 3, {"gradient_merge_acc_step": 2}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharding, mp, dp, stage, options", DEGREES, ids=str)
def test_degrees_compute_the_numbers_of_one_device(
    sharding: int, mp: int, dp: int, stage: int, options: dict[str, Any], x64: None
) -> None:
    of = split_job()
    plan = dtrans.paddle.sharding(
        *of.traced(),
        stage=stage,
        sharding_degree=sharding,
        mp_degree=mp,
        dp_degree=dp,
        min_slice_size=0,
        **options,
    )
    assert plan.device_count == sharding * mp * dp
    assert "params/up" in plan.model_state.params and "params/head" in plan.model_state.params
    with compiled_quickly():
        tree_close(of.of(plan.on_mesh()), of.on_one_device(), 1e-12)
    report = plan.verify()
    assert report.equal and report.complete, report


def test_degrees_are_a_mesh() -> None:
    traced = split_job().traced()
    degrees = {"stage": 3, "sharding_degree": 2, "mp_degree": 2, "dp_degree": 2}
    plan = dtrans.paddle.sharding(*traced, **degrees)
    mesh = {"data": 2, "model": 2}
    want = flat_options.sharding(*traced, stage=3, mesh=mesh, replicas=2, gather_bucket_MB=32)
    assert str(plan) == str(want)
    assert str(plan.program) == str(want.program)


def test_devices_are_in_paddles_order() -> None:
    """Of neighbouring ranks, Paddle first counts mp, then sharding, then dp."""
    plan = dtrans.paddle.sharding(
        *split_job().traced(), sharding_degree=2, mp_degree=2, dp_degree=2, min_slice_size=0
    )
    job = plan.on_mesh()
    assert [size for _, size in plan.axes] == [2, 2, 2]
    assert [device.id for device in job.mesh.devices.flat] == list(range(8))
    with pytest.raises(ConfigError, match="the plan needs 8 devices, but on_mesh received 4"):
        plan.on_mesh(jax.devices()[:4])


def test_mp_degree_1_computes_split_layers_in_full() -> None:
    plan = dtrans.paddle.sharding(*split_job().traced(), sharding_degree=2, mp_degree=1)
    assert plan.model_state is None
    assert any("has no effect" in note for note in plan.notes)


def test_scopes_of_another_number_of_devices() -> None:
    says = "but mp_degree=2 divides split layers; leave device_count out, or pass mp_degree so"
    with pytest.raises(ConfigError, match=says):
        dtrans.paddle.sharding(*split_job(device_count=4).traced(), sharding_degree=2, mp_degree=2)
