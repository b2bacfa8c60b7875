"""Simulated server: the loop of real servers over a virtual network."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from dtrans.errors import CheckpointError
from dtrans.protocol.generations import Generation, NewGeneration, is_snapshot_due_alone
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.generation_gate import GenerationGate
from dtrans.protocol.server.server_loop import ServerLoop
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.launcher import SimulatedGenerations, SimulatedLauncher
from tools.simulate.network import Network, SimulatedListener, SimulatedTransport
from tools.simulate.process import Process
from tools.simulate.storage import SimulatedStorage
from tools.simulate.updates import (
    SimulatedBlocks,
    SimulatedSnapshot,
    SimulatedUpdate,
    replication,
    served,
    snapshot_of,
)


quiet = logging.getLogger("dtrans.simulation")
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


class SimulatedServer(Process):
    """Process of a simulated server.

    Attributes:
      endpoint: endpoint of the server.
      blocks: computation of an asynchronous server; None for a synchronous one.
      written_at: time at which the last snapshot of the process is written.
      storage: checkpoints of the process.
      loaded: snapshot that the process of an asynchronous server started from, or None.
    """

    def __init__(
        self,
        case: Case,
        endpoint: str,
        clock: Clock,
        random: Random,
        network: Network,
        prefix: str = "",
        launcher: SimulatedLauncher | None = None,
    ) -> None:
        super().__init__(f"{prefix}pserver {endpoint}", clock)
        self.endpoint = endpoint
        self.number = 0 if launcher is None else launcher.generation.number
        self._case, self._random, self._launcher = case, random, launcher
        self._transport = SimulatedTransport(network, self)
        self._listener: SimulatedListener | None = None
        self._written: list[str] = []  # checkpoints whose writes have ended
        self.written_at = 0.0
        self._disk_free_at = (
            0.0  # end of the last write: one thread writes snapshots and checkpoints
        )
        self.storage = SimulatedStorage(case, endpoint, self._write, self._has_full_disk)
        self._noted = 0  # the last step that the launcher has noted in this generation
        self._newest_snapshot: int | None = (
            None  # step of the last snapshot that was begun or loaded
        )
        self._has_entered = False
        # asynchronous: the computation, and steps of each trainer before the generation
        self.blocks: SimulatedBlocks | None = None
        self._counts: dict[int, int] = {}
        self.loaded: SimulatedSnapshot | None = None
        self._begin_generation(Generation())

    def _begin_generation(self, generation: Generation, before: Serving | None = None) -> None:
        """Create the state machines of a generation.

        Args:
          generation: the generation.
          before: state machine of the previous generation, if this process took part in it.
        """
        case, endpoint, random = self._case, self.endpoint, self._random
        self._generation, self._noted = generation, generation.snapshot or 0
        blocks = served(case, endpoint)
        work: Callable[[], None] = lambda: self.spend(random.expovariate(1.0) * 0.01)
        trainers = TrainerRegistry(
            blocks, deadline=case.deadline, plan={"init": "one"}, generation=generation
        )
        launcher = self._launcher
        self._loop = ServerLoop(
            self._transport,
            trainers,
            ended_saves=self._ended_writes,
            generations=None if launcher is None else SimulatedGenerations(launcher, self.name),
            write_newest=self._write_newest,
        )
        say = self._loop.say
        self.update: SimulatedUpdate | SimulatedBlocks
        kind: SyncServer | AsyncServer
        if blocks.sync_mode:
            merges = case.replicas > 0
            self.update = SimulatedUpdate(blocks, work, keeps_old=case.at_loss, merges=merges)
            if launcher is not None and generation.snapshot is not None:
                self.update.go_back(launcher.snapshot(endpoint, generation.snapshot))
            step = generation.snapshot or 0
            kind = SyncServer(
                *(blocks, self.update, trainers, say),
                step=step,
                generation=generation.number,
                replication=replication(case, endpoint),
                new_replica=functools.partial(self._new_replica, work),
                job_has_tables=case.at_loss and bool(case.tables),
            )
        else:
            if self.blocks is None:
                self.blocks = SimulatedBlocks(
                    blocks, work, lambda: self.now, geo=case.mode == "geo"
                )
            self.update = self.blocks
            terms = blocks, self.update, self.update.state, trainers, say
            has_snapshots = launcher is not None
            kind = AsyncServer(*terms, counts=self._counts, has_snapshots=has_snapshots)
        if launcher is not None:
            kind.between_steps = self._between_steps
        if isinstance(kind, SyncServer):
            kind.rounds.merges_results = case.has_results and endpoint == case.endpoints[0]
        self.machine = Serving(kind, trainers, say, Refusals(quiet))
        kind.tables = self.update.tables
        self.storage.state = lambda: kind.state
        self.machine.saves.start = self.storage.keep
        if before is not None:
            if before.trainers.dropped != trainers.dropped:
                before.saves.undo(self._finish_writes(), generation.snapshot or 0)
            self.machine.saves.take_over(before.saves)
        if launcher is not None:
            self.machine.gate = GenerationGate(generation, say, case.snapshots)

    def _new_replica(
        self, work: Callable[[], None], endpoint: str, state: Mapping[str, Any], step: int
    ) -> SimulatedUpdate:
        """Return the update of this server's copy of another server's state."""
        update = SimulatedUpdate(served(self._case, endpoint), work, keeps_old=True, merges=True)
        update.go_back(snapshot_of({n: x.copy() for n, x in state.items()}))
        return update

    def start(self) -> None:
        """Open the listener, and start the loop."""
        self.begun = True
        self._listener = self._transport.bind(self.endpoint, has_local=self._case.moves)
        self._listener.knows = lambda address: address in self.machine.trainers.by_address
        if self._launcher is None:
            self._loop.begin(self.machine, self._listener)
        else:
            try:
                self._enter_generation(None)
            except CheckpointError as e:
                self.end(e)
                return
        self.wake_at(self._loop.wakes)

    def _enter_generation(self, before: GenerationGate | None) -> None:
        """Enter the launcher's generation, as `dtrans.run.parameter_server.server` does."""
        assert self._launcher is not None and self._listener is not None
        generation = self._launcher.current()
        if not self._case.sync_mode:
            self._load_alone(self._launcher)
        self._begin_generation(generation, None if before is None else self.machine)
        self._launcher.enter(self.name, generation.number)
        kind = self.machine.kind
        if isinstance(kind, SyncServer):
            if not kind.has_tables:
                self._between_steps(kind.step)
        elif self._newest_snapshot is None:
            self._write_snapshot(kind.counts.total)
        early = {} if before is None else before.early
        self._loop.begin(self.machine, self._listener, early)

    def _rewind(self) -> None:
        gate = self.machine.gate
        assert gate is not None
        self._loop.leave_peers(failed=True)
        self._enter_generation(gate)

    def _load_alone(self, launcher: SimulatedLauncher) -> None:
        """Load the newest snapshot of an asynchronous server, only at the start of its process."""
        kind = self.machine.kind
        assert isinstance(kind, AsyncServer) and self.blocks is not None
        self._counts = kind.counts.by_trainer
        if not self._has_entered:
            self._newest_snapshot, snapshot = launcher.snapshot_alone(self.endpoint)
            if snapshot is not None:
                self.blocks.go_back(snapshot)
                self._counts, self.loaded = dict(snapshot.counts), snapshot
        self._has_entered = True

    def _between_steps(self, step: int) -> None:
        """Start writing a snapshot, as `dtrans.run.parameter_server.server_saves` does."""
        if self._case.sync_mode:
            is_due = self._generation.is_snapshot_due(step, 0, self._case.snapshots)
        else:
            is_due = is_snapshot_due_alone(step, self._newest_snapshot, self._case.snapshots)
        if is_due:
            self._write_snapshot(step)

    def _write_snapshot(self, step: int) -> None:
        """Begin a snapshot after the previous one is written, as `StateWriter.begin_snapshot`."""
        assert self._launcher is not None and self.machine.gate is not None
        self._newest_snapshot, kind = step, self.machine.kind
        self.spend(max(0.0, self.written_at - self.now))
        if isinstance(kind, AsyncServer):
            assert self.blocks is not None
            snapshot = self.blocks.snapshot(kind.counts.by_trainer)
        else:
            assert isinstance(self.update, SimulatedUpdate)
            snapshot = self.update.snapshot()
        terms = self.machine.gate.number, self.endpoint, step, snapshot
        end = self._launcher.write_snapshot(self, *terms, begin=self._disk_free_at)
        self.written_at = self._disk_free_at = end

    def _write_newest(self, lost: tuple[str, ...]) -> None:
        """Write the newest states, as `ServerSaves.write_newest` does."""
        assert self._launcher is not None
        kind, launcher = self.machine.kind, self._launcher
        if not self._case.at_loss:
            return
        assert isinstance(kind, SyncServer)
        states = kind.newest.states(self._endpoints_of(lost))
        for endpoint, step, state, is_early in states:
            if not launcher.has_written(endpoint, step):
                terms = self._generation.number, endpoint, step, snapshot_of(state)
                end = launcher.write_snapshot(
                    self, *terms, begin=self._disk_free_at, is_early=is_early
                )
                self.written_at = self._disk_free_at = end
        end = max(self.now, self._disk_free_at)
        launcher.note_end(self, self._generation.number, lost, end)

    def _endpoints_of(self, names: Sequence[str]) -> list[str]:
        return [name.removeprefix("pserver ") for name in names]

    def _write(self, name: str, seconds: float) -> float:
        """Schedule the end of a checkpoint's write, and return the time of the end."""
        begin = self.clock.now
        if self._launcher is not None:
            begin = max(begin, self._disk_free_at)
        time = self._disk_free_at = begin + seconds

        def end() -> None:
            pending = self.storage.pending.get(name)
            if pending is not None and pending.end == time:  # `_finish_writes` has not ended it
                self._written.append(name)
                self.wake_at(self.clock.now)

        self.clock.at(time, end)
        return time

    def _has_full_disk(self) -> bool:
        return self._launcher is not None and self._launcher.has_full_disk(self.name)

    def _finish_writes(self) -> list[tuple[str, str]]:
        """Wait until all checkpoints are written; return their names and errors."""
        self._written.clear()
        found = []
        for pending in [*self.storage.pending.values()]:
            self.spend(max(0.0, pending.end - self.now))
            found.append((pending.name, self.storage.end(pending.name)))
        return found

    def _ended_writes(self) -> list[tuple[str, str]]:
        """Return the name and the error of each checkpoint whose write has ended."""
        names, self._written = self._written, []
        return [(name, self.storage.end(name)) for name in names]

    def step(self) -> None:
        """Take a step of the loop."""
        try:
            self._step_or_rewind()
        except Exception as e:  # a real server catches all exceptions, too
            self.machine.say_why(e)
            self.end(e)
            return
        if self.machine.ended:
            if self._launcher is not None:
                self._launcher.leave(self.name)
            self.end(None)
        self.wake_at(self._loop.wakes)

    def _step_or_rewind(self) -> None:
        try:
            self._loop.step()
        except NewGeneration:
            self._rewind()
        step = self.machine.kind.step
        if self._launcher is not None and step != self._noted:
            self._noted = step
            self._launcher.note_step(self._generation.number, step)

    def close(self) -> None:
        """Close the connections. Messages that were sent still arrive."""
        self._transport.close()
