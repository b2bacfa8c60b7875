"""Sharding by full leaves.

The tests check the owners of leaves (Paddle's two rules), results against one device, and the bytes
that ranks move and store in bins.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_zoo
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, plain_step, tree_close
from sharding_models import (
    MODELS,
    alone,
    given_gradients,
    half_loss,
    half_params,
    job_of,
    mean_of_parts,
    numbers,
    plan_of,
    plan_of_step,
    trained,
    zoo_step,
)

import dtrans
from dtrans._jax import equations, jaxprs_in_params
from dtrans.errors import ConfigError, StateError
from dtrans.ir.program import is_communication
from dtrans.ops import all_gather_p, all_reduce_p, reduce_scatter_p
from dtrans.zero.by_leaf.assign import RULES, assign_owners, sum_loads
from dtrans.zero.by_leaf.packing import Bins


# -- who owns what ---------------------------------------------------------------------------------

NET = {
    "fc_0.w_0": 32 * 64,
    "fc_0.b_0": 64,
    "fc_1.w_0": 64 * 256,
    "fc_1.b_0": 256,
    "fc_2.w_0": 256 * 2,
    "fc_2.b_0": 2,
}
GIANT = [1] * 7 + [1000]


def loads(sizes: list[int], ranks: int, rule: str) -> list[int]:
    owner = {str(i): k for i, k in enumerate(assign_owners(sizes, ranks, rule))}
    return sum_loads({str(i): size for i, size in enumerate(sizes)}, owner, ranks)


def test_use_order_of_a_small_net() -> None:
    owner = dict(zip(NET, assign_owners([*NET.values()], 2, "use_order"), strict=True))
    assert [n for n, k in owner.items() if k == 1] == ["fc_1.b_0", "fc_2.w_0", "fc_2.b_0"]
    found = sum_loads(NET, owner, 2)
    assert found == [18496, 770]
    assert round(max(found) / (sum(found) / 2), 2) == 1.92


@pytest.mark.parametrize(
    "sizes, ranks, rule, wanted",
    [
        ([1] * 4, 4, "use_order", [2, 1, 1, 0]),
        ([1] * 4, 4, "greedy_even", [1, 1, 1, 1]),
        ([1] * 8, 4, "use_order", [3, 2, 2, 1]),
        ([1] * 8, 4, "greedy_even", [2, 2, 2, 2]),
        (GIANT, 4, "use_order", [1007, 0, 0, 0]),
        (GIANT, 4, "greedy_even", [2, 2, 2, 1001]),
        ([5, 7], 4, "greedy_even", [5, 7, 0, 0]),
        ([5, 7], 4, "use_order", [5, 7, 0, 0]),
        ([], 3, "use_order", [0, 0, 0]),
        ([9], 1, "use_order", [9]),
    ],
)
def test_loads(sizes: list[int], ranks: int, rule: str, wanted: list[int]) -> None:
    assert loads(sizes, ranks, rule) == wanted


def test_greedy_even_prefers_the_first_of_equals() -> None:
    assert assign_owners([2, 1, 1, 1], 3, "greedy_even") == [0, 1, 2, 1]


def test_use_order_goes_on_by_one_rank_at_a_time() -> None:
    assert assign_owners([1000, 1, 1, 1], 4, "use_order") == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", RULES)
def test_leaves_are_given_away_in_the_order_of_their_use(rule: str) -> None:
    """The order of names would assign all biases first."""
    sizes = (32, 64, 256, 2)
    plan = plan_of(
        mlp_loss, optax.adam(0.1), mlp_params(sizes), *mlp_batch(4, sizes), degree=2, partition=rule
    )  # fmt: skip
    assert plan.owned is not None
    assert list(plan.owned.owner) == [f"params/{n}" for n in ("w1", "b1", "w2", "b2", "w3", "b3")]
    assert [*plan.owned.owner.values()] == assign_owners([*NET.values()], 2, rule)
    if rule == "use_order":
        assert plan.owned.loads == [18496, 770]
        assert (
            "rank 1 owns 770 elements of parameters: params/b2, params/w3, params/b3" in plan.notes
        )


def test_leaves_that_are_bound_together_have_one_owner() -> None:
    tx, params = optax.flatten(optax.contrib.muon(0.1)), mlp_params()
    tied = optax.multi_transform({"one": optax.flatten(optax.adafactor(0.1)),
                                  "each": optax.adam(0.1)}, {
        "w1": "each", "b1": "one", "w2": "each", "b2": "one"})  # fmt: skip
    for of, groups in ((tx, None), (tied, ({"params/b1", "params/b2"},))):
        plan = plan_of(mlp_loss, of, params, *mlp_batch(), degree=3, partition="greedy_even")
        assert plan.owned is not None
        owner, bound = plan.owned.owner, plan.slices.analysis.groups
        assert all(owner[n] == owner[m] for n, g in bound.items() for m in g.leaves)
        for group in groups or ():
            assert len({owner[n] for n in group}) == 1


# -- bins ------------------------------------------------------------------------------------------


def test_bins_give_back_what_they_were_given() -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (2, 3), "b": (), "c": (4,), "none": (0, 2), "d": (1, 1)}
    arrays = {
        n: jnp.asarray(rng.normal(size=s), jnp.bfloat16 if n == "c" else jnp.float32)
        for n, s in shapes.items()
    }
    owner = {"a": 1, "b": 0, "c": 2, "none": 0, "d": 1}
    bins = Bins.from_types(arrays, owner, 3, "x")
    packed = bins.pack(arrays)
    assert {n: x.shape for n, x in packed.items()} == {"x/float32": (21,), "x/bfloat16": (12,)}
    tree_close(bins.unpack(packed), arrays, 0.0)
    for limit in (0, 3 * 3 * 4, 3 * 4 * 4):
        parts = {p: bins.pack_part(p, arrays) for p in bins.parts(limit)}
        assert len(parts) == 2 + (limit < 3 * 7 * 4)
        tree_close(bins.from_parts(parts), arrays, 0.0)
    rows = [bins.pack_rank(k, arrays) for k in range(3)]
    for n, x in packed.items():
        np.testing.assert_array_equal(np.concatenate([row[n] for row in rows]), x)
    for n, p in bins.places.items():
        np.testing.assert_array_equal(bins.array_of(n, rows[p.rank]), arrays[n])
    assert bins.padding == (21 - 8) * 4 + (12 - 4) * 2


# -- numbers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "muon": lambda: optax.contrib.muon(0.05),
    "clip, muon": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.contrib.muon(0.05)),
    "muon, clip": lambda: optax.chain(optax.contrib.muon(0.05), optax.clip_by_global_norm(0.01)),
    "adam": lambda: optax.adam(0.01),
    "lamb": lambda: optax.lamb(0.01),
    "clip, lamb": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.lamb(0.01)),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "sgd": lambda: optax.sgd(0.1),
}


def check(
    model: str, tx: Any, degree: int, rule: str, replicas: int = 1, way: str = "simulate",
    dtype: Any = jnp.float64,
    rtol: float = 1e-12, steps: int = 3, **options: Any,
) -> None:  # fmt: skip
    m = MODELS[model]
    tx, params = m.around(tx), m.params(dtype)
    batches = [m.batch(s, dtype, rows=24) for s in range(steps)]  # type: ignore[call-arg]
    plan = plan_of(
        m.loss, tx, params, *batches[0], degree=degree, replicas=replicas, partition=rule, **options
    )
    got = trained(plan, way, params, batches)
    want = alone(plain_step(m.loss, tx), init_of(tx), params, batches)
    assert (
        sum(
            not np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (got[0], params)), strict=True)
        )
        > 2
    )
    tree_close(got, want, rtol)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.rotated] * (k % 2)) for k, n in enumerate(OPTIMIZERS)],
)
def test_ranks_that_own_leaves_train_as_one_device(name: str) -> None:
    """Leaves are of every kind: no dimension, one row, not trained, not read."""
    check("uneven", OPTIMIZERS[name](), 3, "greedy_even")


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name, degree, rule, replicas",
    [
        ("muon", 2, "use_order", 1),
        ("clip, muon", 4, "use_order", 2),
        ("muon, clip", 2, "greedy_even", 2),
        ("lamb", 4, "greedy_even", 1),
        ("adam", 2, "greedy_even", 2),
        ("momentum", 4, "use_order", 1),
    ],
)
def test_degrees_rules_and_groups(name: str, degree: int, rule: str, replicas: int) -> None:
    check("masked", OPTIMIZERS[name](), degree, rule, replicas)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fuse", [32, 0], ids=["in one", "in parts"])
@pytest.mark.parametrize(
    "name, degree, rule, replicas",
    [
        ("clip, muon", 2, "greedy_even", 1),
        ("adam", 3, "use_order", 1),
        ("momentum", 4, "greedy_even", 2),
    ],
)
def test_gradients_in_parts_behind_each_other(
    name: str, degree: int, rule: str, replicas: int, fuse: float
) -> None:
    check("uneven", OPTIMIZERS[name](), degree, rule, replicas, stage=2, bucket_MB=fuse)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "model, name, degree, rule, replicas",
    [
        pytest.param("transformer", "clip, muon", 2, "greedy_even", 2, marks=pytest.mark.rotated),
        ("scan", "muon, clip", 4, "use_order", 1),
        ("uneven", "clip, lamb", 3, "greedy_even", 1),
    ],
)
def test_on_a_mesh(model: str, name: str, degree: int, rule: str, replicas: int) -> None:
    check(model, OPTIMIZERS[name](), degree, rule, replicas, way="mesh")


@pytest.mark.parametrize("way", ["simulate", "mesh"])
def test_float32(way: str) -> None:
    check(
        "scan", OPTIMIZERS["clip, muon"](), 2, "greedy_even", way=way, dtype=jnp.float32, rtol=1e-5
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["simulate", "mesh"])
def test_more_ranks_than_leaves(rule: str, way: str) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1))
    params, batches = (
        mlp_params((5, 3), jnp.float64),
        [mlp_batch(8, (5, 3), jnp.float64, s) for s in range(3)],
    )
    plan = plan_of(mlp_loss, tx, params, *batches[0], degree=4, partition=rule)
    assert plan.owned is not None
    assert plan.owned.loads == [15, 3, 0, 0]
    got = trained(plan, way, params, batches)
    tree_close(got, alone(plain_step(mlp_loss, tx), init_of(tx), params, batches), 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["adam", "clip, muon"])
def test_a_leaf_of_16_bits_beside_others(name: str) -> None:
    """Each type has separate bins."""
    tx, params = OPTIMIZERS[name](), half_params(jnp.float64)
    batches = [numbers(s, jnp.float64) for s in range(3)]
    plan = plan_of(half_loss, tx, params, *batches[0], degree=2, partition="greedy_even")
    assert {n for n in plan.sliced if n.startswith("opt_state/bins/")} == {
        "opt_state/bins/bfloat16", "opt_state/bins/float64"}  # fmt: skip
    got = trained(plan, "simulate", params, batches)
    want = alone(mean_of_parts(half_loss, tx, 2), init_of(tx), params, batches)
    tree_close(got, want, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("degree", [2, 3])
def test_a_gradient_that_enters_a_norm_and_no_update(degree: int) -> None:
    """A frozen leaf has an owner, too, because some rank must have its gradient."""
    params, batches = (
        mlp_params(dtype=jnp.float64),
        [mlp_batch(12, dtype=jnp.float64, seed=s) for s in range(3)],
    )
    clip = optax.clip_by_global_norm(0.05)

    def step(p: Any, s: Any, *batch: Any) -> Any:
        value, grads = dtrans.value_and_grad(mlp_loss)(p, *batch)
        grads, _ = clip.update(grads, clip.init(p))
        trained = {n: g for n, g in grads.items() if n != "w1"}
        updates, s = optax.adam(0.1).update(trained, s)
        rest = {n: p[n] for n in trained}
        return {**optax.apply_updates(rest, updates), "w1": p["w1"]}, s, value

    init = lambda p: (p, optax.adam(0.1).init({n: x for n, x in p.items() if n != "w1"}))
    plan = plan_of_step(step, init, params, *batches[0], degree=degree, partition="greedy_even")
    assert plan.owned is not None
    assert "p/w1" in plan.owned.owner
    got = trained(plan, "simulate", params, batches)
    tree_close(got, alone(step, init, params, batches), 1e-12)


FEW = (
    "adafactor",
    "sm3",
    "dog",
    "flatten",
    "noisy_sgd",
    "lookahead",
    "multi_transform",
    "apply_if_finite",
)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FEW)
def test_any_optimizer(name: str) -> None:
    zoo_case(name, 3, "greedy_even")


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [n for n in optimizer_zoo.CASES if n not in FEW])
def test_every_optimizer(name: str) -> None:
    zoo_case(name, 2, "use_order")


def zoo_case(name: str, degree: int, rule: str) -> None:
    case = optimizer_zoo.CASES[name]
    params = case.params(jnp.float64)
    batches, init = given_gradients(case, params, degree), init_of(case.make())
    plan = plan_of_step(
        zoo_step(case, None), init, params, *batches[0], kind="local", degree=degree, partition=rule
    )
    got = trained(plan, "simulate", params, batches)
    tree_close(got[:2], alone(zoo_step(case, degree), init, params, batches)[:2], 1e-12)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options",
    [
        {"num_micro_batch": 3},
        {"overlap": False, "bucket_MB": 0},
        {"clip_local_norm": 0.01},
        {"compress": "bf16"},
        {"reduce": "sum"},
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_do_what_they_do_to_rows(options: dict[str, Any]) -> None:
    params, batches = (
        mlp_params(dtype=jnp.float64),
        [mlp_batch(12, dtype=jnp.float64, seed=s) for s in range(3)],
    )
    tx = OPTIMIZERS["clip, lamb"]()
    plans = [
        plan_of(mlp_loss, tx, params, *batches[0], degree=2, partition=of, **options)
        for of in ("rows", "greedy_even")
    ]
    both = [trained(plan, "simulate", params, batches) for plan in plans]
    tree_close(both[1], both[0], 1e-12)


@pytest.mark.usefixtures("x64")
def test_a_gradient_that_only_results_use() -> None:
    """Only a result reads the gradient of `w1`, so no rank owns this leaf."""
    params, batches = (
        mlp_params(dtype=jnp.float64),
        [mlp_batch(8, dtype=jnp.float64, seed=s) for s in range(2)],
    )
    tx = optax.adam(0.1)

    def step(p: Any, s: Any, *batch: Any) -> Any:
        value, grads = dtrans.value_and_grad(mlp_loss)(p, *batch)
        updates, s = tx.update({"w2": grads["w2"], "b2": grads["b2"]}, s)
        new = optax.apply_updates({"w2": p["w2"], "b2": p["b2"]}, updates)
        return {**p, **new}, s, value, {"norm": optax.tree.norm(grads)}

    init = lambda p: (p, tx.init({"w2": p["w2"], "b2": p["b2"]}))
    plan = plan_of_step(step, init, params, *batches[0], degree=2, partition="greedy_even", stage=2)
    assert plan.owned is not None
    assert set(plan.owned.owner) == {"p/w2", "p/b2"}
    assert "p/w1 is complete on every rank: it is not updated" in plan.notes
    tree_close(
        trained(plan, "simulate", params, batches), alone(step, init, params, batches), 1e-12
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("way", ["simulate", "mesh"])
def test_weights_and_results_that_are_made_of_gradients(way: str) -> None:
    def loss(p: Any, x: Any, y: Any, mask: Any) -> Any:
        count = jnp.sum(mask)
        return jnp.sum(mask[:, None] * (x @ p["w"] + p["b"] - y) ** 2) / count, {"count": count}

    tx = optax.adam(0.1)

    def step(p: Any, s: Any, *batch: Any) -> Any:
        (value, aux), grads = dtrans.value_and_grad(loss, has_aux=True)(p, *batch)
        updates, s = tx.update(grads, s, p)
        return (
            optax.apply_updates(p, updates),
            s,
            value,
            {**aux, "norm": optax.tree.norm(grads), "bias": grads["b"]},
        )

    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(5, 3))), "b": jnp.asarray(rng.normal(size=3))}
    batches = [
        (*numbers(s, jnp.float64), jnp.asarray(rng.integers(0, 2, 16), jnp.float64))
        for s in range(3)
    ]
    both = [
        trained(
            plan_of_step(
                step, init_of(tx), params, *batches[0], degree=2, partition=of,
                example_count="aux/count",
                merge={"aux/count": "sum"},
            ), way, params, batches)
        for of in ("rows", "use_order")
    ]  # fmt: skip
    tree_close(both[1], both[0], 1e-12)
    tree_close(both[1], alone(step, init_of(tx), params, batches), 1e-12)


def test_other_batch_shapes_and_keys() -> None:
    def loss(p: Any, x: Any, y: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return mlp_loss(p, x * kept, y)

    tx, params, key = optax.contrib.muon(0.1), mlp_params(), jax.random.key(0)
    both = []
    for of in ("rows", "use_order"):
        plan = plan_of(loss, tx, params, *mlp_batch(8), key, degree=2, partition=of)
        both.append(
            trained(plan, "simulate", params, [(*mlp_batch(rows), key) for rows in (8, 4, 12)])
        )
    tree_close(both[1], both[0], 1e-5)


def test_a_plan_for_more_groups_has_the_same_owners() -> None:
    plan = plan_of(
        mlp_loss, optax.adam(0.1), mlp_params(), *mlp_batch(), degree=2, partition="use_order"
    )
    more = plan.for_trainers(4)
    assert plan.owned is not None
    assert more.owned is not None
    assert more.owned.owner == plan.owned.owner
    assert more.options.replicas == 2


def test_one_rank_owns_everything_as_it_is() -> None:
    plan = plan_of(
        mlp_loss, optax.adam(0.1), mlp_params(), *mlp_batch(), degree=1, partition="greedy_even"
    )
    assert plan.owned is None
    assert not any(is_communication(e) for e in equations(plan.program.jaxpr))


# -- structure -------------------------------------------------------------------------------------

SIZES = (8, 16, 4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("degree", [2, 4])
def test_what_is_moved_and_held(rule: str, degree: int) -> None:
    """One reduce_scatter and one all_gather move the longest rank's part for each rank.

    The state also has this size.
    """
    params = mlp_params(SIZES)
    plan = plan_of(
        mlp_loss, optax.adam(0.1), params, *mlp_batch(8, SIZES), degree=degree, partition=rule
    )
    assert plan.owned is not None
    elements, longest = sum(x.size for x in params.values()), max(plan.owned.loads)
    assert sum(plan.owned.loads) == elements
    padded = degree * longest * 4
    assert [op.type for op in plan.program.ops if op.type in ("reduce_scatter", "all_gather")] == [
        "reduce_scatter", "all_gather"]  # fmt: skip
    assert plan.traffic() == {
        ("reduce_scatter", "shard"): padded,
        ("all_gather", "shard"): padded,
        ("all_reduce", "shard"): 4,  # the loss
    }
    assert plan.memory() == {
        "params": elements * 4,
        "opt_state": 2 * longest * 4 + 4,  # two moments, and a count
        "padding": (2 * padded - 2 * elements * 4) // degree,
    }
    (bucket,) = plan.buckets
    assert bucket.nbytes == padded
    assert set(bucket.leaves) == {f"params/{n}" for n in params}


def positions(plan: Any, *names: str) -> list[int]:
    return [i for i, op in enumerate(plan.program.ops) if op.type in names]


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_scattered_when_all_of_a_part_are_made(stage: int) -> None:
    """Parts have the requested number of bytes, or the bytes of the largest leaf.

    All parts together move as many bytes as one.
    """
    sizes = (8,) * 9
    params, batch = mlp_params(sizes), mlp_batch(8, sizes)
    options: dict[str, Any] = {"degree": 2, "partition": "greedy_even", "stage": stage}
    plan = plan_of(mlp_loss, optax.sgd(0.1), params, *batch, bucket_MB=0, **options)
    whole = plan_of(mlp_loss, optax.sgd(0.1), params, *batch, **options)
    assert plan.owned is not None
    assert len(positions(whole, "reduce_scatter")) == len(whole.buckets) == 1
    assert plan.traffic() == whole.traffic()
    found = positions(plan, "reduce_scatter")
    assert len(found) == len(plan.buckets) == math.ceil(max(plan.owned.loads) / 64) > 3
    backward = [i for i, op in enumerate(plan.program.ops) if op.role == "backward"]
    between = [sum(a < i < b for i in backward) for a, b in itertools.pairwise(found)]
    if stage == 1:
        assert max(backward) < found[0]
    else:
        assert sum(i < found[0] for i in backward) < len(backward) / 3
        assert all(between[:-1])
    for bucket, i in zip(plan.buckets, found, strict=True):
        assert plan.program.ops[i].attrs["name"] == bucket.name
        assert (
            bucket.nbytes
            == sum(v.aval.size * 4 for v in plan.program.jaxpr.jaxpr.eqns[i].invars)
            <= 2 * 64 * 4
        )


def test_groups_add_up_what_ranks_own() -> None:
    plan = plan_of(
        mlp_loss, optax.sgd(0.1), mlp_params(SIZES), *mlp_batch(8, SIZES), degree=2, replicas=2,
        partition="greedy_even",
    )  # fmt: skip
    assert plan.owned is not None
    longest = max(plan.owned.loads) * 4
    traffic = plan.traffic()
    assert traffic["reduce_scatter", "shard"] == 2 * longest
    assert traffic["all_reduce", "dp"] == longest
    assert plan.memory()["padding"] == 0  # no state


def switches(plan: Any) -> list[Any]:
    return [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "cond"]


@pytest.mark.parametrize(
    "name, levels", [("muon", 1), ("adam", 1), ("lamb", 1), ("clip, muon", 2), ("muon, clip", 2)]
)
def test_one_switch_for_each_level(name: str, levels: int) -> None:
    """The owner of a leaf computes the leaf's norm.

    Only values of all leaves need a level, and no branch communicates.
    """
    plan = plan_of(
        mlp_loss,
        OPTIMIZERS[name](),
        mlp_params(SIZES),
        *mlp_batch(8, SIZES),
        degree=3,
        partition="greedy_even",
    )
    found = switches(plan)
    assert len(found) == levels
    for eqn in found:
        assert len(eqn.params["branches"]) == 3
        assert not any(
            is_communication(e) for body in jaxprs_in_params(eqn.params) for e in equations(body)
        )
    moved = [
        op
        for op in plan.program.ops
        if op.type == all_reduce_p.name and op.attrs["name"] == "optimizer"
    ]
    assert len(moved) == levels - 1


def test_each_matrix_is_multiplied_by_one_rank() -> None:
    """Ranks share the work of Muon.

    Results of the first level are not computed again at the second level.
    """
    shapes = {"a": (6, 6), "b": (6, 8), "c": (8, 6)}
    rng = np.random.default_rng(0)
    params = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    loss = lambda p, x: jnp.mean((x @ p["a"] @ p["b"] @ p["c"]) ** 2)
    tx = OPTIMIZERS["muon, clip"]()
    batch = jnp.ones((6, 6))
    plan = plan_of(loss, tx, params, batch, degree=3, partition="greedy_even")
    steps = [  # Newton-Schulz iterations are in a loop
        [
            sum(e.primitive.name in ("scan", "while") for e in equations(body))
            for body in eqn.params["branches"]
        ]
        for eqn in switches(plan)
    ]
    assert steps == [[1, 1, 1], [0, 0, 0]]


def test_state_is_in_bins_over_the_axis_and_told_whole() -> None:
    tx, params = optax.contrib.muon(0.1), mlp_params(SIZES)
    plan = plan_of(mlp_loss, tx, params, *mlp_batch(8, SIZES), degree=4, partition="greedy_even")
    assert plan.owned is not None
    job = job_of(plan, "mesh")
    state = job.init(params)
    tree_close(job.opt_state(state), tx.init(params), 0.0)
    tree_close(job.params(state), params, 0.0)
    bins = {n: x for n, x in state.opt_state.items() if n in plan.sliced}
    assert set(bins) == {"opt_state/bins/float32"}
    (one,) = bins.values()
    assert one.shape == (4 * max(plan.owned.state.types[n].size for n in plan.owned.state.types),)
    assert {s.data.shape[0] for s in one.addressable_shards} == {one.shape[0] // 4}
    assert all(n.split("/")[-1] in ("count", "ns_coeffs") for n in state.opt_state if n not in bins)
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert plan.memory()["opt_state"] < nbytes(tx.init(params))
    names = [(n, p.rank, p.start) for n, p in plan.owned.state.places.items()]
    for (_, a, x), (_, b, y) in itertools.pairwise(sorted(names, key=lambda p: p[1:])):
        assert (a, x) < (b, y)


def test_the_program_is_the_same_each_time() -> None:
    make = lambda: plan_of(
        mlp_loss,
        OPTIMIZERS["clip, muon"](),
        mlp_params(),
        *mlp_batch(),
        degree=3,
        partition="greedy_even",
    )
    assert make().program.fingerprint == make().program.fingerprint


def test_counts_are_made_outside_of_branches() -> None:
    """So counts are equal on all ranks, whatever a rank owns."""
    plan = plan_of(
        mlp_loss, optax.adam(0.1), mlp_params(), *mlp_batch(), degree=2, partition="greedy_even"
    )
    count = next(n for n in plan.program.out_names if n.endswith("count"))
    out: Any = dict(zip(plan.program.out_names, plan.program.jaxpr.jaxpr.outvars, strict=True))[
        count
    ]
    made = {v: e for e in plan.program.jaxpr.jaxpr.eqns for v in e.outvars}
    assert made[out].primitive.name not in ("cond", reduce_scatter_p.name, all_gather_p.name)


def test_state_that_has_the_name_of_bins() -> None:
    params, batch = mlp_params(), mlp_batch()

    def step(p: Any, s: Any, *batch: Any) -> Any:
        value, grads = dtrans.value_and_grad(mlp_loss)(p, *batch)
        moved = {n: 0.9 * s["bins"]["float32"][n] + grads[n] for n in p}
        return {n: p[n] - 0.1 * moved[n] for n in p}, {"bins": {"float32": moved}}, value

    init = lambda p: (p, {"bins": {"float32": jax.tree.map(jnp.zeros_like, p)}})
    plan = plan_of_step(step, init, params, *batch, degree=2, partition="greedy_even")
    assert set(plan.sliced) == {"s/bins_/float32"}
    tree_close(trained(plan, "simulate", params, [batch]), alone(step, init, params, [batch]), 1e-5)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, told",
    [
        (
            {"stage": 2, "num_micro_batch": 2},
            "partition='use_order' cannot be combined with num_micro_batch=2 in stage 2",
        ),
        ({"stage": 3}, "partition='use_order' cannot be combined with stage=3"),
        ({"precision": "bf16"}, "partition='use_order' cannot be combined with precision='bf16'"),
    ],
)
def test_what_owners_cannot(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_of(
            mlp_loss,
            optax.adam(0.1),
            mlp_params(),
            *mlp_batch(),
            degree=2,
            partition="use_order",
            **options,
        )


def test_a_rule_that_there_is_not() -> None:
    with pytest.raises(
        ConfigError, match="partition must be 'rows', 'greedy_even' or 'use_order', it is 'even'"
    ):
        plan_of(mlp_loss, optax.adam(0.1), mlp_params(), *mlp_batch(), degree=2, partition="even")


def test_the_state_of_another_plan() -> None:
    params, batch = mlp_params(), mlp_batch(8)
    of = lambda degree, **options: plan_of(
        mlp_loss, optax.adam(0.1), params, *batch, degree=degree, **options
    )
    job = job_of(of(2, partition="greedy_even"), fast=False)
    for other, told in (
        (
            of(4, partition="greedy_even"),
            "opt_state/bins/float32 is float32.*to move a state from one plan to another",
        ),
        (of(2), "this state belongs to another job: it lacks opt_state/bins/float32"),
    ):
        with pytest.raises(StateError, match=told):
            job.step(job_of(other, fast=False).init(params), *batch)


def test_state_that_cannot_lie_beside_other_state() -> None:
    with pytest.raises(ConfigError, match="w has type key<fry>"):
        Bins.from_types({"w": jax.random.key(0)}, {"w": 0}, 2, "x")
