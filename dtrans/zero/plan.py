"""Plans of sharding: one program for all ranks, what each of them holds, and what it moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dtrans.data_parallel.plan import CollectivePlan, collectives
from dtrans.errors import ConfigError
from dtrans.ir.cost import nbytes
from dtrans.ops import moved_values
from dtrans.zero.mixed_precision import scale_types


if TYPE_CHECKING:
    from dtrans.engine.layout import Gathered
    from dtrans.zero.by_leaf.layout import Owned
    from dtrans.zero.choose_slices import Sliced, Slices
    from dtrans.zero.options import ShardingOptions


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardingPlan(CollectivePlan):
    """Sharded data-parallel training of one step; made by `dtrans.sharding`.

    Attributes beside those of `CollectivePlan`:
      slices: which leaves are cut, along which dimension, and why others are not.
      gathers: what the update gathers, and why.
      owned: who owns which leaf, where leaves are not cut but given to ranks.
    """

    options: ShardingOptions
    slices: Slices = dataclasses.field(compare=False)
    gathers: tuple[Gathered, ...] = ()
    owned: Owned | None = None
    strategy = "sharding"

    @cached_property
    def cuts(self) -> dict[str, Sliced]:
        """Return the parameters and state that ranks hold as slices between steps, by name."""
        params = self.slices.leaves if self.options.slices_params else {}
        return {**params, **self.slices.state, **(self.owned.cuts if self.owned else {})}

    @property
    def extra_state(self) -> Mapping[str, Any]:
        return scale_types(self.options.precision.scaling)

    def for_trainers(self, trainers: int) -> ShardingPlan:
        """Return the plan for another number of ranks: more or fewer groups of the same degree.

        Raises:
          ConfigError: they cannot be shared out into groups.
        """
        if trainers == self.trainers:
            return self
        o = self.options
        if trainers % o.degree:
            raise ConfigError(
                f"{trainers} ranks cannot be shared out into groups of degree={o.degree}"
            )
        groups = trainers // o.degree
        replanned: ShardingPlan = self.replan(
            dataclasses.replace(o, trainers=trainers, replicas=groups)
        )
        return replanned

    # -- cost ------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes that a rank holds between steps, by kind: `params`, `opt_state`, and what of these
        is `padding`."""
        params, opt_state = (spec.names for spec in self.program.args[:2])
        held = {n: nbytes(t) for n, t in self.program.inputs.items()}
        padding = sum(
            s.padding(self.main.inputs[n]) * self.main.inputs[n].dtype.itemsize // s.degree
            for n, s in self.cuts.items()
            if n in self.main.inputs
        )
        if self.owned is not None:
            padding += self.owned.state.padding // self.options.degree
        return {
            "params": sum(held[n] for n in params),
            "opt_state": sum(held[n] for n in opt_state),
            "padding": padding,
        }

    def traffic(self) -> dict[tuple[str, str], int]:
        """Bytes of collectives in a step, by what it is and the axis that it is over.

        Of a gather it is what a rank has after it, of a reduction what it has before: Psi for a
        model of Psi bytes. What then crosses a link is up to the algorithm: (N - 1)/N of it in a
        ring, twice that for an all-reduce.
        """
        found: dict[tuple[str, str], int] = {}
        for eqn, times in collectives(self.program.jaxpr):
            key = (eqn.primitive.name, " and ".join(eqn.params["over"]))
            found[key] = found.get(key, 0) + times * sum(nbytes(a.aval) for a in moved_values(eqn))
        return found

    # -- showing ---------------------------------------------------------------------------------

    @cached_property
    def notes(self) -> list[str]:
        """Return remarks for the user that the table does not show."""
        memory = self.memory()
        of = ", ".join(f"{n:,} bytes of {kind}" for kind, n in memory.items())
        notes = [] if self.shared is None else list(self.shared.notes)
        notes.append(f"each rank holds {of}")
        notes += [
            f"{kind} over {axis}: {n:,} bytes per step"
            for (kind, axis), n in self.traffic().items()
        ]
        notes += [
            f"the update gathers {x.dtype}{list(x.shape)}, {x.nbytes:,} bytes, for {x.reason}"
            for x in self.gathers
        ]
        notes += self.owned.notes if self.owned else []
        notes += [
            f"{leaf} is whole on every rank: {why}" for leaf, why in self.slices.wholes.items()
        ]
        notes += [f"{name}: {way}" for name, way in self.merges.items()]
        notes += self.callers
        return notes

    @property
    def _title(self) -> str:
        o = self.options
        groups = (
            f", {o.replicas} groups of {o.degree} ranks"
            if o.replicas > 1
            else f", {o.degree} ranks"
        )
        return f"sharding plan of {self.main.name}: stage {o.stage}{groups}"
