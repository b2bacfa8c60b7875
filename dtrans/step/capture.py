"""Second trace of a step, which keeps the loss function as one equation without derivatives.

A pipeline divides the loss function into stages, and differentiates each stage. In an ordinary
trace of the step, JAX has already differentiated the loss. So the step is traced again in a special
mode, called *capture*. In this mode `dtrans.value_and_grad` writes one equation, `value_and_grad`.
Its body is the loss function.

    step      ... -> value_and_grad[loss function] -> loss, aux, gradients -> marks -> optimizer

Stages compute the results of this equation, and give only the gradients to the update. So the
update of a pipeline may read no other result of the equation. There is one exception: a result that
depends on no batch array, such as a step counter or a split random key. Its equations are copied
and placed before `value_and_grad`, so that the update can read it.

A step may have several losses, each with its own parameters. If no loss reads results of another,
their sum becomes the loss.

`dtrans.step.halves` divides this trace like any other. The mode is part of JAX's cache key, so that
JAX traces a jitted step again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
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
from dtrans.ir.dataflow import avals, backward_slice, bits_of, propagate, variables
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import Program, rewrite_root
from dtrans.ir.selection import values_at
from dtrans.step.collect import COLLECT


def _types(*operands: Any, loss: ClosedJaxpr, count: int) -> list[Any]:
    gradients = [t.update(weak_type=False) for t in operands[:count]]
    return avals(opened(loss).outvars) + gradients


value_and_grad_p = new_primitive("value_and_grad", types=_types, multiple_results=True)


ONE_LOSS = (
    "A pipeline splits the batch into micro-batches itself (num_micro_batch): call "
    "dtrans.value_and_grad at the top level of the step, on the loss of the full batch, and "
    "divide by counts of the batch inside the loss function"
)

capturing: Any = jax.make_user_context(False)


def captures() -> bool:
    """Return True if JAX now traces a step with its loss as one equation (not differentiated).

    `dtrans.value_and_grad` calls this function; see the module's docstring.
    """
    return bool(capturing.value)


def capture_loss(fun: Callable[[Any], Any], arguments: Any, has_aux: bool) -> tuple[Any, Any]:
    """Write one equation `value_and_grad` into the current trace, with `fun` as its body.

    Args:
      fun: the loss function of one argument.
      arguments: the argument, a list of pytrees, with respect to which the equation differentiates.
      has_aux: unused here; `fun` returns (loss, aux) if it is True.

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
    """Trace a step again, so that its loss function is one equation without derivatives.

    Pipelines divide this loss into stages. `program.once` stores the result, so a second call is
    cheap.

    Raises:
      GradientError: the program was not traced from a function, or it does not call
        `dtrans.value_and_grad` outside of loops and branches.
      GradientError: a loss reads results of another loss, or two losses have the same parameters.
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
    """Trace a step with its loss function as one equation; return None if this is impossible."""
    try:
        return captured(program)
    except GradientError:
        return None


def _captured(program: Program) -> Program:
    traced = rewrite_root(program, _with_loss)
    return (
        traced.rewritten(_with_one_loss)
        .rewritten(_with_counters_first)
        .rewritten(_without_unread_results)
    )


def _with_loss(traced: Program) -> Program:
    """Trace a step again so that its loss is one equation. Traces of the result keep this form."""
    function: Any = dataclasses.replace(traced.specializer, captures=True)  # type: ignore[type-var]
    result: Program = function(list(map(array_type, traced.inputs.values())))
    return result


def _with_one_loss(program: Program) -> Program:
    """Combine several losses of a step into one equation `value_and_grad`; its loss is their sum.

    Each loss function gets separate inputs for the values to differentiate. So each loss has its
    own gradients, also if two losses read the same parameter. The step is returned unchanged if a
    loss reads results of another loss. It is also returned unchanged if two losses differentiate
    the same values, as in a loop over micro-batches that adds up gradients.
    """
    flat = inline_calls(program.jaxpr, keep=("loss", "loss_seed", COLLECT))
    inner = opened(flat)
    losses = [e for e in inner.eqns if e.primitive is value_and_grad_p]
    after = propagate(
        inner.eqns, dict.fromkeys(itertools.chain.from_iterable(e.outvars for e in losses), 1), {}
    )
    if len(losses) < 2 or any(bits_of(after, *e.invars) for e in losses):
        return program
    differentiated: list[Atom] = []
    for e in losses:
        differentiated += e.invars[: e.params["count"]]
    if len({*variables(differentiated)}) < len(differentiated):
        return program

    # Equations that read no loss come first: another loss may read their results.
    b = Builder(flat)
    b.invars += inner.invars
    for e in inner.eqns:
        if e.primitive is not value_and_grad_p and not bits_of(after, *e.invars):
            b.keep(e)
    loss, operands, count = _sum_of_losses(flat, losses)
    outs = b.bind(value_and_grad_p, *operands, loss=loss, count=count)
    values, gradients = iter(outs[1:-count]), iter(outs[-count:])
    env: dict[Var, Atom] = {}
    for e in losses:
        at = len(e.outvars) - e.params["count"]
        env |= zip(e.outvars[:at], values, strict=False)
        env |= zip(e.outvars[at:], gradients, strict=False)
    for e in inner.eqns:
        if e.primitive is not value_and_grad_p and bits_of(after, *e.invars):
            b.keep(e, read_from(env, e.invars))
    jaxpr = b.build(read_from(env, inner.outvars))
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(b.eqns), labels={})


def _sum_of_losses(
    flat: ClosedJaxpr, losses: Sequence[JaxprEqn]
) -> tuple[ClosedJaxpr, list[Atom], int]:
    """Write one loss function that returns the sum of several losses, then all their results.

    Args:
      flat: the step.
      losses: the equations `value_and_grad` of the step.

    Returns:
      The loss function, its operands in the step, and a number n: the first n operands are
        differentiated.
    """
    b = Builder(flat)
    operands: list[Atom] = []
    inputs_of: list[list[Atom]] = []
    for e in losses:
        differentiated = e.invars[: e.params["count"]]
        operands += differentiated
        inputs_of.append([*b.inputs(a.aval for a in differentiated)])
    count = len(operands)

    # The losses share inputs that are not differentiated, so that stages store such values once.
    shared: dict[Var | int, Atom] = {}
    for e, inputs in zip(losses, inputs_of, strict=True):
        for a in e.invars[e.params["count"] :]:
            key = a if isinstance(a, Var) else id(a)  # literals cannot be hashed
            if key not in shared:
                shared[key] = b.input(a.aval)
                operands.append(a)
            inputs.append(shared[key])
    results: list[list[Atom]] = []
    for e, inputs in zip(losses, inputs_of, strict=True):
        results.append(b.inline(e.params["loss"], *inputs))
    total = b.call(_sum, *(values[0] for values in results))
    return b.build([*total, *itertools.chain.from_iterable(results)]), operands, count


def _sum(*losses: Any) -> Any:
    return functools.reduce(operator.add, losses)


def _with_counters_first(program: Program) -> Program:
    """Copy the equations of counters and random keys before the loss, if the update reads them.

    The loss function may return results that depend on no batch array, such as a counter. A
    pipeline's update cannot read results of the loss function. So this function copies the
    equations of these results, and puts the copies before the equation `value_and_grad`. The
    original equations stay in the loss function, where dead code elimination removes them if
    possible.
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


def _without_unread_results(program: Program) -> Program:
    """Drop results of the loss function that no output and no effect of the step depends on.

    The loss function may return an aux value that the step ignores. Micro-batches may be unable to
    compute this value, such as `jnp.exp(loss)`, without communication.
    """
    flat = inline_calls(program.jaxpr, keep=("loss", "loss_seed", COLLECT))
    inner = opened(flat)
    losses = [i for i, e in enumerate(inner.eqns) if e.primitive is value_and_grad_p]
    if len(losses) != 1:
        return program
    (at,) = losses
    eqn = inner.eqns[at]
    loss = opened(eqn.params["loss"])
    read: list[Atom] = [*inner.outvars]
    for e in inner.eqns:
        if e.effects:
            read += e.invars
    _, leaves = backward_slice(inner.eqns, read, stop=eqn.outvars)
    count = len(loss.outvars)
    positions = [i for i in range(count) if i == 0 or eqn.outvars[i] in leaves]
    if len(positions) == count:
        return program

    body = closed(
        loss.constvars,
        constants(eqn.params["loss"]),
        loss.invars,
        values_at(loss.outvars, positions),
        loss.eqns,
        loss,
    )
    outvars = [*values_at(eqn.outvars, positions), *eqn.outvars[count:]]
    params = {**eqn.params, "loss": eliminate_dead(body)}
    # A dead equation after the loss may read a dropped result.
    live = eliminate_dead(
        closed(
            inner.constvars,
            constants(flat),
            inner.invars,
            inner.outvars,
            [*inner.eqns[:at], eqn.replace(outvars=outvars, params=params), *inner.eqns[at + 1 :]],
            inner,
        )
    )
    return dataclasses.replace(program, jaxpr=live, roles=("",) * len(opened(live).eqns), labels={})


def _read_by_update(program: Program, inner: Jaxpr, eqn: JaxprEqn) -> dict[Var, str]:
    """Return the results of the loss function that the update reads; gradients do not count.

    Args:
      program: a step, as `captured` returns it.
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
    """Raise GradientError if a pipeline's update would read results of the loss function.

    Only pipeline stages compute these results, so the update cannot get them.

    Args:
      program: a step, as `captured` returns it.
    """
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
    """Replace the undifferentiated loss of a step (`captured`) by its derivative.

    `captured` returns a step with an equation `value_and_grad`, which cannot run. The result of
    this function can run, and dtrans can divide it like an ordinary step.
    """
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
    """Return the equation `value_and_grad` of a step; its body is the undifferentiated loss.

    Args:
      program: a step, as `captured` returns it.

    Raises:
      GradientError: the step does not have exactly one such equation, or has it in a loop or a
        branch. Several losses are no error if they are independent, since `captured` combines them.
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
        lines = " and ".join(filter(None, map(line_of, found)))
        raise GradientError(
            f"{program.name} calls dtrans.value_and_grad {len(found)} times"
            f"{f' ({lines})' if lines else ''}; a pipeline computes several losses together, so "
            "each must have its own parameters, read no result of another, and be outside of loops "
            f"and branches. {ONE_LOSS}; or use dtrans.nccl2 or dtrans.sharding"
        )
    if not any(e.primitive is value_and_grad_p for e in opened(inline_calls(program.jaxpr)).eqns):
        raise GradientError(
            f"{program.name} calls dtrans.value_and_grad in a loop or a branch. {ONE_LOSS}"
        )
    return found[0]


def operands_of(eqn: JaxprEqn) -> tuple[dict[Var, Atom], dict[Var, Atom]]:
    """Return the values that the step passes to the loss function, by its input variables.

    Args:
      eqn: the equation `value_and_grad`.

    Returns:
      Two dicts, from input variables to operands: the operands to differentiate, and all others.
    """
    pairs = list(zip(opened(eqn.params["loss"]).invars, eqn.invars, strict=True))
    count = eqn.params["count"]
    return dict(pairs[:count]), dict(pairs[count:])
