"""Division of a training step into two halves at its gradients.

    trainer half    parameters, batch            ->  loss, aux, gradients
    optimize half   gradients, parameters, state ->  new parameters, new state

Trainers run the first half on their part of the batch, and reduce or send the gradients. The second
half, also called the update, may run on servers, or on slices of parameters. All strategies use
this division.

`dtrans.step.gradients` finds the gradients. The update should depend on the first half through
gradients only. If the update reads another derivative, the division raises an error, because
strategies would not sum this derivative over the batch. If the update reads another value, such as
the loss, the division describes the value by a `Need`. Each strategy then provides the value or
raises an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, NamedJaxpr, Var, line_of, origin_of
from dtrans.errors import BatchError, GradientError, OptimizerError
from dtrans.ir.builder import extract_part
from dtrans.ir.dataflow import (
    backward_slice,
    bits_of,
    needed_equations,
    propagate,
    variables,
)
from dtrans.ir.display import short_type
from dtrans.ir.fingerprint import output_digests, value_digests
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import invert, values_at
from dtrans.step.gradients import (
    OTHER_GRADIENTS,
    Gradients,
    InlinedStep,
    counts_rows,
    describe,
    gradients_of,
    inline_step,
    nested,
)
from dtrans.step.marks import mark_p
from dtrans.step.observers import EARLY, Observer, observers_of


GRAD = "@GRAD"
ONE_GRADIENT = (
    "take the gradient of the sum of all losses with one dtrans.value_and_grad, or take each with "
    f"dtrans.value_and_grad and add them up before anything else reads them. {OTHER_GRADIENTS}"
)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Name of an input of the update that is the gradient of the parameter `leaf`.

    Other inputs have strings as names. `str(gradient)` is "params/w@GRAD". It is for display only,
    because another leaf may have this name.
    """

    leaf: str

    def __str__(self) -> str:
        return self.leaf + GRAD


Name = str | Gradient


@dataclasses.dataclass(frozen=True, eq=False)
class DividedStep:
    """Training step that is divided at its gradients into a trainer half and an update.

    The trainer half (forward and backward pass) computes gradients from parameters and batch. The
    update, also called the optimize half, computes new parameters from gradients. `divide_step`
    returns this object; all strategies write their programs from it.

    Attributes:
      program: the full step, with calls inlined and the exact role of each equation (forward,
        backward or optimize).
      params: names of the leaves of the first argument, in leaf order.
      opt_state: names of the leaves of the second argument.
      batch: names of all other inputs.
      gradients: maps each parameter to its gradient, if the update reads the gradient.
      reported: maps parameters to gradients that only a result or a callback reads: the gradient of
        a frozen leaf in a norm of all gradients, say.
      boundary: for each parameter with a gradient, the variable at which the step is divided: the
        output of the gradient's mark, or the gradient itself if it has no mark.
      optimized: parameters that the update computes.
      frozen: parameters that the forward pass computes (batch statistics), or that never change.
      results: names of all outputs other than state, e.g. `loss`.
      from_gradients: results that depend on gradients, e.g. a gradient norm.
      observers: equations with effects, such as `jax.debug.print`.
      nested: text of an equation, if the step perturbs its parameters by their gradient and then
        takes a second gradient (sharpness-aware minimization). The equation lies between the two
        derivatives. Each trainer would compute a different first derivative. Empty for other
        steps, and if gradients are marked.
      inseparable_need: `Need` that forces one process to run both halves: the update reads values
        of the forward pass, or a result reads values of the update. None if two processes can run
        the halves.
      argument_need: `Need` of the update for an argument of the step, such as a learning rate,
        which trainers can send to servers. None if the update reads no argument.
      state_read: optimizer state that forward or backward reads, such as a random key. Maps the
        name of the array to the name of an output that depends on the array.
      optimize: the update. Inputs: gradients, parameters, state, batch arrays, `handed`, `numbers`.
        Outputs: optimized parameters, then state.
      handed: name -> value of the forward pass that is an input of the update. Strategies add such
        inputs if they run the update in another process, or on slices of parameters
        (`dtrans.step.handed_values`).
      numbers: name -> number that depends on the batch size and is an input of the update
        (`dtrans.step.batch_numbers`).
      undivided: the reason why the step is not divided, if `leave_undivided` returned it. Empty for
        other steps.
    """

    program: Program
    params: tuple[str, ...]
    opt_state: tuple[str, ...]
    batch: tuple[str, ...]
    gradients: Mapping[str, Atom]
    reported: Mapping[str, Atom]
    boundary: Mapping[str, Var]
    optimized: tuple[str, ...]
    frozen: tuple[str, ...]
    results: tuple[str, ...]
    from_gradients: tuple[str, ...]
    observers: tuple[Observer, ...]
    nested: str
    inseparable_need: Need | None
    argument_need: Need | None
    state_read: Mapping[str, str]
    optimize: UpdateProgram
    handed: Mapping[str, Atom] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    undivided: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Inputs of the update that are no gradients, parameters or optimizer state, by name.

        They are batch arrays, values of the forward pass (`handed`), and numbers that depend on the
        batch size (`numbers`). Trainers send them to servers.
        """
        known = {*self.batch, *self.handed, *self.numbers}
        return tuple(n for n in self.optimize.in_names if isinstance(n, str) and n in known)

    def reason_not_optimized(self, name: str) -> str:
        """Return the reason why the update does not compute a parameter, for messages."""
        if self.program.outvars[name] is self.program.invars[name]:
            return "it is not updated"
        return "forward updates it, not the optimizer"

    @property
    def early(self) -> tuple[int, ...]:
        """Indices of callbacks (`jax.debug.print`) that can run before gradients are reduced.

        They read only parameters, or values of the forward and backward pass.
        """
        return tuple(x.position for x in self.observers if x.reads in EARLY)

    @property
    def late(self) -> tuple[int, ...]:
        """Indices of callbacks that can run only after gradients were reduced, or after the update.

        Callbacks in the body of an update's equation, such as a loop, are not included.
        """
        found = []
        for x in self.observers:
            if x.calls and x.reads not in EARLY and not x.in_update:
                found.append(x.position)
        return tuple(found)

    @property
    def observed(self) -> UpdateProgram:
        """Jaxpr that computes the operands of all callbacks from gradients and the step's inputs.

        Its outputs have the names "0", "1", .... `first_difference` compares two of these jaxprs,
        to find callbacks that depend on the batch size.
        """
        read: list[Atom] = []
        for x in self.observers:
            if x.calls:
                read += self.program.eqns[x.position].invars
        return _half_from_gradients(self, list(map(str, range(len(read)))), read)

    def with_observers(self, reads: str, as_: str) -> DividedStep:
        """Return the step with some callbacks moved to another kind (`Observer.reads`).

        The kind decides which program calls a callback. For example, each micro-step of
        `dtrans.nccl2` would call a callback that reads only parameters. So `dtrans.nccl2` changes
        the kind "state" to "update", which runs once.

        Args:
          reads: the kind of the callbacks to change, such as "state".
          as_: the new kind.
        """
        observers = list(self.observers)
        for i, x in enumerate(observers):
            if x.reads == reads:
                observers[i] = dataclasses.replace(x, reads=as_)
        return dataclasses.replace(self, observers=tuple(observers))

    def differing_outputs(self, other: DividedStep) -> list[str]:
        """Return the update's outputs that read the batch size directly, not through gradients.

        An example is an update that divides by the number of rows. With a split batch, a trainer
        would use a wrong number of rows.

        Args:
          other: the same step, traced with another batch size.
        """
        mine = _results_half(self, self.from_gradients)
        theirs = _results_half(other, self.from_gradients)
        return [*self.optimize.differing_outputs(other.optimize), *mine.differing_outputs(theirs)]

    def first_difference(self, other: DividedStep) -> tuple[str, str] | None:
        """Describe the first output that reads the batch size directly, not through gradients.

        `dtrans.nccl2` uses the description in an error. Operands of callbacks count as outputs.

        Args:
          other: the same step, traced with another batch size.

        Returns:
          A description of the output and its source line; None if there is no such output.
        """
        for name in self.optimize.differing_outputs(other.optimize):
            return name, self.optimize.differing_line(other.optimize, name)
        mine = _results_half(self, self.from_gradients)
        theirs = _results_half(other, self.from_gradients)
        for name in mine.differing_outputs(theirs):
            return name, mine.differing_line(theirs, name)
        for name in self.observed.differing_outputs(other.observed):
            line = self.observed.differing_line(other.observed, name)
            return "the operand of a callback", line
        return None

    def with_reported(self) -> DividedStep:
        """Return the step; its `gradients` also contain those that only results or callbacks read.

        Trainers reduce all values in `gradients`. So results that read these gradients, such as a
        gradient norm, are then those of the full batch.
        """
        return dataclasses.replace(self, gradients={**self.gradients, **self.reported})


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateProgram(NamedJaxpr):
    """Update of a step: a closed jaxpr with names of its inputs and outputs."""

    jaxpr: ClosedJaxpr
    in_names: tuple[Name, ...]
    out_names: tuple[str, ...]

    @property
    def graded(self) -> frozenset[str]:
        """Names of the parameters with a gradient among the inputs of this update."""
        return frozenset(n.leaf for n in self.in_names if isinstance(n, Gradient))

    def differing_outputs(self, other: UpdateProgram) -> list[str]:
        """Return the names of the outputs that two updates compute by different equations.

        Args:
          other: the update of the same step, traced with another batch size.
        """
        mine, theirs = output_digests(self), output_digests(other)
        return [name for name, digest in mine.items() if digest != theirs.get(name)]

    def differing_line(self, other: UpdateProgram, name: str) -> str:
        """Return the source line of the first equation that only this update has, for messages.

        Args:
          other: the update of the same step, traced with another batch size.
          name: the output of this update. Only equations that compute it are searched.
        """
        mine = value_digests(self.jaxpr, self.in_names)
        known = {*value_digests(other.jaxpr, other.in_names).values()}
        for eqn in needed_equations(self.eqns, [self.outvars[name]]):
            line = line_of(eqn)
            if line and any(mine[v] not in known for v in eqn.outvars):
                return line
        return "an unknown line"


def _rename_outputs(eqn: JaxprEqn, inputs: Collection[Var]) -> JaxprEqn:
    """Replace outputs of an equation that are also inputs of the update by new variables.

    A loop may compute both a gradient and another value that the update reads. The update then
    contains the loop too, although the gradient is an input of the update. One variable cannot have
    both roles.
    """
    if set(inputs).isdisjoint(eqn.outvars):
        return eqn
    return eqn.replace(outvars=[Var(v.aval) if v in inputs else v for v in eqn.outvars])


def _results_half(step: DividedStep, names: Sequence[str]) -> UpdateProgram:
    """Extract the jaxpr that computes some results from gradients and the step's inputs.

    Args:
      step: the divided step.
      names: the names of the results.
    """
    return _half_from_gradients(step, names, values_at(step.program.outvars, names))


def _half_from_gradients(
    step: DividedStep, names: Sequence[str], values: Sequence[Atom]
) -> UpdateProgram:
    """Extract the jaxpr that computes some values from gradients and the step's inputs.

    Args:
      step: the divided step.
      names: names of the outputs, one for each value.
      values: the values to compute.
    """
    program, gradients = step.program, step.boundary.values()
    eqns = []
    for eqn in needed_equations(program.eqns, values, gradients):
        eqns.append(_rename_outputs(eqn, gradients))
    invars = [*gradients, *program.inner.invars]
    jaxpr = extract_part(program.jaxpr, invars, eqns, values)
    return UpdateProgram(jaxpr, (*map(Gradient, step.boundary), *program.in_names), tuple(names))


def check_same_update(planned: DividedStep, again: DividedStep) -> None:
    """Raise BatchError if a new batch size would change the update.

    Servers compiled the planned update, so they cannot run another one.

    Args:
      planned: the step, as it was planned.
      again: the same step, traced for a new batch size.
    """
    for n in planned.optimize.differing_outputs(again.optimize):
        raise other_size(planned, n, planned.program.inputs, again.program.inputs)


def other_size(
    planned: DividedStep, name: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> BatchError:
    """Return the error for a call with a new batch size, if an output depends on this size.

    Args:
      planned: the planned step.
      name: the output.
      was, now: types of the batch arrays in the plan and in the call.
    """
    planned_for = "another batch"
    for array in planned.batch:
        if array in was and was[array].shape != now[array].shape:
            planned_for = f"{array} of shape {was[array].shape}, not {now[array].shape}"
            break
    return BatchError(
        f"the new {name} depends on the batch size (a division by the number of rows, say), and "
        f"was planned for {planned_for}; trace {planned.program.name} with arrays of the new shape "
        "and plan again, or pass the number of rows as an argument of the step"
    )


@dataclasses.dataclass(frozen=True)
class Need:
    """Value that one half of a step reads, but that only the other half can compute.

    The halves are the forward and backward pass, and the update. Some strategies can send the value
    from one half to the other. Other strategies raise the error that this object describes.

    Attributes:
      what: clause that states the need, e.g. "loss is computed from opt_state/0/count".
      advice: clause that tells the user what to write instead.
      error: class of the error.
      why: clause with the reason for the error; empty if the reason depends on the strategy.
      of_state: True if a result reads both gradients and optimizer state.
    """

    what: str
    advice: str
    error: type[GradientError] = GradientError
    why: str = ""
    of_state: bool = False

    def refused(self, why: str) -> GradientError:
        """Return the error for the user.

        Args:
          why: the strategy's reason, as a clause; used if the attribute `why` is empty.
        """
        return self.error(f"{self.what}, {self.why or why}; {self.advice}")


def asks_for(output: str, state: str) -> Need:
    """Return the error description for an output of the forward pass that reads optimizer state.

    Args:
      output: name of the output.
      state: name of the state array.
    """
    return Need(
        f"{output} is computed from {state}",
        f"keep {state} out of the loss and of the results. If it is a moving average of "
        "parameters, let the loss read the average before its update, and compute the new average "
        "from the new parameters; in a step of (params, opt_state), keep the average in params",
        why="which is optimizer state, and is not available where the loss is computed",
        of_state=True,
    )


def reports_update(result: str, state: str) -> Need:
    """Return the error description for a result that reads gradients and optimizer state.

    An example is the norm of the new parameters.

    Args:
      result: name of the result.
      state: name of the state array.
    """
    return Need(
        f"{result} is computed from gradients and from {state}",
        f"leave {result} out of the results. Compute values of the new state after the step, from "
        "job.params(state) or job.gather(state). Or use dtrans.nccl2 or dtrans.sharding with "
        "batch='exact', which return such results",
        why="so only the update can compute it, which runs on the servers of dtrans.pserver, and "
        "on the stage of each leaf in dtrans.pipeline",
        of_state=True,
    )


def divide_step(program: Program) -> DividedStep:
    """Divide a traced training step at its gradients into a trainer half and an update.

    The program stores the result, so that a second call is cheap.

    Args:
      program: trace of a function of (params, opt_state, *batch) that returns the new params and
        opt_state, and the loss.

    Raises:
      GradientError: the program is not a training step, or its gradients are ambiguous.
    """
    return program.once(_divide)


def leave_undivided(program: Program, reason: str) -> DividedStep:
    """Return a step as if it had no update: forward equations compute all outputs and all state.

    Some strategies can run steps without known gradients. They call this function if `divide_step`
    fails.

    Args:
      program: trace of a function of (params, opt_state, *batch).
      reason: the reason why the step cannot be divided at its gradients.

    Raises:
      GradientError: the program is not a training step.
    """
    s = inline_step(program)
    state = (*s.params, *s.opt_state)
    roles = (FORWARD,) * len(s.eqns)
    forward = dataclasses.replace(s.source, jaxpr=s.jaxpr, roles=roles, guessed=False)
    return DividedStep(
        program=s.source.rewritten(lambda other: other, result=forward),
        params=state,
        opt_state=(),
        batch=s.batch,
        gradients={},
        reported={},
        boundary={},
        optimized=(),
        frozen=state,
        results=s.results,
        from_gradients=(),
        observers=observers_of(s, set(), [], {}),
        nested="",
        inseparable_need=None,
        argument_need=None,
        state_read={},
        optimize=UpdateProgram(extract_part(s.jaxpr, [], [], []), (), ()),
        undivided=reason,
    )


def divide_again(step: DividedStep, program: Program) -> DividedStep:
    """Divide another trace of a step in the same way as the first trace.

    Strategies trace a step again for other batch sizes, or rewrite its program.

    Args:
      step: the divided step.
      program: a trace or rewrite of the same step.

    Raises:
      GradientError: the type of the new state depends on the size of the batch.
    """
    _check_state_types(step.program, program)
    if step.undivided:
        return leave_undivided(program, step.undivided)
    return divide_step(program)


def _check_state_types(program: Program, other: Program) -> None:
    """Raise GradientError if the shape of a state array depends on the batch size.

    `dtrans.trace` recognises new state by its shape. So an array with another shape gets no state
    name in `other`, the trace with another batch size.
    """
    names = set(all_names(program.args[:2])).difference(other.out_names)
    outputs = zip(program.inner.outvars, other.inner.outvars, strict=False)
    for n, (one, two) in zip(program.out_names, outputs, strict=False):
        if n in names and one.aval.shape != two.aval.shape:
            raise GradientError(
                f"{n} in the result of {program.name} is {short_type(one.aval)} for one batch size "
                f"and {short_type(two.aval)} for another; do not store arrays with an entry "
                "for each row of the batch in the state; return them after the loss"
            )


def _divide(program: Program) -> DividedStep:
    return _StepDivider(inline_step(program)).divide()


class _StepDivider:
    """Builder of one `DividedStep`; `divide` returns it.

    Attributes have the same meaning as the attributes of `DividedStep` with the same name.

    Args:
      step: the step, with calls inlined.
    """

    def __init__(self, step: InlinedStep) -> None:
        self.s = step
        self.across: Need | None = None
        self.argument_need: Need | None = None
        self.state_read: dict[str, str] = {}

    def divide(self) -> DividedStep:
        found = gradients_of(self.s)
        gradients = found.of
        boundary = set(gradients.values())
        by_batch, by_gradient = 1, 2
        seeds = {self.s.vars[n]: by_batch for n in self.s.batch}
        enters = propagate(self.s.eqns, seeds, dict.fromkeys(boundary, by_gradient))
        optimized: list[str] = []
        frozen: list[str] = []
        for name in self.s.params:
            before, after = self.s.vars[name], self.s.outs[name]
            bits = bits_of(enters, after)
            # Each trainer splits its own copy of a random key, so the new key is not an update.
            is_key = jnp.issubdtype(before.aval.dtype, jax.dtypes.extended)
            is_new_key = is_key and not bits & by_gradient
            # Servers do not know the batch size, so trainers count rows.
            is_row_count = not bits and counts_rows(self.s, before, after)
            if after is before or bits == by_batch or is_new_key or is_row_count:
                frozen.append(name)
            else:
                optimized.append(name)
        if not optimized or not boundary:
            more = ", ..." if len(self.s.params) > 4 else ""
            raise GradientError(
                f"no gradient was found in {self.s.source.name}: none of its parameters "
                f"({', '.join(self.s.params[:4])}{more}) is updated from the derivative of a loss. "
                "Take gradients with dtrans.value_and_grad, or build the step with "
                f"dtrans.make_train_step. {OTHER_GRADIENTS}"
            )
        computed_frozen = self.s.changed(frozen)
        self.check_frozen(gradients, computed_frozen)
        optimize, used, positions = self.optimize_half(gradients, optimized, computed_frozen)
        self.check_trainer_half(gradients, used, frozen)
        # A loop that computes gradients belongs to the backward pass, even if the update reads
        # another output of this loop.
        new = values_at(self.s.outs, (*optimized, *self.s.opt_state))
        behind = set(self.s.derivatives_behind(new, boundary))
        positions = [i for i in positions if not self.s.derived[i] or i in behind]
        observers = observers_of(self.s, boundary, positions, self.state_read)

        from_gradients = []
        for name in self.s.results:
            if bits_of(enters, self.s.outs[name]) & by_gradient:
                from_gradients.append(name)
        read_outside = values_at(self.s.outs, from_gradients)
        for x in observers:
            if x.calls:
                read_outside += self.s.eqns[x.position].invars
        _, reported_vars = backward_slice(self.s.eqns, read_outside, boundary)
        reported_vars -= {gradients[n] for n in used}
        read_by_update: dict[str, Atom] = {}
        reported: dict[str, Atom] = {}
        for name in self.s.params:
            if name in used:
                read_by_update[name] = self.unmarked(gradients[name])
            elif name in gradients and gradients[name] in reported_vars:
                reported[name] = self.unmarked(gradients[name])
        return DividedStep(
            program=self.with_roles(positions, found),
            params=self.s.params,
            opt_state=self.s.opt_state,
            batch=self.s.batch,
            gradients=read_by_update,
            reported=reported,
            boundary=gradients,
            optimized=tuple(optimized),
            frozen=tuple(frozen),
            results=self.s.results,
            from_gradients=tuple(from_gradients),
            observers=observers,
            nested="" if found.marked else nested(self.s, found.terms),
            inseparable_need=self.across,
            argument_need=self.argument_need,
            state_read=self.state_read,
            optimize=optimize,
        )

    def optimize_half(
        self,
        gradients: Mapping[str, Var],
        optimized: Sequence[str],
        computed_frozen: Sequence[str],
    ) -> tuple[UpdateProgram, set[str], list[int]]:
        """Extract the update of the step, and record the values of the forward pass that it reads.

        If the update reads more than gradients, parameters and state, this method sets `across` or
        `argument_need` (see `DividedStep`).

        Args:
          gradients: the gradient of each parameter.
          optimized: parameters that the update computes.
          computed_frozen: parameters that the forward pass computes, such as batch statistics.

        Returns:
          The update, the parameters with gradients that it reads, and the indices of its equations.
        """
        out_names = (*optimized, *self.s.opt_state)
        outs = values_at(self.s.outs, out_names)
        positions, leaves = backward_slice(self.s.eqns, outs, gradients.values())
        hidden = [n for n in (*self.s.batch, *computed_frozen) if self.s.vars[n] in leaves]
        loss = self.loss_need(positions)
        # A line search differentiates the loss again, so its derivatives depend on gradients. If
        # the update contains a derivative that depends on no gradient, a gradient was not found.
        behind = propagate(self.s.eqns, {}, dict.fromkeys(gradients.values(), 1))
        derived = [self.s.eqns[i] for i in self.s.derivatives_behind(outs, gradients.values())]
        around = [e for e in derived if not bits_of(behind, *e.invars)]
        if around:
            reader, what = _reader_of_derivative(self.s, outs, out_names, gradients, around)
            remedy = ONE_GRADIENT
            if reader in self.s.opt_state:  # no new parameter reads this derivative
                remedy = (
                    f"for dtrans.pserver, keep {reader} in the first argument of "
                    f"{self.s.source.name}, and mark the value that updates it as its gradient: "
                    "_, value = dtrans.value_and_grad(lambda leaf: jnp.vdot("
                    "jax.lax.stop_gradient(value), leaf))(leaf). Or use dtrans.nccl2 or "
                    "dtrans.sharding, which need no gradients"
                )
            raise GradientError(
                f"{reader} is updated with {what}, which is not summed over the batch; {remedy}"
            )
        if hidden:
            reader = _first_reader(self.s, outs, out_names, gradients, [self.s.vars[hidden[0]]])
            need = Need(
                f"{reader} is updated with {hidden[0]}",
                "an update may read gradients, parameters and optimizer state. If the update "
                f"divides gradients by {hidden[0]}, divide the loss by {hidden[0]} inside the loss "
                f"function. If {hidden[0]} is a learning rate, compute it from a count in the "
                "optimizer state (optax schedules, optax.inject_hyperparams)",
            )
            if loss or derived or not all(n in self.s.batch for n in hidden):
                self.across = loss or need
            else:
                self.argument_need = need
        owners = invert(gradients)
        used = {owners[v] for v in leaves if v in owners}
        updated = set(optimized)
        graded: list[str] = []
        params: list[str] = []
        for name in self.s.params:
            if name in used:
                graded.append(name)
            if name in updated or self.s.vars[name] in leaves:
                params.append(name)
        batch = [n for n in hidden if n in self.s.batch]
        params += [n for n in hidden if n not in batch and n not in params]
        invars = values_at(gradients, graded)
        invars += values_at(self.s.vars, (*params, *self.s.opt_state, *batch))
        eqns = [_rename_outputs(self.s.eqns[i], gradients.values()) for i in positions]
        jaxpr = eliminate_dead(extract_part(self.s.jaxpr, invars, eqns, outs))
        in_names: tuple[Name, ...] = (
            *map(Gradient, graded),
            *params,
            *self.s.opt_state,
            *batch,
        )
        return UpdateProgram(jaxpr, in_names, tuple(out_names)), used, positions

    def loss_need(self, positions: Sequence[int]) -> Need | None:
        """Return the error description for an optax optimizer that reads the loss (a line search).

        Args:
          positions: indices of the update's equations.

        Returns:
          The description; None if no optimizer reads a result of the step.
        """
        computed: set[Var] = set()
        for i in positions:
            computed.update(self.s.eqns[i].outvars)
        result_of: dict[Var, str] = {}
        for name in self.s.results:
            atom = self.s.outs[name]
            if isinstance(atom, Var) and atom in computed:
                result_of[atom] = name
        for i in positions:
            if self.s.derived[i]:
                continue
            read = [v for v in variables(self.s.eqns[i].invars) if v in result_of]
            if not read:
                continue
            optimizer = origin_of(self.s.eqns[i])
            if optimizer.startswith("optax."):
                return Need(
                    f"{optimizer} uses {result_of[read[0]]}",
                    "use an optimizer whose update reads only (grads, state, params), such as "
                    "optax.lbfgs(linesearch=None), or a learning-rate schedule; or use "
                    "dtrans.nccl2 with batch='exact', where an update may read the loss",
                    OptimizerError,
                )
        return None

    def check_frozen(self, gradients: Mapping[str, Var], computed_frozen: Sequence[str]) -> None:
        """Raise GradientError if the forward pass updates a parameter with a derivative.

        Each trainer would compute a different new value. Updates of batch statistics from values of
        the batch are allowed.
        """
        outs = values_at(self.s.outs, computed_frozen)
        around = [self.s.eqns[i] for i in self.s.derivatives_behind(outs, gradients.values())]
        if around:
            reader, what = _reader_of_derivative(self.s, outs, computed_frozen, gradients, around)
            raise GradientError(
                f"{reader} is updated with {what}, so each trainer would compute a different new "
                "value from its part of the batch; take the gradient of all parameters with one "
                "dtrans.value_and_grad, or build the step with dtrans.make_train_step. "
                f"{OTHER_GRADIENTS}"
            )

    def check_trainer_half(
        self, gradients: Mapping[str, Var], used: set[str], frozen: Sequence[str]
    ) -> None:
        """Find optimizer state, and results of the update, that the forward or backward pass reads.

        This method sets `state_read`. It sets `across` if one process must run both the forward
        pass and the update (see `DividedStep`).

        Args:
          gradients: the gradient of each parameter.
          used: parameters with a gradient that the update reads.
          frozen: parameters that the update does not compute.
        """
        boundary = set(gradients.values())
        unmarked = {n: self.unmarked(gradients[n]) for n in sorted(used)}
        self.across = _updated_param_need(self.s, unmarked, boundary) or self.across

        state = {self.s.vars[n]: n for n in self.s.opt_state}
        enters = propagate(self.s.eqns, dict.fromkeys(state, 1), {})
        # Gradients come first: a result of the loss function often reads the same state, but the
        # step cannot run without its gradients.
        for name, gradient in unmarked.items():
            if bits_of(enters, gradient):
                _, leaves = backward_slice(self.s.eqns, [gradient])
                self.record_state_read(f"the gradient of {name}", leaves, state)
        for name in (*self.s.results, *frozen):
            atom = self.s.outs[name]
            if not bits_of(enters, atom):
                continue
            _, leaves = backward_slice(self.s.eqns, [atom], boundary)
            read = self.record_state_read(name, leaves, state)
            if read and leaves & boundary and not self.across:
                need = reports_update if name in self.s.results else asks_for
                self.across = need(name, read[0])

    def record_state_read(
        self, output: str, leaves: Collection[Var], state: Mapping[Var, str]
    ) -> list[str]:
        """Record the optimizer state on which an output other than the new state depends.

        Args:
          output: name of the output.
          leaves: inputs on which the output depends.
          state: name of each state array, by its variable.

        Returns:
          The names of the state arrays among `leaves`.
        """
        read = sorted(state[v] for v in leaves if v in state)
        for name in read:
            self.state_read.setdefault(name, output)
        return read

    def unmarked(self, gradient: Var) -> Atom:
        """Return a gradient before its mark, the identity equation of `dtrans.value_and_grad`.

        A gradient without a mark is returned unchanged.
        """
        eqn = self.s.eqns[self.s.producers[gradient]]
        return eqn.invars[0] if eqn.primitive is mark_p else gradient

    def with_roles(self, optimize: Sequence[int], gradients: Gradients) -> Program:
        """Return the step with the exact role of each equation: forward, backward or optimize.

        Equations of the update have the role `optimize`; derivatives and their sums have the role
        `backward`.
        """
        in_optimize, boundary = set(optimize), set(gradients.of.values())
        roles = []
        for i, eqn in enumerate(self.s.eqns):
            added_later = eqn.primitive is mark_p and boundary.isdisjoint(eqn.outvars)
            if i in in_optimize or (eqn.primitive is mark_p and not added_later):
                roles.append(OPTIMIZE)
            elif self.s.derived[i] or added_later or i in gradients.sums:
                roles.append(BACKWARD)
            else:
                roles.append(FORWARD)
        program = dataclasses.replace(
            self.s.source, jaxpr=self.s.jaxpr, roles=tuple(roles), guessed=False
        )
        # For other shapes the program is traced again, and callers divide the new trace.
        return self.s.source.rewritten(lambda other: other, result=program)


def _updated_param_need(
    s: InlinedStep, gradients: Mapping[str, Atom], boundary: Iterable[Var]
) -> Need | None:
    """Find a gradient that is computed from an already updated parameter.

    For example, a step updates a first model. It then differentiates the loss of a second model
    that reads the first one. One update must then run before the second gradient.

    Args:
      s: the training step, with its calls inlined.
      gradients: the gradient of each parameter, before its mark.
      boundary: the variables at which the step is divided.

    Returns:
      The `Need` of this gradient; None if there is none.
    """
    updated = propagate(s.eqns, {}, dict.fromkeys(boundary, 1))
    updated_params: dict[Var, str] = {}
    for name in s.params:
        atom = s.outs[name]
        if isinstance(atom, Var) and updated.get(atom):
            updated_params[atom] = name
    enters = propagate(s.eqns, {}, {v: i + 1 for i, v in enumerate(updated_params)})
    for name, gradient in gradients.items():
        # A literal gradient depends on no input, so `bits_of` is 0. A literal is not hashable.
        if not bits_of(enters, gradient) or gradient in updated_params:
            continue
        _, read = backward_slice(s.eqns, [gradient], updated_params)
        first = next(n for v, n in updated_params.items() if v in read)
        return Need(
            f"the gradient of {name} is taken at the new {first}",
            "take both gradients before the updates; or use dtrans.nccl2 or dtrans.sharding "
            "with batch='exact', where one program computes both",
            why="so the step would wait for an update before it continues",
        )
    return None


def _reader_of_derivative(
    s: InlinedStep,
    outs: Sequence[Atom],
    names: Sequence[str],
    gradients: Mapping[str, Var],
    around: Sequence[JaxprEqn],
) -> tuple[str, str]:
    """Find the first output that depends on a derivative which is not a parameter's gradient.

    Args:
      s: the training step, with its calls inlined.
      outs, names: the outputs.
      gradients: the gradients; paths through them do not count.
      around: equations that compute the derivatives to search for.

    Returns:
      The name of the output, and a text that describes the first of these derivatives.
    """
    derivatives: set[Var] = set()
    for eqn in around:
        derivatives.update(eqn.outvars)
    name = _first_reader(s, outs, names, gradients, derivatives)
    first = describe(s, around[0].outvars[0])
    return name, f"a derivative that is not one of its gradients ({first})"


def _first_reader(
    s: InlinedStep,
    outs: Sequence[Atom],
    names: Sequence[str],
    gradients: Mapping[str, Var],
    values: Iterable[Var],
) -> str:
    """Return the name of the first output that depends on one of `values`, for error messages.

    Paths through gradients do not count.
    """
    fixed = dict.fromkeys(gradients.values(), 0)
    reached = propagate(s.eqns, dict.fromkeys(values, 1), fixed)
    for name, atom in zip(names, outs, strict=True):
        if bits_of(reached, atom):
            return name
    raise AssertionError("no output depends on the values")
