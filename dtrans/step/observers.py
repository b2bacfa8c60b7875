"""Host callbacks of a step (`jax.debug.print`, `jax.debug.callback`, `io_callback`) in jobs.

In a job, several trainers run the step, but the user's host function must be called only once. The
function must also get the values that one device would compute. So dtrans records each callback as
an `Observer`. The values that a callback reads decide which program of a job can call the function:

    state       parameters and constants, which trainers store
    forward     values of forward and backward: trainers compute them, and reduce partial sums
    gradients   gradients and values that depend on them: known after the reduction of gradients
    update      new parameters and optimizer state: known where the update runs

`call_once` rewrites callbacks: every trainer passes its index to the host, and the host calls the
user's function for trainer 0 only. A `cond` on the index would not work, because `jax.vmap`, which
simulates trainers, runs both branches.

`jax.pure_callback` has no effect, so all trainers may call it. It is not an observer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import io_callback

from dtrans._jax import (
    CALLBACKS,
    JaxprEqn,
    Var,
    equations,
    equations_inside,
    host_function,
    is_ordered,
    line_of,
    map_bodies,
    opened,
    small_jaxpr,
    with_equations,
)
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import bits_of, propagate
from dtrans.ir.program import Program
from dtrans.ops import trainer_index_p


if TYPE_CHECKING:
    from dtrans.step.gradients import InlinedStep


STATE, FORWARD, GRADIENTS, UPDATE = "state", "forward", "gradients", "update"
EARLY = (STATE, FORWARD)  # operands of callbacks that forward and backward can call
_READS = {
    STATE: "parameters",
    FORWARD: "values of the batch",
    GRADIENTS: "gradients",
    UPDATE: "results of the optimizer",
}


@dataclasses.dataclass(frozen=True)
class Observer:
    """Equation of a step with an effect, such as a call of a host function (`jax.debug.print`).

    Attributes:
      position: position of the equation in the step.
      name: primitive of the callback: `debug_print`, `debug_callback` or `io_callback`. The
        callback may be in a body of the equation.
      line: user's source line, `model.py:12`; empty if unknown.
      reads: kind of the operands: "state", "forward", "gradients" or "update" (see the module's
        docstring).
      rows: True if an operand depends on the batch other than through gradients.
      in_update: True if the update contains the equation, such as a loop with a callback.
      calls: False for effects that call no function, such as summaries of dtrans.
    """

    position: int
    name: str
    line: str
    reads: str
    rows: bool
    in_update: bool
    calls: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.line})" if self.line else self.name


def observers_of(
    step: InlinedStep, gradients: Collection[Var], optimize: Sequence[int], asked: Collection[str]
) -> tuple[Observer, ...]:
    """Find the host callbacks (and other effects) of a step, and the kind of values they read.

    Args:
      step: the training step, with its calls inlined.
      gradients: values at which the step is divided.
      optimize: positions of the update's equations.
      asked: names of optimizer state that forward and backward read.
    """
    positions = [i for i, e in enumerate(step.eqns) if e.effects]
    if not positions:
        return ()
    by_batch, by_gradient, by_update = 1, 2, 4
    seeds = {step.vars[n]: by_batch for n in step.batch}
    for name in step.opt_state:
        if name not in asked:
            seeds[step.vars[name]] = by_update
    seeds |= dict.fromkeys(gradients, by_gradient)
    enters = propagate(step.eqns, seeds, {})
    # The update may also contain equations of forward, such as those of the loss: their outputs
    # depend on no gradient. All other outputs of the update's equations are results of the
    # optimizer.
    for i in optimize:
        for v in step.eqns[i].outvars:
            if v not in gradients and enters.get(v, 0) > by_batch:
                seeds[v] = enters[v] | by_update
    enters = propagate(step.eqns, seeds, {})
    in_update = set(optimize)
    found = []
    for i in positions:
        eqn = step.eqns[i]
        bits = bits_of(enters, *eqn.invars)
        if bits & by_update or (i in in_update and bits & by_gradient):
            reads = UPDATE
        elif bits & by_gradient:
            reads = GRADIENTS
        else:
            reads = FORWARD if bits else STATE
        callback = _first_callback(eqn)
        source = callback or eqn
        found.append(
            Observer(
                position=i,
                name=source.primitive.name,
                line=line_of(source) or line_of(eqn),
                reads=reads,
                rows=bool(bits & by_batch),
                in_update=i in in_update,
                calls=callback is not None,
            )
        )
    return tuple(found)


def _first_callback(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return the first equation that calls a host function: `eqn` itself, or one in its body."""
    for inner in (eqn, *equations_inside(eqn)):
        if inner.primitive.name in CALLBACKS:
            return inner
    return None


RETURN_IT = "return the value as a result of the step, and print what job.step returns"


# -- refusals --------------------------------------------------------------------------------------


def refuse_observers(
    observers: Iterable[Observer], reads: Collection[str], why: str, remedy: str
) -> None:
    """Raise GradientError if a callback reads values that no program of a strategy has.

    For example, a trainer of parameter servers has no results of the optimizer.

    Args:
      observers: the callbacks.
      reads: kinds of values (`Observer.reads`) that the strategy's programs do not have.
      why: the reason, as a clause after "which".
      remedy: advice to the user.
    """
    for x in observers:
        if x.calls and x.reads in reads:
            raise GradientError(f"{x} reads {_READS[x.reads]}, which {why}; {remedy}")


def refuse_calls(observers: Iterable[Observer]) -> None:
    """Raise GradientError if a step has host callbacks, because several devices would call them.

    Strategies call this function if a trainer has several devices.
    """
    for x in observers:
        if x.calls:
            raise GradientError(f"every device of a trainer would call {x}; {RETURN_IT}")


def check_observers(program: Program, observers: Iterable[Observer]) -> None:
    """Raise GradientError for callbacks that a job cannot call exactly once in a step.

    Args:
      program: the step.
      observers: its callbacks.

    Raises:
      GradientError: a callback is ordered, is an `io_callback` with results, or is in a loop that
        both the update and the forward pass run.
    """
    refuse_twice(x for x in observers if x.reads in EARLY)
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name in CALLBACKS:
            what = f"{eqn.primitive.name} ({line_of(eqn)})"
            if is_ordered(eqn):
                raise GradientError(
                    f"{what} has ordered=True, which JAX does not support on several devices; "
                    "leave out ordered=True"
                )
            if eqn.outvars:
                raise GradientError(
                    f"{what} returns values, which could differ between devices; pass the values "
                    "to the step as an argument. If the function is pure, use jax.pure_callback"
                )


def refuse_twice(observers: Iterable[Observer]) -> None:
    """Raise GradientError if the update and the forward pass would both run a callback.

    If they need different outputs of one loop with a callback, both contain the loop.

    Args:
      observers: the callbacks of the forward and backward pass.
    """
    for x in observers:
        if x.in_update and x.calls:
            raise GradientError(
                f"{x} would be called twice: it is in a loop or a branch that the update and "
                "another output of the step need; move the callback out of the loop or branch"
            )


def callers_of(observers: Iterable[Observer], early: str, late: str) -> tuple[str, ...]:
    """Return a note for each callback, which tells the user the process that calls it.

    Args:
      observers: the callbacks.
      early: caller of callbacks in forward and backward.
      late: caller of callbacks that read gradients or results of the update.
    """
    found: dict[str, None] = {}
    for x in observers:
        if x.calls:
            caller = early if x.reads in EARLY else late
            found[f"{x} is called by {caller}"] = None
    return tuple(found)


# -- one call a step -------------------------------------------------------------------------------


def call_once(b: Builder, over: Sequence[str], start: int = 0) -> None:
    """Rewrite the callbacks in a trainer's program so that only trainer 0 calls them.

    Args:
      b: builder of the trainer's program.
      over: mesh axes of the trainers; an index over these axes identifies a trainer.
      start: index of the first equation to rewrite.
    """
    eqns, roles = b.eqns[start:], b.roles[start:]
    del b.eqns[start:], b.roles[start:]
    for eqn, role in zip(eqns, roles, strict=True):
        new = _for_first(eqn, tuple(over))
        b.eqns += new
        b.roles += [role] * len(new)


def _for_first(eqn: JaxprEqn, over: tuple[str, ...]) -> list[JaxprEqn]:
    """Rewrite an equation so that trainer 0 alone calls its host callbacks.

    The callbacks may be in bodies of the equation, such as the body of a loop.

    Returns:
      The equations that replace `eqn`.
    """
    if eqn.primitive.name in CALLBACKS:
        # Each callback gets its own equation for the index, so that bodies need no new input.
        number = Builder(small_jaxpr(lambda: [], []))
        (index,) = number.bind(trainer_index_p, over=over)
        traced = small_jaxpr(_calling(eqn), [index.aval, *(a.aval for a in eqn.invars)])
        (call,) = opened(traced).eqns
        return [
            *number.eqns,
            call.replace(invars=[index, *eqn.invars], source_info=eqn.source_info),
        ]
    if not eqn.effects:
        return [eqn]

    def body(jaxpr: Any) -> Any:
        eqns: list[JaxprEqn] = []
        for inner in opened(jaxpr).eqns:
            eqns += _for_first(inner, over)
        return with_equations(jaxpr, eqns)

    return [eqn.replace(params=map_bodies(eqn.params, body))]


def _calling(eqn: JaxprEqn) -> Callable[..., None]:
    """Return a traceable function (trainer index, *operands) that calls the callback of `eqn`.

    The host calls the user's function only for index 0.
    """
    fn = functools.partial(_if_first, host_function(eqn))
    if eqn.primitive.name == "io_callback":
        return lambda *args: io_callback(fn, None, *args)
    return lambda *args: jax.debug.callback(fn, *args)


def _if_first(fn: Callable[..., Any], index: Any, *args: Any) -> None:
    if int(index) == 0:
        fn(*args)
