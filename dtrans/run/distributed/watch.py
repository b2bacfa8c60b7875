"""Connections of collective trainers to trainer 0, by which all learn at once which trainer ends.

    trainer k    says that it is here, now and then its progress, and at its end the reason
    trainer 0    tells all others, also of a trainer whose connection ends without a word

An operation of Gloo or NCCL fails if a process is gone, and does not name it. If a process is
stopped, or ends after fewer steps, the operation never fails. JAX ends all processes with SIGABRT
in the end. These connections know: the kernel reports a process that is gone. ZeroMQ's threads
notice one that is stopped for longer than the job's patience.

    a trainer about to begin an operation     gets a PeerError (`operation`)
    one that waits for a pipeline's value     gets a PeerError (`check`)
    one in the middle of an operation         cannot be interrupted: it writes its stack after
                                              PATIENCE seconds, and ends with exit code 1

A trainer that waits long in an operation logs the trainers that have not begun it, and the places
in their code. All report their progress every few seconds.

Python code of a process is left alone: it may be saving its state. If trainers may be lost
(`on_trainer_loss="drop"`) there are no such connections; JAX's own heartbeats say which trainers
are left.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dtrans._jax import coordinator
from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.collective.membership_table import GRACE, ExitStatus, MembershipTable, Progress
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import RETRY, Door, Event, Link
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
PATIENCE = 3.0  # seconds that a process in JAX has after another has ended
LINGER = 2.0  # seconds that the last message may take to leave
SAY = 2.0  # seconds between two reports of progress
SLOW = 20.0  # seconds of a wait until it is logged; then twice as many, and so on
LOOK = (
    0.1  # seconds between two looks at what the process does, once it is known that it cannot go on
)
KNOWN = (
    1.0  # seconds that it may take to know which process has ended, where an operation has failed
)
MISSED = "connect"
UNWATCHED = (
    "a job of one trainer, or with on_trainer_loss='drop', has nobody who knows of all trainers"
)
JAX = str(Path(jax.__file__).parent)
HERE = str(Path(__file__).parents[2])  # of dtrans


def is_by_peer(text: str) -> bool:
    """Return True if an error or log line of JAX is a consequence of another process's end."""
    return "Gloo" in text or "NCCL" in text or "distributed service detected fatal errors" in text


class Watch:
    """Connection of one trainer to trainer 0, or all connections in trainer 0.

    Args:
      cluster: the connected job.
      keys: of the job.
      at: address of trainer 0, which binds it; the other trainers connect to it.
    """

    def __init__(self, cluster: Membership, keys: Keys, at: Address | str) -> None:
        self.me, self._leads = cluster.name, cluster.trainer_id == 0
        self._number, self._count = cluster.trainer_id, cluster.trainers
        where = cluster.endpoints or [""] * self._count
        self.members = MembershipTable(
            self._number, [f"trainer {k}" + f" ({x})" * bool(x) for k, x in enumerate(where)]
        )
        self._addresses: dict[bytes, int] = {}  # of the others, at trainer 0
        self._heard: dict[int, float] = {}  # when they said something last
        self._transport = ZmqTransport(keys, cluster.patience)
        self._status = self._status_door(cluster) if self._leads and status_endpoint() else None
        reach = at.reach if isinstance(at, Address) else at
        # on one host nothing but the end of a process ends a connection
        self._retry = GRACE if is_local(reach) else max(GRACE, min(RETRY, cluster.patience))
        self._refusals = Refusals(log)
        self._door: Door | None = None  # of trainer 0
        self._link: Link | None = None  # of another
        try:
            self._open(cluster, at)
        except BaseException:
            self._transport.close()
            raise
        self._wake = threading.Event()
        self._doing = 0  # operations that the process is in the middle of
        self._raised = False  # an error was raised in this process: the watch need not end it
        self._known_since: float | None = None
        self._said = Progress(-1, "")
        self._next_word = 0.0
        self._waits_since: tuple[float, int] | None = (
            None  # in one operation; and how many it has begun by then
        )
        self._patience = SLOW
        self._stops = self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="dtrans watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _open(self, cluster: Membership, at: Address | str) -> None:
        """Open the listening socket in trainer 0; connect to it in the other trainers."""
        if isinstance(at, Address):
            users = {_user(k): f"trainer {k}" for k in range(1, self._count)}
            self._door = at.open_door(self._transport, users, frame=wire.HELLO, messages=1000)
            self.address = self._door.endpoint
        else:
            user = _user(self._number)
            self._link = self._transport.connect(at, user=user, role=cluster.name)

    def _status_door(self, cluster: Membership) -> StatusDoor:
        trainers = WatchedTrainers(
            status_endpoint(), self._count, self.members, self._now_doing, self._awaited
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

    def _now_doing(self) -> Progress:
        return Progress(self.members.begun, _where(), completed_steps())

    def _awaited(self) -> str:
        """Return a description of the operation that this process waits in; empty if it does not
        wait."""
        since = self._waits_since
        if since is None or since[1] != self.members.begun or not (behind := self.members.behind()):
            return ""
        return f"operation {since[1]} of the job: {behind}"

    # -- what the process asks -------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Enter an operation of all trainers. Raises PeerError if a trainer that has to take part
        has ended."""
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
        """Raise PeerError if this process cannot continue, or if `origin`, which it waits for, has
        ended."""
        why = self.members.failure() or ("" if origin is None else self.members.why(origin))
        if why:
            self._raised = True
            raise PeerError(f"{self.me} cannot go on: {why}")

    def failure(self, wait: float) -> str:
        """Return the reason for which this process cannot continue; empty if it can.

        Args:
          wait: seconds that it may take to be known.
        """
        if not self._wake.wait(wait) and self.members.due() is not None:
            self._wake.wait(self._retry)  # a connection has ended, which may be made again
        return self.members.failure()

    # -- the thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stops:
            for event in self._transport.poll(self._wakes()):
                self._take(event, self._transport.now())
            now = self._transport.now()
            if self._status is not None:
                self._status.look(now)
            for k in self.members.silent(now):
                self._tell(k)
            self._look(now)
            self._say_doing(now)

    def _wakes(self) -> float:
        # one that has begun an operation too many is seen at the next look
        soon = bool(self.members.ended) or self.members.due() is not None
        return self._transport.now() + (LOOK if soon else SAY)

    def _take(self, event: Event, now: float) -> None:
        if self._status is not None and event.source is self._status.door:
            self._status.take(event, now)
        elif event.kind == "message":
            self._hear(event, now)
        elif event.kind == "lost":
            # who has said nothing is nobody yet
            if event.address in self._addresses:
                self.members.broken(self._addresses[event.address], now, self._retry)
        elif event.kind == "refused":
            self._refusals.note(
                "%s refused a connection of somebody who is not of this job", self.me
            )
        elif event.kind == "broken":
            self.members.broken(0, now, self._retry - GRACE)
        elif event.kind == "connected" and self._link is not None:
            self.members.back(0)
            self._link.send([wire.header("here")])

    def _hear(self, event: Event, now: float) -> None:
        try:
            message, speaker = wire.parse(event.frames), 0
            if self._leads:
                speaker = int(event.user.rpartition(" ")[2])
                self._addresses[event.address] = speaker
                self._heard[speaker] = now
            if message.op == "here":
                self.members.back(speaker)
                for k in self.members.ended:  # it may have missed them
                    self._tell(k)
            if message.op == "doing":
                steps = message.fields.get("steps")
                self.members.doing[speaker] = Progress(
                    message["operations"], message["where"], steps
                )
            elif message.op == "ended":
                k = speaker if self._leads else message["trainer"]
                if self.members.note(k, ExitStatus(message["operations"], message["reason"])):
                    self._tell(k)
        except WireError as e:
            self._refusals.note("%s dropped %s", self.me, e)

    def _tell(self, k: int) -> None:
        """Tell the other trainers how one has ended, if this is trainer 0."""
        if not self._leads:
            return
        how = self.members.ended[k]
        words = wire.header("ended", trainer=k, operations=how.operations, reason=how.reason)
        for address, other in self._addresses.items():
            if other != k and self._door is not None:
                self._door.send(address, [words])

    def _say_doing(self, now: float) -> None:
        """Report the progress of this process; log a long wait."""
        if now < self._next_word:
            return
        self._next_word = now + SAY
        doing = self._now_doing()
        if doing != self._said:
            self._said = doing
            steps = {} if doing.steps is None else {"steps": doing.steps}
            self._say("doing", operations=doing.operations, where=doing.where, **steps)
        if not self._waits_in_jax():
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

    def _look(self, now: float) -> None:
        why = self.members.failure()
        if not why:
            return
        if self._known_since is None:
            self._known_since = now
            log.error("%s: %s", self.me, why)
            self._wake.set()
        # trainer 0 last: JAX ends the others when it has gone
        if (
            now - self._known_since > PATIENCE + 0.5 * self._leads
            and not self._raised
            and self._waits_in_jax()
        ):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame))
            error = (
                f"{PeerError.__module__}.PeerError: {self.me} cannot go on, and waits in JAX "
                "for what does not come: "
            )
            sys.stderr.write(f"Waiting (most recent call last):\n{stack}{error}{why}\n")
            self._say_end(why)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)

    def _waits_in_jax(self) -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return self._doing > 0 or (frame is not None and frame.f_code.co_filename.startswith(JAX))

    # -- the end ---------------------------------------------------------------------------------

    def _say_end(self, reason: str) -> None:
        self._say("ended", operations=self.members.begun, reason=reason)

    def _say(self, op: str, **fields: Any) -> None:
        """Send a message to trainer 0, or from it to all others."""
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
        reason = (
            "" if failed is None else traceback.format_exception_only(failed)[-1].strip()[:1000]
        )
        if is_by_peer(reason):  # JAX's error does not say whose; the log does
            reason = self.failure(KNOWN) or reason
        self._stops = True
        self._transport.wake()
        self._thread.join()
        self._say_end(reason)
        if self._status is not None:  # nobody waits for an observer that does not read
            self._status.door.close()
        # trainer 0 may have gone before, and then nobody hears it
        self._transport.close(0.0 if 0 in self.members.ended else LINGER)
        atexit.unregister(self.close)


def _where() -> str:
    """Return the place of the process in its own code: `train.py:12 in load`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while (
        frame is not None
        and frame.f_back is not None
        and frame.f_code.co_filename.startswith((JAX, HERE))
    ):
        frame = frame.f_back
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _user(trainer: int) -> str:
    return f"watched trainer {trainer}"


_watch: Watch | None = None


def start(cluster: Membership) -> None:
    """Open the connection of this process.

    There is none if trainer 0 may not bind an address that the others reach.

    Raises:
      ConfigError: `dtrans status` is to be answered at an endpoint that may not be bound, or
        cannot.
      DeadlineError: another trainer does not connect.
    """
    global _watch
    if cluster.trainers == 1 or cluster.on_trainer_loss == "drop" or _watch is not None:
        if status_endpoint() and cluster.trainer_id == 0 and _watch is None:
            log.warning("%s is set, and nobody answers there: %s", STATUS, UNWATCHED)
        return
    keys = shared_keys(cluster, "watch", MISSED)
    hosts = [*all_gather_text(cluster, "watch/hosts", this_host(), MISSED).values()]
    if cluster.trainer_id == 0 and may_bind(cluster, hosts):
        _watch = Watch(cluster, keys, address_of(cluster, hosts, coordinator()))
    at = all_gather_text(cluster, "watch/at", "" if _watch is None else _watch.address, MISSED)[0]
    if cluster.trainer_id and at:
        _watch = Watch(cluster, keys, at)


def watch() -> Watch | None:
    """Return the connection of this process, if it has one."""
    return _watch
