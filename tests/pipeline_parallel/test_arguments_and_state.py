"""Updates that read arguments of the step, and losses that read optimizer state: the results of one
device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import compiled_quickly

import dtrans
from dtrans.errors import BatchError, ConfigError, GradientError


KEY = jax.random.key(0)
X, SCALES = np.random.default_rng(0).normal(size=(8, 4)), np.array([1.0, 2.0, 0.5, 1.5])
WHOLE = dtrans.Batch(unsplit_inputs=("scales",))
SLICES = dtrans.StageMemory(sharding_stage=2, min_slice_size=0)
MANNERS: dict[str, dict[str, Any]] = {
    "on_mesh": {"batch": WHOLE},
    "simulate": {"batch": WHOLE, "replicas": 2},
    "on_mesh, slices": {"batch": WHOLE, "replicas": 2, "memory": SLICES},
    "on_mesh, offload": {"batch": WHOLE, "memory": dtrans.StageMemory(offload=True)},
    "simulate, chunks": {
        "batch": WHOLE,
        "schedule": "Interleaved",
        "stages": dtrans.Stages(chunks=2),
    },
}


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def weights(key: jax.Array) -> Any:
    return [jax.random.normal(k, (4, 4)) / 2 for k in jax.random.split(key, 4)]


def planned(step: Any, init: Any, *batch: Any, **options: Any) -> Any:
    main = dtrans.trace(step, *jax.eval_shape(init, KEY), *batch)
    return dtrans.pipeline(
        main, dtrans.trace(init, KEY), **{"num_stages": 2, "num_micro_batch": 2, **options}
    )


def check(job: Any, step: Any, init: Any, *batches: Any) -> None:
    """Compare a job with one device."""
    state, alone, step = job.init(KEY), init(KEY), jax.jit(step)
    for batch in batches:
        state, *found = job.step(state, *batch)
        *alone, wanted, rest = (*step(*alone, *batch), ())[:4]
        for a, b in zip(jax.tree.leaves(found), [wanted, *jax.tree.leaves(rest)], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    for a, b in zip(
        *map(jax.tree.leaves, ((job.params(state), job.opt_state(state)), alone)), strict=True
    ):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-12)


# -- arguments that the update reads -------------------------------------------------------------


def by_arguments(params: Any, opt_state: Any, x: jax.Array, rate: Any, scales: jax.Array) -> Any:
    """Return a clipped update with a learning rate and a scale of each column as arguments.

    The state stores the last rate.
    """
    loss, grads = dtrans.value_and_grad(loss_of)(params, x)
    norm = optax.tree.norm(grads)
    new = [
        w - rate * scales * g / jnp.maximum(1.0, norm) for w, g in zip(params, grads, strict=True)
    ]
    return new, {"last": rate}, loss, {"taken": rate * norm}


def start(key: jax.Array) -> Any:
    return weights(key), {"last": jnp.zeros(())}


@pytest.mark.usefixtures("x64")
def test_an_update_may_read_arguments_of_the_step() -> None:
    with compiled_quickly():
        plan = planned(
            by_arguments,
            start,
            X,
            0.1,
            SCALES,
            batch=dtrans.Batch("micro", unsplit_inputs=("scales",)),
        )
        assert plan.update.arguments == ("rate", "scales")
        rates = [jnp.asarray(0.1), jnp.asarray(0.02)]
        job = plan.on_mesh()
        check(job, by_arguments, start, *((X, rate, SCALES) for rate in rates))
        assert [float(rate) for rate in rates] == [0.1, 0.02], "they are the user's, and stay"
        state, _, found = job.step(job.init(KEY), X, 1, SCALES)
    assert float(job.opt_state(state)["last"]) == 1.0 and found["taken"].dtype == jnp.float64
    with pytest.raises(
        BatchError,
        match=r"scales is float64\[1\], but the update was planned for float64\[4\]; make a plan",
    ):
        job.step(job.init(KEY), X, 0.1, SCALES[:1])
    with pytest.raises(
        BatchError, match=r"rate is complex128, but the step was traced with float64\[\]; cast"
    ):
        job.step(job.init(KEY), X, np.asarray(1j), SCALES)


def by_rows(params: Any, opt_state: Any, x: jax.Array) -> Any:
    loss, grads = dtrans.value_and_grad(loss_of)(params, x)
    new = [w - jnp.abs(x).max() * g for w, g in zip(params, grads, strict=True)]
    return new, opt_state, loss


def reported(params: Any, opt_state: Any, x: jax.Array) -> Any:
    loss, grads = dtrans.value_and_grad(loss_of)(params, x)
    new = [w - 0.1 * g for w, g in zip(params, grads, strict=True)]
    return new, opt_state, loss, {"scaled": optax.tree.norm(grads) * jnp.abs(x).max()}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            by_rows,
            "the update of by_rows reads x, but .*compute with the rows in the loss function",
        ),
        (
            reported,
            "to compute the result aux/scaled, reported reads gradients and x, but .*leave "
            "aux/scaled out of the results",
        ),
    ],
)
def test_an_update_may_not_read_rows_of_micro_batches(step: Any, told: str) -> None:
    told += ".*unsplit_inputs=.'x',."
    with pytest.raises(GradientError, match=told):
        planned(step, start, X)
    with pytest.raises(GradientError, match=told):
        planned(step, start, X, batch="micro")
    with compiled_quickly():
        check(planned(step, start, X, num_micro_batch=1).simulate(), step, start, (X,))


def test_a_result_is_made_of_gradients_or_of_the_loss() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = dtrans.value_and_grad(loss_of)(params, x)
        new = [w - 0.1 * g for w, g in zip(params, grads, strict=True)]
        return new, opt_state, loss, {"ratio": optax.tree.norm(grads) / loss}

    with pytest.raises(
        GradientError, match="aux/ratio depends on gradients and on results of the loss"
    ):
        planned(step, start, X, num_micro_batch=1)


def test_an_aux_value_of_a_loss_with_a_derivative_is_no_derivative() -> None:
    """The state follows a share of positive rows, while the loss penalizes an inner gradient."""

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        def penalized(params: Any) -> Any:
            inner = jax.grad(lambda x: loss_of(params, x))(x)
            return loss_of(params, x) + jnp.mean(inner**2), jnp.mean(jnp.sign(x @ params[0]))

        (loss, share), grads = dtrans.value_and_grad(penalized, has_aux=True)(params["w"])
        new = [w - 0.1 * g for w, g in zip(params["w"], grads, strict=True)]
        return {"w": new, "ada": params["ada"] + 0.05 * jnp.sign(share)}, opt_state, loss

    def init(key: jax.Array) -> Any:
        return {"w": weights(key), "ada": jnp.zeros(())}, ()

    with pytest.raises(ConfigError, match="step needs values of the full batch"):
        planned(step, init, X)
    planned(step, init, X, batch="micro")  # the remedy in the error


@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("metric", [jnp.exp, jnp.isfinite])
def test_a_result_that_needs_the_full_loss_is_refused_with_a_remedy(
    metric: Any, in_loss: bool
) -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, metric: Any = metric) -> Any:
        def measured(params: Any) -> Any:
            loss = loss_of(params, x)
            return loss, metric(loss) if in_loss else 0.0

        (loss, found), grads = dtrans.value_and_grad(measured, has_aux=True)(params)
        new = [w - 0.1 * g for w, g in zip(params, grads, strict=True)]
        return new, opt_state, loss, {"metric": found if in_loss else metric(loss)}

    with pytest.raises(ConfigError, match="leave aux/metric out of the results") as e:
        planned(step, start, X)
    assert "to compute the result aux/metric, step needs values of the full batch" in str(e.value)
    assert "micro'" not in str(e.value)
    # the remedy in the error: the loss function may still return the value
    planned(lambda *args: step(*args)[:3], start, X)


def test_a_merge_of_an_exact_batch_names_the_batch_of_a_pipeline() -> None:
    merged = dtrans.Batch(merge={"loss": "sum"})
    with pytest.raises(ConfigError, match="needs batch='micro', where each micro-batch computes"):
        planned(by_arguments, start, X, 0.1, SCALES, batch=merged)


# -- state that the loss reads -------------------------------------------------------------------


def with_noise(params: Any, opt_state: Any, x: jax.Array, rate: Any, scales: jax.Array) -> Any:
    """Return the update of `by_arguments` with noise from a key in the optimizer state, and a
    weight from its count.

    The count is also a result.
    """
    key, new_key = jax.random.split(opt_state["key"])
    noise = jax.random.normal(key, x.shape, x.dtype)
    scale = 1.0 / (1 + opt_state["steps"])
    loss, grads = dtrans.value_and_grad(lambda p: scale * loss_of(p, x + noise))(params)
    norm = optax.tree.norm(grads)
    new = [
        w - rate * scales * g / jnp.maximum(0.1, norm) for w, g in zip(params, grads, strict=True)
    ]
    steps = opt_state["steps"] + 1
    return new, {"key": new_key, "steps": steps}, loss, {"steps": steps, "taken": rate * norm}


def noisy(key: jax.Array) -> Any:
    return weights(key), {"key": key, "steps": jnp.zeros((), int)}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.sampled(1)
def test_a_loss_may_read_state_that_no_row_enters(manner: str) -> None:
    with compiled_quickly():
        plan = planned(with_noise, noisy, X, 0.1, SCALES, **MANNERS[manner])
        assert {n for s in plan.step_programs.stages for n in s.state} == {"opt_state/steps"}
        job = getattr(plan, manner.split(",")[0])()
        check(job, with_noise, noisy, (X, 0.1, SCALES), (X, 0.02, SCALES))


@pytest.mark.usefixtures("x64")
def test_a_result_may_read_gradients_and_a_count_of_the_optimizer() -> None:
    tx = optax.adam(0.1)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = dtrans.value_and_grad(loss_of)(params, x)
        updates, new = tx.update(grads, opt_state)
        scaled = optax.tree.norm(grads) * (1 + opt_state[0].count)
        return optax.apply_updates(params, updates), new, loss, scaled

    init = lambda key: (p := weights(key), tx.init(p))
    with compiled_quickly():
        check(planned(step, init, X).simulate(), step, init, (X,), (X,))


def test_a_loss_may_not_read_state_that_belongs_to_a_leaf() -> None:
    tx = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        penalty = lambda p: loss_of(p, x) + optax.tree.norm(opt_state)
        loss, grads = dtrans.value_and_grad(penalty)(params)
        updates, new = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), new, loss

    with pytest.raises(
        GradientError, match="computed from opt_state/0/trace/0, which is optimizer state"
    ):
        planned(step, lambda key: (p := weights(key), tx.init(p)), X)
