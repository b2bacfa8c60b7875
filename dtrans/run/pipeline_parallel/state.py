"""State of a pipeline job: creation, checks, and conversion to the user's pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.pytree import TreeSpec, short_repr, state_html
from dtrans.ir.selection import exclude, retain
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.run.base.state import (
    check_arrays,
    check_kind,
    check_types,
    missing_array,
    with_padding,
)
from dtrans.run.pipeline_parallel.stage_devices import SAME
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement


@partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "extra"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PipelineState:
    """State of a pipeline job: a pytree of arrays, each on the devices of its stage.

    Attributes:
      params, opt_state: arrays by name. If every stage stores an array (a step count), these dicts
        contain the copy of stage 0.
      extra: the copies of all other stages, by "name@stage"; and the state of a dynamic loss scale,
        such as `loss_scale/scale`.
    """

    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    __repr__ = short_repr
    _repr_html_ = state_html


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Conversions between the three forms of a pipeline's state.

    The forms are a `PipelineState`, a dict of the arrays of this process, and the user's pytrees. A
    key of the dict is a pair (place, name). Several stages may store a copy of an array; the place
    is the index of the copy.

    Attributes:
      at: the devices of the plan's stages.
    """

    at: StagePlacement

    @cached_property
    def _entries(self) -> list[tuple[str, str, tuple[int, str]]]:
        """For each array of this process: position in a `PipelineState`, and key in `arrays`.

        An entry is (field, key in the field, (place, name)), such as ("params", "params/w", (0,
        "params/w")). The place is the index of the stored copy.
        """
        plan, found = self.at.plan, []
        for part, spec in zip(("params", "opt_state"), plan.update.program.args[:2], strict=True):
            for n in spec.names:
                first = self.at.first_place(n)
                places = range(plan.options.model_stages) if plan.home(n) is None else [first]
                for k in filter(self.at.mine.__contains__, places):
                    field = "extra" if k != first or n in plan.extra_state else part
                    found.append((field, n if k == first else f"{n}@{k}", (k, n)))
        return found

    def init(self, *args: Any) -> PipelineState:
        """Return the first state, from the arguments of the user's `init`.

        Each stage computes the part of the state that it stores.
        """
        at, plan, backend = self.at, self.at.plan, self.at.state_backend
        flat = plan.startup.flatten(*args)
        found: dict[tuple[int, str], Any] = {}
        for stage in sorted(at.mine):
            stored = [n for n in plan.state if plan.home(n) in (stage, None)]
            names = exclude(stored, plan.extra_state)
            arrays = retain(plan.extra_state, stored)
            if names:
                fn = backend.startup(_startup_of(plan, names), stage)
                outs = fn(*(backend.put(x, stage, SAME) for x in flat))
                arrays |= zip(names, outs, strict=True)
            for n, x in arrays.items():
                # The array is copied, because a state may be donated, and `init` may return one
                # array twice.
                padded = self._padded(n, jnp.copy(x))
                found[at.place(n, stage), n] = backend.put(padded, stage, at.state_kind(n))
        return self.state(found)

    def state(self, arrays: Mapping[tuple[int, str], Any]) -> PipelineState:
        """Return a job's state from its arrays.

        Args:
          arrays: the arrays by (index, name). If several stages store an array, the index is the
            number of the copy.
        """
        parts: dict[str, dict[str, Any]] = {"params": {}, "opt_state": {}, "extra": {}}
        for part, key, at in self._entries:
            parts[part][key] = arrays[at]
        return PipelineState(**parts)

    def arrays(self, state: PipelineState) -> dict[tuple[int, str], Any]:
        """Return the arrays of a state in a dict with keys (index of the stored copy, name).

        Raises:
          StateError: the state belongs to a job of another plan.
        """
        check_kind(state, PipelineState)
        try:
            found = {at: getattr(state, part)[key] for part, key, at in self._entries}
        except KeyError as e:
            raise missing_array(e.args[0]) from e
        check_arrays(((n, x) for (_, n), x in found.items()), donates=self.at.donate)
        return found

    def check(self, arrays: Mapping[tuple[int, str], Any]) -> None:
        """Check the shapes and dtypes of a state's arrays.

        Raises:
          StateError: an array has another shape or dtype than in the plan.
        """
        for (_, n), x in arrays.items():
            check_types({n: x}, {n: self.types[n]})

    def put(self, arrays: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        """Check the arrays of a state, and place each array on the devices of its stage.

        Raises:
          StateError: an array has another shape or dtype than in the plan.
        """
        self.check(arrays)
        return {at: self._put(at, x) for at, x in arrays.items()}

    def from_step(self, arrays: Mapping[str, Any]) -> PipelineState:
        """Convert a dict of arrays, by their names in the user's step, to a state.

        The state of a dynamic loss scale is not in the user's step. If the dict does not contain it
        either, it starts from its first value.
        """
        arrays = {**self.at.plan.extra_state, **arrays}
        rows = _rows_by_name(self.at.plan)
        found = {}
        for _, _, at in self._entries:
            full, part = rows.get(at[1], (at[1], None))
            x = jnp.asarray(arrays[full])
            if part is None:
                x = jnp.copy(x)  # A step may donate the state.
            else:
                x = jax.lax.slice_in_dim(x, part.first, part.stop, axis=part.axis)
            found[at] = self._put(at, self._padded(at[1], x))
        return self.state(found)

    def _put(self, at: tuple[int, str], x: Any) -> Any:
        return self.at.state_backend.put(x, at[0], self.at.state_kind(at[1]))

    def _padded(self, name: str, x: Any) -> Any:
        """Return an array of the state with the plan's padding."""
        return with_padding(x, self.at.plan.slices_by_axis.get(name, {}))

    @cached_property
    def types(self) -> dict[str, Any]:
        """Shape (with padding) and dtype of each array of a state, by name."""
        types = self.at.plan.types
        return {n: jax.eval_shape(partial(self._padded, n), t) for n, t in types.items()}


def _rows_by_name(plan: PipelinePlan) -> dict[str, tuple[str, Any]]:
    """Return the origin of each array that contains some rows of a stacked parameter.

    A stacked parameter has one row for each layer. Each stage stores the rows of its layers as an
    array with a separate name.

    Returns:
      A dict from the name of the rows to (name of the stacked parameter, rows).
    """
    found = {}
    for n, runs in plan.model.stacks.items():
        for rows in runs:
            found[rows.name] = (n, rows.part)
    return found


def _startup_of(plan: PipelinePlan, names: Sequence[str]) -> ClosedJaxpr:
    """Return the part of `init` that computes the arrays `names` of the first state."""
    startup = plan.startup
    outs = startup.outvars
    rows = _rows_by_name(plan)
    b = Builder(startup.jaxpr)
    b.invars += startup.inner.invars
    for eqn in startup.eqns:
        b.keep(eqn)
    wanted = []
    for n in names:
        full, part = rows.get(n, (n, None))
        out = outs[full]
        if part is not None:
            out = part.take_from(b, out)
        wanted.append(out)
    return eliminate_dead(b.build(wanted))


def tree_of(plan: PipelinePlan, spec: TreeSpec, array_of: Callable[[str], Any]) -> Any:
    """Return a part of the state as the user's pytree, without padding.

    Args:
      plan: the plan of the job.
      spec: the structure of the pytree.
      array_of: returns an array of the state by name.
    """
    leaves = []
    for n in spec.names:
        rows = plan.model.stacks.get(n)
        if rows is None:
            leaves.append(unpadded(plan, n, array_of(n)))
            continue
        parts = [unpadded(plan, r.name, array_of(r.name)) for r in rows]
        on_first = [jax.device_put(p, parts[0].sharding) for p in parts]
        leaves.append(jnp.concatenate(on_first, rows[0].part.axis))
    return spec.unflatten(leaves)


def unpadded(plan: PipelinePlan, name: str, x: Any) -> Any:
    """Return an array of the state without its padding."""
    shape = plan.types[name].shape
    if x.shape == shape:
        return x
    return x[tuple(map(slice, shape))]
