"""A trainer's connection to one server: the sockets that its `dtrans.protocol.trainer_line` is
driven with.

The connection is made over TCP; a server on the same host answers with the address of a Unix
socket, and the trainer moves there. Both ends know of each other by ZeroMQ's heartbeats, which its
own threads send: a process that computes, or holds Python's lock, is not taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import zmq

from dtrans.endpoints import split_endpoint
from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.operation import PendingAnswer, answered
from dtrans.protocol.presence import RETRY
from dtrans.protocol.trainer import greet, leave
from dtrans.protocol.trainer_line import DOOR, TrainerLine
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import LINGER, Handshakes, connect, new_socket, tcp_address


LONG = 3600.0  # seconds that a poll may take


class Connection:
    """One trainer's connection to one server.

    Args:
      endpoint: of the server, `host:port`.
      trainer_id, trainers: who this is, of how many.
      session: a word of this trainer's own, the same for all servers.
      sync_mode: whether it is in step with the others.
      plan: the parts of the fingerprint of its plan.
      keys: of the job.
      deadline: seconds without a word from the server after which it is given up.
      patience: seconds without a sign of the server's process after which the connection ends.
      wait_port: wait for a server that is not there yet.

    Attributes:
      line: what is said.

    Raises:
      DeadlineError: the server did not answer in time. PeerError: it refused, or it is not there
        and `wait_port` is off.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        trainer_id: int,
        trainers: int,
        *,
        session: str,
        sync_mode: bool,
        plan: Mapping[str, str],
        keys: Keys,
        deadline: float,
        patience: float,
        wait_port: bool,
    ) -> None:
        self._context, self._patience = context, patience
        self._keys = keys
        self.line = TrainerLine(
            endpoint,
            trainer_id,
            trainers,
            session=session,
            sync_mode=sync_mode,
            plan=plan,
            secret=keys.secret,
            deadline=deadline,
            say=self._say,
            retry=min(RETRY, patience),
        )
        self.line.before_it_speaks = self._note_events
        address = tcp_address(endpoint)
        keys.check(f"{self.line.me} connects to {endpoint}", address)
        host, port = split_endpoint(endpoint)
        if not wait_port:
            try:
                socket.create_connection((host, port), timeout=deadline).close()
            except OSError as e:
                raise PeerError(
                    f"{self.line.me} finds no pserver at {endpoint}: {e.strerror or e}"
                ) from e
        self._open(address)
        try:
            local = answered(greet(self.line), self.receive)
            if local and os.path.exists(local):
                self._move(f"ipc://{local}")
        except BaseException:
            self._shut(linger=0)
            raise

    def _say(self, frames: list[Any]) -> None:
        if len(frames) == 1:
            self._socket.send(frames[0])
        else:
            self._socket.send_multipart(frames, copy=False)

    # -- listening -------------------------------------------------------------------------------

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        """What to poll for `glance`."""
        return self._socket, self._handshakes.monitor

    def glance(self, waiting_for: str) -> wire.Message | None:
        """The answer that is here, if one is. Raises PeerError as `receive` does."""
        self._note_events()
        self.line.give_up(time.monotonic())
        if self._socket.poll(0):
            message = self.line.heard(self._socket.recv_multipart(copy=False), time.monotonic())
            return None if message is None or message.op == "welcome" else message
        if self.line.gone:
            raise self.line.went_away(waiting_for)
        return None

    def receive(self, answer: PendingAnswer) -> wire.Message:
        """Wait for the next message of an answer. Raises as the class does."""
        line = answer.line
        line.wait(str(answer), time.monotonic())
        while True:
            # a connection that ended is looked at once more: the last words of a server come before
            # its end
            gone = line.gone
            line.say_that_it_waits(time.monotonic())
            wait = 0.0 if gone else max(0.0, min(line.wakes - time.monotonic(), LONG))
            ready = dict(self._poller.poll(int(wait * 1000)))
            if self._socket in ready:
                message = line.heard(self._socket.recv_multipart(copy=False), time.monotonic())
                if message is not None:
                    return message
            elif gone:
                raise line.went_away()
            elif self._handshakes.monitor in ready:
                self._note_event()
            else:
                line.look(time.monotonic())

    def _note_event(self) -> None:
        """Take what the monitor reports. Raises PeerError where the server lets nobody in who has
        such keys."""
        event, why = self._handshakes.take()
        if why:
            raise self.line.barred(why)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.line.connected()
        elif event == zmq.EVENT_DISCONNECTED:
            self.line.broken(time.monotonic())

    def _note_events(self) -> None:
        while self._handshakes.monitor.poll(0):
            self._note_event()

    # -- connecting ------------------------------------------------------------------------------

    def _open(self, address: str) -> None:
        self.line.opened(local=address.startswith("ipc:"))
        self._socket: zmq.Socket[Any] = new_socket(self._context, zmq.DEALER, self._patience)
        self._socket.setsockopt(
            zmq.PROBE_ROUTER, 1
        )  # the server is told of a connection though this trainer computes
        self._handshakes = Handshakes(self._socket, self._keys, address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._handshakes.monitor, zmq.POLLIN)
        connect(self._socket, address, self._keys, DOOR, self.line.me)

    def _move(self, address: str) -> None:
        """Go on by another connection; the first is closed when the server knows of it, and does
        not miss it."""
        socket, handshakes = self._socket, self._handshakes
        try:
            self._open(address)
            answered(greet(self.line), self.receive)
        finally:
            handshakes.close()
            socket.close(linger=0)

    def _shut(self, linger: float = LINGER) -> None:
        self._handshakes.close()
        self._socket.close(linger=0 if self.line.gone else int(linger * 1000))

    def close(self, error: str | None) -> None:
        """Say goodbye, or why not, and wait until the server has heard it."""
        if error is None:
            try:
                answered(leave(self.line), self.receive)
            finally:
                self._shut()
        else:
            self.line.tell("abort", reason=error)
            self._heard_out()
            self._shut(linger=0)

    def _heard_out(self) -> None:
        """Wait until the server has heard why: a synchronous one ends, another says goodbye."""
        limit = time.monotonic() + LINGER
        while not self.line.gone and time.monotonic() < limit:
            ready = dict(self._poller.poll(max(0, int((limit - time.monotonic()) * 1000))))
            if self._socket in ready:
                with contextlib.suppress(
                    WireError
                ):  # whatever it says, there is nothing to be done any more
                    self.line.gone = (
                        wire.parse(self._socket.recv_multipart(copy=False)).op == "goodbye"
                    )
            elif self._handshakes.monitor in ready:
                self._note_event()
