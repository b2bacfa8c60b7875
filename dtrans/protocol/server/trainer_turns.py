"""Turns: the progress of each trainer of a synchronous server within the current step.

A trainer sends its gradients, then `send_barrier`, then a request for parameters. When all trainers
have sent `send_barrier`, the server computes the update. It then answers the requests, and the
turns of the next step begin.

A trainer may also request the parameters of a step before it sends the gradients. If the update has
parts, the server computes each part when all trainers' gradients for this part have arrived. It
sends the part's parameters at once, while trainers send the gradients of the next parts. The last
part waits until all trainers have sent `send_barrier`. So no trainer begins the next step before
this server has ended the step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.ir.cost import nbytes
from dtrans.ir.selection import retain, subset
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.row_pieces import RowPieces
from dtrans.protocol.server.trainer_exits import TrainerExits
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, answer
from dtrans.protocol.server_blocks import ServerBlocks, StepUpdate, UpdatePart
from dtrans.protocol.tables.row_answers import RowAnswers


@dataclasses.dataclass
class TrainerTurn:
    """Progress of one trainer in the current step.

    Attributes:
      grads: gradients of the step, as they arrive.
      at_barrier: True if the trainer has sent `send_barrier`.
      waits: True if the trainer has requested parameters, and the server has not answered yet.
      looks_up: True if the trainer has requested table rows for this step, so that their gradients
        follow.
      requested: True if the trainer has requested the step's parameters before `send_barrier`.
      answered: number of bytes that the server has sent of each block for this step, by name.
      unsent: number of requested bytes that the server has not sent yet. Set when the server sends
        the first block of the step.
    """

    grads: Inbox
    at_barrier: bool = False
    waits: bool = False
    looks_up: bool = False
    requested: bool = False
    answered: dict[str, int] = dataclasses.field(default_factory=dict)
    unsent: int = 0

    @property
    def begun(self) -> bool:
        """True if the trainer is in the middle of the step."""
        return self.at_barrier or self.looks_up or self.requested or self.grads.begun


class TrainerTurns:
    """Turns of one server's trainers: their progress in the current step, and their gradients.

    Args:
      served: the server's blocks.
      update: the server's update. Its parameters are sent to trainers.
      trainers: the server's trainers.
      rows: answers to requests for table rows, with the memory of table gradients.
      exits: rule for trainers that leave before other trainers do.
      say: function that sends a message.

    Attributes:
      by_trainer: dict from the id of each trainer to its turn.
    """

    def __init__(
        self,
        served: ServerBlocks,
        update: StepUpdate,
        trainers: TrainerRegistry,
        rows: RowAnswers,
        exits: TrainerExits,
        say: Say,
    ) -> None:
        self._arguments, self._levels, self._update = served.arguments, served.levels, update
        self._trainers, self._say = trainers, say
        self._rows, self._exits = rows, exits
        pool = BufferPool()
        grads = {n: pool.take(n, t.shape, t.dtype) for n, t in served.gradients.items()}
        self._endpoint, self._names = served.endpoint, frozenset(grads)
        self.by_trainer = _turns_of(served, grads, rows, trainers.count)
        self._sizes = {n: nbytes(t) for n, t in served.params.items()}
        self._reads: list[set[str]] = []  # gradients that each part reads
        for part in update.parts:
            self._reads.append({*itertools.chain(*(sent.values() for sent in part.sent))})
        self._parts = list(range(len(update.parts)))  # parts of this step that are not computed

    @property
    def at_barrier(self) -> list[int]:
        """Ids of the trainers that have sent `send_barrier` in this step."""
        return [k for k, turn in self.by_trainer.items() if turn.at_barrier]

    @property
    def begun(self) -> list[int]:
        """Ids of the trainers that are in the middle of the step."""
        return [k for k, turn in self.by_trainer.items() if turn.begun]

    def take(self, k: int, message: wire.Message) -> None:
        """Receive gradients of trainer k.

        Raises:
          WireError: a gradient is not expected. Nothing has been stored.
        """
        grads = self.by_trainer[k].grads
        if not grads.begun:
            self._use_level(k, message, grads)
            self._rows.begin(k, message, grads)
        grads.take(message)

    def _use_level(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Provide memory for compressed gradients with the sizes that trainer k uses in this step.

        The sizes may change between steps. The trainer's first message has the index of the sizes,
        its field `level`.
        """
        if not self._levels:
            return
        level = message.fields.get("level", 0)
        if not 0 <= level < len(self._levels):
            raise WireError(
                f"trainer {k} sent compressed gradients with the density number {level}, but "
                f"pserver {self._endpoint} has levels 0 to {len(self._levels) - 1}"
            )
        memory, pool = {}, BufferPool()
        for n, t in self._levels[level].items():
            x = grads.memory.get(n)
            if x is not None and (x.shape, x.dtype) != (t.shape, t.dtype):
                memory[n] = pool.take(n, t.shape, t.dtype)
        grads.renew(memory)

    def reach_barrier(self, k: int, step: int) -> None:
        """Record that trainer k has sent `send_barrier`.

        Args:
          k: id of the trainer.
          step: number of complete updates.

        Raises:
          WireError: the trainer has already sent it, or a gradient is incomplete.
        """
        turn = self.by_trainer[k]
        if turn.at_barrier:
            raise WireError(f"trainer {k} sent a second `send_barrier` in step {step}")
        short = sorted(turn.grads.missing())
        if short:
            raise WireError(
                f"trainer {k} sent `send_barrier` of step {step} before gradient {short[0]} was "
                f"complete ({turn.grads.progress(short[0])})"
            )
        turn.at_barrier = True

    def update_parts(self, message: wire.Message, step: int) -> None:
        """Compute each part of the update that a message has made possible; send its parameters.

        If a trainer has left, the update uses other gradients, so no part is computed early.

        Args:
          message: the last message with gradients.
          step: number of complete updates.
        """
        present = self._trainers.present
        if len(present) < len(self.by_trainer):
            return
        arrived = {name for name, _, _ in itertools.chain(*message["pieces"])}
        late = set[str]()  # gradients whose next rows have not arrived from all trainers
        for number in self._parts[:]:
            part, reads = self._update.parts[number], self._reads[number]
            if reads.isdisjoint(arrived) or not reads.isdisjoint(late) or len(self._parts) == 1:
                continue
            if not self._has_gradients(part):
                late |= reads
                continue
            self._parts.remove(number)
            grads = self._gradients_of(part)
            new = self._update.update_part(number, grads, frozenset(present), step)
            for k in present:
                self._send_part(k, step + 1, new)

    def _has_gradients(self, part: UpdatePart) -> bool:
        """Return True if the gradients of all trainers for a part have arrived."""
        sent = itertools.chain.from_iterable(names.items() for names in part.sent)
        return all(self.by_trainer[k].grads.has_rows(n, part.rows) for k, n in sent)

    def _gradients(self) -> dict[str, Any]:
        """Return all gradients by name, without those of tables."""
        found: dict[str, Any] = {}
        for turn in self.by_trainer.values():
            found |= retain(turn.grads.memory, self._names)
        return found

    def _gradients_of(self, part: UpdatePart) -> dict[str, np.ndarray]:
        """Return the gradients that a part reads, by name."""
        sent = itertools.chain.from_iterable(names.items() for names in part.sent)
        return {n: self.by_trainer[k].grads.memory[n] for k, n in sent}

    def _send_part(self, k: int, step: int, new: Mapping[str, Any]) -> None:
        """Send trainer k the parameters of a part that it requested before it sent gradients."""
        turn, t = self.by_trainer[k], self._trainers.known[k]
        names = [n for n in t.wants if n in new]
        if not turn.requested or not names:
            return
        if not turn.answered:
            turn.unsent = sum(self._sizes[n] for n in t.wants)
        size = sum(new[n].nbytes for n in names)
        if size == turn.unsent:  # these bytes are sent with the end of the step
            return
        blocks = []
        for n in names:
            start = turn.answered.get(n, 0)
            turn.answered[n] = start + new[n].nbytes
            blocks.append((n, RowPieces([new[n]], start)))
        turn.unsent -= size
        self._say(t.address, "blocks", blocks, step=step)

    def inputs(self, step: int) -> tuple[dict[str, Any], list[int]]:
        """Return the step's gradients by name, and the ids of the trainers that computed them.

        `TrainerExits.counted` chooses these trainers.

        Args:
          step: number of complete updates.

        Raises:
          PeerError: trainers sent different values of a step argument that the update reads.
        """
        counted = self._exits.counted()
        grads = self._gradients()
        _check_arguments(self._arguments, grads, sorted(counted), step)
        inboxes = {k: turn.grads for k, turn in self.by_trainer.items()}
        return {**grads, **self._rows.gradients(inboxes, counted)}, counted

    def end_step(self, step: int) -> None:
        """Begin the next step of all trainers, and answer the trainers that wait for parameters.

        Args:
          step: number of complete updates.
        """
        for turn in self.by_trainer.values():
            turn.at_barrier = turn.looks_up = turn.requested = False
            turn.grads.clear()
        self._parts = list(range(len(self._update.parts)))
        self.forget(self._trainers.left)
        self._rows.send_changed(step)
        for k in self._trainers.known:
            if self.by_trainer[k].waits:
                self.answer(k, step)

    def forget(self, trainers: Collection[int]) -> None:
        """Set the gradients of trainers that have left to zero, if the option "paddle" requires it.

        See `TrainerExits.spend`.
        """
        for k in self._exits.spend(trainers):
            grads = self.by_trainer[k].grads
            grads.zero()
            self._rows.requests.used(k, grads)

    def answer(self, k: int, step: int) -> None:
        """Send trainer k the requested parameters, as they are after `step` updates."""
        turn, t = self.by_trainer[k], self._trainers.known[k]
        values = {}
        for n in t.wants:
            if n not in turn.answered:
                values[n] = self._update.values[n]
            elif turn.answered[n] < self._sizes[n]:
                values[n] = wire.after_bytes(self._update.values[n], turn.answered[n])
        turn.waits, turn.answered = False, {}
        answer(self._say, t, list(values), step, values)


def _turns_of(
    served: ServerBlocks, grads: Mapping[str, np.ndarray], rows: RowAnswers, trainers: int
) -> dict[int, TrainerTurn]:
    """Return the progress of each trainer at the start of a step, before gradients arrive."""
    row_gradients: set[str] = set()
    for table in served.tables.values():
        row_gradients.update(table.gradients.values())
    turns = {}
    for k in range(trainers):
        names = {sent[k] for sent in served.sent} - row_gradients
        memory = subset(grads, names) | rows.requests.memory_of(k)
        inbox = Inbox(memory, _unknown_gradient(k, served.endpoint), adopts=frozenset(names))
        turns[k] = TrainerTurn(inbox)
    return turns


def _unknown_gradient(k: int, endpoint: str) -> Callable[[str], str]:
    """Return a function that returns the error text for the name of an unknown gradient."""
    return lambda name: f"{name} is not a gradient that trainer {k} sends to pserver {endpoint}"


def _check_arguments(
    arguments: Mapping[str, Mapping[int, str]],
    grads: Mapping[str, np.ndarray],
    trainers: Sequence[int],
    step: int,
) -> None:
    """Raise PeerError if trainers sent different values of a step argument that the update reads.

    Args:
      arguments: maps each step argument to a dict. The dict maps the id of a trainer to the name
        under which this trainer sends the argument.
      grads: received arrays by name.
      trainers: sorted ids of the trainers to compare.
      step: number of complete updates.
    """
    for argument, sent in arguments.items():
        first, *others = trainers
        value = grads[sent[first]]
        for k in others:
            other = grads[sent[k]]
            if other.tobytes() != value.tobytes():
                raise PeerError(
                    f"{argument} of step {step + 1} is {wire.brief(value.tolist())} on trainer "
                    f"{first}, and {wire.brief(other.tolist())} on trainer {k}; the update reads "
                    "it, so all trainers must pass the same value"
                )
