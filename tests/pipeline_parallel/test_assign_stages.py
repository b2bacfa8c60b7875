"""Test the assignment of equations to stages.

Covers: costs of equations; optimal divisions against brute force; repeated blocks; values that are
computed long before they are read; scopes of the user.
"""

from __future__ import annotations

import itertools
import math
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax

from dtrans._jax import Var, scope_of
from dtrans.errors import ConfigError
from dtrans.ir.cost import flops, flops_of, nbytes
from dtrans.ir.inline import inline_calls
from dtrans.pipeline_parallel.assign_stages import POLICIES, scoped_stages, stage_costs, stages_of
from dtrans.pipeline_parallel.balance import (
    SLACK,
    balanced,
    contiguous,
    part_of_each,
    partition_balance,
)
from dtrans.pipeline_parallel.repeated_blocks import repeated_blocks
from dtrans.step.scopes import replicate, split


def forward(fn, *args):
    """Return the forward pass of a function of arrays, with calls inlined.

    As in a pipeline, derivative rules stay.
    """
    return inline_calls(jax.make_jaxpr(fn)(*args), rules=True)


def primitives(jaxpr):
    return [e.primitive.name for e in jaxpr.jaxpr.eqns]


def check(jaxpr, stages, count):
    """Check that every stage has equations, and that no stage reads from a later one."""
    assert len(stages) == len(jaxpr.jaxpr.eqns) and set(stages) == set(range(count))
    made = {v: s for e, s in zip(jaxpr.jaxpr.eqns, stages, strict=True) for v in e.outvars}
    for e, s in zip(jaxpr.jaxpr.eqns, stages, strict=True):
        assert all(made.get(a, 0) <= s for a in e.invars if isinstance(a, Var))


def counts(stages, eqns, name):
    """Return the number of equations of a primitive in each stage."""
    return [
        sum(s == k and e.primitive.name == name for e, s in zip(eqns, stages, strict=True))
        for k in range(max(stages) + 1)
    ]


# -- what an equation costs ------------------------------------------------------------------------

A = jnp.ones((3, 4))
IMAGE, KERNEL = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 2, 6))
NHWC = ("NHWC", "HWIO", "NHWC")
loop = lambda n: lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 2, None), x, None, length=n)[0]

COSTS = {
    "dense": (lambda x, w: x @ w, (jnp.ones((10, 10)), jnp.ones((10, 16))), 3200),
    "bias": (lambda y, b: y + b, (jnp.ones((10, 16)), jnp.ones(16)), 160),
    "batched product": (
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        (jnp.ones((5, 2, 3)), jnp.ones((5, 3, 4))),
        240,
    ),
    "product, contracted twice": (lambda a, b: jnp.einsum("ij,ij->", a, b), (A, A), 24),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=2
        ),
        (IMAGE, KERNEL),
        2 * (2 * 8 * 8 * 6) * (3 * 3 * 2),
    ),
    "elementwise": (jnp.sin, (A,), 12),
    "layout": (
        lambda x: jnp.broadcast_to(x.T.reshape(2, 6)[None, :, ::2], (5, 2, 3)).astype(jnp.bfloat16),
        (A,),
        0,
    ),
    "sum": (lambda x: x.sum(), (A,), 12),
    "window": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID"),
        (jnp.ones(8),),
        4 * 2,
    ),
    "scatter": (
        lambda x: x.at[lax.iota(jnp.int32, 2)].add(1.0, mode="promise_in_bounds"),
        (jnp.ones(9),),
        None,
    ),
    "scan": (loop(5), (A,), 5 * 24),
    "nested scan": (
        lambda x: lax.scan(lambda c, _: (loop(5)(c), None), x, None, length=3)[0],
        (A,),
        15 * 24,
    ),
    "cond": (lambda x: lax.cond(True, jnp.sin, lambda x: jnp.sin(x) * jnp.cos(x), x), (A,), 36),
    "while": (
        lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x),
        (A,),
        12 + 12 + 1,
    ),
    "remat": (jax.checkpoint(lambda x: jnp.sin(x) * 2), (A,), 24),
    "jit": (jax.jit(lambda x: jnp.sin(x) * 2), (A,), 24),
    "custom_jvp": (jax.nn.relu, (A,), 12),
}


@pytest.mark.parametrize(("fn", "args", "want"), COSTS.values(), ids=COSTS)
def test_flops(fn, args, want):
    found = flops_of(jax.make_jaxpr(fn)(*args).jaxpr.eqns)
    if want is None:  # two updates, and the operations that wrap negative indices
        eqns = jax.make_jaxpr(fn)(*args).jaxpr.eqns
        assert flops(next(e for e in eqns if e.primitive.name == "scatter-add")) == 2
    else:
        assert found == want


def test_nbytes():
    assert [
        nbytes(jax.typeof(x)) for x in (A, A.astype(jnp.int8), jnp.float32(1), jax.random.key(0))
    ] == [48, 12, 4, 8]


# -- partitions ------------------------------------------------------------------------------------


def by_brute_force(costs, crossing, parts, speeds=None):
    """Return the best quality of all divisions of the equations into `parts` stages."""
    n = len(costs)
    best = (math.inf, math.inf, math.inf)
    for cuts in itertools.combinations(range(1, n), parts - 1):
        best = min(best, quality(costs, crossing, (0, *cuts), speeds))
    return best


def times(costs, starts, speeds=None):
    """Return the work of each part, divided by its speed."""
    work = [sum(costs[a:b]) for a, b in itertools.pairwise([*starts, len(costs)])]
    return [w / speed for w, speed in zip(work, speeds or [1] * len(work), strict=True)]


def quality(costs, crossing, starts, speeds=None):
    sent = [*(crossing[j] for j in starts[1:]), 0]
    work = times(costs, starts, speeds)
    return max(w + c for w, c in zip(work, sent, strict=True)), sum(sent), sum(w * w for w in work)


def speeds_of(parts):
    """Return a strategy for speeds whose quotients of small integers are exact, or None."""
    return st.none() | st.lists(st.sampled_from([1, 2, 4]), min_size=parts, max_size=parts)


@given(st.data())
def test_contiguous_is_optimal_in_all_three(data):
    n = data.draw(st.integers(1, 10))
    numbers = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    costs, crossing, parts = data.draw(numbers), data.draw(numbers), data.draw(st.integers(1, n))
    speeds = data.draw(speeds_of(parts))
    starts = contiguous(costs, crossing, parts, speeds)
    assert (
        starts[0] == 0
        and list(starts) == sorted(set(starts))
        and len(starts) == parts
        and starts[-1] < n
    )
    assert quality(costs, crossing, starts, speeds) == by_brute_force(
        costs, crossing, parts, speeds
    )


def test_contiguous_is_exact_for_numbers_that_are_not():
    rng = np.random.default_rng(0)
    for _ in range(30):
        costs, crossing = rng.random(9).tolist(), rng.random(9).tolist()
        slowest = quality(costs, crossing, contiguous(costs, crossing, 4))[0]
        assert slowest == pytest.approx(by_brute_force(costs, crossing, 4)[0], rel=1e-12)


def test_contiguous_takes_thousands_of_units():
    """An exponential search would not end."""
    rng = random.Random(0)
    costs, crossing = ([rng.randint(0, 10**12) for _ in range(3000)] for _ in range(2))
    assert len(contiguous(costs, crossing, 16)) == 16


SIZES = {
    "balance 2": (partition_balance, [1] * 46, 2, [23, 23]),
    "balance 3": (partition_balance, [1] * 46, 3, [16, 16, 14]),
    "balance, EPL has 3 parts": (partition_balance, [1] * 6, 4, [2, 2, 1, 1]),
    "balance, EPL has 2 parts": (partition_balance, [10, 1, 1, 1, 1, 1], 3, [1, 4, 1]),
    "balance of EPL's test": (partition_balance, [1] * 6, 3, [2, 2, 2]),
    "balance of 49": (partition_balance, [1] * 49, 2, [25, 24]),
    "balance of 49 in 3": (partition_balance, [1] * 49, 3, [17, 17, 15]),
    "balance of large numbers": (partition_balance, [10**15, 1, 10**15, 1], 2, [2, 2]),
    "exact, the evenest": (
        lambda w, n: contiguous(w, [0] * len(w), n),
        [4, 1, 1, 1, 1],
        3,
        [1, 2, 2],
    ),
    "exact 6": (lambda w, n: contiguous(w, [0] * len(w), n), [1] * 6, 4, [2, 2, 1, 1]),
}


@pytest.mark.parametrize(("rule", "weights", "parts", "want"), SIZES.values(), ids=SIZES)
def test_rules_by_their_golden_rows(rule, weights, parts, want):
    stage = part_of_each(rule(weights, parts), len(weights))
    sizes = [stage.count(k) for k in range(parts)]
    assert sorted(sizes) == sorted(want) if rule is not partition_balance else sizes == want


@given(st.data())
def test_balanced_is_optimal_in_all_four(data):
    n = data.draw(st.integers(1, 9))
    numbers = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    costs, crossing, parts = data.draw(numbers), data.draw(numbers), data.draw(st.integers(1, n))
    speeds = data.draw(speeds_of(parts))
    cuts = [(0, *inner) for inner in itertools.combinations(range(1, n), parts - 1)]
    works = {c: times(costs, c, speeds) for c in cuts}
    most = SLACK * min(max(w) for w in works.values())
    least = max(min(w) for w in works.values() if max(w) <= most) / 2
    key = lambda c: (
        sum(crossing[j] for j in c[1:]),
        -sum(costs[j] for j in c),
        sum(w * w for w in works[c]),
    )
    starts = balanced(costs, crossing, parts, speeds)
    assert max(works[starts]) <= most and min(works[starts]) >= least
    assert key(starts) == min(
        key(c) for c, w in works.items() if max(w) <= most and min(w) >= least
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.data())
def test_balance_never_loses_a_part(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    starts = partition_balance(weights, parts)
    assert (
        len(starts) == parts
        and list(starts) == sorted(set(starts))
        and starts[0] == 0
        and starts[-1] < len(weights)
    )


@pytest.mark.parametrize(
    "rule",
    [
        partition_balance,
        lambda w, n: contiguous(w, [0] * len(w), n),
        lambda w, n: balanced(w, [0] * len(w), n),
    ],
)
def test_impossible_partitions_are_refused(rule):
    with pytest.raises(ConfigError, match="parts is 3, but there are only 2 units"):
        rule([1, 1], 3)
    with pytest.raises(ConfigError, match="parts is 0"):
        rule([1, 1], 0)
    with pytest.raises(ConfigError, match="negative"):
        rule([1, -1], 1)


def test_crossing_is_checked():
    for rule in (contiguous, balanced):
        with pytest.raises(ConfigError, match="2 entries; expected one for each of the 3 units"):
            rule([1, 1, 1], [0, 0], 2)
    with pytest.raises(ConfigError, match="not finite"):
        contiguous([1, 1, 1], [0, math.nan, 0], 2)
    with pytest.raises(ConfigError, match="speeds has 1 entries; expected one for each of 2 parts"):
        balanced([1, 1, 1], [0, 0, 0], 2, [1])


# -- the optimum, by brute force -------------------------------------------------------------------


def random_program(rng, floating=False):
    """Return a random program of products, sums and layout changes, with skip connections.

    Each equation reads an earlier value. With `floating`, weights are cast and computed long before
    they are read.
    """
    sizes = [rng.choice([2, 3, 5, 8]) for _ in range(4)]
    weights = {(a, b): jnp.ones((a, b)) for a in sizes for b in sizes}
    steps = rng.randint(4, 9)
    plan = [(rng.random(), rng.random(), rng.random()) for _ in range(steps)]

    def fn(x, weights):
        values = [x @ weights[sizes[0], sizes[0]]]
        ready = (
            {
                k: w * 2 if n % 2 else w.astype(jnp.float16)
                for n, (k, w) in enumerate(weights.items())
            }
            if floating
            else weights
        )
        for kind, which, other in plan:
            a = values[max(0, len(values) - 1 - int(which * 3))]
            alike = [v for v in values if v.shape == a.shape]
            b = alike[int(other * len(alike))]
            if kind < 0.4:
                to = sizes[int(other * 4)]
                values.append(
                    (a @ ready[a.shape[1], to]).astype(jnp.float32)
                    if floating
                    else a @ ready[a.shape[1], to]
                )
            elif kind < 0.6:
                values.append(lax.add(a, b))
            elif kind < 0.8:
                values.append(lax.sin(a))
            else:
                values.append(a.T.reshape(a.shape))
        return values[-1], values[int(plan[0][0] * len(values))]

    return forward(fn, jnp.ones((2, sizes[0])), weights)


def slowest(jaxpr, stages, flops_per_byte):
    """Return the cost of the slowest stage, computed stage by stage and value by value."""
    eqns = jaxpr.jaxpr.eqns
    made = {v: s for e, s in zip(eqns, stages, strict=True) for v in e.outvars}
    cost = []
    for k in range(max(stages) + 1):
        read_later = {
            a
            for e, s in zip(eqns, stages, strict=True)
            if s > k
            for a in e.invars
            if isinstance(a, Var)
        }
        sent = sum(
            v.aval.size * v.aval.dtype.itemsize for v in read_later if made.get(v, k + 1) <= k
        )
        cost.append(
            sum(flops(e) for e, s in zip(eqns, stages, strict=True) if s == k)
            + flops_per_byte * sent
        )
    return max(cost)


def best_in_program_order(jaxpr, count, flops_per_byte):
    """Return the time of the slowest stage in the best division whose stages all have work."""
    eqns = jaxpr.jaxpr.eqns
    dear = [flops(e) > 0 for e in eqns]
    best = math.inf
    for cuts in itertools.combinations(range(1, len(eqns)), count - 1):
        stages = part_of_each((0, *cuts), len(eqns))
        if all(any(d for d, s in zip(dear, stages, strict=True) if s == k) for k in range(count)):
            best = min(best, slowest(jaxpr, stages, flops_per_byte))
    return best


@pytest.mark.parametrize("part", range(5))
def test_balance_flops_is_the_optimum_of_random_programs(part):
    differ = 0
    for seed in range(100 * part, 100 * (part + 1)):
        rng = random.Random(seed)
        jaxpr = random_program(rng)
        count = rng.randint(1, min(4, sum(flops(e) > 0 for e in jaxpr.jaxpr.eqns)))
        flops_per_byte = rng.choice([0.0, 0.25, 1.0, 10.0])
        stages = stages_of(jaxpr, count, policy="BALANCE_FLOPS", flops_per_byte=flops_per_byte)
        check(jaxpr, stages, count)
        assert slowest(jaxpr, stages, flops_per_byte) == best_in_program_order(
            jaxpr, count, flops_per_byte
        )
        costs = stage_costs(jaxpr, stages)
        assert max(c.flops + flops_per_byte * c.sends for c in costs) == slowest(
            jaxpr, stages, flops_per_byte
        )
        assert sum(c.equations for c in costs) == len(stages)
        differ += stages != stages_of(jaxpr, count, policy="BALANCE_FLOPS", flops_per_byte=0.0)
    assert differ > 5  # transfers have an effect


def test_what_stands_elsewhere_than_it_is_read_makes_no_stage_slower():
    better = 0
    for seed in range(60):
        rng = random.Random(seed)
        jaxpr = random_program(rng, floating=True)
        if len(jaxpr.jaxpr.eqns) > 26:
            continue
        stages = stages_of(jaxpr, 3, policy="BALANCE_FLOPS", flops_per_byte=1.0)
        check(jaxpr, stages, 3)
        found, in_order = slowest(jaxpr, stages, 1.0), best_in_program_order(jaxpr, 3, 1.0)
        assert found <= in_order
        better += found < in_order
    assert better > 5


# -- models ----------------------------------------------------------------------------------------


def mlp(widths, batch=32, act=jnp.tanh, cast=False):
    """Return a forward pass with one product for each layer.

    With `cast`, all weights are cast first.
    """

    def fn(params, x):
        if cast:
            params = [(w.astype(jnp.bfloat16), b.astype(jnp.bfloat16)) for w, b in params]
        for w, b in params:
            x = act(x @ w + b)
        return jnp.mean(x**2)

    params = [(jnp.ones((a, b)), jnp.ones(b)) for a, b in itertools.pairwise(widths)]
    return forward(fn, params, jnp.ones((batch, widths[0]), jnp.bfloat16 if cast else jnp.float32))


def work(jaxpr, stages):
    return [c.flops for c in stage_costs(jaxpr, stages)]


@pytest.mark.parametrize("policy", [None, "HEURISTIC", "BALANCE_FLOPS"])
@pytest.mark.parametrize("act", [jnp.tanh, jax.nn.relu])
@pytest.mark.parametrize("cast", [False, True])
def test_skewed_mlp(policy, act, cast):
    jaxpr = mlp([64] * 5 + [512] * 4, act=act, cast=cast)
    stages = stages_of(jaxpr, 2, policy=policy)
    check(jaxpr, stages, 2)
    flops = work(jaxpr, stages)
    assert max(flops) / (sum(flops) / 2) <= 1.26
    by_count = work(jaxpr, stages_of(jaxpr, 2, policy="BALANCE_OP_NUM"))
    assert max(by_count) / (sum(by_count) / 2) > 1.8


BLOCKS = [(12, 4), (12, 3), (12, 12), (8, 4), (8, 2), (6, 3), (4, 1)]


@pytest.mark.parametrize(("layers", "count"), BLOCKS)
@pytest.mark.parametrize("policy", [None, "REPEATED_LAYERS"])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("cast", [False, True])
def test_equal_blocks_are_shared_out_whole(layers, count, policy, width, cast):
    jaxpr = mlp([width] * (layers + 1), cast=cast)
    stages = stages_of(jaxpr, count, policy=policy)
    check(jaxpr, stages, count)
    eqns = jaxpr.jaxpr.eqns
    for name in ("dot_general", "add", "tanh"):
        assert counts(stages, eqns, name) == [layers // count] * count
    # a stage sends one activation, at the end of a block
    assert [c.sends for c in stage_costs(jaxpr, stages)] == [32 * width * (2 if cast else 4)] * (
        count - 1
    ) + [0]


@pytest.mark.parametrize("policy", [None, *(p for p in POLICIES if p != "REPEATED_LAYERS")])
def test_six_equal_units_in_four_stages(policy):
    jaxpr = mlp([64] * 7)
    stages = stages_of(jaxpr, 4, policy=policy)
    check(jaxpr, stages, 4)
    assert all(work(jaxpr, stages))
    by_unit = forward(lambda x: [x := jnp.sin(x) for _ in range(6)][-1], A)
    check(by_unit, stages_of(by_unit, 4, policy=policy), 4)


@pytest.mark.parametrize("width", [8, 64, 512])
def test_six_equal_layers_in_four_stages_are_two_or_one_each(width):
    """The mean at the end sends a number of 4 bytes, but is not a separate stage."""
    jaxpr = mlp([width] * 7)
    stages = stages_of(jaxpr, 4)
    check(jaxpr, stages, 4)
    for name in ("dot_general", "tanh"):
        assert sorted(counts(stages, jaxpr.jaxpr.eqns, name)) == [1, 1, 2, 2]


@pytest.mark.parametrize("act", [jnp.tanh, jax.nn.relu])
@pytest.mark.parametrize("widths", [[784, 256, 10], [256, 256, 1], [784, 256, 64, 10]])
def test_layers_that_shrink_are_a_stage_each(widths, act):
    """In a network for digits, sending the first activations takes longer than all later
    equations."""
    jaxpr = mlp(widths, act=act)
    stages = stages_of(jaxpr, len(widths) - 1)
    check(jaxpr, stages, len(widths) - 1)
    assert counts(stages, jaxpr.jaxpr.eqns, "dot_general") == [1] * (len(widths) - 1)


def test_bytes_move_a_cut_within_the_slack_alone():
    """Divide the model at a small value near the middle, not at a smaller value at the end."""

    def fn(x, small, narrow, wide):
        for _ in range(8):
            x = jnp.tanh(x @ wide)
        x = jnp.tanh(jnp.tanh(x @ narrow) @ narrow.T)
        for _ in range(8):
            x = jnp.tanh(x @ wide)
        return jnp.tanh(x @ small)

    w = lambda *shape: jnp.ones(shape)
    jaxpr = forward(fn, w(32, 64), w(64, 1), w(64, 16), w(64, 64))
    stages = stages_of(jaxpr, 2)
    assert [c.sends for c in stage_costs(jaxpr, stages)] == [32 * 16 * 4, 0]
    assert min(work(jaxpr, stages)) > 0.8 * max(work(jaxpr, stages))


def test_a_heavy_head_gets_fewer_blocks_beside_it():
    def fn(w, head, x):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return jnp.sum(x @ head)

    jaxpr = forward(fn, jnp.ones((64, 64)), jnp.ones((64, 192)), jnp.ones((32, 64)))
    stages = stages_of(jaxpr, 4)
    assert (
        counts(stages, jaxpr.jaxpr.eqns, "tanh") == [4, 4, 4, 0]
        or counts(stages, jaxpr.jaxpr.eqns, "tanh")[3] < 3
    )
    even = stages_of(jaxpr, 4, policy="REPEATED_LAYERS")
    assert counts(even, jaxpr.jaxpr.eqns, "tanh") == [3] * 4
    assert max(work(jaxpr, stages)) < max(work(jaxpr, even))


def best_blocks(jaxpr):
    eqns = jaxpr.jaxpr.eqns
    return repeated_blocks(eqns, [flops(e) for e in eqns], [0.0] * len(eqns))[0]


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(self.width)(nn.LayerNorm()(x))
        return nn.Dense(x.shape[-1])(nn.relu(h)) + x


class Model(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="stem")(x)
        for width in self.widths:
            x = Block(width)(x)
        return nn.Dense(10, name="head")(x).sum()


def flax_model(widths):
    model, x = Model(widths), jnp.ones((8, 20))
    return forward(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)


@pytest.mark.parametrize(
    "widths", [(32,) * 8, (32, 33, 31, 34, 32, 30, 31, 33)], ids=["equal", "nearly equal"]
)
def test_name_scopes_are_blocks(widths):
    jaxpr = flax_model(widths)
    eqns = jaxpr.jaxpr.eqns
    best = best_blocks(jaxpr)
    assert best.how == "name scopes" and len(best) == 8
    stages = stages_of(jaxpr, 4, policy="REPEATED_LAYERS")
    by_block: dict[str, set[int]] = {}
    for e, s in zip(eqns, stages, strict=True):
        by_block.setdefault("/".join(scope_of(e).split("/")[1:2]), set()).add(s)
    assert by_block.pop("stem") == {0} and by_block.pop("head") == by_block.pop("") == {3}
    assert by_block == {f"Block_{k}": {k // 2} for k in range(8)}


def test_a_loop_that_was_unrolled_is_made_of_blocks():
    def fn(ws, x):
        for k in range(6):
            x, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws[k : k + 1])
        return x.sum()

    jaxpr = forward(fn, jnp.ones((6, 32, 32)), jnp.ones((8, 32)))
    stages = stages_of(jaxpr, 3, policy="REPEATED_LAYERS")
    assert counts(stages, jaxpr.jaxpr.eqns, "scan") == [2, 2, 2]


def test_rematerialised_blocks_and_branches_are_compared_by_what_they_do():
    def fn(w, x, other):
        for k in range(6):
            f = jnp.sin if other and k == 5 else jnp.tanh
            x = jax.checkpoint(lambda x, f=f: f(x @ w))(x)
        return x.sum()

    w, x = jnp.ones((32, 32)), jnp.ones((8, 32))
    same, differ = (
        forward(lambda w, x: fn(w, x, False), w, x),
        forward(lambda w, x: fn(w, x, True), w, x),
    )
    assert (len(best_blocks(same)), len(best_blocks(differ))) == (6, 5)


@jax.custom_vjp
def own_rule(x):
    return jnp.sin(x)


own_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@pytest.mark.parametrize(
    "act", [jax.nn.relu, jax.nn.silu, own_rule, jax.jit(own_rule), jax.checkpoint(own_rule)]
)
def test_functions_with_rules_of_their_own_repeat(act):
    jaxpr = mlp([64] * 9, act=lambda x: act(jnp.tanh(x)))
    assert len(best_blocks(jaxpr)) == 8
    stages = stages_of(jaxpr, 4, policy="REPEATED_LAYERS")
    assert stages == stages_of(jaxpr, 4)
    assert len(set(work(jaxpr, stages)[:3])) == 1


def test_blocks_that_do_not_fit():
    jaxpr = mlp([64] * 7)
    with pytest.raises(ConfigError, match=r"multiple of num_stages=4, but the model repeats 6"):
        stages_of(jaxpr, 4, policy="REPEATED_LAYERS")
    none = forward(lambda x: jnp.exp(jnp.cos(jnp.sin(x))), A)
    with pytest.raises(ConfigError, match="no repeated equations or scopes"):
        stages_of(none, 2, policy="REPEATED_LAYERS")
    # 4 stages of complete blocks would be much slower than other divisions of 6 blocks of three
    # products
    jaxpr = mlp([64] * 7, act=lambda x: jnp.tanh(x @ jnp.ones((64, 64)) @ jnp.ones((64, 64))))
    assert len(best_blocks(jaxpr)) == 6
    stages = stages_of(jaxpr, 4)
    assert sorted(counts(stages, jaxpr.jaxpr.eqns, "dot_general")) == [4, 4, 5, 5]
    assert max(work(jaxpr, stages)) <= SLACK * max(
        work(jaxpr, stages_of(jaxpr, 4, policy="BALANCE_FLOPS"))
    )
    # with 31 blocks, they are not
    jaxpr = mlp([64] * 32)
    stages = stages_of(jaxpr, 4)
    assert sorted(counts(stages, jaxpr.jaxpr.eqns, "dot_general")) == [7, 8, 8, 8]
    assert counts(stages, jaxpr.jaxpr.eqns, "dot_general") == counts(
        stages, jaxpr.jaxpr.eqns, "tanh"
    )


# -- what is made before it is read ----------------------------------------------------------------


def test_casts_and_masks_go_where_they_are_read():
    def fn(params, x):
        mask = jnp.tril(jnp.ones((32, 32)))
        doubled = [w.astype(jnp.bfloat16) for w in params]
        for w in doubled:
            x = jnp.tanh(x @ w)
        return jnp.sum(mask * (x @ x.T))

    jaxpr = forward(fn, [jnp.ones((64, 64))] * 4, jnp.ones((32, 64), jnp.bfloat16))
    stages = stages_of(jaxpr, 4)
    check(jaxpr, stages, 4)
    eqns = jaxpr.jaxpr.eqns
    casts = [
        s for e, s in zip(eqns, stages, strict=True) if e.primitive.name == "convert_element_type"
    ]
    assert casts[:4] == [0, 1, 2, 3]
    assert {
        s
        for e, s in zip(eqns, stages, strict=True)
        if e.primitive.name in ("iota", "ge", "select_n")
    } == {3}
    assert [c.sends for c in stage_costs(jaxpr, stages)] == [32 * 64 * 2] * 3 + [0]


def test_weights_that_are_computed_at_the_top_go_where_they_are_read():
    def fn(params, x):
        ready = [jnp.round(w * 127) / 127 for w in params]
        for w in ready:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    jaxpr = forward(fn, [jnp.ones((64, 64))] * 4, jnp.ones((32, 64)))
    stages = stages_of(jaxpr, 4)
    check(jaxpr, stages, 4)
    assert counts(stages, jaxpr.jaxpr.eqns, "round") == [1, 1, 1, 1]
    assert [c.sends for c in stage_costs(jaxpr, stages)] == [32 * 64 * 4] * 3 + [0]


def test_what_depends_on_no_micro_batch_crosses_for_free():
    def fn(w, x):
        # computed in each stage that reads it, because it depends on no micro-batch
        w = jnp.tanh(w @ w)
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    jaxpr = forward(fn, jnp.ones((64, 64)), jnp.ones((32, 64)))
    batch = [jaxpr.jaxpr.invars[1]]
    stages = stages_of(jaxpr, 2, batch=batch)
    one, all_inputs = (
        stage_costs(jaxpr, stages, batch)[0].sends,
        stage_costs(jaxpr, stages)[0].sends,
    )
    assert (one, all_inputs) == (32 * 64 * 4, 32 * 64 * 4 + 64 * 64 * 4)


def test_a_cut_does_not_avoid_what_crosses_for_free():
    def fn(w, x):
        made = jnp.tanh(w)  # large, and read by three of the four layers
        for k in range(4):
            x = jnp.tanh(x @ (made if k < 3 else w))
        return x

    jaxpr = forward(fn, jnp.ones((64, 64)), jnp.ones((8, 64)))
    eqns, batch = jaxpr.jaxpr.eqns, jaxpr.jaxpr.invars[1:]
    free, not_free = (
        stages_of(jaxpr, 2, policy="BALANCE_FLOPS", batch=batch),
        stages_of(jaxpr, 2, policy="BALANCE_FLOPS"),
    )
    assert counts(free, eqns, "dot_general") == [2, 2] and counts(
        not_free, eqns, "dot_general"
    ) == [3, 1]


def test_blocks_begin_where_the_first_layer_differs_and_have_equal_types():
    jaxpr = mlp([20, *[64] * 6, 10])
    blocks = best_blocks(jaxpr)
    assert len(blocks) == 5 and {primitives(jaxpr)[i] for i in blocks.starts} == {"dot_general"}
    assert len(best_blocks(mlp([64, 64, 64, 64, 32, 32]))) == 3


def test_skip_connections_are_counted_at_every_boundary():
    def fn(x):
        kept = jnp.sin(x)
        y = kept
        for _ in range(4):
            y = jnp.cos(y)
        return kept * y, kept

    jaxpr = forward(fn, A)
    costs = stage_costs(jaxpr, (0, 0, 1, 1, 2, 2))
    assert [c.sends for c in costs] == [48 * 2, 48 * 2, 0]
    # a result is not forwarded if no later stage reads it
    assert [
        c.sends for c in stage_costs(forward(lambda x: (jnp.sin(x), jnp.cos(x)), A), (0, 1))
    ] == [0, 0]


# -- errors and edges ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_stages_as_equations(policy, count):
    jaxpr = forward(lambda x: [x := jnp.sin(x) for _ in range(count)][-1], A)
    if policy == "REPEATED_LAYERS" and count == 1:
        with pytest.raises(ConfigError, match="repeat"):
            stages_of(jaxpr, count, policy=policy)
    else:
        assert stages_of(jaxpr, count, policy=policy) == tuple(range(count))
    with pytest.raises(ConfigError, match=f"num_stages is {count + 1}, .* only {count} equations"):
        stages_of(jaxpr, count + 1, policy=policy)


def test_stages_of_equations_that_cost_nothing():
    jaxpr = forward(lambda x: jnp.sin(x.reshape(12)).reshape(2, 6).T, A)
    assert len(jaxpr.jaxpr.eqns) == 4
    for count in (2, 3, 4):
        check(jaxpr, stages_of(jaxpr, count), count)
    # each stage gets such an equation, if there are enough
    jaxpr = forward(lambda x: jnp.cos(jnp.sin(x).T.reshape(2, 6).T), A)
    assert all(work(jaxpr, stages_of(jaxpr, 2, flops_per_byte=1e6)))


def test_wrong_options_are_named():
    jaxpr = mlp([4, 4])
    with pytest.raises(ConfigError, match="policy is 'BALANCE'; expected one of HEURISTIC"):
        stages_of(jaxpr, 1, policy="BALANCE")
    with pytest.raises(ConfigError, match="num_stages is 0; expected 1 or more"):
        stages_of(jaxpr, 0)
    with pytest.raises(ConfigError, match="flops_per_byte is -1; expected 0 or more"):
        stages_of(jaxpr, 1, flops_per_byte=-1)


# -- scopes ----------------------------------------------------------------------------------------


def test_scopes_are_the_stages():
    def fn(w, unused, x):
        scaled = w * 2  # its first reader is in the second scope
        x = x + 1  # before all scopes; its reader is in the first scope
        with replicate(name="a"):
            x = jnp.tanh(x @ w)
        x = jnp.sin(x)  # belongs to the scope before it
        late = jnp.cos(unused)  # reads only inputs, and is read after all scopes
        with replicate(name="b"):
            x = jnp.exp(x @ scaled)
        with split(name="head"):
            x = jnp.log(x)
        return jnp.sum(x) + jnp.sum(late)

    jaxpr = forward(fn, jnp.ones((4, 4)), jnp.ones(3), A)
    want = [1, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert primitives(jaxpr)[5] == "cos"
    stages = scoped_stages(jaxpr)
    check(jaxpr, stages, 3)
    by_name = dict(zip(primitives(jaxpr), stages, strict=True))
    assert (by_name["mul"], by_name["tanh"], by_name["sin"], by_name["exp"], by_name["log"]) == (
        1,
        0,
        0,
        1,
        2,
    )
    assert [s for k, s in enumerate(stages) if k != 5] == [s for k, s in enumerate(want) if k != 5]
    assert stages == stages_of(jaxpr, 3)
    with pytest.raises(ConfigError, match="num_stages is 2, but the model has 3 scopes"):
        stages_of(jaxpr, 2)
    with pytest.raises(ConfigError, match="policy is 'BALANCE_FLOPS', but the 3 scopes"):
        stages_of(jaxpr, 3, policy="BALANCE_FLOPS")


def test_entries_of_one_name_are_one_stage_and_a_loop_makes_several():
    def fn(x, again):
        for k in range(4):
            with replicate(name=f"stage{k // 2}" if again else None):
                x = jnp.sin(x) * 2
        return x

    jaxpr = forward(lambda x: fn(x, True), A)
    assert scoped_stages(jaxpr) == (0, 0, 0, 0, 1, 1, 1, 1)
    jaxpr = forward(lambda x: fn(x, False), A)
    assert scoped_stages(jaxpr) == stages_of(jaxpr, 4) == (0, 0, 1, 1, 2, 2, 3, 3)


def test_scopes_of_splits_alone_are_no_stages():
    def fn(x):
        with split():
            return jnp.sin(x) * 2

    jaxpr = forward(fn, A)
    assert scoped_stages(jaxpr) is None and stages_of(jaxpr, 2) == (0, 1)
    assert scoped_stages(forward(jnp.sin, A)) is None


@pytest.mark.parametrize("direct", [True, False])
def test_scopes_that_contradict_what_depends_on_what(direct):
    def fn(x):
        with replicate(name="a"):
            x = jnp.sin(x)
        with replicate(name="b"):
            x = jnp.cos(x)
        if not direct:
            x = x * 2
        with replicate(name="a"):
            return jnp.tanh(x)

    with pytest.raises(
        ConfigError, match=r"tanh in replicate\(name='a'\) reads a value of replicate\(name='b'\)"
    ):
        stages_of(forward(fn, A), 2)


@given(st.integers(0, 10**6))
def test_random_scopes_give_stages_in_order(seed):
    rng = random.Random(seed)
    plan = [
        (rng.random() < 0.4, rng.random(), rng.random(), rng.random())
        for _ in range(rng.randint(2, 12))
    ]

    def fn(x, y):
        values = [x, y]
        for scoped, kind, a, b in plan:
            read = [values[int(a * len(values))], values[int(b * len(values))]]
            op = lambda read=read, kind=kind: read[0] + read[1] if kind < 0.5 else jnp.sin(read[0])
            if scoped:
                with replicate():
                    values.append(op())
            else:
                values.append(op())
        return values

    jaxpr = forward(fn, A, A)
    count = sum(scoped for scoped, *_ in plan)
    stages = scoped_stages(jaxpr)
    if not count:
        assert stages is None
    else:
        check(jaxpr, stages, count)
        inside = [s for s, (scoped, *_) in zip(stages, plan, strict=True) if scoped]
        assert inside == list(range(count))
