"""Inlining of calls, and dead code elimination.

After both passes, every value that an output depends on is at the top level, or in a loop or
branch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    call_body,
    call_operands,
    closed,
    constants,
    live_part,
    opened,
    within_scope,
)


# Identity primitives, dropped unless `keep` names them. They mark the loss, the seed of its
# derivative (`dtrans.step.marks`), and collected values (`dtrans.collect`).
_PASSED = ("loss", "loss_seed", "collect")


def inline_calls(
    jaxpr: ClosedJaxpr,
    keep: Collection[str] = (),
    *,
    rules: bool = False,
    body_of: Callable[[JaxprEqn], Any | None] | None = None,
) -> ClosedJaxpr:
    """Replace every call by its body, at any depth.

    Loops and branches stay. Equations of a body get the name stack of the call as a prefix.
    Constants of bodies become constants of the result.

    Args:
      jaxpr: the jaxpr.
      keep: names of primitives of dtrans to keep, which return their operands and mark them for
        later passes.
      rules: True to keep calls with custom derivative rules, for a later differentiation.
      body_of: returns the body that replaces an equation, or None to keep the equation. By default
        all of JAX's calls are replaced.
    """
    find_body = body_of or functools.partial(call_body, rules=rules)
    outer = opened(jaxpr)
    constvars, consts = list(outer.constvars), constants(jaxpr)
    hoisted: dict[int, Var] = {}
    eqns: list[JaxprEqn] = []

    def walk(
        inner: Jaxpr, env: dict[Var, Atom], wrap: Callable[[JaxprEqn], JaxprEqn], top: bool
    ) -> None:
        for eqn in inner.eqns:
            body = find_body(eqn)
            if eqn.primitive.name in _PASSED and eqn.primitive.name not in keep:
                env[eqn.outvars[0]] = _replaced(env, eqn.invars[0])
                continue
            if body is None:
                ins = [_replaced(env, a) for a in eqn.invars]
                if top:
                    if not all(map(operator.is_, ins, eqn.invars)):
                        eqn = eqn.replace(invars=ins)
                    eqns.append(eqn)
                    continue
                # several calls may share this body, so each gets its own output variables
                outs = [Var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
                eqns.append(wrap(eqn.replace(invars=ins, outvars=outs)))
                continue
            sub = opened(body)
            operands = [_replaced(env, a) for a in call_operands(eqn)]
            inside: dict[Var, Atom] = dict(zip(sub.invars, operands, strict=True))
            for var, value in zip(sub.constvars, constants(body), strict=True):
                if id(value) not in hoisted:
                    hoisted[id(value)] = Var(var.aval)
                    constvars.append(hoisted[id(value)])
                    consts.append(value)
                inside[var] = hoisted[id(value)]
            walk(sub, inside, functools.partial(_within, call=eqn, wrap=wrap), top=False)
            for out, atom in zip(eqn.outvars, sub.outvars, strict=True):
                env[out] = _replaced(inside, atom)

    env: dict[Var, Atom] = {}
    walk(outer, env, lambda e: e, top=True)
    outvars = [_replaced(env, a) for a in outer.outvars]
    return closed(constvars, consts, outer.invars, outvars, eqns, jaxpr)


def _replaced(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    if isinstance(atom, Literal):
        return atom
    return env.get(atom, atom)


def _within(eqn: JaxprEqn, call: JaxprEqn, wrap: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    return wrap(within_scope(eqn, call))


def eliminate_dead(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Drop unused constants, and equations that no output depends on, also in bodies."""
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
