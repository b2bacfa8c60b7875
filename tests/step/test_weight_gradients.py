"""Products whose result is transposed next are computed with swapped operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans._jax import jaxpr_as_fun
from dtrans.ir.builder import Builder
from dtrans.step.weight_gradients import fuse_transposes


def straight(fn, *args):
    """Return (the jaxpr of a function, its result, the names of its equations)."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    inner = jaxpr.jaxpr
    eqns, _ = fuse_transposes(inner.eqns, ["backward"] * len(inner.eqns), inner.outvars)
    b = Builder(jaxpr)
    b.invars += inner.invars
    for e in eqns:
        b.keep(e)
    return jaxpr, b.build(inner.outvars), [e.primitive.name for e in eqns]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [None, "highest", ("default", "highest")])
@pytest.mark.parametrize(
    ("first", "second", "contracting", "permutation"),
    [
        ((3, 4), (3, 5), ((0,), (0,)), (1, 0)),
        ((2, 3, 4), (2, 3, 5, 6), ((0, 1), (0, 1)), (1, 2, 0)),
    ],
)
def test_a_transposed_product_is_a_product_the_other_way_round(
    first, second, contracting, permutation, precision
):
    def fn(x, y):
        made = jax.lax.dot_general(x, y, (contracting, ((), ())), precision=precision)
        return jax.lax.transpose(made, permutation)

    x, y = (jax.random.normal(jax.random.key(len(s)), s) for s in (first, second))
    jaxpr, other, names = straight(fn, x, y)
    assert names == ["dot_general"]
    for a, b in zip(jaxpr_as_fun(jaxpr)(x, y), jaxpr_as_fun(other)(x, y), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (lambda p: (p.T, p + 1))(jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))),
        lambda x, y: (lambda p: (p.T, p))(jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))),
        lambda x, y: jnp.einsum("bi,bj->bij", x, y).transpose(0, 2, 1),
        lambda x, y: jax.lax.dot_general(x, y[:, :, None], (((0,), (0,)), ((), ()))).transpose(
            2, 1, 0
        ),
    ],
    ids=["read elsewhere as well", "wanted", "batched", "another permutation"],
)
def test_other_products_stay(fn):
    x, y = (
        jax.random.normal(jax.random.key(0), (3, 4)),
        jax.random.normal(jax.random.key(1), (3, 5)),
    )
    jaxpr, other, names = straight(fn, x, y)
    assert names == [e.primitive.name for e in jaxpr.jaxpr.eqns]
    for a, b in zip(jaxpr_as_fun(jaxpr)(x, y), jaxpr_as_fun(other)(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_gradients_of_weights_are_not_transposed(stage):
    tx = optax.sgd(0.1)
    step = dtrans.make_train_step(
        lambda params, x: jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"]), tx
    )
    init = lambda key: (p := {n: jax.random.normal(key, (64, 64)) for n in "ab"}, tx.init(p))
    key, x = jax.random.key(0), jnp.ones((8, 64))
    main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
    assert "transpose" in [op.type for op in main.ops]
    plan = dtrans.sharding(main, startup, stage=stage, degree=2)
    assert "transpose" not in [op.type for op in plan.program.ops]
