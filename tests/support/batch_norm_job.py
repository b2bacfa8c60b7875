"""Job whose servers average state that trainers compute: the running statistics of a batch norm."""

from __future__ import annotations

from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from role_threads import free_endpoints

import dtrans


TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def params_of() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    net = {"w": jnp.asarray(rng.normal(size=(5, 4))), "out": jnp.asarray(rng.normal(size=(4, 1)))}
    return {
        "net": net,
        "stats": {"mean": jnp.zeros(4), "var": jnp.ones(4), "seen": jnp.zeros((), jnp.int32)},
    }


def loss(net: Any, stats: Any, x: Any, y: Any) -> Any:
    """Return the loss, and the new statistics of a batch norm between two layers."""
    h = x @ net["w"]
    mean, var = h.mean(0), h.var(0)
    h = jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-5))
    new = {n: 0.9 * stats[n] + 0.1 * of_batch for n, of_batch in (("mean", mean), ("var", var))}
    new["seen"] = stats["seen"] + jnp.sum(x > 0, dtype=jnp.int32)
    return jnp.mean((h @ net["out"] - y) ** 2), new


def step_with(tx: Any) -> Any:
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        (value, stats), grads = dtrans.value_and_grad(loss, has_aux=True)(
            params["net"], params["stats"], x, y
        )
        updates, opt_state = tx.update(grads, opt_state, params["net"])
        return (
            {"net": optax.apply_updates(params["net"], updates), "stats": stats},
            opt_state,
            value,
        )

    return step


def init_with(tx: Any) -> Any:
    return lambda params: (params, tx.init(params["net"]))


def batches_of(count: int, rows: int = 6) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        (jnp.asarray(rng.normal(size=(rows, 5))), jnp.asarray(rng.normal(size=(rows, 1))))
        for _ in range(count)
    ]


def plan_for(
    trainers: int, servers: int, merge: Any, rows: int = 2, tx: Any = TX, **options: Any
) -> Any:
    params, init = params_of(), init_with(tx)
    main = dtrans.trace(step_with(tx), *jax.eval_shape(init, params), *batches_of(1, rows)[0])
    return flat_options.pserver(main, dtrans.trace(init, params), pservers=free_endpoints(servers),
                                trainers=trainers,
                          min_block_size=1, merge=merge or {}, **options)  # fmt: skip


MEAN = {"params/stats": "mean", "params/stats/seen": "own"}
