"""Jobs whose trainers take steps independently are compared with a replay on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dtrans
from dtrans.data_parallel import accumulation
from dtrans.ops import all_reduce_p
from dtrans.run.base import lowering


pytestmark = pytest.mark.usefixtures("x64")


def _loss(params: Any, key: Any, x: Any, mask: Any) -> Any:
    noise = 1 + 0.1 * jax.random.normal(key, x.shape)
    each = jnp.sum(jnp.tanh((x * noise) @ params["w"] + params["b"]) ** 2, -1) * mask
    return jnp.sum(each) / jnp.sum(mask), {
        "count": jnp.sum(mask),
        "each": each,
        "worst": jnp.max(each),
    }


def _plan(trainers: int, steps: int, **options: Any) -> dtrans.CollectivePlan:
    tx = optax.adam(optax.linear_schedule(0.1, 0.01, 10))
    init = lambda: (p := {"w": jnp.arange(8.0).reshape(4, 2) / 7, "b": jnp.ones(2)}, tx.init(p))
    batch = jax.random.key(0), jnp.ones((24, 4)), jnp.ones(24)
    main = dtrans.trace(dtrans.make_train_step(_loss, tx, has_aux=True), *init(), *batch)
    how = dtrans.Batch("local", merge={"aux/worst": "max", "aux/count": "sum"}, **options)
    return dtrans.nccl2(main, dtrans.trace(init), trainers=trainers, local_sgd=steps, batch=how)


@pytest.mark.parametrize(
    "options", [{}, {"example_count": "aux/count"}], ids=["equal weights", "weighted"]
)
@pytest.mark.parametrize(("trainers", "steps"), [(3, 1), (2, 3)])
def test_local_steps_are_those_of_the_replay(
    trainers: int, steps: int, options: dict[str, str]
) -> None:
    report = _plan(trainers, steps, **options).verify()
    assert report, str(report)
    assert {"loss", "aux/each", "aux/worst"} <= {*report.compared}


def _wrong_sum(*xs: Any, over: Any, **params: Any) -> Any:
    return [2 * jax.lax.psum(x, over) for x in xs]


def _without_the_last(*xs: Any, over: Any, **params: Any) -> Any:
    return [jax.lax.all_gather(x, over)[:-1].sum(0) for x in xs]


@pytest.mark.parametrize("fault", [_wrong_sum, _without_the_last])
def test_a_wrong_average_is_seen(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lowering.OVER_AXIS, all_reduce_p, fault)
    report = _plan(3, 2).verify()
    assert any("w" in d.output for d in report.differences), str(report)


def test_rows_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = accumulation.parts_of
    monkeypatch.setattr(
        accumulation, "parts_of", lambda x, axis, count: jnp.flip(whole(x, axis, count), 0)
    )
    report = _plan(3, 2).verify()
    assert any("w" in d.output for d in report.differences), str(report)
