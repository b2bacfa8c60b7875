"""Which leaves of a step are cut over the ranks of a sharding axis, along which dimension, and where their state is.

Every rank gets as many rows of a leaf as every other. Where the degree does not divide the rows, the last ones are
*padding*: zeros at the start, never gathered, and never part of a norm.

A leaf is cut along its first dimension; along the longest other one where the first has fewer rows than there are
ranks (the kernel of a convolution), and along the second where it is a stack that a loop over layers takes apart (a
rank that had whole layers would have nothing to give to the gather of a layer). It stays whole on every rank

  - where its update cannot be sliced (a matrix under Muon, a 0-d leaf): `dtrans.rows.analysis` says why;
  - where it is small: a slice saves bytes, and costs every rank one more part of a collective;
  - where no gradient updates it, or all ranks make its gradient without hearing of each other.

The optimizer's state is cut as the rows of its leaf are.

Source: the sharding pass of Paddle (auto_parallel_sharding.py) gives whole variables to owners; slices are those of
ZeRO (Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from dtrans._jax import SCAN, JaxprEqn, Literal, Var, scan_counts
from dtrans.ir.dataflow import propagate
from dtrans.ir.program import BACKWARD, FORWARD
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.rows.layout import Rows
from dtrans.step.cut import Cut
from dtrans.step.marks import mark_p
from dtrans.zero.live_ranges import is_cast


@dataclasses.dataclass(frozen=True)
class Sliced:
    """How an array is cut over the ranks of the sharding axis.

    Attributes:
      axis: the dimension.
      size: its size, without padding.
      part: how much of it each rank has.
      degree: how many ranks there are.
    """

    axis: int
    size: int
    part: int
    degree: int

    @property
    def padded(self) -> int:
        """The size of the dimension, with padding."""
        return self.part * self.degree

    def of_rank(self, aval: Any) -> Any:
        """The type of a rank's slice."""
        return _resized(aval, self.axis, self.part)

    def of_all(self, aval: Any) -> Any:
        """The type of all slices together, padding included."""
        return _resized(aval, self.axis, self.padded)

    def padding(self, aval: Any) -> int:
        """How many elements there are of it, in all slices together."""
        return (self.padded - self.size) * (math.prod(aval.shape) // self.size)


def _resized(aval: Any, axis: int, size: int) -> Any:
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis + 1 :]))


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """The decision.

    Attributes:
      analysis: of the optimize half, with the rows of leaves along the dimensions that were chosen.
      leaves: the leaves that are cut.
      state: the arrays of the optimizer's state that are cut with them, by name.
      wholes: why each other leaf is whole.
      unreduced: leaves whose gradient is the same on all ranks, which need not hear of each other for it.
    """

    analysis: RowAnalysis
    leaves: Mapping[str, Sliced]
    state: Mapping[str, Sliced]
    wholes: Mapping[str, str]
    unreduced: Collection[str] = ()


def slices_of(step: Cut, degree: int, *, least: int, stacked: Collection[str], sliced_in_use: bool) -> Slices:
    """Decide.

    Args:
      step: the step, cut.
      degree: how many ranks there are.
      least: a leaf of fewer elements stays whole.
      stacked: leaves that loops take apart along their first dimension.
      sliced_in_use: whether leaves are sliced in the forward pass too (stage 3).
    """
    types = {n: step.program.inputs[n] for n in step.params}
    axes = {n: axis for n in step.params if (axis := _axis(types[n].shape, degree, n in stacked)) is not None}
    analysis = analyse(step.optimize, step.params, {n: axis for n, axis in axes.items() if axis})
    shared = _made_by_all(step)
    leaves: dict[str, Sliced] = {}
    wholes: dict[str, str] = {}
    for n, t in types.items():
        group = analysis.groups.get(n)
        if n not in step.optimized:
            wholes[n] = "it is not updated"
        elif not t.ndim:
            wholes[n] = "it has no dimensions"
        elif group is not None:
            wholes[n] = group.reason or "it is updated together with one that is whole"
        elif not t.size:
            wholes[n] = "it has no elements"
        elif t.size < least:
            wholes[n] = f"it has {t.size} elements, fewer than {least}"
        elif n not in axes:
            wholes[n] = f"no dimension of {t.str_short()} has rows for {degree} ranks"
        elif n in shared and not sliced_in_use:
            wholes[n] = "its gradient is no sum over ranks"
        elif n not in step.optimize.graded and not sliced_in_use:
            wholes[n] = "no gradient enters its update"
        else:
            size = t.shape[axes[n]]
            leaves[n] = Sliced(axes[n], size, -(-size // degree), degree)
    state: dict[str, Sliced] = {}
    for name, var in analysis.inputs.items():
        row = analysis.layout(var)
        if isinstance(row, Rows) and row.leaf in leaves and isinstance(name, str) and name not in step.params:
            own = leaves[row.leaf]
            state[name] = Sliced(row.axis, own.size * row.width, own.part * row.width, degree)
    return Slices(analysis, leaves, state, wholes, frozenset(shared))


def _axis(shape: tuple[int, ...], degree: int, stacked: bool) -> int | None:
    """The dimension along which an array is cut; None if none has rows for at least half of the ranks."""
    first = 1 if stacked and len(shape) > 1 else 0
    if len(shape) <= first:
        return None
    if shape[first] >= degree:
        return first
    axis = max(range(first, len(shape)), key=lambda d: (shape[d], -d))
    axis = axis if shape[axis] >= degree else first
    # of fewer rows, padding would be more than the leaf
    return axis if shape[axis] and -(-shape[axis] // degree) * degree <= 2 * shape[axis] else None


def _made_by_all(step: Cut) -> set[str]:
    """Leaves whose gradient is the same on all ranks, without a reduction: no part of the batch enters it."""
    inner = step.program.inner
    batch = [v for n, v in step.program.invars.items() if n in step.batch]
    reached = propagate(inner.eqns, dict.fromkeys(batch, 1), {})
    return {n for n, g in step.gradients.items() if isinstance(g, Literal) or not reached.get(g)}


def stacked_leaves(step: Cut) -> set[str]:
    """Leaves that only loops read, each turn one entry along the first dimension; seen through changes of type."""
    inner = step.program.inner
    leaf_of: dict[Var, str] = {v: n for n, v in step.program.invars.items() if n in step.params}
    scanned: set[str] = set()
    others: set[str] = set()
    for eqn, role in zip(inner.eqns, step.program.roles, strict=True):
        if role not in (FORWARD, BACKWARD):
            continue
        stacks = stacks_of(eqn)
        for i, a in enumerate(eqn.invars):
            leaf = None if isinstance(a, Literal) else leaf_of.get(a)
            if leaf is None:
                continue
            if i in stacks:
                scanned.add(leaf)
            elif is_cast(eqn):
                leaf_of[eqn.outvars[0]] = leaf
            elif eqn.primitive is not mark_p:  # a mark says whose it is, and reads nothing
                others.add(leaf)
    return scanned - others


def stacks_of(eqn: JaxprEqn) -> range:
    """The operands of an equation that are taken apart, turn by turn: those of a scan."""
    if eqn.primitive.name != SCAN:
        return range(0)
    return range(sum(scan_counts(eqn)), len(eqn.invars))
