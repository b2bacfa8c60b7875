"""Outcome of a verification: what was compared, what differs, what could not be followed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cause:
    """First equation whose value is wrong, on the way to an output that differs.

    Its operands are constants, copies, pieces or partial sums of step values. Its own value is none
    of these, or is a multiple of the right value.

    Attributes:
      primitive: primitive of the equation; "" if the output is an argument that no equation
        changes.
      line: the user's line, `model.py:12`; "" if the equation comes from no line of the user.
      origin: author of an equation without a line: `optax.scale_by_adam`; "" if that is unknown.
      value: a noun phrase for the value: `no piece, partial sum or copy of a value of the step`.
      operands: a noun phrase for each operand of floats: `a copy of tanh (model.py:12)`.
      behind: the next collective that depends on the value, with its line; "" if there is none.
    """

    primitive: str
    line: str
    origin: str
    value: str
    operands: tuple[str, ...] = ()
    behind: str = ""

    @property
    def equation(self) -> str:
        """The primitive with its place: `psum (model.py:12)`."""
        place = self.line or self.origin
        return f"{self.primitive} ({place})" if place else self.primitive

    def __str__(self) -> str:
        text = f"{self.equation or 'an argument'}: {self.value}"
        if self.operands:
            text += f"; made of {' and '.join(self.operands)}"
        return text + (f"; next collective: {self.behind}" if self.behind else "")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One output of a plan that is not what the step computes.

    Attributes:
      output: its name, as `params/w1`.
      entries: how many of its numbers differ, and how many there are.
      detail: how its value is related to the step's: scaled, rows of another rank, copies that
        differ.
      cause: the first equation whose value is wrong; None where the program is too large to look.
    """

    output: str
    entries: tuple[int, int]
    detail: str = ""
    cause: Cause | None = None

    def __str__(self) -> str:
        count, size = self.entries
        text = f"{self.output}: {count} of {size} entries differ"
        return text + (f"; {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of `plan.verify()` or `dtrans.verify()`.

    Attributes:
      title: the plan, or the name of the distributed step.
      differences: outputs that differ; none where the step is computed.
      compared: names of the outputs that were compared as elements of the field.
      unfollowed: equations that could not be followed, with their lines; what they reach is not
        compared.
      skipped: names of outputs that were not compared.
      points: how many random points were compared.
      seconds: how long it took.
      faults: collectives that explain differences, with the user's lines and remedies.
    """

    title: str
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    unfollowed: tuple[str, ...]
    skipped: tuple[str, ...]
    points: int
    seconds: float
    faults: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if no output that was compared differs."""
        return not self.differences

    @property
    def complete(self) -> bool:
        """True if every output was compared."""
        return not self.skipped and not self.unfollowed

    def joined(self, other: Report) -> Report:
        """Return one report for two steps of a job."""
        both = lambda one, two: tuple(dict.fromkeys((*one, *two)))
        skipped = both(self.skipped, other.skipped)
        return dataclasses.replace(
            self,
            differences=(*self.differences, *other.differences),
            compared=tuple(n for n in both(self.compared, other.compared) if n not in skipped),
            unfollowed=both(self.unfollowed, other.unfollowed),
            skipped=skipped,
            points=self.points + other.points,
            seconds=self.seconds + other.seconds,
        )

    def __bool__(self) -> bool:
        return self.equal and self.complete

    def __str__(self) -> str:
        head = "computes the step" if self.equal else "does not compute the step"
        lines = [
            f"{self.title}: {head} ({len(self.compared)} outputs at {self.points} points, "
            f"{self.seconds:.1f} s)"
        ]
        said: set[Cause | None] = {None}
        for difference in self.differences:
            lines.append(f"  {difference}")
            if difference.cause not in said:
                lines.append(f"    first wrong value: {difference.cause}")
            said.add(difference.cause)
        lines += [f"  fault: {fault}" for fault in self.faults]
        lines += [f"  not followed: {why}" for why in self.unfollowed]
        if self.skipped:
            lines.append(f"  not compared: {', '.join(self.skipped)}")
        return "\n".join(lines)
