"""`jax.custom_jvp` and `jax.custom_vjp` calls on shards.

If a program is differentiated later, it must keep these calls. The engine rewrites the function and
the derivative rule for one shard, and writes a new call with both. Layouts of derivatives:

    jvp   a tangent has the layout of its primal
    vjp   the cotangent of a sharded value is sharded,
          the cotangent of a replicated value is a partial sum

Calls inside of a rule are inlined, so a second derivative differentiates the rule itself. The new
`custom_vjp` saves its operands as residuals, and its backward pass runs the forward rule again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
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
from dtrans.engine.layout import PARTIAL, ShardLayout
from dtrans.ir.dataflow import avals
from dtrans.ir.selection import values_at
from dtrans.rows.layout import RowAxis


# (jaxpr, layouts of its inputs, layouts of its outputs) -> jaxpr for one shard; None if one shard
# cannot run the jaxpr without communication
WriteRule = Callable[
    [ClosedJaxpr, Sequence[ShardLayout], Sequence[ShardLayout]], ClosedJaxpr | None
]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One `custom_jvp` or `custom_vjp` call, and its derivatives as functions.

    Attributes:
      jaxpr: a jaxpr with this call as its only equation.
      floats: indices of the operands that have derivatives (floating-point arrays).
      float_outs: indices of the outputs that have derivatives.
    """

    jaxpr: ClosedJaxpr
    floats: tuple[int, ...]
    float_outs: tuple[int, ...]

    @classmethod
    def from_eqn(cls, eqn: JaxprEqn) -> _Call:
        ins = [Var(a.aval) for a in eqn.invars]
        outs = [Var(v.aval) for v in eqn.outvars]
        jaxpr = closed([], [], ins, outs, [eqn.replace(invars=ins, outvars=outs)], bodies(eqn)[0])
        floats = tuple(i for i in _floats(ins) if i >= closed_over(eqn))
        return cls(jaxpr, floats, _floats(outs))

    @property
    def types(self) -> list[Any]:
        return _in_types(self.jaxpr)

    def _on_floats(self, operands: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return the call as a function of differentiable operands; other operands are fixed."""

        def fn(*floats: Any) -> list[Any]:
            args = list(operands)
            for i, x in zip(self.floats, floats, strict=True):
                args[i] = x
            return evaluate(self.jaxpr, *args)

        return fn

    def jvp(self, *args: Any) -> list[Any]:
        """Map operands and tangents of differentiable operands to outputs and their tangents."""
        operands, tangents = args[: len(self.types)], args[len(self.types) :]
        outs, found = jax.jvp(
            self._on_floats(operands), values_at(operands, self.floats), list(tangents)
        )
        return [*outs, *values_at(found, self.float_outs)]

    def vjp(self, *args: Any) -> list[Any]:
        """Map operands and cotangents of outputs to cotangents of differentiable operands."""
        operands, cotangents = args[: len(self.types)], args[len(self.types) :]
        outs, pull = jax.vjp(self._on_floats(operands), *values_at(operands, self.floats))
        return list(pull(_with_zeros(outs, self.float_outs, cotangents)))


def _with_zeros(
    outs: Sequence[Any], places: Collection[int], derivatives: Iterable[Any]
) -> list[Any]:
    """Return one derivative for each output: `derivatives` at the indices `places`, else zeros."""
    present = iter(derivatives)
    found = []
    for i, x in enumerate(outs):
        zero = np.zeros(np.shape(x), jax.dtypes.float0)
        found.append(next(present) if i in places else zero)
    return found


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(values) if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def call_on_pieces(
    eqn: JaxprEqn,
    primal: ClosedJaxpr,
    ins: Sequence[ShardLayout],
    outs: Sequence[ShardLayout],
    write: WriteRule,
) -> ClosedJaxpr | None:
    """Return a jaxpr for one shard with a new custom_jvp or custom_vjp call.

    The new call has the function and the derivative rule, both rewritten for one shard. If one of
    them reads the shard's index, the first input of the jaxpr is this index.

    Args:
      eqn: the call in the full program.
      primal: its function, rewritten for one shard.
      ins: layout of each operand, replicated or sharded.
      outs: layout of each output.
      write: rewrites the derivative rule for one shard.

    Returns:
      The jaxpr; None if the rule needs communication.
    """
    call = _Call.from_eqn(eqn)
    out_types = avals(eqn.outvars)
    is_jvp = eqn.primitive.name == CUSTOM_JVP
    if is_jvp:
        full_rule = small_jaxpr(call.jvp, [*call.types, *values_at(call.types, call.floats)])
        rule_ins = [*ins, *values_at(ins, call.floats)]
        rule = write(full_rule, rule_ins, [*outs, *values_at(outs, call.float_outs)])
    else:
        full_rule = small_jaxpr(call.vjp, [*call.types, *values_at(out_types, call.float_outs)])
        rule_ins = [*ins, *(_cotangent(outs[i]) for i in call.float_outs)]
        rule = write(full_rule, rule_ins, [_cotangent(ins[i]) for i in call.floats])
    if rule is None:
        return None
    types = _in_types(primal)
    # two numbers, for the function and the rule: 1 if it takes the index of the shard, else 0
    more = (len(types) - len(ins), len(_in_types(rule)) - len(rule_ins))
    skipped = max(more)
    body: Callable[..., list[Any]] = lambda *args: evaluate(primal, *args[skipped - more[0] :])
    of_rule: Callable[..., list[Any]] = lambda *args: evaluate(rule, *args[skipped - more[1] :])
    add_rule = _with_jvp if is_jvp else _with_vjp
    fn = add_rule(call, body, of_rule, skipped)
    return small_jaxpr(fn, [*[_INDEX] * skipped, *types[more[0] :]])


def _in_types(jaxpr: ClosedJaxpr) -> list[Any]:
    return avals(opened(jaxpr).invars)


_INDEX = ShapedArray((), np.dtype(np.int32))


def _cotangent(layout: ShardLayout) -> ShardLayout:
    return layout if isinstance(layout, RowAxis) else PARTIAL


def _with_jvp(
    call: _Call, body: Callable[..., list[Any]], rule: Callable[..., list[Any]], skipped: int
) -> Callable[..., Any]:
    """Return a `jax.custom_jvp` function; its first `skipped` arguments have no derivative.

    These arguments are the shard's index, if the function reads it.
    """
    fn = jax.custom_jvp(body)

    @fn.defjvp
    def apply_rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        found = rule(*primals, *(tangents[skipped + i] for i in call.floats))
        count = len(found) - len(call.float_outs)
        outs, out_tangents = found[:count], found[count:]
        return outs, _with_zeros(outs, call.float_outs, out_tangents)

    return fn


def _with_vjp(
    call: _Call, body: Callable[..., list[Any]], rule: Callable[..., list[Any]], skipped: int
) -> Callable[..., Any]:
    """Return a `jax.custom_vjp` function; its first `skipped` arguments have no derivative.

    These arguments are the shard's index, if the function reads it.
    """
    fn = jax.custom_vjp(body)

    def forward(*args: Any) -> tuple[Any, Any]:
        return fn(*args), args

    def backward(args: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        in_cotangents = rule(*args, *values_at(cotangents, call.float_outs))
        found = [None] * len(args)
        for i, cotangent in zip(call.floats, in_cotangents, strict=True):
            found[skipped + i] = cotangent
        return tuple(found)

    fn.defvjp(forward, backward)
    return fn
