"""Sharding of a step in which no gradients were found, such as DP-SGD or zeroth-order methods.

Ranks divide the batch, and store slices of the state: optimizer state in each stage, parameters in
stage 3. `dtrans.batch.trainer_step` rewrites all equations of the step for one rank. If an equation
needs a full array, the rank gathers the array. So results are those of one device for any step.
Without gradients, stages 1 and 2 are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dtrans.engine.layout import Sliced
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import retain
from dtrans.rows.analysis import analyse
from dtrans.step.halves import DividedStep
from dtrans.step.scopes import has_local_scope
from dtrans.zero.choose_slices import Slices, choose_axis, reason_by_shape
from dtrans.zero.options import ShardingOptions


def slice_undivided(step: DividedStep, options: ShardingOptions) -> Slices:
    """Choose the parameters and optimizer state to slice, by the shapes of the arrays alone.

    The gradients of the step are unknown, so its update cannot be analyzed.

    Args:
      step: the step, without a division into gradients and update (`leave_undivided`).
      options: the options of `dtrans.sharding`.
    """
    program, degree = step.program, options.degree
    params, opt_state = program.args[:2]
    for_all = "degree is 1" if degree == 1 else ""
    if any(map(has_local_scope, program.eqns)):
        for_all = for_all or "the step has a dtrans.local() scope"
    slices: dict[str, Sliced] = {}
    unsliced: dict[str, str] = {}
    for n in all_names([params, opt_state]):
        t = program.inputs[n]
        axis = choose_axis(t.shape, degree)
        reason = for_all or _reason_by_update(program, n)
        reason = reason or reason_by_shape(t, axis, options.slices.min_slice_size, degree)
        if reason or axis is None:
            unsliced[n] = reason
        else:
            slices[n] = Sliced.from_shape(t.shape, axis, degree)
    return Slices(
        analyse(step.optimize, ()),
        retain(slices, params.names),
        retain(slices, opt_state.names),
        retain(unsliced, params.names),
    )


def _reason_by_update(program: Program, name: str) -> str:
    """Return the reason not to slice an array, such as "it is not updated"; "" without one."""
    if program.outvars[name] is program.invars[name]:
        return "it is not updated"
    if jnp.issubdtype(program.inputs[name].dtype, jax.dtypes.extended):
        return "it is a random key"
    return ""


def find_stored_dims(slices: Slices, options: ShardingOptions) -> Mapping[str, int]:
    """Return the sliced dimension of each array that ranks store as slices, by name."""
    stored = {**slices.state, **(slices.leaves if options.slices_params else {})}
    return {n: sliced.axis for n, sliced in stored.items()}
