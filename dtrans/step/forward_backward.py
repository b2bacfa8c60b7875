"""Trainer half of a step: refusals, and its equations in the program of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.selection import subset, values_at
from dtrans.step.cut import Cut, asks_for


def refuse_nested(step: Cut, trainers: int, noun: str = "trainer") -> None:
    """Raise GradientError if gradients depend on other gradients, which differ between trainers.

    Args:
      step: the step.
      trainers: number of trainers.
      noun: name of a trainer in errors.
    """
    if step.nested and trainers > 1:
        raise GradientError(
            f"the gradients of {step.program.name} are computed from another derivative "
            f"({step.nested}), as a step does that perturbs its parameters by their gradient: with "
            f"{trainers} {noun}s each would use its own gradient, not the gradient of all. If that "
            "is intended, take the last gradient with dtrans.value_and_grad"
        )


def refuse_across(step: Cut, why: str, *, may_send: bool = False, remedy: str = "") -> None:
    """Raise if a half needs a value of the other half, which runs elsewhere.

    Args:
      step: the step.
      why: reason why the update lacks values of forward, in the words of the strategy.
      may_send: True if arguments of the step and optimizer state may be sent.
      remedy: a mode in which they may, for errors.
    """
    if step.across is not None:
        raise step.across.refused(why)
    needs = [
        step.argument_need,
        *(asks_for(output, name) for name, output in step.state_read.items()),
    ]
    for need in needs:
        if need is not None and not may_send:
            raise need.error(f"{need.refused(why)}{remedy and f'. {remedy}'}")


def ready_order(step: Cut) -> list[str]:
    """Return the leaves in the order in which their gradients are computed; constants are last."""
    at = {v: i for i, e in enumerate(step.program.eqns) for v in e.outvars}
    last = len(at)
    return sorted(
        step.gradients,
        key=lambda n: at.get(g, last) if isinstance(g := step.gradients[n], Var) else last,
    )


# (equations, roles, values that others read) -> reordered (equations, roles)
Arrange = Callable[
    [Sequence[JaxprEqn], Sequence[str], Collection[Atom]], tuple[list[JaxprEqn], list[str]]
]


class HalfWriter(Protocol):
    """Writer that changes the equations of a trainer half; the default copies them."""

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation."""

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return a wanted value, once the `maker`-th equation, which computes it, is written."""


class _Copies:
    """Writer that copies equations unchanged."""

    def __init__(self, b: Builder) -> None:
        self.emit = b.keep

    def result(self, atom: Atom, maker: int) -> Atom:
        return atom


def half_equations(
    step: Cut, results: Sequence[str]
) -> tuple[list[JaxprEqn], list[str], list[Atom]]:
    """Return the equations of forward and backward, their roles, and the values to compute.

    Args:
      step: the step.
      results: outputs to compute, other than gradients, values for the update (`Cut.handed`), and
        parameters that trainers compute.
    """
    source = step.program
    inner, outs_of = source.inner, source.outvars
    wanted = values_at(outs_of, (*results, *step.frozen))
    wanted += [*step.gradients.values(), *step.handed.values()]
    wanted += [a for i in step.early for a in inner.eqns[i].invars]
    positions = sorted({*backward_slice(inner.eqns, wanted)[0], *step.early})
    eqns = values_at(inner.eqns, positions)
    return eqns, values_at(source.roles, positions), wanted


def write_trainer_half(
    b: Builder,
    step: Cut,
    results: Sequence[str],
    on_gradient: Callable[[str, Atom], None],
    writer: Callable[[Sequence[JaxprEqn], Sequence[str], Sequence[tuple[int, Atom]]], HalfWriter]
    | None = None,
    arrange: Arrange | None = None,
) -> dict[str, Atom]:
    """Write forward and backward.

    Args:
      b: builder with their inputs.
      step: the step.
      results: outputs to compute, other than parameters that trainers compute.
      on_gradient: called with a leaf and its gradient, right after the equation of the gradient.
      writer: returns the writer, from equations, roles, and wanted values with their positions.
      arrange: reorders equations and roles, from those and the wanted values.

    Returns:
      Results, values for the update (`Cut.handed`), and parameters that trainers compute, by name.
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
    outs = {**subset(outs_of, (*results, *step.frozen)), **step.handed}
    ends = [(maker(a), a) for a in (*step.gradients.values(), *outs.values())]
    w: HalfWriter = _Copies(b) if writer is None else writer(eqns, roles, ends)
    for k, (eqn, role) in enumerate(zip(eqns, roles, strict=True)):
        b.role = role
        w.emit(eqn)
        for v in eqn.outvars:
            for leaf in ready.get(v, ()):
                on_gradient(leaf, w.result(v, k))
    for leaf in ready.get(None, ()):  # gradients that are inputs or constants
        on_gradient(leaf, w.result(step.gradients[leaf], len(eqns)))
    return {n: w.result(a, maker(a)) for n, a in outs.items()}
