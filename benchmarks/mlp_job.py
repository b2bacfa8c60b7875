"""Job of `hosts.py` and `peers`: an MLP, its first parameters, its batch and its gradients.

All frameworks begin with the same numbers: `uniform` hashes the index of an element, and gives
equal bits in NumPy and JAX. The loss is the mean squared error. This module needs NumPy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


ROWS = 64  # of the batch, for each trainer
MODELS = {
    "0.2M": [784, 256, 10],
    "1.9M": [784, 1024, 1024, 10],
    "25M": [1024, 4096, 4096, 1024],
}
BATCH_SEED = 1000  # above the seeds of all layers


def uniform(shape: Sequence[int], seed: int, deviation: float, xp: Any = np) -> Any:
    """Return uniform numbers with the mean 0, as float32.

    The bits are those of MurmurHash3's last mixing steps, applied to the index of each element.

    Args:
      deviation: the standard deviation.
      xp: `numpy` or `jax.numpy`.
    """
    bits = xp.arange(math.prod(shape), dtype=xp.uint32) + np.uint32(seed << 25 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits = bits ^ (bits >> np.uint32(16))
    centered = (bits >> np.uint32(8)).astype(xp.float32) * np.float32(2.0**-24) - np.float32(0.5)
    return (centered * np.float32(deviation * 12**0.5)).reshape(tuple(shape))


def first_params(sizes: Sequence[int], xp: Any = np) -> list[dict[str, Any]]:
    """Return the first parameters: `w` and `b` of each layer."""
    layers = []
    for seed, (wide, out) in enumerate(itertools.pairwise(sizes)):
        w = uniform((wide, out), seed, wide**-0.5, xp)
        layers.append({"w": w, "b": xp.zeros(out, xp.float32)})
    return layers


def leaves_of(layers: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the arrays in JAX's order: `b` and `w` of each layer."""
    return [layer[name] for layer in layers for name in ("b", "w")]


def batch(sizes: Sequence[int], trainers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the batch of all trainers."""
    rows = ROWS * trainers
    x = uniform((rows, sizes[0]), BATCH_SEED, 1.0)
    return x, uniform((rows, sizes[-1]), BATCH_SEED + 1, 1.0)


def batch_of_trainer(
    sizes: Sequence[int], trainer: int, trainers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of one trainer."""
    x, y = batch(sizes, trainers)
    rows = slice(trainer * ROWS, (trainer + 1) * ROWS)
    return x[rows], y[rows]


def gradients(
    leaves: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """Return the loss and its gradients, in the order of `leaves_of`."""
    layers = [*zip(leaves[::2], leaves[1::2], strict=True)]
    inputs = []
    for b, w in layers[:-1]:
        inputs.append(x)
        x = np.maximum(x @ w + b, 0)
    b, w = layers[-1]
    inputs.append(x)
    error = x @ w + b - y
    loss = float(np.mean(error * error))
    flow = error * np.float32(2 / error.size)
    found: list[np.ndarray] = []
    for (_, w), entered in zip(reversed(layers), reversed(inputs), strict=True):
        found = [flow.sum(0), entered.T @ flow, *found]
        if entered is not inputs[0]:
            flow = (flow @ w.T) * (entered > 0)
    return loss, found
