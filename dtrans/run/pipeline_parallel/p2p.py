"""Channels between the processes of a pipeline: a connection from each process to every other.

Every process binds one listening socket, and publishes the socket's address on the job's board, a
shared key-value store (`dtrans.run.distributed.board`). A message contains the number of a step,
and the key of a value in this step. So values may arrive in any order
(`dtrans.protocol.collective.arrivals`). `send` never blocks: a thread waits until a value is
computed, and sends the value in messages (`dtrans.protocol.wire`). `receive` raises DeadlineError
after a deadline; the error names the sender.

Messages are authenticated. All processes know the job's token and a secret on the board. The key or
password of each connection is derived from both (`dtrans.run.net.keys`), and identifies the sender.
A receiver drops some messages, and counts them: messages of an old step, repeated values, and
values that this sender does not have in the plan.

A network may break a connection and lose messages. After the reconnection, the sender asks the
receiver how many messages have arrived, and sends the missing ones again
(`dtrans.protocol.numbered_messages`). If a connection is broken when a sender closes its channels,
the sender waits at most `LINGER` seconds for the reconnection. It does not wait for a process that
has ended. When a receiver closes its channels, it first reports how many messages have arrived, so
that senders need not wait.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import coordinator
from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.collective.arrivals import Arrivals, ValueType
from dtrans.protocol.numbered_messages import NumberedMessages
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import Event, Link
from dtrans.run.distributed.address import address_of, this_host
from dtrans.run.distributed.board import all_gather_text, shared_keys
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.watch import watch
from dtrans.run.net.zmq_transport import ZmqTransport


logger = logging.getLogger(__name__)
LINGER = 10.0  # maximum seconds that `close` waits until all values are sent
MISSED = "run the same pipeline"  # advice in the error for a process that did not connect in time
LOOK = 0.2  # seconds between two checks that an awaited process still runs
AHEAD = 256  # maximum number of messages that this process queues for each sender
# Messages between two reports of a receiver. The sender stores about as many messages, of at most
# 4 MiB each.
REPORT_EVERY = 4


class _OutgoingLink:
    """Connection to another process, and the sent messages that may not have arrived there.

    After a broken connection, these messages are sent again.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages = NumberedMessages()
        self._is_broken = False

    def send(self, op: str, frames: Sequence[Any], **fields: Any) -> None:
        """Store a message until the receiver reports it, and send it if the connection works."""
        message = [wire.header(op, **fields, **self._messages.stamp()), *frames]
        self._messages.store(message)
        if not self._is_broken:
            self._link.send(message)

    def take(self, event: Event) -> None:
        """Handle an event of the link.

        Raises:
          WireError: the message is malformed.
          PeerError: the other process refuses the connection.
        """
        if event.kind == "broken":
            self._is_broken = True
        elif event.kind == "connected" and self._is_broken:
            self._link.send([wire.header("resume")])
        elif event.kind == "barred":
            raise PeerError(event.reason)
        elif event.kind == "message":
            self._messages.take(wire.parse(event.frames))
            if self._is_broken:
                self._is_broken = False
                for message in self._messages.stored:
                    self._link.send(message)

    @property
    def awaits_reconnection(self) -> bool:
        """True if the connection is broken, and stored messages may not have arrived."""
        return self._is_broken and bool(self._messages.stored)


class P2PChannels:
    """Channels of one process to all other processes of a pipeline.

    Args:
      cluster: this process's membership of the distributed job.
      name: the name of the channels. Each job of a process needs a different name.
    """

    def __init__(self, cluster: Membership, name: str) -> None:
        self.me, self.count, self.deadline = cluster.trainer_id, cluster.trainers, cluster.deadline
        self._keys = shared_keys(cluster, f"links/{name}", MISSED, _look)
        others = [k for k in range(self.count) if k != self.me]
        self._links = {self._link(k, self.me): k for k in others}  # user name -> process
        users = {link: f"trainer {k}" for link, k in self._links.items()}
        hosts = all_gather_text(cluster, f"links/{name}/hosts", this_host(), MISSED, _look)
        address = address_of(cluster, list(hosts.values()), coordinator())
        # The patience is infinite, because a process that computes for long reads no messages.
        self._in = ZmqTransport(self._keys, patience=math.inf)
        try:
            self._listener = address.open_door(
                self._in, users, frame=wire.MESSAGE_BYTES, messages=AHEAD
            )
            at = self._listener.endpoint
            self._peers = all_gather_text(cluster, f"links/{name}/at", at, MISSED, _look)
        except BaseException:
            self._in.close()
            raise
        self.refusals = Refusals(logger)
        self._refused: dict[int, str] = {}  # process -> error text for its last dropped message
        self._arrivals = Arrivals(self._refuse)
        self._heard = {k: NumberedMessages() for k in others}
        self._addresses: dict[int, bytes] = {}  # process -> address of its last message
        self._out = ZmqTransport(self._keys, patience=math.inf)
        self._outbox: queue.SimpleQueue[tuple[int, int, int, Any] | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self._sender = threading.Thread(
            target=self._send_all, name="dtrans pipeline links", daemon=True
        )
        self._sender.start()
        atexit.register(self.close)

    def _link(self, origin: int, target: int) -> str:
        """Return the user name under which process `origin` connects to process `target`."""
        return f"process {origin} to {target}"

    # -- sending ---------------------------------------------------------------------------------

    def send(self, to: int, step: int, key: int, value: Any) -> None:
        """Queue a value. A thread sends it as soon as the value is computed.

        Raises:
          PeerError: an earlier value could not be sent.
        """
        self._check_sender()
        self._outbox.put((to, step, key, value))
        self._out.wake()

    def _send_all(self) -> None:
        try:
            lines: dict[Any, tuple[int, _OutgoingLink]] = {}
            for k, address in self._peers.items():
                if k != self.me:
                    user, role = self._link(self.me, k), f"trainer {self.me}"
                    link = self._out.connect(address, user=user, role=role)
                    lines[link] = k, _OutgoingLink(link)
            line_to = dict(lines.values())
            while self._send_queued(line_to):
                # `send` and `close` wake `poll`, which then returns without an event.
                self._take_events(lines, math.inf)
            self._await_reconnections(lines)
        except BaseException as e:  # The next `send` or `receive` raises the error.
            self._failed.append(e)

    def _take_events(self, lines: Mapping[Any, tuple[int, _OutgoingLink]], until: float) -> None:
        """Wait for events of the links until the time `until`, and handle the events."""
        for event in self._out.poll(until):
            k, line = lines[event.source]
            try:
                line.take(event)
            except WireError as e:
                self._refuse(k, e)

    def _await_reconnections(self, lines: Mapping[Any, tuple[int, _OutgoingLink]]) -> None:
        """Wait at most `LINGER` seconds until broken connections work again."""
        now = self._out.now()
        limit = now + LINGER
        # A connection may have broken since the last poll.
        self._take_events(lines, now)
        while (now := self._out.now()) < limit:
            awaited = [k for k, line in lines.values() if line.awaits_reconnection]
            if all(map(_has_ended, awaited)):
                return
            self._take_events(lines, min(limit, now + LOOK))

    def _send_queued(self, line_to: Mapping[int, _OutgoingLink]) -> bool:
        """Send the queued values; return False if the queue is closed."""
        while not self._outbox.empty():
            item = self._outbox.get()
            if item is None:
                return False
            to, step, key, value = item
            array, impl = on_host(value)
            for pieces, frames in wire.messages([("value", array)]):
                line_to[to].send(
                    "value",
                    frames,
                    process=self.me,
                    step=step,
                    key=key,
                    dtype=array.dtype.name,
                    shape=list(array.shape),
                    impl=impl,
                    pieces=pieces,
                )
            del item, value, array
        return True

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, origin: int, step: int, key: int, kind: ValueType, what: str) -> Any:
        """Wait for a value from another process, and return it.

        Args:
          origin: the process that sends the value.
          step, key: the step, and the key of the value in the step.
          kind: the expected type.
          what: the name of the value, for errors.

        Raises:
          DeadlineError: the value did not arrive in time.
          PeerError: another process has ended, or a value could not be sent.
        """
        limit = self._in.now() + self.deadline
        watched, has_ended = watch(), False
        name = (origin, step, key)
        self._arrivals.expect(name, kind)
        while not self._arrivals.is_complete(name):
            self._check_sender()
            now = self._in.now()
            if now >= limit:
                raise DeadlineError(
                    f"trainer {self.me} waited {self.deadline:g} s for {what} of step {step} from "
                    f"trainer {origin}{self._refused.get(origin, '')}"
                )
            if self._handle_messages_until(min(limit, now + LOOK)):
                continue
            if watched is None:
                continue
            # The last values of a process may arrive after the report of its end. So the error is
            # raised only if no message arrives for another interval.
            if has_ended:
                watched.check(origin)
            has_ended = _has_ended(origin)
        array = self._arrivals.take(name)
        if kind.impl:
            return jax.random.wrap_key_data(jnp.asarray(array), impl=kind.impl)
        return array

    def _handle_messages_until(self, until: float) -> bool:
        """Wait until messages arrive, and handle them. Return False if none arrived in time."""
        has_heard = False
        while not has_heard and self._in.now() < until:
            for event in self._in.poll(until):
                if event.kind == "message":
                    has_heard = True
                    self._handle_message(event)
        return has_heard

    def _handle_message(self, event: Event) -> None:
        """Handle a message; drop and count a malformed message."""
        origin = self._links[event.user]
        try:
            message = wire.parse(event.frames)
        except WireError as e:
            self._refuse(origin, e)
            return
        heard, self._addresses[origin] = self._heard[origin], event.address
        is_new = heard.take(message)
        if message.op == "resume" or (is_new and heard.received % REPORT_EVERY == 0):
            self._report(origin)
        if is_new and message.op != "resume":
            self._arrivals.hear(origin, message)

    def _report(self, origin: int) -> None:
        """Report to a process how many of its messages have arrived."""
        report = wire.header("received", heard=self._heard[origin].received)
        self._listener.send(self._addresses[origin], [report])

    def _refuse(self, origin: int, why: WireError) -> None:
        self._refused[origin] = f"; a message from it was dropped: {why}"
        self.refusals.note(
            "trainer %d dropped a message: %s (from trainer %d)", self.me, why, origin
        )

    def _check_sender(self) -> None:
        if self._failed:
            raise PeerError(
                f"trainer {self.me} could not send a value to another trainer: {self._failed[0]}"
            ) from self._failed[0]

    def close(self) -> None:
        """Send the queued values for at most `LINGER` seconds, then close the channels."""
        if self._in.context.closed:
            return
        # The connections to the senders end below. So first tell each sender, in a last report,
        # which of its messages have arrived.
        for origin in self._addresses:
            self._report(origin)
        self._outbox.put(None)
        self._out.wake()
        self._sender.join()
        self._out.close(LINGER)
        self._in.close(LINGER)
        atexit.unregister(self.close)


def _look(trainer: int) -> None:
    """Raise PeerError if process `trainer` has ended, or if this process cannot continue."""
    watched = watch()
    if watched is not None:
        watched.check(trainer)


def _has_ended(trainer: int) -> bool:
    """Return True if a process has ended, or if this process cannot continue."""
    watched = watch()
    return watched is not None and bool(watched.members.why(trainer) or watched.members.failure())


def on_host(value: Any) -> tuple[np.ndarray, str]:
    """Copy an array to the host; return the copy and the name of its PRNG implementation.

    For PRNG keys, the copy contains the key data. For other arrays, the name is "".
    """
    impl = ""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    return np.ascontiguousarray(np.asarray(value)).reshape(value.shape), impl
