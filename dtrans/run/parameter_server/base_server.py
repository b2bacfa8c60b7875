"""What every parameter server does: sockets, the loop that serves, greetings, and answers.

A synchronous server (`server.py`) and an asynchronous one (`async_server.py`) say what becomes of gradients, when a
trainer is answered, and what it means that one is late or has failed.

A message that does not follow the protocol is refused and logged, and changes nothing. A trainer that comes when its
namesake has closed is of the next job on this endpoint, and waits for it.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.checkpoint.runs import note
from dtrans.endpoints import is_loopback, split_endpoint
from dtrans.errors import ConfigError, DeadlineError, DtransError, WireError
from dtrans.run.net import wire
from dtrans.run.net.sockets import LINGER, new_socket, tcp_address
from dtrans.run.parameter_server.update import ServerUpdate, own_buffers


TICK = 1.0  # seconds between two looks at who is late
SILENCE = 30.0  # seconds without a sign of life after which a trainer is taken for dead (they come every 2 s)
_REFUSED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

log = logging.getLogger("dtrans.pserver")


@dataclasses.dataclass
class Trainer:
    """What the server knows of one trainer."""

    session: str
    address: bytes
    heard: float
    arrived: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes of each gradient, this step
    at_barrier: bool = False
    wants: tuple[str, ...] = ()
    waits: bool = False
    done: bool = False
    failed: bool = False  # done, and not because it said so


class BaseServer(abc.ABC):
    """Serves one `listen_and_serv`.

    Args:
      update: what to do with gradients.
      state: name to array; the initial values.
      deadline: seconds that trainers may keep the server, or each other, waiting.
      allow_remote: bind an endpoint that is not loopback.

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
        allow_remote: bool,
    ) -> None:
        params = update.eqn.params
        self.endpoint: str = params["endpoint"]
        self.count: int = params["Fanin"]
        self.sync_mode: bool = params["sync_mode"]
        self.deadline = deadline
        self.state = own_buffers(state)
        self._types = {n: update.types[n] for n in update.params}
        self._values: dict[str, np.ndarray] = {}  # parameters as memory to send from
        self._trainers: dict[int, Trainer] = {}
        self._by_address: dict[bytes, int] = {}
        self._context = context
        self._silence = min(SILENCE, deadline)
        self._prepare(update)
        self._bind(allow_remote)

    # -- what kinds of servers differ in: those that are not abstract do nothing, where there are trainers only ---

    @abc.abstractmethod
    def _prepare(self, update: ServerUpdate) -> None:
        """Make ready for `update`, before anything is bound."""

    def _begin(self) -> None:  # noqa: B027
        """Serving begins."""

    def _step_at(self, k: int) -> int:
        """The step that trainer k is welcomed at."""
        return 0

    @abc.abstractmethod
    def _send(self, k: int, message: wire.Message) -> None:
        """Gradients."""

    @abc.abstractmethod
    def _send_barrier(self, k: int, message: wire.Message) -> None:
        """All gradients of a step were sent."""

    @abc.abstractmethod
    def _recv(self, k: int, message: wire.Message) -> None:
        """A request for parameters."""

    @abc.abstractmethod
    def _complete(self, k: int, message: wire.Message) -> None:
        """A trainer is done."""

    @abc.abstractmethod
    def _abort(self, k: int, message: wire.Message) -> None:
        """A trainer has failed."""

    @abc.abstractmethod
    def _look(self) -> None:
        """Called every `TICK`: see who is late."""

    @property
    def _lines(self) -> Sequence[zmq.Socket[Any]]:
        """Other sockets to listen to."""
        return ()

    def _listen(self) -> None:  # noqa: B027
        """Something can be read from them."""

    @property
    def _settled(self) -> bool:
        """Whether nobody else needs this server, once all trainers have closed."""
        return True

    @property
    def _others(self) -> Sequence[bytes]:
        """The addresses of those to be told of an end, who are not trainers."""
        return ()

    def _of_others(self, address: bytes, message: wire.Message) -> bool:
        """Take a message that is not from a trainer. False if it is nobody's that is known."""
        return False

    def _other(self, address: bytes) -> str:
        """Who speaks from an address that is no trainer's."""
        return "a stranger"

    def _end(self, *, failed: bool) -> None:  # noqa: B027
        """Serving has ended."""

    # -- sockets ---------------------------------------------------------------------------------

    def _bind(self, allow_remote: bool) -> None:
        host, _ = split_endpoint(self.endpoint)
        if not is_loopback(host) and not allow_remote:
            raise ConfigError(
                f"pserver {self.endpoint} is not on loopback; messages are neither encrypted nor authenticated, "
                "so binding it "
                "needs Executor(allow_remote=True)"
            )
        self._socket = new_socket(self._context, zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(_REFUSED_HANDSHAKES | zmq.EVENT_CLOSED)
        self._folder = Path(tempfile.mkdtemp(prefix="dtrans-"))  # readable by this user only
        self._local = str(self._folder / "socket")
        self._bound = ""
        try:
            self._socket.bind(tcp_address(self.endpoint))
            self._bound = self._socket.get_string(zmq.LAST_ENDPOINT)  # as ZeroMQ names it
            if len(os.fsencode(self._local)) > zmq.IPC_PATH_MAX_LEN:
                self._local = ""
            else:
                self._socket.bind(f"ipc://{self._local}")
        except zmq.ZMQError as e:
            self._close()
            raise ConfigError(f"pserver {self.endpoint} cannot be bound: {zmq.strerror(e.errno or 0)}") from e

    def _close(self) -> None:
        self._let_go()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(LINGER * 1000))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _let_go(self) -> None:
        """Stop listening, and wait until the endpoint can be bound again: ZeroMQ closes sockets in its own time."""
        if not self._bound:
            return
        self._socket.linger = int(LINGER * 1000)
        limit = time.monotonic() + LINGER
        self._socket.unbind(self._bound)
        while self._monitor.poll(max(0, int((limit - time.monotonic()) * 1000))):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CLOSED:
                return

    # -- serving ---------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any]:
        """Serve until every trainer has closed; the state that is left.

        Raises:
          DeadlineError: a trainer that did not come, fell silent or kept the others waiting, or a server that did.
            PeerError: one that failed, refused, or left before the others.
        """
        self._started = time.monotonic()
        self._begin()
        ending: Any = None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        lines = self._lines
        for line in lines:
            poller.register(line, zmq.POLLIN)
        failed = True
        look = time.monotonic() + TICK
        try:
            ending = signal.signal(signal.SIGTERM, _ended) if _decides_signals() else None
            while not (self._served() and self._settled):
                ready = dict(poller.poll(max(0, int((look - time.monotonic()) * 1000))))
                if self._socket in ready:
                    self._take(self._socket.recv_multipart(copy=False))
                if self._monitor in ready and recv_monitor_message(self._monitor)["event"] & _REFUSED_HANDSHAKES:
                    log.warning("pserver %s refused a connection that does not speak the protocol", self.endpoint)
                if not ready.keys().isdisjoint(lines):
                    self._listen()
                if time.monotonic() >= look:
                    self._catch_up()
                    self._look()
                    look = time.monotonic() + TICK
            failed = False
            note(self.endpoint, self._trainers[0].session)
            return self.state
        except BaseException as e:
            reason = str(e) if isinstance(e, DtransError) else f"{type(e).__name__}: {e}"
            for t in self._trainers.values():
                if not t.done:
                    self._say(t.address, "refuse", reason=f"it ended: {reason}", last=True)
            for address in self._others:
                self._say(address, "refuse", reason=f"it ended: {reason}", last=True)
            raise
        finally:
            if ending is not None:
                signal.signal(signal.SIGTERM, ending)
            self._end(failed=failed)
            self._close()

    def _served(self) -> bool:
        """Whether every trainer has come, and closed."""
        return len(self._trainers) == self.count and all(t.done for t in self._trainers.values())

    def _catch_up(self) -> None:
        """Take what came while an update was made: it may be the signs of life that are about to be missed."""
        for _ in range(1000 * self.count):  # and no more, whoever is flooding us
            if not self._socket.poll(0):
                return
            self._take(self._socket.recv_multipart(copy=False))

    def _take(self, parts: list[Any]) -> None:
        """One message. What is malformed, or out of turn, is refused; nothing of it is kept."""
        address = bytes(parts[0].buffer)
        now = time.monotonic()
        try:
            message = wire.parse(parts[1:])
            if message.op == "alive":
                known = self._trainers.get(message["trainer"])
                if known and known.session == message["session"]:
                    known.heard = now
                return
            if message.op == "hello":
                self._hello(address, message, now)
                return
            if self._of_others(address, message):
                return
            if address not in self._by_address:
                raise WireError(f"a `{message.op}` message from a peer that has not said hello")
            k = self._by_address[address]
            if self._trainers[k].done:
                raise WireError(f"a `{message.op}` message of trainer {k}, which has left")
            self._trainers[k].heard = now
            if message.op not in RULES:
                raise WireError(f"a `{message.op}` message, which servers do not take")
            for part in (message, *_following(message)):
                getattr(self, RULES[part.op])(k, part)
        except WireError as e:
            log.warning("pserver %s refused a message of %s: %s", self.endpoint, self._who(address), e)
            self._say(address, "refuse", reason=str(e))

    def _who(self, address: bytes) -> str:
        """Who speaks from there, for the log."""
        if address in self._by_address:
            return f"trainer {self._by_address[address]}"
        return self._other(address)

    def _say(self, address: bytes, op: str, **fields: Any) -> None:
        self._socket.send_multipart([address, wire.header(op, **fields)])

    # -- what trainers say -----------------------------------------------------------------------

    def _hello(self, address: bytes, message: wire.Message, now: float) -> None:
        k, trainers = message["trainer"], message["trainers"]
        if message["order"] != sys.byteorder:
            raise WireError(f"trainer {k} is {message['order']}-endian, this server is {sys.byteorder}-endian")
        if trainers != self.count:
            raise WireError(
                f"trainer {k} was planned with {trainers} trainers, pserver {self.endpoint} with {self.count}"
            )
        if not 0 <= k < self.count:
            raise WireError(f"trainer {k} of {self.count}: ids are 0 to {self.count - 1}")
        known = self._trainers.get(k)
        if message.fields.get("sync_mode", self.sync_mode) != self.sync_mode:
            modes = {True: "synchronous", False: "asynchronous"}
            raise WireError(
                f"trainer {k} is {modes[not self.sync_mode]}, pserver {self.endpoint} {modes[self.sync_mode]}: "
                "every role must plan the same mode"
            )
        if known is not None and known.done:
            if known.failed or known.session == message["session"]:
                raise WireError(f"trainer {k} has left, and cannot come back to this job")
            # it is of the next job on this endpoint: this server's end breaks its connection, and it says hello anew
            self._say(
                address, "waiting", reason=f"the end of a job of {self.count} trainers, which trainer {k} has left"
            )
            return
        if known is not None and known.session != message["session"]:
            raise WireError(
                f"trainer {k} is here already; is DTRANS_TRAINER_ID, or trainer_id, the same in two processes?"
            )
        if address in self._others:
            raise WireError(f"{self._other(address)} cannot be trainer {k} too")
        if self._by_address.get(address, k) != k:
            raise WireError(f"trainer {k} has already said hello as trainer {self._by_address[address]}")
        if known is None:
            self._trainers[k] = Trainer(message["session"], address, now)
        else:  # it moves to the Unix socket
            del self._by_address[known.address]
            known.address, known.heard = address, now
        self._by_address[address] = k
        self._say(address, "welcome", step=self._step_at(k), local=self._local, silence=self._silence)

    def _wanted(self, k: int, table: Any) -> tuple[str, ...]:
        """The blocks a trainer asks for, each checked against what is held."""
        rows = table if isinstance(table, list) else [None]
        if not all(isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) for row in rows):
            raise WireError("`recv` of something that is not a list of [name, shape, dtype]")
        for name, shape, dtype in table:
            held = self._types.get(name)
            if held is None:
                raise WireError(
                    f"trainer {k} asks for {name}, which pserver {self.endpoint} does not hold; every role must "
                    "plan the same step"
                )
            if shape != list(held.shape) or dtype != held.dtype.name:
                raise WireError(
                    f"trainer {k} has {name} as {dtype}{shape}, pserver {self.endpoint} holds "
                    f"{held.dtype.name}{list(held.shape)}; "
                    "every role must plan the same step with the same options"
                )
        return tuple(row[0] for row in table)

    def _answer(self, t: Trainer, step: int) -> None:
        t.waits = False
        nothing: list[Any] = [([], [])]  # is an answer too
        for pieces, frames in wire.messages((n, self._values[n]) for n in t.wants) if t.wants else nothing:
            head = wire.header("blocks", step=step, pieces=pieces)
            self._socket.send_multipart([t.address, head, *frames], copy=False)

    # -- who is late -----------------------------------------------------------------------------

    def _absent(self, now: float) -> list[int]:
        """The trainers that have not come yet. Raises DeadlineError when they should have."""
        absent = [k for k in range(self.count) if k not in self._trainers]
        if absent and now - self._started > self.deadline:
            raise DeadlineError(
                f"pserver {self.endpoint} waited {now - self._started:.1f} s for {named(absent)} to say hello"
            )
        return absent


def _decides_signals() -> bool:
    """Whether SIGTERM, which launchers end roles with, would end this process without a word."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _ended(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def named(trainers: list[int]) -> str:
    """Trainers, as messages call them."""
    return f"trainer {trainers[0]}" if len(trainers) == 1 else "trainers " + ", ".join(map(str, trainers))


def _following(message: wire.Message) -> list[wire.Message]:
    """What a trainer says in the same message, after it."""
    then: Any = message.fields.get("then", [])
    if then == []:
        return []
    if then not in (["recv"], ["send_barrier", "recv"]) or message.op not in wire.FOLLOWED:
        raise WireError(f"a `{message.op}` message that {wire.brief(then)} cannot follow")
    shared = {n: x for n, x in message.fields.items() if n == "blocks"}
    return [wire.Message(op, {"step": message["step"] + (op == "recv"), **shared}) for op in then]


# what trainers may say, and the method that takes it
RULES = {op: f"_{op}" for op in ("send", "send_barrier", "recv", "complete", "abort")}
