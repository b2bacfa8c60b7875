"""Cuts of one trainer of GEO-SGD: the state that only this trainer has.

    changes       for each parameter, the unpushed changes, and the changes in a pending push
    local leaves  optimizer state, and leaves that the trainer computes, such as batch statistics
    tables        the rows that the trainer stores: ids, changes, optimizer state, and pushed deltas

Cuts of a trainer are independent of the cuts (snapshots) of servers and of other trainers. A
trainer writes a cut before a step, every few steps.

Servers count the steps whose changes they have received. A trainer that starts again continues
after the largest of these counts, or after its cut's step if that is larger. So no server applies
the changes of a step twice. The trainer begins with the servers' parameters. It adds the changes of
its cut, except the parts that later pushes contained (`GeoReturn`). The local leaves lack the steps
after the cut.

A push contains only the table rows that steps have looked up. So the trainer also writes the ids of
the rows in each push after its cut, before it sends the push.

    trainer-0/STEP.npz          the cut of trainer 0 after STEP of its steps
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
from dtrans.protocol.epochs import is_cut_due_alone
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedCut
from dtrans.protocol.trainer.geo_steps import GeoCut
from dtrans.protocol.trainer.trainer_line import log
from dtrans.run.executor import Executor
from dtrans.run.net.role_folder import RoleFolder
from dtrans.run.parameter_server.cuts import computed_leaves
from dtrans.run.role_jobs.cut_file import CutFile
from dtrans.run.role_jobs.trainer_cuts import TrainerCuts


# names of arrays in a file: `GeoCut.pushed` and `GeoCut.pending`, and prefixes of other names
COUNTS, CHANGE, DELTA, LOCAL = "counts", "change ", "delta ", "local "
# prefixes of names of arrays of a table
IDS, TOUCHED, STATE, DELTA_IDS = "ids ", "touched ", "state ", "delta ids "
NO_IDS, NO_MASK = np.empty(0, np.int32), np.empty(0, bool)


class GeoCuts(TrainerCuts):
    """Writer and reader of the cuts (snapshots) of one trainer of GEO-SGD.

    Args:
      folder, plan, name: as for `TrainerCuts`.
    """

    def __init__(self, folder: RoleFolder | None, plan: PServerPlan, name: str) -> None:
        super().__init__(folder, plan, name)
        self._cut: GeoCut | None = None  # cut with which this process starts
        self._newest = 0  # step of the newest cut
        self._blocks: dict[str, str] = {}  # name of a parameter -> name of its first block
        self._tables = list(plan.tables.of)
        for leaf, blocks in plan.placement.blocks.items():
            if leaf not in plan.tables.of:
                self._blocks[leaf] = blocks[0].name
        self._local = [*computed_leaves(plan), *plan.main.args[1].names]

    def prepare(self, executor: Executor) -> None:
        """Load the newest cut into the executor, so that GEO-SGD continues from it.

        Raises:
          StateError: the cut (snapshot) cannot be read.
        """
        cut = self.read()
        executor.connections.steps.tells_counts = False
        if cut is not None:
            executor.begin_with(cut, self._plan.push_every)

    def read(self) -> GeoCut | None:
        """Return the newest cut (snapshot), or None. A cut names parameters by their first block.

        Raises:
          StateError: the cut cannot be read.
        """
        steps = self._steps()
        if not steps:
            return None
        self._newest = max(steps)
        self._cut = self._load(self._newest)
        return self._cut

    def begin(self, executor: Executor, first: Any) -> tuple[tuple[Any, ...], int]:
        """Return the first state of this process, and the number of steps before this state.

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
        if self._cut is None and not step:
            return first, 0
        state = first
        if self._cut is not None:
            step = max(step, self._cut.step, self._cut.pushed)
            state = self._replace(state, self._cut.local)
        log.warning(
            "%s continues after step %d, with its optimizer's state after step %d",
            self._name,
            step,
            self._newest,
        )
        return state, step

    def before_step(self, executor: Executor, step: int, state: tuple[Any, ...]) -> None:
        """Write a cut (snapshot), if one is due before the next step.

        If the write fails, the job continues with its earlier cut.

        Args:
          executor: the trainer's executor.
          step: number of steps so far.
          state: the state before the next step.
        """
        connections, geo = executor.connections, executor.geo
        every = connections.steps_between_cuts
        if self._folder is None or geo is None or not connections.is_in_epoch or not every:
            return
        if is_cut_due_alone(step, self._newest, every):
            leaves = self._leaves(state)
            params = {block: leaves[n] for n, block in self._blocks.items()}
            self._write(geo.cut(step, params, subset(leaves, self._local)))

    # -- files -----------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self._epochs.path / self._file_name / f"{step}.npz"

    def _file(self, step: int) -> CutFile:
        return CutFile(self._path(step), f"the cut of {self._name} after step {step}")

    def _steps(self) -> list[int]:
        """Return the steps of the written cuts (snapshots)."""
        if self._folder is None:
            return []
        return [int(path.stem) for path in self._path(0).parent.glob("[0-9]*.npz")]

    def _pushes(self) -> dict[Path, int]:
        """Return a map from the file of each push to the number of steps pushed up to this push."""
        paths = self._path(0).parent.glob("push-*.npz")
        return {path: int(path.stem.removeprefix("push-")) for path in paths}

    def _note_push(self, count: int, ids: Mapping[str, np.ndarray]) -> None:
        """Write the ids of a push's rows. Without a cut (snapshot), no file is needed.

        If the write fails, remove the cut. Otherwise a restarted trainer could push the cut's
        changes twice.

        Args:
          count: number of steps whose changes were pushed so far, including this push.
          ids: ids of the pushed rows, by name of the table.
        """
        cuts = self._steps()
        if not cuts:
            return
        self._epochs.current()  # this call raises an error in a process that was replaced
        path = self._path(0).parent / f"push-{count}.npz"
        try:
            CutFile(path, f"the push of {self._name} after step {count}").write(ids)
        except OSError as e:
            log.warning(
                "%s cannot write the row ids of its push after step %d and removes its cut, so a "
                "restart would lose its optimizer's state: %s",
                self._name,
                count,
                e,
            )
            for step in cuts:
                self._path(step).unlink(missing_ok=True)
            self._newest = 0

    def _load(self, step: int) -> GeoCut:
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
            ids_file = CutFile(path, f"the push of {self._name} after step {count}")
            pushes[count] = ids_file.read(dict.fromkeys(self._tables, NO_IDS))
        by_block = self._by_block(changes), self._by_block(deltas)
        return GeoCut(step, pushed, pending, *by_block, local, tables, pushes)

    def _load_rows(self, file: CutFile, name: str, *, is_pending: bool) -> CachedCut:
        """Read the rows of a table from a cut (snapshot)."""
        inputs, states = self._plan.main.inputs, self._plan.tables.of[name].zero.state
        types = {IDS + name: NO_IDS, TOUCHED + name: NO_MASK, CHANGE + name: inputs[name]}
        types |= {STATE + n: inputs[n] for n in states}
        if is_pending:
            types |= {DELTA_IDS + name: NO_IDS, DELTA + name: inputs[name]}
        ids, is_touched, changes, *rest = file.read(types).values()
        pending = RowGradient(*rest[len(states) :]) if is_pending else None
        return CachedCut(ids, is_touched, changes, rest[: len(states)], pending)

    def _read(self, file: CutFile, kind: str, names: Iterable[str]) -> dict[str, Any]:
        """Read the arrays whose names in the file begin with `kind`; return them by leaf name."""
        found = file.read({kind + n: self._plan.main.inputs[n] for n in names})
        return {name.removeprefix(kind): x for name, x in found.items()}

    def _by_block(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the names of parameters by the names of their first blocks."""
        return {self._blocks[name]: x for name, x in values.items()}

    def _write(self, cut: GeoCut) -> None:
        arrays: dict[str, Any] = {COUNTS: np.array([cut.pushed, cut.pending], np.int64)}
        for name, block in self._blocks.items():
            arrays[CHANGE + name] = cut.changes[block]
            if cut.pending:
                arrays[DELTA + name] = cut.deltas[block]
        for name, x in cut.local.items():
            arrays[LOCAL + name] = x
        for name, rows in cut.tables.items():
            arrays |= self._arrays_of(name, rows)
        old = self._steps()
        self._epochs.current()  # this call raises an error in a process that was replaced
        try:
            self._file(cut.step).write(arrays)
        except OSError as e:
            log.warning(
                "%s cannot write its cut after step %d, so a restart would begin with the "
                "optimizer's state after step %d: %s",
                self._name,
                cut.step,
                self._newest,
                e,
            )
            return
        self._newest = cut.step
        for step in old:
            self._path(step).unlink(missing_ok=True)
        for path, count in self._pushes().items():
            if count <= cut.pushed:
                path.unlink(missing_ok=True)

    def _arrays_of(self, name: str, rows: CachedCut) -> dict[str, Any]:
        """Return the arrays of a table in a cut (snapshot), by their names in the file."""
        arrays = {IDS + name: rows.ids, TOUCHED + name: rows.is_touched}
        arrays[CHANGE + name] = rows.changes
        for n, x in zip(self._plan.tables.of[name].zero.state, rows.state, strict=True):
            arrays[STATE + n] = x
        if rows.pending is not None:
            arrays |= {DELTA_IDS + name: rows.pending.ids, DELTA + name: rows.pending.rows}
        return arrays
