"""Calls with derivative rules of users on shards: `jax.custom_jvp` and `jax.custom_vjp`.

A program that is differentiated later keeps such calls. The call and its rule are each rewritten
for one shard, and the sharded call gets the sharded rule:

    jvp   tangents have the layouts of their primals
    vjp   cotangents of sharded values are sharded; those of replicated values are partial sums

A rule is applied once: calls inside of a rule are inlined. The rule of a `custom_vjp` takes the
operands of the call, so the backward pass recomputes the residuals of its forward pass.
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
from dtrans.engine.layout import PARTIAL, ShardLayout
from dtrans.ir.dataflow import avals
from dtrans.ir.selection import values_at
from dtrans.rows.layout import RowAxis


# Rewrites a jaxpr for one shard, from the layouts of its inputs and outputs. Returns None if it
# needs full values.
WriteRule = Callable[
    [ClosedJaxpr, Sequence[ShardLayout], Sequence[ShardLayout]], ClosedJaxpr | None
]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call with a derivative rule, as a function.

    Attributes:
      jaxpr: the equation alone.
      floats: positions of operands that have derivatives.
      float_outs: positions of outputs that have derivatives.
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

    def _outs(self, operands: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return the outputs as a function of the operands that have derivatives."""

        def fn(*floats: Any) -> list[Any]:
            args = list(operands)
            for i, x in zip(self.floats, floats, strict=True):
                args[i] = x
            return evaluate(self.jaxpr, *args)

        return fn

    def jvp(self, *args: Any) -> list[Any]:
        """Return outputs and their tangents, from all operands and the tangents of float
        operands."""
        operands, tangents = args[: len(self.types)], args[len(self.types) :]
        outs, found = jax.jvp(
            self._outs(operands), values_at(operands, self.floats), list(tangents)
        )
        return [*outs, *values_at(found, self.float_outs)]

    def vjp(self, *args: Any) -> list[Any]:
        """Return the cotangents of operands, from all operands and the cotangents of outputs."""
        operands, cotangents = args[: len(self.types)], args[len(self.types) :]
        outs, pull = jax.vjp(self._outs(operands), *values_at(operands, self.floats))
        present = iter(cotangents)
        zeros = lambda x: np.zeros(np.shape(x), jax.dtypes.float0)
        return list(
            pull([next(present) if i in self.float_outs else zeros(x) for i, x in enumerate(outs)])
        )


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(values) if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def call_on_pieces(
    eqn: JaxprEqn,
    primal: ClosedJaxpr,
    ins: Sequence[ShardLayout],
    outs: Sequence[ShardLayout],
    write: WriteRule,
) -> ClosedJaxpr | None:
    """Return a jaxpr that calls the sharded function with its sharded rule.

    Returns None if the rule needs full values. The jaxpr takes the shard's index first, if the body
    or the rule reads it.

    Args:
      eqn: the call.
      primal: its body for one shard.
      ins: layouts of its operands: replicated or sharded.
      outs: layouts of its outputs.
      write: rewrites the rule for one shard.
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
    # 1 if it takes the shard's index
    more = (
        len(types) - len(ins),
        len(_in_types(rule)) - len(rule_ins),
    )
    skipped = max(more)
    body: Callable[..., list[Any]] = lambda *args: evaluate(primal, *args[skipped - more[0] :])
    of_rule: Callable[..., list[Any]] = lambda *args: evaluate(rule, *args[skipped - more[1] :])
    fn = (_with_jvp if is_jvp else _with_vjp)(call, body, of_rule, skipped)
    return small_jaxpr(fn, [*[_INDEX] * skipped, *types[more[0] :]])


def _in_types(jaxpr: ClosedJaxpr) -> list[Any]:
    return avals(opened(jaxpr).invars)


_INDEX = ShapedArray((), np.dtype(np.int32))


def _cotangent(layout: ShardLayout) -> ShardLayout:
    return layout if isinstance(layout, RowAxis) else PARTIAL


def _with_jvp(
    call: _Call, body: Callable[..., list[Any]], rule: Callable[..., list[Any]], skipped: int
) -> Callable[..., Any]:
    """Return a function of `skipped` indices and the operands of a call, with its jvp rule."""
    fn = jax.custom_jvp(body)

    @fn.defjvp
    def apply_rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        found = rule(*primals, *(tangents[skipped + i] for i in call.floats))
        count = len(found) - len(call.float_outs)
        outs, out_tangents = found[:count], iter(found[count:])
        zeros = [np.zeros(np.shape(x), jax.dtypes.float0) for x in outs]
        return outs, [
            next(out_tangents) if i in call.float_outs else zero for i, zero in enumerate(zeros)
        ]

    return fn


def _with_vjp(
    call: _Call, body: Callable[..., list[Any]], rule: Callable[..., list[Any]], skipped: int
) -> Callable[..., Any]:
    """Return a function of `skipped` indices and the operands of a call, with its vjp rule."""
    fn = jax.custom_vjp(body)

    def forward(*args: Any) -> tuple[Any, Any]:
        return fn(*args), args

    def backward(args: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        in_cotangents = iter(rule(*args, *values_at(cotangents, call.float_outs)))
        return tuple(
            next(in_cotangents) if i - skipped in call.floats else None for i in range(len(args))
        )

    fn.defvjp(forward, backward)
    return fn
