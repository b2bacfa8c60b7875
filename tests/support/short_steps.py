"""Short steps: a random step that shows a fault, reduced while it still shows the fault.

    record     fewer instructions, SGD, no readings, a linear loss              `_simpler`
    forward    edits of the jaxpr of the loss, which is then differentiated     `RandomStep.edits`
    step       edits of the jaxpr of the full step                              `ShortStep`

Hypothesis shrinks random choices. But one choice can be an instruction of forty equations, and the
simplest step has eleven. So the second and third rows reduce jaxprs. Call `shrink`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxpr_edits import Edits, edits_of, run_with_edits, without_dead_equations
from random_steps import RandomStep

import dtrans
from dtrans._jax import equations, evaluate, opened


OUT = -1  # the position of what is no equation: a leaf of the new state, or a result


@dataclasses.dataclass(frozen=True)
class ShortStep:
    """Random step without some of its equations.

    Attributes:
      whole: the step.
      edits: pairs of a place and an edit. `(OUT, n)` is a leaf of the new state, which stays
        unchanged; or it is a result, which is dropped.
    """

    whole: RandomStep
    edits: Edits = ()

    def init(self) -> Any:
        """Return the first state."""
        return self.whole.init()

    def arguments(self, rows: int) -> tuple[Any, ...]:
        """Return the types of the step's arguments."""
        return self.whole.arguments(rows)

    def trace(self, rows: int) -> tuple[Any, Any]:
        """Return the traced step and the traced init."""
        return dtrans.trace(self, *self.arguments(rows)), dtrans.trace(self.init)

    def __call__(self, *args: Any) -> Any:
        """Run the step."""
        jaxpr, dropped, tree = self.jaxpr(*args)
        made = iter(evaluate(jaxpr, *jax.tree.leaves(args)))
        return jax.tree.unflatten(
            tree, [None if n in dropped else next(made) for n in range(tree.num_leaves)]
        )

    def jaxpr(self, *args: Any) -> tuple[Any, set[int], Any]:
        """Return the remaining equations, the numbers of dropped results, and the outputs'
        structure.
        """
        whole, out = jax.make_jaxpr(self.whole.step(), return_shape=True)(*args)
        edits = dict(self.edits)
        states = len(jax.tree.leaves(jax.eval_shape(self.init)))
        dropped = {n for _, n in (place for place in edits if place[0] == OUT) if n >= states}

        def run(*leaves: Any) -> list[Any]:
            made = run_with_edits(whole, edits, (), leaves)
            made = [
                leaves[n] if n < states and (OUT, n) in edits else x for n, x in enumerate(made)
            ]
            return [x for n, x in enumerate(made) if n not in dropped]

        left = without_dead_equations(run, [v.aval for v in opened(whole).invars])
        return left, dropped, jax.tree.structure(out)

    def editable(self, rows: int) -> tuple[Any, int]:
        """Return the jaxpr that edits change, and the number of outputs that they may replace."""
        whole = jax.make_jaxpr(self.whole.step())(*self.arguments(rows))
        return whole, len(opened(whole).outvars)

    def short(self, rows: int) -> Any:
        """Return the remaining jaxpr."""
        return self.jaxpr(*self.arguments(rows))[0]

    def length(self, rows: int) -> int:
        """Return the number of equations, including bodies."""
        return len(list(equations(self.short(rows))))


# -- search ----------------------------------------------------------------------------------------


def shrink(case: Any, fails: Callable[[Any], bool], *, whole: bool) -> Any:
    """Return a failing case whose step has as few equations as the search finds.

    Args:
      case: a dataclass with a random step `step`, and the numbers `rows` and `given` of rows.
      fails: returns True if a case shows the fault.
      whole: True to also edit the equations after the gradient; a strategy must then not retrace
        it.
    """
    case = _reduced(_reduced(case, fails, _simpler), fails, _shorter)
    short = dataclasses.replace(case, step=ShortStep(case.step))
    return _reduced(short, fails, _shorter) if whole and fails(short) else case


def _reduced(
    case: Any, fails: Callable[[Any], bool], candidates: Callable[[Any], Iterator[Any]]
) -> Any:
    """Take failing candidates until no candidate fails. Each search begins where the last one
    ended.
    """
    start = 0
    while True:
        for number, other in enumerate(candidates(case)):
            if number >= start and fails(other):
                case, start = other, number
                break
        else:
            if not start:
                return case
            start = 0


SIMPLEST: dict[str, Any] = {
    "instructions": (),
    "readings": (),
    "leaves": (),
    "optimizer": "sgd",
    "loss": ("linear", 0),
    "gradient": "marked",
    "one_state": False,
    "anchored": False,
}


def _simpler(case: Any) -> Iterator[Any]:
    """Yield cases whose step has one part less."""
    step = case.step
    with_step = lambda **changes: dataclasses.replace(
        case, step=dataclasses.replace(step, **changes)
    )
    for name, value in SIMPLEST.items():
        if getattr(step, name) != value:
            yield with_step(**{name: value})
    for name in ("instructions", "readings", "leaves"):
        items = getattr(step, name)
        for n in range(len(items)):
            yield with_step(**{name: items[:n] + items[n + 1 :]})
    for n, (name, *numbers) in enumerate(step.instructions):
        new = (name, 0, 0, numbers[-1])  # the last number chooses the function
        if new != step.instructions[n]:
            yield with_step(instructions=(*step.instructions[:n], new, *step.instructions[n + 1 :]))
    if case.given != case.rows:
        yield dataclasses.replace(case, given=case.rows)
        yield dataclasses.replace(case, rows=case.given)
    if case.wide:
        yield dataclasses.replace(case, wide=False)


def _shorter(case: Any) -> Iterator[Any]:
    """Yield cases whose step has one more edit, and fewer equations."""
    step, edits = case.step, dict(case.step.edits)
    whole, outputs = step.editable(case.rows)
    length = step.length(case.rows)
    for place, edit in (*(((OUT, n), 0) for n in range(outputs)), *edits_of(whole, (), edits)):
        if place in edits:
            continue
        other = dataclasses.replace(step, edits=(*step.edits, (place, edit)))
        if place[0] == OUT or other.length(case.rows) < length:
            yield dataclasses.replace(case, step=other)
