"""Registry of one server's trainers: connections, lost trainers and late trainers.

The registry sends no messages and reads no clock. The caller passes the time as an argument, and
sends the messages that methods return.

Read next: `trainer_state` (state of one trainer) and `lost_trainers` (failures).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from dtrans.errors import DeadlineError, WireError
from dtrans.protocol import wire
from dtrans.protocol.generations import Generation
from dtrans.protocol.server.admission import check_connection, check_job, check_plan
from dtrans.protocol.server.lost_trainers import LostTrainers
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.server_blocks import ServerBlocks
from dtrans.protocol.transport import RETRY
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.pserver")

# say(to, op, blocks=(), **fields) sends a message to the address of a trainer, or to the endpoint
# of another server.
Say = Callable[..., None]


class TrainerRegistry:
    """Registry of the trainers of one server.

    Args:
      served: the server's blocks.
      deadline: seconds within which all trainers must connect.
      plan: digest (hash) of each part of the plan, by name; a trainer with other digests is
        refused.
      secret: the job's token.
      retry: seconds that the server waits for a reconnection.
      busy: ids of trainers that were connected in the previous generation. The deadline does not
        apply to these trainers: each may first finish the user's code between two steps, and then
        greet the server.
      generation: the generation; None in a job without snapshots. The generation names
        the trainers that take no part, and the current process of each other trainer.
      sessions: random words that identify the processes of the trainers in earlier generations, by
        trainer id.

    Attributes:
      endpoint: endpoint of the server.
      plan: the argument `plan`.
      dropped: ids of the lost trainers that take no part in this generation.
      left_before: ids of the trainers that left in an earlier generation.
      count: number of trainers of the job.
      deadline: the argument `deadline`.
      started: time at which the server began to wait for trainers.
      known: state of each trainer that has greeted this server, by trainer id.
      by_address: id of each trainer in `known`, by the trainer's address.
      to_servers: number of bytes of all messages to other servers.
      silent: number of open connections on which nothing has been received.
    """

    def __init__(
        self,
        served: ServerBlocks,
        *,
        deadline: float,
        plan: Mapping[str, str] = {},
        secret: str = "",
        retry: float = RETRY,
        busy: Collection[int] = (),
        generation: Generation | None = None,
        sessions: Mapping[int, str] = {},
    ) -> None:
        generation = generation or Generation()
        self._busy, self.dropped = frozenset(busy), frozenset(generation.dropped)
        self.left_before, self._sessions_before = frozenset(generation.left), sessions
        self._incarnations = dict(enumerate(generation.incarnations))
        self.endpoint, self.count = served.endpoint, served.trainers
        self.plan, self.deadline = plan, deadline
        self.secret = secret
        self._refused: dict[int, str] = {}  # id of a refused trainer -> reason
        self.started, self._reminder = 0.0, WaitReminder()
        self.to_servers = self.silent = 0
        self._served = served
        self.known: dict[int, Trainer] = {}
        self.by_address: dict[bytes, int] = {}
        expected = set(range(self.count)) - self.dropped - self.left_before
        self._losses = LostTrainers(self.endpoint, self.known, expected, retry)

    @property
    def present(self) -> list[int]:
        """Ids of the trainers that have connected, and have not left."""
        return [k for k, t in self.known.items() if not t.done]

    @property
    def left(self) -> list[int]:
        """Ids of the trainers that have left, also in an earlier generation (part of the job)."""
        return [*self.left_before, *(k for k, t in self.known.items() if t.done)]

    def left_before_step(self, k: int, step: int) -> bool:
        """Return True if trainer k takes no part in the current step, since it left earlier.

        Args:
          k: id of the trainer.
          step: number of the server's updates so far.
        """
        if k in self.dropped or k in self.left_before:
            return True
        return k in self.known and self.known[k].done and self.known[k].left_at < step

    @property
    def unseen(self) -> list[int]:
        """Ids of the trainers that have not connected yet."""
        absent = self.dropped | self.left_before
        return [k for k in range(self.count) if k not in self.known and k not in absent]

    @property
    def served(self) -> bool:
        """True if all trainers have connected and left."""
        return not self.unseen and all(t.done for t in self.known.values())

    def due(self, said: Collection[int]) -> list[int]:
        """Return the ids of the trainers that have not left and are not in `said`.

        The trainers that have not connected yet come first.

        Args:
          said: ids of the trainers that have sent the message that the server waits for.
        """
        return self.unseen + [k for k in self.present if k not in said]

    def all_said(self, said: Collection[int]) -> bool:
        """Return True if all trainers that have not left have sent some message.

        Return False if no trainer has sent it.

        Args:
          said: ids of the trainers that have sent the message.
        """
        return bool(said) and not self.due(said)

    @property
    def parted(self) -> bool:
        """True if all trainers have left, and the server need not send `goodbye` to any of them."""
        return self.served and all(t.parted or t.failed or t.local for t in self.known.values())

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of all messages to trainers and other servers."""
        return self.to_servers + sum(t.sent for t in self.known.values())

    @property
    def sessions_by_id(self) -> dict[int, str]:
        """Words that identify the processes of trainers, by trainer id.

        Trainers of earlier generations are included.
        """
        return {**self._sessions_before, **{k: t.session for k, t in self.known.items()}}

    @property
    def sessions(self) -> tuple[str, ...]:
        """Words that identify the trainers' processes, in the order of the trainers' ids.

        Together, the words identify this run of the job. They include trainers that have left.
        """
        words = self.sessions_by_id
        return tuple(words[k] for k in sorted(words) if k in self.known or k in self.left_before)

    # -- messages --------------------------------------------------------------------------------

    def hello(self, address: bytes, message: wire.Message, peer: str | None) -> str:
        """Register a trainer, or register the new connection of a known trainer.

        Args:
          address: address of the sender.
          message: the `hello` message.
          peer: endpoint of the server that has greeted from the same address, or None.

        Returns:
          An empty text if the trainer is registered, else the reason why it has to wait.

        Raises:
          WireError: the trainer is refused.
        """
        k = message["trainer"]
        check_job(self._served, message)
        if k in self.dropped:
            raise WireError(f"trainer {k} was lost, and the job continues without it")
        if message.fields.get("incarnation", 0) < self._incarnations.get(k, 0):
            # The sender has greeted for the next generation, and was lost before that generation
            # began.
            raise WireError(f"the launcher has started another process of trainer {k}")
        known = self.known.get(k)
        is_same = known is not None and known.session == message["session"]
        has_left = known is not None and known.done and (known.failed or not is_same)
        if has_left or k in self.left_before:
            if known is not None and known.failed:
                raise WireError(f"trainer {k} has left, and cannot come back to this job")
            # The sender belongs to the next job on this endpoint, and waits for that job's server.
            return f"the end of a job of {self.count} trainers, which trainer {k} has left"
        self._check_identity(k, address, message, peer)

        if known is None:
            if message.fields.get("back", False):
                raise WireError(
                    f"trainer {k} was in a job of pserver {self.endpoint} that has ended"
                )
            self.known[k] = Trainer.from_hello(address, message)
        else:
            before = known.address
            known.move(address, message)
            del self.by_address[before]
        self.by_address[address] = k
        self._refused.pop(k, None)
        return ""

    def _check_identity(
        self, k: int, address: bytes, message: wire.Message, peer: str | None
    ) -> None:
        """Raise WireError if the sender of a `hello` may not connect as trainer k.

        For example, another process is already trainer k, or the sender has another plan.
        """
        known = self.known.get(k)
        if known is not None:
            check_connection(message, known.session, known.connection)
        if peer is not None:
            raise WireError(f"pserver {peer} sent a `hello` message as trainer {k}")
        try:
            check_plan(f"pserver {self.endpoint}", self.plan, f"trainer {k}", message)
        except WireError as e:
            self._refused[k] = str(e)
            raise
        if self.by_address.get(address, k) != k:
            raise WireError(
                f"trainer {k} has already said hello as trainer {self.by_address[address]}"
            )

    def framed(
        self, to: bytes, op: str, blocks: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> Iterator[list[Any]]:
        """Yield the frames of each message to an address.

        If the address belongs to a trainer, number and store the messages, and count their bytes.
        After a reconnection, the server repeats the messages that the trainer lacks.
        """
        k = self.by_address.get(to)
        if k is None:
            yield from wire.framed(op, blocks, **fields)
            return
        for frames in self.known[k].framed(op, blocks, fields):
            self.known[k].sent += sum(map(len, frames))
            yield frames

    def back(self, address: bytes) -> None:
        """Note that the trainer at an address is connected again, and so is not lost.

        Args:
          address: address in the listener's `connected` event.
        """
        k = self.by_address.get(address)
        if k is not None:
            self.known[k].lost = None

    def lose(self, address: bytes, now: float) -> None:
        """Note the end of the connection at an address. Its last messages may still be unread."""
        k = self.by_address.get(address)
        if k is not None:
            self.known[k].lost = now

    def died(self, k: int, how: str, now: float) -> None:
        """Note the end of trainer k's process. Its last messages may still be unread."""
        self._losses.died(k, how, now)

    def part(self, k: int) -> None:
        """Handle trainer k's answer to `goodbye`; raise WireError if trainer k has not left."""
        if not self.known[k].done:
            raise WireError(
                f"trainer {k} sent pserver {self.endpoint} `goodbye`, but `complete` must come "
                "first"
            )
        self.known[k].parted = True

    def speaker(self, address: bytes, message: wire.Message) -> int:
        """Return the sender's id; raise WireError unless the sender is a live trainer."""
        if address not in self.by_address:
            raise WireError(
                f"a `{message.op}` message from a peer that has not said hello; pserver "
                f"{self.endpoint} expects `hello` first"
            )
        k = self.by_address[address]
        if self.known[k].done:
            raise WireError(
                f"a `{message.op}` message of trainer {k}, which has left; pserver "
                f"{self.endpoint} expects no further message from trainer {k}"
            )
        return k

    # -- lost and late trainers ------------------------------------------------------------------

    def lost(self, now: float) -> dict[int, str]:
        """Return the reason why each lost trainer's connection or process ended, by trainer id."""
        # A connection without a message may be trainer k's new connection: a trainer sends
        # `hello` only after its current computation, which may be long.
        patience = self.deadline if self.silent else 0.0
        return self._losses.reasons(now, patience, self._refused)

    def look(self, now: float) -> None:
        """Set `parted` for the trainers that have left and can no longer receive `goodbye`.

        Their process has ended, or they did not reconnect in time.
        """
        for k, t in self.known.items():
            t.parted = t.parted or (t.done and self._losses.is_gone(k, now))
            # a trainer that has not failed may still reconnect, and receive `goodbye`
            if t.failed:
                t.messages.clear()

    def begin(self, now: float) -> None:
        """Start to wait for the trainers."""
        self.started = now
        self._reminder.begin(now)

    def absent(self, now: float) -> list[int]:
        """Return the ids of the trainers that have not connected; log them if a log line is due.

        Raises:
          DeadlineError: the deadline has passed, and some trainers have not connected.
        """
        absent = self.unseen
        if absent and (waited := self._reminder.due(now)):
            text = "pserver %s has waited %.0f s for %s to say hello"
            log.warning(text, self.endpoint, waited, named(absent))
        late = [k for k in absent if k not in self._busy]
        if late and now - self.started > self.deadline:
            why = "".join(f"; {self._refused[k]}" for k in late if k in self._refused)
            raise DeadlineError(
                f"pserver {self.endpoint} waited {now - self.started:.1f} s for {named(late)} to "
                f"say hello{why}"
            )
        return absent


def named(trainers: Sequence[int]) -> str:
    """Return a text with the names of trainers, such as "trainers 0, 2"."""
    return ("trainer " if len(trainers) == 1 else "trainers ") + ", ".join(map(str, trainers))


def wanted(served: ServerBlocks, k: int, table: Any) -> tuple[str, ...]:
    """Check a trainer's request for blocks, and return the names of the blocks.

    Args:
      served: the server's blocks.
      k: id of the trainer.
      table: field `blocks` of the trainer's `recv`.

    Raises:
      WireError: the field is malformed, or the server has no block of this name and type.
    """
    rows = table if isinstance(table, list) else [None]
    if not all(isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) for row in rows):
        raise WireError(
            "a `recv` message whose field `blocks` is not a list of [name, shape, dtype]"
        )
    for name, shape, dtype in table:
        block = served.params.get(name)
        if block is None:
            raise WireError(
                f"trainer {k} requests block {name}, which pserver {served.endpoint} does not "
                "store; every role must plan the same step"
            )
        if shape != list(block.shape) or dtype != block.dtype.name:
            raise WireError(
                f"trainer {k} plans block {name} as {dtype}{shape}, pserver {served.endpoint} as "
                f"{block.dtype.name}{list(block.shape)}; every role must plan the same step with "
                "the same options"
            )
    return tuple(row[0] for row in table)


def answer(
    say: Say, t: Trainer, names: Sequence[str], step: int, values: Mapping[str, Any]
) -> None:
    """Send a trainer blocks that it has requested; the answer may contain no blocks."""
    fields: dict[str, Any] = {"step": step}
    if not names:
        fields["pieces"] = []
    say(t.address, "blocks", [(n, values[n]) for n in names], **fields)
