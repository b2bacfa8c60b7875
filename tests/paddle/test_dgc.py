"""Paddle's options of Deep Gradient Compression give the plan of `dtrans.TopK`."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, tree_close

import dtrans
from dtrans import DistributeTranspiler, DistributeTranspilerConfig
from dtrans.errors import ConfigError
from dtrans.ir.selection import omit
from dtrans.paddle import DGCMomentum, optimizers


SIZES, EPS = (30, 600, 5), "127.0.0.1:6174,127.0.0.1:6175"
TX = optimizers.sgd(0.1)


@pytest.fixture(scope="module")
def programs() -> tuple[Any, Any]:
    params = mlp_params(SIZES)
    step = dtrans.make_train_step(mlp_loss, TX)
    main = dtrans.trace(step, params, jax.eval_shape(TX.init, params), *mlp_batch(8, SIZES))
    return main, dtrans.trace(init_of(TX), params)


def transpiled(
    programs: tuple[Any, Any], *, trainers: Any = 2, sync_mode: bool = True, **config: Any
) -> DistributeTranspiler:
    t = DistributeTranspiler(DistributeTranspilerConfig(sync_mode=sync_mode, **config))
    t.transpile(0, programs[0], EPS, trainers, sync_mode, programs[1])
    return t


@pytest.mark.parametrize(
    "ours, topk",
    [
        (DGCMomentum(0.9), dtrans.TopK(0.001, momentum=0.9)),
        (
            DGCMomentum(0.9, 10, 100, [0.75, 0.9375, 0.999], use_nesterov=True),
            dtrans.TopK((0.25, 0.0625, 0.001), 10, 100, momentum=0.9, nesterov=True),
        ),
        # with one value, a ramp-up has no effect
        (DGCMomentum(0.5, 3, 7, [0.9]), dtrans.TopK(0.1, 3, momentum=0.5)),
        # `dgc_configs` of a `DistributedStrategy` with its defaults
        (
            DGCMomentum(0.9, **{"rampup_begin_step": 0, "rampup_step": 1, "sparsity": []}),
            dtrans.TopK(0.001, momentum=0.9),
        ),
        (
            DGCMomentum(0.9, local_grad_clip_norm=2.0, num_trainers=2),
            dtrans.TopK(0.001, momentum=0.9, clip_norm=2.0),
        ),
    ],
    ids=["defaults", "ramp-up", "one value", "strategy", "clip"],
)
def test_options(programs: tuple[Any, Any], ours: DGCMomentum, topk: dtrans.TopK) -> None:
    plan = transpiled(programs, dgc=ours).plan
    mode = dtrans.Sync(compress=topk)
    placement = dtrans.BlockPlacement(min_block_size=8192)
    other = dtrans.pserver(*programs, pservers=EPS, trainers=2, mode=mode, placement=placement)
    assert plan.options.mode.compress.levels == topk.levels
    assert omit(plan.identity, ["options"]) == omit(other.identity, ["options"])
    assert [str(x.trainer) for x in plan.levels] == [str(x.trainer) for x in other.levels]


def test_dense_steps_have_the_numbers_of_the_momentum_optimizer(programs: tuple[Any, Any]) -> None:
    plan = transpiled(programs, trainers=1, dgc=DGCMomentum(0.9, rampup_begin_step=9)).plan
    tx = optimizers.momentum(0.1, 0.9)
    step = jax.jit(dtrans.make_train_step(mlp_loss, tx))
    params = mlp_params(SIZES)
    job, opt_state = plan.simulate(), tx.init(params)
    state = job.init(params)
    for seed in range(3):
        batch = mlp_batch(8, SIZES, seed=seed)
        state, _ = job.step(state, *batch)
        params, opt_state, _ = step(params, opt_state, *batch)
    tree_close(job.params(state), params, 1e-5)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"rampup_begin_step": -1},
            "rampup_begin_step must be a number of steps, 0 or more; it is -1",
        ),
        ({"rampup_step": 0}, "rampup_step must be a positive number of steps, it is 0"),
        (
            {"rampup_step": 0, "sparsity": [0.5, 0.9]},
            "rampup_step must be a positive number of steps, it is 0",
        ),
        (
            {"sparsity": [0.5, 1.0]},
            r"sparsity\[1\] must be a number below 1, and at least 0; it is 1.0",
        ),
        ({"sparsity": 0.999}, r"sparsity is 0.999; expected a list, such as \[0.999\]"),
        ({"use_nesterov": 1}, "use_nesterov must be True or False, it is 1"),
        (
            {"local_grad_clip_norm": 0.0},
            "local_grad_clip_norm must be a positive number, or None; it is 0.0",
        ),
        (
            {"num_trainers": 0},
            "num_trainers must be a positive number of trainers, or None; it is 0",
        ),
        ({"grad_clip": "a clip"}, "grad_clip='a clip' is not supported: pass local_grad_clip_norm"),
        ({"regularization": 1e-4}, "regularization=0.0001 is not supported: add the penalty to"),
    ],
    ids=str,
)
def test_errors_name_the_options_of_paddle(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        DGCMomentum(0.9, **options)


def test_the_remedy_for_a_penalty_is_in_the_gradients_that_trainers_compress() -> None:
    loss = lambda params, *batch: (
        mlp_loss(params, *batch) + sum((x**2).sum() for x in jax.tree.leaves(params))
    )
    params = mlp_params(SIZES)
    step = dtrans.make_train_step(loss, TX)
    main = dtrans.trace(step, params, jax.eval_shape(TX.init, params), *mlp_batch(8, SIZES))
    t = transpiled((main, dtrans.trace(init_of(TX), params)), dgc=DGCMomentum(0.9))
    assert {*t.plan.compression.gradients} == {f"params/{n}" for n in params}


@pytest.mark.parametrize(
    "config, options, says",
    [
        ({}, {"sync_mode": False}, r"dgc=DGCMomentum\(.*\) needs sync_mode=True, it is False"),
        (
            {"runtime_split_send_recv": True, "completely_not_async": True},
            {"sync_mode": False},
            r"dgc=DGCMomentum\(.*\) needs sync_mode=True, it is False",
        ),
        ({"geo_sgd_mode": True}, {"sync_mode": False}, r"dgc=.* needs geo_sgd_mode=False"),
        ({"mode": "nccl2"}, {"trainers": "a:1,b:1"}, r"dgc=.* needs mode='pserver', but mode is"),
        ({}, {"trainers": 3}, "num_trainers=2 of dgc, but transpile gets trainers=3; leave"),
    ],
    ids=["asynchronous", "communicator", "GEO-SGD", "nccl2", "trainers"],
)
def test_other_modes_refuse_it(
    programs: tuple[Any, Any], config: Any, options: Any, says: str
) -> None:
    dgc = DGCMomentum(0.9, num_trainers=2)
    with pytest.raises(ConfigError, match=f"^{says}"):
        transpiled(programs, dgc=dgc, **config, **options)
    with pytest.raises(ConfigError, match="^dgc must be a dtrans.paddle.DGCMomentum, it is 0.9"):
        transpiled(programs, dgc=0.9)
