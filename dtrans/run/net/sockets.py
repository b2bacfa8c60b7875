"""Sockets as this package makes them: on loopback unless told otherwise, with bounded queues of what lingers."""

from __future__ import annotations

from typing import Any

import zmq

from dtrans.endpoints import split_endpoint
from dtrans.run.net import wire


LINGER = 5.0  # seconds that closing may take to hand over the last words


def tcp_address(endpoint: str) -> str:
    """An endpoint as ZeroMQ writes it."""
    host, port = split_endpoint(endpoint)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def new_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """A socket with the limits that all of ours have. Who wants last words of it to go says so when closing it."""
    made = context.socket(kind)
    # ZeroMQ keeps a copy of this from when a socket is bound, and goes by that copy for peers that have gone: by its
    # default, to end the context would wait for ever where one goes just before the socket is closed
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    made.setsockopt(zmq.SNDHWM, 0)  # a step's gradients are what bounds the queue
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
    return made


# seconds; Paddle's FLAGS_rpc_deadline
DEADLINE = 180.0
