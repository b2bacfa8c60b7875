"""A job on a mesh computes the results of one device, places each array on its device, and refuses
impossible calls."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    batch_statistics_step,
    distance,
    endpoints,
    init_of,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    plan_of,
    tree_close,
    tree_equal,
)
from hypothesis import given, settings, strategies as st

import dtrans
from dtrans.errors import BatchError, ConfigError, StateError, TraceError


EXACT = {jnp.float32: 1e-6, jnp.float64: 1e-12}


def run(job: Any, state: Any, batches: Any) -> tuple[Any, list[Any]]:
    losses = []
    for batch in batches:
        state, loss, *_ = job.step(state, *batch)
        losses.append(loss)
    return state, losses


def same_as_one_device(
    loss: Any,
    tx: Any,
    params: Any,
    batches: Any,
    *,
    trainers: int = 2,
    servers: int = 3,
    devices: int = 8,
    rtol: float = 1e-12,
    **options: Any,
) -> tuple[Any, Any]:
    """Train on a mesh and on one device, and compare parameters, optimizer state and losses.

    Return the job and its state.
    """
    plan = plan_of(loss, tx, params, *batches[0], servers=servers, trainers=trainers, **options)
    job = plan.on_mesh(jax.devices()[:devices])
    state, losses = run(job, job.init(params), batches)
    want_params, want_state, want_losses = plain_run(
        plain_step(loss, tx), params, tx.init(params), batches
    )
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(want_params), jax.tree.leaves(params), strict=True)
    )
    tree_close(job.params(state), want_params, rtol)
    tree_close(job.opt_state(state), want_state, rtol)
    tree_close(losses, want_losses, rtol)
    return job, state


def batches_of(
    rows: int, steps: int = 2, dtype: Any = jnp.float64, **kw: Any
) -> list[tuple[jax.Array, jax.Array]]:
    return [mlp_batch(rows, dtype=dtype, seed=s, **kw) for s in range(steps)]


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "dtype, trainers, servers, devices, rows",
    [
        (jnp.float64, 1, 1, 8, 6),
        (jnp.float64, 1, 4, 1, 6),
        (jnp.float64, 2, 2, 8, 8),
        (jnp.float64, 2, 3, 1, 6),
        (jnp.float64, 3, 2, 3, 15),
        (jnp.float64, 4, 1, 8, 8),
        (jnp.float64, 4, 4, 8, 4),
        (jnp.float64, 4, 4, 3, 12),
        (jnp.float32, 1, 2, 8, 6),
        (jnp.float32, 2, 3, 8, 8),
        (jnp.float32, 4, 2, 3, 12),
    ],
)
def test_a_mesh_job_equals_one_device(
    dtype: Any, trainers: int, servers: int, devices: int, rows: int
) -> None:
    with jax.enable_x64(dtype == jnp.float64):
        same_as_one_device(
            mlp_loss,
            optax.adam(1e-2),
            mlp_params(dtype=dtype),
            batches_of(rows, dtype=dtype),
            trainers=trainers,
            servers=servers,
            devices=devices,
            rtol=EXACT[dtype],
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.1), id="sgd"),
        pytest.param(optax.sgd(0.1, momentum=0.9, nesterov=True), id="nesterov"),
        pytest.param(
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)), id="adamw-schedule"
        ),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1)), id="clip_by_global_norm"
        ),
        pytest.param(optax.lamb(0.1), id="lamb"),
        pytest.param(optax.adafactor(0.1, min_dim_size_to_factor=2), id="adafactor"),
        pytest.param(
            optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), id="MultiSteps"
        ),
        pytest.param(
            optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
            id="add_noise",
        ),
        pytest.param(
            optax.chain(optax.sgd(0.1), optax.ema(0.0)), id="state-that-equals-the-update"
        ),
    ],
)
def test_every_optimizer_gives_the_numbers_of_one_device(tx: Any) -> None:
    with jax.enable_x64(True):
        same_as_one_device(mlp_loss, tx, mlp_params(dtype=jnp.float64), batches_of(4, steps=3))


class Net(NamedTuple):
    deep: dict[str, Any]
    scale: jax.Array
    row: jax.Array
    empty: tuple[()]


def test_nested_pytrees_with_0d_and_one_row_leaves_equal_one_device() -> None:
    def loss(params: Net, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ params.deep["a"][0]) * params.scale
        return jnp.mean((h @ params.deep["a"][1] + params.row[0] - y) ** 2)

    with jax.enable_x64(True):
        w = mlp_params(dtype=jnp.float64)
        params = Net({"a": [w["w1"], w["w2"]]}, jnp.float64(0.7), jnp.ones((1, 3), jnp.float64), ())
        job, state = same_as_one_device(loss, optax.adam(1e-2), params, batches_of(8), servers=4)
        assert isinstance(job.params(state), Net)
        assert {"params/row", "params/scale"} < {b.name for b in job.plan.placement.all_blocks}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3, param_dtype=jnp.float64)(
            nn.tanh(nn.Dense(6, param_dtype=jnp.float64)(x))
        )


def test_flax_parameters_equal_one_device() -> None:
    with jax.enable_x64(True):
        batches = batches_of(4)
        params = Linen().init(jax.random.key(0), batches[0][0])
        loss = lambda params, x, y: jnp.mean((Linen().apply(params, x) - y) ** 2)
        same_as_one_device(loss, optax.adam(1e-2), params, batches)


def test_an_equinox_module_equals_one_device_and_keeps_its_functions() -> None:
    with jax.enable_x64(True):
        model = eqx.nn.MLP(5, 3, 6, 1, dtype=jnp.float64, key=jax.random.key(0))
        tx, batches = optax.adam(1e-2), batches_of(4)

        def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((jax.vmap(params)(x) - y) ** 2)

        def init(key: jax.Array) -> tuple[Any, Any]:
            model = eqx.nn.MLP(5, 3, 6, 1, dtype=jnp.float64, key=key)
            return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

        step = dtrans.make_train_step(loss, tx)
        key = jax.random.key(0)
        plan = dtrans.pserver(
            dtrans.trace(step, *init(key), *batches[0]),
            dtrans.trace(init, key),
            pservers=endpoints(3),
            trainers=2,
            placement=dtrans.BlockPlacement(min_block_size=1),
        )
        job = plan.on_mesh()
        state, losses = run(job, job.init(key), batches)

        arrays, rest = eqx.partition(model, eqx.is_inexact_array)
        of_arrays = lambda arrays, x, y: loss(eqx.combine(arrays, rest), x, y)
        want, _, want_losses = plain_run(
            plain_step(of_arrays, tx), arrays, tx.init(arrays), batches
        )
        trained = job.params(state)
        tree_close(eqx.filter(trained, eqx.is_inexact_array), want, 1e-12)
        tree_close(losses, want_losses, 1e-12)
        assert trained.activation is model.activation
        assert trained(batches[0][0][0]).shape == (3,)


def test_bfloat16_leaves_equal_one_device_to_their_precision() -> None:
    params = mlp_params(dtype=jnp.bfloat16)
    job, state = same_as_one_device(
        mlp_loss, optax.sgd(0.1), params, batches_of(8, dtype=jnp.bfloat16), rtol=2**-6
    )
    assert {x.dtype for x in jax.tree.leaves(job.params(state))} == {jnp.dtype("bfloat16")}


def test_tied_weights_equal_one_device() -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["e"]) @ params["e"].T - x) ** 2) + 0 * jnp.sum(y)

    with jax.enable_x64(True):
        params = {"e": mlp_params((5, 4), jnp.float64)["w1"]}
        same_as_one_device(loss, optax.adam(1e-2), params, batches_of(6, sizes=(5, 3)))


def test_one_array_in_two_leaves_is_two_parameters() -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["a"] + 2 * x @ params["b"] - y) ** 2)

    with jax.enable_x64(True):
        w = mlp_params((5, 3), jnp.float64)["w1"]
        job, state = same_as_one_device(
            loss, optax.sgd(0.1, 0.9), {"a": w, "b": w}, batches_of(4, sizes=(5, 3)), devices=1
        )
        params = job.params(state)
        assert distance(params["a"], params["b"]) > 1e-3


@pytest.mark.parametrize(
    "freeze",
    [
        pytest.param(
            lambda label: optax.masked(optax.set_to_zero(), {n: n == "w1" for n in label}),
            id="set_to_zero",
        ),
        pytest.param(
            lambda label: optax.multi_transform(
                {"train": optax.adam(0.1), "freeze": optax.set_to_zero()},
                {n: "freeze" if n == "w1" else "train" for n in label},
            ),
            id="multi_transform",
        ),
    ],
)
def test_frozen_leaves_do_not_move(freeze: Any) -> None:
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        tx = optax.chain(optax.sgd(0.1), freeze(list(params)))
        job, state = same_as_one_device(mlp_loss, tx, params, batches_of(4))
        tree_equal(job.params(state)["w1"], params["w1"])


def test_optax_masked_trains_only_some_leaves_as_on_one_device() -> None:
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        tx = optax.chain(
            optax.masked(optax.adam(0.1), {n: n != "b1" for n in params}), optax.scale(0.5)
        )
        same_as_one_device(mlp_loss, tx, params, batches_of(4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "dtype", [jnp.float64, jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("shape", [(), (4,)], ids=["0-d", "1-d"])
def test_a_leaf_that_the_loss_does_not_use_is_trained_as_on_one_device(
    shape: Any, dtype: Any
) -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] - y) ** 2)

    with jax.enable_x64(True):  # here a zero of the wrong type would show
        params = {"idle": jnp.full(shape, 2, dtype), "w": mlp_params((5, 3), jnp.float64)["w1"]}
        tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
        job, state = same_as_one_device(loss, tx, params, batches_of(4, sizes=(5, 3)), rtol=1e-12)
        assert job.params(state)["idle"].dtype == dtype
        assert float(jnp.max(job.params(state)["idle"])) < 1.9


def test_a_leaf_that_nothing_changes_stays_with_the_trainers() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda w: jnp.mean((x * params["shift"] @ w - y) ** 2))(
            params["w"]
        )
        return {"shift": params["shift"], "w": params["w"] - 0.1 * g}, opt_state, value

    with jax.enable_x64(True):
        params = {"shift": jnp.arange(5.0), "w": mlp_params((5, 3), jnp.float64)["w1"]}
        init = lambda params: (params, ())
        batches = batches_of(4, sizes=(5, 3))
        plan = dtrans.pserver(
            dtrans.trace(step, params, (), *batches[0]),
            dtrans.trace(init, params),
            trainers=2,
            placement=dtrans.BlockPlacement(min_block_size=1),
        )
        assert plan.frozen == ("params/shift",)
        job = plan.on_mesh()
        state, losses = run(job, job.init(params), batches)
        want, _, want_losses = plain_run(step, params, (), batches)
        tree_close(job.params(state), want, 1e-12)
        tree_close(losses, want_losses, 1e-12)
        assert not any("shift" in n for held in state.servers.values() for n in held)


def test_a_loss_of_a_leaf_times_a_0d_batch_array_sends_that_array_as_gradient() -> None:
    """The gradient is an input of the program, and no equation computes it."""
    with jax.enable_x64(True):
        loss = lambda params, c: params["s"] * c
        params = {"s": jnp.float64(3.0)}
        for trainers in (1, 2):
            batches = [(jnp.float64(2.0),), (jnp.float64(5.0),)]
            same_as_one_device(loss, optax.sgd(0.1), params, batches, trainers=trainers)


# -- what is made in the forward pass --------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trainers, devices", [(1, 8), (2, 8), (2, 1), (4, 3)])
def test_batch_statistics_are_each_trainers_own(trainers: int, devices: int) -> None:
    """Leaves that a trainer computes from its part of the batch stay on the trainer.

    `job.params` shows trainer 0's leaves.
    """
    with jax.enable_x64(True):
        params = {"mean": jnp.zeros(5), "w": mlp_params((5, 3), jnp.float64)["w1"]}
        batches = batches_of(8, sizes=(5, 3))
        plan = dtrans.pserver(
            dtrans.trace(batch_statistics_step, params, (), *batches[0]),
            dtrans.trace(lambda p: (p, ()), params),
            pservers=endpoints(2),
            trainers=trainers,
            placement=dtrans.BlockPlacement(min_block_size=1),
            batch="local",
        )
        job = plan.on_mesh(jax.devices()[:devices])
        state, _ = run(job, job.init(params), batches)
        n = 8 // trainers
        want = np.zeros((trainers, 5))
        for x, _ in batches:
            want = 0.5 * want + 0.5 * np.asarray(x).reshape(trainers, n, 5).mean(1)
        assert distance(job.params(state)["mean"], want[0]) < 1e-12
        if trainers > 1:
            assert distance(state.params["params/mean"], want) < 1e-12


def test_a_leaf_that_takes_the_value_of_a_0d_batch_array_is_followed() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array, temperature: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) * params["last"])(
            params["w"]
        )
        return {"last": temperature, "w": params["w"] - 0.1 * g}, opt_state, value

    with jax.enable_x64(True):
        params = {"last": jnp.float64(1.0), "w": jnp.ones(5)}
        batches = [(mlp_batch(4, dtype=jnp.float64)[0], jnp.float64(t)) for t in (0.5, 0.25, 2.0)]
        plan = dtrans.pserver(
            dtrans.trace(step, params, (), *batches[0]),
            dtrans.trace(lambda p: (p, ()), params),
            trainers=2,
        )
        job = plan.on_mesh()
        state, losses = run(job, job.init(params), batches)
        want, _, want_losses = plain_run(step, params, (), batches)
        tree_close(losses, want_losses, 1e-12)
        tree_close(job.params(state), want, 1e-12)


# -- results ---------------------------------------------------------------------------------------


def aux_job(
    aux: Any, *, trainers: int = 2, devices: int = 8, rows: int = 8, batch: str = "exact"
) -> tuple[Any, Any]:
    """Return the values of `aux(params, x, y)` from a job and from one device."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return mlp_loss(params, x, y), aux(params, x, y)

    params, arrays, tx = mlp_params(), mlp_batch(rows), optax.sgd(0.1)
    step = dtrans.make_train_step(loss, tx, has_aux=True)
    plan = dtrans.pserver(
        dtrans.trace(step, params, tx.init(params), *arrays),
        dtrans.trace(init_of(tx), params),
        pservers=endpoints(2),
        trainers=trainers,
        batch=batch,
    )
    job = plan.on_mesh(jax.devices()[:devices])
    _, value, got = job.step(job.init(params), *arrays)
    *_, want_value, want = jax.jit(step)(params, tx.init(params), *arrays)
    tree_close(value, want_value, 1e-6)
    return got, want


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trainers, devices", [(1, 8), (2, 8), (4, 3)])
def test_aux_is_averaged_joined_or_stacked_by_what_it_is(trainers: int, devices: int) -> None:
    def aux(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return {
            "mean": jnp.mean(x**2),
            "each": jnp.sum(x @ params["w1"], 1),
            "wrong": jnp.sum(x[:, 0] > 0, dtype=jnp.int32),
            "norms": jnp.stack([jnp.mean(x**2), jnp.mean(y**2)]),
            "sign": x > 0,
            "input": x,
            "leaf": params["b1"],
            "constant": jnp.arange(3.0),
        }

    got, want = aux_job(aux, trainers=trainers, devices=devices)
    tree_close(got, want, 1e-6)
    got, want = aux_job(aux, trainers=trainers, devices=devices, batch="local")
    counts = got.pop("wrong")
    total = want.pop("wrong")
    tree_close(got, want, 1e-6)
    if trainers == 1:
        assert counts.shape == () and counts == total
    else:  # one row per trainer: no rule says that rows are added
        assert counts.shape == (trainers,) and counts.sum() == total
        x = np.asarray(mlp_batch(8)[0])
        assert counts.tolist() == (x[:, 0] > 0).reshape(trainers, -1).sum(1).tolist()


def test_aux_keeps_its_structure() -> None:
    got, want = aux_job(
        lambda params, x, y: (Net({"a": jnp.mean(x**2)}, jnp.mean(y**2), y, ()), None)
    )
    assert isinstance(got[0], Net) and got[1] is None
    tree_close(got, want, 1e-6)


def test_a_result_that_grows_with_the_batch_in_two_dimensions_is_refused_by_name() -> None:
    with pytest.raises(
        BatchError,
        match=r"aux has shape \[4, 4\] on a trainer and \[8, 8\] on one device, so it cannot be "
        r"merged",
    ):
        aux_job(lambda params, x, y: x @ x.T, batch="local")


def test_a_step_that_returns_a_dict_returns_the_rest_of_it() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, g = dtrans.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        return {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, g),
            "opt_state": opt_state,
            "mse": value,
        }

    params, x = {"w": jnp.arange(1.0, 6.0)}, mlp_batch(8)[0]
    opt_state = {"count": jnp.zeros((), jnp.int32)}
    plan = dtrans.pserver(
        dtrans.trace(step, params, opt_state, x),
        dtrans.trace(lambda p, s: (p, s), params, opt_state),
        trainers=2,
    )
    job = plan.on_mesh()
    state, *rest = job.step(job.init(params, opt_state), x)
    want = jax.jit(step)(params, opt_state, x)
    tree_close(job.params(state), want["params"], 1e-6)
    (rest,) = rest
    assert list(rest) == ["mse"]
    tree_close(rest["mse"], want["mse"], 1e-6)


# -- batches ---------------------------------------------------------------------------------------


def small_job(**options: Any) -> tuple[Any, Any, Any, Any]:
    """Return params, tx, plan and job of a small Adam job, by default with two trainers and three
    servers."""
    params, tx = mlp_params(), optax.adam(1e-2)
    options = {"trainers": 2, "servers": 3} | options
    donate = options.pop("donate", True)
    plan = plan_of(mlp_loss, tx, params, *mlp_batch(8), **options)
    return params, tx, plan, plan.on_mesh(donate=donate)


def test_another_batch_size_in_a_later_step_is_traced_again() -> None:
    with jax.enable_x64(True):
        batches = [mlp_batch(n, dtype=jnp.float64) for n in (8, 2, 8)]
        job, _ = same_as_one_device(
            mlp_loss, optax.adam(1e-2), mlp_params(dtype=jnp.float64), batches
        )
        assert len(job._runners) == 2  # the third step uses the pieces of the first


def test_numpy_batches_of_float64_are_taken_as_jax_takes_them() -> None:
    params, _, _, job = small_job()
    x, y = (np.asarray(a, np.float64) for a in mlp_batch(8))
    _, loss = job.step(job.init(params), x, y)
    _, again = job.step(job.init(params), *mlp_batch(8))
    assert loss.dtype == jnp.float32
    assert loss == again


def test_a_batch_that_the_trainers_do_not_divide_is_refused_by_its_name() -> None:
    params, _, _, job = small_job(kind="local")
    state = job.init(params)
    x, y = mlp_batch(8)
    with pytest.raises(
        BatchError,
        match="^y has 7 rows, which cannot be split evenly over 2 trainers; pass a multiple of 2 ",
    ):
        job.step(state, x, y[:7])
    with pytest.raises(
        BatchError, match="^x has 9 rows, which cannot be split evenly over 2 trainers"
    ):
        job.step(state, *mlp_batch(9))
    job.step(state, x, y)  # the state is still valid


def test_a_batch_that_the_trainers_do_not_divide_is_padded_where_the_job_is_exact() -> None:
    with jax.enable_x64(True):
        batches = [mlp_batch(n, dtype=jnp.float64) for n in (8, 7, 9, 1, 7)]
        job, _ = same_as_one_device(
            mlp_loss, optax.adam(1e-2), mlp_params(dtype=jnp.float64), batches
        )
        assert len(job._runners) == 4
        with pytest.raises(
            BatchError,
            match="cut over the trainers, but x has 8 and y has 7 rows|split over the tr",
        ):
            job.step(job.init(mlp_params(dtype=jnp.float64)), batches[0][0], batches[1][1])


def test_a_wrong_number_of_batch_arguments_is_refused() -> None:
    params, _, _, job = small_job()
    with pytest.raises(BatchError, match="^the step takes 2 batch arguments, 1 were given; pass"):
        job.step(job.init(params), mlp_batch(8)[0])
    with pytest.raises(BatchError, match="^the step takes 2 batch arguments, 0 were given; pass"):
        job.step(job.init(params))


def test_a_batch_argument_of_another_structure_is_refused() -> None:
    params, _, _, job = small_job()
    x, y = mlp_batch(8)
    with pytest.raises(
        TraceError, match="^batch argument 1 does not have the structure with which it was traced"
    ):
        job.step(job.init(params), x, {"y": y})


# -- state -----------------------------------------------------------------------------------------


def test_a_state_that_was_stepped_from_is_refused_and_says_why() -> None:
    params, _, _, job = small_job()
    batch = mlp_batch(8)
    first = job.init(params)
    second, _ = job.step(first, *batch)
    with pytest.raises(
        StateError,
        match=r"^a step has already used this state, and its opt_state/0/\S+ was donated",
    ):
        job.step(first, *batch)
    job.params(first)  # parameters are never donated
    job.step(second, *batch)


def test_parameters_stay_readable_where_the_optimizer_keeps_them_as_state() -> None:
    """State that equals an input parameter is donated to the next step, but the parameter is
    not."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(lambda g: -0.1 * g, grads), params

    with jax.enable_x64(True):
        params, batches = mlp_params(dtype=jnp.float64), batches_of(4, steps=3)
        tx = optax.GradientTransformation(init, update)
        plan = plan_of(mlp_loss, tx, params, *batches[0], trainers=2)
        job = plan.on_mesh(jax.devices()[:1])
        states = [job.init(params)]
        for batch in batches:
            states.append(job.step(states[-1], *batch)[0])
        for i, state in enumerate(states):
            want, _, _ = plain_run(plain_step(mlp_loss, tx), params, tx.init(params), batches[:i])
            tree_close(job.params(state), want, 1e-12)
        tree_close(job.opt_state(states[-1]), job.params(states[-2]), 1e-12)


def test_without_donation_a_state_can_be_stepped_from_again() -> None:
    params, _, _, job = small_job(donate=False)
    batch = mlp_batch(8)
    first = job.init(params)
    a, _ = job.step(first, *batch)
    b, _ = job.step(first, *batch)
    tree_equal(a, b)
    tree_equal(job.opt_state(first), optax.adam(1e-2).init(params))


@pytest.mark.parametrize("devices", [1, 8])
def test_init_gives_the_single_device_init_and_leaves_its_arguments_alone(devices: int) -> None:
    params, tx, plan, _ = small_job()
    job = plan.on_mesh(jax.devices()[:devices])
    state = job.init(params)
    tree_equal(job.params(state), params)
    tree_equal(job.opt_state(state), tx.init(params))
    job.step(state, *mlp_batch(8))
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_a_state_is_a_pytree_and_the_job_holds_none() -> None:
    params, _, plan, job = small_job(donate=False)
    batch = mlp_batch(8)
    leaves, treedef = jax.tree.flatten(job.init(params))
    rebuilt = jax.tree.unflatten(treedef, leaves)
    other = plan.on_mesh()
    tree_equal(job.step(rebuilt, *batch)[0], other.step(other.init(params), *batch)[0])


def test_a_step_leaves_no_arrays_to_the_garbage_collector() -> None:
    params, _, _, job = small_job(donate=False)
    state, batch = job.init(params), mlp_batch(8)
    state, _ = job.step(state, *batch)
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        state, _ = job.step(state, *batch)
        assert len(jax.live_arrays()) <= before + 1  # the loss is no earlier result
    finally:
        gc.enable()


# -- where things live -----------------------------------------------------------------------------


def devices_of(x: jax.Array) -> set[int]:
    return {d.id for d in x.devices()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "trainers, servers, devices, trainer_ids, server_ids",
    [
        (2, 3, 8, {0, 1}, [2, 3, 4]),
        (4, 4, 8, {0, 1, 2, 3}, [4, 5, 6, 7]),
        (1, 2, 8, {0}, [1, 2]),
        (2, 3, 3, {0, 1}, [2, 0, 1]),  # fewer devices than roles: round-robin
        (2, 2, 1, {0}, [0, 0]),
        (4, 1, 3, {0, 1}, [1]),  # 3 devices do not divide 4 trainers, 2 do
    ],
)
def test_each_thing_lives_on_its_device(
    trainers: int, servers: int, devices: int, trainer_ids: set[int], server_ids: list[int]
) -> None:
    params, _, plan, _ = small_job(trainers=trainers, servers=servers)
    job = plan.on_mesh(jax.devices()[:devices])
    state = job.init(params)
    for _ in range(2):
        for name, x in state.params.items():
            assert devices_of(x) == trainer_ids, name
        for held, device in zip(state.servers.values(), server_ids, strict=True):
            assert held, "every server has something to hold"
            for name, x in held.items():
                assert devices_of(x) == {device}, name
        state, _ = job.step(state, *mlp_batch(8))
    moments = [n for held in state.servers.values() for n in held if "/mu/" in n or "/nu/" in n]
    assert len(moments) == len(set(moments)), "a moment of a block is held once"
    assert not any(n.startswith("opt_state") for n in state.params)


def test_a_mesh_without_devices_is_refused() -> None:
    _, _, plan, _ = small_job()
    with pytest.raises(ConfigError, match=r"^devices=\[\] is empty, expected one device"):
        plan.on_mesh([])


def test_a_server_without_blocks_holds_nothing_and_the_job_goes_on() -> None:
    with jax.enable_x64(True):
        params = {"w": jnp.float64(2.0)}
        loss = lambda params, x: jnp.mean((params["w"] * x - 1) ** 2)
        batches = [(mlp_batch(4, dtype=jnp.float64)[0],)] * 2
        _, state = same_as_one_device(loss, optax.adam(0.1), params, batches, servers=3)
        assert [bool(held) for held in state.servers.values()] == [True, False, False]


# -- anything --------------------------------------------------------------------------------------


@settings(max_examples=max(3, settings().max_examples // 3))
@given(data=st.data())
def test_any_step_of_two_mlps_of_random_width_equals_one_device(data: st.DataObject) -> None:
    draw = data.draw
    width = st.integers(1, 9)
    sizes = [(draw(width), draw(width), draw(width)) for _ in range(2)]
    trainers = draw(st.integers(1, 4), "trainers")
    servers = draw(st.integers(1, 9), "servers")
    devices = draw(st.integers(1, 8), "devices")
    min_block_size = draw(st.integers(1, 30), "min_block_size")
    tx = draw(
        st.sampled_from(
            [
                optax.sgd(0.1, momentum=0.9),
                optax.adam(0.1),
                optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
            ]
        )
    )

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return mlp_loss(params["one"], x[0], y[0]) + mlp_loss(params["two"], x[1], y[1])

    with jax.enable_x64(True):
        params = {
            n: mlp_params(s, jnp.float64, i)
            for i, (n, s) in enumerate(zip(("one", "two"), sizes, strict=True))
        }
        pairs = [mlp_batch(2 * trainers, s, jnp.float64) for s in sizes]
        batch = (tuple(x for x, _ in pairs), tuple(y for _, y in pairs))
        same_as_one_device(
            loss,
            tx,
            params,
            [batch] * 2,
            trainers=trainers,
            servers=servers,
            devices=devices,
            min_block_size=min_block_size,
        )


def test_arrays_that_differ_in_rows_are_refused_unless_every_trainer_gets_them_whole() -> None:
    def loss(params: Any, x: Any, y: Any, weights: Any) -> Any:
        return jnp.mean((x @ params["w"] * weights - y) ** 2)

    tx = optax.sgd(0.1)
    init = lambda key: (p := {"w": jax.random.normal(key, (3, 4))}, tx.init(p))
    step, key = dtrans.make_train_step(loss, tx), jax.random.key(0)
    x, y, weights = jnp.ones((8, 3)), jnp.zeros((8, 4)), jnp.arange(4.0)
    given = dtrans.trace(step, *init(key), x, y, weights), dtrans.trace(init, key)
    with pytest.raises(
        BatchError,
        match=r"but x has 8 and weights has 4 rows; pass batch=dtrans.Batch\(unsplit_inputs=",
    ):
        dtrans.pserver(*given, trainers=2)
    exact = dtrans.pserver(*given, trainers=2, batch=dtrans.Batch(unsplit_inputs=["weights"]))
    with pytest.raises(
        ConfigError,
        match=r"this plan already splits the batch; write dtrans.pserver\(batch=",
    ):
        exact.on_mesh(unsplit_inputs=("weights",))
    plan = dtrans.pserver(*given, trainers=2, batch="local")
    assert (
        "compare them with one device's numbers: the arrays of a batch are sharded over the "
        "trainers, but x has 8" in str(plan)
    )
    job = plan.on_mesh()
    with pytest.raises(
        BatchError,
        match=r"but x has 8 and weights has 4 rows; name arrays .*on_mesh\(unsplit_inputs=",
    ):
        job.step(job.init(key), x, y, weights)
    with pytest.raises(
        ConfigError, match=r"unsplit_inputs=\('v',\) must name arrays of the batch: x, y, weights"
    ):
        plan.on_mesh(unsplit_inputs=("v",))
    params, _, expected = jax.jit(step)(*init(key), x, y, weights)
    for job in (exact.on_mesh(), plan.on_mesh(unsplit_inputs=("weights",))):
        state, got = job.step(job.init(key), x, y, weights)
        tree_close(job.params(state), params, 1e-6)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_key_differs_between_trainers_and_one_trainer_has_it_as_it_is(devices: int) -> None:
    def loss(params: Any, x: Any, key: Any) -> Any:
        noise = jax.random.uniform(key, x.shape)
        return jnp.mean((x + noise) * params), noise

    tx = optax.sgd(0.1)
    init = lambda key: (p := jnp.float32(1), tx.init(p))
    step, key = dtrans.make_train_step(loss, tx, has_aux=True), jax.random.key(7)
    programs = dtrans.trace(step, *init(key), jnp.ones((4, 2)), key), dtrans.trace(init, key)
    for trainers in (1, 2):
        job = dtrans.pserver(*programs, trainers=trainers, batch="local").on_mesh(
            jax.devices()[:devices]
        )
        _, _, noise = job.step(job.init(key), jnp.ones((4, 2)), key)
        keys = [key] if trainers == 1 else [jax.random.fold_in(key, k) for k in range(trainers)]
        expected = jnp.concatenate([jax.random.uniform(k, (4 // trainers, 2)) for k in keys])
        np.testing.assert_array_equal(noise, expected)


def test_a_step_from_something_else_than_a_state_is_refused() -> None:
    tx = optax.sgd(0.1)
    init = lambda key: (p := {"w": jnp.ones(2)}, tx.init(p))
    step, key = (
        dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx),
        jax.random.key(0),
    )
    job = dtrans.pserver(
        dtrans.trace(step, *init(key), jnp.ones(2)), dtrans.trace(init, key)
    ).on_mesh()
    with pytest.raises(
        StateError, match="step takes the state that init or step returned, not dict"
    ):
        job.step(init(key)[0], jnp.ones(2))
