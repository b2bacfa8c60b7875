"""Dispatch of one server's messages to their handlers.

    trainer_registry             the trainers of the server
    sync_server, async_server    handlers of the two kinds of servers
    server_peers                 the other servers
    job_status                   answers to observers, which do not take part in the job

The inputs are messages and the time. The server sends its answers by `say`. When a message
completes the inputs of an update, the update starts. The server refuses and counts a malformed
message, which changes nothing else.

If a trainer has left, and a new process greets with this trainer's id, the new process belongs to
the next job on this endpoint. It has to wait for the end of this job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrans.errors import DtransError, StateError, WireError
from dtrans.protocol import wire
from dtrans.protocol.job_status import StatusReporter
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.admission import welcome
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.epoch_gate import EpochGate
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.tables.stored_tables import tell_changes, tell_report


# Ops of trainers' messages. A handler (`SyncServer`, `AsyncServer`) has a method of the same name
# for each op that it accepts. This class handles the other ops.
TRAINER_OPS = (
    *("send", "send_barrier", "recv", "exchange", "prefetch", "row_ids", "complete", "abort"),
    *("save", "saving", "tables", "changed_since", "evict"),  # between two steps
)


class Serving:
    """Dispatch of one server's messages.

    Args:
      kind: synchronous or asynchronous handler of messages.
      trainers: the server's trainers.
      say: function that sends a message.
      refusals: counter of refused messages.

    Attributes:
      local: local address for trainers on the same host; empty if there is none.
      keep: function that starts to write a checkpoint. Its arguments are the name of the checkpoint
        and the number of steps that the requesting trainer has made. It returns the number of
        blocks. `written` must be called at the end of the write. None if the server was started
        without a folder for checkpoints.
      gate: filter of messages by their epoch; None in a job without cuts.
      saved: dict from the name of each written checkpoint to the number of steps that the
        requesting trainer had made.
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
        self.keep: Callable[[str, int], int] | None = None
        self.gate: EpochGate | None = None
        self.saved: dict[str, int] = {}
        # Name of a pending checkpoint -> (steps that the requesting trainers have made, requests)
        self._saves: dict[str, tuple[int, list[tuple[int, wire.Message]]]] = {}
        self._blocks: dict[str, int] = {}  # name of a pending checkpoint -> number of its blocks
        self._say, self._now = say, 0.0

    @property
    def ended(self) -> bool:
        """True if the server may end: all trainers have left, and all peers have greeted it."""
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
        """Refuse the message of an address if its handler raises WireError."""
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
        if self.gate is not None:
            self.gate.lose(address)

    def keep_saves(self, before: Serving) -> None:
        """Take over the checkpoints of the previous epoch, which may still be written.

        Repeated steps request the same checkpoints again, and the server then answers.
        """
        self.saved, self._blocks = before.saved, before._blocks
        for name, (steps, _) in before._saves.items():
            self._saves[name] = steps, []
            self.status.saving[name] = before.status.saving[name]

    def undo_saves(self, ended: Iterable[tuple[str, str]], last: int) -> None:
        """Forget the checkpoints of undone steps; repeated steps will have other results.

        Args:
          ended: (name, error text) for each checkpoint that was pending.
          last: the last step that is not undone.
        """
        for name, error in ended:
            steps, _ = self._saves.pop(name)
            del self._blocks[name]
            if not error:
                self.saved[name] = steps
        self.saved = {name: steps for name, steps in self.saved.items() if steps <= last}

    def greet_again(self, early: Mapping[bytes, wire.Message], now: float) -> None:
        """Handle the greetings that the previous epoch has stored.

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
        for name, (_, asked) in self._saves.items():
            for k in {k for k, _ in asked}.intersection(self.trainers.present):
                self._say(
                    self.trainers.known[k].address,
                    "waiting",
                    reason=f"checkpoint {name} to be written",
                )

    def wait_for_epoch(self, now: float) -> None:
        """Send `waiting` to all trainers while the epoch is ending, instead of `look`."""
        self.status.look(now)
        for k in self.trainers.present:
            address = self.trainers.known[k].address
            self._say(address, "waiting", reason="the servers to write a cut")

    def written(self, name: str, error: str, now: float) -> None:
        """Handle the end of a checkpoint's write, and answer the trainers that requested it.

        Args:
          name: name of the checkpoint.
          error: reason why the checkpoint could not be written; empty if it was written.
          now: the current time, in seconds.
        """
        steps, asked = self._saves.pop(name)
        self.status.saved(name, steps, self._blocks.pop(name), error, now)
        if not error:
            self.saved[name] = steps
        for k, message in asked:
            self._say_saved(k, message, error)

    def asked(self) -> dict[str, int]:
        """Return a dict from the name of each complete or pending checkpoint to a number of steps.

        It is the number of steps that the requesting trainer had made.
        """
        return self.saved | {name: steps for name, (steps, _) in self._saves.items()}

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
            # The message is a duplicate, or follows a missing message. The trainer repeats both.
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
        """Handle a trainer's answer to `goodbye`. Return False for any other message."""
        k = self.trainers.by_address.get(address)
        if k is None or message.op != "goodbye":
            return False
        self.trainers.part(k)
        return True

    def _tell(self, address: bytes, message: wire.Message) -> None:
        """Answer a request about checkpoints or tables: `save`, `tables` or `changed_since`."""
        if message.op == "save":
            self._save(self.trainers.by_address[address], message)
        elif message.op == "tables":
            tell_report(self.kind.tables, self._say, address, message)
        else:
            tell_changes(self.kind.tables, self._say, address, message)

    def _save(self, k: int, message: wire.Message) -> None:
        """Handle a request for a checkpoint: start to write it, unless the write has started.

        Several trainers may request the same checkpoint after the same number of steps. Each
        request is answered when the write has ended.
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
                    "it was started without a folder for checkpoints; call "
                    "job.serve(state, checkpoints=folder)"
                )
            if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
                raise StateError(
                    f"{wire.brief(name)} is not a valid name of a checkpoint; use printable "
                    "characters without slashes, and no dot at the start"
                )
            if before is not None:
                raise StateError(
                    f"checkpoint {name} was already requested after {before} steps, and trainer "
                    f"{k} has made {steps} steps; use another name for each checkpoint"
                )
            self._blocks[name] = self.keep(name, steps)
        except DtransError as e:
            self._say_saved(k, message, str(e))
        else:
            self._saves[name], self.status.saving[name] = (steps, [(k, message)]), self._now

    def _say_saved(self, k: int, message: wire.Message, error: str) -> None:
        """Answer a `save` of trainer k if the trainer has not left."""
        if k in self.trainers.present:
            address = self.trainers.known[k].address
            self._say(address, "saved", name=message["name"], error=error, **message.request)

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
    """Return the messages that the field `then` of a message lists."""
    then: Any = message.fields.get("then", [])
    if then == []:
        return []
    if then not in (["recv"], ["send_barrier", "recv"]) or message.op not in wire.FOLLOWED:
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
