"""Arithmetic modulo 2**61 - 1, compared with Python's integers, and floats as rationals."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from dtrans.verification import field
from dtrans.verification.rationals import element_of, elements_of, rational_of, simplest_between


EDGES = np.array([0, 1, 2, field.P - 1, field.P - 2, 1 << 31, (1 << 31) - 1, 1 << 60], np.uint64)


def _drawn(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return field.random_elements(rng, shape)


def _integers(x: np.ndarray) -> np.ndarray:
    return x.astype(object)


def test_sums_and_products_are_those_of_integers() -> None:
    x, y = np.meshgrid(np.concatenate([EDGES, _drawn(20)]), np.concatenate([EDGES, _drawn(30)]))
    for made, wanted in (
        (field.add(x, y), _integers(x) + _integers(y)),
        (field.subtract(x, y), _integers(x) - _integers(y)),
        (field.multiply(x, y), _integers(x) * _integers(y)),
        (field.negative(x), -_integers(x)),
    ):
        assert (_integers(made) == wanted % field.P).all()


@pytest.mark.parametrize("count", [1, 64, 65, 1001])
def test_inverses(count: int) -> None:
    x = _drawn(count)
    x[0] = 0
    assert (field.multiply(x, field.inverse(x)) == (x != 0)).all()


@pytest.mark.parametrize("inner", [1, 7, field.LONGEST, field.LONGEST + 1])
def test_matrix_products_are_exact(inner: int) -> None:
    x, y = _drawn(2, 3, inner), _drawn(2, inner, 2)
    x[0, 0], y[0, :, 0] = field.P - 1, field.P - 1  # the largest products
    wanted = np.einsum("bij,bjk->bik", _integers(x), _integers(y)) % field.P
    assert (_integers(field.matrix_product(x, y)) == wanted).all()


def test_sums_over_axes_and_places() -> None:
    x, where = _drawn(5, 6), np.array([0, 2, 2, 1, 0])
    assert (_integers(field.total(x, (0,))) == _integers(x).sum(0) % field.P).all()
    assert (_integers(field.cumulative_total(x, 1)) == np.cumsum(_integers(x), 1) % field.P).all()
    wanted = [sum(int(v) for v in x[where == k, 0]) % field.P for k in range(4)]
    assert field.add_at(4, where, x[:, 0]).tolist() == wanted


def test_a_hash_depends_on_the_name_and_on_each_argument() -> None:
    x, y = _drawn(50), _drawn(51)[:50]
    made = [
        field.hashed("exp", x),
        field.hashed("log", x),
        field.hashed("pow", x, y),
        field.hashed("pow", y, x),
    ]
    assert all((a != b).all() for i, a in enumerate(made) for b in made[:i])
    assert (field.hashed("exp", x) == made[0]).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "wanted", [Fraction(1, 12), Fraction(1, 10), Fraction(2, 3), Fraction(-9, 10), Fraction(3)]
)
def test_a_rounded_constant_is_the_number_that_was_meant(wanted: Fraction, dtype: str) -> None:
    rounded = float(np.asarray(float(wanted), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    found = rational_of(rounded, dtype)
    assert found.denominator <= wanted.denominator
    assert (
        float(np.asarray(float(found), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
        == rounded
    )
    if dtype != "bfloat16":
        assert found == wanted


def test_the_simplest_fraction_is_found() -> None:
    for low, high in (
        (Fraction(1, 7), Fraction(1, 5)),
        (Fraction(-3, 4), Fraction(-2, 3)),
        (Fraction(-1), Fraction(2)),
    ):
        found = simplest_between(low, high)
        by_size = [
            Fraction(n, d) for d in range(1, found.denominator) for n in range(-4 * d, 4 * d)
        ]
        assert low <= found <= high
        assert not any(low <= x <= high for x in by_size)


def test_numbers_that_are_not_finite_have_elements_of_their_own() -> None:
    assert (
        len({element_of(x, "float64") for x in (float("inf"), float("-inf"), float("nan"), 0.0)})
        == 4
    )
    assert elements_of(np.array([-1, 2]), np.int32).tolist() == [field.P - 1, 2]
