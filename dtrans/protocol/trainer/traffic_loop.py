"""Loop of a communicator, which sends the gradients that training steps put into its queue.

Steps put gradients into the queue, request rows, and read the newest parameters. Steps and the loop
may run in different threads. So a thread changes a shared attribute only by assigning a complete
new value.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrans.errors import DtransError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.server_link import OperationWait, ServerLink
from dtrans.protocol.trainer.traffic import Group, Traffic
from dtrans.protocol.transport import Transport


@dataclasses.dataclass(eq=False)
class TrafficRequest:
    """Request of a training step to the communicator's thread, with its result.

    The request is either a lookup of table rows, or an operation such as a checkpoint.

    Attributes:
      wanted: only for a lookup: the rows of each block, and True if gradients of the rows follow.
      begin: only for an operation: the function that starts it.
      done: True if the lookup or operation is complete or has failed.
      result: result of the operation.
      error: error of the operation; None if it has not failed.
    """

    wanted: tuple[Sequence[WantedRows], bool] | None = None
    begin: Callable[[], Operation[Any]] | None = None
    done: bool = False
    result: Any = None
    error: DtransError | None = None


class TrafficLoop:
    """Loop of a communicator's thread: sends gradients from a queue, and receives parameters.

    Training steps run in another thread.

    Args:
      links: maps the endpoint of each server to the trainer's link.
      traffic: state of the communicator's messages.
      config: options of the communicator, such as the length of its queue.
      changed: function that the loop calls after each event that may end the wait of a step.

    Attributes:
      newest: pair: the number of this trainer's steps that the newest parameters include, and these
        parameters by name. None before the first parameters arrive.
      done: True if the loop has ended and all answers have arrived.
    """

    def __init__(
        self,
        transport: Transport,
        links: Mapping[str, ServerLink],
        traffic: Traffic,
        config: CommunicatorConfig,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self.newest: tuple[int, dict[str, Any]] | None = None
        self.done = False
        self._transport, self._links, self._traffic = transport, links, traffic
        self._config, self._changed = config, changed
        # each group, with the number of its steps
        self._queue: collections.deque[tuple[Group, int]] = collections.deque()
        self._put = 0  # number of steps whose gradients were put into the queue
        self._request: TrafficRequest | None = None  # request that the loop has not started yet
        self._lookup: TrafficRequest | None = None  # lookup that waits for its rows
        self._operation: tuple[TrafficRequest, OperationWait] | None = None
        self._ended = self._discarded = False
        traffic.ask(transport.now())

    # -- methods for steps -----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """True if the queue is not full."""
        return len(self._queue) < self._config.send_queue_size

    @property
    def is_settled(self) -> bool:
        """True if the received parameters include the gradients of all steps so far."""
        return self.received >= self._put

    @property
    def received(self) -> int:
        """Number of this trainer's steps in the newest parameters; -1 before any arrive."""
        return -1 if self.newest is None else self.newest[0]

    def put(self, group: Group, steps: int = 1) -> None:
        """Queue the gradients of one step for the servers; with GEO-SGD, changes of parameters.

        Args:
          group: the gradients or changes.
          steps: number of steps that `group` contains.
        """
        self._queue.append((group, steps))
        self._put += 1

    def look_up(self, wanted: Sequence[WantedRows], *, train: bool) -> TrafficRequest:
        """Request the current values of table rows.

        Args:
          wanted: the rows of each block, with memory for their values.
          train: True if gradients of these rows follow.
        """
        return self._ask(TrafficRequest(wanted=(wanted, train)))

    def between(self, begin: Callable[[], Operation[Any]]) -> TrafficRequest:
        """Request an operation, such as a checkpoint, that must see all gradients so far.

        The loop starts it when the received parameters include these gradients (`is_settled`).

        Args:
          begin: function that sends the operation's requests.
        """
        return self._ask(TrafficRequest(begin=begin))

    def _ask(self, request: TrafficRequest) -> TrafficRequest:
        self._request = request
        return request

    def end(self, *, discard: bool = False) -> None:
        """End the loop after it has sent the queued gradients and received the last answer.

        Args:
          discard: True to end at once: the queued gradients are not sent.
        """
        self._discarded = discard
        self._ended = True

    # -- turns -----------------------------------------------------------------------------------

    @property
    def wakes(self) -> float:
        """Time at which `turn` must be called, even without an event."""
        if self._operation is not None:
            return self._operation[1].wakes
        times = [math.inf if self._traffic.wakes is None else self._traffic.wakes]
        for link in self._links.values():
            if link.line.gone:
                # A server has ended: poll once without waiting, to read its last messages.
                return -math.inf
            times.append(link.line.retries_until)
        return min(times)

    def turn(self) -> bool:
        """Send gradients and requests, then wait for events and handle them.

        Returns:
          True if the next call may have work to do at once.

        Raises:
          DeadlineError: an answer is late.
          PeerError: a server has refused the trainer, or has ended.
          WireError: a message is malformed.
        """
        if self._operation is not None:
            return self._turn_of_operation(*self._operation)
        for link in self._links.values():
            for answer in link.early_answers():
                self._take(link, answer)
        has_sent = self._act()
        if self.done or self._operation is not None:
            return not self.done
        transport = self._transport
        gone = [x for x in self._links.values() if x.line.gone]
        until = transport.now() if has_sent else self.wakes
        heard = set()
        for event in transport.poll(until):
            heard.add(event.source)
            for link in self._links.values():
                if link.link is event.source:
                    self._take(link, link.take(event))
        for link in gone:
            if link.link not in heard:
                raise link.line.went_away(self._traffic.waits_for)
        if not heard:
            self._look()
        return has_sent or bool(heard)

    def _act(self) -> bool:
        """Send gradients and start requests. Return True if gradients were sent."""
        traffic, now = self._traffic, self._transport.now()
        groups = [self._queue.popleft() for _ in range(traffic.may_take(len(self._queue), now))]
        if groups:
            self._changed()
            parts, steps = zip(*groups, strict=True)
            traffic.send(parts, sum(steps))
        request = self._request
        if request is not None and request.wanted is not None:
            self._request, self._lookup = None, request
            traffic.look_up(request.wanted[0], now, train=request.wanted[1])
            self._note_rows()
        is_over = self._ended and not self._queue
        if not groups and not self.is_settled:
            traffic.ask_for_newest(now)
        is_quiet = not traffic.pulling and not traffic.looking_up
        self.done = self._discarded or (is_over and is_quiet)
        if request is not None and request.begin is not None and is_quiet and self.is_settled:
            self._request = None
            self._begin(request, request.begin)
        return bool(groups)

    def _take(self, link: ServerLink, message: Any) -> None:
        if message is None:
            return
        self._traffic.heard(link.line.endpoint, message)
        self._note_rows()
        newest = self._traffic.take_newest()
        if newest is not None:
            self.newest = newest
            self._changed()

    def _note_rows(self) -> None:
        if self._lookup is not None and not self._traffic.looking_up:
            self._lookup.done, self._lookup = True, None
            self._changed()

    def _look(self) -> None:
        now = self._transport.now()
        self._traffic.look(now)
        for link in self._links.values():
            link.line.give_up(now)

    def _begin(self, request: TrafficRequest, begin: Callable[[], Operation[Any]]) -> None:
        try:
            self._operation = request, OperationWait(self._transport, self._links, begin())
        # the step that made the request raises the error; the loop continues
        except DtransError as e:
            self._end_request(request, None, e)

    def _turn_of_operation(self, request: TrafficRequest, wait: OperationWait) -> bool:
        any_came, error = False, None
        try:
            any_came = not wait.done and wait.turn()
        except DtransError as e:
            error = e
        if wait.done or error is not None:
            self._operation = None
            self._end_request(request, None if error else wait.operation.result, error)
            return True
        return any_came

    def _end_request(self, request: TrafficRequest, result: Any, error: DtransError | None) -> None:
        request.result, request.error, request.done = result, error, True
        self._changed()
