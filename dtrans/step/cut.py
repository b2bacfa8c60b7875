"""The one cut: a training step becomes two halves.

    trainer half    parameters, batch            ->  loss, aux, gradients
    optimize half   gradients, parameters, state ->  new parameters, new state

The gradients lie between (`dtrans.step.gradients`). Whatever was inferred or marked is checked: on
the way from any input to new parameters and state, nothing may run around the gradients. No other
part of the package looks for the boundary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, NamedJaxpr, Var, line_of, origin_of
from dtrans.errors import BatchError, GradientError, OptimizerError
from dtrans.ir.builder import extract_part
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.fingerprint import number, of_values
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
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
    """The gradient of a leaf, as an input of an optimize half. Its text is for people: a leaf may
    be called so too."""

    leaf: str

    def __str__(self) -> str:
        return self.leaf + GRAD


Name = str | Gradient


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A training step, cut.

    Attributes:
      program: the whole step, calls inlined, with exact roles.
      params: the names of the leaves of the first argument, in leaf order.
      opt_state: the names of the leaves of the second.
      batch: the names of all other inputs.
      gradients: parameter name to the value that is its gradient, for leaves whose update uses one.
      reported: the same, for leaves whose gradient only results use (the norm of all, where some
        are frozen).
      boundary: parameter name to what stands for its gradient behind the cut: the output of its
        mark, if it has one.
      optimized: the parameters that the optimize half makes.
      frozen: the parameters that the trainer half makes, or that never change.
      results: the names of all outputs that are not state, e.g. `loss`.
      from_gradients: those of them that are computed from gradients, e.g. a gradient norm.
      observers: the equations with effects (`jax.debug.print`), wherever they are carried out.
      nested: why gradients may be computed from another derivative, as a perturbed step does; each
        of several trainers would compute them from its own. Empty where they are not, or are
        marked.
      across: the need of one half for what the other makes: of the update for values of forward, or
        of a result for values of the update. None where there is none. Where each trainer has both
        halves it may be so.
      told: the same where the update reads arguments of the step, as a learning rate: trainers can
        tell servers those.
      asked: arrays of the optimizer's state that forward and backward read, as a random key in it,
        and for which of their outputs; trainers can ask servers for those that no row enters.
      optimize: the optimize half. Inputs: gradients, then parameters, then state, then arrays of
        the batch; outputs: optimized parameters, then state. Only what it uses.
      handed: values of forward that are inputs of the optimize half, behind all others, by name.
        Strategies whose updates are carried out elsewhere, or on slices of parameters, add them
        (`dtrans.step.handed_values`).
      numbers: numbers of the size of the batch that are inputs of the optimize half, behind all
        others, by name (`dtrans.step.batch_numbers`).
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
    told: Need | None
    asked: Mapping[str, str]
    optimize: OptimizeHalf
    handed: Mapping[str, Atom] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The inputs of the update beside state and gradients: arguments, values of forward,
        numbers of the batch."""
        known = {*self.batch, *self.handed, *self.numbers}
        return tuple(n for n in self.optimize.in_names if isinstance(n, str) and n in known)

    def reason_not_optimized(self, name: str) -> str:
        """Return the reason why the update leaves a parameter alone: it never changes, or forward
        makes it."""
        inner, program = self.program.inner, self.program
        before = inner.invars[program.in_names.index(name)]
        after = inner.outvars[program.out_names.index(name)]
        return "it is not updated" if after is before else "forward updates it, not the optimizer"

    @property
    def early(self) -> tuple[int, ...]:
        """The positions of observers that forward and backward carry out."""
        return tuple(x.position for x in self.observers if x.reads in EARLY)

    @property
    def late(self) -> tuple[int, ...]:
        """The positions of callbacks that read reduced gradients, or what the update makes, and are
        not inside it."""
        return tuple(
            x.position
            for x in self.observers
            if x.calls and x.reads not in EARLY and not x.in_update
        )

    @property
    def observed(self) -> OptimizeHalf:
        """What callbacks read, from gradients and the inputs of the step."""
        eqns, boundary = self.program.eqns, {v: n for n, v in self.boundary.items()}
        read = [a for x in self.observers if x.calls for a in eqns[x.position].invars]
        names: tuple[Name, ...] = (*map(Gradient, boundary.values()), *self.program.in_names)
        made = _from_gradients(self.program, boundary, read)
        return OptimizeHalf(made, names, tuple(map(str, range(len(read)))))

    def with_observers(self, reads: str, as_: str) -> Cut:
        """Return the same with callbacks that read `reads` carried out as those that read `as_`."""
        moved = [
            dataclasses.replace(x, reads=as_) if x.reads == reads else x for x in self.observers
        ]
        return dataclasses.replace(self, observers=tuple(moved))

    def unlike(self, other: Cut) -> list[str]:
        """Return what the same step, for another batch, makes of gradients in another way: new
        state and results."""
        mine, theirs = (_results_half(x, self.from_gradients) for x in (self, other))
        return [*self.optimize.unlike(other.optimize), *mine.unlike(theirs)]

    def first_unlike(self, other: Cut) -> tuple[str, str] | None:
        """Return an output that another batch makes of gradients in another way, and the line; None
        without one.

        Values that callbacks read count as outputs.
        """
        results = [_results_half(x, self.from_gradients) for x in (self, other)]
        observed = [x.observed for x in (self, other)]
        for mine, theirs in ([self.optimize, other.optimize], results, observed):
            for n in mine.unlike(theirs):
                return "what a callback reads" if mine is observed[0] else n, mine.unlike_line(
                    theirs, n
                )
        return None

    def with_reported(self) -> Cut:
        """The same, with all gradients that anything uses as `gradients`."""
        return dataclasses.replace(self, gradients={**self.gradients, **self.reported})


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeHalf(NamedJaxpr):
    """The optimize half of a step: a closed jaxpr and the names of its inputs and outputs."""

    jaxpr: ClosedJaxpr
    in_names: tuple[Name, ...]
    out_names: tuple[str, ...]

    @property
    def graded(self) -> frozenset[str]:
        """The leaves whose gradients go in."""
        return frozenset(n.leaf for n in self.in_names if isinstance(n, Gradient))

    def unlike(self, other: OptimizeHalf) -> list[str]:
        """What the same step, traced on another batch, makes in another way: with a number of the
        size of the batch."""
        mine, theirs = (of_values(half.jaxpr, half.in_names) for half in (self, other))
        written = lambda digests, a: number(a) if isinstance(a, Literal) else digests[a]
        new = {n: written(theirs, a) for n, a in other.outvars.items()}
        return [n for n, a in self.outvars.items() if written(mine, a) != new.get(n)]

    def unlike_line(self, other: OptimizeHalf, name: str) -> str:
        """Return the line of the first equation for an output that the step makes in another way
        for another batch."""
        mine, theirs = (of_values(half.jaxpr, half.in_names) for half in (self, other))
        known = {*theirs.values()}
        eqns = self.eqns
        needed, _ = backward_slice(eqns, [self.outvars[name]])
        lines = (
            line_of(eqns[i]) for i in needed if any(mine[v] not in known for v in eqns[i].outvars)
        )
        return next(filter(None, lines), "an unknown line")


def _beside(eqn: JaxprEqn, inputs: Collection[Var]) -> JaxprEqn:
    """Return an equation under other names for what is an input: a loop that makes gradients may
    make more."""
    if set(inputs).isdisjoint(eqn.outvars):
        return eqn
    return eqn.replace(outvars=[Var(v.aval) if v in inputs else v for v in eqn.outvars])


def _results_half(step: Cut, names: Sequence[str]) -> OptimizeHalf:
    """Return what makes results of gradients, as an optimize half does new state."""
    program = step.program
    made = _from_gradients(program, step.boundary.values(), [program.outvars[n] for n in names])
    return OptimizeHalf(made, (*map(Gradient, step.boundary), *program.in_names), tuple(names))


def _from_gradients(
    program: Program, gradients: Collection[Var], outs: Sequence[Atom]
) -> ClosedJaxpr:
    """Return what makes values of gradients and of the inputs of a step."""
    eqns = [
        _beside(program.eqns[i], gradients)
        for i in backward_slice(program.eqns, outs, gradients)[0]
    ]
    return extract_part(program.jaxpr, [*gradients, *program.inner.invars], eqns, outs)


def check_same_update(planned: Cut, again: Cut) -> None:
    """Raise BatchError for an update that was planned for a batch of another size, and has a number
    of that size."""
    for n in planned.optimize.unlike(again.optimize):
        raise other_size(planned, n, planned.program.inputs, again.program.inputs)


def other_size(
    planned: Cut, name: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> BatchError:
    """Return the error for an output that is made with a number of the size of the batch, of which
    there is another.

    Args:
      was, now: types of the arrays of the batch.
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
        f"{planned.program.name} with "
        "arrays of the new shape and plan again, or let the number be an argument of the step"
    )


@dataclasses.dataclass(frozen=True)
class Need:
    """A value that one half of a step needs and the other half makes.

    Attributes:
      what: the need, as the first half of a sentence.
      advice: what to write instead.
      error: the class of the refusal.
      why: why it is refused, whatever the strategy.
    """

    what: str
    advice: str
    error: type[GradientError] = GradientError
    why: str = ""

    def refused(self, why: str) -> GradientError:
        """Return the refusal of a strategy that gives this reason."""
        return self.error(f"{self.what}, {self.why or why}; {self.advice}")


def asks_for(output: str, state: str) -> Need:
    """Return the need of an output that reads the optimizer's state where nobody can tell it."""
    return Need(
        f"{output} is computed from {state}",
        "keep the optimizer state (the second argument of the step) out of the loss and of the "
        "results",
        why="which belongs to the optimizer, and is not where the loss is",
    )


def cut(program: Program) -> Cut:
    """Cut a traced training step at its gradients; the program keeps the result, and is cut once.

    Args:
      program: of a function of (params, opt_state, *batch) that returns both, and the loss.

    Raises:
      GradientError: not a training step, or gradients that cannot be told.
    """
    return program.once(_cut)


def _cut(program: Program) -> Cut:
    return _Cutter(open_step(program)).cut()


class _Cutter:
    """Cuts one step at its gradients.

    Args:
      step: with calls inlined.
    """

    def __init__(self, step: OpenStep) -> None:
        self.s = step
        self.across: Need | None = None
        self.told: Need | None = None
        self.asked: dict[str, str] = {}

    def cut(self) -> Cut:
        found = gradients_of(self.s)
        gradients = found.of
        boundary = set(gradients.values())
        by_batch, by_gradient = 1, 2
        seeds = {self.s.vars[n]: by_batch for n in self.s.batch}
        enters = propagate(self.s.eqns, seeds, dict.fromkeys(boundary, by_gradient))
        bits: Callable[[Atom], int] = lambda a: enters.get(a, 0) if isinstance(a, Var) else 0
        optimized: list[str] = []
        frozen: list[str] = []
        for name in self.s.params:
            out = self.s.outs[name]
            # what splits a random key is no update: each trainer has its own
            is_key = (
                jnp.issubdtype(self.s.vars[name].aval.dtype, jax.dtypes.extended)
                and not bits(out) & by_gradient
            )
            sized = not bits(out) and counts_rows(
                self.s, self.s.vars[name], out
            )  # servers do not know the batch's size
            held = out is self.s.vars[name] or bits(out) == by_batch or is_key or sized
            (frozen if held else optimized).append(name)
        if not optimized or not boundary:
            raise GradientError(
                f"no gradient was found in {self.s.source.name}: none of its parameters "
                f"({', '.join(self.s.params[:4])}{', ...' if len(self.s.params) > 4 else ''}) "
                "is updated from the derivative of a loss; candidates: none. Use "
                "dtrans.value_and_grad or "
                "dtrans.make_train_step"
            )
        made_here = [n for n in frozen if self.s.outs[n] is not self.s.vars[n]]
        self.check_frozen(gradients, made_here)
        optimize, used, kept = self.optimize_half(gradients, optimized, made_here)
        self.check_trainer_half(gradients, used, frozen)
        # a loop that makes gradients belongs to the backward pass, whatever else of it the update
        # reads
        behind = set(
            self.s.derivatives_behind(
                [self.s.outs[n] for n in (*optimized, *self.s.opt_state)], boundary
            )
        )
        kept = [i for i in kept if not self.s.derived[i] or i in behind]
        observers = observers_of(self.s, boundary, kept, self.asked)
        # the gradient proper is what the mark was put on
        atoms: dict[str, Atom] = {
            n: self.unmarked(gradients[n]) for n in self.s.params if n in gradients
        }
        from_gradients = tuple(n for n in self.s.results if bits(self.s.outs[n]) & by_gradient)
        watched = [a for x in observers if x.calls for a in self.s.eqns[x.position].invars]
        seen = backward_slice(
            self.s.eqns, [*(self.s.outs[n] for n in from_gradients), *watched], boundary
        )[1]
        seen -= {gradients[n] for n in used}
        return Cut(
            program=self.with_roles(kept, found),
            params=self.s.params,
            opt_state=self.s.opt_state,
            batch=self.s.batch,
            gradients={n: a for n, a in atoms.items() if n in used},
            reported={n: a for n, a in atoms.items() if gradients[n] in seen},
            boundary=gradients,
            optimized=tuple(optimized),
            frozen=tuple(frozen),
            results=self.s.results,
            from_gradients=from_gradients,
            observers=observers,
            nested="" if found.marked else nested(self.s, found.terms),
            across=self.across,
            told=self.told,
            asked=self.asked,
            optimize=optimize,
        )

    def optimize_half(
        self, gradients: Mapping[str, Var], optimized: Sequence[str], made_here: Sequence[str]
    ) -> tuple[OptimizeHalf, set[str], list[int]]:
        """The optimize half, the parameters whose gradient it uses, and the positions of its
        equations."""
        out_names = (*optimized, *self.s.opt_state)
        outs = [self.s.outs[n] for n in out_names]
        kept, leaves = backward_slice(self.s.eqns, outs, gradients.values())
        hidden = [n for n in (*self.s.batch, *made_here) if self.s.vars[n] in leaves]
        loss = self.told_the_loss(kept)
        # an optimizer that evaluates the loss may differentiate it too: those derivatives are
        # behind the gradients
        behind = propagate(self.s.eqns, {}, dict.fromkeys(gradients.values(), 1))
        is_behind = lambda e: any(isinstance(a, Var) and behind.get(a) for a in e.invars)
        derived = [self.s.eqns[i] for i in self.s.derivatives_behind(outs, gradients.values())]
        around = [e for e in derived if not is_behind(e)]
        if hidden or around:
            first = None if around else self.s.vars[hidden[0]]
            culprit, what = self.who_uses(outs, out_names, gradients, first, around)
            if around:
                raise GradientError(
                    f"{culprit} is updated with {what}, and nobody adds that up over the batch; "
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
                self.told = need
        owners = {v: n for n, v in gradients.items()}
        used = {owners[v] for v in leaves if v in owners}
        grad_names = [n for n in self.s.params if n in used]
        made = set(optimized)
        params = [n for n in self.s.params if n in made or self.s.vars[n] in leaves]
        batch = [n for n in hidden if n in self.s.batch]
        params += [n for n in hidden if n not in batch and n not in params]
        invars = [gradients[n] for n in grad_names] + [
            self.s.vars[n] for n in (*params, *self.s.opt_state, *batch)
        ]
        eqns = [_beside(self.s.eqns[i], gradients.values()) for i in kept]
        jaxpr = eliminate_dead(extract_part(self.s.jaxpr, invars, eqns, outs))
        in_names: tuple[Name, ...] = (
            *map(Gradient, grad_names),
            *params,
            *self.s.opt_state,
            *batch,
        )
        return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, kept

    def told_the_loss(self, kept: Sequence[int]) -> Need | None:
        """Return the need of an optimizer that is told a result of the step, as a line search is
        told the loss."""
        of = {a: n for n in self.s.results if isinstance(a := self.s.outs[n], Var)}
        made = {v for i in kept for v in self.s.eqns[i].outvars}
        for i in kept:
            told = next(
                (
                    of[a]
                    for a in self.s.eqns[i].invars
                    if isinstance(a, Var) and a in of and a in made
                ),
                None,
            )
            if (
                told
                and not self.s.derived[i]
                and (who := origin_of(self.s.eqns[i])).startswith("optax.")
            ):
                return Need(
                    f"{who} uses {told}",
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
        """The first output that a forbidden value enters, and the name of that value."""
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

    def check_frozen(self, gradients: Mapping[str, Var], made_here: Sequence[str]) -> None:
        """What each trainer makes for itself may be a statistic of its batch, but not an update by
        its own gradient."""
        outs = [self.s.outs[n] for n in made_here]
        around = [self.s.eqns[i] for i in self.s.derivatives_behind(outs, gradients.values())]
        if around:
            culprit, what = self.who_uses(outs, made_here, gradients, None, around)
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
        """Note what needs the optimizer's state, or an update, which trainers of servers do not
        have."""
        proper = {n: self.unmarked(v) for n, v in gradients.items()}
        outputs: dict[Name, Atom] = {n: self.s.outs[n] for n in (*self.s.results, *frozen)}
        outputs |= {Gradient(n): proper[n] for n in used}
        state = {self.s.vars[n]: n for n in self.s.opt_state}
        boundary = set(gradients.values())
        taken_at = {n: proper[n] for n in sorted(used)}
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
                self.asked.setdefault(n, str(name))

    def one_after_the_other(
        self, gradients: Mapping[str, Atom], boundary: Iterable[Var]
    ) -> Need | None:
        """Return the need of a gradient that is taken at a parameter which the same step has
        updated, if one is."""
        updated = propagate(self.s.eqns, {}, dict.fromkeys(boundary, 1))
        made = {
            a: n for n in self.s.params if isinstance(a := self.s.outs[n], Var) and updated.get(a)
        }
        enters = propagate(self.s.eqns, {}, {v: i + 1 for i, v in enumerate(made)})
        for name, gradient in gradients.items():
            if isinstance(gradient, Var) and gradient not in made and enters.get(gradient):
                _, read = backward_slice(self.s.eqns, [gradient], made)
                first = next(n for v, n in made.items() if v in read)
                return Need(
                    f"the gradient of {name} is taken at the new {first}",
                    "take both gradients before the updates; or use dtrans.nccl2 or "
                    "dtrans.sharding with "
                    "batch='exact', where one program makes both",
                    why="so that the step updates one after the other, and waits in its middle",
                )
        return None

    def unmarked(self, gradient: Var) -> Atom:
        """Return the gradient proper, that a mark was put on, if there is one."""
        eqn = self.s.eqns[self.s.made_by[gradient]]
        return eqn.invars[0] if eqn.primitive is mark_p else gradient

    def with_roles(self, optimize: Sequence[int], gradients: Gradients) -> Program:
        """The whole step with exact roles: optimize by the cut, backward by what differentiation
        made."""
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
        made = dataclasses.replace(
            self.s.source, jaxpr=self.s.jaxpr, roles=tuple(roles), guessed=False
        )
        # for other shapes it is the step as it was traced, which is cut by those that need it so
        return self.s.source.rewritten(lambda other: other, made=made)
