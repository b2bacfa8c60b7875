"""Records of primitives: each fact of a record holds on numbers, and every primitive of JAX and
optax has a record.

The tests check facts on equations with random operands. For example, they compare the outputs of a
"linear" primitive with sums of outputs, and search the operands for the output entries of a
"mover".

To find primitives without a record, the tests call public functions with one set of arguments after
the other, until a call succeeds. If possible, they also differentiate the function. `pytest -s`
prints the functions that could not be called.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from dtrans._jax import (
    FACTS,
    JaxprEqn,
    Literal,
    equations,
    facts_of,
    is_known,
    linear_operands,
    lowered_jaxpr,
    mixed_axes,
    moved_operands,
    scaling_operands,
)
from dtrans._jax.primitives import RECORDS, PrimitiveFacts
from dtrans.step.collect import collect_p
from dtrans.step.marks import mark_p


MODULES = {
    "jax.numpy": jnp, "jax.numpy.linalg": jnp.linalg, "jax.numpy.fft": jnp.fft, "jax.nn": jax.nn,
    "jax.random": jax.random, "jax.lax": jax.lax, "jax.lax.linalg": jax.lax.linalg,
    "jax.scipy.special": jax.scipy.special, "jax.scipy.linalg": jax.scipy.linalg,
    "jax.scipy.stats.norm": jax.scipy.stats.norm,
    "jax.image": jax.image, "optax": optax, "optax.losses": optax.losses,
}  # fmt: skip
FILES = ("save", "load", "from", "print")  # these read and write files

X = jnp.linspace(0.1, 0.9, 16).reshape(4, 4) + jnp.eye(4)
V, B, C = X[0], X > 0.5, X.astype(jnp.complex64)
I = jnp.arange(16, dtype=jnp.int32).reshape(4, 4) % 4
K = jax.random.key(0)
ARGUMENTS: list[tuple[Any, ...]] = [
    (X,), (V,), (I,), (B,), (C,), (X, X), (V, V), (I, I), (B, B), (X, 1), (X, 0), (I, 1), (X, V),
    (X, I), (X, (4, 4)),
    (X, (2, 8)), (X, X, X), (V, V, V), (I, I, I), (B, X, X), ([X, X],), ([X, X], 0), (K,),
    (K, (4,)), (K, X), (K, 4),
    (K, X, X), (K, V), (K, V, (4,)), (4,), (4, 4), (X, 0, 1), (X, I, 1), (X, X, X, X), (C, C),
    (0.0, X, X),
    (X, 0.0, 1.0), (X, [0, 1]), (X, (4, 4), "linear"), (X, 0, jnp.int32), (X, jnp.float16),
]  # fmt: skip


def functions(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sorted(dir(module)):
        fn = getattr(module, name)
        if callable(fn) and not (
            name.startswith(("_", *FILES)) or inspect.isclass(fn) or inspect.ismodule(fn)
        ):
            yield name, fn


def on_arrays(
    fn: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of the arrays among the arguments, and these arrays."""
    places = [i for i, a in enumerate(arguments) if isinstance(a, jax.Array)]

    def called(*arrays: Any) -> list[Any]:
        given = list(arguments)
        for i, x in zip(places, arrays, strict=True):
            given[i] = x
        return [x for x in jax.tree.leaves(fn(*given)) if isinstance(x, jax.Array)]

    return called, [arguments[i] for i in places]


def unknown_to_tables(fn: Callable[..., Any], arrays: list[Any]) -> set[str] | None:
    """Return the primitives of a function that have no record; None if the function rejects the
    arguments."""
    try:
        jaxpr = lowered_jaxpr(fn, *arrays)
    except Exception:  # functions raise any exception for arguments that do not fit
        return None
    return {e.primitive.name for e in equations(jaxpr) if not is_known(e)}


@pytest.mark.soak
@pytest.mark.parametrize("module", MODULES)
def test_every_primitive_is_known(module: str) -> None:
    missing: dict[str, str] = {}
    failed, called = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, fn in functions(MODULES[module]):
            made = False
            for arguments in ARGUMENTS:
                run, arrays = on_arrays(fn, arguments)
                found = unknown_to_tables(run, arrays)
                if found is None:
                    continue
                made = True
                floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
                total = lambda *xs, run=run: sum(
                    jnp.sum(y) for y in run(*xs) if jnp.issubdtype(y.dtype, jnp.floating)
                )
                backward = unknown_to_tables(jax.grad(total, floats), arrays) if floats else None
                missing |= dict.fromkeys(found | (backward or set()), name)
            called += made
            failed += [] if made else [name]
    print(f"{module}: {called} functions were called, and not: {', '.join(failed)}")
    assert called
    assert missing == {}, (
        "primitive: the function that binds it; give it a record in dtrans/_jax/primitives.py"
    )


# -- facts -----------------------------------------------------------------------------------------

F = np.linspace(0.1, 0.9, 12).reshape(3, 4)
W = np.arange(12, dtype=np.int32).reshape(3, 4)
Z = F + 1j * F[::-1]
S = np.eye(3) + 0.1
FIRST = np.array([[0], [2]], np.int32)
ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
PICKS = lax.GatherDimensionNumbers((1,), (0,), (0,))


def _picked(mode: Any, fill_value: Any = None) -> Callable[[Any, Any], Any]:
    return lambda x, at: lax.gather(x, at, PICKS, (1, 4), mode=mode, fill_value=fill_value)


def _updated(scatter: Callable[..., Any], mode: Any = None) -> Callable[[Any, Any, Any], Any]:
    return lambda x, at, updates: scatter(x, at, updates, ROWS, mode=mode)


def _pooled(x: Any) -> Any:
    return lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 2), "SAME")


UNARY = (
    "abs acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil acos cos cosh digamma erf "
    "erfc erf_inv exp exp2 "
    "expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan "
    "tanh"
)
BINARY = (
    "add sub mul div max min atan2 pow rem nextafter igamma igammac igamma_grad_a zeta polygamma "
    "eq "
    "ge gt le lt ne complex"
)
OF_WORDS = "and or xor mulhi shift_left shift_right_arithmetic shift_right_logical"
OF_MATRICES = "cholesky eigh eig svd qr lu schur hessenberg tridiagonal"
REDUCED = "sum prod max min"
# records for other versions of JAX, and for primitives that no public function binds
NOT_BOUND = (
    "copy_p eq_to expand_dims geqrf le_to log2 lt_to one_minus_square polynomial "
    "random_gamma_grad stop_gradient"
)

# for each primitive: functions that bind it, with arguments
EXAMPLES: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    **{n: [(getattr(lax, n), (F,))] for n in UNARY.split()},
    **{n: [(getattr(lax, n), (F, F[::-1]))] for n in BINARY.split()},
    **{n: [(getattr(lax, {"and": "bitwise_and", "or": "bitwise_or",
                          "xor": "bitwise_xor"}.get(n, n)), (W, W[::-1]))]
       for n in OF_WORDS.split()},
    **{n: [(getattr(lax, n), (W,))] for n in ("clz", "population_count")},
    "not": [(lax.bitwise_not, (W,))],
    **{n: [(getattr(lax, n), (Z,))] for n in ("conj", "imag", "real")},
    **{f"reduce_{n}": [(lambda x, n=n: getattr(lax, f"reduce_{n}")(x, axes=(1,)), (F,)),
                       (lambda x, n=n: getattr(lax, f"reduce_{n}")(x, axes=(0,)), (F,))]
                       for n in REDUCED.split()},
    **{f"reduce_{n}": [(lambda x, n=n: getattr(lax, f"reduce_{n}")(x, axes=(1,)), (W % 2 == 0,))]
       for n in ("and", "or", "xor")},
    **{n: [(lambda x, n=n: getattr(lax, n)(x, 1, np.int32), (F,))] for n in ("argmax", "argmin")},
    **{n: [(lambda x, n=n: getattr(lax, n)(x, axis=1), (F,)),
           (lambda x, n=n: getattr(lax, n)(x, axis=0), (F,))]
       for n in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    **{n: [(getattr(lax.linalg, n), (np.stack([S, 2 * S]),))] for n in OF_MATRICES.split()},
    "householder_product": [(lax.linalg.householder_product,
                             (np.stack([S, 2 * S]), np.ones((2, 3)) / 3))],
    "triangular_solve": [(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (S, F)),
                         (lambda a, b: lax.linalg.triangular_solve(a, b),
                          (np.stack([S, S]), np.stack([S, 2 * S])))],
    "add_any": [(jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)), (F,))],
    "integer_pow": [(lambda x: lax.integer_pow(x, 3), (F,)),
                    (lambda x: lax.integer_pow(x, -1), (F,))],
    "clamp": [(lax.clamp, (F / 2, F[::-1], F + 0.1)), (lax.clamp, (0.2, F, 0.6))],
    "regularized_incomplete_beta": [(lax.betainc, (F, F[::-1], F))],
    "select_n": [(lax.select, (W % 2 == 0, F, F[::-1])),
                 (lambda i, *xs: lax.select_n(i, *xs), (W % 3, F, -F, 2 * F))],
    "reduce_precision": [(lambda x: lax.reduce_precision(x, 8, 50), (F,))],
    "copy": [(jnp.copy, (F,))],
    "name": [(lambda x: checkpoint_name(x, "x"), (F,))],
    "device_put": [(lambda x: jax.device_put(x, jax.memory.Space.Device), (F,))],
    "optimization_barrier": [(lambda *xs: lax.optimization_barrier(xs), (F, 2 * F))],
    "bitcast_convert_type": [(lambda x: lax.bitcast_convert_type(x, np.int64), (F,))],
    "convert_element_type": [(lambda x, t=t: lax.convert_element_type(x, t), (x,))
                             for x, t in ((F, np.float32), (W, np.float64), (F, np.int32))],
    "broadcast_in_dim": [(lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), (F,)),
                         (lambda x: lax.broadcast_in_dim(x, (3, 4), (0, 1)), (F[:, :1],))],
    "squeeze": [(lambda x: lax.squeeze(x, (1,)), (F[:, None],))],
    "reshape": [(lambda x: lax.reshape(x, (2, 6)), (F,)),
                (lambda x: lax.reshape(x, (12,), (1, 0)), (F,))],
    "slice": [(lambda x: lax.slice(x, (0, 1), (3, 4), (2, 1)), (F,))],
    "tile": [(lambda x: lax.tile(x, (2, 1)), (F,))],
    "transpose": [(lambda x: lax.transpose(x, (1, 0)), (F,))],
    "rev": [(lambda x: lax.rev(x, (1,)), (F,))],
    "split": [(lambda x: lax.split(x, (1, 3), axis=1), (F,))],
    "concatenate": [(lambda x, y: lax.concatenate([x, y], 1), (F, F[:, :2]))],
    "stack": [(lambda *xs: jnp.stack(xs, 1), (F, 2 * F))],
    "unstack": [(lambda x: jnp.unstack(x, axis=1), (F,))],
    "pad": [(lambda x, v: lax.pad(x, v, ((1, 0, 0), (0, -1, 1))), (F, 0.5))],
    "dynamic_slice": [(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 3)), (F, 1))],
    "dynamic_update_slice": [(lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)),
                              (F, 2 * F[:2, :3], 1))],
    "gather": [(_picked("clip"), (F, FIRST)), (_picked("fill"), (F, FIRST * 2)),
               (_picked("fill", 0), (F, FIRST * 2)),
               (_picked("fill", 7.0), (F, FIRST * 2))],
    "scatter": [(_updated(lax.scatter, "drop"), (F, FIRST * 2, 2 * F[:2])),
                (lambda x, at: lax.scatter_apply(x, at, jnp.exp, ROWS, update_shape=(2, 4)),
                 (F, FIRST))],
    "scatter-add": [(_updated(lax.scatter_add), (F, FIRST, 2 * F[:2]))],
    "scatter-sub": [(_updated(lax.scatter_sub), (F, FIRST, 2 * F[:2]))],
    "scatter-mul": [(_updated(lax.scatter_mul), (F, FIRST, 2 * F[:2]))],
    "scatter-max": [(_updated(lax.scatter_max), (F, FIRST, 2 * F[:2]))],
    "scatter-min": [(_updated(lax.scatter_min), (F, FIRST, 2 * F[:2]))],
    "sort": [(lambda x: lax.sort(x, dimension=1), (F[:, ::-1],)),
             (lambda *xs: lax.sort(xs, dimension=0, num_keys=1), (F[::-1], F))],
    "top_k": [(lambda x: lax.top_k(x, 2), (F,))],
    "reduce_window_sum": [(lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 2), "SAME"),
                           (F,))],
    "reduce_window_max": [(_pooled, (F,))],
    "reduce_window_min": [(lambda x: lax.reduce_window(x, np.inf, lax.min, (2, 2), (1, 2), "SAME"),
                           (F,))],
    "select_and_scatter_add": [(jax.grad(lambda x: jnp.sum(_pooled(x))), (F,))],
    "select_and_gather_add": [(lambda x: jax.jvp(_pooled, (x,), (2 * x,)), (F,))],
    "conv_general_dilated": [(lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
                              (F[None, None], F[None, None, :2, :2]))],
    "dot_general": [(lax.dot, (F, F.T)), (lambda x, y: jnp.einsum("ij,ik->ijk", x, y), (F, F))],
    "ragged_dot_general": [(lax.ragged_dot,
                            (F, np.stack([F.T, 2 * F.T]), np.array([1, 2], np.int32)))],
    "fft": [(lambda x: jnp.fft.fft(x), (Z,))],
}  # fmt: skip


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@functools.cache
def bound() -> dict[str, list[JaxprEqn]]:
    """Return equations of each primitive that has examples. They are traced once, with 64 bits."""
    found: dict[str, list[JaxprEqn]] = {}
    for name, examples in EXAMPLES.items():
        for fn, arguments in examples:
            eqns = [
                e for e in equations(jax.make_jaxpr(fn)(*arguments)) if e.primitive.name == name
            ]
            assert eqns, f"the example of {name} does not bind it"
            found.setdefault(name, []).append(eqns[-1])
    return found


def all_bound() -> Iterator[JaxprEqn]:
    for eqns in bound().values():
        yield from eqns


def drawn(eqn: JaxprEqn, seed: int = 0) -> list[Any]:
    """Return random operands: positive floating-point numbers, or small integers, which are valid
    indices.

    Some indices of gathers and scatters are out of bounds. Operands are NumPy arrays, so that JAX
    compiles only the primitive.
    """
    rng, numbers = (
        np.random.default_rng(seed),
        5 if eqn.primitive.name.startswith(("gather", "scatter")) else 2,
    )
    operands = []
    for a in eqn.invars:
        t = a.aval
        if isinstance(a, Literal) or not isinstance(t.dtype, np.dtype):
            operands.append(np.asarray(a.val, t.dtype))
        elif jnp.issubdtype(t.dtype, jnp.inexact):
            operands.append(np.asarray(rng.uniform(0.1, 2.9, t.shape), t.dtype))
        else:
            operands.append(np.asarray(rng.integers(0, numbers, t.shape), t.dtype))
    return operands


def made(eqn: JaxprEqn, operands: list[Any]) -> list[np.ndarray[Any, Any]]:
    found = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params)
    return [*map(np.asarray, found if eqn.primitive.multiple_results else [found])]


def close(eqn: JaxprEqn, found: list[Any], wanted: list[Any]) -> None:
    for a, b in zip(found, wanted, strict=True):
        exact = not np.issubdtype(a.dtype, np.inexact)
        np.testing.assert_allclose(
            a, b, rtol=0 if exact else 1e-5 if a.dtype.itemsize == 4 else 1e-11, err_msg=str(eqn)
        )


def inexact(operands: list[Any], group: tuple[int, ...]) -> bool:
    return all(jnp.issubdtype(operands[i].dtype, jnp.inexact) for i in group)


def test_each_name_has_one_record() -> None:
    names = [name for row, _ in RECORDS for name in row.split()]
    assert len(names) == len(FACTS) == len(set(names))


def test_each_record_with_a_fact_has_an_example() -> None:
    with_facts = {n for n, facts in FACTS.items() if facts != PrimitiveFacts(flops=facts.flops)}
    assert with_facts - EXAMPLES.keys() == set(NOT_BOUND.split()), (
        "give a primitive with facts an example here"
    )


@pytest.mark.usefixtures("x64")
def test_linear() -> None:
    """f(a*x + b*y) = a*f(x) + b*f(y) for the operands of a group."""
    for eqn in all_bound():
        x, y = drawn(eqn, 1), drawn(eqn, 2)
        for group in linear_operands(eqn):
            if inexact(x, group):
                other = [y[i] if i in group else z for i, z in enumerate(x)]
                mixed = [0.75 * z - 1.5 * y[i] if i in group else z for i, z in enumerate(x)]
                wanted = [
                    0.75 * p - 1.5 * q for p, q in zip(made(eqn, x), made(eqn, other), strict=True)
                ]
                close(eqn, made(eqn, mixed), wanted)


@pytest.mark.usefixtures("x64")
def test_scales() -> None:
    """f(c*x) = c*f(x) for a positive number c."""
    for eqn in all_bound():
        x = drawn(eqn, 1)
        for group in scaling_operands(eqn):
            if inexact(x, group):
                scaled = [0.3 * z if i in group else z for i, z in enumerate(x)]
                close(eqn, made(eqn, scaled), [0.3 * z for z in made(eqn, x)])


@pytest.mark.usefixtures("x64")
def test_scale_free() -> None:
    """f(c*x) = f(x) for a positive number c; operands may be equal."""
    for eqn in all_bound():
        x, group = drawn(eqn, 1), facts_of(eqn).scale_free_in
        for operands in [x, [x[0]] * len(x)] if group else []:
            scaled = [0.3 * z if i in group else z for i, z in enumerate(operands)]
            close(eqn, made(eqn, scaled), made(eqn, operands))


@pytest.mark.usefixtures("x64")
def test_keeps_zero() -> None:
    for eqn in all_bound():
        if facts_of(eqn).keeps_zero(eqn):
            for out in made(eqn, [0 * z for z in drawn(eqn)]):
                assert not np.any(out), eqn


@pytest.mark.usefixtures("x64")
def test_moves() -> None:
    """Each entry of an output is an entry of an operand.

    So a function of each entry may be applied before the primitive.
    """
    for eqn in all_bound():
        x = drawn(eqn, 1)
        for k, out in enumerate(made(eqn, x) if facts_of(eqn).moves else []):
            if moved := moved_operands(eqn, k):
                assert np.isin(out, np.concatenate([np.ravel(x[i]) for i in moved])).all(), eqn
                before = [shuffled(z) if i in moved else z for i, z in enumerate(x)]
                np.testing.assert_array_equal(made(eqn, before)[k], shuffled(out), err_msg=str(eqn))


def shuffled(x: Any) -> Any:
    """Return an elementwise function of an array that preserves neither order nor zeros."""
    return np.cos(97 * np.asarray(x)) + np.asarray(x) ** 2


@pytest.mark.usefixtures("x64")
def test_keeps_order() -> None:
    for eqn in all_bound():
        if not facts_of(eqn).keeps_order(eqn):
            continue
        numbers = [np.arange(float(x.size), dtype=x.dtype).reshape(x.shape) for x in drawn(eqn)]
        for k, out in enumerate(made(eqn, numbers)):
            (of,) = moved_operands(eqn, k)
            repeated = [
                d for d in range(out.ndim) if out.shape[d] > 1 and not np.diff(out, axis=d).any()
            ]
            once = out[tuple(0 if d in repeated else slice(None) for d in range(out.ndim))]
            np.testing.assert_array_equal(once.ravel(), numbers[of].ravel(), err_msg=str(eqn))


@pytest.mark.usefixtures("x64")
def test_elementwise() -> None:
    """Equal operands give equal outputs, except for iterations that stop when all entries have
    converged."""
    for eqn in all_bound():
        if facts_of(eqn).elementwise:
            x, y, shape = drawn(eqn, 1), drawn(eqn, 2), eqn.outvars[0].aval.shape
            changed = np.random.default_rng(3).integers(0, 2, shape).astype(bool)
            other = [
                np.where(changed, q, p) if np.ndim(p) else p for p, q in zip(x, y, strict=True)
            ]
            for one, two in zip(made(eqn, x), made(eqn, other), strict=True):
                assert one.shape == shape, eqn
                close(eqn, [one[~changed]], [two[~changed]])


@pytest.mark.usefixtures("x64")
def test_axes() -> None:
    """Along an axis that is not mixed, an index of the output depends only on the same index of the
    operands."""
    for eqn in all_bound():
        axes, x, y = mixed_axes(eqn), drawn(eqn, 1), drawn(eqn, 2)
        if axes is None:
            continue
        for axis in set(range(x[0].ndim)) - set(axes):
            for at in (0, x[0].shape[axis] - 1):
                alone = (slice(None),) * axis + (at,)
                other = [with_part(q, p, alone) for p, q in zip(x, y, strict=True)]
                to = axis - sum(d < axis for d in axes) if facts_of(eqn).reduces else axis
                for one, two in zip(made(eqn, x), made(eqn, other), strict=True):
                    np.testing.assert_array_equal(
                        one.take(at, to), two.take(at, to), err_msg=str(eqn)
                    )


def with_part(x: Any, other: Any, index: Any) -> Any:
    """Return a copy of an array in which one part comes from another array."""
    copy = x.copy()
    copy[index] = other[index]
    return copy


JOINED = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip


@pytest.mark.usefixtures("x64")
def test_reduces() -> None:
    """The same operation combines partial results."""
    for eqn in all_bound():
        if op := JOINED.get(facts_of(eqn).reduces):
            (x,), (axis,) = drawn(eqn), mixed_axes(eqn) or ()
            parts = [made(eqn, [part]) for part in np.split(x, [1], axis)]
            close(eqn, [op(a, b) for a, b in zip(*parts, strict=True)], made(eqn, [x]))


@pytest.mark.usefixtures("x64")
def test_facts_with_a_condition() -> None:
    """If the condition of a fact is false for an equation, the record does not claim the fact."""
    filled, applied, truncated = (
        bound()["gather"][3],
        bound()["scatter"][1],
        bound()["convert_element_type"][2],
    )
    for e in (filled, applied, truncated):
        assert not linear_operands(e) and not scaling_operands(e) and not moved_operands(e)
    with_nan, of_words = bound()["gather"][1], bound()["convert_element_type"][1]
    assert linear_operands(with_nan) == [(0,)] and not moved_operands(with_nan)
    assert not linear_operands(of_words) and scaling_operands(of_words) == [(0,)]
    inverse, permuted = bound()["integer_pow"][1], bound()["reshape"][1]
    assert not facts_of(inverse).keeps_zero(inverse) and not facts_of(permuted).keeps_order(
        permuted
    )


def test_marks_are_identities() -> None:
    x = jnp.ones(3)
    (marked,) = jax.make_jaxpr(lambda x, w: mark_p.bind(x, w, leaf="w"))(x, x).eqns
    (collected,) = jax.make_jaxpr(lambda x: collect_p.bind(x, key="LOCAL_SUM"))(x).eqns
    for e in (marked, collected):
        assert (
            linear_operands(e) == [(0,)]
            and moved_operands(e) == (0,)
            and facts_of(e).flops == "none"
        )
