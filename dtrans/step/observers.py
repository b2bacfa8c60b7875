"""Host callbacks of a step: `jax.debug.print`, `jax.debug.callback`, `io_callback`.

An `Observer` is an equation with an effect. Its operands decide who can call it with the values of
one device:

    state       parameters and constants: trainers have them
    forward     values of forward and backward: trainers have them, and complete what is a part
    gradients   gradients, and values made from them: complete only after the reduction
    update      new parameters, or the optimizer's state: complete where the update runs

A job calls each of them once in a step. `call_once` writes that: every trainer passes its number to
the host, and the host calls the user's function for trainer 0 alone. A `cond` on the number would
not do: `jax.vmap`, which simulates trainers, carries out both branches.

`jax.pure_callback` has no effect and is no observer. It is a function like others, and may be
called by all trainers.
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
from dtrans.ir.dataflow import propagate
from dtrans.ir.program import Program
from dtrans.ops import trainer_index_p


if TYPE_CHECKING:
    from dtrans.step.gradients import OpenStep


STATE, FORWARD, GRADIENTS, UPDATE = "state", "forward", "gradients", "update"
EARLY = (STATE, FORWARD)  # what forward and backward carry out
_READS = {
    STATE: "parameters",
    FORWARD: "values of the batch",
    GRADIENTS: "gradients",
    UPDATE: "what the optimizer makes",
}


@dataclasses.dataclass(frozen=True)
class Observer:
    """An equation with an effect.

    Attributes:
      position: of the equation in the step.
      name: of its primitive, or of the callback inside: `debug_print`, `debug_callback`,
        `io_callback`.
      line: the user's line, `model.py:12`; empty where that is not known.
      reads: "state", "forward", "gradients" or "update"; see the module's docstring.
      rows: True where the batch enters otherwise than through gradients.
      in_update: True where the update needs the equation, so that it is carried out with the
        update.
      calls: False for equations of dtrans that call nothing, as summaries.
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
      gradients: the values at which the step is cut.
      optimize: positions of the equations of the update.
      asked: arrays of the optimizer's state that forward and backward read anyway.
    """
    positions = [i for i, e in enumerate(step.eqns) if e.effects]
    if not positions:
        return ()
    by_batch, by_gradient, by_update = 1, 2, 4
    seeds = dict.fromkeys((step.vars[n] for n in step.batch), by_batch)
    seeds |= dict.fromkeys((step.vars[n] for n in step.opt_state if n not in asked), by_update)
    seeds |= dict.fromkeys(gradients, by_gradient)
    enters = propagate(step.eqns, seeds, {})
    # an update may need values of forward, as the loss: those are no values of the optimizer
    made = [v for i in optimize for v in step.eqns[i].outvars if v not in gradients]
    seeds |= {v: enters[v] | by_update for v in made if enters.get(v, 0) > by_batch}
    enters = propagate(step.eqns, seeds, {})
    in_update = set(optimize)

    def observer(i: int) -> Observer:
        eqn, bits = step.eqns[i], 0
        for a in eqn.invars:
            bits |= enters.get(a, 0) if isinstance(a, Var) else 0
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
    """Raise for callbacks that nobody can call with the value of one device.

    Args:
      reads: the kinds that are refused.
      why: the reason, after "which".
      remedy: what to do instead of printing inside of the step.

    Raises:
      GradientError: there is one.
    """
    for x in observers:
        if x.calls and x.reads in reads:
            raise GradientError(f"{x} reads {_READS[x.reads]}, which {why}; {remedy}")


def check_observers(program: Program, observers: Iterable[Observer]) -> None:
    """Raise for callbacks that several devices cannot carry out once.

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
                    f"{what} returns values, of which each device would have its own; give them to "
                    "the step as an "
                    "argument, or call jax.pure_callback if the function is pure"
                )


def refuse_twice(observers: Iterable[Observer]) -> None:
    """Raise for callbacks in loops of the update that something else needs as well, and would carry
    out again."""
    for x in observers:
        if x.in_update and x.calls:
            raise GradientError(
                f"{x} is in a loop or a branch that the update needs, and another output of the "
                "step too: it would be "
                "called twice; take it out of there"
            )


def callers_of(observers: Iterable[Observer], early: str, late: str) -> tuple[str, ...]:
    """Return sentences of who calls each callback, for a plan.

    Args:
      early: who calls those that forward and backward carry out.
      late: who calls the others.
    """
    found = (
        f"{x} is called by {early if x.reads in EARLY else late}" for x in observers if x.calls
    )
    return tuple(dict.fromkeys(found))


# -- called once -----------------------------------------------------------------------------------


def call_once(b: Builder, over: Sequence[str], start: int = 0) -> None:
    """Let callbacks that are written be called for trainer 0 alone.

    Args:
      b: that the program of a trainer is written with.
      over: the named axes that trainers are on.
      start: the first equation that is looked at.
    """
    eqns, roles = b.eqns[start:], b.roles[start:]
    del b.eqns[start:], b.roles[start:]
    for eqn, role in zip(eqns, roles, strict=True):
        new = _for_first(eqn, tuple(over))
        b.eqns += new
        b.roles += [role] * len(new)


def _for_first(eqn: JaxprEqn, over: tuple[str, ...]) -> list[JaxprEqn]:
    """Return an equation with its callbacks, and those in its bodies, called for trainer 0
    alone."""
    if eqn.primitive.name in CALLBACKS:
        # the number is made beside each callback: bodies need no further input for it
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
        return with_equations(
            jaxpr, [new for e in opened(jaxpr).eqns for new in _for_first(e, over)]
        )

    return [eqn.replace(params=map_bodies(eqn.params, body))]


def _calling(eqn: JaxprEqn) -> Callable[..., None]:
    """Return the function of a trainer's number and the operands that makes the callback."""
    fn = functools.partial(_if_first, host_function(eqn))
    if eqn.primitive.name == "io_callback":
        return lambda *args: io_callback(fn, None, *args)
    return lambda *args: jax.debug.callback(fn, *args)


def _if_first(fn: Callable[..., Any], index: Any, *args: Any) -> None:
    if int(index) == 0:
        fn(*args)
