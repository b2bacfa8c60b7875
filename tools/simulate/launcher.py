"""Simulated launcher: starts failed roles again, and begins a new generation after each failure.

The launcher follows the rules of `dtrans.run.distributed.restarts`. It starts only the failed role
again if all other roles take part in the generation and there is a complete snapshot.
Otherwise it starts all roles again. In the first case, a job with a quorum drops a failed trainer
instead, while enough trainers are left. With `case.replaces`, the trainer joins the job again
later.

Functions of `dtrans.run.net.role_marks` decide for this launcher and for the real launcher: which
snapshots are complete, whether roles can go back to a snapshot, which servers write snapshots after
a failure, and which reports of failures count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random
from typing import Any

import numpy as np

from dtrans.errors import CheckpointError, LostPeerError
from dtrans.protocol.generations import Generation
from dtrans.protocol.trainer.geo_steps import GeoSnapshot
from dtrans.run.distributed.restarts.snapshots_at_loss import WRITE_PATIENCE
from dtrans.run.net.generation_log import GenerationRecord
from dtrans.run.net.role_marks import (
    RoleMark,
    can_complete_snapshot,
    can_go_back,
    complete_snapshots,
    find_left,
    find_writers,
    have_entered,
    is_waiting,
    newest_alone,
    old_snapshot,
    without_undone,
)
from tools.simulate.case import Case
from tools.simulate.clock import Clock, Slot
from tools.simulate.network import drawn_delay
from tools.simulate.process import Process
from tools.simulate.updates import SimulatedSnapshot


NOTICE = 0.05  # typical seconds until the launcher notices an end or reads a report
WRITE = 0.1  # typical seconds in which a server writes a snapshot
END = "end"  # channel of a server's answer to the end of a generation
SNAPSHOT = "snapshot"  # channel of a server's written snapshots
# Seconds in which a server notices the end of its generation, after it has waited for its disk
DISK_TOLERANCE = 1.0
READY = 0.3  # typical seconds until a dropped trainer has started again, and is ready to join
START = 0.5  # typical seconds until a process that was started begins to connect


@dataclasses.dataclass(frozen=True)
class GenerationEnd:
    """End of a generation after one role failed, at which all live servers wrote their states.

    Attributes:
      newest: step of the newest server.
      received: newest step whose parameters a trainer has received from all servers. In a job with
        tables, a live server must also know that a trainer has begun the next step.
      snapshot: step of the snapshot at the start of the next generation.
      has_results: False if no trainer was sent the results of the step `snapshot`, although the
        server that merges results has survived.
    """

    newest: int
    received: int
    snapshot: int
    has_results: bool


class SimulatedLauncher:
    """Launcher of a simulated job with snapshots.

    Args:
      case: the simulated case.
      clock: virtual clock.
      random: source of random durations.
      new_role: creates a process for a role, by name.

    Attributes:
      roles: the current process of each role, by name.
      processes: all processes so far.
      generation: the current generation.
      records: the log of all generations.
      rewinds: for each generation after the first, (step of the newest server, step of the
        snapshot).
      restarts: for each of these generations, the started roles: "in place" or "all". "none": a
        trainer was dropped. "join": a dropped trainer joins. "left": an asynchronous trainer left
        while servers waited for it.
      ends: ends of generations whose newest states all live servers have written.
      late: names of the live servers that did not begin to write their newest states in time,
        although their disks were not busy.
      unwritten: generation and step of each snapshot that a role could not write, because its disk
        was full.
    """

    def __init__(
        self, case: Case, clock: Clock, random: Random, new_role: Callable[[str], Any]
    ) -> None:
        self.generation = Generation()
        self.records = [GenerationRecord(0, None, tuple(range(case.trainers)))]
        self.roles: dict[str, Any] = {}
        self.processes: list[Any] = []
        self.rewinds: list[tuple[int, int]] = []
        self.restarts: list[str] = []
        self.ends: list[GenerationEnd] = []
        self.late: list[str] = []
        self.unwritten: list[tuple[int, int]] = []
        # role name -> (last generation whose end the role has answered, lost servers)
        self._ended: dict[str, tuple[int, tuple[str, ...]]] = {}
        # grants the next generation when the servers have written their newest states
        self._grant_after_end: Callable[[], None] | None = None
        self._announced: tuple[str, ...] = ()  # lost servers of an ending generation
        self._writing = set[str]()  # servers that have begun to write their newest states
        self._next_lost: list[Process] = []  # roles that were lost while the generation was ending
        self._case, self._clock, self._random = case, clock, random
        self._new_role = new_role
        self._entered: dict[str, int] = {}
        self._is_in_place = False  # True if live roles have continued in this generation
        self._left: set[str] = set()
        self._starting: set[str] = set()
        writers = [*case.endpoints]
        if case.has_means:
            writers += [f"trainer {k}" for k in range(case.trainers)]
        self._snapshots: dict[str, dict[int, SimulatedSnapshot]] = {who: {} for who in writers}
        # generation that each writer of snapshots has entered last
        self._snapshot_generations = dict.fromkeys(writers, 0)
        # number of the generation in which each role's current process was started
        self._incarnations: dict[str, int] = {}
        self._early = set[tuple[str, int]]()  # writer and step of each early piece
        self._geo_snapshots: dict[str, GeoSnapshot] = {}
        self._geo_pushes: dict[str, dict[int, Mapping[str, np.ndarray]]] = {}
        # GEO-SGD: changes of rows in each step of a trainer, by name of the trainer
        self.row_changes: dict[str, dict[int, Mapping[str, np.ndarray]]] = {}
        self._write_time = drawn_delay(random, WRITE)
        self._due = 0  # number of scheduled actions
        self._newest = 0  # number of updates of the newest server

    def begin(self) -> None:
        """Start all roles."""
        servers = [f"pserver {ep}" for ep in self._case.endpoints]
        for name in (*servers, *(f"trainer {k}" for k in range(self._case.trainers))):
            self._start(name)

    @property
    def is_over(self) -> bool:
        """True if all current processes have ended, and none will start."""
        return not self._due and all(role.over for role in self.roles.values())

    def current(self) -> Generation:
        """Return the current generation."""
        return self.generation

    # -- reports of roles ------------------------------------------------------------------------

    def enter(self, name: str, generation: int) -> None:
        """Note that a role takes part in a generation."""
        self._entered[name] = generation
        who = name.removeprefix("pserver ")
        if self._case.sync_mode and who in self._snapshots:
            self._snapshot_generations[who] = generation
            self._forget_snapshots(who, self.records[generation].snapshot)

    def incarnation(self, name: str) -> int:
        """Return the number of the generation in which a role's current process was started."""
        return self._incarnations.get(name, 0)

    def leave(self, name: str) -> None:
        """Note that a role has left after its last step."""
        self._left.add(name)
        if self._entered[name] < self.generation.number:
            self._later(self._look_at_left, name)

    def report_lost(self, reporter: str, generation: int, name: str) -> None:
        """End a role, because another role has reported it as lost in the current generation."""
        self._later(self._end_reported, reporter, generation, name)

    def note_step(self, generation: int, step: int) -> None:
        """Note the number of updates of a server in the current generation."""
        if generation == self.generation.number:
            self._newest = max(self._newest, step)

    def write_snapshot(
        self,
        writer: Process,
        generation: int,
        who: str,
        step: int,
        snapshot: SimulatedSnapshot,
        *,
        begin: float = 0.0,
        is_early: bool = False,
    ) -> float:
        """Write a role's piece of a snapshot, which takes some time.

        Args:
          writer: the role's process.
          generation: number of the role's generation, which may be older than the launcher's.
          who, step, snapshot: endpoint of the server or name of the trainer, and the step and the
            state of the snapshot.
          begin: time at which the earlier pieces of the process are written.
          is_early: as for `dtrans.run.net.role_folder.RoleFolder.note_snapshot`.

        Returns:
          The time at which the piece is written.
        """

        def end() -> None:
            if writer.killed:
                return
            if self.has_full_disk(writer.name):
                self._note_unwritten(generation, who, step, snapshot)
                return
            if is_early and generation == self._snapshot_generations[who]:
                self._early.add((who, step))
            self._note_snapshot(generation, who, step, snapshot)

        time = max(writer.now, begin) + self._write_time()
        self._clock.at(time, end, Slot(writer, SNAPSHOT, (generation, step, snapshot)))
        return time

    def has_full_disk(self, name: str) -> bool:
        """Return True while the disk of a role is full."""
        now, full = self._clock.now, [x for x in self._case.events if x.kind == "full"]
        return any(x.who == name and x.time <= now < x.time + x.seconds for x in full)

    def _note_unwritten(
        self, generation: int, who: str, step: int, snapshot: SimulatedSnapshot
    ) -> None:
        """Note a snapshot that a role could not write: the role warns, and the job continues."""
        self.unwritten.append((generation, step))

    def _note_snapshot(
        self, generation: int, who: str, step: int, snapshot: SimulatedSnapshot
    ) -> None:
        """Note a written piece, as `RoleFolder.note_snapshot` and `note_snapshot_alone` do."""
        if not self._case.sync_mode:
            self._snapshots[who] = {step: snapshot}
        elif generation == self._snapshot_generations[who] and not self._is_replaced_after(
            generation, who
        ):
            self._snapshots[who][step] = snapshot
            if generation == self.generation.number:
                self._remove_old_snapshots(who)

    def _remove_old_snapshots(self, who: str) -> None:
        """Remove old snapshots of a role, as `RoleFolder.remove_old_snapshots` does."""
        before = old_snapshot(self._complete_snapshots(self.generation.dropped))
        for step in [
            x for x in self._snapshots[who] if x < before and x != self.generation.snapshot
        ]:
            del self._snapshots[who][step]

    def _is_replaced_after(self, generation: int, who: str) -> bool:
        """Return True if a writer of snapshots has started again after a generation."""
        name = who if who.startswith("trainer") else f"pserver {who}"
        return self.incarnation(name) > generation

    def write_geo_snapshot(self, writer: Process, name: str, snapshot: GeoSnapshot) -> float:
        """Write a snapshot of a trainer of GEO-SGD; return the time at which it is written."""

        def end() -> None:
            if not writer.killed:
                self._geo_snapshots[name] = snapshot

        time = writer.now + self._write_time()
        self._clock.at(time, end, Slot(writer, SNAPSHOT, (snapshot.step, snapshot)))
        return time

    def geo_snapshot(self, name: str) -> GeoSnapshot | None:
        """Return the newest snapshot of a trainer of GEO-SGD, or None."""
        snapshot = self._geo_snapshots.get(name)
        if snapshot is None:
            return None
        return dataclasses.replace(snapshot, pushes=dict(self._geo_pushes.get(name, {})))

    def note_geo_push(self, name: str, count: int, ids: Mapping[str, np.ndarray]) -> None:
        """Note the ids of the rows in a push, as `GeoSnapshots` does.

        Args:
          name: name of the trainer.
          count: number of pushed steps after the push.
          ids: ids of the rows, by name of the table.
        """
        self._geo_pushes.setdefault(name, {})[count] = ids

    def forget_geo_pushes(self, name: str, after: int) -> None:
        """Forget the pushes of a lost process that no server has received.

        Args:
          name: name of the trainer.
          after: number of steps that a server has received.
        """
        for count in [n for n in self._geo_pushes.get(name, ()) if n > after]:
            del self._geo_pushes[name][count]

    def snapshot_alone(self, who: str) -> tuple[int | None, SimulatedSnapshot | None]:
        """Return the step and the state of an asynchronous server's snapshot, if it has one."""
        for step, snapshot in self._snapshots[who].items():
            return step, snapshot
        return None, None

    def snapshot(self, who: str, step: int) -> SimulatedSnapshot:
        """Return a role's piece of a snapshot.

        Raises:
          CheckpointError: the role has not written it.
        """
        if step not in self._snapshots[who]:
            raise CheckpointError(f"{who} has no snapshot of step {step}")
        return self._snapshots[who][step]

    # -- lost roles ------------------------------------------------------------------------------

    def _look_at_left(self, name: str) -> None:
        """Act on a role that has left in an old generation, so that it cannot go back.

        Servers do not wait for it any longer if they have all of its steps. Otherwise all roles
        start again.
        """
        is_old = name in self._left and self._entered[name] < self.generation.number
        if not is_old or self._grant_after_end is not None:
            return
        if name not in names_of(self._find_left()):
            self._start_all()
        elif name not in names_of(self.generation.left):
            self._grant("left", self.generation.dropped, [])

    def _end_reported(self, reporter: str, generation: int, name: str) -> None:
        """End a reported role, as `Restarts._look` does."""
        if self._grant_after_end is not None or generation != self.generation.number:
            return
        if is_waiting(reporter, self._marks(), self._running()):
            self.roles[name].kill()

    def _note_end(self, role: Process) -> None:
        """Note the end of a process. An end without an error needs no action."""
        if role.killed or role.error is not None:
            self._later(self._on_end, role)

    def _on_end(self, role: Process) -> None:
        """Handle the end of a process, a moment after it."""
        if self._is_replaced(role):
            return
        if not self._case.at_loss:
            self._restart(role)
        elif self._grant_after_end is not None:
            self._next_lost.append(role)
        elif role.killed or isinstance(role.error, LostPeerError):
            self._end_generation(functools.partial(self._restart, role), role.name)

    def _is_replaced(self, role: Process) -> bool:
        return self.roles.get(role.name) is not role or role.name in self._starting

    def _restart(self, role: Process) -> None:
        """Start a lost role again, or all roles."""
        if role.killed:
            self._replace(role.name)
        elif isinstance(role.error, LostPeerError):
            self._start_all()

    # -- snapshots at failures ---------------------------------------------------------------------

    def _end_generation(self, grant: Callable[[], None], lost: str = "") -> None:
        """Make the servers write their newest states, as `SnapshotsAtLoss.request` does.

        Args:
          grant: grants the next generation.
          lost: name of the lost role; empty if a trainer joins.
        """
        self._grant_after_end, self._next_lost, self._writing = grant, [], set()
        marks, number = self._marks(), self.generation.number
        writers = find_writers(marks, self._servers, self._running() - {lost}, number)
        if self._announce(writers):
            self._look_at_writers(writers, self._clock.now + WRITE_PATIENCE)
        else:
            self._end_wait(is_exact=False)

    def _announce(self, writers: set[str]) -> bool:
        """Announce the end of the generation and lost servers. Return False without snapshot."""
        if not can_complete_snapshot(self._marks(), self._servers, writers):
            return False
        self._announced = tuple(name for name in self._servers if name not in writers)
        self.generation = dataclasses.replace(self.generation, is_ending=True, lost=self._announced)
        return True

    def _look_at_writers(self, writers: set[str], limit: float) -> None:
        """Grant the next generation if all servers have written their states, or are late."""
        number, is_late = self.generation.number, self._clock.now > limit
        marks = self._marks()
        late = {name for name in writers if not marks[name].has_ended(number, self._announced)}
        gone = {name for name in late if self.roles[name].over}
        if late and not is_late:
            writers -= gone
            if not gone or self._announce(writers):
                self._later(self._look_at_writers, writers, limit)
                return
        if is_late:
            is_busy = {name for name in late - gone if self._is_busy(self.roles[name], limit)}
            self.late += sorted(late - gone - is_busy - self._writing)
        is_written = number not in [generation for generation, _ in self.unwritten]
        self._end_wait(is_exact=not late and is_written and self._can_lose_dead_servers())

    def _is_busy(self, server: Any, limit: float) -> bool:
        """Return True if the server has waited for its slow disk until shortly before a time.

        Before it writes a snapshot, a server waits until its previous snapshot is written.
        Meanwhile it reads no messages.
        """
        return bool(server.written_at > limit - DISK_TOLERANCE)

    def _end_wait(self, *, is_exact: bool) -> None:
        """Grant the next generation.

        Args:
          is_exact: True if the servers have written their newest states, so that no step is lost.
        """
        grant, newest = self._grant_after_end, self._newest
        received, lacking = self._newest_received(), self._lacking()
        assert grant is not None
        self._grant_after_end = None
        grant()
        if is_exact:
            snapshot = self.generation.snapshot or 0
            self.ends.append(
                GenerationEnd(newest, received, snapshot, has_results=snapshot != lacking)
            )
        for role in self._next_lost:
            self._on_end(role)

    def _lacking(self) -> int | None:
        """Return the newest step if the step's results are not merged yet, else None."""
        server = self.roles[self._servers[0]]
        if server.over or not self._case.has_results:
            return None
        if server.machine.kind.newest.has_merged_results:
            return None
        return int(server.machine.kind.step)

    def _can_lose_dead_servers(self) -> bool:
        """Return True if the job can continue without repeating a step, although servers failed.

        This is possible in a job with replicas, if the failed servers are one server, or all
        servers on one of several hosts.
        """
        dead = tuple(name for name in self._servers if self.roles[name].over)
        hosts = {name.partition(":")[0] for name in dead}
        can_be_lost = len(dead) == 1 or (self._case.hosts > 1 and len(hosts) == 1)
        return not dead or (dead == self._announced and can_be_lost and self._case.replicas > 0)

    @property
    def _servers(self) -> list[str]:
        return [f"pserver {ep}" for ep in self._case.endpoints]

    def _newest_received(self) -> int:
        """Return the newest step that must not be lost. See `GenerationEnd.received`."""
        newest = 0
        if self._case.tables:
            for name in self._servers:
                role = self.roles[name]
                if not role.over and self._entered.get(name) == self.generation.number:
                    kind = role.machine.kind
                    newest = max(newest, kind.step - (not kind.newest.has_begun_step))
            return newest
        for k in range(self._case.trainers):
            name = f"trainer {k}"
            if self._entered.get(name) == self.generation.number and name not in self._starting:
                newest = max(newest, self.roles[name].newest_received)
        return newest

    def note_end(
        self, server: Process, generation: int, lost: tuple[str, ...], time: float
    ) -> None:
        """Note that a server writes its newest states at the end of a generation.

        Args:
          server: the server's process.
          generation: number of the generation.
          lost: names of the roles whose failure ended the generation.
          time: virtual time at which the write is complete.
        """
        self._writing.add(server.name)

        def end() -> None:
            if not server.killed:
                self._ended[server.name] = generation, lost

        self._clock.at(time, end, Slot(server, END, (generation,)))

    def has_written(self, who: str, step: int) -> bool:
        """Return True if a role has written its piece of the snapshot of a step."""
        return step in self._snapshots[who]

    def _replace(self, name: str) -> None:
        """Start a failed role again; start all roles again if other roles cannot go back."""
        if not self.generation.has_role(name):
            return
        expected = self._members() if name in self._servers else self._expected()
        others = [x for x in expected if x != name]
        number, marks = self.generation.number, self._marks()
        is_pending = self._is_in_place and any(self._entered.get(x) != number for x in others)
        goes_back = can_go_back(marks, others, self._running(), is_pending=is_pending)
        if self._drops(name):
            dropped = self.generation.dropped_with(name)
            if goes_back and self._newest_snapshot(dropped) is not None:
                self._grant("none", dropped, [name])
                self._entered.pop(name, None)
                self._left.discard(name)
                if self._case.replaces:
                    self._later(self._look_at_ready, name, typical=READY)
                return
        if not goes_back or not self._has_snapshot:
            self._start_all()
            return
        self._grant("in place", self.generation.dropped, [name])
        self._entered.pop(name, None)
        self._left.discard(name)
        self._start_later(name)

    def _look_at_ready(self, name: str) -> None:
        """Let a dropped trainer join if it is ready; otherwise look again later."""
        if self.generation.has_role(name):  # all roles have started again
            return
        if self._can_join():
            join = functools.partial(self._join, name)
            self._end_generation(join) if self._case.at_loss else join()
        elif any(not self.roles[x].over or x in self._starting for x in self._members()):
            self._later(self._look_at_ready, name)

    def _can_join(self) -> bool:
        """Return True if dropped trainers can join, as `JobGenerations.find_ready` does."""
        if self._grant_after_end is not None or not {*self._expected()} <= self._running():
            return False
        return (
            have_entered(self._marks(), self._expected(), self.generation.number)
            and self._has_snapshot
        )

    def _join(self, name: str) -> None:
        """Grant a generation in which a dropped trainer takes part again."""
        dropped = tuple(k for k in self.generation.dropped if name != f"trainer {k}")
        self._grant("join", dropped, [name])
        self._start_later(name)
        for other in self._members():
            if other in self._left:  # the role left while the generation was ending
                self._later(self._look_at_left, other)

    def _members(self) -> list[str]:
        """Return the names of the roles that take part in the generation."""
        return [name for name in self.roles if self.generation.has_role(name)]

    def _expected(self) -> list[str]:
        """Return the names of roles that must enter the next generation while servers run."""
        left = names_of(self._find_left())
        return [name for name in self._members() if name not in left]

    def _find_left(self) -> tuple[int, ...]:
        """Return the ids of the trainers that need not go back, as `JobGenerations` does."""
        marks = self._marks().items()
        current = {name: mark for name, mark in marks if mark.generation >= self.incarnation(name)}
        return find_left(current, self._servers, self._incarnations)

    def _drops(self, name: str) -> bool:
        """Return True if a lost role is a trainer, and enough trainers are left without it."""
        left = self._case.trainers - len(self.generation.dropped) - 1
        return name.startswith("trainer") and left >= self._case.quorum > 0

    def _running(self) -> set[str]:
        """Return the names of the roles whose process runs or will start in a moment."""
        return {name for name in self.roles if name in self._starting or not self.roles[name].over}

    def _marks(self) -> dict[str, RoleMark]:
        """Return the reports of the roles' current processes that have entered a generation."""
        marks = {}
        for name, number in self._entered.items():
            ended, ended_for = self._ended.get(name, (-1, ()))
            marks[name] = RoleMark(
                number,
                left=name in self._left,
                is_alone=not self._case.sync_mode and name in self._servers,
                writes_newest=self._case.at_loss,
                writes_replicas=self._case.replicas > 0,
                ended=ended,
                ended_for=ended_for,
            )
        return marks

    def _start_all(self) -> None:
        """End all roles, and start all of them in a new generation."""
        if not self._has_snapshot:
            for who in self._snapshots:
                self._forget_snapshots(who, None)
            self._geo_snapshots.clear()
            self._geo_pushes.clear()
        self._grant("all", () if self._case.replaces else self.generation.dropped, self.roles)
        for name, role in list(self.roles.items()):
            if not self.generation.has_role(name):
                continue
            role.when_over = None
            if not role.over:
                role.kill()
            self._entered.pop(name, None)
            self._start_later(name)
        self._left.clear()

    def _start_later(self, name: str) -> None:
        if name not in self._starting:
            self._starting.add(name)
            self._later(self._start, name, typical=START)

    def _newest_snapshot(self, dropped: Collection[int] = ()) -> int | None:
        """Return the newest snapshot that all roles except dropped trainers have written."""
        return max(self._complete_snapshots(dropped), default=None)

    def _complete_snapshots(self, dropped: Collection[int]) -> set[int]:
        generation = Generation(dropped=tuple(dropped))
        writers = [who for who in self._snapshots if generation.has_role(who)]
        return complete_snapshots(self._snapshot_marks(), writers)

    @property
    def _has_snapshot(self) -> bool:
        if self._case.sync_mode:
            return self._newest_snapshot(self.generation.dropped) is not None
        return bool(newest_alone(self._snapshot_marks(), self._case.endpoints))

    def _snapshot_marks(self) -> dict[str, RoleMark]:
        """Return the reports of snapshots, by endpoint of the server or name of the trainer."""
        marks, is_alone = {}, not self._case.sync_mode
        for who, snapshots in self._snapshots.items():
            early = {step for step in snapshots if (who, step) in self._early}
            rest = tuple(sorted({*snapshots} - early))
            marks[who] = RoleMark(
                self._snapshot_generations[who], rest, (*early,), is_alone=is_alone
            )
        return (
            marks
            if is_alone
            else without_undone(marks, self.generation.number, self.generation.snapshot)
        )

    def _grant(self, restarts: str, dropped: tuple[int, ...], started: Iterable[str]) -> None:
        """Grant the next generation.

        Args:
          restarts: the kind of the restart (`restarts`).
          dropped: ids of the dropped trainers.
          started: names of the roles that start again or are dropped.
        """
        self.restarts.append(restarts)
        snapshot = None
        if self._case.sync_mode:
            snapshot = self._newest_snapshot(dropped)
            self.rewinds.append((self._newest, snapshot or 0))
            self._newest = snapshot or 0
        number = self.generation.number + 1
        self._incarnations |= dict.fromkeys(started, number)
        trainers = [f"trainer {k}" for k in range(self._case.trainers)]
        incarnations = tuple(map(self.incarnation, trainers))
        generation = self.generation.next(snapshot, dropped, self._find_left())
        self.generation = dataclasses.replace(generation, incarnations=incarnations)
        self._is_in_place = restarts != "all"
        members = self.generation.members(self._case.trainers)
        self.records.append(GenerationRecord(self.generation.number, snapshot, members))

    def _forget_snapshots(self, who: str, after: int | None) -> None:
        """Forget a role's snapshots after a step (all for None), as `RoleFolder.enter` does."""
        self._early = {piece for piece in self._early if piece[0] != who}
        snapshots = self._snapshots[who]
        for step in [x for x in snapshots if after is None or x > after]:
            del snapshots[step]

    def _start(self, name: str) -> None:
        self._starting.discard(name)
        role = self.roles[name] = self._new_role(name)
        self.processes.append(role)
        role.when_over = functools.partial(self._note_end, role)
        self._later(_start_unless_killed, role, typical=0.1)

    def _later(self, act: Callable[..., None], *args: object, typical: float = NOTICE) -> None:
        self._due += 1

        def run() -> None:
            self._due -= 1
            act(*args)

        time = self._clock.now + self._random.expovariate(1.0) * typical
        self._clock.at(time, run, Slot(None, (act.__name__, *args)))


def names_of(trainers: Iterable[int]) -> tuple[str, ...]:
    """Return the names of trainers."""
    return tuple(f"trainer {k}" for k in trainers)


def _start_unless_killed(role: Process) -> None:
    if not role.killed:
        role.start()


class SimulatedGenerations:
    """Implementation of `dtrans.protocol.generations.Generations` for one role."""

    def __init__(self, launcher: SimulatedLauncher, name: str) -> None:
        self._launcher, self._name = launcher, name
        self.incarnation = launcher.incarnation(name)

    def current(self) -> Generation:
        """Implement `Generations.current`."""
        return self._launcher.current()

    def enter(self, generation: Generation) -> None:
        """Implement `Generations.enter`."""
        self._launcher.enter(self._name, generation.number)

    def leave(self) -> None:
        """Implement `Generations.leave`."""
        self._launcher.leave(self._name)

    def report_lost(self, generation: int, role: str, reason: str) -> None:
        """Implement `Generations.report_lost`."""
        self._launcher.report_lost(self._name, generation, role)
