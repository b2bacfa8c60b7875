"""Capture: a trace of a step in which the loss function is one undifferentiated equation.

A pipeline divides the loss function into stages and differentiates each stage. In an ordinary trace
of the step the loss is already differentiated. So the step is traced again in a mode in which
`dtrans.value_and_grad` writes one equation, `value_and_grad`, whose body is the loss function.

    step      ... -> value_and_grad[loss function] -> loss, aux, gradients -> marks -> optimizer

Stages compute the loss, so the update of a pipeline can read only the gradients among the results
of this equation. There is one exception. If the update reads a result that depends on no batch
array (a counter, a split key), equations before `value_and_grad` compute this result, too.
`dtrans.step.halves` divides this trace like any other. The mode is part of JAX's cache key, so
that JAX traces a jitted step again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    closed,
    constants,
    equations,
    is_traced,
    jaxpr_as_fun,
    line_of,
    lowered_jaxpr,
    new_primitive,
    opened,
)
from dtrans.errors import GradientError
from dtrans.ir.array_fns import array_type
from dtrans.ir.batched_gathers import batched_gathers
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import avals, backward_slice, bits_of, propagate
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program, rewrite_root
from dtrans.ir.selection import values_at
from dtrans.step.collect import COLLECT


def _types(*operands: Any, loss: ClosedJaxpr, count: int) -> list[Any]:
    gradients = [t.update(weak_type=False) for t in operands[:count]]
    return avals(opened(loss).outvars) + gradients


value_and_grad_p = new_primitive("value_and_grad", types=_types, multiple_results=True)


ONE_LOSS = (
    "A pipeline splits the batch into micro-batches itself (num_micro_batch): call "
    "dtrans.value_and_grad once, at the top level of the step, on the loss of the full batch, and "
    "divide by counts of the batch inside the loss function"
)

capturing: Any = jax.make_user_context(False)


def captures() -> bool:
    """Return True if `value_and_grad` captures loss functions in the current trace."""
    return bool(capturing.value)


def capture_loss(fun: Callable[[Any], Any], arguments: Any, has_aux: bool) -> tuple[Any, Any]:
    """Bind one equation `value_and_grad` with `fun` as its body.

    Returns:
      The equation's outputs, in the structure that `jax.value_and_grad` of `fun` returns.
    """
    flat, structure = jax.tree.flatten(arguments)
    shape: list[Any] = []

    def on_arrays(*arrays: Any) -> list[Any]:
        results, tree = jax.tree.flatten(fun(jax.tree.unflatten(structure, arrays)))
        shape.append(tree)
        return results

    traced: Any = jax.make_jaxpr(on_arrays)(*flat)
    inner = opened(traced)
    # `fun` may close over values of the step, which become operands, and over arrays, which stay
    # constants.
    around: dict[Var, Any] = {}
    arrays: dict[Var, Any] = {}
    for v, c in zip(inner.constvars, constants(traced), strict=True):
        kind = around if is_traced(c) else arrays
        kind[v] = c
    invars = [*inner.invars, *around]
    body = closed(list(arrays), list(arrays.values()), invars, inner.outvars, inner.eqns, traced)
    results = value_and_grad_p.bind(
        *flat, *around.values(), loss=batched_gathers(body), count=len(flat)
    )
    values, gradients = results[: len(inner.outvars)], results[len(inner.outvars) :]
    out = jax.tree.unflatten(shape[-1], values)
    return out, jax.tree.unflatten(structure, gradients)


def captured(program: Program) -> Program:
    """Trace a step again, in the mode in which its loss is one equation.

    Raises:
      GradientError: the program was not traced from a function, or does not call
        `dtrans.value_and_grad` exactly once outside of loops and branches.
    """
    if program.specializer is None:
        raise GradientError(
            f"{program.name} was not traced from a function, so it cannot be traced again with an "
            "undifferentiated loss; pass the program that dtrans.trace returned"
        )
    traced = program.once(_captured)
    loss_of(traced)
    return traced


def captured_if_marked(program: Program) -> Program | None:
    """Return `captured(program)`, or None if it raises GradientError."""
    try:
        return captured(program)
    except GradientError:
        return None


def _captured(program: Program) -> Program:
    return rewrite_root(program, _with_loss).rewritten(_with_counters_first)


def _with_loss(traced: Program) -> Program:
    """Trace a step again with its loss as one equation; later traces for new shapes do the same."""
    function: Any = dataclasses.replace(traced.specializer, captures=True)  # type: ignore[type-var]
    result: Program = function(list(map(array_type, traced.inputs.values())))
    return result


def _with_counters_first(program: Program) -> Program:
    """Let the update read those results of the loss function that depend on no batch array.

    Examples are a counter and a random key. The equations of these results are copied, and run
    before the equation `value_and_grad`. The copied equations also stay in the loss function, where
    dead code elimination removes them if possible.
    """
    flat = inline_calls(program.jaxpr, keep=("loss", "loss_seed", COLLECT))
    inner = opened(flat)
    losses = [i for i, e in enumerate(inner.eqns) if e.primitive is value_and_grad_p]
    if len(losses) != 1 or len(program.args) < 2:
        return program
    (at,) = losses
    eqn = inner.eqns[at]
    read = _read_by_update(program, inner, eqn)
    body = inline_calls(eqn.params["loss"], keep=(COLLECT,), rules=True)
    loss = opened(body)

    # Select the results that the update reads and that depend on no batch array.
    inputs = dict(zip(program.in_names, inner.invars, strict=True))
    batch: list[Var] = []
    for spec in program.args[2:]:
        batch += values_at(inputs, spec.names)
    enters = propagate(inner.eqns, dict.fromkeys(batch, 1), {})
    operand = dict(zip(loss.invars, eqn.invars, strict=True))
    from_batch = [v for v, atom in operand.items() if bits_of(enters, atom)]
    inside = propagate(loss.eqns, dict.fromkeys(from_batch, 1), {})
    free = []
    for i in range(1, len(loss.outvars)):
        if eqn.outvars[i] in read and not bits_of(inside, loss.outvars[i]):
            free.append(i)
    before, _ = backward_slice(loss.eqns, values_at(loss.outvars, free))
    if not free or any(loss.eqns[i].effects for i in before):
        return program

    # Write their equations before the loss equation, and let the update read the new outputs.
    b = Builder(flat)
    b.invars += inner.invars
    for e in inner.eqns[:at]:
        b.keep(e)
    eqns = values_at(loss.eqns, before)
    values = b.inline_part(body, operand, eqns, values_at(loss.outvars, free))
    computed = dict(zip(values_at(eqn.outvars, free), values, strict=True))
    b.keep(eqn)
    for e in inner.eqns[at + 1 :]:
        b.keep(e, read_from(computed, e.invars))
    jaxpr = b.build(read_from(computed, inner.outvars))
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(b.eqns), labels={})


def _read_by_update(program: Program, inner: Jaxpr, eqn: JaxprEqn) -> dict[Var, str]:
    """Return the results of the loss function that the update reads.

    Args:
      program: a captured step.
      inner: the step's jaxpr, with calls inlined.
      eqn: the equation `value_and_grad`.

    Returns:
      For each result, the name of a new parameter or state array that depends on it.
    """
    params, opt_state = (program.args[i].names for i in (0, 1))
    count = len(opened(eqn.params["loss"]).outvars)
    values, gradients = set(eqn.outvars[:count]), set(eqn.outvars[count:])
    outs = dict(zip(program.out_names, inner.outvars, strict=True))
    found: dict[Var, str] = {}
    for n in (*params, *opt_state):
        _, leaves = backward_slice(inner.eqns, [outs[n]], stop=eqn.outvars)
        if n in opt_state or leaves & gradients:
            found = dict.fromkeys(leaves & values, n) | found
    return found


def refuse_loss_in_update(program: Program) -> None:
    """Raise GradientError if the update of a step reads results of the captured loss function."""
    inner = opened(inline_calls(program.jaxpr))
    eqn = next((e for e in inner.eqns if e.primitive is value_and_grad_p), None)
    if eqn is None:
        return
    for value, n in _read_by_update(program, inner, eqn).items():
        line = next((line_of(e) for e in inner.eqns if value in e.invars), "")
        raise GradientError(
            f"the new {n} is computed from results of the loss function"
            f"{f' ({line})' if line else ''}; in a pipeline the update of {program.name} can read "
            "only gradients, state and arguments of the step. If the result is a count, divide "
            "the loss by the count inside the loss function. Otherwise use dtrans.nccl2 or "
            "dtrans.sharding, whose updates may read results of the loss function"
        )


def differentiated(program: Program) -> Program:
    """Return a step that can run: the loss's derivative replaces the equation `value_and_grad`."""
    return program.rewritten(_differentiated)


def _differentiated(program: Program) -> Program:
    inner = program.inner
    b = Builder(program.jaxpr)
    b.invars += inner.invars
    outputs: dict[Var, Atom] = {}
    for e in inner.eqns:
        operands = read_from(outputs, e.invars)
        if e.primitive is value_and_grad_p:
            types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
            derivative = lowered_jaxpr(functools.partial(_value_and_grad, **e.params), *types)
            outputs |= zip(e.outvars, b.inline(derivative, *operands), strict=True)
        else:
            b.keep(e, operands)
    jaxpr = b.build(read_from(outputs, inner.outvars))
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(b.eqns), labels={})


def _value_and_grad(*operands: Any, loss: ClosedJaxpr, count: int) -> list[Any]:
    """Compute the outputs of the equation `value_and_grad`: results of the loss, then gradients."""

    def loss_with_results(arguments: list[Any]) -> tuple[Any, list[Any]]:
        results = list(jaxpr_as_fun(loss)(*arguments, *operands[count:]))
        return results[0], results

    derivative = jax.value_and_grad(loss_with_results, has_aux=True)
    (_, values), gradients = derivative(list(operands[:count]))
    return [*values, *gradients]


def loss_of(program: Program) -> JaxprEqn:
    """Return the equation `value_and_grad` of a captured step: its loss and the loss's derivative.

    Raises:
      GradientError: the step does not call `dtrans.value_and_grad` exactly once outside of loops
        and branches.
    """
    found = [e for e in equations(program.jaxpr) if e.primitive is value_and_grad_p]
    if not found:
        raise GradientError(
            f"{program.name} computes gradients with jax.grad or a function that calls jax.grad; "
            "a pipeline needs the undifferentiated loss function, which only "
            "dtrans.value_and_grad keeps. Call dtrans.value_and_grad in place of "
            "jax.value_and_grad, nnx.value_and_grad or eqx.filter_value_and_grad; or build the "
            "step with dtrans.make_train_step"
        )
    if len(found) > 1:
        raise GradientError(
            f"{program.name} calls dtrans.value_and_grad {len(found)} times; a pipeline needs one "
            f"loss. {ONE_LOSS}. If the losses share no parameters, differentiate their sum; "
            "otherwise use dtrans.nccl2 or dtrans.sharding, which support several losses"
        )
    if not any(e.primitive is value_and_grad_p for e in opened(inline_calls(program.jaxpr)).eqns):
        raise GradientError(
            f"{program.name} calls dtrans.value_and_grad in a loop or a branch. {ONE_LOSS}"
        )
    return found[0]


def operands_of(eqn: JaxprEqn) -> tuple[dict[Var, Atom], dict[Var, Atom]]:
    """Return the operand for each input variable of the loss function.

    Args:
      eqn: the equation `value_and_grad`.

    Returns:
      Two dicts, whose keys are input variables: the operands to differentiate, and all others.
    """
    pairs = list(zip(opened(eqn.params["loss"]).invars, eqn.invars, strict=True))
    count = eqn.params["count"]
    return dict(pairs[:count]), dict(pairs[count:])
