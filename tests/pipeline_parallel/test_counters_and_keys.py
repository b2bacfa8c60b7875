"""Counters and random keys in the state of a pipeline, and numbers of the full batch that updates
and losses read.

Each step runs on two batches of different sizes, and computes the results of one device, or
planning refuses the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pipeline_models import compiled_quickly

import dtrans
from dtrans.errors import BatchError, GradientError


pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)
MANNERS: dict[str, dict[str, Any]] = {
    "simulate": {},
    "simulate, replicas": {"replicas": 2},
    "on_mesh": {},
    "on_mesh, offload": {"memory": dtrans.StageMemory(offload=True)},
    "on_mesh, slices": {
        "replicas": 2,
        "memory": dtrans.StageMemory(sharding_stage=2, min_slice_size=0),
    },
    "on_mesh, one": {"num_micro_batch": 1},
}


def weights() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 8), "u": (8, 8), "v": (8, 4)}
    return {n: jnp.asarray(rng.normal(size=s) / 2) for n, s in shapes.items()}


def model(p: Any, x: jax.Array, *keys: jax.Array) -> jax.Array:
    """Return two layers, with a dropout after each layer that has a key."""
    for n, key in zip(("w", "u"), [*keys, None, None], strict=False):
        x = jnp.tanh(x @ p[n])
        x = x if key is None else jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)
    return x @ p["v"]


def error(p: Any, x: jax.Array, y: jax.Array, *keys: jax.Array) -> jax.Array:
    return jnp.mean((model(p, x, *keys) - y) ** 2)


def penalty(p: Any) -> jax.Array:
    return 0.1 * optax.tree.norm(p, squared=True)


def descent(p: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda w, g: w - rate * g, p, grads)


def zero(dtype: Any = float) -> Any:
    return np.zeros((), dtype)


gradients = dtrans.value_and_grad
Step = Callable[..., Any]
STEPS: dict[str, tuple[Mapping[str, Any], Step]] = {}


def step(**state: Any) -> Callable[[Step], Step]:
    """Add a step to the table. Its state has these arrays in addition to its parameters."""

    def add(fn: Step) -> Step:
        STEPS[fn.__name__] = state, fn
        return fn

    return add


@step(rng=jax.random.PRNGKey(3))
def raw_key(s: Any, x: Any, y: Any) -> Any:
    rng, a, b = jax.random.split(s["rng"], 3)
    loss, grads = gradients(lambda p: error(p, x, y, a, b))(s["params"])
    return {"params": descent(s["params"], grads), "rng": rng}, loss, {"used": a}


@step(rng=jax.random.key(3))
def typed_key(s: Any, x: Any, y: Any) -> Any:
    return raw_key(s, x, y)


@step(rng=jax.random.PRNGKey(3), count=zero(np.uint32))
def key_and_count_in_the_loss(s: Any, x: Any, y: Any) -> Any:
    """Return a step that folds each layer's key with a count, as nnx's `Rngs` does. The loss
    function increments the count."""

    @jax.jit
    def loss_of(p: Any) -> Any:
        rng, key = jax.random.split(s["rng"])
        keys = [jax.random.fold_in(key, s["count"] + i) for i in range(2)]
        return error(p, x, y, *keys), {"rng": rng, "count": s["count"] + 2}

    (loss, rest), grads = gradients(loss_of, has_aux=True)(s["params"])
    return {"params": descent(s["params"], grads), **rest}, loss


@step(seen=zero(np.int32))
def entries_in_an_integer(s: Any, x: Any, y: Any) -> Any:
    """Return a step that counts entries, as language models count tokens."""
    loss, grads = gradients(lambda p: error(p, x, y))(s["params"])
    seen = s["seen"] + (x > 0).sum(dtype=np.int32)
    return {"params": descent(s["params"], grads), "seen": seen}, loss


@step(rows=np.linspace(-1, 1, 60).reshape(10, 6))
def replay(s: Any, x: Any, y: Any) -> Any:
    """Return a step whose loss reads rows of earlier batches only."""
    loss, grads = gradients(lambda p: error(p, s["rows"], 0.5))(s["params"])
    rows = jnp.roll(s["rows"], 2, 0).at[:2].set(x[:2])
    return {"params": descent(s["params"], grads), "rows": rows}, loss, optax.tree.norm(grads)


@step(n=zero(int))
def only_random_rows(s: Any, x: Any, y: Any) -> Any:
    rows = jax.random.normal(jax.random.fold_in(KEY, s["n"]), (10, 6))
    loss, grads = gradients(lambda p: error(p, rows, 0.5))(s["params"])
    return {"params": descent(s["params"], grads), "n": s["n"] + 1}, loss


@step(rng=jax.random.PRNGKey(3))
def noisy_gradients(s: Any, x: Any, y: Any) -> Any:
    rng, key = jax.random.split(s["rng"])
    loss, grads = gradients(lambda p: error(p, x, y, key))(s["params"])
    grads = {n: g + 0.1 * jax.random.normal(key, g.shape) for n, g in grads.items()}
    return {"params": descent(s["params"], grads), "rng": rng}, loss


@step(seen=zero())
def rows_that_the_loss_reads(s: Any, x: Any, y: Any) -> Any:
    seen = s["seen"] + len(x)
    loss, grads = gradients(lambda p: error(p, x, y) * (1 + 1 / seen))(s["params"])
    return {"params": descent(s["params"], grads), "seen": seen}, loss


@step(seen=zero())
def rows_that_the_update_reads(s: Any, x: Any, y: Any) -> Any:
    seen = s["seen"] + len(x)
    loss, grads = gradients(lambda p: error(p, x, y))(s["params"])
    return {"params": descent(s["params"], grads, 0.1 / jnp.sqrt(seen)), "seen": seen}, loss


@step(seen=zero())
def rows_that_both_read(s: Any, x: Any, y: Any) -> Any:
    """Return a step whose loss divides by the number of rows, and has a penalty. Micro-batches
    receive their share, and the update reads the number.
    """
    seen = s["seen"] + len(x)
    loss, grads = gradients(lambda p: ((model(p, x) - y) ** 2).sum() / seen + penalty(p))(
        s["params"]
    )
    return {"params": descent(s["params"], grads, 1 / seen), "seen": seen}, loss


@step(seen=zero())
def rows_counted_in_the_loss(s: Any, x: Any, y: Any) -> Any:
    loss_of = lambda p: (error(p, x, y), s["seen"] + len(x))
    (loss, seen), grads = gradients(loss_of, has_aux=True)(s["params"])
    return {"params": descent(s["params"], grads, 1 / seen), "seen": seen}, loss


@step(tokens=zero())
def tokens(s: Any, x: Any, y: Any) -> Any:
    mask = (y > 0).astype(float)
    count = mask.sum()
    loss, grads = gradients(lambda p: ((model(p, x) - y) ** 2 * mask).sum() / count + penalty(p))(
        s["params"]
    )
    return (
        {"params": descent(s["params"], grads), "tokens": s["tokens"] + count},
        loss,
        {"last": count},
    )


@step(norm=zero())
def norm_of_parameters(s: Any, x: Any, y: Any) -> Any:
    (loss, norm), grads = gradients(lambda p: (error(p, x, y), optax.tree.norm(p)), has_aux=True)(
        s["params"]
    )
    return {"params": descent(s["params"], grads, 0.1 * norm), "norm": norm}, loss


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = lambda n, m: nnx.Linear(n, m, param_dtype=jnp.float64, rngs=rngs)
        self.layers = nnx.List([linear(6, 8), linear(8, 8)])
        self.drops = nnx.List([nnx.Dropout(0.3, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)])
        self.last = linear(8, 4)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(jnp.tanh(layer(x)))
        return self.last(x)


def of_nnx() -> tuple[Any, Step]:
    """Return a model with dropouts in two stages.

    Each call of the model increments the counts of the keys.
    """
    tx, start = optax.adam(1e-2), nnx.Rngs(params=0, dropout=1)
    graph, params, rest = nnx.split(Dropped(start), nnx.Param, ...)

    def train(s: Any, x: Any, y: Any) -> Any:
        def loss_of(p: Any) -> Any:
            net = nnx.merge(graph, p, s["rest"], copy=True)
            return jnp.mean((net(x) - y) ** 2), nnx.split(net, nnx.Param, ...)[2]

        (loss, rest), grads = gradients(loss_of, has_aux=True)(s["params"])
        updates, opt = tx.update(grads, s["opt"], s["params"])
        return {"params": optax.apply_updates(s["params"], updates), "rest": rest, "opt": opt}, loss

    return {"params": params, "rest": rest, "opt": tx.init(params)}, train


def data(rows: int) -> Any:
    rng = np.random.default_rng(rows)
    return rng.normal(size=(rows, 6)), rng.normal(size=(rows, 4))


def planned(state: Any, fn: Step, rows: int = 8, **options: Any) -> Any:
    main, startup = (
        dtrans.trace(fn, state, *data(rows)),
        dtrans.trace(lambda: jax.tree.map(jnp.asarray, state)),
    )
    return dtrans.pipeline(main, startup, **{"num_stages": 2, "num_micro_batch": 2, **options})


def numbers(tree: Any) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [
        np.asarray(jax.random.key_data(x) if is_key(x) else x)
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]


def check(state: Any, fn: Step, manner: str, sizes: tuple[int, ...]) -> None:
    with compiled_quickly():
        plan = planned(state, fn, sizes[0], **MANNERS[manner])
        job = plan.simulate() if manner.startswith("simulate") else plan.on_mesh()
        there, alone, alone_step = job.init(), state, jax.jit(fn)
        for rows in sizes:
            there, *found = job.step(there, *data(rows))
            alone, *wanted = alone_step(alone, *data(rows))
            for a, b in zip(numbers(found), numbers(wanted), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
        for a, b in zip(numbers(job.gather(there)), numbers(alone), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_plans_with_counters_and_keys_compute_the_step(name: str) -> None:
    state, fn = STEPS[name]
    plan = planned({"params": weights(), **state}, fn)
    for rows in (8, 16):
        assert (
            report := plan.verify(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in data(rows)))
        ), str(report)


@pytest.mark.parametrize("name", ["typed_key", "rows_that_both_read"])
def test_counters_and_keys_are_one_devices(name: str) -> None:
    state, fn = STEPS[name]
    check({"params": weights(), **state}, fn, "simulate", (8, 16))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("manner", list(MANNERS)[1:])
@pytest.mark.parametrize("name", STEPS)
def test_they_are_in_every_manner(name: str, manner: str) -> None:
    state, fn = STEPS[name]
    sizes = (8, 16) if "one" not in manner else (8, 8)
    check({"params": weights(), **state}, fn, manner, sizes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("manner", MANNERS)
def test_a_model_of_nnx_with_dropout_is_one_devices(manner: str) -> None:
    check(*of_nnx(), manner, (8, 8))


def by_loss(s: Any, x: Any, y: Any) -> Any:
    loss, grads = gradients(lambda p: error(p, x, y))(s["params"])
    return {"params": descent(s["params"], grads, 0.1 / (1 + loss)), "n": s["n"]}, loss


def by_largest(s: Any, x: Any, y: Any) -> Any:
    loss_of = lambda p: (error(p, x, y), jnp.abs(x @ p["w"]).max())
    (loss, largest), grads = gradients(loss_of, has_aux=True)(s["params"])
    return {"params": descent(s["params"], grads, 0.1 / largest), "n": s["n"]}, loss


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("fn", [by_loss, by_largest])
def test_an_update_that_reads_the_loss_is_refused_by_its_line(fn: Step, micro: int) -> None:
    state = {"params": weights(), "n": zero()}
    told = (
        r"the new s/params/\w is computed from results of the loss function "
        r"\(test_counters_and_keys.py:\d+\); .*nccl2"
    )
    with pytest.raises(GradientError, match=told):
        planned(state, fn, num_micro_batch=micro)
    # the remedy in the error works
    main = dtrans.trace(fn, state, *data(8))
    with compiled_quickly():
        startup = dtrans.trace(lambda: jax.tree.map(jnp.asarray, state))
        job = dtrans.nccl2(main, startup, trainers=2).simulate()
        found, wanted = job.step(job.init(), *data(8)), fn(state, *data(8))
    for a, b in zip(numbers(job.gather(found[0])), numbers(wanted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_an_update_that_counts_rows_is_not_taken_for_a_batch_of_another_size() -> None:
    state = {"params": weights(), "seen": zero()}
    for name in ("rows_that_the_loss_reads", "rows_that_the_update_reads"):
        job = planned(state, STEPS[name][1], num_micro_batch=1).simulate()
        sizes = r"was planned for x of shape \(8, 6\), not \(16, 6\)"
        with pytest.raises(BatchError, match=f"depends on the batch size .*, and {sizes}"):
            job.step(job.init(), *data(16))


def test_the_loss_and_the_update_read_rows_of_noise() -> None:
    """Micro-batches receive their rows, which depend on no parameter.

    The update needs the planned number of rows.
    """

    def rows_of_noise(s: Any, x: Any, y: Any) -> Any:
        noise = jax.random.normal(jax.random.fold_in(KEY, s["n"]), (len(x), 6))
        loss, grads = gradients(lambda p: error(p, x + noise, y))(s["params"])
        grads["w"] += jnp.sum(noise * grads["w"].sum(), 0)[:, None]
        return {"params": descent(s["params"], grads), "n": s["n"] + 1}, loss

    state = {"params": weights(), "n": zero(int)}
    check(state, rows_of_noise, "simulate", (8, 8))
    plan = planned(state, rows_of_noise)
    assert (report := plan.verify()), str(report)
    job = plan.simulate()
    with pytest.raises(BatchError, match=r"was planned for x of shape \(8, 6\), not \(16, 6\)"):
        job.step(job.init(), *data(16))
