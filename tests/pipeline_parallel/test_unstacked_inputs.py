"""Functions of stacked parameters, rewritten for the rows of each stage."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrans._jax import jaxpr_as_fun, opened
from dtrans.pipeline_parallel.stage_scan import StageRows
from dtrans.pipeline_parallel.unstacked_inputs import unstack_inputs
from dtrans.rows.slices import Slice


STACK = np.arange(12.0).reshape(4, 3) / 12


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, row: (jnp.tanh(h * row), h.sum()), x, w)


def total(w: Any, x: Any) -> Any:
    return w.sum() * x


def first_rows(w: Any, x: Any) -> Any:
    return w[:2] @ x


def parts_of(axis: int, bounds: list[int]) -> list[StageRows]:
    pairs = itertools.pairwise(bounds)
    return [StageRows(f"w.block{i}", Slice(axis, a, b - a)) for i, (a, b) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("function", "axis", "bounds", "names"),
    [
        (scanned, 0, [0, 2, 4], ["scan", "scan", "concatenate"]),
        (scanned, 0, [0, 1, 3, 4], ["scan", "scan", "scan", "concatenate"]),
        (scanned, 1, [0, 1, 3], ["concatenate", "scan"]),
        (total, 0, [0, 2, 4], ["concatenate", "reduce_sum", "mul"]),
        (first_rows, 0, [0, 2, 4], ["dot_general"]),
        (first_rows, 1, [0, 1, 3], ["concatenate", "slice", "dot_general"]),
    ],
)
def test_a_function_of_rows_equals_the_function_of_the_stack(
    function: Any, axis: int, bounds: list[int], names: list[str]
) -> None:
    rows = parts_of(axis, bounds)
    x = np.ones(3, np.float32)
    stack = STACK.astype(np.float32)
    jaxpr: Any = jax.make_jaxpr(function)(stack, x)
    found, inputs = unstack_inputs(jaxpr, ["w"], {"w": rows})
    assert inputs == [r.name for r in rows]
    operands = [stack.take(range(r.part.first, r.part.stop), axis) for r in rows]
    results = jaxpr_as_fun(found)(*operands, x)
    for a, b in zip(results, jax.tree.leaves(function(stack, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [e.primitive.name for e in opened(found).eqns if e.primitive.name in names] == names
