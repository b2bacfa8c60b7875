"""Test operations that move entries along a sharded dimension.

If a program only sums the moved entries, they stay on their shards. Results equal one device,
whether or not the number of shards divides the dimension.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from shard_programs import AXIS, checked, floats, kinds, traced

from dtrans.engine.layout import Shards, sharded_along
from dtrans.engine.split import split
from dtrans.rows.layout import RowAxis, RowOrder


def critic(w, x):
    return jnp.tanh(x @ w).sum(-1)


LOSSES = {
    "reals and fakes": lambda w, x, y: jnp.mean(
        jax.nn.softplus(critic(w, jnp.concatenate([x, y])))
        * jnp.concatenate([jnp.ones(len(x)), -jnp.ones(len(y))])
    ),
    "rows between others": lambda w, x, y: critic(
        w, jnp.concatenate([x, jnp.ones((3, 4)), y, x])
    ).sum(),
    "all but the first": lambda w, x, y: jnp.square(critic(w, x)[1:]).mean(),
    "some rows": lambda w, x, y: critic(w, x[2:-3]).mean(),
    "every second": lambda w, x, y: critic(w, x[::2]).mean() - critic(w, y[1::2]).mean(),
    "every third of some": lambda w, x, y: critic(w, x)[1:8:3].mean(),
    "neighbours": lambda w, x, y: critic(w, x[::-1]).mean() + critic(w, x)[::-1] @ critic(w, x),
    "padded": lambda w, x, y: critic(w, jnp.pad(x, ((2, 1), (0, 0)), constant_values=0.5)).mean(),
    "padded between": lambda w, x, y: critic(w, lax.pad(x, 0.25, ((1, -1, 2), (0, 0, 0)))).mean(),
    "tiled": lambda w, x, y: (critic(w, jnp.tile(x, (3, 1))) * jnp.arange(3 * len(x))).mean(),
    "split in three": lambda w, x, y: sum(
        critic(w, part).sum() * i for i, part in enumerate(jnp.split(x, [2, 7]))
    ),
    "time first": lambda w, x, y: critic(w, jnp.stack([x, y, -x]).reshape(-1, 4)).mean(),
    "time first, back again": lambda w, x, y: (
        critic(w, jnp.stack([x, y, -x]).reshape(-1, 4)).reshape(3, -1) * jnp.arange(3.0)[:, None]
    ).mean(),
    "mean of heads": lambda w, x, y: jnp.concatenate([critic(w, x), critic(-w, x)]).mean(),
}
REVERSED = {"neighbours"}  # rows of other shards are multiplied


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("rows", "shards"), [(12, 2), (10, 3)])
def test_what_ends_in_a_sum_stays_where_it_is(x64, name, rows, shards):
    loss = LOSSES[name]
    args = floats(4, 3), floats(rows, 4, seed=1), floats(rows, 4, seed=2)
    program = checked(jax.value_and_grad(loss), args, {1: 0, 2: 0}, shards)
    if name not in REVERSED:
        assert not program.gathers and kinds(program) == ["all_reduce"], program.gathers


def test_rows_that_all_need_are_gathered_in_their_sequence(x64):
    fn = lambda x, y: jnp.sort(jnp.concatenate([x, y]) * 2.0, 0)
    program = checked(fn, (floats(10, 4), floats(5, 4, seed=1)), {0: 0, 1: 0}, 3)
    assert {g.reason.split()[0] for g in program.gathers} <= {"sort", "concatenate"}
    cut_again = checked(lambda x: (x * 2.0)[1:], (floats(10, 4),), {0: 0}, 3, outs={0: 0})
    assert cut_again.out_axes == (0,)


def test_a_gather_of_a_few_rows_is_not_dearer_than_before():
    """Compare rows with all rows.

    A concatenation doubles the rows. The gather must not move more bytes than before.
    """
    fn = lambda x: jnp.concatenate([x, x]) @ jnp.concatenate([x, x]).T
    program = split(traced(fn)(np.zeros((8, 4), "float32")), {0: 0}, 2, AXIS)
    assert sum(program.moved.values()) <= 8 * 4 * 4


def test_random_bits_of_moved_rows_are_those_of_one_device(x64):
    def fn(w, x, y, key):
        h = jnp.concatenate([x, y]) @ w
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), jnp.sin(h), 0.0).sum(0)

    args = (
        floats(4, 3),
        floats(10, 4, seed=1),
        floats(5, 4, seed=2),
        np.asarray(jax.random.PRNGKey(3)),
    )
    assert not checked(fn, args, {1: 0, 2: 0}, 3).gathers


def test_layouts_have_one_name():
    shards = Shards(2, ())
    assert shards.ordered(0, 6, shards.entries(6, sharded_along(0))) == sharded_along(0)
    assert shards.ordered(0, 5, shards.entries(5, sharded_along(0))) == sharded_along(0)
    in_runs = RowAxis("", 0, 1, RowOrder(((0, 1, 4, 5), (2, 3, 6, 7))))
    assert shards.plain(in_runs, 8) == RowAxis("", 0, 2, RowOrder(((0, 2), (1, 3))))
    gap = RowAxis("", 0, 1, RowOrder(((-1, 0), (1, 2))))
    assert shards.plain(gap, 3) == gap and shards.pads(3, gap) and shards.local(3, gap) == 2


# -- loops along the sharded dimension
# -----------------------------------------------------------


def by_micro_batches(w, x, y):
    """Add up the gradients of four micro-batches, each taken by its number."""
    loss = lambda w, x: jnp.square(critic(w, x)).sum()

    def turn(carry, part):
        total, grads, count = carry
        found, more = jax.value_and_grad(loss)(w, part)
        return (total + found, grads - more * 2.0, count + 1), found * 3.0

    start = jnp.float64(2.0), jnp.ones_like(w), 0
    (total, grads, count), each = lax.scan(turn, start, x.reshape(4, -1, 4))
    return total / count, grads, count, each


ROWS = {
    "map": lambda w, x, y: lax.map(lambda r: critic(w, r), x).mean(),
    "map with batch size": lambda w, x, y: lax.map(lambda r: critic(w, r), x, batch_size=2).mean(),
    "map of both": lambda w, x, y: lax.map(
        lambda r: critic(w, r[0]) * critic(w, r[1]), (x, y)
    ).sum(),
    "map of reals and fakes": lambda w, x, y: lax.map(
        lambda r: critic(w, r), jnp.concatenate([x, y])
    ).mean(),
    "sum in a scan": lambda w, x, y: lax.scan(lambda c, r: (c + critic(w, r), None), 1.0, x)[0],
    "rows of two": lambda w, x, y: lax.map(
        lambda r: critic(w, r).mean(), x.reshape(-1, 2, 4)
    ).mean(),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("rows", "shards"), [(12, 2), (10, 3)])
def test_a_loop_over_rows_takes_those_of_the_shard(x64, name, rows, shards):
    args = floats(4, 3), floats(rows, 4, seed=1), floats(rows, 4, seed=2)
    program = checked(jax.value_and_grad(ROWS[name]), args, {1: 0, 2: 0}, shards)
    if shards == 2 or name not in (
        "rows of two",
        "map with batch size",
    ):  # shards have terms of it
        assert not program.gathers and set(kinds(program)) == {"all_reduce"}, program.gathers


def test_micro_batches_of_a_shard_are_its_own_turns(x64):
    args = floats(4, 3), floats(12, 4, seed=1), floats(12, 4, seed=2)
    program = checked(by_micro_batches, args, {1: 0}, 2)
    assert not program.gathers and program.out_axes == (None, None, None, 0)
    assert not checked(by_micro_batches, (args[0], floats(16, 4), args[2]), {1: 0}, 4).gathers


def test_a_loop_that_reads_what_other_turns_made_has_all_rows(x64):
    fn = lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c) + critic(w, r), c), 0.0, x)
    assert checked(fn, (floats(4, 3), floats(10, 4)), {1: 0}, 3).gathers
    twice = lambda w, x: lax.scan(lambda c, r: (c + critic(w, r) * c, None), 1.0, x)[0]
    assert checked(twice, (floats(4, 3), floats(10, 4)), {1: 0}, 3).gathers


def test_a_piece_of_a_split_may_be_empty(x64: None) -> None:
    fn = lambda x: [jnp.sum(piece) for piece in jnp.split(jnp.sin(x), [4, 4])]
    checked(fn, (floats(12, 3),), {0: 0}, 2)


@pytest.mark.parametrize(("rows", "gathers"), [(12, 0), (13, 1)])
def test_turns_that_padding_would_never_end_are_taken_by_all(
    x64: None, rows: int, gathers: int
) -> None:
    def doubled(r):
        return lax.while_loop(lambda k: k * jnp.abs(r).sum() < 9.0, lambda k: 2.0 * k, 1.0)

    program = checked(lambda x: lax.map(doubled, x).sum(), (floats(rows, 3),), {0: 0}, 3)
    assert len(program.gathers) == gathers
