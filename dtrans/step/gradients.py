"""Which values of a training step are the gradients of its parameters.

They are the operands of marks (`dtrans.step.marks`) where the step has them. A step whose author
called `jax.grad` gets them by inference: the gradient of `params/w` is the value that

  - has the shape of `params/w`,
  - was made by differentiation (its equation lies under `transpose(...)` in the name stack, or
    holds such equations: a scan over micro-batches), and is used by an equation that was not,
  - reaches the new `params/w` through equations that keep that shape; or, where none does (Muon
    multiplies matrices), through any equations.

More than one such value, marked or found, is the gradient where the update reads their sum alone,
as an accumulation over micro-batches that is written out: the first value that is linear in all of
them stands for the gradient, and the sum belongs to the backward pass. Otherwise several values are
an error that lists them, and so is a loop that may have taken several steps: what it makes becomes
the new parameter without the old one being read again.

A loop over micro-batches may carry more than gradients (a count of tokens, the loss). So it is each
output of an equation that is made by differentiation, or is not (`derivatives`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    HoldsJaxpr,
    JaxprEqn,
    Literal,
    Var,
    equations_inside,
    has_bodies,
    jaxprs_in_params,
    linear_group,
    opened,
    scope_of,
)
from dtrans.errors import GradientError
from dtrans.ir.dataflow import backward_slice, is_zero_array, propagate
from dtrans.ir.display import short_type
from dtrans.ir.inline import inline_calls
from dtrans.ir.interpret import ForwardAnalysis, forward, forward_jaxpr
from dtrans.ir.program import Program
from dtrans.step.marks import mark_p


@dataclasses.dataclass(frozen=True, eq=False)
class OpenStep(HoldsJaxpr):
    """A training step with its calls inlined, and what is looked up in it.

    Attributes:
      source: the step as it was traced.
      jaxpr: its equations, calls inlined.
    """

    source: Program
    jaxpr: ClosedJaxpr

    @property
    def params(self) -> tuple[str, ...]:
        return self.source.args[0].names

    @property
    def opt_state(self) -> tuple[str, ...]:
        return self.source.args[1].names

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """The names of inputs that are no state."""
        return tuple(n for n in self.source.in_names if n not in self.state)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The names of outputs that are no state."""
        return tuple(n for n in self.source.out_names if n not in self.state)

    @cached_property
    def state(self) -> set[str]:
        return {*self.params, *self.opt_state}

    @cached_property
    def vars(self) -> dict[str, Var]:
        """Name to input."""
        return dict(zip(self.source.in_names, self.inner.invars, strict=True))

    @cached_property
    def names(self) -> dict[Var, str]:
        """Input to name."""
        return {v: n for n, v in self.vars.items()}

    @cached_property
    def outs(self) -> dict[str, Atom]:
        """Name to output."""
        return dict(zip(self.source.out_names, self.inner.outvars, strict=True))

    @cached_property
    def made_by(self) -> dict[Var, int]:
        """Value to the position of the equation that makes it."""
        return {v: i for i, e in enumerate(self.eqns) for v in e.outvars}

    @cached_property
    def derived(self) -> list[bool]:
        """Whether differentiation made each equation."""
        return [_is_derivative(e) for e in self.eqns]

    @cached_property
    def derivatives(self) -> frozenset[Var]:
        """The values that differentiation made."""
        return frozenset(
            v for e in self.eqns for v, d in zip(e.outvars, _derived_outputs(e), strict=True) if d
        )

    def derivatives_behind(self, outputs: Sequence[Atom], stop: Collection[Var] = ()) -> list[int]:
        """Return the positions of equations that make the derivatives which `outputs` are made
        of."""
        kept, _ = backward_slice(self.eqns, outputs, stop)
        read = {
            a
            for a in (*outputs, *(a for i in kept for a in self.eqns[i].invars))
            if isinstance(a, Var)
        }
        wanted = (read & self.derivatives) - set(stop)
        return [i for i in kept if not wanted.isdisjoint(self.eqns[i].outvars)]


def open_step(program: Program) -> OpenStep:
    """Inline the calls of a step.

    Raises:
      GradientError: it is not a training step.
    """
    if len(program.args) < 2:
        raise GradientError(
            f"{program.name} is not a training step: it must be a function of (params, opt_state, "
            "*batch)"
        )
    if program.ambiguous_outputs:
        raise GradientError(
            f"{program.name} returns its new state where it cannot be told: "
            f"{program.ambiguous_outputs}. "
            "Return (params, opt_state, loss, ...) in this order, or a dict with the keys of the "
            "arguments"
        )
    step = OpenStep(program, inline_calls(program.jaxpr))
    missing = [n for n in (*step.params, *step.opt_state) if n not in step.outs]
    if missing or not step.params:
        raise GradientError(
            f"{program.name} is not a training step: it does not return a new "
            f"{missing[0] if missing else 'value of its first argument'}; "
            "it must return (params, opt_state, loss), each of the structure that came in"
        )
    for n in (*step.params, *step.opt_state):
        had, now = step.vars[n].aval, step.outs[n].aval
        if (had.shape, had.dtype) != (now.shape, now.dtype):
            raise GradientError(
                f"{n} goes in as {short_type(had)} and comes out as {short_type(now)}: a step must "
                "keep the "
                "type of its state"
            )
    return step


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of a step.

    Attributes:
      of: parameter to the value that stands for its gradient: the output of its mark, if it has
        one; or a sum.
      marked: True where the user has marked them.
      terms: the values that differentiation made, where `of` has sums of them.
      sums: the positions of the equations that add these up.
    """

    of: Mapping[str, Var]
    marked: bool
    terms: frozenset[Var]
    sums: frozenset[int] = frozenset()


def gradients_of(step: OpenStep) -> Gradients:
    """Return the gradients that are marked; or else those that are found.

    Raises:
      GradientError: gradients that cannot be told.
    """
    return marked(step) or _inferred(step)


def marked(step: OpenStep) -> Gradients | None:
    """Return the gradients of a step that has marks."""
    marks: dict[str, list[Var]] = {}
    for eqn in step.eqns:
        if eqn.primitive is not mark_p:
            continue
        leaf = _leaf_behind(step, eqn.invars[1])
        if leaf is None:
            raise GradientError(
                "dtrans.value_and_grad was taken with respect to "
                f"`{eqn.params['leaf'] or 'its argument'}`, "
                "which is not a leaf of "
                f"`{step.params[0].split('/')[0]}`, the first argument of {step.source.name}. Take "
                "the gradient of "
                "what is computed from a leaf (a perturbed one) with jax.value_and_grad, which "
                "every strategy but a "
                "pipeline finds by itself"
            )
        shape = step.vars[leaf].aval.shape
        if eqn.outvars[0].aval.shape != shape:
            raise GradientError(
                f"the marked gradient of {leaf} is {short_type(eqn.outvars[0].aval)} in "
                f"{step.source.name}, "
                f"where the leaf is {list(shape)}: gradients of single examples "
                "(dtrans.value_and_grad under vmap) "
                "cannot be averaged over parts of the batch; take the gradient of the mean loss"
            )
        marks.setdefault(leaf, []).append(eqn.outvars[0])
    if not marks:
        return None
    among = [v for own in marks.values() for v in own]
    found: dict[str, Var] = {}
    terms: set[Var] = set()
    sums: set[int] = set()
    for leaf, own in marks.items():
        reach = _read_marks(step, leaf, own)
        total = (
            Total(reach[0], frozenset(reach))
            if len(reach) == 1
            else sum_of(step, leaf, reach, among)
        )
        if total is None:
            raise GradientError(
                f"{leaf} has {len(reach)} marked gradients in {step.source.name}, and its update "
                "does not read their "
                f"sum alone; {ADD_UP}"
            )
        found[leaf] = total.value
        terms |= total.terms
        sums |= total.positions
    return Gradients(found, True, frozenset(terms), frozenset(sums))


ADD_UP = (
    "add them up before anything else reads them (grads = jax.tree.map(jnp.add, first, second))"
)


def _read_marks(step: OpenStep, leaf: str, own: Sequence[Var]) -> list[Var]:
    """Return the marks of a leaf that its new value is made of; of a leaf that is not updated,
    those that are read."""
    if len(own) == 1:
        return list(own)
    for outputs in ([step.outs[leaf]], step.inner.outvars):
        met = backward_slice(step.eqns, outputs, own)[1]
        if read := [v for v in own if v in met]:
            return read
    return list(own[:1])


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """A sum of several gradients of one leaf: its value, its terms, and the positions of the
    equations that add up."""

    value: Var
    terms: frozenset[Var]
    positions: frozenset[int] = frozenset()


def sum_of(
    step: OpenStep, leaf: str, terms: Collection[Var], graded: Iterable[Var]
) -> Total | None:
    """Return the first value that is linear in all of several gradients of a leaf, and has nothing
    else in it.

    Factors may be anything that no gradient enters, as one over a count of tokens.

    Args:
      terms: gradients of the leaf.
      graded: the gradients of all leaves.
    """
    first_to_last = sorted(terms, key=step.made_by.__getitem__)
    enters = {
        v: 1 << k for k, v in enumerate(first_to_last)
    }  # the terms of each value that is linear in them
    all_terms = (1 << len(enters)) - 1
    of_gradients = propagate(step.eqns, {}, dict.fromkeys([*terms, *graded], 1))
    makers = {v: step.eqns[i] for v, i in step.made_by.items()}
    is_fixed = lambda a: isinstance(a, Literal) or not of_gradients.get(a)
    has_terms = lambda a: isinstance(a, Var) and a in enters
    positions: set[int] = set()
    for i, eqn in enumerate(step.eqns):
        read = {k for k, a in enumerate(eqn.invars) if has_terms(a)}
        if not read or not enters.keys().isdisjoint(eqn.outvars):
            continue
        together = linear_group(eqn, read)
        added = all(k in read or is_zero_array(eqn.invars[k], makers) for k in together)
        others = [a for k, a in enumerate(eqn.invars) if k not in together]
        if not (together and added and all(map(is_fixed, others))):
            continue
        bits = functools.reduce(
            operator.or_, (enters[a] for a in eqn.invars if isinstance(a, Var) and a in enters)
        )
        enters.update(dict.fromkeys(eqn.outvars, bits))
        positions.add(i)
        (out, *more) = eqn.outvars
        if bits == all_terms and not more and out.aval.shape == step.vars[leaf].aval.shape:
            needed, _ = backward_slice(step.eqns, [out], terms)
            return Total(out, frozenset(terms), frozenset(positions & set(needed)))
    return None


def _leaf_behind(step: OpenStep, atom: Atom) -> str | None:
    """The parameter that a value is, or was made from one operand at a time, as by a cast."""
    while isinstance(atom, Var) and atom in step.made_by:
        eqn = step.eqns[step.made_by[atom]]
        operands = [a for a in eqn.invars if isinstance(a, Var)]
        if len(operands) != 1 or operands[0].aval.shape != atom.aval.shape:
            return None
        atom = operands[0]
    name = step.names.get(atom) if isinstance(atom, Var) else None
    return name if name in step.params else None


def _inferred(step: OpenStep) -> Gradients:
    """Return the values that must be gradients; see the module's docstring."""
    candidates = crossing(step)
    of_shape: dict[tuple[int, ...], set[Var]] = {}
    for v in candidates:
        of_shape.setdefault(v.aval.shape, set()).add(v)
    new = {a for n in step.params if isinstance(a := step.outs[n], Var) and a is not step.vars[n]}
    from_batch = propagate(
        step.eqns, {step.vars[n]: 1 for n in step.batch}, dict.fromkeys(candidates, 0)
    )
    reads_params = propagate(
        step.eqns, {step.vars[n]: 1 for n in step.params}, dict.fromkeys(candidates, 0)
    )
    found: dict[str, Var] = {}
    terms: set[Var] = set()
    sums: set[int] = set()
    for name in step.params:
        out = step.outs[name]
        fits = of_shape.get(step.vars[name].aval.shape, set())
        reach = candidates_for(
            step, name, fits, stop=new - {out} - fits
        )  # a teacher follows; the gradient is not its
        if len(reach) == 1:
            (candidate,) = reach
            _check_inferred(step, name, candidate, reads_params)
            found[name] = candidate
            terms.add(candidate)
            continue
        if reach and (total := sum_of(step, name, reach, candidates)) is not None:
            found[name] = total.value
            terms |= total.terms
            sums |= total.positions
            continue
        # no candidate is right for a leaf that never changes, or that the loss does not use: both
        # are told apart from a hidden gradient by whether the batch enters its update, through a
        # derivative
        if not reach and not (
            isinstance(out, Var) and from_batch.get(out) and step.derivatives_behind([out])
        ):
            continue
        listed = (
            "\n".join(
                f"  {describe(step, v)}"
                for v in sorted(reach or fits, key=step.made_by.__getitem__)
            )
            or "  none"
        )
        several = (
            f"if the gradient of {name} is the sum of several of these, {ADD_UP}; else "
            if reach
            else ""
        )
        raise GradientError(
            f"cannot tell the gradient of {name} ({short_type(step.vars[name].aval)}) in "
            f"{step.source.name}; candidates:\n{listed}\n"
            f"{several}take gradients with dtrans.value_and_grad in place of jax.value_and_grad, "
            "or build the step "
            "with dtrans.make_train_step"
        )
    return Gradients(found, False, frozenset(terms), frozenset(sums))


def nested(step: OpenStep, gradients: Collection[Var]) -> str:
    """Return the first equation between two derivatives, outside of both; empty where none is."""
    kept, _ = backward_slice(step.eqns, gradients)
    inside: set[Var] = set()
    for i in kept:
        eqn = step.eqns[i]
        if step.derived[i]:
            inside.update(v for v in eqn.outvars if v in step.derivatives)
        elif any(isinstance(a, Var) and a in inside for a in eqn.invars):
            if "jvp(" not in scope_of(eqn):
                return f"{short_type(eqn.outvars[0].aval)} = {eqn.primitive.name}"
            inside.update(eqn.outvars)
    return ""


def _check_inferred(
    step: OpenStep, name: str, candidate: Var, reads_params: Mapping[Var, int]
) -> None:
    """Refuse what may be the new parameter itself, made by a loop that takes several steps."""
    out, eqn = step.outs[name], step.eqns[step.made_by[candidate]]
    if "transpose(" not in scope_of(eqn) and not (isinstance(out, Var) and reads_params.get(out)):
        raise GradientError(
            f"cannot tell the gradient of {name} in {step.source.name}: {eqn.primitive.name} "
            "differentiates "
            f"inside, and what it makes becomes the new {name} without the old one being read "
            "again, as when a "
            "loop takes several steps. A step may take one update"
        )


def candidates_for(
    step: OpenStep, name: str, among: Collection[Var], stop: Collection[Var] = frozenset()
) -> set[Var]:
    """What may be the gradient of a leaf: those of its shape that its new value is made of, not by
    way of `stop`."""
    out, shape = step.outs[name], step.vars[name].aval.shape
    fits = {v for v in among if v.aval.shape == shape}
    met = _shape_keeping(step, out, shape, {*fits, *stop}) or _reached(step, out, {*fits, *stop})
    return met & fits


def crossing(step: OpenStep) -> set[Var]:
    """Values made by differentiation and used by something that was not."""
    used = {
        a
        for e, d in zip(step.eqns, step.derived, strict=True)
        if not d
        for a in e.invars
        if isinstance(a, Var)
    }
    used |= {a for a in step.inner.outvars if isinstance(a, Var)}
    return used & step.derivatives


def _shape_keeping(step: OpenStep, out: Atom, shape: tuple[int, ...], fits: set[Var]) -> set[Var]:
    """The candidates met walking back from `out` through values of one shape."""
    stack, seen, met = [out], set(), set()
    while stack:
        atom = stack.pop()
        if isinstance(atom, Literal) or atom in seen or atom.aval.shape != shape:
            continue
        seen.add(atom)
        if atom in fits:
            met.add(atom)
        elif atom in step.made_by:
            stack += step.eqns[step.made_by[atom]].invars
    return met


def _reached(step: OpenStep, out: Atom, fits: set[Var]) -> set[Var]:
    """The candidates met walking back from `out` through anything."""
    return backward_slice(step.eqns, [out], fits)[1] & fits if fits else set()


def counts_rows(step: OpenStep, count: Var, out: Atom) -> bool:
    """Whether a count grows by another number than one, as by the rows of a batch, and no other
    state is made of it."""
    made = [
        e for e in step.eqns if e.primitive.name == "add" and out in e.outvars and count in e.invars
    ]
    if not any(isinstance(a, Literal) and a.val != 1 for e in made for a in e.invars):
        return False
    enters = propagate(step.eqns, {count: 1}, {})
    kept = [a for n, a in step.outs.items() if n in step.vars and a is not out]
    return not any(isinstance(a, Var) and enters.get(a) for a in kept)


def describe(step: OpenStep, var: Var) -> str:
    """A value, and how it was made."""
    eqn = step.eqns[step.made_by[var]]
    return f"{short_type(var.aval)} = {eqn.primitive.name} ({scope_of(eqn) or 'no name stack'})"


def _derived_outputs(eqn: JaxprEqn) -> list[bool]:
    """Return for each output of an equation whether differentiation made it.

    Of a loop or a branch around derivatives, those outputs that a derivative enters: a loop may
    carry others, too.
    """
    if not _is_derivative(eqn):
        return [False] * len(eqn.outvars)
    facts = forward(_DERIVED, [eqn], {})
    return [facts.of(v) for v in eqn.outvars]


def _is_derived(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
    """Return for each output whether a derivative enters it; None where the bodies decide."""
    count = len(eqn.outvars)
    if eqn.primitive is mark_p or any(ins) or "transpose(" in scope_of(eqn):
        return [True] * count
    if not _is_derivative(eqn):
        return [False] * count
    if has_bodies(eqn):
        return None
    inner = [opened(x) for x in jaxprs_in_params(eqn.params)]
    if len(inner) != 1 or len(inner[0].outvars) != count:
        return [True] * count
    facts = forward_jaxpr(_DERIVED, inner[0], [False] * len(inner[0].invars))
    return [facts.of(a) for a in inner[0].outvars]


_DERIVED: ForwardAnalysis[bool] = ForwardAnalysis(
    operator.or_, _is_derived, default=lambda aval, value: False, decide=operator.or_
)


def _is_derivative(eqn: JaxprEqn) -> bool:
    """Whether differentiation made an equation: it transposes, or is a loop around equations that
    do."""
    if "transpose(" in scope_of(eqn):
        return True
    if (
        eqn.primitive.name == "custom_linear_solve"
    ):  # it holds its own transpose, whether it was differentiated or not
        return False
    return any(e.primitive is mark_p or "transpose(" in scope_of(e) for e in equations_inside(eqn))
