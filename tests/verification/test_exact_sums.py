"""Exact sums of servers are sums in the finite field, for any division and packing of their
parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrans.ops import EXACT, identity_of
from dtrans.ops.exact_sum import joined, part_of, part_type, sum_of
from dtrans.verification import field
from dtrans.verification.evaluate import Evaluator
from dtrans.verification.field_values import Real


def _dealt(x: jax.Array) -> jax.Array:
    """Add up numbers of three servers, one of which has none, and the sum of their squares."""
    parts = [jnp.concatenate([part_of(y), part_of(y * y)]) for y in (x[:2], x[2:])]
    nothing = identity_of(EXACT, parts[0].shape, parts[0].dtype)()
    counts = jnp.arange(3, dtype=parts[0].dtype)  # travel in the same vector
    sent = [jnp.concatenate([counts, part]) for part in (*parts, nothing)]
    whole = joined(joined(sent[2][3:], sent[0][3:]), sent[1][3:])
    size = part_type(x.dtype).shape[0]
    return sum_of(whole[:size]) / sum_of(whole[size:])


def _twice(x: jax.Array) -> jax.Array:
    parts = [part_of(x[:2]), part_of(x[2:])]
    return sum_of(joined(joined(parts[0], parts[1]), parts[1])) / jnp.sum(x * x)


def _dropped(x: jax.Array) -> jax.Array:
    return sum_of(joined(part_of(x[:2]), part_of(x[2:-1]))) / jnp.sum(x * x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("fn", "equal"), [(_dealt, True), (_twice, False), (_dropped, False)])
def test_parts_add_up(fn: Callable[..., Any], equal: bool, dtype: str) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"), np.errstate(all="ignore"):
        x = jax.ShapeDtypeStruct((7,), dtype)
        point = Real(field.random_elements(rng, (7,)), rng.normal(size=7))
        evaluator = Evaluator()
        ((found,),) = evaluator.run(jax.make_jaxpr(fn)(x), [(point,)])
        ((wanted,),) = evaluator.run(
            jax.make_jaxpr(lambda x: jnp.sum(x) / jnp.sum(x * x))(x), [(point,)]
        )
        assert not evaluator.unknown and (found.elements == wanted.elements) == equal
        assert np.isclose(found.approx, wanted.approx) == equal
