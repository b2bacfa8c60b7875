"""Outcome of a verification: what was compared, what differs, what could not be followed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Difference:
    """One output of a plan that is not what the step computes.

    Attributes:
      output: its name, as `params/w1`.
      entries: how many of its numbers differ, and how many there are.
      detail: further facts: copies of ranks that differ.
    """

    output: str
    entries: tuple[int, int]
    detail: str = ""

    def __str__(self) -> str:
        count, size = self.entries
        text = f"{self.output}: {count} of {size} entries differ"
        return text + (f"; {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of `plan.verify()`.

    Attributes:
      title: the plan.
      differences: outputs that differ; none where the plan computes the step.
      compared: names of the outputs that were compared as elements of the field.
      unfollowed: equations that could not be followed, with their lines; what they reach is not
        compared.
      skipped: names of outputs that were not compared.
      points: how many random points were compared.
      seconds: how long it took.
    """

    title: str
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    unfollowed: tuple[str, ...]
    skipped: tuple[str, ...]
    points: int
    seconds: float

    @property
    def equal(self) -> bool:
        """True if no output that was compared differs."""
        return not self.differences

    @property
    def complete(self) -> bool:
        """True if every output was compared."""
        return not self.skipped and not self.unfollowed

    def __bool__(self) -> bool:
        return self.equal and self.complete

    def __str__(self) -> str:
        head = "computes the step" if self.equal else "does not compute the step"
        lines = [f"{self.title}: {head} ({len(self.compared)} outputs at {self.points} points, {self.seconds:.1f} s)"]
        lines += [f"  {d}" for d in self.differences]
        lines += [f"  not followed: {why}" for why in self.unfollowed]
        if self.skipped:
            lines.append(f"  not compared: {', '.join(self.skipped)}")
        return "\n".join(lines)
