"""A parameter server as a process: its transport, signals, compiled update and checkpoints.

`dtrans.protocol.server.serving` handles the server's messages, and
`dtrans.protocol.server.server_loop` waits for events and deadlines.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dtrans.checkpoint.assemble import copy_array
from dtrans.checkpoint.runs import Mark, note
from dtrans.ir.array_fns import is_key, words_type
from dtrans.ir.cost import nbytes
from dtrans.ir.selection import omit
from dtrans.protocol import wire
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
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
from dtrans.run.parameter_server.state_writer import Keep, KeepLast, StateWriter
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, copy_state


class Server:
    """Server that runs a `listen_and_serv` equation.

    Args:
      update: the server's update.
      state: the initial values, by name.
      deadline: seconds that the server or another trainer waits for a trainer.
      patience: seconds without a message after which a connected process counts as dead.
      allow_remote: True to allow an endpoint that is not on loopback.
      keys: the token and encryption keys of the job.
      plan: the parts of the plan's fingerprint. Processes with other parts are refused.
      keep: function that saves a state under a name; None without a folder for checkpoints.
      keep_last: function that saves the state when the job ends by an error. It returns the path of
        the checkpoint, or None if the server has no arrays.

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
        keep: Keep | None = None,
        keep_last: KeepLast | None = None,
    ) -> None:
        served, retry = update.served, min(RETRY, patience)
        trainers = TrainerRegistry(
            served, deadline=deadline, plan=plan, secret=keys.secret, retry=retry
        )
        self._transport = ZmqTransport(keys, patience)
        self._loop = ServerLoop(
            self._transport,
            trainers,
            secret=keys.secret,
            retry=retry,
            ended_saves=self._ended_saves,
            ended_roles=ended_roles,
        )
        # All arrays except tables are copied, because updates donate them. `TableMemory` copies
        # the tables.
        tables: set[str] = set()
        for t in update.tables.values():
            if not t.updates_all:
                tables.update(t.arrays)
        dense = copy_state(omit(state, tables))
        state, say = {**state, **dense}, self._loop.say
        kind: SyncServer | AsyncServer
        if served.sync_mode:
            steps = SyncUpdate(update, state, served.trainers)
            self._update: SyncUpdate | BlockUpdates = steps
            kind = SyncServer(served, steps, trainers, say)
        else:
            self._update = blocks = BlockUpdates(update, state)
            kind = AsyncServer(served, blocks, blocks.state, trainers, say)
        kind.tables = self._update.server_tables
        self.refusals = Refusals(log)
        self._protocol = Serving(kind, trainers, say, self.refusals)
        self._door = self._open_door(update, allow_remote=allow_remote)
        self._keep_last = keep_last
        self._writer: StateWriter | None = None
        if keep is not None:
            spent = {n: x for n, x in dense.items() if self._is_copied(n, x)}
            self._writer = StateWriter(keep, spent, wake=self._transport.wake)
            self._protocol.keep = self._save
            self._update.before = self._writer.wait_copied

    def _open_door(self, update: ServerUpdate, *, allow_remote: bool) -> ZmqListener:
        """Bind the server's endpoint.

        Raises:
          ConfigError: the endpoint cannot be bound, or `allow_remote` does not allow it.
        """
        endpoint, keys = update.endpoint, self._transport.keys
        try:
            remedy = "Executor(allow_remote=True)"
            check_host("this pserver", endpoint, remedy, keys, allow_remote=allow_remote)
            frame, messages = wire.limits(_sizes(update))
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
        protocol = self._protocol
        ending: Any = None
        failure: BaseException | None = None
        try:
            self._loop.begin(protocol, self._door)
            ending = signal.signal(signal.SIGTERM, _ended) if _decides_signals() else None
            while not protocol.ended:
                self._loop.step()
            self._end_saves()
            note(protocol.kind.endpoint, protocol.trainers.known[0].session)
            for block in self._update.server_tables.report():
                log.info("pserver %s: %s", protocol.kind.endpoint, block)
            return self._state()
        except BaseException as e:
            failure = e
            if ending is not None:
                # A launcher sends SIGTERM to all roles after a failure. The server ignores it while
                # it saves its state.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            protocol.say_why(e)
            raise
        finally:
            self._end_saves()
            self._loop.close(failed=failure is not None)
            if failure is not None:
                self._save_last(failure)
            # `close` waits until the reason of the failure has been sent to all trainers.
            self._transport.close()
            if ending is not None:
                signal.signal(signal.SIGTERM, ending)

    def _state(self) -> dict[str, Any]:
        """Return all arrays of the server, by name."""
        return {**self._protocol.kind.state, **self._update.tables()}

    def _save(self, name: str, step: int) -> int:
        """Start saving the current state under a name; return the number of its arrays."""
        assert self._writer is not None
        tables = self._update.snapshot(self._protocol.trainers.deadline / 4)
        dense, spent = {}, []
        for n, x in omit(self._protocol.kind.state, tables).items():
            dense[n] = _snapshot(x)
            if self._is_copied(n, x):
                spent.append(n)
        mark = Mark(self._protocol.trainers.sessions, step)
        self._writer.begin(name, {**dense, **tables}, mark, spent)
        return len(dense) + len(tables)

    def _is_copied(self, name: str, x: Any) -> bool:
        """Return True if the snapshot of an array must be copied.

        On CPU, a snapshot is a view of the array's memory. If an update donates the array, the view
        must be copied before the update.
        """
        if name not in self._update.spent or not isinstance(x, jax.Array) or is_key(x.dtype):
            return False
        return {d.platform for d in x.devices()} == {"cpu"}

    def _save_last(self, failure: BaseException) -> None:
        """Save the state if the job has taken a step, and then ends by an error.

        Write the path of the checkpoint to the log, and add the path to the error as a note.
        """
        kind = self._protocol.kind
        if self._keep_last is None:
            return
        try:
            steps = kind.step_count()
            if not steps:
                return
            mark = Mark(self._protocol.trainers.sessions, steps)
            place = self._keep_last(self._state(), mark, self._protocol.asked())
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

    def _end_saves(self) -> None:
        """Wait until all requested checkpoints are written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _ended_saves(self) -> Iterator[tuple[str, str]]:
        """Yield (name, error text) for each checkpoint whose write ended since the last call."""
        if self._writer is not None:
            yield from self._writer.ended()


def _snapshot(x: Any) -> Any:
    """Return the current values of an array; on CPU, a NumPy view of the array's memory."""
    if is_key(x.dtype):
        return copy_array(x)
    return np.asarray(x)


def _sizes(update: ServerUpdate) -> dict[str, int]:
    """Return a map from the name of each array that a step sends or receives to its bytes."""
    types = dict(update.grad_types)
    for n in (*update.params, *update.tables):
        types[n] = words_type(update.types[n])
    return {n: nbytes(t) for n, t in types.items()}


def _decides_signals() -> bool:
    """Return True if this thread can set signal handlers, and SIGTERM has the default handler."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _ended(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)
