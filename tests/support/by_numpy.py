"""Evaluation of jaxprs by NumPy, one equation at a time.

Random small programs differ in every shape, so JAX would compile each primitive again. This would
take a hundred times as long. JAX evaluates primitives without a rule in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, Literal, constants, opened, scan_counts, while_counts
from dtrans.ir.inline import inline_calls
from dtrans.verification.numpy_rules import ELEMENTWISE, OTHERS


def interpret(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr on arrays; loops and branches run in Python."""
    inner = opened(jaxpr)
    env = dict(zip(inner.invars, map(_host, args), strict=True))
    env.update(zip(inner.constvars, map(_host, constants(jaxpr)), strict=True))
    read = lambda a: np.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else env[a]
    for eqn in inner.eqns:
        operands, name, p = [read(a) for a in eqn.invars], eqn.primitive.name, eqn.params
        if name in LOOPS:
            made = LOOPS[name](eqn, operands)
        elif name in ELEMENTWISE:
            made = [ELEMENTWISE[name](*operands)]
        elif name in OTHERS:
            made = OTHERS[name](p, operands, eqn.outvars[0].aval)
        else:
            out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(p))
            made = [_host(x) for x in (out if eqn.primitive.multiple_results else [out])]
        for v, x in zip(eqn.outvars, made, strict=True):
            env[v] = x if isinstance(x, jax.Array) else np.asarray(x, v.aval.dtype)
            assert env[v].shape == v.aval.shape, f"{eqn} makes {env[v].shape}"
            assert env[v].dtype == v.aval.dtype, f"{eqn} makes {env[v].dtype}"
    return [read(a) for a in inner.outvars]


def traced(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function that NumPy computes, for arguments of the same types."""
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    inlined, structure = inline_calls(jaxpr), jax.tree.structure(out)

    def run(*args: Any) -> Any:
        # XLA does not warn either: `where` often discards a quotient by zero
        with np.errstate(all="ignore"):
            return structure.unflatten(interpret(inlined, *jax.tree.leaves(args)))

    return run


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)`, computed by NumPy."""
    return traced(fn, *args)(*args)


def _host(x: Any) -> Any:
    """Return an array as a NumPy array; return random keys unchanged."""
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x)


# -- loops and branches ----------------------------------------------------------------------------


def _cond(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    p = eqn.params
    which = int(np.clip(int(operands[0]), 0, len(p["branches"]) - 1))
    return interpret(p["branches"][which], *operands[1:])


def _while(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    p = eqn.params
    n, m = while_counts(eqn)[0], sum(while_counts(eqn))
    carry = list(operands[m:])
    while interpret(p["cond_jaxpr"], *operands[:n], *carry)[0]:
        carry = interpret(p["body_jaxpr"], *operands[n:m], *carry)
    return carry


def _scan(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    p = eqn.params
    n, m = scan_counts(eqn)[0], sum(scan_counts(eqn))
    carry, turns = list(operands[n:m]), []
    order = range(p["length"])[:: -1 if p["reverse"] else 1]
    for t in order:
        outs = interpret(p["jaxpr"], *operands[:n], *carry, *(x[t] for x in operands[m:]))
        carry = outs[: m - n]
        turns.append(outs[m - n :])
    if p["reverse"]:
        turns.reverse()
    return [*carry, *map(np.stack, zip(*turns, strict=True))]


LOOPS: Mapping[str, Callable[[JaxprEqn, Sequence[Any]], list[Any]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
