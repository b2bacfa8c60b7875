"""Calls replaced by their bodies, and dead code removed, so that every value that matters is
visible at the top."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    call_body,
    closed,
    constants,
    live_part,
    opened,
    within_scope,
)


# identities that say where a derivative begins (`dtrans.step.marks`), or how a value is merged
# (`dtrans.collect`)
_PASSED = ("loss", "loss_seed", "collect")


def inline_calls(
    jaxpr: ClosedJaxpr,
    keep: Collection[str] = (),
    *,
    rules: bool = False,
    body_of: Callable[[JaxprEqn], Any | None] | None = None,
) -> ClosedJaxpr:
    """Replace every call by its body, at the top level and below.

    Loops and branches stay, and so do identities of this package that are named in `keep`. Inlined
    equations keep the name stack they had inside the call, under that of the call; constants of
    bodies become constants of the whole.

    Args:
      rules: leave calls that have a derivative of their own, since this is still to be
        differentiated.
      body_of: gives the body that stands for an equation, or None; by default that of JAX's calls.
    """
    outer = opened(jaxpr)
    constvars, consts = list(outer.constvars), constants(jaxpr)
    hoisted: dict[int, Var] = {}
    eqns: list[JaxprEqn] = []

    def walk(
        inner: Jaxpr, env: dict[Var, Atom], wrap: Callable[[JaxprEqn], JaxprEqn], top: bool
    ) -> None:
        read: Callable[[Atom], Atom] = lambda a: a if isinstance(a, Literal) else env.get(a, a)
        for eqn in inner.eqns:
            body = call_body(eqn, rules=rules) if body_of is None else body_of(eqn)
            if eqn.primitive.name in _PASSED and eqn.primitive.name not in keep:
                env[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            if body is None:
                # a body can be shared by several calls, so its variables are made anew for each
                ins = [read(a) for a in eqn.invars]
                if top:
                    eqns.append(
                        eqn if all(map(operator.is_, ins, eqn.invars)) else eqn.replace(invars=ins)
                    )
                    continue
                outs = [Var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
                eqns.append(wrap(eqn.replace(invars=ins, outvars=outs)))
                continue
            sub = opened(body)
            inside: dict[Var, Atom] = dict(zip(sub.invars, map(read, eqn.invars), strict=True))
            for var, value in zip(sub.constvars, constants(body), strict=True):
                if id(value) not in hoisted:
                    hoisted[id(value)] = Var(var.aval)
                    constvars.append(hoisted[id(value)])
                    consts.append(value)
                inside[var] = hoisted[id(value)]
            walk(sub, inside, functools.partial(_within, call=eqn, wrap=wrap), top=False)
            for out, made in zip(eqn.outvars, sub.outvars, strict=True):
                env[out] = made if isinstance(made, Literal) else inside.get(made, made)

    env: dict[Var, Atom] = {}
    walk(outer, env, lambda e: e, top=True)
    outvars = [a if isinstance(a, Literal) else env.get(a, a) for a in outer.outvars]
    return closed(constvars, consts, outer.invars, outvars, eqns, jaxpr)


def _within(eqn: JaxprEqn, call: JaxprEqn, wrap: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    return wrap(within_scope(eqn, call))


def eliminate_dead(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Drop what no output needs, inside loops and branches too. All inputs stay; unused constants
    go."""
    inner = opened(jaxpr)
    hoisted = inner.replace(
        constvars=[],
        invars=[*inner.constvars, *inner.invars],
        debug_info=inner.debug_info.with_unknown_names(),
    )
    count = len(inner.constvars)
    pruned, used = live_part(
        hoisted, [True] * len(inner.outvars), [False] * count + [True] * len(inner.invars)
    )
    live = sum(used[:count])
    consts = [c for c, u in zip(constants(jaxpr), used[:count], strict=True) if u]
    return closed(
        pruned.invars[:live], consts, pruned.invars[live:], pruned.outvars, pruned.eqns, jaxpr
    )
