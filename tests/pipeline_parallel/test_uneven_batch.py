"""Batches whose rows the number of micro-batches does not divide."""

from __future__ import annotations

import dataclasses
from typing import Any

import flat_options
import jax
import numpy as np
import pytest
import step_zoo
from helpers import tree_close
from pipeline_models import MODELS, compiled_quickly

import dtrans
from dtrans.errors import BatchError
from dtrans.pipeline_parallel.uneven_batch import plan_for_rows


OF = MODELS["mlp"].job(16)


def of_rows(rows: int) -> Any:
    return dataclasses.replace(OF, batch=tuple(x[:rows] for x in OF.batch))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replicas": 2},
        {"replicas": 2, "sharding_stage": 2, "min_slice_size": 0},
        {"replicas": 2, "sharding_stage": 3, "min_slice_size": 0},
        {"schedule": "ZeroBubble", "num_stages": "auto"},
    ],
    ids=str,
)
@pytest.mark.sampled(1)
def test_the_last_batch_of_an_epoch_has_the_numbers_of_one_device(options: Any, way: str) -> None:
    with compiled_quickly():
        given = {"num_stages": 2, "num_micro_batch": 4} | options
        plan = flat_options.pipeline(*OF.traced(), **given)
        job = getattr(plan, way)()
        state, alone = job.init(jax.random.key(0)), OF.init(jax.random.key(0))
        step = jax.jit(OF.step)
        for rows in (16, 10, 6, 16, 2):
            batch = of_rows(rows).batch
            state, loss = job.step(state, *batch)
            *alone, want = step(*alone, *batch)
            np.testing.assert_allclose(loss, want, rtol=1e-10)
        tree_close((job.params(state), job.opt_state(state)), tuple(alone), 1e-10)


@pytest.mark.usefixtures("x64")
def test_the_rows_of_the_last_batch_may_be_on_dimension_1() -> None:
    case, key = step_zoo.by_name("rnn_time_major"), jax.random.key(0)
    main = dtrans.trace(case.step, *case.init(key), *case.batch(12))
    options: Any = {"num_stages": 2, "num_micro_batch": 4}
    startup, batch = dtrans.trace(case.init, key), dtrans.Batch(axes=case.batch_axes)
    job = dtrans.pipeline(main, startup, batch=batch, **options).simulate()
    state, alone = job.init(key), case.init(key)
    for rows in (12, 10, 5):
        state, *results = job.step(state, *case.batch(rows))
        *alone, want = jax.jit(case.step)(*alone, *case.batch(rows))
        tree_close((job.params(state), *results), (alone[0], want), 1e-12)


def test_micro_batches_of_the_last_batch_are_not_larger() -> None:
    plan = flat_options.pipeline(*OF.traced(), num_stages=2, num_micro_batch=4)
    mine = flat_options.pipeline(
        *OF.traced(),
        num_stages=2,
        num_micro_batch=4,
        schedule=dataclasses.replace(plan.schedule, name="mine"),
    )
    counts = {}
    for rows in (16, 10, 13, 6):
        types = {
            n: jax.ShapeDtypeStruct((rows, *plan.types[n].shape[1:]), plan.types[n].dtype)
            for n in plan.batch
        }
        counts[rows] = plan_for_rows(plan, types).options.num_micro_batch
        assert plan_for_rows(mine, types) is mine
    assert counts == {16: 4, 10: 5, 13: 13, 6: 2}


def test_clips_of_micro_batches_are_for_the_planned_number() -> None:
    """With another number of micro-batches, each clip would have other rows."""
    with compiled_quickly():
        options: Any = {"clip_local_norm": 0.1, "clip_local_per": "micro_batch"}
        plan = flat_options.pipeline(*OF.traced(), num_stages=2, num_micro_batch=4, **options)
        job = plan.simulate()
        with pytest.raises(BatchError, match="has 10 rows; expected a multiple of 4"):
            job.step(job.init(jax.random.key(0)), *of_rows(10).batch)


def test_arrays_with_different_numbers_of_rows_are_named() -> None:
    with compiled_quickly():
        job = flat_options.pipeline(*OF.traced(), num_stages=2, num_micro_batch=4).simulate()
        x, y = of_rows(10).batch
        with pytest.raises(BatchError, match="10 .*9 rows"):
            job.step(job.init(jax.random.key(0)), x, y[:9])


@pytest.mark.usefixtures("x64")
def test_a_plan_with_another_schedule_takes_the_last_batch() -> None:
    with compiled_quickly():
        plan = flat_options.pipeline(*OF.traced(), num_stages=2, num_micro_batch=4)
        job, state = plan.scheduled("PreferForward").simulate(), OF.init(jax.random.key(0))
        _, loss = job.step(job.init(jax.random.key(0)), *of_rows(10).batch)
        *_, want = jax.jit(OF.step)(*state, *of_rows(10).batch)
        np.testing.assert_allclose(loss, want, rtol=1e-10)


def test_rows_that_replicas_do_not_divide_are_refused() -> None:
    with compiled_quickly():
        plan = flat_options.pipeline(*OF.traced(), num_stages=2, num_micro_batch=4, replicas=2)
        job = plan.simulate()
        with pytest.raises(BatchError, match="has 7 rows; expected a multiple of replicas=2"):
            job.step(job.init(jax.random.key(0)), *of_rows(7).batch)
        own = flat_options.pipeline(*OF.traced(), num_stages=2, num_micro_batch=4, kind="local")
        with pytest.raises(BatchError, match="has 10 rows; expected a multiple of 4"):
            own.simulate().step(own.simulate().init(jax.random.key(0)), *of_rows(10).batch)
