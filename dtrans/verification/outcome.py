"""Report of a verification: outputs that were compared, and outputs that differ."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cause:
    """First wrong equation among those that lead to an output that differs.

    Its operands are correct: constants, or copies, pieces or partial sums of values of the
    one-device step. Its result is a multiple of a step value, or has no known relation to any step
    value.

    Attributes:
      primitive: primitive of the equation; "" if the output is an unchanged argument.
      line: the user's source line, `model.py:12`; "" if the equation has none.
      origin: function that wrote an equation without a line: `optax.scale_by_adam`; "" if unknown.
      value: text about the result: `no piece, partial sum or copy of a value of the step`.
      operands: text about each operand that is related to a step value: `a copy of tanh
        (model.py:12)`.
      behind: the next collective that depends on the result, with its line; "" if there is none.
    """

    primitive: str
    line: str
    origin: str
    value: str
    operands: tuple[str, ...] = ()
    behind: str = ""

    @property
    def equation(self) -> str:
        """The primitive with its line or origin: `psum (model.py:12)`."""
        place = self.line or self.origin
        return f"{self.primitive} ({place})" if place else self.primitive

    def __str__(self) -> str:
        text = f"{self.equation or 'an argument'}: {self.value}"
        if self.operands:
            text += f"; computed from {' and '.join(self.operands)}"
        if self.behind:
            text += f"; next collective: {self.behind}"
        return text


@dataclasses.dataclass(frozen=True)
class Difference:
    """Output of a plan that differs from the step's output.

    Attributes:
      output: name of the output, `params/w1`.
      entries: number of entries that differ, and number of all entries.
      detail: text that relates the output to the correct value, such as "it is the step's value
        times 4"; "" if unknown.
      cause: first wrong equation; None if the program is too large for a search.
    """

    output: str
    entries: tuple[int, int]
    detail: str = ""
    cause: Cause | None = None

    def __str__(self) -> str:
        count, size = self.entries
        text = f"{self.output}: {count} of {size} entries differ"
        if self.detail:
            text += f"; {self.detail}"
        return text


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of `plan.verify()` or `dtrans.verify()`.

    Attributes:
      title: name of the plan, or of the distributed step.
      differences: outputs that differ from the one-device step; empty if none was found.
      compared: names of the outputs that were compared.
      unevaluated: equations that cannot be evaluated in a finite field, with their source lines.
        Outputs that depend on them are not compared.
      skipped: names of the outputs that were not compared.
      points: number of random inputs for which outputs were compared.
      seconds: duration of the verification.
      faults: collectives that cause the differences, with their source lines and remedies.
    """

    title: str
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    unevaluated: tuple[str, ...]
    skipped: tuple[str, ...]
    points: int
    seconds: float
    faults: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if no compared output differs."""
        return not self.differences

    @property
    def complete(self) -> bool:
        """True if the verification compared every output of the job with the one-device step."""
        return not self.skipped and not self.unevaluated

    def merge(self, other: Report) -> Report:
        """Combine this report with the report of another step of the same job."""
        both = lambda one, two: tuple(dict.fromkeys((*one, *two)))
        skipped = both(self.skipped, other.skipped)
        compared = [n for n in both(self.compared, other.compared) if n not in skipped]
        return dataclasses.replace(
            self,
            differences=(*self.differences, *other.differences),
            compared=tuple(compared),
            unevaluated=both(self.unevaluated, other.unevaluated),
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
        # Several outputs may share a cause, which is printed once.
        listed: set[Cause | None] = {None}
        for difference in self.differences:
            lines.append(f"  {difference}")
            if difference.cause not in listed:
                lines.append(f"    first wrong value: {difference.cause}")
            listed.add(difference.cause)
        lines += [f"  fault: {fault}" for fault in self.faults]
        lines += [f"  not followed: {why}" for why in self.unevaluated]
        if self.skipped:
            lines.append(f"  not compared: {', '.join(self.skipped)}")
        return "\n".join(lines)
