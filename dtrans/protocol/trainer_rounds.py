"""What trainers of a synchronous server exchange in the middle of a step: their parts, made one,
and answered.

There is one round at a time: nobody comes to the next before all have the answer of this one.
Rounds of a step have ascending numbers, and one that was answered is over: what comes for it again
is refused. The first part that comes says what the round is of; parts of others have to be of the
same. Memory is taken for what is announced, which is bounded, and its pages are not there before
bytes are.
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
    """A value of which each trainer has a part.

    Attributes:
      dtype, shape: of a part.
      way: what it becomes: an entry of `how` of `exchange` (`dtrans.ops.rpc`).
    """

    dtype: str
    shape: tuple[int, ...]
    way: tuple[Any, ...]

    @property
    def row(self) -> list[Any]:
        """As a message has it."""
        return [self.dtype, list(self.shape), list(self.way)]

    def room(self) -> np.ndarray:
        """Memory for a part."""
        return np.empty(self.shape, np.dtype(self.dtype))


class TrainerRounds:
    """The rounds of one server's trainers.

    Args:
      count: how many there are.

    Attributes:
      number: of the round that is open; None where none is.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.number: int | None = None
        self._step = 0
        # the last round that was: its step and number
        self._answered: tuple[int, float] = (
            0,
            -math.inf,
        )
        self._values: tuple[RoundValue, ...] = ()
        self._parts: dict[int, Inbox] = {}

    def take(self, k: int, message: wire.Message) -> None:
        """Take a part of trainer k. Raises WireError, and takes nothing, for what is not that of
        the open round."""
        step, number, values = (
            message["step"],
            message["round"],
            values_of(message["values"], self.count),
        )
        if self._is_over(step, number):
            raise WireError(f"an exchange of round {number} of step {step}, which was answered")
        if self.number is not None and (number, values) != (self.number, self._values):
            first = next(iter(self._parts))
            raise WireError(
                f"an exchange of round {number} with {len(values)} values of trainer {k}, where "
                f"trainer {first} is in "
                f"round {self.number} with {len(self._values)} values, or these are others; every "
                "role must plan the "
                "same step with the same options"
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
        """Whether anything of trainer k has come to the open round."""
        return k in self._parts

    def waiting(self) -> list[int]:
        """The trainers whose parts are all here."""
        return [k for k, part in self._parts.items() if not part.missing()]

    def answers(self, trainers: Collection[int]) -> dict[int, list[np.ndarray]]:
        """What each of these trainers gets of the open round, which ends; all their parts are
        here."""
        order = sorted(trainers)
        parts = [list(self._parts[k].memory.values()) for k in order]
        values, each = self._values, list(zip(*parts, strict=True))
        assert self.number is not None
        self._answered = self._step, self.number
        self.number, self._values, self._parts = None, (), {}

        def answer(i: int) -> list[np.ndarray]:
            mine = lambda x, axis: np.split(x, len(order), axis)[i]
            made = [exchanged(v.way, xs, mine, np) for v, xs in zip(values, each, strict=True)]
            return [np.asarray(x, v.dtype) for x, v in zip(made, values, strict=True)]

        if all(COLLECTIVES[v.way[0]].same_for_all for v in values):
            return dict.fromkeys(order, answer(0))
        return {k: answer(i) for i, k in enumerate(order)}


def values_of(table: Any, trainers: int) -> tuple[RoundValue, ...]:
    """The values that a message lists. Raises WireError where they are none that so many trainers
    can exchange."""
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
