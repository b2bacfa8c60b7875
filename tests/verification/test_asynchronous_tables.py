"""Tables of asynchronous jobs, and lazy updates, are compared with replays that follow their
definitions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_zoo
import pytest
import verified_table
from asynchronous_modes import ASYNCHRONOUS, SERVERS
from jaxpr_surgery import Surgery
from table_jobs import OPTIMIZERS
from table_losses import LOOPS, READ, D, V

import dtrans
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.tables.changed_rows import UnseenChanges
from dtrans.protocol.tables.id_slots import IdSlots
from dtrans.run import verified
from dtrans.run.parameter_server import block_update, ordered_job
from dtrans.run.parameter_server.tables import traced_tables
from dtrans.verification.outcome import Report


ROWS, COUNT, WIDTH = 12, 31, 3
PADDING = 0  # the row that stands for no word
MODES = {"sync": dtrans.Sync(), **ASYNCHRONOUS}


pytestmark = pytest.mark.usefixtures("x64")


def _loss(params: Any, ids: Any, y: Any) -> Any:
    """Return a loss of words from one table, with padding, and of tags from another table of the
    same shape."""
    words = jnp.where((ids[:, :1] != PADDING), params["words"][ids[:, 0]], 0)
    x = jnp.concatenate(
        [words, jnp.take(params["tags"], ids[:, 1], axis=0), params["words"][ids[:, 1]]], 1
    )
    return jnp.mean((jnp.tanh(x) @ params["w"] - y) ** 2)


@functools.cache
def _plan(mode: str, optimizer: str, update: str) -> dtrans.PServerPlan:
    """Return the plan of a step with two tables of one shape.

    Servers store ranges of rows of one, and buckets of the other.
    """
    tx = OPTIMIZERS[optimizer]

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        shape = (COUNT, WIDTH)
        tables = {
            n: jax.random.normal(k, shape) for n, k in zip(("words", "tags"), keys, strict=False)
        }
        params = {**tables, "w": jax.random.normal(keys[2], (3 * WIDTH,))}
        return params, tx.init(params)

    key, batch = jax.random.key(0), (jnp.zeros((ROWS, 2), int), jnp.ones(ROWS))
    main = dtrans.trace(dtrans.make_train_step(_loss, tx), *jax.eval_shape(init, key), *batch)
    of_tags = dtrans.Rows(update, place="bucket", buckets=5)
    how = {"pservers": SERVERS, "trainers": 3, "mode": MODES[mode]}
    how |= {"sparse": {"params/words": dtrans.Rows(update), "params/tags": of_tags}}
    return dtrans.pserver(
        main, dtrans.trace(init, key), placement=dtrans.BlockPlacement(min_block_size=1), **how
    )


def _ids() -> np.ndarray:
    """Return row ids with repetitions and padding. Trainers share some of the rows."""
    pairs = [
        [0, 1],
        [2, 2],
        [2, 3],
        [0, 30],
        [4, 17],
        [2, 17],
        [17, 1],
        [0, 20],
        [20, 20],
        [30, 2],
        [1, 0],
        [0, 0],
    ]
    return np.array(pairs)


def _verify(plan: dtrans.PServerPlan) -> Report:
    # GEO-SGD trainers have different batches: ids are drawn, because a given batch would be the
    # same for all trainers
    ids = jax.ShapeDtypeStruct((ROWS, 2), int) if plan.push_every else _ids()
    return plan.verify(ids, jax.ShapeDtypeStruct((ROWS,), jnp.float64), points=(0,))


TURNS = [
    ("async", "adam", "dense"),
    ("async", "rowwise_adam", "lazy"),
    ("compensated", "sgd", "dense"),
    ("adaptive", "momentum", "lazy"),
    ("half", "adagrad", "dense"),
    ("communicator", "adam", "lazy"),
    ("geo", "adam", "lazy"),
    ("geo that waits", "adagrad", "dense"),
]


@pytest.mark.parametrize(("mode", "optimizer", "update"), TURNS)
def test_turns_are_those_of_the_replay(mode: str, optimizer: str, update: str) -> None:
    report = _verify(_plan(mode, optimizer, update))
    assert report, str(report)
    assert {
        "servers/127.0.0.1:1/params/words.block0",
        "servers/127.0.0.1:2/params/tags.block1",
    } <= {*report.compared}


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "rowwise_adam"])
def test_synchronous_lazy_updates_leave_rows(optimizer: str) -> None:
    report = _plan("sync", optimizer, "lazy").verify(points=(0, 2))
    assert report, str(report)


LOSSES = {name: (loss, ["params/emb"]) for name, (loss, _) in READ.items()}
LOSSES |= {name: (loss, [*sizes]) for name, (loss, sizes) in LOOPS.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["sync", "compensated", "geo"])
@pytest.mark.parametrize("name", LOSSES)
def test_rows_that_losses_look_up(name: str, mode: str) -> None:
    """Lookups are also in loops and branches, whose ids are computed before them."""
    loss, leaves = LOSSES[name]
    params = {
        n: jnp.ones(shape) for n, shape in (("emb", (V, D)), ("w", (D, D)), ("table", (V, D)))
    }
    tx, ids = optax.sgd(0.1, 0.9), jnp.zeros((4, 2), int)
    sparse = {n: dtrans.Rows("lazy") for n in leaves}
    main = dtrans.trace(dtrans.make_train_step(loss, tx), params, tx.init(params), ids)
    how: Any = {
        "mode": MODES[mode],
        "sparse": sparse,
        "placement": dtrans.BlockPlacement(min_block_size=1),
    }
    how |= {} if mode == "sync" else {"batch": "local"}
    startup = dtrans.trace(lambda: (params, tx.init(params)))
    plan = dtrans.pserver(main, startup, pservers=SERVERS, trainers=2, **how)
    report = plan.verify(points=(0,))
    assert report, str(report)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("column", verified_table.TABLES)
@pytest.mark.parametrize("optimizer", optimizer_zoo.CASES)
def test_every_optimizer_updates_a_table(optimizer: str, column: str) -> None:
    found = verified_table.verify_table(optimizer_zoo.CASES[optimizer], column)
    if found.report is None:
        pytest.skip(f"refused: {found.refusal}")
    assert found.report, str(found.report)


# -- faults ----------------------------------------------------------------------------------------


def _others_rows(span: Any, whole: RowGradient) -> RowGradient:
    return _PART(span, RowGradient(whole.ids, jnp.roll(whole.rows, 1, axis=0)))


_PART = ordered_job.part_of_block


def _once(x: Any, numbers: Any, rows: Any, right: Any) -> Any:
    return x.at[numbers[:, 0]].set(rows)


def _stale(self: Any, trainer: int, name: str, ids: Any) -> Any:
    first = self.__dict__.setdefault("at_first", dict(self.state))
    now, self.state = self.state, first
    rows = _GIVE_ROWS(self, trainer, name, ids)
    self.state = now
    return rows


_GIVE_ROWS = ordered_job._OrderedServer.give_rows


def _backup_of_the_first(self: Any, trainer: int, name: str, ids: Any) -> Any:
    rows = _GIVE_ROWS(self, trainer, name, ids)
    first = min(k for k, n in self._sent_rows if n == name)
    mine, other = (self._sent_rows[k, name] for k in (trainer, first))
    copied = jnp.resize(jnp.asarray(other.rows), mine.rows.shape)
    self._sent_rows[trainer, name] = RowGradient(mine.ids, copied)
    return rows


def _state_of_neighbours(table: Any, at: Any, state: Any) -> Any:
    rows = _TAKEN(table, at, state)
    return {n: x if n == table.name else jnp.roll(x, 1, axis=0) for n, x in rows.items()}


_TAKEN = traced_tables.take_rows


def _room_is_a_row(ids: np.ndarray, size: int, rows: int) -> np.ndarray:
    return np.concatenate([ids, np.zeros(size - len(ids))]).astype(np.int32)


def _halved(table: Any, given: Any) -> Any:
    ids, found = _WITH_ROOM(table, given)
    return ids, {n: x / 2 for n, x in found.items()}


_WITH_ROOM = block_update.gradients_with_room


def _of_another_table(self: Any, trainer: int, name: str, ids: Any) -> Any:
    return _GIVE_ROWS(self, trainer, name.replace("words", "tags"), ids)


def _not_caught_up(self: Any, ids: Any, values: Any) -> Any:
    return self.arrays


def _caught_up(self: Any, ids: Any, values: Any) -> Any:
    return {n: x * 0.9 for n, x in self.arrays.items()}


def _old_is_stale(self: Any, ids: Any, local: Any, old: Any) -> None:
    slots = self._slots.find(ids)
    if local is not None:
        self._stored[0][slots] = local


def _told_nobody(self: Any, k: int, name: str, ids: Any) -> None:
    return None


def _undivided(self: Any, trainers: int) -> RowGradient:
    return _PUSHED(self, 1)


_PUSHED = CachedRows.pushed


def _slot_of_neighbour(self: Any, ids: Any) -> Any:
    slots = _FIND(self, ids)
    return np.where(slots >= 0, (slots + 1) % max(1, len(self)), slots)


_FIND = IdSlots.find


def _patch(where: Any, name: str, fault: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(where, name, fault)


def _operate(primitive: str, number: int, fault: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that replaces one equation of the traced job."""

    def traced(plan: Any, batch: Any) -> Any:
        found = _TURNS(plan, batch)
        return dataclasses.replace(
            found, jaxpr=Surgery(primitive, number, fault).apply(found.jaxpr)
        )

    return _patch(verified, "trace_turns", traced)


_TURNS = verified.trace_turns
SERVER, MEMORY = ordered_job._OrderedServer, traced_tables.TracedMemory


@dataclasses.dataclass(frozen=True)
class Planted:
    """Fault of a job.

    Attributes:
      mode, optimizer, update: options of the plan.
      plant: function that plants the fault.
      named: the equation that the cause names.
    """

    mode: str
    optimizer: str
    update: str
    plant: Callable[[pytest.MonkeyPatch], None]
    named: str


FAULTS: dict[str, Planted] = {
    "rows of neighbours are pushed": Planted(
        "async",
        "adagrad",
        "dense",
        _patch(ordered_job, "part_of_block", _others_rows),
        "add (optax.scale_by_rss)",
    ),
    "a repeated row is counted once": Planted(
        "async", "adagrad", "dense", _operate("scatter-add", 2, _once), "add_any"
    ),
    "rows are stale": Planted(
        "async", "adagrad", "dense", _patch(SERVER, "give_rows", _stale), "concatenate"
    ),
    "a copy of another trainer's rows": Planted(
        "compensated", "sgd", "dense", _patch(SERVER, "give_rows", _backup_of_the_first), "sub"
    ),
    "state of other rows": Planted(
        "async",
        "adam",
        "lazy",
        _patch(traced_tables, "take_rows", _state_of_neighbours),
        "add (optax.scale_by_adam)",
    ),
    "room is a row": Planted(
        "async", "adam", "lazy", _patch(traced_tables, "pad_ids", _room_is_a_row), "scatter"
    ),
    "a mean for a sum": Planted(
        "async", "adagrad", "dense", _patch(block_update, "gradients_with_room", _halved), "div"
    ),
    "rows of another table": Planted(
        "async", "adagrad", "dense", _patch(SERVER, "give_rows", _of_another_table), "concatenate"
    ),
    "a step is missed": Planted(
        "async", "momentum", "dense", _patch(MEMORY, "_caught_up", _not_caught_up), "scatter"
    ),
    "a lazy row moves": Planted(
        "async", "momentum", "lazy", _patch(MEMORY, "_caught_up", _caught_up), "mul"
    ),
    "old rows are stale": Planted(
        "geo", "adagrad", "dense", _patch(CachedRows, "_agree", _old_is_stale), "move_rows"
    ),
    "a changed row is not told": Planted(
        "geo", "adagrad", "dense", _patch(UnseenChanges, "changed", _told_nobody), "concatenate"
    ),
    "a sum of changes": Planted(
        "geo", "adagrad", "dense", _patch(CachedRows, "pushed", _undivided), "move_rows"
    ),
    "a slot of another row": Planted(
        "geo", "adam", "lazy", _patch(IdSlots, "find", _slot_of_neighbour), "concatenate"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = FAULTS[fault]
    planted.plant(monkeypatch)
    report = _verify(_plan(planted.mode, planted.optimizer, planted.update))
    causes = [d.cause for d in report.differences if d.cause is not None]
    assert any(cause.equation.startswith(planted.named) for cause in causes), str(report)
