"""Rounds: exchanges of values between all trainers through the server, within a step.

In a round, each trainer sends its part of each value. The server merges the parts of all trainers
by a collective, and sends the results. Only one round is open at a time, because a trainer waits
for the results before it starts the next round. The rounds of a step have increasing numbers, and
the server refuses parts for an answered round. The trainer that sends the first part determines
the types of the round's values. The other trainers must send the same types.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.ops import COLLECTIVES, exchanged, is_way
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry


RESULTS = -1  # number of the round that merges results; it precedes the rounds of the next step
LARGEST = 1 << 30  # maximum number of bytes that one trainer may send in a round


@dataclasses.dataclass(frozen=True)
class RoundValue:
    """Type of one value of a round.

    Attributes:
      dtype: dtype of a trainer's part.
      shape: shape of a trainer's part.
      collective: name and arguments of the collective that merges the parts, such as ("all_reduce",
        "sum").
    """

    dtype: str
    shape: tuple[int, ...]
    collective: tuple[Any, ...]

    @property
    def row(self) -> list[Any]:
        """The value as an item of the field `values` of `exchange`: [dtype, shape, way]."""
        return [self.dtype, list(self.shape), list(self.collective)]

    def room(self) -> np.ndarray:
        """Allocate memory for a part."""
        return np.empty(self.shape, np.dtype(self.dtype))


class TrainerRounds:
    """Rounds of one server: exchanges of values between all trainers within a step.

    Args:
      count: number of trainers.

    Attributes:
      number: number of the open round; None if no round is open.
      merges_results: True if this server merges the trainers' results of each step, such as the
        loss. Trainers send them after the update, in a round with the number `RESULTS`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.number: int | None = None
        self.merges_results = False
        self._step = 0
        # Step and number of the round that was answered last
        self._answered: tuple[int, float] = (0, -math.inf)
        self._values: tuple[RoundValue, ...] = ()
        self._parts: dict[int, Inbox] = {}

    def take(self, k: int, message: wire.Message) -> None:
        """Receive values of trainer k.

        Raises:
          WireError: the values do not belong to the open round. Nothing has been stored.
        """
        step, number = message["step"], message["round"]
        values = values_of(message["values"], self.count)
        if self._is_over(step, number):
            raise WireError(
                f"trainer {k} sent values of round {number} of step {step} (`exchange`), but this "
                "round is already answered"
            )
        if self.number is not None and (number, values) != (self.number, self._values):
            first = next(iter(self._parts))
            raise WireError(
                f"an `exchange` message of trainer {k} with {len(values)} values in round {number},"
                f" but trainer {first} sent {len(self._values)} values in round {self.number}, or "
                "values of other types; every role must plan the same step with the same options"
            )
        part = self._parts.get(k)
        if part is None:
            memory = {str(i): v.room() for i, v in enumerate(values)}
            part = Inbox(
                memory,
                lambda name: (
                    f"an `exchange` message with a block {wire.brief(name)}, expected "
                    f"{len(values)} blocks, which are named by their index"
                ),
            )
        elif not part.missing():
            raise WireError(
                f"trainer {k} sent an `exchange` message in round {number}, but all its values of "
                "this round have already arrived; the server expects none before its answer"
            )
        part.take(message)
        self._step, self.number, self._values, self._parts[k] = step, number, values, part

    def has_merged_results(self, step: int) -> bool:
        """Return True if the round that merges the results of a step is answered."""
        return self._is_over(step, RESULTS)

    def _is_over(self, step: int, number: int) -> bool:
        return (step, number) <= self._answered

    def begun(self, k: int) -> bool:
        """Return True if trainer k has sent values in the open round."""
        return k in self._parts

    def waiting(self) -> list[int]:
        """Return the ids of the trainers that have sent all their values of the open round."""
        return [k for k, part in self._parts.items() if not part.missing()]

    def carry_out(self, trainers: TrainerRegistry, say: Say) -> None:
        """Close the open round, and send the merged values to the trainers.

        Args:
          trainers: the server's trainers. All trainers that have not left have sent their values.
          say: function that sends a message.
        """
        at = {"step": self._step, "round": self.number}
        for k, values in self.answers(trainers.present).items():
            table = [[x.dtype.name, list(x.shape)] for x in values]
            blocks = [(str(i), x) for i, x in enumerate(values)]
            say(trainers.known[k].address, "exchanged", blocks, **at, values=table)

    def answers(self, trainers: Collection[int]) -> dict[int, list[np.ndarray]]:
        """Close the open round, and return a map from trainer ids to the merged values.

        Args:
          trainers: ids of the trainers of the round. All of them have sent their values.
        """
        order = sorted(trainers)
        parts = [list(self._parts[k].memory.values()) for k in order]
        values, each = self._values, list(zip(*parts, strict=True))
        assert self.number is not None
        self._answered = self._step, self.number
        self.number, self._values, self._parts = None, (), {}

        def answer(i: int) -> list[np.ndarray]:
            mine = lambda x, axis: np.split(x, len(order), axis)[i]
            merged = []
            for value, arrays in zip(values, each, strict=True):
                result = exchanged(value.collective, arrays, mine, np)
                merged.append(np.asarray(result, value.dtype))
            return merged

        if all(COLLECTIVES[v.collective[0]].same_for_all for v in values):
            return dict.fromkeys(order, answer(0))
        return {k: answer(i) for i, k in enumerate(order)}


def values_of(table: Any, trainers: int) -> tuple[RoundValue, ...]:
    """Check the field `values` of an `exchange` message, and return the types that it contains.

    Args:
      table: the field.
      trainers: number of trainers.

    Raises:
      WireError: the field is malformed, or a value cannot be divided over the trainers.
    """
    rows: list[Any] = table if isinstance(table, list) and table else [None]
    found = []
    for row in rows:
        if not _is_value(row, trainers):
            raise WireError(
                f"an `exchange` message with the value {wire.brief(row)}, expected "
                "[dtype, shape, way]"
            )
        found.append(RoundValue(row[0], tuple(row[1]), tuple(row[2])))
    if sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in found) > LARGEST:
        raise WireError(f"an `exchange` message with more than {LARGEST:,} bytes of values")
    return tuple(found)


def _is_value(row: Any, trainers: int) -> bool:
    """Return True if `row` is a valid [dtype, shape, way] for this number of trainers."""
    if not isinstance(row, list) or len(row) != 3:
        return False
    dtype, shape, way = row
    return _is_dtype(dtype) and _is_shape(shape) and is_way(way, shape, trainers)


def _is_dtype(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and not dtype.hasobject


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(n) is int and 0 <= n <= LARGEST for n in shape)
