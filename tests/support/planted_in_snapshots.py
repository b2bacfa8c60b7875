"""Faults planted in jobs with snapshots of the servers' state, which the simulator must
find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dtrans.protocol.generations import NewGeneration
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.generation_gate import GenerationGate
from dtrans.protocol.server.joint_update import JointUpdate
from dtrans.protocol.server.newest_states import NewestStates
from dtrans.protocol.server.replication import Replica, StoredReplicas
from dtrans.protocol.server.save_requests import SaveRequests
from dtrans.protocol.server.step_counts import StepCounts
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_exits import TrainerExits
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.trainer.geo_steps import GeoReturn, GeoSteps
from dtrans.protocol.trainer.server_connection import ServerConnection
from dtrans.run.net.role_marks import find_left
from tools.simulate import launcher, updates
from tools.simulate.geo_trainer import GeoSgdTrainer
from tools.simulate.launcher import SimulatedGenerations, SimulatedLauncher
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_mean import TrainerMean
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import SimulatedUpdate


def _wrapped(
    owner: type, name: str, wrapper: Callable[[Any], Any]
) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that replaces a method of a class by `wrapper` of the method."""
    return lambda m: m.setattr(owner, name, wrapper(getattr(owner, name)))


def _do_nothing(*args: Any) -> None:
    return None


def _drops_greetings_of_later_generations(real: Any) -> Any:
    def admits(self: Any, *args: Any, **options: Any) -> bool:
        is_admitted = real(self, *args, **options)
        self.early.clear()
        return bool(is_admitted)

    return admits


def _excuses_all_that_left(marks: Any, servers: Any, started: Any) -> tuple[int, ...]:
    return find_left(marks, servers, {})


def _takes_the_newest_snapshot_of_any(self: Any, dropped: Any = ()) -> int | None:
    return max(set[int]().union(*self._snapshots.values()), default=None)


def _takes_the_newest_snapshot_of_servers(self: Any, dropped: Any = ()) -> int | None:
    snapshots = [set(self._snapshots[endpoint]) for endpoint in self._case.endpoints]
    return max(set.intersection(*snapshots), default=None)


def _copies_a_step_later(self: Any, step: int) -> None:
    if step > 1 and (step - 1) % self._case.snapshots == 0:
        self._write_snapshot(step - 1)


def _begins_snapshots_without_waiting(real: Any) -> Any:
    def write_snapshot(self: Any, step: int) -> None:
        self.written_at = 0.0
        real(self, step)

    return write_snapshot


def _counts_old_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    def note_snapshot(self: Any, generation: int, endpoint: str, step: int, state: Any) -> None:
        self._snapshots[endpoint][step] = state

    monkeypatch.setattr(SimulatedLauncher, "_note_snapshot", note_snapshot)
    monkeypatch.setattr(SimulatedLauncher, "_forget_snapshots", _do_nothing)


def _replays_with_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    reconnect, gradients = SimulatedTrainer._reconnect, SimulatedTrainer._gradients

    def reconnect_late(self: Any, generation: int) -> None:
        reconnect(self, generation)
        self.is_late = True

    def gradients_late(self: Any, step: int) -> Any:
        return gradients(self, step + hasattr(self, "is_late"))

    monkeypatch.setattr(SimulatedTrainer, "_reconnect", reconnect_late)
    monkeypatch.setattr(SimulatedTrainer, "_gradients", gradients_late)


def _keeps_its_step(real: Any) -> Any:
    return lambda self: self.pulled[-1][0] if self.pulled else real(self)


def _keeps_received_gradients(real: Any) -> Any:
    def rewind(self: Any) -> None:
        before = self.machine.kind._turns.by_trainer
        real(self)
        for k, turn in self.machine.kind._turns.by_trainer.items():
            turn.grads = before[k].grads
            turn.at_barrier = before[k].at_barrier

    return rewind


def _ignores_rewinds(real: Any) -> Any:
    def receive(self: Any, frames: Any) -> Any:
        try:
            return real(self, frames)
        except NewGeneration:
            return None

    return receive


def _always_loads(real: Any) -> Any:
    def load(self: Any, launcher: Any) -> None:
        self._has_entered = False
        real(self, launcher)

    return load


def _repeats_pushes_on_all_servers(self: Any, received: Any) -> list[str]:
    return list(received) if self.pending[1] else []


def _adds_changes_that_were_pushed(real: Any) -> Any:
    def split(self: Any, endpoint: str, change: Any, delta: Any) -> Any:
        if self.count == self._snapshot.pushed:
            return real(self, endpoint, change, delta)
        return change, np.zeros_like(delta)

    return split


def _adds_changes_of_rows_that_were_pushed(real: Any) -> Any:
    def split_rows(self: Any, table: str, endpoints: Any, spans: Any) -> Any:
        _, repeated = real(self, table, endpoints, spans)
        return self._snapshot.tables[table], repeated

    return split_rows


def _reduces_changes_of_rows_outside_of_pushes(real: Any) -> Any:
    def split_rows(self: Any, table: str, *blocks: Any) -> Any:
        every = {
            count: {table: self._snapshot.tables[table].ids} for count in self._snapshot.pushes
        }
        self._snapshot = dataclasses.replace(self._snapshot, pushes=every)
        return real(self, table, *blocks)

    return split_rows


def _repeats_pushes_without_rows(real: Any) -> Any:
    def split_rows(self: Any, table: str, *blocks: Any) -> Any:
        rows, repeated = real(self, table, *blocks)
        return rows, RowGradient(repeated.ids[:0], repeated.rows[:0])

    return split_rows


def _refreshes_no_rows(self: Any, loop: Any) -> Any:
    self._must_refresh = False
    yield from ()


def _applies_parts_of_pushes(real: Any) -> Any:
    def init(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self._applies_at_once = False

    return init


def _reports_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedGenerations, "report_lost", _do_nothing)


def _drops_without_a_generation(real: Any) -> Any:
    def lost(self: Any, now: float) -> dict[int, str]:
        for k in real(self, now):
            self.known[k].done = True
        return {}

    return lost


def _counts_dropped_trainers(real: Any) -> Any:
    return lambda self: sorted({*real(self), *self._trainers.dropped})


def _waits_for_leaves_of_dropped_trainers(real: Any) -> Any:
    return lambda self, dropped=(): real(self)


def _logs_all_trainers(real: Any) -> Any:
    def grant(self: Any, *args: Any) -> None:
        real(self, *args)
        members = tuple(range(self._case.trainers))
        self.records[-1] = dataclasses.replace(self.records[-1], members=members)

    return grant


def _logs_no_joins(real: Any) -> Any:
    def grant(self: Any, restarts: str, *args: Any) -> None:
        members = self.records[-1].members
        real(self, restarts, *args)
        if restarts == "join":
            self.records[-1] = dataclasses.replace(self.records[-1], members=members)

    return grant


def _keeps_dropped_trainers(real: Any) -> Any:
    def begin_generation(self: Any, generation: Any, *before: Any) -> None:
        dropped_before = self._generation.dropped if hasattr(self, "_generation") else ()
        dropped = tuple(sorted({*dropped_before, *generation.dropped}))
        real(self, dataclasses.replace(generation, dropped=dropped), *before)

    return begin_generation


def _keeps_snapshots_of_undone_steps(real: Any) -> Any:
    def note_snapshot(self: Any, generation: int, who: str, step: int, snapshot: Any) -> None:
        files = self.__dict__.setdefault("files", {})
        real(self, generation, who, step, files.setdefault((who, step), snapshot))

    return note_snapshot


PLANTED_IN_SNAPSHOTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a server has no fence": lambda m: m.setattr(GenerationGate, "admits", lambda *_, **__: True),
    "greetings of later generations are dropped": _wrapped(
        GenerationGate, "admits", _drops_greetings_of_later_generations
    ),
    "a job goes back to the newest snapshot of any server": lambda m: m.setattr(
        SimulatedLauncher, "_newest_snapshot", _takes_the_newest_snapshot_of_any
    ),
    "a snapshot has the state of the next step": lambda m: m.setattr(
        SimulatedServer, "_between_steps", _copies_a_step_later
    ),
    "a snapshot precedes the evictions after its step": lambda m: m.setattr(
        SyncServer, "has_tables", property(lambda self: False)
    ),
    "one trainer evicts again after a snapshot": lambda m: m.setattr(
        SimulatedTrainer, "_asks_before", lambda self, first: not first or not self.k
    ),
    "a snapshot does not wait for the one before": _wrapped(
        SimulatedServer, "_write_snapshot", _begins_snapshots_without_waiting
    ),
    "snapshots of an old generation count": _counts_old_snapshots,
    "a trainer replays with another batch": _replays_with_the_next_batch,
    "a trainer keeps its step number": _wrapped(SimulatedTrainer, "_first_step", _keeps_its_step),
    "a trainer keeps its own leaf after it goes back": lambda m: m.setattr(
        TrainerMean, "_load", lambda self, snapshot: self.values[-1][1]
    ),
    "a job goes back to a snapshot that trainers have not written": lambda m: m.setattr(
        SimulatedLauncher, "_newest_snapshot", _takes_the_newest_snapshot_of_servers
    ),
    "a server goes back and keeps received gradients": _wrapped(
        SimulatedServer, "_rewind", _keeps_received_gradients
    ),
    "a trainer ignores that servers go back": _wrapped(
        ServerConnection, "receive", _ignores_rewinds
    ),
    "a lost role is not reported": _reports_nobody,
    "an asynchronous server forgets the steps before a loss": lambda m: m.setattr(
        AsyncServer, "count_of", lambda self, k: 0
    ),
    "an asynchronous server keeps its lower count of steps": lambda m: m.setattr(
        StepCounts, "adopt", lambda self, k, count: False
    ),
    "an asynchronous server that lives goes back, too": _wrapped(
        SimulatedServer, "_load_alone", _always_loads
    ),
    "an asynchronous trainer that has left is excused from a lost server's steps": lambda m: (
        m.setattr(launcher, "find_left", _excuses_all_that_left)
    ),
    "a lost asynchronous server starts with the initial state": lambda m: m.setattr(
        SimulatedLauncher, "snapshot_alone", lambda self, endpoint: (None, None)
    ),
    "a trainer of GEO-SGD does not repeat a lost push": lambda m: m.setattr(
        GeoSteps, "_lacking", lambda self, received: []
    ),
    "a trainer of GEO-SGD repeats a push on all servers": lambda m: m.setattr(
        GeoSteps, "_lacking", _repeats_pushes_on_all_servers
    ),
    "a trainer of GEO-SGD adds changes that it has pushed": _wrapped(
        GeoReturn, "split", _adds_changes_that_were_pushed
    ),
    "a trainer of GEO-SGD adds changes of rows that it has pushed": _wrapped(
        GeoReturn, "split_rows", _adds_changes_of_rows_that_were_pushed
    ),
    "a trainer of GEO-SGD loses changes of rows that it has not pushed": _wrapped(
        GeoReturn, "split_rows", _reduces_changes_of_rows_outside_of_pushes
    ),
    "a trainer of GEO-SGD repeats a push without its rows": _wrapped(
        GeoReturn, "split_rows", _repeats_pushes_without_rows
    ),
    "a trainer of GEO-SGD keeps old rows after a failure": lambda m: m.setattr(
        GeoSgdTrainer, "_look_up_local_rows", _refreshes_no_rows
    ),
    "a server of GEO-SGD applies a part of a push": _wrapped(
        AsyncServer, "__init__", _applies_parts_of_pushes
    ),
    "servers use the gradients of two sets of trainers in one step": _wrapped(
        TrainerRegistry, "lost", _drops_without_a_generation
    ),
    "the gradient of a dropped trainer is used": _wrapped(
        TrainerExits, "counted", _counts_dropped_trainers
    ),
    "snapshots wait for the leaves of a dropped trainer": _wrapped(
        SimulatedLauncher, "_newest_snapshot", _waits_for_leaves_of_dropped_trainers
    ),
    "a trainer is dropped without a quorum": lambda m: m.setattr(
        SimulatedLauncher, "_drops", lambda self, name: "trainer" in name and self._case.quorum
    ),
    "a snapshot keeps the state of an undone step": _wrapped(
        SimulatedLauncher, "_note_snapshot", _keeps_snapshots_of_undone_steps
    ),
    "a server keeps out a trainer that joins": _wrapped(
        SimulatedServer, "_begin_generation", _keeps_dropped_trainers
    ),
    "the log lacks a trainer that joins": _wrapped(SimulatedLauncher, "_grant", _logs_no_joins),
    "the log has a dropped trainer": _wrapped(SimulatedLauncher, "_grant", _logs_all_trainers),
}


def _writes_only_its_newest_state(real: Any) -> Any:
    def write_newest(self: Any, lost: Any) -> None:
        self.update.old = None
        real(self, lost)

    return write_newest


def _writes_the_state_before(real: Any) -> Any:
    def write_newest(self: Any, lost: Any) -> None:
        if self.update.old is not None:
            self.update.state = self.update.old
        real(self, lost)

    return write_newest


def _forgets_tables(real: Any) -> Any:
    def init(self: Any, *args: Any, has_tables: bool) -> None:
        real(self, *args, has_tables=False)

    return init


def _changes_rows_in_place(real: Any) -> Any:
    def finish(self: Any, norm: Any) -> None:
        real(self, norm)
        if self.old is not None:
            self.old |= {name: self.state[name] for name in self._rows}

    return finish


def _never_closes(self: Any) -> bool:
    return False


# Faults of snapshots at losses
PLANTED_AT_LOSS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a server writes only its newest state": _wrapped(
        SimulatedServer, "_write_newest", _writes_only_its_newest_state
    ),
    "a server writes the state before its newest one as the newest": _wrapped(
        SimulatedServer, "_write_newest", _writes_the_state_before
    ),
    "a server makes steps after it has written its newest states": lambda m: m.setattr(
        GenerationGate, "is_closed", property(_never_closes, _do_nothing), raising=False
    ),
    "a server writes a state before its results are merged": lambda m: m.setattr(
        TrainerRounds, "merges_results", property(lambda self: False, _do_nothing), raising=False
    ),
    "the launcher does not wait for the newest states": lambda m: m.setattr(
        "tools.simulate.launcher.WRITE_PATIENCE", -1.0
    ),
    "a server forgets that a trainer has begun the next step": lambda m: m.setattr(
        NewestStates, "has_begun_step", True
    ),
    "a state counts that lacks the evictions after its step": _wrapped(
        NewestStates, "__init__", _forgets_tables
    ),
    "a server forgets the old values of rows": _wrapped(
        SimulatedUpdate, "_finish", _changes_rows_in_place
    ),
}


def _are_in_order(endpoints: Any) -> dict[str, str]:
    following = [*endpoints[1:], endpoints[0]]
    return dict(zip(endpoints, following, strict=True))


def _calls_the_state_before_newest(real: Any) -> Any:
    def newest(self: Any) -> Any:
        states = real(self)
        if len(states) < 2:
            return states
        return {max(states): states[min(states)]}

    return newest


def _writes_without_pending_inputs(real: Any) -> Any:
    def newest(self: Any) -> Any:
        if self.due is not None:
            self.due = self._step
        return real(self)

    return newest


def _forgets_to_acknowledge_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredReplicas, "received", lambda self, source: None)


def answer_evictions_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: trainers get the answer to an eviction before the backup evicts."""
    real = JointUpdate.replicate_eviction

    def replicate_eviction(self: Any, table: str, unused_for: int) -> bool:
        real(self, table, unused_for)
        self.waits_for_backup = False
        return True

    monkeypatch.setattr(JointUpdate, "replicate_eviction", replicate_eviction)


# Faults of replicas
PLANTED_IN_REPLICAS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a replica is on the host of its primary": lambda m: m.setattr(
        updates, "backups_of", _are_in_order
    ),
    "a replica is in the process of its primary": lambda m: m.setattr(
        updates, "backups_of", lambda endpoints: {x: x for x in endpoints}
    ),
    "a replica that is one step behind counts as the newest": _wrapped(
        Replica, "newest", _calls_the_state_before_newest
    ),
    "a backup forgets the inputs that it has not used yet": _wrapped(
        Replica, "newest", _writes_without_pending_inputs
    ),
    "trainers get their answers before the backup has the inputs": lambda m: m.setattr(
        JointUpdate, "is_replicated", True
    ),
    "a replica lacks evictions": lambda m: m.setattr(SimulatedUpdate, "evict", _do_nothing),
    "a backup does not acknowledge again after a break": _forgets_to_acknowledge_again,
    "a backup does not write the replica of a lost server": lambda m: m.setattr(
        SimulatedServer, "_endpoints_of", lambda self, names: []
    ),
}


def _notes_snapshots_without_their_files(
    self: Any, generation: int, who: str, step: int, snapshot: Any
) -> None:
    state = {name: 0 * x for name, x in snapshot.state.items()}
    self._note_snapshot(generation, who, step, dataclasses.replace(snapshot, state=state))


def _removes_snapshots_before_its_newest(self: Any, who: str) -> None:
    for step in [x for x in self._snapshots[who] if x < max(self._snapshots[who])]:
        del self._snapshots[who][step]


def _forgets_only_pending_checkpoints(self: Any, ended: Any, last: int) -> None:
    for name, error in ended:
        steps, _ = self._pending.pop(name)
        del self._blocks[name]
        if not error:
            self.saved[name] = steps


# Faults of full disks, and of checkpoints that trainers request in jobs with snapshots
PLANTED_WITH_FULL_DISKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a snapshot that a server cannot write counts": lambda m: m.setattr(
        SimulatedLauncher, "_note_unwritten", _notes_snapshots_without_their_files
    ),
    "a server removes the last common snapshot": lambda m: m.setattr(
        SimulatedLauncher, "_remove_old_snapshots", _removes_snapshots_before_its_newest
    ),
    "a server that goes back forgets pending checkpoints": lambda m: m.setattr(
        SaveRequests, "take_over", _do_nothing
    ),
    "a server goes back and keeps checkpoints of undone steps": lambda m: m.setattr(
        SaveRequests, "undo", _forgets_only_pending_checkpoints
    ),
}


def _admits_replaced_processes(real: Any) -> Any:
    def hello(self: Any, *args: Any) -> str:
        self._incarnations.clear()
        return str(real(self, *args))

    return hello


def _forgets_goodbyes(real: Any) -> Any:
    def look(self: Any, now: float) -> None:
        real(self, now)
        for trainer in self.known.values():
            if trainer.parted:
                trainer.messages.clear()

    return look


# Faults that a death and the break of a connection show
PLANTED_IN_BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a server admits a process that the launcher has replaced": _wrapped(
        TrainerRegistry, "hello", _admits_replaced_processes
    ),
    "a server forgets the goodbye of a trainer that is late": _wrapped(
        TrainerRegistry, "look", _forgets_goodbyes
    ),
}
