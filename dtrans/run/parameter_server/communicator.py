"""What sends and receives for a trainer beside its steps.

A step puts its gradients into a queue (`put`) and takes the parameters that were received last (`newest`); neither
waits, unless the queue is full, or nothing was received yet. A thread, which the connections belong to while it runs,

    takes what is in the queue, merges it if it is of several steps, and sends it,
    asks for all parameters when it has sent often enough, and
    receives them while it goes on sending, as far as `CommunicatorConfig` lets it run ahead of the servers.

An answer to a request for parameters is also the word that everything sent before it has arrived, so that what is under
way is bounded: servers that are slower than steps make the queue fill up, its gradients merge, and at last steps wait.

`barrier` waits until all that was put is in what was received; with it at the end of every step, a trainer is as one
without a communicator.

Source: `AsyncCommunicator` and `HalfAsyncCommunicator` in paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import zmq

from dtrans.errors import DeadlineError, PeerError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.run.parameter_server.client import Connection


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf that is cut into blocks when it is sent, and put together when it is received.

    Attributes:
      endpoints, names: of each block.
      sections: the number of rows of each; of a 0-d leaf, 1.
      shape, dtype: of the whole.
      merge: how several are combined that are sent as one: their "sum", their "mean" or the "newest".
    """

    endpoints: tuple[str, ...]
    names: tuple[str, ...]
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    merge: str = "sum"

    def blocks(self, whole: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
        """The endpoint, name and rows of each block."""
        if len(self.names) == 1:
            return [(self.endpoints[0], self.names[0], whole)]
        return list(zip(self.endpoints, self.names, rows_of(whole, self.sections), strict=True))


def rows_of(whole: np.ndarray, sections: Sequence[int]) -> list[np.ndarray]:
    """The blocks of an array, as views: so many rows of it each."""
    return [whole[end - n : end] for n, end in zip(sections, np.cumsum(sections), strict=True)]


@dataclasses.dataclass
class _Pull:
    """Parameters that are on their way."""

    since: float
    steps: int  # that were sent before
    whole: dict[str, np.ndarray]
    missing: dict[str, Inbox]  # the endpoints whose blocks are not all here
    at: dict[str, int]  # the step that each endpoint was asked at


Group = Sequence[tuple[Leaf, Any]]  # what a step sends: leaves with their values


class Communicator:
    """Sends gradients and receives parameters in a thread of its own.

    Args:
      lines: gives the connection to an endpoint, which is the communicator's until `stop`.
      leaves: what is received, by a key of the caller's.
      config: how long the queue is, and so on.
      deadline: seconds that parameters may be on their way.
      name: of the trainer.

    Every method raises what has ended the thread: PeerError, DeadlineError, WireError, or what JAX raised.
    """

    def __init__(
        self,
        lines: Callable[[str], Connection],
        leaves: Mapping[str, Leaf],
        config: CommunicatorConfig,
        *,
        deadline: float,
        name: str,
    ) -> None:
        self.config = config
        self.deadline = deadline
        self.name = name
        self._leaves = dict(leaves)
        self._lines = {ep: lines(ep) for leaf in leaves.values() for ep in leaf.endpoints}
        self._changed = threading.Condition()
        self._queue: collections.deque[Group] = collections.deque()
        self._put = 0  # steps put so far
        self._newest: tuple[int, dict[str, np.ndarray]] | None = None  # how many steps are in it; and the leaves
        self._asked: set[str] = set()  # the endpoints that know what is wanted
        self._ended = False
        self._discarded = False
        self._error: BaseException | None = None
        self._pool = BufferPool()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"dtrans communicator of {name}", daemon=True)
        self._thread.start()

    # -- what steps call -------------------------------------------------------------------------

    def put(self, group: Group) -> None:
        """Let what a step has made be sent. Waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._queue) < self.config.send_queue_size)
            self._check()
            self._queue.append(group)
            self._put += 1
        os.write(self._waker, b"+")

    def newest(self) -> dict[str, np.ndarray]:
        """The parameters that were received last, as memory that is not written again while anybody refers to it.

        Waits for the first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._newest is not None)
            self._check()
            assert self._newest is not None
            return self._newest[1]

    def received(self) -> int:
        """How many of the steps that were put are in what was received last; -1 when nothing was."""
        with self._changed:
            self._check()
            return -1 if self._newest is None else self._newest[0]

    def barrier(self) -> None:
        """Wait until all that was put is sent, and what was made of it received."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or (self._newest is not None and self._newest[0] >= self._put))
            self._check()

    def stop(self, *, discard: bool = False) -> None:
        """Send what is left, unless it is to be discarded, and give the connections back when all answers are here."""
        with self._changed:
            self._ended = True
            self._discarded = discard
        os.write(self._waker, b"+")
        self._thread.join()
        if self._wake >= 0:
            os.close(self._wake)
            os.close(self._waker)
            self._wake = -1
        if not discard:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # for whoever calls next
            with self._changed:
                self._error = e
                self._changed.notify_all()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        of: dict[Any, Connection] = {}
        for line in self._lines.values():
            for s in line.sockets:
                of[s] = line
                poller.register(s, zmq.POLLIN)
        sent = 0  # steps
        ahead = 0  # groups since parameters were asked for
        pull: _Pull | None = self._ask(0)
        while True:
            if pull is None and ahead >= self.config.min_send_grad_num_before_recv:
                pull, ahead = self._ask(sent), 0
            free = pull is None or (
                self.config.independent_recv_thread and ahead < self.config.min_send_grad_num_before_recv
            )
            groups = self._take() if free else []
            if groups:
                self._send(groups)
                sent, ahead = sent + len(groups), ahead + 1
            with self._changed:
                over = self._ended and not self._queue
                behind = self._newest is None or self._newest[0] < self._put
            # nothing else is to be sent: what is newest is wanted
            if pull is None and not groups and ahead and behind:
                pull, ahead = self._ask(sent), 0
            if self._discarded or (over and pull is None):
                return
            gone = [line for line in self._lines.values() if line.line.gone]  # what they said last may be here
            left = None if pull is None else max(0.0, pull.since + self.deadline - time.monotonic())
            ready = dict(poller.poll(0 if groups or gone else None if left is None else int(left * 1000) + 1))
            if self._wake in ready:
                os.read(self._wake, 4096)
            for line in {of[s] for s in ready if s in of}.union(gone):
                self._hear(line, pull)
            if pull is not None and not pull.missing:
                self._publish(pull)
                pull = None
            elif pull is not None and left == 0.0 and not ready:
                waited = time.monotonic() - pull.since
                late = " and ".join(f"pserver {ep}" for ep in pull.missing)
                raise DeadlineError(f"{self.name} waited {waited:.1f} s for {late}: parameters")

    def _take(self) -> list[Group]:
        """What waits to be sent, as much as may be merged."""
        with self._changed:
            count = min(len(self._queue), self.config.max_merge_var_num)
            groups = [self._queue.popleft() for _ in range(count)]
            self._changed.notify_all()
        return groups

    def _send(self, groups: Sequence[Group]) -> None:
        """Send the gradients of several steps as those of one."""
        parts: dict[Leaf, list[np.ndarray]] = {}
        for group in groups:
            for leaf, x in group:
                parts.setdefault(leaf, []).append(np.asarray(x))
        outbox: dict[str, list[tuple[str, np.ndarray]]] = {}
        for leaf, values in parts.items():
            for endpoint, name, rows in leaf.blocks(merged(values, leaf.merge)):
                outbox.setdefault(endpoint, []).append((name, rows))
        for endpoint, blocks in outbox.items():
            line = self._lines[endpoint].line
            line.send_blocks(blocks, steps=len(groups))
            line.step += 1

    def _ask(self, steps: int) -> _Pull:
        """Ask for all parameters."""
        whole = {key: self._pool.take(key, leaf.shape, leaf.dtype) for key, leaf in self._leaves.items()}
        wanted: dict[str, dict[str, np.ndarray]] = {}
        for key, leaf in self._leaves.items():
            for endpoint, name, rows in leaf.blocks(whole[key]):
                wanted.setdefault(endpoint, {})[name] = rows
        for endpoint, blocks in wanted.items():
            line = self._lines[endpoint].line
            table = [[n, list(b.shape), b.dtype.name] for n, b in blocks.items()]
            line.tell("recv", step=line.step, **({} if endpoint in self._asked else {"blocks": table}))
            self._asked.add(endpoint)
        told = "pserver {} sent {}, which was not asked for".format
        inboxes = {ep: Inbox(blocks, functools.partial(told, ep)) for ep, blocks in wanted.items()}
        return _Pull(time.monotonic(), steps, whole, inboxes, {ep: self._lines[ep].line.step for ep in wanted})

    def _hear(self, connection: Connection, pull: _Pull | None) -> None:
        """Take what a server says, which is parameters that were asked for, or an error."""
        line = connection.line
        message = connection.glance("parameters" if pull is not None else "gradients to be made")
        if message is None:
            return
        if pull is None or line.endpoint not in pull.missing:
            raise PeerError(f"pserver {line.endpoint} sent {self.name} a `{message.op}` that it did not ask for")
        if message.op != "blocks" or message["step"] != pull.at[line.endpoint]:
            raise PeerError(f"pserver {line.endpoint} answered `recv` of {self.name} with `{message.op}`")
        pull.missing[line.endpoint].take(message)
        if not pull.missing[line.endpoint].missing():
            del pull.missing[line.endpoint]

    def _publish(self, pull: _Pull) -> None:
        """What has come is the newest."""
        with self._changed:
            self._newest = (pull.steps, pull.whole)
            self._changed.notify_all()


def merged(parts: Sequence[np.ndarray], how: str) -> np.ndarray:
    """The sum, the mean or the newest of what several steps made; the thing itself of one."""
    if how == "newest":
        return parts[-1]
    whole = parts[0]
    for x in parts[1:]:
        # of 0-d arrays the sum is a scalar, which nothing can be written into
        whole = np.asarray(whole + x) if whole is parts[0] else np.add(whole, x, out=whole)
    if how == "mean" and len(parts) > 1:
        np.multiply(whole, np.asarray(1 / len(parts), whole.dtype), out=whole)
    return whole
