"""Batches that depend only on the number of the step, so a job and one device use the same."""

from __future__ import annotations

import functools

import jax
import numpy as np

from examples import characters, digits


ROWS, TEXT_ROWS = 64, 16


def images(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of handwritten digits, (64, 8, 8, 1), and their labels, (64,)."""
    data = _digits(bool(jax.config.read("jax_enable_x64")))
    rows = np.random.default_rng((0, step)).choice(len(data.x), ROWS, replace=False)
    return data.x[rows].reshape(ROWS, 8, 8, 1), data.y[rows]


def text(step: int) -> np.ndarray:
    """Return rows of the standard library's source: tokens of shape (16, 65)."""
    return characters.batch(_text(), 0, step, TEXT_ROWS)


@functools.cache
def _digits(wide: bool) -> digits.Digits:
    return digits.load()


@functools.cache
def _text() -> characters.Text:
    return characters.load()
