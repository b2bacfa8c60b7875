"""Local SGD: trainers take steps separately, and then average their state.

The reference is one device that runs the steps of each trainer in turn, and averages the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_forward, mlp_params, tree_close

import dtrans
from dtrans._jax import equations
from dtrans.errors import BatchError, ConfigError


SIZES = (5, 6, 3)
JOBS = ("simulate", "mesh")
COMMUNICATION = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def loss_fn(params: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
    """Return the mean over the rows that the mask counts, their number, the predictions, and the
    largest error."""
    out = mlp_forward(params, x)
    each = jnp.sum((out - y) ** 2, -1) * mask
    return jnp.sum(each) / jnp.sum(mask), {
        "count": jnp.sum(mask),
        "out": out,
        "worst": jnp.max(each),
    }


def batches(rows: int, steps: int = 2, weighted: bool = False) -> list[tuple[jax.Array, ...]]:
    rng = np.random.default_rng(rows)
    masks = rng.integers(1, 4, (steps, rows)) if weighted else np.ones((steps, rows))
    return [
        (*mlp_batch(rows, SIZES, jnp.float64, s), jnp.asarray(masks[s], jnp.float64))
        for s in range(steps)
    ]


def mean(trees: Sequence[Any], weights: Sequence[Any]) -> Any:
    total = sum(weights)

    def one(*xs: Any) -> Any:
        if not jnp.issubdtype(xs[0].dtype, jnp.inexact):
            assert all(np.array_equal(x, xs[0]) for x in xs)
            return xs[0]
        return sum(x * w for x, w in zip(xs, weights, strict=True)) / total

    return jax.tree.map(one, *trees)


def apart(step: Any, state: Any, batch: Any, trainers: int, steps: int, weighted: bool) -> Any:
    """Run one window of local steps by hand; return the state after it, the loss, and the
    results."""
    ends, losses, counts, outs, worst = [], [], [], [], []
    rows = len(batch[0]) // (trainers * steps)
    for k in range(trainers):
        own = state
        for i in range(steps):
            start = (k * steps + i) * rows
            *own, loss, aux = step(*own, *(x[start : start + rows] for x in batch))
            losses.append(loss)
            counts.append(aux["count"])
            outs.append(aux["out"])
            worst.append(aux["worst"])
        ends.append(tuple(own))
    weight_of = [
        sum(counts[k * steps : (k + 1) * steps]) if weighted else 1.0 for k in range(trainers)
    ]
    by_step = counts if weighted else [1.0] * len(losses)
    return (
        mean(ends, weight_of),
        mean(losses, by_step),
        (sum(counts), jnp.concatenate(outs), max(worst)),
    )


def planned(tx: Any, trainers: int, params: Any, batch: Any, **options: Any) -> tuple[Any, Any]:
    step = dtrans.make_train_step(loss_fn, tx, has_aux=True)
    main = dtrans.trace(step, params, jax.eval_shape(tx.init, params), *batch)
    merge = {"aux/worst": "max", "aux/count": "sum"}
    return step, flat_options.nccl2(
        main, dtrans.trace(init_of(tx), params), trainers=trainers, merge=merge, **options
    )


CASES = [
    (1, 1, {}),
    (1, 3, {}),
    (2, 1, {}),
    (2, 4, {}),
    (4, 2, {"bucket_MB": 0, "chains": 2}),
    (4, 3, {"trainers_per_node": 2}),
    (8, 2, {"max_buckets": 3}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("weight", [None, "aux/count"])
@pytest.mark.parametrize("trainers, steps, options", CASES)
def test_trainers_step_by_themselves_and_average_their_state(
    trainers: int, steps: int, options: Any, weight: str | None, way: str
) -> None:
    tx = optax.adam(optax.linear_schedule(0.1, 0.01, 10))
    params = mlp_params(SIZES, jnp.float64)
    given = batches(2 * trainers * steps, weighted=weight is not None)
    step, plan = planned(
        tx, trainers, params, given[0], local_sgd=steps, example_count=weight, **options
    )
    job = plan.simulate() if way == "simulate" else plan.on_mesh()
    state, want = job.init(params), (params, tx.init(params))
    jitted = jax.jit(step)
    for batch in given:
        state, loss, aux = job.step(state, *batch)
        want, want_loss, (count, out, worst) = apart(
            jitted, want, batch, trainers, steps, weight is not None
        )
        tree_close(
            (loss, aux["count"], aux["out"], aux["worst"]), (want_loss, count, out, worst), 1e-12
        )
    tree_close((job.params(state), job.opt_state(state)), want, 1e-12)


def test_one_local_step_of_plain_sgd_is_a_step_on_the_mean_gradient() -> None:
    params, (batch, _) = mlp_params(SIZES, jnp.float64), batches(8)
    step, plan = planned(optax.sgd(0.1), 4, params, batch, local_sgd=1)
    job = plan.simulate()
    state, loss, _ = job.step(job.init(params), *batch)
    want, _, want_loss, _ = step(params, optax.sgd(0.1).init(params), *batch)
    tree_close((job.params(state), loss), (want, want_loss), 1e-12)


def test_a_window_has_its_optimizer_inside_and_one_reduction_of_the_state_behind() -> None:
    params, (batch, _) = mlp_params(SIZES, jnp.float64), batches(16)
    _, plan = planned(optax.adam(0.1), 2, params, batch, local_sgd=4)
    (scan,) = [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    inside = {e.primitive.name for e in equations(scan.params["jaxpr"])}
    assert (
        scan.params["length"] == 4
        and {"dot_general", "sqrt"} <= inside
        and not inside & {*COMMUNICATION}
    )
    outside = [e.primitive.name for e in plan.program.jaxpr.jaxpr.eqns]
    assert "sqrt" not in outside and outside.count("all_reduce") == 3  # state, sums, maxima
    leaves = sum(x.size for x in jax.tree.leaves(params))
    # parameters and both moments, but not the count
    assert [b.nbytes for b in plan.buckets] == [3 * leaves * 8]
    assert plan.bytes_per_step == {"float64": 3 * leaves * 8 + 3 * 8}  # and loss, count, worst
    assert plan.merges["opt_state/0/count"] == "same"
    text = str(plan)
    assert "after 4 local steps trainers average their state" in text
    assert "opt_state/0/mu" in str(plan.buckets) and "params/w1: mean" not in text


def test_keys_differ_by_trainer_and_by_step() -> None:
    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean((x * params["w"] - jax.random.normal(key, x.shape)) ** 2)

    tx, params, key = optax.sgd(0.1), {"w": jnp.ones(3)}, jax.random.key(5)
    x = jnp.arange(24.0).reshape(8, 3) / 10
    step = dtrans.make_train_step(loss, tx)
    main = dtrans.trace(step, params, tx.init(params), x, key)
    plan = dtrans.nccl2(main, dtrans.trace(init_of(tx), params), trainers=2, local_sgd=2)
    ends = []
    for k in range(2):
        own = (params, tx.init(params))
        for i in range(2):
            rows = x[(2 * k + i) * 2 : (2 * k + i + 1) * 2]
            *own, _ = step(*own, rows, jax.random.fold_in(jax.random.fold_in(key, k), i))
        ends.append(own[0])
    for job in (plan.simulate(), plan.on_mesh()):
        state, _ = job.step(job.init(params), x, key)
        tree_close(job.params(state), mean(ends, [1.0, 1.0]), 1e-12)


def test_batch_statistics_go_from_step_to_step_and_are_averaged() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grad = dtrans.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params["w"])
        return (
            {"w": params["w"] - 0.1 * grad, "seen": params["seen"] * 0.5 + jnp.mean(x)},
            opt_state,
            value,
        )

    params = {"seen": jnp.zeros(()), "w": jnp.ones(3)}
    x = jnp.arange(24.0).reshape(8, 3) / 10
    main = dtrans.trace(step, params, (), x)
    plan = dtrans.nccl2(main, dtrans.trace(lambda p: (p, ()), params), trainers=2, local_sgd=2)
    job = plan.on_mesh()
    state, _ = job.step(job.init(params), x)
    seen = [jnp.mean(x[i : i + 2]) for i in (0, 2, 4, 6)]
    want = (seen[0] * 0.5 + seen[1] + seen[2] * 0.5 + seen[3]) / 2
    np.testing.assert_allclose(job.params(state)["seen"], want, rtol=1e-12)


def test_perturbed_steps_are_taken_by_each_trainer_for_itself() -> None:
    """Sharpness-aware minimization computes its gradient from another gradient.

    Trainers that share gradients refuse it.
    """

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss = lambda w: jnp.mean((x @ w) ** 2)
        value, grad = jax.value_and_grad(loss)(params)
        return params - 0.1 * jax.grad(loss)(params + 0.05 * grad), opt_state, value

    params, x = jnp.ones(3), jnp.arange(24.0).reshape(8, 3) / 10
    main, startup = dtrans.trace(step, params, (), x), dtrans.trace(lambda p: (p, ()), params)
    with pytest.raises(dtrans.errors.GradientError, match="computed from another derivative"):
        dtrans.nccl2(main, startup, trainers=2, batch="local")
    # all trainers have the first gradient
    exact = dtrans.nccl2(main, startup, trainers=2).simulate()
    np.testing.assert_allclose(
        exact.params(exact.step(exact.init(params), x)[0]), step(params, (), x)[0], rtol=1e-12
    )
    job = dtrans.nccl2(main, startup, trainers=2, local_sgd=1).simulate()
    state, _ = job.step(job.init(params), x)
    want = (step(params, (), x[:4])[0] + step(params, (), x[4:])[0]) / 2
    np.testing.assert_allclose(job.params(state), want, rtol=1e-12)


def test_what_the_optimizer_counts_must_be_merged_by_name() -> None:
    tx = optax.apply_if_finite(optax.sgd(0.1), 3)
    params, (batch, _) = mlp_params(SIZES, jnp.float64), batches(8)
    names = ("notfinite_count", "last_finite", "total_notfinite")
    with pytest.raises(
        ConfigError,
        match=r"opt_state/(last_finite|notfinite_count) .* its part of the batch.*merge=",
    ):
        planned(tx, 2, params, batch, local_sgd=2)
    step = dtrans.make_train_step(loss_fn, tx, has_aux=True)
    main = dtrans.trace(step, params, tx.init(params), *batch)
    merge = {f"opt_state/{n}": "max" for n in names} | {"aux/count": "sum", "aux/worst": "max"}
    plan = dtrans.nccl2(
        main,
        dtrans.trace(init_of(tx), params),
        trainers=2,
        local_sgd=2,
        batch=dtrans.Batch("local", merge=merge),
    )
    x, y, mask = batch
    job = plan.simulate()
    # in the last step of the last trainer
    state, *_ = job.step(job.init(params), x.at[7].set(jnp.inf), y, mask)
    assert [int(job.opt_state(state)._asdict()[n]) for n in names] == [1, 1, 1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(job.params(state)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"local_sgd": 0}, "local_sgd must be a positive number, or None; it is 0"),
        ({"local_sgd": True}, "local_sgd must be a positive number, or None; it is True"),
        (
            {"local_sgd": 2, "num_micro_batch": 2},
            "local_sgd=2 cannot be combined with num_micro_batch=2: with local_sgd, trainers "
            "reduce",
        ),
        (
            {"local_sgd": 2, "compress": "bf16"},
            "local_sgd=2 cannot be combined with compress='bf16'",
        ),
        (
            {"local_sgd": 2, "clip_local_norm": 1.0},
            "local_sgd=2 cannot be combined with clip_local_norm=1.0",
        ),
        ({"local_sgd": 2, "reduce": "sum"}, "local_sgd=2 cannot be combined with reduce='sum'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: Any, message: str) -> None:
    params, (batch, _) = mlp_params(SIZES, jnp.float64), batches(8)
    with pytest.raises(ConfigError, match=message):
        planned(optax.sgd(0.1), 2, params, batch, **options)


def test_rows_that_the_steps_do_not_divide_are_refused_by_name() -> None:
    params, (batch, _) = mlp_params(SIZES, jnp.float64), batches(12)
    job = planned(optax.sgd(0.1), 2, params, batch, local_sgd=4)[1].on_mesh()
    state = job.init(params)
    with pytest.raises(
        BatchError, match="x has 6 rows on each trainer, expected a multiple of the 4 micro-steps"
    ):
        job.step(state, *batch)
    job.step(state, *batches(16)[0])  # nothing was lost
