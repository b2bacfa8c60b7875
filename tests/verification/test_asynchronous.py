"""Asynchronous jobs are compared with a sequential replay of one order of their trainers' steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from asynchronous_modes import ASYNCHRONOUS, SERVERS

import dtrans
from dtrans.ops import split_byref_p
from dtrans.parameter_server import dc_asgd
from dtrans.protocol.trainer import traffic
from dtrans.run.base.segments import COMPUTED
from dtrans.run.parameter_server import geo
from dtrans.run.parameter_server.block_update import BlockUpdates


pytestmark = pytest.mark.usefixtures("x64")


def _loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    seen = jax.lax.stop_gradient(jnp.mean(hidden))
    return jnp.mean((hidden @ params["w2"] - y) ** 2), {"seen": seen}


def _step(tx: Any, factor: float = 1.0) -> Callable[..., Any]:
    """Return a step with a leaf that trainers compute."""

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        scaled = lambda trained: jax.tree.map(lambda v: v * factor, _loss(trained, x, y))
        trained = {n: p for n, p in params.items() if n != "seen"}
        (loss, aux), grads = dtrans.value_and_grad(scaled, has_aux=True)(trained)
        updates, opt_state = tx.update(grads, opt_state, trained)
        kept = 0.9 * params["seen"] + 0.1 * aux["seen"]
        return {**optax.apply_updates(trained, updates), "seen": kept}, opt_state, loss

    return step


def _plan(mode: Any, tx: Any, factor: float = 1.0, **options: Any) -> dtrans.PServerPlan:
    def init(key: Any) -> Any:
        first, second = jax.random.split(key)
        trained = {
            "w1": jax.random.normal(first, (4, 6)),
            "b1": jnp.zeros(6),
            "w2": jax.random.normal(second, (6, 1)),
        }
        return {**trained, "seen": jnp.zeros(())}, tx.init(trained)

    key, batch = jax.random.key(0), (jnp.ones((12, 4)), jnp.ones((12, 1)))
    main = dtrans.trace(_step(tx, factor), *jax.eval_shape(init, key), *batch)
    how = {"pservers": SERVERS, "trainers": 3, "mode": mode, "batch": "local", **options}
    small = dtrans.BlockPlacement(min_block_size=1)
    return dtrans.pserver(main, dtrans.trace(init, key), placement=small, **how)


SGD = optax.sgd(optax.linear_schedule(0.1, 0.01, 10))


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_turns_are_those_of_the_replay(mode: str) -> None:
    report = _plan(ASYNCHRONOUS[mode], SGD).verify()
    assert report, str(report)
    compared = {*report.compared}
    assert {"trainer 1/params/seen", "trainer 2/params/w1", "init/trainers/1/params/w1"} <= compared
    assert any(n.endswith("/loss") for n in compared)


@pytest.mark.parametrize("mode", ["adaptive", "geo"])
def test_state_of_the_optimizer_is_compared(mode: str) -> None:
    report = _plan(ASYNCHRONOUS[mode], optax.adamw(1e-2)).verify()
    assert report, str(report)
    assert any("mu/w1" in n for n in report.compared)


@pytest.mark.parametrize("merge", ["own", "mean"])
def test_a_leaf_that_trainers_make(merge: str) -> None:
    """If servers store the leaf, its newest value counts."""
    plan = _plan(
        ASYNCHRONOUS["async"], SGD, batch=dtrans.Batch("local", merge={"params/seen": merge})
    )
    assert (report := plan.verify()), str(report)
    assert any("servers" in n and "seen" in n for n in report.compared) == (merge == "mean")


def test_gradients_that_are_merged_are_not_followed() -> None:
    report = _plan(dtrans.Async(communicator=dtrans.CommunicatorConfig()), SGD).verify()
    assert report.equal and not report.complete
    assert "gradients that a communicator merges over several steps" in str(report)


# -- faults ----------------------------------------------------------------------------------------


def _first_rows(x: Any, *, sections: Any) -> list[Any]:
    return [x[: sections[0]] for _ in sections]


def _backward_rows(whole: Any, sections: Any) -> list[Any]:
    return [whole[len(whole) - n :] for n in sections]


def _without_one(self: BlockUpdates, arrived: Any, used: Any) -> list[str]:
    return [
        b for b, grads in self.grads.items() if b not in used and all(n in arrived for n in grads)
    ][:-1]


def _begun_twice(self: BlockUpdates, state: Any) -> Any:
    made, _ = _BEGIN(self, state)
    again, values = _BEGIN(self, {**state, **made})
    return {**made, **again}, values


_BEGIN = BlockUpdates.begin


def _uncompensated(strength: float) -> Callable[..., Any]:
    return lambda g, w, backup: [g]


def _decays_late(strength: float, decay: float) -> Callable[..., Any]:
    def fn(g: Any, w: Any, backup: Any, ms: Any) -> list[Any]:
        scale = strength / jnp.sqrt(ms + dc_asgd.EPSILON)
        return [g + scale * g * g * (w - backup), decay * ms + (1 - decay) * g * g]

    return fn


def _undivided(trainers: int) -> Callable[..., Any]:
    return lambda local, old: (
        [x - o for x, o in zip(local, old, strict=True)],
        [o + (x - o) for x, o in zip(local, old, strict=True)],
    )


def _old_is_stale(trainers: int) -> Callable[..., Any]:
    return lambda local, old: ([(x - o) / trainers for x, o in zip(local, old, strict=True)], old)


def _servers_alone(local: Any, server: Any, old: Any) -> Any:
    return list(server)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a block's offset": ("async", lambda m: m.setitem(COMPUTED, split_byref_p, _first_rows)),
    "a block's offset, cut when it is sent": (
        "half",
        lambda m: m.setattr(traffic, "rows_of", _backward_rows),
    ),
    "a gradient is dropped": ("async", lambda m: m.setattr(BlockUpdates, "ready", _without_one)),
    "a step is counted twice": (
        "communicator",
        lambda m: m.setattr(BlockUpdates, "begin", _begun_twice),
    ),
    "no compensation": ("compensated", lambda m: m.setattr(dc_asgd, "_fixed", _uncompensated)),
    "another decay": ("adaptive", lambda m: m.setattr(dc_asgd, "_adaptive", _decays_late)),
    "a sum for a mean": ("geo", lambda m: m.setattr(geo, "_pushed", _undivided)),
    "old parameters are stale": ("geo", lambda m: m.setattr(geo, "_pushed", _old_is_stale)),
    "a trainer loses what it made": ("geo", lambda m: m.setattr(geo, "_pulled", _servers_alone)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, plant = FAULTS[fault]
    plant(monkeypatch)
    report = _plan(ASYNCHRONOUS[mode], SGD).verify(points=(0,))
    assert not report.equal, str(report)
    assert any("params/" in d.output for d in report.differences)


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_the_plan_of_another_step_is_seen(mode: str) -> None:
    wrong = _plan(ASYNCHRONOUS[mode], SGD, factor=3.0)
    report = dataclasses.replace(wrong, main=_plan(ASYNCHRONOUS[mode], SGD).main).verify(
        points=(0,)
    )
    assert any("params/w1" in d.output for d in report.differences), str(report)
