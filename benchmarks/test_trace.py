"""Time to plan a step, compared with the time to trace it, for 10, 100 and 1,000 leaves.

Both should grow linearly, and planning should take less time than tracing.
"""

from __future__ import annotations

import jax
import pytest
from models import mlp, programs

import dtrans


PSERVERS = "127.0.0.1:6174,127.0.0.1:6175"
LEAVES = [10, 100, 1000]


def deep(leaves: int):
    step, init, batch = mlp([16] * (leaves // 2 + 1), 8)
    state = jax.eval_shape(init, jax.random.key(0))
    return step, init, batch, lambda: dtrans.trace(step, *state, *batch)


def transform(main: dtrans.Program, startup: dtrans.Program):
    plan = dtrans.pserver(
        main,
        startup,
        pservers=PSERVERS,
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=64),
    )
    return [len(p.jaxpr.jaxpr.eqns) for p in (plan.trainer, plan.trainer_startup)]


@pytest.mark.parametrize("leaves", LEAVES)
def test_trace(benchmark, leaves):
    *_, trace = deep(leaves)
    benchmark.pedantic(trace, rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("leaves", LEAVES)
def test_transform(benchmark, leaves):
    step, init, batch, _ = deep(leaves)
    main, startup = programs(step, init, batch)
    benchmark.pedantic(transform, (main, startup), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("leaves", LEAVES)
def test_transform_over_trace(benchmark, ratio, leaves):
    step, init, batch, trace = deep(leaves)
    main, startup = programs(step, init, batch)

    def compare():
        # A collection of Python's garbage takes as long as planning a small model. It can happen
        # in either function, so small models need many pairs.
        pairs = max(5, 2000 // leaves)
        return ratio(
            f"transform / trace, {leaves} leaves",
            lambda: transform(main, startup),
            trace,
            min(pairs, 25),
        )

    benchmark.extra_info["ratio"] = benchmark.pedantic(compare, rounds=1)
