"""Test the row analysis of optimize halves.

Covers: layouts of values; which leaves may be sliced, and the reasons why others may not; values
that servers exchange. `test_server_update` and `test_any_update` test the results of sliced
updates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params
from jax import lax

import dtrans
from dtrans._jax import equations
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import SHARED, Colocated, RowAxis, join, leaves_of
from dtrans.slicing.rounds import ExchangeRounds
from dtrans.step.halves import Gradient, divide_step


PARAMS = mlp_params((5, 5, 5))  # two layers of equal shapes
NAMES = {f"params/{n}" for n in PARAMS}


def analysed(tx, params=PARAMS, loss=mlp_loss, batch=None):
    batch = mlp_batch(4, (5, 5, 5)) if batch is None else batch
    program = dtrans.trace(
        dtrans.make_train_step(loss, tx), params, jax.eval_shape(tx.init, params), *batch
    )
    done = divide_step(program)
    return analyse(done.optimize, done.optimized)


def of_update(update, params=PARAMS, init=lambda p: ()):
    """Analyse `update(grads, state, params) -> (updates, state)`. The gradients are the batch."""
    loss = lambda p, g: sum(jnp.vdot(p[n], g[n]) for n in p)
    return analysed(optax.GradientTransformation(init, update), params, loss, (params,))


def grouped(analysis):
    return {g.leaves for g in analysis.groups.values()}


def primitives(analysis):
    return [e.primitive.name for e in analysis.half.jaxpr.jaxpr.eqns]


# -- optimizers ------------------------------------------------------------------------------------

ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
    "adamax": optax.adamax(0.1),
    "nadam": optax.nadam(0.1),
    "rmsprop": optax.rmsprop(0.1, centered=True),
    "lion": optax.lion(0.1),
    "yogi": optax.yogi(0.1),
    "adadelta": optax.adadelta(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "adagrad": optax.adagrad(0.1),
    "adabelief": optax.adabelief(0.1),
    "radam": optax.radam(0.1),
    "rprop": optax.rprop(0.1),
    "inject": optax.inject_hyperparams(optax.adam)(0.1),
    "noise": optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_leave_each_leaf_free(name):
    analysis = analysed(ELEMENTWISE[name])
    assert analysis.groups == {}
    assert ExchangeRounds(analysis).crossings == {}
    for leaf in NAMES:
        assert analysis.layout(analysis.inputs[Gradient(leaf)]) == RowAxis(leaf, 0)
        assert analysis.layout(analysis.outputs[leaf]) == RowAxis(leaf, 0)
    for state, var in analysis.inputs.items():
        if str(state).startswith("opt_state"):
            of = [
                leaf
                for leaf in NAMES
                if "hyperparams" not in state and state.endswith(leaf.removeprefix("params"))
            ]
            assert analysis.layout(var) == (RowAxis(of[0], 0) if of else SHARED), state


# number of values that servers exchange, their operations, and the levels of their parts
REDUCING = {
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        4,
        {"sum"},
        {0},
    ),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.1), 2), 4, {"and"}, {0}),
    "multi_steps": (optax.MultiSteps(optax.sgd(0.1), 2), 0, set(), set()),
    "novograd": (optax.novograd(0.1), 8, {"sum"}, {0}),
    "centralize": (optax.chain(optax.centralize(), optax.sgd(0.1)), 0, set(), set()),
    # optax.safe_norm takes a norm. If the norm was small, it takes the norm of a replacement.
    "lamb": (optax.lamb(0.1), 16, {"sum"}, {0, 1}),
    "lars": (optax.lars(0.1), 16, {"sum"}, {0, 1}),
    "lamb_after_a_clip": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
        20,
        {"sum"},
        {0, 1, 2},
    ),
    "adaptive_grad_clip": (
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        8,
        {"sum"},
        {0},
    ),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), 16, {"sum"}, {0, 1}),
}


@pytest.mark.parametrize("name", REDUCING)
def test_reductions_leave_each_leaf_free_and_cross(name):
    tx, count, ops, levels = REDUCING[name]
    analysis = analysed(tx)
    assert analysis.groups == {}
    crossings = ExchangeRounds(analysis).crossings.values()
    assert len(crossings) == count
    assert {c.op for c in crossings} == ops
    assert {c.level for c in crossings} == levels
    assert {c.home for c in crossings} <= NAMES
    assert len({c.name for c in crossings}) == count


def test_adafactor_has_rows_of_its_row_sums_and_shares_its_column_sums():
    analysis = analysed(optax.adafactor(0.1, min_dim_size_to_factor=2))
    layouts = {
        n: analysis.layout(v) for n, v in analysis.inputs.items() if str(n).startswith("opt_state")
    }
    assert layouts["opt_state/0/v_row/w1"] == RowAxis("params/w1", 0)
    assert layouts["opt_state/0/v_col/w1"] is SHARED
    assert layouts["opt_state/0/v/b1"] == RowAxis("params/b1", 0)


def test_novograd_shares_its_norms():
    analysis = analysed(optax.novograd(0.1))
    assert {analysis.layout(v) for n, v in analysis.inputs.items() if "/nu/" in str(n)} == {SHARED}


def test_flatten_keeps_all_leaves_together():
    analysis = analysed(optax.flatten(optax.adam(0.1)))
    assert grouped(analysis) == {tuple(sorted(NAMES))}
    assert all(
        g.reason.startswith("concatenate mixes leaves of f32[5]") for g in analysis.groups.values()
    )
    assert ExchangeRounds(analysis).crossings == {}


def test_muon_keeps_each_matrix_whole_and_says_why():
    analysis = analysed(optax.contrib.muon(0.1))
    assert grouped(analysis) == {("params/w1",), ("params/w2",)}
    for group in analysis.groups.values():
        assert group.reason == "dot_general mixes rows of f32[1,5,5] (optax.contrib.scale_by_muon)"


# -- groups ----------------------------------------------------------------------------------------


def test_a_group_is_the_union_of_all_that_meet():
    """b1 meets b2, and b2 meets the columns of w1, so these three are a group. w2 is free."""

    def update(g, s, p):
        return {**g, "b1": g["b1"] + g["b2"], "b2": g["b2"] + jnp.flip(g["w1"])[0]}, s

    assert grouped(of_update(update)) == {("params/b1", "params/b2", "params/w1")}


def test_leaves_of_one_shape_added_together_are_not_rows():
    """The elementwise sum combines two leaves, whose rows may be on different servers."""
    analysis = of_update(lambda g, s, p: ({**g, "w1": g["w1"] + g["w2"]}, s))
    assert grouped(analysis) == {("params/w1", "params/w2")}
    assert analysis.groups["params/w1"].reason.startswith("add mixes leaves of f32[5,5]")


def test_a_new_parameter_made_of_rows_of_another_leaf_ties_both():
    analysis = of_update(lambda g, s, p: ({**g, "w1": p["w2"] - p["w1"] * 0, "w2": g["w2"]}, s))
    assert grouped(analysis) == {("params/w1", "params/w2")}


def test_rows_moved_to_another_axis_are_not_rows_of_the_parameter():
    analysis = of_update(lambda g, s, p: ({**g, "w1": g["w1"].T}, s))
    assert grouped(analysis) == {("params/w1",)}
    assert analysis.groups["params/w1"].reason.startswith("add mixes rows of f32[5,5]")


def test_a_scalar_leaf_is_whole_and_bound_to_nothing():
    params = {"s": jnp.ones(()), "w": jnp.ones((4, 2))}
    analysis = of_update(lambda g, s, p: (g, s), params)
    layout = analysis.layout(analysis.inputs["params/s"])
    assert layout == Colocated(frozenset({"params/s"})) and layout.reason is None
    assert analysis.groups == {}


def test_a_scalar_leaf_that_scales_another_is_sent():
    params = {"s": jnp.ones(()), "w": jnp.ones((4, 2))}
    analysis = of_update(lambda g, s, p: ({**g, "w": g["w"] * p["s"]}, s), params)
    assert analysis.groups == {}
    (crossing,) = ExchangeRounds(analysis).crossings.values()
    assert crossing.var is analysis.inputs["params/s"]
    assert (crossing.home, crossing.op, crossing.level) == ("params/s", "sum", 0)


def test_what_a_whole_leaf_is_reduced_to_is_sent():
    """w1 itself must be complete. w2 reads the norm of w1, and is sliced."""

    def update(g, s, p):
        return {**g, "w1": jnp.flip(g["w1"]), "w2": g["w2"] * jnp.sum(g["w1"])}, s

    analysis = of_update(update)
    assert grouped(analysis) == {("params/w1",)}
    (crossing,) = ExchangeRounds(analysis).crossings.values()
    assert analysis.layout(crossing.var) == Colocated(frozenset({"params/w1"}))
    assert analysis.home(analysis.layout(crossing.var)) == "params/w1"


def test_reasons_name_the_equation_the_type_and_where():
    def update(g, s, p):
        with jax.named_scope("here"):
            return {**g, "w1": jnp.cumsum(g["w1"], 0)}, s

    assert (
        of_update(update).groups["params/w1"].reason.startswith("cumsum mixes rows of f32[5,5] (")
    )


def test_layouts_join_upwards():
    a, b = RowAxis("a", 0), RowAxis("b", 0)
    assert join(SHARED, a, "x") == join(a, SHARED, "x") == join(a, a, "x") == a
    up = join(a, b, "x")
    assert up == Colocated(frozenset("ab")) and up.reason == "x depends on rows in two ways"
    assert join(Colocated(frozenset("c"), "why"), a, "x").reason == "why"
    assert leaves_of([a, SHARED, up]) == {"a", "b"}


# -- state -----------------------------------------------------------------------------------------


def test_state_layouts_come_from_what_the_state_is_made_of_not_from_names():
    analysis = of_update(
        lambda g, s, p: (g, {"b1": s["b1"] + g["w2"], "n": s["n"] + 1}),
        init=lambda p: {"b1": jnp.zeros((5, 5)), "n": jnp.zeros(())},
    )
    assert analysis.groups == {}
    assert analysis.layout(analysis.inputs["opt_state/b1"]) == RowAxis("params/w2", 0)
    assert analysis.layout(analysis.inputs["opt_state/n"]) is SHARED
    assert analysis.home(RowAxis("params/w2", 0)) == "params/w2" and analysis.home(SHARED) is None


def test_a_number_reduced_from_rows_makes_state_that_is_shared():
    analysis = of_update(
        lambda g, s, p: (g, {"norm": jnp.sum(g["w1"] ** 2)}), init=lambda p: {"norm": jnp.zeros(())}
    )
    assert analysis.groups == {}
    assert analysis.layout(analysis.outputs["opt_state/norm"]) is SHARED
    assert len(ExchangeRounds(analysis).crossings) == 1


def test_a_number_picked_from_rows_makes_state_that_lives_with_the_leaf():
    analysis = of_update(
        lambda g, s, p: (g, {"last": g["w1"][2, 1]}), init=lambda p: {"last": jnp.zeros(())}
    )
    assert grouped(analysis) == {("params/w1",)}
    assert analysis.home(analysis.layout(analysis.outputs["opt_state/last"])) == "params/w1"


def test_state_may_have_its_rows_along_another_axis():
    analysis = of_update(
        lambda g, s, p: (g, {"t": s["t"] + g["w1"].T}), init=lambda p: {"t": jnp.zeros((5, 5))}
    )
    assert analysis.groups == {}
    assert analysis.layout(analysis.inputs["opt_state/t"]) == RowAxis("params/w1", 1)


def test_state_that_swaps_places_settles():
    def update(g, s, p):
        return g, {"a": s["b"], "b": s["c"], "c": g["w1"] + s["a"]}

    analysis = of_update(update, init=lambda p: {n: jnp.zeros((5, 5)) for n in "abc"})
    assert {analysis.layout(analysis.inputs[f"opt_state/{n}"]) for n in "abc"} == {
        RowAxis("params/w1", 0)
    }


# -- primitives ------------------------------------------------------------------------------------

R = RowAxis("params/k", 0)
IOTA = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
# For `x`, the gradient of a leaf of shape (4, 2, 3): the layout of a function of `x`. If the
# function is a reduction across servers, its operation. A string is the beginning of the reason why
# the leaf is not sliced.
RULES = {
    "sin": (jnp.sin, R),
    "where": (lambda x: jnp.where(x > 0, x, 1.0), R),
    "add_of_a_table": (lambda x: x + IOTA, R),
    "mul_by_a_row": (lambda x: x * jnp.arange(3.0), R),
    "clamp": (lambda x: lax.clamp(-1.0, x, 1.0), R),
    "cast": (lambda x: x.astype(jnp.int32), R),
    "sum_of_all": (jnp.sum, "sum"),
    "sum_of_rows": (lambda x: jnp.sum(x, 0), "sum"),
    "sum_of_others": (lambda x: jnp.sum(x, (1, 2)), R),
    "sum_kept": (lambda x: jnp.sum(x, 0, keepdims=True), "sum"),
    "max": (jnp.max, "max"),
    "min": (jnp.min, "min"),
    "prod": (jnp.prod, "prod"),
    "any": (lambda x: jnp.any(x > 0), "or"),
    "all": (lambda x: jnp.all(x > 0), "and"),
    "xor": (lambda x: lax.reduce_xor(x.astype(jnp.int32), (0, 1, 2)), "xor"),
    "mean_of_rows": (lambda x: jnp.mean(x, 0), "sum"),
    "norm": (jnp.linalg.norm, "sum"),
    "argmax_of_others": (lambda x: jnp.argmax(x, 2), R),
    "argmax_of_rows": (lambda x: jnp.argmax(x, 0), {"max", "min"}),
    "argmin_of_rows": (lambda x: jnp.argmin(x, 0), {"min"}),
    "transpose": (lambda x: x.transpose(1, 0, 2), RowAxis("params/k", 1)),
    "squeeze": (lambda x: lax.squeeze(x[None, :, :1], (0, 2)), R),
    "expand": (lambda x: x[None], RowAxis("params/k", 1)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 4, 2, 3)), RowAxis("params/k", 1)),
    "ravel": (jnp.ravel, RowAxis("params/k", 0, 6)),
    "ravel_and_back": (lambda x: jnp.ravel(x).reshape(4, 3, 2), R),
    "merge_others": (lambda x: x.reshape(4, 6), R),
    "merge_with_others_before": (
        lambda x: x.transpose(1, 0, 2).reshape(8, 3),
        "reshape mixes rows",
    ),
    "split_rows": (lambda x: x.reshape(2, 2, 2, 3), "reshape mixes rows"),
    "stack": (lambda x: jnp.stack([x, x + 1]), RowAxis("params/k", 1)),
    "stack_behind": (lambda x: jnp.stack([x, x + 1], 1), R),
    "unstack": (lambda x: jnp.unstack(x, axis=1)[1], R),
    "unstack_rows": (lambda x: jnp.unstack(x)[1], "unstack mixes rows"),
    "tile": (lambda x: jnp.tile(x, (1, 2, 1)), R),
    "tile_rows": (lambda x: jnp.tile(x, (2, 1, 1)), "tile mixes rows"),
    "split": (lambda x: jnp.split(x, 3, 2)[0], R),
    "split_the_rows": (lambda x: jnp.split(x, 2)[0], "split mixes rows"),
    "concatenate": (lambda x: jnp.concatenate([x, x, jnp.ones((4, 1, 3))], 1), R),
    "concatenate_rows": (lambda x: jnp.concatenate([x, x]), "concatenate mixes rows"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), R),
    "cumsum_of_rows": (lambda x: jnp.cumsum(x, 0), "cumsum mixes rows"),
    "sort": (lambda x: jnp.sort(x, 2), R),
    "sort_rows": (lambda x: jnp.sort(x, 0), "sort mixes rows"),
    "flip": (lambda x: jnp.flip(x, 1), R),
    "flip_rows": (lambda x: jnp.flip(x, 0), "rev mixes rows"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), R),
    "pad_rows": (lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0))), "pad mixes rows"),
    "slice": (lambda x: x[:, :1], R),
    "slice_of_rows": (lambda x: x[1:], "slice mixes rows"),
    "dynamic_slice": (lambda x: lax.dynamic_slice_in_dim(x, 1, 1, 2), R),
    "dynamic_slice_of_rows": (
        lambda x: lax.dynamic_slice_in_dim(x, 1, 1, 0),
        "dynamic_slice mixes rows",
    ),
    "dynamic_update_slice": (lambda x: lax.dynamic_update_slice_in_dim(x, x[:, :1], 1, 1), R),
    "top_k": (lambda x: lax.top_k(x, 2)[0], R),
    "gather": (lambda x: x[jnp.array([2, 0])], "gather mixes rows"),
    "vdot": (lambda x: jnp.vdot(x, x), "sum"),
    "gram_of_columns": (lambda x: jnp.einsum("ijk,ijl->kl", x, x), "sum"),
    "gram_of_rows": (lambda x: jnp.einsum("ijk,ljk->il", x, x), "dot_general mixes rows"),
    "matmul": (lambda x: x @ jnp.ones((3, 5)), R),
    "matmul_from_the_left": (
        lambda x: jnp.einsum("ab,icb->aic", jnp.ones((5, 3)), x),
        RowAxis("params/k", 1),
    ),
    "batched": (lambda x: jnp.einsum("ijk,ilk->ijl", x, x), R),
    "contracted_with_shared": (lambda x: jnp.einsum("i,ijk->jk", jnp.arange(4.0), x), "sum"),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.transpose(0, 2, 1)), R),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), R),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x @ x.transpose(0, 2, 1))[0], R),
    "schur": (lambda x: lax.linalg.schur(x @ x.transpose(0, 2, 1))[0], R),
    "fft": (lambda x: jnp.fft.fft(x).real, R),
    "fft_of_rows": (lambda x: jnp.fft.fftn(x).real, "fft mixes rows"),
    "cholesky_of_rows": (lambda x: jnp.linalg.cholesky(x[:2, 0, :2]), "slice mixes rows"),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, x: x * i, x), R),
    "fori_loop_that_reduces": (
        lambda x: lax.fori_loop(0, 3, lambda i, x: x * jnp.sum(x), x),
        "scan reduces over rows",
    ),
    "scan_of_columns": (
        lambda x: lax.scan(lambda c, r: (c + r, c), x[:, 0], x.transpose(1, 0, 2))[0],
        R,
    ),
    "scan_of_rows": (
        lambda x: lax.scan(lambda c, r: (c + r, c), x[0] * 0, x)[0],
        ("slice mixes", "scan goes"),
    ),
    "while_of_a_count": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, -c[1]), (0, x))[1],
        R,
    ),
    "while_of_rows": (
        lambda x: lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: x + 1, x),
        "while reduces over rows",
    ),
    "cond": (lambda x: lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, x), {"sum"}),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_rules(name):
    fn, expected = RULES[name]
    params = {"k": jnp.ones((4, 2, 3))}
    made = jax.eval_shape(fn, params["k"])
    analysis = of_update(
        lambda g, s, p: (g, {"out": fn(g["k"])}),
        params,
        lambda p: {"out": jnp.zeros(made.shape, made.dtype)},
    )
    layout, crossings = (
        analysis.layout(analysis.outputs["opt_state/out"]),
        ExchangeRounds(analysis).crossings.values(),
    )
    if isinstance(expected, RowAxis):
        assert layout == expected
        assert not analysis.groups and not crossings
    elif isinstance(expected, set):
        assert {c.op for c in crossings} == expected
        assert not analysis.groups
    elif expected in ("sum", "max", "min", "prod", "and", "or", "xor"):
        assert layout is SHARED
        assert [c.op for c in crossings] == [expected]
        assert not analysis.groups
    else:
        assert analysis.groups["params/k"].reason.startswith(expected), analysis.groups[
            "params/k"
        ].reason


def test_rows_of_matrices_need_not_be_their_first_axis():
    """The Gram matrix of a transposed matrix has rows again, and is summed over servers."""
    params = {"w": jnp.ones((4, 3))}
    analysis = of_update(lambda g, s, p: ({"w": g["w"] @ (g["w"].T @ p["w"])}, s), params)
    assert analysis.groups == {}
    assert [c.op for c in ExchangeRounds(analysis).crossings.values()] == ["sum"]


# -- branches and argmax ---------------------------------------------------------------------------


def conds(analysis):
    return [e for e in analysis.half.jaxpr.jaxpr.eqns if e.primitive.name == "cond"]


def test_a_branch_over_all_leaves_is_taken_apart():
    def update(g, s, p):
        return lax.cond(
            s["count"] % 2 == 0,
            lambda g, n: (g, n + 1),
            lambda g, n: (jax.tree.map(jnp.negative, g), n + 2),
            g,
            s["count"],
        )[0], {"count": s["count"] + 1}

    analysis = of_update(update, init=lambda p: {"count": jnp.zeros((), jnp.int32)})
    assert analysis.groups == {}
    assert [len(e.outvars) for e in conds(analysis)] == [1] * len(NAMES)
    assert {analysis.layout(e.outvars[0]) for e in conds(analysis)} == {
        RowAxis(n, 0) for n in NAMES
    }


def test_a_branch_that_reduces_is_computed_on_both_sides():
    def update(g, s, p):
        norm = lambda g: jnp.sqrt(sum(jnp.sum(x**2) for x in g.values()))
        return lax.cond(
            s["count"] % 2 == 0, lambda g: jax.tree.map(lambda x: x / norm(g), g), lambda g: g, g
        ), {"count": s["count"] + 1}

    analysis = of_update(update, init=lambda p: {"count": jnp.zeros((), jnp.int32)})
    assert analysis.groups == {}
    assert not conds(analysis) and primitives(analysis).count("select_n") >= len(NAMES)
    assert {c.op for c in ExchangeRounds(analysis).crossings.values()} == {"sum"}


def test_a_branch_within_a_branch_is_taken_apart_too():
    def update(g, s, p):
        inner = lambda g: lax.cond(
            s["count"] > 3, lambda g: g, lambda g: jax.tree.map(jnp.sin, g), g
        )
        return lax.cond(s["count"] % 2 == 0, inner, lambda g: g, g), {"count": s["count"] + 1}

    analysis = of_update(update, init=lambda p: {"count": jnp.zeros((), jnp.int32)})
    assert analysis.groups == {}
    assert [len(e.outvars) for e in conds(analysis)] == [1] * len(NAMES)
    for eqn in conds(analysis):
        nested = [
            e for b in eqn.params["branches"] for e in equations(b) if e.primitive.name == "cond"
        ]
        assert [len(e.outvars) for e in nested] == [1]


def test_a_branch_that_mixes_two_leaves_binds_these_only():
    def update(g, s, p):
        made = lax.cond(s["count"] > 0, lambda g: {**g, "w1": g["w1"] + g["w2"]}, lambda g: g, g)
        return made, {"count": s["count"] + 1}

    analysis = of_update(update, init=lambda p: {"count": jnp.zeros((), jnp.int32)})
    assert grouped(analysis) == {("params/w1", "params/w2")}


def test_a_loop_is_divided_into_what_is_shared_and_what_has_rows():
    def update(g, s, p):
        w, n = lax.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1] + i), (g["w1"], s["count"]))
        return {**g, "w1": w}, {"count": n}

    analysis = of_update(update, init=lambda p: {"count": jnp.zeros((), jnp.int32)})
    assert analysis.groups == {}
    assert analysis.layout(analysis.outputs["opt_state/count"]) is SHARED
    assert primitives(analysis).count("scan") == 2


@pytest.mark.parametrize("fn", [jnp.argmax, jnp.argmin], ids=["argmax", "argmin"])
@pytest.mark.parametrize(
    "column",
    [
        [1.0, 3.0, 2.0, 3.0],
        [-1.0, -1.0, -1.0, -1.0],
        [np.nan, 1.0, 2.0, 3.0],
        [1.0, 5.0, np.nan, np.nan],
        [np.inf, -np.inf, np.inf, -np.inf],
        [0.0, -0.0, 0.0, -0.0],
    ],
    ids=str,
)
def test_argmax_over_rows_becomes_reductions_with_the_same_answer(fn, column):
    """Return the first of equal entries. NaN precedes all numbers."""
    x = jnp.asarray(column)
    analysis = of_update(
        lambda g, s, p: (g, {"at": fn(g["b"])}),
        {"b": x},
        lambda p: {"at": jnp.zeros((), jnp.int32)},
    )
    assert analysis.groups == {}
    assert not {"argmax", "argmin"} & set(primitives(analysis))
    jaxpr = analysis.half.jaxpr
    given = [x if v.aval.ndim else jnp.zeros((), v.aval.dtype) for v in jaxpr.jaxpr.invars]
    outs = dict(
        zip(
            analysis.half.out_names,
            jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *given),
            strict=True,
        )
    )
    assert outs["opt_state/at"] == fn(x)
    assert outs["opt_state/at"].dtype == fn(x).dtype
