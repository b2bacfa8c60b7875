"""The source of Python's standard library, character by character, and a small transformer that
reads it.

The text is there wherever Python is: the first million characters of the library's modules in
alphabetical order, without packages, so the same for everyone with the same version of Python. Its
tail is kept for validation. A printable ASCII character or a newline is one token; all
others are one.

Everything is a pure function of its arguments. The batch of a step depends only on (seed, step). A
pipeline and a single device therefore train on the same examples in the same order.
"""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtrans.errors import BatchError, ConfigError


PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
VOCABULARY = len(PRINTABLE) + 1  # the last is for all other characters
CHARACTERS, VALIDATION = 1_000_000, 50_000

LENGTH = 64  # characters that are read, of a row; each but the first is also to be told
LAYERS, WIDTH, HEADS = 4, 64, 4
LEARNING_RATE, WARM_UP = 6e-3, 20

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The text as tokens, split.

    Attributes:
      train: the characters for training.
      validation: the tail, for validation.
    """

    train: np.ndarray
    validation: np.ndarray


# -- the text --------------------------------------------------------------------------------------


def load(library: Path | None = None) -> Text:
    """Return the standard library's first 1,000,000 characters; the last 50,000 are held out.

    Args:
      library: the directory that has it; that of the running Python by default.

    Raises:
      ConfigError: there are not as many characters, as where a distribution keeps the library in an
        archive.

    Example:
      >>> from examples import characters
      >>> text = characters.load()
      >>> len(text.train), len(text.validation)
      (950000, 50000)
    """
    where = Path(sysconfig.get_path("stdlib")) if library is None else library
    parts: list[str] = []
    left = CHARACTERS
    for module in modules(where):
        # as Python reads it: by its declared encoding, with newlines of one kind
        with tokenize.open(module) as file:
            parts.append(file.read(left))
        left -= len(parts[-1])
        if not left:
            tokens = encode("".join(parts))
            return Text(tokens[:-VALIDATION], tokens[-VALIDATION:])
    raise ConfigError(
        f"the source of Python's standard library has {CHARACTERS - left:,} characters in {where}, "
        f"and {CHARACTERS:,} "
        "are trained on: use a Python that is installed with its source"
    )


def modules(library: Path) -> Iterator[Path]:
    """Return the library's modules that are one file of source, in the order of their names.

    Python lists its modules. Modules that a distribution or the build added are left out.
    """
    return (
        path
        for name in sorted(sys.stdlib_module_names)
        if (path := library / f"{name}.py").is_file()
    )


def encode(text: str) -> np.ndarray:
    r"""Return the tokens of a text, uint8.

    Example:
      >>> from examples.characters import decode, encode
      >>> encode(" a~\né").tolist()
      [0, 65, 94, 95, 96]
      >>> decode(encode("x = 'é'"))
      "x = '�'"
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    ids = np.full(128, VOCABULARY - 1, np.uint8)
    ids[[ord(c) for c in PRINTABLE]] = np.arange(len(PRINTABLE))
    return ids[np.minimum(points, 127)]  # 127 itself cannot be printed


def decode(tokens: np.ndarray) -> str:
    """Return the text of tokens."""
    return "".join((PRINTABLE + "\N{REPLACEMENT CHARACTER}")[i] for i in tokens)


def batch(text: Text, seed: int, step: int, rows: int) -> np.ndarray:
    """Return the global batch of a step: rows of LENGTH + 1 tokens from anywhere in the training
    text, int32.

    Raises:
      BatchError: no rows.
    """
    if rows < 1:
        raise BatchError(f"a batch of {rows} rows cannot be made")
    starts = np.random.default_rng((seed, step)).integers(len(text.train) - LENGTH, size=rows)
    return text.train[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def validation_rows(text: Text) -> np.ndarray:
    """Return the held-out text as rows of LENGTH + 1 tokens; each begins with the last token of the
    one before."""
    rows = (len(text.validation) - 1) // LENGTH
    return text.validation[np.arange(rows)[:, None] * LENGTH + np.arange(LENGTH + 1)].astype(
        np.int32
    )


def entropy(tokens: np.ndarray) -> float:
    """Return the loss (nats) of knowing how often each character comes, and nothing about those
    before it."""
    share = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
    seen = share[share > 0]
    return float(-np.sum(seen * np.log(seen)))


# -- the model -------------------------------------------------------------------------------------


def init(key: jax.Array) -> Params:
    """Return first parameters of the transformer, which tell next to nothing: the loss is about
    log(VOCABULARY)."""
    keys = jax.random.split(key, LAYERS + 2)
    return {
        # with smaller ones the loss stays long on a plateau, and leaves it in a way that amplifies
        # rounding
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.1,
        "positions": jax.random.normal(keys[1], (LENGTH, WIDTH)) * 0.1,
        "blocks": [_block(k) for k in keys[2:]],
        "norm": _norm(),
    }


def _block(key: jax.Array) -> Params:
    k = jax.random.split(key, 4)

    def dense(key: jax.Array, n: int, m: int, gain: float = 1.0) -> jax.Array:
        return jax.random.normal(key, (n, m)) * gain / np.sqrt(n)

    # what goes into the residual stream is smaller the more layers add to it (GPT-2)
    small = 1 / np.sqrt(2 * LAYERS)
    return {
        "norm1": _norm(),
        "qkv": dense(k[0], WIDTH, 3 * WIDTH),
        "out": dense(k[1], WIDTH, WIDTH, small),
        "norm2": _norm(),
        "up": dense(k[2], WIDTH, 4 * WIDTH),
        "down": dense(k[3], 4 * WIDTH, WIDTH, small),
    }


def _norm() -> Params:
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Return scores of the next token, (rows, length, VOCABULARY), after each of (rows, length)
    tokens.

    A decoder-only transformer with the norms before the layers; its embedding is also its last
    layer.
    """
    h = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"]:
        h = h + _attention(block, _normed(block["norm1"], h))
        h = h + jax.nn.gelu(_normed(block["norm2"], h) @ block["up"]) @ block["down"]
    return _normed(params["norm"], h) @ params["embedding"].T


def _normed(norm: Params, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * norm["scale"] + norm[
        "bias"
    ]


def _attention(block: Params, x: jax.Array) -> jax.Array:
    """Let each token read itself and those before it."""
    rows, length, width = x.shape
    q, k, v = (a.reshape(rows, length, HEADS, -1) for a in jnp.split(x @ block["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // HEADS)
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, width) @ block["out"]


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean cross entropy (nats per character) of telling each token of a row from those
    before it."""
    scores = logits(params, tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]))


def optimizer() -> Any:
    """Return AdamW, its learning rate warmed up in a line."""
    rate = optax.linear_schedule(LEARNING_RATE / WARM_UP, LEARNING_RATE, WARM_UP)
    return optax.adamw(rate, b2=0.99, weight_decay=0.01)


def validation_loss(params: Params, text: Text) -> float:
    """Return the loss on the held-out text."""
    return float(jax.jit(loss_fn)(params, validation_rows(text)))
