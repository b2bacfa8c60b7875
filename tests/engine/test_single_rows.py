"""Test operations on single rows: shards run them on their rows, without communication.

Numbers equal one device's, whether or not the number of shards divides the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.scipy import linalg, signal
from shard_programs import checked, deep, floats, kinds

import dtrans


Array = jax.Array
SIZES = ((12, 2), (10, 3), (4, 3))  # rows and shards; with (4, 3), a shard has no row


def square(rows: Array) -> Array:
    """Return an invertible matrix for each row of four numbers."""
    return rows.reshape(-1, 2, 2) + 3 * jnp.eye(2)


def host_sine(method: str) -> Callable[[Array], Array]:
    """Return the sine of an array, which the host computes."""

    @jax.custom_jvp
    def sine(x: Array) -> Array:
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, kind, x, vmap_method=method)

    sine.defjvp(lambda x, t: (sine(*x), jnp.cos(*x) * t[0]))
    return sine


def host_product(method: str) -> Callable[[Array, Array], Array]:
    """Return the product of a row with numbers that all rows share."""

    def product(x: Array, shared: Array) -> Array:
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.multiply, kind, x, shared, vmap_method=method)

    return product


def doubled(row: Array) -> Array:
    """Double a row until its sum is large; a row without numbers is never large enough."""
    return lax.while_loop(lambda v: ~(jnp.abs(v).sum() >= 50), lambda v: 2 * v + 1, row)


def twice_doubled(row: Array) -> Array:
    return 2 * doubled(row)


def conjugate_gradients(matrix: Array) -> Array:
    product = lambda v: matrix @ (matrix.T @ v)
    return jax.scipy.sparse.linalg.cg(product, jnp.ones(2))[0]


HOST = lax.stop_gradient
# name -> function (w, x) of a square matrix and of the rows, which returns a value for each row
OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(x @ w)),
    "fft of two dimensions": lambda w, x: jnp.abs(jnp.fft.rfft2((x @ w).reshape(-1, 2, 2))),
    "inverse fft": lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x @ w) * 2j),
    "solve": lambda w, x: jax.vmap(lambda a: jnp.linalg.solve(a, jnp.ones(2)))(square(x @ w)),
    "solve with one matrix": lambda w, x: jax.vmap(
        lambda r: jnp.linalg.solve(w + 9 * jnp.eye(4), r)
    )(x),
    "solve from the right": lambda w, x: lax.linalg.triangular_solve(
        jnp.triu(w) + 9 * jnp.eye(4), x @ w, left_side=False
    ),
    "inverse": lambda w, x: jnp.linalg.inv(square(x @ w)),
    "exponential": lambda w, x: linalg.expm(square(x @ w)),
    "map": lambda w, x: lax.map(lambda r: jnp.tanh(r @ w), x),
    "conjugate gradients": lambda w, x: jax.vmap(conjugate_gradients)(square(x @ w)),
    "loop": lambda w, x: (x @ w) * HOST(jax.vmap(doubled)(x)),
    "loop in a loop": lambda w, x: (
        (x @ w)
        * HOST(
            jax.vmap(lambda r: lax.while_loop(lambda v: v.max() < 70, twice_doubled, r))(jnp.abs(x))
        )
    ),
    "device_put": lambda w, x: jnp.tanh(jax.device_put(x @ w, jax.memory.Space.Device)),
    "diagonal": lambda w, x: jax.vmap(jnp.diag)(square(x @ w)),
    "convolution": lambda w, x: jax.vmap(lambda r: jnp.convolve(r, w[0]))(x),
    "convolution of two rows": lambda w, x: jax.vmap(lambda r: jnp.convolve(r @ w, r[:3]))(x),
    "correlation": lambda w, x: jax.vmap(lambda r: jnp.correlate(r @ w, r, "full"))(x),
    "convolution of planes": lambda w, x: jax.vmap(
        lambda r: signal.convolve2d((r @ w).reshape(2, 2), r.reshape(2, 2))
    )(x),
    **{
        f"host function, {method}": lambda w, x, method=method: jax.vmap(host_sine(method))(x @ w)
        for method in ("sequential", "expand_dims", "broadcast_all")
    },
    **{
        f"host function of shared numbers, {method}": lambda w, x, method=method: (
            (x @ w) * HOST(jax.vmap(host_product(method), in_axes=(0, None))(HOST(x), HOST(w[0])))
        )
        for method in ("expand_dims", "broadcast_all")
    },
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("rows", "shards"), SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_shards_run_the_operation_on_their_rows(
    x64: None, name: str, rows: int, shards: int
) -> None:
    loss = lambda w, x: jnp.tanh(OPERATIONS[name](w, x)).sum()
    args = floats(4, 4), floats(rows, 4, seed=1)
    program = checked(jax.value_and_grad(loss), args, {1: 0}, shards)
    # a matrix with as many rows as the batch may be cheaper to gather than to sum
    if (name, rows) != ("solve with one matrix", 4):
        assert not program.gathers and set(kinds(program)) == {"all_reduce"}, program.gathers


def test_a_loop_does_not_wait_for_padding(x64: None) -> None:
    """A row of padding may have any numbers, also some with which it would never finish."""
    for rows, shards, padded in ((12, 2, set()), (10, 3, {(4,)})):
        program = checked(jax.vmap(doubled), (floats(rows, 4),), {0: 0}, shards)
        (loop,) = (e for e in deep(program) if e.primitive.name == "while")
        masks = [a for a in loop.invars if a.aval.dtype == bool]
        # condition and body share one mask from JAX 0.12 on
        assert {a.aval.shape for a in masks} == padded


def test_a_loop_whose_rows_communicate_has_all_rows(x64: None) -> None:
    """Shards that ended at different iterations would wait for each other."""

    def towards_mean(row: Array) -> Array:
        step = lambda v: 2 * v + lax.pmean(v, "rows")
        return lax.while_loop(lambda v: jnp.abs(v).sum() < 50, step, row)

    fn = jax.vmap(towards_mean, axis_name="rows")
    assert checked(fn, (1 + floats(12, 4) ** 2,), {0: 0}, 2).gathers


def centred(x: Array) -> Array:
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda a: a - a.mean(0), kind, x, vmap_method="expand_dims")


MIXING: dict[str, Callable[[Array], Array]] = {
    "all rows at once": centred,
    "all rows, in a vmap of something else": lambda x: jax.vmap(lambda s: s * centred(x))(
        jnp.arange(3.0)
    ),
    "all rows, in a jitted function": lambda x: jax.jit(centred)(x),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_host_function_that_combines_rows_gets_all_rows(x64: None, name: str) -> None:
    assert checked(MIXING[name], (floats(10, 3),), {0: 0}, 2).gathers


def test_host_functions_of_rows_in_jitted_functions(x64: None) -> None:
    """JAX drops the sign of the rows if it traces the function before `vmap`."""
    sine = host_sine("expand_dims")
    inside = checked(jax.jit(lambda x: jax.vmap(sine)(x)), (floats(10, 3),), {0: 0}, 3)
    assert not inside.gathers
    assert checked(jax.vmap(jax.jit(sine)), (floats(10, 3),), {0: 0}, 3).gathers


def test_steps_with_these_operations_are_verified(x64: None) -> None:
    """The plan knows that trainers exchange gradients only, and follows loops of single rows."""

    def loss(params: Any, x: Array) -> Array:
        rows = jax.vmap(lambda r: jnp.convolve(r @ params["w"], r[:2]))(x)
        return jnp.mean(rows.sum(1) * HOST(jax.vmap(doubled)(x)).sum(1))

    tx = optax.sgd(0.1)
    init = lambda: (p := {"w": jnp.asarray(floats(4, 4))}, tx.init(p))
    x = floats(12, 4, seed=1)
    step = dtrans.make_train_step(loss, tx)
    plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=3)
    assert "gather" not in str(plan)
    report = plan.verify(x)
    assert report.equal and report.complete, report
    job = plan.simulate()
    state, found = job.step(job.init(), x)
    params, _, wanted = jax.jit(step)(*init(), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_allclose(job.params(state)["w"], params["w"], rtol=1e-12)
