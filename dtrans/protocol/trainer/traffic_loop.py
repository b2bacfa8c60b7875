"""The loop of a communicator: a queue of gradients around `Traffic`, one turn at a time.

Steps put gradients into the queue, ask for rows and take the parameters that came last. They may do
so in another thread than that of the turns. Attributes that both use are assigned as a whole.
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
    """Something that steps wait for, and that the loop does.

    Attributes:
      wanted: rows of tables, and if a step is made of them.
      begin: begins an operation that uses the connections between the loop's own messages.
      done: it is there, or has failed.
      result, error: of the operation.
    """

    wanted: tuple[Sequence[WantedRows], bool] | None = None
    begin: Callable[[], Operation[Any]] | None = None
    done: bool = False
    result: Any = None
    error: DtransError | None = None


class TrafficLoop:
    """The loop of one communicator.

    Args:
      links: of the trainer, by endpoint.
      traffic: with some of these servers.
      config: length of the queue, and the other options.
      changed: is called after events for which steps may have waited.

    Attributes:
      newest: the parameters that came last, behind the number of steps that are in them.
      done: it has ended, with all answers that were to come.
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
        self._queue: collections.deque[Group] = collections.deque()
        self._put = 0  # steps put so far
        self._request: TrafficRequest | None = None  # that has not begun
        self._lookup: TrafficRequest | None = None  # whose rows are on their way
        self._operation: tuple[TrafficRequest, OperationWait] | None = None
        self._ended = self._discarded = False
        traffic.ask(transport.now())

    # -- what steps call -------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Return True if the queue is not full."""
        return len(self._queue) < self._config.send_queue_size

    @property
    def is_settled(self) -> bool:
        """Return True if the newest parameters have all that was put."""
        return self.newest is not None and self.newest[0] >= self._put

    @property
    def received(self) -> int:
        """Return the number of steps in the newest parameters; -1 if none have come."""
        return -1 if self.newest is None else self.newest[0]

    def put(self, group: Group) -> None:
        """Let the gradients of a step be sent."""
        self._queue.append(group)
        self._put += 1

    def look_up(self, wanted: Sequence[WantedRows], *, train: bool) -> TrafficRequest:
        """Receive rows of tables as they are now. With `train` a step is made of them."""
        return self._ask(TrafficRequest(wanted=(wanted, train)))

    def between(self, begin: Callable[[], Operation[Any]]) -> TrafficRequest:
        """Run an operation when the newest parameters have all that was put."""
        return self._ask(TrafficRequest(begin=begin))

    def _ask(self, request: TrafficRequest) -> TrafficRequest:
        self._request = request
        return request

    def end(self, *, discard: bool = False) -> None:
        """Send what is left, unless it is to be discarded, and be `done` with the last answer."""
        self._discarded = discard
        self._ended = True

    # -- turns -----------------------------------------------------------------------------------

    @property
    def wakes(self) -> float:
        """Return the time of the next turn, if nothing comes before."""
        if self._operation is not None:
            return self._operation[1].wakes
        # the last words of a server that has gone may be here
        lines = [x.line for x in self._links.values()]
        retries = min(-math.inf if x.gone else x.retries_until for x in lines)
        return min(retries, math.inf if self._traffic.wakes is None else self._traffic.wakes)

    def turn(self) -> bool:
        """Send what may be sent, then wait until something comes or a time has come. Return True if
        there may be more to do at once.

        Raises:
          DeadlineError: an answer is late. PeerError: a server refuses, or has gone. WireError: not
            a message of this protocol.
        """
        if self._operation is not None:
            return self._turn_of_operation(*self._operation)
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
        """Send what may be sent, and ask for what is wanted. Return True if gradients were sent."""
        traffic, now = self._traffic, self._transport.now()
        groups = [self._queue.popleft() for _ in range(traffic.may_take(len(self._queue), now))]
        if groups:
            self._changed()
            traffic.send(groups)
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
        except DtransError as e:  # the loop continues; the caller gets the error
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
