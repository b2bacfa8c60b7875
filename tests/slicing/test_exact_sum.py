"""Sums whose result does not depend on the order of the terms."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtrans.ops import EXACT, combine
from dtrans.ops.exact_sum import part_of, sum_of


TYPES = ("float32", "float64")
part, total = jax.jit(part_of), jax.jit(sum_of)
both = jax.jit(functools.partial(combine, EXACT))


def added(x: np.ndarray, parts: int) -> Any:
    return np.asarray(total(both([part(of) for of in np.split(x, parts)])))


@pytest.mark.parametrize("dtype", TYPES)
@given(spread=st.sampled_from([0, 3, 20]), seed=st.integers(0, 1000), signs=st.booleans())
def test_neither_order_nor_parts_matter(dtype: str, spread: int, seed: int, signs: bool) -> None:
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(0, spread, 24).clip(-80, 80)) * (rng.choice([-1, 1], 24) if signs else 1)
    with jax.enable_x64(dtype == "float64"):
        x = x.astype(dtype)
        one = added(x, 1)
        assert one.dtype == dtype
        for parts in (2, 6):
            assert added(rng.permutation(x), parts).tobytes() == one.tobytes()
        exact = math.fsum(x.astype(float))
        assert abs(float(one) - exact) <= 3 * np.finfo(dtype).eps * np.abs(x).astype(float).sum()


@pytest.mark.parametrize("dtype", TYPES)
def test_infinities_and_nan_are_those_of_a_sum(dtype: str) -> None:
    top, inf = float(np.finfo(dtype).max), math.inf
    with jax.enable_x64(dtype == "float64"):
        for x in (
            [inf, 1],
            [-inf, 1],
            [inf, -inf],
            [math.nan, 1],
            [math.nan, inf],
            [top, top],
            [-top, -top],
            [0, -0.0],
        ):
            with np.errstate(all="ignore"):
                wanted = np.sum(np.array(x, dtype))
            for parts in (1, 2):
                np.testing.assert_array_equal(added(np.array(x, dtype), parts), wanted)


def test_numbers_of_many_sums_lie_one_behind_the_other() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4) * np.array([[1e-20], [1], [1e20]], np.float32)
    one, other = (jnp.concatenate([part(row) for row in half]) for half in (x[:, :2], x[:, 2:]))
    made = both([one, other]).reshape(3, -1)
    assert [float(total(p)) for p in made] == [float(added(row, 1)) for row in x]
