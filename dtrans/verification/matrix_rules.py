"""Rules of linear algebra: exact solutions of systems, and hashes for decompositions.

The solution of a linear system is linear in the right-hand side, and plans rely on this: they may
solve the system for partial sums. So the rules of solves are exact. Decompositions are not linear,
and their rules return hashes of the matrix. Each matrix of a stack is hashed separately, because a
plan may split the stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.verification import field, field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import Complex, NoRuleError, Real, real
from dtrans.verification.rule_values import Rule, approx_of_all, by_jax, elements_in


def _parts_of(x: Any) -> list[Array]:
    """Return the real array of a value, or its real and imaginary arrays if it is complex.

    The entries of the arrays are elements of the finite field in which programs are compared.
    """
    if isinstance(x, Complex):
        return [x.real.elements, x.imag.elements]
    return [elements_in(x)]


def _digest(x: Array) -> Array:
    """Return a finite-field element for each matrix of a stack: a hash of all its entries."""
    place = np.arange(int(np.prod(x.shape[-2:])), dtype=np.uint64)
    weights = field.hashed("place in a matrix", place).reshape(x.shape[-2:])
    return field.total(field.hashed("entry", field.multiply(x, weights)), (-2, -1))


def _hash_matrices(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Replace a decomposition by hashes: each output entry is a hash of the full input matrix.

    The hashes of two programs agree if the programs decompose equal matrices.
    """
    approx_values = by_jax(eqn, approx_of_all(operands))
    stack = operands[0].shape[:-2]
    sums: list[Array] = []
    for x in operands:
        for part in _parts_of(x):
            # An operand of `householder_product` has a vector for each matrix.
            is_vector = part.ndim == len(stack) + 1
            sums.append(_digest(part.reshape(*stack, -1, 1) if is_vector else part))
    outputs: list[Any] = []
    for number, (v, approx) in enumerate(zip(eqn.outvars, approx_values, strict=True)):
        key = (eqn.primitive.name, number, str(sorted(eqn.params.items())))
        if values.is_complex(v.aval.dtype):
            parts = [
                _hashed_entries((*key, "real"), sums, approx.real, len(stack)),
                _hashed_entries((*key, "imag"), sums, approx.imag, len(stack)),
            ]
            outputs.append(Complex(*parts))
        elif values.is_float(v.aval.dtype):
            outputs.append(_hashed_entries((*key, "real"), sums, approx, len(stack)))
        else:
            outputs.append(approx.astype(v.aval.dtype))
    return outputs


def _hashed_entries(name: object, sums: Sequence[Array], approx: Array, stack: int) -> Real:
    """Return hashes in place of the output of a matrix function, such as a decomposition.

    The output is a stack of matrices. Matrix i of the output is computed from the digests of the
    operands' matrices i. Within a matrix, each entry also depends on its position.

    Args:
      name: name of the output; different names give different hashes.
      sums: for each operand, an array with the digest of each matrix in the stack.
      approx: the output in float64.
      stack: number of leading dimensions that form the stack.
    """
    shape = approx.shape[stack:]
    place = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    digests = [s.reshape(*s.shape, *[1] * place.ndim) for s in sums]
    hashes = field.hashed(name, *digests, place)
    return real(np.broadcast_to(hashes, approx.shape), approx)


def _triangular_solve(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Solve a triangular system, row by row."""
    a, b = operands
    if isinstance(a, Complex) or isinstance(b, Complex):
        raise NoRuleError("there is no rule for complex numbers")
    (approx,) = by_jax(eqn, approx_of_all(operands))
    p, transpose = eqn.params, lambda x: np.swapaxes(x, -1, -2)
    left, right, lower = elements_in(a), elements_in(b), bool(p["lower"])
    if p["unit_diagonal"]:
        count = left.shape[-1]
        left = np.where(np.eye(count, dtype=bool), np.uint64(1), left)
    # The system x a = b equals a^T x^T = b^T. An upper triangle becomes a lower one if rows and
    # columns are reversed.
    if bool(p["transpose_a"]) == bool(p["left_side"]):
        left, lower = transpose(left), not lower
    if not p["left_side"]:
        right = transpose(right)
    if lower:
        found = _forward(left, right)
    else:
        found = _forward(left[..., ::-1, ::-1], right[..., ::-1, :])[..., ::-1, :]
    if not p["left_side"]:
        found = transpose(found)
    return [real(found, approx)]


def _forward(lower: Array, right: Array) -> Array:
    """Solve lower @ x = right for stacks of lower triangular matrices."""
    found = np.zeros_like(right)
    scale = field.inverse(np.diagonal(lower, axis1=-2, axis2=-1))
    for k in range(lower.shape[-1]):
        rest = right[..., k, :]
        if k:
            known = field.matrix_product(lower[..., k : k + 1, :k], found[..., :k, :])
            rest = field.subtract(rest, known[..., 0, :])
        found[..., k, :] = field.multiply(rest, scale[..., k, None])
    return found


def _tridiagonal_solve(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Solve a tridiagonal system by elimination below the diagonal (Thomas algorithm)."""
    if any(isinstance(x, Complex) for x in operands):
        raise NoRuleError("there is no rule for complex numbers")
    (approx,) = by_jax(eqn, approx_of_all(operands))
    below, diagonal, above, right = map(elements_in, operands)
    count = diagonal.shape[-1]
    over: list[Array] = []
    rows: list[Array] = []
    for k in range(count):
        pivot, rest = diagonal[..., k], right[..., k, :]
        if k:
            pivot = field.subtract(pivot, field.multiply(below[..., k], over[-1]))
            rest = field.subtract(rest, field.multiply(below[..., k, None], rows[-1]))
        scale = field.inverse(pivot)
        over.append(field.multiply(above[..., k], scale))
        rows.append(field.multiply(rest, scale[..., None]))
    for k in range(count - 2, -1, -1):
        rows[k] = field.subtract(rows[k], field.multiply(over[k][..., None], rows[k + 1]))
    return [real(np.stack(rows, -2), approx)]


def _ragged_dot(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Multiply each group of rows by the group's matrix, or sum over the rows of each group."""
    x, y, sizes = operands
    p = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = p.dot_dimension_numbers
    ragged, group = p.lhs_ragged_dimensions, p.rhs_group_dimensions
    if any(map(len, batch)) or np.ndim(sizes) != 1 or len(ragged) != 1 or len(contract[0]) != 1:
        raise NoRuleError(
            "there is no rule for batch dimensions, or for more than one ragged dimension"
        )
    float64 = np.dtype(np.float64)
    (approx,) = by_jax(eqn, approx_of_all(operands), preferred_element_type=float64)
    (row,), ends = ragged, np.cumsum(sizes)
    starts = ends - sizes
    left, right = elements_in(x), elements_in(y)
    (inner,), (right_inner,) = contract
    if row in contract[0]:
        pieces = []
        for a, b in zip(starts, ends, strict=True):
            rows = np.moveaxis(np.take(left, np.arange(a, b), row), row, -1)
            columns = np.moveaxis(np.take(right, np.arange(a, b), right_inner), right_inner, 0)
            pieces.append(field.matrix_product(rows, columns))
        return [real(np.stack(pieces), approx)]
    (group_axis,) = group
    found = np.zeros(approx.shape, np.uint64)
    for k, (a, b) in enumerate(zip(starts, ends, strict=True)):
        matrix = np.take(right, k, group_axis)
        axis = right_inner - (group_axis < right_inner)
        rows = np.moveaxis(np.take(left, np.arange(a, b), row), inner, -1)
        found[a:b] = field.matrix_product(rows, np.moveaxis(matrix, axis, 0))
    return [real(found, approx)]


def _symmetric_product(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return alpha a a^T + beta c, for stacks of matrices."""
    (approx,) = by_jax(eqn, approx_of_all(operands))
    a, c = map(elements_in, operands)
    scale = lambda key: values.lifted(np.asarray(eqn.params[key]), np.float64).elements
    alpha, beta = scale("alpha"), scale("beta")
    squares = field.multiply(field.matrix_product(a, np.swapaxes(a, -1, -2)), alpha)
    return [real(field.add(squares, field.multiply(c, beta)), approx)]


DECOMPOSITIONS: Sequence[str] = (
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur",
    "svd", "tridiagonal",
)  # fmt: skip
MATRICES: Mapping[str, Rule] = {
    **dict.fromkeys(DECOMPOSITIONS, _hash_matrices),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _tridiagonal_solve,
    "ragged_dot_general": _ragged_dot,
    "symmetric_product": _symmetric_product,
}
