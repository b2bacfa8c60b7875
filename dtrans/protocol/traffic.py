"""What a trainer sends and receives beside its steps, one turn at a time.

A turn takes what waits, merges it if it is of several steps, and sends it; asks for all parameters
when it was sent often enough; and receives them while it goes on sending, as far as
`CommunicatorConfig` lets it run ahead of the servers.

An answer to a request for parameters is also the word that everything sent before it has arrived,
so that what is under way is bounded: servers that are slower than steps make the queue fill up, its
gradients merge, and at last steps wait.

Rows of tables are asked for at once, whatever waits, and are what they are then. Gradients of rows
wait as others do; merged, they are of the rows of all of them, whose numbers go before.

A trainer of GEO-SGD keeps rows. With its parameters it asks for those of them that others have
changed.

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
from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.changed_rows import ChangedInbox, KeptBlock
from dtrans.protocol.tables.table_rows import BlockRowSet, WantedRows, merged_rows
from dtrans.protocol.trainer_line import TrainerLine
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.trainer")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf that is cut into blocks when it is sent, and put together when it is received.

    Attributes:
      endpoints, names: of each block.
      sections: the number of rows of each; of a 0-d leaf, 1.
      shape, dtype: of the whole.
      merge: how several are combined that are sent as one: their "sum", their "mean" or the
        "newest".
      spans: of a table, which rows each block has.
    """

    endpoints: tuple[str, ...]
    names: tuple[str, ...]
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    merge: str = "sum"
    spans: tuple[BlockRowSet, ...] = ()

    def blocks(self, whole: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
        """The endpoint, name and rows of each block."""
        if len(self.names) == 1:
            return [(self.endpoints[0], self.names[0], whole)]
        return list(zip(self.endpoints, self.names, rows_of(whole, self.sections), strict=True))


def rows_of(whole: np.ndarray, sections: Sequence[int]) -> list[np.ndarray]:
    """The blocks of an array, as views: so many rows of it each."""
    return [whole[end - n : end] for n, end in zip(sections, np.cumsum(sections), strict=True)]


# what a step sends: leaves with their values; of a table, a `RowGradient`
Group = Sequence[tuple[Leaf, Any]]


@dataclasses.dataclass
class _Pull:
    """Parameters that are on their way."""

    since: float
    steps: int  # that were sent before
    whole: dict[str, np.ndarray]
    missing: dict[str, Inbox]  # the endpoints whose blocks are not all here
    at: dict[str, int]  # the step that each endpoint was asked at
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
    at: dict[str, int]  # the step that each endpoint was asked at
    reminder: WaitReminder = dataclasses.field(default_factory=WaitReminder)

    def __post_init__(self) -> None:
        self.reminder.begin(self.since)

    @property
    def late(self) -> list[str]:
        """The servers that have not answered."""
        return list(dict.fromkeys(ep for ep, _ in self.missing))


class Traffic:
    """The traffic of one trainer with its servers.

    Args:
      lines: to each endpoint; all are asked for parameters, those too that have none of the leaves.
      leaves: what is received, by a key of the caller's.
      config: how far it may run ahead, and so on.
      deadline: seconds that parameters may be on their way.
      name: of the trainer.
      room: gives memory to receive into: (key, shape, dtype) -> array.
      kept: the tables of which the trainer keeps rows, by a key of the caller's.

    Attributes:
      sent: how many steps were.
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
        kept: Mapping[str, Leaf] = {},
    ) -> None:
        self.config = config
        self.sent = 0
        self._lines, self._leaves, self._name = lines, leaves, name
        self._deadline, self._room = deadline, room
        self._asked: set[str] = set()  # the endpoints that know what is wanted
        self._ahead = 0  # groups sent since parameters were asked for
        self._pull: _Pull | None = None
        self._lookup: _Lookup | None = None
        self._kept = {
            (ep, name): KeptBlock(key, span, x.shape[1:], x.dtype)
            for key, x in kept.items()
            for ep, name, span in zip(x.endpoints, x.names, x.spans, strict=True)
        }
        self._keeping = {ep for ep, _ in self._kept}

    @property
    def pulling(self) -> bool:
        """Whether parameters are on their way."""
        return self._pull is not None

    @property
    def looking_up(self) -> bool:
        """Whether rows are on their way."""
        return self._lookup is not None

    @property
    def wakes(self) -> float | None:
        """When to call `look` next; None where nothing is on its way."""
        times = [
            min(x.reminder.next, x.since + self._deadline)
            for x in (self._pull, self._lookup)
            if x is not None
        ]
        return min(times, default=None)

    # -- sending ---------------------------------------------------------------------------------

    def ask(self, now: float) -> None:
        """Ask for all parameters."""
        whole = {key: self._room(key, leaf.shape, leaf.dtype) for key, leaf in self._leaves.items()}
        wanted: dict[str, dict[str, np.ndarray]] = {ep: {} for ep in self._lines}
        for key, leaf in self._leaves.items():
            for endpoint, name, rows in leaf.blocks(whole[key]):
                wanted[endpoint][name] = rows
        for endpoint, blocks in wanted.items():
            line = self._lines[endpoint]
            table = [[n, list(b.shape), b.dtype.name] for n, b in blocks.items()]
            # at first it has no rows
            fields: dict[str, Any] = (
                {"changed": bool(self._asked)} if endpoint in self._keeping else {}
            )
            fields |= {} if endpoint in self._asked else {"blocks": table}
            line.tell("recv", step=line.step, **fields)
        changed = ChangedInbox(self._kept if self._asked else {})
        self._asked.update(wanted)
        inboxes = {
            ep: Inbox(blocks, functools.partial(_NOT_ASKED, ep)) for ep, blocks in wanted.items()
        }
        self._pull = _Pull(
            now, self.sent, whole, inboxes, {ep: self._lines[ep].step for ep in wanted}, changed
        )
        self._ahead = 0

    def may_take(self, waiting: int, now: float) -> int:
        """How many of the groups that wait may be sent as one now. Asks for parameters where that
        comes first."""
        if self._pull is None and self._ahead >= self.config.min_send_grad_num_before_recv:
            self.ask(now)
        runs_ahead = (
            self.config.independent_recv_thread
            and self._ahead < self.config.min_send_grad_num_before_recv
        )
        return (
            min(waiting, self.config.max_merge_var_num) if self._pull is None or runs_ahead else 0
        )

    def send(self, groups: Sequence[Group]) -> None:
        """Send the gradients of several steps as those of one."""
        parts: dict[Leaf, list[Any]] = {}
        for group in groups:
            for leaf, x in group:
                parts.setdefault(leaf, []).append(x)
        outbox: dict[str, list[tuple[str, np.ndarray]]] = {}
        for leaf, values in parts.items():
            of_rows = isinstance(values[0], RowGradient)
            for endpoint, name, rows in (
                self._rows(leaf, values) if of_rows else _whole(leaf, values)
            ):
                outbox.setdefault(endpoint, []).append((name, rows))
        for endpoint, blocks in outbox.items():
            line = self._lines[endpoint]
            line.send_blocks(blocks, steps=len(groups))
            line.step += 1
        self.sent, self._ahead = self.sent + len(groups), self._ahead + 1

    def _rows(
        self, leaf: Leaf, values: Sequence[RowGradient]
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """The endpoint, name and rows of each block of a table; their numbers are sent."""
        # zeros may be behind
        given = [RowGradient(x.ids, np.asarray(x.rows)[: len(x.ids)]) for x in values]
        whole = merged_rows(given, leaf.merge)
        for endpoint, name, span in zip(leaf.endpoints, leaf.names, leaf.spans, strict=True):
            at = span.among(whole.ids)
            self._lines[endpoint].row_ids(name, span.local(whole.ids[at]))
            yield endpoint, name, whole.rows[at]

    def look_up(self, wanted: Sequence[WantedRows], now: float, *, train: bool) -> None:
        """Ask for rows of tables.

        Args:
          train: whether a step is made of them.
        """
        missing: dict[tuple[str, str], Inbox] = {}
        for endpoint, name, ids, rows in wanted:
            self._lines[endpoint].prefetch(name, ids, train=train)
            missing[endpoint, name] = Inbox({name: rows}, functools.partial(_NOT_ASKED, endpoint))
        self._lookup = (
            _Lookup(now, missing, {ep: self._lines[ep].step for ep, _ in missing})
            if missing
            else None
        )

    def ask_for_newest(self, now: float) -> None:
        """Ask for parameters where nothing else is to be sent, and those that are here lack what
        was."""
        if self._pull is None and self._ahead:
            self.ask(now)

    # -- receiving -------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        """What an answer would be."""
        return (
            "parameters" if self.pulling else "rows" if self.looking_up else "gradients to be made"
        )

    def heard(self, endpoint: str, message: wire.Message) -> None:
        """Take an answer. Raises PeerError where it is nothing that was asked for."""
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
        pull.changed.check_whole(endpoint)
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

    def whole(self) -> tuple[int, dict[str, Any]] | None:
        """The parameters that have just come whole, and how many steps were sent before they were
        asked for.

        Of tables of which the trainer keeps rows, those that others have changed: a `RowGradient`.
        """
        if self._pull is None or self._pull.missing:
            return None
        pull, self._pull = self._pull, None
        return pull.steps, {**pull.whole, **pull.changed.rows()}

    def look(self, now: float) -> None:
        """Raise DeadlineError where what is on its way is too late; log now and then for whom it
        waits."""
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


def _whole(leaf: Leaf, values: Sequence[Any]) -> list[tuple[str, str, np.ndarray]]:
    """The endpoint, name and rows of each block of a leaf."""
    return leaf.blocks(merged([np.asarray(x) for x in values], leaf.merge))


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
