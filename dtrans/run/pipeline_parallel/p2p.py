"""Values from process to process: a line from each to each, and what has come by them.

Every process binds one socket, and says where on the board of the job. What it sends is named by the number of the step
and of what is sent in it, so that nothing depends on the order in which values come: those that come before they are
wanted are kept. Sending never makes the sender wait: a thread has the sockets, waits for values to be computed, and
cuts them into messages (`dtrans.protocol.wire`). Receiving waits up to a deadline, and then says for whom.

The processes know a secret that the first of them has put on the board, beside the job's token. Each link has a
password that is made of it (`dtrans.run.net.sockets`), by which a process knows who sends: it hears nothing of others,
and of a process it takes values of its own, of steps that are not over, each once. What is not such a value is dropped
and counted.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zmq

from dtrans._jax import bulletin_board, coordinator
from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.refusals import Refusals
from dtrans.run.distributed.address import address_of, this_host
from dtrans.run.distributed.membership import Membership
from dtrans.run.net.sockets import Doorkeeper, limit, new_socket, user_of


logger = logging.getLogger(__name__)
LINGER = 10.0  # seconds that may go into handing over what was sent, at the end
LOOK = 200  # milliseconds after which a receiver looks whether its own sender has failed
MAX_BYTES = 1 << 40  # a value that claims to be larger is not one
AHEAD = 256  # messages of one process that wait to be read; others wait where they are
KEYS = 1 << 20  # numbers that values of a step may have


class P2PChannels:
    """The lines of one process.

    Args:
      cluster: the job that it is connected to.
      name: of what the lines are for: several jobs of one process have lines of their own.
    """

    def __init__(self, cluster: Membership, name: str) -> None:
        self.me, self.count, self.deadline = cluster.trainer_id, cluster.trainers, cluster.deadline
        self._context: zmq.Context[Any] = zmq.Context()
        words = self._told(f"{name}/words", token.new_token())
        self._secret = token.job_token() + words[min(words)]
        others = [k for k in range(self.count) if k != self.me]
        self._doorkeeper = Doorkeeper(self._context, self._secret, [self._link(k, self.me) for k in others])
        self._in = new_socket(self._context, zmq.PULL)
        limit(self._in, wire.MESSAGE_BYTES, AHEAD)
        self._in.setsockopt(zmq.HEARTBEAT_IVL, 0)  # a process that does not read its messages is not dead
        hosts = self._told(f"{name}/hosts", this_host())
        address = address_of(cluster, list(hosts.values()), coordinator())
        port = self._in.bind_to_random_port(address.bound)
        self._peers = self._told(name, address.at(port))
        self._here: dict[tuple[int, int, int], _Arrival] = {}
        self._step = 0  # of the value that was received last: none of earlier steps is due any more
        self._had: set[tuple[int, int, int]] = set()  # what was received of this step
        self.refusals = Refusals(logger)
        self._outbox: queue.SimpleQueue[tuple[int, int, int, Any] | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self._sender = threading.Thread(target=self._send_all, name="dtrans pipeline links", daemon=True)
        self._sender.start()
        atexit.register(self.close)

    def _link(self, origin: int, target: int) -> str:
        """As whom one process connects to another."""
        return f"process {origin} to {target}"

    def _told(self, what: str, mine: str) -> dict[int, str]:
        """What each process says, on the board of the job; this one says `mine`.

        Raises:
          DeadlineError: one did not say it.
        """
        board, found = bulletin_board(), {self.me: mine}
        board.key_value_set(f"dtrans/links/{what}/{self.me}", mine)
        for k in set(range(self.count)) - {self.me}:
            try:
                found[k] = board.blocking_key_value_get(f"dtrans/links/{what}/{k}", max(1, int(self.deadline * 1000)))
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise
                raise DeadlineError(
                    f"trainer {self.me} waited {self.deadline:g} s for trainer {k} to run the same pipeline"
                ) from e
        return found

    # -- sending ---------------------------------------------------------------------------------

    def send(self, to: int, step: int, key: int, value: Any) -> None:
        """Send a value, once it is computed. Raises what failed in sending an earlier one."""
        self._check_sender()
        self._outbox.put((to, step, key, value))

    def _send_all(self) -> None:
        sockets: dict[int, zmq.Socket[Any]] = {}
        try:
            for k, address in self._peers.items():
                if k == self.me:
                    continue
                sockets[k] = new_socket(self._context, zmq.PUSH, self._link(self.me, k), self._secret)
                sockets[k].setsockopt(zmq.HEARTBEAT_IVL, 0)
                sockets[k].setsockopt(zmq.LINGER, int(LINGER * 1000))
                sockets[k].connect(address)
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
                    sockets[to].send_multipart([head, *frames], copy=False)
                del item, value, array
        except BaseException as e:  # told by the next `send`
            self._failed.append(e)
        finally:
            for s in sockets.values():
                s.close()

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, origin: int, step: int, key: int, what: str) -> Any:
        """A value that another process sends.

        Raises:
          DeadlineError: it did not come.
          PeerError: sending something to another process has failed, which may be why nothing comes.
        """
        limit = time.monotonic() + self.deadline
        wanted = (origin, step, key)
        while wanted not in self._here or not self._here[wanted].complete:
            self._check_sender()
            left = limit - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"trainer {self.me} waited {self.deadline:g} s for {what} of step {step}, which trainer {origin} "
                    "sends"
                )
            if self._in.poll(min(int(left * 1000) + 1, LOOK)):
                self._hear(self._in.recv_multipart(copy=False))
        if step != self._step:
            self._step, self._had = step, set()
            self._here = {key: x for key, x in self._here.items() if key[1] >= step}
        self._had.add(wanted)
        return self._here.pop(wanted).value

    def _hear(self, parts: list[Any]) -> None:
        """Take a message. One that is not right is dropped, and changes nothing."""
        try:
            self._take(user_of(parts[0]), wire.parse(parts))
        except WireError as e:
            self.refusals.note("trainer %d dropped %s", self.me, e)

    def _check_sender(self) -> None:
        if self._failed:
            raise PeerError(f"trainer {self.me} could not send to another: {self._failed[0]}") from self._failed[0]

    def _take(self, user: str, message: wire.Message) -> None:
        if message.op != "value":
            raise WireError(f"a `{message.op}` message of {user}, where values of a pipeline come")
        key = (message["process"], message["step"], message["key"])
        if user != self._link(key[0], self.me):
            raise WireError(f"a value of process {key[0]} from {user}")
        if key[1] < self._step or not 0 <= key[2] < KEYS or key in self._had:
            raise WireError(
                f"value {key[2]} of step {key[1]} of process {key[0]}, which is not due in step {self._step}"
            )
        arrival = self._here.get(key) or _Arrival(message["dtype"], message["shape"], message["impl"])
        arrival.take(message)
        self._here[key] = arrival

    def close(self) -> None:
        """End the lines; what was sent is handed over."""
        if self._in.closed:
            return
        self._outbox.put(None)
        self._sender.join()
        self._doorkeeper.close()
        self._in.close(linger=0)
        self._context.term()
        atexit.unregister(self.close)


class _Arrival:
    """A value, as far as it has come."""

    def __init__(self, dtype: str, shape: Sequence[Any], impl: str) -> None:
        if not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"a value of shape {wire.brief(shape)}")
        try:
            kind = jnp.dtype(dtype)
            if not jnp.issubdtype(kind, np.number) and kind != np.bool_:
                raise TypeError
            if np.prod(shape, dtype=object) * kind.itemsize > MAX_BYTES:
                raise MemoryError
            if impl:
                jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=impl), jax.ShapeDtypeStruct(shape, kind))
            self.array = np.empty(shape, kind)
        except (TypeError, ValueError, OverflowError, MemoryError) as e:
            kinds = f"{wire.brief(shape)}, {wire.brief(dtype)}" + f", {wire.brief(impl)}" * bool(impl)
            raise WireError(f"a value that cannot be one: {kinds}") from e
        self._impl = impl
        self._bytes = wire.as_bytes(self.array) if self.array.size else np.empty(0, np.uint8)
        self._arrived: dict[str, int] = {"value": 0}

    @property
    def complete(self) -> bool:
        return self._arrived["value"] == self.array.nbytes

    @property
    def value(self) -> Any:
        """What was sent: an array, or keys of this kind."""
        return jax.random.wrap_key_data(jnp.asarray(self.array), impl=self._impl) if self._impl else self.array

    def take(self, message: wire.Message) -> None:
        def target(name: str) -> np.ndarray:
            if name != "value":
                raise WireError(f"a piece of {wire.brief(name)} in a value")
            return self._bytes

        wire.unpack(message, target, self._arrived)


def on_host(value: Any) -> tuple[np.ndarray, str]:
    """A value as its sender has it, computed; keys as their data, and the kind of keys that they are."""
    impl = ""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    return np.ascontiguousarray(np.asarray(value)).reshape(value.shape), impl
