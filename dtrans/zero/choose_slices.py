"""Choice of the leaves that are cut over the ranks of a sharding axis, and of their dimensions.

Every rank has the same number of rows of a leaf. If the degree does not divide the rows, the last
ones are *padding*: zeros at the start, never gathered, and never part of a norm.

A leaf is cut along its first dimension. If that has fewer rows than there are ranks (the kernel of
a convolution), it is cut along its longest other dimension. A stack whose layers are read one by
one is cut along a later dimension: a rank with complete layers would add nothing to the gather of
another layer. A leaf stays whole on every rank

  - where it has no dimensions, or its update meets each rank's own rows of the batch;
  - where forward and backward read its state, as those of a generator do that is trained after its
    discriminator;
  - where it is small: a slice saves bytes, and costs every rank one more part of a collective;
  - where no gradient updates it, or all ranks make its gradient without hearing of each other, and
    it has no state.

The optimizer's state is cut as the rows of its leaf are. Where an update mixes rows (Muon,
Shampoo), leaf and state are cut all the same, and the update gathers what it mixes
(`dtrans.zero.update`).

Source: the sharding pass of Paddle (auto_parallel_sharding.py) gives whole variables to owners;
slices are those of ZeRO (Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtrans._jax import JaxprEqn, Literal, Var, resized
from dtrans.engine.layout import cut_along
from dtrans.errors import UnknownPrimitiveWarning
from dtrans.ir.builder import Builder
from dtrans.ir.program import BACKWARD, FORWARD
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.rows.layout import SHARED, RowAxis, leaves_of
from dtrans.rows.normalize import inline_inside
from dtrans.step.cut import Cut, Gradient, Name
from dtrans.step.marks import mark_p
from dtrans.zero.forward_values import leaves_that_meet_the_batch
from dtrans.zero.rank_values import local_values
from dtrans.zero.slice_writer import Gathering, Given, SliceWriter


@dataclasses.dataclass(frozen=True)
class Sliced:
    """Cut of an array over the ranks of the sharding axis.

    Attributes:
      axis: the dimension.
      size: its size, without padding.
      part: the number of entries of each rank.
      degree: the number of ranks.
      width: the number of adjacent entries that belong to one row of a leaf, and stay together.
    """

    axis: int
    size: int
    part: int
    degree: int
    width: int = 1

    @property
    def row(self) -> RowAxis:
        """The layout that the engine knows."""
        return cut_along(self.axis, self.width)

    @property
    def padded(self) -> int:
        """The size of the dimension, with padding."""
        return self.part * self.degree

    def of_rank(self, aval: Any) -> Any:
        """Return the type of a rank's slice."""
        return resized(aval, self.axis, self.part)

    def of_all(self, aval: Any) -> Any:
        """Return the type of all slices together, padding included."""
        return resized(aval, self.axis, self.padded)

    def padding(self, aval: Any) -> int:
        """Return the number of elements of padding in all slices together."""
        return (self.padded - self.size) * (math.prod(aval.shape) // self.size)


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """The decision.

    Attributes:
      analysis: of the optimize half, with the rows of leaves along the dimensions that were chosen.
      leaves: the leaves that are cut.
      state: the arrays of the optimizer's state that are cut with them, by name.
      wholes: why each other leaf is whole.
      unreduced: leaves whose gradient is the same on all ranks, which need not hear of each other
        for it.
    """

    analysis: RowAnalysis
    leaves: Mapping[str, Sliced]
    state: Mapping[str, Sliced]
    wholes: Mapping[str, str]
    unreduced: Collection[str] = ()

    @property
    def cuts(self) -> dict[Name, Sliced]:
        """Leaves, their gradients and arrays of the state: what the update takes in slices."""
        found: dict[Name, Sliced] = {Gradient(n): sliced for n, sliced in self.leaves.items()}
        found.update(self.leaves)
        found.update(self.state)
        return found


def slices_of(
    step: Cut,
    degree: int,
    *,
    least: int,
    in_layers: bool,
    sliced_in_use: bool,
    differing: Collection[Name] = (),
    planned: Slices | None = None,
) -> Slices:
    """Decide which leaves are cut, and how.

    Args:
      step: the step, cut.
      degree: how many ranks there are.
      least: a leaf of fewer elements stays whole.
      in_layers: whether it matters which layers of a leaf are read together.
      sliced_in_use: whether leaves are sliced in the forward pass too (stage 3).
      differing: inputs of the update that differ from rank to rank.
      planned: the decision for another batch size: leaves are cut along its dimensions.
    """
    types = {n: step.program.inputs[n] for n in step.params}
    axes = {n: axis for n in step.params if (axis := _axis(types[n].shape, degree)) is not None}
    if planned is not None:
        axes |= {n: sliced.axis for n, sliced in planned.leaves.items()}
    elif in_layers:
        axes = _read_as_layers(step, axes, degree)
    with warnings.catch_warnings():
        # the engine warns of an unknown primitive, whose operands it gathers: no leaf is whole for
        # it
        warnings.simplefilter("ignore", UnknownPrimitiveWarning)
        analysis = analyse(
            step.optimize, step.params, {n: axis for n, axis in axes.items() if axis}
        )
    mixed = leaves_that_meet_the_batch(analysis, differing)
    shared = _made_by_all(step)
    homes = _homes_of_state(analysis)
    in_state = {leaf for leaf, _ in homes.values()}
    asked = {leaf: n for n, (leaf, _) in homes.items() if n in step.state_read}
    leaves: dict[str, Sliced] = {}
    wholes: dict[str, str] = {}
    for n, t in types.items():
        if n not in step.optimized:
            wholes[n] = step.reason_not_optimized(n)
        elif not t.ndim:
            wholes[n] = "it has no dimensions"
        elif n in mixed:
            wholes[n] = mixed[n]
        elif not t.size:
            wholes[n] = "it has no elements"
        elif n in asked:
            wholes[n] = f"{step.state_read[asked[n]]} is made of {asked[n]}"
        elif t.size < least:
            wholes[n] = f"it has {t.size} elements, fewer than {least}"
        elif n not in axes:
            wholes[n] = f"no dimension of {t.str_short()} has rows for {degree} ranks"
        elif n in shared and not sliced_in_use and n not in in_state:
            wholes[n] = "its gradient is no sum over ranks"
        elif not (
            n in step.optimize.graded or sliced_in_use or n in in_state or n in analysis.groups
        ):
            wholes[n] = "no gradient enters its update"
        else:
            size = t.shape[axes[n]]
            leaves[n] = Sliced(axes[n], size, -(-size // degree), degree)
    state: dict[str, Sliced] = {}
    for name, (leaf, row) in homes.items():
        if leaf not in leaves or name in step.state_read:
            continue
        shape = step.program.inputs[name].shape
        if row is None:
            row = _rows_of_state(shape, types[leaf].shape, axes[leaf], degree, least)
        if row is not None:
            size = shape[row.axis]
            part = -(-size // row.width // degree) * row.width
            state[name] = Sliced(row.axis, size, part, degree, row.width)
    return Slices(analysis, leaves, state, wholes, frozenset(shared))


def _homes_of_state(analysis: RowAnalysis) -> dict[str, tuple[str, RowAxis | None]]:
    """Return the leaf that each array of the state belongs to, and how its rows lie; None if rows
    are mixed."""
    found: dict[str, tuple[str, RowAxis | None]] = {}
    for name, var in analysis.inputs.items():
        layout = analysis.layout(var)
        if not isinstance(name, str) or name in analysis.params or layout is SHARED:
            continue
        row = layout if isinstance(layout, RowAxis) else None
        found[name] = min(leaves_of([layout])), row
    return found


def _rows_of_state(
    shape: tuple[int, ...], leaf: tuple[int, ...], axis: int, degree: int, least: int
) -> RowAxis | None:
    """Return how an array of the state is cut whose rows an update mixes; None if it stays whole.

    A copy of the leaf, or a history of copies, is cut as the leaf. Any other array, such as a
    preconditioner, is cut where it has rows and at least `least` elements: the update gathers it.
    """
    if shape[-len(leaf) :] == leaf:
        return cut_along(len(shape) - len(leaf) + axis)
    own = _axis(shape, degree) if math.prod(shape) >= max(least, 1) else None
    return None if own is None else cut_along(own)


def _axis(shape: tuple[int, ...], degree: int, first: int = 0) -> int | None:
    """Return the dimension to cut, `first` or later; None if none has rows for half the ranks."""
    if len(shape) <= first:
        return None
    if shape[first] >= degree:
        return first
    axis = max(range(first, len(shape)), key=lambda d: (shape[d], -d))
    axis = axis if shape[axis] >= degree else first
    # of fewer rows, padding would be more than the leaf
    return axis if shape[axis] and -(-shape[axis] // degree) * degree <= 2 * shape[axis] else None


def _made_by_all(step: Cut) -> set[str]:
    """Leaves whose gradient is the same on all ranks, without a reduction.

    No part of the batch enters it, nor which rank it is: a term that one rank has alone is to be
    added up.
    """
    batch = [v for n, v in step.program.invars.items() if n in step.batch]
    local = local_values(step.program.inner.eqns, batch)
    return {n for n, g in step.gradients.items() if isinstance(g, Literal) or g not in local}


def _read_as_layers(step: Cut, axes: Mapping[str, int], degree: int) -> dict[str, int]:
    """Return the dimension to cut of each leaf, so that as little of it as possible is whole at a
    time.

    Args:
      axes: where nothing else is known.
    """
    eqns, roles = trainer_equations(step)
    jaxpr = step.program.jaxpr
    vars_of = step.program.invars
    local = local_values(eqns, [vars_of[n] for n in step.batch])
    gradients = summed_gradients(step, eqns, axes)
    best = dict(axes)
    least: dict[str, int] = {}
    ahead = dict(axes)
    for first in range(1, 1 + max((vars_of[n].aval.ndim for n in axes), default=0)):
        given = Given(
            rows={vars_of[n]: RowAxis(n, axis) for n, axis in ahead.items()},
            local=local,
            wanted={g: RowAxis(n, ahead[n]) for g, n in gradients.items() if n in ahead},
        )
        found = SliceWriter(
            Builder(jaxpr), jaxpr, eqns, roles, given, Gathering("", degree)
        ).largest()
        for n, axis in ahead.items():
            if found.get(n, 0) < least.get(n, math.inf):
                best[n], least[n] = axis, found.get(n, 0)
        # another dimension may be better for what is read at all in layers
        again = {n for n in ahead if least[n] == vars_of[n].aval.size or first > 1}
        ahead = {
            n: a for n in again if (a := _axis(vars_of[n].aval.shape, degree, first)) is not None
        }
    return best


def summed_gradients(
    step: Cut, eqns: Sequence[JaxprEqn], leaves: Collection[str]
) -> dict[Var, str]:
    """Return the gradients that only the update reads, which loops may compute as slices."""
    made = {v for e in eqns for v in e.outvars}
    atoms = (*step.program.inner.outvars, *(a for e in eqns for a in e.invars))
    read = {a for a in atoms if isinstance(a, Var)}
    found: dict[Var, str] = {}
    for leaf, g in step.gradients.items():
        if leaf in leaves and isinstance(g, Var) and g in made and g not in read and g not in found:
            found[g] = leaf
    return found


def trainer_equations(step: Cut) -> tuple[list[JaxprEqn], list[str]]:
    """Return the equations of forward and backward, and their roles; calls in loops are inlined."""
    pairs = [(e, role) for e, role in zip(step.program.eqns, step.program.roles, strict=True)
             if role in (FORWARD, BACKWARD) and e.primitive is not mark_p]  # fmt: skip
    return [inline_inside(e) for e, _ in pairs], [role for _, role in pairs]
