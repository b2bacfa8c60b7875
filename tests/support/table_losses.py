"""Losses that look up rows of tables: by index, in loops, in branches, and in recomputations."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


V, D = 40, 3  # number of rows of `emb` and `table`, and width of `emb`, `table` and `w`
EMBED = nn.Embed(V, D, dtype=jnp.bfloat16)

# name -> (loss of (params, ids), largest number of rows of `emb` that a step looks up)
READ = {
    "by index": (lambda p, ids: jnp.mean((p["emb"][ids] @ p["w"]) ** 2), 8),
    "jnp.take": (lambda p, ids: jnp.mean(jnp.take(p["emb"], ids[:, 0], axis=0) @ p["w"]), 4),
    "one row": (lambda p, ids: jnp.mean(p["emb"][ids[0, 0]] @ p["w"]), 1),
    "vmap of one row": (
        lambda p, ids: jnp.mean(jax.vmap(lambda i: p["emb"][i] @ p["w"])(ids[:, 0])),
        4,
    ),
    "after a cast and a factor": (
        lambda p, ids: jnp.mean((p["emb"].astype(jnp.bfloat16) * 2)[ids[:, 0]]),
        4,
    ),
    "twice": (lambda p, ids: jnp.mean(p["emb"][ids[:, 0]] * p["emb"][ids[:, 1]]), 8),
    "times a constant row": (lambda p, ids: jnp.mean((p["emb"] * jnp.arange(3.0))[ids[:, 0]]), 4),
    "of the transpose": (lambda p, ids: jnp.mean(p["emb"].T[:, ids[:, 0]] ** 2), 4),
    "in another shape": (
        lambda p, ids: jnp.mean(p["emb"].reshape(V, D, 1)[ids[:, 0]] @ p["w"][:1]),
        4,
    ),
    "with a row of zeros": (
        lambda p, ids: jnp.mean((p["emb"].at[0].set(0.0)[ids] @ p["w"]) ** 2),
        9,
    ),
    "with a row to which one is added": (
        lambda p, ids: jnp.mean((p["emb"].at[0].add(1.0)[ids] @ p["w"]) ** 2),
        9,
    ),
    "a slice at a constant position": (
        lambda p, ids: jnp.mean(
            jax.lax.dynamic_slice(p["emb"], (2, 0), (1, D)) @ p["w"] * p["emb"][ids[:, 0]]
        ),
        5,
    ),
    "several consecutive rows": (
        lambda p, ids: jnp.mean(
            jax.lax.dynamic_slice_in_dim(p["emb"], ids[0, 0], 5) @ p["w"] + p["emb"][ids[0, 1]]
        ),
        6,
    ),
    "consecutive rows under vmap": (
        lambda p, ids: jnp.mean(
            jax.vmap(lambda i: jax.lax.dynamic_slice_in_dim(p["emb"], i, 2))(ids[:, 0]) @ p["w"]
        ),
        8,
    ),
    "with a slice that is overwritten": (
        lambda p, ids: jnp.mean(
            jax.lax.dynamic_update_slice(p["emb"], jnp.zeros((1, D)), (0, 0))[ids] @ p["w"]
        ),
        9,
    ),
    "flax.linen.Embed": (
        lambda p, ids: jnp.mean(EMBED.apply({"params": {"embedding": p["emb"]}}, ids)),
        8,
    ),
}


def turns(p: Any, ids: jax.Array, f: Any) -> jax.Array:
    """Return the result of a recurrence in which each turn looks up rows."""
    return jax.lax.scan(lambda h, i: (jnp.tanh(h @ p["w"] + f(p, i)), None), jnp.zeros(D), ids)[
        0
    ].sum()


def drawn(p: Any, ids: jax.Array) -> jax.Array:
    """Return a loss of rows of two tables, with ids from random keys that a loop carries."""

    def turn(carry: Any, i: jax.Array) -> Any:
        key, h = carry
        key, mine = jax.random.split(key)
        noise = jax.random.randint(mine, (2,), 0, V)
        return (key, h + p["emb"][i] @ p["table"][noise].T), None

    return jnp.sum(jax.lax.scan(turn, (jax.random.key(0), jnp.zeros(2)), ids[:, 0])[0][1] ** 2)


def branched(p: Any, ids: jax.Array) -> jax.Array:
    return jax.lax.cond(
        ids[0, 0] > 3,
        lambda i: p["emb"][i].sum(),
        lambda i: (p["emb"][i + 1] ** 2).sum(),
        ids[:, 0],
    )


def again(p: Any, ids: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda p, i: jnp.sin(p["emb"][i] @ p["w"]).sum())(p, ids[:, 0])


# name -> (loss of (params, ids), largest number of looked-up rows of each table)
LOOPS = {
    "a turn": (lambda p, ids: turns(p, ids[:, 0], lambda p, i: p["emb"][i]), {"params/emb": 4}),
    "rows a turn": (
        lambda p, ids: turns(p, ids, lambda p, i: jnp.take(p["emb"], i, 0).sum(0)),
        {"params/emb": 8},
    ),
    "a cast in a turn": (
        lambda p, ids: turns(
            p, ids[:, 0], lambda p, i: p["emb"].astype(jnp.bfloat16)[i].astype(jnp.float32)
        ),
        {"params/emb": 4},
    ),
    "a loop in a loop": (
        lambda p, ids: turns(
            p, ids, lambda p, i: turns(p, i, lambda p, j: p["emb"][j]) * p["emb"][i[0]]
        ),
        {"params/emb": 12},
    ),
    "beside a loop": (
        lambda p, ids: turns(p, ids[:, 0], lambda p, i: p["emb"][i]) + p["emb"][ids[:, 1]].sum(),
        {"params/emb": 8},
    ),
    "a row that all turns read": (
        lambda p, ids: turns(p, ids[:, 0], lambda p, i: p["emb"][ids[0, 0]]),
        {"params/emb": 1},
    ),
    "vmap of a loop": (
        lambda p, ids: jax.vmap(lambda i: turns(p, i, lambda p, j: p["emb"][j]))(ids).sum(),
        {"params/emb": 8},
    ),
    "numbers that are drawn": (drawn, {"params/emb": 4, "params/table": 8}),
    "branches": (branched, {"params/emb": 8}),
    "computed again": (again, {"params/emb": 4}),
    "branches with constant ids": (
        lambda p, ids: jax.lax.cond(
            ids[0, 0] > 3,
            lambda: jax.lax.dynamic_slice(p["emb"], (2, 0), (1, D)).sum(),
            lambda: jax.lax.dynamic_slice(p["emb"], (5, 0), (1, D)).sum(),
        ),
        {"params/emb": 2},
    ),
    "layers computed again": (
        lambda p, ids: turns(
            p, ids[:, 0], lambda p, i: jax.checkpoint(lambda w: jnp.sin(w[i]))(p["emb"])
        ),
        {"params/emb": 4},
    ),
}
