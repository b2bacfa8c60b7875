"""A parameter server: one loop that takes messages, and looks every second who is late.

    server_sockets               sockets, and what is polled
    trainers, server_peers       who is present
    sync_server, async_server    the kinds of servers: how gradients are used, when a trainer is answered, and what
                                 it means that one is late or has failed
    sync_update, block_update    the update

Only this loop and its sockets read the clock and wait. The others are given messages, and the time.

A message that does not follow the protocol is refused and logged, and changes nothing. A trainer that comes when its
namesake has closed is of the next job on this endpoint, and waits for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from dtrans.checkpoint.runs import note
from dtrans.errors import DtransError, WireError
from dtrans.ir.array_fns import words_type
from dtrans.ir.cost import nbytes
from dtrans.run.net import token, wire
from dtrans.run.net.refusals import Refusals
from dtrans.run.parameter_server.async_server import AsyncServer
from dtrans.run.parameter_server.presence import Presence, log
from dtrans.run.parameter_server.server_sockets import ServerSockets
from dtrans.run.parameter_server.sync_server import SyncServer
from dtrans.run.parameter_server.update import ServerUpdate, own_buffers


TICK = 1.0  # seconds between two looks at who is late
SILENCE = 30.0  # seconds without a sign of life after which a trainer is taken for dead (they come every 2 s)
TRAINER_OPS = (
    "send",
    "send_barrier",
    "recv",
    "exchange",
    "complete",
    "abort",
)  # what trainers may say: methods of each kind


class Server:
    """Serves one `listen_and_serv`.

    Args:
      update: what to do with gradients.
      state: name to array; the initial values.
      deadline: seconds that trainers may keep the server, or each other, waiting.
      allow_remote: bind an endpoint that is not loopback.
      plan: the parts of the fingerprint of the plan, which trainers and other servers must have too.

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
        plan: Mapping[str, str],
    ) -> None:
        self.endpoint = update.endpoint
        secret, silence = token.job_token(), min(SILENCE, deadline)
        self._trainers = Presence(update, deadline=deadline, silence=silence, plan=plan, secret=secret)
        self._sockets = ServerSockets(context, update.endpoint, secret, wire.limits(_sizes(update)))
        self.refusals = Refusals(log)
        kind = SyncServer if update.eqn.params["sync_mode"] else AsyncServer
        self._kind = kind(update, own_buffers(state), self._trainers, self._sockets.say)
        self._sockets.bind(allow_remote=allow_remote)

    # -- serving ---------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any]:
        """Serve until every trainer has closed; the state that is left.

        Raises:
          DeadlineError: a trainer that did not come, fell silent or kept the others waiting, or a server that did.
            PeerError: one that failed, refused, or left before the others.
        """
        self._trainers.started = time.monotonic()
        ending: Any = None
        failed = True
        try:
            self._sockets.connect(self._kind.peers)
            ending = signal.signal(signal.SIGTERM, _ended) if _decides_signals() else None
            self._loop()
            failed = False
            note(self.endpoint, self._trainers.known[0].session)
            return self._kind.state
        except BaseException as e:
            self._say_why(e)
            raise
        finally:
            if ending is not None:
                signal.signal(signal.SIGTERM, ending)
            self._sockets.close(failed=failed)

    def _loop(self) -> None:
        look = time.monotonic() + TICK
        while not self._trainers.served or self._kind.peers.unsettled:
            self._sockets.poll(look - time.monotonic(), self._take)
            self._sockets.listen()
            if time.monotonic() >= look:
                # what came while an update was made may be the signs of life that are about to be missed
                for _ in range(1000 * self._trainers.count):  # and no more, whoever is flooding us
                    if not self._sockets.poll(0, self._take):
                        break
                self._kind.look(time.monotonic())
                look = time.monotonic() + TICK

    def _say_why(self, e: BaseException) -> None:
        """Tell all who are still there that this server ends."""
        reason = str(e) if isinstance(e, DtransError) else f"{type(e).__name__}: {e}"
        trainers = [self._trainers.known[k].address for k in self._trainers.present]
        for address in (*trainers, *self._kind.peers.addresses):
            self._sockets.say(address, "refuse", reason=f"it ended: {reason}", last=True)

    # -- messages --------------------------------------------------------------------------------

    def _take(self, frames: Sequence[Any]) -> None:
        """The address of who speaks, and a message. One that is malformed, or out of turn, is refused, and not kept."""
        address = bytes(frames[0].buffer)
        try:
            self._dispatch(address, wire.parse(frames[1:]), time.monotonic())
        except WireError as e:
            self.refusals.note("pserver %s refused a message of %s: %s", self.endpoint, self._who(address), e)
            self._sockets.say(address, "refuse", reason=str(e))

    def _dispatch(self, address: bytes, message: wire.Message, now: float) -> None:
        """Let those who are concerned take a message. Raises WireError for one that is refused."""
        if message.op == "alive":
            self._trainers.hear(message, now)
        elif message.op == "hello":
            self._hello(address, message, now)
        elif not self._kind.take_peer(address, message):
            k = self._trainers.speaker(address, message, now)
            if message.op not in TRAINER_OPS:
                raise WireError(f"a `{message.op}` message, which servers do not take")
            for part in (message, *_following(message)):
                getattr(self._kind, part.op)(k, part)

    def _hello(self, address: bytes, message: wire.Message, now: float) -> None:
        before = self._trainers.hello(address, message, now, self._kind.peers.name(address))
        if before:
            self._sockets.say(address, "waiting", reason=before)
        else:
            self._sockets.say(
                address, "welcome", **self._trainers.welcome(message, self._kind.step, self._sockets.local)
            )

    def _who(self, address: bytes) -> str:
        """Who speaks from there, for the log."""
        k, peer = self._trainers.by_address.get(address), self._kind.peers.name(address)
        if k is not None:
            return f"trainer {k}"
        return "a stranger" if peer is None else f"pserver {peer}"


def _sizes(update: ServerUpdate) -> dict[str, int]:
    """What trainers send and are sent in a step, by name: bytes."""
    types = {**update.grad_types, **{n: words_type(update.types[n]) for n in update.params}}
    return {n: nbytes(t) for n, t in types.items()}


def _decides_signals() -> bool:
    """Whether SIGTERM, which launchers end roles with, would end this process without a word."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _ended(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _following(message: wire.Message) -> list[wire.Message]:
    """What a trainer says in the same message, after it."""
    then: Any = message.fields.get("then", [])
    if then == []:
        return []
    if then not in (["recv"], ["send_barrier", "recv"]) or message.op not in wire.FOLLOWED:
        raise WireError(f"a `{message.op}` message that {wire.brief(then)} cannot follow")
    shared = {n: x for n, x in message.fields.items() if n == "blocks"}
    return [wire.Message(op, {"step": message["step"] + (op == "recv"), **shared}) for op in then]
