"""Results of sharding: ranks with slices compute one device's parameters, optimizer state and
results on the global batch.

This holds for each stage, degree, optimizer and option.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_zoo
import pytest
from helpers import distance, init_of, mlp_forward, mlp_params, plain_step, tree_close, tree_equal
from hypothesis import given, settings, strategies as st
from sharding_models import (
    MODELS,
    OPTIMIZERS,
    SMALL,
    alone,
    given_gradients,
    half_loss,
    half_params,
    job_of,
    mean_of_parts,
    numbers,
    plan_of,
    plan_of_step,
    trained,
    uneven_loss,
    uneven_params,
    zoo_step,
)

import dtrans


# -- every stage, degree, optimizer and model ------------------------------------------------------

FACTORS: Mapping[str, Sequence[Any]] = {
    "model": ["uneven", "transformer", "scan", "nested scan", "scan, cast inside, checkpoint"],
    "optimizer": list(OPTIMIZERS),
    "degree": [1, 2, 4, 8],
    "stage": [1, 2, 3],
    "fuse": [32, 0],
    "overlap": [True, False],
    "replicas": [1, 2],
}
Choice = tuple[Any, ...]


def pairwise(factors: Sequence[Sequence[Any]]) -> list[Choice]:
    """Return choices that contain all combinations of any two factors.

    The greedy algorithm is deterministic.
    """
    places = range(len(factors))
    pairs = lambda c: {(i, c[i], j, c[j]) for i, j in itertools.combinations(places, 2)}
    left = {
        (i, a, j, b)
        for i, j in itertools.combinations(places, 2)
        for a in factors[i]
        for b in factors[j]
    }
    rng, found = np.random.default_rng(0), []
    while left:
        i, a, j, b = min(left, key=str)
        drawn = []
        for _ in range(60):
            choice = [of[rng.integers(len(of))] for of in factors]
            choice[i], choice[j] = a, b
            drawn.append(tuple(choice))
        best = max(drawn, key=lambda c: len(pairs(c) & left))
        found.append(best)
        left -= pairs(best)
    return found


def on_one_device(
    model: str,
    optimizer: str,
    ranks: int,
    dtype: Any = jnp.float64,
    steps: int = 3,
    degree: int = 0,
) -> Any:
    """Return the results of one device.

    If `degree` is not 0, loops sum the gradients of `degree` ranks.
    """
    m = MODELS[model]
    ranks, degree = 1 if m.exact else ranks, degree if m.rounded else 0
    return _on_one_device(model, optimizer, ranks, jnp.dtype(dtype).name, steps, degree)


@functools.cache
def _on_one_device(
    model: str, optimizer: str, ranks: int, dtype: Any, steps: int, degree: int
) -> Any:
    """Return parameters, state and losses of one device.

    With several ranks, the gradient is the mean of the ranks' gradients.
    """
    m = MODELS[model]
    tx, params = m.around(OPTIMIZERS[optimizer]()), m.params(dtype)
    step = plain_step(m.loss, tx)
    if not m.exact:
        step = mean_of_parts(m.loss, tx, ranks, degree, m.rounded if degree else ())
    return alone(step, init_of(tx), params, [m.batch(s, dtype) for s in range(steps)])


def check(
    model: str, optimizer: str, degree: int, stage: int, fuse: float, overlap: bool, replicas: int,
    way: str = "simulate", dtype: Any = jnp.float64, rtol: float = 1e-12, **options: Any,
) -> None:  # fmt: skip
    m = MODELS[model]
    tx, params = m.around(OPTIMIZERS[optimizer]()), m.params(dtype)
    batches = [m.batch(s, dtype) for s in range(3)]
    plan = plan_of(
        m.loss, tx, params, *batches[0], stage=stage, degree=degree, replicas=replicas,
        overlap=overlap,
        bucket_MB=fuse, **options,
    )  # fmt: skip
    got = trained(plan, way, params, batches)
    summing = degree if stage > 1 else 0
    want = on_one_device(model, optimizer, degree * replicas, dtype, degree=summing)
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (got[0], params)), strict=True)
    ]
    assert sum(moved) >= len(moved) - 2, "the model must learn something"
    tree_close(got, want, rtol)


def named(choice: Choice) -> str:
    model, optimizer, degree, stage, fuse, overlap, replicas = choice
    return (
        f"{model}-{optimizer}-stage {stage}-{replicas}x{degree}"
        f"{'' if fuse else '-one by one'}{'' if overlap else '-no overlap'}"
    )


OTHERS: list[Choice] = [
    ("masked", "lamb", 4, 2, 32, True, 1),
    ("scan of checkpoint", "adafactor", 4, 3, 0, True, 2),
    ("long scan", "clip, adam", 2, 3, 32, True, 1),
    ("scan, cast inside", "adamw", 8, 3, 32, False, 1),
    ("scan, cast before", "clip, adam", 4, 3, 32, True, 2),
]
PAIRS = [*pairwise(list(FACTORS.values())), *OTHERS]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "choice",
    [pytest.param(c, marks=[pytest.mark.rotated] * (k % 2)) for k, c in enumerate(PAIRS)],
    ids=named,
)
def test_ranks_compute_what_one_device_computes(choice: Choice) -> None:
    check(*choice)


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("choice", pairwise([list(MODELS), *list(FACTORS.values())[1:]]), ids=named)
def test_every_model_computes_what_one_device_computes(choice: Choice) -> None:
    check(*choice)


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "choice", [*itertools.product(["uneven"], *list(FACTORS.values())[1:])], ids=named
)
def test_ranks_compute_what_one_device_computes_in_every_combination(choice: Choice) -> None:
    check(*choice)


ON_MESH: list[Choice] = [
    ("uneven", "clip, adam", 4, 1, 32, True, 2),
    ("uneven", "lamb", 8, 2, 0, False, 1),
    ("uneven", "adafactor", 4, 3, 0, True, 2),
    ("transformer", "clip, adam", 4, 3, 32, False, 1),
    ("scan", "adamw", 2, 3, 32, True, 4),
    ("scan, cast before", "lamb", 4, 3, 32, True, 1),
]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("choice", ON_MESH, ids=named)
def test_ranks_on_a_mesh_compute_what_one_device_computes_and_agree(choice: Choice) -> None:
    check(*choice, way="mesh")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["simulate", "mesh"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_is_that_of_one_device_to_its_precision(stage: int, way: str) -> None:
    check("uneven", "clip, adam", 4, stage, 32, True, 2, way=way, dtype=jnp.float32, rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("prefetch, segment", [(0, 0), (3, 0), (2, 1e-3), (1, 32)])
@pytest.mark.parametrize(
    "model", ["uneven", pytest.param("transformer", marks=pytest.mark.rotated), "scan"]
)
def test_what_is_gathered_ahead_of_time_or_together_is_the_same(
    model: str, prefetch: int, segment: float
) -> None:
    check(model, "adamw", 4, 3, 32, True, 1, prefetch=prefetch, gather_bucket_MB=segment)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name, degree", [("sgd", 4), ("adamw", 3)])
def test_a_leaf_of_16_bits(name: str, degree: int, stage: int) -> None:
    """Sums of these gradients are exact, so all 16-bit roundings are equal."""
    tx, params = OPTIMIZERS[name](), half_params(jnp.float64)
    batches = [numbers(s, jnp.float64, rows=12) for s in range(3)]
    plan = plan_of(half_loss, tx, params, *batches[0], stage=stage, degree=degree)
    kinds = [{plan.main.inputs[n].dtype for n in bucket.leaves} for bucket in plan.buckets]
    assert all(len(kind) == 1 for kind in kinds) and len(kinds) == 2
    got = trained(plan, "simulate", params, batches)
    want = alone(mean_of_parts(half_loss, tx, degree), init_of(tx), params, batches)
    tree_equal(got[0]["half"], want[0]["half"])
    tree_close(got, want, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_without_marks(stage: int) -> None:
    tx, params = OPTIMIZERS["clip, adam"](), uneven_params(jnp.float64)
    batches = [numbers(s, jnp.float64) for s in range(3)]
    step = plain_step(uneven_loss, tx)
    plan = plan_of_step(step, init_of(tx), params, *batches[0], stage=stage, degree=4)
    tree_close(
        trained(plan, "simulate", params, batches), alone(step, init_of(tx), params, batches), 1e-12
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_rows_are_reduced_to_meets_rows_of_the_same_number(stage: int) -> None:
    """Column sums of a square leaf have one number for each row.

    Every rank has them, and they are not rows of the leaf.
    """
    by_columns = lambda x, y: x * jnp.cumsum(jnp.sum(y, 0)[:, None] * jnp.ones((1, 5)), 1)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2) + 1e-2 * jnp.sum(
            by_columns(params["w"], params["w"])
        )

    def update(grads: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(lambda g, p: -0.1 * by_columns(g, g * p), grads, params), state

    tx = optax.GradientTransformation(lambda params: (), update)
    params = {"w": jnp.asarray(np.random.default_rng(5).normal(size=(5, 5)))}
    batches = [numbers(s, jnp.float64) for s in range(2)]
    plan = plan_of(loss, tx, params, *batches[0], stage=stage, degree=2)
    assert not plan.slices.unsliced
    want = alone(dtrans.make_train_step(loss, tx), init_of(tx), params, batches)
    tree_close(trained(plan, "simulate", params, batches), want, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_batches_of_other_sizes_are_traced_anew(stage: int) -> None:
    tx, params = OPTIMIZERS["adamw"](), uneven_params(jnp.float64)
    batches = [numbers(s, jnp.float64, rows=rows) for s, rows in enumerate((4, 12, 8))]
    plan = plan_of(uneven_loss, tx, params, *batches[0], stage=stage, degree=4)
    want = alone(plain_step(uneven_loss, tx), init_of(tx), params, batches)
    tree_close(trained(plan, "simulate", params, batches), want, 1e-12)


HARD = [
    (name, {"replicas": 2} if k % 3 else {"num_micro_batch": 2}, bool(k % 2))
    for k, name in enumerate(SMALL)
]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name, options, marked", HARD)
def test_models_that_are_hard_to_gather(name: str, options: Any, marked: bool) -> None:
    m, tx = SMALL[name], OPTIMIZERS["clip, adam"]()
    params, batches = m.params(jnp.float64), [m.batch(s, jnp.float64) for s in range(2)]
    step = dtrans.make_train_step(m.loss, tx) if marked else plain_step(m.loss, tx)
    plan = plan_of_step(step, init_of(tx), params, *batches[0], stage=3, degree=4, **options)
    tree_close(
        trained(plan, "simulate", params, batches), alone(step, init_of(tx), params, batches), 1e-12
    )


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("stage, degree, prefetch", [(1, 2, 1), (2, 3, 1), (3, 2, 0), (3, 6, 2)])
def test_models_that_are_hard_to_gather_elsewhere(
    name: str, stage: int, degree: int, prefetch: int
) -> None:
    """The reference adds up, over ranks, each rank's term of a sum."""
    m, tx = SMALL[name], OPTIMIZERS["clip, adam"]()
    params, batches = m.params(jnp.float64), [m.batch(s, jnp.float64, rows=12) for s in range(2)]
    plan = plan_of(
        m.loss, tx, params, *batches[0], stage=stage, degree=degree, reduce="sum",
        prefetch=prefetch,
        bucket_MB=0,
    )  # fmt: skip

    def total(p: Any, *batch: jax.Array) -> jax.Array:
        parts = zip(*(jnp.split(x, degree) for x in batch), strict=True)
        return sum(m.loss(p, *part) for part in parts)  # type: ignore[return-value]

    want = alone(plain_step(total, tx), init_of(tx), params, batches)
    tree_close(trained(plan, "simulate", params, batches), want, 1e-12)


# -- padding ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("optimizer, way", [
    ("clip, adam", "simulate"), ("lamb", "simulate"), ("lamb", "mesh"), ("adafactor", "simulate"),
    ("apply_if_finite", "simulate"),
])  # fmt: skip
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.rotated), 3])
def test_what_padding_holds_changes_nothing(stage: int, optimizer: str, way: str) -> None:
    finite = lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 3
    )
    tx = (finite if optimizer == "apply_if_finite" else OPTIMIZERS[optimizer])()
    params = uneven_params(jnp.float64)
    batches = [numbers(s, jnp.float64) for s in range(3)]
    plan = plan_of(uneven_loss, tx, params, *batches[0], stage=stage, degree=4)
    job = job_of(plan, way)
    clean = dirty = job.init(params)
    for k, batch in enumerate(batches):
        dirty = mask_padding(plan, dirty, [jnp.nan, jnp.inf, -jnp.inf][k])
        clean, *want = job.step(job.place_state(clean), *batch)
        dirty, *got = job.step(job.place_state(dirty), *batch)
        tree_equal(got, want)
        tree_equal(jax.device_get(job.params(dirty)), jax.device_get(job.params(clean)))
        tree_equal(jax.device_get(job.opt_state(dirty)), jax.device_get(job.opt_state(clean)))
    assert plan.memory()["padding"]


def mask_padding(plan: Any, state: Any, value: Any) -> Any:
    """Return a state whose padding is filled with a value."""

    def filled(held: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(held)
        for n, s in plan.sliced.items():
            if n in held and s.padded > s.size and jnp.issubdtype(held[n].dtype, jnp.inexact):
                where = (slice(None),) * s.axis + (slice(s.size, None),)
                host = np.array(held[n])
                host[where] = value
                new[n] = jnp.asarray(host)
        assert any(new[n] is not held[n] for n in held) or held is state.params
        return new

    return type(state)(filled(state.params), filled(state.opt_state))


# -- with the options that nccl2 mode has ----------------------------------------------------------

TX = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(0.1, momentum=0.9))
MERGE = {
    "aux/any": "max", "aux/average": "mean", "aux/count": "sum", "aux/first": "each",
    "aux/hits": "sum",
    "aux/worst": "max", "params/top": "max",
}  # fmt: skip


def weighted_loss(net: Any, x: jax.Array, y: jax.Array, mask: jax.Array, total: bool) -> Any:
    """Return the mean or the sum over the rows that the mask counts, and results for each kind of
    merge."""
    predicted = mlp_forward(net, x)
    each = jnp.sum((predicted - y) ** 2, -1) * mask
    count = jnp.sum(mask)
    return jnp.sum(each) / (1 if total else count), {
        "any": jnp.any(x > 2.5), "average": x[:, 0] @ mask / count, "bias": net["b1"],
        "count": count,
        "first": jnp.max(x[:, 0]), "hits": jnp.sum(x > 0, dtype=jnp.int32), "predicted": predicted,
        "rows": x.shape[0], "worst": jnp.max(each),
    }  # fmt: skip


def full_step(total: bool = False) -> Any:
    """Return a step with statistics in its parameters, and with results that it computes from
    gradients."""

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
        of = lambda net: weighted_loss(net, x, y, mask, total)
        (value, aux), grads = dtrans.value_and_grad(of, has_aux=True)(params["net"])
        updates, opt_state = TX.update(grads, opt_state, params["net"])
        new = {
            "net": optax.apply_updates(params["net"], updates),
            "seen": 0.5 * params["seen"] + 0.5 * jnp.mean(x, 0),
            "top": jnp.maximum(params["top"], jnp.max(x)),
        }
        along = jax.tree.map(lambda g, p: jnp.sum(g * p), grads, params["net"])
        return (
            new,
            opt_state,
            value,
            aux | {"norm": optax.tree.norm(grads), "grads": grads, "along": along},
        )

    return step


def full_init(params: Any) -> Any:
    return params, TX.init(params["net"])


def full_start() -> Any:
    return {"net": mlp_params((5, 7, 3), jnp.float64), "seen": jnp.ones(5), "top": jnp.zeros(())}


def full_batches(weighted: bool) -> list[Any]:
    """Return batches.

    If the option is weighted, they have a mask whose sums differ between parts.
    """
    made = []
    for seed in range(2):
        mask = np.random.default_rng(seed).integers(0, 3, 32) + 0.5 if weighted else np.ones(32)
        made.append((*numbers(seed, jnp.float64, rows=32), jnp.asarray(mask)))
    return made


COUNT, WINDOW, ALONE = {"example_count": "aux/count"}, {"num_micro_batch": 4}, {"bucket_MB": 0}
CLIP, HALF = {"clip_local_norm": 3.5}, {"compress": "bf16"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "weight": COUNT,
    "sum": {"reduce": "sum"},
    "window": WINDOW,
    "chain": {"chains": 1} | ALONE,
    "chains": {"chains": 2} | ALONE,
    "splits": {"max_buckets": 3},
    "clip": CLIP,
    "clip, weight": CLIP | COUNT,
    "clip, window": CLIP | WINDOW,
    "sum, window": {"reduce": "sum"} | WINDOW,
    "weight, window": COUNT | WINDOW,
    "weight, chains": COUNT | {"chains": 2} | ALONE,
    "bf16": HALF,
    "fp16, scaled": {"compress": "fp16", "compress_scale": 64.0},
    "bf16, weight": HALF | COUNT,
    "bf16, window": HALF | WINDOW,
}


@functools.cache
def averaged(name: str, ranks: int) -> Any:
    """Return the results of nccl2 mode with these options."""
    options, merge = OPTIONS[name], merge_of(OPTIONS[name])
    batches, init = full_batches("example_count" in options), full_init
    main = dtrans.trace(
        full_step("reduce" in options), *jax.eval_shape(init, full_start()), *batches[0]
    )
    plan: Any = flat_options.nccl2(
        main, dtrans.trace(init, full_start()), trainers=ranks, merge=merge, **options
    )
    return trained(plan, "simulate", full_start(), batches)


def merge_of(options: Mapping[str, Any]) -> dict[str, str]:
    return MERGE | ({"aux/first": "max"} if "num_micro_batch" in options else {})


CASES = [
    pytest.param(
        name, stage, degree, replicas, marks=[] if stage == 3 - k % 3 else pytest.mark.rotated
    )
    for k, name in enumerate(OPTIONS)
    for stage in (1, 2, 3)
    # two numbers have the same rounded sum in any order
    for degree, replicas in [(2, 1) if "16" in name else (4, 1) if (k + stage) % 2 else (2, 2)]
    if not (stage > 1 and name in ("weight, window", "clip, window"))  # planning refuses these
    if not (stage > 1 and name == "bf16, window")  # each micro-step is rounded
]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name, stage, degree, replicas", CASES)
def test_every_option_does_what_it_does_in_nccl2_mode(
    name: str, stage: int, degree: int, replicas: int
) -> None:
    options = OPTIONS[name]
    batches = full_batches("example_count" in options)
    plan = plan_of_step(
        full_step("reduce" in options), full_init, full_start(), *batches[0], stage=stage,
        degree=degree,
        replicas=replicas, merge=merge_of(options), **options,
    )  # fmt: skip
    tree_close(
        trained(plan, "simulate", full_start(), batches), averaged(name, degree * replicas), 1e-12
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage, replicas", [pytest.param(2, 1, marks=pytest.mark.rotated), (3, 2)])
def test_micro_steps_are_compressed_each(stage: int, replicas: int) -> None:
    """The sent value of each micro-step is rounded once, and so is each sum.

    A rounding is at most the unit roundoff of the summands. Between groups, the sum of all
    micro-steps is sent once more.
    """
    tx, params, degree, steps = optax.sgd(1.0), uneven_params(jnp.float64), 2, 2
    batch = numbers(0, jnp.float64)
    plan = plan_of(
        uneven_loss, tx, params, *batch, stage=stage, degree=degree, replicas=replicas,
        compress="bf16",
        num_micro_batch=steps,
    )  # fmt: skip
    got, _, _ = trained(plan, "simulate", params, [batch])
    count = degree * replicas * steps
    parts = zip(*(jnp.split(x, count) for x in batch), strict=True)
    grads = jax.device_get([jax.grad(uneven_loss)(params, *part) for part in parts])
    errors = []
    for n, p in params.items():
        parts_of = np.stack([g[n] for g in grads]) / count
        error, size = np.abs((p - got[n]) - parts_of.sum(0)), np.abs(parts_of).sum(0)
        assert np.all(error <= 1.05 * 2.0**-8 * size * (2 if replicas == 1 else 4) + 1e-15), n
        errors.append((error / np.maximum(size, 1e-15)).max())
    assert max(errors) > 2.0**-8 / 100, "nothing was rounded"


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options",
    [{}, {"replicas": 2}, {"num_micro_batch": 2}, {"example_count": "aux/count"}],
    ids=str,
)
@pytest.mark.parametrize(
    "stage",
    [pytest.param(1, marks=pytest.mark.rotated), pytest.param(2, marks=pytest.mark.rotated), 3],
)
def test_results_that_are_computed_from_updates_and_new_parameters(
    stage: int, options: Any
) -> None:
    # without a state
    tx = MODELS["uneven"].around(optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1)))

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = dtrans.value_and_grad(uneven_loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, opt_state, value, {
            "bad": jnp.sum(jnp.stack([jnp.sum(~jnp.isfinite(g)) for g in jax.tree.leaves(grads)])),
            "count": jnp.asarray(x.shape[0], x.dtype),
            "length": optax.tree.norm(new),
            "most": jax.tree.map(lambda g: jnp.max(jnp.abs(g)), grads),
            "moved": optax.tree.norm(updates),
            "new": new["w1"],
            "old": params["w2"],
            "product": grads["w1"] @ params["w2"],
            "trust": jax.tree.map(lambda p, u: jnp.sum(p * u), params, updates),
        }  # fmt: skip

    params, batches = uneven_params(jnp.float64), [numbers(s, jnp.float64) for s in range(2)]
    merge = {} if "example_count" in options else {"aux/count": "sum"}
    plan = plan_of_step(
        step, init_of(tx), params, *batches[0], stage=stage, degree=4, merge=merge, **options
    )
    got, want = (
        trained(plan, "simulate", params, batches),
        alone(step, init_of(tx), params, batches),
    )
    tree_close(got, want, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["weight", "window"])
def test_parts_of_unequal_weight_and_micro_steps_are_one_batch(name: str, stage: int) -> None:
    options = OPTIONS[name]
    batches = full_batches("example_count" in options)
    plan = plan_of_step(
        full_step(),
        full_init,
        full_start(),
        *batches[0],
        stage=stage,
        degree=4,
        merge=merge_of(options),
        **options,
    )
    got = trained(plan, "mesh", full_start(), batches)
    want = alone(full_step(), full_init, full_start(), batches)
    for made in (got, want):
        del made[0]["seen"]  # a mean of means: over unequal parts, or of micro-steps
        for _, aux in made[2]:
            del aux["first"], aux["rows"]
    tree_close(got, want, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_has_a_key_of_its_own(stage: int) -> None:
    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] + jax.random.normal(key, (x.shape[0], 3))) ** 2)

    tx, params = OPTIMIZERS["adamw"](), {"w": uneven_params(jnp.float64)["w1"][:, :3]}
    x, _ = numbers(0, jnp.float64)
    key = jax.random.key(7)
    exact = trained(
        plan_of(loss, tx, params, x, key, stage=stage, degree=2), "simulate", params, [(x, key)]
    )
    tree_close(exact, alone(plain_step(loss, tx), init_of(tx), params, [(x, key)]), 1e-12)
    plan = plan_of(loss, tx, params, x, key, stage=stage, degree=2, replicas=2, kind="local")
    got = trained(plan, "simulate", params, [(x, key)])

    def mean(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return (
            sum(
                loss(params, part, jax.random.fold_in(key, k))
                for k, part in enumerate(jnp.split(x, 4))
            )
            / 4
        )

    tree_close(got, alone(plain_step(mean, tx), init_of(tx), params, [(x, key)]), 1e-12)
    plan = plan_of(lambda p, x, key: loss(p, x, jax.random.fold_in(key, 0)) * 0 + jnp.mean(
        (x @ p["w"] + jax.random.normal(key)) ** 2), tx, params, x, key, stage=stage, degree=4,
        unsplit_inputs=("key",)
    )  # fmt: skip
    same = alone(
        plain_step(lambda p, x, key: jnp.mean((x @ p["w"] + jax.random.normal(key)) ** 2), tx),
        init_of(tx), params, [(x, key)],
    )  # fmt: skip
    tree_close(trained(plan, "simulate", params, [(x, key)]), same, 1e-12)


# -- any optimizer, any leaves ---------------------------------------------------------------------


# optax adds up products of bfloat16 leaves in 32 bits, and ranks add their parts in another order
SUMMED_IN_32_BITS = ("lbfgs, linesearch=None",)


def zoo_case(name: str, stage: int, degree: int) -> None:
    case = optimizer_zoo.CASES[name]
    params = case.params(jnp.float64)
    if name in SUMMED_IN_32_BITS:
        params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
    batches = given_gradients(case, params, degree)
    init = init_of(case.make())
    plan = plan_of_step(
        zoo_step(case, None), init, params, *batches[0], kind="local", stage=stage, degree=degree
    )
    got = trained(plan, "simulate", params, batches)
    want = alone(zoo_step(case, degree), init, params, batches)
    tree_close(got[:2], want[:2], 1e-12)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got[0]), jax.tree.leaves(want[0]), strict=True
    ):
        assert x.dtype != jnp.bfloat16 or distance(x, y) == 0, path


FEW = (
    "adam",
    "adafactor",
    "lars",
    "sm3",
    "muon",
    "dog",
    "flatten",
    "noisy_sgd",
    "lookahead",
    "multi_transform",
)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FEW)
def test_any_optimizer(name: str) -> None:
    zoo_case(name, 3, 3)


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [n for n in optimizer_zoo.CASES if n not in FEW])
def test_every_optimizer(name: str) -> None:
    zoo_case(name, 3, 3)


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", optimizer_zoo.CASES)
@pytest.mark.parametrize("stage, degree", [(1, 2), (2, 4)])
def test_every_optimizer_in_other_stages(name: str, stage: int, degree: int) -> None:
    zoo_case(name, stage, degree)


shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5)
SIMPLE = (
    "adafactor", "adam", "lamb", "lars", "clip_by_global_norm", "clip_by_block_rms",
    "adaptive_grad_clip", "centralize",
    "sgd, momentum", "novograd", "MultiSteps, global norm inside", "apply_if_finite",
)  # fmt: skip


@given(
    shapes,
    st.sampled_from(SIMPLE),
    st.integers(2, 6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1e-4, 32]),
)
@settings(derandomize=True)
def test_any_leaves(
    found: Sequence[tuple[int, ...]], name: str, degree: int, stage: int, fuse: float
) -> None:
    with jax.enable_x64(True):
        case = optimizer_zoo.CASES[name]
        rng = np.random.default_rng(len(found))
        params = {f"p{i}": jnp.asarray(rng.normal(size=s)) for i, s in enumerate(found)}
        batches = given_gradients(case, params, degree, steps=2)
        init = init_of(case.make())
        plan = plan_of_step(
            zoo_step(case, None),
            init,
            params,
            *batches[0],
            kind="local",
            stage=stage,
            degree=degree,
            bucket_MB=fuse,
        )
        got = trained(plan, "simulate", params, batches)
        tree_close(got[:2], alone(zoo_step(case, degree), init, params, batches)[:2], 1e-12)
