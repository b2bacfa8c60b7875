"""The slots of a step: what is in each, how replicas have it, and after which instruction it is
empty."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.pipeline_parallel.options import SPLIT
from dtrans.pipeline_parallel.stage_programs import StagePrograms
from dtrans.pipeline_parallel.staged_model import StepPrograms
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.instructions import Instruction
from dtrans.run.pipeline_parallel.stage_devices import SAME


class Slots:
    """The slots of a step, each numbered when it is first asked for.

    Attributes:
      kinds: how replicas have what is in each.
      given, fixed: as in `StepProgram`.
    """

    def __init__(self, at: Deployment, programs: StepPrograms, batch: Mapping[str, Any]) -> None:
        self.kinds: dict[int, AxisSharding] = {}
        self.given: dict[tuple[int, str], int] = {}
        self.fixed: dict[int, Any] = {}
        self._at, self._programs, self._batch = at, programs, batch
        self._numbers: dict[tuple[Any, ...], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, kind: AxisSharding, *key: Any) -> int:
        """The slot of a value."""
        found = self._numbers.setdefault(key, len(self._numbers))
        self.kinds[found] = kind
        return found

    # -- what a step begins with -----------------------------------------------------------------

    def state(self, place: int, name: str) -> int:
        """An array of the state, in a place."""
        found = self.given[place, name] = self.of(self._at.state_kind(name), "state", place, name)
        return found

    def param(self, stage: int, name: str) -> int:
        """A parameter where a stage reads it."""
        plan = self._at.plan
        device = plan.device_of(stage)
        if self._at.host is None and plan.device_of(plan.model.homes[name]) == device:
            return self.state(device, name)
        return self.of(SAME, "copy", device, name)

    def shared_state(self, stage: int, name: str) -> int:
        """An array of the optimizer's state that every stage has, where a stage reads it."""
        if self._at.host is None:
            return self.state(stage, name)
        return self.of(SAME, "copy", self._at.plan.device_of(stage), name)

    def array(self, stage: int, name: str) -> int:
        """An array of the batch where a stage reads it."""
        device = self._at.plan.device_of(stage)
        kind = self._at.batch_kind(name, self._batch[name])
        found = self.given[device, name] = self.of(kind, "batch", device, name)
        return found

    def number(self, stage: int, m: int) -> int:
        """The number of a micro-batch."""
        found = self.of(SAME, "number", self._at.plan.device_of(stage), m)
        if found not in self.fixed:
            self.fixed[found] = self._at.places.put(np.int32(m), stage, SAME)
        return found

    def constant(self, value: Any, stage: int, name: str) -> int:
        """Return the slot of an output of the update that is a constant."""
        found = self.of(SAME, "constant", stage, name)
        self.fixed[found] = self._at.at_rest.put(value, stage, SAME)
        return found

    # -- what a micro-batch makes ----------------------------------------------------------------

    def value(self, stage: int, name: str, m: int) -> int:
        """A value of the forward pass."""
        return self.of(
            self._at.own.cut_along(self._programs.cuts.get((stage, name)), SPLIT),
            "value",
            stage,
            name,
            m,
        )

    def sum_of(self, stage: int, leaf: str, m: int | None) -> int:
        """The sum of a leaf's gradients that a stage makes; where each micro-batch is clipped, the
        gradient of one."""
        one = None if self._at.plan.options.clip_of_each is None else m
        return self.of(self._at.sum_kind(leaf), "sum", stage, leaf, one)

    def made(self, s: StagePrograms, name: str, m: int) -> int:
        """An output of a backward program."""
        if name in s.sums:
            return self.sum_of(s.index, s.sums[name], m)
        return (
            self.of(self._at.own, "back", s.index, name, m)
            if name in s.cotangents
            else self.value(s.index, name, m)
        )

    def read(self, s: StagePrograms, name: str, m: int) -> int:
        """An input of a program of a stage."""
        if name in s.sums:
            return self.sum_of(s.index, s.sums[name], m)
        if name in s.cotangents:
            return self.of(self._at.own, "cotangent", s.index, name, m)
        if name in s.params:
            return self.param(s.index, name)
        if name in s.state:
            return self.shared_state(s.index, name)
        return self.array(s.index, name) if name in s.batch else self.value(s.index, name, m)

    def passing(self) -> dict[int, int]:
        """The stage of each slot that is of one micro-batch."""
        return {
            slot: key[1]
            for key, slot in self._numbers.items()
            if key[0] in ("value", "cotangent", "back")
        }


def with_releases(
    instructions: Sequence[Instruction], stay: Collection[int]
) -> tuple[tuple[Instruction, tuple[int, ...]], ...]:
    """Instructions, each with the slots that nothing reads any more after it.

    Args:
      stay: slots that are never emptied.
    """
    wanted = set(stay)
    found = []
    for ins in reversed(instructions):
        found.append(
            (
                ins,
                tuple(
                    slot for slot in dict.fromkeys((*ins.reads, *ins.makes)) if slot not in wanted
                ),
            )
        )
        wanted.difference_update(ins.makes)  # what is there before is another value
        wanted.update(ins.reads)
    return tuple(reversed(found))
