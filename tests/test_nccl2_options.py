"""Options of nccl2 mode that change how gradients are reduced: over nodes, in windows of micro-steps, in other buckets,
in chains, clipped before. Each is compared with one device on the global batch, and looked at in the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_forward, mlp_params, tree_close

import dtrans
from dtrans._jax import equations
from dtrans.errors import BatchError, ConfigError


SIZES = (5, 6, 3)


def weighted_loss(params, x, y, mask):
    """The mean over what the mask counts; the predictions, how many there were, and the worst of them."""
    each = jnp.sum((mlp_forward(params, x) - y) ** 2, -1) * mask
    count = jnp.sum(mask)
    return jnp.sum(each) / count, {"count": count, "predicted": mlp_forward(params, x), "worst": jnp.max(each)}


def batch(seed, rows=16, dtype=jnp.float32):
    x, y = mlp_batch(rows, SIZES, dtype, seed)
    return x, y, jnp.asarray(np.random.default_rng(seed).integers(0, 3, rows) + 0.5, dtype)


def planned(tx, params, loss=weighted_loss, has_aux=True, like=None, **options):
    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    main = dtrans.trace(step, params, jax.eval_shape(tx.init, params), *(batch(0) if like is None else like))
    return step, dtrans.nccl2(main, dtrans.trace(init_of(tx), params), **options)


def collectives(plan):
    """(kind, axes) of each, in order; those in a scan would be among them."""
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    return [(e.primitive.name, e.params["over"]) for e in equations(plan.program.jaxpr) if e.primitive.name in kinds]


OPTIONS = {
    "hierarchical": {"trainers": 4, "hierarchical_allreduce_inter_nranks": 2},
    "hierarchical of 8": {"trainers": 8, "hierarchical_allreduce_inter_nranks": 4},
    "window": {"trainers": 2, "accumulate_steps": 4},
    "window of one trainer": {"trainers": 1, "accumulate_steps": 4},
    "window, hierarchical": {"trainers": 4, "accumulate_steps": 2, "hierarchical_allreduce_inter_nranks": 2},
    "chains": {"trainers": 4, "nccl_comm_num": 2, "fuse_grad_size_in_MB": 0},
    "splits": {"trainers": 4, "max_splits": 3},
}


@pytest.mark.parametrize("weight", [None, "aux/count"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_way_to_reduce_gives_the_numbers_of_one_device(options, weight):
    with jax.enable_x64(True):
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
        params = mlp_params(SIZES, jnp.float64)
        merge = {"aux/worst": "max", "aux/count": "sum"}
        batches = [batch(seed, dtype=jnp.float64) for seed in range(3)]
        step, plan = planned(tx, params, like=batches[0], merge=merge, weight=weight, **options)
        if weight is None:  # then parts must count equally
            batches = [(x, y, jnp.ones_like(mask)) for x, y, mask in batches]
        jitted = jax.jit(step)
        for job in (plan.simulate(), plan.on_mesh()):
            state, here = job.init(params), (params, tx.init(params))
            for part in batches:
                state, loss, aux = job.step(state, *part)
                *here, expected, expected_aux = jitted(*here, *part)
                tree_close((loss, aux), (expected, expected_aux), 1e-12)
            tree_close((job.params(state), job.opt_state(state)), tuple(here), 1e-12)


def test_a_hierarchy_moves_one_nth_of_the_bytes_between_nodes():
    params = mlp_params(SIZES)  # 6, 3, 30 and 18 numbers: padded to 8, 4, 32 and 20
    _, plan = planned(optax.sgd(0.1), params, like=batch(0), **OPTIONS["hierarchical of 8"])
    exter, inter = plan.axis_names
    assert plan.axes == (("trainers_exter", 2), ("trainers_inter", 4))
    assert collectives(plan)[:3] == [("reduce_scatter", (inter,)), ("all_reduce", (exter,)), ("all_gather", (inter,))]
    results = 3 * 4  # loss, count and worst, over both axes
    assert plan.bytes_over(exter) == {"float32": (8 + 4 + 32 + 20) // 4 * 4 + results}
    assert plan.bytes_over(inter) == {"float32": (8 + 4 + 32 + 20) * 4 + (8 + 4 + 32 + 20) // 4 * 4 + results}
    assert "between the 2 nodes: 76 bytes of float32" in str(plan)


def test_a_window_reduces_once_and_not_inside():
    _, plan = planned(optax.sgd(0.1), mlp_params(SIZES), like=batch(0),
                      merge={"aux/worst": "max"}, trainers=2, accumulate_steps=4)  # fmt: skip
    (scan,) = [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert scan.params["length"] == 4
    inside = {e.primitive.name for e in equations(scan.params["jaxpr"])}
    assert "dot_general" in inside and "all_reduce" not in inside
    assert [kind for kind, _ in collectives(plan)] == ["all_reduce"] * 3  # gradients, sums, maxima
    with pytest.raises(BatchError, match="x has 6 rows on each trainer, which 4 micro-steps do not divide"):
        plan.simulate().step(plan.simulate().init(mlp_params(SIZES)), *batch(0, 12))


def test_statistics_go_from_micro_step_to_micro_step_and_keys_differ():
    def step(params, state, x, key):
        def loss(w):
            return jnp.mean((x @ w) ** 2) + 0.0 * jax.random.normal(key)

        value, grads = dtrans.value_and_grad(loss)(params["w"])
        seen = params["seen"] * 0.5 + jnp.mean(x)
        return {"w": params["w"] - 0.1 * grads, "seen": seen}, state, value, jax.random.normal(key, (1,))

    params = {"seen": jnp.zeros(()), "w": jnp.ones(3)}
    x, key = jnp.arange(12.0).reshape(4, 3), jax.random.key(0)
    main = dtrans.trace(step, params, (), x, key)
    plan = dtrans.nccl2(main, dtrans.trace(lambda p: (p, ()), params), trainers=1, accumulate_steps=2,
                        merge={"aux": "concat"})  # fmt: skip
    job = plan.simulate()
    state, _, drawn = job.step(job.init(params), x, key)
    halves = [jnp.mean(x[:2]), jnp.mean(x[2:])]
    assert job.params(state)["seen"] == halves[0] * 0.5 + halves[1]
    expected = [jax.random.normal(jax.random.fold_in(key, i), (1,)) for i in range(2)]
    np.testing.assert_array_equal(drawn, np.concatenate(expected))


@pytest.mark.parametrize(
    "sizes,max_splits,groups",
    [
        ([100] * 10, 5, [2, 2, 2, 2, 2]),
        ([100] * 10, 2, [10]),
        ([100] * 20, 5, [5, 5, 5, 5]),
        ([10] * 9 + [1000], 5, [1, 9]),
    ],
)
def test_buckets_by_epls_rule(sizes, max_splits, groups):
    """As epl/communicators/coalescing.py makes them; gradients come in the order of the backward pass."""
    params = {f"w{i:02}": jnp.zeros(n) for i, n in enumerate(sizes)}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(q**2) for q in p.values())
    _, plan = planned(optax.sgd(0.1), params, loss, False, [jnp.ones(8)], trainers=2, max_splits=max_splits)
    assert [len(b.leaves) for b in plan.buckets] == groups


def test_buckets_by_epls_rule_never_mix_types():
    types = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32, jnp.bfloat16]
    params = {f"w{i}": jnp.zeros(4, t) for i, t in enumerate(types)}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(q.astype(x.dtype) ** 2) for q in p.values())
    _, plan = planned(optax.sgd(0.1), params, loss, False, [jnp.ones(8)], trainers=2, max_splits=2)
    assert sorted(len(b.leaves) for b in plan.buckets) == [1, 2, 2]


def test_reductions_of_a_chain_wait_for_each_other():
    params = {n: jnp.zeros(3) for n in "abcd"}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(q**2) for q in p.values())

    def barriers(**options):
        _, plan = planned(
            optax.sgd(0.1), params, loss, False, [jnp.ones(8)], trainers=2, fuse_grad_size_in_MB=0, **options
        )
        return sum(e.primitive.name == "optimization_barrier" for e in plan.program.jaxpr.jaxpr.eqns)

    assert (barriers(), barriers(nccl_comm_num=1), barriers(nccl_comm_num=3)) == (0, 3, 1)


def test_clipping_before_and_after_the_sum_are_different_things():
    """Gradients (3, 0) and (0, 4): each clipped to 1 and then averaged, or averaged and then clipped to 1."""
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    loss = lambda p, x: jnp.mean(x[:, 0] * p["a"] + x[:, 1] * p["b"])
    x = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    after = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    for tx, options, expected in (
        (optax.sgd(1.0), {"clip_local_norm": 1.0}, (-0.5, -0.5)),
        (after, {}, (-0.6, -0.8)),
        (optax.sgd(1.0), {}, (-1.5, -2.0)),
    ):
        _, plan = planned(tx, params, loss, False, [x], trainers=2, **options)
        for job in (plan.simulate(), plan.on_mesh()):
            state, _ = job.step(job.init(params), x)
            np.testing.assert_allclose([job.params(state)["a"], job.params(state)["b"]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"hierarchical_allreduce_inter_nranks": 3}, "=3 must divide the 4 trainers into several nodes"),
        ({"hierarchical_allreduce_inter_nranks": 4}, "=4 must divide the 4 trainers into several nodes"),
        ({"hierarchical_allreduce_inter_nranks": 1}, "=1 must divide the 4 trainers into several nodes"),
        ({"hierarchical_allreduce_inter_nranks": -2}, "must be a number of trainers, it is -2"),
        ({"accumulate_steps": 0}, "accumulate_steps must be a positive number of micro-steps, it is 0"),
        ({"accumulate_steps": True}, "accumulate_steps must be a positive number of micro-steps, it is True"),
        ({"max_splits": 0}, "max_splits must be a positive number, or None; it is 0"),
        ({"nccl_comm_num": 1.5}, "nccl_comm_num must be a positive number, or None; it is 1.5"),
        ({"clip_local_norm": 0}, "clip_local_norm must be a positive number, or None; it is 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(optax.sgd(0.1), mlp_params(SIZES), like=batch(0), trainers=4, **options)


def test_a_result_that_every_micro_step_makes_must_be_merged_by_the_user():
    loss = lambda p, x: (jnp.mean(x * p["w"]), jnp.sum(x > 0))
    with pytest.raises(ConfigError, match="aux is int32.*made in each of 2 micro-steps: say what becomes of it"):
        planned(optax.sgd(0.1), {"w": jnp.ones(2)}, loss, True, [jnp.ones((8, 2))], trainers=2, accumulate_steps=2)
