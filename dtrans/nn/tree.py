"""Hierarchical softmax over a binary tree of classes (the leaves).

The probability of a class is the product of the probabilities of the turns on the path from the
root to its leaf. Each inner node has a row w of weights and a bias b. The probability of a turn to
the right is sigmoid(w x + b).

Source: Morin and Bengio, 2005. Paddle's `hierarchical_sigmoid` has the same complete tree
(paddle/fluid/operators/math/matrix_bit_code.h, `SimpleCode`). `custom_hierarchical_sigmoid` takes
Paddle's `path_table` and `path_code`, which contain the path of each row (`CustomCode`).
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
    """Binary tree of classes (the leaves), stored as the path from the root to each class.

    Attributes:
      nodes: the numbers of the inner nodes on the path to each class, of shape (classes, depth).
        Numbers begin with 0, and shorter paths are padded with -1.
      turns: an array with the shape of `nodes`: the turn at each node, 1 for right, 0 for left.
    """

    nodes: np.ndarray
    turns: np.ndarray

    def __post_init__(self) -> None:
        if self.nodes.shape != self.turns.shape or self.nodes.ndim != 2:
            raise ConfigError(
                f"nodes and turns have the shapes {self.nodes.shape} and {self.turns.shape}; "
                "expected the same shape (classes, depth)"
            )

    @property
    def inner(self) -> int:
        """The number of inner nodes, which is the number of rows of weights."""
        return int(self.nodes.max(initial=-1)) + 1


def complete_tree(classes: int) -> ClassTree:
    """Return the complete binary tree over `classes` classes, with Paddle's numbering of nodes.

    Example:
      >>> import dtrans.nn
      >>> dtrans.nn.complete_tree(3).nodes.tolist()
      [[0, -1], [0, 1], [0, 1]]
    """
    check_int("classes", classes, "a number of classes, 2 or more", least=2)
    paths = []
    for label in range(classes):
        code = label + classes
        bits = range(code.bit_length() - 2, -1, -1)
        paths.append([((code >> (bit + 1)) - 1, code >> bit & 1) for bit in bits])
    return _tree(paths)


def huffman_tree(frequencies: Sequence[float] | np.ndarray) -> ClassTree:
    """Return the Huffman tree of classes, in which frequent classes have short paths.

    Args:
      frequencies: the frequency of each class, 0 or more.

    Raises:
      ConfigError: there are fewer than two classes, or a frequency is negative.

    Example:
      >>> import dtrans.nn
      >>> (dtrans.nn.huffman_tree([8, 1, 1, 4]).nodes >= 0).sum(1).tolist()
      [1, 3, 3, 2]
    """
    weights = np.asarray(frequencies, np.float64)
    if weights.ndim != 1 or len(weights) < 2 or not np.all(weights >= 0):
        raise ConfigError(
            "frequencies is invalid; expected a 1-d array of two or more numbers, each 0 or more"
        )
    heap = [(f, i) for i, f in enumerate(weights.tolist())]
    heapq.heapify(heap)
    parent: dict[int, tuple[int, int]] = {}
    node = len(weights)
    while len(heap) > 1:
        (a, left), (b, right) = heapq.heappop(heap), heapq.heappop(heap)
        parent[left], parent[right] = (node, 0), (node, 1)
        heapq.heappush(heap, (a + b, node))
        node += 1
    root, paths = node - 1, []
    for label in range(len(weights)):
        path, at = [], label
        while at in parent:
            at, turn = parent[at]
            path.append((root - at, turn))  # number nodes from the root, which gets 0
        paths.append(path[::-1])
    return _tree(paths)


def _tree(paths: Sequence[Sequence[tuple[int, int]]]) -> ClassTree:
    """Return the tree with these paths: lists of (node, turn) for each class."""
    shape = len(paths), max(map(len, paths))
    nodes, turns = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for i, path in enumerate(paths):
        nodes[i, : len(path)], turns[i, : len(path)] = zip(*path, strict=True)
    return ClassTree(nodes, turns)


def hierarchical_sigmoid(
    weight: jax.Array, bias: jax.Array | None, x: jax.Array, labels: jax.Array, tree: ClassTree
) -> jax.Array:
    """Return the negative log-probability of each row's class.

    Args:
      weight: the weights of each inner node, of shape (tree.inner, d).
      bias: the bias of each inner node, of shape (tree.inner,) or (tree.inner, 1), or None.
      x: the inputs, of shape (rows, d).
      labels: the class of each row, of shape (rows,).
      tree: `complete_tree(classes)`, `huffman_tree(frequencies)`, or another `ClassTree`.

    Returns:
      An array of shape (rows,).

    Raises:
      ConfigError: shapes do not match.

    Example:
      >>> import jax.numpy as jnp, dtrans.nn
      >>> tree, weight = dtrans.nn.complete_tree(4), jnp.zeros((3, 2))
      >>> x, labels = jnp.ones((1, 2)), jnp.array([2])
      >>> loss = dtrans.nn.hierarchical_sigmoid(weight, None, x, labels, tree)
      >>> round(loss[0].item(), 4)
      1.3863
    """
    if x.ndim != 2 or labels.shape != x.shape[:1] or weight.shape != (tree.inner, x.shape[1]):
        raise ConfigError(
            f"weight, x and labels have the shapes {weight.shape}, {x.shape} and {labels.shape}; "
            f"expected ({tree.inner}, d), (rows, d) and (rows,)"
        )
    nodes, turns = jnp.asarray(tree.nodes)[labels], jnp.asarray(tree.turns)[labels]
    return _path_loss(weight, bias, x, nodes, turns)


def custom_hierarchical_sigmoid(
    weight: jax.Array,
    bias: jax.Array | None,
    x: jax.Array,
    path_table: jax.Array,
    path_code: jax.Array,
) -> jax.Array:
    """Return the negative log-probability of each row's path in a tree.

    The batch contains the paths. So rows may use trees of any shape, and `weight` can be an
    embedding table whose rows trainers request (`dtrans.pserver(sparse=...)`).

    Args:
      weight: the weights of each inner node, of shape (nodes, d).
      bias: the bias of each inner node, of shape (nodes,) or (nodes, 1), or None.
      x: the inputs, of shape (rows, d).
      path_table: the numbers of the inner nodes on each row's path, of shape (rows, depth).
        Shorter paths are padded with -1. The order of the nodes does not matter.
      path_code: the turn at each node, 1 for right and 0 for left, of shape (rows, depth).

    Returns:
      An array of shape (rows,).

    Raises:
      ConfigError: shapes do not match.

    Example:
      >>> import jax.numpy as jnp, dtrans.nn
      >>> weight, x = jnp.zeros((3, 2)), jnp.ones((2, 2))
      >>> path_table, path_code = jnp.array([[0, 2], [1, -1]]), jnp.array([[1, 0], [0, 0]])
      >>> loss = dtrans.nn.custom_hierarchical_sigmoid(weight, None, x, path_table, path_code)
      >>> [round(value, 4) for value in loss.tolist()]
      [1.3863, 0.6931]
    """
    shape = path_table.shape
    is_matrix = x.ndim == weight.ndim == len(shape) == 2
    if not is_matrix or shape != path_code.shape or len(x) != shape[0]:
        raise ConfigError(
            f"weight, x, path_table and path_code have the shapes {weight.shape}, {x.shape}, "
            f"{shape} and {path_code.shape}; expected (nodes, d), (rows, d), (rows, depth) and "
            "(rows, depth)"
        )
    if weight.shape[1] != x.shape[1]:
        raise ConfigError(
            f"weight and x have the shapes {weight.shape} and {x.shape}; expected (nodes, d) and "
            "(rows, d)"
        )
    return _path_loss(weight, bias, x, path_table, path_code)


def _path_loss(
    weight: jax.Array, bias: jax.Array | None, x: jax.Array, nodes: jax.Array, turns: jax.Array
) -> jax.Array:
    """Sum the loss of each row over the nodes of its path."""
    at = jnp.maximum(nodes, 0)
    logits = jnp.einsum("bd,bkd->bk", x, weight[at])
    if bias is not None:
        logits = logits + (bias if bias.ndim == 1 else bias[:, 0])[at]
    each: Any = jax.nn.softplus(logits) - turns * logits
    return jnp.sum(jnp.where(nodes >= 0, each, 0), -1)
