"""Rounds of a step, in which all trainers exchange values: their parts are merged, and answered.

One round is open at a time: no trainer begins the next one before all have the answer of this one.
The rounds of a step have ascending numbers, and the server refuses parts of an answered round. The
first part of a round decides which values it has, and the parts of other trainers have to agree.
Memory is allocated for announced values, whose size is bounded. Its pages exist when bytes arrive.
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


LARGEST = 1 << 30  # bytes of one trainer's part of a round


@dataclasses.dataclass(frozen=True)
class RoundValue:
    """A value of a round: each trainer sends a part of it.

    Attributes:
      dtype, shape: of a part.
      way: the collective and its arguments: an entry of `how` of `exchange` (`dtrans.ops.rpc`).
    """

    dtype: str
    shape: tuple[int, ...]
    way: tuple[Any, ...]

    @property
    def row(self) -> list[Any]:
        """The value as a message lists it."""
        return [self.dtype, list(self.shape), list(self.way)]

    def room(self) -> np.ndarray:
        """Return memory for a part."""
        return np.empty(self.shape, np.dtype(self.dtype))


class TrainerRounds:
    """Rounds of one server's trainers.

    Args:
      count: number of trainers.

    Attributes:
      number: of the open round; None if no round is open.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.number: int | None = None
        self._step = 0
        self._answered: tuple[int, float] = (0, -math.inf)  # step and number of the last round
        self._values: tuple[RoundValue, ...] = ()
        self._parts: dict[int, Inbox] = {}

    def take(self, k: int, message: wire.Message) -> None:
        """Take a part of trainer k. Raises WireError, and takes nothing, if it is not a part of the
        open round."""
        step, number = message["step"], message["round"]
        values = values_of(message["values"], self.count)
        if self._is_over(step, number):
            raise WireError(f"an exchange of round {number} of step {step}, which was answered")
        if self.number is not None and (number, values) != (self.number, self._values):
            first = next(iter(self._parts))
            raise WireError(
                f"an exchange of round {number} with {len(values)} values of trainer {k}, where "
                f"trainer {first} is in round {self.number} with {len(self._values)} values, or "
                "with different values; every role must plan the same step with the same options"
            )
        part = self._parts.get(k)
        if part is None:
            memory = {str(i): v.room() for i, v in enumerate(values)}
            part = Inbox(
                memory, lambda name: f"value {wire.brief(name)} of an exchange of {len(values)}"
            )
        elif not part.missing():
            raise WireError(f"a second part of round {number} of trainer {k}")
        part.take(message)
        self._step, self.number, self._values, self._parts[k] = step, number, values, part

    def _is_over(self, step: int, number: int) -> bool:
        return (step, number) <= self._answered

    def begun(self, k: int) -> bool:
        """Return True if bytes of trainer k's part of the open round are here."""
        return k in self._parts

    def waiting(self) -> list[int]:
        """Return the trainers whose parts are complete."""
        return [k for k, part in self._parts.items() if not part.missing()]

    def answers(self, trainers: Collection[int]) -> dict[int, list[np.ndarray]]:
        """Close the open round, whose parts are all here; return the answer to each of these
        trainers."""
        order = sorted(trainers)
        parts = [list(self._parts[k].memory.values()) for k in order]
        values, each = self._values, list(zip(*parts, strict=True))
        assert self.number is not None
        self._answered = self._step, self.number
        self.number, self._values, self._parts = None, (), {}

        def answer(i: int) -> list[np.ndarray]:
            mine = lambda x, axis: np.split(x, len(order), axis)[i]
            merged = [exchanged(v.way, xs, mine, np) for v, xs in zip(values, each, strict=True)]
            return [np.asarray(x, v.dtype) for x, v in zip(merged, values, strict=True)]

        if all(COLLECTIVES[v.way[0]].same_for_all for v in values):
            return dict.fromkeys(order, answer(0))
        return {k: answer(i) for i, k in enumerate(order)}


def values_of(table: Any, trainers: int) -> tuple[RoundValue, ...]:
    """Return the values that a message lists. Raises WireError if these trainers cannot exchange
    them."""
    rows = table if isinstance(table, list) and table else [None]
    found = []
    for row in rows:
        if not (
            isinstance(row, list)
            and len(row) == 3
            and _is_type(*row[:2])
            and is_way(row[2], row[1], trainers)
        ):
            raise WireError(f"an exchange of {wire.brief(row)}, which is not [dtype, shape, way]")
        found.append(RoundValue(row[0], tuple(row[1]), tuple(row[2])))
    if sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in found) > LARGEST:
        raise WireError(f"an exchange of more than {LARGEST:,} bytes")
    return tuple(found)


def _is_type(dtype: Any, shape: Any) -> bool:
    try:
        known = (
            isinstance(dtype, str)
            and np.dtype(dtype).name == dtype
            and not np.dtype(dtype).hasobject
        )
    except TypeError:
        return False
    return (
        known
        and isinstance(shape, list)
        and all(type(n) is int and 0 <= n <= LARGEST for n in shape)
    )
