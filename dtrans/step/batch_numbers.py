"""Numbers in an update that depend on the batch size, as inputs of the update.

An update may count rows (`seen + len(x)`) or divide by their number (`gradient / len(x)`). In the
trace such a number is a literal that differs for every batch size. Servers compile their updates
before any batch arrives. There the number is an input, which trainers send with each step.

The numbers are found by comparing the update with that of the same step for another batch size
(`numbers_of_size`). Invariant: with the numbers as inputs both updates are equal, for every size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import Atom, JaxprEqn, Literal, Var, closed_with
from dtrans.errors import BatchError
from dtrans.ir.pytree import unused_name
from dtrans.step.cut import Cut, OptimizeHalf


OUTPUTS = -1  # position of the outputs of an update


@dataclasses.dataclass(frozen=True)
class NumberPlace:
    """Position of a number: that of the equation that reads it, or `OUTPUTS`, and of the
    operand."""

    eqn: int
    operand: int


@dataclasses.dataclass(frozen=True)
class BatchNumbers:
    """Numbers in an update that depend on the batch size.

    Attributes:
      spots: name of each number to its positions.
      fixed: outputs of the update that depend on the batch size in another way.
    """

    spots: Mapping[str, tuple[NumberPlace, ...]] = dataclasses.field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def taken_by(self, step: Cut) -> Cut:
        """Return the step with these numbers as inputs of its update.

        Raises:
          BatchError: the update has different equations than when the numbers were found.
        """
        if not self.spots:
            return step
        half, rows = step.optimize, _operands(step.optimize)
        values = {}
        for n, places in self.spots.items():
            found = [rows.get(s.eqn, [])[s.operand : s.operand + 1] for s in places]
            values[n] = _number(found)
        if any(x is None for x in values.values()):
            raise BatchError(
                f"the update of {step.program.name} has different equations for a batch of this "
                "size than for the batch it was planned with; give batches of the size that the "
                "step was traced with"
            )
        inputs = {n: Var(jax.typeof(x)) for n, x in values.items()}
        for n, spots in self.spots.items():
            for s in spots:
                rows[s.eqn][s.operand] = inputs[n]
        invars = [*half.inner.invars, *inputs.values()]
        eqns = [e.replace(invars=rows[i]) for i, e in enumerate(half.eqns)]
        jaxpr = closed_with(half.jaxpr, invars=invars, outvars=rows[OUTPUTS], eqns=eqns)
        update = dataclasses.replace(half, jaxpr=jaxpr, in_names=(*half.in_names, *inputs))
        return dataclasses.replace(step, optimize=update, numbers=values)


def numbers_of_size(step: Cut, other: Cut) -> BatchNumbers:
    """Return the numbers in which the updates of a step differ, for two batch sizes.

    None are found if the updates differ in anything else, such as the body of a branch.
    """
    fixed = tuple(step.optimize.differing_outputs(other.optimize))
    if not fixed:
        return BatchNumbers()
    mine, theirs = _operands(step.optimize), _operands(other.optimize)
    primitives = [e.primitive for e in step.optimize.eqns]
    if primitives != [e.primitive for e in other.optimize.eqns]:
        return BatchNumbers(fixed=fixed)
    spots: dict[Any, list[NumberPlace]] = {}
    for i, atoms in mine.items():
        for k, (a, b) in enumerate(zip(atoms, theirs[i], strict=True)):
            if (
                isinstance(a, Literal)
                and isinstance(b, Literal)
                and not np.array_equal(a.val, b.val)
            ):
                spots.setdefault((str(a.aval.dtype), str(a.val), str(b.val)), []).append(
                    NumberPlace(i, k)
                )
    taken = {str(n) for n in step.optimize.in_names}
    named: dict[str, tuple[NumberPlace, ...]] = {}
    for places in spots.values():
        name = unused_name(f"@batch_size/{len(named)}", taken)
        taken.add(name)
        named[name] = tuple(places)
    found = BatchNumbers(named)
    alike = named and not found.taken_by(step).optimize.differing_outputs(
        found.taken_by(other).optimize
    )
    return found if alike else BatchNumbers(fixed=fixed)


def _operands(half: OptimizeHalf) -> dict[int, list[Atom]]:
    """Return the operands of each equation by its position, and the outputs."""
    eqns: Sequence[JaxprEqn] = half.eqns
    return {**{i: list(e.invars) for i, e in enumerate(eqns)}, OUTPUTS: list(half.inner.outvars)}


def _number(read: Sequence[Sequence[Atom]]) -> np.ndarray | None:
    """Return the number that several places read; None if it is not one literal in all of them."""
    found = [
        np.asarray(a.val, a.aval.dtype) for atoms in read for a in atoms if isinstance(a, Literal)
    ]
    alike = len(found) == len(read) and all(
        x.dtype == found[0].dtype and x == found[0] for x in found
    )
    return found[0] if alike else None
