"""Calls with derivative rules of users, on pieces: `jax.custom_jvp` and `jax.custom_vjp`.

A program that is differentiated later keeps such calls. The call and its rule are written for one
shard each, and the call on pieces gets the rule on pieces:

    jvp   tangents lie as the values that they belong to
    vjp   cotangents of what is cut are cut; those of what all shards have are terms of a sum

A rule is applied once: calls inside of a rule are inlined. The rule of a `custom_vjp` begins with
its operands, so that what its forward pass keeps is computed again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    CUSTOM_JVP,
    ClosedJaxpr,
    JaxprEqn,
    ShapedArray,
    Var,
    bodies,
    closed,
    closed_over,
    evaluate,
    opened,
    small_jaxpr,
)
from dtrans.engine.layout import PARTIAL, Placed
from dtrans.rows.layout import RowAxis


# writes a jaxpr on pieces: from the layouts of its inputs to those of its outputs; None if pieces
# are not enough
WriteRule = Callable[[ClosedJaxpr, Sequence[Placed], Sequence[Placed]], ClosedJaxpr | None]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call with a rule, by itself.

    Attributes:
      jaxpr: the equation and nothing else.
      floats: the operands that have derivatives.
      made: the outputs that have them.
    """

    jaxpr: ClosedJaxpr
    floats: tuple[int, ...]
    made: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> _Call:
        ins, outs = [Var(a.aval) for a in eqn.invars], [Var(v.aval) for v in eqn.outvars]
        jaxpr = closed([], [], ins, outs, [eqn.replace(invars=ins, outvars=outs)], bodies(eqn)[0])
        floats = tuple(i for i in _floats(ins) if i >= closed_over(eqn))
        return cls(jaxpr, floats, _floats(outs))

    @property
    def types(self) -> list[Any]:
        return _in_types(self.jaxpr)

    def _outs(self, operands: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return the outputs as a function of the operands that have derivatives."""

        def fn(*floats: Any) -> list[Any]:
            args = list(operands)
            for i, x in zip(self.floats, floats, strict=True):
                args[i] = x
            return evaluate(self.jaxpr, *args)

        return fn

    def jvp(self, *args: Any) -> list[Any]:
        """Return the outputs and their tangents, from all operands and the tangents of those that
        have them."""
        operands, tangents = args[: len(self.types)], args[len(self.types) :]
        outs, found = jax.jvp(
            self._outs(operands), [operands[i] for i in self.floats], list(tangents)
        )
        return [*outs, *(found[i] for i in self.made)]

    def vjp(self, *args: Any) -> list[Any]:
        """Return the cotangents of operands, from all operands and the cotangents of outputs."""
        operands, cotangents = args[: len(self.types)], args[len(self.types) :]
        outs, pull = jax.vjp(self._outs(operands), *(operands[i] for i in self.floats))
        given = iter(cotangents)
        zeros = lambda x: np.zeros(np.shape(x), jax.dtypes.float0)
        return list(pull([next(given) if i in self.made else zeros(x) for i, x in enumerate(outs)]))


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(values) if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def call_on_pieces(
    eqn: JaxprEqn,
    primal: ClosedJaxpr,
    ins: Sequence[Placed],
    outs: Sequence[Placed],
    write: WriteRule,
) -> ClosedJaxpr | None:
    """Return a jaxpr whose one equation is the call with its rule, on pieces; None if its rule
    needs whole values.

    It takes the number of the shard first, if its body or its rule does.

    Args:
      eqn: the call.
      primal: its body on pieces.
      ins: the layouts of its operands: whole or cut.
      outs: those of its outputs.
      write: writes the rule on pieces.
    """
    call = _Call.of(eqn)
    made = [v.aval for v in eqn.outvars]
    is_jvp = eqn.primitive.name == CUSTOM_JVP
    if is_jvp:
        whole = small_jaxpr(call.jvp, [*call.types, *(call.types[i] for i in call.floats)])
        given = [*ins, *(ins[i] for i in call.floats)]
        rule = write(whole, given, [*outs, *(outs[i] for i in call.made)])
    else:
        whole = small_jaxpr(call.vjp, [*call.types, *(made[i] for i in call.made)])
        given = [*ins, *(_cotangent(outs[i]) for i in call.made)]
        rule = write(whole, given, [_cotangent(ins[i]) for i in call.floats])
    if rule is None:
        return None
    types = _in_types(primal)
    more = len(types) - len(ins), len(_in_types(rule)) - len(given)  # 1 for what takes the index
    skipped = max(more)
    body: Callable[..., list[Any]] = lambda *args: evaluate(primal, *args[skipped - more[0] :])
    of_rule: Callable[..., list[Any]] = lambda *args: evaluate(rule, *args[skipped - more[1] :])
    fn = (_with_jvp if is_jvp else _with_vjp)(call, body, of_rule, skipped)
    return small_jaxpr(fn, [*[_INDEX] * skipped, *types[more[0] :]])


def _in_types(jaxpr: ClosedJaxpr) -> list[Any]:
    return [v.aval for v in opened(jaxpr).invars]


_INDEX = ShapedArray((), np.dtype(np.int32))


def _cotangent(layout: Placed) -> Placed:
    return layout if isinstance(layout, RowAxis) else PARTIAL


def _with_jvp(
    call: _Call, body: Callable[..., list[Any]], rule: Callable[..., list[Any]], skipped: int
) -> Callable[..., Any]:
    """Return a function of `skipped` numbers and the operands of the call, with a rule."""
    fn = jax.custom_jvp(body)

    @fn.defjvp
    def apply_rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        found = rule(*primals, *(tangents[skipped + i] for i in call.floats))
        count = len(found) - len(call.made)
        outs, made = found[:count], iter(found[count:])
        none = [np.zeros(np.shape(x), jax.dtypes.float0) for x in outs]
        return outs, [next(made) if i in call.made else zero for i, zero in enumerate(none)]

    return fn


def _with_vjp(
    call: _Call, body: Callable[..., list[Any]], rule: Callable[..., list[Any]], skipped: int
) -> Callable[..., Any]:
    """Return the same of a call whose rule takes cotangents."""
    fn = jax.custom_vjp(body)

    def forward(*args: Any) -> tuple[Any, Any]:
        return fn(*args), args

    def backward(args: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        made = iter(rule(*args, *(cotangents[i] for i in call.made)))
        return tuple(next(made) if i - skipped in call.floats else None for i in range(len(args)))

    fn.defvjp(forward, backward)
    return fn
