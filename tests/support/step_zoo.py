"""All training steps of the zoo, and comparisons of their results.

step_cases         the form of a step, and the params, batches and layers that steps share
step_zoo_batches   steps in which rows of a batch interact
step_zoo_losses    losses, models and methods from libraries and papers
step_zoo_gradients  steps whose update does not read one gradient of one loss
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import step_zoo_batches
import step_zoo_gradients
import step_zoo_losses
from step_cases import StepCase


CASES: tuple[StepCase, ...] = (
    *step_zoo_batches.CASES,
    *step_zoo_losses.CASES,
    *step_zoo_gradients.CASES,
)


def by_name(name: str) -> StepCase:
    return next(case for case in CASES if case.name == name)


def numbers(tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree; for random keys, return their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def compare(found: Any, wanted: Any) -> None:
    """Check that two trees are equal, up to a relative or absolute difference of 1e-12."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(numbers(found), numbers(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.size:
            assert np.max(np.abs(a.astype(float) - b) / (1 + np.abs(b.astype(float)))) < 1e-12
