"""Scaling exponents: functions whose value on a part is a power of the number of parts times the
part's share, and other functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dtrans
from dtrans._jax import closed, evaluate
from dtrans.batch.scaled import _NoScaleError, _Pairing
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.inline import inline_calls


X = jnp.linspace(-1, 1, 12).reshape(3, 4)
PARTS = 3


def powers(fn: Callable[[Any, int], Any]) -> list[int | None]:
    """Return the scaling exponents of a function of a value and of the number of rows; parts have
    fewer rows."""
    pair = [
        inline_calls(jax.make_jaxpr(lambda x, rows=rows: fn(x, rows))(X))
        for rows in (12 // PARTS, 12)
    ]
    return _Pairing(PARTS, {}).powers(pair, [0])


SCALES: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "mean": (lambda x, rows: jnp.sum(x) / rows, 1),
    "square": (lambda x, rows: jnp.square(x / rows), 2),
    "cube": (lambda x, rows: (x / rows) ** 3, 3),
    "product": (lambda x, rows: (x / rows) @ (x / rows).T, 2),
    "quotient": (lambda x, rows: x / (x + x / rows * rows), 0),
    "bounded": (lambda x, rows: lax.clamp(-x / rows, x / rows, 2 * x / rows), 1),
    "largest": (lambda x, rows: jnp.argmax(x / rows, 1), 0),
    "equal": (lambda x, rows: x / rows == jnp.abs(x / rows), 0),
    "repeated": (lambda x, rows: jnp.tile(x / rows, (2, 1)), 1),
    "updated": (lambda x, rows: (x / rows).at[0].subtract(1.0 / rows), 1),
    "behind a barrier": (lambda x, rows: lax.optimization_barrier(x / rows), 1),
    "out of bounds": (lambda x, rows: jnp.take(x / rows, jnp.array([7]), axis=0, mode="fill"), 1),
}
DOES_NOT: dict[str, Callable[[Any, int], Any]] = {
    "offset": lambda x, rows: x / rows + 1,
    "root": lambda x, rows: jnp.sqrt(jnp.abs(x / rows)),
    "truncated": lambda x, rows: (x / rows).astype(jnp.int32),
    "a function of some rows": lambda x, rows: (x / rows).at[0].apply(jnp.exp),
    "filled": lambda x, rows: jnp.take(
        x / rows, jnp.array([7]), axis=0, mode="fill", fill_value=7.0
    ),
    "whole quotient": lambda x, rows: lax.div(jnp.int32(7), jnp.int32(rows)) * x.astype(jnp.int32),
}


@pytest.mark.parametrize("name", SCALES)
def test_what_scales(name: str) -> None:
    fn, power = SCALES[name]
    assert powers(fn) == [power]
    np.testing.assert_allclose(fn(X, 4), np.asarray(fn(X, 12)) * float(PARTS) ** power, rtol=1e-5)


W, B = jnp.ones((4, 3)), jnp.zeros(3)
LINEAR: dict[str, Callable[..., Any]] = {
    "bias": lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) + p["b"]),
    "relu, bias and penalty": lambda p, x: (
        jnp.mean(jax.nn.relu(x @ p["w"]) + p["b"]) + 0.1 * (p["w"] ** 2).sum()
    ),
    "sum": lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) + p["b"]),
    "concatenated": lambda p, x: jnp.mean(jnp.concatenate([x @ p["w"], x @ p["w"] + p["b"]])),
}
NOT_ALONE: dict[str, Callable[..., Any]] = {
    "unbiased": lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) + p["b"]) / (len(x) - 1),
    "sum and penalty": lambda p, x: jnp.sum(jnp.tanh(x @ p["w"])) + (p["w"] ** 2).sum(),
    "noise": lambda p, x: jnp.mean(x @ p["w"] * jax.random.normal(jax.random.key(0), (len(x), 3))),
}


def asynchronous(loss: Callable[..., Any]) -> dtrans.PServerPlan:
    tx = optax.sgd(0.1)
    init = lambda: ({"w": W, "b": B}, tx.init({"w": W, "b": B}))
    main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(), jnp.ones((6, 4)))
    return dtrans.pserver(
        main, dtrans.trace(init), pservers="127.0.0.1:6174", trainers=2, mode=dtrans.Async()
    )


@pytest.mark.parametrize("name", LINEAR)
def test_asynchronous_trainers_push_gradients_of_their_part(name: str) -> None:
    """Trainers push gradients of the user's loss on their parts. One gradient depends on no row."""
    program = asynchronous(LINEAR[name]).trainer
    sent = [e.invars[0] for e in program.eqns if e.primitive.name == "send"]
    kept, _ = backward_slice(program.eqns, sent)
    eqns = [program.eqns[i] for i in kept]
    pushed = closed(
        program.inner.constvars,
        program.jaxpr.consts,
        program.inner.invars,
        sent,
        eqns,
        program.jaxpr,
    )
    x = jnp.arange(24.0).reshape(6, 4) / 10 - 1
    values = {"params/w": W + 0.5, "params/b": B, "x": x}
    found = evaluate(pushed, *(values[n] for n in program.in_names))
    wanted = jax.grad(LINEAR[name])({"w": W + 0.5, "b": B}, x)
    assert {v.aval.shape for v in sent} == {W.shape, B.shape}
    for g in found:
        np.testing.assert_allclose(g, wanted["w" if g.ndim == 2 else "b"], rtol=1e-5)


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_is_no_multiple_of_its_term_is_refused_by_its_line(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"numbers that depend on the batch size, .* for test_scaled.py:\d+\)"
    ):
        asynchronous(NOT_ALONE[name])


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_does_not_scale(name: str) -> None:
    with pytest.raises(_NoScaleError):
        powers(DOES_NOT[name])
