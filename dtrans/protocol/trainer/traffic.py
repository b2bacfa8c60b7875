"""Messages of a communicator, which sends and receives while the trainer computes.

The communicator takes gradients from its queue, merges the gradients of several steps, and sends
them. After a number of sends it requests all parameters. While it waits for the parameters, it
continues to send gradients, up to the limits in `CommunicatorConfig`.

The answer to a request for parameters also acknowledges all messages that were sent before the
request. So the number of unacknowledged messages is bounded. If the servers are slower than the
steps, the queue fills, the communicator merges more gradients, and finally the steps wait.

The communicator requests table rows at once, before it sends the gradients in the queue. A merged
gradient of a table contains the rows of all its gradients. The row ids of all tables are sent
first, in one message. A trainer of GEO-SGD stores rows, and requests other trainers' changes of
these rows together with the parameters.

Source: `AsyncCommunicator` and `HalfAsyncCommunicator` in
  paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import DeadlineError, PeerError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.changed_rows import CachedBlock, ChangedInbox
from dtrans.protocol.tables.table_rows import BlockRowSet, WantedRows, by_server, merged_rows
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.trainer")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Array that is divided among servers: a parameter, a gradient or a table.

    Each server has some of its rows, called a block.

    Attributes:
      endpoints: endpoint of each block's server.
      names: name of each block.
      sections: number of rows of each block; 1 for a scalar.
      shape: shape of the full array.
      dtype: dtype of the array.
      merge: operation that merges gradients of several steps: "sum", "mean" or "newest".
      spans: if the array is a table, the set of its rows that each block contains.
    """

    endpoints: tuple[str, ...]
    names: tuple[str, ...]
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    merge: str = "sum"
    spans: tuple[BlockRowSet, ...] = ()

    def blocks(self, array: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
        """Split an array into the rows of each server.

        Returns:
          The server's endpoint, the block's name and the rows of each block.
        """
        if len(self.names) == 1:
            return [(self.endpoints[0], self.names[0], array)]
        return list(zip(self.endpoints, self.names, rows_of(array, self.sections), strict=True))

    def at(self, endpoints: Collection[str]) -> Leaf:
        """Restrict this table to some servers, for messages that only these servers need."""
        blocks = zip(self.endpoints, self.names, self.spans, strict=True)
        here = [block for block in blocks if block[0] in endpoints]
        servers, names, spans = zip(*here, strict=True) if here else ((), (), ())
        return dataclasses.replace(self, endpoints=servers, names=names, spans=spans)


def rows_of(array: np.ndarray, sections: Sequence[int]) -> list[np.ndarray]:
    """Split an array along dimension 0 into views with these numbers of rows."""
    return [array[end - n : end] for n, end in zip(sections, np.cumsum(sections), strict=True)]


# The gradients of one step: each leaf with its gradient, which is a `RowGradient` for a table.
Group = Sequence[tuple[Leaf, Any]]


@dataclasses.dataclass
class _Pull:
    """Request to all servers for the current parameters, until all answers are complete.

    Attributes:
      since: time of the request.
      steps: number of steps with gradients that were sent before the request.
      arrays: maps the key of each leaf to the array that receives the leaf.
      missing: inbox of each incomplete answer, by the server's endpoint.
      at: step number that the request to each server contains, by endpoint.
      changed: inbox for table rows that other trainers have changed.
      reminder: times at which the trainer logs that it waits.
    """

    since: float
    steps: int
    arrays: dict[str, np.ndarray]
    missing: dict[str, Inbox]
    at: dict[str, int]
    changed: ChangedInbox
    reminder: WaitReminder = dataclasses.field(default_factory=WaitReminder)

    def __post_init__(self) -> None:
        self.reminder.begin(self.since)

    @property
    def late(self) -> list[str]:
        """Endpoints of the servers that have not completed their answer."""
        return list(self.missing)


@dataclasses.dataclass
class _Lookup:
    """Request to servers for rows of tables, until all answers are complete.

    Attributes:
      since: time of the request.
      missing: inbox for the rows of each incomplete answer, by the server's endpoint.
      at: step number that the request to each server contains, by endpoint.
      reminder: times at which the trainer logs that it waits.
    """

    since: float
    missing: dict[str, Inbox]
    at: dict[str, int]
    reminder: WaitReminder = dataclasses.field(default_factory=WaitReminder)

    def __post_init__(self) -> None:
        self.reminder.begin(self.since)

    @property
    def late(self) -> list[str]:
        """Endpoints of the servers that have not completed their answer."""
        return list(self.missing)


class Traffic:
    """State of a communicator, which sends gradients and receives parameters in the background.

    A *group* contains the gradients of one step; with GEO-SGD, it contains changes of parameters.

    Args:
      lines: maps the endpoint of each server to the trainer's connection to it. Each request for
        parameters goes to all servers, even to servers without blocks of `leaves`.
      leaves: parameters to receive, by the caller's keys.
      config: limits of the communicator.
      deadline: seconds after which an answer is late.
      name: name of the trainer in error and log texts.
      room: function (key, shape, dtype) -> array that allocates memory to receive a parameter.
      cached: tables with rows that the trainer stores (GEO-SGD), by the caller's keys.
      counts: maps the endpoint of a server to the number of this trainer's steps that the server
        must count. By default, servers count the largest number that one of them has received.

    Attributes:
      config: limits of the communicator.
      sent: number of groups that were sent. Without GEO-SGD, a group has the gradients of one step.
    """

    def __init__(
        self,
        lines: Mapping[str, TrainerLine],
        leaves: Mapping[str, Leaf],
        config: CommunicatorConfig,
        *,
        deadline: float,
        name: str,
        room: Callable[[str, Sequence[int], Any], np.ndarray],
        cached: Mapping[str, Leaf] = {},
        counts: Mapping[str, int] = {},
    ) -> None:
        self.config = config
        self.sent = 0
        self._lines, self._leaves, self._name = lines, leaves, name
        self._deadline, self._room = deadline, room
        # Endpoints of the servers that know which blocks this trainer requests
        self._asked: set[str] = set()
        self._counts = counts
        self._ahead = 0  # number of `send` calls since the last request for parameters
        self._pull: _Pull | None = None
        self._lookup: _Lookup | None = None
        self._cached: dict[tuple[str, str], CachedBlock] = {}
        for key, table in cached.items():
            row = table.shape[1:]
            for ep, block, span in zip(table.endpoints, table.names, table.spans, strict=True):
                self._cached[ep, block] = CachedBlock(key, span, row, table.dtype)
        self._caching = {ep for ep, _ in self._cached}

    @property
    def pulling(self) -> bool:
        """True if a request for parameters is pending."""
        return self._pull is not None

    @property
    def looking_up(self) -> bool:
        """True if a request for rows is pending."""
        return self._lookup is not None

    @property
    def wakes(self) -> float | None:
        """Time at which `look` must be called next; None if no request is pending."""
        times = []
        for request in (self._pull, self._lookup):
            if request is not None:
                times += [request.reminder.next, request.since + self._deadline]
        return min(times, default=None)

    # -- sending ---------------------------------------------------------------------------------

    def ask(self, now: float) -> None:
        """Request the current parameters from all servers."""
        arrays: dict[str, np.ndarray] = {}
        wanted: dict[str, dict[str, np.ndarray]] = {ep: {} for ep in self._lines}
        for key, leaf in self._leaves.items():
            arrays[key] = self._room(key, leaf.shape, leaf.dtype)
            for endpoint, name, rows in leaf.blocks(arrays[key]):
                wanted[endpoint][name] = rows
        inboxes: dict[str, Inbox] = {}
        steps: dict[str, int] = {}
        count = max((line.count for line in self._lines.values()), default=0)
        for endpoint, blocks in wanted.items():
            line = self._lines[endpoint]
            fields: dict[str, Any] = {}
            if endpoint in self._caching:
                # before its first request, the trainer stores no rows that could change
                fields["changed"] = bool(self._asked)
            if endpoint not in self._asked:
                fields["blocks"] = [[n, list(b.shape), b.dtype.name] for n, b in blocks.items()]
                if self._counts.get(endpoint, count):
                    fields["count"] = self._counts.get(endpoint, count)
            line.tell("recv", step=line.step, **fields)
            inboxes[endpoint] = Inbox(blocks, functools.partial(_NOT_ASKED, endpoint))
            steps[endpoint] = line.step
        changed = ChangedInbox(self._cached if self._asked else {})
        self._asked.update(wanted)
        self._pull = _Pull(now, self.sent, arrays, inboxes, steps, changed)
        self._ahead = 0

    def may_take(self, waiting: int, now: float) -> int:
        """Return how many steps' gradients to take from the queue, merge and send now.

        The result is 0 if the trainer must first receive parameters. If a request for parameters is
        due, the method sends it.

        Args:
          waiting: number of groups in the queue. A group has the gradients of one step.
          now: the current time in seconds.
        """
        if self._pull is None and self._ahead >= self.config.min_send_grad_num_before_recv:
            self.ask(now)
        has_budget = self._ahead < self.config.min_send_grad_num_before_recv
        runs_ahead = self.config.independent_recv_thread and has_budget
        if self._pull is not None and not runs_ahead:
            return 0
        return min(waiting, self.config.max_merge_var_num)

    def send(self, groups: Sequence[Group], steps: int) -> None:
        """Merge the gradients of several steps, and send the result to the servers.

        Args:
          groups: the groups.
          steps: number of steps in these groups.
        """
        parts: dict[Leaf, list[Any]] = {}
        for group in groups:
            for leaf, x in group:
                parts.setdefault(leaf, []).append(x)
        outbox: dict[str, list[tuple[str, np.ndarray]]] = {}
        row_ids: dict[str, dict[str, np.ndarray]] = {}
        for leaf, values in parts.items():
            if isinstance(values[0], RowGradient):
                for endpoint, name, gradient in _split_rows(leaf, values):
                    row_ids.setdefault(endpoint, {})[name] = gradient.ids
                    outbox.setdefault(endpoint, []).append((name, gradient.rows))
                continue
            for endpoint, name, rows in _split(leaf, values):
                outbox.setdefault(endpoint, []).append((name, rows))
        for endpoint, ids in row_ids.items():
            self._lines[endpoint].row_ids(ids)
        for endpoint, blocks in outbox.items():
            line = self._lines[endpoint]
            line.send_blocks(blocks, steps=steps)
            line.step += 1
        self.sent, self._ahead = self.sent + len(groups), self._ahead + 1

    def look_up(self, wanted: Sequence[WantedRows], now: float, *, train: bool) -> None:
        """Request rows of tables from the servers that have them.

        Args:
          wanted: the rows of each block (part of a table on one server), with memory for them.
          now: the current time in seconds.
          train: True if gradients of these rows follow.
        """
        missing: dict[str, Inbox] = {}
        for endpoint, (ids, memory) in by_server(wanted).items():
            self._lines[endpoint].prefetch(ids, train=train)
            missing[endpoint] = Inbox(memory, functools.partial(_NOT_ASKED, endpoint))
        at = {ep: self._lines[ep].step for ep in missing}
        self._lookup = _Lookup(now, missing, at) if missing else None

    def ask_for_newest(self, now: float) -> None:
        """Request the current parameters if gradients were sent since the last request."""
        if self._pull is None and self._ahead:
            self.ask(now)

    # -- receiving -------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        """Description of the answer that the trainer waits for, for errors."""
        if self.pulling:
            return "parameters"
        if self.looking_up:
            return "rows"
        return "the gradients of its next step"

    def heard(self, endpoint: str, message: wire.Message) -> None:
        """Handle a message from a server.

        Raises:
          PeerError: the trainer did not request the message.
        """
        pull = self._pull
        if message.op == "rows":
            self._heard_rows(endpoint, message)
            return
        if pull is None or endpoint not in pull.missing:
            raise PeerError(
                f"pserver {endpoint} sent {self._name} a `{message.op}` message, which "
                f"{self._name} did not request"
            )
        if message.op == "changed" and message["step"] == pull.at[endpoint]:
            pull.changed.take(endpoint, message)
            return
        if message.op != "blocks" or message["step"] != pull.at[endpoint]:
            raise PeerError(
                f"pserver {endpoint} answered `recv` of {self._name} with `{message.op}`; "
                f"{self._name} expected `blocks` of step {pull.at[endpoint]}"
            )
        pull.changed.check_complete(endpoint)
        pull.missing[endpoint].take(message)
        if not pull.missing[endpoint].missing():
            del pull.missing[endpoint]

    def _heard_rows(self, endpoint: str, message: wire.Message) -> None:
        lookup, step = self._lookup, message["step"]
        if lookup is None or endpoint not in lookup.missing or step != lookup.at[endpoint]:
            raise PeerError(
                f"pserver {endpoint} sent {self._name} rows of tables, which {self._name} did not "
                "request"
            )
        lookup.missing[endpoint].take(message)
        if not lookup.missing[endpoint].missing():
            del lookup.missing[endpoint]
        if not lookup.missing:
            self._lookup = None

    def take_newest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the parameters that were requested, once; None while some are missing.

        Returns:
          The number of steps that the parameters include at least, and the value of each parameter
          by the caller's key. If the trainer stores rows of a table (GEO-SGD), its value is a
          `RowGradient` with the changed rows.
        """
        if self._pull is None or self._pull.missing:
            return None
        pull, self._pull = self._pull, None
        return pull.steps, {**pull.arrays, **pull.changed.rows()}

    def look(self, now: float) -> None:
        """Raise DeadlineError if an answer is late; log the servers that have not answered yet.

        Args:
          now: the current time in seconds.

        Raises:
          DeadlineError: an answer is late.
        """
        for request, what in ((self._pull, "parameters"), (self._lookup, "rows")):
            if request is None:
                continue
            late = " and ".join(f"pserver {ep}" for ep in request.late)
            waited = now - request.since
            if now >= request.since + self._deadline:
                raise DeadlineError(f"{self._name} waited {waited:.1f} s for {late}: {what}")
            if request.reminder.due(now):
                log.warning("%s has waited %.0f s for %s: %s", self._name, waited, late, what)


_NOT_ASKED = "pserver {} sent {}, which was not requested".format


def _split(leaf: Leaf, values: Sequence[Any]) -> list[tuple[str, str, np.ndarray]]:
    """Merge the gradients of several steps for one parameter, and split the result by server.

    Returns:
      The server's endpoint, the block's name, and the rows of each block (part of the parameter).
    """
    return leaf.blocks(merged([np.asarray(x) for x in values], leaf.merge))


def _split_rows(
    leaf: Leaf, values: Sequence[RowGradient]
) -> Iterator[tuple[str, str, RowGradient]]:
    """Merge the gradients of several steps for one table, and split the result by server.

    Yields:
      The server's endpoint, the gradient's name, and the rows of each block (part of the table).
      The row ids are ids in the block.
    """
    # A compiled step returns arrays of a fixed size, so rows beyond the ids are padding.
    parts = [RowGradient(x.ids, np.asarray(x.rows)[: len(x.ids)]) for x in values]
    total = merged_rows(parts, leaf.merge)
    for endpoint, name, span in zip(leaf.endpoints, leaf.names, leaf.spans, strict=True):
        at = span.among(total.ids)
        yield endpoint, name, RowGradient(span.local(total.ids[at]), total.rows[at])


def merged(parts: Sequence[np.ndarray], how: str) -> np.ndarray:
    """Merge the gradients of several steps.

    Args:
      parts: gradient of each step.
      how: "sum", "mean", or "newest" for the last gradient alone.
    """
    if how == "newest":
        return parts[-1]
    if len(parts) == 1:
        return parts[0]
    # The sum of two 0-d arrays is a NumPy scalar, which cannot be an `out` argument.
    total = np.asarray(parts[0] + parts[1])
    for x in parts[2:]:
        np.add(total, x, out=total)
    if how == "mean":
        np.multiply(total, np.asarray(1 / len(parts), total.dtype), out=total)
    return total
