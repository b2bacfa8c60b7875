"""Numbers that depend on the batch size become inputs of the update.

An update may count rows (`seen + len(x)`) or divide by their number (`gradient / len(x)`). JAX
traces `len(x)` as a constant, so the traced update is correct for one batch size only. But
parameter servers compile their updates before any batch arrives. So this module turns the constant
into an input, which trainers send in each step.

`numbers_of_size` finds these constants: it compares two traces of one step, with different batch
sizes. Invariant: with the numbers as inputs, the update is the same for every batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import Atom, Literal, Var, closed_with
from dtrans.errors import BatchError
from dtrans.ir.pytree import unused_name
from dtrans.step.halves import DividedStep, UpdateProgram


OUTPUTS = -1  # value of `NumberPlace.eqn` for a number that the update returns


@dataclasses.dataclass(frozen=True)
class NumberPlace:
    """Position of a constant in an update: an operand of an equation, or an output.

    Attributes:
      eqn: position of the equation in the update, or `OUTPUTS`.
      operand: position among the equation's operands; with `OUTPUTS`, among the update's outputs.
    """

    eqn: int
    operand: int


@dataclasses.dataclass(frozen=True)
class BatchNumbers:
    """Constants of an update that depend on the batch size, and their positions.

    Attributes:
      places: maps the name of each number to the operands and outputs that the number replaces.
      fixed: outputs of the update that depend on the batch size otherwise, such as by their shape.
        An input cannot replace the batch size there.
      has_one_size: True if the step could not be traced with another batch size. It is unknown
        whether the update depends on the batch size.
    """

    places: Mapping[str, tuple[NumberPlace, ...]] = dataclasses.field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    has_one_size: bool = False

    def as_inputs_of(self, step: DividedStep) -> DividedStep:
        """Return a step with an update that takes these numbers as inputs, not as constants.

        The attribute `numbers` of the result has the values for the batch size of `step`. Trainers
        send these values to the servers.

        Args:
          step: the training step, divided into its gradient computation and its update; it may be a
            trace with any batch size.

        Raises:
          BatchError: the update does not have these numbers at these places.
        """
        if not self.places:
            return step
        half, rows = step.optimize, _operands(step.optimize)
        values: dict[str, np.ndarray] = {}
        inputs: dict[str, Var] = {}
        for name, places in self.places.items():
            value = _literal_at(rows, places)
            if value is None:
                raise BatchError(
                    f"the update of {step.program.name} has other equations for this batch size "
                    "than for the traced batch size; pass batches of the traced size"
                )
            values[name] = value
            inputs[name] = Var(jax.typeof(value))
        for name, places in self.places.items():
            for place in places:
                rows[place.eqn][place.operand] = inputs[name]
        invars = [*half.inner.invars, *inputs.values()]
        eqns = [e.replace(invars=rows[i]) for i, e in enumerate(half.eqns)]
        jaxpr = closed_with(half.jaxpr, invars=invars, outvars=rows[OUTPUTS], eqns=eqns)
        update = dataclasses.replace(half, jaxpr=jaxpr, in_names=(*half.in_names, *inputs))
        return dataclasses.replace(step, optimize=update, numbers=values)


def numbers_of_size(step: DividedStep, other: DividedStep) -> BatchNumbers:
    """Find the constants in an update that depend on the batch size.

    The function compares the updates of two traces of one step. If only constants differ, the
    result has their positions. Other things may differ, such as the body of a branch. Then the
    result has no positions, and `fixed` lists the outputs that differ.

    Args:
      step: the training step, divided into its gradient computation and its update.
      other: the same step, traced with another batch size.
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
    explains_all = named and not found.as_inputs_of(step).optimize.differing_outputs(
        found.as_inputs_of(other).optimize
    )
    return found if explains_all else BatchNumbers(fixed=fixed)


def _operands(half: UpdateProgram) -> dict[int, list[Atom]]:
    """Return the operands of each equation, by its position; the outputs have the key `OUTPUTS`."""
    operands = {i: list(eqn.invars) for i, eqn in enumerate(half.eqns)}
    operands[OUTPUTS] = list(half.inner.outvars)
    return operands


def _literal_at(
    rows: Mapping[int, Sequence[Atom]], places: Sequence[NumberPlace]
) -> np.ndarray | None:
    """Return the constant at all given places of an update; None if they have no common constant.

    Args:
      rows: operands of each equation, and the outputs, as from `_operands`.
      places: the places.
    """
    found: np.ndarray | None = None
    for place in places:
        atoms = rows.get(place.eqn, ())
        if place.operand >= len(atoms):
            return None
        atom = atoms[place.operand]
        if not isinstance(atom, Literal):
            return None
        value = np.asarray(atom.val, atom.aval.dtype)
        if found is not None and (value.dtype != found.dtype or value != found):
            return None
        found = value
    return found
