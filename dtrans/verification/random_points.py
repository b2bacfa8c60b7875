"""Random inputs (points) for which a verification evaluates and compares two steps.

A float input has a uniformly random element of the finite field. Its float64 value is near the
value of a real run, so that comparisons and branches are decided as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.verification import field, field_values as values
from dtrans.verification.field_values import Complex, Real


def random_point(
    types: Mapping[str, Any],
    real_values: Mapping[str, Any],
    fixed: frozenset[str],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return a value for each input of a step, at which two programs are compared.

    Floats get random finite-field elements, and float64 values near a real run. Other arrays are
    unchanged.

    Args:
      types: type of each input, by name.
      real_values: arrays of a real run, by name.
      fixed: names of inputs that keep their values, because a plan may contain these values.
      rng: the random generator.
    """
    point: dict[str, Any] = {}
    for name, t in types.items():
        x = real_values[name]
        moves = values.is_float(t.dtype) or values.is_complex(t.dtype)
        if not moves or name in fixed:
            point[name] = values.lifted(x, t.dtype)
            continue
        if values.is_complex(t.dtype):
            part = jax.ShapeDtypeStruct(t.shape, np.dtype(np.float64))
            both = {"real": np.real(x), "imag": np.imag(x)}
            point[name] = Complex(**random_point(dict.fromkeys(both, part), both, frozenset(), rng))
            continue
        noise = rng.uniform(0.5, 1, t.shape)
        near = np.asarray(x, np.float64)
        # Float64 values move toward zero, because a decay such as 0.999 in the state must stay
        # below 1.
        approx = np.where(near == 0, 1e-3 * noise, near * (1 - 1e-3 * noise))
        point[name] = Real(field.random_elements(rng, t.shape), approx)
    return point


@dataclasses.dataclass(frozen=True)
class BatchRange:
    """Range of the random numbers of a batch.

    Attributes:
      positive: True if floats are positive, for steps that take logarithms or roots of them.
      labels: upper bound of integers, exclusive; the lower bound is 0.
    """

    positive: bool
    labels: int


# A label must be below the number of classes, which is at least 2; other labels select NaN.
RANGES = (BatchRange(False, 4), BatchRange(False, 2), BatchRange(True, 2))


def random_arrays(
    types: Mapping[str, Any],
    rng: np.random.Generator,
    range_: BatchRange,
    arrays: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an array for each name in `types`: from `arrays`, or with random numbers."""
    batch: dict[str, Any] = {}
    for name, t in types.items():
        if arrays is not None and name in arrays:
            batch[name] = values.as_numpy(arrays[name])
        elif values.is_float(t.dtype) and range_.positive:
            batch[name] = np.asarray(rng.uniform(0.2, 1, t.shape))
        elif values.is_float(t.dtype):
            batch[name] = np.asarray(rng.normal(size=t.shape))
        elif values.is_complex(t.dtype):
            batch[name] = rng.normal(size=t.shape) + 1j * rng.normal(size=t.shape)
        elif jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
            keys = jax.random.key(int(rng.integers(1 << 30)))
            batch[name] = jax.random.split(keys, t.shape) if t.shape else keys
        elif t.dtype == bool:
            batch[name] = rng.integers(0, 2, t.shape).astype(bool)
        else:
            batch[name] = rng.integers(0, range_.labels, t.shape).astype(t.dtype)
    return batch


def random_arguments(types: Mapping[str, Any], seed: int) -> list[Any]:
    """Return random arguments for an init function."""
    drawn = random_arrays(types, np.random.default_rng(seed), BatchRange(True, 4))
    arguments = []
    for name, x in drawn.items():
        arguments.append(x if values.is_key(x) else jnp.asarray(x, types[name].dtype))
    return arguments
