"""Messages of one trainer's steps, and the servers' answers.

A method that needs answers returns an `Operation`. The caller passes the servers' messages to it.

    send      adds a gradient to the outbox for a server
    request   ends the step: sends each server its outbox and the names of blocks to receive
    exchange  sends values that a server merges over all trainers, and receives the result

Read next: `announced_lookups`, which requests the table rows that a later step will look up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import CheckpointError, PeerError
from dtrans.protocol import wire
from dtrans.protocol.tables.stored_tables import TableReport, reports_of
from dtrans.protocol.tables.table_rows import WantedRows, by_server
from dtrans.protocol.trainer.announced_lookups import AnnouncedLookups
from dtrans.protocol.trainer.operation import Operation, PendingAnswer, nothing, some_names
from dtrans.protocol.trainer.trainer_line import TrainerLine


# Block to receive: the server's endpoint, the block's name, and memory for the block
Landing = tuple[str, str, np.ndarray]


def leave(line: TrainerLine) -> Operation[None]:
    """Tell a server that this trainer has finished; return the operation that waits for its answer.

    Args:
      line: the trainer's requests to the server.
    """
    line.tell("complete")
    answer = PendingAnswer(line, "`complete`", "goodbye", {}, "its goodbye", skips=True)
    return Operation([answer], _answer_goodbye)


def _answer_goodbye(answers: Sequence[PendingAnswer]) -> None:
    answers[0].line.answer_goodbye()


class TrainerSteps:
    """Messages that one trainer sends to parameter servers in each step, without a communicator.

    Args:
      line: function that maps a server's endpoint to the trainer's `TrainerLine` for this server.

    Attributes:
      sync_mode: True if the trainer makes synchronous steps.
      tells_counts: True if an asynchronous trainer sends its step count to all servers with its
        first request for parameters. A server may have counted fewer steps before a failure. False
        with GEO-SGD, which corrects the counts in another way.
      announced: the lookups that the trainer has announced for later steps.
      in_step: True from the first gradient of a synchronous step until its last block is received.
      level: for compressed gradients with sizes that change between steps, the index of the sizes.
    """

    def __init__(self, line: Callable[[str], TrainerLine]) -> None:
        self.sync_mode = self.tells_counts = True
        self.in_step = False
        self.level = 0
        self._line = line
        self._outbox: dict[str, list[tuple[str, Any]]] = {}
        self._outbox_bytes: dict[str, int] = {}
        self._sent_to: set[str] = set()  # endpoints for which `send` was called in this step
        # endpoint -> blocks that this trainer has last requested from the server
        self._asked: dict[str, list[Any]] = {}
        self.announced = AnnouncedLookups(line)
        # name of the pending checkpoint, and endpoint -> number of the `save` request
        self._saves: tuple[str, dict[str, int]] = ("", {})

    def send(self, endpoint: str, name: str, block: np.ndarray) -> None:
        """Send a gradient to a server, at the latest when the step ends.

        Gradients are collected first, so that small ones share a message. An asynchronous trainer
        sends full messages early. A synchronous trainer sends all gradients when it ends the step,
        because its request for parameters precedes them.

        Args:
          endpoint: endpoint of the server.
          name: name of the gradient's block (the part of a gradient for one server).
          block: the rows of the block.
        """
        self.in_step = self.sync_mode
        self._sent_to.add(endpoint)
        self._outbox.setdefault(endpoint, []).append((name, block))
        self._outbox_bytes[endpoint] = self._outbox_bytes.get(endpoint, 0) + block.nbytes
        if not self.sync_mode and self._outbox_bytes[endpoint] >= wire.MESSAGE_BYTES:
            line = self._line(endpoint)
            line.send_blocks(self._outbox.pop(endpoint))
            self._outbox_bytes.pop(endpoint)

    def exchange(
        self, endpoint: str, number: int, values: Sequence[tuple[Any, Sequence[Any]]]
    ) -> Operation[list[Any]]:
        """Send this trainer's values for a collective that a server computes within a step.

        The n-th such collective in a step is its round n. The operation receives the merged values.

        Args:
          endpoint: endpoint of the server that merges the values.
          number: number of the round in the step.
          values: each value, with the collective that merges it (`dtrans.ops.rpc`): its name and
            arguments.
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
        """Request rows of tables for this step, with one message to each server.

        Args:
          wanted: rows of each block, with the memory that receives them.
          train: True if gradients of these rows follow in this step.
        """
        answers = []
        for endpoint, (ids, memory) in by_server(wanted).items():
            line = self._line(endpoint)
            number = line.new_request()
            line.prefetch(ids, train=train, request=number)
            names = some_names(list(memory))
            what = f"{sum(map(len, ids.values()))} rows of {names} in step {line.step}"
            fields = {"step": line.step}
            answers.append(
                PendingAnswer(
                    line, f"`prefetch` of {names}", "rows", fields, what, number, memory=memory
                )
            )
        return Operation(answers, nothing)

    def request(
        self, landings: Sequence[Landing], endpoints: Sequence[str], barriered: Collection[str]
    ) -> Operation[None]:
        """End the step: send the remaining gradients, and request the new parameters.

        A parameter is divided into blocks, each on one server. The operation receives the blocks.

        Args:
          landings: the blocks to receive.
          endpoints: endpoints of servers that must answer even if no block is requested from them.
            These servers answer when all trainers have ended the step.
          barriered: endpoints of the servers that receive `send_barrier`.
        """
        wanted: dict[str, dict[str, np.ndarray]] = {ep: {} for ep in (*endpoints, *self._sent_to)}
        for endpoint, name, rows in landings:
            wanted.setdefault(endpoint, {})[name] = rows
        lines = {endpoint: self._line(endpoint) for endpoint in wanted}
        count = max((line.count for line in lines.values()), default=0)
        for endpoint, blocks in wanted.items():
            line = lines[endpoint]
            table = [[n, list(b.shape), b.dtype.name] for n, b in blocks.items()]
            news: dict[str, Any] = {}
            if self._asked.get(endpoint) != table:
                news = {"blocks": table}
                if not self.sync_mode and self.tells_counts and count:
                    news["count"] = count
            self._asked[endpoint] = table
            rest = self._outbox.pop(endpoint, [])
            line.level = self.level
            line.end_step(
                rest, sent=endpoint in self._sent_to, barrier=endpoint in barriered, **news
            )
            self._outbox_bytes.pop(endpoint, None)
        self._sent_to.clear()
        return Operation([_landing(self._line(ep), x) for ep, x in wanted.items()], self._end_step)

    def _end_step(self, answers: Sequence[PendingAnswer]) -> None:
        self.in_step = False

    def save(
        self,
        endpoints: Sequence[str],
        name: str,
        steps: int,
        arrays: Mapping[str, Sequence[tuple[str, Any]]] = {},
    ) -> Operation[None]:
        """Request a checkpoint from servers, between two steps.

        The caller must complete `saved` before it calls `save` again.

        Args:
          endpoints: endpoints of the servers.
          name: name of the checkpoint.
          steps: number of steps that this trainer has made.
          arrays: arrays of this trainer that servers save: endpoint of the server -> pairs of a
            name and an array.
        """
        asked = {}
        for endpoint in endpoints:
            line = self._line(endpoint)
            asked[endpoint] = line.save(name, steps, arrays.get(endpoint, ()))
            line.saved[asked[endpoint]] = None
        self._saves = name, asked
        return Operation([], nothing)

    def saved(self) -> Operation[None]:
        """Return the operation that waits until all servers have written the requested checkpoint.

        If a server could not write its part, the operation raises CheckpointError after all servers
        have answered. The job can continue afterwards.
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
        """Request a report of each table from the servers: its number of rows and its memory.

        Call it between two steps.

        Args:
          endpoints: endpoints of the servers.
        """
        lines = [self._line(endpoint) for endpoint in endpoints]
        what = "its report of tables"
        answers = [PendingAnswer(x, "`tables`", "report", {}, what, x.ask("tables")) for x in lines]
        return Operation(answers, _reports)

    def evict(self, blocks: Sequence[tuple[str, str]], unused_for: int) -> Operation[int]:
        """Ask servers to delete table rows that had no update recently.

        The operation's result is the number of deleted rows. When all servers have answered, the
        operation raises PeerError if a server could not delete rows. The job can continue
        afterwards.

        Args:
          blocks: server and name of each block of a table.
          unused_for: number of steps; a row is evicted if the last `unused_for` steps did not
            update it.
        """
        # The requests are sent one by one, because a server accepts an eviction only when all
        # trainers have requested the previous eviction.
        answers = []
        for endpoint, name in blocks:
            line = self._line(endpoint)
            what = f"the eviction of rows of {name} after step {line.step}"
            ask = "evict", {"table": name, "unused_for": unused_for}
            fields = {"table": name}
            answers.append(
                PendingAnswer(line, f"`evict` of {name}", "evicted", fields, what, ask=ask)
            )
        return Operation(answers, functools.partial(self._end_eviction, blocks))

    def _end_eviction(
        self, blocks: Sequence[tuple[str, str]], answers: Sequence[PendingAnswer]
    ) -> int:
        self.announced.forget(blocks)
        for endpoint, why in _failures(answers).items():
            raise PeerError(f"pserver {endpoint} could not evict rows: {why}")
        return sum(x.reply["count"] for x in answers)

    def changed(
        self, blocks: Sequence[tuple[str, str]], since: int
    ) -> Operation[list[tuple[int, np.ndarray, np.ndarray]]]:
        """Ask servers for the ids of the table rows that were changed or evicted after a step.

        A table is divided into blocks, each on one server. For each block, the operation's result
        has its current step, the ids of the changed rows, and the ids of the evicted rows.

        Args:
          blocks: server and name of each block of a table.
          since: number of a step.
        """
        answers = []
        for endpoint, name in blocks:
            answers.append(
                PendingAnswer(
                    self._line(endpoint),
                    f"`changed_since` of {name}",
                    "changes",
                    {"table": name},
                    f"the ids of rows of {name} that have changed since step {since}",
                    ask=("changed_since", {"table": name, "since": since}),
                    room=_room_of_changes,
                )
            )
        return Operation(answers, _changes)

    def forget_connections(self) -> None:
        """Prepare for new connections to the servers, after a failure: forget all sent requests."""
        self.forget_asked()
        self._saves = "", {}

    def forget_asked(self) -> None:
        """Forget the names of requested parameters, because another job has used the connections.

        The next `request` sends the names to the servers again.
        """
        self._asked.clear()


def _landing(line: TrainerLine, blocks: Mapping[str, np.ndarray]) -> PendingAnswer:
    """Return the pending answer to a request for parameters (`recv`).

    The server also answers if no parameters are requested from it.
    """
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
        raise PeerError(f"pserver {endpoint} could not list the changed rows: {why}")
    return [(x.reply["now"], *(x.memory or {}).values()) for x in answers]


def _reports(answers: Sequence[PendingAnswer]) -> list[TableReport]:
    return [report for x in answers for report in reports_of(x.reply["tables"])]


def _check_saved(name: str, answers: Sequence[PendingAnswer]) -> None:
    failed = _failures(answers)
    if failed:
        part = f"could not save its part of checkpoint {name}"
        raise CheckpointError(
            "; ".join(f"pserver {endpoint} {part}: {why}" for endpoint, why in failed.items())
        )


def _failures(answers: Sequence[PendingAnswer]) -> dict[str, str]:
    """Return the last error of each server that reported one, by the server's endpoint."""
    return {x.line.endpoint: x.reply["error"] for x in answers if x.reply["error"]}
