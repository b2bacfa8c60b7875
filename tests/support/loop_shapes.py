"""Models that read stacked parameters in different ways: scans, indices, slices, casts, two reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model with stacked parameters.

    Attributes:
      loss: (parameters, rows of the model's width) -> loss.
      leaves: (number of layers, a multiple of 8; width) -> shape of each leaf.
      axis: the dimension along which leaves should be sliced over four ranks.
      low: True if the model computes in 16 bits.
    """

    loss: Callable[[Params, jax.Array], jax.Array]
    leaves: Callable[[int, int], dict[str, tuple[int, ...]]]
    axis: int = 1
    low: bool = False

    def params(self, layers: int, width: int, dtype: Any = jnp.float32) -> Params:
        """Return random parameters."""
        shapes = self.leaves(layers, width)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            n: jax.random.normal(k, s, dtype) / width**0.5
            for k, (n, s) in zip(keys, shapes.items(), strict=True)
        }


def one_stack(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"w": (layers, width, width)}


def two_stacks(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"a": (layers // 2, width, width), "b": (layers // 2, width, width)}


def stack_of_stacks(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"w": (layers // 4, 4, width, width)}


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def scanned(h: jax.Array, stack: Any, layer: Any = layer) -> jax.Array:
    return lax.scan(layer, h, stack)[0]


def end(h: jax.Array) -> jax.Array:
    return jnp.mean(h.astype(jnp.promote_types(h.dtype, jnp.float32)) ** 2)


def squares(p: Params) -> Any:
    return sum(jnp.sum(x**2) for x in p.values())


def by_index(p: Params, x: jax.Array) -> jax.Array:
    pick = lambda i: lax.dynamic_index_in_dim(p["w"], i, keepdims=False)
    return end(lax.fori_loop(0, len(p["w"]), lambda i, h: jnp.tanh(h @ pick(i)), x))


def unrolled(p: Params, x: jax.Array) -> jax.Array:
    for i in range(len(p["w"])):
        x = jnp.tanh(x @ p["w"][i])
    return end(x)


def in_pairs(p: Params, x: jax.Array) -> jax.Array:
    pairs = p["w"].reshape(-1, 2, *p["w"].shape[1:])
    return end(scanned(x, pairs, lambda h, w: layer(layer(h, w[0])[0], w[1])))


def saved_dots(p: Params, x: jax.Array) -> jax.Array:
    return end(
        scanned(x, p["w"], jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable))
    )


def with_experts(p: Params, x: jax.Array) -> jax.Array:
    def mixed(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        each = jnp.tanh(jnp.einsum("bd,edf->bef", h, w))
        return jnp.einsum("be,bed->bd", jax.nn.softmax(h[:, : len(w)]), each), None

    return end(scanned(x, p["w"], mixed))


def encoded(p: Params, x: jax.Array) -> jax.Array:
    code = scanned(x, p["a"])
    return end(scanned(x, p["b"], lambda h, w: (jnp.tanh(h @ w + code), None)))


def in_branches(p: Params, x: jax.Array) -> jax.Array:
    def either(h: jax.Array, each: Any) -> tuple[jax.Array, None]:
        w, i = each
        return lax.cond(i % 2 == 0, lambda: jnp.tanh(h @ w), lambda: jnp.sin(h @ w)), None

    return end(scanned(x, (p["w"], jnp.arange(len(p["w"]))), either))


def half(p: Params, x: jax.Array) -> jax.Array:
    return end(scanned(x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16)))


def half_inside(p: Params, x: jax.Array) -> jax.Array:
    return end(
        scanned(x.astype(jnp.bfloat16), p["w"], lambda h, w: layer(h, w.astype(jnp.bfloat16)))
    )


SHAPES = {
    "a scan": Shape(lambda p, x: end(scanned(x, p["w"])), one_stack),
    "a scan, and sum(p**2) in the loss": Shape(
        lambda p, x: end(scanned(x, p["w"])) + 1e-4 * squares(p), one_stack
    ),
    "a scan, and the norm of the stack": Shape(
        lambda p, x: end(scanned(x, p["w"])) + 1e-4 * squares(p) ** 0.5, one_stack
    ),
    "scans over p[:half], p[half:]": Shape(
        lambda p, x: end(
            scanned(scanned(x, p["w"][: len(p["w"]) // 2]), p["w"][len(p["w"]) // 2 :])
        ),
        one_stack,
    ),
    "fori_loop, dynamic_index_in_dim": Shape(by_index, one_stack),
    "a scan over numbers, p[i]": Shape(
        lambda p, x: end(scanned(x, jnp.arange(len(p["w"])), lambda h, i: layer(h, p["w"][i]))),
        one_stack,
    ),
    "no loop, p[0], p[1], ...": Shape(unrolled, one_stack),
    "a reshaped stack, two layers an iteration": Shape(in_pairs, one_stack),
    "two stacks, a layer of each an iteration": Shape(
        lambda p, x: end(scanned(x, p, lambda h, w: layer(layer(h, w["a"])[0], w["b"]))), two_stacks
    ),
    "a scan in a scan": Shape(
        lambda p, x: end(scanned(x, p["w"], lambda h, ws: (scanned(h, ws), None))),
        stack_of_stacks,
        axis=2,
    ),
    "experts in each layer": Shape(with_experts, stack_of_stacks),
    "encoder and decoder": Shape(encoded, two_stacks),
    "two scans over one stack": Shape(
        lambda p, x: end(scanned(scanned(x, p["w"]), p["w"])), one_stack
    ),
    "a stack times 0.5": Shape(lambda p, x: end(scanned(x, p["w"] * 0.5)), one_stack),
    "layers transposed in the loop": Shape(
        lambda p, x: end(scanned(x, p["w"], lambda h, w: layer(h, w.T))), one_stack
    ),
    "branches in the loop": Shape(in_branches, one_stack),
    "checkpoint in the loop": Shape(
        lambda p, x: end(scanned(x, p["w"], jax.checkpoint(layer))), one_stack
    ),
    "checkpoint that saves products": Shape(saved_dots, one_stack),
    "checkpoint around the loop": Shape(
        lambda p, x: end(jax.checkpoint(scanned)(x, p["w"])), one_stack
    ),
    "astype(bf16) before the loop": Shape(half, one_stack, low=True),
    "astype(bf16) in the loop": Shape(half_inside, one_stack, low=True),
}
