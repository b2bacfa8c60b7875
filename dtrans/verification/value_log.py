"""Log of the values that an evaluation computes, and of the equations that compute them.

A `World` with a log records each equation except calls, loops and branches, and each movement of
values: the pieces of a `shard_map`, the rows of a scan. The identity of its object is the key of a
value, since ranks and calls pass objects on unchanged. The log keeps all objects alive.

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


MOST_NUMBERS = 1 << 25  # in a log: 0.5 GiB with their shadows


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """One evaluation of an equation, or one movement of values.

    Attributes:
      name: the primitive, or `shard_map` and `scan` for their movements.
      line: the user's line, `model.py:12`; "" if there is none.
      origin: author of an equation without a line, `optax.scale_by_adam`; "" if that is unknown.
      operands: for each operand the value of each rank.
      outputs: for each output the value of each rank.
      axes: axes of the mesh by name, with their sizes.
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
    """Return the elements of floats; None for other arrays.

    Complex numbers have those of both parts along a last dimension.
    """
    if isinstance(x, Real):
        return x.elements
    return np.stack([x.real.elements, x.imag.elements], -1) if isinstance(x, Complex) else None


class ValueLog:
    """Computations in the order of a program.

    Attributes:
      computations: the computations.
      overflows: True if there were more numbers than fit, so that some computations are missing.
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
        """Add a computation."""
        distinct = {id(x): x for output in outputs for x in output}
        floats = [x for x in distinct.values() if isinstance(x, (Real, Complex))]
        self._numbers += sum(x.shadow.size for x in floats)
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
        """Return the numbers of the computations with the value as output; an argument has none."""
        # ranks may exchange objects: prefer the computation with these objects in this order
        key = tuple(map(id, value))
        if key in self._of_value:
            return [self._of_value[key]]
        return sorted({self._of_object[one] for one in key if one in self._of_object})
