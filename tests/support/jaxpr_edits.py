"""Edits of jaxprs: an operand, an input, zeros or the equation's body replaces an equation.

An edit names an equation by its place: the equation's position; or the position of a loop, a branch
or a call, the number of a body, and the place in this body. Places refer to the jaxpr without
edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dtrans._jax import (
    COND,
    CUSTOM_RULES,
    SCAN,
    Literal,
    bodies,
    closed,
    constants,
    has_bodies,
    live_part,
    opened,
    scan_counts,
    scan_length,
    small_jaxpr,
    with_bodies,
)


Place = tuple[int, ...]
Edits = tuple[tuple[Place, int], ...]
# An edit n replaces an equation's output by the n-th earlier value of the same type. These two
# edits replace an output by the output of the equation's body, or by zeros.
BODY, ZEROS = -1, 99


def without_dead_equations(fn: Callable[..., Any], types: Sequence[Any]) -> Any:
    """Return the jaxpr of a function, for arrays of these types, without unread equations."""
    made = small_jaxpr(fn, types)
    inner = opened(made)
    live, _ = live_part(inner, [True] * len(inner.outvars), [True] * len(inner.invars))
    return closed(live.constvars, constants(made), live.invars, live.outvars, live.eqns, live)


def run_with_edits(
    jaxpr: Any, edits: Mapping[Place, int], place: Place, args: Sequence[Any]
) -> list[Any]:
    """Return the outputs of a jaxpr with edits."""
    inner = opened(jaxpr)
    env = dict(zip([*inner.constvars, *inner.invars], [*constants(jaxpr), *args], strict=True))
    read: Callable[[Any], Any] = lambda a: a.val if isinstance(a, Literal) else env[a]
    for n, eqn in enumerate(inner.eqns):
        at, ins = (*place, n), [read(a) for a in eqn.invars]
        edit = edits.get(at)
        if edit == BODY:
            made = _run_once(eqn, edits, at, ins)
        elif edit is not None:
            made = [_replacement(v.aval, [*ins, *args], edit) for v in eqn.outvars]
        else:
            new = with_bodies(eqn, _short_bodies(eqn, edits, at)) if has_bodies(eqn) else {}
            made = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params({**eqn.params, **new}))
            made = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(a) for a in inner.outvars]


def _run_once(eqn: Any, edits: Mapping[Place, int], at: Place, ins: Sequence[Any]) -> list[Any]:
    """Return the outputs of a call's body, of the first branch, or of a loop that repeats its first
    iteration.
    """
    body, name = bodies(eqn)[0], eqn.primitive.name
    if name != SCAN:
        return run_with_edits(body, edits, (*at, 0), ins[1:] if name == COND else ins)
    consts, carried = scan_counts(eqn)
    first = consts + carried
    made = run_with_edits(body, edits, (*at, 0), [*ins[:first], *(x[0] for x in ins[first:])])
    return [
        *made[:carried],
        *(jnp.broadcast_to(x, (scan_length(eqn), *jnp.shape(x))) for x in made[carried:]),
    ]


def _short_bodies(eqn: Any, edits: Mapping[Place, int], at: Place) -> Iterator[Any]:
    """Yield the bodies of an equation, with edits."""
    for number, body in enumerate(bodies(eqn)):
        place = (*at, number)
        if not any(path[: len(place)] == place for path in edits):
            yield body
            continue
        run = lambda *ins, b=body, p=place: run_with_edits(b, edits, p, ins)
        made = small_jaxpr(run, [v.aval for v in opened(body).invars])
        yield opened(made) if opened(body) is body else made


def _replacement(aval: Any, values: Sequence[Any], edit: int) -> Any:
    """Return value number `edit` of this type; return zeros if there are fewer values."""
    alike = [x for x in values if jnp.shape(x) == aval.shape and jnp.result_type(x) == aval.dtype]
    if edit < len(alike):
        return alike[edit]
    return lax.full(aval.shape, 0, aval.dtype) if aval.shape else np.zeros((), aval.dtype)


def edits_of(jaxpr: Any, place: Place, edits: Mapping[Place, int]) -> Iterator[tuple[Place, int]]:
    """Yield edits of each equation, the last equation first."""
    for n, eqn in reversed(list(enumerate(opened(jaxpr).eqns))):
        at = (*place, n)
        keys = [v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)]
        if keys or edits.get(at, BODY) != BODY:  # no number can replace a random key
            continue
        yield from ((at, 0), (at, 1), (at, ZEROS))
        if not has_bodies(eqn):
            continue
        if eqn.primitive.name != "while":
            yield at, BODY
        if eqn.primitive.name in CUSTOM_RULES:  # an edit of the body would not change the rule
            continue
        for number, body in enumerate(bodies(eqn)):
            yield from edits_of(body, (*at, number), edits)
