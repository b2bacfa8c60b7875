"""Compilation of the end of a step: instructions for the update, and for merges of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from dtrans._jax import Atom, Literal, Var, constants
from dtrans.ir.dataflow import variables
from dtrans.ir.selection import values_at
from dtrans.ops import OVER_AXIS, collective_of, trainer_index_p
from dtrans.pipeline_parallel.options import AXIS, SPLIT
from dtrans.pipeline_parallel.results import micro_name
from dtrans.pipeline_parallel.update_by_stage import StagePart
from dtrans.run.base.lowering import per_trainer
from dtrans.run.base.segments import interpret
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.stage_devices import EACH, SAME
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement
from dtrans.run.pipeline_parallel.step_builder import StepBuilder


# (index of the stored copy, name of an array of the state) -> slot
StateSlots: TypeAlias = dict[tuple[int, str], int]
# name of a result -> (slot, sharding, the stage that computes it)
ResultSlots: TypeAlias = dict[str, tuple[int, AxisSharding, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class _UpdateValues:
    """Slots (entries of a step's list of values) for the values of the optimizer's update.

    Attributes:
      d: the builder of the step.
      name_of: maps each input variable of the update's program to its name.
      kinds: maps each variable of the update's program to its sharding over replicas.
    """

    d: StepBuilder
    name_of: Mapping[Var, str]
    kinds: Mapping[Any, AxisSharding]

    @cached_property
    def _constants(self) -> dict[Var, Any]:
        """Constants of the update's program: variable -> value."""
        program = self.d.at.plan.update.placed.program
        return dict(zip(program.inner.constvars, constants(program.jaxpr), strict=True))

    def constant(self, a: Atom) -> Any | None:
        """Return the value of an output of the update if it is a constant, else None."""
        if isinstance(a, Literal):
            return np.asarray(a.val, a.aval.dtype)
        return self._constants.get(a)

    def slot(self, v: Var, stage: int) -> int:
        """Return the slot that contains a value of the update on a stage."""
        at, slots = self.d.at, self.d.slots
        plan, placed, n = at.plan, at.plan.update.placed, self.name_of.get(v)

        # Values that the update computes.
        if n is None:
            return slots.slot(
                self.kinds[v].sharded_along(placed.sharded_axes.get(v), SPLIT), "update", stage, v
            )

        # Arguments of the step.
        home = placed.stage_of_input[n]
        if n in plan.update.arguments:
            if at.host is None:
                return slots.array(stage, n)
            return slots.slot(self.kinds[v], "argument on the host", stage, n)

        # State. All stages of a device share the parameters.
        is_state = n in plan.state
        if is_state and home is None:
            return slots.state(stage, n)
        is_param = n in plan.model.homes
        is_here = is_param and plan.device_of(home or 0) == plan.device_of(stage)
        if home != stage and not is_here:
            return slots.slot(self.kinds[v], "update", stage, v)
        if is_state:
            return slots.state(at.place(n, stage), n)

        # Sums of gradients.
        leaf, _, micro = plan.update.sums[n]
        name = "sum" if at.host is None else "sum on the host"
        return slots.slot(at.update_kind(n), name, stage, leaf, micro)


def write_update(d: StepBuilder) -> tuple[StateSlots, ResultSlots]:
    """Write the instructions of the optimizer's update.

    Returns:
      The slots (places of values in a step) of the new state, and of the update's results.
    """
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
        for v in piece.outputs:
            _send(values, v, piece.place, targets)
    return _new_state(values), _results_of_update(values)


def _sums_to_host(d: StepBuilder) -> None:
    """Write transfers of the sums of gradients to the host if `offload` is set."""
    if d.at.host is None:
        return
    for name, (leaf, stage, micro) in d.at.plan.update.sums.items():
        kind = d.at.sum_kind(leaf)
        here = d.slots.slot(kind, "sum", stage, leaf, micro)
        there = d.slots.slot(kind, "sum on the host", stage, leaf, micro)
        d.move(here, there, (stage, stage), kind, name, to_host=True)


def _arguments_to_host(values: _UpdateValues) -> None:
    """Write transfers of the update's arguments to the host if `offload` is set."""
    d = values.d
    if d.at.host is None:
        return
    update = d.at.plan.update
    sent = set()
    for p in update.placed.pieces:
        for v in p.reads:
            n = values.name_of.get(v)
            if n in update.arguments and (p.place, v) not in sent:
                sent.add((p.place, v))
                here, there = d.slots.array(p.place, n), values.slot(v, p.place)
                stages = (p.place, p.place)
                d.move(here, there, stages, values.kinds[v], n, to_host=True)


def _send(
    values: _UpdateValues, v: Var, stage: int, targets: Mapping[tuple[Var, int], Sequence[int]]
) -> None:
    """Write transfers of a value of the update to the stages that read it.

    Args:
      values: the values of the update.
      v: the value.
      stage: the stage that has the value.
      targets: the stages that read a value, by the pair (value, stage that has the value).
    """
    d = values.d
    for target in targets.get((v, stage), ()):
        here, there = values.slot(v, stage), values.slot(v, target)
        if here != there:
            what, to_host = values.name_of.get(v, "update"), d.at.host is not None
            d.move(here, there, (stage, target), values.kinds[v], what, to_host=to_host)


def _write_piece(values: _UpdateValues, piece: StagePart, later: Sequence[StagePart]) -> None:
    """Write the instruction that runs a piece of the update.

    Args:
      values: the values of the update.
      piece: the piece.
      later: the pieces that run after this piece.
    """
    d = values.d
    donated = _donated(values, piece, later) if d.at.donate else ()
    reads = [values.slot(v, piece.place) for v in piece.reads]
    makes = [values.slot(v, piece.place) for v in piece.outputs]
    d.run(
        piece,
        lambda: _piece_function(piece),
        piece.place,
        reads,
        makes,
        f"update of stage {piece.place}",
        donated=donated,
        on=d.at.host,
    )


def _donated(values: _UpdateValues, piece: StagePart, later: Sequence[StagePart]) -> list[int]:
    """Return the positions of operands with memory that a piece of the update may reuse.

    Such an operand is an array of the old state. The piece computes the array's new value, and no
    later piece reads the old value.
    """
    plan = values.d.at.plan
    name_of_new: dict[Var, str] = {}
    for n, a in plan.update.placed.program.outvars.items():
        if n in plan.state and isinstance(a, Var):
            name_of_new[a] = n
    new = set(map(name_of_new.get, piece.outputs)) - {None}
    needed = set(name_of_new)
    for p in later:
        if p.place == piece.place:
            needed.update(p.reads)
    is_free = lambda v: values.name_of.get(v) in new and v not in needed
    return [i for i, v in enumerate(piece.reads) if is_free(v)]


def _piece_function(piece: StagePart) -> Callable[..., Sequence[Any]]:
    """Return a function that evaluates a piece of the update for one replica."""
    inner = piece.inner
    constant_of = dict(zip(inner.constvars, constants(piece.jaxpr), strict=True))

    def run(*args: Any) -> Sequence[Any]:
        env = {**constant_of, **dict(zip(inner.invars, args, strict=True))}
        return interpret(inner.eqns, env, inner.outvars, OVER_AXIS)

    return run


def _new_state(values: _UpdateValues) -> StateSlots:
    """Return the slots (places of values in a step) that contain the new state."""
    at, slots = values.d.at, values.d.slots
    plan, placed = at.plan, at.plan.update.placed
    outs = placed.program.outvars
    found: StateSlots = {}
    for n in plan.state:
        home, a = placed.stage_of_input[n], placed.outputs.get(n, outs[n])
        from_forward = n in plan.model.merges and n in plan.model.homes
        for k in range(plan.options.model_stages) if home is None else [home]:
            place = at.place(n, k)
            if (constant := values.constant(a)) is not None:
                found[place, n] = slots.constant(constant, k, n)
                continue
            assert isinstance(a, Var)
            found[place, n] = slots.state(place, n) if from_forward else values.slot(a, k)
    return found


def _results_of_update(values: _UpdateValues) -> ResultSlots:
    """Return the slots that contain the results computed by the update."""
    plan, placed = values.d.at.plan, values.d.at.plan.update.placed
    found: ResultSlots = {}
    for n, output in placed.program.outvars.items():
        if n not in plan.state:
            a = placed.outputs.get(n, output)
            stage = placed.stage_of_output[n] or 0
            if (constant := values.constant(a)) is not None:
                found[n] = (values.d.slots.constant(constant, 0, n), SAME, stage)
                continue
            assert isinstance(a, Var)
            found[n] = (values.slot(a, stage), SAME, stage)
    return found


def write_results(d: StepBuilder) -> tuple[ResultSlots, StateSlots]:
    """Write the merges of results over micro-batches and replicas.

    Returns:
      The slots of results, and the slots of state that the forward pass computes, such as batch
        statistics.
    """
    plan, slots = d.at.plan, d.slots
    results: ResultSlots = {}
    state: StateSlots = {}
    for s, p in zip(d.programs.stages, d.programs.results, strict=True):
        if p is None:
            continue
        slot_of: dict[str, int] = {}
        for n in s.results:
            for micro in range(plan.options.num_micro_batch):
                slot_of[micro_name(n, micro)] = slots.value(s.index, n, micro)
        kinds = {n: d.at.result_kind(n) for n in p.out_names}
        reads = values_at(slot_of, p.in_names)
        makes = [slots.slot(kind, "result", n) for n, kind in kinds.items()]
        d.run(p, lambda p=p: per_trainer(p), s.index, reads, makes, p.name)  # type: ignore[misc]
        for (n, kind), slot in zip(kinds.items(), makes, strict=True):
            home = plan.model.homes.get(n)
            if home is None:
                results[n] = (slot, kind, s.index)
            else:
                state[d.at.place(n, home), n] = _move_home(d, n, slot, kind, s.index)
    return results, state


def _move_home(d: StepBuilder, name: str, slot: int, kind: AxisSharding, stage: int) -> int:
    """Write the transfer of a merged parameter to the stage that stores it; return the new slot.

    Args:
      d: the builder of the step.
      name: the name of the parameter.
      slot, kind, stage: the slot, the sharding and the stage of the merged value.
    """
    plan, to_host = d.at.plan, d.at.host is not None
    home = plan.model.homes[name]
    if plan.device_of(home) == plan.device_of(stage) and not to_host:
        return slot
    target = d.slots.slot(kind, "moved", name)
    d.move(slot, target, (stage, home), kind, name, to_host=to_host)
    return target


def _kinds(at: StagePlacement, name_of: Mapping[Var, str]) -> dict[Any, AxisSharding]:
    """Return the sharding of each value of the update over the replicas of its stage.

    The output of an equation differs between replicas if one of its operands does. But the output
    of a collective, such as an all-reduce, is equal on all replicas.
    """
    program = at.plan.update.placed.program
    kinds: dict[Any, AxisSharding] = {v: at.update_kind(n) for v, n in name_of.items()}
    for eqn in program.inner.eqns:
        operands = variables(eqn.invars)
        differs = any(AXIS in kinds.get(a, SAME).varies for a in operands)
        differs = differs or eqn.primitive is trainer_index_p
        record = collective_of(eqn)
        if record is not None and record.same_for_all:
            differs = False
        kinds |= dict.fromkeys(eqn.outvars, EACH if differs else SAME)
    for n, a in reversed(program.outvars.items()):
        if isinstance(a, Var):
            # Results are equal on all replicas. State is equal or sliced.
            kinds[a] = at.state_kind(n).without(SPLIT)
    for copy, v in at.plan.update.placed.copies.items():
        kinds[copy] = kinds[v].without(SPLIT)
    return kinds
