"""Powers of the number of parts: functions that scale with their operands, and functions that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dtrans.batch.scaled import _NoScaleError, _Pairing
from dtrans.ir.inline import inline_calls


X = jnp.linspace(-1, 1, 12).reshape(3, 4)
PARTS = 3


def powers(fn: Callable[[Any, int], Any]) -> list[int | None]:
    """Return the powers of a function of a value and of the number of rows, which the parts have less of."""
    pair = [inline_calls(jax.make_jaxpr(lambda x, rows=rows: fn(x, rows))(X)) for rows in (12 // PARTS, 12)]
    return _Pairing(PARTS, {}).powers(pair, [0])


SCALES: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "mean": (lambda x, rows: jnp.sum(x) / rows, 1),
    "square": (lambda x, rows: jnp.square(x / rows), 2),
    "cube": (lambda x, rows: (x / rows) ** 3, 3),
    "product": (lambda x, rows: (x / rows) @ (x / rows).T, 2),
    "quotient": (lambda x, rows: x / (x + x / rows * rows), 0),
    "bounded": (lambda x, rows: lax.clamp(-x / rows, x / rows, 2 * x / rows), 1),
    "largest": (lambda x, rows: jnp.argmax(x / rows, 1), 0),
    "equal": (lambda x, rows: x / rows == jnp.abs(x / rows), 0),
    "repeated": (lambda x, rows: jnp.tile(x / rows, (2, 1)), 1),
    "updated": (lambda x, rows: (x / rows).at[0].subtract(1.0 / rows), 1),
    "behind a barrier": (lambda x, rows: lax.optimization_barrier(x / rows), 1),
    "out of bounds": (lambda x, rows: jnp.take(x / rows, jnp.array([7]), axis=0, mode="fill"), 1),
}
DOES_NOT: dict[str, Callable[[Any, int], Any]] = {
    "offset": lambda x, rows: x / rows + 1,
    "root": lambda x, rows: jnp.sqrt(jnp.abs(x / rows)),
    "truncated": lambda x, rows: (x / rows).astype(jnp.int32),
    "a function of some rows": lambda x, rows: (x / rows).at[0].apply(jnp.exp),
    "filled": lambda x, rows: jnp.take(x / rows, jnp.array([7]), axis=0, mode="fill", fill_value=7.0),
    "whole quotient": lambda x, rows: lax.div(jnp.int32(7), jnp.int32(rows)) * x.astype(jnp.int32),
}


@pytest.mark.parametrize("name", SCALES)
def test_what_scales(name: str) -> None:
    fn, power = SCALES[name]
    assert powers(fn) == [power]
    np.testing.assert_allclose(fn(X, 4), np.asarray(fn(X, 12)) * float(PARTS) ** power, rtol=1e-5)


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_does_not_scale(name: str) -> None:
    with pytest.raises(_NoScaleError):
        powers(DOES_NOT[name])
