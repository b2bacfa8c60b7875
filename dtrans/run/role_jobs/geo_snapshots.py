"""Snapshots of one trainer of GEO-SGD: copies of the state that no server stores.

In GEO-SGD, a trainer updates its own copy of the parameters. Every few steps, the trainer *pushes*
(sends) its changes to the servers. A snapshot contains:

    changes         for each parameter, the changes that are not pushed yet, and the changes in a
                    push that is on its way
    local leaves    optimizer state, and arrays that the trainer computes, such as batch statistics
    tables          for embedding tables, the rows that the trainer stores: their ids, changes,
                    optimizer state, and pushed changes

A trainer writes a snapshot before a step, every few steps. Snapshots of a trainer are independent
of the snapshots of servers and of other trainers.

No change may be added to the parameters twice. So each server counts, for each trainer, the steps
with changes that were pushed. A trainer that starts again continues after the largest of the
servers' counts, or after its snapshot's step if that is larger. The trainer begins with the
servers' parameters. Then it adds the changes of its snapshot, except the changes that later pushes
contained (`GeoReturn`). The local leaves lack the steps after the snapshot.

A push contains only the table rows that steps have looked up. So before each push after a snapshot,
the trainer writes the ids of these rows to a file.

    trainer-0/STEP.npz          the snapshot of trainer 0 after STEP of its steps
    trainer-0/push-COUNT.npz    ids of the rows in the push after which COUNT steps were pushed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrans.checkpoint.assemble import as_jax
from dtrans.ir.selection import subset
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import is_snapshot_due_alone
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedSnapshot
from dtrans.protocol.trainer.geo_steps import GeoSnapshot
from dtrans.protocol.trainer.trainer_line import log
from dtrans.run.executor import Executor
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.snapshots import computed_leaves
from dtrans.run.role_jobs.snapshot_file import SnapshotFile
from dtrans.run.role_jobs.trainer_snapshots import TrainerSnapshots


# names of arrays in a file: `GeoSnapshot.pushed` and `GeoSnapshot.pending`, and prefixes of other
# names
COUNTS, CHANGE, DELTA, LOCAL = "counts", "change ", "delta ", "local "
# prefixes of names of arrays of a table
IDS, TOUCHED, STATE, DELTA_IDS = "ids ", "touched ", "state ", "delta ids "
NO_IDS, NO_MASK = np.empty(0, np.int32), np.empty(0, bool)


class GeoSnapshots(TrainerSnapshots):
    """Writer and reader of the snapshots of one trainer of GEO-SGD.

    Args:
      folder, plan, name: as for `TrainerSnapshots`.
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        super().__init__(folder, plan, name)
        self._snapshot: GeoSnapshot | None = None  # snapshot with which this process starts
        self._newest = 0  # step of the newest snapshot
        self._blocks: dict[str, str] = {}  # name of a parameter -> name of its first block
        self._tables = list(plan.tables.of)
        for leaf, blocks in plan.placement.blocks.items():
            if leaf not in plan.tables.of:
                self._blocks[leaf] = blocks[0].name
        self._local = [*computed_leaves(plan), *plan.main.args[1].names]

    def prepare(self, executor: Executor) -> None:
        """Pass this trainer's newest snapshot to the executor before the first step.

        Without a snapshot, the trainer begins with the servers' parameters.

        Raises:
          StateError: the snapshot cannot be read.
        """
        snapshot = self.read()
        executor.connections.steps.tells_counts = False
        if snapshot is not None:
            executor.begin_with(snapshot, self._plan.push_every)

    def read(self) -> GeoSnapshot | None:
        """Read this trainer's newest snapshot; return None if there is no snapshot.

        In the result, the name of a parameter is the name of its first block (range of rows) on a
        server.

        Raises:
          StateError: the snapshot cannot be read.
        """
        steps = self._steps()
        if not steps:
            return None
        self._newest = max(steps)
        self._snapshot = self._load(self._newest)
        return self._snapshot

    def begin(self, executor: Executor, first: Any) -> tuple[tuple[Any, ...], int]:
        """Return this process's first state, and the number of steps that the trainer took before.

        In a new job, the number is 0. If this process replaces a lost trainer, the optimizer state
        comes from the lost trainer's newest snapshot.

        Args:
          executor: the trainer's executor, which has run the startup program.
          first: the servers' parameters, and the initial values of all local leaves.
        """
        assert executor.geo is not None
        step = max(executor.geo.received_before.values(), default=0)
        if self._tables and self._folder is not None:
            executor.geo.note_push = self._note_push
            for path, count in self._pushes().items():
                # the lost process wrote the ids of this push, but no server received the push
                if count > step:
                    path.unlink(missing_ok=True)
        if self._snapshot is None and not step:
            return first, 0
        state = first
        if self._snapshot is not None:
            step = max(step, self._snapshot.step, self._snapshot.pushed)
            state = self._replace(state, self._snapshot.local)
        log.warning(
            "%s continues after step %d, with its optimizer's state after step %d",
            self._name,
            step,
            self._newest,
        )
        return state, step

    def before_step(self, executor: Executor, step: int, state: tuple[Any, ...]) -> None:
        """Write a snapshot of this trainer's state, if one is due before the next step.

        The servers choose the number of steps between two snapshots. If the file cannot be written,
        the job continues with its earlier snapshot, and logs a warning.

        Args:
          executor: the trainer's executor.
          step: number of steps so far.
          state: the state before the next step.
        """
        connections, geo = executor.connections, executor.geo
        every = connections.steps_between_snapshots
        if self._folder is None or geo is None or not connections.is_in_generation or not every:
            return
        if is_snapshot_due_alone(step, self._newest, every):
            leaves = self._leaves(state)
            params = {block: leaves[n] for n, block in self._blocks.items()}
            self._write(geo.snapshot(step, params, subset(leaves, self._local)))

    # -- files -----------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self._generations.path / self._file_name / f"{step}.npz"

    def _file(self, step: int) -> SnapshotFile:
        return SnapshotFile(self._path(step), f"the snapshot of {self._name} after step {step}")

    def _steps(self) -> list[int]:
        """Return the steps of the written snapshots."""
        if self._folder is None:
            return []
        return [int(path.stem) for path in self._path(0).parent.glob("[0-9]*.npz")]

    def _pushes(self) -> dict[Path, int]:
        """Return the files that list the rows of each push (message with changes of parameters).

        Returns:
          A map from the path of a file to the number of steps that were pushed up to this push.
        """
        paths = self._path(0).parent.glob("push-*.npz")
        return {path: int(path.stem.removeprefix("push-")) for path in paths}

    def _note_push(self, count: int, ids: Mapping[str, np.ndarray]) -> None:
        """Write a file with the ids of the table rows in a push, before the push is sent.

        A trainer that restarts from a snapshot reads these files. Servers already have the changes
        of these rows, so the trainer does not push them again. Without a snapshot, no file is
        needed. If the file cannot be written, the snapshot is removed, because its changes could be
        pushed twice.

        Args:
          count: number of steps that were pushed so far, including this push.
          ids: ids of the pushed rows, by name of the table.
        """
        snapshots = self._steps()
        if not snapshots:
            return
        self._generations.current()  # this call raises an error in a process that was replaced
        path = self._path(0).parent / f"push-{count}.npz"
        try:
            SnapshotFile(path, f"the push of {self._name} after step {count}").write(ids)
        except OSError as e:
            log.warning(
                "%s cannot write the row ids of its push after step %d and removes its snapshot, "
                "so a restart would lose its optimizer's state: %s",
                self._name,
                count,
                e,
            )
            for step in snapshots:
                self._path(step).unlink(missing_ok=True)
            self._newest = 0

    def _load(self, step: int) -> GeoSnapshot:
        file, params = self._file(step), list(self._blocks)
        counts = file.read({COUNTS: np.empty(2, np.int64)})
        pushed, pending = map(int, counts[COUNTS])
        changes = self._read(file, CHANGE, params)
        deltas = self._read(file, DELTA, params) if pending else {}
        local = self._read(file, LOCAL, self._local)
        for name, data in local.items():
            local[name] = as_jax(data, self._plan.main.inputs[name].dtype)
        tables = {
            name: self._load_rows(file, name, is_pending=pending > 0) for name in self._tables
        }
        pushes = {}
        for path, count in self._pushes().items():
            ids_file = SnapshotFile(path, f"the push of {self._name} after step {count}")
            pushes[count] = ids_file.read(dict.fromkeys(self._tables, NO_IDS))
        by_block = self._by_block(changes), self._by_block(deltas)
        return GeoSnapshot(step, pushed, pending, *by_block, local, tables, pushes)

    def _load_rows(self, file: SnapshotFile, name: str, *, is_pending: bool) -> CachedSnapshot:
        """Read the rows of an embedding table from a snapshot.

        Args:
          file: the file of the snapshot.
          name: name of the table.
          is_pending: True if a push was on its way when the snapshot was written.
        """
        inputs, states = self._plan.main.inputs, self._plan.tables.of[name].zero.state
        types = {IDS + name: NO_IDS, TOUCHED + name: NO_MASK, CHANGE + name: inputs[name]}
        types |= {STATE + n: inputs[n] for n in states}
        if is_pending:
            types |= {DELTA_IDS + name: NO_IDS, DELTA + name: inputs[name]}
        ids, is_touched, changes, *rest = file.read(types).values()
        pending = RowGradient(*rest[len(states) :]) if is_pending else None
        return CachedSnapshot(ids, is_touched, changes, rest[: len(states)], pending)

    def _read(self, file: SnapshotFile, kind: str, names: Iterable[str]) -> dict[str, Any]:
        """Read arrays of one kind from a snapshot's file, and return them by the name of the leaf.

        For the kind "change ", the array `change params/w` is returned under the name `params/w`.
        """
        found = file.read({kind + n: self._plan.main.inputs[n] for n in names})
        return {name.removeprefix(kind): x for name, x in found.items()}

    def _by_block(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each parameter's name by the name of its first block of rows on a server."""
        return {self._blocks[name]: x for name, x in values.items()}

    def _write(self, snapshot: GeoSnapshot) -> None:
        arrays: dict[str, Any] = {COUNTS: np.array([snapshot.pushed, snapshot.pending], np.int64)}
        for name, block in self._blocks.items():
            arrays[CHANGE + name] = snapshot.changes[block]
            if snapshot.pending:
                arrays[DELTA + name] = snapshot.deltas[block]
        for name, x in snapshot.local.items():
            arrays[LOCAL + name] = x
        for name, rows in snapshot.tables.items():
            arrays |= self._arrays_of(name, rows)
        old = self._steps()
        self._generations.current()  # this call raises an error in a process that was replaced
        try:
            self._file(snapshot.step).write(arrays)
        except OSError as e:
            log.warning(
                "%s cannot write its snapshot after step %d, so a restart would begin with the "
                "optimizer's state after step %d: %s",
                self._name,
                snapshot.step,
                self._newest,
                e,
            )
            return
        self._newest = snapshot.step
        for step in old:
            self._path(step).unlink(missing_ok=True)
        for path, count in self._pushes().items():
            if count <= snapshot.pushed:
                path.unlink(missing_ok=True)

    def _arrays_of(self, name: str, rows: CachedSnapshot) -> dict[str, Any]:
        """Return the arrays of a snapshot's file that store the rows of one table, by name."""
        arrays = {IDS + name: rows.ids, TOUCHED + name: rows.is_touched}
        arrays[CHANGE + name] = rows.changes
        for n, x in zip(self._plan.tables.of[name].zero.state, rows.state, strict=True):
            arrays[STATE + n] = x
        if rows.pending is not None:
            arrays |= {DELTA_IDS + name: rows.pending.ids, DELTA + name: rows.pending.rows}
        return arrays
