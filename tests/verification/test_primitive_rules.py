"""Rules of primitives: float64 values are what JAX computes, and elements have the properties that plans
use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans._jax import CALLBACKS, FACTS
from dtrans.verification.complex_rules import COMPLEX
from dtrans.verification.evaluate import CALLS, HANDLED, Evaluator
from dtrans.verification.field_values import Complex, Real, lifted, same
from dtrans.verification.matrix_rules import MATRICES
from dtrans.verification.numpy_rules import threefry_bits
from dtrans.verification.rank_collectives import GROUPS, mapped, summed
from dtrans.verification.rules import REAL


pytestmark = pytest.mark.usefixtures("x64")


X = np.random.default_rng(0).normal(size=(4, 3, 3)) + 2 * np.eye(3)
IDS = jnp.array([1, 3, 1, 0])
# each function treats rows of the batch separately
ROWWISE: dict[str, Callable[..., Any]] = {
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "rfft": lambda x: jnp.fft.rfft2(x).imag,
    "ifft": lambda x: jnp.fft.ifftn(x, axes=(1, 2)).real,
    "irfft": lambda x: jnp.fft.irfft(x + 1j * x * x, n=3),
    "complex": lambda x: jnp.real((x + 2j) * jnp.exp(1j * x) / (1 - 1j * x) ** 2),
    "conjugate": lambda x: jnp.real(jnp.conj(x + 1j * x[..., ::-1]) @ (x - 1j)),
    "complex functions": lambda x: jnp.real(jnp.log(x + 3j) + jnp.sqrt(x + 1j) + jnp.sign(x - 1j)),
    "complex where": lambda x: jnp.where(x > 0, x + 1j, 2j * x).imag,
    "complex product": lambda x: jnp.prod(x + 1j, axis=-1).real,
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(3)),
    "solve": lambda x: jnp.linalg.solve(x, x[:, :1].mT),
    "inverse": lambda x: jnp.linalg.inv(x),
    "determinant": lambda x: jnp.linalg.slogdet(x)[1],
    "upper solve": lambda x: jax.scipy.linalg.solve_triangular(x, x, trans=1),
    "lower solve": lambda x: jax.lax.linalg.triangular_solve(x, x, left_side=False, lower=True),
    "unit solve": lambda x: jax.lax.linalg.triangular_solve(
        x, x, left_side=True, unit_diagonal=True, transpose_a=True
    ),
    "tridiagonal solve": lambda x: jax.lax.linalg.tridiagonal_solve(
        x[:, 0], 9 + x[:, 1], x[:, 2], x
    ),
    "qr": lambda x: jnp.linalg.qr(x)[1],
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "eigh": lambda x: jnp.linalg.eigh(x + x.mT)[0],
    "eig": lambda x: jnp.abs(jnp.linalg.eig(x)[0]),
    "cumulative logarithms": lambda x: jax.lax.cumlogsumexp(x, axis=1),
    "cumulative maximum": lambda x: jax.lax.cummax(x, axis=2, reverse=True),
    "median": lambda x: jnp.median(x, axis=1),
    "largest": lambda x: jax.lax.top_k(x, 2)[0],
    "about the largest": lambda x: jax.lax.approx_max_k(x, 2)[0] - jax.lax.approx_min_k(x, 2)[0],
    "convolution": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((2, 3, 2)), (1,), "SAME", None, (2,)
    ),
}
WHOLE: dict[str, Callable[..., Any]] = {
    "segment maximum": lambda x: jax.ops.segment_max(x, IDS, 4),
    "segment minimum": lambda x: jax.ops.segment_min(x, IDS, 5),
    "segment product": lambda x: jax.ops.segment_prod(x, IDS, 4),
    "ragged product": lambda x: jax.lax.ragged_dot(x[:, 0], x[:2], jnp.array([1, 3])),
    "gradient of one": lambda x: jax.grad(
        lambda y: (jax.lax.ragged_dot(x[:, 0], y, jnp.array([1, 3])) ** 2).sum()
    )(x[:2]),
    "a reduction of two": lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + b + 0.5 * a * b, (0,)),
    "gamma": lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1),
}


def evaluated(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the output of a function over the field."""
    evaluator = Evaluator()
    jaxpr = jax.make_jaxpr(fn)(*map(_approx, args))
    with np.errstate(all="ignore"):
        ((found,),) = evaluator.run(jaxpr, [(a,) for a in args])
    assert not evaluator.unknown, evaluator.unknown
    return found


def _approx(x: Any) -> Any:
    return x.approx if isinstance(x, (Real, Complex)) else x


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [*ROWWISE, *WHOLE])
def test_float64_values_are_what_jax_computes(name: str) -> None:
    fn = {**ROWWISE, **WHOLE}[name]
    found = evaluated(fn, lifted(X, X.dtype))
    np.testing.assert_allclose(found.approx, fn(X), rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ROWWISE)
def test_a_part_of_the_batch_gives_a_part_of_the_output(name: str) -> None:
    x = lifted(X, X.dtype)
    whole = evaluated(ROWWISE[name], x)
    part = evaluated(ROWWISE[name], mapped(lambda a: a[1:3], x))
    assert same(mapped(lambda a: a[1:3], whole), part)


SOLVED = np.tril(X[0])
BANDS = np.array([[0.0, 1, 2], [7, 8, 9], [3, 4, 0]])
LINEAR: dict[str, Callable[..., Any]] = {
    "fft": jnp.fft.fft2,
    "irfft": lambda x: jnp.fft.irfft(x + 1j * x.mT),
    "triangular": lambda x: jax.scipy.linalg.solve_triangular(
        jnp.asarray(SOLVED), x[0], lower=True
    ),
    "solve": lambda x: jnp.linalg.solve(jnp.asarray(SOLVED), x[0]),
    "tridiagonal": lambda x: jax.lax.linalg.tridiagonal_solve(*map(jnp.asarray, BANDS), x[0]),
    "ragged": lambda x: jax.lax.ragged_dot(x[:, 0], jnp.asarray(X[:2]), jnp.array([1, 3])),
}


@pytest.mark.parametrize("name", LINEAR)
def test_sums_go_through_linear_maps(name: str) -> None:
    x, y = (lifted(a, a.dtype) for a in (X, X[::-1] + 1))
    apart = summed([evaluated(LINEAR[name], a) for a in (x, y)])
    assert same(evaluated(LINEAR[name], summed([x, y])), apart)


def test_systems_are_solved_exactly() -> None:
    a, b = (
        lifted(np.array([[2.0, 0], [3, 5]]), np.float64),
        lifted(np.array([[1.0], [2.0]]), np.float64),
    )
    solved = evaluated(lambda a, b: a @ jax.scipy.linalg.solve_triangular(a, b, lower=True), a, b)
    assert same(solved, b)


# primitives without a rule, which a report lists by name
UNFOLLOWED = {
    "cholesky_update", "create_token", "dce_sink", "empty", "ffi_call", "linear_call", "ormqr",
    "pgather",
    "polynomial", "precv", "psend", "pure_callback", "reduce_window", "rng_uniform", "scaled_dot",
    "select_and_gather_add", *CALLBACKS,
}  # fmt: skip
# functions of integers, booleans and random keys, which JAX computes
EXACT = {
    "and", "clz", "empty2", "iota", "lu_pivots_to_permutation", "mulhi",
    "not", "or", "platform_index", "population_count",
    "random_bits", "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap",
    "random_wrap",
    "reduce_and", "reduce_or", "reduce_xor", "rng_bit_generator", "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical", "threefry2x32", "xor",
}  # fmt: skip


def test_every_primitive_has_a_rule_or_a_reason() -> None:
    followed = {*REAL, *COMPLEX, *MATRICES, *GROUPS, *HANDLED, *CALLS, *EXACT}
    known = set(FACTS)
    assert not followed & UNFOLLOWED
    assert known - followed == UNFOLLOWED & known, sorted((known - followed) ^ (UNFOLLOWED & known))


def _spectral_loss(params: Any, x: Any, y: Any) -> Any:
    """Return the loss of a layer in the frequency domain with complex weights, after whitening by
    Cholesky factors."""
    mixed = jnp.fft.irfft(jnp.fft.rfft(x) * params["w"], n=4)
    spread = jnp.linalg.cholesky(jnp.einsum("bi,bj->bij", mixed, mixed) + jnp.eye(4))
    return jnp.mean((jnp.einsum("bij,bj->b", spread, x) - y) ** 2) + jnp.sum(
        jnp.abs(params["w"]) ** 2
    )


STRATEGIES: dict[str, Callable[..., Any]] = {
    "nccl2": lambda *of: dtrans.nccl2(*of, trainers=3),
    "stage 3": lambda *of: dtrans.sharding(
        *of, degree=3, stage=3, slices=dtrans.Slicing(min_slice_size=1)
    ),
    "pserver": lambda *of: dtrans.pserver(*of, pservers="127.0.0.1:1,127.0.0.1:2", trainers=3),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_of_steps_with_complex_numbers_are_complete(strategy: str) -> None:
    tx = optax.contrib.split_real_and_imaginary(optax.adam(1e-2))

    def init(key: Any) -> Any:
        params = {"w": jax.random.normal(key, (3,), complex)}
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = dtrans.value_and_grad(_spectral_loss)(params, x, y)
        updates, opt_state = tx.update(jax.tree.map(jnp.conj, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    key = jax.random.key(0)
    main = dtrans.trace(step, *jax.eval_shape(init, key), jnp.ones((12, 4)), jnp.ones(12))
    assert (report := STRATEGIES[strategy](main, dtrans.trace(init, key)).verify()), str(report)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_random_bits_are_those_of_jax(bits: int) -> None:
    key = jax.random.key(7)
    made = threefry_bits(np.asarray(jax.random.key_data(key)), (3, 5), bits)
    np.testing.assert_array_equal(made, jax.random.bits(key, (3, 5), f"uint{bits}"))


GATHERS: dict[str, Callable[..., Any]] = {
    "rows": lambda x, i: jnp.asarray(x)[i],
    "filled": lambda x, i: jnp.asarray(x).at[i, 1].get(mode="fill"),
    "clipped": lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
    "windows": lambda x, i: jax.vmap(lambda k: jax.lax.dynamic_slice(x, (k, 0, 1), (2, 2, 2)))(i),
    "one of each row": lambda x, i: jnp.take_along_axis(x, i[:, None, None], axis=1),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gathers_take_what_jax_takes(name: str) -> None:
    ids = np.array([1, 9, 0, -2])
    found = evaluated(lambda x: GATHERS[name](x, ids), lifted(X, X.dtype))
    np.testing.assert_array_equal(found.approx, GATHERS[name](X, ids))
