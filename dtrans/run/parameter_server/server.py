"""A parameter server: one loop that takes messages, and looks every second who is late.

The protocol is `dtrans.protocol.serving`; here are the sockets, the clock, the signals and the
compiled update that it is driven with. Only this loop and its sockets read the clock and wait.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import zmq

from dtrans.checkpoint.assemble import copied
from dtrans.checkpoint.runs import Mark, note
from dtrans.ir.array_fns import is_key, words_type
from dtrans.ir.cost import nbytes
from dtrans.protocol import wire
from dtrans.protocol.async_server import AsyncServer
from dtrans.protocol.job_status import OBSERVER
from dtrans.protocol.presence import RETRY, Presence, log
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.serving import Serving
from dtrans.protocol.sync_server import SyncServer
from dtrans.run.net.ended_roles import ended_roles
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import user_of
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.server_sockets import ServerSockets
from dtrans.run.parameter_server.state_writer import Keep, KeepLast, StateWriter
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate, own_buffers


TICK = 1.0  # seconds between two looks at who is late


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
        context: zmq.Context[Any],
        *,
        deadline: float,
        patience: float,
        allow_remote: bool,
        keys: Keys,
        plan: Mapping[str, str],
        keep: Keep | None = None,
        keep_last: KeepLast | None = None,
    ) -> None:
        served = update.served
        trainers = Presence(
            served, deadline=deadline, plan=plan, secret=keys.secret, retry=min(RETRY, patience)
        )
        self._sockets = ServerSockets(
            context, update.endpoint, keys, wire.limits(_sizes(update)), patience
        )
        tables = {
            n for t in update.tables.values() if not t.whole for n in t.held
        }  # have memory of their own
        own = own_buffers({n: x for n, x in state.items() if n not in tables})
        self._sockets.counted = trainers.counted
        state, say = {**state, **own}, self._sockets.say
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
        self._protocol.status.barred = self._sockets.barred
        self._sockets.bind(allow_remote=allow_remote)
        self._keep_last = keep_last
        self._writer: StateWriter | None = None
        if keep is not None:
            self._writer = StateWriter(
                keep, {n: x for n, x in own.items() if self._is_copied(n, x)}
            )
        if self._writer is not None:
            self._protocol.keep = self._save
            self._update.before = self._writer.wait_copied
            self._sockets.watch(self._writer.wake)
        self._protocol.local = self._sockets.local

    # -- serving ---------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any]:
        """Serve until every trainer has closed; the state that is left.

        Raises:
          DeadlineError: a trainer that did not come, fell silent or kept the others waiting, or a
            server that did. PeerError: one that failed, refused, or left before the others.
        """
        protocol = self._protocol
        protocol.trainers.begin(time.monotonic())
        ending: Any = None
        failure: BaseException | None = None
        try:
            self._sockets.connect(protocol.kind.peers)
            ending = signal.signal(signal.SIGTERM, _ended) if _decides_signals() else None
            self._loop()
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
            self._sockets.close(failed=failure is not None)
            if failure is not None:
                self._save_last(failure)
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

    def _loop(self) -> None:
        look = time.monotonic() + TICK
        while not self._protocol.ended:
            self._sockets.poll(look - time.monotonic(), self._take)
            self._sockets.listen(self._lose)
            for name, error in () if self._writer is None else self._writer.ended():
                self._protocol.written(name, error, time.monotonic())
            if time.monotonic() >= look:
                # what came while an update was made may be what somebody is about to be missed for
                for _ in range(
                    1000 * self._protocol.trainers.count
                ):  # and no more, whoever is flooding us
                    if not self._sockets.poll(0, self._take):
                        break
                for role, how in ended_roles().items():
                    kind, _, number = role.partition(" ")
                    if kind == "trainer":
                        self._protocol.died(int(number), how, time.monotonic())
                self._sockets.look(time.monotonic())
                self._protocol.look(time.monotonic())
                look = time.monotonic() + TICK

    def _lose(self, address: bytes) -> None:
        self._protocol.lose(address, time.monotonic())

    def _take(self, frames: Sequence[Any]) -> None:
        """Take a message: the address of who speaks, and its frames, which are not kept."""
        take = self._protocol.observe if user_of(frames[0]) == OBSERVER else self._protocol.take
        take(bytes(frames[0].buffer), frames[1:], time.monotonic())


def _snapshot(x: Any) -> Any:
    """Return an array with the memory that `x` has now. XLA leaves memory alone that NumPy has a
    view of."""
    return copied(x) if is_key(x.dtype) else np.asarray(x)


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
