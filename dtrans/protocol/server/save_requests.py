"""Requests of one server's trainers for checkpoints.

Several trainers may request the same checkpoint after the same number of steps. The server writes
it once, and answers each request when the write has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dtrans.errors import DtransError, StateError
from dtrans.protocol import wire
from dtrans.protocol.job_status import StatusReporter
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry


class SaveRequests:
    """Requests of one server's trainers for checkpoints.

    Args:
      trainers: the server's trainers.
      status: status of the server, which contains the pending checkpoints.
      say: function that sends a message.

    Attributes:
      start: function that starts to write a checkpoint. Its arguments are the name of the
        checkpoint and the number of steps that the requesting trainer has made. The function
        returns the number of blocks. `written` must be called at the end of the write. None if the
        server was started without a folder for checkpoints.
      saved: for each written checkpoint, the number of steps that the requesting trainer had made
        (dict by name).
    """

    def __init__(self, trainers: TrainerRegistry, status: StatusReporter, say: Say) -> None:
        self.start: Callable[[str, int], int] | None = None
        self.saved: dict[str, int] = {}
        self._trainers, self._status, self._say = trainers, status, say
        # Name of a pending checkpoint -> (steps that the requesting trainers have made, requests)
        self._pending: dict[str, tuple[int, list[tuple[int, wire.Message]]]] = {}
        self._blocks: dict[str, int] = {}  # name of a pending checkpoint -> number of its blocks

    def take(self, k: int, message: wire.Message, now: float) -> None:
        """Handle trainer k's request: start to write the checkpoint, unless the write has started.

        Args:
          k: id of the trainer.
          message: the request.
          now: the time.
        """
        name, steps = message["name"], message["made"]
        before = self._pending[name][0] if name in self._pending else self.saved.get(name)
        if before == steps and name in self._pending:
            self._pending[name][1].append((k, message))
            return
        if before == steps:
            self._answer(k, message, "")
            return
        try:
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
            if before is not None:
                raise StateError(
                    f"checkpoint {name} was already requested after {before} steps, and trainer "
                    f"{k} has made {steps} steps; use another name for each checkpoint"
                )
            self._blocks[name] = self.start(name, steps)
        except DtransError as e:
            self._answer(k, message, str(e))
        else:
            self._pending[name], self._status.saving[name] = (steps, [(k, message)]), now

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
        return self.saved | {name: steps for name, (steps, _) in self._pending.items()}

    def remind(self) -> None:
        """Send `waiting` to each trainer that waits for a checkpoint."""
        for name, (_, requests) in self._pending.items():
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
