"""Simulated trainer of GEO-SGD.

In a job with snapshots, the trainer writes its changes, its optimizer's state and its rows, as
`dtrans.run.role_jobs.geo_snapshots` does. The optimizer's state is the number of its steps. A
change of a row depends on the row's value, so the trainer records these changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dtrans.protocol.generations import is_snapshot_due_alone
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.trainer.geo_steps import GeoReturn, GeoSnapshot, GeoSteps, Values
from dtrans.protocol.trainer.traffic import Leaf
from dtrans.protocol.trainer.traffic_loop import TrafficLoop
from tools.simulate.trainer_role import CommunicatingTrainer, Script, as_gradient, table_of
from tools.simulate.updates import InNumpy, added, gradient, looked_up, row_gradient, spread


Blocks = Mapping[str, np.ndarray]  # name of a block -> array


@dataclasses.dataclass(frozen=True, eq=False)
class Push:
    """Push of a trainer of GEO-SGD.

    Attributes:
      first, end: the push contains the changes of steps `first` to `end` - 1.
      deltas: the deltas, by name of the block.
      rest: the changes of earlier steps that remain after the push, by name of the block.
      rows: for each block of the table, a mask of the rows in the push.
    """

    first: int
    end: int
    deltas: Blocks
    rest: Blocks
    rows: Blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Return:
    """Start of a process that takes the place of a lost trainer.

    Attributes:
      step: number of steps before the first step of this process.
      snapshot: the trainer's snapshot, or None.
      received: number of the trainer's steps that each server has received, by endpoint.
      changes: changes that the trainer has added to the servers' parameters, by name of the block.
    """

    step: int
    snapshot: GeoSnapshot | None
    received: Mapping[str, int]
    changes: Blocks


class GeoSgdTrainer(CommunicatingTrainer):
    """Simulated trainer of GEO-SGD.

    Attributes:
      agreed: (number of included pushes, ids of the stored rows, `old` values of these rows) at
        the request of each pull.
      pushes: pushes of this process, in which a repeated push occurs twice.
      returned: the start of this process, if it takes the place of another one.
      step_count: number of the trainer's steps.
      geo: pushes and pulls; None before the first parameters.
      row_changes: changes of rows in each step of the trainer, by step and name of the block.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.agreed: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.pushes: list[Push] = []
        self.returned: Return | None = None
        self.step_count = 0
        self.geo: GeoSteps | None = None
        self._all: Mapping[str, Leaf] = {}
        self.row_changes: dict[int, Blocks] = {}
        if self._launcher is not None:
            self.row_changes = self._launcher.row_changes.setdefault(self.name, {})
        self._stored = CachedRows([np.empty(0, np.float32)])
        self._deltas_of_rows: RowGradient | None = None  # deltas in the last push
        self._must_refresh = False
        self._refreshed: RowGradient | None = None
        self._had = 0  # number of stored rows at the last push
        self._put = 0  # number of pushes
        self._snapshot: GeoSnapshot | None = None
        self._newest_snapshot = 0  # step of the newest snapshot

    @property
    def _received(self) -> dict[str, int]:
        return {ep: link.line.count for ep, link in self._links.items()}

    def _counts(self) -> Mapping[str, int]:
        if self.geo is not None:
            return self.geo.counts(self._received)
        if self._launcher is None:
            return {}
        self._snapshot = self._launcher.geo_snapshot(self.name)
        return {} if self._snapshot is None else self._return_to(self._snapshot).counts

    def _return_to(self, snapshot: GeoSnapshot) -> GeoReturn:
        return GeoReturn(snapshot, self._received, self.case.trainers, self.case.every)

    def _steps_beside(self, loop: TrafficLoop, leaves: Mapping[str, Leaf]) -> Script:
        case, self._all = self.case, leaves
        if self.geo is None:
            count = max(self._received.values())
            self.geo = GeoSteps(self, InNumpy(), case.trainers, self.newest(), count)
            self._begin(self.geo, count)
        else:
            self._must_refresh, self._refreshed = bool(case.tables), None
            self.geo.rejoin(self._received)
        geo = self.geo
        yield from self._settled(loop, geo)
        while self.step_count < case.steps[self.k]:
            yield self._write_if_due(geo)
            yield from self._fetch_rows(loop, self.step_count)
            yield self.random.expovariate(1.0) * case.pace
            changed = []
            for x, leaf in zip(geo.local, leaves.values(), strict=True):
                changes = [gradient(n, case.blocks[n], self.k, self.step_count) for n in leaf.names]
                changed.append(added(x, np.concatenate(changes)))
            self._change_rows(self.step_count)
            self.step_count += 1
            geo.step(changed, case.every, block_on_pull=case.waits)
            yield from self._settled(loop, geo)
        geo.finish()
        yield from self._settled(loop, geo)

    def _settled(self, loop: TrafficLoop, steps: GeoSteps) -> Script:
        while steps.waits:
            yield lambda: loop.is_settled
            if self._must_refresh:
                yield from self._look_up_local_rows(loop)
            steps.go_on()

    def _look_up_local_rows(self, loop: TrafficLoop) -> Script:
        """Look up all local rows, as `GeoTrainer` does after a failure."""
        found = self._room_for(np.sort(self._stored.ids))
        request = loop.look_up(found.wanted, train=True)
        yield lambda: request.done
        self._refreshed = RowGradient(found.uniq, found.rows)
        self._must_refresh = False

    def _fetch_rows(self, loop: TrafficLoop, step: int) -> Script:
        """Look up the rows of a step that are not local yet."""
        if not self.case.tables:
            return
        stored, ids = self._stored, looked_up(self.case, self.k, step)
        new = stored.missing(ids)
        if len(new):
            found = self._room_for(new)
            request = loop.look_up(found.wanted, train=True)
            yield lambda: request.done
            stored.add(new, found.rows)

    def _change_rows(self, step: int) -> None:
        """Change the rows of a step locally."""
        if not self.case.tables:
            return
        stored, ids = self._stored, looked_up(self.case, self.k, step)
        (rows,) = stored.take(ids, len(ids))
        changed = added(rows, row_gradient(rows, self.k, step))
        stored.put(ids, [changed])
        self.row_changes[step] = self._rows_by_block(RowGradient(ids, changed - rows))

    def _rows_by_block(self, rows: RowGradient) -> dict[str, np.ndarray]:
        """Return an array for each block of the table, with zeros in all other rows."""
        found = {}
        if self.case.tables:
            table = table_of(self.case)
            for name, run in zip(table.names, table.spans, strict=True):
                at = run.among(rows.ids)
                found[name] = spread(RowGradient(run.local(rows.ids[at]), rows.rows[at]), run.rows)
        return found

    def _unpushed_rows(self) -> dict[str, np.ndarray]:
        """Return the changes of rows that were not pushed, by block."""
        snapshot = self._stored.snapshot(None)
        return self._rows_by_block(RowGradient(snapshot.ids, snapshot.changes))

    # -- snapshots ---------------------------------------------------------------------------------

    def _begin(self, geo: GeoSteps, count: int) -> None:
        """Begin with the trainer's snapshot, as `GeoSnapshots` and `GeoTrainer.resume` do."""
        if self._launcher is not None:
            self._launcher.forget_geo_pushes(self.name, count)
        if self._snapshot is None and not count:
            return
        zeros = {n: np.zeros(size, np.float32) for n, size in self.case.blocks.items()}
        self.step_count = count
        full = zeros | {n: np.zeros(size, np.float32) for n, size in self.case.tables.items()}
        if self._snapshot is not None:
            snapshot, begin = self._snapshot, self._return_to(self._snapshot)
            self._newest_snapshot, self.step_count = snapshot.step, begin.step
            changes, deltas = {}, {}
            for n, delta in (zeros | dict(snapshot.deltas)).items():
                endpoint = n.split("/")[0]
                changes[n], deltas[n] = begin.split(endpoint, snapshot.changes[n], delta)
                full[n] = changes[n] + deltas[n]
            if self.case.tables:
                table = table_of(self.case)
                here, repeated = begin.split_rows("t", table.endpoints, table.spans)
                self._stored.resume(here)
                self._deltas_of_rows, self._must_refresh = repeated, True
                pushed = self._rows_by_block(repeated)
                full |= {n: x + pushed[n] for n, x in self._unpushed_rows().items()}
            parts = self._by_leaf(changes), self._by_leaf(deltas)
            geo.resume(*parts, begin, self._received)
        self.returned = Return(self.step_count, self._snapshot, self._received, full)

    def _by_leaf(self, blocks: Blocks) -> list[np.ndarray]:
        found = []
        for leaf in self._all.values():
            found.append(np.concatenate([blocks[n] for n in leaf.names]))
        return found

    def _write_if_due(self, geo: GeoSteps) -> float:
        """Write a snapshot if it is due; return the seconds of the write."""
        launcher, every = self._launcher, self._links[self.case.endpoints[0]].line.every
        if launcher is None or not is_snapshot_due_alone(
            self.step_count, self._newest_snapshot, every
        ):
            return 0.0
        self._newest_snapshot = self.step_count
        deltas, pending = geo.pending
        pushed = self._by_block(deltas) if pending else {}
        changes = self._by_block(geo.unpushed(geo.local))
        tables = {}
        if self.case.tables:
            tables["t"] = self._stored.snapshot(self._deltas_of_rows if pending else None)
        snapshot = GeoSnapshot(self.step_count, geo.count, pending, changes, pushed, {}, tables)
        return launcher.write_geo_snapshot(self, self.name, snapshot) - self.now

    def _by_block(self, values: Values) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for leaf, x in zip(self._all.values(), values, strict=True):
            found |= {name: rows for _, name, rows in leaf.blocks(x)}
        return found

    def rest(self) -> Blocks:
        """Return the changes that the trainer has not pushed at its end, by block."""
        assert self.geo is not None
        return self._by_block(self.geo.unpushed(self.geo.local)) | self._unpushed_rows()

    # -- the queue of `GeoSteps` -----------------------------------------------------------------

    def put(self, deltas: Values, steps: int) -> None:
        """Implement `dtrans.protocol.trainer.geo_steps.GeoQueue`."""
        self._put += 1
        for name, x in self._by_block(deltas).items():
            self.pushed.setdefault(name, []).append(x)
        group: list[tuple[Leaf, Any]] = []
        for leaf, x in zip(self._all.values(), deltas, strict=True):
            group.append((as_gradient(leaf), x))
        if self.case.tables:
            self._had, table = len(self._stored), table_of(self.case)
            deltas_of_rows = self._stored.pushed(self.case.trainers)
            self._deltas_of_rows = deltas_of_rows
            ids = deltas_of_rows.ids
            if self._launcher is not None and self.geo is not None:
                self._launcher.note_geo_push(self.name, self.geo.count, {"t": ids})
            for name, run in zip(table.names, table.spans, strict=True):
                at = run.among(ids)
                mine = RowGradient(run.local(ids[at]), deltas_of_rows.rows[at])
                self.pushed.setdefault(name, []).append(spread(mine, run.rows))
            group.append((as_gradient(table), deltas_of_rows))
        self._note_push(deltas, steps)
        self._running.put(group, steps)

    def _note_push(self, deltas: Values, steps: int) -> None:
        if self.geo is None:
            return
        end, rest = self.geo.count, self._unpushed_rows()
        for n, x in rest.items():
            for step, changes in self.row_changes.items():
                x -= changes[n] * (step >= end)
        for n, x in self._by_block(self.geo.unpushed(self.geo.local)).items():
            later = range(end, self.step_count)
            rest[n] = x - sum(gradient(n, len(x), self.k, step) for step in later)
        by_block, masks = self._by_block(deltas), {}
        if self._deltas_of_rows is not None:
            ids = self._deltas_of_rows.ids
            by_block |= self._rows_by_block(self._deltas_of_rows)
            masks = self._rows_by_block(RowGradient(ids, np.ones(len(ids), np.float32)))
        self.pushes.append(Push(end - steps, end, by_block, rest, masks))

    def repeat(self, deltas: Values, steps: int, endpoints: Collection[str]) -> None:
        """Implement `dtrans.protocol.trainer.geo_steps.GeoQueue`."""
        self._note_push(deltas, steps)
        group: list[tuple[Leaf, Any]] = []
        for name, x in self._by_block(deltas).items():
            endpoint = name.split("/")[0]
            if endpoint in endpoints:
                leaf = Leaf((endpoint,), (name,), x.shape, x.shape, x.dtype)
                group.append((as_gradient(leaf), x))
        if self.case.tables:
            here = as_gradient(table_of(self.case).at(endpoints))
            group.append((here, self._deltas_of_rows))
        self._running.put(group, steps)

    @property
    def _running(self) -> TrafficLoop:
        assert self._loop is not None
        return self._loop

    def received(self) -> int:
        """Implement `dtrans.protocol.trainer.geo_steps.GeoQueue`."""
        return -1 if self._must_refresh else self._running.received

    def newest(self) -> Values:
        """Implement `dtrans.protocol.trainer.geo_steps.GeoQueue`."""
        newest = self._running.newest
        assert newest is not None
        self._note(self._running)
        is_refreshed = self._refreshed is not None
        if "t" in newest[1]:  # the first answer of a connection contains no rows
            self._stored.pulled(newest[1]["t"])
        if self._refreshed is not None:
            self._stored.pulled(self._refreshed)
            self._refreshed, self._had = None, len(self._stored)
        if "t" in newest[1] or is_refreshed:
            had = self._stored.ids[: self._had].copy(), self._stored.old[: self._had].copy()
            self.agreed.append((self._put, *had))
        return [newest[1][key] for key in self._all]
