"""Dispatch of one server's messages: each goes to its handler, or is refused.

    trainer_registry             the trainers of the server
    sync_server, async_server    handlers of the two kinds of servers
    server_peers                 the other servers
    job_status                   the answers to observers, which are no part of the job

Messages and the time come in. Answers leave by `say`, and a message that completes an update's
inputs computes it. A malformed message is refused and counted, and changes nothing. A trainer whose
namesake has left belongs to the next job on this endpoint, and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtrans.errors import DtransError, StateError, WireError
from dtrans.protocol import wire
from dtrans.protocol.job_status import StatusReporter
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.tables.stored_tables import tell_changes, tell_report


# methods of each kind of servers that takes them
TRAINER_OPS = (
    *("send", "send_barrier", "recv", "exchange", "prefetch", "row_ids", "complete", "abort"),
    *("save", "saving", "tables", "changed_since", "evict"),  # between two steps
)


class Serving:
    """Dispatch of one server's messages.

    Args:
      kind: handler of messages, synchronous or not.
      trainers: of the server.
      say: sends a message.
      refusals: count of refused messages.

    Attributes:
      local: address for trainers on the same host; empty if there is none.
      keep: begins to save the server's state. Takes the checkpoint's name and the number of steps
        that the asking trainer has made, and returns the number of blocks. Its writer reports the
        end by `written`. None if the server has no place for checkpoints.
      saved: written checkpoints, and the steps that the asking trainer had made.
      status: of the server, for observers.
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
        self.keep: Callable[[str, int], int] | None = None
        self.saved: dict[str, int] = {}
        # checkpoints that are being written: steps made, and each trainer's request
        self._saves: dict[str, tuple[int, list[tuple[int, wire.Message]]]] = {}
        self._blocks: dict[str, int] = {}  # numbers of their blocks
        self._say, self._now = say, 0.0

    @property
    def ended(self) -> bool:
        """Return True if all trainers have come and left for good, and no other server may still
        greet this one."""
        return self.trainers.parted and not self.kind.peers.unsettled

    def take(self, address: bytes, frames: Sequence[Any], now: float) -> None:
        """Take a message from an address. A message that is malformed or out of turn is refused.

        Raises:
          PeerError: the message ends the job: a trainer has failed, or left before the others.
        """
        size, self._now = sum(map(len, frames)), now
        self.status.received += size
        try:
            self._dispatch(address, wire.parse(frames))
        except WireError as e:
            self._refuse(address, self._who(address), e)
        k = self.trainers.by_address.get(address)
        if k is not None:
            self.trainers.known[k].heard_at = now
            self.trainers.known[k].received += size

    def observe(self, address: bytes, frames: Sequence[Any], now: float) -> None:
        """Answer an observer, which may ask only for the status."""
        try:
            fields = self.status.answer(frames, now)
        except WireError as e:
            self._refuse(address, "an observer", e)
        else:
            self._say(address, "status_report", **fields)

    def _refuse(self, address: bytes, who: str, e: WireError) -> None:
        self.refusals.note("pserver %s refused a message of %s: %s", self.kind.endpoint, who, e)
        self._say(address, "refuse", reason=str(e))

    def lose(self, address: bytes, now: float) -> None:
        """Note that the connection of an address has ended."""
        self.trainers.lose(address, now)

    def died(self, trainer: int, how: str, now: float) -> None:
        """Note that the process of a trainer has ended, as the launcher reports."""
        self.trainers.died(trainer, how, now)

    def look(self, now: float) -> None:
        """Check who is late. Raises DeadlineError for a trainer that is too late."""
        self.status.look(now)
        self.trainers.look(now)
        self.kind.look(now)
        for name, (_, asked) in self._saves.items():
            for k in {k for k, _ in asked}.intersection(self.trainers.present):
                self._say(
                    self.trainers.known[k].address,
                    "waiting",
                    reason=f"checkpoint {name} to be written",
                )

    def written(self, name: str, error: str, now: float) -> None:
        """Answer the trainers that asked for a checkpoint: it is written, or cannot be.

        Args:
          error: the reason if it cannot be written, else empty.
        """
        steps, asked = self._saves.pop(name)
        self.status.saved(name, steps, self._blocks.pop(name), error, now)
        if not error:
            self.saved[name] = steps
        for k, message in asked:
            self._say_saved(k, message, error)

    def asked(self) -> dict[str, int]:
        """Return the checkpoints that are written or under way, and the steps made before each."""
        return self.saved | {name: steps for name, (steps, _) in self._saves.items()}

    def say_why(self, e: BaseException) -> None:
        """Tell all remaining trainers and servers that this server ends."""
        reason = str(e) if isinstance(e, DtransError) else f"{type(e).__name__}: {e}"
        trainers = [self.trainers.known[k].address for k in self.trainers.present]
        for address in (*trainers, *self.kind.peers.addresses):
            self._say(address, "refuse", reason=f"it ended: {reason}", last=True)

    def _dispatch(self, address: bytes, message: wire.Message) -> None:
        """Hand a message to its handler. Raises WireError for one that is refused."""
        sender = self.trainers.by_address.get(address)
        if sender is not None and not self.trainers.known[sender].messages.take(message):
            return  # it is repeated, or will be
        if message.op == "hello":
            self._hello(address, message)
        elif not self.kind.take_peer(address, message):
            if self._parts(address, message):
                return
            k = self.trainers.speaker(address, message)
            if message.op not in TRAINER_OPS:
                raise WireError(f"a `{message.op}` message, which servers do not take")
            if message.op in ("save", "tables", "changed_since"):
                self.kind.check_between(k, message)
                self._tell(address, message)
                return
            for part in (message, *_following(message)):
                take = getattr(self.kind, part.op, None)
                if take is None:
                    raise WireError(
                        f"a `{part.op}` message, which {self.kind.word} servers do not take"
                    )
                take(k, part)

    def _parts(self, address: bytes, message: wire.Message) -> bool:
        """Take the answer to a goodbye; return False for anything else."""
        k = self.trainers.by_address.get(address)
        if k is None or message.op != "goodbye":
            return False
        self.trainers.part(k)
        return True

    def _tell(self, address: bytes, message: wire.Message) -> None:
        """Answer a request between two steps: for a checkpoint, or for the state of tables."""
        if message.op == "save":
            self._save(self.trainers.by_address[address], message)
        elif message.op == "tables":
            tell_report(self.kind.tables, self._say, address, message)
        else:
            tell_changes(self.kind.tables, self._say, address, message)

    def _save(self, k: int, message: wire.Message) -> None:
        """Begin to save the server's state.

        Several trainers may ask for one checkpoint, after the same number of steps.
        """
        name, steps = message["name"], message["made"]
        before = self._saves[name][0] if name in self._saves else self.saved.get(name)
        if before == steps and name in self._saves:
            self._saves[name][1].append((k, message))
            return
        if before == steps:
            self._say_saved(k, message, "")
            return
        try:
            if self.keep is None:
                raise StateError(
                    "it has no place for checkpoints: say job.serve(state, checkpoints=folder)"
                )
            if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
                raise StateError(f"{wire.brief(name)} is no name of a folder for a checkpoint")
            if before is not None:
                raise StateError(
                    f"it has saved {name} after {before} steps, and trainer {k} has made {steps}: "
                    "give each checkpoint "
                    "a name of its own"
                )
            self._blocks[name] = self.keep(name, steps)
        except DtransError as e:
            self._say_saved(k, message, str(e))
        else:
            self._saves[name], self.status.saving[name] = (steps, [(k, message)]), self._now

    def _say_saved(self, k: int, message: wire.Message, error: str) -> None:
        """Answer a `save`, unless its trainer has left."""
        if k in self.trainers.present:
            address = self.trainers.known[k].address
            self._say(address, "saved", name=message["name"], error=error, **message.request)

    def _hello(self, address: bytes, message: wire.Message) -> None:
        before = self.trainers.hello(address, message, self.kind.peers.name(address))
        if before:
            self._say(address, "waiting", reason=before)
            return
        heard = self.trainers.known[message["trainer"]].messages.received
        fields = self.trainers.welcome(message, self.kind.step, heard, self.local)
        self._say(address, "welcome", **fields)

    def _who(self, address: bytes) -> str:
        """Return the name of the sender at an address, for the log."""
        k, peer = self.trainers.by_address.get(address), self.kind.peers.name(address)
        if k is not None:
            return f"trainer {k}"
        return "a stranger" if peer is None else f"pserver {peer}"


def _following(message: wire.Message) -> list[wire.Message]:
    """Return the messages that follow a message in its field `then`."""
    then: Any = message.fields.get("then", [])
    if then == []:
        return []
    if then not in (["recv"], ["send_barrier", "recv"]) or message.op not in wire.FOLLOWED:
        raise WireError(f"a `{message.op}` message that {wire.brief(then)} cannot follow")
    shared = {n: x for n, x in message.fields.items() if n == "blocks"}
    return [wire.Message(op, {"step": message["step"] + (op == "recv"), **shared}) for op in then]
