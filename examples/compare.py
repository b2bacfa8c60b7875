"""Comparison of a job with one device: virtual devices, and the difference of two pytrees."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np


def virtual_devices(count: int) -> None:
    """Create at least `count` virtual CPU devices, if JAX has created no devices yet."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has chosen the number
    try:
        jax.config.update(
            "jax_num_cpu_devices", max(count, jax.config.values["jax_num_cpu_devices"])
        )
    except RuntimeError:
        # JAX has created its devices already. Roles share them, and results stay the same.
        return


def difference(a: Any, b: Any) -> float:
    """Return the largest max|a - b| / max|b| over all leaves, in float64.

    For a leaf of zeros, it is max|a - b|. The result is NaN if an element is NaN.
    """
    found = []
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        wide, reference = np.asarray(x, np.float64), np.asarray(y, np.float64)
        found.append(np.abs(wide - reference).max() / (np.abs(reference).max() or 1.0))
    # unlike `max`, `np.max` returns NaN if an element is NaN
    return float(np.max(found))


def bound() -> float:
    """Return the bound of `difference`: rounding errors after a few hundred steps."""
    return 1e-10 if jax.config.read("jax_enable_x64") else 1e-5
