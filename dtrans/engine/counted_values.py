"""Values computed from `iota` and constants, such as masks: each shard computes its own part.

Positions (`iota`), masks (`iota < n`), constants that were broadcast, and random bits are *counted*
values. A shard's part of a value is its *piece*. Each shard computes its piece of a counted value
directly, without a gather and without the full value.
"""

from __future__ import annotations

import dataclasses

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.engine.layout import sharded_along
from dtrans.engine.rules import strategy_of
from dtrans.engine.values import ShardValues
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.parts import recipe_of


class CountedValues:
    """Writer of pieces of counted values, which are computed from `iota` and constants only.

    Args:
      values: the values of the shard.
    """

    def __init__(self, values: ShardValues) -> None:
        self.values = values
        # (value, dimension) -> result of `_is_counted`
        self._counted: dict[tuple[Atom, int], bool] = {}

    def build_rows(self, var: Var, row: RowAxis) -> Atom | None:
        """Write a shard's piece of a value that is computed from `iota` and constants.

        Return None for any other value. `row` is the layout of the piece.
        """
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
                return None  # a shard would need other entries of the operand than those it has
        if recipe is not None:
            atoms = []
            for a, part in recipe.needs:
                along = None if part is None else dataclasses.replace(row, axis=part.axis)
                atoms.append(self.values.read(a, along))
            return recipe.write(self.values.b, atoms)
        way = strategy_of(eqn, [row, *(SHARED,) * (len(eqn.invars) - 1)], self.values.shards)
        if way is None or way.outs != (row,):
            return None
        return self.values.carry_out(eqn, way)[0]

    def _is_counted(self, var: Atom, axis: int) -> bool:
        """Return True if pieces along `axis` can be computed from `iota` and small values."""
        if (var, axis) not in self._counted:
            eqn = self.values.producer(var)
            self._counted[var, axis] = eqn is not None and self._counts(eqn, axis)
        return self._counted[var, axis]

    def _counts(self, eqn: JaxprEqn, axis: int) -> bool:
        name = eqn.primitive.name
        if len(eqn.outvars) != 1:
            return False
        if name.startswith("scatter"):  # updates are small, so only the operand must be counted
            return self._is_counted(eqn.invars[0], axis)
        recipe = recipe_of(
            eqn, 0, self.values.pieces.of(eqn.outvars[0].aval.shape[axis], sharded_along(axis))
        )
        # the operands of these two primitives are small, so they need not be counted
        if recipe is None or name in ("broadcast_in_dim", "random_bits"):
            return recipe is not None
        # If the indices are an input, a shard slices the indices, which are smaller than the output
        # of the gather.
        if name == "gather" and eqn.invars[1] in self.values.sliced:
            return True
        along = [(a, part.axis) for a, part in recipe.needs if part is not None]
        return all(self._is_counted(a, at) for a, at in along)
