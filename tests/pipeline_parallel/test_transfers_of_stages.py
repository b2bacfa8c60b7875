"""A pipelined plan lists the transfers that its job makes."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dtrans
from dtrans.run.pipeline_parallel.instructions import Transfer


KEY = jax.random.key(0)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))


def tied_loss(params: Any, ids: Any) -> Any:
    """Return a loss in which the first and the last stage read the embedding."""
    x = jnp.tanh(params["emb"][ids] @ params["w1"])
    return jnp.mean((jnp.tanh(x @ params["w2"]) @ params["emb"].T) ** 2)


def init(tx: Any) -> Any:
    params = {"emb": jnp.ones((16, 8)), "w1": jnp.ones((8, 8)), "w2": jnp.ones((8, 8))}
    return params, tx.init(params)


def planned(tx: Any, **options: Any) -> Any:
    step = dtrans.make_train_step(tied_loss, tx)
    main = dtrans.trace(step, *init(tx), jnp.zeros(8, int))
    startup = dtrans.trace(lambda: init(tx))
    return dtrans.pipeline(main, startup, num_micro_batch=2, **options)


@pytest.mark.parametrize("tx", [optax.adam(0.1), CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_job_sends_the_bytes_that_the_plan_lists(tx: Any, stages: int) -> None:
    plan = planned(tx, num_stages=stages)
    job = plan.simulate()
    program, env = job.prepare(job.init(), jnp.zeros(8, int))
    sent: dict[tuple[str, str], int] = collections.Counter()

    def look(ins: Any) -> None:
        if isinstance(ins, Transfer) and ins.origin != ins.stage:
            sent[f"stage {ins.origin}", f"stage {ins.stage}"] += env[ins.target].nbytes

    job.execute(program, env, look)
    listed: dict[tuple[str, str], int] = collections.Counter()
    for t in plan.transfers():
        listed[t.source, t.target] += t.nbytes
    assert sent == listed
    for cost in plan.costs():
        assert cost.sent == sum(n for (source, _), n in sent.items() if source == cost.role)
        assert cost.received == sum(n for (_, target), n in sent.items() if target == cost.role)


def test_replicas_send_gradients_to_each_other() -> None:
    plan = planned(optax.adam(0.1), num_stages=2, replicas=2)
    reduced = [t for t in plan.transfers() if t.target == "other devices of stage 0"]
    params, _ = init(optax.adam(0.1))
    assert sum(t.nbytes for t in reduced) == sum(x.nbytes for x in params.values())
    (first, _) = plan.costs()
    assert first.sent == sum(t.nbytes for t in plan.transfers() if t.source == "stage 0")
