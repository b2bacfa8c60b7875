"""The thread of a communicator, which sends and receives for a trainer beside its steps.

A step puts its gradients into a queue (`put`) and takes the parameters that were received last
(`newest`); neither waits, unless the queue is full, or nothing was received yet. The thread makes
the turns of `dtrans.protocol.traffic_loop`; the transport is its own while it runs.

`barrier` waits until all that was put is in what was received; with it at the end of every step, a
trainer is as one without a communicator. `look_up` waits for rows of tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from dtrans.ops import CommunicatorConfig
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.operation import Operation
from dtrans.protocol.server_link import ServerLink
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.traffic import Group, Leaf, Traffic
from dtrans.protocol.traffic_loop import TrafficLoop, TrafficRequest
from dtrans.protocol.transport import Transport


T = TypeVar("T")

# connects to servers; returns the transport, and the links to all servers by endpoint
Connect = Callable[[Collection[str]], tuple[Transport, Mapping[str, ServerLink]]]


class Communicator:
    """Sends gradients and receives parameters in a thread of its own.

    Args:
      connect: to servers; the transport is the communicator's until `stop`.
      leaves: parameters that are received, by a key of the caller's.
      config: length of the queue, and so on.
      deadline: seconds that parameters may be on their way.
      name: of the trainer.
      endpoints: servers that have rows of tables.
      kept: tables of which the trainer keeps rows; only rows that others have changed are received.

    Every method raises the error that has ended the thread: PeerError, DeadlineError, WireError, or
    an error of JAX.
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
        kept: Mapping[str, Leaf] = {},
    ) -> None:
        self.config = config
        self.name = name
        everywhere = [ep for leaf in (*leaves.values(), *kept.values()) for ep in leaf.endpoints]
        servers = dict.fromkeys((*everywhere, *endpoints))
        self._transport, links = connect(servers)
        traffic = Traffic(
            {ep: links[ep].line for ep in servers},
            dict(leaves),
            config,
            deadline=deadline,
            name=name,
            room=BufferPool().take,
            kept=dict(kept),
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
        """Let the gradients of a step be sent. Waits while the queue is full."""
        self._wait_for(lambda: self._loop.has_room)
        self._loop.put(group)
        self._transport.wake()

    def newest(self) -> dict[str, Any]:
        """Return the parameters that were received last, in memory that is not written again while
        anybody refers to it.

        Waits for the first. Of tables of which the trainer keeps rows, a `RowGradient` has those
        that others have changed; who keeps rows has to take each answer.
        """
        self._wait_for(lambda: self._loop.newest is not None)
        assert self._loop.newest is not None
        return self._loop.newest[1]

    def received(self) -> int:
        """Return how many of the steps that were put are in the parameters that were received last;
        -1 if there are none."""
        self._check()
        return self._loop.received

    def barrier(self) -> None:
        """Wait until all that was put is in the parameters that were received."""
        self._wait_for(lambda: self._loop.is_settled)

    def look_up(self, wanted: Sequence[WantedRows], *, train: bool) -> None:
        """Receive rows of tables as they are now, each into its memory. With `train` a step is made
        of them."""
        self._check()
        self._answered(self._loop.look_up(wanted, train=train))

    def between(self, begin: Callable[[], Operation[T]]) -> T:
        """Run an operation when all that was put is received, and return its result. Raises what it
        raises; the communicator goes on."""
        self._check()
        request = self._answered(self._loop.between(begin))
        if request.error is not None:
            raise request.error
        result: T = request.result
        return result

    def stop(self, *, discard: bool = False) -> None:
        """Send what is left, unless it is to be discarded, and give the transport back when all
        answers are here."""
        self._loop.end(discard=discard)
        self._transport.wake()
        self._thread.join()
        if not discard:
            self._check()

    def _answered(self, request: TrafficRequest) -> TrafficRequest:
        self._transport.wake()
        self._wait_for(lambda: request.done)
        return request

    def _wait_for(self, there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or there())
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._loop.done:
                self._loop.turn()
        except BaseException as e:  # for whoever calls next
            self._error = e
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
