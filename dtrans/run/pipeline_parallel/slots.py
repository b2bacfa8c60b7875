"""Slots of a pipelined step: a number for each value that instructions read or write.

A step is compiled to a list of instructions, which work on a list of values. A slot is an index of
this list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.pipeline_parallel.options import SPLIT
from dtrans.pipeline_parallel.stage_programs import StagePrograms
from dtrans.pipeline_parallel.staged_model import StepPrograms
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.instructions import Instruction
from dtrans.run.pipeline_parallel.stage_devices import SAME
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement


class Slots:
    """Numbering of a step's values, for the instructions that read and write them.

    The first request for a value assigns its number (its *slot*).

    Args:
      at: the devices of the plan's stages.
      programs: the programs of a micro-batch.
      batch: shapes and dtypes, by name: arrays of the global batch, and values that the job
        computes from the global batch before the micro-batches.

    Attributes:
      kinds: maps each slot to the sharding of its value.
      inputs, fixed: see `StepProgram`.
    """

    def __init__(
        self, at: StagePlacement, programs: StepPrograms, batch: Mapping[str, Any]
    ) -> None:
        self.kinds: dict[int, AxisSharding] = {}
        self.inputs: dict[tuple[int, str], int] = {}
        self.fixed: dict[int, Any] = {}
        self._at, self._programs, self._batch = at, programs, batch
        self._numbers: dict[tuple[Any, ...], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def slot(self, kind: AxisSharding, *key: Any) -> int:
        """Return the slot number of a value; the first call for a value assigns the number.

        Args:
          kind: the sharding of the value.
          *key: a key that identifies the value.
        """
        found = self._numbers.setdefault(key, len(self._numbers))
        self.kinds[found] = kind
        return found

    # -- inputs and constants of a step ----------------------------------------------------------

    def state(self, place: int, name: str) -> int:
        """Return the slot number for a stored copy of a state array; `place` is its index."""
        found = self.slot(self._at.state_kind(name), "state", place, name)
        self.inputs[place, name] = found
        return found

    def param(self, stage: int, name: str) -> int:
        """Return the slot number for a parameter that a stage reads."""
        plan = self._at.plan
        device = plan.device_of(stage)
        if self._at.host is None and plan.device_of(plan.model.homes[name]) == device:
            return self.state(device, name)
        return self.slot(self._at.state_kind(name), "copy", device, name)

    def shared_state(self, stage: int, name: str) -> int:
        """Return the slot number for one stage's copy of state that every stage stores."""
        if self._at.host is None:
            return self.state(stage, name)
        return self.slot(SAME, "copy", self._at.plan.device_of(stage), name)

    def array(self, stage: int, name: str) -> int:
        """Return the slot number for a batch array that a stage reads."""
        device = self._at.plan.device_of(stage)
        kind = self._at.batch_kind(name, self._batch[name])
        found = self.slot(kind, "batch", device, name)
        self.inputs[device, name] = found
        return found

    def micro_index(self, stage: int, micro: int) -> int:
        """Return the slot number for the index of a micro-batch, a constant that programs read."""
        found = self.slot(SAME, "number", self._at.plan.device_of(stage), micro)
        if found not in self.fixed:
            self.fixed[found] = self._at.backend.put(np.int32(micro), stage, SAME)
        return found

    def constant(self, value: Any, stage: int, name: str) -> int:
        """Return the slot number for a constant that the update returns."""
        found = self.slot(SAME, "constant", stage, name)
        self.fixed[found] = self._at.state_backend.put(value, stage, SAME)
        return found

    # -- values of a micro-batch -----------------------------------------------------------------

    def value(self, stage: int, name: str, micro: int) -> int:
        """Return the slot number for a value that a stage's forward pass computes or receives."""
        axis = self._programs.sharded_axes.get((stage, name))
        kind = self._at.per_replica.sharded_along(axis, SPLIT)
        return self.slot(kind, "value", stage, name, micro)

    def sum_of(self, stage: int, leaf: str, micro: int | None) -> int:
        """Return the slot number for a stage's sum of the gradients of a leaf.

        If the gradients of each micro-batch are clipped, each micro-batch has a slot instead.
        """
        index = None if self._at.plan.options.clip_of_each is None else micro
        return self.slot(self._at.sum_kind(leaf), "sum", stage, leaf, index)

    def output(self, s: StagePrograms, name: str, micro: int) -> int:
        """Return the slot number for an output of a stage's backward program."""
        if name in s.sums:
            return self.sum_of(s.index, s.sums[name], micro)
        if name in s.cotangents:
            return self.slot(self._at.per_replica, "back", s.index, name, micro)
        return self.value(s.index, name, micro)

    def operand(self, s: StagePrograms, name: str, micro: int) -> int:
        """Return the slot number for an input of one of a stage's programs."""
        if name in s.sums:
            return self.sum_of(s.index, s.sums[name], micro)
        if name in s.cotangents:
            return self.slot(self._at.per_replica, "cotangent", s.index, name, micro)
        if name in s.params:
            return self.param(s.index, name)
        if name in s.state:
            return self.shared_state(s.index, name)
        if name in s.batch:
            return self.array(s.index, name)
        return self.value(s.index, name, micro)

    def in_flight(self) -> dict[int, int]:
        """Return the slots with values of a single micro-batch, and the stage of each one.

        `profile` adds up the sizes of these values, to measure the memory of micro-batches in
        flight.
        """
        kinds = ("value", "cotangent", "back")
        return {slot: key[1] for key, slot in self._numbers.items() if key[0] in kinds}


def with_releases(
    instructions: Sequence[Instruction], stay: Collection[int]
) -> tuple[tuple[Instruction, tuple[int, ...]], ...]:
    """Return each instruction with the slots that can be emptied after it.

    No later instruction reads these slots.

    Args:
      instructions: the instructions.
      stay: the slots that are never emptied.
    """
    wanted = set(stay)
    found: list[tuple[Instruction, tuple[int, ...]]] = []
    for ins in reversed(instructions):
        slots = dict.fromkeys((*ins.reads, *ins.writes))
        found.append((ins, tuple(slot for slot in slots if slot not in wanted)))
        # this instruction overwrites these slots, so no later instruction reads their old values
        wanted.difference_update(ins.writes)
        wanted.update(ins.reads)
    return tuple(reversed(found))
