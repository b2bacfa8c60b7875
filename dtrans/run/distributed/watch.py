"""Connections between trainers of a job without servers, which report that a trainer has ended.

Each trainer has a connection to trainer 0:

    trainer k    sends `here` at its start, `doing` with its progress every few seconds, and `ended`
                 with the reason at its end
    trainer 0    sends `ended` to all others, also for a trainer whose connection is lost

An *operation* is a computation in which all trainers take part, such as a reduction. If a process
has died, an operation of Gloo or NCCL fails without naming the process. If a process is stopped, or
ends after fewer steps, the operation waits until JAX ends all processes with SIGABRT.

These connections name the trainer. The kernel closes the connection of a process that ends.
ZeroMQ's heartbeats notice a process that is stopped for longer than the job's patience. Then the
other trainers end:

    a trainer that begins an operation        raises PeerError (`operation`)
    a trainer that waits for a pipeline's     raises PeerError (`check`)
    value
    a trainer in the middle of an operation   cannot be interrupted: it writes its stack after
                                              PATIENCE seconds, and exits with code 1

A trainer that runs Python code continues until its next operation, since it may be saving its
state.

If a trainer waits for long in an operation, it logs which trainers have not begun the operation,
and their current lines of code.

With `on_trainer_loss="drop"` there are no such connections: JAX's heartbeats detect lost trainers.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dtrans._jax import coordinator
from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.collective.membership_table import GRACE, ExitStatus, MembershipTable, Progress
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import RETRY, Event, Link, Listener
from dtrans.run.distributed.address import Address, address_of, may_bind, this_host
from dtrans.run.distributed.board import all_gather_text, shared_keys
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.status_door import (
    VARIABLE as STATUS,
    StatusDoor,
    WatchedTrainers,
    status_endpoint,
)
from dtrans.run.net.keys import Keys, is_local
from dtrans.run.net.zmq_transport import ZmqTransport
from dtrans.step_meter import completed_steps


log = logging.getLogger(__name__)
PATIENCE = 3.0  # seconds from another trainer's end until a process that waits in JAX exits
LINGER = 2.0  # seconds to send the last message
SAY = 2.0  # seconds between two reports of progress
SLOW = 20.0  # seconds until a wait is logged; each further log comes after twice the time
LOOK = 0.1  # seconds between two checks whether this process waits in JAX for an ended trainer
KNOWN = 1.0  # seconds to wait for the name of the lost trainer after an operation has failed
MISSED = "connect"
UNWATCHED = "a job of one trainer, or with on_trainer_loss='drop', does not answer `dtrans status`"
JAX = str(Path(jax.__file__).parent)
HERE = str(Path(__file__).parents[2])  # the folder of dtrans


def is_by_peer(text: str) -> bool:
    """Return True if an error or log line of JAX was caused by the end of another process."""
    return "Gloo" in text or "NCCL" in text or "distributed service detected fatal errors" in text


class Watch:
    """Connection between the trainers of a job without servers, to report that one has ended.

    Trainers 1, 2, ... connect to trainer 0. Trainer 0 sends the end of each trainer to all others.
    A thread reads the messages while the main thread trains.

    Args:
      cluster: the membership of this trainer.
      keys: keys of this run.
      at: the address to bind, in trainer 0; trainer 0's endpoint, in other trainers.
    """

    def __init__(self, cluster: Membership, keys: Keys, at: Address | str) -> None:
        self.me, self._leads = cluster.name, cluster.trainer_id == 0
        self._number, self._count = cluster.trainer_id, cluster.trainers
        where = cluster.endpoints or [""] * self._count
        self.members = MembershipTable(
            self._number, [f"trainer {k}" + f" ({x})" * bool(x) for k, x in enumerate(where)]
        )
        self._addresses: dict[bytes, int] = {}  # in trainer 0: trainer ids by transport address
        self._heard: dict[int, float] = {}  # in trainer 0: the time of each trainer's last message
        self._transport = ZmqTransport(keys, cluster.patience)
        self._status: StatusDoor | None = None
        if self._leads and status_endpoint():
            self._status = self._status_door(cluster)
        # Seconds to wait until a lost connection works again. Within one host the wait is only
        # GRACE, because there only the end of a process closes a connection.
        self._retry = GRACE
        reach = at.reach if isinstance(at, Address) else at
        if not is_local(reach):
            self._retry = max(GRACE, min(RETRY, cluster.patience))
        self._refusals = Refusals(log)
        self._door: Listener | None = None  # the listening socket; only in trainer 0
        self._link: Link | None = None  # the connection to trainer 0; not in trainer 0 itself
        try:
            self._open(cluster, at)
        except BaseException:
            self._transport.close()
            raise
        self._wake = threading.Event()  # set when this process knows that it cannot continue
        self._doing = 0  # number of operations that have begun and not ended
        self._raised = False  # True after an operation has raised an error, which ends the process
        self._known_since: float | None = None  # the time since which `_wake` is set
        self._said = Progress(-1, "")  # the last report of progress
        self._next_word = 0.0  # the time of the next report
        # start of the current wait, and the number of operations that had begun then
        self._waits_since: tuple[float, int] | None = None
        self._patience = SLOW  # seconds until the current wait is logged
        self._stops = self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="dtrans watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _open(self, cluster: Membership, at: Address | str) -> None:
        """Open trainer 0's listening socket, or connect another trainer to this socket."""
        if isinstance(at, Address):
            users = {_user(k): f"trainer {k}" for k in range(1, self._count)}
            self._door = at.open_door(self._transport, users, frame=wire.HELLO, messages=1000)
            self.address = self._door.endpoint
        else:
            user = _user(self._number)
            self._link = self._transport.connect(at, user=user, role=cluster.name)

    def _status_door(self, cluster: Membership) -> StatusDoor:
        trainers = WatchedTrainers(
            status_endpoint(), self._count, self.members, self._read_progress, self._awaited
        )
        try:
            door = StatusDoor(
                trainers, self._transport, cluster.keys, allow_remote=cluster.allow_remote
            )
        except BaseException:
            self._transport.close()
            raise
        self._heard = trainers.heard
        log.info("%s answers `dtrans status %s`", self.me, trainers.endpoint)
        return door

    def _read_progress(self) -> Progress:
        """Return this process's progress: operations, line of code and steps."""
        return Progress(self.members.begun, _where(), completed_steps())

    def _awaited(self) -> str:
        """Describe the operation in which this process waits; return "" if it does not wait."""
        since = self._waits_since
        if since is None or since[1] != self.members.begun or not (behind := self.members.behind()):
            return ""
        return f"operation {since[1]} of the job: {behind}"

    # -- calls of the process --------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Mark a `with` block as a computation of all trainers together, such as a reduction.

        If another trainer has ended, the block does not begin. If one ends during the block, this
        process exits with an error after a few seconds, since JAX's wait cannot be interrupted.

        Raises:
          PeerError: another trainer has ended, so the operation cannot complete.
        """
        self.members.begun += 1
        self._doing += 1
        try:
            self.check()
            yield
        except BaseException:
            self._raised = True
            self.members.begun -= 1
            raise
        finally:
            self._doing -= 1

    def check(self, origin: int | None = None) -> None:
        """Raise PeerError if this process cannot continue because another trainer has ended.

        Args:
          origin: id of a trainer from which this process awaits a value. If this trainer has ended,
            the method raises the error even if the job could otherwise continue.
        """
        why = self.members.failure()
        if not why and origin is not None:
            why = self.members.why(origin)
        if why:
            self._raised = True
            raise PeerError(f"{self.me} cannot continue: {why}")

    def failure(self, wait: float) -> str:
        """Return the reason why this process cannot continue; empty if it can.

        Args:
          wait: seconds to wait for a reason.
        """
        if not self._wake.wait(wait) and self.members.due() is not None:
            # A connection is lost. If it is not restored, the reason is known after `_retry`.
            self._wake.wait(self._retry)
        return self.members.failure()

    # -- the thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stops:
            for event in self._transport.poll(self._choose_poll_end()):
                self._take(event, self._transport.now())
            now = self._transport.now()
            if self._status is not None:
                self._status.look(now)
            for k in self.members.silent(now):
                self._forward_end(k)
            self._exit_if_blocked(now)
            self._report_progress(now)

    def _choose_poll_end(self) -> float:
        """Return the time at which the next poll ends."""
        seconds = SAY
        if self.members.ended or self.members.due() is not None:
            # a trainer has ended, and `_exit_if_blocked` must soon notice a wait in an operation
            seconds = LOOK
        return self._transport.now() + seconds

    def _take(self, event: Event, now: float) -> None:
        if self._status is not None and event.source is self._status.door:
            self._status.take(event, now)
        elif event.kind == "message":
            self._on_message(event, now)
        elif event.kind == "lost":
            # before its first message, the trainer behind a connection is unknown
            if event.address in self._addresses:
                self.members.broken(self._addresses[event.address], now, self._retry)
        elif event.kind == "refused":
            self._refusals.note("%s refused a connection without the keys of this job", self.me)
        elif event.kind == "broken":
            self.members.broken(0, now, self._retry - GRACE)
        elif event.kind == "connected" and self._link is not None:
            self.members.back(0)
            self._link.send([wire.header("here")])

    def _on_message(self, event: Event, now: float) -> None:
        try:
            message, speaker = wire.parse(event.frames), 0
            if self._leads:
                speaker = int(event.user.rpartition(" ")[2])
                self._addresses[event.address] = speaker
                self._heard[speaker] = now
            if message.op == "here":
                self.members.back(speaker)
                for k in self.members.ended:
                    # send the end again, because messages before a reconnection may be lost
                    self._forward_end(k)
            if message.op == "doing":
                steps = message.fields.get("steps")
                self.members.doing[speaker] = Progress(
                    message["operations"], message["where"], steps
                )
            elif message.op == "ended":
                k = speaker if self._leads else message["trainer"]
                if self.members.note(k, ExitStatus(message["operations"], message["reason"])):
                    self._forward_end(k)
        except WireError as e:
            self._refusals.note("%s dropped %s", self.me, e)

    def _forward_end(self, k: int) -> None:
        """Tell the other trainers that trainer `k` has ended, if this is trainer 0."""
        if not self._leads:
            return
        how = self.members.ended[k]
        words = wire.header("ended", trainer=k, operations=how.operations, reason=how.reason)
        for address, other in self._addresses.items():
            if other != k and self._door is not None:
                self._door.send(address, [words])

    def _report_progress(self, now: float) -> None:
        """Send this process's number of operations and its line of code; log a long wait.

        The log names the trainers that have not begun the operation in which this process waits.
        """
        if now < self._next_word:
            return
        self._next_word = now + SAY
        doing = self._read_progress()
        if doing != self._said:
            self._said = doing
            steps = {} if doing.steps is None else {"steps": doing.steps}
            self._send("doing", operations=doing.operations, where=doing.where, **steps)
        if not _waits_in_jax(self._doing > 0):
            self._waits_since = None
        elif self._waits_since is None or self._waits_since[1] != doing.operations:
            self._waits_since, self._patience = (now, doing.operations), SLOW
        elif now - self._waits_since[0] > self._patience and (behind := self.members.behind()):
            waited = now - self._waits_since[0]
            log.warning(
                "%s has waited %.0f s in operation %d of the job: %s",
                self.me,
                waited,
                doing.operations,
                behind,
            )
            self._patience *= 2

    def _exit_if_blocked(self, now: float) -> None:
        """Exit if this process cannot continue and waits in JAX, which cannot be interrupted."""
        why = self.members.failure()
        if not why:
            return
        if self._known_since is None:
            self._known_since = now
            log.error("%s: %s", self.me, why)
            self._wake.set()
        # trainer 0 exits last, because its end makes JAX end the other processes
        is_late = now - self._known_since > PATIENCE + 0.5 * self._leads
        if is_late and not self._raised and _waits_in_jax(self._doing > 0):
            self._report_end(why)
            _exit(self.me, why)

    # -- the end ---------------------------------------------------------------------------------

    def _report_end(self, reason: str) -> None:
        """Tell the other trainers that this process ends; `reason` is empty without a failure."""
        self._send("ended", operations=self.members.begun, reason=reason)

    def _send(self, op: str, **fields: Any) -> None:
        """Send a message to trainer 0, or from trainer 0 to all other trainers."""
        words = wire.header(op, trainer=self._number, **fields)
        if self._link is not None:
            self._link.send([words])
        for to in self._addresses:
            if self._door is not None:
                self._door.send(to, [words])

    def close(self) -> None:
        """Report the end of this process, or its error, and close the connections."""
        if self._is_closed:
            return
        self._is_closed = True
        failed = getattr(sys, "last_value", None)
        reason = ""
        if failed is not None:
            reason = traceback.format_exception_only(failed)[-1].strip()[:1000]
        if is_by_peer(reason):
            # JAX's error does not name the lost trainer; `failure` does
            reason = self.failure(KNOWN) or reason
        self._stops = True
        self._transport.wake()
        self._thread.join()
        self._report_end(reason)
        if self._status is not None:
            # closed without a linger time, so that an observer cannot delay the end
            self._status.door.close()
        linger = LINGER
        if 0 in self.members.ended:
            linger = 0.0  # trainer 0 has ended, so no process receives the last message
        self._transport.close(linger)
        atexit.unregister(self.close)


def _exit(me: str, why: str) -> None:
    """Print the place where this process waits and the reason, and end the process at once.

    A process that waits inside JAX cannot raise an exception. So this function writes a PeerError
    to standard error itself, where the launcher finds it.

    Args:
      me: name of this trainer.
      why: the reason, such as the error of the trainer that has ended.
    """
    stack = "".join(traceback.format_stack(_main_frame()))
    error = (
        f"{PeerError.__module__}.PeerError: {me} cannot continue, because it waits in JAX "
        f"for a trainer that has ended: {why}"
    )
    sys.stderr.write(f"Waiting (most recent call last):\n{stack}{error}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _waits_in_jax(is_doing: bool) -> bool:
    """Return True if the main thread runs an operation of all trainers, or JAX's code."""
    frame = _main_frame()
    return is_doing or (frame is not None and frame.f_code.co_filename.startswith(JAX))


def _main_frame() -> types.FrameType | None:
    """Return the current frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _where() -> str:
    """Return the main thread's line in the user's code: `train.py:12 in load`."""
    frame = _main_frame()
    while (
        frame is not None
        and frame.f_back is not None
        and frame.f_code.co_filename.startswith((JAX, HERE))
    ):
        frame = frame.f_back
    if frame is None:
        return "its exit"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _user(trainer: int) -> str:
    """Return a trainer's user name for its connection, such as "watched trainer 1".

    Trainer 0 learns the sender of a message from this name.
    """
    return f"watched trainer {trainer}"


_watch: Watch | None = None


def start(cluster: Membership) -> None:
    """Connect this process to trainer 0, so that both learn when another trainer has ended.

    `dtrans.connect` calls this function in every trainer. Trainer 0 also opens the socket for
    `dtrans status`. There is no connection if JAX detected trainers on several hosts, and the user
    has not set `allow_remote`.

    Raises:
      ConfigError: DTRANS_STATUS_ENDPOINT cannot be bound, or is not allowed.
      DeadlineError: another trainer does not connect.
    """
    global _watch
    if cluster.trainers == 1 or cluster.on_trainer_loss == "drop" or _watch is not None:
        if status_endpoint() and cluster.trainer_id == 0 and _watch is None:
            log.warning("%s has no effect: %s", STATUS, UNWATCHED)
        return
    keys = shared_keys(cluster, "watch", MISSED)
    hosts = [*all_gather_text(cluster, "watch/hosts", this_host(), MISSED).values()]
    if cluster.trainer_id == 0 and may_bind(cluster, hosts):
        _watch = Watch(cluster, keys, address_of(cluster, hosts, coordinator()))
    at = all_gather_text(cluster, "watch/at", "" if _watch is None else _watch.address, MISSED)[0]
    if cluster.trainer_id and at:
        _watch = Watch(cluster, keys, at)


def watch() -> Watch | None:
    """Return this process's connection for the ends of other trainers, or None if it has none."""
    return _watch
