"""Values that are computed from counters and fills: a shard computes its piece alone.

Positions, masks and random bits are such values. Their pieces cost no gather and no full value.
"""

from __future__ import annotations

import dataclasses

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.engine.layout import cut_along
from dtrans.engine.rules import strategy_of
from dtrans.engine.values import ShardValues
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.parts import recipe_of


class CountedValues:
    """Pieces of values that are computed from counters and fills.

    Args:
      values: values of the shard.
    """

    def __init__(self, values: ShardValues) -> None:
        self.values = values
        # by value and dimension
        self._counted: dict[tuple[Atom, int], bool] = {}

    def build_rows(self, var: Var, row: RowAxis) -> Atom | None:
        """Compute a piece of a value from counters and fills; None for other values."""
        eqn = self.values.producer(var)
        if eqn is None or not self._is_counted(var, row.axis):
            return None
        if self.values.pads_with_entries(var.aval.shape[row.axis], row):
            return None
        if eqn.primitive.name not in ("iota", "broadcast_in_dim"):
            self.values.built_as_rows[var] = row
        recipe = recipe_of(eqn, 0, self.values.pieces.of(var.aval.shape[row.axis], row))
        if row.order is not None and recipe is not None:
            local = self.values.shards.local(var.aval.shape[row.axis], row)
            if any(p is not None and p.size != local for _, p in recipe.needs):
                return None  # the operand has another order
        if recipe is not None:
            atoms = []
            for a, part in recipe.needs:
                along = None if part is None else dataclasses.replace(row, axis=part.axis)
                atoms.append(self.values.read(a, along))
            return recipe.write(self.values.b, atoms)
        way = strategy_of(eqn, [row, *(SHARED,) * (len(eqn.invars) - 1)], self.values.shards)
        return None if way is None or way.outs != (row,) else self.values.carry_out(eqn, way)[0]

    def _is_counted(self, var: Atom, axis: int) -> bool:
        """Return True if counters and fills suffice: a piece then needs no large value."""
        if (var, axis) not in self._counted:
            eqn = self.values.producer(var)
            self._counted[var, axis] = eqn is not None and self._counts(eqn, axis)
        return self._counted[var, axis]

    def _counts(self, eqn: JaxprEqn, axis: int) -> bool:
        name = eqn.primitive.name
        if len(eqn.outvars) != 1:
            return False
        if name.startswith("scatter"):  # writes into a counter
            return self._is_counted(eqn.invars[0], axis)
        recipe = recipe_of(
            eqn, 0, self.values.pieces.of(eqn.outvars[0].aval.shape[axis], cut_along(axis))
        )
        # outputs of these are larger than their operands
        if recipe is None or name in ("broadcast_in_dim", "random_bits"):
            return recipe is not None
        # selected slices are larger than the indices
        if name == "gather" and eqn.invars[1] in self.values.sliced:
            return True
        along = [(a, part.axis) for a, part in recipe.needs if part is not None]
        return all(self._is_counted(a, at) for a, at in along)
