"""Log of the values that an evaluation computes, and of the equations that compute them.

An evaluator (`Evaluator`) with a log records all equations except calls, loops and branches. It
also records values that only move: the pieces of a `shard_map`, and the rows of a scan. The key of
a value is the `id` of its object, because calls and movements between ranks do not copy objects.
The log stores all objects, so that ids stay unique.

Read next: `naming`, which walks back from a wrong output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, line_of, origin_of
from dtrans.verification.field import Array
from dtrans.verification.field_values import Complex, Real


MOST_NUMBERS = 1 << 25  # largest number of numbers in a log: 0.5 GiB


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Entry of the log: the evaluation of an equation, or a movement of values.

    Attributes:
      name: the primitive; `shard_map` or `scan` for a movement.
      line: the user's source line, `model.py:12`; "" if there is none.
      origin: function that wrote an equation without a line, `optax.scale_by_adam`; "" if unknown.
      operands: for each operand, the value of each rank.
      outputs: for each output, the value of each rank.
      axes: size of each mesh axis, by name.
      eqn: the equation.
    """

    name: str
    line: str
    origin: str
    operands: Sequence[tuple[Any, ...]]
    outputs: Sequence[tuple[Any, ...]]
    axes: Mapping[str, int]
    eqn: JaxprEqn

    def __str__(self) -> str:
        place = self.line or self.origin
        return f"{self.name} ({place})" if place else self.name


def elements_of_value(x: Any) -> Array | None:
    """Return the finite-field elements of floats; None for other arrays.

    The elements of complex numbers have a last dimension of size 2, for both parts.
    """
    if isinstance(x, Real):
        return x.elements
    if isinstance(x, Complex):
        return np.stack([x.real.elements, x.imag.elements], -1)
    return None


class ValueLog:
    """Log of the equations that an evaluation computes, with the values of operands and outputs.

    Attributes:
      computations: the computations, in order.
      overflows: True if the log is full (`MOST_NUMBERS`), and later computations are missing.
    """

    def __init__(self) -> None:
        self.computations: list[Computation] = []
        self.overflows = False
        self._of_value: dict[tuple[int, ...], int] = {}
        self._of_object: dict[int, int] = {}
        self._numbers = 0

    def note(
        self,
        eqn: JaxprEqn,
        operands: Sequence[tuple[Any, ...]],
        outputs: Sequence[tuple[Any, ...]],
        axes: Mapping[str, int],
    ) -> None:
        """Add an evaluated equation to the log; the arguments are attributes of `Computation`."""
        distinct: dict[int, Any] = {}
        for output in outputs:
            distinct |= {id(x): x for x in output}
        for x in distinct.values():
            if isinstance(x, (Real, Complex)):
                self._numbers += x.approx.size
        if self._numbers > MOST_NUMBERS:
            self.overflows = True
            return
        number = len(self.computations)
        name = eqn.primitive.name
        line = line_of(eqn)
        origin = "" if line else origin_of(eqn)
        self.computations.append(
            Computation(name, line, origin, tuple(operands), tuple(outputs), dict(axes), eqn)
        )
        for output in outputs:
            self._of_value.setdefault(tuple(map(id, output)), number)
        for one in distinct:
            self._of_object.setdefault(one, number)

    def sources(self, value: Sequence[Any]) -> list[int]:
        """Return the indices of the computations that have a value as an output.

        The list is empty for an argument of the program.

        Args:
          value: the value on each rank.
        """
        # A collective may move one rank's object to another rank. So first look for a computation
        # whose output consists of exactly these objects, in the order of the ranks.
        key = tuple(map(id, value))
        if key in self._of_value:
            return [self._of_value[key]]
        return sorted({self._of_object[one] for one in key if one in self._of_object})
