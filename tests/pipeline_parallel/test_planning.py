"""Test that planning a pipeline traces and divides each step once, and keeps it for the next plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dtrans
from dtrans.step import halves as halves_module, trace as trace_module
from dtrans.step.capture import captures


TX = optax.adam(1e-2)
LAYERS = {"layers": [jnp.eye(4)] * 4}
X, MASK = jnp.ones((8, 4)), jnp.ones(8)


def hidden(params: Any, x: jax.Array) -> jax.Array:
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return x


def mean_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(hidden(params, x) ** 2)


def masked_mean(params: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.mean(hidden(params, x) ** 2, axis=1) * mask) / jnp.sum(mask)


def init() -> Any:
    return LAYERS, TX.init(LAYERS)


def traced(loss: Any, *batch: jax.Array) -> tuple[dtrans.Program, dtrans.Program]:
    return dtrans.trace(dtrans.make_train_step(loss, TX), *init(), *batch), dtrans.trace(init)


class Calls:
    """Record the steps that JAX traces (batch shape and mode), and the programs that are divided."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traces: list[Any] = []
        self.divided: list[str] = []
        trace, inline_step = trace_module.lowered_jaxpr, halves_module.inline_step

        def counted_trace(fn: Any, *args: Any) -> Any:
            self.traces.append((args[-1].shape, captures()))
            return trace(fn, *args)

        def counted_open_step(program: dtrans.Program) -> Any:
            self.divided.append(str(program.jaxpr))
            return inline_step(program)

        monkeypatch.setattr(trace_module, "lowered_jaxpr", counted_trace)
        monkeypatch.setattr(halves_module, "inline_step", counted_open_step)


def test_a_plan_traces_and_divides_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan traces the step of a micro-batch unchanged, and the full step with its loss as one
    equation."""
    given, calls = traced(mean_loss, X), Calls(monkeypatch)
    dtrans.pipeline(*given, num_stages=2, num_micro_batch=4)
    assert sorted(calls.traces) == [((2, 4), False), ((8, 4), True)]
    # the full step in both modes, the step of a micro-batch before and after its rewrite, and the
    # update
    assert len(calls.divided) == len(set(calls.divided)) == 5


def test_a_plan_with_values_of_the_whole_batch_does_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan captures the full step to compute the count. Micro-batches receive the count."""
    given, calls = traced(masked_mean, X, MASK), Calls(monkeypatch)
    plan = dtrans.pipeline(*given, num_stages=2, num_micro_batch=4)
    assert plan.values is not None
    assert sorted(calls.traces) == [((2,), False), ((8,), True)]
    # the full step and the step of a micro-batch, each as traced and with the count as an argument,
    # and the update
    assert len(calls.divided) == len(set(calls.divided)) == 5


def test_another_plan_of_a_step_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = traced(mean_loss, X)
    first, calls = dtrans.pipeline(*given, num_stages=2, num_micro_batch=4), Calls(monkeypatch)
    again = dtrans.pipeline(*given, num_stages=2, num_micro_batch=4)
    assert (calls.traces, len(calls.divided)) == ([], 1)  # each plan has a separate update
    assert {n: p.fingerprint for n, p in again.programs.items()} == {
        n: p.fingerprint for n, p in first.programs.items()
    }


def test_rows_on_another_axis_are_replayed_for_other_batches() -> None:
    """Adam's count is state without axes.

    For both batches, the programs equal the programs for rows on dimension 0.
    """
    turned = lambda params, x: mean_loss(params, x.T)
    options = {"num_stages": 2, "num_micro_batch": 2}
    batch = dtrans.Batch(axes=(1,))
    plan = dtrans.pipeline(*traced(turned, X.T), batch=batch, **options)  # type: ignore[arg-type]
    first = dtrans.pipeline(*traced(mean_loss, X), **options)  # type: ignore[arg-type]
    types = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in first.main.inputs.items()}
    for rows in (8, 16):
        resized = types | {"x": jax.ShapeDtypeStruct((rows, 4), "float32")}
        found, wanted = (of.specialize([*resized.values()]).stages for of in (plan, first))
        # the first stage has two kinds of transposes: in the user's step, and added by the rewrite
        assert [s.forward.inputs.keys() for s in found] == [s.forward.inputs.keys() for s in wanted]
        assert found[1].backward.fingerprint == wanted[1].backward.fingerprint
