"""Leaves that a step does not change are found, are in no program of a server, and stay exact."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans import checkpoint
from dtrans.errors import StateError
from dtrans.step.gradients import gradients_of, inline_step
from dtrans.step.startup import normalize_step


Tree = Any
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
LABELS = {"emb": "held", "w": "moved"}


def loss(params: Tree, x: Any) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ params["emb"] @ params["w"]) ** 2)


def loss_without(params: Tree, x: Any) -> jax.Array:
    return loss({**params, "emb": jax.lax.stop_gradient(params["emb"])}, x)


def start(tx: Any) -> tuple[Tree, Tree]:
    params = {"emb": jnp.arange(300.0).reshape(6, 50) / 300, "w": jnp.ones((50, 2)) / 10}
    return params, tx.init(params)


MULTI = optax.multi_transform({"held": optax.set_to_zero(), "moved": optax.adam(1e-2)}, LABELS)
ZEROS = optax.masked(optax.set_to_zero(), {"emb": True, "w": False})
MASKED = optax.chain(ZEROS, optax.adam(1e-2))
CLIPPED = optax.chain(
    optax.clip_by_global_norm(1e-3), optax.adam(optax.cosine_decay_schedule(1e-2, 10))
)
HELD = {
    "multi_transform": (loss, MULTI),
    "masked": (loss, MASKED),
    "stop_gradient, adam": (loss_without, optax.adam(1e-2)),
    "stop_gradient, clip and schedule": (loss_without, CLIPPED),
    "stop_gradient, momentum": (loss_without, optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "stop_gradient, adam in a branch": (loss_without, optax.apply_if_finite(optax.adam(1e-2), 3)),
    "stop_gradient, rmsprop": (loss_without, optax.rmsprop(1e-2)),
    "stop_gradient, adagrad": (loss_without, optax.adagrad(1e-2)),
}
MOVED = {
    "trained": (loss, optax.adam(1e-2)),
    "weight decay": (loss_without, optax.adamw(1e-2)),
    # the moments depend on the gradient
    "zeros behind Adam": (
        loss,
        optax.chain(optax.adam(1e-2), ZEROS),
    ),
    "a moving state of zeros": (loss, optax.chain(optax.ema(0.9), optax.sgd(0.1))),
}


def traced(of: Any, tx: Any) -> tuple[Any, Any]:
    return normalize_step(
        dtrans.trace(dtrans.make_train_step(of, tx), *start(tx), X),
        dtrans.trace(lambda: start(tx), name="start"),
    )


def handed_on(main: Any) -> list[str]:
    return [n for n in main.args[0].names if main.outvars[n] is main.invars[n]]


@pytest.mark.parametrize("name", HELD)
def test_a_leaf_that_is_held_still_is_handed_on(name: str) -> None:
    main, _ = traced(*HELD[name])
    assert handed_on(main) == ["params/emb"]
    *state, _ = main.inputs.values()
    assert handed_on(main.specialize_flat([*state, jax.ShapeDtypeStruct((8, 6), "float32")])) == [
        "params/emb"
    ]


@pytest.mark.parametrize("name", MOVED)
def test_a_leaf_that_moves_is_not(name: str) -> None:
    main, _ = traced(*MOVED[name])
    assert handed_on(main) == [] and not main.frozen_constants


@pytest.mark.parametrize("turn", [jnp.flipud, lambda w: jnp.roll(w, 1, 0)], ids=["flip", "roll"])
def test_a_leaf_whose_rows_change_places_is_not(turn: Any) -> None:
    tx = optax.sgd(0.1)

    def step(params: Tree, opt_state: Tree, x: Any) -> Any:
        value, gradients = dtrans.value_and_grad(loss_without)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (
            {**optax.apply_updates(params, updates), "emb": turn(params["emb"])},
            opt_state,
            value,
        )

    main, _ = normalize_step(
        dtrans.trace(step, *start(tx), X), dtrans.trace(lambda: start(tx), name="start")
    )
    assert handed_on(main) == []


@pytest.mark.parametrize("name", ["masked", "stop_gradient, clip and schedule"])
@pytest.mark.parametrize("mode", ["nccl2", "stage 1", "stage 3", "pserver", "pipeline"])
@pytest.mark.sampled(1)
def test_jobs_hold_it_still_too(mode: str, name: str) -> None:
    of, tx = HELD[name]
    step = dtrans.make_train_step(of, tx)
    given = dtrans.trace(step, *start(tx), X), dtrans.trace(lambda: start(tx))
    if mode == "nccl2":
        plan: Any = dtrans.nccl2(*given, trainers=2)
    elif mode == "pserver":
        plan = dtrans.pserver(*given, pservers="127.0.0.1:1,127.0.0.1:2", trainers=2)
        assert plan.frozen == ("params/emb",)
        assert {b.leaf for b in plan.placement.all_blocks} == {"params/w"}
        assert plan.costs()[0].sent == 50 * 2 * 4  # the bytes of trained leaves, of 1,600 bytes
    elif mode == "pipeline":
        plan = dtrans.pipeline(*given, num_stages=2, num_micro_batch=2)
    else:
        slices = dtrans.Slicing(min_slice_size=0)
        plan = dtrans.sharding(*given, degree=2, stage=int(mode[-1]), slices=slices)
    job = plan.simulate()
    state, alone = job.init(), start(tx)
    for _ in range(3):
        state, got = job.step(state, X)
        *alone, wanted = step(*alone, X)  # type: ignore[assignment]
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(job.gather(state)), jax.tree.leaves(tuple(alone)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(job.params(state)["emb"], start(tx)[0]["emb"])


def test_moments_of_a_leaf_that_was_trained_before_are_refused(tmp_path: Any) -> None:
    """With these moments, one device would still change the leaf, although its gradient is zero."""
    tx = optax.adam(1e-2)
    before = dtrans.nccl2(*traced(loss, tx), trainers=2).simulate()
    trained, _ = before.step(before.init(), X)
    checkpoint.save(tmp_path / "1", before, trained)
    match = "opt_state/0/mu/emb has other entries than its initial value 0.0"
    for plan in (
        dtrans.nccl2(*traced(loss_without, tx), trainers=2),
        dtrans.pserver(*traced(loss_without, tx), pservers="127.0.0.1:1", trainers=2),
    ):
        job = plan.simulate()
        with pytest.raises(StateError, match=match):
            job.scatter(before.gather(trained))
        with pytest.raises(StateError, match=match):
            checkpoint.restore(tmp_path / "1", job)
    behind = optax.chain(tx, ZEROS)  # changes nothing, whatever its moments are
    job = dtrans.nccl2(*traced(loss, behind), trainers=2).simulate()
    state, _ = job.step(job.scatter((before.params(trained), behind.init(start(tx)[0]))), X)
    np.testing.assert_array_equal(job.params(state)["emb"], before.params(trained)["emb"])


def test_gradients_that_only_a_clip_reads_are_found() -> None:
    """No new parameter depends on the gradients of the frozen leaves, but the norm does."""
    labels = {"a": "held", "b": "held", "c": "moved"}
    tx = optax.chain(
        optax.clip_by_global_norm(1e-3),
        optax.multi_transform({"held": optax.set_to_zero(), "moved": optax.adam(1e-2)}, labels),
    )

    def init() -> Any:
        params = {n: jnp.full((2, 2), 0.1 * i) for i, n in enumerate("abc", 1)}
        return params, tx.init(params)

    def of(p: Tree, x: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ p["a"] @ p["b"] @ p["c"]) ** 2)

    def step(params: Tree, opt_state: Tree, x: Any) -> Any:
        value, grads = jax.value_and_grad(of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    x = np.arange(1.0, 5.0, dtype=np.float32).reshape(2, 2)
    main = dtrans.trace(step, *init(), x)
    opened = inline_step(main)
    found = gradients_of(opened).of
    values = opened.inner.replace(outvars=[found[f"params/{n}"] for n in "abc"])
    made = jax.core.eval_jaxpr(values, opened.jaxpr.consts, *jax.tree.leaves((*init(), x)))
    for got, wanted in zip(made, jax.grad(of)(init()[0], x).values(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    plan = dtrans.pserver(main, dtrans.trace(init), pservers="127.0.0.1:1", trainers=2)
    assert (report := plan.verify()), str(report)
