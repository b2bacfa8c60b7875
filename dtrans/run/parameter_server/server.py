"""A parameter server as a process: its transport, signals, compiled update and checkpoints.

Its protocol is `dtrans.protocol.serving`, and `dtrans.protocol.server_loop` drives that.
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
from dtrans.protocol import wire
from dtrans.protocol.async_server import AsyncServer
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.presence import RETRY, Presence, log
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server_loop import ServerLoop
from dtrans.protocol.serving import Serving
from dtrans.protocol.sync_server import SyncServer
from dtrans.protocol.trainer_line import DOOR
from dtrans.run.net.ended_roles import ended_roles
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.sockets import check_host
from dtrans.run.net.zmq_transport import ZmqDoor, ZmqTransport
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.state_writer import Keep, KeepLast, StateWriter
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, own_buffers


class Server:
    """Serves one `listen_and_serv`.

    Args:
      update: what to do with gradients.
      state: name to array; the initial values.
      deadline: seconds that trainers may keep the server, or each other, waiting.
      patience: seconds without a sign of another process after which it counts as dead.
      allow_remote: bind an endpoint that is not loopback.
      keys: of the job.
      plan: the parts of the fingerprint of the plan, which trainers and other servers must have
        too.
      keep: saves a state, as `serve` returns it, under a name, with the mark of the run and step;
        None where there is no place for checkpoints.
      keep_last: saves the state of a job that ends by an error, given the mark and the checkpoints
        that were asked for; returns where, or None where there is nothing to be saved.

    Raises:
      ConfigError: an endpoint that may not be, or cannot be bound.
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
        trainers = Presence(served, deadline=deadline, plan=plan, secret=keys.secret, retry=retry)
        self._transport = ZmqTransport(keys, patience)
        self._loop = ServerLoop(
            self._transport,
            trainers,
            secret=keys.secret,
            retry=retry,
            ended_saves=self._ended_saves,
            ended_roles=ended_roles,
        )
        # have memory of their own
        tables = {n for t in update.tables.values() if not t.updates_all for n in t.arrays}
        own = own_buffers({n: x for n, x in state.items() if n not in tables})
        state, say = {**state, **own}, self._loop.say
        kind: SyncServer | AsyncServer
        if served.sync_mode:
            self._update: SyncUpdate | BlockUpdates = (
                steps := SyncUpdate(update, state, served.trainers)
            )
            kind = SyncServer(served, steps, trainers, say)
        else:
            self._update = blocks = BlockUpdates(update, state)
            kind = AsyncServer(served, blocks, blocks.state, trainers, say)
        kind.tables = self._update.held
        self.refusals = Refusals(log)
        self._protocol = Serving(kind, trainers, say, self.refusals)
        self._door = self._open_door(update, allow_remote=allow_remote)
        self._keep_last = keep_last
        self._writer: StateWriter | None = None
        if keep is not None:
            spent = {n: x for n, x in own.items() if self._is_copied(n, x)}
            self._writer = StateWriter(keep, spent, wake=self._transport.wake)
            self._protocol.keep = self._save
            self._update.before = self._writer.wait_copied

    def _open_door(self, update: ServerUpdate, *, allow_remote: bool) -> ZmqDoor:
        """Bind the endpoint. Raises ConfigError where that may not be, or cannot be bound."""
        endpoint, keys = update.endpoint, self._transport.keys
        try:
            remedy = "Executor(allow_remote=True)"
            check_host("this pserver", endpoint, remedy, keys, allow_remote=allow_remote)
            frame, messages = wire.limits(_sizes(update))
            return self._transport.bind(
                endpoint,
                {DOOR: "", OBSERVER: STATUS},
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
        """Serve until every trainer has closed; the state that is left.

        Raises:
          DeadlineError: a trainer that did not come, fell silent or kept the others waiting, or a
            server that did. PeerError: one that failed, refused, or left before the others.
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
            for block in self._update.held.report():
                log.info("pserver %s: %s", protocol.kind.endpoint, block)
            return self._state()
        except BaseException as e:
            failure = e
            if (
                ending is not None
            ):  # launchers end all roles when one has failed: first this one writes what it has
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            protocol.say_why(e)
            raise
        finally:
            self._end_saves()
            self._loop.close(failed=failure is not None)
            if failure is not None:
                self._save_last(failure)
            self._transport.close()  # which waits for last words of what has been closed
            if ending is not None:
                signal.signal(signal.SIGTERM, ending)

    def _state(self) -> dict[str, Any]:
        """What the server holds."""
        return {**self._protocol.kind.state, **self._update.tables()}

    def _save(self, name: str, made: int) -> int:
        """Begin to save the server's present state under a name; return the number of its
        blocks."""
        assert self._writer is not None
        tables = self._update.snapshot(self._protocol.trainers.deadline / 4)
        dense = {n: _snapshot(x) for n, x in self._protocol.kind.state.items() if n not in tables}
        spent = [n for n in dense if self._is_copied(n, self._protocol.kind.state[n])]
        self._writer.begin(
            name, {**dense, **tables}, Mark(self._protocol.trainers.sessions, made), spent
        )
        return len(dense) + len(tables)

    def _is_copied(self, name: str, x: Any) -> bool:
        """Return True if a snapshot would be a view of memory that an update donates: on CPU."""
        is_lent = (
            isinstance(x, jax.Array)
            and not is_key(x.dtype)
            and {d.platform for d in x.devices()} == {"cpu"}
        )
        return is_lent and name in self._update.spent

    def _save_last(self, failure: BaseException) -> None:
        """Save what the server holds when its job ends by an error, if it was trained; say where in
        log and error."""
        kind = self._protocol.kind
        if self._keep_last is None:
            return
        try:
            made = kind.made()
            if not made:
                return
            mark = Mark(self._protocol.trainers.sessions, made)
            place = self._keep_last(self._state(), mark, self._protocol.asked())
        except Exception as e:  # the error that has ended the job is the one to raise
            log.exception(
                "pserver %s could not save what it held when its job ended", kind.endpoint
            )
            failure.add_note(
                f"pserver {kind.endpoint} could not save what it held: {type(e).__name__}: {e}"
            )
        else:
            if place is not None:
                told = (
                    f"pserver {kind.endpoint} saved what it held after {made} steps of this "
                    f"job: {place}"
                )
                log.warning(told)
                failure.add_note(told)

    def _end_saves(self) -> None:
        """Wait until all checkpoints are written that were begun."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _ended_saves(self) -> Iterator[tuple[str, str]]:
        return iter(()) if self._writer is None else self._writer.ended()


def _snapshot(x: Any) -> Any:
    """Return an array with the memory that `x` has now. XLA leaves memory alone that NumPy has a
    view of."""
    return copy_array(x) if is_key(x.dtype) else np.asarray(x)


def _sizes(update: ServerUpdate) -> dict[str, int]:
    """What trainers send and are sent in a step, by name: bytes."""
    held = (*update.params, *update.tables)
    types = {**update.grad_types, **{n: words_type(update.types[n]) for n in held}}
    return {n: nbytes(t) for n, t in types.items()}


def _decides_signals() -> bool:
    """Whether SIGTERM, which launchers end roles with, would end this process without a word."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _ended(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)
