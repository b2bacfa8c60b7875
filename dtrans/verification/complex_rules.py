"""Rules of primitives on complex numbers, which are pairs of elements of the finite field.

Modulo p = 2**61 - 1 no square is -1. So the pairs a + bi form the field GF(p**2), in which
conjugation is exact. `exp`, `abs` and `log` combine hashes of real numbers. The rules of all other
functions hash the real part and the imaginary part.

The field lacks most roots of unity, so the rule of an fft multiplies each dimension by a random
matrix instead. All ffts of one kind and size have the same matrix. The result is linear and treats
the rows of a batch separately, like an fft. But the rule of an inverse fft does not undo the rule
of an fft: two programs that are equal only because an inverse fft undoes an fft are reported as
different.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.verification import field, field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import (
    Complex,
    Real,
    as_real,
    choose,
    from_integers,
    real,
)
from dtrans.verification.rule_values import Rule, approx_of, axes_last, by_jax
from dtrans.verification.rules import REAL


def is_of_complex(eqn: JaxprEqn, operands: Sequence[Any]) -> bool:
    """Return True if an operand or output of an equation is complex."""
    for x in operands:
        if isinstance(x, Complex):
            return True
    return any(getattr(v.aval.dtype, "kind", "") == "c" for v in eqn.outvars)


def as_complex(x: Any) -> Complex:
    """Return a value as complex numbers."""
    if isinstance(x, Complex):
        return x
    x = as_real(x)
    return Complex(x, _zeros(x.shape))


def _zeros(shape: Sequence[int]) -> Real:
    return Real(np.zeros(shape, np.uint64), np.zeros(shape))


def _add(x: Real, y: Real) -> Real:
    return real(field.add(x.elements, y.elements), x.approx + y.approx)


def _subtract(x: Real, y: Real) -> Real:
    return real(field.subtract(x.elements, y.elements), x.approx - y.approx)


def _multiply(x: Real, y: Real) -> Real:
    return real(field.multiply(x.elements, y.elements), x.approx * y.approx)


def _inverse(x: Real) -> Real:
    return real(field.inverse(x.elements), 1 / x.approx)


def _negative(x: Real) -> Real:
    return real(field.negative(x.elements), -x.approx)


def _product(x: Complex, y: Complex) -> Complex:
    along = _subtract(_multiply(x.real, y.real), _multiply(x.imag, y.imag))
    return Complex(along, _add(_multiply(x.real, y.imag), _multiply(x.imag, y.real)))


def _squared_length(x: Complex) -> Real:
    return _add(_multiply(x.real, x.real), _multiply(x.imag, x.imag))


def _hashed(name: str, *xs: Real, approx: Array) -> Real:
    """Return the hash that represents the result of a real function, such as "exp"."""
    return values.hashed((name, []), *xs, approx=approx)


def _length(x: Complex) -> Real:
    return _hashed("sqrt", _squared_length(x), approx=np.abs(x.approx))


# -- rules -----------------------------------------------------------------------------------------


def _by_parts(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Apply the rule of real numbers to the real part, and to the imaginary part.

    This is correct for sums, and for equations that only move numbers.
    """
    rule = REAL[eqn.primitive.name]
    reals = rule(eqn, _parts(operands, "real"))
    imags = rule(eqn, _parts(operands, "imag"))
    outs: list[Any] = []
    for v, re, im in zip(eqn.outvars, reals, imags, strict=True):
        outs.append(Complex(re, im) if values.is_complex(v.aval.dtype) else re)
    return outs


def _parts(operands: Sequence[Any], name: str) -> list[Any]:
    """Return the part "real" or "imag" of each complex operand, and other operands unchanged."""
    return [getattr(x, name) if isinstance(x, Complex) else x for x in operands]


def _bilinear(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Contract complex operands by four contractions of their real and imaginary parts."""
    rule, (x, y) = REAL[eqn.primitive.name], map(as_complex, operands)
    product = lambda a, b: rule(eqn, [a, b])[0]
    along = _subtract(product(x.real, y.real), product(x.imag, y.imag))
    across = _add(product(x.real, y.imag), product(x.imag, y.real))
    return [Complex(along, across)]


def _mul(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = map(as_complex, operands)
    return [_product(x, y)]


def _square(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x = as_complex(operands[0])
    return [_product(x, x)]


def _reciprocal(x: Complex) -> Complex:
    scale = _inverse(_squared_length(x))
    return Complex(_multiply(x.real, scale), _negative(_multiply(x.imag, scale)))


def _div(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = map(as_complex, operands)
    return [_product(x, _reciprocal(y))]


def _integer_pow(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, n = as_complex(operands[0]), eqn.params["y"]
    if n < 0:
        x = _reciprocal(x)
    one = Complex(from_integers(np.ones(x.shape, np.int64)), _zeros(x.shape))
    return [functools.reduce(_product, [x] * abs(n), one)]


def _conj(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x = as_complex(operands[0])
    return [Complex(x.real, _negative(x.imag))]


def _abs(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    return [_length(as_complex(operands[0]))]


def _sign(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x = as_complex(operands[0])
    scale = _inverse(_length(x))
    zeros, is_zero = _zeros(x.shape), x.approx == 0
    first = choose(is_zero, zeros, _multiply(x.real, scale))
    return [Complex(first, choose(is_zero, zeros, _multiply(x.imag, scale)))]


def _exp(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x = as_complex(operands[0])
    size = _hashed("exp", x.real, approx=np.exp(x.real.approx))
    cosine = _hashed("cos", x.imag, approx=np.cos(x.imag.approx))
    sine = _hashed("sin", x.imag, approx=np.sin(x.imag.approx))
    return [Complex(_multiply(size, cosine), _multiply(size, sine))]


def _log(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x = as_complex(operands[0])
    size = _length(x)
    angle = _hashed("atan2", x.imag, x.real, approx=np.angle(x.approx))
    return [Complex(_hashed("log", size, approx=np.log(size.approx)), angle)]


def _hash(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Replace the result of a function that the finite field lacks by a hash of its operands.

    The operands are hashed twice: for the real part of the output, and for the imaginary part.
    """
    xs = [*map(as_complex, operands)]
    (approx,) = by_jax(eqn, [x.approx for x in xs])
    parts: list[Real] = []
    for x in xs:
        parts += [x.real, x.imag]
    name = f"complex {eqn.primitive.name}"
    first = values.hashed((name, "real"), *parts, approx=approx.real)
    return [Complex(first, values.hashed((name, "imag"), *parts, approx=approx.imag))]


def _compare(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = map(as_complex, operands)
    rule = REAL[eqn.primitive.name]
    (first,), (second,) = rule(eqn, [x.real, y.real]), rule(eqn, [x.imag, y.imag])
    if eqn.primitive.name == "eq":
        return [first & second]
    return [first | second]


def _convert(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), wanted = operands, eqn.outvars[0].aval.dtype
    if values.is_complex(wanted):
        return [as_complex(x)]
    if np.dtype(wanted).kind == "b":
        return [approx_of(x) != 0]
    return REAL["convert_element_type"](eqn, [as_complex(x).real])


def _product_along(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, axes = as_complex(operands[0]), tuple(eqn.params["axes"])
    re, im = axes_last(x.real, axes), axes_last(x.imag, axes)
    factors = []
    for k in range(re.shape[-1]):
        factors.append(Complex(values.take(re, (..., k)), values.take(im, (..., k))))
    return [functools.reduce(_product, factors)]


# -- fft -------------------------------------------------------------------------------------------


@functools.lru_cache(64)
def _random_matrix(name: str, rows: int, columns: int) -> Array:
    """Return a random matrix of field elements; equal names and shapes give equal matrices."""
    numbers = np.arange(rows * columns, dtype=np.uint64).reshape(rows, columns)
    return field.hashed(("fft", name, rows, columns), numbers)


def _random_matrices(name: str, rows: int, columns: int) -> tuple[Array, Array]:
    """Return the real and the imaginary part of a random complex matrix."""
    first = _random_matrix(f"{name} real", rows, columns)
    return first, _random_matrix(f"{name} imag", rows, columns)


def _mapped(x: Array, matrix: Array, axis: int) -> Array:
    """Multiply an array of finite-field elements by a matrix along one dimension."""
    moved = np.moveaxis(x, axis, -1)
    product = field.matrix_product(moved.reshape(-1, moved.shape[-1]), matrix)
    return np.moveaxis(product.reshape(*moved.shape[:-1], -1), -1, axis)


def _complex_map(
    parts: tuple[Array, Array], name: str, size: int, axis: int
) -> tuple[Array, Array]:
    """Multiply a complex array by a random complex matrix along one dimension, in place of an fft.

    Args:
      parts: real and imaginary part of the array.
      name: seed of the matrix.
      size: number of entries of the result along the dimension.
      axis: the dimension.
    """
    along, across = _random_matrices(name, size, size)
    re, im = parts
    first = field.subtract(_mapped(re, along, axis), _mapped(im, across, axis))
    return first, field.add(_mapped(re, across, axis), _mapped(im, along, axis))


def _fft(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), lengths = operands, tuple(eqn.params["fft_lengths"])
    parts: tuple[Array, Array]
    rest: tuple[int, ...]
    kind = getattr(eqn.params["fft_type"], "name", str(eqn.params["fft_type"])).upper()
    axes = tuple(range(len(x.shape) - len(lengths), len(x.shape)))
    if not isinstance(x, Complex):
        x = as_real(x)
    with np.errstate(all="ignore"):
        approx = _fft_approx(kind, approx_of(x), lengths, axes)
    if kind == "RFFT" and isinstance(x, Real):
        along, across = _random_matrices("rfft", lengths[-1], lengths[-1] // 2 + 1)
        parts = (_mapped(x.elements, along, axes[-1]), _mapped(x.elements, across, axes[-1]))
        rest = axes[:-1]
    else:
        x = as_complex(x)
        parts, rest = (x.real.elements, x.imag.elements), axes
    if kind == "IRFFT":
        rest = axes[:-1]
    name = "ifft" if kind.startswith("I") else "fft"
    for axis in rest:
        parts = _complex_map(parts, name, lengths[axis - axes[0]], axis)
    if kind == "IRFFT":
        size = lengths[-1] // 2 + 1
        along, across = _random_matrices("irfft", size, lengths[-1])
        both = field.add(_mapped(parts[0], along, axes[-1]), _mapped(parts[1], across, axes[-1]))
        return [real(both, approx)]
    return [Complex(real(parts[0], approx.real), real(parts[1], approx.imag))]


def _fft_approx(kind: str, x: Array, lengths: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    functions: Mapping[str, Any] = {
        "FFT": np.fft.fftn,
        "IFFT": np.fft.ifftn,
        "RFFT": np.fft.rfftn,
        "IRFFT": np.fft.irfftn,
    }
    return np.asarray(functions[kind](x, s=lengths, axes=axes))


COMPLEX: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "add", "add_any", "broadcast_in_dim", "concatenate", "copy", "copy_p", "cumsum",
            "device_put", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather",
            "gradient", "name", "neg", "optimization_barrier", "pad", "pbroadcast", "psum", "pvary",
            "reduce_precision", "reduce_sum", "reduce_window_sum", "reshape", "rev", "scatter",
            "scatter-add", "scatter-sub", "select_n", "sharding_constraint", "slice", "split",
            "squeeze", "stack", "stop_gradient", "sub", "tile", "transpose", "unstack",
        ),
        _by_parts,
    ),
    **dict.fromkeys(("dot_general", "conv_general_dilated"), _bilinear),
    **dict.fromkeys(("eq", "ne"), _compare),
    **dict.fromkeys(
        (
            "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "cos", "cosh", "exp2",
            "expm1", "log1p", "log2", "logistic", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan",
            "tanh",
        ),
        _hash,
    ),
    "mul": _mul,
    "square": _square,
    "div": _div,
    "integer_pow": _integer_pow,
    "reduce_prod": _product_along,
    "complex": lambda eqn, operands: [Complex(*operands)],
    "real": lambda eqn, operands: [as_complex(operands[0]).real],
    "imag": lambda eqn, operands: [as_complex(operands[0]).imag],
    "conj": _conj,
    "abs": _abs,
    "sign": _sign,
    "exp": _exp,
    "log": _log,
    "convert_element_type": _convert,
    "fft": _fft,
}  # fmt: skip
