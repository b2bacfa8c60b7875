"""What sends and receives for a trainer beside its steps: a thread around
`dtrans.protocol.traffic`.

A step puts its gradients into a queue (`put`) and takes the parameters that were received last
(`newest`); neither waits, unless the queue is full, or nothing was received yet. The thread owns
the connections while it runs.

`barrier` waits until all that was put is in what was received; with it at the end of every step, a
trainer is as one without a communicator. `look_up` waits for rows of tables.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import zmq

from dtrans.errors import DtransError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.traffic import Group, Leaf, Traffic
from dtrans.run.parameter_server.client import Connection


T = TypeVar("T")


class Communicator:
    """Sends gradients and receives parameters in a thread of its own.

    Args:
      lines: gives the connection to an endpoint, which is the communicator's until `stop`.
      leaves: what is received, by a key of the caller's.
      config: how long the queue is, and so on.
      deadline: seconds that parameters may be on their way.
      name: of the trainer.
      endpoints: servers that have rows of tables.
      kept: tables of which the trainer keeps rows: what it receives of these is which of them
        others have changed.

    Every method raises what has ended the thread: PeerError, DeadlineError, WireError, or what JAX
    raised.
    """

    def __init__(
        self,
        lines: Callable[[str], Connection],
        leaves: Mapping[str, Leaf],
        config: CommunicatorConfig,
        *,
        deadline: float,
        name: str,
        endpoints: Collection[str] = (),
        kept: Mapping[str, Leaf] = {},
    ) -> None:
        self.config = config
        self.name = name
        everywhere = (
            *(ep for leaf in (*leaves.values(), *kept.values()) for ep in leaf.endpoints),
            *endpoints,
        )
        self._lines = {ep: lines(ep) for ep in dict.fromkeys(everywhere)}
        self._changed = threading.Condition()
        self._queue: collections.deque[Group] = collections.deque()
        self._put = 0  # steps put so far
        self._wanted: tuple[Sequence[WantedRows], bool] | None = (
            None  # rows that are to be asked for
        )
        self._looks_up = False  # whether somebody waits for rows
        self._call: tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None = None
        self._newest: tuple[int, dict[str, Any]] | None = (
            None  # how many steps are in it; and the leaves
        )
        self._ended = False
        self._discarded = False
        self._error: BaseException | None = None
        self._traffic = Traffic(
            {ep: connection.line for ep, connection in self._lines.items()},
            dict(leaves),
            config,
            deadline=deadline,
            name=name,
            room=BufferPool().take,
            kept=dict(kept),
        )
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(
            target=self._run, name=f"dtrans communicator of {name}", daemon=True
        )
        self._thread.start()

    # -- what steps call -------------------------------------------------------------------------

    def put(self, group: Group) -> None:
        """Let what a step has made be sent. Waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or len(self._queue) < self.config.send_queue_size
            )
            self._check()
            self._queue.append(group)
            self._put += 1
        os.write(self._waker, b"+")

    def newest(self) -> dict[str, Any]:
        """The parameters that were received last, as memory that is not written again while anybody
        refers to it.

        Waits for the first. Of tables of which the trainer keeps rows, a `RowGradient` has those
        that others have changed; who keeps rows has to take each answer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._newest is not None)
            self._check()
            assert self._newest is not None
            return self._newest[1]

    def received(self) -> int:
        """How many of the steps that were put are in what was received last; -1 when nothing
        was."""
        with self._changed:
            self._check()
            return -1 if self._newest is None else self._newest[0]

    def barrier(self) -> None:
        """Wait until all that was put is sent, and what was made of it received."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (self._newest is not None and self._newest[0] >= self._put)
            )
            self._check()

    def look_up(self, wanted: Sequence[WantedRows], *, train: bool) -> None:
        """Receive rows of tables as they are now, each into its memory. With `train` a step is made
        of them."""
        with self._changed:
            self._check()
            self._wanted, self._looks_up = (wanted, train), True
        os.write(self._waker, b"+")
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._looks_up)
            self._check()

    def between(self, call: Callable[[], T]) -> T:
        """Let something else use the connections, when all that was put is received. Raises what it
        raises."""
        made: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._changed:
            self._check()
            self._call = call, made
        os.write(self._waker, b"+")
        with self._changed:
            self._changed.wait_for(lambda: self._error or made.done())
            self._check()
        return made.result()

    def stop(self, *, discard: bool = False) -> None:
        """Send what is left, unless it is to be discarded, and give the connections back when all
        answers are here."""
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
        traffic = self._traffic
        traffic.ask(time.monotonic())
        while True:
            groups = self._take()
            if groups:
                self._send(groups)
            self._ask_for_rows()
            with self._changed:
                over = self._ended and not self._queue
                behind = self._newest is None or self._newest[0] < self._put
            if behind and not groups:
                traffic.ask_for_newest(time.monotonic())
            if not behind and not groups:
                self._make_call()
            if self._discarded or (over and not traffic.pulling and not traffic.looking_up):
                return
            gone = [
                line for line in self._lines.values() if line.line.gone
            ]  # what they said last may be here
            lines = self._lines.values()
            until = min(
                [
                    t
                    for t in (traffic.wakes, *(x.line.retries_until for x in lines))
                    if t is not None
                ]
            )
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            ready = dict(
                poller.poll(0 if groups or gone else None if left is None else int(left * 1000) + 1)
            )
            if self._wake in ready:
                os.read(self._wake, 4096)
            for line in {of[s] for s in ready if s in of}.union(gone):
                self._hear(line)
            self._rows_are_here()
            received = traffic.whole()
            if received is not None:
                self._publish(received)
            elif not ready and left == 0.0:
                traffic.look(time.monotonic())
                for line in self._lines.values():
                    line.line.give_up(time.monotonic())

    def _take(self) -> list[Group]:
        """What waits to be sent, as much as may be merged."""
        with self._changed:
            count = self._traffic.may_take(len(self._queue), time.monotonic())
            groups = [self._queue.popleft() for _ in range(count)]
            self._changed.notify_all()
        return groups

    def _send(self, groups: Sequence[Group]) -> None:
        self._traffic.send(groups)

    def _make_call(self) -> None:
        """Let something else use the connections, where nothing is on its way."""
        with self._changed:
            call = None if self._traffic.pulling or self._traffic.looking_up else self._call
        if call is None:
            return
        run, made = call
        try:
            found = run()
        except DtransError as e:  # the communicator goes on; who has called has to know
            made.set_exception(e)
        else:
            made.set_result(found)
        with self._changed:
            self._call = None
            self._changed.notify_all()

    def _ask_for_rows(self) -> None:
        with self._changed:
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._traffic.look_up(wanted[0], time.monotonic(), train=wanted[1])

    def _rows_are_here(self) -> None:
        """Let whoever waits for rows go on, when all have come."""
        with self._changed:
            if self._looks_up and self._wanted is None and not self._traffic.looking_up:
                self._looks_up = False
                self._changed.notify_all()

    def _hear(self, connection: Connection) -> None:
        """Take what a server says, which was asked for, or is an error."""
        message = connection.glance(self._traffic.waits_for)
        if message is not None:
            self._traffic.heard(connection.line.endpoint, message)

    def _publish(self, received: tuple[int, dict[str, Any]]) -> None:
        """What has come is the newest."""
        with self._changed:
            self._newest = received
            self._changed.notify_all()
