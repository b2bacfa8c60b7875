"""Word vectors of Python's standard library: a skip-gram model with two tables.

A word is an identifier, a keyword or a word of a comment. Frequent words are dropped at random
(Mikolov et al., 2013). Each remaining word predicts its neighbours, by noise-contrastive estimation
or by a Huffman tree (`dtrans.nn`). Parameter servers store the two tables, of words and of
contexts. A trainer requests only the rows that its part of a batch looks up. The optimizer is
Adagrad, which changes no other rows.

The batch of a step depends only on (seed, step), so a job and one device train on the same pairs.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans
from dtrans import nn
from dtrans.checks import check_one_of
from dtrans.errors import ConfigError
from examples.settings import as_arguments, from_arguments


WORD = re.compile(r"[A-Za-z_]{2,}")
LEAST = 8  # rarer words are not in the vocabulary
FREQUENT = 1e-4  # words with a larger share of the text are dropped at random
BESIDE = 4  # a word predicts this number of neighbours on each side
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages"}
WIDTH, NOISE, LEARNING_RATE = 48, 32, 0.1
LOSSES = ("nce", "tree")
NEAREST, ENOUGH = 10, 15

# test words, each with words that should be among its nearest words
PARTNERS: dict[str, set[str]] = {
    "int": {"float", "integer", "str", "hex", "oct"},
    "float": {"int", "complex", "Real", "Fraction"},
    "list": {"tuple", "tuples", "lists"},
    "tuple": {"list", "tuples"},
    "read": {"Read", "readinto", "write", "seek", "buf"},
    "write": {"Write", "read", "stream"},
    "open": {"file", "Open", "opened", "rb", "mode"},
    "close": {"Close", "closed", "closing"},
    "min": {"max"},
    "max": {"min"},
    "encode": {"decode"},
    "decode": {"encode"},
    "try": {"except"},
    "except": {"try"},
    "row": {"column", "col", "rows"},
    "column": {"row", "col", "columns"},
    "host": {"port"},
    "port": {"host"},
    "thread": {"Thread", "threads"},
    "lock": {"acquire", "RLock", "Lock", "acquired"},
}


@dataclasses.dataclass(frozen=True)
class WordSettings:
    """Settings of a job, which the launcher passes to roles as arguments of a command.

    Attributes:
      loss: "nce", or "tree" for hierarchical softmax.
      steps: number of training batches.
      batch_size: pairs in a global batch.
      seed: seed of the pairs, the initial parameters and the batches.
      deadline: seconds that a role may wait for another role.

    Example:
      >>> from examples.word2vec import WordSettings
      >>> WordSettings.parse(WordSettings(steps=3).arguments()).steps
      3
    """

    loss: str = "nce"
    steps: int = 3000
    batch_size: int = 2048
    seed: int = 0
    deadline: float = 60.0

    def __post_init__(self) -> None:
        check_one_of("loss", self.loss, LOSSES)

    def arguments(self) -> list[str]:
        """Return the settings as command-line arguments."""
        return as_arguments(self)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> WordSettings:
        """Parse the result of `arguments`."""
        return from_arguments(cls, arguments)


# -- the text --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Words:
    """Text as pairs of neighbouring words.

    Attributes:
      words: the vocabulary, the most frequent word first.
      counts: number of occurrences of each word in the text.
      centers, contexts: the two words of each pair, as int32 indices into `words`.
    """

    words: np.ndarray
    counts: np.ndarray
    centers: np.ndarray
    contexts: np.ndarray

    def save(self, path: Path) -> None:
        """Write the words to an npz file."""
        np.savez(path, allow_pickle=False, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Words:
        """Read a file that `save` wrote."""
        with np.load(path) as file:
            return cls(**{n: file[n] for n in file.files})

    def batch(self, settings: WordSettings, step: int) -> tuple[np.ndarray, np.ndarray, jax.Array]:
        """Return the global batch of a step: random pairs, and a random key for noise words."""
        chosen = np.random.default_rng((settings.seed, step)).integers(
            len(self.centers), size=settings.batch_size
        )
        return self.centers[chosen], self.contexts[chosen], jax.random.key(step)


def read(seed: int = 0, library: Path | None = None) -> Words:
    """Return the words of the standard library, without its tests.

    Args:
      seed: seed of the frequent words that are dropped.
      library: the folder of the library; by default the folder of the running Python.

    Raises:
      ConfigError: the folder contains no source files.
    """
    where = Path(sysconfig.get_path("stdlib")) if library is None else library
    texts = [WORD.findall(text) for text in _sources(where)]
    found = collections.Counter(w for text in texts for w in text)
    words = [w for w, count in found.most_common() if count >= LEAST]
    if not words:
        raise ConfigError(
            f"there is no source of Python's standard library in {where}; use a Python that is "
            "installed with its source"
        )
    number = {w: i for i, w in enumerate(words)}
    counts = np.array([found[w] for w in words])
    rng = np.random.default_rng(seed)
    share = np.minimum(1.0, np.sqrt(FREQUENT * counts.sum() / counts))
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for text in texts:
        ids = np.array([number[w] for w in text if w in number], np.int32)
        ids = ids[rng.random(len(ids)) < share[ids]]
        for apart in range(1, BESIDE + 1):
            pairs += [(ids[:-apart], ids[apart:]), (ids[apart:], ids[:-apart])]
    centers, contexts = (np.concatenate(of) for of in zip(*pairs, strict=True))
    return Words(np.array(words), counts, centers, contexts)


def _sources(library: Path) -> Iterator[str]:
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(library).parts):
            yield path.read_text("utf-8", errors="replace")


# -- the model -------------------------------------------------------------------------------------


def training(
    settings: WordSettings, counts: np.ndarray
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the training step for one device, and the init."""
    tx, size = optax.adagrad(LEARNING_RATE), len(counts)
    sampler = nn.custom_sampler(counts**0.75)
    tree = nn.huffman_tree(counts) if settings.loss == "tree" else None

    def init(key: jax.Array) -> tuple[Any, Any]:
        words = jax.random.normal(key, (size, WIDTH)) / WIDTH
        rows = size if tree is None else tree.inner
        params = {"word": words, "context": jnp.zeros((rows, WIDTH)), "bias": jnp.zeros(rows)}
        if tree is None:  # at first, each word has the probability that the noise gives it
            params["bias"] = sampler.log_probability(jnp.arange(size)).astype(words.dtype)
        return params, tx.init(params)

    def loss(params: Any, centers: jax.Array, contexts: jax.Array, key: jax.Array) -> jax.Array:
        x = params["word"][centers]
        if tree is not None:
            return jnp.sum(
                nn.hierarchical_sigmoid(params["context"], params["bias"], x, contexts, tree)
            )
        noise = sampler.draw(key, (NOISE,))
        return jnp.sum(nn.nce_loss(params["context"], params["bias"], x, contexts, noise, sampler))

    return dtrans.make_train_step(loss, tx), init


def nearest(words: Words, vectors: np.ndarray, word: str, count: int = NEAREST) -> list[str]:
    """Return the words whose vectors have the smallest angles to a word's vector.

    Raises:
      ConfigError: the word is not in the vocabulary.
    """
    (at,) = np.nonzero(words.words == word)
    if not len(at):
        raise ConfigError(
            f"{word!r} is not among the {len(words.words)} words of the vocabulary; pass a word "
            "that occurs in the text"
        )
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-(unit @ unit[at[0]]), kind="stable")
    return [str(w) for w in words.words[order[: count + 1]] if w != word][:count]


def with_partners(words: Words, vectors: np.ndarray) -> dict[str, list[str]]:
    """Return {test word: its nearest words}, if a partner of the test word is among them."""
    found = {w: nearest(words, vectors, w) for w in PARTNERS}
    return {w: near for w, near in found.items() if PARTNERS[w].intersection(near)}
