"""A synchronous parameter server.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., send_barrier, recv       every step
                    complete                          once

Gradients are kept as they come, in memory that is kept too. When all trainers have said `send_barrier`, one
compiled call makes the new state, and the blocks that trainers asked for go out. Serving ends when every trainer
has said `complete`. One that says so before the others has left: `leaver` of `dtrans.pserver` says what later updates
are made of.

    every other server:  peer                         once
                         partials...                  every step and level

An update that reduces over rows is made in phases, with an exchange between servers after each but the last
(`dtrans.run.endpoints.peers`). Serving goes on meanwhile.

Who is late is always known: a trainer that waits is told whom for, every few seconds; a trainer that never
comes, falls silent, or keeps the others waiting for longer than the deadline, or a server that does, ends the job
with an error that names it, at the server and at everybody that it serves. A message that does not follow the
protocol is refused and logged, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.addresses import is_loopback, split_endpoint
from dtrans.errors import ConfigError, DeadlineError, DtransError, PeerError, WireError
from dtrans.run.endpoints import wire
from dtrans.run.endpoints.buffers import BufferPool
from dtrans.run.endpoints.client import LINGER, new_socket, tcp_address
from dtrans.run.endpoints.peers import Peers
from dtrans.run.exchange import Exchange
from dtrans.run.update import CompiledUpdate, ServerUpdate, Vectors, own_buffers


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


class PServer:
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
        self.leaver: str = params["leaver"]
        self.deadline = deadline
        self.step = 0
        self.state = own_buffers(state)
        self._types = {n: update.types[n] for n in update.params}
        self._values: dict[str, np.ndarray] = {}
        self._trainers: dict[int, Trainer] = {}
        self._by_address: dict[bytes, int] = {}
        self._context = context
        self._prepare(update)
        self._late_since: float | None = None
        self._exchange: Exchange | None = None  # the one that the update waits for
        self._silence = min(SILENCE, deadline)
        self._bind(allow_remote)
        self._peers = Peers(context, self.endpoint, update.exchanges, leaver=self.leaver)

    def _prepare(self, update: ServerUpdate) -> None:
        """Compile updates lazily, and make the memory that gradients come to."""
        self._whole = update
        self._updates = {frozenset(range(self.count)): CompiledUpdate(update)}  # by whose gradients they are made of
        pool = BufferPool()
        self._grads = {n: pool.take(n, t.shape, t.dtype) for n, t in update.grad_types.items()}
        self._bytes = {n: g.reshape(-1).view(np.uint8) for n, g in self._grads.items()}
        # a trainer may send its own gradients only
        self._of = {
            k: {n for n in self._grads if self.count == 1 or n.endswith(f".trainer_{k}")} for k in range(self.count)
        }
        self._spent: set[int] = set()  # of those who left, whose last gradients have counted

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
        self._publish()
        ending: Any = None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        lines = self._peers.sockets
        for line in lines:
            poller.register(line, zmq.POLLIN)
        failed = True
        look = time.monotonic() + TICK
        try:
            ending = signal.signal(signal.SIGTERM, _end) if _decides_signals() else None
            while not (self._served() and self._peers.settled):
                ready = dict(poller.poll(max(0, int((look - time.monotonic()) * 1000))))
                if self._socket in ready:
                    self._take(self._socket.recv_multipart(copy=False))
                if self._monitor in ready and recv_monitor_message(self._monitor)["event"] & _REFUSED_HANDSHAKES:
                    log.warning("pserver %s refused a connection that does not speak the protocol", self.endpoint)
                if not ready.keys().isdisjoint(lines):
                    self._peers.listen()
                if time.monotonic() >= look:
                    self._catch_up()
                    self._look()
                    look = time.monotonic() + TICK
            failed = False
            return self.state
        except BaseException as e:
            reason = str(e) if isinstance(e, DtransError) else f"{type(e).__name__}: {e}"
            for t in self._trainers.values():
                if not t.done:
                    self._say(t.address, "refuse", reason=f"it ended: {reason}", last=True)
            for address in self._peers.addresses:
                self._say(address, "refuse", reason=f"it ended: {reason}", last=True)
            raise
        finally:
            if ending is not None:
                signal.signal(signal.SIGTERM, ending)
            self._peers.close(failed=failed)
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
            if message.op == "peer":
                self._meet(address, message)
                return
            if self._peers.name(address) is not None:
                self._partials(address, message)
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
        peer = self._peers.name(address)
        return "a stranger" if peer is None else f"pserver {peer}"

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
        if self._peers.name(address) is not None:
            raise WireError(f"pserver {self._peers.name(address)} cannot be trainer {k} too")
        if self._by_address.get(address, k) != k:
            raise WireError(f"trainer {k} has already said hello as trainer {self._by_address[address]}")
        if known is None:
            self._trainers[k] = Trainer(message["session"], address, now)
        else:  # it moves to the Unix socket
            del self._by_address[known.address]
            known.address, known.heard = address, now
        self._by_address[address] = k
        self._say(address, "welcome", step=self.step, local=self._local, silence=self._silence)

    def _send(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        self._in_turn(k, message)
        if t.at_barrier:
            raise WireError(f"gradients of step {self.step} after its send_barrier")

        def target(name: str) -> np.ndarray:
            if name not in self._of[k]:
                raise WireError(f"{name} is not a gradient that trainer {k} sends to pserver {self.endpoint}")
            return self._bytes[name]

        wire.unpack(message, target, t.arrived)

    def _send_barrier(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        self._in_turn(k, message)
        if t.at_barrier:
            raise WireError(f"a second send_barrier of step {self.step}")
        short = sorted(n for n in self._of[k] if t.arrived.get(n, 0) != self._bytes[n].nbytes)
        if short:
            raise WireError(
                f"send_barrier of step {self.step}, but {short[0]} has {t.arrived.get(short[0], 0)} of "
                f"{self._bytes[short[0]].nbytes} bytes"
            )
        t.at_barrier = True
        gone = sorted(i for i, other in self._trainers.items() if other.done)
        if gone and self.leaver == "error":
            raise PeerError(self._unequal(gone[0], k))
        self._step_if_all_sent()

    def _step_if_all_sent(self) -> None:
        """Make the step when all trainers have come, and those who have not left are at the barrier."""
        present = [t for t in self._trainers.values() if not t.done]
        if len(self._trainers) == self.count and present and all(t.at_barrier for t in present):
            self._make_step()

    def _make_step(self) -> None:
        """All gradients are here."""
        update = self._update_of_those_present()
        self._run = update.run({n: self._grads[n] for n in update.update.grad_types}, self.state)
        self._go_on({})

    def _update_of_those_present(self) -> CompiledUpdate:
        """What makes the new state; of every set of trainers one is compiled."""
        present = frozenset(self._trainers) if self.leaver == "paddle" else self._present()
        if present not in self._updates:
            gone = _named(sorted(self._trainers.keys() - present))
            told = "pserver %s goes on without %s, which left: step %d and later ones are of %s"
            log.warning(told, self.endpoint, gone, self.step + 1, _named(sorted(present)))
            self._updates[present] = CompiledUpdate(self._whole.merged_from(present))
        return self._updates[present]

    def _present(self) -> frozenset[int]:
        """The trainers that have not left."""
        return frozenset(k for k, t in self._trainers.items() if not t.done)

    def _go_on(self, arrived: Vectors | None) -> None:
        """Make the step as far as what came from other servers allows."""
        while arrived is not None:
            try:
                self._exchange, parcels = self._run.send(arrived) if self._exchange else next(self._run)
            except StopIteration as done:
                self._exchange = None
                self._finish(done.value)
                return
            self._exchange_since = time.monotonic()
            self._peers.send(self.step, self._exchange, parcels)
            arrived = self._arrived()

    def _arrived(self) -> Vectors | None:
        """What the update waits for, if all of it is here."""
        if self._exchange is None or self._peers.missing(self.step, self._exchange):
            return None
        return self._peers.collected(self.step, self._exchange)

    def _finish(self, state: dict[str, Any]) -> None:
        """A step is made."""
        # the memory of its gradients and of what other servers sent is written again, so nothing may still read it
        self.state = jax.block_until_ready(state) if self._whole.exchanges else state
        self._peers.made(self.step)
        self.step += 1
        self._late_since = None
        for t in self._trainers.values():
            t.at_barrier = False
            t.arrived.clear()
        self._publish()
        self._forget(self._trainers.keys() - self._present())
        for t in self._trainers.values():
            if t.waits:
                self._answer(t, self.step)

    def _forget(self, trainers: Collection[int]) -> None:
        """The gradients of those who left have counted once more (`leaver="paddle"`): from now on they are zero."""
        for k in set(trainers) - self._spent if self.leaver == "paddle" else ():
            for name in self._of[k]:
                self._grads[name].fill(0)
            self._spent.add(k)

    def _publish(self) -> None:
        """The parameters as memory to send from; waits until they are made."""
        self._values = {n: np.asarray(self.state[n]) for n in self._types}

    def _recv(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        wants = self._wanted(k, message["blocks"]) if "blocks" in message.fields else t.wants
        if message["step"] not in (self.step, self.step + 1) or (message["step"] > self.step and not t.at_barrier):
            raise WireError(f"`recv` of step {message['step']}, pserver {self.endpoint} is at {self.step}")
        t.wants, t.waits = wants, True
        if message["step"] == self.step:
            self._answer(t, self.step)

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

    def _complete(self, k: int, message: wire.Message) -> None:
        t = self._trainers[k]
        t.done = True
        self._say(t.address, "goodbye")
        waiting = sorted(i for i, other in self._trainers.items() if other.at_barrier and i != k)
        if t.at_barrier or t.arrived:
            after = ", after its send_barrier" if t.at_barrier else ""
            raise PeerError(f"trainer {k} closed in the middle of step {self.step + 1}{after}")
        if waiting and self.leaver == "error":
            raise PeerError(self._unequal(k, waiting[0]))
        if not self.step:
            self._forget([k])  # it never sent a gradient, and the memory for it holds anything
        self._step_if_all_sent()

    def _unequal(self, gone: int, sends: int) -> str:
        """Why a job with leaver="error" ends."""
        return (
            f"trainer {gone} closed after step {self.step} while trainer {sends} sends step {self.step + 1}: "
            "with leaver='error' all trainers make the same number of steps"
        )

    def _abort(self, k: int, message: wire.Message) -> None:
        self._trainers[k].done = self._trainers[k].failed = True
        raise PeerError(f"trainer {k} failed: {message['reason']}")

    def _in_turn(self, k: int, message: wire.Message) -> None:
        if message["step"] != self.step:
            raise WireError(f"`{message.op}` of step {message['step']}, pserver {self.endpoint} is at {self.step}")

    # -- what servers say ------------------------------------------------------------------------

    def _meet(self, address: bytes, message: wire.Message) -> None:
        if address in self._by_address:
            raise WireError(f"trainer {self._by_address[address]} cannot be a pserver too")
        if self._peers.meet(address, message):
            self._say(address, "welcome", step=self.step, local="", silence=self._silence)
        else:
            self._say(address, "waiting", reason=f"the end of a job that pserver {message['endpoint']} is in already")

    def _partials(self, address: bytes, message: wire.Message) -> None:
        if message.op != "partials":
            raise WireError(f"a `{message.op}` message, which servers do not take from each other")
        self._peers.take(address, message, self.step)
        self._go_on(self._arrived())

    # -- who is late -----------------------------------------------------------------------------

    def _absent(self, now: float) -> list[int]:
        """The trainers that have not come yet. Raises DeadlineError when they should have."""
        absent = [k for k in range(self.count) if k not in self._trainers]
        if absent and now - self._started > self.deadline:
            raise DeadlineError(
                f"pserver {self.endpoint} waited {now - self._started:.1f} s for {_named(absent)} to say hello"
            )
        return absent

    def _look(self) -> None:
        """Raise for whoever is too late, and tell those who wait whom they wait for."""
        now = time.monotonic()
        for k, t in self._trainers.items():
            if not t.done and now - t.heard > self._silence:
                raise DeadlineError(
                    f"pserver {self.endpoint} heard nothing from trainer {k} for {now - t.heard:.1f} s; it is "
                    "taken for dead"
                )
        absent = self._absent(now)
        late = absent + [k for k, t in self._trainers.items() if not t.at_barrier and not t.done]
        waiting = [k for k, t in self._trainers.items() if t.at_barrier]
        if not waiting:
            # at the end servers wait for each other only where one has not heard yet that the other is there
            self._late_since = (self._late_since or now) if self._served() else None
            if self._late_since is not None and now - self._late_since > self.deadline:
                raise DeadlineError(
                    f"pserver {self.endpoint}, whose trainers have closed, waited {now - self._late_since:.1f} s for "
                    f"{self._peers.named(self._peers.unsettled)} to greet it"
                )
            return
        if self._exchange is None:
            self._late_since = self._late_since or now
            what = f"gradients of step {self.step + 1} from {_named(late)}"
        else:
            self._late_since = self._exchange_since
            missing = self._peers.missing(self.step, self._exchange)
            what = f"partial results of step {self.step + 1}, level {self._exchange.level}, from "
            what += self._peers.named(missing)
            self._peers.check(missing, what)
        waited = now - self._late_since
        if waited > self.deadline:
            raise DeadlineError(f"pserver {self.endpoint} and {_named(waiting)} waited {waited:.1f} s for {what}")
        for k in waiting:
            self._say(self._trainers[k].address, "waiting", reason=f"{waited:.1f} s for {what}")


def _decides_signals() -> bool:
    """Whether SIGTERM, which launchers end roles with, would end this process without a word."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _end(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _named(trainers: list[int]) -> str:
    return f"trainer {trainers[0]}" if len(trainers) == 1 else "trainers " + ", ".join(map(str, trainers))


def _following(message: wire.Message) -> list[wire.Message]:
    """What a trainer says in the same message, after it."""
    then: Any = message.fields.get("then", [])
    if then == []:
        return []
    if then not in (["recv"], ["send_barrier", "recv"]) or "step" not in message.fields:
        raise WireError(f"a `{message.op}` message that {wire.brief(then)} cannot follow")
    shared = {n: x for n, x in message.fields.items() if n == "blocks"}
    step = message.fields.get("step", 0)
    return [wire.Message(op, {"step": step + (op == "recv"), **shared}) for op in then]


# what trainers may say, and the method that takes it
RULES = {op: f"_{op}" for op in ("send", "send_barrier", "recv", "complete", "abort")}
