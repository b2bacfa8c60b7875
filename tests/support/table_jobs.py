"""Helpers of tests of tables: a step that looks up rows, its plans, and jobs in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from role_threads import RoleThreads, free_endpoints, serve

import dtrans
from dtrans.protocol import wire
from dtrans.run.distributed.role import Role
from dtrans.run.role_jobs.trainer_job import TrainerJob


V, D, STEPS, ROWS = 40, 3, 4, 6
SYNC, ASYNC = dtrans.Sync(), dtrans.Async()
LAZY = {"params/emb": dtrans.Rows("lazy")}
DENSE = {"params/emb": dtrans.Rows("dense")}


def init(tx: Any, key: jax.Array) -> Any:
    k1, k2 = jax.random.split(key)
    params = {"emb": jax.random.normal(k1, (V, D)), "w": jax.random.normal(k2, (2 * D,))}
    return params, tx.init(params)


def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return the loss of two features from one table: one by index, the other by `jnp.take`."""
    x = jnp.concatenate([params["emb"][ids[:, 0]], jnp.take(params["emb"], ids[:, 1], axis=0)], 1)
    return jnp.mean((jnp.tanh(x) @ params["w"] - y) ** 2)


def batches(
    steps: int = STEPS, rows: int = ROWS, least: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(least, V // 2, (rows, 2)), rng.normal(size=rows)) for _ in range(steps)]


def planned(
    tx: Any,
    sparse: Any,
    trainers: int,
    servers: int,
    fn: Callable[..., Any] = loss,
    mode: Any = SYNC,
    **options: Any,
) -> Any:
    step, key = dtrans.make_train_step(fn, tx), jax.random.key(0)
    start = lambda key: init(tx, key)
    ids, y = batches(1, ROWS // trainers)[0]
    return dtrans.pserver(
        dtrans.trace(step, *start(key), ids, y),
        dtrans.trace(start, key),
        pservers=free_endpoints(servers),
        trainers=trainers,
        mode=mode,
        placement=dtrans.BlockPlacement(min_block_size=1),
        sparse=sparse,
        **options,
    )


def trained(plan: Any, k: int, given: Sequence[Any]) -> Any:
    role = Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k)
    with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
        state, losses = job.init(jax.random.key(0)), []
        for batch in given:
            state, value = job.step(state, *job.shard_batch(*batch))
            losses.append(float(value))
        assert state[0]["emb"].shape == (0, D)
        return job.params(state), losses


def outcome(role_threads: RoleThreads, plan: Any, given: Sequence[Any]) -> Any:
    """Return the parameters and losses of trainer 0, and the final state of the servers.

    Other trainers must have the same parameters.
    """
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", trained, plan, k, given)
    ended = role_threads.all()
    first = ended["trainer 0"]
    for k in range(plan.trainers):
        jax.tree.map(np.testing.assert_array_equal, ended[f"trainer {k}"], first)
    return first, {ep: ended[ep] for ep in plan.servers}


def one_device(tx: Any, given: Sequence[Any], fn: Callable[..., Any] = loss) -> Any:
    step = jax.jit(dtrans.make_train_step(fn, tx))
    (params, opt_state), losses = init(tx, jax.random.key(0)), []
    for batch in given:
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    return params, losses


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, 0.9),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3)),
    "lamb": optax.lamb(0.1),
    "rowwise_adagrad": dtrans.optimizers.rowwise_adagrad(0.1),
    "rowwise_adam": dtrans.optimizers.rowwise_adam(0.1),
}


def only(params: Any, ids: jax.Array) -> jax.Array:
    """Return a loss whose gradient is one in each entry of the looked-up rows."""
    return jnp.sum(params["emb"][ids])


def note_row_messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], int]]:
    """Return a list that gets the kind, the fields and the bytes of each message of rows."""
    found: list[tuple[str, dict[str, Any], int]] = []
    header = wire.header

    def noted(op: str, **fields: Any) -> Any:
        if op in ("prefetch", "rows"):
            # each piece is the name, the offset and the bytes of a part of an array
            nbytes = sum(piece[2] for frame in fields["pieces"] for piece in frame)
            found.append((op, fields, nbytes))
        return header(op, **fields)

    monkeypatch.setattr(wire, "header", noted)
    return found


def start_at_zero(tx: Any, rows: int = 2, columns: int = 1) -> Callable[[], Any]:
    params = {"emb": jnp.zeros((rows, columns))}
    return lambda: (params, tx.init(params))
