"""The end of a pipelined step: the instructions of its update, and of what merges the results of
micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from dtrans._jax import Atom, Literal, Var, constants
from dtrans.ops import OVER_AXIS, collective_of, trainer_index_p
from dtrans.pipeline_parallel.options import AXIS, SPLIT
from dtrans.pipeline_parallel.results import micro_name
from dtrans.pipeline_parallel.update_by_stage import StagePart
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.segments import interpret
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.draft import Draft
from dtrans.run.pipeline_parallel.instructions import Transfer
from dtrans.run.pipeline_parallel.stage_devices import EACH, SAME


StateSlots: TypeAlias = dict[tuple[int, str], int]  # by (place, name)
# slot, kind, and the stage that makes it
ResultSlots: TypeAlias = dict[str, tuple[int, AxisSharding, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class _UpdateValues:
    """The values of an update.

    Attributes:
      d: the step that it is written into.
      name_of: the names of its inputs.
      kinds: how replicas have each value.
    """

    d: Draft
    name_of: Mapping[Var, str]
    kinds: Mapping[Any, AxisSharding]

    @cached_property
    def _constants(self) -> dict[Var, Any]:
        """The constants of the update, which no part of it makes."""
        program = self.d.at.plan.update.placed.program
        return dict(zip(program.inner.constvars, constants(program.jaxpr), strict=True))

    def constant(self, a: Atom) -> Any | None:
        """Return the value of an output that is a constant; None for any other."""
        return np.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else self._constants.get(a)

    def slot(self, v: Var, stage: int) -> int:
        """The slot of a value where a stage has it."""
        at, slots = self.d.at, self.d.slots
        plan, placed, n = at.plan, at.plan.update.placed, self.name_of.get(v)
        if n is None:
            return slots.of(self.kinds[v].cut_along(placed.cuts.get(v), SPLIT), "update", stage, v)
        home = placed.home[n]
        if n in plan.update.arguments:
            if at.host is None:
                return slots.array(stage, n)
            return slots.of(self.kinds[v], "argument on the host", stage, n)
        is_state = n in plan.state
        if is_state and home is None:
            return slots.state(stage, n)
        if home != stage and not (
            n in plan.model.homes and plan.device_of(home or 0) == plan.device_of(stage)
        ):
            return slots.of(self.kinds[v], "update", stage, v)
        if is_state:
            return slots.state(at.place(n, stage), n)
        leaf, _, m = plan.update.sums[n]
        return slots.of(
            at.update_kind(n), "sum" if at.host is None else "sum on the host", stage, leaf, m
        )


def write_update(d: Draft) -> tuple[StateSlots, ResultSlots]:
    """Write the update: the slots of the new state, and those of results that it makes."""
    placed = d.at.plan.update.placed
    inner = placed.program.inner
    name_of = dict(zip(inner.invars, placed.program.in_names, strict=True))
    values = _UpdateValues(d, name_of, _kinds(d.at, name_of))
    _sums_to_host(d)
    _arguments_to_host(values)
    targets: dict[tuple[Var, int], list[int]] = {}
    for v, origin, target in placed.sends:
        targets.setdefault((v, origin), []).append(target)
    for v, origin in targets:
        if v in name_of:
            _send(values, v, origin, targets)
    for number, piece in enumerate(placed.pieces):
        _write_piece(values, piece, placed.pieces[number + 1 :])
        for v in piece.makes:
            _send(values, v, piece.place, targets)
    return _new_state(values), _made_by_update(values)


def _sums_to_host(d: Draft) -> None:
    """Send the sums of gradients to the host, if that is where parameters are."""
    if d.at.host is None:
        return
    own = d.at.own
    for name, (leaf, stage, m) in d.at.plan.update.sums.items():
        here, there = (
            d.slots.of(own, which, stage, leaf, m) for which in ("sum", "sum on the host")
        )
        d.instructions.append(Transfer(here, there, stage, stage, own, name, to_host=True))


def _arguments_to_host(values: _UpdateValues) -> None:
    """Send the arguments that the update reads to the host, if that is where parameters are."""
    d = values.d
    placed, arguments = d.at.plan.update.placed, d.at.plan.update.arguments
    read = {
        (p.place, v): values.name_of[v]
        for p in placed.pieces
        for v in p.reads
        if v in values.name_of
    }
    for (stage, v), n in read.items():
        if d.at.host is not None and n in arguments:
            here, there = d.slots.array(stage, n), values.slot(v, stage)
            d.instructions.append(
                Transfer(here, there, stage, stage, values.kinds[v], n, to_host=True)
            )


def _send(
    values: _UpdateValues, v: Var, stage: int, targets: Mapping[tuple[Var, int], Sequence[int]]
) -> None:
    """Send a value of the update to the stages that read it."""
    d = values.d
    for target in targets.get((v, stage), ()):
        a, b = values.slot(v, stage), values.slot(v, target)
        if a != b:
            what = values.name_of.get(v, "update")
            d.instructions.append(
                Transfer(a, b, stage, target, values.kinds[v], what, to_host=d.at.host is not None)
            )


def _write_piece(values: _UpdateValues, piece: StagePart, later: Sequence[StagePart]) -> None:
    d = values.d
    reads, makes = ([values.slot(v, piece.place) for v in vs] for vs in (piece.reads, piece.makes))
    donated = (
        _donated(values, piece, {(v, p.place) for p in later for v in p.reads})
        if d.at.donate
        else []
    )
    what = f"update of stage {piece.place}"
    d.run(
        piece,
        lambda: _of_piece(piece),
        piece.place,
        reads,
        makes,
        what,
        donated=donated,
        on=d.at.host,
    )


def _donated(
    values: _UpdateValues, piece: StagePart, later: Collection[tuple[Var, int]]
) -> list[int]:
    """The positions of old state whose new value is made in the same piece, and that is not wanted
    any more."""
    plan = values.d.at.plan
    program = plan.update.placed.program
    outs = program.outvars.items()
    new_of = {a: n for n, a in outs if n in plan.state and isinstance(a, Var)}
    made = {new_of[v] for v in piece.makes if v in new_of}
    spent = lambda v: (
        values.name_of.get(v) in made and (v, piece.place) not in later and v not in new_of
    )
    return [i for i, v in enumerate(piece.reads) if spent(v)]


def _of_piece(piece: StagePart) -> Callable[..., Sequence[Any]]:
    """A piece as a function of one replica."""
    inner = piece.inner
    values = dict(zip(inner.constvars, constants(piece.jaxpr), strict=True))

    def run(*args: Any) -> Sequence[Any]:
        return interpret(
            inner.eqns,
            {**values, **dict(zip(inner.invars, args, strict=True))},
            inner.outvars,
            OVER_AXIS,
        )

    return run


def _new_state(values: _UpdateValues) -> StateSlots:
    at, slots = values.d.at, values.d.slots
    plan, placed = at.plan, at.plan.update.placed
    outs = placed.program.outvars
    found: StateSlots = {}
    for n in plan.state:
        home, a = placed.home[n], outs[n]
        for k in range(plan.options.model_stages) if home is None else [home]:
            place = at.place(n, k)
            if (constant := values.constant(a)) is not None:
                found[place, n] = slots.constant(constant, k, n)
                continue
            assert isinstance(a, Var)
            held = slots.state(place, n)
            made_before = n in plan.model.merges and n in plan.model.homes  # by the forward pass
            found[place, n] = held if made_before else values.slot(a, k)
    return found


def _made_by_update(values: _UpdateValues) -> ResultSlots:
    plan, program = values.d.at.plan, values.d.at.plan.update.placed.program
    found: ResultSlots = {}
    for n, a in program.outvars.items():
        if n not in plan.state:
            stage = plan.update.placed.out_at[n] or 0
            if (constant := values.constant(a)) is not None:
                found[n] = (values.d.slots.constant(constant, 0, n), SAME, stage)
                continue
            assert isinstance(a, Var)
            found[n] = (values.slot(a, stage), SAME, stage)
    return found


def write_results(d: Draft) -> tuple[ResultSlots, StateSlots]:
    """Write what merges results: their slots, and those of state that the forward pass makes."""
    found: ResultSlots = {}
    state: StateSlots = {}
    for s, p in zip(d.programs.stages, d.programs.results, strict=True):
        if p is None:
            continue
        of = {
            micro_name(n, m): (n, m)
            for n in s.results
            for m in range(d.at.plan.options.num_micro_batch)
        }
        reads = [d.slots.value(s.index, *of[n]) for n in p.in_names]
        kinds = [d.at.result_kind(n) for n in p.out_names]
        makes = [d.slots.of(kind, "result", n) for n, kind in zip(p.out_names, kinds, strict=True)]
        d.run(p, lambda p=p: per_trainer(p), s.index, reads, makes, p.name)  # type: ignore[misc]
        for n, slot, kind in zip(p.out_names, makes, kinds, strict=True):
            if n in d.at.plan.model.homes:
                state[d.at.place(n, d.at.plan.model.homes[n]), n] = _to_home(
                    d, n, slot, kind, s.index
                )
            else:
                found[n] = (slot, kind, s.index)
    return found, state


def _to_home(d: Draft, name: str, slot: int, kind: AxisSharding, stage: int) -> int:
    """The slot of a parameter that the forward pass makes, where it is held."""
    plan = d.at.plan
    home = plan.model.homes[name]
    if plan.device_of(home) == plan.device_of(stage) and d.at.host is None:
        return slot
    target = d.slots.of(kind, "moved", name)
    d.instructions.append(
        Transfer(slot, target, stage, home, kind, name, to_host=d.at.host is not None)
    )
    return target


def _kinds(at: Deployment, name_of: Mapping[Var, str]) -> dict[Any, AxisSharding]:
    """How replicas have each value of the update: what is made of what they have for themselves is
    their own."""
    program = at.plan.update.placed.program
    inner = program.inner
    kinds: dict[Any, AxisSharding] = {v: at.update_kind(n) for v, n in name_of.items()}
    for eqn in inner.eqns:
        record = collective_of(eqn)
        whole = record is not None and record.same_for_all
        own = any(isinstance(a, Var) and AXIS in kinds.get(a, SAME).varies for a in eqn.invars)
        own = own or eqn.primitive is trainer_index_p
        kinds |= dict.fromkeys(eqn.outvars, EACH if own and not whole else SAME)
    for n, a in program.outvars.items():
        if isinstance(
            a, Var
        ):  # state that is not cut is the same in all replicas, and so are results
            kinds[a] = at.state_kind(n)
    return kinds
