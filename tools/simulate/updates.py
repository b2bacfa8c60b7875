"""Updates of simulated servers: a decay, a mean of gradients in the order of trainers, and a norm.

Arrays contain 32-bit floats, so that a wrong order of a sum, or a missing or repeated gradient,
changes their bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from dtrans._jax import ClosedJaxpr
from dtrans.parameter_server.replica_placement import backups_of
from dtrans.protocol.server.exchange import Exchange, ReductionGroup
from dtrans.protocol.server.replication import Primary, Replication
from dtrans.protocol.server_blocks import (
    RowGradient,
    ServerBlocks,
    TableSpec,
    UpdatePart,
    Vectors,
)
from dtrans.protocol.tables.stored_tables import TableReport
from tools.simulate.case import Case


RECORD = "@RECORD"  # end of the names of arrays with the record of a table's changes


class ArrayType:
    """Shape and dtype of a simulated block."""

    def __init__(self, size: int, dtype: Any = np.float32) -> None:
        self.shape = (size,)
        self.dtype = np.dtype(dtype)
        self.ndim = 1


def block_name(endpoint: str, i: int) -> str:
    """Return the name of a server's block."""
    return f"{endpoint}/w{i}"


def gradient_name(block: str, k: int) -> str:
    """Return the name under which trainer k sends the gradient of a block."""
    return f"{block}@GRAD.trainer_{k}"


def initial(block: str, size: int) -> np.ndarray:
    """Return the initial value of a block."""
    return _numbers(size, f"initial {block}")


def gradient(block: str, size: int, k: int, step: int) -> np.ndarray:
    """Return the gradient of trainer k in a step."""
    return _numbers(size, f"{block} {k} {step}")


def running_mean(mean: np.ndarray, k: int, step: int) -> np.ndarray:
    """Return the running mean of trainer k's gradients after a step, from the mean before it."""
    part = gradient("mean", len(mean), k, step)
    return np.asarray(np.float32(0.9) * mean + np.float32(0.1) * part, np.float32)


def initial_mean() -> np.ndarray:
    """Return the initial running mean of each trainer."""
    return np.zeros(2, np.float32)


def looked_up(case: Case, k: int, step: int) -> np.ndarray:
    """Return the ids of the table's rows that trainer k looks up in a step.

    A synchronous trainer may look up no rows. An asynchronous trainer looks up rows of each block,
    because the judge identifies the trainer of an update by its gradient.
    """
    r, ids = Random(f"rows {k} {step}"), list[int]()
    for i, size in enumerate(case.tables.values()):
        count = r.randint(0 if case.sync_mode else 1, min(size, 3))
        ids += sorted(i * size + x for x in r.sample(range(size), count))
    return np.array(ids, np.int32)


def announced(case: Case, k: int, step: int) -> int | None:
    """Return the step in which trainer k announces the rows of a later step.

    The result is None if it does not announce them, or announces wrong rows.
    """
    is_right = Random(f"announced {k} {step}").random() < 0.8
    if not case.ahead or not case.tables or not step or not is_right:
        return None
    return max(0, step - case.ahead)


def updates_in(case: Case, k: int, step: int) -> int:
    """Return the number of updates in the rows that trainer k looks up in this step."""
    at = announced(case, k, step)
    if at is None:
        return step
    if case.requests and any(case.eviction_after(x) for x in range(at + 1, step + 1)):
        return step  # an eviction drops all announcements
    return max(at, step - case.staleness)


def row_gradient(rows: np.ndarray, k: int, step: int) -> np.ndarray:
    """Return the gradient of rows that trainer k has looked up, which depends on their values."""
    return np.asarray(
        _numbers(len(rows), f"of rows {k} {step}") + np.float32(0.25) * rows, np.float32
    )


def round_part(k: int, step: int, number: int) -> np.ndarray:
    """Return the value that trainer k sends in a round."""
    return _numbers(2, f"round {k} {step} {number}")


def _numbers(size: int, what: str) -> np.ndarray:
    r = Random(what)
    return np.array([r.uniform(-1, 1) for _ in range(size)], np.float32)


def mean(grads: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean, summed in the order of the list."""
    total = grads[0].copy()
    for g in grads[1:]:
        total += g
    return total / np.float32(len(grads))


def norm_part(means: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return one server's partial sum of the squared norm."""
    return np.array([sum((np.sum(x * x) for x in means.values()), np.float32(0))], np.float32)


def applied(x: np.ndarray, g: np.ndarray, norm: np.float32) -> np.ndarray:
    """Return the new value of a block after a synchronous update."""
    return np.asarray(x * np.float32(0.5) + g / np.float32(math.sqrt(1 + norm)), np.float32)


def decayed(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the new value of an asynchronous server's block after a gradient."""
    return applied(x, g, np.float32(0))


def with_rows(x: np.ndarray, grads: Sequence[RowGradient]) -> np.ndarray:
    """Return the new value of a table's block after a mean of gradients of rows."""
    merged = merged_rows(grads, len(x))
    if not len(merged.ids):
        return x
    new = x.copy()
    new[merged.ids] = decayed(x[merged.ids], merged.rows)
    return new


def merged_rows(grads: Sequence[RowGradient], rows: int) -> RowGradient:
    """Return the mean of gradients of rows, summed in the order of the list."""
    ids = np.unique(np.concatenate([g.ids for g in grads])).astype(np.int32)
    return RowGradient(ids, mean([spread(g, rows)[ids] for g in grads]))


def spread(gradient: RowGradient, rows: int) -> np.ndarray:
    """Return a gradient of rows as an array with zeros in all other rows."""
    found = np.zeros(rows, np.float32)
    found[gradient.ids] = gradient.rows
    return found


def added_rows(x: np.ndarray, delta: RowGradient) -> np.ndarray:
    """Return the new value of a table's block after a push of GEO-SGD."""
    new = x.copy()
    new[delta.ids] = added(x[delta.ids], delta.rows)
    return new


def added(x: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the new value of a block after a push of GEO-SGD."""
    return np.asarray(x + delta, np.float32)


class InNumpy:
    """Implementation of `dtrans.protocol.trainer.geo_steps.GeoArithmetic` with NumPy."""

    def copied(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Copy the parameters."""
        return [x.copy() for x in values]

    def pushed(
        self, local: Sequence[np.ndarray], old: Sequence[np.ndarray], trainers: int
    ) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """Return the deltas of a push, and the new old values."""
        deltas, agreed = [], []
        for x, before in zip(local, old, strict=True):
            delta = np.asarray((x - before) / np.float32(trainers), np.float32)
            deltas.append(delta)
            agreed.append(added(before, delta))
        return deltas, agreed

    def pulled(
        self, local: Sequence[np.ndarray], server: Sequence[np.ndarray], old: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        """Add the changes of other trainers."""
        return [added(x, s - o) for x, s, o in zip(local, server, old, strict=True)]


def served(case: Case, endpoint: str) -> ServerBlocks:
    """Return the blocks, tables and exchanges of a simulated server."""
    sizes = case.servers[case.endpoints.index(endpoint)]
    blocks = {block_name(endpoint, i): ArrayType(n) for i, n in enumerate(sizes)}
    sync = case.sync_mode
    # Synchronous trainers use different names for their gradients; asynchronous trainers use one
    # name.
    table = {n: rows for n, rows in case.tables.items() if n.startswith(f"{endpoint}/")}
    senders = {k: k if sync else 0 for k in range(case.trainers)}
    sent = []
    for b in (*blocks, *table):
        sent.append({k: gradient_name(b, number) for k, number in senders.items()})
    rows_of = lambda rows, sent: TableSpec(
        rows,
        (),
        np.dtype(np.float32),
        sent,
        on_trainers=case.mode == "geo",
        moves=case.moves_rows,
        staleness=case.staleness,
    )
    tables = {}
    for (n, rows), names in zip(table.items(), sent[len(blocks) :], strict=True):
        tables[n] = rows_of(rows, names)
    pairs = itertools.product(blocks.items(), sorted({*senders.values()}))
    types = {gradient_name(b, number): t for (b, t), number in pairs}
    exchanges = (_exchange(case, endpoint),) if case.mode == "exchange" else ()
    how = (sync, case.on_trainer_exit)
    return ServerBlocks(
        endpoint,
        case.trainers,
        *how,
        blocks,
        types,
        sent,
        exchanges=exchanges,
        tables=tables,
        adds_changes=case.mode == "geo",
    )


def replication(case: Case, endpoint: str) -> Replication | None:
    """Return the replicas of a simulated server; None if the case has none."""
    if not case.replicas:
        return None
    backups, primaries = backups_of(case.endpoints), {}
    for primary, backup in backups.items():
        if backup == endpoint:
            primaries[primary] = primary_of(served(case, primary))
    return Replication(backups[endpoint], primaries)


def primary_of(blocks: ServerBlocks) -> Primary:
    """Return the arrays that a simulated server sends to its backup."""
    state = {n: ArrayType(size) for n, size in _sizes(blocks).items()}
    gradients = {gradient_name(n, 0): t for n, t in state.items()}
    for n, rows in _rows(blocks).items():
        state[n + RECORD] = ArrayType(rows + 2, np.int64)
    of_rows = frozenset(gradient_name(n, 0) for n in blocks.tables)
    return Primary(gradients, state, blocks.exchanges, of_rows)


def _exchange(case: Case, endpoint: str) -> Exchange:
    everywhere = case.endpoints
    kinds = (ReductionGroup("float32", "sum", everywhere, everywhere, ("norm",), ((1,),)),)
    nothing: Any = None  # the simulated update needs no jaxpr
    local: ClosedJaxpr = nothing
    return Exchange(endpoint, 1, kinds, local, ("norm",), (), (("norm", "norm"),))


def _rows(blocks: ServerBlocks) -> dict[str, int]:
    """Return the number of rows of each block of a table."""
    return {n: t.rows for n, t in blocks.tables.items()}


def _sizes(blocks: ServerBlocks) -> dict[str, int]:
    """Return the number of entries of each block of a server, including blocks of tables."""
    return {n: t.shape[0] for n, t in blocks.params.items()} | _rows(blocks)


def _pieces(size: int) -> list[slice]:
    """Return the rows of each part of a block's update; large blocks have two parts."""
    if size < 4:
        return [slice(None)]
    return [slice(0, size // 2), slice(size // 2, size)]


class SimulatedTables:
    """Tables of a simulated server (`dtrans.protocol.tables.stored_tables.StoredTables`).

    Args:
      endpoint: endpoint of the server.
      sizes: number of rows of each block, by name.
      state: returns the server's arrays, by name.
      note: function that is called with the block and the row ids of each eviction.

    Attributes:
      changed_at: for each block, by name, an array with one number for each row: the number of the
        last update that changed the row, or -n - 1 if the row was evicted after n updates.
      steps: number of updates of each block, by name.
    """

    def __init__(
        self,
        endpoint: str,
        sizes: Mapping[str, int],
        state: Callable[[], dict[str, Any]],
        note: Callable[[str, np.ndarray], None] = lambda name, ids: None,
    ) -> None:
        self._endpoint, self._state, self._note = endpoint, state, note
        self.changed_at = {n: np.zeros(size, np.int64) for n, size in sizes.items()}
        self.steps = dict.fromkeys(sizes, 0)
        self._evicted = dict.fromkeys(sizes, 0)

    def record(self) -> dict[str, tuple[np.ndarray, int, int]]:
        """Return the record of changes and evictions of each block, by name."""
        found = {}
        for n, at in self.changed_at.items():
            found[n] = at.copy(), self.steps[n], self._evicted[n]
        return found

    def restore(self, record: Mapping[str, tuple[np.ndarray, int, int]]) -> None:
        """Restore the result of `record`."""
        for n, (at, steps, evicted) in record.items():
            self.changed_at[n], self.steps[n], self._evicted[n] = at.copy(), steps, evicted

    def arrays(self) -> dict[str, np.ndarray]:
        """Return `record` as arrays: `changed_at`, and then the other two numbers, by name."""
        found = {}
        for n, (at, *numbers) in self.record().items():
            found[n + RECORD] = np.concatenate([at, numbers])
        return found

    def touch(self, name: str, parts: Sequence[np.ndarray]) -> None:
        """Record an update.

        Args:
          name: name of the block.
          parts: row ids of each gradient.
        """
        self.steps[name] += 1
        for ids in parts:
            self.changed_at[name][ids] = self.steps[name]

    def report(self) -> list[TableReport]:
        """Implement `StoredTables.report`."""
        reports = []
        for n, at in self.changed_at.items():
            created = int(np.sum(at > 0))
            counts = (len(at), created, at.nbytes, None, self._evicted[n], self.steps[n])
            reports.append(TableReport(n, self._endpoint, *counts))
        return reports

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """Implement `StoredTables.evict`."""
        at, state = self.changed_at[name], self._state()
        is_old = (at > 0) & (at <= self.steps[name] - unused_for)
        is_old[under_way] = False
        at[is_old] = -self.steps[name] - 1
        state[name] = np.where(is_old, initial(name, len(at)), state[name])
        ids = np.flatnonzero(is_old)
        self._evicted[name] += len(ids)
        self._note(name, ids)
        return len(ids)

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Implement `StoredTables.changed`."""
        at = self.changed_at[name]
        return self.steps[name], np.flatnonzero(at > since), np.flatnonzero(at < -since)


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedSnapshot:
    """Copy of a server's state.

    Attributes:
      state: arrays, by name.
      tables: `SimulatedTables.record`.
      counts: for an asynchronous server, the number of steps of each trainer, by id.
      server: for an asynchronous server, the object that has computed the state.
      begun: `server.begun` at the snapshot.
    """

    state: Mapping[str, np.ndarray]
    tables: Mapping[str, tuple[np.ndarray, int, int]]
    counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    server: SimulatedBlocks | None = None
    begun: int = 0


def snapshot_of(arrays: Mapping[str, np.ndarray]) -> SimulatedSnapshot:
    """Return a snapshot from a state with the arrays of `SimulatedTables.arrays`."""
    state, tables = {}, {}
    for n, x in arrays.items():
        if n.endswith(RECORD):
            tables[n.removesuffix(RECORD)] = x[:-2], int(x[-2]), int(x[-1])
        else:
            state[n] = x
    return SimulatedSnapshot(state, tables)


class SimulatedUpdate:
    """Update of a synchronous server (`dtrans.protocol.server_blocks.StepUpdate`).

    Args:
      blocks: the server's blocks.
      work: function that spends the time of one computation.
      keeps_old, merges: as for `dtrans.run.parameter_server.sync_update.SyncUpdate`.

    Attributes:
      state: arrays, by name.
      old: as for `SyncUpdate`; with the arrays of `SimulatedTables.arrays`.
    """

    def __init__(
        self,
        blocks: ServerBlocks,
        work: Callable[[], None],
        *,
        keeps_old: bool = False,
        merges: bool = False,
    ) -> None:
        self.state: dict[str, Any] = {n: initial(n, size) for n, size in _sizes(blocks).items()}
        self.old: dict[str, Any] | None = None
        self._keeps_old, self._merges = keeps_old, merges
        self._old_tables: dict[str, np.ndarray] = {}
        self.exchange: Exchange | None = None
        self._blocks, self._work = blocks, work
        self._means: dict[str, np.ndarray] = {}
        self._rows: dict[str, list[RowGradient]] = {}
        self.parts: list[UpdatePart] = []
        if not (merges or blocks.exchanges or blocks.tables):
            sizes = _sizes(blocks)
            for name, names in zip(blocks.params, blocks.sent, strict=True):
                for rows in _pieces(sizes[name]):
                    self.parts.append(UpdatePart([names], [name], rows))
        # new rows of this step's computed parts, by block and rows
        self._new: list[tuple[str, slice, np.ndarray]] = []
        self.tables = SimulatedTables(blocks.endpoint, _rows(blocks), lambda: self.state)

    def snapshot(self) -> SimulatedSnapshot:
        """Return a copy of the state."""
        return SimulatedSnapshot({n: x.copy() for n, x in self.state.items()}, self.tables.record())

    def go_back(self, snapshot: SimulatedSnapshot) -> None:
        """Replace the state by the state of a snapshot."""
        self.state = dict(snapshot.state)
        self.tables.restore(snapshot.tables)

    def newest(self) -> dict[str, Any]:
        """Implement `StepUpdate.newest`."""
        return {**self.state, **self.tables.arrays()}

    @property
    def values(self) -> Mapping[str, Any]:
        """Implement `StepUpdate.values`."""
        return self.state

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Implement `StepUpdate.begin`."""
        self._work()
        self.old, self._old_tables = None, self.tables.arrays()
        if self._merges:
            self._means = {n: grads[gradient_name(n, 0)].copy() for n in self._blocks.params}
            self._rows = {n: [grads[gradient_name(n, 0)]] for n in self._blocks.tables}
        else:
            received = self._received(grads, present)
            self._means = {n: mean(received[n]) for n in self._blocks.params}
            self._rows = {n: received[n] for n in self._blocks.tables}
        if self._blocks.exchanges:
            (self.exchange,) = self._blocks.exchanges
            return {ep: [norm_part(self._means)] for ep in self.exchange.peers}
        self._finish(np.float32(0))
        return None

    def update_part(
        self, number: int, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Implement `StepUpdate.update_part`."""
        self._work()
        self.old = None
        part = self.parts[number]
        (name,), (names,) = part.params, part.sent
        g = mean([grads[names[k]][part.rows] for k in sorted(present)])
        new = applied(self.state[name][part.rows], g, np.float32(0))
        self._new.append((name, part.rows, new))
        return {name: new}

    def _received(self, grads: Mapping[str, Any], present: frozenset[int]) -> dict[str, list[Any]]:
        """Return the gradients of each block, in the order of the trainers."""
        sent, received = dict(zip(_sizes(self._blocks), self._blocks.sent, strict=True)), {}
        for name, names in sent.items():
            received[name] = [grads[names[k]] for k in sorted(present)]
        return received

    def merge(
        self, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Implement `StepUpdate.merge`."""
        received = self._received(grads, present)
        merged: dict[str, Any] = {}
        for n in self._blocks.params:
            merged[gradient_name(n, 0)] = mean(received[n])
        for n, table in self._blocks.tables.items():
            merged[gradient_name(n, 0)] = merged_rows(received[n], table.rows)
        return merged

    def evict(self, name: str, unused_for: int) -> None:
        """Implement `StepUpdate.evict`."""
        self.tables.evict(name, unused_for, np.empty(0, np.int32))

    def state_blocks(self) -> tuple[list[tuple[str, np.ndarray]], dict[str, int]]:
        """Implement `StepUpdate.state_blocks`."""
        return list(self.newest().items()), {}

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Implement `StepUpdate.go_on`."""
        assert arrived is not None and self.exchange is not None
        self._work()
        parts = {**arrived, self._blocks.endpoint: [norm_part(self._means)]}
        (kind,) = self.exchange.kinds
        self.exchange = None
        self._finish(sum((parts[ep][0][0] for ep in kind.owners), np.float32(0)))
        return None

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Do nothing: all simulated rows exist."""

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Implement `StepUpdate.rows`."""
        return self.values[name][ids]

    def _finish(self, norm: np.float32) -> None:
        if self._keeps_old:
            self.old = {**self.state, **self._old_tables}
        new = {n: applied(self.state[n], g, norm) for n, g in self._means.items()}
        for name, rows, x in self._new:
            new[name][rows] = x
        self._new = []
        self.state = new | {n: with_rows(self.state[n], g) for n, g in self._rows.items()}
        for name, gradients in self._rows.items():
            self.tables.touch(name, [g.ids for g in gradients])


class SimulatedBlocks:
    """Blocks of an asynchronous server (`dtrans.protocol.server_blocks.BlockUpdate`).

    Args:
      blocks: the server's blocks.
      work: function that spends the time of one computation.
      now: function that returns the time of the server's process.
      geo: True for GEO-SGD.

    Attributes:
      log: block name and bytes of each applied gradient; for a table, the bytes include zeros for
        all other rows. An entry without bytes is an eviction.
      history: bytes of all values that a block has had so far, by name of the block.
      begun_at: time of each call of `begin`.
      evicted: block name, index in `history`, and row ids of each eviction.
      state: arrays, by name.
      tables: blocks of tables.
    """

    def __init__(
        self,
        blocks: ServerBlocks,
        work: Callable[[], None],
        now: Callable[[], float],
        *,
        geo: bool,
    ) -> None:
        self.log: list[tuple[str, bytes]] = []
        self.begun_at: list[float] = []
        self._now = now
        self.history = {n: [initial(n, size).tobytes()] for n, size in _sizes(blocks).items()}
        self.evicted: list[tuple[str, int, np.ndarray]] = []
        self.state: dict[str, Any] = {
            n: np.frombuffer(h[0], np.float32) for n, h in self.history.items()
        }
        self.tables = SimulatedTables(
            blocks.endpoint, _rows(blocks), lambda: self.state, self._note_eviction
        )
        self._blocks, self._work, self._geo = blocks, work, geo

    @property
    def begun(self) -> int:
        """Number of steps that trainers have begun."""
        return len(self.begun_at)

    def snapshot(self, counts: Mapping[int, int]) -> SimulatedSnapshot:
        """Return a copy of the state, with the number of steps of each trainer in it."""
        state = {n: x.copy() for n, x in self.state.items()}
        return SimulatedSnapshot(state, self.tables.record(), counts, self, self.begun)

    def go_back(self, snapshot: SimulatedSnapshot) -> None:
        """Replace the state by the state of a snapshot."""
        self.state.update(snapshot.state)
        self.tables.restore(snapshot.tables)

    def _note_eviction(self, name: str, ids: np.ndarray) -> None:
        self.log.append((name, b""))
        self.evicted.append((name, len(self.history[name]), ids))
        self.history[name].append(self.state[name].tobytes())

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `BlockUpdate.begin`."""
        self.begun_at.append(self._now())
        return {}, {}

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """Implement `BlockUpdate.ready`."""
        return [n for n in self.history if n not in used and gradient_name(n, 0) in arrived]

    def apply(
        self,
        block: str,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Implement `BlockUpdate.apply`."""
        self._work()
        grad, old = grads[gradient_name(block, 0)], state[block]
        if isinstance(grad, RowGradient):
            self.tables.touch(block, [grad.ids])
            new = added_rows(old, grad) if self._geo else with_rows(old, [grad])
            grad = spread(grad, len(old))
        else:
            new = (added if self._geo else decayed)(old, grad)
        self.log.append((block, grad.tobytes()))
        self.history[block].append(new.tobytes())
        return {block: new}

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Do nothing: all simulated rows exist."""

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """Implement `BlockUpdate.rows`."""
        rows: np.ndarray = state[name][ids]
        return rows
