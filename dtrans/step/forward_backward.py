"""Trainer half of a step: a writer of its equations, and checks that the half can run alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice, producer_positions
from dtrans.ir.selection import values_at
from dtrans.step.halves import DividedStep, asks_for


def refuse_nested(step: DividedStep, trainers: int, noun: str = "trainer") -> None:
    """Raise GradientError if several trainers compute gradients from an inner derivative.

    Each trainer would compute the inner derivative from its part of the batch.

    Args:
      step: the training step, divided at its gradients.
      trainers: number of trainers.
      noun: name of a trainer in errors.
    """
    if step.nested and trainers > 1:
        raise GradientError(
            f"the gradients of {step.program.name} are computed from another derivative "
            f"({step.nested}), as in sharpness-aware minimisation. Each of the {trainers} {noun}s "
            "would compute that derivative from its own part of the batch. To allow this, compute "
            "the final gradient with dtrans.value_and_grad"
        )


def refuse_across(
    step: DividedStep,
    why: str,
    *,
    may_send: bool = False,
    may_report: bool = False,
    remedy: str = "",
) -> None:
    """Raise the error of a `Need` if one half of the step needs a value of the other half.

    Args:
      step: the training step, divided at its gradients.
      why: the strategy's reason why the update cannot read values of forward, as a clause.
      may_send: True if trainers can send the step's arguments and optimizer state to the update.
      may_report: True if the update can compute results from gradients and optimizer state.
      remedy: sentence for errors; it names a mode in which the update can read values of forward.
    """
    if step.across is not None and not (may_report and step.across.of_state):
        raise step.across.refused(why)
    if may_send:
        return
    need = step.argument_need
    if need is None and step.state_read:
        name, output = next(iter(step.state_read.items()))
        need = asks_for(output, name)
    if need is not None:
        raise need.error(f"{need.refused(why)}{remedy and f'. {remedy}'}")


def ready_order(step: DividedStep) -> list[str]:
    """Return the leaves in the order of the equations that compute their gradients.

    Leaves whose gradient is an input or a constant are last.
    """
    positions = producer_positions(step.program.eqns)
    last = len(step.program.eqns)
    return sorted(step.gradients, key=lambda n: _position(step.gradients[n], positions, last))


def _position(atom: Atom, producers: Mapping[Var, int], default: int) -> int:
    """Return the position of the equation that computes a value; `default` if there is none."""
    return producers.get(atom, default) if isinstance(atom, Var) else default


# Function (equations, roles, values that are read outside) -> (equations, roles) in a new order.
Arrange = Callable[
    [Sequence[JaxprEqn], Sequence[str], Collection[Atom]], tuple[list[JaxprEqn], list[str]]
]


class HalfWriter(Protocol):
    """Writer of a trainer half, which may change the equations."""

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation."""

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return the value that replaces `atom`, an output of equation number `maker`."""


class _Copies:
    """Writer that copies equations unchanged."""

    def __init__(self, b: Builder) -> None:
        self.emit = b.keep

    def result(self, atom: Atom, maker: int) -> Atom:
        return atom


def half_equations(
    step: DividedStep, results: Sequence[str]
) -> tuple[list[JaxprEqn], list[str], list[Atom]]:
    """Return the equations of forward and backward, their roles, and the values that they compute.

    These values always include gradients, values for the update (`DividedStep.handed`), and
    parameters that the trainer half computes (`DividedStep.frozen`).

    Args:
      step: the training step, divided at its gradients.
      results: further outputs of the step to compute.
    """
    source = step.program
    wanted = values_at(source.outvars, (*results, *step.frozen))
    wanted += [*step.gradients.values(), *step.handed.values()]
    for i in step.early:
        wanted += source.eqns[i].invars
    positions, _ = backward_slice(source.eqns, wanted)
    positions = sorted({*positions, *step.early})
    eqns = values_at(source.eqns, positions)
    return eqns, values_at(source.roles, positions), wanted


def write_trainer_half(
    b: Builder,
    step: DividedStep,
    results: Sequence[str],
    on_gradient: Callable[[str, Atom], None],
    writer: Callable[[Sequence[JaxprEqn], Sequence[str], Sequence[tuple[int, Atom]]], HalfWriter]
    | None = None,
    arrange: Arrange | None = None,
) -> dict[str, Atom]:
    """Write the equations of forward and backward.

    Args:
      b: builder that has the inputs of the trainer half.
      step: the training step, divided at its gradients.
      results: outputs to compute, as for `half_equations`.
      on_gradient: function of a leaf and its gradient, called right after the gradient's equation.
      writer: function that returns the writer of the equations. Its arguments are the equations,
        their roles, and (position of its equation, value) for each value to compute. By default,
        equations are copied.
      arrange: function that reorders the equations and their roles (`Arrange`).

    Returns:
      Name -> value, for the results, for the values that the update reads (`DividedStep.handed`),
      and for the parameters that the trainer half computes (`DividedStep.frozen`).
    """
    eqns, roles, wanted = half_equations(step, results)
    computed = producer_positions(eqns)
    leaves_of: dict[Var, list[str]] = {}
    not_computed: list[str] = []  # leaves whose gradient is an input or a constant
    for leaf, atom in step.gradients.items():
        if isinstance(atom, Var) and atom in computed:
            leaves_of.setdefault(atom, []).append(leaf)
        else:
            not_computed.append(leaf)
    if arrange is not None:
        eqns, roles = arrange(eqns, roles, wanted)
    producers = producer_positions(eqns)
    outs = {n: step.program.outvars[n] for n in (*results, *step.frozen)} | dict(step.handed)
    if writer is None:
        half_writer: HalfWriter = _Copies(b)
    else:
        ends = []
        for atom in (*step.gradients.values(), *outs.values()):
            ends.append((_position(atom, producers, len(eqns)), atom))
        half_writer = writer(eqns, roles, ends)
    for k, (eqn, role) in enumerate(zip(eqns, roles, strict=True)):
        b.role = role
        half_writer.emit(eqn)
        for v in eqn.outvars:
            for leaf in leaves_of.get(v, ()):
                on_gradient(leaf, half_writer.result(v, k))
    for leaf in not_computed:
        on_gradient(leaf, half_writer.result(step.gradients[leaf], len(eqns)))
    found = {}
    for name, atom in outs.items():
        found[name] = half_writer.result(atom, _position(atom, producers, len(eqns)))
    return found
