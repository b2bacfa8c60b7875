"""The loss of a step, before it is differentiated.

A pipeline is cut through the forward pass, and each part is differentiated by itself: in a step that was traced as it
runs, forward and backward are one. So the step is traced once more, and this time `dtrans.value_and_grad`
differentiates nothing: it leaves one equation, `value_and_grad`, whose body is the loss function.

    step      ... -> value_and_grad[loss function] -> loss, aux, gradients -> marks -> optimizer

Nothing carries that equation out; it has no lowering. What is traced in this way is read by `dtrans.step.cut` as any
other step. Whether a trace is of this kind is part of what JAX remembers a trace by, so that a jitted step is traced
anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    constants,
    equations,
    is_traced,
    jaxpr_as_fun,
    lowered_jaxpr,
    new_primitive,
    opened,
)
from dtrans.errors import GradientError
from dtrans.ir.batched_gathers import batched_gathers
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program


def _types(*operands: Any, loss: ClosedJaxpr, count: int) -> list[Any]:
    gradients = [t.update(weak_type=False) for t in operands[:count]]
    return [a.aval for a in opened(loss).outvars] + gradients


value_and_grad_p = new_primitive("value_and_grad", types=_types, multiple_results=True)


_captures: Any = jax.make_user_context(False)


def captures() -> bool:
    """Whether losses are to be left as they are in this trace."""
    return bool(_captures.value)


def left_as_it_is(fun: Callable[[Any], Any], arguments: Any, has_aux: bool) -> tuple[Any, Any]:
    """What `jax.value_and_grad(fun, has_aux=has_aux)(arguments)` returns, as one equation that holds `fun`."""
    flat, structure = jax.tree.flatten(arguments)
    shape: list[Any] = []

    def on_arrays(*arrays: Any) -> list[Any]:
        made, tree = jax.tree.flatten(fun(jax.tree.unflatten(structure, arrays)))
        shape.append(tree)
        return made

    traced: Any = jax.make_jaxpr(on_arrays)(*flat)
    inner = opened(traced)
    # what the function closes over is an operand if it is a value of the step; arrays stay constants
    around = {v: c for v, c in zip(inner.constvars, constants(traced), strict=True) if is_traced(c)}
    held = [(v, c) for v, c in zip(inner.constvars, constants(traced), strict=True) if v not in around]
    body = closed(
        [v for v, _ in held], [c for _, c in held], [*inner.invars, *around], inner.outvars, inner.eqns, traced
    )
    made = value_and_grad_p.bind(*flat, *around.values(), loss=batched_gathers(body), count=len(flat))
    values, gradients = made[: len(inner.outvars)], made[len(inner.outvars) :]
    out = jax.tree.unflatten(shape[-1], values)
    return out, jax.tree.unflatten(structure, gradients)


def captured(program: Program) -> Program:
    """A step, traced again, with the loss that it differentiates as one equation.

    Raises:
      GradientError: it was not made from a function, or has no `dtrans.value_and_grad`, or several, or one in a loop.
    """
    made = _again(program, [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in program.inputs.values()])
    loss_of(made)
    return made


def captured_if_marked(program: Program) -> Program | None:
    """The same; None for a step that is of no such kind."""
    if program.specializer is None:
        return None
    made = _again(program, [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in program.inputs.values()])
    found = [e for e in equations(made.jaxpr) if e.primitive is value_and_grad_p]
    at_top = any(e.primitive is value_and_grad_p for e in opened(inline_calls(made.jaxpr)).eqns)
    return made if len(found) == 1 and at_top else None


def _again(program: Program, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
    if program.specializer is None:
        raise GradientError(
            f"{program.name} was not traced from a function (dtrans.trace), so that its loss cannot be told apart "
            "from its derivative"
        )
    trace = program.specializer
    with _captures(True):
        made = trace(types)
    return dataclasses.replace(made, specializer=lambda types: _again(program, types))


def differentiated(program: Program) -> Program:
    """A captured step as it runs: with the derivative of its loss in place of the equation."""
    inner = program.inner
    consts = dict(zip(inner.constvars, program.jaxpr.consts, strict=True))

    def run(*args: Any) -> list[Any]:
        env = {**consts, **dict(zip(inner.invars, args, strict=True))}
        read = lambda a: a.val if isinstance(a, Literal) else env[a]
        for e in inner.eqns:
            operands = [read(a) for a in e.invars]
            if e.primitive is value_and_grad_p:
                made = _value_and_grad(*operands, **e.params)
            else:
                made = e.primitive.bind(*operands, **e.primitive.get_bind_params(e.params))
            env.update(zip(e.outvars, made if e.primitive.multiple_results else [made], strict=True))
        return [read(a) for a in inner.outvars]

    jaxpr = lowered_jaxpr(run, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars))
    return dataclasses.replace(
        program,
        jaxpr=jaxpr,
        roles=("",) * len(opened(jaxpr).eqns),
        labels={},
        specializer=lambda types: differentiated(program.specialize_flat(types)),
    )


def _value_and_grad(*operands: Any, loss: ClosedJaxpr, count: int) -> list[Any]:
    """What the equation stands for."""

    def of(arguments: list[Any]) -> tuple[Any, list[Any]]:
        made = list(jaxpr_as_fun(loss)(*arguments, *operands[count:]))
        return made[0], made

    (_, values), gradients = jax.value_and_grad(of, has_aux=True)(list(operands[:count]))
    return [*values, *gradients]


def loss_of(program: Program) -> JaxprEqn:
    """The equation of a captured step that holds its loss function. Errors as in `captured`."""
    found = [e for e in equations(program.jaxpr) if e.primitive is value_and_grad_p]
    if not found:
        raise GradientError(
            f"{program.name} takes its gradients with jax.grad, or with what calls it: a pipeline is cut through the "
            "loss before it is differentiated, which only dtrans.value_and_grad lets it see. Write that in place of "
            "jax.value_and_grad, nnx.value_and_grad or eqx.filter_value_and_grad, or use dtrans.make_train_step"
        )
    if len(found) > 1:
        raise GradientError(
            f"{program.name} calls dtrans.value_and_grad {len(found)} times; a pipeline is of one loss. Losses "
            "that share no parameters can be added up, and their sum differentiated; of others dtrans.nccl2 and "
            "dtrans.sharding take each"
        )
    return found[0]


def operands_of(eqn: JaxprEqn) -> tuple[dict[Var, Atom], dict[Var, Atom]]:
    """What a loss function is given: what it is differentiated by, and what else it reads, by its own variables."""
    given = list(zip(opened(eqn.params["loss"]).invars, eqn.invars, strict=True))
    count = eqn.params["count"]
    return dict(given[:count]), dict(given[count:])
