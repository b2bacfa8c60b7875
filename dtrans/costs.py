"""Costs of a step: memory, traffic and floating-point operations of each role of a job.

The network may limit the speed of a job with parameter servers. If the rate of the hosts' links is
known, the costs contain a lower bound for the time of a step: the time in which the busiest link
carries the step's bytes. Let each of n trainers send and receive M bytes in a step. Each of k
servers receives and sends M / k of these bytes. Let every role have a separate host. Its link
carries B bytes per second in each direction at once. Then a step takes at least

    max(M / B, n M / (k B))

Source: "t_opt" of BytePS (Jiang et al., OSDI 2020).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from dtrans.checks import check_number
from dtrans.errors import ConfigError
from dtrans.ir import display
from dtrans.ir.cost import flops
from dtrans.ir.program import Program


_HEADER = ("role", "count", "bytes of state", "bytes sent", "bytes received", "rounds", "flops")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)bit(?:/s)?", re.IGNORECASE)


def link_rate(link: float | str) -> float:
    """Return the bytes per second of a link.

    Args:
      link: bytes per second, or bits per second with a unit: "200mbit", "1.5 Gbit/s".

    Raises:
      ConfigError: `link` is not a positive number of bytes, or text in another form.

    Example:
      >>> link_rate("1gbit")
      125000000.0
    """
    what = 'bytes per second, such as 125e6, or text such as "1gbit"'
    if isinstance(link, str):
        found = _RATE.fullmatch(link.strip())
        if found is None or not float(found[1]):
            raise ConfigError(f"link must be {what}; it is {link!r}")
        return float(found[1]) * _UNITS[found[2].lower()] / 8
    check_number("link", link, what, lambda x: 0 < x < math.inf)
    return float(link)


@dataclasses.dataclass(frozen=True)
class RoleCost:
    """Costs of one role of a job.

    Attributes:
      role: name of the role: `trainer`, `127.0.0.1:6174`, `stage 0`.
      count: number of processes or devices with this role. All further attributes are for one
        process or device.
      state_bytes: bytes of the state. Some servers send parameters before their update is complete.
        They also keep the old optimizer state, so it counts twice (docs/early_answers.md). The
        number does not include copies that a server makes for snapshots and checkpoints.
      sent: bytes sent in a step. A collective counts as sending its operands; the bytes on a link
        depend on its algorithm.
      received: bytes received in a step. A collective counts as receiving its results.
      rounds: number of waits for other roles in a step.
      flops: floating-point operations in a step (`dtrans.ir.cost`).
      speed: relative speed of the process or device, as in the plan's option `speeds`; None if the
        plan has no speeds.
    """

    role: str
    count: int
    state_bytes: int
    sent: int
    received: int
    rounds: int
    flops: int
    speed: float | None = None


class Costs(tuple[RoleCost, ...]):
    """Costs of all roles, printed as a table.

    Args:
      roles: the costs of each role.
      link_steps: number of steps between two exchanges with the servers: 1, or more in GEO-SGD. 0
        for a job with collectives: their algorithms determine the bytes on a link.
      link: bytes per second of each host's link, in each direction; None if the rate is unknown.
    """

    link_steps: int
    link: float | None

    def __new__(
        cls, roles: Iterable[RoleCost], link_steps: int = 0, link: float | None = None
    ) -> Costs:
        costs = super().__new__(cls, roles)
        costs.link_steps, costs.link = link_steps, link
        return costs

    def over_link(self, link: float | str) -> Costs:
        """Return a copy of these costs that also has the rate of each host's link.

        Args:
          link: bytes per second in each direction, or text such as "1gbit".

        Raises:
          ConfigError: `link` is not a rate, or the bytes on the links are unknown.
        """
        rate = link_rate(link)
        if not self.link_steps:
            raise ConfigError(
                f"link={link!r} is only for plans of dtrans.pserver, whose bytes on each link are "
                "known; leave link out"
            )
        return Costs(self, self.link_steps, rate)

    @property
    def busiest(self) -> RoleCost:
        """The role that sends or receives the most bytes."""
        return max(self, key=_one_way)

    @property
    def link_bytes(self) -> float | None:
        """Bytes of a step on the busiest host's link, in the direction with more bytes.

        None if they depend on the algorithms of collectives.
        """
        return _one_way(self.busiest) / self.link_steps if self.link_steps else None

    @property
    def link_seconds(self) -> float | None:
        """Seconds in which the busiest link carries the bytes of a step, if roles share no host.

        None if the rate of the links is unknown. The bytes of embedding tables, and so the seconds,
        are upper bounds.
        """
        if self.link is None or self.link_bytes is None:
            return None
        return self.link_bytes / self.link

    @property
    def slowest(self) -> RoleCost | None:
        """The role with the longest time for its operations at its speed; None without speeds."""
        timed = [cost for cost in self if cost.speed is not None]
        return max(timed, key=_operation_time, default=None)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: about the busiest link, and about the slowest role."""
        notes, slowest = [], self.slowest
        if slowest is not None:
            times = [_operation_time(cost) for cost in self if cost.speed is not None]
            ratio = _operation_time(slowest) * len(times) / sum(times) if any(times) else 1.0
            notes.append(
                f"the operations of {slowest.role} take longest at its speed {slowest.speed:g}: "
                f"{ratio:.2f} times the mean of the roles with a speed"
            )
        if self.link is None:
            return notes
        return [
            *notes,
            f"busiest link, of {self.busiest.role}: {self.link_bytes:,.0f} bytes per step in one "
            f"direction, {self.link_seconds:.4g} s at {self.link:,.0f} bytes/s, if each role has a "
            "separate host",
        ]

    @property
    def _header(self) -> tuple[str, ...]:
        speed = () if self.slowest is None else ("speed",)
        return (*_HEADER, *speed)

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for cost in self:
            role, *numbers, speed = dataclasses.astuple(cost)
            row = [role, *(f"{n:,}" for n in numbers)]
            if self.slowest is not None:
                row.append("-" if speed is None else f"{speed:g}")
            rows.append(tuple(row))
        return rows

    def __str__(self) -> str:
        right = range(1, len(self._header))
        return display.plan_text(
            "costs of a step, for each", self._header, self._rows(), self.notes, right=right
        )

    def _repr_html_(self) -> str:
        return display.plan_html(
            "costs of a step, for each", self._header, self._rows(), self.notes, code=0
        )


def _operation_time(cost: RoleCost) -> float:
    """Return the operations of a role, divided by its speed."""
    assert cost.speed is not None
    return cost.flops / cost.speed


def _one_way(cost: RoleCost) -> int:
    """Return the bytes that a role sends or receives in a step, the larger of these numbers."""
    return max(cost.sent, cost.received)


def program_flops(program: Program) -> int:
    """Return the floating-point operations of a program."""
    return sum(flops(eqn) for eqn in program.eqns)
