"""Host callbacks of a step: `jax.debug.print`, `jax.debug.callback`, `io_callback`.

An `Observer` is an equation with an effect. Its operands decide which program can call it with the
values of one device:

    state       parameters and constants: trainers have them
    forward     values of forward and backward: trainers have them, and complete partial ones
    gradients   gradients, and values that depend on them: complete after the reduction
    update      new parameters, or the optimizer's state: complete where the update runs

A job calls each of them once in a step. `call_once` does that: every trainer passes its index to
the host, and the host calls the user's function for trainer 0 only. A `cond` on the index would not
work: `jax.vmap`, which simulates trainers, runs both branches.

`jax.pure_callback` has no effect and is no observer: all trainers may call it.
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
from dtrans.ir.dataflow import avals, bits_of, propagate
from dtrans.ir.program import Program
from dtrans.ir.selection import values_at
from dtrans.ops import trainer_index_p


if TYPE_CHECKING:
    from dtrans.step.gradients import OpenStep


STATE, FORWARD, GRADIENTS, UPDATE = "state", "forward", "gradients", "update"
EARLY = (STATE, FORWARD)  # kinds that forward and backward run
_READS = {
    STATE: "parameters",
    FORWARD: "values of the batch",
    GRADIENTS: "gradients",
    UPDATE: "what the optimizer makes",
}


@dataclasses.dataclass(frozen=True)
class Observer:
    """Equation with an effect.

    Attributes:
      position: position of the equation in the step.
      name: its primitive, or that of the callback inside: `debug_print`, `debug_callback`,
        `io_callback`.
      line: user's line, `model.py:12`; empty if unknown.
      reads: "state", "forward", "gradients" or "update"; see the module's docstring.
      rows: True if the batch enters other than through gradients.
      in_update: True if the update needs the equation and runs it.
      calls: False for equations of dtrans without a callback, such as summaries.
    """

    position: int
    name: str
    line: str
    reads: str
    rows: bool
    in_update: bool
    calls: bool

    def __str__(self) -> str:
        return self.name + (f" ({self.line})" if self.line else "")


def observers_of(
    step: OpenStep, gradients: Collection[Var], optimize: Sequence[int], asked: Collection[str]
) -> tuple[Observer, ...]:
    """Return the equations with effects.

    Args:
      step: the step.
      gradients: values at which the step is cut.
      optimize: positions of the update's equations.
      asked: optimizer state that forward and backward read.
    """
    positions = [i for i, e in enumerate(step.eqns) if e.effects]
    if not positions:
        return ()
    by_batch, by_gradient, by_update = 1, 2, 4
    seeds = dict.fromkeys(values_at(step.vars, step.batch), by_batch)
    seeds |= dict.fromkeys((step.vars[n] for n in step.opt_state if n not in asked), by_update)
    seeds |= dict.fromkeys(gradients, by_gradient)
    enters = propagate(step.eqns, seeds, {})
    # an update may need values of forward, such as the loss: those are no values of the optimizer
    outputs = [v for i in optimize for v in step.eqns[i].outvars if v not in gradients]
    seeds |= {v: enters[v] | by_update for v in outputs if enters.get(v, 0) > by_batch}
    enters = propagate(step.eqns, seeds, {})
    in_update = set(optimize)

    def observer(i: int) -> Observer:
        eqn = step.eqns[i]
        bits = bits_of(enters, *eqn.invars)
        if bits & by_update or (i in in_update and bits & by_gradient):
            reads = UPDATE
        else:
            reads = GRADIENTS if bits & by_gradient else FORWARD if bits else STATE
        inside = next(
            (e for e in (eqn, *equations_inside(eqn)) if e.primitive.name in CALLBACKS), None
        )
        found = inside or eqn
        line, rows = line_of(found) or line_of(eqn), bool(bits & by_batch)
        return Observer(
            i, found.primitive.name, line, reads, rows, i in in_update, inside is not None
        )

    return tuple(map(observer, positions))


RETURN_IT = "return the value as a result of the step, and print what job.step returns"


# -- refusals --------------------------------------------------------------------------------------


def refuse_observers(
    observers: Iterable[Observer], reads: Collection[str], why: str, remedy: str
) -> None:
    """Raise GradientError for callbacks that no program can call with the value of one device.

    Args:
      observers: the callbacks.
      reads: kinds to refuse.
      why: the reason, after "which".
      remedy: an alternative to printing inside of the step.

    Raises:
      GradientError: there is one.
    """
    for x in observers:
        if x.calls and x.reads in reads:
            raise GradientError(f"{x} reads {_READS[x.reads]}, which {why}; {remedy}")


def check_observers(program: Program, observers: Iterable[Observer]) -> None:
    """Raise GradientError for callbacks that several devices cannot call once.

    Raises:
      GradientError: an ordered one, an `io_callback` with results, or one that both halves of the
        step need.
    """
    refuse_twice(x for x in observers if x.reads in EARLY)
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name in CALLBACKS:
            what = f"{eqn.primitive.name} ({line_of(eqn)})"
            if is_ordered(eqn):
                raise GradientError(
                    f"{what} is ordered, which JAX does not allow over devices; leave ordered=True "
                    "out"
                )
            if eqn.outvars:
                raise GradientError(
                    f"{what} returns values, which would differ between devices; pass them to the "
                    "step as an argument, or call jax.pure_callback if the function is pure"
                )


def refuse_twice(observers: Iterable[Observer]) -> None:
    """Raise GradientError for callbacks in loops of the update that another half would repeat."""
    for x in observers:
        if x.in_update and x.calls:
            raise GradientError(
                f"{x} is in a loop or a branch that the update needs, and another output of the "
                "step too: it would be "
                "called twice; take it out of there"
            )


def callers_of(observers: Iterable[Observer], early: str, late: str) -> tuple[str, ...]:
    """Return sentences for a plan that name the caller of each callback.

    Args:
      observers: the callbacks.
      early: caller of those in forward and backward.
      late: caller of the others.
    """
    found = (
        f"{x} is called by {early if x.reads in EARLY else late}" for x in observers if x.calls
    )
    return tuple(dict.fromkeys(found))


# -- one call a step -------------------------------------------------------------------------------


def call_once(b: Builder, over: Sequence[str], start: int = 0) -> None:
    """Rewrite callbacks so that trainer 0 alone calls them.

    Args:
      b: builder of a trainer's program.
      over: named axes of the trainers.
      start: position of the first equation to rewrite.
    """
    eqns, roles = b.eqns[start:], b.roles[start:]
    del b.eqns[start:], b.roles[start:]
    for eqn, role in zip(eqns, roles, strict=True):
        new = _for_first(eqn, tuple(over))
        b.eqns += new
        b.roles += [role] * len(new)


def _for_first(eqn: JaxprEqn, over: tuple[str, ...]) -> list[JaxprEqn]:
    """Return an equation whose callbacks, at any depth, are called for trainer 0 alone."""
    if eqn.primitive.name in CALLBACKS:
        # each callback gets its own equation for the index, so that bodies need no new input
        number = Builder(small_jaxpr(lambda: [], []))
        (index,) = number.bind(trainer_index_p, over=over)
        traced = small_jaxpr(_calling(eqn), [index.aval, *avals(eqn.invars)])
        (call,) = opened(traced).eqns
        return [
            *number.eqns,
            call.replace(invars=[index, *eqn.invars], source_info=eqn.source_info),
        ]
    if not eqn.effects:
        return [eqn]

    def body(jaxpr: Any) -> Any:
        return with_equations(
            jaxpr, [new for e in opened(jaxpr).eqns for new in _for_first(e, over)]
        )

    return [eqn.replace(params=map_bodies(eqn.params, body))]


def _calling(eqn: JaxprEqn) -> Callable[..., None]:
    """Return the function of a trainer's index and the operands that calls the callback."""
    fn = functools.partial(_if_first, host_function(eqn))
    if eqn.primitive.name == "io_callback":
        return lambda *args: io_callback(fn, None, *args)
    return lambda *args: jax.debug.callback(fn, *args)


def _if_first(fn: Callable[..., Any], index: Any, *args: Any) -> None:
    if int(index) == 0:
        fn(*args)
