"""Saves of one server's state: checkpoints on request, regular snapshots, and a save at a failure.

A trainer requests a *checkpoint*. Servers write a *snapshot* of their state every few steps, from
which the job continues after the failure of a process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.checkpoint.assemble import copy_array
from dtrans.checkpoint.runs import SaveId
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.ir.array_fns import is_key
from dtrans.ir.selection import omit
from dtrans.protocol.generations import Generation, is_snapshot_due_alone
from dtrans.protocol.row_pieces import RowPieces
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import log
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.snapshots import GenerationStart, ServerSnapshots, server_names
from dtrans.run.parameter_server.state_writer import Keep, KeepLast, StateWriter
from dtrans.run.parameter_server.sync_update import SyncUpdate


@dataclasses.dataclass(frozen=True)
class ServerStorage:
    """Functions and options by which one server stores its state.

    Attributes:
      keep: saves a state under a name; None without a folder for checkpoints.
      keep_last: saves the state when the job ends by an error. It returns the path of the
        checkpoint, or None if the server has no arrays. Without `keep_last`, the state is not
        saved.
      snapshots: writes and reads snapshots from which a failed job continues; None
        without the user's option `snapshots`.
      sent: shape and dtype of the arrays that trainers send with each request for a checkpoint, by
        the trainer's id and by name.
    """

    keep: Keep | None = None
    keep_last: KeepLast | None = None
    snapshots: ServerSnapshots | None = None
    sent: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def written_snapshots(self) -> ServerSnapshots | None:
        """Writer of snapshots; None if the launcher restarts no processes."""
        return self.snapshots if self.snapshots is not None and self.snapshots.is_written else None

    @property
    def first_step(self) -> int:
        """Number from which the server counts its steps.

        In a job with snapshots, this is the step of the restored checkpoint. In other
        jobs, it is 0.
        """
        return 0 if self.snapshots is None else self.snapshots.first_step


class ServerSaves:
    """Saves of one server while it serves: on request, every few steps, and at a failure.

    Args:
      storage: functions that store the state.
      wake: function that interrupts the server's wait for messages. The server then tells trainers
        that a checkpoint is complete.
    """

    def __init__(self, storage: ServerStorage, *, wake: Callable[[], None]) -> None:
        self._keep, self._keep_last = storage.keep, storage.keep_last
        self._snapshots, self._wake = storage.written_snapshots, wake
        self._sent = storage.sent
        self._writer: StateWriter | None = None
        self._protocol: Serving
        self._update: SyncUpdate | BlockUpdates
        self._generation = Generation()
        self._first = 0  # number of a synchronous server's steps before the generation
        # step of the last snapshot that an asynchronous server has begun or loaded
        self._newest_snapshot: int | None = None
        # endpoints of the servers whose newest states are written at the end of this generation
        self._begun = set[str]()

    def begin(
        self,
        protocol: Serving,
        update: SyncUpdate | BlockUpdates,
        dense: Mapping[str, Any],
        start: GenerationStart,
    ) -> None:
        """Set the objects with the state to save, at the start of the job and after each failure.

        After a failure, a server creates new objects, and calls this method again.

        Args:
          protocol: handler of the server's messages.
          update: the update, which has the server's state.
          dense: the arrays outside of embedding tables, by name.
          start: the state with which the server starts.
        """
        self._protocol, self._update, self._generation = protocol, update, start.generation
        self._begun = set()
        if self._keep is None and self._snapshots is None:
            return
        if self._writer is None:
            spent = {n: x for n, x in dense.items() if self._is_copied(n, x)}
            self._writer = StateWriter(self._keep, spent, wake=self._wake)
        if self._keep is not None:
            protocol.saves.start = self._save
            if self._sent and isinstance(protocol.kind, SyncServer):
                protocol.saves.expect(self._sent, protocol.kind)
        update.before = self._writer.wait_copied
        if self._snapshots is not None:
            protocol.kind.between_steps = self._between_steps
            if isinstance(protocol.kind, SyncServer):
                protocol.kind.rounds.merges_results = self._snapshots.merges_results
            self._begin_snapshots(protocol.kind, start.loaded)
            folder, protocol.status.generation = (
                self._snapshots.generations,
                start.generation.number,
            )
            protocol.status.snapshot = lambda: folder.newest_written

    def _begin_snapshots(self, kind: SyncServer | AsyncServer, loaded: int | None) -> None:
        """Start to write snapshots, if necessary with one before the first step.

        The first snapshot is not necessary after a restart from a snapshot. On a synchronous server
        with tables, `_between_steps` writes it later.

        Args:
          kind: handler of the messages of steps.
          loaded: step of the snapshot from which the state was loaded, or None.
        """
        if isinstance(kind, AsyncServer):
            if self._newest_snapshot is None:
                self._newest_snapshot = loaded
            if self._newest_snapshot is None:
                self._write_snapshot(kind.counts.total)
            return
        self._first = kind.step
        if not kind.has_tables:
            self._between_steps(kind.step)

    def state(self) -> dict[str, Any]:
        """Return all arrays of the server by name, for a checkpoint or at the end."""
        state = {}
        for n, x in self._protocol.kind.state.items():
            state[n] = np.asarray(x) if isinstance(x, RowPieces) else x
        return {**state, **self._update.tables()}

    def ended(self) -> Iterator[tuple[str, str]]:
        """Yield (name, error) for each checkpoint written since the last call.

        The error is the text for the trainer, or "" if the checkpoint is complete.
        """
        if self._writer is not None:
            yield from self._writer.ended()

    def finish(self) -> list[tuple[str, str]]:
        """Wait until all checkpoints and snapshots are written; return the rest of `ended`."""
        writer = self._writer
        self.end()
        return [] if writer is None else list(writer.ended())

    def end(self) -> None:
        """Wait until all checkpoints and snapshots are written, and end the writing threads."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def save_last(self, failure: BaseException) -> None:
        """Save the state in a last checkpoint, because the job ends by an error.

        Without a complete step, nothing is saved. The method writes the path of the checkpoint to
        the log, and adds the path to the error as a note.

        Args:
          failure: the error.
        """
        kind = self._protocol.kind
        if self._keep_last is None:
            return
        try:
            steps = kind.step_count()
            if not steps:
                return
            place = self._keep_last(
                self.state(), self._save_id(steps), self._protocol.saves.asked()
            )
        except Exception as e:
            # This error is not raised, because the caller raises the error that has ended the job.
            log.exception(
                "pserver %s could not save its state at the end of the job", kind.endpoint
            )
            failure.add_note(
                f"pserver {kind.endpoint} could not save its state: {type(e).__name__}: {e}"
            )
        else:
            if place is not None:
                text = (
                    f"pserver {kind.endpoint} saved its state after {steps} steps of this job: "
                    f"{place}"
                )
                log.warning(text)
                failure.add_note(text)

    # -- snapshots -------------------------------------------------------------------------------

    def _save(self, name: str, step: int, arrays: Mapping[str, np.ndarray]) -> int:
        """Start to write a checkpoint of the current state; return the number of its arrays.

        Args:
          name: name of the checkpoint, such as "300".
          step: the server's step.
          arrays: arrays that trainers have sent with their requests, by name.
        """
        assert self._writer is not None
        state, spent = self._snapshot()
        state.update(arrays)
        self._writer.begin(name, state, self._save_id(step), spent)
        return len(state)

    def _between_steps(self, step: int) -> None:
        """Start to write a snapshot, if enough steps have passed since the last one.

        Args:
          step: number of steps so far.
        """
        assert self._snapshots is not None
        every, newest = self._snapshots.every, self._newest_snapshot
        if isinstance(self._protocol.kind, SyncServer):
            is_due = self._generation.is_snapshot_due(step, self._first, every)
        else:
            is_due = is_snapshot_due_alone(step, newest, every)
        if is_due:
            self._write_snapshot(step)

    def _write_snapshot(self, step: int) -> None:
        """Start to write a snapshot of the current state, after `step` steps."""
        assert self._writer is not None
        self._newest_snapshot, kind = step, self._protocol.kind
        counts = kind.counts.by_trainer if isinstance(kind, AsyncServer) else {}
        state, spent = self._snapshot()
        self._writer.begin_snapshot(
            self._snapshot_writer(counts), state, self._save_id(step), spent
        )

    def _snapshot_writer(
        self,
        counts: Mapping[int, int] = {},
        snapshots: ServerSnapshots | None = None,
        *,
        is_early: bool = False,
    ) -> Callable[[Mapping[str, Any], SaveId], None]:
        """Return the function with which the writing thread writes a snapshot.

        Args:
          counts: for an asynchronous server, the number of steps of each trainer.
          snapshots: writer of the snapshot; None for the writer of this server's snapshots.
          is_early: True if the state may lack evictions of table rows after the step.
        """
        snapshots = self._snapshots if snapshots is None else snapshots
        assert snapshots is not None
        return functools.partial(
            snapshots.write, self._generation.number, counts, is_early=is_early
        )

    def write_newest(self, lost: Sequence[str]) -> None:
        """Start to write the newest states as snapshots, because a process has failed.

        So the job can continue from its newest step, not from the last regular snapshot. The server
        answers messages during the write, and the writing thread reports the end. If more servers
        fail meanwhile, the method is called again, and writes only the copies of their states.
        `NewestStates` chooses the states.

        Args:
          lost: names of the failed servers, such as "pserver 1". If this server has a copy of a
            failed server's state, it also writes the copy.
        """
        kind, mine = self._protocol.kind, self._snapshots
        if mine is None or not mine.at_loss:
            return
        assert isinstance(kind, SyncServer) and self._writer is not None
        number, names = self._generation.number, server_names(mine.plan)
        endpoints = [ep for name, ep in zip(names, mine.plan.servers, strict=True) if name in lost]
        writers = {ep: mine.of_lost(ep, number) for ep in endpoints}
        writers[kind.endpoint] = mine
        begun, self._begun = self._begun, {*self._begun, *writers}
        for endpoint, step, state, is_early in kind.newest.states(endpoints):
            snapshots = writers[endpoint]
            if endpoint not in begun and not snapshots.generations.has_written(step):
                arrays = {n: _current(x) for n, x in state.items()}
                write = self._snapshot_writer(snapshots=snapshots, is_early=is_early)
                self._writer.begin_snapshot(write, arrays, self._save_id(step), waits=False)
        end = functools.partial(mine.note_end, number, lost)
        self._writer.begin_snapshot(lambda *_: end(), {}, self._save_id(kind.step), waits=False)

    def _save_id(self, step: int) -> SaveId:
        """Return an identifier of the run and the step, which each piece of a saved state records.

        A reader combines pieces of several servers only if their identifiers are equal.
        """
        runs = self._protocol.trainers.sessions
        if self._snapshots is None:
            return SaveId(runs, step)
        return self._snapshots.save_id(self._generation.members_since, runs, step)

    def _snapshot(self) -> tuple[dict[str, Any], list[str]]:
        """Return the current state by name, and the names of the arrays that must be copied.

        The writing thread reads the other arrays while the server continues. The tables of the
        result are snapshots that another thread can read during updates.
        """
        tables = self._update.snapshot(self._protocol.trainers.deadline / 4)
        dense, spent = {}, []
        for n, x in omit(self._protocol.kind.state, tables).items():
            dense[n] = x if isinstance(x, RowPieces) else _current(x)
            if self._is_copied(n, x):
                spent.append(n)
        return {**dense, **tables}, spent

    def _is_copied(self, name: str, x: Any) -> bool:
        """Return True if an array must be copied before the next update overwrites it.

        On CPU, a snapshot is a view of the array's memory, and an update may reuse this memory. An
        array that is stored in pieces (`RowPieces`) is always copied, because a file contains it in
        one piece.
        """
        if isinstance(x, RowPieces):
            return True
        if name not in self._update.spent or not isinstance(x, jax.Array) or is_key(x.dtype):
            return False
        return {d.platform for d in x.devices()} == {"cpu"}


def _current(x: Any) -> Any:
    """Return the current values of an array; on CPU, a NumPy view of the array's memory.

    A table's array is returned unchanged, because it is a snapshot already.
    """
    if isinstance(x, ArrayLike):
        return x
    if is_key(x.dtype):
        return copy_array(x)
    return np.asarray(x)
