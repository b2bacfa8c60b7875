"""Loops over layers in stage 3: values that one loop passes to another, and values that must not be
lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dtrans
from dtrans.zero.plan import ShardingPlan


LAYERS, D = 4, 6
KEY = jax.random.key(0)
BF16 = jnp.bfloat16
Loss = Callable[..., Any]


def start(**more: tuple[int, ...]) -> dict[str, jax.Array]:
    shapes = {"a": (LAYERS, D, D), "first": (5, D), "last": (D, 3), **more}
    return {
        n: jax.random.normal(jax.random.fold_in(KEY, k), s) / 3
        for k, (n, s) in enumerate(shapes.items())
    }


X, Y = jax.random.normal(KEY, (8, 5)), jnp.linspace(-1, 1, 24).reshape(8, 3)


def end(p: Any, h: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((h @ p["last"] - y) ** 2)


def cast(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h.astype(BF16) @ w.astype(BF16)).astype(jnp.float32), None


def casts(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return end(p, lax.scan(cast, x @ p["first"], p["a"])[0], y)


def planned(
    loss: Loss, params: Any, has_aux: bool = False, batch: Any = (X, Y), **options: Any
) -> ShardingPlan:
    tx = optax.sgd(0.05)
    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    init = lambda: (params, tx.init(params))
    main, startup = dtrans.trace(step, params, tx.init(params), *batch), dtrans.trace(init)
    return flat_options.sharding(
        main, startup, **{"stage": 3, "degree": 4, "min_slice_size": 0, **options}
    )


def check(
    loss: Loss, params: Any, rtol: float, has_aux: bool = False, batch: Any = (X, Y), **options: Any
) -> Any:
    """Compare three steps with one device. Return the plan."""
    tx = optax.sgd(0.05)
    step = jax.jit(dtrans.make_train_step(loss, tx, has_aux=has_aux))
    for prefetch in (0, 1):
        plan = planned(loss, params, has_aux, batch, prefetch=prefetch, **options)
        job = plan.simulate()
        state, want, s = job.init(), params, tx.init(params)
        for _ in range(3):
            state, *_ = job.step(state, *batch)
            want, s, *_ = step(want, s, *batch)
        for n, x in job.params(state).items():
            np.testing.assert_allclose(
                x - params[n], want[n] - params[n], rtol=rtol, atol=rtol / 50, err_msg=n
            )
    return plan


def loops(plan: ShardingPlan) -> list[Any]:
    return [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name in ("scan", "jit")]


def made_whole(plan: ShardingPlan) -> list[str]:
    """Return the results of loops that have the shape of all layers."""
    return [str(v.aval) for e in loops(plan) for v in e.outvars if v.aval.shape == (LAYERS, D, D)]


def test_a_gradient_that_all_ranks_make_is_not_added_up() -> None:
    """A loop computes a penalty of the layers. Its gradient depends on no row of the batch."""

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        penalty, _ = lax.scan(lambda c, w: (c + jnp.sum(w**2), None), 0.0, p["a"])
        return end(p, x @ p["first"], y) + 1e-2 * penalty

    check(loss, start(), 1e-4)
    check(loss, start(), 1e-4, degree=2, replicas=2)


@pytest.mark.parametrize(
    "options", [{"compress": "bf16"}, {"clip_local_norm": 1e9}], ids=["compress", "clip"]
)
def test_gradients_that_no_loop_scatters_are_made_of_layers_all_the_same(
    options: dict[str, Any],
) -> None:
    check(casts, start(), 6e-2, **options)


def test_layers_that_two_loops_read() -> None:
    check(lambda p, x, y: casts(p, x, y) + casts(p, 2 * x, y), start(), 6e-2)


def test_layers_that_another_loop_made() -> None:
    tanh = lambda h, w: (jnp.tanh(h @ w), None)
    check(
        lambda p, x, y: end(p, lax.scan(tanh, x @ p["first"], lax.map(jnp.tanh, p["a"]))[0], y),
        start(),
        1e-4,
    )


def test_what_a_loop_makes_of_layers_may_be_a_result() -> None:
    def loss(p: Any, x: jax.Array, y: jax.Array) -> Any:
        h, twice = lax.scan(lambda h, w: (jnp.tanh(h @ w), w * 2), x @ p["first"], p["a"])
        return end(p, h, y), twice

    check(loss, start(), 1e-4, has_aux=True, merge={"aux": "same"})


def test_gathers_wait_for_nothing_that_is_not_made() -> None:
    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        body = lambda h, w: ((w.astype(BF16).T @ h.T.astype(BF16)).T.astype(jnp.float32), None)
        return end(p, lax.scan(body, x @ p["first"], p["a"])[0] + jnp.sum(p["u"] @ p["v"]), y)

    check(loss, start(u=(5, 2), v=(2, D)), 6e-2)


def test_a_gather_behind_a_loop_waits_for_what_the_loop_scattered() -> None:
    """Without the wait, XLA may gather the leaf before the loop, and store it in addition to the
    gradients of all layers."""

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        # its backward pass reads "second" after the backward pass of the loop
        h = jnp.tanh(jnp.tanh(x @ p["first"]) @ p["second"])
        return end(p, lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["a"])[0], y)

    params = start(second=(D, D))
    eqns = planned(loss, params, prefetch=0).program.eqns
    scattered = [v for e in eqns if e.primitive.name == "scan" for v in e.outvars]
    waits = [e for e in eqns if e.primitive.name == "after" and e.invars[1] in scattered]
    gathers = [
        e for e in eqns if e.primitive.name == "all_gather" and e.params["name"] == "params/second"
    ]
    assert len(gathers) == 2 and gathers[1].invars[0] in [v for e in waits for v in e.outvars]
    check(loss, params, 1e-4)


def test_keys_and_constants_beside_layers() -> None:
    def loss(p: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        drop = jax.checkpoint(
            lambda h, w, k: jnp.tanh(h @ w) * jax.random.bernoulli(k, 1.0, h.shape)
        )
        h, _ = lax.scan(
            lambda h, a: (drop(h, *a), None),
            x @ p["first"],
            (p["a"], jax.random.split(key, LAYERS)),
        )
        return end(p, h, y)

    check(loss, start(), 1e-4, batch=(X, Y, jax.random.key(1)))


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_no_stack_of_layers_is_handed_from_loop_to_loop(amp: str | None) -> None:
    """Otherwise the forward loop would store each layer in 16 bits for the backward loop."""
    plan = check(casts, start(), 6e-2, precision=amp)
    assert loops(plan)
    assert made_whole(plan) == []


def test_products_that_say_what_they_add_up_in_are_left_alone() -> None:
    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = lax.dot(x.astype(BF16), p["first"].astype(BF16), preferred_element_type=jnp.float32)
        return end(p, h, y)

    plan = planned(loss, start(), precision="bf16", stage=1)
    first, *_ = (op for op in plan.program.ops if op.type == "dot_general")
    assert first.attrs["preferred_element_type"] == jnp.float32
