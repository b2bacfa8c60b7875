"""Hierarchical softmax: a class is a leaf of a binary tree, and its probability that of the turns
on the way to it.

Each inner node has a row of weights; a turn to the right has the probability sigmoid(w x + b). A
tree says for each class which nodes are on its way, and which turn it takes there: -1 stands behind
the end of shorter ways.

Source: Morin and Bengio, 2005. The complete tree is that of Paddle's `hierarchical_sigmoid`
(paddle/fluid/operators/math/matrix_bit_code.h, `SimpleCode`); a tree of one's own is its
`path_table` and `path_code`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checks import check_int
from dtrans.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class ClassTree:
    """The way to each class.

    Attributes:
      nodes: of shape (classes, depth): the inner nodes on the way, from 0; -1 behind its end.
      turns: of the same shape: 1 for a turn to the right, 0 to the left.
    """

    nodes: np.ndarray
    turns: np.ndarray

    def __post_init__(self) -> None:
        if self.nodes.shape != self.turns.shape or self.nodes.ndim != 2:
            raise ConfigError(
                f"nodes and turns are of shape (classes, depth): {self.nodes.shape}, "
                f"{self.turns.shape}"
            )

    @property
    def inner(self) -> int:
        """How many inner nodes it has: rows of weights."""
        return int(self.nodes.max(initial=-1)) + 1


def complete_tree(classes: int) -> ClassTree:
    """The complete binary tree over classes, as Paddle numbers it.

    Example:
      >>> import dtrans.nn
      >>> dtrans.nn.complete_tree(3).nodes.tolist()
      [[0, -1], [0, 1], [0, 1]]
    """
    check_int("classes", classes, "a number of classes, 2 or more", least=2)
    ways = []
    for label in range(classes):
        code = label + classes
        bits = range(code.bit_length() - 2, -1, -1)
        ways.append([((code >> (bit + 1)) - 1, code >> bit & 1) for bit in bits])
    return _tree(ways)


def huffman_tree(frequencies: Sequence[float] | np.ndarray) -> ClassTree:
    """Huffman's tree: frequent classes have short ways.

    Args:
      frequencies: of each class; 0 or more.

    Raises:
      ConfigError: fewer than two classes, or negative frequencies.

    Example:
      >>> import dtrans.nn
      >>> (dtrans.nn.huffman_tree([8, 1, 1, 4]).nodes >= 0).sum(1).tolist()
      [1, 3, 3, 2]
    """
    given = np.asarray(frequencies, np.float64)
    if given.ndim != 1 or len(given) < 2 or not np.all(given >= 0):
        raise ConfigError("frequencies must be a row of two numbers or more, none of them negative")
    heap = [(f, i) for i, f in enumerate(given.tolist())]
    heapq.heapify(heap)
    parent: dict[int, tuple[int, int]] = {}
    node = len(given)
    while len(heap) > 1:
        (a, left), (b, right) = heapq.heappop(heap), heapq.heappop(heap)
        parent[left], parent[right] = (node, 0), (node, 1)
        heapq.heappush(heap, (a + b, node))
        node += 1
    root, ways = node - 1, []
    for label in range(len(given)):
        way, at = [], label
        while at in parent:
            at, turn = parent[at]
            way.append((root - at, turn))  # the root is 0
        ways.append(way[::-1])
    return _tree(ways)


def _tree(ways: Sequence[Sequence[tuple[int, int]]]) -> ClassTree:
    depth = max(map(len, ways))
    nodes, turns = np.full((len(ways), depth), -1, np.int32), np.zeros((len(ways), depth), np.int32)
    for i, way in enumerate(ways):
        nodes[i, : len(way)], turns[i, : len(way)] = zip(*way, strict=True)
    return ClassTree(nodes, turns)


def hierarchical_sigmoid(
    weight: jax.Array, bias: jax.Array | None, x: jax.Array, labels: jax.Array, tree: ClassTree
) -> jax.Array:
    """The negative log-probability of each row's class.

    Args:
      weight: of shape (tree.inner, d): a row for each inner node.
      bias: of shape (tree.inner,) or (tree.inner, 1), or None.
      x: of shape (rows, d).
      labels: of shape (rows,).
      tree: `complete_tree(classes)`, `huffman_tree(frequencies)`, or one's own.

    Returns:
      An array of shape (rows,).

    Raises:
      ConfigError: arrays that do not fit.

    Example:
      >>> import jax.numpy as jnp, dtrans.nn
      >>> tree = dtrans.nn.complete_tree(4)
      >>> loss = dtrans.nn.hierarchical_sigmoid(jnp.zeros((3, 2)), None, jnp.ones((1, 2)), jnp.array([2]), tree)
      >>> round(loss[0].item(), 4)
      1.3863
    """
    if x.ndim != 2 or labels.shape != x.shape[:1] or weight.shape != (tree.inner, x.shape[1]):
        raise ConfigError(
            f"weight ({tree.inner}, d), x (rows, d) and labels (rows,) do not fit: {weight.shape}, "
            f"{x.shape}, "
            f"{labels.shape}"
        )
    nodes, turns = jnp.asarray(tree.nodes)[labels], jnp.asarray(tree.turns)[labels]
    at = jnp.maximum(nodes, 0)
    logits = jnp.einsum("bd,bkd->bk", x, weight[at])
    if bias is not None:
        logits = logits + (bias if bias.ndim == 1 else bias[:, 0])[at]
    each: Any = jax.nn.softplus(logits) - turns * logits
    return jnp.sum(jnp.where(nodes >= 0, each, 0), -1)
