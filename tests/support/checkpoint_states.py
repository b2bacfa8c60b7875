"""Optimizers with state of all kinds, and states without two equal numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def odd_state() -> optax.GradientTransformation:
    """Return an optimizer with state of many types.

    The state has a transposed copy of each parameter, a typed random key, a flag, and a count.
    """

    def init(params: Any) -> Any:
        return {
            "turned": jax.tree.map(jnp.transpose, params),
            "key": jax.random.key(7),
            "on": jnp.array(True),
            "steps": jnp.zeros((), jnp.int32),
        }

    def update(g: Any, s: Any, p: Any = None) -> Any:
        turned = jax.tree.map(lambda a, b: a + b.T.astype(a.dtype), s["turned"], g)
        key = jax.random.split(s["key"])[0]
        return g, {"turned": turned, "key": key, "on": ~s["on"], "steps": s["steps"] + 1}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "a global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "sums over rows and columns": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "whole matrices": optax.contrib.muon(0.1),
    "state of many types": optax.chain(odd_state(), optax.sgd(0.1)),
}


def distinct(tree: Any) -> Any:
    """Return a pytree of the same types in which all numbers differ from each other, and from those
    of an init."""

    def fill(i: int, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(i), x.shape)
        return (jnp.arange(x.size).reshape(x.shape) + 3 * i + 2).astype(x.dtype)

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [fill(i, x) for i, x in enumerate(leaves)])


TX = optax.chain(
    optax.clip_by_global_norm(0.1),
    optax.adam(optax.cosine_decay_schedule(0.05, 6, alpha=0.1)),
    optax.add_decayed_weights(1e-3),
)
