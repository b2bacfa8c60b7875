"""Inference of the values in a training step that are the gradients of its parameters.

They are the operands of marks (`dtrans.step.marks`) if the step has marks. For a step that calls
`jax.grad`, the gradient of `params/w` is the value that

  - has the shape of `params/w`,
  - comes from differentiation (its equation is under `transpose(...)` in the name stack, or
    contains such equations: a scan over micro-batches), and is read by an equation that does not,
  - reaches the new `params/w` through equations that keep that shape; if there is none (Muon
    multiplies matrices), through any equations.

Several such values, marked or found, are allowed if the update reads their sum alone, as in an
unrolled accumulation over micro-batches. The first value that is linear in all of them is the
gradient, and the sum belongs to the backward pass. Otherwise several values are an error that lists
them. A loop that may have taken several steps is an error too: its output becomes the new parameter
without the old one being read again.

A loop over micro-batches may carry more than gradients (a count of tokens, the loss), so that
`derivatives` has single outputs of equations.
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
from dtrans.ir.dataflow import backward_slice, bits_of, is_zero_array, propagate, variables
from dtrans.ir.display import short_type
from dtrans.ir.inline import inline_calls
from dtrans.ir.interpret import ForwardAnalysis, forward, forward_jaxpr
from dtrans.ir.program import Program
from dtrans.ir.selection import invert
from dtrans.step.marks import mark_p


@dataclasses.dataclass(frozen=True, eq=False)
class OpenStep(HoldsJaxpr):
    """Training step with its calls inlined, and lookups in it.

    Attributes:
      source: the traced step.
      jaxpr: its equations, with calls inlined.
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
        """Names of inputs other than state."""
        return tuple(n for n in self.source.in_names if n not in self.state)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of outputs other than state."""
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
        return invert(self.vars)

    @cached_property
    def outs(self) -> dict[str, Atom]:
        """Name to output."""
        return dict(zip(self.source.out_names, self.inner.outvars, strict=True))

    @cached_property
    def producers(self) -> dict[Var, int]:
        """Position of the equation that computes each value."""
        return {v: i for i, e in enumerate(self.eqns) for v in e.outvars}

    @cached_property
    def derived(self) -> list[bool]:
        """For each equation, True if it comes from differentiation."""
        return [_is_derivative(e) for e in self.eqns]

    @cached_property
    def derivatives(self) -> frozenset[Var]:
        """Values that come from differentiation."""
        return frozenset(
            v for e in self.eqns for v, d in zip(e.outvars, _derived_outputs(e), strict=True) if d
        )

    def derivatives_behind(self, outputs: Sequence[Atom], stop: Collection[Var] = ()) -> list[int]:
        """Return the positions of equations with derivatives that `outputs` read."""
        positions, _ = backward_slice(self.eqns, outputs, stop)
        read = list(outputs)
        for i in positions:
            read += self.eqns[i].invars
        wanted = {a for a in read if isinstance(a, Var) and a in self.derivatives} - set(stop)
        return [i for i in positions if not wanted.isdisjoint(self.eqns[i].outvars)]


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
            f"{program.name} returns its new state in an unknown place: "
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
                "keep the type of its state"
            )
    return step


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of a step.

    Attributes:
      of: parameter to the value for its gradient: the output of its mark, if it has one; or a sum.
      marked: True if the user marked them.
      terms: values that come from differentiation, if `of` has sums of them.
      sums: positions of the equations of these sums.
    """

    of: Mapping[str, Var]
    marked: bool
    terms: frozenset[Var]
    sums: frozenset[int] = frozenset()


def gradients_of(step: OpenStep) -> Gradients:
    """Return the gradients that are marked, or else inferred.

    Raises:
      GradientError: ambiguous gradients.
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
    among = [v for leaf_marks in marks.values() for v in leaf_marks]
    found: dict[str, Var] = {}
    terms: set[Var] = set()
    sums: set[int] = set()
    for leaf, leaf_marks in marks.items():
        reach = _read_marks(step, leaf, leaf_marks)
        if len(reach) == 1:
            total: Total | None = Total(reach[0], frozenset(reach))
        else:
            total = sum_of(step, leaf, reach, among)
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


def _read_marks(step: OpenStep, leaf: str, leaf_marks: Sequence[Var]) -> list[Var]:
    """Return the marks that a leaf's new value reads; for a leaf without update, those that are
    read."""
    if len(leaf_marks) == 1:
        return list(leaf_marks)
    for outputs in ([step.outs[leaf]], step.inner.outvars):
        met = backward_slice(step.eqns, outputs, leaf_marks)[1]
        if read := [v for v in leaf_marks if v in met]:
            return read
    return list(leaf_marks[:1])


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """Sum of several gradients of one leaf: its value, its terms, and the positions of the
    additions."""

    value: Var
    terms: frozenset[Var]
    positions: frozenset[int] = frozenset()


def sum_of(
    step: OpenStep, leaf: str, terms: Collection[Var], graded: Iterable[Var]
) -> Total | None:
    """Return the first value that is linear in all gradients of a leaf and reads nothing else.

    Factors may be anything that no gradient enters, such as one over a count of tokens.

    Args:
      step: the step.
      leaf: the leaf.
      terms: gradients of the leaf.
      graded: gradients of all leaves.
    """
    first_to_last = sorted(terms, key=step.producers.__getitem__)
    # bit set of the terms in which a value is linear
    enters = {v: 1 << k for k, v in enumerate(first_to_last)}
    all_terms = (1 << len(enters)) - 1
    of_gradients = propagate(step.eqns, {}, dict.fromkeys([*terms, *graded], 1))
    makers = {v: step.eqns[i] for v, i in step.producers.items()}
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
    """Return the parameter that a value equals, up to unary equations such as casts."""
    while isinstance(atom, Var) and atom in step.producers:
        eqn = step.eqns[step.producers[atom]]
        operands = variables(eqn.invars)
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
        # a teacher reads the new value of its student, whose gradient is not the teacher's
        reach = candidates_for(step, name, fits, stop=new - {out} - fits)
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
        # A leaf that never changes, or that the loss does not read, has no candidate. A hidden
        # gradient differs from these: the batch enters its update through a derivative.
        if not reach and not (
            isinstance(out, Var) and from_batch.get(out) and step.derivatives_behind([out])
        ):
            continue
        in_order = sorted(reach or fits, key=step.producers.__getitem__)
        listed = "\n".join(f"  {describe(step, v)}" for v in in_order) or "  none"
        several = ""
        if reach:
            several = f"if the gradient of {name} is the sum of several of these, {ADD_UP}; else "
        raise GradientError(
            f"cannot tell the gradient of {name} ({short_type(step.vars[name].aval)}) in "
            f"{step.source.name}; candidates:\n{listed}\n"
            f"{several}take gradients with dtrans.value_and_grad in place of jax.value_and_grad, "
            "or build the step "
            "with dtrans.make_train_step"
        )
    return Gradients(found, False, frozenset(terms), frozenset(sums))


def nested(step: OpenStep, gradients: Collection[Var]) -> str:
    """Return the first equation between two derivatives, outside of both; empty if there is
    none."""
    positions, _ = backward_slice(step.eqns, gradients)
    inside: set[Var] = set()
    for i in positions:
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
    """Refuse a value that may be the new parameter itself, from a loop of several steps."""
    out, eqn = step.outs[name], step.eqns[step.producers[candidate]]
    if "transpose(" not in scope_of(eqn) and not (isinstance(out, Var) and reads_params.get(out)):
        raise GradientError(
            f"cannot tell the gradient of {name} in {step.source.name}: {eqn.primitive.name} "
            f"differentiates inside and returns the new {name}, as a loop of several steps does. "
            "A step may take one update; move the loop out of the step"
        )


def candidates_for(
    step: OpenStep, name: str, among: Collection[Var], stop: Collection[Var] = frozenset()
) -> set[Var]:
    """Return the possible gradients of a leaf: those that its new value reads, not through
    `stop`."""
    out, shape = step.outs[name], step.vars[name].aval.shape
    fits = {v for v in among if v.aval.shape == shape}
    met = _shape_keeping(step, out, shape, {*fits, *stop}) or _reached(step, out, {*fits, *stop})
    return met & fits


def crossing(step: OpenStep) -> set[Var]:
    """Return values that come from differentiation and are read by other equations."""
    used = {
        a
        for e, d in zip(step.eqns, step.derived, strict=True)
        if not d
        for a in e.invars
        if isinstance(a, Var)
    }
    used |= set(variables(step.inner.outvars))
    return used & step.derivatives


def _shape_keeping(step: OpenStep, out: Atom, shape: tuple[int, ...], fits: set[Var]) -> set[Var]:
    """Return the candidates on a walk back from `out` through values of one shape."""
    stack, seen, met = [out], set(), set()
    while stack:
        atom = stack.pop()
        if isinstance(atom, Literal) or atom in seen or atom.aval.shape != shape:
            continue
        seen.add(atom)
        if atom in fits:
            met.add(atom)
        elif atom in step.producers:
            stack += step.eqns[step.producers[atom]].invars
    return met


def _reached(step: OpenStep, out: Atom, fits: set[Var]) -> set[Var]:
    """Return the candidates on a walk back from `out` through any values."""
    return backward_slice(step.eqns, [out], fits)[1] & fits if fits else set()


def counts_rows(step: OpenStep, count: Var, out: Atom) -> bool:
    """Return True if a count grows by another number than one, as by rows, and no other state
    reads it."""
    additions = [
        e for e in step.eqns if e.primitive.name == "add" and out in e.outvars and count in e.invars
    ]
    if not any(isinstance(a, Literal) and a.val != 1 for e in additions for a in e.invars):
        return False
    enters = propagate(step.eqns, {count: 1}, {})
    others = [a for n, a in step.outs.items() if n in step.vars and a is not out]
    return not bits_of(enters, *others)


def describe(step: OpenStep, var: Var) -> str:
    """Describe a value and its equation."""
    eqn = step.eqns[step.producers[var]]
    return f"{short_type(var.aval)} = {eqn.primitive.name} ({scope_of(eqn) or 'no name stack'})"


def _derived_outputs(eqn: JaxprEqn) -> list[bool]:
    """Return for each output of an equation if it comes from differentiation.

    A loop or a branch around derivatives has other outputs as well.
    """
    if not _is_derivative(eqn):
        return [False] * len(eqn.outvars)
    facts = forward(_DERIVED, [eqn], {})
    return [facts.of(v) for v in eqn.outvars]


def _is_derived(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
    """Return for each output if a derivative enters it; None if the bodies decide."""
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
    """Return True if an equation comes from differentiation, or is a loop around such equations."""
    if "transpose(" in scope_of(eqn):
        return True
    # this contains its transpose even if it was not differentiated
    if eqn.primitive.name == "custom_linear_solve":
        return False
    return any(e.primitive is mark_p or "transpose(" in scope_of(e) for e in equations_inside(eqn))
