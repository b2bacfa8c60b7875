"""Marks of gradients.

`dtrans.value_and_grad` equals `jax.value_and_grad`, plus an equation that survives every
transformation of JAX and disappears in lowering. `dtrans.make_train_step` returns the usual step.
"""

from __future__ import annotations

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import (
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    quick,
    tree_close,
    tree_equal,
)

import dtrans
from dtrans._jax import equations, lowered_jaxpr
from dtrans.errors import GradientError
from dtrans.step.marks import mark_p


PARAMS = mlp_params()
BATCH = mlp_batch()


def marks(fn, *args):
    """Return the leaves that the marks in a function name, also in bodies."""
    return sorted(
        e.params["leaf"] for e in equations(lowered_jaxpr(fn, *args)) if e.primitive is mark_p
    )


# -- value_and_grad --------------------------------------------------------------------------------


def test_it_is_jax_value_and_grad():
    tree_equal(
        quick(dtrans.value_and_grad(mlp_loss))(PARAMS, *BATCH),
        quick(jax.value_and_grad(mlp_loss))(PARAMS, *BATCH),
    )
    tree_close(
        dtrans.value_and_grad(mlp_loss)(PARAMS, *BATCH),
        jax.value_and_grad(mlp_loss)(PARAMS, *BATCH),
        1e-6,
    )


def test_each_leaf_has_one_mark():
    assert marks(dtrans.value_and_grad(mlp_loss), PARAMS, *BATCH) == ["b1", "b2", "w1", "w2"]
    assert marks(dtrans.value_and_grad(lambda w: w * w), 3.0) == [""]


@pytest.mark.parametrize("argnums", [0, 1, (0,), (1, 0), [0, 1]])
def test_argnums(argnums):
    fn = lambda a, b, scale: jnp.sum(jnp.sin(a["x"]) * b) * scale
    args = ({"x": jnp.arange(3.0)}, jnp.ones(3), 2.0)
    want = jax.value_and_grad(fn, argnums=tuple(argnums) if isinstance(argnums, list) else argnums)(
        *args
    )
    tree_close(dtrans.value_and_grad(fn, argnums=argnums)(*args), want, 1e-6)


def test_has_aux_and_keyword_arguments():
    fn = lambda p, x, *, power=1: (jnp.sum(p * x) ** power, {"seen": x})
    got = dtrans.value_and_grad(fn, has_aux=True)(jnp.ones(3), jnp.arange(3.0), power=3)
    tree_close(
        got, jax.value_and_grad(fn, has_aux=True)(jnp.ones(3), jnp.arange(3.0), power=3), 1e-6
    )


def test_leaves_that_cannot_be_differentiated_are_held_still():
    params = {"f": jnp.tanh, "n": jnp.arange(3), "w": jnp.ones(3)}
    value, grads = dtrans.value_and_grad(lambda p: jnp.sum(p["f"](p["w"]) * p["n"]))(params)
    assert float(value) == pytest.approx(3 * float(jnp.tanh(1.0)))
    assert grads["f"] is None and grads["n"] is None
    tree_close(
        grads["w"], jax.grad(lambda w: jnp.sum(jnp.tanh(w) * jnp.arange(3)))(jnp.ones(3)), 1e-6
    )


def test_nothing_to_differentiate_is_refused():
    with pytest.raises(
        GradientError, match="argument 0 of count has no floating-point array; argnums must name"
    ):

        def count(n):
            return n.sum()

        dtrans.value_and_grad(count)({"n": jnp.arange(3)}["n"])


def test_the_function_keeps_its_name_and_signature():
    wrapped = dtrans.value_and_grad(mlp_loss)
    assert wrapped.__name__ == "mlp_loss" and inspect.signature(wrapped) == inspect.signature(
        mlp_loss
    )


# -- marks under JAX's transformations -------------------------------------------------------------


def grads_of(params, x, y):
    return dtrans.value_and_grad(mlp_loss)(params, x, y)[1]


def plain_grads(params, x, y):
    return jax.grad(mlp_loss)(params, x, y)


def under_jit(g):
    return jax.jit(g)


def under_vmap(g):
    return lambda p, x, y: jax.vmap(g, (None, 0, 0))(p, x[:, None], y[:, None])


def under_vmap_of_params(g):
    return lambda p, x, y: jax.vmap(g, (0, None, None))(
        jax.tree.map(lambda a: jnp.stack([a, a + 1]), p), x, y
    )


def under_scan(g):
    return lambda p, x, y: jax.lax.scan(
        lambda c, xy: (jax.tree.map(jnp.add, c, g(p, *xy)), None), p, (x[:, None], y[:, None])
    )[0]


def under_remat(g):
    return jax.checkpoint(g)


def under_cond(g):
    return lambda p, x, y: jax.lax.cond(x[0, 0] > 0, g, lambda p, x, y: p, p, x, y)


def under_grad(g):
    return jax.grad(lambda p, x, y: sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(g(p, x, y))))


def under_jvp(g):
    return lambda p, x, y: jax.jvp(lambda p: g(p, x, y), (p,), (p,))


@pytest.mark.parametrize(
    "wrap",
    [
        under_jit,
        under_vmap,
        under_vmap_of_params,
        under_scan,
        under_remat,
        under_cond,
        under_grad,
        under_jvp,
    ],
)
def test_marks_survive(wrap):
    marked = wrap(grads_of)
    assert set(marks(marked, PARAMS, *BATCH)) == {"b1", "b2", "w1", "w2"}
    tree_close(quick(marked)(PARAMS, *BATCH), quick(wrap(plain_grads))(PARAMS, *BATCH), 1e-6)


def test_tangents_pass_unmarked():
    jaxpr = jax.make_jaxpr(lambda p: jax.jvp(lambda p: grads_of(p, *BATCH), (p,), (p,))[1])(PARAMS)
    outs = set(jaxpr.jaxpr.outvars)
    assert not any(set(e.outvars) & outs for e in jaxpr.jaxpr.eqns if e.primitive is mark_p)


def test_marks_vanish_in_lowering():
    marked, plain = (jax.jit(f).lower(PARAMS, *BATCH).as_text() for f in (grads_of, plain_grads))
    assert "gradient" not in marked
    count = lambda text: sum(" = stablehlo." in line for line in text.splitlines())
    assert count(marked) == count(plain) > 0


# -- make_train_step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)),
    ],
)
def test_it_is_the_step_that_everybody_writes(tx):
    batches = [mlp_batch(seed=s) for s in range(3)]
    args = (PARAMS, tx.init(PARAMS), batches)
    tree_equal(
        plain_run(dtrans.make_train_step(mlp_loss, tx), *args),
        plain_run(plain_step(mlp_loss, tx), *args),
    )


def test_aux_is_returned_after_the_loss():
    fn = lambda params, x, y: (mlp_loss(params, x, y), {"rows": x.shape[0], "mean": y.mean()})
    tx = optax.sgd(0.1)
    params, state, loss, aux = dtrans.make_train_step(fn, tx, has_aux=True)(
        PARAMS, tx.init(PARAMS), *BATCH
    )
    assert aux["rows"] == 8 and float(aux["mean"]) == float(BATCH[1].mean())
    tree_close(
        (params, state, loss), plain_step(mlp_loss, tx)(PARAMS, tx.init(PARAMS), *BATCH), 1e-6
    )


def test_parameters_keep_their_dtype():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = optax.chain(
        optax.sgd(0.1),
        optax.stateless(lambda u, p: jax.tree.map(lambda x: x.astype(jnp.float32), u)),
    )
    got = quick(dtrans.make_train_step(mlp_loss, tx))(params, tx.init(params), *BATCH)
    want = quick(plain_step(mlp_loss, tx))(params, tx.init(params), *BATCH)
    assert {p.dtype for p in jax.tree.leaves(got[0])} == {jnp.dtype(jnp.bfloat16)}
    tree_equal(got[0], want[0])


def test_integers_and_functions_among_the_parameters():
    net = (eqx.nn.MLP(5, 3, 4, 0, key=jax.random.key(0)), {"steps": jnp.arange(2)})
    loss = lambda params, x, y: (
        jnp.mean((jax.vmap(params[0])(x) - y) ** 2) + params[1]["steps"].sum()
    )
    tx = optax.adam(1e-2)
    state = tx.init(eqx.filter(net, eqx.is_inexact_array))
    got, new_state, value = eqx.filter_jit(dtrans.make_train_step(loss, tx))(net, state, *BATCH)
    want_value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(net, *BATCH)
    updates, want_state = tx.update(grads, state, eqx.filter(net, eqx.is_inexact_array))
    want = eqx.apply_updates(net, updates)
    assert got[0].activation is net[0].activation and jnp.array_equal(
        got[1]["steps"], net[1]["steps"]
    )
    tree_close(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array), 1e-6)
    tree_close((new_state, value), (want_state, want_value), 1e-6)


def test_an_optimizer_may_leave_a_leaf_without_an_update():
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p: ({**g, "b1": None}, s))
    params, _, _ = dtrans.make_train_step(mlp_loss, tx)(PARAMS, (), *BATCH)
    assert params["b1"] is PARAMS["b1"] and not jnp.array_equal(params["w1"], PARAMS["w1"])


def test_the_batch_keeps_the_names_of_the_loss():
    step = dtrans.make_train_step(mlp_loss, optax.sgd(0.1))
    assert list(inspect.signature(step).parameters) == ["params", "opt_state", "x", "y"]
    p = dtrans.trace(step, PARAMS, optax.sgd(0.1).init(PARAMS), *BATCH)
    assert p.in_names[-2:] == ("x", "y") and p.name == "step"
    several = dtrans.make_train_step(lambda p, /, image, *more: jnp.sum(p), optax.sgd(0.1))
    assert list(inspect.signature(several).parameters) == ["params", "opt_state", "image", "more"]


def test_a_batch_argument_called_as_the_state_is_refused():
    with pytest.raises(
        GradientError, match="a batch argument of loss_fn is called params or opt_state"
    ):
        dtrans.make_train_step(lambda p, opt_state: 0.0, optax.sgd(0.1))


def test_a_loss_without_argument_names_has_a_batch():
    def loss(*args):
        params, x = args
        return jnp.mean((x @ params["w"]) ** 2)

    tx = optax.sgd(0.1)
    params = {"w": jnp.ones((3, 2))}
    program = dtrans.trace(
        dtrans.make_train_step(loss, tx), params, tx.init(params), jnp.ones((4, 3))
    )
    assert program.in_names == ("params/w", "batch/0")


@pytest.mark.parametrize(
    "tx,who,what",
    [
        (optax.polyak_sgd(0.1), "scale_by_polyak", "'value'"),
        (optax.lbfgs(0.1), "scale_by_zoom_linesearch", "'value', 'grad', and 'value_fn'"),
        (optax.contrib.momo(0.1), "momo", "'value'"),
        (optax.contrib.sophia(0.1), "hutchinson", "obj_fn"),
        (
            optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.5), opaque_mode=True),
            "opaque_mode=True",
            "grad_fn",
        ),
    ],
    ids=["polyak", "lbfgs", "momo", "sophia", "sam"],
)
def test_optimizers_that_must_be_told_the_loss_are_refused_by_name(tx, who, what):
    params = mlp_params()
    step = dtrans.make_train_step(mlp_loss, tx)
    with pytest.raises(
        dtrans.errors.OptimizerError,
        match=f"{who} needs {what} in its update.*use an optimizer that",
    ):
        dtrans.trace(step, params, jax.eval_shape(tx.init, params), *mlp_batch())


def test_other_errors_of_an_optimizer_come_through_as_they_are():
    def update(grads, state, params):
        raise TypeError("no idea")

    params = mlp_params()
    step = dtrans.make_train_step(mlp_loss, optax.GradientTransformation(lambda p: (), update))
    with pytest.raises(TypeError, match="^no idea$"):
        step(params, (), *mlp_batch())


def test_an_optimizer_that_takes_rows_for_examples_is_refused():
    tx = optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0)
    params = {"w": jnp.ones((4, 3))}
    step = dtrans.make_train_step(lambda params, x: jnp.mean(x @ params["w"]), tx)
    with pytest.raises(
        dtrans.errors.OptimizerError,
        match=r"update of params/w has shape \(3,\), but the parameter has shape \(4, 3\)",
    ):
        step(params, tx.init(params), jnp.ones((2, 4)))
