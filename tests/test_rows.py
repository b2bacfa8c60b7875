"""Row analysis: which layout each value of an optimize half gets, which leaves may be cut, which must stay
together, and the reasons that are given. That cutting so is right is shown by numbers in `test_shards`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params

import dtrans
from dtrans.cut import GRAD, cut
from dtrans.rows import SHARED, Mixed, Rows, analyse


PARAMS = mlp_params((5, 5, 5))  # two layers of equal shapes
NAMES = {f"params/{n}" for n in PARAMS}


def analysed(tx, params=PARAMS, loss=mlp_loss, batch=None):
    batch = mlp_batch(4, (5, 5, 5)) if batch is None else batch
    program = dtrans.trace(dtrans.make_train_step(loss, tx), params, jax.eval_shape(tx.init, params), *batch)
    done = cut(program)
    return analyse(done.optimize, done.optimized)


def grouped(analysis):
    return {g.leaves for g in analysis.groups.values()}


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
    for leaf in NAMES:
        assert analysis.layout(analysis.inputs[leaf + GRAD]) == Rows(leaf, 0)
        assert analysis.layout(analysis.outputs[leaf]) == Rows(leaf, 0)
    for state, var in analysis.inputs.items():
        if state.startswith("opt_state"):
            of = [leaf for leaf in NAMES if "hyperparams" not in state and state.endswith(leaf.removeprefix("params"))]
            assert analysis.layout(var) == (Rows(of[0], 0) if of else SHARED), state


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        optax.apply_if_finite(optax.sgd(0.1), 2),
        optax.flatten(optax.adam(0.1)),
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.novograd(0.1),  # its first step is another branch of one cond over all leaves
    ],
    ids=["clip_by_global_norm", "apply_if_finite", "flatten", "multi_steps", "novograd"],
)
def test_what_reads_all_leaves_keeps_them_together(tx):
    analysis = analysed(tx)
    assert grouped(analysis) == {tuple(sorted(NAMES))}
    assert all(g.reason for g in analysis.groups.values())


@pytest.mark.parametrize(
    "tx,kept",
    [
        (optax.lamb(0.1), NAMES),
        (optax.lars(0.1), NAMES),
        (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), NAMES),
        (optax.contrib.muon(0.1), {"params/w1", "params/w2"}),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), NAMES),
    ],
    ids=["lamb", "lars", "adaptive_grad_clip", "muon", "adafactor"],
)
def test_what_reads_a_whole_leaf_keeps_that_leaf_whole_and_alone(tx, kept):
    analysis = analysed(tx)
    assert set(analysis.groups) == kept
    assert grouped(analysis) == {(leaf,) for leaf in kept}


def test_centralizing_sums_over_rows_or_not_by_leaf():
    """optax.centralize takes the mean over all axes but the last, of matrices only."""
    assert set(analysed(optax.chain(optax.centralize(), optax.sgd(0.1))).groups) == {"params/w1", "params/w2"}


def test_reasons_name_the_equation_and_the_type():
    groups = analysed(optax.lamb(0.1)).groups
    assert groups["params/w1"].reason.startswith("reduce_sum mixes rows of f32[5,5]")
    assert groups["params/b1"].reason.startswith("reduce_sum mixes rows of f32[5]")


def test_a_group_is_the_union_of_all_that_meet():
    """b1 with w1, and w1 with w2, make one group; b2 is free."""

    def update(g, s, p):
        return {**g, "w1": g["w1"] * jnp.sum(g["b1"]), "w2": g["w2"] + jnp.sum(g["w1"])}, s

    analysis = analysed(optax.GradientTransformation(lambda p: (), update))
    assert grouped(analysis) == {("params/b1", "params/w1", "params/w2")}


def test_leaves_of_one_shape_added_together_are_not_rows():
    """Element by element, but of two leaves: their rows need not be on one server."""
    analysis = analysed(optax.GradientTransformation(lambda p: (), lambda g, s, p: ({**g, "w1": g["w1"] + g["w2"]}, s)))
    assert grouped(analysis) == {("params/w1", "params/w2")}
    assert "mixes leaves of f32[5,5]" in analysis.groups["params/w1"].reason


def test_a_new_parameter_made_of_rows_of_another_leaf_ties_both():
    def update(g, s, p):
        return {**g, "w1": p["w2"] - p["w1"] * 0, "w2": g["w2"]}, s

    assert grouped(analysed(optax.GradientTransformation(lambda p: (), update))) == {("params/w1", "params/w2")}


def test_rows_moved_to_another_axis_are_not_rows():
    analysis = analysed(optax.GradientTransformation(lambda p: (), lambda g, s, p: ({**g, "w1": g["w1"].T}, s)))
    assert set(analysis.groups) == {"params/w1"}
    assert analysis.groups["params/w1"].reason.startswith("transpose mixes rows of f32[5,5]")


def test_a_scalar_leaf_is_mixed_without_a_reason():
    params = {"s": jnp.ones(()), "w": jnp.ones((4, 2))}
    analysis = analysed(optax.adam(0.1), params, lambda p, x: jnp.sum(p["w"]) * p["s"] * x, (jnp.ones(()),))
    assert analysis.groups["params/s"].reason is None
    assert analysis.layout(analysis.inputs["params/s"]) == Mixed(frozenset({"params/s"}))
    assert "params/w" not in analysis.groups


def test_a_scalar_leaf_that_scales_another_ties_both():
    params = {"s": jnp.ones(()), "w": jnp.ones((4, 2))}
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p: ({**g, "w": g["w"] * p["s"]}, s))
    analysis = analysed(tx, params, lambda p, x: jnp.sum(p["w"]) * p["s"] * x, (jnp.ones(()),))
    assert grouped(analysis) == {("params/s", "params/w")}


def test_state_layouts_come_from_what_the_state_is_made_of_not_from_names():
    tx = optax.GradientTransformation(
        lambda p: {"b1": jnp.zeros((5, 5)), "n": jnp.zeros(())},
        lambda g, s, p: (g, {"b1": s["b1"] + g["w2"], "n": s["n"] + 1}),
    )
    analysis = analysed(tx)
    assert analysis.groups == {}
    assert analysis.layout(analysis.inputs["opt_state/b1"]) == Rows("params/w2", 0)
    assert analysis.layout(analysis.inputs["opt_state/n"]) == SHARED
    assert analysis.owners(Rows("params/w2", 0)) == ("params/w2",) and analysis.owners(SHARED) == ()


def test_a_number_taken_from_rows_makes_state_that_lives_with_the_leaf():
    tx = optax.GradientTransformation(
        lambda p: {"norm": jnp.zeros(())}, lambda g, s, p: (g, {"norm": jnp.sum(g["w1"] ** 2)})
    )
    analysis = analysed(tx)
    assert grouped(analysis) == {("params/w1",)}
    assert analysis.owners(analysis.layout(analysis.outputs["opt_state/norm"])) == ("params/w1",)
