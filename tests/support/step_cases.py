"""Form of the training steps of `step_zoo`, and params, batches and layers that they share.

A decorator turns a loss or a step into a case, with the function's name and docstring. All arrays
are in float64.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans


Tree = Any

FEATURES, HIDDEN, CLASSES, VOCABULARY, LENGTH = 6, 8, 4, 11, 8

SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.05, momentum=0.9)
ADAM = optax.adam(1e-2)
CLIPPED_ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
LAMB = optax.lamb(1e-2)


@dataclasses.dataclass(frozen=True)
class StepCase:
    """Training step for one device.

    Attributes:
      name: name of the case.
      init: key -> (params, optimizer state).
      step: (params, opt_state, *batch) -> (params, opt_state, loss[, aux]).
      batch: (number of rows, seed) -> batch.
      batch_axes: for each array of a batch, the axis of the rows, or None if all rows share the
        array. None for all: axis 0, and arrays without axes are shared.
      what: description of the case.
      params: key -> params, if a loss is trained.
      loss: (params, batch) -> loss; None for a step that is written by hand, or has further
        results.
    """

    name: str
    init: Callable[[jax.Array], tuple[Tree, Tree]]
    step: Callable[..., tuple[Any, ...]]
    batch: Callable[..., tuple[Any, ...]]
    batch_axes: tuple[int | None, ...] | None = None
    what: str = ""
    params: Callable[[jax.Array], Tree] | None = None
    loss: Callable[..., Any] | None = None


_CASES: dict[str, list[StepCase]] = {}  # by the name of their module


def cases_of(module: str) -> tuple[StepCase, ...]:
    """Return the cases of a module, in the order of their definitions."""
    return tuple(_CASES[module])


def stepped(
    init: Any, batch: Any, batch_axes: tuple[int | None, ...] | None = None
) -> Callable[[Any], Any]:
    """Return a decorator that turns a step into a case."""

    def add(step: Any) -> Any:
        what = inspect.getdoc(step) or ""
        case = StepCase(step.__name__, init, step, batch, batch_axes, what)
        _CASES.setdefault(step.__module__, []).append(case)
        return step

    return add


def trained(
    params: Any,
    batch: Any,
    tx: Any,
    *,
    has_aux: bool = False,
    batch_axes: tuple[int | None, ...] | None = None,
) -> Callable[[Any], Any]:
    """Return a decorator that turns a loss into a case, which an optimizer trains."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        made = params(key)
        return made, tx.init(made)

    def add(loss: Any) -> Any:
        step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
        what = inspect.getdoc(loss) or ""
        only_loss = None if has_aux else loss
        case = StepCase(loss.__name__, init, step, batch, batch_axes, what, params, only_loss)
        _CASES.setdefault(loss.__module__, []).append(case)
        return loss

    return add


def beside(params: Any, tx: Any, which: str = "params") -> Callable[[jax.Array], tuple[Tree, Tree]]:
    """Return the init of a step whose optimizer trains only one part of the params."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        made = params(key)
        return made, tx.init(made[which])

    return init


def update(tx: Any, grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# -- shared params, batches and layers -------------------------------------------------------------


def drawn(key: jax.Array, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Return normal matrices whose products keep the scale of an input, and vectors of zeros."""
    keys = jax.random.split(key, len(shapes))
    return {
        n: jax.random.normal(k, s, jnp.float64) / np.sqrt(s[-2])
        if len(s) > 1
        else jnp.zeros(s, jnp.float64)
        for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }


def mlp(key: jax.Array, features: int = FEATURES, out: int = CLASSES) -> Tree:
    return drawn(key, w1=(features, HIDDEN), b1=(HIDDEN,), w2=(HIDDEN, out), b2=(out,))


def without_last_bias(key: jax.Array, out: int = CLASSES) -> Tree:
    """Return params for losses that a bias of all rows does not change.

    The gradient of this bias would consist of rounding errors.
    """
    return {n: leaf for n, leaf in mlp(key, out=out).items() if n != "b2"}


def mlp_hidden(p: Tree, x: Any) -> jax.Array:
    return jnp.tanh(x @ p["w1"] + p["b1"])


def mlp_logits(p: Tree, x: Any) -> jax.Array:
    return mlp_hidden(p, x) @ p["w2"] + p["b2"]


def deep(key: jax.Array) -> Tree:
    return drawn(
        key, w1=(FEATURES, HIDDEN), w2=(HIDDEN, HIDDEN), w3=(HIDDEN, CLASSES), b3=(CLASSES,)
    )


def entropy(logits: Any, y: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def labelled(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, FEATURES)), rng.integers(0, CLASSES, rows).astype(np.int32)


def with_key(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (*labelled(rows, seed), jax.random.key(seed))


def weighted(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (*labelled(rows, seed), np.random.default_rng(seed + 1).uniform(0.1, 2.0, rows))


def masked(rows: int, seed: int = 0) -> tuple[Any, ...]:
    mask = np.random.default_rng(seed + 1).random(rows) < 0.6
    mask[0] = True
    return (*labelled(rows, seed), mask.astype(np.float64))


def plain(rows: int, seed: int = 0, features: int = FEATURES) -> tuple[Any, ...]:
    return (np.random.default_rng(seed).normal(size=(rows, features)),)


def pairs(rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Two noisy views of each row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES))
    return x + 0.2 * rng.normal(size=x.shape), x + 0.2 * rng.normal(size=x.shape)


def binary(rows: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, FEATURES)), (rng.random((rows, CLASSES)) < 0.2).astype(np.float64)
