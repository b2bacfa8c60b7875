"""One trainer: what it sends in a step, and what it waits for.

What waits is a generator. It yields the line whose answer it waits for, and what that is for
messages, and is sent the answer; whoever runs it decides how to wait (`answered`).

    send      to the outbox of a server; it leaves when it is full, or with the message that ends the step
    announce  a message to each server that has rows which a later step looks up; its answer is
    taken when it comes
    request   one message to each server: what is left in its outbox, that it was all, and what is wanted; then each
              block is received into its memory
    exchange  a message to the server of the round, and its answer
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from dtrans.errors import CheckpointError, PeerError, StateError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.tables import rows_ahead
from dtrans.protocol.tables.held_tables import TableReport, reports_of
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.trainer_line import TrainerLine


T = TypeVar("T")
Waiting = Generator[tuple[TrainerLine, str], wire.Message, T]
Landing = tuple[str, str, np.ndarray]  # a block that is to be received: server, name and memory


def answered(waiting: Waiting[T], receive: Callable[[TrainerLine, str], wire.Message]) -> T:
    """Run what waits to its end, with what `receive` returns as answers."""
    try:
        line, what = next(waiting)
        while True:
            line, what = waiting.send(receive(line, what))
    except StopIteration as done:
        made: T = done.value
        return made
    finally:
        waiting.close()  # where `receive` has raised: nothing is awaited any more


def answer_to(line: TrainerLine, number: int, what: str) -> Waiting[wire.Message]:
    """Wait for the answer to the request with a number, and take no other for it."""
    line.awaited = number
    try:
        return (yield line, what)
    finally:
        line.awaited = 0


def greeted(line: TrainerLine) -> Waiting[str]:
    """Wait for a server's welcome; where else it can be found, or nothing."""
    return line.admit(
        (yield line, "an answer to `hello` (is it running, and is this its endpoint?)")
    )


def left(line: TrainerLine) -> Waiting[None]:
    """Say that this trainer has done, and wait until the server has heard it."""
    line.tell("complete")
    while (yield line, "its goodbye").op != "goodbye":
        pass
    line.answer_goodbye()


@dataclasses.dataclass(frozen=True, eq=False)
class LookedUp:
    """Rows of a table that a step looks up.

    Attributes:
      table: its name.
      uniq: their numbers.
      rows: memory for them.
      wanted: what is asked of each block.
    """

    table: str
    uniq: np.ndarray
    rows: np.ndarray
    wanted: Sequence[WantedRows]


class TrainerSteps:
    """The steps of one trainer.

    Args:
      line: gives the line to an endpoint.

    Attributes:
      sync_mode: whether it is in step with the others.
      in_step: whether it is in the middle of a synchronous step: from its first gradient to its
        last block.
    """

    def __init__(self, line: Callable[[str], TrainerLine]) -> None:
        self.sync_mode = True
        self.in_step = False
        self._line = line
        self._outbox: dict[str, list[tuple[str, Any]]] = {}
        self._outbox_bytes: dict[str, int] = {}
        self._sent_to: set[str] = (
            set()
        )  # the servers that were, or are to be, sent something in this step
        self._asked: dict[str, list[Any]] = {}  # what each server knows to be wanted
        self._announced: dict[
            int, dict[str, LookedUp]
        ] = {}  # by the step that looks them up, and the table
        # the checkpoint that servers write, and the number of the request to each
        self._saves: tuple[str, dict[str, int]] = ("", {})

    def send(self, endpoint: str, name: str, block: np.ndarray) -> None:
        """Send a gradient, now or with what follows."""
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
    ) -> Waiting[list[Any]]:
        """Exchange values of which each trainer has a part, each with the way in which they are
        made one."""
        line = self._line(endpoint)
        line.exchange(number, values)
        inbox: Inbox | None = None
        while inbox is None or inbox.missing():
            message = yield line, f"the exchange of round {number} of step {line.step}"
            if message.op != "exchanged" or (message["step"], message["round"]) != (
                line.step,
                number,
            ):
                raise PeerError(
                    f"pserver {endpoint} answered `exchange` of round {number} with `{message.op}`"
                )
            if inbox is None:
                memory = {
                    str(i): np.empty(s, np.dtype(t)) for i, (t, s) in enumerate(message["values"])
                }
                inbox = Inbox(
                    memory,
                    lambda name: f"pserver {endpoint} answered with {name}, which was not asked",
                )
            inbox.take(message)
        return list(inbox.memory.values())

    def prefetch(self, wanted: Sequence[WantedRows], *, train: bool) -> Waiting[None]:
        """Receive rows of tables.

        Args:
          wanted: of each block.
          train: whether gradients of these rows follow in this step.
        """
        numbers = []
        for endpoint, name, ids, _ in wanted:
            line = self._line(endpoint)
            numbers.append(line.new_request())
            line.prefetch(name, ids, train=train, request=numbers[-1])
        for number, (endpoint, name, _, rows) in zip(numbers, wanted, strict=True):
            line = self._line(endpoint)
            inbox = Inbox({name: rows}, functools.partial(_not_asked, endpoint))
            while inbox.missing():
                message = yield from answer_to(
                    line, number, f"{len(rows)} rows of {name} in step {line.step}"
                )
                if message.op != "rows" or message["step"] != line.step:
                    raise PeerError(
                        f"pserver {endpoint} answered `prefetch` of {name} with `{message.op}`"
                    )
                inbox.take(message)

    def announce(self, lookups: Sequence[LookedUp]) -> None:
        """Ask for the rows of tables that the step looks up which follows those that were
        announced, or the next.

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
        """The rows of a table that were announced for this step, if they are those; they are given
        once.

        Args:
          uniq: the numbers of rows that the step looks up.
          now: the number of the step.
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
        """Forget the rows of blocks that were announced: servers have given some up."""
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
    ) -> Waiting[None]:
        """End the step, and receive blocks.

        Args:
          endpoints: servers that are asked also for nothing: they answer when all trainers are
            there.
          barriered: those that are told that all gradients were sent.
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
        for endpoint, blocks in wanted.items():
            yield from _landed(self._line(endpoint), blocks)
        self.in_step = False

    def save(
        self, endpoints: Sequence[str], name: str, made: int, *, wait: bool = True
    ) -> Waiting[None]:
        """Let servers save what they hold, between two steps; first wait for what they save
        already.

        Args:
          made: how many steps this trainer has made.
          wait: until it is written. Otherwise `saved` does.
        """
        yield from self.saved()
        asked = {}
        for endpoint in endpoints:
            line = self._line(endpoint)
            asked[endpoint] = line.ask("save", name=name, made=made)
            line.saved[asked[endpoint]] = None
        self._saves = name, asked
        if wait:
            yield from self.saved()

    def saved(self) -> Waiting[None]:
        """Wait until servers have written the checkpoint that they were asked for last, if any.

        Raises:
          CheckpointError: a server that could not, when all have answered: the job may go on.
        """
        (name, asked), self._saves = self._saves, ("", {})
        failed: dict[str, str] = {}
        lines = {endpoint: self._line(endpoint) for endpoint in asked}

        def keep_waiting() -> None:
            for line in lines.values():
                line.tell("saving", step=line.step)

        try:
            for endpoint, number in asked.items():
                line = lines[endpoint]
                line.while_it_waits = keep_waiting
                message = line.saved[number]
                if message is None:
                    message = yield from answer_to(line, number, f"its part of checkpoint {name}")
                if message.op != "saved" or message["name"] != name:
                    raise PeerError(
                        f"pserver {endpoint} answered `save` of {name} with `{message.op}`"
                    )
                failed |= {endpoint: message["error"]} if message["error"] else {}
        finally:
            for endpoint, line in lines.items():
                line.while_it_waits = None
                line.saved.pop(asked[endpoint])
        if failed:
            part = f"has not saved its part of checkpoint {name}"
            raise CheckpointError(
                "; ".join(f"pserver {endpoint} {part}: {why}" for endpoint, why in failed.items())
            )

    def tables(self, endpoints: Sequence[str]) -> Waiting[list[TableReport]]:
        """What servers have of tables, between two steps."""
        found = []
        asked = {endpoint: self._line(endpoint).ask("tables") for endpoint in endpoints}
        for endpoint, number in asked.items():
            message = yield from answer_to(self._line(endpoint), number, "what it has of tables")
            if message.op != "report":
                raise PeerError(f"pserver {endpoint} answered `tables` with `{message.op}`")
            found += reports_of(message["tables"])
        return found

    def evict(self, blocks: Sequence[tuple[str, str]], unused_for: int) -> Waiting[int]:
        """Let servers give up rows of blocks that no step has updated for so many; how many they
        are.

        Args:
          blocks: server and name of each.
        """
        count, failed = 0, dict[str, str]()
        for endpoint, name in blocks:  # one by one: all trainers are in one eviction at a time
            line = self._line(endpoint)
            number = line.ask("evict", table=name, unused_for=unused_for)
            message = yield from answer_to(
                line, number, f"rows of {name} to be given up after step {line.step}"
            )
            if message.op != "evicted" or message["table"] != name:
                raise PeerError(
                    f"pserver {endpoint} answered `evict` of {name} with `{message.op}`"
                )
            count += message["count"]
            failed |= {endpoint: message["error"]} if message["error"] else {}
        self._forget_announced(blocks)
        for endpoint, why in failed.items():  # when all have answered: the job may go on
            raise PeerError(f"pserver {endpoint} has not given up rows: {why}")
        return count

    def changed(
        self, blocks: Sequence[tuple[str, str]], since: int
    ) -> Waiting[list[tuple[int, np.ndarray, np.ndarray]]]:
        """Of each block: its step, the rows that steps after one have changed, and those that were
        given up since.

        Args:
          blocks: server and name of each.
        """
        found, failed = [], dict[str, str]()
        for endpoint, name in blocks:
            line = self._line(endpoint)
            number, what = (
                line.ask("changed_since", table=name, since=since),
                f"which rows of {name} have changed",
            )
            inbox: Inbox | None = None
            while inbox is None or inbox.missing():
                message = yield from answer_to(line, number, f"{what} since step {since}")
                if message.op != "changes" or message["table"] != name:
                    raise PeerError(
                        f"pserver {endpoint} answered `changed_since` of {name} with `{message.op}`"
                    )
                if inbox is None:
                    sizes = {"ids": message["count"], "gone": message["gone"]}
                    memory = {n: np.empty(size, np.int32) for n, size in sizes.items()}
                    inbox = Inbox(memory, functools.partial(_not_asked, endpoint))
                inbox.take(message)
            found.append((message["now"], inbox.memory["ids"], inbox.memory["gone"]))
            failed |= {endpoint: message["error"]} if message["error"] else {}
        for endpoint, why in failed.items():
            raise PeerError(f"pserver {endpoint} does not know what has changed: {why}")
        return found

    def forget_asked(self) -> None:
        """Say anew what is wanted: others have asked for other things by these lines."""
        self._asked.clear()


def _landed(line: TrainerLine, blocks: dict[str, np.ndarray]) -> Waiting[None]:
    """Receive blocks until all bytes of all of them are here."""
    inbox = Inbox(blocks, functools.partial(_not_asked, line.endpoint))
    missing = list(blocks)
    while True:  # there is an answer also where nothing was asked for
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        message = yield line, f"`recv` of step {line.step} ({some or 'no blocks'})"
        if message.op != "blocks" or message["step"] != line.step:
            raise PeerError(
                f"pserver {line.endpoint} answered `recv` of step {line.step} with `{message.op}`"
            )
        inbox.take(message)
        missing = inbox.missing()
        if not missing:
            return


def _not_asked(endpoint: str, name: str) -> str:
    return f"pserver {endpoint} sent {name}, which was not asked for"
