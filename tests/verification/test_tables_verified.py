"""Plans with tables: looked-up and updated rows equal one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from table_jobs import DENSE, OPTIMIZERS

import dtrans
from dtrans.protocol.server_blocks import RowGradient
from dtrans.rows.writer import RowRange
from dtrans.run.parameter_server.tables import mesh_tables, missed_steps, traced_tables


ROWS, COUNT, WIDTH = 12, 11, 3
SERVERS = "127.0.0.1:1,127.0.0.1:2"


pytestmark = pytest.mark.usefixtures("x64")


def _loss(params: Any, ids: Any, y: Any) -> Any:
    """Return the loss of two features from one table: one by index, the other by `jnp.take`."""
    x = jnp.concatenate([params["emb"][ids[:, 0]], jnp.take(params["emb"], ids[:, 1], axis=0)], 1)
    return jnp.mean((jnp.tanh(x) @ params["w"] - y) ** 2)


def _plan(tx: Any, sparse: Any = DENSE, trainers: int = 3, **options: Any) -> dtrans.PServerPlan:
    def init(key: Any) -> Any:
        first, second = jax.random.split(key)
        emb = jax.random.normal(first, (COUNT, WIDTH))
        params = {"emb": emb, "w": jax.random.normal(second, (2 * WIDTH,))}
        return params, tx.init(params)

    key, batch = jax.random.key(0), (jnp.zeros((ROWS, 2), int), jnp.ones(ROWS))
    main = dtrans.trace(dtrans.make_train_step(_loss, tx), *jax.eval_shape(init, key), *batch)
    how = {"pservers": SERVERS, "trainers": trainers, "sparse": sparse, **options}
    return dtrans.pserver(
        main, dtrans.trace(init, key), placement=dtrans.BlockPlacement(min_block_size=1), **how
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plans_with_tables_compute_the_step(name: str) -> None:
    plan = _plan(OPTIMIZERS[name])
    report = plan.verify()
    assert report, str(report)
    assert any("params/emb.block1" in n for n in report.compared)
    late = any(t.changes_unread_rows for t in plan.tables.of.values())
    assert report.points == (8 if late else 4), "rows that catch up are compared too"


@pytest.mark.parametrize("trainers", [1, 5])
def test_rows_in_buckets(trainers: int) -> None:
    """Plans with rows in buckets are verified, also if the number of trainers does not divide the
    batch."""
    sparse = {"params/emb": dtrans.Rows("dense", place="bucket", buckets=5)}
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3))
    assert (report := _plan(tx, sparse, trainers).verify()), str(report)


def test_a_row_that_is_not_there_is_not_followed() -> None:
    report = _plan(optax.sgd(0.1)).verify(jnp.full((ROWS, 2), COUNT), jnp.ones(ROWS))
    assert report.equal and not report.complete
    assert "asks for row 11" in str(report)


# -- faults ----------------------------------------------------------------------------------------


def _shifted(plan: Any, table: str, ids: np.ndarray, rows: np.ndarray, servers: Any) -> np.ndarray:
    return np.roll(_ROWS_FROM(plan, table, ids, rows, servers), 1, axis=0)


_ROWS_FROM = mesh_tables.rows_from


def _without_the_last(ids: np.ndarray, size: int, gradient: Any) -> np.ndarray:
    found = _AMONG(ids, size, gradient)
    found[len(ids) - 1] = 0
    return found


_AMONG = traced_tables.scatter_rows


def _left(table: Any, at: Any, made: Any, state: Any) -> Any:
    return {n: state[n] for n in table.arrays}


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a lookup has the rows of its neighbours": lambda m: m.setattr(
        mesh_tables, "rows_from", _shifted
    ),
    "the gradient of a row is dropped": lambda m: m.setattr(
        traced_tables, "scatter_rows", _without_the_last
    ),
    "a block begins elsewhere": lambda m: m.setattr(
        RowRange, "local", lambda self, ids: ids - self.start // 2
    ),
    "rows are not put back": lambda m: m.setattr(traced_tables, "put_rows", _left),
    "only the first trainer's rows count": lambda m: _leave_out_later_trainers(m),
}


def _leave_out_later_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids_of_the_first(table: Any, grads: Any, present: Any) -> np.ndarray:
        ids: np.ndarray = grads[table.gradients[0]].ids
        return ids

    def scatter_known_rows(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
        is_known = np.isin(gradient.ids, ids)
        return _AMONG(ids, size, RowGradient(gradient.ids[is_known], gradient.rows[is_known]))

    monkeypatch.setattr(traced_tables, "all_ids", ids_of_the_first)
    monkeypatch.setattr(traced_tables, "scatter_rows", scatter_known_rows)


def _still(blocks: Any, rows: Any, values: Any) -> Any:
    return dict(rows)


def test_rows_that_do_not_catch_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_steps, "at_zero_gradient", _still)
    ids = jnp.zeros((ROWS, 2), int)
    report = _plan(optax.adam(0.1)).verify(
        ids, jax.ShapeDtypeStruct((ROWS,), jnp.float64), points=(0,)
    )
    assert any("mu/emb" in d.output for d in report.differences), str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    ids = np.arange(2 * ROWS).reshape(ROWS, 2) % COUNT
    report = _plan(optax.adagrad(0.1)).verify(
        ids, jax.ShapeDtypeStruct((ROWS,), jnp.float64), points=(0,)
    )
    assert any("params/" in d.output for d in report.differences), str(report)
