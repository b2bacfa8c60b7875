"""Losses that pick an entry of each row by the number of the row.

Trainers and micro-batches pick from their own rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_zoo

import dtrans
from dtrans._jax import equations
from dtrans.errors import ConfigError


CLASSES, LENGTH = 4, 3


def labelled(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, LENGTH, 6)), rng.integers(-CLASSES, CLASSES, (rows, LENGTH))


def logits(params: Any, x: Any) -> Any:
    return jax.nn.log_softmax(jnp.tanh(x @ params["w"]) @ params["v"])


def in_scan(params: Any, x: Any, y: Any) -> Any:
    rows, y, logp = jnp.arange(len(y)), jnp.asarray(y), logits(params, x)
    turn = lambda total, t: (total - logp[rows, t, y[:, t]].mean(), None)
    return jax.lax.scan(turn, jnp.float64(0), jnp.arange(LENGTH))[0]


LOSSES = {
    "plain": lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(len(y)), y[:, 0]].mean(),
    "numpy": lambda p, x, y: -logits(p, x[:, 0])[np.arange(len(y)), y[:, 0]].mean(),
    "sum": lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(len(y)), y[:, 0]].sum() / 8,
    "columns": lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(len(y))[:, None], y].mean(),
    "tokens": lambda p, x, y:
    -logits(p, x)[jnp.arange(len(y))[:, None], jnp.arange(LENGTH)[None], y].mean(),
    "slices": lambda p, x, y: -logits(p, x)[jnp.arange(len(y)), :, y[:, 1]].mean(),
    "vmapped": lambda p, x, y:
    -jax.vmap(lambda i, k: logits(p, x[:, 0])[i, k])(jnp.arange(len(y)), y[:, 0]).mean(),
    "checkpoint": lambda p, x, y:
    -jax.checkpoint(lambda z: jnp.sin(z)[jnp.arange(len(y)), y[:, 0]])(
        logits(p, x[:, 0])
    ).mean(),
    "written": lambda p, x, y: (jnp.zeros((len(y), CLASSES)).at[jnp.arange(len(y)),
                                                                y[:, 0]].set(1.0)
                                * logits(p, x[:, 0])).mean(),
}  # fmt: skip


def case_of(loss: Any) -> step_zoo.StepCase:
    def init(key: jax.Array) -> Any:
        w, v = (
            jax.random.normal(key, (6, 5), jnp.float64),
            jax.random.normal(key, (5, CLASSES), jnp.float64),
        )
        params = {"w": w, "v": v}
        return params, optax.sgd(0.1).init(params)

    return step_zoo.StepCase("picks", init, dtrans.make_train_step(loss, optax.sgd(0.1)), labelled)


def planned(case: step_zoo.StepCase, trainers: int, mode: str) -> Any:
    key = jax.random.key(0)
    rows = 12 if mode == "pipeline" else 6
    given = (
        dtrans.trace(case.step, *case.init(key), *case.batch(rows)),
        dtrans.trace(case.init, key),
    )
    if mode == "pipeline":
        return dtrans.pipeline(*given, num_stages=2, num_micro_batch=trainers)
    if mode == "pserver":
        return dtrans.pserver(*given, pservers="127.0.0.1:1,127.0.0.1:2", trainers=trainers)
    if mode == "nccl2":
        return dtrans.nccl2(*given, trainers=trainers)
    return dtrans.sharding(*given, degree=trainers, stage=int(mode[-1]))


def compare(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def trained(case: step_zoo.StepCase, plan: Any, rows: int) -> None:
    job, key = plan.simulate(), jax.random.key(0)
    state, alone = job.init(key), case.init(key)
    for seed in range(2):
        batch = case.batch(rows, seed)
        state, loss = job.step(state, *batch)
        params, opt_state, wanted = case.step(*alone, *batch)
        alone = params, opt_state
        compare((job.params(state), loss), (params, wanted))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_picks_from_each_row_is_made_of_its_parts(name: str) -> None:
    case = case_of(LOSSES[name])
    for mode in ("nccl2", "stage 1", "stage 3", "pserver"):
        plan = planned(case, 3, mode)
        shared = plan.shared
        assert shared.proven, (mode, shared.notes)
        assert shared.reduce == ("sum" if name == "sum" else "mean")
        assert not shared.part.exchanged and not shared.part.gathers
    program = planned(case, 2, "nccl2").program
    assert "all_gather" not in {e.primitive.name for e in equations(program.jaxpr)}
    trained(case, planned(case, 2, "nccl2"), 11)  # the last trainer has a row that is not used
    trained(case, planned(case, 3, "stage 1"), 12)
    plan = planned(case, 2, "pipeline")
    assert plan.values is None
    trained(case, plan, 12)


@pytest.mark.usefixtures("x64")
def test_picks_in_a_loop_exchange_nothing() -> None:
    """The loop of forward passes its row numbers to the loop of backward, so the sum over parts is
    not proven."""
    case = case_of(in_scan)
    for mode in ("nccl2", "stage 1", "pserver"):
        plan = planned(case, 3, mode)
        assert plan.shared.reduce == "sum" and not plan.shared.part.exchanged
    trained(case, planned(case, 2, "nccl2"), 11)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        (
            "rolled",
            lambda p, x, y: -logits(p, x[:, 0])[jnp.roll(jnp.arange(len(y)), 1), y[:, 0]].mean(),
        ),
        ("reversed", lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(len(y))[::-1], y[:, 0]].mean()),
        ("shorter", lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(len(y) - 1), y[1:, 0]].mean()),
        ("halved", lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(len(y)) // 2, y[:, 0]].mean()),
        ("fixed", lambda p, x, y: -logits(p, x[:, 0])[jnp.arange(6), y[:6, 0]].mean()),
        ("permuted", lambda p, x, y: -logits(p, x[:, 0])[jnp.argsort(y[:, 0]), y[:, 0]].mean()),
    ],
)
def test_one_that_picks_from_other_rows_is_not(name: str, loss: Any) -> None:
    case = case_of(loss)
    for trainers in (2, 3):
        plan = planned(case, trainers, "nccl2")
        assert not plan.shared.proven and plan.shared.part.exchanged, name
        trained(case, plan, 6 * trainers)
    # slices of rows, which micro-batches find by the number of the row
    if name in ("shorter", "fixed"):
        trained(case, planned(case, 2, "pipeline"), 12)
    else:
        with pytest.raises(ConfigError, match="values of the full batch"):
            planned(case, 2, "pipeline")
