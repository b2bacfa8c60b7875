"""Every primitive that public functions of JAX and optax bind, as far as they can be called with arrays, is in a table.

Functions are called with one set of arguments after the other until some are right, and differentiated where that can
be. Which could not be called is printed (`pytest -s`): what they bind is not known here.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from dtrans._jax import equations, is_known, lowered_jaxpr


pytestmark = pytest.mark.soak

MODULES = {
    "jax.numpy": jnp, "jax.numpy.linalg": jnp.linalg, "jax.numpy.fft": jnp.fft, "jax.nn": jax.nn,
    "jax.random": jax.random, "jax.lax": jax.lax, "jax.lax.linalg": jax.lax.linalg,
    "jax.scipy.special": jax.scipy.special, "jax.scipy.linalg": jax.scipy.linalg,
    "jax.scipy.stats.norm": jax.scipy.stats.norm,
    "jax.image": jax.image, "optax": optax, "optax.losses": optax.losses,
}  # fmt: skip
FILES = ("save", "load", "from", "print")  # these read and write files

X = jnp.linspace(0.1, 0.9, 16).reshape(4, 4) + jnp.eye(4)
V, B, C = X[0], X > 0.5, X.astype(jnp.complex64)
I = jnp.arange(16, dtype=jnp.int32).reshape(4, 4) % 4
K = jax.random.key(0)
ARGUMENTS: list[tuple[Any, ...]] = [
    (X,), (V,), (I,), (B,), (C,), (X, X), (V, V), (I, I), (B, B), (X, 1), (X, 0), (I, 1), (X, V), (X, I), (X, (4, 4)),
    (X, (2, 8)), (X, X, X), (V, V, V), (I, I, I), (B, X, X), ([X, X],), ([X, X], 0), (K,), (K, (4,)), (K, X), (K, 4),
    (K, X, X), (K, V), (K, V, (4,)), (4,), (4, 4), (X, 0, 1), (X, I, 1), (X, X, X, X), (C, C), (0.0, X, X),
    (X, 0.0, 1.0), (X, [0, 1]), (X, (4, 4), "linear"), (X, 0, jnp.int32), (X, jnp.float16),
]  # fmt: skip


def functions(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sorted(dir(module)):
        fn = getattr(module, name)
        if callable(fn) and not (name.startswith(("_", *FILES)) or inspect.isclass(fn) or inspect.ismodule(fn)):
            yield name, fn


def on_arrays(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """A function of the arrays alone among the arguments, and these."""
    places = [i for i, a in enumerate(arguments) if isinstance(a, jax.Array)]

    def called(*arrays: Any) -> list[Any]:
        given = list(arguments)
        for i, x in zip(places, arrays, strict=True):
            given[i] = x
        return [x for x in jax.tree.leaves(fn(*given)) if isinstance(x, jax.Array)]

    return called, [arguments[i] for i in places]


def unknown_to_tables(fn: Callable[..., Any], arrays: list[Any]) -> set[str] | None:
    """The primitives of a function that no table knows; None where it cannot be called so."""
    try:
        jaxpr = lowered_jaxpr(fn, *arrays)
    except Exception:  # whatever a function says to arguments that are not its own
        return None
    return {e.primitive.name for e in equations(jaxpr) if not is_known(e)}


@pytest.mark.parametrize("module", MODULES)
def test_every_primitive_is_known(module: str) -> None:
    missing: dict[str, str] = {}
    failed, called = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, fn in functions(MODULES[module]):
            made = False
            for arguments in ARGUMENTS:
                run, arrays = on_arrays(fn, arguments)
                found = unknown_to_tables(run, arrays)
                if found is None:
                    continue
                made = True
                floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
                total = lambda *xs, run=run: sum(jnp.sum(y) for y in run(*xs) if jnp.issubdtype(y.dtype, jnp.floating))
                backward = unknown_to_tables(jax.grad(total, floats), arrays) if floats else None
                missing |= dict.fromkeys(found | (backward or set()), name)
            called += made
            failed += [] if made else [name]
    print(f"{module}: {called} functions were called, and not: {', '.join(failed)}")
    assert called
    assert missing == {}, "primitive: the function that binds it; put it into a table of dtrans/_jax/primitives.py"
