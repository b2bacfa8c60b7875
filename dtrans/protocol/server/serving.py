"""Dispatch of one server's messages to their handlers.

    trainer_registry             the trainers of the server
    sync_server, async_server    handlers of the two kinds of servers
    server_peers                 the other servers
    save_requests                the trainers' requests for checkpoints
    job_status                   answers to observers, which do not take part in the job

The inputs are messages and the time. The server sends its answers by `say`. When a message
completes the inputs of an update, the update starts. The server refuses a malformed message and
counts the refusal. Its state then stays unchanged.

If a trainer has left, and a new process greets with this trainer's id, the new process belongs to
the next job on this endpoint. It has to wait for the end of this job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtrans.errors import DtransError, WireError
from dtrans.protocol import wire
from dtrans.protocol.job_status import StatusReporter
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.admission import welcome
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.generation_gate import GenerationGate
from dtrans.protocol.server.save_requests import SaveRequests
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.tables.stored_tables import tell_changes, tell_report


# Ops of trainers' messages. A handler (`SyncServer`, `AsyncServer`) has a method of the same name
# for each op that it accepts. This class handles the other ops.
TRAINER_OPS = (
    *("send", "send_barrier", "recv", "exchange", "prefetch", "row_ids", "complete", "abort"),
    *("save", "saving", "tables", "changed_since", "evict"),  # sent between two steps
)


# valid values of the field `then`
FOLLOWING: Sequence[list[str]] = (["recv"], ["send_barrier"], ["send_barrier", "recv"])


class Serving:
    """Dispatch of one server's messages.

    Args:
      kind: synchronous or asynchronous handler of messages.
      trainers: the server's trainers.
      say: function that sends a message.
      refusals: counter of refused messages.

    Attributes:
      local: local address for trainers on the same host; empty if there is none.
      saves: requests for checkpoints.
      gate: filter of messages by their generation; None in a job without snapshots.
      status: status of the server for observers.
    """

    def __init__(
        self,
        kind: SyncServer | AsyncServer,
        trainers: TrainerRegistry,
        say: Say,
        refusals: Refusals,
    ) -> None:
        self.kind = kind
        self.trainers = trainers
        self.refusals = refusals
        self.local = ""
        self.status = StatusReporter(kind, trainers, refusals)
        self.saves = SaveRequests(trainers, self.status, say)
        self.gate: GenerationGate | None = None
        self._say, self._now = say, 0.0

    @property
    def ended(self) -> bool:
        """True if the server may end: all trainers have left, and all peers have connected."""
        return self.trainers.parted and not self.kind.peers.unsettled

    def take(self, address: bytes, frames: Sequence[Any], now: float) -> None:
        """Handle a message; refuse a message that is malformed or not expected now.

        Raises:
          PeerError: a trainer has failed or left too early, so the job ends.
        """
        size, self._now = sum(map(len, frames)), now
        self.status.received += size
        with self._refusing(address):
            self._dispatch(address, wire.parse(frames))
        k = self.trainers.by_address.get(address)
        if k is not None:
            self.trainers.known[k].heard_at = now
            self.trainers.known[k].received += size

    def observe(self, address: bytes, frames: Sequence[Any], now: float) -> None:
        """Answer an observer's message, which must be a request for the status."""
        try:
            fields = self.status.answer(frames, now)
        except WireError as e:
            self._refuse(address, "an observer", e)
        else:
            self._say(address, "status_report", **fields)

    @contextlib.contextmanager
    def _refusing(self, address: bytes) -> Iterator[None]:
        """Run a handler in a `with` block; if it raises WireError, refuse the sender's message."""
        try:
            yield
        except WireError as e:
            self._refuse(address, self._who(address), e)

    def _refuse(self, address: bytes, who: str, e: WireError) -> None:
        self.refusals.note("pserver %s refused a message of %s: %s", self.kind.endpoint, who, e)
        self._say(address, "refuse", reason=str(e))

    def lose(self, address: bytes, now: float) -> None:
        """Handle the end of the connection at an address."""
        self.trainers.lose(address, now)
        self.kind.peers.lose(address, now)
        if self.gate is not None:
            self.gate.lose(address)

    def greet_again(self, early: Mapping[bytes, wire.Message], now: float) -> None:
        """Handle greetings that arrived before this generation, a part of the job between failures.

        Args:
          early: greeting by address.
          now: the current time, in seconds.
        """
        self._now = now
        for address, message in early.items():
            with self._refusing(address):
                self._dispatch(address, message)

    def died(self, trainer: int, how: str, now: float) -> None:
        """Handle the launcher's report that the process of a trainer has ended.

        Args:
          trainer: id of the trainer.
          how: exit status of the process.
          now: the current time, in seconds.
        """
        self.trainers.died(trainer, how, now)

    def look(self, now: float) -> None:
        """Check the deadlines, and send `waiting` to each trainer that waits for this server.

        Raises:
          DeadlineError: a trainer or server is late.
          PeerError: a trainer or server is lost.
        """
        self.status.look(now)
        self.trainers.look(now)
        self.kind.look(now)
        self.saves.look()

    def wait_for_generation(self, now: float) -> None:
        """Send `waiting` to all trainers; called in place of `look` while a generation ends."""
        self.status.look(now)
        for k in self.trainers.present:
            address = self.trainers.known[k].address
            self._say(address, "waiting", reason="the servers to write a snapshot")

    def say_why(self, e: BaseException) -> None:
        """Send the error that ends this server to all connected trainers and servers."""
        reason = str(e) if isinstance(e, DtransError) else f"{type(e).__name__}: {e}"
        trainers = [self.trainers.known[k].address for k in self.trainers.present]
        for address in (*trainers, *self.kind.peers.addresses):
            self._say(address, "refuse", reason=f"it ended: {reason}", last=True)

    def _dispatch(self, address: bytes, message: wire.Message) -> None:
        """Call the handler of a message; raise WireError if the server refuses the message."""
        if self.gate is not None:
            is_known = address in self.trainers.by_address or self.kind.peers.name(address)
            if not self.gate.admits(address, message, is_known=bool(is_known)):
                return
        sender = self.trainers.by_address.get(address)
        if sender is not None and not self.trainers.known[sender].messages.take(message):
            # The message is a duplicate, or an earlier message is missing. The trainer sends
            # missing messages again.
            return
        if message.op == "hello":
            self._hello(address, message)
            return
        if self.kind.take_peer(address, message) or self._parts(address, message):
            return
        k = self.trainers.speaker(address, message)
        if message.op not in TRAINER_OPS:
            raise WireError(f"a `{message.op}` message, which servers do not accept")
        if message.op in ("save", "tables", "changed_since"):
            self.kind.check_between(k, message)
            self._tell(address, message)
            return
        for part in (message, *_following(message)):
            handle = getattr(self.kind, part.op, None)
            if handle is None:
                raise WireError(
                    f"a `{part.op}` message, which {self.kind.word} servers do not accept"
                )
            handle(k, part)

    def _parts(self, address: bytes, message: wire.Message) -> bool:
        """Handle a trainer's answer to `goodbye`; return False for any other message."""
        k = self.trainers.by_address.get(address)
        if k is None or message.op != "goodbye":
            return False
        self.trainers.part(k)
        return True

    def _tell(self, address: bytes, message: wire.Message) -> None:
        """Answer a trainer's request between two steps: `save`, `tables` or `changed_since`."""
        if message.op == "save":
            self.saves.take(self.trainers.by_address[address], message, self._now)
        elif message.op == "tables":
            tell_report(self.kind.tables, self._say, address, message)
        else:
            tell_changes(self.kind.tables, self._say, address, message)

    def _hello(self, address: bytes, message: wire.Message) -> None:
        before = self.trainers.hello(address, message, self.kind.peers.name(address))
        if before:
            self._say(address, "waiting", reason=before)
            return
        k = message["trainer"]
        heard, count = self.trainers.known[k].messages.received, self.kind.count_of(k)
        fields = welcome(self.trainers.secret, message, self.kind.step, heard, self.local)
        if self.gate is not None:
            fields |= self.gate.fields
        if count is not None:
            fields["count"] = count
        self._say(address, "welcome", **fields)

    def _who(self, address: bytes) -> str:
        """Return the name of the process at an address, for the log."""
        k, peer = self.trainers.by_address.get(address), self.kind.peers.name(address)
        if k is not None:
            return f"trainer {k}"
        if peer is not None:
            return f"pserver {peer}"
        return "an unknown process"


def _following(message: wire.Message) -> list[wire.Message]:
    """Return the messages that a message also contains, as its field `then` names them.

    To save messages, the last message of a trainer's step also contains `send_barrier` and `recv`.
    """
    then: Any = message.fields.get("then", [])
    if then == []:
        return []
    if then not in FOLLOWING or message.op not in wire.FOLLOWED:
        raise WireError(
            f"a `{message.op}` message with an invalid field `then`: {wire.brief(then)}"
        )
    found = []
    for op in then:
        fields: dict[str, Any] = {"step": message["step"] + (op == "recv")}
        for name in {"blocks", "count"} & message.fields.keys():
            fields[name] = message[name]
        found.append(wire.Message(op, fields))
    return found
