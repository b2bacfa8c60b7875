"""Test tensor parallelism: results of shards, their collectives, and arrays that are gathered.

The programs of shards run under `jax.vmap` with a named axis, and some also on the virtual devices
of this process. Results are compared with one device in 64 bits. For a result that is not sharded,
`vmap` has `out_axes=None`, which raises an error if the result differs between shards.
"""

from __future__ import annotations

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings, strategies as st
from jax import lax
from shard_programs import (
    AXIS,
    checked,
    deep,
    floats,
    kinds,
    labels,
    loops,
    on_shards,
    one_shard,
    pieces_of,
    quick,
    traced,
    whole_of,
)

import dtrans
from dtrans._jax import equations
from dtrans.engine.axis_bytes import collectives
from dtrans.engine.split import split
from dtrans.errors import ConfigError
from dtrans.ir.program import is_communication
from dtrans.ops import all_gather_p, all_reduce_p
from dtrans.rows.random_bits import block_bits_p
from dtrans.tensor_parallel.defaults import default_axes


def soak(*values):
    """Return a case that runs only in `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.rotated)


# -- cross entropy over sharded classes ------------------------------------------------------------


def ce_logsumexp(w, b, x, y):
    logits = x @ w + b
    return (
        jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
    ).mean()


def ce_optax(w, b, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w + b, y).mean()


def ce_indexed(w, b, x, y):
    return -jax.nn.log_softmax(x @ w + b)[jnp.arange(len(y)), y].mean()


def ce_one_hot(w, b, x, y):
    return -(jax.nn.one_hot(y, w.shape[1]) * jax.nn.log_softmax(x @ w + b)).sum(-1).mean()


LOSSES = [ce_logsumexp, ce_optax, ce_indexed, ce_one_hot]


def head(classes, batch=6, features=5):
    return (
        floats(features, classes),
        floats(classes, seed=1),
        floats(batch, features, seed=2),
        labels(batch, classes),
    )


SOME = [
    (ce_logsumexp, 4, 10),
    (ce_optax, 8, 7),
    (ce_indexed, 2, 10),
    (ce_one_hot, 3, 7),
    (ce_optax, 3, 1000),
]
ALL = [
    case for case in itertools.product(LOSSES, [1, 2, 3, 4, 8], [10, 7, 1000]) if case not in SOME
]


@pytest.mark.parametrize(("loss", "shards", "classes"), [*SOME, *(soak(*case) for case in ALL)])
def test_cross_entropy_and_its_gradients_are_those_of_one_device(x64, loss, shards, classes):
    args = head(classes)
    both = lambda *a: jax.value_and_grad(loss, (0, 1, 2))(*a)
    program = checked(both, args, {0: 1, 1: 0}, shards, outs={1: 1, 2: 0})
    assert program.out_axes == (None, 1, 0, None)
    assert not program.gathers and program.jaxpr.in_avals[0].shape == (5, -(-classes // shards))


@pytest.mark.parametrize("shards", [soak(2), soak(3), 8])
def test_cross_entropy_on_devices(x64, shards):
    program = checked(
        jax.value_and_grad(ce_optax, (0, 1, 2)), head(7), {0: 1, 1: 0}, shards, mesh=True
    )
    assert not program.gathers


def test_no_array_of_all_logits_is_made():
    args = head(1000)
    for loss in LOSSES:
        program = split(traced(jax.value_and_grad(loss, (0, 1, 2)))(*args), {0: 1, 1: 0}, 4, AXIS)
        largest = max(v.aval.size for e in equations(program.jaxpr) for v in e.outvars)
        assert largest <= 6 * 250, loss


def test_what_cross_entropy_moves():
    """With D=64, C=1000, b=8 on 4 shards, forward moves O(b) bytes.

    With the gradient of the features, a step moves far less than data parallelism.
    """
    d, c, b, n = 64, 1000, 8, 4
    args = [jnp.zeros(s, "float32") for s in ((d, c), (c,), (b, d))] + [jnp.zeros(b, "int32")]
    for loss in LOSSES:
        forward = split(traced(loss)(*args), {0: 1, 1: 0}, n, AXIS)
        assert forward.moved.keys() == {"all_reduce"} and forward.moved["all_reduce"] <= 4 * 3 * b
        both = split(traced(jax.value_and_grad(loss, (0, 1, 2)))(*args), {0: 1, 1: 0}, n, AXIS)
        moved = sum(t * sum(a.aval.size * 4 for a in e.invars) for e, t in collectives(both.jaxpr))
        assert moved == sum(both.moved.values()) <= 4 * (b * d + 4 * b)
        data_parallel = 4 * (d * c + c)  # the gradients of the head
        assert data_parallel / moved > 100


@pytest.mark.parametrize(("shards", "classes"), [(4, 10), (8, 7), soak(2, 1000)])
def test_three_steps_of_sgd(x64, shards, classes):
    w, b, x, y = head(classes)

    def step(w, b, x, y):
        loss, (dw, db) = jax.value_and_grad(ce_optax, (0, 1))(w, b, x, y)
        return w - 0.3 * dw, b - 0.3 * db, loss

    program = split(traced(step)(w, b, x, y), {0: 1, 1: 0}, shards, AXIS)
    assert program.out_axes == (1, 0, None) and not program.gathers
    run = quick(jax.vmap(one_shard(program), (0, 0, None, None), [0, 0, None], axis_name=AXIS))
    held = pieces_of(w, 1, shards), pieces_of(b, 0, shards)
    whole = quick(step)
    for _ in range(3):
        w, b, loss = whole(w, b, x, y)
        *held, found = run(*held, x, y)  # the last operation determines the padding
        np.testing.assert_allclose(found, loss, rtol=1e-12)
    np.testing.assert_allclose(whole_of(held[0], 1, classes), w, rtol=1e-12)
    np.testing.assert_allclose(whole_of(held[1], 0, classes), b, rtol=1e-12)


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "dtype"),
    [(3, "float64"), (8, "uint8"), (2, "int8"), soak(8, "float64"), soak(3, "int64")],
)
def test_the_position_of_the_largest_is_the_lowest_of_equals(x64, shards, dtype):
    x = np.random.default_rng(0).integers(0, 3, size=(40, 7)).astype(dtype)
    fn = lambda x, y: (jnp.argmin(x, -1), jnp.argmax(x, -1), (jnp.argmax(x, -1) == y).mean())
    assert not checked(fn, (x, labels(40, 7)), {0: 1}, shards).gathers


def test_the_position_of_what_is_not_a_number_or_infinite(x64):
    rows = [
        [1, np.nan, 3, np.nan, 9],
        [-np.inf] * 5,
        [np.inf, 1, np.inf, 0, 0],
        [np.nan] * 5,
        [0, 0, 0, 0, np.nan],
    ]
    fn = lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1))
    for shards in (2, 8):
        checked(fn, (np.asarray(rows),), {0: 1}, shards)
    checked(fn, (np.asarray(rows),), {0: 1}, 4, mesh=True)


def test_positions_never_are_floats():
    """The integer 2^24 + 1 is not a float32."""
    jaxpr = traced(lambda x: jnp.argmax(x, -1))(jax.ShapeDtypeStruct((2**25,), "float32"))
    program = split(jaxpr, {0: 0}, 4, AXIS)
    for e in equations(program.jaxpr):
        if e.primitive.name == "convert_element_type":
            assert not (e.invars[0].aval.dtype.kind == "i" and e.outvars[0].aval.dtype.kind == "f")
    assert [
        e.invars[0].aval.dtype.kind
        for e in equations(program.jaxpr)
        if e.primitive.name == "all_reduce"
    ] == [
        "f",
        "i",
    ]


def test_the_position_is_of_the_index_type_asked_for():
    x = np.arange(250, dtype="float32")
    checked(lambda x: lax.argmax(x, 0, jnp.uint8), (x,), {0: 0}, 8)
    checked(lambda x: lax.argmin(x, 0, jnp.uint8), (-x,), {0: 0}, 8)


def test_ids_that_are_cut_are_compared(x64):
    ids = labels(11, 4)
    program = checked(
        lambda i, y: ((i == y).sum(), jnp.where(i == 2, y, -i)), (ids, labels(11, 4, 1)), {0: 0}, 4
    )
    assert not program.gathers and program.out_axes == (None, 0)


# -- embeddings and gathers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "mode"),
    [
        ({0: 0}, "fill"),
        ({0: 0}, "clip"),
        ({0: 1}, "fill"),
        ({1: 0}, "promise_in_bounds"),
        ({0: 0, 1: 0}, "clip"),
        ({0: 1, 1: 1}, None),
        *(
            soak(*c)
            for c in itertools.product(
                [{0: 0}, {0: 1}, {1: 1}, {0: 0, 1: 1}], [None, "clip", "fill"]
            )
        ),
    ],
)
def test_embeddings_and_their_gradients(x64, cuts, mode):
    table, ids = floats(10, 6), labels(15, 10).reshape(5, 3)
    if mode in ("clip", "fill"):
        ids[0] = -1, 11, 200
    look_up = lambda e, i: jnp.asarray(e).at[i].get(mode=mode) if mode else e[i]
    fn = lambda e, i: (look_up(e, i), jax.grad(lambda e: (look_up(e, i) ** 2).sum())(e))
    if mode == "fill":  # NaN if there is no row
        fn = lambda e, i: (
            look_up(e, i),
            jax.grad(lambda e: jnp.nan_to_num(look_up(e, i)).sum())(e),
        )
    for shards in (3, 8) if cuts == {0: 0} else (4,):
        program = checked(fn, (table, ids), cuts, shards, noise=1 not in cuts)
        assert cuts == {0: 1, 1: 1} or not [g for g in program.gathers if g.shape == (10, 6)]


def test_embeddings_of_words_that_are_cut_over_the_vocabulary_move_no_table(x64):
    program = checked(
        lambda e, i: jax.grad(lambda e: jnp.sin(e[i]).sum())(e),
        (floats(10, 6), labels(9, 10)),
        {0: 0},
        4,
        outs={0: 0},
    )
    assert kinds(program) == ["all_reduce"] and program.out_axes == (0,)


def test_integers_and_booleans_are_picked(x64):
    table = np.arange(-3, 7)
    fn = lambda t, i: (
        t[i],
        (t > 0)[i],
        t.astype("uint8").at[i].get(mode="fill"),
        t.at[i].get(mode="fill"),
    )
    checked(fn, (table, np.array([0, 9, 3, -1, 10, 77])), {0: 0}, 4)


def test_entries_of_two_dimensions_are_picked_and_written(x64):
    x, rows, at = floats(6, 10), labels(8, 6, 1), labels(8, 10)
    fn = lambda x, r, c: (x[r, c], x.at[r, c].add(2.0), x.at[r, c].mul(3.0), x.at[r, c].max(0.5))
    for cuts, shards in (({0: 0}, 4), ({0: 1}, 8)):
        assert not checked(fn, (x, rows, at), cuts, shards).gathers
    checked(lambda x, r, c: x.at[r, c].add(2.0, mode="clip"), (x, rows + 3, at), {0: 1}, 4)
    checked(lambda x, c: x.at[:, c].set(0.0, mode="clip"), (x, at + 4), {0: 1}, 4)


def test_slices_are_written_where_the_cut_is_not(x64):
    x, u = floats(6, 10), floats(3, 10, seed=1)
    fn = lambda x, u, r: x.at[r].add(u)
    for cuts in ({0: 1}, {1: 1}, {0: 1, 1: 1}, {1: 0}, {1: 0, 2: 0}):
        program = checked(fn, (x, u, np.array([1, 4, 1])), cuts, 4, noise=2 not in cuts)
        assert not program.gathers


# -- layers ----------------------------------------------------------------------------------------


def mlp(w1, b1, w2, b2, x):
    return jnp.tanh(x @ w1 + b1) @ w2 + b2


MLP = [(5, 10), (10,), (10, 3), (3,), (4, 5)]


def arrays(shapes):
    return [floats(*s, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("shards", [soak(2), soak(3), 4, soak(8)])
def test_columns_then_rows(x64, shards):
    args = arrays(MLP)
    jaxpr = traced(mlp)(*args)
    cuts = default_axes(jaxpr, range(4), shards)
    assert cuts == {0: 1, 1: 0, 2: 0}
    assert kinds(checked(mlp, args, cuts, shards)) == ["all_reduce"]
    grads = jax.grad(lambda *a: (mlp(*a) ** 2).sum(), range(5))
    # the output, and dx
    assert kinds(checked(grads, args, cuts, shards, outs=cuts)) == ["all_reduce"] * 2


def test_columns_then_columns_gathers_what_is_smallest(x64):
    program = checked(mlp, arrays(MLP), {0: 1, 1: 0, 2: 1, 3: 0}, 2)
    assert program.out_axes == (1,)
    assert all(g.shape not in ((5, 10), (10, 3)) for g in program.gathers)
    wide = checked(lambda h, w: h @ w, (floats(64, 12), floats(12, 3)), {0: 1, 1: 1}, 2)
    assert kinds(wide) == ["all_to_all", "all_reduce"]  # gathers the kernel, not the large input


def attention(wq, wk, wv, wo, x):
    b, s, _ = x.shape
    q, k, v = ((x @ w).reshape(b, s, 4, -1) for w in (wq, wk, wv))
    a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]))
    return jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(b, s, -1) @ wo


ATTENTION = [(6, 8), (6, 8), (6, 8), (8, 6), (2, 5, 6)]


@pytest.mark.parametrize("shards", [2, soak(4)])
def test_heads_of_attention(x64, shards):
    args = arrays(ATTENTION)
    grads = jax.value_and_grad(lambda *a: jnp.sin(attention(*a)).sum(), range(5))
    cuts = default_axes(traced(attention)(*args), range(4), shards)
    assert cuts == {0: 1, 1: 1, 2: 1, 3: 0}
    assert kinds(checked(attention, args, cuts, shards)) == ["all_reduce"]
    # gradients of x through queries, keys and values are one sum
    program = checked(grads, args, cuts, shards, outs={i + 1: d for i, d in cuts.items()})
    assert kinds(program) == ["all_reduce"] * 2 and not program.gathers


def test_a_layer_of_a_transformer_takes_four_sums():
    """As in Megatron, a layer has two sums forward and two backward, each with the size of the
    input."""

    def loss(params, x, y):
        for wq, wk, wv, wo, w1, b1, w2, b2 in params[:-1]:
            x = x + attention(wq, wk, wv, wo, x - x.mean(-1, keepdims=True))
            x = x + jax.nn.gelu(x @ w1 + b1) @ w2 + b2
        return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], y).mean()

    m, layers = 8, 3
    layer = arrays([(m, m)] * 4 + [(m, 32), (32,), (32, m), (m,)])
    params = [layer] * layers + [floats(m, 100)]
    jaxpr = traced(jax.value_and_grad(loss))(params, floats(2, 5, m), labels((2, 5), 100))
    count = 8 * layers + 1
    cuts = default_axes(jaxpr, range(count), 4)
    assert [cuts.get(i) for i in range(8)] == [1, 1, 1, 0, 1, 0, 0, None] and cuts[count - 1] == 1
    program = split(jaxpr, cuts, 4, AXIS, outs={i + 1: d for i, d in cuts.items()})
    assert program.moved.keys() == {"all_reduce"} and not program.gathers
    large = [
        e
        for e in equations(program.jaxpr)
        if is_communication(e) and e.outvars[0].aval.shape == (2, 5, m)
    ]
    assert len(large) == 4 * layers


def test_heads_that_do_not_fit_are_gathered(x64):
    program = checked(attention, arrays(ATTENTION), {0: 1, 1: 1, 2: 1, 3: 0}, 3)
    assert program.gathers and "reshape" in program.gathers[0].reason


@pytest.mark.parametrize("shards", [soak(2), 3])
def test_convolutions(x64, shards):
    def net(k1, b1, k2, x):
        h = lax.conv_general_dilated(
            x, k1, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return lax.conv_general_dilated(
            jax.nn.relu(h + b1), k2, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    args = arrays([(3, 3, 2, 4), (4,), (2, 2, 4, 3), (2, 5, 5, 2)])
    grads = jax.grad(lambda *a: jnp.sin(net(*a)).sum(), (0, 1, 2))
    cuts = default_axes(traced(net)(*args), [0, 1], shards)
    assert cuts == {0: 3, 1: 0}
    program = checked(grads, args, {**cuts, 2: 2}, shards)
    assert program.out_axes == (3, 0, 2) and not program.gathers


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shards", [soak(2), 3])
def test_grouped_convolutions_of_sharded_examples_gather_nothing(x64, shards, groups):
    """This also holds for derivatives, in which examples are input features
    (`batch_group_count`)."""

    def loss(k1, k2, x):
        spec = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(
            x, k1, (2, 1), "SAME", dimension_numbers=spec, feature_group_count=groups
        )
        h = lax.conv_general_dilated(jnp.tanh(h), k2, (1, 1), "VALID", dimension_numbers=spec)
        return jnp.sin(h).sum()

    args = arrays([(3, 3, 4 // groups, 8), (2, 2, 8, 3), (6, 5, 5, 4)])
    program = checked(jax.grad(loss, (0, 1, 2)), args, {2: 0}, shards, outs={2: 0})
    assert not program.gathers and program.out_axes == (None, None, 0)
    assert set(kinds(program)) == {"all_reduce"}


def grouped_convolution(**groups):
    """Return a function of a kernel and of examples with one spatial dimension."""
    spec = ("NWC", "WIO", "NWC")
    return lambda k, x: lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=spec, **groups
    )


@pytest.mark.parametrize("shards", [2, 3])
def test_sharded_examples_of_a_convolution_with_groups_of_examples_are_gathered(x64, shards):
    net = grouped_convolution(batch_group_count=2)
    assert checked(net, arrays([(3, 3, 4), (6, 5, 3)]), {1: 0}, shards).gathers


@pytest.mark.parametrize("shards", [2, 3])
def test_sharded_features_of_grouped_convolutions_are_gathered(x64, shards):
    net, args = grouped_convolution(feature_group_count=2), arrays([(3, 2, 4), (2, 5, 4)])
    for axes in ({0: 2}, {0: 1}, {1: 2}):
        assert checked(net, args, axes, shards).gathers


@pytest.mark.parametrize("shards", [soak(2), 3])
def test_recomputed_layers_stay_cut(x64, shards):
    args = arrays(MLP)
    layer = jax.checkpoint(mlp)
    grads = jax.grad(lambda *a: (layer(*a) ** 2).sum(), range(5))
    cuts = {0: 1, 1: 0, 2: 0}
    for trace in (
        traced,
        *([] if "JAX_REMAT3" in os.environ else [jax.make_jaxpr]),
    ):  # this hides the layer
        program = checked(grads, args, cuts, shards, trace=trace)
        assert not program.gathers and program.out_axes == (1, 0, 0, None, None)
    assert default_axes(traced(layer)(*args), range(4), shards) == cuts
    constant = np.arange(5.0)
    with_constant = jax.checkpoint(lambda w, x: jnp.sin((x + constant) @ w).sum())
    checked(jax.grad(with_constant), (args[0], args[4]), {0: 1}, shards)


@pytest.mark.parametrize("shards", [2, soak(3)])
def test_bodies_of_loops_are_cut(x64, shards):
    """Shard the batch of a recurrent network: gradients of weights are summed once, after the loop."""

    def loss(w, u, x):
        def cell(h, xt):
            h = jnp.tanh(xt @ w + h @ u)
            return h, (h**2).sum()

        last, sums = lax.scan(cell, jnp.zeros((x.shape[1], 4)), x)
        return last.sum() + sums.mean()

    args = (floats(3, 4), floats(4, 4), floats(5, 6, 3))
    program = checked(jax.value_and_grad(loss, (0, 1)), args, {2: 1}, shards)
    assert not program.gathers and not [e for e in deep(program) if e.primitive is all_gather_p]
    assert all(
        e.primitive is not all_reduce_p
        for loop in loops(program)
        for e in equations(loop.params["jaxpr"])
    )
    assert sum(program.moved.values()) == sum(x.nbytes for x in args[:2]) + 8


def test_a_statistic_in_a_loop_is_one_of_all_shards(x64):
    def loss(w, x):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3), None

        return (lax.scan(layer, x, w)[0] ** 2).sum()

    program = checked(jax.value_and_grad(loss), (floats(3, 4, 4), floats(7, 4)), {1: 0}, 2)
    assert not program.gathers
    assert any(
        e.primitive is all_reduce_p
        for loop in loops(program)
        for e in equations(loop.params["jaxpr"])
    )


def test_loops_with_a_condition_take_the_same_turns_everywhere(x64):
    def fn(w, x):
        until = lambda c: (c[1].sum() < 50) & (c[0] < 30)
        count, last = lax.while_loop(
            until, lambda c: (c[0] + 1, c[1] + jnp.abs(x @ w) + 1), (0, jnp.zeros((5, 4)))
        )
        turned = lax.fori_loop(0, 3, lambda i, c: c + last[:, i] @ x, w[:, 0])
        return count, last, turned

    program = checked(fn, (floats(3, 4), floats(5, 3)), {1: 0}, 2)
    assert program.out_axes == (None, 0, None) and not program.gathers


def test_branches_are_cut_where_any_of_them_is(x64):
    def fn(w, x):
        wide = lax.cond(w[0, 0] > 0, lambda: x * 2, lambda: jnp.ones_like(x))
        total = lax.cond(w[0, 0] < 0, lambda: x.sum(0), lambda: jnp.arange(3.0))
        mixed = lax.switch(
            jnp.int32(x.sum() > 0), [lambda: x.sum(0) @ w, lambda: jnp.cos(x[0] @ w)]
        )
        return wide, total, mixed

    for sign in (1, -1):
        program = checked(fn, (sign * jnp.abs(floats(3, 4)), floats(5, 3)), {1: 0}, 2)
        assert program.out_axes == (0, None, None)


def test_a_loop_along_what_is_cut_is_given_whole_values(x64):
    def last(w, x):
        return lax.scan(lambda c, r: (jnp.tanh(c + r @ w), None), x[0] @ w, x)[0]

    def added(w, x):
        return lax.scan(lambda c, r: (c + r @ w, None), x[0] @ w, x)[0]

    program = checked(last, (floats(5, 7), floats(4, 5)), {1: 0}, 2)
    # one gather: the gathered array is complete when the first row is read
    assert [g.shape for g in program.gathers] == [(4, 5)]
    program = checked(added, (floats(5, 7), floats(4, 5)), {1: 0}, 2)
    # the first row; each shard sums its own rows
    assert [g.shape for g in program.gathers] == [(1, 5)]
    mixed = lambda x: lax.scan(lambda c, _: (jnp.sort(c, 0), None), x, None, length=9)[0]
    program = checked(mixed, (floats(6, 7),), {0: 0}, 2)
    # not in each iteration
    assert [g.reason.split()[0] for g in program.gathers] == ["scan"]


def test_calls_and_derivative_rules_of_users_are_looked_into(x64):
    @jax.custom_vjp
    def scaled(x):
        return x * 2.0

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (g * jnp.sign(x),))
    layer = jax.jit(lambda w, x: jax.nn.gelu(scaled(x @ w)))
    grads = jax.grad(lambda w, x: layer(w, x).sum(), (0, 1))
    assert not checked(grads, (floats(5, 10), floats(4, 5)), {0: 1}, 4).gathers


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_of_random_bits_are_made_without_the_rest(x64, bits, axis):
    dtype = jnp.dtype(f"uint{bits}")
    fn = lambda x, key: jax.random.bits(key, x.shape, dtype) ^ x
    x, key = np.zeros((5, 7, 3), dtype), jax.random.key(3)
    program = split(traced(fn)(x, key), {0: axis}, 2, AXIS)
    assert {e.primitive for e in deep(program) if e.primitive.name == "random_bits"} == {
        block_bits_p
    }
    whole = on_shards(program, [jax.eval_shape(fn, x, key)], [x, key])[0]
    np.testing.assert_array_equal(whole, fn(x, key))


def test_dropout_masks_are_those_of_one_device(x64):
    def fn(w, x, key):
        h = x @ w
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0).sum(0)

    key = np.asarray(jax.random.PRNGKey(3))
    assert not checked(fn, (floats(5, 10), floats(4, 5), key), {0: 1}, 4).gathers


def test_sums_that_are_wanted_cut_are_scattered(x64):
    program = checked(
        lambda x, w, r: r + x @ w,
        (floats(4, 10), floats(10, 6), floats(4, 6, seed=3)),
        {0: 1, 1: 0, 2: 1},
        4,
    )
    assert kinds(program) == ["reduce_scatter"] and program.out_axes == (1,)


def read_twice(read, x, w, r, q):
    """Return outputs that read pieces of the sum h, and a piece and the full value of the sum k."""
    h, k = x @ w, (2 * x) @ w
    return r + h, (h * h).sum(), *read(k, q)


# The columns are 7, which no number of shards below divides.
TWO_SUMS = [(4, 10), (10, 7), (4, 7), (4, 7)]
TWO_SUMS_CUT = {0: 1, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize("shards", [2, 4])
def test_a_sum_with_several_readers_is_scattered_where_that_sends_less(x64, shards):
    """The scattered sum h saves more bytes than the later gather of k costs."""
    read = lambda k, q: (q + k, jnp.sort(k, 1))
    program = checked(functools.partial(read_twice, read), arrays(TWO_SUMS), TWO_SUMS_CUT, shards)
    assert kinds(program) == ["reduce_scatter"] * 2 + ["all_gather"]
    assert program.out_axes == (1, None, 1, None)


@pytest.mark.parametrize("shards", [2, 4])
def test_a_sum_that_was_reduced_in_full_is_not_also_scattered(x64, shards):
    read = lambda k, q: (jnp.sort(k, 1), q + k)
    program = checked(functools.partial(read_twice, read), arrays(TWO_SUMS), TWO_SUMS_CUT, shards)
    assert kinds(program) == ["reduce_scatter", "all_reduce"] and not program.gathers
    assert program.out_axes == (1, None, None, 1)


@pytest.mark.parametrize("name", ["max", "sort"])
def test_a_sum_that_a_local_scope_reads_is_reduced_in_full(x64, name):
    def read(k, q):
        first = q + k
        with dtrans.local():
            return first, getattr(jnp, name)(k, 1)

    program = checked(functools.partial(read_twice, read), arrays(TWO_SUMS), TWO_SUMS_CUT, 4)
    assert kinds(program) == ["all_reduce"] * 2


def test_sums_of_several_products_are_made_once(x64):
    fn = lambda a, b, w, v: -(a @ w - b @ v) * 0.5
    program = checked(
        fn, (*arrays([(4, 10), (4, 10)]), floats(10, 3), floats(10, 3)), {0: 1, 1: 1}, 4
    )
    assert kinds(program) == ["all_reduce"]
    twice = checked(
        lambda a, w: ((a @ w) * 2.0, jnp.exp(a @ w)), (floats(4, 10), floats(10, 3)), {0: 1}, 4
    )
    assert len(kinds(twice)) == 2  # two products, one sum each


MOVED_SUMS = {
    "some rows": (lambda a, b, w, v: (a @ w)[:1], 3),
    "joined": (lambda a, b, w, v: jnp.concatenate([a @ w, b @ v]), 24),
    "stacked and turned": (
        lambda a, b, w, v: jnp.stack([a @ w, b @ v]).transpose(1, 2, 0)[::-1],
        24,
    ),
    "one of two": (lambda a, b, w, v: jnp.where(jnp.arange(3) > 1, a @ w, b @ v), 12),
    "added up": (lambda a, b, w, v: jnp.cumsum(a @ w - b @ v, axis=0), 12),
    "picked": (
        lambda a, b, w, v: jnp.take(a @ w, jnp.array([2, 9]), axis=0, mode="fill", fill_value=0.0),
        6,
    ),
    "written into": (lambda a, b, w, v: (a @ w).at[1:3].set((b @ v)[:2]), 12),
}


@pytest.mark.parametrize("name", MOVED_SUMS)
def test_sums_are_made_behind_what_moves_them(x64, name):
    """Reduce only once, after the operations that move the sums."""
    fn, count = MOVED_SUMS[name]
    program = checked(
        fn, (*arrays([(4, 10), (4, 10)]), floats(10, 3), floats(10, 3)), {0: 1, 1: 1}, 4
    )
    (reduced,) = [e for e in deep(program) if e.primitive.name == "all_reduce"]
    assert reduced.outvars[0].aval.size == count


def test_sums_are_made_before_what_fills_and_rounds(x64):
    fill = lambda x: jnp.take(x, jnp.array([2, 9]), axis=0, mode="fill", fill_value=7.0)
    fn = lambda a, w: (fill(a @ w), (a @ w).astype(jnp.float32), (a @ w).astype(jnp.int32))
    program = checked(fn, (floats(4, 10), floats(10, 3)), {0: 1}, 4)
    assert all(
        e.invars[0].aval.shape == (4, 3) for e in deep(program) if e.primitive.name == "all_reduce"
    )


def test_sums_that_meet_what_is_infinite_are_made_before(x64):
    x, w = floats(2, 10), floats(10, 3)
    x[:, 5:] = 0.0  # terms of some shards are 0
    fn = lambda x, w, f, d: ((x @ w) * f, (x @ w) / d)
    checked(fn, (x, w, np.array([np.inf, 1.0, -np.inf]), np.zeros(3)), {0: 1}, 4)


def test_effects_are_given_whole_values(x64):
    seen = []
    fn = lambda x: (jax.debug.callback(lambda a: seen.append(a.shape), x * 2), x + 1)[1]
    program = checked(fn, (floats(3, 10),), {0: 1}, 4)
    assert len(program.gathers) == 1 and program.gathers[0].reason.startswith("debug_callback")
    jax.effects_barrier()
    assert set(seen) == {(3, 10)}


# -- experts ---------------------------------------------------------------------------------------


def experts(gate, w1, w2, x):
    """Top-1 gating with a capacity (GShard): tokens [g, s, m], experts [e, m, h] and [e, h, m]."""
    e, capacity = gate.shape[1], 3
    probs = jax.nn.softmax(x @ gate)
    to = jax.nn.one_hot(jnp.argmax(probs, -1), e, dtype=x.dtype)
    place = jnp.cumsum(to, 1) * to - 1
    dispatch = jax.nn.one_hot(place.astype(int), capacity, dtype=x.dtype) * to[..., None]
    combine = dispatch * probs.max(-1)[..., None, None]
    sent = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, w1))
    back = jnp.einsum("egch,ehm->egcm", hidden, w2)
    return jnp.einsum("gsec,egcm->gsm", combine, back)


@pytest.mark.parametrize(("groups", "count", "shards"), [(4, 8, 4), soak(3, 5, 2), soak(5, 3, 4)])
def test_experts_take_two_exchanges(x64, groups, count, shards):
    args = arrays([(6, count), (count, 6, 16), (count, 16, 6), (groups, 5, 6)])
    jaxpr = traced(experts)(*args)
    cuts = default_axes(jaxpr, [1, 2], shards, axes={3: 0})
    assert cuts == {1: 0, 2: 0, 3: 0}
    forward = checked(experts, args, cuts, shards)
    assert kinds(forward) == ["all_to_all"] * 2 and not forward.gathers and forward.out_axes == (0,)
    grads = jax.grad(lambda *a: jnp.sin(experts(*a)).sum(), range(4))
    backward = checked(grads, args, cuts, shards, outs={1: 0, 2: 0, 3: 0})
    # no reduction runs twice
    assert kinds(backward).count("all_to_all") == 4 and not backward.gathers
    assert kinds(backward).count("all_reduce") == 1  # the gate's gradient


def test_experts_on_devices(x64):
    args = arrays([(6, 4), (4, 6, 16), (4, 16, 6), (4, 5, 6)])
    assert kinds(checked(experts, args, {1: 0, 2: 0, 3: 0}, 4, mesh=True)) == ["all_to_all"] * 2


def test_what_experts_move():
    """Shards exchange only the tokens that one shard has."""
    args = arrays([(6, 8), (8, 6, 16), (8, 16, 6), (4, 5, 6)])
    program = split(traced(experts)(*args), {1: 0, 2: 0, 3: 0}, 4, AXIS)
    assert program.moved == {"all_to_all": 2 * 4 * (8 * 4 * 3 * 6) // 4}


# -- which parameters are sharded ------------------------------------------------------------------


def test_default_axes_of_a_model():
    def model(table, w, b, head, ids):
        h = jax.nn.relu(table[ids] @ w.astype("float32") + b)
        return h @ head.T + (h @ w.T[:, :8].T).sum()

    args = [jnp.ones(s) for s in ((20, 8), (8, 8), (8,), (30, 8))] + [jnp.zeros(4, int)]
    jaxpr = traced(model)(*args)
    assert default_axes(jaxpr, range(4), 2) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert default_axes(jaxpr, [1, 2], 2) == {1: 1, 2: 0}
    assert default_axes(jaxpr, range(4), 2, axes={1: 0}) == {0: 0, 1: 0, 3: 0}


def test_default_axes_are_of_the_scope():
    def model(w1, w2, x):
        h = x @ w1
        with jax.named_scope("head"):
            return h @ w2

    jaxpr = traced(model)(jnp.ones((4, 5)), jnp.ones((5, 6)), jnp.ones((2, 4)))
    within = lambda eqn: "head" in str(eqn.source_info.name_stack)
    assert default_axes(jaxpr, [0, 1], 2, within) == {1: 1}
    assert default_axes(jaxpr, [0, 1], 2) == {0: 1, 1: 0}


def test_gradients_have_the_default_axes_of_the_forward_pass():
    args = [jnp.ones(s) for s in MLP]
    grads = traced(jax.grad(lambda *a: mlp(*a).sum(), range(4)))(*args)
    assert default_axes(grads, range(4), 2) == {0: 1, 1: 0, 2: 0}


def test_tied_embeddings_are_cut_over_the_vocabulary(x64):
    def loss(table, w, ids, y):
        logits = jnp.tanh(table[ids] @ w) @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    args = floats(11, 6), floats(6, 6), labels(7, 11), labels(7, 11, 1)
    cuts = default_axes(traced(loss)(*args), [0], 4)
    assert cuts == {0: 0}
    program = checked(jax.value_and_grad(loss, (0, 1)), args, cuts, 4, outs={1: 0})
    assert not program.gathers and program.out_axes == (None, 0, None)


# -- errors, and values that cannot be sharded -----------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "outs", "shards", "says"),
    [
        ({3: 0}, {}, 2, "axes contains input 3, but the program has only 3 inputs"),
        (
            {0: 2},
            {},
            2,
            r"axes shards input 0, f32\[5,4\], along dimension 2, which does not exist",
        ),
        ({2: 0}, {}, 2, r"axes shards input 2, f32\[0\], along dimension 0, which is empty"),
        ({}, {1: 0}, 2, "outs contains output 1"),
        ({}, {0: 5}, 2, r"outs shards output 0, f32.*, along dimension 5"),
        ({}, {}, 0, "at least 1 shard"),
    ],
)
def test_refusals(cuts, outs, shards, says):
    jaxpr = traced(lambda w, x, e: x @ w)(jnp.ones((5, 4)), jnp.ones((3, 5)), jnp.ones(0))
    with pytest.raises(ConfigError, match=says):
        split(jaxpr, cuts, shards, AXIS, outs=outs)


def test_gathers_say_why(x64):
    fn = lambda x: (jnp.sort(x, -1), x[:, 2:5], jnp.cumsum(x, 1))
    program = checked(fn, (floats(3, 10),), {0: 1}, 4)
    (gathered,) = program.gathers  # once
    assert gathered.shape == (3, 10) and gathered.dtype == np.float64 and gathered.nbytes == 240
    assert gathered.reason.startswith("sort of f64[3,10]")
    whole = split(traced(lambda x: x * 2)(floats(3, 10)), {0: 1}, 4, AXIS, outs={0: None})
    assert [g.reason for g in whole.gathers] == ["output 0"] and whole.out_axes == (None,)


def test_outputs_are_cut_as_is_wanted(x64):
    x = floats(7, 10)
    for had in ({}, {0: 0}, {0: 1}):
        fn = lambda x: (x + 1, x * 2, -x)
        assert checked(fn, (x,), had, 4, outs={0: 0, 1: 1, 2: None}).out_axes == (0, 1, None)


def test_one_shard_has_all():
    program = checked(mlp, arrays(MLP), {0: 1}, 1)
    assert (
        not any(is_communication(e) for e in equations(program.jaxpr)) and program.in_axes[0] == 1
    )


# -- any program -----------------------------------------------------------------------------------


STEPS = {
    "sin": lambda x, y: jnp.sin(x),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "over": lambda x, y: x / (1.5 + jnp.abs(y)),
    "bad": lambda x, y: jnp.where(jnp.isfinite(jnp.log(x)), x, y),  # padding becomes NaN
    "less": lambda x, y: jnp.where(x < y, x, 0.5),
    "softmax": lambda x, y: jax.nn.softmax(x, 1) + y,
    "softmax0": lambda x, y: jax.nn.log_softmax(x, 0) + y,
    "product": lambda x, y: (x @ y.T) @ y / 8.0,
    "gram": lambda x, y: x @ (x.T @ y) / 8.0,
    "reversed": lambda x, y: x[::-1] + y,
    "mean": lambda x, y: x - y.mean(0),
    "rows": lambda x, y: x * y.sum(1, keepdims=True),
    "extremes": lambda x, y: x + y.max(0) - y.min(1)[:, None],
    "prod": lambda x, y: x + jnp.prod(y, 1)[:, None] + jnp.any(x > y, 0),
    "iota": lambda x, y: x + jnp.arange(x.shape[0])[:, None] * 0.1 + jnp.arange(x.shape[1]),
    "flat": lambda x, y: (x.reshape(-1) * jnp.arange(x.size) / 50.0).reshape(x.shape) + y,
    "split": lambda x, y: (
        (x.reshape(x.shape[0] // 2, 2, -1).sum(1, keepdims=True) + jnp.zeros((1, 2, 1))).reshape(
            x.shape
        )
        if x.shape[0] % 2 == 0
        else x
    ),
    "sorted": lambda x, y: jnp.sort(x, 1) + y,
    "cumsum": lambda x, y: jnp.cumsum(x, 0) / 4.0,
    "concat": lambda x, y: jnp.concatenate([x[:1], y[1:]], 0),
    "padded": lambda x, y: jnp.pad(x, ((1, 1), (0, 0)))[1:-1] + y,
    "picked": lambda x, y: x + jnp.take_along_axis(y, jnp.argmax(x, 1)[:, None], 1),
    "permuted": lambda x, y: x[jnp.argsort(y[:, 0])],
    "put": lambda x, y: x.at[jnp.arange(x.shape[0]), jnp.argmin(y, 1)].add(1.0),
    "transposed": lambda x, y: jnp.transpose(jnp.sin(x.T) + y.T),
    "stop": lambda x, y: x + lax.optimization_barrier((y, x))[0],
}


PROGRAMS = dict(
    names=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), min_size=1, max_size=5
    ),
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    axes=st.tuples(*(st.sampled_from([None, 0, 1]),) * 2),
    shards=st.sampled_from([2, 3, 4]),
    gradient=st.booleans(),
    seed=st.integers(0, 9),
)


@settings(max_examples=10)
@given(**PROGRAMS)
def test_any_program(names, shape, axes, shards, gradient, seed):
    agrees(names, shape, axes, shards, gradient, seed)


@pytest.mark.soak
@settings(max_examples=150)
@given(**PROGRAMS)
def test_many_programs(names, shape, axes, shards, gradient, seed):
    agrees(names, shape, axes, shards, gradient, seed)


def agrees(names, shape, axes, shards, gradient, seed):
    assume(axes != (None, None))

    def fn(x, y):
        for name, swapped in names:
            x, y = STEPS[name](x, y), (x if swapped else y)
        return x, y.sum()

    def grads(x, y):
        return jax.grad(lambda x, y: jnp.tanh(fn(x, y)[0]).sum(), (0, 1))(x, y)

    with jax.enable_x64(True):
        args = floats(*shape, seed=seed), floats(*shape, seed=seed + 1)
        expected = quick(grads if gradient else fn)(*args)
        assume(all(float(np.abs(a).max()) < 1e6 for a in expected))  # and no NaN
        cuts = {i: d for i, d in enumerate(axes) if d is not None}
        checked(grads if gradient else fn, args, cuts, shards)


def test_a_carried_sum_that_a_turn_reads_whole_is_reduced_before_the_loop():
    """A partial sum would otherwise be reduced in each iteration."""
    sines = lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x.sum(0))
    program = checked(sines, [floats(8, 4)], {0: 0}, 4)
    assert [(e.primitive, times) for e, times in collectives(program.jaxpr)] == [(all_reduce_p, 1)]
