"""Rendezvous of the trainers of a job without servers (mode "nccl2"), before JAX connects them.

    trainer 0   connects to the endpoint of every other trainer, until all have joined
    trainer k   listens at its endpoint, until trainer 0 announces that all have joined

`dtrans.protocol.collective.join_loop` drives the messages. If a process is missing, JAX's own wait
ends all processes with SIGABRT, and does not name the missing process. Here trainer 0 sends the
name to the trainers that have joined. Afterwards, trainer 0's endpoint is the coordinator of
`jax.distributed`, and the other endpoints are unused.

Source of the direction of connections: paddle/fluid/operators/collective/gen_nccl_id_op.cc.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtrans.endpoints import split_endpoint
from dtrans.errors import ConfigError
from dtrans.protocol import wire
from dtrans.protocol.collective.join_loop import FIRST, LeaderLoop, MemberLoop
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
    """Wait until all trainers have joined.

    Args:
      trainer_id: this trainer.
      endpoints: endpoints of all trainers.
      deadline: seconds to wait.
      allow_remote: True to allow an endpoint that is not on loopback.
      encryption: `transport_encryption` of `dtrans.connect`.

    Raises:
      ConfigError: this trainer's endpoint cannot be bound, or is not allowed.
      DeadlineError: some trainers did not join; the message names them.
      PeerError: a trainer has different endpoints or keys.
    """
    me, keys = f"trainer {trainer_id}", Keys.from_environment(encryption)
    remedy = "dtrans.connect(allow_remote=True)"
    check_host(me, endpoints[trainer_id], remedy, keys, allow_remote=allow_remote)
    endpoint = reached_here(endpoints[trainer_id], endpoints)
    how: Mapping[str, Any] = {"secret": keys.secret, "deadline": deadline}
    # `close` waits up to LINGER seconds until the last messages are sent
    with contextlib.closing(ZmqTransport(keys)) as transport:
        if trainer_id == 0:
            reached = [reached_here(e, endpoints) for e in endpoints]
            with _reserve(endpoint):
                _run(LeaderLoop(transport, endpoints, reached, **how))
        else:
            door = transport.bind(
                endpoint,
                {FIRST: "trainer 0"},
                frame=wire.MAX_MESSAGE,
                messages=QUEUE,
                reach=endpoint,
                name=f"{me} ({endpoint})",
            )
            _run(MemberLoop(transport, door, trainer_id, endpoints, **how))


def _run(loop: LeaderLoop | MemberLoop) -> None:
    try:
        while not loop.is_done:
            loop.step()
    except BaseException as e:
        loop.end(e)
        raise
    loop.end(None)


@contextlib.contextmanager
def _reserve(endpoint: str) -> Iterator[None]:
    """Bind trainer 0's port while trainers wait for each other, so that a port in use is an error.

    JAX's coordinator binds the port afterwards.

    Raises:
      ConfigError: the port is in use.
    """
    host, port = split_endpoint(endpoint)
    with contextlib.ExitStack() as stack:
        try:
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
            reserved = stack.enter_context(socket.socket(family, kind, protocol))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
        except OSError as e:
            why = e.strerror or e
            raise ConfigError(f"trainer 0 ({endpoint}) cannot be bound: {why}") from e
        yield
