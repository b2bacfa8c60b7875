"""Requests of a simulated trainer between steps: checkpoints, and requests about tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from dtrans.errors import CheckpointError
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from tools.simulate.case import Case, Request
from tools.simulate.storage import checkpoint_name


@dataclasses.dataclass(frozen=True, eq=False)
class Answered:
    """Answer that a trainer has received.

    Attributes:
      request: the answered request.
      result: result of the method of `TrainerSteps`. For a save, it is the error, or an empty text.
        For an export, it is the rows of each block.
      generation: number of the trainer's generation; 0 in a job without snapshots.
    """

    request: Request
    result: Any
    generation: int = 0


class BetweenSteps:
    """Requests of one trainer to its servers.

    Args:
      case: the simulated case.
      k: id of the trainer.
      messages: the trainer's steps, which send the requests.
      answers: answers received in earlier generations.

    Attributes:
      answers: answers received so far.
      generation: number of the trainer's generation; 0 in a job without snapshots.
    """

    def __init__(
        self, case: Case, k: int, messages: TrainerSteps, answers: Sequence[Answered] = ()
    ) -> None:
        self.answers: list[Answered] = [*answers]
        self.generation = 0
        self._case, self._steps = case, messages
        self._requests = [x for x in case.requests if k in x.trainers]
        self._saving: Request | None = None

    def ask(self, steps: int) -> Generator[Any, Any, None]:
        """Send the requests that are due after a number of steps, and wait for the answers."""
        if not self._requests:
            return
        if self._saving is not None and steps >= self._saving.step + self._saving.waits:
            yield from self.end_save()
        for request in self._due(steps, "between"):
            if request.kind != "save":
                result = yield from self._ask_of_tables(request)
                self.answers.append(Answered(request, result, self.generation))
                continue
            yield from self._save(request)
            if not request.waits:
                yield from self.end_save()

    def ask_when_sent(self, step: int) -> Generator[Any, Any, None]:
        """Request the checkpoints that are due after the gradients of a step are sent."""
        for request in self._due(step, "sent"):
            yield from self._save(request)
            yield from self.end_save()

    def ask_when_ended(self, steps: int) -> None:
        """Request the checkpoints that are due between the end of a step and its answer."""
        for request in self._due(steps, "ended"):
            if self._saving is None:
                self._saving = request
                self._begin(request)

    def end_save(self) -> Generator[Any, Any, None]:
        """Wait for the pending checkpoint, if there is one."""
        request, self._saving = self._saving, None
        if request is None:
            return
        error = ""
        try:
            yield self._steps.saved()
        except CheckpointError as e:  # the job continues
            error = str(e)
        self.answers.append(Answered(request, error, self.generation))

    def _due(self, steps: int, moment: str) -> Iterator[Request]:
        return (x for x in self._requests if (x.step, x.moment) == (steps, moment))

    def _save(self, request: Request) -> Generator[Any, Any, None]:
        yield from self.end_save()
        self._saving = request
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self._steps.save(self._case.endpoints, checkpoint_name(self._case, request), request.step)

    def _ask_of_tables(self, request: Request) -> Generator[Any, Any, Any]:
        blocks = [(n.split("/")[0], n) for n in self._case.tables]
        if request.kind == "report":
            return (yield self._steps.tables(list(dict(blocks))))
        if request.kind == "changes":
            return (yield self._steps.changed(blocks, request.step // 2))
        if request.kind == "evict":
            return (yield self._steps.evict(blocks, request.unused_for))
        return (yield from self._export(blocks))

    def _export(self, blocks: Sequence[tuple[str, str]]) -> Generator[Any, Any, list[np.ndarray]]:
        rows = [np.empty(self._case.tables[n], np.float32) for _, n in blocks]
        wanted = [
            (ep, n, np.arange(len(x), dtype=np.int32), x)
            for (ep, n), x in zip(blocks, rows, strict=True)
        ]
        yield self._steps.prefetch(wanted, train=False)
        return rows
