"""Writer of a step's forward and backward pass into a trainer's program, and checks of the step."""

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
    """Raise GradientError if several trainers compute a gradient from another gradient.

    Sharpness-aware minimization, for example, perturbs the parameters by a first gradient and takes
    a second gradient there. With several trainers, each trainer would compute the first gradient
    from its own part of the batch.

    Args:
      step: the training step, divided into its gradient computation and its update.
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


def refuse_inseparable(
    step: DividedStep,
    why: str,
    *,
    may_send: bool = False,
    may_report: bool = False,
    remedy: str = "",
) -> None:
    """Raise GradientError if the update and the forward pass must run in the same process.

    Some strategies run the forward and backward pass in one process, and the update in another. The
    processes exchange gradients. These strategies call this function, which rejects a step that
    would have to exchange other values, too.

    Args:
      step: the training step, divided into its gradient computation and its update.
      why: the strategy's reason why the update cannot read these values, as a clause for the error.
      may_send: True if trainers can send the step's arguments and optimizer state to the update.
      may_report: True if the update can compute results from gradients and optimizer state.
      remedy: sentence for errors; it names a mode in which the update can read these values.
    """
    if step.inseparable_need is not None and not (may_report and step.inseparable_need.of_state):
        raise step.inseparable_need.refused(why)
    if may_send:
        return
    need = step.argument_need
    if need is None and step.state_read:
        name, output = next(iter(step.state_read.items()))
        need = asks_for(output, name)
    if need is not None:
        raise need.error(f"{need.refused(why)}{remedy and f'. {remedy}'}")


def ready_order(step: DividedStep) -> list[str]:
    """Return the parameters in the order in which the backward pass computes their gradients.

    Strategies reduce gradients in this order, so that communication overlaps with the backward
    pass. Parameters are last if their gradient is an input or a constant.
    """
    positions = producer_positions(step.program.eqns)
    last = len(step.program.eqns)
    return sorted(step.gradients, key=lambda n: _position(step.gradients[n], positions, last))


def _position(atom: Atom, producers: Mapping[Var, int], default: int) -> int:
    """Return the index of the equation that computes a value; `default` if no equation does."""
    return producers.get(atom, default) if isinstance(atom, Var) else default


# Function (equations, roles, values that are read outside) -> (equations, roles) in a new order.
Arrange = Callable[
    [Sequence[JaxprEqn], Sequence[str], Collection[Atom]], tuple[list[JaxprEqn], list[str]]
]


class HalfWriter(Protocol):
    """Interface of writers that change forward and backward equations while they are copied.

    `write_trainer_half` calls a writer for each equation. For example, ZeRO's writer adds
    all-gathers of parameters.
    """

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation of the step, or other equations in its place."""

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return the new value that replaces a value of the original step.

        Args:
          atom: the original value.
          maker: index of the equation that computes the value.
        """


class _Copies:
    """Writer that copies equations unchanged."""

    def __init__(self, b: Builder) -> None:
        self.emit = b.keep

    def result(self, atom: Atom, maker: int) -> Atom:
        return atom


def half_equations(
    step: DividedStep, results: Sequence[str]
) -> tuple[list[JaxprEqn], list[str], list[Atom]]:
    """Return the equations of the forward and backward pass that a trainer needs.

    These equations compute gradients, `results`, and further values that the update reads
    (`DividedStep.handed`). They also compute parameters that no gradient updates, such as batch
    statistics (`DividedStep.frozen`).

    Args:
      step: the training step, divided into its gradient computation and its update.
      results: names of further outputs to compute, such as "loss".

    Returns:
      The equations, their roles, and the values that they compute.
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
    """Write the equations of the forward and backward pass into a trainer's program.

    This function calls `on_gradient` as soon as a gradient is computed. Each strategy passes its
    own callback, which writes a reduction over trainers, for example.

    Args:
      b: builder of the trainer's program, which already has the inputs of the forward pass.
      step: the training step, divided into its gradient computation and its update.
      results: names of outputs to compute, as for `half_equations`.
      on_gradient: function (name of a parameter, its gradient), called right after the equation
        that computes the gradient.
      writer: function that returns a `HalfWriter`, which may change the equations. Its arguments
        are the equations, their roles, and (index of its equation, value) for each value to
        compute. By default, equations are copied.
      arrange: function that reorders the equations and their roles (`Arrange`).

    Returns:
      Name -> value, for the results, for further values that the update reads
      (`DividedStep.handed`), and for parameters that the forward pass computes
      (`DividedStep.frozen`).
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
