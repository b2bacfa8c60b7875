"""Announced rows: table rows that a synchronous trainer requests for a later step.

A trainer announces the rows of a later step, and computes the current step while the server sends
the rows. The rows may lack the newest `staleness` updates before the step that uses them. They must
include all earlier updates. After the last of these earlier updates, the rows are *due*. The server
sends the rows twice:

    at once     all announced rows, if updates change only rows with gradients
    when due    the rows that updates have changed since; all announced rows if none were sent

One message contains the rows of several tables for one step.

The result does not depend on timing. A trainer announces rows before it ends its current step, and
an update needs the end of this step from all trainers. So the server always reads the announced
rows between the same two updates. It knows which rows later updates change, because these rows have
gradients. It sends due rows before the answer to `recv`, so a trainer has all rows when it begins
the next step.

If a step looks up rows that differ from the announced rows, it requests them by an ordinary
`prefetch`. The trainer and the server then drop the announcement. They also drop all announcements
for a table after an eviction (`job.tables.evict`). This is safe because all trainers wait for the
eviction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import TableSpec
from dtrans.protocol.tables.table_rows import are_among


MOST = 64  # maximum number of steps between an announcement and the step that uses the rows

# Suffix of the name of a block in a `rows` message. The block contains the positions of the rows
# that are sent a second time.
AT = "@AT"


# -- server ----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Announced:
    """Rows that a trainer has requested from one table before the step that looks them up.

    Attributes:
      ids: row ids in the block (the part of the table on this server).
      due: number of updates that the rows must include when they are sent for the last time.
      changed: mask of the rows that updates have changed, and that must be sent again.
    """

    ids: np.ndarray
    due: int
    changed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DueRows:
    """Rows that a server now sends to a trainer, which has requested them for a later step.

    The server sends such rows at once, and sends again those that updates change meanwhile.

    Attributes:
      trainer: id of the trainer.
      name: name of the block (the part of a table on this server).
      target: number of the step that uses the rows.
      ids: ids of the rows to send.
      at: positions of these rows among the requested rows; None if all requested rows are sent.
      is_last: True if the trainer receives no further rows for this request.
    """

    trainer: int
    name: str
    target: int
    ids: np.ndarray
    at: np.ndarray | None
    is_last: bool


def due_messages(
    due: Sequence[tuple[DueRows, np.ndarray]],
) -> Iterator[tuple[int, list[tuple[str, np.ndarray]], dict[str, Any]]]:
    """Combine the requested rows of later steps into messages to trainers.

    A trainer may request rows some steps before it uses them. All rows that one trainer needs for
    one step are sent in one message, also if they belong to several tables.

    Args:
      due: the rows to send now, each request with the current values of its rows.

    Yields:
      The id of the trainer, the arrays of the message by name, and the fields of its header.
    """
    # (trainer, step that uses the rows, `is_last`, True if only changed rows are sent) -> rows
    groups: dict[tuple[int, int, bool, bool], list[tuple[DueRows, np.ndarray]]] = {}
    for x, rows in due:
        key = x.trainer, x.target, x.is_last, x.at is not None
        groups.setdefault(key, []).append((x, rows))
    for (trainer, target, is_last, has_places), members in groups.items():
        fields: dict[str, Any] = {"ahead": target, "last": is_last}
        if has_places:
            fields["counts"] = {x.name: len(x.ids) for x, _ in members}
        blocks: list[tuple[str, np.ndarray]] = []
        for x, rows in members:
            if x.at is not None:
                blocks.append((x.name + AT, x.at))
            blocks.append((x.name, rows))
        yield trainer, blocks, fields


class RowsAhead:
    """Requests at one server for table rows that trainers will look up in later steps.

    A trainer requests rows early ("announces" them), so that they arrive while it computes.

    Args:
      tables: specification of each block of a table, by name.
    """

    def __init__(self, tables: Mapping[str, TableSpec]) -> None:
        self._tables = tables
        # The keys are (trainer, block, step that uses the rows).
        self._of: dict[tuple[int, str, int], _Announced] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def announce(self, k: int, name: str, step: int, ahead: int, ids: np.ndarray) -> DueRows | None:
        """Record trainer k's early request for rows; return the rows to send now, or None.

        None means that the rows are sent after a later update, which may change all of them. Call
        `check` first.

        Args:
          k: id of the trainer.
          name: name of the block (the part of a table on this server).
          step: the trainer's current step.
          ahead: number of steps until the step that looks up the rows, such as 1 for the next step.
          ids: row ids in the block.
        """
        target, table = step + ahead, self._tables[name]
        due = max(step, target - table.staleness)
        goes_now = due == step or not table.moves
        self._of[k, name, target] = _Announced(ids, due, np.full(len(ids), not goes_now))
        if not goes_now:
            return None
        return DueRows(k, name, target, ids, None, due == step)

    def check(self, k: int, name: str, step: int, ahead: int) -> None:
        """Raise WireError if trainer k's early request for rows is invalid.

        It is invalid if the trainer has already requested this block's rows for the same step, or
        if the step is too far ahead.
        """
        if not 1 <= ahead <= MOST:
            raise WireError(
                f"trainer {k} announces rows of {wire.brief(name)} {ahead} steps ahead, expected 1 "
                f"to {MOST} steps"
            )
        if (k, name, step + ahead) in self._of:
            raise WireError(
                f"trainer {k} announces rows of {name} for step {step + ahead} a second time"
            )

    def end_update(
        self, step: int, touched: Mapping[str, Sequence[np.ndarray]]
    ) -> Iterator[DueRows]:
        """Note the rows that an update has changed; yield the requested rows that must be sent now.

        Args:
          step: number of complete updates, including this one.
          touched: row ids of each trainer's gradient, by the name of the block (the part of a table
            on this server).
        """
        for (k, name, target), x in list(self._of.items()):
            if target < step:
                # The trainer made its step `target` without gradients of the announced rows.
                del self._of[k, name, target]
            elif x.due >= step and self._tables[name].moves:
                if x.due == step:
                    yield DueRows(k, name, target, x.ids, None, True)
            elif x.due >= step:
                for ids in touched[name]:
                    x.changed |= are_among(x.ids, ids)
                if x.due == step:
                    at = np.flatnonzero(x.changed).astype(np.int32)
                    yield DueRows(k, name, target, x.ids[at], at, True)

    def begin(self, k: int, step: int) -> list[tuple[str, np.ndarray]]:
        """Remove trainer k's early requests for a step, which now begins; return them.

        Args:
          k: id of the trainer.
          step: number of the step.

        Returns:
          The name of the block and the row ids of each request.
        """
        found = []
        for trainer, name, target in list(self._of):
            if (trainer, target) == (k, step):
                found.append((name, self._of.pop((k, name, step)).ids))
        return found

    def drop(self, k: int, name: str, step: int) -> None:
        """Drop trainer k's early request for a step, because the step looks up other rows."""
        self._of.pop((k, name, step), None)

    def forget_rows(self, name: str) -> None:
        """Drop all early requests for rows of a block, because rows of it were evicted."""
        self._of = {key: x for key, x in self._of.items() if key[1] != name}

    def forget(self, k: int) -> None:
        """Drop all early requests for rows of trainer k, which has left the job."""
        self._of = {key: x for key, x in self._of.items() if key[0] != k}


# -- trainer ---------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Coming:
    """Rows of one server that a trainer has requested for one later step.

    Attributes:
      inbox: memory for all announced rows, by block.
      again: memory for changed rows and for their positions. The key contains the names of the
        blocks with changed rows in one message.
      complete: names of the blocks that have arrived completely.
    """

    inbox: Inbox
    again: dict[tuple[str, ...], Inbox] = dataclasses.field(default_factory=dict)
    complete: set[str] = dataclasses.field(default_factory=set)


class ComingRows:
    """Receiver of rows that a trainer has requested from one server for later steps.

    Args:
      endpoint: endpoint of the server.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._steps: dict[int, _Coming] = {}  # number of the step that uses the rows -> rows

    def expect(self, target: int, memory: Mapping[str, np.ndarray]) -> None:
        """Record that this trainer has requested rows for a later step.

        Args:
          target: number of the step that uses the rows.
          memory: memory that receives the rows of each block, by the block's name.
        """
        self._steps[target] = _Coming(Inbox(memory, self._not_asked))

    def take(self, message: wire.Message) -> None:
        """Receive rows that the trainer has requested for a later step.

        Raises:
          PeerError: the rows were not announced, or are already complete.
          WireError: the message is malformed.
        """
        coming = self._steps.get(message["ahead"])
        counts = message.fields.get("counts")
        names = _names_of(message) if counts is None else list(counts)
        expected = set() if coming is None else coming.inbox.memory.keys() - coming.complete
        if coming is None or not expected.issuperset(names):
            raise PeerError(
                f"pserver {self._endpoint} sent rows of {wire.brief(', '.join(map(str, names)))} "
                "that were not announced"
            )
        if counts is None:
            coming.inbox.take(message)
        elif not self._take_again(coming, message, counts):
            return
        if message.fields.get("last"):
            coming.complete.update(n for n in names if coming.inbox.has_all(n))

    def _take_again(
        self, coming: _Coming, message: wire.Message, counts: Mapping[str, Any]
    ) -> bool:
        """Receive new values of rows that updates have changed since the server first sent them.

        Returns:
          True if all values have arrived and were written over the old values.
        """
        key = tuple(counts)
        if key not in coming.again:
            coming.again[key] = Inbox(self._room_again(coming, counts), self._not_asked)
        inbox = coming.again[key]
        inbox.take(message)
        if inbox.missing():
            return False
        del coming.again[key]
        for name in counts:
            rows, at = coming.inbox.memory[name], inbox.memory[name + AT]
            if len(at) and (at.min() < 0 or at.max() >= len(rows)):
                raise WireError(
                    f"pserver {self._endpoint} sent changed rows of {name} for positions outside "
                    f"the {len(rows)} announced rows"
                )
            rows[at] = inbox.memory[name]
        return True

    def _room_again(self, coming: _Coming, counts: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return memory for changed rows of several blocks, and for their positions."""
        memory: dict[str, np.ndarray] = {}
        for name, count in counts.items():
            rows = coming.inbox.memory[name]
            if type(count) is not int or not 0 <= count <= len(rows):
                raise WireError(
                    f"pserver {self._endpoint} sent {wire.brief(count)} changed rows of {name}, "
                    f"but only {len(rows)} rows were announced"
                )
            memory[name + AT] = np.empty(count, np.int32)
            memory[name] = np.empty((count, *rows.shape[1:]), rows.dtype)
        return memory

    def collect(self, name: str, target: int) -> None:
        """End an early request when its step begins; raise PeerError if rows are missing.

        Args:
          name: name of the block (the part of a table on the server).
          target: number of the step that looks up the rows.
        """
        coming = self._steps[target]
        is_complete = name in coming.complete and coming.inbox.has_all(name)
        self.forget(name, target)
        if not is_complete:
            raise PeerError(
                f"pserver {self._endpoint} has not sent the rows of {name} announced for step "
                f"{target}"
            )

    def forget(self, name: str, target: int) -> None:
        """Drop an early request for rows, after an eviction of rows of its table.

        The trainer sends no message: the server has dropped the same request.
        """
        coming = self._steps[target]
        coming.inbox.drop(name)
        if not coming.inbox.memory:
            del self._steps[target]

    def _not_asked(self, name: str) -> str:
        return f"pserver {self._endpoint} sent announced rows with the block {wire.brief(name)}"


def _names_of(message: wire.Message) -> list[str]:
    """Return the names of the arrays in a message that has rows for a later step.

    Raises:
      WireError: the message's field `pieces` is malformed.
    """
    found: dict[str, None] = {}
    for table in message["pieces"]:
        found |= dict.fromkeys(name for name, *_ in wire.checked_pieces(table))
    return list(found)
