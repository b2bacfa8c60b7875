"""Data-parallel trainers compute the results of one device, reduce no unnecessary byte, and refuse
impossible steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    distance,
    init_of,
    mlp_batch,
    mlp_forward,
    mlp_loss,
    mlp_params,
    plain_step,
    tree_close,
)
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P

import dtrans
from dtrans.errors import BatchError, ConfigError, GradientError, StateError, TraceError
from dtrans.ops import all_reduce_p


F64 = jnp.float64
JOBS = ("simulate", "mesh")
MAPS = ("vmap", "pmap", "shard_map")


# -- how a plan is run -----------------------------------------------------------------------------


def plan_of_step(
    step: Any, init: Any, params: Any, *batch: Any, trainers: int = 2, **options: Any
) -> Any:
    main = dtrans.trace(step, *jax.eval_shape(init, params), *batch)
    return flat_options.nccl2(main, dtrans.trace(init, params), trainers=trainers, **options)


def plan_of(
    loss: Any,
    tx: Any,
    params: Any,
    *batch: Any,
    trainers: int = 2,
    has_aux: bool = False,
    **options: Any,
) -> Any:
    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    return plan_of_step(step, init_of(tx), params, *batch, trainers=trainers, **options)


def mapped(plan: Any, way: str) -> Callable[..., Any]:
    """Return `plan.function` over the global batch, under one of JAX's maps."""
    n, out = plan.trainers, plan.program.out
    ways = [plan.merges.get(name, "same") for name in out.names]
    own = [w in ("concat", "each") for w in ways]

    def run(params: Any, opt_state: Any, *batch: Any) -> Any:
        if n == 1:  # nothing is reduced, so the function needs no map
            return jax.jit(plan.function)(params, opt_state, *batch)
        is_split = lambda x: bool(x.ndim)
        one = lambda *args: out.flatten(plan.function(*args))
        if way == "shard_map":
            specs = jax.tree.map(lambda x: P("trainers") if is_split(x) else P(), batch)
            stacked = lambda *args: [
                x[None] if w == "each" else x for x, w in zip(one(*args), ways, strict=True)
            ]
            mesh = Mesh(np.array(jax.devices()[:n]), ("trainers",))
            outs = [P("trainers") if o else P() for o in own]
            fn = jax.shard_map(
                stacked, mesh=mesh, in_specs=(P(), P(), *specs), out_specs=outs, check_vma=False
            )
            return out.unflatten(jax.jit(fn)(params, opt_state, *batch))
        parts = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]) if is_split(x) else x, batch)
        axes = (None, None, *jax.tree.map(lambda x: 0 if is_split(x) else None, batch))
        outs = [0 if o else None for o in own]
        over = {"vmap": jax.vmap, "pmap": jax.pmap}[way]
        made = over(one, in_axes=axes, out_axes=outs, axis_name="trainers", axis_size=n)(
            params, opt_state, *parts
        )
        return out.unflatten(
            [
                x.reshape(-1, *x.shape[2:]) if w == "concat" else x
                for x, w in zip(made, ways, strict=True)
            ]
        )

    return run


def train(plan: Any, way: str, params: Any, batches: Any) -> tuple[Any, Any, list[Any]]:
    """Return the parameters, the optimizer state, and the results of each step."""
    results = []
    if way in MAPS:
        run, (params, opt_state) = mapped(plan, way), plan.startup(params)
        for batch in batches:
            params, opt_state, *rest = run(params, opt_state, *batch)
            results.append(rest)
        return params, opt_state, results
    job = plan.simulate() if way == "simulate" else plan.on_mesh()
    state = job.init(params)
    for batch in batches:
        state, *rest = job.step(state, *batch)
        results.append(rest)
    return job.params(state), job.opt_state(state), results


def alone(step: Any, init: Any, params: Any, batches: Any) -> tuple[Any, Any, list[Any]]:
    """Return the values that `train` returns, computed on one device."""
    (params, opt_state), results = init(params), []
    for batch in batches:
        params, opt_state, *rest = jax.jit(step)(params, opt_state, *batch)
        results.append(rest)
    return params, opt_state, results


def same_as_one_device(
    loss: Any,
    tx: Any,
    params: Any,
    batches: Any,
    *,
    way: str,
    rtol: float = 1e-12,
    has_aux: bool = False,
    **options: Any,
) -> Any:
    """Train with the plan and on one device, and compare parameters, optimizer state and all
    results.

    Return the plan and the job's values.
    """
    step, init = dtrans.make_train_step(loss, tx, has_aux=has_aux), init_of(tx)
    return same_step(step, init, params, batches, way=way, rtol=rtol, **options)


def same_step(
    step: Any,
    init: Any,
    params: Any,
    batches: Any,
    *,
    way: str,
    rtol: float = 1e-12,
    **options: Any,
) -> Any:
    plan = plan_of_step(step, init, params, *batches[0], **options)
    got, want = train(plan, way, params, batches), alone(step, init, params, batches)
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(want[0]), jax.tree.leaves(params), strict=True)
    ), "the model must learn something"
    tree_close(got, want, rtol)
    return plan, got


def batches_of(
    rows: int = 8, steps: int = 2, dtype: Any = F64, **kw: Any
) -> list[tuple[jax.Array, jax.Array]]:
    return [mlp_batch(rows, dtype=dtype, seed=s, **kw) for s in range(steps)]


def square(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] - y) ** 2)


def square_case(rows: int = 8) -> tuple[dict[str, jax.Array], list[tuple[jax.Array, jax.Array]]]:
    """Return the parameters of `square`, and batches, in float64."""
    return {"w": mlp_params((5, 3), F64)["w1"]}, batches_of(rows, sizes=(5, 3))


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*JOBS, *MAPS])
@pytest.mark.parametrize("trainers", [1, 2, 4, 8])
def test_trainers_equal_one_device_on_the_global_batch(trainers: int, way: str) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    same_as_one_device(
        mlp_loss, tx, mlp_params(dtype=F64), batches_of(), way=way, trainers=trainers
    )


@pytest.mark.parametrize("trainers, way", [(2, "simulate"), (4, "mesh")])
def test_float32_equals_one_device_to_its_precision(trainers: int, way: str) -> None:
    batches = batches_of(dtype=jnp.float32)
    same_as_one_device(
        mlp_loss, optax.adam(1e-2), mlp_params(), batches, way=way, trainers=trainers, rtol=1e-6
    )


class Net(NamedTuple):
    deep: dict[str, Any]
    scale: jax.Array
    empty: tuple[()]


def nested(params: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params.deep["a"][0]) * params.scale
    return jnp.mean((h @ params.deep["a"][1] - y) ** 2)


def tied(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["e"]) @ params["e"].T - x) ** 2) + 0 * jnp.sum(y)


def model_cases() -> dict[str, tuple[Any, Any, Any]]:
    """Return (loss, optimizer, parameters) of each case. Call the function where float64 is
    enabled."""
    w = mlp_params(dtype=F64)
    frozen = optax.chain(
        optax.sgd(0.1), optax.masked(optax.set_to_zero(), {n: n == "w1" for n in w})
    )
    return {
        "tied": (tied, optax.adam(1e-2), {"e": w["w1"]}),
        "frozen": (mlp_loss, frozen, w),
        "masked": (mlp_loss, optax.masked(optax.adam(0.1), {n: n != "b1" for n in w}), w),
        "nested-0d": (nested, optax.adam(1e-2), Net({"a": [w["w1"], w["w2"]]}, F64(0.7), ())),
        "unused-leaf": (mlp_loss, optax.adamw(0.1), w | {"b9": jnp.ones(3), "w9": jnp.ones(())}),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trainers, way", [(4, "simulate"), (2, "mesh")])
@pytest.mark.parametrize("model", ["tied", "frozen", "masked", "nested-0d", "unused-leaf"])
def test_every_model_equals_one_device(model: str, trainers: int, way: str) -> None:
    loss, tx, params = model_cases()[model]
    if model == "unused-leaf":
        loss = lambda params, x, y: mlp_loss(
            {n: v for n, v in params.items() if not n.endswith("9")}, x, y
        )
    same_as_one_device(loss, tx, params, batches_of(), way=way, trainers=trainers)


@pytest.mark.parametrize("way", JOBS)
def test_bfloat16_leaves_equal_one_device_to_their_precision(way: str) -> None:
    """bfloat16 has 8 bits, so each of a few roundings is at most 2^-8 of the value."""
    params = mlp_params(dtype=jnp.bfloat16)
    batches = batches_of(dtype=jnp.bfloat16)
    same_as_one_device(mlp_loss, optax.sgd(0.1), params, batches, way=way, trainers=4, rtol=2**-6)


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("trainers", [2, 4])
def test_a_step_without_marks_equals_one_device(trainers: int, way: str) -> None:
    tx = optax.adam(1e-2)
    params = mlp_params(dtype=F64)
    same_step(
        plain_step(mlp_loss, tx), init_of(tx), params, batches_of(), way=way, trainers=trainers
    )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "clip_by_block_rms": lambda: optax.chain(
        optax.clip_by_block_rms(0.01), optax.sgd(0.1, momentum=0.9)
    ),
    "lamb": lambda: optax.lamb(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0.01, 3)
    ),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "state-that-equals-the-update": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.0)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "trainers, way", [(4, "simulate"), pytest.param(2, "mesh", marks=pytest.mark.rotated)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_one_device(name: str, trainers: int, way: str) -> None:
    tx = OPTIMIZERS[name]()
    same_as_one_device(
        mlp_loss, tx, mlp_params(dtype=F64), batches_of(steps=3), way=way, trainers=trainers
    )


@pytest.mark.parametrize("way", JOBS)
def test_one_trainer_with_an_infinite_gradient_stops_the_update_of_all(way: str) -> None:
    params, batches = square_case()
    bad = (batches[0][0].at[0, 0].set(jnp.inf), batches[0][1])
    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    plan = plan_of(square, tx, params, *batches[0], trainers=4)
    got_params, got_state, _ = train(plan, way, params, [bad])
    assert np.array_equal(got_params["w"], params["w"])
    assert int(got_state.total_notfinite) == 1
    assert not bool(got_state.last_finite)


@jax.custom_vjp
def clipped_backward(w: jax.Array) -> jax.Array:
    """Return the argument; its gradient is clipped to norm 1."""
    return w


clipped_backward.defvjp(
    lambda w: (w, None), lambda _, g: (g / jnp.maximum(1.0, jnp.linalg.norm(g)),)
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*JOBS, *MAPS])
def test_a_clip_in_the_optimizer_is_of_the_mean_and_a_clip_in_the_loss_of_each_trainer(
    way: str,
) -> None:
    """The gradients are (3, 0) and (0, 4). Their mean (1.5, 2), clipped to 1, is (0.6, 0.8).

    If each gradient is clipped first, they are (1, 0) and (0, 1), and the mean is (0.5, 0.5).
    """
    gradients = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    params = {"w": jnp.zeros(2)}
    after = plan_of(
        lambda params, g: jnp.mean(g @ params["w"]),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
        params,
        gradients,
    )
    before = plan_of(
        lambda params, g: jnp.mean(g @ clipped_backward(params["w"])),
        optax.sgd(1.0),
        params,
        gradients,
        kind="local",
    )
    got_after, _, _ = train(after, way, params, [(gradients,)])
    got_before, _, _ = train(before, way, params, [(gradients,)])
    assert distance(got_after["w"], jnp.array([-0.6, -0.8])) < 1e-15
    assert distance(got_before["w"], jnp.array([-0.5, -0.5])) < 1e-15


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("trainers", [2, 4])
def test_a_loss_that_is_a_sum_over_the_batch_is_summed(trainers: int, way: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        error = (x @ params["w"] - y) ** 2
        return jnp.sum(error), {"worst": jnp.max(error), "rows": error.sum(1)}

    params, batches = square_case()
    plan, _ = same_as_one_device(
        loss, optax.sgd(0.01), params, batches, way=way, trainers=trainers, has_aux=True,
        reduce="sum",
        merge={"aux/worst": "max"},
    )  # fmt: skip
    assert plan.merges == {"loss": "sum", "aux/rows": "concat", "aux/worst": "max"}


def masked_mean(params: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
    """Return the mean over the rows that the mask counts, and the number of these rows."""
    errors = ((x @ params["w"] - y) ** 2).sum(1)
    return jnp.sum(errors * mask) / jnp.sum(mask), {"count": jnp.sum(mask)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*JOBS, *MAPS])
def test_parts_of_unequal_weight_give_the_exact_mean_and_not_the_mean_of_means(way: str) -> None:
    params, ((x, y), _) = square_case()
    # 2, 1, 1 and 1 rows on four trainers
    mask = jnp.array([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    batches = [(x, y, mask)] * 2
    plan, _ = same_as_one_device(
        masked_mean,
        optax.sgd(0.1),
        params,
        batches,
        way=way,
        trainers=4,
        has_aux=True,
        example_count="aux/count",
    )
    assert plan.merges == {"loss": "mean", "aux/count": "sum"}
    options = {"trainers": 4, "has_aux": True}
    # without the option
    same_as_one_device(masked_mean, optax.sgd(0.1), params, batches, way=way, **options)
    unweighted = plan_of(masked_mean, optax.sgd(0.1), params, *batches[0], kind="local", **options)
    means, _, _ = train(unweighted, way, params, batches)
    exact, _, _ = train(plan, way, params, batches)
    assert distance(means["w"], exact["w"]) > 1e-3


@pytest.mark.parametrize("way", JOBS)
def test_a_count_of_integers_weights_too(way: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
        value, aux = masked_mean(params, x, y, mask)
        return value, {"count": jnp.sum(mask, dtype=jnp.int32), "half": value / 2} | {
            "float": aux["count"]
        }

    params, ((x, y), _) = square_case()
    mask = jnp.array([True, True, True, False])
    batches = [(x[:4], y[:4], mask)]
    same_as_one_device(
        loss,
        optax.sgd(0.1),
        params,
        batches,
        way=way,
        has_aux=True,
        example_count="aux/count",
        merge={"aux/float": "sum"},
    )


# -- what trainers make beside gradients -----------------------------------------------------------


def statistics_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
    value, g = dtrans.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params["w"])
    stats = 0.5 * params["mean"] + 0.5 * x.mean(0)
    return {"mean": stats, "w": params["w"] - 0.1 * g}, opt_state, value


@pytest.mark.parametrize("way", [*JOBS, *MAPS])
@pytest.mark.parametrize("trainers", [2, 4])
def test_batch_statistics_are_the_mean_of_all_trainers(trainers: int, way: str) -> None:
    params, batches = square_case()
    params["mean"] = jnp.ones(5)
    plan, _ = same_step(
        statistics_step, lambda p: (p, ()), params, batches, way=way, trainers=trainers
    )
    assert plan.merges == {"loss": "sum", "params/mean": "same"}
    plan, _ = same_step(
        statistics_step,
        lambda p: (p, ()),
        params,
        batches,
        way=way,
        trainers=trainers,
        kind="local",
    )
    assert plan.merges == {"loss": "mean", "params/mean": "mean"}


@pytest.mark.parametrize("way", JOBS)
def test_batch_statistics_are_means_where_gradients_are_summed(way: str) -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda w: jnp.sum((x @ w - y) ** 2))(params["w"])
        return {"mean": x.mean(0), "w": params["w"] - 0.01 * g}, opt_state, value

    params, batches = square_case()
    same_step(
        step,
        lambda p: (p, ()),
        params | {"mean": jnp.ones(5)},
        batches,
        way=way,
        trainers=4,
        reduce="sum",
    )


def test_batch_statistics_can_be_merged_in_another_way() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        new, opt_state, value = statistics_step(params, opt_state, x, y)
        return new | {"mean": jnp.maximum(params["mean"], x.max(0))}, opt_state, value

    params, batches = square_case()
    params["mean"] = jnp.zeros(5)
    merge = {"params/mean": "max"}
    same_step(step, lambda p: (p, ()), params, batches, way="mesh", trainers=4, merge=merge)


def dropout(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    return square(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*JOBS, *MAPS])
@pytest.mark.parametrize("trainers", [1, 2, 4])
def test_a_key_of_the_batch_is_each_trainers_own(trainers: int, way: str) -> None:
    """Fold the key with the trainer's index by hand. A single trainer uses the key unchanged."""
    params, ((x, y), _) = square_case()
    key = jax.random.key(7)
    plan = plan_of(dropout, optax.sgd(0.1), params, x, y, key, trainers=trainers, kind="local")
    got, _, ((loss,),) = train(plan, way, params, [(x, y, key)])
    again, _, _ = train(plan, way, params, [(x, y, key)])
    n = 8 // trainers
    parts = [
        jax.value_and_grad(dropout)(
            params,
            x[k * n :][:n],
            y[k * n :][:n],
            key if trainers == 1 else jax.random.fold_in(key, k),
        )
        for k in range(trainers)
    ]
    want = params["w"] - 0.1 * sum(g["w"] for _, g in parts) / trainers
    assert distance(got["w"], want) < 1e-12
    assert distance(loss, sum(v for v, _ in parts) / trainers) < 1e-12
    assert np.array_equal(got["w"], again["w"])


@pytest.mark.parametrize("way", JOBS)
def test_a_replicated_key_is_the_same_on_all_trainers(way: str) -> None:
    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] + jax.random.normal(key)) ** 2)

    params, ((x, _), _) = square_case()
    batch = (x, jax.random.key(1))
    same_as_one_device(
        loss, optax.sgd(0.1), params, [batch], way=way, trainers=4, unsplit_inputs=("key",)
    )


@pytest.mark.parametrize("way", JOBS)
def test_arrays_that_every_trainer_gets_whole(way: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array, scales: Any, cold: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] * scales["out"] - y) ** 2) * cold

    params, ((x, y), _) = square_case()
    batch = (x, y, {"out": jnp.arange(1.0, 4.0)}, F64(0.5))
    same_as_one_device(
        loss, optax.sgd(0.1), params, [batch], way=way, trainers=4, unsplit_inputs=("scales",)
    )


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*JOBS, *MAPS])
def test_results_are_averaged_joined_or_stacked_by_what_they_are(way: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return mlp_loss(params, x, y), Aux(
            {"mean": jnp.mean(x), "rows": mlp_forward(params, x), "sign": x > 0},
            jnp.sum(x[:, 0] > 0, dtype=jnp.int32),
            params["b1"],
            jnp.arange(3.0),
            None,
        )

    class Aux(NamedTuple):
        of_batch: dict[str, jax.Array]
        wrong: jax.Array
        leaf: jax.Array
        constant: jax.Array
        nothing: None

    params, batches = mlp_params(dtype=F64), batches_of()
    plan = plan_of(
        loss, optax.sgd(0.1), params, *batches[0], trainers=4, has_aux=True, kind="local"
    )
    assert plan.merges == {
        "loss": "mean",
        "aux/of_batch/mean": "mean",
        "aux/of_batch/rows": "concat",
        "aux/of_batch/sign": "concat",
        "aux/wrong": "each",
        "aux/leaf": "same",
        "aux/constant": "same",
    }
    _, _, got = train(plan, way, params, batches)
    _, _, want = alone(
        dtrans.make_train_step(loss, optax.sgd(0.1), has_aux=True),
        init_of(optax.sgd(0.1)),
        params,
        batches,
    )
    for (value, aux), (want_value, want_aux), (x, _) in zip(got, want, batches, strict=True):
        assert aux.wrong.tolist() == (np.asarray(x)[:, 0] > 0).reshape(4, 2).sum(1).tolist()
        tree_close(
            (value, aux._replace(wrong=None)), (want_value, want_aux._replace(wrong=None)), 1e-12
        )


@pytest.mark.parametrize("way", JOBS)
def test_results_are_merged_as_it_is_said(way: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        rows = jnp.sum(x[:, 0] > 0, dtype=jnp.int32)
        aux = {
            "sum": rows,
            "max": rows,
            "each": jnp.mean(x),
            "same": jnp.mean(y) * 0,
            "any": jnp.any(x > 0),
        }
        return square(params, x, y), aux

    params, (batch, _) = square_case()
    merge = {f"aux/{n}": n for n in ("sum", "max", "each", "same")} | {"aux/any": "max"}
    plan = plan_of(loss, optax.sgd(0.1), params, *batch, trainers=4, has_aux=True, merge=merge)
    _, _, ((_, aux),) = train(plan, way, params, [batch])
    counts = (np.asarray(batch[0])[:, 0] > 0).reshape(4, 2).sum(1)
    assert 0 < counts.max() < counts.sum()
    assert (int(aux["sum"]), int(aux["max"])) == (counts.sum(), counts.max())
    assert aux["sum"].dtype == jnp.int32
    assert distance(aux["each"], jnp.asarray(np.asarray(batch[0]).reshape(4, -1).mean(1))) < 1e-12
    assert aux["same"] == 0.0
    assert aux["any"].dtype == bool and bool(aux["any"])


@pytest.mark.parametrize("trainers", [1, 4])
def test_each_is_one_row_per_trainer_also_for_one(trainers: int) -> None:
    params, (batch, _) = square_case()
    plan = plan_of(
        square, optax.sgd(0.1), params, *batch, trainers=trainers, merge={"loss": "each"}
    )
    for way in JOBS:
        _, _, ((loss,),) = train(plan, way, params, [batch])
        assert loss.shape == (trainers,)


@pytest.mark.parametrize("way", JOBS)
def test_a_count_of_rows_that_is_known_when_traced_is_that_of_the_global_batch(way: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return square(params, x, y), {"rows": x.shape[0], "columns": x.shape[1]}

    params, batches = square_case()
    same_as_one_device(loss, optax.sgd(0.1), params, batches, way=way, trainers=4, has_aux=True)


def with_norms(total: Any, tx: Any) -> Any:
    """Return a step whose results are norms of gradients, updates and new parameters, and the
    number of positive gradients."""

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = dtrans.value_and_grad(total)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        positive = sum(jnp.sum(g > 0) for g in jax.tree.leaves(grads))
        norms = {
            "grads": optax.tree.norm(grads),
            "updates": optax.tree.norm(updates),
            "new": optax.tree.norm(new),
        }
        return (
            new,
            opt_state,
            value,
            {**norms, "positive": positive, "ratio": value / optax.tree.norm(grads)},
        )

    return step


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_results_that_are_computed_from_gradients_are_of_the_reduced_gradient(
    reduce: str, way: str
) -> None:
    of = {"mean": jnp.mean, "sum": jnp.sum}[reduce]
    total = lambda params, x, y: of((mlp_forward(params, x) - y) ** 2)
    tx = optax.sgd(0.01)
    step = with_norms(total, tx)
    params, batches = mlp_params(dtype=F64), batches_of()
    plan = plan_of_step(
        step,
        init_of(tx),
        params,
        *batches[0],
        trainers=4,
        reduce=reduce,
        merge={"aux/ratio": "each"},
    )
    got, want = train(plan, way, params, batches), alone(step, init_of(tx), params, batches)
    for (value, aux), (want_value, want_aux) in zip(got[2], want[2], strict=True):
        assert aux.pop("ratio").shape == (4,)  # of each trainer's loss
        want_aux.pop("ratio")
        tree_close((value, aux), (want_value, want_aux), 1e-12)
    assert {
        n: w for n, w in plan.merges.items() if n not in ("loss", "aux/ratio")
    } == dict.fromkeys(("aux/grads", "aux/new", "aux/positive", "aux/updates"), "same")


def test_a_norm_that_reads_an_unknown_gradient_is_the_norm_of_one_device() -> None:
    params, batches = mlp_params(dtype=F64), batches_of()

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        new = {n: p if n == "w1" else p - 0.1 * grads[n] for n, p in params.items()}
        return new, opt_state, value, optax.tree.norm(grads)

    plan, _ = same_step(step, lambda p: (p, ()), params, batches, way="simulate", trainers=4)
    reason = "no gradients are reduced: aux: computed from gradients and from another derivative"
    assert plan.notes[0].startswith(reason)


@pytest.mark.parametrize("way", JOBS)
def test_the_gradient_of_a_frozen_leaf_that_a_result_reads_is_reduced_too(way: str) -> None:
    params, batches = mlp_params(dtype=F64), batches_of()

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = dtrans.value_and_grad(mlp_loss)(params, x, y)
        new = {n: p if n == "w1" else p - 0.1 * grads[n] for n, p in params.items()}
        return new, opt_state, value, optax.tree.norm(grads)

    plan, _ = same_step(step, lambda p: (p, ()), params, batches, way=way, trainers=4)
    assert "params/w1" in {n for b in plan.buckets for n in b.leaves}


def test_a_step_that_returns_a_dict_returns_the_rest_of_it() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(square)(params, x, y)
        return {"params": {"w": params["w"] - 0.1 * g["w"]}, "opt_state": opt_state, "mse": value}

    params, (batch, _) = square_case()
    plan = plan_of_step(step, lambda p: (p, {"count": jnp.zeros(())}), params, *batch)
    _, _, ((rest,),) = train(plan, "mesh", params, [batch])
    assert list(rest) == ["mse"]
    assert distance(rest["mse"], square(params, *batch)) < 1e-12


# -- compression -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize(
    "to, unit, scale", [("bf16", 2**-8, 1.0), ("fp16", 2**-11, 1.0), ("fp16", 2**-11, 1024.0)]
)
@pytest.mark.parametrize("trainers", [2, 8])
def test_compressed_gradients_are_as_far_off_as_their_type_says(
    trainers: int, to: str, unit: float, scale: float, way: str
) -> None:
    """Each of n gradients is rounded once, and their sum n - 1 times, each time by at most `unit`
    times the summands.

    So the error of the mean is at most n * unit * (mean of |g|), plus terms of unit^2. Numbers
    below the smallest number of fp16 add to it.
    """
    params, ((x, y), _) = square_case()
    plan = plan_of(
        square, optax.sgd(1.0), params, x, y, trainers=trainers, compress=to, compress_scale=scale
    )
    got, _, _ = train(plan, way, params, [(x, y)])
    parts = zip(np.split(np.asarray(x), trainers), np.split(np.asarray(y), trainers), strict=True)
    grads = np.stack([np.asarray(jax.grad(square)(params, a, b)["w"]) for a, b in parts])
    error = np.abs(np.asarray(params["w"] - got["w"]) - grads.mean(0))
    assert np.all(
        error
        <= 1.05 * trainers * unit * np.abs(grads).mean(0) + (2**-24 / scale if to == "fp16" else 0)
    )
    assert error.max() > unit / 100 * np.abs(grads).mean(), "nothing was rounded"
    assert plan.bytes_per_step == {
        {"bf16": "bfloat16", "fp16": "float16"}[to]: 2 * 15,
        "float64": 8,
    }


@pytest.mark.parametrize("way", JOBS)
def test_small_gradients_survive_fp16_by_their_scale(way: str) -> None:
    loss = lambda params, x: jnp.mean(x) * params["w"]
    params, batch = {"w": F64(0.0)}, (jnp.full(4, 2.0**-30),)
    for scale, want in ((1.0, 0.0), (2.0**20, -(2.0**-30))):
        plan = plan_of(loss, optax.sgd(1.0), params, *batch, compress="fp16", compress_scale=scale)
        got, _, _ = train(plan, way, params, [batch])
        assert float(got["w"]) == want


@pytest.mark.parametrize("way", JOBS)
def test_a_sum_that_overflows_in_fp16_arrives_as_infinity(way: str) -> None:
    loss = lambda params, x: jnp.mean(x) * params["w"]
    params, batch = {"w": F64(0.0)}, (jnp.full(4, 60000.0),)
    plan = plan_of(loss, optax.sgd(1.0), params, *batch, compress="fp16", kind="local")
    got, _, _ = train(plan, way, params, [batch])
    assert float(got["w"]) == -np.inf


@pytest.mark.parametrize("way", JOBS)
def test_large_weights_do_not_overflow_compressed_gradients(way: str) -> None:
    """The product of a gradient of 1 and 100,000 examples overflows fp16.

    So the product must not come before the reduction.
    """
    loss = lambda params, x: (jnp.mean(x) * params["w"], jnp.sum(x) * 100_000)
    params, batch = {"w": F64(0.0)}, (jnp.ones(4),)
    plan = plan_of(
        loss, optax.sgd(1.0), params, *batch, has_aux=True, example_count="aux", compress="fp16"
    )
    got, _, _ = train(plan, way, params, [batch])
    assert float(got["w"]) == -1.0


# -- bytes and places ------------------------------------------------------------------------------


def reductions(plan: Any) -> list[Any]:
    return [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive is all_reduce_p]


def mixed_case() -> tuple[Any, dict[str, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a loss whose parameters have three types, and a batch."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.tanh(x.astype(jnp.bfloat16) @ params["low"]).astype(jnp.float32)
        h = jnp.tanh(h @ params["mid"]["w"] + params["mid"]["b"]).astype(F64)
        return jnp.mean((h @ params["high"] * params["scale"] - y) ** 2)

    w = mlp_params((5, 6, 6, 3), F64)
    params = {
        "low": w["w1"].astype(jnp.bfloat16),
        "mid": {"w": w["w2"].astype(jnp.float32), "b": w["b2"].astype(jnp.float32)},
        "high": w["w3"],
        "scale": F64(0.5),
    }
    return loss, params, mlp_batch(8, dtype=F64)


@pytest.mark.parametrize("size", [0, 32])
def test_reductions_carry_the_bytes_of_the_gradients_and_of_the_loss(size: float) -> None:
    loss, params, batch = mixed_case()
    plan = plan_of(loss, optax.adam(0.1), params, *batch, bucket_MB=size)
    assert plan.bytes_per_step == {
        "bfloat16": 2 * 30,
        "float32": 4 * (36 + 6),
        "float64": 8 * (18 + 1) + 8,
    }
    found: dict[str, int] = {}
    for eqn in reductions(plan):
        for a in eqn.invars:
            found[str(a.aval.dtype)] = (
                found.get(str(a.aval.dtype), 0) + a.aval.size * a.aval.dtype.itemsize
            )
    assert found == plan.bytes_per_step
    assert sum(b.nbytes for b in plan.buckets) == sum(found.values()) - 8
    assert all(len({a.aval.dtype for a in e.invars}) == 1 for e in reductions(plan)), (
        "dtypes are never mixed"
    )
    assert len(plan.buckets) == {0: 5, 32: 3}[size]


def test_a_weight_adds_its_own_bytes_and_nothing_else() -> None:
    params, ((x, y), _) = square_case()
    plan = plan_of(
        masked_mean,
        optax.sgd(0.1),
        params,
        x,
        y,
        jnp.ones(8),
        has_aux=True,
        example_count="aux/count",
        trainers=4,
    )
    assert plan.bytes_per_step == {"float64": 8 * 15 + 8 + 8}


def test_one_trainer_reduces_nothing() -> None:
    params, (batch, _) = square_case()
    plan = plan_of(square, optax.sgd(0.1), params, *batch, trainers=1)
    assert plan.bytes_per_step == {}
    assert reductions(plan) == []


def rows_case(
    count: int, shape: tuple[int, ...] = (128,)
) -> tuple[Any, dict[str, jax.Array], jax.Array]:
    """Return a chain of `count` layers, with parameters of 1 kB each by default."""
    params = {f"w{i}": jnp.full(shape, 1.0 + i, F64) for i in range(count)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i in range(count):
            x = jnp.tanh(x * params[f"w{i}"].reshape(-1)[:128])
        return jnp.mean(x)

    return loss, params, jnp.ones((4, 128))


@pytest.mark.parametrize(
    "kilobytes, want",
    [
        (0, [["w4"], ["w3"], ["w2"], ["w1"], ["w0"]]),
        (1, [["w4"], ["w3"], ["w2"], ["w1"], ["w0"]]),
        (2, [["w4", "w3"], ["w2", "w1"], ["w0"]]),
        (3.5, [["w4", "w3", "w2"], ["w1", "w0"]]),
        (100, [["w4", "w3", "w2", "w1", "w0"]]),
    ],
)
def test_buckets_are_filled_in_the_order_of_the_backward_pass_up_to_their_size(
    kilobytes: float, want: Any
) -> None:
    loss, params, x = rows_case(5)
    plan = plan_of(loss, optax.sgd(0.1), params, x, bucket_MB=kilobytes / 1024)
    assert [[n.removeprefix("params/") for n in b.leaves] for b in plan.buckets] == want
    assert [b.nbytes for b in plan.buckets] == [1024 * len(names) for names in want]
    assert [e.params["name"] for e in reductions(plan)] == [
        *(b.name for b in plan.buckets),
        "results/sum",
    ]


def test_a_leaf_larger_than_a_bucket_is_reduced_by_itself() -> None:
    loss, params, x = rows_case(3)
    params["w1"] = jnp.ones((4, 128))
    plan = plan_of(loss, optax.sgd(0.1), params, x, bucket_MB=2 / 1024)
    assert [b.leaves for b in plan.buckets] == [("params/w2",), ("params/w1",), ("params/w0",)]


@pytest.mark.parametrize("kilobytes", [0, 2, 100])
def test_each_reduction_stands_right_after_the_equation_that_makes_its_last_gradient(
    kilobytes: float,
) -> None:
    loss, params, x = rows_case(5)
    plan = plan_of(loss, optax.adam(0.1), params, x, bucket_MB=kilobytes / 1024)
    eqns, roles = plan.program.jaxpr.jaxpr.eqns, plan.program.roles
    places = [
        i
        for i, e in enumerate(eqns)
        if e.primitive is all_reduce_p and e.params["name"] != "results/sum"
    ]
    assert len(places) == len(plan.buckets)
    for i, bucket in zip(places, plan.buckets, strict=True):
        assert eqns[i].invars[-1] in eqns[i - 1].outvars
        assert roles[i - 1] == "backward"
        assert len(eqns[i].invars) == len(bucket.leaves)
    assert "optimize" not in roles[: places[-1]]


def lowered(plan: Any, params: Any, *batch: Any) -> str:
    """Return the StableHLO text of the step of a mesh job."""
    job = plan.on_mesh()
    state = job.init(params)
    text: str = job.lower(state, *batch).as_text()
    return text


@pytest.mark.parametrize("size", [0, 32])
def test_the_mesh_job_has_one_all_reduce_for_each_leaf_and_one_for_the_loss(size: float) -> None:
    loss, params, batch = mixed_case()
    plan = plan_of(loss, optax.sgd(0.1), params, *batch, trainers=4, bucket_MB=size)
    text = lowered(plan, params, *batch)
    types = re.findall(r"stablehlo\.all_reduce.*?\}\) : \(tensor<([^>]*)>\)", text, re.DOTALL)
    assert sorted(types) == sorted(["5x6xbf16", "6x6xf32", "6xf32", "6x3xf64", "f64", "f64"])
    # over all trainers; JAX writes groups as numbers of devices, and from 0.12 on as axes of a mesh
    numbers = r"dense<\[\[0, 1, 2, 3\]\]>"
    axes = r'#stablehlo\.replica_group_mesh_axes<[^,]*, axes = \[[^,]*"trainers">\]>'
    assert len(re.findall(f"replica_groups = (?:{numbers}|{axes})", text)) == 6
    assert not re.search(
        r"stablehlo\.(all_gather|all_to_all|collective_permute|reduce_scatter)", text
    )


# -- traps -----------------------------------------------------------------------------------------


def test_gradients_that_the_step_reduces_itself_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def part(params: Any, x: jax.Array, y: jax.Array) -> Any:
            value, g = jax.value_and_grad(square)(params, x, y)
            return jax.lax.pmean((value, g), "data")

        value, g = jax.shard_map(
            part, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()
        )(params, x, y)
        return {"w": params["w"] - 0.1 * g["w"]}, opt_state, value

    params, (batch, _) = square_case()
    with pytest.raises(
        GradientError, match=r"^step has a collective already \(shard_map\).*for one device"
    ):
        plan_of_step(step, lambda p: (p, ()), params, *batch)
    with pytest.raises(GradientError, match=r"^step has a collective already"):
        plan_of_step(jax.jit(step), lambda p: (p, ()), params, *batch)


def test_a_pmap_in_the_step_is_refused() -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        each = jax.pmap(lambda x, y: square(params, x, y))(x.reshape(2, -1, 5), y.reshape(2, -1, 3))
        return jnp.mean(each)

    params, (batch, _) = square_case()
    with pytest.raises(GradientError, match="has a collective already"):
        plan_of(loss, optax.sgd(0.1), params, *batch)


@pytest.mark.parametrize("way", JOBS)
def test_an_axis_of_the_steps_own_vmap_may_have_the_name_of_ours(way: str) -> None:
    """Tracing replaces the psum of the step's vmap with a sum over this trainer's examples."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        error = lambda x, y: jnp.sum((x @ params["w"] - y) ** 2)
        return jnp.mean(
            jax.vmap(lambda x, y: jax.lax.pmean(error(x, y), "trainers"), axis_name="trainers")(
                x, y
            )
        )

    params, batches = square_case()
    same_as_one_device(loss, optax.sgd(0.1), params, batches, way=way, trainers=4)


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("marked", [True, False])
def test_a_constant_of_an_inner_jit_is_no_way_around_the_reduction(marked: bool, way: str) -> None:
    table = jnp.arange(15.0).reshape(5, 3)

    @jax.jit
    def inner(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ (w * table)

    @jax.jit
    def apply(p: jax.Array, g: jax.Array) -> jax.Array:
        return p - 0.001 * table * g

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        grad = dtrans.value_and_grad if marked else jax.value_and_grad
        value, g = jax.jit(grad(lambda w: jnp.mean((inner(w, x) - y) ** 2)))(params["w"])
        return {"w": apply(params["w"], g)}, opt_state, value

    params, batches = square_case()
    plan, _ = same_step(step, lambda p: (p, ()), params, batches, way=way, trainers=4)
    assert plan.bytes_per_step == {"float64": 8 * 15 + 8}


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("size", [0, 32])
def test_a_gradient_that_two_leaves_share_is_reduced_once(
    size: float, marked: bool, way: str
) -> None:
    loss = lambda params, x, y: square({"w": params["a"] + params["b"]}, x, y)
    tx = optax.adam(0.1)
    step = dtrans.make_train_step(loss, tx) if marked else plain_step(loss, tx)
    params, batches = square_case()
    params = {"a": params["w"], "b": 2 * params["w"]}
    plan, _ = same_step(step, init_of(tx), params, batches, way=way, trainers=4, bucket_MB=size)
    assert plan.bytes_per_step == {"float64": 8 * 15 + 8}
    assert [b.nbytes for b in plan.buckets] == [8 * 15]


@pytest.mark.parametrize("way", JOBS)
def test_a_gradient_that_no_equation_makes(way: str) -> None:
    """The gradient is an input or a constant."""
    loss = lambda params, c: params["s"] * c + params["t"]
    params = {"s": F64(3.0), "t": F64(1.0), "u": F64(1.0)}
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    same_as_one_device(loss, tx, params, [(F64(2.0),), (F64(5.0),)], way=way, trainers=4)


def test_three_trainers_divide_bfloat16_gradients_by_three() -> None:
    """Division by three is not multiplication by 1/3, which differs by 2^-9 in bfloat16."""
    params, batch = {"w": jnp.bfloat16(0.0)}, (jnp.full(3, 3.0, jnp.bfloat16),)
    loss = lambda params, x: params["w"] * jnp.sum(x)
    plan = plan_of(loss, optax.sgd(1.0), params, *batch, trainers=3, kind="local")
    for way in JOBS:
        got, _, _ = train(plan, way, params, [batch])
        assert float(got["w"]) == -3.0


def test_init_may_return_one_array_twice_and_keeps_its_arguments() -> None:
    params, batches = square_case()
    init = lambda p: (p, {"first": p["w"]})

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(square)(params, x, y)
        return (
            {"w": params["w"] - 0.1 * (g["w"] + params["w"] - opt_state["first"])},
            opt_state,
            value,
        )

    same_step(step, init, params, batches, way="mesh")
    assert not params["w"].is_deleted()


# -- plan.function ---------------------------------------------------------------------------------


def test_the_function_of_a_plan_needs_a_shard_map_that_does_not_check_varying_types() -> None:
    params, (batch, _) = square_case()
    plan = plan_of(square, optax.sgd(0.1), params, *batch)
    mesh = Mesh(np.array(jax.devices()[:2]), ("trainers",))
    checked = jax.shard_map(
        plan.function,
        mesh=mesh,
        in_specs=(P(), P(), P("trainers"), P("trainers")),
        out_specs=P(),
        check_vma=True,
    )
    with pytest.raises(
        ConfigError, match=r"plan\.function: .*; write jax\.shard_map\(\.\.\., check_vma=False\)"
    ):
        jax.jit(checked)(params, plan.startup(params)[1], *batch)


def test_each_refusal_of_the_function_of_a_plan_is_an_error_of_its_own() -> None:
    params, (batch, _) = square_case()
    plan = plan_of(square, optax.sgd(0.1), params, *batch)
    mesh = Mesh(np.array(jax.devices()[:2]), ("trainers",))
    specs = (P(), P(), P("trainers"), P("trainers"))
    checked = jax.shard_map(plan.function, mesh=mesh, in_specs=specs, out_specs=P())
    raised = []
    for _ in range(2):
        with pytest.raises(ConfigError) as info:
            jax.jit(checked)(params, plan.startup(params)[1], *batch)
        raised.append(info.value)
    assert raised[0] is not raised[1], "one error would keep the frames of every call alive"


def test_the_function_of_a_plan_is_traced_again_for_another_batch_size() -> None:
    params, _ = square_case()
    same_as_one_device(
        square, optax.sgd(0.1), params,
        [b for n in (8, 4, 16) for b in batches_of(n, 1, sizes=(5, 3))], way="vmap",
        trainers=4,
    )  # fmt: skip


# -- batches and state -----------------------------------------------------------------------------


def jobs(**options: Any) -> tuple[Any, list[Any], Any]:
    params, (batch, _) = square_case()
    plan = plan_of(square, optax.adam(0.1), params, *batch, **options)
    return params, [plan.simulate(), plan.on_mesh()], batch


def test_another_batch_size_is_compiled_once() -> None:
    params, pair, _ = jobs()
    for job in pair:
        state = job.init(params)
        for rows in (8, 2, 8, 2):
            state, _ = job.step(state, *batches_of(rows, 1, sizes=(5, 3))[0])
        assert job._jitted._cache_size() == 2


def test_a_batch_that_the_trainers_do_not_divide_is_refused_by_its_name() -> None:
    params, pair, (x, y) = jobs(trainers=4, kind="local")
    for job in pair:
        state = job.init(params)
        with pytest.raises(
            BatchError,
            match="^x has 6 rows, which cannot be split evenly over 4 trainers; pass a multiple of "
            "4",
        ):
            job.step(state, x[:6], y[:6])
        with pytest.raises(
            BatchError,
            match=r"x has 8 and y has 4 rows; name arrays .* in "
            r"dtrans\.nccl2\(batch=dtrans\.Batch\(unsplit_inputs=",
        ):
            job.step(state, x, y[:4])
        with pytest.raises(
            BatchError, match="^the step takes 2 batch arguments, 1 were given; pass"
        ):
            job.step(state, x)
        with pytest.raises(
            TraceError,
            match="^batch argument 1 does not have the structure with which it was traced",
        ):
            job.step(state, x, {"y": y})
        job.step(state, x, y)


def test_a_state_that_was_stepped_from_is_refused_and_says_why() -> None:
    params, (_, job), batch = jobs()
    first = job.init(params)
    second, _ = job.step(first, *batch)
    with pytest.raises(
        StateError, match=r"^a step has already used this state, and its params/w was donated"
    ):
        job.step(first, *batch)
    job.step(second, *batch)
    with pytest.raises(
        StateError, match="^step takes the state that init or step returned, not dict$"
    ):
        job.step(params, *batch)


def test_one_array_under_two_names_is_refused_where_it_would_be_donated() -> None:
    params, (simulated, job), batch = jobs()
    for donates in (job, job.plan.on_mesh(donate=False), simulated):
        state = donates.init(params)
        twice = type(state)(
            state.params,
            state.opt_state | {"opt_state/0/mu/w": state.opt_state["opt_state/0/nu/w"]},
        )
        if donates is job:
            with pytest.raises(
                StateError,
                match="^opt_state/0/nu/w and opt_state/0/mu/w are one array|^opt_state/0/mu/w",
            ):
                donates.step(twice, *batch)
        donates.step(state if donates is job else twice, *batch)


def test_a_state_of_another_job_is_refused_by_what_it_lacks() -> None:
    _, pair, batch = jobs()
    others = {"v": mlp_params((5, 3), F64)["w1"]}
    other = plan_of(
        lambda p, x, y: jnp.mean((x @ p["v"] - y) ** 2), optax.adam(0.1), others, *batch
    )
    for job in pair:
        with pytest.raises(
            StateError, match="^this state belongs to another job: it lacks params/w"
        ):
            job.step(other.simulate().init(others), *batch)


def test_a_state_may_be_on_another_device() -> None:
    params, (simulated, job), batch = jobs()
    elsewhere = jax.device_put(job.init(params), jax.devices()[5])
    a, _ = job.step(elsewhere, *batch)
    b, _ = simulated.step(simulated.init(params), *batch)
    tree_close(a, b, 1e-12)


def test_an_array_of_other_dimensions_is_refused_by_name() -> None:
    params, pair, (x, _) = jobs()
    for job in pair:
        with pytest.raises(
            BatchError,
            match=r"^y has shape \(\), but the step was traced with float64\[8,3\]; pass an",
        ):
            job.step(job.init(params), x, 1.0)


@pytest.mark.parametrize("devices", [[0, 1], "one twice"])
def test_devices_that_are_none_are_refused(devices: Any) -> None:
    _, (_, job), _ = jobs()
    given = [jax.devices()[0]] * 2 if isinstance(devices, str) else devices
    with pytest.raises(ConfigError, match="^devices is .*, expected jax.Device objects, each once"):
        job.plan.on_mesh(given)


def test_without_donation_a_state_can_be_stepped_from_again() -> None:
    params, (simulated, mesh), batch = jobs()
    kept = mesh.plan.on_mesh(donate=False)
    for job in (simulated, kept):
        first = job.init(params)
        a, b = (job.step(first, *batch)[0] for _ in range(2))
        tree_close(a, b, 0.0)
        assert np.array_equal(job.params(first)["w"], params["w"])


def test_a_state_is_a_pytree_that_may_come_from_a_checkpoint() -> None:
    params, pair, batch = jobs()
    for job in pair:
        restored = jax.tree.map(np.asarray, job.init(params))
        a, _ = job.step(restored, *batch)
        b, _ = job.step(job.init(params), *batch)
        tree_close(a, b, 0.0)


def test_each_trainer_is_on_its_device_and_all_have_the_state() -> None:
    params, (batch, _) = square_case()
    plan = plan_of(square, optax.adam(0.1), params, *batch, trainers=4)
    job = plan.on_mesh(jax.devices()[2:])
    state, _ = job.step(job.init(params), *batch)
    for x in jax.tree.leaves(state):
        assert [d.id for d in sorted(x.devices(), key=lambda d: d.id)] == [2, 3, 4, 5]
        assert x.sharding.is_fully_replicated
        assert all(np.array_equal(s.data, x) for s in x.addressable_shards)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(trainers=0), "trainers must be a positive number of trainers, it is 0"),
        (dict(trainers=True), "trainers must be a positive number of trainers, it is True"),
        (dict(trainers="127.0.0.1:6170"), "trainers must be .*endpoints are for .*transpile.*, it "
"is '127.0.0.1:6170'"),
        (dict(axis_name=""), "axis_name must be the name of an axis, it is ''"),
        (dict(axis_name=3), "axis_name must be the name of an axis, it is 3"),
        (dict(reduce="max"), "reduce must be 'mean', 'sum' or a dtrans.Reduce; it is 'max'"),
        (dict(reduce="sum", example_count="loss"), "example_count='loss' needs reduce='mean', but "
"reduce is 'sum'"),
        (dict(bucket_MB=-1), "bucket_MB must be a size in megabytes, 0 or more; it is -1"),
        (dict(bucket_MB=float("nan")), "bucket_MB must be a size .* it is nan"),
        (dict(bucket_MB="32"), "bucket_MB must be a size .* it is '32'"),
        (dict(bucket_MB=True), "bucket_MB must be a size .* it is True"),
        (dict(compress="int8"), "compress must be 'bf16', 'fp16' or None, it is 'int8'"),
        (dict(compress="fp16", compress_scale=0), "compress_scale must be a positive number, it is "
"0"),
        (dict(compress="fp16", compress_scale="8"), "compress_scale must be a positive number, it "
"is '8'"),
        (dict(compress_scale=8.0), "compress_scale=8.0 needs compress='bf16' or 'fp16', but compress is "
"None"),
        (dict(unsplit_inputs="x"), "unsplit_inputs='x' must be a list of names of batch "
"arrays"),
        (dict(unsplit_inputs=("z",)),
         "unsplit_inputs names 'z', expected an array of the batch: x, y"),
        (dict(merge={"loss": "median"}), r"merge\['loss'\] must be 'mean', 'sum', .*, it is "
r"'median'"),
        (dict(merge={"accuracy": "mean"}),
         "merge names 'accuracy', expected an output of trainers: loss, "
"aux/n, aux/rows, "),
        (dict(merge={"params/mean": "each"}), r"merge\['params/mean'\]='each': params/mean is state, which must "
r"be equal on every trainer"),
        (dict(merge={"params/mean": "concat"}), r"merge\['params/mean'\]='concat': params/mean is "
r"state, which must be equal"),
        (dict(merge={"aux/n": "mean"}),
         r"merge\['aux/n'\]='mean': aux/n is int32\[\]; write 'sum' or "
r"'max' or 'each'"),
        (dict(merge={"loss": "concat"}),
         r"merge\['loss'\]='concat': the result is float64\[\], which "
r"has no dimension 0"),
        (dict(merge={"aux/some": "sum"}),
         r"merge\['aux/some'\]='sum': aux/some is bool\[\]; write 'max' "
r"or 'each'"),
        (dict(example_count="count"),
         "example_count='count' is not a result of the step; name one of loss, "
"aux/n, aux/rows"),
        (dict(example_count="aux/rows"), r"example_count='aux/rows' is float64\[8\]; "
"expected a scalar"),
        (dict(example_count="out4"), "example_count='out4' is computed from gradients, but the "
"count must weight"),
        (dict(example_count="aux/some"), r"example_count='aux/some' is bool\[\]; "
"expected a number"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused_by_name(options: Any, message: str) -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda w: square({"w": w}, x, y))(params["w"])
        new = {"mean": x.mean(0), "w": params["w"] - 0.1 * g}
        aux = {"n": jnp.sum(x > 0, dtype=jnp.int32), "rows": x.sum(1), "some": jnp.any(x > 0)}
        return new, opt_state, value, aux, jnp.sum(g)

    params, (batch, _) = square_case()
    params["mean"] = jnp.zeros(5)
    with pytest.raises(ConfigError, match="^" + message):
        plan_of_step(step, lambda p: (p, ()), params, *batch, **options)


def test_what_is_not_a_program_is_refused() -> None:
    params, (batch, _) = square_case()
    tx = optax.sgd(0.1)
    step = dtrans.make_train_step(square, tx)
    main, startup = (
        dtrans.trace(step, *init_of(tx)(params), *batch),
        dtrans.trace(init_of(tx), params),
    )
    with pytest.raises(
        ConfigError,
        match=r"^main is a function; expected a Program",
    ):
        dtrans.nccl2(step, startup, trainers=2)
    with pytest.raises(ConfigError, match=r"^startup is a NoneType; expected a Program"):
        dtrans.nccl2(main, None, trainers=2)
    with pytest.raises(
        TraceError, match="params/w as float64\\[2\\], but the step has float64\\[5, 3\\]"
    ):
        dtrans.nccl2(main, dtrans.trace(init_of(tx), {"w": jnp.ones(2)}), trainers=2)


def test_statistics_of_integers_must_say_how_they_are_merged() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda w: square({"w": w}, x, y))(params["w"])
        return (
            {"seen": params["seen"] + jnp.sum(x[:, 0] > 0), "w": params["w"] - 0.1 * g},
            opt_state,
            value,
        )

    params, (batch, _) = square_case()
    params["seen"] = jnp.zeros((), jnp.int64)
    with pytest.raises(
        ConfigError,
        match=r"^params/seen is int64\[\], and each trainer computes a different value "
        ".*write merge=",
    ):
        plan_of_step(step, lambda p: (p, ()), params, *batch, kind="local")
    same_step(step, lambda p: (p, ()), params, [batch], way="mesh", merge={"params/seen": "sum"})
    same_step(step, lambda p: (p, ()), params, [batch], way="mesh")


def test_a_result_that_grows_in_two_dimensions_is_refused_by_name() -> None:
    params, (batch, _) = square_case()
    loss = lambda params, x, y: (square(params, x, y), x @ x.T)
    with pytest.raises(
        ConfigError,
        match=r"^aux is float64\[8,8\] on a trainer's part and float64\[16,16\] on the full batch",
    ):
        plan_of(loss, optax.sgd(0.1), params, *batch, has_aux=True, kind="local")
    # rows meet rows
    same_as_one_device(loss, optax.sgd(0.1), params, [batch], way="simulate", has_aux=True)


def test_a_batch_whose_rows_differ_is_refused_where_results_may_grow_with_it() -> None:
    loss = lambda params, x, y, scales: (jnp.mean((x @ params["w"] * scales - y) ** 2), x.sum(1))
    params, (batch, _) = square_case()
    with pytest.raises(
        ConfigError, match=r"^the shape of aux may depend on .* y has 8 and scales has 3 rows"
    ):
        plan_of(loss, optax.sgd(0.1), params, *batch, jnp.ones(3), has_aux=True, kind="local")
    with pytest.raises(
        BatchError,
        match=r"x has 8 and scales has 3 rows; pass batch=dtrans.Batch",
    ):
        plan_of(loss, optax.sgd(0.1), params, *batch, jnp.ones(3), has_aux=True)
    plan_of(
        loss, optax.sgd(0.1), params, *batch, jnp.ones(3), has_aux=True, unsplit_inputs=("scales",)
    )


def test_fewer_devices_than_trainers_are_refused_with_what_to_set() -> None:
    params, (batch, _) = square_case()
    plan = plan_of(square, optax.sgd(0.1), params, *batch, trainers=4)
    message = (
        r"^4 trainers need 4 devices, but on_mesh has 3; set CPU devices with "
        r"jax\.config\.update\("
        r'"jax_num_cpu_devices", 4\) before JAX is used; plan\.simulate\(\) needs only one device$'
    )
    with pytest.raises(ConfigError, match=message):
        plan.on_mesh(jax.devices()[:3])


def test_complex_gradients_are_not_compressed() -> None:
    loss = lambda params, x: jnp.mean(jnp.abs(x * params["w"]) ** 2)
    params, batch = {"w": jnp.ones(3, jnp.complex128)}, (jnp.ones((4, 3)),)
    with pytest.raises(
        ConfigError, match="^compress='bf16': the gradient of params/w is complex128"
    ):
        plan_of(loss, optax.sgd(0.1), params, *batch, compress="bf16")


# -- what is shown ---------------------------------------------------------------------------------


def test_a_plan_shows_buckets_bytes_and_what_becomes_of_results() -> None:
    loss, params, batch = mixed_case()
    plan = plan_of(loss, optax.sgd(0.1), params, *batch, trainers=4)
    assert str(plan).splitlines() == [
        "nccl2 plan of step: 4 trainers",
        "  bucket    gradients of                type      bytes",
        "  bucket/0  params/scale, params/high   float64     152",
        "  bucket/1  params/mid/b, params/mid/w  float32     168",
        "  bucket/2  params/low                  bfloat16     60",
        *plan.notes,
    ]
    assert plan.notes[-1] == "loss: mean"
    for kind, n in plan.bytes_per_step.items():
        assert f"{n:,} bytes of {kind}" in plan.notes[1]
    assert plan.notes[0] == "exact: mean over 32 rows"
    assert repr(plan) == "<nccl2 plan of step: 4 trainers>"
    html = plan._repr_html_()
    for text in ("bucket/2", "<code>params/low</code>", "bfloat16", "loss: mean"):
        assert text in html


def test_a_plan_names_what_is_printed_and_by_whom() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(square)(params, x, y)
        new = {"w": params["w"] - 0.1 * g["w"]}
        jax.debug.print("new {}", new["w"].sum())
        return new, opt_state, value

    params, (batch, _) = square_case()
    plan = plan_of_step(step, lambda p: (p, ()), params, *batch)
    (note,) = plan.callback_notes
    assert (
        note.startswith("debug_")
        and note.endswith(" is called by trainer 0")
        and note in plan.notes
    )


# -- anything --------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(data=st.data())
def test_any_two_mlps_of_random_width_equal_one_device(data: st.DataObject) -> None:
    draw = data.draw
    width = st.integers(1, 9)
    sizes = [(draw(width), draw(width), draw(width)) for _ in range(2)]
    trainers = draw(st.integers(1, 6), "trainers")
    size = draw(st.sampled_from([0, 1e-4, 3e-4, 1]), "bucket_MB")
    reduce = draw(st.sampled_from(["mean", "sum"]), "reduce")
    merge = draw(st.sampled_from([{}, {"aux": "max"}, {"aux": "sum"}, {"aux": reduce}]), "merge")
    tx = draw(
        st.sampled_from(
            [optax.sgd(0.01, 0.9), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))]
        )
    )
    scale = {"mean": jnp.mean, "sum": jnp.sum}[reduce]
    of_rows = {"max": jnp.max, "sum": jnp.sum, "mean": jnp.mean}[merge["aux"] if merge else reduce]

    def loss(params: Any, x: Any, y: Any) -> Any:
        errors = [(mlp_forward(params[n], x[n]) - y[n]) ** 2 for n in ("one", "two")]
        return scale(errors[0]) + scale(errors[1]), of_rows(errors[0])

    with jax.enable_x64(True):
        params = {
            n: mlp_params(s, F64, i)
            for i, (n, s) in enumerate(zip(("one", "two"), sizes, strict=True))
        }
        pairs = {n: mlp_batch(2 * trainers, s, F64) for n, s in zip(params, sizes, strict=True)}
        batch = tuple({n: p[i] for n, p in pairs.items()} for i in range(2))
        plan, _ = same_as_one_device(
            loss, tx, params, [batch] * 2, way="simulate", has_aux=True, trainers=trainers,
            reduce=reduce, merge=merge,
            bucket_MB=size,
        )  # fmt: skip
        assert sorted(n for b in plan.buckets for n in b.leaves) == sorted(plan.main.args[0].names)
        grads = 8 * sum(np.size(x) for x in jax.tree.leaves(params))
        assert plan.bytes_per_step == ({} if trainers == 1 else {"float64": grads + 16})
