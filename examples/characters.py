"""Characters of Python's standard library as training data, and a small transformer.

The text consists of the first million characters of the library's modules in alphabetical order,
without packages. It depends only on the version of Python, and needs no download. The last 50,000
characters are for validation. Each printable ASCII character, and the newline, is a token. All
other characters are one further token.

All functions are pure. The batch of a step depends only on (seed, step). So a pipeline and a single
device train on the same examples in the same order.
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
VOCABULARY = len(PRINTABLE) + 1  # the last token stands for all other characters
CHARACTERS, VALIDATION = 1_000_000, 50_000

LENGTH = 64  # characters of a row that the model reads; it predicts the character after each
LAYERS, WIDTH, HEADS = 4, 64, 4
LEARNING_RATE, WARM_UP = 6e-3, 20

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Text as tokens, split into two parts.

    Attributes:
      train: tokens for training.
      validation: the last tokens, for validation.
    """

    train: np.ndarray
    validation: np.ndarray


# -- the text --------------------------------------------------------------------------------------


def load(library: Path | None = None) -> Text:
    """Return the standard library's first 1,000,000 characters, the last 50,000 for validation.

    Args:
      library: the folder of the library; by default the folder of the running Python.

    Raises:
      ConfigError: the folder has fewer characters, for example because the library is in an
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
        # `tokenize.open` decodes the file as Python does, and converts newlines to \n
        with tokenize.open(module) as file:
            parts.append(file.read(left))
        left -= len(parts[-1])
        if not left:
            tokens = encode("".join(parts))
            return Text(tokens[:-VALIDATION], tokens[-VALIDATION:])
    raise ConfigError(
        f"the source of Python's standard library has {CHARACTERS - left:,} characters in {where}, "
        f"expected {CHARACTERS:,}; use a Python that is installed with its source"
    )


def modules(library: Path) -> Iterator[Path]:
    """Return the library's modules that consist of one source file, in alphabetical order.

    Modules that are not in Python's list of modules, such as a distribution's, are left out.
    """
    return (
        path
        for name in sorted(sys.stdlib_module_names)
        if (path := library / f"{name}.py").is_file()
    )


def encode(text: str) -> np.ndarray:
    r"""Return the tokens of a text as an array of uint8.

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
    """Return the global batch of a step: random rows of the training text.

    Returns:
      An int32 array of shape (rows, LENGTH + 1).

    Raises:
      BatchError: `rows` is less than 1.
    """
    if rows < 1:
        raise BatchError(f"a batch of {rows} rows is empty; pass 1 row or more")
    starts = np.random.default_rng((seed, step)).integers(len(text.train) - LENGTH, size=rows)
    return text.train[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def validation_rows(text: Text) -> np.ndarray:
    """Return the validation text as an int32 array of shape (rows, LENGTH + 1).

    Each row begins with the last token of the previous row.
    """
    rows = (len(text.validation) - 1) // LENGTH
    return text.validation[np.arange(rows)[:, None] * LENGTH + np.arange(LENGTH + 1)].astype(
        np.int32
    )


def entropy(tokens: np.ndarray) -> float:
    """Return the entropy of the character frequencies in nats: the loss without any context."""
    share = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
    seen = share[share > 0]
    return float(-np.sum(seen * np.log(seen)))


# -- the model -------------------------------------------------------------------------------------


def init(key: jax.Array) -> Params:
    """Return initial parameters of the transformer, with a loss of about log(VOCABULARY)."""
    keys = jax.random.split(key, LAYERS + 2)
    return {
        # With a smaller factor, the loss stays on a plateau for a long time, and training then
        # amplifies rounding.
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.1,
        "positions": jax.random.normal(keys[1], (LENGTH, WIDTH)) * 0.1,
        "blocks": [_block(k) for k in keys[2:]],
        "norm": _norm(),
    }


def _block(key: jax.Array) -> Params:
    k = jax.random.split(key, 4)

    def dense(key: jax.Array, n: int, m: int, gain: float = 1.0) -> jax.Array:
        return jax.random.normal(key, (n, m)) * gain / np.sqrt(n)

    # As in GPT-2, weights that write to the residual stream are divided by sqrt(number of writes).
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
    """Return logits of the next token after each token, of shape (rows, length, VOCABULARY).

    The model is a decoder-only transformer with norms before the layers and a tied embedding.

    Args:
      params: the parameters.
      tokens: an array of shape (rows, length).
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
    """Return causal self-attention: each token attends to itself and to earlier tokens."""
    rows, length, width = x.shape
    q, k, v = (a.reshape(rows, length, HEADS, -1) for a in jnp.split(x @ block["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // HEADS)
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, width) @ block["out"]


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean cross entropy of each token given the earlier tokens, in nats."""
    scores = logits(params, tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]))


def optimizer() -> Any:
    """Return AdamW with a linear warm-up of the learning rate."""
    rate = optax.linear_schedule(LEARNING_RATE / WARM_UP, LEARNING_RATE, WARM_UP)
    return optax.adamw(rate, b2=0.99, weight_decay=0.01)


def validation_loss(params: Params, text: Text) -> float:
    """Return the loss on the validation text."""
    return float(jax.jit(loss_fn)(params, validation_rows(text)))
