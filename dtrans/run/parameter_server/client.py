"""A trainer's connection to one server.

The connection is made over TCP; a server on the same host answers with the address of a Unix socket, and
the trainer moves there. A second socket, on a thread of its own, says every few seconds that the trainer is
alive, so that a server can tell a long computation from a dead process.

ZeroMQ reconnects by itself and loses what was on its way, so a connection that breaks is an error at once:
the step it belongs to cannot be completed as if nothing had happened. Until the server's welcome there is nothing to
lose: `hello` is said on every connection that is made, since the first may be to a server that is about to end, and
whose process serves the next job on the same endpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.endpoints import split_endpoint
from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.run.net import token, wire
from dtrans.run.net.inbox import Inbox
from dtrans.run.net.sockets import LINGER, new_socket, tcp_address
from dtrans.run.parameter_server.server_sockets import DOOR, OTHER_TOKEN


ALIVE_EVERY = 2.0  # seconds between two signs of life, or less for an impatient server
LONG = 3600.0  # seconds that a poll may take


class Connection:
    """One trainer's connection to one server.

    Args:
      endpoint: of the server, `host:port`.
      trainer_id, trainers: who this is, of how many.
      session: a word of this trainer's own, the same for all servers.
      sync_mode: whether it is in step with the others.
      plan: the parts of the fingerprint of its plan.
      deadline: seconds without a word from the server after which it is given up.
      wait_port: wait for a server that is not there yet.

    Raises:
      DeadlineError: the server did not answer in time. PeerError: it refused, or it is not there and
        `wait_port` is off.
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
        deadline: float,
        wait_port: bool,
    ) -> None:
        self.endpoint = endpoint
        self.me = f"trainer {trainer_id}"
        self.deadline = deadline
        self.step = 0
        self._gone: bool = False  # the server has ended, or the connection to it has
        self._context = context
        self._hello = {
            "trainer": trainer_id,
            "trainers": trainers,
            "session": session,
            "order": sys.byteorder,
            "sync_mode": sync_mode,
            "plan": {**plan},
            "nonce": token.new_token(),
        }
        self._secret = token.job_token()
        host, port = split_endpoint(endpoint)
        if not wait_port:
            try:
                socket.create_connection((host, port), timeout=deadline).close()
            except OSError as e:
                raise PeerError(f"{self.me} finds no pserver at {endpoint}: {e.strerror or e}") from e
        address = tcp_address(endpoint)
        self._open(address)
        try:
            local = self._greet()
            if local and os.path.exists(local):
                self._shut()
                self._open(f"ipc://{local}")
                self._greet()
        except BaseException:
            self._shut(linger=0)
            raise
        self._stop = threading.Event()
        self._alive = threading.Thread(
            target=self._stay_alive, args=(address,), name=f"dtrans alive {endpoint}", daemon=True
        )
        self._alive.start()

    # -- speaking --------------------------------------------------------------------------------

    def tell(self, op: str, **fields: Any) -> None:
        """A message that needs no answer."""
        self._socket.send(wire.header(op, **fields))

    def send_blocks(self, gradients: Iterable[tuple[str, Any]], /, steps: int = 1, **at_end: Any) -> None:
        """Gradients of this step, from the memory they are in; `steps` when they are of several.

        `at_end` are fields of the last message.
        """
        several = {} if steps == 1 else {"steps": steps}
        messages = list(wire.messages(gradients))
        for i, (pieces, frames) in enumerate(messages):
            fields = several | at_end if i == len(messages) - 1 else several
            head = wire.header("send", step=self.step, pieces=pieces, **fields)
            self._socket.send_multipart([head, *frames], copy=False)

    def exchange(self, number: int, values: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """This trainer's part of round `number`: each array with the way in which those of all are made one."""
        table = [[x.dtype.name, list(x.shape), list(way)] for x, way in values]
        blocks = [(str(i), x) for i, (x, _) in enumerate(values)]
        for frames in wire.framed("exchange", blocks, step=self.step, round=number, values=table):
            self._socket.send_multipart(frames, copy=False)

    def exchanged(self, number: int) -> list[np.ndarray]:
        """The answer to that."""
        inbox: Inbox | None = None
        while inbox is None or inbox.missing():
            message = self.receive(f"the exchange of round {number} of step {self.step}")
            if message.op != "exchanged" or (message["step"], message["round"]) != (self.step, number):
                raise PeerError(f"pserver {self.endpoint} answered `exchange` of round {number} with `{message.op}`")
            if inbox is None:
                memory = {str(i): np.empty(s, np.dtype(t)) for i, (t, s) in enumerate(message["values"])}
                inbox = Inbox(memory, lambda name: f"pserver {self.endpoint} answered with {name}, which was not asked")
            inbox.take(message)
        return list(inbox.memory.values())

    def end_step(self, gradients: Sequence[tuple[str, Any]], /, *, sent: bool, barrier: bool, **fields: Any) -> None:
        """In one message, what ends a step and asks for parameters.

        Args:
          gradients: the last of this step; if there are none, `sent` says whether there were before.
          barrier: whether a `send_barrier` follows them.
          fields: of the `recv` that follows.
        """
        then = ["send_barrier", "recv"] if barrier else ["recv"]
        if gradients:
            self.send_blocks(gradients, then=then, **fields)
        elif barrier:
            self.tell("send_barrier", step=self.step, then=["recv"], **fields)
        self.step += bool(gradients) or sent or barrier
        if not gradients and not barrier:
            self.tell("recv", step=self.step, **fields)

    # -- listening -------------------------------------------------------------------------------

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        """What to poll for `glance`."""
        return self._socket, self._monitor

    @property
    def gone(self) -> bool:
        """Whether the server has ended, or the connection to it has."""
        return self._gone

    def glance(self, waiting_for: str) -> wire.Message | None:
        """The answer that is here, if one is. Raises PeerError as `receive` does."""
        if self._monitor.poll(0):
            self._gone = self._broken()
        if self._socket.poll(0):
            message = self._heard()
            return None if message.op in ("waiting", "welcome") else message
        if self._gone:
            raise self._went_away(waiting_for)
        return None

    def receive(self, waiting_for: str) -> wire.Message:
        """The next message that is an answer. Raises as the class does."""
        since = time.monotonic()
        patience = since + self.deadline
        told = ""
        while True:
            left = patience - time.monotonic()
            # a connection that ended is looked at once more: the last words of a server come before its end
            gone = self._gone
            wait = 0.0 if gone else max(0.0, min(left, LONG))
            ready = dict(self._poller.poll(int(wait * 1000)))
            if self._socket in ready:
                message = self._heard()
                if message.op == "welcome" and self._welcomed:
                    continue  # `hello` was said twice
                if message.op != "waiting":
                    return message
                patience = time.monotonic() + self.deadline
                told = f", which waited for {message['reason']}"
            elif gone:
                raise self._went_away(waiting_for)
            elif self._monitor in ready:
                self._gone = self._broken()
            elif left <= 0:
                waited = time.monotonic() - since
                who = f"pserver {self.endpoint}{told}"
                raise DeadlineError(f"{self.me} waited {waited:.1f} s for {who}: {waiting_for}")

    def _heard(self) -> wire.Message:
        """The message that is here. Raises PeerError for a refusal."""
        message = wire.parse(self._socket.recv_multipart(copy=False))
        if message.op == "refuse":
            self._gone = bool(message.fields.get("last"))
            raise PeerError(f"pserver {self.endpoint} refused {self.me}: {message['reason']}")
        return message

    def _went_away(self, waiting_for: str) -> PeerError:
        return PeerError(f"pserver {self.endpoint} went away while {self.me} waited for {waiting_for}")

    def _broken(self) -> bool:
        """Whether the monitor reports the end of an established connection. To a new one it says hello.

        Raises PeerError where the server lets nobody in who has another token.
        """
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise PeerError(f"pserver {self.endpoint} does not let {self.me} in: {OTHER_TOKEN}")
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._welcomed:
            self.tell("hello", **self._hello)
        return bool(event == zmq.EVENT_DISCONNECTED and self._welcomed)

    def _greet(self) -> str:
        """Be welcomed; the path of the server's Unix socket, or nothing."""
        message = self.receive("an answer to `hello` (is it running, and is this its endpoint?)")
        if message.op != "welcome":
            raise PeerError(f"pserver {self.endpoint} answered `hello` of {self.me} with `{message.op}`")
        if not token.is_shown(message.fields.get("proof"), self._secret, f"welcome {self._hello['nonce']}"):
            raise PeerError(f"what welcomes {self.me} as pserver {self.endpoint} has not the job's token")
        self._welcomed = True
        self.step = message["step"]
        self._alive_every = min(ALIVE_EVERY, message["silence"] / 4)
        return message["local"]

    # -- connecting ------------------------------------------------------------------------------

    def _open(self, address: str) -> None:
        self._welcomed = False
        self._gone = False
        self._socket: zmq.Socket[Any] = new_socket(self._context, zmq.DEALER, DOOR, self._secret)
        self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)

    def _shut(self, linger: float = LINGER) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._gone else int(linger * 1000))

    def _stay_alive(self, address: str) -> None:
        """Runs in a thread, with a socket of its own: ZeroMQ's are not to be shared."""
        with contextlib.closing(new_socket(self._context, zmq.DEALER, DOOR, self._secret)) as line:
            line.linger = 0
            line.connect(address)
            while not self._stop.wait(self._alive_every):
                with contextlib.suppress(zmq.Again):  # the server is gone: the main thread will find out
                    line.send(
                        wire.header("alive", trainer=self._hello["trainer"], session=self._hello["session"]),
                        zmq.NOBLOCK,
                    )

    def close(self, error: str | None) -> None:
        """Say goodbye, or why not, and wait until the server has heard it."""
        self._stop.set()
        self._alive.join()
        if error is None:
            self.tell("complete")
            try:
                while self.receive("its goodbye").op != "goodbye":
                    pass
            finally:
                self._shut()
        else:
            self.tell("abort", reason=error)
            self._heard_out()
            self._shut(linger=0)

    def _heard_out(self) -> None:
        """Wait until the server has heard why: a synchronous one ends, another says goodbye."""
        limit = time.monotonic() + LINGER
        while not self._gone and time.monotonic() < limit:
            ready = dict(self._poller.poll(max(0, int((limit - time.monotonic()) * 1000))))
            if self._socket in ready:
                with contextlib.suppress(WireError):  # whatever it says, there is nothing to be done any more
                    self._gone = wire.parse(self._socket.recv_multipart(copy=False)).op == "goodbye"
            elif self._monitor in ready:
                self._gone = self._broken()
