"""The structure of sharding plans: the collectives and their places, moved and stored bytes, and
errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_loss, mlp_params
from sharding_models import MODELS, numbers, plan_of, stacked_loss, stacked_params

import dtrans
from dtrans._jax import Var, equations, facts_of, is_rearrangement, jaxprs_in_params, opened
from dtrans.errors import BatchError, ConfigError, GradientError, StateError, TraceError
from dtrans.ir.display import without_addresses
from dtrans.run.base.platforms import resolve_for_platform
from dtrans.zero.live_ranges import MAX_GATHERS_BETWEEN


ADAM = optax.adam(1e-2)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


# -- a model whose leaves are read in both directions, with rows for eight ranks -------------------

ROUND = (8, 16, 24, 8)


def round_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {f"w{i}": (ROUND[i], ROUND[i + 1]) for i in range(3)}
    return {n: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for n, s in shapes.items()} | {
        "scale": jnp.ones(())
    }


def round_loss(p: Any, x: jax.Array) -> jax.Array:
    h = x * p["scale"]  # its gradient depends on the gradient of the first layer's input
    for i in range(3):
        h = jnp.tanh(h @ p[f"w{i}"])
    return jnp.mean(h**2)


X = jnp.ones((16, 8))
COUNT = sum(ROUND[i] * ROUND[i + 1] for i in range(3))  # number of elements in sliced leaves
PSI = 4 * COUNT


def round_plan(tx: Any = ADAM, **options: Any) -> Any:
    return plan_of(round_loss, tx, round_params(), X, **options)


def uneven_plan(**options: Any) -> Any:
    m = MODELS["uneven"]
    return plan_of(
        m.loss, m.around(ADAM), m.params(jnp.float32), *m.batch(0, jnp.float32), **options
    )


# -- looking at programs ---------------------------------------------------------------------------


def of_type(plan: Any, name: str) -> list[tuple[int, Any]]:
    """Return the top-level equations of a primitive, with their positions."""
    return [(i, e) for i, e in enumerate(plan.program.jaxpr.jaxpr.eqns) if e.primitive.name == name]


def shapes_in(jaxpr: Any) -> set[tuple[int, ...]]:
    """Return the shapes of all values of a jaxpr, also in bodies."""
    found = set()
    for eqn in opened(jaxpr).eqns:
        found |= {v.aval.shape for v in eqn.outvars}
        for body in jaxprs_in_params(eqn.params):
            found |= {v.aval.shape for v in opened(body).invars} | shapes_in(body)
    return found


def whole_names(plan: Any, kind: str) -> list[str]:
    """Return the leaves of the top-level gathers, in order."""
    label = plan.program.labels
    return [label[v].removesuffix(".gathered") for _, e in of_type(plan, kind) for v in e.outvars]


def readers(jaxpr: Any, roles: Sequence[str], var: Var) -> set[str]:
    """Return the directions (forward, backward) in which the value, or a cheap function of it
    alone, is read."""
    inner, known, found = opened(jaxpr), {var}, set()
    for eqn, role in zip(inner.eqns, roles, strict=True):
        ins = [a for a in eqn.invars if isinstance(a, Var)]
        if not any(a in known for a in ins):
            continue
        is_cheap = facts_of(eqn).elementwise or is_rearrangement(eqn)
        if is_cheap and all(a in known for a in ins):
            known.update(eqn.outvars)
        else:
            found.add(role)
    return found


# -- where collectives stand -----------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [0, 32])
def test_stage_1_scatters_behind_the_backward_pass(fuse: float) -> None:
    plan = round_plan(stage=1, degree=4, bucket_MB=fuse)
    last = max(i for i, role in enumerate(plan.program.roles) if role in ("forward", "backward"))
    first = min(i for i, role in enumerate(plan.program.roles) if role == "optimize")
    scatters = [i for i, _ in of_type(plan, "reduce_scatter")]
    assert len(scatters) == (3 if fuse == 0 else 1)
    assert all(last < i < first for i in scatters)
    gathers = [i for i, _ in of_type(plan, "all_gather")]
    assert len(gathers) == len(scatters) and min(gathers) > first


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model", ["uneven", "transformer"])
@pytest.mark.parametrize("fuse", [0, 1e-3, 32])
def test_stages_2_and_3_scatter_right_after_the_last_gradient_of_a_bucket(
    fuse: float, model: str, stage: int
) -> None:
    m = MODELS[model]
    plan = plan_of(
        m.loss, m.around(ADAM), m.params(jnp.float32), *m.batch(0, jnp.float32), stage=stage,
        degree=4,
        bucket_MB=fuse,
    )  # fmt: skip
    inner, roles = plan.program.jaxpr.jaxpr, plan.program.roles
    made = {v: i for i, e in enumerate(inner.eqns) for v in e.outvars}
    scatters = of_type(plan, "reduce_scatter")
    assert len(scatters) == sum(b.leaves[0] in plan.slices.leaves for b in plan.buckets)
    for i, e in scatters:
        grads = []
        for a in e.invars:
            while roles[made[a]] == "dist":  # padding
                a = inner.eqns[made[a]].invars[0]
            grads.append(made[a])
        between = inner.eqns[max(grads) + 1 : i]
        assert set(roles[max(grads) + 1 : i]) <= {"dist"}, between
        assert all(x.primitive.name not in COLLECTIVES for x in between)


@pytest.mark.parametrize("model", ["uneven", "transformer"])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_what_stage_3_gathers_is_read_in_one_direction(model: str, prefetch: int) -> None:
    m = MODELS[model]
    plan = plan_of(
        m.loss,
        m.around(ADAM),
        m.params(jnp.float32),
        *m.batch(0, jnp.float32),
        stage=3,
        degree=4,
        prefetch=prefetch,
    )
    gathers = of_type(plan, "all_gather")
    for _, e in gathers:
        for v in e.outvars:
            assert readers(plan.program.jaxpr, plan.program.roles, v) in ({"forward"}, {"backward"})
    counts = {n: whole_names(plan, "all_gather").count(n) for n in plan.slices.leaves}
    if model == "uneven":
        assert counts.pop("params/unread") == 0
        assert counts.pop("params/w1") == counts.pop("params/b1") == counts.pop("params/b2") == 1
    else:
        # looked up, multiplied, and read again in the backward pass
        assert counts.pop("params/embedding") == 3
        assert [counts.pop(f"params/{i}_up_bias") for i in range(2)] == [1, 1]
    assert set(counts.values()) == {2}
    assert not any(v in opened(plan.program.jaxpr).outvars for _, e in gathers for v in e.outvars)


def test_stage_3_gathers_before_the_first_reader_and_not_long_before() -> None:
    """Without prefetch, no other gather is between a gather and the first reader of its value."""
    plan = round_plan(stage=3, degree=4, prefetch=0, overlap=False)
    eqns = plan.program.jaxpr.jaxpr.eqns
    for i, e in of_type(plan, "all_gather"):
        reader = next(k for k, x in enumerate(eqns) if any(a is e.outvars[0] for a in x.invars))
        assert [x.primitive.name for x in eqns[i:reader]].count("all_gather") == 1
    names = whole_names(plan, "all_gather")
    assert names == [f"params/w{i}" for i in (0, 1, 2, 2, 1, 0)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_gather_waits_for_what_is_computed_so_many_windows_before(prefetch: int) -> None:
    plan = round_plan(stage=3, degree=4, prefetch=prefetch)
    inner = plan.program.jaxpr.jaxpr
    dots = [i for i, e in enumerate(inner.eqns) if e.primitive.name == "dot_general"]
    gathers = of_type(plan, "all_gather")
    assert len(gathers) == 6 and len(of_type(plan, "after")) == 6
    # number of products before each gather
    before = [sum(d < i for d in dots) for i, _ in gathers]
    reader = lambda v: next(k for k, x in enumerate(inner.eqns) if any(a is v for a in x.invars))
    first = [sum(d < reader(e.outvars[0]) for d in dots) for _, e in gathers]
    behind = [b - a for a, b in zip(before, first, strict=True)]
    assert (max(behind) > 0) == (prefetch > 0)
    assert before == sorted(before)


@pytest.mark.parametrize("others", [MAX_GATHERS_BETWEEN, MAX_GATHERS_BETWEEN + 1])
def test_a_leaf_that_is_read_again_much_later_is_gathered_again(others: int) -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p["tied"]
        for i in range(others):
            h = jnp.tanh(h @ p[f"w{i}"])
        return jnp.mean((h @ p["tied"].T) ** 2)

    params = {"tied": jnp.ones((8, 4)), **{f"w{i}": jnp.ones((4, 4)) for i in range(others)}}
    plan = plan_of(loss, ADAM, params, X, stage=3, degree=4)
    assert whole_names(plan, "all_gather").count("params/tied") == (
        2 if others == MAX_GATHERS_BETWEEN else 3
    )


def test_a_value_that_all_ranks_have_is_computed_as_slices() -> None:
    const = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        prior = jnp.cumsum(jnp.tanh(const * p["t"]), axis=1)
        return jnp.mean((x @ p["w"]) ** 2) + jnp.sum((p["w"] - prior) ** 2)

    params = {"w": jnp.ones((16, 8)), "t": jnp.ones(())}
    plan = plan_of(loss, ADAM, params, jnp.ones((8, 16)), degree=4, stage=3)
    for name in ("tanh", "cumsum"):
        assert (4, 8) in {e.outvars[0].aval.shape for _, e in of_type(plan, name)}, name


def test_without_overlap_collectives_are_one_chain() -> None:
    for stage in (1, 2):
        plan = round_plan(stage=stage, degree=4, overlap=False, bucket_MB=0)
        inner = plan.program.jaxpr.jaxpr
        made = {v: e for e in inner.eqns for v in e.outvars}
        for kind in ("reduce_scatter", "all_gather"):
            found = [e for _, e in of_type(plan, kind)]
            assert len(found) == 3
            for e in found[1:]:
                assert made[e.invars[0]].primitive.name == "optimization_barrier"
    assert not of_type(round_plan(stage=2, degree=4, bucket_MB=0), "optimization_barrier")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_compiled_gathers_again_for_the_backward_pass(prefetch: int) -> None:
    """XLA must not merge two gathers of one leaf, since the leaf would stay in memory in
    between."""
    plan = round_plan(stage=3, degree=4, prefetch=prefetch)
    job = plan.on_mesh(donate=False)
    text = job.lower(job.init(round_params()), X).compile().as_text()
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 6


def test_what_micro_steps_have_scattered_is_not_sent_again() -> None:
    plan = round_plan(stage=2, degree=4, num_micro_batch=2, compress="bf16")
    small = [
        e
        for e in plan.program.jaxpr.jaxpr.eqns
        if any(v.aval.dtype == jnp.bfloat16 for v in e.outvars)
    ]
    assert all(not v.aval.ndim for e in small for v in e.outvars), (
        "only the scale is whole, and sent"
    )
    assert not of_type(plan, "reduce_scatter")
    (loop,) = [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    scattered = [e for e in equations(loop.params["jaxpr"]) if e.primitive.name == "reduce_scatter"]
    assert {a.aval.dtype for e in scattered for a in e.invars} == {jnp.dtype(jnp.bfloat16)}


# -- loops over layers -----------------------------------------------------------------------------

DEEP, WIDE = 12, 5


def deep_plan(layer: Any = None, degree: int = 2, **options: Any) -> Any:
    loss = stacked_loss if layer is None else lambda p, x, y: stacked_loss(p, x, y, layer)
    return plan_of(
        loss,
        ADAM,
        stacked_params(jnp.float32, DEEP, WIDE),
        *numbers(0, jnp.float32),
        stage=3,
        degree=degree,
        **options,
    )


def plain_layer(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ layer["kernel"] + layer["bias"]), None


def half_layer(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    return plain_layer(h, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), layer))


def transposed_layer(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ layer["kernel"].T + layer["bias"]), None


LAYERS = {
    "plain": plain_layer,
    "checkpoint": jax.checkpoint(plain_layer),
    "cast": half_layer,
    "cast, checkpoint": jax.checkpoint(half_layer),
    "transposed": transposed_layer,
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"bucket_MB": 0}, {"prefetch": 0}])
@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_gathers_a_layer_at_a_time_and_nothing_makes_the_stack(
    name: str, options: Any
) -> None:
    plan = deep_plan(LAYERS[name], **options)
    assert plan.slices.leaves["params/kernel"].axis == 1
    padded = 6
    forbidden = {
        (DEEP, WIDE, WIDE),
        (DEEP, padded, WIDE),
        (DEEP, WIDE, padded),
        (DEEP, WIDE),
        (DEEP, padded),
    }
    assert not shapes_in(plan.program.jaxpr) & forbidden
    assert set(whole_names(plan, "all_gather")) == {"params/first", "params/last"}
    assert all(v.aval.ndim < 3 for _, e in of_type(plan, "reduce_scatter") for v in e.outvars)
    # each layer is gathered once in each direction, and its gradient is scattered, in loops
    kernel, bias, ends = (
        4 * DEEP * padded * WIDE,
        4 * DEEP * padded,
        4 * (padded * WIDE + padded * 3),
    )
    # recomputed values are read again; otherwise no equation reads a bias in backward
    again = bias if "checkpoint" in name else 0
    moved = plan.traffic()
    forward, backward = kernel + bias, kernel + again
    if (
        "cast" in name
    ):  # a cast directly after a gather moves before it; bodies of a checkpoint are not changed
        forward, backward = forward // 2, backward // (1 if "checkpoint" in name else 2)
    assert moved["all_gather", "shard"] == forward + backward + ends + 4 * padded * 3
    assert moved["reduce_scatter", "shard"] == kernel + bias + ends


def test_a_loop_whose_stack_is_cast_before_makes_no_whole_stack_of_weights() -> None:
    m = MODELS["scan, cast before"]
    plan = plan_of(m.loss, ADAM, m.params(jnp.float32), *m.batch(0, jnp.float32), stage=3, degree=2)
    for e in plan.program.jaxpr.jaxpr.eqns:
        if e.primitive.name == "all_gather":
            assert all(v.aval.ndim < 3 for v in e.outvars)


# -- bytes that ranks hold -------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_hold_what_zero_says(stage: int, degree: int) -> None:
    """For a model of n elements in fp32 with Adam: 4n and 8n/N bytes; in stage 3, 12n/N bytes."""
    plan = round_plan(stage=stage, degree=degree)
    scale, count = 4, 4  # one number for each, stored by all ranks
    assert plan.memory() == {
        "params": PSI // (degree if stage == 3 else 1) + scale,
        "opt_state": 2 * PSI // degree + 2 * scale + count,
        "padding": 0,
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_devices_hold_what_the_plan_says(stage: int, replicas: int) -> None:
    plan = uneven_plan(stage=stage, degree=4, replicas=replicas)
    job = plan.on_mesh()
    state = job.init(MODELS["uneven"].params(jnp.float32))
    for _ in range(2):
        for device in job.mesh.devices.flat:
            of = lambda held, d=device: sum(
                s.data.nbytes for x in held.values() for s in x.addressable_shards if s.device == d
            )
            assert of(state.params) == plan.memory()["params"]
            assert of(state.opt_state) == plan.memory()["opt_state"]
        state, *_ = job.step(state, *MODELS["uneven"].batch(0, jnp.float32))


@pytest.mark.parametrize("stage", [1, 3])
def test_padding_is_told_by_the_byte(stage: int) -> None:
    plan = uneven_plan(stage=stage, degree=4)
    # padding of all four slices together: entries beyond the leaf, times the entries of a row
    elements = {"w1": 3 * 7, "b1": 1, "w2": 1 * 11, "b2": 1, "w3": 1 * 3, "row": 1, "unread": 3 * 2}
    copies = 3 if stage == 3 else 2
    of_frozen = 1 * 7 if stage == 3 else 0
    assert plan.memory()["padding"] * 4 == 4 * (copies * sum(elements.values()) + of_frozen)
    assert f"{plan.memory()['padding']:,} bytes of padding" in str(plan)


# -- bytes that are moved --------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("fuse", [0, 32])
def test_collectives_move_what_zero_says(
    stage: int, degree: int, replicas: int, fuse: float
) -> None:
    """Stages 1 and 2 move twice the parameters, and stage 3 three times.

    Between groups, ranks move slices of gradients.
    """
    plan = round_plan(stage=stage, degree=degree, replicas=replicas, bucket_MB=fuse)
    scale, loss = 4, 4
    everywhere = "dp and shard" if replicas > 1 else "shard"
    expected = {
        ("reduce_scatter", "shard"): PSI,
        ("all_gather", "shard"): PSI * (2 if stage == 3 else 1),
        ("all_reduce", everywhere): scale + loss,
    }
    if replicas > 1:
        expected["all_reduce", "dp"] = PSI // degree
    assert plan.traffic() == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_leaves_that_nobody_trains_or_reads_cost_no_reduction(stage: int) -> None:
    plan = uneven_plan(stage=stage, degree=4)
    moved = {n for b in plan.buckets for n in b.leaves}
    assert not moved & {"params/frozen", "params/unread"}
    assert "params/unread" in plan.slices.leaves
    moments = [n for n in plan.main.in_names if n.startswith("opt_state") and n.endswith("unread")]
    assert len(moments) == 2 and set(moments) <= plan.slices.state.keys(), (
        "nobody reads it, and its moments are slices"
    )
    # without a gradient, the update can still change the parameter, by weight decay
    assert whole_names(plan, "all_gather").count("params/unread") == (1 if stage < 3 else 0)
    if stage < 3:
        assert "params/frozen" not in whole_names(plan, "all_gather")
        assert plan.slices.unsliced["params/frozen"] == "no gradient enters its update"
    else:
        assert whole_names(plan, "all_gather").count("params/frozen") == 2  # at its reader
        assert "params/frozen" in plan.slices.leaves
    assert not [n for n in plan.main.in_names if n.startswith("opt_state") and "frozen" in n]
    # no array of this shape is padded, scattered or reduced
    for e in plan.program.jaxpr.jaxpr.eqns:
        if e.primitive.name in ("reduce_scatter", "all_reduce"):
            assert all(a.aval.shape not in ((9, 2), (12, 2), (7, 7)) for a in e.invars)


def test_a_dtype_is_a_bucket_and_a_size_is_its_limit() -> None:
    params = {f"w{i}": jnp.ones((8, 4), jnp.bfloat16 if i % 2 else jnp.float32) for i in range(6)}
    loss = lambda p, x: sum(
        jnp.mean(jnp.tanh(x.astype(w.dtype) @ w) ** 2).astype(jnp.float32) for w in p.values()
    )
    leaves = lambda plan: sorted(sorted(b.leaves) for b in plan.buckets)
    even, odd = [[f"params/w{i}" for i in range(6) if i % 2 == k] for k in (0, 1)]
    for stage in (1, 2, 3):
        plan = plan_of(loss, ADAM, params, X, stage=stage, degree=4)
        assert leaves(plan) == [even, odd]
        assert len(of_type(plan, "reduce_scatter")) == 2
        assert all(
            len({a.aval.dtype for a in e.invars}) == 1 for _, e in of_type(plan, "reduce_scatter")
        )
        if stage < 3:
            assert [len(e.invars) for _, e in of_type(plan, "all_gather")] == [3, 3]
        two = plan_of(loss, ADAM, params, X, stage=stage, degree=4, bucket_MB=2 * 8 * 4 * 4 / 2**20)
        # leaves of 16 bits have half the size
        assert sorted(len(b.leaves) for b in two.buckets) == [
            1,
            2,
            3,
        ]
        one = plan_of(loss, ADAM, params, X, stage=stage, degree=4, bucket_MB=0)
        assert all(len(b.leaves) == 1 for b in one.buckets) and len(one.buckets) == 6


@pytest.mark.parametrize("fuse", [0, 32])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_copied_for_a_bucket(stage: int, fuse: float) -> None:
    plan = round_plan(stage=stage, degree=4, bucket_MB=fuse)
    names = {e.primitive.name for e in equations(plan.program.jaxpr)}
    assert not names & {"concatenate", "pad", "copy", "reshape"}


# -- plans are pure, and readable ------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["uneven", "scan of checkpoint"])
def test_a_plan_changes_nothing_and_is_the_same_each_time(model: str, stage: int) -> None:
    m = MODELS[model]
    tx, params = m.around(ADAM), m.params(jnp.float32)
    main = dtrans.trace(
        dtrans.make_train_step(m.loss, tx), params, tx.init(params), *m.batch(0, jnp.float32)
    )
    startup = dtrans.trace(init_of(tx), params)
    before = str(main), str(startup)
    one, two = (
        dtrans.sharding(
            main, startup, stage=stage, degree=4, slices=dtrans.Slicing(min_slice_size=0)
        )
        for _ in range(2)
    )
    assert (str(main), str(startup)) == before
    assert without_addresses(str(one.program)) == without_addresses(str(two.program))
    assert without_addresses(str(one.program.jaxpr)) == without_addresses(str(two.program.jaxpr))
    assert str(one) == str(two)
    jax.extend.core.check_jaxpr(one.program.jaxpr.jaxpr)


def test_a_plan_says_which_leaves_are_whole_and_why() -> None:
    params = {
        "few": jnp.ones((3, 2)),
        "half": jnp.ones((5, 3)),
        "none": jnp.ones(()),
        "w": jnp.ones((8, 9)),
    }
    loss = lambda p, x: sum(jnp.sum(jnp.tanh(w)) for w in p.values()) * jnp.mean(x)
    plan = plan_of(loss, ADAM, params, X, stage=3, degree=8, min_slice_size=0)
    assert plan.slices.unsliced == {
        "params/few": "no dimension of float32[3,2] has rows for 8 ranks",
        "params/none": "it has no dimensions",
    }
    assert (
        "params/few is complete on every rank: no dimension of float32[3,2] has rows for 8 ranks"
        in str(plan)
    )
    small = plan_of(loss, ADAM, params, X, stage=3, degree=2, min_slice_size=16)
    assert small.slices.unsliced["params/half"] == "it has 15 elements, fewer than 16"
    assert list(small.slices.leaves) == ["params/w"]


@pytest.mark.parametrize("partition", ["rows", "greedy_even"])
def test_statistics_that_forward_updates_are_not_called_unchanged(partition: str) -> None:
    """Each step changes a running mean, although the optimizer does not."""
    init = lambda: ({"mean": jnp.zeros(8), "still": jnp.ones(8), "w": jnp.ones((8, 8))}, ())
    loss = lambda w, p, x: jnp.mean((((x - p["mean"]) * p["still"]) @ w) ** 2)

    def step(p: Any, o: Any, x: jax.Array) -> Any:
        value, grad = dtrans.value_and_grad(loss)(p["w"], p, x)
        return {**p, "mean": 0.9 * p["mean"] + 0.1 * x.mean(0), "w": p["w"] - 0.1 * grad}, o, value

    main, startup = dtrans.trace(step, *init(), X), dtrans.trace(init)
    slices = dtrans.Slicing(min_slice_size=0, partition=partition)
    notes = dtrans.sharding(main, startup, degree=2, stage=1, slices=slices).notes
    assert any(re.search("mean.* forward updates it, not the optimizer", note) for note in notes), (
        notes
    )
    assert any(re.search("still.* it is not updated", note) for note in notes), notes


def test_no_leaf_has_rows_for_so_many_ranks() -> None:
    """No leaf is sliced, the plan gives the reason, and as many bytes are moved as in nccl2
    mode."""
    plan = plan_of(
        mlp_loss,
        ADAM,
        mlp_params((5, 6, 3)),
        *numbers(0, jnp.float32, 5, 3, 64),
        stage=3,
        degree=64,
    )
    assert not plan.slices.leaves and len(plan.slices.unsliced) == 4
    assert str(plan).count("is complete on every rank: no dimension of") == 4
    assert not of_type(plan, "all_gather") and not of_type(plan, "reduce_scatter")
    assert len(of_type(plan, "all_reduce")) == 2


def test_muon_gathers_each_matrix_once_for_all_of_its_iterations() -> None:
    plan = plan_of(mlp_loss, optax.contrib.muon(0.1), mlp_params((8, 8, 8)),
                   *numbers(0, jnp.float32, 8, 8),
                   stage=3, degree=2)  # fmt: skip
    assert not plan.slices.unsliced
    gathers = [e for _, e in of_type(plan, "all_gather") if e.params["name"] == "optimizer"]
    assert [e.outvars[0].aval.shape for e in gathers] == [(1, 8, 8), (1, 8, 8)]
    assert (
        sum(
            "the update gathers float32[1, 8, 8], 256 bytes, for scan of" in note
            for note in plan.notes
        )
        == 2
    )


# -- memory of compiled programs -------------------------------------------------------------------


def deep_case(layers: int, width: int, unrolled: bool) -> Any:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        if unrolled:
            h = x
            for w in p["w"]:
                h = jnp.tanh(h @ w)
        else:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])
        return jnp.mean(h**2)

    def init(key: jax.Array) -> Any:
        if unrolled:
            w: Any = [
                jax.random.normal(k, (width, width)) / width**0.5
                for k in jax.random.split(key, layers)
            ]
        else:
            w = jax.random.normal(key, (layers, width, width)) / width**0.5
        return {"w": w}, ADAM.init({"w": w})

    key, x = jax.random.key(0), jnp.ones((64, width))
    step = dtrans.make_train_step(loss, ADAM)
    main = dtrans.trace(step, *jax.eval_shape(init, key), x)
    return dtrans.sharding(main, dtrans.trace(init, key), stage=3, degree=8), key, x


@pytest.mark.parametrize("unrolled, part", [(False, 0.25), (True, 0.3)])
def test_a_step_of_stage_3_never_has_all_parameters(unrolled: bool, part: float) -> None:
    plan, key, x = deep_case(16, 512, unrolled)
    job = plan.on_mesh(donate=False)
    state = job.init(key)
    stats = job.lower(state, x).compile().memory_analysis()
    psi = 4 * 16 * 512**2
    assert stats.temp_size_in_bytes < part * psi, stats.temp_size_in_bytes / psi


def test_no_device_ever_holds_a_whole_leaf_of_the_first_state() -> None:
    layers, width = 4, 1024
    plan, key, _ = deep_case(layers, width, True)
    job = plan.on_mesh()
    stats = job.first_state.compiled.lower(*plan.startup.flatten(key)).compile().memory_analysis()
    leaf = 4 * width**2
    slices = 3 * layers * leaf // 8
    assert slices <= stats.output_size_in_bytes < slices + 2**12
    assert stats.temp_size_in_bytes < leaf, stats.temp_size_in_bytes / leaf


def test_jobs_on_cpus_do_not_gather_ahead_in_loops_by_themselves() -> None:
    """On CPUs, gathers do not overlap with computation.

    An explicit option still has effect, and other platforms have the default.
    """
    plan, asked, first = (
        round_plan(degree=2, **o) for o in ({"stage": 3}, {"stage": 3, "prefetch": 1}, {"stage": 1})
    )
    on_cpus = resolve_for_platform(plan, "cpu")
    assert (plan.options.prefetches_in_loops, on_cpus.options.prefetches_in_loops) == (True, False)
    assert on_cpus.options.prefetch == plan.options.prefetch == 1
    assert (
        resolve_for_platform(plan, "gpu") is plan
        and resolve_for_platform(asked, "cpu") is asked
        and resolve_for_platform(first, "cpu") is first
    )


# -- what is refused -------------------------------------------------------------------------------

REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"stage": 0}, "stage must be 1, 2 or 3, it is 0"),
    ({"stage": True}, "stage must be 1, 2 or 3, it is True"),
    ({"stage": "2"}, "stage must be 1, 2 or 3, it is '2'"),
    ({"degree": 0}, "degree must be a positive number of ranks, it is 0"),
    ({"degree": 2.0}, "degree must be a positive number of ranks, it is 2.0"),
    ({"degree": True}, "degree must be a positive number of ranks, it is True"),
    ({"replicas": -1}, "replicas must be a positive number of groups of ranks, it is -1"),
    ({"replicas": None}, "replicas must be a positive number of groups of ranks, it is None"),
    ({"axis_name": ""}, "axis_name must be the name of an axis"),
    ({"axis_name": "dp"}, "axis_name and replica_axis_name are both 'dp'"),
    ({"replica_axis_name": 3}, "replica_axis_name must be the name of an axis, it is 3"),
    ({"precision": "fp8"}, "precision must be 'fp16', 'bf16' or None, it is 'fp8'"),
    (
        {"precision": "bf16", "compress": "fp16"},
        "precision='bf16' and compress='fp16': precision already reduces gradients in 16 bits",
    ),
    ({"loss_scaling": 2.0}, "needs products in 16 bits, but dtype is None; pass 'fp16' or 'bf16'"),
    ({"loss_scaling": "2"}, "loss_scaling must be a number, a LossScaling or None; it is '2'"),
    (
        {"loss_scaling": True, "precision": "fp16"},
        "loss_scaling must be a number, a LossScaling or None; it is True",
    ),
    (
        {"loss_scaling": -2.0, "precision": "fp16"},
        "initial must be a number from 1 to 3.4e38, it is -2.0",
    ),
    ({"bucket_MB": -1}, "bucket_MB must be a size in megabytes"),
    ({"overlap": 1}, "overlap must be True or False, it is 1"),
    (
        {"overlap": False, "prefetch": 1},
        "overlap=False and prefetch=1: a prefetch overlaps",
    ),
    ({"overlap": False, "chains": 2}, "overlap=False and chains=2: several chains of reductions"),
    ({"prefetch": -1}, "prefetch must be a number of gathers, 0 or more, or None; it is -1"),
    ({"prefetch": True}, "prefetch must be a number of gathers, 0 or more, or None; it is True"),
    (
        {"gather_bucket_MB": "1"},
        "gather_bucket_MB must be a size in megabytes, 0 or more; it is '1'",
    ),
    ({"gather_bucket_MB": float("nan")}, "gather_bucket_MB must be a size in megabytes"),
    ({"min_slice_size": -1}, "min_slice_size must be a number of elements, 0 or more; it is -1"),
    ({"min_slice_size": 0.5}, "min_slice_size must be a number of elements, 0 or more; it is 0.5"),
    ({"partition": "greedy"}, "partition must be 'rows', 'greedy_even' or 'use_order'"),
    ({"reduce": "max"}, "reduce must be 'mean', 'sum' or a dtrans.Reduce; it is 'max'"),
    ({"example_count": "loss", "reduce": "sum"}, "example_count='loss' needs reduce='mean'"),
    (
        {"example_count": "count"},
        "example_count='count' is not a result of the step; name one of loss",
    ),
    (
        {"example_count": "loss", "num_micro_batch": 2, "stage": 2},
        "example_count='loss' and num_micro_batch=2 in stage 2: ",
    ),
    ({"example_count": "loss", "num_micro_batch": 2, "stage": 3}, "pass stage=1"),
    (
        {"clip_local_norm": 1.0, "num_micro_batch": 2, "stage": 2},
        "clip_local_norm=1.0 and num_micro_batch=2 in stage",
    ),
    (
        {
            "clip_local_norm": 1.0,
            "clip_local_per": "micro_batch",
            "num_micro_batch": 2,
            "stage": 1,
            "precision": "fp16",
        },
        "clip_local_per='micro_batch' and precision='fp16' with a scaled loss",
    ),
    ({"clip_local_norm": 0}, "clip_local_norm must be a positive number"),
    ({"num_micro_batch": 0}, "num_micro_batch must be a positive number of micro-steps"),
    ({"max_buckets": 0}, "max_buckets must be a positive number"),
    ({"chains": 0}, "chains must be a positive number"),
    ({"compress": "int8"}, "compress must be 'bf16', 'fp16' or None"),
    ({"compress_scale": 2.0}, "compress_scale=2.0 needs compress='bf16' or 'fp16'"),
    ({"unsplit_inputs": "x"}, "unsplit_inputs='x' must be a list of names of batch arrays"),
    ({"unsplit_inputs": ("z",)}, "z"),
    ({"merge": "sum"}, "merge='sum' must be a dict from names to merges"),
    ({"merge": {"aux": "sum"}}, "aux"),
    ({"merge": {"loss": "most"}}, "merge['loss'] must be 'mean', 'sum'"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[str(o) for o, _ in REFUSED])
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        round_plan(**{"degree": 2, **options})


def test_degree_has_no_default() -> None:
    with pytest.raises(ConfigError, match="degree must be a positive number of ranks, it is None"):
        round_plan()


def test_what_is_no_program_is_refused() -> None:
    main = round_plan(degree=2).main
    with pytest.raises(ConfigError, match="startup is a .*; expected a Program"):
        dtrans.sharding(main, round_params, degree=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="main is a .*; expected a Program"):
        dtrans.sharding(round_loss, main, degree=2)  # type: ignore[arg-type]
    startup = dtrans.trace(lambda p: (p, optax.sgd(0.1).init(p)), round_params())
    with pytest.raises(TraceError, match="opt_state"):
        dtrans.sharding(main, startup, degree=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_communicates_by_itself_is_refused(stage: int) -> None:
    step = dtrans.make_train_step(round_loss, ADAM)

    def reduced(params: Any, opt_state: Any, x: jax.Array) -> Any:
        params, opt_state, loss = step(params, opt_state, x)
        return params, opt_state, jax.lax.pmean(loss, "shard")

    init, mesh = init_of(ADAM), jax.make_mesh((1,), ("shard",))
    whole = jax.shard_map(reduced, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    main = dtrans.trace(whole, *jax.eval_shape(init, round_params()), X)
    with pytest.raises(GradientError, match="has a collective already"):
        dtrans.sharding(main, dtrans.trace(init, round_params()), stage=stage, degree=2)


def test_devices_are_as_many_as_ranks() -> None:
    plan = round_plan(degree=2, replicas=2)
    for count in (2, 8):
        with pytest.raises(
            ConfigError,
            match=f"the plan needs 4 devices, but on_mesh received {count}",
        ):
            plan.on_mesh(jax.devices()[:count])
    assert plan.on_mesh(jax.devices()[4:]).mesh.devices.shape == (2, 2)
    with pytest.raises(ConfigError, match="16 ranks need 16 devices, but on_mesh has 8"):
        round_plan(degree=16).on_mesh()


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_a_batch_that_ranks_cannot_share_is_refused(way: str) -> None:
    job = getattr(round_plan(degree=2, replicas=2, kind="local"), way)()
    state = job.init(round_params())
    with pytest.raises(BatchError, match="x has 6 rows, which cannot be split evenly over 4 ranks"):
        job.step(state, X[:6])
    with pytest.raises(BatchError, match="the step takes 1 batch arguments, 2 were given"):
        job.step(state, X, X)
    with pytest.raises(BatchError, match=r"x has shape \(8,\)"):
        job.step(state, X[0])


def test_micro_steps_that_do_not_divide_rows_are_refused() -> None:
    plan = round_plan(stage=2, degree=4, num_micro_batch=4)
    job = plan.simulate()
    with pytest.raises(
        BatchError, match="x has 2 rows on each rank, expected a multiple of the 4 micro-steps"
    ):
        job.step(job.init(round_params()), X[:8])


def test_a_state_of_another_job_is_refused() -> None:
    job = round_plan(stage=3, degree=2).simulate()
    other = plan_of(
        mlp_loss, ADAM, mlp_params(), *numbers(0, jnp.float32), stage=3, degree=2
    ).simulate()
    with pytest.raises(StateError, match="this state belongs to another job: it lacks params/"):
        job.step(other.init(mlp_params()), X)


def test_a_donated_state_is_refused() -> None:
    job = round_plan(stage=3, degree=2).on_mesh()
    state = job.init(round_params())
    job.step(state, X)
    with pytest.raises(StateError, match="a step has already used this state"):
        job.step(state, X)
