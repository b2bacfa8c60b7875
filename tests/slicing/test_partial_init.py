"""Initial values in blocks.

An init that is rewritten for some rows computes the same bits as the full init. If the initializer
allows it, no array has the full size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import as_numpy, assemble, quick
from hypothesis import example, given, note, strategies as st
from jax import lax
from jax.nn import initializers as init

import dtrans
from dtrans.ir.builder import Builder
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import DIST
from dtrans.rows.random_bits import block_bits, block_bits_p, counters, counts
from dtrans.rows.slices import Slice
from dtrans.slicing.partial_init import makes_rows, write_parts, write_rows


KEY = jax.random.key(7)
SHAPE = (13, 6)  # no other size in this file is equal
BLOCKS = [(0, 5), (5, 6), (6, 12), (12, 13)]  # uneven, and of one row


@dataclasses.dataclass
class Blocks:
    """An init: the full arrays, and its blocks."""

    whole: list[np.ndarray]
    blocks: list[np.ndarray]
    jaxpr: Any

    def equal(self) -> None:
        """Check that every block has the rows of the full array, bit for bit."""
        for got, want in zip(self.blocks, self.whole, strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            assert got.tobytes() == want.tobytes()

    def nothing_of(self, *shapes: tuple[int, ...]) -> None:
        """Check that no equation creates an array with one of these shapes."""
        assert not [
            e for e in self.jaxpr.jaxpr.eqns if any(v.aval.shape in shapes for v in e.outvars)
        ]
        assert not [v for v in self.jaxpr.jaxpr.constvars if v.aval.shape in shapes]


def written(fn: Callable[..., Any], args: Sequence[Any], *parts: Slice | None) -> Any:
    """Return the jaxpr of parts of a function's only output."""
    jaxpr = inline_calls(jax.make_jaxpr(fn)(*args))
    b = Builder(jaxpr)
    b.invars += jaxpr.jaxpr.invars
    made = b.build(write_parts(b, jaxpr, [(jaxpr.jaxpr.outvars[0], part) for part in parts]))
    jax.extend.core.check_jaxpr(made.jaxpr)
    return made


def run(jaxpr: Any, args: Sequence[Any], jit: Callable[..., Any] = quick) -> list[np.ndarray]:
    return [as_numpy(x) for x in jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*args)]


def in_blocks(
    fn: Callable[..., Any],
    *args: Any,
    axis: int = 0,
    blocks: Sequence[tuple[int, int]] = BLOCKS,
    jit: Callable[..., Any] = quick,
) -> Blocks:
    args = args or (KEY,)
    whole = as_numpy(jit(fn)(*args))
    jaxpr = written(fn, args, *(Slice(axis, start, stop - start) for start, stop in blocks))
    index = (slice(None),) * axis
    return Blocks([whole[(*index, slice(*x))] for x in blocks], run(jaxpr, args, jit), jaxpr)


# -- initialisers ----------------------------------------------------------------------------------

INITIALIZERS = {
    "zeros": init.zeros,
    "ones": init.ones,
    "constant": init.constant(0.3),
    "uniform": init.uniform(0.2),
    "normal": init.normal(0.02),
    "truncated_normal": init.truncated_normal(0.5, lower=-1.0, upper=3.0),
    "variance_scaling": init.variance_scaling(2.0, "fan_avg", "uniform"),
    "glorot_uniform": init.glorot_uniform(),
    "glorot_normal": init.glorot_normal(),
    "he_uniform": init.he_uniform(),
    "he_normal": init.he_normal(),
    "lecun_uniform": init.lecun_uniform(),
    "lecun_normal": init.lecun_normal(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float64], ids=lambda t: t.__name__
)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_block_of_an_initialiser_is_the_rows_of_the_whole(name, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        # compare with jit, as servers do
        found = in_blocks(lambda key: INITIALIZERS[name](key, SHAPE, dtype), jit=jax.jit)
    found.equal()
    found.nothing_of(SHAPE)


@pytest.mark.parametrize("name", ["uniform", "he_normal"])
def test_the_other_axis(name):
    found = in_blocks(lambda key: INITIALIZERS[name](key, (4, 13)), axis=1)
    found.equal()
    found.nothing_of((4, 13))


DRAWN = {
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, SHAPE),
    "randint": lambda key: jax.random.randint(key, SHAPE, -3, 9),
    "laplace": lambda key: jax.random.laplace(key, SHAPE),
    "gumbel": lambda key: jax.random.gumbel(key, SHAPE),
    "exponential": lambda key: jax.random.exponential(key, SHAPE),
    "rademacher": lambda key: jax.random.rademacher(key, SHAPE, jnp.float32),
    "cauchy": lambda key: jax.random.cauchy(key, SHAPE),
    "bits": lambda key: jax.random.bits(key, SHAPE, jnp.uint16),
    "complex": lambda key: jax.random.normal(key, SHAPE, jnp.complex64),
    "four axes": lambda key: jax.random.normal(key, (13, 2, 1, 3)),
    "one axis": lambda key: jax.random.normal(key, (13,)),
    "old keys": lambda key: jax.random.normal(jax.random.PRNGKey(3), SHAPE),
    "a key for each row": lambda key: jax.vmap(lambda k: jax.random.normal(k, (6,)))(
        jax.random.split(key, 13)
    ),
    "a key for each column": lambda key: jax.vmap(
        lambda k: jax.random.normal(k, (13,)), out_axes=1
    )(jax.random.split(key, 6)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DRAWN)
def test_a_block_of_what_is_drawn(name):
    found = in_blocks(DRAWN[name])
    found.equal()
    found.nothing_of(SHAPE, SHAPE[::-1], (13, 2, 1, 3), *([(13,)] if name == "one axis" else []))


@pytest.mark.parametrize("name", ["orthogonal", "permutation", "gamma", "rbg"])
def test_what_is_not_understood_is_made_whole_and_cut(name):
    fn = {
        "orthogonal": lambda key: init.orthogonal()(key, SHAPE),
        "permutation": lambda key: jax.random.permutation(
            key, jnp.arange(78.0).reshape(SHAPE), axis=0
        ),
        "gamma": lambda key: jax.random.gamma(key, 2.0, SHAPE),
        "rbg": lambda key: jax.random.normal(jax.random.key(3, impl="rbg"), SHAPE),
    }[name]
    found = in_blocks(fn)
    for got, want in zip(found.blocks, found.whole, strict=True):
        # a compiled loop with a slice after it may round differently
        assert np.allclose(got, want, rtol=1e-5)
    assert any(v.aval.shape in (SHAPE, (78,)) for e in found.jaxpr.jaxpr.eqns for v in e.outvars)


# -- random bits -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bit_width", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("shape", "axis"), [((13,), 0), (SHAPE, 0), (SHAPE, 1), ((2, 13, 3), 1), ((13, 0), 0)]
)
def test_bits_of_a_block(bit_width, shape, axis):
    with jax.enable_x64(bit_width == 64):
        whole = jax.random.bits(KEY, shape, f"uint{bit_width}")
        for start, stop in [(0, shape[axis]), (1, 2), (2, 5)]:
            got = block_bits(
                KEY, bit_width=bit_width, shape=shape, axis=axis, start=start, stop=stop
            )
            want = lax.slice_in_dim(whole, start, stop, axis=axis)
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("shape", "axis", "start"),
    [
        ((2**31, 5), 0, 2**31 - 3),
        ((2**20, 3, 2**12), 0, 2**19 + 7),
        ((6, 2**31 - 1, 3), 1, 2**30),
        ((2**20, 2**12, 7), 0, 149795),  # the lower words overflow within the block
        ((2**40, 3), 0, 2**39 + 1),
    ],
)
def test_counters_beyond_32_bits(shape, axis, start):
    """Compare with 64-bit integers, because no array of such a size can be created."""
    stop = start + 2
    high, low = jax.jit(lambda: counters(shape, axis, start, stop))()
    want = np.zeros((), np.uint64)
    for d, n in enumerate(shape):
        index = np.arange(start, stop) if d == axis else np.arange(n)
        stride = math.prod(shape[d + 1 :])
        want = want + (index.astype(np.uint64) * np.uint64(stride)).reshape(
            [-1 if e == d else 1 for e in range(len(shape))]
        )
    assert np.array_equal(
        np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low), want
    )


def test_bits_are_counted_in_the_default_mode_only():
    rbg, fry = jax.random.key(0, impl="rbg").dtype, KEY.dtype
    assert counts(fry)
    assert not counts(rbg)
    with jax.threefry_partitionable(False):
        assert not counts(fry)
        found = in_blocks(lambda key: jax.random.normal(key, SHAPE))
        found.equal()


def test_a_mode_that_is_changed_after_tracing():
    """A block uses the mode of the init, as the full array does."""
    draw = lambda key: jax.random.normal(key, SHAPE)
    plain = quick(draw)(KEY)
    jaxpr = inline_calls(jax.make_jaxpr(draw)(KEY))
    with jax.threefry_partitionable(False):
        assert not np.array_equal(quick(draw)(KEY), plain)
        b = Builder(jaxpr)
        b.invars += jaxpr.jaxpr.invars
        made = b.build(write_parts(b, jaxpr, [(jaxpr.jaxpr.outvars[0], Slice(0, 3, 4))]))
        assert any(e.primitive is block_bits_p for e in made.jaxpr.eqns)
        assert np.array_equal(run(made, [KEY])[0], plain[3:7])
        assert np.array_equal(quick(jax.extend.core.jaxpr_as_fun(jaxpr))(KEY)[0], plain)


def test_bits_of_a_block_for_several_keys():
    jaxpr = written(lambda key: jax.random.bits(key, SHAPE), [KEY], Slice(0, 3, 4))
    keys = jax.random.split(KEY, 3)
    got = jax.vmap(jax.extend.core.jaxpr_as_fun(jaxpr))(keys)[0]
    assert np.array_equal(got, jax.vmap(lambda key: jax.random.bits(key, SHAPE)[3:7])(keys))


# -- other equations -------------------------------------------------------------------------------

TABLE = np.arange(78.0, dtype=np.float32).reshape(SHAPE)
draw = lambda key, *shape: jax.random.normal(key, shape)
FOLLOWED = {
    "constant table": lambda key: jnp.asarray(TABLE) * 2,
    "iota": lambda key: lax.broadcasted_iota(jnp.bfloat16, SHAPE, 0),
    "eye": lambda key: jnp.eye(13, 6),
    "eye of another row": lambda key: jnp.eye(13, 6, k=-3),
    "tril": lambda key: jnp.tril(draw(key, *SHAPE)),
    "arange": lambda key: jnp.arange(78, dtype=jnp.float32).reshape(SHAPE),
    "transpose": lambda key: draw(key, 6, 13).T,
    "reshape": lambda key: draw(key, 13, 2, 3).reshape(SHAPE),
    "split by reshape": lambda key: draw(key, 26, 3).reshape(SHAPE),
    "rows merged": lambda key: jnp.pad(draw(key, 4, 3, 6).reshape(12, 6), ((0, 1), (0, 0))),
    "concatenate": lambda key: jnp.concatenate(
        [draw(key, 4, 6), jnp.zeros((1, 6)), draw(key, 8, 6)]
    ),
    "gates side by side": lambda key: jnp.concatenate(
        [draw(key, 13, 2), jnp.ones((13, 4))], axis=1
    ),
    "stack": lambda key: jnp.stack([draw(k, 6) for k in jax.random.split(key, 13)]),
    "stack beside": lambda key: jnp.stack([draw(k, 13) for k in jax.random.split(key, 6)], axis=1),
    "split": lambda key: jnp.split(draw(key, 39, 6), 3)[1],
    "split beside": lambda key: jnp.split(draw(key, 13, 18), 3, axis=1)[2],
    "slice": lambda key: draw(key, 33, 8)[3:29:2, 1:7],
    "reversed": lambda key: draw(key, *SHAPE)[::-1],
    "pad": lambda key: jnp.pad(draw(key, 7, 4), ((2, 4), (1, 1)), constant_values=3),
    "pad and cut": lambda key: lax.pad(draw(key, 20, 6), 0.0, ((-9, 2, 0), (0, 0, 0))),
    "where": lambda key: jnp.where(draw(key, 13, 1) > 0, draw(key, *SHAPE), 0.5),
    "clip": lambda key: jnp.clip(draw(key, *SHAPE), -1, jnp.arange(6.0)),
    "outer": lambda key: jnp.outer(draw(key, 13), jnp.arange(6.0)),
    "cumsum": lambda key: jnp.cumsum(draw(key, *SHAPE), axis=1),
    "sort": lambda key: jnp.sort(draw(key, *SHAPE), axis=1),
    "largest": lambda key: jnp.max(draw(key, 13, 6, 2), axis=2),
    "tile": lambda key: jnp.tile(draw(key, 13, 3), (1, 2)),
    "squeeze": lambda key: draw(key, 1, 13, 6)[0],
    "sinusoids": lambda key: jnp.concatenate(
        [f(jnp.arange(13.0)[:, None] / 100 ** (jnp.arange(3.0) / 3)) for f in (jnp.sin, jnp.cos)],
        axis=1,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOLLOWED)
def test_parts_are_followed_through(name):
    found = in_blocks(FOLLOWED[name])
    found.equal()
    found.nothing_of(SHAPE, SHAPE[::-1], (33, 8), (39, 6), (13, 18), (26, 3))


def test_a_product_is_made_of_the_rows_of_one_operand():
    left, right = draw(KEY, 13, 4), draw(KEY, 4, 6)
    found = in_blocks(lambda key: (draw(key, 13, 4) @ draw(key, 4, 6)) @ right.T @ right)
    for got, want in zip(found.blocks, found.whole, strict=True):
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5)
    found.nothing_of(SHAPE, left.shape)


def test_reductions_over_rows_need_the_whole():
    """Compute the full array if an init reduces over rows, and then slice the blocks from it."""
    found = in_blocks(lambda key: (w := draw(key, *SHAPE)) / jnp.max(jnp.abs(w)))
    for got, want in zip(found.blocks, found.whole, strict=True):
        assert np.allclose(got, want, rtol=1e-6)
    kinds = [e.primitive.name for e in found.jaxpr.jaxpr.eqns]
    assert kinds.count("random_bits") == kinds.count("reduce_max") == 1
    assert kinds.count("slice") == kinds.count("div") == len(BLOCKS)


def test_inputs_are_cut():
    w = np.asarray(draw(KEY, *SHAPE))
    in_blocks(lambda w: w, w).equal()
    in_blocks(lambda w: w * 2, w).equal()
    keys = jax.random.split(KEY, 13)
    in_blocks(lambda keys: jax.random.split(KEY, 13), keys).equal()
    in_blocks(lambda keys: keys, keys).equal()


def test_the_whole_is_the_program_itself():
    fn = lambda key: init.normal()(key, SHAPE)
    assert str(written(fn, [KEY], None)) == str(written(fn, [KEY], Slice(0, 0, 13)))
    assert np.array_equal(run(written(fn, [KEY], None), [KEY])[0], quick(fn)(KEY))


def test_parts_of_one_program_share_what_they_can():
    """The key is split once.

    A part that is requested twice is computed once. Parts of full arrays are slices.
    """

    def fn(key):
        a, b = jax.random.split(key)
        w = init.normal()(a, SHAPE)
        return w, jnp.zeros_like(w), w, init.orthogonal()(b, (5, 5))

    jaxpr = inline_calls(jax.make_jaxpr(fn)(KEY))
    b = Builder(jaxpr)
    b.invars += jaxpr.jaxpr.invars
    w, zeros, again, q = jaxpr.jaxpr.outvars
    p = Slice(0, 2, 3)
    made = write_parts(
        b, jaxpr, [(w, p), (zeros, p), (again, p), (w, Slice(0, 7, 1)), (q, p), (q, Slice(0, 0, 1))]
    )
    assert made[0] is made[2]
    kinds = [e.primitive.name for e in b.eqns]
    assert kinds.count("random_split") == 1
    assert kinds.count("random_bits") == 3  # two blocks, and the orthogonal array in full
    assert kinds.count("qr") + kinds.count("householder_product") <= 2
    assert b.roles.count(DIST) == 2
    jax.extend.core.check_jaxpr(b.build(made).jaxpr)


def test_thousands_of_equations_in_a_row():
    """Deep models split one key many times."""

    def fn(key):
        for _ in range(500):
            key, sub = jax.random.split(key)
        w = draw(sub, *SHAPE)
        for _ in range(1500):
            w = -w
        return w

    made = written(fn, [KEY], Slice(0, 3, 5))
    kinds = [e.primitive.name for e in made.jaxpr.eqns]
    assert kinds.count("random_split") == 500
    assert kinds.count("neg") == 1500
    assert all(v.aval.shape != SHAPE for e in made.jaxpr.eqns for v in e.outvars)


def test_very_many_parts_of_a_value_are_cut_out_of_it():
    def fn(key):
        w = draw(key, 16, 3)
        return jnp.concatenate([w[i : i + 13] for i in range(4)], axis=1)

    jaxpr = written(fn, [KEY], Slice(0, 1, 11))
    assert sum(e.primitive.name == "random_bits" for e in jaxpr.jaxpr.eqns) == 1
    assert np.array_equal(run(jaxpr, [KEY])[0], quick(fn)(KEY)[1:12])


# -- any init --------------------------------------------------------------------------------------

UNARY = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "half": lambda x: x * 0.5,
    "floor": jnp.floor,
    "int": lambda x: x.astype(jnp.int32).astype(jnp.float32),
    "flip": lambda x: x[::-1],
    "flip columns": lambda x: x[:, ::-1],
    "transpose": lambda x: x.T,
    "flat": lambda x: x.reshape(-1, 1),
    "row": lambda x: x.reshape(1, -1),
    "fold": lambda x: x.reshape(x.size // 2, 2) if x.size % 2 == 0 else x,
    "unfold": lambda x: x.reshape(2, x.size // 2) if x.size % 2 == 0 else x,
    "three": lambda x: x.reshape(x.shape[0], 1, x.shape[1]).transpose(1, 0, 2).reshape(x.shape),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=7),
    "drop": lambda x: x[1:] if len(x) > 2 else x,
    "every other": lambda x: x[::2],
    "column": lambda x: x[:, :1],
    "twice": lambda x: jnp.concatenate([x, x]),
    "beside": lambda x: jnp.concatenate([x, x + 1], axis=1),
    "largest": lambda x: jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), x.shape),
    "over rows": lambda x: x - jnp.max(x, axis=0),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "rows in place": lambda x: x.at[0].set(3.0),
    "stack": lambda x: jnp.stack([x, -x]).reshape(-1, x.shape[1]),
    "split": lambda x: jnp.split(x, 2)[1] if len(x) % 2 == 0 else x,
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(x.shape[1]), x)[1],
}
BINARY = {
    "add": lambda x, y: x + y,
    "max": lambda x, y: jnp.maximum(x, y),
    "where": lambda x, y: jnp.where(x > y, y, 2.0),
}
SOURCES = {
    "drawn": lambda key, shape: jax.random.randint(key, shape, -9, 9).astype(jnp.float32),
    "normal": lambda key, shape: jnp.round(jax.random.normal(key, shape) * 8),
    "ones": lambda key, shape: jnp.ones(shape),
    "count": lambda key, shape: lax.broadcasted_iota(jnp.float32, shape, 0),
    "table": lambda key, shape: jnp.asarray(
        np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape)
    ),
    "row": lambda key, shape: jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.float32), shape),
    "columns": lambda key, shape: jnp.broadcast_to(
        jax.random.randint(key, (shape[0], 1), 0, 9) * 1.0, shape
    ),
}
INSTRUCTION = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 7))


@given(
    sources=st.lists(
        st.tuples(st.sampled_from(sorted(SOURCES)), st.integers(1, 6), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    instructions=st.lists(INSTRUCTION, max_size=8),
    axis=st.integers(0, 1),
    where=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@example([("drawn", 3, 4)], [("unfold", 0), ("flat", 1), ("fold", 2)], 0, (0.3, 0.6))
@example(
    [("normal", 5, 2)], [("pad", 0), ("twice", 1), ("every other", 2), ("flip", 3)], 0, (0.5, 0.5)
)
def test_any_init(sources, instructions, axis, where):
    """All numbers are integers, so the result does not depend on the order of a sum."""

    def fn(key):
        keys = jax.random.split(key, len(sources))
        values = [SOURCES[s](k, (n, m)) for k, (s, n, m) in zip(keys, sources, strict=True)]
        for op, i in instructions:
            x = values[i % len(values)]
            if op in UNARY:
                x = UNARY[op](x)
            else:
                same = [y for y in values if y.shape == x.shape]
                x = BINARY[op](x, same[(i // 2) % len(same)])
            if x.size <= 200:
                values.append(x)
        return values[-1]

    size = jax.eval_shape(fn, KEY).shape[axis]
    start = min(int(where[0] * size), size - 1)
    stop = start + 1 + int(where[1] * (size - start - 1))
    note(jax.make_jaxpr(fn)(KEY))
    in_blocks(fn, axis=axis, blocks=[(start, stop)]).equal()


# -- rows by their numbers -------------------------------------------------------------------------


def rows_of(fn: Callable[..., Any], axes: Sequence[int], count: int) -> Any:
    """Return the jaxpr of some rows of a function's outputs.

    Its inputs are the key and the row ids.
    """
    jaxpr = inline_calls(jax.make_jaxpr(fn)(KEY))
    b = Builder(jaxpr)
    b.invars += jaxpr.jaxpr.invars
    numbers = b.input(jax.typeof(jnp.zeros(count, jnp.int32)))
    made = b.build(write_rows(b, jaxpr, list(zip(jaxpr.jaxpr.outvars, axes, strict=True)), numbers))
    jax.extend.core.check_jaxpr(made.jaxpr)
    return made


def alone(fn: Callable[..., Any], *axes: int) -> list[bool]:
    """Return, for each output of a function, True if its rows can be computed alone."""
    jaxpr = inline_calls(jax.make_jaxpr(fn)(KEY))
    return [makes_rows(jaxpr, v, axis) for v, axis in zip(jaxpr.jaxpr.outvars, axes, strict=True)]


def looked_up(fn: Callable[..., Any], axes: Sequence[int], numbers: Sequence[int]) -> Any:
    """Compare rows of an init with the full array, bit for bit. Return the program of the rows."""
    made = rows_of(fn, axes, len(numbers))
    whole = jax.tree.leaves(jax.jit(fn)(KEY))
    found = run(made, [KEY, np.asarray(numbers, np.int32)], jax.jit)
    for x, axis, got in zip(whole, axes, found, strict=True):
        want = np.take(as_numpy(x), numbers, axis)
        assert got.shape == want.shape and got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()
    return made


def nothing_has(jaxpr: Any, rows: int) -> bool:
    """Return True if no value of a program has `rows` rows."""
    variables = (*jaxpr.jaxpr.constvars, *(v for e in jaxpr.jaxpr.eqns for v in e.outvars))
    return not any(rows in v.aval.shape for v in variables)


TABLES = {
    "normal": lambda key: jax.random.normal(key, (1009, 6)),
    "uniform": lambda key: jax.random.uniform(key, (1009, 6), minval=-0.1, maxval=0.1),
    "truncated_normal": lambda key: 0.5 * jax.random.truncated_normal(key, -2.0, 2.0, (1009, 6)),
    "variance_scaling": lambda key: init.variance_scaling(1.0, "fan_in", "normal", out_axis=0)(
        key, (1009, 6)
    ),
    "bfloat16": lambda key: init.normal(0.02)(key, (1009, 6), jnp.bfloat16),
    "64 bits": lambda key: jax.random.normal(key, (1009, 6), float),  # with x64
    "zeros": lambda key: jnp.zeros((1009, 6)),
    "ones": lambda key: jnp.ones((1009, 6)) * 3,
    "three dimensions": lambda key: jax.random.normal(key, (1009, 2, 3)),
    "reshaped": lambda key: jax.random.normal(key, (1009, 6)).reshape(1009, 2, 3),
    "from one axis": lambda key: jax.random.normal(key, (1009 * 6,)).reshape(1009, 6),
    "transposed": lambda key: jax.random.normal(key, (6, 1009)).T,
    "another key": lambda key: jax.random.normal(
        jax.random.split(jax.random.fold_in(key, 3), 5)[4], (1009, 6)
    ),
    "old keys": lambda key: jax.random.normal(
        jax.random.split(jax.random.PRNGKey(3))[1], (1009, 6)
    ),
    "masked": lambda key: jnp.where(
        jnp.arange(1009)[:, None] == 0, 0.0, jax.random.normal(key, (1009, 6))
    ),
    "counted": lambda key: jnp.arange(1009.0)[:, None] * jnp.ones(6),
    "gates side by side": lambda key: jnp.concatenate(
        [jax.random.normal(key, (1009, 3)), jnp.ones((1009, 3))], 1
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", TABLES)
def test_rows_are_made_by_their_numbers(name, x64):
    rng = np.random.default_rng(3)
    with jax.enable_x64(x64):
        made = looked_up(TABLES[name], [0], [0, 1008, *rng.integers(0, 1009, 20), 17, 17])
        assert alone(TABLES[name], 0) == [True]
    assert nothing_has(made, 1009)


def test_rows_along_another_axis():
    fn = lambda key: jax.random.normal(key, (3, 1009, 2))
    assert nothing_has(looked_up(fn, [1], [5, 1000, 5]), 1009)


def test_rows_of_a_table_and_of_the_state_beside_it():
    """One program computes all requested outputs, and draws the bits once."""

    def fn(key):
        a, b = jax.random.split(key)
        w = init.normal()(b, (1009, 6))
        return w, jnp.zeros_like(w), jnp.full((1009, 1), 0.1), w.T, init.orthogonal()(a, (1009, 6))

    made = looked_up(lambda key: fn(key)[:4], [0, 0, 0, 1], [3, 8, 3, 1000])
    assert nothing_has(made, 1009)
    assert [e.primitive for e in made.jaxpr.eqns].count(block_bits_p) == 1
    assert alone(fn, 0, 0, 0, 1, 0) == [True, True, True, True, False]


@pytest.mark.parametrize("name", ["sorted", "over rows", "stacked", "table", "rbg", "keys"])
def test_rows_of_what_must_be_made_whole(name):
    fn = {
        "sorted": lambda key: jnp.sort(jax.random.normal(key, (113, 6)), axis=0),
        "over rows": lambda key: (w := jax.random.normal(key, (113, 6))) - jnp.max(w, 0),
        "stacked": lambda key: jnp.concatenate(
            [jax.random.normal(key, (112, 6)), jnp.zeros((1, 6))]
        ),
        "table": lambda key: jnp.asarray(np.arange(678.0).reshape(113, 6)) * 2,
        "rbg": lambda key: jax.random.normal(jax.random.key(3, impl="rbg"), (113, 6)),
        "keys": lambda key: jax.vmap(lambda k: jax.random.normal(k, (6,)))(
            jax.random.split(key, 113)
        ),
    }[name]
    assert alone(fn, 0) == [False]
    looked_up(fn, [0], [112, 5, 5, 0])


def test_rows_are_numbered_beyond_32_bits():
    """Compare with 64-bit integers, because no array of such a size can be created."""
    shape, numbers = (2**30, 3, 7), np.array([2**30 - 1, 5, 2**28 + 3], np.int32)
    high, low = counters(shape, 0, 0, 3, jnp.asarray(numbers))
    index = numbers.astype(np.uint64)[:, None, None]
    want = (
        index * 21
        + np.arange(3, dtype=np.uint64)[:, None] * np.uint64(7)
        + np.arange(7, dtype=np.uint64)
    )
    assert np.array_equal(
        np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low), want
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bit_width", [8, 16, 32, 64])
@pytest.mark.parametrize("axis", [0, 1])
def test_bits_from_a_place_that_is_computed(bit_width, axis):
    with jax.enable_x64(bit_width == 64):
        whole = jax.random.bits(KEY, SHAPE, f"uint{bit_width}")
        draw = lambda at: block_bits(
            KEY, at, bit_width=bit_width, shape=SHAPE, axis=axis, start=1, stop=3
        )
        for at, got in enumerate(jax.vmap(draw)(jnp.arange(SHAPE[axis] - 2, dtype=jnp.int32))):
            assert np.array_equal(got, lax.slice_in_dim(whole, at + 1, at + 3, axis=axis))


# -- servers ---------------------------------------------------------------------------------------


def model_init(key: jax.Array) -> dict[str, Any]:
    """Return an init in the style of flax and others: each leaf has a key, folded in or split
    off."""
    a, b = jax.random.split(key)
    return {
        "dense": {"kernel": init.lecun_normal()(a, (13, 6)), "bias": jnp.zeros(6)},
        "embed": init.normal(0.02)(jax.random.fold_in(b, 1), (29, 6), jnp.bfloat16),
        "heads": init.glorot_uniform()(jax.random.fold_in(b, 2), (17, 10)).reshape(17, 2, 5),
        "mixed": init.orthogonal()(jax.random.fold_in(b, 3), (11, 11)),
    }


def planned(servers: int = 3) -> Any:
    tx = optax.adam(1e-2)
    loss = lambda p, x: (
        sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in jax.tree.leaves(p)) * jnp.mean(x)
    )
    start = lambda key: (p := model_init(key), tx.init(p))
    step = dtrans.make_train_step(loss, tx)
    main = dtrans.trace(step, *jax.eval_shape(start, KEY), jnp.ones(4))
    pservers = [f"127.0.0.1:{6174 + i}" for i in range(servers)]
    return dtrans.pserver(
        main,
        dtrans.trace(start, KEY),
        pservers=pservers,
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=1),
    ), start


def test_servers_make_their_rows_and_no_more():
    plan, start = planned()
    want = dict(zip(plan.startup.out_names, jax.tree.leaves(jax.jit(start)(KEY)), strict=True))
    found = assemble(plan, {ep: p.startup(KEY) for ep, p in plan.servers.items()}, list(want))
    assert found.keys() == want.keys()
    assert sum(len(blocks) > 1 for blocks in plan.placement.blocks.values()) == 5
    for name, value in want.items():
        assert as_numpy(found[name]).tobytes() == as_numpy(value).tobytes(), name
    for programs in plan.servers.values():
        made = [v.aval.shape for e in programs.startup.jaxpr.jaxpr.eqns for v in e.outvars]
        assert not {(13, 6), (29, 6), (17, 2, 5), (17, 10)} & {*made}
        assert (11, 11) in made
        drawn = [op for op in programs.startup.ops if op.type == "random_bits"]
        assert len(drawn) == 4


def test_startup_programs_are_the_same_every_time():
    first, second = planned()[0], planned()[0]
    for ep in first.servers:
        assert str(first.servers[ep].startup) == str(second.servers[ep].startup)


# -- memory ----------------------------------------------------------------------------------------


def bytes_of(fn: Callable[..., Any]) -> int:
    found = jax.jit(fn).lower(KEY).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


@pytest.mark.parametrize("name", ["normal", "uniform", "he_normal", "zeros"])
def test_the_memory_of_a_block_is_that_of_a_block(name):
    shape, servers = (4096, 1024), 8
    fn = lambda key: INITIALIZERS[name](key, shape)
    whole = bytes_of(fn)
    rows = shape[0] // servers
    for k in (0, 3, servers - 1):
        part = Slice(0, k * rows, rows)
        block = bytes_of(jax.extend.core.jaxpr_as_fun(written(fn, [KEY], part)))
        assert block < 1.25 * whole / servers
