"""Costs of a step: memory, traffic and floating-point operations of each role of a job."""

from __future__ import annotations

import dataclasses

from dtrans.ir import display
from dtrans.ir.cost import flops
from dtrans.ir.program import Program


@dataclasses.dataclass(frozen=True)
class RoleCost:
    """Costs of one role of a job.

    Attributes:
      role: name of the role: `trainer`, `127.0.0.1:6174`, `stage 0`.
      count: number of processes or devices with this role. All further attributes are for one
        process or device.
      state_bytes: bytes of state between steps.
      sent: bytes sent in a step. A collective counts as sending its operands; the bytes on a link
        depend on its algorithm.
      received: bytes received in a step. A collective counts as receiving its results.
      rounds: number of waits for other roles in a step.
      flops: floating-point operations in a step (`dtrans.ir.cost`).
    """

    role: str
    count: int
    state_bytes: int
    sent: int
    received: int
    rounds: int
    flops: int


class Costs(tuple[RoleCost, ...]):
    """Costs of all roles, printed as a table."""

    _header = ("role", "count", "bytes of state", "bytes sent", "bytes received", "rounds", "flops")

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for cost in self:
            role, *numbers = dataclasses.astuple(cost)
            rows.append((role, *(f"{n:,}" for n in numbers)))
        return rows

    def __str__(self) -> str:
        return display.plan_text(
            "costs of a step, for each", self._header, self._rows(), (), right=range(1, 7)
        )

    def _repr_html_(self) -> str:
        return display.plan_html(
            "costs of a step, for each", self._header, self._rows(), (), code=0
        )


def program_flops(program: Program) -> int:
    """Return the floating-point operations of a program."""
    return sum(flops(eqn) for eqn in program.eqns)
