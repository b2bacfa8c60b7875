"""The trainers of an nccl2 job meet, before JAX connects them.

    trainer 0   asks every other at its endpoint, again and again, until all have answered or time is up
    trainer k   listens at its endpoint for trainer 0, and then for its word that all are there

JAX's own way of waiting for processes ends them with SIGABRT when one does not come, and does not say which. Here
trainer 0 knows, and tells those that came. What they agree on is the list of endpoints, which says who is who. After
that trainer 0's endpoint is the coordinator of `jax.distributed`; the other endpoints are not used any more.

Both sides show that they have the job's token (`dtrans.protocol.token`): trainer 0 where it connects, the others with
what they answer. What others say, and what is no message, is dropped and counted, and trainer 0 asks again there.

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
from dtrans.protocol.refusals import Refusals
from dtrans.run.net.sockets import LINGER, Doorkeeper, check_host, new_socket, tcp_address


log = logging.getLogger("dtrans.rendezvous")
FIRST = "the first trainer"  # as whom it connects to the others
AGAIN = 1.0  # seconds after which trainer 0 asks again, where somebody else has answered
GRACE = 5.0  # seconds that the others give trainer 0 to tell them that time is up


def rendezvous(trainer_id: int, endpoints: Sequence[str], *, deadline: float, allow_remote: bool = False) -> None:
    """Return when the trainers at all endpoints are there.

    Raises:
      ConfigError: this trainer's endpoint cannot be bound, or is not on loopback.
      DeadlineError: some did not come; the message names them.
      PeerError: a trainer was told other endpoints.
    """
    remedy = "dtrans.connect(allow_remote=True)"
    check_host(f"trainer {trainer_id}", endpoints[trainer_id], remedy, allow_remote=allow_remote)
    context: zmq.Context[Any] = zmq.Context()
    try:
        if trainer_id == 0:
            _gather(context, endpoints, deadline)
        else:
            with (
                contextlib.closing(Doorkeeper(context, token.job_token(), (FIRST,))),
                contextlib.closing(new_socket(context, zmq.ROUTER)) as door,
            ):
                _come(door, trainer_id, endpoints, deadline)
    finally:
        context.term()  # waits for last words, for as long as its sockets let them linger


def _gather(context: zmq.Context[Any], endpoints: Sequence[str], deadline: float) -> None:
    """As trainer 0: ask all others."""
    limit = time.monotonic() + deadline
    secret, nonce = token.job_token(), token.new_token()
    ask = lambda line, k: line.send(wire.header("meet", trainer=k, endpoints=list(endpoints), nonce=nonce))
    refusals, ignored = Refusals(log), dict[Any, str]()  # lines to what was said by them last that is not of this job
    with _held(endpoints[0]), contextlib.ExitStack() as stack:
        poller = zmq.Poller()
        missing: dict[zmq.Socket[Any], int] = {}
        there: list[zmq.Socket[Any]] = []
        for k, endpoint in enumerate(endpoints[1:], 1):
            line = stack.enter_context(contextlib.closing(new_socket(context, zmq.DEALER, FIRST, secret)))
            line.connect(tcp_address(endpoint))  # ZeroMQ tries again until somebody is there
            ask(line, k)
            poller.register(line, zmq.POLLIN)
            missing[line] = k
        try:
            while missing:
                ready = poller.poll(_milliseconds(min(limit, time.monotonic() + AGAIN)))
                if not ready and time.monotonic() >= limit:
                    absent = " and ".join(f"trainer {k} ({endpoints[k]})" for k in missing.values())
                    why = "".join(f"; at {endpoints[missing[x]]} {said}" for x, said in ignored.items() if x in missing)
                    raise DeadlineError(f"trainer 0 waited {deadline:g} s for {absent} to come{why}")
                for line in () if ready else ignored.keys() & missing.keys():
                    with contextlib.suppress(zmq.Again):
                        ask(line, missing[line])  # another may be there by now
                for line, _ in ready:
                    k = missing[line]
                    try:
                        message = _answer(line.recv_multipart(), secret, nonce)
                    except WireError as e:
                        ignored[line] = f"is something that is not of this job: {e}"
                        refusals.note("trainer 0 dropped what came from %s: %s", endpoints[k], e)
                        continue
                    del missing[line]
                    poller.unregister(line)
                    if message.op != "here":
                        raise PeerError(f"trainer {k} ({endpoints[k]}) refused trainer 0: {message['reason']}")
                    there.append(line)
        except BaseException as e:
            late = isinstance(e, DeadlineError)
            reason = str(e) if isinstance(e, PeerError) else f"trainer 0 failed: {type(e).__name__}: {e}"
            # not who refused, which has gone; who has yet to come is told if it comes while this lingers
            for line in there if late else [*there, *missing]:
                _let_linger(line)
                _say(line, "abort", reason=reason, late=late)
            raise
        for line in there:
            _let_linger(line)
            _say(line, "go")


def _let_linger(made: zmq.Socket[Any]) -> None:
    """Let what is said from now on still go when the socket is closed."""
    made.linger = int(LINGER * 1000)


def _say(line: zmq.Socket[Any], op: str, **fields: Any) -> None:
    """The last words to another trainer, if it is there to hear them."""
    # ZeroMQ gives up a connection to something that does not speak its protocol, and to send would wait for another
    with contextlib.suppress(zmq.Again):
        line.send(wire.header(op, **fields), zmq.NOBLOCK)


def _milliseconds(limit: float) -> int:
    """Until then."""
    return max(0, math.ceil((limit - time.monotonic()) * 1000))


def _answer(parts: Sequence[bytes], secret: str, nonce: str) -> wire.Message:
    """What a trainer answers to `meet`. Raises WireError where it is none, or of somebody without the token."""
    message = wire.parse(parts)
    if message.op not in ("here", "refuse"):
        raise WireError(f"it says `{message.op}`")
    if not token.is_shown(message.fields.get("proof"), secret, f"{message.op} {nonce}"):
        raise WireError(f"it says `{message.op}`, and has not the job's token")
    return message


@contextlib.contextmanager
def _held(endpoint: str) -> Iterator[None]:
    """Keep the coordinator's port until JAX takes it: that it is in use is said here, by name."""
    host, port = split_endpoint(endpoint)
    with contextlib.ExitStack() as stack:
        try:
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            held = stack.enter_context(socket.socket(family, kind, protocol))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
        except OSError as e:
            raise ConfigError(f"trainer 0 cannot listen at {endpoint}: {e.strerror or e}") from e
        yield


def _come(door: zmq.Socket[Any], trainer_id: int, endpoints: Sequence[str], deadline: float) -> None:
    """As another trainer: wait to be asked, and for the word that all are there."""
    me, first = f"trainer {trainer_id}", f"trainer 0 ({endpoints[0]})"
    try:
        door.bind(tcp_address(endpoints[trainer_id]))
    except zmq.ZMQError as e:
        raise ConfigError(f"{me} cannot listen at {endpoints[trainer_id]}: {zmq.strerror(e.errno or 0)}") from e
    limit, what = time.monotonic() + deadline, "to come"
    asked, refusals, secret = b"", Refusals(log), token.job_token()
    while True:
        if not door.poll(_milliseconds(limit)):
            waited = deadline if not asked else deadline + GRACE
            raise DeadlineError(f"{me} waited {waited:g} s at {endpoints[trainer_id]} for {first} {what}")
        sender, *parts = door.recv_multipart()
        try:
            message = wire.parse(parts)
        except WireError as e:  # not one of this job
            refusals.note("%s dropped %s", me, e)
            continue
        if message.op == "meet":
            nonce = message.fields.get("nonce", "")
            told = [message["trainer"], message["endpoints"]]
            if told != [trainer_id, list(endpoints)]:
                said = f"trainer {told[0]} of {wire.brief(','.join(map(str, told[1])))}"
                reason = f"this is {me} of {','.join(endpoints)}, and trainer 0 takes it for {said}"
                _let_linger(door)
                door.send_multipart(
                    [sender, wire.header("refuse", reason=reason, proof=token.shown(secret, f"refuse {nonce}"))]
                )
                raise PeerError(f"trainer 0 has other endpoints: {reason}")
            door.send_multipart([sender, wire.header("here", proof=token.shown(secret, f"here {nonce}"))])
            # its own deadline ends before this one, and then it says who is missing
            asked, limit, what = sender, time.monotonic() + deadline + GRACE, "to find the others"
        elif sender == asked and message.op == "abort":
            kind = DeadlineError if message.fields.get("late") else PeerError
            raise kind(f"{me} was told to give up: {message['reason']}")
        elif sender == asked and message.op == "go":
            return
