"""Mixed precision of sharding: the values in 16 bits, the loss scale, and its agreement on all
ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.errors import ConfigError, GradientError
from dtrans.zero.mixed_precision import GOOD, SCALE, SKIPPED
from dtrans.zero.plan import ShardingPlan


D, LAYERS, BATCH = 12, 3, 16
KEY = jax.random.key(0)
X, Y = jax.random.normal(KEY, (BATCH, D)), jnp.linspace(-1, 1, BATCH * D).reshape(BATCH, D)
Model = tuple[Callable[..., Any], Callable[..., Any]]


def mlp(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = x
    for k in range(LAYERS):
        h = jnp.tanh(h @ params["w"][str(k)] + params["b"][str(k)])
    return jnp.mean((h @ params["w"]["0"].T - y) ** 2)  # tied weights, also transposed


def mlp_params(key: jax.Array) -> Any:
    keys = jax.random.split(key, LAYERS)
    return {
        "w": {str(k): jax.random.normal(keys[k], (D, D)) / D**0.5 for k in range(LAYERS)},
        "b": {str(k): jnp.zeros(D) for k in range(LAYERS)},
    }


def scanned(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(wrap(lambda h, w: (jnp.tanh(h @ w), None)), x, params["w"])
        return jnp.mean((h - y) ** 2)

    return loss


def stack(key: jax.Array) -> Any:
    return {"w": jax.random.normal(key, (LAYERS, D, D)) / D**0.5}


def embedded(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return the loss of an embedding that is looked up in float32, and multiplied in 16 bits."""
    h = jnp.tanh(params["table"][ids])
    return jnp.mean((h @ params["table"].T - y) ** 2)


MODELS: dict[str, Model] = {
    "mlp": (mlp, mlp_params),
    "scan": (scanned(lambda f: f), stack),
    "remat": (scanned(jax.checkpoint), stack),
}


def programs(loss: Any, params: Any, tx: Any, *batch: Any) -> tuple[Any, Any, Any, Any]:
    def init(key: jax.Array) -> Any:
        made = params(key)
        return made, tx.init(made)

    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, *init(KEY), *batch), dtrans.trace(init, KEY), step, init


def plan_of(name: str, tx: Any = None, **options: Any) -> ShardingPlan:
    loss, params = MODELS[name]
    main, startup, *_ = programs(loss, params, tx or optax.adam(1e-2), X, Y)
    return flat_options.sharding(main, startup, **{"degree": 4, "min_slice_size": 0, **options})


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


# -- numbers ---------------------------------------------------------------------------------------


FOLLOWS = [(name, amp, stage) for name in MODELS for amp in ("bf16", "fp16") for stage in (1, 2, 3)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "amp", "stage"),
    [
        pytest.param(*case, marks=[] if k % 3 == k // 3 % 3 else pytest.mark.rotated)
        for k, case in enumerate(FOLLOWS)
    ],
)
def test_training_follows_one_device(name: str, amp: str, stage: int) -> None:
    """The first update has nearly the direction of one device's update, and the losses decrease
    alike."""
    loss, params = MODELS[name]
    tx = optax.sgd(0.5)
    main, startup, step, init = programs(loss, params, tx, X, Y)
    job = dtrans.sharding(
        main,
        startup,
        stage=stage,
        degree=4,
        replicas=2,
        precision=amp,
        slices=dtrans.Slicing(min_slice_size=0),
    ).simulate()
    state, want = job.init(KEY), init(KEY)
    start = flat(want[0])
    one = jax.jit(step)
    for k in range(3):
        x = X * (1 + k)
        state, l = job.step(state, x, Y)
        *want, expected = one(*want, x, Y)
        assert abs(float(l - expected)) < (2e-3 if amp == "bf16" else 2e-4) * max(
            1.0, float(expected)
        )
        if not k:
            ours, theirs = flat(job.params(state)) - start, flat(want[0]) - start
            cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
            assert cosine > (0.9995 if amp == "bf16" else 0.99999)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(job.params(state)))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.rotated), 3])
def test_the_mesh_gives_the_numbers_of_one_device_in_float16(stage: int) -> None:
    plan = plan_of("mlp", stage=stage, precision="fp16", degree=4, replicas=2)
    states = []
    for job in (plan.simulate(), plan.on_mesh()):
        state = job.init(KEY)
        for k in range(2):
            state, _ = job.step(state, X * (1 + k), Y)
        states.append((job.params(state), job.opt_state(state), state.extra))
    np.testing.assert_allclose(flat(states[0]), flat(states[1]), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("scaling", [1.0, dtrans.LossScaling(initial=4096.0)])
def test_a_scale_changes_nothing_that_fits(scaling: Any) -> None:
    """Scales are powers of two.

    They change no bit of float16 gradients that neither underflow nor overflow.
    """
    tx = optax.sgd(0.5)
    states = []
    for s in (scaling, 256.0):
        job = plan_of("mlp", tx, stage=2, precision="fp16", loss_scaling=s).simulate()
        state, _ = job.step(job.init(KEY), 8 * X, 8 * Y)
        states.append(job.params(state))
    np.testing.assert_allclose(flat(states[0]), flat(states[1]), rtol=0, atol=2e-5)


# -- structure -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["scan", "remat"])
def test_half_the_bytes_are_moved(name: str, amp: str) -> None:
    psi = 4 * LAYERS * D * D
    for stage, gathers in ((1, 1), (2, 1), (3, 2)):
        traffic = plan_of(name, stage=stage, precision=amp).traffic()
        assert traffic["all_gather", "shard"] == gathers * psi / 2
        assert traffic["reduce_scatter", "shard"] == psi / 2
        assert plan_of(name, stage=3).traffic()["all_gather", "shard"] == 2 * psi


def test_what_is_read_both_ways_is_gathered_once_as_it_is() -> None:
    ids = jnp.arange(BATCH) % 8
    main, startup, *_ = programs(
        embedded,
        lambda key: {"table": jax.random.normal(key, (8, D))},
        optax.sgd(0.1),
        ids,
        jnp.ones((BATCH, 8)),
    )
    plan = dtrans.sharding(
        main, startup, stage=1, degree=4, precision="bf16", slices=dtrans.Slicing(min_slice_size=0)
    )
    (gather,) = [op for op in plan.program.ops if op.type == "all_gather"]
    assert plan.traffic()["all_gather", "shard"] == 4 * 8 * D
    assert gather.outputs == ("params/table.gathered",)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_hold_slices_in_32_bits_alone(stage: int) -> None:
    plan = plan_of("scan", stage=stage, precision="bf16")
    psi = 4 * LAYERS * D * D
    assert plan.memory() == {"params": psi // 4, "opt_state": 2 * psi // 4 + 4, "padding": 0}


def test_products_are_in_16_bits_and_nothing_else() -> None:
    ops = [
        op
        for op in plan_of("mlp", stage=1, precision="bf16").program.ops
        if op.role in ("forward", "backward")
    ]
    assert {str(op.attrs["preferred_element_type"]) for op in ops if op.type == "dot_general"} == {
        "bfloat16"
    }
    plan = plan_of("mlp", stage=1, precision="bf16")
    others = [
        v.aval.dtype
        for e in plan.program.jaxpr.jaxpr.eqns
        if e.primitive.name in ("tanh", "reduce_sum", "integer_pow", "div")
        for v in e.outvars
    ]
    assert set(others) == {jnp.dtype(jnp.float32)}


def test_nothing_is_cast_in_vain() -> None:
    """No cast has an unread result, and no value is cast back to a type that it just had."""
    plan = plan_of("mlp", stage=2, precision="bf16")
    eqns = plan.program.jaxpr.jaxpr.eqns
    read = {id(a) for e in eqns for a in e.invars} | {
        id(a) for a in plan.program.jaxpr.jaxpr.outvars
    }
    casts = [e for e in eqns if e.primitive.name == "convert_element_type"]
    assert casts and all(id(e.outvars[0]) in read for e in casts)


def test_gradients_are_reduced_in_16_bits_and_others_are_not() -> None:
    plan = plan_of("mlp", stage=2, precision="bf16")
    scatters = [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "reduce_scatter"]
    kinds = {str(a.aval.dtype) for e in scatters for a in e.invars}
    assert kinds == {"bfloat16", "float32"}  # weights, biases
    moved = {
        kind: sum(a.aval.size for e in scatters for a in e.invars if str(a.aval.dtype) == kind)
        for kind in kinds
    }
    assert moved == {"bfloat16": LAYERS * D * D, "float32": LAYERS * D}


# -- the scale -------------------------------------------------------------------------------------


ROTATED = pytest.mark.rotated


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rank", "stage", "how"),
    [
        (0, 1, "simulate"),
        (5, 2, "simulate"),
        (5, 3, "on_mesh"),
        *(pytest.param(5 - r, s, "simulate", marks=ROTATED) for r, s in ((0, 1), (5, 2), (5, 3))),
        *(
            pytest.param(r, s, "on_mesh", marks=ROTATED)
            for r, s in ((0, 1), (5, 1), (0, 2), (5, 2), (0, 3))
        ),
    ],
)
def test_one_gradient_that_is_not_finite_changes_nothing_anywhere(
    stage: int, rank: int, how: str
) -> None:
    plan = plan_of("mlp", stage=stage, precision="fp16", degree=4, replicas=2)
    job = getattr(plan, how)(donate=False) if how == "on_mesh" else plan.simulate()
    before, _ = job.step(job.init(KEY), X, Y)
    rows = BATCH // 8
    bad = X.at[rank * rows, 3].set(jnp.inf)
    after, _ = job.step(before, bad, Y)
    for held in ("params", "opt_state"):
        for n, x in getattr(before, held).items():
            np.testing.assert_array_equal(x, getattr(after, held)[n], err_msg=n)
    assert {n: float(x) for n, x in after.extra.items()} == {GOOD: 0, SCALE: 2.0**14, SKIPPED: 1}
    state, _ = job.step(after, X, Y)
    assert int(state.opt_state["opt_state/0/count"]) == 2


def test_an_overflow_alone_is_found() -> None:
    """A finite gradient that overflows when the loss is scaled also reduces the scale."""
    job = plan_of(
        "mlp", stage=2, precision="fp16", loss_scaling=dtrans.LossScaling(initial=2.0**40)
    ).simulate()
    state = job.init(KEY)
    start = flat(job.params(state))
    for k in range(1, 4):
        state, _ = job.step(state, X, Y)
        assert float(state.extra[SCALE]) == 2.0 ** (40 - k)
    np.testing.assert_array_equal(flat(job.params(state)), start)


def test_the_scale_grows_after_an_interval_and_is_never_less_than_one() -> None:
    scaling = dtrans.LossScaling(initial=4.0, interval=2)
    job = plan_of("mlp", stage=1, precision="fp16", loss_scaling=scaling).simulate()
    state, seen = job.init(KEY), []
    for _ in range(5):
        state, _ = job.step(state, X, Y)
        seen.append((float(state.extra[SCALE]), int(state.extra[GOOD])))
    assert seen == [(4, 1), (8, 0), (8, 1), (16, 0), (16, 1)]
    for _ in range(6):
        state, _ = job.step(state, X * jnp.inf, Y)
    assert float(state.extra[SCALE]) == 1.0
    assert int(state.extra[SKIPPED]) == 6


def test_a_fixed_scale_never_skips() -> None:
    job = plan_of("mlp", stage=1, precision="fp16", loss_scaling=128.0).simulate()
    state = job.init(KEY)
    assert state.extra == {}
    state, _ = job.step(state, X * jnp.inf, Y)
    assert not np.isfinite(flat(job.params(state))).all()


def test_the_scale_saves_gradients_that_float16_would_lose() -> None:
    """Gradients of 1e-8 and less are zero in float16. With the scale they train."""
    tiny = lambda params, x: jnp.mean(x @ params["w"]) * 1e-6
    main, startup, *_ = programs(
        tiny, lambda key: {"w": jnp.ones((8, 4))}, optax.sgd(1e6), jnp.ones((8, 8))
    )
    moved = {}
    for scale in (1.0, 2.0**15):
        job = dtrans.sharding(
            main,
            startup,
            stage=2,
            degree=4,
            precision=dtrans.Precision("fp16", loss_scaling=scale),
            slices=dtrans.Slicing(min_slice_size=0),
        ).simulate()
        state, _ = job.step(job.init(KEY), jnp.ones((8, 8)))
        moved[scale] = float(jnp.abs(job.params(state)["w"] - 1).max())
    assert moved[2.0**15] == pytest.approx(0.25, rel=1e-2)
    assert abs(moved[1.0] - 0.25) > 0.01


def test_results_are_those_of_the_loss_that_is_not_scaled() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = dtrans.value_and_grad(mlp)(params, x, y)
        return params, opt_state, loss, optax.tree.norm(grads)

    params = mlp_params(KEY)
    tx = optax.sgd(0.1)

    def with_update(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = dtrans.value_and_grad(mlp)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    init = lambda key: (mlp_params(key), tx.init(mlp_params(key)))
    main, startup = dtrans.trace(with_update, *init(KEY), X, Y), dtrans.trace(init, KEY)
    job = dtrans.sharding(
        main, startup, stage=3, degree=4, precision="fp16", slices=dtrans.Slicing(min_slice_size=0)
    ).simulate()
    _, loss, norm = job.step(job.init(KEY), X, Y)
    *_, want, want_norm = step(params, (), X, Y)
    assert float(loss) == pytest.approx(float(want), rel=1e-3)
    assert float(norm) == pytest.approx(float(want_norm), rel=1e-2)


def test_micro_steps_are_scaled_too() -> None:
    tx = optax.sgd(0.5)
    states = []
    for steps, stage in ((1, 1), (2, 1), (2, 2), (2, 3)):
        job = plan_of("mlp", tx, stage=stage, precision="fp16", num_micro_batch=steps).simulate()
        state, _ = job.step(job.init(KEY), X, Y)
        states.append(flat(job.params(state)))
    for state in states[1:]:
        np.testing.assert_allclose(state, states[0], atol=2e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scaling", [64.0, dtrans.LossScaling(initial=2.0**15)])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [1e-2, 1e3])
def test_gradients_are_clipped_as_they_are_without_the_scale(
    clip: float, stage: int, scaling: Any
) -> None:
    """Each rank clips its gradient before the mean.

    One norm is far above the bound, the other far below.
    """
    loss, params = MODELS["mlp"]
    start, parts = params(KEY), 2
    wanted = jax.tree.map(jnp.zeros_like, start)
    for k in range(parts):
        rows = slice(k * BATCH // parts, (k + 1) * BATCH // parts)
        own = jax.grad(loss)(start, X[rows], Y[rows])
        own, _ = optax.clip_by_global_norm(clip).update(own, optax.EmptyState())
        wanted = jax.tree.map(lambda a, b: a + b / parts, wanted, own)
    plan = plan_of(
        "mlp",
        optax.sgd(1.0),
        stage=stage,
        precision="fp16",
        degree=parts,
        clip_local_norm=clip,
        loss_scaling=scaling,
    )
    job = plan.simulate()
    state, _ = job.step(job.init(KEY), X, Y)
    moved = flat(start) - flat(job.params(state))
    assert np.linalg.norm(moved - flat(wanted)) < 2e-3 * np.linalg.norm(flat(wanted))


def test_clipping_keeps_what_is_not_finite() -> None:
    job = plan_of("mlp", stage=2, precision="fp16", degree=2, clip_local_norm=0.1).simulate()
    before = job.init(KEY)
    after, _ = job.step(before, X.at[0, 0].set(jnp.inf), Y)
    np.testing.assert_array_equal(flat(job.params(after)), flat(job.params(before)))
    assert int(after.extra[SKIPPED]) == 1


@pytest.mark.parametrize("scale", [2.0**15, 2.0**16, 2.0**17])
@pytest.mark.parametrize("dynamic", [False, True])
def test_leaves_of_float16_learn_under_any_scale(scale: float, dynamic: bool) -> None:
    """A scale of 65,536 is infinite in float16, but a gradient multiplied by the scale may be
    finite."""
    small = lambda params, x: jnp.mean((x @ params["w"]).astype(jnp.float32)) * 1e-3
    start = lambda key: {"w": jnp.ones((8, 4), jnp.float16)}
    x = jnp.ones((8, 8), jnp.float16)
    main, startup, *_ = programs(small, start, optax.sgd(100.0), x)
    scaling = dtrans.LossScaling(initial=scale, dynamic=dynamic)
    job = dtrans.sharding(
        main,
        startup,
        stage=2,
        degree=4,
        precision=dtrans.Precision("fp16", loss_scaling=scaling),
        slices=dtrans.Slicing(min_slice_size=0),
    ).simulate()
    state, _ = job.step(job.init(KEY), x)
    np.testing.assert_allclose(
        np.asarray(job.params(state)["w"], np.float32), 1 - 0.1 / 4, rtol=1e-3
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_is_skipped_leaves_statistics_as_they_were(stage: int) -> None:
    """The loss computes a running mean of the batch and a counter, not the optimizer."""
    tx = optax.sgd(0.1)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        def loss_fn(weights: Any) -> Any:
            return jnp.mean((x @ weights["w"]) ** 2), jnp.mean(x, 0)

        (loss, mean), grads = dtrans.value_and_grad(loss_fn, has_aux=True)(params["weights"])
        updates, opt_state = tx.update(grads, opt_state, params["weights"])
        seen = {
            "mean": 0.9 * params["seen"]["mean"] + 0.1 * mean,
            "steps": params["seen"]["steps"] + 1,
        }
        return (
            {"weights": optax.apply_updates(params["weights"], updates), "seen": seen},
            opt_state,
            loss,
        )

    def init(key: jax.Array) -> Any:
        weights = {"w": jax.random.normal(key, (D, 4))}
        return {"weights": weights, "seen": {"mean": jnp.zeros(D), "steps": jnp.int32(0)}}, tx.init(
            weights
        )

    main, startup = dtrans.trace(step, *init(KEY), X), dtrans.trace(init, KEY)
    options = {
        "stage": stage,
        "degree": 4,
        "precision": "fp16",
        "loss_scaling": dtrans.LossScaling(initial=256.0),
    }
    job = flat_options.sharding(main, startup, **options, min_slice_size=0).simulate()
    once, _ = job.step(job.init(KEY), X)
    after, _ = job.step(once, X.at[3, 2].set(jnp.inf))
    np.testing.assert_array_equal(flat(job.params(after)), flat(job.params(once)))
    assert (
        np.isfinite(flat(job.params(after))).all() and int(job.params(once)["seen"]["steps"]) == 1
    )


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_a_linear_solve_keeps_its_rules(amp: str) -> None:
    """JAX stores the bodies of a linear solve in a tuple with names."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(
            (jnp.linalg.solve(jnp.eye(D) * 4 + params["a"], x.T).T @ params["w"] - y) ** 2
        )

    def params(key: jax.Array) -> Any:
        return {
            "a": 0.1 * jax.random.normal(key, (D, D)),
            "w": jax.random.normal(key, (D, D)) / D**0.5,
        }

    main, startup, step, init = programs(loss, params, optax.sgd(0.5), X, Y)
    want, *_ = step(*init(KEY), X, Y)
    for stage in (1, 3):
        job = dtrans.sharding(
            main,
            startup,
            stage=stage,
            degree=4,
            precision=amp,
            slices=dtrans.Slicing(min_slice_size=0),
        ).on_mesh()
        state, _ = job.step(job.init(KEY), X, Y)
        np.testing.assert_allclose(
            flat(job.params(state)), flat(want), atol=2e-2 if amp == "bf16" else 2e-3
        )


# -- what is refused -------------------------------------------------------------------------------


def test_a_loss_whose_derivative_is_not_marked_cannot_be_scaled() -> None:
    tx = optax.sgd(0.1)

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mlp)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    init = lambda key: (mlp_params(key), tx.init(mlp_params(key)))
    main, startup = dtrans.trace(step, *init(KEY), X, Y), dtrans.trace(init, KEY)
    with pytest.raises(
        GradientError, match=r"the loss of step cannot be scaled, .* dtrans.value_and_grad"
    ):
        dtrans.sharding(main, startup, stage=1, degree=2, precision="fp16")
    dtrans.sharding(main, startup, stage=1, degree=2, precision="bf16")


def test_a_scale_that_is_infinite_in_the_type_of_the_loss_is_refused() -> None:
    low = lambda params, x: jnp.mean(x @ params["w"])
    x = jnp.ones((8, 8), jnp.float16)
    main, startup, *_ = programs(
        low, lambda key: {"w": jnp.ones((8, 4), jnp.float16)}, optax.sgd(0.1), x
    )
    with pytest.raises(
        ConfigError,
        match=r"loss_scaling=65536.0 is infinite in float16, the type of the loss of step",
    ):
        dtrans.sharding(
            main,
            startup,
            stage=1,
            degree=2,
            precision=dtrans.Precision("fp16", loss_scaling=65536.0),
        )
    dtrans.sharding(
        main, startup, stage=1, degree=2, precision=dtrans.Precision("fp16", loss_scaling=32768.0)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, r"precision must be 'fp16', 'bf16' or None, it is 'fp8'"),
        ({"precision": "bf16", "compress": "bf16"}, r"precision='bf16' and compress='bf16'"),
        (
            {"loss_scaling": 8.0},
            r"loss_scaling=.* needs products in 16 bits, but dtype is None; pass 'fp16' or 'bf16'",
        ),
        (
            {"precision": "fp16", "loss_scaling": 0.0},
            r"initial must be a number from 1 to 3.4e38, it is 0.0",
        ),
        (
            {"precision": "fp16", "loss_scaling": 0.5},
            r"initial must be a number from 1 to 3.4e38, it is 0.5",
        ),
        (
            {"precision": "fp16", "loss_scaling": float("inf")},
            r"initial must be a number from 1 to 3.4e38, it is inf",
        ),
        (
            {"precision": "fp16", "loss_scaling": float("nan")},
            r"initial must be a number from 1 to 3.4e38, it is nan",
        ),
        (
            {"precision": "fp16", "loss_scaling": 1e39},
            r"initial must be a number from 1 to 3.4e38, it is 1e\+39",
        ),
        (
            {"precision": "fp16", "loss_scaling": True},
            r"must be a number, a LossScaling or None; it is True",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of("mlp", **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial": 0.25}, r"initial must be a number from 1 to 3.4e38, it is 0.25"),
        ({"factor": float("inf")}, r"factor must be a finite number above 1, it is inf"),
        ({"factor": 1.0}, r"factor must be a finite number above 1, it is 1.0"),
        ({"interval": 0}, r"interval must be a positive number of steps, it is 0"),
        ({"interval": 2.5}, r"interval must be a positive number of steps, it is 2.5"),
    ],
)
def test_a_scaling_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dtrans.LossScaling(**fields)
