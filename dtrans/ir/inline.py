"""Inlining of calls, and dead code elimination: every relevant value is then at the top level."""

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


# identities that mark the seed of a derivative (`dtrans.step.marks`) or a collection
# (`dtrans.collect`)
_PASSED = ("loss", "loss_seed", "collect")


def inline_calls(
    jaxpr: ClosedJaxpr,
    keep: Collection[str] = (),
    *,
    rules: bool = False,
    body_of: Callable[[JaxprEqn], Any | None] | None = None,
) -> ClosedJaxpr:
    """Replace every call by its body, at any depth.

    Loops and branches stay, and so do identities of this package that are in `keep`. Inlined
    equations have their name stack inside the call under that of the call. Constants of bodies
    become constants of the result.

    Args:
      jaxpr: the jaxpr.
      keep: names of identities that stay.
      rules: True to keep calls with derivative rules, for a later differentiation.
      body_of: returns the body that replaces an equation, or None; by default that of JAX's calls.
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
                # several calls may share a body, so each gets new variables
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
            for out, atom in zip(eqn.outvars, sub.outvars, strict=True):
                env[out] = atom if isinstance(atom, Literal) else inside.get(atom, atom)

    env: dict[Var, Atom] = {}
    walk(outer, env, lambda e: e, top=True)
    outvars = [a if isinstance(a, Literal) else env.get(a, a) for a in outer.outvars]
    return closed(constvars, consts, outer.invars, outvars, eqns, jaxpr)


def _within(eqn: JaxprEqn, call: JaxprEqn, wrap: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    return wrap(within_scope(eqn, call))


def eliminate_dead(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Drop equations that no output needs, at any depth, and unused constants; inputs stay."""
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
