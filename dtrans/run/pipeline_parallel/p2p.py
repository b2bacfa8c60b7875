"""Channels between the processes of a pipeline: a connection from each process to each other one.

Every process binds one listening socket, and writes its address to the board of the job. A value is
named by the step and by its index in the step, so that the order of arrival does not matter
(`dtrans.protocol.collective.arrivals`). Sending never blocks: a thread waits for values to be
computed, and cuts them into messages (`dtrans.protocol.wire`). Receiving waits up to a deadline,
and then names the sender.

The processes share a secret from the board, together with the job's token. Each connection has a
key or a password that is derived from both (`dtrans.run.net.keys`), by which a process knows the
sender. It takes values from that process only, of steps that are not over, each once, and of the
type that the plan has there. Other messages are dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import coordinator
from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.collective.arrivals import Arrivals, ValueType
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import Event, Link
from dtrans.run.distributed.address import address_of, this_host
from dtrans.run.distributed.board import all_gather_text, shared_keys
from dtrans.run.distributed.membership import Membership
from dtrans.run.distributed.watch import watch
from dtrans.run.net.zmq_transport import ZmqTransport


logger = logging.getLogger(__name__)
LINGER = 10.0  # seconds that may go into handing over what was sent, at the end
MISSED = "run the same pipeline"
LOOK = 0.2  # seconds after which a receiver looks whether its own sender has failed
AHEAD = 256  # messages of one process that wait to be read; others wait where they are


class P2PChannels:
    """Channels of one process.

    Args:
      cluster: the job that it is connected to.
      name: of the channels: several jobs of one process have separate ones.
    """

    def __init__(self, cluster: Membership, name: str) -> None:
        self.me, self.count, self.deadline = cluster.trainer_id, cluster.trainers, cluster.deadline
        self._keys = shared_keys(cluster, f"links/{name}", MISSED, _look)
        others = [k for k in range(self.count) if k != self.me]
        self._links = {self._link(k, self.me): k for k in others}  # who speaks by each
        users = {link: f"trainer {k}" for link, k in self._links.items()}
        hosts = all_gather_text(cluster, f"links/{name}/hosts", this_host(), MISSED, _look)
        address = address_of(cluster, list(hosts.values()), coordinator())
        # a process that does not read its messages is not dead
        self._in = ZmqTransport(self._keys, patience=math.inf)
        try:
            door = address.open_door(self._in, users, frame=wire.MESSAGE_BYTES, messages=AHEAD)
            self._peers = all_gather_text(cluster, f"links/{name}/at", door.endpoint, MISSED, _look)
        except BaseException:
            self._in.close()
            raise
        self.refusals = Refusals(logger)
        self._refused: dict[int, str] = {}  # what was dropped last of each process
        self._arrivals = Arrivals(self._refuse)
        self._outbox: queue.SimpleQueue[tuple[int, int, int, Any] | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self._sender = threading.Thread(
            target=self._send_all, name="dtrans pipeline links", daemon=True
        )
        self._sender.start()
        atexit.register(self.close)

    def _link(self, origin: int, target: int) -> str:
        """Return the user name of one process at another."""
        return f"process {origin} to {target}"

    # -- sending ---------------------------------------------------------------------------------

    def send(self, to: int, step: int, key: int, value: Any) -> None:
        """Send a value when it is computed. Raises the error of an earlier send."""
        self._check_sender()
        self._outbox.put((to, step, key, value))

    def _send_all(self) -> None:
        transport = ZmqTransport(self._keys, patience=math.inf)
        links: dict[int, Link] = {}
        try:
            for k, address in self._peers.items():
                if k == self.me:
                    continue
                user, role = self._link(self.me, k), f"trainer {self.me}"
                links[k] = transport.connect(address, user=user, role=role)
            while (item := self._outbox.get()) is not None:
                to, step, key, value = item
                array, impl = on_host(value)
                for pieces, frames in wire.messages([("value", array)]):
                    head = wire.header(
                        "value",
                        process=self.me,
                        step=step,
                        key=key,
                        dtype=array.dtype.name,
                        shape=list(array.shape),
                        impl=impl,
                        pieces=pieces,
                    )
                    links[to].send([head, *frames])
                del item, value, array
        except BaseException as e:  # told by the next `send`
            self._failed.append(e)
        finally:
            transport.close(LINGER)

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, origin: int, step: int, key: int, kind: ValueType, what: str) -> Any:
        """Receive a value from another process.

        Args:
          kind: expected type.
          what: name of the value, for messages.

        Raises:
          DeadlineError: it did not come.
          PeerError: another process has ended, or a send has failed, which may be the cause.
        """
        limit = self._in.now() + self.deadline
        watched, last = watch(), False
        name = (origin, step, key)
        self._arrivals.expect(name, kind)
        while not self._arrivals.is_complete(name):
            self._check_sender()
            now = self._in.now()
            if now >= limit:
                raise DeadlineError(
                    f"trainer {self.me} waited {self.deadline:g} s for {what} of step {step}, "
                    f"which trainer {origin} "
                    f"sends{self._refused.get(origin, '')}"
                )
            if self._hear_until(min(limit, now + LOOK)):
                continue
            if watched is not None and last:
                watched.check(origin)
            else:  # what a process sent before its end may come behind the news of that
                last = watched is not None and bool(
                    watched.members.why(origin) or watched.members.failure()
                )
        array = self._arrivals.take(name)
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind.impl) if kind.impl else array

    def _hear_until(self, until: float) -> bool:
        """Take messages, and return True; return False if none comes until a time."""
        has_heard = False
        while not has_heard and self._in.now() < until:
            for event in self._in.poll(until):  # an event may be of a connection
                if event.kind == "message":
                    has_heard = True
                    self._hear(event)
        return has_heard

    def _hear(self, event: Event) -> None:
        """Take a message. A malformed one is dropped, and changes nothing."""
        origin = self._links[event.user]
        try:
            message = wire.parse(event.frames)
        except WireError as e:
            self._refuse(origin, e)
        else:
            self._arrivals.hear(origin, message)

    def _refuse(self, origin: int, why: WireError) -> None:
        self._refused[origin] = f"; of what it sent something was dropped: {why}"
        self.refusals.note("trainer %d dropped %s of process %d", self.me, why, origin)

    def _check_sender(self) -> None:
        if self._failed:
            raise PeerError(
                f"trainer {self.me} could not send to another: {self._failed[0]}"
            ) from self._failed[0]

    def close(self) -> None:
        """Close the channels; sent values leave."""
        self._outbox.put(None)
        self._sender.join()
        self._in.close()
        atexit.unregister(self.close)


def _look(trainer: int) -> None:
    """Raise PeerError if an awaited process has ended."""
    watched = watch()
    if watched is not None:
        watched.check(trainer)


def on_host(value: Any) -> tuple[np.ndarray, str]:
    """Return a computed value as a host array, and the kind of its keys, if it has keys."""
    impl = ""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    return np.ascontiguousarray(np.asarray(value)).reshape(value.shape), impl
