"""Wire types: the types of arrays in messages, with the equations that encode and decode arrays.

    bf16, fp16   a cast to 16 bits
    int8         integers from -127 to 127, times one scale
    e3m0         4 bits for each number: a sign, and 0 or one of seven powers of two, times one
                 scale
    topk         the largest numbers of an array, with their indices

The last three types are *packed*: an encoded array is a vector of bytes. With int8 and e3m0, the
first four bytes are the scale, a float32 number. The integers follow, or pairs of 4-bit numbers. If
an array contains an infinity or a NaN, no number of the decoded array is finite. With topk, the
values come first, in the array's own type, and then their int32 indices. If this form has as many
bytes as the array itself, the full array is sent instead.

Packed types lose small numbers. *Error feedback* adds the rounding error of a step to the array of
the next step. So the error of a sum over steps stays bounded. With topk, the rounding error
consists of the numbers that were not sent. *Momentum correction* adds up momenta in place of
gradients. So a number that is sent late includes the momentum that it has gained meanwhile.

Source: error feedback: Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014). E3M0:
Douillard et al., Streaming DiLoCo (arXiv 2501.18512). Momentum correction: Lin et al., Deep
Gradient Compression (arXiv 1712.01887).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import ShapedArray


CASTS = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
WIRE_TYPES = (*CASTS, "int8", "e3m0")
TOPK = "topk"
SCALE_BYTES = 4
INDEX_BYTES = 4  # an int32 index of topk
LARGEST = 127  # largest integer of int8; -128 is unused, so that signs are symmetric
# A product of an integer and a scale with 16 bits is exact in float32. So results do not depend on
# the compiler's choice between separate and fused multiplication and addition.
SCALE_BITS = 15
EXPONENTS = 7  # powers of two in E3M0: 1, 1/2, ..., 1/64


@dataclasses.dataclass(frozen=True)
class WireType:
    """Type in which an array is sent.

    Attributes:
      name: one of `WIRE_TYPES`, or "topk".
      factor: multiplies the array before a cast, and divides the array after the inverse cast.
      densities: with topk, the fraction of the numbers to send, at each level of a ramp-up.
      level: index of the density that `encode` and `type_of` use. `decode` also decodes arrays of
        other levels.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.ops.wire_types import WireType
      >>> x = jnp.array([1.0, -0.3, 0.04, 0.002])
      >>> wire = WireType("e3m0")
      >>> sent = wire.encode(x)
      >>> sent.nbytes, wire.decode(sent, x).tolist()
      (6, [1.0, -0.25, 0.03125, 0.0])
    """

    name: str
    factor: float = 1.0
    densities: tuple[float, ...] = ()
    level: int = 0

    @property
    def is_packed(self) -> bool:
        """True if an encoded array is a vector of bytes."""
        return self.name not in CASTS

    @property
    def is_sparse(self) -> bool:
        """True for topk."""
        return self.name == TOPK

    @property
    def levels(self) -> tuple[WireType, ...]:
        """Copies of this type, one with each density; the type alone if it has no densities."""
        count = max(1, len(self.densities))
        return tuple(dataclasses.replace(self, level=i) for i in range(count))

    def sent_count(self, t: Any) -> int | None:
        """Return the number of values that topk sends of an array; None if it sends all of them.

        With their indices, many values would need as many bytes as the array. Then topk sends the
        array.

        Args:
          t: the array, or its type.
        """
        size, width = math.prod(t.shape), np.dtype(t.dtype).itemsize
        count = max(1, round(self.densities[self.level] * size))
        return count if count * (width + INDEX_BYTES) < size * width else None

    def type_of(self, t: Any) -> ShapedArray:
        """Return the type of the encoded array, for an array of type `t`."""
        if not self.is_packed:
            return ShapedArray(t.shape, np.dtype(CASTS[self.name]))
        size = math.prod(t.shape)
        if self.is_sparse:
            count = self.sent_count(t)
            if count is None:
                return ShapedArray(t.shape, np.dtype(t.dtype))
            width = np.dtype(t.dtype).itemsize + INDEX_BYTES
            return ShapedArray((count * width,), np.dtype(np.uint8))
        if self.name == "e3m0":
            size = -(-size // 2)
        return ShapedArray((SCALE_BYTES + size,), np.dtype(np.uint8))

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the encoded array."""
        if not self.is_packed:
            scaled = x if self.factor == 1.0 else x * self.factor
            return scaled.astype(CASTS[self.name])
        if self.is_sparse:
            count = self.sent_count(x)
            return x if count is None else _largest(x.reshape(-1), count)
        wide = x.reshape(-1).astype(jnp.promote_types(x.dtype, jnp.float32))
        largest = jnp.max(jnp.abs(wide)).astype(jnp.float32)
        if self.name == "int8":
            scale, inverse = _with_inverse(
                jax.lax.reduce_precision(largest / LARGEST, 8, SCALE_BITS)
            )
            codes = _integers(wide * inverse)
        else:
            # the inverse of a larger number than this one is subnormal, which XLA replaces by 0
            factor = jnp.where(largest > 2.0**100, 2.0**-100, 1.0)
            scale, inverse = _with_inverse(largest * factor)
            codes, scale = _powers(wide * factor * inverse), scale / factor
        first = jax.lax.bitcast_convert_type(scale.reshape(1), jnp.uint8).reshape(-1)
        return jnp.concatenate([first, codes])

    def decode(self, sent: jax.Array, t: Any) -> jax.Array:
        """Return the array of type `t` from its encoded array."""
        if not self.is_packed:
            x = sent.astype(t.dtype)
            return x if self.factor == 1.0 else x / self.factor
        if self.is_sparse:
            if sent.dtype != np.uint8:
                return sent.astype(t.dtype)
            values, indices = _split_largest(sent, t.dtype)
            x = jnp.zeros(math.prod(t.shape), t.dtype).at[indices].set(values, mode="drop")
            return x.reshape(t.shape)
        first = sent[:SCALE_BYTES].reshape(1, SCALE_BYTES)
        scale, codes = jax.lax.bitcast_convert_type(first, jnp.float32), sent[SCALE_BYTES:]
        if self.name == "int8":
            integers = jax.lax.bitcast_convert_type(codes, jnp.int8)
            x = integers.astype(jnp.float32) * scale
        else:
            x = _from_powers(codes, scale)[: math.prod(t.shape)]
        return x.reshape(t.shape).astype(t.dtype)


def _with_inverse(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a scale and its inverse; both are 0 if the inverse would overflow."""
    is_small = scale < jnp.finfo(jnp.float32).tiny
    inverse = 1 / jnp.where(is_small, 1, scale)
    return jnp.where(is_small, 0, scale), jnp.where(is_small, 0, inverse)


def _integers(x: jax.Array) -> jax.Array:
    """Round numbers to integers, and return them as bytes."""
    codes = jnp.clip(jnp.round(x), -LARGEST, LARGEST).astype(jnp.int8)
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def _powers(x: jax.Array) -> jax.Array:
    """Round numbers to 0 or the nearest power of two, and return two numbers in each byte."""
    size = jnp.abs(x)
    # code 0 is zero, and code k is 2 ** (k - 7); each boundary is the mean of two neighbours
    boundaries = [0.5 ** (EXPONENTS - 1) / 2]
    boundaries += [0.75 * 0.5 ** (EXPONENTS - k) for k in range(2, EXPONENTS + 1)]
    codes = sum((size >= t).astype(jnp.uint8) for t in boundaries)
    codes = codes | ((x < 0).astype(jnp.uint8) << 3)
    low, high = jnp.pad(codes, (0, codes.size % 2)).reshape(-1, 2).T
    return low | (high << 4)


def _from_powers(pairs: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the rounded numbers in the bytes of `_powers`, times the scale."""
    codes = jnp.stack([pairs & 15, pairs >> 4], -1).reshape(-1)
    # 2 ** code / 2, which is 0 for code 0
    power = (jnp.uint8(1) << (codes & 7)) >> 1
    size = power.astype(jnp.float32) * (scale * 0.5 ** (EXPONENTS - 1))
    return jnp.where(codes >> 3, -size, size)


def _largest(x: jax.Array, count: int) -> jax.Array:
    """Return the largest numbers of a vector and their indices, as bytes."""
    _, indices = jax.lax.top_k(jnp.abs(x), count)
    indices = indices.astype(jnp.int32)
    parts = [jax.lax.bitcast_convert_type(a, jnp.uint8) for a in (x[indices], indices)]
    return jnp.concatenate([a.reshape(-1) for a in parts])


def _split_largest(sent: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the values and the indices in the bytes of `_largest`."""
    width = np.dtype(dtype).itemsize
    count = sent.size // (width + INDEX_BYTES)
    values = sent[: count * width].reshape(count, width)
    indices = sent[count * width :].reshape(count, INDEX_BYTES)
    return (
        jax.lax.bitcast_convert_type(values, dtype),
        jax.lax.bitcast_convert_type(indices, jnp.int32),
    )


@functools.cache
def encoded(wire: WireType) -> Callable[[jax.Array], jax.Array]:
    """Return a function that encodes an array."""
    return lambda x: wire.encode(x)


@functools.cache
def decoded(wire: WireType, shape: tuple[int, ...], dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a function that decodes an array of this shape and dtype."""
    t = jax.ShapeDtypeStruct(shape, dtype)
    return lambda sent: wire.decode(sent, t)


def encode_with_feedback(
    wire: WireType, x: jax.Array, rounding_error: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Encode the sum of an array and the rounding error of the last step.

    Args:
      wire: the wire type.
      x: the array.
      rounding_error: the rounding error of the last step, an array like `x`.

    Returns:
      The encoded sum, and its rounding error. If the sum is not finite, the error does not change.
    """
    return _encode_total(wire, x + rounding_error, rounding_error, x)


def encode_with_momentum(
    wire: WireType,
    x: jax.Array,
    rounding_error: jax.Array,
    momentum: jax.Array,
    factor: float,
    *,
    nesterov: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Encode the sum of momenta that were not sent, by Deep Gradient Compression.

        momentum       <- factor * momentum + x
        rounding_error <- rounding_error + momentum

    The largest numbers of `rounding_error` are sent, and are then zero in both arrays (*factor
    masking*). If the full array is sent, only `rounding_error` is set to zero. Then the sum of the
    trainers' messages is the momentum of training on one device.

    Args:
      wire: the wire type, topk.
      x: the gradient.
      rounding_error, momentum: the results of the last step, arrays like `x`.
      factor: the factor of momentum.
      nesterov: True for Nesterov momentum.

    Returns:
      The encoded array, the new rounding error and the new momentum. Where results are not finite,
      the old values stay.
    """
    if nesterov:
        new = without_last_bit(factor * (momentum + x))
        total = (new + x) + rounding_error
    else:
        new = without_last_bit(factor * momentum) + x
        total = new + rounding_error
    sent, rest = _encode_total(wire, total, rounding_error, x)
    new = jnp.where(jnp.isfinite(new), new, momentum)
    if wire.sent_count(x) is not None:
        _, indices = _split_largest(sent, x.dtype)
        new = new.reshape(-1).at[indices].set(0).reshape(new.shape)
    return sent, rest, new


def without_last_bit(x: jax.Array) -> jax.Array:
    """Round a product to one bit less than its type has.

    In some programs, XLA:CPU fuses the product and a later addition, which changes the last bit of
    the result. Then two jobs, or two equations that read the product, get different numbers. The
    rounding prevents the fusion.
    """
    t = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, t.nexp, t.nmant - 1)


def _encode_total(
    wire: WireType, total: jax.Array, rounding_error: jax.Array, t: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the encoded form of an array, and the rounding error of the encoding.

    Args:
      wire: the wire type.
      total: the array, to which the rounding error of the last step is already added.
      rounding_error: the rounding error of the last step. It stays where the new error is not
        finite.
      t: the gradient. Servers decode to its type.
    """
    sent = wire.encode(total.astype(t.dtype) if wire.is_sparse else total)
    # Servers decode to the type of the gradient. For 16-bit leaves, this rounds once more.
    rest = total - wire.decode(sent, t)
    return sent, jnp.where(jnp.isfinite(rest), rest, rounding_error)
