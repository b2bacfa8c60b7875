"""The overview of the servers' state: each row names an array of the step, and a part of this
array.

The tests compare it with values in which every element differs. They also check bytes, balance, and
other dispatchers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import endpoints, evaluate, init_of, start_servers

import dtrans
from dtrans import HashName, RoundRobin, SizeBalanced, VarDistributed, VarsDistributed
from dtrans.errors import ConfigError
from dtrans.parameter_server.overview import overview_of
from dtrans.parameter_server.placement import dispatched
from dtrans.rows.slices import Slice
from dtrans.slicing.server_update import ServerVariable


SHAPES = {"b": (7,), "scalar": (), "table": (11, 4), "w": (9, 3, 2)}
FROZEN = {"b": "adam", "scalar": "sgd", "table": "still", "w": "momentum"}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "a global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "sums over rows and columns": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "scalars of leaves": optax.lamb(0.1),
    "whole matrices": optax.contrib.muon(0.1),
    "an optimizer for each leaf, one frozen": optax.multi_transform(
        {
            "adam": optax.adam(0.1),
            "sgd": optax.sgd(0.1),
            "momentum": optax.sgd(0.1, momentum=0.9),
            "still": optax.set_to_zero(),
        },
        FROZEN,
    ),
}


def distinct(tree: Any) -> Any:
    """Return a tree of the same types in which no two elements of a leaf are equal."""
    return jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), tree)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(x) * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def planned(tx: Any, servers: int = 3, **options: Any) -> Any:
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}
    init = init_of(tx)
    main = dtrans.trace(
        dtrans.make_train_step(loss, tx), *jax.eval_shape(init, params), jnp.ones(2)
    )
    startup = dtrans.trace(lambda params: distinct(init(params)), params)
    return flat_options.pserver(
        main, startup, pservers=endpoints(servers), trainers=2, **{"min_block_size": 1, **options}
    ), params


@pytest.fixture(scope="module", params=OPTIMIZERS)
def tx(request: Any) -> Any:
    return OPTIMIZERS[request.param]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    "options", [{}, {"slice_var_up": False}, {"split_method": SizeBalanced}], ids=str
)
@pytest.mark.parametrize("servers", [1, 3])
def test_every_row_is_that_part_of_that_array(
    tx: Any, servers: int, options: dict[str, Any]
) -> None:
    plan, params = planned(tx, servers, **options)
    whole = dict(
        zip(
            plan.startup.out_names,
            evaluate(plan.startup.jaxpr, *plan.startup.flatten(params)),
            strict=True,
        )
    )
    held = start_servers(plan, params)
    assert [(r.endpoint, r.slice_name) for r in plan.overview] == [
        (ep, n) for ep in held for n in held[ep]
    ]
    for row in plan.overview:
        value, origin = held[row.endpoint][row.slice_name], whole[row.origin_name]
        assert (row.origin_shape, row.slice_shape, row.dtype) == (
            origin.shape,
            value.shape,
            value.dtype,
        )
        assert np.array_equal(value, origin[row.index]), row
        assert row.is_slice == (value.shape != origin.shape)
        assert (row.offset, row.axis) == (0, 0) or row.is_slice
        assert row.vtype == ("Param" if row.origin_name.startswith("params/") else "Optimizer")
        assert row.nbytes == value.nbytes
    # each element occurs exactly once
    assert {r.origin_name for r in plan.overview} == whole.keys() - set(plan.frozen)
    for name in {r.origin_name for r in plan.overview}:
        rows = plan.overview.by_origin(name)
        if rows[0].is_slice:
            assert np.array_equal(
                np.concatenate([held[r.endpoint][r.slice_name] for r in rows], rows[0].axis),
                whole[name],
            )
            assert [r.block_id for r in rows] == list(range(len(rows)))
        elif name not in plan.update.shared_state:
            assert len(rows) == 1


def test_state_may_have_the_rows_along_another_axis() -> None:
    plan, _ = planned(OPTIMIZERS["sums over rows and columns"])
    assert {r.axis for r in plan.overview if r.is_slice} == {0}
    # state that is a transposed copy of a parameter
    turned = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.transpose, params),
        lambda g, s, p=None: (g, jax.tree.map(lambda a, b: a + b.T, s, g)),
    )
    plan, params = planned(optax.chain(turned, optax.sgd(0.1)))
    rows = plan.overview.by_origin("opt_state/0/table")
    assert [(r.axis, r.offset, r.slice_shape) for r in rows] == [
        (1, 0, (4, 4)),
        (1, 4, (4, 4)),
        (1, 8, (4, 3)),
    ]
    held = start_servers(plan, params)
    for r in rows:
        assert np.array_equal(held[r.endpoint][r.slice_name], np.arange(44).reshape(4, 11)[r.index])


def test_rows_by_endpoint_by_origin_and_by_slice() -> None:
    plan, _ = planned(OPTIMIZERS["adam"])
    overview = plan.overview
    assert isinstance(overview, tuple) and isinstance(overview, VarsDistributed)
    first, second, third = endpoints(3)
    assert {r.slice_name for r in overview.by_endpoint(second)} == set(
        plan.servers[second].main.in_names
    )
    assert (
        overview.by_endpoint("nowhere:1")
        == overview.by_origin("nothing")
        == overview.by_slice("nothing")
        == ()
    )
    assert repr(overview.by_origin("params/w")) == "<VarsDistributed: 3 arrays on 3 servers>"
    assert "<code>params/w.block1</code>" in overview._repr_html_()
    (row,) = overview.by_slice("params/w.block1")
    assert row == VarDistributed(
        "params/w",
        (9, 3, 2),
        "params/w.block1",
        (3, 3, 2),
        np.dtype("float32"),
        0,
        3,
        1,
        True,
        "Param",
        row.endpoint,
    )
    assert (
        str(row)
        == f"Param params/w.block1[3, 3, 2] on {row.endpoint}: params/w[9, 3, 2] from 3 along axis "
        "0"
    )
    assert [r.slice_name for r in overview.by_origin("params/table")] == [
        f"params/table.block{i}" for i in range(3)
    ]
    assert [r.offset for r in overview.by_origin("params/table")] == [0, 4, 8]
    # each server has the complete count of steps
    assert [r.endpoint for r in overview.by_slice("opt_state/0/count")] == [first, second, third]
    assert {r.is_slice for r in overview.by_origin("opt_state/0/count")} == {False}
    assert {
        type(part) for part in (overview.by_endpoint(first), overview.by_origin("params/w"))
    } == {VarsDistributed}
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.offset = 1  # type: ignore[misc]


def test_tables_are_prefetched_and_other_parameters_are_not() -> None:
    params = {"emb": jnp.ones((11, 2)), "w": jnp.ones((2, 3))}
    tx, ids = optax.adagrad(0.1), jnp.arange(4)
    of = dtrans.make_train_step(lambda p, ids: jnp.mean((p["emb"][ids] @ p["w"]) ** 2), tx)
    given = dtrans.trace(of, params, tx.init(params), ids), dtrans.trace(init_of(tx), params)
    plan = dtrans.pserver(
        *given, pservers=endpoints(2), trainers=2, sparse={"params/emb": dtrans.Rows()}
    )
    kinds = {row.origin_name: row.vtype for row in plan.overview}
    assert kinds["params/emb"] == "RemotePrefetch" and kinds["params/w"] == "Param"
    assert kinds["opt_state/0/sum_of_squares/emb"] == "Optimizer"
    sizes = [size["params"] for size in plan.server_bytes.values()]
    assert sum(sizes) == 4 * (11 * 2 + 2 * 3)
    assert "RemotePrefetch params/emb" in str(plan.overview)


def test_a_leaf_may_have_the_name_of_a_block() -> None:
    params = {"w.block1": jnp.ones((2, 2))}
    tx = optax.adam(0.1)
    main = dtrans.trace(dtrans.make_train_step(loss, tx), params, tx.init(params), jnp.ones(2))
    plan = dtrans.pserver(main, dtrans.trace(init_of(tx), params))
    (row,) = plan.overview.by_origin("params/w.block1")
    assert (row.slice_name, row.block_id, row.is_slice) == ("params/w.block1", 0, False)


def test_what_is_kept_for_a_block_is_cut_as_it_is() -> None:
    of = {
        "params/w.block{}": "",
        "params/w.block{}.trainer_0_bak": "params/w.trainer_0_bak",
        "params/w.block{}@GRAD.mean_square": "params/w@GRAD.mean_square",
    }
    part = lambda i, beside: ServerVariable(
        "params/w", i, (Slice(0, 0, 4), Slice(0, 4, 2))[i], beside
    )
    servers = {
        f"a:{i + 1}": {n.format(i): part(i, beside) for n, beside in of.items()} for i in range(2)
    }
    servers["a:1"]["params/b.trainer_0_bak"] = ServerVariable(
        "params/b", extra_name="params/b.trainer_0_bak"
    )
    types = {
        n: jax.core.ShapedArray(shape, np.dtype("float32"))
        for n, shape in (("params/b", (2,)), ("params/w", (6, 3)))
    }
    rows = overview_of(servers, types, ["params/b", "params/w"])
    assert {r.origin_shape for r in rows.by_endpoint("a:2")} == {(6, 3)}
    assert [(r.origin_name, r.offset, r.vtype) for r in rows.by_endpoint("a:2")] == [
        ("params/w", 4, "Param"),
        ("params/w.trainer_0_bak", 4, "Optimizer"),
        ("params/w@GRAD.mean_square", 4, "Optimizer"),
    ]
    (row,) = rows.by_slice("params/b.trainer_0_bak")
    assert (row.origin_name, row.is_slice, row.vtype) == (
        "params/b.trainer_0_bak",
        False,
        "Optimizer",
    )


# -- bytes -----------------------------------------------------------------------------------------


def test_balance_is_the_fullest_over_the_mean(tx: Any) -> None:
    plan, params = planned(tx)
    held = {
        ep: sum(x.nbytes for x in arrays.values())
        for ep, arrays in start_servers(plan, params).items()
    }
    assert {ep: sum(sizes.values()) for ep, sizes in plan.server_bytes.items()} == held
    assert plan.balance == pytest.approx(max(held.values()) / np.mean(list(held.values())))
    assert f"the fullest server holds {plan.balance:.2f} times the mean" in plan.notes
    assert f"{plan.balance:.2f} times the mean" in str(plan)


def test_one_server_is_even_and_says_nothing_of_it() -> None:
    plan, _ = planned(OPTIMIZERS["adam"], servers=1)
    assert plan.balance == 1.0
    assert not any("the fullest server" in note for note in plan.notes)


class AllOnTheLast(SizeBalanced):
    def dispatch(self, varlist: Any) -> list[str]:
        return [self.eps[-1]] * len(varlist)


METHODS = (RoundRobin, HashName, SizeBalanced, AllOnTheLast)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slice_var_up", [True, False])
def test_a_plan_says_what_the_balance_would_be_with_other_dispatchers(
    tx: Any, slice_var_up: bool
) -> None:
    plans = {
        m.__name__: planned(tx, slice_var_up=slice_var_up, split_method=m, seed=3)[0]
        for m in METHODS
    }
    for plan in plans.values():
        told = plan.compare(*METHODS)
        for name, other in plans.items():
            # each server stores the scalars of the state that it needs, so another placement may
            # need more
            few = 8 * len(other.update.shared_state) * len(other.servers)
            total = sum(sum(sizes.values()) for sizes in other.server_bytes.values())
            assert told[name] == pytest.approx(other.balance, abs=3 * few / total)
            moved = dispatched(plan.placement, {m.__name__: m for m in METHODS}[name])
            assert moved == other.placement


def test_comparing_is_exact_where_all_state_has_rows() -> None:
    for name in ("sgd", "adam", "a global norm"):
        plan, _ = planned(OPTIMIZERS[name])
        for method in METHODS[:3]:
            assert plan.compare(method) == {
                method.__name__: pytest.approx(
                    planned(OPTIMIZERS[name], split_method=method)[0].balance
                )
            }
        assert list(plan.compare()) == ["RoundRobin", "HashName", "SizeBalanced"]


def test_backups_of_trainers_go_with_their_blocks() -> None:
    options = {"mode": dtrans.Async(dtrans.DelayCompensation(decay=0.9))}
    plan, _ = planned(OPTIMIZERS["adam"], **options)
    backups = plan.overview.by_origin("params/table.trainer_1_bak")
    assert [(r.offset, r.origin_shape, r.vtype) for r in backups] == [
        (i, (11, 4), "Optimizer") for i in (0, 4, 8)
    ]
    for method in METHODS[:3]:
        other, _ = planned(OPTIMIZERS["adam"], split_method=method, **options)
        assert plan.compare(method)[method.__name__] == pytest.approx(other.balance)


def test_only_dispatchers_are_compared() -> None:
    plan, _ = planned(OPTIMIZERS["sgd"])
    with pytest.raises(
        ConfigError,
        match="^split_method is <class 'object'>; expected a subclass of dtrans.PSDispatcher",
    ):
        plan.compare(object)
