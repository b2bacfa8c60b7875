"""The trainers of an nccl2 job meet, before JAX connects them.

    trainer 0   asks every other at its endpoint, again and again, until all have answered or time is up
    trainer k   listens at its endpoint for trainer 0, and then for its word that all are there

What they say is `dtrans.protocol.meeting`, and `dtrans.protocol.meeting_loop` drives it. JAX's own
way of waiting for processes ends them with SIGABRT when one does not come, and does not say which.
Here trainer 0 knows, and tells those that came. After that trainer 0's endpoint is the coordinator
of `jax.distributed`; the other endpoints are not used any more.

Source of the direction: paddle/fluid/operators/collective/gen_nccl_id_op.cc.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtrans.endpoints import split_endpoint
from dtrans.errors import ConfigError
from dtrans.protocol import wire
from dtrans.protocol.meeting_loop import FIRST, FirstLoop, OtherLoop
from dtrans.run.distributed.address import reached_here
from dtrans.run.net.keys import Keys
from dtrans.run.net.sockets import check_host
from dtrans.run.net.zmq_transport import ZmqTransport


QUEUE = 1000  # messages of one connection that may wait to be read


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
    me, keys = f"trainer {trainer_id}", Keys.from_environment(encryption)
    remedy = "dtrans.connect(allow_remote=True)"
    check_host(me, endpoints[trainer_id], remedy, keys, allow_remote=allow_remote)
    own = reached_here(endpoints[trainer_id], endpoints)
    how: Mapping[str, Any] = {"secret": keys.secret, "deadline": deadline}
    # to close it waits for last words, for as long as those who spoke them let them linger
    with contextlib.closing(ZmqTransport(keys)) as transport:
        if trainer_id == 0:
            reached = [reached_here(e, endpoints) for e in endpoints]
            with _held(own):
                _run(FirstLoop(transport, endpoints, reached, **how))
        else:
            door = transport.bind(
                own,
                {FIRST: "trainer 0"},
                frame=wire.MAX_MESSAGE,
                messages=QUEUE,
                reach=own,
                name=f"{me} ({own})",
            )
            _run(OtherLoop(transport, door, trainer_id, endpoints, **how))


def _run(loop: FirstLoop | OtherLoop) -> None:
    try:
        while not loop.is_done:
            loop.step()
    except BaseException as e:
        loop.end(e)
        raise
    loop.end(None)


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
            why = e.strerror or e
            raise ConfigError(f"trainer 0 ({endpoint}) cannot be bound: {why}") from e
        yield
