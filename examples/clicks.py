"""Random clicks with known probabilities, and a factorization machine that predicts them.

An *impression* is one view of an advertisement. It has 20 features, one from each table. The
frequencies of a table's features follow a power law. Each feature has a hidden vector. For each
pair of tables in `PAIRS`, the hidden vectors of the two features are multiplied (dot product). The
logit of a click is the sum of these products and a bias. So the best possible area under the ROC
curve (AUC) is known: the AUC of the true logits. Tables that are in no pair have no effect on
clicks. The first table, which may be large, is one of them.

A hidden vector is a hash of the feature's id, so no table of hidden vectors exists. The id does not
show how frequent a feature is.

The batch of a step depends only on (seed, step), so a job and one device train on the same
impressions.

Sources: Zipf (1949) for the power law; Pan et al., Field-weighted factorization machines for
click-through rate prediction (2018), for the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans
from dtrans.checks import check_number
from examples.settings import as_arguments, from_arguments


TABLES, WIDTH = 20, 16
ROWS = 2_500  # rows of each table except the first
# hidden vectors: number of entries, and their standard deviation; and the bias of the true logits
HIDDEN, SPREAD, BIAS = (
    4,
    1.4,
    -1.0,
)
PAIRS = ((1, 2), (3, 4), (5, 6), (7, 8))  # the tables whose vectors are multiplied
EXPONENT = 1.05  # exponent of the power law
# A feature with frequency rank r has the id r * STRIDE modulo the number of rows. STRIDE is prime.
STRIDE = 2_654_435_761
TEST = 50_000  # impressions of the test set
LEARNING_RATE, FIRST = 0.25, 0.2  # learning rate, and standard deviation of initial table entries
ENOUGH = 0.98  # bound of (AUC - 0.5) / (best AUC - 0.5)


@dataclasses.dataclass(frozen=True)
class ClickSettings:
    """Settings of a job, which the launcher passes to roles as arguments of a command.

    Attributes:
      rows: number of rows of the first table. All other tables have `ROWS` rows.
      steps: number of training batches.
      batch_size: impressions in a global batch.
      seed: seed of the hidden vectors, the initial parameters and the batches.
      deadline: seconds that a role may wait for another role.

    Raises:
      ConfigError: `rows` is less than `ROWS`.

    Example:
      >>> from examples.clicks import ClickSettings
      >>> ClickSettings.parse(ClickSettings(rows=10_000_000).arguments()).rows
      10000000
    """

    rows: int = 10_000
    steps: int = 6000
    batch_size: int = 1024
    seed: int = 0
    deadline: float = 60.0

    def __post_init__(self) -> None:
        check_number("rows", self.rows, f"{ROWS} or more", lambda x: x >= ROWS)

    def arguments(self) -> list[str]:
        """Return the settings as command-line arguments."""
        return as_arguments(self)

    @classmethod
    def parse(cls, arguments: list[str]) -> ClickSettings:
        """Parse the result of `arguments`."""
        return from_arguments(cls, arguments)

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of rows of each table."""
        return np.array([self.rows, *[ROWS] * (TABLES - 1)])


# -- the truth -------------------------------------------------------------------------------------


def vectors(seed: int, table: int, ids: np.ndarray) -> np.ndarray:
    """Return the hidden vectors of features, independent and normal.

    Args:
      seed: the seed of the job.
      table: index of the table.
      ids: ids of features in this table.

    Returns:
      An array of shape (*ids.shape, `HIDDEN`).
    """
    with np.errstate(over="ignore"):  # 64-bit integers wrap
        of_table = _mixed(np.array([seed * TABLES + table], np.uint64))
        words = ids.astype(np.uint64)[..., None] * np.uint64(HIDDEN // 2) + np.arange(
            HIDDEN // 2, dtype=np.uint64
        )
        bits = _mixed(words + of_table)
    high, low = (bits >> np.uint64(32)).astype(float), (bits & np.uint64(0xFFFFFFFF)).astype(float)
    # Box and Muller, 1958
    radius, angle = (
        np.sqrt(-2 * np.log((high + 0.5) / 2**32)),
        2 * np.pi * low / 2**32,
    )
    return SPREAD * np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], -1)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return pseudorandom 64-bit hashes of integers (SplitMix64: Steele et al., 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def logits(seed: int, ids: np.ndarray) -> np.ndarray:
    """Return the true logits of impressions.

    Args:
      seed: the seed of the job.
      ids: feature ids, of shape (impressions, tables).
    """
    of = [vectors(seed, t, ids[:, t]) for t in range(TABLES)]
    return BIAS + sum(np.einsum("nd,nd->n", of[a], of[b]) for a, b in PAIRS)


def _drawn(rng: np.random.Generator, settings: ClickSettings, count: int) -> np.ndarray:
    """Draw features of impressions, of shape (count, tables).

    The frequency rank of a feature has a power-law density between 1 and rows + 1.
    """
    most = (settings.sizes + 1.0) ** (1 - EXPONENT)
    ranks = (1 - rng.random((count, TABLES)) * (1 - most)) ** (1 / (1 - EXPONENT))
    places = np.minimum(ranks.astype(np.int64) - 1, settings.sizes - 1)
    return (places * STRIDE % settings.sizes).astype(np.int32)


def _impressions(
    settings: ClickSettings, count: int, *number: int
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((settings.seed, *number))
    ids = _drawn(rng, settings, count)
    chance = 1 / (1 + np.exp(-logits(settings.seed, ids)))
    return ids, (rng.random(count) < chance).astype(np.float32)


def batch(settings: ClickSettings, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch of a step.

    Returns:
      Feature ids of shape (impressions, tables), and 1 for each click, 0 otherwise.
    """
    return _impressions(settings, settings.batch_size, 1, step)


def test_set(settings: ClickSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return the test impressions, which are drawn independently of the batches."""
    return _impressions(settings, TEST, 0)


def auc(scores: np.ndarray, clicked: np.ndarray) -> float:
    """Return the area under the receiver operating characteristic (ROC) curve.

    It is the probability that a random click has a higher score than a random impression without a
    click.

    Example:
      >>> import numpy as np
      >>> from examples.clicks import auc
      >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
      0.875
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # equal scores have their mean rank
    ones = clicked > 0
    hits, misses = int(ones.sum()), int((~ones).sum())
    return float((ranks[ones].sum() - hits * (hits + 1) / 2) / (hits * misses))


# -- the model -------------------------------------------------------------------------------------


def names() -> list[str]:
    """Return the names of the tables."""
    return [f"table{t:02}" for t in range(TABLES)]


def scores(weights: Any, rows: Any) -> jax.Array:
    """Return logits of the model: a bias plus weighted dot products of all pairs of rows.

    Args:
      weights: the bias, and a weight for each pair of tables.
      rows: the looked-up rows, of shape (impressions, tables, `WIDTH`).
    """
    crossed = jnp.einsum("nad,nbd->nab", rows, rows)
    return weights["bias"] + jnp.einsum("nab,ab->n", crossed, jnp.triu(weights["pair"], 1))


def training(settings: ClickSettings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the training step for one device, and the init."""
    tx = optax.adagrad(LEARNING_RATE)

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, TABLES)
        tables = zip(names(), keys, settings.sizes.tolist(), strict=True)
        params: Any = {n: FIRST * jax.random.normal(k, (size, WIDTH)) for n, k, size in tables}
        params["weights"] = {"bias": jnp.zeros(()), "pair": jnp.full((TABLES, TABLES), 0.2)}
        return params, tx.init(params)

    def loss(params: Any, ids: jax.Array, clicked: jax.Array) -> jax.Array:
        rows = jnp.stack([params[n][ids[:, t]] for t, n in enumerate(names())], 1)
        return jnp.sum(optax.sigmoid_binary_cross_entropy(scores(params["weights"], rows), clicked))

    return dtrans.make_train_step(loss, tx), init
