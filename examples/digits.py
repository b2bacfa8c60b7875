"""Handwritten digits, and a small perceptron. scikit-learn contains the 1,797 images of 8 x 8.

All functions are pure. The sequence of *global* batches depends only on (seed, epoch). Trainer k of
N uses rows k*B/N to (k+1)*B/N of a batch (`shard`), and a single device uses all rows. So both
train on the same examples in the same order.

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
    """Images and labels, split into a training set and a test set.

    Attributes:
      x, y: training images (rows of 64 pixels, from 0 to 1), and their labels.
      test_x, test_y: test images and labels.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load(seed: int = 0) -> Digits:
    """Return the digits: 1,437 training images and 360 test images, chosen by the seed.

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
    """Raise ConfigError if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise missing_extra("the digits are a data set of scikit-learn", "examples")


def batches(
    data: Digits, seed: int, epoch: int, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the global batches of one epoch, without an incomplete last batch.

    Each epoch has another permutation of the images.

    Raises:
      BatchError: `size` is not between 1 and the number of training images.
    """
    if not 0 < size <= len(data.x):
        raise BatchError(f"the batch size is {size}; expected 1 to {len(data.x)} images")
    order = np.random.default_rng((seed, epoch)).permutation(len(data.x))
    for start in range(0, len(order) - size + 1, size):
        rows = order[start : start + size]
        yield data.x[rows], data.y[rows]


def shard(
    batch: tuple[np.ndarray, np.ndarray], trainer: int, trainers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return one trainer's rows of a global batch.

    Raises:
      BatchError: the number of trainers does not divide the batch.
    """
    size, rest = divmod(len(batch[0]), trainers)
    if rest:
        raise BatchError(
            f"a batch of {len(batch[0])} images cannot be divided among {trainers} trainers; use a "
            "multiple of the number of trainers"
        )
    rows = slice(trainer * size, (trainer + 1) * size)
    return batch[0][rows], batch[1][rows]


def init(key: jax.Array) -> Params:
    """Return initial parameters of a 64-512-10 perceptron, wide enough for several blocks."""
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
    """Return ten logits for each image."""
    # tanh is used because relu has a kink. If two runs round a value to different sides of the
    # kink, their gradients differ, and Adam amplifies the difference: 1e-4 instead of 1e-6 after 12
    # epochs.
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return h @ params["output"]["w"] + params["output"]["b"]


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross entropy of a batch."""
    scores = jax.nn.log_softmax(logits(params, x))
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


def accuracy(params: Params, x: np.ndarray, y: np.ndarray) -> float:
    """Return the fraction of images whose largest logit belongs to the label."""
    return float(jnp.mean(jnp.argmax(logits(params, jnp.asarray(x)), axis=1) == y))
