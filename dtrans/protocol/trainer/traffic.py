"""Traffic of a communicator, which sends and receives in the background of a trainer.

A turn takes gradients from the queue, merges those of several steps, and sends them. After some
sends it asks for all parameters. It receives them while it continues to send, as far as
`CommunicatorConfig` lets it run ahead of the servers.

The answer to a request for parameters also acknowledges everything sent before it. So the messages
on their way are bounded. If servers are slower than steps, the queue fills, its gradients merge,
and in the end steps wait.

Rows of tables are asked for at once, whatever waits in the queue, and have the newest values.
Gradients of rows wait as others do. A merged gradient has the rows of all its parts, and their
numbers are sent first. A trainer of GEO-SGD stores rows: it asks for changes of these together with
its parameters.

Source: `AsyncCommunicator` and `HalfAsyncCommunicator` in
  paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import DeadlineError, PeerError
from dtrans.ops import CommunicatorConfig
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.changed_rows import CachedBlock, ChangedInbox
from dtrans.protocol.tables.table_rows import BlockRowSet, WantedRows, merged_rows
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.trainer")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf that is cut into blocks to send, and joined when it is received.

    Attributes:
      endpoints, names: of each block.
      sections: number of rows of each block; 1 for a 0-d leaf.
      shape, dtype: of the leaf.
      merge: the way to merge gradients of several steps: "sum", "mean" or "newest".
      spans: rows of each block of a table.
    """

    endpoints: tuple[str, ...]
    names: tuple[str, ...]
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    merge: str = "sum"
    spans: tuple[BlockRowSet, ...] = ()

    def blocks(self, array: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
        """Return the endpoint, name and rows of each block."""
        if len(self.names) == 1:
            return [(self.endpoints[0], self.names[0], array)]
        return list(zip(self.endpoints, self.names, rows_of(array, self.sections), strict=True))


def rows_of(array: np.ndarray, sections: Sequence[int]) -> list[np.ndarray]:
    """Split an array into views with these numbers of rows."""
    return [array[end - n : end] for n, end in zip(sections, np.cumsum(sections), strict=True)]


# gradients of a step: leaves with their values, for a table a `RowGradient`
Group = Sequence[tuple[Leaf, Any]]


@dataclasses.dataclass
class _Pull:
    """Parameters that are on their way."""

    since: float
    steps: int  # sent before
    arrays: dict[str, np.ndarray]
    missing: dict[str, Inbox]  # by the endpoints whose blocks are not all here
    at: dict[str, int]  # the step at which each endpoint was asked
    changed: ChangedInbox  # rows that others have changed
    reminder: WaitReminder = dataclasses.field(default_factory=WaitReminder)

    def __post_init__(self) -> None:
        self.reminder.begin(self.since)

    @property
    def late(self) -> list[str]:
        """The servers that have not answered."""
        return list(self.missing)


@dataclasses.dataclass
class _Lookup:
    """Rows that are on their way."""

    since: float
    missing: dict[tuple[str, str], Inbox]  # by server and block
    at: dict[str, int]  # the step at which each endpoint was asked
    reminder: WaitReminder = dataclasses.field(default_factory=WaitReminder)

    def __post_init__(self) -> None:
        self.reminder.begin(self.since)

    @property
    def late(self) -> list[str]:
        """The servers that have not answered."""
        return list(dict.fromkeys(ep for ep, _ in self.missing))


class Traffic:
    """Traffic of one trainer with its servers.

    Args:
      lines: by endpoint; every server is asked for parameters, also one without any of the leaves.
      leaves: leaves to receive, by the caller's keys.
      config: limits of the communicator.
      deadline: seconds in which parameters have to come.
      name: of the trainer.
      room: returns memory to receive into: (key, shape, dtype) -> array.
      cached: tables whose rows the trainer stores, by the caller's keys.

    Attributes:
      sent: number of steps whose gradients were sent.
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
    ) -> None:
        self.config = config
        self.sent = 0
        self._lines, self._leaves, self._name = lines, leaves, name
        self._deadline, self._room = deadline, room
        self._asked: set[str] = set()  # endpoints that know the wanted blocks
        self._ahead = 0  # groups sent since the last request for parameters
        self._pull: _Pull | None = None
        self._lookup: _Lookup | None = None
        self._cached = {
            (ep, name): CachedBlock(key, span, x.shape[1:], x.dtype)
            for key, x in cached.items()
            for ep, name, span in zip(x.endpoints, x.names, x.spans, strict=True)
        }
        self._caching = {ep for ep, _ in self._cached}

    @property
    def pulling(self) -> bool:
        """True if parameters are on their way."""
        return self._pull is not None

    @property
    def looking_up(self) -> bool:
        """True if rows are on their way."""
        return self._lookup is not None

    @property
    def wakes(self) -> float | None:
        """The time at which to call `look` next; None if nothing is on its way."""
        times = [
            min(x.reminder.next, x.since + self._deadline)
            for x in (self._pull, self._lookup)
            if x is not None
        ]
        return min(times, default=None)

    # -- sending ---------------------------------------------------------------------------------

    def ask(self, now: float) -> None:
        """Ask for all parameters."""
        arrays = {
            key: self._room(key, leaf.shape, leaf.dtype) for key, leaf in self._leaves.items()
        }
        wanted: dict[str, dict[str, np.ndarray]] = {ep: {} for ep in self._lines}
        for key, leaf in self._leaves.items():
            for endpoint, name, rows in leaf.blocks(arrays[key]):
                wanted[endpoint][name] = rows
        for endpoint, blocks in wanted.items():
            line = self._lines[endpoint]
            table = [[n, list(b.shape), b.dtype.name] for n, b in blocks.items()]
            fields: dict[str, Any] = {}
            if endpoint in self._caching:
                fields["changed"] = bool(self._asked)  # the first request comes before any rows
            if endpoint not in self._asked:
                fields["blocks"] = table
            line.tell("recv", step=line.step, **fields)
        changed = ChangedInbox(self._cached if self._asked else {})
        self._asked.update(wanted)
        inboxes = {
            ep: Inbox(blocks, functools.partial(_NOT_ASKED, ep)) for ep, blocks in wanted.items()
        }
        at = {ep: self._lines[ep].step for ep in wanted}
        self._pull = _Pull(now, self.sent, arrays, inboxes, at, changed)
        self._ahead = 0

    def may_take(self, waiting: int, now: float) -> int:
        """Return the number of waiting groups that may be sent as one now.

        It first asks for parameters if that is due.
        """
        if self._pull is None and self._ahead >= self.config.min_send_grad_num_before_recv:
            self.ask(now)
        has_budget = self._ahead < self.config.min_send_grad_num_before_recv
        runs_ahead = self.config.independent_recv_thread and has_budget
        if self._pull is not None and not runs_ahead:
            return 0
        return min(waiting, self.config.max_merge_var_num)

    def send(self, groups: Sequence[Group]) -> None:
        """Send the gradients of several steps as those of one."""
        parts: dict[Leaf, list[Any]] = {}
        for group in groups:
            for leaf, x in group:
                parts.setdefault(leaf, []).append(x)
        outbox: dict[str, list[tuple[str, np.ndarray]]] = {}
        for leaf, values in parts.items():
            is_table = isinstance(values[0], RowGradient)
            split = self._split_rows if is_table else _split
            for endpoint, name, rows in split(leaf, values):
                outbox.setdefault(endpoint, []).append((name, rows))
        for endpoint, blocks in outbox.items():
            line = self._lines[endpoint]
            line.send_blocks(blocks, steps=len(groups))
            line.step += 1
        self.sent, self._ahead = self.sent + len(groups), self._ahead + 1

    def _split_rows(
        self, leaf: Leaf, values: Sequence[RowGradient]
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield the endpoint, name and rows of each block of a table; send the row ids."""
        # arrays of a compiled step have a fixed size: zeros pad them
        parts = [RowGradient(x.ids, np.asarray(x.rows)[: len(x.ids)]) for x in values]
        total = merged_rows(parts, leaf.merge)
        for endpoint, name, span in zip(leaf.endpoints, leaf.names, leaf.spans, strict=True):
            at = span.among(total.ids)
            self._lines[endpoint].row_ids(name, span.local(total.ids[at]))
            yield endpoint, name, total.rows[at]

    def look_up(self, wanted: Sequence[WantedRows], now: float, *, train: bool) -> None:
        """Ask for rows of tables.

        Args:
          train: a step is made of them.
        """
        missing: dict[tuple[str, str], Inbox] = {}
        for endpoint, name, ids, rows in wanted:
            self._lines[endpoint].prefetch(name, ids, train=train)
            missing[endpoint, name] = Inbox({name: rows}, functools.partial(_NOT_ASKED, endpoint))
        at = {ep: self._lines[ep].step for ep, _ in missing}
        self._lookup = _Lookup(now, missing, at) if missing else None

    def ask_for_newest(self, now: float) -> None:
        """Ask for parameters if the newest ones lack gradients that were sent."""
        if self._pull is None and self._ahead:
            self.ask(now)

    # -- receiving -------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        """Description of the next answer."""
        if self.pulling:
            return "parameters"
        return "rows" if self.looking_up else "gradients to be made"

    def heard(self, endpoint: str, message: wire.Message) -> None:
        """Take an answer. Raises PeerError for one that was not asked for."""
        pull = self._pull
        if message.op == "rows":
            self._heard_rows(endpoint, message)
            return
        if pull is None or endpoint not in pull.missing:
            raise PeerError(
                f"pserver {endpoint} sent {self._name} a `{message.op}` that it did not ask for"
            )
        if message.op == "changed" and message["step"] == pull.at[endpoint]:
            pull.changed.take(endpoint, message)
            return
        if message.op != "blocks" or message["step"] != pull.at[endpoint]:
            raise PeerError(
                f"pserver {endpoint} answered `recv` of {self._name} with `{message.op}`"
            )
        pull.changed.check_complete(endpoint)
        pull.missing[endpoint].take(message)
        if not pull.missing[endpoint].missing():
            del pull.missing[endpoint]

    def _heard_rows(self, endpoint: str, message: wire.Message) -> None:
        lookup, key = self._lookup, (endpoint, message["table"])
        if lookup is None or key not in lookup.missing or message["step"] != lookup.at[endpoint]:
            raise PeerError(f"pserver {endpoint} sent {self._name} rows that it did not ask for")
        lookup.missing[key].take(message)
        if not lookup.missing[key].missing():
            del lookup.missing[key]
        if not lookup.missing:
            self._lookup = None

    def take_newest(self) -> tuple[int, dict[str, Any]] | None:
        """Take complete parameters, with the number of steps sent before their request.

        Tables with stored rows have a `RowGradient` of the changed ones. Returns None if not all
        parameters are here.
        """
        if self._pull is None or self._pull.missing:
            return None
        pull, self._pull = self._pull, None
        return pull.steps, {**pull.arrays, **pull.changed.rows()}

    def look(self, now: float) -> None:
        """Raise DeadlineError if an answer is late; log for which servers the trainer waits."""
        for request, what in ((self._pull, "parameters"), (self._lookup, "rows")):
            if request is None:
                continue
            late = " and ".join(f"pserver {ep}" for ep in request.late)
            waited = now - request.since
            if now >= request.since + self._deadline:
                raise DeadlineError(f"{self._name} waited {waited:.1f} s for {late}: {what}")
            if request.reminder.due(now):
                log.warning("%s has waited %.0f s for %s: %s", self._name, waited, late, what)


_NOT_ASKED = "pserver {} sent {}, which was not asked for".format


def _split(leaf: Leaf, values: Sequence[Any]) -> list[tuple[str, str, np.ndarray]]:
    """Return the endpoint, name and rows of each block of a leaf."""
    return leaf.blocks(merged([np.asarray(x) for x in values], leaf.merge))


def merged(parts: Sequence[np.ndarray], how: str) -> np.ndarray:
    """Merge gradients of several steps: their sum, their mean, or the newest."""
    if how == "newest":
        return parts[-1]
    if len(parts) == 1:
        return parts[0]
    # the sum of 0-d arrays is a scalar, which cannot be an `out`
    total = np.asarray(parts[0] + parts[1])
    for x in parts[2:]:
        np.add(total, x, out=total)
    if how == "mean":
        np.multiply(total, np.asarray(1 / len(parts), total.dtype), out=total)
    return total
