"""Cut of a training step into two halves at its gradients.

    trainer half    parameters, batch            ->  loss, aux, gradients
    optimize half   gradients, parameters, state ->  new parameters, new state

Gradients are marked or inferred (`dtrans.step.gradients`), then checked: every path from an input
to new parameters and state must pass through a gradient. Only this module decides the boundary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, NamedJaxpr, Var, line_of, origin_of
from dtrans.errors import BatchError, GradientError, OptimizerError
from dtrans.ir.builder import extract_part
from dtrans.ir.dataflow import backward_slice, bits_of, propagate
from dtrans.ir.fingerprint import number, value_digests
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.ir.selection import invert, subset, values_at
from dtrans.step.gradients import (
    Gradients,
    OpenStep,
    counts_rows,
    describe,
    gradients_of,
    nested,
    open_step,
)
from dtrans.step.marks import mark_p
from dtrans.step.observers import EARLY, Observer, observers_of


GRAD = "@GRAD"
ONE_GRADIENT = (
    "take the gradient of the sum of all losses with one dtrans.value_and_grad, or take each with "
    "dtrans.value_and_grad and add them up before anything else reads them"
)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Gradient of a leaf, as an input of an optimize half.

    Its text is for people only: a leaf may have the same name.
    """

    leaf: str

    def __str__(self) -> str:
        return self.leaf + GRAD


Name = str | Gradient


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Training step that is cut at its gradients.

    Attributes:
      program: the full step, with calls inlined and exact roles.
      params: names of the leaves of the first argument, in leaf order.
      opt_state: names of the leaves of the second argument.
      batch: names of all other inputs.
      gradients: parameter name to its gradient, for leaves whose update reads one.
      reported: parameter name to its gradient, for leaves whose gradient only results read (a norm
        over all leaves if some are frozen, say).
      boundary: parameter name to the value for its gradient after the cut: the output of its mark,
        if it has one.
      optimized: parameters that the optimize half computes.
      frozen: parameters that the trainer half computes, or that never change.
      results: names of all outputs other than state, e.g. `loss`.
      from_gradients: results that depend on gradients, e.g. a gradient norm.
      observers: equations with effects (`jax.debug.print`).
      nested: reason why gradients may depend on another derivative, as in a perturbed step.
        Trainers would each use their own. Empty if they do not, or are marked.
      across: need of one half for values of the other: the update for values of forward, or a
        result for values of the update. None if there is none. Trainers that run both halves allow
        it.
      argument_need: need of the update for arguments of the step, such as a learning rate; trainers
        can send those to servers.
      state_read: optimizer state that forward and backward read, such as a random key, with the
        output that needs it. Servers can send state that no row enters.
      optimize: the optimize half. Inputs: gradients, parameters, state, then batch arrays. Outputs:
        optimized parameters, then state.
      handed: values of forward that are the next inputs of the optimize half, by name. Strategies
        that run updates elsewhere, or on slices of parameters, add them
        (`dtrans.step.handed_values`).
      numbers: numbers that depend on the batch size and are the last inputs of the optimize half,
        by name (`dtrans.step.batch_numbers`).
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
    across: Need | None
    argument_need: Need | None
    state_read: Mapping[str, str]
    optimize: OptimizeHalf
    handed: Mapping[str, Atom] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Inputs of the update other than state and gradients: arguments, values of forward,
        numbers."""
        known = {*self.batch, *self.handed, *self.numbers}
        return tuple(n for n in self.optimize.in_names if isinstance(n, str) and n in known)

    def reason_not_optimized(self, name: str) -> str:
        """Return why the update leaves a parameter alone: it never changes, or forward computes
        it."""
        inner, program = self.program.inner, self.program
        before = inner.invars[program.in_names.index(name)]
        after = inner.outvars[program.out_names.index(name)]
        return "it is not updated" if after is before else "forward updates it, not the optimizer"

    @property
    def early(self) -> tuple[int, ...]:
        """Positions of observers in forward and backward."""
        return tuple(x.position for x in self.observers if x.reads in EARLY)

    @property
    def late(self) -> tuple[int, ...]:
        """Positions of callbacks outside of the update that read reduced gradients or results of
        the update."""
        return tuple(
            x.position
            for x in self.observers
            if x.calls and x.reads not in EARLY and not x.in_update
        )

    @property
    def observed(self) -> OptimizeHalf:
        """Values that callbacks read, as a half with gradients and the inputs of the step."""
        eqns, boundary = self.program.eqns, invert(self.boundary)
        read = [a for x in self.observers if x.calls for a in eqns[x.position].invars]
        names: tuple[Name, ...] = (*map(Gradient, boundary.values()), *self.program.in_names)
        half = _from_gradients(self.program, boundary, read)
        return OptimizeHalf(half, names, tuple(map(str, range(len(read)))))

    def with_observers(self, reads: str, as_: str) -> Cut:
        """Return the step with observers that read `reads` treated as those that read `as_`."""
        moved = [
            dataclasses.replace(x, reads=as_) if x.reads == reads else x for x in self.observers
        ]
        return dataclasses.replace(self, observers=tuple(moved))

    def differing_outputs(self, other: Cut) -> list[str]:
        """Return new state and results that another batch size computes differently from
        gradients."""
        mine, theirs = (_results_half(x, self.from_gradients) for x in (self, other))
        return [*self.optimize.differing_outputs(other.optimize), *mine.differing_outputs(theirs)]

    def first_difference(self, other: Cut) -> tuple[str, str] | None:
        """Return the first output that another batch size computes differently, and its line.

        Values that callbacks read count as outputs. None if there is none.
        """
        results = [_results_half(x, self.from_gradients) for x in (self, other)]
        observed = [x.observed for x in (self, other)]
        for mine, theirs in ([self.optimize, other.optimize], results, observed):
            for n in mine.differing_outputs(theirs):
                return "what a callback reads" if mine is observed[0] else n, mine.differing_line(
                    theirs, n
                )
        return None

    def with_reported(self) -> Cut:
        """Return the step with all gradients that are read as `gradients`."""
        return dataclasses.replace(self, gradients={**self.gradients, **self.reported})


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeHalf(NamedJaxpr):
    """Optimize half of a step: a closed jaxpr with names of inputs and outputs."""

    jaxpr: ClosedJaxpr
    in_names: tuple[Name, ...]
    out_names: tuple[str, ...]

    @property
    def graded(self) -> frozenset[str]:
        """Leaves whose gradients are inputs."""
        return frozenset(n.leaf for n in self.in_names if isinstance(n, Gradient))

    def differing_outputs(self, other: OptimizeHalf) -> list[str]:
        """Return the outputs that the same step, traced on another batch size, computes
        differently."""
        mine, theirs = (value_digests(half.jaxpr, half.in_names) for half in (self, other))
        written = lambda digests, a: number(a) if isinstance(a, Literal) else digests[a]
        new = {n: written(theirs, a) for n, a in other.outvars.items()}
        return [n for n, a in self.outvars.items() if written(mine, a) != new.get(n)]

    def differing_line(self, other: OptimizeHalf, name: str) -> str:
        """Return the line of the first equation for an output that differs for another batch
        size."""
        mine, theirs = (value_digests(half.jaxpr, half.in_names) for half in (self, other))
        known = {*theirs.values()}
        eqns = self.eqns
        needed, _ = backward_slice(eqns, [self.outvars[name]])
        for eqn in values_at(eqns, needed):
            line = line_of(eqn)
            if line and any(mine[v] not in known for v in eqn.outvars):
                return line
        return "an unknown line"


def _beside(eqn: JaxprEqn, inputs: Collection[Var]) -> JaxprEqn:
    """Return an equation whose outputs that are inputs elsewhere get new variables."""
    if set(inputs).isdisjoint(eqn.outvars):
        return eqn
    return eqn.replace(outvars=[Var(v.aval) if v in inputs else v for v in eqn.outvars])


def _results_half(step: Cut, names: Sequence[str]) -> OptimizeHalf:
    """Return the half that computes results from gradients."""
    program = step.program
    half = _from_gradients(program, step.boundary.values(), values_at(program.outvars, names))
    return OptimizeHalf(half, (*map(Gradient, step.boundary), *program.in_names), tuple(names))


def _from_gradients(
    program: Program, gradients: Collection[Var], outs: Sequence[Atom]
) -> ClosedJaxpr:
    """Return the jaxpr of values, from gradients and the inputs of a step."""
    eqns = [
        _beside(program.eqns[i], gradients)
        for i in backward_slice(program.eqns, outs, gradients)[0]
    ]
    return extract_part(program.jaxpr, [*gradients, *program.inner.invars], eqns, outs)


def check_same_update(planned: Cut, again: Cut) -> None:
    """Raise BatchError for an update planned for another batch size on which it depends."""
    for n in planned.optimize.differing_outputs(again.optimize):
        raise other_size(planned, n, planned.program.inputs, again.program.inputs)


def other_size(
    planned: Cut, name: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> BatchError:
    """Return the error for an output that depends on a batch size other than the planned one.

    Args:
      planned: the planned step.
      name: the output.
      was, now: types of the batch arrays.
    """
    sized = next((b for b in planned.batch if b in was and was[b].shape != now[b].shape), None)
    if sized is None:
        why = "was planned for another batch"
    else:
        why = (
            f"was planned for {sized} of shape {was[sized].shape}, which is {now[sized].shape} now"
        )
    return BatchError(
        f"{name} is made with a number of the size of the batch, and {why}: trace "
        f"{planned.program.name} with arrays of the new shape and plan again, or pass the number "
        "as an argument of the step"
    )


@dataclasses.dataclass(frozen=True)
class Need:
    """Value that one half of a step needs and the other half computes.

    Attributes:
      what: the need, as the first half of a sentence.
      advice: code to write instead.
      error: class of the error.
      why: reason for the error, if it is the same for all strategies.
    """

    what: str
    advice: str
    error: type[GradientError] = GradientError
    why: str = ""

    def refused(self, why: str) -> GradientError:
        """Return the error of a strategy that gives this reason."""
        return self.error(f"{self.what}, {self.why or why}; {self.advice}")


def asks_for(output: str, state: str) -> Need:
    """Return the need of an output that reads optimizer state."""
    return Need(
        f"{output} is computed from {state}",
        "keep the optimizer state (the second argument of the step) out of the loss and of the "
        "results",
        why="which belongs to the optimizer, and is not where the loss is",
    )


def cut(program: Program) -> Cut:
    """Cut a traced training step at its gradients; the program caches the result.

    Args:
      program: trace of a function of (params, opt_state, *batch) that returns both, and the loss.

    Raises:
      GradientError: it is not a training step, or its gradients are ambiguous.
    """
    return program.once(_cut)


def _cut(program: Program) -> Cut:
    return _Cutter(open_step(program)).cut()


class _Cutter:
    """Cutter of one step.

    Args:
      step: the step, with calls inlined.
    """

    def __init__(self, step: OpenStep) -> None:
        self.s = step
        self.across: Need | None = None
        self.argument_need: Need | None = None
        self.state_read: dict[str, str] = {}

    def cut(self) -> Cut:
        found = gradients_of(self.s)
        gradients = found.of
        boundary = set(gradients.values())
        by_batch, by_gradient = 1, 2
        seeds = {self.s.vars[n]: by_batch for n in self.s.batch}
        enters = propagate(self.s.eqns, seeds, dict.fromkeys(boundary, by_gradient))
        bits = functools.partial(bits_of, enters)
        optimized: list[str] = []
        frozen: list[str] = []
        for name in self.s.params:
            out = self.s.outs[name]
            # splitting a random key is no update: each trainer has its own key
            is_key = (
                jnp.issubdtype(self.s.vars[name].aval.dtype, jax.dtypes.extended)
                and not bits(out) & by_gradient
            )
            # servers do not know the batch size
            sized = not bits(out) and counts_rows(self.s, self.s.vars[name], out)
            is_frozen = out is self.s.vars[name] or bits(out) == by_batch or is_key or sized
            (frozen if is_frozen else optimized).append(name)
        if not optimized or not boundary:
            raise GradientError(
                f"no gradient was found in {self.s.source.name}: none of its parameters "
                f"({', '.join(self.s.params[:4])}{', ...' if len(self.s.params) > 4 else ''}) "
                "is updated from the derivative of a loss; candidates: none. Use "
                "dtrans.value_and_grad or "
                "dtrans.make_train_step"
            )
        computed_frozen = [n for n in frozen if self.s.outs[n] is not self.s.vars[n]]
        self.check_frozen(gradients, computed_frozen)
        optimize, used, positions = self.optimize_half(gradients, optimized, computed_frozen)
        self.check_trainer_half(gradients, used, frozen)
        # a loop that computes gradients belongs to the backward pass, even if the update reads its
        # other outputs
        behind = set(
            self.s.derivatives_behind(
                values_at(self.s.outs, (*optimized, *self.s.opt_state)), boundary
            )
        )
        positions = [i for i in positions if not self.s.derived[i] or i in behind]
        observers = observers_of(self.s, boundary, positions, self.state_read)
        # the operand of a mark is the gradient itself
        atoms: dict[str, Atom] = {
            n: self.unmarked(gradients[n]) for n in self.s.params if n in gradients
        }
        from_gradients = tuple(n for n in self.s.results if bits(self.s.outs[n]) & by_gradient)
        read_outside = values_at(self.s.outs, from_gradients)
        for x in observers:
            if x.calls:
                read_outside += self.s.eqns[x.position].invars
        _, seen = backward_slice(self.s.eqns, read_outside, boundary)
        seen -= set(values_at(gradients, used))
        reported = {n: a for n, a in atoms.items() if gradients[n] in seen}
        return Cut(
            program=self.with_roles(positions, found),
            params=self.s.params,
            opt_state=self.s.opt_state,
            batch=self.s.batch,
            gradients={n: a for n, a in atoms.items() if n in used},
            reported=reported,
            boundary=gradients,
            optimized=tuple(optimized),
            frozen=tuple(frozen),
            results=self.s.results,
            from_gradients=from_gradients,
            observers=observers,
            nested="" if found.marked else nested(self.s, found.terms),
            across=self.across,
            argument_need=self.argument_need,
            state_read=self.state_read,
            optimize=optimize,
        )

    def optimize_half(
        self, gradients: Mapping[str, Var], optimized: Sequence[str], computed_frozen: Sequence[str]
    ) -> tuple[OptimizeHalf, set[str], list[int]]:
        """Return the optimize half, the parameters whose gradient it reads, and its positions."""
        out_names = (*optimized, *self.s.opt_state)
        outs = values_at(self.s.outs, out_names)
        positions, leaves = backward_slice(self.s.eqns, outs, gradients.values())
        hidden = [n for n in (*self.s.batch, *computed_frozen) if self.s.vars[n] in leaves]
        loss = self.loss_need(positions)
        # an optimizer that evaluates the loss may differentiate it, after the gradients
        behind = propagate(self.s.eqns, {}, dict.fromkeys(gradients.values(), 1))
        derived = values_at(self.s.eqns, self.s.derivatives_behind(outs, gradients.values()))
        around = [e for e in derived if not bits_of(behind, *e.invars)]
        if hidden or around:
            first = None if around else self.s.vars[hidden[0]]
            culprit, what = self.who_uses(outs, out_names, gradients, first, around)
            if around:
                raise GradientError(
                    f"{culprit} is updated with {what}, which is not summed over the batch; "
                    f"{ONE_GRADIENT}"
                )
            need = Need(
                f"{culprit} is updated with {what}",
                "an update may use gradients, parameters and optimizer state. A count that "
                "gradients are "
                "divided by may divide the loss, inside of the loss function; a schedule is a "
                "function of a "
                "count in the optimizer state (optax.inject_hyperparams, optax schedules)",
            )
            if loss or derived or not all(n in self.s.batch for n in hidden):
                self.across = loss or need
            else:
                self.argument_need = need
        owners = invert(gradients)
        used = {owners[v] for v in leaves if v in owners}
        grad_names = [n for n in self.s.params if n in used]
        optimized_set = set(optimized)
        params = [n for n in self.s.params if n in optimized_set or self.s.vars[n] in leaves]
        batch = [n for n in hidden if n in self.s.batch]
        params += [n for n in hidden if n not in batch and n not in params]
        invars = values_at(gradients, grad_names)
        invars += values_at(self.s.vars, (*params, *self.s.opt_state, *batch))
        eqns = [_beside(self.s.eqns[i], gradients.values()) for i in positions]
        jaxpr = eliminate_dead(extract_part(self.s.jaxpr, invars, eqns, outs))
        in_names: tuple[Name, ...] = (
            *map(Gradient, grad_names),
            *params,
            *self.s.opt_state,
            *batch,
        )
        return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, positions

    def loss_need(self, positions: Sequence[int]) -> Need | None:
        """Return the need of an optimizer that reads a result of the step, as a line search
        does."""
        of = {a: n for n in self.s.results if isinstance(a := self.s.outs[n], Var)}
        outputs = {v for i in positions for v in self.s.eqns[i].outvars}
        for i in positions:
            result = next(
                (
                    of[a]
                    for a in self.s.eqns[i].invars
                    if isinstance(a, Var) and a in of and a in outputs
                ),
                None,
            )
            if (
                result
                and not self.s.derived[i]
                and (who := origin_of(self.s.eqns[i])).startswith("optax.")
            ):
                return Need(
                    f"{who} uses {result}",
                    "here an optimizer can neither be told the loss nor evaluate it. Use one that "
                    "takes (grads, state, "
                    "params), such as optax.lbfgs(linesearch=None), or a schedule; or dtrans.nccl2 "
                    "with batch='exact', "
                    "which takes it",
                    OptimizerError,
                )
        return None

    def who_uses(
        self,
        outs: Sequence[Atom],
        names: Sequence[str],
        gradients: Mapping[str, Var],
        var: Var | None,
        around: Iterable[JaxprEqn],
    ) -> tuple[str, str]:
        """Return the first output that a forbidden value enters, and the name of that value."""
        bad = {v for e in around for v in e.outvars} if var is None else {var}
        reached = propagate(
            self.s.eqns, dict.fromkeys(bad, 1), dict.fromkeys(gradients.values(), 0)
        )
        name = next(
            n for n, a in zip(names, outs, strict=True) if isinstance(a, Var) and reached.get(a)
        )
        if var is not None:
            return name, self.s.names[var]
        first = next(iter(around))
        return (
            name,
            f"a derivative that is not one of its gradients ({describe(self.s, first.outvars[0])})",
        )

    def check_frozen(self, gradients: Mapping[str, Var], computed_frozen: Sequence[str]) -> None:
        """Refuse parameters that trainers update by their own gradient; statistics are allowed."""
        outs = values_at(self.s.outs, computed_frozen)
        around = values_at(self.s.eqns, self.s.derivatives_behind(outs, gradients.values()))
        if around:
            culprit, what = self.who_uses(outs, computed_frozen, gradients, None, around)
            raise GradientError(
                f"{culprit} is updated with {what}, so that each part of the batch would update it "
                "in its own way; "
                "take the gradient of all parameters with one dtrans.value_and_grad, or build the "
                "step with "
                "dtrans.make_train_step"
            )

    def check_trainer_half(
        self, gradients: Mapping[str, Var], used: set[str], frozen: Sequence[str]
    ) -> None:
        """Record outputs that need optimizer state, or an update, which servers have."""
        proper = {n: self.unmarked(v) for n, v in gradients.items()}
        outputs: dict[Name, Atom] = subset(self.s.outs, (*self.s.results, *frozen))
        outputs |= {Gradient(n): proper[n] for n in used}
        state = {self.s.vars[n]: n for n in self.s.opt_state}
        boundary = set(gradients.values())
        taken_at = subset(proper, sorted(used))
        self.across = self.one_after_the_other(taken_at, boundary) or self.across
        enters = propagate(self.s.eqns, dict.fromkeys(state, 1), {})
        for name, atom in outputs.items():
            if not isinstance(atom, Var) or not enters.get(atom):
                continue
            leaves = backward_slice(
                self.s.eqns, [atom], () if isinstance(name, Gradient) else boundary
            )[1]
            taken = sorted(state[v] for v in leaves if v in state)
            if leaves & boundary and not self.across and taken:
                self.across = asks_for(str(name), taken[0])
            for n in taken:
                self.state_read.setdefault(n, str(name))

    def one_after_the_other(
        self, gradients: Mapping[str, Atom], boundary: Iterable[Var]
    ) -> Need | None:
        """Return the need of a gradient that is taken at an updated parameter, if there is one."""
        updated = propagate(self.s.eqns, {}, dict.fromkeys(boundary, 1))
        updated_params = {
            a: n for n in self.s.params if isinstance(a := self.s.outs[n], Var) and updated.get(a)
        }
        enters = propagate(self.s.eqns, {}, {v: i + 1 for i, v in enumerate(updated_params)})
        for name, gradient in gradients.items():
            if (
                isinstance(gradient, Var)
                and gradient not in updated_params
                and enters.get(gradient)
            ):
                _, read = backward_slice(self.s.eqns, [gradient], updated_params)
                first = next(n for v, n in updated_params.items() if v in read)
                return Need(
                    f"the gradient of {name} is taken at the new {first}",
                    "take both gradients before the updates; or use dtrans.nccl2 or "
                    "dtrans.sharding with "
                    "batch='exact', where one program makes both",
                    why="so that the step updates one after the other, and waits in its middle",
                )
        return None

    def unmarked(self, gradient: Var) -> Atom:
        """Return the gradient itself, the operand of its mark if there is one."""
        eqn = self.s.eqns[self.s.producers[gradient]]
        return eqn.invars[0] if eqn.primitive is mark_p else gradient

    def with_roles(self, optimize: Sequence[int], gradients: Gradients) -> Program:
        """Return the step with exact roles: optimize by the cut, backward by derivatives."""
        in_optimize, boundary = set(optimize), set(gradients.of.values())
        roles = []
        for i, eqn in enumerate(self.s.eqns):
            added_later = eqn.primitive is mark_p and boundary.isdisjoint(eqn.outvars)
            if i in in_optimize or (eqn.primitive is mark_p and not added_later):
                roles.append(OPTIMIZE)
            else:
                roles.append(
                    BACKWARD if self.s.derived[i] or added_later or i in gradients.sums else FORWARD
                )
        program = dataclasses.replace(
            self.s.source, jaxpr=self.s.jaxpr, roles=tuple(roles), guessed=False
        )
        # for different shapes it is the uncut step; callers cut it if they need to
        return self.s.source.rewritten(lambda other: other, result=program)
