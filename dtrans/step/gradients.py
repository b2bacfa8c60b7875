"""Search for the values in a training step that are the gradients of its parameters.

Strategies must know these values, because trainers reduce gradients or send them to servers. If the
step calls `dtrans.value_and_grad`, gradients are marked (`dtrans.step.marks`): they are the
operands of the marks. If the step calls `jax.grad`, this module infers the gradient of `params/w`.
It is the value that

  - has the shape of `params/w`,
  - is a *derivative*: its equation is under `transpose(...)` in the name stack, or contains
    equations under `transpose(...)` (a scan over micro-batches),
  - is read by an equation that is not a derivative,
  - reaches the new `params/w` through equations that keep that shape. If there is no such path
    (Muon multiplies matrices), values on the path may have any shape. Paths through a single
    number, such as the norm of all gradients, then count only if there is no other path. If
    `params/w` is frozen, there is no path from any derivative. But a norm of all gradients may read
    its gradient, and other new parameters depend on this norm. The module then finds the gradient
    through this norm.

Several values may have these properties, marked or inferred. An example is an unrolled loop over
micro-batches. If the update reads only their sum, the first value that is linear in all of them is
the gradient. The additions then belong to the backward pass. Otherwise the module raises an error,
which lists the values.

A step with a loop over several updates is another error. The module assumes such a loop if two
conditions hold. An output of a loop becomes the new parameter, and no later equation reads the old
parameter.

A loop over micro-batches may return derivatives together with other values, such as the loss. So
`InlinedStep.derivatives` is a set of values, not of equations.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from dtrans._jax import (
    LOOPS,
    Atom,
    ClosedJaxpr,
    HoldsJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    body_indices,
    equations_inside,
    has_bodies,
    jaxprs_in_params,
    line_of,
    linear_group,
    opened,
    scope_of,
)
from dtrans.errors import GradientError
from dtrans.ir.dataflow import (
    backward_slice,
    bits_of,
    is_zero_array,
    producer_positions,
    propagate,
    variables,
    variables_read,
)
from dtrans.ir.display import short_type
from dtrans.ir.inline import inline_calls
from dtrans.ir.interpret import ForwardAnalysis, forward, forward_jaxpr
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.step.capture import value_and_grad_p
from dtrans.step.marks import mark_p


@dataclasses.dataclass(frozen=True, eq=False)
class InlinedStep(HoldsJaxpr):
    """Training step with its calls (`jax.jit`) inlined, and lookups of its values by name.

    Functions of this package search for gradients in the flat list of equations of this object.

    Attributes:
      source: the traced step.
      jaxpr: the step's jaxpr, with calls inlined.
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
        """Names of the step's inputs other than parameters and optimizer state."""
        return tuple(n for n in self.source.in_names if n not in self.state)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of the step's outputs other than parameters and optimizer state, such as `loss`."""
        return tuple(n for n in self.source.out_names if n not in self.state)

    @cached_property
    def state(self) -> set[str]:
        return {*self.params, *self.opt_state}

    @cached_property
    def vars(self) -> dict[str, Var]:
        """Variable of each input, by the input's name."""
        return dict(zip(self.source.in_names, self.inner.invars, strict=True))

    @cached_property
    def names(self) -> dict[Var, str]:
        """Name of each input, by the input's variable."""
        return {v: n for n, v in self.vars.items()}

    @cached_property
    def outs(self) -> dict[str, Atom]:
        """Variable or literal of each output, by the output's name."""
        return dict(zip(self.source.out_names, self.inner.outvars, strict=True))

    @cached_property
    def producers(self) -> dict[Var, int]:
        """Index of the equation that computes each value."""
        return producer_positions(self.eqns)

    @cached_property
    def derived(self) -> list[bool]:
        """For each equation, True if the backward pass contains it or an equation of its body."""
        return [_is_derivative(e) for e in self.eqns]

    @cached_property
    def derivatives(self) -> frozenset[Var]:
        """Values that equations of the backward pass compute."""
        found: set[Var] = set()
        for eqn in self.eqns:
            found.update(_derived_outputs(eqn))
        return frozenset(found)

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the names among `names` for which the step returns a new value."""
        return [n for n in names if self.outs[n] is not self.vars[n]]

    def derivatives_behind(self, outputs: Sequence[Atom], stop: Collection[Var] = ()) -> list[int]:
        """Return the indices of backward equations on which `outputs` depend.

        The division of a step uses this to detect updates that read a derivative other than a
        gradient.

        Args:
          outputs: the values.
          stop: variables at which the search ends, such as the known gradients.
        """
        positions, _ = backward_slice(self.eqns, outputs, stop)
        read = list(outputs)
        for i in positions:
            read += self.eqns[i].invars
        wanted = self.derivatives.intersection(variables(read)) - set(stop)
        return [i for i in positions if not wanted.isdisjoint(self.eqns[i].outvars)]


def inline_step(program: Program) -> InlinedStep:
    """Inline the calls of a traced training step, and check that the program is a training step.

    Raises:
      GradientError: the program is not a training step.
    """
    if len(program.args) < 2:
        raise GradientError(
            f"{program.name} is not a training step: it must be a function of (params, opt_state, "
            "*batch)"
        )
    if program.ambiguous_outputs:
        raise GradientError(
            f"{program.name} returns its new state at an ambiguous position: "
            f"{program.ambiguous_outputs}; return (params, opt_state, loss, ...) in this order, or "
            "a dict whose keys are the names of the arguments"
        )
    step = InlinedStep(program, inline_calls(program.jaxpr))
    missing = [n for n in (*step.params, *step.opt_state) if n not in step.outs]
    if missing or not step.params:
        (first, *_) = [*missing, "value of its first argument"]
        raise GradientError(
            f"{program.name} is not a training step: it does not return a new {first}; return "
            "(params, opt_state, loss), where params and opt_state have the arguments' structure"
        )
    for n in (*step.params, *step.opt_state):
        before, after = step.vars[n].aval, step.outs[n].aval
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise GradientError(
                f"{n} is {short_type(before)} as an argument and {short_type(after)} in the "
                f"result of {program.name}; a step must keep the type of its state"
            )
    return step


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients that were found in a step: one value for each parameter that has a gradient.

    Attributes:
      of: the gradient of each parameter. This is a marked gradient, or an inferred one if there are
        no marks, or the sum of several such gradients.
      marked: True if the user marked the gradients (`dtrans.value_and_grad`).
      terms: all gradients; if a gradient is a sum of several, the terms of this sum.
      sums: indices of the equations that compute the sums.
    """

    of: Mapping[str, Var]
    marked: bool
    terms: frozenset[Var]
    sums: frozenset[int] = frozenset()


def gradients_of(step: InlinedStep) -> Gradients:
    """Find a step's gradients: those that `dtrans.value_and_grad` marked, or else inferred ones.

    Raises:
      GradientError: several values may be the gradient of a leaf.
    """
    return marked(step) or _inferred(step)


def marked(step: InlinedStep) -> Gradients | None:
    """Return the gradients that `dtrans.value_and_grad` marked; None if the step has no marks.

    Raises:
      GradientError: the step differentiates with respect to a value that is no parameter. Or a
        gradient has another shape than its parameter, or a parameter has several gradients without
        a sum.
    """
    marks: dict[str, list[Var]] = {}
    for eqn in step.eqns:
        if eqn.primitive is not mark_p:
            continue
        leaf = _leaf_behind(step, eqn.invars[1])
        if leaf is None:
            argument = eqn.params["leaf"] or "its argument"
            owner = step.names.get(eqn.invars[1]) if isinstance(eqn.invars[1], Var) else None
            if owner in step.opt_state:
                raise GradientError(
                    f"dtrans.value_and_grad differentiates with respect to {owner}, a leaf of the "
                    f"second argument of {step.source.name}; keep {owner} in the first argument"
                )
            raise GradientError(
                f"dtrans.value_and_grad differentiates with respect to `{argument}`, which is not "
                f"a leaf of `{step.params[0].split('/')[0]}`, the first argument of "
                f"{step.source.name}. To differentiate with respect to a value computed from "
                "leaves (perturbed parameters, say), use jax.value_and_grad. Every strategy except "
                "dtrans.pipeline accepts steps that use jax.value_and_grad, too"
            )
        shape = step.vars[leaf].aval.shape
        if eqn.outvars[0].aval.shape != shape:
            raise GradientError(
                f"the marked gradient of {leaf} in {step.source.name} is "
                f"{short_type(eqn.outvars[0].aval)}, but the leaf has shape {list(shape)}; "
                "per-example gradients (dtrans.value_and_grad under vmap) cannot be averaged over "
                "parts of the batch. Take the gradient of the mean loss, or take the gradients of "
                f"rows with jax.grad. {OTHER_GRADIENTS}"
            )
        marks.setdefault(leaf, []).append(eqn.outvars[0])
    if not marks:
        return None
    among: list[Var] = []
    for leaf_marks in marks.values():
        among += leaf_marks
    found: dict[str, Var] = {}
    terms: set[Var] = set()
    sums: set[int] = set()
    for leaf, leaf_marks in marks.items():
        read = _read_marks(step, leaf, leaf_marks)
        if len(read) == 1:
            total: Total | None = Total(read[0], frozenset(read))
        else:
            total = sum_of(step, leaf, read, among)
        if total is None:
            raise GradientError(
                f"{leaf} has {len(read)} marked gradients in {step.source.name}, but its update "
                f"may read only their sum; {ADD_UP}. {OTHER_GRADIENTS}"
            )
        found[leaf] = total.value
        terms |= total.terms
        sums |= total.positions
    return Gradients(found, True, frozenset(terms), frozenset(sums))


ADD_UP = (
    "add them up before anything else reads them (grads = jax.tree.map(jnp.add, first, second))"
)
# Any values are the gradients of their inner product with the parameters. Servers run such steps
# (tests/data_parallel/test_no_gradients.py).
OTHER_GRADIENTS = (
    "dtrans.pserver accepts other values as gradients if the step marks all that its update reads: "
    "_, grads = dtrans.value_and_grad(lambda p: optax.tree.vdot(jax.lax.stop_gradient(grads), "
    "p))(params), where params has leaves of the step's first argument. Or use dtrans.nccl2 or "
    "dtrans.sharding, which need no gradients"
)


def _read_marks(step: InlinedStep, leaf: str, leaf_marks: Sequence[Var]) -> list[Var]:
    """Return those marked gradients of a parameter that the new parameter depends on.

    A step may differentiate several losses with respect to one parameter, and use only some of the
    gradients. If the new value reads no gradient, return those that any output reads. If no output
    reads one, return the first.
    """
    if len(leaf_marks) == 1:
        return list(leaf_marks)
    for outputs in ([step.outs[leaf]], step.inner.outvars):
        _, reached = backward_slice(step.eqns, outputs, leaf_marks)
        read = [v for v in leaf_marks if v in reached]
        if read:
            return read
    return list(leaf_marks[:1])


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """Sum of several gradients of one parameter, which the step computes.

    Attributes:
      value: the variable that contains the sum.
      terms: the variables of the gradients.
      positions: indices of the equations that add the gradients up.
    """

    value: Var
    terms: frozenset[Var]
    positions: frozenset[int] = frozenset()


def sum_of(
    step: InlinedStep, leaf: str, terms: Collection[Var], graded: Iterable[Var]
) -> Total | None:
    """Find the sum of several gradients of one parameter in a step.

    A step may add gradients of several losses or micro-batches before its update. The sum is the
    first value that is linear in all of these gradients. It may have factors that depend on no
    gradient, such as the reciprocal of a count of tokens. It may not depend on gradients of other
    parameters.

    Args:
      step: the training step, with its calls inlined.
      leaf: name of the parameter.
      terms: gradients of the parameter.
      graded: gradients of all parameters.

    Returns:
      The sum; None if the step computes no such value.
    """
    first_to_last = sorted(terms, key=step.producers.__getitem__)
    # For each value, the bit set of the terms in which the value is linear.
    enters = {v: 1 << k for k, v in enumerate(first_to_last)}
    all_terms = (1 << len(enters)) - 1
    of_gradients = propagate(step.eqns, {}, dict.fromkeys([*terms, *graded], 1))
    makers = {v: step.eqns[i] for v, i in step.producers.items()}
    positions: set[int] = set()
    for i, eqn in enumerate(step.eqns):
        bits = bits_of(enters, *eqn.invars)
        if not bits or not enters.keys().isdisjoint(eqn.outvars):
            continue
        if not _is_linear(eqn, enters, of_gradients, makers):
            continue
        enters.update(dict.fromkeys(eqn.outvars, bits))
        positions.add(i)
        (out, *more) = eqn.outvars
        if bits == all_terms and not more and out.aval.shape == step.vars[leaf].aval.shape:
            needed, _ = backward_slice(step.eqns, [out], terms)
            return Total(out, frozenset(terms), frozenset(positions & set(needed)))
    return None


def _is_linear(
    eqn: JaxprEqn,
    terms: Collection[Var],
    of_gradients: Mapping[Var, int],
    makers: Mapping[Var, JaxprEqn],
) -> bool:
    """Return True if an equation is linear in its operands that are gradients or their sums.

    Args:
      eqn: the equation.
      terms: gradients and their sums; at least one is an operand.
      of_gradients: value -> a number that is nonzero if the value depends on any gradient.
      makers: the equation that computes each value.
    """
    read = {k for k, a in enumerate(eqn.invars) if isinstance(a, Var) and a in terms}
    together = linear_group(eqn, read)
    if not together:
        return False
    for k, atom in enumerate(eqn.invars):
        if k in together:
            # An accumulation starts with zeros, to which the first term is added.
            if k not in read and not is_zero_array(atom, makers):
                return False
        elif bits_of(of_gradients, atom):
            return False
    return True


def _leaf_behind(step: InlinedStep, atom: Atom) -> str | None:
    """Return the parameter from which a value is computed by casts or other unary equations.

    `dtrans.value_and_grad` may get a cast of a parameter, such as `w.astype(bfloat16)`. The mark of
    the gradient then refers to the cast, not to the parameter. The equations in between must keep
    the shape. Return None if no parameter is found.
    """
    while isinstance(atom, Var) and atom in step.producers:
        operands = variables(step.eqns[step.producers[atom]].invars)
        if len(operands) != 1 or operands[0].aval.shape != atom.aval.shape:
            return None
        atom = operands[0]
    name = step.names.get(atom) if isinstance(atom, Var) else None
    return name if name in step.params else None


def _inferred(step: InlinedStep) -> Gradients:
    """Infer the gradients of a step without marks, by the rules of the module's docstring.

    Raises:
      GradientError: several values may be the gradient of a leaf.
    """
    candidates = crossing(step)
    of_shape: dict[tuple[int, ...], set[Var]] = {}
    for v in candidates:
        of_shape.setdefault(v.aval.shape, set()).add(v)
    new = set(variables(values_at(step.outs, step.changed(step.params))))
    fixed = dict.fromkeys(candidates, 0)
    from_batch = propagate(step.eqns, {step.vars[n]: 1 for n in step.batch}, fixed)
    reads_params = propagate(step.eqns, {step.vars[n]: 1 for n in step.params}, fixed)
    found: dict[str, Var] = {}
    terms: set[Var] = set()
    sums: set[int] = set()
    for name in step.params:
        out = step.outs[name]
        fits = of_shape.get(step.vars[name].aval.shape, set())
        # An average of parameters reads their new values, and so depends on gradients of other
        # leaves. Therefore the search stops at new values of other leaves.
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
        # A leaf that never changes, or that the loss does not read, has no gradient. But if the new
        # value depends on the batch through a derivative, this function missed a gradient.
        if not reach:
            from_derivative = bits_of(from_batch, out) and step.derivatives_behind([out])
            if not from_derivative:
                continue
        in_order = sorted(reach or fits, key=step.producers.__getitem__)
        listed = "\n".join(f"  {describe(step, v)}" for v in in_order) or "  none"
        several = ""
        if reach:
            several = f". If the gradient is a sum of candidates, {ADD_UP}"
        raise GradientError(
            f"the gradient of {name} ({short_type(step.vars[name].aval)}) is ambiguous in "
            f"{step.source.name}; candidates:\n{listed}\n"
            "take gradients with dtrans.value_and_grad in place of jax.value_and_grad, or build "
            f"the step with dtrans.make_train_step{several}. {OTHER_GRADIENTS}"
        )
    without = [n for n in step.params if n not in found]
    only_elsewhere = _read_elsewhere(step, without, candidates, terms)
    found |= only_elsewhere
    terms |= {*only_elsewhere.values()}
    return Gradients(found, False, frozenset(terms), frozenset(sums))


def _read_elsewhere(
    step: InlinedStep, names: Sequence[str], candidates: Collection[Var], known: Collection[Var]
) -> dict[str, Var]:
    """Find gradients that only the updates of other parameters read.

    For example, a clip by the global norm reads the gradients of frozen parameters. The updates of
    these parameters do not. A norm reads gradients in the order of the parameters, so the function
    matches parameters and gradients of one shape by their order. A wrong match would change only
    names. If a shape has unequal numbers of parameters and gradients, these parameters get no
    gradient.

    Args:
      step: the training step, with its calls inlined.
      names: parameters for which no gradient was found.
      candidates: values that may be gradients.
      known: gradients that were found.

    Returns:
      The gradient by name of the parameter.
    """
    if not names:
        return {}
    state = values_at(step.outs, (*step.params, *step.opt_state))
    _, reached = backward_slice(step.eqns, state, candidates)
    readers = [e for e, derived in zip(step.eqns, step.derived, strict=True) if not derived]
    gradients: dict[tuple[int, ...], list[Var]] = {}
    for v in variables_read(readers):
        if v in candidates and v in reached and v not in known:
            gradients.setdefault(v.aval.shape, []).append(v)
    leaves: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        leaves.setdefault(step.vars[name].aval.shape, []).append(name)
    found: dict[str, Var] = {}
    for shape, of_shape in leaves.items():
        values = gradients.get(shape, [])
        if len(values) == len(of_shape):
            found |= zip(of_shape, values, strict=True)
    return found


def nested(step: InlinedStep, gradients: Collection[Var]) -> str:
    """Return a text for an equation that computes perturbed parameters from a first gradient.

    Sharpness-aware minimization perturbs the parameters by a first gradient, and takes the final
    gradient there. Such a step has an equation with three properties: it reads a derivative, a
    gradient depends on it, and no differentiated function contains it. The result is the first
    equation with these properties, such as "f32[8] = mul". For other steps the text is empty.

    Args:
      step: the training step, with its calls inlined.
      gradients: the final gradients.
    """
    positions, _ = backward_slice(step.eqns, gradients)
    inside: set[Var] = set()
    for i in positions:
        eqn = step.eqns[i]
        if step.derived[i]:
            inside |= step.derivatives.intersection(eqn.outvars)
        elif not inside.isdisjoint(variables(eqn.invars)):
            if "jvp(" not in scope_of(eqn):
                return f"{short_type(eqn.outvars[0].aval)} = {eqn.primitive.name}"
            inside.update(eqn.outvars)
    return ""


def _check_inferred(
    step: InlinedStep, name: str, candidate: Var, reads_params: Mapping[Var, int]
) -> None:
    """Raise GradientError if an inferred gradient is probably the parameter after several updates.

    A loop over several updates computes derivatives, and returns a value with the parameter's
    shape. So the value looks like a gradient.

    Args:
      step: the training step, with its calls inlined.
      name: the parameter.
      candidate: the inferred gradient.
      reads_params: value -> a number that is nonzero if the value depends on parameters, not only
        through possible gradients.
    """
    out, eqn = step.outs[name], step.eqns[step.producers[candidate]]
    if "transpose(" not in scope_of(eqn) and not bits_of(reads_params, out):
        raise GradientError(
            f"the gradient of {name} was not found in {step.source.name}: a {eqn.primitive.name} "
            f"computes derivatives and returns the new {name}, so it may be a loop over several "
            "updates. A step must have one update; move the loop out of the step, or use "
            "dtrans.nccl2 or dtrans.sharding, which need no gradients"
        )


def candidates_for(
    step: InlinedStep, name: str, among: Collection[Var], stop: Collection[Var] = frozenset()
) -> set[Var]:
    """Return the values that may be the gradient of a parameter.

    Such a value has the parameter's shape, and the new parameter depends on it.

    Args:
      step: the training step, with its calls inlined.
      name: name of the parameter.
      among: values to choose from.
      stop: values at which the search ends; paths through them do not count.
    """
    out, shape = step.outs[name], step.vars[name].aval.shape
    fits = {v for v in among if v.aval.shape == shape}
    ends = {*fits, *stop}
    met = _shape_keeping(step, out, shape, ends)
    if not met and math.prod(shape) > 1:
        met = _reached(step, out, ends, blocked=_single_numbers(step)) & fits
    return (met or _reached(step, out, ends)) & fits


def _single_numbers(step: InlinedStep) -> set[Var]:
    """Return the values with one element that equations of the step compute, such as norms."""
    found: set[Var] = set()
    for eqn in step.eqns:
        found.update(v for v in eqn.outvars if math.prod(v.aval.shape) == 1)
    return found


def crossing(step: InlinedStep) -> set[Var]:
    """Return the derivatives that leave the backward pass: candidates for gradients.

    The step returns them, or an equation outside of the backward pass reads them.
    """
    used = set(variables(step.inner.outvars))
    for eqn, is_derivative in zip(step.eqns, step.derived, strict=True):
        if not is_derivative:
            used.update(variables(eqn.invars))
    return used & step.derivatives


def _shape_keeping(
    step: InlinedStep, out: Atom, shape: tuple[int, ...], fits: set[Var]
) -> set[Var]:
    """Return the values in `fits` that `out` reads through a chain of values of one shape.

    A chain ends at the first value in `fits`. Elementwise optimizers such as Adam connect gradient
    and new parameter by such a chain.
    """
    return set(_ends_of_paths(out, shape, step.eqns, step.producers, fits)) & fits


def _ends_of_paths(
    out: Atom,
    shape: tuple[int, ...],
    eqns: Sequence[JaxprEqn],
    producers: Mapping[Var, int],
    stop: Collection[Var],
) -> list[Var]:
    """Follow values of one shape backwards from `out`, and return the ends of these paths.

    A path ends at a value in `stop`, or at an input.
    """
    stack, seen, ends = [out], set(), []
    while stack:
        atom = stack.pop()
        if isinstance(atom, Literal) or atom in seen or atom.aval.shape != shape:
            continue
        seen.add(atom)
        if atom in stop or atom not in producers:
            ends.append(atom)
        else:
            stack += _operands_on_paths(eqns[producers[atom]], atom, shape)
    return ends


def _operands_on_paths(eqn: JaxprEqn, out: Var, shape: tuple[int, ...]) -> Sequence[Atom]:
    """Return the operands of an equation that one output may read through values of one shape.

    For most equations, these are all operands. In the branches of a condition, such as the one of
    `optax.MultiSteps`, an output reads only some of the operands. The same holds for a call in a
    branch, which is not inlined.
    """
    if not has_bodies(eqn) or eqn.primitive.name in LOOPS:
        return eqn.invars
    found: list[Atom] = []
    for body, read in zip(map(opened, bodies(eqn)), body_indices(eqn).ins, strict=True):
        operands = dict(zip(body.invars, values_at(eqn.invars, read), strict=True))
        result = body.outvars[eqn.outvars.index(out)]
        inputs = _ends_of_paths(result, shape, body.eqns, producer_positions(body.eqns), ())
        found += [operands[v] for v in inputs if v in operands]
    return found


def _reached(
    step: InlinedStep, out: Atom, fits: set[Var], blocked: Collection[Var] = frozenset()
) -> set[Var]:
    """Return the values in `fits` on which `out` depends; paths end at `fits` and `blocked`."""
    if not fits:
        return set()
    _, reached = backward_slice(step.eqns, [out], fits.union(blocked))
    return reached & fits


def counts_rows(step: InlinedStep, count: Var, out: Atom) -> bool:
    """Return True if a state array counts rows of the batch, and no other state reads the count.

    Trainers must compute such a count, because servers do not know the batch size. A count of rows
    grows by a constant other than 1; a count of steps grows by 1.

    Args:
      step: the training step, with its calls inlined.
      count: the variable of the state array.
      out: its new value.
    """
    if isinstance(out, Literal) or out not in step.producers:
        return False
    addition = step.eqns[step.producers[out]]
    if addition.primitive.name != "add" or count not in addition.invars:
        return False
    if not any(isinstance(a, Literal) and a.val != 1 for a in addition.invars):
        return False
    enters = propagate(step.eqns, {count: 1}, {})
    others = [a for n, a in step.outs.items() if n in step.vars and a is not out]
    return not bits_of(enters, *others)


def describe(step: InlinedStep, var: Var) -> str:
    """Describe a value for an error message: its type, primitive, name stack and source line."""
    eqn = step.eqns[step.producers[var]]
    line = line_of(eqn)
    return (
        f"{short_type(var.aval)} = {eqn.primitive.name} ({scope_of(eqn) or 'no name stack'})"
        f"{f' at {line}' if line else ''}"
    )


def _derived_outputs(eqn: JaxprEqn) -> list[Var]:
    """Return the outputs of an equation that the backward pass computes.

    A loop with a backward pass in its body may have other outputs as well, such as the loss.
    """
    if not _is_derivative(eqn):
        return []
    facts = forward(_DERIVED, [eqn], {})
    return [v for v in eqn.outvars if facts.of(v)]


def _is_derived(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
    """Return, for each output of an equation, True if it depends on a derivative.

    The result is None if the analysis must follow the bodies of a loop or branch.

    Args:
      eqn: the equation.
      ins: for each operand, True if it depends on a derivative.
    """
    count = len(eqn.outvars)
    if eqn.primitive is mark_p or any(ins) or "transpose(" in scope_of(eqn):
        return [True] * count
    if not _is_derivative(eqn):
        return [False] * count
    if has_bodies(eqn):
        return None
    inner = [opened(x) for x in jaxprs_in_params(eqn.params)]
    # `value_and_grad` returns the results of its body, the loss function, and then gradients.
    gradients = eqn.params["count"] if eqn.primitive is value_and_grad_p else 0
    if len(inner) != 1 or len(inner[0].outvars) + gradients != count:
        return [True] * count
    facts = forward_jaxpr(_DERIVED, inner[0], [False] * len(inner[0].invars))
    return [facts.of(a) for a in inner[0].outvars] + [True] * gradients


_DERIVED: ForwardAnalysis[bool] = ForwardAnalysis(
    operator.or_, _is_derived, default=lambda aval, value: False, decide=operator.or_
)


def _is_derivative(eqn: JaxprEqn) -> bool:
    """Return True if differentiation created an equation, or an equation in its body.

    JAX names such equations `transpose(...)`.
    """
    if "transpose(" in scope_of(eqn):
        return True
    # Such an equation always contains its transposed solve, even if nothing was differentiated.
    if eqn.primitive.name == "custom_linear_solve":
        return False
    return any(e.primitive is mark_p or "transpose(" in scope_of(e) for e in equations_inside(eqn))
