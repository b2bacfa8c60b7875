"""`dtrans.local()`: a part of an exact step reduces over each trainer's own rows.

The reference is one device that runs the scope separately on each trainer's rows, as ghost batch
norm does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance

import dtrans
from dtrans.errors import BatchError, ConfigError
from dtrans.plan import runner_of
from dtrans.verification.check import Comparison


ROWS = 12
KINDS = ("mean", "masked", "maximum", "loop")
MODES: dict[str, Callable[..., Any]] = {
    "nccl2": lambda m, s, n: dtrans.nccl2(m, s, trainers=n),
    "sharding": lambda m, s, n: dtrans.sharding(
        m, s, degree=n, stage=3, slices=dtrans.Slicing(min_slice_size=0)
    ),
    "pserver": lambda m, s, n: dtrans.pserver(m, s, pservers="127.0.0.1:6174", trainers=n),
}


def parameters() -> dict[str, jax.Array]:
    """Return parameters.

    Only the loop reads `layers`, and only the penalty reads them elsewhere.
    """
    rng = np.random.default_rng(0)
    shapes = {"w": (5, 4), "scale": (4,), "shift": (4,), "layers": (3, 4, 4), "v": (4, 3)}
    return {n: jnp.asarray(rng.normal(size=shape)) for n, shape in shapes.items()}


def normalised(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = h.mean(0)
    variance = jnp.mean((h - mean) ** 2, axis=0)
    return (h - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["shift"], mean


def in_scope(f: Callable[..., Any]) -> Callable[..., Any]:
    def scoped(*args: Any) -> Any:
        with dtrans.local():
            return f(*args)

    return scoped


def by_parts(count: int) -> Callable[..., Any]:
    """Return a function that runs the scope on each of `count` parts of the rows, and averages
    statistics."""

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def parts(params: Any, h: jax.Array) -> Any:
            made, mean = jax.vmap(lambda part: f(params, part))(h.reshape(count, -1, *h.shape[1:]))
            return made.reshape(h.shape), mean.mean(0)

        return parts

    return of


def step_of(kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step with one state; `own` runs the scope."""
    tx = optax.adam(0.1)

    def loss(params: Any, x: jax.Array, mask: jax.Array) -> Any:
        h = x @ params["w"]
        norm = own(normalised)
        if kind == "maximum":
            h, mean = own(lambda _, h: (h / jnp.abs(h).max(0), jnp.zeros(4)))(params, h)
        elif kind == "loop":

            def layer(h: jax.Array, w: jax.Array) -> Any:
                h, mean = norm(params, h @ w)
                return jnp.tanh(h), mean

            h, means = jax.lax.scan(layer, h, params["layers"])
            mean = means.sum(0)
        else:
            h, mean = norm(params, h)
        each = jnp.sum((jnp.tanh(h) @ params["v"]) ** 2, axis=1)
        value = jnp.sum(each * mask) / jnp.sum(mask) if kind == "masked" else jnp.mean(each)
        return value + 0.01 * sum(jnp.sum(p**2) for p in params.values()), mean

    def step(state: Any, x: jax.Array, mask: jax.Array) -> Any:
        params, opt_state, running = state
        (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(params, x, mask)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, 0.9 * running + 0.1 * mean), value

    return step


def data(rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(rows, 5))), jnp.asarray((rng.random(rows) > 0.4) * 1.0)


def first() -> Any:
    params = parameters()
    return params, optax.adam(0.1).init(params), jnp.zeros(4)


def planned(kind: str, mode: str, trainers: int) -> Any:
    part = [x[: ROWS // trainers] for x in data()]
    main = dtrans.trace(step_of(kind, in_scope), jax.eval_shape(first), *part)
    return MODES[mode](main, dtrans.trace(first), trainers)


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_compute_the_step_on_parts_of_the_batch(kind: str, mode: str, trainers: int) -> None:
    """The reference is a step of one device that contains the parts of all trainers."""
    plan, types = planned(kind, mode, trainers), jax.eval_shape(data)
    parts = dtrans.trace(step_of(kind, by_parts(trainers)), jax.eval_shape(first), *types)
    alone = dtrans.nccl2(parts, dtrans.trace(first), trainers=1)
    names = [n for spec in alone.main.args[2:] for n in spec.names]
    traced = runner_of(plan, "verify")(plan, types)
    traced = dataclasses.replace(traced, equal_parts={}, unevaluated=())
    comparison = Comparison(
        alone.main, traced, dict(zip(names, types, strict=True)), startup=plan.startup
    )
    assert (report := comparison.check(f"{kind}, {mode}")), str(report)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scope_is_of_each_trainers_rows_and_all_else_of_all(
    kind: str, mode: str, trainers: int
) -> None:
    plan = planned(kind, mode, trainers)
    job = plan.simulate()
    state, alone = job.init(), first()
    reference = jax.jit(step_of(kind, by_parts(trainers)))
    for _ in range(2):
        state, value = job.step(state, *data())
        alone, want = reference(alone, *data())
        assert distance(value, want) < 1e-12
    for got, want in zip(jax.tree.leaves(job.gather(state)), jax.tree.leaves(alone), strict=True):
        assert distance(got, want) < 1e-12


@pytest.mark.usefixtures("x64")
def test_what_remains_to_be_exchanged_is_what_leaves_the_scope() -> None:
    """Trainers exchange only the statistics of the state.

    An exact batch norm also exchanges sums, forward and backward.
    """
    note, *moved = (
        n for n in planned("mean", "nccl2", 2).notes if "exact" in n or n.startswith("  ")
    )
    assert (
        note == "exact: sum over 12 rows, with an exchange across the batch, with dtrans.local() "
        "reductions over each trainer's rows"
    )
    assert len(moved) == 1 and moved[0].startswith("  all_reduce for test_local_scope.py:")
    assert moved[0].endswith(": 32 bytes in 1")


def without_state(params: Any, x: jax.Array) -> jax.Array:
    h, _ = in_scope(normalised)(params, x @ params["w"])
    return jnp.mean((jnp.tanh(h) @ params["v"]) ** 2)


def plans_of(loss: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    tx = optax.sgd(0.1)
    params = {n: p for n, p in parameters().items() if n != "layers"}
    init = lambda: (params, tx.init(params))
    traced = lambda rows: dtrans.trace(dtrans.make_train_step(loss, tx), *init(), data(rows)[0])
    startup = dtrans.trace(init)
    servers: dict[str, Any] = {"pservers": "127.0.0.1:6174", "trainers": 2}
    return {
        "nccl2": lambda: dtrans.nccl2(traced(6), startup, trainers=2),
        "asynchronous": lambda: dtrans.pserver(traced(6), startup, mode=dtrans.Async(), **servers),
        "pipeline": lambda: dtrans.pipeline(traced(12), startup, num_stages=2, num_micro_batch=2),
    }


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", ["nccl2", "asynchronous", "pipeline"])
def test_where_nothing_leaves_it_the_step_is_the_mean_of_its_parts(mode: str) -> None:
    plan = plans_of(without_state)[mode]()
    way = "sum" if mode == "pipeline" else "mean"
    assert (
        f"exact: {way} over 12 rows, with dtrans.local() reductions over each trainer's rows"
        in "\n".join(plan.notes)
    )


@pytest.mark.usefixtures("x64")
def test_micro_batches_have_statistics_of_their_own_as_trainers_have() -> None:
    found = []
    for mode in ("nccl2", "pipeline"):
        job = plans_of(without_state)[mode]().simulate()
        state, loss = job.step(job.init(), data(12)[0])
        found.append((loss, job.params(state)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12), *found)


@pytest.mark.usefixtures("x64")
def test_trainers_must_divide_the_rows() -> None:
    job = planned("mean", "nccl2", 3).simulate()
    state = job.init()
    with pytest.raises(
        BatchError,
        match=r"x has 13 rows for 3 trainers; dtrans.local",
    ):
        job.step(state, *data(13))


@pytest.mark.usefixtures("x64")
def test_rows_that_meet_rows_are_refused() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params["w"]
        with dtrans.local():
            similar = h @ h.T
        return jnp.mean(jax.nn.logsumexp(similar, axis=1)) + jnp.sum(params["v"] ** 2)

    with pytest.raises(
        ConfigError, match=r" inside dtrans.local\(\) mixes rows of the batch. Over its own rows"
    ):
        plans_of(loss)["nccl2"]()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_of_a_leaf_that_no_row_reads_is_not_taken_for_what_all_ranks_make(
    stage: int,
) -> None:
    """If the step is written for parts, only the first rank adds the penalty."""
    tx = optax.sgd(0.1)

    def loss(params: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        each = jnp.sum((x @ params["w"]) ** 2, axis=1)
        return jnp.sum(each * mask) / jnp.sum(mask) + 0.01 * jnp.sum(params["layers"] ** 2)

    params = {n: parameters()[n] for n in ("layers", "w")}
    init = lambda: (params, tx.init(params))
    step = dtrans.make_train_step(loss, tx)
    main = dtrans.trace(step, *init(), *(x[:6] for x in data()))
    sliced = dtrans.Slicing(min_slice_size=0)
    job = dtrans.sharding(main, dtrans.trace(init), degree=2, stage=stage, slices=sliced).simulate()
    state, _ = job.step(job.init(), *data())
    want, *_ = jax.jit(step)(*init(), *data())
    for n, got in job.params(state).items():
        assert distance(got, want[n]) < 1e-12, n


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", [*MODES, "pipeline"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_verified_with_equal_parts_of_the_batch(kind: str, mode: str) -> None:
    if mode == "pipeline":
        plan, types = plans_of(without_state)[mode](), jax.eval_shape(data)[:1]
    else:
        plan, types = planned(kind, mode, 3), jax.eval_shape(data)
    report = plan.verify(*types)
    assert report.equal and not report.complete and not report.skipped, str(report)
    assert "dtrans.local()" in str(report)


@pytest.mark.usefixtures("x64")
def test_a_plan_of_another_step_is_not_equal_with_equal_parts() -> None:
    plan = planned("mean", "nccl2", 3)
    report = dataclasses.replace(plan, main=planned("loop", "nccl2", 3).main).verify(
        *jax.eval_shape(data)
    )
    assert "loss" in report.skipped and "loss" not in report.compared, str(report)
