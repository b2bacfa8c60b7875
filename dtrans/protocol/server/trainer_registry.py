"""Registry of one server's trainers: admission, and who is late.

The registry decides, and does nothing: times are arguments, and messages are return values.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.ir import fingerprint
from dtrans.protocol import token, wire
from dtrans.protocol.numbered_messages import NumberedMessages
from dtrans.protocol.server_blocks import ServerBlocks
from dtrans.protocol.transport import RETRY
from dtrans.protocol.wait_reminder import WaitReminder


# seconds in which a trainer may move to another connection, and its last messages are read
GRACE = 0.5

log = logging.getLogger("dtrans.pserver")

# (to, op, blocks=(), **fields): sends a message at once, to a known address or to the endpoint of a
# server
Say = Callable[..., None]


@dataclasses.dataclass
class Trainer:
    """State of one trainer at a server."""

    session: str
    address: bytes
    wants: tuple[str, ...] = ()
    lost: float | None = None  # the time at which its connection ended
    local: bool = False  # on a Unix socket, which no network breaks
    connection: int = 0  # number of its connection, from its last `hello`
    messages: NumberedMessages = dataclasses.field(default_factory=NumberedMessages)
    heard_at: float = 0.0  # the time of the last message from it
    received: int = 0  # bytes from it
    sent: int = 0  # bytes to it
    done: bool = False
    failed: bool = False  # done, without `complete`
    parted: bool = False  # done, and it has received the goodbye, or can no longer receive it


class TrainerRegistry:
    """Registry of the trainers of one server.

    Args:
      served: the server's blocks.
      deadline: seconds in which all trainers have to come.
      plan: the parts of the plan's fingerprint; those of every trainer are equal.
      secret: the job's token.
      retry: seconds in which a broken connection may be made again.

    Attributes:
      count: number of trainers of the job.
      started: the time at which the server began to wait for them.
      known: the trainers that have come, by their ids. `by_address` has the ids.
      to_servers: bytes of all messages to other servers.
    """

    def __init__(
        self,
        served: ServerBlocks,
        *,
        deadline: float,
        plan: Mapping[str, str] = {},
        secret: str = "",
        retry: float = RETRY,
    ) -> None:
        self.endpoint = served.endpoint
        self.plan = plan
        self._secret, self._retry = secret, retry
        self._refused: dict[int, str] = {}  # reasons, of trainers that have not come
        self.count = served.trainers
        self.deadline = deadline
        self.started = 0.0
        self._reminder = WaitReminder()
        self._dead: dict[int, tuple[float, str]] = {}  # ended processes: the time, and the exit
        self.to_servers = 0
        self._sync_mode = served.sync_mode
        self.known: dict[int, Trainer] = {}
        self.by_address: dict[bytes, int] = {}

    @property
    def present(self) -> list[int]:
        """The trainers that have come, and have not left."""
        return [k for k, t in self.known.items() if not t.done]

    @property
    def left(self) -> list[int]:
        """The trainers that have left."""
        return [k for k, t in self.known.items() if t.done]

    @property
    def served(self) -> bool:
        """True if all trainers have come, and left."""
        return len(self.known) == self.count and all(t.done for t in self.known.values())

    def due(self, said: Collection[int]) -> list[int]:
        """Return the trainers that have not come, then those present that are not in `said`."""
        absent = [k for k in range(self.count) if k not in self.known]
        return absent + [k for k in self.present if k not in said]

    def all_said(self, said: Collection[int]) -> bool:
        """Return True if all have come, and those present are in `said`, which is not empty."""
        return bool(said) and not self.due(said)

    @property
    def parted(self) -> bool:
        """Return True if all have left, and nobody may come back for a goodbye that was lost."""
        return self.served and all(t.parted or t.failed or t.local for t in self.known.values())

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of all that was said to trainers and other servers."""
        return self.to_servers + sum(t.sent for t in self.known.values())

    @property
    def sessions(self) -> tuple[str, ...]:
        """The session words of the trainers that have come; no other run of the job has one of
        them."""
        return tuple(self.known[k].session for k in sorted(self.known))

    # -- what they say ---------------------------------------------------------------------------

    def hello(self, address: bytes, message: wire.Message, peer: str | None) -> str:
        """Let a trainer join, or move to another connection.

        Args:
          address: of the sender.
          peer: endpoint of the server that has greeted this one from there, if any.

        Returns:
          The reason for which the trainer has to wait; empty if it has joined.

        Raises WireError if it may not join.
        """
        k = message["trainer"]
        self._check_job(k, message)
        known = self.known.get(k)
        is_same = known is not None and known.session == message["session"]
        if known is not None and known.done and (known.failed or not is_same):
            if known.failed or is_same:
                raise WireError(f"trainer {k} has left, and cannot come back to this job")
            # It belongs to the next job on this endpoint. When this server ends, the connection
            # breaks, and it greets the next server.
            return f"the end of a job of {self.count} trainers, which trainer {k} has left"
        self._check_identity(k, address, message, peer)

        local = message.fields.get("local", False)
        if known is None:
            if message.fields.get("back", False):
                raise WireError(
                    f"trainer {k} was in a job of pserver {self.endpoint} that has ended"
                )
            self.known[k] = Trainer(message["session"], address, local=local)
        else:  # it moves to the Unix socket, or its connection is made again
            heard = message.fields.get("heard", 0)
            known.messages.check_resumable(heard)
            known.messages.acknowledge(heard)
            del self.by_address[known.address]
            known.address, known.lost, known.local = address, None, local
        self.known[k].connection = message.fields.get("connection", 0)
        self.by_address[address] = k
        return ""

    def _check_job(self, k: int, message: wire.Message) -> None:
        """Raise WireError if trainer k runs on another platform, or belongs to another job."""
        trainers, sync_mode = message["trainers"], message.fields.get("sync_mode", self._sync_mode)
        if message["order"] != sys.byteorder:
            raise WireError(
                f"trainer {k} is {message['order']}-endian, this server is {sys.byteorder}-endian"
            )
        if trainers != self.count:
            raise WireError(
                f"trainer {k} was planned with {trainers} trainers, pserver {self.endpoint} with "
                f"{self.count}"
            )
        if not 0 <= k < self.count:
            raise WireError(f"trainer {k} of {self.count}: ids are 0 to {self.count - 1}")
        if sync_mode != self._sync_mode:
            modes = {True: "synchronous", False: "asynchronous"}
            raise WireError(
                f"trainer {k} is {modes[not self._sync_mode]}, pserver {self.endpoint} "
                f"{modes[self._sync_mode]}: every role must plan the same mode"
            )

    def _check_identity(
        self, k: int, address: bytes, message: wire.Message, peer: str | None
    ) -> None:
        """Raise WireError if another process is trainer k, or this one has another role or plan."""
        if k in self.known and self.known[k].session != message["session"]:
            raise WireError(
                f"trainer {k} is here already; is DTRANS_TRAINER_ID, or trainer_id, the same in "
                "two processes?"
            )
        if peer is not None:
            raise WireError(f"pserver {peer} cannot be trainer {k} too")
        try:
            check_plan(f"pserver {self.endpoint}", self.plan, f"trainer {k}", message)
        except WireError as e:
            self._refused[k] = str(e)
            raise
        # ZeroMQ may deliver a message from a broken connection after messages from the next one
        if k in self.known and message.fields.get("connection", 0) < self.known[k].connection:
            raise WireError(f"a `hello` from an earlier connection of trainer {k}")
        if self.by_address.get(address, k) != k:
            raise WireError(
                f"trainer {k} has already said hello as trainer {self.by_address[address]}"
            )

    def counted(self, messages: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Count the bytes of messages to another server, and yield the messages."""
        for frames in messages:
            self.to_servers += sum(map(len, frames))
            yield frames

    def framed(
        self, to: bytes, op: str, blocks: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> Iterator[list[Any]]:
        """Yield the frames of each message to an address, and count the bytes sent to a trainer.

        Messages to a trainer are numbered. After a reconnection, the messages that the trainer
        lacks follow its welcome.
        """
        k = self.by_address.get(to)
        if k is None:
            yield from wire.framed(op, blocks, **fields)
            return
        for frames in self._numbered(self.known[k], op, blocks, fields):
            self.known[k].sent += sum(map(len, frames))
            yield frames

    def _numbered(
        self, t: Trainer, op: str, blocks: Sequence[tuple[str, Any]], fields: Mapping[str, Any]
    ) -> Iterator[list[Any]]:
        """Yield the frames of each message to a trainer, after numbering and storing it."""
        is_numbered = op not in wire.UNCOUNTED
        stamp = t.messages.stamp if is_numbered else dict
        for frames in wire.framed(op, blocks, stamp, **fields):
            if is_numbered and not t.local:
                t.messages.store(frames)
            yield frames
        if op == "welcome":
            yield from t.messages.stored

    def back(self, address: bytes) -> None:
        """Note that a connection is made again. Its trainer sends `hello` on it."""
        k = self.by_address.get(address)
        if k is not None:
            self.known[k].lost = None

    def welcome(
        self, message: wire.Message, step: int, heard: int, local: str = ""
    ) -> dict[str, Any]:
        """Return the fields of the welcome that answers a `hello` or a `peer`.

        Args:
          step: the server's step.
          heard: number of messages received from the sender.
          local: path of the server's Unix socket, for trainers on the same host.
        """
        proof = token.shown(self._secret, f"welcome {message.fields.get('nonce', '')}")
        return {"step": step, "local": local, "proof": proof, "heard": heard}

    def lose(self, address: bytes, now: float) -> None:
        """Note that a connection has ended. Its last messages may still be unread."""
        k = self.by_address.get(address)
        if k is not None:
            self.known[k].lost = now

    def died(self, k: int, how: str, now: float) -> None:
        """Note that the process of a trainer has ended. Its last messages may still be unread."""
        self._dead.setdefault(k, (now, how))

    def part(self, k: int) -> None:
        """Note that a trainer has received the goodbye. Raises WireError if none was sent."""
        if not self.known[k].done:
            raise WireError(f"a `goodbye` message of trainer {k}, which has not said `complete`")
        self.known[k].parted = True

    def speaker(self, address: bytes, message: wire.Message) -> int:
        """Return the trainer that has sent a message. Raises WireError if the sender is none."""
        if address not in self.by_address:
            raise WireError(f"a `{message.op}` message from a peer that has not said hello")
        k = self.by_address[address]
        if self.known[k].done:
            raise WireError(f"a `{message.op}` message of trainer {k}, which has left")
        return k

    # -- who is late -----------------------------------------------------------------------------

    def lost(self, now: float) -> dict[int, str]:
        """Return the present trainers whose connection or process has ended, and the reason for
        each."""
        why = "the connection of trainer {} to pserver {} ended without a goodbye"
        gone = [k for k in self.present if self._is_lost(self.known[k], now)]
        return {k: why.format(k, self.endpoint) for k in gone} | self._ended(now)

    def look(self, now: float) -> None:
        """Mark trainers that can no longer receive a goodbye.

        Their connection was not made again in time, or their process has ended.
        """
        for k, t in self.known.items():
            ended = k in self._dead and now - self._dead[k][0] > GRACE
            t.parted = t.parted or (t.done and (ended or self._is_lost(t, now)))
            if t.parted or t.failed:
                t.messages.clear()

    def _is_lost(self, t: Trainer, now: float) -> bool:
        return t.lost is not None and now - t.lost > (GRACE if t.local else self._retry)

    def _ended(self, now: float) -> dict[int, str]:
        """Return the trainers that have not left although their process has ended; register absent
        ones as failed."""
        found: dict[int, str] = {}
        for k, (since, how) in self._dead.items():
            if (
                now - since <= GRACE
                or not 0 <= k < self.count
                or (k in self.known and self.known[k].done)
            ):
                continue
            if k in self.known:
                found[k] = (
                    f"trainer {k} ended with {how}, without a goodbye to pserver {self.endpoint}"
                )
            else:
                self.known[k] = Trainer("", b"", done=True, failed=True)
                found[k] = (
                    f"trainer {k} ended with {how} before it said hello to pserver {self.endpoint}"
                )
                found[k] += f"; {self._refused[k]}" if k in self._refused else ""
        return found

    def begin(self, now: float) -> None:
        """Begin to wait for the trainers."""
        self.started = now
        self._reminder.begin(now)

    def absent(self, now: float) -> list[int]:
        """Return the trainers that have not come. Raises DeadlineError after the deadline."""
        absent = [k for k in range(self.count) if k not in self.known]
        waited = self._reminder.due(now) if absent else 0.0
        if waited:
            log.warning(
                "pserver %s has waited %.0f s for %s to say hello",
                self.endpoint,
                waited,
                named(absent),
            )
        if absent and now - self.started > self.deadline:
            why = "".join(f"; {self._refused[k]}" for k in absent if k in self._refused)
            raise DeadlineError(
                f"pserver {self.endpoint} waited {now - self.started:.1f} s for {named(absent)} to "
                f"say hello{why}"
            )
        return absent


class TrainerExits:
    """Trainers of a synchronous server that leave early, by `on_trainer_exit`.

    Args:
      on_trainer_exit: "error" ends the job. With "drop" later updates do not count their gradients.
        With "paddle" updates count their last gradients once more, and then zeros.
      trainers: the server's trainers.
    """

    def __init__(self, on_trainer_exit: str, trainers: TrainerRegistry) -> None:
        self._policy, self._trainers = on_trainer_exit, trainers
        self._spent: set[int] = set()  # trainers whose last gradients have counted

    def counted(self) -> list[int]:
        """Return the trainers whose gradients an update counts."""
        return list(self._trainers.known) if self._policy == "paddle" else self._trainers.present

    def spend(self, trainers: Collection[int]) -> set[int]:
        """Return those among `trainers` whose gradients are zeros from now on."""
        spent = set(trainers) - self._spent if self._policy == "paddle" else set[int]()
        self._spent |= spent
        return spent

    def check(self, gone: Collection[int], going_on: Collection[int], step: int) -> None:
        """Raise PeerError if some trainers continue after others have left, and may not."""
        if gone and going_on and self._policy == "error":
            raise PeerError(
                f"trainer {min(gone)} closed after step {step} while trainer {min(going_on)} sends "
                f"step {step + 1}: with on_trainer_exit='error' all trainers make the same number "
                "of steps"
            )


def check_plan(me: str, plan: Mapping[str, str], other: str, message: wire.Message) -> None:
    """Raise WireError if the sender of a greeting has another plan; the message names the
    differences."""
    theirs = message.fields.get("plan", {})
    if not all(isinstance(x, str) for row in theirs.items() for x in row):
        raise WireError(f"a `{message.op}` message without a proper plan")
    found = fingerprint.differences(me, plan, other, theirs) if plan else []
    if found and not theirs:
        raise WireError(f"{other} does not say what it plans")
    if found:
        raise WireError(
            f"{other} plans something else than {me}: {'; '.join(found[:4])}; every role must plan "
            "the same step with "
            "the same options"
        )


def named(trainers: Sequence[int]) -> str:
    """Return the names of trainers for a message."""
    return ("trainer " if len(trainers) == 1 else "trainers ") + ", ".join(map(str, trainers))


def wanted(served: ServerBlocks, k: int, table: Any) -> tuple[str, ...]:
    """Return the blocks that trainer k asks for. Raises WireError if there is no such block."""
    rows = table if isinstance(table, list) else [None]
    if not all(isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) for row in rows):
        raise WireError("`recv` of something that is not a list of [name, shape, dtype]")
    for name, shape, dtype in table:
        block = served.params.get(name)
        if block is None:
            raise WireError(
                f"trainer {k} asks for {name}, which pserver {served.endpoint} does not hold; "
                "every role must "
                "plan the same step"
            )
        if shape != list(block.shape) or dtype != block.dtype.name:
            raise WireError(
                f"trainer {k} has {name} as {dtype}{shape}, pserver {served.endpoint} holds "
                f"{block.dtype.name}{list(block.shape)}; "
                "every role must plan the same step with the same options"
            )
    return tuple(row[0] for row in table)


def answer(say: Say, t: Trainer, step: int, values: Mapping[str, Any]) -> None:
    """Send a trainer its blocks; there is an answer also if it wants none."""
    nothing = {} if t.wants else {"pieces": list[Any]()}
    say(t.address, "blocks", [(n, values[n]) for n in t.wants], step=step, **nothing)
