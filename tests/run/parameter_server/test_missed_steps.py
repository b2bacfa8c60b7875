"""Rows that no step looked up catch up: a server's update of a table, run without a protocol, and
compared with one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.parameter_server.tables import touched_rows
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables import missed_steps
from dtrans.run.parameter_server.update import ServerUpdate


V, D = 13, 2
SYNC, DENSE = dtrans.Sync(), dtrans.Rows("dense")
EMB, GRAD = "params/emb", "params/emb@GRAD"


def init(tx: Any) -> Any:
    params = {"emb": jax.random.normal(jax.random.key(0), (V, D))}
    return params, tx.init(params)


def served(
    tx: Any, mode: Any = SYNC, rows: dtrans.Rows = DENSE
) -> tuple[ServerUpdate, dict[str, Any]]:
    """Return the update of the only server, and its initial state."""
    step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids] ** 2), tx)
    plan = dtrans.pserver(
        dtrans.trace(step, *init(tx), jnp.zeros(3, int)), dtrans.trace(lambda: init(tx)),
        sparse={EMB: rows}, mode=mode,
    )  # fmt: skip
    (programs,) = plan.servers.values()
    return ServerUpdate.from_program(programs.main), dict(
        zip(programs.startup.out_names, programs.startup.compiled(), strict=True)
    )


def steps(lookups: Sequence[Sequence[int]]) -> list[RowGradient]:
    rng = np.random.default_rng(0)
    return [RowGradient(np.array(ids, np.int32), rng.normal(size=(len(ids), D))) for ids in lookups]


def finished(server: SyncUpdate) -> dict[str, Any]:
    return {**server.state, **server.tables()}


def one_device(tx: Any, given: Sequence[RowGradient]) -> Any:
    @jax.jit
    def step(params: Any, state: Any, g: Any) -> Any:
        updates, state = tx.update({"emb": g}, state, params)
        return optax.apply_updates(params, updates), state

    params, state = init(tx)
    for x in given:
        params, state = step(params, state, jnp.zeros((V, D)).at[x.ids].set(x.rows))
    return params, state


def close(held: dict[str, Any], wanted: Any, tolerance: float = 1e-12) -> None:
    params, state = wanted
    flat = {f"opt_state/{jax.tree_util.keystr(path, simple=True, separator='/')}": x
            for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}  # fmt: skip
    for n, x in {EMB: params["emb"], **flat}.items():
        np.testing.assert_allclose(held[n], x, rtol=tolerance, atol=tolerance, err_msg=n)


COSINE = optax.cosine_decay_schedule(0.1, 900)
OPTIMIZERS = {
    "rmsprop": optax.rmsprop(0.1),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "adamw": optax.adamw(COSINE, weight_decay=0.1),
    "lion": optax.lion(0.01),
    "amsgrad": optax.amsgrad(0.1),
    "every second": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(COSINE)),
    "skips": optax.apply_if_finite(optax.adam(0.1), 3),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_catch_up_before_they_are_read(name: str) -> None:
    """Test gaps of one step, of several steps, and of more than one window."""
    tx = OPTIMIZERS[name]
    lookups = [[0, 5], [5], [5, 7], *([[7, 8]] * (missed_steps.WINDOW + 40)), [0, 5, 12], [0]]
    given = steps(lookups)
    update, state = served(tx)
    server = SyncUpdate(update, state, 1)
    for at, x in enumerate(given):
        if at in (2, len(given) - 2):
            wanted = one_device(tx, given[:at])[0]["emb"]
            np.testing.assert_allclose(
                server.rows(EMB, x.ids, train=True), wanted[x.ids], rtol=1e-12, atol=1e-12
            )
        server.begin({GRAD: x}, frozenset([0]), at)
    close(finished(server), one_device(tx, given))


@pytest.mark.usefixtures("x64")
def test_an_update_is_of_the_rows_that_were_looked_up() -> None:
    """A step changes only the rows that were looked up. Other rows do not change until a role reads
    them."""
    update, state = served(optax.adam(0.1))
    server = SyncUpdate(update, state, 1)
    for at, x in enumerate(steps([[0, 5], [5]])):
        server.begin({GRAD: x}, frozenset([0]), at)
    moved = np.flatnonzero((server.state[EMB] != np.asarray(state[EMB])).any(1))
    assert moved.tolist() == [0, 5]
    before = server.state[EMB][0].copy()
    assert (server.rows(EMB, np.array([0]), train=False) != before).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name, rests", [("adam", True), ("adamw", False)])
def test_rows_rest_until_they_are_looked_up_where_they_do_not_move(
    name: str, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows do catch up if the state from which a job continues has changed them before."""
    tx, given = (
        {"adam": optax.adam(0.1), "adamw": optax.adamw(0.1)}[name],
        steps([[0], [5], [5], [7]]),
    )
    update, state = served(tx)
    made, make = list[int](), missed_steps.MissedSteps._make
    counted = lambda self, ids, *args: (made.append(len(ids)), make(self, ids, *args))[1]
    monkeypatch.setattr(missed_steps.MissedSteps, "_make", counted)
    for at, x in enumerate(given):
        server = SyncUpdate(update, state, 1)  # continues from the state of the previous server
        server.begin({GRAD: x}, frozenset([0]), at)
        state = finished(server)
    close(state, one_device(tx, given))
    assert made == ([0, 1, 1, 2][1:] if rests else [V - 1] * 4)


@pytest.mark.usefixtures("x64")
def test_what_is_kept_of_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the record of steps is too large, all rows catch up, and the record is cleared."""
    monkeypatch.setattr(missed_steps, "MOST_BYTES", 2000)
    monkeypatch.setattr(missed_steps, "WINDOW", 16)
    monkeypatch.setattr(touched_rows, "LEAST", 4)
    monkeypatch.setattr(touched_rows, "MOST", 4)
    given = steps([[at % 3] for at in range(200)])
    update, state = served(OPTIMIZERS["adamw"])
    server = SyncUpdate(update, state, 1)
    (memory,) = server._tables.values()
    sizes = []
    for at, x in enumerate(given):
        server.begin({GRAD: x}, frozenset([0]), at)
        sizes.append(memory.missed._records.nbytes)  # type: ignore[union-attr]
    assert max(sizes) <= 2000 and sizes[-1] < max(sizes)
    close(finished(server), one_device(OPTIMIZERS["adamw"], given))


@pytest.mark.usefixtures("x64")
def test_asynchronous_updates_catch_up_too() -> None:
    given = steps([[0, 5], [5], [1], [0], [5, 12]])
    update, state = served(OPTIMIZERS["adamw"], dtrans.Async())
    blocks = BlockUpdates(update, state)
    state = blocks.state
    for x in given:
        made, values = blocks.begin(state)
        state |= made
        state |= blocks.apply(EMB, {GRAD: x}, state, values)
    assert blocks.rows(EMB, np.array([7]), state, train=True).shape == (1, D)
    close({**state, **blocks.tables()}, one_device(OPTIMIZERS["adamw"], given))
