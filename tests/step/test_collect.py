"""Collections: marks that survive every transformation of JAX and disappear in lowering, and their
merge rules, compared with NumPy."""

from __future__ import annotations

import collections
import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closes_remat, quick, tree_close, tree_equal
from hypothesis import given, strategies as st

from dtrans._jax import equations, lowered_jaxpr
from dtrans.errors import ConfigError, TraceError
from dtrans.ir.inline import inline_calls
from dtrans.step.collect import COLLECT, KEYS, collect, collect_p, collected, merged


Pair = collections.namedtuple("Pair", "a b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Metrics:
    right: jax.Array
    losses: list


def keys_in(fn, *args):
    """Return the keys of all marks in a function, also in bodies."""
    return [
        e.params["key"] for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive is collect_p
    ]


def read(fn, *args):
    """Return the key that `collected` finds for each output of a function; None for outputs without
    a mark."""
    jaxpr = inline_calls(lowered_jaxpr(fn, *args), keep=(COLLECT,))
    found = collected(jaxpr)
    return [found.get(v) for v in jaxpr.jaxpr.outvars]


# -- marking ---------------------------------------------------------------------------------------


def test_the_constants_are_the_keys():
    assert (
        all(getattr(importlib.import_module("dtrans.step.collect"), k) == k for k in KEYS)
        and len(set(KEYS)) == 6
    )


@pytest.mark.parametrize("key", KEYS)
def test_structures_come_back_as_they_are(key):
    x = jnp.arange(3.0)
    value = {
        "m": Metrics(x, [x + 1, None]),
        "p": Pair(x, (np.ones(2), [x])),
        "d": collections.OrderedDict(z=x, a=x),
    }
    made = collect(value, key)
    assert jax.tree.structure(made) == jax.tree.structure(value)
    tree_equal(made, jax.tree.map(jnp.asarray, value))
    assert keys_in(lambda v: collect(v, key), value) == [key] * 7


@pytest.mark.parametrize(
    "value, message",
    [
        ({"a": [jnp.ones(2), "text"]}, "a/1 is 'text'; only arrays can be collected"),
        (Pair(jnp.ones(2), 3.0), "b is 3.0; only arrays can be collected under LOCAL_SUM"),
        (len, "the value is <built-in function len>; only arrays"),
    ],
)
def test_leaves_that_are_no_arrays_are_named(value, message):
    with pytest.raises(ConfigError, match=message):
        collect(value, "LOCAL_SUM")


@pytest.mark.parametrize(
    "call", [lambda: collect(jnp.ones(2), "MEAN"), lambda: merged("MEAN", [[jnp.ones(2)]])]
)
def test_unknown_keys_are_refused_with_those_there_are(call):
    with pytest.raises(
        ConfigError, match="key is 'MEAN'; expected one of GLOBAL_CONCAT, .*, LOCAL_SUM"
    ):
        call()


def loss(w, x):
    y = collect(jnp.tanh(x @ w), "GLOBAL_CONCAT")
    return jnp.sum(y * y)


def plain(w, x):
    y = jnp.tanh(x @ w)
    return jnp.sum(y * y)


def scanned(f):
    return lambda w, x: jax.lax.scan(lambda c, row: (c + f(w, row), None), 0.0, x)[0]


TRANSFORMED = {
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(f),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "grad of grad": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: scanned(f),
    "grad of scan": lambda f: jax.grad(scanned(f)),
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "vmap over weights": lambda f: jax.vmap(f, (2, None)),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jnp.sum(jax.vmap(f, (None, 0))(w, x))),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda v: f(v, x), (w,), (w,)),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda v: f(v, x), w)[1](w),
    "forward over reverse": lambda f: lambda w, x: jax.jvp(lambda v: jax.grad(f)(v, x), (w,), (w,)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_marks_survive_and_change_nothing(name):
    transform = TRANSFORMED[name]
    w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    w = jnp.stack([w, 2 * w], axis=2) if name == "vmap over weights" else w
    x = jnp.linspace(0, 1, 12).reshape(3, 4)
    tree_close(quick(transform(loss))(w, x), quick(transform(plain))(w, x), 1e-6)
    found = keys_in(transform(loss), w, x)
    assert found and set(found) == {"GLOBAL_CONCAT"}
    lowered = jax.jit(transform(loss)).lower(w, x).as_text()
    assert "collect" not in lowered
    # vmap may move its axis. For the derivative of a call or a loop, a value and its mark are two
    # values.
    if "vmap" not in name and name not in ("grad of jit", "grad of scan"):
        unmarked = jax.jit(transform(plain)).lower(w, x).as_text()
        assert lowered.replace("loss", "f") == unmarked.replace("plain", "f")


def test_gradients_of_collected_values_are_not_collected():
    marked = jax.make_jaxpr(jax.jvp, static_argnums=0)(
        lambda x: collect(x * 2, "LOCAL_SUM"), (1.0,), (1.0,)
    )
    assert len([e for e in equations(marked) if e.primitive is collect_p]) == 1


def test_the_axis_that_is_mapped_comes_first():
    fn = jax.vmap(lambda x: collect(x, "LOCAL_CONCAT"), in_axes=1)
    jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 5)))
    (eqn,) = (e for e in equations(jaxpr) if e.primitive is collect_p)
    assert eqn.outvars[0].aval.shape == (5, 2)
    tree_equal(fn(jnp.arange(6.0).reshape(2, 3)), jnp.arange(6.0).reshape(2, 3).T)


# -- reading ---------------------------------------------------------------------------------------


def test_each_marked_output_has_its_key():
    fn = lambda x: (
        collect({"b": x * 2, "a": x + 1}, "GLOBAL_SUM"),
        x,
        jax.jit(lambda y: collect(y, "LOCAL_MEAN"))(x),
    )
    assert read(fn, jnp.ones(3)) == ["GLOBAL_SUM", "GLOBAL_SUM", None, "LOCAL_MEAN"]
    assert read(lambda x: x + 1, jnp.ones(3)) == [None]


def test_the_value_before_the_mark_is_not_merged():
    def fn(x):
        y = jnp.sin(x)
        return y, collect(y, "LOCAL_SUM"), collect(y, "LOCAL_SUM")

    assert read(fn, jnp.ones(3)) == [None, "LOCAL_SUM", "LOCAL_SUM"]


def test_one_collection_twice_is_one_collection():
    assert read(lambda x: collect(collect(x, "LOCAL_SUM"), "LOCAL_SUM"), jnp.ones(3)) == [
        "LOCAL_SUM"
    ]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: collect(collect(x * 2, "LOCAL_SUM"), "GLOBAL_MEAN"),
        lambda x: [collect(y, k) for y in [x * 2] for k in ("LOCAL_SUM", "GLOBAL_MEAN")],
        lambda x: collect(jax.jit(lambda y: collect(y, "LOCAL_SUM"))(x * 2), "GLOBAL_MEAN"),
        lambda x: [
            collect(y, k) for y in [collect(x, "LOCAL_SUM")] for k in ("LOCAL_SUM", "GLOBAL_MEAN")
        ],
    ],
    ids=["a mark of a mark", "two marks of one value", "through a call", "deeper"],
)
def test_a_value_in_two_collections_is_an_error(fn):
    message = r"a value of f32\[3\].* is collected under both LOCAL_SUM and GLOBAL_MEAN; use one"
    with pytest.raises(ConfigError, match=message):
        read(fn, jnp.ones(3))


@pytest.mark.parametrize(
    "fn, inside",
    [
        (scanned(loss), "scan"),
        (lambda w, x: jax.lax.cond(x[0, 0] > 0, loss, plain, w, x), "cond"),
        (lambda w, x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + loss(w, x), 0.0), "while"),
        pytest.param(jax.checkpoint(loss), "remat2", marks=closes_remat),
    ],
)
def test_values_that_nothing_can_see_are_an_error(fn, inside):
    with pytest.raises(
        TraceError, match=f"collected under GLOBAL_CONCAT inside a {inside}; return the value from"
    ):
        read(fn, jnp.ones((4, 2)), jnp.ones((3, 4)))


def test_what_is_computed_once_more_was_seen_the_first_time():
    fn = jax.value_and_grad(
        jax.checkpoint(lambda w: (lambda y: (jnp.sum(y**2), y))(collect(w * 2, "LOCAL_SUM"))),
        has_aux=True,
    )
    assert read(fn, jnp.ones(3)) == [None, "LOCAL_SUM", None]


# -- merging ---------------------------------------------------------------------------------------

BY_NUMPY = {
    "SUM": lambda xs: np.sum(xs, axis=0),
    "MEAN": lambda xs: np.mean(xs, axis=0),
    "CONCAT": np.concatenate,
}


@given(st.data(), st.sampled_from(KEYS), st.integers(1, 3), st.integers(1, 4))
def test_merging_is_what_numpy_says(data, key, replicas, micros):
    shape = data.draw(
        st.sampled_from([(), (1,), (3,), (2, 2)] if "CONCAT" not in key else [(1,), (3,), (2, 2)])
    )
    kind = data.draw(st.sampled_from([np.float32, np.int32, np.int8, np.bool_]))
    seed = data.draw(st.integers(0, 99))
    values = (
        np.random.default_rng(seed)
        .integers(0, 2 if kind is np.bool_ else 9, (replicas, micros, *shape))
        .astype(kind)
    )
    place, how = key.split("_")
    merge = BY_NUMPY[how]
    local = [merge(list(replica)) for replica in values]
    want = local[0] if place == "LOCAL" else merge(local)
    got = merged(key, [list(map(jnp.asarray, replica)) for replica in values])
    np.testing.assert_allclose(np.asarray(got, np.float64), want.astype(np.float64), rtol=1e-6)
    assert got.shape == want.shape and got.dtype.kind == want.dtype.kind


def test_micro_batches_come_in_order_and_then_replicas():
    values = [[jnp.array([10 * r + m]) for m in range(3)] for r in range(2)]
    assert merged("GLOBAL_CONCAT", values).tolist() == [0, 1, 2, 10, 11, 12]
    assert merged("LOCAL_CONCAT", values).tolist() == [0, 1, 2]
    uneven = [[jnp.zeros((n, 2)) for n in (2, 0, 1)]]
    assert merged("GLOBAL_CONCAT", uneven).shape == (3, 2)


def test_additions_are_made_in_order():
    tiny, huge = jnp.float32(1.0), jnp.float32(2.0**24)
    assert float(merged("LOCAL_SUM", [[huge, tiny, tiny]])) == 2.0**24
    assert float(merged("LOCAL_SUM", [[tiny, tiny, huge]])) == 2.0**24 + 2
    # merge over replicas after micro-batches
    assert float(merged("GLOBAL_SUM", [[huge], [tiny], [tiny]])) == 2.0**24
    assert float(merged("GLOBAL_SUM", [[huge, -huge], [tiny, tiny]])) == 2.0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_short_floats_are_added_up_in_32_bits(dtype):
    values = [[jnp.ones((), dtype)] + [jnp.asarray(2.0**-12, dtype)] * 4096]
    assert float(merged("LOCAL_SUM", values)) == 2.0 and merged("LOCAL_SUM", values).dtype == dtype


@pytest.mark.parametrize("count", [1, 2])
def test_means_of_integers_are_floats_however_many_there_are(count):
    made = merged("LOCAL_MEAN", [[jnp.array([3, 4])] * count])
    assert made.dtype == jnp.float32 and made.tolist() == [3.0, 4.0]


def test_random_keys_can_be_concatenated():
    keys = [jax.random.split(jax.random.key(i), 2) for i in range(2)]
    tree_equal(merged("LOCAL_CONCAT", [keys]), jnp.concatenate(keys))
    with pytest.raises(ConfigError, match="random keys are collected under LOCAL_SUM"):
        merged("LOCAL_SUM", [keys])


def test_merging_can_be_traced():
    values = [[jnp.arange(2.0), jnp.ones(2)], [jnp.zeros(2), jnp.ones(2)]]
    tree_equal(jax.jit(lambda v: merged("GLOBAL_SUM", v))(values), merged("GLOBAL_SUM", values))


@pytest.mark.parametrize(
    "key, values, message",
    [
        (
            "LOCAL_CONCAT",
            [[jnp.float32(1)]],
            "a 0-d value is collected under LOCAL_CONCAT, which concatenates along dimension 0",
        ),
        (
            "GLOBAL_SUM",
            [[jnp.ones(2), jnp.ones(3)]],
            r"shapes \(2,\), \(3,\); GLOBAL_SUM needs equal shapes",
        ),
        (
            "GLOBAL_CONCAT",
            [[jnp.ones((2, 1)), jnp.ones((2, 2))]],
            "needs shapes that differ only in dimension 0",
        ),
        (
            "GLOBAL_MEAN",
            [[jnp.ones(2)], []],
            r"the replicas have \[0, 1\] micro-batches; .* at least one",
        ),
        ("GLOBAL_MEAN", [[]], r"have \[0\] micro-batches; .* at least one"),
        ("GLOBAL_MEAN", [], r"have \[\] micro-batches; .* at least one"),
    ],
)
def test_values_that_cannot_be_merged(key, values, message):
    with pytest.raises(ConfigError, match=message):
        merged(key, values)
