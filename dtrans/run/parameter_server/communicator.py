"""The communicator: a thread that sends and receives in the background of a trainer's steps.

A step puts its gradients into a queue (`put`) and reads the newest received parameters (`newest`).
`put` waits only while the queue is full, `newest` only for the first parameters. The thread drives
`dtrans.protocol.trainer.traffic_loop`. It owns the transport while it runs.

`barrier` waits until the received parameters contain all queued gradients. A trainer that calls it
after every step gets the same results as without a communicator. `look_up` waits for rows of
tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from dtrans.ops import CommunicatorConfig
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.server_link import ServerLink
from dtrans.protocol.trainer.traffic import Group, Leaf, Traffic
from dtrans.protocol.trainer.traffic_loop import TrafficLoop, TrafficRequest
from dtrans.protocol.transport import Transport


T = TypeVar("T")

# connects to servers; returns the transport, and the links to all servers by endpoint
Connect = Callable[[Collection[str]], tuple[Transport, Mapping[str, ServerLink]]]


class Communicator:
    """Sender of gradients and receiver of parameters, in its own thread.

    Args:
      connect: connects to servers. The communicator owns the transport until `stop`.
      leaves: the parameters to receive, by keys of the caller.
      config: length of the queue, and other options.
      deadline: seconds that a server may take to answer.
      name: the trainer, for errors.
      endpoints: servers that store rows of tables.
      local_tables: tables with local rows on the trainer. The communicator receives only local rows
        that other trainers have changed.

    Every method raises the error that ended the thread: PeerError, DeadlineError, WireError, or an
    error of JAX.
    """

    def __init__(
        self,
        connect: Connect,
        leaves: Mapping[str, Leaf],
        config: CommunicatorConfig,
        *,
        deadline: float,
        name: str,
        endpoints: Collection[str] = (),
        local_tables: Mapping[str, Leaf] = {},
    ) -> None:
        self.config = config
        self.name = name
        servers = dict.fromkeys(endpoints)
        for leaf in (*leaves.values(), *local_tables.values()):
            servers |= dict.fromkeys(leaf.endpoints)
        self._transport, links = connect(servers)
        traffic = Traffic(
            {ep: links[ep].line for ep in servers},
            dict(leaves),
            config,
            deadline=deadline,
            name=name,
            room=BufferPool().take,
            cached=dict(local_tables),
        )
        self._changed = threading.Condition()
        self._loop = TrafficLoop(self._transport, links, traffic, config, self._notify)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"dtrans communicator of {name}", daemon=True
        )
        self._thread.start()

    # -- calls of steps --------------------------------------------------------------------------

    def put(self, group: Group) -> None:
        """Queue the gradients of a step. Waits while the queue is full."""
        self._wait_for(lambda: self._loop.has_room)
        self._loop.put(group)
        self._transport.wake()

    def newest(self) -> dict[str, Any]:
        """Return the newest received parameters, by the keys of `leaves`; wait for the first.

        Their memory is reused when no reference to it is left. The value of a local table is a
        `RowGradient` with the rows that others have changed since the last answer. So the caller
        must read every answer.
        """
        self._wait_for(lambda: self._loop.newest is not None)
        assert self._loop.newest is not None
        return self._loop.newest[1]

    def received(self) -> int:
        """Return how many queued steps the newest parameters contain; -1 before any answer."""
        self._check()
        return self._loop.received

    def barrier(self) -> None:
        """Wait until the newest parameters contain all queued steps."""
        self._wait_for(lambda: self._loop.is_settled)

    def look_up(self, wanted: Sequence[WantedRows], *, train: bool) -> None:
        """Receive the current rows of tables.

        Args:
          wanted: the rows of each block, with memory to write them to.
          train: True if this trainer will send gradients of these rows.
        """
        self._check()
        self._finish(self._loop.look_up(wanted, train=train))

    def between(self, begin: Callable[[], Operation[T]]) -> T:
        """Run an operation when all queued steps are answered; return its result.

        An error of the operation is raised here. The communicator continues.
        """
        self._check()
        request = self._finish(self._loop.between(begin))
        if request.error is not None:
            raise request.error
        result: T = request.result
        return result

    def stop(self, *, discard: bool = False) -> None:
        """Flush the queue, wait for all answers, and stop using the transport.

        Args:
          discard: drop queued gradients instead of sending them.
        """
        self._loop.end(discard=discard)
        self._transport.wake()
        self._thread.join()
        if not discard:
            self._check()

    def _finish(self, request: TrafficRequest) -> TrafficRequest:
        """Wait until a request is done."""
        self._transport.wake()
        self._wait_for(lambda: request.done)
        return request

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or condition())
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._loop.done:
                self._loop.turn()
        except BaseException as e:  # the trainer's next call raises it
            self._error = e
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
