"""The trainer half of a step, as all strategies need it: what is refused, and how it is written
into a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.step.cut import Cut, asks_for


def refuse_nested(step: Cut, trainers: int, noun: str = "trainer") -> None:
    """Raise for gradients that are computed from other gradients, of which each trainer has its
    own.

    Args:
      noun: what a trainer is called in errors.
    """
    if step.nested and trainers > 1:
        raise GradientError(
            f"the gradients of {step.program.name} are computed from another derivative "
            f"({step.nested}), as a step "
            f"does that perturbs its parameters by their gradient: with {trainers} {noun}s each "
            "would use its own, "
            "not that of all. If it is meant so, take the last gradient with dtrans.value_and_grad"
        )


def refuse_across(step: Cut, why: str, *, told: bool = False, remedy: str = "") -> None:
    """Raise for a half that reads what only the other has, where the halves are carried out in
    different places.

    Args:
      why: why the update does not have values of forward, in the words of the strategy.
      told: whether the one may tell the other: arguments of the step, and arrays of the optimizer's
        state.
      remedy: where they may, for errors.
    """
    if step.across is not None:
        raise step.across.refused(why)
    needs = [step.told, *(asks_for(output, name) for name, output in step.asked.items())]
    for need in needs:
        if need is not None and not told:
            raise need.error(f"{need.refused(why)}{remedy and f'. {remedy}'}")


def ready_order(step: Cut) -> list[str]:
    """The leaves in the order in which their gradients are made; constants and inputs come last."""
    at = {v: i for i, e in enumerate(step.program.eqns) for v in e.outvars}
    last = len(at)
    return sorted(
        step.gradients,
        key=lambda n: at.get(g, last) if isinstance(g := step.gradients[n], Var) else last,
    )


# equations and their roles otherwise, from those and what is read beside what they read
Arrange = Callable[
    [Sequence[JaxprEqn], Sequence[str], Collection[Atom]], tuple[list[JaxprEqn], list[str]]
]


class HalfWriter(Protocol):
    """Who writes the equations of a trainer half, where they are not just copied."""

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation."""

    def result(self, atom: Atom, maker: int) -> Atom:
        """A value that is wanted, once the equation that makes it is written: the `maker`-th of
        those to write."""


class _Copies:
    """Equations as they are."""

    def __init__(self, b: Builder) -> None:
        self.emit = b.keep

    def result(self, atom: Atom, maker: int) -> Atom:
        return atom


def half_equations(
    step: Cut, results: Sequence[str]
) -> tuple[list[JaxprEqn], list[str], list[Atom]]:
    """Return the equations of forward and backward, their roles, and the values that are wanted of
    them.

    Args:
      results: the outputs that are wanted, beside gradients, values for the update (`Cut.handed`),
        and the parameters that trainers make.
    """
    source = step.program
    inner, outs_of = source.inner, source.outvars
    wanted = [outs_of[n] for n in (*results, *step.frozen)] + [
        *step.gradients.values(),
        *step.handed.values(),
    ]
    wanted += [a for i in step.early for a in inner.eqns[i].invars]
    kept = sorted({*backward_slice(inner.eqns, wanted)[0], *step.early})
    return [inner.eqns[i] for i in kept], [source.roles[i] for i in kept], wanted


def write_trainer_half(
    b: Builder,
    step: Cut,
    results: Sequence[str],
    made: Callable[[str, Atom], None],
    writer: Callable[[Sequence[JaxprEqn], Sequence[str], Sequence[tuple[int, Atom]]], HalfWriter]
    | None = None,
    arrange: Arrange | None = None,
) -> dict[str, Atom]:
    """Write forward and backward.

    Args:
      b: that they are written with; it has their inputs.
      results: the outputs that are wanted, beside the parameters that trainers make.
      made: called with a leaf and its gradient, right after the equation that makes that.
      writer: gives who writes them, from the equations, their roles, and what is wanted of them.
      arrange: gives the equations and their roles otherwise, from those and what is wanted of them.

    Returns:
      The results, values for the update (`Cut.handed`), and the parameters that trainers make, by
      name.
    """
    outs_of = step.program.outvars
    eqns, roles, wanted = half_equations(step, results)
    ready: dict[Var | None, list[str]] = {}
    here = {v for e in eqns for v in e.outvars}
    for leaf, atom in step.gradients.items():
        ready.setdefault(atom if isinstance(atom, Var) and atom in here else None, []).append(leaf)
    if arrange is not None:
        eqns, roles = arrange(eqns, roles, wanted)
    at = {v: k for k, e in enumerate(eqns) for v in e.outvars}
    maker: Callable[[Atom], int] = lambda a: (
        at.get(a, len(eqns)) if isinstance(a, Var) else len(eqns)
    )
    outs = {**{n: outs_of[n] for n in (*results, *step.frozen)}, **step.handed}
    ends = [(maker(a), a) for a in (*step.gradients.values(), *outs.values())]
    w: HalfWriter = _Copies(b) if writer is None else writer(eqns, roles, ends)
    for k, (eqn, role) in enumerate(zip(eqns, roles, strict=True)):
        b.role = role
        w.emit(eqn)
        for v in eqn.outvars:
            for leaf in ready.get(v, ()):
                made(leaf, w.result(v, k))
    for leaf in ready.get(None, ()):  # gradients that no equation makes
        made(leaf, w.result(step.gradients[leaf], len(eqns)))
    return {n: w.result(a, maker(a)) for n, a in outs.items()}
