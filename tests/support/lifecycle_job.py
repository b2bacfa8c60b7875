"""Job of test_lifecycle.py, for the processes that the test starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import optax
from helpers import init_of, mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.parameter_server.plan import PServerPlan


ROWS = 3  # rows of each trainer in each step
# the clip by global norm makes servers exchange partial sums
TX = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))


def params_of() -> Any:
    return mlp_params(dtype=jnp.float64)


def batch_of(i: int, trainers: int) -> Any:
    return mlp_batch(ROWS * trainers, dtype=jnp.float64, seed=i)


def rows(trainers: Sequence[int], batch: Any) -> list[Any]:
    return [jnp.concatenate([x[k * ROWS : (k + 1) * ROWS] for k in trainers]) for x in batch]


def plan_for(pservers: Sequence[str], trainers: int, **options: Any) -> PServerPlan:
    params = params_of()
    return flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(mlp_loss, TX),
            params,
            jax.eval_shape(TX.init, params),
            *batch_of(0, trainers),
        ),
        dtrans.trace(init_of(TX), params),
        pservers=pservers,
        trainers=trainers,
        min_block_size=1,
        **options,
    )
