"""The one cut: a training step becomes two halves.

    trainer half    parameters, batch            ->  loss, aux, gradients
    optimize half   gradients, parameters, state ->  new parameters, new state

The gradients lie between. They are the operands of marks (`dtrans.step.marks`) where the step has them. A step
whose author called `jax.grad` gets them by inference: the gradient of `params/w` is the value that

  - has the shape of `params/w`,
  - was made by differentiation (its equation lies under `transpose(...)` in the name stack, or holds such
    equations: a scan over micro-batches), and is used by an equation that was not,
  - reaches the new `params/w` through equations that keep that shape; or, where none does (Muon
    multiplies matrices), through any equations.

More than one such value is an error that lists them, and so is a loop that may have taken several steps:
what it makes becomes the new parameter without the old one being read again. Whatever was inferred or marked
is then checked: on the way from any input to new parameters and state, nothing may run around the gradients.
No other part of the package looks for the boundary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, equations, jaxprs_in_params, origin_of, scope_of
from dtrans.errors import GradientError, OptimizerError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.step.marks import mark_p


GRAD = "@GRAD"


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of a leaf, as an input of an optimize half. Its text is for people: a leaf may be called so too."""

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
      reported: the same, for leaves whose gradient only results use (the norm of all, where some are frozen).
      boundary: parameter name to what stands for its gradient behind the cut: the output of its mark, if it has one.
      optimized: the parameters that the optimize half makes.
      frozen: the parameters that the trainer half makes, or that never change.
      results: the names of all outputs that are not state, e.g. `loss`.
      from_gradients: those of them that are computed from gradients, e.g. a gradient norm.
      observers: positions of equations with effects (`jax.debug.print`) that trainers can carry out.
      unused_effects: other equations with effects, by primitive; no half carries them out.
      nested: why gradients may be computed from another derivative, as a perturbed step does; each of several
        trainers would compute them from its own. Empty where they are not, or are marked.
      optimize: the optimize half. Inputs: gradients, then parameters, then state; outputs: optimized parameters, then
        state. Only what it uses.
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
    observers: tuple[int, ...]
    unused_effects: tuple[str, ...]
    nested: str
    optimize: OptimizeHalf

    def with_reported(self) -> Cut:
        """The same, with all gradients that anything uses as `gradients`."""
        return dataclasses.replace(self, gradients={**self.gradients, **self.reported})


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeHalf:
    """The optimize half of a step: a closed jaxpr and the names of its inputs and outputs."""

    jaxpr: ClosedJaxpr
    in_names: tuple[Name, ...]
    out_names: tuple[str, ...]

    @property
    def graded(self) -> frozenset[str]:
        """The leaves whose gradients go in."""
        return frozenset(n.leaf for n in self.in_names if isinstance(n, Gradient))


def cut(program: Program) -> Cut:
    """Cut a traced training step at its gradients.

    Args:
      program: of a function of (params, opt_state, *batch) that returns both, and the loss.

    Raises:
      GradientError: not a training step, gradients that cannot be told, or an update that uses something
        which only the trainers have. OptimizerError: an optimizer that is told the loss.
    """
    return _Cutter(program).cut()


class _Cutter:
    """The working state of one cut."""

    def __init__(self, program: Program) -> None:
        if len(program.args) < 2:
            raise GradientError(
                f"{program.name} is not a training step: it must be a function of (params, opt_state, *batch)"
            )
        self.source = program
        self.jaxpr = inline_calls(program.jaxpr)
        self.inner = self.jaxpr.jaxpr
        self.eqns: Sequence[JaxprEqn] = self.inner.eqns
        self.names = dict(zip(self.inner.invars, program.in_names, strict=True))
        self.vars = {n: v for v, n in self.names.items()}
        self.outs = dict(zip(program.out_names, self.inner.outvars, strict=True))
        self.params = program.args[0].names
        self.param_set = set(self.params)
        self.opt_state = program.args[1].names
        self.state = {*self.params, *self.opt_state}
        self.batch = tuple(n for n in program.in_names if n not in self.state)
        self.results = tuple(n for n in program.out_names if n not in self.state)
        self.made_by = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.derived = [_is_derivative(e) for e in self.eqns]
        if program.ambiguous_outputs:
            raise GradientError(
                f"{program.name} returns its new state where it cannot be told: {program.ambiguous_outputs}. "
                "Return (params, opt_state, loss, ...) in this order, or a dict with the keys of the arguments"
            )
        missing = [n for n in (*self.params, *self.opt_state) if n not in self.outs]
        if missing or not self.params:
            raise GradientError(
                f"{program.name} is not a training step: it does not return a new "
                f"{missing[0] if missing else 'value of its first argument'}; "
                "it must return (params, opt_state, loss), each of the structure that came in"
            )
        for n in (*self.params, *self.opt_state):
            had, now = self.vars[n].aval, self.outs[n].aval
            if (had.shape, had.dtype) != (now.shape, now.dtype):
                raise GradientError(
                    f"{n} goes in as {short_type(had)} and comes out as {short_type(now)}: a step must keep the "
                    "type of its state"
                )

    # -- gradients -------------------------------------------------------------------------------

    def marked(self) -> dict[str, Var]:
        """Parameter to the output of its mark."""
        found: dict[str, Var] = {}
        for eqn in self.eqns:
            if eqn.primitive is not mark_p:
                continue
            leaf = self.leaf_behind(eqn.invars[1])
            if leaf is None:
                raise GradientError(
                    f"dtrans.value_and_grad was taken with respect to `{eqn.params['leaf'] or 'its argument'}`, "
                    "which is not a leaf of "
                    f"`{self.params[0].split('/')[0]}`, the first argument of {self.source.name}"
                )
            if leaf in found:
                raise GradientError(
                    f"{leaf} has two marked gradients in {self.source.name}: call dtrans.value_and_grad once, "
                    "on the total loss, or accumulate over micro-batches with jax.lax.scan and jax.value_and_grad"
                )
            shape = self.vars[leaf].aval.shape
            if eqn.outvars[0].aval.shape != shape:
                raise GradientError(
                    f"the marked gradient of {leaf} is {short_type(eqn.outvars[0].aval)} in {self.source.name}, "
                    f"where the leaf is {list(shape)}: gradients of single examples (dtrans.value_and_grad under vmap) "
                    "cannot be averaged over trainers; take the gradient of the mean loss"
                )
            found[leaf] = eqn.outvars[0]
        return found

    def leaf_behind(self, atom: Atom) -> str | None:
        """The parameter that a value is, or was made from one operand at a time, as by a cast."""
        while isinstance(atom, Var) and atom in self.made_by:
            eqn = self.eqns[self.made_by[atom]]
            operands = [a for a in eqn.invars if isinstance(a, Var)]
            if len(operands) != 1 or operands[0].aval.shape != atom.aval.shape:
                return None
            atom = operands[0]
        name = self.names.get(atom) if isinstance(atom, Var) else None
        return name if name in self.param_set else None

    def inferred(self) -> dict[str, Var]:
        """Parameter to the value that must be its gradient; see the module's docstring."""
        crossing = self.crossing()
        of_shape: dict[tuple[int, ...], set[Var]] = {}
        for v in crossing:
            of_shape.setdefault(v.aval.shape, set()).add(v)
        from_batch = propagate(self.eqns, {self.vars[n]: 1 for n in self.batch}, dict.fromkeys(crossing, 0))
        reads_params = propagate(self.eqns, {self.vars[n]: 1 for n in self.params}, dict.fromkeys(crossing, 0))
        found: dict[str, Var] = {}
        for name in self.params:
            out, shape = self.outs[name], self.vars[name].aval.shape
            fits = of_shape.get(shape, set())
            reach = self.shape_keeping(out, shape, fits) or self.reached(out, fits)
            if len(reach) == 1:
                (candidate,) = reach
                self.check_inferred(name, candidate, reads_params)
                found[name] = candidate
                continue
            # no candidate is right for a leaf that never changes, or that the loss does not use: both are
            # told apart from a hidden gradient by whether the batch enters its update
            if not reach and not (isinstance(out, Var) and from_batch.get(out)):
                continue
            listed = (
                "\n".join(f"  {self.describe(v)}" for v in sorted(reach or fits, key=self.made_by.__getitem__))
                or "  none"
            )
            raise GradientError(
                f"cannot tell the gradient of {name} ({short_type(self.vars[name].aval)}) in "
                f"{self.source.name}; candidates:\n{listed}\n"
                "take gradients with dtrans.value_and_grad in place of jax.value_and_grad, or build the step "
                "with dtrans.make_train_step"
            )
        return found

    def nested(self, gradients: Mapping[str, Var]) -> str:
        """What lies between two derivatives, outside of both: the first equation of it, if there is one."""
        kept, _ = backward_slice(self.eqns, gradients.values())
        inside: set[Var] = set()
        for i in kept:
            eqn = self.eqns[i]
            if self.derived[i]:
                inside.update(eqn.outvars)
            elif any(isinstance(a, Var) and a in inside for a in eqn.invars):
                if "jvp(" not in scope_of(eqn):
                    return f"{short_type(eqn.outvars[0].aval)} = {eqn.primitive.name}"
                inside.update(eqn.outvars)
        return ""

    def check_inferred(self, name: str, candidate: Var, reads_params: Mapping[Var, int]) -> None:
        """Refuse what may be the new parameter itself, made by a loop that takes several steps."""
        out, eqn = self.outs[name], self.eqns[self.made_by[candidate]]
        if "transpose(" not in scope_of(eqn) and not (isinstance(out, Var) and reads_params.get(out)):
            raise GradientError(
                f"cannot tell the gradient of {name} in {self.source.name}: {eqn.primitive.name} differentiates "
                f"inside, and what it makes becomes the new {name} without the old one being read again, as when a "
                "loop takes several steps. A step may take one update"
            )

    def crossing(self) -> set[Var]:
        """Values made by differentiation and used by something that was not."""
        made = {v for e, d in zip(self.eqns, self.derived, strict=True) if d for v in e.outvars}
        used = {
            a for e, d in zip(self.eqns, self.derived, strict=True) if not d for a in e.invars if isinstance(a, Var)
        }
        used |= {a for a in self.inner.outvars if isinstance(a, Var)}
        return made & used

    def shape_keeping(self, out: Atom, shape: tuple[int, ...], fits: set[Var]) -> set[Var]:
        """The candidates met walking back from `out` through values of one shape."""
        stack, seen, met = [out], set(), set()
        while stack:
            atom = stack.pop()
            if isinstance(atom, Literal) or atom in seen or atom.aval.shape != shape:
                continue
            seen.add(atom)
            if atom in fits:
                met.add(atom)
            elif atom in self.made_by:
                stack += self.eqns[self.made_by[atom]].invars
        return met

    def reached(self, out: Atom, fits: set[Var]) -> set[Var]:
        """The candidates met walking back from `out` through anything."""
        return backward_slice(self.eqns, [out], fits)[1] & fits if fits else set()

    def describe(self, var: Var) -> str:
        eqn = self.eqns[self.made_by[var]]
        return f"{short_type(var.aval)} = {eqn.primitive.name} ({scope_of(eqn) or 'no name stack'})"

    # -- halves ----------------------------------------------------------------------------------

    def cut(self) -> Cut:
        marked = self.marked()
        gradients = marked or self.inferred()
        boundary = set(gradients.values())
        by_batch, by_gradient = 1, 2
        seeds = {self.vars[n]: by_batch for n in self.batch}
        enters = propagate(self.eqns, seeds, dict.fromkeys(boundary, by_gradient))
        bits: Callable[[Atom], int] = lambda a: enters.get(a, 0) if isinstance(a, Var) else 0
        optimized: list[str] = []
        frozen: list[str] = []
        for name in self.params:
            out = self.outs[name]
            # what splits a random key is no update: each trainer has its own
            is_key = jnp.issubdtype(self.vars[name].aval.dtype, jax.dtypes.extended) and not bits(out) & by_gradient
            (frozen if out is self.vars[name] or bits(out) == by_batch or is_key else optimized).append(name)
        if not optimized or not boundary:
            raise GradientError(
                f"no gradient was found in {self.source.name}: none of its parameters "
                f"({', '.join(self.params[:4])}{', ...' if len(self.params) > 4 else ''}) "
                "is updated from the derivative of a loss; candidates: none. Use dtrans.value_and_grad or "
                "dtrans.make_train_step"
            )
        made_here = [n for n in frozen if self.outs[n] is not self.vars[n]]
        self.check_frozen(gradients, made_here)
        optimize, used, kept = self.optimize_half(gradients, optimized, made_here)
        self.check_trainer_half(gradients, used, frozen)
        observers, unused = self.observers(kept)
        # the gradient proper is what the mark was put on
        atoms: dict[str, Atom] = {
            n: self.eqns[self.made_by[gradients[n]]].invars[0] if marked else gradients[n]
            for n in self.params
            if n in gradients
        }
        from_gradients = tuple(n for n in self.results if bits(self.outs[n]) & by_gradient)
        seen = backward_slice(self.eqns, [self.outs[n] for n in from_gradients], boundary)[1]
        seen -= {gradients[n] for n in used}
        return Cut(
            program=self.with_roles(kept),
            params=self.params,
            opt_state=self.opt_state,
            batch=self.batch,
            gradients={n: a for n, a in atoms.items() if n in used},
            reported={n: a for n, a in atoms.items() if gradients[n] in seen},
            boundary=gradients,
            optimized=tuple(optimized),
            frozen=tuple(frozen),
            results=self.results,
            from_gradients=from_gradients,
            observers=observers,
            unused_effects=unused,
            nested="" if marked else self.nested(gradients),
            optimize=optimize,
        )

    def optimize_half(
        self, gradients: Mapping[str, Var], optimized: Sequence[str], made_here: Sequence[str]
    ) -> tuple[OptimizeHalf, set[str], list[int]]:
        """The optimize half, the parameters whose gradient it uses, and the positions of its equations."""
        out_names = (*optimized, *self.opt_state)
        outs = [self.outs[n] for n in out_names]
        kept, leaves = backward_slice(self.eqns, outs, gradients.values())
        hidden = [n for n in (*self.batch, *made_here) if self.vars[n] in leaves]
        around = [self.eqns[i] for i in kept if self.derived[i]]
        if hidden or around:
            self.refuse_losses(kept)
            culprit, what = self.who_uses(outs, out_names, gradients, self.vars[hidden[0]] if hidden else None, around)
            raise GradientError(
                f"{culprit} is updated with {what}, which only the trainers have; an update may use gradients, "
                "parameters and optimizer state. If this is the gradient of something, take it with "
                "dtrans.value_and_grad; if it is a schedule, "
                "make it a function of a count in the optimizer state (optax.inject_hyperparams, optax schedules)"
            )
        owners = {v: n for n, v in gradients.items()}
        used = {owners[v] for v in leaves if v in owners}
        grad_names = [n for n in self.params if n in used]
        made = set(optimized)
        params = [n for n in self.params if n in made or self.vars[n] in leaves]
        builder = Builder(self.jaxpr)
        builder.invars += [
            *(gradients[n] for n in grad_names),
            *(self.vars[n] for n in (*params, *self.opt_state)),
        ]
        for i in kept:
            builder.keep(self.eqns[i])
        jaxpr = eliminate_dead(builder.build(outs))
        in_names: tuple[Name, ...] = (*map(Gradient, grad_names), *params, *self.opt_state)
        return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, kept

    def refuse_losses(self, kept: Sequence[int]) -> None:
        """Raise for an optimizer that is told a result of the step, as a line search is told the loss."""
        of = {a: n for n in self.results if isinstance(a := self.outs[n], Var)}
        made = {v for i in kept for v in self.eqns[i].outvars}
        for i in kept:
            told = next((of[a] for a in self.eqns[i].invars if isinstance(a, Var) and a in of and a in made), None)
            who = origin_of(self.eqns[i])
            if told and not self.derived[i] and who.startswith("optax."):
                raise OptimizerError(
                    f"{who} uses {told}, which only the trainers have: servers have gradients, parameters and "
                    "optimizer state, so that an optimizer can neither be told the loss nor evaluate it. Use one "
                    "that takes (grads, state, params), such as optax.lbfgs(linesearch=None), or a schedule"
                )

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

        def enters(out: Atom) -> bool:
            kept, leaves = backward_slice(self.eqns, [out], gradients.values())
            return bool(leaves & bad) or any(v in bad for i in kept for v in self.eqns[i].outvars)

        name = next(n for n, out in zip(names, outs, strict=True) if enters(out))
        if var is not None:
            return name, self.names[var]
        first = next(iter(around))
        return name, f"a derivative that is not one of its gradients ({self.describe(first.outvars[0])})"

    def check_frozen(self, gradients: Mapping[str, Var], made_here: Sequence[str]) -> None:
        """What each trainer makes for itself may be a statistic of its batch, but not an update by its own gradient."""
        outs = [self.outs[n] for n in made_here]
        around = [self.eqns[i] for i in backward_slice(self.eqns, outs, gradients.values())[0] if self.derived[i]]
        if around:
            culprit, what = self.who_uses(outs, made_here, gradients, None, around)
            raise GradientError(
                f"{culprit} is updated with {what}, so that each trainer would go its own way; "
                "take the gradient of all parameters with one dtrans.value_and_grad, or build the step with "
                "dtrans.make_train_step"
            )

    def check_trainer_half(self, gradients: Mapping[str, Var], used: set[str], frozen: Sequence[str]) -> None:
        """The trainers have no optimizer state: neither the loss nor a gradient may need it."""
        outputs: dict[Name, Atom] = {n: self.outs[n] for n in (*self.results, *frozen)}
        outputs |= {Gradient(n): gradients[n] for n in used}
        state = {self.vars[n]: n for n in self.opt_state}
        enters = propagate(self.eqns, dict.fromkeys(state, 1), {})
        for name, atom in outputs.items():
            if isinstance(atom, Var) and enters.get(atom):
                taken = min(state[v] for v in backward_slice(self.eqns, [atom])[1] if v in state)
                raise GradientError(
                    f"{name} is computed from {taken}, which belongs to the optimizer, and is not where the loss is; "
                    "keep the optimizer state (the second argument of the step) out of the loss and of the results"
                )

    def observers(self, optimize: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Equations with effects: those that trainers can carry out, by position, and the names of the others."""
        positions = [i for i, e in enumerate(self.eqns) if e.effects]
        if not positions:
            return (), ()
        # what the servers make is seen by no trainer; a gradient is, as the trainer's own
        seeds = dict.fromkeys((self.vars[n] for n in self.opt_state), 1)
        hidden = [v for i in optimize if self.eqns[i].primitive is not mark_p for v in self.eqns[i].outvars]
        enters = propagate(self.eqns, seeds, dict.fromkeys(hidden, 1))
        seen = [i for i in positions if not any(isinstance(a, Var) and enters.get(a) for a in self.eqns[i].invars)]
        return tuple(seen), tuple(self.eqns[i].primitive.name for i in positions if i not in seen)

    def with_roles(self, optimize: Sequence[int]) -> Program:
        """The whole step with exact roles: optimize by the cut, backward by what differentiation made."""
        in_optimize = set(optimize)
        roles = []
        for i, eqn in enumerate(self.eqns):
            if i in in_optimize or eqn.primitive is mark_p:
                roles.append(OPTIMIZE)
            else:
                roles.append(BACKWARD if self.derived[i] else FORWARD)
        return dataclasses.replace(self.source, jaxpr=self.jaxpr, roles=tuple(roles))


def _is_derivative(eqn: JaxprEqn) -> bool:
    """Whether differentiation made an equation: it transposes, or is a loop around equations that do."""
    if "transpose(" in scope_of(eqn):
        return True
    if eqn.primitive.name == "custom_linear_solve":  # it holds its own transpose, whether it was differentiated or not
        return False
    return any(
        e.primitive is mark_p or "transpose(" in scope_of(e)
        for sub in jaxprs_in_params(eqn.params)
        for e in equations(sub)
    )
