"""Handwritten digits: 1,797 images of 8 x 8 pixels, which scikit-learn ships, and a small
perceptron for them.

Everything is a pure function of its arguments. The sequence of *global* batches depends only on
(seed, epoch). Trainer k of N takes rows k*B/N to (k+1)*B/N of each (`shard`), a single device all
rows. Both therefore train on the same examples in the same order.

Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI
(1998).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.errors import BatchError, missing_extra


PIXELS, HIDDEN, CLASSES = 64, 512, 10
TRAIN_IMAGES, TEST_IMAGES = 1437, 360

Params = dict[str, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """The images, split.

    Attributes:
      x, y: training images (rows of pixels in 0 to 1) and labels.
      test_x, test_y: those kept for testing.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load(seed: int = 0) -> Digits:
    """Return the digits, split into 1,437 and 360 by a permutation that depends on the seed alone.

    Images have JAX's default floating-point type: float32, or float64 with `JAX_ENABLE_X64`.

    Raises:
      ConfigError: scikit-learn is not installed.
    """
    check_installed()
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x = (images[order] / 16).astype(jnp.zeros(()).dtype)
    y = labels[order].astype(np.int32)
    return Digits(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])


def check_installed() -> None:
    """Raise ConfigError when scikit-learn is not there."""
    if importlib.util.find_spec("sklearn") is None:
        raise missing_extra("the digits come with scikit-learn", "examples")


def batches(
    data: Digits, seed: int, epoch: int, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return the global batches of one epoch: a new permutation for each, without the incomplete
    last batch.

    Raises:
      BatchError: a size that no batch of these data can have.
    """
    if not 0 < size <= len(data.x):
        raise BatchError(f"a batch of {size} images cannot be made of {len(data.x)}")
    order = np.random.default_rng((seed, epoch)).permutation(len(data.x))
    for start in range(0, len(order) - size + 1, size):
        rows = order[start : start + size]
        yield data.x[rows], data.y[rows]


def shard(
    batch: tuple[np.ndarray, np.ndarray], trainer: int, trainers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a global batch that one trainer takes.

    Raises:
      BatchError: a batch that the trainers do not divide.
    """
    size, rest = divmod(len(batch[0]), trainers)
    if rest:
        raise BatchError(
            f"a batch of {len(batch[0])} images cannot be divided among {trainers} trainers: make "
            "it a multiple"
        )
    rows = slice(trainer * size, (trainer + 1) * size)
    return batch[0][rows], batch[1][rows]


def init(key: jax.Array) -> Params:
    """Return first parameters of a 64-512-10 perceptron: wide enough to be cut over servers."""
    k1, k2 = jax.random.split(key)
    return {
        "hidden": {
            "w": jax.random.normal(k1, (PIXELS, HIDDEN)) * np.sqrt(2 / PIXELS),
            "b": jnp.zeros(HIDDEN),
        },
        "output": {
            "w": jax.random.normal(k2, (HIDDEN, CLASSES)) * np.sqrt(1 / HIDDEN),
            "b": jnp.zeros(CLASSES),
        },
    }


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Return one row of ten scores per image."""
    # tanh, not relu: where two runs round a pre-activation to different sides of a kink, the
    # gradient jumps, and optimizers that divide by its size carry that into the parameters (1e-4
    # after 12 epochs of adam, against 1e-6)
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return h @ params["output"]["w"] + params["output"]["b"]


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross entropy of a batch."""
    scores = jax.nn.log_softmax(logits(params, x))
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


def accuracy(params: Params, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of images whose highest score is that of their label."""
    return float(jnp.mean(jnp.argmax(logits(params, jnp.asarray(x)), axis=1) == y))
