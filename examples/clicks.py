"""Click-through data with a planted truth, and a field-weighted factorisation machine that learns
it.

An impression has one feature of each of 20 tables. Numbers of features follow a power law, as
words, users and advertisements do. Each feature has a hidden vector, and whether an impression is
clicked is drawn with a probability that is known: the logistic function of a bias and of the
products of the vectors of some pairs of tables. So the best that can be learnt is known too: the
area under the curve (AUC) of the test set's own logits (Bayes). Of other tables nothing can be
learnt, and a model has to find that out. The first, which may be large, is one of these: most of
its features are seen too rarely to learn anything of them.

A hidden vector is made from its number when it is wanted, so that nobody has a table of them. Which
features are frequent is not seen in their numbers.

The batch of a step depends on (seed, step) alone, so that a job and one device train on the same
impressions.

Sources: power law and planted truth: Zipf (1949); the model: Pan et al., Field-weighted
factorization machines for click-through rate prediction (2018).
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
ROWS = 2_500  # of a table, but for the first
# of hidden vectors: entries, and their standard deviation; of the logit
HIDDEN, SPREAD, BIAS = (
    4,
    1.4,
    -1.0,
)
PAIRS = ((1, 2), (3, 4), (5, 6), (7, 8))  # the tables whose vectors are multiplied
EXPONENT = 1.05  # of the power law
# between the numbers of features that are next to each other by frequency; a prime
STRIDE = 2_654_435_761
TEST = 50_000  # impressions that are kept for testing
LEARNING_RATE, FIRST = 0.25, 0.2  # of Adagrad; the standard deviation of first entries
ENOUGH = 0.98  # of what can be learnt


@dataclasses.dataclass(frozen=True)
class ClickSettings:
    """The settings of a job. Written as arguments of a command, since roles are processes.

    Attributes:
      rows: of the first table; the others have `ROWS`.
      steps: number of training batches.
      batch_size: impressions in a global batch.
      seed: of the truth, the first parameters and the batches.
      deadline: seconds that a role may wait for another.

    Raises:
      ConfigError: a table that has fewer rows than the others.

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
        """Parse the settings that `arguments` wrote."""
        return from_arguments(cls, arguments)

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of rows of each table."""
        return np.array([self.rows, *[ROWS] * (TABLES - 1)])


# -- the truth -------------------------------------------------------------------------------------


def vectors(seed: int, table: int, ids: np.ndarray) -> np.ndarray:
    """Return the hidden vectors of features: (*ids.shape, `HIDDEN`), independent and normal."""
    with np.errstate(over="ignore"):  # numbers of 64 bits wrap
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
    """Return numbers of 64 bits that look random, one for each (SplitMix64: Steele et al.,
    2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def logits(seed: int, ids: np.ndarray) -> np.ndarray:
    """Return the true logits of impressions.

    Args:
      ids: (impressions, tables).
    """
    of = [vectors(seed, t, ids[:, t]) for t in range(TABLES)]
    return BIAS + sum(np.einsum("nd,nd->n", of[a], of[b]) for a, b in PAIRS)


def _drawn(rng: np.random.Generator, settings: ClickSettings, count: int) -> np.ndarray:
    """Draw features of impressions: the rank of each is a number between 1 and rows + 1 whose
    density is a power."""
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
    """Return the global batch of a step: features, (impressions, tables), and which are clicked, 1
    or 0."""
    return _impressions(settings, settings.batch_size, 1, step)


def test_set(settings: ClickSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return impressions that are in no batch."""
    return _impressions(settings, TEST, 0)


def auc(scores: np.ndarray, clicked: np.ndarray) -> float:
    """Return the area under the receiver operating characteristic.

    It is the share of pairs in which a click has a higher score than an impression without one.

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
    """Return logits of the model: a bias, and the products of all pairs of rows, each pair of
    tables with its weight.

    Args:
      weights: the parameters that are not tables.
      rows: (impressions, tables, `WIDTH`).
    """
    crossed = jnp.einsum("nad,nbd->nab", rows, rows)
    return weights["bias"] + jnp.einsum("nab,ab->n", crossed, jnp.triu(weights["pair"], 1))


def training(settings: ClickSettings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return one training step for one device, and init."""
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
