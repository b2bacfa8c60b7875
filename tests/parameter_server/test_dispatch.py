"""Blocks and dispatchers, compared with recorded tables of paddlepaddle 1.8.5.

The tests also check that blocks cover each leaf once, in complete rows, in order. Other code relies
on this.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import endpoints, plan_of
from hypothesis import given, strategies as st
from paths import GOLDEN as GOLDEN_FOLDER

import dtrans
from dtrans import HashName, PSDispatcher, RoundRobin, SizeBalanced, VarBlock, slice_variable
from dtrans.errors import ConfigError
from dtrans.parameter_server.placement import _cut, dispatched


GOLDEN = json.loads((GOLDEN_FOLDER / "paddle-transpiler.json").read_text())
EPS, EPS_6 = endpoints(3), endpoints(6)


def var(shape, name="w"):
    return SimpleNamespace(name=name, shape=tuple(shape))


def sizes(shape, count, least):
    blocks = slice_variable([var(shape)], count, least)
    assert [b.offset for b in blocks] == list(range(len(blocks)))
    return [b.size for b in blocks]


@pytest.mark.parametrize("table", ["slice_variable", "slice_variable_small"])
def test_every_row_that_paddle_recorded(table):
    rows = GOLDEN[table]["rows"]
    assert len(rows) == {"slice_variable": 367, "slice_variable_small": 126}[table]
    for shape, count, least, want in rows:
        assert sizes(shape, count, least) == want, (shape, count, least)


def test_two_lists_of_paddles_own_test():
    """The lists are from paddle/fluid/tests/unittests/test_slice_var.py."""
    shapes = [[3, 5], [1024], [28, 784], [8, 1020], [800, 10]]
    assert [sizes(s, 10, 1024) for s in shapes] == [
        [15],
        [1024],
        [2352] * 9 + [784],
        [2040] * 4,
        [1150] * 6 + [1100],
    ]
    assert sizes([6, 33, 33, 33], 10, 8192) == [33 * 33 * 33] * 6


def test_a_block_prints_as_paddle_prints_it():
    block = VarBlock("params/w", 2, 60)
    assert str(block) == "params/w:2:60"
    assert block.name == "params/w.block2"


def test_variables_keep_their_order():
    blocks = slice_variable([var((4, 2), "b"), var((4, 2), "a")], 2, 1)
    assert [str(b) for b in blocks] == ["b:0:4", "b:1:4", "a:0:4", "a:1:4"]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_a_scalar_or_empty_variable_is_one_block(shape):
    assert sizes(shape, 3, 1) == [math.prod(shape)]


@pytest.mark.parametrize("count,least", [(0, 1), (-1, 1), (2, 0), (2, -8192)])
def test_counts_and_sizes_must_be_positive(count, least):
    with pytest.raises(
        ConfigError,
        match=f"slice_count is {count} and min_block_size is {least}; expected positive numbers",
    ):
        slice_variable([var((3,))], count, least)


def test_an_unknown_dimension_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"params/w has the shape \(-1, 3\); expected known dimensions, but -1"
    ):
        slice_variable([var((-1, 3), "params/w")], 2, 1)


SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(SHAPES, st.integers(1, 9), st.integers(1, 100))
def test_blocks_are_whole_rows_that_cover_the_leaf_once(shape, servers, least):
    got = sizes(shape, servers, least)
    numel, width = math.prod(shape), math.prod(shape[1:])
    assert sum(got) == numel
    assert 1 <= len(got) <= servers
    assert all(s > 0 for s in got) or numel == 0
    assert len(set(got[:-1])) <= 1
    assert got[-1] <= got[0]
    if len(shape) >= 2 and numel:
        assert all(s % width == 0 for s in got)
    if len(got) > 1:
        assert all(s >= least for s in got[:-1])


@given(SHAPES, st.integers(1, 9), st.integers(1, 100))
def test_splitting_and_joining_is_the_identity(shape, servers, least):
    leaf = np.arange(math.prod(shape)).reshape(shape)
    blocks = _cut("w", leaf, servers, least)
    assert [b.index for b in blocks] == list(range(len(blocks)))
    assert {b.count for b in blocks} == {len(blocks)}
    if shape == ():
        assert [(b.span, b.shape) for b in blocks] == [(None, ())]
        return
    parts = [leaf[b.span.start : b.span.stop] for b in blocks]
    assert [p.shape for p in parts] == [b.shape for b in blocks]
    assert np.array_equal(np.concatenate(parts), leaf)
    assert [p.size for p in parts] == sizes(shape, servers, least)


# -- dispatchers -----------------------------------------------------------------------------------


def test_round_robin_goes_on_where_it_stopped_until_reset():
    rr = RoundRobin(EPS)
    assert rr.dispatch(range(4)) == [EPS[0], EPS[1], EPS[2], EPS[0]]
    assert rr.dispatch(range(1)) == [EPS[1]]
    rr.reset()
    assert rr.dispatch(range(2)) == [EPS[0], EPS[1]]
    assert rr.eps == list(EPS)


NAMES = ["params/b1", "params/w1.block0", "params/w1.block1", "params/w1.block2", "params/w2"]
HASHED = [2, 0, 1, 1, 1]


def test_hash_name_goes_by_the_name_alone():
    assert [EPS.index(e) for e in HashName(EPS).dispatch(NAMES)] == HASHED
    assert [
        EPS.index(e)
        for e in HashName(EPS).dispatch([VarBlock("params/w1", i, 1) for i in range(3)])
    ] == HASHED[1:4]


def test_hash_name_places_a_name_alike_whatever_came_before():
    h = HashName(EPS)
    assert h.dispatch(NAMES[::-1]) == h.dispatch(NAMES)[::-1]


@pytest.mark.parametrize("seed", ["1", "271828"])
def test_hash_name_is_the_same_in_every_process(seed):
    code = (
        "from dtrans.parameter_server.dispatch import HashName; print(*HashName([0, 1, "
        f"2]).dispatch({NAMES}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(i) for i in HASHED]


def test_the_base_dispatcher_says_what_is_missing():
    class Mine(PSDispatcher):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine does not define dispatch\(varlist\)"):
        Mine(EPS).dispatch(["w"])


def test_a_dispatcher_of_ones_own_may_derive_from_any_other():
    """Paddle accepts only direct subclasses of PSDispatcher."""

    class LastFirst(RoundRobin):
        def dispatch(self, varlist):
            return [self.eps[-1 - self.eps.index(e)] for e in super().dispatch(varlist)]

    class LastFirstAgain(LastFirst):
        pass

    params = {"w": jnp.ones((6, 2))}
    plan = plan_of(
        lambda p, x: jnp.sum(p["w"]) * x,
        optax.sgd(0.1),
        params,
        jnp.ones(()),
        split_method=LastFirstAgain,
    )
    assert [b.endpoint for b in plan.placement.all_blocks] == list(EPS[::-1])


def test_dispatchers_see_the_names_of_blocks():
    seen = []

    class Spy(RoundRobin):
        def dispatch(self, varlist):
            seen.extend((v.name, v.shape) for v in varlist)
            return super().dispatch(varlist)

    params = {"b": jnp.ones(1), "w": jnp.ones((4, 2))}
    plan_of(
        lambda p, x: jnp.sum(p["w"]) * jnp.sum(p["b"]) * x,
        optax.sgd(0.1),
        params,
        jnp.ones(()),
        servers=2,
        split_method=Spy,
    )
    blocks = [("params/b", (1,)), ("params/w.block0", (2, 2)), ("params/w.block1", (2, 2))]
    assert seen == 2 * blocks  # called once, and again to compare the answers


def test_a_dispatcher_is_asked_twice_about_the_blocks_of_all_leaves():
    calls = []

    class Spy(PSDispatcher):
        def dispatch(self, varlist):
            calls.append(
                [(v.name, v.shape, v.dtype, v.size, v.nbytes, v.endpoint) for v in varlist]
            )
            return iter(self.eps[:1] * len(varlist))

    params = {"b": jnp.ones(3, jnp.bfloat16), "w": jnp.ones((4, 2))}
    loss = lambda p, x: (jnp.sum(p["w"]) * jnp.sum(p["b"]) * x).astype(x.dtype)
    plan = plan_of(loss, optax.sgd(0.1), params, jnp.ones(()), servers=2, split_method=Spy)
    seen = [
        ("params/b.block0", (2,), jnp.bfloat16, 2, 4, ""),
        ("params/b.block1", (1,), jnp.bfloat16, 1, 2, ""),
        ("params/w.block0", (2, 2), jnp.float32, 4, 16, ""),
        ("params/w.block1", (2, 2), jnp.float32, 4, 16, ""),
    ]
    assert calls == 2 * [seen]
    dispatched(plan.placement, Spy)
    assert calls == 4 * [seen]
    assert {b.endpoint for b in plan.placement.all_blocks} == {EPS[0]}


# -- by size ---------------------------------------------------------------------------------------


def weighing(*sizes):
    return [SimpleNamespace(name=f"v{i}", nbytes=n) for i, n in enumerate(sizes)]


@pytest.mark.parametrize(
    "sizes, where",
    [
        ((), []),
        ((5,), [0]),
        ((1, 2, 3, 4, 5, 6), [0, 1, 2, 2, 1, 0]),
        ((4, 4, 4, 4), [0, 1, 2, 0]),  # ties: in the order of blocks and of servers
        ((0, 0, 7, 0), [1, 1, 0, 1]),
        ((9, 1, 1, 1), [0, 1, 2, 1]),
    ],
)
def test_the_largest_goes_first_to_the_server_with_the_fewest_bytes(sizes, where):
    by_size = SizeBalanced(EPS)
    assert [EPS.index(e) for e in by_size.dispatch(weighing(*sizes))] == where
    assert by_size.loads == {
        ep: sum(s for s, i in zip(sizes, where, strict=True) if EPS[i] == ep) for ep in EPS
    }


def test_by_size_goes_on_with_what_servers_hold_until_reset():
    by_size = SizeBalanced(EPS)
    assert by_size.dispatch(weighing(9)) == [EPS[0]]
    assert by_size.dispatch(weighing(5, 5, 2)) == [EPS[1], EPS[2], EPS[1]]
    by_size.reset()
    assert set(by_size.loads.values()) == {0}
    assert by_size.dispatch(weighing(1)) == [EPS[0]]
    assert by_size.assign(3) == EPS[1] and by_size.assign(1, EPS[0]) == EPS[0]
    assert by_size.loads == {EPS[0]: 2, EPS[1]: 3, EPS[2]: 0}


def test_by_size_weighs_elements_where_there_are_no_bytes():
    assert SizeBalanced(EPS[:2]).dispatch([VarBlock("w", 0, 2), VarBlock("w", 1, 3)]) == [
        EPS[1],
        EPS[0],
    ]
    with pytest.raises(
        ConfigError,
        match="^dtrans.SizeBalanced got the block 'w.block0'; expected an object with an integer "
        "nbytes",
    ):
        SizeBalanced(EPS).dispatch(["w.block0"])


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_no_server_has_more_than_the_others_by_more_than_its_last_block(sizes, servers):
    by_size = SizeBalanced(EPS_6[:servers])
    assert by_size.dispatch(weighing(*sizes)) == SizeBalanced(EPS_6[:servers]).dispatch(
        weighing(*sizes)
    )
    held = by_size.loads
    assert sum(held.values()) == sum(sizes)
    # Graham: the largest load is at most 4/3 of the optimum, and the optimum is not below this
    # bound
    if len(sizes) <= servers:
        assert max(held.values()) == max(sizes, default=0)
    assert max(held.values()) - min(held.values()) <= max(sizes, default=0)


def by_size_plan(tx, method=SizeBalanced, servers=2, **options):
    params = {
        "a": jnp.ones((2, 3)),
        "b": jnp.ones((40, 3)),
        "c": jnp.ones((30, 3)),
        "d": jnp.ones((11, 3)),
    }
    loss = lambda p, x: sum(jnp.sum(v**2) for v in p.values()) * x
    return plan_of(loss, tx, params, jnp.ones(()), servers=servers, split_method=method, **options)


def test_by_size_in_a_plan_of_whole_leaves():
    plan = by_size_plan(optax.adam(0.1), slice_var_up=False)
    assert {b.leaf[-1]: EPS.index(b.endpoint) for b in plan.placement.all_blocks} == {
        "a": 0,
        "b": 0,
        "c": 1,
        "d": 1,
    }
    assert plan.balance < by_size_plan(optax.adam(0.1), RoundRobin, slice_var_up=False).balance


def test_by_size_in_a_plan_of_blocks():
    plan = by_size_plan(optax.sgd(0.1), servers=3)
    bytes_of = {
        ep: sum(b.nbytes for u in units for b in u.blocks)
        for ep, units in plan.placement.units.items()
    }
    assert sum(len(blocks) > 1 for blocks in plan.placement.blocks.values()) == 4
    assert max(bytes_of.values()) - min(bytes_of.values()) <= 12
    assert plan.balance < by_size_plan(optax.sgd(0.1), RoundRobin, servers=3).balance


MATRICES = optax.contrib.muon(0.1)


@pytest.mark.parametrize("heirs", [0, 1, 2])
def test_what_cannot_be_cut_is_weighed_first_and_blocks_fill_up(heirs):
    method = SizeBalanced
    for _ in range(heirs):
        method = type("Heir", (method,), {})
    tx = optax.multi_transform(
        {"whole": MATRICES, "cut": optax.sgd(0.1)},
        {"a": "cut", "b": "whole", "c": "cut", "d": "cut"},
    )
    plan = by_size_plan(tx, method)
    assert list(plan.placement.reasons_unsliced) == ["params/b"]
    assert plan.placement.blocks["params/b"][0].endpoint == EPS[0]
    assert {b.endpoint for b in plan.placement.blocks["params/c"]} == {EPS[1]}
    # without this rule, sliced leaves would be spread over all servers first, and unsliced leaves
    # would be added later
    assert {b.endpoint for b in by_size_plan(tx, RoundRobin).placement.blocks["params/c"]} == {
        EPS[0],
        EPS[1],
    }


def test_an_heir_of_by_size_sees_blocks_only():
    seen = []

    class Heir(SizeBalanced):
        def dispatch(self, varlist):
            seen.extend(v.leaf for v in varlist)
            return super().dispatch(varlist)

    tied = optax.multi_transform(
        {"whole": MATRICES, "cut": optax.sgd(0.1)},
        {"a": "cut", "b": "whole", "c": "cut", "d": "cut"},
    )
    by_size_plan(tied, Heir)
    assert set(seen) == {"params/a", "params/c", "params/d"}


# -- the seed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_the_seed_orders_whole_leaves_and_touches_no_global_state(seed):
    np.random.seed(5)
    random.seed(5)
    before = np.random.get_state()[1].tolist(), random.getstate()
    plan = by_size_plan(optax.sgd(0.1), RoundRobin, slice_var_up=False, seed=seed)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    np.random.seed(9)  # it is not read either
    assert (
        by_size_plan(optax.sgd(0.1), RoundRobin, slice_var_up=False, seed=seed).placement
        == plan.placement
    )
    order = [f"params/{n}" for n in "abcd"]
    np.random.RandomState(seed).shuffle(order)
    assert list(plan.placement.order) == order
    assert [plan.placement.blocks[n][0].endpoint for n in order] == [EPS[0], EPS[1]] * 2


def test_seeds_differ_where_nothing_is_cut_and_only_there():
    order = lambda seed, **options: (
        by_size_plan(optax.sgd(0.1), RoundRobin, seed=seed, **options).placement.order
    )
    assert len({order(seed, slice_var_up=False) for seed in range(4)}) > 1
    assert len({order(seed) for seed in range(4)}) == 1


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, None, "1", True])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(ConfigError) as caught:
        by_size_plan(optax.sgd(0.1), seed=seed)
    assert str(caught.value) == f"seed must be an integer from 0 to 2**32 - 1, it is {seed!r}"


def test_the_package_exports_them():
    assert dtrans.slice_variable is slice_variable and dtrans.HashName is HashName
    assert dtrans.SizeBalanced is SizeBalanced
