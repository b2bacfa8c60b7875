"""Choice of the parameters to divide into one slice for each rank, and of the dimension to divide.

All slices of a parameter have the same size. If the number of ranks does not divide the dimension,
the last slices end with *padding*. The padding is zero in the first state. Gathers drop the
padding, and norms ignore it.

A parameter is sliced along its first dimension. If that dimension is shorter than the number of
ranks, as in the kernel of a convolution, the longest dimension is sliced. Loops may read a stack of
parameters layer by layer. The stack is sliced along a later dimension, so that each rank has a
slice of every layer. These parameters are not sliced:

  - parameters without dimensions;
  - parameters that the update combines with each rank's part of the batch;
  - parameters with optimizer state that is read outside the update;
  - small parameters: slices would save few bytes, and each slice adds an operand to a collective;
  - parameters that no gradient updates;
  - parameters without optimizer state, if all ranks compute the same gradient anyway.

The optimizer's state is sliced like its parameter. If an update mixes rows (Muon, Shampoo),
parameter and state are sliced too. The update then gathers the operands that it needs
(`dtrans.zero.update`).

Source: ZeRO divides variables into slices (Rajbhandari et al., arXiv 1910.02054). The sharding pass
of Paddle (auto_parallel_sharding.py) assigns each variable to one owner instead.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dtrans._jax import JaxprEqn, Literal, Var
from dtrans.engine.layout import Sliced, sharded_along
from dtrans.errors import UnknownPrimitiveWarning
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import outputs_of, variables_read
from dtrans.ir.program import BACKWARD, FORWARD
from dtrans.ir.selection import values_at
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.rows.layout import SHARED, RowAxis, leaves_of
from dtrans.rows.normalize import inline_inside
from dtrans.step.capture import value_and_grad_p
from dtrans.step.halves import DividedStep, Gradient, Name
from dtrans.step.marks import mark_p
from dtrans.tensor_parallel.model_axis import state_axes
from dtrans.zero.forward_values import leaves_that_meet_the_batch
from dtrans.zero.rank_values import local_values
from dtrans.zero.slice_analysis import GatherOptions, SliceAnalysis, SliceInputs


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """Record of the parameters and optimizer state that ranks slice, and of the sliced dimensions.

    Attributes:
      analysis: the values that the update computes row by row. The rows of a parameter are the
        entries along its sliced dimension.
      leaves: the sliced parameters, by name.
      state: the sliced arrays of the optimizer's state, by name.
      unsliced: the reason for each parameter that is not sliced, such as "it has no dimensions".
      replicated: parameters with a gradient that is equal on all ranks before any reduction.
      divided: maps each parameter that another mesh axis divides to the divided dimension. Ranks
        slice another dimension.
    """

    analysis: RowAnalysis
    leaves: Mapping[str, Sliced]
    state: Mapping[str, Sliced]
    unsliced: Mapping[str, str]
    replicated: Collection[str] = ()
    divided: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def sliced(self) -> dict[Name, Sliced]:
        """Sliced inputs of the update, by name: parameters, gradients, and optimizer state."""
        found: dict[Name, Sliced] = {Gradient(n): sliced for n, sliced in self.leaves.items()}
        found.update(self.leaves)
        found.update(self.state)
        return found


def choose_slices(
    step: DividedStep,
    degree: int,
    *,
    least: int,
    in_layers: bool,
    sliced_in_use: bool,
    differing: Collection[Name] = (),
    planned: Slices | None = None,
    divided: Mapping[str, int] = MappingProxyType({}),
) -> Slices:
    """Choose the parameters and arrays of optimizer state to slice, and the dimension of each.

    Args:
      step: the step, divided into its gradient computation and its update.
      degree: the number of ranks.
      least: parameters with fewer elements are not sliced.
      in_layers: True to also try later dimensions, for stacked parameters that loops read layer by
        layer.
      sliced_in_use: True in stage 3, in which ranks store only slices also during the forward pass.
      differing: inputs of the update that differ from rank to rank.
      planned: an earlier choice for another batch size. The same dimensions are sliced again.
      divided: maps each parameter that another mesh axis divides to the divided dimension. With
        `planned`, `planned.divided` is used instead.
    """
    if planned is not None:
        divided = planned.divided
    axes = _choose_axes(step, degree, in_layers, planned, divided)
    with warnings.catch_warnings():
        # do not warn here: the engine warns later, when it gathers operands of unknown primitives
        warnings.simplefilter("ignore", UnknownPrimitiveWarning)
        later_axes = {n: axis for n, axis in axes.items() if axis}
        analysis = analyse(step.optimize, step.params, later_axes)
    homes = _find_state_homes(analysis)
    rules = _SliceRules(
        step, degree, least, axes, analysis, homes, sliced_in_use, differing, divided
    )

    leaves: dict[str, Sliced] = {}
    unsliced: dict[str, str] = {}
    for n in step.params:
        reason = rules.reason_unsliced(n)
        if reason:
            unsliced[n] = reason
        else:
            leaves[n] = Sliced.from_shape(step.program.inputs[n].shape, axes[n], degree)

    state: dict[str, Sliced] = {}
    for name, (leaf, row) in homes.items():
        if leaf not in leaves or name in step.state_read:
            continue
        shape = step.program.inputs[name].shape
        if row is None:
            leaf_shape = step.program.inputs[leaf].shape
            row = _choose_state_row(shape, leaf_shape, axes[leaf], degree, least)
        if row is not None:
            state[name] = Sliced.from_shape(shape, row.axis, degree, row.width)
    return Slices(analysis, leaves, state, unsliced, frozenset(rules.replicated), divided)


def _choose_axes(
    step: DividedStep,
    degree: int,
    in_layers: bool,
    planned: Slices | None,
    divided: Mapping[str, int],
) -> dict[str, int]:
    """Return the dimension to slice of each parameter; omit parameters that cannot be sliced.

    `choose_slices` describes the arguments.
    """
    axes: dict[str, int] = {}
    for n in step.params:
        axis = choose_axis(step.program.inputs[n].shape, degree, divided=divided.get(n))
        if axis is not None:
            axes[n] = axis
    if planned is not None:
        return axes | {n: sliced.axis for n, sliced in planned.leaves.items()}
    return _choose_layer_axes(step, axes, degree, divided) if in_layers else axes


class _SliceRules:
    """Rules that decide if a parameter is sliced; `choose_slices` describes most arguments.

    Args:
      axes: the dimension to slice, for each parameter that can be sliced.
      analysis: the values that the update computes row by row.
      homes: maps each array of optimizer state to a pair (its parameter, dimension). `dimension` is
        the array's dimension that corresponds to the parameter's sliced dimension.

    Attributes:
      replicated: parameters with a gradient that is equal on all ranks before any reduction.
    """

    def __init__(
        self,
        step: DividedStep,
        degree: int,
        least: int,
        axes: Mapping[str, int],
        analysis: RowAnalysis,
        homes: Mapping[str, tuple[str, RowAxis | None]],
        sliced_in_use: bool,
        differing: Collection[Name],
        divided: Collection[str],
    ) -> None:
        self.divided = divided
        self.step, self.degree, self.least, self.axes = step, degree, least, axes
        self.analysis, self.sliced_in_use = analysis, sliced_in_use
        self.mixed = leaves_that_meet_the_batch(analysis, differing)
        self.replicated = _find_replicated_gradients(step)
        self.with_state: set[str] = set()
        # leaf -> name of an array of its state that is read outside the update
        self.state_read: dict[str, str] = {}
        for name, (leaf, _) in homes.items():
            self.with_state.add(leaf)
            if name in step.state_read:
                self.state_read[leaf] = name

    def reason_unsliced(self, leaf: str) -> str:
        """Return the reason why a parameter is not sliced; "" if it is sliced."""
        step, t = self.step, self.step.program.inputs[leaf]
        if leaf not in step.optimized:
            return step.reason_not_optimized(leaf)
        if leaf in self.mixed:
            return self.mixed[leaf]
        if leaf in self.state_read:
            name = self.state_read[leaf]
            return f"{step.state_read[name]} is computed from {name}"
        axis, is_divided = self.axes.get(leaf), leaf in self.divided
        reason = reason_by_shape(t, axis, self.least, self.degree, is_divided=is_divided)
        if reason:
            return reason
        if self.sliced_in_use or leaf in self.with_state:
            return ""
        if leaf in self.replicated:
            return "every rank computes its gradient without communication"
        if leaf not in step.optimize.graded and leaf not in self.analysis.groups:
            return "no gradient enters its update"
        return ""


def _find_state_homes(analysis: RowAnalysis) -> dict[str, tuple[str, RowAxis | None]]:
    """Return the parameter to which each array of optimizer state belongs.

    Returns:
      A dict: name of the array -> (parameter, dimension). This dimension of the array corresponds
        to the parameter's sliced dimension. It is None if the update mixes the array's entries
        along this dimension.
    """
    found: dict[str, tuple[str, RowAxis | None]] = {}
    for name, var in analysis.inputs.items():
        layout = analysis.layout(var)
        if not isinstance(name, str) or name in analysis.params or layout is SHARED:
            continue
        row = layout if isinstance(layout, RowAxis) else None
        found[name] = min(leaves_of([layout])), row
    return found


def _choose_state_row(
    shape: tuple[int, ...], leaf: tuple[int, ...], axis: int, degree: int, least: int
) -> RowAxis | None:
    """Choose the dimension of optimizer state to slice, if the update mixes rows of the state.

    If the array's shape ends with the parameter's shape, the array is sliced like the parameter.
    Another array, such as a preconditioner, is sliced if it has at least `least` elements and a
    dimension that is long enough. Return None for an array that is not sliced.

    Args:
      shape: the shape of the array.
      leaf: the shape of its parameter.
      axis: the sliced dimension of the parameter.
      degree: the number of ranks.
      least: the minimum number of elements.
    """
    if shape[-len(leaf) :] == leaf:
        return sharded_along(len(shape) - len(leaf) + axis)
    if math.prod(shape) < max(least, 1):
        return None
    state_axis = choose_axis(shape, degree)
    return None if state_axis is None else sharded_along(state_axis)


def choose_axis(
    shape: tuple[int, ...], degree: int, first: int = 0, divided: int | None = None
) -> int | None:
    """Choose the dimension of an array to divide among ranks.

    The first dimension is chosen if it is at least as long as the number of ranks. Otherwise the
    longest dimension is chosen. Return None if padding would more than double this dimension.

    Args:
      shape: the shape of the array.
      degree: the number of ranks.
      first: the first dimension that may be chosen.
      divided: a dimension that may not be chosen, because another mesh axis divides it.
    """
    dims = [d for d in range(first, len(shape)) if d != divided]
    if not dims:
        return None
    if shape[dims[0]] >= degree:
        return dims[0]
    axis = max(dims, key=lambda d: (shape[d], -d))
    if shape[axis] < degree:
        axis = dims[0]
    padded = -(-shape[axis] // degree) * degree
    return axis if shape[axis] and padded <= 2 * shape[axis] else None


def reason_by_shape(
    t: Any, axis: int | None, least: int, degree: int, *, is_divided: bool = False
) -> str:
    """Return the reason why an array of this shape is not sliced; "" if it can be sliced.

    Args:
      t: the type of the array.
      axis: the dimension to slice, from `choose_axis`.
      least: the minimum number of elements of an array that is sliced.
      degree: the number of ranks.
      is_divided: True if another mesh axis divides the array, along another dimension.
    """
    if not t.ndim:
        return "it has no dimensions"
    if not t.size:
        return "it has no elements"
    if t.size < least:
        return f"it has {t.size} elements, fewer than {least}"
    if axis is None:
        other = "other " if is_divided else ""
        return f"no {other}dimension of {t.str_short()} has rows for {degree} ranks"
    return ""


def slice_state_again(
    step: DividedStep, size: int, earlier: Sequence[Mapping[Any, Sliced]], least: int
) -> dict[str, Sliced]:
    """Divide optimizer state over one more mesh axis, and return its slices by name.

    With `Slicing(state_axes=("data", "sequence"))`, the axis "sequence" also divides the state. An
    array is divided along a dimension that no earlier axis divides.

    Args:
      step: the step, divided into its gradient computation and its update.
      size: the size of the axis.
      earlier: the slices of each earlier axis, by name.
      least: the minimum number of elements of a parameter; the state of smaller ones is not sliced.
    """

    def is_taken(name: str, dim: int) -> bool:
        return any(name in slices and slices[name].axis == dim for slices in earlier)

    dims: dict[str, int] = {}
    for n in step.params:
        t = step.program.inputs[n]
        free = tuple(0 if is_taken(n, dim) else length for dim, length in enumerate(t.shape))
        axis = choose_axis(free, size)
        if axis is not None and t.size >= least:
            dims[n] = axis
    found = {}
    for n, dim in state_axes(step, dims).items():
        if n not in step.state_read and not is_taken(n, dim):
            found[n] = Sliced.from_shape(step.program.inputs[n].shape, dim, size)
    return found


def _find_replicated_gradients(step: DividedStep) -> set[str]:
    """Return the parameters for which all ranks compute the same gradient.

    Such a gradient depends neither on the batch nor on the rank's index, and needs no reduction. An
    example is a penalty on a parameter. A pipeline has no such gradients, because each micro-batch
    computes a part of each gradient.
    """
    eqns = step.program.inner.eqns
    parts = outputs_of(e for e in eqns if e.primitive is value_and_grad_p)
    local = local_values(eqns, values_at(step.program.invars, step.batch)).union(parts)
    return {n for n, g in step.gradients.items() if isinstance(g, Literal) or g not in local}


def _choose_layer_axes(
    step: DividedStep, axes: Mapping[str, int], degree: int, divided: Mapping[str, int]
) -> dict[str, int]:
    """Choose the dimension to slice in each parameter, so that its all-gathers are small.

    A loop over layers gathers one layer in each iteration, if a later dimension of the stacked
    parameter is sliced. If its first dimension is sliced, the rank must gather all layers. So the
    function tries one later dimension after the other for all parameters, and analyzes the step for
    each attempt.

    Args:
      step: the step, divided into its gradient computation and its update.
      axes: the default dimension of each leaf.
      degree: the number of ranks.
      divided: as for `choose_slices`.
    """
    eqns, roles = trainer_equations(step)
    jaxpr = step.program.jaxpr
    vars_of = step.program.invars
    local = local_values(eqns, values_at(vars_of, step.batch))
    gradients = summed_gradients(step, eqns, axes)
    most_dims = max((vars_of[n].aval.ndim for n in axes), default=0)

    best = dict(axes)
    smallest: dict[str, int] = {}
    tried = dict(axes)
    for first in range(1, 1 + most_dims):
        rows = {vars_of[n]: RowAxis(n, axis) for n, axis in tried.items()}
        wanted = {g: RowAxis(n, tried[n]) for g, n in gradients.items() if n in tried}
        inputs = SliceInputs(rows, local, wanted)
        analysis = SliceAnalysis(
            Builder(jaxpr), jaxpr, eqns, roles, inputs, GatherOptions("", degree)
        )
        largest = analysis.largest_gathers()
        for n, axis in tried.items():
            if largest.get(n, 0) < smallest.get(n, math.inf):
                best[n], smallest[n] = axis, largest.get(n, 0)
        # keep the default dimension if loops then gather only parts of the leaf
        following: dict[str, int] = {}
        for n in tried:
            if first > 1 or smallest[n] == vars_of[n].aval.size:
                later = choose_axis(vars_of[n].aval.shape, degree, first, divided.get(n))
                if later is not None:
                    following[n] = later
        tried = following
    return best


def summed_gradients(
    step: DividedStep, eqns: Sequence[JaxprEqn], leaves: Collection[str]
) -> dict[Var, str]:
    """Return the gradients that only the update reads, as a dict: variable -> parameter.

    Loops may compute these gradients as slices, because no rank needs the full gradient.
    """
    computed = set(outputs_of(eqns))
    unread = computed.difference(variables_read(eqns, step.program.inner.outvars))
    found: dict[Var, str] = {}
    for leaf, g in step.gradients.items():
        if leaf in leaves and isinstance(g, Var) and g in unread:
            # if two leaves share a gradient, keep the first leaf
            found.setdefault(g, leaf)
    return found


def trainer_equations(step: DividedStep) -> tuple[list[JaxprEqn], list[str]]:
    """Return the equations of the forward and backward pass, and their roles.

    Calls in the bodies of these equations are inlined.
    """
    eqns: list[JaxprEqn] = []
    roles: list[str] = []
    for eqn, role in zip(step.program.eqns, step.program.roles, strict=True):
        if role in (FORWARD, BACKWARD) and eqn.primitive is not mark_p:
            eqns.append(inline_inside(eqn))
            roles.append(role)
    return eqns, roles
