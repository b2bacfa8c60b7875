"""Stage 3 on many shapes of loops: only one layer is complete at a time.

Results equal one device.
"""

from __future__ import annotations

from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loop_shapes import SHAPES

import dtrans
from dtrans._jax import equations


ROWS, LAYERS, WIDTH = 8, 8, 6
ADAM = optax.adam(1e-2)


def planned(
    name: str, dtype: Any, layers: int = LAYERS, width: int = WIDTH, **options: Any
) -> tuple[Any, Any, Any]:
    shape = SHAPES[name]
    params = shape.params(layers, width, dtype)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, width)), dtype)
    init = lambda: (params, ADAM.init(params))
    step = dtrans.make_train_step(shape.loss, ADAM)
    main, startup = dtrans.trace(step, *jax.eval_shape(init), x), dtrans.trace(init)
    options = {"stage": 3, "degree": 4, "min_slice_size": 0, **options}
    return flat_options.sharding(main, startup, **options), step, x


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SHAPES)
def test_plans_compute_the_step(name: str) -> None:
    plan, *_ = planned(name, jnp.float32)  # slices of 6 entries over 4 ranks are padded
    assert (report := plan.verify()), str(report)


JOBS = ["a scan", "two stacks, a layer of each an iteration"]


@pytest.mark.parametrize("name", JOBS)
def test_the_numbers_are_those_of_one_device(name: str) -> None:
    with jax.enable_x64(True):
        plan, step, x = planned(name, jnp.float64)
        job = plan.simulate()
        state, params = job.init(), SHAPES[name].params(LAYERS, WIDTH, jnp.float64)
        alone = params, ADAM.init(params)
        for _ in range(2):
            state, *_, loss = job.step(state, x)
            *alone, by_one = jax.jit(step)(*alone, x)
            np.testing.assert_allclose(loss, by_one, rtol=1e-12)
        for n, x in job.params(state).items():
            np.testing.assert_allclose(x, alone[0][n], rtol=1e-12, atol=1e-12, err_msg=n)


OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch in loops": {"prefetch": 2},
    "no prefetch": {"prefetch": 0},
    "groups": {"degree": 2, "replicas": 2},
    "micro-steps": {"num_micro_batch": 2},
    "stage 2": {"stage": 2},
    "clip": {"clip_local_norm": 1e9},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("name", SHAPES)
def test_plans_with_options_compute_the_step(name: str, option: str) -> None:
    plan, *_ = planned(name, jnp.float32, **OPTIONS[option])
    assert (report := plan.verify()), str(report)


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_makes_a_stack_of_whole_layers(name: str) -> None:
    """No equation creates a stack of full layers, except zeros, which take no memory."""
    plan, *_ = planned(name, jnp.float32, layers=16, width=24)
    assert {s.axis for s in plan.slices.leaves.values()} == {SHAPES[name].axis}
    least = min(np.prod(shape) for shape in SHAPES[name].leaves(16, 24).values())
    outs = [(e, v.aval) for e in equations(plan.program.jaxpr) for v in e.outvars]
    large = [e for e, t in outs if t.shape[-2:] == (24, 24) and 2 * t.size >= least]
    if (
        name != "no loop, p[0], p[1], ..."
    ):  # JAX pads their gradients to the size of the stack, and adds them
        assert [e.primitive.name for e in large if e.primitive.name != "broadcast_in_dim"] == []


def test_no_rank_gathers_in_a_branch_that_its_own_rows_choose() -> None:
    """Other ranks might be in another branch, so the gather would wait forever."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def either(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.cond(h[0, 0] > 0, lambda: jnp.tanh(h @ w), lambda: jnp.sin(h @ w)), None

        return jnp.mean(jax.lax.scan(either, x, p["w"])[0] ** 2)

    params = SHAPES["a scan"].params(LAYERS, WIDTH)
    init = lambda: (params, ADAM.init(params))
    main = dtrans.trace(dtrans.make_train_step(loss, ADAM), *init(), jnp.ones((ROWS, WIDTH)))
    plan = flat_options.sharding(
        main, dtrans.trace(init), stage=3, degree=2, min_slice_size=0, kind="local"
    )
    branches = [e for e in equations(plan.program.jaxpr) if e.primitive.name == "cond"]
    inside = [
        x.primitive.name for e in branches for b in e.params["branches"] for x in equations(b)
    ]
    assert branches and "all_gather" not in inside


def test_a_branch_returns_one_value_as_a_slice_and_whole() -> None:
    """The other branch has values of two leaves.

    Only the first output is a slice in both branches.
    """

    def loss(p: Any, x: jax.Array) -> jax.Array:
        both = lambda a, b: (jnp.sin(a),) * 2
        each = lambda a, b: (jnp.cos(a), jnp.sin(b))
        first, second = jax.lax.cond(jnp.sum(p["a"]) > 0, both, each, p["a"], p["b"])
        return jnp.mean((x @ first) ** 2) + jnp.sum(second**2)

    params = {"a": jnp.linspace(0, 1, WIDTH * 4).reshape(WIDTH, 4), "b": jnp.ones((WIDTH, 4))}
    init = lambda: (params, ADAM.init(params))
    main = dtrans.trace(dtrans.make_train_step(loss, ADAM), *init(), jnp.ones((ROWS, WIDTH)))
    plan = flat_options.sharding(main, dtrans.trace(init), stage=3, degree=4, min_slice_size=0)
    assert (report := plan.verify()), str(report)


@pytest.mark.parametrize("name", ["a scan", "a scan, and sum(p**2) in the loss"])
def test_a_step_that_donates_its_state_needs_a_quarter_of_its_parameters_beside_activations(
    name: str,
) -> None:
    """Temporaries take at most a quarter: slices of gradients an eighth, and a layer or its
    gradient a sixteenth."""
    shape, layers, width, rows = SHAPES[name], 16, 512, 64
    types = jax.eval_shape(lambda: shape.params(layers, width))
    init = lambda: (params := shape.params(layers, width), ADAM.init(params))
    main = dtrans.trace(dtrans.make_train_step(shape.loss, ADAM), types,
                        jax.eval_shape(ADAM.init, types),
                        jnp.ones((rows, width)))  # fmt: skip
    job = dtrans.sharding(main, dtrans.trace(init), stage=3, degree=8).on_mesh()
    stats = job.lower(job.init(), jnp.ones((rows, width))).compile().memory_analysis()
    psi = 4 * layers * width**2
    assert stats.alias_size_in_bytes > 3 * psi / 8 * 0.99, "the state is donated"
    kept = 3 * layers * rows // 8 * width * 4  # JAX stores the outputs of tanh of each layer
    assert stats.temp_size_in_bytes - kept < psi / 4, stats.temp_size_in_bytes / psi
