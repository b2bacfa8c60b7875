"""Requests of one server's trainers for checkpoints.

Several trainers may request the same checkpoint after the same number of steps. The server writes
it once, and answers each request when the write has ended.

Some arrays are only on trainers, such as the rounding errors of compressed gradients. Each trainer
then requests the checkpoint, and sends its arrays with the request to one server. This server
starts the write when the arrays of all its trainers have arrived. Until then, the state does not
change, because a synchronous update needs the next gradients of all trainers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from dtrans.errors import DtransError, StateError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.job_status import StatusReporter
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry


class Steps(Protocol):
    """Steps of a synchronous server and of its trainers."""

    @property
    def step(self) -> int:
        """Number of complete updates."""

    def has_begun(self, k: int) -> bool:
        """Return True if trainer k has begun its next step."""


@dataclasses.dataclass
class _Incoming:
    """Checkpoint whose write waits for arrays of trainers.

    Attributes:
      steps: number of steps that the requesting trainers have made.
      requests: pairs of a trainer's id and its request, of trainers that have sent all arrays.
      arrays: arrays of each trainer that has sent any, by the trainer's id.
    """

    steps: int
    requests: list[tuple[int, wire.Message]] = dataclasses.field(default_factory=list)
    arrays: dict[int, Inbox] = dataclasses.field(default_factory=dict)


class SaveRequests:
    """Requests of one server's trainers for checkpoints.

    Args:
      trainers: the server's trainers.
      status: status of the server, which contains the pending checkpoints.
      say: function that sends a message.

    Attributes:
      start: function that starts to write a checkpoint. Its arguments are the name of the
        checkpoint, the number of steps that the requesting trainer has made, and the arrays of
        trainers by name. The function returns the number of blocks. `written` must be called at the
        end of the write. None if the server was started without a folder for checkpoints.
      saved: for each written checkpoint, the number of steps that the requesting trainer had made
        (dict by name).
    """

    def __init__(self, trainers: TrainerRegistry, status: StatusReporter, say: Say) -> None:
        self.start: Callable[[str, int, Mapping[str, np.ndarray]], int] | None = None
        self.saved: dict[str, int] = {}
        self._trainers, self._status, self._say = trainers, status, say
        self._sent: Mapping[int, Mapping[str, Any]] = {}
        self._steps: Steps
        self._incoming: dict[str, _Incoming] = {}  # name of a checkpoint -> arrays of trainers
        # Name of a pending checkpoint -> (steps that the requesting trainers have made, requests)
        self._pending: dict[str, tuple[int, list[tuple[int, wire.Message]]]] = {}
        self._blocks: dict[str, int] = {}  # name of a pending checkpoint -> number of its blocks

    def expect(self, sent: Mapping[int, Mapping[str, Any]], steps: Steps) -> None:
        """Prepare to receive arrays of trainers, such as rounding errors, with each request.

        Args:
          sent: shape and dtype of each array, by the id of the trainer that sends it to this
            server, and by the array's name.
          steps: steps of the server and its trainers.
        """
        self._sent, self._steps = sent, steps

    def take(self, k: int, message: wire.Message, now: float) -> None:
        """Handle trainer k's request: start to write the checkpoint, unless the write has started.

        If trainers send arrays, the write starts when the arrays of all trainers have arrived.

        Args:
          k: id of the trainer.
          message: the request, or one of several messages that together are the request.
          now: the time.

        Raises:
          WireError: the message has an array that this server does not expect.
        """
        name, steps = message["name"], message["made"]
        incoming = self._incoming.get(name)
        before = self.asked().get(name)
        if before == steps and incoming is None:
            if name in self._pending:
                self._pending[name][1].append((k, message))
            else:
                self._answer(k, message, "")
            return
        try:
            self._check(k, message, before)
        except StateError as e:
            self._answer(k, message, str(e))
            return
        incoming = incoming or _Incoming(steps)
        if not self._receive(incoming, k, message):
            self._incoming[name] = incoming
            return  # further messages contain the other arrays
        self._incoming[name] = incoming
        incoming.requests.append((k, message))
        if not self._missing(incoming):
            self._start(name, now)

    def _check(self, k: int, message: wire.Message, before: int | None) -> None:
        """Raise StateError if the server cannot write the checkpoint that trainer k requests.

        Args:
          k: id of the trainer.
          message: the request.
          before: number of steps of an earlier request for this name; None if there is none.
        """
        name, steps = message["name"], message["made"]
        if self.start is None:
            raise StateError(
                "the server was started without a folder for checkpoints; call "
                "job.serve(state, checkpoints=folder)"
            )
        if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
            raise StateError(
                f"{wire.brief(name)} is not a valid name of a checkpoint; use printable "
                "characters without slashes, and no dot at the start"
            )
        if before not in (None, steps):
            raise StateError(
                f"checkpoint {name} was already requested after {before} steps, and trainer "
                f"{k} has made {steps} steps; use another name for each checkpoint"
            )

    def _start(self, name: str, now: float) -> None:
        """Start to write a checkpoint. All its arrays have arrived."""
        incoming = self._incoming.pop(name)
        arrays = {}
        for k, types in self._sent.items():
            for n, t in types.items():
                # A trainer that left in an earlier step has taken its arrays with it.
                is_here = k in incoming.arrays
                arrays[n] = incoming.arrays[k].memory[n] if is_here else np.zeros(t.shape, t.dtype)
        assert self.start is not None
        try:
            self._blocks[name] = self.start(name, incoming.steps, arrays)
        except DtransError as e:
            self._refuse(incoming, str(e))
        else:
            self._pending[name] = incoming.steps, incoming.requests
            self._status.saving[name] = now

    # -- arrays of trainers ----------------------------------------------------------------------

    def _receive(self, incoming: _Incoming, k: int, message: wire.Message) -> bool:
        """Receive arrays of trainer k; return True if all its arrays have arrived."""
        if k not in self._sent:
            return True
        inbox = incoming.arrays.get(k)
        if inbox is None:
            memory = {n: np.empty(t.shape, t.dtype) for n, t in self._sent[k].items()}
            inbox = Inbox(memory, functools.partial(_NOT_EXPECTED, k))
        if "pieces" in message.fields:
            inbox.take(message)
        incoming.arrays[k] = inbox
        return not inbox.missing()

    def _missing(self, incoming: _Incoming) -> list[int]:
        """Return the ids of the trainers whose arrays have not arrived completely.

        A trainer that left in an earlier step does not count.
        """
        found = []
        for k in self._sent:
            inbox = incoming.arrays.get(k)
            has_all = inbox is not None and not inbox.missing()
            if not has_all and not self._trainers.left_before_step(k, self._steps.step):
                found.append(k)
        return found

    def look(self) -> None:
        """Give up checkpoints whose arrays cannot arrive any more, and remind waiting trainers."""
        for name, incoming in [*self._incoming.items()]:
            for k in self._missing(incoming):
                is_over = "closed its job" if k in self._trainers.left else ""
                if self._steps.has_begun(k):
                    is_over = "begun its next step"
                if is_over:
                    del self._incoming[name]
                    self._refuse(
                        incoming,
                        f"trainer {k} has {is_over} without job.save({name!r}), and only trainer "
                        f"{k} has its rounding errors of gradients; call job.save({name!r}) on "
                        "every trainer after the same step",
                    )
                    break
        self.remind()

    def _refuse(self, incoming: _Incoming, error: str) -> None:
        for k, message in incoming.requests:
            self._answer(k, message, error)

    def written(self, name: str, error: str, now: float) -> None:
        """Handle the end of a checkpoint's write, and answer the trainers that requested it.

        Args:
          name: name of the checkpoint.
          error: reason why the checkpoint could not be written; empty if it was written.
          now: the time.
        """
        steps, requests = self._pending.pop(name)
        self._status.saved(name, steps, self._blocks.pop(name), error, now)
        if not error:
            self.saved[name] = steps
        for k, message in requests:
            self._answer(k, message, error)

    def asked(self) -> dict[str, int]:
        """Return a map from the name of each written or pending checkpoint to its step."""
        pending = {name: steps for name, (steps, _) in self._pending.items()}
        return self.saved | pending | {name: x.steps for name, x in self._incoming.items()}

    def remind(self) -> None:
        """Send `waiting` to each trainer that waits for a checkpoint."""
        waiting = {name: requests for name, (_, requests) in self._pending.items()}
        waiting |= {name: x.requests for name, x in self._incoming.items()}
        for name, requests in waiting.items():
            for k in {k for k, _ in requests}.intersection(self._trainers.present):
                self._say(
                    self._trainers.known[k].address,
                    "waiting",
                    reason=f"checkpoint {name} to be written",
                )

    def take_over(self, before: SaveRequests) -> None:
        """Take over checkpoints from the previous generation (part of the job).

        The server may still be writing these checkpoints. Trainers that repeat steps request the
        same checkpoints again, and the server then answers.
        """
        self.saved, self._blocks = before.saved, before._blocks
        for name, (steps, _) in before._pending.items():
            self._pending[name] = steps, []
            self._status.saving[name] = before._status.saving[name]

    def undo(self, ended: Iterable[tuple[str, str]], last: int) -> None:
        """Forget the checkpoints of undone steps, because repeated steps will have other results.

        Args:
          ended: (name, error text) for each checkpoint that was pending.
          last: the last step that is not undone.
        """
        for name, error in ended:
            steps, _ = self._pending.pop(name)
            del self._blocks[name]
            if not error:
                self.saved[name] = steps
        self.saved = {name: steps for name, steps in self.saved.items() if steps <= last}

    def _answer(self, k: int, message: wire.Message, error: str) -> None:
        """Answer trainer k's request if the trainer has not left."""
        if k in self._trainers.present:
            address = self._trainers.known[k].address
            self._say(address, "saved", name=message["name"], error=error, **message.request)


_NOT_EXPECTED = (
    "a `save` message of trainer {} with the array {!r}, which this server does not save".format
)
