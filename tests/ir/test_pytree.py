"""Pytrees: flattening, names from paths, static leaves, and errors for another structure."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import dtrans
from dtrans.errors import BatchError, TraceError
from dtrans.ir.pytree import (
    Static,
    TreeSpec,
    as_array,
    check_integers,
    combine,
    is_array,
    is_differentiable,
    join_path,
    partition,
    without,
)


class Pair(NamedTuple):
    left: object
    right: object


def test_paths_become_names():
    tree = {"dense": Pair(np.ones(2), [np.ones(3), np.ones(())])}
    assert TreeSpec.from_tree(tree, "params").names == (
        "params/dense/left",
        "params/dense/right/0",
        "params/dense/right/1",
    )
    assert TreeSpec.from_tree(tree).names == ("dense/left", "dense/right/0", "dense/right/1")
    assert TreeSpec.from_tree(np.ones(2), "x").names == ("x",)
    assert TreeSpec.from_tree(np.ones(2)).names == ("value",)
    assert join_path("", ()) == ""


def test_flax_parameters_are_named_by_layer():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="out")(nn.relu(nn.Dense(3, name="in")(x)))

    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4)))
    assert TreeSpec.from_tree(params["params"], "params").names == (
        "params/in/bias", "params/in/kernel", "params/out/bias", "params/out/kernel"
    )  # fmt: skip


def test_functions_and_numbers_of_an_equinox_module_are_static():
    net = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    spec = TreeSpec.from_tree(net, "params")
    assert spec.names == (
        "params/layers/0/weight",
        "params/layers/0/bias",
        "params/layers/1/weight",
        "params/layers/1/bias",
    )
    assert any(isinstance(leaf, Static) and leaf.value is net.activation for leaf in spec.leaves)
    arrays = spec.flatten(net)
    assert [a.shape for a in arrays] == [(3, 2), (3,), (1, 3), (1,)]
    again = spec.unflatten([a + 1 for a in arrays])
    assert again.activation is net.activation
    assert jnp.array_equal(again.layers[1].bias, net.layers[1].bias + 1)


def test_another_structure_is_refused_with_both():
    spec = TreeSpec.from_tree({"a": np.ones(1)}, "p")
    with pytest.raises(
        TraceError,
        match=r"argument 0 does not have the structure .*:\n  traced PyTreeDef\(\{'a': \*\}\)\n  now    "
        r"PyTreeDef\(\[\*\]\)",
    ):
        spec.flatten([np.ones(1)], "argument 0")


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (["a", "b"], BatchError, "^b/x is a list of text; a step takes arrays of numbers, so conv"),
        ("a", BatchError, "^b/x is text; a step takes arrays of numbers, so convert b/x$"),
        ([1, 2], TraceError, r": b/x is a list, expected an array; convert it, .* by np.asarray\("),
        ({"y": 1}, TraceError, "^argument 1 does not .*: b/x is a dict, expected an array; pass"),
        (None, TraceError, ": b/x is None, expected an array; pass an array$"),
    ],
    ids=str,
)
def test_a_leaf_that_is_no_array_is_named(part, error, message):
    spec = TreeSpec.from_tree({"w": np.ones(1), "x": np.ones(2)}, "b")
    with pytest.raises(error, match=message):
        spec.flatten({"w": np.ones(1), "x": part}, "argument 1")


def test_a_changed_static_leaf_is_refused():
    spec = TreeSpec.from_tree({"a": np.ones(1), "rate": 0.5})
    assert len(spec.flatten({"a": np.ones(1), "rate": 0.5})) == 1
    with pytest.raises(
        TraceError,
        match="argument contains 0.25, but was traced with 0.5 at this position. Leaves that are "
        "not arrays are fixed",
    ):
        spec.flatten({"a": np.ones(1), "rate": 0.25})
    with pytest.raises(TraceError, match="contains 1, but was traced with True"):
        TreeSpec.from_tree([True]).flatten([1])


TREES = st.recursive(
    st.one_of(
        st.builds(lambda n: np.arange(float(n)), st.integers(0, 3)),
        st.integers(),
        st.text(max_size=2),
        st.none(),
    ),
    lambda x: st.one_of(
        st.lists(x, max_size=3),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), x, max_size=3),
        st.builds(Pair, x, x),
    ),
    max_leaves=8,
)


@given(TREES)
def test_unflatten_is_the_inverse_of_flatten(tree):
    spec = TreeSpec.from_tree(tree, "t")
    arrays = spec.flatten(tree)
    assert len(arrays) == len(spec.names) == len(set(spec.names))
    again = spec.unflatten(arrays)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


@given(TREES)
def test_combine_is_the_inverse_of_partition(tree):
    kept, others = partition(tree, is_array)
    assert all(is_array(x) for x in jax.tree.leaves(kept))
    assert not any(is_array(x) for x in jax.tree.leaves(others))
    again = combine(kept, others)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


def test_only_floating_and_complex_arrays_are_differentiable():
    assert is_differentiable(jnp.ones(1, jnp.bfloat16)) and is_differentiable(
        jnp.ones(1, jnp.complex64)
    )
    assert not any(
        map(
            is_differentiable,
            (jnp.ones(1, jnp.int32), np.ones(1, bool), jax.random.key(0), 1.0, None, "x"),
        )
    )


def test_python_numbers_become_arrays_and_the_rest_stays():
    assert as_array(2).dtype == jnp.int32 and as_array(np.float32(1)).shape == ()
    array = np.ones(2)
    assert as_array(array) is array and as_array("x") == "x" and as_array(None) is None


@pytest.mark.parametrize(
    "whole,place,left",
    [
        ((np.ones(1), {"m": np.ones(2)}, np.ones(())), 1, 2),
        ([{"m": np.ones(2)}, np.ones(1)], 0, 1),
        ({"opt": {"m": np.ones(2)}, "p": np.ones(1)}, "opt", 1),
    ],
)
def test_without_drops_one_part(whole, place, left):
    names = dict(enumerate("pol")) | {
        0: "opt_state" if place == 0 else "params",
        1: "opt_state" if place == 1 else "x",
    }
    children = whole.items() if isinstance(whole, dict) else enumerate(whole)
    leaves = []
    for key, child in children:
        leaves += TreeSpec.from_tree(
            child, "opt_state" if key == place else names.get(key, str(key))
        ).leaves
    spec = TreeSpec(jax.tree.structure(whole), tuple(leaves))
    got = without(spec, TreeSpec.from_tree({"m": np.ones(2)}, "opt_state"))
    assert not any("opt_state" in n for n in got.names)
    assert len(got.names) == left
    assert type(jax.tree.unflatten(got.treedef, got.leaves)) is type(whole)


def test_without_leaves_none_in_a_namedtuple():
    whole = Pair(np.ones(1), {"m": np.ones(2)})
    spec = TreeSpec(jax.tree.structure(whole), ("params", "opt_state/m"))
    got = without(spec, TreeSpec.from_tree({"m": np.ones(2)}, "opt_state"))
    assert got.unflatten([7]) == Pair(7, None)


def test_without_an_optimizer_state_that_holds_nothing():
    whole = (np.ones(1), (), np.ones(()))
    spec = TreeSpec(jax.tree.structure(whole), ("params", "loss"))
    assert without(spec, TreeSpec.from_tree((), "opt_state")).unflatten([1, 2]) == (1, 2)


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**40])
def test_integers_that_jax_would_cut_are_refused_on_the_host(bad: int) -> None:
    """Pass the batch in every possible way. The error names the leaf and the position."""
    ids = np.zeros((4, 2), np.int64)
    ids[2, 1] = bad
    params = {"table": jnp.ones((8, 3))}
    tx = optax.sgd(0.1)
    step = dtrans.make_train_step(lambda p, b: jnp.mean(p["table"][b["ids"]] ** 2), tx)
    init = lambda p: (p, tx.init(p))
    main, startup = dtrans.trace(step, *init(params), {"ids": 0 * ids}), dtrans.trace(init, params)
    message = rf"b/ids\[2, 1\] is {bad}, which does not fit in int32, the dtype that JAX uses"
    for plan in (
        dtrans.pserver(main, startup, trainers=2),
        dtrans.nccl2(main, startup, trainers=2),
    ):
        job = plan.on_mesh()
        state = job.init(params)
        with pytest.raises(BatchError, match=message):
            job.step(state, {"ids": ids})
        job.step(state, {"ids": 0 * ids})
    with pytest.raises(BatchError, match=message):
        main(*init(params), {"ids": ids})
    with pytest.raises(BatchError, match=message):
        dtrans.trace(step, *init(params), {"ids": ids})
    with dtrans.Executor() as exe, pytest.raises(BatchError, match=message):
        exe.run(main, *init(params), {"ids": ids})


def test_integers_of_64_bits_pass_where_they_fit() -> None:
    ids = np.array([2**31 - 1, -(2**31), 5])
    spec = TreeSpec.from_tree(ids, "ids")
    assert spec.flatten(ids)[0] is ids
    assert spec.flatten(np.zeros((0,), np.int64))[0].shape == (0,)
    with pytest.raises(BatchError, match=r"^ids is 4294967296, which does not fit in uint32"):
        TreeSpec.from_tree(np.uint64(1), "ids").flatten(as_array(np.uint64(2**32)))
    with jax.enable_x64(True):
        check_integers("ids", np.array([2**40]))
