"""Rows of tables that a synchronous trainer asks for before the step that looks them up.

A trainer announces the rows of a later step, and computes this one while they come. It says how
many steps ahead that is; the server works out from when on an update no longer matters to these
rows: `staleness` steps before they are looked up, or now where that is over. Then it is *due*.

    at once   the rows as they are, unless each update moves all of them
    when due  those that an update has changed since; all, where none went before

Nothing in this is a race. An announcement of step t reaches the server before what ends the
trainer's step t, since both go by one line, in order; and no update t is made without that. So rows
are read as they are after t updates, and which rows later updates change is known: those of which
some trainer had gradients. What is due after an update goes before the answer to `recv` of the same
step, by the same line: a trainer that has heard that has heard all that is due. So a step that
begins has its rows, and waits for none.

A step may turn out to look up other rows than were announced. Then it asks for them as usual, and
what was announced is forgotten on both sides. So is what was announced of a table of which rows are
given up (`job.tables.evict`): all trainers wait for that, and nothing is under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.served import ServedRows
from dtrans.protocol.tables.table_rows import are_among


MOST = 64  # steps that rows may be announced ahead

AT = "at"  # the name under which the places of rows travel that come again


# -- a server's side -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Announced:
    """The rows of a block that a trainer has announced for a step.

    Attributes:
      ids: their numbers in the block.
      due: the number of updates after which no other matters.
      changed: which of them updates have changed since they were sent.
    """

    ids: np.ndarray
    due: int
    changed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DueRows:
    """What is to be sent to a trainer.

    Attributes:
      trainer: who has announced it.
      name: of the block.
      target: the step that looks the rows up.
      ids: the numbers of rows that are sent.
      at: where these are among those that were announced; None where they are all of them.
      is_last: whether nothing more is sent of it.
    """

    trainer: int
    name: str
    target: int
    ids: np.ndarray
    at: np.ndarray | None
    is_last: bool

    def message(self, rows: np.ndarray) -> tuple[list[tuple[str, np.ndarray]], dict[str, Any]]:
        """The blocks and fields of `rows`, with these rows as they are."""
        fields = {"table": self.name, "ahead": self.target, "last": self.is_last}
        if self.at is None:
            return [(self.name, rows)], fields
        return [(AT, self.at), (self.name, rows)], {**fields, "count": len(self.at)}


class RowsAhead:
    """What the trainers of one server have announced.

    Args:
      tables: the blocks that rows are asked of.
    """

    def __init__(self, tables: Mapping[str, ServedRows]) -> None:
        self._tables = tables
        self._of: dict[
            tuple[int, str, int], _Announced
        ] = {}  # by trainer, block and the step that looks them up

    def __bool__(self) -> bool:
        return bool(self._of)

    def announce(self, k: int, name: str, step: int, ahead: int, ids: np.ndarray) -> DueRows | None:
        """Note what trainer k announces at a step (`check`); what is to be sent at once."""
        target, table = step + ahead, self._tables[name]
        due = max(step, target - table.staleness)
        goes_now = due == step or not table.moves
        self._of[k, name, target] = _Announced(ids, due, np.full(len(ids), not goes_now))
        return DueRows(k, name, target, ids, None, due == step) if goes_now else None

    def check(self, k: int, name: str, step: int, ahead: int) -> None:
        """Raise WireError where trainer k has announced that before, or announces it too far
        ahead."""
        if not 1 <= ahead <= MOST:
            raise WireError(
                f"trainer {k} announces rows of {name} {ahead} steps ahead, which may be 1 to "
                f"{MOST}"
            )
        if (k, name, step + ahead) in self._of:
            raise WireError(
                f"trainer {k} announces rows of {name} for step {step + ahead} a second time"
            )

    def made(self, step: int, touched: Mapping[str, Sequence[np.ndarray]]) -> Iterator[DueRows]:
        """Note that an update is made, and `step` of them now; what is due.

        Args:
          touched: of each block, the numbers of the rows that gradients were of.
        """
        for (k, name, target), x in list(self._of.items()):
            if target < step:
                del self._of[k, name, target]  # its step was another, or none
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
        """The blocks and rows that the gradients of trainer k are of in this step, as far as it has
        announced them."""
        names = [n for i, n, target in self._of if (i, target) == (k, step)]
        return [(n, self._of.pop((k, n, step)).ids) for n in names]

    def drop(self, k: int, name: str, step: int) -> None:
        """Forget what trainer k has announced of a block for this step: it looks up other rows."""
        self._of.pop((k, name, step), None)

    def forget_rows(self, name: str) -> None:
        """Forget all that was announced of a block: rows of it were given up."""
        for key in [x for x in self._of if x[1] == name]:
            del self._of[key]

    def forget(self, k: int) -> None:
        """Forget all that trainer k has announced: it has left."""
        for key in [x for x in self._of if x[0] == k]:
            del self._of[key]


# -- a trainer's side ------------------------------------------------------------------------------


class ComingRows:
    """The rows of blocks of one server that were announced to it.

    Args:
      endpoint: of the server.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._whole: dict[tuple[str, int], Inbox] = {}  # by block and the step that looks them up
        self._again: dict[tuple[str, int], Inbox] = {}
        self._here: set[tuple[str, int]] = set()  # of which nothing more comes

    def expect(self, name: str, target: int, rows: np.ndarray) -> None:
        """Let rows come into this memory."""
        self._whole[name, target] = Inbox({name: rows}, self._not_asked)

    def take(self, message: wire.Message) -> None:
        """Take rows. Raises PeerError for those that were not announced, WireError for those that
        cannot be."""
        name, key = message["table"], (message["table"], message["ahead"])
        inbox = self._whole.get(key)
        if inbox is None or key in self._here:
            raise PeerError(
                f"pserver {self._endpoint} sent rows of {wire.brief(name)} that were not announced"
            )
        if "count" in message.fields:
            inbox = self._places(key, inbox.memory[name], message["count"])
        inbox.take(message)
        if not inbox.missing():
            self._put(key, inbox)
            if message["last"]:
                self._here.add(key)

    def _places(self, key: tuple[str, int], rows: np.ndarray, count: int) -> Inbox:
        if not 0 <= count <= len(rows):
            raise WireError(
                f"{wire.brief(count)} rows of {key[0]} again, of {len(rows)} that were announced"
            )
        if key not in self._again:
            room = np.empty((count, *rows.shape[1:]), rows.dtype)
            self._again[key] = Inbox({AT: np.empty(count, np.int32), key[0]: room}, self._not_asked)
        return self._again[key]

    def _put(self, key: tuple[str, int], inbox: Inbox) -> None:
        """Let rows that have come again be where they belong."""
        if self._again.pop(key, None) is None:
            return
        rows, at = self._whole[key].memory[key[0]], inbox.memory[AT]
        if len(at) and (at.min() < 0 or at.max() >= len(rows)):
            raise WireError(f"rows of {key[0]} again that were not announced")
        rows[at] = inbox.memory[key[0]]

    def collect(self, name: str, target: int) -> None:
        """Expect no more of what was announced. Raises PeerError where it is not here."""
        here = (name, target) in self._here and not self._whole[name, target].missing()
        self._whole.pop((name, target))
        self._here.discard((name, target))
        if not here:
            raise PeerError(
                f"pserver {self._endpoint} has not sent the rows of {name} announced for step "
                f"{target}"
            )

    def forget(self, name: str, target: int) -> None:
        """Expect no more of what was announced: the server has forgotten it too."""
        self._whole.pop((name, target))
        self._here.discard((name, target))

    def _not_asked(self, name: str) -> str:
        return f"pserver {self._endpoint} sent {wire.brief(name)} among rows that were announced"
