"""Models for tests of sharding, each with a special difficulty, and functions that run and compare
plans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_zoo
from helpers import as_numpy, init_of, quick

import dtrans
from dtrans.zero.plan import ShardingPlan


ROWS = 16  # rows of a global batch: one for each rank of 2 groups of 8 ranks
Tree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """Model with a special difficulty.

    Attributes:
      params: dtype -> parameters.
      loss: (parameters, batch) -> loss.
      batch: (seed, dtype) -> batch.
      around: wraps an optimizer.
      exact: True if all values have the requested dtype, so that a sum over ranks equals the sum of
        one device.
      rounded: leaves whose gradients a loop returns in 16 bits. From stage 2 on, the loop sums
        these gradients over ranks, and rounds the sum.
    """

    params: Callable[[Any], Tree]
    loss: Callable[..., jax.Array]
    batch: Callable[[int, Any], tuple[jax.Array, ...]]
    around: Callable[[Any], Any] = lambda tx: tx
    exact: bool = True
    rounded: tuple[str, ...] = ()


def _drawn(dtype: Any, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s) / max(1.0, np.sqrt(s[-2] if len(s) > 1 else 4)),
                           dtype)
            for n, s in shapes.items()}  # fmt: skip


# -- leaves of every kind --------------------------------------------------------------------------


def uneven_params(dtype: Any) -> Tree:
    """Return leaves with a number of rows that no degree divides, with one row, and without
    dimensions.

    One more leaf is frozen, and the loss does not read another.
    """
    return _drawn(
        dtype,
        w1=(5, 7),
        b1=(7,),
        w2=(7, 11),
        b2=(11,),
        w3=(11, 3),
        row=(1, 11),
        scale=(),
        frozen=(7, 7),
        unread=(9, 2),
    )


def uneven_loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["frozen"]
    h = jnp.tanh(h @ p["w2"] + p["b2"]) * p["row"] * p["scale"]
    return jnp.mean((h @ p["w3"] - y) ** 2)


def numbers(
    seed: int, dtype: Any, columns: int = 5, out: int = 3, rows: int = ROWS
) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, columns)), dtype), jnp.asarray(
        rng.normal(size=(rows, out)), dtype
    )


def not_frozen(params: Tree) -> Tree:
    return {n: n != "frozen" for n in params}


def freezing(tx: Any) -> Any:
    """Return the optimizer for all leaves except the frozen leaf, which has no state and never
    changes.
    """
    labels = lambda params: {n: "zero" if n == "frozen" else "train" for n in params}
    return optax.multi_transform({"train": tx, "zero": optax.set_to_zero()}, labels)


# -- unrolled layers, with an embedding that is tied to the last -----------------------------------

VOCABULARY, WIDTH, INNER, LAYERS, LENGTH = 13, 6, 10, 2, 4


def transformer_params(dtype: Any) -> Tree:
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        shapes |= {
            f"{i}_qkv": (WIDTH, 3 * WIDTH), f"{i}_out": (WIDTH, WIDTH), f"{i}_norm": (WIDTH,),
            f"{i}_up": (WIDTH, INNER), f"{i}_up_bias": (INNER,), f"{i}_down": (INNER, WIDTH),
        }  # fmt: skip
    return _drawn(dtype, **shapes)


def transformer_loss(p: Tree, tokens: jax.Array) -> jax.Array:
    h = p["embedding"][tokens]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        n = h * p[f"{i}_norm"] / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.split(n @ p[f"{i}_qkv"], 3, -1)
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
        h = h + jax.nn.softmax(scores) @ v @ p[f"{i}_out"]
        h = h + jax.nn.relu(h @ p[f"{i}_up"] + p[f"{i}_up_bias"]) @ p[f"{i}_down"]
    said = jax.nn.log_softmax(h[:, :-1] @ p["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(said, tokens[:, 1:, None], -1))


def tokens(seed: int, dtype: Any, rows: int = ROWS) -> tuple[jax.Array]:
    return (
        jnp.asarray(np.random.default_rng(seed).integers(0, VOCABULARY, (rows, LENGTH)), jnp.int32),
    )


# -- layers in a loop ------------------------------------------------------------------------------

DEPTH = 4


def stacked_params(dtype: Any, depth: int = DEPTH, width: int = 6) -> Tree:
    return _drawn(
        dtype, first=(5, width), kernel=(depth, width, width), bias=(depth, width), last=(width, 3)
    )


def _layer(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ layer["kernel"] + layer["bias"]), None


def _half_layer(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer)
    return _layer(h.astype(jnp.bfloat16), half)[0].astype(h.dtype), None


def stacked_loss(
    p: Tree,
    x: jax.Array,
    y: jax.Array,
    layer: Any = _layer,
    before: Callable[[Any], Any] = lambda s: s,
) -> jax.Array:
    stack = before({n: p[n] for n in ("kernel", "bias")})
    h, _ = jax.lax.scan(layer, x @ p["first"], stack)
    return jnp.mean((h @ p["last"] - y) ** 2)


def _in_half(stack: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), stack)


def _cast_layer(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    return _layer(h.astype(jnp.bfloat16), layer)[0].astype(h.dtype), None


def nested_params(dtype: Any) -> Tree:
    return _drawn(
        dtype, first=(5, 6), kernel=(2, 3, 6, 6), bias=(2, 3, 6), outer=(2, 6, 6), last=(6, 3)
    )


def nested_loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    def outer(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        h, _ = jax.lax.scan(_layer, h @ layer["outer"], {n: layer[n] for n in ("kernel", "bias")})
        return h, None

    h, _ = jax.lax.scan(outer, x @ p["first"], {n: p[n] for n in ("kernel", "bias", "outer")})
    return jnp.mean((h @ p["last"] - y) ** 2)


# -- a leaf of 16 bits -----------------------------------------------------------------------------


def half_params(dtype: Any) -> Tree:
    params = _drawn(dtype, w1=(5, 7), w2=(7, 3))
    return params | {"half": _drawn(jnp.bfloat16, half=(5, 3))["half"]}


def half_loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    whole = jnp.round(x)  # so that sums of gradients are exact in 16 bits
    return (
        jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - y) ** 2)
        + jnp.mean(whole @ p["half"].astype(x.dtype)) * 3
    )


MODELS: Mapping[str, Model] = {
    "uneven": Model(uneven_params, uneven_loss, numbers, freezing),
    "masked": Model(uneven_params, uneven_loss, numbers, lambda tx: optax.chain(
        optax.masked(tx, not_frozen),
        optax.masked(optax.set_to_zero(), lambda p: {n: n == "frozen" for n in p}))),
    "transformer": Model(transformer_params, transformer_loss, tokens),
    "scan": Model(stacked_params, stacked_loss, numbers),
    "scan of checkpoint": Model(stacked_params,
                                functools.partial(stacked_loss, layer=jax.checkpoint(_layer)),
                                numbers),
    "nested scan": Model(nested_params, nested_loss, numbers),
    "long scan": Model(functools.partial(stacked_params, depth=16, width=5), stacked_loss, numbers),
    # each rank rounds its gradients to 16 bits, so the job computes the mean of rounded gradients
    "scan, cast inside": Model(
        stacked_params, functools.partial(stacked_loss, layer=_half_layer), numbers, exact=False),
    "scan, cast inside, checkpoint": Model(
        stacked_params, functools.partial(stacked_loss, layer=jax.checkpoint(_half_layer)), numbers,
        exact=False),
    "scan, cast before": Model(
        stacked_params, functools.partial(stacked_loss, layer=_cast_layer, before=_in_half),
        numbers, exact=False,
        rounded=("kernel", "bias")),
}  # fmt: skip

# -- small models, each with one thing that is hard to gather or to scatter ------------------------


def _ends(p: Tree, h: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((h @ p["last"] - y) ** 2)


def _turn(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def _biased(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ layer[0] + layer[1]), None


SMALL: dict[str, Model] = {}


def _small(**shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a function that creates the leaves between the first and the last leaf of a model."""

    def add(rest: Callable[[Tree, jax.Array, jax.Array], Any]) -> Any:
        def loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
            made = rest(p, x, x @ p["first"])
            h, more = made if isinstance(made, tuple) else (made, 0)
            return _ends(p, h, y) + more

        params = lambda dtype: _drawn(dtype, first=(5, 6), last=(6, 3), **shapes)
        SMALL[rest.__name__.strip("_").replace("_", " ")] = Model(params, loss, numbers)
        return rest

    return add


@_small(a=(4, 6, 6), b=(4, 6, 6))
def _two_stacks_that_are_added(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(lambda h, w: _turn(h, w[0] + w[1]), h, (p["a"], p["b"]))[0]


@_small(a=(6, 6), b=(6, 6))
def _one_gradient_of_two_leaves(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jnp.tanh(h @ (p["a"] + p["b"]))


@_small(w=(6, 6))
def _one_layer_in_each_turn(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(lambda h, _: _turn(h, p["w"]), h, None, length=3)[0]


@_small(w=(4, 6, 6))
def _a_stack_that_is_read_elsewhere(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, h, p["w"])[0], 1e-2 * jnp.sum(p["w"] ** 2) * jnp.mean(x**2)


@_small(w=(4, 6, 6))
def _a_stack_in_two_loops(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, jax.lax.scan(_turn, h, p["w"])[0], p["w"])[0]


@_small(w=(4, 6, 6))
def _backwards_and_unrolled(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, h, p["w"], reverse=True, unroll=2)[0]


@_small(w=(4, 6, 6))
def _a_stack_turned_round(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, h, p["w"][::-1])[0]


@_small(w=(2, 2, 6, 6))
def _a_stack_of_another_shape(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, h, p["w"].reshape(4, 6, 6))[0]


@_small(w=(1, 6, 6))
def _a_stack_of_one(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, h, p["w"])[0]


@_small(w=(4, 6, 6), s=(4,))
def _numbers_for_each_layer(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    def turn(h: jax.Array, layer: Any) -> Any:
        w, s, i = layer
        return jnp.tanh(h @ w * s) * (1 + 0.1 * i), jnp.sum(h, 1)

    h, seen = jax.lax.scan(turn, h, (p["w"], p["s"], jnp.arange(4.0, dtype=h.dtype)))
    return h, 1e-3 * jnp.mean(seen**2)


@_small(w=(4, 6, 6))
def _a_loop_that_returns_its_weights(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    h, twice = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), w * 2), h, p["w"])
    return h, 1e-3 * jnp.mean(twice**2) * jnp.mean(x)


@_small(w=(6, 6), v=(6, 6))
def _a_branch(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.cond(
        p["first"][0, 0] > 0, lambda h: jnp.tanh(h @ p["w"]), lambda h: jnp.sin(h @ p["v"]), h
    )


@_small(w=(6, 6), v=(6, 6))
def _checkpoints(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    again = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
    return again(again(h, p["w"]), p["v"])


@_small(w=(0, 3), v=(3, 0))
def _nothing_in_it(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return h, jnp.sum(p["w"]) + jnp.sum(p["v"])


@_small(kernel=(3, 3, 2, 4), out=(4, 5))
def _a_convolution(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    image = jnp.broadcast_to(h[:, :, None, None], (x.shape[0], 6, 5, 2))
    made = jax.lax.conv_general_dilated(
        image, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return h, jnp.mean((made @ p["out"]) ** 2)


@_small(w=(4, 6, 6))
def _a_map_over_layers(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.vmap(lambda w: jnp.tanh(h @ w))(p["w"]).mean(0)


@_small(w=(4, 6, 6))
def _an_index_into_a_stack(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ p["w"][i]), h)


@_small(w=(6, 6))
def _read_as_it_is_and_turned(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jnp.tanh(h @ p["w"].T) @ p["w"].reshape(6, 6)


@_small(w=(4, 6, 6), b=(4, 6))
def _a_loop_in_a_checkpoint(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.checkpoint(lambda h, w, b: jax.lax.scan(_biased, h, (w, b))[0])(h, p["w"], p["b"])


@_small(w=(4, 6, 6), b=(4, 6))
def _a_loop_in_a_branch(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    loop = lambda h: jax.lax.scan(_biased, h, (p["w"], p["b"]))[0]
    return jax.lax.cond(jnp.sum(x) > -1e9, loop, lambda h: h, h)


@_small(w=(4, 6, 6))
def _a_stack_without_gradient(p: Tree, x: jax.Array, h: jax.Array) -> Any:
    return jax.lax.scan(_turn, h, jax.lax.stop_gradient(p["w"]))[0]


OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.01),
    "clip, adam": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=3),
}


# -- running ---------------------------------------------------------------------------------------


def plan_of(
    loss: Any, tx: Any, params: Tree, *batch: Any, has_aux: bool = False, **options: Any
) -> ShardingPlan:
    return plan_of_step(
        dtrans.make_train_step(loss, tx, has_aux=has_aux), init_of(tx), params, *batch, **options
    )


def plan_of_step(step: Any, init: Any, params: Tree, *batch: Any, **options: Any) -> ShardingPlan:
    """Return a plan in which every possible leaf is sliced, unless the options say otherwise."""
    main = dtrans.trace(step, *jax.eval_shape(init, params), *batch)
    options = {"min_slice_size": 0, **options}
    return flat_options.sharding(main, dtrans.trace(init, params), **options)


def job_of(plan: ShardingPlan, way: str = "simulate", fast: bool = True) -> Any:
    """Return a job; compile it fast, with a rounding wherever a type requires one."""
    job = plan.simulate() if way == "simulate" else plan.on_mesh()
    if fast:
        job._jitted = quick(job._traced)
    return job


def trained(
    plan: ShardingPlan, way: str, params: Tree, batches: Sequence[Any], fast: bool = True
) -> Any:
    """Return (parameters, optimizer state, results of each step)."""
    job, results = job_of(plan, way, fast), []
    state = job.init(params)
    for batch in batches:
        state, *rest = job.step(state, *batch)
        results.append(rest)
    ranks_agree(job, state)
    return on_host((job.params(state), job.opt_state(state), results))


def ranks_agree(job: Any, state: Any) -> None:
    """Assert that copies on several ranks of a mesh are equal, bit for bit.

    For `simulate`, this holds by construction.
    """
    for n, x in {**state.params, **state.opt_state}.items():
        seen: dict[Any, np.ndarray] = {}
        for shard in x.addressable_shards:
            own = as_numpy(shard.data)
            first = seen.setdefault(str(shard.index), own)
            assert first.tobytes() == own.tobytes(), f"{n} differs on {shard.device}"


def alone(step: Any, init: Any, params: Tree, batches: Sequence[Any]) -> Any:
    """Return the final state and the results of the steps, from one device."""
    (params, opt_state), results = init(params), []
    run = quick(step)
    for batch in batches:
        params, opt_state, *rest = run(params, opt_state, *batch)
        results.append(rest)
    return on_host((params, opt_state, results))


def on_host(tree: Tree) -> Tree:
    """Return arrays as NumPy arrays; also convert random keys."""
    return jax.tree.map(as_numpy, tree)


def mean_of_parts(
    loss: Any, tx: Any, ranks: int, degree: int = 1, rounded: Sequence[str] = ()
) -> Any:
    """Return a step of one device that averages the gradients of the parts of a batch.

    The mean of `degree` parts is rounded to 16 bits for the leaves in `rounded`.
    """
    mean = lambda *xs: sum(xs[1:], start=xs[0]) / len(xs)
    half = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)

    def step(params: Tree, opt_state: Tree, *batch: Any) -> Any:
        parts = [x.reshape(ranks, -1, *x.shape[1:]) for x in batch]
        of = [jax.value_and_grad(loss)(params, *(x[k] for x in parts)) for k in range(ranks)]
        value, grads = jax.tree.map(mean, *of)
        for n in rounded:
            each = [g[n] for _, g in of]
            groups = [half(mean(*each[k : k + degree])) for k in range(0, ranks, degree)]
            grads[n] = mean(*groups)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


# -- optimizers with prescribed gradients ----------------------------------------------------------


def given_gradients(case: Any, params: Any, degree: int, steps: int = 3) -> list[Any]:
    """Return batches with one row for each rank, which is the rank's gradient.

    Gradients of 16 bits add up exactly.
    """
    exact = lambda x: jnp.round(x * 16) / 16 if x.dtype == jnp.bfloat16 else x
    rows = lambda *xs: jnp.stack([exact(x) for x in xs])
    of = lambda step, k: optimizer_zoo.gradients(case.trained(params), step, k)
    return [(jax.tree.map(rows, *(of(step, k) for k in range(degree))),) for step in range(steps)]


def inner_product(params: Any, grads: Any) -> jax.Array:
    """Return a loss whose parameter gradient is the mean of the batch's rows."""
    of = lambda p, g: jnp.mean(jnp.sum((p * g).real.reshape(g.shape[0], -1), 1))
    products = [of(p, g) for p, g in zip(*map(jax.tree.leaves, (params, grads)), strict=True)]
    return sum(x.astype(jnp.float32) for x in products)  # type: ignore[return-value]


def zoo_step(case: Any, ranks: int | None) -> Any:
    """Return a case's step with given gradients; on one device, with the mean over all ranks."""
    tx = case.make()

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        if ranks is None:
            value, made = dtrans.value_and_grad(inner_product)(case.trained(params), grads)
        else:
            rows = [jax.tree.map(lambda x, k=k: x[k : k + 1], grads) for k in range(ranks)]
            of = [jax.value_and_grad(inner_product)(case.trained(params), row) for row in rows]
            value, made = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]) / ranks, *of)
        updates, opt_state = tx.update(made, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step
