"""Costs of a step: the bytes and operations of each role of a job."""

from __future__ import annotations

import dataclasses

from dtrans.ir import display
from dtrans.ir.cost import flops
from dtrans.ir.program import Program


@dataclasses.dataclass(frozen=True)
class RoleCost:
    """Memory, traffic and operations of one role of a job in a step.

    Attributes:
      role: `trainer`, `127.0.0.1:6174`, `stage 0`.
      count: processes or devices with this role.
      held: bytes of state of each, between steps.
      sent, received: bytes per step of each. A collective counts its operands as sent and its
        results as received; the bytes on a link depend on the algorithm.
      rounds: times per step that each waits for others.
      flops: floating-point operations per step of each (`dtrans.ir.cost`).
    """

    role: str
    count: int
    held: int
    sent: int
    received: int
    rounds: int
    flops: int


class Costs(tuple[RoleCost, ...]):
    """Costs of all roles, printed as a table."""

    _header = ("role", "count", "bytes held", "bytes sent", "bytes received", "rounds", "flops")

    def _rows(self) -> list[tuple[str, ...]]:
        return [(c.role, *(f"{n:,}" for n in dataclasses.astuple(c)[1:])) for c in self]

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
