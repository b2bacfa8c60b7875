"""Losses that concatenate, slice, pad or loop over the rows of a batch.

Trainers exchange only sums.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dtrans


def critic(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]


def reals_and_fakes(p: Any, x: Any, y: Any) -> Any:
    labels = jnp.concatenate([jnp.ones(len(x)), jnp.zeros(len(y))])
    return optax.sigmoid_binary_cross_entropy(critic(p, jnp.concatenate([x, y])), labels).mean()


def two_crops(p: Any, x: Any, y: Any) -> Any:
    both = critic(p, jnp.concatenate([x, y]))
    a, b = jnp.split(both, 2)
    return jnp.square(a - b).mean()


def consecutive(p: Any, x: Any, y: Any) -> Any:
    return jnp.square(critic(p, x)[:-1]).mean() + critic(p, y[1:]).mean()


def every_second(p: Any, x: Any, y: Any) -> Any:
    return jnp.square(critic(p, x[::2])).mean() - critic(p, y)[1::2].mean()


def padded(p: Any, x: Any, y: Any) -> Any:
    return jnp.square(critic(p, jnp.pad(x, ((1, 3), (0, 0))))).mean()


def over_rows(p: Any, x: Any, y: Any) -> Any:
    return lax.map(lambda r: critic(p, r[0]) * jnp.sin(critic(p, r[1])), (x, y)).mean()


def time_first(p: Any, x: Any, y: Any) -> Any:
    stacked = jnp.stack([x, y, x * y])
    return (critic(p, stacked.reshape(-1, 4)).reshape(3, -1) * jnp.arange(3.0)[:, None]).mean()


def summed_in_a_scan(p: Any, x: Any, y: Any) -> Any:
    return lax.scan(lambda c, r: (c + jnp.square(critic(p, r)), None), 0.0, x)[0] / len(x)


LOSSES = [
    reals_and_fakes,
    two_crops,
    consecutive,
    every_second,
    padded,
    over_rows,
    time_first,
    summed_in_a_scan,
]


def planned(loss: Any, trainers: int, rows: int) -> tuple[Any, Any, Any, Any]:
    tx, rng = optax.sgd(0.1), np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,), "v": (3,), "c": ()}
    params = {n: jnp.asarray(rng.normal(size=shape)) for n, shape in shapes.items()}
    step, start = dtrans.make_train_step(loss, tx), (params, tx.init(params))
    batch = rng.normal(size=(rows, 4)), rng.normal(size=(rows, 4))
    main = dtrans.trace(step, *start, *(x[: rows // trainers] for x in batch))
    return dtrans.nccl2(main, dtrans.trace(lambda: start), trainers=trainers), step, start, batch


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("trainers", "rows"), [(2, 12), (3, 10)])
@pytest.mark.parametrize("loss", LOSSES)
def test_trainers_exchange_sums_only(loss: Any, trainers: int, rows: int) -> None:
    plan, *_, batch = planned(loss, trainers, rows)
    assert not plan.shared.part.gathers
    assert {x.op for x in plan.shared.part.exchanged} <= {"all_reduce"}
    assert (report := plan.verify(*batch)), str(report)


@pytest.mark.usefixtures("x64")
def test_a_job_gives_the_numbers_of_one_device() -> None:
    plan, step, alone, batch = planned(reals_and_fakes, 2, 12)
    job = plan.simulate()
    state, loss = job.step(job.init(), *batch)
    params, _, wanted = step(*alone, *batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    for n, leaf in job.params(state).items():
        np.testing.assert_allclose(leaf, params[n], rtol=1e-12, atol=1e-12)


def moved_results(p: Any, x: Any, y: Any) -> Any:
    """Return results of moved rows, which trainers have in another order or in unequal numbers."""
    rows = critic(p, x)
    found = {
        "both": critic(p, jnp.concatenate([x, y])),
        "reversed": rows[::-1],
        "but the first": rows[1:],
        "but the last": rows[:-1],
        "the first": rows[: len(x) // 2],
        "every second": rows[::2],
        "padded": jnp.pad(rows, (1, 0)),
        "repeated": jnp.repeat(rows, 2),
        "as they are": rows,
    }
    return rows.mean(), found


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("trainers", "rows"), [(2, 12), (3, 12), (3, 11)])
def test_results_of_moved_rows_are_in_the_sequence_of_one_device(trainers: int, rows: int) -> None:
    tx, rng = optax.sgd(0.1), np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(4, 3)),
        "b": np.ones(3),
        "v": rng.normal(size=3),
        "c": np.ones(()),
    }
    step, start = dtrans.make_train_step(moved_results, tx, has_aux=True), (params, tx.init(params))
    batch = rng.normal(size=(rows, 4)), rng.normal(size=(rows, 4))
    main, startup = dtrans.trace(step, *start, *batch), dtrans.trace(lambda: start)
    job = dtrans.nccl2(main, startup, trainers=trainers).simulate()
    _, _, found = job.step(job.init(), *batch)
    for name, wanted in moved_results(params, *batch)[1].items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12, atol=1e-14, err_msg=name)
