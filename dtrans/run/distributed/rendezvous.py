"""The trainers of an nccl2 job meet, before JAX connects them.

    trainer 0   asks every other at its endpoint, again and again, until all have answered or time is up
    trainer k   listens at its endpoint for trainer 0, and then for its word that all are there

What they say is `dtrans.protocol.meeting`. JAX's own way of waiting for processes ends them with
SIGABRT when one does not come, and does not say which. Here trainer 0 knows, and tells those that
came. After that trainer 0's endpoint is the coordinator of `jax.distributed`; the other endpoints
are not used any more.

What is no message, or not of this job, is dropped and counted, and trainer 0 asks again there.

Source of the direction: paddle/fluid/operators/collective/gen_nccl_id_op.cc.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from dtrans.endpoints import split_endpoint
from dtrans.errors import ConfigError, DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.meeting import MeetingFirst, MeetingOther
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import LINGER
from dtrans.run.distributed.address import reached_here
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import (
    Doorkeeper,
    Handshakes,
    bind,
    check_host,
    connect,
    new_socket,
    tcp_address,
)


log = logging.getLogger("dtrans.rendezvous")
FIRST = "the first trainer"  # as whom it connects to the others
AGAIN = 1.0  # seconds after which trainer 0 asks again, where somebody else has answered


def rendezvous(
    trainer_id: int,
    endpoints: Sequence[str],
    *,
    deadline: float,
    allow_remote: bool = False,
    encryption: str = "auto",
) -> None:
    """Return when the trainers at all endpoints are there.

    Raises:
      ConfigError: this trainer's endpoint cannot be bound, or is not on loopback.
      DeadlineError: some did not come; the message names them.
      PeerError: a trainer was told other endpoints, or has other keys.
    """
    remedy, keys = "dtrans.connect(allow_remote=True)", Keys.from_environment(encryption)
    check_host(
        f"trainer {trainer_id}", endpoints[trainer_id], remedy, keys, allow_remote=allow_remote
    )
    own = reached_here(endpoints[trainer_id], endpoints)
    context: zmq.Context[Any] = zmq.Context()
    try:
        if trainer_id == 0:
            _gather(context, own, endpoints, keys, deadline)
        else:
            with (
                contextlib.closing(Doorkeeper(context, keys, {FIRST: "trainer 0"})),
                contextlib.closing(new_socket(context, zmq.ROUTER)) as door,
            ):
                _come(door, own, trainer_id, endpoints, keys, deadline)
    finally:
        context.term()  # waits for last words, for as long as its sockets let them linger


def _gather(
    context: zmq.Context[Any], own: str, endpoints: Sequence[str], keys: Keys, deadline: float
) -> None:
    """As trainer 0: ask all others."""
    limit = time.monotonic() + deadline
    refusals = Refusals(log)
    meeting = MeetingFirst(endpoints, keys.secret, token.new_token(), now=time.monotonic())
    with _held(own), contextlib.ExitStack() as stack:
        poller = zmq.Poller()
        lines: dict[int, zmq.Socket[Any]] = {}
        handshakes: dict[zmq.Socket[Any], tuple[int, Handshakes]] = {}
        for k, endpoint in enumerate(endpoints[1:], 1):
            address = tcp_address(reached_here(endpoint, endpoints))
            keys.check(f"trainer 0 connects to {endpoint}", address)
            lines[k] = stack.enter_context(contextlib.closing(new_socket(context, zmq.DEALER)))
            watched = stack.enter_context(contextlib.closing(Handshakes(lines[k], keys, address)))
            handshakes[watched.monitor] = k, watched
            # ZeroMQ tries again until somebody is there
            connect(lines[k], address, keys, FIRST, "trainer 0")
            lines[k].send(meeting.question(k))
            poller.register(lines[k], zmq.POLLIN)
            poller.register(watched.monitor, zmq.POLLIN)
        who = {line: k for k, line in lines.items()}
        again = time.monotonic() + AGAIN
        try:
            while meeting.missing:
                ready = dict(poller.poll(_milliseconds(min(limit, again))))
                for monitor in ready.keys() & handshakes.keys():
                    k, watched = handshakes[monitor]
                    if why := watched.take()[1]:
                        meeting.barred(k, why)
                answered = ready.keys() & who.keys()
                if not answered and time.monotonic() >= limit:
                    raise meeting.late(deadline)
                # it looks once in AGAIN seconds at least
                meeting.say_that_it_waits(time.monotonic())
                if time.monotonic() >= again:
                    again = time.monotonic() + AGAIN
                    for k in [*meeting.others]:
                        with contextlib.suppress(zmq.Again):
                            # another may be there by now
                            lines[k].send(meeting.question(k), zmq.NOBLOCK)
                for line in answered:
                    k = who[line]
                    try:
                        meeting.heard(k, line.recv_multipart())
                    except WireError as e:
                        refusals.note("trainer 0 dropped what came from %s: %s", endpoints[k], e)
        except BaseException as e:
            late = isinstance(e, DeadlineError)
            reason = (
                str(e) if isinstance(e, PeerError) else f"trainer 0 failed: {type(e).__name__}: {e}"
            )
            # not who refused, which has gone; who has yet to come is told if it comes while this
            # lingers
            for k in meeting.here if late else [*meeting.here, *meeting.missing]:
                _let_linger(lines[k])
                _say(lines[k], "abort", reason=reason, late=late)
            raise
        for line in lines.values():
            _let_linger(line)
            _say(line, "go")


def _let_linger(made: zmq.Socket[Any]) -> None:
    """Let what is said from now on still go when the socket is closed."""
    made.linger = int(LINGER * 1000)


def _say(line: zmq.Socket[Any], op: str, **fields: Any) -> None:
    """The last words to another trainer, if it is there to hear them."""
    # ZeroMQ gives up a connection to something that does not speak its protocol, and to send would
    # wait for another
    with contextlib.suppress(zmq.Again):
        line.send(wire.header(op, **fields), zmq.NOBLOCK)


def _milliseconds(limit: float) -> int:
    """Until then."""
    return max(0, math.ceil((limit - time.monotonic()) * 1000))


@contextlib.contextmanager
def _held(endpoint: str) -> Iterator[None]:
    """Keep the coordinator's port until JAX takes it: that it is in use is said here, by name."""
    host, port = split_endpoint(endpoint)
    with contextlib.ExitStack() as stack:
        try:
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
            held = stack.enter_context(socket.socket(family, kind, protocol))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
        except OSError as e:
            raise ConfigError(f"trainer 0 cannot listen at {endpoint}: {e.strerror or e}") from e
        yield


def _come(
    door: zmq.Socket[Any],
    own: str,
    trainer_id: int,
    endpoints: Sequence[str],
    keys: Keys,
    deadline: float,
) -> None:
    """As another trainer: wait to be asked, and for the word that all are there."""
    me = f"trainer {trainer_id}"
    try:
        bind(door, tcp_address(own), keys)
    except zmq.ZMQError as e:
        raise ConfigError(f"{me} cannot listen at {own}: {zmq.strerror(e.errno or 0)}") from e
    meeting = MeetingOther(
        trainer_id, endpoints, keys.secret, deadline=deadline, now=time.monotonic()
    )
    refusals = Refusals(log)
    while not meeting.met:
        if not door.poll(_milliseconds(meeting.wakes)):
            if time.monotonic() >= meeting.limit:
                raise meeting.late()
            meeting.say_that_it_waits(time.monotonic())
            continue
        sender, *parts = door.recv_multipart()
        try:
            answer = meeting.heard(sender, parts, time.monotonic())
        except WireError as e:  # not one of this job
            refusals.note("%s dropped %s", me, e)
            continue
        if meeting.refused:
            _let_linger(door)
        if answer is not None:
            door.send_multipart([sender, answer])
        if meeting.refused:
            raise PeerError(f"trainer 0 has other endpoints: {meeting.refused}")
