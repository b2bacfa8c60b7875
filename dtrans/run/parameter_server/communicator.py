"""Communicator: a thread that sends gradients and receives parameters while a trainer's steps run.

A step puts its gradients into a queue (`put`), and reads the newest received parameters (`newest`).
`put` waits only while the queue is full, and `newest` waits only for the first parameters. The
thread runs `dtrans.protocol.trainer.traffic_loop`. While the thread runs, only it uses the
connections.

`barrier` waits until the received parameters include all queued gradients. A trainer that calls
`barrier` after every step gets the same results as without a communicator. `look_up` waits for
table rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from dtrans.errors import LostPeerError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.server_link import ServerLink
from dtrans.protocol.trainer.traffic import Group, Leaf, Traffic
from dtrans.protocol.trainer.traffic_loop import TrafficLoop, TrafficRequest
from dtrans.protocol.transport import Transport


T = TypeVar("T")

# Function that connects to servers. It returns the transport, and each server's link by endpoint.
Connect = Callable[[Collection[str]], tuple[Transport, Mapping[str, ServerLink]]]
NoteLost = Callable[[LostPeerError], BaseException]
# Function of the number of the trainer's steps that each server has received, by endpoint. It
# returns the numbers of steps that the servers must count.
Counts = Callable[[Mapping[str, int]], Mapping[str, int]]


class Communicator:
    """Thread that sends a trainer's gradients and receives parameters, while steps run.

    Args:
      connect: function that connects to servers. Only the communicator uses the connections, until
        `stop`.
      lost: reports a lost server, and returns the exception to raise.
      leaves: the servers and names of the parameters to receive. The caller chooses the keys of
        this dict, and `newest` returns a dict with the same keys.
      config: length of the queue, and other options.
      deadline: seconds that a server may take to answer.
      name: name of the trainer for errors, such as "trainer 0".
      endpoints: endpoints of the servers that store embedding tables.
      local_tables: GEO-SGD tables with rows that the trainer stores. Of these rows, the
        communicator receives only rows that other trainers have changed.
      counts: function that is called after connecting. It gets the number of this trainer's steps
        that each server has received, by endpoint. It returns the numbers that servers must record
        instead, as for `Traffic`.

    Attributes:
      local_tables: the argument `local_tables`.
      received_before: number of this trainer's steps that each server had received, by endpoint.

    If an error has ended the thread, every method raises this error: PeerError, DeadlineError,
    WireError, or an error of JAX.
    """

    def __init__(
        self,
        connect: Connect,
        lost: NoteLost,
        leaves: Mapping[str, Leaf],
        config: CommunicatorConfig,
        *,
        deadline: float,
        name: str,
        endpoints: Collection[str] = (),
        local_tables: Mapping[str, Leaf] = {},
        counts: Counts = lambda received: {},
    ) -> None:
        self.config, self.local_tables = config, local_tables
        self.name, self._lost = name, lost
        servers = dict.fromkeys(endpoints)
        for leaf in (*leaves.values(), *local_tables.values()):
            servers |= dict.fromkeys(leaf.endpoints)
        self._transport, links = connect(servers)
        self.received_before = {ep: links[ep].line.count for ep in servers}
        traffic = Traffic(
            {ep: links[ep].line for ep in servers},
            dict(leaves),
            config,
            deadline=deadline,
            name=name,
            room=BufferPool().take,
            cached=dict(local_tables),
            counts=counts(self.received_before),
        )
        self._changed = threading.Condition()
        self._loop = TrafficLoop(self._transport, links, traffic, config, self._notify)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"dtrans communicator of {name}", daemon=True
        )
        self._thread.start()

    # -- calls of steps --------------------------------------------------------------------------

    def put(self, group: Group, steps: int = 1) -> None:
        """Put the gradients of a step into the queue; wait while the queue is full.

        Args:
          group: the gradients; with GEO-SGD, changes of parameters.
          steps: number of steps that `group` contains.
        """
        self._wait_for(lambda: self._loop.has_room)
        self._loop.put(group, steps)
        self._transport.wake()

    def newest(self) -> dict[str, Any]:
        """Return the newest received parameters, by the keys of `leaves`; wait for the first ones.

        If no reference to an old result exists, its memory is used again. A GEO-SGD trainer stores
        rows of tables. For such a table, an answer has only the rows that other trainers have
        changed since the previous answer. So the caller must read every answer.
        """
        self._wait_for(lambda: self._loop.newest is not None)
        assert self._loop.newest is not None
        return self._loop.newest[1]

    def received(self) -> int:
        """Return the number of queued steps in the newest parameters; -1 before any arrive."""
        self._check()
        return self._loop.received

    def barrier(self) -> None:
        """Wait until the newest parameters include all queued steps."""
        self._wait_for(lambda: self._loop.is_settled)

    def look_up(self, wanted: Sequence[WantedRows], *, train: bool) -> None:
        """Receive current rows of tables.

        Args:
          wanted: the rows of each block, with memory for the received values.
          train: True if this trainer will send gradients of these rows.
        """
        self._check()
        self._finish(self._loop.look_up(wanted, train=train))

    def between(self, begin: Callable[[], Operation[T]]) -> T:
        """Run an operation, such as a checkpoint, after servers have answered all queued steps.

        If the operation fails, this method raises its error, and the communicator continues.

        Args:
          begin: function that starts the operation.

        Returns:
          The result of the operation.
        """
        self._check()
        request = self._finish(self._loop.between(begin))
        if isinstance(request.error, LostPeerError):
            raise self._lost(request.error)
        if request.error is not None:
            raise request.error
        result: T = request.result
        return result

    def stop(self, *, discard: bool = False) -> None:
        """Send all queued gradients, wait for the answers, and end the thread.

        Args:
          discard: True to drop the queued gradients.
        """
        self._loop.end(discard=discard)
        self._transport.wake()
        self._thread.join()
        if not discard:
            self._check()

    def _finish(self, request: TrafficRequest) -> TrafficRequest:
        """Wait until the thread has handled a request; return the request."""
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
        except BaseException as e:  # The trainer's next call raises the error.
            self._error = self._lost(e) if isinstance(e, LostPeerError) else e
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
