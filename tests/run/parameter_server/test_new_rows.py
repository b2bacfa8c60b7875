"""Rows of tables are computed at their first lookup, with the bits of the user's init, for any
trainer and at any time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import dtrans
from dtrans.errors import ConfigError, WireError
from dtrans.ops import init_on_use_p
from dtrans.parameter_server.tables import touched_rows
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables.new_rows import ArrayLike, NewRows
from dtrans.run.parameter_server.update import ServerUpdate


V, D = 1000, 3
EMB, GRAD = "params/emb", "params/emb@GRAD"
KEY = jax.random.key(7)


def drawn(key: jax.Array) -> jax.Array:
    other, key = jax.random.split(key)
    return 0.1 * jax.random.truncated_normal(key, -2, 2, (V, D)) + jax.random.uniform(other, (D,))


def planned(
    tx: Any, servers: int = 1, emb: Callable[[jax.Array], jax.Array] = drawn, **rows: Any
) -> Any:
    init = lambda key: (params := {"emb": emb(key)}, tx.init(params))
    step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids] ** 2), tx)
    return dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init, KEY), jnp.zeros(3, int)), dtrans.trace(init, KEY),
        pservers=[f"127.0.0.1:{6174 + k}" for k in range(servers)],
        sparse={EMB: dtrans.Rows(**rows)},
        placement=dtrans.BlockPlacement(min_block_size=1),
    )  # fmt: skip


def begun(programs: Any) -> tuple[SyncUpdate, dict[str, Any]]:
    """Return a server with new rows, and its initial state."""
    with dtrans.Executor() as exe:
        state = exe.run(programs.startup, KEY)
    return SyncUpdate(ServerUpdate.from_program(programs.main), state, 1), state


def several_tables(key: jax.Array) -> dict[str, jax.Array]:
    """Three tables of one init, and another one of the same shape."""
    some, other = jax.random.split(key)
    tables = {f"t{i}": drawn(k) for i, k in enumerate(jax.random.split(some, 3))}
    return tables | {"other": jax.random.normal(other, (V, D)) * 0.1 + 1}


def begun_with_several() -> SyncUpdate:
    tx = optax.adagrad(0.1)
    init = lambda key: (params := several_tables(key), tx.init(params))
    loss = lambda p, ids: sum(jnp.mean(x[ids] ** 2) for x in p.values())
    main = dtrans.trace(
        dtrans.make_train_step(loss, tx), *jax.eval_shape(init, KEY), jnp.zeros(3, int)
    )
    plan = dtrans.pserver(main, dtrans.trace(init, KEY), pservers="127.0.0.1:6174", sparse="auto")
    (programs,) = plan.servers.values()
    return begun(programs)[0]


@pytest.mark.parametrize("counts", [(1, 5, 16, 3), (40, 1, 100, 2), (200, 7, 0, 300)])
def test_rows_of_several_tables_are_made_in_one_call(counts: tuple[int, ...]) -> None:
    server, rng = begun_with_several(), np.random.default_rng(0)
    whole = jax.jit(several_tables)(KEY)
    for _ in range(2):  # the second time, some rows exist
        ids = {}
        for n, count in zip(whole, counts, strict=True):
            some = rng.choice(V, count, replace=False)
            ids[f"params/{n}"] = np.sort(some).astype(np.int32)
        server.create_rows(ids)
        for n in ids:
            assert (server._tables[n].stored.slots(ids[n]) >= 0).all()
            found = server.rows(n, ids[n], train=True)
            np.testing.assert_array_equal(found, np.asarray(whole[n[len("params/") :]])[ids[n]])


def test_a_loop_is_compiled_only_for_rows_of_several_tables() -> None:
    server = begun_with_several()
    groups = lambda: len(server._grouped._groups)
    some, others, more = np.arange(15, dtype=np.int32).reshape(3, 5)
    server.create_rows({"params/t0": some})
    server.create_rows({"params/t0": others, "params/other": some})
    assert groups() == 0
    server.create_rows({"params/t0": more, "params/t1": some})
    assert groups() == 1


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_are_those_of_the_init_made_whole(servers: int) -> None:
    plan, whole = planned(optax.adagrad(0.1), servers), np.asarray(jax.jit(drawn)(KEY))
    rng = np.random.default_rng(0)
    for b in plan.placement.all_blocks:
        server, state = begun(plan.servers[b.endpoint])
        assert isinstance(state[b.name], NewRows) and state[b.name].shape == (b.rows, D)
        mine = whole[b.span.start : b.span.stop]
        # in any order: the bits of a row do not depend on its first lookup
        for count in (1, 5, 40):
            ids = np.sort(rng.choice(b.rows, count, replace=False)).astype(np.int32)
            np.testing.assert_array_equal(server.rows(b.name, ids, train=True), mine[ids])
        np.testing.assert_array_equal(np.asarray(state[b.name]), mine)
        np.testing.assert_array_equal(
            np.asarray(state[b.named("opt_state/0/sum_of_squares/emb")]),
            np.full((b.rows, D), 0.1, np.float32),
        )


def unit(key: jax.Array) -> jax.Array:
    """Return rows of norm one."""
    x = jax.random.normal(key, (V, D))
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def centered(key: jax.Array) -> jax.Array:
    x = jax.random.normal(key, (V, D))
    return jax.nn.softmax(x - x.mean(1, keepdims=True), axis=-1)


COMPARE = """
import sys
sys.path[:0] = {path!r}
import jax, numpy as np, optax
from test_new_rows import *

whole = np.asarray(jax.jit(drawn)(KEY))
(programs,) = planned(optax.adagrad(0.1)).servers.values()
maker = begun(programs)[1][EMB].maker
for size in (16, 128, 1024):
    ids = np.random.default_rng(0).permutation(V)
    runs = [ids[at : at + size] for at in range(0, V, size)]
    made = np.concatenate([maker._initialize(run, size)[0] for run in runs])
    print((made != whole[ids]).sum())
server, tables = begun_with_several(), jax.jit(several_tables)(KEY)
for count in (10, 100):
    ids = [np.sort(np.random.default_rng(i).choice(V, count, replace=False)) for i in range(4)]
    server.create_rows({{f"params/{{n}}": x for n, x in zip(tables, ids)}})
    for n, x in zip(tables, ids):
        print((server._tables[f"params/{{n}}"].stored.slots(x) < 0).sum())
        print((server.rows(f"params/{{n}}", x, train=True) != np.asarray(tables[n])[x]).sum())
for emb in (unit, centered):
    (programs,) = planned(optax.adagrad(0.1), 1, emb).servers.values()
    maker = begun(programs)[1][EMB].maker
    np.testing.assert_allclose(maker(np.arange(V))[0], emb(KEY), rtol=1e-5, atol=1e-6)
    for size in (1, 7, 64, 300):
        ids = np.random.default_rng(size).permutation(V)
        runs = [ids[at : at + size] for at in range(0, V, size)]
        made = np.concatenate([maker(run)[0] for run in runs])
        print((made != maker(np.arange(V))[0][ids]).sum())
"""


def test_rows_have_the_same_bits_in_programs_of_all_sizes_as_users_compile_them() -> None:
    """XLA runs all optimizations, without the options of these tests.

    An init that sums numbers of a row is an exception.
    """
    ours = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    code = COMPARE.format(path=[str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == ["0"] * (3 + 2 * 4 * 2 + 2 * 4), done.stdout + done.stderr


def test_a_row_that_is_looked_at_is_not_kept() -> None:
    (programs,) = planned(optax.adagrad(0.1)).servers.values()
    server, _ = begun(programs)
    memory = server._tables[EMB]
    whole = np.asarray(jax.jit(drawn)(KEY))
    server.rows(EMB, np.array([2, 9]), train=True)
    found = server.rows(EMB, np.arange(20), train=False)
    np.testing.assert_array_equal(found, whole[:20])
    assert (
        memory.count == 2
        and str(server.server_tables.report()[0])
        == "params/emb: 2 of 1,000 rows materialized, 1,120 bytes"
    )
    assert isinstance(server.tables()[EMB], ArrayLike)
    # a caller that reads the state as an array gets all other rows, too
    np.testing.assert_array_equal(np.asarray(server.tables()[EMB]), whole)
    assert memory.count == 2
    server.rows(EMB, np.arange(V), train=True)
    assert memory.count == V and len(next(server.tables()[EMB].table.segments()).present) == V


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.adamw(0.1)], ids=["adam", "adamw"])
def test_new_rows_catch_up_too(tx: Any) -> None:
    """Rows of AdamW have decayed before their first lookup."""
    (programs,) = planned(tx, update="dense").servers.values()
    server, _ = begun(programs)
    rng = np.random.default_rng(0)
    params = {"emb": drawn(KEY)}
    state, step = tx.init(params), jax.jit(tx.update)
    for at, ids in enumerate(([3], [3, 8], [500, 999], [8])):
        g = rng.normal(size=(len(ids), D))
        server.rows(EMB, np.array(ids), train=True)
        server.begin({GRAD: RowGradient(np.array(ids), g)}, frozenset([0]), at)
        updates, state = step({"emb": jnp.zeros((V, D)).at[np.array(ids)].set(g)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(
        server.rows(EMB, np.arange(V), train=False), params["emb"], rtol=1e-12, atol=1e-12
    )
    np.testing.assert_allclose(
        np.asarray(server.tables()["opt_state/0/nu/emb"]), state[0].nu["emb"], rtol=1e-12
    )


def test_what_cannot_be_made_row_by_row_is_made_at_the_start() -> None:
    plan = planned(optax.sgd(0.1), emb=lambda key: jax.random.orthogonal(key, V)[:, :D])
    (programs,) = plan.servers.values()
    assert not [e for e in programs.startup.eqns if e.primitive is init_on_use_p]
    _, state = begun(programs)
    assert isinstance(state[EMB], jax.Array)


def test_a_limit_of_rows_is_kept() -> None:
    plan = planned(optax.adagrad(0.1), 2, limit=10)
    b = plan.placement.all_blocks[0]
    server, _ = begun(plan.servers[b.endpoint])
    server.rows(b.name, np.arange(5), train=True)
    server.rows(b.name, np.arange(100), train=False)
    with pytest.raises(
        WireError,
        match="params/emb.block0 has 5 rows and a limit of 5 rows, but the step needs 1 more",
    ):
        server.rows(b.name, np.array([3, 7]), train=True)
    np.testing.assert_array_equal(
        server.rows(b.name, np.array([3]), train=True), np.asarray(jax.jit(drawn)(KEY))[[3]]
    )
    with pytest.raises(
        ConfigError, match=r"params/emb cannot have limit=9, since .*update='lazy', limit=9"
    ):
        planned(optax.adamw(0.1), update="dense", limit=9)
    with pytest.raises(
        ConfigError, match="limit must be None or a positive number of rows, it is 0"
    ):
        dtrans.Rows(limit=0)


def test_rows_of_16_bits_are_those_of_one_device() -> None:
    """Rows and moments equal one device, bit for bit."""
    tx, half = optax.adam(0.1), lambda key: drawn(key).astype(jnp.bfloat16)
    (programs,) = planned(tx, emb=half, update="dense").servers.values()
    server, _ = begun(programs)
    params = {"emb": half(KEY)}
    state, step = tx.init(params), jax.jit(tx.update)
    for at, ids in enumerate(([3], [3, 8], [500], [8])):
        g = np.random.default_rng(at).normal(size=(len(ids), D)).astype(jnp.bfloat16)
        server.begin({GRAD: RowGradient(np.array(ids), g)}, frozenset([0]), at)
        updates, state = step(
            {"emb": jnp.zeros((V, D), jnp.bfloat16).at[np.array(ids)].set(g)}, state, params
        )
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(server.rows(EMB, np.arange(V), train=False), params["emb"])


@given(st.integers(0, 300_000))
def test_rows_are_made_by_programs_of_few_sizes(count: int) -> None:
    """Each row is computed once, in order.

    No program computes more than four times the remaining rows, or more than sixteen.
    """
    runs = list(touched_rows.split_by_capacity(count))
    assert [start for start, _, _ in runs] == [0, *(stop for _, stop, _ in runs)][: len(runs)]
    assert (runs[-1][1] if runs else 0) == count
    assert {size for _, _, size in runs} <= {16, 128, 1024, 8192, 65536}
    assert all(
        0 < stop - start <= size <= max(16, 4 * (count - start)) for start, stop, size in runs
    )


def test_tables_of_one_shape_share_their_program() -> None:
    """Tables of one shape and one scale share a program, because keys are computed outside of the
    program.

    A table with another scale has another program.
    """

    def init(key: jax.Array) -> Any:
        scales = (0.1, 0.1, 0.3)
        keys = jax.random.split(key, len(scales))
        params = {
            f"t{i}": x * jax.random.normal(k, (V, D))
            for i, (k, x) in enumerate(zip(keys, scales, strict=True))
        }
        return params, tx.init(params)

    tx = optax.adagrad(0.1)
    step = dtrans.make_train_step(lambda p, ids: sum(jnp.mean(t[ids] ** 2) for t in p.values()), tx)
    plan = dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init, KEY), jnp.zeros(3, int)), dtrans.trace(init, KEY),
        pservers="127.0.0.1:6174", sparse="auto",
    )  # fmt: skip
    _, state = begun(plan.servers["127.0.0.1:6174"])
    makers = [state[f"params/t{i}"].maker for i in range(3)]
    ids = np.array([1, 7, 900])
    for i, maker in enumerate(makers):
        np.testing.assert_array_equal(
            maker(ids)[0], np.asarray(jax.jit(init)(KEY)[0][f"t{i}"])[ids]
        )
    programs = [{size: fn for size, (fn, _) in maker._fns.items()} for maker in makers]
    assert programs[0] == programs[1] != programs[2]
