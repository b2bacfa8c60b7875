"""Steps of one trainer: the messages that it sends, and the answers that it waits for.

A method that waits returns an `Operation`, which its runner hands the answers.

    send      puts a gradient into the outbox of a server, which is sent when it is full, or at the
              end of the step
    announce  asks each server for rows that a later step looks up
    request   sends each server one message: the rest of its outbox, the end of the step, and the
              names of blocks, which are received into their memory
    exchange  sends a part of a round to its server, and receives the answer
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import CheckpointError, PeerError, StateError
from dtrans.protocol import wire
from dtrans.protocol.tables import rows_ahead
from dtrans.protocol.tables.stored_tables import TableReport, reports_of
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.trainer.operation import Operation, PendingAnswer, nothing
from dtrans.protocol.trainer.trainer_line import TrainerLine


Landing = tuple[str, str, np.ndarray]  # a block to receive: server, name and memory


def leave(line: TrainerLine) -> Operation[None]:
    """Send `complete`, and wait for the server's `goodbye`."""
    line.tell("complete")
    answer = PendingAnswer(line, "`complete`", "goodbye", {}, "its goodbye", skips=True)
    return Operation([answer], _answer_goodbye)


def _answer_goodbye(answers: Sequence[PendingAnswer]) -> None:
    answers[0].line.answer_goodbye()


@dataclasses.dataclass(frozen=True, eq=False)
class LookedUp:
    """Rows of a table that a step looks up.

    Attributes:
      table: name of the table.
      uniq: row ids.
      rows: memory for the rows.
      wanted: the lookup in each block.
    """

    table: str
    uniq: np.ndarray
    rows: np.ndarray
    wanted: Sequence[WantedRows]


class TrainerSteps:
    """The steps of one trainer.

    Args:
      line: returns the line to an endpoint.

    Attributes:
      sync_mode: the trainer makes synchronous steps.
      in_step: it is in the middle of a synchronous step: from its first gradient to its last block.
    """

    def __init__(self, line: Callable[[str], TrainerLine]) -> None:
        self.sync_mode = True
        self.in_step = False
        self._line = line
        self._outbox: dict[str, list[tuple[str, Any]]] = {}
        self._outbox_bytes: dict[str, int] = {}
        # servers with a gradient of this step, sent or in the outbox
        self._sent_to: set[str] = set()
        self._asked: dict[str, list[Any]] = {}  # the blocks that each server was last asked for
        # by the step that looks them up, and the table
        self._announced: dict[int, dict[str, LookedUp]] = {}
        # the checkpoint that servers write, and the number of the request to each
        self._saves: tuple[str, dict[str, int]] = ("", {})

    def send(self, endpoint: str, name: str, block: np.ndarray) -> None:
        """Send a gradient, now or with a later message."""
        self.in_step = self.sync_mode
        self._sent_to.add(endpoint)
        self._outbox.setdefault(endpoint, []).append((name, block))
        self._outbox_bytes[endpoint] = self._outbox_bytes.get(endpoint, 0) + block.nbytes
        if self._outbox_bytes[endpoint] >= wire.MESSAGE_BYTES:
            line = self._line(endpoint)
            line.send_blocks(self._outbox.pop(endpoint))
            self._outbox_bytes.pop(endpoint)

    def exchange(
        self, endpoint: str, number: int, values: Sequence[tuple[Any, Sequence[Any]]]
    ) -> Operation[list[Any]]:
        """Exchange values with all trainers: each sends a part.

        Args:
          values: parts, each with the collective that merges them (`dtrans.ops.rpc`).
        """
        line = self._line(endpoint)
        line.exchange(number, values)
        answer = PendingAnswer(
            line,
            f"`exchange` of round {number}",
            "exchanged",
            {"step": line.step, "round": number},
            f"the exchange of round {number} of step {line.step}",
            room=_room_of_round,
        )
        return Operation([answer], _memory_of_first)

    def prefetch(self, wanted: Sequence[WantedRows], *, train: bool) -> Operation[None]:
        """Receive rows of tables.

        Args:
          wanted: rows of each block, with their memory.
          train: gradients of these rows follow in this step.
        """
        answers = []
        for endpoint, name, ids, rows in wanted:
            line = self._line(endpoint)
            number, what = line.new_request(), f"{len(rows)} rows of {name} in step {line.step}"
            line.prefetch(name, ids, train=train, request=number)
            fields, memory = {"step": line.step}, {name: rows}
            answers.append(
                PendingAnswer(
                    line, f"`prefetch` of {name}", "rows", fields, what, number, memory=memory
                )
            )
        return Operation(answers, nothing)

    def announce(self, lookups: Sequence[LookedUp]) -> None:
        """Ask for the rows of tables that the next unannounced step looks up.

        Raises:
          StateError: too many steps are announced.
        """
        endpoints = [w[0] for x in lookups for w in x.wanted]
        now = self._line(endpoints[0]).step
        target = max([now, *self._announced]) + 1
        if target - now > rows_ahead.MOST:
            raise StateError(
                f"{rows_ahead.MOST} batches were announced (job.prefetch), and no step was made: "
                "make the steps"
            )
        for x in lookups:
            for endpoint, name, ids, rows in x.wanted:
                line = self._line(endpoint)
                line.ahead.expect(name, target, rows)
                line.prefetch(name, ids, train=True, ahead=target - line.step)
        self._announced[target] = {x.table: x for x in lookups}

    def announced(self, table: str, uniq: np.ndarray, now: int) -> LookedUp | None:
        """Return the rows that were announced for this step, once, if the step looks up the same
        ones.

        Args:
          uniq: row ids that the step looks up.
          now: number of the step.
        """
        for step in [x for x in self._announced if x < now]:
            for name in list(self._announced[step]):
                self._collect(step, name)
            del self._announced[step]
        if table not in self._announced.get(now, {}):
            return None
        found = self._collect(now, table)
        return found if np.array_equal(found.uniq, uniq) else None

    def _forget_announced(self, blocks: Sequence[tuple[str, str]]) -> None:
        """Forget announced rows of blocks: servers have evicted some."""
        for step, tables in self._announced.items():
            for x in [x for x in tables.values() if (x.wanted[0][0], x.wanted[0][1]) in blocks]:
                for endpoint, name, *_ in tables.pop(x.table).wanted:
                    self._line(endpoint).ahead.forget(name, step)

    def _collect(self, step: int, table: str) -> LookedUp:
        found = self._announced[step].pop(table)
        for endpoint, name, *_ in found.wanted:
            self._line(endpoint).ahead.collect(name, step)
        return found

    def request(
        self, landings: Sequence[Landing], endpoints: Sequence[str], barriered: Collection[str]
    ) -> Operation[None]:
        """End the step, and receive blocks.

        Args:
          endpoints: servers that are asked also for no block: they answer when all trainers have
            come.
          barriered: servers that receive a `send_barrier`.
        """
        wanted: dict[str, dict[str, np.ndarray]] = {ep: {} for ep in (*endpoints, *self._sent_to)}
        for endpoint, name, rows in landings:
            wanted.setdefault(endpoint, {})[name] = rows
        for endpoint, blocks in wanted.items():
            line = self._line(endpoint)
            table = [[n, list(b.shape), b.dtype.name] for n, b in blocks.items()]
            news = {} if self._asked.get(endpoint) == table else {"blocks": table}
            self._asked[endpoint] = table
            rest = self._outbox.pop(endpoint, [])
            line.end_step(
                rest, sent=endpoint in self._sent_to, barrier=endpoint in barriered, **news
            )
            self._outbox_bytes.pop(endpoint, None)
        self._sent_to.clear()
        return Operation([_landing(self._line(ep), x) for ep, x in wanted.items()], self._end_step)

    def _end_step(self, answers: Sequence[PendingAnswer]) -> None:
        self.in_step = False

    def save(self, endpoints: Sequence[str], name: str, steps: int) -> Operation[None]:
        """Ask servers to save their state, between two steps.

        `saved` waits until it is written, and comes before the next `save`.

        Args:
          steps: number of steps that this trainer has made.
        """
        asked = {}
        for endpoint in endpoints:
            line = self._line(endpoint)
            asked[endpoint] = line.ask("save", name=name, made=steps)
            line.saved[asked[endpoint]] = None
        self._saves = name, asked
        return Operation([], nothing)

    def saved(self) -> Operation[None]:
        """Wait until servers have written the checkpoint of the last `save`, if there is one.

        The operation raises CheckpointError when all have answered and some could not write; the
        job continues.
        """
        (name, asked), self._saves = self._saves, ("", {})
        lines = [self._line(endpoint) for endpoint in asked]
        request, what = f"`save` of {name}", f"its part of checkpoint {name}"
        answers = [
            PendingAnswer(
                line, request, "saved", {"name": name}, what, asked[line.endpoint], saving=lines
            )
            for line in lines
        ]
        return Operation(answers, functools.partial(_check_saved, name))

    def tables(self, endpoints: Sequence[str]) -> Operation[list[TableReport]]:
        """Report the rows of tables that servers hold, between two steps."""
        lines = [self._line(endpoint) for endpoint in endpoints]
        what = "what it has of tables"
        answers = [PendingAnswer(x, "`tables`", "report", {}, what, x.ask("tables")) for x in lines]
        return Operation(answers, _reports)

    def evict(self, blocks: Sequence[tuple[str, str]], unused_for: int) -> Operation[int]:
        """Let servers evict the rows of blocks that no recent step has updated; the result is their
        number.

        The operation raises PeerError when all have answered and some could not evict; the job
        continues.

        Args:
          blocks: server and name of each.
        """
        answers = []  # one by one: one eviction of all trainers is open at a time
        for endpoint, name in blocks:
            line = self._line(endpoint)
            what = f"rows of {name} to be given up after step {line.step}"
            ask = "evict", {"table": name, "unused_for": unused_for}
            fields = {"table": name}
            answers.append(
                PendingAnswer(line, f"`evict` of {name}", "evicted", fields, what, ask=ask)
            )
        return Operation(answers, functools.partial(self._end_eviction, blocks))

    def _end_eviction(
        self, blocks: Sequence[tuple[str, str]], answers: Sequence[PendingAnswer]
    ) -> int:
        self._forget_announced(blocks)
        for endpoint, why in _failures(answers).items():
            raise PeerError(f"pserver {endpoint} has not given up rows: {why}")
        return sum(x.reply["count"] for x in answers)

    def changed(
        self, blocks: Sequence[tuple[str, str]], since: int
    ) -> Operation[list[tuple[int, np.ndarray, np.ndarray]]]:
        """Receive, for each block, its step, the rows changed by steps after `since`, and those
        evicted.

        Args:
          blocks: server and name of each.
        """
        answers = [
            PendingAnswer(
                self._line(endpoint),
                f"`changed_since` of {name}",
                "changes",
                {"table": name},
                f"which rows of {name} have changed since step {since}",
                ask=("changed_since", {"table": name, "since": since}),
                room=_room_of_changes,
            )
            for endpoint, name in blocks
        ]
        return Operation(answers, _changes)

    def forget_asked(self) -> None:
        """Name the wanted blocks again: other jobs use these lines, too."""
        self._asked.clear()


def _landing(line: TrainerLine, blocks: Mapping[str, np.ndarray]) -> PendingAnswer:
    """Return the answer to a `recv`, which comes also if no block is wanted."""
    what = f"`recv` of step {line.step}"
    fields = {"step": line.step}
    return PendingAnswer(line, what, "blocks", fields, what, memory=blocks, lists_blocks=True)


def _room_of_round(message: wire.Message) -> dict[str, np.ndarray]:
    return {str(i): np.empty(s, np.dtype(t)) for i, (t, s) in enumerate(message["values"])}


def _memory_of_first(answers: Sequence[PendingAnswer]) -> list[Any]:
    return list((answers[0].memory or {}).values())


def _room_of_changes(message: wire.Message) -> dict[str, np.ndarray]:
    sizes = {"ids": message["count"], "gone": message["gone"]}
    return {n: np.empty(size, np.int32) for n, size in sizes.items()}


def _changes(answers: Sequence[PendingAnswer]) -> list[tuple[int, np.ndarray, np.ndarray]]:
    for endpoint, why in _failures(answers).items():
        raise PeerError(f"pserver {endpoint} does not know what has changed: {why}")
    return [(x.reply["now"], *(x.memory or {}).values()) for x in answers]


def _reports(answers: Sequence[PendingAnswer]) -> list[TableReport]:
    return [report for x in answers for report in reports_of(x.reply["tables"])]


def _check_saved(name: str, answers: Sequence[PendingAnswer]) -> None:
    failed = _failures(answers)
    if failed:
        part = f"has not saved its part of checkpoint {name}"
        raise CheckpointError(
            "; ".join(f"pserver {endpoint} {part}: {why}" for endpoint, why in failed.items())
        )


def _failures(answers: Sequence[PendingAnswer]) -> dict[str, str]:
    """Return the servers that could not do it, and the last reason of each."""
    return {x.line.endpoint: x.reply["error"] for x in answers if x.reply["error"]}
