"""Process of one parameter server: connections, signals, compiled update and checkpoints.

`dtrans.protocol.server.serving` handles the server's messages, and
`dtrans.protocol.server.server_loop` waits for events and deadlines.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dtrans.checkpoint.runs import note
from dtrans.ir.array_fns import words_type
from dtrans.ir.cost import nbytes
from dtrans.ir.selection import omit
from dtrans.protocol import wire
from dtrans.protocol.generations import Generation, NewGeneration
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.generation_gate import GenerationGate
from dtrans.protocol.server.server_loop import ServerLoop
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry, log
from dtrans.protocol.transport import RETRY, ROLE_USER
from dtrans.run.net.ended_roles import ended_roles
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.sockets import check_host
from dtrans.run.net.zmq_transport import ZmqListener, ZmqTransport
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.server_replicas import ServerReplicas
from dtrans.run.parameter_server.server_saves import ServerSaves, ServerStorage
from dtrans.run.parameter_server.snapshots import GenerationStart
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, copy_state
from dtrans.run.parameter_server.update_parts import PartUpdate, split_update


class Server:
    """Parameter server in this process. It runs the `listen_and_serv` equation of a server program.

    Args:
      update: the server's update, from the equation.
      state: the initial values, by name.
      deadline: seconds that the server or another trainer waits for a trainer.
      patience: seconds without a message after which a connected process counts as dead.
      allow_remote: True to allow an endpoint that other hosts can reach.
      keys: the token and encryption keys of the job.
      plan: digests of the plan in named parts. Processes with other digests are refused.
      storage: stores the state: checkpoints, and snapshots from which the job continues after a
        failure.

    Attributes:
      refusals: counts and logs refused messages.

    Raises:
      ConfigError: the endpoint cannot be bound, or `allow_remote` does not allow it.
    """

    def __init__(
        self,
        update: ServerUpdate,
        state: Mapping[str, Any],
        *,
        deadline: float,
        patience: float,
        allow_remote: bool,
        keys: Keys,
        plan: Mapping[str, str],
        storage: ServerStorage,
    ) -> None:
        self._served_update, self._keys, self._plan = update, keys, plan
        self._deadline, self._retry = deadline, min(RETRY, patience)
        self._transport = ZmqTransport(keys, patience)
        self.refusals = Refusals(log)
        # Without a launcher that restarts roles, snapshots only determine the number of the first
        # step.
        self._first_step, self._snapshots = storage.first_step, storage.written_snapshots
        self._saves = ServerSaves(storage, wake=self._transport.wake)
        self._replicas: ServerReplicas | None = None
        if self._snapshots is not None and self._snapshots.has_replicas:
            self._replicas = ServerReplicas(self._snapshots.plan, update.endpoint)
        # With replicas, an update has no parts: the backup must receive the merged gradients of all
        # blocks before trainers receive parameters.
        self._parts: Sequence[PartUpdate] = ()
        if update.served.sync_mode and self._replicas is None:
            self._parts = split_update(update)
        self._update: SyncUpdate | BlockUpdates
        # stored greetings for the next generation: `GenerationGate.early`
        self._early: Mapping[bytes, wire.Message] = {}
        self._begin(state)
        self._door = self._open_door(update, allow_remote=allow_remote)

    def _begin(self, state: Mapping[str, Any], before: Serving | None = None) -> None:
        """Create new message handlers and a new update, at the start and after each failure.

        So no state from before the failure of another process has to be cleared. In a job without
        snapshots, the method is called once.

        Args:
          state: the initial arrays, by name.
          before: the message handlers before the failure; None at the start.
        """
        start = self._enter_generation(state, before)
        if before is not None and before.trainers.dropped != {*start.generation.dropped}:
            before.saves.undo(self._saves.finish(), start.step)
        trainers = self._new_registry(start.generation, before)
        self._loop = ServerLoop(
            self._transport,
            trainers,
            secret=self._keys.secret,
            retry=self._retry,
            ended_saves=self._saves.ended,
            ended_roles=ended_roles,
            generations=None if self._snapshots is None else self._snapshots.generations,
            write_newest=self._saves.write_newest,
        )
        kind = self._new_kind(start, trainers, before)
        kind.tables = self._update.server_tables
        has_gone_back = self._served_update.served.sync_mode and start.generation.number > 0
        self._update.server_tables.went_back = has_gone_back
        self._protocol = Serving(kind, trainers, self._loop.say, self.refusals)
        if before is not None:
            self._protocol.saves.take_over(before.saves)
        if self._snapshots is not None:
            self._protocol.gate = GenerationGate(
                start.generation, self._loop.say, self._snapshots.every
            )
        self._saves.begin(self._protocol, self._update, self._dense(kind.state), start)

    def _enter_generation(
        self, state: Mapping[str, Any], before: Serving | None
    ) -> GenerationStart:
        """Return the state with which the server begins, or continues after a failure.

        After a failure, a synchronous server loads a snapshot, and an asynchronous one
        keeps its state.

        Args:
          state: the initial arrays, by name.
          before: the message handlers before the failure; None at the start.
        """
        snapshots, step = self._snapshots, self._first_step
        if snapshots is None:
            counts = dict.fromkeys(range(self._served_update.served.trainers), step)
            return GenerationStart(Generation(), state, step, counts)
        if not snapshots.is_alone:
            return snapshots.begin(state)
        if before is None:
            return snapshots.begin_alone(state)
        # A surviving asynchronous server continues with its state.
        assert isinstance(before.kind, AsyncServer)
        return GenerationStart(
            snapshots.enter_alone(), self._update.state, counts=before.kind.counts.by_trainer
        )

    def _new_registry(self, generation: Generation, before: Serving | None) -> TrainerRegistry:
        """Return the registry of the trainers that take part in a generation.

        A *generation* is the part of the job between two failures. After a failure, trainers of an
        asynchronous server may first finish user code between two steps. The registry gets their
        ids as `busy`, so that the deadline does not apply to them.

        Args:
          generation: the generation.
          before: the message handlers before the failure; None at the start.
        """
        served = self._served_update.served
        return TrainerRegistry(
            served,
            deadline=self._deadline,
            plan=self._plan,
            secret=self._keys.secret,
            retry=self._retry,
            busy=() if before is None or served.sync_mode else before.trainers.present,
            generation=generation,
            sessions={} if before is None else before.trainers.sessions_by_id,
        )

    def _new_kind(
        self, start: GenerationStart, trainers: TrainerRegistry, before: Serving | None
    ) -> SyncServer | AsyncServer:
        """Create the server's update, and the synchronous or asynchronous handler of step messages.

        Args:
          start: the state with which the server starts.
          trainers: the registry of trainers.
          before: the message handlers before a failure; None at the start.
        """
        update, served, say = self._served_update, self._served_update.served, self._loop.say
        if not served.sync_mode:
            if before is None:
                self._update = BlockUpdates(update, self._copied(start.state))
            blocks, has_snapshots = self._update, self._snapshots is not None
            assert isinstance(blocks, BlockUpdates)
            return AsyncServer(
                *(served, blocks, blocks.state, trainers, say),
                counts=start.counts,
                has_snapshots=has_snapshots,
            )
        like = None if before is None else self._update
        assert not isinstance(like, BlockUpdates)
        steps = start.step - self._first_step
        replicas = self._replicas
        state = start.state if self._parts else self._copied(start.state)
        at_loss = self._snapshots is not None and self._snapshots.at_loss
        self._update = SyncUpdate(
            *(update, state, served.trainers, like, steps),
            keeps_old=at_loss,
            merges=replicas is not None,
            parts=self._parts,
        )
        return SyncServer(
            *(served, self._update, trainers, say),
            step=start.step,
            generation=start.generation.number,
            replication=None if replicas is None else replicas.replication,
            new_replica=None if replicas is None else replicas.new_replica,
            job_has_tables=at_loss
            and self._snapshots is not None
            and bool(self._snapshots.plan.tables.of),
        )

    def _dense(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays that do not belong to embedding tables with row updates, by name."""
        tables: set[str] = set()
        for t in self._served_update.tables.values():
            if not t.updates_all:
                tables.update(t.arrays)
        return omit(state, tables)

    def _copied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with copies of arrays outside of tables, which updates may overwrite."""
        return {**state, **copy_state(self._dense(state))}

    def _open_door(self, update: ServerUpdate, *, allow_remote: bool) -> ZmqListener:
        """Open the socket at which trainers connect.

        Raises:
          ConfigError: the endpoint cannot be bound, or `allow_remote` does not allow it.
        """
        endpoint, keys = update.endpoint, self._transport.keys
        try:
            remedy = "Executor(allow_remote=True)"
            check_host("this pserver", endpoint, remedy, keys, allow_remote=allow_remote)
            sizes = _sizes(update)
            if self._replicas is not None:
                sizes |= self._replicas.sizes()
            frame, messages = wire.limits(sizes)
            return self._transport.bind(
                endpoint,
                {ROLE_USER: "", OBSERVER: STATUS},
                frame=frame,
                messages=messages,
                name=f"pserver {endpoint}",
                has_local=True,
            )
        except BaseException:
            self._transport.close()
            raise

    # -- serving ---------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any]:
        """Serve until every trainer has closed; return the final state.

        Raises:
          DeadlineError: a trainer or another server did not connect in time, or was late in a step.
          PeerError: a trainer or another server failed, was refused, or left too early.
        """
        ending: Any = None
        failure: BaseException | None = None
        try:
            ending = signal.signal(signal.SIGTERM, _ended) if _decides_signals() else None
            while not self._serve_generation():
                self._rewind()
            self._saves.end()
            protocol = self._protocol
            note(protocol.kind.endpoint, protocol.trainers.sessions[0])
            for block in self._update.server_tables.report():
                log.info("pserver %s: %s", protocol.kind.endpoint, block)
            return self._saves.state()
        except BaseException as e:
            failure = e
            if ending is not None:
                # A launcher sends SIGTERM to all roles after a failure. The server ignores SIGTERM
                # while it saves its state.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._protocol.say_why(e)
            raise
        finally:
            self._saves.end()
            self._loop.close(failed=failure is not None)
            if failure is not None:
                self._saves.save_last(failure)
            # `close` waits until the reason of the failure has been sent to all trainers.
            self._transport.close()
            if ending is not None:
                signal.signal(signal.SIGTERM, ending)

    def _serve_generation(self) -> bool:
        """Serve until every trainer has closed; return False if a process fails before.

        After False, the caller continues with `_rewind`.
        """
        self._loop.begin(self._protocol, self._door, self._early)
        try:
            while not self._protocol.ended:
                self._loop.step()
        except NewGeneration:
            return False
        if self._snapshots is not None:
            self._snapshots.generations.leave()
        return True

    def _rewind(self) -> None:
        """Continue after a failure of another process, with new message handlers."""
        gate, endpoint = self._protocol.gate, self._protocol.kind.endpoint
        assert gate is not None
        before, self._early = self._protocol, gate.early
        self._loop.leave_peers(failed=True)
        self._begin({}, before)
        if isinstance(before.kind, AsyncServer):
            log.warning("pserver %s continues after the failure of a process", endpoint)
            return
        log.warning(
            "pserver %s goes back from step %d to step %d, where a new generation begins",
            endpoint,
            before.kind.step,
            self._protocol.kind.step,
        )


def _sizes(update: ServerUpdate) -> dict[str, int]:
    """Return the bytes of each array that a step sends or receives, by name."""
    types = dict(update.grad_types)
    for n in (*update.params, *update.tables):
        types[n] = words_type(update.types[n])
    sizes = {n: nbytes(t) for n, t in types.items()}
    for level in update.grad_levels:
        for n, t in level.items():
            sizes[n] = max(sizes[n], nbytes(t))
    return sizes


def _decides_signals() -> bool:
    """Return True if the server may set a handler for SIGTERM. A launcher ends it with SIGTERM.

    Python sets signal handlers only in the main thread. A handler of the user is not replaced.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _ended(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)
