"""Wire types: rounding, sizes, values that are not finite, and error feedback."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrans.ops import CASTS, WIRE_TYPES, WireType, encode_with_feedback


PACKED = [n for n in WIRE_TYPES if n not in CASTS]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4)]


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rounded(name: str, x: Any) -> np.ndarray:
    wire = WireType(name)
    return np.asarray(wire.decode(wire.encode(x), x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WIRE_TYPES)
def test_an_encoded_array_has_the_type_that_plans_count(name: str, shape: Any) -> None:
    """A packed array has one or half a byte for each number, and four bytes for the scale."""
    wire, size = WireType(name), math.prod(shape)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = numbers(shape, dtype)
        sent = wire.encode(x)
        assert (sent.shape, sent.dtype) == (wire.type_of(x).shape, wire.type_of(x).dtype)
        expected = {"int8": 4 + size, "e3m0": 4 + (size + 1) // 2}
        assert sent.nbytes == expected.get(name, 2 * size)
        back = wire.decode(sent, x)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name, unit", [("bf16", 2.0**-9), ("fp16", 2.0**-12)])
def test_a_cast_rounds_to_the_nearest_number(name: str, unit: float) -> None:
    x = np.asarray(numbers((200,)))
    assert np.all(np.abs(rounded(name, x) - x) <= unit * 2 * np.abs(x))
    assert np.any(rounded(name, x) != x)


def test_a_factor_keeps_small_numbers_from_becoming_zero() -> None:
    x = jnp.full(3, 1e-9)
    wire = WireType("fp16", 1e6)
    assert not rounded("fp16", x).any()
    np.testing.assert_allclose(wire.decode(wire.encode(x), x), x, rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_int8_rounds_to_the_nearest_multiple_of_the_scale(seed: int) -> None:
    x = np.asarray(numbers((401,), seed=seed))
    scale = np.abs(x).max() / 127
    error = np.abs(rounded("int8", x) - x)
    assert error.max() <= 0.5001 * scale
    assert len(np.unique(rounded("int8", x))) > 100


@pytest.mark.parametrize("size", [400, 401])
def test_e3m0_rounds_to_zero_or_the_nearest_power_of_two(size: int) -> None:
    x = np.asarray(numbers((size,)))
    largest = np.abs(x).max()
    levels = np.array([0.0, *(0.5**k for k in range(7))]) * largest
    levels = np.concatenate([levels, -levels[1:]])
    nearest = levels[np.abs(x[:, None] - levels).argmin(1)]
    np.testing.assert_allclose(rounded("e3m0", x), nearest, rtol=1e-6)
    assert len(np.unique(nearest)) > 10


def test_e3m0_of_known_numbers() -> None:
    x = jnp.array([1.0, -0.3, 0.04, 0.002])
    assert rounded("e3m0", x).tolist() == [1.0, -0.25, 0.03125, 0.0]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [1e-35, 1e30, 2e38])
def test_numbers_near_the_limits_of_float32_are_encoded(name: str, size: float) -> None:
    x = jnp.array([1.0, -0.5, 0.25], jnp.float32) * size
    np.testing.assert_allclose(rounded(name, x), x, rtol=0.02)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38])
def test_a_scale_without_inverse_gives_zeros(name: str, size: float) -> None:
    assert not rounded(name, jnp.full(4, size, jnp.float32)).any()


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_no_number_is_finite_if_one_was_not(name: str, bad: float) -> None:
    """A server that looks for infinities sees them, and the trainer's rounding error stays finite."""
    x, old = numbers((9,)).at[4].set(bad), numbers((9,), seed=1)
    assert not np.isfinite(rounded(name, x)).any()
    sent, rounding_error = encode_with_feedback(WireType(name), x, old)
    assert not np.isfinite(WireType(name).decode(sent, x)).any()
    assert np.array_equal(rounding_error, old)


@pytest.mark.parametrize("name", PACKED)
def test_with_feedback_the_error_of_a_sum_stays_that_of_one_step(name: str) -> None:
    wire, total, decoded = WireType(name), np.zeros(33), np.zeros(33)
    rounding_error = jnp.zeros(33)
    for step in range(50):
        x = numbers((33,), seed=step)
        sent, rounding_error = encode_with_feedback(wire, x, rounding_error)
        total += np.asarray(x, np.float64)
        decoded += np.asarray(wire.decode(sent, x), np.float64)
        np.testing.assert_allclose(decoded + np.asarray(rounding_error), total, atol=1e-4)
    assert np.abs(np.asarray(rounding_error)).max() < 1.5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_feedback_includes_the_rounding_of_decoded_numbers_to_16_bits(
    name: str, dtype: Any
) -> None:
    """A server decodes a 16-bit leaf to 16 bits, so a repeated gradient must not be biased."""
    wire, x = WireType(name), numbers((33,), dtype)
    total, decoded = np.zeros(33), np.zeros(33)
    rounding_error = jnp.zeros(33, jnp.float32)
    encode = jax.jit(encode_with_feedback, static_argnums=0)
    for _ in range(100):
        sent, rounding_error = encode(wire, x, rounding_error)
        total += np.asarray(x, np.float64)
        decoded += np.asarray(wire.decode(sent, x), np.float64)
    np.testing.assert_allclose(decoded + np.asarray(rounding_error), total, atol=1e-4)


def test_the_mean_of_hundred_encoded_arrays_of_e3m0() -> None:
    x, rounding_error, total = jnp.array([1.0, -0.3, 0.04, 0.002]), jnp.zeros(4), np.zeros(4)
    for _ in range(100):
        sent, rounding_error = encode_with_feedback(WireType("e3m0"), x, rounding_error)
        total += np.asarray(WireType("e3m0").decode(sent, x), np.float64)
    np.testing.assert_allclose(total / 100, [1.0, -0.3, 0.04, 0.00203125], rtol=2e-3)
    assert total[3] == 0.203125
