"""The state of a pipeline: where it is, how the first one is made, and how it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr
from dtrans.errors import StateError
from dtrans.ir.array_fns import padded_to
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.pytree import TreeSpec
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.run.base.state import check_arrays, check_kind, check_types
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.stage_devices import SAME


@partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "extra"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PipelineState:
    """Where a job is: a pytree of arrays by name, each on the devices of the stage that holds it.

    Attributes:
      params, opt_state: by name. What every stage has (a count of steps) is stage 0's here.
      extra: that of the other stages, by `name@stage`.
    """

    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The state of a deployment, as a pytree and by place."""

    at: Deployment

    @cached_property
    def _entries(self) -> list[tuple[str, str, tuple[int, str]]]:
        """Where a state has the arrays of this process's stages: the part of it, the key there,
        (place, name)."""
        plan, found = self.at.plan, []
        for part, spec in zip(("params", "opt_state"), plan.update.program.args[:2], strict=True):
            for n in spec.names:
                first = self.at.first_place(n)
                places = range(plan.options.model_stages) if plan.home(n) is None else [first]
                found += [
                    (part, n, (k, n)) if k == first else ("extra", f"{n}@{k}", (k, n))
                    for k in places
                    if k in self.at.mine
                ]
        return found

    def first(self, *args: Any) -> PipelineState:
        """The first state, from the arguments of `init`: each stage makes its own part."""
        at, plan = self.at, self.at.plan
        flat = plan.startup.flatten(*args)
        found: dict[tuple[int, str], Any] = {}
        for stage in sorted(at.mine):
            names = [n for n in plan.state if plan.home(n) in (stage, None)]
            if not names:
                continue
            fn = at.at_rest.startup(_startup_of(plan, names), stage)
            made = fn(*(at.at_rest.put(x, stage, SAME) for x in flat))
            for n, x in zip(names, made, strict=True):
                # copies: a state may be donated, and init may return one array twice
                found[at.place(n, stage), n] = at.at_rest.put(
                    self._padded(n, jnp.copy(x)), stage, at.state_kind(n)
                )
        return self.state(found)

    def state(self, arrays: Mapping[tuple[int, str], Any]) -> PipelineState:
        """The state of arrays by (place, name)."""
        parts: dict[str, dict[str, Any]] = {"params": {}, "opt_state": {}, "extra": {}}
        for part, key, at in self._entries:
            parts[part][key] = arrays[at]
        return PipelineState(**parts)

    def arrays(self, state: PipelineState) -> dict[tuple[int, str], Any]:
        """The arrays of a state, by (place, name). Raises StateError for that of another job."""
        check_kind(state, PipelineState)
        try:
            held = {at: getattr(state, part)[key] for part, key, at in self._entries}
        except KeyError as e:
            raise StateError(f"this is not a state of this job: it has no {e.args[0]}") from e
        check_arrays(((n, x) for (_, n), x in held.items()), donates=self.at.donate)
        return held

    def check(self, held: Mapping[tuple[int, str], Any]) -> None:
        """Raises StateError for arrays of a state of another plan."""
        for (_, n), x in held.items():
            check_types({n: x}, {n: self.types[n]})

    def put(self, held: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        """Arrays of a state that may be from elsewhere, where stages have them. Raises StateError
        as `arrays`."""
        self.check(held)
        return {at: self._put(at, x) for at, x in held.items()}

    def of(self, arrays: Mapping[str, Any]) -> PipelineState:
        """The state of a job that goes on from arrays of the step, by name."""
        rows = {r.name: (n, r.part) for n, runs in self.at.plan.model.stacks.items() for r in runs}
        found = {}
        for _, _, at in self._entries:
            whole, part = rows.get(at[1], (at[1], None))
            x = jnp.asarray(arrays[whole])
            x = (
                jnp.copy(x)
                if part is None
                else jax.lax.slice_in_dim(x, part.first, part.stop, axis=part.axis)
            )
            found[at] = self._put(at, self._padded(at[1], x))
        return self.state(found)

    def _put(self, at: tuple[int, str], x: Any) -> Any:
        return self.at.at_rest.put(x, at[0], self.at.state_kind(at[1]))

    def _padded(self, name: str, x: Any) -> Any:
        padding = self.at.plan.padded(name)
        return x if padding is None else padded_to(x, *padding)

    @cached_property
    def types(self) -> dict[str, Any]:
        """Of the arrays of a state, with their padding."""
        return {
            n: jax.eval_shape(partial(self._padded, n), t) for n, t in self.at.plan.types.items()
        }


def _startup_of(plan: PipelinePlan, names: Sequence[str]) -> ClosedJaxpr:
    """What makes some arrays of the first state."""
    startup = plan.startup
    outs = startup.outvars
    rows = {r.name: (n, r.part) for n, runs in plan.model.stacks.items() for r in runs}
    b = Builder(startup.jaxpr)
    b.invars += startup.inner.invars
    for eqn in startup.eqns:
        b.keep(eqn)
    wanted = []
    for n in names:
        whole, part = rows.get(n, (n, None))
        wanted.append(outs[whole] if part is None else part.cut(b, outs[whole]))
    return eliminate_dead(b.build(wanted))


def tree_of(plan: PipelinePlan, spec: TreeSpec, held: Callable[[str], Any]) -> Any:
    """Arrays of the state as the pytree that they were given in: no padding, rows of one array
    together."""
    leaves = []
    for n in spec.names:
        rows = plan.model.stacks.get(n)
        if rows is None:
            leaves.append(_unpadded(plan, n, held(n)))
        else:
            parts = [_unpadded(plan, r.name, held(r.name)) for r in rows]
            leaves.append(
                jnp.concatenate(
                    [jax.device_put(p, parts[0].sharding) for p in parts], rows[0].part.axis
                )
            )
    return spec.unflatten(leaves)


def _unpadded(plan: PipelinePlan, name: str, x: Any) -> Any:
    """An array of the state without what it was padded with."""
    shape = plan.types[name].shape
    return x if x.shape == shape else x[tuple(slice(0, n) for n in shape)]
