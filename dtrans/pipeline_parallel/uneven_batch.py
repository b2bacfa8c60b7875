"""Plan for a batch that cannot be split into a plan's number of micro-batches, e.g. the last one.

The new plan has the same stages and the same state, and another number of micro-batches. With
`batch="exact"`, results do not depend on this number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from dtrans.errors import BatchError
from dtrans.ir.array_fns import array_type
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import subset
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.schedule import Schedule


def plan_for_rows(plan: PipelinePlan, batch: Mapping[str, jax.ShapeDtypeStruct]) -> PipelinePlan:
    """Return the plan, or a plan with a number of micro-batches that divides a batch's rows.

    Micro-batches have at most as many rows as in the plan, so that they need no more memory. Return
    the plan itself if results depend on the number of micro-batches: with `batch="micro"`, or with
    a clip of each micro-batch. Also return it if its schedule needs this number.

    Args:
      plan: the plan of the job.
      batch: shape and dtype of each array of the global batch, by name. Here rows are always on
        dimension 0. In the arguments of the step, they may be on another dimension.

    Raises:
      BatchError: the number of replicas does not divide the rows.
    """
    o, recipe = plan.options, plan.recipe
    batch = {n: _with_rows_on(plan.axes.get(n, 0), t) for n, t in batch.items()}
    rows, planned = _rows(plan, batch), _rows(plan, plan.main.inputs)
    if plan.shared is None or recipe is None or o.chunks > 1 or o.clip_of_each is not None:
        return plan
    if isinstance(recipe.arguments.get("schedule"), Schedule):
        return plan  # the user's order is for one number of micro-batches
    if not rows or rows % o.parts == 0:
        return plan
    if rows % o.replicas:
        raise BatchError(f"the batch has {rows} rows; expected a multiple of replicas={o.replicas}")
    each, most = rows // o.replicas, planned // o.parts
    count = next(n for n in range(-(-each // most), each + 1) if each % n == 0)
    main = recipe.arguments["main"]
    types = {n: array_type(t) for n, t in main.inputs.items()} | batch
    options = {
        "main": main.specialize_flat([types[n] for n in main.in_names]),
        "num_micro_batch": count,
        "num_stages": o.num_stages,
        "schedule": o.schedule,
    }
    other: Any = recipe.transform(**{**recipe.arguments, **options})
    if _state(other) != _state(plan):
        return plan
    found: PipelinePlan = other
    return found


def _with_rows_on(axis: int, t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the type of an array after its dimension 0 is moved to the position `axis`."""
    if not t.ndim:
        return t
    rows, *others = t.shape
    return jax.ShapeDtypeStruct((*others[:axis], rows, *others[axis:]), t.dtype)


def _rows(plan: PipelinePlan, types: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch.

    Return 0 if arrays of the batch have different numbers of rows, or if no array is divided into
    micro-batches.
    """
    found = set()
    for n in plan.batch:
        if types[n].ndim and not is_under(n, plan.options.batch.unsplit_inputs):
            found.add(int(types[n].shape[plan.axes.get(n, 0)]))
    return found.pop() if len(found) == 1 else 0


def _state(plan: PipelinePlan) -> Any:
    """Return the properties of a plan that determine the arrays of its job's state.

    Two plans with equal properties can continue with each other's state.
    """
    homes = {n: plan.home(n) for n in plan.state}
    types = {n: (t.shape, t.dtype) for n, t in subset(plan.types, plan.state).items()}
    return plan.options.num_stages, homes, plan.slices_by_axis, types, plan.model.homes
