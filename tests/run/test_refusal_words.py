"""Errors mention only roles that the strategy has, and only methods and options that the user
wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dtrans
from dtrans.errors import DtransError


X, Y = jnp.ones((12, 4)), jnp.ones((12,))
TX = optax.adam(0.1)


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(y) * jnp.sum(params["w"])


def init(key: Any) -> Any:
    params = {"w": jnp.ones(4)}
    return params, TX.init(params)


STEP = dtrans.make_train_step(loss_of, TX)


def with_value(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    """Return a step that passes the loss to its optimizer."""
    plateau = optax.contrib.reduce_on_plateau()
    value, grads = dtrans.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = plateau.update(grads, opt_state, params, value=value)
    return optax.apply_updates(params, updates), opt_state, value


def plateau_init(key: Any) -> Any:
    params = {"w": jnp.ones(4)}
    return params, optax.contrib.reduce_on_plateau().init(params)


def perturbed(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    """Return a step that takes its gradient at parameters which another gradient has changed."""
    first = jax.grad(loss_of)(params, x, y)
    value, grads = jax.value_and_grad(loss_of)({"w": params["w"] + 0.1 * first["w"]}, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def printed(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    """Return a step that prints its gradient."""
    value, grads = dtrans.value_and_grad(loss_of)(params, x, y)
    jax.debug.print("{}", grads["w"])
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def sorted_rows(params: Any, x: Any, y: Any) -> Any:
    with dtrans.local():
        return jnp.mean(jnp.sort(x @ params["w"]) ** 2)


def counted(params: Any, x: Any, y: Any) -> Any:
    return loss_of(params, x, y), {"positive": jnp.sum(y > 0)}


STRATEGIES: dict[str, Callable[..., Any]] = {
    "nccl2": lambda *two, **o: dtrans.nccl2(*two, trainers=5, **o),
    "sharding": lambda *two, **o: dtrans.sharding(*two, degree=5, stage=2, **o),
    "pipeline": lambda *two, **o: dtrans.pipeline(*two, num_stages=1, num_micro_batch=4, **o),
}
# words for roles that a strategy does not have
FOREIGN = {
    "nccl2": r"\b(p?servers?|ranks?|degree|stages?|micro-batch(es)?)\b",
    "sharding": r"\b(p?servers?|trainers?|stages?|micro-batch(es)?)\b",
    "pipeline": r"\b(p?servers?|ranks?|degree|trainers?)\b",
}
REMEDIES = r"dtrans\.\w+|job\.\w+|stage \d"  # an error may recommend other strategies


def traced(step: Any, make: Any = init, *batch: Any) -> Any:
    batch = batch or (X, Y)
    return dtrans.trace(step, *make(None), *batch), dtrans.trace(make, jax.random.key(0))


def attempts(plan: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """Yield calls with errors of users, and calls that some strategies refuse."""
    yield lambda: plan(*traced(STEP)[:1], dtrans.trace(lambda key: init(key)[0], jax.random.key(0)))
    yield lambda: plan(
        *traced(STEP)[:1], dtrans.trace(lambda key: (*init(key), 0.0), jax.random.key(0))
    )
    yield lambda: plan(*traced(with_value, plateau_init))
    yield lambda: plan(*traced(with_value, plateau_init), batch="local")
    yield lambda: plan(*traced(perturbed), batch="local")
    yield lambda: plan(*traced(printed))
    yield lambda: plan(*traced(dtrans.make_train_step(sorted_rows, TX)))
    yield lambda: plan(*traced(dtrans.make_train_step(counted, TX, has_aux=True)), batch="local")
    yield lambda: plan(*traced(STEP, init, X, Y[:3]))
    yield lambda: plan(*traced(STEP, init, X, Y[:3]), batch="local")
    yield lambda: plan(*traced(STEP), batch=dtrans.Batch("local", merge={"nothing": "sum"}))
    yield lambda: plan(*traced(STEP), batch=dtrans.Batch("exact", merge={"loss": "sum"}))
    yield lambda: plan(*traced(STEP), batch=dtrans.Batch("local", merge={"loss": "concat"}))
    yield lambda: plan(*traced(STEP), reduce=dtrans.Reduce("sum"))
    for way in ("on_mesh", "simulate"):
        job = lambda way=way: getattr(plan(*traced(STEP), batch="local"), way)()
        yield lambda job=job: job().step(job().init(jax.random.key(0)), X, Y[:3])
        yield lambda job=job: job().step(job().init(jax.random.key(0)), X[:7], Y[:7])


def refusals(plan: Callable[..., Any]) -> list[str]:
    found = []
    for attempt in attempts(plan):
        try:
            attempt()
        except DtransError as e:
            found.append(str(e))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_refusals_speak_of_roles_that_the_strategy_has(name: str) -> None:
    found = refusals(STRATEGIES[name])
    assert len(found) >= 8
    for text in found:
        said = re.sub(REMEDIES, "", text)
        assert not re.search(FOREIGN[name], said), text


def test_numbers_of_roles_are_refused_under_the_name_that_was_given() -> None:
    main, startup = traced(STEP)
    for make, options, words in (
        (
            dtrans.nccl2,
            {"trainers": 0},
            "^trainers must be a positive number of trainers, it is 0$",
        ),
        (
            dtrans.pserver,
            {"trainers": 0},
            "^trainers must be a positive number of trainers, it is 0$",
        ),
        (
            dtrans.sharding,
            {"degree": 0, "stage": 1},
            "^degree must be a positive number of ranks, it is 0$",
        ),
        (dtrans.pipeline, {"num_stages": 0}, "^num_stages must be "),
    ):
        with pytest.raises(dtrans.errors.ConfigError, match=words):
            make(main, startup, **options)


def test_the_method_that_was_called_is_named() -> None:
    main, startup = traced(STEP)
    plan = dtrans.pserver(main, startup, trainers=2, mode=dtrans.Async())
    for way in ("on_mesh", "simulate"):
        with pytest.raises(
            dtrans.errors.ConfigError,
            match=rf"^{way} takes a step of all .* plan.on_cluster\(\)",
        ):
            getattr(plan, way)()
    with pytest.raises(
        dtrans.errors.ConfigError, match="^64 ranks need 64 devices, but on_mesh has 8"
    ):
        dtrans.sharding(main, startup, degree=64, stage=1).on_mesh()


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "a schedule": optax.sgd(optax.constant_schedule(0.1)),
    "adam": TX,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_init_that_forgets_the_state_of_the_optimizer_is_told_so(name: str) -> None:
    tx = OPTIMIZERS[name]
    params = {"w": jnp.ones(4)}
    main = dtrans.trace(dtrans.make_train_step(loss_of, tx), params, tx.init(params), X, Y)
    startup = dtrans.trace(lambda key: params, jax.random.key(0))
    for make, options in (
        (dtrans.nccl2, {"trainers": 2}),
        (dtrans.sharding, {"degree": 2, "stage": 3}),
        (dtrans.pserver, {"trainers": 2}),
        (dtrans.pipeline, {"num_stages": 1}),
    ):
        words = (
            r"it returns params alone, expected \(params, opt_state\); .* where opt_state is "
            r"tx.init\(params\)$"
        )
        with pytest.raises(dtrans.errors.TraceError, match=words):
            make(main, startup, **options)
