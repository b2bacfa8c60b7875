"""Comparison of a job with one device: devices to run it on, and the difference of two trees of
arrays."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np


def virtual_devices(count: int) -> None:
    """Ask for that many CPU devices at least, if JAX has not started yet; it concerns no other
    platform."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has said how many
    try:
        jax.config.update(
            "jax_num_cpu_devices", max(count, jax.config.values["jax_num_cpu_devices"])
        )
    except RuntimeError:
        # JAX has started, with the devices it has; roles share them, which changes no number
        return


def difference(a: Any, b: Any) -> float:
    """Return the largest max|a - b| / max|b| over all leaves, in float64; max|a - b| for a leaf of
    zeros.

    Not a number when any element of either is not.
    """
    found = []
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        wide, reference = np.asarray(x, np.float64), np.asarray(y, np.float64)
        found.append(np.abs(wide - reference).max() / (np.abs(reference).max() or 1.0))
    # np.max, unlike max, does not lose a NaN
    return float(np.max(found))


def bound() -> float:
    """Return the bound of the difference: rounding, amplified by some hundred steps."""
    return 1e-10 if jax.config.read("jax_enable_x64") else 1e-5
